"""Score by a package of a run in its model's place."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jagged import artifacts
from jagged.config import ConfigError
from jagged.models.pretrained import WEIGHTS

#: The compiled program in a package's directory.
PROGRAM = "scores.pt2"
# Pairs of padded events, and scores of a tile of the catalogue, that a call may have: some hundred megabytes with all copies.
_PAIRS, _CELLS, _TILE, _TILES = 2**23, 2**24, 2**16, 16


class Package:
    """A package that `jagged export` wrote, opened to score batches of the run that it was made of.

    Args:
        directory: the package's.
        run: the run's directory.
        kind: "scores" or "items".

    Attributes:
        content: what its manifest says.

    Raises:
        ConfigError: it is none, holds something else, was made of other weights or by another PyTorch, or is for a GPU that is
            not there.
        ArtifactError: a file of it is damaged.
    """

    def __init__(self, directory: str | os.PathLike[str], run: str | os.PathLike[str], kind: str) -> None:
        directory = Path(directory)
        # Who compiled the program in C++ may have left it there.
        self.content: Mapping[str, Any] = artifacts.verify(directory, exact=False).content
        found = self.content.get("kind")
        if found != kind:
            held = "no package" if found not in ("scores", "items") else f"a package of {found}"
            raise ConfigError(f"package: {directory} holds {held}, expected one of {kind}, as `jagged export` makes of this run")
        if self.content["weights"] != weights_of(run):
            raise ConfigError(f"package: {directory} was made of other weights than those of {run}; make one by `jagged export`")
        if self.content["torch"] != torch.__version__:
            raise ConfigError(
                f"package: {directory} was made by PyTorch {self.content['torch']}, expected {torch.__version__}, which is here; "
                "make it again by `jagged export`"
            )
        _check_gpu(directory, self.content)
        self._score = torch._inductor.aoti_load_package(str(directory / PROGRAM))  # type: ignore[no-untyped-call]

    def __call__(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the program gives, where the tensors are; it reads them where the package scores."""
        device = next(iter(tensors.values())).device
        with torch.no_grad():
            found: dict[str, Tensor] = self._score(**{name: of.to(self.content["device"]) for name, of in tensors.items()})
        return {name: of.to(device) for name, of in found.items()}


def capability() -> str:
    """The compute capability of the GPU at hand, as "9.0"."""
    return ".".join(map(str, torch.cuda.get_device_capability()))


def _check_gpu(directory: Path, content: Mapping[str, Any]) -> None:
    if content["device"] == "cpu":
        return
    made_for = content["compute_capability"]
    if not torch.cuda.is_available():
        raise ConfigError(
            f"package: {directory} is for a GPU of compute capability {made_for}, but torch sees none; run `jagged doctor`, or "
            "make one for the CPU by `jagged export`"
        )
    if (here := capability()) != made_for:
        raise ConfigError(
            f"package: {directory} is for GPUs of compute capability {made_for}, got one of {here}; make it again by `jagged "
            "export` on such a GPU"
        )


def weights_of(run: str | os.PathLike[str]) -> str:
    """What tells a run's weights from others'."""
    digest: str = artifacts.read_manifest(Path(run)).files[WEIGHTS]["sha256"]
    return digest


def most_samples(wanted: int, longest: int, catalogue: int = 0) -> int:
    """How many samples a package scores at a time: `wanted`, or fewer, so that what it pads and ranks stays in bounds."""
    by_pairs = _PAIRS // max(longest, 1) ** 2
    by_cells = _CELLS // min(max(_TILE, catalogue // _TILES), max(catalogue, 1))
    return max(1, min(wanted, by_pairs, by_cells))
