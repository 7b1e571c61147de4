"""Make of a run a package that scores requests without jagged: the function behind `jagged export`."""

from __future__ import annotations

import functools
import logging
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jagged import __version__, artifacts
from jagged.artifacts.errors import reason
from jagged.config import ConfigError
from jagged.data import Part
from jagged.data.table_batches import Batch
from jagged.models import export_scores, name_of, scoring_tensors, write_package
from jagged.models.pretrained import ITEMS
from jagged.models.tasks import REQUEST_LOSSES
from jagged.runs.labels.run import is_label_run
from jagged.runs.package_programs import PROGRAMS
from jagged.runs.ranking.run import RankingRun

#: Files of a package's directory.
PACKAGE, EXAMPLE = "scores.pt2", "example.pt"
# Requests that the program is traced with, and those that it is compared on: one, fewer, and more, with histories and without.
_TRACED, _COMPARED = 20, ((1, None), (7, None), (100, None), (3, 0))
# How far the package's logits may be from the model's: sums in another order.
_RELATIVE, _ABSOLUTE = 1e-3, 1e-4
# Timed calls, of which the median counts.
_CALLS = 9


def export(directory: str | os.PathLike[str], output: str | os.PathLike[str], *, progress: bool = True) -> Path:
    """Make of a run on a table a package that scores batches of requests on a CPU where jagged is not installed.

    The new directory holds `scores.pt2`, compiled by AOTInductor for processors like this machine's and for this PyTorch;
    `manifest.json`, which tells inputs by name, with their dtypes, sizes, keys and columns, and the tasks; `ids-*.arrow`, by
    which ids become rows of tables; `example.pt`, a batch; `score.py` and `score.cpp`, which score that. Sizes may be others in
    each call: there is one request at least. Before anything is written, the package has scored held-out requests in other
    numbers than it was traced with, and its logits were the model's.

    Args:
        directory: a run's directory, with the table of its training (`dataset/`).
        output: a new directory; it appears whole or not at all.
        progress: tell what is done.

    Returns:
        The new directory.

    Raises:
        ConfigError: an output that is there, no C++ compiler or one that cannot compile, a run without its table or on something
            else, or a model that cannot be exported.
        CheckpointError: the directory holds no model, or a file of it is damaged.
        ArtifactError: the package cannot be written, or does not score as the model does.
    """
    output = Path(output)
    if os.path.lexists(output):
        raise ConfigError(f"output: {output} is there, expected a new directory; give another name, or remove it")
    if is_label_run(directory) or (Path(directory) / ITEMS).is_file():
        raise ConfigError(f"{directory}: holds no model of a table's requests; only these are exported")
    _check_compiler()
    run = RankingRun.open(directory, device="cpu")
    part = run.part("valid")
    tell: Callable[[str], None] = functools.partial(print, file=sys.stderr) if progress else lambda said: None
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder, PACKAGE)
        tell(f"compiling {name_of(run.model)} for the CPU, which takes a minute or more")
        example = _requests(run, part, _TRACED)
        _compile(run, example, package)
        tell("comparing its scores with the model's")
        content = {**_described(run, part, example), **_compared(run, part, package)}
        with artifacts.writing(output, "give another output", artifacts.ArtifactError), artifacts.new_directory(output) as aside:
            shutil.copyfile(package, aside / PACKAGE)
            torch.save(scoring_tensors(run.model, _requests(run, part, 5)), aside / EXAMPLE)
            for name, text in PROGRAMS.items():
                (aside / name).write_text(text)
            content["tables"] = _tables(run, aside)
            artifacts.write_manifest(aside, sorted(os.listdir(aside)), content)
    return output


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


def _check_compiler() -> None:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise ConfigError("export: found no C++ compiler, expected g++ or clang++; install one, or name it in CXX") from None


def _compile(run: RankingRun, example: Batch, package: Path) -> None:
    """Write the package.

    Raises:
        ConfigError: PyTorch, or the compiler, says that it cannot.
    """
    from torch._inductor.exc import CppCompileError, InductorError

    try:
        with _quiet():
            write_package(export_scores(run.model, example), package)
    except (CppCompileError, InductorError) as error:
        lines = [line.strip() for line in str(error).splitlines()]
        said = next((line for line in lines if " error: " in line), lines[0])
        raise ConfigError(
            f"export: the package could not be compiled: {artifacts.shown(said, 200)}; install another compiler with OpenMP, and "
            "name it in CXX"
        ) from error
    except (ValueError, OSError) as error:
        raise ConfigError(f"{run.directory}: the model could not be exported: {reason(error)}") from error


