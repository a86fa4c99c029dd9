"""Facts that the parts of a row loop read.
The plan, what follows from it and, while tracing, the memory of the block, the places of block and
thread, and the rows of a thread.

Parts are given these and the parts that they use, never the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32

from cutesuper.device.barriers import Barriers
from cutesuper.device.fragments import fragment
from cutesuper.device.math import DeviceMath
from cutesuper.device.pipeline import Ring
from cutesuper.skeletons.kernel.arguments import Extents
from cutesuper.skeletons.rows.plan import RowLoopPlan


@dataclass(frozen=True)
class Known:
    """The plan of a kernel, and what follows from it.

    Attributes:
        plan: of the kernel.
        extents: of labels.
        math: scalar functions.
    """

    plan: RowLoopPlan
    extents: Extents
    math: DeviceMath

    @staticmethod
    def of(plan: RowLoopPlan) -> Known:
        """Derive the facts of a plan."""
        streamed = [plan.loads[i] for i in plan.streamed]
        written = [v for v in plan.stores.values() if plan.column in v.labels]
        wide = any(plan.itemsize(v) > 2 for v in (*streamed, *written))
        return Known(plan, Extents(plan.program, plan.arguments), DeviceMath(fast=not wide))

    @property
    def lanes(self) -> int:
        """Threads that share a row."""
        return self.plan.schedule.lanes

    @property
    def vector(self) -> int:
        """Elements of an access."""
        return self.plan.schedule.vector

    @property
    def chunks(self) -> int:
        """Accesses of a thread along its row."""
        return self.plan.schedule.chunks

    @property
    def piece(self) -> int:
        """Number of chunks computed at a time."""
        return self.plan.piece

    @property
    def pieces(self) -> int:
        """Number of pieces of a thread's columns."""
        return self.chunks // self.piece

    def kind(self, i: int) -> str:
        """The monoid of a reduction, by name."""
        how = self.plan.program.ops[i].facets.reduces
        assert how is not None
        return how.name

    def chunk_at(self, p: int, c: int) -> int:
        """Columns between a thread's first access and the c-th one of a piece."""
        return (p * self.piece + c) * self.lanes * self.vector

    def inside(self, p: int, place: Place) -> list[Any]:
        """Predicates of the accesses of a piece that are true before the end of the part.
        None if true for all lanes."""
        smallest = self.plan.length - (self.plan.parts - 1) * self.plan.width
        starts = [self.chunk_at(p, c) for c in range(self.piece)]
        return [
            place.first + at < place.left if at + self.lanes * self.vector > smallest
            else None
            for at in starts
        ]  # fmt: skip

    def columns(self, p: int, piece: int, first: Any) -> Any:
        """Positions (Int32 fragment) of a piece in the part of this block.
        ``first``: that of the thread."""
        index = fragment((self.vector, piece), Int32)
        for c in range(piece):
            for e in range(self.vector):
                index[e, c] = first + self.chunk_at(p, c) + e
        return index.load()


@dataclass(frozen=True)
class Memory:
    """Shared memory of a block.

    Attributes:
        ring: tiles of rows (int32 words); reused at the end.
        slots: of reductions (fp32).
        stages: full stages of the ring.
        reduced: by level, for even and odd tiles, bytes that the cluster sends; None without one.
    """

    ring: cute.Pointer
    slots: cute.Pointer
    stages: Ring
    reduced: Barriers | None

    @property
    def floats(self) -> cute.Pointer:
        """The ring as fp32 values."""
        return cute.recast_ptr(self.ring, dtype=Float32)


@dataclass(frozen=True)
class Place:
    """Coordinates of a block and a thread.

    Attributes:
        block: index in the grid.
        thread: index in the block.
        rank: of the block in its cluster.
        walker: index of the block (or cluster) among the ``walkers`` that share rows.
        outer: coordinates along outer labels.
        part: of the row that the block has.
        lane: index of the thread among those of its rows.
        group: of threads that share rows.
        first: column of the thread in the part.
        left: columns of the part.
        piece: chunks that the thread computes at a time.
    """

    block: Any
    thread: Any
    rank: Any
    walker: Any
    walkers: Any
    outer: dict[str, Any]
    part: Any
    lane: Any
    group: Any
    first: Any
    left: Any
    piece: int


@dataclass(frozen=True)
class SlicePlace(Place):
    """Coordinates in the slice of columns of a block, which has all rows.

    Attributes:
        column: first one of the slice.
        unit: of the outer labels.
        x, y: the thread's place, along the columns and along the rows.
        exists: true if the block has a slice.
    """

    column: Any
    unit: Any
    x: Any
    y: Any
    exists: Any


@dataclass(frozen=True)
class Row:
    """A row of a thread.

    Attributes:
        row: its index.
        valid: predicate that is true if it exists.
        local: index in the tile; None in a slice.
        memory: its stage of the ring, or None.
        scalars, fragments: by load.
        picked: an `Asked` by operation; None in a slice.
    """

    row: Any
    valid: Any
    local: Any = None
    memory: Any = None
    scalars: dict[int, Any] = field(default_factory=dict)
    fragments: dict[int, Any] = field(default_factory=dict)
    picked: dict[int, Any] | None = None
