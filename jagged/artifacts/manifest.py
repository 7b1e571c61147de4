"""Directories whose every byte is accounted for: a list of files with sizes and SHA-256, verified before anything is read."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jagged.artifacts.errors import ArtifactError, message, shown
from jagged.artifacts.files import MANIFEST, write_file
from jagged.artifacts.readers import parse_json, read_bytes

FORMAT_VERSION = 1
_COPY = "copy it again"
# Smaller files are hashed in less than the two seconds after which a bar is shown.
_QUICK_BYTES = 1 << 26


class Manifest(NamedTuple):
    """What a manifest says.

    Args:
        files: size and SHA-256 by name of file, without the manifest's own.
        content: what the writer has put beside the list.
    """

    files: dict[str, dict[str, Any]]
    content: dict[str, Any]


def write_manifest(
    directory: Path, names: Iterable[str], content: Mapping[str, Any] | None = None, *, bar: bool = False
) -> Manifest:
    """List the named files of a directory that is being filled, and what else is to be kept, in its `manifest.json`.

    Args:
        directory: its files are flushed by who puts it in place.
        names: of the files.
        content: numbers and words beside the list.
        bar: show one where hashing a file takes longer than two seconds.

    Raises:
        OSError: a file cannot be read or the manifest not be written.
    """
    files = {}
    for name in sorted(names):
        path = directory / name
        files[name] = {"size": path.stat().st_size, "sha256": _digest(path, bar)}
    manifest = Manifest(files, dict(content or {}))
    (directory / MANIFEST).write_bytes(_serialise(manifest))
    return manifest


def read_manifest(directory: Path) -> Manifest:
    """Read what a directory's manifest says; the files themselves are not looked at.

    Raises:
        ArtifactError: there is none, or it is damaged.
    """
    return _read(directory / MANIFEST)


def verify(directory: Path, *, exact: bool = True, bar: bool = False) -> Manifest:
    """Check every file that a directory's manifest lists, and that nothing else is there.

    Args:
        directory: a directory with a `manifest.json`.
        exact: refuse files and folders that are not listed.
        bar: show one where hashing a file takes longer than two seconds.

    Raises:
        ArtifactError: a missing, extra, short, long or changed file, an unusable manifest, or a name in it that is no plain
            file name; the message names the file.
    """
    manifest = _read(directory / MANIFEST)
    for name, expected in manifest.files.items():
        path = directory / name
        try:
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):
                raise ArtifactError(message(path, "no regular file", f"the one that {MANIFEST} lists", _COPY))
            if status.st_size != expected["size"]:
                raise ArtifactError(_damaged(path, f"{status.st_size} bytes", shown(expected["size"])))
            digest = _digest(path, bar)
        except OSError as error:
            raise ArtifactError(f"{path}: missing or unreadable ({error.strerror}), but listed in {MANIFEST}; {_COPY}") from None
        if digest != expected["sha256"]:
            raise ArtifactError(_damaged(path, f"SHA-256 {digest[:16]}...", f"{shown(expected['sha256'][:16])[1:-1]}..."))
    if exact:
        extra = sorted(set(os.listdir(directory)) - {*manifest.files, MANIFEST})
        if extra:
            raise ArtifactError(f"{directory / extra[0]}: not listed in {MANIFEST}; nothing else belongs in this directory")
    return manifest


def unlist(directory: Path, name: str) -> None:
    """Take a file off the list of a directory that stays whole while that file changes; nothing where it is not listed.

    Raises:
        OSError: the manifest cannot be written.
    """
    try:
        manifest = _read(directory / MANIFEST)
    except ArtifactError:
        # None, or a damaged one: whoever opens the directory will say so.
        return
    if manifest.files.pop(name, None) is not None:
        write_file(directory / MANIFEST, _serialise(manifest))


def dump_json(content: Any) -> bytes:
    """Indented JSON; NaN and infinity are refused, because no other reader takes them."""
    return (json.dumps(content, indent=2, allow_nan=False) + "\n").encode()


def dump_json_lines(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """A JSON object a line; NaN and infinity are refused."""
    return "".join(json.dumps(dict(row), allow_nan=False) + "\n" for row in rows).encode()


def _digest(path: Path, bar: bool) -> str:
    if not bar or path.stat().st_size < _QUICK_BYTES:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    from tqdm import tqdm

    sha = hashlib.sha256()
    with (
        open(path, "rb") as file,
        tqdm(
            total=path.stat().st_size, desc=f"Hashing {path.name}", unit="B", unit_scale=True, delay=2, leave=False, disable=None
        ) as shows,
    ):
        while piece := file.read(1 << 20):
            sha.update(piece)
            shows.update(len(piece))
    return sha.hexdigest()


def _serialise(manifest: Manifest) -> bytes:
    body: dict[str, Any] = {"format_version": FORMAT_VERSION, "files": manifest.files, **manifest.content}
    return dump_json({**body, "sha256": _seal(body)})


def _seal(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _read(path: Path) -> Manifest:
    if not os.path.lexists(path):
        raise ArtifactError(f"{path}: missing: the directory was not written to its end, or is none of this library's")
    raw = read_bytes(path)
    sealed = parse_json(raw, path)
    body = {name: value for name, value in sealed.items() if name != "sha256"}
    try:
        is_whole = sealed.get("sha256") == _seal(body) and raw == dump_json(sealed)
    except (ValueError, RecursionError):
        is_whole = False
    # Datasets of before said "version".
    version, files = body.pop("format_version", body.pop("version", None)), body.pop("files", None)
    if version != FORMAT_VERSION:
        raise ArtifactError(
            message(path, f"format version {shown(version)}", str(FORMAT_VERSION), "write it again with this version of jagged")
        )
    if not isinstance(files, dict):
        raise ArtifactError(_damaged(path, "no list of files", "one"))
    for name, entry in files.items():
        if Path(name).name != name or name in ("", ".", "..", MANIFEST) or "\\" in name or "\0" in name:
            raise ArtifactError(f"{path}: refused: {shown(name)} is no plain file name")
        if not isinstance(entry, dict) or not isinstance(entry.get("size"), int) or not isinstance(entry.get("sha256"), str):
            raise ArtifactError(_damaged(path, f"{shown(name)} without size and SHA-256", "both"))
    if not is_whole:
        raise ArtifactError(_damaged(path, "content that does not fit its own SHA-256", "the manifest as it was written"))
    return Manifest(files, body)


def _damaged(path: Path, found: str, expected: str) -> str:
    return message(f"{path}: damaged", found, expected, _COPY)
