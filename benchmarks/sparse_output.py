"""Output layers of groups of labels beside dense layers of equal FLOPs.

    python -m benchmarks.sparse_output                       # a minute on one GPU
    python -m benchmarks.sparse_output --sizes 0.67          # sizes whose name has this; others in the file stay

`layers`: logits, the gradient of weights and the gradient of features of `group_sparse_linear`, bfloat16, each alone, beside a
dense layer that has as many inputs as a group reads columns, and so as many weights and FLOPs. One group in seventeen is short,
as one is for each coarse cluster when labels are grouped; columns of a group are random. The dense layer's labels are rounded up
to a multiple of 64, as odd rows of logits would make it slower. Useful bytes are those of weights and logits, once each.

`loss`: binary cross-entropy of all labels by `group_sparse_bce`, forward, and with all gradients; five positives a row.

Each of ours is checked against float64 on some groups (the gradient of features: all of a layer with fewer labels) before it is
timed. A time is the median of bursts of about ten milliseconds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.common import environment, other_parts, replay_us, save
from jagged.ops import group_sparse_bce, group_sparse_linear, trust_values

PASSES = ("forward", "weight", "features")
# A result may err by as much, relative to the largest number of its kind.
TOLERANCE = 2e-2


class Size(NamedTuple):
    """Labels, samples, features, labels of a group and columns that it reads; asked times of the three passes in milliseconds."""

    labels: int
    batch: int
    features: int
    group: int
    width: int
    asked: tuple[float, ...] = ()

    def __str__(self) -> str:
        return f"{self.labels / 1e6:g} M, {self.batch}, {self.features}, {self.group}, {self.width}"


SIZES = (
    Size(8_620_000, 64, 768, 32, 32, (0.66, 0.55, 0.75)),
    Size(2_810_000, 64, 768, 32, 32, (0.215, 0.18, 0.25)),
    Size(8_620_000, 128, 384, 16, 64, (1.5, 1.2, 2.2)),
    Size(670_000, 128, 384, 16, 64, (0.12, 0.11, 0.19)),
)


class Layer(NamedTuple):
    """What a layer and its gradients take; `grad` has the strides of the logits."""

    features: Tensor
    weight: Tensor
    supports: Tensor
    group_offsets: Tensor
    grad: Tensor


def layer_of(size: Size, seed: int = 0, device: str = "cuda") -> Layer:
    """Random numbers, and groups of which one in seventeen is short."""
    generator = torch.Generator(device).manual_seed(seed)
    groups = max(1, size.labels // size.group)
    sizes = torch.full((groups,), size.group, device=device)
    short = torch.rand(groups, generator=generator, device=device) < 1 / 17
    sizes = torch.where(short, torch.randint(1, size.group + 1, (groups,), generator=generator, device=device), sizes)
    offsets = torch.nn.functional.pad(sizes.cumsum(0), (1, 0))
    labels, pieces = int(offsets[-1]), []
    for first in range(0, groups, 20_000):
        drawn = torch.rand(min(20_000, groups - first), size.features, generator=generator, device=device)
        pieces.append(drawn.topk(size.width).indices.sort(1).values.to(torch.int32))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    weight = normal(labels, size.width).mul_(size.width**-0.5)
    return Layer(normal(size.batch, size.features), weight, torch.cat(pieces), offsets, normal(labels, size.batch).t())


def passes(layer: Layer) -> dict[str, Callable[[], Callable[[], Any]]]:
    """What each pass prepares, which returns what is timed."""

    def forward() -> Callable[[], Any]:
        return lambda: group_sparse_linear(*layer[:4])

    def backward(name: str) -> Callable[[], Callable[[], Any]]:
        def prepare() -> Callable[[], Any]:
            leaf = getattr(layer, name).detach().requires_grad_()
            logits = group_sparse_linear(*layer._replace(**{name: leaf})[:4])
            return lambda: torch.autograd.grad(logits, leaf, layer.grad, retain_graph=True)

        return prepare

    return {"forward": forward, "weight": backward("weight"), "features": backward("features")}


def dense_passes(size: Size, device: str = "cuda") -> dict[str, Callable[[], Callable[[], Any]]]:
    """The same of a dense layer of `size.width` inputs."""
    labels = -(-size.labels // 64) * 64
    of = {"device": device, "dtype": torch.bfloat16}
    features, weight = torch.randn(size.batch, size.width, **of), torch.randn(labels, size.width, **of)
    grad = torch.randn(size.batch, labels, **of)
    return {
        "forward": lambda: lambda: features @ weight.t(),
        "weight": lambda: lambda: grad.t() @ features,
        "features": lambda: lambda: grad @ weight,
    }


def loss_passes(size: Size, layer: Layer) -> dict[str, Callable[[], Callable[[], Any]]]:
    """The loss, and the loss with the gradients of features, weight and bias."""
    generator = torch.Generator("cuda").manual_seed(1)
    positives = torch.randint(layer.weight.shape[0], (5 * size.batch,), generator=generator, device="cuda")
    offsets = torch.arange(0, 5 * size.batch + 1, 5, device="cuda")
    bias = torch.full_like(layer.weight[:, 0], -14.0)

    def both() -> Callable[[], Any]:
        leaves = [tensor.detach().requires_grad_() for tensor in (layer.features, layer.weight, bias)]

        def step() -> Any:
            loss = group_sparse_bce(*leaves[:2], *layer[2:4], positives, offsets, leaves[2])
            return torch.autograd.grad(loss, leaves)

        return step

    return {"forward": lambda: lambda: group_sparse_bce(*layer[:4], positives, offsets, bias), "both": both}


def errors_of(size: Size, layer: Layer) -> dict[str, float]:
    """The largest error of each pass against float64, over the largest number, on ten groups and on a layer of 1,000."""

    def relative(ours: Tensor, exact: Tensor) -> float:
        return float((ours.double() - exact).abs().max() / exact.abs().max())

    features = layer.features.double()
    logits = group_sparse_linear(*layer[:4])
    weight = layer.weight.detach().requires_grad_()
    (of_weight,) = torch.autograd.grad(group_sparse_linear(layer.features, weight, *layer[2:4]), weight, layer.grad)
    errors = {"forward": 0.0, "weight": 0.0}
    for group in torch.linspace(0, layer.supports.shape[0] - 1, 10).long().tolist():
        labels = slice(*layer.group_offsets[group : group + 2].tolist())
        gathered = features[:, layer.supports[group].long()]
        errors["forward"] = max(errors["forward"], relative(logits[:, labels], gathered @ layer.weight[labels].double().t()))
        exact = layer.grad[:, labels].double().t() @ gathered
        errors["weight"] = max(errors["weight"], relative(of_weight[labels], exact))
    few = layer_of(size._replace(labels=1000 * size.group))
    dense = torch.zeros(few.weight.shape[0], size.features, dtype=torch.float64, device=few.weight.device)
    group_of = torch.repeat_interleave(few.group_offsets.diff())
    dense.scatter_(1, few.supports.long()[group_of], few.weight.double())
    leaf = few.features.detach().requires_grad_()
    (of_features,) = torch.autograd.grad(group_sparse_linear(leaf, *few[1:4]), leaf, few.grad)
    return {**errors, "features": relative(of_features, few.grad.double() @ dense)}


def measure(size: Size) -> dict[str, Any]:
    """Times of the three passes of ours and of the dense layer, errors, and the bytes that each has to move."""
    layer = layer_of(size)
    found: dict[str, Any] = {"labels": layer.weight.shape[0], "groups": layer.supports.shape[0]}
    found["errors"] = errors_of(size, layer)
    wrong = {name: error for name, error in found["errors"].items() if not error < TOLERANCE}
    if wrong:
        raise SystemExit(f"{size}: errors {wrong}, expected below {TOLERANCE}")
    found["gigabytes"] = (layer.weight.numel() + layer.grad.numel()) * 2 / 1e9
    with trust_values():
        found["jagged"] = {name: replay_us(prepare=prepare, sustained=0.5) for name, prepare in passes(layer).items()}
        found["loss"] = {name: replay_us(prepare=prepare, sustained=0.5) for name, prepare in loss_passes(size, layer).items()}
    del layer
    found["dense"] = {name: replay_us(prepare=prepare, sustained=0.5) for name, prepare in dense_passes(size).items()}
    found["asked_ms"] = dict(zip(PASSES, size.asked, strict=False))
    return found


def line_of(size: Size, found: dict[str, Any]) -> str:
    """One line of the log."""
    parts = []
    for name in PASSES:
        ours, dense = (found[who][name]["median"] / 1e3 for who in ("jagged", "dense"))
        speed = found["gigabytes"] / ours
        parts.append(f"{name} {ours:.3f} (asked {found['asked_ms'].get(name)}, dense {dense:.3f}, {speed:.2f} TB/s)")
    losses = (f"{name} {found['loss'][name]['median'] / 1e3:.3f}" for name in ("forward", "both"))
    return f"{size}: {'; '.join(parts)}; loss {', '.join(losses)} ms"


def main() -> None:
    """Measure and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="*", default=[""], help="sizes whose name has one of these words")
    chosen = parser.parse_args().sizes
    facts = environment()
    layers = other_parts("sparse_output", facts).get("layers", {})
    for size in SIZES:
        if any(word in str(size) for word in chosen):
            layers[str(size)] = measure(size)
            print(line_of(size, layers[str(size)]), flush=True)
            torch.cuda.empty_cache()
    print(save("sparse_output", {"environment": facts, "layers": layers}))


if __name__ == "__main__":
    main()
