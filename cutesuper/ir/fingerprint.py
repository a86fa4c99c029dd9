"""Hashes of Python objects by content: their code and everything that the code names.

A key of the compile cache names operators; the package's own sources are hashed once
(`cutesuper.runtime.cache.source_fingerprint`). The code of an added operator may be anywhere, in a
notebook too, so the hash covers the code that runs, not a file: bytecode, constants, defaults,
closures, the globals that functions name, the functions that they call, base classes, the state of
objects. Libraries count by their version.

Data that a function reads from files, the environment or a clock is not covered. Where something
cannot be hashed, or code is made while it runs (``eval``), `Unknown` names it.
"""

from __future__ import annotations

import builtins
import copyreg
import dis
import enum
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

#: folders of the package whose sources are hashed as a whole
COVERED = ("ir", "skeletons", "targets", "device")
#: limit on the objects visited for one hash; more than that is a whole program, not an operator
MOST_OBJECTS = 20_000

# as code objects have it: the path under which the sources were imported
_PACKAGE = os.path.dirname(os.path.dirname((lambda: 0).__code__.co_filename))
_OWN = tuple(os.path.join(_PACKAGE, folder, "") for folder in COVERED)
_OWN_MODULES = tuple(f"{__name__.partition('.')[0]}.{folder}." for folder in COVERED)
_STDLIB = os.path.join(sysconfig.get_path("stdlib"), "")
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented))
#: attributes of classes and modules that do not change what they compute, or repeat other parts
_IRRELEVANT = frozenset((
    "__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__annotations__",
    "__annotate__", "__annotate_func__", "__annotations_cache__", "__firstlineno__", "_abc_impl",
    "__static_attributes__", "__parameters__", "__orig_bases__", "__abstractmethods__",
))  # fmt: skip
_UNSEEN = frozenset(("eval", "exec", "compile", "globals", "__import__", "open", "input"))
_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")


class Unknown(Exception):
    """Something cannot be hashed; the text says why."""


#: gives the object to hash in the place of another; None: that object itself
Instead = Callable[[Any], Any]


def fingerprint(
    thing: Any, instead: Instead = lambda thing: None, home: frozenset[str] = frozenset()
) -> str:
    """SHA-256, in hexadecimal digits, of everything that determines an object's results.

    Equal definitions have equal hashes in every process of one version of Python.

    Args:
        thing: a function, a class, an object.
        instead: what to hash in the place of an object, if not itself.
        home: installed packages whose code is hashed itself, because the object comes from them;
            their versions need not change with it.

    Raises:
        Unknown: something that it names cannot be hashed.
    """
    writer = _Writer(instead, home)
    writer.text("python", platform.python_version())
    try:
        writer.thing(thing)
    except RecursionError:
        raise Unknown("its objects are nested too deeply") from None
    return writer.digest()


def is_own_function(function: types.FunctionType) -> bool:
    """True if a function's code lies in the package's sources that are hashed as a whole."""
    file, module = function.__code__.co_filename, str(function.__globals__.get("__name__"))
    made = file == "<string>" and module.startswith(_OWN_MODULES)  # for a dataclass
    return file.startswith(_OWN) or made


def is_own_class(cls: type) -> bool:
    """True if a class, with all functions in it, lies in those sources."""
    own = cls.__module__.startswith(_OWN_MODULES) and _is_named(cls)
    functions = (v for v in vars(cls).values() if isinstance(v, types.FunctionType))
    return own and all(map(is_own_function, functions))


