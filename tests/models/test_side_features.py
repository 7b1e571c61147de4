"""Side features of items and events in models of next items: against loops, in a model, and with what users do with it."""

from __future__ import annotations

import copy
import json
import pickle
import re
from typing import Any

import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import functional_call
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from jagged.data import ItemTable, SequenceBatch, Vocabulary, read_item_table
from jagged.data.batches import features_of
from jagged.models import BERT4Rec, ItemFeatures, ItemSequenceModel, NextItemTask, build
from jagged.models.side_features import EventFeatures
from jagged.ops import trust_values
from jagged.training.filled import SequenceSizes
from jagged.training.graphs import GraphedSteps
from tests.models.test_item_sequences import ITEMS, SIZES, batches_of, drawn, keyed
from tests.oracle import check_three_way
from tests.places import PLACE, Place
from tests.strategies import seeds

pytestmark = pytest.mark.skipif(PLACE.name == "interpret", reason="models run on the place's own backend")

every_model = pytest.mark.parametrize("name", ["sasrec", "hstu", "bert4rec"])

# Of 20 items; some have no tag, one no brand, and one no row.
TAGS = [["t0", "t1"], [], ["t1"], None, ["t2", "t0", "t1"]]
BRANDS = ["u", "v", None, "w"]


def item_table() -> ItemTable:
    items = list(range(ITEMS - 1))
    source = pa.table({
        "item_id": items,
        "tags": pa.array([TAGS[item % 5] for item in items], pa.list_(pa.string())),
        "brand": [BRANDS[item % 4] for item in items],
        "price": pa.array([None if item == 3 else item % 7 + 0.5 for item in items], pa.float64()),
    })  # fmt: skip
    return read_item_table(source, Vocabulary(range(ITEMS)), item_column="item_id", progress=False)


TABLE = item_table()


def random_features(place: Place, seed: int = 0, width: int = SIZES["embedding_dim"]) -> ItemFeatures:
    torch.manual_seed(seed)
    features = ItemFeatures.of(TABLE, width, device=place.device)
    for parameter in features.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return features


def random_model(name: str, place: Place, **options: Any) -> ItemSequenceModel:
    torch.manual_seed(0)
    model: ItemSequenceModel = build(
        name, num_items=ITEMS, **{"dropout": 0.0, **SIZES, "item_features": random_features(place), **options}
    )
    return model.to(place.device)


def vectors(ids: Tensor, weights: list[Tensor]) -> Tensor:
    """Of each id, by loops over features and values."""
    *tables, projection = weights
    rows = []
    for item in ids.tolist():
        total = (TABLE.numbers[item].to(projection) @ projection.T).clone()
        for of, table in zip(TABLE.ids.values(), tables, strict=True):
            place = int(of.set_of_item[item])
            values = of.values[of.offsets[place] : of.offsets[place + 1]].tolist()
            if values:
                total = total + torch.stack([table[value] for value in values]).sum(0) / len(values)
        rows.append(total)
    return torch.stack(rows) if rows else tables[0].new_zeros(0, tables[0].shape[1])


@settings(max_examples=20)
@given(st.lists(st.integers(0, ITEMS), max_size=12), seeds())
def test_agrees_with_loops(place: Place, ids: list[int], seed: int) -> None:
    """Values and gradients, also of the id behind the items, which has nothing."""
    assert [*TABLE.ids, *TABLE.number_names] == ["tags", "brand", "price"]
    features = random_features(place, seed)
    names = [name for name, _ in features.named_parameters()]
    given_ids = torch.tensor(ids, dtype=torch.int64, device=place.device)

    def ours(*weights: Tensor) -> Tensor:
        return functional_call(features, dict(zip(names, weights, strict=True)), (given_ids,))

    def reference(*weights: Tensor) -> Tensor:
        return vectors(given_ids, list(weights))

    check_three_way(ours, reference, [parameter.detach() for parameter in features.parameters()])
    assert not features(torch.tensor([ITEMS], device=place.device)).any()


