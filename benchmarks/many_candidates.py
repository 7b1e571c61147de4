"""Models of requests with many candidates, beside the same models of expanded requests, one for each candidate.

    python -m benchmarks.many_candidates
    python -m benchmarks.many_candidates --only "dcnv2" --seconds 60
    python -m benchmarks.many_candidates --device cpu       # to try it, few requests; nothing is saved

1,024 requests with m candidates each: 20 ids and 8 numbers of the request, a history of 0 to 400 events (uniform), 8 ids and 8
numbers of each candidate, two labels, tables of 10,000 rows of width 32. Expanded, each candidate is a request of its own, with a
copy of all that is its request's, histories too; its scores are checked to be the same first.

Milliseconds of a step, forward and backward in bfloat16 under autocast, and the memory that it takes at its peak beside weights,
gradients and the batch. Where the expanded batch would not fit, its row has the bytes that it would take: those with fewer
candidates, as many times more. A short step is as long as the host takes to launch it: `gpu_ms` is the time of replays of a CUDA
graph, where one can be captured and the memory of several steps is there for it, and else the same. `of_line` is that beside a
line through those of 1 and 128 candidates: the cost is that of the user and m times that of an item.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.common import ROOT, environment, event_us, other_parts, replay_us, save, seconds_of, spread
from jagged.data.table_batches import Batch
from jagged.models import REQUEST_MODELS, RankingInputs, RequestModel
from jagged.ops import jagged_index_select, sample_of_row

CANDIDATES, REQUESTS, LONGEST = (1, 16, 128, 1024), 1024, 400
IDS, NUMBERS, TABLE, DIM = (20, 8), 8, 10_000, 32
MODELS: dict[str, dict[str, Any]] = {
    "ranking": {"num_heads": 2},
    "ranking by dots": {"cross": "dot", "num_heads": 2},
    "dlrm": {},
    "dcnv2": {},
    "dcnv2, rank 64": {"cross_rank": 64},
    "wukong": {},
    "mmoe": {"num_heads": 2},
    "din": {},
    "dlrm-hstu": {"num_heads": 2},
}
# Of scores and losses of both ways in bfloat16, relative to the norm.
AGREEMENT = 0.02
# Bytes of a step of which a CUDA graph is made: it holds several.
MOST_CAPTURED = 8 * 10**9


def inputs_of() -> RankingInputs:
    """What batches have."""
    of_request, of_candidate = ([f"{side}{at}" for at in range(count)] for side, count in zip(("user", "item"), IDS, strict=True))
    return RankingInputs(
        features={name: name for name in of_request},
        candidate_ids={"item0": "item0"},
        history={"history.item0": "item0"},
        candidates={name: name for name in of_candidate[1:]},
        request_numbers=[f"request{at}" for at in range(NUMBERS)],
        candidate_numbers=[f"candidate{at}" for at in range(NUMBERS)],
        labels=["click", "buy"],
    )


def batch_of(inputs: RankingInputs, requests: int, per_request: int, longest: int, device: str, seed: int = 0) -> Batch:
    """Requests of uniform ids; histories of 0 to `longest` events."""
    draw = torch.Generator().manual_seed(seed)
    candidates = requests * per_request
    lengths = torch.randint(longest + 1, (requests,), generator=draw)
    events, offsets = int(lengths.sum()), torch.arange(requests + 1) * per_request

    def ids(count: int) -> Tensor:
        return torch.randint(TABLE, (count,), generator=draw)

    def keyed(parts: dict[str, tuple[Tensor, Tensor]]) -> KeyedJaggedTensor:
        values, counts = zip(*parts.values(), strict=True)
        return KeyedJaggedTensor(
            list(parts), torch.cat(values), lengths=torch.cat(counts), length_per_key=[of.numel() for of in values]
        )

    def numbers(count: int) -> tuple[Tensor, Tensor]:
        return torch.randn(count, NUMBERS, generator=draw), torch.zeros(count, NUMBERS, dtype=torch.bool)

    ones = torch.ones(requests, dtype=torch.int64)
    features = {name: (ids(requests), ones) for name in inputs.features}
    features |= {name: (ids(candidates), per_request * ones) for name in inputs.candidate_ids}
    features |= {name: (ids(events), lengths) for name in inputs.history}
    of_request, of_candidate = numbers(requests), numbers(candidates)
    labels = torch.randint(2, (candidates, 2), generator=draw).float()
    found = Batch(
        features=keyed(features),
        weighted_features=None,
        candidates=keyed({name: (ids(candidates), torch.ones(candidates, dtype=torch.int64)) for name in inputs.candidates}),
        weighted_candidates=None,
        candidate_offsets=offsets,
        rows=torch.arange(candidates),
        labels=labels,
        label_mask=torch.ones_like(labels, dtype=torch.bool),
        weights=torch.ones(candidates),
        request_index=torch.arange(requests),
        user_index=torch.arange(requests),
        request_times=torch.full((requests,), 10**6),
        request_numbers=of_request[0],
        request_numbers_missing=of_request[1],
        request_number_lists=None,
        candidate_numbers=of_candidate[0],
        candidate_numbers_missing=of_candidate[1],
        candidate_number_lists=None,
        history_times=torch.randint(10**6, (events,), generator=draw),
        history_numbers=torch.zeros(events, 0),
        history_numbers_missing=torch.zeros(events, 0, dtype=torch.bool),
        history_labels=torch.zeros(events, 0),
        history_label_mask=torch.zeros(events, 0, dtype=torch.bool),
    )
    return found.to(torch.device(device))


def expanded(batch: Batch, inputs: RankingInputs) -> Batch:
    """The batch in which each candidate is a request of its own, with copies of what is its request's.

    Of batches without lists that have weights or are numbers, and without events' lists.
    """
    device, candidates = batch.rows.device, batch.rows.numel()
    request = sample_of_row(batch.candidate_offsets, candidates)
    parts, counts, events = [], [], None
    names: list[str] = batch.features.keys()
    for key in names:
        values, lengths = batch.features[key].values(), batch.features[key].lengths()
        if key in inputs.candidate_ids:
            parts.append(values)
            counts.append(torch.ones_like(request))
            continue
        offsets = batch.features[key].offsets()
        copied, _ = jagged_index_select(values, offsets, request, int(lengths[request].sum()))
        parts.append(copied)
        counts.append(lengths[request])
        if key in inputs.history:
            places = torch.arange(values.numel(), device=device)
            events, _ = jagged_index_select(places, offsets, request, copied.numel())
    features = KeyedJaggedTensor(
        names, torch.cat(parts), lengths=torch.cat(counts), length_per_key=[part.numel() for part in parts]
    )
    of_events = {} if events is None else {name: of[events] for name, of in _fields(batch, "history_") if name != "history_lists"}
    of_requests = {name: of[request] for name, of in _fields(batch, "request_") if name != "request_number_lists"}
    of_requests |= {"request_index": batch.rows, "user_index": batch.user_index[request]}
    offsets = torch.arange(candidates + 1, device=device)
    changed: dict[str, Any] = {"features": features, "candidate_offsets": offsets, **of_requests, **of_events}
    return dataclasses.replace(batch, **changed)


def _fields(batch: Batch, prefix: str) -> list[tuple[str, Tensor]]:
    return [
        (one.name, value)
        for one in dataclasses.fields(batch)
        if one.name.startswith(prefix) and (value := getattr(batch, one.name)) is not None
    ]


def model_of(name: str, inputs: RankingInputs, device: str) -> RequestModel:
    """A model by its name in `MODELS`, with tables of the benchmark's sizes."""
    torch.manual_seed(0)
    sizes = dict.fromkeys([*inputs.features.values(), *inputs.candidate_ids.values(), *inputs.candidates.values()], TABLE)
    kind = REQUEST_MODELS[name.split(",")[0].split(" ")[0]]
    return kind(inputs, sizes, embedding_dim=DIM, **MODELS[name]).to(device)


