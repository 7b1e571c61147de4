"""From a run on events to a package that finds users' best items without jagged, and recommending by it."""

from __future__ import annotations

import json
import re
import shutil
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pytest
import torch

import jagged
from jagged import Recommender, artifacts, cli
from jagged.config import ConfigError, TrainConfig
from jagged.evaluation import NOT_FINITE, EvaluationError
from jagged.runs import exporting, packing
from jagged.runs.packages import most_samples
from tests.places import PLACE
from tests.runs.test_exporting import COMPILED, scored, scored_by_cpp

pytestmark = [
    pytest.mark.skipif(PLACE.name == "interpret", reason="modules run on the place's own backend"),
    pytest.mark.filterwarnings("ignore"),
]
USERS, ITEMS, LENGTH, BEST = 30, 25, 8, 6


def events() -> pa.Table:
    """Users who walk through the items in steps of their own, from two events to more than the model reads."""
    rows = [
        (f"u{user}", f"i{(user * 7 + step * (1 + user % 3)) % ITEMS}", step)
        for user in range(USERS)
        for step in range(4 + user % 9)
    ]
    users, items, times = zip(*rows, strict=True)
    return pa.table({"user_id": users, "item_id": items, "timestamp": times})


def trained(directory: Path, **model: Any) -> Path:
    chosen = {"name": "sasrec", "embedding_dim": 8, "num_layers": 1, "num_heads": 2, **model}
    data = {"max_seq_len": LENGTH, "duplicates": "keep"}
    config = TrainConfig(output=str(directory / "run"), model=chosen, data=data, training={"max_epochs": 1}, device="cpu")
    jagged.train(config, events(), progress=False)
    return directory / "run"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("shop"))


