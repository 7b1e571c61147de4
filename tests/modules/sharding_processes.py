"""What the programs have in common that shard collections in several processes and compare them with unsharded ones."""

from __future__ import annotations

import copy
import fcntl
import functools
import json
import logging
import operator
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.sharding_plan import construct_module_sharding_plan
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from jagged.modules import embedding_bags_shards, table_storage
from jagged.modules.trained_tables import TrainedTables
from tests.processes import fork

ROOT = Path(__file__).parents[2]

#: By name what gives differences, or what was found, of one process; given a folder that all processes have.
Cases = Callable[[Path], dict[str, Callable[[], Any]]]

# In units of the last place: sums in another order, of which a 16-bit table can be rounded to its next number.
FEW, OF_16_BITS = 100, 20_000
PROCESSES = int(os.environ.get("PROCESSES", "2"))
HOST = int(os.environ.get("LOCAL_WORLD_SIZE", PROCESSES))
KEYS = ("d", "b", "a", "unread", "c")
# Of each process in the order of the steps: some have no samples, some no ids.
SIZES = [sizes[:PROCESSES] for sizes in [(3, 4, 1, 2), (0, 5, 2, 1), (2, 2, 2, 2), (4, 0, 0, 3), (0, 0, 0, 0), (1, 3, 2, 0)]]
FEW_SAMPLES = (2, 3, 1, 4)[:PROCESSES]
EMPTY = 2
RATE, LATER_RATE = 0.1, 0.05
IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ

# What stands behind a kind's name: options by which its updates go by whole rows.
WHOLE_ROWS = {"weight_decay": 0.25, "decay_missed_steps": True, "max_norm": 0.5}
SGD: dict[str, Any] = {"optimizer": "sgd", "optimizer_options": {"learning_rate": RATE}}


def num_gpus() -> int:
    """GPUs of this machine, of which a process of pytest-xdist may see one alone (`tests/gpu_workers.py`)."""
    return max(torch.cuda.device_count(), len([*Path("/dev").glob("nvidia[0-9]*")]) if IS_WORKER else 0)