@every_model
def test_a_model_reads_the_sum(place: Place, name: str) -> None:
    """As a model without features whose table has it; scores are products with the items' own rows."""
    model = random_model(name, place).eval()
    plain = random_model(name, place, item_features=None).eval()
    state = {key: value for key, value in model.state_dict().items() if not key.startswith("item_features.")}
    assert model.item_features is not None
    with torch.no_grad():
        of_items = model.item_features(torch.arange(ITEMS, device=place.device))
    key = "item_embeddings.embeddings.item_id.weight"
    # Of BERT4Rec the last row is the mask's.
    state[key] = torch.cat([state[key][:ITEMS] + of_items, state[key][ITEMS:]])
    plain.load_state_dict(state)
    for values, lengths in batches_of(place):
        features = keyed(values, torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]))
        torch.testing.assert_close(model.final_hidden(features), plain.final_hidden(features))
    assert torch.equal(model.item_weight, model.item_table)
    assert not torch.equal(model.item_weight, plain.item_weight)


def loss_of(model: ItemSequenceModel, place: Place) -> Tensor:
    features = keyed(drawn(place, 7, 0), torch.tensor([0, 3, 3, 7], device=place.device))
    batch = SequenceBatch(features, drawn(place, 7, 1), torch.arange(3, device=place.device), num_items=ITEMS)
    return NextItemTask(model)(batch).loss


@every_model
def test_every_weight_learns(place: Place, name: str) -> None:
    model = random_model(name, place).train()
    loss_of(model, place).backward()
    assert all(parameter.grad is not None and bool(parameter.grad.any()) for parameter in model.item_features.parameters())


@every_model
def test_goes_with_what_users_do(place: Place, name: str) -> None:
    """Compile in one graph, export, autocast, pickle, deepcopy, and built again from plain values and weights."""
    model = random_model(name, place).eval()
    expected = loss_of(model, place)
    config = json.loads(json.dumps(model.config))
    again = build(name, **config)
    again.load_state_dict(model.cpu().state_dict())
    model.to(place.device)
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model), again.to(place.device).eval()):
        assert torch.equal(loss_of(other, place), expected)
    with torch.autocast(place.device.type, torch.bfloat16):
        torch.testing.assert_close(loss_of(model, place), expected, rtol=0.01, atol=0)
    ids = drawn(place, 9, 2)
    features = model.item_features
    torch._dynamo.reset()
    with trust_values():
        compiled = torch.compile(features, fullgraph=True, backend="aot_eager", dynamic=True)
        torch.testing.assert_close(compiled(ids), features(ids))
        program = torch.export.export(features, (ids,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},)).module()
        torch.testing.assert_close(program(ids[:4]), features(ids[:4]))


def graphed_steps(task: NextItemTask, place: Place) -> Any:
    return GraphedSteps(lambda batch: (task(batch).loss, None), SequenceSizes(ITEMS), task, place.device)


@pytest.mark.gpu
@every_model
def test_steps_are_replayed_as_graphs(place: Place, name: str) -> None:
    """And give the gradients of single launches."""
    model = random_model(name, place, **({"mask_probability": 1.0} if name == "bert4rec" else {})).train()
    task, batches = NextItemTask(model), []
    for seed, lengths in ((0, (3, 0, 4)), (1, (2, 5))):
        offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], device=place.device)
        features = keyed(drawn(place, sum(lengths), seed), offsets)
        users = torch.arange(len(lengths), device=place.device)
        batches.append(SequenceBatch(features, drawn(place, sum(lengths), 9), users, num_items=ITEMS))
    graphed = graphed_steps(task, place)
    for batch in batches:
        loss, _ = graphed(batch)
        found = [parameter.grad.clone() for parameter in model.item_features.parameters()]
        alone = copy.deepcopy(task)
        alone.zero_grad()
        expected = alone(batch).loss
        expected.backward()
        torch.testing.assert_close(loss, expected.detach())
        torch.testing.assert_close(found, [parameter.grad for parameter in alone.model.item_features.parameters()])


@pytest.mark.parametrize("damage", ["set_of_item_0", "values_1", "offsets_0", "numbers"])
def test_damage_is_seen(place: Place, damage: str) -> None:
    features = random_features(place)
    assert features.damage() is None
    features.get_buffer(damage)[1 if damage.startswith("offsets") else 0] = torch.inf if damage == "numbers" else 99
    assert features.damage() == damage


