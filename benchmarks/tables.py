"""Write the tables of the operators' pages from the result files alone: `docs/ops/_benchmarks/<page>.md`, which pages include.

python -m benchmarks.tables
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
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
        timed = {f"`{name}`, {dtype}": row for dtype, name, row in _rows(result["table"], operators)}
        blocks += under_load(timed, {"jagged": "jagged"})
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


def under_load(rows: dict[str, Any], names: dict[str, str]) -> list[str]:
    """A table of bursts beside work that lasts, with clocks and watts, of the `names` that have both; nothing where none has."""
    lines = []
    for case, row in rows.items():
        for who, label in names.items():
            of = row.get(who, {})
            for way, figure in of.items() if isinstance(of, dict) else ():
                if isinstance(figure, dict) and "sustained" in figure:
                    lasting = figure["sustained"]
                    cells = [case, label, way, _ms(figure["median"]), _clock(figure), _ms(lasting["mean"]), _clock(lasting)]
                    watts = f"{lasting['watts']:.0f}" if "watts" in lasting else "-"
                    lines.append(f"| {' | '.join(cells)} | {lasting['mean'] / figure['median']:.2f} | {watts} |")
    head = "| | | | burst, ms | MHz | sustained, ms | MHz | sustained / burst | W |\n|---|---|---|---:|---:|---:|---:|---:|---:|"
    words = (
        "Medians of bursts of about ten milliseconds, and means of work without a pause, for which the power lowers the clock:"
    )
    return [words, "\n".join([head, *lines])] if lines else []


def _ms(microseconds: float) -> str:
    return f"{microseconds / 1e3:.4g}"


def _clock(figure: dict[str, Any]) -> str:
    return f"{figure['sm_mhz']:,.0f}" if "sm_mhz" in figure else "-"


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


ATTENTION = {
    "jagged": "jagged",
    "fa2": "FA2",
    "fa4": "FA4",
    "fa4_deterministic": "FA4, deterministic",
    "sll": "FBGEMM `sll`",
    "sll_dense": "FBGEMM `sll`, not flash",
    "padded_math": "padded, math",
    "padded_flash": "padded, flash",
    "padded_efficient": "padded, memory-efficient",
    "padded_cudnn": "padded, cuDNN",
    "padded": "padded",
    "flex": "FlexAttention",
    "nested": "nested tensors",
}
ATTENTION_PARTS = {
    "table": "bfloat16, lengths uniform on 0..N; rows are B x N x heads x width:",
    "cpu": "float32, lengths uniform on 0..N; rows are B x N x heads x width:",
    "paper": "Figure 2 of the Jagged Flash Attention paper: 2^18 rows with padding, 4 heads of width 64, by the maximum length:",
    "skew": "Lognormal lengths (sigma 1) beside equal lengths of the same work:",
    "options": "What the options cost; rows are B x N x heads x width:",
    "biases": (
        "Biases with their gradients (401 distances, 32 buckets of times unless said, a number for every pair), a tenth of the "
        "weights dropped, and HSTU's weights; causal, rows are B x N x heads x width:"
    ),
}


# Of jagged flash attention beside dense attention and dense flash attention.
PAPER_CLAIMS = {
    "padded_math": "up to 9 times the speed and 22 times less memory",
    "padded_flash": "up to 3 times the speed and 53 % less memory",
}
PEAKS = {"peak_bytes_forward": "forward", "peak_bytes_both": "both ways"}


def attention_page(result: dict[str, Any]) -> str:
    """Markdown of a result file of attention: times, rates, memory, accuracy, and how they stand to peers and claims."""
    facts = result["environment"]
    limit = f" Products of bfloat16 matrices of 8192^3: {facts['bf16_matmul_tflops']:,.0f} TFLOP/s." if _on_gpu(facts) else ""
    blocks = [_machine(facts) + limit]
    for title, words in ATTENTION_PARTS.items():
        if title in result:
            rows = result[title]["rows"]
            blocks += [words, *_attention_times(rows), *under_load(rows, ATTENTION), *_attention_summary(title, result[title])]
            if title in ("table", "paper", "biases") and _on_gpu(facts):
                blocks += _attention_memory(rows, inputs=title != "table")
    if "masks" in result:
        blocks += _masks(result["masks"]["rows"])
    return "\n\n".join(blocks) + "\n"


MASKS = (
    "What masks and biases cost in samples of one length, 4 heads, bfloat16, forward / backward: microseconds of causal "
    "attention, the others as multiples of it and, in parentheses, of its time of a pair that is seen. Targets are 1 to 20, "
    "distances 401, buckets of times 32, with times that lie within a day; biases have their gradients:"
)


def _masks(rows: dict[str, Any]) -> list[str]:
    """A table for each size and kind of weights, a column for each width."""
    sizes: dict[str, dict[str, dict[int, str]]] = {}
    for row in rows.values():
        if "size" in row:
            of = row["size"]
            title = f"{of['samples']} samples of {of['rows']:,} rows, {of['kind']}"
            sizes.setdefault(title, {}).setdefault(of["variant"], {})[of["width"]] = _mask_cell(row)
    blocks = [MASKS]
    for title, variants in sizes.items():
        widths = sorted({width for cells in variants.values() for width in cells})
        lines = [f"| {title} | {' | '.join(f'width {width}' for width in widths)} |", f"|---|{'---:|' * len(widths)}"]
        lines += [f"| {name} | {' | '.join(cells.get(width, '') for width in widths)} |" for name, cells in variants.items()]
        blocks.append("\n".join(lines))
    return blocks


def _mask_cell(row: dict[str, Any]) -> str:
    if "ratio" not in row:
        return " / ".join(_us(us) for us in row["us"].values())
    times, pairs = (" / ".join(f"{ratio:.2f}" for ratio in row.get(key, {}).values()) for key in ("ratio", "per_pair"))
    return f"{times} ({pairs})" if pairs else times


def _on_gpu(facts: dict[str, Any]) -> bool:
    return "bf16_matmul_tflops" in facts


def _attention_times(rows: dict[str, Any]) -> list[str]:
    """A line for each direction of each case: milliseconds and TFLOP/s of useful work."""
    notes: list[str] = []
    present = _present(rows)
    columns = ["", "", *(ATTENTION[who] for who in present)]
    lines = [f"| {' | '.join(columns)} |", f"|---|---|{'---:|' * (len(columns) - 2)}"]
    for name, row in rows.items():
        for way in ("forward", "backward"):
            cells = [name, way, *(_attention_cell(row.get(who), way, notes) for who in present)]
            lines.append(f"| {' | '.join(cells)} |")
    lines.append("\nMilliseconds, medians, and in parentheses TFLOP/s of useful work.")
    return ["\n".join(lines), *(["\n".join(f"{number}. {note}" for number, note in enumerate(notes, 1))] if notes else [])]


def _present(rows: dict[str, Any]) -> list[str]:
    return [who for who in ATTENTION if any(who in row for row in rows.values())]


def _attention_cell(of: dict[str, Any] | None, way: str, notes: list[str]) -> str:
    if of is None:
        return ""
    figure = {"failed": of["failed"]} if "failed" in of else of[way]
    if "failed" in figure:
        return f"- [{_note(notes, figure['failed'])}]"
    milliseconds, rate = figure["median"] / 1e3, figure["tflop_per_s"]
    return f"{milliseconds:.3g} ({rate:.0f})" if rate >= 1 else f"{milliseconds:.3g} ({rate:.2g})"


def _attention_summary(title: str, part: dict[str, Any]) -> list[str]:
    if title == "paper":
        words = {
            "forward": "forward time",
            "backward": "backward time",
            "memory_forward": "memory forward",
            "memory_both": "memory of both ways",
        }
        lines = []
        for who, ratios in part["summary"].items():
            said = ", ".join(f"{words[key]} {ratio:.3g}" for key, ratio in ratios.items())
            lines.append(f"- {ATTENTION[who]}, at most and as multiples of ours: {said}. The paper claims {PAPER_CLAIMS[who]}.")
        return ["\n".join(lines)]
    if title == "skew":
        return [
            "\n".join(
                f"- {name}, {way}: {ratio:.2f} of the rate of equal lengths"
                for name, ratios in part["summary"].items()
                for way, ratio in ratios.items()
            )
        ]
    if title == "biases":
        return [_compared(part["rows"])]
    return _errors(part["rows"]) if title == "table" else []


def _compared(rows: dict[str, Any]) -> str:
    """Ratios to the time of another case."""
    lines = ["| | times as long as | forward | backward |", "|---|---|---:|---:|"]
    for name, of in ((name, row["compared"]) for name, row in rows.items() if "compared" in row):
        cells = [f"{of['ratio'][way]:.2f}" if way in of["ratio"] else "-" for way in ("forward", "backward")]
        lines.append(f"| {name} | {of['with']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _errors(rows: dict[str, Any]) -> list[str]:
    """The largest errors over the cases, as multiples of plain products' in the same dtype."""
    ratios: dict[str, list[float]] = {}
    for row in rows.values():
        for name, (ours, plain) in ((name, of.values()) for name, of in row["jagged"].get("errors", {}).items()):
            ratios.setdefault(name, []).append(ours / plain if plain else 0.0)
    said = ", ".join(f"{name if name == 'output' else f'gradient of {name}'} {max(of):.2f}" for name, of in ratios.items())
    return (
        [f"Largest error against float64, as a multiple of that of plain products in bfloat16, at most: {said}."] if said else []
    )


