"""What modules have in common that update parameters in the backward pass: options of the optimizer, and its state."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any

import torch
import torchrec.optim
from torch import Tensor, nn

from jagged.ops import BagOptimizerKind

# FBGEMM's, for which TorchRec's classes stand.
_OF_FBGEMM: dict[str, Any] = {"lr": 0.01, "eps": 1e-8, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.0}
# Optimizers of `apply_optimizer_in_backward`: our kind, and what it knows of their options, with what these are by default.
_IN_BACKWARD: dict[type[torch.optim.Optimizer], tuple[BagOptimizerKind, dict[str, Any]]] = {
    torch.optim.SGD: ("sgd", {"lr": 1e-3, "weight_decay": 0.0}),
    torch.optim.Adagrad: ("adagrad", {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0}),
    torch.optim.Adam: ("adam", {"lr": 1e-3, "eps": 1e-8, "betas": (0.9, 0.999)}),
    torchrec.optim.SGD: ("sgd", {"lr": 0.01}),
    torchrec.optim.Adagrad: ("adagrad", {"lr": 0.01, "eps": 1e-8}),
    torchrec.optim.RowWiseAdagrad: ("rowwise_adagrad", {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0}),
    torchrec.optim.Adam: ("adam", _OF_FBGEMM),
    torchrec.optim.PartialRowWiseAdam: ("rowwise_adam", _OF_FBGEMM),
    torchrec.optim.LAMB: ("lamb", _OF_FBGEMM),
    torchrec.optim.PartialRowWiseLAMB: ("rowwise_lamb", _OF_FBGEMM),
}


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


def in_backward_optimizer(module: nn.Module) -> tuple[BagOptimizerKind, dict[str, Any]] | None:
    """Kind and options of what `apply_optimizer_in_backward` gave a module's parameters; None where it gave nothing.

    Rows that a batch does not read stay as they are, also under `torch.optim.Adam`, as TorchRec has it where tables
    are sharded.

    Raises:
        ValueError: parameters with several optimizers or different ones, some without, and what the kinds here do not know.
    """
    found = {name: _translated(name, parameter) for name, parameter in module.named_parameters()}
    if all(one is None for one in found.values()):
        return None
    first = next(iter(found))
    for name, one in found.items():
        if one != found[first]:
            raise ValueError(
                "module: expected one optimizer of apply_optimizer_in_backward for all tables of a collection, got others for "
                f"{first!r} and {name!r}; give them the same, or make a collection for each"
            )
    return found[first]


def _translated(name: str, parameter: nn.Parameter) -> tuple[BagOptimizerKind, dict[str, Any]] | None:
    classes, options = getattr(parameter, "_optimizer_classes", []), getattr(parameter, "_optimizer_kwargs", [])
    if not classes:
        return None
    got = f"module: got {' and '.join(of.__name__ for of in classes)} of apply_optimizer_in_backward for {name!r}"
    if len(classes) > 1:
        raise ValueError(f"{got}, expected one optimizer; apply one")
    if classes[0] not in _IN_BACKWARD:
        known = ", ".join(f"{of.__module__.partition('.')[0]}.optim.{of.__name__}" for of in _IN_BACKWARD)
        raise ValueError(f"{got}, expected one of {known}; take one of these")
    kind, known_options = _IN_BACKWARD[classes[0]]
    # TorchRec writes what it made of the class there when it shards.
    given = {option: value for option, value in options[0].items() if option != "optimizer"}
    if "learning_rate" in given:
        given["lr"] = given.pop("learning_rate")
    parameters = inspect.signature(classes[0]).parameters
    for option, value in given.items():
        without_effect = option in parameters and parameters[option].default == value
        if option not in known_options and not without_effect:
            raise ValueError(
                f"{got} with {option}={value}, expected some of {', '.join(known_options)}, which {kind} knows; leave it out"
            )
    chosen = {option: given.get(option, default) for option, default in known_options.items()}
    if "beta1" in chosen:
        chosen["betas"] = chosen.pop("beta1"), chosen.pop("beta2")
    return kind, {"learning_rate": chosen.pop("lr"), **chosen}
