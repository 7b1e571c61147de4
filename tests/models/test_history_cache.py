"""Named models over cached histories score as they do over whole ones, whatever happened to the histories before."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from jagged.config import ConfigError, TrainConfig
from jagged.data.batches import features_of
from jagged.models import BERT4Rec, ItemSequenceModel, build
from jagged.models.pretrained import from_pretrained
from jagged.modules import HistoryCache
from tests.places import PLACE, Place
from tests.training.support import run, tiny_dataset

pytestmark = pytest.mark.skipif(PLACE.name == "interpret", reason="models run on the place's own backend")

ITEMS, LONGEST, DIM = 30, 12, 8
DTYPE = torch.float32 if PLACE.name == "gpu" else torch.float64
# Scores are large, and float32 is on the GPU three products of TF32.
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4} if PLACE.name == "gpu" else {}
every_model = pytest.mark.parametrize("name", ["hstu", "sasrec"])
every_count = pytest.mark.parametrize("positions", ["start", None])


def random_model(name: str, **options: Any) -> ItemSequenceModel:
    """A model with large scores, so that no key and no place is lost among the others."""
    torch.manual_seed(0)
    sizes = {"embedding_dim": DIM, "num_heads": 2, "num_layers": 2, "max_seq_len": LONGEST}
    model: ItemSequenceModel = build(name, num_items=ITEMS, **sizes, **options).to(PLACE.device, DTYPE).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64))
    return model


def cache_of(model: ItemSequenceModel, **options: Any) -> HistoryCache:
    return HistoryCache(model.blocks, model=model, **{"max_bytes": 2**18, "page_rows": 4, **options})


def features(histories: list[list[int]], has_times: bool = False, has_actions: bool = False) -> KeyedJaggedTensor:
    """Histories on the CPU; an event's time and action are of its item and place."""
    items = torch.tensor([item for history in histories for item in history], dtype=torch.int64)
    others = ({"timestamp": items * 97 % 1009} if has_times else {}) | ({"action": items % 4} if has_actions else {})
    return features_of(items, torch.tensor([len(history) for history in histories]), others)


