"""Operators whose arguments are declared once: schema, fake, autograd, autocast, backends and guards follow from the declaration.

A family's `spec.py` has NamedTuples of its tensors (`Inputs`), its plain numbers (`Options`) and its results (`Outputs`), and
calls `operator`. Implementations take and return these; nothing is found by its place among other arguments.

    class Inputs(NamedTuple):
        values: Differentiable
        offsets: Tensor
        weights: Differentiable | None

    class Options(NamedTuple):
        scale: float = 1.0

    class Outputs(NamedTuple):
        sums: Tensor

    SEGMENT_SUM = operator(
        "segment_sum", Inputs, Options, Outputs,
        shapes=lambda x, o: Outputs(x.values.new_empty(x.offsets.shape[0] - 1, x.values.shape[1])),
        torch="jagged.ops.segment_sum.torch_impl:forward,backward",
        triton="jagged.ops.segment_sum.triton.launch:forward,backward",
        autocast=("values", "weights"),
    )

    sums = SEGMENT_SUM(Inputs(values, offsets, weights), Options(scale), backend).sums

`forward(x, o) -> Outputs`, and `backward(grads, x, out, o, wanted) -> {name: gradient}`: `grads` is an `Outputs` of gradients,
each None where there is none, and `wanted` maps the names of the inputs whose gradients are needed to the dtypes of these (a
gradient in another dtype is converted). Such a backward is an operator of its own, `<name>_backward`, and refuses to be
differentiated. An operator whose gradient is made of other operators gives `gradient(grads, x, out, o, wanted, backend) -> {name:
gradient}` in its place; then gradients of any order are right.

`torch.func` may transform an operator: gradients as above, `vmap` by a loop; forward mode is refused.

How a call goes: where a mode, a tensor subclass, a transform, a tracer or a profiler may want to see the operator, it goes
through the dispatcher, and autograd has a function with `setup_context`. Otherwise the implementation is called at once, and
autograd has a function with `ctx`, which costs the host a third of that.
"""

from __future__ import annotations

import functools
import importlib
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Annotated, Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from jagged.ops._shared.backends import resolve_backend
from jagged.ops._shared.validation import autocast_dtype

_DIFFERENTIABLE, _ON_HOST = "differentiable", "on host"
_unwrap = torch._C._functorch.unwrap_if_dead
# Of a process that has tensors there, so that nobody need ask whether CUDA is initialised.
_current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
#: A tensor with a gradient, among inputs.
Differentiable = Annotated[Tensor, _DIFFERENTIABLE]
#: A tensor that stays on the host wherever the others are. Such inputs come last.
OnHost = Annotated[Tensor, _ON_HOST]

In = TypeVar("In", bound=tuple[Any, ...])
Op = TypeVar("Op", bound=tuple[Any, ...])
Out = TypeVar("Out", bound=tuple[Any, ...])
Gradients = Mapping[str, Tensor | None]

_Importer = Callable[[], Callable[..., Any]]
#: By backend what imports an implementation.
_Functions = Mapping[str, _Importer]
_SCHEMA: dict[Any, str] = {
    Tensor: "Tensor", bool: "bool", int: "SymInt", float: "float", int | float: "Scalar", str: "str", torch.dtype: "ScalarType",
}  # fmt: skip


#: Every operator by its name, as far as its family is imported.
OPERATORS: dict[str, Operator[Any, Any, Any]] = {}


