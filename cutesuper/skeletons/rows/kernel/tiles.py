"""Tiles of a row loop: through a ring filled by bulk loads, or straight into registers.

The first warp fills the ring: one lane copies a whole tile if its rows are neighbours in memory,
otherwise every lane copies some rows. Values of rows (statistics, labels) travel in the stage as
well, 4 or 8 bytes at a time (`cp.async`): loaded beside the loop instead, they cost up to a quarter
of the time.

A stage is filled again once all warps have read it, which the barrier of the first reduction shows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from cutesuper.device.memory import EVICT_FIRST
from cutesuper.ir.dims import ceil_div
from cutesuper.skeletons.base import View
from cutesuper.skeletons.kernel.arguments import ELEMENT
from cutesuper.skeletons.rows.plan import LINE

if TYPE_CHECKING:
    from cutesuper.skeletons.rows.kernel.loop import RowLoopKernel


class Tiles:
    """The source of a tile's rows: the ring, or device memory."""

    def __init__(self, kernel: RowLoopKernel) -> None:
        self.k = kernel
        plan = self.plan = kernel.plan
        self.stages, self.rows = plan.schedule.stages, plan.tile_rows
        self.base: dict[int, int] = {}
        at = 0
        for i, size in plan.row_bytes.items():
            self.base[i] = at
            at += self.rows * size
        for i, size in plan.scalar_bytes.items():
            self.base[i] = at
            at += size
        #: neighbouring values of rows in one bulk load: those of a tile, at least 16 bytes
        self.span = max(4, self.rows)
        linear = not plan.outer and all(
            plan.row_stride(plan.loads[i]) == 1 and plan.itemsize(plan.loads[i]) == 4
            for i in plan.scalars
        )
        #: loads whose tiles are contiguous in memory
        self.whole = plan.parts == 1 and all(
            plan.row_stride(plan.loads[i]) == plan.length for i in plan.streamed
        )
        self.bulk_scalars = bool(plan.scalars) and linear and self.whole
        self.async_scalars = bool(plan.scalars) and not self.bulk_scalars

    # ---------------------------------------------------------------------------------- which tiles

    def row_count(self, tensors: list[cute.Tensor]) -> Any:
        """Number of rows of one element of the outer labels."""
        count: Any = 1
        for d in self.plan.rows:
            count = count * self.k.extents.of(d, tensors)
        return count

    def count(self, tensors: list[cute.Tensor]) -> Any:
        """Number of tiles of one element of the outer labels."""
        return (self.row_count(tensors) + (self.rows - 1)) // self.rows

    def of_block(self, tensors: list[cute.Tensor], place: dict[str, Any]) -> Any:
        """Number of tiles that this block walks over."""
        walkers = place["walkers"]
        if self.plan.one_tile:
            return 1  # a block for each tile; saves 30 instructions before the first load
        return (self.count(tensors) - place["walker"] + (walkers - 1)) // walkers

    def first_row(self, it: Any, place: dict[str, Any]) -> Any:
        """The first row of a block's tile."""
        return (place["walker"] + it * place["walkers"]) * self.rows

    # -------------------------------------------------------------------------------------- filling

    @cute.jit
    def start_barriers(self, smem, tidx):
        """Initialise the barriers: one arrival for the bytes of a stage, and one of every lane for
        its values of rows."""
        if cutlass.const_expr(self.stages > 0):
            if tidx < 32:
                if tidx == 0:
                    for s in cutlass.range_constexpr(self.stages):
                        lanes = 32 if cutlass.const_expr(self.async_scalars) else 0
                        cute.arch.mbarrier_init(smem["full"] + s, 1 + lanes)
                    cute.arch.mbarrier_init_fence()
                # the lanes that fill the ring arrive at these before the block's barrier; no copy
                # is in flight yet that the fence would wait for
                cute.arch.sync_warp()
                cute.arch.fence_proxy("async.shared", space="cta")

    def everybody_has_read(self) -> None:
        """Wait, before a stage is filled again, until all threads have read it."""
        if self.stages > 0:
            cute.arch.sync_threads()

    def refill(
        self,
        it: Any,
        count: Any,
        smem: dict[str, Any],
        tensors: list[cute.Tensor],
        place: dict[str, Any],
    ) -> None:
        """Request the tile that takes the place of this one."""
        if self.stages > 0:
            self.fill(it + self.stages, count, smem, tensors, place, True)

    def stage(self, it: Any, smem: dict[str, Any]) -> cute.Pointer:
        """Shared memory of a tile."""
        words = it % self.stages * (self.plan.stage_bytes // 4)
        return smem["ring"] + cute.assume(words, divby=LINE // 4)

    @cute.jit
    def fill(self, it, count, smem, tensors, place, again: cutlass.Constexpr = False):
        """Request a tile; ``again``: the stage held another tile before."""
        if place["thread"] < 32 and it < count:
            stage = it % self.stages
            barrier = smem["full"] + stage
            memory = self.stage(it, smem)
            row = self.first_row(it, place)
            left = cutlass.min(self.row_count(tensors) - row, self.rows)
            lane = place["thread"]
            if cutlass.const_expr(again):
                # orders reads before the barrier before later bulk writes; it also waits for loads
                # of the warp, at the beginning those of vectors
                cute.arch.fence_proxy("async.shared", space="cta")
            if cutlass.const_expr(self.whole and self.bulk_scalars):
                if row - row % 4 + self.span <= self.row_count(tensors) and left == self.rows:
                    if lane == 0:
                        self.fill_tile(memory, barrier, tensors, row, place)
                else:
                    self.fill_rows(memory, barrier, tensors, row, left, lane, place)
            elif cutlass.const_expr(self.whole):
                if left == self.rows:
                    if lane == 0:
                        self.fill_tile(memory, barrier, tensors, row, place)
                else:
                    self.fill_rows(memory, barrier, tensors, row, left, lane, place)
            else:
                self.fill_rows(memory, barrier, tensors, row, left, lane, place)
            if cutlass.const_expr(self.async_scalars):
                for i in cutlass.range_constexpr(len(self.plan.scalars)):
                    self.fill_scalars(self.plan.scalars[i], memory, tensors, row, left, lane, place)
                cute.arch.cp_async_mbarrier_arrive_noinc(barrier)

    @cute.jit
    def fill_tile(self, memory, barrier, tensors, row, place):
        """Request a whole tile: one bulk load of every operand."""
        self.expect(barrier, self.rows, place)
        if cutlass.const_expr(self.bulk_scalars):
            for n in cutlass.range_constexpr(len(self.plan.scalars)):
                i = self.plan.scalars[n]
                first = row - row % 4
                self.copy_linear(i, memory, barrier, tensors, first, self.base[i], self.span)
        self.copy_rows(memory, barrier, tensors, row, 0, self.rows, place)

    def copy_linear(
        self,
        i: int,
        memory: Any,
        barrier: Any,
        tensors: list[cute.Tensor],
        first: Any,
        base: int,
        length: int,
    ) -> None:
        """Issue a bulk load of ``length`` neighbouring values of rows."""
        view = self.plan.loads[i]
        dtype = ELEMENT[self.plan.arguments[view.argument].dtype]
        atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), dtype)
        layout = cute.make_layout(length)
        source = tensors[view.argument].iterator + cute.assume(first, divby=4)
        target = cute.recast_ptr(memory + base // 4, dtype=dtype)
        cute.copy(
            atom, cute.make_tensor(source, layout), cute.make_tensor(target, layout),
            mbar_ptr=barrier,
        )  # fmt: skip

    @cute.jit
    def fill_rows(self, memory, barrier, tensors, row, left, lane, place):
        """Request a tile row by row: every lane requests some."""
        if cutlass.const_expr(self.bulk_scalars):
            for n in cutlass.range_constexpr(len(self.plan.scalars)):
                self.move_scalars(self.plan.scalars[n], memory, tensors, row, left, lane)
            cute.arch.sync_warp()
        if lane == 0:
            self.expect(barrier, left, place)
        cute.arch.sync_warp()
        for n in cutlass.range(ceil_div(self.rows, 32), unroll=1):
            r = lane + 32 * n
            if r < left:
                self.copy_rows(memory, barrier, tensors, row + r, r, 1, place)

    @cute.jit
    def move_scalars(self, i: cutlass.Constexpr, memory, tensors, row, left, lane):
        """Copy the row values of a tile at the end by ordinary loads and stores."""
        view = self.plan.loads[i]
        dtype = ELEMENT[self.plan.arguments[view.argument].dtype]
        base = cute.recast_ptr(memory + self.base[i] // 4, dtype=dtype) + row % 4
        for n in cutlass.range(ceil_div(self.rows, 32), unroll=1):
            r = lane + 32 * n
            if r < left:
                source = cute.make_tensor(
                    tensors[view.argument].iterator + (row + r), cute.make_layout(1)
                )
                cute.make_tensor(base + r, cute.make_layout(1))[0] = source[0]

    @cute.jit
    def expect(self, barrier, rows, place):
        """Arm a barrier with the bytes of some rows."""
        whole = sum(self.plan.row_bytes.values())
        last = whole // self.plan.width * self.last_width()
        if cutlass.const_expr(last == whole):
            more = 0
            if cutlass.const_expr(isinstance(rows, int) and self.bulk_scalars):
                more = 4 * self.span * len(self.plan.scalars)
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, rows * whole + more)
        else:
            each = Int32(whole)
            if place["left"] < self.plan.width:
                each = Int32(last)
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, rows * each)

    def last_width(self) -> int:
        """Number of elements in the last part of a row."""
        plan = self.plan
        return plan.length - (plan.parts - 1) * plan.width

    @cute.jit
    def copy_rows(self, memory, barrier, tensors, row, r, count: cutlass.Constexpr, place):
        """Issue bulk loads of ``count`` neighbouring rows of all operands, to row r of the
        stage."""
        for n in cutlass.range_constexpr(len(self.plan.streamed)):
            i = self.plan.streamed[n]
            if cutlass.const_expr(self.last_width() == self.plan.width):
                self.copy(i, memory, barrier, tensors, row, r, count * self.plan.width, place)
            else:
                if place["left"] < self.plan.width:
                    self.copy(i, memory, barrier, tensors, row, r, self.last_width(), place)
                else:
                    self.copy(i, memory, barrier, tensors, row, r, self.plan.width, place)

    def copy(
        self,
        i: int,
        memory: Any,
        barrier: Any,
        tensors: list[cute.Tensor],
        row: Any,
        r: Any,
        length: int,
        place: dict[str, Any],
    ) -> None:
        """Issue one bulk load of ``length`` elements."""
        view = self.plan.loads[i]
        dtype = ELEMENT[self.plan.arguments[view.argument].dtype]
        atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), dtype)
        start = cute.assume(self.k.offset(view, tensors, row, place), divby=128 // dtype.width)
        layout = cute.make_layout(length)
        words = cute.assume(self.base[i] // 4 + r * (self.plan.row_bytes[i] // 4), divby=4)
        target = cute.recast_ptr(memory + words, dtype=dtype)
        source = tensors[view.argument].iterator + start
        cute.copy(
            atom, cute.make_tensor(source, layout), cute.make_tensor(target, layout),
            mbar_ptr=barrier, cache_policy=Int64(EVICT_FIRST),
        )  # fmt: skip

    @cute.jit
    def fill_scalars(self, i: cutlass.Constexpr, memory, tensors, row, left, lane, place):
        """Copy values of the tile's rows to the stage, each lane some."""
        view = self.plan.loads[i]
        dtype = ELEMENT[self.plan.arguments[view.argument].dtype]
        atom = cute.make_copy_atom(cpasync.CopyG2SOp(), dtype, num_bits_per_copy=dtype.width)
        base = cute.recast_ptr(memory + self.base[i] // 4, dtype=dtype)
        for n in cutlass.range(ceil_div(self.rows, 32), unroll=1):
            r = lane + 32 * n
            if r < left:
                source = tensors[view.argument].iterator + self.k.offset(
                    view, tensors, row + r, place
                )
                cute.copy(
                    atom,
                    cute.make_tensor(source, cute.make_layout(1)),
                    cute.make_tensor(base + r, cute.make_layout(1)),
                )

    # -------------------------------------------------------------------------------------- reading

    def read(
        self, it: Any, smem: dict[str, Any], tensors: list[cute.Tensor], place: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """Read the rows of this thread.

        Returns for each: its index ``row``, ``local`` in the tile; the predicate ``valid``;
        ``memory``, its stage of the ring; ``scalars`` and ``fragments`` by load; ``picked``
        elements by operation.
        """
        plan, k = self.plan, self.k
        first, rows = self.first_row(it, place), self.row_count(tensors)
        exact = isinstance(rows, int) and rows % self.rows == 0
        memory = None
        if self.stages:
            stage = it % self.stages
            cute.arch.mbarrier_wait(smem["full"] + stage, (it // self.stages) % 2)
            memory = self.stage(it, smem)
        found = []
        for r in range(plan.schedule.depth):
            local = place["group"] * plan.schedule.depth + r
            row = first + local
            entry = {
                "row": row,
                "local": local,
                "valid": True if exact else row < rows,
                "memory": memory,
                "fragments": {},
            }
            found.append(entry)
        for entry in found:
            entry["scalars"] = {i: self.scalar(i, entry, tensors, place) for i in plan.scalars}
            if plan.schedule.kept:
                existing = self.existing(entry["row"], tensors)
                for i in plan.streamed:
                    if self.stages:
                        entry["fragments"][i] = self.fragment(i, entry, 0, place)
                    else:
                        entry["fragments"][i] = k.read(plan.loads[i], tensors, existing, 0, place)
        for entry in found:  # after the rows, which do not wait for labels
            entry["picked"] = {i: k.picks.ask(i, entry, tensors, place) for i in plan.picked}
        return found

    def existing(self, row: Any, tensors: list[cute.Tensor]) -> Any:
        """Index of the row, or of the last one if it lies past the end."""
        return cutlass.min(row, self.row_count(tensors) - 1)

    def fragment(self, i: int, row: dict[str, Any], p: int, place: dict[str, Any]) -> cute.Tensor:
        """Read a piece of a row from the ring, in its own type."""
        plan, k = self.plan, self.k
        dtype = ELEMENT[plan.arguments[plan.loads[i].argument].dtype]
        registers = cute.make_rmem_tensor(cute.make_layout((k.vector, k.piece)), dtype)
        base = self.row_memory(i, row, dtype)
        wide = min(k.vector, 128 // dtype.width)
        for c in range(k.piece):
            for e in range(0, k.vector, wide):
                at = cute.assume(place["first"] + (k.chunk_at(p, c) + e), divby=wide)
                source = cute.make_tensor(base + at, cute.make_layout(wide))
                own = cute.make_tensor(registers[None, c].iterator + e, cute.make_layout(wide))
                cute.autovec_copy(source, own)
        return registers

    def row_memory(self, i: int, row: dict[str, Any], dtype: Any) -> cute.Pointer:
        """Pointer to the first element of a row in the ring."""
        words = self.base[i] // 4 + row["local"] * (self.plan.row_bytes[i] // 4)
        return cute.recast_ptr(row["memory"] + cute.assume(words, divby=4), dtype=dtype)

    @cute.jit
    def scalar(self, i: cutlass.Constexpr, row, tensors, place):
        """Read a value of a row; floats as fp32."""
        view: View = self.plan.loads[i]
        dtype = ELEMENT[self.plan.arguments[view.argument].dtype]
        if cutlass.const_expr(self.stages > 0):
            base = cute.recast_ptr(row["memory"] + self.base[i] // 4, dtype=dtype)
            at = row["local"]
            if cutlass.const_expr(self.bulk_scalars and self.rows < 4):
                at = at + (row["row"] - row["local"]) % 4
            x = cute.make_tensor(base + at, cute.make_layout(1))[0]
        else:
            at = self.k.offset(view, tensors, self.existing(row["row"], tensors), place)
            x = cute.make_tensor(tensors[view.argument].iterator + at, cute.make_layout(1))[0]
        if cutlass.const_expr(dtype.is_float):
            x = x.to(Float32)
        return x
