"""Recommending: properties of the table, every kind of input and output, and a model that is fitted, saved and opened again."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jagged.config import ConfigError, TrainConfig
from jagged.data import DataError, Vocabulary, read_events, split_leave_one_out
from jagged.evaluation import EvaluationError
from jagged.metrics import TrainCounts
from jagged.models import SASRec
from jagged.models.pretrained import save_pretrained
from jagged.runs.recommending import Recommender, recommend
from jagged.runs.tables import writer
from jagged.training import CheckpointError

NUM_ITEMS = 40


def write_run(directory, ids, *, counts=True, seed=0, **config):
    """A run's directory with random weights."""
    torch.manual_seed(seed)
    model = SASRec(len(ids), embedding_dim=8, num_heads=2, num_layers=1, max_seq_len=5)
    with torch.no_grad():
        model.item_weight.mul_(50)
    users = torch.arange(len(ids)) * 7 % 13
    save_pretrained(
        model,
        directory,
        items=Vocabulary(ids),
        config=TrainConfig.load(None, {"data.max_seq_len": 5, "model.embedding_dim": 8, **config}),
        train_counts=TrainCounts(users, 20) if counts else None,
    )
    return model.eval()


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A run over items "i0" .. "i39"."""
    directory = tmp_path_factory.mktemp("texts")
    write_run(directory, [f"i{n}" for n in range(NUM_ITEMS)])
    return directory


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    """A run over items 100, 103, 106, ..."""
    directory = tmp_path_factory.mktemp("numbers")
    write_run(directory, [100 + 3 * n for n in range(NUM_ITEMS)])
    return directory


@pytest.fixture(scope="module")
def recommender(texts):
    return Recommender.from_pretrained(texts)


def by_user(table):
    result = {}
    for row in table.to_pylist():
        result.setdefault(row["user_id"], []).append((row["item_id"], row["score"], row["rank"]))
    return result


@given(
    st.dictionaries(st.text(min_size=1, max_size=5), st.lists(st.integers(0, NUM_ITEMS + 5), max_size=60), max_size=8),
    st.integers(1, NUM_ITEMS),
    st.booleans(),
)
def test_what_holds_for_any_histories(recommender, histories, k, filter_viewed):
    """Ranks 1 to k without a gap, scores descending, no item twice, nothing seen, everything that can be recommended is."""
    histories = {user: [f"i{n}" for n in items] for user, items in histories.items()}
    table = recommender.recommend(histories, k=k, filter_viewed=filter_viewed)
    assert table.column_names == ["user_id", "item_id", "score", "rank"]
    assert [str(field.type) for field in table.schema][2:] == ["float", "int64"]
    got = by_user(table)
    catalogue = {f"i{n}" for n in range(NUM_ITEMS)}
    assert set(got) == {u for u, items in histories.items() if not filter_viewed or catalogue - set(items)}
    for user, rows in got.items():
        left = catalogue - set(histories[user]) if filter_viewed else catalogue
        items, scores, ranks = zip(*rows, strict=True)
        assert list(ranks) == list(range(1, min(k, len(left)) + 1))
        assert list(scores) == sorted(scores, reverse=True)
        assert len(set(items)) == len(items)
        assert set(items) <= left


def test_scores_are_the_models_on_the_last_events(texts, recommender):
    """The last five known events count; they are seen, and so are those before them."""
    history = [f"i{n}" for n in (8, 9, 1, 2, 3, 4, 5)]
    table = recommender.recommend({"u": [*history[:3], "unheard of", *history[3:]]}, k=NUM_ITEMS)
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    model = recommender._run.model
    features = KeyedJaggedTensor(keys=["item_id"], values=torch.tensor([1, 2, 3, 4, 5]), lengths=torch.tensor([5]))
    with torch.no_grad():
        scores = (model.final_hidden(features.to(model.item_weight.device)) @ model.item_weight.T)[0].cpu()
    order = [n for n in scores.argsort(descending=True, stable=True).tolist() if f"i{n}" not in history]
    assert table.column("item_id").to_pylist() == [f"i{n}" for n in order]
    assert table.column("score").to_pylist() == pytest.approx(scores[order].tolist(), abs=1e-5)


@given(st.lists(st.integers(0, NUM_ITEMS + 5), max_size=12), st.integers(1, 6), st.booleans())
def test_candidates_are_ranked_as_in_the_whole_catalogue(recommender, numbers, k, filter_viewed):
    users = {"a": ["i3", "i4"], "b": [], "c": ["i3", "x", "i9", "i1"]}
    # Those from 40 on the model does not know.
    candidates = [f"i{n}" for n in numbers]
    whole = by_user(recommender.recommend(users, k=NUM_ITEMS, filter_viewed=filter_viewed))
    expected = {user: [row[:2] for row in rows if row[0] in candidates][:k] for user, rows in whole.items()}
    table = recommender.recommend(users, k=k, filter_viewed=filter_viewed, candidates=candidates)
    of_each = recommender.recommend(users, k, filter_viewed, candidates=dict.fromkeys(users, candidates))
    assert table == of_each
    got = by_user(table)
    for user, rows in expected.items():
        found = got.get(user, [])
        assert [row[0] for row in found] == [row[0] for row in rows]
        assert [row[1] for row in found] == pytest.approx([row[1] for row in rows], rel=1e-5, abs=1e-5)
        assert [row[2] for row in found] == list(range(1, len(rows) + 1))


def test_users_may_have_candidates_of_their_own(recommender, caplog):
    with caplog.at_level(logging.WARNING, logger="jagged"):
        table = recommender.recommend({"a": ["i3"], "b": ["i3"]}, candidates={"a": ["i7"], "b": ["new", "i8", "i9"]})
    rows = by_user(table)
    assert {user: {row[0] for row in of} for user, of in rows.items()} == {"a": {"i7"}, "b": {"i8", "i9"}}
    assert "1 candidates that the model does not know were left out" in caplog.text
    with pytest.raises(ConfigError) as error:
        recommender.recommend({"a": ["i3"], "b": []}, candidates={"a": ["i7"]})
    assert str(error.value) == "candidates: got none for the user 'b', expected a list for each of the users"


def test_candidates_come_from_a_file(texts, tmp_path):
    pa.csv.write_csv(pa.table({"item_id": ["i5", "i9"], "price": [1, 2]}), tmp_path / "items.csv")
    table = recommend(texts, {"a": ["i3"]}, candidates=tmp_path / "items.csv", progress=False)
    assert table == recommend(texts, {"a": ["i3"]}, candidates=["i5", "i9"], progress=False)
    pa.csv.write_csv(pa.table({"id": ["i5"]}), tmp_path / "other.csv")
    with pytest.raises(DataError) as error:
        recommend(texts, {"a": ["i3"]}, candidates=tmp_path / "other.csv", progress=False)
    assert str(error.value) == "candidates: found the columns id, expected 'item_id' among them"


def test_similar_items_are_those_of_the_largest_cosine(recommender, caplog):
    with caplog.at_level(logging.WARNING, logger="jagged"):
        table = recommender.similar(["i7", "nothing", "i2"], k=3)
    assert "1 items that the model does not know were left out" in caplog.text
    weight = recommender._run.model.item_weight.detach().double().cpu()
    cosines = torch.nn.functional.cosine_similarity(weight[:, None], weight[None], dim=2)
    for place, item in enumerate((7, 2)):
        others = cosines[item].clone()
        others[item] = -2
        best = others.argsort(descending=True)[:3]
        rows = table.slice(3 * place, 3).to_pylist()
        assert [row["similar_item_id"] for row in rows] == [f"i{n}" for n in best.tolist()]
        assert [row["score"] for row in rows] == pytest.approx(others[best].tolist(), abs=1e-5)
        assert [(row["item_id"], row["rank"]) for row in rows] == [(f"i{item}", rank) for rank in (1, 2, 3)]
    with pytest.raises(ConfigError, match=r"^k: got 40, expected 1 to 39, the other items of the catalogue$"):
        recommender.similar(["i7"], k=NUM_ITEMS)


def test_ids_come_back_in_their_own_type(numbers):
    opened = Recommender.from_pretrained(numbers)
    table = opened.recommend({7: [100, 103], -1: [106]}, k=2)
    assert table.schema.field("user_id").type == pa.int64()
    assert table.schema.field("item_id").type == pa.int64()
    assert table.column("user_id").to_pylist() == [7, 7, -1, -1]
    assert all(item % 3 == 1 and item > 106 for item in table.column("item_id").to_pylist())
    # Text that spells the numbers finds them.
    assert opened.recommend({7: ["100", "103"]}, k=2).column("item_id") == table.column("item_id")[:2]


def test_users_of_whom_nothing_is_known_get_what_is_popular(texts, recommender, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="jagged"):
        table = recommender.recommend({"none": [], "unknown": ["x", "y"], "known": ["i3", "x"]}, k=3)
    popular = sorted(range(NUM_ITEMS), key=lambda n: (-(n * 7 % 13), n))[:3]
    expected = [(f"i{n}", float(n * 7 % 13), rank) for rank, n in enumerate(popular, 1)]
    got = by_user(table)
    assert got["none"] == got["unknown"] == expected
    assert got["known"] != expected
    assert "3 events of items that the model does not know" in caplog.text
    assert "2 users have no event of an item that the model knows; they get the most popular items" in caplog.text

    write_run(tmp_path, [f"i{n}" for n in range(NUM_ITEMS)], counts=False)
    table = Recommender.from_pretrained(tmp_path).recommend({"none": []}, k=3)
    assert by_user(table)["none"] == [("i0", 0.0, 1), ("i1", 0.0, 2), ("i2", 0.0, 3)]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("h.csv", "user_id,item_id,timestamp\na,i1,1\nb,i7,1\na,i2,2\n"),
        ("unsorted.csv", "user_id,item_id,timestamp\na,i2,2\nb,i7,9\na,i1,1\n"),
        ("h.tsv", "user_id\titem_id\ttimestamp\na\ti1\t1\nb\ti7\t1\na\ti2\t2\n"),
        ("without_times.csv", "user_id,item_id\na,i1\nb,i7\na,i2\n"),
        ("h.txt", "a i1 i2\nb i7\n"),
    ],
)
def test_histories_from_files(texts, recommender, tmp_path, caplog, name, content):
    (tmp_path / name).write_text(content)
    expected = recommender.recommend({"a": ["i1", "i2"], "b": ["i7"]}, k=4)
    with caplog.at_level(logging.WARNING, logger="jagged"):
        assert by_user(recommend(texts, tmp_path / name, k=4)) == by_user(expected)
    assert ("no column 'timestamp': rows count as oldest first" in caplog.text) == (name == "without_times.csv")
    caplog.clear()
    assert by_user(recommender.recommend(str(tmp_path / name), k=4)) == by_user(expected)


def test_histories_from_parquet_with_other_column_names(texts, recommender, tmp_path):
    table = pa.table({"who": ["a", "a", "b"], "what": ["i2", "i1", "i7"], "when": [5, 4, 1]})
    pyarrow.parquet.write_table(table, tmp_path / "h.parquet")
    got = recommend(texts, tmp_path / "h.parquet", k=4, user_column="who", item_column="what", timestamp_column="when")
    assert by_user(got) == by_user(recommender.recommend({"a": ["i1", "i2"], "b": ["i7"]}, k=4))
    pyarrow.parquet.write_table(table.drop_columns("when").rename_columns(["user_id", "item_id"]), tmp_path / "h.parquet")
    got = recommend(texts, tmp_path / "h.parquet", k=4, timestamp_column="")
    assert by_user(got) == by_user(recommender.recommend({"a": ["i2", "i1"], "b": ["i7"]}, k=4))


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".jsonl"])
def test_output_files_hold_the_table(texts, tmp_path, suffix):
    (tmp_path / "h.txt").write_text('a i1 i2\nb i7\n"q i3\n')
    output = tmp_path / "made" / f"out{suffix}"
    table = recommend(texts, tmp_path / "h.txt", output, k=3)
    assert table.num_rows == 9
    if suffix == ".jsonl":
        rows = [json.loads(line) for line in output.read_text().splitlines()]
    elif suffix == ".csv":
        rows = pa.csv.read_csv(output).to_pylist()
    else:
        rows = pa.parquet.read_table(output).to_pylist()
    for row, expected in zip(rows, table.to_pylist(), strict=True):
        assert (row["user_id"], row["item_id"], row["rank"]) == (expected["user_id"], expected["item_id"], expected["rank"])
        assert row["score"] == pytest.approx(expected["score"], rel=1e-6)
    assert [path.name for path in output.parent.iterdir()] == [output.name]


def test_ids_that_a_spreadsheet_would_run_are_told(tmp_path, caplog):
    table = pa.table({"user_id": ["=cmd", "a", "-1"], "item_id": [1, 2, 3], "score": [0.5, 0.25, 0.5], "rank": [1, 1, 1]})
    for name, told in (("out.csv", 1), ("out.parquet", 0)):
        caplog.clear()
        writer(tmp_path / name)(table)
        assert [record.getMessage() for record in caplog.records] == told * [
            f"{tmp_path / name}: 2 ids or names begin as formulas do (= + - @): spreadsheets run them; write .parquet or .jsonl"
        ]


def test_a_failed_write_leaves_what_was_there(texts, tmp_path, monkeypatch):
    output = tmp_path / "out.jsonl"
    output.write_text("before")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(ConfigError, match=r"out\.jsonl: could not be written: No space left on device"):
        recommend(texts, {"a": ["i1", "i2"]}, output, k=3)
    assert output.read_text() == "before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl"]


def test_mistakes_are_named(texts, recommender, tmp_path):
    (tmp_path / "h.txt").write_text("a i1 i2\n")
    with pytest.raises(ConfigError, match="k: got 41, expected 1 to 40, the size of the catalogue"):
        recommender.recommend({"a": ["i1"]}, k=41)
    with pytest.raises(ConfigError, match="k: got 0"):
        recommender.recommend({"a": ["i1"]}, k=0)
    with pytest.raises(ConfigError, match=r"out.xlsx.*expected a file name ending in .csv, .parquet, .jsonl"):
        recommend(texts, tmp_path / "h.txt", tmp_path / "out.xlsx")
    with pytest.raises(ConfigError, match="device: got 'tpu'"):
        recommend(texts, tmp_path / "h.txt", device="tpu")
    with pytest.raises(DataError, match="no file or folder"):
        recommend(texts, tmp_path / "none.txt")
    with pytest.raises(DataError, match="the history of 'a': found ids of several types"):
        recommender.recommend({"a": ["i1", 3]})
    with pytest.raises(DataError, match="users: found ids of type double"):
        recommender.recommend({1.5: ["i1"]})
    with pytest.raises(ConfigError, match="holds no events"):
        recommender.recommend(["a"])
    with pytest.raises(ConfigError, match=r"no model yet; call fit\(data\)"):
        Recommender().recommend({"a": ["i1"]})
    with pytest.raises(ConfigError, match=r"^embedding_dimm: unknown option; did you mean model\.embedding_dim\?$"):
        Recommender(embedding_dimm=3)
    with pytest.raises(CheckpointError, match="no such directory"):
        Recommender.from_pretrained(tmp_path / "nowhere")


def test_a_model_that_is_not_finite_recommends_nothing(tmp_path):
    model = write_run(tmp_path, [1, 2, 3])
    with torch.no_grad():
        model.norm.weight.fill_(torch.nan)
    save_pretrained(model, tmp_path, items=Vocabulary([1, 2, 3]))
    with pytest.raises(EvaluationError, match="NaN or infinite"):
        Recommender.from_pretrained(tmp_path).recommend({"a": [1]}, k=1)


def test_an_item_table_that_is_not_finite_recommends_nothing(tmp_path):
    """Items of NaN rank last, so that their scores alone would not show them."""
    model = write_run(tmp_path, [1, 2, 3])
    with torch.no_grad():
        model.item_weight[1] = torch.nan
    save_pretrained(model, tmp_path, items=Vocabulary([1, 2, 3]))
    with pytest.raises(EvaluationError, match="NaN or infinite"):
        Recommender.from_pretrained(tmp_path).recommend({"a": [3]}, k=1)


def test_no_users_give_an_empty_table(recommender):
    table = recommender.recommend({})
    assert table.num_rows == 0
    assert table.column_names == ["user_id", "item_id", "score", "rank"]


def test_what_takes_over_two_seconds_shows_progress(texts, tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr("tqdm.tqdm", lambda steps, **options: (shown.append(options), steps)[1])
    (tmp_path / "h.txt").write_text("u1 i1 i2\n")
    for progress in (True, False):
        recommend(texts, tmp_path / "h.txt", k=1, progress=progress)
    assert [(of["delay"], of["disable"]) for of in shown] == [(2, False), (2, True)]


def test_memory_bound_and_batches_change_nothing(texts, tmp_path, monkeypatch):
    lines = [" ".join([f"u{user}", *(f"i{(user * 3 + step) % NUM_ITEMS}" for step in range(user % 9 + 1))]) for user in range(50)]
    (tmp_path / "h.txt").write_text("\n".join(lines) + "\n")
    whole = recommend(texts, tmp_path / "h.txt", k=5)
    monkeypatch.setattr("jagged.runs.recommending._BATCH", 7)
    cut = recommend(texts, tmp_path / "h.txt", k=5, max_bytes=2**16)
    assert cut.drop_columns("score").equals(whole.drop_columns("score"))
    assert cut.column("score").to_pylist() == pytest.approx(whole.column("score").to_pylist(), rel=1e-5)


def test_fit_save_open_recommend(tmp_path):
    """A model learns that the next item is the next number, and is the same after it was saved and opened, to the last bit."""
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(20, (150,), generator=generator).tolist()
    lines = [" ".join([f"u{user}", *(str((start + step) % 20) for step in range(7))]) for user, start in enumerate(starts)]
    (tmp_path / "events.txt").write_text("\n".join(lines) + "\n")
    fitted = Recommender(
        output=tmp_path / "run",
        model={"embedding_dim": 16, "num_layers": 1, "dropout": 0.0},
        training={"max_epochs": 12, "learning_rate": 0.01, "batch_size": 32, "tensorboard": False},
        device="cpu",
    )
    assert fitted.fit(tmp_path / "events.txt") is fitted
    histories = {"new": [3, 4, 5], "other": [17, 18, 19, 0]}
    table = fitted.recommend(histories, k=3)
    assert [rows[0][0] for rows in by_user(table).values()] == [6, 1]

    evaluation = fitted.evaluate(filter_viewed=True)
    assert evaluation.metrics.unseen_items["recall@5"] > 0.9
    assert evaluation.same_data

    fitted.save_pretrained(tmp_path / "copy")
    again = Recommender.from_pretrained(tmp_path / "copy", device="cpu")
    assert again.config == Recommender.from_pretrained(tmp_path / "run").config
    assert again.recommend(histories, k=3).equals(table)
    assert again.recommend(tmp_path / "events.txt", k=3).equals(fitted.recommend(tmp_path / "events.txt", k=3))
    assert again.evaluate(tmp_path / "events.txt", filter_viewed=True) == evaluation

    dataset = read_events(tmp_path / "events.txt")
    known = fitted.recommend(["u9", "u2"], k=4)
    of_all = by_user(fitted.recommend(dataset, k=4))
    assert list(by_user(known)) == ["u9", "u2"]
    for user, rows in by_user(known).items():
        assert [row[0] for row in rows] == [row[0] for row in of_all[user]]
    # Somebody of whom the data knows nothing is told what is popular, and the others what they were told.
    with_stranger = by_user(fitted.recommend(["u9", "nobody"], k=4))
    assert with_stranger["u9"] == by_user(known)["u9"]
    assert with_stranger["nobody"] == by_user(fitted.recommend({"nobody": []}, k=4))["nobody"]
    counts = TrainCounts.load(tmp_path / "copy")
    assert torch.equal(counts.users_per_item, TrainCounts.from_part(split_leave_one_out(dataset).train).users_per_item)


@pytest.mark.parametrize("page", ["evaluation", "recommending"])
def test_the_examples_of_the_guide_run(page, tmp_path, monkeypatch):
    guide = Path(__file__).parents[1] / "docs" / "guides" / f"{page}.md"
    blocks = re.findall(r"^```python\n(.*?)^```", guide.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 4
    goods = ["shirt", "tie", "hat", "sock", "shoe", "belt", "coat", "scarf", *(f"thing{n}" for n in range(20))]
    rows = [f"u{user},{goods[(user + step) % len(goods)]},{step}" for user in range(40) for step in range(user % 5 + 3)]
    monkeypatch.chdir(tmp_path)
    Path("events.csv").write_text("user_id,item_id,timestamp\n" + "\n".join(rows) + "\n")
    namespace = {}
    for block in blocks:
        exec(compile(block, str(guide), "exec"), namespace)
    assert Path("runs/shop/model.safetensors").exists()
