"""Ranking models on KeyedJaggedTensors, the tasks that train them, and the registry that builds them by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from jagged.config import ModelOptions, register_model
from jagged.versions import warn_of_problems

# Before torchrec is imported: versions that do not fit fail there, and not by saying why.
warn_of_problems()

from jagged.models.bert4rec import BERT4Rec  # noqa: E402
from jagged.models.dcnv2 import DCNv2  # noqa: E402
from jagged.models.din import DIN  # noqa: E402
from jagged.models.dlrm import DLRM  # noqa: E402
from jagged.models.dlrm_hstu import DLRMHSTU  # noqa: E402
from jagged.models.experts import PLE, EPNet, GateUnit, GroupedLinear, GroupedMLP, MMoE, PPNet  # noqa: E402
from jagged.models.features import RankingInputs  # noqa: E402
from jagged.models.heads import build_head, build_output  # noqa: E402
from jagged.models.hstu import HSTU  # noqa: E402
from jagged.models.interactions import (  # noqa: E402
    CrossNet,
    DotInteraction,
    FactorizationMachine,
    FeatureTokens,
    MaskBlock,
    MaskNet,
    Wukong,
    WukongLayer,
)
from jagged.models.item_sequences import ItemSequenceModel  # noqa: E402
from jagged.models.mixture import MixtureModel  # noqa: E402
from jagged.models.multilabel import MultiLabelModel, MultiLabelTask, SparseEncoder  # noqa: E402
from jagged.models.next_item import NextItemTask  # noqa: E402
from jagged.models.ranking import RankingModel  # noqa: E402
from jagged.models.request_model import RequestModel  # noqa: E402
from jagged.models.sasrec import SASRec  # noqa: E402
from jagged.models.serving import (  # noqa: E402
    best_items_tensors,
    export_best_items,
    export_scores,
    scoring_tensors,
    write_package,
)
from jagged.models.side_features import ItemFeatures  # noqa: E402
from jagged.models.task import RankingTask, Task, TaskOutput, TaskScores  # noqa: E402
from jagged.models.tasks import BinaryLoss, FocalLoss, ListwiseLoss, PairwiseLoss, TaskLoss, product_logits  # noqa: E402
from jagged.models.wukong import WukongModel  # noqa: E402

_MODELS: dict[str, Callable[..., nn.Module]] = {
    "bert4rec": BERT4Rec,
    "dcnv2": DCNv2,
    "din": DIN,
    "dlrm": DLRM,
    "dlrm-hstu": DLRMHSTU,
    "hstu": HSTU,
    "mmoe": MixtureModel,
    "multilabel": MultiLabelModel,
    "ranking": RankingModel,
    "sasrec": SASRec,
    "wukong": WukongModel,
}
#: Models of a table's requests by name.
REQUEST_MODELS: dict[str, type[RequestModel]] = {
    name: model for name, model in _MODELS.items() if isinstance(model, type) and issubclass(model, RequestModel)
}

__all__ = [
    "DIN",
    "DLRM",
    "DLRMHSTU",
    "HSTU",
    "PLE",
    "REQUEST_MODELS",
    "BERT4Rec",
    "BinaryLoss",
    "CrossNet",
    "DCNv2",
    "DotInteraction",
    "EPNet",
    "FactorizationMachine",
    "FeatureTokens",
    "FocalLoss",
    "GateUnit",
    "GroupedLinear",
    "GroupedMLP",
    "ItemFeatures",
    "ItemSequenceModel",
    "ListwiseLoss",
    "MMoE",
    "MaskBlock",
    "MaskNet",
    "MixtureModel",
    "MultiLabelModel",
    "MultiLabelTask",
    "NextItemTask",
    "PPNet",
    "PairwiseLoss",
    "RankingInputs",
    "RankingModel",
    "RankingTask",
    "RequestModel",
    "SASRec",
    "SparseEncoder",
    "Task",
    "TaskLoss",
    "TaskOutput",
    "TaskScores",
    "Wukong",
    "WukongLayer",
    "WukongModel",
    "best_items_tensors",
    "build",
    "build_head",
    "build_output",
    "export_best_items",
    "export_scores",
    "product_logits",
    "register",
    "scoring_tensors",
    "write_package",
]


def register(name: str, model: Callable[..., nn.Module], options: type[ModelOptions] | None = None) -> None:
    """Let `build`, and so `model.json` of a directory, know a model or task by a name.

    Args:
        name: what is written down in place of the class; code is never read from a directory.
        model: a class or function whose keyword arguments are plain numbers, words and lists of them.
        options: what `[model]` of a configuration takes with this name, so that `jagged.train` trains it. The model is built with
            `num_items`, `max_seq_len` and these options; like `SASRec` it takes a `device`, too, has a `config` of its arguments,
            an `item_weight`, and hidden states for a batch's events.

    Raises:
        ValueError: another one has the name, or the options have another one.
    """
    if options is not None:
        register_model(name, options)
    if _MODELS.setdefault(name, model) is not model:
        raise ValueError(f"name: got {name!r}, which is {_MODELS[name]!r} already; take another name")


def name_of(module: nn.Module) -> str | None:
    """The registered name of a module's class; None without one."""
    return next((name for name, model in _MODELS.items() if type(module) is model), None)


def build(name: str, **config: Any) -> Any:
    """Build a model by name, as `model.json` of a run directory records it.

    Raises:
        ValueError: an unknown name; the message lists the known ones.
    """
    if name not in _MODELS:
        raise ValueError(f"model: got {name!r}, expected one of {', '.join(sorted(_MODELS))}; jagged.models.register adds one")
    return _MODELS[name](**config)


def takes(name: str, argument: str) -> bool:
    """Whether the model of a name has such an argument."""
    return argument in inspect.signature(_MODELS[name]).parameters


def build_empty(name: str, **config: Any) -> Any:
    """The same on the meta device, so that weights cost no memory; what puts them on a device by itself is asked to."""
    if name in _MODELS and takes(name, "device"):
        config["device"] = "meta"
    with torch.device("meta"):
        return build(name, **config)
