"""Validation of the arguments of public calls, before anything uses them."""

from __future__ import annotations

import os
from collections.abc import Callable
from math import inf
from numbers import Integral, Real
from typing import Any

from cutesuper.errors import FormatError, OptionError

#: length at which a message cuts off the text of an unexpected value, in characters
_SHOWN = 60


def shown(value: Any) -> str:
    """Text of a value for a message, shortened to `_SHOWN` characters."""
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def as_path(call: str, path: Any) -> str:
    """Return a file's name as text. Raises FormatError if it is not a path."""
    try:
        name = os.fsdecode(path)
    except TypeError:
        raise FormatError(f"{call}({type(path).__name__}): give it the name of a file") from None
    if not name or "\0" in name:
        raise FormatError(f"{call}({name!r}): is not the name of a file")
    return name


def check_options(**options: Any) -> None:
    """Refuse illegal values of options; an option has the same name in all calls.

    Raises:
        OptionError: names the option and says what it must be.
    """
    for name, value in options.items():
        allowed, text = _OPTIONS[name]
        if not allowed(value):
            raise OptionError(f"{name}={shown(value)}: must be {text}")


def _is_count(least: int) -> Callable[[Any], bool]:
    return lambda v: isinstance(v, Integral) and not isinstance(v, bool) and int(v) >= least


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_seconds(value: Any) -> bool:
    if value is None or not isinstance(value, Real) or isinstance(value, bool):
        return value is None
    try:
        return float(value) >= 0  # false for NaN
    except OverflowError:  # an int too large for a float
        return False


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


_FLAG = (_is_flag, "True or False")
_OPTIONS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "seed": (_is_count(0), "an int of at least 0"),
    "keep": (_is_count(1), "an int of at least 1"),
    "trials": (_is_count(1), "an int of at least 1"),
    "candidates": (_is_count(1), "an int of at least 1"),
    "budget_s": (_is_seconds, "a number of seconds, or None for no limit, and not below 0"),
    "executor": (
        lambda v: v is None or callable(getattr(v, "submit", None)),
        "a concurrent.futures.Executor, or None",
    ),
    "on_progress": (lambda v: v is None or callable(v), "a function of one argument, or None"),
    "temperature": (
        lambda v: _is_number(v) and 0 <= v < inf,
        "a number of at least 0, which takes the likeliest token",
    ),
    "top_k": (lambda v: v is None or _is_count(1)(v), "an int of at least 1, or None for no limit"),
    "top_p": (lambda v: _is_number(v) and 0 < v <= 1, "a number above 0 and up to 1"),
    "max_new_tokens": (_is_count(1), "an int of at least 1"),
    "look_every": (_is_count(1), "an int of at least 1, steps between looks at the device"),
    "on_tokens": (lambda v: v is None or callable(v), "a function of one argument, or None"),
    "dependent_launch": _FLAG,
    "gradients": _FLAG,
    "tuned": _FLAG,
    "constant": _FLAG,
    "full": _FLAG,
}
