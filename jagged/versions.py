"""Which versions are installed, whether they fit one another, and the line that mends it.

FBGEMM-GPU 1.X is built for torch 2.(X+5) and TorchRec 1.X for both; no package's metadata says so, and pip installs what does not
fit. Nothing here imports the packages it speaks of: a mismatched one may fail, or crash, on import.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shlex
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

TORCH, TORCHREC, FBGEMM = "2.13.0", "1.8.0", "1.8.0"
SUPPORTED_TORCH_MINORS = range(11, 14)

# Packages whose modules and distributions have their name.
_ONE_NAME = ("numpy", "pyarrow", "pydantic", "safetensors", "tqdm", "cyclopts", "matplotlib", "jinja2", "psutil", "duckdb")
# Package: the module it provides, and the distributions that may bring it.
_PACKAGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "torch": ("torch", ("torch",)),
    "torchrec": ("torchrec", ("torchrec", "torchrec-cpu", "torchrec-nightly", "torchrec-nightly-cpu")),
    "fbgemm-gpu": ("fbgemm_gpu", ("fbgemm-gpu", "fbgemm-gpu-cpu", "fbgemm-gpu-nightly", "fbgemm-gpu-nightly-cpu")),
    "triton": ("triton", ("triton", "pytorch-triton", "triton-rocm")),
    **{name: (name, (name,)) for name in _ONE_NAME},
    "tensorboard": ("tensorboard", ("tensorboard",)),
}
# Triton is needed on a GPU alone, where torch's own wheel brings it.
OPTIONAL = frozenset({"triton", "tensorboard"})
_TRIPLE = ("torch", "torchrec", "fbgemm-gpu")
UNKNOWN = "unknown"


class VersionWarning(UserWarning):
    """Installed packages do not fit one another."""


@dataclass(frozen=True)
class Problem:
    """What does not fit, and the command that mends it."""

    message: str
    cure: str

    def __str__(self) -> str:
        return f"{self.message}; run: {self.cure}"


def installed() -> dict[str, str]:
    """Version by distribution, of those that matter here; "unknown" for a package that is on the path without metadata."""
    versions = {}
    for package, (module, distributions) in _PACKAGES.items():
        found = {name: version for name in distributions if (version := _version(name)) is not None}
        if not found and importlib.util.find_spec(module) is not None:
            found = {package: UNKNOWN}
        versions.update(found)
    return versions


def by_package(versions: Mapping[str, str]) -> dict[str, tuple[str, str] | None]:
    """(distribution, version) by package, None for one that is not installed."""
    return {
        package: next(((name, versions[name]) for name in distributions if name in versions), None)
        for package, (_, distributions) in _PACKAGES.items()
    }


def problems(versions: Mapping[str, str] | None = None, *, nvidia_gpu: bool | None = None) -> list[Problem]:
    """What is missing or does not fit, with the commands that mend it; nothing where all is well.

    Args:
        versions: version by distribution, by default `installed()`. Nightly and unknown versions are taken on trust.
        nvidia_gpu: whether to propose CUDA builds, by default whether this machine has an NVIDIA driver.
    """
    versions = installed() if versions is None else versions
    nvidia_gpu = has_nvidia_gpu() if nvidia_gpu is None else nvidia_gpu
    found = by_package(versions)
    missing = [package for package in _PACKAGES if found[package] is None and package not in OPTIONAL]
    trio = [package for package in missing if package in _TRIPLE]
    others = [package for package in missing if package not in _TRIPLE]
    result = []
    if trio:
        result.append(Problem(f"{_and(trio)} not installed", repair_command(versions, nvidia_gpu=nvidia_gpu)))
    if others:
        result.append(Problem(f"{_and(others)} not installed", _pip(*others)))
    return result + misfits(versions, nvidia_gpu=nvidia_gpu)


def misfits(versions: Mapping[str, str], *, nvidia_gpu: bool) -> list[Problem]:
    """What is installed of torch, TorchRec and FBGEMM-GPU and does not fit the others."""
    repair = repair_command(versions, nvidia_gpu=nvidia_gpu)
    result = []
    torch = _minor(versions.get("torch"), major=2)
    if torch is not None and torch not in SUPPORTED_TORCH_MINORS:
        low, high = SUPPORTED_TORCH_MINORS[0], SUPPORTED_TORCH_MINORS[-1]
        result.append(Problem(f"torch {versions['torch']} is outside 2.{low} to 2.{high}, which are tested", repair))
    elif torch is not None:
        for name, version in filter(None, map(by_package(versions).get, ("fbgemm-gpu", "torchrec"))):
            minor = _minor(version, major=1)
            if minor is not None and minor != torch - 5:
                result.append(Problem(f"{name} {version} does not fit torch {versions['torch']}, 1.{torch - 5} does", repair))

    uninstall = f"{_python()} -m pip uninstall --yes"
    builds = [name for name in ("fbgemm-gpu", "fbgemm-gpu-cpu") if name in versions]
    if len(builds) == 2:
        message = "fbgemm-gpu and fbgemm-gpu-cpu are both installed and have overwritten each other's files"
        result.append(Problem(message, f"{uninstall} fbgemm-gpu fbgemm-gpu-cpu && {repair}"))
    elif builds == ["fbgemm-gpu"] and versions.get("torch", "").endswith("+cpu"):
        message = f"fbgemm-gpu {versions['fbgemm-gpu']} is built for CUDA, torch {versions['torch']} is not"
        result.append(Problem(message, f"{uninstall} fbgemm-gpu && {repair_command(versions, nvidia_gpu=False)}"))
    return result


def repair_command(versions: Mapping[str, str], *, nvidia_gpu: bool) -> str:
    """The shell line that installs a triple that fits: around the torch that is there if it is supported, else the pinned one."""
    torch = _minor(versions.get("torch"), major=2)
    commands, fbgemm, torchrec = [], FBGEMM, TORCHREC
    if torch is None or torch not in SUPPORTED_TORCH_MINORS:
        commands.append(_pip(f"torch=={TORCH}"))
    elif not TORCH.startswith(f"2.{torch}."):
        fbgemm = torchrec = f"1.{torch - 5}.*"
    if nvidia_gpu:
        commands.append(_pip(f"fbgemm-gpu=={fbgemm}", f"torchrec=={torchrec}"))
    else:
        # TorchRec's metadata asks for the CUDA build of FBGEMM-GPU; its other requirements are named here.
        commands.append(_pip(f"fbgemm-gpu-cpu=={fbgemm}", "tensordict", "torchmetrics==1.0.3", "tqdm", "pyre-extensions"))
        commands.append(_pip("--no-deps", f"torchrec=={torchrec}"))
    return " && ".join(commands)


def missing_module(error: BaseException) -> Problem | None:
    """What to install, if `error` is the failed import of a package that this library uses."""
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return None
    name = error.name.partition(".")[0]
    for package, (module, _) in _PACKAGES.items():
        if module == name:
            trio = package in _TRIPLE
            cure = repair_command(installed(), nvidia_gpu=has_nvidia_gpu()) if trio else _pip(package)
            return Problem(f"{package} is not installed, or not whole", cure)
    return None


def warn_of_problems() -> None:
    """Issue a `VersionWarning` for each misfit among torch, TorchRec and FBGEMM-GPU; for import time."""
    for problem in misfits(installed(), nvidia_gpu=has_nvidia_gpu()):
        warnings.warn(str(problem), VersionWarning, stacklevel=2)


def has_nvidia_gpu() -> bool:
    """Whether this machine shows an NVIDIA driver."""
    return any(Path(path).exists() for path in ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg"))


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _minor(version: str | None, *, major: int) -> int | None:
    """The minor number of a release; None for a version that tells nothing: a nightly's date, "unknown", another major."""
    match = re.match(rf"{major}\.(\d+)(?:\.|$)", version or "")
    return int(match.group(1)) if match and "git" not in (version or "") else None


def _python() -> str:
    return shlex.quote(sys.executable or "python3")


def _pip(*arguments: str) -> str:
    return f"{_python()} -m pip install {shlex.join(arguments)}"


def _and(names: list[str]) -> str:
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}"