def test_new_weights_and_sizes(place: Place) -> None:
    """Buffers stay when weights are drawn; what makes no feature is refused."""
    features = random_features(place)
    before = features(torch.arange(ITEMS, device=place.device))
    features.reset_parameters()
    assert features.damage() is None
    assert not torch.equal(features(torch.arange(ITEMS, device=place.device)), before)
    with pytest.raises(ValueError, match=r"^ids, numbers: got none of both, expected a feature$"):
        ItemFeatures(4, 8)
    for rows, found in (({}, "no feature"), ({"action": 1}, "1 rows of 'action'")):
        message = f"rows: got {found}, expected features with 2 rows or more: of missing and of unseen values"
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            EventFeatures(8, rows)
    message = "event_features: got 'item_id', expected another name: batches have another thing under this key"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        build("sasrec", num_items=4, event_features={"item_id": 4})


def test_features_of_other_items_are_refused(place: Place) -> None:
    message = f"item_features: got those of {ITEMS} items, 8 wide, expected {ITEMS + 1} and 8, num_items and embedding_dim"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        BERT4Rec(ITEMS + 1, **SIZES, item_features=random_features(place))


EVENT_ROWS = {"action": 5, "shop id": 4}


def event_model(name: str, place: Place, **options: Any) -> ItemSequenceModel:
    torch.manual_seed(0)
    model: ItemSequenceModel = build(name, num_items=ITEMS, **{"dropout": 0.0, **SIZES, "event_features": EVENT_ROWS, **options})
    assert model.event_embeddings is not None
    for parameter in model.event_embeddings.parameters():
        assert not parameter[:2].any()
        assert bool(parameter[2:].any())
    for parameter in model.event_embeddings.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.to(place.device)


def event_batch(place: Place, lengths: list[int], seed: int, *, times: bool = False) -> SequenceBatch:
    generator, total = torch.Generator().manual_seed(seed), sum(lengths)
    others = {"timestamp": torch.randint(1000, (total,), generator=generator)} if times else {}
    others |= {name: torch.randint(rows, (total,), generator=generator) for name, rows in EVENT_ROWS.items()}
    items = torch.randint(ITEMS, (total,), generator=generator)
    targets = torch.randint(ITEMS, (total,), generator=generator)
    features = features_of(items, torch.tensor(lengths), others)
    return SequenceBatch(features, targets, torch.arange(len(lengths)), num_items=ITEMS).to(place.device)


every_causal_model = pytest.mark.parametrize("name", ["sasrec", "hstu"])


@settings(max_examples=20)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), seeds())
def test_events_have_the_sum_of_their_values(place: Place, lengths: list[int], seed: int) -> None:
    features = event_batch(place, lengths, seed).features
    module = EventFeatures(8, EVENT_ROWS, device=place.device)
    names = [name for name, _ in module.named_parameters()]
    ids = [features[name].values().tolist() for name in EVENT_ROWS]

    def ours(*weights: Tensor) -> Tensor:
        return functional_call(module, dict(zip(names, weights, strict=True)), (features,))

    def reference(*tables: Tensor) -> Tensor:
        rows = [sum(table[one] for table, one in zip(tables, of, strict=True)) for of in zip(*ids, strict=True)]
        return torch.stack(rows) if rows else tables[0].new_zeros(0, 8)

    check_three_way(ours, reference, [torch.randn_like(parameter) for parameter in module.parameters()])


@every_causal_model
def test_a_model_reads_events_with_their_features(place: Place, name: str) -> None:
    """As one whose item table has a row for each event with all that it has; beside times and the items' own features."""
    options: dict[str, Any] = {"num_time_buckets": 4, "item_features": random_features(place)}
    model = event_model(name, place, **options).eval()
    batch = event_batch(place, [3, 0, 4, 1], 1, times=True)
    found = model(batch.features).values()
    items, total = batch.features["item_id"].values(), int(batch.features["item_id"].values().numel())
    plain: Any = build(name, num_items=total, **{"dropout": 0.0, **SIZES, "num_time_buckets": 4}).to(place.device).eval()
    state = {key: value for key, value in model.state_dict().items() if not key.startswith(("item_features", "event_embeddings"))}
    assert model.item_features is not None
    assert model.event_embeddings is not None
    with torch.no_grad():
        rows = model.item_table[items] + model.item_features(items) + model.event_embeddings(batch.features)
    state["item_embeddings.embeddings.item_id.weight"] = rows
    plain.load_state_dict(state)
    others = {"timestamp": batch.features["timestamp"].values()}
    features = features_of(torch.arange(total, device=place.device), batch.features["item_id"].lengths(), others)
    torch.testing.assert_close(found, plain(features).values())


