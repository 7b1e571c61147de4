"""`jagged doctor`: what is installed, whether it fits, and whether it works, found out by running it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import jagged
from jagged import versions as _versions

if TYPE_CHECKING:
    import torch

    import jagged.ops

NO_GPU = "no GPU"
_TIMEOUT_SECONDS = 300


@dataclass(frozen=True)
class Check:
    """One thing that was tried: its name, how it went, and what there is to say about it."""

    name: str
    status: Literal["ok", "failed", "not run"]
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.status}" + (f": {self.detail}" if self.detail else "")


@dataclass(frozen=True)
class DoctorReport:
    """What `doctor` found; `str` of it is what the command prints."""

    versions: dict[str, str]
    problems: list[_versions.Problem]
    checks: list[Check] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether everything fits and nothing that was tried failed."""
        return not self.problems and all(check.status != "failed" for check in self.checks)

    def __str__(self) -> str:
        rows = [("python", f"{platform.python_version()} ({sys.executable})"), ("platform", platform.platform())]
        for package, found in _versions.by_package(self.versions).items():
            if found is None:
                rows.append((package, "not installed" + (" (optional)" if package in _versions.OPTIONAL else "")))
            else:
                name, version = found
                rows.append((package, version if name == package else f"{version} ({name})"))
        lines = ["Versions", *_aligned(rows)]
        if self.checks:
            lines += ["", "Checks, each by running it"]
            lines += _aligned([(c.name, c.status + (f": {c.detail}" if c.detail else "")) for c in self.checks])
        lines.append("")
        for problem in self.problems:
            lines += [f"Problem: {problem.message}", f"  run: {problem.cure}"]
        failed = [check.name for check in self.checks if check.status == "failed"]
        if failed and not self.problems:
            lines.append(f"Problem: failed: {', '.join(failed)}; the versions fit one another, so this is worth a bug report")
        if self.ok:
            lines.append("All is well.")
        return "\n".join(lines)


def doctor(versions: Mapping[str, str] | None = None, *, run_checks: bool = True) -> DoctorReport:
    """Look at the installation: versions, whether they fit, the GPU, and a tiny run of every op family on every backend.

    The runs happen in a process of their own, so that a library that crashes is reported and not suffered.

    Args:
        versions: version by distribution to judge, by default those installed.
        run_checks: whether to run anything, or to judge the versions alone.
    """
    versions = _versions.installed() if versions is None else versions
    checks = _run(list(_CHECKS)) if run_checks else []
    return DoctorReport(dict(versions), _versions.problems(versions), checks)


def _aligned(rows: list[tuple[str, str]]) -> list[str]:
    width = max(len(name) for name, _ in rows)
    return [f"  {name:<{width}}  {value}" for name, value in rows]


def _run(names: Sequence[str], timeout: float = _TIMEOUT_SECONDS) -> list[Check]:
    """Run the named checks in another process; where one kills the process, go on with the next in a new one."""
    checks: list[Check] = []
    root = str(Path(__file__).resolve().parent.parent)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
    while len(checks) < len(names):
        command = [sys.executable, "-c", "from jagged.diagnosis import _worker; _worker()", *names[len(checks) :]]
        try:
            process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
            output, end = process.stdout, f"the process ended with status {process.returncode}: {_last_line(process.stderr)}"
        except subprocess.TimeoutExpired as error:
            partial = error.stdout or b""
            output = partial.decode() if isinstance(partial, bytes) else partial
            end = f"no answer after {timeout:.0f} s"
        checks += [Check(**json.loads(line)) for line in output.splitlines() if line.startswith('{"name"')]
        if len(checks) < len(names):
            checks.append(Check(names[len(checks)], "failed", end))
    return checks


def _worker() -> None:
    for name in sys.argv[1:]:
        try:
            detail = _CHECKS[name]()
            check = Check(name, "not run" if detail == NO_GPU else "ok", detail)
        except Exception as error:
            check = Check(name, "failed", f"{type(error).__name__}: {_last_line(str(error), first=True)}")
        print(json.dumps(vars(check)), flush=True)


