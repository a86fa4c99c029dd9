"""JSON objects that are read field by field; every error says where and what to do."""

from __future__ import annotations

from typing import Any

from cutesuper.errors import FormatError

#: extents and counts are 32-bit integers in Mirage
MAX_INTEGER = 2**31 - 1
GRID = ("x", "y", "z")


class Fields:
    """A JSON object.

    Args:
        data: the result of the parser.
        where: beginning of messages.

    Raises:
        FormatError: here and in every method: not an object, a field that is missing, of another
            type or out of range.
    """

    def __init__(self, data: Any, where: str) -> None:
        if not isinstance(data, dict):
            raise FormatError(f"{where} is {short(data)}, not an object")
        self.data: dict[str, Any] = data
        self.where = where

    def has(self, name: str) -> bool:
        """True if the field exists."""
        return name in self.data

    def get(self, name: str) -> Any:
        """A field of any type."""
        if name not in self.data:
            raise FormatError(f"{self.where}: the field {name!r} is missing; write the file again")
        return self.data[name]

    def integer(self, name: str, low: int, high: int = MAX_INTEGER) -> int:
        """An integer from ``low`` to ``high``."""
        return integer(self.get(name), f"{self.where}: {name}", low, high)

    def number(self, name: str) -> float:
        """A number in float32's range."""
        value = self.get(name)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not abs(value) < 1e38:
            raise FormatError(f"{self.where}: {name} is {short(value)}, not a finite number")
        return float(value)

    def text(self, name: str) -> str:
        """A string."""
        value = self.get(name)
        if not isinstance(value, str):
            raise FormatError(f"{self.where}: {name} is {short(value)}, not a text")
        return value

    def items(self, name: str) -> list[Any]:
        """A list."""
        return items(self.get(name), f"{self.where}: {name}")

    def triple(self, name: str, low: int, high: int = MAX_INTEGER) -> tuple[int, int, int]:
        """``{"x": 2, "y": 8, "z": 1}`` as (2, 8, 1)."""
        inner = Fields(self.get(name), f"{self.where}: {name}")
        x, y, z = (inner.integer(axis, low, high) for axis in GRID)
        return x, y, z


def integer(value: Any, what: str, low: int, high: int = MAX_INTEGER) -> int:
    """``value`` if it is an int of that range. Raises FormatError."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise FormatError(f"{what} is {short(value)}; it must be an integer of {low} to {high}")
    return value


def items(value: Any, what: str) -> list[Any]:
    """``value`` if it is a list. Raises FormatError."""
    if not isinstance(value, list):
        raise FormatError(f"{what} is {short(value)}, not a list")
    return value


def short(value: Any) -> str:
    """A JSON value for a message, at most 40 characters."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    if isinstance(value, int) and abs(value) >= 10**39:
        return "a huge number"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
