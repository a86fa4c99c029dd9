"""The tiles of a row loop: which rows they have, and where these lie in the stages of the ring."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute

from cutesuper.device.fragments import fragment
from cutesuper.device.memory import neighbours
from cutesuper.skeletons.kernel.arguments import dtype_of
from cutesuper.skeletons.rows.kernel.context import Known, Memory, Place, Row
from cutesuper.skeletons.rows.plan import LINE


class Stages:
    """Rows of tiles, and their memory in a stage."""

    def __init__(self, known: Known) -> None:
        self.k = known
        plan = self.plan = known.plan
        self.stages, self.rows = plan.schedule.stages, plan.tile_rows
        self.base: dict[int, int] = {}
        at = 0
        for i, size in plan.row_bytes.items():
            self.base[i] = at
            at += self.rows * size
        for i, size in plan.scalar_bytes.items():
            self.base[i] = at
            at += size

    def row_count(self, tensors: list[cute.Tensor]) -> Any:
        """Number of rows of one element of the outer labels."""
        return self.k.extents.count(self.plan.rows, tensors)

    def count(self, tensors: list[cute.Tensor]) -> Any:
        """Number of tiles of one element of the outer labels."""
        return (self.row_count(tensors) + (self.rows - 1)) // self.rows

    def of_block(self, tensors: list[cute.Tensor], place: Place) -> Any:
        """Number of tiles that this block walks over."""
        walkers = place.walkers
        if self.plan.one_tile:
            return 1  # a block for each tile; saves 30 instructions before the first load
        return (self.count(tensors) - place.walker + (walkers - 1)) // walkers

    def first_row(self, it: Any, place: Place) -> Any:
        """The first row of a block's tile."""
        return (place.walker + it * place.walkers) * self.rows

    def existing(self, row: Any, tensors: list[cute.Tensor]) -> Any:
        """Index of the row, or of the last one if it lies past the end."""
        return cutlass.min(row, self.row_count(tensors) - 1)

    def memory_of(self, it: Any, memory: Memory) -> cute.Pointer:
        """Shared memory of a tile."""
        words = it % self.stages * (self.plan.stage_bytes // 4)
        return memory.ring + cute.assume(words, divby=LINE // 4)

    def row_memory(self, i: int, row: Row, dtype: Any) -> cute.Pointer:
        """Pointer to the first element of a row in the ring."""
        words = self.base[i] // 4 + row.local * (self.plan.row_bytes[i] // 4)
        return cute.recast_ptr(row.memory + cute.assume(words, divby=4), dtype=dtype)

    def fragment(self, i: int, row: Row, p: int, place: Place) -> cute.Tensor:
        """Read a piece of a row from the ring, in its own type.

        Threads past the row's end read its last elements, which count nowhere: what lies behind
        may be memory that a load of another tile is just filling.
        """
        plan, k = self.plan, self.k
        dtype = dtype_of(plan, plan.loads[i])
        registers = fragment((k.vector, k.piece), dtype)
        base = self.row_memory(i, row, dtype)
        wide = min(k.vector, 128 // dtype.width)
        for c, inside in enumerate(k.inside(p, place)):
            first = place.first + k.chunk_at(p, c)
            if inside is not None:
                first = cutlass.min(first, place.left - k.vector)
            for e in range(0, k.vector, wide):
                at = cute.assume(first + e, divby=wide)
                own = neighbours(registers[None, c].iterator + e, wide)
                cute.autovec_copy(neighbours(base + at, wide), own)
        return registers