def _attention_memory(rows: dict[str, Any], *, inputs: bool) -> list[str]:
    """Peak memory in MB, with the inputs as each takes them or without."""
    present = _present(rows)
    lines = [f"| | | {' | '.join(ATTENTION[who] for who in present)} |", f"|---|---|{'---:|' * len(present)}"]
    for name, row in rows.items():
        for key, words in PEAKS.items():
            cells = []
            for who in present:
                of = row.get(who, {})
                peak = of.get(key)
                cells.append("-" if peak is None else f"{(peak + (of['input_bytes'] if inputs else 0)) / 1e6:,.0f}")
            lines.append(f"| {name} | {words} | {' | '.join(cells)} |")
    blocks = [f"Peak memory {'with' if inputs else 'beyond'} the inputs, MB:", "\n".join(lines)]
    peaks = {
        f"{name}, {words}": [row.get(who, {}).get(key) for who in ("jagged", "fa2")]
        for name, row in rows.items()
        for key, words in PEAKS.items()
    }
    if both := {name: pair for name, pair in peaks.items() if None not in pair}:
        above = [f"{name} ({(mine - its) / 1e6:.1f} MB more)" for name, (mine, its) in both.items() if mine >= its]
        blocks.append(f"Below FA2's in {len(both) - len(above)} of {len(both)}{'; not: ' if above else ''}{'; '.join(above)}.")
    return blocks


