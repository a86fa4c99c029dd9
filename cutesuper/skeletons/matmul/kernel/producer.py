"""The producer warp of the matmul loop: descriptors and order of its bulk loads."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cutlass_dsl import select_

from cutesuper.device.launch import wait_for_predecessor
from cutesuper.device.memory import EVICT_FIRST, EVICT_LAST, bulk_load, partition, tile_atom
from cutesuper.skeletons.kernel.arguments import labelled
from cutesuper.skeletons.matmul.kernel.columns import ColumnGroup, column_groups
from cutesuper.skeletons.matmul.kernel.context import Known, Loads, Memory, Tile
from cutesuper.skeletons.matmul.kernel.multicast import Sharing
from cutesuper.skeletons.matmul.kernel.tails import Tails
from cutesuper.skeletons.matmul.kernel.tile_scheduler import Walk
from cutesuper.skeletons.matmul.plan import CHUNK, COLUMN_BLOCK, ROW_BOX


class Producer:
    """The bulk loads of a block.
    Operands come in one order everywhere: columns, rows, vectors, columns of hidden labels, then
    columns and rows of the products after the loop; those that threads copy are left out. The
    columns are those of all sections, of which each tile has one."""

    def __init__(self, known: Known, sharing: Sharing, walk: Walk, tails: Tails) -> None:
        self.k, self.sharing, self.walk, self.tails = known, sharing, walk, tails
        self.main, self.inner, self.after = known.groups
        plan = known.plan
        groups = [x for g in (*self.inner, *self.after) for x in g.views]
        columns = [x for p in plan.sections for x in p.columns]
        operands = (*columns, *plan.rows, *plan.vectors, *groups)
        #: place of an operand among the bulk loads, by operation
        self.order = {op: n for n, op in enumerate(o for o in operands if o not in plan.copied)}
        # a box of 64-element chunks needs whole chunks, and all of their rows; otherwise there is
        # one box for each chunk
        depth = plan.program.dims[plan.contracted]
        whole = isinstance(depth, int) and depth % plan.chunk == 0
        self.chunked = whole and not sharing.active and not plan.turned
        #: shape of the box of a row operand
        box = (ROW_BOX, known.k // sharing.blocks) if plan.turned else (sharing.rows, plan.chunk)
        self.row_box = (*box, known.chunks) if self.chunked else box
        #: rows are kept where columns are not
        self.row_hint = EVICT_LAST if plan.schedule.stream_columns else None
        #: True if loads may start before all barriers are known to be ready
        self.head_starts = not sharing.active and not walk.persistent

    # ------------------------------------------------------------------------------------ host

    def atoms(self, tensors: list[cute.Tensor]) -> list[Any]:
        """The TMA loads, each with its coordinate tensor."""
        atoms = [
            a for p in self.k.plan.sections for a in self.column_atoms(column_groups(p)[0], tensors)
        ]
        atoms += [*self.row_atoms(tensors), *self.vector_atoms(tensors)]
        for group in (*self.inner, *self.after):
            atoms += self.column_atoms(group, tensors)
        return atoms + self.tails.row_atoms(tensors)

    def column_atoms(self, group: ColumnGroup, tensors: list[cute.Tensor]) -> list[Any]:
        """The TMA loads of a group of column operands."""
        k, found = self.k, list[Any]()
        views = [v for op, v in group.views.items() if op in self.order]
        if not views:
            return found
        layout = cute.slice_(group.layout(k.dtype, 1), (None, None, 0))
        if k.together > 1:
            layout = cute.slice_(group.double_layout(k.dtype, 2), (None, None, None, None, 0))
        for v in views:
            labels = (group.column, group.contracted, *k.batch_of(v))
            tensor = labelled(k.extents, v, labels, tensors)
            shape, rounds = (group.width, group.depth), k.plan.rounds
            if k.together > 1:
                tensor, shape = alternating(tensor), (16, 2, 4, group.depth)
            found.append(tile_atom(tensor, layout, shape, rounds=rounds))
        return found

    def row_atoms(self, tensors: list[cute.Tensor]) -> list[Any]:
        """The TMA loads of the row operands."""
        k, height = self.k, self.sharing.rows
        layout = k.row_layout(height, k.chunks if self.chunked else 1)
        if k.plan.turned:
            layout = k.box_layout(self.sharing.blocks)
        if not self.chunked:
            layout = cute.select(layout, [0, 1])
        atoms = []
        for v in (v for op, v in k.plan.rows.items() if op in self.order):
            tensor = k.row_tensor(v, k.plan.contracted, tensors, self.chunked)
            rounds = k.plan.rounds and k.plan.prologue is None
            multicast = self.sharing.parts > 1
            atoms.append(tile_atom(tensor, layout, self.row_box, multicast, rounds))
        return atoms

    def vector_atoms(self, tensors: list[cute.Tensor]) -> list[Any]:
        """The TMA loads of the vectors."""
        k = self.k
        layout = cute.make_layout((k.k,))
        return [
            tile_atom(labelled(k.extents, v, (k.plan.contracted,), tensors), layout, (k.k,))
            for v in k.plan.vectors.values()
        ]

    # ---------------------------------------------------------------------------------- device

    def partition(self, atoms: list[Any], coords: list[Any], memory: Memory) -> Loads:
        """Slots in shared memory and tiles of the tensors."""
        slots, sources = [], []
        for atom, coord, (target, tile) in zip(atoms, coords, self.boxes(memory), strict=True):
            tiles = cute.local_tile(coord, tile, (None,) * cute.rank(coord))
            slot, source = partition(atom, target, tiles, len(tile))
            slots.append(slot)
            sources.append(source)
        return Loads(atoms, slots, sources)

    def boxes(self, memory: Memory) -> list[Any]:
        """Shared memory and shape of a box of each operand."""
        k, hidden = self.k, memory.hidden
        columns = [op for p in k.plan.sections for op in p.columns if op in self.order]
        box: Any = memory.columns, (COLUMN_BLOCK, k.k)
        if k.together > 1:
            layout = self.main.double_layout(k.dtype, k.stages * self.main.boxes).outer
            box = cute.make_tensor(memory.columns.iterator, layout), (16, 2, 4, k.k)
        boxes: list[Any] = [box for _ in columns]
        for op, ring in zip(k.plan.rows, memory.rows, strict=True):
            if op not in self.order:
                continue
            slot = cute.local_tile(ring, self.row_box, (0, 0, None)) if self.chunked else ring
            if k.plan.turned:
                slot = cute.make_tensor(ring.iterator, k.box_layout(self.sharing.blocks).outer)
            elif self.sharing.active:
                parts = k.stages * k.chunks * self.sharing.parts
                layout = k.row_layout(self.sharing.rows, parts)
                slot = cute.make_tensor(ring.iterator, layout.outer)
            boxes.append((slot, self.row_box))
        boxes += [(ring, (k.k,)) for ring in memory.vectors]
        inner = [g for g in self.inner if g.views]
        for group, ring in zip(inner, hidden.inner, strict=True):
            boxes += [(ring, (group.width, group.depth)) for op in group.views if op in self.order]
        for group, ring in zip(self.after, hidden.after, strict=True):
            boxes += [(ring, (COLUMN_BLOCK, group.depth)) for op in group.views if op in self.order]
        return boxes + [(hidden.hidden[t], (k.m, CHUNK)) for t in self.tails.loaded]

    def before(self, end: int, tile: Tile) -> Any:
        """The iteration ``end``, or the end of the loop if that comes first."""
        if not self.k.plan.open_depth:
            return min(end, tile.iterations)
        return Int32(select_(tile.iterations < end, tile.iterations, Int32(end)))

    @cute.jit
    def fill(self, loads, memory, tile, first: cutlass.Constexpr, last: cutlass.Constexpr):
        """Load stages ``first`` to ``last`` of the first round, which need no wait."""
        for i in cutlass.range(first, self.before(min(last, self.k.stages), tile), unroll=1):
            memory.ring.expect(i, self.k.plan.bulk_bytes)
            self.load_stage(loads, memory, tile, i, i, True)

    @cute.jit
    def run(self, loads, here):
        """Load all tiles of this block."""
        memory, tile = here.memory, here.tile
        if cutlass.const_expr(self.head_starts):
            self.load_own(loads, memory, tile)
        else:
            at = memory.ring.first(phase=1)
            if cutlass.const_expr(self.k.dependent):
                wait_for_predecessor()
            if cutlass.const_expr(self.walk.persistent):

                def visit(step, at):
                    return self.load_tile(loads, memory, self.walk.tile(step, here.tensors), at, 0)

                at = self.walk.each(here, visit, at, True)
            else:
                at = self.load_tile(loads, memory, tile, at, 0)
            if cutlass.const_expr(self.k.plan.schedule.issuer and self.sharing.active):
                self.settle(memory.ring, at)

    @cute.jit
    def settle(self, ring, at):
        """Wait until all stages have been given back.
        Products of other blocks do so, which must not arrive after the end of this one."""
        for _ in cutlass.range(self.k.stages, unroll=1):
            ring.wait_empty(at)
            at = ring.next(at)

    @cute.jit
    def load_tile(self, loads, memory, tile, at, first: cutlass.Constexpr):
        """Load one tile's operands from iteration ``first`` on.
        Each stage once all of its readers have finished."""
        ring = memory.ring
        for i in cutlass.range(first, tile.iterations, unroll=1):
            ring.wait_empty(at)
            ring.expect(at.stage, self.k.plan.bulk_bytes)
            self.load_stage(loads, memory, tile, i, at.stage, True)
            if cutlass.const_expr(self.k.dependent):
                self.load_stage(loads, memory, tile, i, at.stage, False)
            at = ring.next(at)
        return at

    @cute.jit
    def load_own(self, loads, memory, tile):
        """Keep the ring full for a block with a single tile."""
        plan = self.k.plan
        self.expect_exchange(memory)
        first = self.k.stages if plan.open_depth else min(self.k.stages, plan.iterations)
        self.fill(loads, memory, tile, plan.schedule.head, first)
        after = loads.behind(len(loads.atoms) - self.tails.bulk_count)
        if cutlass.const_expr(len(self.after) > 0):
            self.tails.load_operands(after, memory, tile, True)
        if cutlass.const_expr(self.k.dependent):
            wait_for_predecessor()
            if cutlass.const_expr(len(self.after) > 0):
                self.tails.load_operands(after, memory, tile, False)
            for i in cutlass.range(self.before(first, tile), unroll=1):
                self.load_stage(loads, memory, tile, i, i, False)
        self.load_tile(loads, memory, tile, memory.ring.first(), first)

    @cute.jit
    def expect_exchange(self, memory):
        """Expect the bytes that the cluster will send to this block."""
        k, plan = self.k, self.k.plan
        if cutlass.const_expr(k.cluster > 1):
            memory.received.only.expect_once(plan.exchange_bytes)
            if cutlass.const_expr(len(plan.statistics) > 0):
                memory.reduced.only.expect_once(4 * k.m * k.cluster * len(plan.statistics))
        if cutlass.const_expr(plan.column_cluster > 1):
            for r in cutlass.range_constexpr(len(plan.reductions)):
                memory.columns_reduced[r].expect_once(4 * k.m * plan.column_cluster)

    @cute.jit
    def load_stage(self, loads, memory, tile, iteration, stage, early: cutlass.Constexpr):
        """Issue one stage's loads.
        Those that may come before the dependency wait (``early``), or the others."""
        k, plan = self.k, self.k.plan
        atoms, slots, sources = loads.atoms, loads.slots, loads.sources
        full = memory.ring.full[stage]
        depth = k.step(tile, iteration)
        for n, section in enumerate(plan.sections):
            if tile.section == n:
                self.load_columns(loads, full, tile, depth, stage, section, early)
        for op, view in plan.rows.items():
            if cutlass.const_expr(k.is_bulk(op, early)):
                at = tuple(tile.batch[d] for d in k.batch_of(view))
                self.load_row(loads, self.order[op], full, tile, depth, stage, at)
        for op in plan.vectors:
            if cutlass.const_expr(k.is_bulk(op, early)):
                i = self.order[op]
                source = sources[i][None, depth]
                bulk_load(atoms[i], source, slots[i][None, stage], full, EVICT_LAST)
        self.load_inner(loads, full, tile, depth, stage, early)

    @cute.jit
    def load_columns(
        self, loads, full, tile, depth, stage, section: cutlass.Constexpr, early: cutlass.Constexpr
    ):
        """Load one stage of the column operands of a section."""
        k, both = self.k, self.k.together
        blocks, boxes = k.blocks // both, self.main.boxes // both
        atoms, slots, sources = loads.atoms, loads.slots, loads.sources
        hint = EVICT_FIRST if section.schedule.stream_columns else None
        for w, (op, view) in enumerate(section.columns.items()):
            if cutlass.const_expr(k.is_bulk(op, early)):
                at, i = tuple(tile.batch[d] for d in k.batch_of(view)), self.order[op]
                for b in cutlass.range_constexpr(blocks):
                    slot, column = stage * boxes + w * blocks + b, tile.column * blocks + b
                    place = (column, depth) if both == 1 else (0, column, 0, depth)
                    source = sources[i][(None, *place, *at)]
                    bulk_load(atoms[i], source, slots[i][None, slot], full, hint)

    @cute.jit
    def load_inner(self, loads, full, tile, depth, stage, early: cutlass.Constexpr):
        """Load one stage of the column operands along hidden labels.
        Every block reads all of them."""
        k = self.k
        for group, n, op in [(g, n, op) for g in self.inner for n, op in enumerate(g.views)]:
            if cutlass.const_expr(k.is_bulk(op, early)):
                at, i = tuple(tile.batch[d] for d in k.batch_of(group.views[op])), self.order[op]
                for b in cutlass.range_constexpr(group.blocks):
                    box = stage * group.boxes + n * group.blocks + b
                    source = loads.sources[i][(None, b, depth, *at)]
                    bulk_load(loads.atoms[i], source, loads.slots[i][None, box], full, EVICT_LAST)

    @cute.jit
    def load_row(self, loads, i: cutlass.Constexpr, full, tile, depth, stage, at):
        """Load one tile of a row operand, in one box if the depth has whole chunks."""
        atom, slots, sources = loads.atoms[i], loads.slots[i], loads.sources[i]
        parts, part, chunks = self.sharing.blocks, self.sharing.rank(), self.k.chunks
        if cutlass.const_expr(self.chunked):
            source = sources[(None, tile.row, 0, depth, *at)]
            bulk_load(atom, source, slots[None, stage], full, self.row_hint)
        elif cutlass.const_expr(self.k.plan.turned):
            boxes = self.k.row_boxes
            for b in cutlass.range_constexpr(boxes):
                source = sources[(None, tile.row * boxes + b, depth * parts + part, *at)]
                slot = slots[None, (stage * boxes + b) * parts + part]
                bulk_load(atom, source, slot, full, self.row_hint, self.sharing.mask())
        else:
            for c in cutlass.range_constexpr(chunks):
                source = sources[(None, tile.row * parts + part, depth * chunks + c, *at)]
                slot = stage * chunks + c
                if cutlass.const_expr(not self.sharing.joint):
                    slot = slot * parts + part
                slot = slots[None, slot]
                bulk_load(atom, source, slot, full, self.row_hint, self.sharing.mask())


def alternating(tensor: cute.Tensor) -> cute.Tensor:
    """View of a tensor ``[columns, depth, ...]`` as ``[16, block of 64, 4, depth, ...]``.
    Tiles of two blocks have 16 columns of each in turn."""
    (columns, *shape), (one, *strides) = tensor.shape, tensor.stride
    layout = cute.make_layout(
        (16, columns // COLUMN_BLOCK, 4, *shape),
        stride=(one, COLUMN_BLOCK * one, 16 * one, *strides),
    )
    return cute.make_tensor(tensor.iterator, layout)
