"""Padded twin of the ranking model: every candidate has all of its request beside it. It reads the weights of the jagged one."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from jagged.data.table_batches import Batch
from jagged.models import DIN, DLRM, DLRMHSTU, DCNv2, RequestModel, WukongModel
from tests.reference.attention import padded, time_buckets
from tests.reference.experts import grouped_mlp, mmoe, ple
from tests.reference.hstu import PaddedHSTUBlock
from tests.reference.interactions import cross_experts, feature_tokens, wukong
from tests.reference.target_attention import PaddedTargetAttention
from tests.reference.transformer import PaddedCrossAttention, PaddedTransformerBlock


def bags(ids: Any, weight: Tensor, mode: str) -> Tensor:
    """`[N, D]`, a bag at a time."""
    weights = ids.weights_or_none()
    found = []
    for sample, part in enumerate(ids.values().split(ids.lengths().tolist())):
        rows = weight[part]
        if weights is not None:
            rows = rows * weights.split(ids.lengths().tolist())[sample][:, None]
        pooled = rows.sum(0)
        found.append(pooled / max(len(part), 1) if mode == "mean" else pooled)
    return torch.stack(found) if found else weight.new_zeros(0, weight.shape[1])


def rank(x: float, borders: Sequence[float]) -> float:
    """Where a number stands among training's borders, from -0.5 to 0.5, in units of the deviation of such."""
    if len(borders) < 2:
        return 0.0
    return 12**0.5 * (float(np.interp(x, borders, np.linspace(0, 1, len(borders)))) - 0.5)


