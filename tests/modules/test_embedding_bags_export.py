"""Collections of embedding bags that are exported read their tables in place, also from files and packages."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from jagged.modules import QuantizedEmbeddingBagCollection, ScheduledEmbeddingBagCollection, replace_embeddings
from tests.places import PLACE, Place

pytestmark = [
    pytest.mark.skipif(PLACE.name == "interpret", reason="modules run on the place's own backend"),
    # PyTorch's own, of what it exports, saves and compiles.
    pytest.mark.filterwarnings("ignore"),
]

KEYS = ["a", "b", "c"]
# Tables that are large beside all else.
ROWS, WIDTHS = 4000, (32, 20, 7)
SIZES = ({0: Dim.DYNAMIC}, None, {0: Dim.DYNAMIC}, None, None, None)


def configs(data_type: DataType = DataType.FP32, pooling: PoolingType = PoolingType.SUM) -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(
            name=f"t{key}", num_embeddings=ROWS, embedding_dim=width, feature_names=[key], data_type=data_type, pooling=pooling
        )
        for key, width in zip(KEYS, WIDTHS, strict=True)
    ]


class Model(nn.Module):
    """Bags, and a layer over them."""

    def __init__(self, bags: nn.Module) -> None:
        super().__init__()
        self.bags = bags
        self.over = nn.Linear(sum(WIDTHS), 2, device=PLACE.device)

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        pooled = self.bags(features).values()
        return pooled, self.over(pooled.float())


def features_of(batch_size: int, *, weighted: bool = False, longest: int = 3) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(batch_size)
    lengths = torch.randint(longest + 1, (len(KEYS) * batch_size,), generator=generator)
    ids = torch.randint(ROWS, (int(lengths.sum()),), generator=generator)
    weights = torch.randn(len(ids), generator=generator) if weighted else None
    return KeyedJaggedTensor(keys=KEYS, values=ids, lengths=lengths, weights=weights).to(PLACE.device)


def exported(model: nn.Module, *, weighted: bool = False) -> ExportedProgram:
    sizes = (SIZES[0], SIZES[0] if weighted else None, *SIZES[2:])
    return torch.export.export(model, (features_of(3, weighted=weighted),), dynamic_shapes=(list(sizes),), strict=False)


def scheduled(data_type: DataType = DataType.FP32, **options: Any) -> ScheduledEmbeddingBagCollection:
    return ScheduledEmbeddingBagCollection(configs(data_type), device=PLACE.device, **options)


COLLECTIONS: dict[str, Callable[[], nn.Module]] = {
    "float32": scheduled,
    "float16": lambda: scheduled(DataType.FP16),
    "bfloat16": lambda: scheduled(DataType.BF16, output_dtype=torch.bfloat16),
    "means": lambda: ScheduledEmbeddingBagCollection(configs(pooling=PoolingType.MEAN), device=PLACE.device),
    "two data types": lambda: ScheduledEmbeddingBagCollection([*configs()[:2], configs(DataType.FP16)[2]], device=PLACE.device),
    "replaced": lambda: replace_embeddings(EmbeddingBagCollection(configs(), device=torch.device(PLACE.device))),
    "an optimizer": lambda: scheduled(optimizer="adagrad", optimizer_options={"learning_rate": 0.1}),
    "quantised": lambda: QuantizedEmbeddingBagCollection.from_float(scheduled()),
}


def nbytes(model: nn.Module) -> int:
    return sum(of.nbytes for of in (*model.parameters(), *model.buffers()))


def check_reads_in_place(run: Callable[[Any], Any], features: Any, tables: int) -> None:
    """All that a call allocates is less than a twentieth of the tables, which a copy of one would not be."""
    run(features)
    if PLACE.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(features)
        allocated = torch.cuda.max_memory_allocated() - before
    else:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            run(features)
        assert profile.profiler is not None
        events = profile.profiler.kineto_results.events()
        allocated = sum(max(0, event.nbytes()) for event in events if event.name() == "[memory]")
    assert 0 < allocated < tables / 20


def check_graph(program: ExportedProgram) -> None:
    """Nothing takes a table but the lookup."""
    tables = {
        spec.arg.name
        for spec in program.graph_signature.input_specs
        if spec.target is not None and ".bags." in f".{spec.target}" and "lifted" not in spec.target
    }
    assert tables
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in tables:
            assert {str(user.target) for user in node.users} <= {
                "jagged.separate_embedding_bags.default",
                "jagged.embedding_bags.default",
            }


@pytest.mark.parametrize("records", [False, True])
@pytest.mark.parametrize("kind", COLLECTIONS)
def test_tables_are_read_in_place(place: Place, kind: str, records: bool) -> None:
    model = Model(COLLECTIONS[kind]()).eval()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with torch.set_grad_enabled(records):
        program = exported(model)
        check_graph(program)
        run = program.module()
        for features in (features_of(3), features_of(7), features_of(4, longest=0)):
            found, expected = run(features), model(features)
            assert all(torch.equal(ours, eager) for ours, eager in zip(found, expected, strict=True))
        check_reads_in_place(run, features_of(4), nbytes(model))
    # And nothing was updated.
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])


def test_weights_of_ids(place: Place) -> None:
    model = Model(scheduled(is_weighted=True)).eval()
    run = exported(model, weighted=True).module()
    for batch_size in (3, 6):
        features = features_of(batch_size, weighted=True)
        assert torch.equal(run(features)[0], model(features)[0])
    check_reads_in_place(run, features_of(4, weighted=True), nbytes(model))


class OfTheirOwn(nn.Module):
    """Reads features that have batch sizes of their own, given as a tensor."""

    def __init__(self, bags: nn.Module) -> None:
        super().__init__()
        self.bags = bags

    def forward(self, ids: Tensor, lengths: Tensor, sizes: Tensor, inverse: Tensor) -> Tensor:
        features = KeyedJaggedTensor(
            keys=KEYS, values=ids, lengths=lengths, stride_per_key_per_rank=sizes, inverse_indices=(KEYS, inverse)
        )
        values: Tensor = self.bags(features).values()
        return values


def batch_of(sizes: list[int]) -> tuple[Tensor, ...]:
    lengths = torch.arange(sum(sizes)) % 3
    inverse = torch.stack([torch.arange(5) % size for size in sizes])
    ids, lengths, inverse = (of.to(PLACE.device) for of in (torch.arange(int(lengths.sum())) * 300, lengths, inverse))
    return ids, lengths, torch.tensor(sizes)[:, None], inverse


@pytest.mark.parametrize("kind", ["float32", "quantised"])
def test_batches_of_their_own(place: Place, kind: str) -> None:
    model, given = OfTheirOwn(COLLECTIONS[kind]()).eval(), batch_of([2, 4, 3])
    sizes = ({0: Dim.DYNAMIC}, {0: Dim.DYNAMIC}, None, None)
    with torch.no_grad():
        expected = model(*given)
        clones = {name: weight.clone() for name, weight in model.named_parameters()}
        assert torch.equal(torch.func.functional_call(model, clones, given), expected)
        program = torch.export.export(model, given, dynamic_shapes=sizes, strict=False)
        check_graph(program)
        run = program.module()
        assert torch.equal(run(*given), expected)
        other = batch_of([5, 1, 2])
        assert torch.equal(run(*other), model(*other))
        check_reads_in_place(lambda features: run(*features), given, nbytes(model))
        wrong = (*other[:2], torch.tensor([[5], [1], [3]]), other[3])
        with pytest.raises(RuntimeError, match="Runtime assertion failed"):
            run(*wrong)


def test_batches_of_one_sample_and_of_none(place: Place) -> None:
    """PyTorch takes sizes for 2 or more by itself."""
    model = Model(scheduled()).eval()
    with torch.fx.experimental._config.patch(backed_size_oblivious=True):
        run = exported(model).module()
    for batch_size in (0, 1, 2, 5):
        assert torch.equal(run(features_of(batch_size))[0], model(features_of(batch_size))[0])


def test_tables_that_change_after_export_are_seen(place: Place) -> None:
    model, features = Model(scheduled()).eval(), features_of(3)
    run = exported(model).module()
    with torch.no_grad():
        model.bags.embedding_bags["tb"].weight.mul_(2)
        assert torch.equal(run(features)[0], model(features)[0])
    # And the model's own calls read the storage again.
    assert isinstance(model.bags._parts[0].tables.weights(), Tensor)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "quantised"])
def test_loaded_from_a_file(place: Place, kind: str, tmp_path: Path) -> None:
    model = Model(COLLECTIONS[kind]()).eval()
    program = exported(model)
    # PyTorch stumbles over its own message about a class that it loads by pickle.
    program.example_inputs = None
    torch.export.save(program, tmp_path / "model.pt2")
    assert (tmp_path / "model.pt2").stat().st_size < 1.2 * nbytes(model)
    run = torch.export.load(tmp_path / "model.pt2").module()
    for batch_size in (3, 7):
        assert torch.equal(run(features_of(batch_size))[0], model(features_of(batch_size))[0])
    check_reads_in_place(run, features_of(4), nbytes(model))


def test_an_exported_program_is_compiled_whole(place: Place) -> None:
    model = Model(scheduled()).eval()
    run = torch.compile(exported(model).module(), fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad():
        for batch_size in (3, 7):
            assert torch.equal(run(features_of(batch_size))[0], model(features_of(batch_size))[0])
        check_reads_in_place(run, features_of(4), nbytes(model))


@pytest.mark.skipif(PLACE.name != "cpu", reason="compiles for the CPU")
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
def test_served_from_a_package(place: Place, tmp_path: Path) -> None:
    model = Model(ScheduledEmbeddingBagCollection([*configs()[:2], configs(DataType.FP16)[2]])).eval()
    program = exported(model)
    # AOTInductor writes, for each table, all of the storage that it is a view of.
    for name, table in program.state_dict.items():
        program.state_dict[name] = nn.Parameter(table.detach().clone(), table.requires_grad)
    with torch.no_grad():
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
        assert Path(package).stat().st_size < 1.2 * nbytes(model) + 8e6
        served = torch._inductor.aoti_load_package(package)
        for batch_size in (3, 7):
            assert torch.equal(served(features_of(batch_size))[0], model(features_of(batch_size))[0])
        check_reads_in_place(served, features_of(4), nbytes(model))


def test_called_with_other_parameters(place: Place) -> None:
    model, features = Model(scheduled()).eval(), features_of(4)
    given = {name: parameter.detach() * 3 for name, parameter in model.named_parameters()}
    twin = Model(scheduled()).eval()
    twin.load_state_dict(given)

    def call(features: KeyedJaggedTensor) -> Any:
        return torch.func.functional_call(model, given, (features,))

    check_reads_in_place(call, features, nbytes(model))
    assert torch.equal(call(features)[0], twin(features)[0])
    leaves = [given[name].requires_grad_() for name in given if "bags" in name]
    ours = torch.autograd.grad(call(features)[1].square().sum(), leaves)
    theirs = torch.autograd.grad(twin(features)[1].square().sum(), list(twin.bags.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("kind", ["float32", "quantised"])
@pytest.mark.parametrize("held", [False, True])
def test_torchscript_is_refused(place: Place, kind: str, held: bool) -> None:
    bags = COLLECTIONS[kind]()
    message = (
        f"torch.jit.script: got a {type(bags).__name__}, whose lookups are an operator written in Python, which TorchScript "
        "cannot compile; export the model with torch.export.export"
    )
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        torch.jit.script(Model(bags) if held else bags)
