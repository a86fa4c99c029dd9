"""The copier warps of the matmul loop: tiles of operands that bulk loads cannot address.

Words of several stages are on their way at any time. A warp shifts the words that it has asked for,
so that no other warp waits for them. The tensor cores read what it has written through another
proxy, so it fences before it says that its part of a stage is there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int16, Int32, Int64
from cutlass.cutlass_dsl import select_

from cutesuper.device.barriers import release_warp
from cutesuper.device.launch import wait_for_predecessor
from cutesuper.device.memory import neighbours
from cutesuper.device.tf32 import rounded_all
from cutesuper.device.unaligned import copy_word, end_words, shifted, wait_for_words
from cutesuper.skeletons.matmul.copies import (
    HALF_BYTES,
    PIECE,
    SEGMENT,
    TURN,
    TURN_BYTES,
    CopiedTile,
    depth,
    turns,
)
from cutesuper.skeletons.matmul.kernel.columns import ColumnGroup
from cutesuper.skeletons.matmul.kernel.context import Here, Known, Memory
from cutesuper.skeletons.matmul.plan import COLUMN_BLOCK, ROW_BOX

#: lanes that copy a segment, and its elements in words: one more than pieces
LANES, WORDS = SEGMENT // PIECE, SEGMENT + PIECE


@dataclass(frozen=True)
class Place:
    """The source of an operand's tile, and its place in shared memory.

    Attributes:
        tile: what is copied.
        contracted: its contracted label.
        memory: the tensor in shared memory.
        offset: of an element (free label, contracted label) of a stage, before the swizzle.
    """

    tile: CopiedTile
    contracted: str
    memory: Callable[[Memory], cute.Tensor]
    offset: Callable[[Any, Any, Any], Any]


def place_of_rows(k: Known, n: int, op: int) -> Place:
    """The place of row operand number ``n``."""

    def offset(row: Any, depth: Any, stage: Any) -> Any:
        if k.plan.turned:
            at = row % ROW_BOX, depth, stage * k.row_boxes + row // ROW_BOX
            return cute.crd2idx(at, k.box_layout(1).outer)
        at = row, depth % k.plan.chunk, stage * k.chunks + depth // k.plan.chunk
        return cute.crd2idx(at, k.row_layout(k.m, k.stages * k.chunks).outer)

    return Place(k.plan.copied_tiles[op], k.plan.contracted, lambda m: m.rows[n], offset)


def places_of_columns(
    k: Known, group: ColumnGroup, memory: Callable[[Memory], cute.Tensor]
) -> list[Place]:
    """The places of those column operands of a group that are copied.
    Their boxes are not narrow."""
    tiles = k.plan.copied_tiles | k.plan.copied_after

    def place(n: int, tile: CopiedTile) -> Place:
        def offset(column: Any, depth: Any, stage: Any) -> Any:
            box = stage * group.boxes + n * group.blocks + column // COLUMN_BLOCK
            layout = group.layout(k.dtype, group.slots * group.boxes)
            return cute.crd2idx((column % COLUMN_BLOCK, depth, box), layout.outer)

        return Place(tile, group.contracted, memory, offset)

    return [place(n, tiles[op]) for n, op in enumerate(group.views) if op in tiles]


@dataclass(frozen=True)
class Turn:
    """A lane's part of a turn.

    Attributes:
        line, along: row in the tile, and element in the row, of its piece.
        start: first element of the piece in memory.
        count: elements from there to the end of the row; -8 if there is no such row.
        words: the words of its segment, in shared memory.
        lane: of the 8 that share the segment.
    """

    line: Any
    along: Any
    start: Any
    count: Any
    words: cute.Pointer
    lane: Any


class Copies:
    """The copies of a block; for a plan without any there are no such warps."""

    def __init__(self, known: Known) -> None:
        self.k, plan = known, known.plan
        main, inner, after = known.groups
        copied = [(n, op) for n, op in enumerate(plan.rows) if op in plan.copied]
        self.staged = [place_of_rows(known, n, op) for n, op in copied]
        self.staged += places_of_columns(known, main, lambda m: m.columns)
        for i, group in enumerate(g for g in inner if g.views):
            self.staged += places_of_columns(known, group, lambda m, i=i: m.hidden.inner[i])
        self.after = list[Place]()
        for t, group in enumerate(after):
            self.after += places_of_columns(known, group, lambda m, t=t: m.hidden.after[t])
        self.warps = plan.copiers
        #: of what is copied
        self.dtype = Int16 if plan.halves > 1 else known.dtype
        #: warps that arrive at the barrier of a stage, and at that of the products after the loop
        self.stage_warps = self.warps if self.staged else 0
        self.after_warps = self.warps if self.after else 0
        tiles = [p.tile for p in self.staged]
        #: stages on their way, and turns of a stage
        self.depth, self.turns = depth(tiles), turns(tiles, max(1, self.warps))
        #: turns for whose words a warp has room
        self.room = plan.word_turns(self.warps) if self.warps else 0

    def allocate(self, alloc: Any) -> Any:
        """Allocate shared memory for words; None without any."""
        if not self.room:
            return None
        count = self.warps * self.room * TURN_BYTES // HALF_BYTES
        return alloc.allocate_array(self.dtype, count, byte_alignment=128)

    # ------------------------------------------------------------------------------------ device

    @cute.jit
    def run(self, here):
        """Copy all operands of this block's tile."""
        k = self.k
        if cutlass.const_expr(not all(map(k.is_early, k.plan.copied))):
            wait_for_predecessor()
        if cutlass.const_expr(len(self.staged) > 0):
            self.copy_stages(here)
        if cutlass.const_expr(len(self.after) > 0):
            self.copy_after(here)

    @cute.jit
    def copy_stages(self, here):
        """Copy the operands of the loop."""
        k, ring, count = self.k, here.memory.ring, here.tile.iterations
        first, ahead = here.tile.rank * (count * k.k), self.depth - 1
        at = ring.first(phase=1)
        for i in cutlass.range(ahead, unroll=1):
            if i < count:
                self.ask_stage(first + i * k.k, i * self.turns, here)
            end_words()
        for i in cutlass.range(count, unroll=1):
            if i + ahead < count:
                room = (i + ahead) % self.depth * self.turns
                self.ask_stage(first + (i + ahead) * k.k, room, here)
            end_words()
            wait_for_words(ahead)
            ring.wait_empty(at)
            self.write_stage(first + i * k.k, i % self.depth * self.turns, at.stage, here)
            release_warp(ring.full[at.stage], here.lane)
            at = ring.next(at)

    @cute.jit
    def ask_stage(self, start, room, here):
        """Ask for the words of a stage that begins at ``start`` of the contracted label.
        They lie in the warp's room from turn ``room`` on."""
        for n, place in enumerate(self.staged):
            for i in cutlass.range(
                self.first_turn(n, here), place.tile.turns, self.warps, unroll=1
            ):
                self.ask(place, i, start, room, here)
                room += 1

    @cute.jit
    def write_stage(self, start, room, stage, here):
        """Write the pieces of a stage whose words are there."""
        for n, place in enumerate(self.staged):
            for i in cutlass.range(
                self.first_turn(n, here), place.tile.turns, self.warps, unroll=1
            ):
                self.write(place, i, start, room, stage, here)
                room += 1

    def first_turn(self, n: int, here: Here) -> Any:
        """First turn of this warp in operand ``n`` of the loop.
        The warps go on where they were in the operand before."""
        before = sum(p.tile.turns for p in self.staged[:n])
        return (here.thread // 32 + (-before) % self.warps) % self.warps

    @cute.jit
    def copy_after(self, here):
        """Copy the column operands of the products after the loop, one turn at a time."""
        for place in self.after:
            for i in cutlass.range(here.thread // 32, place.tile.turns, self.warps, unroll=1):
                self.ask(place, i, 0, 0, here)
                end_words()
                wait_for_words(0)
                self.write(place, i, 0, 0, 0, here)
                cute.arch.sync_warp()
        release_warp(here.memory.after_full.only, here.lane)

    def turn(self, place: Place, i: Any, depth: Any, room: Any, here: Here) -> Turn:
        """The lane's part of turn ``i`` of a tile, with its words in the warp's room ``room``.
        ``depth``: start of the tile along the contracted label."""
        tile, tensors, extents = place.tile, here.tensors, self.k.extents
        lane = here.lane % LANES
        segment = i * TURN + here.lane // LANES
        width = tile.along[1] // SEGMENT
        line, along = segment // width, segment % width * SEGMENT + lane * PIECE
        row, halves = self.origin(tile.lines[0], depth, here) + line, tile.halves
        at = self.origin(tile.along[0], depth, here) * halves + along
        start = self.k.batch_offset(tile.view, here)
        start = start + self.k.along(tile.view, tile.lines[0], row, here)
        if extents.wide(tile.view, halves):
            start = Int64(start)
        start = start * halves + at
        inside = row < extents.of(tile.lines[0], tensors)
        end = extents.of(tile.along[0], tensors) * halves
        count = Int32(select_(inside, end - at, Int32(-PIECE)))
        offset = (room * self.warps + here.thread // 32) * TURN + here.lane // LANES
        words = here.memory.words + cute.assume(offset * WORDS, divby=PIECE)
        return Turn(line, along, start, count, words, lane)

    @cute.jit
    def ask(self, place: cutlass.Constexpr, i, depth, room, here):
        """Ask for the words of a turn."""
        turn = self.turn(place, i, depth, room, here)
        tensor = here.tensors[place.tile.view.argument]
        self.ask_word(turn, turn.lane * PIECE, turn.start & -PIECE, turn.count, tensor)
        if turn.lane == LANES - 1:
            self.ask_word(turn, SEGMENT, (turn.start & -PIECE) + PIECE, turn.count - PIECE, tensor)

    @cute.jit
    def ask_word(self, turn: cutlass.Constexpr, place, at, count, tensor):
        """Ask for one word of a segment, which begins at element ``at``.
        Zeros behind the tensor's end, and if the row has ended."""
        of = type(at)  # of 32 bits or of 64, and so are both sides of every choice
        left = of(cute.size(tensor)) * self.k.plan.halves - at
        left = left if left < PIECE else of(PIECE)
        left = left if count + (turn.start & (PIECE - 1)) > 0 else of(0)
        first = cute.recast_ptr(tensor.iterator, dtype=self.dtype)
        source = first + cute.assume(at if left > 0 else of(0), divby=PIECE)
        copy_word(source, turn.words + cute.assume(place, divby=PIECE), HALF_BYTES * left)

    @cute.jit
    def write(self, place: cutlass.Constexpr, i, depth, room, stage, here):
        """Write the pieces of a turn to a stage."""
        turn, tile = self.turn(place, i, depth, room, here), place.tile
        end = self.k.plan.program.dims[tile.along[0]]
        whole = isinstance(end, int) and end * tile.halves % PIECE == 0
        words = turn.words + cute.assume(turn.lane * PIECE, divby=PIECE)
        piece = shifted(words, Int32(turn.start), turn.count, tile.step, whole)
        if cutlass.const_expr(self.k.plan.rounds):
            piece = rounded_all(cute.recast_tensor(piece, Float32).load())
            piece = cute.recast_tensor(piece, self.dtype)
        cute.autovec_copy(piece, self.target(place, turn, stage, here))

    def origin(self, label: str, depth: Any, here: Here) -> Any:
        """Start of the tile along a label; blocks have the whole of hidden ones."""
        k = self.k
        if label == k.plan.contracted:
            return depth
        starts = {k.plan.row: here.tile.row * k.m, k.plan.column: here.tile.column * k.n}
        return starts.get(label, 0)

    def target(self, place: Place, turn: Turn, stage: Any, here: Here) -> cute.Tensor:
        """The place of a piece in shared memory."""
        free = turn.line, turn.along // place.tile.halves
        free = free if place.tile.along[0] == place.contracted else free[::-1]
        number = place.offset(*free, stage) * place.tile.halves // PIECE
        # the swizzle permutes the pieces of a row of 128 bytes by the row's number
        number = number ^ (number // PIECE % PIECE)
        pointer = cute.recast_ptr(place.memory(here.memory).iterator, dtype=self.dtype)
        return neighbours(pointer + cute.assume(number * PIECE, divby=PIECE), PIECE)
