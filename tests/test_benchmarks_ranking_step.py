"""The benchmark of a ranking step: both sides are the same model, trained alike, and what is not the same is refused."""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks import padded_ranking, ranking_step
from benchmarks.padded_ranking import Preparation, Rival, kinds_of, weights_of, without_kernels
from benchmarks.ranking_step import TINY, Ours, apart, cases, distances, line_of, model_of, planted, ratios, ready, run
from jagged.data.table_batches import Part
from jagged.models import RankingModel
from jagged.training.processes import Processes, process_group

# TorchRec's own, where what shards tables is imported and used.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.interface:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This API is deprecated. Please use Pytorch Distributed's:DeprecationWarning"),
]
KINDS = ("sharded", "unfused", "unfused_recompute")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def part(tmp_path_factory: pytest.TempPathFactory) -> Part:
    return planted("zipf", "skewed", TINY, tmp_path_factory.mktemp("planted") / "table")


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with process_group(CPU) as found:
        yield found


def numbers_of(scorer: torch.nn.Module, tables: dict[str, Tensor]) -> dict[str, Tensor]:
    """Everything that is learnt, by name."""
    return {**{name: of.detach() for name, of in scorer.named_parameters()}, **tables}


def tables_of(rival: Rival) -> dict[str, Tensor]:
    whole = getattr(rival.model, "module", rival.model)
    states = {name: of for side in (whole.bags, whole.rows) for name, of in side.state_dict().items()}
    return {
        name.split(".")[-2]: of.local_shards()[0].tensor if hasattr(of, "local_shards") else of for name, of in states.items()
    }


def expected_of(model: RankingModel, processes: Processes) -> dict[str, Tensor]:
    """What ours has, by the names of the other."""
    rival = Rival("unfused", model, processes, autocast=False)
    return numbers_of(rival.model.scorer, weights_of(model))


def test_the_table_is_what_the_benchmark_says(part: Part) -> None:
    (batch,) = ready(part, 64, 1, TINY)
    inputs = Preparation(part).inputs
    ids = len(inputs.features) + len(inputs.candidate_ids) + len(inputs.candidates)
    assert ids + len(inputs.request_numbers) + len(inputs.candidate_numbers) == 100
    assert list(inputs.list_histories) == ["history0", "history1", "history2"]
    assert list(inputs.labels) == ["click", "buy"]
    assert 0 < float(batch.labels.mean()) < 1
    rng = np.random.default_rng(0)
    for kind, most in {"skewed": 20, "even": 12}.items():
        lengths = ranking_step.lengths_of(kind, 20_000, TINY, rng)
        assert lengths.mean() == pytest.approx(8, abs=0.1)
        assert lengths.max() == most
    with pytest.raises(ValueError, match="expected one with a batch of 512"):
        ready(part, 512, 1, TINY)


@pytest.mark.parametrize("kind", KINDS)
def test_both_sides_have_the_same_logits(kind: str, part: Part, processes: Processes) -> None:
    model, (batch,) = model_of(part, TINY, 3, CPU), ready(part, 64, 1, TINY)
    # Someone without a history, and someone with the longest one.
    lengths = torch.stack([batch.features[key].lengths() for key in model.inputs.list_histories])
    assert int(lengths.min()) == 0
    assert int(lengths.max()) == TINY.longest
    rival = Rival(kind, model, processes, autocast=False)
    assert apart(model, rival, batch, Preparation(part)(batch)) < 1e-5
    rival.close()
    low = Rival(kind, model, processes, autocast=True)
    with pytest.raises(ArithmeticError, match="logits differ"):
        apart(model, low, batch, Preparation(part)(batch))


@pytest.mark.parametrize(
    "name",
    [
        "scorer.histories.0.positions.weight",
        "scorer.histories.2.blocks.0.attention.qkv_projection.weight",
        "scorer.histories.1.attention.kv_projection.weight",
        "scorer.body.meeting.context_projection.weight",
        "scorer.body.towers.layers.1.bias",
        "bags.candidates.embedding_bags.candidate4.weight",
        "sequences.0.embeddings.item2.weight",
    ],
)
def test_other_weights_are_refused(name: str, part: Part, processes: Processes) -> None:
    model, (batch,) = model_of(part, TINY, 0, CPU), ready(part, 64, 1, TINY)
    rival = Rival("unfused", model, processes, autocast=False)
    with torch.no_grad():
        model.get_parameter(name).add_(torch.randn_like(model.get_parameter(name)))
    with pytest.raises(ArithmeticError, match="unfused: logits differ by"):
        apart(model, rival, batch, Preparation(part)(batch))


