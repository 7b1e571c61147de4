"""The command line: help, options and their sources, and how errors end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from jagged import cli
from jagged.config import TrainConfig, leaves

ROOT = Path(__file__).parent.parent.parent
COMMANDS = ["train", "evaluate", "recommend", "report", "inspect", "tune-bags", "doctor", "demo"]


def jagged(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from jagged.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=cwd, timeout=120, check=False
    )


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[tuple[TrainConfig, dict[str, Any]]]:
    """The configurations that `train` would have been called with; nothing is trained or summed up."""
    import jagged.runs.training
    from jagged.runs import summary

    calls: list[tuple[TrainConfig, dict[str, Any]]] = []
    monkeypatch.setattr(jagged.runs.training, "train", lambda config, **options: calls.append((config, options)))
    monkeypatch.setattr(summary, "summary_lines", lambda directory: [f"summary of {directory}"])
    return calls


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["jagged", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return int(end.value.code or 0)


def test_help_needs_no_torch_and_less_than_a_second() -> None:
    code = (
        "import sys, time; began = time.process_time()\n"
        "from jagged.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'torchrec', 'fbgemm_gpu', 'triton', 'numpy', 'pyarrow', 'matplotlib'} & set(sys.modules)\n"
        "print(sorted(heavy), time.process_time() - began)\n"
    )
    for command in ([], *([command] for command in COMMANDS)):
        took: list[float] = []
        # The best of three: a machine that others keep busy, or that reads the modules for the first time, is slow now and then.
        while not took or (len(took) < 3 and min(took) >= 1):
            began = time.monotonic()
            output = subprocess.run(
                [sys.executable, "-c", code, *command, "--help"], capture_output=True, text=True, cwd=ROOT, check=True
            ).stdout
            wall = time.monotonic() - began
            heavy, cpu = output.strip().splitlines()[-1].rsplit(" ", 1)
            assert heavy == "[]", command
            # Wall time is the promise, but not on a machine that others keep busy: there the CPU time says it.
            took.append(min(wall, float(cpu)))
        assert min(took) < 1, command


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_a_worked_example_that_parses(command: str) -> None:
    text = jagged(command, "--help").stdout
    assert "Example" in text
    examples = [line.split() for line in text.splitlines() if line.startswith(f"    jagged {command}")]
    assert examples, text
    for example in examples:
        # With --help at its end every option before it has been parsed.
        assert jagged(*example[1:], "--help").returncode == 0, example


def test_every_option_is_a_flag_with_its_default_and_description(monkeypatch: pytest.MonkeyPatch) -> None:
    # Wide enough that no line is broken.
    monkeypatch.setenv("COLUMNS", "250")
    text = jagged("train", "--help").stdout
    words = " ".join(text.replace("│", " ").split())
    for name, variants in leaves().items():
        # Of one option the name is a word of Python's.
        flag = "--from" if name == "from_run" else f"--{name.replace('_', '-')}"
        assert f"{flag} " in words, name
        assert variants[0][1].description in words, name
    headings = [line.strip("╭─╮ ") for line in text.splitlines() if line.startswith("╭")]
    assert headings == ["Most used", "Run", "Data", "Split", "Model", "Head", "Training", "Evaluation"]
    first = text.split("╰")[0]
    assert [word for word in first.split() if word.startswith("--")] == [
        "--data.path", "--data", "--data.label", "--label", "--data.candidate", "--candidate", "--output",
        "--training.max-epochs", "--device", "--seed", "--resume", "--config",
    ]  # fmt: skip
    for line in (
        "--training.learning-rate NUMBER peak learning rate of AdamW [default: 0.001; multilabel: 0.002]",
        "--device auto|cpu|cuda auto: the GPU where there is one [default: auto]",
        "--head.num-negatives INTEGER sampled; sampler uniform, popularity or mixed: negatives drawn [default: 256]",
        "--split.valid-fraction NUMBER global-time: the fraction of events used for validation [default: 0.1]; "
        "time or order or user: the share used for validation [default: 0.1]",
        "--split.type --split leave-one-out|global-time|time|order|user|column|rows how validation and test are held out "
        "[default: leave-one-out; ranking: time; multilabel: rows]",
        "--training.max-epochs INTEGER most passes over the training data [default: 60; ranking or multilabel: 20]",
        "--data.label --label TEXT ranking: column that is a label, 0 to 1; may be repeated [default: none]",
    ):
        assert line in words


def test_sources_win_in_the_order_defaults_file_set_flags(
    trained: list[tuple[TrainConfig, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "run.toml"
    file.write_text("seed = 1\nmodel = { num_layers = 3, num_heads = 4 }\n[head]\ntype = 'scalable'\nnum_buckets = 7\n")
    chosen = ["model.num_heads=8", "model.embedding_dim=16", "model.embedding_dim=48", "head=sampled", "head.num_negatives=3"]
    arguments = [word for one in chosen for word in ("--set", one)] + ["--model.num-heads", "1", "--head.sampler", "in-batch"]
    assert run(monkeypatch, "train", "--config", str(file), *arguments) == 0
    ((config, options),) = trained
    # The file's num_buckets and the assigned num_negatives go with the tags that they belonged to.
    expected = TrainConfig(
        seed=1, model={"num_layers": 3, "num_heads": 1, "embedding_dim": 48}, head={"type": "sampled", "sampler": "in-batch"}
    )
    assert config == expected
    assert config.model_dump()["head"] == {"type": "sampled", "sampler": "in-batch", "loss": "softmax", "correction": "auto"}
    assert options == {"resume": False, "dry_run": False}


def test_flags_of_every_kind_arrive(trained: list[tuple[TrainConfig, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = (
        "train --data 2024 --training.no-tensorboard --evaluation.filter-viewed --training.max-tokens 512"
        " --training.gradient-clip-norm none --precision 32-true --training.learning-rate=.5 --training.monitor recall@20"
        " --head sampled --head.num-negatives 64 --split global-time --split.test-fraction .2 --dry-run"
    )
    assert run(monkeypatch, *arguments.split()) == 0
    ((config, options),) = trained
    expected = TrainConfig(
        data={"path": "2024"},
        training={
            "tensorboard": False,
            "max_tokens": 512,
            "gradient_clip_norm": None,
            "learning_rate": 0.5,
            "monitor": "recall@20",
        },
        evaluation={"filter_viewed": True},
        precision="32-true",
        head={"type": "sampled", "num_negatives": 64},
        split={"type": "global-time", "test_fraction": 0.2},
    )
    assert config == expected
    assert options == {"resume": False, "dry_run": True}


def test_a_run_goes_on_by_its_directory_alone(
    trained: list[tuple[TrainConfig, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    directory = tmp_path / "shop"
    directory.mkdir()
    # The directory was moved since it was written.
    TrainConfig(output="runs/shop", seed=3, head="scalable").save(directory / "config.json")
    assert run(monkeypatch, "train", "--resume", str(directory), "--training.max-epochs", "7") == 0
    ((config, options),) = trained
    assert config == TrainConfig(output=str(directory), seed=3, head="scalable", training={"max_epochs": 7})
    assert options == {"resume": directory, "dry_run": False}


def test_the_same_command_starts_a_run_and_goes_on_with_it(
    trained: list[tuple[TrainConfig, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    command = ["train", "--output", str(tmp_path), "--resume", str(tmp_path), "--model.num-heads", "4"]
    assert run(monkeypatch, *command) == 0
    trained[0][0].save(tmp_path / "config.json")
    assert run(monkeypatch, *command) == 0
    assert (
        trained[0] == trained[1] == (TrainConfig(output=tmp_path, model={"num_heads": 4}), {"resume": tmp_path, "dry_run": False})
    )


def test_a_run_can_be_repeated_from_its_configuration(
    trained: list[tuple[TrainConfig, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = TrainConfig(output=tmp_path, model={"num_heads": 1}, training={"max_tokens": 99})
    first.save(tmp_path / "config.json")
    assert run(monkeypatch, "train", "--config", str(tmp_path / "config.json")) == 0
    assert trained[0][0] == first


@pytest.mark.parametrize(
    ("arguments", "rank", "expected"),
    [
        ([], None, "summary of runs/here\n"),
        ([], "0", "summary of runs/here\n"),
        ([], "1", ""),
        (["--dry-run"], None, ""),
    ],
)
@pytest.mark.usefixtures("trained")
def test_the_first_process_sums_up_what_was_trained(
    arguments: list[str], rank: str | None, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    assert run(monkeypatch, "train", "--output", "runs/here", *arguments) == 0
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["train", "--model.num-heads", "two"], "--model.num-heads: got 'two', expected a whole number, at least 1"),
        (["train", "--model.num-heads", "3"], "--model.num-heads: got 3, expected a divisor of --model.embedding-dim (256)"),
        (["train", "--head.num-negatives", "3"], "--head.num-negatives: belongs to --head.type sampled, got cross-entropy"),
        (["train", "--head", "softmax"], "--head.type: got 'softmax', expected cross-entropy, sampled, scalable or group-sparse"),
        (["train", "--training.max-tokens", "9"], "--training.max-tokens: got 9, expected at least --data.max-seq-len (50)"),
        (["train", "--set", "sede=1"], "--set sede=1: unknown option; did you mean seed?"),
        (["train", "--set", "embedding_dim=1"], "--set embedding_dim=1: unknown option; did you mean model.embedding_dim?"),
        (["train", "--set", "seed"], "--set seed: found no '=', expected key=value, for example --set model.embedding_dim=128"),
        (["train", "--config", "missing.toml"], "missing.toml: cannot be read: No such file or directory"),
        (
            ["train", "--config", "run.toml", "--seed", "-1"],
            "run.toml: model.num_heads: got 0, expected a whole number, at least 1",
        ),
        (["train", "--device", "tpu"], "--device: got 'tpu', expected auto, cpu or cuda"),
        (
            ["train", "--data", "missing.csv", "--output", "run"],
            "missing.csv: found no file or folder of that name, expected event data",
        ),
        (["train", "--data", "", "--output", "run"], "the path '': found nothing, expected a file or a folder"),
        (["train", "--resume", "nowhere"], "--resume: nowhere holds no run; to start one there name it as --output, too"),
        (["train", "--resume", "a", "--output", "b"], "--output: got b, expected a, the run that goes on; leave it out"),
        (["evaluate", "missing"], "missing: no such directory"),
        (["recommend", "missing", "histories.csv"], "missing: no such directory"),
        (["report", "missing"], "missing: no such directory"),
        (["inspect", "missing.csv"], "missing.csv: found no file or folder of that name, expected a table"),
        (["inspect", "run.toml"], "run.toml: found the unknown suffix '.toml', expected a name ending in .csv"),
    ],
)
def test_what_a_user_can_mend_is_one_line_and_exit_code_2(
    arguments: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text("[model]\nnum_heads = 0\n")
    assert run(monkeypatch, *arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert f"jagged: {expected}" in [line[: len(expected) + 8] for line in output.err.splitlines()]


@pytest.mark.parametrize(
    ("line", "command", "expected"),
    [
        (
            "a.csv: found no column 't'; pass timestamp_column=\"\"",
            "train",
            "a.csv: found no column 't'; pass --data.timestamp-column \"\"",
        ),
        (
            "a.csv: found no column 't'; pass timestamp_column=\"\"",
            "evaluate",
            "a.csv: found no column 't'; pass --timestamp-column \"\"",
        ),
        (
            "lower learning_rate (now 0.1) or precision=32-true",
            "train",
            "lower --training.learning-rate (now 0.1) or --precision 32-true",
        ),
        ("output: runs/a is no output", "train", "--output: runs/a is no output"),
        ("part: got 'x'; the device is 'cpu'", "evaluate", "--part: got 'x'; the device is 'cpu'"),
        ("runs/max_epochs: 'num_heads' is no file", "train", "runs/max_epochs: 'num_heads' is no file"),
        ("head: in one process; take head=cross-entropy", "train", "--head: in one process; take --head cross-entropy"),
    ],
)
def test_messages_name_the_commands_flags(line: str, command: str, expected: str) -> None:
    assert cli._with_flags(line, cli._flags(command)) == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["train", "--model.embeding-dim", "3"],
            "Unknown option: --model.embeding-dim. Did you mean --model.embedding-dim? See jagged train --help.",
        ),
        (["evaluate", "run", "--k", "0"], 'Invalid value "0" for --k. Must be >= 1. See jagged evaluate --help.'),
        (
            ["inspect", "a.csv", "--format", "text"],
            'Invalid value "text" for --format. Choose from: "auto", "csv", "parquet". See jagged inspect --help.',
        ),
        (["inspect"], 'Command "inspect" parameter FILE requires an argument. See jagged inspect --help.'),
        (
            ["evaluate", "run", "--part", "train"],
            'Invalid value "train" for --part. Choose from: "valid", "test". See jagged evaluate --help.',
        ),
    ],
)
def test_a_call_that_cannot_be_read_is_one_line(
    arguments: list[str], expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *arguments) == 2
    assert capsys.readouterr() == ("", f"jagged: {expected}\n")


def test_a_process_of_its_own_says_no_more(tmp_path: Path) -> None:
    (tmp_path / "events.csv").write_text("user_id,item_id\n1\n")
    result = jagged("train", "--data", "events.csv", "--output", "run", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert "events.csv" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("arguments", [("evaluate", "none"), ("recommend", "none", "histories.csv"), ("report", "none")])
def test_a_process_that_loads_no_trainer_knows_its_errors_too(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    result = jagged(*arguments, cwd=tmp_path)
    expected = "jagged: none: no such directory; expected one that `jagged train` or save_pretrained wrote\n"
    assert (result.returncode, result.stdout, result.stderr) == (2, "", expected)


def test_an_interrupt_while_the_call_is_read_says_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(type(cli.app), "parse_args", interrupt)
    assert run(monkeypatch, "doctor") == 130
    assert capsys.readouterr() == ("", "")


def test_an_interrupt_while_torch_is_imported_is_not_lost(tmp_path: Path) -> None:
    """Code of torch and numpy takes it for another error and goes on."""
    code = (
        f"import os, signal, sys, time; sys.path.insert(0, {str(ROOT)!r})\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "class Finder:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'torch':\n"
        "            try:\n"
        "                os.kill(os.getpid(), signal.SIGINT)\n"
        "                time.sleep(1)\n"
        "            except KeyboardInterrupt: pass\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from jagged.cli import main; main()"
    )
    call = [sys.executable, "-c", code, "evaluate", "none"]
    result = subprocess.run(call, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert (result.returncode, result.stdout, result.stderr) == (-signal.SIGINT, "", "")


def test_output_that_nobody_takes(tmp_path: Path) -> None:
    """A reader that has gone, as `| head` goes, ends the command as the signal would; a full disk is one line."""
    # Each is a process of its own, which ends as Python ends; what takes seconds to import is imported before they part.
    code = f"""
