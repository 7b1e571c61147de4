"""The configuration: sources and their order, strict types, and messages that name the field and the cure."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from jagged.config import ConfigError, TrainConfig, choices, parse_assignments, parse_text, sections

_MONITOR = "monitor: expected ndcg, recall, mrr, coverage or surprisal with a cut-off, for example ndcg@10"


def load_text(tmp_path: Path, text: str, name: str = "run.toml", **overrides: object) -> TrainConfig:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return TrainConfig.load(path, overrides)


def test_defaults_are_valid_and_saved_configurations_load_again(tmp_path: Path) -> None:
    config = TrainConfig(data="events.csv", num_heads=4, gradient_clip_norm=None, max_tokens=4096)
    config.save(tmp_path / "config.json")
    assert TrainConfig.load(tmp_path / "config.json") == config
    assert TrainConfig.load() == TrainConfig()


def test_overrides_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    config = load_text(tmp_path, "embedding_dim = 32\nnum_layers = 3\n", num_layers=4)
    assert (config.embedding_dim, config.num_layers, config.num_heads) == (32, 4, 2)


def test_every_field_has_a_description_and_one_section() -> None:
    assert all(field.description for field in TrainConfig.model_fields.values())
    assert sorted(name for names in sections().values() for name in names) == sorted(TrainConfig.model_fields)
    assert list(sections()) == ["Data", "Model", "Training", "Evaluation"]


def test_choices_are_those_of_the_field() -> None:
    assert choices("device") == ("auto", "cpu", "cuda")
    assert choices("embedding_dim") == ()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("embeding_dim = 3", "did you mean embedding_dim?"),
        ("embedding-dim = 3", "did you mean embedding_dim?"),
        ("zzz = 3", "known are data, output"),
        ("num_heads = true", "num_heads: Input should be a valid integer; got True"),
        ("num_heads = 2.0", "num_heads: Input should be a valid integer; got 2.0"),
        ("num_heads = '2'", "num_heads: Input should be a valid integer; got '2'"),
        ("tensorboard = 1", "tensorboard: Input should be a valid boolean; got 1"),
        ("dropout = 1.0", "dropout: Input should be less than 1; got 1.0"),
        ("learning_rate = inf", "learning_rate: Input should be a finite number; got inf"),
        ("learning_rate = nan", "learning_rate: Input should be"),
        ("device = 'tpu'", "device: Input should be 'auto', 'cpu' or 'cuda'; got 'tpu'"),
        *(
            (f"monitor = '{name}'", f"{_MONITOR}; got '{name}'")
            for name in ("ndcg", "ndcg@0", "ndcg@05", "auc@10", "ndcg@1000000000", "ndcg@10 ", "NDCG@10")
        ),
        ("num_heads = 3", "embedding_dim (256) must be a multiple of num_heads (3)"),
        ("max_tokens = 49", "max_tokens (49) must be at least max_seq_len (50)"),
        ("sampled_loss = 'refined'\ncorrection = 'none'", "correction (none) must be negatives"),
        ("sampled_loss = 'bce'\ncorrection = 'both'", "correction (both) must be none"),
        ("sampled_loss = 'gbce'\nsampler = 'in-batch'", "sampler (in-batch) must draw them all"),
        ("sampled_loss = 'gbce'\nsampler = 'mixed'", "sampler (mixed) must draw them all"),
        (
            "sampled_loss = 'bce'\nsampler = 'in-batch'",
            "sampled_loss bce has no correction, without which popular items rank last where sampler (in-batch) draws them more "
            "often: sampler must be uniform; correction none has it so",
        ),
        ("head = 'softmax'", "head: Input should be 'cross-entropy', 'sampled' or 'scalable'; got 'softmax'"),
        ("valid_fraction = 0.6\ntest_fraction = 0.5", "valid_fraction + test_fraction must stay below 1"),
        ("data = ['a', 'b']", "data: Input should be a valid string; got ['a', 'b']"),
        ("[model]\nname = 'sasrec'", "model: Input should be 'sasrec'; got {'name': 'sasrec'}"),
        ("seed = ", "cannot be read as TOML"),
        ("seed = 1\nseed = 2", "cannot be read as TOML"),
        (f"seed = {'9' * 6000}", "cannot be read as TOML"),
    ],
)
def test_a_wrong_value_is_one_line_with_file_field_and_expectation(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_text(tmp_path, text)
    message = str(error.value)
    assert expected in message
    assert message.startswith(str(tmp_path / "run.toml"))
    assert "\n" not in message


def test_every_wrong_field_gets_its_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load_text(tmp_path, "num_heads = 0\ndropout = 2\nsede = 1\n")
    assert [line.split(": ", 1)[1].split(":")[0] for line in str(error.value).splitlines()] == ["num_heads", "dropout", "'sede'"]


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
        ("run.json", b"[" * 16_000),
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


def test_an_endless_file_is_read_no_further_than_the_limit() -> None:
    with pytest.raises(ConfigError, match="expected a short configuration"):
        TrainConfig.load("/dev/zero")


@pytest.mark.parametrize("path", ["missing.toml", "."])
def test_a_file_that_cannot_be_read_is_named(path: str) -> None:
    with pytest.raises(ConfigError, match=rf"{path}: cannot be read: (No such file|Is a directory)"):
        TrainConfig.load(path)


def test_values_stay_data(tmp_path: Path) -> None:
    text = 'output = "../runs/$(touch pwned)"\ndata = \'__import__("os").system("touch pwned")\'\n'
    config = load_text(tmp_path, text)
    assert config.output == "../runs/$(touch pwned)"
    assert config.data == '__import__("os").system("touch pwned")'
    assert not Path("pwned").exists()


def test_paths_are_accepted_where_texts_are() -> None:
    assert TrainConfig(data=Path("events.csv")).data == "events.csv"  # type: ignore[arg-type]


def test_none_is_spelt_out_where_a_field_can_be_unset(tmp_path: Path) -> None:
    assert load_text(tmp_path, 'gradient_clip_norm = "none"').gradient_clip_norm is None
    with pytest.raises(ConfigError, match="num_heads"):
        load_text(tmp_path, 'num_heads = "none"')


def test_python_users_get_the_same_checks() -> None:
    with pytest.raises(ConfigError, match=r"^num_heads: Input should be a valid integer; got '2'$"):
        TrainConfig(num_heads="2")  # type: ignore[arg-type]
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
        ("learning_rate", "5e-4", 5e-4),
        ("learning_rate", ".5", 0.5),
        ("learning_rate", "1.", 1.0),
        ("tensorboard", "false", False),
        ("data", "2024", "2024"),
        ("data", "true", "true"),
        ("data", '"a b"', "a b"),
        ("data", "'a b'", "a b"),
        ("data", "a b.csv", "a b.csv"),
        ("data", "a=b", "a=b"),
        ("data", "", ""),
        ("precision", "32-true", "32-true"),
        ("monitor", "recall@20", "recall@20"),
    ],
)
def test_texts_become_values_by_the_field(name: str, text: str, expected: object) -> None:
    value = parse_text(name, text)
    assert value == expected
    assert type(value) is type(expected)


@settings(deadline=None)
@given(st.sampled_from(sorted(TrainConfig.model_fields)), st.text(max_size=40))
def test_any_text_is_a_value_or_a_named_refusal(name: str, text: str) -> None:
    try:
        TrainConfig.load(None, {name: parse_text(name, text)})
    except ConfigError as error:
        assert name in str(error)  # noqa: PT017, most texts are values


def test_later_assignments_win() -> None:
    assert parse_assignments(["seed=1", "data = a=b ", "seed=2"]) == {"seed": 2, "data": "a=b"}


@pytest.mark.parametrize(
    ("text", "expected"), [("seed", "found no '='"), ("sede=1", "did you mean seed?"), ("=1", "unknown option")]
)
def test_malformed_assignments_are_refused(text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected.replace("?", r"\?")):
        parse_assignments([text])


def test_no_torch_is_loaded() -> None:
    code = "import sys, jagged.config; print(sorted({'torch', 'numpy', 'torchrec'} & set(sys.modules)))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"


def test_what_is_saved_is_json(tmp_path: Path) -> None:
    TrainConfig().save(tmp_path / "config.json")
    assert json.loads((tmp_path / "config.json").read_text()) == TrainConfig().model_dump()
