"""The skeletons, in the order in which the search tries them. A new one is a folder and a line."""

from __future__ import annotations

from typing import Any

from cutesuper.skeletons.attention.skeleton import Attention
from cutesuper.skeletons.base import Plan, Skeleton
from cutesuper.skeletons.matmul.skeleton import Matmul
from cutesuper.skeletons.rows.skeleton import Rows
from cutesuper.skeletons.schedule import Schedule, schedule_of

SKELETONS: tuple[Skeleton, ...] = (Matmul(), Attention(), Rows())


def skeleton_of(plan: Plan[Any]) -> Skeleton:
    """The skeleton that made a plan."""
    return next(s for s in SKELETONS if isinstance(plan, s.plans))


def read_schedule(data: Any) -> Schedule:
    """Read the output of `schedule.schedule_dict`, for any skeleton. Raises FormatError."""
    return schedule_of(data, [kind for s in SKELETONS for kind in s.schedules])
