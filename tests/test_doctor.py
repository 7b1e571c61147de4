"""The doctor: verdicts on versions, and checks that run, fail, crash or hang."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from jagged import diagnosis, versions
from jagged.diagnosis import Check, DoctorReport, doctor
from jagged.versions import Problem, problems, repair_command

OTHERS = dict.fromkeys(
    ["numpy", "pyarrow", "pydantic", "safetensors", "tqdm", "cyclopts", "matplotlib", "jinja2", "psutil", "duckdb"], "1.0"
)


def triple(torch: str, fbgemm: str, torchrec: str, *, cpu: bool = False) -> dict[str, str]:
    return {"torch": torch, "fbgemm-gpu-cpu" if cpu else "fbgemm-gpu": fbgemm, "torchrec": torchrec, **OTHERS}


@pytest.mark.parametrize("cpu", [False, True])
@pytest.mark.parametrize(
    ("torch", "fbgemm", "torchrec"),
    [
        ("2.11.0", "1.6.0", "1.6.1"),
        ("2.11.0+cu130", "1.6.0", "1.6.0"),
        ("2.12.1", "1.7.0", "1.7.0"),
        ("2.13.0", "1.8.0", "1.8.0"),
        ("2.13.0", "1.8.0+cu126", "1.8.0"),
        ("2.13.0a0+gitabc123", "unknown", "2026.1.1"),
        ("2.13.0", "2026.11.1", "1.8.0"),
        ("2.13.0", "unknown", "unknown"),
    ],
)
def test_what_fits_raises_no_word(torch: str, fbgemm: str, torchrec: str, cpu: bool) -> None:
    assert problems(triple(torch, fbgemm, torchrec, cpu=cpu), nvidia_gpu=not cpu) == []


def test_the_cpu_stand_in_fits_a_cpu_torch() -> None:
    assert problems(triple("2.13.0+cpu", "1.8.0", "1.8.0", cpu=True), nvidia_gpu=False) == []


@pytest.mark.parametrize(
    ("found", "messages"),
    [
        (triple("2.13.0", "1.9.0", "1.8.0"), ["fbgemm-gpu 1.9.0 does not fit torch 2.13.0, 1.8 does"]),
        (triple("2.13.0", "1.8.0", "1.6.1"), ["torchrec 1.6.1 does not fit torch 2.13.0, 1.8 does"]),
        (triple("2.11.0", "1.8.0", "1.8.0"), ["fbgemm-gpu 1.8.0 does not fit", "torchrec 1.8.0 does not fit"]),
        (triple("2.15.0", "1.9.0", "1.9.2"), ["torch 2.15.0 is outside 2.11 to 2.13"]),
        (triple("2.9.1", "1.4.0", "1.4.0"), ["torch 2.9.1 is outside 2.11 to 2.13"]),
        (triple("2.13.0+cpu", "1.8.0", "1.8.0"), ["fbgemm-gpu 1.8.0 is built for CUDA, torch 2.13.0+cpu is not"]),
        (triple("2.13.0", "1.8.0", "1.8.0") | {"fbgemm-gpu-cpu": "1.8.0"}, ["are both installed"]),
        ({"torch": "2.13.0", **OTHERS}, ["torchrec, fbgemm-gpu are not installed"]),
        (OTHERS, ["torch, torchrec, fbgemm-gpu are not installed"]),
        ({k: v for k, v in triple("2.13.0", "1.8.0", "1.8.0").items() if k != "pyarrow"}, ["pyarrow is not installed"]),
    ],
)
def test_what_does_not_fit_is_named_with_its_cure(found: dict[str, str], messages: list[str]) -> None:
    result = problems(found, nvidia_gpu=True)
    assert len(result) == len(messages)
    for problem, message in zip(result, messages, strict=True):
        assert message in problem.message
        assert shlex.split(problem.cure)[:4] in (
            [sys.executable, "-m", "pip", "install"],
            [sys.executable, "-m", "pip", "uninstall"],
        )


def test_the_cure_keeps_a_supported_torch_and_knows_the_machine() -> None:
    on_gpu = repair_command({"torch": "2.11.0"}, nvidia_gpu=True)
    assert "torch==" not in on_gpu
    assert shlex.split(on_gpu)[4:] == ["fbgemm-gpu==1.6.*", "torchrec==1.6.*"]
    on_cpu = repair_command({"torch": "2.13.0"}, nvidia_gpu=False)
    assert "fbgemm-gpu-cpu==1.8.0" in on_cpu
    assert on_cpu.endswith("install --no-deps torchrec==1.8.0")
    fresh = repair_command({}, nvidia_gpu=True)
    assert "install torch==2.13.0 && " in fresh
    assert fresh.endswith("install fbgemm-gpu==1.8.0 torchrec==1.8.0")


@pytest.mark.parametrize("nvidia_gpu", [False, True])
@pytest.mark.parametrize(
    "found",
    [{}, triple("2.15.0", "1.9.0", "1.9.2"), triple("2.12.0", "1.8.0", "1.8.0"), triple("2.13.0", "1.7.0", "1.7.0")],
    ids=["fresh", "newest", "older", "half"],
)
def test_the_cure_cures(found: dict[str, str], nvidia_gpu: bool) -> None:
    after = OTHERS | {name: version for name, version in found.items() if not name.startswith("fbgemm")}
    for command in repair_command(found, nvidia_gpu=nvidia_gpu).split("&&"):
        for requirement in shlex.split(command)[4:]:
            name, pinned, version = requirement.partition("==")
            if pinned:
                after[name] = version.replace("*", "0")
    assert problems(after, nvidia_gpu=nvidia_gpu) == []


def test_this_installation_is_judged_without_importing_it() -> None:
    code = "import sys; from jagged.versions import installed, problems; installed(); problems(); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"


def test_warnings_are_given_for_problems_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed", lambda: triple("2.13.0", "1.8.0", "1.8.0"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        versions.warn_of_problems()
    monkeypatch.setattr(versions, "installed", lambda: triple("2.13.0", "1.9.0", "1.8.0"))
    with pytest.warns(versions.VersionWarning, match=r"fbgemm-gpu 1\.9\.0 does not fit .* run: "):
        versions.warn_of_problems()


def test_a_missing_module_is_told_with_the_line_to_run() -> None:
    for module, package in (("torchrec.modules", "torchrec"), ("fbgemm_gpu", "fbgemm-gpu"), ("triton", "triton")):
        problem = versions.missing_module(ModuleNotFoundError("no", name=module))
        assert problem is not None
        assert problem.message.startswith(package)
        assert "pip install" in problem.cure
    assert versions.missing_module(ModuleNotFoundError("no", name="somebody_elses")) is None
    assert versions.missing_module(ValueError("no")) is None


def test_the_report_prints_versions_problems_and_verdict() -> None:
    good = DoctorReport(triple("2.13.0", "1.8.0", "1.8.0", cpu=True), [], [Check("a", "ok"), Check("b", "not run", "no GPU")])
    assert good.ok
    text = str(good)
    assert "1.8.0 (fbgemm-gpu-cpu)" in text
    assert "not run: no GPU" in text
    assert "tensorboard  not installed (optional)" in text
    assert text.endswith("All is well.")

    failed = DoctorReport({}, [], [Check("a", "ok"), Check("b", "failed", "ValueError: no")])
    assert not failed.ok
    assert "failed: ValueError: no" in str(failed)
    assert "All is well" not in str(failed)

    unfit = DoctorReport({}, [Problem("x does not fit", "pip install y")])
    assert not unfit.ok
    assert "Problem: x does not fit\n  run: pip install y" in str(unfit)


def test_versions_alone_can_be_judged() -> None:
    report = doctor(triple("2.13.0", "1.9.0", "1.8.0"), run_checks=False)
    assert not report.ok
    assert report.checks == []


def test_every_part_is_run_and_works_here() -> None:
    report = doctor()
    assert [check.name for check in report.checks] == list(diagnosis._CHECKS)
    assert [str(check) for check in report.checks if check.status == "failed"] == []
    if not Path("/dev/nvidiactl").exists():
        assert {check.status for check in report.checks if "GPU" in check.name} == {"not run"}
    assert report.ok, str(report)


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that go wrong, planted in the processes that run the checks."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, time\n"
        "from jagged import diagnosis\n"
        "def fail(): raise ValueError('first line\\nsecond line')\n"
        "def crash(): os.abort()\n"
        "def leave(): print('noise {\"name\"', flush=True); os._exit(3)\n"
        "def hang(): time.sleep(60)\n"
        "diagnosis._CHECKS = {'fine': lambda: '', 'no gpu': lambda: diagnosis.NO_GPU, 'fail': fail,\n"
        "                  'crash': crash, 'leave': leave, 'hang': hang}\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path(__file__).parent.parent)]))


@pytest.mark.usefixtures("planted")
def test_a_check_that_fails_or_crashes_does_not_stop_the_others() -> None:
    checks = diagnosis._run(["fail", "crash", "leave", "no gpu", "fine"])
    assert [(check.name, check.status) for check in checks] == [
        ("fail", "failed"),
        ("crash", "failed"),
        ("leave", "failed"),
        ("no gpu", "not run"),
        ("fine", "ok"),
    ]
    assert checks[0].detail == "ValueError: first line"
    assert "status -6" in checks[1].detail
    assert "status 3" in checks[2].detail


@pytest.mark.usefixtures("planted")
def test_a_check_that_hangs_is_given_up() -> None:
    began = time.monotonic()
    checks = diagnosis._run(["fine", "hang"], timeout=3)
    assert [check.status for check in checks] == ["ok", "failed"]
    assert checks[1].detail == "no answer after 3 s"
    assert time.monotonic() - began < 30


def test_results_travel_as_json() -> None:
    line = json.dumps(vars(Check("a", "ok", "b")))
    assert Check(**json.loads(line)) == Check("a", "ok", "b")


def test_every_family_of_operators_is_run() -> None:
    folders = [path.name for path in (Path(diagnosis.__file__).parent / "ops").iterdir() if (path / "__init__.py").exists()]
    families = [name for name in folders if not name.startswith("_")]
    assert "attention" in families
    for name in families:
        for place in ("torch on CPU", "Triton on GPU"):
            assert any(check.startswith(name) and check.endswith(place) for check in diagnosis._CHECKS), (name, place)
