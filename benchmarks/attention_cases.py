"""Attention within the samples of a jagged batch: workloads, what a query sees of its sample, our operator and its peers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import embedding, scaled_dot_product_attention

from jagged.ops import jagged_attention, jagged_hstu_attention

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Mask:
    """What a query sees, as `jagged_attention` has it."""

    causal: bool = False
    window: int | None = None
    num_targets: int | None = None
    num_contextual: int = 0

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of `jagged_attention` that differ from its defaults."""
        return {name: value for name, value in vars(self).items() if value != getattr(Mask(), name)}

    def seen(self, queries: int, keys: int, device: torch.device, first: int = 0, last: int | None = None) -> Tensor:
        """`[last - first, keys]`, whether a query of a sample sees a key; `last` None for all queries."""
        position = torch.arange(first, queries if last is None else last, device=device)[:, None] + keys - queries
        key = torch.arange(keys, device=device)
        history = keys - min(self.num_targets or 0, keys)
        row = position.clamp(max=history)
        base = torch.ones(len(position), keys, dtype=torch.bool, device=device)
        if self.causal:
            base &= key <= row
        if self.window is not None:
            base &= ((row - key).abs() < self.window) | (key < self.num_contextual)
        seen = (key < history) & (base | (position < self.num_contextual))
        return seen | (key == position) if self.num_targets is not None else seen


@dataclass(frozen=True)
class Terms:
    """What is added to the scores, and what is made of them.

    Args:
        distances: columns of a relative bias; 0 for none.
        buckets: columns of a time bias; 0 for none.
        pairs: whether there is a bias of every pair, stored without padding.
        dropout: share of the weights.
        pointwise: whether SiLU makes the weights, as in HSTU, in place of the softmax.
    """

    distances: int = 0
    buckets: int = 0
    pairs: bool = False
    dropout: float = 0.0
    pointwise: bool = False


@dataclass(frozen=True)
class Size:
    """A workload that has not been made.

    Args:
        samples: B.
        length: the largest of uniform lengths, the median of lognormal ones (sigma 1), each of equal ones.
        heads: of the queries.
        width: of a head.
        mask: what a query sees.
        key_heads: None for as many as `heads`.
        queries: of each sample; None for as many as it has keys.
        lengths: `"uniform"`, `"lognormal"` or `"equal"`.
        dtype: `"bf16"` or `"fp32"`.
        terms: beside the products of queries and keys.
    """

    samples: int
    length: int
    heads: int
    width: int
    mask: Mask = Mask()
    key_heads: int | None = None
    queries: int | None = None
    lengths: str = "uniform"
    dtype: str = "bf16"
    terms: Terms = Terms()

    def draw(self) -> Tensor:
        """Lengths of the keys, `[B]` int64 on the CPU, the same each time."""
        generator = torch.Generator().manual_seed(0)
        if self.lengths == "equal":
            return torch.full((self.samples,), self.length)
        if self.lengths == "lognormal":
            return (torch.randn(self.samples, generator=generator).exp() * self.length).round().long()
        return torch.randint(0, self.length + 1, (self.samples,), generator=generator)

    @property
    def described(self) -> dict[str, Any]:
        """For the result file."""
        words = {
            "uniform": f"uniform on 0..{self.length}",
            "lognormal": f"lognormal, median {self.length}, sigma 1",
            "equal": f"all {self.length}",
        }
        return {
            **{"samples": self.samples, "length": self.length, "lengths": words[self.lengths], "heads": self.heads},
            **{"key_heads": self.key_heads or self.heads, "width": self.width, "queries": self.queries, "dtype": self.dtype},
            "mask": self.mask.options,
            "terms": vars(self.terms),
        }