class Absent(NamedTuple):
    """What a gradient knows of an input or output that was not `saved`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def _absent(tensor: Tensor) -> Absent:
    return Absent(tensor.shape, tensor.dtype, tensor.device)


class _Field(NamedTuple):
    """One field of a declaration: of which type, and whether it may be None, is a tuple of its type, gets a gradient, or stays on
    the host."""

    name: str
    kind: Any
    is_optional: bool
    is_many: bool
    is_differentiable: bool
    is_on_host: bool

    def schema(self, prefix: str = "", is_optional: bool = False) -> str:
        """Return the declaration of an argument."""
        kind = _SCHEMA[self.kind] + ("[]" if self.is_many else "?" if self.is_optional or is_optional else "")
        return f"{kind} {prefix}{self.name}"


def _fields(declaration: type) -> tuple[_Field, ...]:
    found = []
    for name, hint in typing.get_type_hints(declaration, include_extras=True).items():
        parts = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
        kinds = [part for part in parts if part is not types.NoneType]
        kind: Any = int | float if set(kinds) == {int, float} else kinds[0]
        is_many = typing.get_origin(kind) is tuple
        kind = typing.get_args(kind)[0] if is_many else kind
        marks = kind.__metadata__ if typing.get_origin(kind) is Annotated else ()
        kind = typing.get_args(kind)[0] if typing.get_origin(kind) is Annotated else kind
        if kind not in _SCHEMA:
            raise TypeError(f"{declaration.__name__}.{name}: expected one of {list(_SCHEMA.values())}, got {hint}")
        found.append(_Field(name, kind, len(parts) > len(kinds), is_many, _DIFFERENTIABLE in marks, _ON_HOST in marks))
    return tuple(found)


class Operator(Generic[In, Op, Out]):
    """A differentiable operator; made by `operator`, called with inputs, options and the backend that the user asked for."""

    def __init__(
        self, name: str, rules: _Rules, functions: _Functions, float64_on_triton: bool, implementations: tuple[str, str]
    ) -> None:
        self.name, self.rules, self.functions, self.float64_on_triton = name, rules, functions, float64_on_triton
        #: Paths of the PyTorch and of the Triton implementation.
        self.implementations = implementations
        #: The operator as the dispatcher knows it: inputs, options and the backend, one behind the other.
        self.dispatched = rules.dispatched
        self._function = _dispatched_function(name, rules)
        # `Function.apply` itself first asks whether there are transforms or a `setup_context`; here there are none.
        self._short = super(torch.autograd.Function, _short_function(name, rules)).apply  # type: ignore[misc]

    def __call__(self, x: In, o: Op, backend: str | None = None) -> Out:
        """Run.

        Raises:
            ValueError: tensors on different devices, or a backend that cannot serve these.
        """
        rules = self.rules
        if backend.__class__ is _Direct:
            return self.functions[backend]()(x, o)  # type: ignore[no-any-return, index]
        first, wants_grad, is_plain = None, False, True
        for tensor in (_spread(x) if rules.is_many else x)[: rules.end_on_device]:
            if tensor is None:
                continue
            if first is None:
                first, device = tensor, tensor.device
            elif tensor.device != device:
                self._refuse_devices(x, device)
            if tensor.requires_grad:
                wants_grad = True
            kind = type(tensor)
            if kind is not Tensor and kind is not Parameter:
                is_plain = False
        assert first is not None
        if forward_ad._current_level >= 0 and not torch.compiler.is_compiling():
            _refuse_tangents(x, o, rules)
        cast = _autocast_dtype(x, device.type, rules) if rules.autocast and torch._C._is_any_autocast_enabled() else None
        if cast is not None and not rules.casts_inside:
            # A step of the graph, which a second derivative would miss inside.
            x, cast = _cast(x, o, cast, rules), None
            first = next(tensor for tensor in (_spread(x) if rules.is_many else x) if tensor is not None)
        backend = resolve_backend(backend, first, float64_on_triton=self.float64_on_triton)
        if wants_grad:
            wants_grad = torch.is_grad_enabled()
        is_short = is_plain and not first.is_meta and not _is_watched()
        if (wants_grad and _needs_gradient(x, rules)) or (not is_short and rules.differentiable and _is_transformed()):
            if is_short:
                # What a transform left behind and has lost its graph counts as the tensor inside, as `Function.apply` has it.
                alive = [None if tensor is None else _unwrap(tensor) for tensor in _differentiable_of(x, rules)]
                results = self._short((x, o, first, backend, cast), *alive)
            else:
                # Dynamo refuses a function that is given one tensor twice.
                x = _each_once(x, rules.inputs) if torch.compiler.is_compiling() else x
                results = self._function.apply(*_spread(x), *o, backend, cast)
            return _outputs(results, rules)  # type: ignore[no-any-return]
        if cast is not None:
            x = _cast(x, o, cast, rules)
        if is_short and not wants_grad:
            return rules.run(first, backend, x, o)  # type: ignore[no-any-return]
        # An input without a gradient here may require one; no graph is made of what is done with it.
        with torch.no_grad() if wants_grad else nullcontext():
            if is_short:
                return rules.run(first, backend, x, o)  # type: ignore[no-any-return]
            results = rules.dispatched(*x, *o, backend)
        return _outputs(results, rules)  # type: ignore[no-any-return]

    def _refuse_devices(self, x: In, device: torch.device) -> None:
        given = dict(zip(self.rules.inputs._fields, x[: self.rules.end_on_device], strict=False))  # type: ignore[attr-defined]
        names = [name for name, value in given.items() if value is not None]
        for name, value in given.items():
            for tensor in _each(value):
                if tensor is not None and tensor.device != device:
                    raise ValueError(
                        f"{name}: expected the device of {names[0]}, {device}, got {tensor.device}; move it with .to(...)"
                    )


class _Rules(NamedTuple):
    """What both ways of a call know of an operator."""

    inputs: type
    options: type
    outputs: type
    num_inputs: int
    end_on_device: int | None  # of the inputs, counted from behind: the first that stays on the host
    is_many: bool  # the first field of inputs is a tuple of tensors
    gives_many: bool  # the only field of outputs is one
    fields: tuple[str, ...]  # of inputs, then of outputs
    differentiable: tuple[str, ...]
    places: tuple[int, ...]  # of the differentiable among the inputs
    autocast: tuple[str, ...] | Callable[[Any], Iterable[str]]
    promotes: bool  # autocast's dtype is the widest of theirs
    casts_inside: bool
    saved: tuple[str, ...] | Callable[[Any], Iterable[str]]
    unchecked: tuple[str, ...] | Callable[[Any], Iterable[str]]
    plan: _Plan | None  # None where it depends on the options
    title: str | Callable[[Any], str]
    run: Callable[..., Any]
    dispatched: Callable[..., Any]
    run_backward: Callable[..., Gradients] | None
    dispatched_backward: Callable[..., Any] | None
    gradient: Callable[..., Gradients] | None
    is_first_order: bool
    extra: tuple[str, ...]
    finish: Callable[..., Gradients] | None


def operator(
    name: str,
    inputs: type[In],
    options: type[Op],
    outputs: type[Out],
    *,
    shapes: Callable[[In, Op], Out],
    torch: str,
    triton: str,
    gradient: Callable[..., Gradients] | None = None,
    is_first_order: bool | None = None,
    saved: Iterable[str] | Callable[[Op], Iterable[str]] | None = None,
    unchecked: Iterable[str] | Callable[[Op], Iterable[str]] = (),
    autocast: Iterable[str] | Callable[[Op], Iterable[str]] = (),
    promotes: Iterable[str] = (),
    mutates: Iterable[str] = (),
    title: str | Callable[[Op], str] | None = None,
    gradient_shapes: Callable[..., Gradients] | None = None,
    extra: Iterable[str] = (),
    finish: Callable[..., Gradients] | None = None,
    float64_on_triton: bool = False,
) -> Operator[In, Op, Out]:
    """Define `jagged::<name>`, and `jagged::<name>_backward` where a backward is given, and return what calls it.

    Args:
        name: operator name without namespace.
        inputs: NamedTuple of tensors, `Tensor`, `Differentiable`, either with `| None`; or the first field alone a tuple of them.
        options: NamedTuple of numbers, strings and dtypes, each also `| None` or `tuple[..., ...]`; `int | float` keeps its kind.
        outputs: NamedTuple of tensors; without fields for an operator that mutates; or of one tuple of tensors, which is not
            saved and whose gradients are made of operators.
        shapes: `(x, o) -> outputs` of the right shapes, dtypes and devices, made without reading a value.
        torch: the PyTorch implementation, `"package.module:forward"` or `"package.module:forward,backward"`, imported when it is
            first run. It runs on the device of the tensors, which need not be the current one.
        triton: the Triton implementation, alike. Machines without Triton never meet it.
        gradient: `(grads, x, out, o, wanted, backend) -> {name: gradient}`, made of differentiable operators.
        is_first_order: refuse a second derivative; None: where backward is an operator. A `gradient` of a first-order operator is
            called without a graph.
        saved: names of inputs and outputs that the gradient reads, or a function of the options that gives them; None: all. In a
            `gradient` the others are `Absent`, in a backward None.
        unchecked: names of saved inputs that may have changed in place when the gradient reads them, or a function of the options
            that gives them.
        autocast: names of inputs that are cast to autocast's dtype, or a function of the options that gives them. Gradients come
            back in the inputs' own dtypes.
        promotes: names of inputs that under autocast are cast to the widest of their dtypes, in place of `autocast`.
        mutates: names of inputs that are changed in place.
        title: what messages call the operator, or a function of the options that gives it; None: its name.
        gradient_shapes: `(grads, x, out, o, wanted) -> {name: tensor}`, of a backward whose gradients have other shapes than
            their inputs, or whose inputs are not saved.
        extra: names of further tensors that a backward returns, for `finish`.
        finish: `(found, x, o, wanted) -> {name: gradient}` of what a backward returned, outside of the operator.
        float64_on_triton: the kernels move float64 as they are, or compute in it.

    Source:
        `torch.library`'s contract of custom operators, PyTorch 2.11.
    """
    of_inputs, of_options, of_outputs = _fields(inputs), _fields(options), _fields(outputs)
    count, is_many = len(of_inputs), bool(of_inputs) and of_inputs[0].is_many
    differentiable = tuple(field.name for field in of_inputs if field.is_differentiable)
    mutates, extra, promotes = tuple(mutates), tuple(extra), tuple(promotes)
    forwards, backwards = zip(*(_functions_of(path) for path in (torch, triton)), strict=True)
    has_backward = backwards[0] is not None
    is_first_order = has_backward if is_first_order is None else is_first_order
    if has_backward != (backwards[1] is not None) or (has_backward and gradient is not None):
        raise TypeError(f"{name}: expected a backward of both backends, or a gradient made of operators, or neither")
    if gives_many := any(field.is_many for field in of_outputs):
        is_kept = saved is None or callable(saved) or of_outputs[0].name in saved
        if len(of_outputs) > 1 or gradient is None or is_kept:
            raise TypeError(f"{name}: expected a tuple of outputs alone, not saved, and a gradient made of operators")
    every = [field.name for field in (*of_inputs, *of_options, *of_outputs)]
    if shared := {field for field in every if every.count(field) > 1}:
        raise TypeError(f"{name}: expected other names for outputs than for inputs and options, got {sorted(shared)} twice")
    names: tuple[str, ...] = inputs._fields + outputs._fields  # type: ignore[attr-defined]
    on_host = [place for place, field in enumerate(of_inputs) if field.is_on_host]
    if on_host and on_host != list(range(on_host[0], count)):
        raise TypeError(f"{name}: expected inputs that stay on the host behind all others")
    saved = names if saved is None else saved if callable(saved) else tuple(saved)
    unchecked = unchecked if callable(unchecked) else tuple(unchecked)

    aliases = {field: f"Tensor({chr(ord('a') + place)}!)" for place, field in enumerate(mutates)}
    arguments = [
        f"{aliases[f.name]}{'?' if f.is_optional else ''} {f.name}" if f.name in aliases else f.schema() for f in of_inputs
    ]
    arguments += [*(f.schema() for f in of_options), "str backend"]
    returns = ", ".join("Tensor[]" if f.is_many else "Tensor" for f in of_outputs)

    def packed(flat: tuple[Any, ...]) -> tuple[Any, Any, str]:
        """Return inputs, options and the backend from the dispatcher's arguments."""
        return inputs(*_tuples(flat[:count])), options(*_tuples(flat[count:-1])), flat[-1]

    functions: _Functions = {"torch": forwards[0], "triton": forwards[1]}
    run = _implementation(functions)

    def implementation(*flat: Any) -> Any:
        x, o, backend = packed(flat)
        first = next(tensor for tensor in _spread(x) if tensor is not None)
        return _returned(run(first, backend, x, o))

    def fake(*flat: Any) -> Any:
        x, o, _ = packed(flat)
        return _returned(shapes(x, o))

    dispatched = _define(name, f"({', '.join(arguments)}) -> ({returns})", implementation, fake, is_many=is_many)
    run_backward = dispatched_backward = None
    if has_backward:
        run_backward = _implementation({"torch": backwards[0], "triton": backwards[1]})
        dispatched_backward = _define_backward(
            name,
            (of_inputs, of_options, of_outputs),
            (inputs, options, outputs),
            differentiable,
            extra,
            run_backward,
            gradient_shapes,
        )
    rules = _Rules(
        inputs=inputs,
        options=options,
        outputs=outputs,
        num_inputs=count,
        end_on_device=on_host[0] - count if on_host else None,
        is_many=is_many,
        gives_many=gives_many,
        fields=names,
        differentiable=differentiable,
        places=tuple(place for place, field in enumerate(of_inputs) if field.is_differentiable),
        autocast=tuple(promotes) or (autocast if callable(autocast) else tuple(autocast)),
        promotes=bool(promotes),
        casts_inside=is_first_order and not promotes,
        saved=saved,
        unchecked=unchecked,
        plan=None if callable(saved) or callable(unchecked) else _plan_of(names, saved, unchecked),
        title=title or name,
        run=run,
        dispatched=dispatched,
        run_backward=run_backward,
        dispatched_backward=dispatched_backward,
        gradient=gradient,
        is_first_order=is_first_order,
        extra=extra,
        finish=finish,
    )
    made: Operator[In, Op, Out] = Operator(name, rules, functions, float64_on_triton, (torch, triton))
    OPERATORS[name] = made
    return made


