"""Kernels in packages for a GPU: what a program holds of them, their sources, and what they compute."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.export import Dim, ExportedProgram
from torch.fx import Node
from torch.fx.experimental import _config

from jagged import ops
from jagged.ops._shared.device import load_segment
from jagged.ops.attention import decomposed, kernels, packaged, torch_impl
from jagged.ops.attention.spec import Inputs, Options, Outputs
from jagged.ops.decompositions import with_kernels
from tests.aot import TARGETS, compile_kernel
from tests.places import PLACE

LENGTHS, OTHERS, HEADS, WIDTH = (5, 0, 37, 1), (3, 2, 40, 0), 4, 8
#: What changes which arguments of the kernels are None.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 3, "reach": 3, "num_contextual": 2, "prefix": 1, "num_targets": True},
    "reach": {"window": 4, "reach": 2},
    "one key": {"causal": True, "window": 1, "reach": 1},
    "capped": {"softcap": 2.0},
    "grouped": {"causal": True, "key_heads": 2},
    "other keys": {"others": True},
    "pointwise": {"pointwise": True, "causal": True, "num_targets": True},
    "normalized": {"pointwise": True, "normalizer": 7.0, "relative_bias": True},
    "distances": {"relative_bias": True, "causal": True},
    "times": {"time_bias": True, "causal": True},
    "times of others": {"time_bias": True, "relative_bias": True, "others": True, "pointwise": True},
    "pairs": {"pairs": True},
    "dense": {"dense": True},
    "values of another width": {"causal": True, "value_width": 20},
}


def offsets_of(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def call_of(variant: str, device: torch.device) -> tuple[Inputs, Options]:
    asked = dict(VARIANTS[variant])
    generator = torch.Generator().manual_seed(0)

    def randn(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    has_others = asked.pop("others", False)
    q_offsets, k_offsets = offsets_of(LENGTHS), offsets_of(OTHERS if has_others else LENGTHS)
    queries, keys = int(q_offsets[-1]), int(k_offsets[-1])
    key_heads, value_width = asked.pop("key_heads", HEADS), asked.pop("value_width", WIDTH)
    times = {"q_times": 90 * torch.arange(queries) ** 2, **({"k_times": 70 * torch.arange(keys) ** 2} if has_others else {})}
    given: dict[str, Any] = {
        # Views of one tensor, as projections give them.
        "q": randn(queries, 2, HEADS, WIDTH)[:, 1],
        "k": randn(keys, 2, key_heads, WIDTH)[:, 0],
        "v": randn(keys, 2, key_heads, value_width)[:, 1],
        "q_offsets": q_offsets,
        **({"k_offsets": k_offsets} if has_others else {}),
        **({"num_targets": torch.tensor([2, 0, 3, 1])} if asked.pop("num_targets", False) else {}),
        **({"relative_bias": randn(HEADS, 9)} if asked.pop("relative_bias", False) else {}),
        **({"time_bias": randn(HEADS, 20), **times} if asked.pop("time_bias", False) else {}),
    }
    if asked.pop("pairs", False):
        pairs = torch.tensor([0, *(length**2 for length in LENGTHS)]).cumsum(0)
        given |= {"bias": randn(HEADS, int(pairs[-1])), "bias_offsets": pairs}
    if asked.pop("dense", False):
        given["bias"] = randn(len(LENGTHS), HEADS, 40, 40)
    return Inputs(**{name: of.to(device) for name, of in given.items()}), Options(scale=0.3, **asked)


def launch(
    kernel: Any, grid: tuple[int, ...], outputs: Mapping[str, Tensor], *, num_warps: int, num_stages: int = 3, **arguments: Any
) -> dict[str, Tensor]:
    """In place of a node in a graph."""
    written = {name: of.clone() for name, of in outputs.items()}
    kernel[grid](**arguments, **written, num_warps=num_warps, num_stages=num_stages)
    return written


@pytest.mark.skipif(PLACE.name == "cpu", reason="kernels run interpreted, or on a GPU")
@pytest.mark.parametrize("variant", VARIANTS)
def test_kernels_compute_what_the_operator_does(variant: str, place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packaged, "launched", launch)
    x, o = call_of(variant, place.device)
    found = packaged.forward(x, o)
    expected = torch_impl.forward(Inputs(*(None if of is None else of.cpu() for of in x)), o)
    for of, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(of.cpu(), wanted, rtol=1e-4, atol=1e-4)


class Attending(nn.Module):
    def forward(self, rows: Tensor, lengths: Tensor, times: Tensor) -> Tensor:
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        q, k, v = rows.view(-1, 3, HEADS, WIDTH).unbind(1)
        bias = torch.ones(HEADS, 9, device=rows.device)
        first = ops.jagged_attention(q, k, v, offsets, causal=True)
        second = ops.jagged_hstu_attention(q, k, v, offsets, relative_bias=bias, time_bias=bias, times=times)
        return first + second


def traced(dtype: torch.dtype) -> ExportedProgram:
    """What is taken apart of a program on a GPU, which need not be there."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), _config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        long: dict[str, Any] = {"dtype": torch.int64, "device": "cuda"}
        example = torch.empty(7, 3 * HEADS * WIDTH, dtype=dtype, device="cuda"), torch.empty(3, **long), torch.empty(7, **long)
        return ops.decomposed(torch.export.export(Attending(), example, dynamic_shapes=({0: Dim.DYNAMIC},) * 3))


def launches_of(program: ExportedProgram) -> list[Node]:
    return [node for node in program.graph.nodes if node.target is torch.ops.higher_order.triton_kernel_wrapper_functional]


