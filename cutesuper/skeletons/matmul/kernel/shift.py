"""The shift that helper warps subtract from the rows before anything else.
See `skeletons.matmul.shift`.

Eight threads read 16 bytes each, an eighth of the row apart, straight from memory while the first
stages are on their way. All blocks of a cluster read the same, so they agree on the number.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from cutesuper.device.fragments import PIECE, fragment
from cutesuper.device.launch import wait_for_predecessor
from cutesuper.device.memory import neighbours, one
from cutesuper.ir.dims import extent
from cutesuper.skeletons.matmul.kernel.context import Known
from cutesuper.skeletons.matmul.kernel.row_tile import LANES, RowTile


def sample_places(length: int) -> list[int]:
    """Starts of the sampled pieces of a row.

    >>> sample_places(4096)[:3], sample_places(72)
    ([0, 512, 1024], [0, 8, 16, 24, 32, 40, 48, 56])
    """
    return [lane * (length // PIECE) // LANES * PIECE for lane in range(LANES)]


class RowShift:
    """The mean of a sample of each row, and the rows without it."""

    def __init__(self, known: Known, tile: RowTile) -> None:
        self.tile, self.k = tile, known
        self.shift = known.plan.shift
        #: True if products take the shifted rows
        self.of_products = self.shift is not None and self.shift.products

    def fragments(self) -> list[list[cute.Tensor]]:
        """Registers for the sample; empty without a shift.
        For each pass of a thread over the rows, 16 bytes of every tensor."""
        if self.shift is None:
            return []
        leaves = self.shift.source.leaves
        return [[fragment(PIECE, self.k.dtype) for _ in leaves] for _ in range(self.tile.passes)]

    @cute.jit
    def load(self, pieces, here):
        """Load the sample.
        If the kernel does not depend on a predecessor, this is the first thing that the helpers do:
        behind the weights it would wait for 2 us in the queue of the memory."""
        k, plan = self.k, self.k.plan
        thread, tile = here.thread, here.tile
        last = k.extents.of(plan.row, here.tensors) - 1
        end = extent(plan.program.dims[plan.contracted])
        place = thread % LANES * (end // PIECE) // LANES * PIECE
        for p, registers in enumerate(pieces):
            row = tile.row * k.m + thread // LANES + p * self.tile.height
            row = row if row < last else last  # rows past the end are not stored
            for op, register in zip(self.shift.source.leaves, registers, strict=True):
                view = plan.staged(op)
                offset = k.batch_offset(view, here) + k.along(view, plan.row, row, here)
                source = here.tensors[view.argument].iterator + (offset + place)
                if cutlass.const_expr(op not in plan.copied and end >= PIECE):
                    cute.autovec_copy(neighbours(source.align(16), PIECE), register)
                else:
                    for e in cutlass.range_constexpr(PIECE):
                        # the elements of a row with fewer count several times
                        register[e] = one(source + e % end)[0]

    @cute.jit
    def sample(self, pieces, here):
        """A fragment with one number (fp32) for each pass of a thread over the rows."""
        found = fragment(self.tile.passes)
        if cutlass.const_expr(self.shift is not None and self.k.dependent):
            # the preceding kernel may be writing the rows
            wait_for_predecessor()
            self.load(pieces, here)
        for p, registers in enumerate(pieces):
            leaves = [register.load().to(Float32) for register in registers]
            v = self.shift.source.evaluate(leaves, self.k.math)
            total = v.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
            for distance in (4, 2, 1):
                total += cute.arch.shuffle_sync_bfly(total, distance)
            found[p] = total * (1.0 / (LANES * PIECE))
        return found

    def applied(self, values: dict[int, Any], number: Any, at: Any) -> dict[int, Any]:
        """The values at one place, including the shifted one; zeros past the end of the row."""
        if self.shift is None:
            return values
        leaves = [values[op] for op in self.shift.source.leaves]
        v = self.shift.source.evaluate(leaves, self.k.math) - number
        if self.tile.ragged:
            v = cute.where(self.tile.inside(at), v, cute.full_like(v, 0.0))
        return {**values, self.shift.value: v}
