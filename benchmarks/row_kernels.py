"""What benchmarks of kernels over many rows share: their command line, how cases are timed, told and saved."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.common import ROOT, environment, replay_us, save, seconds_of, spread

#: Of a device and the speed of a copy in GB/s: both ways' times by part, and `times`.
Case = Callable[[str, float], dict[str, Any]]


def time_of(work: Callable[[], Any], device: str) -> dict[str, Any]:
    """Microseconds, by replays on a GPU."""
    return replay_us(work) if device == "cuda" else spread([1e6 * seconds_of(work)[0] for _ in range(3)])


def times(row: Mapping[str, Any], parts: tuple[str, ...]) -> dict[str, float]:
    """How often PyTorch takes our time, by part."""
    return {of: row["torch"][of]["median"] / row["jagged"][of]["median"] for of in parts}


def main(
    name: str,
    document: str | None,
    cases: Callable[[bool], Mapping[str, Case]],
    sweep: Callable[[], None],
    told: Callable[[Any], str],
) -> None:
    """Measure all cases, and save what came out as `name`.

    Args:
        name: of the result.
        document: the module's.
        cases: by name, whether it is a GPU that they are for; the first is also done before, as no backward pass can be captured
            before another one was.
        sweep: prints what `--tiles` asks for.
        told: what else is said of a case.
    """
    parser = argparse.ArgumentParser(description=document, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiles", action="store_true")
    options = parser.parse_args()
    if options.tiles:
        sweep()
        return
    is_cuda = options.device == "cuda"
    facts, found = environment(options.device), {}
    copy, given = facts.get("copy_gb_per_s", 10.0), cases(is_cuda)
    next(iter(given.values()))(options.device, copy)
    for case, measured in given.items():
        found[case] = row = measured(options.device, copy)
        parts = [f"{of} {row['jagged'][of]['median']:.1f} us, {row['times'][of]:.2f} times" for of in row["times"]]
        print(f"{case}: {', '.join(parts)}{told(row)}", flush=True)
    if is_cuda:
        print(f"saved in {save(name, {'environment': facts, 'cases': found}).relative_to(ROOT)}")
