"""What a package of a run on events holds: the best items of users."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from jagged import artifacts
from jagged.config import ConfigError
from jagged.data import SequenceBatch
from jagged.data.vocabulary import FIRST
from jagged.models import best_items_tensors, export_best_items, name_of
from jagged.models.item_sequences import FEATURE, TIMES
from jagged.runs.packages import most_samples
from jagged.runs.run import Run
from jagged.scoring import rank_catalogue

if TYPE_CHECKING:
    from torch.export import ExportedProgram

# Of the items that most users had, as many are told, for users without events.
_POPULAR = 100


class ItemPackage:
    """Best items of users; see `jagged.runs.exporting.Packed`.

    Args:
        run: on the CPU, with its events.
        k: items for each user.
        tolerance: how far scores may be from the model's, absolute and relative.

    Raises:
        ConfigError: the run holds no events, or none for validation, or `k` is out of range.
    """

    def __init__(self, run: Run, k: int, tolerance: tuple[float, float]) -> None:
        if not 1 <= k <= len(run.items):
            raise ConfigError(f"k: got {k}, expected 1 to {len(run.items):,}, the size of the catalogue")
        self.run, self.k, self.tolerance = run, k, tolerance
        self.part, self.name = run.split(run.read()).valid, name_of(run.model)
        if not len(self.part):
            raise ConfigError(f"{run.directory}: its data hold no user for validation, on whom a package is compared")

    def batch(self, count: int, max_history: int | None = None) -> SequenceBatch:
        """So many held-out users, of a small part several times, with the last events alone; as many as are scored at a time."""
        part, most = self.part, self.run.model.config["max_seq_len"]
        longest = most if max_history is None else max_history
        count = most_samples(count, most, len(self.run.items))
        chosen = torch.arange(count) % len(part)
        assert part.target is not None
        end = part.end[chosen]
        start = torch.maximum(part.start[chosen], end - longest)
        some = replace(part, user=part.user[chosen], start=start, end=end, target=part.target[chosen])
        return next(iter(self.run.loader(some, with_viewed=True, batch_size=count)))

    def program(self, batch: SequenceBatch) -> ExportedProgram:
        """The program, traced with a batch."""
        return export_best_items(self.run.model, self.k, batch.features, _viewed(batch))

    def tensors(self, batch: SequenceBatch) -> dict[str, Tensor]:
        """What it reads of a batch."""
        return best_items_tensors(self.run.model, batch.features, _viewed(batch))

    def by_model(self, batch: SequenceBatch) -> Mapping[str, Tensor]:
        """What the model gives by itself."""
        viewed = _viewed(batch)
        hidden, weight = self.run.model.final_hidden(batch.features), self.run.model.item_weight.detach()
        ranked = rank_catalogue(hidden, weight, self.k, viewed=(viewed.values(), viewed.offsets()), filter_viewed=(True,))[0]
        return {"items": ranked.items, "scores": ranked.scores}

    def told(self, batch: SequenceBatch) -> dict[str, Any]:
        """How much a batch asks for."""
        return {"users": len(batch), "events": int(batch.features[FEATURE].lengths().sum())}

    def difference(self, found: Mapping[str, Tensor], batch: SequenceBatch) -> float:
        """The largest difference of scores, place by place, and of each item's score from the model's for it.

        Raises:
            ArtifactError: one is too large, or an item comes twice.
        """
        absolute, relative = self.tolerance
        items, scores = found["items"], found["scores"]
        weight = self.run.model.item_weight.detach().float()
        own = torch.einsum("bd,bkd->bk", self.run.model.final_hidden(batch.features).float(), weight[items.clamp(min=0)])
        own = own.masked_fill(items < 0, -torch.inf)
        for expected in (self.by_model(batch)["scores"], own):
            if not torch.allclose(scores, expected, rtol=relative, atol=absolute):
                apart = float((scores - expected).nan_to_num(torch.inf, torch.inf, torch.inf).abs().max())
                raise artifacts.ArtifactError(
                    f"items: scores of the package are {apart:.2g} from the model's, expected {absolute} and {relative} of them; "
                    "nothing was written. Report it with the output of `jagged doctor`"
                )
        ordered = items.sort(1).values
        if bool(((ordered.diff() == 0) & (ordered[:, 1:] >= 0)).any()):
            raise artifacts.ArtifactError(
                "items: the package gives a user one item twice; nothing was written. Report it with the output of "
                "`jagged doctor`"
            )
        return float((scores - own).nan_to_num().abs().max())

    def described(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """What who calls the package needs to know of it."""
        run, model = self.run, self.run.model
        had = run.train_counts().users_per_item
        # In the order in which the program reads them.
        keys = {FEATURE: FEATURE, **({TIMES: None} if model.takes_times else {}), **{name: name for name in model.event_features}}
        return {
            "kind": "items",
            "k": self.k,
            "keys": {"features": keys, "exclude": {FEATURE: FEATURE}},
            "max_history": model.config["max_seq_len"],
            "times": run.time_unit,
            # Rows of the table, the item that most users had first.
            "popular": had.argsort(descending=True, stable=True)[:_POPULAR].tolist(),
        }

    def tables(self, aside: Path) -> dict[str, dict[str, Any]]:
        """Write the ids of items and side features; by table how an id becomes a row."""
        found = {}
        for place, (name, ids) in enumerate({FEATURE: self.run.items, **self.run.event_values}.items()):
            first = 0 if name == FEATURE else FIRST
            ids.save(aside / f"ids-{place}.arrow")
            found[name] = {
                "encoding": "vocabulary", "rows": len(ids) + first, "first": first, "ids": f"ids-{place}.arrow"
            }  # fmt: skip
        return found


def _viewed(batch: SequenceBatch) -> Any:
    """The items of users' histories, which they must not get."""
    assert batch.viewed is not None
    return batch.viewed[FEATURE]
