"""A ranking model's scores as a program of `torch.export`, of plain tensors and for requests of all sizes; and its package."""

from __future__ import annotations

import os
from dataclasses import fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from jagged.data.moving import moved
from jagged.evaluation import evaluating
from jagged.models.request_model import RequestModel
from jagged.ops import decomposed

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from jagged.data.table_batches import Batch

# The parts of a KeyedJaggedTensor.
_VALUES, _LENGTHS, _WEIGHTS = ".values", ".lengths", ".weights"


def scoring_tensors(model: RequestModel, batch: Batch) -> dict[str, Tensor]:
    """Return what an exported program reads of a batch.

    These are the batch's fields that `model.inputs.fields` names, without labels and weights of rows. A KeyedJaggedTensor stands
    there as `features.values`, `features.lengths` and, where it has some, `features.weights`, key by key in the order of
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
    return {name: of.clone() for name, of in found.items()}


def export_scores(model: RequestModel, batch: Batch) -> ExportedProgram:
    """Export the scores of candidates.

    The program takes tensors, as of `scoring_tensors`, and returns by task the logits of the candidates, float32 `[S]`. Numbers
    of requests, candidates and events may be others in each call: there is one request at least, which may have no candidate and
    no event. It is in eval mode, without gradients, on the device of the model.

    Who loads it with `torch.export.load` imports `jagged.ops` and `fbgemm_gpu` first, whose operators it has. `write_package`
    makes a package of it that needs torch alone.

    Args:
        model: as trained; it stays as it is.
        batch: an example, of one request or more; it is saved with the program.

    Raises:
        ValueError: an example without requests, or one that lacks a field or key.
    """
    from torch.export import Dim, export
    from torch.fx.experimental import _config

    if not len(batch):
        raise ValueError("batch: got no requests, expected an example of at least one")
    example = scoring_tensors(model, moved(batch, model.device))
    sizes = {name: {0: Dim.DYNAMIC} for name in example}
    # PyTorch takes sizes of 0 and 1 for special, unless it is told not to.
    with evaluating(model), torch.no_grad(), _config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        return export(_Scores(model), (example,), dynamic_shapes=(sizes,))


def write_package(program: ExportedProgram, path: str | os.PathLike[str]) -> None:
    """Compile exported scores into a package that runs without jagged and TorchRec, by `torch._inductor.aoti_load_package`.

    Samples are padded to a batch's longest one in it, as `jagged.ops.decomposed` says: it is for batches of requests that wait
    for their scores, not for training's.

    Args:
        program: of `export_scores`, of a model on the CPU.
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

    def forward(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
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
