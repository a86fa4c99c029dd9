"""The matmul mainloop as a traced kernel: walks a `MatmulPlan`, calls the blocks of ``device/``.

Roles of the warps of a block: consumers (products, then the epilogue), helpers (row statistics and
the prologue of the row operand), one producer (TMA loads); where it is asked for, an issuer
(products in place of the consumers). Everything that depends on the plan is decided while tracing;
only the ring and the tails are run-time control flow.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32

from cutesuper.device.barriers import Barriers, initialise
from cutesuper.device.cluster import announce, rank_in_cluster, wait_for_cluster
from cutesuper.device.launch import give_registers, start_successor, take_registers
from cutesuper.device.memory import ask_for_descriptors, operand
from cutesuper.device.pipeline import Ring
from cutesuper.skeletons.kernel.arguments import handed_over
from cutesuper.skeletons.matmul.kernel.consumer import Consumer
from cutesuper.skeletons.matmul.kernel.context import Here, Known, Memory, Tile
from cutesuper.skeletons.matmul.kernel.copies import Copies
from cutesuper.skeletons.matmul.kernel.epilogue import Epilogue
from cutesuper.skeletons.matmul.kernel.issuer import Issuer
from cutesuper.skeletons.matmul.kernel.leaves import Leaves
from cutesuper.skeletons.matmul.kernel.multicast import Sharing
from cutesuper.skeletons.matmul.kernel.producer import Producer
from cutesuper.skeletons.matmul.kernel.reductions import ColumnReductions
from cutesuper.skeletons.matmul.kernel.row_tile import RowTile
from cutesuper.skeletons.matmul.kernel.shared_statistics import SharedStatistics
from cutesuper.skeletons.matmul.kernel.statistics import RowSide
from cutesuper.skeletons.matmul.kernel.tails import Tails
from cutesuper.skeletons.matmul.kernel.tile_scheduler import Walk
from cutesuper.skeletons.matmul.kernel.tile_store import TileStore
from cutesuper.skeletons.matmul.kernel.vectors import VectorTile
from cutesuper.skeletons.matmul.plan import MatmulPlan, tile_grid


class MatmulKernel:
    """The kernel: launches one block cluster for each output tile; see the module's docstring."""

    def __init__(self, plan: MatmulPlan) -> None:
        self.plan = plan
        self.k = known = Known.of(plan)
        self.sharing = sharing = Sharing(plan)
        self.row_tile = tile = RowTile(known, sharing)
        self.walk = walk = Walk(known, sharing)
        leaves = Leaves(known)
        self.vectors = VectorTile(known, tile)
        self.row_side = RowSide(known, tile, sharing, walk, self.vectors)
        self.shared_statistics = SharedStatistics(known, sharing, walk)
        self.tails = Tails(known, leaves)
        self.reductions = ColumnReductions(known, leaves, self.vectors)
        self.tile_store = TileStore(known, leaves)
        epilogue = Epilogue(known, leaves, self.vectors, self.reductions, self.tile_store)
        beside = [self.epilogue_of(Known.of(p)) for p in plan.beside]
        #: of all sections, in their order
        self.epilogues = [epilogue, *beside]
        self.producer = Producer(known, sharing, walk, self.tails)
        self.copies = Copies(known)
        self.consumer = Consumer(known, sharing, walk, self.tails, self.epilogues)
        self.issuer = Issuer(known, sharing, walk, self.consumer.mainloop)
        #: True if blocks wait for each other before they use each other's shared memory
        self.grouped = plan.cluster_size > 1 or sharing.active

    def epilogue_of(self, known: Known) -> Epilogue:
        """The end of the tiles of other columns, which has no reductions."""
        leaves = Leaves(known)
        vectors = VectorTile(known, self.row_tile)
        reductions = ColumnReductions(known, leaves, vectors)
        return Epilogue(known, leaves, vectors, reductions, TileStore(known, leaves))

    # ------------------------------------------------------------------------------------ host

    @cute.jit
    def __call__(self, *args):
        """Launch; the arguments are the plan's tensors in order, its scratch, then the stream."""
        k, plan = self.k, self.plan
        tensors, scratch, stream = handed_over(plan.arguments, args)
        rows = k.ring_layout()
        atoms = self.producer.atoms(tensors)
        for epilogue in self.epilogues:
            atoms = atoms + epilogue.tile_store.atoms(tensors)
        row_tiles = cute.ceil_div(k.extents.of(plan.row, tensors), k.m)
        batch = k.extents.count(plan.batch, tensors)
        self.kernel([a[0] for a in atoms], [a[1] for a in atoms], tensors, rows, scratch).launch(
            grid=tile_grid(plan, row_tiles, batch),
            block=(plan.threads, 1, 1),
            cluster=(plan.cluster_size * self.sharing.blocks, 1, 1),
            stream=stream,
            use_pdl=k.dependent,
            cooperative=plan.meets,
            # without this cap the compiler ignores the hand-over of registers
            min_blocks_per_mp=1,
        )

    # ---------------------------------------------------------------------------------- device

    @cute.kernel
    def kernel(
        self,
        atoms: list[cute.CopyAtom],
        coords: list[cute.Tensor],
        tensors: list[cute.Tensor],
        row_layout: cute.ComposedLayout,
        scratch: list[cute.Tensor],
    ):
        k = self.k
        tidx, _, _ = cute.arch.thread_idx()
        block = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = tidx % 32
        tile = self.first_tile(block, tensors)
        memory = self.allocate(row_layout)
        if warp == 0:
            ask_for_descriptors(atoms)
        count = len(atoms) - sum(e.tile_store.count for e in self.epilogues)
        loads = self.producer.partition(atoms[:count], coords[:count], memory)
        outs = self.outputs(atoms[count:], coords[count:], memory)

        pieces = self.row_side.shift.fragments()
        if cutlass.const_expr(len(pieces) > 0 and not k.dependent):
            if warp >= k.consumers and warp < k.producer:
                thread = tidx - 32 * k.consumers
                self.row_side.shift.load(pieces, Here(memory, tensors, thread, warp, lane, tile))
        if warp == k.producer:
            self.set_up(memory)
            if cutlass.const_expr(k.dependent):
                start_successor()
            if cutlass.const_expr(self.producer.head_starts):
                self.producer.fill(loads, memory, tile, 0, self.plan.schedule.head)
        elif cutlass.const_expr(k.dependent):
            start_successor()
        cute.arch.sync_threads()
        if cutlass.const_expr(self.grouped):
            announce()

        registers = self.plan.registers
        # helpers and producer in one warpgroup hand over registers with one instruction
        together = registers is not None and registers[1] == registers[2]
        if warp < k.consumers:
            if cutlass.const_expr(registers is not None):
                take_registers(registers[0])
            if cutlass.const_expr(self.grouped):
                wait_for_cluster()
            self.consumer.run(Here(memory, tensors, tidx, warp, lane, tile, scratch), outs)
        else:
            if cutlass.const_expr(together):
                give_registers(registers[1])
            if warp >= k.producer:
                if cutlass.const_expr(registers is not None and not together):
                    give_registers(registers[2])
                if cutlass.const_expr(self.sharing.active):
                    wait_for_cluster()
                if warp == k.producer:
                    self.producer.run(loads, Here(memory, tensors, tidx, warp, lane, tile))
                elif cutlass.const_expr(self.plan.copiers > 0):
                    if warp <= k.producer + self.plan.copiers:
                        thread = tidx - 32 * (k.producer + 1)
                        self.copies.run(Here(memory, tensors, thread, warp, lane, tile))
                if cutlass.const_expr(self.plan.schedule.issuer):
                    if warp == k.issuer:
                        self.issuer.run(Here(memory, tensors, tidx, warp, lane, tile))
                if cutlass.const_expr(self.plan.cluster_size > 1):
                    wait_for_cluster()
            elif cutlass.const_expr(k.helpers > 0):
                if cutlass.const_expr(registers is not None and not together):
                    give_registers(registers[1])
                thread = tidx - 32 * k.consumers
                here = Here(memory, tensors, thread, warp, lane, tile, scratch)
                if cutlass.const_expr(self.plan.schedule.reduces_once):
                    self.shared_statistics.run(here)
                else:
                    self.row_side.run(here, pieces)
        self.sharing.leave()

    def first_tile(self, block: tuple[Any, Any, Any], tensors: list[cute.Tensor]) -> Tile:
        """The tile of a block, or the first one of a block that walks over several."""
        k = self.k
        bx, by, bz = block
        if self.plan.numbered:
            along = sum(self.plan.section_tiles) * k.cluster
            bx, line = bx % along, bx // along
            by, bz = line % self.walk.rows(tensors), line // self.walk.rows(tensors)
        rank = rank_in_cluster() if k.cluster > 1 else Int32(0)
        if self.plan.parts > 1:
            rank, bz = bz % self.plan.parts, bz // self.plan.parts
        section, column = self.walk.section(bx // k.cluster)
        batch = k.batch_index(bz, tensors)
        return Tile(by, column, rank, batch, k.iterations(tensors), section=section)

    def outputs(
        self, atoms: list[cute.CopyAtom], coords: list[cute.Tensor], memory: Memory
    ) -> list[Any]:
        """The pieces that each epilogue stores, by its own descriptors."""
        found, start = [], 0
        for epilogue in self.epilogues:
            end = start + epilogue.tile_store.count
            found.append(epilogue.tile_store.partition(atoms[start:end], coords[start:end], memory))
            start = end
        return found

    def allocate(self, row_layout: Any) -> Memory:
        """Allocate shared memory: operand rings, exchange buffers, barriers."""
        alloc = cutlass.memory.SmemAllocator()
        k, plan = self.k, self.plan

        def floats(count: int, alignment: int = 16) -> cute.Pointer:
            return alloc.allocate_array(Float32, max(4, count), byte_alignment=alignment)

        # narrow boxes of hidden labels first: the instruction reads on behind them
        hidden, columns = self.tails.allocate(alloc), None
        if plan.columns:
            group = k.groups[0]
            columns = operand(alloc, k.dtype, group.layout(k.dtype, k.stages * group.boxes))
        rows = [operand(alloc, k.dtype, row_layout) for _ in plan.rows]
        vector = cute.make_layout((k.k, k.stages)) if plan.vectors else None
        vectors = [alloc.allocate_tensor(k.dtype, vector, 128) for _ in plan.vectors]
        vector_rows = self.vectors.allocate(alloc)
        low_rows = operand(alloc, k.dtype, row_layout) if plan.split else None
        if plan.exchange_in_ring:
            assert columns is not None
            partials = cute.recast_ptr(columns.iterator, dtype=Float32)  # rows lie behind them
        else:
            partials = floats(plan.exchange_bytes // 4, 128)
        statistics = floats(len(plan.statistics) * k.cluster * k.m)
        row_values = floats(len(plan.row_values) * k.m)
        pieces, pieces_full = self.tile_store.allocate(alloc)
        readers = k.readers * self.sharing.parts
        full = Barriers.allocate(alloc, k.stages, 1 + self.copies.stage_warps)
        ring = Ring(k.stages, full, Barriers.allocate(alloc, k.stages, readers))
        ready = Barriers.allocate(alloc, k.stages, k.helpers)
        received, reduced = Barriers.allocate(alloc), Barriers.allocate(alloc)
        drained = (
            Barriers.allocate(alloc, 1, (k.consumers + k.helpers) * k.cluster)
            if plan.exchange_in_ring
            else None
        )
        warps = 1 + self.copies.after_warps
        after_full = Barriers.allocate(alloc, 1, warps) if plan.tails else None
        warp_sums, block_sums = self.reductions.allocate(alloc)
        count = len(plan.reductions)
        return Memory(
            hidden, columns, rows, vectors, vector_rows, low_rows, partials, statistics, row_values,
            pieces, pieces_full, ring, ready, drained, received, reduced, after_full, warp_sums,
            block_sums, Barriers.allocate(alloc, count) if count else None,
            self.copies.allocate(alloc), k.cores.allocate(alloc, self.consumer.mainloop.consumers),
            self.walk.allocate(alloc),
        )  # fmt: skip

    @cute.jit
    def set_up(self, memory):
        """Initialise the barriers; called by the producer warp before anything else."""
        plan = self.plan
        used = [
            (memory.ready, plan.rewrites),
            (memory.received, self.k.cluster > 1),
            (memory.drained, plan.exchange_in_ring),
            (memory.pieces_full, self.tile_store.loads > 0),
            (memory.reduced, self.row_tile.receivers > 1 and len(plan.statistics) > 0),
            (memory.after_full, len(plan.tails) > 0),
            (memory.columns_reduced, plan.column_cluster > 1 and len(plan.reductions) > 0),
        ]
        ring = memory.ring
        arrays = [array for array, needed in used if needed]
        rings = [ring, memory.handout.ring] if self.walk.hands_out else [ring]
        both = [b for r in rings for b in (r.full, r.empty)]
        initialise([*both, *arrays, *self.k.cores.barriers(memory.cores)])
