"""Checks of arguments: of metadata always; of values on CPU tensors, and elsewhere on demand, for there they synchronise."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

_trusted = ContextVar("jagged_trusted_values", default=False)

# What `os.environ` keeps. Its own `get` raises and catches an exception, which takes longer than all other checks of a call.
_ENVIRONMENT: dict[Any, Any] = os.environ._data  # type: ignore[attr-defined]
_VALIDATE, _OFF, _ON = (os.environ.encodekey("JAGGED_VALIDATE"), os.environ.encodevalue("0"), os.environ.encodevalue("1"))


def check_tensor(name: str, tensor: Tensor, shape: str, dtypes: tuple[torch.dtype, ...] = ()) -> None:
    """Check the rank of a tensor against a shape as documentation writes it, `"[S, H, D]"`, and its dtype."""
    if not isinstance(tensor, Tensor) or tensor.is_nested:
        raise TypeError(f"{name}: expected a tensor {shape}, got {_container(name, tensor)}")
    rank = shape.count(",") + 1
    if tensor.dim() != rank and ("*" not in shape or tensor.dim() < rank - 1):
        # Of a padded batch, [B, L, ...], one dimension is too many.
        cure = "; a padded batch becomes rows by dense_to_jagged(x, offsets)"
        is_padded = shape.startswith("[S") and tensor.dim() == rank + 1
        raise ValueError(f"{name}: expected shape {shape}, got {list(tensor.shape)}{cure if is_padded else ''}")
    if dtypes and tensor.dtype not in dtypes:
        raise TypeError(f"{name}: expected dtype {_names(dtypes)}, got {_names((tensor.dtype,))}; convert it with .to(...)")


def _container(name: str, given: object) -> str:
    """Return what was given in place of a tensor, and the line that converts it."""
    if isinstance(given, Tensor):
        return "a nested tensor; pass the values and offsets of jagged.ops.from_nested(x)"
    kind = type(given).__name__
    if kind in ("JaggedTensor", "KeyedJaggedTensor"):
        part = "offsets" if "offsets" in name else "values"
        return (
            f"a {kind}; pass its .{part}()"
            if kind == "JaggedTensor"
            else f"a {kind}; take one key, x[key], and pass its .{part}()"
        )
    return kind


def check_device(name: str, tensor: Tensor, like_name: str, like: Tensor) -> None:
    """Check that a tensor lies where another does."""
    if tensor.device != like.device:
        raise ValueError(f"{name}: expected the device of {like_name}, {like.device}, got {tensor.device}; move one of them")


def check_choice(name: str, given: object, choices: tuple[str, ...]) -> None:
    """Check that an option is one of some words."""
    if given not in choices:
        raise ValueError(f"{name}: got {given!r}, expected {', '.join(map(repr, choices[:-1]))} or {choices[-1]!r}")


def check_number(name: str, given: object, is_right: bool, expected: str) -> None:
    """Check a number by what the caller found; `expected` says it in words."""
    if not is_right:
        raise ValueError(f"{name}: expected {expected}, got {given}")


def check_vector(name: str, vector: Tensor | None, shape: str, length: int, of: str, like: Tensor) -> None:
    """Check floats, one for each of `length` things, of which `like` has a row each; None is right."""
    if vector is None:
        return
    check_tensor(name, vector, shape, FLOATS)
    if not holds(vector.shape[0] == length):
        raise ValueError(f"{name}: expected shape [{length}], one number per {of} {list(like.shape)}, got {list(vector.shape)}")


def check_same(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Check that two tensors share dtype and device."""
    if tensor.dtype != other.dtype:
        raise TypeError(
            f"{name}: expected the dtype of {other_name}, {_names((other.dtype,))}, "
            f"got {_names((tensor.dtype,))}; convert one of them"
        )
    check_device(name, tensor, other_name, other)


