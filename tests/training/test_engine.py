"""The engine and the optimizer: precision, weight decay, warm-up, clipping, state."""

from __future__ import annotations

import gc
import os
import signal
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from jagged.config import TrainerConfig
from jagged.data import BatchLoader, SequenceBatch, split_leave_one_out
from jagged.models import NextItemTask, SASRec, Task, TaskOutput, TaskScores
from jagged.modules import ScheduledEmbeddingBagCollection
from jagged.training import CheckpointError, TrainingError
from jagged.training.engine import Engine
from jagged.training.optimizer import Optimizer
from jagged.training.processes import Processes, process_group
from tests.training.support import tiny_dataset


@pytest.fixture
def processes() -> Iterator[Processes]:
    with process_group(torch.device("cpu")) as found:
        yield found


def sasrec(**options: Any) -> SASRec:
    torch.manual_seed(0)
    return SASRec(96, **{"embedding_dim": 8, "num_layers": 1, "max_seq_len": 12, **options})


def loader() -> BatchLoader:
    return BatchLoader(split_leave_one_out(tiny_dataset()).train, batch_size=8, max_seq_len=12, shuffle=True, seed=0)


def parameters() -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    return {
        "table": nn.Parameter(torch.randn(5, 3)),
        "norm": nn.Parameter(torch.randn(3)),
        "scale": nn.Parameter(torch.randn(())),
    }


@pytest.mark.parametrize("clip", [None, 0.5, 1e6])
def test_optimizer_is_adamw_with_warm_up_and_clipping(clip: float | None) -> None:
    ours, theirs = parameters(), parameters()
    config = TrainerConfig(learning_rate=0.1, weight_decay=0.3, warmup_steps=4, gradient_clip_norm=clip)
    optimizer = Optimizer(ours, config)
    groups = [
        {"params": [theirs["table"]], "weight_decay": 0.3},
        {"params": [theirs["norm"], theirs["scale"]], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=0.1)
    rates = []
    for step in range(7):
        gradients = {name: torch.randn_like(value) for name, value in theirs.items()}
        optimizer.zero_grad()
        assert all(value.grad is None for value in ours.values())
        for name in ours:
            ours[name].grad, theirs[name].grad = gradients[name].clone(), gradients[name].clone()
        for group in reference.param_groups:
            group["lr"] = 0.1 * min(1.0, (step + 1) / 4)
        rates.append(optimizer.learning_rate)
        if clip is not None:
            expected = torch.nn.utils.clip_grad_norm_(list(theirs.values()), clip)
        optimizer.step()
        reference.step()
        if clip is None:
            assert optimizer.norms == []
        else:
            torch.testing.assert_close(optimizer.norms[-1], expected)
    assert rates == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.1, 0.1])
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name])


def test_without_warm_up_the_first_step_has_the_peak_rate() -> None:
    assert Optimizer(parameters(), TrainerConfig(learning_rate=0.1, weight_decay=0.0)).learning_rate == 0.1


def test_state_that_does_not_fit_is_refused(processes: Processes) -> None:
    engine = Engine(NextItemTask(sasrec()), TrainerConfig(), "32-true", processes)
    for _ in engine.steps(iter(loader())):
        pass
    good = {name: tensor.clone() for name, tensor in engine.state_tensors().items()}
    engine.load_state_tensors(good, 5)
    damages: dict[str, Tensor | None] = {
        "task.model.norm.weight": None,
        "task.model.norm.bias": torch.zeros(3),
        "optimizer.exp_avg.model.norm.weight": None,
        "optimizer.exp_avg_sq.model.norm.weight": torch.zeros(3),
        "random.cpu.0": torch.zeros(3, dtype=torch.uint8),
    }
    for name, value in damages.items():
        bad = dict(good)
        if value is None:
            del bad[name]
        else:
            bad[name] = value
        with pytest.raises(CheckpointError, match=r"(does|do) not fit"):
            engine.load_state_tensors(bad, 5)
    with pytest.raises(CheckpointError, match="random state does not fit"):
        engine.load_state_tensors({name: value for name, value in good.items() if not name.startswith("random")}, 5)


