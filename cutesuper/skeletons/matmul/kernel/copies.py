"""The copier warps of the matmul loop: tiles of operands that bulk loads cannot address.

A thread asks for its next pieces, those of the next stage too, before it writes the ones that it has
asked for. The tensor cores read what it wrote through another proxy, so every warp fences before it
says that its part of a stage is there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cutlass_dsl import select_

from cutesuper.device.barriers import release_warp
from cutesuper.device.launch import wait_for_predecessor
from cutesuper.device.memory import neighbours
from cutesuper.device.unaligned import Unaligned, anew
from cutesuper.skeletons.matmul.copies import (
    BATCH,
    PIECE,
    SMALL_BATCH,
    CopiedTile,
    batches,
    step,
)
from cutesuper.skeletons.matmul.kernel.columns import ColumnGroup
from cutesuper.skeletons.matmul.kernel.context import Here, Known, Memory
from cutesuper.skeletons.matmul.kernel.tile_scheduler import Walk
from cutesuper.skeletons.matmul.plan import CHUNK


@dataclass(frozen=True)
class Place:
    """Where the tile of an operand comes from, and where it lies in shared memory.

    Attributes:
        tile: what is copied.
        contracted: its contracted label.
        memory: the tensor in shared memory.
        layout: makes its layout, in elements, before the swizzle.
        swizzled: bits of the swizzle: rows of 128, 64 and 32 bytes have 3, 2 and 1.
        coordinate: in the layout, of an element (free label, contracted label) of a stage.
    """

    tile: CopiedTile
    contracted: str
    memory: Callable[[Memory], cute.Tensor]
    layout: Callable[[], Any]
    swizzled: int
    coordinate: Callable[[Any, Any, Any], Any]


def place_of_rows(k: Known, n: int, op: int) -> Place:
    """The place of row operand number ``n``."""

    def layout() -> Any:
        return k.row_layout(k.m, k.stages * k.chunks).outer

    def coordinate(row: Any, depth: Any, stage: Any) -> Any:
        return row, depth % CHUNK, stage * k.chunks + depth // CHUNK

    tile = k.plan.copied_tiles[op]
    return Place(tile, k.plan.contracted, lambda m: m.rows[n], layout, 3, coordinate)


def places_of_columns(
    k: Known, group: ColumnGroup, memory: Callable[[Memory], cute.Tensor]
) -> list[Place]:
    """The places of those column operands of a group that are copied."""
    width, boxes = group.width, group.slots * group.boxes
    labels = (group.column, width * group.blocks), (group.contracted, group.depth)

    def place(n: int, tile: CopiedTile) -> Place:
        def coordinate(column: Any, depth: Any, stage: Any) -> Any:
            box = stage * group.boxes + n * group.blocks + column // width
            return column % width, depth, box

        bits = {16: 1, 32: 2, 64: 3}[width if group.column_major else CHUNK]
        layout = lambda: group.layout(k.dtype, boxes).outer  # noqa: E731
        return Place(tile, group.contracted, memory, layout, bits, coordinate)

    views = enumerate(group.views.items())
    return [place(n, CopiedTile.of(v, *labels)) for n, (op, v) in views if op in k.plan.copied]


@dataclass(frozen=True)
class Share:
    """The pieces that each of some threads copies.

    Attributes:
        k: what is known of the kernel.
        places: of the operands.
        threads: that share them.
    """

    k: Known
    places: list[Place]
    threads: int

    @property
    def jobs(self) -> list[list[tuple[int, int]]]:
        """The batches of `copies.batches`."""
        most = BATCH if self.k.plan.registers is None else SMALL_BATCH
        return batches([p.tile for p in self.places], self.threads, most)

    def registers(self) -> list[list[cute.Tensor]]:
        """Two sets of registers, each for the largest batch."""
        most, kind = max(map(len, self.jobs)), self.kind(self.places[0])
        return [[kind.registers() for _ in range(most)] for _ in range(2)]

    def kind(self, place: Place) -> Unaligned:
        """How an operand's pieces lie."""
        end = self.k.plan.program.dims[place.tile.along[0]]
        whole = isinstance(end, int) and end % PIECE == 0
        return Unaligned(self.k.dtype, step(place.tile.view), whole)

    @cute.jit
    def fetch(self, j: cutlass.Constexpr, registers, depth, here):
        """Ask memory for the pieces of batch ``j``; ``depth``: start of the stage along the
        contracted label."""
        here = here.by(anew(here.thread, here.lane))
        for n, (t, i) in enumerate(self.jobs[j]):
            start, count = self.source(self.places[t], i, depth, here)
            tensor = here.tensors[self.places[t].tile.view.argument]
            self.kind(self.places[t]).fetch(registers[n], tensor, start, count)
        ends = self.ends(j, depth, here)
        if cutlass.const_expr(len(ends) > 0):
            # one branch for all, behind the loads
            if reduce(or_, ends):
                self.fetch_ends(j, registers, depth, here)

    def ends(self, j: int, depth: Any, here: Here) -> list[Any]:
        """Predicates: true where a piece has some of the last elements of its tensor, which are no
        whole word."""
        found = []
        for t, i in self.jobs[j]:
            start, count = self.source(self.places[t], i, depth, here)
            tensor = here.tensors[self.places[t].tile.view.argument]
            found.append(self.kind(self.places[t]).meets_end(tensor, start, count))
        return [end for end in found if end is not None]

    @cute.jit
    def fetch_ends(self, j: cutlass.Constexpr, registers, depth, here):
        """Read the last elements of tensors, for those pieces of batch ``j`` that have some."""
        for n, (t, i) in enumerate(self.jobs[j]):
            start, count = self.source(self.places[t], i, depth, here)
            tensor = here.tensors[self.places[t].tile.view.argument]
            self.kind(self.places[t]).fetch_end(registers[n], tensor, start, count)

    @cute.jit
    def write(self, j: cutlass.Constexpr, registers, depth, stage, here):
        """Write the pieces of batch ``j`` to a stage."""
        here = here.by(anew(here.thread, here.lane))
        for n, (t, i) in enumerate(self.jobs[j]):
            place = self.places[t]
            start, count = self.source(place, i, depth, here)
            piece = self.kind(place).piece(registers[n], start, count)
            line, along = self.piece_at(place, i, here)
            target = self.target(place, line, along, stage, here)
            if cutlass.const_expr(place.tile.pieces % self.threads == 0):
                cute.autovec_copy(piece, target)
            elif line < place.tile.lines[1]:
                cute.autovec_copy(piece, target)

    def piece_at(self, place: Place, i: int, here: Here) -> tuple[Any, Any]:
        """Row of memory, and element in it, of a thread's piece ``i`` in the tile."""
        width = place.tile.along[1] // PIECE
        if self.threads % width:
            item = here.thread + i * self.threads
            return item // width, item % width * PIECE
        line = here.thread // width + i * (self.threads // width)
        return line, here.thread % width * PIECE

    def source(self, place: Place, i: int, depth: Any, here: Here) -> tuple[Any, Any]:
        """First element in memory of a thread's piece ``i``, and the number of elements from there
        to the end of its row: none, or fewer, if the tile has no such row or piece."""
        tile, tensors, extents = place.tile, here.tensors, self.k.extents
        line, along = self.piece_at(place, i, here)
        row = self.origin(tile.lines[0], depth, here) + line
        at = self.origin(tile.along[0], depth, here) + along
        start = self.k.batch_offset(tile.view, here.tile.batch)
        start = start + row * tile.view.stride(tile.lines[0]) + at
        inside = (line < tile.lines[1]) & (row < extents.of(tile.lines[0], tensors))
        count = extents.of(tile.along[0], tensors) - at
        return start, Int32(select_(inside, count, Int32(0)))

    def origin(self, label: str, depth: Any, here: Here) -> Any:
        """Start of the tile along a label; blocks have the whole of hidden ones."""
        k = self.k
        if label == k.plan.contracted:
            return depth
        starts = {k.plan.row: here.tile.row * k.m, k.plan.column: here.tile.column * k.n}
        return starts.get(label, 0)

    def target(self, place: Place, line: Any, along: Any, stage: Any, here: Here) -> cute.Tensor:
        """Where a piece lies in shared memory."""
        free = (line, along) if place.tile.along[0] == place.contracted else (along, line)
        number = cute.crd2idx(place.coordinate(*free, stage), place.layout()) // PIECE
        # a swizzle permutes the pieces of a row of 128 bytes by the row's number
        number = number ^ (number // PIECE % (1 << place.swizzled))
        pointer = cute.recast_ptr(place.memory(here.memory).iterator, dtype=self.k.dtype)
        return neighbours(pointer + cute.assume(number * PIECE, divby=PIECE), PIECE)


class Copies:
    """The copies of a block; for a plan without any there are no such warps."""

    def __init__(self, known: Known, walk: Walk) -> None:
        self.k, self.walk, plan = known, walk, known.plan
        main, inner, after = known.groups
        copied = [(n, op) for n, op in enumerate(plan.rows) if op in plan.copied]
        staged = [place_of_rows(known, n, op) for n, op in copied]
        staged += places_of_columns(known, main, lambda m: m.columns)
        for i, group in enumerate(g for g in inner if g.views):
            staged += places_of_columns(known, group, lambda m, i=i: m.hidden.inner[i])
        behind = list[Place]()
        for t, group in enumerate(after):
            behind += places_of_columns(known, group, lambda m, t=t: m.hidden.after[t])
        self.team = plan.team
        #: of the loop, by the threads of a team; of the products after it, by all
        self.loop = Share(known, staged, 32 * self.team.warps)
        self.after = Share(known, behind, 32 * plan.copiers)
        #: warps that arrive at the barrier of a stage, and at that of the products after the loop
        self.stage_warps = self.team.warps if staged else 0
        self.after_warps = plan.copiers if behind else 0

    @cute.jit
    def run(self, here):
        """Copy all tiles of this block."""
        k = self.k
        if cutlass.const_expr(not all(map(k.is_early, k.plan.copied))):
            wait_for_predecessor()
        if cutlass.const_expr(self.stage_warps > 0):
            if here.thread < self.team.count * self.loop.threads:
                self.copy_tiles(here)
        if cutlass.const_expr(self.after_warps > 0):
            self.copy_after(here)

    @cute.jit
    def copy_tiles(self, here):
        """Copy this team's stages, of all tiles of the block."""
        turn, own = here.thread // self.loop.threads, here.by(here.thread % self.loop.threads)
        ring, tensors = here.memory.ring, here.tensors
        at = ring.skip(ring.first(phase=1), turn)
        if cutlass.const_expr(self.walk.persistent):
            first, end = self.walk.run(tensors)
            for number in cutlass.range(first, end, unroll=1):
                at, turn = self.copy_tile(own.at(self.walk.tile(number, tensors)), at, turn)
        else:
            self.copy_tile(own, at, turn)

    @cute.jit
    def copy_tile(self, here, at, turn):
        """Copy this team's stages of a tile, from iteration ``turn`` on; return its next slot of the
        ring, and its first iteration in the next tile."""
        k, ring, teams, loop = self.k, here.memory.ring, self.team.count, self.loop
        registers, last, count = loop.registers(), len(loop.jobs) - 1, k.plan.iterations
        first = here.tile.rank * (count * k.k)
        if turn < count:
            loop.fetch(0, registers[0], first + turn * k.k, here)
        for i in cutlass.range(turn, count, teams, unroll=1):
            depth = first + i * k.k
            for j in cutlass.range_constexpr(last + 1):
                if cutlass.const_expr(j < last):
                    loop.fetch(j + 1, registers[(j + 1) % 2], depth, here)
                elif i + teams < count:
                    loop.fetch(0, registers[0], depth + teams * k.k, here)
                if cutlass.const_expr(j == 0):
                    ring.wait_empty(at)
                loop.write(j, registers[j % 2], depth, at.stage, here)
            release_warp(ring.full[at.stage], here.lane)
            at = ring.skip(at, teams)
            turn += teams
        return at, turn - count

    @cute.jit
    def copy_after(self, here):
        """Copy the column operands of the products after the loop."""
        registers = self.after.registers()
        for j in cutlass.range_constexpr(len(self.after.jobs)):
            self.after.fetch(j, registers[j % 2], 0, here)
            self.after.write(j, registers[j % 2], 0, 0, here)
        release_warp(here.memory.after_full.only, here.lane)
