"""PyTorch's fused kernel on a CPU: against padded attention in float64, in any order of samples, and when it is left alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from jagged.ops import jagged_attention, trust_values
from jagged.ops.attention import torch_fused, torch_impl
from jagged.ops.attention.spec import Inputs, Options
from jagged.ops.attention.torch_fused import FEW_KEYS, Plan
from tests.oracle import check_three_way
from tests.reference.attention import padded_attention
from tests.strategies import random_tensor, seeds

DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def offsets_of(lengths: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype)


def inputs_of(queries: Sequence[int], keys: Sequence[int], heads: int, width: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    return [random_tensor((sum(of), heads, width), dtype, seed + i) for i, of in enumerate((queries, keys, keys))]


@st.composite
def lengths(draw: st.DrawFn) -> tuple[list[int], list[int] | None]:
    """Of queries and keys, or of both (None): some so many of a length that the kernel takes them, others few, short or empty."""
    many = draw(st.lists(st.integers(FEW_KEYS + 1, FEW_KEYS + 30), min_size=1, max_size=2))
    others = draw(st.lists(st.integers(0, FEW_KEYS + 4), max_size=4))
    keys = draw(st.permutations([length for length in many for _ in range(4)] + others))
    if draw(st.booleans()):
        keys = sorted(keys, reverse=True)
    if draw(st.booleans()):
        return keys, None
    queries = draw(
        st.just([draw(st.integers(1, 3))] * len(keys)) | st.lists(st.integers(0, 3), min_size=len(keys), max_size=len(keys))
    )
    return queries, keys


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=-(-settings().max_examples // len(DTYPES)))
@given(lengths(), st.booleans(), st.integers(1, 3), st.sampled_from([1, 2, 7, 16, 31, 32]), st.data(), seeds())
def test_three_way(
    dtype: torch.dtype, given: tuple[list[int], list[int] | None], causal: bool, heads: int, width: int, data: Any, seed: int
) -> None:
    queries, keys = given
    offsets = offsets_of(queries, data.draw(st.sampled_from([torch.int32, torch.int64])))
    k_offsets = None if keys is None else offsets_of(keys, offsets.dtype)
    options = {"causal": causal, "scale": data.draw(st.sampled_from([None, 2 / width**0.5, -(width**-0.5)]))}

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return jagged_attention(q, k, v, offsets, k_offsets, **options)

    def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return padded_attention(q, k, v, offsets, k_offsets, **options)[0]

    wanted = data.draw(st.lists(st.booleans(), min_size=3, max_size=3))
    check_three_way(
        ours, reference, inputs_of(queries, queries if keys is None else keys, heads, width, dtype, seed), requires_grad=wanted
    )


def test_samples_of_equal_lengths_share_a_call() -> None:
    """Longest first, and those of few keys or without queries last, in one kind."""
    keys = [20, 3, 40, 20, 0, 20, 40, 20, 40, 40]
    x = Inputs(*inputs_of(keys, keys, 1, 2, torch.float32, 0), offsets_of(keys))
    plan = Plan.of(x, Options())
    assert plan is not None
    assert (plan.sizes, plan.few) == ([(4, 40, 40), (4, 20, 20)], 2)
    # Calls of one sample each pay where it has many scores.
    queries = [1, 1, 0, 1, 1, 1, 2, 1, 2, 0]
    x = Inputs(*inputs_of(queries, keys, 2, 2, torch.float32, 0), offsets_of(queries), offsets_of(keys))
    assert Plan.of(x, Options()) is None
    queries[2], queries[9] = 2, 2
    x = Inputs(*inputs_of(queries, keys, 2, 2, torch.float32, 0), offsets_of(queries), offsets_of(keys))
    plan = Plan.of(x, Options())
    assert plan is not None
    assert (plan.sizes, plan.few) == ([(4, 2, 40), (4, 1, 20)], 2)
    for length, pays in ((90, False), (91, True)):
        x = Inputs(*inputs_of([length], [length], 1, 2, torch.float32, 0), offsets_of([length]))
        assert (Plan.of(x, Options()) is not None) == pays


def test_rows_in_order_are_read_where_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    kernel = torch_fused._KERNEL
    monkeypatch.setattr(
        torch_fused, "_KERNEL", lambda q, *more, **options: (calls.append(q.data_ptr()), kernel(q, *more, **options))[1]
    )
    for lengths_, is_copied in (([30] * 4 + [20] * 4 + [5, 0], False), ([5] + [30] * 4, True)):
        rows = random_tensor((sum(lengths_), 6, 16), torch.float32, 3)
        q, k, v = rows.split(2, 1)
        calls.clear()
        jagged_attention(q, k, v, offsets_of(lengths_))
        first, last = rows.data_ptr(), rows.data_ptr() + rows.nbytes
        assert [not first <= one < last for one in calls] == [is_copied] * (1 if is_copied else 2)


@pytest.mark.parametrize(
    "options",
    [
        {"window": 3}, {"softcap": 5.0}, {"num_contextual": 2, "causal": True}, {"num_targets": 2}, {"dropout_p": 0.5},
        {"relative_bias": torch.zeros(2, 9)}, {"q_times": torch.zeros(120, dtype=torch.int64), "time_bias": torch.zeros(2, 4)},
    ],
    ids=lambda options: next(iter(options)),
)  # fmt: skip
def test_what_the_kernel_does_not_know_is_computed_with_scores(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_fused, "_KERNEL", None)
    lengths_ = [30] * 4
    inputs = inputs_of(lengths_, lengths_, 2, 8, torch.float32, 0)
    jagged_attention(*inputs, offsets_of(lengths_), **options)
    with pytest.raises(TypeError, match="NoneType"):
        jagged_attention(*inputs, offsets_of(lengths_))
    grouped = [inputs[0].repeat(1, 2, 1), *inputs[1:]]
    jagged_attention(*grouped, offsets_of(lengths_))
    jagged_attention(*inputs[:2], inputs[2][..., :5], offsets_of(lengths_))


def test_a_gradient_of_log_sum_exp_is_computed_with_scores() -> None:
    lengths_ = [30] * 4 + [2, 0]
    leaves = [x.requires_grad_() for x in inputs_of(lengths_, lengths_, 2, 8, torch.float64, 0)]
    output, lse = jagged_attention(*leaves, offsets_of(lengths_), causal=True, return_lse=True)
    reference, of_reference = padded_attention(*leaves, offsets_of(lengths_), causal=True)
    torch.testing.assert_close(lse, of_reference)
    upstream = random_tensor(tuple(lse.shape), torch.float64, 5)
    for got, want in zip(
        torch.autograd.grad((output, lse), leaves, (output.detach(), upstream)),
        torch.autograd.grad((reference, of_reference), leaves, (reference.detach(), upstream)),
        strict=True,
    ):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("wrong", [[0, 30, 60, 90, 119], [1, 30, 60, 90, 120], [0, 60, 30, 90, 120], [0, 30, 60, 90, 150]])
def test_wrong_offsets_are_computed_with_scores(wrong: list[int]) -> None:
    """The kernel would read other samples' rows, or none at all."""
    inputs = [random_tensor((120, 2, 8), torch.float32, seed) for seed in range(3)]
    x = Inputs(*inputs, torch.tensor(wrong))
    assert Plan.of(x, Options()) is None
    with trust_values():
        output = torch_impl.forward(x, Options()).output
    assert torch.isfinite(output).all()