class Workload:
    """Tensors of a size.

    q is `[Sq, H, D]`, k and v are `[Sk, Hkv, D]`; `upstream`, the gradient of the output, is `[Sq, H, D]`. `biases` are
    arguments of `jagged_attention`: tables in float32, that of all pairs in the dtype of q. `times` are in seconds, each up to a
    day after the one before it.
    """

    def __init__(self, size: Size, device: str) -> None:
        self.size, self.mask, self.device = size, size.mask, torch.device(device)
        self.key_lengths = size.draw()
        self.query_lengths = self.key_lengths if size.queries is None else torch.full_like(self.key_lengths, size.queries)
        # What peers are told: the declared length where there is one.
        self.longest = int(self.key_lengths.max()) if size.lengths == "lognormal" else size.length
        queries, keys = int(self.query_lengths.sum()), int(self.key_lengths.sum())
        generator = torch.Generator(self.device).manual_seed(0)
        self.q, self.k, self.v, self.upstream = (
            torch.randn(rows, heads, size.width, generator=generator, device=self.device).to(DTYPES[size.dtype])
            for rows, heads in ((queries, size.heads), *2 * ((keys, size.key_heads or size.heads),), (queries, size.heads))
        )
        self.scale = size.width**-0.5
        pairs = self.query_lengths * self.key_lengths
        columns = {
            "relative_bias": size.terms.distances,
            "time_bias": size.terms.buckets,
            "bias": size.terms.pairs * int(pairs.sum()),
        }
        self.biases = {
            name: torch.randn(size.heads, count, generator=generator, device=self.device).to(
                DTYPES[size.dtype] if name == "bias" else torch.float32
            )
            for name, count in columns.items()
            if count
        }
        self.times = torch.randint(1, 86_401, (keys,), generator=generator, device=self.device).cumsum(0)
        self.seed = torch.tensor([7], device=self.device)

    @cached_property
    def q_offsets(self) -> Tensor:
        return offsets_of(self.query_lengths).to(self.device)

    @cached_property
    def k_offsets(self) -> Tensor:
        return offsets_of(self.key_lengths).to(self.device)

    @cached_property
    def pairs(self) -> int:
        """How many pairs of a query and a key that it sees there are."""
        both = zip(self.query_lengths.tolist(), self.key_lengths.tolist(), strict=True)
        if self.mask == Mask():
            return sum(queries * keys for queries, keys in both)
        return sum(
            int(self.mask.seen(queries, keys, self.device, first, min(first + 1024, queries)).sum())
            for queries, keys in both
            for first in range(0, queries, 1024)
        )

    @property
    def flops(self) -> int:
        """Of the forward pass: two products of D multiplications and additions for each pair and head."""
        return 4 * self.pairs * self.size.heads * self.size.width

    @cached_property
    def rows(self) -> Tensor:
        """Where each key lies in `[B * longest]`."""
        sample = torch.repeat_interleave(torch.arange(self.size.samples), self.key_lengths)
        position = torch.arange(len(sample)) - offsets_of(self.key_lengths)[sample]
        return (sample * self.longest + position).to(self.device)

    def pad(self, x: Tensor) -> Tensor:
        """`[S, H, D] -> [B, H, longest, D]`, contiguous, zeros for padding."""
        padded = x.new_zeros(self.size.samples * self.longest, *x.shape[1:]).index_copy(0, self.rows, x)
        return padded.view(self.size.samples, self.longest, *x.shape[1:]).transpose(1, 2).contiguous()

    def unpad(self, x: Tensor) -> Tensor:
        """`[B, H, longest, D] -> [S, H, D]`."""
        return x.transpose(1, 2).flatten(0, 1)[self.rows]

    @cached_property
    def inside(self) -> Tensor:
        """Which pairs of a padded block `[B, longest, longest]` are of the sample."""
        row = torch.arange(self.longest) < self.key_lengths[:, None]
        return (row[:, :, None] & row[:, None]).to(self.device)


