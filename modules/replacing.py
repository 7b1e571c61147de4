"""TorchRec's collections in a model exchanged for ours, with the same weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from jagged.modules.backward_updates import in_backward_optimizer
from jagged.modules.embedding_bags import ScheduledEmbeddingBagCollection
from jagged.modules.embedding_sequences import ScheduledEmbeddingCollection
from jagged.modules.shared_tables import put_together
from jagged.modules.trained_tables import TrainedTables

OPTIONS = ("optimizer", "optimizer_options", "output_dtype", "plan", "plan_mismatch")
OF_BAGS = ("plan", "plan_mismatch")


def replace_embeddings(module: nn.Module, **options: Any) -> nn.Module:
    """Exchange every collection of embeddings in a model for ours, with the same weights.

    An `EmbeddingBagCollection` becomes a `ScheduledEmbeddingBagCollection`, an `EmbeddingCollection` a
    `ScheduledEmbeddingCollection`. The new modules take over the parameters themselves, whose values are copied once, table after
    table, into one storage: an optimizer that was made before, names and state dicts stay right. Collections that have a
    parameter in common go on to have it, as `share_tables` says. Subclasses, which may do something else, stay as they are.

    Args:
        module: a model, changed in place, or a collection.
        options: `optimizer`, `optimizer_options` and `output_dtype`, of both; `plan` and `plan_mismatch` of
            `ScheduledEmbeddingBagCollection`.

    Returns:
        The model; for a collection what takes its place.

    Raises:
        TypeError: another option.
        ValueError: a collection that ours does not take, or one with an optimizer of `apply_optimizer_in_backward` beside
            `optimizer`.

    Example:
        >>> from torch import nn
        >>> from torchrec.modules.embedding_configs import EmbeddingBagConfig
        >>> from torchrec.modules.embedding_modules import EmbeddingBagCollection
        >>> from jagged.modules import replace_embeddings
        >>> table = EmbeddingBagConfig(name="item", embedding_dim=8, num_embeddings=100, feature_names=["clicked"])
        >>> model = nn.ModuleDict({"bags": EmbeddingBagCollection([table]), "over": nn.Linear(8, 1)})
        >>> type(replace_embeddings(model)["bags"]).__name__
        'ScheduledEmbeddingBagCollection'
    """
    if unknown := [name for name in options if name not in OPTIONS]:
        raise TypeError(f"{unknown[0]}: not an option; expected one of {', '.join(OPTIONS)}")
    done: dict[nn.Module, nn.Module] = {}
    result = _replaced(module, options, done)
    made = [new for old, new in done.items() if old is not new]
    # By the parameters as they were: those of one that is shared are still the same object.
    for together in _families([of for of in made if isinstance(of, TrainedTables)]):
        if len(together) > 1:
            put_together(together, lambda of, name: id(of._modules_of_tables[name].weight))
        else:
            together[0]._gather()
    return result


def _replaced(module: nn.Module, options: dict[str, Any], done: dict[nn.Module, nn.Module]) -> nn.Module:
    """The module in a module's place, the same one wherever the model has it."""
    if module not in done:
        done[module] = _scheduled(module, options)
        if done[module] is module:
            for name, child in module._modules.items():
                if child is not None:
                    module._modules[name] = _replaced(child, options, done)
    return done[module]


def _scheduled(module: nn.Module, options: dict[str, Any]) -> nn.Module:
    made: ScheduledEmbeddingBagCollection | ScheduledEmbeddingCollection
    if type(module) is EmbeddingBagCollection:
        bags = cast(EmbeddingBagCollection, module)
        made = ScheduledEmbeddingBagCollection(bags.embedding_bag_configs(), bags.is_weighted(), "meta", **options)
        tables = bags.embedding_bags
    elif type(module) is EmbeddingCollection:
        rows = cast(EmbeddingCollection, module)
        own = {name: option for name, option in options.items() if name not in OF_BAGS}
        made = ScheduledEmbeddingCollection(rows.embedding_configs(), "meta", rows.need_indices(), **own)
        tables = rows.embeddings
    else:
        return module
    if options.get("optimizer") is not None and (applied := in_backward_optimizer(module)) is not None:
        raise ValueError(
            f"module: got {applied[0]} of apply_optimizer_in_backward for {next(iter(tables))!r}, which would never run beside "
            f"optimizer={options['optimizer']!r}; leave one of them out"
        )
    for name, table in tables.items():
        made._modules_of_tables[name].weight = table.weight
    return made.train(module.training)


def _families(collections: Iterable[TrainedTables]) -> list[list[TrainedTables]]:
    """Collections that have a parameter in common, directly or by others between them."""
    families: list[list[TrainedTables]] = []
    for collection in collections:
        own = {id(table.weight) for table in collection._modules_of_tables.values()}
        met = [of for of in families if any(id(table.weight) in own for one in of for table in one._modules_of_tables.values())]
        families = [of for of in families if of not in met]
        families.append([*(one for of in met for one in of), collection])
    return families
