"""HSTU and BERT4Rec: against padded twins, what each row may see, what is hidden, and what users do with them."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from torchrec.fx import Tracer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from jagged.config import ConfigError, TrainConfig, TrainerConfig
from jagged.data import SequenceBatch
from jagged.models import HSTU, BERT4Rec, ItemSequenceModel, NextItemTask, build
from jagged.modules import (
    CutCrossEntropyHead,
    InBatchSampler,
    SampledCrossEntropyHead,
    ScalableCrossEntropyHead,
    UniformSampler,
)
from jagged.ops import trust_values
from jagged.training.table_updates import updates_rows
from tests.oracle import check_three_way
from tests.places import PLACE, Place
from tests.reference.item_sequences import PaddedBERT4Rec, PaddedHSTU
from tests.strategies import Jagged, jagged_batches, seeds

ITEMS, LENGTH = 20, 8
SIZES: dict[str, Any] = {"embedding_dim": 8, "num_heads": 2, "num_layers": 2, "max_seq_len": LENGTH}
MODELS = {"hstu": HSTU, "bert4rec": BERT4Rec}

pytestmark = pytest.mark.skipif(PLACE.name == "interpret", reason="models run on the place's own backend")

every_model = pytest.mark.parametrize("name", list(MODELS))


def random_model(name: str, place: Place, seed: int = 0, **options: Any) -> ItemSequenceModel:
    torch.manual_seed(seed)
    model: ItemSequenceModel = build(name, num_items=ITEMS, **{"dropout": 0.0, **SIZES, **options})
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.to(place.device)


def keyed(values: Tensor, offsets: Tensor, times: Tensor | None = None) -> KeyedJaggedTensor:
    if times is None:
        return KeyedJaggedTensor(["item_id"], values, offsets=offsets)
    lengths = offsets.diff()
    return KeyedJaggedTensor(["item_id", "timestamp"], torch.cat([values, times]), lengths=torch.cat([lengths, lengths]))


def drawn(place: Place, count: int, seed: int) -> Tensor:
    return torch.randint(ITEMS, (count,), generator=torch.Generator().manual_seed(seed)).to(place.device)


@settings(max_examples=20)
@given(jagged_batches(longest=LENGTH).filter(lambda batch: batch.batch_size > 0 and batch.total > 0), seeds())
@pytest.mark.parametrize("buckets", [None, 5])
def test_hstu_agrees_with_its_padded_twin(place: Place, buckets: int | None, batch: Jagged, seed: int) -> None:
    model = random_model("hstu", place, seed, num_time_buckets=buckets)
    names = [name for name, _ in model.named_parameters()]
    values, offsets = drawn(place, batch.total, seed), batch.offsets.to(place.device)
    times = torch.randint(1000, (batch.total,), generator=torch.Generator().manual_seed(seed)).to(place.device)
    features = keyed(values, offsets, times if buckets else None)
    twin = PaddedHSTU(LENGTH, SIZES["num_heads"], SIZES["num_layers"])

    def ours(*given: Tensor) -> Tensor:
        return functional_call(model, dict(zip(names, given, strict=True)), (features,)).values()

    def padded(*given: Tensor) -> Tensor:
        return twin(values, batch.lengths, times, dict(zip(names, given, strict=True)))

    check_three_way(ours, padded, [parameter.detach() for parameter in model.parameters()])


@settings(max_examples=20)
@given(jagged_batches(longest=LENGTH).filter(lambda batch: batch.batch_size > 0), seeds())
def test_bert4rec_agrees_with_its_padded_twin(place: Place, batch: Jagged, seed: int) -> None:
    """The hidden state of a hidden item behind each history; and of all rows, whatever is hidden, each seeing its sample."""
    model = random_model("bert4rec", place, seed)
    names = [name for name, _ in model.named_parameters()]
    values, offsets = drawn(place, batch.total, seed), batch.offsets.to(place.device)
    twin = PaddedBERT4Rec(ITEMS, LENGTH, SIZES["num_heads"], SIZES["num_layers"])

    def ours(*given: Tensor) -> Tensor:
        named = {f"model.{name}": value for name, value in zip(names, given, strict=True)}
        return functional_call(_Final(model), named, (keyed(values, offsets),))

    def padded(*given: Tensor) -> Tensor:
        return twin.final(values, batch.lengths, dict(zip(names, given, strict=True)))

    check_three_way(ours, padded, [parameter.detach() for parameter in model.parameters()])


class _Final(torch.nn.Module):
    def __init__(self, model: ItemSequenceModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.model.final_hidden(features)


def test_what_bert4rec_learns_from(place: Place) -> None:
    """Of whole sequences, the last target with them, what is hidden, at its place; the rest has no target."""
    model = random_model("bert4rec", place, mask_probability=0.5)
    assert isinstance(model, BERT4Rec)
    offsets = torch.tensor([0, 3, 3, 7], device=place.device)
    items = torch.tensor([1, 2, 3, 5, 6, 7, 8], device=place.device)
    targets = torch.tensor([2, 3, 4, 6, 7, 8, 9], device=place.device)
    whole = torch.tensor([1, 2, 3, 4, ITEMS, 5, 6, 7, 8, 9], device=place.device)
    seen = torch.zeros(10, dtype=torch.bool, device=place.device)
    for draw in range(20):
        torch.manual_seed(draw)
        hidden, found = model.learned(keyed(items, offsets), targets)
        assert hidden.lengths().tolist() == [4, 1, 5]
        is_target = found >= 0
        assert torch.equal(found[is_target], whole[is_target])
        assert found[~is_target].eq(-100).all()
        # Where nothing is hidden all rows are as the model sees plain items; a hidden one shows the mask's row alone.
        shown = torch.where(is_target, ITEMS, whole)
        torch.testing.assert_close(hidden.values(), model._encoded(keyed(shown, hidden.offsets())).values())
        seen |= is_target
    # Of the sample without a history nothing is learnt.
    assert seen.tolist() == [True] * 4 + [False] + [True] * 5
    model.eval()
    assert torch.equal(model.learned(keyed(items, offsets), targets)[1], model.learned(keyed(items, offsets), targets)[1])


def test_bert4rec_learns_nothing_from_rows_that_fill_up(place: Place) -> None:
    """As a CUDA graph fills batches: samples of item 0 without targets, and empty ones."""
    model = random_model("bert4rec", place, mask_probability=1.0)
    assert isinstance(model, BERT4Rec)
    items = torch.tensor([1, 2, 3, 0, 0, 0], device=place.device)
    targets = torch.tensor([2, 3, 4, -100, -100, -100], device=place.device)
    offsets = torch.tensor([0, 3, 5, 6, 6], device=place.device)
    hidden, found = model.learned(keyed(items, offsets), targets)
    assert hidden.lengths().tolist() == [4, 3, 2, 1]
    assert found.tolist() == [1, 2, 3, 4, *[-100] * 6]
    task = NextItemTask(model)
    filled = task(SequenceBatch(keyed(items, offsets), targets, offsets[1:], num_items=ITEMS))
    plain = task(SequenceBatch(keyed(items[:3], offsets[:2]), targets[:3], offsets[1:2], num_items=ITEMS))
    torch.testing.assert_close(filled.loss, plain.loss)
    assert int(filled.rows()) == int(plain.rows()) == 4


def test_hidden_items_are_predicted_from_both_sides(place: Place) -> None:
    model = random_model("bert4rec", place).eval()
    offsets = torch.tensor([0, 3, 6], device=place.device)
    before = model(keyed(torch.tensor([1, 2, 3, 4, 5, 6], device=place.device), offsets)).values()
    after = model(keyed(torch.tensor([1, 2, 9, 4, 5, 6], device=place.device), offsets)).values()
    assert (before == after).all(1).tolist() == [False, False, False, True, True, True]


def test_a_row_of_hstu_does_not_see_the_future(place: Place) -> None:
    model = random_model("hstu", place)
    offsets = torch.tensor([0, 3, 6], device=place.device)
    before = model(keyed(torch.tensor([1, 2, 3, 4, 5, 6], device=place.device), offsets)).values()
    after = model(keyed(torch.tensor([1, 2, 9, 4, 5, 6], device=place.device), offsets)).values()
    assert (before == after).all(1).tolist() == [True, True, False, True, True, True]


@every_model
@pytest.mark.parametrize(
    "head",
    [
        lambda: CutCrossEntropyHead(label_smoothing=0.1),
        lambda: SampledCrossEntropyHead(UniformSampler(ITEMS, 5)),
        lambda: SampledCrossEntropyHead(InBatchSampler(torch.arange(ITEMS) + 1)),
        lambda: ScalableCrossEntropyHead(2, 4, 5),
    ],
    ids=["cut", "uniform", "in-batch", "scalable"],
)
def test_every_head_learns(place: Place, name: str, head: Any) -> None:
    """The loss of a few users falls; one without a history, and a batch without rows, give gradients without NaN."""
    torch.manual_seed(0)
    model = build(name, num_items=ITEMS, dropout=0.0, **SIZES, **({"mask_probability": 0.4} if name == "bert4rec" else {}))
    task = NextItemTask(model.to(place.device), head=head().to(place.device))
    optimizer = torch.optim.Adam(task.parameters(), lr=0.01)
    items = torch.arange(12, device=place.device) % 6
    features = keyed(items, torch.tensor([0, 6, 6, 12], device=place.device))
    batch = SequenceBatch(features, (items + 1) % 6, torch.arange(3, device=place.device))
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = task(batch).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert sum(losses[-10:]) < 0.6 * sum(losses[:10])
    empty = SequenceBatch(
        keyed(items[:0], torch.zeros(3, dtype=torch.int64, device=place.device)), items[:0], torch.arange(2, device=place.device)
    )
    optimizer.zero_grad()
    task(empty).loss.backward()
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in task.parameters())
    hidden = model.final_hidden(empty.features)
    assert hidden.shape == (2, SIZES["embedding_dim"])
    assert not hidden.any()


@every_model
def test_what_users_do(place: Place, name: str) -> None:
    model = random_model(name, place).eval()
    features = keyed(drawn(place, 7, 0), torch.tensor([0, 3, 3, 7], device=place.device))
    expected = model.final_hidden(features)
    again = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    fresh = build(name, **model.config).to(place.device).eval()
    fresh.load_state_dict(model.state_dict())
    for other in (*again, fresh):
        assert torch.equal(other.final_hidden(features), expected)
    assert model.item_weight.shape == (ITEMS, SIZES["embedding_dim"])
    empty = build(name, num_items=ITEMS, **SIZES, device="meta").to_empty(device="cpu")
    empty.reset_parameters()
    assert all(parameter.isfinite().all() for parameter in empty.parameters())
    with torch.autocast(place.device.type, torch.bfloat16):
        loss = NextItemTask(model)(SequenceBatch(features, drawn(place, 7, 1), torch.arange(3, device=place.device))).loss
    loss.backward()
    assert all(parameter.grad is None or parameter.grad.dtype == torch.float32 for parameter in model.parameters())


@every_model
def test_ids_out_of_range_are_refused(place: Place, name: str) -> None:
    """The mask's row is no item, either."""
    model = random_model(name, place)
    offsets = torch.tensor([0, 2], device=place.device)
    features = keyed(torch.tensor([0, ITEMS], device=place.device), offsets)
    good = torch.tensor([1, 2], device=place.device)
    message = f"features['item_id'].values()[1]: expected an id from 0 to {ITEMS - 1}, got {ITEMS}"
    for call in (model.final_hidden, lambda of: NextItemTask(model)(SequenceBatch(of, good, good[:1]))):
        with pytest.raises(ValueError, match=re.escape(message)):
            call(features)


