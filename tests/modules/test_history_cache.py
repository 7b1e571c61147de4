"""Blocks over cached histories give what they give over whole ones, whatever happened to the histories before."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from jagged.modules import (
    CachedBatch,
    HistoryCache,
    HSTUBlock,
    JaggedMLP,
    JaggedSelfAttention,
    JaggedTransformerBlock,
    PositionalEncoding,
)
from tests.places import PLACE, Place

pytestmark = pytest.mark.skipif(PLACE.name == "interpret", reason="modules run on the place's own backend")

DIM, ITEMS = 12, 20
DTYPE = torch.float32 if PLACE.name == "gpu" else torch.float64
# Scores are large, and float32 is on the GPU three products of TF32.
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4} if PLACE.name == "gpu" else {}
MAKE: dict[str, Callable[[], nn.Module]] = {
    "hstu": lambda: HSTUBlock(DIM, 3, max_distance=4, num_time_buckets=9, normalizer=10),
    "hstu with a window": lambda: HSTUBlock(DIM, 2, head_dim=5, window=4, normalizer=3, dropout=0.5),
    "transformer": lambda: JaggedTransformerBlock(DIM, 4, num_key_heads=2, rotary=True, num_time_buckets=5, dropout=0.5),
    "transformer with a window": lambda: JaggedTransformerBlock(DIM, 2, norm="post", window=(3, 0), max_distance=2),
    "attention": lambda: JaggedSelfAttention(DIM, 3, rotary=True, attention_dropout=0.5),
}


def raises(kind: type[Exception], message: str) -> Any:
    return pytest.raises(kind, match=f"^{re.escape(message)}$")


def blocks_of(name: str, layers: int = 2) -> nn.ModuleList:
    """Blocks whose scores are large, so that no key is lost among the others."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(MAKE[name]() for _ in range(layers)).to(PLACE.device, DTYPE).eval()
    with torch.no_grad():
        for key, weight in blocks.named_parameters():
            if "projection.weight" in key:
                weight *= 3
            elif "_bias" in key:
                weight *= 50
    return blocks


def has_times(blocks: nn.ModuleList) -> bool:
    return any(name.endswith("time_bias") for name, _ in blocks.named_parameters())


class Rows(nn.Module):
    """What stands before the blocks: a row for each item, and a time for each event."""

    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.items = nn.Embedding(ITEMS, DIM, device=PLACE.device, dtype=DTYPE)
        self.register_buffer("shift", torch.zeros(DIM, device=PLACE.device, dtype=DTYPE))
        self.blocks = blocks
        self.has_times = has_times(blocks)

    def times(self, events: Tensor) -> Tensor:
        """Any number by item; the second column where there is one."""
        return (events if events.dim() == 1 else events[:, 1]).to(PLACE.device) * 7 % 90

    def rows(self, events: Tensor) -> Tensor:
        with torch.no_grad():
            return self.shift + self.items((events if events.dim() == 1 else events[:, 0]).to(PLACE.device))


def jagged(samples: list[list[int]], dtype: torch.dtype = torch.int64) -> JaggedTensor:
    lengths = torch.tensor([len(sample) for sample in samples], dtype=dtype)
    values = torch.tensor([event for sample in samples for event in sample], dtype=torch.int64)
    return JaggedTensor(values=values, offsets=torch.cat((lengths.new_zeros(1), lengths.cumsum(0).to(dtype))))


def whole(model: Rows, histories: list[list[int]], candidates: list[list[int]]) -> tuple[list[Tensor], list[Tensor]]:
    """What blocks make of each user's events and candidates without a cache, one user after the other."""
    events, ranked = [], []
    for history, of_user in zip(histories, candidates, strict=True):
        ids = torch.tensor([*history, *of_user], dtype=torch.int64)
        x = JaggedTensor(values=model.rows(ids), offsets=torch.tensor([0, len(ids)], device=PLACE.device))
        for block in model.blocks:
            with torch.no_grad():
                x = block(x, len(of_user), model.times(ids) if model.has_times else None)
        events.append(x.values()[: len(history)])
        ranked.append(x.values()[len(history) :])
    return events, ranked


def encode(
    cache: HistoryCache, model: Rows, batch: CachedBatch, events: JaggedTensor, candidates: JaggedTensor | Tensor | None
) -> tuple[Tensor, Any]:
    new, ids = events.values()[batch.rows], None
    rows: Any = None
    if isinstance(candidates, Tensor):
        ids, rows = candidates, model.rows(candidates.flatten()).view(*candidates.shape, DIM)
    elif candidates is not None:
        ids = candidates.values()
        rows = JaggedTensor(values=model.rows(ids), offsets=candidates.offsets().to(PLACE.device))
    of_events = model.times(new) if model.has_times else None
    of_candidates = model.times(ids.flatten()).view(ids.shape) if model.has_times and ids is not None else None
    return cache.encode(batch, model.rows(new), rows, times=of_events, candidate_times=of_candidates)


