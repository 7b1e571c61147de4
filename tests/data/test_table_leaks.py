from __future__ import annotations

import dataclasses

import numpy as np

from tests.data.points import made, table_of


def test_planted_leaks_are_found_and_named() -> None:
    dataset = made(table_of(60), history="events")
    split = dataset.split()
    assert str(split).startswith("split by time\ntrain ")
    # A training row that is in the test too, encoders that saw the test, and statistics of all rows.
    train = dataclasses.replace(split.train, rows=np.sort(np.append(split.train.rows[1:], split.test.rows[0])))
    seen_less = dataclasses.replace(split, train=dataclasses.replace(split.train, rows=split.train.rows[:1]))
    leaks = seen_less.leaks()
    assert leaks
    assert leaks.counts["unsupported_ids"] > 0
    assert leaks.counts["unsupported_statistics"] == 2
    assert leaks.examples["unsupported_statistics"] == ["price", "sizes"]
    assert dataclasses.replace(split, train=train).leaks().counts["unsupported_statistics"] == 2
    assert "unsupported_statistics          2  (price; sizes)" in str(leaks)


def test_views_that_reach_too_far_are_found() -> None:
    for options in ({}, {"history_delay": 2}, {"ties": "before"}):
        dataset = made(table_of(60), history="events", **options)
        split = dataset.split()
        stop = dataset.stop.copy()
        longest = int(np.argmax(stop - dataset.start))
        for change in (longest + 1, longest + 2):
            stop[longest] = min(change, len(stop))
            dataset._columns["stop"] = (stop,)
            leaks = split.leaks()
            assert leaks.counts["histories_too_late"] == 1
            assert leaks.examples["histories_too_late"] == [f"row {dataset.source[longest]} of the source, from 0"]
