from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def loaded_after(code: str) -> set[str]:
    program = f"import sys\n{code}\nprint(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=120, check=True)
    return set(done.stdout.split())


def test_reading_and_splitting_need_no_torchrec() -> None:
    code = "import jagged.data.gather; from jagged.data import leaks, read_events, split_leave_one_out, synthetic_sessions"
    assert not {"torchrec", "fbgemm_gpu"} & loaded_after(code)


def test_the_error_needs_no_torch() -> None:
    assert not {"torch", "pyarrow", "numpy"} & loaded_after("from jagged.data import DataError")


def test_every_public_name_is_there() -> None:
    import jagged.data

    assert dir(jagged.data) == jagged.data.__all__
    assert all(getattr(jagged.data, name).__name__ == name for name in jagged.data.__all__)