def _define_backward(
    name: str,
    fields: tuple[tuple[_Field, ...], ...],
    declarations: tuple[type, type, type],
    differentiable: tuple[str, ...],
    extra: tuple[str, ...],
    run: Callable[..., Gradients],
    shapes: Callable[..., Gradients] | None,
) -> Callable[..., Any]:
    """Define `<name>_backward`: gradients of outputs, inputs, outputs, options, a dtype for each wanted gradient, the backend."""
    of_inputs, of_options, of_outputs = fields
    inputs, options, outputs = declarations
    n, m = len(of_outputs), len(of_inputs)
    arguments = [
        *(f.schema("grad_", is_optional=True) for f in of_outputs),
        *(f.schema(is_optional=True) for f in of_inputs),
        *(f.schema(is_optional=True) for f in of_outputs),
        *(f.schema() for f in of_options),
        *(f"ScalarType? {field}_dtype" for field in differentiable),
        "str backend",
    ]

    def packed(flat: tuple[Any, ...]) -> tuple[Any, ...]:
        grads, x, out = outputs(*flat[:n]), inputs(*flat[n : n + m]), outputs(*flat[n + m : 2 * n + m])
        rest = flat[2 * n + m : -1]
        dtypes = rest[len(of_options) :]
        wanted = {field: dtype for field, dtype in zip(differentiable, dtypes, strict=True) if dtype is not None}
        return grads, x, out, options(*_tuples(rest[: len(of_options)])), wanted

    def returned(found: Gradients, like: Tensor) -> tuple[Tensor, ...]:
        given = (found.get(field) for field in (*differentiable, *extra))
        return tuple(like.new_empty(0) if gradient is None else gradient for gradient in given)

    def implementation(*flat: Any) -> Any:
        like = next(value for value in flat if isinstance(value, Tensor))
        grads, x, out, o, wanted = packed(flat)
        found = run(like, flat[-1], grads, x, out, o, wanted)
        if shapes is None:
            # What is promised below: generated code reads memory by it.
            found = {**found, **{field: _in(found[field], dtype) for field, dtype in wanted.items()}}
        return _returned(returned(found, like))

    def fake(*flat: Any) -> Any:
        grads, x, out, o, wanted = packed(flat)
        if shapes is not None:
            found = shapes(grads, x, out, o, wanted)
        else:
            found = {field: getattr(x, field).new_empty(getattr(x, field).shape, dtype=dtype) for field, dtype in wanted.items()}
        return _returned(returned(found, next(x for x in flat if isinstance(x, Tensor))))

    returns = ", ".join(["Tensor"] * len((*differentiable, *extra)))
    return _define(f"{name}_backward", f"({', '.join(arguments)}) -> ({returns})", implementation, fake)


