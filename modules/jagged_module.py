"""The base of the modules."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from torch import nn
from torch.fx import Proxy, Tracer
from torchrec.distributed.types import ShardedModule
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface, EmbeddingCollectionInterface

_COLLECTIONS = (EmbeddingBagCollectionInterface, EmbeddingCollectionInterface, ShardedModule)


class JaggedModule(nn.Module):
    """Base of the modules: a leaf of every symbolic trace, with options to show and weights to draw again.

    Where `torch.fx` traces a model, a call of the module is recorded as one `call_module`, whatever the tracer takes for a leaf:
    by `torch.fx.symbolic_trace`, TorchRec's tracer and TorchRec's pipelines, inside an `nn.ModuleList` too. A module that holds
    an embedding collection is traced through instead, for a pipeline has to see the lookup.

    Attributes:
        shown: names of the attributes that `repr` shows, beside the children.

    Example:
        >>> import torch
        >>> from torch import Tensor, nn
        >>> from torchrec.sparse.jagged_tensor import JaggedTensor
        >>> from jagged.modules import JaggedModule, with_values
        >>> class Scale(JaggedModule):
        ...     shown = ("factor",)
        ...     def __init__(self, factor: float) -> None:
        ...         super().__init__()
        ...         self.factor = factor
        ...     def forward(self, x: JaggedTensor) -> JaggedTensor:
        ...         return with_values(x, self.factor * x.values())
        >>> model = nn.Sequential(Scale(2.0), Scale(0.5))
        >>> [node.target for node in torch.fx.symbolic_trace(model).graph.nodes if node.op == "call_module"]
        ['0', '1']
        >>> Scale(2.0)
        Scale(factor=2.0)
    """

    shown: ClassVar[tuple[str, ...]] = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call `forward`, or record the call where it is traced."""
        tracer = _tracer_of((*args, *kwargs.values()))
        if tracer is None or any(isinstance(module, _COLLECTIONS) for module in self.modules()):
            return super().__call__(*args, **kwargs)

        def record(*args: Any, **kwargs: Any) -> Any:
            return tracer.create_proxy("call_module", tracer.path_of_module(self), args, kwargs)

        # The tracer keeps its own books of calls, and what it takes for a leaf itself it records itself.
        return tracer.call_module(self, record, args, kwargs)

    def reset_parameters(self) -> None:
        """Draw new weights in every part."""
        _reset(self.children())

    def extra_repr(self) -> str:
        """Show the options."""
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in self.shown)


def _reset(modules: Iterable[nn.Module]) -> None:
    for module in modules:
        reset = getattr(module, "reset_parameters", None)
        if reset is None:
            _reset(module.children())
        else:
            reset()


def _tracer_of(arguments: Iterable[Any]) -> Tracer | None:
    """Return what traces one of the arguments, or of the elements of a tuple, a list or a dictionary among them."""
    for argument in arguments:
        if isinstance(argument, Proxy):
            # Another tracer than those that walk through modules knows no paths of modules.
            return argument.tracer if isinstance(argument.tracer, Tracer) else None
        if isinstance(argument, (tuple, list, dict)):
            tracer = _tracer_of(argument.values() if isinstance(argument, dict) else argument)
            if tracer is not None:
                return tracer
    return None