def _last_line(text: str, *, first: bool = False) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no message"]
    return lines[0 if first else -1][:300]


def _check_torch() -> str:
    import torch

    torch.ones(2, 2) @ torch.ones(2, 2)
    return f"{torch.get_num_threads()} threads"


def _check_gpu() -> str:
    import torch

    if not torch.cuda.is_available():
        return NO_GPU
    torch.ones(2, 2, device="cuda") @ torch.ones(2, 2, device="cuda")
    names = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"sm_{properties.major}{properties.minor}"
        names.append(f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, {capability}")
    return f"{'; '.join(names)}; CUDA {torch.version.cuda}"


def _on(device: str, op: Callable[[torch.device, str], None]) -> Callable[[], str]:
    """The check that runs `op` on `device` with the backend that serves it."""

    def check() -> str:
        # Here and not above: what is judged may fail, or crash, when it is imported. All `op` find it among the module's names.
        global torch
        import torch

        if device == "cuda" and not torch.cuda.is_available():
            return NO_GPU
        op(torch.device(device), "triton" if device == "cuda" else "torch")
        if device == "cuda":
            torch.cuda.synchronize()
        return ""

    return check


def _conversion(device: torch.device, backend: str) -> None:
    values = torch.arange(6.0, device=device).view(3, 2).requires_grad_()
    offsets = torch.tensor([0, 1, 3], device=device)
    dense = jagged.ops.jagged_to_dense(values, offsets, 2, backend=backend)
    expected = torch.tensor([[[0.0, 1.0], [0.0, 0.0]], [[2.0, 3.0], [4.0, 5.0]]], device=device)
    torch.testing.assert_close(dense, expected)
    back = jagged.ops.dense_to_jagged(dense, offsets, 3, backend=backend)
    torch.testing.assert_close(back, values)
    (gradient,) = torch.autograd.grad(back.sum(), values)
    torch.testing.assert_close(gradient, torch.ones_like(values))


def _attention(device: torch.device, backend: str) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(5, 2, 16, generator=generator).to(device).requires_grad_() for _ in range(3))
    offsets = torch.tensor([0, 2, 5], device=device)
    ours = jagged.ops.jagged_attention(q, k, v, offsets, causal=True, backend=backend)
    parts = []
    for start, end in ((0, 2), (2, 5)):
        query, key, value = (x[start:end].transpose(0, 1) for x in (q, k, v))
        attended = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        parts.append(attended.transpose(0, 1))
    _same(ours, torch.cat(parts), (q, k, v))


def _cross_entropy(device: torch.device, backend: str) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 16, generator=generator).to(device).requires_grad_() for n in (4, 7))
    target = torch.tensor([0, 6, 3, 3], device=device)
    ours = jagged.ops.linear_cross_entropy(hidden, weight, target, backend=backend)
    _same(ours, torch.nn.functional.cross_entropy(hidden @ weight.T, target), (hidden, weight))


