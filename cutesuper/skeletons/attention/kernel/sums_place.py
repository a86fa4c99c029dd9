"""The place of a block of an attention loop with plain sums.
Its tile of rows, the part of the loop that its rows see, and addresses of vectors and results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cutlass_dsl import select_

from cutesuper.device.architecture import products
from cutesuper.device.math import ScoreMath
from cutesuper.device.memory import element
from cutesuper.device.products import Products
from cutesuper.skeletons.attention.kernel.rows import longest_first, masked_length, masked_offset
from cutesuper.skeletons.attention.plan import ROW_BLOCK, Mask
from cutesuper.skeletons.attention.sums.plan import Sight, SumsPlan
from cutesuper.skeletons.base import View
from cutesuper.skeletons.kernel.arguments import ELEMENT, Extents, labelled, unravel


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
        self.math = ScoreMath()
        self.row_tile = ROW_BLOCK * plan.schedule.row_groups
        #: true if the last rows see most
        self.last_first = any(s.mask.rows and not s.across for s in plan.sights)

    def matrix(
        self, view: View, labels: tuple[str, ...], tensors: list[cute.Tensor]
    ) -> cute.Tensor:
        """An operand as TMA loads see it, with modes (labels..., its other labels...)."""
        return labelled(self.extents, view, (*labels, *self.others(view, labels)), tensors)

    def others(self, view: View, labels: tuple[str, ...]) -> tuple[str, ...]:
        """The labels of an operand besides those of its tiles."""
        return tuple(d for d in (*self.plan.batch, self.plan.visits) if d in view.labels)

    def blocks(self, tensors: list[cute.Tensor]) -> Any:
        """Number of blocks."""
        return self.tiles(tensors) * self.extents.count(self.plan.batch, tensors)

    def tiles(self, tensors: list[cute.Tensor]) -> Any:
        """Number of tiles of rows."""
        return cute.ceil_div(self.extents.of(self.plan.rows, tensors), self.row_tile)

    def place(self, tensors: list[cute.Tensor]) -> Place:
        """Work of this block."""
        plan = self.plan
        index, _, _ = cute.arch.block_idx()
        tiles, members = self.tiles(tensors), self.extents.count(plan.batch, tensors)
        walked = self.extents.of(plan.loop, tensors) * self.turns(tensors)
        tile, z = index % tiles, index // tiles
        if any(s.mask.rows for s in plan.sights):
            tile, z = longest_first(index, tiles, members, plan.loop_together // walked)
            if self.last_first:
                tile = tiles - 1 - tile
        batch = unravel(z, {d: self.extents.of(d, tensors) for d in plan.batch})
        lengths, offsets = [], []
        for sight in plan.sights:
            columns = plan.rows if sight.across else plan.loop
            whole = self.extents.of(columns, tensors)
            lengths.append(
                0
                if sight.mask.along((plan.rows, plan.loop))
                else masked_length(self.extents, sight.mask, tensors, batch, whole)
            )
            offsets.append(masked_offset(self.extents, sight.mask, tensors))
        return Place(tile, batch, lengths, offsets, self.extents.of(plan.loop, tensors))

    # -------------------------------------------------------------------------------- visibility

    def window(self, place: Place, row: Any, tensors: list[cute.Tensor]) -> tuple[Any, Any]:
        """The first element of the loop that a row sees, and the end."""
        low: Any = Int32(0)
        high: Any = Int32(place.end)
        for n, sight in enumerate(self.plan.sights):
            bound = self._bound(n, place, row, tensors)
            if self._bars(sight):
                seen = row >= bound if sight.mask.lower else row < bound
                high = Int32(select_(seen, high, Int32(0)))
            elif sight.across == sight.mask.lower:
                high = cutlass.min(high, bound)
            else:
                low = cutlass.max(low, bound)
        return low, high

    def _bars(self, sight: Sight) -> bool:
        """True for a mask that hides some rows as a whole, and nothing from others."""
        mask = sight.mask
        return sight.across and mask.rows is None and not mask.along((self.plan.loop,))

    def _bound(self, n: int, place: Place, row: Any, tensors: list[cute.Tensor]) -> Any:
        """The limit of the loop that the n-th mask sets for a row; that of rows if it bars some."""
        sight, length = self.plan.sights[n], place.lengths[n]
        mask = sight.mask
        if mask.along((self.plan.loop,)):
            return self._first_above(mask, place, row, tensors)
        if mask.along((self.plan.rows,)):
            last = self.extents.of(self.plan.rows, tensors) - 1
            at = {**place.batch, self.plan.rows: cutlass.min(row, last)}
            length = masked_length(self.extents, mask, tensors, at, place.end)
        bound = length + place.offsets[n]
        if mask.rows is None:
            return bound
        return row + 1 - bound if sight.across else bound + row

    def _first_above(self, mask: Mask, place: Place, row: Any, tensors: list[cute.Tensor]) -> Any:
        """The first element of the loop whose limit is above a row's position, by bisection.
        The limits do not fall. The loads do not branch, so that several searches overlap."""
        plan, end, found = self.plan, place.end, Int32(0)
        steps = 31 if plan.grows(plan.loop) else plan.extent(plan.loop).bit_length()
        for step in reversed(range(steps)):
            after = found + (1 << step)
            at = {**place.batch, plan.loop: cutlass.min(after, end) - 1}
            limit = masked_length(self.extents, mask, tensors, at, end)
            found = Int32(select_((after <= end) & (limit <= row), after, found))
        return found

    def windows(
        self, place: Place, first: Any, count: int, tensors: list[cute.Tensor]
    ) -> tuple[Any, Any, Any, Any]:
        """Ranges that ``count`` rows see: least and largest begin, then least and largest end.
        They are those of the first and the last row."""
        last = cutlass.min(first + count, self.extents.of(self.plan.rows, tensors)) - 1
        (low, high), (low2, high2) = (self.window(place, row, tensors) for row in (first, last))
        inner = cutlass.max(low, low2), cutlass.min(high, high2)
        if self.plan.begins:  # rows at both ends may be barred, and those between them not
            first, last = self._unbarred(place, first, last, tensors)
            (low, high), (low2, high2) = (self.window(place, row, tensors) for row in (first, last))
        return cutlass.min(low, low2), *inner, cutlass.max(high, high2)

    def _unbarred(
        self, place: Place, first: Any, last: Any, tensors: list[cute.Tensor]
    ) -> tuple[Any, Any]:
        """The first and the last of some rows that no mask hides as a whole."""
        for n, sight in enumerate(self.plan.sights):
            if self._bars(sight):
                bound = self._bound(n, place, first, tensors)
                if sight.mask.lower:
                    first = cutlass.max(first, bound)
                else:
                    last = cutlass.min(last, bound - 1)
        return first, last

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
            if sight.mask.written and not sight.across:
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
        """Offset of a row in a tensor that meets the scores, in elements.
        That of the last row for padding."""
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
