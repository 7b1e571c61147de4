"""Exported best items of users: against the models themselves, for other sizes, without jagged, and what is refused."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from jagged.models import ItemSequenceModel, best_items_tensors, build, export_best_items, write_package
from jagged.modules import GroupSparseHead
from jagged.ops import decomposed
from jagged.scoring import rank_catalogue
from tests.places import PLACE

pytestmark = [
    pytest.mark.skipif(PLACE.name != "cpu", reason="packages are for the CPU"),
    pytest.mark.filterwarnings("ignore"),
]
ITEMS, LENGTH, BEST = 23, 6, 4
SIZES: dict[str, Any] = {"num_items": ITEMS, "embedding_dim": 8, "num_layers": 1, "max_seq_len": LENGTH}
VARIANTS: dict[str, dict[str, Any]] = {
    "sasrec": {"name": "sasrec"},
    "sasrec with an output layer": {"name": "sasrec", "output_fan_in": 4},
    "sasrec of side features": {
        "name": "sasrec",
        "event_features": {"device": 5},
        "item_features": {"num_items": ITEMS, "embedding_dim": 8, "ids": {"colour": (4, 3, 5)}, "numbers": ["price"]},
    },
    "hstu of times": {"name": "hstu", "num_time_buckets": 8},
    "bert4rec": {"name": "bert4rec"},
}
#: Events of users: one, none, and as many as the model reads.
OTHERS = ((4,), (0, 2), (0,), (LENGTH, 0, 1), (1, 1, 1, 1, 1))
# Loads a package where jagged is not, and scores what is given.
SERVE = (
    "import sys, torch; score = torch._inductor.aoti_load_package('items.pt2'); torch.set_grad_enabled(False); "
    "torch.save([score(**given) for given in torch.load('given.pt')], 'found.pt'); "
    "assert not {'jagged', 'torchrec', 'fbgemm_gpu'} & set(sys.modules), 'imported'"
)


def model_of(variant: str) -> ItemSequenceModel:
    torch.manual_seed(0)
    options = VARIANTS[variant]
    if "output_fan_in" in options:
        # One that knows its items, as training makes it.
        head = GroupSparseHead(8, torch.arange(ITEMS), 60, fan_in=4, group_size=5, head=6, loss="softmax")
        options = {"name": options["name"], "output": head}
    model: ItemSequenceModel = build(**{**SIZES, **options})
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    if (side := model.item_features) is not None:
        side.numbers.normal_()
        for name, values in {
            "set_of_item": torch.arange(ITEMS + 1) % 3,
            "offsets": [0, 2, 2, 5],
            "values": [0, 1, 2, 3, 1],
        }.items():
            side.get_buffer(f"{name}_0").copy_(torch.as_tensor(values))
    return model.eval()


def histories(model: ItemSequenceModel, lengths: Sequence[int]) -> KeyedJaggedTensor:
    """With times where the model takes them, and side features, in another order than the model's."""
    count = sum(lengths)
    rows = torch.arange(count)
    of: dict[str, Tensor] = {name: rows % size for name, size in model.event_features.items()}
    if model.takes_times:
        of["timestamp"] = 90 * rows**2
    of["item_id"] = 7 * rows % ITEMS
    return KeyedJaggedTensor([*of], torch.cat([*of.values()]), lengths=torch.tensor([*lengths] * len(of)))


def viewed(lengths: Sequence[int]) -> JaggedTensor:
    """Items that users must not get, of the first one nearly all, and some that are none."""
    of = [torch.arange(-2, ITEMS - 1), *(torch.arange(length) + 3 for length in lengths[1:])]
    return JaggedTensor(torch.cat(of), lengths=torch.tensor([*map(len, of)]))


def expected(model: ItemSequenceModel, features: KeyedJaggedTensor, exclude: JaggedTensor | None) -> dict[str, Tensor]:
    with torch.no_grad():
        hidden, given = model.final_hidden(features), None if exclude is None else (exclude.values(), exclude.offsets())
        ranked = rank_catalogue(hidden, model.item_weight, BEST, viewed=given, filter_viewed=(exclude is not None,))[0]
    return {"items": ranked.items, "scores": ranked.scores}


