"""What importing costs, and that parts which need no torchrec or triton do without."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
BLOCK = """
import sys

class Blocked:
    names = {"triton", "torchrec", "fbgemm_gpu"}
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
"""


def run(code: str, *arguments: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_package_imports_nothing_heavy() -> None:
    heavy = "{'torch', 'torchrec', 'fbgemm_gpu', 'triton', 'numpy', 'pyarrow', 'pydantic', 'cyclopts', 'matplotlib'}"
    assert run(f"import sys, jagged; print(sorted({heavy} & set(sys.modules)))").strip() == "[]"


def test_the_ops_work_without_triton_torchrec_and_fbgemm() -> None:
    code = BLOCK + (
        "import torch, jagged, jagged.ops\n"
        "offsets = torch.tensor([0, 1, 3])\n"
        "values = torch.arange(6.0).view(3, 2).requires_grad_()\n"
        "dense = jagged.ops.jagged_to_dense(values, offsets, 2)\n"
        "dense.sum().backward()\n"
        "q = values.detach().view(3, 1, 2)\n"
        "jagged.ops.jagged_attention(q, q, q, offsets, causal=True)\n"
        "jagged.ops.linear_cross_entropy(values, values, torch.tensor([0, 1, 2])).backward()\n"
        "print(sorted({'triton', 'torchrec', 'fbgemm_gpu'} & set(sys.modules)))\n"
    )
    assert run(code).strip() == "[]"


def test_what_needs_torchrec_says_which_line_to_run(tmp_path: Path) -> None:
    events = tmp_path / "events.txt"
    events.write_text("u a b c\n")
    code = BLOCK + (
        "from jagged.cli import main\n"
        f"sys.argv = ['jagged', 'train', '--data', {str(events)!r}, '--output', {str(tmp_path / 'run')!r}]\n"
        "main()\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)
    assert result.returncode == 2, result.stderr
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1
    assert "not installed" in lines[0]
    assert "pip install" in lines[0]


def test_names_are_found_on_first_use() -> None:
    code = "import sys, jagged; jagged.TrainConfig; jagged.doctor; print(dir(jagged), 'torch' in sys.modules)"
    output = run(code)
    assert output.strip().endswith("False")
    assert "'train'" in output


def test_no_module_hides_a_public_function() -> None:
    # Importing a submodule sets it as an attribute of its package, over the function of the same name.
    import jagged

    assert [
        name for name in jagged.__all__ if (ROOT / "jagged" / f"{name}.py").exists() or (ROOT / "jagged" / name).exists()
    ] == []