def _catalogue_topk(device: torch.device, backend: str) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 16, generator=generator).to(device) for n in (4, 300))
    logits = hidden @ weight.T
    # All tiles are chosen for three items, one tile for one.
    for k in (3, 1):
        scores, ids = jagged.ops.catalogue_topk(hidden, weight, k, backend=backend)
        torch.testing.assert_close(scores, logits.topk(k).values, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(scores, logits.gather(1, ids), rtol=1e-3, atol=1e-3)


def _bmm(device: torch.device, backend: str) -> None:
    values, offsets = _rows(device)
    dense = torch.randn(2, 16, 3, generator=torch.Generator().manual_seed(2)).to(device).requires_grad_()
    ours = jagged.ops.jagged_dense_bmm(values, offsets, dense, backend=backend)
    _same(ours, torch.cat([values[:2] @ dense[0], values[2:] @ dense[1]]), (values, dense))
    pairs = jagged.ops.jagged_jagged_bmm_jagged_out(values, values, offsets, total=13, backend=backend)
    _same(pairs, torch.cat([(x @ x.T).flatten() for x in (values[:2], values[2:])]), (values,))


def _softmax(device: torch.device, backend: str) -> None:
    values, offsets = _rows(device)
    ours = jagged.ops.jagged_softmax(values, offsets, backend=backend)
    _same(ours, torch.cat([values[:2].softmax(0), values[2:].softmax(0)]), (values,))


def _elementwise(device: torch.device, backend: str) -> None:
    values, offsets = _rows(device)
    dense = torch.randn(2, 16, generator=torch.Generator().manual_seed(2)).to(device).requires_grad_()
    ours = jagged.ops.jagged_dense_mul(values, offsets, dense, backend=backend)
    _same(ours, torch.cat([values[:2] * dense[0], values[2:] * dense[1]]), (values, dense))


def _group_sparse(device: torch.device, backend: str) -> None:
    generator = torch.Generator().manual_seed(0)
    features, weight = (torch.randn(n, m, generator=generator).to(device).requires_grad_() for n, m in ((4, 9), (5, 3)))
    supports = torch.tensor([[0, 4, 8], [1, 2, 8]], dtype=torch.int32, device=device)
    offsets = torch.tensor([0, 2, 5], device=device)
    ours = jagged.ops.group_sparse_linear(features, weight, supports, offsets, backend=backend)
    first, second = supports.long()

    def logits() -> torch.Tensor:
        return torch.cat([features[:, first] @ weight[:2].T, features[:, second] @ weight[2:].T], 1)

    _same(ours, logits(), (features, weight))
    positives, of_rows = torch.tensor([4, 0, 1], device=device), torch.tensor([0, 1, 1, 3, 3], device=device)
    ours = jagged.ops.group_sparse_bce(features, weight, supports, offsets, positives, of_rows, backend=backend)
    _same(ours, _loss_of_labels(logits(), positives, of_rows), (features, weight))
    ours = jagged.ops.group_sparse_cross_entropy(features, weight, supports, offsets, positives, of_rows, backend=backend)
    # Of rows 0 and 2, which have positives; those of row 2 share the probability.
    of_logits = logits()
    expected = of_logits.logsumexp(1)
    _same(ours, (expected[0] - of_logits[0, 4] + expected[2] - of_logits[2, :2].mean()) / 2, (features, weight))


def _linear_bce(device: torch.device, backend: str) -> None:
    generator = torch.Generator().manual_seed(0)
    features, weight = (torch.randn(n, 6, generator=generator).to(device).requires_grad_() for n in (4, 5))
    positives, offsets = torch.tensor([4, 0, 1], device=device), torch.tensor([0, 1, 1, 3, 3], device=device)
    ours = jagged.ops.linear_bce(features, weight, positives, offsets, backend=backend)
    _same(ours, _loss_of_labels(features @ weight.T, positives, offsets), (features, weight))


def _grouped_linear(device: torch.device, backend: str) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = (5, 6), (2, 4, 6), (2, 4), (5, 1, 2)
    leaves = [torch.randn(shape, generator=generator).to(device).requires_grad_() for shape in shapes]
    rows, weight, bias, shares = leaves
    hidden = jagged.ops.grouped_linear(rows, weight, bias, "relu", backend=backend)
    ours = jagged.ops.mix_groups(hidden, shares, backend=backend).square().mean()
    expected = [(rows @ matrix.T + of).relu() for matrix, of in zip(weight, bias, strict=True)]
    mixed = sum(share * of for share, of in zip(shares[:, 0].split(1, 1), expected, strict=True))
    assert isinstance(mixed, torch.Tensor)
    _same(ours, mixed.square().mean(), tuple(leaves))


def _hstu(device: torch.device, backend: str) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = (5, 6), (24, 6), (24,), (6,), (6,), (6, 6), (6,)
    leaves = [torch.randn(shape, generator=generator).to(device).requires_grad_() for shape in shapes]
    x, weight, bias, scale, shift, last, term = leaves
    u, v, q, k = jagged.ops.hstu_projection(x, weight, bias, 2, backend=backend)
    ours = jagged.ops.hstu_output(v * q + k, u, x, scale, shift, last, term, backend=backend).square().mean()
    silu, norm = torch.nn.functional.silu, torch.nn.functional.layer_norm
    gate, value, query, key = silu(x @ weight.T + bias).chunk(4, 1)
    expected = x + (norm(value * query + key, (6,), scale, shift, 1e-6) * gate) @ last.T + term
    _same(ours, expected.square().mean(), tuple(leaves))


def _layer_norm(device: torch.device, backend: str) -> None:
    from jagged.ops.layer_norm import layer_norm

    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=generator).to(device).requires_grad_() for shape in ((5, 6), (6,), (6,)))
    ours = layer_norm(x, weight, bias, backend=backend).square().mean()
    _same(ours, torch.nn.functional.layer_norm(x, (6,), weight, bias).square().mean(), (x, weight, bias))


