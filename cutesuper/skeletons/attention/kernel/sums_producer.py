"""The producer warp of an attention loop with plain sums.
It loads rows that stay, tiles that stream by, and vectors along the loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cutesuper.device.barriers import Barrier, Barriers
from cutesuper.device.memory import (
    bulk_load,
    copy_element,
    element_atom,
    operand_layout,
    partition,
    tile_atom,
)
from cutesuper.device.pipeline import Ring
from cutesuper.skeletons.attention.kernel.context import Load
from cutesuper.skeletons.attention.kernel.sums_place import Places
from cutesuper.skeletons.attention.plan import ROW_BLOCK


@dataclass(frozen=True)
class SumsMemory:
    """Shared memory of a block.

    Attributes:
        residents, streams: operands, in the order of the plan.
        vectors: fp32 numbers of the elements of a stage.
        ring: full and empty stages.
        rows_full: bytes of the rows.
        cores: what the tensor cores need.
    """

    residents: list[cute.Tensor]
    streams: list[cute.Tensor]
    vectors: cute.Pointer
    ring: Ring
    rows_full: Barriers
    cores: Any


class SumsProducer:
    """The bulk loads of a block: resident operands, then those that stream by."""

    def __init__(self, places: Places) -> None:
        self.p, self.plan = places, places.plan
        plan = places.plan
        self.loads = (*plan.residents, *plan.streams)
        self.views = [plan.view(i) for i in self.loads]
        self.labels = [
            (plan.rows if n < len(plan.residents) else plan.loop, plan.inner(i))
            for n, i in enumerate(self.loads)
        ]
        self.shapes = [
            (ROW_BLOCK if n < len(plan.residents) else plan.loop_tile, plan.width(plan.inner(i)))
            for n, i in enumerate(self.loads)
        ]
        count = len(plan.residents)
        sizes = [plan.element_bytes * rows * width for rows, width in self.shapes]
        self.row_bytes = plan.schedule.row_groups * sum(sizes[:count])
        self.stage_bytes = sum(sizes[count:])
        #: arrivals that fill a stage: the bytes, and all lanes with their copies of vectors
        self.arrivals = 1 + (32 if plan.loop_vectors else 0)

    def layout(self, n: int) -> cute.ComposedLayout:
        """Layout of the n-th operand ``[rows or loop, inner, slot]``, swizzled."""
        resident = n < len(self.plan.residents)
        slots = self.plan.schedule.row_groups if resident else self.plan.schedule.stages
        return operand_layout(self.p.dtype, self.shapes[n], slots, True)

    def atoms(self, tensors: list[cute.Tensor]) -> list[Any]:
        """The TMA loads, each with its coordinate tensor."""
        found = []
        for n, view in enumerate(self.views):
            layout = operand_layout(self.p.dtype, self.shapes[n], 1, True)
            slot = cute.slice_(layout, (None, None, 0))
            matrix = self.p.matrix(view, self.labels[n], tensors)
            found.append(tile_atom(matrix, slot, self.shapes[n]))
        return found

    def partition(self, atoms: list[Any], coords: list[Any], memory: SumsMemory) -> list[Load]:
        """Slots in shared memory and tiles in device memory."""
        found = []
        for n, smem in enumerate((*memory.residents, *memory.streams)):
            tiles = cute.local_tile(coords[n], self.shapes[n], (None,) * cute.rank(coords[n]))
            found.append(Load(atoms[n], *partition(atoms[n], smem, tiles, 2)))
        return found

    @cute.jit
    def run(self, loads, memory, tensors, place, span, lane):
        """Load the rows, then all tiles, each once its stage has been read."""
        groups, count = self.plan.schedule.row_groups, len(self.plan.residents)
        memory.rows_full.only.expect_once(self.row_bytes)
        for n in cutlass.range_constexpr(count):
            for g in cutlass.range_constexpr(groups):
                tile = place.tile * groups + g
                at = self.coordinates(n, tile, place, Int32(0))
                self.load(loads[n], at, g, memory.rows_full.only)
        at = memory.ring.first(1)
        tile, visit = Int32(0) + span.first, Int32(0)
        for _ in cutlass.range(span.total, unroll=1):
            memory.ring.wait_empty(at)
            barrier = memory.ring.expect(at.stage, self.stage_bytes)
            for n in cutlass.range_constexpr(count, len(self.loads)):
                where = self.coordinates(n, tile, place, visit)
                self.load(loads[n], where, at.stage, barrier)
            if cutlass.const_expr(len(self.plan.loop_vectors) > 0):
                self.copy_vectors(memory, tensors, place, visit, tile, at.stage, lane)
                barrier.arrive_after_copies()
            at = memory.ring.next(at)
            tile += 1
            if tile == span.first + span.count:
                tile = Int32(0) + span.first
                visit += 1

    def load(self, load: Load, at: tuple[Any, ...], slot: Any, barrier: Barrier) -> None:
        """Load one tile into a slot."""
        bulk_load(load.atom, load.tiles[at], load.slots[None, slot], barrier, None)

    def coordinates(self, n: int, tile: Any, place: Any, visit: Any) -> tuple[Any, ...]:
        """Place of a tile of the n-th operand."""
        found = {**place.batch, self.plan.visits: visit}
        others = self.p.others(self.views[n], self.labels[n])
        return (None, tile, 0, *(found[d] for d in others))

    def copy_vectors(
        self, memory: SumsMemory, tensors: Any, place: Any, visit: Any, tile: Any, stage: Any,
        lane: Any,
    ) -> None:  # fmt: skip
        """Copy the numbers of a tile.
        Behind the end of the loop they are those of its last element, which is hidden there."""
        plan, size = self.plan, self.plan.loop_tile
        for n, load in enumerate(plan.loop_vectors):
            view = plan.view(load)
            source = tensors[view.argument].iterator
            atom = element_atom(source.dtype)
            for k in range(size // 32):
                own = 32 * k + lane
                at = {
                    **place.batch,
                    plan.visits: visit,
                    plan.loop: cutlass.min(tile * size + own, place.end - 1),
                }
                slot = (stage * len(plan.loop_vectors) + n) * size + own
                offset = self.p.offset(view, at, tensors)
                copy_element(atom, source + offset, memory.vectors + slot)