CROSS_ENTROPY = {
    "jagged": "jagged",
    "jagged_fused": "jagged, fused",
    "jagged_chunked": "jagged, chunked",
    "jagged_filtered": "jagged, filtered",
    "cut": "cut-cross-entropy, no filter",
    "cut_filtered": "cut-cross-entropy, filtered",
    "liger": "Liger",
    "compiled": "`torch.compile`",
    "eager": "PyTorch",
    "jagged_sampled": "jagged, sampled",
    "jagged_sparse": "jagged, sampled, sparse gradient",
    "gathered": "PyTorch, gathered rows",
    "plain": "products and `torch.topk`",
}
# Of each page: its parts, what is said of them, and the family whose rows it has (None for all of them).
CROSS_ENTROPY_PAGES: dict[str, tuple[str | None, dict[str, str]]] = {
    "cross_entropy": (
        "all",
        {
            "full": "bfloat16, normal logits; rows are N x V x D:",
            "filter": (
                "The backward pass alone where gradients below 2^-12 are left out, on logits as after training (bfloat16, "
                "N x V x D):"
            ),
            "scaling": "One size at a time, from 8,192 rows, 1,000,000 items and width 128 (bfloat16):",
            "cpu": "float32, N x V x D:",
        },
    ),
    "sampled_cross_entropy": (
        "sampled",
        {
            "sampled": "float16, uniform negatives; rows are N x V x D and the negatives:",
            "scaling": "One size at a time, from 8,192 rows, 1,000,000 items, width 128 and 511 negatives a row (bfloat16):",
            "cpu": "float32, N x V x D:",
        },
    ),
    "catalogue_topk": ("topk", {"topk": "bfloat16, 2,048 rows, 1,000,000 items, width 256:", "cpu": "float32, N x V x D:"}),
}
PAPERS = (
    "The loss of one step, both passes, with the batches of the CCE- paper (batch x length and negatives of each row; float16, "
    "width 256, no padding; catalogues of {items} items): CE is PyTorch, CE- gathered rows, CCE and CCE- ours over all items and "
    "sampled:"
)
STEPS = (
    "A training step of SASRec with these losses, body, gradients and Adam with it (two blocks and heads; float32 weights, "
    "products in bfloat16): milliseconds, and in parentheses the most GB that are allocated in a step:"
)
UNMEASURED = "No results yet: `python -m benchmarks.cross_entropy` measures them.\n"


def cross_entropy_page(result: dict[str, Any], name: str, machine: str = "") -> str:
    """Markdown of the parts of a result file that a page has: times, rates and memory."""
    facts = result["environment"]
    limit = f" Products of bfloat16 matrices of 8192^3: {facts['bf16_matmul_tflops']:,.0f} TFLOP/s." if _on_gpu(facts) else ""
    peers = [f"{title} {facts.get(key)}" for key, title in (("cut_cross_entropy", "cut-cross-entropy"), ("liger", "Liger"))]
    blocks = [_machine(facts) + (f" {', '.join(peers)}." if _on_gpu(facts) else "") + limit]
    if name == "cross_entropy":
        shown = {
            "cross_entropy": "Time and memory by method",
            "cross_entropy_scaling": "Time over sizes",
            "cross_entropy_steps": "Time and memory of training steps",
        }
        for figure, words in shown.items():
            if (ROOT / "figures" / f"{figure}-{machine}.png").exists():
                blocks.append(f"![{words}](../../benchmarks/figures/{figure}-{machine}.png)")
    family, titles = CROSS_ENTROPY_PAGES[name]
    if name == "cross_entropy":
        titles = {**titles, "papers": PAPERS}
    for title, words in titles.items():
        rows = {
            key: row for key, row in result.get(title, {}).get("rows", {}).items() if title == "papers" or _is_of(row, family)
        }
        if rows:
            if title == "papers":
                sizes = {key.split(",")[0]: row["size"]["items"] for key, row in rows.items()}
                words = words.format(items=", ".join(f"{items:,} ({dataset})" for dataset, items in sizes.items()))
            blocks += [words, *_cross_entropy_times(rows, facts), *under_load(rows, CROSS_ENTROPY), *_cross_entropy_memory(rows)]
            blocks += _cross_entropy_filter(result[title]) if title == "filter" else []
    if name == "cross_entropy" and "steps" in result:
        blocks += [STEPS, *_cross_entropy_steps(result["steps"]["rows"])]
    return "\n\n".join(blocks) + "\n"


