"""Plans: schedules of features that were measured, in place of those that the map chooses by the mean length.

A plan may also say up to how many rows tables have whose lookups the backward pass counts; others are sorted. It is plain JSON, a
line for each feature. It changes in which order rows are added up, and nothing else.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from jagged.ops.embedding_bag.layout import MOST_COUNTED, BagLayout

# How many lookups a schedule is made for, by its number.
KINDS = ("one", "few", "some", "many")
# Steps over its bags that a unit of work may have.
MOST_STEPS = 64
# Programs that take units, for each multiprocessor: as many as it holds, and what a plan may say.
PROGRAMS, MOST_PROGRAMS = 32, 64
# What a feature has whose schedule the map chooses.
BY_MAP = -1

FORMAT, VERSION = "jagged plan of embedding bags", 1
# As large as JSON of the artifact layer.
MOST_BYTES = 64 * 2**20
# What a message names of many.
_SHOWN = 3

Mismatch = Literal["refuse", "warn"]


class BagSchedule(NamedTuple):
    """What a plan says of a feature.

    Args:
        rows: of the feature's table, which the schedule was measured for.
        width: of the table.
        kind: `"one"`, `"few"`, `"some"` or `"many"`: how many lookups of a bag stand side by side and are under way together.
        steps: 1 to 64, over the bags of a unit of work.

    Example:
        >>> from jagged.ops import BagSchedule
        >>> BagSchedule(rows=10, width=4, kind="some", steps=8).code
        34
    """

    rows: int
    width: int
    kind: str
    steps: int

    @property
    def code(self) -> int:
        """The schedule as kernels read it."""
        return code_of(self.kind, self.steps)


class BagSchedules(NamedTuple):
    """What a launch takes of a plan.

    Args:
        codes: `[F]` int32 on the device of the tables; negative where the map is to choose. None: the forward pass goes as
            without a plan, and small batches without the map.
        programs: for each multiprocessor.
        counted_rows: most rows of tables whose lookups the backward pass counts, 0 to 65,536, others are sorted; None: by the
            numbers of tables and lookups.

    Example:
        >>> import torch
        >>> from jagged.ops import BagSchedules
        >>> BagSchedules(torch.tensor([34, -1], dtype=torch.int32)).programs
        32
    """

    codes: Tensor | None
    programs: int = PROGRAMS
    counted_rows: int | None = None


def code_of(kind: str, steps: int) -> int:
    """Return the number of a schedule: its kind in two bits, its steps above them."""
    return KINDS.index(kind) | steps << 2


@dataclass(frozen=True)
class BagPlan:
    """Schedules of features by name, and how many programs run, as `jagged tune-bags` measures them.

    Features that a plan does not have keep the schedules that the lengths of each batch give, so that a new feature asks for no
    other plan. One without features is no plan: forward goes as without, whatever `programs` and `gpu` are. Its `counted_rows`
    count still, for a GPU of that name.

    Args:
        gpu: the name of the GPU that it was measured on.
        features: by name.
        programs: for each multiprocessor, 1 to 64.
        counted_rows: most rows of tables whose lookups the backward pass brings together by counting, 0 to 65,536; those of
            larger tables are sorted. None: by the numbers of tables and lookups of each batch.

    Raises:
        ValueError: an unknown kind, or numbers out of range.

    Example:
        >>> from jagged.ops import BagLayout, BagPlan, BagSchedule
        >>> plan = BagPlan("NVIDIA H200", {"clicked": BagSchedule(rows=10, width=4, kind="some", steps=8)}, programs=24)
        >>> plan.schedules(BagLayout((10, 5), (4, 3)), "cpu", names=("clicked", "shop")).codes
        tensor([34, -1], dtype=torch.int32)
    """

    gpu: str
    features: Mapping[str, BagSchedule]
    programs: int = PROGRAMS
    counted_rows: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.gpu, str):
            raise ValueError(f"gpu: expected a name, got {self.gpu!r}")
        _check_number("programs", self.programs, MOST_PROGRAMS)
        rows = self.counted_rows
        if rows is not None and (type(rows) is not int or not 0 <= rows <= MOST_COUNTED):
            raise ValueError(f"counted_rows: expected a number from 0 to {MOST_COUNTED:,} or none, got {rows!r}")
        for name, schedule in self.features.items():
            if schedule.kind not in KINDS:
                raise ValueError(f"features: expected a kind of {', '.join(KINDS)} for {name!r}, got {schedule.kind!r}")
            for of in ("rows", "width", "steps"):
                _check_number(f"features: {of} of {name!r}", getattr(schedule, of), MOST_STEPS if of == "steps" else None)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON, a line for each feature; whoever reads the file sees the old or the new one whole.

        Raises:
            OSError: it cannot be written; then nothing is left of the attempt.
        """
        lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(of._asdict())}" for name, of in self.features.items())
        head = {"format": FORMAT, "version": VERSION, "gpu": self.gpu, "programs": self.programs}
        if self.counted_rows is not None:
            head["counted_rows"] = self.counted_rows
        shown = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
        shown.append('  "features": {\n' + lines + "\n  }" if lines else '  "features": {}')
        # As `jagged.artifacts` writes files and sweeps what killed processes leave; operators do not import it.
        aside = Path(path).with_name(f".{Path(path).name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
        try:
            with open(aside, "x", encoding="utf-8") as file:
                file.write("{\n" + ",\n".join(shown) + "\n}\n")
                file.flush()
                os.fsync(file.fileno())
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)
        directory = os.open(aside.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> BagPlan:
        """Read a plan.

        Raises:
            OSError: a file that cannot be read.
            ValueError: a pipe or a large file, which is not read; a file that is no plan, a plan of another version, or one that
                says what no plan can.
        """
        status = os.stat(path)
        is_file = stat.S_ISREG(status.st_mode)
        if not (is_file or stat.S_ISDIR(status.st_mode)) or status.st_size > MOST_BYTES:
            found = f"{status.st_size} bytes" if is_file else "a pipe or a device"
            raise ValueError(f"{os.fspath(path)}: expected a plan, a file of at most {MOST_BYTES} bytes, got {found}")
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{os.fspath(path)}: expected a plan in JSON: {error}") from None
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise ValueError(f"{os.fspath(path)}: expected a plan, which `jagged tune-bags` writes, got something else")
        if found.get("version") != VERSION:
            raise ValueError(f"{os.fspath(path)}: expected a plan of version {VERSION}, got {found.get('version')!r}; tune again")
        try:
            # Plans without a number for backward have none: those that were written before there was one, too.
            return cls(found["gpu"], _schedules_of(found["features"]), found["programs"], found.get("counted_rows"))
        except KeyError as error:
            raise ValueError(f"{os.fspath(path)}: expected {error.args[0]!r} in a plan, got none; tune again") from None
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from None

    def fitting(
        self, shapes: Mapping[str, tuple[int, int]], gpu: str | None = None, mismatch: Mismatch = "refuse"
    ) -> BagPlan | None:
        """Return the plan without features that have another shape here; None for a plan of another GPU, or that says nothing.

        Args:
            shapes: of features' tables by name, (rows, width).
            gpu: the name of the GPU; None: any, where none runs.
            mismatch: what a plan of another GPU or of other shapes does: `"refuse"` raises, `"warn"` warns once and leaves these
                features to the map.

        Raises:
            ValueError: another GPU or other shapes, which `mismatch` does not allow; another `mismatch`.
        """
        if mismatch not in ("refuse", "warn"):
            raise ValueError(f"mismatch: expected 'refuse' or 'warn', got {mismatch!r}")
        if self._says_nothing:
            return None
        if gpu is not None and gpu != self.gpu:
            _mismatch(f"plan: expected one for {gpu}, got one for {self.gpu}", mismatch)
            return None
        others = [name for name, of in self.features.items() if name in shapes and tuple(shapes[name]) != (of.rows, of.width)]
        if others:
            words = [
                f"{name!r} of {self.features[name].rows} rows and width {self.features[name].width} "
                f"for a table of {shapes[name][0]} rows and width {shapes[name][1]}"
                for name in others[:_SHOWN]
            ]
            more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
            _mismatch(f"plan: expected the tables' shapes, got {'; '.join(words)}{more}", mismatch)
            left = replace(self, features={name: of for name, of in self.features.items() if name not in set(others)})
            return None if left._says_nothing else left
        return self

    @property
    def _says_nothing(self) -> bool:
        return not self.features and self.counted_rows is None

    def schedules(
        self,
        layout: BagLayout,
        device: torch.device | str,
        *,
        names: Sequence[str] | None = None,
        mismatch: Mismatch = "refuse",
    ) -> BagSchedules | None:
        """Return what `embedding_bags` takes for a layout on a device.

        None, which is no plan, where the plan has no features, or is another GPU's and that is allowed.

        Args:
            layout: the tables, and the features that read them.
            device: of the tables. On a CPU, which follows no plan, the GPU does not matter.
            names: of the features; None: their places, `"0"`, `"1"` and so on.
            mismatch: as in `fitting`.

        Raises:
            ValueError: as `fitting`, or a number of names that is not that of the features.
        """
        names = [str(place) for place in range(layout.num_features)] if names is None else list(names)
        if len(names) != layout.num_features:
            raise ValueError(f"names: expected one for each of the {layout.num_features} features, got {len(names)}")
        device = torch.device(device)
        assert layout.tables is not None
        shapes = {name: (layout.rows[table], layout.widths[table]) for name, table in zip(names, layout.tables, strict=True)}
        plan = self.fitting(shapes, torch.cuda.get_device_name(device) if device.type == "cuda" else None, mismatch)
        if plan is None:
            return None
        codes = [plan.features[name].code if name in plan.features else BY_MAP for name in names]
        if not plan.features or (plan.programs == PROGRAMS and all(code == BY_MAP for code in codes)):
            return BagSchedules(None, PROGRAMS, plan.counted_rows)
        of_features = torch.tensor(codes, dtype=torch.int32, device="cpu").to(device)
        return BagSchedules(of_features, plan.programs, plan.counted_rows)


def _schedules_of(features: Any) -> dict[str, BagSchedule]:
    if not isinstance(features, dict):
        raise ValueError(f"features: expected schedules by name, got {type(features).__name__}")
    expected = set(BagSchedule._fields)
    for name, of in features.items():
        if not isinstance(of, dict) or set(of) != expected:
            got = ", ".join(map(str, of)) if isinstance(of, dict) else type(of).__name__
            raise ValueError(f"features: expected {', '.join(BagSchedule._fields)} for {name!r}, got {got}")
    return {name: BagSchedule(**cast("dict[str, Any]", of)) for name, of in features.items()}


def _check_number(name: str, value: Any, most: int | None) -> None:
    if type(value) is not int or value < 1 or (most is not None and value > most):
        raise ValueError(f"{name}: expected a number from 1{'' if most is None else f' to {most}'}, got {value!r}")


def _mismatch(message: str, mismatch: Mismatch) -> None:
    if mismatch == "refuse":
        raise ValueError(f"{message}; tune again, or let mismatch be 'warn' to do without")
    warnings.warn(f"{message}; these features do without a plan", UserWarning, stacklevel=4)
