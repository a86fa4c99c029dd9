"""The form of calls of traced programs, and the facts that a trace depends on."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from cutesuper.errors import DTypeError
from cutesuper.runtime.calling import Picker, picker
from cutesuper.torch.compile.watch import Watch, layout_of
from cutesuper.torch.internals import check_extents

_KIND = attrgetter("dtype", "shape")
_DEVICE = attrgetter("device")
_GRADIENT = attrgetter("requires_grad")
_USUAL = frozenset({torch.Tensor, nn.Parameter})


@dataclass(frozen=True)
class Form:
    """The form of the call with which a function was traced.

    Attributes:
        signature: of the function; None if it is unknown.
        places: the number of arguments given by place.
        names: of those that were given by name.
    """

    signature: inspect.Signature | None
    places: int
    names: frozenset[str]

    def fit(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The given arguments, by place and by name as in the call that was traced.

        Raises:
            TypeError: an argument is missing, or had been left to its default.
        """
        if len(args) == self.places and kwargs.keys() == self.names:
            return args, kwargs
        if self.signature is None:
            raise TypeError(
                f"it was traced with {self.places} argument(s) by place and "
                f"{sorted(self.names)} by name, and got {len(args)} and "
                f"{sorted(kwargs)}"
            )
        given = self.signature.bind(*args, **kwargs)
        given.apply_defaults()
        by_place = list(given.arguments)[: self.places]
        for name, value in given.arguments.items():
            traced = name in by_place or name in self.names
            if not traced and value is not self.signature.parameters[name].default:
                raise TypeError(f"the argument {name!r} was left to its default when it was traced")
        values = given.arguments
        return tuple(values[n] for n in by_place), {n: values[n] for n in sorted(self.names)}


def form_of(fn: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> Form:
    """The form of a call of a function."""
    try:
        signature = inspect.signature(fn.forward if isinstance(fn, nn.Module) else fn)
    except (TypeError, ValueError):  # functions written in C have none
        signature = None
    kinds = (p.kind for p in signature.parameters.values()) if signature else ()
    if any(k in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD) for k in kinds):
        signature = None
    return Form(signature, len(args), frozenset(kwargs or {}))


def as_written(fn: Callable[..., Any]) -> dict[str, str]:
    """The names of a function's parameters by those in lower case, as ``torch.export`` has them."""
    signature = form_of(fn, (), {}).signature
    names = list(signature.parameters) if signature else []
    lower = Counter(name.lower() for name in names)
    return {name.lower(): name for name in names if lower[name.lower()] == 1}


@dataclass(frozen=True)
class Border:
    """The arguments that a traced program takes.

    Attributes:
        form: of its calls.
        structure: of the arguments, by place and by name.
        kinds: element type and shape of each tensor among them, as it was traced.
        constants: the other ones, as facts.
        tensors, others: take them from the flat arguments.
        symbolic: the nodes that stand for the arguments, where extents may differ.
        ranges: of these extents.
    """

    form: Form
    structure: pytree.TreeSpec
    kinds: list[tuple[torch.dtype, torch.Size]]
    constants: list[Hashable]
    tensors: Picker
    others: Picker
    symbolic: tuple[fx.Node, ...] = ()
    ranges: Any = field(default_factory=dict[Any, Any])
    names: tuple[str, ...] = ()
    flat: bool = False

    def leaves(self, args: Any, kwargs: Any) -> Sequence[Any]:
        """The arguments as a flat sequence.

        Raises:
            TypeError, RuntimeError, DTypeError: they do not fit.
        """
        args, kwargs = self.form.fit(args, kwargs)
        if self.flat:
            leaves = (*args, *(kwargs[n] for n in self.names)) if kwargs else args
        else:
            leaves = self._flattened((args, kwargs))
        tensors = self.tensors(leaves)
        try:
            same = list(map(_KIND, tensors)) == self.kinds and not self.symbolic
        except AttributeError:
            same = False
        if not same:
            self._explain(leaves, tensors)
        if self.constants and list(map(constant_fact, self.others(leaves))) != self.constants:
            self._explain_constants(leaves)
        return leaves

    def _flattened(self, given: Any) -> list[Any]:
        leaves, found = pytree.tree_flatten(_in_order(given, self.structure))
        if found != self.structure:
            raise TypeError(f"they have the structure {found}, and had {self.structure}")
        return leaves

    def _explain(self, leaves: Sequence[Any], tensors: Sequence[Any]) -> None:
        """Raise for the first tensor that does not fit, if there is one."""
        names = self.tensors(self.paths)
        for name, t, (dtype, shape) in zip(names, tensors, self.kinds, strict=True):
            if not isinstance(t, torch.Tensor):
                raise TypeError(f"{name} is a {type(t).__name__}, and was a tensor")
            if t.dtype != dtype:
                raise DTypeError(f"{name} is {t.dtype}, must be {dtype}; convert it with .to()")
            if t.shape != shape and not self.symbolic:
                raise RuntimeError(f"{name} has shape {list(t.shape)}, must be {list(shape)}")
        if self.symbolic:
            check_extents(self.symbolic, self._paths, leaves, self.ranges)

    def _explain_constants(self, leaves: Sequence[Any]) -> None:
        given = zip(self.others(self.paths), self.others(leaves), self.constants, strict=True)
        for name, value, was in given:
            if constant_fact(value) != was:
                raise ValueError(f"{name} is {value!r:.60}, and was {was!s:.60}")

    @property
    def _paths(self) -> list[Any]:
        dummy = pytree.tree_unflatten([0] * self.structure.num_leaves, self.structure)
        return [path for path, _ in pytree.tree_flatten_with_path(dummy)[0]]

    @property
    def paths(self) -> list[str]:
        """Names of the flat arguments, for messages."""
        named = list(self.form.signature.parameters) if self.form.signature else []
        return [_name(path, named) for path in self._paths]


