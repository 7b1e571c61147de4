"""Programs of the tests' own, and forked processes in them, which only such may have: they have started no threads and no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from jagged.training import TrainingError


def fork(work: Callable[[], None], count: int = 1, store: Path | None = None) -> None:
    """Do a piece of work in processes of their own, which with a file for a store are one gloo group; all must succeed."""
    children = []
    for rank in range(count):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                if store is not None:
                    dist.init_process_group("gloo", store=dist.FileStore(str(store), count), rank=rank, world_size=count)
                    # A process that is refused at once may end before its siblings have connected.
                    dist.barrier()
                work()
                assert dist.is_initialized() == (store is not None)
                if store is not None:
                    dist.destroy_process_group()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    codes = [os.waitpid(child, 0)[1] for child in children]
    assert not any(codes), f"exit codes of the processes: {codes}"


def in_child(work: Callable[[], object]) -> int:
    """Begin a piece of work in a process of its own, the first of a group; a `TrainingError` ends it as it ends a command."""
    child = os.fork()
    if child == 0:
        code = 1
        os.setpgrp()
        try:
            work()
            code = 0
        except TrainingError as error:
            print(error, file=sys.stderr)
            code = error.exit_code
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return child


def told_by(module: str, directory: Path) -> Any:
    """What a program of the tests' own prints as JSON, run as `python -m module directory`; the directory is ROOT in it."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, str(directory)],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4_000:]
    return json.loads(done.stdout.replace(str(directory), "ROOT"))