def step(model: nn.Module, batch: Batch, device: str) -> Tensor:
    """Forward and backward; gradients are dropped."""
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        loss: Tensor = model(batch).loss
    torch.autograd.backward(loss)
    model.zero_grad(set_to_none=False)
    return loss.detach()


def check(model: RequestModel, batch: Batch, inputs: RankingInputs, device: str) -> None:
    """Refuse scores that are others of the expanded requests."""
    other = expanded(batch, inputs)
    with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        found, wanted = model.logits(batch), model.logits(other)
    for task, of in found.items():
        apart = float((of - wanted[task]).norm() / wanted[task].norm())
        if not apart <= AGREEMENT:
            raise ArithmeticError(f"{task}: scores of expanded requests differ by {apart:.3g} of the norm")


def measure(model: RequestModel, batch: Batch, device: str) -> dict[str, Any]:
    """Milliseconds and bytes of a step."""
    step(model, batch, device)
    if device == "cpu":
        return {"ms": seconds_of(lambda: step(model, batch, device))[0] * 1e3, "bytes": None}
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(model, batch, device)
    peak = torch.cuda.max_memory_allocated() - before
    times = spread([of / 1e3 for of in event_us(lambda: step(model, batch, device), 5, 1)])
    row = {"ms": times["median"], "min": times["min"], "max": times["max"], "bytes": peak}
    of_graph = None
    if peak <= MOST_CAPTURED:
        of_graph = replay_us(lambda: step(model, batch, device))
        torch.cuda.empty_cache()
    is_captured = of_graph is not None and of_graph["captured"]
    return {
        **row,
        "gpu_ms": of_graph["median"] / 1e3 if of_graph is not None and is_captured else row["ms"],
        "captured": is_captured,
    }