def offsets_of(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def time_buckets(times: Tensor, count: int) -> Tensor:
    """Buckets of differences of times, two an octave, from the float32's exponent and whether it is past the octave's half."""
    mantissa, exponent = torch.frexp(times.abs().float())
    return torch.where(times == 0, 0, 2 * exponent - 1 + (mantissa >= 0.75)).clamp(max=count - 1)


Results = tuple[Tensor, ...]


@dataclass
class Implementation:
    """Attention in a layout of its own, on inputs that are made before anything is timed.

    Args:
        inputs: what needs gradients: queries, keys, values and biases.
        upstream: the gradient of the output.
        call: from the inputs to the output.
        unpack: the output or a gradient, and its name, to our layout.
        sees_padding: whether the zeros that pad a sample are keys too.
        biases: names of the inputs past q, k and v.
    """

    inputs: Results
    upstream: Tensor
    call: Callable[..., Tensor]
    unpack: Callable[[Tensor, str], Tensor] = lambda x, _: x
    sees_padding: bool = False
    biases: Iterable[str] = ()

    def __post_init__(self) -> None:
        self.inputs = tuple(x.detach().requires_grad_() for x in self.inputs)

    def forward(self) -> Tensor:
        """The output, in its own layout, with no graph."""
        with torch.no_grad():
            return self.call(*self.inputs)

    def backward(self) -> Callable[[], Results]:
        """Run forward and return the backward alone."""
        output = self.call(*self.inputs)
        return lambda: torch.autograd.grad(output, self.inputs, self.upstream, retain_graph=True)

    def results(self) -> Iterator[tuple[str, Tensor]]:
        """The output, then the gradients of the inputs, in our layout."""
        yield "output", self.unpack(self.forward(), "output")
        for name, gradient in zip(("q", "k", "v", *self.biases), self.backward()(), strict=True):
            yield name, self.unpack(gradient, name)


def ours(w: Workload) -> Implementation:
    """`jagged_attention`, or `jagged_hstu_attention`."""
    return Implementation((w.q, w.k, w.v, *w.biases.values()), w.upstream, functools.partial(_attend, w), biases=w.biases)


def _attend(w: Workload, q: Tensor, k: Tensor, v: Tensor, *biases: Tensor, **options: Any) -> Any:
    options |= {**vars(w.mask), **dict(zip(w.biases, biases, strict=True))}
    times = w.times if "time_bias" in w.biases else None
    if w.size.terms.pointwise:
        return jagged_hstu_attention(q, k, v, w.q_offsets, times=times, **options)
    k_offsets = None if w.size.queries is None else w.k_offsets
    dropped = w.size.terms.dropout
    return jagged_attention(q, k, v, w.q_offsets, k_offsets, q_times=times, dropout_p=dropped, dropout_seed=w.seed, **options)


def ours_with_padding(w: Workload) -> Implementation:
    """Ours as it is where zeros that pad each sample to the longest are keys too: what attention on padded tensors gives."""
    padding = (w.longest - w.key_lengths).repeat_interleave(w.key_lengths).to(w.device)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        output, lse = _attend(w, q, k, v, return_lse=True)
        # Each adds exp(0) to the sum of a row's exponentials, and a value of zero.
        share = torch.sigmoid(lse - padding.log()).t()[..., None]
        return (output * share).to(q.dtype)

    return Implementation((w.q, w.k, w.v), w.upstream, call)


def varlen(w: Workload) -> Implementation:
    """PyTorch's attention of variable lengths: FlashAttention-2."""
    from torch.nn.attention.varlen import varlen_attn

    mask = w.mask
    if mask.num_targets is not None or mask.num_contextual:
        raise NotImplementedError("no such mask")
    options: dict[str, Any] = {}
    if mask.window is not None:
        options["window_size"] = (mask.window - 1, 0 if mask.causal else mask.window - 1)
    elif mask.causal:
        # PyTorch 2.11 and 2.13 say it differently.
        known = "is_causal" in inspect.signature(varlen_attn).parameters
        options |= {"is_causal": True} if known else {"window_size": (-1, 0)}
    # PyTorch 2.11 takes fewer key heads as they are; later ones want to be told.
    if w.q.shape[1] != w.k.shape[1] and "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = True
    q_offsets, k_offsets = w.q_offsets.int(), w.k_offsets.int()
    most = w.size.queries or w.longest

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        output: Tensor = varlen_attn(q, k, v, q_offsets, k_offsets, most, w.longest, **options)
        return output

    return Implementation((w.q, w.k, w.v), w.upstream, call)


def flash4(deterministic: bool, w: Workload) -> Implementation:
    """FlashAttention-4's kernels for Hopper, in CuTe."""
    from flash_attn.cute import flash_attn_varlen_func

    mask = w.mask
    if mask.num_targets is not None or mask.num_contextual:
        raise NotImplementedError("no such mask")
    window = (None, None) if mask.window is None else (mask.window - 1, 0 if mask.causal else mask.window - 1)
    attend = functools.partial(
        flash_attn_varlen_func,
        cu_seqlens_q=w.q_offsets.int(),
        cu_seqlens_k=w.k_offsets.int(),
        max_seqlen_q=w.size.queries or w.longest,
        max_seqlen_k=w.longest,
        causal=mask.causal and mask.window is None,
        window_size=window,
        deterministic=deterministic,
    )

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result = attend(q, k, v)
        # Some versions return the log-sum-exp too.
        output: Tensor = result[0] if isinstance(result, tuple) else result
        return output

    return Implementation((w.q, w.k, w.v), w.upstream, call)


def nested(w: Workload) -> Implementation:
    """A nested tensor through PyTorch's `scaled_dot_product_attention`."""

    def nest(x: Tensor) -> Tensor:
        shortest = int(w.key_lengths.min())
        return torch.nested.nested_tensor_from_jagged(
            x, w.k_offsets, min_seqlen=shortest, max_seqlen=int(w.key_lengths.max())
        ).transpose(1, 2)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        output = scaled_dot_product_attention(nest(q), nest(k), nest(v), is_causal=w.mask.causal)
        values: Tensor = output.transpose(1, 2).values()  # type: ignore[operator]
        return values

    return Implementation((w.q, w.k, w.v), w.upstream, call)


def padded(backend: SDPBackend | None, w: Workload) -> Implementation:
    """PyTorch's `scaled_dot_product_attention` on padded tensors, with no mask but the causal one: flash can take none.

    Biases go in as a mask with a number for every pair, and are measured with `causal` alone, whose queries see no padding.
    """
    own, mask_of = _mask_of_biases(w) if w.biases else ({}, lambda: None)

    def call(q: Tensor, k: Tensor, v: Tensor, *biases: Tensor) -> Tensor:
        mask = mask_of(*biases)
        with sdpa_kernel(backend) if backend is not None else nullcontext():
            return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=w.mask.causal and mask is None)

    def unpack(x: Tensor, name: str) -> Tensor:
        if name == "bias":
            return x.transpose(0, 1)[:, w.inside]
        return x if name in own else w.unpad(x)

    inputs = w.pad(w.q), w.pad(w.k), w.pad(w.v), *own.values()
    return Implementation(inputs, w.pad(w.upstream), call, unpack, sees_padding=not w.mask.causal, biases=own)