def check_pages(cache: HistoryCache) -> None:
    """Each page is free, or one user's."""
    pages = [page for history in cache._histories.values() for page in history.pages]
    assert sorted(cache._free + pages) == list(range(cache.num_pages))


def check(
    cache: HistoryCache,
    model: Rows,
    users: list[Any],
    histories: list[list[int]],
    candidates: list[list[int]],
    form: str = "jagged",
    contexts: list[Any] | None = None,
    least_new: int = 0,
) -> list[int]:
    """Compare with blocks over whole histories; return how many events were cached."""
    events = jagged(histories)
    batch = cache.match(users, events, contexts, least_new=least_new)
    known = batch.known.tolist()
    given: JaggedTensor | Tensor | None = jagged(candidates, torch.int32 if form == "int32" else torch.int64)
    if form == "dense":
        given = torch.tensor(candidates, dtype=torch.int64).view(len(users), len(candidates[0]) if users else 3)
    elif form == "none":
        given, candidates = None, [[] for _ in users]
    new, ranked = encode(cache, model, batch, events, given)
    check_pages(cache)
    assert [user in cache for user in users] == [len(history) > 0 for history in histories]
    all_events, all_ranked = whole(model, histories, candidates)
    expected = torch.cat(
        [model.rows(torch.zeros(0, dtype=torch.int64)), *(of[n:] for of, n in zip(all_events, known, strict=True))]
    )
    torch.testing.assert_close(new, expected, **CLOSE)
    if form == "none":
        assert ranked is None
        return known
    found = ranked.flatten(0, 1) if form == "dense" else ranked.values()
    torch.testing.assert_close(found, torch.cat([found[:0], *all_ranked]), **CLOSE)
    return known


@st.composite
def changed(draw: st.DrawFn, history: list[int]) -> list[int]:
    """A history after something has happened: more events, fewer at one end, or another one among them."""
    more = draw(st.lists(st.integers(0, ITEMS - 1), max_size=6))
    match draw(st.sampled_from(["more", "more", "more", "shorter", "front", "other"])):
        case "shorter":
            history = history[: draw(st.integers(0, len(history)))]
        case "front":
            history = history[draw(st.integers(0, len(history))) :]
        case "other" if history:
            place = draw(st.integers(0, len(history) - 1))
            history = [*history[:place], draw(st.integers(0, ITEMS - 1)), *history[place + 1 :]]
    return [*history, *more]


def in_common(one: list[int], other: list[int]) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@settings(max_examples=40)
@given(st.data(), st.sampled_from(list(MAKE)), st.integers(1, 5), st.booleans())
def test_it_is_what_whole_histories_give(place: Place, data: st.DataObject, name: str, page_rows: int, is_small: bool) -> None:
    model = Rows(blocks_of(name))
    enough = 10_000 // page_rows
    one_page = HistoryCache(model.blocks, model=model, max_bytes=10**6, page_rows=page_rows)
    cache = HistoryCache(
        model.blocks,
        max_bytes=one_page.bytes // one_page.num_pages * (30 if is_small else enough),
        page_rows=page_rows,
        model=model,
    )
    kept: dict[int, tuple[list[int], Any]] = {}
    for _ in range(data.draw(st.integers(1, 4))):
        users = data.draw(st.lists(st.integers(0, 4), unique=True, max_size=2 if is_small else 4))
        histories = [data.draw(changed(kept.get(user, ([], None))[0])) for user in users]
        histories = [history[:15] for history in histories]
        contexts = [data.draw(st.sampled_from(["a", "a", "a", "b"])) for _ in users]
        form = data.draw(st.sampled_from(["jagged", "int32", "dense", "none"]))
        most = data.draw(st.integers(0, 4))
        fewest = most if form == "dense" else 0
        ids = st.lists(st.integers(0, ITEMS - 1), min_size=fewest, max_size=most)
        candidates = [data.draw(ids) for _ in users]
        least_new = data.draw(st.sampled_from([0, 0, 1, 3]))
        known = check(cache, model, users, histories, candidates, form, contexts, least_new)
        for user, history, context, found in zip(users, histories, contexts, known, strict=True):
            before, former = kept.get(user, ([], None))
            expected = min(in_common(before, history), max(len(history) - least_new, 0)) if former == context else 0
            # Pages may have been given away; then nothing is there.
            assert found == expected or (is_small and found == 0)
            kept[user] = history, context


