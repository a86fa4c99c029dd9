"""The row loop as a traced kernel: blocks walk over tiles of rows; see
`cutesuper.skeletons.rows.plan`.

A thread has the same columns of all its rows. Its computation is traced piece by piece, on
fragments of these columns; the values of a piece live in a `Values`, which evaluates an operation
when it is first used.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32, Int64

from cutesuper.device.fragments import NEUTRAL, combine, packed, reduced, widen
from cutesuper.device.math import DeviceMath
from cutesuper.ir.block import LOAD, BlockOp
from cutesuper.ir.operators.base import lookup
from cutesuper.skeletons.base import View
from cutesuper.skeletons.kernel.arguments import ELEMENT, Extents, unravel
from cutesuper.skeletons.rows.kernel.exchange import Exchange
from cutesuper.skeletons.rows.kernel.finish import Finish
from cutesuper.skeletons.rows.kernel.picks import Asked, Picks
from cutesuper.skeletons.rows.kernel.slices import Slices
from cutesuper.skeletons.rows.kernel.tiles import Tiles
from cutesuper.skeletons.rows.plan import RowLoopPlan, RowSum


class RowLoopKernel:
    """The kernel of a row loop."""

    def __init__(self, plan: RowLoopPlan) -> None:
        self.plan = plan
        self.extents = Extents(plan.program, plan.arguments)
        s = plan.schedule
        self.lanes, self.vector, self.chunks = s.lanes, s.vector, s.chunks
        #: number of chunks computed at a time
        self.piece = plan.piece
        streamed = [plan.loads[i] for i in plan.streamed]
        written = [v for v in plan.stores.values() if plan.column in v.labels]
        wide = any(plan.itemsize(v) > 2 for v in (*streamed, *written))
        self.math = DeviceMath(fast=not wide)
        self.tiles = Tiles(self)
        self.exchange = Exchange(self)
        self.finish = Finish(self)
        self.slices = Slices(self)
        self.picks = Picks(self)

    @cute.jit
    def __call__(self, *args):
        """Launch; the arguments are the plan's tensors in order, its scratch, then the stream."""
        plan = self.plan
        count = len(plan.arguments)
        tensors, scratch, stream = list(args[:count]), list(args[count:-1]), args[-1]
        blocks = self.walkers(tensors) * plan.parts
        for d in plan.outer:
            blocks = blocks * self.extents.of(d, tensors)
        self.kernel(tensors, scratch).launch(
            grid=(blocks, 1, 1),
            block=(plan.threads, 1, 1),
            stream=stream,
            use_pdl=plan.schedule.dependent_launch,
            cooperative=plan.meets,
            min_blocks_per_mp=plan.schedule.resident,
            **self.options(),
        )

    def options(self) -> dict[str, Any]:
        """Launch options: the cluster, and the share of an SM's memory that is shared memory."""
        plan, found = self.plan, dict[str, Any]()
        if plan.cluster > 1:  # a launch in clusters of 1 would be one of clusters still
            found["cluster"] = (plan.cluster, 1, 1)
        if plan.shared_percent:
            found["preferred_smem_carveout"] = plan.shared_percent
        return found

    def walkers(self, tensors: list[cute.Tensor]) -> Any:
        """Number of blocks (or clusters) that share the rows of one element of the outer labels."""
        if self.plan.walkers is not None:
            return self.plan.walkers
        tiles = self.tiles.count(tensors)
        if self.plan.schedule.blocks == 0:
            return tiles
        if isinstance(tiles, int):
            return min(tiles, self.plan.schedule.blocks)
        return cutlass.min(tiles, self.plan.schedule.blocks)

    @cute.kernel
    def kernel(self, tensors: list[cute.Tensor], scratch: list[cute.Tensor]):
        plan = self.plan
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        smem = self.allocate()
        place = self.place(block, tensors, tidx)
        self.tiles.start_barriers(smem, tidx)
        self.exchange.start_barriers(smem, tidx)
        if cutlass.const_expr(plan.schedule.dependent_launch):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        # requested before the ring: behind it they would arrive after all of it, and delay the
        # first tile
        vectors = self.load_vectors(tensors, place)
        count = self.tiles.of_block(tensors, place)
        # the warp that fills the ring has made its barriers: it need not wait for the other warps
        for s in cutlass.range_constexpr(plan.schedule.stages):
            self.tiles.fill(Int32(s), count, smem, tensors, place)
        here, asked = place, []
        if cutlass.const_expr(plan.schedule.sliced):
            here = self.slices.place(place, tensors)
            asked = self.slices.ask(here["y"], tensors, here)
        cute.arch.sync_threads()
        if cutlass.const_expr(plan.cluster > 1):
            cute.arch.cluster_arrive_relaxed()
            if cutlass.const_expr(not plan.waits_late):
                cute.arch.cluster_wait()
        sums = [self.new_sum(s) for s in plan.sums] if plan.meets else []
        last = count - int(plan.leaves_early)
        if cutlass.const_expr(plan.carries_sums):
            some = [self.new_sum(s) for s in plan.sums]
            for first in cutlass.range(0, last, plan.sum_tiles, unroll=1):
                for it in cutlass.range(first, cutlass.min(first + plan.sum_tiles, last), unroll=1):
                    self.tile(it, count, smem, tensors, place, vectors, some)
                self.carry(some, sums)
        else:
            for it in cutlass.range(last, unroll=1):
                self.tile(it, count, smem, tensors, place, vectors, sums)
        if cutlass.const_expr(plan.meets):
            self.leave(count, smem, tensors, scratch, place, vectors, sums)
            self.finish.run(smem, tensors, scratch, place)
        if cutlass.const_expr(plan.schedule.sliced):
            self.slices.run(asked, smem, tensors, here)
        # no cluster barrier is needed here: a block has waited for all values that the cluster
        # sends to it, and its memory is not read from outside

    def allocate(self) -> dict[str, Any]:
        """Allocate shared memory: the ring (reused at the end), slots of reductions, barriers."""
        plan = self.plan
        alloc = cutlass.memory.SmemAllocator()
        slots = max(4, plan.slots)
        smem = {
            "ring": alloc.allocate_array(Int32, plan.ring_bytes // 4, byte_alignment=128),
            "slots": alloc.allocate_array(Float32, slots, byte_alignment=16),
            "full": alloc.allocate_array(Int64, max(1, plan.schedule.stages), byte_alignment=8),
        }
        if plan.cluster > 1:
            levels = 2 * len(plan.levels)
            smem["reduced"] = alloc.allocate_array(Int64, levels, byte_alignment=8)
        return smem

    def place(self, block: Any, tensors: list[cute.Tensor], tidx: Any) -> dict[str, Any]:
        """Coordinates of this block and thread: the block's ``walker`` (of ``walkers``), ``outer``
        labels, ``part`` of the row and ``rank`` in the cluster; the thread's ``group`` (which
        shares its rows), ``lane`` and ``first`` column; the columns ``left`` in the part."""
        plan = self.plan
        rank = block % plan.cluster
        rest = block // plan.cluster
        part = rest % plan.column_parts
        rest = rest // plan.column_parts
        walkers = self.walkers(tensors)
        outer = unravel(rest // walkers, {d: self.extents.of(d, tensors) for d in plan.outer})
        walker = rest
        if plan.outer or isinstance(walkers, int):  # of a known number the compiler uses the range
            walker = rest % walkers
        lane, group = tidx % self.lanes, tidx // self.lanes
        own = part * plan.cluster + rank
        if plan.parts == 1:
            own = 0
        return {
            "block": block, "thread": tidx, "rank": rank, "walker": walker,
            "walkers": walkers, "outer": outer, "lane": lane, "group": group, "part": own,
            "first": lane * self.vector, "piece": self.piece,
            "left": plan.length if plan.parts == 1 else
            cutlass.min(plan.length - own * plan.width, plan.width),
        }  # fmt: skip

    # --------------------------------------------------------------------------------------- a tile

    @cute.jit
    def leave(self, count, smem, tensors, scratch, place, vectors, sums):
        """Hand over this block's sums: if possible as soon as the last tile has been added, before
        its results are computed and stored (4096x4096 backward, prototype: 28.6 us, 29.3 after
        them).

        The last tile is code of its own: a branch in the loop cost 4% at 32768x4096.
        """
        if cutlass.const_expr(self.plan.leaves_early):
            if count > 0:
                self.tile(count - 1, count, smem, tensors, place, vectors, sums, scratch)
            else:
                self.finish.leave_all(sums, smem, scratch, place)
        else:
            self.finish.leave_all(sums, smem, scratch, place)

    def tile(
        self,
        it: Any,
        count: Any,
        smem: dict[str, Any],
        tensors: list[cute.Tensor],
        place: dict[str, Any],
        vectors: dict[int, Any],
        sums: list[Any],
        scratch: list[cute.Tensor] | None = None,
    ) -> None:
        """Process one tile, from one exchange to the next; ``scratch`` is given for the last one,
        where the sums are handed over as soon as they include it."""
        plan = self.plan
        self.exchange.arm(it, smem, place)
        rows = self.tiles.read(it, smem, tensors, place)
        if plan.waits_late:
            cute.arch.cluster_wait()
        known: list[dict[int, Any]] = [dict(row["scalars"]) for row in rows]
        for n, level in enumerate(plan.levels):
            partial: dict[tuple[int, int], Any] = {}
            for r, row in enumerate(rows):
                for p in range(self.chunks // self.piece):
                    values = Values(self, row, p, known[r], tensors, place, vectors)
                    for i in level.reductions:
                        x = self.reduced(i, values, p, place)
                        old = partial.get((i, r))
                        partial[i, r] = x if old is None else combine(self.kind(i), old, x)
                    for k in level.sums if plan.meets else ():
                        x = values.of(plan.sums[k].source)
                        if plan.has_columns(plan.sums[k]):
                            self.add(sums[k][p], x, row["valid"], plan.sums[k].op == "max")
                        elif p == 0:
                            self.add_number(sums[k][0], x, row["valid"], plan.sums[k].op)
                    for i in level.stores:
                        value = values.of(plan.program.ops[i].inputs[0])
                        self.store(i, value, p, row, tensors, place)
            if level.reductions:
                reduced = self.exchange.meet(n, it, partial, smem, place)
            elif n == 0:
                reduced = {}
                self.tiles.everybody_has_read()
            else:
                continue
            if n == 0 and plan.schedule.kept and scratch is None:
                self.tiles.refill(it, count, smem, tensors, place)
            if n == plan.last_sum and scratch is not None:
                self.finish.leave_all(sums, smem, scratch, place)
            for (i, r), x in self.exchange.gather(n, it, reduced, smem, place).items():
                mean = plan.program.ops[i].kind == "mean"
                known[r][plan.complete[i]] = x * (1.0 / plan.length) if mean else x
        if not plan.schedule.kept and scratch is None:
            self.tiles.everybody_has_read()
            self.tiles.refill(it, count, smem, tensors, place)

    def kind(self, i: int) -> str:
        """The combining operation of a reduction: ``sum`` or ``max``."""
        return "max" if self.plan.program.ops[i].kind == "max" else "sum"

    def reduced(self, i: int, values: Values, p: int, place: dict[str, Any]) -> Any:
        """This thread's part of a reduction along the row."""
        source, kind = self.plan.program.ops[i].inputs[0], self.kind(i)
        if kind == "max" and self.plan.program.ops[source].kind == LOAD:
            registers = values.registers(source)
            if packed(registers):
                return reduced(kind, registers, self.inside(p, place))
        return reduced(kind, values.of(source), self.inside(p, place))

    def inside(self, p: int, place: dict[str, Any]) -> list[Any]:
        """Predicates of the accesses of a piece that are true before the end of the part; None if
        true for all lanes."""
        smallest = self.plan.length - (self.plan.parts - 1) * self.plan.width
        starts = [self.chunk_at(p, c) for c in range(self.piece)]
        return [
            place["first"] + at < place["left"] if at + self.lanes * self.vector > smallest
            else None
            for at in starts
        ]  # fmt: skip

    def columns(self, p: int, place: dict[str, Any]) -> Any:
        """Positions (Int32 fragment) of a piece in the part of this block."""
        piece = place["piece"]
        index = cute.make_rmem_tensor(cute.make_layout((self.vector, piece)), Int32)
        for c in range(piece):
            for e in range(self.vector):
                index[e, c] = place["first"] + self.chunk_at(p, c) + e
        return index.load()

    def chunk_at(self, p: int, c: int) -> int:
        """Columns between a thread's first access and the c-th one of a piece."""
        return (p * self.piece + c) * self.lanes * self.vector

    def new_sum(self, s: RowSum) -> list[Any]:
        """New accumulators: an fp32 fragment for each piece, or one number."""
        shape = (self.vector, self.piece) if self.plan.has_columns(s) else (1, 1)
        found = []
        for _ in range(self.chunks // self.piece if self.plan.has_columns(s) else 1):
            acc = cute.make_rmem_tensor(cute.make_layout(shape), Float32)
            acc.fill(NEUTRAL[s.op])
            found.append(acc)
        return found

    def carry(self, some: list[list[Any]], sums: list[list[Any]]) -> None:
        """Add the sums of some tiles to the totals, and reset them."""
        for s, parts, wholes in zip(self.plan.sums, some, sums, strict=True):
            for part, whole in zip(parts, wholes, strict=True):
                for n in range(cute.size(whole.shape)):
                    whole[n] = combine(s.op, whole[n], part[n])
                part.fill(NEUTRAL[s.op])

    @cute.jit
    def add_number(self, acc, value, valid, op: cutlass.Constexpr):
        """Take a value of a row into an accumulator; rows past the end do not count."""
        if valid:
            acc[0] = combine(op, acc[0], Float32(value))

    @cute.jit
    def add(self, acc, value, valid, maximum: cutlass.Constexpr):
        """Take a row into an accumulator; rows past the end do not count."""
        if valid:
            if cutlass.const_expr(maximum):
                acc.store(self.math.maximum(acc.load(), value))
            else:
                acc.store(acc.load() + value)

    # ------------------------------------------------------------------------------------- memory

    def offset(
        self, view: View, tensors: list[cute.Tensor], row: Any, place: dict[str, Any]
    ) -> Any:
        """Offset in elements of a row's first element in this block's part."""
        labels = tuple(reversed(self.plan.rows))
        at = Int32(0)
        if any(d in view.labels for d in labels):
            shape = tuple(self.extents.of(d, tensors) for d in labels)
            at = cute.make_layout(shape, stride=tuple(view.stride(d) for d in labels))(row)
        for d, index in place["outer"].items():
            at = at + index * view.stride(d)
        if self.plan.column in view.labels:
            at = at + place["part"] * self.plan.width * view.stride(self.plan.column)
        return at

    def load_vectors(self, tensors: list[cute.Tensor], place: dict[str, Any]) -> dict[int, Any]:
        """Values common to all rows: fragments for loads with the column, else numbers.

        If a thread has many columns, fragments are read again at each use instead.
        """
        plan, found = self.plan, {}
        for i, view in plan.loads.items():
            if plan.varies(view) or self.only_after(i):
                continue
            if plan.column in view.labels:
                if plan.keeps_vectors:
                    found[i] = [
                        self.read(view, tensors, Int32(0), p, place)
                        for p in range(self.chunks // self.piece)
                    ]
            else:
                found[i] = self.number(view, tensors, place)
        return found

    def number(self, view: View, tensors: list[cute.Tensor], place: dict[str, Any]) -> Any:
        """A load with neither rows nor columns; floats as fp32."""
        at = tensors[view.argument].iterator + self.offset(view, tensors, Int32(0), place)
        x = cute.make_tensor(at, cute.make_layout(1))[0]
        return x.to(Float32) if x.dtype.is_float else x

    def only_after(self, i: int) -> bool:
        """True if nothing in the loop uses a load."""
        plan = self.plan
        used: set[int] = set()
        work = [plan.sums[k].source for level in plan.levels for k in level.sums]
        work += [
            j
            for level in plan.levels
            for s in (*level.stores, *level.reductions)
            for j in plan.program.ops[s].inputs
        ]
        while work:
            j = work.pop()
            if j not in used:
                used.add(j)
                work += plan.program.ops[j].inputs
        return i not in used

    def read(
        self, view: View, tensors: list[cute.Tensor], row: Any, p: int, place: dict[str, Any]
    ) -> cute.Tensor:
        """Read a piece of a row straight from device memory, in its own type.

        Past the end of the row it has elements of the row, which are not used: with a branch around
        each load, the compiler would wait for one load before it issues the next.
        """
        plan, piece = self.plan, place["piece"]
        dtype = ELEMENT[plan.arguments[view.argument].dtype]
        registers = cute.make_rmem_tensor(cute.make_layout((self.vector, piece)), dtype)
        base = tensors[view.argument].iterator
        start = self.offset(view, tensors, row, place)
        last = plan.length - self.vector - place["part"] * plan.width
        for c in range(piece):
            at = place["first"] + self.chunk_at(p, c)
            if plan.ragged or "column" in place:
                at = cutlass.min(at, last)
            self.access(view, base, start, at, registers[None, c], False, place["left"])
        return registers

    def access(
        self,
        view: View,
        base: cute.Pointer,
        start: Any,
        at: Any,
        registers: cute.Tensor,
        writes: bool,
        left: Any,
    ) -> None:
        """Read or write ``vector`` elements of a row, in accesses as wide as the tensor's alignment
        allows."""
        wide = self.alignment(view)
        stride = view.stride(self.plan.column)
        for e in range(0, self.vector, wide):
            offset = cute.assume(start + (at + e) * stride, divby=wide)
            memory = cute.make_tensor(base + offset, cute.make_layout(wide))
            own = cute.make_tensor(registers.iterator + e, cute.make_layout(wide))
            if self.vector > wide and self.plan.ragged:
                self.guarded(memory, own, at + e, left, writes)
            else:
                self.move(memory, own, writes)

    @cute.jit
    def guarded(self, memory, own, at, left, writes: cutlass.Constexpr):
        """Read or write in an access that may lie past the end of the row."""
        if at < left:
            self.move(memory, own, writes)

    def move(self, memory: cute.Tensor, own: cute.Tensor, writes: bool) -> None:
        """Copy between registers and memory."""
        if writes:
            cute.autovec_copy(own, memory)
        else:
            cute.autovec_copy(memory, own)

    def alignment(self, view: View) -> int:
        """Elements per access along the row: a power of two up to ``vector``."""
        plan = self.plan
        if view.stride(plan.column) != 1:
            return 1
        wide = self.vector
        steps = [s for d, s in zip(view.labels, view.strides, strict=True) if d != plan.column]
        for s in (*steps, plan.length, plan.width):
            while s % wide:
                wide //= 2
        return wide

    @cute.jit
    def store(self, i: cutlass.Constexpr, value, p: cutlass.Constexpr, row, tensors, place):
        """Write a piece of a row, or a value of the row by its first thread."""
        view = self.plan.stores[i]
        dtype = ELEMENT[self.plan.arguments[view.argument].dtype]
        base = tensors[view.argument].iterator
        start = self.offset(view, tensors, row["row"], place)
        if cutlass.const_expr(self.plan.column not in view.labels):
            if cutlass.const_expr(p == 0):
                if row["valid"] and place["lane"] == 0 and place["part"] == 0:
                    target = cute.make_tensor(base + start, cute.make_layout(1))
                    target[0] = Float32(value).to(dtype)
        else:
            registers = cute.make_rmem_tensor(cute.make_layout((self.vector, self.piece)), dtype)
            registers.store(value.to(dtype))
            if row["valid"]:
                left = place["left"]
                for c in cutlass.range_constexpr(self.piece):
                    at = place["first"] + self.chunk_at(p, c)
                    if cutlass.const_expr(self.plan.ragged):
                        if at < left:
                            self.access(view, base, start, at, registers[None, c], True, left)
                    else:
                        self.access(view, base, start, at, registers[None, c], True, left)


class Values:
    """The values of one piece of one row, each evaluated at its first use.

    Args:
        kernel: the kernel that is traced.
        row: the result of `Tiles.read` for it.
        piece: index among the pieces of the thread's columns.
        known: known values of the row: loads, complete reductions, and values computed from them,
            which all pieces share.
        element: one element of the row, in place of a piece.
    """

    def __init__(
        self,
        kernel: RowLoopKernel,
        row: dict[str, Any],
        piece: int,
        known: dict[int, Any],
        tensors: list[cute.Tensor],
        place: dict[str, Any],
        vectors: dict[int, Any],
        element: Asked | None = None,
    ) -> None:
        self.k, self.row, self.piece, self.known = kernel, row, piece, known
        self.tensors, self.place, self.vectors = tensors, place, vectors
        self.element = element
        self.found: dict[int, Any] = {}
        self.read: dict[int, cute.Tensor] = {}

    def at(self, element: Asked) -> Values:
        """The values of one element of the same row."""
        return Values(
            self.k,
            self.row,
            self.piece,
            self.known,
            self.tensors,
            self.place,
            self.vectors,
            element,
        )

    def of(self, i: int) -> Any:
        """The value of an operation: a fragment, or a number."""
        stack = [i]
        while stack:
            j = stack.pop()
            if self._is_known(j):
                continue
            waiting = [n for n in self._needs(j) if not self._is_known(n)]
            if waiting:
                stack += [j, *reversed(waiting)]
            else:
                self._store(j)[j] = self.compute(j)
        return self._store(i)[i]

    def _store(self, i: int) -> dict[int, Any]:
        """The dictionary for a value: that of this piece, or that of the row."""
        plan = self.k.plan
        return self.found if plan.column in plan.program.ops[i].dims else self.known

    def _is_known(self, i: int) -> bool:
        return i in self._store(i)

    def _needs(self, i: int) -> tuple[int, ...]:
        """The operands that `compute` needs: long chains are computed in order."""
        plan, op = self.k.plan, self.k.plan.program.ops[i]
        if i in plan.picked:
            return ()
        inverted = op.kind == "div" and plan.column in op.dims and op.inputs[1] in plan.inverted
        return op.inputs[:1] if inverted else op.inputs

    def compute(self, i: int) -> Any:
        """Evaluate an operation."""
        plan = self.k.plan
        op = plan.program.ops[i]
        if op.kind == LOAD:
            return self.load(i)
        if i in plan.picked:
            return self.k.picks.value(i, self)
        if op.kind == "div" and plan.column in op.dims and op.inputs[1] in plan.inverted:
            return self.of(op.inputs[0]) * self.inverse(op.inputs[1])
        args = [self.of(j) for j in op.inputs]
        operator = lookup(op.kind)
        if operator.masks:
            return self.masked(op, args)
        return operator.scalar(self.k.math, args, op.attributes)

    def masked(self, op: BlockOp, args: list[Any]) -> Any:
        """Evaluate an operator that takes positions: columns along the row, rows if they are
        walked."""
        k, place = self.k, self.place
        rows, columns = (op.attributes.get(name) for name in ("rows", "columns"))
        extents = tuple(k.extents.of(d, self.tensors) if d else 1 for d in (rows, columns))
        operator, at = lookup(op.kind), self.positions()
        if operator.one_column and self.element is None:
            # a constant for each element: one comparison, and no registers for positions
            first = place["first"] + place["part"] * k.plan.width
            args = [args[0], *(k.math.position(i) - first for i in args[1:])]
            at = k.columns(self.piece, place | {"first": 0})
        row = self.row["row"] if rows in k.plan.rows else place["outer"].get(rows, 0)
        return operator.at(k.math, args, row, at, extents, op.attributes)

    def positions(self) -> Any:
        """Columns of the elements in the whole row."""
        k, place = self.k, self.place
        if self.element is not None:
            return self.element.column
        return k.columns(self.piece, place) + place["part"] * k.plan.width

    def inverse(self, i: int) -> Any:
        """1 / a value of the row; for a square root in one instruction."""
        key = -1 - i
        if key not in self.known:
            op = self.k.plan.program.ops[i]
            root = op.kind == "sqrt"
            self.known[key] = self.k.math.rsqrt(self.of(op.inputs[0])) if root else 1.0 / self.of(i)
        return self.known[key]

    def load(self, i: int) -> Any:
        """A load in fp32."""
        view = self.k.plan.loads[i]
        if self.element is not None and i in self.element.elements:
            return self.element.elements[i].to(Float32)
        if self.k.plan.column not in view.labels:
            return self.vectors[i]
        return widen(self.registers(i))

    def registers(self, i: int) -> cute.Tensor:
        """A load with the column as it is stored: from registers, the ring, or device memory."""
        k, view = self.k, self.k.plan.loads[i]
        if i in self.read:
            return self.read[i]
        if not k.plan.varies(view):
            if i in self.vectors:
                return self.vectors[i][self.piece]
            found = k.read(view, self.tensors, Int32(0), self.piece, self.place)
        elif i in self.row["fragments"]:
            return self.row["fragments"][i]
        else:
            found = k.tiles.fragment(i, self.row, self.piece, self.place)
        self.read[i] = found
        return found


__all__ = ["RowLoopKernel", "Values"]
