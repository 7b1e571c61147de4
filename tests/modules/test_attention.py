"""Attention modules, transformer blocks and positions against padded twins of the same parameters, on empty samples too."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from jagged.modules import HSTUBlock, JaggedCrossAttention, JaggedSelfAttention, JaggedTransformerBlock, PositionalEncoding
from jagged.modules.positions import positions_with_targets, rotate
from jagged.ops import jagged_attention
from tests.oracle import check_three_way
from tests.places import PLACE, Place
from tests.reference.attention import visible_keys
from tests.reference.conversion import to_dense, to_jagged
from tests.reference.transformer import PaddedCrossAttention, PaddedSelfAttention, PaddedTransformerBlock
from tests.strategies import Jagged, jagged_batches, jagged_of, random_tensor, seeds

DIM = 12
# Heads and key heads; of the last the heads are 3 wide, so that rotary positions leave a column.
HEADS = [(3, 3), (2, 1), (6, 2), (4, 2)]
# Of the biases: the widest distance and the time buckets. With one of either the softmax would cancel it.
BIASES = [(None, 40), (1, None), (7, 3), (100, 96)]
EXACT = [dtype for dtype in PLACE.dtypes if dtype in (torch.float32, torch.float64)]

pytestmark = pytest.mark.skipif(PLACE.name == "interpret", reason="modules run on the place's own backend")


def jagged(values: Tensor, batch: Jagged) -> JaggedTensor:
    return JaggedTensor(values=values, offsets=batch.offsets)


def padded(values: Tensor, batch: Jagged) -> Tensor:
    return to_dense(values, batch.lengths, max([1, *batch.lengths]), 0.0)


def lengths(batch: Jagged) -> Tensor:
    return torch.tensor(batch.lengths, dtype=torch.int64, device=PLACE.device)


def check_twins(
    ours: nn.Module, twin: nn.Module, run: Callable[..., Tensor], run_twin: Callable[..., Tensor], inputs: list[Tensor]
) -> None:
    """Check outputs and the gradients of inputs and parameters; both functions call the module that they are given first."""
    assert list(ours.state_dict()) == list(twin.state_dict())
    names = list(ours.state_dict())

    def of(module: nn.Module, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def evaluate(*tensors: Tensor) -> Tensor:
            parameters = dict(zip(names, tensors[len(inputs) :], strict=True))

            def call(*arguments: Any) -> Any:
                return torch.func.functional_call(module, parameters, arguments)

            return function(call, *tensors[: len(inputs)])

        return evaluate

    parameters = [parameter.detach() for parameter in ours.state_dict().values()]
    check_three_way(of(ours, run), of(twin, run_twin), [*inputs, *parameters])


@st.composite
def options_of_batches(
    draw: st.DrawFn, batches: st.SearchStrategy[Jagged] | None = None, windows: tuple[int | None, ...] = (None, 1, 3, 20)
) -> tuple[Jagged, dict[str, Any], int | Tensor | None]:
    """A batch, what a self-attention's mask is built with, and the targets that it is called with."""
    batch = draw(jagged_batches(longest=40) if batches is None else batches)
    options = {
        "causal": draw(st.booleans()),
        "window": draw(st.sampled_from(windows)),
        "num_contextual": draw(st.integers(0, 3)),
    }
    each = st.lists(st.integers(0, 9), min_size=batch.batch_size, max_size=batch.batch_size)
    numbers = each.map(lambda n: torch.tensor(n, dtype=torch.int32, device=PLACE.device))
    return batch, options, draw(st.one_of(st.none(), st.integers(0, 5), numbers))


def positions_of(batch: Jagged, num_targets: int | Tensor | None) -> Tensor:
    """`[B, longest]`: all targets stand behind the history."""
    places = torch.arange(max([1, *batch.lengths]), device=PLACE.device).expand(batch.batch_size, -1)
    if num_targets is None:
        return places
    return places.minimum((lengths(batch) - num_targets).clamp(min=0)[:, None])


