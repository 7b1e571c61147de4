"""Make of a run a package that scores without jagged: the function behind `jagged export`."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import shutil
import sys
import tempfile
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from jagged import __version__, artifacts
from jagged.artifacts.errors import reason
from jagged.config import ConfigError
from jagged.data.moving import moved
from jagged.evaluation import NOT_FINITE, EvaluationError
from jagged.models import write_package
from jagged.models.pretrained import ITEMS
from jagged.ops.decompositions import with_kernels
from jagged.runs.labels.run import is_label_run
from jagged.runs.package_programs import programs_for
from jagged.runs.packages import PROGRAM, capability, weights_of
from jagged.runs.packing import ItemPackage
from jagged.runs.ranking.packing import RequestPackage
from jagged.runs.ranking.run import DATASET, RankingRun
from jagged.runs.run import Run, find_device

if TYPE_CHECKING:
    from torch.export import ExportedProgram

#: A batch in a package's directory.
EXAMPLE = "example.pt"
# Requests or users that the program is traced with, and those that it is compared on: one, fewer, and more, with histories and
# without.
_TRACED, _COMPARED, _SHOWN = 20, ((1, None), (7, None), (100, None), (3, 0)), 5
# How far the package's scores may be from the model's: sums in another order.
_RELATIVE, _ABSOLUTE = 1e-3, 1e-4
# Timed calls, and seconds after which no more begin.
_CALLS, _SECONDS = 200, 5.0


class Packed(Protocol):
    """What is packed of a run: batches that were held out, the program that scores them, and what is told of it.

    Attributes:
        name: of the model.
    """

    name: str | None

    def batch(self, count: int, max_history: int | None = None) -> Any:
        """So many held-out requests or users, or as many as are scored at a time, with at most so many events."""

    def program(self, batch: Any) -> ExportedProgram:
        """The program, traced with a batch."""

    def tensors(self, batch: Any) -> dict[str, Tensor]:
        """What it reads of a batch."""

    def by_model(self, batch: Any) -> Mapping[str, Tensor]:
        """What the model gives by itself."""

    def told(self, batch: Any) -> dict[str, Any]:
        """How much a batch asks for."""

    def difference(self, found: Mapping[str, Tensor], batch: Any) -> float:
        """The largest difference of what the package found from what the model gives; an ArtifactError if it is too large."""

    def described(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """What who calls the package needs to know of it."""

    def tables(self, aside: Path) -> dict[str, dict[str, Any]]:
        """Write the ids of tables that have some; by table how an id becomes a row."""


def export(
    directory: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    k: int | None = None,
    device: str = "cpu",
    progress: bool = True,
) -> Path:
    """Make of a run a package that scores batches on a CPU, or a GPU, where jagged is not installed.

    Of a run on a table it gives the logits of requests' candidates; of a run on events the best items of users.

    The new directory holds `scores.pt2`, compiled by AOTInductor for processors or GPUs like this machine's and for this PyTorch;
    `manifest.json`, which tells inputs by name, with their dtypes, sizes, keys and columns, and the tasks; `ids-*.arrow`, by
    which ids become rows of tables; `example.pt`, a batch; `score.py` and `score.cpp`, which score that. Sizes may be others in
    each call: there is one request, or user, at least. Before anything is written, the package has scored held-out requests or
    users in other numbers than it was traced with, and what it gave was the model's.

    Args:
        directory: a run's directory, with the table or events of its training (`dataset/`).
        output: a new directory; it appears whole or not at all.
        k: of a run on events: items for each user, 10 by default.
        device: where the package scores: "cpu", "cuda", or "auto" for the GPU where there is one.
        progress: tell what is done.

    Returns:
        The new directory.

    Raises:
        ConfigError: an output that is there, an unknown device or a GPU that is not there, no C++ compiler or one that cannot
            compile, no Triton or headers of CUDA for a GPU, a run without its data or on sets of labels, `k` of a run on a table
            or out of range, or a model that cannot be exported.
        CheckpointError: the directory holds no model, or a file of it is damaged.
        ArtifactError: the package cannot be written, or does not score as the model does.
        EvaluationError: the model's scores are NaN or infinite.
    """
    output = Path(output)
    if os.path.lexists(output):
        raise ConfigError(f"output: {output} is there, expected a new directory; give another name, or remove it")
    if is_label_run(directory):
        raise ConfigError(f"{directory}: a run on sets of labels, expected one on events or on a table; only these are exported")
    where = find_device(device)
    _check_compiler(where)
    packed = _packed(directory, k, where.type)
    with torch.no_grad():
        _check_finite(directory, packed.by_model(moved(packed.batch(_TRACED), where)))
    tell: Callable[[str], None] = functools.partial(print, file=sys.stderr) if progress else lambda said: None
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder, PROGRAM)
        tell(f"compiling {packed.name} for the {'CPU' if where.type == 'cpu' else 'GPU'}, which takes a minute or more")
        _compile(directory, packed, package, where)
        tell("comparing its scores with the model's")
        example = packed.tensors(packed.batch(_SHOWN))
        content = {
            "weights": weights_of(directory),
            **_described(packed, example, where),
            **_compared(packed, package, where),
        }
        tell(_loss(content["milliseconds"]))
        with artifacts.writing(output, "give another output", artifacts.ArtifactError), artifacts.new_directory(output) as aside:
            shutil.copyfile(package, aside / PROGRAM)
            torch.save(example, aside / EXAMPLE)
            for name, text in programs_for(where.type).items():
                (aside / name).write_text(text)
            content["tables"] = packed.tables(aside)
            artifacts.write_manifest(aside, sorted(os.listdir(aside)), content)
    return output


def _check_finite(directory: str | os.PathLike[str], found: Mapping[str, Tensor]) -> None:
    """Refuse a model that has lost its numbers, which no package could be compared with."""
    # -inf stands where fewer items are left than were asked for.
    if any(bool((of.isnan() | (of == torch.inf)).any()) for of in found.values()):
        raise EvaluationError(f"{directory}: {NOT_FINITE}")


def _packed(directory: str | os.PathLike[str], k: int | None, device: str) -> Packed:
    if (Path(directory) / ITEMS).is_file():
        run = Run.open(directory, device=device)
        _check_data(directory)
        return ItemPackage(run, 10 if k is None else k, (_ABSOLUTE, _RELATIVE))
    ranking = RankingRun.open(directory, device=device)
    _check_data(directory)
    if k is not None:
        raise ConfigError(f"k: {directory} is a run on a table, whose packages score all candidates; leave it out")
    return RequestPackage(ranking, (_ABSOLUTE, _RELATIVE))


def _check_data(directory: str | os.PathLike[str]) -> None:
    if not (Path(directory) / DATASET).is_dir():
        raise ConfigError(
            f"{directory}: holds no data (dataset/), on which a package is compared with the model; export the directory that "
            "`jagged train` wrote"
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave out what PyTorch and TorchRec say to each other while a program is traced."""
    root = logging.getLogger()

    def is_ours(record: logging.LogRecord) -> bool:
        return "KJT to_dict" not in record.getMessage()

    root.addFilter(is_ours)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        root.removeFilter(is_ours)


