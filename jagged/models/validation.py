"""The check of what a model is called with, before any kernel meets it."""

from __future__ import annotations

from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from jagged.ops import validate_ids, validate_offsets, values_are_trusted


def validate_features(features: KeyedJaggedTensor, key: str, num_rows: int, may_be_empty: bool = False) -> None:
    """Check one feature's ids against a table of `num_rows` rows, and its offsets; nothing inside `jagged.ops.trust_values`.

    Raises:
        ValueError: no samples, an id that no row of the table has, or offsets that do not fit the ids.
    """
    if not may_be_empty and not features.stride():
        raise ValueError("features: got no samples, expected at least one; leave an empty batch out")
    if values_are_trusted():
        return
    feature = features[key]
    ids = feature.values()
    if not ids.is_meta:
        validate_ids(ids, num_rows, name=f"features[{key!r}].values()")
        validate_offsets(feature.offsets(), ids.shape[0], name=f"features[{key!r}].offsets()")