def test_mixed_precision_computes_in_bfloat16_and_keeps_weights_in_float32(processes: Processes) -> None:
    seen: dict[str, torch.dtype] = {}

    def losses(precision: str) -> list[float]:
        model = sasrec(dropout=0.0)
        engine = Engine(NextItemTask(model), TrainerConfig(), precision, processes)
        linear = next(module for module in model.modules() if isinstance(module, nn.Linear))
        linear.register_forward_hook(lambda module, inputs, output: seen.__setitem__(precision, output.dtype))
        found = [float(trained.loss) for trained in engine.steps(iter(loader()))]
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert {t.dtype for name, t in engine.state_tensors().items() if name.startswith("optimizer")} == {torch.float32}
        return found

    full, mixed = losses("32-true"), losses("bf16-mixed")
    assert seen == {"32-true": torch.float32, "bf16-mixed": torch.bfloat16}
    assert mixed != full
    assert mixed == pytest.approx(full, rel=0.02)


def test_every_batch_is_trained_on_once_and_counted(processes: Processes) -> None:
    model = sasrec()
    engine = Engine(NextItemTask(model), TrainerConfig(), "32-true", processes)
    batches = list(loader())
    counts = [trained.rows for trained in engine.steps(iter(batches))]
    assert counts == [batch.targets.numel() for batch in batches]
    assert engine.samples == sum(batch.features.stride() for batch in batches)
    assert engine.optimizer.steps == len(batches)


def test_no_epoch_writes_the_model_down(processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    """As TorchRec's pipelines do for their log: a third of a second for 80 small tables, and a wait for the GPU."""
    written = []
    for kind in (nn.Embedding, nn.Linear):
        monkeypatch.setattr(kind, "extra_repr", lambda module: written.append(module) or "")
    engine = Engine(NextItemTask(sasrec()), TrainerConfig(), "32-true", processes)
    assert repr(engine.task).count("Linear") == len([of for of in written if isinstance(of, nn.Linear)]) > 0
    written.clear()
    for _ in engine.steps(iter(loader())):
        pass
    assert engine.samples > 0
    assert written == []


def test_a_forked_child_leaves_the_groups_of_runs_before_to_its_parent() -> None:
    gc.disable()
    try:
        with process_group(torch.device("cpu")) as group:
            cycle: list[Any] = [group]
            cycle.append(cycle)
        del group, cycle
        child = os.fork()
        if not child:
            # It may wait for ever, too.
            signal.alarm(20)
            gc.collect()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        gc.enable()


class _Sum(Task):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, batch: SequenceBatch) -> TaskOutput:
        loss = self.linear.weight.sum() * batch.targets.sum() + self.linear.bias.sum()
        return TaskOutput(loss, {"sum": TaskScores(loss.detach()[None], batch.targets[:1])})


def test_weights_that_are_not_finite_are_seen(processes: Processes) -> None:
    task = _Sum()
    engine = Engine(task, TrainerConfig(), "32-true", processes)
    assert engine.is_finite()
    features = KeyedJaggedTensor(keys=["item_id"], values=torch.tensor([1]), lengths=torch.tensor([1]), stride=1)
    for loss, _, _ in engine.steps(iter([SequenceBatch(features, torch.tensor([3]), torch.tensor([0]))])):
        assert torch.isfinite(loss)
    with torch.no_grad():
        task.linear.bias[1] = float("-inf")
    assert not engine.is_finite()


def _fused_by_us() -> nn.Module:
    return ScheduledEmbeddingBagCollection(_tables(), optimizer="adagrad", optimizer_options={"learning_rate": 0.1})


def _fused_by_torchrec() -> nn.Module:
    tables = EmbeddingBagCollection(tables=_tables())
    with warnings.catch_warnings():
        # TorchRec's tutorials still use it.
        warnings.simplefilter("ignore", DeprecationWarning)
        apply_optimizer_in_backward(torch.optim.SGD, tables.parameters(), {"lr": 0.1})
    return tables


def _tables() -> list[EmbeddingBagConfig]:
    return [EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=5, feature_names=["f"])]


@pytest.mark.parametrize(
    ("make", "name"),
    [(_fused_by_us, "linear"), (_fused_by_torchrec, "linear.embedding_bags.t.weight")],
    ids=["ours", "TorchRec's"],
)
def test_tables_that_are_updated_in_the_backward_pass_are_refused(processes: Processes, make: Any, name: str) -> None:
    task = _Sum()
    task.linear = make()
    with pytest.raises(TrainingError) as caught:
        Engine(task, TrainerConfig(), "32-true", processes)
    assert str(caught.value) == (
        f"task: {name} is updated in the backward pass, expected tables without an optimizer of their own; "
        "choose theirs by table_optimizer"
    )
    # Without an optimizer of their own they are trained.
    task.linear = ScheduledEmbeddingBagCollection(_tables())
    Engine(task, TrainerConfig(), "32-true", processes)
