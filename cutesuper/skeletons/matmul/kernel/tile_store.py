"""TMA stores of tiles: pieces of 32 rows and 64 columns, two or more of each warpgroup in flight.
If the rows of a tile are no multiple of 32, its last piece begins within the one before, and stores
some of them again. Residuals come in the same pieces, each into the buffer from which its result
leaves; the first ones are asked for before the products of their tile.

An accumulator fragment holds the tile transposed (columns are the M side of the product), so it is
transposed while it is written to shared memory, 8x8 elements at a time. The TMA store clips the
elements that lie outside of the tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from cutesuper.device.barriers import Barrier, Barriers, Meeting, fence_copies
from cutesuper.device.fragments import fragment, stored
from cutesuper.device.memory import (
    bulk_load,
    bulk_store,
    neighbours,
    operand,
    operand_layout,
    partition,
    store_atom,
    tile_atom,
    transposed_atom,
    transposing_atom,
    wait_for_stores,
)
from cutesuper.skeletons.base import View
from cutesuper.skeletons.kernel.arguments import dtype_of, labelled
from cutesuper.skeletons.matmul.kernel.context import WARPGROUP_BARRIER, Here, Known, Memory
from cutesuper.skeletons.matmul.kernel.leaves import Column, Leaves
from cutesuper.skeletons.matmul.plan import STORE_COLUMNS, STORE_ROWS

#: accumulators of one thread and column in a piece
VALUES = STORE_ROWS // 4
PIECE_ELEMENTS = STORE_ROWS * STORE_COLUMNS


class TileStore:
    """The path from accumulators to memory, one piece at a time, each warpgroup on its own."""

    def __init__(self, known: Known, leaves: Leaves) -> None:
        self.k, self.leaves = known, leaves
        self.active = known.plan.schedule.bulk_store
        rows = known.plan.program.dims[known.plan.row]
        height = min(known.m, rows) if isinstance(rows, int) else known.m
        #: rows between possible starts of pieces, and the first rows of a tile's pieces, those that
        #: exist: a tensor of one piece has no other coordinate
        self.every = gcd(known.m, STORE_ROWS)
        self.starts = [min(p, known.m - STORE_ROWS) for p in range(0, height, STORE_ROWS)]
        #: tensors that are loaded in pieces, and all TMA copies: outputs, then these
        self.loads = len(known.plan.pieced) if self.active else 0
        self.count = len(known.plan.outputs) + self.loads if self.active else 0
        #: pieces of a warpgroup in flight, and their buffers
        self.depth = known.plan.schedule.pieces
        self.buffers = self.depth * max(1, self.loads)
        #: pieces on their way to memory while another one is loaded behind them: waiting for the
        #: last of them would hold up the warpgroup
        self.lag = min(2, self.depth - 1)
        #: True if pieces may be asked for before the products
        self.early = all(known.is_early(op) for op in known.plan.pieced)

    # ------------------------------------------------------------------------------------ host

    def layout(self) -> cute.ComposedLayout:
        """Layout of the pieces of all warpgroups, swizzled."""
        k = self.k
        tile = (STORE_ROWS, STORE_COLUMNS)
        return operand_layout(k.dtype, tile, self.buffers * k.warpgroups, True)

    def atoms(self, tensors: list[cute.Tensor]) -> list[Any]:
        """A TMA store for every output, and a TMA load for every tensor that comes in pieces."""
        if not self.active:
            return []
        plan, tile = self.k.plan, (STORE_ROWS, STORE_COLUMNS)
        layout = cute.slice_(self.layout(), (None, None, 0))
        views = [(o.view, store_atom) for o in plan.outputs]
        views += [(plan.loads[op], tile_atom) for op in plan.pieced]
        found = []
        for view, atom in views:
            labels = (plan.row, plan.column, *self.k.batch_of(view))
            found.append(atom(labelled(self.k.extents, view, labels, tensors), layout, tile))
        return found

    # ---------------------------------------------------------------------------------- device

    def allocate(self, alloc: Any) -> tuple[Any, Any]:
        """Allocate shared memory for the pieces, and the barriers of those that are loaded."""
        if not self.active:
            return None, None
        pieces = operand(alloc, self.k.dtype, self.layout())
        count = self.depth * self.k.warpgroups
        return pieces, Barriers.allocate(alloc, count) if self.loads else None

    def partition(self, atoms: list[Any], coords: list[Any], memory: Memory) -> list[Any]:
        """For every copy: the atom, the pieces' slots and the tensor's pieces.
        Pieces begin at every row where one may."""
        shape, found = (STORE_ROWS, STORE_COLUMNS), []
        for atom, coord in zip(atoms, coords, strict=True):
            places = (None,) * cute.rank(coord)
            pieces = cute.local_tile(coord, (self.every, STORE_COLUMNS), places)
            if self.every < STORE_ROWS:  # they overlap
                layout = cute.make_layout((*shape, *pieces.shape[2:]), stride=pieces.stride)
                pieces = cute.make_tensor(pieces.iterator, layout)
            found.append((atom, *partition(atom, memory.pieces, pieces, len(shape))))
        return found

    def piece(self, copy: Any, view: View, here: Here, i: int, first: int) -> tuple[Any, Any]:
        """Slots, and the piece of a tensor in this warpgroup's ``i``-th block of columns.
        From row ``first`` of the tile on."""
        k, tile, (_, slots, pieces) = self.k, here.tile, copy
        block = k.block(i, here.warp)
        at = tuple(tile.batch[d] for d in k.batch_of(view))
        row = tile.row * (k.m // self.every) + first // self.every
        return slots, pieces[(None, row, tile.column * k.blocks + block, *at)]

    # ---------------------------------------------------------------------------------- loads

    def places(self) -> list[tuple[int, int]]:
        """Block of columns and first row of every piece of a warpgroup, in order."""
        per_group = self.k.blocks // self.k.warpgroups
        return [(i, first) for i in range(per_group) for first in self.starts]

    @cute.jit
    def ask(self, here, outs, early: cutlass.Constexpr):
        """Load the first pieces of a tile, once those of the one before have left."""
        if cutlass.const_expr(self.loads > 0 and self.early == early):
            if here.warp % 4 == 0:
                wait_for_stores(0)
                for n in cutlass.range_constexpr(min(self.depth, len(self.places()))):
                    self.load(n, here, outs)

    def load(self, n: int, here: Here, outs: list[Any]) -> None:
        """Load the ``n``-th piece of this warpgroup."""
        plan, (i, first) = self.k.plan, self.places()[n]
        full = self.full(n, here)
        full.expect_once(PIECE_ELEMENTS * sum(plan.itemsize(plan.loads[op]) for op in plan.pieced))
        for x, op in enumerate(plan.pieced):
            copy = outs[len(plan.outputs) + x]
            slots, source = self.piece(copy, plan.loads[op], here, i, first)
            bulk_load(copy[0], source, slots[None, self.buffer(n, x, here)], full, None)

    def full(self, n: int, here: Here) -> Barrier:
        """The barrier of the ``n``-th piece."""
        barrier: Barrier = here.memory.pieces_full[here.warp // 4 * self.depth + n % self.depth]
        return barrier

    def buffer(self, n: int, x: int, here: Here) -> Any:
        """The buffer of the ``n``-th piece of the ``x``-th tensor."""
        return here.warp // 4 * self.buffers + n * max(1, self.loads) % self.buffers + x

    @cute.jit
    def wait_for_piece(self, n: cutlass.Constexpr, here):
        """Wait until the ``n``-th piece of this tile has come."""
        uses = len(range(n % self.depth, len(self.places()), self.depth))  # of its barrier
        self.full(n, here).wait((here.tile.turn * uses + n // self.depth) % 2)

    @cute.jit
    def load_behind(self, n: cutlass.Constexpr, here, outs):
        """Load another piece into the buffer of one before the ``n``-th, once that has left."""
        if cutlass.const_expr(self.lag <= n < len(self.places()) - self.depth + self.lag):
            if here.warp % 4 == 0:
                wait_for_stores(self.lag)
                self.load(n - self.lag + self.depth, here, outs)

    # --------------------------------------------------------------------------------- stores

    @cute.jit
    def run(self, accumulators, here, outs):
        """Store all pieces of a tile."""
        count = 0
        for n, (i, first) in enumerate(self.places()):
            for o, output in enumerate(self.k.plan.outputs):
                buffer = self.buffer(n if self.loads else count, 0, here)
                count += 1
                if cutlass.const_expr(self.loads > 0):
                    self.wait_for_piece(n, here)
                else:
                    self.wait_for_buffer(here.warp)
                sums = [row[i] for row in accumulators]
                self.write(sums, here, i, first, o, n, buffer)
                slots, target = self.piece(outs[o], output.view, here, i, first)
                self.send(outs[o][0], slots[None, buffer], target, here.warp)
            if cutlass.const_expr(self.loads > 0):
                self.load_behind(n, here, outs)
        if cutlass.const_expr(self.loads == 0 and count % self.depth != 0):
            # the next tile starts with the first buffer again
            self.drain()

    @cute.jit
    def send(self, atom, source, target, warp):
        """Start the TMA store of a piece that all warps of the warpgroup have written."""
        fence_copies()
        self.meet(warp // 4)
        if warp % 4 == 0:
            bulk_store(atom, source, target)

    @cute.jit
    def wait_for_buffer(self, warp):
        """Wait until the oldest piece has left its buffer."""
        if warp % 4 == 0:
            wait_for_stores(self.depth - 1)
        self.meet(warp // 4)

    @cute.jit
    def meet(self, group):
        """Wait for all warps of a consumer warpgroup at its barrier."""
        Meeting(WARPGROUP_BARRIER + group, 128).meet()

    @cute.jit
    def drain(self):
        """Wait until all pieces have left shared memory, which ends with the block."""
        if cutlass.const_expr(self.active):
            wait_for_stores(0)

    @cute.jit
    def write(
        self,
        sums,
        here,
        i: cutlass.Constexpr,
        first: cutlass.Constexpr,
        o: cutlass.Constexpr,
        n: cutlass.Constexpr,
        buffer,
    ):
        """Apply an output's expression to a piece, and write it to its buffer.
        The piece has what has come for it."""
        k, output = self.k, self.k.plan.outputs[o]
        block = k.block(i, here.warp)
        loaded = [self.read(x, here, self.buffer(n, x, here)) for x in range(self.loads)]
        places = {op: len(k.plan.finals) + x for x, op in enumerate(k.plan.pieced[: self.loads])}
        dtype = dtype_of(k.plan, output.view)
        last = k.extents.of(k.plan.column, here.tensors) - 1
        # 8x8 elements by (row block, column half): four of them are one store
        words = fragment(2 * VALUES, dtype)
        local = [first + self.leaves.row_of(v, here.quarter) for v in range(VALUES)]
        for half in cutlass.range_constexpr(2):
            column = here.tile.column * k.n + self.leaves.column_in_tile(block, half, here)
            inside = column if column < last else last  # loads stay inside their tensors
            columns = [self.column_of(acc, first, half) for acc in sums]
            columns += [self.column_of_words(words, half) for words in loaded]
            own = Column(k.plan.finals | places, columns, inside, k.plan.column, local)
            value = stored(self.leaves.evaluate(output.expression, own, here), VALUES, dtype)
            for v in cutlass.range_constexpr(VALUES):
                words[4 * (v // 2) + 2 * half + v % 2] = value[v]
        self.transpose(words, here, buffer, dtype)

    def column_of(self, accumulator: cute.Tensor, first: int, half: int) -> Any:
        """One column of the piece of an accumulator fragment from row ``first`` on."""
        column = fragment(VALUES)
        for v in range(VALUES):
            column[v] = accumulator[self.leaves.position(first // 4 + v, half)]
        return column.load()

    def column_of_words(self, words: cute.Tensor, half: int) -> Any:
        """One column of a piece that was loaded, as fp32."""
        column = fragment(VALUES, words.element_type)
        for v in range(VALUES):
            column[v] = words[4 * (v // 2) + 2 * half + v % 2]
        return column.load().to(Float32)

    def read(self, x: int, here: Here, buffer: Any) -> cute.Tensor:
        """The thread's elements of a piece of the ``x``-th tensor, in the order of `transpose`."""
        plan = self.k.plan
        dtype = dtype_of(plan, plan.loads[plan.pieced[x]])
        words, atom = fragment(2 * VALUES, dtype), transposed_atom(dtype)
        for s, place in enumerate(self.blocks(here, buffer, dtype)):
            cute.copy(atom, neighbours(place, 8), neighbours(words.iterator + 8 * s, 8))
        return words

    @cute.jit
    def transpose(self, words, here, buffer, dtype: cutlass.Constexpr):
        """Write a piece row by row."""
        atom = transposing_atom(dtype)
        for s, place in enumerate(self.blocks(here, buffer, dtype)):
            cute.copy(atom, neighbours(words.iterator + 8 * s, 8), neighbours(place, 8))

    def blocks(self, here: Here, buffer: Any, dtype: Any) -> Iterator[Any]:
        """The row that this lane gives the address of, for every four 8x8 blocks of a warp.
        Lane ``8 i + r`` gives row ``r`` of block ``i``."""
        base = cute.recast_ptr(here.memory.pieces.iterator, dtype=dtype) + buffer * PIECE_ELEMENTS
        lane = here.lane
        row = lane % 8
        chunk = (here.warp % 4) * 2 + (lane // 8) % 2
        for s in range(2 * VALUES // 8):
            at = (16 * s + 8 * (lane // 16) + row) * STORE_COLUMNS + (chunk ^ row) * 8
            yield (base + at).align(16)