def _requests(run: RankingRun, part: Part, count: int, max_history: int | None = None) -> Batch:
    """So many requests of a part, of a small one several times."""
    longest = run.config.data.max_history if max_history is None else max_history
    return part.gather(np.arange(count) % len(part), max_history=longest)


def _compared(run: RankingRun, part: Part, package: Path) -> dict[str, Any]:
    """Score batches of other sizes by the package and by the model; what was seen."""
    score = torch._inductor.aoti_load_package(str(package))  # type: ignore[no-untyped-call]
    seen: list[dict[str, Any]] = []
    for count, max_history in _COMPARED:
        batch = _requests(run, part, count, max_history)
        with torch.no_grad():
            found, expected = score(scoring_tensors(run.model, batch)), run.model.logits(batch)
        seen.append({"requests": len(batch), "candidates": batch.rows.numel(), "difference": _difference(found, expected)})
    whole = _requests(run, part, max(count for count, _ in _COMPARED))
    tensors = scoring_tensors(run.model, whole)
    milliseconds = {
        "package": _milliseconds(lambda: score(tensors)),
        "model": _milliseconds(lambda: run.model.logits(whole)),
    }
    return {"compared": seen, "milliseconds": {"requests": len(whole), **milliseconds}}


def _difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest difference of logits.

    Raises:
        ArtifactError: one is too large.
    """
    largest = 0.0
    for task, logits in expected.items():
        if not torch.allclose(found[task], logits, rtol=_RELATIVE, atol=_ABSOLUTE):
            apart = float((found[task] - logits).abs().max())
            raise artifacts.ArtifactError(
                f"{task}: logits of the package are {apart:.2g} from the model's, expected {_ABSOLUTE} and {_RELATIVE} of "
                "them; nothing was written. Report it with the output of `jagged doctor`"
            )
        largest = max(largest, float((found[task] - logits).abs().max()) if logits.numel() else 0.0)
    return largest


def _milliseconds(call: Callable[[], Any]) -> float:
    seconds = []
    with torch.no_grad():
        for _ in range(_CALLS + 1):
            begun = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - begun)
    # The first one allocates.
    return round(sorted(seconds[1:])[_CALLS // 2] * 1e3, 3)


def _described(run: RankingRun, part: Part, batch: Batch) -> dict[str, Any]:
    """What who calls the package needs to know of it."""
    model, log = run.model, part.dataset.events
    tensors = scoring_tensors(model, batch)
    columns = {name: list(getattr(model.inputs, name)) for name in ("request_numbers", "candidate_numbers", "history_numbers")}
    columns["history_labels"] = [] if log is None or not model.inputs.history_labels else list(log.labels)
    return {
        "kind": "scores",
        "model": name_of(model),
        "jagged": __version__,
        "torch": torch.__version__,
        "device": "cpu",
        # A score orders the candidates of one request, and is no log-odds.
        "tasks": {task: "score" if model.losses[task] in REQUEST_LOSSES else "logit" for task in model.tasks},
        "inputs": {
            name: {"dtype": str(of.dtype).removeprefix("torch."), "sizes": [None, *of.shape[1:]]} for name, of in tensors.items()
        },
        "keys": {name: _keys(model, name) for name in dict.fromkeys(of.partition(".")[0] for of in tensors if "." in of)},
        "columns": {name: of for name, of in columns.items() if name in tensors},
        # What stands for a missing number.
        "means": {name: of.mean for name, of in run.encoders.statistics.items()},
        "max_history": run.config.data.max_history,
        "times": run.opened.split["time_kind"],
    }


def _keys(model: Any, name: str) -> dict[str, str | None]:
    """The keys of a keyed input in their order, each with its table; those of lists of numbers have none."""
    inputs = model.inputs
    groups = [inputs.features, inputs.candidate_ids, inputs.candidate_lists, inputs.history, inputs.list_histories]
    named = {key: table for group in groups for key, table in group.items()} if name == "features" else getattr(inputs, name)
    return {key: named[key] if isinstance(named, Mapping) else None for key in inputs.keys(name)}


def _tables(run: RankingRun, aside: Path) -> dict[str, dict[str, Any]]:
    """Write the ids of tables that have some; by table how an id becomes a row."""
    found = {}
    for place, (name, encoder) in enumerate(run.encoders.items()):
        file = None if encoder.ids is None else f"ids-{place}.arrow"
        if encoder.ids is not None:
            encoder.ids.save(aside / f"ids-{place}.arrow")
        found[name] = {"encoding": encoder.encoding, "rows": encoder.size, "seed": encoder.seed, "ids": file}
    return found
