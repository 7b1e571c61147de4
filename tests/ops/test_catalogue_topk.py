"""Catalogue top-k against sorting whole lists of scores in float64, in every place; ties, and rows that run out of items."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from jagged.ops import catalogue_topk
from jagged.ops._shared.matrices import float32_products
from jagged.ops.catalogue_topk import DEFAULT_MAX_BYTES, torch_impl
from jagged.ops.catalogue_topk.keys import reorder_, restore
from jagged.ops.catalogue_topk.spec import Inputs, Options
from tests.graphs import captured
from tests.memory import PeakMemory
from tests.oracle import check_three_way
from tests.places import PLACE, Place
from tests.reference.catalogue_topk import catalogue_topk as reference
from tests.strategies import Jagged, float_dtypes, jagged_of, random_tensor, seeds

# NumPy, in which kernels are interpreted, warns of NaN, which a GPU computes with in silence.
pytestmark = [
    pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning"),
]
ON_GPU = pytest.mark.gpu
ON_CPU = pytest.mark.skipif(PLACE.name != "cpu", reason="says something of the PyTorch implementation alone")
ROWS = st.integers(0, {"cpu": 40, "interpret": 9, "gpu": 300}[PLACE.name])
ITEMS = st.one_of(st.integers(0, 9), st.integers(60, {"cpu": 400, "interpret": 300, "gpu": 2000}[PLACE.name]))
WIDTHS = st.sampled_from([1, 3, 16, 50, 130, 300] if PLACE.name != "interpret" else [1, 3, 16, 50])
KS = st.one_of(st.integers(1, 3), st.integers(4, 80))
SMALLEST = 64 * 2**10


def integers(shape: tuple[int, ...], dtype: torch.dtype, seed: int, *, strided: bool = False) -> Tensor:
    """Small whole numbers: every order of summation gives the same score, and many scores are equal."""
    return random_tensor(shape, torch.float32, seed, strided=strided).round_().clamp_(-2, 2).to(dtype)


def excluded(rows: int, items: int, kind: str, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor] | None:
    """Ids in no order, some of them repeated and some of no item; `all` leaves some rows without items."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "none":
        return None
    longest = {"empty": 1, "some": 20, "many": 3 * items + 2, "all": 2}[kind]
    lengths = torch.randint(longest, (rows,), generator=generator)
    ids = [torch.randint(-3, items + 4, (int(length),), generator=generator) for length in lengths]
    if kind == "all":
        ids = [torch.randperm(items, generator=generator) if len(some) else some for some in ids]
    if ids:
        ids[0] = torch.cat([ids[0], torch.tensor([-(2**31), 2**31 - 1])])
    offsets = jagged_of(tuple(len(some) for some in ids), dtype).offsets
    return torch.cat([*ids, torch.empty(0, dtype=torch.int64)]).to(dtype).to(PLACE.device), offsets


def assert_same(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], *, k: int) -> None:
    assert got[0].shape == got[1].shape == want[1].shape
    assert got[0].shape[1] == k
    assert got[1].tolist() == want[1].tolist()
    torch.testing.assert_close(got[0].double().cpu(), want[0], rtol=0, atol=0, equal_nan=True)


