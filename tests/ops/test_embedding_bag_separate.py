"""Embedding bags of tables that lie anywhere: the bits of one storage's, read where they are."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from jagged.ops import BagLayout, BagOptimizer, BagPlan, BagSchedule, embedding_bags, quantize_rows
from jagged.ops.embedding_bag.layout import ALIGNMENT
from tests.graphs import captured
from tests.ops.test_embedding_bag import ON_GPU, ON_TRITON, Batch, batch_of, batches, weights_of
from tests.places import PLACE, Place
from tests.strategies import float_dtypes, random_tensor

LAYOUT = BagLayout((9, 5, 70), (4, 3, 33), (2, 0, 1, 0))
LENGTHS = [[2, 0, 3], [0, 1, 1], [4, 0, 0], [1, 1, 1]]


def shifted(table: Tensor, by: int = 1) -> Tensor:
    """A copy that begins some elements later than memory does."""
    return table.new_empty(table.numel() + by)[by:].view(table.shape).copy_(table)


#: Where separate tables lie, given the views of a storage.
PLACES: dict[str, Callable[[list[Tensor]], list[Tensor]]] = {
    "in one storage": lambda views: views,
    # The last table may have the lowest address.
    "apart": lambda views: [view.clone() for view in reversed(views)][::-1],
    "in columns": lambda views: [view.t().contiguous().t() for view in views],
    "between": lambda views: [views[0].clone(), *(shifted(view) for view in views[1:])],
}
IN_PLACE = ["in one storage", "apart"]


def tables_of(weights: Tensor, layout: BagLayout, where: str) -> list[Tensor]:
    return PLACES[where](layout.views(weights.detach()))


@given(
    batches(),
    float_dtypes(),
    st.booleans(),
    st.sampled_from(list(PLACES)),
    st.sampled_from([[True, True], [True, False], [False, True], [False, False]]),
)
def test_bits_are_those_of_one_storage(
    place: Place, batch: Batch, dtype: torch.dtype, weighted: bool, where: str, wanted: list[bool]
) -> None:
    weights = weights_of(batch.layout, dtype).requires_grad_(wanted[0])
    tables = [table.requires_grad_(wanted[0]) for table in tables_of(weights, batch.layout, where)]
    weighted = weighted and not batch.layout.has_means
    results = []
    for given_ in (weights, tables):
        samples = random_tensor(tuple(batch.indices.shape), dtype, 1).requires_grad_(wanted[1]) if weighted else None
        output = embedding_bags(
            given_, *batch.arguments, per_sample_weights=samples, output_dtype=dtype, backend=place.backend, **batch.options
        )
        leaves = [leaf for leaf in (*(tables if given_ is tables else [weights]), samples) if leaf is not None]
        leaves = [leaf for leaf in leaves if leaf.requires_grad]
        assert output.requires_grad == bool(leaves)
        grads = list(torch.autograd.grad(output, leaves, output.detach())) if leaves else []
        if given_ is weights and wanted[0]:
            grads = [*batch.layout.views(grads[0]), *grads[1:]]
        results.append([output.detach(), *grads])
    for found, expected in zip(results[1], results[0], strict=True):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("output_dtype", [torch.float32, torch.bfloat16])
def test_quantised_tables(place: Place, where: str, output_dtype: torch.dtype) -> None:
    batch = batch_of(LAYOUT, LENGTHS)
    weights, scales = quantize_rows(weights_of(LAYOUT, torch.float32), LAYOUT)
    found, expected = (
        embedding_bags(of, *batch.arguments, scales=scales, output_dtype=output_dtype, backend=place.backend)
        for of in (tables_of(weights, LAYOUT, where), weights)
    )
    assert torch.equal(found, expected)


def test_some_tables_learn(place: Place) -> None:
    batch, weights = batch_of(LAYOUT, LENGTHS), weights_of(LAYOUT, torch.float32)
    tables = tables_of(weights, LAYOUT, "apart")
    tables[2].requires_grad_()
    embedding_bags(tables, *batch.arguments, backend=place.backend).square().sum().backward()
    whole = weights.clone().requires_grad_()
    embedding_bags(whole, *batch.arguments, backend=place.backend).square().sum().backward()
    assert [table.grad is None for table in tables] == [True, True, False]
    assert torch.equal(tables[2].grad, LAYOUT.views(whole.grad)[2])


def test_tables_that_change_before_backward_are_refused(place: Place) -> None:
    batch = batch_of(LAYOUT, LENGTHS)
    tables = tables_of(weights_of(LAYOUT, torch.float32), LAYOUT, "apart")
    samples = random_tensor(tuple(batch.indices.shape), torch.float32, 1).requires_grad_()
    output = embedding_bags(tables, *batch.arguments, per_sample_weights=samples, backend=place.backend)
    tables[1].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_a_plan_is_followed(place: Place) -> None:
    batch, weights = batch_of(LAYOUT, LENGTHS), weights_of(LAYOUT, torch.float32)
    names = ["a", "b", "c", "d"]
    of_features = {
        name: BagSchedule(LAYOUT.rows[table], LAYOUT.widths[table], "some", 4)
        for name, table in zip(names, LAYOUT.tables or (), strict=True)
    }
    gpu = torch.cuda.get_device_name(PLACE.device) if PLACE.name == "gpu" else ""
    schedules = BagPlan(gpu, of_features).schedules(LAYOUT, PLACE.device, names=names)
    found, expected = (
        embedding_bags(of, *batch.arguments, schedules=schedules, backend=place.backend)
        for of in (tables_of(weights, LAYOUT, "apart"), weights)
    )
    assert torch.equal(found, expected)


@ON_TRITON
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("dtype", PLACE.dtypes)
def test_kernels_read_them_in_place(place: Place, where: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from jagged.ops.embedding_bag.triton import separate

    batch, weights, copies = batch_of(LAYOUT, LENGTHS), weights_of(LAYOUT, dtype), []
    joined = separate.joined
    monkeypatch.setattr(separate, "joined", lambda tables: copies.append(len(tables)) or joined(tables))
    tables = tables_of(weights, LAYOUT, where)
    for _ in range(2):
        embedding_bags(tables, *batch.arguments, backend=place.backend)
    assert copies == ([3, 3] if where == "between" else [])
    # What PyTorch makes of tables in columns lies apart.
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert separate.starts_in_place(tables) is None


@ON_TRITON
def test_starts_are_counted_from_the_lowest_address(place: Place) -> None:
    from jagged.ops.embedding_bag.triton.separate import starts_in_place

    storage = torch.zeros(40 * ALIGNMENT, dtype=torch.bfloat16, device=place.device)
    tables = [storage[at * ALIGNMENT :][:6].view(3, 2) for at in (7, 2, 31)]
    assert starts_in_place(tables) == (5 * ALIGNMENT, 0, 29 * ALIGNMENT)
    # All of them alike may begin anywhere.
    assert starts_in_place([storage[at * ALIGNMENT + 3 :][:6].view(3, 2) for at in (1, 0)]) == (ALIGNMENT, 0)
    assert starts_in_place([tables[0], storage[1:7].view(3, 2)]) is None


@ON_TRITON
def test_layouts_are_kept_while_tables_stay(place: Place) -> None:
    from jagged.ops.embedding_bag.triton import separate

    layout = BagLayout((9, 5), (4, 3))
    batch, storage = batch_of(layout, [[2, 1], [1, 0]]), weights_of(BagLayout((9,) * 20, (4,) * 20), torch.float32)
    rows, kept = storage.view(-1), {}
    for turn in range(2):
        for at in range(separate.MOST_KEPT):
            tables = [rows[:36].view(9, 4), rows[48 + 16 * at :][:15].view(5, 3)]
            embedding_bags(tables, *batch.arguments, backend=place.backend)
        now = {key: id(moved) for key, moved in separate._kept[layout.fields].items()}
        kept = now if turn == 0 else kept
    assert kept == now
    assert len(kept) == separate.MOST_KEPT
    embedding_bags([rows[48:84].view(9, 4), rows[:15].view(5, 3)], *batch.arguments, backend=place.backend)
    assert len(separate._kept[layout.fields]) == separate.MOST_KEPT
    count = len(separate._kept)
    del layout, batch
    assert len(separate._kept) == count - 1


@pytest.mark.skipif(PLACE.name == "interpret", reason="interpreted kernels are not compiled")
def test_compiles_whole_with_gradients(place: Place) -> None:
    counter = CompileCounterWithBackend("inductor" if place.name == "gpu" else "aot_eager")
    tables = [table.requires_grad_() for table in tables_of(weights_of(LAYOUT, torch.float32), LAYOUT, "apart")]

    def function(ids: Tensor, offsets: Tensor, samples: Tensor) -> Tensor:
        return embedding_bags(tables, LAYOUT, ids, offsets, per_sample_weights=samples, backend=place.backend).square().sum()

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    for bags in (3, 7, 4):
        batch = batch_of(LAYOUT, [[2, 1] * bags, [1, 0] * bags, [3, 2] * bags, [0, 1] * bags], bags)
        samples = random_tensor(tuple(batch.indices.shape), torch.float32, 1).requires_grad_()
        # The first call makes the layout's tensors, which a graph takes as they are.
        expected, found = (each(batch.indices, batch.offsets, samples) for each in (function, compiled))
        torch.testing.assert_close(found, expected)
        for ours, eager in zip(*(torch.autograd.grad(x, [*tables, samples]) for x in (found, expected)), strict=True):
            torch.testing.assert_close(ours, eager)
    assert counter.frame_count == 1


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.skipif(PLACE.name == "interpret", reason="what is shown here lies before the kernels")
def test_transforms(place: Place) -> None:
    batch, weights = batch_of(LAYOUT, LENGTHS), weights_of(LAYOUT, torch.float32)
    tables = tables_of(weights, LAYOUT, "apart")

    def loss(tables: list[Tensor]) -> Tensor:
        return embedding_bags(tables, *batch.arguments, backend=place.backend).square().sum()

    def of_whole(weights: Tensor) -> Tensor:
        return embedding_bags(weights, *batch.arguments, backend=place.backend).square().sum()

    expected = LAYOUT.views(torch.func.grad(of_whole)(weights))
    for found, of_table in zip(torch.func.grad(loss)(tables), expected, strict=True):
        assert torch.equal(found, of_table)
    many = [torch.stack([table, table * 2]) for table in tables]
    torch.testing.assert_close(torch.vmap(loss)(many), torch.stack([of_whole(weights), of_whole(weights * 2)]))


def test_meta_tensors_give_shapes(place: Place) -> None:
    batch = batch_of(LAYOUT, LENGTHS)
    tables = [table.to("meta") for table in tables_of(weights_of(LAYOUT, torch.float32), LAYOUT, "apart")]
    for requires_grad in (False, True):
        tables = [table.requires_grad_(requires_grad) for table in tables]
        output = embedding_bags(tables, LAYOUT, batch.indices.to("meta"), batch.offsets.to("meta"))
        assert (output.device.type, output.shape, output.requires_grad) == ("meta", (3, LAYOUT.width), requires_grad)


def test_opcheck(place: Place) -> None:
    batch, tables = batch_of(LAYOUT, LENGTHS), tables_of(weights_of(LAYOUT, torch.float32), LAYOUT, "apart")
    layout = LAYOUT.tensor(PLACE.device)
    inputs = (tables, None, batch.indices, batch.offsets, None, layout, None, None, LAYOUT.fields, None)
    options = (3, LAYOUT.width, "float32", 32, None, False, place.backend)
    torch.library.opcheck(torch.ops.jagged.separate_embedding_bags.default, (*inputs, *options))


REFUSED: list[tuple[Callable[[list[Tensor]], Any], type[Exception], str]] = [
    (lambda x: x[:2], ValueError, "weights: expected a tensor for each of the layout's 3 tables, and one at least, got 2"),
    (lambda x: [x[0], x[2], x[1]], ValueError, "weights: expected shape [5, 3] for table 1, got [70, 33]"),
    (
        lambda x: [x[0], x[1].bfloat16(), x[2]],
        TypeError,
        "weights: expected tables of one dtype, got torch.float32 and, for table 1, torch.bfloat16",
    ),
    (
        lambda x: [x[0], x[1], x[2].to("meta")],
        ValueError,
        f"weights: expected tables on one device, got {torch.ones(0, device=PLACE.device).device} and, for table 2, meta; "
        "move them",
    ),
    (lambda x: [x[0], x[1], x[2].long()], TypeError, "weights[2]: expected dtype"),
    (lambda x: [x[0], x[1], x[2].view(-1)], ValueError, "weights[2]: expected shape [rows, width]"),
]


@pytest.mark.parametrize(("change", "error", "message"), REFUSED)
def test_what_is_refused(place: Place, change: Callable[[list[Tensor]], Any], error: type[Exception], message: str) -> None:
    batch, tables = batch_of(LAYOUT, LENGTHS), tables_of(weights_of(LAYOUT, torch.float32), LAYOUT, "apart")
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        embedding_bags(change(tables), *batch.arguments, backend=place.backend)


def test_optimizers_are_refused(place: Place) -> None:
    batch, tables = batch_of(LAYOUT, LENGTHS), tables_of(weights_of(LAYOUT, torch.float32), LAYOUT, "apart")
    optimizer = BagOptimizer("sgd", LAYOUT, learning_rate=0.1, device=PLACE.device)
    message = "optimizer: expected None for separate tables, which are not updated in place; give one storage of all"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        embedding_bags(tables, *batch.arguments, optimizer=optimizer, backend=place.backend)


@ON_GPU
def test_is_captured_in_a_graph(place: Place) -> None:
    batch, tables = batch_of(LAYOUT, LENGTHS), tables_of(weights_of(LAYOUT, torch.float32), LAYOUT, "apart")
    graph, output = captured(lambda: embedding_bags(tables, *batch.arguments))
    tables[1].mul_(2)
    graph.replay()
    assert torch.equal(output, embedding_bags(tables, *batch.arguments))
