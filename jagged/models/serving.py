"""What models score as programs of `torch.export`, of plain tensors and for batches of all sizes; and their packages."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import fields
from inspect import Parameter, Signature
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from jagged.data.moving import moved
from jagged.evaluation import evaluating, item_table
from jagged.models.item_sequences import FEATURE, TIMES, ItemSequenceModel
from jagged.models.request_model import RequestModel
from jagged.models.validation import validate_features
from jagged.ops import catalogue_topk, decomposed

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from jagged.data.table_batches import Batch

# The parts of a KeyedJaggedTensor.
_VALUES, _LENGTHS, _WEIGHTS = "_values", "_lengths", "_weights"


def scoring_tensors(model: RequestModel, batch: Batch) -> dict[str, Tensor]:
    """Return what an exported program reads of a batch.

    These are the batch's fields that `model.inputs.fields` names, without labels and weights of rows. A KeyedJaggedTensor stands
    there as `features_values`, `features_lengths` and, where it has some, `features_weights`, key by key in the order of
    `model.inputs.keys("features")`. Who serves without a dataset makes them so; shapes and dtypes are those of `Batch`.

    Args:
        model: that was exported, or one like it.
        batch: of any part.

    Raises:
        ValueError: the batch lacks a field or key.
    """
    found: dict[str, Tensor] = {}
    for name in model.inputs.fields:
        value = getattr(batch, name)
        keys = model.inputs.keys(name) if isinstance(value, KeyedJaggedTensor) else []
        lacking = [name] if value is None else [f"{name}[{key!r}]" for key in keys if key not in value.keys()]  # noqa: SIM118
        if lacking:
            raise ValueError(
                f"batch: got no {lacking[0]}, expected what the model was made for; take one of a table with the same columns"
            )
        if not isinstance(value, KeyedJaggedTensor):
            found[name] = value
            continue
        if value.keys() != keys:
            value = value.permute([value.keys().index(key) for key in keys])
        found |= {name + _VALUES: value.values(), name + _LENGTHS: value.lengths()}
        if (weights := value.weights_or_none()) is not None:
            found[name + _WEIGHTS] = weights
    # A batch's own are views of one memory, of which torch saves no more than one type.
    return {name: of.clone(memory_format=torch.contiguous_format) for name, of in found.items()}


def export_scores(model: RequestModel, batch: Batch) -> ExportedProgram:
    """Export the scores of candidates.

    The program takes tensors by name, `program(**scoring_tensors(model, batch))`, and returns by task the logits of the
    candidates, float32 `[S]`. Numbers of requests, candidates and events may be others in each call: there is one request at
    least, which may have no candidate and no event. It is in eval mode, without gradients, on the device of the model.

    Who loads it with `torch.export.load` imports `jagged.ops` and `fbgemm_gpu` first, whose operators it has. `write_package`
    makes a package of it that needs torch alone.

    Args:
        model: as trained; it stays as it is.
        batch: an example, of one request or more; it is saved with the program.

    Raises:
        ValueError: an example without requests, or one that lacks a field or key.
    """
    if not len(batch):
        raise ValueError("batch: got no requests, expected an example of at least one")
    return _exported(model, _Scores(model), scoring_tensors(model, moved(batch, model.device)))


def best_items_tensors(
    model: ItemSequenceModel, features: KeyedJaggedTensor, exclude: JaggedTensor | None = None
) -> dict[str, Tensor]:
    """Return what an exported program reads of users' histories.

    `features_values` and `features_lengths` are those of a `SequenceBatch`'s features, key by key: "item_id", then "timestamp"
    where the model takes times, then its side features of events. All keys have the same lengths, at most `max_seq_len`.
    `exclude_values` and `exclude_lengths` are the items that each user must not get.

    Args:
        model: that was exported, or one like it.
        features: of one user or more.
        exclude: a sample of items for each user; None for none.

    Raises:
        ValueError: no user, a key is not there, ids out of range, keys of other lengths, a history longer than the model reads,
            or `exclude` of another number of users.
    """
    keys = _keys(model)
    if lacking := [key for key in keys if key not in features.keys()]:  # noqa: SIM118
        raise ValueError(f"features: got the keys {features.keys()}, expected {lacking[0]!r}, too, which the model reads")
    if features.keys() != keys:
        features = features.permute([features.keys().index(key) for key in keys])
    users, most = features.stride(), model.config["max_seq_len"]
    validate_features(
        features, FEATURE, model.config["num_items"], False, TIMES if model.takes_times else None, model.event_features
    )
    if (longest := int(features.lengths().max())) > most:
        raise ValueError(
            f"features: got a history of {longest} events, expected at most {most}, which the model reads; leave the oldest ones "
            "out"
        )
    without = features.lengths().new_zeros(users) if exclude is None else exclude.lengths()
    if len(without) != users:
        raise ValueError(f"exclude: got items for {len(without)} users, expected {users}, those of features")
    found = {
        "features_values": features.values(),
        "features_lengths": features.lengths(),
        "exclude_values": features.values().new_zeros(0) if exclude is None else exclude.values(),
        "exclude_lengths": without,
    }
    # A package looks at no dtype; and a batch's own are views of one memory, of which torch saves no more than one type.
    return {name: of.to(torch.int64, copy=True, memory_format=torch.contiguous_format) for name, of in found.items()}


def export_best_items(
    model: ItemSequenceModel, k: int, features: KeyedJaggedTensor, exclude: JaggedTensor | None = None
) -> ExportedProgram:
    """Export the best items of users, by their histories.

    The program takes tensors by name, `program(**best_items_tensors(model, features))`, and returns `items`, int64 `[B, k]`, the
    best first, and `scores`, float32 `[B, k]`; -1 and -inf where fewer are left, and the first items with score 0 for a user
    without events. Numbers of users, events and excluded items may be others in each call: there is one user at least. It is in
    eval mode, without gradients, on the device of the model, and loaded as one of `export_scores`.

    Args:
        model: as trained; it stays as it is.
        k: items for each user; may exceed the catalogue.
        features, exclude: an example, as of `best_items_tensors`; it is saved with the program.

    Raises:
        ValueError: an example that does not fit, or `k` below 1.
    """
    if k < 1:
        raise ValueError(f"k: got {k}, expected 1 or more")
    example = best_items_tensors(model, features, exclude)
    return _exported(model, _BestItems(model, k), {name: of.to(item_table(model).device) for name, of in example.items()})


def _exported(model: nn.Module, program: nn.Module, example: dict[str, Tensor]) -> ExportedProgram:
    from torch.export import Dim, export
    from torch.fx.experimental import _config

    sizes = {name: {0: Dim.DYNAMIC} for name in example}
    # PyTorch takes sizes of 0 and 1 for special, unless it is told not to.
    with evaluating(model), torch.no_grad(), _config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        return export(_ByName(program, example), (), example, dynamic_shapes=sizes)


class _ByName(nn.Module):
    """Calls a module with one dictionary by the names of its tensors.

    A dictionary as an argument is taken apart by a package without a look at names: in another order it would be misread.
    """

    def __init__(self, program: nn.Module, names: Iterable[str]) -> None:
        super().__init__()
        self.program = program

        def forward(**tensors: Tensor) -> dict[str, Tensor]:
            found: dict[str, Tensor] = self.program(tensors)
            return found

        # What is exported is called by the names that the signature has.
        named = [Parameter(name, Parameter.KEYWORD_ONLY) for name in names]
        forward.__signature__ = Signature(named)  # type: ignore[attr-defined]
        self.forward = forward


def write_package(program: ExportedProgram, path: str | os.PathLike[str]) -> None:
    """Compile an exported program into a package that runs without jagged and TorchRec, by `torch._inductor.aoti_load_package`.

    Samples are padded to a batch's longest one in it, as `jagged.ops.decomposed` says: it is for batches of requests that wait
    for their scores, not for training's.

    Args:
        program: of `export_scores` or `export_best_items`, of a model on the CPU.
        path: of the package, which ends with `.pt2`; a file that is there is replaced.

    Raises:
        ValueError: a program with operators that PyTorch does not have, or on another device than the CPU.
        torch._inductor.exc.InvalidCxxCompiler: no C++ compiler is there.
    """
    from torch.fx.experimental import _config

    # PyTorch takes sizes of 0 and 1 for special, unless it is told not to.
    with _config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        alone = decomposed(program)
        others = {node.target.namespace for node in alone.graph.nodes if isinstance(node.target, torch._ops.OpOverload)}
        if unknown := others - {"aten", "prims", "_operator"}:
            raise ValueError(f"program: got operators of {min(unknown)}, expected PyTorch's; a package has no others")
        torch._inductor.aoti_compile_and_package(alone, package_path=os.fspath(path))  # type: ignore[no-untyped-call]


class _Scores(nn.Module):
    """Logits of tensors."""

    def __init__(self, model: RequestModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return `[S]` logits by task."""
        # A model alone needs no tables.
        from jagged.data.table_batches import Batch

        given = {name: tensors[name] for name in self.model.inputs.fields if name in tensors}
        keyed = {
            name: KeyedJaggedTensor(
                self.model.inputs.keys(name),
                tensors[name + _VALUES],
                tensors.get(name + _WEIGHTS),
                lengths=tensors[name + _LENGTHS],
            )
            for name in self.model.inputs.fields
            if name not in tensors
        }
        return self.model.logits(Batch(**{**dict.fromkeys(one.name for one in fields(Batch)), **given, **keyed}))  # type: ignore[arg-type]


def _keys(model: ItemSequenceModel) -> list[str]:
    """The keys of histories in a program's order."""
    return [FEATURE, *([TIMES] if model.takes_times else []), *model.event_features]


class _BestItems(nn.Module):
    """Items of histories."""

    def __init__(self, model: ItemSequenceModel, k: int) -> None:
        super().__init__()
        self.model, self.k = model, k

    def forward(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return `[B, k]` items and scores."""
        values, lengths = tensors["features" + _VALUES], tensors["features" + _LENGTHS]
        hidden = self.model.final_hidden(KeyedJaggedTensor(_keys(self.model), values, lengths=lengths))
        without = JaggedTensor(tensors["exclude" + _VALUES], lengths=tensors["exclude" + _LENGTHS])
        exclude = without.values(), without.offsets()
        scores, items = catalogue_topk(hidden.float(), self.model.item_weight.float(), self.k, exclude=exclude)
        return {"items": items, "scores": scores}