def _mask_of_biases(w: Workload) -> tuple[dict[str, Tensor], Callable[..., Tensor | None]]:
    """The biases, that of all pairs padded and causal already, and what makes the mask of them.

    Tables are looked up in every call, in q's dtype, by distances and buckets that are found before.
    """
    position = torch.arange(w.longest, device=w.device)
    hidden = torch.zeros(w.longest, w.longest, dtype=w.q.dtype, device=w.device).masked_fill(
        position[:, None] < position, -torch.inf
    )
    own = dict(w.biases)
    if "bias" in own:
        whole = own["bias"].new_zeros(w.size.heads, *w.inside.shape)
        whole[:, w.inside] = own["bias"]
        return {"bias": (whole.transpose(0, 1) + hidden).contiguous()}, lambda bias: bias
    places = {}
    if "relative_bias" in own:
        furthest = w.size.terms.distances // 2
        places["relative_bias"] = (furthest + (position[:, None] - position).clamp(-furthest, furthest)).int()[None]
    if "time_bias" in own:
        times = w.pad(w.times[:, None, None]).view(w.size.samples, w.longest)
        places["time_bias"] = time_buckets(times[:, :, None] - times[:, None], w.size.terms.buckets).int()

    def mask_of(*tables: Tensor) -> Tensor:
        mask = hidden
        for place, table in zip(places.values(), tables, strict=True):
            mask = mask + embedding(place, table.t().to(mask.dtype)).movedim(-1, 1).contiguous()
        return mask

    return own, mask_of


@functools.cache
def _flex() -> Callable[..., Tensor]:
    import torch._functorch.config
    from torch.nn.attention.flex_attention import flex_attention

    # Masks, widths and modes are compiled each for itself.
    torch._dynamo.config.recompile_limit = 64
    # Its backward is timed again and again on one graph, whose buffers it would otherwise take for its own.
    torch._functorch.config.donated_buffer = False
    return torch.compile(flex_attention, dynamic=True)