def _linear(device: torch.device, backend: str) -> None:
    from jagged.ops.linear import linear

    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=generator).to(device).requires_grad_() for shape in ((5, 6), (4, 6), (4,)))
    ours = linear(x, weight, bias, backend=backend).square().mean()
    _same(ours, torch.nn.functional.linear(x, weight, bias).square().mean(), (x, weight, bias))


def _loss_of_labels(logits: torch.Tensor, positives: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    targets = torch.zeros_like(logits).index_put_((torch.repeat_interleave(offsets.diff()), positives), logits.new_ones(()))
    losses = torch.nn.functional.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    return losses.sum(1).mean()


def _hstu_attention(device: torch.device, backend: str) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(5, 2, 16, generator=generator).to(device).requires_grad_() for _ in range(3))
    offsets = torch.tensor([0, 2, 5], device=device)
    ours = jagged.ops.jagged_hstu_attention(q, k, v, offsets, normalizer=3.0, causal=True, backend=backend)
    parts = []
    for start, end in ((0, 2), (2, 5)):
        query, key, value = (x[start:end].transpose(0, 1) for x in (q, k, v))
        weights = torch.nn.functional.silu(query @ key.transpose(1, 2) / 4).tril() / 3
        parts.append((weights @ value).transpose(0, 1))
    _same(ours, torch.cat(parts), (q, k, v))


def _sampled_cross_entropy(device: torch.device, backend: str) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 16, generator=generator).to(device).requires_grad_() for n in (4, 9))
    target, negatives = torch.tensor([0, 6, 3, 3], device=device), torch.tensor([[1, 2], [4, 5], [7, 8], [1, 8]], device=device)
    ours = jagged.ops.sampled_linear_cross_entropy(hidden, weight, target, negatives, backend=backend)
    rows = weight[torch.cat([target[:, None], negatives], 1)]
    logits = (rows @ hidden[:, :, None]).squeeze(2)
    _same(ours, torch.nn.functional.cross_entropy(logits, torch.zeros_like(target)), (hidden, weight))


def _embedding_bags(device: torch.device, backend: str) -> None:
    from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

    from jagged.modules import ScheduledEmbeddingBagCollection

    features = KeyedJaggedTensor(keys=["id"], values=torch.tensor([1, 2, 0]), lengths=torch.tensor([1, 0, 2])).to(device)
    table = EmbeddingBagConfig(name="t", embedding_dim=8, num_embeddings=3, feature_names=["id"])
    collection = ScheduledEmbeddingBagCollection([table], device=device)
    weight = next(collection.parameters())
    expected = torch.stack([weight[1], torch.zeros_like(weight[0]), weight[2] + weight[0]])
    _same(collection(features).values(), expected, (weight,))


def _ranking(device: torch.device, backend: str) -> None:
    import pyarrow

    from jagged.data import Dataset
    from jagged.models import RankingModel

    columns = {"user": [1, 2] * 10, "item": [1, 2, 3, 4] * 5, "time": list(range(20)), "click": [0, 1, 1, 0] * 5}
    table = pyarrow.table(columns)
    dataset = Dataset.from_table(
        table, label="click", candidate="item", user="user", time="time", history="events", progress=False
    )
    split = dataset.split(progress=False)
    model = RankingModel.of(split, embedding_dim=4).to(device)
    loss, _ = model(split.train.gather(range(len(split.train))).to(device))
    loss.backward()
    if not torch.isfinite(loss):
        raise ValueError(f"the loss of a ranking model is {loss.item()}")