@pytest.fixture(scope="module")
def package(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = jagged.export(run, tmp_path_factory.mktemp("packages") / "items", k=BEST, progress=False)
    assert isinstance(made, Path)
    return made


@COMPILED
def test_a_run_is_exported(run: Path, package: Path, tmp_path: Path) -> None:
    """What is told of it, and what the programs beside it find in processes without jagged."""
    opened = jagged.runs.run.Run.open(run, device="cpu")
    part = packing.ItemPackage(opened, BEST, (1e-4, 1e-3))
    expected = part.by_model(part.batch(5))
    found = scored(package)
    assert found["items"] == expected["items"].tolist()
    torch.testing.assert_close(torch.tensor(found["scores"]), expected["scores"].detach(), rtol=0, atol=1e-4)
    of_cpp = scored_by_cpp(package, tmp_path)
    assert of_cpp == pytest.approx(expected["scores"].flatten().tolist(), abs=1e-4)
    manifest = artifacts.verify(package).content
    assert {name: manifest[name] for name in ("kind", "model", "device", "k", "max_history", "times")} == {
        "kind": "items", "model": "sasrec", "device": "cpu", "k": BEST, "max_history": LENGTH, "times": opened.time_unit
    }  # fmt: skip
    ints = {"dtype": "int64", "sizes": [None]}
    assert manifest["inputs"] == {
        "features_values": ints, "features_lengths": ints, "exclude_values": ints, "exclude_lengths": ints
    }  # fmt: skip
    assert manifest["keys"] == {"features": {"item_id": "item_id"}, "exclude": {"item_id": "item_id"}}
    assert [one["users"] for one in manifest["compared"]] == [1, 7, 100, 3]
    assert [one["events"] for one in manifest["compared"]][-1] == 0
    assert all(one["difference"] < 1e-4 for one in manifest["compared"])
    assert manifest["milliseconds"]["users"] == 100
    had = opened.train_counts().users_per_item
    assert manifest["popular"] == sorted(range(len(had)), key=lambda item: (-int(had[item]), item))
    with pa.memory_map(str(package / "ids-0.arrow")) as file:
        ids = pa.ipc.open_file(file).read_all().column(0).to_pylist()
    assert ids == opened.items.ids.to_pylist()
    assert manifest["tables"] == {"item_id": {"encoding": "vocabulary", "rows": len(ids), "first": 0, "ids": "ids-0.arrow"}}


@COMPILED
@pytest.mark.parametrize("filter_viewed", [True, False])
def test_recommends_as_the_model_does(run: Path, package: Path, filter_viewed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Users known and new, with histories longer than the model reads, and without any, some at a time."""
    monkeypatch.setattr("jagged.runs.recommending.most_samples", lambda wanted, longest, catalogue: 3)
    called: list[int] = []
    users = {
        "new": ["i3", "i4", "i5"],
        "cold": [],
        "strange": ["i3", "none"],
        "long": [f"i{step % ITEMS}" for step in range(3 * LENGTH)],
    }
    model, served = Recommender.from_pretrained(run, device="cpu"), Recommender.from_pretrained(run, package=package)
    opened = served._run.package if served._run is not None else None
    assert opened is not None
    score = opened._score
    opened._score = lambda **tensors: called.append(len(tensors["exclude_lengths"])) or score(**tensors)
    for given in (users, events(), ["u3", "u4"]):
        for k in (BEST, 2):
            expected = model.recommend(given, k, filter_viewed)
            found = served.recommend(given, k, filter_viewed)
            scores = [table["score"].to_pylist() for table in (found, expected)]
            assert scores[0] == pytest.approx(scores[1], abs=1e-4)
            # It was the package, with three users at a time.
            assert max(called) <= 3
            assert sum(called) == (len(given) if not isinstance(given, pa.Table) else USERS)
            called.clear()
            assert found.drop_columns("score").equals(expected.drop_columns("score"))


@COMPILED
def test_recommends_from_the_command_line(run: Path, package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow.parquet as pq

    pq.write_table(events(), tmp_path / "events.parquet")
    found = []
    for more in ([], ["--package", str(package)]):
        output = tmp_path / f"found-{len(more)}.csv"
        words = ["jagged", "recommend", str(run), str(tmp_path / "events.parquet"), "--k", "3", "--output", str(output), *more]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert not end.value.code
        found.append([line.split(",")[:2] for line in output.read_text().splitlines()])
    assert found[0] == found[1]
    assert len(found[0]) == 1 + 3 * USERS
    # It was asked: of more than it has it finds none.
    with pytest.raises(ConfigError, match=f"^k: got {BEST + 1}, expected at most {BEST}, of which the package was made"):
        jagged.recommend(run, tmp_path / "events.parquet", k=BEST + 1, package=package)


@COMPILED
def test_what_does_not_go_with_a_package_is_refused(run: Path, package: Path, tmp_path: Path) -> None:
    def refused(call: Callable[[], Any]) -> str:
        with pytest.raises(ConfigError) as told:
            call()
        return str(told.value)

    served = Recommender.from_pretrained(run, package=package)
    assert refused(lambda: served.recommend(["u1"], BEST + 1)) == (
        f"k: got {BEST + 1}, expected at most {BEST}, of which the package was made; make one of more"
    )
    assert refused(lambda: served.recommend(["u1"], 2, candidates=["i3"])) == (
        "candidates: got some beside a package, which ranks the whole catalogue; leave one of the two out"
    )
    assert refused(lambda: Recommender.from_pretrained(run, device="cuda", package=package)) == (
        "device: got 'cuda' beside a package, which scores on the CPU; leave one of the two out"
    )
    # A run is listed in a manifest, too.
    assert refused(lambda: Recommender.from_pretrained(run, package=run)) == (
        f"package: {run} holds no package, expected one of items, as `jagged export` makes of this run"
    )

    def changed(**content: Any) -> Path:
        shutil.rmtree(tmp_path / "other", ignore_errors=True)
        shutil.copytree(package, tmp_path / "other")
        manifest = artifacts.verify(package)
        artifacts.write_manifest(tmp_path / "other", manifest.files, {**manifest.content, **content})
        return tmp_path / "other"

    of_requests = changed(kind="scores")
    assert refused(lambda: Recommender.from_pretrained(run, package=of_requests)) == (
        f"package: {of_requests} holds a package of scores, expected one of items, as `jagged export` makes of this run"
    )
    of_others = changed(weights="0" * 64)
    assert refused(lambda: Recommender.from_pretrained(run, package=of_others)) == (
        f"package: {of_others} was made of other weights than those of {run}; make one by `jagged export`"
    )
    of_before = changed(torch="1.0")
    assert refused(lambda: Recommender.from_pretrained(run, package=of_before)) == (
        f"package: {of_before} was made by PyTorch 1.0, expected {torch.__version__}, which is here; make it again by "
        "`jagged export`"
    )
    # What was compiled there is no damage; what is not as it was written is.
    (changed() / "score").write_text("")
    Recommender.from_pretrained(run, package=tmp_path / "other")
    (tmp_path / "other" / "scores.pt2").write_bytes(b"")
    with pytest.raises(artifacts.ArtifactError):
        Recommender.from_pretrained(run, package=tmp_path / "other")


@pytest.fixture
def uncompiled(run: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Whatever is compiled finds what the model does, with changes."""
    changes: dict[str, Any] = {}
    made = packing.ItemPackage(jagged.runs.run.Run.open(run, device="cpu"), BEST, (1e-4, 1e-3))

    def find(**tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        users = len(tensors["exclude_lengths"])
        batch = made.batch(users, None if len(tensors["features_values"]) else 0)
        return {name: changes.get(name, lambda of: of)(of.clone()) for name, of in made.by_model(batch).items()}

    monkeypatch.setattr(exporting, "write_package", lambda program, path: zipfile.ZipFile(path, "w").close())
    monkeypatch.setattr(packing, "export_best_items", lambda *given: None)
    monkeypatch.setattr(torch._inductor, "aoti_load_package", lambda path: find)
    return changes


def test_a_package_that_finds_others_is_not_written(run: Path, tmp_path: Path, uncompiled: dict[str, Any]) -> None:
    jagged.export(run, tmp_path / "right", k=BEST, progress=False)
    told = (
        r"items: scores of the package are {} from the model's, expected 0\.0001 and 0\.001 of them; nothing was written\. "
        r"Report it with the output of `jagged doctor`"
    )
    wrong: list[tuple[str, Any, str]] = [
        # Scores that are too high, items in another order, and one that is none.
        ("scores", lambda of: of + 0.5, told.format(r"0\.5")),
        ("items", lambda of: of.flip(1), told.format(r"\d\S*")),
        ("items", lambda of: of.masked_fill(torch.arange(BEST) == 1, -1), told.format("inf")),
    ]
    for name, change, expected in wrong:
        uncompiled.clear()
        uncompiled[name] = change
        with pytest.raises(artifacts.ArtifactError) as refused:
            jagged.export(run, tmp_path / "wrong", k=BEST, progress=False)
        assert re.fullmatch(expected, str(refused.value)), str(refused.value)
        assert not (tmp_path / "wrong").exists()


def test_an_item_twice_is_told(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two items of one vector score alike, so that scores alone would not tell."""
    made = packing.ItemPackage(jagged.runs.run.Run.open(run, device="cpu"), BEST, (1e-4, 1e-3))
    batch = made.batch(3)
    found = {name: of.detach().clone() for name, of in made.by_model(batch).items()}
    made.difference(found, batch)
    weight = made.run.model.item_embeddings.embeddings["item_id"].weight
    weight.data[int(found["items"][0, 1])] = weight.data[int(found["items"][0, 0])]
    found = {name: of.detach().clone() for name, of in made.by_model(batch).items()}
    found["items"][0, 1] = found["items"][0, 0]
    with pytest.raises(artifacts.ArtifactError) as refused:
        made.difference(found, batch)
    assert str(refused.value) == (
        "items: the package gives a user one item twice; nothing was written. Report it with the output of `jagged doctor`"
    )


def test_numbers_of_items(run: Path, tmp_path: Path) -> None:
    items = json.loads((run / "model.json").read_text())["arguments"]["num_items"]
    for k in (0, items + 1):
        with pytest.raises(ConfigError) as refused:
            jagged.export(run, tmp_path / "items", k=k)
        assert str(refused.value) == f"k: got {k}, expected 1 to {items}, the size of the catalogue"
    shutil.copytree(run, tmp_path / "bare")
    shutil.rmtree(tmp_path / "bare" / "dataset")
    with pytest.raises(ConfigError) as refused:
        jagged.export(tmp_path / "bare", tmp_path / "items")
    told = (
        "holds no data (dataset/), on which a package is compared with the model; export the directory that `jagged train` wrote"
    )
    assert str(refused.value) == f"{tmp_path / 'bare'}: {told}"


def test_a_model_of_no_numbers_is_refused_before_it_is_compiled(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_model = packing.ItemPackage.by_model

    def strange(self: packing.ItemPackage, batch: Any) -> Any:
        return {name: of * torch.nan if name == "scores" else of for name, of in by_model(self, batch).items()}

    monkeypatch.setattr(packing.ItemPackage, "by_model", strange)
    with pytest.raises(EvaluationError) as refused:
        jagged.export(run, tmp_path / "items")
    assert str(refused.value) == f"{run}: {NOT_FINITE}"


@COMPILED
def test_what_is_no_number_is_not_recommended(run: Path, package: Path) -> None:
    served = Recommender.from_pretrained(run, package=package)
    assert served._run is not None
    assert served._run.package is not None
    score = served._run.package._score
    served._run.package._score = lambda **tensors: {**(found := score(**tensors)), "scores": found["scores"] * torch.nan}
    with pytest.raises(EvaluationError) as refused:
        served.recommend(["u1"], 2)
    assert str(refused.value) == f"{run}: {NOT_FINITE}"


def test_a_part_without_users_is_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = jagged.runs.run.Run.open(run, device="cpu")
    whole = jagged.runs.run.Run.split

    def without(self: Any, dataset: Any) -> Any:
        split = whole(self, dataset)
        nothing = torch.zeros(0, dtype=torch.int64)
        return replace(split, valid=replace(split.valid, user=nothing, start=nothing, end=nothing, target=nothing))

    monkeypatch.setattr(jagged.runs.run.Run, "split", without)
    with pytest.raises(ConfigError) as refused:
        packing.ItemPackage(opened, BEST, (1e-4, 1e-3))
    assert str(refused.value) == f"{run}: its data hold no user for validation, on whom a package is compared"


def test_what_is_told_of_events_with_times_and_features(tmp_path: Path) -> None:
    """Keys in the order in which the model reads them, with their tables, whose rows begin behind two of their own."""
    rows = events().append_column("shop", pa.array([f"s{row % 3}" for row in range(len(events()))]))
    rows = rows.append_column("device", pa.array([f"d{row % 2}" for row in range(len(events()))]))
    config = TrainConfig(
        output=str(tmp_path / "run"), model={"name": "hstu", "embedding_dim": 8, "num_layers": 1, "num_time_buckets": 4},
        data={"max_seq_len": LENGTH, "duplicates": "keep", "event_columns": ["shop", "device"], "timestamp_column": "timestamp"},
        training={"max_epochs": 1}, device="cpu",
    )  # fmt: skip
    jagged.train(config, rows, progress=False)
    made = packing.ItemPackage(jagged.runs.run.Run.open(tmp_path / "run", device="cpu"), BEST, (1e-4, 1e-3))
    batch = made.batch(4)
    tensors = made.tensors(batch)
    told = made.described(tensors)["keys"]
    assert told["features"] == {"item_id": "item_id", "timestamp": None, "shop": "shop", "device": "device"}
    assert list(told["features"]) == ["item_id", "timestamp", *made.run.model.event_features]
    of_keys = tensors["features_values"].view(4, -1)
    for values, key in zip(of_keys, told["features"], strict=True):
        assert torch.equal(values, batch.features[key].values())
    tables = made.tables(tmp_path)
    assert {name: (of["rows"], of["first"]) for name, of in tables.items()} == {
        "item_id": (ITEMS, 0), "shop": (5, 2), "device": (4, 2)
    }  # fmt: skip
    with pa.memory_map(str(tmp_path / tables["shop"]["ids"])) as file:
        ids = pa.ipc.open_file(file).read_all().column(0).to_pylist()
    assert ids == made.run.event_values["shop"].ids.to_pylist() == ["s0", "s1", "s2"]


def test_long_histories_are_compared_some_at_a_time(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's own length counts, whatever the data's is."""
    made = packing.ItemPackage(jagged.runs.run.Run.open(run, device="cpu"), BEST, (1e-4, 1e-3))
    asked: list[tuple[int, int, int]] = []
    monkeypatch.setattr(packing, "most_samples", lambda *given: asked.append(given) or 2)
    assert len(made.batch(100)) == 2
    assert asked == [(100, LENGTH, ITEMS)]
    made.run.model.config["max_seq_len"] = 3
    assert int(made.batch(100).features.lengths().max()) == 3


def test_users_at_a_time() -> None:
    """So many that their padded pairs, and scores of a tile of the catalogue, take some hundred megabytes."""
    assert most_samples(1024, 50) == 1024
    assert most_samples(1024, 200) == 209
    assert most_samples(1024, 10_000) == 1
    assert most_samples(1024, 50, 600) == 1024
    assert most_samples(1024, 50, 1_000_000) == 256
    assert most_samples(1024, 50, 16_000_000) == 16
