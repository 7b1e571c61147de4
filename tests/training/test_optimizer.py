"""Rates, optimizers of tables and accumulation against plain torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from jagged.config import TrainerConfig
from jagged.training.engine import Engine
from jagged.training.optimizer import Optimizer, table_names
from jagged.training.processes import Processes, process_group
from tests.training.lines import Line, batch, joined

DIM = 3


def config(**options: Any) -> TrainerConfig:
    return TrainerConfig(**{"gradient_clip_norm": None, "device": "cpu", "learning_rate": 0.1, **options})


def parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"table": (5, DIM), "weight": (DIM, DIM), "bias": (DIM,), "idle": (2, 2)}
    return {name: nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for name, shape in shapes.items()}


def give_gradients(named: dict[str, nn.Parameter], step: int) -> None:
    """The same for any copy of the parameters; `idle` never gets one."""
    generator = torch.Generator().manual_seed(100 + step)
    for name, parameter in named.items():
        if name != "idle":
            parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)


def rate(schedule: str, step: int, warmup: int, total: int, peak: float) -> float:
    """The documented formula."""
    if step < warmup:
        return peak * (step + 1) / warmup
    passed = (step - warmup) / (total - warmup)
    return peak * {"constant": 1.0, "linear": 1 - passed, "cosine": (1 + math.cos(math.pi * passed)) / 2}[schedule]


@pytest.mark.parametrize("warmup", [0, 1, 4])
@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_rates_at_every_step(schedule: str, warmup: int) -> None:
    named, total = parameters(), 11
    options = {"schedule": schedule, "warmup_steps": warmup, "table_optimizer": "sgd", "table_learning_rate": 0.7}
    optimizer = Optimizer(named, config(**options), total_steps=total, tables={"table"})
    for step in range(total):
        assert optimizer.learning_rate == pytest.approx(rate(schedule, step, warmup, total, 0.1), rel=1e-12)
        before = named["table"].detach().clone()
        give_gradients(named, step)
        gradient = named["table"].grad
        optimizer.step()
        torch.testing.assert_close(named["table"].detach(), before - rate(schedule, step, warmup, total, 0.7) * gradient)
    assert optimizer.learning_rate == pytest.approx(0.1 if schedule == "constant" else 0.0, abs=1e-12)
    # More steps than were foreseen change nothing any more.
    optimizer.step()
    assert optimizer.learning_rate == pytest.approx(0.1 if schedule == "constant" else 0.0, abs=1e-12)


def twin(kind: str, named: dict[str, nn.Parameter], table_rate: float | None) -> list[torch.optim.Optimizer]:
    """What the documentation says, in torch's own optimizers."""
    apart = kind != "adamw" or table_rate is not None
    decayed = [named["weight"], named["idle"], *([] if apart else [named["table"]])]
    groups = [{"params": decayed, "weight_decay": 0.2}, {"params": [named["bias"]], "weight_decay": 0.0}]
    made: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=0.1)]
    if apart:
        table, lr = [named["table"]], table_rate or 0.1
        made.append(
            {
                "adamw": lambda: torch.optim.AdamW(table, lr=lr, weight_decay=0.2),
                "adagrad": lambda: torch.optim.Adagrad(table, lr=lr),
                "rowwise-adagrad": lambda: RowWiseAdagrad(table, lr=lr),
                "sgd": lambda: torch.optim.SGD(table, lr=lr),
            }[kind]()
        )
    return made


KINDS = [(kind, own) for kind in ("adamw", "adagrad", "rowwise-adagrad", "sgd") for own in (None, 0.5)]


@pytest.mark.parametrize(("kind", "own"), KINDS)
def test_tables_have_an_optimizer_of_their_own(kind: str, own: float | None) -> None:
    named, other = parameters(), parameters()
    options = {"table_optimizer": kind, "table_learning_rate": own, "weight_decay": 0.2, "gradient_clip_norm": 1.5}
    optimizer, plain = Optimizer(named, config(**options), tables={"table"}), twin(kind, other, own)
    for step in range(5):
        give_gradients(named, step)
        give_gradients(other, step)
        norm = nn.utils.clip_grad_norm_(list(other.values()), 1.5)
        optimizer.step()
        for one in plain:
            one.step()
        torch.testing.assert_close(optimizer.norms[step], norm)
        for name in named:
            torch.testing.assert_close(named[name].detach(), other[name].detach(), msg=f"{name} at step {step}")
    assert torch.equal(named["idle"], parameters()["idle"])


@pytest.mark.parametrize("own_rate", [None, 0.5])
@pytest.mark.parametrize("decay", [None, 0.0, 0.9])
def test_only_tables_of_many_rows_have_their_own_decay(decay: float | None, own_rate: float | None) -> None:
    def made() -> dict[str, nn.Parameter]:
        shapes = {"small": (100, 2), "large": (101, 2), "split": (60, 2), "weight": (200, 3), "bias": (200,)}
        generator = torch.Generator().manual_seed(0)
        return {
            name: nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for name, shape in shapes.items()
        }

    named, other = made(), made()
    options = {"weight_decay": 0.2, "table_weight_decay": decay, "table_learning_rate": own_rate}
    # Of the split table this process has 60 of 119 rows.
    split: Any = {"split": SimpleNamespace(num_rows=119)}
    optimizer = Optimizer(named, config(**options), tables={"small", "large", "split"}, split=split)
    of_table, own = own_rate or 0.1, 0.2 if decay is None else decay
    decays = {"small": 0.2, "large": own, "split": own, "weight": 0.2, "bias": 0.0}
    rates = dict.fromkeys(("small", "large", "split"), of_table) | dict.fromkeys(("weight", "bias"), 0.1)
    plain = torch.optim.AdamW([{"params": [other[name]], "weight_decay": decays[name], "lr": rates[name]} for name in other])
    for step in range(3):
        give_gradients(named, step)
        give_gradients(other, step)
        optimizer.step()
        plain.step()
    for name in named:
        torch.testing.assert_close(named[name], other[name], msg=name)


