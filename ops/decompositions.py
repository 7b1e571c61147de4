"""Exported programs in PyTorch's own operators, for processes in which jagged is not."""

from __future__ import annotations

import functools
import importlib
import operator
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental import _config
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.torch_version import TorchVersion

from jagged.ops._shared.operator import OPERATORS

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_OURS = "jagged::"
# By operator what it is made of: nothing changes in place, and nothing looks at a value but for sizes. Of some the PyTorch
# implementation is so, too.
_BODIES = {
    "add_rows": "elementwise.decomposed:add_rows",
    "attention": "attention.decomposed:forward",
    "catalogue_topk": "catalogue_topk.decomposed:catalogue_topk",
    "concat": "conversion.decomposed:concat",
    "concat_two": "conversion.decomposed:concat_two",
    "grouped_linear": "grouped_linear.decomposed:grouped_linear",
    "jagged_activate": "elementwise.decomposed:activate",
    "jagged_cross": "elementwise.decomposed:cross",
    "jagged_dense_bmm": "bmm.decomposed:jagged_dense_bmm",
    "jagged_dense_combine": "elementwise.decomposed:combine",
    "jagged_jagged_bmm": "bmm.decomposed:jagged_jagged_bmm",
    "jagged_softmax": "softmax.decomposed:softmax",
    "layer_norm": "layer_norm.torch_impl:layer_norm",
    "linear": "_shared.linear:layer",
    "mix_groups": "grouped_linear.torch_impl:mix_groups",
    "pair_offsets": "_shared.offsets:scan",
    "pair_scores": "bmm.decomposed:pair_scores",
    "pair_sums": "bmm.decomposed:pair_sums",
    "split": "conversion.decomposed:split",
    "split_two": "conversion.decomposed:split_two",
    "take_part": "conversion.decomposed:take_part",
    "to_dense": "conversion.torch_impl:to_dense",
    "to_jagged": "conversion.decomposed:to_jagged",
}
# Those of operators whose kernels a package for a GPU takes over.
_KERNELS = {"attention": "attention.packaged:forward"}
# PyTorch 2.11 compiles `x[1:]` only where it knows that `x` has fewer rows than the largest integer.
_BOUNDS_SIZES = TorchVersion(torch.__version__) < "2.12"
_takes_kernels: ContextVar[bool] = ContextVar("takes_kernels", default=False)


@contextmanager
def with_kernels() -> Iterator[None]:
    """Let programs on a GPU that are taken apart meanwhile launch kernels of jagged, where PyTorch's operators are much slower.

    AOTInductor, called meanwhile too, writes these kernels into a package that runs without jagged. Such a program is not saved
    otherwise: it knows its kernels by their places in this process.

    Example:
        >>> from jagged.ops.decompositions import with_kernels
        >>> with with_kernels():
        ...     pass  # torch._inductor.aoti_compile_and_package(decomposed(program), package_path="scores.pt2")
    """
    from torch._inductor import config

    from jagged.ops._shared.packaged import whole_sources

    token = _takes_kernels.set(True)
    try:
        # Else Inductor tries its kernels on any numbers, among which are indexes and offsets of what is not there; so it runs the
        # whole program on the example, which writes into tensors where there are no gradients.
        with whole_sources(), config.patch({"triton.autotune_at_compile_time": False}), torch.no_grad():
            yield
    finally:
        _takes_kernels.reset(token)


