"""Batches of requests filled up to a graph's size."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import jagged
from jagged.config import TrainerConfig
from jagged.data.table_splits import Split
from jagged.models import RankingModel
from jagged.training.engine import Engine
from jagged.training.filled import FilledRequests, RequestSizes, Sizes
from jagged.training.forecast import _kept_bytes, _kept_of_requests, _lookup_bytes
from jagged.training.graphs import GraphedSteps
from jagged.training.processes import process_group
from tests.models.shops import shop
from tests.models.test_ranking import COMMON, VARIANTS, doubled, gradients, of_variant
from tests.training.test_table_cache import TABLE, run_config

#: But for models of candidates' lists in shared tables, whose batches run without a graph.
FILLED = [name for name in VARIANTS if "shared" not in name]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def splits() -> dict[str, Split]:
    return {}


def read_rows(batch: Any) -> dict[str, set[Any]]:
    """The ids of each key."""
    found = {}
    for name in ("features", "weighted_features", "candidates", "weighted_candidates", "history_lists"):
        if (keyed := getattr(batch, name)) is not None:
            found |= {f"{name} {key}": set(keyed[key].values().tolist()) for key in keyed.keys()}  # noqa: SIM118
    return found


OF_REQUESTS = [name for name in FILLED if "conditional" not in VARIANTS[name][2]][:6]
CASES = [*((name, {}) for name in FILLED), *((name, {"loss": "listwise"}) for name in OF_REQUESTS)]


@pytest.mark.parametrize(("name", "options"), CASES)
@settings(max_examples=4)
@given(data=st.data())
def test_what_fills_up_changes_neither_loss_nor_gradients(
    splits: dict[str, Split], name: str, options: dict[str, Any], data: st.DataObject
) -> None:
    split, model = of_variant(splits, name, **options)
    model = doubled(model)
    inputs: list[FilledRequests] = []
    for _ in range(3):
        places = data.draw(st.lists(st.integers(0, len(split.train) - 1), min_size=1, max_size=40))
        batch = split.train.gather(places, max_history=data.draw(st.sampled_from([None, 0, 3])))
        own = RequestSizes().of(batch)
        assert own is not None
        filled = next((of for of in inputs if of.holds(own)), None)
        if filled is None:
            filled = RequestSizes().room(batch, own, CPU, inputs)
            assert filled is not None
            assert filled.holds(own)
            inputs.append(filled)
        # In the same memory, in which nothing may be left of the one before.
        filled.take(batch)
        whole = filled.batch()
        assert (len(whole), whole.rows.numel()) == filled.sizes[:2]
        assert int(whole.candidate_offsets[-1]) == whole.rows.numel()
        assert bool((whole.candidate_offsets.diff() >= 0).all())
        for keyed in (whole.features, whole.candidates, whole.history_lists):
            if keyed is not None and keyed.keys():
                assert keyed.lengths().view(len(keyed.keys()), -1).sum(1).tolist() == keyed.length_per_key()
        assert read_rows(whole) == read_rows(batch)
        out, expected = model(whole), model(batch)
        torch.testing.assert_close(out.loss, expected.loss, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(out.rows(), expected.rows())
        for task, scores in expected.scores.items():
            logits = out.scores[task].logits[: len(scores.logits)]
            torch.testing.assert_close(logits, scores.logits, rtol=1e-9, atol=1e-10)
        wanted = gradients(expected.loss, model)
        for key, of in gradients(out.loss, model).items():
            torch.testing.assert_close(of, wanted[key], rtol=1e-8, atol=1e-10, msg=lambda text, key=key: f"{key}: {text}")


requests = st.integers(1, 5_000)
means = st.sampled_from([0.0, 0.3, 1.0, 1.7, 20.0, 180.5])


@st.composite
def sizes(draw: st.DrawFn) -> Sizes:
    """Of one table, whose keys have an id a request, an id a candidate, some, or none."""
    count = draw(requests)
    candidates, events = math.ceil(count * draw(means.filter(bool))), round(count * draw(means))
    of_features = [count, candidates, events, round(count * draw(means))]
    counts = {"features": of_features, "candidates": [candidates, round(candidates * draw(means))], "history_lists": [events]}
    return Sizes(count, candidates, events, counts)


@given(sizes())
def test_a_size_holds_what_it_was_made_for(own: Sizes) -> None:
    larger = own.more()
    assert larger.holds(own)
    assert larger.holds(larger)
    # Keys with an id a candidate, or an event, stay as long as these are.
    assert larger.counts["features"][1:3] == [larger.candidates, larger.events]
    assert own == larger or not own.holds(larger)


def of_lists(count: int, ids: int, *, attended: bool = True) -> Sizes:
    return Sizes(count, count, 0, {"features": [count, ids]}, frozenset([1] if attended else []))


def test_what_a_size_holds() -> None:
    size = of_lists(1000, 200_000).more()
    assert size == of_lists(1064, 212_650)
    assert size.holds(of_lists(1000, 212_650))
    assert not size.holds(of_lists(1000, 212_651))
    assert not size.holds(of_lists(1065, 200_000))
    # Too much is missing in all, or for each of the samples that are missing.
    assert not size.holds(of_lists(700, 155_000))
    assert size.holds(of_lists(1000, 180_000))
    assert not size.holds(of_lists(1000, 175_000))
    assert not size.holds(of_lists(1063, 200_000))
    # Of a list that is pooled, length by length, one sample may have all that is missing; but there has to be one.
    pooled = of_lists(1000, 200_000, attended=False).more()
    assert pooled.holds(of_lists(1063, 200_000, attended=False))
    assert not pooled.holds(of_lists(1064, 200_000, attended=False))
    assert not pooled.holds(of_lists(700, 155_000, attended=False))
    # No id is there that could be repeated.
    assert not of_lists(10, 12).holds(of_lists(9, 0))


def test_sizes_that_take_turns_become_one(splits: dict[str, Split]) -> None:
    batch = of_variant(splits, "plain")[0].train.gather(range(20))
    own = RequestSizes().of(batch)
    assert own is not None
    first = own._replace(events=2000, counts={name: [*of] for name, of in own.counts.items()})
    second = own._replace(events=2200)
    made: list[Any] = [RequestSizes().room(batch, first, CPU, [])]
    assert not made[0].holds(first._replace(events=2900))
    made.append(RequestSizes().room(batch, second, CPU, made))
    assert made[1].sizes.events == 2750
    assert made[1].sizes.candidates == made[0].sizes.candidates
    # Others that are far from these stay alone, and there are no more than eight.
    for events in range(10_000, 70_000, 10_000):
        made.append(RequestSizes().room(batch, own._replace(events=events), CPU, made))
        assert made[-1].sizes.events == events * 5 / 4
    assert len(made) == 8
    assert RequestSizes().room(batch, own._replace(events=90_000), CPU, made) is None


def test_batches_of_unknown_size_are_left_alone(splits: dict[str, Split]) -> None:
    batch = of_variant(splits, "plain")[0].train.gather(range(4))
    assert RequestSizes().of(batch) is not None
    batch.weights = batch.weights * 2
    assert RequestSizes().of(batch) is None
    # Candidates' lists among the ids of requests, which other offsets cut.
    assert RequestSizes().of(of_variant(splits, "shared lists")[0].train.gather(range(4))) is None


def test_drawn_candidates_stay_drawn() -> None:
    split = shop("user", "item", "time")
    (batch, *_) = split.train.loader(batch_size=8, negatives=2, progress=False)
    own = RequestSizes().of(batch)
    assert own is not None
    filled = RequestSizes().room(batch, own, CPU, [])
    assert filled is not None
    filled.take(batch)
    assert batch.sampled
    assert filled.batch().sampled


class Launched:
    """`GraphedSteps` without graphs: the same batches, filled up in the same memory, kernel by kernel."""

    def __init__(
        self, forward: Any, sizes: Any, module: Any, device: torch.device, held: Any = None, *, clips: bool = False
    ) -> None:
        self._forward, self._sizes, self._device = forward, sizes, device
        self.rooms: list[Any] = []
        self.replayed = 0

    def __call__(self, batch: Any) -> Any:
        size = self._sizes.of(batch)
        filled = next((of for of in self.rooms if of.holds(size)), None)
        if filled is None:
            filled = self._sizes.room(batch, size, self._device, self.rooms)
            self.rooms.insert(0, filled)
        filled.take(batch)
        loss, rows = self._forward(filled.batch())
        loss.backward()
        self.replayed += 1
        return loss.detach(), None if rows is None else rows.detach()


def trained(
    name: str,
    split: Split,
    config: TrainerConfig,
    device: torch.device,
    *,
    by_graphs: bool,
    precision: str = "32-true",
    **of_model: Any,
) -> tuple[Any, ...]:
    """Losses, states and the engine of two epochs."""
    options = {**VARIANTS[name][2], **of_model}
    torch.manual_seed(0)
    kind = options.pop("class", RankingModel)
    model = kind.of(split, **{"embedding_dim": 8, **COMMON[kind], **options})
    with process_group(device) as processes, pytest.MonkeyPatch.context() as patch:
        if device.type == "cpu":
            patch.setattr("jagged.training.engine.graphs_serve", lambda *_: by_graphs)
        config = config.model_copy(update={"cuda_graphs": by_graphs})
        engine = Engine(model.to(device), config, precision, processes)
        losses, rows = [], []
        for epoch in range(2):
            loader = split.train.loader(batch_size=24, shuffle=True, seed=0, progress=False)
            loader.set_position(epoch, 0)
            for one in engine.steps(iter(loader)):
                losses.append(one.loss.detach().clone())
                rows.append(torch.as_tensor(one.rows).detach().clone())
        states = {key: of.cpu() for key, of in engine.state_tensors().items() if "random" not in key}
    return torch.stack(losses).tolist(), torch.stack(rows).tolist(), states, engine


def without_keys(name: str, of: torch.Tensor) -> torch.Tensor:
    """A state, but for the part that is of a bias of attention's keys: no softmax has it, and AdamW makes steps of roundings."""
    if not of.dim():
        # The number of steps.
        return of
    if name.endswith("qkv_projection.bias"):
        queries, _, values = of.chunk(3)
        return torch.cat([queries, values])
    return of.chunk(2)[1] if name.endswith("kv_projection.bias") else of