def rows_made(model: ItemSequenceModel, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each call of `event_rows` makes."""
    made, original = [], type(model).event_rows

    def event_rows(self: ItemSequenceModel, of: KeyedJaggedTensor, **options: Any) -> JaggedTensor:
        found = original(self, of, **options)
        made.append(found.values().shape[0])
        return found

    monkeypatch.setattr(type(model), "event_rows", event_rows)
    return made


A, B = [3, 1, 4, 1, 5, 9, 2], [6, 5]
#: Histories of three users at one request after another, and how many events are computed.
REQUESTS: list[tuple[list[list[int]], int]] = [
    ([A, B, []], 9),
    # As before: the last event of each.
    ([A, B, []], 2),
    # One grows by two, one by one, and one begins.
    ([[*A, 6, 5], [*B, 8], [7]], 4),
    # The last events went, one of them with another behind it.
    ([A[:4], [*B, 29], [7, 7]], 3),
    # The first event went: all is new.
    ([A[1:], [*B, 29], [7, 7]], 8),
    # A history at its longest, and cut from the front as it grows.
    ([[*A, *A][:LONGEST], B, [7]], 14),
    ([[*A, *A, 8][-LONGEST:], B, [7]], 14),
]


@every_model
@every_count
@pytest.mark.parametrize("has_more", [False, True])
@torch.no_grad()
def test_scores_are_those_of_whole_histories(
    place: Place, name: str, positions: Any, has_more: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    more: dict[str, Any] = {"num_time_buckets": 9, "event_features": {"action": 4}} if has_more else {}
    model = random_model(name, positions=positions, **more)
    cache, made = cache_of(model), rows_made(model, monkeypatch)
    candidates = torch.randint(ITEMS, (3, 5), device=place.device)
    for histories, computed in REQUESTS:
        given = features(histories, has_more, has_more)
        whole = model.final_hidden(given.to(place.device))
        made.clear()
        found = model.final_hidden_cached(given, ["a", "b", "c"], cache)
        assert made == [computed], histories
        torch.testing.assert_close(found, whole, **CLOSE)
        items = model.item_weight[candidates]
        torch.testing.assert_close(*((items @ hidden[..., None]).squeeze(2) for hidden in (found, whole)), **CLOSE)
    # Users in another order, and one alone; on the models' own device.
    histories = [REQUESTS[-1][0][place_] for place_ in (2, 0)]
    given = features(histories, has_more, has_more).to(place.device)
    torch.testing.assert_close(model.final_hidden_cached(given, ["c", "a"], cache), model.final_hidden(given), **CLOSE)


@every_model
@every_count
@torch.no_grad()
def test_candidates_behind_cached_histories(place: Place, name: str, positions: Any) -> None:
    """As targets of the blocks: each sees the history and itself, and all stand right behind it."""
    model = random_model(name, positions=positions)
    cache = cache_of(model)
    for histories in (request for request, _ in REQUESTS):
        candidates = [[(item + 11) % ITEMS for item in range(count)] for count in (4, 0, 1)]
        given = features(histories)
        history = given["item_id"]
        batch = cache.match(["a", "b", "c"], history)
        new = features_of(history.values()[batch.rows], batch.offsets.diff()).to(place.device)
        behind = torch.tensor([len(one) for one in histories], device=place.device)
        counts = torch.tensor([len(one) for one in candidates], device=place.device)
        targets = model.event_rows(features(candidates).to(place.device), num_targets=counts, behind=behind)
        events, ranked = cache.encode(batch, model.event_rows(new, behind=batch.known).values(), targets)
        assert isinstance(ranked, JaggedTensor)
        joined = features([[*one, *of] for one, of in zip(histories, candidates, strict=True)]).to(place.device)
        x = model.event_rows(joined, num_targets=counts)
        for block in model.blocks:
            x = block(x, counts)
        parts = [part.split([len(one), len(of)]) for part, one, of in zip(x.to_dense(), histories, candidates, strict=True)]
        torch.testing.assert_close(ranked.values(), torch.cat([part[1] for part in parts]), **CLOSE)
        expected = [part[0][known:] for part, known in zip(parts, batch.known.tolist(), strict=True)]
        torch.testing.assert_close(events, torch.cat(expected), **CLOSE)


@every_model
@torch.no_grad()
def test_earlier_rows_do_not_depend_on_later_ones(place: Place, name: str) -> None:
    history, fewer = features([A, B]).to(place.device), features([A[:5], B[:1]]).to(place.device)
    for positions in ("start", None, "end"):
        model = random_model(name, positions=positions)
        whole, first = model(history), model(fewer)
        same = [torch.allclose(part[: len(of)], of) for part, of in zip(whole.to_dense(), first.to_dense(), strict=True)]
        assert same == [positions != "end"] * 2
    # Without places a history of equal items has equal rows before blocks, with them other ones.
    equal = features([[4, 4, 4]]).to(place.device)
    for positions, count in (("start", 3), ("end", 3), (None, 1)):
        assert len(random_model(name, positions=positions).event_rows(equal).values().unique(dim=0)) == count


@every_model
def test_places_from_the_end_are_refused(place: Place, name: str) -> None:
    model = random_model(name)
    assert model.config["positions"] == "end"
    with pytest.raises(ValueError, match=r"got a PositionalEncoding, 'positions', which counts from the end; make it with "):
        cache_of(model)
    with pytest.raises(
        ValueError, match=r"^positions: got 'front', expected 'end' or 'start', where places are counted from, or None for none$"
    ):
        random_model(name, positions="front")
    with pytest.raises(TypeError, match="positions"):
        BERT4Rec(ITEMS, positions="start")  # type: ignore[call-arg]


@every_model
def test_what_does_not_fit_is_refused(place: Place, name: str) -> None:
    model, other = random_model(name, positions="start"), random_model(name, positions="start")
    given, message = (
        features([A]),
        "cache: got one of another model, expected HistoryCache(model.blocks, model=model, max_bytes=...)",
    )
    for cache in (cache_of(other), HistoryCache(model.blocks, model=None, max_bytes=2**18)):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            model.final_hidden_cached(given, ["a"], cache)
    cache = cache_of(model)
    with pytest.raises(ValueError, match=r"^users: "):
        model.final_hidden_cached(given, ["a", "b"], cache)
    with pytest.raises(ValueError, match=r"^features\['item_id'\]"):
        model.final_hidden_cached(features([[ITEMS]]), ["a"], cache)
    model.train()
    with pytest.raises(ValueError, match=r"^blocks: expected them in evaluation, got block 0 in training; call model\.eval\(\)$"):
        model.final_hidden_cached(given, ["a"], cache)


@torch.no_grad()
def test_a_written_weight_gives_up_what_is_cached(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of places, too: they are in the rows."""
    model = random_model("hstu", positions="start")
    cache, made = cache_of(model), rows_made(model, monkeypatch)
    given = features([A, B])
    model.final_hidden_cached(given, ["a", "b"], cache)
    model.positions.weight.mul_(2)  # type: ignore[union-attr]
    whole = model.final_hidden(given.to(place.device))
    made.clear()
    torch.testing.assert_close(model.final_hidden_cached(given, ["a", "b"], cache), whole, **CLOSE)
    assert made == [9]


def test_an_output_layer_reads_what_is_cached(place: Place) -> None:
    model = random_model("hstu", positions="start", output_fan_in=4, output_groups=2)
    given = features([A, [], B])
    found: Tensor = model.final_hidden_cached(given, [1, 2, 3], cache_of(model))
    assert found[:, -1].tolist() == [1, 0, 1]
    torch.testing.assert_close(found, model.final_hidden(given.to(place.device)).detach(), **CLOSE)


@pytest.mark.skipif(PLACE.name == "gpu", reason="the run is on the CPU")
@every_model
@every_count
def test_a_trained_model_serves(tmp_path: Path, name: str, positions: Any) -> None:
    result = run(tmp_path / "run", tiny_dataset(), name=name, positions=positions, max_epochs=1)
    model = from_pretrained(result.directory).model.eval()
    assert model.config["positions"] == positions
    assert ("positions.weight" in model.state_dict()) == (positions is not None)
    cache, given = cache_of(model, max_bytes=2**20), features([[1, 2, 3], [4]])
    for _ in range(2):
        torch.testing.assert_close(model.final_hidden_cached(given, ["a", "b"], cache), model.final_hidden(given).detach())


def test_how_places_are_given() -> None:
    for text, value in (("start", "start"), ("none", None), ("end", "end")):
        config = TrainConfig(model={"name": "hstu", "positions": text})
        assert config.model.model_dump()["positions"] == value
    with pytest.raises(ConfigError) as refused:
        TrainConfig(model={"name": "hstu", "positions": "front"})
    assert str(refused.value) == "model.positions: got 'front', expected end, start or none"
    with pytest.raises(ConfigError, match=r"^model\.positions: belongs to model\.name sasrec or hstu, got bert4rec$"):
        TrainConfig(model={"name": "bert4rec", "positions": "start"})
