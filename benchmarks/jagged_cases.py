"""The jagged operators as cases to measure, each beside padding and FBGEMM-GPU, with the bytes and FLOPs that it must spend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from jagged import ops

# Of the inputs; gives one tensor or several.
Function = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class Workload:
    """Lengths and sizes, and the indices by which padding finds rows and pairs.

    Args:
        lengths: `[B]`, int64.
        longest: the maximum length that padding and FBGEMM-GPU are told.
        d: features of a row.
        t: columns of the narrow operand.
        dtype: of all values.
    """

    lengths: Tensor
    longest: int
    d: int
    t: int
    dtype: torch.dtype

    @staticmethod
    def uniform(samples: int, longest: int, d: int, t: int, dtype: torch.dtype, device: str, declared: int = 0) -> Workload:
        """Lengths uniform on 0..longest, the same on every device; `declared` in place of `longest` as the known maximum."""
        lengths = torch.randint(0, longest + 1, (samples,), generator=torch.Generator().manual_seed(0))
        return Workload(lengths.to(device), declared or longest, d, t, dtype)

    @property
    def size(self) -> int:
        return self.lengths.shape[0]

    @cached_property
    def offsets(self) -> Tensor:
        return torch.cat([self.lengths.new_zeros(1), self.lengths.cumsum(0)])

    @cached_property
    def total(self) -> int:
        return int(self.offsets[-1])

    @cached_property
    def pairs(self) -> int:
        return int((self.lengths**2).sum())

    @cached_property
    def pair_offsets(self) -> Tensor:
        return ops.pair_offsets(self.offsets)

    @cached_property
    def pair_lengths(self) -> Tensor:
        return self.pair_offsets.diff()

    @cached_property
    def sample(self) -> Tensor:
        """Which sample each row is of."""
        return torch.repeat_interleave(torch.arange(self.size, device=self.lengths.device), self.lengths)

    @cached_property
    def position(self) -> Tensor:
        """Which row of its sample each row is."""
        return torch.arange(self.total, device=self.lengths.device) - self.offsets[self.sample]

    @cached_property
    def rows(self) -> Tensor:
        """Where each row lies in `[B * longest]`."""
        return self.sample * self.longest + self.position

    @cached_property
    def cells(self) -> Tensor:
        """Where each pair lies in `[B * longest * longest]`."""
        exists = torch.arange(self.longest, device=self.lengths.device) < self.lengths[:, None]
        return (exists[:, :, None] & exists[:, None, :]).flatten().nonzero().flatten()

    def random(self, *shape: int) -> Tensor:
        """Normal values that need a gradient."""
        return torch.randn(*shape, device=self.lengths.device).to(self.dtype).requires_grad_()

    def pad(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """`[S, *F] -> [B, longest, *F]`."""
        padded = x.new_full((self.size * self.longest, *x.shape[1:]), fill).index_copy(0, self.rows, x)
        return padded.view(self.size, self.longest, *x.shape[1:])

    def unpad(self, x: Tensor) -> Tensor:
        """`[B, longest, *F] -> [S, *F]`."""
        return take(x.flatten(0, 1), self.rows)

    def pad_pairs(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """`[P] -> [B, longest, longest]`."""
        padded = x.new_full((self.size * self.longest**2,), fill).index_copy(0, self.cells, x)
        return padded.view(self.size, self.longest, self.longest)

    def unpad_pairs(self, x: Tensor) -> Tensor:
        """`[B, longest, longest] -> [P]`."""
        return take(x.flatten(), self.cells)


class _Take(torch.autograd.Function):
    """Rows by an index that names none twice: PyTorch's own gradients sort the index or add atomically, which this need not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape = x.shape
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return grad.new_zeros(ctx.shape).index_copy(0, index, grad), None


def take(x: Tensor, index: Tensor) -> Tensor:
    """`x[index]` for an index that names no row twice."""
    taken: Tensor = _Take.apply(x, index)
    return taken


@dataclass
class Case:
    """One operator on one workload: its inputs, what it must move and compute, and who can do it.

    Args:
        inputs: tensors that need gradients.
        ours: this library's operator.
        padded: the same by padding and PyTorch.
        elements_forward: elements that must be read and written, offsets not counted.
        elements_backward: the same of the backward pass, given the gradients of the outputs.
        formula: of `elements_forward`.
        flops: floating-point operations of the forward pass.
        padded_flops: the same with padding.
        peers: FBGEMM-GPU's Triton kernels (`sll`) and C++ operators (`fbgemm`).
    """

    inputs: tuple[Tensor, ...]
    ours: Function
    padded: Function
    elements_forward: int
    elements_backward: int
    formula: str
    flops: int = 0
    padded_flops: int = 0
    peers: dict[str, Function] = field(default_factory=dict)

    @property
    def implementations(self) -> dict[str, Function]:
        return {"jagged": self.ours, "padded": self.padded, **self.peers}