OPTIMIZERS = [
    {"table_optimizer": "rowwise-adagrad"},
    {"table_optimizer": "sparse-adamw", "gradient_clip_norm": 0.5},
    {"table_optimizer": "sgd", "gradient_clip_norm": None},
]


@pytest.mark.parametrize("options", OPTIMIZERS, ids=lambda of: of["table_optimizer"])
@pytest.mark.parametrize("name", ["everything", "plain by dots", "dlrm-hstu", "weights"])
def test_trains_as_batches_do_that_nothing_fills(monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any]) -> None:
    """Also tables of an optimizer that moves each row that is read, whatever its gradient."""
    split = shop(*VARIANTS[name][0], **VARIANTS[name][1], requests=90)
    monkeypatch.setattr("jagged.training.engine.GraphedSteps", Launched)
    config = TrainerConfig(learning_rate=0.01, table_learning_rate=0.05, **options)
    losses, rows, states, engine = trained(name, split, config, CPU, by_graphs=True)
    expected, expected_rows, wanted, other = trained(name, split, config, CPU, by_graphs=False)
    assert losses == pytest.approx(expected, rel=1e-4)
    assert rows == pytest.approx(expected_rows)
    for key, of in wanted.items():
        found, of = (without_keys(key, each) for each in (states[key], of))
        torch.testing.assert_close(found, of, rtol=1e-3, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}")
    assert engine.samples == other.samples
    graphs = engine._step._graphs
    assert isinstance(graphs, Launched)
    assert 1 <= len(graphs.rooms) < len(losses) == graphs.replayed
    assert other._step._graphs is None
    # Their memory is that of a run.
    engine.close()
    assert engine._step._graphs is None


