"""The state that a function reads besides its arguments, and a check that it is unchanged.

A traced program represents the function as it was when it was traced: the numbers in attributes,
closures and globals, the modules that it called, their hooks and their ``training``. A `Watch`
walks from the function to everything that its code can name, and records facts of it: equal facts
give equal traces. Tensors are facts by shape, type and device only: their identity is read again.

Code is followed by name, without running it. The code of PyTorch, NumPy and Python's library does
not change and is not followed; of PyTorch's modules the attributes are.
"""

from __future__ import annotations

import contextvars
import functools
import logging
import sys
import sysconfig
import types
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.parameter import is_lazy
from torch.utils import _device

#: packages whose code does not change, like that of Python's library
_LIBRARIES = ("torch", "numpy", "cutesuper")
_STANDARD = sysconfig.get_path("stdlib")
#: types of values that cannot change
_PLAIN = (
    int, bool, str, bytes, type(None), type(Ellipsis), torch.dtype, torch.device, torch.layout,
    torch.memory_format, range,
)  # fmt: skip
_COLLECTIONS = (list, tuple, set, frozenset, deque, types.MappingProxyType)
#: names by which code reads attributes that it does not name
_ANY_NAME = frozenset({"getattr", "vars", "__dict__", "attrgetter", "named_parameters"})
#: names in code that depends on how it is called; see `Watch.asks` and `Watch.measures`
_QUESTIONS = frozenset({"is_grad_enabled", "requires_grad"})
_LAYOUTS = frozenset({"is_contiguous", "stride", "as_strided", "storage_offset"})
#: names in code that decides which random numbers are drawn; see `Watch.seeds`
_SEEDS = frozenset({"manual_seed", "fork_rng", "set_rng_state", "Generator"})
#: attributes of modules that are walked separately
_TABLES = ("_parameters", "_buffers", "_modules")
_OF_ALL = frozenset(vars(nn.Module()))
#: lists that RNNs keep of their parameters, and make anew where these are others
_LISTS = ("_flat_weights", "_flat_weight_refs")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = tuple(h for n, h in vars(torch_module).items()
                      if n.startswith("_global_") and isinstance(h, dict))  # fmt: skip
_OF_FUNCTION = attrgetter("__code__", "__defaults__", "__kwdefaults__")
_OF_CELL = attrgetter("cell_contents")
#: devices are not included: kernels refuse tensors on several
_OF_SILENT_TENSOR = attrgetter("dtype", "shape")
_OF_TENSOR = attrgetter("dtype", "shape", "requires_grad")

#: a name, and the value found there
Fact = tuple[str, Hashable]


class Watch:
    """The state that a function reads besides its arguments, at one time.

    Args:
        fn: a function, a module, or another object that can be called.
        names: found by an earlier watch of the same function, see `names`.

    Attributes:
        facts: in the order of the walk; equal facts give equal traces.
        tensors: all that were found, each once.
        names: that the code uses, for attributes and globals.
        asks: whether the code may ask if gradients are recorded.
        measures: whether the code may ask for strides.
        seeds: whether the code may make or seed a generator of random numbers.
        passing: the name of an iterator that it reads, which yields something else every time; or
            nothing.
        hooked: whether a module has hooks that are called in the backward pass.
    """

    def __init__(self, fn: Any, names: frozenset[str] = frozenset()) -> None:
        walk = _Walk(fn, names)
        while walk.found - walk.names:
            walk = _Walk(fn, walk.names | walk.found)
        self.facts: tuple[Fact, ...] = tuple(walk.facts)
        self.tensors: tuple[torch.Tensor, ...] = tuple(walk.tensors)
        self.names = walk.names
        self.asks, self.measures, self.passing = walk.asks, walk.measures, walk.passing
        self.seeds = not _SEEDS.isdisjoint(self.names)
        self.hooked = walk.hooked
        self._walk = walk
        self._identities = frozenset(map(id, self.tensors))
        self._now = walk.now()
        self._meanwhile = walk.meanwhile()

    def holds(self) -> bool:
        """True if everything that was found is unchanged; cheap, and False in case of doubt."""
        now = self._walk.now()
        try:
            return (
                len(now) == len(self._now)
                and all(map(is_, now, self._now))
                and (self._walk.meanwhile() == self._meanwhile)
            )
        except (AttributeError, ValueError, RuntimeError):  # something has been removed
            return False

    def has(self, tensors: Iterable[torch.Tensor]) -> bool:
        """True if some of these tensors are also read from elsewhere."""
        return not self._identities.isdisjoint(map(id, tensors))

    def place(self, tensor: torch.Tensor) -> int | None:
        """The index of a tensor among its tensors, or None."""
        return next((i for i, t in enumerate(self.tensors) if t is tensor), None)