CASES: dict[str, Callable[[Workload], Case]] = {}


def case(name: str) -> Callable[[Callable[[Workload], Case]], Callable[[Workload], Case]]:
    """Register a case; the first word of its name is the operator."""

    def register(build: Callable[[Workload], Case]) -> Callable[[Workload], Case]:
        CASES[name] = build
        return build

    return register


@case("jagged_dense_bmm")
def _dense_bmm(w: Workload) -> Case:
    moved = w.total * w.d + w.size * w.d * w.t + w.total * w.t
    return Case(
        (w.random(w.total, w.d), w.random(w.size, w.d, w.t)),
        lambda x, y: ops.jagged_dense_bmm(x, w.offsets, y),
        lambda x, y: w.unpad(w.pad(x) @ y),
        moved, moved + w.total * w.d + w.size * w.d * w.t, "S D + B D T + S T",
        2 * w.total * w.d * w.t, 2 * w.size * w.longest * w.d * w.t,
        {
            "sll": lambda x, y: torch.ops.fbgemm.sll_jagged_dense_bmm(x, y, w.offsets, w.longest, False, False),
            "fbgemm": lambda x, y: torch.ops.fbgemm.jagged_dense_bmm(x, w.offsets, y, w.longest)[0],
        },
    )  # fmt: skip


@case("jagged_jagged_bmm")
def _jagged_bmm(w: Workload) -> Case:
    moved = w.total * w.d + w.size * w.d * w.t + w.total * w.t
    return Case(
        (w.random(w.total, w.d), w.random(w.total, w.t)),
        lambda a, b: ops.jagged_jagged_bmm(a, b, w.offsets),
        lambda a, b: w.pad(a).transpose(1, 2) @ w.pad(b),
        moved, moved + w.total * w.d + w.total * w.t, "S D + S T + B D T",
        2 * w.total * w.d * w.t, 2 * w.size * w.longest * w.d * w.t,
        {
            "sll": lambda a, b: torch.ops.fbgemm.sll_jagged_jagged_bmm(a, b, w.offsets, w.longest, False, False),
            "fbgemm": lambda a, b: torch.ops.fbgemm.jagged_jagged_bmm(a, b, w.offsets, w.longest),
        },
    )  # fmt: skip


@case("jagged_softmax")
def _softmax(w: Workload) -> Case:
    return Case(
        (w.random(w.total, w.t),),
        lambda x: ops.jagged_softmax(x, w.offsets),
        lambda x: w.unpad(w.pad(x, -1e30).softmax(1)),
        2 * w.total * w.t, 3 * w.total * w.t, "2 S T", 5 * w.total * w.t, 5 * w.size * w.longest * w.t,
        {
            "sll": lambda x: torch.ops.fbgemm.sll_jagged_softmax(x, w.offsets, w.longest, False),
            "fbgemm": lambda x: torch.ops.fbgemm.jagged_softmax(x, w.offsets, w.longest)[0],
        },
    )  # fmt: skip


@case("jagged_jagged_bmm_jagged_out")
def _pair_scores(w: Workload) -> Case:
    return Case(
        (w.random(w.total, w.d), w.random(w.total, w.d)),
        lambda a, b: ops.jagged_jagged_bmm_jagged_out(a, b, w.offsets, total=w.pairs),
        lambda a, b: w.unpad_pairs(w.pad(a) @ w.pad(b).transpose(1, 2)),
        2 * w.total * w.d + w.pairs, 4 * w.total * w.d + w.pairs, "2 S D + P",
        2 * w.pairs * w.d, 2 * w.size * w.longest**2 * w.d,
        {
            "sll": lambda a, b: torch.ops.fbgemm.sll_jagged_jagged_bmm_jagged_out(
                a, b, w.lengths, w.offsets, w.lengths, w.offsets, w.pair_lengths, w.pair_offsets, w.longest, False
            )
        },
    )  # fmt: skip


