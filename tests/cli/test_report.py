"""The page of a run: what it says, that it stands alone, and that no text of a user becomes markup."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pytest

from jagged import charts, evaluate
from jagged.artifacts import CheckpointError, dump_json_lines, unlist
from jagged.config import ConfigError, DataOptions, EvaluationOptions, TrainConfig, flat
from jagged.data import Vocabulary, leaks, split_leave_one_out, synthetic_sessions
from jagged.evaluation import popularity_metrics
from jagged.metrics import IN_WORDS
from jagged.runs import reporting
from jagged.runs.page import TEMPLATES as ENVIRONMENT
from jagged.runs.page import read_history
from jagged.runs.page import unit as page_unit
from jagged.runs.reporting import LEAKS, RunFacts, gather, render, report, write_pictures

TEMPLATES = Path(reporting.__file__).parent / "templates"
VOID = {"meta", "br", "hr", "img", "input", "link"}


class Document(HTMLParser):
    """Elements, ids and text of a page; fails where tags do not match."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            self.text += f"{data} "

    @property
    def words(self) -> str:
        return " ".join(self.text.split())


@pytest.fixture(scope="module")
def facts(run_directory: Path) -> RunFacts:
    return gather(run_directory, progress=False)


def test_the_page_says_what_evaluation_says(facts: RunFacts, run_directory: Path) -> None:
    words = Document(render(facts)).words
    measured = evaluate(run_directory).metrics
    baseline = popularity_metrics(split_leave_one_out(_dataset(run_directory)))
    for protocol, figures in measured.items():
        assert IN_WORDS[protocol] in words
        assert protocol not in words
        for name, value in figures.items():
            assert f"{value:.4f}" in words, name
            assert f"{baseline[protocol][name]:.4f}" in words, name
    assert "split leave-one-out, test part, 200 users" in words
    assert "every one of the 96 items ranked" in words
    assert "Nothing leaks" in words
    for dotted, value in flat(facts.config.model_dump()).items():
        name = dotted.rpartition(".")[2]
        assert f"{name} {'none' if value in (None, []) else str(value).lower() if isinstance(value, bool) else value}" in words


def _dataset(directory: Path) -> Any:
    from jagged.data import SequenceDataset

    return SequenceDataset.load(directory / "dataset")


def test_ranks_agree_with_the_metrics(facts: RunFacts) -> None:
    for name, ranks in facts.ranks.items():
        assert ranks.min() >= 1
        assert ranks.max() <= facts.num_items
        for k in (5, 10, 20):
            assert np.mean(ranks <= k) == pytest.approx(facts.metrics["all_items"][name][f"recall@{k}"])


def test_ranks_follow_the_runs_choice_about_seen_items(run_directory: Path, tmp_path: Path) -> None:
    from jagged.models.pretrained import from_pretrained, save_pretrained

    opened = from_pretrained(run_directory)
    assert opened.config is not None
    config = opened.config.model_copy(update={"evaluation": EvaluationOptions(filter_viewed=True)})
    save_pretrained(opened.model, tmp_path / "run", items=opened.items, config=config, split=opened.split)
    shutil.copytree(run_directory / "dataset", tmp_path / "run" / "dataset")
    facts = gather(tmp_path / "run", progress=False)
    for name, ranks in facts.ranks.items():
        assert np.mean(ranks <= 10) == pytest.approx(facts.metrics["unseen_items"][name]["recall@10"])
    words = Document(render(facts)).words
    assert "Where the held-out item stood, seen items taken out" in words
    # The copy has no history: a page without curves.
    assert "Training loss" not in words


