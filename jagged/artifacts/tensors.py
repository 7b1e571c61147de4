"""Files of tensors: safetensors, whose header is checked before a tensor is read."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jagged.artifacts.errors import ArtifactError, message, reason, shown
from jagged.artifacts.files import replacing
from jagged.artifacts.readers import check_regular, parse_json

if TYPE_CHECKING:
    from torch import Tensor

_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 8),
}
FLOATS = ("F32", "F64", "F16", "BF16")
_MAX_HEADER_BYTES = 100_000_000
_MAX_DIMENSIONS = 64


class Described(NamedTuple):
    """A tensor without its values.

    Args:
        dtype: as safetensors writes it, "F32".
        shape: its sizes.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class Expected(NamedTuple):
    """What a tensor may be.

    Args:
        dtypes: one of these.
        shape: its sizes; None for any.
    """

    dtypes: tuple[str, ...]
    shape: tuple[int | None, ...]


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Replace a file by one of tensors, which may lie on any device and in any order.

    Raises:
        OSError: it cannot be written; then nothing is left of the attempt.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with replacing(path) as aside:
        try:
            save_file({name: value.detach().cpu().contiguous() for name, value in tensors.items()}, aside)
        except SafetensorError as error:
            # Its message holds the operating system's number, of a full disk for example.
            found = re.search(r"\(os error (\d+)\)", str(error))
            raise (OSError(int(found[1]), os.strerror(int(found[1]))) if found else OSError(str(error))) from error


def read_header(path: Path) -> dict[str, Described]:
    """The tensors of a file, by name, without reading one; together they have as many bytes as the file.

    Raises:
        ArtifactError: unreadable, or no safetensors file.
    """
    try:
        check_regular(path)
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise ArtifactError(_no_tensors(path, f"a header of {length} bytes in a file of {size}"))
            header = file.read(length)
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror}") from None
    content = parse_json(header, path)
    content.pop("__metadata__", None)
    tensors = {}
    for name, entry in content.items():
        match entry:
            case {"dtype": str(dtype), "shape": [*shape]} if dtype in _BYTES and _are_sizes(shape):
                tensors[name] = Described(dtype, tuple(shape))
            case _:
                raise ArtifactError(_no_tensors(path, f"{shown(name)} described as {shown(entry, 120)}"))
    total = sum(tensor.numel * _BYTES[tensor.dtype] for tensor in tensors.values())
    if total != size - 8 - length:
        raise ArtifactError(_no_tensors(path, f"tensors of {total} bytes in {size - 8 - length}"))
    return tensors


def read_tensors(path: Path, expected: Mapping[str, Expected] | None = None, why: str = "") -> dict[str, Tensor]:
    """Read a file of the tensors that are expected and no others, onto the CPU.

    Args:
        path: the file.
        expected: tensors by name; None for whatever it holds.
        why: they are expected, for the message.

    Raises:
        ArtifactError: unreadable, no safetensors file, or with other tensors; the message names the first one.
    """
    from safetensors.torch import load_file

    found = read_header(path)
    if expected is None:
        expected = {name: Expected((tensor.dtype,), tensor.shape) for name, tensor in found.items()}
    for name in sorted(expected.keys() | found.keys()):
        has, wants = found.get(name), expected.get(name)
        if has is None or wants is None or not _fits(has, wants):
            wanted = f"{_shown_expected(wants, has)} {why}".strip()
            got = "none" if has is None else f"{has.dtype} {list(has.shape)}"
            raise ArtifactError(message(f"{path}: {name}", got, wanted, "copy it again"))
    try:
        return load_file(path)
    except Exception as error:  # made by other hands: safetensors refuses more than the header's sizes
        raise ArtifactError(_no_tensors(path, reason(error))) from None


def _are_sizes(shape: list[Any]) -> bool:
    return len(shape) <= _MAX_DIMENSIONS and all(type(size) is int and 0 <= size < 2**63 for size in shape)


def _fits(found: Described, expected: Expected) -> bool:
    return (
        found.dtype in expected.dtypes
        and len(found.shape) == len(expected.shape)
        and all(wanted in (None, size) for size, wanted in zip(found.shape, expected.shape, strict=True))
    )


def _shown_expected(expected: Expected | None, found: Described | None) -> str:
    if expected is None:
        return "none"
    dtypes = [found.dtype] if found is not None and found.dtype in expected.dtypes else expected.dtypes
    return f"{' or '.join(dtypes)} [{', '.join('any' if size is None else str(size) for size in expected.shape)}]"


def _no_tensors(path: Path, found: str) -> str:
    return message(path, found, "a safetensors file", "copy it again")