@case("array_jagged_bmm_jagged_out")
def _pair_sums(w: Workload) -> Case:
    return Case(
        (w.random(w.pairs), w.random(w.total, w.d)),
        lambda s, b: ops.array_jagged_bmm_jagged_out(s, b, w.offsets),
        lambda s, b: w.unpad(w.pad_pairs(s) @ w.pad(b)),
        2 * w.total * w.d + w.pairs, 3 * w.total * w.d + 2 * w.pairs, "2 S D + P",
        2 * w.pairs * w.d, 2 * w.size * w.longest**2 * w.d,
        {
            "sll": lambda s, b: torch.ops.fbgemm.sll_array_jagged_bmm_jagged_out(
                s, b, w.pair_lengths, w.pair_offsets, w.lengths, w.offsets, w.lengths, w.offsets, w.longest, False
            )
        },
    )  # fmt: skip


def _softmax_of_pairs(w: Workload, dim: int) -> Case:
    return Case(
        (w.random(w.pairs),),
        lambda s: ops.jagged2_softmax(s, w.offsets, dim=dim),
        lambda s: w.unpad_pairs(w.pad_pairs(s, -1e30).softmax(dim)),
        2 * w.pairs, 3 * w.pairs, "2 P", 5 * w.pairs, 5 * w.size * w.longest**2,
        # "Transposed" is what normalises columns.
        {"sll": lambda s: torch.ops.fbgemm.sll_jagged2_softmax(s, w.offsets, w.pair_offsets, w.longest, dim == -2)},
    )  # fmt: skip


@case("jagged2_softmax")
def _softmax_of_pair_rows(w: Workload) -> Case:
    return _softmax_of_pairs(w, -1)


@case("jagged2_softmax dim=-2")
def _softmax_of_pair_columns(w: Workload) -> Case:
    return _softmax_of_pairs(w, -2)


@case("jagged_pairwise_difference")
def _pairwise_difference(w: Workload) -> Case:
    def padded(x: Tensor) -> Tensor:
        dense = w.pad(x)
        return w.unpad_pairs(dense[:, :, None] - dense[:, None, :])

    return Case(
        (w.random(w.total),),
        lambda x: ops.jagged_pairwise_difference(x, w.offsets, total=w.pairs),
        padded,
        w.total + w.pairs, w.total + w.pairs, "S + P", w.pairs, w.size * w.longest**2,
    )  # fmt: skip


@case("jagged_to_dense")
def _to_dense(w: Workload) -> Case:
    return Case(
        (w.random(w.total, w.d),),
        lambda x: ops.jagged_to_dense(x, w.offsets, w.longest),
        w.pad,
        w.total * w.d + w.size * w.longest * w.d, 2 * w.total * w.d, "S D + B L D",
        peers={"fbgemm": lambda x: torch.ops.fbgemm.jagged_to_padded_dense(x, [w.offsets], [w.longest], 0.0)},
    )  # fmt: skip


@case("dense_to_jagged")
def _to_jagged(w: Workload) -> Case:
    return Case(
        (w.random(w.size, w.longest, w.d),),
        lambda x: ops.dense_to_jagged(x, w.offsets, w.total),
        w.unpad,
        2 * w.total * w.d, w.total * w.d + w.size * w.longest * w.d, "2 S D",
        peers={"fbgemm": lambda x: torch.ops.fbgemm.dense_to_jagged(x, [w.offsets], w.total)[0]},
    )  # fmt: skip