@settings(max_examples=40)
@given(options_of_batches(), seeds(), st.sampled_from(HEADS), st.booleans())
def test_self_attention(place: Place, case: tuple[Jagged, Any, Any], seed: int, heads: tuple[int, int], rotary: bool) -> None:
    (batch, options, num_targets), (num_heads, num_key_heads) = case, heads
    torch.manual_seed(seed)
    ours = JaggedSelfAttention(DIM, num_heads, num_key_heads=num_key_heads, rotary=rotary, **options).to(place.device)
    visible = visible_keys(lengths(batch), lengths(batch), num_targets=num_targets, **options)
    check_twins(
        ours,
        PaddedSelfAttention(DIM, num_heads, num_key_heads, rotary),
        lambda call, v: call(jagged(v, batch), num_targets).values(),
        lambda call, v: to_jagged(call(padded(v, batch), visible, positions_of(batch, num_targets)), batch.lengths),
        [random_tensor((batch.total, DIM), torch.float32, seed)],
    )


@settings(max_examples=30)
@given(options_of_batches(), seeds(), st.sampled_from(["pre", "post"]), st.booleans())
def test_transformer_block(place: Place, case: tuple[Jagged, Any, Any], seed: int, norm: Any, rotary: bool) -> None:
    batch, options, num_targets = case
    torch.manual_seed(seed)
    ours = JaggedTransformerBlock(DIM, 4, num_key_heads=2, norm=norm, rotary=rotary, **options).to(place.device)
    visible = visible_keys(lengths(batch), lengths(batch), num_targets=num_targets, **options)
    check_twins(
        ours,
        PaddedTransformerBlock(DIM, 4, 2, rotary, norm),
        lambda call, v: call(jagged(v, batch), num_targets).values(),
        lambda call, v: to_jagged(call(padded(v, batch), visible, positions_of(batch, num_targets)), batch.lengths),
        [random_tensor((batch.total, DIM), torch.float32, seed)],
    )


def biased() -> st.SearchStrategy[tuple[Jagged, Any, Any]]:
    """Cases in which some row sees several keys: of others the gradient of biases is exactly nothing in the reference."""
    batches = jagged_batches(longest=40).map(lambda batch: jagged_of((*batch.lengths, 13), batch.offsets.dtype))
    return options_of_batches(batches, (None, 3, 20))


def random_times(batch: Jagged, seed: int, bits: int) -> Tensor:
    times = torch.randint(2**bits, (batch.total,), generator=torch.Generator().manual_seed(seed))
    return (times + 1_700_000_000).to(PLACE.device)


@settings(max_examples=40)
@given(
    biased(), seeds(), st.sampled_from(HEADS), st.booleans(), st.sampled_from(BIASES), st.sampled_from([3, 12, 45]),
    st.sampled_from(EXACT),
)  # fmt: skip
def test_self_attention_with_biases(
    place: Place, case: tuple[Jagged, Any, Any], seed: int, heads: tuple[int, int], rotary: bool,
    biases: tuple[int | None, int | None], bits: int, dtype: torch.dtype,
) -> None:  # fmt: skip
    (batch, options, num_targets), (max_distance, num_time_buckets) = case, biases
    torch.manual_seed(seed)
    ours = JaggedSelfAttention(
        DIM, heads[0], num_key_heads=heads[1], rotary=rotary, max_distance=max_distance, num_time_buckets=num_time_buckets,
        **options,
    ).to(place.device, dtype)  # fmt: skip
    enlarge_biases(ours)
    visible = visible_keys(lengths(batch), lengths(batch), num_targets=num_targets, **options)
    times = random_times(batch, seed, bits)
    check_twins(
        ours,
        PaddedSelfAttention(DIM, *heads, rotary, max_distance, num_time_buckets),
        lambda call, v: call(jagged(v, batch), num_targets, None if num_time_buckets is None else times).values(),
        lambda call, v: to_jagged(
            call(padded(v, batch), visible, positions_of(batch, num_targets), padded(times, batch)), batch.lengths
        ),
        [random_tensor((batch.total, DIM), dtype, seed)],
    )


