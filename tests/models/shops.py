"""Tables of a made-up shop, of every make that a ranking model reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from jagged.data.records import Dataset
from jagged.data.schema import Column, Kind, Schema
from jagged.data.table_splits import Split

COLUMNS = {
    one.name: one
    for one in (
        Column("request", Kind.REQUEST),
        Column("user", Kind.USER),
        Column("item", Kind.CANDIDATE),
        Column("time", Kind.TIME),
        Column("weight", Kind.WEIGHT),
        # Names of tables that torch does not take for modules.
        Column("type", Kind.ID, of="request"),
        Column("shop.id", Kind.ID, of="candidate"),
        Column("age", Kind.NUMBER, of="request"),
        Column("price", Kind.NUMBER, of="candidate"),
        Column("liked", Kind.IDS, table="item", of="request"),
        Column("tags", Kind.IDS, of="request"),
        Column("genres", Kind.IDS, of="candidate"),
        Column("interests", Kind.IDS, weights="strengths", of="request"),
        Column("strengths", Kind.NUMBERS, of="request"),
        Column("words", Kind.IDS, weights="counts", of="candidate"),
        Column("counts", Kind.NUMBERS, of="candidate"),
        Column("moods", Kind.NUMBERS, of="request"),
        Column("sizes", Kind.NUMBERS, of="candidate"),
        Column("click", Kind.LABEL),
        Column("buy", Kind.LABEL),
    )
}
#: Lists of the candidates that share a table with the request's ids and histories, where they are named.
SHARED = {
    one.name: one
    for one in (
        Column("similar", Kind.IDS, table="item", of="candidate"),
        Column("styles", Kind.IDS, table="tags", of="candidate"),
    )
}
OF_EVENTS = Schema(
    (
        Column("user", Kind.USER),
        Column("item", Kind.CANDIDATE),
        Column("time", Kind.TIME),
        Column("action", Kind.EVENT),
        Column("price", Kind.NUMBER),
        Column("weight", Kind.WEIGHT),
        Column("topics", Kind.IDS),
        Column("stars", Kind.LABEL),
    )
)
#: Without requests and lists.
PLAIN = ("user", "item", "time", "type", "age", "price", "click", "buy")


def rows(seed: int = 0, requests: int = 60, most: int = 6) -> dict[str, list[Any]]:
    """Requests of one candidate to `most`; a user likes every third item, and buys of these the even ones."""
    rng = np.random.default_rng(seed)

    def some(letter: str, most: int = 3) -> list[str]:
        return [f"{letter}{i}" for i in rng.integers(6, size=rng.integers(most + 1))]

    def odd(value: Any, share: float = 0.1) -> Any:
        return None if rng.random() < share else value

    found: dict[str, list[Any]] = {name: [] for name in (*COLUMNS, *SHARED)}
    for request in range(requests):
        user = int(rng.integers(12))
        interests, moods = some("n"), [odd(float(x)) for x in rng.normal(size=rng.integers(3))]
        of_request = {
            "request": f"r{request}", "user": f"u{user}", "time": 1_700_000_000 + 900 * (request // 2) ** 2,
            "type": odd(f"t{user % 3}"), "age": odd(20.0 + user),
            "liked": odd(([f"i{i}" for i in rng.integers(12, size=2)] * 2)[: request % 5]), "tags": some("t"),
            "interests": interests, "strengths": rng.random(len(interests)).tolist(), "moods": odd(moods),
        }  # fmt: skip
        for _ in range(1 if request % 3 == 0 else int(rng.integers(2, most + 1))):
            item = int(rng.integers(12))
            words, click = some("w"), int(item % 3 == user % 3)
            of_candidate = {
                "item": odd(f"i{item}", 0.03), "weight": float(rng.random() + 0.2), "shop.id": f"s{item % 4}",
                "price": odd(item * 1.5), "genres": odd(some("g")), "words": words, "counts": rng.random(len(words)).tolist(),
                "sizes": [odd(float(x)) for x in rng.normal(size=rng.integers(3))], "click": odd(click),
                "buy": odd(int(click and item % 2 == 0), 0.2),
                "similar": [f"i{(item + place) % 14}" for place in range(request % 4)] if item != 5 else None,
                "styles": [f"t{(item * place) % 7}" for place in range((item + request) % 3)],
            }  # fmt: skip
            for name, value in {**of_request, **of_candidate}.items():
                found[name].append(value)
    return found


def events(seed: int = 0, count: int = 150) -> pa.Table:
    """What some of the users did; others have no history."""
    rng = np.random.default_rng(seed + 1)
    items = rng.integers(12, size=count)
    return pa.table(
        {
            "user": [f"u{i}" for i in rng.integers(8, size=count)],
            "item": [f"i{i}" for i in items],
            "time": (1_699_990_000 + rng.integers(900_000, size=count)).tolist(),
            "action": rng.choice(["view", "buy"], count).tolist(),
            "price": [None if i % 5 == 0 else float(i) for i in items],
            "weight": rng.integers(3, size=count).astype(float).tolist(),
            "topics": [[f"p{i}" for i in rng.integers(5, size=rng.integers(3))] for _ in range(count)],
            "stars": [None if i % 4 == 0 else int(i % 2) for i in items],
        }
    )


def shop(*names: str, seed: int = 0, requests: int = 60, beside: bool = False, **options: Any) -> Split:
    """The split of a table of some columns, in the schema's order; `beside` with a table of events, else `history=` says."""
    columns = {**COLUMNS, **SHARED}
    chosen = [name for name in columns if name in names] if names else list(COLUMNS)
    table = {name: values for name, values in rows(seed, requests).items() if name in chosen}
    types = {"age": pa.float64(), "price": pa.float64(), "moods": pa.list_(pa.float64()), "sizes": pa.list_(pa.float64())}
    arrow = pa.table({name: pa.array(values, types.get(name)) for name, values in table.items()})
    if beside:
        options |= {"events": events(seed), "event_schema": OF_EVENTS, "event_lists": ["topics"], "event_labels": ["stars"]}
    schema = Schema(tuple(columns[name] for name in chosen))
    dataset = Dataset.from_table(arrow, schema, duplicates="keep", progress=False, **options)
    return dataset.split(by="time" if "time" in chosen else "user", valid=0.1, test=0.1)