def _define(
    name: str, schema: str, implementation: Callable[..., Any], fake: Callable[..., Any], *, is_many: bool = False
) -> Callable[..., Any]:
    def without_graph(*arguments: Any) -> Any:
        # An exported program calls an operator outside of its autograd function, where an implementation could not run.
        with torch.no_grad():
            return implementation(*arguments)

    qualified = f"jagged::{name}"
    torch.library.define(qualified, schema)
    torch.library.impl(qualified, ("cpu", "cuda"), without_graph)
    torch.library.register_fake(qualified, fake)
    defined: Callable[..., Any] = getattr(torch.ops.jagged, name).default
    if is_many:
        # PyTorch's loop over a batch takes no tuples of tensors.
        torch.library.register_vmap(qualified, functools.partial(_one_by_one, defined))
    return defined


def _one_by_one(run: Callable[..., Any], info: Any, axes: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
    """Run an operator for each of a batch, which tensors have along an axis of theirs, or None, and stack the results."""
    leaves, structure = tree_flatten(arguments)
    results = []
    for number in range(info.batch_size):
        own = [leaf if axis is None else leaf.select(axis, number) for leaf, axis in zip(leaves, tree_leaves(axes), strict=True)]
        results.append(tree_flatten(run(*tree_unflatten(own, structure))))
    stacked = [torch.stack(of) for of in zip(*[flat for flat, _ in results], strict=True)]
    return tree_unflatten(stacked, results[0][1]), tree_unflatten([0] * len(stacked), results[0][1])


def _functions_of(path: str) -> tuple[_Importer, _Importer | None]:
    """Return what imports the forward and the backward that a path names."""
    module, _, names = path.partition(":")

    def importer(name: str) -> _Importer:
        @functools.cache
        def found() -> Callable[..., Any]:
            function: Callable[..., Any] = getattr(importlib.import_module(module), name)
            return function

        return found

    forward, _, backward = names.partition(",")
    return importer(forward), importer(backward) if backward else None


class _Direct(str):
    """The backend of operators inside of an eager gradient that nothing watches: their implementations are called at once."""


_DIRECT = {name: _Direct(name) for name in ("torch", "triton")}


def _implementation(functions: _Functions) -> Callable[..., Any]:
    """Return `(tensor, backend, *arguments)`: an implementation, outside of autocast and on the device of the tensor."""

    def run(tensor: Tensor, backend: str, *arguments: Any) -> Any:
        function = functions[backend]()
        # A guard costs more than the question whether it is needed.
        if tensor.is_cuda and tensor.get_device() != _current_device():
            with torch.cuda.device_of(tensor), torch.autocast("cuda", enabled=False):
                return function(*arguments)
        if torch._C._is_any_autocast_enabled():
            kind = tensor.device.type
            if kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind):
                with torch.autocast(kind, enabled=False):
                    return function(*arguments)
        return function(*arguments)

    return run


