"""Measured settings: knobs that the fastest kernels of a class of programs shared, as data.

One JSON file for each architecture and skeleton, ``schedules/sm90/rows.json``, comes with the
package. It lists entries for each *decision*:

    {"when": {"length": [8193, null], "tensors": 1}, "use": {"accesses": 8}, "why": "32x9000 .."}

``when`` names a class of programs: a feature is equal to a number, true or false, or between two
numbers, both included (null: no limit); features that are not named do not matter. The first entry
that holds for a program is used; if none does, the decision's own default is. A knob is an integer,
or a *ladder*: a list of integers, values worth a price in this order. The reader is the same for
every skeleton, which declares its decisions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from cutesuper.errors import FormatError
from cutesuper.targets.base import Target

FORMAT, VERSION = "measured_settings", 1
_MEND = "it is a part of cutesuper: install the package again"


@dataclass(frozen=True)
class Entry:
    """A class of programs and its knobs.

    Attributes:
        when: the least and the largest value of each feature that matters.
        use: every knob of the decision: an integer (true is 1), or a tuple for a ladder.
        why: the measurement.
    """

    when: Mapping[str, tuple[float, float]]
    use: Mapping[str, Any]
    why: str


@dataclass(frozen=True)
class Decision:
    """A choice between settings that only a measurement can make.

    Attributes:
        features: the numbers by which programs are told apart.
        default: every knob, for programs that no entry is for; tuples are ladders.
    """

    features: tuple[str, ...]
    default: Mapping[str, int | tuple[int, ...]]


class Settings:
    """The decisions of one part of the package, with the entries of every architecture.

    All files are read when it is made, on import: a damaged one is an installation that does not
    work, and must not look like a program that no kernel can run.

    Args:
        name: of its files, without ``.json``.
        decisions: by name; entries of others are refused.
        folder: has a folder for each architecture; default `shipped_folder`.

    Raises:
        FormatError: there is no file, or one is damaged; names the file and the field.
    """

    def __init__(
        self, name: str, decisions: Mapping[str, Decision], folder: Path | None = None
    ) -> None:
        self.name, self.decisions = name, decisions
        self.folder = shipped_folder() if folder is None else folder
        paths = sorted(self.folder.glob(f"*/{name}.json"))
        self._entries = {p.parent.name: read_settings(decisions, p) for p in paths}
        if not paths:
            raise FormatError(f"{self.folder}/*/{name}.json: no such file; {_MEND}")

    def choose(self, target: Target, decision: str, **features: float) -> Mapping[str, Any]:
        """The knobs of a decision for a program with these features: integers, and tuples of them.

        Raises:
            FormatError: there is no file for the target's architecture.
        """
        if target.settings not in self._entries:
            path = self.folder / target.settings / f"{self.name}.json"
            raise FormatError(f"{path}: no such file, which {target.name} needs; {_MEND}")
        for entry in self._entries[target.settings].get(decision, ()):
            if all(low <= features[f] <= high for f, (low, high) in entry.when.items()):
                return entry.use
        return self.decisions[decision].default


def shipped_folder() -> Path:
    """Folder of the schedules and settings shipped with the package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    checkout = package.parent
    return (checkout if (checkout / "pyproject.toml").is_file() else package) / "schedules"


def read_settings(decisions: Mapping[str, Decision], path: Path) -> dict[str, tuple[Entry, ...]]:
    """Read a file of settings: the entries of each decision, in order.

    Raises:
        FormatError: it is missing, or a field of it is not what the decisions allow.
    """
    try:
        data = json.loads(path.read_bytes())
        _check(data, {"format", "version", "decisions"}, "the file")
        if (data["format"], data["version"]) != (FORMAT, VERSION):
            raise FormatError(f"format: not {FORMAT!r} of version {VERSION}")
        return {
            name: tuple(_read(decisions, name, i, e) for i, e in enumerate(_listed(name, entries)))
            for name, entries in _mapping(data["decisions"], "decisions").items()
        }
    except (OSError, ValueError, RecursionError) as error:
        raise FormatError(f"{path}: {error}; {_MEND}") from error


def _read(decisions: Mapping[str, Decision], name: str, index: int, data: Any) -> Entry:
    """One entry. Raises FormatError."""
    where = f"decisions.{name}[{index}]"
    decision = decisions.get(name)
    if decision is None:
        raise FormatError(f"{where}: no decision of {', '.join(decisions)}")
    _check(data, {"when", "use", "why"}, where)
    when = _mapping(data["when"], f"{where}.when")
    use = _mapping(data["use"], f"{where}.use")
    _known(when, decision.features, f"{where}.when")
    _known(use, tuple(decision.default), f"{where}.use")
    knobs = {k: _knob(v, decision.default[k], f"{where}.use.{k}") for k, v in use.items()}
    if not isinstance(data["why"], str) or not data["why"]:
        raise FormatError(f"{where}.why: the measurement must be said in words")
    ranges = {f: _range(v, f"{where}.when.{f}") for f, v in when.items()}
    return Entry(ranges, {**decision.default, **knobs}, data["why"])


def _knob(value: Any, default: int | tuple[int, ...], where: str) -> int | tuple[int, ...]:
    """A knob of the same kind as its default. Raises FormatError."""
    if isinstance(default, int):
        return _integer(value, where)
    if not isinstance(value, list) or not value:
        raise FormatError(f"{where}: {value!r} is not a list of integers")
    return tuple(_integer(n, where) for n in value)


def _integer(value: Any, where: str) -> int:
    if not isinstance(value, int) or value < 0:
        raise FormatError(f"{where}: {value!r} is not an integer from 0 on")
    return int(value)


def _range(value: Any, where: str) -> tuple[float, float]:
    """The least and the largest value that a feature may have. Raises FormatError."""
    if isinstance(value, int | float):
        return float(value), float(value)
    match value:
        case [int() | float() | None as least, int() | float() | None as largest]:
            low = -inf if least is None else float(least)
            high = inf if largest is None else float(largest)
        case _:
            raise FormatError(f"{where}: {value!r} is neither a number nor [least, largest]")
    if not low <= high:
        raise FormatError(f"{where}: {value!r} is an empty range")
    return low, high


def _mapping(data: Any, where: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise FormatError(f"{where}: not an object")
    return data


def _listed(name: str, data: Any) -> list[Any]:
    if not isinstance(data, list):
        raise FormatError(f"decisions.{name}: not a list of entries")
    return data


def _check(data: Any, fields: set[str], where: str) -> None:
    odd = set(_mapping(data, where)) ^ fields
    if odd:
        raise FormatError(f"{where}: missing or unknown fields: {', '.join(sorted(odd))}")


def _known(given: Mapping[str, Any], names: tuple[str, ...], where: str) -> None:
    for name in given:
        if name not in names:
            raise FormatError(f"{where}.{name}: unknown; there is {', '.join(names)}")
