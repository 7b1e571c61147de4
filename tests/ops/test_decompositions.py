"""Exported programs without operators of jagged, against those with them: other sizes, empty samples, all that is refused."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx.experimental import _config
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from jagged import ops
from jagged.modules import ScheduledEmbeddingBagCollection
from jagged.ops import decompositions
from jagged.ops._shared.operator import OPERATORS
from jagged.ops.attention import spec as attention
from jagged.ops.bmm import decomposed as bmm_bodies
from jagged.ops.bmm import spec as bmm
from jagged.ops.bmm import torch_impl
from jagged.ops.catalogue_topk import decomposed as catalogue
from jagged.ops.catalogue_topk import spec as catalogue_spec
from jagged.ops.conversion import spec as conversion
from jagged.ops.elementwise import spec as elementwise
from jagged.ops.embedding_bag import decomposed as bags
from jagged.ops.embedding_bag.spec import SeparateInputs
from jagged.ops.grouped_linear import spec as grouped_linear
from jagged.ops.softmax import spec as softmax
from tests.ops.test_export import FUNCTIONS, Model, features_of, heads
from tests.places import PLACE

pytestmark = [
    pytest.mark.skipif(PLACE.name != "cpu", reason="packages are for the CPU"),
    pytest.mark.filterwarnings("ignore"),
]

#: Operators that no program which scores needs, or that are not taken apart: what the refusal calls each.
REFUSED = {
    "embedding_bags": "embedding_bags",
    "group_sparse_bce": "group_sparse_bce",
    "group_sparse_cross_entropy": "group_sparse_cross_entropy",
    "group_sparse_linear": "group_sparse_linear",
    "jagged2_softmax": "jagged2_softmax",
    "jagged_index_select": "jagged_index_select",
    "jagged_pairwise_difference": "jagged_pairwise_difference",
    "linear_bce": "linear_bce",
    "linear_cross_entropy": "linear_cross_entropy",
    "sampled_linear_cross_entropy": "sampled_linear_cross_entropy",
}
Function = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def ordered(a: Tensor) -> Tensor:
    return torch.arange(a.shape[0]) ** 2


#: What options do to masks, biases and weights, beside `FUNCTIONS`.
MORE: dict[str, Function] = {
    "attention over others": lambda a, ao, b, bo: ops.jagged_attention(heads(b), heads(a), heads(a), bo, ao, scale=0.3),
    "causal": lambda a, ao, b, bo: ops.jagged_attention(heads(a), heads(a), heads(a), ao, causal=True),
    "grouped heads": lambda a, ao, b, bo: ops.jagged_attention(heads(a), heads(a)[:, :1], heads(a)[:, 1:], ao, causal=True),
    "narrower values": lambda a, ao, b, bo: ops.jagged_attention(heads(a), heads(a), heads(a)[..., :3], ao),
    "log-sum-exp": lambda a, ao, b, bo: ops.jagged_attention(heads(a), heads(a), heads(a), ao, window=2, return_lse=True)[1].t(),
    "contextual rows": lambda a, ao, b, bo: ops.jagged_attention(
        heads(a), heads(a), heads(a), ao, causal=True, window=2, num_contextual=2, num_targets=1
    ),
    "prefix": lambda a, ao, b, bo: ops.jagged_attention(
        heads(a), heads(a), heads(a), ao, causal=True, window=2, num_contextual=2, global_prefix=True
    ),
    "windowed context": lambda a, ao, b, bo: ops.jagged_attention(
        heads(a), heads(a), heads(a), ao, causal=True, window=2, num_contextual=3, windowed_context=True
    ),
    "groups of heads": lambda a, ao, b, bo: ops.jagged_attention(
        a.view(-1, 4, 2), a.view(-1, 4, 2)[:, :2], a.view(-1, 4, 2)[:, 2:], ao, causal=True
    ),
    "times of others": lambda a, ao, b, bo: ops.jagged_attention(
        heads(b), heads(a), heads(a), bo, ao, q_times=9 * ordered(b), k_times=ordered(a), time_bias=torch.arange(24.0).view(2, 12)
    ),
    "targets beyond": lambda a, ao, b, bo: ops.jagged_attention(
        heads(a), heads(a), heads(a), ao, causal=True, num_targets=ao[:-1] % 3 * 4 - 2
    ),
    "pointwise": lambda a, ao, b, bo: ops.jagged_hstu_attention(
        heads(a), heads(a), heads(a), ao, causal=True, num_targets=2, relative_bias=torch.arange(14.0).view(2, 7), scale=0.7,
        time_bias=torch.arange(40.0).view(2, 20) / 9, times=ordered(a), normalizer=4.0,
    ),
    "pointwise to other keys": lambda a, ao, b, bo: ops.jagged_hstu_attention(
        heads(b), heads(a), heads(a), bo, ao, num_targets=1, relative_bias=torch.arange(14.0).view(2, 7),
        time_bias=torch.arange(40.0).view(2, 20) / 9, times=ordered(b), k_times=ordered(a),
    ),
    "a bias for each pair": lambda a, ao, b, bo: ops.jagged_attention(
        heads(b), heads(a), heads(a), bo, ao, bias=a[:, :2].t().contiguous()
    ),
    "a dense bias": lambda a, ao, b, bo: ops.jagged_attention(
        heads(a), heads(a), heads(a), ao, bias=b[:, :2, None, None] * torch.arange(12.0).view(3, 4).sin()
    ),
    "layers of groups": lambda a, ao, b, bo: ops.grouped_linear(
        ops.grouped_linear(a, torch.ones(2, 3, 8).cumsum(1)), torch.ones(2, 4, 3).cumsum(2), torch.ones(2, 4), "relu"
    ).flatten(1),
    "sums of weighted rows": lambda a, ao, b, bo: ops.array_jagged_bmm_jagged_out(
        ops.jagged_jagged_bmm_jagged_out(b, a, bo, ao, a.shape[0]), a, bo, ao, b.shape[0]
    ),
    "added and multiplied": lambda a, ao, b, bo: ops.jagged_cross(ops.jagged_dense_mul(a, ao, b), ao, b[:, :3], a[:, 3:]),
    "gelu": lambda a, ao, b, bo: ops.jagged_linear(a, ao, torch.ones(8, 8), context=b, activation="gelu"),
    "relu": lambda a, ao, b, bo: ops.jagged_linear(a, ao, torch.ones(8, 8), context=b, activation="relu"),
    "more than a catalogue has": lambda a, ao, b, bo: ops.catalogue_topk(
        b, torch.ones(5, 8).cumsum(0), 7, bias=torch.arange(5.0).sin()
    )[1].float(),
}  # fmt: skip


def exported(model: nn.Module, *given: KeyedJaggedTensor, weights: bool = False) -> ExportedProgram:
    sizes: list[Any] = [{0: Dim.DYNAMIC}, {0: Dim.DYNAMIC} if weights else None, {0: Dim.DYNAMIC}, None, None, None]
    # One sample, and none of its rows, are sizes as any other.
    with torch.no_grad(), _config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        return torch.export.export(model.eval(), given, dynamic_shapes=(sizes,) * len(given))


def taken_apart(program: ExportedProgram) -> ExportedProgram:
    """Of PyTorch's operators alone, which change nothing in place."""
    found = ops.decomposed(program)
    targets = [node.target for node in found.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    assert {target.namespace for target in targets} <= {"aten", "prims"}
    assert not any(target._schema.is_mutable for target in targets)
    return found


@pytest.mark.parametrize("name", [*(name for name in FUNCTIONS if name not in REFUSED), *MORE])
def test_what_is_taken_apart_computes_the_same(name: str) -> None:
    """Of samples in other numbers and lengths than those that were traced, one and none among them."""
    torch.manual_seed(0)
    model = Model({**FUNCTIONS, **MORE}[name])
    program = exported(model, features_of(2, 1, 3))
    before = [str(node.target) for node in program.graph.nodes]
    found = taken_apart(program).module()
    assert [str(node.target) for node in program.graph.nodes] == before
    others = ((1, 0, 5, 2, 1), (4,), (0, 1), (0, 0))
    # These read more of the lengths, as which they have a row each.
    others = ((1, 1, 5, 2, 1), (4,)) if name in ("jagged_slice", "jagged_split", "jagged_truncate", "jagged_unique") else others
    for lengths in ((2, 1, 3), *others):
        features = features_of(*lengths)
        torch.testing.assert_close(found(features), model(features), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", REFUSED)
def test_other_operators_are_refused_by_name(name: str) -> None:
    program = exported(Model(FUNCTIONS[name]), features_of(2, 1, 3))
    expected = (
        f"program: got jagged::{REFUSED[name]}, expected operators that scoring needs; export the model in eval mode and without "
        "its loss, or load the program where jagged.ops is imported"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        ops.decomposed(program)


class Bags(nn.Module):
    """Pools two features of one table, as a mean and as a sum, and one of another."""

    def __init__(self, *, is_weighted: bool = False, dtype: Any = None) -> None:
        super().__init__()
        kinds = {"pooling": PoolingType.SUM if is_weighted else PoolingType.MEAN}
        kinds |= {} if dtype is None else {"data_type": dtype}
        tables = [
            EmbeddingBagConfig(name="one", embedding_dim=4, num_embeddings=30, feature_names=["a", "c"], **kinds),
            EmbeddingBagConfig(name="two", embedding_dim=3, num_embeddings=30, feature_names=["b"], **kinds),
        ]
        self.bags = ScheduledEmbeddingBagCollection(tables, is_weighted=is_weighted)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.bags(features).values()


def three_keys(*lengths: int, is_weighted: bool = False) -> KeyedJaggedTensor:
    of_keys = torch.tensor([*lengths, *[0] * (len(lengths) - 1), 4, *reversed(lengths)])
    values = torch.arange(int(of_keys.sum())) * 7 % 30
    weights = values.float().sin() if is_weighted else None
    return KeyedJaggedTensor(keys=["a", "b", "c"], values=values, weights=weights, lengths=of_keys)


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("dtype", [None, "FP16"])
def test_bags_of_separate_tables(dtype: str | None, is_weighted: bool) -> None:
    from torchrec.types import DataType

    torch.manual_seed(0)
    model = Bags(is_weighted=is_weighted, dtype=None if dtype is None else DataType[dtype])
    program = exported(model, three_keys(2, 0, 3, is_weighted=is_weighted), weights=is_weighted)
    found = taken_apart(program).module()
    for lengths in ((2, 0, 3), (1,), (0, 0, 0, 5), (3, 3)):
        features = three_keys(*lengths, is_weighted=is_weighted)
        torch.testing.assert_close(found(features), model(features), rtol=1e-5, atol=1e-6)
    # Tables are the model's own.
    assert {of.data_ptr() for of in model.parameters()} <= {of.data_ptr() for of in taken_apart(program).state_dict.values()}


def test_dropout_is_refused() -> None:
    def dropped(a: Tensor, ao: Tensor, b: Tensor, bo: Tensor) -> Tensor:
        return ops.jagged_attention(heads(a), heads(a), heads(a), ao, dropout_p=0.5, dropout_seed=torch.tensor([3]))

    program = exported(Model(dropped), features_of(2, 1, 3))
    with pytest.raises(ValueError, match="dropout_p: an exported program has no dropout; export the model in eval mode"):
        ops.decomposed(program)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("scales", "tables of 8 bits cannot be exported without jagged; export the model they were made of"),
        ("batches", "features with batches of their own cannot be exported without jagged; give them one"),
    ],
)
def test_other_bags_are_refused(given: str, told: str) -> None:
    arguments = [object() if name == given else None for name in SeparateInputs._fields]
    node: Any = SimpleNamespace(args=(*arguments, 3, 4, "float32", 32, None, False, "torch"))
    with pytest.raises(ValueError, match=f"^{re.escape(f'embedding_bags: {told}')}$"):
        bags.put_numbers(node, {})


def test_programs_of_other_devices_are_refused() -> None:
    class Doubled(nn.Module):
        def forward(self, rows: Tensor) -> Tensor:
            return 2 * rows

    program = torch.export.export(Doubled(), (torch.ones(3, device="meta"),))
    with pytest.raises(
        ValueError, match=r"^program: got tensors on meta, expected the CPU or a GPU; export the model from there$"
    ):
        ops.decomposed(program)


def test_is_loaded_where_jagged_is_not(tmp_path: Any) -> None:
    model = Model(lambda a, ao, b, bo: ops.jagged_attention(heads(a), heads(a), heads(a), ao, causal=True))
    a = torch.randn(6, 8)

    class Plain(nn.Module):
        def forward(self, rows: Tensor, offsets: Tensor) -> Tensor:
            return model.function(rows, offsets, rows, offsets)

    offsets = torch.tensor([0, 2, 6])
    with torch.no_grad():
        program = torch.export.export(Plain(), (a, offsets), dynamic_shapes=({0: Dim.DYNAMIC}, {0: Dim.DYNAMIC}))
    torch.export.save(ops.decomposed(program), tmp_path / "plain.pt2")
    torch.save((a[:5], torch.tensor([0, 1, 3, 5])), tmp_path / "given.pt")
    code = (
        "import sys, torch; program = torch.export.load('plain.pt2').module(); given = torch.load('given.pt'); "
        "torch.save(program(*given), 'found.pt'); assert not {'jagged', 'torchrec'} & set(sys.modules), 'imported'"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=tmp_path, check=True)
    expected = model.function(a[:5], torch.tensor([0, 1, 3, 5]), a, offsets)
    torch.testing.assert_close(torch.load(tmp_path / "found.pt"), expected)


def test_what_would_fix_a_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As PyTorch 2.13 does where sizes of 0 and 1 are special: saved and loaded, the program would take two samples alone."""
    sizes = ({0: Dim.DYNAMIC}, {0: Dim.DYNAMIC})

    class Causal(nn.Module):
        def forward(self, rows: Tensor, offsets: Tensor) -> Tensor:
            return ops.jagged_attention(heads(rows), heads(rows), heads(rows), offsets, causal=True)

    with torch.no_grad():
        program = torch.export.export(Causal(), (torch.randn(6, 8), torch.tensor([0, 2, 6])), dynamic_shapes=sizes)
    ops.decomposed(program)
    monkeypatch.setattr("jagged.ops.decompositions._config", SimpleNamespace(patch=lambda **changes: nullcontext()))
    expected = (
        "program: got 1 sizes that would be fixed at those of the example; export it under "
        "torch.fx.experimental._config.patch(backed_size_oblivious=True)"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        ops.decomposed(program)


def jagged_inputs(rng: random.Random, dtype: torch.dtype, index: torch.dtype) -> tuple[Any, ...]:
    """Rows and offsets of two jagged tensors of as many samples, some of them empty."""
    found: list[Tensor] = []
    samples = rng.randrange(1, 5)
    for _ in range(2):
        offsets = torch.tensor([rng.randrange(4) for _ in range(samples)]).cumsum(0)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), offsets])
        found += [torch.randn(int(offsets[-1]), 8).to(dtype), offsets.to(index)]
    return tuple(found)


def bodies_of(rng: random.Random, dtype: torch.dtype, index: torch.dtype) -> dict[str, tuple[Any, Any]]:
    """Inputs and options of every operator that has a body of its own, drawn anew."""
    a, ao, b, bo = jagged_inputs(rng, dtype, index)
    total, pairs, samples = a.shape[0], int((ao.diff() * bo.diff()).sum()), ao.shape[0] - 1
    dense, context = torch.randn(samples, rng.randrange(4), 8).to(dtype), torch.randn(samples, 8).to(dtype)
    layers = torch.randn(2, 5, 8).to(dtype), torch.randn(2, 5).to(dtype)
    key_heads = rng.choice((1, 2, 4))
    k = b.view(-1, 4, 2)[:, :key_heads]
    v = rng.choice((k, k[..., :1], k.repeat(1, 1, 2)))
    times = {"q_times": ao[0] + torch.arange(total) ** 2, "k_times": torch.arange(b.shape[0]) * 3}
    is_pointwise = rng.random() < 0.5
    masks = {
        "causal": rng.random() < 0.5, "window": rng.choice((0, 2)), "reach": rng.choice((1, 2)), "scale": 0.7,
        "num_contextual": rng.choice((0, 2)), "pointwise": is_pointwise, "normalizer": rng.choice((0.0, 3.0)) * is_pointwise,
        "softcap": rng.choice((0.0, 2.0)) * (not is_pointwise),
    }  # fmt: skip
    biases = {"relative_bias": torch.randn(4, 5).to(dtype), "time_bias": torch.randn(4, 6).to(dtype), **times}
    targets = torch.tensor([rng.randrange(-1, 5) for _ in range(samples)])
    return {
        "attention": (
            attention.Inputs(a.view(-1, 4, 2), k, v, ao, bo, rng.choice((None, targets)), **rng.choice(({}, biases))),
            attention.Options(**masks),
        ),
        "to_jagged": (conversion.Dense(dense, ao), conversion.Total(total)),
        "concat_two": (conversion.Pair(a, b, ao, bo), conversion.Plain()),
        "split_two": (conversion.Both(torch.cat([a, b]), ao, bo), conversion.Totals((total, b.shape[0]))),
        "jagged_dense_combine": (
            elementwise.Operands(rng.choice((None, a)), rng.choice((dense, context)), ao),
            elementwise.Combination(total, rng.choice(("add", "mul"))),
        ),
        "jagged_cross": (
            elementwise.Crossed(a, context[:, :3], 2 * a[:, 3:], ao, rng.choice((None, a))),
            elementwise.Crossing(rng.random() < 0.5),
        ),
        "jagged_activate": (
            elementwise.Hidden(a, context, ao), elementwise.Activating(rng.choice(("relu", "silu", "gelu")))
        ),
        "add_rows": (
            elementwise.Lookups(rng.choice((None, a)), torch.randn(7, 8), torch.arange(total) % 7), elementwise.Nothing()
        ),
        "jagged_dense_bmm": (
            bmm.DenseInputs(a, ao, torch.randn(samples, 8, 3).to(dtype), rng.choice((None, context[:, :3]))), bmm.Options()
        ),
        "jagged_jagged_bmm": (bmm.JaggedInputs(a, 2 * a[:, :3], ao), bmm.Options()),
        "pair_scores": (bmm.PairInputs(a, b, ao, bo), bmm.PairOptions(pairs)),
        "pair_sums": (bmm.WeightedInputs(torch.randn(pairs).to(dtype), b, ao, bo), bmm.WeightedOptions(total, False)),
        "grouped_linear": (
            grouped_linear.Inputs(rng.choice((a, a[:, None].expand(-1, 2, -1))), layers[0], rng.choice((None, layers[1]))),
            grouped_linear.Options(rng.random() < 0.5),
        ),
        "jagged_softmax": (softmax.Inputs(a, ao), softmax.Options()),
    }  # fmt: skip


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_bodies_are_their_operators(dtype: torch.dtype, index: torch.dtype) -> None:
    """In every dtype, with all options, and for samples and products of nothing."""
    torch.manual_seed(0)
    rng = random.Random(0)
    for _ in range(40):
        for name, (x, o) in bodies_of(rng, dtype, index).items():
            found, expected = decompositions._run(name, *x, *o, "torch"), OPERATORS[name].dispatched(*x, *o, "torch")
            torch.testing.assert_close(found, expected, msg=f"{name}: {o}")
    own = {name for name, path in decompositions._BODIES.items() if ".decomposed:" in path}
    assert own - {"concat", "split", "take_part", "catalogue_topk"} == bodies_of(rng, dtype, index).keys()


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("tile", [2, 5, 2**16])
def test_ranked_catalogues(tile: int, dtype: torch.dtype, index: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same items in the same order, equal scores and NaN among them, whichever tiles they are ranked in."""
    monkeypatch.setattr(catalogue, "_LEAST_TILE", tile)
    torch.manual_seed(0)
    rng = random.Random(0)
    for _ in range(40):
        rows, items, k = rng.randrange(4), rng.randrange(1, 12), rng.randrange(1, 14)
        # Whole numbers have many equal products, and a zero of either sign.
        hidden, weight = (torch.randint(-1, 2, (size, 3)).to(dtype) for size in (rows, items))
        strange = rng.choice((0.0, torch.nan, torch.inf, -torch.inf))
        weight[rng.randrange(items)] += strange
        lengths = torch.tensor([0, *(rng.randrange(6) for _ in range(rows))])
        ids = torch.randint(-2, items + 2, (int(lengths.sum()),))
        excluded = rng.choice(((None, None), (ids.to(index), lengths.cumsum(0).to(index))))
        bias = rng.choice((None, torch.randint(-1, 2, (items,)).to(dtype)))
        x, o = catalogue_spec.Inputs(hidden, weight, bias, *excluded), catalogue_spec.Options(k, 2**20)
        found, expected = catalogue.catalogue_topk(x, o), OPERATORS["catalogue_topk"].dispatched(*x, *o, "torch")
        assert torch.equal(found.ids, expected[1])
        torch.testing.assert_close(found.scores, expected[0], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("transposed", [False, True])
def test_weighted_sums_either_way(transposed: bool) -> None:
    """A gradient alone asks for sums over columns."""
    torch.manual_seed(0)
    a_offsets, b_offsets = torch.tensor([0, 3, 3, 4]), torch.tensor([0, 2, 5, 7])
    pairs = int((a_offsets.diff() * b_offsets.diff()).sum())
    rows, total = (4, 7) if transposed else (7, 4)
    x = bmm.WeightedInputs(torch.randn(pairs), torch.randn(rows, 5), a_offsets, b_offsets)
    o = bmm.WeightedOptions(total, transposed)
    torch.testing.assert_close(bmm_bodies.pair_sums(x, o).sums, torch_impl.pair_sums(x, o).sums)


def test_exported_under_autocast_and_compiled() -> None:
    """Products stay in the dtype that autocast had when the model was exported, whoever compiles the program."""
    torch.manual_seed(0)

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.projection = nn.Linear(8, 8)

        def forward(self, rows: Tensor, offsets: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                q = heads(self.projection(rows))
                return ops.jagged_attention(q, q, q, offsets, causal=True)

    model, sizes = Reader().eval(), ({0: Dim.DYNAMIC}, {0: Dim.DYNAMIC})
    with torch.no_grad():
        program = torch.export.export(model, (torch.randn(6, 8), torch.tensor([0, 2, 6])), dynamic_shapes=sizes)
        served = ops.decomposed(program).module()
        rows, offsets = torch.randn(9, 8), torch.tensor([0, 1, 4, 9])
        expected = model(rows, offsets)
        for run in (served, torch.compile(served, backend="aot_eager", dynamic=True)):
            found = run(rows, offsets)
            assert found.dtype == expected.dtype == torch.bfloat16
            torch.testing.assert_close(found, expected)