def test_pages_go_to_those_who_come(place: Place) -> None:
    """Of four pages of two rows: who was encoded longest ago loses his."""
    model = Rows(blocks_of("hstu"))
    a_page = HistoryCache(model.blocks, model=model, max_bytes=10**6, page_rows=2)
    cache = HistoryCache(model.blocks, model=model, max_bytes=4 * a_page.bytes // a_page.num_pages, page_rows=2)
    assert (cache.num_pages, len(cache)) == (4, 0)
    assert check(cache, model, ["a", "b"], [[1, 2, 3], [4]], [[5], []]) == [0, 0]
    assert check(cache, model, ["a"], [[1, 2, 3]], [[6, 7]]) == [3]
    assert check(cache, model, ["c"], [[8, 9]], [[1]]) == [0]
    assert [user in cache for user in "abc"] == [True, True, True]
    assert check(cache, model, ["d"], [[8, 9]], [[1]]) == [0]
    assert [user in cache for user in "abcd"] == [True, False, True, True]
    assert check(cache, model, ["a", "d", "c"], [[1, 2, 3, 3], [8], [8]], [[6, 7]] * 3) == [3, 1, 1]
    # Five pages' worth in one batch are refused, and nothing is lost.
    batch = cache.match(["a", "e"], jagged([[1, 2, 3, 3], [1, 2, 3, 4, 5]]))
    says = (
        "batch: expected histories of at most 4 pages of 2 rows, got 5; encode fewer users or shorter histories, or give the "
        "cache more bytes"
    )
    with raises(ValueError, says):
        encode(cache, model, batch, jagged([[1, 2, 3, 3], [1, 2, 3, 4, 5]]), None)
    assert check(cache, model, ["a", "d", "c"], [[1, 2, 3, 3], [8], [8]], [[6, 7]] * 3) == [4, 1, 1]
    # Who was encoded longest ago keeps what he has where he is in the batch himself.
    assert check(cache, model, ["f", "a"], [[4, 4], [1, 2, 3, 3]], [[6], [7]]) == [0, 4]
    assert [user in cache for user in "acdf"] == [True, True, False, True]
    assert check(cache, model, ["c", "a"], [[8, 9, 9], [1, 2, 3, 3]], [[6], [7]]) == [1, 4]
    cache.discard(["c", "nobody"])
    assert ("c" in cache, len(cache)) == (False, 1)
    cache.clear()
    assert (len(cache), check(cache, model, ["d"], [[8]], [[1]])) == (0, [0])


def test_pages_of_a_shorter_history_are_free(place: Place) -> None:
    model = Rows(blocks_of("hstu"))
    cache = HistoryCache(model.blocks, model=model, max_bytes=10**5, page_rows=2)
    assert check(cache, model, ["a", "b"], [[1, 2, 3, 4, 5, 6, 7], []], [[8], [9]]) == [0, 0]
    assert (cache.num_pages - len(cache._free), list(cache._histories)) == (4, ["a"])
    assert check(cache, model, ["a"], [[1, 2, 3]], [[8]]) == [3]
    assert cache.num_pages - len(cache._free) == 2
    assert check(cache, model, ["a"], [[]], [[8]]) == [0]
    assert (len(cache._free), list(cache._histories)) == (cache.num_pages, [])


def test_events_of_several_columns(place: Place) -> None:
    """Items are the same, and times are not."""
    model = Rows(blocks_of("hstu"))
    cache = HistoryCache(model.blocks, model=model, max_bytes=10**6)
    for times, known in (([1, 2, 3], 0), ([1, 2, 3], 3), ([1, 5, 3], 1)):
        values = torch.stack((torch.tensor([4, 4, 4]), torch.tensor(times)), 1)
        events = JaggedTensor(values=values, offsets=torch.tensor([0, 3]))
        batch = cache.match(["a"], events)
        assert batch.known.tolist() == [known]
        new, _ = encode(cache, model, batch, events, None)
        x = JaggedTensor(values=model.rows(values), offsets=torch.tensor([0, 3], device=place.device))
        with torch.no_grad():
            for block in model.blocks:
                x = block(x, None, model.times(values))
        torch.testing.assert_close(new, x.values()[known:], **CLOSE)
    # Told by items alone they are other events.
    assert cache.match(["a"], jagged([[4, 4, 4]])).known.tolist() == [0]


def test_a_batch_is_encoded_again_with_other_candidates(place: Place) -> None:
    model = Rows(blocks_of("transformer"))
    cache = HistoryCache(model.blocks, model=model, max_bytes=10**6)
    check(cache, model, ["a", "b"], [[1, 2], [3]], [[], []])
    histories = [[1, 2, 4], [3, 5, 6]]
    batch = cache.match(["a", "b"], jagged(histories))
    for candidates in ([[1], [2, 3]], [[7, 8], []]):
        new, ranked = encode(cache, model, batch, jagged(histories), jagged(candidates))
        events, expected = whole(model, histories, candidates)
        torch.testing.assert_close(new, torch.cat([events[0][2:], events[1][1:]]), **CLOSE)
        torch.testing.assert_close(ranked.values(), torch.cat(expected), **CLOSE)
        assert ranked.offsets().tolist() == jagged(candidates).offsets().tolist()


def step(model: Rows, **options: Any) -> None:
    """A step of training, after which the model is in evaluation again."""
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, **options)
    model.train()
    ids = torch.tensor([1, 2])
    x = JaggedTensor(values=model.items(ids.to(PLACE.device)), offsets=torch.tensor([0, 2], device=PLACE.device))
    model.blocks[0](x, None, model.times(ids)).values().sum().backward()
    optimizer.step()
    model.eval()


