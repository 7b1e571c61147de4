"""Where embedding tables of many shapes lie in one storage, and which features read them."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.utils._python_dispatch import _disable_current_modes

from jagged.ops._shared.copies import DeviceCopy, to_device
from jagged.ops._shared.sizes import cdiv
from jagged.ops.embedding_bag.fields import BATCH, FEATURE, OfBatch, OfFeature, OfPart, OfPlace, OfTable

# Elements that the start of a table is a multiple of, so that 16-byte loads fit any dtype.
ALIGNMENT = 16
# Columns that one program takes of a feature where batches are small, at most.
PART_COLUMNS = 32
# Rows of a table at most, which kernels number in 32 bits.
MOST_ROWS = 2**32
# Rows that tables have at most whose lookups backward counts; those of others it sorts.
MOST_COUNTED = 65_536
# Rows that a lane takes one after the other in a unit of backward's work where a row needs one lane alone, and at most.
FEWEST_TURNS, MOST_TURNS = 2, 8


class Batches(NamedTuple):
    """Bags of features with batches of their own, `[F, len(BATCH)]` int64, on the host and on a device; the output's size."""

    host: Tensor
    device: Tensor
    size: int


class _KeptBatches(NamedTuple):
    """`Batches` that are read again and again."""

    host: Tensor
    copied: DeviceCopy
    size: int


class _OfBatches(NamedTuple):
    """What of a layout says where a batch's output has its features: by feature widths, columns and whether it is a sequence."""

    widths: tuple[int, ...]
    columns: tuple[int, ...]
    sequences: tuple[bool, ...]