def test_the_page_stands_alone(facts: RunFacts) -> None:
    text = render(facts)
    document = Document(text)
    assert "http" not in text.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")
    tags = [tag for tag, _ in document.elements]
    assert not {"script", "link", "img", "iframe", "object", "image"} & set(tags)
    assert tags.count("svg") == 4
    for tag, attributes in document.elements:
        assert not any(name.startswith("on") for name in attributes), (tag, attributes)
        for name in ("href", "src"):
            assert (attributes.get(name) or "#").startswith("#"), (tag, attributes)
    ids = [attributes["id"] for _, attributes in document.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    references = {attributes["href"] for tag, attributes in document.elements if tag == "use"}
    assert references <= {f"#{name}" for name in ids}
    assert len(text) < 500_000


def test_pictures_take_the_pages_colours(facts: RunFacts) -> None:
    text = render(facts)
    svgs = text[text.index("<svg") :]
    assert "var(--ink)" in svgs
    assert "var(--first)" in svgs
    assert not any(color in svgs for color in dataclasses.astuple(charts.PAGE) if color.startswith("#"))
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text


def test_no_text_becomes_markup(facts: RunFacts) -> None:
    hostile = "<script>alert('1')</script>\"&amp;]]>"
    planted = dataclasses.replace(
        facts,
        directory=Path("x") / hostile.replace("/", "|"),
        config=facts.config.model_copy(
            update={"data": DataOptions(path=hostile, user_column=hostile, item_column=hostile), "output": hostile}
        ),
        split=hostile,
        part=hostile,
        data_notes={hostile: 1},
        split_notes={hostile: hostile},
        metrics={name: {hostile: figures["model"], **figures} for name, figures in facts.metrics.items()},
        ranks={hostile: facts.ranks["model"], **facts.ranks},
        leaks={hostile: 1},
        versions={hostile: hostile},
    )
    text = render(planted)
    document = Document(text)
    assert "script" not in {tag for tag, _ in document.elements}
    assert document.text.count("<script>alert") >= 10
    assert "<script" not in text


@pytest.mark.parametrize("name", sorted(LEAKS))
def test_a_leak_is_told_in_words(name: str, facts: RunFacts) -> None:
    words = Document(render(dataclasses.replace(facts, leaks={**facts.leaks, name: 1234}))).words
    assert "Nothing leaks" not in words
    assert f"not to be trusted: 1,234 {LEAKS[name]}" in words
    assert "1,234 leaks found" in words


def test_every_check_of_the_data_has_its_words() -> None:
    dataset, _ = synthetic_sessions(0, num_users=10, num_items=96)
    assert set(leaks(split_leave_one_out(dataset))) == set(LEAKS)


def test_a_leak_in_the_split_reaches_the_page(run_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from jagged.runs import Run

    honest = Run.split

    def leaking(self: Run, dataset: Any) -> Any:
        split = honest(self, dataset)
        return dataclasses.replace(split, train=dataclasses.replace(split.train, end=split.train.end + 2))

    monkeypatch.setattr(Run, "split", leaking)
    facts = gather(run_directory, progress=False)
    assert facts.leaks["targets_in_training"] == 400
    assert "not to be trusted: 400 validation and test targets among the training events" in Document(render(facts)).words


def test_items_without_training_are_counted_and_their_ranks_are_behind_all(
    run_directory: Path, tmp_path: Path, facts: RunFacts
) -> None:
    from jagged.models import SASRec
    from jagged.models.pretrained import from_pretrained, save_pretrained

    # The same events with a model of half of the items, which is none that training gave: the other half are unknown to it.
    opened = from_pretrained(run_directory)
    half = Vocabulary(opened.items.ids[::2])
    model = SASRec(**{**opened.model.config, "num_items": len(half)})
    save_pretrained(model, tmp_path / "run", items=half, config=opened.config, split=opened.split)
    shutil.copytree(run_directory / "dataset", tmp_path / "run" / "dataset")
    got = gather(tmp_path / "run", progress=False)
    assert (got.num_items, got.num_ranked) == (facts.num_items, len(half))
    assert not any(got.leaks.values())
    missed = int(got.split_notes["unknown_targets"])
    assert 0 < missed < 200
    for name, ranks in got.ranks.items():
        assert (ranks == len(half) + 1).sum() == missed == (ranks > len(half)).sum()
        assert np.mean(ranks <= 10) == pytest.approx(got.metrics["all_items"][name]["recall@10"])
    words = Document(render(got)).words
    assert f"every one of the {len(half)} items ranked" in words
    assert f" {missed} held-out items, which the model does not have, stand behind all." in words
    assert "which the model does not have" not in Document(render(facts)).words


def test_the_same_run_gives_the_same_page(run_directory: Path, tmp_path: Path) -> None:
    first = report(run_directory, tmp_path / "a.html", progress=False)
    second = report(run_directory, tmp_path / "b.html", progress=False)
    assert first.read_bytes() == second.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "b.html"]


def test_by_default_the_page_lies_in_the_run(run_directory: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run_directory, tmp_path / "run")
    assert report(copy, progress=False) == copy / "report.html"
    # A page more does not make the run another one.
    assert report(copy, progress=False) == copy / "report.html"


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("missing/page.html", "could not be written: No such file or directory; choose another --output"),
        (".", "is a directory, expected the name of a page to write, for example {}/report.html"),
        ("pipe", "could not be written: it is a pipe or a device; choose another --output"),
    ],
)
def test_a_page_that_cannot_be_written_is_a_named_error(output: str, expected: str, run_directory: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError) as error:
        report(run_directory, tmp_path / output, progress=False)
    assert str(error.value) == f"{tmp_path / output}: {expected.format(tmp_path)}"
    assert os.listdir(tmp_path) == ["pipe"]
    assert (tmp_path / "pipe").is_fifo()