def _cross_entropy_steps(rows: dict[str, Any]) -> list[str]:
    notes: list[str] = []
    names = {"eager": "CE", "jagged": "CCE", "gathered": "CE-", "jagged_sampled": "CCE-"}
    lines = [f"| | {' | '.join(names.values())} |", f"|---|{'---:|' * len(names)}"]
    for name, row in rows.items():
        cells = []
        for who in names:
            of = row.get(who, {})
            if "step" in of:
                memory = f" ({of['peak_bytes_step'] / 1e9:.3g})" if "peak_bytes_step" in of else ""
                cells.append(f"{of['step']['median'] / 1e3:.4g}{memory}")
            else:
                cells.append(_attention_cell(of, "step", notes) if "failed" in of else "")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return ["\n".join(lines), *(["\n".join(f"{number}. {note}" for number, note in enumerate(notes, 1))] if notes else [])]


def _is_of(row: dict[str, Any], family: str | None) -> bool:
    found = "topk" if row["size"]["k"] else "sampled" if "jagged_sampled" in row else "all"
    return found == family


def _cross_entropy_times(rows: dict[str, Any], facts: dict[str, Any]) -> list[str]:
    """A line for each direction of each case: milliseconds and TFLOP/s of useful work."""
    notes: list[str] = []
    present = [who for who in CROSS_ENTROPY if any(who in row for row in rows.values())]
    bounds = any("along" in row for row in rows.values()) and "copy_gb_per_s" in facts
    columns = ["", "", *(["copy of the gradients"] if bounds else []), *(CROSS_ENTROPY[who] for who in present)]
    lines = [f"| {' | '.join(columns)} |", f"|---|---|{'---:|' * (len(columns) - 2)}"]
    for name, row in rows.items():
        ways = [way for way in BOTH if any(way in row.get(who, {}) for who in present)] or ["both"]
        for way in ways:
            cells = [name, BOTH[way]]
            if bounds:
                cells.append(f"{row['gradient_bytes'] / facts['copy_gb_per_s'] / 1e6:.3g}" if way == "both" else "")
            cells += [_cross_entropy_cell(row.get(who), way, notes) for who in present]
            lines.append(f"| {' | '.join(cells)} |")
    lines.append("\nMilliseconds, medians, and in parentheses TFLOP/s of useful work.")
    return ["\n".join(lines), *(["\n".join(f"{number}. {note}" for number, note in enumerate(notes, 1))] if notes else [])]


BOTH = {"forward": "forward", "both": "forward and backward", "backward": "backward"}


def _cross_entropy_cell(of: dict[str, Any] | None, way: str, notes: list[str]) -> str:
    if of is None:
        return ""
    # A method that fails in one direction has the time of the other.
    if way in of:
        return _attention_cell({way: of[way]}, way, notes)
    return _attention_cell(of, way, notes) if "failed" in of else ""


def _cross_entropy_memory(rows: dict[str, Any]) -> list[str]:
    """MB that both passes take beyond inputs and results; of the best items, beyond inputs."""
    keys = ("beyond_bytes_both", "peak_bytes_forward")
    key = next(
        (key for key in keys if any(key in of for row in rows.values() for of in row.values() if isinstance(of, dict))), None
    )
    if key is None:
        return []
    present = [who for who in CROSS_ENTROPY if any(key in row.get(who, {}) for row in rows.values())]
    columns = ["", *(CROSS_ENTROPY[who] for who in present)]
    lines = [f"| {' | '.join(columns)} |", f"|---|{'---:|' * (len(columns) - 1)}"]
    for name, row in rows.items():
        cells = [name, *(f"{row[who][key] / 1e6:,.0f}" if key in row.get(who, {}) else "-" for who in present)]
        lines.append(f"| {' | '.join(cells)} |")
    beyond = "beyond inputs and results, both passes" if key == keys[0] else "beyond inputs"
    return [f"Peak memory {beyond}, MB:", "\n".join(lines)]


