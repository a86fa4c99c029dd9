"""Row kernels, traced: walk a `RowPlan` operation by operation on register fragments."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32
from cutlass.cutlass_dsl import select_

from cutesuper.device.fragments import (
    combine,
    element_of,
    filled,
    fragment,
    joined,
    neutral,
    packed,
    reduced,
    result,
    shuffled,
    stored,
    widen,
    words,
)
from cutesuper.device.launch import start_successor, wait_for_predecessor
from cutesuper.device.math import DeviceMath
from cutesuper.device.memory import at_address, element, neighbours, one, put
from cutesuper.ir.block import LOAD, AxisKind, BlockOp
from cutesuper.ir.dims import ceil_div, extent
from cutesuper.ir.operators.base import Operator, lookup
from cutesuper.skeletons.base import Indexed, View
from cutesuper.skeletons.kernel.arguments import Extents, dtype_of, handed_over, named_row
from cutesuper.skeletons.rows.kernel.scans import Lane, Scan
from cutesuper.skeletons.rows.plan import RowPlan, words_of

#: shared memory that two blocks without a ring need at most, in percent of an SM's; the rest is L1
CARVEOUT = 10


@dataclass(frozen=True)
class Here:
    """The place of a thread, and the memory that it works on.

    Attributes:
        tensors: arguments of the kernel.
        slots: shared memory of the block (fp32); None without any.
        thread: index in the block.
        lane: index among the threads of its row.
        group: row of the block.
        row: its row, which may be past the end.
        source: the row that it reads: past the end the last one.
        valid: true if its row exists.
        strip: strip or part of the row that its block has.
        first: its first element in the row.
        carried: by sum up to each element, that of all that the block has walked over.
    """

    tensors: list[cute.Tensor]
    slots: Any
    thread: Any
    lane: Any
    group: Any
    row: Any
    source: Any
    valid: Any
    strip: Any
    first: Any
    carried: dict[int, Any]


@dataclass(frozen=True)
class Meeting:
    """Slots of shared memory in which partial results of a row meet.

    Attributes:
        base: the first one.
        apart: distance to the second numbers of pairs.
        index: of the thread's partial result.
        pitch: distance of neighbouring ones.
        count: number of them.
        writes: true for a thread that leaves one.
    """

    base: Any
    apart: int
    index: Any
    pitch: int
    count: int
    writes: Any


class RowKernel:
    """The kernel: one group of ``lanes`` threads per row; see `cutesuper.skeletons.rows.plan`."""

    def __init__(self, plan: RowPlan) -> None:
        self.plan = plan
        self.extents = Extents(plan.program, plan.arguments)
        s = plan.schedule
        self.lanes, self.vector, self.chunks = s.lanes, s.vector, s.chunks
        self.length = extent(plan.program.dims[plan.column])
        self.ragged = self.length % plan.width != 0 or self.length < plan.width
        self.row_blocks_of = s.rows
        #: strips of a row, and those that have a block of their own
        self.count = ceil_div(self.length, plan.width)
        self.strips = 1 if plan.walked else self.count
        #: True if block indices run through the rows first; neighbouring blocks read neighbouring
        #: memory
        self.rows_first = s.interleaved or self.strips == 1
        #: loads in the order of the program
        self.early = sorted(plan.loads)
        #: the kernel of each alternative of the grid
        self.sections = [RowKernel(s) for s in plan.sections] if len(plan.sections) > 1 else [self]
        written = [a.dtype for a in plan.arguments if a.written]
        self.math = DeviceMath(fast="float32" not in written)

    @cute.jit
    def __call__(self, *args):
        """Launch; the arguments are the plan's tensors in order, then the stream."""
        tensors, _, stream = handed_over(self.plan.arguments, args)
        rows = sum(s.row_blocks(tensors) for s in self.sections)
        # given, so that the driver is not asked how much shared memory the blocks of an SM take
        resident = self.plan.resident
        more = {"preferred_smem_carveout": CARVEOUT} if resident else {}
        self.kernel(tensors).launch(
            grid=(rows, self.strips, 1) if self.rows_first else (rows * self.strips, 1, 1),
            block=(self.plan.threads, 1, 1),
            stream=stream,
            use_pdl=self.plan.schedule.dependent_launch,
            min_blocks_per_mp=resident,
            **more,
        )

    def row_count(self, tensors: list[cute.Tensor]) -> Any:
        """Number of rows: the product of all labels but the contiguous one."""
        return self.extents.count(self.plan.rows, tensors)

    def row_blocks(self, tensors: list[cute.Tensor]) -> Any:
        """Number of blocks along the rows."""
        return cute.ceil_div(self.row_count(tensors), self.row_blocks_of)

    @cute.kernel
    def kernel(self, tensors: list[cute.Tensor]):
        plan = self.plan
        tidx, _, _ = cute.arch.thread_idx()
        bx, by, _ = cute.arch.block_idx()
        if cutlass.const_expr(not self.rows_first):
            bx, by = bx // self.strips, bx % self.strips
        if cutlass.const_expr(plan.schedule.dependent_launch):
            wait_for_predecessor()
            start_successor()
        slots = None
        if cutlass.const_expr(plan.shared_bytes > 0):
            alloc = cutlass.memory.SmemAllocator()
            slots = alloc.allocate_array(Float32, plan.shared_bytes // 4, byte_alignment=16)
        if cutlass.const_expr(len(self.sections) == 1):
            self.work(tensors, slots, tidx, bx, by)
        else:
            first = Int32(0)
            for section in self.sections:
                last = first + section.row_blocks(tensors)
                if bx >= first and bx < last:
                    section.work(tensors, slots, tidx, bx - first, by)
                first = last

    @cute.jit
    def work(self, tensors, slots, tidx, bx, by):
        """The rows of one block, or its strips of them."""
        plan = self.plan
        if cutlass.const_expr(not plan.walked):
            self.strip(tensors, slots, tidx, bx, by, {})
        else:
            carried = {i: filled(plan.scan_words, 0.0) for i in plan.scans}
            forth = [not plan.program.ops[i].attributes["reverse"] for i in plan.scans]
            for n in cutlass.range(self.count, unroll=1):
                at = n if cutlass.const_expr(all(forth)) else self.count - 1 - n
                cute.arch.sync_threads()
                self.strip(tensors, slots, tidx, bx, at, carried)

    @cute.jit
    def strip(self, tensors, slots, tidx, bx, by, carried: cutlass.Constexpr):
        """A strip of the rows of one block."""
        plan = self.plan
        lane, group = tidx % self.lanes, tidx // self.lanes
        if cutlass.const_expr(plan.schedule.interleaved):
            lane, group = tidx // self.row_blocks_of, tidx % self.row_blocks_of
        row = bx * self.row_blocks_of + group
        first = by * plan.width + lane * self.vector
        valid = row < self.row_count(tensors)

        # rows past the end read the last one
        inside = cutlass.min(row, self.row_count(tensors) - 1)
        here = Here(tensors, slots, tidx, lane, group, row, inside, valid, by, first, carried)
        places = self.places(here)
        ahead = self.read_ahead(here, bx * self.row_blocks_of)
        values = self.evaluate(ahead, here)
        for i, view in plan.stores.items():
            value = values[plan.program.ops[i].inputs[0]]
            if cutlass.const_expr(isinstance(view, Indexed)):
                self.put(value, view, here, places.get(i))
            else:
                self.store(value, view, here)

    def evaluate(self, ahead: dict[int, cute.Tensor], here: Here) -> dict[int, Any]:
        """Evaluate every operation but the stores, as fp32 fragments and row scalars.
        Elements that were loaded ahead become fp32 at their first use."""
        plan = self.plan
        values: dict[int, Any] = {}
        for i in (*plan.order, *plan.stores):
            op = plan.program.ops[i]
            for j in op.inputs:
                if j not in values:
                    values[j] = self.load(j, ahead, here)
            args = [values[j] for j in op.inputs]
            if i in ahead or i in plan.stores:
                continue
            if op.kind == LOAD:
                values[i] = self.load(i, ahead, here)
            elif i in plan.reductions:
                before, source = plan.reductions[: plan.reductions.index(i)], args[0]
                n = words_of(plan.program, before)
                if op.facets.selects and op.inputs[0] in ahead and packed(ahead[op.inputs[0]]):
                    source = ahead[op.inputs[0]]
                total = self.reduce(op.kind, source, n, here)
                if plan.parted and op.places:
                    values[i] = joined(total)
                else:
                    values[i] = result(op.facets.reduces.name, total) * plan.program.factor(op)
            elif op.facets.scans:
                lane = Lane(here.thread, here.lane, here.group, self.inside(here.first))
                values[i] = Scan(plan, i, here.slots, lane, here.carried.get(i)).of(args[0])
            elif op.facets.turns:
                values[i] = self.turn(args[0], lookup(op.kind), here)
            elif op.facets.masks:
                values[i] = self.masked(op, args, here)
            else:
                values[i] = lookup(op.kind).scalar(self.math, args, op.attributes)
        return values

    def offset(self, view: View, tensors: list[cute.Tensor], row: Any) -> Any:
        """Offset in elements of a row's first element."""
        if not self.plan.rows:
            return Int32(0)
        found = self.extents.place(view, self.plan.rows, row, tensors)
        wide = self.vector if view.contiguous(self.plan.column) else 1
        return cute.assume(found, divby=wide)

    def start(self, view: View, tensors: list[cute.Tensor], row: Any) -> cute.Pointer:
        """Pointer to a row's first element."""
        given, dtype = tensors[view.argument].iterator, dtype_of(self.plan, view)
        if not self.plan.arguments[view.argument].scattered:
            return given + self.offset(view, tensors, row)
        return at_address(dtype, one(given + row)[0], self.vector * dtype.width // 8)

    def read_ahead(self, here, first_row):
        """Issue all loads that precede the computation.

        They are in one branch, which every block takes although the compiler does not know it. With
        a branch for each, the compiler waits for one load before it issues the next (7.2 us at
        1024x4096 forward, 5.2 with one); without any it loads weights late.
        """
        plan, found = self.plan, {}
        for i in plan.order:
            if plan.program.ops[i].kind != LOAD:
                break
            found[i] = self.registers(plan.loads[i])
        wide = {i: fragment(r.shape) for i, r in found.items() if self.widened(i)}
        self.read_all(found, wide, here, first_row)
        return found | wide

    def widened(self, i: int) -> bool:
        """True if a load becomes fp32 inside the branch.
        That keeps the compiler from splitting the branch into single conditions (weights were then
        loaded after the sum). This holds for rows that are reduced, except for maxima, which are
        taken in the stored type. Weights stay packed, in fewer registers."""
        plan, ops = self.plan, self.plan.program.ops
        exact = any(ops[n].facets.selects for n in plan.reductions if i in ops[n].inputs)
        varies = any(d in plan.loads[i].labels for d in plan.rows)
        is_float = dtype_of(plan, plan.loads[i]).is_float
        return bool(plan.reductions) and varies and is_float and not exact

    @cute.jit
    def read_all(self, found, wide, here, first_row):
        """Read all of these loads; those in ``wide`` are converted to fp32."""
        if first_row < self.row_count(here.tensors):
            for i in cutlass.range_constexpr(len(self.early)):
                n = self.early[i]
                if cutlass.const_expr(n in found):
                    self.read_row(self.plan.loads[n], here, found[n])
            for i in cutlass.range_constexpr(len(self.early)):
                n = self.early[i]
                if cutlass.const_expr(n in wide):
                    wide[n].store(widen(found[n]))

    def registers(self, view: View) -> cute.Tensor:
        """Registers for a thread's part of a row of a tensor, in its own type."""
        shape = (self.vector, self.chunks) if self.plan.column in view.labels else (1, 1)
        return fragment(shape, dtype_of(self.plan, view))

    def read_row(self, view: View, here: Here, registers: cute.Tensor) -> None:
        """Read a row; elements past its end are not used, and are read from its last access."""
        base = self.start(view, here.tensors, here.source)
        if not isinstance(view, Indexed):
            self.read_from(base, view, here, registers)
        elif self.plan.column in view.named_by:
            self.read_each(base, view, here, registers)
        else:
            place, known = self.place(view, here.tensors, here.source)
            place = cute.assume(place, divby=math.gcd(self.vector, view.step))
            self.read_from(base + place, view, here, registers)
            self.keep_known(known, registers)

    def read_from(self, base: cute.Pointer, view: View, here: Here, registers: cute.Tensor) -> None:
        """Read a row from its first element on."""
        if self.plan.column not in view.labels:
            registers[0] = one(base + 0)[0]
            return
        for c in range(self.chunks):
            at = self.access(c, here)
            self.read(view, here.tensors, base, at, registers[None, c])

    def read_each(
        self, base: cute.Pointer, view: Indexed, here: Here, registers: cute.Tensor
    ) -> None:
        """Read a row of which every element has an index of its own."""
        for c in range(self.chunks):
            at = self.access(c, here)
            for e in range(self.vector):
                place, known = self.place(view, here.tensors, here.source, at + e)
                found = one(registers.iterator + (e + c * self.vector))
                found[0] = one(base + place)[0]
                self.keep_known(known, found)

    def access(self, c: int, here: Here) -> Any:
        """Column of the thread's c-th access, inside the row."""
        at = here.first + c * (self.lanes * self.vector)
        return cutlass.min(at, self.length - self.vector) if self.ragged else at

    def place(
        self, view: Indexed, tensors: list[cute.Tensor], row: Any, column: Any = 0
    ) -> tuple[Any, Any]:
        """See `named_row`."""
        indices: list[Any] = []
        for index in (named.index for named in view.named):
            first = self.offset(index, tensors, row)
            at = first + column * index.stride(self.plan.column)
            indices.append(one(tensors[index.argument].iterator + at)[0])
        return named_row(view, indices)

    def places(self, here: Here) -> dict[int, tuple[Any, Any]]:
        """`place` of the row for each store through an index that has one for it.
        The index is read before the row is computed."""
        stores = self.plan.stores.items()
        own = {i: v for i, v in stores if isinstance(v, Indexed)}
        return {
            i: self.place(v, here.tensors, here.source)
            for i, v in own.items()
            if self.plan.column not in v.named_by
        }

    @cute.jit
    def keep_known(self, known, registers):
        """NaN in place of the elements of a row that does not exist."""
        if not known:
            registers.fill(float("nan"))

    def load(self, i: int, ahead: dict[int, cute.Tensor], here: Here) -> Any:
        """Load a row's elements of this thread as an fp32 fragment, or a scalar of the row."""
        view = self.plan.loads[i]
        if i in ahead:
            registers = ahead[i]
        else:
            registers = self.registers(view)
            self.read_row(view, here, registers)
        if self.plan.program.ops[i].places:
            return registers
        if self.plan.column not in view.labels:
            return registers[0].to(Float32) if registers.element_type.is_float else registers[0]
        return widen(registers)

    def read(
        self, view: View, tensors: list[cute.Tensor], base: cute.Pointer, at: Any,
        registers: cute.Tensor,
    ) -> None:  # fmt: skip
        """Read ``vector`` elements of a row, in one access if they are contiguous.
        Else one by one."""
        stride = self.extents.stride(view, self.plan.column, tensors)
        if view.contiguous(self.plan.column):
            cute.autovec_copy(self.piece(base, at), registers)
            return
        for e in range(self.vector):
            registers[e] = element(base, (at + e) * stride)

    def write(
        self, view: View, tensors: list[cute.Tensor], base: cute.Pointer, at: Any,
        registers: cute.Tensor,
    ) -> None:  # fmt: skip
        """Write ``vector`` elements of a row: the inverse of `read`."""
        stride = self.extents.stride(view, self.plan.column, tensors)
        if view.contiguous(self.plan.column):
            cute.autovec_copy(registers, self.piece(base, at))
            return
        for e in range(self.vector):
            one(base + (at + e) * stride)[0] = registers[e]

    def piece(self, base: cute.Pointer, at: Any) -> cute.Tensor:
        """View of ``vector`` contiguous elements."""
        return neighbours(base + cute.assume(at, divby=self.vector), self.vector)

    @cute.jit
    def reduce(self, kind: cutlass.Constexpr, value, n: cutlass.Constexpr, here):
        """The combined elements of a row, returned to every thread of the row.
        ``n``: numbers that reductions before hand over."""
        op, s = lookup(kind).reduces.name, self.plan.schedule
        starts = [c * self.lanes * self.vector for c in range(self.chunks)]
        v = reduced(op, value, self.inside(here.first), here.first, starts)
        if cutlass.const_expr(s.interleaved):
            base, threads = n * self.plan.threads + here.group, self.plan.threads
            meeting = Meeting(base, threads, here.lane, self.row_blocks_of, self.lanes, True)
            v = self.across(op, v, here.slots, meeting)
        else:
            distance = min(self.lanes, 32) // 2
            while cutlass.const_expr(distance > 0):
                v = combine(op, v, shuffled(v, distance))
                distance = distance // 2
            if cutlass.const_expr(self.plan.warps_per_row > 1):
                warps = self.plan.warps_per_row
                base, writes = (n * s.rows + here.group) * warps, here.thread % 32 == 0
                meeting = Meeting(base, s.rows * warps, here.lane // 32, 1, warps, writes)
                v = self.across(op, v, here.slots, meeting)
        return v

    def turn(self, value: Any, operator: Operator, here: Here) -> Any:
        """The elements of a row in other places.
        Neighbours are exchanged within an access. Halves are within a thread if it has several
        accesses, else with the thread that has the same place in the other half."""
        shape, half = (self.vector, self.chunks), self.chunks // 2
        places, signs = operator.places(self.length)
        first, second = Float32(signs[0]), Float32(signs[-1])
        given, found = fragment(shape), fragment(shape)
        given.store(value)
        if places[0] < self.vector:
            for n in range(self.chunks * self.vector):
                e, c = n % self.vector, n // self.vector
                found[e, c] = given[int(places[e]), c] * Float32(signs[e])
            return found.load()
        apart = self.length // 2 // self.vector
        upper = here.lane >= apart
        other = here.thread % 32 + select_(upper, Int32(-apart), Int32(apart))
        for n in range(self.chunks * self.vector):
            e, c = n % self.vector, n // self.vector
            if half:
                found[e, c] = given[e, (c + half) % self.chunks] * (second if c >= half else first)
            else:
                moved = cute.arch.shuffle_sync(given[e, c], other)
                found[e, c] = moved * Float32(select_(upper, second, first))
        return found.load()

    def masked(self, op: BlockOp, args: list[Any], here: Here) -> Any:
        """Evaluate an operator that takes positions along the row."""
        columns = fragment((self.vector, self.chunks), Int32)
        for n in range(self.chunks * self.vector):
            c, e = n // self.vector, n % self.vector
            columns[e, c] = here.first + (c * self.lanes * self.vector + e)
        extents = 1, self.length
        return lookup(op.kind).at(self.math, args, 0, columns.load(), extents, op.attributes)

    @cute.jit
    def across(self, op: cutlass.Constexpr, v, slots, at: cutlass.Constexpr):
        """Combine partial results of a row through shared memory.
        Each reduction has slots of its own, so one barrier suffices."""
        given = words(v)
        if at.writes:
            for k in cutlass.range_constexpr(len(given)):
                put(slots + (at.base + k * at.apart + at.index * at.pitch), given[k])
        cute.arch.sync_threads()
        total = neutral(op)
        for w in cutlass.range_constexpr(at.count):
            places = [at.base + k * at.apart + w * at.pitch for k in range(len(given))]
            total = combine(op, total, element_of([element(slots, place) for place in places]))
        return total

    def inside(self, first: Any) -> list[Any]:
        """Predicates of the accesses of a fragment that are true inside the row.
        None if true for all lanes."""
        each, ends = self.lanes * self.vector, self.ragged and self.count > 1
        return [
            first + c * each < self.length if ends or (c + 1) * each > self.length else None
            for c in range(self.chunks)
        ]

    @cute.jit
    def store(self, value, view: cutlass.Constexpr, here):
        """Write a fragment, or a scalar of the row by its first thread."""
        dtype = dtype_of(self.plan, view)
        if cutlass.const_expr(self.plan.column not in view.labels):
            if here.valid and here.lane == 0:
                at = self.start(view, here.tensors, here.row)
                if cutlass.const_expr(self.plan.parted):
                    at = at + here.strip * view.stride(f"{self.plan.column}.{AxisKind.GRID}")
                put(at, value.to(dtype))
        else:
            registers = stored(value, (self.vector, self.chunks), dtype)
            if here.valid:
                base = self.start(view, here.tensors, here.row)
                for c in cutlass.range_constexpr(self.chunks):
                    at = here.first + c * (self.lanes * self.vector)
                    if cutlass.const_expr(self.ragged):
                        if at < self.length:
                            self.write(view, here.tensors, base, at, registers[None, c])
                    else:
                        self.write(view, here.tensors, base, at, registers[None, c])

    @cute.jit
    def put(self, value, view: cutlass.Constexpr, here, found: cutlass.Constexpr):
        """Write a fragment, or a row's scalar by its first thread, to the place of indices.
        Only if the tensor has that place.

        ``found``: `place` of the row; None if every element has its own.
        """
        dtype, column, tensors = dtype_of(self.plan, view), self.plan.column, here.tensors
        target = tensors[view.argument].iterator
        if cutlass.const_expr(column not in view.labels):
            if here.valid and found[1] and here.lane == 0:
                put(target + (self.offset(view, tensors, here.row) + found[0]), value.to(dtype))
        elif cutlass.const_expr(found is not None):
            registers = stored(value, (self.vector, self.chunks), dtype)
            step = math.gcd(self.vector, view.step)
            if here.valid and found[1]:
                base = target + self.offset(view, tensors, here.row)
                base = base + cute.assume(found[0], divby=step)
                for c in cutlass.range_constexpr(self.chunks):
                    at = here.first + c * (self.lanes * self.vector)
                    if at < self.length:
                        self.write(view, tensors, base, at, registers[None, c])
        else:
            registers = stored(value, (self.vector, self.chunks), dtype)
            base = target + self.offset(view, tensors, here.row)
            for n in cutlass.range_constexpr(self.chunks * self.vector):
                c, e = n // self.vector, n % self.vector
                at = here.first + c * (self.lanes * self.vector) + e
                if here.valid and at < self.length:
                    place, known = self.place(view, tensors, here.row, at)
                    if known:
                        put(base + place, registers[e, c])