import gc, json, os, sys
sys.path.insert(0, {str(ROOT)!r})
import pyarrow as pa, jagged.cli, jagged.runs.evaluating, jagged.runs.recommending, jagged.runs.reporting
jagged.runs.evaluating.evaluate = jagged.runs.reporting.report = lambda *_, **__: "a result"
jagged.runs.recommending.recommend = lambda *_, **__: pa.table({{"item_id": ["a"]}})
jagged.cli._prepare()
gc.freeze()
found = {{}}
for command in ("evaluate", "recommend", "report"):
    for output in ("pipe", "full", "closed"):
        child = os.fork()
        if child == 0:
            os.dup2(os.open("stderr", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
            if output == "pipe":
                end, gone = os.pipe()
                os.close(end)
                os.dup2(gone, 1)
            elif output == "full":
                os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
            else:
                os.close(1)
                sys.stdout = sys.__stdout__ = None
            sys.argv = ["jagged", command, "run", *(["histories.csv"] if command == "recommend" else [])]
            jagged.cli.main()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        found[f"{{command}} {{output}}"] = [status, open("stderr").read()]
print(json.dumps(found))
"""
    call = [sys.executable, "-W", "ignore", "-c", code]
    result = subprocess.run(call, capture_output=True, text=True, cwd=tmp_path, timeout=120, check=True)
    said = "jagged: standard output: could not be written: No space left on device; write it elsewhere\n"
    refused = "jagged: --output: got none, and standard output is closed; name a table to write\n"
    expected: dict[str, list[object]] = {}
    for command in ("evaluate", "recommend", "report"):
        expected[f"{command} pipe"] = [141, ""]
        expected[f"{command} full"] = [2, said]
        # Without standard output nothing is printed, as everywhere in Python.
        expected[f"{command} closed"] = [2, refused] if command == "recommend" else [0, ""]
    assert json.loads(result.stdout) == expected
    closed = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-c", "import sys; sys.exit(sys.stdout is not None)"]
    assert subprocess.run(closed, timeout=120, check=False).returncode == 0


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    import jagged.runs.training

    def fail(*_: object, **__: object) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(jagged.runs.training, "train", fail)
    monkeypatch.setattr(sys, "argv", ["jagged", "train"])
    with pytest.raises(ValueError, match="a bug"):
        cli.main()


@pytest.mark.parametrize(("module", "name"), cli._KNOWN_ERRORS)
def test_every_named_error_exists_and_becomes_one_line(
    module: str, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import importlib

    import jagged.runs.training

    kind = getattr(importlib.import_module(module), name)

    def fail(*_: object, **__: object) -> None:
        raise kind("events.csv:3: found nothing, expected an item")

    monkeypatch.setattr(jagged.runs.training, "train", fail)
    assert run(monkeypatch, "train") == 2
    assert capsys.readouterr().err == "jagged: events.csv:3: found nothing, expected an item\n"


@pytest.mark.parametrize("arguments", [["train", "--no-such-option", "1"], ["no-such-command"], ["evaluate"], ["recommend", "a"]])
def test_a_wrong_call_shows_how_to_get_help(arguments: list[str]) -> None:
    result = jagged(*arguments)
    assert result.returncode == 2
    assert "--help" in result.stderr
    assert "Traceback" not in result.stderr


def test_versions_that_do_not_fit_are_told_before_a_command_runs(
    trained: list[tuple[TrainConfig, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from jagged import versions

    found = versions.installed() | {"torchrec": "1.5.0"}
    monkeypatch.setattr(versions, "installed", lambda: found)
    assert run(monkeypatch, "train") == 0
    assert len(trained) == 1
    assert "jagged: torchrec 1.5.0 does not fit torch" in capsys.readouterr().err


def test_doctor_ends_with_its_verdict(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from jagged import diagnosis

    monkeypatch.setattr(diagnosis, "doctor", lambda: diagnosis.DoctorReport({}, [], [diagnosis.Check("a", "ok")]))
    assert run(monkeypatch, "doctor") == 0
    assert "All is well." in capsys.readouterr().out
    monkeypatch.setattr(diagnosis, "doctor", lambda: diagnosis.DoctorReport({}, [], [diagnosis.Check("a", "failed", "why")]))
    assert run(monkeypatch, "doctor") == 1
    assert "failed: why" in capsys.readouterr().out


def test_the_version_is_printed() -> None:
    import jagged as package

    assert jagged("--version").stdout.strip() == package.__version__
    module = subprocess.run([sys.executable, "-m", "jagged", "--version"], capture_output=True, text=True, cwd=ROOT, check=True)
    assert module.stdout.strip() == package.__version__
    assert json.dumps(module.stderr) == '""'


@pytest.mark.skipif(sys.platform != "linux", reason="PyTorch has them on Linux alone")
@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, ["expandable_segments:True", None]),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, ["max_split_size_mb:64", None]),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, [None, "max_split_size_mb:64"]),
    ],
)
def test_gpu_memory_lies_in_segments_that_grow(given: dict[str, str], found: list[str | None]) -> None:
    """Unless the user says otherwise, and before torch is there."""
    names = ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"]
    program = (
        "import atexit, json, os, sys\n"
        f"atexit.register(lambda: print(json.dumps([*map(os.environ.get, {names}), 'torch' in sys.modules])))\n"
        "from jagged.cli import main\nsys.argv = ['jagged', '--version']\nmain()"
    )
    environment = {name: value for name, value in os.environ.items() if name not in names}
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True, env={**environment, **given}
    ).stdout
    assert json.loads(output.splitlines()[-1]) == [*found, False]
