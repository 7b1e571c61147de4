"""Figures of rows that have a score and a label each: over all of them, by user, by request and by slice.

`metrics.py` has `PointwiseMetrics`, which takes rows and gives figures. `storage.py` keeps and sorts rows, `sums.py` adds up;
`pairs.py` computes AUC, `probabilities.py` logloss and calibration, `requests.py` what ranks the candidates of a request.
"""

from jagged.pointwise.metrics import PointwiseMetrics
from jagged.pointwise.probabilities import CalibrationBin, Histogram

__all__ = ["CalibrationBin", "Histogram", "PointwiseMetrics"]