def border_of(
    form: Form, args: Any, kwargs: Any, symbolic: Sequence[fx.Node] = (), ranges: Any = None
) -> Border:
    """The arguments taken by a program that was traced with these."""
    leaves, structure = pytree.tree_flatten((args, kwargs))
    places = [i for i, v in enumerate(leaves) if isinstance(v, torch.Tensor)]
    others = [i for i, v in enumerate(leaves) if not isinstance(v, torch.Tensor)]
    given = (*args, *kwargs.values())
    return Border(
        form, structure, [_KIND(leaves[i]) for i in places],
        [constant_fact(leaves[i]) for i in others], picker(places), picker(others),
        tuple(symbolic), ranges, tuple(kwargs),
        flat=len(given) == len(leaves) and all(a is b for a, b in zip(given, leaves, strict=True)),
    )  # fmt: skip


def constant_fact(value: Any) -> Hashable:
    """An argument that is not a tensor, as a fact: equal facts have equal traces."""
    # 0.0 == -0.0, and nan is not nan
    return type(value), repr(value) if isinstance(value, float | complex) else value


def _in_order(value: Any, structure: pytree.TreeSpec) -> Any:
    """A value with the keys of its dictionaries in the order of another one."""
    children = children_of(structure)
    if structure.type is dict and type(value) is dict and value.keys() == set(structure.context):
        return {k: _in_order(value[k], c)
                for k, c in zip(structure.context, children, strict=True)}  # fmt: skip
    if (
        structure.type in (tuple, list)
        and type(value) is structure.type
        and (len(value) == len(children))
    ):
        return structure.type(_in_order(v, c) for v, c in zip(value, children, strict=True))
    return value


def children_of(structure: pytree.TreeSpec) -> list[pytree.TreeSpec]:
    """The parts of a structure, in old and new versions of PyTorch."""
    made: Any = structure
    return made.children() if hasattr(made, "children") else made.children_specs


def _name(path: Any, named: Sequence[str]) -> str:
    """``x[0]`` for a path such as ``[0][0][0]``, which goes to the first argument by place."""
    first, rest = path[1], pytree.keystr(path[2:])
    if not hasattr(first, "idx"):
        return f"{first.key}{rest}"
    return f"{named[first.idx] if first.idx < len(named) else f'argument {first.idx}'}{rest}"


# ---------------------------------------------------------------------------------------- one call


def state_of(tensors: Sequence[torch.Tensor], watch: Watch) -> tuple[Hashable, ...]:
    """State that a trace depends on besides types and shapes.
    Devices, tensors that are identical, modes that are switched on, and the precision of
    products."""
    kinds: Hashable = None
    if not _USUAL.issuperset(map(type, tensors)):
        kinds = tuple(map(_class_of, tensors))
    same: Hashable = None
    if len(set(map(id, tensors))) != len(tensors) or watch.has(tensors):
        same = _sameness(tensors, watch)
    asked: Hashable = None
    if watch.asks:
        asked = torch.is_grad_enabled(), *map(_GRADIENT, tensors)
    if watch.measures:
        asked = asked, *map(layout_of, tensors)
    return (
        *map(_DEVICE, tensors), kinds, same, asked,
        torch.get_default_dtype(), torch._C._is_any_autocast_enabled() and _autocast(),
        torch.get_float32_matmul_precision(),
    )  # fmt: skip


def _class_of(t: torch.Tensor) -> type:
    """The class of a tensor, if it is not one of PyTorch's own."""
    usual = type(t) in _USUAL or type(t).__module__.startswith("torch._subclasses")
    return torch.Tensor if usual else type(t)


def _sameness(tensors: Sequence[torch.Tensor], watch: Watch) -> Hashable:
    first = {id(t): i for i, t in reversed(list(enumerate(tensors)))}
    return tuple((first[id(t)], watch.place(t)) for t in tensors)


def _autocast() -> Hashable:
    return tuple(
        (device, torch.get_autocast_dtype(device))
        for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)
    )  # fmt: skip


def stand_ins(
    leaves: Sequence[Any], read: Sequence[torch.Tensor], shapes: Sequence[torch.Size] = ()
) -> list[Any]:
    """The arguments with no memory in common.
    Except those that are one tensor, or one that is read from elsewhere: a trace must not take one
    tensor for a part of another.

    Args:
        leaves: the flat arguments.
        read: tensors that are not arguments.
        shapes: of the tensors among the arguments, if they must differ from the given ones:
            ``torch.export`` takes an extent of 1 for a constant.
    """
    made: dict[int, Any] = {id(t): t for t in read}
    taken = {_memory(t) for t in read}
    wanted = iter(shapes)
    for t in leaves:
        shape = next(wanted, t.shape) if isinstance(t, torch.Tensor) else None
        if id(t) not in made:
            memory = _memory(t)
            alone = memory is None or (memory not in taken and t.shape == shape)
            made[id(t)] = t if alone else _alike(t, shape)
            taken.add(memory)
    return [made[id(t)] for t in leaves]


def _memory(t: Any) -> int | None:
    """The memory of an ordinary tensor."""
    if type(t) not in _USUAL or t.layout is not torch.strided or t.is_nested:
        return None
    return t.untyped_storage()._cdata


def _alike(t: torch.Tensor, shape: Any) -> torch.Tensor:
    """A tensor of the same kind with its own memory, in this shape."""
    if t.shape == shape:
        made = torch.empty_strided(shape, t.stride(), dtype=t.dtype, device=t.device)
    else:
        made = torch.empty(shape, dtype=t.dtype, device=t.device)
    return made.requires_grad_(t.requires_grad)