class _Writer:
    """Walks over objects, each once, and hashes what it visits."""

    def __init__(self, instead: Instead, home: frozenset[str]) -> None:
        self._instead, self._home = instead, home
        self._hash = hashlib.sha256()
        self._count = 0
        self._seen: dict[int, int] = {}
        self._alive: list[Any] = []  # an identity means nothing once its object is gone

    def digest(self) -> str:
        return self._hash.hexdigest()

    def text(self, *parts: object) -> None:
        """Hash texts and numbers, each with its length, so that different sequences differ."""
        for part in parts:
            content = part if isinstance(part, bytes) else str(part).encode(errors="surrogatepass")
            self._hash.update(f"{len(content)}:".encode() + content)

    def thing(self, x: Any) -> None:
        """Hash any object. Raises Unknown."""
        if type(x) in _PLAIN:
            return self.text(type(x).__name__, repr(x) if not isinstance(x, bytes) else x)
        if id(x) in self._seen:
            return self.text("again", self._seen[id(x)])
        self._count += 1
        if self._count > MOST_OBJECTS:
            raise Unknown(f"it names more than {MOST_OBJECTS} objects")
        if type(x) not in (tuple, frozenset):  # the compiler decides which of these are shared
            self._seen[id(x)] = len(self._seen)
            self._alive.append(x)
        if (other := self._instead(x)) is not None:
            return self.thing(other)
        if isinstance(x, type):
            return self._class(x)
        if isinstance(x, enum.Enum):
            return self._member(x)
        return _KINDS.get(type(x), _Writer._object)(self, x)

    def things(self, *parts: Any) -> None:
        """Hash several objects."""
        self.text(len(parts))
        for part in parts:
            self.thing(part)

    # ------------------------------------------------------------------------------- containers

    def _sequence(self, x: Any) -> None:
        self.text(type(x).__name__)
        self.things(*x)

    def _dict(self, x: Mapping[Any, Any]) -> None:
        self.text("dict")
        self.things(*(part for item in x.items() for part in item))

    def _set(self, x: Any) -> None:
        self.text(type(x).__name__, *sorted(fingerprint(e, self._instead, self._home) for e in x))

    # ------------------------------------------------------------------------------------- code

    def _function(self, f: types.FunctionType) -> None:
        self.text("function")
        place = self._place(f.__code__.co_filename)
        if place is None:
            self._code(f.__code__)
            for name in _names(f.__code__):
                self._named(name, f)
        else:
            self.text(f.__qualname__, f.__code__.co_firstlineno)
            self._origin(f.__globals__.get("__name__"))
            # a function that was made or wrapped there may refer to anything
            if _is_named(f) and self._place(_file(f.__module__)) == place:
                return None
        return self.things(f.__defaults__, f.__kwdefaults__, f.__dict__, *map(_content, _cells(f)))

    def _code(self, code: types.CodeType) -> None:
        self.text("code", code.co_code, code.co_exceptiontable, code.co_flags, code.co_argcount)
        self.text(code.co_posonlyargcount, code.co_kwonlyargcount)
        self.things(code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        self.text(len(code.co_consts))
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._code(constant)
            else:
                self.thing(constant)

    def _named(self, name: tuple[Any, ...], f: types.FunctionType) -> None:
        """Hash the object that a function finds under a name: an import, or a global."""
        kind, first, *attributes = name
        self.text(*name)
        if kind == "import":
            return self.things(*_imported(first, attributes, f))
        if first in f.__globals__:
            return self._attribute(f.__globals__[first], attributes)
        if first in _UNSEEN:
            raise Unknown(f"{f.__qualname__} calls {first}, which hides what it uses")
        return self.text("builtin" if hasattr(builtins, first) else "missing")

    def _attribute(self, x: Any, names: list[str]) -> None:
        """Hash an attribute such as ``math.pi`` of a module.
        Of other objects, the object itself."""
        where = ""
        while isinstance(x, types.ModuleType) and names and hasattr(x, names[0]):
            where = x.__name__
            x = getattr(x, names.pop(0))
        plain = not isinstance(x, types.FunctionType | type | types.ModuleType)
        if where and plain and callable(x) and self._place(_file(where)) == "library":
            return self._origin(where)  # a C function
        return self.thing(x)

    def _module(self, m: types.ModuleType) -> None:
        self.text("module", m.__name__)
        if self._place(_file(m.__name__)) is not None or _top(m.__name__) == _top(__name__):
            return self._origin(m.__name__)
        names = sorted(n for n in vars(m) if not (n.startswith("__") and n.endswith("__")))
        return self.things(*names, *(vars(m)[n] for n in names))

    def _place(self, file: str | None) -> str | None:
        """`_place` of a file; None for the packages of `home`."""
        place = _place(file)
        return None if place == "library" and _package_of(file or "") in self._home else place

    def _origin(self, module: str | None) -> None:
        """Hash the name and version of the library of a module. Raises Unknown."""
        self.text("of", module, _version(_top(module or "")))

    # ---------------------------------------------------------------------------------- objects

    def _class(self, cls: type) -> None:
        self.text("class", cls.__module__, cls.__qualname__)
        if cls.__module__ == "builtins" or is_own_class(cls):
            return None
        known = _is_named(cls) and _top(cls.__module__) != _top(__name__)
        if known and self._place(_file(cls.__module__)) == "library":
            return self._origin(cls.__module__)
        self.things(type(cls), *cls.__bases__)
        inside = {k: v for k, v in vars(cls).items() if k not in _IRRELEVANT}
        return self.things(*inside, *inside.values())

    def _member(self, x: enum.Enum) -> None:
        self.text("member", x.name)
        self.things(x.value, type(x))

    def _descriptor(self, x: Any) -> None:
        self.text(type(x).__name__, x.__name__)

    def _bound(self, x: Any) -> None:
        self.things("bound", x.__func__, x.__self__)

    def _wrapped(self, x: Any) -> None:
        self.things(type(x).__name__, x.__func__)

    def _property(self, x: property) -> None:
        self.things("property", x.fget, x.fset, x.fdel)

    def _cached_property(self, x: functools.cached_property[Any]) -> None:
        self.things("cached_property", x.func)  # it also has a lock

    def _cached(self, x: Any) -> None:
        self.things("cached", x.__wrapped__, x.cache_parameters())

    def _builtin(self, x: types.BuiltinFunctionType) -> None:
        self.text("builtin", x.__module__, x.__qualname__)
        if not isinstance(x.__self__, types.ModuleType | None):
            self.thing(x.__self__)
        elif x.__module__:
            self._origin(x.__module__)

    def _object(self, x: Any) -> None:
        """Hash an object as `pickle` would write it, and its attributes, which that may omit."""
        self.text("object")
        try:
            made = copyreg.dispatch_table.get(type(x), _reduced)(x)
        except Exception as error:  # this runs code of the object's class
            raise Unknown(f"a {type(x).__qualname__} has no value to compare: {error}") from None
        if isinstance(made, str):  # the name of a global
            self.text(made)
            return self._origin(getattr(x, "__module__", None) or type(x).__module__)
        self.things(type(x), *(_listed(part) for part in made))
        return self.thing(getattr(x, "__dict__", None))


_KINDS: dict[type, Callable[[_Writer, Any], None]] = {
    tuple: _Writer._sequence,
    list: _Writer._sequence,
    dict: _Writer._dict,
    types.MappingProxyType: _Writer._dict,
    set: _Writer._set,
    frozenset: _Writer._set,
    types.FunctionType: _Writer._function,
    types.CodeType: _Writer._code,
    types.ModuleType: _Writer._module,
    types.MethodType: _Writer._bound,
    types.BuiltinFunctionType: _Writer._builtin,
    staticmethod: _Writer._wrapped,
    classmethod: _Writer._wrapped,
    property: _Writer._property,
    functools.cached_property: _Writer._cached_property,
    type(functools.cache(lambda: None)): _Writer._cached,
    types.GetSetDescriptorType: _Writer._descriptor,
    types.MemberDescriptorType: _Writer._descriptor,
    types.WrapperDescriptorType: _Writer._descriptor,
    types.MethodDescriptorType: _Writer._descriptor,
    types.ClassMethodDescriptorType: _Writer._descriptor,
}


def _reduced(x: Any) -> Any:
    return x.__reduce_ex__(4)


def _listed(part: Any) -> Any:
    """A part of an object's pickled form; items, which come as iterators, become a list."""
    return list(part) if hasattr(part, "__next__") else part


def _cells(f: types.FunctionType) -> tuple[types.CellType, ...]:
    return f.__closure__ or ()


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return ("empty",)


def _is_named(x: Any) -> bool:
    """True if a module has this function or class under its own name."""
    found: Any = sys.modules.get(x.__module__)
    for name in x.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is x


# ------------------------------------------------------------------------------------------ names


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> tuple[tuple[Any, ...], ...]:
    """The global names and imports of a function and of those inside it, in order.
    ``("global", name, attribute, ..)`` and ``("import", module, name, ..)``."""
    steps = [i for i in dis.get_instructions(code) if i.opname != "EXTENDED_ARG"]
    found: dict[tuple[Any, ...], None] = {}
    for n, step in enumerate(steps):
        if step.opname in _GLOBAL:
            found["global", step.argval, *_attributes(steps, n + 1)] = None
        elif step.opname == "IMPORT_NAME":
            level, wanted = steps[n - 2].argval, steps[n - 1].argval or ()
            found["import", "." * level + step.argval, *wanted] = None
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= dict.fromkeys(_names(constant))
    return tuple(found)


def _attributes(steps: list[dis.Instruction], n: int) -> Iterator[str]:
    while n < len(steps) and steps[n].opname in _ATTRIBUTE:
        yield steps[n].argval
        n += 1


def _imported(module: str, names: list[str], f: types.FunctionType) -> tuple[Any, ...]:
    """The module that a function imports, and its top-level package.
    Raises Unknown if part of it is not loaded yet."""
    package = f.__globals__.get("__package__") or ""
    try:
        full = importlib.util.resolve_name(module, package)
    except (ImportError, TypeError):
        raise Unknown(f"{f.__qualname__} imports {module!r} from nowhere") from None
    found = sys.modules.get(full)
    missing = [n for n in names if n != "*" and not hasattr(found, n)]
    if found is None or missing:
        what = ".".join((full, *missing[:1])) if found else full
        raise Unknown(f"{f.__qualname__} imports {what}, which is not loaded")
    return (sys.modules.get(_top(full), found), found)


# -------------------------------------------------------------------------------------- libraries


def _place(file: str | None) -> str | None:
    """Origin of code: "own" (the hashed sources), "library", or None for a user's own code."""
    if file is None or file.startswith("<frozen "):
        return "library"
    if file.startswith(_OWN):
        return "own"
    installed = file.startswith(_STDLIB) or any(part in file for part in _INSTALLED)
    return "library" if installed else None


def _package_of(file: str) -> str:
    """The name right below a folder of installed packages."""
    for part in _INSTALLED:
        if part in file:
            return file.rpartition(part)[2].partition(os.sep)[0].removesuffix(".py")
    return ""


def _file(module: str) -> str | None:
    """The file of a module; None for a built-in one."""
    if _top(module) in sys.stdlib_module_names:
        return None
    return getattr(sys.modules.get(module), "__file__", None) or "<nowhere>"


def _top(module: str) -> str:
    return module.partition(".")[0]


@functools.cache
def _version(top: str) -> str:
    """Version of a library; that of Python is in every hash. Raises Unknown."""
    if top in sys.stdlib_module_names or top in ("builtins", ""):
        return ""
    if version := getattr(sys.modules.get(top), "__version__", None):
        return str(version)
    try:
        return importlib.metadata.version(top)
    except importlib.metadata.PackageNotFoundError:
        raise Unknown(f"{top}, of which the version is not known") from None
