"""Impressions with planted clicks and purchases, whose best attainable figures are known because their probabilities are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from jagged.data.histories import spread

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

#: The columns with a label, in the order in which a user comes to them.
TASKS = ("click", "buy")
#: How many of a user's last clicks the probabilities depend on.
MEMORY = 20
#: Of a request, at most: its clicks fit into the memory.
MAX_CANDIDATES = MEMORY

AGE_GROUPS = ("18-24", "25-34", "35-44", "45-54", "55-64", "65+")
COUNTRIES = ("AT", "CH", "DE", "FR", "IT", "NL", "PL", "SE")
DEVICES = ("phone", "tablet", "desktop")
PAGES = ("home", "search", "category", "cart")
CATEGORIES = (
    "bikes", "books", "cameras", "games", "garden", "kitchen", "lamps", "music", "shoes", "tools", "toys", "watches",
)  # fmt: skip
BRANDS = (
    "acorn", "birch", "cobalt", "dune", "ember", "fjord", "grove", "heron", "iris", "juniper",
    "kestrel", "larch", "maple", "nimbus", "onyx", "prairie", "quill", "raven", "sable", "tundra",
)  # fmt: skip
DISCOUNTS = (0.0, 0.1, 0.2, 0.3)

_DAYS = 90
# 1 January 2025, in seconds since 1970: hours of the day follow from times.
_START = 1_735_689_600
# How busy the hours of a day are, from midnight on.
_BUSY = np.array([2, 1, 1, 1, 1, 1, 2, 3, 4, 5, 5, 5, 5, 5, 5, 5, 5, 6, 7, 8, 9, 9, 7, 4]) / 106
_SHARES = {
    "age_group": np.array([0.15, 0.25, 0.22, 0.18, 0.12, 0.08]),
    "country": np.array([0.08, 0.08, 0.28, 0.18, 0.12, 0.10, 0.10, 0.06]),
    "device": np.array([0.55, 0.10, 0.35]),
    "page": np.array([0.40, 0.30, 0.20, 0.10]),
    "discount": np.array([0.70, 0.12, 0.10, 0.08]),
}
# What tastes change with from the youngest to the oldest: straight on, and those in the middle apart from both ends.
_TRENDS = np.array([[-1.5, -0.9, -0.3, 0.3, 0.9, 1.5], [-1.2, 0.2, 1.0, 1.0, 0.2, -1.2]])
# Of the log-odds of a click, and of a purchase after it: the intercept, the price's factor (its logarithm) and the affinity's.
_SCALARS = {"click": (-1.0, -1.0, 8.0), "buy": (-1.3, -0.5, 1.5)}
# Elements of list columns that are made together, at most: their memory beside the table.
_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class ImpressionTruth:
    """What is true of a table of `synthetic_impressions`, row by row.

    Attributes:
        click_probability: float64 `[n]`, of a click given all columns and the user's clicks at earlier times.
        buy_probability: float64 `[n]`, of a click and a purchase after it, given the same.
        affinity: float64 `[n]`, the share of the row's category among the last 20 rows that its user clicked at earlier times, in
            the order of the table; 0 without clicks.
        labels: the table's `click` and `buy`, bool `[n]` each.
        users: int64 `[n]`, the table's `user_id`.
    """

    click_probability: FloatArray
    buy_probability: FloatArray
    affinity: FloatArray
    labels: dict[str, BoolArray]
    users: IntArray

    def figures(self, task: str, rows: Any = None, *, probabilities: Any = None) -> dict[str, float]:
        """What ranking and predicting by the true probabilities reaches on some rows: no model does better in expectation.

        * `auc`: the share of pairs of a positive and a negative that are in order, half of a tied pair's.
        * `gauc`: the mean of the users' AUC over users with both labels among the rows, weighted by their rows.
        * `logloss`: mean of `-y log p - (1 - y) log(1 - p)`.

        AUC and GAUC are left out where labels are all alike, of each user alike.

        Args:
            task: "click" or "buy".
            rows: int `[k]`, a slice or bool `[n]`, which rows of the table count; None for all.
            probabilities: float `[k]`, a model's for the same rows and labels, in the place of the true ones.

        Raises:
            ValueError: another task, no rows, or probabilities of another shape or not in 0 to 1.
        """
        if task not in TASKS:
            raise ValueError(f"task: got {task!r}, expected one of {', '.join(map(repr, TASKS))}")
        chosen = slice(None) if rows is None else rows if isinstance(rows, slice) else np.asarray(rows)
        if not isinstance(chosen, slice) and not chosen.size:
            # An empty list says nothing of its type.
            chosen = slice(0)
        labels, users = self.labels[task][chosen], self.users[chosen]
        true = self.click_probability if task == "click" else self.buy_probability
        given: FloatArray = np.asarray(true[chosen] if probabilities is None else probabilities, dtype=np.float64)
        if not len(labels):
            raise ValueError("rows: got none, expected at least one")
        if given.shape != labels.shape or not ((given >= 0) & (given <= 1)).all():
            raise ValueError(f"probabilities: got shape {given.shape}, expected {labels.shape} in 0 to 1, one for each row")
        result = {}
        for name, groups in (("auc", np.zeros_like(users)), ("gauc", users)):
            of_group, sizes = _group_auc(groups, given, labels)
            if len(sizes):
                result[name] = float((of_group * sizes).sum() / sizes.sum())
        # What is certain and wrong costs no infinity, so that figures stay comparable.
        of_label = np.maximum(np.where(labels, given, 1 - given), 1e-15)
        return {**result, "logloss": float(-np.log(of_label).mean())}


class ImpressionModel:
    """The generating distribution of clicks and purchases.

    The log-odds of a click are a sum. Of single columns: position, hour, page, discount, price, country, brand, and a little of
    user and item. Of two columns: page and device, age group and category (what an age group likes). And 8 times the affinity,
    the share of the row's category among the last 20 clicks of its user. A linear model of the columns knows the first, crosses
    tell the second, histories the third. Those of a purchase after a click are a sum of effects of page, discount, price,
    country, brand, age group and device, and of 1.5 times the affinity.

    Args:
        num_users, num_items: how many.
        rng: draws the effects, and what users and items are.

    Attributes:
        user: columns of users by name, int64 `[num_users]`: codes of age group and country.
        item: columns of items, int64 `[num_items]`: codes of category and brand.
        price: float64 `[num_items]`, in whole cents.
        popularity: float64 `[num_items]`, how often an item is shown.
    """

    def __init__(self, num_users: int, num_items: int, rng: np.random.Generator) -> None:
        self.user: dict[str, IntArray] = {name: _drawn(_SHARES[name], rng.random(num_users)) for name in ("age_group", "country")}
        categories = np.floor(len(CATEGORIES) * rng.random(num_items) ** 1.3).astype(np.int64)
        brands = np.floor(len(BRANDS) * rng.random(num_items) ** 1.5).astype(np.int64)
        self.item: dict[str, IntArray] = {"category": categories, "brand": brands}
        log_price: FloatArray = 3.0 + _uniform(rng, len(CATEGORIES), 0.7)[categories] + _uniform(rng, num_items, 0.4)
        self.price: FloatArray = np.asarray(np.round(np.exp(log_price), 2))
        weight = 1.0 / (np.arange(num_items) + num_items / 20)
        self.popularity: FloatArray = np.empty(num_items)
        # Sorted uniform numbers, not a library shuffle: the same sample under every numpy version.
        self.popularity[np.argsort(rng.random(num_items), kind="stable")] = weight / weight.sum()
        draw = lambda shape, deviation: _uniform(rng, shape, deviation)  # noqa: E731
        # By the columns whose codes say which effect it is.
        self._effects: dict[str, dict[tuple[str, ...], FloatArray]] = {
            "click": {
                ("position",): -1.2 * np.log(np.arange(1, MAX_CANDIDATES + 1)),
                ("hour",): 0.3 * np.sin(2 * np.pi * (np.arange(24) - 14) / 24),
                ("page",): np.array([-0.2, 0.8, 0.2, -0.8]),
                ("discount",): np.array([-0.4, 0.6, 1.2, 1.8]),
                ("country",): draw(len(COUNTRIES), 0.3),
                ("user",): draw(num_users, 0.06),
                ("item",): draw(num_items, 0.08),
                ("brand",): draw(len(BRANDS), 0.5),
                ("age_group", "category"): _TRENDS.T @ draw((len(_TRENDS), len(CATEGORIES)), 0.5),
                ("device", "page"): draw((len(DEVICES), len(PAGES)), 0.5),
            },
            "buy": {
                ("page",): np.array([-0.4, 0.1, 0.0, 0.9]),
                ("discount",): np.array([-0.2, 0.3, 0.6, 0.9]),
                ("country",): draw(len(COUNTRIES), 0.25),
                ("brand",): draw(len(BRANDS), 0.3),
                ("age_group",): draw(len(AGE_GROUPS), 0.3),
                ("device",): draw(len(DEVICES), 0.3),
            },
        }

    def log_odds(self, task: str, columns: dict[str, IntArray]) -> FloatArray:
        """Of a click, or of a purchase after a click (`task` "buy"), without the affinity's part: float64 `[n]`.

        Args:
            columns: codes int64 `[n]` by name: user, item, position (from 0), page, discount, device, hour.
        """
        user, item = columns["user"], columns["item"]
        of_user = {name: of[user] for name, of in self.user.items()}
        codes = {**columns, **of_user, **{name: of[item] for name, of in self.item.items()}}
        intercept, per_price, _ = _SCALARS[task]
        result: FloatArray = intercept + per_price * (np.log(self.price) - 3.0)[item]
        for names, effect in self._effects[task].items():
            result += effect[tuple(codes[name] for name in names)]
        return result

    @staticmethod
    def probability(task: str, log_odds: FloatArray, affinity: FloatArray) -> FloatArray:
        """Of a click, or of a purchase after a click, float64 `[n]`."""
        result: FloatArray = 1.0 / (1.0 + np.exp(-(log_odds + _SCALARS[task][2] * affinity)))
        return result


def synthetic_impressions(
    seed: int = 0,
    *,
    num_users: int = 800,
    num_items: int = 240,
    mean_requests: int = 40,
    max_candidates: int = 12,
    history_length: int = 0,
) -> tuple[pa.Table, ImpressionTruth]:
    """Generate a table of impressions with clicks and purchases, and what is true of each row.

    Rows are items that were shown, in requests of 1 to `max_candidates` different items, within 90 days. Some users have many
    times as many requests as others, some items are shown many times as often. See `ImpressionModel` for what clicks depend on:
    on the columns of the row, and on the categories that its user clicked before.

    The table has the columns `request_id`, `user_id`, `item_id`, `timestamp` (seconds since 1970), all int64; `age_group`,
    `country`, `device`, `page`, text; `hour`, `position` (from 1), int64; `category`, `brand`, text; `price`, `discount`,
    float64; `click` and `buy`, int64 of 0 and 1, where only what is clicked is bought. Rows of a request follow one another in
    the order of positions and share user, time, device and page; times ascend, and no two requests of a user have the same time.

    Args:
        seed: the sample is a function of it and of the sizes.
        num_users: at least 1.
        num_items: at least twice `max_candidates`.
        mean_requests: of a user, at least 4. A user has from a third to almost seven times as many.
        max_candidates: of a request, 1 to 20; their mean is about a third of it.
        history_length: adds the last so many clicks of the user at earlier times, oldest first, as the list columns
            `clicked_item_id` (lists of int64) and `clicked_category` (of text). 0: the table has no lists.

    Returns:
        The table, and the truth beside it.

    Raises:
        ValueError: sizes out of range.
    """
    if (
        num_users < 1
        or mean_requests < 4
        or not 1 <= max_candidates <= MAX_CANDIDATES
        or num_items < 2 * max_candidates
        or history_length < 0
    ):
        raise ValueError(
            f"sizes: got num_users={num_users}, num_items={num_items}, mean_requests={mean_requests}, "
            f"max_candidates={max_candidates}, history_length={history_length}, expected at least 1 user, at least 4 requests, "
            f"1 to {MAX_CANDIDATES} candidates, twice as many items and a length from 0 on"
        )
    rng = np.random.Generator(np.random.PCG64(seed))
    model = ImpressionModel(num_users, num_items, rng)
    request, columns = _shown(model, mean_requests, max_candidates, rng)
    affinity, known, probability, labels = _answered(model, columns, rng)
    order = np.argsort(request, kind="stable")
    table = _to_table(model, request, columns, labels, order)
    for name, values in _clicked(model, columns, labels["click"], known, order, history_length):
        table = table.append_column(name, values)
    truth = ImpressionTruth(
        probability["click"][order],
        (probability["click"] * probability["buy"])[order],
        affinity[order],
        {task: labels[task][order] for task in TASKS},
        table["user_id"].to_numpy(),
    )
    return table, truth


def _shown(
    model: ImpressionModel, mean_requests: int, max_candidates: int, rng: np.random.Generator
) -> tuple[IntArray, dict[str, IntArray]]:
    """The number of each row's request in the order of time, and codes by column, int64 `[n]` each.

    Rows are in the order of (number of the request among its user's, user, position): first all first requests, then all second
    ones, as they are answered.
    """
    num_users = len(model.user["age_group"])
    # From a third of the mean to 6.6 times as many; the mean of 1 / (u + 0.05) is ln 21.
    counts = np.floor(mean_requests / np.log(21.0) / (rng.random(num_users) + 0.05) + rng.random(num_users)).astype(np.int64)
    counts = np.maximum(counts, 1)
    users, total = np.repeat(np.arange(num_users), counts), int(counts.sum())
    step = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
    day, hour = np.floor(_DAYS * rng.random(total)), _drawn(_BUSY, rng.random(total))
    times = (day * 86_400 + hour * 3_600 + np.floor(3_600 * rng.random(total))).astype(np.int64)
    # A user's times ascend, and those that are equal move on by seconds.
    times = np.sort(times + (users << 32)) - np.arange(total)
    times = np.maximum.accumulate(times) + np.arange(total) - (users << 32)
    number = np.empty(total, dtype=np.int64)
    number[np.lexsort((users, times))] = np.arange(total)
    requests = {"user": users, "time": _START + times, "hour": times // 3_600 % 24}
    requests |= {name: _drawn(_SHARES[name], rng.random(total)) for name in ("device", "page")}
    sizes = 1 + np.floor(max_candidates * rng.random(total) ** 2).astype(np.int64)
    in_turn = np.argsort(step, kind="stable")
    of_row = np.repeat(in_turn, sizes[in_turn])
    begins = np.cumsum(sizes[in_turn]) - sizes[in_turn]
    columns = {name: values[of_row] for name, values in requests.items()}
    columns["step"] = step[of_row]
    columns["position"] = np.arange(len(of_row)) - np.repeat(begins, sizes[in_turn])
    columns["item"] = _different(model.popularity, of_row, rng)
    columns["discount"] = _drawn(_SHARES["discount"], rng.random(len(of_row)))
    return number[of_row], columns


def _different(popularity: FloatArray, request: IntArray, rng: np.random.Generator) -> IntArray:
    """Items drawn by popularity, int64 `[n]`, no two alike in a request: who comes second is drawn again."""
    items = _drawn(popularity, rng.random(len(request)))
    rows = np.arange(len(request))
    while True:
        rows = rows[np.argsort(request[rows] * len(popularity) + items[rows], kind="stable")]
        again = np.zeros(len(rows), dtype=np.bool_)
        again[1:] = (request[rows][1:] == request[rows][:-1]) & (items[rows][1:] == items[rows][:-1])
        if not again.any():
            return items
        redrawn = np.sort(rows[again])
        items[redrawn] = _drawn(popularity, rng.random(len(redrawn)))
        rows = np.sort(rows[np.isin(request[rows], request[redrawn])])


def _answered(
    model: ImpressionModel, columns: dict[str, IntArray], rng: np.random.Generator
) -> tuple[FloatArray, IntArray, dict[str, FloatArray], dict[str, BoolArray]]:
    """Affinity, how many clicks the user had before, probabilities of a click and of a purchase after it, labels: `[n]` each."""
    users, category = columns["user"], model.item["category"][columns["item"]]
    num_users, count = len(model.user["age_group"]), len(users)
    log_odds, chance = model.log_odds("click", columns), rng.random(count)
    affinity, probability, known = np.zeros(count), np.zeros(count), np.zeros(count, dtype=np.int64)
    click = np.zeros(count, dtype=np.bool_)
    # Each user's last clicks in a ring, how many of them each category has, and how many there were in all.
    ring = np.full((num_users, MEMORY), -1, dtype=np.int64)
    held = np.zeros((num_users, len(CATEGORIES)), dtype=np.int64)
    written = np.zeros(num_users, dtype=np.int64)
    bounds = np.searchsorted(columns["step"], np.arange(int(columns["step"][-1]) + 2))
    for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        here, kind = users[begin:end], category[begin:end]
        known[begin:end] = written[here]
        affinity[begin:end] = held[here, kind] / np.clip(written[here], 1, MEMORY)
        probability[begin:end] = model.probability("click", log_odds[begin:end], affinity[begin:end])
        click[begin:end] = chance[begin:end] < probability[begin:end]
        who, what = here[click[begin:end]], kind[click[begin:end]]
        # A step has one request of a user, whose clicks follow one another: they fill places of the ring in turn.
        first = np.searchsorted(who, who, side="left")
        place = (written[who] + np.arange(len(who)) - first) % MEMORY
        out = ring[who, place]
        np.subtract.at(held, (who[out >= 0], out[out >= 0]), 1)
        np.add.at(held, (who, what), 1)
        ring[who, place] = what
        written += np.bincount(who, minlength=num_users)
    after = model.probability("buy", model.log_odds("buy", columns), affinity)
    buy = click & (rng.random(count) < after)
    return affinity, known, {"click": probability, "buy": after}, {"click": click, "buy": buy}


def _to_table(
    model: ImpressionModel, request: IntArray, columns: dict[str, IntArray], labels: dict[str, BoolArray], order: IntArray
) -> pa.Table:
    codes = {name: values[order] for name, values in columns.items()}
    user, item = codes["user"], codes["item"]

    def words(names: tuple[str, ...], of: IntArray) -> pa.Array:
        return pa.array(names, pa.string()).take(pa.array(of))

    return pa.table(
        {
            "request_id": request[order] + 1,
            "user_id": user + 1,
            "item_id": item + 1,
            "timestamp": codes["time"],
            "age_group": words(AGE_GROUPS, model.user["age_group"][user]),
            "country": words(COUNTRIES, model.user["country"][user]),
            "device": words(DEVICES, codes["device"]),
            "page": words(PAGES, codes["page"]),
            "hour": codes["hour"],
            "position": codes["position"] + 1,
            "category": words(CATEGORIES, model.item["category"][item]),
            "brand": words(BRANDS, model.item["brand"][item]),
            "price": model.price[item],
            "discount": np.array(DISCOUNTS)[codes["discount"]],
            **{task: labels[task][order].astype(np.int64) for task in TASKS},
        }
    )


def _clicked(
    model: ImpressionModel, columns: dict[str, IntArray], click: BoolArray, known: IntArray, order: IntArray, length: int
) -> Iterator[tuple[str, pa.ChunkedArray]]:
    """The columns of lists: of each row, in the order given, the last `length` of the `known` clicks of its user."""
    if not length:
        return
    users = columns["user"]
    # Clicks in the order in which they came, user by user.
    rows = np.flatnonzero(click)
    rows = rows[np.argsort(users[rows], kind="stable")]
    items = columns["item"][rows]
    stop = np.searchsorted(users[rows], users[order], side="left") + known[order]
    lengths = np.minimum(known[order], length)
    categories = pa.array(CATEGORIES, pa.string()).take(pa.array(model.item["category"][items]))
    together = max(1, _ELEMENTS // length)
    for name, values in (("clicked_item_id", pa.array(items + 1)), ("clicked_category", categories)):
        chunks = []
        for begin in range(0, len(order), together):
            some = lengths[begin : begin + together]
            offsets = pa.array(np.concatenate(([0], np.cumsum(some))))
            places = pa.array(spread(stop[begin : begin + together] - some, some))
            chunks.append(pa.LargeListArray.from_arrays(offsets, values.take(places)))
        yield name, pa.chunked_array(chunks)


def _group_auc(groups: IntArray, scores: FloatArray, labels: BoolArray) -> tuple[FloatArray, IntArray]:
    """AUC of each group that has both labels, and how many rows it has: float64 and int64 `[g]`."""
    order = np.lexsort((scores, groups))
    groups, scores, labels = groups[order], scores[order], labels[order]
    opens = np.ones(len(order), dtype=np.bool_)
    opens[1:] = groups[1:] != groups[:-1]
    begins = np.flatnonzero(opens)
    sizes = np.diff(np.append(begins, len(order)))
    opens[1:] |= scores[1:] != scores[:-1]
    ties = np.flatnonzero(opens)
    last = np.append(ties[1:], len(order)) - 1
    # Rows of one score share the mean of their places, from 1 on within the group.
    rank = ((ties + last) / 2)[np.cumsum(opens) - 1] - np.repeat(begins, sizes) + 1
    of_group = np.repeat(np.arange(len(begins)), sizes)
    positives = np.bincount(of_group, labels, len(begins))
    ranks = np.bincount(of_group[labels], rank[labels], len(begins))
    both = (positives > 0) & (positives < sizes)
    positives, ranks, sizes = positives[both], ranks[both], sizes[both]
    result: FloatArray = (ranks - positives * (positives + 1) / 2) / (positives * (sizes - positives))
    return result, sizes


def _drawn(shares: FloatArray, chance: FloatArray) -> IntArray:
    """Codes by their shares, which add up to 1, int64 `[n]`: one for each number in 0 to 1."""
    return np.searchsorted(np.cumsum(shares)[:-1], chance, side="right").astype(np.int64)


def _uniform(rng: np.random.Generator, shape: int | tuple[int, ...], deviation: float) -> FloatArray:
    """Numbers around 0 with a standard deviation, evenly spread: bounded, and the same under every numpy version."""
    result: FloatArray = (rng.random(shape) - 0.5) * (np.sqrt(12.0) * deviation)
    return result
