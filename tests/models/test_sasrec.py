"""SASRec against its padded twin: loss, hidden states and every gradient."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch.func import functional_call
from torchrec.fx.tracer import Tracer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from jagged.data import SequenceBatch
from jagged.models import NextItemTask, SASRec, build
from jagged.modules import CutCrossEntropyHead, GroupSparseHead
from jagged.ops import trust_values
from tests.oracle import check_three_way
from tests.places import PLACE, Place
from tests.reference.sasrec import PaddedSASRec, left_padded, twin_names
from tests.strategies import Jagged, jagged_batches, jagged_of, seeds

ITEMS, LENGTH = 50, 32
SIZES = {"embedding_dim": 12, "num_heads": 2, "num_layers": 2, "max_seq_len": LENGTH}

pytestmark = pytest.mark.skipif(PLACE.name == "interpret", reason="models run on the place's own backend")


def keyed(values: torch.Tensor, batch: Jagged) -> KeyedJaggedTensor:
    return KeyedJaggedTensor.from_offsets_sync(keys=["item_id"], values=values, offsets=batch.offsets)


def batch_of(values: torch.Tensor, targets: torch.Tensor, batch: Jagged) -> SequenceBatch:
    users = torch.arange(batch.batch_size, device=values.device)
    return SequenceBatch(features=keyed(values, batch), targets=targets, users=users)


def random_model(place: Place, seed: int) -> SASRec:
    torch.manual_seed(seed)
    model = SASRec(ITEMS, dropout=0.0, **SIZES)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.to(place.device)


# torchrec's EmbeddingCollection takes no empty batch; the modules' own tests draw it.
@settings(max_examples=30)
@given(jagged_batches(longest=LENGTH).filter(lambda batch: batch.batch_size > 0), seeds())
def test_agrees_with_the_padded_twin(place: Place, batch: Jagged, seed: int) -> None:
    model = random_model(place, seed)
    task, twin = NextItemTask(model), PaddedSASRec(ITEMS, **SIZES).to(place.device)
    names = twin_names(SIZES["num_layers"])
    parameters = [model.get_parameter(name).detach() for name in names]
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(ITEMS, (batch.total,), generator=generator).to(place.device)
    targets = torch.randint(ITEMS, (batch.total,), generator=generator).to(place.device)
    items, filled = left_padded(values, batch.lengths, LENGTH)

    def ours(*values_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        named = {f"model.{name}": value for name, value in zip(names, values_, strict=True)}
        output = functional_call(task, named, (batch_of(values, targets, batch),))
        scores = output.scores["next_item"]
        assert not scores.logits.requires_grad
        assert scores.labels is targets
        assert output.rows() == len(targets)
        return output.loss, scores.logits

    def padded(*values_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        named = dict(zip(names.values(), values_, strict=True))
        hidden = functional_call(twin, named, (items, filled))
        scores = hidden[filled] @ named["item_weight"].T
        return torch.nn.functional.cross_entropy(scores, targets), scores.gather(1, targets[:, None]).squeeze(1), hidden[:, -1]

    if batch.total:
        check_three_way(lambda *p: ours(*p)[0], lambda *p: padded(*p)[0], parameters)
        nothing = [False] * len(parameters)
        # A target's score is what the log-sum-exp and the loss differ by, so the loss belongs to what is rounded.
        check_three_way(
            lambda *p: torch.cat([ours(*p)[1], ours(*p)[0][None]]),
            lambda *p: torch.cat([padded(*p)[1], padded(*p)[0][None]]),
            parameters,
            requires_grad=nothing,
        )
        empty = torch.tensor([n == 0 for n in batch.lengths], device=place.device)[:, None]
        check_three_way(
            lambda *p: functional_call(
                _FinalHidden(model), {f"model.{n}": v for n, v in zip(names, p, strict=True)}, (keyed(values, batch),)
            ),
            lambda *p: padded(*p)[2].masked_fill(empty, 0),
            parameters,
            requires_grad=nothing,
        )
    else:
        loss, _ = ours(*(p.requires_grad_() for p in parameters))
        loss.backward()
        assert loss.item() == 0
        assert all(p.grad is None or not p.grad.any() for p in parameters)
        assert not model.final_hidden(keyed(values, batch)).any()


class _FinalHidden(torch.nn.Module):
    def __init__(self, model: SASRec) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.model.final_hidden(features)


def test_a_row_does_not_see_the_future(place: Place) -> None:
    ours = random_model(place, 0)
    offsets = torch.tensor([0, 4, 9], device=place.device)
    items = torch.arange(9, device=place.device)
    changed = items.clone()
    changed[[3, 8]] = 40
    before, after = (
        ours(KeyedJaggedTensor(keys=["item_id"], values=v, offsets=offsets)).values().detach() for v in (items, changed)
    )
    same = (before == after).all(1)
    assert same.tolist() == [True, True, True, False, True, True, True, True, False]


def test_rows_past_the_last_position_share_it(place: Place) -> None:
    ours = random_model(place, 0)
    total = LENGTH + 7
    offsets = torch.tensor([0, total], device=place.device)
    features = KeyedJaggedTensor(
        keys=["item_id"], values=torch.zeros(total, dtype=torch.int64, device=place.device), offsets=offsets
    )
    assert torch.isfinite(ours(features).values()).all()


def test_meta_device_reset_and_registry() -> None:
    model = build("sasrec", num_items=10, embedding_dim=8, device="meta")
    assert all(p.is_meta for p in model.parameters())
    model = model.to_empty(device="cpu")
    model.reset_parameters()
    assert all(torch.isfinite(p).all() for p in model.parameters())
    again = build("sasrec", **model.config)
    assert again.config == model.config
    assert set(twin_names(2)) == {name for name, _ in again.named_parameters()}
    known = "bert4rec, dcnv2, din, dlrm, dlrm-hstu, hstu, mmoe, multilabel, ranking, sasrec, wukong"
    with pytest.raises(ValueError, match=f"model: got 'gru4rec', expected one of {known}"):
        build("gru4rec", num_items=3)


def test_is_traced_with_its_parts_as_leaves() -> None:
    from torchrec.fx import Tracer

    model = SASRec(10, embedding_dim=8, dropout=0.0)
    graph = Tracer().trace(model)
    traced = torch.fx.GraphModule(model, graph)
    called = {node.target for node in graph.nodes if node.op == "call_module"}
    assert called == {"item_embeddings.embeddings.item_id", "positions", "embedding_dropout", "blocks.0", "blocks.1", "norm"}
    features = KeyedJaggedTensor(keys=["item_id"], values=torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 1]))
    torch.testing.assert_close(traced(features).values(), model(features).values(), rtol=0, atol=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.gpu
def test_bf16_mixed_step_without_synchronisation(place: Place) -> None:
    model = SASRec(1000, embedding_dim=64).to(place.device)
    task = NextItemTask(model)
    lengths = torch.tensor([5, 1, 30], device=place.device)
    values = torch.randint(1000, (36,), device=place.device)
    features = KeyedJaggedTensor(keys=["item_id"], values=values, lengths=lengths, length_per_key=[36])
    users = torch.arange(3, device=place.device)
    batch = SequenceBatch(features=features, targets=values.flip(0), users=users, num_items=1000)

    def step() -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            loss, _ = task(batch)
        loss.backward()
        return loss.detach()

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.isfinite(loss)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_a_batch_without_samples_is_refused() -> None:
    none = KeyedJaggedTensor(
        keys=["item_id"], values=torch.zeros(0, dtype=torch.int64), lengths=torch.zeros(0, dtype=torch.int64), stride=0
    )
    model = SASRec(ITEMS, embedding_dim=8)
    for call in (model, model.final_hidden):
        with pytest.raises(ValueError, match=r"^features: got no samples, expected at least one; leave an empty batch out$"):
            call(none)


BAD_IDS = [([0, ITEMS, 2], ITEMS, 1), ([0, 1, -1], -1, 2), ([2**40, 1, -1], 2**40, 0)]


@pytest.mark.parametrize(("ids", "bad", "where"), BAD_IDS)
def test_ids_out_of_range_reach_no_kernel(place: Place, ids: list[int], bad: int, where: int) -> None:
    model = random_model(place, 0)
    good = torch.arange(3, device=place.device)
    values, lengths = torch.tensor(ids, device=place.device), torch.tensor([3, 0], device=place.device)
    features = KeyedJaggedTensor(keys=["item_id"], values=values, lengths=lengths)
    message = rf"features\['item_id'\]\.values\(\)\[{where}\]: expected an id from 0 to {ITEMS - 1}, got {bad}"
    for call in (model, model.final_hidden, lambda f: NextItemTask(model)(SequenceBatch(f, good, good[:2]))):
        with pytest.raises(ValueError, match=message):
            call(features)
    right = KeyedJaggedTensor(keys=["item_id"], values=good, lengths=lengths)
    with pytest.raises(ValueError, match=rf"targets\[{where}\]: expected an id from 0 to {ITEMS - 1}, got {bad}"):
        NextItemTask(model)(SequenceBatch(right, values, good[:2]))
    # A larger catalogue than the model's is no reason to trust a batch.
    with pytest.raises(ValueError, match=message):
        NextItemTask(model)(SequenceBatch(features, good, good[:2], num_items=ITEMS + 1))
    # The process and its GPU live.
    assert torch.isfinite(model(right).values()).all()


@pytest.mark.parametrize(("offsets", "message"), [([0, 2, 9], "expected 3"), ([0, 3, 2], "at least 3")])
def test_offsets_that_do_not_fit_the_ids_reach_no_kernel(place: Place, offsets: list[int], message: str) -> None:
    model = random_model(place, 0)
    values = torch.arange(3, device=place.device)
    features = KeyedJaggedTensor(keys=["item_id"], values=values, offsets=torch.tensor(offsets, device=place.device))
    with pytest.raises(ValueError, match=message):
        model(features)
    right = KeyedJaggedTensor(keys=["item_id"], values=values, lengths=torch.tensor([3], device=place.device))
    assert torch.isfinite(model(right).values()).all()


def test_trusted_values_are_not_looked_at(place: Place) -> None:
    from jagged.ops import trust_values, values_are_trusted

    model = random_model(place, 0)
    values = torch.arange(3, device=place.device)
    lengths = torch.tensor([1, 2], device=place.device)
    features = KeyedJaggedTensor(keys=["item_id"], values=values, lengths=lengths, length_per_key=[3])
    expected = model(features).values()
    with trust_values():
        assert values_are_trusted()
        if place.name == "gpu":
            torch.cuda.set_sync_debug_mode("error")
        found = model(features).values()
        if place.name == "gpu":
            torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found, expected)
    assert not values_are_trusted()
    if place.name == "cpu":
        # Past our check stands torch's own; on a GPU that would be a device-side assertion.
        bad = KeyedJaggedTensor(keys=["item_id"], values=values + ITEMS, lengths=lengths, length_per_key=[3])
        with trust_values(), pytest.raises(IndexError):
            model(bad)
        with pytest.raises(ValueError, match="expected an id from"):
            model(bad)


def output_of(**options: Any) -> GroupSparseHead:
    given: dict[str, Any] = {"fan_in": 4, "group_size": 5, "head": 6, "loss": "softmax", **options}
    return GroupSparseHead(given.pop("width", 12), torch.arange(given.pop("items", ITEMS)), 60, **given)


def test_an_output_layer_of_its_own(place: Place) -> None:
    """Its loss is that of all logits, which are the products that rank the catalogue; the item table is looked up alone."""
    torch.manual_seed(0)
    model = SASRec(ITEMS, dropout=0.0, output=output_of(), **SIZES).to(place.device)
    task = NextItemTask(model)
    assert task.head is None
    offsets = torch.tensor([0, 4, 4, 9], device=place.device)
    features = KeyedJaggedTensor(keys=["item_id"], values=torch.arange(9, device=place.device), offsets=offsets)
    targets = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8, 49], device=place.device)
    batch = SequenceBatch(features=features, targets=targets, users=torch.arange(3, device=place.device))
    output = task(batch)
    weight, hidden = model.item_weight, model(features).values()
    assert weight.shape == (ITEMS, 13)
    logits = hidden @ weight[:, :12].T + weight[:, 12]
    torch.testing.assert_close(output.loss, torch.nn.functional.cross_entropy(logits, targets))
    scores = output.scores["next_item"].logits
    torch.testing.assert_close(scores, logits.gather(1, targets[:, None])[:, 0])
    last = task.predict(batch)["hidden"]
    assert last.shape == (3, 13)
    torch.testing.assert_close((last @ weight.T)[[0, 2]], logits[[3, 8]])
    assert not last[1].any()
    assert model.output is not None
    best, items = model.output.topk(hidden[8:], 5)
    torch.testing.assert_close((last[2:] @ weight.T).topk(5).values, best)
    assert items.tolist() == (last[2:] @ weight.T).topk(5).indices.tolist()
    output.loss.backward()
    assert model.output.weight.grad is not None
    assert model.output.head_weight.grad is not None
    assert model.item_table.grad is not None
    # The table has a gradient of what was looked up alone.
    assert model.item_table.grad.any(1).nonzero().flatten().tolist() == list(range(9))
    nothing = KeyedJaggedTensor(keys=["item_id"], values=features.values()[:0], offsets=torch.tensor([0, 0], device=place.device))
    empty = task(SequenceBatch(features=nothing, targets=targets[:0], users=torch.arange(1, device=place.device)))
    assert float(empty.loss.detach()) == 0


def test_an_output_layer_is_kept_and_checked() -> None:
    model = SASRec(ITEMS, output=output_of(), **SIZES)
    assert {name: value for name, value in model.config.items() if name.startswith("output")} == {
        "output_fan_in": 4, "output_dense_items": 6, "output_groups": 9,
    }  # fmt: skip
    again = build("sasrec", **model.config)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again.item_weight, model.item_weight)
    meta = build("sasrec", device="meta", **model.config)
    assert all(p.is_meta for p in meta.parameters())
    meta = meta.to_empty(device="cpu")
    meta.reset_parameters()
    assert torch.isfinite(meta.item_weight).all()
    meta.load_state_dict(model.state_dict())
    assert torch.equal(meta.item_weight, model.item_weight)
    expected = f"output: got a head of 49 labels that reads 12 features, expected {ITEMS} and 12, num_items and embedding_dim"
    for options, message in (
        ({"items": 49}, expected),
        ({"width": 8}, expected.replace("49", "50").replace("reads 12", "reads 8")),
        *(
            (
                options,
                "output: expected a head of loss='softmax', without projections and an optimizer, and not adjacent, got another "
                "one",
            )
            for options in (
                {"loss": "bce"},
                {"tail_dim": 6},
                {"head_dim": 6},
                {"adjacent": True},
                {"optimizer": "sgd", "optimizer_options": {"learning_rate": 0.1}},
            )
        ),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            SASRec(ITEMS, output=output_of(**options), **SIZES)

    class Other(torch.nn.Module):
        output, item_weight, config = torch.nn.Linear(2, 2), torch.zeros(ITEMS, 12), {"num_items": ITEMS}

    assert isinstance(NextItemTask(Other()).head, CutCrossEntropyHead)  # type: ignore[arg-type]
    for more, name in (({"label_smoothing": 0.1}, "label_smoothing"), ({"head": CutCrossEntropyHead()}, "head")):
        message = f"{name}: got one and a model with an output layer, whose loss is its own; leave it out"
        with pytest.raises(ValueError, match=f"^{message}$"):
            NextItemTask(model, **more)  # type: ignore[arg-type]


def test_an_output_layer_with_what_users_do(place: Place) -> None:
    """Autocast, compiling for other sizes, checkpointing, pickles, copies and fx: the loss and its gradients are the same."""
    torch.manual_seed(0)
    task = NextItemTask(SASRec(ITEMS, dropout=0.0, output=output_of(), **SIZES)).to(place.device)
    parameters = [parameter for parameter in task.parameters() if parameter.numel()]

    def batch_for(lengths: tuple[int, ...], seed: int) -> SequenceBatch:
        batch = jagged_of(lengths)
        generator = torch.Generator().manual_seed(seed)
        values, targets = (torch.randint(ITEMS, (batch.total,), generator=generator).to(place.device) for _ in range(2))
        return batch_of(values, targets, batch)

    def run(function: Any, batch: SequenceBatch, autocast: bool = False) -> list[torch.Tensor]:
        with torch.autocast(place.device.type, torch.bfloat16, enabled=autocast):
            loss = function(batch)
        of = parameters if not isinstance(function, NextItemTask) else [p for p in function.parameters() if p.numel()]
        return [loss.loss.detach(), *torch.autograd.grad(loss.loss, of, allow_unused=True, materialize_grads=True)]

    batch, other = batch_for((3, 0, 5), 1), batch_for((1, 7, 2, 4), 2)
    expected = run(task, batch)
    assert all(gradient.dtype == torch.float32 for gradient in expected)
    for same in (pickle.loads(pickle.dumps(task)), copy.deepcopy(task)):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(run(same, batch), expected, strict=True))
    recomputed = run(lambda x: torch.utils.checkpoint.checkpoint(lambda: task(x), use_reentrant=False), batch)
    for ours, theirs in zip(recomputed, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    with trust_values():
        compiled = torch.compile(lambda x: task(x), backend="aot_eager")
        for one in (batch, other):
            for ours, theirs in zip(run(compiled, one), run(task, one), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(run(task, batch, autocast=True), expected, strict=True):
        assert ours.dtype == torch.float32
        assert float((ours - theirs).norm()) <= 0.05 * float(theirs.norm()) + 1e-3
    leaves = {node.target for node in Tracer(leaf_modules=[]).trace(task.model).nodes if node.op == "call_module"}
    assert {"positions", "blocks.0", "blocks.1"} <= leaves
