"""Tiles of a row loop: through a ring filled by bulk loads, or straight into registers.

The first warp fills the ring: one lane copies a whole tile if its rows are neighbours in memory,
otherwise every lane copies some rows. Values of rows (statistics, labels) travel in the stage as
well, 4 or 8 bytes at a time (`cp.async`): loaded beside the loop instead, they cost up to a quarter
of the time.

A stage is filled again once all warps have read it, which the barrier of the first reduction shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cutesuper.device.barriers import Barrier, fence_copies, publish
from cutesuper.device.memory import (
    EVICT_FIRST,
    bulk_copy,
    copy_element,
    element,
    element_atom,
    one,
)
from cutesuper.ir.dims import ceil_div
from cutesuper.skeletons.base import View
from cutesuper.skeletons.kernel.arguments import dtype_of
from cutesuper.skeletons.rows.kernel.access import Access
from cutesuper.skeletons.rows.kernel.context import Known, Memory, Place, Row
from cutesuper.skeletons.rows.kernel.picks import Picks
from cutesuper.skeletons.rows.kernel.stages import Stages


@dataclass(frozen=True)
class Filling:
    """A tile on its way into a stage of the ring.

    Attributes:
        into: the stage (int32 words).
        barrier: that of the stage.
        tensors: arguments of the kernel.
        row: first row of the tile.
        left: number of its rows that exist.
        lane: of the warp that fills.
        place: of the block.
    """

    into: cute.Pointer
    barrier: Barrier
    tensors: list[cute.Tensor]
    row: Any
    left: Any
    lane: Any
    place: Place


class Tiles:
    """The source of a tile's rows: the ring, or device memory."""

    def __init__(self, known: Known, access: Access, stages: Stages, picks: Picks) -> None:
        self.k, self.access, self.at, self.picks = known, access, stages, picks
        plan = self.plan = known.plan
        self.stages, self.rows = stages.stages, stages.rows
        #: neighbouring values of rows in one bulk load: those of a tile, at least 16 bytes
        self.span = max(4, self.rows)
        linear = not plan.outer and all(
            plan.row_stride(v) == 1 and plan.itemsize(v) == 4 and v.offset % 4 == 0
            for v in (plan.loads[i] for i in plan.scalars)
        )
        #: loads whose tiles are contiguous in memory
        self.whole = plan.parts == 1 and all(
            plan.row_stride(plan.loads[i]) == plan.length for i in plan.streamed
        )
        self.bulk_scalars = bool(plan.scalars) and linear and self.whole
        self.async_scalars = bool(plan.scalars) and not self.bulk_scalars
        #: on the barrier of a stage: one for its bytes, and one of every lane for values of rows
        self.arrivals = 33 if self.async_scalars else 1

    # -------------------------------------------------------------------------------------- filling

    @cute.jit
    def start_barriers(self, memory, tidx):
        """Initialise the barriers of the ring."""
        if cutlass.const_expr(self.stages > 0):
            if tidx < 32:
                if tidx == 0:
                    memory.stages.full.initialise()
                    publish()
                # the lanes that fill the ring arrive at these before the block's barrier; no copy
                # is in flight yet that the fence would wait for
                cute.arch.sync_warp()
                fence_copies()

    def everybody_has_read(self) -> None:
        """Wait, before a stage is filled again, until all threads have read it."""
        if self.stages > 0:
            cute.arch.sync_threads()

    def refill(
        self,
        it: Any,
        count: Any,
        memory: Memory,
        tensors: list[cute.Tensor],
        place: Place,
    ) -> None:
        """Request the tile that takes the place of this one."""
        if self.stages > 0:
            self.fill(it + self.stages, count, memory, tensors, place, True)

    @cute.jit
    def fill(self, it, count, memory, tensors, place, again: cutlass.Constexpr = False):
        """Request a tile; ``again``: the stage held another tile before."""
        if place.thread < 32 and it < count:
            stage = it % self.stages
            barrier = memory.stages.full[stage]
            into = self.at.memory_of(it, memory)
            row = self.at.first_row(it, place)
            left = cutlass.min(self.at.row_count(tensors) - row, self.rows)
            lane = place.thread
            tile = Filling(into, barrier, tensors, row, left, lane, place)
            if cutlass.const_expr(again):
                # orders reads before the barrier before later bulk writes; it also waits for loads
                # of the warp, at the beginning those of vectors
                fence_copies()
            if cutlass.const_expr(self.whole and self.bulk_scalars):
                if row - row % 4 + self.span <= self.at.row_count(tensors) and left == self.rows:
                    if lane == 0:
                        self.fill_tile(tile)
                else:
                    self.fill_rows(tile)
            elif cutlass.const_expr(self.whole):
                if left == self.rows:
                    if lane == 0:
                        self.fill_tile(tile)
                else:
                    self.fill_rows(tile)
            else:
                self.fill_rows(tile)
            if cutlass.const_expr(self.async_scalars):
                for i in cutlass.range_constexpr(len(self.plan.scalars)):
                    self.fill_scalars(self.plan.scalars[i], tile)
                barrier.arrive_after_copies()

    @cute.jit
    def fill_tile(self, tile):
        """Request a whole tile: one bulk load of every operand."""
        self.expect(tile, self.rows)
        if cutlass.const_expr(self.bulk_scalars):
            for n in cutlass.range_constexpr(len(self.plan.scalars)):
                self.copy_scalars(self.plan.scalars[n], tile)
        self.copy_rows(tile, 0, self.rows)

    def copy_scalars(self, i: int, tile: Filling) -> None:
        """Issue a bulk load of the values of a tile's rows, from an aligned one on."""
        view = self.plan.loads[i]
        dtype = dtype_of(self.plan, view)
        first = cute.assume(tile.row - tile.row % 4, divby=4)
        source = tile.tensors[view.argument].iterator + first
        target = cute.recast_ptr(tile.into + self.at.base[i] // 4, dtype=dtype)
        bulk_copy(source, target, self.span, tile.barrier)

    @cute.jit
    def fill_rows(self, tile):
        """Request a tile row by row: every lane requests some."""
        if cutlass.const_expr(self.bulk_scalars):
            for n in cutlass.range_constexpr(len(self.plan.scalars)):
                self.move_scalars(self.plan.scalars[n], tile)
            cute.arch.sync_warp()
        if tile.lane == 0:
            self.expect(tile, tile.left)
        cute.arch.sync_warp()
        for n in cutlass.range(ceil_div(self.rows, 32), unroll=1):
            r = tile.lane + 32 * n
            if r < tile.left:
                self.copy_rows(tile, r, 1)

    @cute.jit
    def move_scalars(self, i: cutlass.Constexpr, tile):
        """Copy the row values of a tile at the end by ordinary loads and stores."""
        view = self.plan.loads[i]
        dtype = dtype_of(self.plan, view)
        base = cute.recast_ptr(tile.into + self.at.base[i] // 4, dtype=dtype) + tile.row % 4
        for n in cutlass.range(ceil_div(self.rows, 32), unroll=1):
            r = tile.lane + 32 * n
            if r < tile.left:
                one(base + r)[0] = element(tile.tensors[view.argument].iterator, tile.row + r)

    @cute.jit
    def expect(self, tile, rows):
        """Arm the barrier with the bytes of some rows."""
        whole = sum(self.plan.row_bytes.values())
        last = whole // self.plan.width * self.last_width()
        if cutlass.const_expr(last == whole):
            more = 0
            if cutlass.const_expr(isinstance(rows, int) and self.bulk_scalars):
                more = 4 * self.span * len(self.plan.scalars)
            tile.barrier.expect(rows * whole + more)
        else:
            each = Int32(whole)
            if tile.place.left < self.plan.width:
                each = Int32(last)
            tile.barrier.expect(rows * each)

    def last_width(self) -> int:
        """Number of elements in the last part of a row."""
        plan = self.plan
        return plan.length - (plan.parts - 1) * plan.width

    @cute.jit
    def copy_rows(self, tile, r, count: cutlass.Constexpr):
        """Issue bulk loads of ``count`` neighbouring rows of all operands.
        ``r`` is the first one in the tile."""
        for n in cutlass.range_constexpr(len(self.plan.streamed)):
            i = self.plan.streamed[n]
            if cutlass.const_expr(self.last_width() == self.plan.width):
                self.copy(i, tile, r, count * self.plan.width)
            else:
                if tile.place.left < self.plan.width:
                    self.copy(i, tile, r, self.last_width())
                else:
                    self.copy(i, tile, r, self.plan.width)

    def copy(self, i: int, tile: Filling, r: Any, length: int) -> None:
        """Issue one bulk load of ``length`` elements, from a row of the tile on."""
        view = self.plan.loads[i]
        dtype = dtype_of(self.plan, view)
        start = self.access.offset(view, tile.tensors, tile.row + r, tile.place)
        start = cute.assume(start, divby=128 // dtype.width)
        words = cute.assume(self.at.base[i] // 4 + r * (self.plan.row_bytes[i] // 4), divby=4)
        target = cute.recast_ptr(tile.into + words, dtype=dtype)
        source = tile.tensors[view.argument].iterator + start
        bulk_copy(source, target, length, tile.barrier, EVICT_FIRST)

    @cute.jit
    def fill_scalars(self, i: cutlass.Constexpr, tile):
        """Copy values of the tile's rows to the stage, each lane some."""
        view = self.plan.loads[i]
        dtype = dtype_of(self.plan, view)
        atom = element_atom(dtype)
        base = cute.recast_ptr(tile.into + self.at.base[i] // 4, dtype=dtype)
        for n in cutlass.range(ceil_div(self.rows, 32), unroll=1):
            r = tile.lane + 32 * n
            if r < tile.left:
                source = tile.tensors[view.argument].iterator + self.access.offset(
                    view, tile.tensors, tile.row + r, tile.place
                )
                copy_element(atom, source, base + r)

    # -------------------------------------------------------------------------------------- reading

    def read(self, it: Any, memory: Memory, tensors: list[cute.Tensor], place: Place) -> list[Row]:
        """Read the rows of this thread."""
        plan = self.plan
        first, rows = self.at.first_row(it, place), self.at.row_count(tensors)
        exact = isinstance(rows, int) and rows % self.rows == 0
        stage = None
        if self.stages:
            memory.stages.full[it % self.stages].wait((it // self.stages) % 2)
            stage = self.at.memory_of(it, memory)
        found = list[Row]()
        for r in range(plan.schedule.depth):
            local = place.group * plan.schedule.depth + r
            row = first + local
            found.append(Row(row, True if exact else row < rows, local, stage, picked={}))
        for entry in found:
            for i in plan.scalars:
                entry.scalars[i] = self.scalar(i, entry, tensors, place)
            if plan.schedule.kept:
                existing = self.at.existing(entry.row, tensors)
                for i in plan.streamed:
                    if self.stages:
                        entry.fragments[i] = self.at.fragment(i, entry, 0, place)
                    else:
                        view = plan.loads[i]
                        entry.fragments[i] = self.access.read(view, tensors, existing, 0, place)
        for entry in found:  # after the rows, which do not wait for labels
            for i in plan.picked:
                entry.picked[i] = self.picks.ask(i, entry, tensors, place)
        return found

    @cute.jit
    def scalar(self, i: cutlass.Constexpr, row, tensors, place):
        """Read a value of a row; floats as fp32."""
        view: View = self.plan.loads[i]
        dtype = dtype_of(self.plan, view)
        if cutlass.const_expr(self.stages > 0):
            base = cute.recast_ptr(row.memory + self.at.base[i] // 4, dtype=dtype)
            at = row.local
            if cutlass.const_expr(self.bulk_scalars and self.rows < 4):
                at = at + (row.row - row.local) % 4
            x = element(base, at)
        else:
            at = self.access.offset(view, tensors, self.at.existing(row.row, tensors), place)
            x = element(tensors[view.argument].iterator, at)
        if cutlass.const_expr(dtype.is_float):
            x = x.to(Float32)
        return x
