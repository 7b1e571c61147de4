"""The kernels of group-sparse linear layers compile at their tiles for the GPUs we name, without a spill."""

from __future__ import annotations

import pytest

from jagged.ops.group_sparse import configurations
from tests.aot import AMD, AMD_SHARED_BYTES, TARGETS, Resources, compile_kernel
from tests.places import PLACE

pytestmark = pytest.mark.skipif(PLACE.name == "interpret", reason="interpreted kernels are not compiled")

# Of the eighth generation the smaller GPUs, 8.6 and 8.9.
SHARED_BYTES = {80: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, AMD: AMD_SHARED_BYTES}
SIZES = (
    "num_groups", "num_labels", "batch_size", "num_parts", "filled_size", "num_features", "feature_stride", "grad_stride",
    "weight_stride", "sums_stride",
)  # fmt: skip
# What launches find to be multiples of 16: always, and where sizes are such.
ALWAYS = ("filled_size", "feature_stride", "sums_stride")
# Labels of a group and slots: many of both, one step of the matrix instructions, odd ones; in `make test-long` other tiles' too.
SHAPES = [(64, 64), (16, 4), (40, 129)]
SHAPES += [pytest.param(*pair, marks=pytest.mark.long) for pair in ((1, 1), (32, 16), (128, 512), (16, 512), (128, 17), (32, 32))]


def check(used: Resources, arch: int | str, where: str) -> None:
    assert used.spills == 0, f"{where}: {used}"
    assert used.shared_bytes <= SHARED_BYTES[arch], f"{where}: {used}"


@pytest.mark.parametrize("arch", [*TARGETS, AMD])
@pytest.mark.parametrize(("dtype", "itemsize"), [("bf16", 2), ("fp32", 4)])
@pytest.mark.parametrize(("labels", "width"), SHAPES)
@pytest.mark.parametrize("name", ["forward", "weight_gradient", "feature_gradient"])
def test_kernels(arch: int | str, dtype: str, itemsize: int, labels: int, width: int, name: str) -> None:
    from jagged.ops.group_sparse import kernels

    kernel = getattr(kernels, f"group_sparse_{name}_kernel")
    chosen = getattr(configurations, f"{name.removesuffix('_gradient')}_configuration")(labels * 1000, 1000, width, itemsize)
    floats = ("features", "weight", "bias", "logits", "grad", "grad_weight")
    types = {**dict.fromkeys((*floats, "grad_bias"), f"*{dtype}"), **dict.fromkeys(SIZES, "i32"), "sums": "*fp32"}
    types |= {"supports": "*i32", "group_offsets": "*i64"}
    constants = {
        "WIDTH": width, "BLOCK_L": chosen.block_l, "BLOCK_F": chosen.block_f, "BLOCK_B": chosen.block_b, "PRECISION": "ieee",
        "NUM_STAGES": chosen.num_stages, "weight_column_stride": 1, "grad_column_stride": 1,
    }  # fmt: skip
    for without in {"forward": (None, "bias"), "weight_gradient": (None, "grad_bias")}.get(name, (None,)):
        fixed = {key: value for key, value in constants.items() if key in kernel.arg_names}
        if without is not None:
            fixed[without] = None
            # As under autocast, too, and with narrow integers.
            types |= {"grad_weight": "*fp32", "supports": "*i16", "group_offsets": "*i32"}
        signature = {key: types[key] for key in kernel.arg_names if key not in fixed}
        aligned = (*ALWAYS, "grad_stride", "num_features", *(() if width % 16 else ("weight_stride",)))
        divisible = [key for key in aligned if key in signature]
        used = compile_kernel(kernel, signature, fixed, arch=arch, num_warps=chosen.num_warps, divisible=divisible)
        check(used, arch, f"{name}, {labels} labels x {width} {dtype}, without {without}, for {arch}")