def test_which_tables_are_updated_row_by_row() -> None:
    """Under a head that draws; of BERT4Rec's table a part is scored against."""
    config = TrainerConfig(table_optimizer="sparse-adamw")
    head = SampledCrossEntropyHead(UniformSampler(ITEMS, 5))
    found = {name: updates_rows(NextItemTask(build(name, num_items=ITEMS, **SIZES), head=head), config, 1) for name in MODELS}
    assert found == {"hstu": True, "bert4rec": False}


def test_the_table_of_bert4rec_does_not_split() -> None:
    task: Any = NextItemTask(BERT4Rec(ITEMS, **SIZES))
    message = (
        f"model: expected a table of the {ITEMS} items alone, got {ITEMS + 1} rows in a BERT4Rec, which do not split; train it "
        "in one process"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        task.split(None, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "hstu", "embedding_dim": 6, "num_heads": 4}, "model.num_heads: got 4, expected a divisor of embedding_dim (6)"),
        (
            {"name": "bert4rec", "embedding_dim": 6, "num_heads": 4},
            "model.num_heads: got 4, expected a divisor of embedding_dim (6)",
        ),
        (
            {"name": "bert4rec", "mask_probability": 0.0},
            "model.mask_probability: got 0.0, expected a number, above 0 and at most 1",
        ),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        TrainConfig(model=options)
    assert str(error.value) == message
    assert TrainConfig(model={"name": "hstu", "embedding_dim": 6, "num_heads": 4, "head_dim": 8}).model.head_dim == 8


