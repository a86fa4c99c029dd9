"""The end of a row loop: sums over rows, of which every block has a part.

Every block leaves its sums in device memory and waits for all others; then each block adds up some
columns, in the order of the parts, so that results are the same bits every time. The wait takes 1.6
us at 4096x4096; one block that adds everything up takes 13.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cutesuper.device.fragments import NEUTRAL, combine, fetched, filled, fragment, stored
from cutesuper.device.grid import arrive_in_grid, wait_for_grid
from cutesuper.device.math import choose
from cutesuper.device.memory import neighbours, one, put
from cutesuper.ir.block import LOAD
from cutesuper.ir.dims import ceil_div
from cutesuper.ir.operators.base import lookup
from cutesuper.skeletons.kernel.arguments import dtype_of, unravel
from cutesuper.skeletons.rows.kernel.context import Known, Place
from cutesuper.skeletons.rows.schedule import power_of_two

#: fp32 values of an access
ITEM = 4
#: parts that a thread reads at a time
IN_FLIGHT = 8


class Finish:
    """The steps that complete sums over rows."""

    def __init__(self, known: Known) -> None:
        self.k = known
        plan = self.plan = known.plan
        self.groups = plan.schedule.groups
        #: 16-byte items of a slice, of all sums
        self.items = len(plan.sums) * (plan.slice_columns // ITEM) if plan.sums else 0
        #: threads side by side; the other threads take other parts of the same items
        self.across = min(plan.threads, power_of_two(max(1, self.items)))
        self.down = plan.threads // self.across
        #: partial results left for each item, one by each warp that has it
        self.rows_left = plan.threads // max(32, self.across)

    @cute.jit
    def leave_all(self, sums, memory, scratch, place):
        """Write the sums of this block from registers to device memory, and signal the others."""
        partials, floats = scratch[0], memory.floats
        for s in cutlass.range_constexpr(len(self.plan.sums)):
            acc = sums[s]
            if cutlass.const_expr(not self.plan.has_columns(self.plan.sums[s])):
                acc = self.as_columns(acc[0], self.plan.sums[s].op, place)
            self.leave(s, acc, floats, partials, place)
        cute.arch.sync_threads()
        if cutlass.const_expr(not self.plan.alone):
            if place.thread == 0:
                arrive_in_grid(scratch[1].iterator, place.block, self.plan.grid_blocks)

    @cute.jit
    def run(self, memory, tensors, scratch, place):
        """Wait for all blocks, then add up some columns."""
        partials, floats, plan = scratch[0], memory.floats, self.plan
        if cutlass.const_expr(not plan.alone):
            self.meet(scratch[1], place)
        slices = ceil_div(plan.length, plan.slice_columns)
        for index in cutlass.range(place.block, slices * plan.units, plan.grid_blocks, unroll=1):
            self.add_slice(
                index // slices,
                (index % slices) * plan.slice_columns,
                floats,
                partials,
                tensors,
                place,
            )

    # ---------------------------------------------------------------------------------- every block

    def part_of(self, unit: Any, part: Any, s: int, partials: cute.Tensor) -> cute.Pointer:
        """Pointer to a partial result."""
        plan = self.plan
        index = (unit * plan.partials + part) * len(plan.sums) + s
        return partials.iterator + index * plan.pitch

    def as_columns(self, acc: cute.Tensor, op: str, place: Place) -> list[cute.Tensor]:
        """Place a value of rows in column 0 of a row of columns.
        The value is that of the group's first thread, in the first block of the cluster."""
        k, found = self.k, []
        for p in range(k.chunks // k.piece):
            columns = filled((k.vector, k.piece), NEUTRAL[op])
            if p == 0:
                inside = place.lane + place.part == 0
                columns[0, 0] = choose(inside, acc[0], NEUTRAL[op])
            found.append(columns)
        return found

    @cute.jit
    def leave(self, s: cutlass.Constexpr, acc, floats, partials, place):
        """Write this block's sum, combined over all its groups."""
        plan = self.plan
        target = self.part_of(*self.unit_and_part(place), s, partials)
        target = target + place.part * plan.covered
        if cutlass.const_expr(self.groups == 1):
            self.write(acc, target, place.first)
        else:
            cute.arch.sync_threads()
            self.write(acc, floats + place.group * plan.covered, place.first)
            cute.arch.sync_threads()
            for item in cutlass.range(place.thread, plan.covered // ITEM, plan.threads, unroll=1):
                values = self.get(floats + item * ITEM)
                for g in cutlass.range_constexpr(1, self.groups):
                    other = self.get(floats + (g * plan.covered + item * ITEM))
                    for e in cutlass.range_constexpr(ITEM):
                        values[e] = combine(plan.sums[s].op, values[e], other[e])
                self.put(values, target + item * ITEM)

    def write(self, acc: list[cute.Tensor], target: cute.Pointer, first: Any) -> None:
        """Write all of a thread's columns."""
        k = self.k
        for p, columns in enumerate(acc):
            for c in range(k.piece):
                for e in range(0, k.vector, min(ITEM, k.vector)):
                    wide = min(ITEM, k.vector)
                    at = (target + (first + (k.chunk_at(p, c) + e))).align(4 * wide)
                    own = neighbours(columns[None, c].iterator + e, wide)
                    cute.autovec_copy(own, neighbours(at, wide))

    def unit_and_part(self, place: Place) -> tuple[Any, Any]:
        """Index of the result that a block contributes to, and of its part."""
        plan = self.plan
        unit: Any = Int32(0)
        part: Any = Int32(0)
        for d in plan.outer:
            count = plan.program.dims[d]
            if d in plan.kept_outer:
                unit = unit * count + place.outer[d]
            else:
                part = part * count + place.outer[d]
        return unit, part * place.walkers + place.walker

    @cute.jit
    def meet(self, counter, place):
        """Wait until all blocks have left their sums."""
        if place.thread == 0:
            wait_for_grid(counter.iterator)
        cute.arch.sync_threads()

    # -------------------------------------------------------------------------------------- a slice

    @cute.jit
    def add_slice(self, unit, column, floats, partials, tensors, place):
        """Add up the parts of some columns, then apply and store the operations after the sums."""
        plan = self.plan
        x, y = place.thread % self.across, place.thread // self.across
        totals, partial = floats, floats + len(plan.sums) * plan.slice_columns
        if cutlass.const_expr(self.down == 1):
            for item in cutlass.range(x, self.items, self.across, unroll=1):
                self.put(self.add_item(unit, column, item, y, partials), totals + item * ITEM)
        else:
            item = cutlass.min(x, self.items - 1)
            values = self.add_item(unit, column, item, y, partials)
            distance = 16
            while cutlass.const_expr(distance >= self.across):
                self.merge(values, self.neighbour(values, distance), item)
                distance = distance // 2
            if cutlass.const_expr(self.rows_left > 1):
                cute.arch.sync_threads()
                if place.thread % 32 < self.across or self.across > 32:
                    self.put(values, partial + (self.row_of(place) * self.across + x) * ITEM)
                cute.arch.sync_threads()
                if y == 0 and x < self.items:
                    self.add_rows(partial + x * ITEM, item, totals + x * ITEM)
            else:
                if y == 0 and x < self.items:
                    self.put(values, totals + x * ITEM)
        cute.arch.sync_threads()
        for quad in cutlass.range(place.thread, plan.slice_columns // ITEM, plan.threads, unroll=1):
            self.finish_quad(unit, column, quad, totals, tensors)
        cute.arch.sync_threads()

    def add_rows(self, partial: cute.Pointer, item: Any, total: cute.Pointer) -> None:
        """Combine the partial results of the warps for an item."""
        values = self.get(partial)
        for n in range(1, self.rows_left):
            self.merge(values, self.get(partial + n * self.across * ITEM), item)
        self.put(values, total)

    def row_of(self, place: Place) -> Any:
        """Index of a thread's row of partial sums.
        The lanes of a warp have been combined before."""
        return place.thread // max(32, self.across)

    def neighbour(self, values: cute.Tensor, distance: int) -> cute.Tensor:
        """The value of the lane at some distance."""
        other = fragment(ITEM)
        for e in range(ITEM):
            other[e] = cute.arch.shuffle_sync_bfly(values[e], distance)
        return other

    @cute.jit
    def add_item(self, unit, column, item, y, partials):
        """Add this thread's parts of 4 columns of one sum."""
        plan = self.plan
        quads = plan.slice_columns // ITEM
        s, quad = item // quads, item % quads
        values = fragment(ITEM)
        neutral = Float32(NEUTRAL[plan.sums[0].op])
        if cutlass.const_expr(len({t.op for t in plan.sums}) > 1):
            for n in cutlass.range_constexpr(len(plan.sums)):
                if s == n:
                    neutral = Float32(NEUTRAL[plan.sums[n].op])
        values.fill(neutral)
        # the last slice may reach past the end, where there is nothing to read
        at = cutlass.min(column + quad * ITEM, (plan.length - 1) // ITEM * ITEM)
        # parts of rows have padding between them
        where = at // plan.width * plan.covered + at % plan.width
        each = len(plan.sums) * plan.pitch
        base = self.part_of(unit, 0, 0, partials) + (s * plan.pitch + where)
        # several loads are in flight: one after the other they would take 0.7 us each
        ahead = min(IN_FLIGHT, ceil_div(plan.partials, self.down))
        for first in cutlass.range(y, plan.partials, self.down * ahead, unroll=1):
            found = []
            for n in cutlass.range_constexpr(ahead):
                found.append(self.get_inside(base, first + n * self.down, each, neutral))
            # in pairs: at most 4 roundings in place of 8
            distance = 1
            while cutlass.const_expr(distance < ahead):
                for n in cutlass.range_constexpr(0, ahead - distance, 2 * distance):
                    self.merge(found[n], found[n + distance], item)
                distance = 2 * distance
            self.merge(values, found[0], item)
        return values

    def get_inside(self, base: Any, part: Any, each: int, neutral: Any) -> cute.Tensor:
        """Read 4 values of a part, neutral if there is no such part.
        A branch for each load would put them on the stack."""
        last = self.plan.partials - 1
        values = self.get(base + cutlass.min(part, last) * each)
        for e in range(ITEM):
            values[e] = choose(part <= last, values[e], neutral)
        return values

    @cute.jit
    def merge(self, values, other, item):
        """Combine two parts of an item."""
        plan = self.plan
        quads = plan.slice_columns // ITEM
        kinds = sorted({t.op for t in plan.sums})
        for e in cutlass.range_constexpr(ITEM):
            if cutlass.const_expr(len(kinds) == 1):
                values[e] = combine(kinds[0], values[e], other[e])
            else:
                x = combine(kinds[-1], values[e], other[e])
                for n in cutlass.range_constexpr(len(plan.sums)):
                    if cutlass.const_expr(plan.sums[n].op != kinds[-1]):
                        if item // quads == n:
                            x = combine(plan.sums[n].op, values[e], other[e])
                values[e] = x

    @cute.jit
    def finish_quad(self, unit, column, quad, totals, tensors):
        """Apply the operations that follow the sums to 4 columns, and store them."""
        plan = self.plan
        outer = unravel(unit, {d: plan.program.dims[d] for d in plan.kept_outer})
        known = {}
        for n in cutlass.range_constexpr(len(plan.sums)):
            s = plan.sums[n]
            values = self.get(totals + (n * plan.slice_columns + quad * ITEM)).load()
            if cutlass.const_expr(not plan.has_columns(s)):
                values = values[0]
            known[s.final] = self.mean(values, s.means, tensors)
        first = column + quad * ITEM
        for i in cutlass.range_constexpr(len(plan.program.ops)):
            if cutlass.const_expr(i in plan.stores and i not in self.in_loop()):
                value = self.value(plan.program.ops[i].inputs[0], known, first, outer, tensors)
                self.store(i, value, first, outer, tensors)

    def mean(self, values: Any, labels: tuple[str, ...], tensors: list[cute.Tensor]) -> Any:
        """A sum divided by the extents of some labels."""
        count = self.k.extents.count(labels, tensors)
        if isinstance(count, int) and count & (count - 1) == 0:
            return values * (1.0 / count)
        return values / Float32(count)  # rounded once; there are few of them

    def in_loop(self) -> set[int]:
        """Stores executed in every tile."""
        return {i for level in self.plan.levels for i in level.stores}

    def value(
        self,
        i: int,
        known: dict[int, Any],
        first: Any,
        outer: dict[str, Any],
        tensors: list[cute.Tensor],
    ) -> Any:
        """The value of an operation at 4 columns."""
        if i not in known:
            op = self.plan.program.ops[i]
            if op.kind == LOAD:
                known[i] = self.load(i, first, outer, tensors)
            else:
                args = [self.value(j, known, first, outer, tensors) for j in op.inputs]
                known[i] = lookup(op.kind).scalar(self.k.math, args, op.attributes)
        return known[i]

    @cute.jit
    def load(self, i: cutlass.Constexpr, first, outer, tensors):
        """Load 4 columns, or a number."""
        plan, view = self.plan, self.plan.loads[i]
        base = tensors[view.argument].iterator + self.offset(view, first, outer)
        if cutlass.const_expr(plan.column not in view.labels):
            result = one(base)[0].to(Float32)
        else:
            registers = filled(ITEM, 0, dtype_of(plan, view))
            for e in cutlass.range_constexpr(ITEM):
                if first + e < plan.length:
                    at = base + e * view.stride(plan.column)
                    registers[e] = one(at)[0]
            result = registers.load().to(Float32)
        return result

    def offset(self, view: Any, first: Any, outer: dict[str, Any]) -> Any:
        """Offset in elements of the first column."""
        at = first * view.stride(self.plan.column)  # stride 0 without columns
        for d, index in outer.items():
            at = at + index * view.stride(d)
        return at

    @cute.jit
    def store(self, i: cutlass.Constexpr, value, first, outer, tensors):
        """Write 4 columns, as far as they are inside the row."""
        plan, view = self.plan, self.plan.stores[i]
        dtype = dtype_of(plan, view)
        base = tensors[view.argument].iterator + self.offset(view, first, outer)
        if cutlass.const_expr(plan.column not in view.labels):
            if first == 0:
                put(base, Float32(value).to(dtype))
        else:
            self.store_columns(view, base, stored(value, ITEM, dtype), first)

    @cute.jit
    def store_columns(self, view: cutlass.Constexpr, base, registers, first):
        """Write 4 neighbouring columns."""
        plan = self.plan
        wide = view.run(plan.column, ITEM, plan.length)
        for e in cutlass.range_constexpr(0, ITEM, wide):
            if first + e < plan.length:
                at = base + e * view.stride(plan.column)
                at = at.align(wide * dtype_of(plan, view).width // 8)
                cute.autovec_copy(neighbours(registers.iterator + e, wide), neighbours(at, wide))

    # --------------------------------------------------------------------------------------- access

    def get(self, at: cute.Pointer) -> cute.Tensor:
        """Read 4 fp32 values."""
        return fetched(neighbours(at.align(4 * ITEM), ITEM))

    def put(self, registers: cute.Tensor, at: cute.Pointer) -> None:
        """Write 4 fp32 values."""
        cute.autovec_copy(registers, neighbours(at.align(4 * ITEM), ITEM))
