"""Ahead-of-time compilation of kernels for GPUs that are not there: registers, spills and shared memory of each."""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

TARGETS = (80, 90, 100)
# AMD's MI300. What is claimed of it is that kernels compile and fit into its shared memory: nobody has run them there.
AMD = "gfx942"
AMD_SHARED_BYTES = 64 * 1024
# Tiles are chosen with Triton 3.7. The most bytes that kernels are known to spill beside those of it under 3.6, which comes with
# PyTorch 2.11, at the tiles that `make test` compiles. Of those in `make test-long` more spill there, and fail.
SPILLS_OF_TRITON_3_6 = {
    "attention_backward_dkv_kernel": 8,
    "copy_part_kernel": 32,
    "group_sparse_loss_backward_kernel": 300,
    "group_sparse_weight_gradient_kernel": 8,
    "jagged_dense_bmm_kernel": 248,
    "linear_cross_entropy_logit_gradients_kernel": 16,
    "sampled_directions_kernel": 48,
    "sampled_forward_blocks_kernel": 12,
    "sampled_forward_rows_kernel": 24,
}


@dataclass(frozen=True)
class Resources:
    registers: int
    spills: int  # in bytes, less those of Triton 3.6 alone
    is_serialised: bool
    shared_bytes: int
    # PTX, or AMD's assembly.
    assembly: str = field(repr=False)


def compile_kernel(
    kernel: Any,
    signature: dict[str, str],
    constants: dict[str, Any],
    *,
    arch: int | str,
    num_warps: int = 4,
    num_stages: int = 3,
    divisible: Collection[str] = (),
    max_registers: int | None = None,
) -> Resources:
    """Compile a Triton or Gluon kernel for `sm_<arch>`, or for an AMD GPU by its name, and read what the assembler says of it.

    `signature` maps every run-time argument to its Triton type (`"*bf16"`, `"i32"`, `"fp32"`); `constants` the constexpr
    ones; `divisible` names integers that are multiples of 16, which a launch finds out; `max_registers` is for NVIDIA's alone.
    """
    import triton
    from triton.backends import backends
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    if isinstance(arch, str) and "amd" not in backends:
        pytest.skip("this Triton was built without its AMD backend")

    names = kernel.arg_names
    missing = set(names) - set(signature) - set(constants)
    assert not missing, f"{kernel.__name__}: no type for {sorted(missing)}"
    full = {name: "constexpr" if name in constants else signature[name] for name in names}
    indexes = {(names.index(name),): value for name, value in constants.items()}
    # Tensors come from the allocator at 16 bytes and more, which Triton learns from the arguments at run time.
    attributes = {
        (names.index(name),): [["tt.divisibility", 16]] for name, kind in full.items() if kind[0] == "*" or name in divisible
    }
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(fn=kernel, signature=full, constexprs=indexes, attrs=attributes)
    target = GPUTarget("hip", arch, 64) if isinstance(arch, str) else GPUTarget("cuda", arch, 32)
    options: dict[str, Any] = {"num_warps": num_warps, "num_stages": num_stages}
    if max_registers is not None and isinstance(arch, int):
        options["maxnreg"] = max_registers
    with _without_cubin():
        compiled = triton.compile(source, target=target, options=options)
    assembly = compiled.asm["amdgcn" if isinstance(arch, str) else "ptx"]
    registers, spills, is_serialised = _read_amdgcn(assembly) if isinstance(arch, str) else _assemble_ptx(assembly, arch)
    if triton.__version__.startswith("3.6."):
        spills = max(0, spills - SPILLS_OF_TRITON_3_6.get(kernel.__name__, 0))
    return Resources(registers, spills, is_serialised, compiled.metadata.shared, assembly)


@contextlib.contextmanager
def _without_cubin() -> Iterator[None]:
    """Let Triton end at PTX, which is assembled but once, by `_assemble_ptx`; in a cache of its own, as nothing there can run."""
    from triton import knobs
    from triton.backends.nvidia.compiler import CUDABackend

    with pytest.MonkeyPatch.context() as patch, knobs.cache.scope():
        patch.setattr(CUDABackend, "make_cubin", lambda *given: b"")
        knobs.cache.dir = f"{knobs.cache.dir}-ptx"
        yield


def _assemble_ptx(ptx: str, arch: int) -> tuple[int, int, bool]:
    """Return registers of a thread, bytes of its spills, and whether products that could run together wait for one another."""
    from triton.backends.nvidia.compiler import get_ptxas

    suffix = "a" if arch >= 90 else ""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        report = subprocess.run(
            [get_ptxas(arch).path, "-v", f"--gpu-name=sm_{arch}{suffix}", str(source), "-o", str(source.with_suffix(".cubin"))],
            capture_output=True,
            text=True,
            check=True,
        ).stderr
    spills = sum(int(number) for number in re.findall(r"(\d+) bytes spill (?:stores|loads)", report))
    return int(re.findall(r"Used (\d+) registers", report)[-1]), spills, "wgmma.mma_async instructions are serialized" in report


def _read_amdgcn(assembly: str) -> tuple[int, int, bool]:
    """Return vector registers of a thread, accumulators included, and bytes of its spills."""
    count = {name: int(number) for name, number in re.findall(r"\.(\w+_count): +(\d+)", assembly)}
    return count["vgpr_count"], 4 * count["vgpr_spill_count"], False