def _short_function(name: str, rules: _Rules) -> type[torch.autograd.Function]:
    """Return the function of eager calls: what is differentiated are its arguments, all else is one."""
    num_inputs, names, run_backward = rules.num_inputs, rules.differentiable, rules.run_backward
    has_many = rules.is_many or rules.gives_many

    def forward(ctx: Any, call: tuple[Any, Any, Tensor, str, torch.dtype | None], *tensors: Tensor | None) -> Any:
        x, o, first, backend, cast = call
        ctx.set_materialize_grads(False)
        if cast is not None:
            x = _cast(x, o, cast, rules)
        out = rules.run(first, backend, x, o)
        _keep(ctx, rules, x, o, out, backend, [None if tensor is None else tensor.dtype for tensor in tensors])
        return out[0] if len(out) == 1 else tuple(out)

    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        needs = ctx.needs_input_grad[1:]
        given = [grad for grad in grads if grad is not None]
        if has_many or torch.is_grad_enabled() or not given or True not in needs:
            return None, *_gradients(ctx, rules, grads, needs, is_direct=True)
        # As there, without what costs the host time.
        kept, places, o, backend, dtypes = ctx.kept
        values = [*kept]
        for place, tensor in zip(places, ctx.saved_tensors, strict=True):
            values[place] = tensor
        x, out, of_outputs = rules.inputs(*values[:num_inputs]), rules.outputs(*values[num_inputs:]), rules.outputs(*grads)
        wanted = {name: dtype for name, need, dtype in zip(names, needs, dtypes, strict=True) if need}
        if run_backward is None:
            found = _composed(rules, given[0], of_outputs, x, out, o, wanted, _direct(backend, given))
        else:
            found = run_backward(given[0], backend, of_outputs, x, out, o, wanted)
            if rules.finish is not None:
                found = rules.finish(found, x, o, wanted)
        return None, *[
            _in(found.get(name), dtype) if need else None for name, need, dtype in zip(names, needs, dtypes, strict=True)
        ]

    return _function(f"{name}_eager", forward=forward, backward=backward)


