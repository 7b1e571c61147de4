"""Every op family under compute-sanitizer's four tools: no report of ours, and one of each bug planted for the tool."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton

from tests.ops.families import FAMILIES, kernels
from tests.ops.sanitized import FINISHED, PLANTED

ROOT = Path(__file__).parents[2]
SECONDS = 540


def sanitizer() -> str | None:
    """Return the path of compute-sanitizer, from the CUDA toolkit or from the package nvidia-cuda-sanitizer-api."""
    folders = [Path(os.environ[name]) / "bin" for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    folders.append(Path("/usr/local/cuda/bin"))
    packages = importlib.util.find_spec("nvidia")
    folders += [Path(folder, "cu13/bin") for folder in packages.submodule_search_locations or ()] if packages else []
    return shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), *map(str, folders)]))


def reports(output: str) -> list[str]:
    """Join the lines of each report; of a report all but the first are indented."""
    found: list[str] = []
    for line in output.splitlines():
        if (text := line.removeprefix("========= ")) != line:
            if text.startswith("   ") and found:
                found[-1] += " " + text.strip()
            else:
                found.append(text.strip())
    return found


def of_kernel(name: str, output: list[str]) -> list[str]:
    """Return the reports of one kernel. Racecheck's warnings are of threads of one warp and are left out."""
    return [report for report in output if re.search(rf"\b{name}\b", report) and not report.startswith("Warning")]


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("tool", PLANTED)
def test_families_are_clean_and_planted_bugs_are_found(tool: str) -> None:
    program = sanitizer()
    if program is None:
        pytest.skip(
            "compute-sanitizer was found neither in PATH, $CUDA_HOME/bin, /usr/local/cuda/bin nor beside the CUDA packages"
        )
    options = ["--tool", tool, "--target-processes", "application-only", "--show-backtrace", "no", "--print-limit", "0"]
    options += ["--demangle", "simple", "--destroy-on-device-error", "kernel"]
    if tool == "memcheck":
        # Without a gap, what lies past the end of a tensor is often the next one. PyTorch tries calls that may fail.
        options += ["--padding", "512", "--report-api-errors", "no"]
    # Tensors straight from the driver: inside the caching allocator's segments nothing is out of bounds or uninitialised.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    # JAGGED_SANITIZER_FAMILIES names some families, while one is worked at.
    families = os.environ.get("JAGGED_SANITIZER_FAMILIES", "").split()
    command = [program, *options, sys.executable, "-m", "tests.ops.sanitized", tool, *families]
    output = run(command, environment)
    found = reports(output)
    # Racecheck knows no barriers in shared memory, by which the kernels for Hopper hand tiles on: each tile would be a race.
    ours = {name: of_kernel(name, found) for name in kernels(for_hopper=tool != "racecheck")}
    planted = {name: of_kernel(name, found) for name in PLANTED[tool]}
    _add_to_summary(tool, program, families or list(FAMILIES), output, ours, planted)
    end = "\n".join(output.splitlines()[-40:])
    assert FINISHED in output, f"the families did not come to their end:\n{end}"
    assert not any(ours.values()), "\n".join(report for of_one in ours.values() for report in of_one[:5])
    assert all(planted.values()), f"{tool} did not report every bug of {list(planted)}:\n{end}"


def run(command: list[str], environment: dict[str, str]) -> str:
    """Return what a command prints, up to its end or to the end of its time."""
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            return process.communicate(timeout=SECONDS)[0]
        except subprocess.TimeoutExpired:
            # The tool's own end would leave the program it runs, and the pipe, open.
            os.killpg(process.pid, signal.SIGKILL)
            return process.communicate()[0] + f"\nended after {SECONDS} s"


def test_reports_are_read() -> None:
    """The tools' own formats."""
    found = reports("""
========= COMPUTE-SANITIZER
every family ran
========= Invalid __global__ read of size 4 bytes
=========     at planted_read_kernel+0x70 in sanitized.py:28
=========     by thread (63,0,0) in block (0,0,0)
=========     Access to 0x7f3c7ec00100 is out of bounds
=========
========= Error: Race reported between Write access at attention_forward_kernel+0x550 in kernels.py:100
=========     and Read access at attention_forward_kernel+0x580 in kernels.py:107 [65536 hazards]
=========
========= Warning: Race reported between Write access at attention_forward_kernel+0x550
========= Barrier error detected. Divergent thread(s) in block.
=========     at planted_barrier_kernel+0x50
========= Uninitialized __global__ memory read of size 4 bytes
=========     at void at::native::reduce_kernel+0x88
========= ERROR SUMMARY: 4 errors
""")
    names = ("planted_read_kernel", "attention_forward_kernel", "planted_barrier_kernel", "read_kernel")
    assert [len(of_kernel(name, found)) for name in names] == [1, 1, 1, 0]


def _add_to_summary(
    tool: str, program: str, families: list[str], output: str, ours: dict[str, list[str]], planted: dict[str, list[str]]
) -> None:
    """Add a tool's figures to the JSON file that JAGGED_SANITIZER_SUMMARY names."""
    if not (name := os.environ.get("JAGGED_SANITIZER_SUMMARY")):
        return
    path = Path(name)
    summary = json.loads(path.read_text()) if path.exists() else {}
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[-1]
    summary[tool] = {
        "gpu": torch.cuda.get_device_name(),
        "versions": {"compute-sanitizer": version, "torch": torch.__version__, "triton": triton.__version__},
        "families": sorted(families),
        "families_ran": FINISHED in output,
        "kernels": {"expected": "no report", "reports": {kernel: len(found) for kernel, found in ours.items()}},
        "planted": {"expected": "a report of each", "reports": {kernel: len(found) for kernel, found in planted.items()}},
        "summary": [line.removeprefix("========= ") for line in output.splitlines() if " SUMMARY: " in line],
    }
    path.write_text(json.dumps(summary, indent=2) + "\n")