def check(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    torch.testing.assert_close(found["scores"], wanted["scores"], rtol=1e-4, atol=1e-5)
    # Where scores are equal to the last bits either item may be first.
    apart = wanted["scores"].diff().abs()
    is_sure = (apart.isnan() | (apart > 1e-4)).all(1) | (wanted["scores"] == 0).all(1)
    assert is_sure.any()
    assert torch.equal(found["items"][is_sure], wanted["items"][is_sure])


@pytest.mark.parametrize("variant", VARIANTS)
def test_programs_find_what_models_do(variant: str) -> None:
    """As exported, and in PyTorch's own operators, for users in other numbers and histories of other lengths, none among them."""
    model = model_of(variant)
    program = export_best_items(model, BEST, histories(model, (3, 1, 5, 2)), viewed((3, 1, 5, 2)))
    alone = decomposed(program)
    namespaces = {node.target.namespace for node in alone.graph.nodes if isinstance(node.target, torch._ops.OpOverload)}
    assert namespaces <= {"aten", "prims"}
    for lengths in ((3, 1, 5, 2), *OTHERS):
        features = histories(model, lengths)
        for exclude in (None, viewed(lengths)):
            given = best_items_tensors(model, features, exclude)
            for served in (program.module(), alone.module()):
                with torch.no_grad():
                    check(served(**given), expected(model, features, exclude))
    # Who has had nearly everything gets what is left.
    last = alone.module()(**best_items_tensors(model, histories(model, (2,)), viewed((2,))))
    assert last["items"].tolist() == [[ITEMS - 1, -1, -1, -1]]
    assert last["scores"][0, 1:].tolist() == [-torch.inf] * 3


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles C++ for the CPU")
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_package_finds_them_where_jagged_is_not(variant: str, tmp_path: Path) -> None:
    model = model_of(variant)
    write_package(export_best_items(model, BEST, histories(model, (3, 1, 5, 2)), viewed((3, 1, 5, 2))), tmp_path / "items.pt2")
    given = [(histories(model, lengths), viewed(lengths)) for lengths in OTHERS]
    torch.save([best_items_tensors(model, *of) for of in given], tmp_path / "given.pt")
    subprocess.run([sys.executable, "-W", "ignore", "-c", SERVE], cwd=tmp_path, check=True)
    for found, of in zip(torch.load(tmp_path / "found.pt"), given, strict=True):
        check(found, expected(model, *of))


def test_the_model_stays_as_it_was() -> None:
    model = model_of("sasrec").train()
    program = export_best_items(model, BEST, histories(model, (3, 1)))
    assert model.training
    assert {of.data_ptr() for of in model.parameters()} <= {of.data_ptr() for of in program.state_dict.values()}


def test_programs_take_their_inputs_by_name() -> None:
    """In any order; and numbers of 32 bits, or of a column, are made what programs read without a look at them."""
    model = model_of("hstu of times")
    features, exclude = histories(model, (3, 2)), viewed((3, 2))
    program = decomposed(export_best_items(model, BEST, histories(model, (1, 4, 2)))).module()
    given = best_items_tensors(model, features, exclude)
    wanted = expected(model, features, exclude)
    with torch.no_grad():
        check(program(**dict(reversed(given.items()))), wanted)
        with pytest.raises(ValueError, match=r"but expected .*'exclude_values', 'exclude_lengths'"):
            program(**{name: of for name, of in given.items() if not name.startswith("exclude")})
    strided = torch.stack([exclude.values(), exclude.values() + 1], 1)[:, 0]
    others = (
        JaggedTensor(exclude.values().int(), lengths=exclude.lengths().int()), JaggedTensor(strided, lengths=exclude.lengths())
    )  # fmt: skip
    small = KeyedJaggedTensor(features.keys(), features.values().int(), lengths=features.lengths().int())
    for other in others:
        found = best_items_tensors(model, small, other)
        for name, of in found.items():
            assert of.is_contiguous()
            assert of.dtype == torch.int64
            assert torch.equal(of, given[name])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            {
                "features": KeyedJaggedTensor(
                    ["item_id", "timestamp"], torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 1, 0, 1])
                )
            },
            "features['timestamp']: expected a time for each row of 'item_id', got samples of other lengths",
        ),
        (
            {"features": KeyedJaggedTensor(["item_id", "timestamp"], torch.tensor([ITEMS, 2]), lengths=torch.tensor([1, 1]))},
            f"features['item_id'].values()[0]: expected an id from 0 to {ITEMS - 1}, got {ITEMS}; map ids to dense ones first",
        ),
        (
            {"features": KeyedJaggedTensor(["item_id"], torch.tensor([1]), lengths=torch.tensor([1]))},
            "features: got the keys ['item_id'], expected 'timestamp', too, which the model reads",
        ),
        (
            {"lengths": (LENGTH + 1, 2)},
            f"features: got a history of {LENGTH + 1} events, expected at most {LENGTH}, which the model reads; leave the oldest "
            "ones out",
        ),
        ({"exclude": viewed((1, 1, 1))}, "exclude: got items for 3 users, expected 2, those of features"),
        ({"k": 0}, "k: got 0, expected 1 or more"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], told: str) -> None:
    model = model_of("hstu of times")
    features = change.get("features", histories(model, change.get("lengths", (3, 2))))
    with pytest.raises(ValueError, match=f"^{re.escape(told)}$"):
        export_best_items(model, change.get("k", BEST), features, change.get("exclude"))
