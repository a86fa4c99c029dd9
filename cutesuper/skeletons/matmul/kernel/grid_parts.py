"""Tiles whose contracted label is divided by the grid.
Every block has partial sums of the whole tile, and finishes a part of it.

Blocks leave their sums in device memory and wait for the others of their tile; then each adds up
some elements, in the order of the parts, so that results are the same bits every time. One block
that adds everything up would read the partial sums of all: 8.6 MB of 66 parts of 128x256, at 86 KB
a microsecond.
"""

from __future__ import annotations

from math import gcd
from typing import Any

import cutlass
import cutlass.cute as cute

from cutesuper.device.fragments import fetched, fragment
from cutesuper.device.grid import arrive_in_grid, wait_for_grid
from cutesuper.device.memory import neighbours
from cutesuper.skeletons.matmul.kernel.context import Here, Known
from cutesuper.skeletons.matmul.kernel.leaves import Column, Leaves

#: parts that a thread reads at a time
IN_FLIGHT = 8


class GridParts:
    """The exchange of partial sums between the blocks of a tile.

    An *item* is `width` neighbouring values of a thread's column: rows of one quarter.
    """

    def __init__(self, known: Known, leaves: Leaves) -> None:
        self.k, self.leaves = known, leaves
        self.parts = known.plan.parts
        self.width = gcd(4, known.values)
        #: items of an accumulator, of which each block finishes as many
        self.items = 4 * known.n * (known.values // self.width)
        self.own = -(-self.items // self.parts)

    def unit(self, here: Here) -> Any:
        """Number of this block's tile."""
        k, tile, tensors = self.k, here.tile, here.tensors
        index = 0
        for label in k.plan.batch:
            index = index * k.extents.of(label, tensors) + tile.batch[label]
        index = index * cute.ceil_div(k.extents.of(k.plan.row, tensors), k.m) + tile.row
        return index * cute.ceil_div(k.extents.of(k.plan.column, tensors), k.n) + tile.column

    def place(self, part: Any, product: int, item: Any, here: Here) -> cute.Pointer:
        """The place of an item of one part: neighbouring items are neighbouring columns."""
        index = (self.unit(here) * self.parts + part) * self.k.results + product
        offset = (index * self.items + item) * self.width
        return here.scratch[0].iterator + cute.assume(offset, divby=self.width)

    @cute.jit
    def leave(self, accumulators, here):
        """Write this block's sums, and wait for those of the others."""
        k = self.k
        for w in cutlass.range_constexpr(k.results):
            for i in cutlass.range_constexpr(len(accumulators[w])):
                block = k.block(i, here.warp)
                for half in cutlass.range_constexpr(2):
                    column = self.leaves.column_in_tile(block, half, here)
                    for v in cutlass.range_constexpr(0, k.values, self.width):
                        item = (v // self.width * 4 + here.quarter) * k.n + column
                        self.put(
                            accumulators[w][i], v, half, self.place(here.tile.rank, w, item, here)
                        )
        k.consumers_meet()
        if here.thread == 0:
            counter = here.scratch[1].iterator + self.unit(here)
            arrive_in_grid(counter, here.tile.rank, self.parts)
            wait_for_grid(counter)
        k.consumers_meet()

    def put(self, accumulator: cute.Tensor, v: int, half: int, place: cute.Pointer) -> None:
        """Write the item that begins with value ``v`` of a column."""
        item = fragment(self.width)
        for e in range(self.width):
            item[e] = accumulator[self.leaves.position(v + e, half)]
        cute.autovec_copy(item, neighbours(place, self.width))

    def column(self, item: Any, here: Here) -> Column:
        """An item with the complete sums of all products."""
        k = self.k
        n, quarter, chunk = item % k.n, item // k.n % 4, item // (4 * k.n)
        rows = [self.leaves.row_of(e, quarter) + 4 * self.width * chunk for e in range(self.width)]
        sums = [self.total(w, item, here) for w in range(k.results)]
        return Column(self.leaves.places, sums, here.tile.column * k.n + n, k.plan.column, rows)

    @cute.jit
    def total(self, product: cutlass.Constexpr, item, here):
        """The sum of an item over all parts, in their order."""
        total = fetched(neighbours(self.place(0, product, item, here), self.width))
        for part in cutlass.range(1, self.parts, unroll=IN_FLIGHT):
            other = fetched(neighbours(self.place(part, product, item, here), self.width))
            for e in cutlass.range_constexpr(self.width):
                total[e] = total[e] + other[e]
        return total.load()
