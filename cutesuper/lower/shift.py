"""What helper warps subtract from the rows before anything else: see `graph.shift`.

Eight threads read 16 bytes each, an eighth of the row apart, straight from memory while the first
stages are on their way. All blocks of a cluster read the same, so they agree on the number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from cutesuper.graph.dims import extent

if TYPE_CHECKING:
    from cutesuper.lower.statistics import RowSide

PIECE = 8  # elements of a 16-byte access
LANES = 8  # threads that share a row


def sample_places(length: int) -> list[int]:
    """Where the sampled pieces of a row start.

    >>> sample_places(4096)[:3], sample_places(72)
    ([0, 512, 1024], [0, 8, 16, 24, 32, 40, 48, 56])
    """
    return [lane * (length // PIECE) // LANES * PIECE for lane in range(LANES)]


class RowShift:
    """The mean of a sample of each row, and the rows without it."""

    def __init__(self, side: RowSide) -> None:
        self.side, self.k = side, side.k
        self.shift = self.k.plan.shift
        #: whether products take the shifted rows
        self.of_products = self.shift is not None and self.shift.products

    @cute.jit
    def sample(self, tensors, thread, where, rows_per_pass: cutlass.Constexpr):
        """A fragment with one number for each pass of a thread over the rows."""
        k, plan = self.k, self.k.plan
        found = cute.make_rmem_tensor(cute.make_layout(self.side.passes), Float32)
        if cutlass.const_expr(self.shift is not None):
            if cutlass.const_expr(k.dependent):
                # the rows may be what the kernel before writes
                cute.arch.griddepcontrol_wait()
            tile_m, _, _, batch = where
            last = k.extents.of(plan.row, tensors) - 1
            pieces = extent(plan.program.dims[plan.contracted]) // PIECE
            place = thread % LANES * pieces // LANES * PIECE
            for p in cutlass.range_constexpr(self.side.passes):
                row = tile_m * k.m + thread // LANES + p * rows_per_pass
                row = row if row < last else last  # rows past the end are not stored
                leaves = [
                    self.piece(plan.staged(op), tensors, row, place, batch)
                    for op in self.shift.source.leaves
                ]
                v = self.shift.source.evaluate(leaves, k.math)
                total = v.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
                for distance in (4, 2, 1):
                    total += cute.arch.shuffle_sync_bfly(total, distance)
                found[p] = total * (1.0 / (LANES * PIECE))
        return found

    def piece(self, view: Any, tensors: Any, row: Any, place: Any, batch: Any) -> Any:
        """16 bytes of a row-side tensor."""
        k, plan = self.k, self.k.plan
        offset = k.epilogue.batch_offset(view, batch) + row * view.stride(plan.row) + place
        source = (tensors[view.argument].iterator + offset).align(16)
        layout = cute.make_layout(PIECE)
        register = cute.make_rmem_tensor(layout, k.dtype)
        cute.autovec_copy(cute.make_tensor(source, layout), register)
        return register.load().to(Float32)

    def applied(self, values: dict[int, Any], number: Any, at: Any) -> dict[int, Any]:
        """The values of one place with the shifted one; zeros past the end of the row."""
        if self.shift is None:
            return values
        leaves = [values[op] for op in self.shift.source.leaves]
        v = self.shift.source.evaluate(leaves, self.k.math) - number
        if self.side.ragged:
            v = cute.where(self.side.inside(at), v, cute.full_like(v, 0.0))
        return {**values, self.shift.value: v}
