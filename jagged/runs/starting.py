"""What runs have in common before their first step."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

from jagged import artifacts
from jagged.config import ConfigError
from jagged.config.options import LoopOptions, Rewired
from jagged.data import DataError
from jagged.models.pretrained import CONFIG
from jagged.modules import GroupSparseHead
from jagged.training.callbacks import Callback
from jagged.training.errors import TrainingError
from jagged.training.processes import Processes
from jagged.training.rewiring import Rewiring


def data_folder(place: Path, processes: Processes, closing: ExitStack, *, dry_run: bool) -> Path:
    """Where the run's data are kept: `place`, or of a dry run a folder that all processes share and that goes with `closing`."""
    if not dry_run:
        return place
    aside = Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="jagged-"))) / place.name
    return Path(processes.all(str(aside))[0])


@contextmanager
def nothing_left_of_a_false_start(directory: Path, processes: Processes, *names: str) -> Iterator[None]:
    """Remove folders of these names where the run ends before it begins: somebody mends an option and tries again."""
    were_there = {name for name in names if (directory / name).exists()}
    try:
        yield
    except (DataError, ConfigError, TrainingError):
        if processes.is_first and not (directory / CONFIG).exists():
            for name in names:
                if name not in were_there and (directory / name).is_dir():
                    artifacts.remove(directory / name)
        raise


def rewiring(options: Any, head: GroupSparseHead | None, training: LoopOptions, batches: int) -> list[Callback]:
    """What gives groups of labels new inputs while a run goes, as the options of its head say; nothing where they say so.

    Args:
        options: of the head.
        head: that is trained.
        training: how long.
        batches: of an epoch.
    """
    if not isinstance(options, Rewired) or not options.rewire_fraction or head is None or not head.num_groups:
        return []
    steps = training.max_epochs * -(-batches // training.accumulate)
    until = int(options.rewire_until * steps)
    by: Literal["random", "gradient"] = getattr(options, "rewire_by", "random")
    return [Rewiring(options.rewire_fraction, every=options.rewire_every, until=until, by=by)]