def _cross_entropy_filter(part: dict[str, Any]) -> list[str]:
    """How many times as fast, and how far off."""
    lines = []
    for name, ratios in part["summary"].items():
        for who, ratio in ratios.items():
            apart = part["rows"][name][f"{who}_filtered"]["difference"]
            lines.append(
                f"- {name}, {CROSS_ENTROPY[f'{who}_filtered']}: {ratio:.2f} times as fast; gradients of hidden states and "
                f"weights off by {apart['hidden']:.2g} and {apart['weight']:.2g} of the norm of our exact ones"
            )
    return ["\n".join(lines)] if lines else []


def write_cross_entropy() -> None:
    """Write the pages of cross-entropy, and what stands in for them before anything is measured."""
    results = {path.parent.name: json.loads(path.read_text()) for path in sorted(ROOT.glob("results/*/cross_entropy.json"))}
    for name in CROSS_ENTROPY_PAGES:
        text = "\n".join(cross_entropy_page(result, name, machine) for machine, result in results.items())
        path = FOLDER / f"{name}.md"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text or UNMEASURED)
        print(path)


EMBEDDING = {
    "jagged": "jagged",
    "fbgemm": "FBGEMM",
    "fbgemm_v2": "FBGEMM, second version",
    "fbgemm_checked": "FBGEMM, ids checked first",
    "torchrec_fused": "TorchRec, fused",
    "torchrec": "TorchRec",
    "per_table": "PyTorch, table by table",
    "better": "the better of FBGEMM's",
    "alone": "jagged, each class tuned alone",
    "cost_model": "jagged, no plan",
}
EMBEDDING_PARTS = {
    "models": "RecFlex's models, 512 samples, float32, int32 ids, SGD inside the backward pass:",
    "sizes": "The same models, other numbers of samples:",
    "queries": "128 batches of the sizes of the paper's queries (38 % are 512, a quarter 8 or fewer), all of them together:",
    "mlperf": "MLPerf's DLRM-DCNv2: 26 tables of width 64 and up to ten million rows, bags of 1 to 100 ids:",
    "mixed": "66 tables of widths 4 to 128, up to three million rows, bags of 1 to about 100 ids:",
    "many": "Model D's features ten times, 512 samples:",
    "optimizers": "Other optimizers inside the backward pass, 512 samples:",
    "host": "The time after which a call of the module returns:",
    "model": (
        "Module and perceptron (1,024, 256 and 128 wide, TF32), 512 samples: inference (forward) and a training step with SGD, "
        "eager calls by the wall clock, and the GPU's time alone:"
    ),
    "tuning": (
        "By plans for the batch, 512 samples; jagged is by the tuned one, and without a plan the lengths of each batch choose:"
    ),
    "cpu": "float32, int32 ids, dense gradients:",
}
EMBEDDING_WAYS = {
    "forward": "forward",
    "backward": "backward and update",
    "both": "forward and backward",
    "host": "host",
    "forward_gpu": "forward, GPU",
    "step": "step",
    "step_gpu": "step, GPU",
}
EMBEDDING_FIGURES = {
    **{f"embedding_bags_{name}": f"Time of model {name} by implementation" for name in "ABCDE"},
    "embedding_bags_sizes": "Time over the number of samples",
}


def embedding_page(result: dict[str, Any], machine: str = "") -> str:
    """Markdown of a result file of embedding bags: times beside their limit, and how they stand to peers."""
    facts = result["environment"]
    words = "Times are milliseconds, medians."
    if _on_gpu(facts):
        words = (
            "Times are milliseconds, medians, and in parentheses the share of the limit and TB/s of rows gathered. The limit is "
            "a copy of the bytes that are read and written at least: rows once, ids, offsets, and the output or its gradient."
        )
    blocks = [_machine(facts).removesuffix(".") + f", TorchRec {facts.get('torchrec')}. {words}"]
    for figure, words in EMBEDDING_FIGURES.items():
        if (ROOT / "figures" / f"{figure}-{machine}.png").exists():
            blocks.append(f"![{words}](../../benchmarks/figures/{figure}-{machine}.png)")
    for title, words in EMBEDDING_PARTS.items():
        if result.get(title, {}).get("rows"):
            rows = result[title]["rows"]
            blocks += [words, *_embedding_times(rows), *under_load(rows, EMBEDDING), *_embedding_ratios(result[title])]
            if title == "tuning" and _on_gpu(facts):
                blocks.append(_embedding_gains(rows))
    return "\n\n".join(blocks) + "\n"


