"""The place of a block of an attention loop with plain sums: its tile of rows, the part of the loop
that its rows see, and addresses of vectors and results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cutlass_dsl import select_

from cutesuper.device.math import DeviceMath
from cutesuper.device.memory import element
from cutesuper.device.products import Products, products
from cutesuper.skeletons.attention.kernel.rows import masked_length, masked_offset
from cutesuper.skeletons.attention.plan import ROW_BLOCK
from cutesuper.skeletons.attention.sums.plan import SumsPlan
from cutesuper.skeletons.base import View
from cutesuper.skeletons.kernel.arguments import ELEMENT, Extents, described, labelled, unravel


@dataclass(frozen=True)
class Place:
    """The work of a block.

    Attributes:
        tile: index of the tile of rows.
        batch: coordinates along batch labels.
        lengths, offsets: of masks.
        end: of the loop.
    """

    tile: Any
    batch: dict[str, Any]
    lengths: list[Any]
    offsets: list[Any]
    end: Any


@dataclass(frozen=True)
class Span:
    """The tiles of the loop that a block walks over: the first, and how many in each walk (Int32).

    Attributes:
        total: of all walks.
    """

    first: Any
    count: Any
    total: Any


class Places:
    """Coordinates in a kernel of a plan."""

    def __init__(self, plan: SumsPlan) -> None:
        self.plan = plan
        self.cores: Products = products()
        self.extents = Extents(plan.program, plan.arguments)
        self.dtype = ELEMENT[plan.dtype]
        self.math = DeviceMath(fast=True)
        self.row_tile = ROW_BLOCK * plan.schedule.row_groups
        # rows that see most come first, so that short blocks fill the last wave
        self.last_first = any(s.mask.rows and not s.across for s in plan.sights)

    def matrix(
        self, view: View, labels: tuple[str, ...], tensors: list[cute.Tensor]
    ) -> cute.Tensor:
        """An operand as TMA loads see it, with modes (labels..., its other labels...)."""
        tensor = labelled(self.extents, view, (*labels, *self.others(view, labels)), tensors)
        shape = tuple(described(n) for n in tensor.shape)
        return cute.make_tensor(tensor.iterator, cute.make_layout(shape, stride=tensor.stride))

    def others(self, view: View, labels: tuple[str, ...]) -> tuple[str, ...]:
        """The labels of an operand besides those of its tiles."""
        return tuple(d for d in (*self.plan.batch, self.plan.visits) if d in view.labels)

    def blocks(self, tensors: list[cute.Tensor]) -> Any:
        """Number of blocks."""
        count = self.tiles(tensors)
        for d in self.plan.batch:
            count = count * self.extents.of(d, tensors)
        return count

    def tiles(self, tensors: list[cute.Tensor]) -> Any:
        """Number of tiles of rows."""
        return cute.ceil_div(self.extents.of(self.plan.rows, tensors), self.row_tile)

    def place(self, tensors: list[cute.Tensor]) -> Place:
        """Work of this block."""
        plan = self.plan
        index, _, _ = cute.arch.block_idx()
        tiles = self.tiles(tensors)
        tile, z = index % tiles, index // tiles
        if self.last_first:
            tile = tiles - 1 - tile
        batch = unravel(z, {d: self.extents.of(d, tensors) for d in plan.batch})
        lengths, offsets = [], []
        for sight in plan.sights:
            columns = plan.rows if sight.across else plan.loop
            whole = self.extents.of(columns, tensors)
            lengths.append(masked_length(self.extents, sight.mask, tensors, batch, whole))
            offsets.append(masked_offset(self.extents, sight.mask, tensors))
        return Place(tile, batch, lengths, offsets, self.extents.of(plan.loop, tensors))

    # -------------------------------------------------------------------------------- visibility

    def window(self, place: Place, row: Any) -> tuple[Any, Any]:
        """The first element of the loop that a row sees, and the end."""
        low: Any = Int32(0)
        high: Any = Int32(place.end)
        for sight, length, offset in zip(
            self.plan.sights, place.lengths, place.offsets, strict=True
        ):
            end = length + offset
            if not sight.across:
                high = cutlass.min(high, end + (row if sight.mask.rows is not None else 0))
            elif sight.mask.rows is not None:
                low = cutlass.max(low, row + 1 - end)
            else:
                high = Int32(select_(row < end, high, Int32(0)))
        return low, high

    def windows(
        self, place: Place, first: Any, count: int, tensors: list[cute.Tensor]
    ) -> tuple[Any, Any, Any, Any]:
        """Ranges that ``count`` rows see: the least and the largest begin, then the least and the
        largest end, which are those of the first and the last row."""
        last = cutlass.min(first + count, self.extents.of(self.plan.rows, tensors)) - 1
        (low, high), (low2, high2) = self.window(place, first), self.window(place, last)
        return (
            cutlass.min(low, low2), cutlass.max(low, low2),
            cutlass.min(high, high2), cutlass.max(high, high2),
        )  # fmt: skip

    def span(self, place: Place, tensors: list[cute.Tensor]) -> Span:
        """The tiles that any row of this block sees."""
        tile = self.plan.loop_tile
        first = place.tile * self.row_tile
        low, _, _, high = self.windows(place, first, self.row_tile, tensors)
        begin = low // tile
        count = cutlass.max((high + tile - 1) // tile - begin, 0)
        return Span(begin, count, count * self.turns(tensors))

    def turns(self, tensors: list[cute.Tensor]) -> Any:
        """Number of walks over the loop."""
        return self.extents.of(self.plan.visits, tensors) if self.plan.visits else 1

    def written(self, place: Place) -> Any:
        """End of the elements of the loop that have ever been written."""
        end: Any = place.end
        for sight, length in zip(self.plan.sights, place.lengths, strict=True):
            if sight.mask.lengths is not None and not sight.across:
                end = cutlass.min(end, length)
        return end

    # --------------------------------------------------------------------------------- addresses

    def offset(self, view: View, at: dict[str, Any], tensors: list[cute.Tensor]) -> Any:
        """Offset of an element in memory, along the labels in ``at``."""
        total = Int32(0)
        for d in view.labels:
            if d in at:
                total = total + at[d] * self.extents.stride(view, d, tensors)
        return total

    def line(self, view: View, place: Place, row: Any, tensors: list[cute.Tensor]) -> Any:
        """Offset of a row in a tensor that meets the scores, in elements; that of the last row for
        padding."""
        last = self.extents.of(self.plan.rows, tensors) - 1
        at = {**place.batch, self.plan.rows: cutlass.min(row, last)}
        return self.offset(view, {d: Int64(n) for d, n in at.items()}, tensors) + Int64(0)

    def row_values(self, place: Place, row: Any, tensors: list[cute.Tensor]) -> list[Any]:
        """The numbers of a row, in the order of the plan; some others for a row behind the end."""
        last = self.extents.of(self.plan.rows, tensors) - 1
        at = {**place.batch, self.plan.rows: cutlass.min(row, last)}
        found = []
        for load in self.plan.row_vectors:
            view = self.plan.view(load)
            source = tensors[view.argument].iterator
            found.append(Float32(element(source, self.offset(view, at, tensors))))
        return found
