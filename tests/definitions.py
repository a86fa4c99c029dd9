"""Definitions that differ in one number, wherever a definition can have one."""

from __future__ import annotations

import enum
import functools
import math
import types
from collections.abc import Callable
from typing import Any

import numpy as np

FACTOR = 3.0


def scaled(x: float) -> float:
    return x * FACTOR


def with_code(code: str, **names: Any) -> Any:
    """The function ``f`` after some code."""
    space: dict[str, Any] = {"__name__": "somewhere", **names}
    exec(compile(code, "<cell>", "exec"), space)
    return space["f"]


class Helper:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def scaled(self, x: float) -> float:
        return x * self.factor


class Slots:
    __slots__ = ("factor",)

    def __init__(self, factor: float) -> None:
        self.factor = factor


def _classes(factor: float, kind: str) -> Any:
    base = type("Base", (), {"factor": factor if kind == "base" else 0})
    inner = type("Inner", (base,), {"own": factor if kind == "class" else 0})
    return inner() if kind == "instance's class" else inner


class Decorated:
    """A function in an object, which has a number besides."""

    def __init__(self, function: Any, factor: float) -> None:
        functools.update_wrapper(self, function)
        self.factor = factor

    def __call__(self, x: float) -> float:
        return self.factor * self.__wrapped__(x)  # type: ignore[attr-defined]


def module(name: str, **values: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__dict__.update(values)
    return module


def _recursive(k: float) -> Any:
    def f(x: float) -> float:
        return f(x - 1) * k if x > 0 else 1.0

    return f


CHANGES: dict[str, Callable[[float], Any]] = {
    "constant": lambda k: with_code(f"def f(x): return x * {k}"),
    "code": lambda k: with_code(f"def f(x): return x {'*' if k == 3.0 else '+'} x"),
    "inner function": lambda k: with_code(f"def f(x): return (lambda y: y * {k})(x)"),
    "default": lambda k: with_code(f"def f(x, k={k}): return x * k"),
    "keyword default": lambda k: with_code(f"def f(x, *, k={k}): return x * k"),
    "closure": lambda k: (lambda x: x * k),
    "global": lambda k: with_code("def f(x): return x * K", K=k),
    "global of a helper": lambda k: with_code(
        "def f(x): return g(x)", g=with_code("def f(x): return x * K", K=k)
    ),
    "global in a class": lambda k: with_code("def f(x):\n class A:\n  a = K\n return A.a", K=k),
    "list": lambda k: with_code("def f(x): return x * K[1]['a']", K=[0, {"a": k}]),
    "set": lambda k: with_code("def f(x): return x in K", K={k, "a", "b"}),
    "array": lambda k: with_code("def f(x): return x * K[0]", K=np.array([k])),
    "attribute": lambda k: with_code("def f(x): return h.factor * x", h=Helper(k)),
    "slot": lambda k: with_code("def f(x): return h.factor * x", h=Slots(k)),
    "bound method": lambda k: Helper(k).scaled,
    "partial": lambda k: functools.partial(scaled, k),
    "cache": lambda k: functools.lru_cache(with_code(f"def f(x): return x * {k}")),
    "shared constants": lambda k: with_code(f"def f(x): return (x, (1, {k})), (x, (1, {k}))"),
    "wrapper": lambda k: functools.wraps(math.sqrt)(lambda x: x * k),
    "decorator": lambda k: Decorated(scaled, k),
    "static method": lambda k: type("A", (), {"f": staticmethod(lambda x: x * k)}),
    "property": lambda k: type("A", (), {"f": property(lambda self: k)}),
    "cached property": lambda k: type("A", (), {"f": functools.cached_property(lambda self: k)}),
    "class": lambda k: _classes(k, "class"),
    "base class": lambda k: _classes(k, "base"),
    "enum": lambda k: enum.Enum("Color", {"red": k}).red,  # type: ignore[attr-defined]
    "module": lambda k: with_code("def f(x): return m.n.K * x", m=module("m", n=module("n", K=k))),
    "module as a whole": lambda k: with_code(
        "def f(x): return getattr(m, 'K') * x", m=module("m", K=k)
    ),
    "cell of a function": _recursive,
}  # fmt: skip
