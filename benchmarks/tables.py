"""Write the tables of the operators' pages from the result files alone: `docs/ops/_benchmarks/<page>.md`, which pages include.

python -m benchmarks.tables
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT

FOLDER = ROOT.parent / "docs" / "ops" / "_benchmarks"
PAGES = {
    "bmm": ("jagged_dense_bmm", "jagged_jagged_bmm"),
    "pair_bmm": ("jagged_jagged_bmm_jagged_out", "array_jagged_bmm_jagged_out"),
    "softmax": ("jagged_softmax", "jagged2_softmax"),
    "conversion": ("jagged_to_dense", "dense_to_jagged", "jagged_concat", "jagged_split", "jagged_truncate"),
    "elementwise": ("jagged_dense_add", "jagged_dense_mul", "jagged_pairwise_difference"),
}
PEERS = {"padded": "padded", "sll": "FBGEMM `sll`", "fbgemm": "FBGEMM C++"}
WAYS = {
    "forward": "forward",
    "backward": "backward",
    "forward_backward": "forward and backward",
    "forward_cold": "forward, cold cache",
    "backward_cold": "backward, cold cache",
}


def page(result: dict[str, Any], operators: tuple[str, ...]) -> str:
    """Markdown of the operators' parts of a result file: times, memory, host time, and where a peer is faster."""
    blocks = [_machine(result["environment"])]
    for title, part in result.items():
        if title in ("table", "cpu"):
            blocks += [
                _sizes(part),
                *_times(part, operators, ("forward", "backward" if title == "table" else "forward_backward")),
            ]
    if "table" in result:
        blocks += ["Caches cold, microseconds:", *_times(result["table"], operators, ("forward_cold", "backward_cold"))]
        blocks += _costs(result["table"], operators)
    if "host" in result:
        blocks += ["Host time of an eager call on a small batch, microseconds:"]
        blocks += _times(result["host"], operators, ("forward", "forward_backward"))
    if slower := list(where_not(result, operators)):
        blocks += ["Where a peer takes less time, and how many times as long we take:", "\n".join(f"- {line}" for line in slower)]
    else:
        blocks += ["No peer that is right takes less time at any size measured."]
    return "\n\n".join(blocks) + "\n"


def where_not(result: dict[str, Any], operators: tuple[str, ...]) -> Iterator[str]:
    """Every operator, size and direction in which a peer takes less time than we do, with those peers."""
    for title, part in result.items():
        for key, name, row in _rows(part, operators):
            place = f"{title.replace('_', ' ')} {key}" if title not in ("table", "cpu") else key
            for way, words in WAYS.items():
                ours = _median(row, "jagged", way)
                times = {label: _median(row, who, way) for who, label in PEERS.items()}
                faster = {label: time for label, time in times.items() if ours and time is not None and time < ours}
                if ours and faster:
                    peers = ", ".join(f"{label} {_us(time)} ({ours / time:.2f} times)" for label, time in faster.items())
                    yield f"`{name}`, {place}, {words}: {_us(ours)} µs; {peers}"


def _machine(facts: dict[str, Any]) -> str:
    speed = f", copy {facts['copy_gb_per_s']:,.0f} GB/s" if "copy_gb_per_s" in facts else ""
    processor = f" ({facts['processor']})" if facts["device"].startswith("CPU") else ""
    return (
        f"**{facts['device']}**{processor}{speed}; torch {facts['torch']}, Triton {facts['triton']}, "
        f"FBGEMM-GPU {facts['fbgemm_gpu'] or 'not installed'}."
    )


def _sizes(part: dict[str, Any]) -> str:
    size = next(iter(part["sizes"].values()))
    return (
        f"{size['samples']:,} samples, lengths {size['lengths']} ({size['rows']:,} rows, {size['pairs']:,} pairs), "
        f"D = {size['D']:,}, T = {size['T']}; microseconds, {'caches warm, ' if 'forward_cold' in str(part) else ''}medians:"
    )