def _embedding_times(rows: dict[str, Any]) -> list[str]:
    """A line for each way of each case: milliseconds, and how they stand to the limit."""
    notes: list[str] = []
    present = [who for who in EMBEDDING if any(who in row for row in rows.values())]
    limits = any("limit_us" in row for row in rows.values())
    columns = ["", "", *(["limit"] if limits else []), *(EMBEDDING[who] for who in present)]
    lines = [f"| {' | '.join(columns)} |", f"|---|---|{'---:|' * (len(columns) - 2)}"]
    for name, row in rows.items():
        # What fails in every way shall be seen, too.
        for way in [way for way in EMBEDDING_WAYS if any(way in row.get(who, {}) for who in present)] or ["forward"]:
            cells = [name, EMBEDDING_WAYS[way]]
            if limits:
                cells.append(f"{row['limit_us'][way] / 1e3:.2g}" if way in row.get("limit_us", {}) else "")
            cells += [_embedding_cell(row.get(who), way, notes) for who in present]
            lines.append(f"| {' | '.join(cells)} |")
    return ["\n".join(lines), *(["\n".join(f"{number}. {note}" for number, note in enumerate(notes, 1))] if notes else [])]


def _embedding_cell(of: dict[str, Any] | None, way: str, notes: list[str]) -> str:
    if of is None or way not in of:
        failed = (of or {}).get("failed")
        return f"- [{_note(notes, failed)}]" if failed else ""
    figure = of[way]
    shown = f"{figure['median'] / 1e3:.3g}"
    if "of_limit" in figure:
        shown += f" ({figure['of_limit']:.0%}, {figure['gathered_gb_per_s'] / 1e3:.2g})"
    return shown + (f" [{_note(notes, EAGER)}]" if figure.get("captured") is False else "")


def _embedding_ratios(part: dict[str, Any]) -> list[str]:
    """How many times as fast as some peers ours are."""
    lines = []
    for of_peer in part["asked_ratios"]:
        way, who = of_peer["way"], of_peer["who"]
        found = part["summary"]["means" if of_peer["by"] == "mean" else "cases"]
        ratios = {
            name: of[way][who] for name, of in found.items() if who in of.get(way, {}) and _has_plan(part["rows"].get(name, {}))
        }
        if not ratios or who == "cost_model":
            continue
        if of_peer["by"] == "mean":
            said = ", ".join(f"{ratio:.2f} on the mean of {name}" for name, ratio in ratios.items())
        else:
            said = f"{min(ratios.values()):.2f} to {max(ratios.values()):.2f} in {len(ratios)} cases"
        lines.append(f"- {EMBEDDING_WAYS[way]}, times as fast as {EMBEDDING[who]}: {said}.")
    return ["\n".join(lines)] if lines else []


def _has_plan(row: dict[str, Any]) -> bool:
    """Tell whether ours went by a plan, where it was to; one without features is none."""
    return row.get("jagged", {}).get("planned_features") != 0


def _embedding_gains(tuned: dict[str, Any]) -> str:
    """What tuned plans gain over the same calls without one, timed after them."""
    gains = {
        name: row["cost_model"]["forward"]["median"] / row["jagged"]["forward"]["median"] - 1
        for name, row in tuned.items()
        if all("forward" in row.get(who, {}) for who in ("jagged", "cost_model"))
    }
    planned = [f"{name} {gain:+.1%}" for name, gain in gains.items() if _has_plan(tuned[name])]
    words = f"Speed that a tuned plan adds to calls without a plan, one seed a model: {', '.join(planned) or 'none has one'}."
    for name, gain in gains.items():
        if not _has_plan(tuned[name]):
            words += f" For {name} no schedule was faster: its plan is none, and two timings of the same calls differ by "
            words += f"{abs(gain):.1%}."
    return words


def write_embedding_bags() -> None:
    """Write the page of embedding bags, and what stands in for it before anything is measured."""
    found = {path.parent.name: json.loads(path.read_text()) for path in sorted(ROOT.glob("results/*/embedding_bags.json"))}
    path = FOLDER / "embedding_bag.md"
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(embedding_page(of, machine) for machine, of in found.items()) or UNMEASURED_BAGS)
    print(path)


UNMEASURED_BAGS = "No results yet: `python -m benchmarks.embedding_bags` measures them.\n"


SWEEP = {"forward": "forward", "sgd": "backward with SGD", "rowwise_adagrad": "backward with row-wise Adagrad"}
UNMEASURED_SWEEP = "No results yet: `python -m benchmarks.embedding_sweep` measures them.\n"


