"""What a run that ends before it begins leaves."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from jagged import artifacts
from jagged.config import ConfigError
from jagged.data import DataError
from jagged.models.pretrained import CONFIG
from jagged.training.errors import TrainingError
from jagged.training.processes import Processes


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