def autocast_dtype(device: str) -> torch.dtype | None:
    """Return the dtype that autocast casts factors of products to on a kind of device; None where it is off."""
    # Autocast knows no meta device.
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def product_dtype(*factors: Tensor) -> torch.dtype | None:
    """Return the dtype that autocast gives factors of a product, whatever theirs; None where these have to agree.

    Autocast leaves float64 as it is, in PyTorch's own products too, so that nothing is cast beside it.
    """
    if torch.float64 in [factor.dtype for factor in factors]:
        return None
    return autocast_dtype(factors[0].device.type)


def check_factors(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Check that two factors of a product share a device, and a dtype unless autocast gives them one."""
    if tensor.dtype == other.dtype or product_dtype(tensor, other) is None:
        check_same(name, tensor, other_name, other)
    else:
        check_device(name, tensor, other_name, other)


def holds(condition: bool) -> bool:
    """Tell whether a condition on sizes holds; one that a compiler cannot know yet, the compiled graph checks when it runs."""
    if not torch.compiler.is_compiling():
        return condition
    # Imported where it is needed, because sympy comes with it.
    from torch.fx.experimental.symbolic_shapes import guard_or_true

    if not guard_or_true(condition):
        return False
    torch._check(condition)
    return True


def compute_dtype_of(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """Return the dtype that hidden states and item weights are multiplied in: autocast's, or the one that both have."""
    dtype = product_dtype(hidden, weight)
    if dtype is not None:
        return dtype
    if weight.dtype != hidden.dtype:
        raise TypeError(
            f"weight: expected the dtype of hidden, {hidden.dtype}, got {weight.dtype}; cast one with .to(...), or call under "
            "torch.autocast, which keeps float32 master weights and returns their gradient in float32"
        )
    return hidden.dtype


def check_offsets(offsets: Tensor, like: Tensor, name: str = "offsets", total: int | None = None) -> None:
    """Check what metadata shows of offsets `[B + 1]`, and where `validation_is_on` their values too, against `total` rows."""
    check_tensor(name, offsets, "[B + 1]", (torch.int32, torch.int64))
    if offsets.shape[0] < 1:
        raise ValueError(f"{name}: expected shape [B + 1], got [0]; an empty batch has one offset, 0")
    if offsets.device != like.device:
        raise ValueError(f"{name}: expected the device of the values, {like.device}, got {offsets.device}; move it with .to(...)")
    if validation_is_on(offsets):
        validate_offsets(offsets, total, name=name)


def validation_is_on(values: Tensor) -> bool:
    """Tell whether operators are to check these values.

    They are on a CPU, where it takes microseconds, unless they are trusted; by `JAGGED_VALIDATE=1` on every device, and by
    `JAGGED_VALIDATE=0` on none. Never in a compiled or captured region, or of a tensor without values of its own.
    """
    if torch.compiler.is_compiling():
        return False
    setting = _ENVIRONMENT.get(_VALIDATE)
    if setting == _OFF or (setting != _ON and (not values.is_cpu or _trusted.get())) or not _may_synchronise():
        return False
    # A mode may have made these values up, a transform may have wrapped them.
    is_plain = type(values) in (Tensor, torch.nn.Parameter) and not torch._C._len_torch_dispatch_stack()
    return is_plain and torch._C._functorch.peek_interpreter_stack() is None


def values_are_trusted() -> bool:
    """Tell whether models are to leave values unchecked: inside `trust_values`, or in a compiled or captured region.

    Example:
        >>> from jagged.ops import values_are_trusted
        >>> values_are_trusted()
        False
    """
    return not _may_synchronise() or _trusted.get()


@contextmanager
def trust_values() -> Iterator[None]:
    """Let models and operators called inside leave ids and offsets unchecked, which on a GPU saves one synchronisation a call.

    `JAGGED_VALIDATE=1` checks them all the same. For values that were checked on the host, as a `BatchLoader`'s batches are. An
    id out of range then ends in a device-side assertion, after which the process can use the GPU no more.

    Example:
        >>> from jagged.ops import trust_values
        >>> with trust_values():
        ...     pass  # hidden = model(features)
    """
    token = _trusted.set(True)
    try:
        yield
    finally:
        _trusted.reset(token)


def _may_synchronise() -> bool:
    if torch.compiler.is_compiling():
        return False
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def validate_ids(ids: Tensor, num_rows: int, *, name: str = "ids", ignore_index: int | None = None) -> None:
    """Check that ids address rows of a table. Costs one device synchronisation.

    Args:
        ids: of any shape, int32 or int64.
        num_rows: of the table; ids count from 0.
        name: what messages call the ids.
        ignore_index: an id that is always right; None for none.

    Raises:
        ValueError: names the first bad place, what stands there and what was expected.
        TypeError: ids that are not int32 or int64.

    Example:
        >>> import torch
        >>> from jagged.ops import validate_ids
        >>> validate_ids(torch.tensor([0, 4, 2]), num_rows=5)
    """
    check_tensor(name, ids, "[*]", (torch.int32, torch.int64))
    if ignore_index is None:
        if not ids.numel():
            return
        lowest, highest = torch.stack(torch.aminmax(ids.detach())).tolist()
        if lowest >= 0 and highest < num_rows:
            return
    values = ids.detach().cpu().reshape(-1)
    bad = (values < 0) | (values >= num_rows)
    if ignore_index is not None:
        bad &= values != ignore_index
    places = torch.nonzero(bad)
    if places.numel():
        place = int(places[0])
        also = "" if ignore_index is None else f", or ignore_index ({ignore_index})"
        raise ValueError(
            f"{name}[{place}]: expected an id from 0 to {num_rows - 1}{also}, got {int(values[place])}; "
            "map ids to dense ones first"
        )


def validate_offsets(offsets: Tensor, total: int | None = None, *, name: str = "offsets") -> None:
    """Check the values of offsets `[B + 1]`: from 0, never decreasing, ending at `total`. Costs one device synchronisation.

    Args:
        offsets: `[B + 1]`, int32 or int64.
        total: the number of rows the offsets describe; None does not check the end.
        name: what messages call the offsets.

    Raises:
        ValueError: names the first bad place, what stands there and what was expected.
        TypeError: offsets that are not int32 or int64.

    Example:
        >>> import torch
        >>> from jagged.ops import validate_offsets
        >>> validate_offsets(torch.tensor([0, 2, 2, 5]), total=5)
    """
    check_tensor(name, offsets, "[B + 1]", (torch.int32, torch.int64))
    if total is not None:
        _check_total(total)
    values = offsets.detach().cpu()
    if values.shape[0] < 1:
        raise ValueError(f"{name}: expected shape [B + 1], got [0]; an empty batch has one offset, 0")
    if values[0] != 0:
        raise ValueError(f"{name}[0]: expected 0, got {int(values[0])}; offsets count rows from the start of the values")
    falls = torch.nonzero(values.diff() < 0)
    if falls.numel():
        place = int(falls[0]) + 1
        raise ValueError(
            f"{name}[{place}]: expected at least {int(values[place - 1])}, the offset before it, got {int(values[place])}; "
            "offsets never decrease"
        )
    if total is not None and values[-1] != total:
        raise ValueError(
            f"{name}[{values.shape[0] - 1}]: expected {total}, the number of rows, got {int(values[-1])}; "
            "the last offset is the total length"
        )


def resolve_total(total: int | None, offsets: Tensor, name: str = "total") -> int:
    """Return `total`, or read it from the last offset: one device synchronisation, refused where none may happen."""
    if total is not None:
        _check_total(total, name)
        return total
    if torch.compiler.is_compiling() or (offsets.is_cuda and torch.cuda.is_current_stream_capturing()):
        raise ValueError(
            f"{name}: must be given in a compiled or captured call, because reading it from the offsets synchronises"
        )
    total = int(offsets[-1])
    if total < 0:
        raise ValueError(
            f"{name}: expected the last of the offsets, at least 0, got {total}; offsets count rows from the start of the values"
        )
    return total


def _check_total(total: int, name: str = "total") -> None:
    if not holds(total >= 0):
        raise ValueError(f"{name}: expected a number of rows, at least 0, got {total}")


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