def _check_compiler(device: torch.device) -> None:
    """Refuse where a package cannot be compiled, before anything is read."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise ConfigError("export: found no C++ compiler, expected g++ or clang++; install one, or name it in CXX") from None
    if device.type == "cpu":
        return
    if importlib.util.find_spec("triton") is None:
        raise ConfigError("export: found no Triton, expected it for a package on a GPU; install it, or use device=cpu")
    from torch.utils.cpp_extension import include_paths

    if torch.version.cuda and not any(Path(folder, "cuda.h").is_file() for folder in include_paths("cuda")):
        raise ConfigError(
            "export: found no headers of CUDA (cuda.h), expected its toolkit's for a package on a GPU; install it, and name its "
            "folder in CUDA_HOME, or use device=cpu"
        )


def _compile(directory: str | os.PathLike[str], packed: Packed, package: Path, device: torch.device) -> None:
    """Write the package.

    Raises:
        ConfigError: PyTorch, or the compiler, says that it cannot.
    """
    from torch._inductor.exc import CppCompileError, InductorError

    try:
        with _quiet(), nullcontext() if device.type == "cpu" else with_kernels():
            write_package(packed.program(moved(packed.batch(_TRACED), device)), package)
    except (CppCompileError, InductorError) as error:
        lines = [line.strip() for line in str(error).splitlines()]
        said = next((line for line in lines if " error: " in line), lines[0])
        cure = "install another compiler with OpenMP, and name it in CXX"
        if not isinstance(error, CppCompileError) and device.type != "cpu":
            cure = "make a package for the CPU by device=cpu"
        raise ConfigError(f"export: the package could not be compiled: {artifacts.shown(said, 200)}; {cure}") from error
    except (ValueError, OSError) as error:
        raise ConfigError(f"{directory}: the model could not be exported: {reason(error)}") from error
    _check_runtime(package)


def _check_runtime(package: Path) -> None:
    """Refuse a program with a C++ library of its own beside PyTorch's: both change what is one, which ends the process."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    if sys.platform != "linux":
        return
    with zipfile.ZipFile(package) as archive:
        programs = [archive.read(name) for name in archive.namelist() if name.endswith(".so")]
    if all(b"libstdc++.so" in program or b"libc++.so" in program for program in programs):
        return
    raise ConfigError(
        f"export: {get_cpp_compiler()} put the C++ library into the package, which ends the process that loads it; expected a "
        "compiler that links the shared one, libstdc++.so; name one in CXX"
    )