@pytest.mark.skipif(PLACE.name != "cpu", reason="what is traced is the same on all machines")
@pytest.mark.filterwarnings("ignore")
def test_programs_on_a_gpu_launch_kernels() -> None:
    """With grids of sizes that stay free."""
    with with_kernels():
        found = traced(torch.float32)
    targets = [node.target for node in found.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    assert {target.namespace for target in targets} == {"aten"}
    # Nothing is asked of values: no size is unknown before the program runs.
    assert torch.ops.aten._local_scalar_dense.default not in targets
    launches = launches_of(found)
    written = [node.kwargs["tensors_to_clone"] for node in launches]
    assert written == [["output", "lse"], ["wide_relative", "wide_time", "key_split"], ["output"]]
    for node in launches:
        (first, *others), *more = node.kwargs["grid"]
        assert not more
        assert isinstance(first.meta["val"], torch.SymInt)
        assert others == [1 if "wide_time" in node.kwargs["kwargs"] else HEADS, 1]


@pytest.mark.skipif(PLACE.name != "cpu", reason="what is traced is the same on all machines")
@pytest.mark.filterwarnings("ignore")
def test_programs_on_a_gpu_launch_none_unless_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do those of float64, which the kernels do not read."""
    called: list[torch.dtype] = []

    def forward(x: Inputs, o: Options) -> Outputs:
        called.append(x.q.dtype)
        return Outputs(torch.zeros_like(x.q), x.q.new_zeros(HEADS, x.q.shape[0]))

    monkeypatch.setattr(decomposed, "forward", forward)
    assert not launches_of(traced(torch.float32))
    with with_kernels():
        assert not launches_of(traced(torch.float64))
    assert called == [torch.float32, torch.float32, torch.float64, torch.float64]


@pytest.mark.skipif(PLACE.name != "cpu", reason="what is traced is the same on all machines")
def test_dropout_is_refused_as_without_kernels() -> None:
    x, o = call_of("plain", PLACE.device)
    message = "dropout_p: an exported program has no dropout; export the model in eval mode"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        packaged.forward(x._replace(dropout_seed=torch.zeros(1, dtype=torch.int64)), o)


def typed(kernel: Any, constants: Mapping[str, Any], wide: str, real: str) -> dict[str, str]:
    """Types of a kernel's arguments, as the compiler of a package gives them."""
    pointers = {
        **dict.fromkeys(("offsets", "q_times", "k_times", "key_times", "key_offsets", "key_split", "query_offsets"), "*i64"),
        **dict.fromkeys(("query", "key", "value", "output", "lse", "relative_bias", "time_bias"), "*fp32"),
        **dict.fromkeys(("relative", "of_time", "wide_relative", "wide_time"), "*fp32"),
        **dict.fromkeys(("num_samples", "total", "key_total"), wide),
        **dict.fromkeys(("scale", "normalizer", "inverse_scale", "cap_factor"), real),
    }
    return {name: pointers.get(name, "i32") for name in kernel.arg_names if name not in constants}


def written_out(kernel: Any, folder: Path) -> Any:
    """The kernel of the source that Inductor writes of it."""
    from torch._inductor.codegen import wrapper

    source = wrapper.user_defined_triton_kernel_transitive_closure_source_code(kernel)
    file = folder / f"{kernel.__name__}_{len(source)}.py"
    file.write_text(f"import triton\nimport triton.language as tl\n\n@triton.jit\n{source}")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, kernel.__name__)


FORWARD = {
    **dict.fromkeys(("key_offsets", "num_targets", "window", "reach", "num_contextual", "prefix", "bias", "bias_offsets")),
    "IS_CAUSAL": True, "GROUP": 1, "APART": False, "HEAD_DIM": 16, "VALUE_DIM": 16, "BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_D": 16,
    "BLOCK_DV": 16, "INPUT_PRECISION": "ieee",
}  # fmt: skip
PLAIN = dict.fromkeys(("relative_bias", "time_bias", "q_times", "k_times"))
COMPILED: dict[str, tuple[Any, dict[str, Any]]] = {
    "softmax": (kernels.packaged_forward_kernel, {**FORWARD, **PLAIN}),
    "pointwise": (kernels.packaged_forward_kernel, {**FORWARD, "lse": None, "cap_factor": None}),
    "biases": (kernels.packaged_biases_kernel, {"query_times": None, "query_split": None, "BLOCK": 256}),
}


@pytest.mark.skipif(PLACE.name != "cpu", reason="ahead of time")
@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("name", COMPILED)
def test_written_sources_compile(name: str, arch: int, tmp_path: Path) -> None:
    """For sizes of 32 and 64 bits, and floats of 32 and 64."""
    kernel, constants = COMPILED[name]
    with with_kernels():
        alone = written_out(kernel, tmp_path)
    for wide, real in (("i32", "fp32"), ("i64", "fp64")):
        assert compile_kernel(alone, typed(kernel, constants, wide, real), constants, arch=arch, num_warps=8).registers > 0


@pytest.mark.skipif(PLACE.name != "cpu", reason="ahead of time")
def test_sources_are_written_whole_only_meanwhile(tmp_path: Path) -> None:
    from torch._inductor.codegen import wrapper

    before = wrapper.user_defined_triton_kernel_transitive_closure_source_code
    kernel = kernels.packaged_forward_kernel
    assert "Sample = namedtuple('Sample', " not in before(kernel)
    with with_kernels():
        whole = wrapper.user_defined_triton_kernel_transitive_closure_source_code(kernel)
    assert whole.startswith(before(kernel))
    assert "Sample = namedtuple('Sample', " in whole
    assert wrapper.user_defined_triton_kernel_transitive_closure_source_code is before
    # What has no named tuples is left as it is.

    with with_kernels():
        assert wrapper.user_defined_triton_kernel_transitive_closure_source_code(load_segment) == before(load_segment)
