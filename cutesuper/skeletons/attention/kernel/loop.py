"""The attention loop as a traced kernel: walks an `AttentionPlan`.

Roles of the warps of a block: consumer warpgroups of 64 rows (scores, weights, results in
registers) and one producer warp (TMA loads). Warpgroups along the keys take stages in turn: while
one computes exponentials, the tensor cores work for the other. Those along the rows may multiply
together.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.memory

from cutesuper.device.barriers import Barriers, initialise
from cutesuper.device.cluster import announce, wait_for_cluster
from cutesuper.device.launch import (
    give_registers,
    start_successor,
    take_registers,
    wait_for_predecessor,
)
from cutesuper.device.memory import ask_for_descriptors, operand
from cutesuper.device.pipeline import Ring
from cutesuper.skeletons.attention.kernel.consumer import Consumer
from cutesuper.skeletons.attention.kernel.context import Here, Known, Memory
from cutesuper.skeletons.attention.kernel.keys import KeyValues
from cutesuper.skeletons.attention.kernel.producer import Producer
from cutesuper.skeletons.attention.kernel.rows import Rows
from cutesuper.skeletons.attention.plan import AttentionPlan
from cutesuper.skeletons.kernel.arguments import handed_over


class AttentionKernel:
    """The kernel: launches a cluster for each tile of rows and part of the grid.
    See the module's docstring."""

    def __init__(self, plan: AttentionPlan) -> None:
        self.plan = plan
        self.k = known = Known.of(plan)
        self.rows = Rows(known)
        self.key_values = KeyValues(known, self.rows)
        self.producer = Producer(known, self.rows)
        self.consumer = Consumer(known, self.rows, self.key_values)

    # ------------------------------------------------------------------------------------ host

    @cute.jit
    def __call__(self, *args):
        """Launch; the arguments are the plan's tensors in order, its scratch, then the stream."""
        plan = self.plan
        tensors, scratch, stream = handed_over(plan.arguments, args)
        atoms = self.producer.atoms(tensors)
        batch = self.k.extents.count(plan.batch, tensors)
        self.kernel([a[0] for a in atoms], [a[1] for a in atoms], tensors, scratch).launch(
            # one grid dimension: the others end at 65535
            grid=(plan.parts * self.rows.tiles(tensors) * batch, 1, 1),
            block=(plan.threads, 1, 1),
            cluster=(plan.cluster, 1, 1),
            stream=stream,
            use_pdl=self.k.dependent,
            min_blocks_per_mp=plan.schedule.resident,
            # set where blocks share an SM; otherwise the compiler asks a driver for it
            **({"preferred_smem_carveout": 100} if plan.schedule.resident > 1 else {}),
        )

    # ---------------------------------------------------------------------------------- device

    @cute.kernel
    def kernel(
        self,
        atoms: list[cute.CopyAtom],
        coords: list[cute.Tensor],
        tensors: list[cute.Tensor],
        scratch: list[cute.Tensor],
    ):
        k = self.k
        tidx, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = tidx % 32
        if warp == 0:
            ask_for_descriptors(atoms)
        memory = self.allocate()
        loads = self.producer.partition(atoms, coords, memory)
        if cutlass.const_expr(k.dependent and (self.rows.has_lengths or self.plan.paged)):
            wait_for_predecessor()
        place = self.rows.place(tensors)
        first, count = self.span(tensors, place)
        tables = self.producer.pages.open(tensors, place, first)
        if warp == k.producer:
            self.set_up(memory, place)
            if cutlass.const_expr(k.dependent):
                start_successor()
                wait_for_predecessor()
            self.producer.fill(loads, tables, memory, place, first, count)
        elif cutlass.const_expr(k.dependent):
            start_successor()
        cute.arch.sync_threads()
        if cutlass.const_expr(self.plan.cluster > 1):
            announce()
        registers = self.plan.registers
        if warp >= k.producer:
            if cutlass.const_expr(registers is not None):
                give_registers(registers[1])
            if warp == k.producer:
                self.producer.run(loads, tables, memory, place, first, count)
            elif cutlass.const_expr(self.plan.helpers > 0):
                thread = tidx - 32 * (k.producer + 1)
                self.key_values.run(memory, thread, lane, place, first, count)
            if cutlass.const_expr(self.plan.cluster > 1):
                wait_for_cluster()
        else:
            if cutlass.const_expr(registers is not None):
                take_registers(registers[0])
            group = warp // 4
            lead = group % k.key_groups  # this warpgroup's first stage
            here = Here(memory, tensors, scratch, place, warp, lane, tidx, group, tidx % 128)
            self.consumer.run(here, lead, first, count)

    def allocate(self) -> Memory:
        """Allocate shared memory: operands, exchange buffers, barriers."""
        alloc = cutlass.memory.SmemAllocator()
        k, join = self.k, self.consumer.join
        rows = operand(alloc, k.dtype, self.rows.layout(self.plan.instructions))
        keys, values = (
            operand(alloc, k.dtype, self.producer.layout(n, k.stages)) for n in range(2)
        )
        values_of_rows = self.rows.allocate(alloc)
        values_of_keys = self.key_values.allocate(alloc)
        exchange = join.allocate(alloc)
        full = [Barriers.allocate(alloc, k.stages) for _ in range(2)]
        readers = 4 * k.row_groups + self.plan.helpers
        empty = [Barriers.allocate(alloc, k.stages, readers) for _ in range(2)]
        rings = (Ring(k.stages, *pair) for pair in zip(full, empty, strict=True))
        return Memory(
            rows, keys, values, values_of_rows, *values_of_keys, *exchange, *rings,
            Barriers.allocate(alloc), k.cores.allocate(alloc, self.consumer.warpgroups),
        )  # fmt: skip

    @cute.jit
    def set_up(self, memory, place):
        """Initialise the barriers; called by the producer warp before anything else."""
        keys, values = memory.key_ring, memory.value_ring
        arrays = [keys.full, values.full, keys.empty, values.empty, memory.rows_full]
        arrays += [memory.values_ready] * (self.plan.helpers > 0)
        arrays += [memory.received] * (self.plan.cluster > 1)
        initialise(arrays + self.k.cores.barriers(memory.cores))
        if cutlass.const_expr(self.plan.cluster > 1):
            self.consumer.join.expect(memory, place)

    @cute.jit
    def span(self, tensors, place):
        """The key tiles of this block: the first one, and their number (Int32)."""
        k, plan, part, begin = self.k, self.plan, place.part, 0
        if cutlass.const_expr(k.steps is not None):
            first, count = part * k.steps, k.steps
        else:
            tiles = (self.rows.visible(tensors, place) + k.key_tile - 1) // k.key_tile
            if cutlass.const_expr(plan.begins):
                begin = self.rows.first(tensors, place) // k.key_tile
                tiles = cutlass.max(tiles - begin, 0)
            first = part * tiles // plan.parts
            count = (part + 1) * tiles // plan.parts - first
            if cutlass.const_expr(plan.begins):
                first += begin
        return first, count
