"""Rare ids as unseen ones: which, how often, and always the same ones, in whatever batch and process."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch

from jagged.data import Dataset
from jagged.data.table_splits import Split


def split() -> Split:
    """Half of the items and tags come once; there are the candidate, a list of it, and a history."""
    rng = np.random.default_rng(0)
    rows = 400
    items = [f"once{i}" if i % 2 else f"i{i % 9}" for i in range(rows)]
    table = pa.table(
        {
            "request": np.arange(rows) // 2,
            "user": [f"u{i // 2 % 20}" for i in range(rows)],
            "item": items,
            "time": np.arange(rows) // 2,
            "tags": [[f"t{i}", "often"] for i in range(rows)],
            "click": rng.integers(2, size=rows),
        }
    )
    words = {"request": "request", "user": "user", "candidate": "item", "time": "time", "label": "click"}
    dataset = Dataset.from_table(table, history="events", candidate_columns="tags", progress=False, **words)
    return dataset.split(by="time", valid=0.1, test=0.1)


def found(loader: object) -> dict[str, torch.Tensor]:
    """Ids by key, in the order of the part, whatever the batches."""
    batches = list(loader)  # type: ignore[call-overload]
    keys = {"item": "features", "history.item": "features", "tags": "candidates"}
    return {key: torch.cat([getattr(batch, of)[key].values() for batch in batches]) for key, of in keys.items()}


def test_a_share_of_rare_ids_becomes_unseen_in_training() -> None:
    of = split()
    plain, drawn = found(of.train.loader(batch_size=16)), found(of.train.loader(batch_size=16, unseen=0.25, seed=3))
    for key, table in (("item", "item"), ("history.item", "item"), ("tags", "tags")):
        counts = torch.from_numpy(of.encoders[table].counts)
        rare = (counts[plain[key]] <= 1) & (plain[key] >= 2)
        assert 0 < rare.sum() < len(rare)
        # What training has several times, what is missing and what is unseen already stay.
        assert torch.equal(drawn[key][~rare], plain[key][~rare])
        changed = drawn[key][rare] != plain[key][rare]
        assert set(drawn[key][rare][changed].tolist()) == {1}
        count = int(rare.sum())
        places = count if key != "history.item" else len(set(plain[key][rare].tolist()))
        assert abs(float(changed.double().mean()) - 0.25) < 5 * (0.25 * 0.75 / places) ** 0.5
    everything = found(of.train.loader(batch_size=16, unseen=1.0))
    counts = torch.from_numpy(of.encoders["item"].counts)
    assert set(everything["item"][(counts[plain["item"]] <= 1) & (plain["item"] >= 2)].tolist()) == {1}


def test_draws_are_those_of_seed_and_epoch_alone() -> None:
    of = split()

    def drawn(epoch: int = 0, **options: int) -> dict[str, torch.Tensor]:
        loader = of.train.loader(**{"batch_size": 16, "unseen": 0.5, "seed": 1, **options})
        loader.set_position(epoch, 0)
        result = found(loader)
        loader.close()
        return result

    first = drawn()
    for other in (drawn(), drawn(batch_size=5), drawn(num_workers=2)):
        assert all(torch.equal(other[key], value) for key, value in first.items())
    assert not torch.equal(drawn(seed=2)["item"], first["item"])
    assert not torch.equal(drawn(epoch=1)["item"], first["item"])
    # Columns of one row are drawn apart.
    rare = {key: (value == 1).double() for key, value in drawn(unseen=0.5).items()}  # type: ignore[arg-type]
    assert not torch.equal(rare["item"][1::2], rare["tags"].view(-1, 2)[1::2, 0])


@pytest.mark.parametrize("share", [-0.1, 1.5])
def test_a_share_out_of_range_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match=r"^unseen: got -?[0-9.]+, expected a share from 0 to 1$"):
        split().train.loader(batch_size=4, unseen=share)