def sweep_page(result: dict[str, Any], machine: str = "") -> str:
    """Markdown of a result file of embedding bags over sizes, seeds and ids: medians and the worst, by shape and distribution."""
    summary = result["summary"]
    kinds = [kind for kind in SWEEP if kind in summary]
    groups = [group for group in summary[kinds[0]]["times_as_fast"] if group not in ("uniform", "zipf")]
    columns = [f"{SWEEP[kind]}, {of}" for kind in kinds for of in ("uniform", "Zipf")]
    lines = [f"| | {' | '.join(columns)} |", f"|---|{'---:|' * len(columns)}"]
    for shape in [group for group in groups if "," not in group]:
        names = [of if shape == "all" else f"{shape}, {of}" for of in ("uniform", "zipf")]
        found = [summary[kind]["times_as_fast"].get(name) for kind in kinds for name in names]
        cells = [f"{of['median']:.2f} ({of['worst']:.2f})" if of else "" for of in found]
        lines.append(f"| {shape} | {' | '.join(cells)} |")
    of_all = {SWEEP[kind]: summary[kind]["times_as_fast"]["all"] for kind in kinds}
    worst = [f"{way} {of['worst']:.2f} ({of['worst_case']})" for way, of in of_all.items()]
    changes = [of["change"] for kind in kinds for of in summary[kind].get("changes", {}).values()]
    words = (
        f"{len(result['cases']):,} cases. Medians of how many times as fast as FBGEMM (forward: the better of its versions) ours "
        "is, the worst case in parentheses:"
    )
    blocks = [_machine(result["environment"]), words, "\n".join(lines), f"The worst of all: {'; '.join(worst)}."]
    if changes:
        blocks.append(f"Backward, from 448 to 640 samples by 32, the time of a lookup changes by {max(changes):.1%} at most.")
    if (ROOT / "figures" / f"embedding_sweep-{machine}.png").exists():
        blocks.append(
            f"![Times as fast as FBGEMM over the number of samples](../../benchmarks/figures/embedding_sweep-{machine}.png)"
        )
    return "\n\n".join(blocks) + "\n"


def write_sweep() -> None:
    """Write the table of the sweep, and what stands in for it before anything is measured."""
    found = {path.parent.name: json.loads(path.read_text()) for path in sorted(ROOT.glob("results/*/embedding_sweep.json"))}
    path = FOLDER / "embedding_sweep.md"
    path.write_text("\n".join(sweep_page(of, machine) for machine, of in found.items()) or UNMEASURED_SWEEP)
    print(path)


HOST_WAYS = {**WAYS, "one_thread": "the same, on one thread"}
HOST = {"jagged": "jagged", "sll": "FBGEMM `sll`", "fbgemm": "FBGEMM C++", "fa2": "FA2", "before": "jagged before"}
UNMEASURED_HOST = "No results yet: `python -m benchmarks.host_time` measures them.\n"


def host_page(result: dict[str, Any]) -> str:
    """Markdown of a result file of host times: operators on a small batch, then calls of a common size."""
    rows = result["operators"]["rows"]
    present = [who for who in HOST if any(who in row for row in rows.values())]
    ways = [way for way in ("forward", "forward_backward", "one_thread") if any(way in row["jagged"] for row in rows.values())]
    lines = [f"| | {' | '.join(HOST[who] for who in present)} |", f"|---|{'---:|' * len(present)}"]
    for name, row in rows.items():
        cells = [" / ".join(_host(row[who].get(way)) for way in ways) if who in row else "" for who in present]
        lines.append(f"| {name} | {' | '.join(cell if set(cell) & set('0123456789') else '-' for cell in cells)} |")
    words = f"64 samples of mean length 20, bfloat16; microseconds of the host, {' / '.join(HOST_WAYS[way] for way in ways)}:"
    blocks = [_machine(result["environment"]), words, "\n".join(lines)]
    lines = ["| | | | eager | graph | eager / graph | one call that is waited for |", "|---|---|---|---:|---:|---:|---:|"]
    for name, row in result.get("eager", {}).get("rows", {}).items():
        for who, of in row.items():
            for way, figure in of.items():
                if isinstance(figure, dict) and "graph" in figure:
                    cells = [_us(figure["mean"]), _us(figure["graph"]), f"{figure['ratio']:.2f}", _us(figure["synchronised"])]
                    lines.append(f"| {name} | {ATTENTION.get(who, who)} | {HOST_WAYS[way]} | {' | '.join(cells)} |")
    return "\n\n".join([*blocks, "A hundred eager calls in a row, and a CUDA graph of the same call; microseconds a call:",
                        "\n".join(lines)]) + "\n"  # fmt: skip


def _host(figure: Any) -> str:
    time = figure.get("median") if isinstance(figure, dict) else figure
    return "-" if time is None else _us(time)


def write_host() -> None:
    """Write the table of host times, and what stands in for it before anything is measured."""
    found = [json.loads(path.read_text()) for path in sorted(ROOT.glob("results/*/host_time.json"))]
    path = FOLDER / "host_time.md"
    path.write_text("\n".join(map(host_page, found)) or UNMEASURED_HOST)
    print(path)