def _beside(w: Workload) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A second part whose lengths are the first one's in reverse: its offsets, and where both parts' and all rows lie."""
    lengths = w.lengths.flip(0)
    other = Workload(lengths, w.longest, w.d, w.t, w.dtype)
    # In [B, 2 longest]: the first part's rows, then the second one's.
    first = w.rows + w.sample * w.longest
    second = other.rows + (other.sample + 1) * w.longest
    return other.offsets, first, second, torch.cat([first, second]).sort().values


@case("jagged_concat")
def _concat(w: Workload) -> Case:
    offsets, first, second, both = _beside(w)

    def padded(x: Tensor, y: Tensor) -> Tensor:
        dense = x.new_zeros(w.size * 2 * w.longest, w.d).index_copy(0, first, x).index_copy(0, second, y)
        return take(dense, both)

    return Case(
        (w.random(w.total, w.d), w.random(w.total, w.d)),
        lambda x, y: ops.jagged_concat([x, y], [w.offsets, offsets])[0],
        padded,
        4 * w.total * w.d, 4 * w.total * w.d, "2 x 2 S D",
    )  # fmt: skip


@case("jagged_concat [B, 1], [S]")
def _concat_scores(w: Workload) -> Case:
    # Of one dense row, then the sample's: what FBGEMM-GPU has, for scores alone.
    place = torch.arange(w.size, device=w.lengths.device) * (w.longest + 1)
    rows = w.rows + w.sample + 1
    both = torch.cat([place, rows]).sort().values

    def padded(x: Tensor, y: Tensor) -> Tensor:
        dense = y.new_zeros(w.size * (w.longest + 1)).index_copy(0, place, x.flatten()).index_copy(0, rows, y)
        return take(dense, both)

    return Case(
        (w.random(w.size, 1), w.random(w.total)),
        lambda x, y: ops.jagged_concat([x, y], [None, w.offsets])[0],
        padded,
        2 * (w.total + w.size), 2 * (w.total + w.size), "2 (S + B)",
        peers={"sll": lambda x, y: torch.ops.fbgemm.sll_dense_jagged_cat_jagged_out(x.flatten(), y, w.offsets, w.longest)[0]},
    )  # fmt: skip


@case("jagged_split")
def _split(w: Workload) -> Case:
    offsets, first, second, both = _beside(w)

    def padded(x: Tensor) -> tuple[Tensor, Tensor]:
        dense = x.new_zeros(w.size * 2 * w.longest, w.d).index_copy(0, both, x)
        return take(dense, first), take(dense, second)

    return Case(
        (w.random(2 * w.total, w.d),),
        lambda x: ops.jagged_split(x, [w.offsets, offsets], [w.total, w.total]),
        padded,
        4 * w.total * w.d, 4 * w.total * w.d, "2 x 2 S D",
    )  # fmt: skip


@case("jagged_truncate")
def _truncate(w: Workload) -> Case:
    # Half of the longest are kept, so that about half of the samples lose rows.
    length = max(w.longest // 2, 1)
    kept = int(w.lengths.clamp(max=length).sum())
    rows = w.rows[w.position >= (w.lengths - length)[w.sample]]
    return Case(
        (w.random(w.total, w.d),),
        lambda x: ops.jagged_truncate(x, w.offsets, length, keep="last", total=kept)[0],
        lambda x: take(w.pad(x).flatten(0, 1), rows),
        2 * kept * w.d, (kept + w.total) * w.d, "2 K D, K rows kept",
    )  # fmt: skip


@case("jagged_dense_add")
def _add(w: Workload) -> Case:
    return Case(
        (w.random(w.total, w.d), w.random(w.size, w.longest, w.d)),
        lambda x, y: ops.jagged_dense_add(x, w.offsets, y),
        lambda x, y: w.unpad(w.pad(x) + y),
        3 * w.total * w.d, w.total * w.d + w.size * w.longest * w.d, "3 S D", w.total * w.d, w.size * w.longest * w.d,
        {
            "sll": lambda x, y: torch.ops.fbgemm.sll_jagged_dense_elementwise_add(x, w.offsets, y, w.longest, False),
            "fbgemm": lambda x, y: torch.ops.fbgemm.jagged_dense_elementwise_add_jagged_output(x, [w.offsets], y)[0],
        },
    )  # fmt: skip


@case("jagged_dense_add [B, F]")
def _add_row(w: Workload) -> Case:
    return Case(
        (w.random(w.total, w.d), w.random(w.size, w.d)),
        lambda x, y: ops.jagged_dense_add(x, w.offsets, y),
        lambda x, y: w.unpad(w.pad(x) + y[:, None]),
        2 * w.total * w.d + w.size * w.d, w.total * w.d + w.size * w.d, "2 S D + B D",
        w.total * w.d, w.size * w.longest * w.d,
    )  # fmt: skip


@case("jagged_dense_mul")
def _mul(w: Workload) -> Case:
    return Case(
        (w.random(w.total, w.d), w.random(w.size, w.longest, w.d)),
        lambda x, y: ops.jagged_dense_mul(x, w.offsets, y),
        lambda x, y: w.unpad(w.pad(x) * y),
        3 * w.total * w.d, 4 * w.total * w.d + w.size * w.longest * w.d, "3 S D", w.total * w.d, w.size * w.longest * w.d,
        {"fbgemm": lambda x, y: torch.ops.fbgemm.jagged_dense_elementwise_mul(x, [w.offsets], y)[0]},
    )  # fmt: skip


@case("jagged_dense_mul [B, F]")
def _mul_row(w: Workload) -> Case:
    return Case(
        (w.random(w.total, w.d), w.random(w.size, w.d)),
        lambda x, y: ops.jagged_dense_mul(x, w.offsets, y),
        lambda x, y: w.unpad(w.pad(x) * y[:, None]),
        2 * w.total * w.d + w.size * w.d, 3 * w.total * w.d + 2 * w.size * w.d, "2 S D + B D",
        w.total * w.d, w.size * w.longest * w.d,
    )  # fmt: skip
