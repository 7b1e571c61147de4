"""The interpreter of the tests, which leaves work out, against Triton's own."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.ops.families import FAMILIES
from tests.places import PLACE, Place
from tests.strategies import jagged_of

pytestmark = pytest.mark.skipif(PLACE.name != "interpret", reason="says something of the interpreter alone")


@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_compute_the_same_bits(place: Place, family: str) -> None:
    from tests.interpreter import as_triton_has_it

    step = FAMILIES[family](jagged_of((3, 0, 20, 1)), torch.bfloat16, 20)
    ours = step.run()
    with as_triton_has_it():
        theirs = step.run()
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def test_types_are_the_same(place: Place) -> None:
    """Also those that no kernel of ours has, and what is refused."""
    import triton.language as tl
    from triton.language import core
    from triton.runtime.interpreter import _get_np_dtype, interpreter_semantic

    from tests.interpreter import as_triton_has_it

    scalars = [core.dtype(name) for name in core.dtype.SINT_TYPES + core.dtype.UINT_TYPES + core.dtype.FP_TYPES]

    def found() -> list[object]:
        results: list[object] = []
        for a, b in itertools.product(scalars, scalars):
            for a_is_scalar, b_is_scalar, division in itertools.product((False, True), repeat=3):
                try:
                    results.append(interpreter_semantic.computation_type_impl(a, a_is_scalar, b, b_is_scalar, division))
                except TypeError as error:
                    results.append(str(error))
            results.append(a == b)
        for element in (*scalars, core.pointer_type(tl.int8), core.pointer_type(tl.int8, 2)):
            blocks = [core.block_type(element, shape) for shape in ([4], [2, 8], [core.constexpr(2), 8], core.tuple([4]))]
            for kind in (element, *blocks):
                value = core.tensor(None, kind)
                results.append((str(kind), str(value.shape), value.numel.value, str(value.dtype), _get_np_dtype(kind)))
            results.append([[a == b for b in (element, *blocks)] for a in (element, *blocks)])
        for shape in ([], [3], [2.0], [4.0], (4,), [1 << 21]):
            with pytest.raises((TypeError, ValueError, AssertionError)) as refused:
                core.block_type(tl.int32, shape)
            results.append(str(refused.value))
        return results

    ours = found()
    with as_triton_has_it():
        theirs = found()
    assert [str(x) for x in ours] == [str(x) for x in theirs]
