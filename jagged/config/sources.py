"""Where values come from: files, and texts of flags and of `--set`."""

from __future__ import annotations

import contextlib
import json
import tomllib
from pathlib import Path
from typing import Any

from jagged.artifacts import errors_as, read_bytes
from jagged.config.section import ConfigError, short

# A configuration has some forty short lines; anything much longer is no configuration, and is refused unread.
_MAX_FILE_BYTES = 16 * 1024


def text_value(text: str, takes: set[type]) -> Any:
    """The text of a flag or of `--set` as a value for an option that takes the given types.

    A TOML literal (`0.2`, `true`, `"quoted"`) means what it says in TOML, any other text is a string. An option that takes
    strings gets the text as it stands, quotes aside, so that an events file may be called `2024`.
    """
    try:
        parsed = tomllib.loads(f"value = {text}")
        value = parsed["value"] if len(parsed) == 1 else text
    except (ValueError, RecursionError):
        value = text
    if str in takes:
        return value if isinstance(value, str) else text
    if isinstance(value, str):
        # Numbers that Python's users write and TOML refuses: `.5`, `1.`, `007`.
        for kind in takes & {int, float}:
            with contextlib.suppress(ValueError):
                return kind(value)
    return value


def read_file(path: Path) -> dict[str, Any]:
    """The values of a TOML or JSON file.

    Raises:
        ConfigError: it cannot be read, or holds something else.
    """
    kind, parse = ("JSON", json.loads) if path.suffix == ".json" else ("TOML", tomllib.loads)
    with errors_as(ConfigError):
        content = read_bytes(path, _MAX_FILE_BYTES)
    try:
        values = parse(content.decode("utf-8"))
    except RecursionError:
        raise ConfigError(f"{path}: found values nested too deeply, expected lines of the form key = value") from None
    except ValueError as error:
        raise ConfigError(f"{path}: cannot be read as {kind}: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: found {short(values)}, expected an object of options")
    return values
