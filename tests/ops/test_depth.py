"""What every op family must keep up for long: the same bits each time, replays of a captured graph, memory that stays flat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from jagged.ops._shared.launch import LAUNCHERS
from tests.conftest import LONG
from tests.graphs import captured
from tests.memory import Flat
from tests.ops.families import FAMILIES, kernels, small_steps
from tests.places import ONE_ORDER, PLACE, Place
from tests.strategies import jagged_of

ON_GPU = pytest.mark.gpu
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
REPEATS = {"cpu": (20, 1_000), "interpret": (0, 0), "gpu": (1_000, 10_000)}[PLACE.name][LONG]
# On a GPU about a thousand programs of each kernel, in waves over all multiprocessors.
LENGTHS = {
    "cpu": (40, 0, 3, 90),
    "interpret": (5, 0, 40),
    "gpu": tuple(length * repeat for repeat in range(1, 25) for length in (0, 1, 17, 64, 33)),
}[PLACE.name]
# Four samples of 200 rows in all: the rows of the first three fall from 100 to 30 and rise to 140. One of the three is empty and
# the others are no shorter than what truncation keeps, so the number of kept rows stands.
REPLAYS = ((60, 0, 40, 100), (0, 30, 15, 155), (15, 0, 15, 170), (0, 90, 50, 60))
STEPS = {"cpu": (200, 2_000), "gpu": (2_000, 2_000)}


def elements_that_differ(run: Callable[[], Sequence[Tensor]], repeats: int) -> int:
    """Compare the bits of each repeat with the first one's, on the device; one synchronisation, at the end."""
    first = [_bits(x) for x in run()]
    different = torch.zeros((), dtype=torch.int64, device=PLACE.device)
    for _ in range(repeats):
        for again, expected in zip(run(), first, strict=True):
            different += (_bits(again) != expected).sum()
    return int(different)


def _bits(x: Tensor) -> Tensor:
    return x.reshape(-1).view({2: torch.int16, 4: torch.int32}[x.dtype.itemsize])


@ONE_ORDER
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_repeats_are_bit_for_bit_equal(place: Place, family: str, dtype: torch.dtype) -> None:
    # As users run it: the mode would also replace what PyTorch's own operations do by default.
    torch.use_deterministic_algorithms(False)
    step = FAMILIES[family](jagged_of(LENGTHS), dtype, 64)
    assert elements_that_differ(step.run, REPEATS) == 0


@ON_GPU
def test_sums_by_atomics_are_seen_to_differ(place: Place) -> None:
    """The comparison above finds what it looks for."""
    torch.use_deterministic_algorithms(False)
    values = torch.randn(1 << 18, device=place.device)
    index = torch.randint(64, values.shape, device=place.device)
    assert elements_that_differ(lambda: [values.new_zeros(64).index_add(0, index, values)], 1_000) > 0


@ON_GPU
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_replays_with_lengths_going_down_then_up(place: Place, family: str, dtype: torch.dtype) -> None:
    batch = jagged_of(REPLAYS[0])
    step = FAMILIES[family](batch, dtype, 64)
    graph, results = captured(step.run)
    for lengths in REPLAYS:
        batch.offsets.copy_(jagged_of(lengths).offsets)
        graph.replay()
        for got, want in zip(results, step.run(), strict=True):
            assert torch.equal(got, want), f"{lengths}"


@pytest.mark.skipif(PLACE.name == "interpret", reason="the interpreter's own memory is not ours")
@pytest.mark.parametrize("family", FAMILIES)
def test_memory_is_flat(place: Place, family: str) -> None:
    """No step leaves a byte on a GPU; on the CPU see `Flat` for what is seen."""
    scale = 8 if place.name == "gpu" else 1
    batches = [jagged_of((7 * k * scale, 0, 11 * (5 - k) * scale, k)) for k in range(5)]

    def run(number: int) -> None:
        FAMILIES[family](batches[number % len(batches)], DTYPES[number % 2], 64).run()

    Flat(place).check(run, steps=STEPS[place.name][LONG], cycle=10)


@pytest.mark.skipif(PLACE.name == "interpret", reason="the interpreter's own memory is not ours")
def test_a_leak_is_seen(place: Place) -> None:
    kept: list[Tensor] = []
    flat = Flat(place)
    # Twice what is just seen: the rest of the process may give some back.
    elements = max(1, 2 * flat.allowed // 160 // 4)

    def leak(number: int) -> None:
        kept.append(torch.ones(elements, device=place.device))

    with pytest.raises(AssertionError, match="grew by"):
        flat.check(leak, steps=200, cycle=10)


@pytest.mark.skipif(PLACE.name == "cpu", reason="launches Triton kernels")
def test_small_steps_launch_every_kernel(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs under compute-sanitizer leaves no kernel out: a new family's is asked for until the family is in `FAMILIES`."""
    launched = set()

    found = kernels()
    assert found

    def record(kernel: Any) -> None:
        launched.update({kernel.__name__} & set(found))

    # What is new, or interpreted, is launched by Triton; what is known, by the function that finds it.
    for kind in {type(getattr(module, name)) for name, module in found.items()}:

        def launched_by_triton(kernel: Any, grid: object, launch: Any = kind.__getitem__) -> Any:
            record(kernel)
            return launch(kernel, grid)

        monkeypatch.setattr(kind, "__getitem__", launched_by_triton)

    class Recorded(dict[Any, Any]):
        def __init__(self, kernel: Any, compiled: dict[Any, Any]) -> None:
            super().__init__(compiled)
            self.kernel = kernel

        def get(self, key: Any, default: Any = None) -> Any:
            record(self.kernel)
            return super().get(key, default)

    for launch in LAUNCHERS:
        if "_compiled" in launch.__globals__:
            monkeypatch.setitem(launch.__globals__, "_compiled", Recorded(launch.kernel, launch.compiled))
    for step in small_steps():
        step.run()
    assert launched == set(found)
