"""Train on a table where the disk is full, at one size of it after another. A program of its own: `test_table_runs.py` starts it.

Usage: `unshare -rm python -m tests.training.full_disk DIRECTORY TIMES SEED`: in a namespace of its own it may mount file systems.
Prints a line of JSON for each size.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import torch

from jagged.data import DataError
from jagged.models.pretrained import open_task
from jagged.training import CheckpointError
from tests.training.table_runs import shop_file, table_outcome, train_table


def main() -> None:
    root, times, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    rows, generator = shop_file(root / "shop.csv"), random.Random(seed)
    wanted = table_outcome(train_table(root / "undisturbed", rows).directory)
    kept = sum(path.stat().st_blocks // 2 for path in (root / "undisturbed").rglob("*"))
    small = root / "small"
    small.mkdir()
    for _ in range(times):
        # In KiB; an inode of an empty one takes none. What is written aside needs more than what is kept.
        size = generator.randrange(8, int(1.2 * kept), 4)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", str(small)], check=True)
        said = ""
        try:
            train_table(small / "run", rows)
        except (CheckpointError, DataError) as error:
            said = str(error)
            try:
                open_task(small / "run")
            except CheckpointError:
                pass
            else:
                assert table_outcome(small / "run") == wanted, "half a run was opened"
        subprocess.run(["mount", "-o", "remount,size=64m", str(small)], check=True)
        train_table(small / "run", rows, resume=True)
        print(json.dumps({"size": size, "said": said, "same": table_outcome(small / "run") == wanted}), flush=True)
        # The data of the run that has ended may still be mapped.
        subprocess.run(["umount", "--lazy", str(small)], check=True)


if __name__ == "__main__":
    main()
