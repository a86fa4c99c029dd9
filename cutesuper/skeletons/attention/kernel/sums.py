"""The attention loop with plain sums as a traced kernel: walks a `SumsPlan`.

Roles of the warps of a block: consumer warpgroups of 64 rows (scores, operands, sums in registers)
and one producer warp (TMA loads, and copies of vectors). While one warpgroup computes exponentials,
the tensor cores work for the other.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32

from cutesuper.device.barriers import Barriers, initialise
from cutesuper.device.launch import (
    give_registers,
    start_successor,
    take_registers,
    wait_for_predecessor,
)
from cutesuper.device.memory import ask_for_descriptors, operand
from cutesuper.device.pipeline import Ring
from cutesuper.device.products import Consumers
from cutesuper.skeletons.attention.kernel.sums_consumer import SumsConsumer, SumsThread
from cutesuper.skeletons.attention.kernel.sums_place import Places
from cutesuper.skeletons.attention.kernel.sums_producer import SumsMemory, SumsProducer
from cutesuper.skeletons.attention.sums.plan import SumsPlan
from cutesuper.skeletons.kernel.arguments import handed_over


class SumsKernel:
    """The kernel: launches a block for each tile of rows; see the module's docstring."""

    def __init__(self, plan: SumsPlan) -> None:
        self.plan = plan
        self.places = places = Places(plan)
        self.producer = SumsProducer(places)
        self.consumer = SumsConsumer(places)
        self.first = 4 * plan.schedule.row_groups  # the producer warp

    @cute.jit
    def __call__(self, *args):
        """Launch; the arguments are the plan's tensors in order, then the stream."""
        tensors, _, stream = handed_over(self.plan.arguments, args)
        atoms = self.producer.atoms(tensors)
        self.kernel([a[0] for a in atoms], [a[1] for a in atoms], tensors).launch(
            grid=(self.places.blocks(tensors), 1, 1),
            block=(self.plan.threads, 1, 1),
            stream=stream,
            use_pdl=self.plan.schedule.dependent_launch,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self, atoms: list[cute.CopyAtom], coords: list[cute.Tensor], tensors: list[cute.Tensor]
    ):
        tidx, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = tidx % 32
        if warp == 0:
            ask_for_descriptors(atoms)
        memory = self.allocate()
        loads = self.producer.partition(atoms, coords, memory)
        if warp == self.first:
            ring = memory.ring
            cores = self.places.cores.barriers(memory.cores)
            initialise([ring.full, ring.empty, memory.rows_full, *cores])
        cute.arch.sync_threads()
        if cutlass.const_expr(self.plan.schedule.dependent_launch):
            start_successor()
            wait_for_predecessor()
        place = self.places.place(tensors)
        span = self.places.span(place, tensors)
        registers = self.plan.registers
        if warp >= self.first:
            if cutlass.const_expr(registers is not None):
                give_registers(registers[1])
            if warp == self.first:
                self.producer.run(loads, memory, tensors, place, span, lane)
        else:
            if cutlass.const_expr(registers is not None):
                take_registers(registers[0])
            thread = SumsThread(memory, tensors, place, warp, lane, warp // 4, tidx % 128)
            self.consumer.run(thread, span)

    def allocate(self) -> SumsMemory:
        """Allocate shared memory: operands, vectors, barriers."""
        alloc, plan = cutlass.memory.SmemAllocator(), self.plan
        count, stages = len(plan.residents), plan.schedule.stages
        operands = [
            operand(alloc, self.places.dtype, self.producer.layout(n))
            for n in range(count + len(plan.streams))
        ]
        numbers = max(4, len(plan.loop_vectors) * stages * plan.loop_tile)
        vectors = alloc.allocate_array(Float32, numbers, byte_alignment=16)
        full = Barriers.allocate(alloc, stages, self.producer.arrivals)
        empty = Barriers.allocate(alloc, stages, 4 * plan.schedule.row_groups)
        ring = Ring(stages, full, empty)
        rows_full = Barriers.allocate(alloc)
        cores = self.places.cores.allocate(alloc, Consumers(plan.schedule.row_groups))
        return SumsMemory(operands[:count], operands[count:], vectors, ring, rows_full, cores)
