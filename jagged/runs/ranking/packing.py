"""What a package of a run on a table holds: scores of requests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from jagged import artifacts
from jagged.config import ConfigError
from jagged.data.table_batches import Batch
from jagged.models import export_scores, name_of, scoring_tensors
from jagged.models.tasks import REQUEST_LOSSES
from jagged.runs.packages import most_samples
from jagged.runs.ranking.run import RankingRun

if TYPE_CHECKING:
    from torch.export import ExportedProgram


class RequestPackage:
    """Scores of requests; see `jagged.runs.exporting.Packed`.

    Args:
        run: on the CPU, with its table.
        tolerance: how far logits may be from the model's, absolute and relative.

    Raises:
        ConfigError: the run holds no table, or no row of it for validation.
    """

    def __init__(self, run: RankingRun, tolerance: tuple[float, float]) -> None:
        self.run, self.part, self.tolerance = run, run.part("valid"), tolerance
        if not len(self.part):
            raise ConfigError(f"{run.directory}: its table holds no row for validation, on which a package is compared")
        self.name = name_of(run.model)

    def batch(self, count: int, max_history: int | None = None) -> Batch:
        """So many held-out requests, of a small part several times, with drawn candidates where the run drew some."""
        data = self.run.config.data
        drawing = data.drawing()
        count = most_samples(count, data.max_history)
        places = np.arange(count) % (len(self.part.rows) if drawing else len(self.part))
        return self.part.gather(places, max_history=data.max_history if max_history is None else max_history, **drawing)

    def program(self, batch: Batch) -> ExportedProgram:
        """The program, traced with a batch."""
        return export_scores(self.run.model, batch)

    def tensors(self, batch: Batch) -> dict[str, Tensor]:
        """What it reads of a batch."""
        return scoring_tensors(self.run.model, batch)

    def by_model(self, batch: Batch) -> Mapping[str, Tensor]:
        """What the model gives by itself."""
        return self.run.model.logits(batch)

    def told(self, batch: Batch) -> dict[str, Any]:
        """How much a batch asks for."""
        return {"requests": len(batch), "candidates": batch.rows.numel()}

    def difference(self, found: Mapping[str, Tensor], batch: Batch) -> float:
        """The largest difference of logits.

        Raises:
            ArtifactError: one is too large.
        """
        largest, (absolute, relative) = 0.0, self.tolerance
        for task, logits in self.by_model(batch).items():
            if not torch.allclose(found[task], logits, rtol=relative, atol=absolute):
                apart = float((found[task] - logits).abs().max())
                raise artifacts.ArtifactError(
                    f"{task}: logits of the package are {apart:.2g} from the model's, expected {absolute} and {relative} of "
                    "them; nothing was written. Report it with the output of `jagged doctor`"
                )
            largest = max(largest, float((found[task] - logits).abs().max()) if logits.numel() else 0.0)
        return largest

    def described(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """What who calls the package needs to know of it."""
        run, model, log = self.run, self.run.model, self.part.dataset.events
        columns = {
            name: list(getattr(model.inputs, name)) for name in ("request_numbers", "candidate_numbers", "history_numbers")
        }
        columns["history_labels"] = [] if log is None or not model.inputs.history_labels else list(log.labels)
        return {
            "kind": "scores",
            # A score orders the candidates of one request, and is no log-odds.
            "tasks": {task: "score" if model.losses[task] in REQUEST_LOSSES else "logit" for task in model.tasks},
            "keys": {name: _keys(model, name) for of in tensors if (name := of.removesuffix("_lengths")) != of},
            "columns": {name: of for name, of in columns.items() if name in tensors},
            # What stands for a missing number.
            "means": {name: of.mean for name, of in run.encoders.statistics.items()},
            "max_history": run.config.data.max_history,
            "times": run.opened.split["time_kind"],
        }

    def tables(self, aside: Path) -> dict[str, dict[str, Any]]:
        """Write the ids of tables that have some; by table how an id becomes a row."""
        found = {}
        for place, (name, encoder) in enumerate(self.run.encoders.items()):
            file = None if encoder.ids is None else f"ids-{place}.arrow"
            if encoder.ids is not None:
                encoder.ids.save(aside / f"ids-{place}.arrow")
            found[name] = {"encoding": encoder.encoding, "rows": encoder.size, "seed": encoder.seed, "ids": file}
        return found


def _keys(model: Any, name: str) -> dict[str, str | None]:
    """The keys of a keyed input in their order, each with its table; those of lists of numbers have none."""
    inputs = model.inputs
    groups = [inputs.features, inputs.candidate_ids, inputs.candidate_lists, inputs.history, inputs.list_histories]
    named = {key: table for group in groups for key, table in group.items()} if name == "features" else getattr(inputs, name)
    return {key: named[key] if isinstance(named, Mapping) else None for key in inputs.keys(name)}