def _dispatched_function(name: str, rules: _Rules) -> type[torch.autograd.Function]:
    """Return the function of compilers and transforms: `(*inputs, *options, backend, dtype of autocast)`, all flat."""
    fixed = rules.num_inputs - rules.is_many
    # Of each differentiable input its place, counted from the first behind the many.
    places = tuple(rules.inputs._fields.index(field) - rules.is_many for field in rules.differentiable)  # type: ignore[attr-defined]
    num_options = len(rules.options._fields)  # type: ignore[attr-defined]

    def unpacked(flat: tuple[Any, ...]) -> tuple[Any, Any, str, torch.dtype | None]:
        many = len(flat) - fixed - num_options - 2
        values = (flat[:many], *flat[many : many + fixed]) if rules.is_many else flat[: rules.num_inputs]
        return rules.inputs(*values), rules.options(*flat[many + fixed : -2]), flat[-2], flat[-1]

    def forward(*flat: Any) -> Any:
        x, o, backend, cast = unpacked(flat)
        results = rules.dispatched(*_cast(x, o, cast, rules), *o, backend)
        return tuple(results) if isinstance(results, list) else results

    def setup_context(ctx: Any, flat: tuple[Any, ...], output: Any) -> None:
        x, o, backend, cast = unpacked(flat)
        ctx.set_materialize_grads(False)
        dtypes = [None if tensor is None else tensor.dtype for tensor in _differentiable_of(x, rules)]
        out = _outputs(output, rules)
        _keep(ctx, rules, _cast(x, o, cast, rules), o, out, backend, dtypes)

    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        many = len(ctx.needs_input_grad) - fixed - num_options - 2
        at = [range(many) if place < 0 else (many + place,) for place in places]
        needs = [ctx.needs_input_grad[place] for group in at for place in group]
        found = iter(_gradients(ctx, rules, grads, needs, is_direct=False))
        results: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        for group in at:
            for place in group:
                results[place] = next(found)
        return tuple(results)

    found = _function(f"{name}_traced", forward=forward, setup_context=setup_context, backward=backward)
    # The operators inside are run for one after the other.
    found.generate_vmap_rule = True
    return found


def _function(name: str, **methods: Callable[..., Any]) -> type[torch.autograd.Function]:
    return type(name, (torch.autograd.Function,), {key: staticmethod(method) for key, method in methods.items()})


class _Plan(NamedTuple):
    """Places of the fields, of inputs and then of outputs, that autograd keeps, that are kept unchecked, and of the others."""

    saved: tuple[int, ...]
    unchecked: tuple[int, ...]
    others: tuple[int, ...]


def _plan_of(fields: tuple[str, ...], saved: tuple[str, ...], unchecked: tuple[str, ...]) -> _Plan:
    """Return the plan for the names of what is saved and of what is unchecked."""
    places = range(len(fields))
    kept = tuple(place for place in places if fields[place] in saved and fields[place] not in unchecked)
    of_unchecked = tuple(place for place in places if fields[place] in unchecked)
    return _Plan(kept, of_unchecked, tuple(place for place in places if place not in kept and place not in of_unchecked))


_known_plan_of = functools.cache(_plan_of)


def _plan(rules: _Rules, o: Any) -> _Plan:
    """Return the plan of a call."""
    saved = tuple(rules.saved(o)) if callable(rules.saved) else rules.saved
    unchecked = tuple(rules.unchecked(o)) if callable(rules.unchecked) else rules.unchecked
    # Dynamo takes no cached function.
    return (_plan_of if torch.compiler.is_compiling() else _known_plan_of)(rules.fields, saved, unchecked)


