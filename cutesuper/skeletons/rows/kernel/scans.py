"""Sums of a row up to each element, or from each on.

In a thread for each of its accesses, then over the lanes of a warp, over warps and over accesses.
Sums that are stored in fp32 are pairs from there on, a number and what its rounding left (D. E.
Knuth, The Art of Computer Programming 2, section 4.2.2): of 5,000 normal numbers they are off by 1
unit in the last place, with numbers alone by 4, and PyTorch sums in float64 on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cutesuper.device.fragments import fragment
from cutesuper.device.math import choose
from cutesuper.device.memory import element, put
from cutesuper.skeletons.rows.plan import RowPlan, words_of

#: lanes of a warp
WARP = 32
#: a number, or a pair
Sum = tuple[Any, ...]


@dataclass(frozen=True)
class Lane:
    """The place of a thread.

    Attributes:
        thread: in the block.
        lane: among those of its row.
        group: row of the block.
        inside: for each access a predicate that is true inside the row, or None if it always is.
    """

    thread: Any
    lane: Any
    group: Any
    inside: list[Any]


class Scan:
    """The sums of one operation.

    Args:
        plan: of the kernel.
        i: the operation.
        slots: shared memory of the block.
        here: the thread.
        carried: registers with the sum of all that the block has walked over before; None if it
            has the whole row at once.
    """

    def __init__(
        self, plan: RowPlan, i: int, slots: Any, here: Lane, carried: cute.Tensor | None
    ) -> None:
        s = plan.schedule
        self.slots, self.here, self.warps = slots, here, plan.warps_per_row
        self.carried = carried
        self.vector, self.chunks, self.wide = s.vector, s.chunks, min(s.lanes, WARP)
        self.reverse = bool(plan.program.ops[i].attributes["reverse"])
        self.words = plan.scan_words
        #: slots of a row for one word, and those before the row's
        self.count = s.chunks * self.warps
        before = words_of(plan.program, plan.reductions) * s.rows * self.warps
        row = plan.scans.index(i) * s.rows + here.group
        self.base = before + row * self.words * self.count
        #: places of lane and warp in the order of the sums
        self.place, self.warp = here.lane % self.wide, here.lane // WARP
        if self.reverse:
            self.place, self.warp = self.wide - 1 - self.place, self.warps - 1 - self.warp

    def of(self, value: Any) -> Any:
        """The sums of a thread's elements ``(vector, accesses)`` in fp32."""
        given, found = (fragment((self.vector, self.chunks)) for _ in range(2))
        given.store(value)
        accesses = self._ordered(self.chunks)
        totals = [self._within(given, found, c) for c in accesses]
        for c, (before, *rest) in zip(accesses, self._before(totals), strict=True):
            for e in range(self.vector):
                found[e, c] = before + sum(rest, found[e, c])
        return found.load()

    def _ordered(self, count: int) -> range:
        return range(count)[:: -1 if self.reverse else 1]

    def _within(self, given: cute.Tensor, found: cute.Tensor, c: int) -> Any:
        """Sum up an access, and return the sum of all of it."""
        total, inside = None, self.here.inside[c]
        for e in self._ordered(self.vector):
            x = given[e, c]
            if self.reverse and inside is not None:  # what lies past the end comes first
                x = choose(inside, x, 0.0)
            found[e, c] = total = x if total is None else total + x
        return total

    def _before(self, totals: list[Any]) -> list[Sum]:
        """The sums of all that lies before each access of a thread, in their order."""
        step, lane = -1 if self.reverse else 1, self.here.thread % WARP
        given = [(x, *[Float32(0.0)] * (self.words - 1)) for x in totals]
        start = self._nothing()
        if self.carried is not None:
            start = tuple(self.carried[word] for word in range(self.words))
        own = [_up_to(x, lane, self.place, self.wide, step) for x in given]
        last = lane + step * (self.wide - 1 - self.place)
        wholes = [_from(whole, last) for whole, _ in own]
        if self.warps == 1:
            *carried, end = accumulate(wholes, _sum, initial=start)
        else:
            self.leave(wholes, self.base + self.warp, lane == 0)
            carried, end = self._before_warp(lane, start)
        if self.carried is not None:
            for word, x in enumerate(end):
                self.carried[word] = x
        return [_sum(before, x) for before, (_, x) in zip(carried, own, strict=True)]

    def _nothing(self) -> Sum:
        return (Float32(0.0),) * self.words

    @cute.jit
    def leave(self, wholes, at, writes):
        """Write the sums of a warp's accesses."""
        if writes:
            self._write(wholes, at)
        cute.arch.sync_threads()

    def _write(self, wholes: list[Sum], at: Any) -> None:
        for c, whole in enumerate(wholes):
            for word, x in enumerate(whole):
                put(self.slots + (at + (word * self.count + c * self.warps)), x)

    def _before_warp(self, lane: Any, total: Sum) -> tuple[list[Sum], Sum]:
        """The sums of all warps and accesses before each access of this warp, and of all.
        From ``total`` on. Every warp sums up all slots, as many at a time as it has lanes."""
        found = list[Sum]()
        for first in range(0, self.count, WARP):
            at = self.base + cutlass.min(first + lane, self.count - 1)
            x = [element(self.slots, at + word * self.count) for word in range(self.words)]
            x = tuple(choose(first + lane < self.count, word, 0.0) for word in x)
            whole, before = _up_to(x, lane, lane, WARP, 1)
            for n in range(first, min(first + WARP, self.count), self.warps):
                found.append(_sum(total, _from(before, n - first + self.warp)))
            total = _sum(total, _from(whole, Int32(WARP - 1)))
        return found, total


def _from(x: Sum, lane: Any) -> Sum:
    """The sum of another lane."""
    return tuple(cute.arch.shuffle_sync(word, lane) for word in x)


def _sum(x: Sum, y: Sum) -> Sum:
    """Two sums added; of pairs what rounding leaves is added up, unless it is infinite."""
    total = x[0] + y[0]
    if len(x) == 1:
        return (total,)
    second = total - x[0]
    left = (x[0] - (total - second)) + (y[0] - second)
    return total, x[1] + y[1] + choose(total - total == 0.0, left, 0.0)


def _up_to(x: Sum, lane: Any, place: Any, count: int, step: int) -> tuple[Sum, Sum]:
    """Sums of the values of ``count`` lanes up to each one, and up to the one before it.

    Args:
        x: the lane's value.
        lane: in the warp.
        place: in the order of the sums; the next place is ``step`` lanes further.
        count: power of two.
        step: 1 or -1.
    """

    def behind(apart: int) -> Sum:
        moved = _from(x, (lane - step * apart) & (WARP - 1))
        return tuple(choose(place >= apart, word, 0.0) for word in moved)

    apart = 1
    while apart < count:
        x = _sum(x, behind(apart))
        apart *= 2
    return x, behind(1)
