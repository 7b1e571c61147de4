"""The check of what a model is called with, before any kernel meets it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from jagged.ops import validate_ids, validate_offsets, values_are_trusted


def validate_features(
    features: KeyedJaggedTensor,
    key: str,
    num_rows: int,
    may_be_empty: bool = False,
    times: str | None = None,
    others: Mapping[str, int] | None = None,
) -> None:
    """Check one feature's ids against a table of `num_rows` rows, its offsets, and what else its rows have.

    That is times under the key `times`, and by key `others`, ids of tables of so many rows.

    Values are not looked at inside `jagged.ops.trust_values`.

    Raises:
        ValueError: no samples, an id that no row of the table has, offsets that do not fit the ids, no times or others, or such
            with other lengths.
    """
    others = others or {}
    if times is not None and times not in list(features.keys()):
        raise ValueError(
            f"features: got the keys {list(features.keys())}, expected {times!r}, too, the time of each row of {key!r}; the "
            "model was built with num_time_buckets"
        )
    for name in others:
        if name not in list(features.keys()):
            raise ValueError(
                f"features: got the keys {list(features.keys())}, expected {name!r}, too, a value for each row of {key!r}; the "
                "model was built with event_features"
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
        for name, count in others.items():
            if not torch.equal(features[name].lengths(), feature.lengths()):
                raise ValueError(f"features[{name!r}]: expected a value for each row of {key!r}, got samples of other lengths")
            validate_ids(features[name].values(), count, name=f"features[{name!r}].values()")