class Hidden(nn.Module):
    """What is scored against the catalogue, from ids and lengths."""

    def __init__(self, model: ItemSequenceModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, values: Tensor, lengths: Tensor) -> Tensor:
        return self.model.final_hidden(KeyedJaggedTensor(["item_id"], values, lengths=lengths))


def batches_of(place: Place) -> list[tuple[Tensor, Tensor]]:
    found = []
    for seed, lengths in enumerate([(3, 0, 4), (1, 8, 2, 2), (5, 6, 1, 0, 3), (5, 6), (1,)]):
        found.append((drawn(place, sum(lengths), seed), torch.tensor(lengths, device=place.device)))
    return found


every_sequence_model = pytest.mark.parametrize("name", [*MODELS, "sasrec"])


@every_sequence_model
def test_is_compiled_once_for_all_batches(place: Place, name: str) -> None:
    model = Hidden(random_model(name, place).eval())
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    with trust_values(), torch._dynamo.config.patch(error_on_recompile=True):
        # Of one sample and of two PyTorch makes other graphs.
        for batch in batches_of(place)[:3]:
            torch.testing.assert_close(compiled(*batch), model(*batch))


@every_sequence_model
@pytest.mark.parametrize("strict", [True, False])
def test_is_exported_for_any_batch(place: Place, name: str, strict: bool) -> None:
    model, batches = Hidden(random_model(name, place).eval()), batches_of(place)
    sizes = {"values": {0: torch.export.Dim.DYNAMIC}, "lengths": {0: torch.export.Dim.DYNAMIC}}
    # PyTorch takes sizes of 0 and 1 for special, unless it is told not to.
    with trust_values(), torch.fx.experimental._config.patch(backed_size_oblivious=True):
        program = torch.export.export(model, batches[0], dynamic_shapes=sizes, strict=strict).module()
        for batch in batches:
            torch.testing.assert_close(program(*batch), model(*batch))


