"""Embedding bags as Triton kernels: all features of a batch in one launch, each by a schedule of its own.

`launch.py` says which kernels run. Forward is `schedules.py`, which a program's lanes and registers and the map of the work come
from, and `forward.py`. Backward brings the lookups of each row together, by counting (`counting.py`, `rows.py`) or by a sort
(`sorting.py`, `merging.py`); what becomes of a row's sum is in `updates.py`. `columns.py` names what kernels read of a layout.
"""