def test_a_broken_history_is_named(run_directory: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run_directory, tmp_path / "run")
    content = (copy / "history.jsonl").read_bytes()
    (copy / "history.jsonl").write_bytes(content[:-1])
    with pytest.raises(
        CheckpointError, match=rf"history\.jsonl: damaged: found {len(content) - 1} bytes, expected {len(content)}"
    ):
        gather(copy, progress=False)
    # Not listed as long as its run goes on.
    unlist(copy, "history.jsonl")
    for broken in ('{"epoch": 1', "[1, 2]", "1", '{"epoch": 1}', '{"epoch": 1, "loss": "x", "ndcg@10": 0}', "[" * 100_000):
        (copy / "history.jsonl").write_text(broken)
        with pytest.raises(ConfigError, match=r"history\.jsonl: cannot be read"):
            gather(copy, progress=False)


def test_times_are_shown_as_times(facts: RunFacts) -> None:
    from jagged.runs.reporting import _readable

    notes = {"valid_time": 1_577_836_800_000_000, "users_without_targets": 3}
    assert _readable(notes, "zoned") == {"valid_time": "2020-01-01T00:00:00.000000", "users_without_targets": 3}
    assert _readable(notes, "number") == notes
    assert "2020-01-01T00:00:00" in Document(render(dataclasses.replace(facts, split_notes=_readable(notes, "naive")))).words


@pytest.mark.parametrize(
    ("every", "goal", "kept"), [("400 steps", "auto", 800), ("2 epochs", "auto", 4), ("400 steps", "min", 1_600)]
)
def test_curves_run_over_what_validations_are_counted_in(
    facts: RunFacts, every: str, goal: str, kept: int, tmp_path: Path
) -> None:
    values = facts.config.model_dump()
    values["training"] |= {"validate_every": every, "monitor_goal": goal}
    rows = [(2, 400, 0.3), (4, 800, 0.5), (4, 1200, 0.4), (4, 1600, 0.1)]
    unit, places = ("epoch", [2, 4, 4, 4]) if "epoch" in every else ("step", [400, 800, 1200, 1600])
    history = tmp_path / "history.jsonl"
    history.write_bytes(dump_json_lines({"epoch": e, "step": s, "loss": m, "monitored": m} for e, s, m in rows))
    of = dataclasses.replace(facts, config=TrainConfig(**values))
    of = dataclasses.replace(of, history=read_history(history, (page_unit(of.config), "loss", "monitored")))
    loss, metric = (reporting._pictures(of, charts.LIGHT)[name] for name in ("loss", "metric"))
    for figure, _ in (loss, metric):
        (axes,) = figure.axes
        assert axes.get_xlabel() == unit
        assert list(axes.lines[0].get_xdata()) == places
        assert list(axes.lines[0].get_ydata()) == [row[2] for row in rows]
    assert [text.get_text() for text in metric[0].axes[0].texts] == [f"kept: {kept:,}"]
    assert loss[1] == "Training loss, mean since the validation before."
    assert metric[1] == f"Validation ndcg@10, seen items left in; the weights of the best {unit} were kept."