def _keep(ctx: Any, rules: _Rules, x: Any, o: Any, out: Any, backend: str, dtypes: list[torch.dtype | None]) -> None:
    """Keep what the gradient reads: tensors with autograd, which frees them and sees changes in place, the rest on `ctx`."""
    values = (*x, *out)
    places, unchecked, others = rules.plan or _plan(rules, o)
    kept: list[Any] = [None] * len(values)
    for place in unchecked:
        kept[place] = values[place]
    if rules.gradient is not None:
        for place in others:
            if (value := values[place]) is not None:
                kept[place] = tuple([_absent(tensor) for tensor in value]) if type(value) is tuple else _absent(value)
    if rules.is_many and places and not places[0]:
        # A tuple of tensors comes last.
        places = places[1:]
        ctx.save_for_backward(*[values[place] for place in places], *values[0])
    else:
        ctx.save_for_backward(*[values[place] for place in places])
    ctx.kept = kept, places, o, backend, dtypes


def _gradients(
    ctx: Any, rules: _Rules, grads: tuple[Tensor | None, ...], needs: Sequence[bool], *, is_direct: bool
) -> Sequence[Tensor | None]:
    """Return the gradient of each differentiable tensor, None where it is not needed."""
    given = [grad for grad in grads if grad is not None]
    if not given or True not in needs:
        return [None] * len(needs)
    kept, places, o, backend, dtypes = ctx.kept
    values, tensors = list(kept), ctx.saved_tensors
    for place, tensor in zip(places, tensors, strict=False):
        values[place] = tensor
    if rules.is_many and len(tensors) > len(places):
        values[0] = tuple(tensors[len(places) :])
    x, of_outputs = rules.inputs(*values[: rules.num_inputs]), _outputs(grads, rules)
    out = rules.outputs(*values[rules.num_inputs :])
    names = rules.differentiable
    if rules.is_many:
        names = tuple([name for name in names for _ in _each(getattr(x, name))])
    wanted: dict[str, torch.dtype] = {name: dtype for name, need, dtype in zip(names, needs, dtypes, strict=True) if need}
    is_differentiated = torch.is_grad_enabled()
    if not rules.is_first_order:
        backend = backend if is_differentiated or not is_direct else _direct(backend, given)
        found = _composed(rules, given[0], of_outputs, x, out, o, wanted, backend)
    else:
        with torch.no_grad():
            if rules.gradient is not None:
                found = _composed(rules, given[0], of_outputs, x, out, o, wanted, backend)
            elif is_direct:
                assert rules.run_backward is not None
                found = rules.run_backward(given[0], backend, of_outputs, x, out, o, wanted)
            else:
                assert rules.dispatched_backward is not None
                of_wanted = [wanted.get(name) for name in rules.differentiable]
                results = rules.dispatched_backward(*grads, *x, *out, *o, *of_wanted, backend)
                results = results if isinstance(results, (tuple, list)) else (results,)
                found = dict(zip((*rules.differentiable, *rules.extra), results, strict=True))
            if rules.finish is not None:
                found = rules.finish(found, x, o, wanted)
    flat: list[Tensor | None] = []
    for name in rules.differentiable:
        gradient = found.get(name)
        flat.extend([None] * names.count(name) if gradient is None else _each(gradient))
    converted = [_in(gradient, dtype) if need else None for gradient, need, dtype in zip(flat, needs, dtypes, strict=True)]
    # A compiled backward is refused a second derivative by the compiler itself.
    if rules.is_first_order and is_differentiated and not torch.compiler.is_compiling():
        handed = [gradient for gradient in converted if gradient is not None]
        read = [
            (tensor, need) for tensor, need in zip(_differentiable_of(x, rules), needs, strict=True) if isinstance(tensor, Tensor)
        ]
        sources = [tensor for tensor, _ in read if tensor.requires_grad]
        if any(need and not tensor.requires_grad for tensor, need in read):
            # Autocast's copy of an input has no graph; this stands for it.
            sources.append(given[0].new_empty(0).requires_grad_())
        guarded = iter(_FirstOrder.apply(_title(rules, o), len(handed), *handed, *given, *sources))
        converted = [None if gradient is None else next(guarded) for gradient in converted]
    return converted