def _described(packed: Packed, example: Mapping[str, Tensor], device: torch.device) -> dict[str, Any]:
    """What every package tells, and what is this one's."""
    dtypes = {name: str(of.dtype).removeprefix("torch.") for name, of in example.items()}
    return {
        "model": packed.name,
        "jagged": __version__,
        "torch": torch.__version__,
        "device": device.type,
        # Machine code is that of one generation of GPUs.
        **({} if device.type == "cpu" else {"compute_capability": capability()}),
        "inputs": {name: {"dtype": dtypes[name], "sizes": [None, *of.shape[1:]]} for name, of in example.items()},
        **packed.described(example),
    }


def _compared(packed: Packed, package: Path, device: torch.device) -> dict[str, Any]:
    """Score batches of other sizes by the package and by the model; what was seen."""
    score = torch._inductor.aoti_load_package(str(package))  # type: ignore[no-untyped-call]
    seen: list[dict[str, Any]] = []
    with torch.no_grad():
        for count, max_history in _COMPARED:
            batch = moved(packed.batch(count, max_history), device)
            seen.append({**packed.told(batch), "difference": packed.difference(score(**packed.tensors(batch)), batch)})
        whole = moved(packed.batch(max(count for count, _ in _COMPARED)), device)
        tensors = packed.tensors(whole)
        milliseconds = {
            "package": _milliseconds(lambda: score(**tensors), device),
            "model": _milliseconds(lambda: packed.by_model(whole), device),
        }
    return {"compared": seen, "milliseconds": {**packed.told(whole), **milliseconds}}


def _loss(milliseconds: Mapping[str, Any]) -> str:
    """What a package costs beside its model, or spares."""
    of = "requests" if "requests" in milliseconds else "users"
    package, model = (milliseconds[which]["p50"] for which in ("package", "model"))
    return f"{milliseconds[of]} {of} take {package} ms in the package and {model} ms in the model"


def _milliseconds(call: Callable[[], Any], device: torch.device) -> dict[str, float]:
    """Median and 99th percentile of calls one after the other, each until its results are there."""

    def whole() -> None:
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    # The first one allocates.
    whole()
    seconds: list[float] = []
    while len(seconds) < _CALLS and sum(seconds) < _SECONDS:
        begun = time.perf_counter()
        whole()
        seconds.append(time.perf_counter() - begun)
    p50, p99 = (
        torch.tensor(seconds, dtype=torch.float64).mul(1e3).quantile(torch.tensor([0.5, 0.99], dtype=torch.float64)).tolist()
    )
    return {"p50": round(p50, 3), "p99": round(p99, 3), "calls": len(seconds)}