def flex(w: Workload) -> Implementation:
    """FlexAttention, compiled, with a document mask whose empty blocks are left out, and a relative bias if any."""
    mask = document_mask(w)
    # A number, or a size of the table, would be compiled as one that varies, which its kernels do not take.
    furthest = torch.tensor(w.size.terms.distances // 2, device=w.device)

    def call(q: Tensor, k: Tensor, v: Tensor, table: Tensor | None = None) -> Tensor:
        def by_distance(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            assert table is not None
            return score + table[head, furthest + (query - key).minimum(furthest).maximum(-furthest)]

        return _flex()(q, k, v, score_mod=None if table is None else by_distance, block_mask=mask)

    def pack(x: Tensor) -> Tensor:
        return x.transpose(0, 1)[None].contiguous()

    def unpack(x: Tensor, name: str) -> Tensor:
        return x if name in w.biases else x[0].transpose(0, 1)

    inputs = pack(w.q), pack(w.k), pack(w.v), *w.biases.values()
    implementation = Implementation(inputs, pack(w.upstream), call, unpack, biases=w.biases)
    for table in implementation.inputs[3:]:
        torch._dynamo.mark_static(table)
    return implementation


def document_mask(w: Workload, block: int = 128) -> Any:
    """The mask of rows of the same sample, its blocks found from the offsets: the whole mask need not be computed."""
    from torch.nn.attention.flex_attention import BlockMask

    total = w.q.shape[0]
    document = torch.repeat_interleave(torch.arange(w.size.samples), w.key_lengths).to(w.device)

    def same(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return document[query] == document[key]

    def same_before(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (document[query] == document[key]) & (query >= key)

    first = document[::block]
    last = document[torch.arange(block - 1, total + block - 1, block, device=w.device).clamp(max=total - 1)]
    some = (first[:, None] <= last) & (first <= last[:, None])
    every = (first[:, None] == last) & (first == last[:, None])
    if total % block:
        every[-1], every[:, -1] = False, False
    if w.mask.causal:
        some, every = some.tril(), every.tril(-1)

    def listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
        order = blocks.byte().argsort(dim=1, descending=True, stable=True)
        return blocks.sum(1).int()[None, None], order.int()[None, None]

    return BlockMask.from_kv_blocks(
        *listed(some & ~every),
        *listed(every),
        BLOCK_SIZE=block,
        mask_mod=same_before if w.mask.causal else same,
        seq_lengths=(total, total),
    )


def sll(w: Workload) -> Implementation:
    """FBGEMM-GPU's jagged flash attention. It has no scale, which q takes before, and divides by the maximum length."""
    import fbgemm_gpu.sll  # noqa: F401

    offsets, longest = w.k_offsets, w.longest
    return _by_heads(w, longest, lambda *x: torch.ops.fbgemm.sll_multi_head_jagged_flash_attention(*x, offsets, longest))


def sll_dense(w: Workload) -> Implementation:
    """FBGEMM-GPU's jagged attention that is not flash: scores, softmax and sums of values, each head's samples a batch."""
    import fbgemm_gpu.sll  # noqa: F401

    lengths = w.key_lengths.repeat(w.size.heads)
    n, pairs = lengths.to(w.device), (lengths**2).to(w.device)
    rows, cells, longest = offsets_of(n), offsets_of(pairs), w.longest
    ops = torch.ops.fbgemm

    def call(*inputs: Tensor) -> Tensor:
        q, k, v = (x.flatten(0, 1) for x in inputs)
        scores = ops.sll_jagged_jagged_bmm_jagged_out(q, k, n, rows, n, rows, pairs, cells, longest, False)
        weights = ops.sll_jagged2_softmax(scores, rows, cells, longest, False)
        output: Tensor = ops.sll_array_jagged_bmm_jagged_out(weights, v, pairs, cells, n, rows, n, rows, longest, False)
        return output.view(inputs[0].shape)

    return _by_heads(w, 1, call)


def _by_heads(w: Workload, divisor: int, call: Callable[..., Tensor]) -> Implementation:
    """In `[H, S, D]`, the scale in q, the output divided by `divisor`."""
    if w.mask != Mask():
        raise NotImplementedError("no masks")

    def pack(x: Tensor, factor: float = 1.0) -> Tensor:
        return (x * factor).transpose(0, 1).contiguous()

    factors = {"output": divisor, "q": w.scale}
    return Implementation(
        (pack(w.q, w.scale), pack(w.k), pack(w.v)),
        pack(w.upstream, divisor),
        call,
        lambda x, name: x.transpose(0, 1) * factors.get(name, 1.0),
    )


PEERS: dict[str, Callable[[Workload], Implementation]] = {
    "fa2": varlen,
    "fa4": functools.partial(flash4, False),
    "fa4_deterministic": functools.partial(flash4, True),
    "sll": sll,
    "sll_dense": sll_dense,
    "padded_math": functools.partial(padded, SDPBackend.MATH),
    "padded_flash": functools.partial(padded, SDPBackend.FLASH_ATTENTION),
    "padded_efficient": functools.partial(padded, SDPBackend.EFFICIENT_ATTENTION),
    "padded_cudnn": functools.partial(padded, SDPBackend.CUDNN_ATTENTION),
    "padded": functools.partial(padded, None),
    "flex": flex,
    "nested": nested,
}
