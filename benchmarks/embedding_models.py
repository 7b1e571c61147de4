"""Our collection of embedding bags and TorchRec's under the multilayer perceptron of RecFlex's models: 1,024, 256 and 128 wide.

All get the same tables, perceptron, ids and targets, and SGD, which the fused ones run in their backward pass. Products use TF32.
`forward` and `step` are eager calls by the wall clock, on a KeyedJaggedTensor that is new in every call, as a loader hands it on.
`forward_gpu` and `step_gpu` are the GPU's time alone, by replays of a graph, on a KeyedJaggedTensor that has cached all it may be
asked for. `host` is the time after which an eager call of the collection returns.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.common import seconds_of, spread
from benchmarks.cross_entropy import relative
from benchmarks.embedding_cases import RATE, Workload, check_output
from jagged.modules import ScheduledEmbeddingBagCollection

LAYERS = (1024, 256, 128)
# What differs after a forward pass, and in the loss after three steps; products in TF32 round to 11 bits.
AGREEMENT = {"output": 1e-3, "loss": 1e-2}
STEPS = 3
# By the wall clock: seconds that a way is repeated for, and calls at least and at most.
SECONDS, LEAST, MOST = 0.5, 3, 50


class Features:
    """The batch of a workload as a KeyedJaggedTensor."""

    def __init__(self, w: Workload) -> None:
        self.keys = [f"feature_{place}" for place in range(w.layout.num_features)]
        self.ids, self.offsets = w.batches[0]
        self.lengths = self.offsets.diff()
        self.warm = self.new()

    def new(self) -> KeyedJaggedTensor:
        """One that has cached nothing."""
        return KeyedJaggedTensor(self.keys, self.ids, lengths=self.lengths, offsets=self.offsets)


def configs(w: Workload) -> list[EmbeddingBagConfig]:
    """A table for each feature."""
    shapes = zip(w.layout.rows, w.layout.widths, strict=True)
    return [
        EmbeddingBagConfig(name=f"table_{i}", num_embeddings=rows, embedding_dim=width, feature_names=[f"feature_{i}"])
        for i, (rows, width) in enumerate(shapes)
    ]


def ours(w: Workload) -> nn.Module:
    """Our collection, updated by its backward pass."""
    return ScheduledEmbeddingBagCollection(
        configs(w), device=w.device, optimizer="sgd", optimizer_options={"learning_rate": RATE}
    )


def torchrec_fused(w: Workload) -> nn.Module:
    """TorchRec's on FBGEMM's kernels, updated by its backward pass."""
    # Its import needs FBGEMM.
    from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

    return FusedEmbeddingBagCollection(configs(w), torch.optim.SGD, {"lr": RATE}, device=w.device)


def torchrec(w: Workload) -> nn.Module:
    """TorchRec's of an embedding bag of PyTorch for each table; its gradients are dense."""
    return EmbeddingBagCollection(configs(w), device=w.device)


COLLECTIONS: dict[str, Callable[[Workload], nn.Module]] = {
    "jagged": ours,
    "torchrec_fused": torchrec_fused,
    "torchrec": torchrec,
}


class Model:
    """A collection with the workload's tables, and a perceptron on its output."""

    def __init__(self, w: Workload, make: Callable[[Workload], nn.Module]) -> None:
        self.features = Features(w)
        self.bags = make(w)
        with torch.no_grad():
            for place, view in enumerate(w.layout.views(w.weights)):
                self.bags.embedding_bags[f"table_{place}"].weight.copy_(view)
        torch.manual_seed(0)
        widths = (w.layout.width, *LAYERS)
        layers = [nn.Linear(a, b, device=w.device) for a, b in itertools.pairwise(widths)]
        self.mlp = nn.Sequential(*(module for layer in layers for module in (layer, nn.ReLU())))[:-1]
        self.target = torch.randn(w.sizes[0], LAYERS[-1], device=w.device)
        updated = list(self.mlp.parameters())
        if isinstance(self.bags, EmbeddingBagCollection):
            updated += list(self.bags.parameters())
        self.optimizer = torch.optim.SGD(updated, lr=RATE)

    def pooled(self, features: KeyedJaggedTensor) -> Tensor:
        """The collection's output."""
        values: Tensor = self.bags(features).values()
        return values

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """As a server would call it."""
        with torch.no_grad():
            output: Tensor = self.mlp(self.pooled(features))
            return output

    def step(self, features: KeyedJaggedTensor) -> Tensor:
        """Take a step; the loss before it."""
        loss = F.mse_loss(self.mlp(self.pooled(features)), self.target)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def measure_model(
    w: Workload,
    make: Callable[[Workload], nn.Module],
    ways: tuple[str, ...],
    expected: dict[str, Tensor],
    time_it: Callable[[Callable[[], Callable[[], Any]]], dict[str, Any]],
) -> dict[str, Any]:
    """Check a collection, and time the ways; the first one leaves its results in `expected`.

    Raises:
        ArithmeticError: an output or a loss that is wrong.
    """
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        model = Model(w, make)
        figures: dict[str, Any] = {"errors": {"output": check_output(w, model.pooled(model.features.new()).detach())}}
        if "host" in ways:
            figures["host"] = host_us(lambda: model.pooled(model.features.warm), w)
        if set(ways) - {"host"}:
            found = {"output": model.forward(model.features.new())}
            losses = [model.step(model.features.new()) for _ in range(STEPS + 1)]
            found["loss"] = losses[-1]
            figures["difference"] = _difference(found, expected)
        calls = {"forward": model.forward, "step": model.step}
        for way in ways:
            name, _, by = way.partition("_")
            if name in calls:
                figures[way] = _timed(calls[name], model.features, time_it if by == "gpu" else None)
        return figures
    finally:
        torch.set_float32_matmul_precision(precision)


def _timed(
    call: Callable[[KeyedJaggedTensor], Any],
    features: Features,
    time_it: Callable[[Callable[[], Callable[[], Any]]], dict[str, Any]] | None,
) -> dict[str, Any]:
    if time_it is None:
        return wall_us(lambda: call(features.new()))
    return time_it(lambda: functools.partial(call, features.warm))


def _difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    apart = {}
    for name, of in found.items():
        apart[name] = relative(of, expected.setdefault(name, of))
        if not apart[name] <= AGREEMENT[name]:
            raise ArithmeticError(f"wrong: {name} differs from ours by {apart[name]:.3g} of its norm, allowed {AGREEMENT[name]}")
    return apart


def wall_us(call: Callable[[], Any]) -> dict[str, float]:
    """Microseconds a call by the wall clock, the device's work included, of calls that follow upon each other."""
    call()
    each = max(1, min(10, round(0.02 / seconds_of(call)[0])))

    def several() -> None:
        for _ in range(each):
            call()

    return spread(_repeated(lambda: seconds_of(several)[0] / each))


def host_us(call: Callable[[], Any], w: Workload) -> dict[str, float]:
    """Microseconds until a call returns, of a device that has nothing else to do."""
    on_gpu = w.device.type == "cuda"

    def once() -> float:
        if on_gpu:
            torch.cuda.synchronize()
        begun = time.perf_counter()
        call()
        return time.perf_counter() - begun

    for _ in range(LEAST):
        once()
    return spread(_repeated(once))


def _repeated(once: Callable[[], float]) -> list[float]:
    times: list[float] = []
    begun = time.perf_counter()
    while len(times) < LEAST or (len(times) < MOST and time.perf_counter() - begun < SECONDS):
        times.append(once() * 1e6)
    return times
