"""TMA stores of tiles: pieces of 32 rows and 64 columns, two per warpgroup in flight. If the rows
of a tile are no multiple of 32, its last piece begins within the one before, and stores some of
them again.

An accumulator fragment holds the tile transposed (columns are the M side of the product), so it is
transposed while it is written to shared memory, 8x8 elements at a time. The TMA store clips the
elements that lie outside of the tensor.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute

from cutesuper.device.barriers import Meeting, fence_copies
from cutesuper.device.fragments import fragment, stored
from cutesuper.device.memory import (
    bulk_store,
    neighbours,
    operand,
    operand_layout,
    partition,
    store_atom,
    transposing_atom,
    wait_for_stores,
)
from cutesuper.skeletons.kernel.arguments import dtype_of, labelled
from cutesuper.skeletons.matmul.kernel.context import WARPGROUP_BARRIER, Known
from cutesuper.skeletons.matmul.kernel.leaves import Column, Leaves
from cutesuper.skeletons.matmul.plan import STORE_BUFFERS, STORE_COLUMNS, STORE_ROWS

#: accumulators of one thread and column in a piece
VALUES = STORE_ROWS // 4
PIECE_ELEMENTS = STORE_ROWS * STORE_COLUMNS


class TileStore:
    """The path from accumulators to memory, one piece at a time, each warpgroup on its own."""

    def __init__(self, known: Known, leaves: Leaves) -> None:
        self.k, self.leaves = known, leaves
        self.active = known.plan.schedule.bulk_store
        #: first rows of the pieces of a tile
        self.starts = [min(p, known.m - STORE_ROWS) for p in range(0, known.m, STORE_ROWS)]
        #: TMA stores, one for each output
        self.count = len(known.plan.outputs) if self.active else 0

    # ------------------------------------------------------------------------------------ host

    def layout(self) -> cute.ComposedLayout:
        """Layout of the pieces of all warpgroups, swizzled."""
        k = self.k
        tile = (STORE_ROWS, STORE_COLUMNS)
        return operand_layout(k.dtype, tile, STORE_BUFFERS * k.warpgroups, True)

    def atoms(self, tensors: list[cute.Tensor]) -> list[Any]:
        """A TMA store for every output."""
        if not self.active:
            return []
        plan, tile = self.k.plan, (STORE_ROWS, STORE_COLUMNS)
        layout = cute.slice_(self.layout(), (None, None, 0))
        found = []
        for output in plan.outputs:
            labels = (plan.row, plan.column, *self.k.batch_of(output.view))
            tensor = labelled(self.k.extents, output.view, labels, tensors)
            found.append(store_atom(tensor, layout, tile))
        return found

    # ---------------------------------------------------------------------------------- device

    def allocate(self, alloc: Any) -> Any:
        """Allocate shared memory for the pieces."""
        if not self.active:
            return None
        return operand(alloc, self.k.dtype, self.layout())

    def piece(self, coord: cute.Tensor, row: Any, column: Any, at: tuple[Any, ...]) -> cute.Tensor:
        """The piece of a tensor from a row and a column on, in slice ``at`` of the batch."""
        behind = cute.domain_offset((row, column, *at), coord)
        return cute.local_tile(behind, (STORE_ROWS, STORE_COLUMNS), (0, 0, *(0 for _ in at)))

    @cute.jit
    def run(self, accumulators, here, outs):
        """Store all pieces of a tile."""
        k, tile, warp = self.k, here.tile, here.warp
        group, count = warp // 4, 0
        for i in cutlass.range_constexpr(len(accumulators[0])):
            block = group + k.warpgroups * i
            for first in self.starts:
                for o, output in enumerate(k.plan.outputs):
                    buffer = group * STORE_BUFFERS + count % STORE_BUFFERS
                    count += 1
                    self.wait_for_buffer(warp)
                    sums = [row[i] for row in accumulators]
                    self.write(sums, here, block, first, o, buffer)
                    at = tuple(tile.batch[d] for d in k.batch_of(output.view))
                    row = tile.row * k.m + first
                    column = (tile.column * k.blocks + block) * STORE_COLUMNS
                    atom, coord = outs[o]
                    piece = self.piece(coord, row, column, at)
                    source, target = partition(atom, here.memory.pieces, piece, 2)
                    self.send(atom, source[None, buffer], target, warp)
        if cutlass.const_expr(count % STORE_BUFFERS != 0):
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
        """Wait until the piece before the last one has left its buffer."""
        if warp % 4 == 0:
            wait_for_stores(STORE_BUFFERS - 1)
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
    def write(self, sums, here, block, first: cutlass.Constexpr, o: cutlass.Constexpr, buffer):
        """Apply an output's expression to the piece from row ``first`` on and write it to its
        buffer."""
        k, output = self.k, self.k.plan.outputs[o]
        dtype = dtype_of(k.plan, output.view)
        last = k.extents.of(k.plan.column, here.tensors) - 1
        # 8x8 elements by (row block, column half): four of them are one store
        words = fragment(2 * VALUES, dtype)
        local = [first + self.leaves.row_of(v, here.quarter) for v in range(VALUES)]
        for half in cutlass.range_constexpr(2):
            n = here.tile.column * k.n + self.leaves.column_in_tile(block, half, here)
            inside = n if n < last else last  # loads of the epilogue stay inside their tensors
            columns = [self.column_of(acc, first, half) for acc in sums]
            own = Column(k.plan.finals, columns, inside, k.plan.column, local)
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

    @cute.jit
    def transpose(self, words, here, buffer, dtype: cutlass.Constexpr):
        """Write a piece row by row; lane ``8 i + r`` gives the address of row ``r`` of block
        ``i``."""
        atom = transposing_atom(dtype)
        base = cute.recast_ptr(here.memory.pieces.iterator, dtype=dtype) + buffer * PIECE_ELEMENTS
        lane = here.lane
        row = lane % 8
        chunk = (here.warp % 4) * 2 + (lane // 8) % 2
        for s in cutlass.range_constexpr(2 * VALUES // 8):
            at = (16 * s + 8 * (lane // 16) + row) * STORE_COLUMNS + (chunk ^ row) * 8
            source = neighbours(words.iterator + 8 * s, 8)
            cute.copy(atom, source, neighbours((base + at).align(16), 8))
