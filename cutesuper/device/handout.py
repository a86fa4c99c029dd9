"""Blocks that have not started, handed to those that run (cluster launch control).

A launch has a block for each tile. A cluster that runs asks for the next one that has not started:
if there is one, it will not be started, and the cluster that has asked does its work. So clusters
that get on well take more tiles, and those of a multiprocessor that another kernel occupies none.

All blocks of a cluster get the same answer: 16 bytes in shared memory, on a ring whose readers give
answers back as they give back operands. No block may ask again after "none is left".

Source: NVIDIA, Parallel Thread Execution ISA 8.8, clusterlaunchcontrol.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
import cutlass.memory
from cutlass import Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from cutesuper.device.barriers import Barriers, fence_warp
from cutesuper.device.cluster import rank_in_cluster
from cutesuper.device.pipeline import Ring, Slot

#: answers under way or not yet read by all: loads run up to two tiles ahead of what stores them
ANSWERS = 3
#: 32-bit words of an answer
WORDS = 4


@dataclass(frozen=True)
class Handout:
    """The answers in shared memory.

    Attributes:
        answers: of the stages of the ring (Int32 pointer).
        ring: of their bytes, and of the warps that read them.
        blocks: of the cluster.
    """

    answers: cute.Pointer
    ring: Ring
    blocks: int

    @staticmethod
    def allocate(alloc: cutlass.memory.SmemAllocator, warps: int, blocks: int) -> Handout:
        """Allocate answers that so many warps of each of the blocks of a cluster read."""
        answers = alloc.allocate_array(Int32, WORDS * ANSWERS, byte_alignment=16)
        full = Barriers.allocate(alloc, ANSWERS)
        empty = Barriers.allocate(alloc, ANSWERS, warps * blocks)
        return Handout(answers, Ring(ANSWERS, full, empty), blocks)

    @cute.jit
    def ask(self, slot):
        """Ask for the next cluster, the answer to come to ``slot``; by a warp of each block."""
        self.ring.wait_empty(Slot(slot.stage, slot.phase ^ 1))
        self.ring.expect(slot.stage, 4 * WORDS)
        rank = rank_in_cluster() if self.blocks > 1 else Int32(0)
        if rank == 0:
            barrier, place = self.ring.full[slot.stage].pointer, self.place(slot.stage)
            with cute.arch.elect_one():
                cute.arch.issue_clc_query(barrier, place, multicast=self.blocks > 1)

    @cute.jit
    def answer(self, slot, lane):
        """Wait for an answer; by a whole warp.
        Returns 1 and the index along x of the first block of the cluster that was handed out, or 0
        and anything."""
        self.ring.wait(slot)
        found, block = read(self.place(slot.stage).toint())
        # the next answer is written through another proxy
        fence_warp()
        self.ring.release(slot.stage, lane, self.blocks)
        return cute.arch.make_warp_uniform(found), cute.arch.make_warp_uniform(block)

    def place(self, stage: Any) -> cute.Pointer:
        """The answer of a stage."""
        return self.answers + stage * WORDS


@dsl_user_op
def read(address: Any, *, loc: Any = None, ip: Any = None) -> tuple[Int32, Int32]:
    """An answer in shared memory: 1 and the first block's index along x, or 0 and 0.

    The index is not defined without a cluster, so it is asked for under the predicate.
    """
    text = """{
.reg .pred handed;
.reg .b64 low, high;
.reg .b128 both;
ld.shared.v2.b64 {low, high}, [$2];
mov.b128 both, {low, high};
clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 handed, both;
selp.b32 $0, 1, 0, handed;
mov.b32 $1, 0;
@handed clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 $1, both;
}"""
    found = llvm.inline_asm(
        llvm.StructType.get_literal([T.i32()] * 2), [Int32(address).ir_value(loc=loc, ip=ip)], text,
        "=&r,=&r,r,~{memory}", has_side_effects=True, is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )  # fmt: skip
    first, second = (llvm.extractvalue(T.i32(), found, [v], loc=loc, ip=ip) for v in range(2))
    return Int32(first), Int32(second)