class Padded:
    """The loss of a batch, and logits `[S]` of every task."""

    def __init__(self, model: RequestModel) -> None:
        self.model, self.config, self.inputs = model, model.config, model.scorer.inputs
        self.encodes = len(model.scorer.histories) > 0
        # What candidates read of events that are not encoded before.
        self.read = {DLRMHSTU: self.targets, DIN: self.interests}.get(type(model))
        self.weights = dict(model.named_parameters())
        self.tables: dict[str, Tensor] = {}
        for prefix, module in model.named_modules():
            for name, table in getattr(module, "embedding_bags", getattr(module, "embeddings", {})).items():
                self.tables[name] = table.weight
                assert f"{prefix}." in "".join(self.weights)

    def table(self, name: str) -> Tensor:
        safe = name.replace(".", "_")
        return self.tables[safe] if safe in self.tables else self.tables[f"{safe}_"]

    def of(self, prefix: str) -> dict[str, Tensor]:
        start = f"scorer.{prefix}."
        return {name.removeprefix(start): of for name, of in self.weights.items() if name.startswith(start)}

    def linear(self, prefix: str, x: Tensor) -> Tensor:
        of = self.of(prefix)
        return nn.functional.linear(x, of["weight"], of.get("bias"))

    def normal(self, side: str, batch: Batch, statistics: dict[str, Any]) -> list[Tensor]:
        """`[N, 3 C]` of plain numbers, and of lists."""
        found = []
        if names := getattr(self.inputs, f"{side}_numbers"):
            values, missing = getattr(batch, f"{side}_numbers").double(), getattr(batch, f"{side}_numbers_missing")
            columns = [
                torch.where(missing[:, i], 0.0, (values[:, i] - as_stored(of.mean)) / as_stored(of.deviation or 1.0))
                for i, of in enumerate(statistics[name] for name in names)
            ]
            ranks = [
                torch.where(
                    missing[:, i], 0.0, torch.tensor([rank(x, of.borders) for x in values[:, i].tolist()], dtype=torch.float64)
                )
                for i, of in enumerate(statistics[name] for name in names)
            ]
            found.append(torch.stack([*columns, *ranks, *missing.double().unbind(1)], 1))
        if names := getattr(self.inputs, f"{side}_number_lists", ()):
            lists = getattr(batch, f"{side}_number_lists")
            means, ranks, none = [], [], []
            for name in names:
                lengths = lists[name].lengths().tolist()
                for values, here in zip(lists[name].values().split(lengths), lists[name].weights().split(lengths), strict=True):
                    there = values[here > 0].double()
                    of = statistics[name]
                    none.append(float(not len(there)))
                    means.append((there.mean() - as_stored(of.mean)) / as_stored(of.deviation or 1.0) if len(there) else 0.0)
                    ranks.append(rank(float(there.mean()), of.borders) if len(there) else 0.0)
            found.append(torch.tensor([*means, *ranks, *none], dtype=torch.float64).view(3 * len(names), -1).T)
        return found

    def gathered(self, batch: Batch, side: list[Tensor]) -> Tensor:
        """What the events of the gathered history show, `[sum L, C]`."""
        shown = [self.table(table)[batch.features[key].values()] for key, table in self.inputs.history.items()]
        shown += [bags(batch.history_lists[key], self.table(of), "mean") for key, of in self.inputs.history_lists.items()]
        shown += side
        if self.inputs.history_labels:
            shown += [batch.history_labels.double(), batch.history_label_mask.double()]
        return torch.cat(shown, 1)

    def history(self, of: str, batch: Batch, shown: Tensor, key: str) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Encoded events `[R, L, D]`, which are there, and the means of their ids and of them."""
        lengths, is_gathered = batch.features[key].lengths(), key in self.inputs.history
        x = padded(shown, lengths)
        place = torch.arange(x.shape[1])
        filled = place < lengths[:, None]
        x = self.encoded(of, batch, x, lengths, filled, is_gathered) if self.encodes and self.read is None else x
        counts = filled.double()
        if is_gathered and self.inputs.history_weights:
            counts = padded(batch.history_weights.double(), lengths)
        totals = counts.sum(1, keepdim=True)
        tables = self.inputs.history if is_gathered else {key: self.inputs.list_histories[key]}
        ids = [padded(self.table(table)[batch.features[name].values()], lengths) for name, table in tables.items()]
        averaged = [*ids, x] if self.encodes else [x]
        return x, filled, [(counts[:, :, None] * one).sum(1) / totals.where(totals > 0, 1) for one in averaged]

    def encoded(self, of: str, batch: Batch, x: Tensor, lengths: Tensor, filled: Tensor, is_gathered: bool) -> Tensor:
        """Events that have seen those before them."""
        place = torch.arange(x.shape[1])
        from_end = (lengths[:, None] - 1 - place).clamp(0, self.config["max_history"] - 1)
        x = self.linear(f"{of}.projection", x) + self.of(f"{of}.positions")["weight"][from_end]
        if is_gathered and (count := self.config["num_time_buckets"]) is not None:
            since = (batch.request_times[:, None] - padded(batch.history_times, lengths)).clamp(min=0)
            x = x + self.of(f"{of}.times")["weight"][time_buckets(since).clamp(max=count - 1)]
        visible = filled[:, None] & (place <= place[:, None]) & filled[:, :, None]
        width, heads = self.config["embedding_dim"], self.config["num_heads"]
        for number in range(self.config["num_layers"]):
            block = PaddedTransformerBlock(width, heads, heads, False, "pre")
            x = functional_call(block, self.of(f"{of}.blocks.{number}"), (x, visible, place[None]))
        norm = self.of(f"{of}.norm")
        return nn.functional.layer_norm(x, (width,), norm["weight"], norm["bias"])

    def targets(self, of: str, batch: Batch, shown: Tensor, key: str, queries: Tensor) -> Tensor:
        """What comes out at each candidate, `[S, D]`, which stands alone behind a copy of its request's events."""
        most, width, heads = (self.config[name] for name in ("max_history", "embedding_dim", "num_heads"))
        buckets = self.config["num_time_buckets"] if key in self.inputs.history else None
        before = batch.features[key].lengths().tolist()
        events = self.linear(f"{of}.projection", shown).split(before)
        when = (torch.zeros(len(shown), dtype=torch.int64) if buckets is None else batch.history_times).split(before)
        requests = batch.candidate_requests.tolist()
        now = batch.request_times[:, None] if buckets is not None else torch.zeros(len(before), 1, dtype=torch.int64)
        lengths = torch.tensor([before[request] + 1 for request in requests])
        x = padded(torch.cat([torch.cat([events[r], query[None]]) for r, query in zip(requests, queries, strict=True)]), lengths)
        times = padded(torch.cat([torch.cat([when[r], now[r]]) for r in requests]), lengths)
        place = torch.arange(x.shape[1])
        x = x + self.of(f"{of}.positions")["weight"][(lengths[:, None] - 1 - place).clamp(0, most)]
        filled = place < lengths[:, None]
        visible = filled[:, None] & (place <= place[:, None]) & filled[:, :, None]
        for number in range(self.config["num_layers"]):
            block = PaddedHSTUBlock(width, heads, width // heads, most, buckets, most)
            inputs = x, visible, place.expand(len(x), -1), times, lengths
            x = functional_call(block, self.of(f"{of}.blocks.{number}"), inputs)
        norm = self.of(f"{of}.norm")
        return nn.functional.layer_norm(x[filled & (place == lengths[:, None] - 1)], (width,), norm["weight"], norm["bias"])

    def interests(self, of: str, batch: Batch, shown: Tensor, key: str, queries: Tensor) -> Tensor:
        """Of each candidate the weighted sum of a copy of its request's events, `[S, D]`, every event with it in a row."""
        width, sizes = self.config["embedding_dim"], self.config["attention_sizes"]
        before = batch.features[key].lengths()

        def normal(name: str, x: Tensor) -> Tensor:
            norm = self.of(f"{of}.{name}_norm")
            return nn.functional.layer_norm(x, (width,), norm["weight"], norm["bias"])

        events = normal("event", self.linear(f"{of}.projection", shown)).split(before.tolist())
        queries = normal("candidate", queries)
        lengths = before[batch.candidate_requests]
        rows = padded(torch.cat([events[request] for request in batch.candidate_requests.tolist()]), lengths)
        filled = torch.arange(rows.shape[1]) < lengths[:, None]
        twin = PaddedTargetAttention(width, sizes, self.config["activation"], False)
        return functional_call(twin, self.of(f"{of}.attention"), (rows, filled, queries[:, None])).squeeze(1)

    def __call__(self, batch: Batch, statistics: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        inputs, counts = self.inputs, batch.candidate_offsets.diff()
        user = [bags(batch.features[key], self.table(table), "mean") for key, table in inputs.features.items()] + self.pooled(
            batch, "weighted_features", "sum"
        )
        item = [self.table(table)[batch.features[key].values()] for key, table in inputs.candidate_ids.items()]
        for place, (key, table) in enumerate(inputs.candidate_lists.items()):
            ends = batch.candidate_list_offsets[:, place].tolist()
            values = [batch.features[key].values()[first:last] for first, last in itertools.pairwise(ends)]
            rows = self.table(table)
            item.append(torch.stack([rows[of].mean(0) if len(of) else rows.new_zeros(rows.shape[1]) for of in values]))
        item += [*self.pooled(batch, "candidates", "mean"), *self.pooled(batch, "weighted_candidates", "sum")]
        of_user, of_item = (self.normal(side, batch, statistics) for side in ("request", "candidate"))
        longest = int(counts.max())
        there = torch.arange(longest) < counts[:, None]
        shown = {}
        if inputs.history:
            shown[next(iter(inputs.history))] = self.gathered(batch, self.normal("history", batch, statistics))
        shown |= {key: self.table(table)[batch.features[key].values()] for key, table in inputs.list_histories.items()}
        queries = None
        if self.encodes and (item or of_item):
            queries = padded(self.linear("query", torch.cat([*item, *of_item], 1)), counts)
        for number, (key, values) in enumerate(shown.items()):
            events, filled, means = self.history(f"histories.{number}", batch, values, key)
            if not self.encodes:
                is_gathered = key in inputs.history
                tables = (
                    [*inputs.history.values(), *inputs.history_lists.values()] if is_gathered else [inputs.list_histories[key]]
                )
                widths = [self.table(table).shape[1] for table in tables]
                *vectors, others = means[0].split([*widths, means[0].shape[1] - sum(widths)], 1)
                user, of_user = user + vectors, of_user + ([others] if others.shape[1] else [])
                continue
            if self.read is not None:
                user += means[:-1]
                item.append(self.read(f"histories.{number}", batch, values, key, queries[there]))
                continue
            user += means
            if queries is not None:
                attention = PaddedCrossAttention(
                    *(self.config[x] for x in ("embedding_dim", "num_heads", "embedding_dim", "num_heads"))
                )
                seen = filled[:, None] & there[:, :, None]
                read = functional_call(attention, self.of(f"histories.{number}.attention"), (queries, events, seen))
                item.append(read[there])
        towers = self.body(user, of_user, item, of_item, counts, there)
        return self.loss(batch, dict(zip(self.model.tasks, towers.unbind(1), strict=True)))

    def body(
        self, user: list[Tensor], of_user: list[Tensor], item: list[Tensor], of_item: list[Tensor], counts: Tensor, there: Tensor
    ) -> Tensor:
        """Logits `[S, T]`."""
        if isinstance(self.model, (DLRM, DCNv2, WukongModel)):
            wide = [[x.repeat_interleave(counts, 0) for x in of] for of in (user, of_user)]
            named = {DLRM: self.dlrm, DCNv2: self.dcnv2, WukongModel: self.wukong}
            return named[type(self.model)](*wide, item, of_item)
        longest = there.shape[1]
        wide = [x[:, None].expand(-1, longest, -1) for x in (*user, *of_user)]
        x = [padded(x, counts) for x in (*item, *of_item)]
        cross = self.config.get("cross")
        if cross == "dot":
            vectors = [[padded(x, counts) for x in item], [x[:, None].expand(-1, longest, -1) for x in user]]
            for part, side, numbers in ((0, "candidate", of_item), (1, "request", of_user)):
                if numbers:
                    made = self.linear(f"body.dots.numbers.{side}.0", torch.cat(numbers, 1))
                    vectors[part].append(made[:, None].expand(-1, longest, -1) if part else padded(made, counts))
            own, theirs = vectors
            x += pairs((a, b) for i, a in enumerate(own) for b in own[i + 1 :])
            x += pairs((a, b) for a in own for b in theirs)
            wide += pairs((a, b) for i, a in enumerate(theirs) for b in theirs[i + 1 :])
        met = self.meeting(x, wide)
        met = (self.crossed(met, "body.crossed") if cross == "dcn" else met.relu())[there]
        towers = self.of("body.towers")
        if (kind := self.config.get("experts")) is None:
            found = grouped_mlp(met, towers)
        else:
            experts = self.of("body.experts")
            tasks, count, layers = len(self.model.tasks), self.config["num_experts"], self.config["expert_layers"]
            own = mmoe(met, met, experts) if kind == "mmoe" else ple(met, experts, layers, tasks, count, count)
            found = grouped_mlp(own, towers)
        return torch.cat(found, 1)

    def perceptron(self, prefix: str, x: Tensor, *, last: bool = False) -> Tensor:
        """Linear layers, a ReLU behind each but the last."""
        of = self.of(prefix)
        names = sorted({int(name.split(".")[0]) for name in of})
        for number in names:
            x = nn.functional.linear(x, of[f"{number}.weight"], of[f"{number}.bias"])
            x = x.relu() if last or number < names[-1] else x
        return x

    def dlrm(self, user: list[Tensor], of_user: list[Tensor], item: list[Tensor], of_item: list[Tensor]) -> Tensor:
        bottoms = [
            [self.perceptron(f"body.dots.numbers.{side}", torch.cat(numbers, 1))] if numbers else []
            for side, numbers in (("request", of_user), ("candidate", of_item))
        ]
        theirs, own = [*user, *bottoms[0]], [*item, *bottoms[1]]
        shared = bottoms[0] + [(a * b).sum(1, keepdim=True) for i, a in enumerate(theirs) for b in theirs[i + 1 :]]
        rows = bottoms[1] + [(a * b).sum(1, keepdim=True) for i, a in enumerate(own) for b in own[i + 1 :]]
        rows += [(a * b).sum(1, keepdim=True) for a in own for b in theirs]
        of = self.of("body.top")
        if not rows:
            return self.perceptron("body.top", torch.cat(shared, 1))
        weight = of["layers.0.weight"]
        if shared:
            weight = torch.cat([weight, of["context_projection.weight"]], 1)
        x = nn.functional.linear(torch.cat([*rows, *shared], 1), weight, of["layers.0.bias"])
        for number in range(1, len(self.config["top_sizes"]) + 1):
            x = nn.functional.linear(x.relu(), of[f"layers.{number}.weight"], of[f"layers.{number}.bias"])
        return x

    def dcnv2(self, user: list[Tensor], of_user: list[Tensor], item: list[Tensor], of_item: list[Tensor]) -> Tensor:
        x = torch.cat([*user, *of_user, *item, *of_item], 1)
        crossed = (
            self.crossed(x, "body.cross")
            if self.config["cross_experts"] is None
            else cross_experts(x, self.of("body.cross"), self.config["cross_layers"], "relu")
        )
        if self.config["structure"] == "stacked":
            return self.linear("body.logits", self.perceptron("body.deep", crossed, last=True))
        of = self.of("body.deep")
        if "context_projection.weight" not in of:
            return self.linear("body.logits", torch.cat([crossed, self.perceptron("body.deep", x, last=True)], 1))
        weight = torch.cat([of["context_projection.weight"], of["layers.0.weight"]], 1)
        deep = nn.functional.linear(x, weight, of["layers.0.bias"]).relu()
        for number in range(1, len(self.config["layer_sizes"])):
            deep = nn.functional.linear(deep, of[f"layers.{number}.weight"], of[f"layers.{number}.bias"]).relu()
        return self.linear("body.logits", torch.cat([crossed, deep], 1))

    def wukong(self, user: list[Tensor], of_user: list[Tensor], item: list[Tensor], of_item: list[Tensor]) -> Tensor:
        tokens = []
        for side, vectors, numbers in (("request", user, of_user), ("candidate", item, of_item)):
            features = [*vectors, *([torch.cat(numbers, 1)] if numbers else [])]
            if features:
                of = self.of(f"body.{side}_tokens")
                tokens.append(feature_tokens(torch.cat(features, 1), of, [x.shape[1] for x in features]))
        layers, hidden = self.config["num_layers"], len(self.config["hidden_sizes"])
        out = wukong(torch.cat(tokens, 1), self.of("body.layers"), layers, hidden)
        return self.perceptron("body.top", out.flatten(1))

    def pooled(self, batch: Batch, name: str, mode: str) -> list[Tensor]:
        keyed = getattr(batch, name)
        return [bags(keyed[key], self.table(table), mode) for key, table in getattr(self.inputs, name).items()]

    def meeting(self, x: list[Tensor], wide: list[Tensor]) -> Tensor:
        of = self.of("body.meeting")
        if not x:
            return nn.functional.linear(torch.cat(wide, 2), of["weight"], of["bias"])
        weight = of["layers.0.weight"]
        if wide:
            weight = torch.cat([weight, of["context_projection.weight"]], 1)
        return nn.functional.linear(torch.cat([*x, *wide], 2), weight, of["layers.0.bias"])

    def crossed(self, first: Tensor, prefix: str) -> Tensor:
        x, of = first, self.of(prefix)
        for number in range(self.config["cross_layers"]):
            layer = f"layers.{number}."
            weight, bias = of.get(f"{layer}weight"), of.get(f"{layer}bias")
            if weight is None:
                weight, bias = of[f"{layer}1.weight"] @ of[f"{layer}0.weight"], of[f"{layer}1.bias"]
            x = first * (x @ weight.T + bias) + x
        return x

    def known(self, batch: Batch, row: int, name: str, places: dict[str, int]) -> bool | None:
        """The label of a row, or None. Where a label that can be 1 only with this one is 1, this one is, if that is wanted."""
        children = [child for child, parent in self.model.conditional.items() if parent == name]
        if self.config["implied"] and any(batch.labels[row, places[child]] > 0 for child in children):
            return True
        return bool(batch.labels[row, places[name]] > 0) if batch.label_mask[row, places[name]] else None

    def loss(self, batch: Batch, towers: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """By the definition: probabilities, and a row at a time."""
        places = {name: list(self.inputs.labels).index(name) for name in towers}
        probabilities, total, rows = {}, torch.zeros((), dtype=torch.float64), 0.0
        for name in sorted(towers, key=lambda name: name in self.model.conditional):
            parent = self.model.conditional.get(name)
            probabilities[name] = towers[name].sigmoid() * (1 if parent is None else probabilities[parent])
        for row in range(len(batch.rows)):
            counted = False
            for name in places:
                parent = self.model.conditional.get(name)
                known = {one: self.known(batch, row, one, places) for one in (name, parent) if one is not None}
                if all(label is not None for label in known.values()):
                    label = known[name]
                    p = probabilities[name][row]
                    total = total - batch.weights[row].double() * (p if label else 1 - p).log()
                    counted = True
            rows += float(batch.weights[row]) * counted
        return total / (rows or 1.0), {name: p.logit() for name, p in probabilities.items()}


def pairs(of: Iterable[tuple[Tensor, Tensor]]) -> list[Tensor]:
    return [(a * b).sum(2, keepdim=True) for a, b in of]


def as_stored(figure: float) -> float:
    return float(torch.tensor(figure))
