"""The block of HSTU against a padded twin of the same parameters, on empty samples and batches too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from jagged import ops
from jagged.modules import HSTUBlock
from tests.oracle import check_three_way
from tests.places import PLACE, Place
from tests.reference.attention import visible_keys
from tests.reference.conversion import to_dense, to_jagged
from tests.reference.hstu import PaddedHSTUBlock
from tests.strategies import Jagged, jagged_batches, jagged_of, random_tensor, seeds

DIM = 12
EXACT = [dtype for dtype in PLACE.dtypes if dtype in (torch.float32, torch.float64)]

pytestmark = pytest.mark.skipif(PLACE.name == "interpret", reason="modules run on the place's own backend")


def block_of(*arguments: Any, **options: Any) -> HSTUBlock:
    """A block whose scores are as large as its rows', so that no part of them is lost among the others."""
    block = HSTUBlock(*arguments, **options).to(PLACE.device)
    with torch.no_grad():
        block.uvqk_projection.weight *= 20
        nn.init.normal_(block.uvqk_projection.bias)
        nn.init.normal_(block.output_projection.bias)
        for bias in (block.relative_bias, block.time_bias):
            if bias is not None:
                bias *= 50
    return block


@st.composite
def cases(draw: st.DrawFn) -> tuple[Jagged, dict[str, Any], int | Tensor | None]:
    """A batch, what its mask is built with, and its targets."""
    batch = draw(jagged_batches(longest=40))
    options: dict[str, Any] = {"window": draw(st.sampled_from([None, 1, 3, 20])), "num_contextual": draw(st.integers(0, 3))}
    if options["window"] is not None:
        options["windowed_context"] = options["num_contextual"] > 0 and draw(st.booleans())
        # Contextual rows that have a place of their own lie in the prefix as a whole or not at all.
        least = options["num_contextual"] if options["windowed_context"] else 0
        options["global_prefix"] = draw(st.sampled_from([0, least, least + 2]))
    each = st.lists(st.integers(0, 9), min_size=batch.batch_size, max_size=batch.batch_size)
    numbers = each.map(lambda n: torch.tensor(n, dtype=torch.int32, device=PLACE.device))
    return batch, options, draw(st.one_of(st.none(), st.integers(0, 5), numbers))


@settings(max_examples=60)
@given(
    cases(), seeds(), st.sampled_from([(3, None), (2, 5), (1, 16)]), st.sampled_from([None, 0, 1, 7, 100]),
    st.sampled_from([None, 1, 3, 96]), st.sampled_from([None, 0.5, 50]), st.sampled_from([3, 12, 45]), st.sampled_from(EXACT),
    st.booleans(), st.sampled_from(["layer", "group", "rms"]), st.booleans(),
)  # fmt: skip
def test_is_the_padded_one(
    place: Place, case: tuple[Jagged, Any, Any], seed: int, heads: tuple[int, int | None], max_distance: int | None,
    num_time_buckets: int | None, normalizer: float | None, bits: int, dtype: torch.dtype, concat_ua: bool, norm: Any,
    recompute: bool,
) -> None:  # fmt: skip
    (batch, options, num_targets), (num_heads, head_dim) = case, heads
    torch.manual_seed(seed)
    ours = block_of(
        DIM, num_heads, head_dim=head_dim, max_distance=max_distance, num_time_buckets=num_time_buckets, normalizer=normalizer,
        concat_ua=concat_ua, norm=norm, recompute=recompute, **options,
    ).to(dtype)  # fmt: skip
    sizes = num_heads, head_dim or DIM // num_heads, max_distance, num_time_buckets
    twin = PaddedHSTUBlock(DIM, *sizes, normalizer, concat_ua, norm)
    names = list(ours.state_dict())
    assert names == list(twin.state_dict())

    longest = max([1, *batch.lengths])
    lengths = torch.tensor(batch.lengths, dtype=torch.int64, device=place.device)
    visible = visible_keys(lengths, lengths, causal=True, num_targets=num_targets, **options)
    history = lengths - torch.as_tensor(0 if num_targets is None else num_targets, device=place.device)
    positions = torch.arange(longest, device=place.device).minimum(history.clamp(min=0)[:, None])
    times = torch.randint(2**bits, (batch.total,), generator=torch.Generator().manual_seed(seed)).to(place.device)
    padded_times = to_dense(times, batch.lengths, longest, 0)

    def run(values: Tensor, *parameters: Tensor) -> Tensor:
        x = JaggedTensor(values=values, offsets=batch.offsets)
        arguments = x, num_targets, None if num_time_buckets is None else times
        return torch.func.functional_call(ours, dict(zip(names, parameters, strict=True)), arguments).values()

    def run_twin(values: Tensor, *parameters: Tensor) -> Tensor:
        arguments = to_dense(values, batch.lengths, longest, 0.0), visible, positions, padded_times, lengths
        rows = torch.func.functional_call(twin, dict(zip(names, parameters, strict=True)), arguments)
        return to_jagged(rows, batch.lengths)

    check_three_way(run, run_twin, [random_tensor((batch.total, DIM), dtype, seed), *(p.detach() for p in ours.parameters())])


