"""What an update of embedding rows inside the backward pass keeps and follows."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from jagged.ops.embedding_bag.layout import BagLayout

Kind = Literal["sgd", "adagrad", "rowwise_adagrad", "adam", "rowwise_adam", "lamb", "rowwise_lamb"]
KINDS = get_args(Kind)
# What changes nothing: sums of each row's squares of gradients, for their norm.
SQUARES = "rowwise_norm"
# Of each kind: what its first and its second state have, a number for each element or for each row of a table, or nothing.
STATES: dict[str, tuple[str, str]] = {
    "sgd": ("", ""),
    "adagrad": ("element", ""),
    "rowwise_adagrad": ("row", ""),
    "adam": ("element", "element"),
    "rowwise_adam": ("element", "row"),
    "lamb": ("element", "element"),
    "rowwise_lamb": ("element", "row"),
    SQUARES: ("row", ""),
}
STATE_DTYPES = (torch.float32, torch.bfloat16)
ADAGRADS, ADAMS = ("adagrad", "rowwise_adagrad"), ("adam", "rowwise_adam")
# Kinds whose states are running means.
MOMENTS = (*ADAMS, "lamb", "rowwise_lamb")


class Rule(NamedTuple):
    """The numbers of an update, as the operators take them; `is_decoupled` of every kind whose gradients have no decay."""

    kind: str
    eps: float
    beta1: float
    beta2: float
    weight_decay: float
    stochastic_rounding: bool
    is_decoupled: bool
    max_norm: float | None


class BagOptimizer:
    """Update the rows that a batch has read as soon as their gradients are known, and make no gradient of the tables.

    Passed to `embedding_bags`, whose backward pass then changes `weights` and the states in place, once for each row, by the sum
    of the gradients of all its places in the batch. With `g` that sum, all in float32:

    * `sgd`: `w -= lr * g`.
    * `adagrad`: `s += g^2; w -= lr * g / (sqrt(s) + eps)`; `rowwise_adagrad` has one `s` a row and adds the mean of `g^2`.
    * `adam`: `m` and `v` are running means of `g` and `g^2` by `betas`, unbiased by the number of steps;
      `w -= lr * m / (sqrt(v) + eps)`; `rowwise_adam` has one `v` a row, of the mean of `g^2`.
    * `lamb`: with adam's `m` and `v`, for each row `u = m / (sqrt(v) + eps) + weight_decay * w` and `w -= lr * ratio * u`, where
      `ratio = ||w|| / ||u||`, of the L2 norms of the row's weights before the update and of `u`, or 1 where either norm is 0.
      `rowwise_lamb` has one `v` a row, of the mean of `g^2`.

    Rows that are not read keep their states. `weight_decay` is added to `g` as `weight_decay * w` with sgd and adagrad, and
    decoupled with adam (`w -= lr * weight_decay * w` beside the step, from the weights before it). With lamb it stands in `u`.

    A row's last step with `max_norm`: weights whose L2 norm is larger are multiplied by `max_norm / ||w||`, in float32, before
    they are rounded to the tables' dtype. Rows that are not read stay as they are, also above it.

    With `decay_missed_steps` the update of a row that `k` updates of the storage did not read, since its last or, of a row never
    read, since the first, begins with `m *= beta1^k`, `v *= beta2^k` and `w *= max(0, 1 - lr * weight_decay)^k`, by the learning
    rate of now. So `m` and `v` are those of dense Adam with gradients of 0 in between. It is not dense Adam: this would also have
    moved `w` by what was left of `m` in each of the `k` steps, which only with `betas[0]` 0 is nothing. What is due to rows that
    are never read again is never done.

    Args:
        kind: one of the above.
        layout: of the tables.
        learning_rate: a number; `learning_rate` is a tensor on the device, which a schedule may fill with another.
        eps: > 0.
        betas: of adam and lamb, in [0, 1).
        weight_decay: at least 0.
        stochastic_rounding: round new weights of bfloat16 tables up or down at random, in proportion to what is cut off, so that
            small updates are not lost; repeatable. States are rounded to nearest.
        decoupled_weight_decay: of adagrad and rowwise_adagrad: `g` has no decay, `w -= lr * weight_decay * w` stands beside the
            step, as with adam.
        max_norm: > 0; None: without.
        state_dtype: of `first` and `second`, float32 or bfloat16. An update reckons in float32 and rounds what it keeps to
            nearest, so that a bfloat16 number that changes by less than a 512th of itself stays: sums of adagrad stop growing,
            and with a beta of 0.999 `v` never falls; take 0.99 or less.
        decay_missed_steps: of adam and rowwise_adam: as above.
        device: of the states; None: the default device.

    Attributes:
        states_of: for what the states have a number, by name: `"element"`, or `"row"` of all tables.
        learning_rate: `[]` float32.
        step: `[]` int64, the number of updates.
        first, second: states in `state_dtype`, `[num_elements]` or `[rows of all tables]`, or empty.
        last: `[rows of all tables]` int64, the step that updated a row last, or 0; None without `decay_missed_steps`.

    Raises:
        ValueError: an unknown kind, a number out of its range, or an option of other kinds.
        TypeError: another `state_dtype`.

    Source:
        You et al., Large Batch Optimization for Deep Learning: Training BERT in 76 minutes, ICLR 2020: LAMB, algorithm 2, here
        with a row for a layer, as FBGEMM has it, and with the identity for phi.

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
        decoupled_weight_decay: bool = False,
        max_norm: float | None = None,
        state_dtype: torch.dtype = torch.float32,
        decay_missed_steps: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        if kind not in KINDS:
            raise ValueError(f"kind: got {kind!r}, expected one of {', '.join(KINDS)}")
        for name, number, is_right, expected in (
            ("learning_rate", learning_rate, learning_rate >= 0, "a number of at least 0"),
            ("eps", eps, eps > 0, "a number above 0"),
            ("betas", betas, all(0 <= beta < 1 for beta in betas) and len(betas) == 2, "two numbers in [0, 1)"),
            ("weight_decay", weight_decay, weight_decay >= 0, "a number of at least 0"),
            ("max_norm", max_norm, max_norm is None or max_norm > 0, "a number above 0, or None"),
        ):
            if not is_right:
                raise ValueError(f"{name}: expected {expected}, got {number}")
        for name, given, kinds in (
            ("decoupled_weight_decay", decoupled_weight_decay, ADAGRADS),
            ("decay_missed_steps", decay_missed_steps, ADAMS),
        ):
            if given and kind not in kinds:
                raise ValueError(
                    f"{name}: expected False for {kind!r}, got {given}; it is an option of {' and '.join(kinds)}, leave it out"
                )
        if state_dtype not in STATE_DTYPES:
            raise TypeError(f"state_dtype: expected {' or '.join(map(str, STATE_DTYPES))}, got {state_dtype}")
        self.layout = layout
        is_decoupled = bool(decoupled_weight_decay) or kind in MOMENTS
        norm = None if max_norm is None else float(max_norm)
        # Whole numbers would make kernels of their own.
        numbers = float(eps), float(betas[0]), float(betas[1]), float(weight_decay)
        self.rule = Rule(kind, *numbers, stochastic_rounding, is_decoupled, norm)
        self.learning_rate = torch.tensor(learning_rate, dtype=torch.float32, device=device)
        self.step = torch.zeros((), dtype=torch.int64, device=device)
        lengths = {"": 0, "element": layout.num_elements, "row": layout.first_rows[-1]}
        self.states_of = {name: of for name, of in zip(("first", "second"), STATES[kind], strict=True) if of}
        self.first, self.second = (torch.zeros(lengths[of], dtype=state_dtype, device=device) for of in STATES[kind])
        self.last: Tensor | None = None
        if decay_missed_steps:
            self.states_of["last"] = "row"
            self.last = torch.zeros(lengths["row"], dtype=torch.int64, device=device)

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that go on from step to step, for a checkpoint."""
        state = {"learning_rate": self.learning_rate, "step": self.step, "first": self.first, "second": self.second}
        return state if self.last is None else {**state, "last": self.last}