def run(folders: pytest.TempPathFactory, program: str, backend: str, processes: int = 2, hosts: int = 1) -> list[dict[str, Any]]:
    """For each process what a program has found, by case; of all processes of pytest-xdist one runs it."""
    shared = folders.getbasetemp().parent if IS_WORKER else folders.getbasetemp()
    directory = shared / f"{program}-{backend}-{processes}"
    directory.mkdir(exist_ok=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, output, errors = directory / "code", directory / "output", directory / "errors"
        if not code.exists():
            done = _ran(program, backend, directory, processes, hosts)
            output.write_text(done.stdout)
            errors.write_text(done.stderr)
            code.write_text(str(done.returncode))
    assert code.read_text() == "0", errors.read_text()[-4_000:]
    result: list[dict[str, Any]] = json.loads(output.read_text().splitlines()[-1])
    assert len(result) == processes
    return result


def _ran(program: str, backend: str, directory: Path, processes: int, hosts: int) -> subprocess.CompletedProcess[str]:
    sizes = {"PROCESSES": str(processes), "LOCAL_WORLD_SIZE": str(processes // hosts)}
    seen = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES" or not IS_WORKER}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", program, str(directory), backend],
        cwd=ROOT,
        env={**seen, **sizes, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_NVLS_ENABLE": "0"},
        capture_output=True,
        text=True,
        timeout=1_700,
    )


def check(found: list[dict[str, Any]], name: str) -> None:
    if name not in found[0]:
        pytest.skip("looked at on the CPU")
    for process in found:
        limit = OF_16_BITS if name.endswith("two types") else FEW
        # A NaN fails too.
        assert all(difference < limit for difference in process[name].values()), process[name]
        assert process[name].get("launches", 0) == 0


def batch(
    sizes: tuple[int, ...], seed: int, weighted: bool, longest: int = 4, varied: Sequence[int] = ()
) -> list[KeyedJaggedTensor]:
    """For each process its batch, and last that of all together; in those of `varied` keys have batch sizes of their own."""
    generator = torch.Generator().manual_seed(seed)
    rows = {"a": 7, "b": 1, "c": 5, "d": 6, "unread": 100}

    def bag(key: str) -> Tensor:
        length = int(torch.randint(longest + 1, (), generator=generator))
        return torch.randint(rows[key], (length,), generator=generator)

    def inverse_of(process: int, size: int) -> tuple[int, Tensor]:
        """How many bags a key has, and each sample's; a process without samples can have some."""
        if process not in varied or not sum(sizes):
            return size, torch.arange(size)
        count = int(torch.randint(min(1, size), size + 2, (), generator=generator))
        return count, torch.randint(max(1, count), (size,), generator=generator)

    inverses = [[inverse_of(process, size) for _ in KEYS] for process, size in enumerate(sizes)]
    ids = [[[bag(key) for _ in range(count)] for key, (count, _) in zip(KEYS, of, strict=True)] for of in inverses]
    ids.append([[one for of_process in ids for one in of_process[key]] for key in range(len(KEYS))])
    together = []
    for of_key in zip(*inverses, strict=True):
        firsts = accumulate((count for count, _ in of_key), initial=0)
        together.append((0, torch.cat([first + of for first, (_, of) in zip(firsts, of_key, strict=False)])))
    made = []
    for process, (of_keys, of_samples) in enumerate(zip(ids, [*inverses, together], strict=True)):
        bags = [one for of_key in of_keys for one in of_key]
        values = torch.cat([*bags, torch.empty(0, dtype=torch.int64)])
        extra: dict[str, Any] = {}
        if process in varied or (varied and process == len(sizes)):
            # Of their own order.
            extra["inverse_indices"] = (list(KEYS[::-1]), torch.stack([of for _, of in of_samples[::-1]]).to(here()))
            extra["stride_per_key_per_rank"] = torch.tensor([[len(of_key)] for of_key in of_keys])
        made.append(
            KeyedJaggedTensor(
                keys=list(KEYS),
                values=values.to(here()),
                lengths=torch.tensor([len(one) for one in bags], dtype=torch.int64).to(here()),
                # The same in every process for an id of a feature.
                weights=(0.5 + values % 5).to(here()) if weighted else None,
                **extra,
            )
        )
    return made


def here() -> torch.device:
    return torch.device("cuda", dist.get_rank()) if dist.get_backend() == "nccl" else torch.device("cpu")


def apart(a: Tensor, b: Tensor) -> float:
    """The largest difference in units of the last place of numbers around 1, or of the larger ones."""
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    if not a.numel():
        return 0.0
    a, b, eps = a.detach().double(), b.detach().double(), torch.finfo(a.dtype if a.is_floating_point() else torch.float32).eps
    found = ((a - b).abs() / (eps * (1 + b.abs()))).max()
    return float(found) if found.isfinite() else float("inf")


def shards(tensor: Tensor) -> list[tuple[Tensor, tuple[slice, ...]]]:
    """The parts of a tensor of a state dict that are here, and where they belong."""
    if isinstance(tensor, DTensor):
        own = tensor.to_local()
        # Where none are here it tells of one that is nowhere.
        places = zip(own.local_shards(), own.local_offsets(), own.local_sizes(), strict=False)
        return [(part, tuple(map(slice, offsets, map(operator.add, offsets, sizes)))) for part, offsets, sizes in places]
    if not hasattr(tensor, "local_shards"):
        return [(tensor, ())]
    return [
        (part.tensor, tuple(slice(o, o + s) for o, s in zip(part.metadata.shard_offsets, part.metadata.shard_sizes, strict=True)))
        for part in tensor.local_shards()
    ]


def tables_apart(ours: nn.Module, whole: TrainedTables) -> float:
    theirs = whole.state_dict()
    assert ours.state_dict().keys() == theirs.keys()
    pairs = [(part, theirs[name][place]) for name, tensor in ours.state_dict().items() for part, place in shards(tensor)]
    return max((apart(part, its) for part, its in pairs), default=0.0)


def gradients_apart(ours: nn.Module, whole: TrainedTables) -> float:
    """Of the parameters; those of column shards are compared by what they lead to."""
    worst, state = 0.0, ours.state_dict()
    for name, parameter in ours.named_parameters():
        found = shards(state[name])
        if found:
            assert len(found) == 1
            worst = max(worst, apart(parameter.grad, whole.get_parameter(name).grad[found[0][1]]))
    return worst


def states_apart(dmp: DistributedModelParallel, whole: TrainedTables) -> float:
    """Of the fused optimizers' states by table and name."""
    optimizers, worst = embedding_bags_shards.optimizers_of(whole), 0.0
    for parameter, states in dmp.fused_optimizer.state_dict()["state"].items():
        table = parameter.split(".")[-2]
        theirs = {f"{table}.{name}".replace("first", "momentum1"): its for name, its in optimizers.states[table].items()}
        assert states.keys() == {name for name in theirs if not name.endswith("learning_rate")}
        for name, state in states.items():
            for part, place in shards(state):
                its = theirs[name]
                worst = max(worst, apart(part, its[place]) if its.ndim else abs(int(part) - int(its)))
    return worst


def gathered(ours: nn.Module) -> dict[str, Tensor]:
    """A sharded module's state dict with whole tables, in every process."""
    found = {}
    for name, tensor in ours.state_dict().items():
        found[name] = tensor
        if hasattr(tensor, "local_shards"):
            found[name] = torch.empty(tensor.size(), dtype=tensor.dtype, device=here())
            tensor.gather(0, found[name] if dist.get_rank() == 0 else None)
            dist.broadcast(found[name], 0)
    return found


def refused(call: Callable[[], object]) -> str:
    """What a call says that fails."""
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "nothing"


# The batch sizes of each call, if features have their own.
CALLS: list[Sequence[int] | None] = []


def count_calls() -> None:
    """Count the shards' calls of the operator."""
    operator = embedding_bags_shards.embedding_bags

    def counted(*arguments: Any, **options: Any) -> Tensor:
        CALLS.append(options.get("batch_sizes"))
        return operator(*arguments, **options)

    embedding_bags_shards.embedding_bags = counted


def piped_apart(
    made: Callable[[], nn.Module],
    path: str,
    configs: Sequence[BaseEmbeddingConfig],
    generators: Sequence[Any],
    sharder: Any,
    varied: Sequence[int] = (),
) -> dict[str, float]:
    """TorchRec's pipeline, which sends a batch's ids before the one before has been looked up, against plain steps.

    Args:
        made: a model as the pipeline wants it, with its collection at `path`.
        configs: its tables.
        generators: of each table's sharding.
        varied: processes in whose batches keys have batch sizes of their own.
    """
    scores, batches = [], [batch(FEW_SAMPLES, seed, False, varied=varied)[dist.get_rank()] for seed in range(4)]
    for is_piped in (False, True):
        torch.manual_seed(0)
        model = made()
        of_tables = {table.name: of for table, of in zip(configs, generators, strict=True)}
        collection = model.get_submodule(path)
        plan = construct_module_sharding_plan(collection, of_tables, sharder, HOST, PROCESSES, here().type)
        dmp = DistributedModelParallel(model.to(here()), device=here(), plan=ShardingPlan({path: plan}), sharders=[sharder])
        rest = torch.optim.SGD(dict(in_backward_optimizer_filter(dmp.named_parameters())).values(), lr=RATE)
        found = []
        if is_piped:
            pipeline, feed = TrainPipelineSparseDist(dmp, rest, here()), iter(batches)
            found = [pipeline.progress(feed) for _ in batches]
        else:
            for features in batches:
                rest.zero_grad()
                loss, of_batch = dmp(features)
                loss.backward()
                rest.step()
                found.append(of_batch)
        scores.append(torch.cat(found))
    return {"scores": apart(*scores)}


def planned_output(whole: nn.Module, sharder: Any, seed: int, types: Mapping[str, str] | None = None) -> Any:
    """What a collection gives for this process's samples, sharded by TorchRec's planner, which gets sharding types by table."""
    model = nn.ModuleDict({"tables": copy.deepcopy(whole)})
    constraints = {name: ParameterConstraints(sharding_types=[of_table]) for name, of_table in (types or {}).items()}
    planner = EmbeddingShardingPlanner(Topology(PROCESSES, here().type, local_world_size=HOST), constraints=constraints)
    plan = planner.collective_plan(model, [sharder], dist.group.WORLD)
    dmp = DistributedModelParallel(model, device=here(), plan=plan, sharders=[sharder])
    return dmp.module["tables"](batch(FEW_SAMPLES, seed, False)[dist.get_rank()])


def work(root: Path, cases: Cases, unsharded: Callable[[], str]) -> None:
    # TorchRec tells of every table that it caches nothing.
    logging.disable(logging.WARNING)
    count_calls()
    first = unsharded()
    # What the sharded module is compared with gets the batches of all processes in each, so that no copies part.
    table_storage.refuse_copies = lambda: None
    found: dict[str, Any] = {name: case() for name, case in cases(root).items()} | {"unsharded": first}
    (root / str(dist.get_rank())).write_text(json.dumps(found))


def on_gpu(rank: int, root: Path, cases: Cases, unsharded: Callable[[], str]) -> None:
    """In a new process, for a forked one has no GPU if the first has looked for one."""
    warnings.simplefilter("ignore")
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", store=dist.FileStore(str(root / "store"), PROCESSES), rank=rank, world_size=PROCESSES)
    work(root, cases, unsharded)
    dist.destroy_process_group()


def main(cases: Cases, unsharded: Callable[[], str]) -> None:
    """Do the cases in all processes and print what each has found, and what a module says that nobody has sharded."""
    root, backend = Path(sys.argv[1]), sys.argv[2]
    if backend == "nccl":
        torch.multiprocessing.spawn(on_gpu, (root, cases, unsharded), PROCESSES)
    else:
        fork(functools.partial(work, root, cases, unsharded), PROCESSES, root / "store")
    print(json.dumps([json.loads((root / str(rank)).read_text()) for rank in range(PROCESSES)]))
