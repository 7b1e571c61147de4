"""What an update of embedding rows inside the backward pass keeps and follows."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from jagged.ops.embedding_bag.layout import BagLayout

Kind = Literal["sgd", "adagrad", "rowwise_adagrad", "adam", "rowwise_adam"]
KINDS = get_args(Kind)
# Of each kind: what its first and its second state have, a number for each element or for each row of a table, or nothing.
STATES: dict[str, tuple[str, str]] = {
    "sgd": ("", ""),
    "adagrad": ("element", ""),
    "rowwise_adagrad": ("row", ""),
    "adam": ("element", "element"),
    "rowwise_adam": ("element", "row"),
}


class Rule(NamedTuple):
    """The numbers of an update, as the operators take them."""

    kind: str
    eps: float
    beta1: float
    beta2: float
    weight_decay: float
    stochastic_rounding: bool


class BagOptimizer:
    """Update the rows that a batch has read as soon as their gradients are known, and make no gradient of the tables.

    Passed to `embedding_bags`, whose backward pass then changes `weights` and the states in place, once for each row, by the sum
    of the gradients of all its places in the batch. With `g` that sum, all in float32:

    * `sgd`: `w -= lr * g`.
    * `adagrad`: `s += g^2; w -= lr * g / (sqrt(s) + eps)`; `rowwise_adagrad` has one `s` a row and adds the mean of `g^2`.
    * `adam`: `m` and `v` are running means of `g` and `g^2` by `betas`, unbiased by the number of steps;
      `w -= lr * m / (sqrt(v) + eps)`; `rowwise_adam` has one `v` a row, of the mean of `g^2`.

    Rows that are not read keep their states. `weight_decay` is added to `g` as `weight_decay * w` with sgd and adagrad, and
    decoupled with adam (`w -= lr * weight_decay * w`).

    Args:
        kind: one of the above.
        layout: of the tables.
        learning_rate: a number; `learning_rate` is a tensor on the device, which a schedule may fill with another.
        eps: > 0.
        betas: of adam, in [0, 1).
        weight_decay: at least 0.
        stochastic_rounding: round new weights of bfloat16 tables up or down at random, in proportion to what is cut off, so that
            small updates are not lost; repeatable.
        device: of the states; None: the default device.

    Attributes:
        states_of: what `first` and `second` have a number for: `"element"`, `"row"`, or `""` for nothing.
        learning_rate: `[]` float32.
        step: `[]` int64, the number of updates.
        first, second: float32 states, `[num_elements]` or `[rows of all tables]`, or empty.

    Raises:
        ValueError: an unknown kind or a number out of its range.

    Example:
        >>> from jagged.ops import BagLayout, BagOptimizer
        >>> BagOptimizer("rowwise_adagrad", BagLayout((10, 5), (4, 3)), learning_rate=0.1).first.shape
        torch.Size([15])
    """

    def __init__(
        self,
        kind: Kind,
        layout: BagLayout,
        *,
        learning_rate: float,
        eps: float = 1e-8,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        stochastic_rounding: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        if kind not in KINDS:
            raise ValueError(f"kind: got {kind!r}, expected one of {', '.join(KINDS)}")
        for name, number, is_right, expected in (
            ("learning_rate", learning_rate, learning_rate >= 0, "a number of at least 0"),
            ("eps", eps, eps > 0, "a number above 0"),
            ("betas", betas, all(0 <= beta < 1 for beta in betas) and len(betas) == 2, "two numbers in [0, 1)"),
            ("weight_decay", weight_decay, weight_decay >= 0, "a number of at least 0"),
        ):
            if not is_right:
                raise ValueError(f"{name}: expected {expected}, got {number}")
        self.layout = layout
        # Whole numbers would make kernels of their own.
        self.rule = Rule(kind, float(eps), float(betas[0]), float(betas[1]), float(weight_decay), stochastic_rounding)
        self.learning_rate = torch.tensor(learning_rate, dtype=torch.float32, device=device)
        self.step = torch.zeros((), dtype=torch.int64, device=device)
        lengths = {"": 0, "element": layout.num_elements, "row": layout.first_rows[-1]}
        self.states_of = STATES[kind]
        self.first, self.second = (torch.zeros(lengths[of], dtype=torch.float32, device=device) for of in self.states_of)

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that go on from step to step, for a checkpoint."""
        return {"learning_rate": self.learning_rate, "step": self.step, "first": self.first, "second": self.second}