def decomposed(program: ExportedProgram) -> ExportedProgram:
    """Return an exported program without operators of jagged: it is loaded, compiled and run where jagged is not installed.

    Jagged samples are padded to the longest one of a batch where they are multiplied with one another, so that its memory grows
    with batch size times longest sample; attention keeps the scores of all pairs of padded rows, and a ranked catalogue those of
    a sixteenth of its items. FBGEMM's running sum of lengths, which a `KeyedJaggedTensor` makes, is taken apart, too. Other
    libraries' operators stay.

    Args:
        program: of `torch.export.export`, on the CPU or a GPU, of a model in eval mode under `torch.no_grad()`; it stays as it
            is.

    Returns:
        Another program with the same inputs, outputs and weights, which it shares.

    Raises:
        ValueError: tensors on a device of another kind; an operator that cannot be taken apart: those of losses, of gradients
            and updates, of sparse outputs, tables of 8 bits, or one storage of several tables; dropout; or sizes that would be
            fixed.

    Example:
        >>> import torch
        >>> from jagged.ops import decomposed, jagged_softmax
        >>> class Weights(torch.nn.Module):
        ...     def forward(self, scores, offsets):
        ...         return jagged_softmax(scores, offsets)
        >>> example = torch.tensor([[1.0], [1.0], [5.0]]), torch.tensor([0, 2, 3])
        >>> program = decomposed(torch.export.export(Weights(), example))
        >>> program.module()(*example).flatten()
        tensor([0.5000, 0.5000, 1.0000])
        >>> any("jagged" in str(node.target) for node in program.graph.nodes)
        False
    """
    from jagged.ops.embedding_bag import decomposed as bags

    devices = {node.meta["val"].device.type for node in program.graph.nodes if isinstance(node.meta.get("val"), Tensor)}
    if others := devices - {"cpu", "cuda"}:
        raise ValueError(f"program: got tensors on {min(others)}, expected the CPU or a GPU; export the model from there")
    free = _free_sizes(program)
    with _with_numbers(program):
        # By the operators themselves: those of other libraries are known by name, and need not be there.
        table: dict[Any, Callable[..., Any]] = {}
        for target in _operators(program):
            name = target._schema.name
            if name == bags.NAME:
                table[target] = bags.pooled_tables
            elif name == "fbgemm::asynchronous_complete_cumsum":
                table[target] = _running_sum
            elif name == "aten::item":
                table[target] = torch.ops.aten._local_scalar_dense.default
            elif name.startswith(_OURS):
                if (own := name.removeprefix(_OURS)) not in _BODIES:
                    raise ValueError(
                        f"program: got {name}, expected operators that scoring needs; export the model in eval mode and without "
                        "its loss, or load the program where jagged.ops is imported"
                    )
                table[target] = functools.partial(_run, own)
        # PyTorch takes sizes of 0 and 1 for special, unless it is told not to, and would take sizes for fixed.
        with torch.no_grad(), warnings.catch_warnings(), _config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
            # PyTorch 2.13 copies with a class of which it says that it will go.
            warnings.filterwarnings("ignore", "`isinstance", FutureWarning)
            found = program.run_decompositions(table)
    if fixed := sum(map(operator.gt, free, _free_sizes(found))):
        raise ValueError(
            f"program: got {fixed} sizes that would be fixed at those of the example; export it under "
            "torch.fx.experimental._config.patch(backed_size_oblivious=True)"
        )
    return found


def _free_sizes(program: ExportedProgram) -> list[bool]:
    """Return for each size of a program's inputs whether it may be another one."""
    inputs = set(program.graph_signature.user_inputs)
    sizes = [size for node in program.graph.nodes if node.name in inputs for size in getattr(node.meta["val"], "shape", ())]
    return [isinstance(size, torch.SymInt) and bool(size.node.expr.free_symbols) for size in sizes]


def _operators(program: ExportedProgram) -> list[torch._ops.OpOverload]:
    """Return each of a program's operators once, the first one first."""
    targets = [node.target for node in program.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    return list(dict.fromkeys(targets))


@contextmanager
def _with_numbers(program: ExportedProgram) -> Iterator[None]:
    """Let bags know their layouts as numbers meanwhile."""
    from jagged.ops.embedding_bag import decomposed as bags

    kept = [(node, node.target, node.args) for node in program.graph.nodes if node.target is bags.OPERATOR]
    constants = _constants(program)
    try:
        for node, _, _ in kept:
            bags.put_numbers(node, constants)
        yield
    finally:
        for node, target, arguments in kept:
            node.target, node.args = target, arguments


def _constants(program: ExportedProgram) -> dict[Node, Tensor]:
    """Return the tensors that are no inputs of a call."""
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    values = {**program.state_dict, **program.constants}
    return {nodes[spec.arg.name]: values[spec.target] for spec in program.graph_signature.input_specs if spec.target in values}


def _run(name: str, *flat: Any) -> Any:
    """Call the body of an operator with the dispatcher's arguments."""
    rules = OPERATORS[name].rules
    values = [tuple(value) if isinstance(value, list) else value for value in flat]
    x, o = rules.inputs(*values[: rules.num_inputs]), rules.options(*values[rules.num_inputs : -1])
    for size in (size for value in flat if isinstance(value, Tensor) for size in value.shape if _BOUNDS_SIZES):
        if isinstance(size, torch.SymInt) and not free_unbacked_symbols(size):
            torch._check(size < 2**31)
    is_on_gpu = any(isinstance(value, Tensor) and value.is_cuda for value in flat)
    bodies = _BODIES | _KERNELS if is_on_gpu and _takes_kernels.get() else _BODIES
    module, _, function = bodies[name].partition(":")
    results = getattr(importlib.import_module(f"jagged.ops.{module}"), function)(x, o)
    if rules.gives_many:
        return list(results[0])
    return results[0] if len(results) == 1 else tuple(results)


def _running_sum(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0).to(lengths.dtype)])