def test_a_target_knows_neither_other_targets_nor_its_place(place: Place) -> None:
    torch.manual_seed(0)
    blocks = [block_of(DIM, 3, window=4, max_distance=3, num_time_buckets=9, normalizer=10) for _ in range(2)]
    history, targets = torch.randn(7, DIM, device=place.device), torch.randn(3, DIM, device=place.device)
    moments = torch.tensor([0, 1, 2, 4, 6, 9, 30, 40, 33, 70], device=place.device)

    def run(*wanted: int) -> Tensor:
        batch, times = jagged_of((7 + len(wanted), 0)), moments[[*range(7), *(7 + i for i in wanted)]]
        x = JaggedTensor(values=torch.cat([history, targets[list(wanted)]]), offsets=batch.offsets)
        for block in blocks:
            x = block(x, torch.tensor([len(wanted), 3], device=place.device), times)
        return x.values()

    every, turned, alone = run(0, 1, 2), run(2, 0, 1), run(1)
    torch.testing.assert_close(every[7:], turned[[8, 9, 7]])
    torch.testing.assert_close(every[8], alone[7])
    torch.testing.assert_close(every[:7], alone[:7])


def test_dropout_is_drawn_in_training_only(place: Place) -> None:
    x = JaggedTensor(values=random_tensor((7, DIM), torch.float32, 0), offsets=jagged_of((4, 3)).offsets)
    block = block_of(DIM, 3, dropout=0.5)
    assert not torch.equal(block(x).values(), block(x).values())
    block.eval()
    assert torch.equal(block(x).values(), block(x).values())