def test_rowwise_adagrad_against_its_formula() -> None:
    named = parameters()
    optimizer = Optimizer(named, config(table_optimizer="rowwise-adagrad", table_learning_rate=0.3), tables={"table"})
    table, squares = named["table"].detach().clone(), torch.zeros(5, 1, dtype=torch.float64)
    for step in range(4):
        give_gradients(named, step)
        gradient = named["table"].grad
        assert gradient is not None
        squares += gradient.square().mean(1, keepdim=True)
        table -= 0.3 * gradient / (squares.sqrt() + 1e-10)
        optimizer.step()
        torch.testing.assert_close(named["table"].detach(), table)


@pytest.mark.parametrize(("kind", "own"), KINDS)
@pytest.mark.parametrize("taken", [0, 3])
def test_the_state_comes_back(kind: str, own: float | None, taken: int) -> None:
    options = {"table_optimizer": kind, "table_learning_rate": own, "schedule": "cosine", "warmup_steps": 2}

    def made(named: dict[str, nn.Parameter]) -> Optimizer:
        return Optimizer(named, config(**options), total_steps=9, tables={"table"})

    named = parameters()
    optimizer = made(named)
    for step in range(taken):
        give_gradients(named, step)
        optimizer.step()
    state = {name: value.clone() for name, value in optimizer.state_tensors().items()}
    again = {name: nn.Parameter(value.detach().clone()) for name, value in named.items()}
    resumed = made(again)
    resumed.load_state_tensors(state, taken)
    assert resumed.steps == taken
    assert resumed.learning_rate == optimizer.learning_rate
    for step in range(taken, taken + 3):
        give_gradients(named, step)
        give_gradients(again, step)
        optimizer.step()
        resumed.step()
    assert all(torch.equal(named[name], again[name]) for name in named)
    after, other = optimizer.state_tensors(), resumed.state_tensors()
    assert after.keys() == other.keys()
    assert all(torch.equal(after[name], other[name]) for name in after)
    # What was read stays as it was.
    assert all(torch.equal(value, state[name]) for name, value in state.items())


def test_a_state_of_another_shape_is_refused() -> None:
    named = parameters()
    optimizer = Optimizer(named, config(table_optimizer="rowwise-adagrad"), tables={"table"})
    state = optimizer.state_tensors() | {"optimizer.sum.table": torch.zeros(5, DIM)}
    with pytest.raises(ValueError, match=r"^optimizer") as error:
        optimizer.load_state_tensors(state, 1)
    assert str(error.value) == "optimizer.sum.table: shape (5, 3), expected (5, 1)"


def test_which_parameters_are_tables() -> None:
    from tests.training.clicks import Clicks

    task = Clicks()
    task.extra = nn.ModuleList([nn.Embedding(3, 2), nn.EmbeddingBag(3, 2), nn.Linear(3, 2)])
    assert table_names(task) == {
        "tables.embedding_bags.user.weight", "tables.embedding_bags.item.weight", "extra.0.weight", "extra.1.weight",
    }  # fmt: skip
    assert table_names(nn.Embedding(3, 2)) == {"weight"}


@pytest.fixture
def processes() -> Iterator[Processes]:
    with process_group(torch.device("cpu")) as made:
        yield made


@pytest.mark.parametrize(("weights", "masks"), [(False, False), (True, False), (False, True), (True, True)])
def test_accumulated_batches_are_one_large_batch(processes: Processes, weights: bool, masks: bool) -> None:
    """Steps of 3, 3 and, at the epoch's end, 1 batch; one batch has no row that counts."""
    sizes = [1, 5, 2, 7, 3, 4, 6]
    batches = [batch(size, i, weights=weights, masks=masks, empty=i == 4) for i, size in enumerate(sizes)]
    options: dict[str, Any] = {"learning_rate": 0.05, "weight_decay": 0.1, "gradient_clip_norm": 0.5}
    task = Line()
    engine = Engine(task, config(accumulate=3, **options), "32-true", processes)
    updated = [trained.updated for trained in engine.steps(iter(batches), len(batches))]
    assert updated == [False, False, True, False, False, True, True]
    assert engine.optimizer.steps == 3
    plain = Line()
    optimizer = torch.optim.AdamW(
        [{"params": [plain.line.weight], "weight_decay": 0.1}, {"params": [plain.line.bias], "weight_decay": 0.0}], lr=0.05
    )
    for first in (0, 3, 6):
        optimizer.zero_grad()
        plain(joined(batches[first : first + 3])).loss.backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        torch.testing.assert_close(engine.optimizer.norms[first // 3], norm)
        optimizer.step()
    for name, value in plain.named_parameters():
        torch.testing.assert_close(task.get_parameter(name).detach(), value.detach(), rtol=1e-7, atol=1e-9)


def test_every_batch_is_a_step_without_accumulation(processes: Processes) -> None:
    task, plain = Line(), Line()
    batches = [batch(size, i, weights=True, masks=True) for i, size in enumerate([3, 5, 4])]
    engine = Engine(task, config(weight_decay=0.0), "32-true", processes)
    assert all(trained.updated for trained in engine.steps(iter(batches)))
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1, weight_decay=0.0)
    for one in batches:
        optimizer.zero_grad()
        plain(one).loss.backward()
        optimizer.step()
    for name, value in plain.named_parameters():
        torch.testing.assert_close(task.get_parameter(name).detach(), value.detach(), rtol=1e-9, atol=1e-12)
