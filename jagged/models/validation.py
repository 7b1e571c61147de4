"""The check of what a model is called with, before any kernel meets it."""

from __future__ import annotations

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from jagged.ops import validate_ids, validate_offsets, values_are_trusted


def validate_features(
    features: KeyedJaggedTensor, key: str, num_rows: int, may_be_empty: bool = False, times: str | None = None
) -> None:
    """Check one feature's ids against a table of `num_rows` rows, its offsets, and the times of its rows under the key `times`.

    Values are not looked at inside `jagged.ops.trust_values`.

    Raises:
        ValueError: no samples, an id that no row of the table has, offsets that do not fit the ids, no times, or times with other
            lengths.
    """
    if times is not None and times not in list(features.keys()):
        raise ValueError(
            f"features: got the keys {list(features.keys())}, expected {times!r}, too, the time of each row of {key!r}; the "
            "model was built with num_time_buckets"
        )
    if not may_be_empty and not features.stride():
        raise ValueError("features: got no samples, expected at least one; leave an empty batch out")
    if values_are_trusted():
        return
    feature = features[key]
    ids = feature.values()
    if not ids.is_meta:
        validate_ids(ids, num_rows, name=f"features[{key!r}].values()")
        validate_offsets(feature.offsets(), ids.shape[0], name=f"features[{key!r}].offsets()")
        if times is not None and not torch.equal(features[times].lengths(), feature.lengths()):
            raise ValueError(f"features[{times!r}]: expected a time for each row of {key!r}, got samples of other lengths")