def test_both_sides_have_the_same_gradients(part: Part, processes: Processes) -> None:
    model, (batch,) = model_of(part, TINY, 1, CPU), ready(part, 64, 1, TINY)
    rival = Rival("unfused", model, processes, autocast=False)
    loss, ours = rival.model(Preparation(part)(batch))[0], model(batch).loss
    torch.testing.assert_close(loss, ours, rtol=1e-5, atol=0)
    loss.backward()
    ours.backward()
    gradients = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in gradients.named_parameters():
            parameter.copy_(model.get_parameter(name).grad)
    expected = expected_of(gradients, processes)
    found = {name.removeprefix("scorer."): of.grad for name, of in rival.model.named_parameters()}
    found = {name.split(".")[-2] if name.startswith(("bags.", "rows.")) else name: of for name, of in found.items()}
    assert found.keys() == expected.keys()
    for name, of in found.items():
        assert float(of.abs().max()) > 0, name
        torch.testing.assert_close(of, expected[name], rtol=1e-3, atol=1e-6, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_both_sides_are_trained_alike(kind: str, part: Part, processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses, weights and tables after steps, with a decay that shows in them."""
    for module in (ranking_step, padded_ranking):
        monkeypatch.setattr(module, "DECAY", 30.0)
    batches = ready(part, 32, 5, TINY)
    model = model_of(part, TINY, 2, CPU)
    rival, ours = Rival(kind, model, processes, autocast=False), Ours(model, processes, autocast=False)
    before = {name: of.clone() for name, of in expected_of(model, processes).items()}
    # A pipeline goes on where it has ended once.
    losses = [torch.stack([*side.steps(of[:2]), *side.steps(of[2:])]) for side, of in (
        (ours, batches), (rival, list(map(Preparation(part), batches)))
    )]  # fmt: skip
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=0)
    expected = expected_of(model, processes)
    found = numbers_of(getattr(rival.model, "module", rival.model).scorer, tables_of(rival))
    assert found.keys() == expected.keys()
    for name, of in found.items():
        assert not of.equal(before[name]), name
        # Adam's first steps are as long for the smallest gradient as for any.
        far = (of - expected[name]).abs() > 1e-5 + 1e-3 * expected[name].abs()
        assert float(far.double().mean()) < 0.02, name
    ours.close()
    rival.close()


def test_ways_depend_on_kernels() -> None:
    assert without_kernels(CPU) is None
    assert kinds_of(CPU, None) == ["sharded", "unfused", "sharded_recompute"]
    assert kinds_of(torch.device("cuda"), None) == ["sharded", "fused", "sharded_recompute"]
    assert kinds_of(torch.device("cuda"), "no such operator") == ["unfused", "unfused_recompute"]


def test_cases_are_chosen_by_words() -> None:
    every = cases(ranking_step.FULL, [""])
    assert sum(map(len, every.values())) == 2 * 2 * 3
    chosen = cases(ranking_step.FULL, ["uniform ids, even lengths, 4,096", "losses"])
    assert chosen.pop(("uniform", "even")) == {
        "uniform ids, even lengths, 4,096 requests": 4096, "uniform ids, even lengths, losses": None
    }  # fmt: skip
    assert len(chosen) == 3
    assert all(len(of) == 1 for of in chosen.values())


def test_ratios_are_to_the_best_of_the_others() -> None:
    def side(speed: float, peak: int) -> dict[str, Any]:
        return {"samples_per_second": {"median": speed, "min": speed, "max": speed}, "peak_bytes": peak}

    row = {
        "filled": 0.2,
        "jagged": side(300, 4),
        "jagged_clipped": side(290, 4),
        "jagged_launches": side(400, 5),
        "jagged_recompute": side(225, 3),
        "jagged_recompute_launches": side(200, 2),
        "sharded": side(100, 10),
        "fused": side(150, 20),
        "sharded_recompute": side(90, 6),
    }
    kinds = ["sharded", "fused", "sharded_recompute"]
    row["loader"] = {"samples_per_second": 270.0, "alone": 900.0, "workers": 8}
    found = ratios(row, kinds)
    assert found == pytest.approx({"loader": 0.1, "speed": 2.0, "memory": 0.4, "speed_recompute": 2.5, "memory_recompute": 0.5})
    said = line_of("case", row | {"ratios": found}, kinds)
    assert said.endswith(
        "loader 0.100 (at most 0.05); speed 2.000 (at least 2.0); memory 0.400 (at most 0.5); "
        "speed_recompute 2.500 (at least 2.0); memory_recompute 0.500 (at most 0.5)"
    )
    row["fused"] = {"failed": "OutOfMemoryError: no"}
    assert ratios(row, kinds)["speed"] == 3.0
    assert "fused failed: OutOfMemoryError: no" in line_of("case", row | {"ratios": {}}, kinds)
    row["sharded"] = row["sharded_recompute"] = row["fused"]
    assert ratios(row, kinds).keys() == {"loader"}


def test_curves_are_held_to_the_noise_of_seeds() -> None:
    ours = [[2.0] * 20, [1.0] * 20]
    near = {str(seed): {"jagged": of, "fused": [value + 0.5 for value in of]} for seed, of in enumerate(ours)}
    found = distances(near, "fused")
    assert found["met"]
    assert (found["distance"], found["noise"]) == pytest.approx((0.5, 0.5**0.5))
    far = {seed: {**of, "fused": [value - 0.8 for value in of["jagged"]]} for seed, of in near.items()}
    assert not distances(far, "fused")["met"]


def test_what_fails_has_its_reason_and_the_rest_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one way that does not run at all, and one that has no memory for a step."""
    steps = Rival.steps

    def without_memory(self: Rival, batches: Any) -> Generator[Tensor]:
        if self.kind == "unfused":
            raise torch.OutOfMemoryError("no memory")
        return steps(self, batches)

    monkeypatch.setattr(Rival, "steps", without_memory)
    monkeypatch.setattr(ranking_step, "kinds_of", lambda device, missing: ["fused", "sharded", "unfused"])
    kept: list[int] = []
    results: dict[str, Any] = {"agreement": {}, "steps": {}, "losses": {}}
    chosen = cases(TINY, ["uniform ids even lengths 32", "uniform ids even lengths losses"])
    run(chosen, TINY, CPU, results, keep=lambda: kept.append(len(results["steps"]) + len(results["losses"])))
    assert kept == [1, 2]
    assert results["without_kernels"] is None
    (agreement,) = results["agreement"].values()
    # TorchRec's fused collection of sequences refuses a CPU.
    assert agreement["fused"]["failed"].startswith("AssertionError")
    assert max(agreement["sharded"], agreement["unfused"]) < 1e-5
    (row,) = results["steps"].values()
    assert row["unfused"] == {"failed": "OutOfMemoryError: no memory"}
    assert row["ratios"].keys() == {"speed", "loader"}
    assert row["jagged"]["samples_per_second"]["median"] > 0
    (curve,) = results["losses"].values()
    assert curve["beside"] == "sharded"
    assert curve["met"]
    assert curve["distance"] < 1e-4


def test_tables_without_fused_updates_where_nothing_else_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranking_step, "kinds_of", lambda device, missing: ["fused"])
    results: dict[str, Any] = {"agreement": {}, "steps": {}, "losses": {}}
    run(cases(TINY, ["zipf ids even lengths 64"]), TINY, CPU, results)
    (agreement,), (row,) = results["agreement"].values(), results["steps"].values()
    assert agreement["fused"]["failed"]
    assert row["unfused"]["samples_per_second"]["median"] > 0
    assert "fused" not in row


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_is_measured_within_an_epoch(workers: int, part: Part) -> None:
    """Each step has a whole batch of requests of the table, as many as are counted."""
    taken: list[int] = []

    class Counting:
        def steps(self, batches: Any) -> Generator[int]:
            for batch in batches:
                taken.append(len(batch))
                yield taken[-1]

    size = TINY._replace(workers=workers, loaded=1000)
    found = ranking_step.loaded(Counting(), part, 64, size, lock=False)  # type: ignore[arg-type]
    assert taken == [64] * (1 + 16)
    assert found["workers"] == workers
    assert min(found["samples_per_second"], found["alone"]) > 0


def test_steps_are_timed_in_rounds_of_one_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    losses = itertools.chain(torch.zeros(11), [torch.tensor(torch.nan)])

    class Counting:
        def steps(self, batches: Any) -> Generator[Tensor]:
            taken.append("epoch")
            for batch in batches:
                taken.append(batch)
                yield next(losses)

    monkeypatch.setattr(ranking_step, "seconds_of", lambda work: (taken.append("round") or 0.5, work()))
    size = TINY._replace(warm=2, steps=2, rounds=2)
    found = ranking_step.timed(Counting(), ["aaa", "bbb", "ccc"], size, CPU)  # type: ignore[arg-type]
    assert taken == ["epoch", "aaa", "bbb", "ccc", "round", "aaa", "bbb", "round", "ccc", "aaa"]
    assert found == {"samples_per_second": {"median": 12.0, "min": 12.0, "max": 12.0}}
    with pytest.raises(ArithmeticError, match="not finite"):
        ranking_step.timed(Counting(), ["aaa"], size._replace(rounds=1, steps=3), CPU)  # type: ignore[arg-type]


def test_a_wrong_side_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = padded_ranking.PaddedTarget.forward
    monkeypatch.setattr(
        padded_ranking.PaddedTarget, "forward", lambda self, q, x, filled: forward(self, q, x, torch.ones_like(filled))
    )
    results: dict[str, Any] = {"agreement": {}, "steps": {}, "losses": {}}
    with pytest.raises(ArithmeticError, match="sharded: logits differ"):
        run(cases(TINY, ["zipf ids skewed lengths 32"]), TINY, CPU, results)
    assert results["steps"] == {}


def test_a_trial_on_a_cpu_saves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    monkeypatch.setattr(
        sys, "argv", ["ranking_step", "--device", "cpu", "--only", "uniform ids even lengths 32", "--workers", "1"]
    )
    monkeypatch.setattr("benchmarks.common.ROOT", tmp_path)
    ranking_step.main()
    said = capsys.readouterr().out
    assert "beside sharded, unfused" in said
    assert "uniform ids, even lengths, 32 requests" in said
    assert list(tmp_path.iterdir()) == []
