"""Schedules: knobs of a kernel that do not change its results; frozen dataclasses, stored as JSON.

Each skeleton has its own, in ``schedule.py`` of its folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, Self

from cutesuper.errors import FormatError

#: values of a knob worth trying, likeliest first, given the schedule they start from
Values = Callable[[Any], Iterable[int]]


@dataclass(frozen=True)
class Schedule:
    """Knobs of one kind of kernel.

    Attributes:
        kind: names the kind in JSON and in reports.
        knobs: values worth trying, by knob, for schedules that differ in one. Knobs that are true
            or false need no entry: they are inverted.
        fixed: knobs that are decided elsewhere: by the caller, or by the layout of the tensors.
        dependent_launch: launch before the predecessor in the stream has ended; constant inputs
            are loaded before the dependency wait.
    """

    kind: ClassVar[str]
    knobs: ClassVar[dict[str, Values]]
    fixed: ClassVar[tuple[str, ...]] = ("dependent_launch",)

    dependent_launch: bool = field(default=False, kw_only=True)

    def settled(self, old: Any, knob: str) -> Self:
        """The schedule, adjusted to ``knob``, the one in which it differs from ``old``."""
        return self

    def mistake(self, default: Any) -> str:
        """Reason why no kernel can run with knobs that planning would accept.
        Empty if there is none.

        Args:
            default: the plan with the knobs that planning chooses.
        """
        return ""


def schedule_dict(schedule: Schedule) -> dict[str, Any]:
    """A schedule as a plain dictionary with its kind."""
    return {"kind": schedule.kind, **asdict(schedule)}


def schedule_of(data: Any, kinds: Iterable[type[Schedule]]) -> Schedule:
    """Read the output of `schedule_dict` for one of ``kinds``. Raises FormatError."""
    known = {k.kind: k for k in kinds}
    kind = data.get("kind") if isinstance(data, dict) else None
    cls = known.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise FormatError(f"schedule: 'kind' must be one of {', '.join(known)}")
    wanted = {f.name: f.type for f in fields(cls)}
    given = {k: v for k, v in data.items() if k != "kind"}
    if set(given) != set(wanted):
        odd = ", ".join(sorted(set(given) ^ set(wanted)))
        raise FormatError(f"{cls.__name__}: missing or unknown fields: {odd}")
    for name, value in given.items():
        kind = bool if wanted[name] == "bool" else int
        if type(value) is not kind or (kind is int and value < 0):
            raise FormatError(f"{cls.__name__}: {name}={value!r} is not a {kind.__name__}")
    return cls(**given)
