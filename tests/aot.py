"""Ahead-of-time compilation of kernels for GPUs that are not there: registers, spills and shared memory of each."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TARGETS = (80, 90, 100)


@dataclass(frozen=True)
class Resources:
    registers: int
    spills: int
    shared_bytes: int


def compile_kernel(
    kernel: Any,
    signature: dict[str, str],
    constants: dict[str, Any],
    *,
    arch: int,
    num_warps: int = 4,
    num_stages: int = 3,
    divisible: Collection[str] = (),
) -> Resources:
    """Compile a `@triton.jit` kernel for `sm_<arch>` and read what ptxas says of it.

    `signature` maps every run-time argument to its Triton type (`"*bf16"`, `"i32"`, `"fp32"`); `constants` the constexpr
    ones; `divisible` names integers that are multiples of 16, which a launch finds out.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.compiler import ASTSource

    names = kernel.arg_names
    missing = set(names) - set(signature) - set(constants)
    assert not missing, f"{kernel.__name__}: no type for {sorted(missing)}"
    full = {name: "constexpr" if name in constants else signature[name] for name in names}
    indexes = {(names.index(name),): value for name, value in constants.items()}
    # Tensors come from the allocator at 16 bytes and more, which Triton learns from the arguments at run time.
    attributes = {
        (names.index(name),): [["tt.divisibility", 16]] for name, kind in full.items() if kind[0] == "*" or name in divisible
    }
    source = ASTSource(fn=kernel, signature=full, constexprs=indexes, attrs=attributes)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", arch, 32), options={"num_warps": num_warps, "num_stages": num_stages}
    )
    suffix = "a" if arch >= 90 else ""
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder) / "kernel.ptx"
        ptx.write_text(compiled.asm["ptx"])
        report = subprocess.run(
            [get_ptxas(arch).path, "-v", f"--gpu-name=sm_{arch}{suffix}", str(ptx), "-o", str(ptx.with_suffix(".cubin"))],
            capture_output=True,
            text=True,
            check=True,
        ).stderr
    registers = int(re.findall(r"Used (\d+) registers", report)[-1])
    spills = sum(int(number) for number in re.findall(r"(\d+) bytes spill (?:stores|loads)", report))
    return Resources(registers, spills, compiled.metadata.shared)