@pytest.mark.parametrize(
    "options", [*OPTIMIZERS, {"table_optimizer": "adamw", "accumulate": 2}], ids=lambda of: of["table_optimizer"]
)
@pytest.mark.parametrize("name", ["everything", "dlrm-hstu", "din"])
def test_trains_the_same_where_histories_are_encoded_again(name: str, options: dict[str, Any]) -> None:
    """With dropout, bit for bit: tables that backward has updated are not read again."""
    split = shop(*VARIANTS[name][0], **VARIANTS[name][1], requests=90)
    config = TrainerConfig(learning_rate=0.01, table_learning_rate=0.05, **options)
    both = [trained(name, split, config, CPU, by_graphs=False, dropout=0.3, recompute=recompute) for recompute in (False, True)]
    assert both[0][:2] == both[1][:2]
    states = [of[2] for of in both]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(of, states[1][key]) for key, of in states[0].items())


def test_trains_in_mixed_precision_as_batches_do_that_nothing_fills(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within what bfloat16 rounds, of which the loss is a mean over the rows."""
    split = shop(*VARIANTS["plain"][0], **VARIANTS["plain"][1], requests=90)
    monkeypatch.setattr("jagged.training.engine.GraphedSteps", Launched)
    config = TrainerConfig(learning_rate=0.01, table_learning_rate=0.05, **OPTIMIZERS[1])
    found, wanted = (
        trained("plain", split, config, CPU, by_graphs=by_graphs, precision="bf16-mixed") for by_graphs in (True, False)
    )
    exact = trained("plain", split, config, CPU, by_graphs=False)
    error = max(abs(one - other) for one, other in zip(wanted[0], exact[0], strict=True))
    assert error > 0
    assert found[0] == pytest.approx(wanted[0], abs=2 * error)
    assert found[1] == pytest.approx(wanted[1])


def test_the_forecast_counts_what_graphs_keep(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def forecast() -> Any:
        return jagged.train(run_config(tmp_path, 1, table_cache_bytes=None), TABLE, dry_run=True).forecast

    launched = forecast()
    assert not launched.graphs
    monkeypatch.setattr("jagged.training.forecast.graphs_serve", lambda *_: True)
    replayed = forecast()
    assert replayed.graphs
    # A batch that is filled up has 5 quarters of the rows at most; the first step of a graph runs beside others.
    assert 2 * launched.activations < replayed.activations <= 2.5 * launched.activations
    assert replayed.gradients > launched.gradients
    assert replayed.peak > launched.peak + launched.activations


def test_the_forecast_of_histories_that_are_encoded_again(splits: dict[str, Split], monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is kept but the smaller history's, and what both are encoded of; the model is as it was, whatever happens."""
    split, model = of_variant(splits, "lists and events by dots", recompute=True, histories=["liked"], num_layers=3)
    batch = split.train.gather(range(20))
    histories = list(model.scorer.histories)

    def kept(*again: Any) -> int:
        for history in histories:
            history.recompute = history in again
        return _kept_bytes(model, batch, "32-true", CPU)

    bare, alone = kept(*histories), [kept(other) for other in reversed(histories)]
    whole = kept()
    assert _kept_of_requests(model, batch, "32-true", CPU) == whole
    kept(*histories)
    counted = _kept_of_requests(model, batch, "32-true", CPU)
    # What all of them are encoded of stays: a list's rows as they were looked up, what stands side by side of events, queries.
    stays: set[int] = set()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        stays.add(tensor.untyped_storage().data_ptr())
        return tensor

    given: list[int] = []
    hooks = [
        of.register_forward_pre_hook(lambda _, of: given.extend(x.values().untyped_storage().data_ptr() for x in of[:2]))
        for of in histories
    ]
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        # Until its gradient is gone, nobody else has their memory.
        loss = model(batch).loss
    assert len(set(given)) == 3
    assert set(given) <= stays
    del loss
    for hook in hooks:
        hook.remove()
    assert counted == max(alone)
    assert bare < counted < whole

    def fails(*_: Any) -> int:
        raise RuntimeError("no memory")

    monkeypatch.setattr("jagged.training.forecast._kept_bytes", fails)
    with pytest.raises(RuntimeError, match="no memory"):
        _kept_of_requests(model, batch, "32-true", CPU)
    assert all(history.recompute and not history._forward_pre_hooks for history in histories)


@pytest.mark.parametrize("name", ["everything", "no history", "weights"])
def test_gradients_of_all_that_is_looked_up_are_counted(splits: dict[str, Split], name: str) -> None:
    split, model = of_variant(splits, name)
    batch = split.train.gather(range(20))
    model(batch)
    widths = model.config["table_dims"]
    inputs = model.inputs
    tables = {**inputs.features, **inputs.weighted_features, **inputs.candidates, **inputs.weighted_candidates}
    tables |= {**inputs.list_histories, **inputs.history, **inputs.history_lists, **inputs.candidate_ids}
    expected = 0
    for keyed in (batch.features, batch.weighted_features, batch.candidates, batch.weighted_candidates, batch.history_lists):
        for key in [] if keyed is None else keyed.keys():
            width = widths.get(tables[key], model.config["embedding_dim"])
            expected += keyed[key].values().numel() * (4 * width + 16)
    assert _lookup_bytes(model, batch) == expected > 0


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIMIZERS, ids=lambda of: of["table_optimizer"])
@pytest.mark.parametrize(
    "name", ["everything", "everything by dots", "dlrm", "dcnv2", "wukong", "experts of tasks", "dlrm-hstu", "encoded again"]
)
def test_graphs_train_as_single_launches_do(name: str, options: dict[str, Any]) -> None:
    check_graphs(name, options)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name",
    ["weights", "a list alone", "lists as histories", "dlrm-hstu of lists and events", "numbers alone"],
)
def test_graphs_train_on_other_tables_as_single_launches_do(name: str) -> None:
    check_graphs(name, OPTIMIZERS[0])


