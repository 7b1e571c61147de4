"""What modules have in common that update parameters in the backward pass: options of the optimizer, and its state."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor


def checked_options(kind: str | None, options: dict[str, Any] | None, known: Collection[str]) -> dict[str, Any] | None:
    """Return the options of an optimizer, which have a rate; None without one.

    Raises:
        ValueError: options without an optimizer, unknown ones, or no `learning_rate`.
    """
    if kind is None:
        if options is not None:
            raise ValueError("optimizer_options: expected None without an optimizer; name one with optimizer")
        return None
    options = dict(options or {})
    if unknown := [name for name in options if name not in known]:
        raise ValueError(f"optimizer_options: got {unknown[0]!r}, expected some of {', '.join(known)}")
    if "learning_rate" not in options:
        raise ValueError("optimizer_options: expected a learning_rate, got none")
    return options


def load_state(own: Mapping[str, Tensor], given: Mapping[str, Tensor], whose: str) -> None:
    """Copy an optimizer's tensors into its own.

    Raises:
        ValueError: other names or shapes; `whose` is what the optimizer updates, for the message.
    """
    for name in sorted(own.keys() | given.keys()):
        expected, got = (list(of[name].shape) if name in of else None for of in (own, given))
        if expected != got:
            raise ValueError(
                f"state_dict: expected shape {expected} for {name!r}, got {got}; {whose} and optimizer must be the same"
            )
    for name, state in own.items():
        state.copy_(given[name])