def rows_page(result: dict[str, Any], ways: tuple[str, str], words: str) -> str:
    """Markdown of a result file of an operator on rows beside PyTorch's: two times of each, by width and dtypes."""
    rows: dict[str, dict[str, str]] = {}
    for name, of in result["cases"].items():
        size, dtypes = name.rsplit(", ", 1)
        ours, theirs = (" / ".join(_us(of[who][way]["median"]) for way in ways) for who in ("jagged", "torch"))
        rows.setdefault(size, {})[dtypes] = f"{ours} ({theirs})"
    columns = list(next(iter(rows.values())))
    lines = [f"| rows | width | {' | '.join(columns)} |", f"|---:|---:|{'---:|' * len(columns)}"]
    lines += [f"| {size.replace(' x ', ' | ')} | {' | '.join(cells[of] for of in columns)} |" for size, cells in rows.items()]
    return "\n\n".join([_machine(result["environment"]), words, "\n".join(lines)]) + "\n"


BODIES = {
    "hstu": "Five blocks of HSTU",
    "dlrm_v4_hstu": "Three blocks of HSTU, as MLPerf Training's `dlrm_v4_hstu` has them",
    "dlrm_v3": "Five blocks of HSTU, as MLPerf Inference's DLRMv3 has them",
    "transformer": "Two blocks of a transformer",
}
BODY_WAYS = {
    "ours": "jagged",
    "recompute": "jagged, `recompute=True`",
    "composed": "PyTorch's operations, our attention",
    "padded": "PyTorch's operations on padded rows",
}


def bodies_page(result: dict[str, Any]) -> str:
    """Markdown of a result file of bodies: times by graph and eager, memory and errors, and the times of single requests."""
    blocks = [_machine(result["environment"])]
    for name, words in BODIES.items():
        if name not in result:
            continue
        of, size = result[name], result[name]["size"]
        # Results from before there were others have neither.
        least, fewest = size.get("least", 1), size.get("fewest", 1)
        counted = f"{size['targets']:,}" if fewest == size["targets"] else f"{fewest} to {size['targets']}"
        targets = f", of which the last {counted} are targets" if counted != "1" else ", the last of which is a target"
        blocks.append(
            f"{words}, width {size['width']} with {size['heads']} heads, {size['rows']:,} rows in {of['samples']} samples of "
            f"{'' if size['is_even'] else f'{least:,} to '}{size['longest']:,} rows{targets if size['targets'] else ''}; "
            "milliseconds, burst / sustained:"
        )
        lines = ["| | forward | forward and backward | the same, eager | memory | error | of gradients |"]
        lines.append(f"|---|{'---:|' * 6}")
        for way, title in BODY_WAYS.items():
            if way in of:
                row = of[way]
                each = (row["forward"], row["both"])
                cells = [f"{time['median'] / 1e3:.2f} / {time['sustained']['mean'] / 1e3:.2f}" for time in each]
                cells += [f"{row['eager']['mean'] / 1e3:.2f}", f"{row['bytes'] / 2**30:.2f} GiB"]
                cells += [f"{row[error]:.1e}" for error in ("error", "gradient_error")]
                lines.append(f"| {title} | {' | '.join(cells)} |")
        blocks.append("\n".join(lines))
    if "requests" in result:
        blocks += _requests(result["requests"])
    return "\n\n".join(blocks) + "\n"


def _requests(of: dict[str, Any]) -> list[str]:
    """Percentiles of the time of scoring one request after another."""
    lengths = of["lengths"]
    words = (
        f"DLRMv3's blocks on {of['requests']:,} requests, one after another, each of {of['candidates']:,} candidates behind a "
        f"history, {lengths['least']:,} to {lengths['most']:,} rows together; milliseconds of the wall clock, from rows on the "
        "GPU to the end of the last block:"
    )
    lines = ["| | median | 99th percentile |", "|---|---:|---:|"]
    for way, title in BODY_WAYS.items():
        if way in of:
            lines.append(f"| {title} | {of[way]['p50'] / 1e3:.2f} | {of[way]['p99'] / 1e3:.2f} |")
    return [words, "\n".join(lines)]


def main() -> None:
    """Write every page's tables, of each machine in turn."""
    write_cross_entropy()
    write_embedding_bags()
    write_sweep()
    write_host()
    pages: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
        name: ("jagged_ops", partial(page, operators=operators)) for name, operators in PAGES.items()
    }
    of_norm = partial(rows_page, ways=("forward", "both"), words="Forward / forward and backward:")
    of_linear = partial(rows_page, ways=("both", "bias"), words="Forward and backward / the gradient of the bias alone:")
    pages["hstu"] = "hstu", bodies_page
    pages |= {"attention": ("attention", attention_page), "layer_norm": ("layer_norm", of_norm), "linear": ("linear", of_linear)}
    for name, (benchmark, write) in pages.items():
        if results := [json.loads(path.read_text()) for path in sorted(ROOT.glob(f"results/*/{benchmark}.json"))]:
            path: Path = FOLDER / f"{name}.md"
            path.parent.mkdir(exist_ok=True)
            path.write_text("\n".join(write(result) for result in results))
            print(path)


if __name__ == "__main__":
    main()