class _FirstOrder(torch.autograd.Function):
    """Hand gradients on; differentiating them again is an error, where a constant would be silently wrong.

    Behind the gradients come the tensors that they depend on, so that the error comes exactly where a second derivative is asked
    for. `once_differentiable` says nothing where the incoming gradient is a constant, as in a gradient penalty.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(title: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        # A sparse gradient has no views.
        return tuple(tensor.detach() if tensor.is_sparse else tensor.view_as(tensor) for tensor in tensors[:count])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.title = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(f"{ctx.title} has no second derivative; for one, use torch's own operations on padded tensors")


def _composed(
    rules: _Rules, given: Tensor, grads: Any, x: Any, out: Any, o: Any, wanted: dict[str, torch.dtype], backend: str
) -> Gradients:
    """Return gradients made of other operators, which autocast is not to cast again; `given` is one of `grads`."""
    assert rules.gradient is not None
    if torch._C._is_any_autocast_enabled():
        kind = given.device.type
        if kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind):
            with torch.autocast(kind, enabled=False):
                return rules.gradient(grads, x, out, o, wanted, backend)
    return rules.gradient(grads, x, out, o, wanted, backend)


def _direct(backend: str, given: list[Tensor]) -> str:
    """Return the backend for operators without a graph: `_Direct` where these gradients need no guard and nothing watches."""
    for tensor in given:
        if type(tensor) is not Tensor or tensor.is_meta or (tensor.is_cuda and tensor.get_device() != _current_device()):
            return backend
    return backend if _is_watched() else _DIRECT[backend]


def _in(gradient: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return gradient if gradient is None or gradient.dtype == dtype else gradient.to(dtype)


def _each(value: Any) -> tuple[Any, ...]:
    """Return the tensors of a field: of one that is no tuple itself, which may be None."""
    return value if type(value) is tuple else (value,)


def _spread(x: Any) -> tuple[Any, ...]:
    """Return inputs with the tensors of their first field, where it is a tuple, in its place."""
    return (*x[0], *x[1:]) if x and type(x[0]) is tuple else tuple(x)


def _tuples(options: Sequence[Any]) -> list[Any]:
    """Return options with tuples where the dispatcher makes lists."""
    return [tuple(option) if isinstance(option, list) else option for option in options]


def _returned(results: Any) -> Any:
    """Return outputs as operators do: the one alone, several in a tuple, none as None."""
    return results[0] if len(results) == 1 else tuple(results) if results else None


def _outputs(results: Any, rules: _Rules) -> Any:
    """Return outputs from what the dispatcher or autograd's function gives."""
    if isinstance(results, Tensor):
        return rules.outputs(results)
    if rules.gives_many:
        return rules.outputs(tuple(results))
    return rules.outputs(*(() if results is None else results))


def _cast(x: Any, o: Any, dtype: torch.dtype | None, rules: _Rules) -> Any:
    """Return inputs with those that autocast casts in its dtype, which leaves float64 and integers as they are."""
    if dtype is None:
        return x
    names = rules.autocast(o) if callable(rules.autocast) else rules.autocast
    return x._replace(**{name: _to(getattr(x, name), dtype) for name in names})


def _to(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, tuple):
        return tuple(_to(tensor, dtype) for tensor in value)
    if value is None or value.dtype == torch.float64 or not value.dtype.is_floating_point:
        return value
    return value.to(dtype)


def _autocast_dtype(x: Any, device: str, rules: _Rules) -> torch.dtype | None:
    """Return the dtype that autocast gives the inputs named in a declaration; None where it is off."""
    dtype = autocast_dtype(device)
    if dtype is None or not rules.promotes:
        return dtype
    assert not callable(rules.autocast)
    widest = None
    for name in rules.autocast:
        for tensor in _each(getattr(x, name)):
            if tensor is not None:
                widest = tensor.dtype if widest is None else torch.promote_types(widest, tensor.dtype)
    return widest


def _needs_gradient(x: Any, rules: _Rules) -> bool:
    return True in [tensor is not None and tensor.requires_grad for tensor in _differentiable_of(x, rules)]


def _differentiable_of(x: Any, rules: _Rules) -> list[Tensor | None]:
    """Return the tensors that may get a gradient, in the order of their fields."""
    if rules.is_many:
        return [tensor for place in rules.places for tensor in _each(x[place])]
    return [x[place] for place in rules.places]


def _refuse_tangents(x: Any, o: Any, rules: _Rules) -> None:
    """Refuse forward-mode derivatives, which an operator without one would take to be zero."""
    for tensor in _differentiable_of(x, rules):
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise RuntimeError(f"{_title(rules, o)} has no forward-mode derivative; take one by backward, as torch.func.vjp does")


def _title(rules: _Rules, o: Any) -> str:
    return rules.title if isinstance(rules.title, str) else rules.title(o)


def _is_watched() -> bool:
    """Tell whether a mode, a transform, a tracer, a compiler or a profiler may want to see the operator."""
    return bool(
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    )


def _is_transformed() -> bool:
    """Tell whether `torch.func` may ask for more of tensors than `requires_grad` says."""
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None


def _each_once(x: Any, inputs: type) -> Any:
    """Return inputs of which none is a tensor that stands there before; a second one is a view."""
    seen: list[Tensor] = []
    found: list[Any] = []
    for value in x:
        tensors = []
        for tensor in _each(value):
            if tensor is not None and any(tensor is other for other in seen):
                tensor = tensor.view_as(tensor)
            elif tensor is not None:
                seen.append(tensor)
            tensors.append(tensor)
        found.append(tuple(tensors) if type(value) is tuple else tensors[0])
    return inputs(*found)
