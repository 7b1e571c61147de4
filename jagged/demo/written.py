"""What each part of the demo leaves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jagged.training.checkpoint import latest_checkpoint


@dataclass(frozen=True)
class Written:
    """A run of the demo.

    Attributes:
        training_seconds: of training and validation.
        directory: the run.
        pictures: files in it, the page first.
    """

    training_seconds: float
    directory: Path
    pictures: tuple[Path, ...]

    @property
    def checkpoint(self) -> Path:
        """The newest checkpoint."""
        return latest_checkpoint(self.directory / "checkpoints") or self.directory

    @property
    def metrics(self) -> Path:
        """The file with all figures."""
        return self.directory / "metrics.json"