class Observer:
    """An observer of the changes that a function makes while it is traced.
    ``torch.export`` restores attributes of modules at its end.

    Attributes:
        change: the first change, in words; nothing if there is none.
        replaced: names of tensors that were replaced by others, by their places among those of a
            `Watch`. The change does not matter if the old tensor is not read.
    """

    def __init__(self, fn: Any, names: frozenset[str]) -> None:
        self.change = ""
        self.replaced: dict[int, str] = {}
        self._fn, self._names = fn, names
        self._facts: tuple[Fact, ...] = ()

    @contextmanager
    def observing(self, module: nn.Module) -> Iterator[None]:
        """Look before and after each call of the module that is traced."""
        hooks = (
            module.register_forward_pre_hook(self._before, prepend=True),
            module.register_forward_hook(self._after),
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _before(self, *_: Any) -> None:
        self._facts = Watch(self._fn, self._names).facts

    def _after(self, *_: Any) -> None:
        now = list(Watch(self._fn, self._names).facts)
        for i, ((name, was), (other, fact)) in enumerate(zip(self._facts, now, strict=False)):
            if name == other and was != fact and _is_tensor(was) and _is_tensor(fact):
                self.replaced[was[1] - 1] = name  # type: ignore[index]
                now[i] = (name, was)
        self.change = self.change or difference(self._facts, tuple(now))


def _is_tensor(fact: Any) -> bool:
    return isinstance(fact, tuple) and fact[0] == "tensor"


def difference(old: tuple[Fact, ...], new: tuple[Fact, ...]) -> str:
    """The first fact that has changed, in words; nothing if none has."""
    for (name, was), (other, now) in zip(old, new, strict=False):
        if name != other:
            return f"{name} or {other} is new"
        if was != now:
            return f"{name} was {_shown(was)} and is {_shown(now)}"
    longer = max(old, new, key=len)
    return f"{longer[min(len(old), len(new))][0]} is new" if len(old) != len(new) else ""


def _shown(fact: Hashable) -> str:
    last = fact[-1] if isinstance(fact, tuple) and fact else fact
    return str(last)[:60]


class _Walk:
    """One walk, with the names that are known to be in the code so far."""

    def __init__(self, fn: Any, names: frozenset[str]) -> None:
        self.names = names
        self.asks = not _QUESTIONS.isdisjoint(names)
        self.measures = not _LAYOUTS.isdisjoint(names)
        self.passing = ""
        self.found: set[str] = set()
        self.facts: list[Fact] = []
        self.tensors: list[torch.Tensor] = []
        self.hooked = False
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []
        self._reads: list[Callable[[], Iterable[Any]]] = []
        self._classes: list[type] = []
        self._dicts: list[dict[str, Any]] = []
        self._keys: list[str] = []
        self._class_dicts: list[types.MappingProxyType[str, Any]] = []
        self._class_keys: list[str] = []
        self._measured: list[torch.Tensor] = []
        self._cells: list[types.CellType] = []
        self._functions: list[types.FunctionType] = []
        self._modules: list[nn.Module] = []
        self._tables: list[Any] = []
        self._empty: list[Any] = []
        self._buffers: list[Any] = []
        self._visit(getattr(fn, "__name__", type(fn).__name__), fn)
        if self._modules:
            self._hooks("the hooks of all modules", _GLOBAL_HOOKS)
        self._entry("the default device", _device.__dict__, "CURRENT_DEVICE")

    # ------------------------------------------------------------------------------ what is there

    def now(self) -> list[Any]:
        """Everything that is compared by identity."""
        found = list(map(dict.get, self._dicts, self._keys))
        found += map(type, self._modules)
        found += map(types.MappingProxyType.get, self._class_dicts, self._class_keys)
        if self._cells:
            found += map(_OF_CELL, self._cells)
        for fn in self._functions:
            found += _OF_FUNCTION(fn)
        for read in self._reads:
            found += read()
        return found

    def meanwhile(self) -> list[Any]:
        """Everything that is compared by value: lengths of tables, and properties of tensors."""
        found: list[Any] = [any(self._empty), *map(len, self._tables)]
        found += map(_OF_TENSOR if self.asks else _OF_SILENT_TENSOR, self._measured)
        if self._buffers:
            found += map(_bytes, self._buffers)
        return found

    # -------------------------------------------------------------------------------------- values

    def _visit(self, name: str, value: Any) -> None:
        plain = _plain(value)
        if plain is not None:
            self.facts.append((name, plain))
            return
        if id(value) in self._seen:
            self.facts.append((name, ("as before", self._seen[id(value)])))
            return
        self._seen[id(value)] = len(self._seen)
        self._kept.append(value)  # so that nothing else gets its identity
        self._of_kind(name, value)

    def _of_kind(self, name: str, value: Any) -> None:
        for kinds, visit in _VISITS:
            if isinstance(value, kinds):
                visit(self, name, value)
                return
        self._object(name, value)

    def _tensor(self, name: str, t: torch.Tensor) -> None:
        self.tensors.append(t)
        if not is_lazy(t):
            self._measured.append(t)
        asked = t.requires_grad if self.asks else None
        layout = layout_of(t) if self.measures else None
        self.facts.append((name, ("tensor", len(self.tensors), facts_of(t), asked, layout)))

    def _object(self, name: str, value: Any) -> None:
        """Walk an ordinary object: its attributes, and those of its class."""
        if isinstance(value, Iterator):
            self.passing = self.passing or name
        cls = type(value)
        if cls.__module__.partition(".")[0] == "cutesuper":  # it watches its own state
            self.facts.append((name, _Same(value)))
            return
        own = getattr(value, "__dict__", None)
        slots = [s for base in cls.__mro__ for s in _slots(base)]
        told = bool(slots) or isinstance(own, dict)
        self.facts.append((name, _Same(cls if told else value)))
        if isinstance(own, dict):
            self._tables.append(own)
            self._attributes(name, own, every=_is_library(cls.__module__))
        for slot in slots:
            read = functools.partial(_read_slot, value, slot)
            self._reads.append(read)
            self._visit(f"{name}.{slot}", read()[0])
        self._class(name, cls)

    def _code(self, name: str, value: types.ModuleType) -> None:
        """Walk a module of Python."""
        self.facts.append((name, _Same(value)))
        own: Any = vars(value)
        if not _is_library(value.__name__):
            for key in sorted(self.names.intersection(own)):
                self._entry(f"{name}.{key}", own, key)

    def _type(self, name: str, value: type) -> None:
        self.facts.append((name, _Same(value)))
        if not _is_library(value.__module__):
            self._class(name, value)

    def _class(self, name: str, cls: type) -> None:
        """Walk the attributes that the code names of a class and its bases."""
        for base in cls.__mro__:
            library = _is_library(base.__module__)
            module = issubclass(base, nn.Module) and base is not nn.Module
            if base in self._classes or (library and not module):
                continue
            self._classes.append(base)
            own = vars(base)
            called = _CALLED if not library else ("forward",)
            for key in [k for k in own if k in self.names or k in called]:
                self._class_dicts.append(own)
                self._class_keys.append(key)
                self._visit(f"{name}.{key}", own[key])

    def _attributes(self, name: str, own: dict[str, Any], every: bool = False) -> None:
        every = every or not _ANY_NAME.isdisjoint(self.names)
        for key in [k for k in own if every or k in self.names]:
            self._entry(f"{name}.{key}", own, key)

    def _entry(self, name: str, own: dict[str, Any], key: str) -> None:
        self._dicts.append(own)
        self._keys.append(key)
        self._visit(name, own.get(key))

    # ------------------------------------------------------------------------------------- modules

    def _module(self, name: str, m: nn.Module) -> None:
        own = vars(m)
        self._modules.append(m)
        self.facts.append((name, _Same(type(m))))
        self._entry(f"{name}.training", own, "training")
        self._entry(f"{name}.forward", own, "forward")
        for table in (own.get(t) for t in _TABLES):
            self._table(name, table)
        self._hooks(f"the hooks of {name}", [own[h] for h in _HOOKS])
        self.hooked = self.hooked or bool(own["_backward_hooks"] or own["_backward_pre_hooks"])
        self._tables.append(own)
        every = not _ANY_NAME.isdisjoint(self.names)
        known = _OF_ALL.union(_LISTS if isinstance(m, nn.RNNBase) else ())
        for key in [k for k in own if k not in known and (every or k in self.names)]:
            self._entry(f"{name}.{key}", own, key)
        self._class(name, type(m))

    def _table(self, name: str, table: Any) -> None:
        if isinstance(table, dict):  # modules of TorchScript have none
            self._tables.append(table)
            for key in table:
                self._entry(f"{name}.{key}", table, key)

    def _hooks(self, name: str, tables: Iterable[dict[Any, Any]]) -> None:
        for hooks in tables:
            if hooks:
                self._mapping(name, hooks)
            else:
                self._empty.append(hooks)

    # ---------------------------------------------------------------------------------------- code

    def _function(self, name: str, fn: types.FunctionType) -> None:
        library = _is_library(fn.__globals__.get("__name__"))
        self.facts.append((name, _Same(fn) if library else fn.__code__))
        for cell, key in zip(fn.__closure__ or (), fn.__code__.co_freevars, strict=True):
            self._cell(key, cell)
        used = set(_names(fn.__code__))
        if library:
            if fn.__code__.co_varnames[:1] == ("self",):  # its reads of a module
                self.found |= used - _ANY_NAME - _QUESTIONS - _LAYOUTS
            return
        self.found |= used
        self._functions.append(fn)
        self._visit(f"the defaults of {name}", (fn.__defaults__, fn.__kwdefaults__))
        self._attributes(name, vars(fn))
        package = fn.__globals__.get("__package__")
        for key in sorted(used):
            if key in fn.__globals__:
                self._entry(key, fn.__globals__, key)
            for path in (key, f"{package}.{key}"):  # it may import it
                if path in sys.modules and not _is_library(path):
                    self._visit(key, sys.modules[path])

    def _cell(self, name: str, cell: types.CellType) -> None:
        if id(cell) in self._seen:
            return
        self._seen[id(cell)] = len(self._seen)
        self._kept.append(cell)
        try:
            value = cell.cell_contents
        except ValueError:  # its variable has no value yet
            self.facts.append((name, "nothing"))
            return
        self._cells.append(cell)
        self._visit(name, value)

    def _method(self, name: str, method: types.MethodType) -> None:
        self._visit(name, method.__func__)
        self._visit(name, method.__self__)

    def _partial(self, name: str, fn: functools.partial[Any]) -> None:
        self._visit(name, (fn.func, fn.args, fn.keywords))

    def _property(self, name: str, value: property) -> None:
        self._visit(name, (value.fget, None))

    def _descriptor(self, name: str, value: Any) -> None:
        self._visit(name, getattr(value, "__func__", None) or getattr(value, "func", None))

    def _cached(self, name: str, value: Any) -> None:
        self._visit(name, value.__wrapped__)

    # ---------------------------------------------------------------------------------- containers

    def _mapping(self, name: str, values: Mapping[Any, Any]) -> None:
        self._reads.append(functools.partial(_items, values))
        self._tables.append(values)
        self.facts.append((name, (_Same(type(values)), len(values))))
        for key, value in values.items():
            self._visit(f"{name}: a key", key)
            self._visit(f"{name}[{key!r:.40}]", value)
        if _is_own(type(values)):
            self._object(name, values)

    def _collection(self, name: str, values: Any) -> None:
        if not isinstance(values, tuple | frozenset):
            self._reads.append(functools.partial(iter, values))
            self._tables.append(values)
        self.facts.append((name, (_Same(type(values)), len(values))))
        for i, value in enumerate(values):
            self._visit(f"{name}[{i}]", value)
        if _is_own(type(values)):
            self._object(name, values)

    def _reference(self, name: str, value: weakref.ref[Any]) -> None:
        self.facts.append((name, _Same(value)))
        self._visit(name, value())

    def _logging(self, name: str, value: logging.Filterer) -> None:
        """Note a logger or a handler, and not its streams: what it writes is no result."""
        self.facts.append((name, _Same(value)))

    def _context(self, name: str, value: contextvars.ContextVar[Any]) -> None:
        self.facts.append((name, _Same(value)))
        self._reads.append(functools.partial(_in_context, value))
        self._visit(name, value.get(None))

    def _array(self, name: str, value: Any) -> None:
        self._buffers.append(value)
        self.facts.append((name, (type(value).__name__, _bytes(value))))


#: methods that are called without being named
_CALLED = frozenset((
    "forward", "__call__", "__get__", "__getattr__", "__getattribute__", "__getitem__", "__iter__",
    "__len__", "__bool__", "__contains__", "__enter__", "__exit__", "__add__", "__radd__",
    "__sub__", "__rsub__", "__mul__", "__rmul__", "__matmul__", "__rmatmul__", "__truediv__",
    "__rtruediv__", "__neg__", "__pow__", "__float__", "__int__", "__index__", "__eq__",
    "__lt__", "__gt__", "__le__", "__ge__", "__torch_function__",
))  # fmt: skip


class _Same:
    """An object as a fact: equal to itself only. It keeps the object."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)

    def __str__(self) -> str:
        return getattr(self.value, "__qualname__", None) or f"another {type(self.value).__name__}"


def facts_of(t: torch.Tensor) -> Hashable:
    """The facts that a trace depends on for a tensor that it reads, besides its values."""
    kind = torch.Tensor if type(t) is nn.Parameter else type(t)
    if is_lazy(t):
        return kind, "without a shape", id(t)
    return kind, t.dtype, t.device, t.layout, tuple(t.shape)


def layout_of(t: torch.Tensor) -> Hashable:
    """The strides and offset of a tensor, for code that asks for them."""
    strided = t.layout is torch.strided and not is_lazy(t)
    return (t.stride(), t.storage_offset()) if strided else None


def _plain(value: Any) -> Hashable:
    """A value that cannot change, as a fact; None for any other."""
    kind = type(value)
    if kind in _PLAIN:
        return kind, value
    if kind in (float, complex):  # 0.0 == -0.0, and nan is not nan
        return kind, repr(value)
    return None


def _is_library(name: Any) -> bool:
    """True if the code of a module, by its name, does not change."""
    return isinstance(name, str) and _is_library_package(name.partition(".")[0])


@functools.cache
def _is_library_package(name: str) -> bool:
    if name not in sys.stdlib_module_names:
        return name in _LIBRARIES
    file = getattr(sys.modules.get(name), "__file__", None)  # it may be a user's own code.py
    return file is None or file.startswith(_STANDARD)


def _is_own(cls: type) -> bool:
    """True for a class that is not a library's."""
    return not _is_library(cls.__module__)


def _names(code: types.CodeType) -> Iterator[str]:
    """Names and strings in a function and in functions inside it: strings may name attributes."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            yield constant


def _slots(cls: type) -> Iterator[str]:
    slots = vars(cls).get("__slots__", ()) if _is_own(cls) else ()
    for slot in (slots,) if isinstance(slots, str) else slots:
        if slot not in ("__dict__", "__weakref__"):
            private = slot.startswith("__") and not slot.endswith("__")
            yield f"_{cls.__name__.lstrip('_')}{slot}" if private else slot


def _read_slot(value: Any, slot: str) -> tuple[Any]:
    return (getattr(value, slot, None),)


def _in_context(value: contextvars.ContextVar[Any]) -> tuple[Any]:
    return (value.get(None),)


def _items(values: Mapping[Any, Any]) -> Iterable[Any]:
    return chain(values.keys(), values.values())


def _bytes(value: Any) -> Hashable:
    return (
        (value.dtype.str, value.shape, value.tobytes())
        if hasattr(value, "dtype")
        else bytes(memoryview(value))
    )


def _visits() -> Iterator[tuple[Any, Callable[[_Walk, str, Any], None]]]:
    """The visitors of the kinds of values; the first that fits is used."""
    yield torch.Tensor, _Walk._tensor
    yield nn.Module, _Walk._module
    yield types.FunctionType, _Walk._function
    yield types.MethodType, _Walk._method
    yield functools.partial, _Walk._partial
    yield property, _Walk._property
    yield (staticmethod, classmethod, functools.cached_property), _Walk._descriptor
    yield functools._lru_cache_wrapper, _Walk._cached
    yield (dict, types.MappingProxyType), _Walk._mapping
    yield _COLLECTIONS, _Walk._collection
    yield contextvars.ContextVar, _Walk._context
    yield weakref.ref, _Walk._reference
    yield logging.Filterer, _Walk._logging
    yield types.ModuleType, _Walk._code
    yield type, _Walk._type
    yield bytearray, _Walk._array
    if (numpy := sys.modules.get("numpy")) is not None:
        yield numpy.ndarray, _Walk._array


_VISITS = tuple(_visits())