def test_state_of_one_block_makes_another_the_same(place: Place) -> None:
    x = JaggedTensor(values=random_tensor((7, DIM), torch.float32, 0), offsets=jagged_of((4, 0, 3)).offsets)
    times = torch.arange(7, device=place.device) ** 5
    first, second = (block_of(DIM, 3, max_distance=2, num_time_buckets=20) for _ in range(2))
    assert not torch.equal(first(x, times=times).values(), second(x, times=times).values())
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(x, times=times).values(), second(x, times=times).values())


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators that were called in place of modules, as on a GPU."""
    called: list[str] = []
    monkeypatch.setattr("jagged.modules.linear._is_run_on_gpu", lambda x: True)
    for name in ("hstu_projection", "hstu_output"):
        theirs = getattr(ops, name)
        noted = lambda *of, name=name, theirs=theirs, **more: (called.append(name), theirs(*of, **more))[1]  # noqa: E731
        monkeypatch.setattr(f"jagged.modules.hstu.{name}", noted)
    return called


@pytest.mark.parametrize("concat_ua", [False, True])
@pytest.mark.parametrize("norm", ["layer", "group", "rms"])
def test_operators_in_place_of_modules(place: Place, fused: list[str], norm: Any, concat_ua: bool) -> None:
    """As far as nobody watches a module or has put another in its place."""
    torch.manual_seed(0)
    block = block_of(DIM, 3, norm=norm, concat_ua=concat_ua, dropout=0.5, recompute=True).eval()
    x = JaggedTensor(values=random_tensor((9, DIM), torch.float32, 0), offsets=jagged_of((4, 0, 5)).offsets)
    expected = block(x).values()
    assert fused == ["hstu_projection", "hstu_output"]
    parts = {
        "uvqk_projection": "hstu_projection",
        **dict.fromkeys(("attention_norm", "output_projection", "dropout"), "hstu_output"),
    }
    for name, operator in parts.items():
        fused.clear()
        seen: list[nn.Module] = []
        part = getattr(block, name)
        with part.register_forward_hook(lambda module, *_, seen=seen: seen.append(module)):
            torch.testing.assert_close(block(x).values(), expected)
        assert seen == [part]
        assert fused == [each for each in ("hstu_projection", "hstu_output") if each != operator]
    fused.clear()
    block.uvqk_projection = nn.Linear(DIM, 4 * DIM, bias=False, device=PLACE.device)
    block.output_projection = nn.Linear(block.output_projection.in_features, DIM, bias=False, device=PLACE.device)
    assert bool(block(x).values().isfinite().all())
    assert fused == []


def test_dropout_is_the_modules_own(place: Place, fused: list[str]) -> None:
    """Also where it is an operator's; its draws follow PyTorch's seed."""
    block = block_of(DIM, 3, dropout=0.5)
    x = JaggedTensor(values=random_tensor((9, DIM), torch.float32, 0), offsets=jagged_of((4, 0, 5)).offsets)

    def run(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return block(x).values()

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))
    block.dropout.eval()
    assert torch.equal(run(1), run(2))


def test_recompute_keeps_less(place: Place) -> None:
    kept = {}
    x = JaggedTensor(values=random_tensor((500, DIM), torch.float32, 0), offsets=jagged_of((400, 0, 100)).offsets)
    gradients = []
    for recompute in (False, True):
        torch.manual_seed(0)
        block = block_of(DIM, 3, recompute=recompute)
        sizes: dict[int, int] = {}

        def pack(of: Tensor, sizes: dict[int, int] = sizes) -> Tensor:
            sizes[of.untyped_storage().data_ptr()] = of.untyped_storage().nbytes()
            return of

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda of: of):
            output = block(x).values()
        kept[recompute] = sum(sizes.values())
        gradients.append(torch.autograd.grad(output.square().sum(), list(block.parameters())))
    # What SiLU is applied to, of four parts; the bias, which is kept in its place, is small.
    assert kept[False] - kept[True] >= 0.99 * 4 * 500 * DIM * 4
    for first, second in zip(*gradients, strict=True):
        torch.testing.assert_close(first, second)


def test_lengths_and_offsets_are_shared(place: Place) -> None:
    batch = jagged_of((2, 0, 3))
    x = JaggedTensor(values=torch.zeros(5, DIM, device=place.device), lengths=batch.offsets.diff(), offsets=batch.offsets)
    y = HSTUBlock(DIM, 3).to(place.device)(x)
    assert y.offsets() is x.offsets()
    assert y.lengths() is x.lengths()


def test_meta_device_reset_and_repr() -> None:
    block = HSTUBlock(
        DIM, 3, head_dim=5, window=8, num_contextual=2, max_distance=400, num_time_buckets=300, dropout=0.1, normalizer=50,
        device="meta",
    )  # fmt: skip
    assert "num_heads=3, window=8, num_contextual=2, global_prefix=0, windowed_context=False, max_distance=400, " in repr(block)
    assert "num_time_buckets=300, normalizer=50, concat_ua=False, norm='layer', recompute=False" in repr(block)
    assert "p=0.1" in repr(block)
    assert {name: list(p.shape) for name, p in block.named_parameters() if p.dim() == 2} == {
        "relative_bias": [3, 801],
        "time_bias": [3, 300],
        "uvqk_projection.weight": [60, 12],
        "output_projection.weight": [12, 15],
    }
    assert all(parameter.is_meta for parameter in block.parameters())
    block = block.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.fill_(torch.nan)
    torch.manual_seed(0)
    block.reset_parameters()
    assert all(torch.isfinite(parameter).all() for parameter in block.parameters())
    for parameter in (block.relative_bias, block.time_bias, block.uvqk_projection.weight):
        assert float(parameter.detach().std()) == pytest.approx(0.02, rel=0.15)
    assert not block.uvqk_projection.bias.any()


def test_messages() -> None:
    rows = JaggedTensor(values=torch.zeros(4, DIM), offsets=torch.tensor([0, 1, 4]))
    with pytest.raises(ValueError, match=r"num_heads: expected a divisor of embedding_dim 12, got 5; .* unless head_dim"):
        HSTUBlock(DIM, 5)
    with pytest.raises(ValueError, match="num_heads: expected a divisor of embedding_dim 12, got 0"):
        HSTUBlock(DIM, 0, head_dim=4)
    with pytest.raises(ValueError, match="head_dim: expected 1 or more, got 0"):
        HSTUBlock(DIM, 3, head_dim=0)
    with pytest.raises(ValueError, match=r"^norm: expected one of layer, group, rms, got 'batch'$"):
        HSTUBlock(DIM, 3, norm="batch")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_distance: expected 0 or more, got -1"):
        HSTUBlock(DIM, 3, max_distance=-1)
    with pytest.raises(ValueError, match="num_time_buckets: expected 1 or more, got 0"):
        HSTUBlock(DIM, 3, num_time_buckets=0)
    with pytest.raises(ValueError, match="normalizer: "):
        HSTUBlock(DIM, 3, normalizer=0)(rows)
    with pytest.raises(ValueError, match=r"x: expected values \[sum L, D\] with D = 12, got \[4, 5\]"):
        HSTUBlock(DIM, 3)(JaggedTensor(values=torch.zeros(4, 5), offsets=torch.tensor([0, 1, 4])))
    with pytest.raises(
        ValueError, match=r"times: expected \[sum L\], int32 or int64, one for each row, got None; .* num_time_buckets=7"
    ):
        HSTUBlock(DIM, 3, num_time_buckets=7)(rows)
    with pytest.raises(ValueError, match=r"times: expected None, got \[4\]"):
        HSTUBlock(DIM, 3)(rows, times=torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"num_targets: expected \[2\], one for each sample, got \[3\]"):
        HSTUBlock(DIM, 3)(rows, torch.zeros(3, dtype=torch.int64))