def in_place(model: Rows) -> None:
    with torch.inference_mode():
        model.items.weight[3] += 1


def buffer(model: Rows) -> None:
    with torch.no_grad():
        model.shift += 1


def data(model: Rows) -> None:
    """The parameter is the same, its memory another."""
    weight = model.blocks[1].output_projection.weight
    weight.data = 2 * weight.data


def same_memory(model: Rows) -> None:
    """The memory is the same, the parameter another, and neither was written."""
    layer = model.blocks[1].output_projection
    layer.weight = nn.Parameter(layer.weight.detach())


def normalizer(model: Rows) -> None:
    model.blocks[1].normalizer = 2


WRITES: dict[str, Callable[[Rows], Any]] = {
    "step": lambda model: step(model, foreach=False),
    "foreach": lambda model: step(model, foreach=True),
    "fused": lambda model: step(model, fused=True),
    "load": lambda model: model.load_state_dict({name: 2 * weight for name, weight in model.state_dict().items()}),
    "assign": lambda model: model.load_state_dict({name: 2 * of for name, of in model.state_dict().items()}, assign=True),
    "in place": in_place,
    "buffer": buffer,
    "data": data,
    "same memory": same_memory,
    "option": normalizer,
}


@pytest.mark.parametrize("write", WRITES)
def test_weights_that_are_written_empty_it(place: Place, write: str) -> None:
    model = Rows(blocks_of("hstu"))
    cache = HistoryCache(model.blocks, model=model, max_bytes=10**6)
    check(cache, model, ["a"], [[1, 2]], [[3]])
    batch = cache.match(["a"], jagged([[1, 2, 4]]))
    assert batch.known.tolist() == [2]
    WRITES[write](model)
    with raises(ValueError, "batch: weights were written since it was matched; match its users again"):
        encode(cache, model, batch, jagged([[1, 2, 4]]), None)
    check_pages(cache)
    assert check(cache, model, ["a"], [[1, 2, 4]], [[3]]) == [0]
    assert check(cache, model, ["a"], [[1, 2, 4]], [[3]]) == [3]


def test_without_a_model_blocks_are_watched(place: Place) -> None:
    model = Rows(blocks_of("hstu"))
    cache = HistoryCache(model.blocks, model=None, max_bytes=10**6)
    check(cache, model, ["a"], [[1, 2]], [[3]])
    in_place(model)
    assert cache.match(["a"], jagged([[1, 2]])).known.tolist() == [2]
    data(model)
    assert cache.match(["a"], jagged([[1, 2]])).known.tolist() == [0]


def test_options_that_are_no_longer_cacheable(place: Place) -> None:
    model = Rows(blocks_of("transformer"))
    cache = HistoryCache(model.blocks, model=model, max_bytes=10**6)
    check(cache, model, ["a"], [[1, 2]], [[3]])
    model.blocks[0].attention.causal = False
    with raises(ValueError, "blocks: block 0 cannot be cached: causal=False: rows see the rows behind them"):
        cache.match(["a"], jagged([[1, 2]]))
    model.blocks[0].attention.causal = True
    assert check(cache, model, ["a"], [[1, 2]], [[3]]) == [0]
    model.blocks[1] = blocks_of("transformer", 1)[0]
    with raises(ValueError, "blocks: block 1 is another one than when the cache was made; make a new cache"):
        cache.match(["a"], jagged([[1, 2]]))


