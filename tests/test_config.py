"""The configuration: sources and their order, strict types, and messages that name the field and the cure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from jagged.config import (
    SECTIONS,
    ConfigError,
    CrossEntropyHead,
    DataOptions,
    ModelOptions,
    RankingConfig,
    SampledHead,
    SASRecOptions,
    TrainConfig,
    TrainerConfig,
    choices,
    leaves,
    merge,
    option,
    parse_assignments,
    parse_text,
    register_model,
)
from jagged.config.options import LoopOptions

_MONITOR = "training.monitor: got {}, expected ndcg, recall, mrr, coverage or surprisal with a cut-off, for example ndcg@10"
_WHOLE = "expected a whole number, at least 1"


def load_text(tmp_path: Path, text: str, name: str = "run.toml", **overrides: object) -> TrainConfig:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return TrainConfig.load(path, overrides)


def refusal(**values: Any) -> str:
    with pytest.raises(ConfigError) as error:
        TrainConfig(**values)
    return str(error.value)


def test_defaults_are_valid_and_saved_configurations_load_again(tmp_path: Path) -> None:
    config = TrainConfig(
        data="events.csv",
        model={"num_heads": 4},
        head={"type": "sampled", "sampler": "in-batch", "loss": "refined"},
        split="global-time",
        training={"gradient_clip_norm": None, "max_tokens": 4096},
    )
    config.save(tmp_path / "config.json")
    assert TrainConfig.load(tmp_path / "config.json") == config
    assert TrainConfig.load() == TrainConfig()


def test_sections_are_words_dictionaries_dotted_names_or_objects() -> None:
    expected = TrainConfig(data=DataOptions(path="a.csv"), head=SampledHead(num_negatives=64))
    assert expected.head == SampledHead(type="sampled", num_negatives=64)
    assert TrainConfig(data="a.csv", head={"type": "sampled", "num_negatives": 64}) == expected
    assert TrainConfig.load(None, {"data": "a.csv", "head": "sampled", "head.num_negatives": 64}) == expected
    assert TrainConfig(**{"data.path": "a.csv", "head.type": "sampled", "head.num_negatives": 64}) == expected
    # Without a tag the default's options are meant.
    assert TrainConfig(head={"label_smoothing": 0.1}).head == CrossEntropyHead(label_smoothing=0.1)


def test_overrides_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    config = load_text(tmp_path, "[model]\nembedding_dim = 32\nnum_layers = 3\n", model={"num_layers": 4})
    assert config.model == SASRecOptions(embedding_dim=32, num_layers=4, num_heads=2)


@pytest.mark.parametrize(
    ("earlier", "later", "expected"),
    [
        ({"head": {"label_smoothing": 0.1}}, {"head": "sampled"}, {"head": "sampled"}),
        (
            {"head": {"type": "sampled", "num_negatives": 3, "correction": "both"}},
            {"head.sampler": "in-batch"},
            {"head": {"type": "sampled", "sampler": "in-batch", "correction": "both"}},
        ),
        (
            {"head": {"type": "sampled", "num_negatives": 3, "correction": "both"}},
            {"head.loss": "gbce", "head.gbce_t": 0.5},
            {"head": {"type": "sampled", "num_negatives": 3, "loss": "gbce", "gbce_t": 0.5}},
        ),
        (
            {"training": {"batch_size": 8, "patience": 2}},
            {"training.max_tokens": 512},
            {"training": {"max_tokens": 512, "patience": 2}},
        ),
        ({"split": {"type": "global-time", "test_fraction": 0.2}}, {"split": "leave-one-out"}, {}),
        ({"head": "sampled", "head.num_negatives": 3}, {"head": "sampled"}, {"head": {"type": "sampled", "num_negatives": 3}}),
    ],
)
def test_what_a_later_tag_leaves_without_effect_goes(
    earlier: dict[str, Any], later: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert TrainConfig(**merge(earlier, later)) == TrainConfig(**expected)
    # All of a run's options are written down, and go in the same way.
    assert TrainConfig(**merge(TrainConfig(**earlier).model_dump(), later)) == TrainConfig(**expected)


def test_a_later_source_saves_no_misspelt_option() -> None:
    assert refusal(**merge({"head": {"num_negative": 3}}, {"head": "sampled"})) == (
        "head.num_negative: unknown option; did you mean head.num_negatives?"
    )


def test_every_option_has_a_description_and_a_default() -> None:
    for name, variants in leaves().items():
        for kind, field in variants:
            assert field.description, name
            assert not field.is_required(), (kind, name)
    assert list(TrainConfig().model_dump()) == ["output", "device", "precision", "seed", *SECTIONS]


def test_choices_are_those_of_the_field() -> None:
    assert choices(TrainConfig.model_fields["device"]) == ("auto", "cpu", "cuda")
    assert choices(SASRecOptions.model_fields["embedding_dim"]) == ()
    assert choices(SASRecOptions.model_fields["num_time_buckets"]) == ()
    assert choices(SASRecOptions.model_fields["positions"]) == ("end", "start", "none")


def test_options_without_effect_are_not_written_down() -> None:
    head = TrainConfig(head={"type": "sampled", "sampler": "in-batch", "loss": "refined"}).model_dump()["head"]
    assert head == {"type": "sampled", "sampler": "in-batch", "loss": "refined"}
    training = TrainConfig(training={"max_tokens": 512}).model_dump()["training"]
    assert "batch_size" not in training
    assert TrainConfig().model_dump()["training"]["batch_size"] == 256


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("embeding_dim = 3", "embeding_dim: unknown option; did you mean model.embedding_dim?"),
        ("embedding-dim = 3", "embedding-dim: unknown option; did you mean model.embedding_dim?"),
        ("max_epochs = 3", "max_epochs: unknown option; did you mean training.max_epochs?"),
        ("[data]\nmax_epochs = 3", "data.max_epochs: unknown option; did you mean training.max_epochs?"),
        (
            "zzz = 3",
            "zzz: unknown option; known are output, device, precision, seed, data, split, model, head, training, evaluation",
        ),
        ("[model]\nnum_heads = true", f"model.num_heads: got True, {_WHOLE}"),
        ("[model]\nnum_heads = 2.0", f"model.num_heads: got 2.0, {_WHOLE}"),
        ("[model]\nnum_heads = '2'", f"model.num_heads: got '2', {_WHOLE}"),
        ("[model]\nnum_heads = 'none'", f"model.num_heads: got 'none', {_WHOLE}"),
        ("[data]\nmax_seq_len = 0", "data.max_seq_len: got 0, expected a whole number, at least 1 and at most 65536"),
        ("seed = -1", "seed: got -1, expected a whole number, at least 0 and below 2^63"),
        ("[training]\ntensorboard = 1", "training.tensorboard: got 1, expected true or false"),
        ("[model]\ndropout = 1.0", "model.dropout: got 1.0, expected a number, at least 0 and below 1"),
        ("[training]\nlearning_rate = inf", "training.learning_rate: got inf, expected a number, above 0"),
        ("[training]\nlearning_rate = nan", "training.learning_rate: got nan, expected a number, above 0"),
        (
            "[training]\ngradient_clip_norm = 0",
            "training.gradient_clip_norm: got 0, expected a number, above 0, or none",
        ),
        (
            "[training]\nvalidate_every = 'often'",
            "training.validate_every: got 'often', expected a number of epochs or steps, for example `2 epochs`",
        ),
        ("device = 'tpu'", "device: got 'tpu', expected auto, cpu or cuda"),
        *(
            (f"[training]\nmonitor = '{name}'", _MONITOR.format(repr(name)))
            for name in ("ndcg", "ndcg@0", "ndcg@05", "auc@10", "ndcg@1000000000", "ndcg@10 ", "NDCG@10")
        ),
        ("[model]\nnum_heads = 3", "model.num_heads: got 3, expected a divisor of embedding_dim (256)"),
        ("[training]\nmax_tokens = 49", "training.max_tokens: got 49, expected at least data.max_seq_len (50)"),
        (
            "[training]\nmax_tokens = 64\nbatch_size = 8",
            "training.batch_size: belongs to training.max_tokens none, got 64",
        ),
        ("[head]\nnum_negatives = 3", "head.num_negatives: belongs to head.type sampled, got cross-entropy"),
        ("[head]\ntype = 'sampled'\nnum_buckets = 3", "head.num_buckets: belongs to head.type scalable, got sampled"),
        (
            "[head]\ntype = 'sampled'\nsampler = 'in-batch'\nnum_negatives = 3",
            "head.num_negatives: belongs to head.sampler uniform, popularity or mixed, got in-batch",
        ),
        (
            "[head]\ntype = 'sampled'\nsampler = 'mixed'\nnegatives_per = 'row'",
            "head.negatives_per: belongs to head.sampler uniform or popularity, got mixed",
        ),
        ("[head]\ntype = 'sampled'\ngbce_t = 0.5", "head.gbce_t: belongs to head.loss gbce, got softmax"),
        (
            "[head]\ntype = 'sampled'\nloss = 'bce'\ncorrection = 'none'",
            "head.correction: belongs to head.loss softmax, got bce",
        ),
        (
            "[head]\ntype = 'sampled'\nloss = 'gbce'\nsampler = 'mixed'",
            "head.sampler: got mixed, expected uniform with loss gbce, which has no correction, so that popular items would rank "
            "last",
        ),
        ("head = 'softmax'", "head.type: got 'softmax', expected cross-entropy, sampled, scalable or group-sparse"),
        ("head = 3", "head.type: got 3, expected cross-entropy, sampled, scalable or group-sparse"),
        ("[head]\ntype = ['sampled']", "head.type: got ['sampled'], expected cross-entropy, sampled, scalable or group-sparse"),
        (
            "[model]\nname = 'bert'",
            "model.name: got 'bert', expected bert4rec, dcnv2, din, dlrm, dlrm-hstu, hstu, mmoe, multilabel, ranking, sasrec or "
            "wukong",
        ),
        ("split = 'random'", "split.type: got 'random', expected leave-one-out or global-time"),
        (
            "[split]\ntype = 'global-time'\nvalid_fraction = 0.6\ntest_fraction = 0.5",
            "split.valid_fraction: got 0.6, expected with test_fraction (0.5) less than 1, or nothing is left to train on",
        ),
        ("[split]\nvalid_fraction = 0.5", "split.valid_fraction: belongs to split.type global-time, got leave-one-out"),
        ("data = ['a', 'b']", "data.path: got ['a', 'b'], expected a text, or none"),
        ("training = 3", "training: got 3, expected a table of options"),
        ("[device]\nname = 'cpu'", "device: got {'name': 'cpu'}, expected auto, cpu or cuda"),
    ],
)
def test_a_wrong_value_is_one_line_with_file_option_and_expectation(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_text(tmp_path, text)
    assert str(error.value) == f"{tmp_path / 'run.toml'}: {expected}"
    with pytest.raises(ConfigError) as error:
        TrainConfig(**tomllib.loads(text))
    assert str(error.value) == expected


@pytest.mark.parametrize("text", ["seed = ", "seed = 1\nseed = 2", f"seed = {'9' * 6000}"])
def test_what_is_no_toml_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{tmp_path / 'run.toml'}: cannot be read as TOML: [^\n]*$"):
        load_text(tmp_path, text)


def test_every_wrong_option_gets_its_line_and_names_where_it_was_given(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load_text(tmp_path, "sede = 1\n[model]\nnum_heads = 0\ndropout = 2\n", model={"num_layers": 0}, device="tpu")
    path = tmp_path / "run.toml"
    assert str(error.value).splitlines() == [
        "device: got 'tpu', expected auto, cpu or cuda",
        f"{path}: sede: unknown option; did you mean seed?",
        f"{path}: model.num_heads: got 0, {_WHOLE}",
        f"model.num_layers: got 0, {_WHOLE}",
        f"{path}: model.dropout: got 2, expected a number, at least 0 and below 1",
    ]


def test_sections_that_are_wrong_are_not_compared() -> None:
    assert refusal(data={"format": "xml", "max_seq_len": 20}, training={"max_tokens": 30}) == (
        "data.format: got 'xml', expected auto, text, csv or parquet"
    )


def test_options_that_belong_to_a_wrong_value_are_not_told() -> None:
    """Nobody knows whether they had an effect."""
    wrong = (
        "table_optimizer: got 'adam', expected adamw, adagrad, rowwise-adagrad, sgd, sparse-adamw, rowwise-adamw, lamb or "
        "rowwise-lamb"
    )
    given: dict[str, Any] = {"table_optimizer": "adam", "table_beta2": 0.9}
    assert refusal(training=given) == f"training.{wrong}"
    with pytest.raises(ConfigError) as error:
        TrainerConfig(**given)
    assert str(error.value) == wrong


class _Wide(ModelOptions):
    name: Literal["wide"] = option("wide", "the model to train")
    width: int = option(8, "width of the table", ge=1)


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SECTIONS, "model", [*SECTIONS["model"]])
    register_model("wide", _Wide)


@pytest.mark.usefixtures("wide")
def test_a_model_brings_options_of_its_own(tmp_path: Path) -> None:
    config = TrainConfig(model={"name": "wide", "width": 3})
    assert config.model == _Wide(width=3)
    assert config.model_dump()["model"] == {"name": "wide", "width": 3}
    config.save(tmp_path / "config.json")
    assert TrainConfig.load(tmp_path / "config.json") == config
    assert "model.width" in leaves()
    assert parse_assignments(["model=wide", "model.width=5"]) == {"model.name": "wide", "model.width": 5}
    assert refusal(model={"width": 3}) == "model.width: belongs to model.name wide, got sasrec"
    assert refusal(model={"name": "wide", "width": 0}) == f"model.width: got 0, {_WHOLE}"
    known = "bert4rec, dcnv2, din, dlrm, dlrm-hstu, hstu, mmoe, multilabel, ranking, sasrec, wide or wukong"
    assert refusal(model="wider") == f"model.name: got 'wider', expected {known}"
    expected = "head.type: got group-sparse, expected another head for wide, or model.name sasrec or hstu"
    assert refusal(model="wide", head="group-sparse") == expected
    # Options that an earlier source had for another model go.
    assert TrainConfig(**merge({"model": {"num_heads": 4}}, {"model": "wide"})).model == _Wide()


@pytest.mark.usefixtures("wide")
def test_options_are_registered_once_and_by_their_name() -> None:
    class Other(ModelOptions):
        name: Literal["wide"] = "wide"

    register_model("wide", _Wide)
    with pytest.raises(ValueError, match=r"^name: got 'wide', which has the options _Wide already; take another name$"):
        register_model("wide", Other)
    with pytest.raises(ValueError, match=r"^options: got Other, expected a ModelOptions with name: Literal\['x'\] = 'x'$"):
        register_model("x", Other)


def test_the_trainer_gets_its_part() -> None:
    config = TrainConfig(output="a", seed=3, device="cpu", training={"patience": 2, "learning_rate": 0.5, "max_tokens": 99})
    assert config.trainer == TrainerConfig(output="a", seed=3, device="cpu", patience=2, learning_rate=0.5, monitor="ndcg@10")


@pytest.mark.parametrize("kind", choices(LoopOptions.model_fields["table_optimizer"]))
def test_the_trainer_gets_nothing_without_effect(kind: str) -> None:
    """Decay of tables belongs to some of their optimizers, and its default is refused beside others, as any value is."""
    assert TrainConfig(training={"table_optimizer": kind}).trainer.table_optimizer == kind


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("run.toml", b"a = " + b"[" * 10_000),
        ("run.toml", b"a = " + b"[" * 2_000 + b"]" * 2_000),
        ("run.toml", b"a = " + b"{b = " * 3_000 + b"1" + b"}" * 3_000),
        ("run.toml", b".".join([b"a"] * 8_000) + b" = 1"),
        ("run.toml", b"data = '" + b"x" * 10_000_000 + b"'"),
        ("run.toml", b"data = '\xff\xfe'"),
        ("run.toml", b"\x00" * 100),
        ("run.json", b"[" * 130_000),
        ("run.json", b'{"a\\nb": 1}'),
        ("run.json", b"[1, 2]"),
        ("run.json", b'{"seed": NaN}'),
        ("run.json", b'{"seed": 1'),
    ],
    ids=lambda value: value[:12].decode("latin-1") if isinstance(value, bytes) else value,
)
def test_hostile_files_are_refused_quickly(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    began = time.process_time()
    with pytest.raises(ConfigError) as error:
        TrainConfig.load(tmp_path / name)
    assert time.process_time() - began < 5
    assert len(str(error.value)) < 2_000


def test_a_file_that_is_no_configuration_is_refused_unread(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.toml"
    os.mkfifo(pipe)
    # Who reads it all the same gets something and does not wait.
    held = os.open(pipe, os.O_RDWR)
    os.write(held, b"#" * 20_000)
    (tmp_path / "long.toml").write_bytes(b" " * 16_385)
    (tmp_path / "long.json").write_bytes(b" " * 131_073)
    for path, problem in {
        "missing.toml": "cannot be read: No such file or directory",
        ".": "found a directory, expected a regular file",
        "/dev/zero": "found a pipe or a device, expected a regular file",
        f"{pipe}": "found a pipe or a device, expected a regular file",
        f"{tmp_path}/long.toml": "found 16385 bytes, expected at most 16384",
        f"{tmp_path}/long.json": "found 131073 bytes, expected at most 131072",
    }.items():
        with pytest.raises(ConfigError) as error:
            TrainConfig.load(path)
        assert str(error.value) == f"{path}: {problem}"
    os.close(held)


def test_a_configuration_of_thousands_of_columns_is_read_again(tmp_path: Path) -> None:
    config = RankingConfig(data={"path": "wide.parquet", "label": "y", "numbers": [f"number_{i}" for i in range(3_000)]})
    config.save(tmp_path / "config.json")
    assert RankingConfig.load(tmp_path / "config.json") == config


def test_a_wrong_option_has_one_line_whatever_its_name(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"training.a\nb": 1, "seed": -1}))
    with pytest.raises(ConfigError) as error:
        TrainConfig.load(tmp_path / "run.json")
    assert [line.partition(": ")[0] for line in str(error.value).splitlines()] == [f"{tmp_path}/run.json"] * 2


def test_values_stay_data(tmp_path: Path) -> None:
    text = 'output = "../runs/$(touch pwned)"\ndata = \'__import__("os").system("touch pwned")\'\n'
    config = load_text(tmp_path, text)
    assert config.output == "../runs/$(touch pwned)"
    assert config.data.path == '__import__("os").system("touch pwned")'
    assert not Path("pwned").exists()


def test_paths_are_accepted_where_texts_are() -> None:
    assert TrainConfig(data=Path("events.csv")) == TrainConfig(data="events.csv")
    assert TrainConfig(output=Path("a")).output == "a"


def test_none_is_spelt_out_where_an_option_can_be_unset(tmp_path: Path) -> None:
    assert load_text(tmp_path, '[training]\ngradient_clip_norm = "none"').training.gradient_clip_norm is None


def test_a_configuration_is_frozen() -> None:
    with pytest.raises(ValidationError):
        TrainConfig().seed = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("seed", "3", 3),
        ("seed", "007", 7),
        ("seed", "1_000", 1000),
        ("seed", "3.5", 3.5),
        ("seed", "many", "many"),
        ("seed", "1\nnum_heads = 4", "1\nnum_heads = 4"),
        ("training.learning_rate", "5e-4", 5e-4),
        ("training.learning_rate", ".5", 0.5),
        ("training.learning_rate", "1.", 1.0),
        ("training.tensorboard", "false", False),
        ("data.path", "2024", "2024"),
        ("data.path", "true", "true"),
        ("data.path", '"a b"', "a b"),
        ("data.path", "'a b'", "a b"),
        ("data.path", "a b.csv", "a b.csv"),
        ("data.path", "a=b", "a=b"),
        ("data.path", "", ""),
        ("precision", "32-true", "32-true"),
        ("training.monitor", "recall@20", "recall@20"),
    ],
)
def test_texts_become_values_by_the_field(name: str, text: str, expected: object) -> None:
    value = parse_text(name, text)
    assert value == expected
    assert type(value) is type(expected)


@settings(deadline=None)
@given(st.sampled_from(sorted(leaves())), st.text(max_size=40))
@example("data.item_columns", "a\rb")
@example("data.items_column", "a\u2028b")
def test_any_text_is_a_value_or_a_named_refusal(name: str, text: str) -> None:
    try:
        TrainConfig.load(None, {name: parse_text(name, text)})
    except ConfigError as error:
        assert name in str(error)  # noqa: PT017, most texts are values
        assert len(str(error).splitlines()) == 1  # noqa: PT017


def test_later_assignments_win() -> None:
    assert parse_assignments(["seed=1", "data = a=b ", "seed=2"]) == {"seed": 2, "data.path": "a=b"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seed", "found no '=', expected key=value, for example --set model.embedding_dim=128"),
        ("sede=1", "unknown option; did you mean seed?"),
        ("head.num-negatives=1", "unknown option; did you mean head.num_negatives?"),
        ("num_negatives=1", "unknown option; did you mean head.num_negatives?"),
        ("=1", "unknown option; known are output, device, precision, seed, data, split, model, head, training, evaluation"),
    ],
)
def test_malformed_assignments_are_refused(text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_assignments([text])
    assert str(error.value) == f"--set {text}: {expected}"


def test_no_torch_is_loaded() -> None:
    code = "import sys, jagged.config; print(sorted({'torch', 'numpy', 'torchrec'} & set(sys.modules)))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"


def test_what_is_saved_is_json(tmp_path: Path) -> None:
    TrainConfig().save(tmp_path / "config.json")
    assert json.loads((tmp_path / "config.json").read_text()) == TrainConfig().model_dump()
