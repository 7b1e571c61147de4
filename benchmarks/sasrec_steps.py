"""A training step of SASRec with a loss of `benchmarks.cross_entropy`: body, loss, their gradients and Adam's update.

All losses get the same jagged body on sequences of one length, so that no row is padding, the same first weights, ids and
dropout. Two blocks and two heads of attention; weights and Adam's states in float32, products in bfloat16. Peers get the item
table in bfloat16 as autocast makes it, so that gathered rows are half as large as the float32 ones of a plain lookup.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.cross_entropy_cases import DTYPES, Method, Size, Workload
from jagged.models import SASRec
from jagged.models.item_sequences import FEATURE
from jagged.ops import trust_values

NUM_BLOCKS, NUM_HEADS, DROPOUT = 2, 2, 0.1
# First losses of two methods may differ by as much of the loss: dtypes round differently, and dropout draws the same.
AGREEMENT = 0.01


class StepWorkload(Workload):
    """Sequences of `length` items, their next items as targets, and a loss's ids; no hidden states, which the model has."""

    def __init__(self, size: Size, length: int, device: str) -> None:
        self.size, self.length = size, length
        generator = torch.Generator(device).manual_seed(1)
        batch = size.rows // length
        items = torch.randint(size.items, (batch, length + 1), generator=generator, device=device)
        self.features = KeyedJaggedTensor(
            [FEATURE],
            items[:, :-1].flatten(),
            lengths=torch.full((batch,), length, device=device),
            offsets=torch.arange(batch + 1, device=device) * length,
        )
        self.target = items[:, 1:].flatten()
        # With its index, which the operators compare.
        self.device = items.device
        self.seed = torch.tensor([7], device=device)


class Step:
    """A model, its optimizer and a loss."""

    def __init__(self, w: StepWorkload, method: Method) -> None:
        torch.manual_seed(0)
        self.w, self.of_items, self.is_ours = w, method.make(w), method.options is not None
        size, self.dtype = w.size, DTYPES[w.size.dtype]
        self.model = SASRec(
            size.items,
            embedding_dim=size.width,
            num_heads=NUM_HEADS,
            num_layers=NUM_BLOCKS,
            max_seq_len=w.length,
            dropout=DROPOUT,
            device=w.device,
        )
        on_gpu = w.device.type == "cuda"
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3, fused=on_gpu, capturable=on_gpu)

    def __call__(self) -> Tensor:
        """Take a step; the loss before it."""
        with trust_values(), torch.autocast(self.w.device.type, self.dtype):
            hidden = self.model(self.w.features).values().to(self.dtype)
            weight = self.model.item_weight
            loss = self.of_items(hidden, weight if self.is_ours else weight.to(self.dtype))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def measure_step(
    w: StepWorkload,
    method: Method,
    expected: dict[str, float],
    time_it: Callable[[Callable[[], Callable[[], Any]]], dict[str, Any]],
) -> dict[str, Any]:
    """Time of a step, and most bytes that are allocated in one, parameters and optimizer's states with them.

    The first loss of a family is left in `expected`.

    Raises:
        ArithmeticError: a first loss that is not the family's.
    """
    step = Step(w, method)
    loss = float(step())
    right = expected.setdefault(method.family, loss)
    if not abs(loss - right) <= AGREEMENT * abs(right):
        raise ArithmeticError(f"wrong: a first loss of {loss:.4g}, and {right:.4g} of the first method")
    figures: dict[str, Any] = {"loss": loss}
    if w.device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step()
        figures["peak_bytes_step"] = torch.cuda.max_memory_allocated()
    return {**figures, "step": time_it(lambda: step)}