@every_causal_model
def test_events_go_with_what_users_do(place: Place, name: str) -> None:
    """Compile in one graph, export, autocast, pickle, and built again from plain values and weights; every table learns."""
    model = event_model(name, place).eval()
    task, batch = NextItemTask(model), event_batch(place, [3, 0, 4], 0)
    expected = task(batch).loss
    expected.backward()
    assert all(bool(table.weight.grad.any()) for table in model.event_embeddings.embeddings)
    again = build(name, **json.loads(json.dumps(model.config)))
    again.load_state_dict({key: value.cpu() for key, value in model.state_dict().items()})
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model), again.to(place.device).eval()):
        assert torch.equal(NextItemTask(other)(batch).loss, expected)
    with torch.autocast(place.device.type, torch.bfloat16):
        torch.testing.assert_close(task(batch).loss, expected, rtol=0.01, atol=0)
    hidden = _Hidden(model)
    torch._dynamo.reset()
    batches = [event_batch(place, lengths, seed).features for seed, lengths in enumerate([[3, 0, 4], [1, 2, 2, 1], [5, 4]])]
    with trust_values(), torch.fx.experimental._config.patch(backed_size_oblivious=True):
        compiled = torch.compile(hidden, fullgraph=True, backend="aot_eager", dynamic=True)
        sizes = {0: torch.export.Dim.DYNAMIC}
        given_ = [(of.values(), of.lengths()) for of in batches]
        program = torch.export.export(hidden, given_[0], dynamic_shapes=(sizes, sizes)).module()
        for features, tensors in zip(batches, given_, strict=True):
            torch.testing.assert_close(compiled(*tensors), model.final_hidden(features))
            torch.testing.assert_close(program(*tensors), model.final_hidden(features))


class _Hidden(torch.nn.Module):
    def __init__(self, model: ItemSequenceModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, values: Tensor, lengths: Tensor) -> Tensor:
        return self.model.final_hidden(KeyedJaggedTensor(["item_id", *EVENT_ROWS], values, lengths=lengths))


@pytest.mark.gpu
@every_causal_model
def test_steps_with_events_are_replayed_as_graphs(place: Place, name: str) -> None:
    """With times, so that batches have four keys."""
    model = event_model(name, place, num_time_buckets=4).train()
    task = NextItemTask(model)
    graphed = graphed_steps(task, place)
    for seed, lengths in enumerate(([3, 0, 4], [2, 5], [8, 8, 8, 1])):
        batch = event_batch(place, lengths, seed, times=True)
        loss, _ = graphed(batch)
        found = [parameter.grad.clone() for parameter in model.parameters()]
        alone = copy.deepcopy(task)
        alone.zero_grad()
        expected = alone(batch).loss
        expected.backward()
        torch.testing.assert_close(loss, expected.detach())
        torch.testing.assert_close(found, [parameter.grad for parameter in alone.model.parameters()])


def test_events_without_what_the_model_takes_are_refused(place: Place) -> None:
    model = event_model("sasrec", place)
    items, lengths = drawn(place, 3, 0), torch.tensor([2, 1], device=place.device)
    good = torch.zeros(3, dtype=torch.int64, device=place.device)
    message = (
        "features: got the keys ['item_id', 'action'], expected 'shop id', too, a value for each row of 'item_id'; the model was "
        "built with event_features"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        model(features_of(items, lengths, {"action": good}))
    message = "features['shop id'].values()[1]: expected an id from 0 to 3, got 4; map ids to dense ones first"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        model(features_of(items, lengths, {"action": good, "shop id": torch.tensor([0, 4, 0], device=place.device)}))
    short = KeyedJaggedTensor(
        ["item_id", *EVENT_ROWS], torch.cat([items, good, good]), lengths=torch.tensor([2, 1, 1, 2, 2, 1], device=place.device)
    )
    message = "features['action']: expected a value for each row of 'item_id', got samples of other lengths"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        model(short)