def test_positions_that_are_taken_later(place: Place) -> None:
    """An option that takes positions of rows, set when the cache was made."""
    model = Rows(blocks_of("transformer with a window"))
    cache = HistoryCache(model.blocks, model=model, max_bytes=10**6)
    check(cache, model, ["a", "b"], [[1, 2], [4, 5, 6]], [[3], [7, 8]])
    model.blocks[1].attention.rotary = True
    for known in ([0, 0], [2, 3]):
        assert check(cache, model, ["a", "b"], [[1, 2], [4, 5, 6]], [[3], [7, 8]]) == known


def test_blocks_with_and_without_times(place: Place) -> None:
    torch.manual_seed(0)
    blocks = nn.ModuleList([blocks_of("hstu", 1)[0], blocks_of("hstu with a window", 1)[0]])
    model = Rows(blocks)
    cache = HistoryCache(blocks, model=model, max_bytes=10**6)
    for known in ([], [1, 2]):
        ids = torch.tensor([1, 2, 3][: len(known) + 2])
        batch = cache.match(["a"], jagged([ids.tolist()]))
        new, _ = encode(cache, model, batch, jagged([ids.tolist()]), None)
        x = JaggedTensor(values=model.rows(ids), offsets=torch.tensor([0, len(ids)], device=place.device))
        with torch.no_grad():
            expected = blocks[1](blocks[0](x, None, model.times(ids))).values()
        torch.testing.assert_close(new, expected[len(known) :], **CLOSE)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"])
def test_a_copy_is_empty_and_of_the_copied_blocks(place: Place, copied: Callable[[Any], Any]) -> None:
    model = Rows(blocks_of("hstu"))
    cache = HistoryCache(model.blocks, model=model, max_bytes=10**6, page_rows=3, dtype=DTYPE)
    check(cache, model, ["a"], [[1, 2]], [[3]])
    other_model, other = copied((model, cache))
    assert (len(other), other.bytes, other.page_rows) == (0, cache.bytes, 3)
    assert other.blocks[0] is other_model.blocks[0] is not model.blocks[0]
    data(other_model)
    assert check(other, other_model, ["a"], [[1, 2]], [[3]]) == [0]
    assert check(cache, model, ["a"], [[1, 2]], [[3]]) == [2]
    with raises(ValueError, "batch: expected one that this cache has matched, got another cache's"):
        encode(cache, model, other.match(["a"], jagged([[1, 2, 3]])), jagged([[1, 2, 3]]), None)


def test_threads_wait_for_one_another(place: Place) -> None:
    model = Rows(blocks_of("hstu"))
    cache = HistoryCache(model.blocks, model=model, max_bytes=10**6, page_rows=2)

    def work(thread: int) -> None:
        for number in range(20):
            users, histories = [f"{thread}, {number % 3}"], [[(thread + n) % ITEMS for n in range(number)]]
            batch = cache.match(users, jagged(histories))
            new, ranked = encode(cache, model, batch, jagged(histories), jagged([[thread]]))
            events, candidates = whole(model, histories, [[thread]])
            torch.testing.assert_close(new, events[0][int(batch.known[0]) :], **CLOSE)
            torch.testing.assert_close(ranked.values(), candidates[0], **CLOSE)

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work, thread) for thread in range(4)]:
            done.result()
    check_pages(cache)
    assert len(cache) == 12


def test_what_changed_between_is_matched_again(place: Place) -> None:
    model = Rows(blocks_of("hstu"))
    cache = HistoryCache(model.blocks, model=model, max_bytes=10**6)
    check(cache, model, ["a"], [[1, 2, 3]], [[3]])
    says = "batch: cached events of user 'a' changed since it was matched; match its users again"
    for between in (
        lambda: cache.discard(["a"]),
        lambda: check(cache, model, ["a"], [[1, 7]], [[3]]),
        lambda: check(cache, model, ["a"], [[1, 2, 3]], [[3]], contexts=["other"]),
    ):
        check(cache, model, ["a"], [[1, 2, 3]], [[3]])
        batch = cache.match(["a"], jagged([[1, 2, 3, 4]]))
        between()
        with raises(ValueError, says):
            encode(cache, model, batch, jagged([[1, 2, 3, 4]]), None)
    # Longer than it was, it still begins as it did.
    check(cache, model, ["a"], [[1, 2, 3]], [[3]])
    batch = cache.match(["a"], jagged([[1, 2, 3, 4]]))
    check(cache, model, ["a"], [[1, 2, 3, 9]], [[3]])
    new, _ = encode(cache, model, batch, jagged([[1, 2, 3, 4]]), None)
    torch.testing.assert_close(new, whole(model, [[1, 2, 3, 4]], [[]])[0][0][3:], **CLOSE)