def enlarge_biases(module: nn.Module) -> None:
    """Biases of standard deviation 2 in place of 0.02, so that a wrong one is not lost among the scores."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith(("relative_bias", "time_bias")):
                parameter *= 100


@settings(max_examples=20)
@given(biased(), seeds(), st.sampled_from(["pre", "post"]), st.sampled_from(EXACT))
def test_transformer_block_with_biases(
    place: Place, case: tuple[Jagged, Any, Any], seed: int, norm: Any, dtype: torch.dtype
) -> None:
    batch, options, num_targets = case
    torch.manual_seed(seed)
    ours = JaggedTransformerBlock(
        DIM, 4, num_key_heads=2, norm=norm, max_distance=5, num_time_buckets=20, attention_dropout=0.5, **options
    ).to(place.device, dtype)
    ours.eval()
    enlarge_biases(ours)
    visible = visible_keys(lengths(batch), lengths(batch), num_targets=num_targets, **options)
    times = random_times(batch, seed, 12)
    check_twins(
        ours,
        PaddedTransformerBlock(DIM, 4, 2, False, norm, 5, 20),
        lambda call, v: call(jagged(v, batch), num_targets, times).values(),
        lambda call, v: to_jagged(
            call(padded(v, batch), visible, positions_of(batch, num_targets), padded(times, batch)), batch.lengths
        ),
        [random_tensor((batch.total, DIM), dtype, seed)],
    )


def memories() -> st.SearchStrategy[Jagged]:
    """Batches whose last sample has several keys: where a query has one, its gradient is exactly nothing in the reference."""
    return jagged_batches(longest=40).map(
        lambda batch: jagged_of((*batch.lengths, 6), batch.offsets.dtype) if batch.total else batch
    )


@st.composite
def queries_and_memory(draw: st.DrawFn) -> tuple[Jagged, Jagged]:
    memory = draw(memories())
    each = st.lists(st.integers(0, 9), min_size=memory.batch_size, max_size=memory.batch_size)
    lengths = (*draw(each)[:-1], 5) if memory.batch_size else ()
    return jagged_of(lengths, draw(st.sampled_from([torch.int32, torch.int64]))), memory


@settings(max_examples=30)
@given(queries_and_memory(), seeds(), st.sampled_from(HEADS), st.sampled_from([5, DIM]))
def test_cross_attention(place: Place, case: tuple[Jagged, Jagged], seed: int, heads: tuple[int, int], key_dim: int) -> None:
    queries, memory = case
    torch.manual_seed(seed)
    ours = JaggedCrossAttention(DIM, heads[0], key_dim=key_dim, num_key_heads=heads[1]).to(place.device)
    visible = visible_keys(lengths(queries), lengths(memory))
    check_twins(
        ours,
        PaddedCrossAttention(DIM, heads[0], key_dim, heads[1]),
        lambda call, q, m: call(jagged(q, queries), jagged(m, memory)).values(),
        lambda call, q, m: to_jagged(call(padded(q, queries), padded(m, memory), visible), queries.lengths),
        [
            random_tensor((queries.total, DIM), torch.float32, seed),
            random_tensor((memory.total, key_dim), torch.float32, seed + 1),
        ],
    )


@settings(max_examples=20)
@given(memories(), seeds(), st.integers(0, 5))
def test_cross_attention_of_dense_queries(place: Place, memory: Jagged, seed: int, count: int) -> None:
    """As many queries in every sample, in and out as `[B, n, D]`."""
    torch.manual_seed(seed)
    ours = JaggedCrossAttention(DIM, 3).to(place.device)
    visible = visible_keys(torch.full_like(lengths(memory), count), lengths(memory))[:, :count]
    check_twins(
        ours,
        PaddedCrossAttention(DIM, 3, DIM, 3),
        lambda call, q, m: call(q, jagged(m, memory)),
        lambda call, q, m: call(q, padded(m, memory), visible),
        [
            random_tensor((memory.batch_size, count, DIM), torch.float32, seed),
            random_tensor((memory.total, DIM), torch.float32, seed + 1),
        ],
    )


def dropped(queries: Jagged, keys: Jagged, heads: int, probability: float) -> Tensor:
    """What dropout multiplies weights by, `[B, H, Lq, Lk]`, as the generator stands: equal weights of unit vectors show it."""
    places = torch.cat([torch.arange(n) for n in keys.lengths]).to(PLACE.device)
    units = torch.eye(max(keys.lengths), device=PLACE.device)[places][:, None].expand(-1, heads, -1)
    q = torch.zeros(queries.total, heads, units.shape[2], device=PLACE.device)
    seen = jagged_attention(q, torch.zeros_like(units), units, queries.offsets, keys.offsets, dropout_p=probability)
    return padded((seen > 0).double() / (1 - probability), queries).transpose(1, 2)


@settings(max_examples=10)
@given(seeds(), st.sampled_from(HEADS), st.sampled_from([0.1, 0.7]), st.sampled_from(EXACT))
def test_attention_dropout(place: Place, seed: int, heads: tuple[int, int], probability: float, dtype: torch.dtype) -> None:
    """Against twins that are told which weights to drop; the same draw as of a call of the operator."""
    batch, queries = jagged_of((13, 0, 1, 40)), jagged_of((2, 5, 0, 9))
    torch.manual_seed(seed)
    options = {"num_key_heads": heads[1], "attention_dropout": probability}
    attention = JaggedSelfAttention(DIM, heads[0], rotary=True, **options)  # type: ignore[arg-type]
    block = JaggedTransformerBlock(DIM, heads[0], rotary=True, **options)  # type: ignore[arg-type]
    cross = JaggedCrossAttention(DIM, heads[0], **options)  # type: ignore[arg-type]
    positions, causal = positions_of(batch, None), visible_keys(lengths(batch), lengths(batch), causal=True)
    values = random_tensor((batch.total, DIM), dtype, seed)

    def after_seeding(call: Callable[..., Any], *arguments: Any) -> Any:
        torch.manual_seed(seed)
        return call(*arguments)

    keep = after_seeding(dropped, batch, batch, heads[0], probability)
    for ours, twin in (
        (attention, PaddedSelfAttention(DIM, *heads, True)),
        (block, PaddedTransformerBlock(DIM, *heads, True, "pre")),
    ):
        check_twins(
            ours.to(place.device, dtype),
            twin,
            lambda call, v: after_seeding(call, jagged(v, batch)).values(),
            lambda call, v: to_jagged(call(padded(v, batch), causal, positions, positions, keep), batch.lengths),
            [values],
        )
    keep = after_seeding(dropped, queries, batch, heads[0], probability)
    visible = visible_keys(lengths(queries), lengths(batch))
    check_twins(
        cross.to(place.device, dtype),
        PaddedCrossAttention(DIM, heads[0], DIM, heads[1]),
        lambda call, q, m: after_seeding(call, jagged(q, queries), jagged(m, batch)).values(),
        lambda call, q, m: to_jagged(call(padded(q, queries), padded(m, batch), visible, keep), queries.lengths),
        [random_tensor((queries.total, DIM), dtype, seed + 1), values],
    )


@pytest.mark.parametrize("module", [JaggedSelfAttention, JaggedTransformerBlock, JaggedCrossAttention])
def test_attention_dropout_is_drawn_in_training_only(place: Place, module: type[nn.Module]) -> None:
    x = jagged(random_tensor((7, DIM), torch.float32, 0), jagged_of((4, 3)))
    inputs = (x, x) if module is JaggedCrossAttention else (x,)
    torch.manual_seed(0)
    built = module(DIM, 3, attention_dropout=0.5).to(place.device)
    assert not torch.equal(built(*inputs).values(), built(*inputs).values())
    torch.manual_seed(0)
    without = module(DIM, 3).to(place.device)
    assert torch.equal(built.eval()(*inputs).values(), without(*inputs).values())


def test_under_autocast(place: Place) -> None:
    """Against the twins under autocast, which leaves their float64 alone."""
    torch.manual_seed(0)
    queries, memory = jagged_of((2, 5, 0, 3)), jagged_of((30, 0, 4, 7))
    visible = visible_keys(lengths(queries), lengths(memory))
    block = JaggedTransformerBlock(DIM, 4, num_key_heads=2, rotary=True).to(place.device)
    cross = JaggedCrossAttention(DIM, 3).to(place.device)
    values = random_tensor((memory.total, DIM), torch.float32, 0)
    with torch.autocast(place.device.type, torch.bfloat16):
        check_twins(
            cross,
            PaddedCrossAttention(DIM, 3, DIM, 3),
            lambda call, q, m: call(jagged(q, queries), jagged(m, memory)).values(),
            lambda call, q, m: to_jagged(call(padded(q, queries), padded(m, memory), visible), queries.lengths),
            [random_tensor((queries.total, DIM), torch.float32, 1), values],
        )
        causal = visible_keys(lengths(memory), lengths(memory), causal=True)
        check_twins(
            block,
            PaddedTransformerBlock(DIM, 4, 2, True, "pre"),
            lambda call, v: call(jagged(v, memory)).values(),
            lambda call, v: to_jagged(call(padded(v, memory), causal, positions_of(memory, None)), memory.lengths),
            [values],
        )


def test_rotary_scores_depend_on_distances_alone(place: Place) -> None:
    # Scores far from 0 and from each other, which random rows may miss.
    rows = torch.tensor([[[1.0, 2, 3, 4, 5, 6, 7]], [[2.0, -1, 1, 3, 0, 1, 2]]], dtype=torch.float64, device=place.device)

    def score(first: int, second: int) -> float:
        q, k = rotate(rows, torch.tensor([first, second], device=place.device))
        return float((q * k).sum())

    assert score(3, 1) == pytest.approx(score(1003, 1001), rel=1e-9)
    assert score(3, 1) != pytest.approx(score(1, 3), rel=1e-3)
    # The first pair turns by one radian a position, the last column not at all.
    turned = rotate(
        torch.eye(7, dtype=torch.float64, device=place.device)[[0, 6], None], torch.tensor([2, 2], device=place.device)
    )
    assert turned[0, 0, :2].tolist() == pytest.approx([math.cos(2), math.sin(2)])
    assert turned[1, 0].tolist() == [0, 0, 0, 0, 0, 0, 1]


def test_rotary_angles_are_not_rounded_to_the_dtype_of_rows(place: Place) -> None:
    """In bfloat16 position 1001 would be 1000."""
    rows = torch.randn(1, 1, 8, device=place.device).bfloat16()
    position = torch.tensor([1001], device=place.device)
    assert torch.equal(rotate(rows, position), rotate(rows.float(), position).bfloat16())


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_a_target_knows_neither_other_targets_nor_its_place(place: Place, norm: Any) -> None:
    torch.manual_seed(0)
    options = {"norm": norm, "rotary": True, "window": 4, "max_distance": 3, "num_time_buckets": 9}
    blocks = [JaggedTransformerBlock(DIM, 3, **options).to(place.device) for _ in range(2)]  # type: ignore[arg-type]
    for block in blocks:
        enlarge_biases(block)
    encoding = PositionalEncoding(6, DIM).to(place.device)
    history, targets = torch.randn(7, DIM, device=place.device), torch.randn(3, DIM, device=place.device)
    moments = torch.tensor([0, 1, 2, 4, 6, 9, 30, 40, 33, 70], device=place.device)

    def run(*wanted: int) -> Tensor:
        batch = jagged_of((7 + len(wanted), 0))
        x = encoding(jagged(torch.cat([history, targets[list(wanted)]]), batch), num_targets=len(wanted))
        times = moments[[*range(7), *(7 + i for i in wanted)]]
        for block in blocks:
            x = block(x, torch.tensor([len(wanted), 3], device=place.device), times)
        return x.values()

    every, turned, alone = run(0, 1, 2), run(2, 0, 1), run(1)
    torch.testing.assert_close(every[7:], turned[[8, 9, 7]])
    torch.testing.assert_close(every[8], alone[7])
    torch.testing.assert_close(every[:7], alone[:7])


@given(jagged_batches(), st.integers(1, 9), st.integers(-2, 9))
def test_positions_with_targets(place: Place, batch: Jagged, max_length: int, count: int) -> None:
    """Targets have the first vector; in a tensor, numbers outside the sample count as the nearest inside."""
    encoding = PositionalEncoding(max_length, 4).to(place.device)
    values = random_tensor((batch.total, 4), torch.float32, 0)
    history = [min(max(n - count, 0), n) for n in batch.lengths]
    expected = [min(max(h - i, 0), max_length - 1) for n, h in zip(batch.lengths, history, strict=True) for i in range(n)]
    wanted = values + encoding.weight[torch.tensor(expected, dtype=torch.int64, device=place.device)]
    each = torch.full((batch.batch_size,), count, device=place.device)
    torch.testing.assert_close(encoding(jagged(values, batch), each).values(), wanted, rtol=0, atol=0)
    if count >= 0:
        torch.testing.assert_close(encoding(jagged(values, batch), count).values(), wanted, rtol=0, atol=0)
    if count == 1:
        torch.testing.assert_close(encoding(jagged(values, batch)).values(), wanted, rtol=0, atol=0)


@pytest.mark.parametrize(("num_targets", "expected"), [(2, [0, 1, 1, 0]), (5, [0, 0, 0, 0]), (None, [0, 1, 2, 0])])
def test_places_are_never_negative(place: Place, num_targets: int | None, expected: list[int]) -> None:
    offsets = torch.tensor([0, 3, 3, 4], device=place.device)
    assert positions_with_targets(offsets, 4, num_targets).tolist() == expected
    if num_targets is not None:
        each = torch.full((3,), num_targets, device=place.device)
        assert positions_with_targets(offsets, 4, each).tolist() == expected


@pytest.mark.parametrize(
    ("module", "shown"),
    [
        (
            lambda device: JaggedSelfAttention(DIM, 6, num_key_heads=2, window=8, num_contextual=1, rotary=True, device=device),
            "num_heads=6, causal=True, num_key_heads=2, window=8, num_contextual=1, rotary=True, max_distance=None, "
            "num_time_buckets=None, attention_dropout=0.0",
        ),
        (
            lambda device: JaggedSelfAttention(DIM, 6, max_distance=9, num_time_buckets=5, attention_dropout=0.1, device=device),
            "max_distance=9, num_time_buckets=5, attention_dropout=0.1",
        ),
        (
            lambda device: JaggedCrossAttention(DIM, 6, key_dim=5, num_key_heads=2, attention_dropout=0.1, device=device),
            "num_heads=6, num_key_heads=2, attention_dropout=0.1",
        ),
        (lambda device: JaggedTransformerBlock(DIM, 3, norm="post", device=device), "norm='post'"),
    ],
)
def test_meta_device_reset_and_repr(module: Callable[[str], nn.Module], shown: str) -> None:
    built = module("meta")
    assert shown in repr(built)
    assert all(parameter.is_meta for parameter in built.parameters())
    built = built.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.fill_(torch.nan)
    built.reset_parameters()
    assert all(torch.isfinite(parameter).all() for parameter in built.parameters())


def test_biases_of_scores_are_small_and_one_for_each_head() -> None:
    torch.manual_seed(0)
    module = JaggedTransformerBlock(DIM, 4, num_key_heads=2, max_distance=200, num_time_buckets=300).attention
    for fresh in (True, False):
        assert module.relative_bias is not None
        assert module.time_bias is not None
        assert (module.relative_bias.shape, module.time_bias.shape) == ((4, 401), (4, 300))
        for bias in (module.relative_bias, module.time_bias):
            assert float(bias.detach().std()) == pytest.approx(0.02, rel=0.1), fresh
        module.reset_parameters()
    assert {name for name in JaggedSelfAttention(DIM, 4).state_dict() if "bias" in name} == {
        "qkv_projection.bias",
        "output_projection.bias",
    }


def test_sizes_of_projections() -> None:
    """Two of six heads for keys and for values; those of a module with as many are those of one fused projection."""
    shapes = {name: list(p.shape) for name, p in JaggedSelfAttention(DIM, 6, num_key_heads=2).named_parameters()}
    assert shapes["qkv_projection.weight"] == [20, 12]
    shapes = {name: list(p.shape) for name, p in JaggedSelfAttention(DIM, 6).named_parameters()}
    assert shapes == {
        "qkv_projection.weight": [36, 12],
        "qkv_projection.bias": [36],
        "output_projection.weight": [12, 12],
        "output_projection.bias": [12],
    }


def test_messages() -> None:
    rows = JaggedTensor(values=torch.zeros(4, DIM), offsets=torch.tensor([0, 1, 4]))
    narrow = JaggedTensor(values=torch.zeros(4, 5), offsets=torch.tensor([0, 1, 4]))
    cross = JaggedCrossAttention(DIM, 3)
    for module in (JaggedSelfAttention, JaggedCrossAttention):
        with pytest.raises(ValueError, match="num_heads: expected a divisor of embedding_dim 12, got 5"):
            module(DIM, 5)
        with pytest.raises(ValueError, match="num_key_heads: expected a divisor of num_heads 6, got 4"):
            module(DIM, 6, num_key_heads=4)
    with pytest.raises(ValueError, match="norm: expected 'pre' or 'post', got 'sandwich'"):
        JaggedTransformerBlock(DIM, 3, norm="sandwich")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"x: expected values \[sum L, D\] with D = 12, got \[4, 5\]"):
        JaggedSelfAttention(DIM, 3)(narrow)
    with pytest.raises(ValueError, match=r"queries: expected values \[sum L, D\] with D = 12, got \[4, 5\]"):
        cross(narrow, rows)
    with pytest.raises(ValueError, match=r"queries: expected values \[B, n, D\] with D = 12, got \[2, 12\]"):
        cross(torch.zeros(2, DIM), rows)
    with pytest.raises(ValueError, match=r"memory: expected values \[sum L, D\] with D = 12, got \[4, 5\]"):
        cross(rows, narrow)
    with pytest.raises(ValueError, match="memory: expected 3 samples, as many as queries has, got 2; a sample without"):
        cross(torch.zeros(3, 1, DIM), rows)
    for module in (JaggedSelfAttention, JaggedCrossAttention, JaggedTransformerBlock):
        for probability in (-0.1, 1):
            with pytest.raises(ValueError, match=rf"attention_dropout: expected .* \[0, 1\), got {probability}"):
                module(DIM, 3, attention_dropout=probability)
    for module in (JaggedSelfAttention, JaggedTransformerBlock):
        with pytest.raises(ValueError, match="max_distance: expected 0 or more, got -1"):
            module(DIM, 3, max_distance=-1)
        with pytest.raises(ValueError, match="num_time_buckets: expected 1 or more, got 0"):
            module(DIM, 3, num_time_buckets=0)
        with pytest.raises(
            ValueError, match=r"times: expected \[sum L\], int32 or int64, one for each row, got None; .* num_time_buckets=7"
        ):
            module(DIM, 3, num_time_buckets=7)(rows)
        with pytest.raises(ValueError, match=r"times: expected \[4\], one for each row, got \[2\]"):
            module(DIM, 3, num_time_buckets=7)(rows, times=torch.zeros(2, dtype=torch.int64))
        with pytest.raises(
            ValueError, match=r"times: expected None, got \[4\]; a module built with num_time_buckets takes times"
        ):
            module(DIM, 3)(rows, times=torch.zeros(4, dtype=torch.int64))
    for module in (JaggedSelfAttention(DIM, 3), JaggedSelfAttention(DIM, 3, rotary=True), PositionalEncoding(4, DIM)):
        with pytest.raises(ValueError, match=r"num_targets: expected \[2\], one for each sample, got \[3\]"):
            module(rows, torch.zeros(3, dtype=torch.int64))
        with pytest.raises(ValueError, match="num_targets: expected 0 or more, got -1"):
            module(rows, -1)


@pytest.mark.parametrize(("norm", "dropout"), [("pre", 0.0), ("post", 0.0), ("pre", 0.5)])
def test_a_network_that_is_computed_again_has_the_same_gradients(place: Place, norm: Any, dropout: float) -> None:
    """And keeps less; what was drawn is drawn again."""
    found: list[list[Tensor]] = []
    kept: dict[tuple[bool, bool], int] = {}
    values = random_tensor((40, DIM), torch.float32, 3)
    for recompute in (False, True):
        torch.manual_seed(0)
        block = JaggedTransformerBlock(DIM, 2, norm=norm, dropout=dropout, hidden_dim=4 * DIM, recompute=recompute).to(
            place.device
        )
        gradients: list[Tensor] = []
        for mode in (True, False):
            torch.manual_seed(1)
            sizes: list[int] = []

            def keep(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
                sizes.append(tensor.nbytes)
                return tensor

            x = values.clone().requires_grad_()
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                out = block.train(mode)(JaggedTensor(x, offsets=torch.tensor([0, 15, 15, 40], device=place.device))).values()
            gradients += [out.detach(), *torch.autograd.grad(out.square().sum(), [x, *block.parameters()])]
            kept[recompute, mode] = sum(sizes)
        found.append(gradients)
    assert len(found[0]) == 2 * (2 + len(list(block.parameters())))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    assert all(kept[True, mode] < kept[False, mode] / 2 for mode in (True, False))


@pytest.mark.parametrize("block", [JaggedTransformerBlock, HSTUBlock])
def test_compiles_to_one_graph(place: Place, block: type[nn.Module]) -> None:
    module = block(DIM, 3, max_distance=4, num_time_buckets=9).to(place.device)

    def run(values: Tensor, offsets: Tensor, num_targets: Tensor, times: Tensor) -> Tensor:
        return module(JaggedTensor(values=values, offsets=offsets), num_targets, times).values()

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch in (jagged_of((3, 0, 4)), jagged_of((5, 2, 2, 1))):
        arguments = batch.offsets, torch.ones_like(batch.offsets[1:]), random_times(batch, 0, 6)
        values = random_tensor((batch.total, DIM), torch.float32, 0).requires_grad_()
        results = [function(values, *arguments) for function in (compiled, run)]
        torch.testing.assert_close(*results)
        torch.testing.assert_close(*(torch.autograd.grad(result.sum(), values) for result in results))