def _times(part: dict[str, Any], operators: tuple[str, ...], ways: tuple[str, str]) -> list[str]:
    """A table of times, forward / backward, and notes on what is missing or timed otherwise."""
    notes: list[str] = []
    whose = {"jagged": "jagged", **PEERS, "copy": "copy of as many bytes"}
    rows = list(_rows(part, operators))
    present = [who for who in whose if any(who in row for _, _, row in rows)]
    lines = [
        f"| operator | dtype | {' | '.join(whose[who] for who in present)} |",
        f"|---|---|{'---:|' * len(present)}",
    ]
    for dtype, name, row in rows:
        cells = [" / ".join(_cell(row.get(who, {}), way, notes) for way in ways) if who in row else "" for who in present]
        lines.append(f"| `{name}` | {dtype} | {' | '.join(cells)} |")
    lines.append(f"\nEach {' / '.join(WAYS[way] for way in ways)}.")
    return ["\n".join(lines), *(["\n".join(f"{number}. {note}" for number, note in enumerate(notes, 1))] if notes else [])]


def _cell(of: dict[str, Any], way: str, notes: list[str]) -> str:
    figure = of.get(way) or of.get(way.removesuffix("_cold")) or {}
    # A backward that is wrong has no time together with its forward either.
    failed = of.get("failed") or figure.get("failed") or (of.get("backward") or {}).get("failed" if "backward" in way else "", "")
    if failed:
        return f"{'wrong' if failed.startswith('wrong') else 'failed'} ({_note(notes, failed)})"
    if "median" not in figure:
        return "-"
    eager = figure.get("captured") is False
    return _us(figure["median"]) + (f" ({_note(notes, EAGER)})" if eager else "")


EAGER = "Waits for the device in every call and cannot be captured: eager calls are timed."


def _note(notes: list[str], text: str) -> int:
    text = text.replace("|", "\\|").replace("<", "&lt;")
    if text not in notes:
        notes.append(text)
    return notes.index(text) + 1


def _costs(part: dict[str, Any], operators: tuple[str, ...]) -> list[str]:
    """Time against bytes, memory against inputs and results, and both against padding."""
    lines = [
        "| operator | dtype | forward time | backward time | memory forward | memory both | padded memory forward "
        "| FLOPs | padded FLOPs |",
        f"|---|---|{'---:|' * 7}",
    ]
    for dtype, name, row in _rows(part, operators):
        ours, padded = row["jagged"], row.get("padded", {})
        against = [
            f"{median / row['ideal_us'][way]:.2f}" if (median := _median(row, "jagged", way)) is not None else "-"
            for way in ("forward", "backward")
        ]
        memory = [
            f"{of[key]:.3f}" if key in of else "-"
            for of, key in ((ours, "peak_ratio_forward"), (ours, "peak_ratio_both"), (padded, "peak_ratio_forward"))
        ]
        flops = [_scaled(row["flops"]), _scaled(row["padded_flops"])]
        lines.append(f"| `{name}` | {dtype} | {' | '.join([*against, *memory, *flops])} |")
    return [
        "Time as a multiple of what the operator's own bytes take at 82 % of copy speed; peak memory as a multiple of inputs and "
        "results (for both ways, of gradients too); FLOPs of the forward pass:",
        "\n".join(lines),
    ]


def _rows(part: dict[str, Any], operators: tuple[str, ...]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    cases = [(key, name, row) for key, of in part.get("by", {}).items() for name, row in of.items()]
    # The cases of an operator side by side, in the order of the operators.
    for operator in operators:
        for key, name, row in cases:
            if name.split()[0] == operator:
                yield key, name, row


def _median(row: dict[str, Any], who: str, way: str) -> float | None:
    median: float | None = row.get(who, {}).get(way, {}).get("median")
    return median


def _us(microseconds: float) -> str:
    return f"{microseconds:,.0f}" if microseconds >= 100 else f"{microseconds:.1f}"


def _scaled(number: float) -> str:
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number) if number else "-"


def main() -> None:
    """Write every page's tables, of each machine in turn."""
    results = [json.loads(path.read_text()) for path in sorted(ROOT.glob("results/*/jagged_ops.json"))]
    for name, operators in PAGES.items() if results else ():
        path: Path = FOLDER / f"{name}.md"
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(page(result, operators) for result in results))
        print(path)


if __name__ == "__main__":
    main()
