"""Files of values."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from jagged.artifacts import errors_as, read_bytes
from jagged.config.section import ConfigError, short

# A configuration has some forty short lines; anything much longer is no configuration, and is refused unread.
_MAX_FILE_BYTES = 16 * 1024


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