@pytest.mark.gpu
@pytest.mark.parametrize("loss", ["listwise", "focal"])
def test_graphs_train_by_other_losses_as_single_launches_do(loss: str) -> None:
    check_graphs("plain", OPTIMIZERS[0], loss=loss)


def check_graphs(name: str, options: dict[str, Any], **of_model: Any) -> None:
    split = shop(*VARIANTS[name][0], **VARIANTS[name][1], requests=90)
    device = torch.device("cuda", torch.cuda.current_device())
    config = TrainerConfig(device="cuda", learning_rate=0.01, table_learning_rate=0.05, **options)
    losses, rows, states, engine = trained(name, split, config, device, by_graphs=True, **of_model)
    expected, expected_rows, wanted, _ = trained(name, split, config, device, by_graphs=False, **of_model)
    assert losses == pytest.approx(expected, rel=2e-3)
    assert rows == pytest.approx(expected_rows)
    for key, of in wanted.items():
        found, of = (without_keys(key, each) for each in (states[key], of))
        torch.testing.assert_close(found, of, rtol=0.02, atol=2e-3, msg=lambda text, key=key: f"{key}: {text}")
    graphs = engine._step._graphs
    assert isinstance(graphs, GraphedSteps)
    assert 1 <= len(graphs._graphs) < len(losses)
