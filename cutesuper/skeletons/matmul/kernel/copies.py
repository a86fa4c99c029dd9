"""The copier warps of the matmul loop: tiles of operands that bulk loads cannot address.

A thread has asked for its next pieces, those of the next stage too, when it writes the ones before.
The tensor cores read what it wrote through another proxy, so every warp fences before it says that
its part of a stage is there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute

from cutesuper.device.barriers import release_warp
from cutesuper.device.launch import wait_for_predecessor
from cutesuper.device.memory import neighbours
from cutesuper.device.unaligned import Unaligned
from cutesuper.skeletons.matmul.copies import PIECE, CopiedTile, batches, step
from cutesuper.skeletons.matmul.kernel.columns import ColumnGroup
from cutesuper.skeletons.matmul.kernel.context import Here, Known
from cutesuper.skeletons.matmul.kernel.tile_scheduler import Walk
from cutesuper.skeletons.matmul.plan import CHUNK


@dataclass(frozen=True)
class Place:
    """Where the tile of an operand lies in shared memory.

    Attributes:
        tile: what is copied.
        layout: makes the memory's layout, in elements, before the swizzle.
        swizzled: bits of the swizzle: rows of 128, 64 or 32 bytes have 3, 2 or 1.
        coordinate: in the layout, of an element (free label, contracted label) of a stage.
        pointer: to the memory.
        contracted: the contracted label.
    """

    tile: CopiedTile
    layout: Callable[[], Any]
    swizzled: int
    coordinate: Callable[[Any, Any, Any], Any]
    pointer: Callable[[Any], cute.Pointer]
    contracted: str

    @property
    def free_along(self) -> bool:
        """True if the free label is the contiguous one."""
        return self.tile.along[0] != self.contracted


class Copies:
    """The copies of a block; without any operand to copy there are no such warps."""

    def __init__(self, known: Known, walk: Walk) -> None:
        self.k, self.walk, plan = known, walk, known.plan
        self.threads = 32 * plan.copiers
        main, inner, after = known.groups
        self.staged = [self.of_rows(n, op) for n, op in enumerate(plan.rows) if op in plan.copied]
        self.staged += self.of_columns(main, lambda memory: memory.columns)
        for i, group in enumerate(g for g in inner if g.views):
            self.staged += self.of_columns(group, lambda memory, i=i: memory.hidden.inner[i])
        self.after = list[Place]()
        for t, group in enumerate(after):
            self.after += self.of_columns(group, lambda memory, t=t: memory.hidden.after[t])
        #: warps that arrive at the barrier of a stage, and of the products after the loop
        self.stage_warps = plan.copiers if self.staged else 0
        self.after_warps = plan.copiers if self.after else 0

    # ------------------------------------------------------------------------------------ places

    def of_rows(self, n: int, op: int) -> Place:
        """The place of the row operand number ``n``."""
        k = self.k

        def layout() -> Any:
            return k.row_layout(k.m, k.stages * k.chunks).outer

        def coordinate(row: Any, depth: Any, stage: Any) -> Any:
            return row, depth % CHUNK, stage * k.chunks + depth // CHUNK

        tile = k.plan.copied_tiles[op]
        return Place(
            tile, layout, 3, coordinate, lambda m: m.rows[n].iterator, k.plan.contracted
        )

    def of_columns(self, group: ColumnGroup, memory: Any) -> list[Place]:
        """The places of a group of column operands."""
        k, plan, width = self.k, self.k.plan, group.width

        def layout() -> Any:
            return group.layout(k.dtype, group.slots * group.boxes).outer

        found = []
        for n, (op, view) in enumerate(group.views.items()):
            if op not in plan.copied:
                continue

            def coordinate(column: Any, depth: Any, stage: Any, n: int = n) -> Any:
                box = stage * group.boxes + n * group.blocks + column // width
                return column % width, depth, box

            labels = (group.column, width * group.blocks), (group.contracted, group.depth)
            bits = {16: 1, 32: 2, 64: 3}[width if group.column_major else CHUNK]
            tile = CopiedTile.of(view, *labels)
            place = Place(
                tile, layout, bits, coordinate, lambda m: memory(m).iterator, group.contracted
            )
            found.append(place)
        return found

    # ------------------------------------------------------------------------------------ device

    @cute.jit
    def run(self, here):
        """Copy all tiles of this block."""
        k, at = self.k, here.memory.ring.first(phase=1)
        if cutlass.const_expr(not all(map(k.is_early, k.plan.copied))):
            wait_for_predecessor()
        if cutlass.const_expr(len(self.staged) > 0):
            if cutlass.const_expr(self.walk.persistent):
                first, end = self.walk.run(here.tensors)
                for number in cutlass.range(first, end, unroll=1):
                    at = self.copy_tile(here.at(self.walk.tile(number, here.tensors)), at)
            else:
                self.copy_tile(here, at)
        if cutlass.const_expr(len(self.after) > 0):
            self.copy_after(here)

    @cute.jit
    def copy_tile(self, here, at):
        """Copy the operands of all stages of a tile; return the next slot of the ring."""
        k, ring, count = self.k, here.memory.ring, self.k.plan.iterations
        jobs = batches([p.tile for p in self.staged], self.threads)
        registers = self.registers(self.staged, jobs)
        first = here.tile.rank * (count * k.k)
        self.fetch(self.staged, jobs[0], registers[0], first, here)
        for i in cutlass.range(count, unroll=1):
            depth = first + i * k.k
            for j in cutlass.range_constexpr(len(jobs)):
                if cutlass.const_expr(j + 1 < len(jobs)):
                    self.fetch(self.staged, jobs[j + 1], registers[(j + 1) % 2], depth, here)
                elif i + 1 < count:
                    self.fetch(self.staged, jobs[0], registers[0], depth + k.k, here)
                if cutlass.const_expr(j == 0):
                    ring.wait_empty(at)
                self.write(self.staged, jobs[j], registers[j % 2], depth, at.stage, here)
            release_warp(ring.full[at.stage], here.lane)
            at = ring.next(at)
        return at

    @cute.jit
    def copy_after(self, here):
        """Copy the column operands of the products after the loop."""
        jobs = batches([p.tile for p in self.after], self.threads)
        registers = self.registers(self.after, jobs)
        for j in cutlass.range_constexpr(len(jobs)):
            self.fetch(self.after, jobs[j], registers[j % 2], 0, here)
            self.write(self.after, jobs[j], registers[j % 2], 0, 0, here)
        release_warp(here.memory.after_full.only, here.lane)

    def registers(self, places: list[Place], jobs: Any) -> list[list[cute.Tensor]]:
        """Two sets of registers, each for the largest batch."""
        most = max(map(len, jobs))
        return [[self.kind(places[0]).registers() for _ in range(most)] for _ in range(2)]

    def kind(self, place: Place) -> Unaligned:
        """How an operand's pieces lie."""
        end = self.k.plan.program.dims[place.tile.along[0]]
        whole = isinstance(end, int) and end % PIECE == 0
        return Unaligned(self.k.dtype, step(place.tile.view), whole)

    @cute.jit
    def fetch(self, places: cutlass.Constexpr, job: cutlass.Constexpr, registers, depth, here):
        """Ask memory for the pieces of a batch; ``depth``: start along the contracted label."""
        for n, (t, i) in enumerate(job):
            place = places[t]
            start, count, _, _ = self.piece_at(place, i, depth, here)
            tensor = here.tensors[place.tile.view.argument]
            self.kind(place).fetch(registers[n], tensor, start, count)

    @cute.jit
    def write(
        self, places: cutlass.Constexpr, job: cutlass.Constexpr, registers, depth, stage, here
    ):
        """Write the pieces of a batch to a stage."""
        for n, (t, i) in enumerate(job):
            place = places[t]
            start, count, line, along = self.piece_at(place, i, depth, here)
            piece = self.kind(place).piece(registers[n], start, count)
            target = self.target(place, line, along, stage, here)
            if cutlass.const_expr(place.tile.pieces % self.threads == 0):
                cute.autovec_copy(piece, target)
            elif line < place.tile.lines[1]:
                cute.autovec_copy(piece, target)

    def piece_at(self, place: Place, i: int, depth: Any, here: Here) -> Any:
        """Piece ``i`` of a thread: its first element in memory, the number of elements from there
        to the end of its row (none if there is no such row), its row and its place there."""
        k, tile, tensors = self.k, place.tile, here.tensors
        item, width = here.thread + i * self.threads, tile.along[1] // PIECE
        line, along = item // width, item % width * PIECE
        row = self.origin(tile.lines[0], depth, here) + line
        at = self.origin(tile.along[0], depth, here) + along
        inside = cutlass.Int32(line < tile.lines[1]) * cutlass.Int32(
            row < k.extents.of(tile.lines[0], tensors)
        )
        start = k.batch_offset(tile.view, here.tile.batch)
        start = start + row * tile.view.stride(tile.lines[0]) + at
        return start, (k.extents.of(tile.along[0], tensors) - at) * inside, line, along

    def origin(self, label: str, depth: Any, here: Here) -> Any:
        """Start of the tile along a label; blocks have the whole of hidden ones."""
        k, plan = self.k, self.k.plan
        if label == plan.contracted:
            return depth
        starts = {plan.row: here.tile.row * k.m, plan.column: here.tile.column * k.n}
        return starts.get(label, 0)

    def target(self, place: Place, line: Any, along: Any, stage: Any, here: Here) -> cute.Tensor:
        """The place of a piece in shared memory."""
        free = (along, line) if place.free_along else (line, along)
        offset = cute.crd2idx(place.coordinate(*free, stage), place.layout())
        number = offset // PIECE
        # a swizzle permutes the pieces of a row by the number of the row of 128 bytes
        number = number ^ (number // PIECE % (1 << place.swizzled))
        pointer = cute.recast_ptr(place.pointer(here.memory), dtype=self.k.dtype)
        return neighbours(pointer + cute.assume(number * PIECE, divby=PIECE), PIECE)