def test_what_failed_is_not_there(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer's keys are written, the second fails; a history that had been cut back is as short as its beginning."""
    model = Rows(blocks_of("hstu"))
    cache = HistoryCache(model.blocks, model=model, max_bytes=10**6, page_rows=2)
    check(cache, model, ["a"], [[1, 2, 3, 4]], [[]])

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(model.blocks[1], "forward", fail)
        batch = cache.match(["a", "b"], jagged([[1, 2, 9, 9, 9], [5]]))
        with pytest.raises(RuntimeError, match="no memory"):
            encode(cache, model, batch, jagged([[1, 2, 9, 9, 9], [5]]), None)
        assert ("a" in cache, "b" in cache, len(cache)) == (True, False, 1)
        check_pages(cache)
    assert cache.match(["a"], jagged([[1, 2, 3, 4]])).known.tolist() == [2]
    assert check(cache, model, ["a", "b"], [[1, 2, 9, 9, 9], [5]], [[1], [2]]) == [2, 0]


def test_events_are_copied(place: Place) -> None:
    """The caller's tensor is his."""
    model = Rows(blocks_of("hstu"))
    cache = HistoryCache(model.blocks, model=model, max_bytes=10**6)
    events = jagged([[1, 2, 3]])
    encode(cache, model, cache.match(["a"], events), events, None)
    events.values()[1] = 7
    assert cache.match(["a"], events).known.tolist() == [1]


def test_a_refused_request_takes_nobodys_pages(place: Place) -> None:
    model = Rows(blocks_of("hstu"))
    a_page = HistoryCache(model.blocks, model=None, max_bytes=10**6, page_rows=2)
    cache = HistoryCache(model.blocks, model=None, max_bytes=2 * a_page.bytes // a_page.num_pages, page_rows=2)
    check(cache, model, ["a", "b"], [[1, 2], [3]], [[], []])
    batch = cache.match(["c", "d"], jagged([[1, 2], [3]]))
    with pytest.raises(ValueError, match=r"^times: "):
        cache.encode(batch, model.rows(torch.tensor([1, 2, 3])))
    assert [user in cache for user in "abcd"] == [True, True, False, False]


def test_under_autocast(place: Place) -> None:
    """Keys have autocast's dtype, which the cache is made with; whole histories in sixteen bits are as far from exact ones."""
    model = Rows(blocks_of("transformer").float()).float()
    cache = HistoryCache(model.blocks, model=model, max_bytes=10**6, dtype=torch.bfloat16)
    histories = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
    batch = cache.match("abc", jagged([history[:-1] for history in histories]))
    with torch.autocast(place.device.type, torch.bfloat16):
        encode(cache, model, batch, jagged([history[:-1] for history in histories]), None)
        batch = cache.match("abc", jagged(histories))
        assert batch.known.tolist() == [2, 0, 4]
        _, ranked = encode(cache, model, batch, jagged(histories), jagged([[1, 2], [], [3]]))
        expected = torch.cat(whole(model, histories, [[1, 2], [], [3]])[1])
    exact = torch.cat(whole(model, histories, [[1, 2], [], [3]])[1])
    assert (ranked.values() - exact).abs().max() <= 2 * (expected - exact).abs().max()
    cache = HistoryCache(model.blocks, model=model, max_bytes=10**6)
    batch = cache.match("a", jagged([[1]]))
    says = "dtype: the cache keeps torch.float32, got keys of torch.bfloat16; make the cache with dtype=torch.bfloat16"
    with torch.autocast(place.device.type, torch.bfloat16), raises(TypeError, says):
        encode(cache, model, batch, jagged([[1]]), None)


def test_it_is_for_scoring(place: Place) -> None:
    model = Rows(blocks_of("hstu"))
    with torch.inference_mode():
        cache = HistoryCache(model.blocks, model=model, max_bytes=10**6)
        check(cache, model, ["a"], [[1, 2]], [[3]])
    batch = cache.match(["a"], jagged([[1, 2, 3]]))
    new, _ = cache.encode(
        batch, model.items(torch.tensor([3], device=place.device)), times=torch.tensor([21], device=place.device)
    )
    assert not new.requires_grad
    model.blocks[1].dropout.train()
    batch = cache.match(["a"], jagged([[1, 2, 3]]))
    with raises(ValueError, "blocks: expected them in evaluation, got block 1 in training; call model.eval()"):
        encode(cache, model, batch, jagged([[1, 2, 3]]), None)


REFUSED = {
    "block 1 cannot be cached: num_contextual=2: contextual rows see the history, which changes": lambda: [
        HSTUBlock(DIM, 2, normalizer=3),
        HSTUBlock(DIM, 2, num_contextual=2, normalizer=3),
    ],
    (
        "block 0 cannot be cached: normalizer=None: sums are divided by the number of rows, which changes; give it a number"
    ): lambda: [HSTUBlock(DIM, 2)],
    "block 0 cannot be cached: causal=False: rows see the rows behind them": lambda: [JaggedSelfAttention(DIM, 2, causal=False)],
    "block 0 cannot be cached: num_contextual=1: contextual rows see the history, which changes": lambda: [
        JaggedTransformerBlock(DIM, 2, num_contextual=1)
    ],
    (
        "expected HSTUBlock, JaggedTransformerBlock or JaggedSelfAttention, got a JaggedMLP as block 0, whose forward takes no "
        "cached keys"
    ): lambda: [JaggedMLP(DIM, [DIM])],
    "expected one or more, got none": list,
}


@pytest.mark.parametrize("says", REFUSED)
def test_blocks_that_cannot_be_cached(place: Place, says: str) -> None:
    with raises(ValueError, f"blocks: {says}"):
        HistoryCache(REFUSED[says](), model=None, max_bytes=10**6)


def test_positions_from_the_end_are_refused(place: Place) -> None:
    model = Rows(blocks_of("hstu"))
    model.before = nn.Sequential(nn.Identity(), PositionalEncoding(8, DIM, device=place.device))
    says = (
        "model: expected rows that do not depend on later ones, got a PositionalEncoding{}, which counts from the end; make it "
        "with from_end=False, as models do by positions='start', or pass an nn.ModuleList of the blocks, and of what makes rows "
        "without it"
    )
    with raises(ValueError, says.format(", 'before.1'")):
        HistoryCache(model.blocks, model=model, max_bytes=10**6)
    with raises(ValueError, says.format("")):
        HistoryCache(model.blocks, model=model.before[1], max_bytes=10**6)
    cache = HistoryCache(model.blocks, model=nn.ModuleList([model.items, model.blocks]), max_bytes=10**6)
    assert check(cache, model, ["a"], [[1, 2]], [[3]]) == [0]
    model.before = PositionalEncoding(8, DIM, from_end=False, device=place.device)
    HistoryCache(model.blocks, model=model, max_bytes=10**6)


def test_refusals(place: Place) -> None:
    model = Rows(blocks_of("hstu"))
    least = f"{64 * (2 * 2 * DIM * DTYPE.itemsize + 8):,}"
    with raises(ValueError, f"max_bytes: expected {least} or more, a page of 64 rows, got 100"):
        HistoryCache(model.blocks, model=model, max_bytes=100)
    with raises(ValueError, "page_rows: expected 1 or more, got 0"):
        HistoryCache(model.blocks, model=model, max_bytes=100, page_rows=0)
    with torch.inference_mode():
        inner = blocks_of("hstu")
    says = "model: got weights of inference mode, whose writes PyTorch does not count; make the model outside of inference_mode"
    with raises(ValueError, says):
        HistoryCache(inner, model=None, max_bytes=10**6)

    for options, says in (
        ({"max_bytes": 1e6}, "max_bytes: expected an integer, got 1000000.0"),
        ({"max_bytes": 10**6, "page_rows": 2.0}, "page_rows: expected an integer, got 2.0"),
        ({"max_bytes": 10**6, "dtype": torch.int64}, "dtype: expected a floating torch.dtype or None, got torch.int64"),
        ({"max_bytes": 10**6, "dtype": "bfloat16"}, "dtype: expected a floating torch.dtype or None, got 'bfloat16'"),
    ):
        with raises(TypeError, says):
            HistoryCache(model.blocks, model=model, **options)
    with raises(ValueError, f"max_bytes: expected {least} or more, a page of 64 rows, got -5"):
        HistoryCache(model.blocks, model=model, max_bytes=-5)
    with raises(TypeError, "blocks: expected several, got a HSTUBlock; put it in a list"):
        HistoryCache(model.blocks[0], model=model, max_bytes=10**6)
    with raises(ValueError, "blocks: expected one device that has memory, got meta; move the model first"):
        HistoryCache([HSTUBlock(DIM, 2, normalizer=3, device="meta")], model=None, max_bytes=10**6)

    cache = HistoryCache(model.blocks, model=model, max_bytes=10**6)
    one = jagged([[1, 2]])
    with raises(TypeError, "users: expected what can be hashed, got a list; take a tuple"):
        cache.match([["a"]], one)
    says = "expected numbers, strings or tuples of them, got a tensor or array; take tuple(x.tolist())"
    for context in (torch.tensor(1), (1, np.zeros(2))):
        with raises(TypeError, f"contexts: {says}"):
            cache.match(["a"], one, [context])
    with raises(ValueError, "users: expected each once, got 7 twice; join the candidates of one user's requests"):
        cache.match(torch.tensor([7, 7]), jagged([[1], [2]]))
    with raises(ValueError, "events: expected no weights, which are not compared, got some; give them as a column of integers"):
        cache.match(["a"], JaggedTensor(values=one.values(), offsets=one.offsets(), weights=torch.ones(2)))
    with raises(ValueError, "events: expected integers [sum L] or [sum L, F], got torch.int64 [2, 0]"):
        cache.match(["a"], JaggedTensor(values=one.values().view(2, 1)[:, :0], offsets=one.offsets()))
    with raises(ValueError, "events[1]: expected 2, the number of rows, got 1; the last offset is the total length"):
        cache.match(["a"], JaggedTensor(values=one.values(), offsets=torch.tensor([0, 1])))
    with raises(ValueError, "users: expected 1 samples, as many as events has, got 2; give one for each"):
        cache.match(["a", "b"], one)
    with raises(ValueError, "users: expected each once, got 'a' twice; join the candidates of one user's requests"):
        cache.match(["a", "a"], jagged([[1], [2]]))
    with raises(ValueError, "contexts: expected 1 contexts, as many as users has, got 2; give one for each user"):
        cache.match(["a"], one, ["x", "y"])
    with raises(ValueError, "least_new: expected 0 or more, got -1"):
        cache.match(["a"], one, least_new=-1)
    with raises(ValueError, "events: expected integers [sum L] or [sum L, F], got torch.float32 [2]"):
        cache.match(["a"], JaggedTensor(values=torch.rand(2), offsets=torch.tensor([0, 2])))

    batch, rows, times = cache.match(["a"], one), model.rows(one.values()), model.times(one.values())
    with raises(ValueError, "events: expected 2 rows, as many as batch has, got 1; give the rows of batch.rows"):
        cache.encode(batch, rows[:1], times=times)
    with raises(ValueError, "candidates: expected 1 samples, as many as batch has, got 3; some may have none"):
        cache.encode(batch, rows, rows[None].expand(3, -1, -1), times=times)
    with raises(ValueError, "candidate_times: expected [1, 2], int32 or int64, for blocks with time buckets, got None"):
        cache.encode(batch, rows, rows[None], times=times)
    with raises(ValueError, "candidate_times: expected None, as there are no candidates, got [2]"):
        cache.encode(batch, rows, times=times, candidate_times=times)
    with raises(ValueError, "times: expected [2], int32 or int64, got torch.int64 [1]"):
        cache.encode(batch, rows, times=times[:1])
    with raises(ValueError, "times: expected [2], int32 or int64, got torch.float32 [2]"):
        cache.encode(batch, rows, times=times.float())
    with raises(ValueError, "candidate_times: expected [1, 2], int32 or int64, got torch.int64 [2]"):
        cache.encode(batch, rows, rows[None], times=times, candidate_times=times)
    timeless = Rows(blocks_of("hstu with a window"))
    other = HistoryCache(timeless.blocks, model=timeless, max_bytes=10**6)
    with raises(ValueError, "times: expected None, as no block has time buckets, got [2]"):
        other.encode(other.match(["a"], one), rows, times=times)
    with raises(ValueError, "times: expected [2], int32 or int64, for blocks with time buckets, got None"):
        cache.encode(batch, rows)
    assert check(cache, model, ["a"], [[1, 2]], [[3]]) == [0]


def test_compiled_blocks(place: Place) -> None:
    """Keys are kept from within a compiled graph, for requests of other sizes, too."""
    model = Rows(blocks_of("transformer"))
    cache = HistoryCache(model.blocks, model=model, max_bytes=10**6, page_rows=2)
    eager = [block.forward for block in model.blocks]
    try:
        for block in model.blocks:
            block.forward = torch.compile(block.forward, backend="aot_eager", dynamic=True)
        new = []
        for history in ([1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]):
            batch = cache.match(["a"], jagged([history]))
            new.append(encode(cache, model, batch, jagged([history]), jagged([[7, 8]])))
            assert int(batch.known[0]) == len(history) - len(new[-1][0])
    finally:
        for block, forward in zip(model.blocks, eager, strict=True):
            block.forward = forward
    events, candidates = whole(model, [[1, 2, 3, 4, 5, 6]], [[7, 8]])
    torch.testing.assert_close(torch.cat([of for of, _ in new]), events[0], **CLOSE)
    torch.testing.assert_close(new[-1][1].values(), candidates[0], **CLOSE)