@dataclass(frozen=True)
class BagLayout:
    """The tables of `embedding_bags` and the features that read them; immutable, and the same for every batch.

    Args:
        rows: of each table, from 1 to 2^32.
        widths: of each table, at least 1: its embedding dimension.
        tables: for each feature the table that it reads; None: one feature for each table.
        means: for each feature whether its bags are means; None: all are sums.
        sequences: for each feature whether its rows are not pooled: they come out one by one, in order. None: all are pooled.

    Raises:
        ValueError: lengths that do not fit, a table without rows or columns or of more than 2^32 rows, a feature of a table that
            is not there, or one that is a mean and a sequence.

    Example:
        >>> from jagged.ops import BagLayout
        >>> layout = BagLayout(rows=(10, 5), widths=(4, 3), tables=(0, 1, 0))
        >>> layout.num_elements, layout.width
        (63, 11)
    """

    # Every table begins at a multiple of so many elements.
    alignment: ClassVar[int] = ALIGNMENT

    rows: tuple[int, ...]
    widths: tuple[int, ...]
    tables: tuple[int, ...] | None = None
    means: tuple[bool, ...] | None = None
    sequences: tuple[bool, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("rows", "widths", "tables", "means", "sequences"):
            value: Sequence[int] | None = getattr(self, name)
            if value is not None and not isinstance(value, tuple):
                object.__setattr__(self, name, tuple(value))
        if len(self.rows) != len(self.widths):
            raise ValueError(f"widths: expected one for each of the {len(self.rows)} tables of rows, got {len(self.widths)}")
        for name, values in (("rows", self.rows), ("widths", self.widths)):
            if any(value < 1 for value in values):
                table = next(i for i, value in enumerate(values) if value < 1)
                raise ValueError(f"{name}: expected at least 1, got {values[table]} for table {table}")
        if any(value > MOST_ROWS for value in self.rows):
            table = next(i for i, value in enumerate(self.rows) if value > MOST_ROWS)
            raise ValueError(
                f"rows: expected at most {MOST_ROWS:,}, got {self.rows[table]:,} for table {table}; split it by rows"
            )
        if self.tables is None:
            object.__setattr__(self, "tables", tuple(range(len(self.rows))))
        assert self.tables is not None
        if any(not 0 <= table < len(self.rows) for table in self.tables):
            feature = next(i for i, table in enumerate(self.tables) if not 0 <= table < len(self.rows))
            raise ValueError(
                f"tables: expected a table from 0 to {len(self.rows) - 1}, got {self.tables[feature]} for feature {feature}"
            )
        for name in ("means", "sequences"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, (False,) * len(self.tables))
            if (got := len(getattr(self, name))) != len(self.tables):
                raise ValueError(f"{name}: expected one for each of the {len(self.tables)} features, got {got}")
        assert self.means is not None
        assert self.sequences is not None
        for feature, (is_mean, is_sequence) in enumerate(zip(self.means, self.sequences, strict=True)):
            if is_mean and is_sequence:
                raise ValueError(f"sequences: expected bags that are means to be pooled, got both for feature {feature}")
        # Now, for a compiled region cannot compute cached properties.
        for name in (
            "starts",
            "first_rows",
            "feature_widths",
            "columns",
            "has_means",
            "has_sequences",
            "fields",
            "_tensors",
            "_batches",
        ):
            getattr(self, name)

    def __reduce__(self) -> tuple[Any, ...]:
        # Tensors that are mapped to another device with a module's own would no longer be what kernels read.
        return BagLayout, (self.rows, self.widths, self.tables, self.means, self.sequences)

    def __hash__(self) -> int:
        # Of thousands of numbers it takes longer than a launch.
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.rows, self.widths, self.tables, self.means, self.sequences))

    @property
    def num_features(self) -> int:
        """F."""
        assert self.tables is not None
        return len(self.tables)

    @functools.cached_property
    def starts(self) -> tuple[int, ...]:
        """For each table the element of the storage that it begins at, and the length of the storage."""
        return starts_of(rows * width for rows, width in zip(self.rows, self.widths, strict=True))

    @property
    def num_elements(self) -> int:
        """Length of the storage."""
        return self.starts[-1]

    @functools.cached_property
    def first_rows(self) -> tuple[int, ...]:
        """For each table the number of rows of those before, and that of all."""
        return (0, *accumulate(self.rows))

    @functools.cached_property
    def feature_widths(self) -> tuple[int, ...]:
        """Of each feature."""
        assert self.tables is not None
        return tuple(self.widths[table] for table in self.tables)

    @functools.cached_property
    def columns(self) -> tuple[int, ...]:
        """For each feature the column of the output that it begins at, and the number of all; sequences have none."""
        assert self.sequences is not None
        of_features = zip(self.feature_widths, self.sequences, strict=True)
        return (0, *accumulate(0 if is_sequence else width for width, is_sequence in of_features))

    @property
    def width(self) -> int:
        """Columns of the pooled features, side by side."""
        return self.columns[-1]

    @functools.cached_property
    def has_means(self) -> bool:
        """Tell whether any feature's bags are means."""
        assert self.means is not None
        return any(self.means)

    @functools.cached_property
    def has_sequences(self) -> bool:
        """Tell whether any feature's rows are not pooled."""
        assert self.sequences is not None
        return any(self.sequences)

    def views(self, storage: Tensor) -> list[Tensor]:
        """Return each table as a view `[rows, width]` of a storage `[num_elements]`."""
        return [
            storage[start : start + rows * width].view(rows, width)
            for start, rows, width in zip(self.starts[:-1], self.rows, self.widths, strict=True)
        ]

    def split(self, output: Tensor, sequence_totals: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """Return the pooled part of what `embedding_bags` returns for features of which some are sequences, and each one's rows.

        Args:
            output: flat.
            sequence_totals: number of ids of each sequence, in the features' order.

        Returns:
            Views: the pooled part, flat, which is `[B, width]` but where features have batches of their own; and for each
            sequence `[N_f, width_f]`.
        """
        assert self.sequences is not None
        if self.sequences == (True,):
            # All is the rows of one sequence. A split's gradient would be a copy of theirs.
            return output.new_empty(0), [output.view(sequence_totals[0], self.feature_widths[0])]
        of_sequences = [width for width, is_sequence in zip(self.feature_widths, self.sequences, strict=True) if is_sequence]
        lengths = [total * width for total, width in zip(sequence_totals, of_sequences, strict=True)]
        pooled, *rows = output.split([output.shape[0] - sum(lengths), *lengths])
        return pooled, [of.view(-1, width) for of, width in zip(rows, of_sequences, strict=True)]

    @functools.cached_property
    def fields(self) -> Tensor:
        """What is known of each feature, `[F, len(FEATURE)]` int64 on the host."""
        return torch.tensor(self._of_features(), dtype=torch.int64, device="cpu").reshape(-1, len(FEATURE))

    def tensor(self, device: torch.device) -> Tensor:
        """Return what kernels read, the same tensor every time; made outside of a graph that is captured.

        The features' rows, then the tables', the places' and the parts', `[2 F + tables + 1 + parts, len(FEATURE)]` int64.
        """
        # Kept here and not by an ordinary cache, which would hash thousands of numbers in every call.
        if device not in self._tensors:
            with as_real_tensors():
                self._tensors[device] = self._tensors[torch.device("cpu")].to(device)
        return self._tensors[device]

    def batches(self, sizes: tuple[int, ...], device: torch.device, num_samples: int | None = None) -> Batches:
        """Return what is known of features with so many bags each, of which a sequence has one for each id.

        With `num_samples` the pooled features, which have so many, lie side by side; else each lies by itself.
        """
        if torch.compiler.is_compiling():
            # A graph for all sizes looks nothing up by them.
            return _new_batches(self._of_batches, sizes, device, num_samples)
        host, copied, size = self._batches(sizes, device, num_samples)
        with as_real_tensors():
            return Batches(host, copied.read(), size)

    @functools.cached_property
    def _batches(self) -> Callable[[tuple[int, ...], torch.device, int | None], _KeptBatches]:
        # Not of a method: a layout goes when it is let go, and what it keeps on a device with it, unless a graph reads that.
        return functools.lru_cache(maxsize=256)(functools.partial(_kept_batches, self._of_batches))

    @property
    def _of_batches(self) -> _OfBatches:
        assert self.sequences is not None
        return _OfBatches(self.feature_widths, self.columns, self.sequences)

    @functools.cached_property
    def _tensors(self) -> dict[torch.device, Tensor]:
        rows: list[tuple[int, ...]] = [*self._of_features(), *self._of_tables(), *self._of_places(), *self._of_parts()]
        # All as wide as a feature's.
        padded = [(*row, *(0,) * (len(FEATURE) - len(row))) for row in rows]
        return {torch.device("cpu"): torch.tensor(padded, dtype=torch.int64, device="cpu")}

    def _of_features(self) -> list[OfFeature]:
        assert self.tables is not None
        assert self.means is not None
        in_order = sorted(range(len(self.tables)), key=lambda feature: (self.tables or ())[feature])
        of_features = zip(self.tables, self.feature_widths, self.columns[:-1], self.means, in_order, strict=True)
        return [
            OfFeature(self.starts[table], self.rows[table], width, column, int(is_mean), self.first_rows[table], table, other)
            for table, width, column, is_mean, other in of_features
        ]

    def _of_tables(self) -> list[OfTable]:
        assert self.tables is not None
        by_width = sorted(range(len(self.widths)), key=lambda table: -self.widths[table])
        is_aligned = not any(width % 4 for width in self.feature_widths)
        units = (units_of(self.rows[table], self.widths[table], is_aligned=is_aligned) for table in by_width)
        readers = [0] * (len(self.widths) + 1)
        for table in self.tables:
            readers[table + 1] += 1
        shapes = zip(
            self.starts,
            (*self.rows, 0),
            (*self.widths, 1),
            (*by_width, 0),
            (*accumulate(units), 0),
            self.first_rows,
            accumulate(readers),
            strict=True,
        )
        return [
            OfTable(start, rows, width, table, unit_end, first_row, 0, first_reader)
            for start, rows, width, table, unit_end, first_row, first_reader in shapes
        ]

    @property
    def _widest_first(self) -> list[int]:
        return sorted(range(self.num_features), key=lambda feature: -self.feature_widths[feature])

    def _of_places(self) -> list[OfPlace]:
        widths = self.feature_widths
        by_class = sorted(self._widest_first, key=lambda feature: class_of(widths[feature]), reverse=True)
        of_classes = [class_of(widths[feature]) for feature in by_class]
        ends = {own: place + 1 for place, own in enumerate(of_classes)}
        counts = Counter(of_classes)
        return [
            OfPlace(feature, widths[feature], ends[own] - counts[own], ends[own])
            for feature, own in zip(by_class, of_classes, strict=True)
        ]

    def _of_parts(self) -> list[OfPart]:
        widths = ((feature, self.feature_widths[feature]) for feature in self._widest_first)
        return [OfPart(feature, part, width) for feature, width in widths for part in range(cdiv(width, PART_COLUMNS))]


def _new_batches(of: _OfBatches, sizes: tuple[int, ...], device: torch.device, num_samples: int | None) -> Batches:
    if any(isinstance(size, torch.SymInt) for size in sizes) and not torch.compiler.is_dynamo_compiling():
        return _traced_batches(of, sizes, device, num_samples)
    with as_real_tensors():
        host, size = _host_batches(of, sizes, num_samples)
        return Batches(host, to_device(host, device), size)


def _kept_batches(of: _OfBatches, sizes: tuple[int, ...], device: torch.device, num_samples: int | None) -> _KeptBatches:
    with as_real_tensors():
        host, size = _host_batches(of, sizes, num_samples)
        return _KeptBatches(host, DeviceCopy(host, device), size)


def _host_batches(of: _OfBatches, sizes: tuple[int, ...], num_samples: int | None) -> tuple[Tensor, int]:
    of_features = list(zip(sizes, of.widths, of.columns[:-1], of.sequences, strict=True))
    pooled = sum(count * width for count, width, _, is_sequence in of_features if not is_sequence)
    first, rows = 0, []
    # Where the next one begins.
    next_pooled, next_sequence = 0, pooled
    for count, width, column, is_sequence in of_features:
        if is_sequence:
            begin, stride, next_sequence = next_sequence, width, next_sequence + count * width
        else:
            begin, stride, next_pooled = next_pooled, width, next_pooled + count * width
            if num_samples is not None:
                begin, stride = column, of.columns[-1]
        # A named tuple would make Dynamo compile for each number.
        rows.append(tuple(OfBatch(first_bag=first, num_bags=count, output_begin=begin, output_stride=stride)))
        first += count
    return torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(-1, len(BATCH)), next_sequence


def _traced_batches(of: _OfBatches, sizes: tuple[int, ...], device: torch.device, num_samples: int | None) -> Batches:
    """Return the same of sizes that an exporter knows only when the program runs."""
    counts = torch.stack([torch.scalar_tensor(size, dtype=torch.int64, device="cpu") for size in sizes])
    widths, is_sequence = (torch.tensor(numbers, device="cpu") for numbers in (of.widths, of.sequences))
    of_pooled, of_sequences = ((counts * widths).masked_fill(mask, 0) for mask in (is_sequence, ~is_sequence))
    begins, strides, pooled = of_pooled.cumsum(0) - of_pooled, widths, of_pooled.sum()
    if num_samples is not None:
        begins, strides = torch.tensor(of.columns[:-1], device="cpu"), widths.where(is_sequence, of.columns[-1])
        pooled = torch.scalar_tensor(num_samples * of.columns[-1], dtype=torch.int64, device="cpu")
    begins = (pooled + of_sequences.cumsum(0) - of_sequences).where(is_sequence, begins)
    host = torch.stack([counts.cumsum(0) - counts, counts, begins, strides], 1)
    size = sum(size * width for size, width in zip(sizes, of.widths, strict=True))
    return Batches(host, host.to(device), size)


def as_real_tensors() -> AbstractContextManager[object]:
    """Make tensors that are kept: of `torch.func`'s transforms, an export or a fake mode they would last as long as these.

    Where there are none, leaving them would take more time than making the tensors.
    """
    if torch.compiler.is_dynamo_compiling():
        return nullcontext()
    is_plain = not (torch._C._len_torch_dispatch_stack() or _len_torch_dispatch_stack_pre_dispatch())
    return nullcontext() if is_plain and torch._C._functorch.peek_interpreter_stack() is None else _without_modes()


@contextmanager
def _without_modes() -> Iterator[None]:
    with torch._C._DisableFuncTorch(), _disable_current_modes():
        yield


def starts_of(sizes: Iterable[int]) -> tuple[int, ...]:
    """For tables of so many elements those of a storage that they begin at, and the storage's length."""
    starts, end = [], 0
    for size in sizes:
        starts.append(cdiv(end, ALIGNMENT) * ALIGNMENT)
        # The last one ends where its rows do.
        end = starts[-1] + size
    return (*starts, end)


def class_of(width: int) -> int:
    """Which rows forward lays out alike: by the power of two that holds 4 to 128 columns, and whether they are multiples of 4."""
    return max(2, (min(width, 128) - 1).bit_length()) * 2 + int(width % 4 == 0)


def units_of(rows: int, width: int, *, is_aligned: bool) -> int:
    """Units of work of backward for a table whose lookups are counted.

    A lane has 8 columns, or 4 where not all widths are multiples of 4: `row_columns` of `triton/rows.py`. Rows of more than half
    as many have two.
    """
    columns = 8 if is_aligned else 4
    exponent = max(int(width > columns // 2), min(5, (cdiv(width, columns) - 1).bit_length()))
    turns = min(FEWEST_TURNS << exponent, MOST_TURNS)
    return 0 if rows > MOST_COUNTED else cdiv(rows, (32 >> exponent) * turns) * cdiv(width, 32 * columns)