def _rows(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Five rows of two samples, which want gradients, and their offsets."""
    values = torch.randn(5, 16, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
    return values, torch.tensor([0, 2, 5], device=device)


def _same(ours: torch.Tensor, expected: torch.Tensor, inputs: tuple[torch.Tensor, ...]) -> None:
    """Compare values and gradients; loosely, for this asks whether an op works at all."""
    torch.testing.assert_close(ours, expected, rtol=1e-2, atol=1e-2)
    upstream = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1)).to(ours.device)
    ours_gradients = torch.autograd.grad(ours, inputs, upstream)
    for ours_gradient, gradient in zip(ours_gradients, torch.autograd.grad(expected, inputs, upstream), strict=True):
        torch.testing.assert_close(ours_gradient, gradient, rtol=1e-2, atol=1e-2)


def _embedding(device: torch.device, backend: str) -> None:
    from torchrec import EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    features = KeyedJaggedTensor(keys=["id"], values=torch.tensor([1, 2, 0]), lengths=torch.tensor([1, 2])).to(device)
    table = {"name": "t", "embedding_dim": 4, "num_embeddings": 3, "feature_names": ["id"]}
    collection = EmbeddingCollection(tables=[EmbeddingConfig(**table)], device=device)
    rows = collection(features)["id"].values()
    weight = collection.embeddings["t"].weight
    torch.testing.assert_close(rows, weight[features.values()])
    bags = EmbeddingBagCollection(tables=[EmbeddingBagConfig(**table)], device=device)(features)
    if bags.values().shape != (2, 4):
        raise ValueError(f"pooled embeddings have shape {tuple(bags.values().shape)}, expected (2, 4)")


def _host_rows(device: torch.device, backend: str) -> None:
    table = torch.arange(8.0).view(4, 2)
    table = table.pin_memory() if device.type == "cuda" else table
    cached = torch.full((1, 2), -1.0, device=device)
    slots, leaving, coming = (torch.tensor([line], device=device) for line in (0, 3, 1))
    jagged.ops.exchange_rows(cached, table, slots, leaving, coming, backend=backend)
    torch.testing.assert_close(cached.cpu(), torch.tensor([[2.0, 3.0]]))
    torch.testing.assert_close(table[3], torch.tensor([-1.0, -1.0]))


def _fbgemm(device: torch.device, backend: str) -> None:
    import fbgemm_gpu  # noqa: F401, registers the operators

    lengths = torch.tensor([1, 2], device=device)
    offsets = torch.ops.fbgemm.asynchronous_complete_cumsum(lengths)
    torch.testing.assert_close(offsets.cpu(), torch.tensor([0, 1, 3]))


_FAMILIES = {
    "conversion": _conversion,
    "elementwise": _elementwise,
    "bmm": _bmm,
    "softmax": _softmax,
    "group_sparse": _group_sparse,
    "linear_bce": _linear_bce,
    "grouped_linear": _grouped_linear,
    "hstu": _hstu,
    "layer_norm": _layer_norm,
    "linear": _linear,
    "attention": _attention,
    "hstu_attention": _hstu_attention,
    "cross_entropy": _cross_entropy,
    "sampled_cross_entropy": _sampled_cross_entropy,
    "catalogue_topk": _catalogue_topk,
    "embedding_bags": _embedding_bags,
    "host_rows": _host_rows,
}

_CHECKS: dict[str, Callable[[], str]] = {
    "torch on CPU": _check_torch,
    "GPU": _check_gpu,
    **{f"{name}, torch on CPU": _on("cpu", op) for name, op in _FAMILIES.items()},
    **{f"{name}, Triton on GPU": _on("cuda", op) for name, op in _FAMILIES.items()},
    "fbgemm_gpu on CPU": _on("cpu", _fbgemm),
    "fbgemm_gpu on GPU": _on("cuda", _fbgemm),
    "torchrec on CPU": _on("cpu", _embedding),
    "torchrec on GPU": _on("cuda", _embedding),
    "a table and its ranking model on CPU": _on("cpu", _ranking),
    "a table and its ranking model on GPU": _on("cuda", _ranking),
}