@pytest.mark.parametrize("lengths_", [[30] * 4, [5] + [30] * 4], ids=["in order", "gathered"])
@pytest.mark.parametrize("causal", [False, True])
def test_inputs_of_any_strides(lengths_: list[int], causal: bool) -> None:
    """The kernel itself reads a row's numbers as if they lay side by side."""
    total, offsets = sum(lengths_), offsets_of(lengths_)
    width_first = random_tensor((16, total, 2), torch.float32, 1).permute(1, 2, 0)
    gaps = random_tensor((total, 2, 32), torch.float32, 2)[..., ::2]
    heads_first = random_tensor((2, total, 16), torch.float32, 3).transpose(0, 1)
    for inputs in ([width_first, gaps, heads_first], [heads_first, width_first, gaps], [gaps, heads_first, width_first]):
        check_three_way(
            lambda q, k, v: jagged_attention(q, k, v, offsets, causal=causal),
            lambda q, k, v: padded_attention(q, k, v, offsets, causal=causal)[0],
            inputs,
        )
    leaves = [x.clone().requires_grad_() for x in (width_first, gaps, heads_first)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    # Gradients that are one number, expanded, and of other strides.
    other = random_tensor((16, total, 2), torch.float32, 4).permute(1, 2, 0)
    for upstream in (torch.ones(()).expand(total, 2, 16), other):
        got = torch.autograd.grad(jagged_attention(*leaves, offsets, causal=causal), leaves, upstream)
        want = torch.autograd.grad(padded_attention(*exact, offsets, causal=causal)[0], exact, upstream.double())
        for one, two in zip(got, want, strict=True):
            torch.testing.assert_close(one.double(), two, rtol=1e-5, atol=1e-5)


def test_autocast_compile_and_checkpoint() -> None:
    lengths_ = [30] * 4 + [5, 0]
    offsets = offsets_of(lengths_)
    leaves = [x.requires_grad_() for x in inputs_of(lengths_, lengths_, 2, 16, torch.float32, 0)]
    upstream = random_tensor(tuple(leaves[0].shape), torch.float32, 9)

    def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return jagged_attention(q, k, v, offsets, causal=True)

    def results(function: Any) -> list[Tensor]:
        output = function(*leaves)
        return [output.detach(), *torch.autograd.grad(output, leaves, upstream.to(output.dtype))]

    plain = results(attended)
    compiled = results(torch.compile(attended, fullgraph=True, backend="aot_eager"))
    checkpointed = results(lambda *given: checkpoint(attended, *given, use_reentrant=False))
    for one, two, three in zip(plain, compiled, checkpointed, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)
    with torch.autocast("cpu", torch.bfloat16):
        cast = results(attended)
    assert cast[0].dtype == torch.bfloat16
    assert [of.dtype for of in cast[1:]] == [torch.float32] * 3
    low = [x.detach().bfloat16().requires_grad_() for x in leaves]
    output = attended(*low)
    for got, want in zip(cast, [output.detach(), *torch.autograd.grad(output, low, upstream.bfloat16())], strict=True):
        assert torch.equal(got.bfloat16(), want)


def test_order_changes_nothing_but_the_order() -> None:
    lengths_ = [17, 40, 3, 40, 17, 17, 0, 40, 17, 40, 25, 25, 25, 25]
    inputs = inputs_of(lengths_, lengths_, 2, 16, torch.float32, 0)
    upstream = random_tensor(tuple(inputs[0].shape), torch.float32, 9)
    order = sorted(range(len(lengths_)), key=lambda sample: -lengths_[sample])

    def results(permuted: bool) -> list[Tensor]:
        def moved(rows: Tensor) -> Tensor:
            return torch.cat([rows.split(lengths_)[sample] for sample in order]) if permuted else rows

        leaves = [moved(x).requires_grad_() for x in inputs]
        offsets = offsets_of([lengths_[sample] for sample in order] if permuted else lengths_)
        output = jagged_attention(*leaves, offsets, causal=True)
        found = [output.detach(), *torch.autograd.grad(output, leaves, moved(upstream))]
        return found if permuted else [torch.cat([rows.split(lengths_)[sample] for sample in order]) for rows in found]

    for one, other in zip(results(True), results(False), strict=True):
        assert torch.equal(one, other)