def measured(name: str, requests: int, longest: int, device: str, room: float) -> dict[str, Any]:
    """One model with all numbers of candidates, in both ways as far as they fit."""
    inputs = inputs_of()
    model = model_of(name, inputs, device)
    rows: dict[str, Any] = {}
    last: tuple[int, int] | None = None
    for per_request in CANDIDATES:
        batch = batch_of(inputs, requests, per_request, longest, device)
        if per_request == CANDIDATES[0]:
            check(model, batch_of(inputs, min(requests, 64), 5, longest, device, seed=1), inputs, device)
        row = rows[str(per_request)] = {"jagged": measure(model, batch, device)}
        forecast = None if last is None else last[1] * per_request / last[0]
        if forecast is not None and forecast > room:
            row["expanded"] = {"forecast_bytes": int(forecast)}
        else:
            row["expanded"] = measure(model, expanded(batch, inputs), device)
            if row["expanded"]["bytes"] is not None:
                last = per_request, row["expanded"]["bytes"]
            elif per_request >= 16:
                # On a CPU nothing tells what a step takes.
                break
    times = {int(per_request): row["jagged"].get("gpu_ms", row["jagged"]["ms"]) for per_request, row in rows.items()}
    if len(times) == len(CANDIDATES):
        slope = (times[128] - times[1]) / 127
        for count, time_of in times.items():
            rows[str(count)]["of_line"] = round(time_of / (times[1] + slope * (count - 1)), 3)
    return rows


def main() -> None:
    """Measure all models, or some, and save what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", default=[""], help="parts of models' names")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no model begins after so many")
    options = parser.parse_args()
    is_cuda = options.device == "cuda"
    facts, begun = environment(options.device), time.perf_counter()
    former = other_parts("many_candidates", facts).get("models", {}) if is_cuda else {}
    # What was measured before the GPU's time was measured, too, is of another kind.
    rows = {name: of for name, of in former.items() if all("gpu_ms" in row["jagged"] for row in of.values())}
    requests, longest = (REQUESTS, LONGEST) if is_cuda else (8, 20)
    room = torch.cuda.mem_get_info()[0] * 0.9 if is_cuda else float("inf")
    for name in MODELS:
        if not any(part in name for part in options.only) or time.perf_counter() - begun > options.seconds:
            continue
        rows[name] = measured(name, requests, longest, options.device, room)
        for count, row in rows[name].items():
            told = f"jagged {row['jagged']}; expanded {row['expanded']}; {row.get('of_line')} of the line"
            print(f"{name}, {count} candidates: {told}", flush=True)
        if is_cuda:
            path = save("many_candidates", {"environment": facts, "requests": REQUESTS, "models": rows})
            torch.cuda.empty_cache()
    if is_cuda:
        print(f"saved in {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
