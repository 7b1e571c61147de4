"""Tables and batches for collections of embeddings, and what ours and TorchRec's give for them, side by side."""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from tests.places import PLACE
from tests.strategies import seeds

SUM, MEAN = PoolingType.SUM, PoolingType.MEAN
FEATURES = ("a", "b", "c", "d")
Tables = list[EmbeddingBagConfig] | list[EmbeddingConfig]
# What a collection gives.
Output = KeyedTensor | dict[str, JaggedTensor]


def table(name: str, rows: int, width: int, *features: str, **options: Any) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=width, feature_names=list(features), **options)


def some_tables() -> list[EmbeddingBagConfig]:
    """A table of two features, a feature of two tables, and poolings that take turns."""
    return [
        table("x", 7, 3, "a", "b"),
        table("y", 5, 8, "c", pooling=MEAN),
        table("z", 11, 1, "a"),
        table("w", 6, 5, "d", pooling=MEAN),
    ]


@dataclass(frozen=True)
class Lookups:
    """What a batch is made of."""

    keys: tuple[str, ...] = FEATURES
    batch_size: int = 3
    longest: int = 4
    seed: int = 0
    ids_dtype: torch.dtype = torch.int64
    rows: int = 5

    def features(self, weights: bool = False, sizes: tuple[int, ...] | None = None) -> KeyedJaggedTensor:
        generator = torch.Generator().manual_seed(self.seed)
        bags = len(self.keys) * self.batch_size if sizes is None else sum(sizes)
        lengths = torch.randint(self.longest + 1, (bags,), generator=generator)
        total = int(lengths.sum())
        ids = torch.randint(self.rows, (total,), generator=generator).to(self.ids_dtype)
        of_ids = torch.randn(total, generator=generator).to(PLACE.device).requires_grad_() if weights else None
        extra: dict[str, Any] = {}
        if sizes is not None:
            samples = 4
            inverse = [torch.randint(max(1, size), (samples,), generator=generator) for size in sizes]
            extra["stride_per_key_per_rank"] = torch.tensor(sizes)[:, None]
            extra["inverse_indices"] = (list(self.keys), torch.stack(inverse).to(PLACE.device))
        return KeyedJaggedTensor(
            keys=list(self.keys), values=ids.to(PLACE.device), lengths=lengths.to(PLACE.device), weights=of_ids, **extra
        )


@st.composite
def collections(draw: st.DrawFn) -> tuple[list[EmbeddingBagConfig], bool]:
    weighted = draw(st.booleans())
    made = []
    for name in ("x", "y", "z", "w")[: draw(st.integers(1, 4))]:
        names = draw(st.lists(st.sampled_from(FEATURES), min_size=1, max_size=3, unique=True))
        pooling = SUM if weighted else draw(st.sampled_from([SUM, MEAN]))
        data_type = draw(st.sampled_from([DataType.FP32, DataType.FP32, DataType.FP16]))
        made.append(table(name, draw(st.integers(5, 12)), draw(st.integers(1, 9)), *names, pooling=pooling, data_type=data_type))
    return made, weighted


lookups = st.builds(
    Lookups,
    keys=st.permutations((*FEATURES, "unread")).map(tuple),
    batch_size=st.integers(0, 5),
    longest=st.sampled_from([0, 1, 4, 30]),
    seed=seeds(),
    ids_dtype=st.sampled_from([torch.int32, torch.int64]),
)


class Pair(NamedTuple):
    """A class of TorchRec's and the one of ours that takes its place."""

    theirs: type[nn.Module]
    ours: type[nn.Module]

    @property
    def is_pooled(self) -> bool:
        return issubclass(self.theirs, EmbeddingBagCollectionInterface)

    @property
    def flag(self) -> str:
        """The option that the class itself has."""
        return "is_weighted" if self.is_pooled else "need_indices"

    @property
    def place(self) -> str:
        """What the parameters' names begin with."""
        return "embedding_bags" if self.is_pooled else "embeddings"

    def tables(self, *bags: EmbeddingBagConfig) -> Tables:
        """The tables as the pair takes them: those of sequences have one width and are not pooled."""
        if self.is_pooled:
            return list(bags)
        width = {"embedding_dim": bags[0].embedding_dim}
        names = [field.name for field in fields(EmbeddingConfig)]
        return [EmbeddingConfig(**{**{name: getattr(bag, name) for name in names}, **width}) for bag in bags]

    def make(self, tables: Tables, **options: Any) -> tuple[Any, Any]:
        """Ours and TorchRec's with the same weights; other options than the flag are ours."""
        torch.manual_seed(0)
        flag = {name: options[name] for name in options if name == self.flag}
        twin = self.theirs(copy.deepcopy(tables), device=torch.device(PLACE.device), **flag)
        ours = self.ours(tables, device=PLACE.device, **options)
        ours.load_state_dict(twin.state_dict())
        return ours, twin


def tensors_of(output: Output) -> list[Tensor]:
    """The embeddings that a collection gives."""
    return [output.values()] if isinstance(output, KeyedTensor) else [of.values() for of in output.values()]


def check_same(ours: Output, wanted: Output) -> None:
    if isinstance(wanted, KeyedTensor):
        assert ours.keys() == wanted.keys()
        assert ours.length_per_key() == wanted.length_per_key()
        assert ours.offset_per_key() == wanted.offset_per_key()
    else:
        assert list(ours) == list(wanted)
        for mine, theirs in zip(ours.values(), wanted.values(), strict=True):
            assert type(mine) is JaggedTensor
            torch.testing.assert_close(mine.lengths(), theirs.lengths())
            torch.testing.assert_close(mine.offsets(), theirs.offsets(), check_dtype=False)
            torch.testing.assert_close(mine.weights_or_none(), theirs.weights_or_none())
    for mine, theirs in zip(tensors_of(ours), tensors_of(wanted), strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, theirs)


def check_both(ours: nn.Module, twin: nn.Module, features: KeyedJaggedTensor, seed: int) -> None:
    """Outputs and gradients against TorchRec's in float64, which it gives out as float32."""
    exact = copy.deepcopy(twin).double()
    weights = features.weights_or_none()
    of_twin = None if weights is None else weights.detach().double().requires_grad_()
    twins = KeyedJaggedTensor(
        keys=features.keys(),
        values=features.values(),
        lengths=features.lengths(),
        weights=of_twin,
        stride_per_key_per_rank=features._stride_per_key_per_rank,
        inverse_indices=features.inverse_indices_or_none(),
    )
    got, wanted = ours(features), exact(twins)
    check_same(got, wanted)
    generator = torch.Generator().manual_seed(seed)
    grads = [torch.randn(of.shape, generator=generator).to(PLACE.device) for of in tensors_of(wanted)]
    torch.autograd.backward(tensors_of(got), grads)
    torch.autograd.backward(tensors_of(wanted), grads)
    for (name, mine), theirs in zip(ours.named_parameters(), exact.parameters(), strict=True):
        expected = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
        torch.testing.assert_close(mine.grad, expected.to(mine.dtype), msg=lambda text, name=name: f"{name}: {text}")
    if weights is not None:
        torch.testing.assert_close(weights.grad, of_twin.grad.float())
