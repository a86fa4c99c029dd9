"""The matmul mainloop as a traced kernel: walks a `MatmulPlan`, calls the blocks of ``device/``.

Roles of the warps of a block: consumers (WGMMA, then the epilogue), helpers (row statistics and the
prologue of the row operand), one producer (TMA loads). Everything that depends on the plan is
decided while tracing; only the ring and the tails are run-time control flow.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.memory
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.tensor_utils import LayoutEnum

from cutesuper.device.math import DeviceMath
from cutesuper.device.memory import (
    EVICT_FIRST,
    EVICT_LAST,
    bulk_load,
    expect_bytes,
    init_barriers,
    operand,
    partition,
    tile_atom,
)
from cutesuper.skeletons.base import view_of
from cutesuper.skeletons.kernel.arguments import (
    ELEMENT,
    Extents,
    batch_labels,
    described,
    labelled,
    unravel,
)
from cutesuper.skeletons.matmul.kernel.columns import ColumnGroup, column_groups
from cutesuper.skeletons.matmul.kernel.epilogue import Epilogue
from cutesuper.skeletons.matmul.kernel.multicast import Sharing
from cutesuper.skeletons.matmul.kernel.prefetch import Prefetch
from cutesuper.skeletons.matmul.kernel.reductions import ColumnReductions
from cutesuper.skeletons.matmul.kernel.statistics import RowSide
from cutesuper.skeletons.matmul.kernel.tails import Tails
from cutesuper.skeletons.matmul.kernel.tile_scheduler import Walk
from cutesuper.skeletons.matmul.kernel.tile_store import TileStore
from cutesuper.skeletons.matmul.kernel.vectors import VectorConsumer, VectorTile
from cutesuper.skeletons.matmul.plan import CHUNK, COLUMN_BLOCK, MatmulPlan, tile_grid


class MatmulKernel:
    """The kernel: launches one block cluster for each output tile; see the module's docstring."""

    def __init__(self, plan: MatmulPlan) -> None:
        self.plan = plan
        self.extents = Extents(plan.program, plan.arguments)
        self.dtype = ELEMENT[plan.dtype]
        self.m, self.n, self.k = plan.tile
        s = plan.schedule
        self.stages, self.warpgroups = s.stages, s.warpgroups
        self.cluster, self.iterations = plan.cluster, plan.iterations
        self.cluster_size = plan.cluster_size
        self.weights = len(plan.columns)
        self.main, self.inner, self.after = column_groups(plan)
        self.blocks = plan.blocks_n
        # 512 threads start with 128 registers each, and an instruction with 256 rows needs 154: the
        # compiler refuses it even if registers are handed over later
        self.instruction_rows = min(self.m, 128) if plan.threads > 384 else self.m
        self.chunks = self.k // CHUNK
        self.consumers = 4 * self.warpgroups
        self.helpers = plan.helpers
        self.producer = self.consumers + self.helpers
        self.dependent = s.dependent_launch
        self.math = DeviceMath(fast=True)
        self.sharing = Sharing(self)
        self.walk = Walk(self)
        self.row_side = RowSide(self)
        self.vectors = VectorTile(self)
        self.tails = Tails(self)
        self.reductions = ColumnReductions(self)
        self.epilogue = Epilogue(self)
        self.prefetch = Prefetch(self)
        self.tile_store = TileStore(self)
        # a box of 64-element chunks needs whole chunks, and all of their rows; otherwise there is
        # one box for each chunk
        whole = plan.program.dims[plan.contracted] % CHUNK == 0  # type: ignore[operator]
        self.chunked = whole and not self.sharing.active
        #: True if blocks wait for each other before they use each other's shared memory
        self.grouped = self.cluster_size > 1 or self.sharing.active

    # ------------------------------------------------------------------------------------ host

    @cute.jit
    def __call__(self, *args):
        """Launch; the arguments are the plan's tensors in order, then the stream."""
        tensors, stream = list(args[:-1]), args[-1]
        plan = self.plan
        rows = self.row_layout(self.m, self.stages * self.chunks)
        atoms = [
            *self.column_atoms(self.main, tensors),
            *self.row_atoms(tensors),
            *self.vector_atoms(tensors),
        ]
        for group in (*self.inner, *self.after):
            atoms += self.column_atoms(group, tensors)
        atoms += self.tails.row_atoms(tensors)
        atoms += self.tile_store.atoms(tensors)
        row_tiles = cute.ceil_div(self.extents.of(plan.row, tensors), self.m)
        column_tiles = cute.ceil_div(self.extents.of(plan.column, tensors), self.n)
        batch = 1
        for label in plan.batch:
            batch = batch * self.extents.of(label, tensors)
        self.kernel([a[0] for a in atoms], [a[1] for a in atoms], tensors, rows).launch(
            grid=tile_grid(plan, column_tiles, row_tiles, batch),
            block=(plan.threads, 1, 1),
            cluster=(self.cluster_size * self.sharing.blocks, 1, 1),
            stream=stream,
            use_pdl=self.dependent,
            # without this cap the compiler ignores the hand-over of registers
            min_blocks_per_mp=1,
        )

    def column_atoms(self, group: ColumnGroup, tensors: list[cute.Tensor]) -> list[Any]:
        if not group.views:
            return []
        layout = cute.slice_(group.layout(self.dtype, self.m, 1), (None, None, 0))
        return [
            tile_atom(
                labelled(
                    self.extents, v, (group.column, group.contracted, *self.batch_of(v)), tensors
                ),
                layout,
                (group.width, group.depth),
            )
            for v in group.views.values()
        ]

    def row_atoms(self, tensors: list[cute.Tensor]) -> list[Any]:
        box = self.chunks if self.chunked else 1
        height = self.sharing.rows
        layout = self.row_layout(height, box)
        if not self.chunked:
            layout = cute.slice_(layout, (None, None, 0))
        atoms = []
        for v in self.plan.rows.values():
            tile = (height, CHUNK, box) if self.chunked else (height, CHUNK)
            tensor = self.row_tensor(v, self.plan.contracted, tensors, self.chunked)
            atoms.append(tile_atom(tensor, layout, tile, self.sharing.active))
        return atoms

    def row_layout(self, height: int, slots: int) -> cute.ComposedLayout:
        """Layout of ``slots`` pieces of ``height`` rows and one chunk, one behind the other."""
        return sm90.make_smem_layout_b(
            LayoutEnum.ROW_MAJOR, (COLUMN_BLOCK, height, CHUNK), self.dtype, slots
        )

    def row_tensor(
        self, view: Any, inner: str, tensors: list[cute.Tensor], chunked: bool
    ) -> cute.Tensor:
        """A row operand along ``inner``; if chunked, with modes (row, element of a chunk, chunk,
        batch...), so that one box is many 128-byte columns: 2 KB boxes kept the loads 0.1 us behind
        the weights."""
        plan = self.plan
        batch = self.batch_of(view)
        plain = labelled(self.extents, view, (plan.row, inner, *batch), tensors)
        shape = (described(plain.shape[0]), *plain.shape[1:])
        plain = cute.make_tensor(plain.iterator, cute.make_layout(shape, stride=plain.stride))
        if not chunked:
            return plain
        k = plan.program.dims[inner]
        shape = (plain.shape[0], CHUNK, k // CHUNK, *plain.shape[2:])
        stride = (plain.stride[0], 1, CHUNK, *plain.stride[2:])
        return cute.make_tensor(plain.iterator, cute.make_layout(shape, stride=stride))

    def vector_atoms(self, tensors: list[cute.Tensor]) -> list[Any]:
        layout = cute.make_layout((self.k,))
        return [
            tile_atom(
                labelled(self.extents, v, (self.plan.contracted,), tensors), layout, (self.k,)
            )
            for v in self.plan.vectors.values()
        ]

    def batch_of(self, view: Any) -> tuple[str, ...]:
        """The batch labels of an operand."""
        return batch_labels(self.plan.batch, view)

    # ---------------------------------------------------------------------------------- device

    @cute.kernel
    def kernel(
        self,
        atoms: list[cute.CopyAtom],
        coords: list[cute.Tensor],
        tensors: list[cute.Tensor],
        row_layout: cute.ComposedLayout,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        bx, by, bz = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = tidx % 32
        rank = Int32(0)
        if cutlass.const_expr(self.cluster > 1):
            rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        tile_n, tile_m = bx // self.cluster, by
        batch = self.batch_index(bz, tensors)
        smem = self.allocate(row_layout)
        if warp == 0:
            # prefetching descriptors while the barriers are made saves 0.05 to 0.2 us in every
            # kernel
            for atom in atoms:
                cpasync.prefetch_descriptor(atom)
        loads = len(atoms) - self.tile_store.count
        slots, sources = self.partition_all(atoms[:loads], coords[:loads], smem)
        outs = self.tile_store.partition(atoms[loads:], coords[loads:], smem)
        where = (tile_m, tile_n, rank, batch)

        pieces = self.row_side.shift.fragments()
        if cutlass.const_expr(len(pieces) > 0 and not self.dependent):
            if warp >= self.consumers and warp < self.producer:
                self.row_side.shift.load(pieces, tensors, tidx - 32 * self.consumers, where)
        if warp == self.producer:
            self.set_up(smem)
            if cutlass.const_expr(self.dependent):
                cute.arch.griddepcontrol_launch_dependents()
            if cutlass.const_expr(self.head_starts):
                self.fill(atoms, sources, slots, smem, where, 0, self.plan.schedule.head)
        elif cutlass.const_expr(self.dependent):
            cute.arch.griddepcontrol_launch_dependents()
        cute.arch.sync_threads()
        if cutlass.const_expr(self.grouped):
            # relaxed: the releasing form waits for the TMA loads in flight (3.6 us)
            cute.arch.cluster_arrive_relaxed()

        registers = self.plan.registers
        # helpers and producer in one warpgroup hand over registers with one instruction
        together = registers is not None and registers[1] == registers[2]
        if warp < self.consumers:
            if cutlass.const_expr(registers is not None):
                cute.arch.setmaxregister_increase(registers[0])
            self.consume(smem, tensors, tidx, warp, lane, where, outs)
        else:
            if cutlass.const_expr(together):
                cute.arch.setmaxregister_decrease(registers[1])
            if warp >= self.producer:
                if cutlass.const_expr(registers is not None and not together):
                    cute.arch.setmaxregister_decrease(registers[2])
                if cutlass.const_expr(self.sharing.active):
                    cute.arch.cluster_wait()
                if warp == self.producer:
                    self.produce(atoms[:loads], sources, slots, smem, tensors, where)
                if cutlass.const_expr(self.cluster_size > 1):
                    cute.arch.cluster_wait()
            elif cutlass.const_expr(self.helpers > 0):
                if cutlass.const_expr(registers is not None and not together):
                    cute.arch.setmaxregister_decrease(registers[1])
                self.row_side.run(smem, tensors, tidx - 32 * self.consumers, lane, where, pieces)
        self.sharing.leave()

    def batch_index(self, bz: Any, tensors: list[cute.Tensor]) -> dict[str, Any]:
        """The batch labels' coordinates of this block; the last label varies fastest."""
        return unravel(bz, {d: self.extents.of(d, tensors) for d in self.plan.batch})

    def allocate(self, row_layout: Any) -> dict[str, Any]:
        """Allocate shared memory: operand rings, exchange buffers, barriers."""
        alloc = cutlass.memory.SmemAllocator()
        plan, smem = self.plan, {}
        # narrow boxes of hidden labels first: the instruction reads on behind them
        self.tails.allocate(alloc, smem)
        if self.weights:
            layout = self.main.layout(self.dtype, self.m, self.stages * self.main.boxes)
            smem["columns"] = operand(alloc, self.dtype, layout)
        smem["rows"] = [operand(alloc, self.dtype, row_layout) for _ in plan.rows]
        smem["vectors"] = [
            alloc.allocate_tensor(self.dtype, cute.make_layout((self.k, self.stages)), 128)
            for _ in plan.vectors
        ]
        self.vectors.allocate(alloc, smem)
        partials = plan.exchange_bytes // 4
        smem["partials"] = alloc.allocate_array(Float32, max(4, partials), byte_alignment=128)
        statistics = len(plan.statistics) * self.cluster * self.m
        smem["statistics"] = alloc.allocate_array(Float32, max(4, statistics), byte_alignment=16)
        values = len(plan.row_values) * self.m
        smem["row_values"] = alloc.allocate_array(Float32, max(4, values), byte_alignment=16)
        smem["pieces"] = self.tile_store.allocate(alloc)
        for name in ("full", "empty", "ready"):
            smem[name] = alloc.allocate_array(Int64, self.stages, byte_alignment=8)
        for name in ("received", "reduced", *["after_full"] * bool(plan.tails)):
            smem[name] = alloc.allocate_array(Int64, 1, byte_alignment=8)
        if plan.reductions:
            self.reductions.allocate(alloc, smem)
            count = len(plan.reductions)
            smem["columns_reduced"] = alloc.allocate_array(Int64, count, byte_alignment=8)
        return smem

    def partition_all(self, atoms: list[Any], coords: list[Any], smem: dict[str, Any]) -> Any:
        """Slots of the ring and tiles of the tensors, in the order of ``atoms``."""
        box = self.chunks if self.chunked else 1
        height = self.sharing.rows
        row_tile = (height, CHUNK, box) if self.chunked else (height, CHUNK)
        boxes = [(smem["columns"], (COLUMN_BLOCK, self.k))] * self.weights if self.weights else []
        for ring in smem["rows"]:
            slot = cute.local_tile(ring, row_tile, (0, 0, None)) if self.chunked else ring
            if self.sharing.active:
                parts = self.stages * self.chunks * self.sharing.blocks
                layout = self.row_layout(height, parts)
                slot = cute.make_tensor(ring.iterator, layout.outer)
            boxes.append((slot, row_tile))
        boxes += [(ring, (self.k,)) for ring in smem["vectors"]]
        inner = [g for g in self.inner if g.views]
        for group, ring in zip(inner, smem["inner"], strict=True):
            boxes += [(ring, (group.width, group.depth))] * len(group.views)
        for group, ring in zip(self.after, smem["after"], strict=True):
            boxes.append((ring, (COLUMN_BLOCK, group.depth)))
        boxes += [(smem["hidden"][t], (self.m, CHUNK)) for t in self.tails.loaded]
        slots, sources = [], []
        for atom, coord, (target, tile) in zip(atoms, coords, boxes, strict=True):
            tiles = cute.local_tile(coord, tile, (None,) * cute.rank(coord))
            slot, source = partition(atom, target, tiles, len(tile))
            slots.append(slot)
            sources.append(source)
        return slots, sources

    @cute.jit
    def set_up(self, smem):
        """Initialise the barriers; called by the producer warp before anything else."""
        helpers = self.helpers
        groups = [
            (smem["full"], self.stages, 1),
            (smem["empty"], self.stages, (self.consumers + helpers) * self.sharing.blocks),
        ]
        if cutlass.const_expr(self.plan.rewrites):
            groups.append((smem["ready"], self.stages, helpers))
        if cutlass.const_expr(self.cluster > 1):
            groups.append((smem["received"], 1, 1))
        if cutlass.const_expr(self.row_side.receivers > 1 and len(self.plan.statistics) > 0):
            groups.append((smem["reduced"], 1, 1))
        if cutlass.const_expr(len(self.plan.tails) > 0):
            groups.append((smem["after_full"], 1, 1))
        if cutlass.const_expr(self.plan.column_cluster > 1 and len(self.plan.reductions) > 0):
            groups.append((smem["columns_reduced"], len(self.plan.reductions), 1))
        init_barriers(groups)

    # -------------------------------------------------------------------------------- producer

    def is_early(self, operation: int) -> bool:
        """True if a load may be issued before the dependency wait."""
        arguments = self.plan.arguments
        view = view_of(self.plan.program.ops[operation], arguments)
        return not self.dependent or arguments[view.argument].constant

    @cute.jit
    def fill(
        self, atoms, sources, slots, smem, where, first: cutlass.Constexpr, last: cutlass.Constexpr
    ):
        """Load stages ``first`` to ``last`` of the first round, which need no wait."""
        for i in cutlass.range(first, min(last, self.stages, self.iterations), unroll=1):
            self.arm(smem, i)
            self.load_stage(atoms, sources, slots, smem, where, i, i, True)

    @property
    def head_starts(self) -> bool:
        """True if loads may start before all barriers are known to be ready."""
        return not self.sharing.active and not self.walk.persistent

    @cute.jit
    def produce(self, atoms, sources, slots, smem, tensors, where):
        """Load all tiles of this block; ``slots`` and ``sources`` are in the order of ``atoms``."""
        if cutlass.const_expr(self.head_starts):
            self.produce_own(atoms, sources, slots, smem, where)
        else:
            stage, phase = Int32(0), Int32(1)  # a fresh barrier lets waits for phase 1 pass
            if cutlass.const_expr(self.dependent):
                cute.arch.griddepcontrol_wait()
            if cutlass.const_expr(self.walk.persistent):
                first, end = self.walk.run(tensors)
                for step in cutlass.range(first, end, unroll=1):
                    tile = self.walk.tile(step, tensors)
                    stage, phase = self.produce_tile(
                        atoms, sources, slots, smem, tile, stage, phase, 0
                    )
            else:
                self.produce_tile(atoms, sources, slots, smem, where, stage, phase, 0)

    @cute.jit
    def produce_tile(
        self, atoms, sources, slots, smem, where, stage, phase, first: cutlass.Constexpr
    ):
        """Load one tile's operands from iteration ``first`` on, each stage once all of its readers
        have finished."""
        for i in cutlass.range(first, self.iterations, unroll=1):
            cute.arch.mbarrier_wait(smem["empty"] + stage, phase)
            self.arm(smem, stage)
            self.load_stage(atoms, sources, slots, smem, where, i, stage, True)
            if cutlass.const_expr(self.dependent):
                self.load_stage(atoms, sources, slots, smem, where, i, stage, False)
            stage += 1
            if stage == self.stages:
                stage = Int32(0)
                phase = phase ^ 1
        return stage, phase

    @cute.jit
    def produce_own(self, atoms, sources, slots, smem, where):
        """Keep the ring full for a block with a single tile."""
        if cutlass.const_expr(self.cluster > 1):
            # bytes may arrive before they are expected: the phase cannot end without this arrival
            expect_bytes(smem["received"], self.plan.exchange_bytes)
            if cutlass.const_expr(len(self.plan.statistics) > 0):
                total = 4 * self.m * self.cluster * len(self.plan.statistics)
                expect_bytes(smem["reduced"], total)
        if cutlass.const_expr(self.plan.column_cluster > 1):
            for r in cutlass.range_constexpr(len(self.plan.reductions)):
                total = 4 * self.m * self.plan.column_cluster
                expect_bytes(smem["columns_reduced"] + r, total)
        first = min(self.stages, self.iterations)
        self.fill(atoms, sources, slots, smem, where, self.plan.schedule.head, first)
        last = len(atoms) - len(self.after) - len(self.tails.loaded)
        if cutlass.const_expr(len(self.after) > 0):
            self.tails.load_operands(atoms[last:], sources[last:], slots[last:], smem, where, True)
        if cutlass.const_expr(self.dependent):
            cute.arch.griddepcontrol_wait()
            if cutlass.const_expr(len(self.after) > 0):
                self.tails.load_operands(
                    atoms[last:], sources[last:], slots[last:], smem, where, False
                )
            for i in cutlass.range(first, unroll=1):
                self.load_stage(atoms, sources, slots, smem, where, i, i, False)
        self.produce_tile(atoms, sources, slots, smem, where, Int32(0), Int32(0), first)

    @cute.jit
    def arm(self, smem, stage):
        """Arm a stage's barrier with the number of bytes to come."""
        expect_bytes(smem["full"] + stage, self.plan.stage_bytes)

    @cute.jit
    def load_stage(
        self, atoms, sources, slots, smem, where, iteration, stage, early: cutlass.Constexpr
    ):
        """Issue one stage's loads: those that may come before the dependency wait (``early``), or
        the others."""
        plan = self.plan
        tile_m, tile_n, rank, batch = where
        full = smem["full"] + stage
        k = rank * self.iterations + iteration
        hint = EVICT_FIRST if plan.schedule.stream_columns else None
        for w, (op, view) in enumerate(plan.columns.items()):
            if cutlass.const_expr(self.is_early(op) == early):
                at = tuple(batch[d] for d in self.batch_of(view))
                for b in cutlass.range_constexpr(self.blocks):
                    slot = stage * self.main.boxes + w * self.blocks + b
                    source = sources[w][(None, tile_n * self.blocks + b, k, *at)]
                    bulk_load(atoms[w], source, slots[w][None, slot], full, hint)
        for r, (op, view) in enumerate(plan.rows.items()):
            if cutlass.const_expr(self.is_early(op) == early):
                at = tuple(batch[d] for d in self.batch_of(view))
                self.load_row(atoms, sources, slots, self.weights + r, full, tile_m, k, stage, at)
        for v, op in enumerate(plan.vectors):
            if cutlass.const_expr(self.is_early(op) == early):
                i = self.weights + len(plan.rows) + v
                bulk_load(atoms[i], sources[i][None, k], slots[i][None, stage], full, EVICT_LAST)
        self.load_inner(atoms, sources, slots, where, full, k, stage, early)

    @cute.jit
    def load_inner(self, atoms, sources, slots, where, full, k, stage, early: cutlass.Constexpr):
        """Load one stage of the column operands along hidden labels: every block reads all of
        them."""
        first = self.weights + len(self.plan.rows) + len(self.plan.vectors)
        flat = [(g, n, op) for g in self.inner for n, op in enumerate(g.views)]
        for i, (group, n, op) in enumerate(flat):
            if cutlass.const_expr(self.is_early(op) == early):
                at = tuple(where[3][d] for d in self.batch_of(group.views[op]))
                for b in cutlass.range_constexpr(group.blocks):
                    slot = slots[first + i][None, stage * group.boxes + n * group.blocks + b]
                    source = sources[first + i][(None, b, k, *at)]
                    bulk_load(atoms[first + i], source, slot, full, EVICT_LAST)

    @cute.jit
    def load_row(self, atoms, sources, slots, i: cutlass.Constexpr, full, tile_m, k, stage, at):
        """Load one tile of a row operand, in one box if the depth has whole chunks."""
        if cutlass.const_expr(self.chunked):
            source = sources[i][(None, tile_m, 0, k, *at)]
            bulk_load(atoms[i], source, slots[i][None, stage], full, EVICT_LAST)
        else:
            parts, part = self.sharing.blocks, self.sharing.rank()
            for c in cutlass.range_constexpr(self.chunks):
                source = sources[i][(None, tile_m * parts + part, k * self.chunks + c, *at)]
                slot = (stage * self.chunks + c) * parts + part
                bulk_load(
                    atoms[i], source, slots[i][None, slot], full, EVICT_LAST, self.sharing.mask()
                )

    # ------------------------------------------------------------------------------- consumers

    @cute.jit
    def consume(self, smem, tensors, tidx, warp, lane, where, outs):
        """Multiply all tiles of this block, each finished before the next.

        ``where`` is ``(row tile, column tile, rank of the split, batch index)`` as in `Walk`;
        ``outs`` are the TMA stores of `TileStore.partition`.
        """
        if cutlass.const_expr(self.grouped):
            cute.arch.cluster_wait()
        stage, phase = Int32(0), Int32(0)
        if cutlass.const_expr(self.walk.persistent):
            first, end = self.walk.run(tensors)
            for step in cutlass.range(first, end, unroll=1):
                tile = self.walk.tile(step, tensors)
                stage, phase = self.consume_tile(
                    smem, tensors, tidx, warp, lane, tile, outs, stage, phase
                )
        else:
            self.consume_tile(smem, tensors, tidx, warp, lane, where, outs, stage, phase)
        self.tile_store.drain()

    @cute.jit
    def consume_tile(self, smem, tensors, tidx, warp, lane, where, outs, stage, phase):
        """Multiply all stages, then finish the tile; return the next stage and its phase
        (Int32)."""
        group = warp // 4
        self.prefetch.run(tensors, tidx, where)
        # the columns' instruction, or that of a hidden label if the loop multiplies nothing else
        inner = [g for g in self.inner if g.views]
        lead = self.main if self.weights else inner[0]
        mma = lead.mma(self.dtype, self.instruction_rows)
        mma_inner = [g.mma(self.dtype, self.instruction_rows) for g in inner]
        mma_after = [g.mma(self.dtype, self.instruction_rows) for g in self.after]
        b = mma.make_fragment_B(mma.get_slice(0).partition_B(smem["rows"][0]))
        per_group = self.blocks // self.warpgroups
        shape = mma.partition_shape_C((COLUMN_BLOCK, self.m))
        accumulators = [
            [cute.make_rmem_tensor(shape, Float32) for _ in range(per_group)]
            for _ in range(self.epilogue.results)
        ]
        for row in accumulators:
            for acc in row:
                acc.fill(0.0)
        hidden = self.tails.accumulators(mma_inner)
        vectors = self.vectors.consumer(lead, smem, per_group)
        for instruction in (mma, *mma_inner):
            instruction.set(warpgroup.Field.ACCUMULATE, True)
        previous = Int32(-1)
        for _ in cutlass.range(self.iterations, unroll=1):
            cute.arch.mbarrier_wait(smem["full"] + stage, phase)
            if cutlass.const_expr(self.plan.rewrites):
                cute.arch.mbarrier_wait(smem["ready"] + stage, phase)
            warpgroup.fence()
            for kk in cutlass.range_constexpr(self.k // 16):
                self.multiply(mma, accumulators, vectors, smem, b, stage, kk, group)
                self.tails.multiply_stage(mma_inner, hidden, smem, b, stage, kk, group)
            warpgroup.commit_group()
            # one WGMMA group stays in flight: waiting for this stage's own costs 0.2 us
            warpgroup.wait_group(1)
            if previous >= 0:
                self.sharing.release(smem["empty"] + previous, lane)
            previous = stage
            stage += 1
            if stage == self.stages:
                stage = Int32(0)
                phase = phase ^ 1
        warpgroup.wait_group(0)
        if cutlass.const_expr(self.walk.persistent):
            self.sharing.release(smem["empty"] + previous, lane)
        self.epilogue.begin()
        if cutlass.const_expr(len(self.after) > 0):
            self.tails.run(mma_after, accumulators, hidden, smem, tensors, warp, lane, where)
        self.epilogue.run(
            accumulators, vectors.accumulators, smem, tensors, tidx, warp, lane, where, outs
        )
        return stage, phase

    def multiply(
        self,
        mma: cute.TiledMma,
        accumulators: Any,
        vectors: VectorConsumer,
        smem: dict[str, Any],
        b: cute.Tensor,
        stage: Any,
        kk: int,
        group: Any,
    ) -> None:
        """Issue one k-step of 16 for the products of the columns.

        ``accumulators`` are fp32 fragments of ``(64, rows)``, by product and block of 64 columns.
        """
        for w, (_, final) in enumerate(self.plan.products):
            a = mma.make_fragment_A(mma.get_slice(0).partition_A(smem["columns"]))
            for i in range(self.blocks // self.warpgroups):
                slot = stage * self.main.boxes + w * self.blocks + group + self.warpgroups * i
                acc = accumulators[self.plan.finals[final]][i]
                row = b[None, None, kk % 4, stage * self.chunks + kk // 4]
                cute.gemm(mma, acc, a[None, None, kk, slot], row, acc)
                vectors.multiply(w, i, kk, slot, stage)