@pytest.mark.parametrize("last", [1, 12, 300, 7_000, 99_999, 100_000, 3_500_000, 80_000_000])
def test_numbers_below_a_curve_are_whole_and_apart(last: int) -> None:
    figure = charts.curve([(last * (i + 1) / 10, 0.5) for i in range(10)], "step", "loss", charts.LIGHT)
    figure.draw_without_rendering()
    axes = figure.axes[0]
    low, high = axes.get_xlim()
    shown = [label for label in axes.get_xticklabels() if low <= label.get_position()[0] <= high]
    assert all(f"{label.get_position()[0]:,.0f}" == label.get_text() for label in shown)
    boxes = [label.get_window_extent() for label in shown]
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))


def test_pictures_are_files_and_the_same_each_time(facts: RunFacts, tmp_path: Path) -> None:
    paths = write_pictures(facts, tmp_path)
    assert [path.name for path in paths] == ["loss.png", "metric.png", "ranks.png", "lengths.png"]
    before = [path.read_bytes() for path in paths]
    assert all(content.startswith(b"\x89PNG") and len(content) > 5_000 for content in before)
    assert [path.read_bytes() for path in write_pictures(facts, tmp_path)] == before


@pytest.mark.parametrize("longest", [1, 2, 50, 100, 101, 70_000])
def test_histograms_count_every_user(longest: int) -> None:
    lengths = np.unique(np.geomspace(1, longest, 40).astype(np.int64))
    for figure in (
        charts.length_histogram(lengths, 50, charts.LIGHT),
        charts.rank_histogram({"model": lengths}, longest, charts.LIGHT),
    ):
        (drawn,) = [artist for artist in figure.axes[0].patches if hasattr(artist, "get_data")]
        total = drawn.get_data().values.sum()
        assert total == pytest.approx(len(lengths) if figure.axes[0].get_ylabel() == "users" else 1)


def test_tables_are_escaped_and_aligned() -> None:
    table: Any = ENVIRONMENT.get_template("table.html").module
    text = table.table([["x & y", "1"]], ["<a>", "b"])
    assert '<tr><th>&lt;a&gt;</th><th class="number">b</th></tr>' in text
    assert '<tr><td>x &amp; y</td><td class="number">1</td></tr>' in text
    assert "<tr><td>x &amp; y</td><td>1</td></tr>" in table.table([["x & y", "1"]], texts=True)


def test_templates_escape_every_text_and_refuse_a_misspelt_name(facts: RunFacts) -> None:
    name = "</title><script>alert(\"a\" & 'b')</script>"
    text = render(dataclasses.replace(facts, directory=Path(name), versions={name: name}))
    escaped = "&lt;/title&gt;&lt;script&gt;alert(&#34;a&#34; &amp; &#39;b&#39;)&lt;/script&gt;"
    lines = text.splitlines()
    assert f"<title>jagged: {escaped}</title>" in lines
    assert f"<h1>{escaped}</h1>" in lines
    assert f"<tr><td>{escaped}</td><td>{escaped}</td></tr>" in lines
    # In the configuration, by the run's data.
    assert "<tr><td>path</td><td>sample &lt;b&gt;&amp;&#39;&#34;.csv</td></tr>" in lines
    assert name not in text
    # The one place that is not escaped holds pictures.
    safe = [path.name for path in TEMPLATES.iterdir() for _ in range(path.read_text().count("| safe"))]
    assert safe == ["table.html"]
    with pytest.raises(jinja2.UndefinedError, match="'fcats' is undefined"):
        ENVIRONMENT.from_string("{{ fcats }}").render(facts=facts)


def test_configuration_is_shown_by_sections(facts: RunFacts) -> None:
    assert json.loads(json.dumps(facts.config.model_dump())) == facts.config.model_dump()
    assert isinstance(facts.config, TrainConfig)
    text = render(facts)
    titles = ["Run", "Data", "Split", "Model", "Head", "Training", "Evaluation"]
    assert [title for title in titles if f"<h3>{title}</h3>" in text] == titles
    assert "<td>label_smoothing</td>" in text
    # What has no effect is not shown.
    assert "<td>num_negatives</td>" not in text
