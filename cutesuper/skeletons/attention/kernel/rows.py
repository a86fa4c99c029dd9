"""The row side of the attention loop: rows, their keys, and values computed before it.
Coordinates of a block's rows, the keys visible to them, and values computed from rows before the
loop.

Rows may have several labels, e.g. 16 positions of the 4 query heads of a key head: one box of the
TMA load has them all, and a row's index is split again where positions or addresses matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutesuper.device.barriers import Meeting, fence_warp
from cutesuper.device.fragments import NEUTRAL, PIECE, combine, fetched, folded, stored
from cutesuper.device.memory import (
    bulk_load,
    element,
    neighbours,
    operand_layout,
    partition,
    put,
    tile_atom,
)
from cutesuper.skeletons.attention.kernel.context import (
    ROWS_BARRIER,
    Here,
    Known,
    Memory,
    Place,
    RowFacts,
)
from cutesuper.skeletons.attention.plan import ROW_BLOCK, Mask, Reduction
from cutesuper.skeletons.base import View
from cutesuper.skeletons.kernel.arguments import Extents, unravel


def byte_piece(depth: int, piece: Any, row: Any) -> Any:
    """Position of a piece (eight elements) of a row, in byte order, in a swizzled tile of rows.
    Its own inverse.

    Rows are cut into chunks of 64, 32 or 16 elements; inside a chunk the pieces are permuted.
    """
    chunk = chunk_of(depth)
    shift = {64: 0, 32: 1, 16: 2}[chunk]
    return piece ^ ((row >> shift) % (chunk // PIECE))


def masked_length(
    extents: Extents, mask: Mask, tensors: list[cute.Tensor], at: dict[str, Any], columns: Any
) -> Any:
    """The length that a mask reads at some coordinates, or its limit; 0 if it has none.
    A length is at most the number of columns, a limit at least 0."""
    view = mask.lengths
    if view is None:
        return 0
    offset = Int32(0)
    for d in view.labels:
        offset += at[d] * extents.stride(view, d, tensors)
    found = element(tensors[view.argument].iterator, offset)
    return cutlass.max(found, 0) if mask.limits else cutlass.min(found, columns)


def masked_offset(extents: Extents, mask: Mask, tensors: list[cute.Tensor]) -> Any:
    """The offset of a mask with all extents; without lengths every row sees a column."""
    if mask.added is None and mask.taken is None:
        return mask.offset
    added, taken = (0 if d is None else extents.of(d, tensors) for d in (mask.added, mask.taken))
    found = mask.offset + added - taken
    return found if mask.lengths is not None else cutlass.max(found, 1)


def longest_first(index: Any, tiles: Any, members: Any, abreast: Any) -> tuple[Any, Any]:
    """The tile of rows and the member of the batch of a block where a mask makes blocks shorter.
    Tiles count from the longest. ``abreast`` members at a time, whose keys and values fit into L2
    together, take turns: blocks become shorter to the end, and short ones fill the last wave."""
    if isinstance(tiles, int) and tiles == 1:
        return 0, index
    known = isinstance(abreast, int) and isinstance(members, int)
    abreast = (
        max(1, min(abreast, members))
        if known
        else cutlass.min(cutlass.max(Int32(abreast), 1), members)
    )
    first = index // (abreast * tiles) * abreast
    left = index - first * tiles
    even = known and members % abreast == 0
    count = abreast if even else cutlass.min(abreast, members - first)
    return left // count, first + left % count


def chunk_of(depth: int) -> int:
    """Number of contiguous elements in a swizzled tile with rows of ``depth`` elements."""
    return next(c for c in (64, 32, 16) if depth % c == 0)


@dataclass(frozen=True)
class QueryRow:
    """A row in shared memory: of the operand ``rows``, of the rows of an instruction."""

    rows: cute.Tensor
    block: Any
    row: Any


class Rows:
    """Tiles of the query, limits of masks, and values of rows."""

    def __init__(self, known: Known) -> None:
        self.k = known
        self.plan = plan = known.plan
        self.view = plan.view(plan.row_load)
        self.together = plan.schedule.together
        #: rows of an instruction: their extents, those that exist, and all
        self.tile, self.count = plan.row_tile, prod(plan.row_tile)
        self.height = ROW_BLOCK * (1 + self.together)
        self.has_lengths = any(m.lengths is not None for m in plan.masks)
        self.per_thread = 1 if plan.few_rows else 2
        #: the pieces of a row without padding, and their number for each of two threads
        self.pieces = plan.tile(plan.inner) // PIECE
        self.turns = -(-self.pieces // 2)
        self.prepares = plan.prologue is not None or bool(plan.row_values)

    # --------------------------------------------------------------------------------- loading

    @property
    def bytes(self) -> int:
        """Bytes that the TMA loads of all rows bring."""
        return self.plan.element_bytes * self.count * self.k.depth * self.plan.instructions

    def layout(self, count: int) -> cute.ComposedLayout:
        """Layout of the operands of instructions, ``[64 or 128 rows, inner, count]``, swizzled."""
        return operand_layout(self.k.dtype, (self.height, self.k.depth), count, True)

    def box(self) -> cute.ComposedLayout:
        """Layout of an instruction's rows as a TMA load sees them.
        A mode for each label, the fastest first, then the inner label."""
        chunk = chunk_of(self.k.depth)
        shape, stride, height = list[Any](), list[Any](), chunk
        for extent in reversed(self.tile):
            shape.append(extent)
            stride.append(height)
            height *= extent
        shape.append((chunk, self.k.depth // chunk))
        stride.append((1, self.height * chunk))
        outer = cute.make_layout(tuple(shape), stride=tuple(stride))
        return cute.make_composed_layout(self.layout(1).inner, 0, outer)

    def box_tile(self) -> tuple[int, ...]:
        return (*reversed(self.tile), self.k.depth)

    def atom(self, tensors: list[cute.Tensor]) -> Any:
        """The TMA load of an instruction's rows."""
        labels = (*reversed(self.plan.rows), self.plan.inner)
        tensor = self.k.matrix(self.view, labels, tensors)
        return tile_atom(tensor, self.box(), self.box_tile())

    def partition(self, atom: Any, coord: Any, memory: Memory) -> Any:
        """One slot for each instruction, and the tiles of the query."""
        rank = len(self.tile) + 1
        tiles = cute.local_tile(coord, self.box_tile(), (None,) * cute.rank(coord))
        found = []
        for g in range(self.plan.instructions):
            start = memory.rows.iterator + g * self.height * self.k.depth
            own = cute.make_tensor(start, self.box().outer)
            found.append(partition(atom, own, tiles, rank))
        return [slot for slot, _ in found], found[0][1]

    @cute.jit
    def load(self, load, memory, place):
        """Load the rows of this block."""
        batch = self.k.coordinates(self.view, place)
        for g in cutlass.range_constexpr(self.plan.instructions):
            slowest, *others = (place.tiles[d] for d in self.plan.rows)
            slowest = slowest * self.plan.instructions + g
            at = (None, *reversed((slowest, *others)), 0, *batch)
            bulk_load(load.atom, load.tiles[at], load.slots[g], memory.rows_full.only, None)

    # ------------------------------------------------------------------------------ coordinates

    def tiles(self, tensors: list[cute.Tensor]) -> Any:
        """Number of row tiles, over all row labels together."""
        total = 1
        for d in self.plan.rows:
            total = total * cute.ceil_div(self.k.extents.of(d, tensors), self.plan.tile(d))
        return total

    def place(self, tensors: list[cute.Tensor]) -> Place:
        """Work of this block."""
        plan = self.plan
        index, _, _ = cute.arch.block_idx()
        part, tile = index % plan.parts, index // plan.parts
        tiles, members = self.tiles(tensors), self.k.extents.count(plan.batch, tensors)
        keys = self.k.extents.of(plan.keys, tensors)
        row, z = tile % tiles, tile // tiles
        if any(m.rows for m in plan.masks):
            row, z = longest_first(tile, tiles, members, plan.keys_together // keys)
            row = tiles - 1 - row  # the last rows see most keys
        extents = {d: self.k.extents.of(d, tensors) for d in (*plan.rows, *plan.batch)}
        tiles = unravel(row, {d: cute.ceil_div(extents[d], plan.tile(d)) for d in plan.rows})
        batch = unravel(z, {d: extents[d] for d in plan.batch})
        rank = part % plan.cluster
        lengths = [
            0 if m.along(plan.rows) else masked_length(self.k.extents, m, tensors, batch, keys)
            for m in plan.masks
        ]
        offsets = [masked_offset(self.k.extents, m, tensors) for m in plan.masks]
        return Place(part, rank, tile, tiles, batch, lengths, offsets, keys)

    def limit(self, place: Place, positions: dict[str, Any], tensors: list[cute.Tensor]) -> Any:
        """End of the keys visible to a row at these positions (none if not positive)."""
        limit: Any = place.keys
        for n, mask in enumerate(self.plan.masks):
            if not mask.lower:
                limit = cutlass.min(limit, self._bound(n, place, positions, tensors))
        return limit

    def begin(self, place: Place, positions: dict[str, Any], tensors: list[cute.Tensor]) -> Any:
        """The first key visible to a row at these positions."""
        begin: Any = Int32(0)
        for n, mask in enumerate(self.plan.masks):
            if mask.lower:
                begin = cutlass.max(begin, self._bound(n, place, positions, tensors))
        return begin

    def _bound(
        self, n: int, place: Place, positions: dict[str, Any], tensors: list[cute.Tensor]
    ) -> Any:
        """The limit that the n-th mask sets for a row; for padding that of the last row."""
        mask, length, extents = self.plan.masks[n], place.lengths[n], self.k.extents
        if own := mask.along(self.plan.rows):
            last = {d: cutlass.min(positions[d], extents.of(d, tensors) - 1) for d in own}
            length = masked_length(extents, mask, tensors, {**place.batch, **last}, place.keys)
        bound = length + place.offsets[n]
        return bound if mask.rows is None else bound + positions[mask.rows]

    def visible(self, tensors: list[cute.Tensor], place: Place) -> Any:
        """End of the keys visible to any row of this block."""
        last = {**place.batch}
        for d in self.plan.rows:
            end = (place.tiles[d] + 1) * self.plan.tile(d)
            last[d] = cutlass.min(end, self.k.extents.of(d, tensors)) - 1
        return cutlass.max(self.limit(place, last, tensors), 0)

    def first(self, tensors: list[cute.Tensor], place: Place) -> Any:
        """The first key visible to any row of this block."""
        first = {d: place.tiles[d] * self.plan.tile(d) for d in self.plan.rows}
        return self.begin(place, {**place.batch, **first}, tensors)

    def row(self, warp: Any, lane: Any, r: int) -> Any:
        """Index of a thread's r-th row among those of its instruction, as products assign rows."""
        if self.together:
            return (warp % 4) * 32 + (warp // 4) * 16 + lane // 4 + 8 * r
        return (warp % 4) * 16 + lane // 4 + 8 * r

    def block_of(self, group: Any) -> Any:
        """The instruction that multiplies the rows of a warpgroup."""
        return 0 if self.together else group // self.k.key_groups

    def positions(self, place: Place, group: Any, row: Any) -> tuple[dict[str, Any], Any]:
        """Coordinates of a row of a warpgroup's instruction.
        And a predicate: true for a row of the tile."""
        inside = row < self.count
        found = {**place.batch}
        for n, d in reversed(list(enumerate(self.plan.rows))):
            extent = self.tile[n]
            start = place.tiles[d] * self.plan.tile(d)
            if n == 0:
                start = start + self.block_of(group) * extent
            found[d] = start + (row % extent if n else row)
            row = row // extent
        return found, inside

    # ---------------------------------------------------------------------------- before the loop

    def allocate(self, alloc: Any) -> cute.Pointer:
        """Allocate shared memory for fp32 values of rows."""
        count = max(1, len(self.plan.row_values)) * ROW_BLOCK * self.k.row_groups
        return alloc.allocate_array(Float32, count if self.prepares else 4, byte_alignment=16)

    @cute.jit
    def prepare(self, here):
        """Wait for the rows; compute their values and replace them by the operand of the product.
        Returns a `RowFacts`."""
        memory, place, group = here.memory, here.place, here.group
        memory.rows_full.only.wait(0)
        if cutlass.const_expr(self.prepares):
            if group % self.k.key_groups == 0:
                self.compute(here)
            threads = 128 * self.k.key_groups * (1 + self.together)
            Meeting(ROWS_BARRIER + self.block_of(group), threads).meet()
        values, begins, limits, at, latest = [], [], [], [], Int32(0)
        for r in cutlass.range_constexpr(self.per_thread):
            row = self.row(here.warp, here.lane, r)
            own = []
            for n in cutlass.range_constexpr(len(self.plan.row_values)):
                slot = self.slot(n, self.block_of(group), row)
                own.append(element(memory.row_values, slot))
            values.append(own)
            positions, _ = self.positions(place, group, row)
            limits.append(self.limit(place, positions, here.tensors))
            at.append(positions)
            if cutlass.const_expr(self.plan.begins):
                begins.append(self.begin(place, positions, here.tensors))
        first, _ = self.positions(place, group, 0)
        if cutlass.const_expr(self.plan.begins):
            last, _ = self.positions(place, group, self.count - 1)
            latest = self.begin(place, last, here.tensors)
        least = self.limit(place, first, here.tensors)
        beside = {
            i: [self.line(view, positions, here.tensors) for positions in at]
            for i, view in self.plan.beside.items()
        }
        return RowFacts(values, beside, begins, limits, latest, least, self.last_key(place))

    def last_key(self, place: Place) -> Any:
        """End of the keys that have ever been written; memory behind it may hold anything."""
        end: Any = place.keys
        for mask, length in zip(self.plan.masks, place.lengths, strict=True):
            if mask.written:
                end = cutlass.min(end, length)
        return end

    def slot(self, n: int, block: Any, row: Any) -> Any:
        """Index of the n-th value of a row in shared memory."""
        return (n * self.plan.instructions + block) * self.height + row

    @cute.jit
    def compute(self, here):
        """Compute reductions and values with two threads per row, then rewrite the row."""
        block, row = self.block_of(here.group), here.member // 2
        if cutlass.const_expr(self.together):
            row += here.group * ROW_BLOCK
        own = QueryRow(here.memory.rows, block, row)
        half = here.member % 2
        totals = {r.value: self.reduce(own, half, r) for r in self.plan.row_reductions}
        values = {}
        for n, (operation, e) in enumerate(self.plan.row_values.items()):
            value = Float32(e.evaluate([totals[i] for i in e.leaves], self.k.math))
            values[operation] = value
            slot = here.memory.row_values + self.slot(n, own.block, own.row)
            if half == 0:
                put(slot, value)
        if cutlass.const_expr(self.plan.prologue is not None):
            for p in cutlass.range_constexpr(self.turns):
                piece = 2 * p + half
                if piece < self.pieces:
                    self.rewrite(own, values, piece, here)
            fence_warp()

    @cute.jit
    def reduce(self, own, half, reduction: cutlass.Constexpr):
        """Reduce a row to an fp32 scalar that both of its threads receive."""
        total = Float32(NEUTRAL[reduction.op])
        for p in cutlass.range_constexpr(self.turns):
            piece = 2 * p + half
            if piece < self.pieces:
                total = self.add(total, reduction, own, piece)
        other = cute.arch.shuffle_sync_bfly(total, 1)
        return combine(reduction.op, total, other) * reduction.scale

    def add(self, total: Any, reduction: Reduction, own: QueryRow, piece: Any) -> Any:
        """Add eight more elements to a reduction."""
        x = self.read(own, piece).load().to(Float32)
        return folded(total, reduction.source.evaluate([x], self.k.math), reduction.op)

    def rewrite(self, own: QueryRow, values: dict[int, Any], piece: Any, here: Here) -> None:
        """Replace eight elements of a row by the operand of the product."""
        prologue = self.plan.prologue
        assert prologue is not None
        leaves = [self.leaf(i, own, values, piece, here) for i in prologue.leaves]
        result = stored(prologue.evaluate(leaves, self.k.math), PIECE, self.k.dtype)
        cute.autovec_copy(result, self.linear(own, piece))

    def leaf(self, i: int, own: QueryRow, values: dict[int, Any], piece: Any, here: Here) -> Any:
        """A leaf of the prologue: eight elements of a row or of a vector, or a value of the row."""
        if i == self.plan.row_load:
            return self.read(own, piece).load().to(Float32)
        if i not in self.plan.vectors:
            return values[i]
        pointer = here.tensors[self.plan.vectors[i].argument].iterator
        source = pointer + cute.assume(piece * PIECE, divby=PIECE)
        return fetched(neighbours(source, PIECE)).load().to(Float32)

    def read(self, own: QueryRow, piece: Any) -> cute.Tensor:
        """Read eight elements of a row."""
        return fetched(self.linear(own, piece))

    def linear(self, own: QueryRow, piece: Any) -> cute.Tensor:
        """View of eight contiguous elements of a row in shared memory."""
        chunk = chunk_of(self.k.depth)
        per = chunk // PIECE
        inside = byte_piece(self.k.depth, piece % per, own.row)
        base = own.block * (self.height * self.k.depth)
        offset = base + ((piece // per) * self.height + own.row) * chunk + inside * PIECE
        pointer = cute.recast_ptr(own.rows.iterator, dtype=self.k.dtype)
        return neighbours(pointer + cute.assume(offset, divby=PIECE), PIECE)

    def line(self, view: View, positions: dict[str, Any], tensors: list[cute.Tensor]) -> Any:
        """Offset of a row's first key in a tensor that meets the scores, in elements.
        That of the last row for padding."""
        total = Int64(0)
        for d in view.labels:
            if d != self.plan.keys:
                last = self.k.extents.of(d, tensors) - 1
                at = Int64(cutlass.min(positions[d], last))
                total = total + at * self.k.extents.stride(view, d, tensors)
        return total

    def offset(self, view: View, positions: dict[str, Any], tensors: list[cute.Tensor]) -> Any:
        """Offset of a row in memory, in elements, without its column."""
        total = Int32(0)
        for d in view.labels:
            if d != self.plan.columns:
                total = total + positions[d] * self.k.extents.stride(view, d, tensors)
        return total

    def exists(self, tensors: list[cute.Tensor], positions: dict[str, Any], inside: Any) -> Any:
        """Predicate that is true if a row of the tile exists in the tensor."""
        for d in self.plan.rows:
            inside = inside & (positions[d] < self.k.extents.of(d, tensors))
        return inside