@every_sequence_model
def test_checkpointing_computes_the_same_again(place: Place, name: str) -> None:
    """Also what is hidden at random, and dropout."""
    model = random_model(name, place, dropout=0.3).train()
    task = NextItemTask(model)
    features = keyed(drawn(place, 7, 0), torch.tensor([0, 3, 3, 7], device=place.device))
    batch = SequenceBatch(features, drawn(place, 7, 1), torch.arange(3, device=place.device))
    results = []
    for is_checkpointed in (False, True):
        torch.manual_seed(3)
        task.zero_grad()
        # With an argument on the GPU, by which PyTorch finds whose random numbers to draw again.
        loss = checkpoint(lambda _: task(batch).loss, features, use_reentrant=False) if is_checkpointed else task(batch).loss
        loss.backward()
        results.append([loss.detach(), *(of.grad.clone() for of in task.parameters() if of.grad is not None)])
    assert len(results[0]) > 5
    torch.testing.assert_close(*results, rtol=0, atol=0)


@every_sequence_model
def test_a_trace_shows_lookups_and_leaves(place: Place, name: str) -> None:
    """As TorchRec's pipelines need it."""
    model = random_model(name, place).eval()
    traced = torch.fx.GraphModule(model, Tracer().trace(model))
    called = [node.target for node in traced.graph.nodes if node.op == "call_module"]
    assert any(str(target).startswith("item_embeddings") for target in called)
    assert "blocks.0" in called
    features = keyed(drawn(place, 7, 0), torch.tensor([0, 3, 3, 7], device=place.device))
    torch.testing.assert_close(traced(features).values(), model(features).values())
