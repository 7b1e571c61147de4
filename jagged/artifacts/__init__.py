"""Durable files and directories: written whole or not at all, listed in a manifest, verified before they are read.

What the data sets, checkpoints, models and reports of this library are made of. Light: torch and pyarrow are imported where a
file of theirs is read.
"""

from jagged.artifacts.errors import ArtifactError, CheckpointError, errors_as, message, reason, shown, writing
from jagged.artifacts.files import DAY, MANIFEST, new_directory, remove, replacing, replacing_files, sweep, write_file
from jagged.artifacts.lock import LOCK, lock
from jagged.artifacts.manifest import Manifest, dump_json, dump_json_lines, read_manifest, unlist, verify, write_manifest
from jagged.artifacts.readers import parse_json, read_arrow, read_bytes, read_json, read_json_lines
from jagged.artifacts.tensors import FLOATS, Described, Expected, read_header, read_tensors, save_tensors

__all__ = [
    "DAY",
    "FLOATS",
    "LOCK",
    "MANIFEST",
    "ArtifactError",
    "CheckpointError",
    "Described",
    "Expected",
    "Manifest",
    "dump_json",
    "dump_json_lines",
    "errors_as",
    "lock",
    "message",
    "new_directory",
    "parse_json",
    "read_arrow",
    "read_bytes",
    "read_header",
    "read_json",
    "read_json_lines",
    "read_manifest",
    "read_tensors",
    "reason",
    "remove",
    "replacing",
    "replacing_files",
    "save_tensors",
    "shown",
    "sweep",
    "unlist",
    "verify",
    "write_file",
    "write_manifest",
    "writing",
]