@given(
    ROWS,
    ITEMS,
    WIDTHS,
    KS,
    float_dtypes(),
    seeds(),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["none", "empty", "some", "many", "all"]),
    st.sampled_from([torch.int32, torch.int64]),
    st.sampled_from([SMALLEST, DEFAULT_MAX_BYTES]),
)
def test_exact_with_ties(
    place: Place,
    rows: int,
    items: int,
    width: int,
    k: int,
    dtype: torch.dtype,
    seed: int,
    strided: bool,
    with_bias: bool,
    kind: str,
    index_dtype: torch.dtype,
    max_bytes: int,
) -> None:
    hidden, weight = (
        integers((rows, width), dtype, seed, strided=strided),
        integers((items, width), dtype, seed + 1, strided=strided),
    )
    bias = integers((items,), torch.float32, seed + 2) if with_bias else None
    exclude = excluded(rows, items, kind, index_dtype, seed)
    got = catalogue_topk(hidden, weight, k, exclude=exclude, bias=bias, max_bytes=max_bytes, backend=place.backend)
    assert got[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_same(got, reference(hidden, weight, k, exclude=exclude, bias=bias), k=k)


@given(ROWS, st.integers(100, 400), WIDTHS, KS, float_dtypes(), seeds(), st.booleans(), st.sampled_from(["none", "some"]))
def test_best_within_rounding(
    place: Place, rows: int, items: int, width: int, k: int, dtype: torch.dtype, seed: int, with_bias: bool, kind: str
) -> None:
    """Scores err no more than a sum of float32 products may, and no item is left out that is better by more than that."""
    hidden = random_tensor((rows, width), dtype, seed)
    weight = (random_tensor((items, width), torch.float32, seed + 1) / math.sqrt(width)).to(dtype)
    bias = random_tensor((items,), torch.float32, seed + 2) if with_bias else None
    exclude = excluded(rows, items, kind, torch.int64, seed)
    scores, ids = catalogue_topk(hidden, weight, k, exclude=exclude, bias=bias, backend=place.backend)
    exact, size = hidden.double() @ weight.double().T, hidden.double().abs() @ weight.double().abs().T
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    allowed = torch.ones_like(exact, dtype=torch.bool)
    if exclude is not None:
        for row, (start, end) in enumerate(zip(exclude[1][:-1].tolist(), exclude[1][1:].tolist(), strict=True)):
            some = exclude[0][start:end]
            allowed[row, some[(some >= 0) & (some < items)]] = False
    # One rounding a term and one of the bias's sum, relative to the sizes of the terms.
    error = (width + 1) * torch.finfo(scores.dtype).eps * size.amax(1, keepdim=True) if rows else exact.new_zeros(0, 1)
    found = ids >= 0
    assert (found.sum(1) == allowed.sum(1).clamp(max=k)).all()
    assert allowed.gather(1, ids.clamp(min=0))[found].all()
    assert ((scores.double() - exact.gather(1, ids.clamp(min=0))).abs() <= error)[found].all()
    assert (scores.diff(dim=1) <= 0)[found[:, 1:]].all()
    left = allowed.clone()
    for row in range(rows):
        taken = ids[row][found[row]]
        assert left[row, taken].all()
        left[row, taken] = False
        assert len(taken.unique()) == len(taken)
    if rows and k <= items - 24:
        assert (exact.masked_fill(~left, -math.inf).amax(1, keepdim=True) <= scores[:, -1:].double() + 2 * error).all()


@given(st.integers(1, 9), st.integers(70, 300), WIDTHS, float_dtypes(), seeds())
def test_three_way(place: Place, rows: int, items: int, width: int, dtype: torch.dtype, seed: int) -> None:
    def best(hidden: Tensor, weight: Tensor) -> Tensor:
        logits = hidden @ weight.T
        return (logits if logits.dtype == torch.float64 else logits.float()).topk(5).values

    inputs = [random_tensor((rows, width), dtype, seed), random_tensor((items, width), dtype, seed + 1)]
    check_three_way(lambda h, w: catalogue_topk(h, w, 5, backend=place.backend)[0], best, inputs, requires_grad=[False, False])


@pytest.mark.parametrize("k", [1, 2, 3, 7, 8, 700])
@pytest.mark.parametrize(("rows", "items", "width"), [(65, 640, 16), (3, 641, 257), (129, 513, 40)])
def test_around_the_tiles(place: Place, rows: int, items: int, width: int, k: int) -> None:
    hidden, weight = integers((rows, width), torch.bfloat16, 0), integers((items, width), torch.bfloat16, 1)
    exclude = excluded(rows, items, "some", torch.int64)
    got = catalogue_topk(hidden, weight, k, exclude=exclude, backend=place.backend)
    assert_same(got, reference(hidden, weight, k, exclude=exclude), k=k)


@pytest.mark.parametrize("k", [1, 2, 5, 300])
def test_equal_scores_go_by_id(place: Place, k: int) -> None:
    """All items alike: the first ones that are left, over the borders of tiles and with whole tiles excluded."""
    hidden, weight = torch.ones(3, 4, device=place.device), torch.ones(700, 4, device=place.device)
    first = torch.cat([torch.arange(130), torch.tensor([131]), torch.arange(699, 63, -1)]).to(place.device)
    exclude = first, torch.tensor([0, 0, 131, 767], device=place.device)
    scores, ids = catalogue_topk(hidden, weight, k, exclude=exclude, backend=place.backend)
    assert_same((scores, ids), reference(hidden, weight, k, exclude=exclude), k=k)
    assert ids[:, 0].tolist() == [0, 130, 0]


@pytest.mark.parametrize("k", [1, 2, 400])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_order_of_scores_that_are_no_numbers(place: Place, k: int, dtype: torch.dtype) -> None:
    """Numbers, then -inf, then NaN, of any sign and payload; -0.0 is 0.0; items that are excluded never come."""
    if dtype not in place.dtypes:
        pytest.skip("the kernels take no float64")
    special = torch.tensor([-0.0, 0.0, math.inf, -math.inf, -3e38, 1e-45, -1e-45, math.nan, math.copysign(math.nan, -1.0)])
    lines = [
        special[torch.arange(330) % 9],
        torch.full((330,), -math.inf).index_fill_(0, torch.tensor([100, 200, 300]), math.nan),
        torch.full((330,), math.nan).index_fill_(0, torch.tensor([320]), -math.inf),
        torch.full((330,), math.nan),
    ]
    for line in lines:
        weight = line[:, None].to(dtype).to(place.device)
        hidden = torch.ones(4, 1, dtype=dtype, device=place.device)
        exclude = torch.arange(300, device=place.device), torch.tensor([0, 0, 0, 64, 300], device=place.device)
        exclude = torch.cat([exclude[0][:64], exclude[0][:236]]), exclude[1]
        for bias in (None, weight[:, 0]):
            inputs = hidden if bias is None else torch.zeros_like(hidden), weight if bias is None else torch.zeros_like(weight)
            got = catalogue_topk(*inputs, k, exclude=exclude, bias=bias, backend=place.backend)
            want = reference(*inputs, k, exclude=exclude, bias=bias)
            assert_same((got[0] + 0.0, got[1]), (want[0] + 0.0, want[1]), k=k)


@pytest.mark.parametrize("k", [1, 2, 130])
def test_zeros_of_either_sign_are_equal(place: Place, k: int) -> None:
    """Sums of products that underflow, negative ones for the first of every three items."""
    sign = torch.where(torch.arange(330) % 3 == 0, -1.0, 1.0).to(place.device)
    hidden, weight = torch.full((2, 16), 1e-30, device=place.device), 1e-30 * sign[:, None].expand(330, 16)
    scores, ids = catalogue_topk(hidden, weight, k, backend=place.backend)
    assert not scores.any()
    assert ids.tolist() == [list(range(k))] * 2


@pytest.mark.parametrize("items", [129, 160, 191, 192, 193])
def test_the_last_items_are_excluded(place: Place, items: int) -> None:
    """The best ones, in a tile that the catalogue does not fill: it must not be chosen for their sake."""
    hidden, weight = torch.ones(2, 1, device=place.device), torch.arange(items, device=place.device)[:, None].float()
    weight[items // 64 * 64 : items - 1] = -1
    weight[5] = 500.0
    exclude = torch.tensor([items - 1, 5, items - 1], device=place.device), torch.tensor([0, 1, 3], device=place.device)
    got = catalogue_topk(hidden, weight, 1, exclude=exclude, backend=place.backend)
    assert_same(got, reference(hidden, weight, 1, exclude=exclude), k=1)


def test_keys_keep_the_order_of_scores() -> None:
    numbers = [-math.inf, -3e38, -1.0, -1e-45, 0.0, 1e-45, 1.0, 3e38, math.inf]
    for dtype in (torch.float32, torch.float64):
        order = reorder_(torch.tensor([math.copysign(math.nan, -1.0), *numbers], dtype=dtype))
        assert order.tolist() == sorted(order.tolist())
        assert len(set(order.tolist())) == len(order)
        assert restore(order)[1:].tolist() == torch.tensor(numbers, dtype=dtype).tolist()
        assert reorder_(torch.tensor([math.nan, -0.0], dtype=dtype)).tolist() == [order[0], order[5]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_of_a_table_meet_float32(place: Place, dtype: torch.dtype) -> None:
    """No rounding of the hidden states to the table's dtype."""
    hidden, weight = random_tensor((9, 40), torch.float32, 0), random_tensor((300, 40), dtype, 1)
    for k in (1, 30):
        scores, ids = catalogue_topk(hidden, weight, k, backend=place.backend)
        want = catalogue_topk(hidden, weight.float(), k, backend=place.backend)
        torch.testing.assert_close((scores, ids), want, rtol=1e-6, atol=1e-6)


def test_gradients_stop_and_autocast_has_no_say(place: Place) -> None:
    hidden, weight = random_tensor((5, 16), torch.float32, 0).requires_grad_(), random_tensor((90, 16), torch.float32, 1)
    bias = random_tensor((90,), torch.float32, 2).requires_grad_()
    want = catalogue_topk(hidden, weight.clone().requires_grad_(), 7, bias=bias, backend=place.backend)
    assert not want[0].requires_grad
    with torch.autocast(place.device.type, dtype=torch.bfloat16):
        got = catalogue_topk(hidden, weight, 7, bias=bias, backend=place.backend)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.usefixtures("unchecked")
def test_wrong_offsets_reach_no_foreign_memory(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight = integers((4, 3), torch.float32, 0), integers((200, 3), torch.float32, 1)
    ids = torch.tensor([5, 2**62, -(2**62), 7, 199], device=place.device)
    for wrong in ([0, 9, 2, -5, 5], [3, 2, 1, 0, 0], [-(2**40), 2**40, 0, 2, 2**62]):
        offsets = torch.tensor(wrong, device=place.device)
        for k in (1, 90):
            _, best = catalogue_topk(hidden, weight, k, exclude=(ids, offsets), backend=place.backend)
            assert ((best >= 0) & (best < 200)).all()
        with monkeypatch.context() as context:
            context.setenv("JAGGED_VALIDATE", "1")
            with pytest.raises(ValueError, match=r"exclude offsets\["):
                catalogue_topk(hidden, weight, 1, exclude=(ids, offsets), backend=place.backend)


@ON_CPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("max_bytes", [2**16, 2**18, 2**20])
def test_memory_is_bounded_and_chunks_change_nothing(place: Place, max_bytes: int, dtype: torch.dtype) -> None:
    """At 64 KiB items are tiled too; unbounded, one tile holds everything."""
    rows, items, k = 150, 3000, 20
    hidden, weight = integers((rows, 4), dtype, 0), integers((items, 4), dtype, 1)
    exclude = excluded(rows, items, "some", torch.int64)
    assert exclude is not None
    whole = torch_impl.catalogue_topk(Inputs(hidden, weight, None, *exclude), Options(k, 2**40))
    with PeakMemory() as memory:
        cut = torch_impl.catalogue_topk(Inputs(hidden, weight, None, *exclude), Options(k, max_bytes))
    # Inputs and results, which grow with rows alone or with what they exclude.
    given = weight.nbytes + hidden.nbytes + 2 * 16 * rows * k + 64 * exclude[0].numel()
    assert 0.4 * max_bytes < memory.peak < max_bytes + given
    torch.testing.assert_close(cut, whole, rtol=0, atol=0)


class Written(TorchDispatchMode):
    """Counts the numbers that operators put out, but for views, empty memory, and few numbers filled in."""

    aside = (torch.ops.aten.empty.memory_format, torch.ops.aten.index_fill_.int_Scalar)

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and func not in self.aside:
            self.count += sum(leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        return result


@ON_CPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows_with_ties", [0, 3])
def test_a_score_is_written_once(dtype: torch.dtype, rows_with_ties: int) -> None:
    """Products are what ranking costs: nothing else goes over all scores, unless ties at the border ask for it, in their rows."""
    rows, items, k = 64, 5000, 10
    hidden, weight = random_tensor((rows, 8), dtype, 0), random_tensor((items, 8), dtype, 1)
    hidden[:rows_with_ties] = 0
    exclude = excluded(rows, items, "some", torch.int64)
    assert exclude is not None
    with Written() as written:
        got = torch_impl.catalogue_topk(Inputs(hidden, weight, None, *exclude), Options(k, DEFAULT_MAX_BYTES))
    # The exact way writes a score fewer than 16 times.
    assert written.count < (1.1 * rows + 16 * rows_with_ties) * items
    want = reference(hidden, weight, k, exclude=exclude)
    assert got[1].tolist() == want[1].tolist()


@ON_CPU
def test_products_follow_the_precision_that_was_set() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        for precision, products in (("high", "tf32"), ("highest", "ieee"), ("medium", "tf32")):
            torch.set_float32_matmul_precision(precision)
            assert float32_products() == products
        torch.backends.cuda.matmul.fp32_precision = "ieee"  # type: ignore[attr-defined]
        assert float32_products() == "ieee"
    finally:
        torch.set_float32_matmul_precision(before)


def test_meta_device() -> None:
    hidden, weight = (torch.empty(shape, device="meta", dtype=torch.bfloat16) for shape in ((3, 4), (5, 4)))
    scores, ids = catalogue_topk(hidden, weight, 7)
    assert (scores.shape, ids.shape, scores.dtype, ids.dtype) == ((3, 7), (3, 7), torch.float32, torch.int64)


def test_opcheck(place: Place) -> None:
    operator = torch.ops.jagged.catalogue_topk.default
    exclude = excluded(6, 9, "some", torch.int64)
    assert exclude is not None
    for dtype in (torch.float32, torch.bfloat16):
        inputs = random_tensor((6, 4), dtype, 0), random_tensor((9, 4), dtype, 1)
        torch.library.opcheck(operator, (*inputs, None, None, None, 3, SMALLEST, place.backend))
        torch.library.opcheck(operator, (*inputs, inputs[1][:, 0], *exclude, 12, SMALLEST, place.backend))


HIDDEN, WEIGHT, IDS, OFFSETS = torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(2, dtype=torch.int64), torch.tensor([0, 1, 1, 2])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: catalogue_topk(HIDDEN[0], WEIGHT, 1), ValueError, r"hidden: expected shape \[N, D\], got \[4\]"),
        (lambda: catalogue_topk(HIDDEN.long(), WEIGHT, 1), TypeError, "hidden: expected dtype float32"),
        (lambda: catalogue_topk(HIDDEN, WEIGHT[:, :3], 1), ValueError, r"weight: expected shape \[V, 4\].*got \[5, 3\]"),
        (lambda: catalogue_topk(HIDDEN.bfloat16(), WEIGHT, 1), TypeError, "weight: expected the dtype of hidden.*cast one"),
        (lambda: catalogue_topk(HIDDEN, WEIGHT.double(), 1), TypeError, "weight: expected the dtype of hidden"),
        (lambda: catalogue_topk(HIDDEN, WEIGHT.to("meta"), 1), ValueError, "weight: expected the device of hidden, cpu"),
        (lambda: catalogue_topk(HIDDEN, WEIGHT[:1].expand(2**31, 4), 1), ValueError, r"weight: expected fewer than 2\^31 items"),
        (lambda: catalogue_topk(HIDDEN, WEIGHT, 0), ValueError, "k: expected a whole number of at least 1, got 0"),
        (lambda: catalogue_topk(HIDDEN, WEIGHT, 1.5), ValueError, "k: expected a whole number"),  # type: ignore[arg-type]
        (lambda: catalogue_topk(HIDDEN, WEIGHT, 1, max_bytes=1000), ValueError, r"max_bytes: expected at least 65536 \(64 KiB\)"),
        (lambda: catalogue_topk(HIDDEN, WEIGHT, 1, bias=WEIGHT), ValueError, r"bias: expected shape \[V\]"),
        (lambda: catalogue_topk(HIDDEN, WEIGHT, 1, bias=WEIGHT[0]), ValueError, r"bias: expected shape \[5\].*got \[4\]"),
        (
            lambda: catalogue_topk(HIDDEN, WEIGHT, 1, bias=WEIGHT[:, 0].to("meta")),
            ValueError,
            "bias: expected the device of hidden",
        ),
        (lambda: catalogue_topk(HIDDEN, WEIGHT, 1, exclude=IDS), TypeError, "exclude: expected a pair"),  # type: ignore[arg-type]
        (
            lambda: catalogue_topk(HIDDEN, WEIGHT, 1, exclude=(IDS.float(), OFFSETS)),
            TypeError,
            "exclude ids: expected dtype int64, int32, got float32",
        ),
        (
            lambda: catalogue_topk(HIDDEN, WEIGHT, 1, exclude=(IDS, OFFSETS[:3])),
            ValueError,
            r"exclude offsets: expected shape \[4\].*got \[3\]",
        ),
        (
            lambda: catalogue_topk(HIDDEN, WEIGHT, 1, exclude=(IDS.to("meta"), OFFSETS)),
            ValueError,
            "exclude ids: expected the device of hidden",
        ),
        (lambda: catalogue_topk(HIDDEN, WEIGHT, 1, backend="cuda"), ValueError, "backend: got 'cuda'"),
        (lambda: catalogue_topk(HIDDEN.double(), WEIGHT.double(), 1, backend="triton"), TypeError, "float64"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_messages_name_argument_and_cure(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.skipif(PLACE.name == "interpret", reason="interpreted kernels are not compiled")
def test_one_graph_for_all_numbers_of_rows(place: Place) -> None:
    counter = CompileCounterWithBackend("inductor" if place.name == "gpu" else "aot_eager")

    def function(hidden: Tensor, weight: Tensor, ids: Tensor, offsets: Tensor) -> Any:
        scores, best = catalogue_topk(hidden * 2, weight, 7, exclude=(ids, offsets), backend=place.backend)
        return scores + 1, best

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    for rows in (5, 30, 11):
        exclude = excluded(rows, 200, "some", torch.int64, rows)
        assert exclude is not None
        inputs = integers((rows, 8), torch.float32, 0).requires_grad_(), integers((200, 8), torch.float32, 1), *exclude
        torch.testing.assert_close(compiled(*inputs), function(*inputs), rtol=0, atol=0)
    assert counter.frame_count == 1


@pytest.mark.skipif(PLACE.name == "interpret", reason="interpreted kernels are not compiled")
def test_one_tensor_is_both_matrices(place: Place) -> None:
    def function(items: Tensor) -> Any:
        return catalogue_topk(items, items, 3, backend=place.backend)

    items = integers((40, 8), torch.float32, 0).requires_grad_()
    compiled = torch.compile(function, fullgraph=True, backend="inductor" if place.name == "gpu" else "aot_eager")
    torch.testing.assert_close(compiled(items), function(items), rtol=0, atol=0)


@ON_GPU
@pytest.mark.parametrize("k", [10, 100])
def test_no_synchronisation_and_graph_capture(place: Place, k: int) -> None:
    hidden, weight = random_tensor((300, 64), torch.bfloat16, 0), random_tensor((3000, 64), torch.bfloat16, 1)
    batch = Jagged((20,) * 300, torch.arange(0, 6001, 20, device=place.device))
    ids = torch.randint(3000, (6000,), device=place.device)

    def step() -> list[Tensor]:
        return list(catalogue_topk(hidden, weight, k, exclude=(ids, batch.offsets), bias=weight[:, 0]))

    graph, results = captured(step)
    for seed in range(3):
        hidden.copy_(random_tensor((300, 64), torch.bfloat16, seed))
        ids.random_(0, 3000)
        graph.replay()
        torch.testing.assert_close(results, step(), rtol=0, atol=0)


@ON_GPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [64, 128, 256, 520])
def test_both_kernels_compute_the_same_bits(place: Place, width: int, dtype: torch.dtype) -> None:
    """The largest logits of all tiles, by the first kernel, against all logits by the second."""
    from jagged.ops.catalogue_topk import kernels
    from jagged.ops.catalogue_topk.configurations import TILE_ITEMS

    hidden, weight = random_tensor((500, width), dtype, 0), random_tensor((6400, width), dtype, 1)
    hidden, weight = kernels.aligned(hidden), kernels.aligned(weight)
    inputs = hidden, weight, None, None, None, None
    num_tiles = 6400 // TILE_ITEMS
    logits = (kernels._keys(inputs, None) >> 32).view(500, num_tiles, TILE_ITEMS)
    maxima = torch.topk(logits.amax(2), num_tiles, dim=1).values
    assert torch.equal(kernels._tile_keys(inputs).sort(1, descending=True).values >> 32, maxima)


@ON_GPU
@pytest.mark.parametrize("max_bytes", [2**20, 2**26, DEFAULT_MAX_BYTES])
@pytest.mark.parametrize("k", [1, 100, 1024])
def test_many_items(place: Place, k: int, max_bytes: int) -> None:
    """Rows in chunks of one, of some and of whole blocks, against PyTorch's exact result."""
    hidden, weight = integers((300, 64), torch.bfloat16, 0), integers((200_001, 64), torch.bfloat16, 1)
    exclude = excluded(300, 1000, "many", torch.int64)
    got = catalogue_topk(hidden, weight, k, exclude=exclude, max_bytes=max_bytes)
    want = catalogue_topk(hidden, weight, k, exclude=exclude, backend="torch")
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@ON_GPU
def test_memory_is_bounded(place: Place) -> None:
    rows, items, width, k = 4096, 1_000_000, 64, 100
    hidden, weight = random_tensor((rows, width), torch.bfloat16, 0), random_tensor((items, width), torch.bfloat16, 1)
    for max_bytes in (32 * 2**20, DEFAULT_MAX_BYTES):
        catalogue_topk(hidden, weight, k, max_bytes=max_bytes)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        catalogue_topk(hidden, weight, k, max_bytes=max_bytes)
        # The logits would take 16 GB in float32.
        assert torch.cuda.max_memory_allocated() - before < max_bytes + 2 * rows * k * 12
