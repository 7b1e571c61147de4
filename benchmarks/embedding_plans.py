"""Our operator by a plan that is tuned, by one of classes that are tuned each alone, and without a plan."""

from __future__ import annotations

import functools

from torch import Tensor

from benchmarks.embedding_cases import Batch, Method, Ours, Workload
from benchmarks.embedding_models import Features, configs
from jagged.modules import ScheduledEmbeddingBagCollection
from jagged.ops import embedding_bags
from jagged.ops.embedding_bag.optimizers import Kind
from jagged.tuning import Timer, tune

# What candidates are timed by; None: replays of graphs. Tests have no GPU.
TIMER: Timer | None = None


class Planned(Ours):
    """Our operator with a plan for the first batch.

    Args:
        w: the workload.
        kind: of the optimizer.
        alone: tune each class with no others in the launch; None: no plan.
    """

    def __init__(self, w: Workload, kind: Kind | None, alone: bool | None) -> None:
        super().__init__(w, kind)
        self.schedules = None
        self.facts: dict[str, float] = {}
        if alone is None:
            return
        # Tables of random numbers.
        module = ScheduledEmbeddingBagCollection(configs(w), device=w.device)
        tuned = tune(module, [Features(w).new()], alone=alone, backward=False, timer=TIMER, progress=False)
        names = [name for of_part in module.feature_names() for name in of_part]
        self.schedules = tuned.plan.schedules(w.layout, w.device, names=names)
        self.facts = {
            "tune_seconds": tuned.seconds,
            "classes": len(tuned.choices),
            "planned_features": len(tuned.plan.features),
            "programs": tuned.plan.programs,
        }

    def forward(self, batch: Batch) -> Tensor:
        return embedding_bags(self.weights, self.w.layout, *batch, optimizer=self.optimizer, schedules=self.schedules)


def _make(alone: bool | None, w: Workload, kind: Kind | None) -> Planned:
    return Planned(w, kind, alone)


# By the names that results have: ours first, then classes tuned alone, then no plan.
PLANS: dict[str, Method] = {
    name: Method(functools.partial(_make, alone), ("forward",))
    for name, alone in (("jagged", False), ("alone", True), ("cost_model", None))
}
