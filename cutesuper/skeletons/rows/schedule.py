"""The schedules (knobs) of row kernels, and of kernels that walk over rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from cutesuper.ir.dims import ceil_div
from cutesuper.skeletons.schedule import Schedule, Values


@dataclass(frozen=True)
class RowSchedule(Schedule):
    """Knobs of a row kernel.

    Attributes:
        lanes: threads that share one row, a power of two.
        vector: elements per memory access of a thread.
        chunks: accesses per thread and row.
        rows: rows a block computes at a time.
        interleaved: neighbouring threads take neighbouring rows, not neighbouring elements: for
            rows that are strided in memory, where this makes accesses coalesce.
    """

    kind: ClassVar[str] = "rows"
    knobs: ClassVar[dict[str, Values]] = {
        "lanes": lambda s: (s.lanes * 2, s.lanes // 2),
        "rows": lambda s: (s.rows * 2, s.rows // 2),
        "vector": lambda s: (s.vector // 2,),
        "chunks": lambda s: (s.chunks // 2,),
    }
    fixed: ClassVar[tuple[str, ...]] = ("dependent_launch", "interleaved")

    lanes: int
    vector: int
    chunks: int
    rows: int
    interleaved: bool = False

    def settled(self, old: RowSchedule, knob: str) -> RowSchedule:
        """This schedule, adjusted: rows of other lanes or vectors still cover their width."""
        if knob not in ("lanes", "vector") or not self.lanes or not self.vector:
            return self
        width = old.lanes * old.vector * old.chunks
        return replace(self, chunks=ceil_div(width, self.lanes * self.vector))

    def mistake(self, default: Any) -> str:
        """Check powers of two, whole warps, and knobs that the layout of the tensors determines."""
        usual = default.schedule
        powers = (self.lanes, self.vector, self.rows)
        if any(n < 1 or n & (n - 1) for n in powers) or self.chunks < 1:
            return "lanes, vector and rows must be powers of two, chunks at least 1"
        if self.lanes * self.rows % 32:
            return f"{self.lanes * self.rows} threads are no whole warps"
        if self.interleaved != usual.interleaved:
            return "interleaved is decided by how the tensors lie in memory"
        if usual.vector % self.vector:
            return f"the tensors are not aligned for accesses of {self.vector} elements"
        if self.interleaved and (self.lanes, self.vector) != (usual.lanes, usual.vector):
            return "interleaved rows keep their lanes and vectors"
        return ""


@dataclass(frozen=True)
class RowLoopSchedule(Schedule):
    """Knobs of a kernel that walks over rows.

    Attributes:
        lanes: threads of a block that share one row, a power of two.
        vector: elements per memory access of a thread.
        chunks: accesses per thread and row.
        groups: groups of ``lanes`` threads: rows side by side.
        depth: neighbouring rows that a group takes at a time; a tile has ``groups * depth``.
        stages: tiles of the ring in shared memory; 0 reads tiles straight into registers.
        kept: a tile is kept in registers while it is computed on; otherwise it is read from the
            ring again after every reduction.
        blocks: blocks (or clusters) that walk over the rows, if the program leaves that open; 0:
            one for each tile.
        resident: blocks that share an SM, which decides how many registers threads have: while one
            waits for an exchange or for loads, another one computes.
        sliced: sums over rows are computed in a second pass, in which each block has some columns
            of all rows, so that blocks do not meet. For few rows.
    """

    kind: ClassVar[str] = "row loop"
    knobs: ClassVar[dict[str, Values]] = {
        "lanes": lambda s: (s.lanes * 2, s.lanes // 2),
        "vector": lambda s: (),
        "chunks": lambda s: (),
        "groups": lambda s: (s.groups * 2, s.groups // 2),
        "depth": lambda s: (s.depth * 2, s.depth // 2),
        "stages": lambda s: (s.stages + 1, s.stages - 1) if s.stages else (),
        "blocks": lambda s: (s.blocks * 2, s.blocks // 2),
        "resident": lambda s: (s.resident % 3 + 1, (s.resident + 1) % 3 + 1),
    }

    lanes: int
    vector: int
    chunks: int
    groups: int
    depth: int = 1
    stages: int = 2
    kept: bool = True
    blocks: int = 132
    resident: int = 1
    sliced: bool = False

    def settled(self, old: RowLoopSchedule, knob: str) -> RowLoopSchedule:
        """This schedule, adjusted: lanes cover as much of a row, and a tile keeps its threads and
        rows: with more lanes, or fewer threads, a group takes more of them. Slices are read without
        a ring; blocks that meet have one."""
        if knob == "lanes" and self.lanes:
            groups = max(1, old.lanes * old.groups // self.lanes)
            width, rows = old.lanes * old.vector * old.chunks, old.groups * old.depth
            chunks = ceil_div(width, self.lanes * self.vector)
            return replace(self, chunks=chunks, groups=groups, depth=max(1, rows // groups))
        if knob == "groups" and self.groups:
            return replace(self, depth=max(1, old.groups * old.depth // self.groups))
        if knob == "sliced":
            return replace(self, stages=0 if self.sliced else 2, kept=True)
        return self

    def mistake(self, default: Any) -> str:
        """Check the number of blocks, which a program with sums over rows has decided."""
        usual = default.schedule
        fixed = default.sums and not self.sliced and not usual.sliced
        if fixed and self.blocks != usual.blocks:
            return f"the program says that {usual.blocks} blocks walk over the rows"
        return ""
