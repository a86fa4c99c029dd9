"""Values of keys: row reductions over the tiles of keys and values in shared memory.

``rms(V)`` scales the weight of every key by the root of its mean square. Helper warps read each
tile as soon as it arrives, one thread per key's row, 16 bytes at a time, and write the values to
shared memory for the consumers.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from cutesuper.device.barriers import Barriers, Meeting, fence_reads, fence_warp
from cutesuper.device.fragments import NEUTRAL, PIECE, fetched, filled, folded, fragment
from cutesuper.device.math import choose
from cutesuper.device.memory import neighbours, one, put
from cutesuper.skeletons.attention.kernel.context import CLEARED_BARRIER, Known, Memory
from cutesuper.skeletons.attention.kernel.rows import Rows, byte_piece, chunk_of

#: pieces of a row that a thread reads before it computes
BATCH = 8


class KeyValues:
    """The helper warps' work on keys; also clears values that lie behind a sequence's length."""

    def __init__(self, known: Known, rows: Rows) -> None:
        self.k, self.rows = known, rows
        self.plan = plan = known.plan
        #: True if sequences have lengths: memory behind the last key may then hold anything
        self.clears = any(m.written for m in plan.masks)
        self.order = list(plan.key_values)
        self.threads = 32 * plan.helpers

    def allocate(self, alloc: Any) -> tuple[cute.Pointer, Barriers]:
        """Allocate an fp32 slot for every value of every key in the ring, and the barriers."""
        count = len(self.order) * self.k.key_tile * self.k.stages
        slots = alloc.allocate_array(Float32, max(4, count), byte_alignment=16)
        return slots, Barriers.allocate(alloc, self.k.stages, self.threads)

    def slot(self, n: int, stage: Any, key: Any) -> Any:
        """Index of the n-th value of a key in shared memory."""
        return (stage * len(self.order) + n) * self.k.key_tile + key

    @cute.jit
    def run(self, memory, thread, lane, place, first, count):
        """Compute the values of all tiles of this block; by the helper warps."""
        end = self.rows.last_key(place)
        key_ring, value_ring = memory.key_ring, memory.value_ring
        at = key_ring.first()
        for i in cutlass.range(count, unroll=1):
            key_ring.wait(at)
            # waiting for the values as well ensures that the last round's have been used
            value_ring.wait(at)
            keys = (first + i) * self.k.key_tile
            for turn in cutlass.range_constexpr(-(-self.k.key_tile // self.threads)):
                key = thread + turn * self.threads
                if key < self.k.key_tile:
                    self.compute_key(memory, key, at.stage, keys + key < end)
            # every thread arrives for itself: racecheck does not see that one arrives for its warp
            memory.values_ready[at.stage].arrive()
            fence_warp()
            if lane == 0:
                key_ring.empty[at.stage].arrive()
                value_ring.empty[at.stage].arrive()
            at = key_ring.next(at)

    @cute.jit
    def wait(self, memory, at):
        """Wait until the values of a stage are ready."""
        if cutlass.const_expr(self.threads > 0):
            memory.values_ready[at.stage].wait(at.phase)

    def compute_key(self, memory: Memory, key: Any, stage: Any, exists: Any) -> None:
        """Compute the values of one key.
        Behind the last key they are 1: weights are 0 there, but the value of a missing key may be 0
        as well, and 0 / 0 would be NaN."""
        totals = {r.value: self.reduce(memory, stage, key, r) for r in self.plan.key_reductions}
        for n, e in enumerate(self.plan.key_values.values()):
            value = e.evaluate([totals[i] for i in e.leaves], self.k.math)
            slot = memory.key_values + self.slot(n, stage, key)
            put(slot, choose(exists, value, 1.0))

    @cute.jit
    def reduce(self, memory, stage, key, reduction: cutlass.Constexpr):
        """Reduce one key's row to an fp32 scalar."""
        whole = self.plan.tile(
            self.plan.inner if reduction.operand == self.plan.key_load else self.plan.columns
        )
        total = Float32(NEUTRAL[reduction.op])
        for first in cutlass.range_constexpr(0, whole // PIECE, BATCH):
            pieces = [
                self.read(memory, reduction.operand, stage, key, piece)
                for piece in range(first, min(first + BATCH, whole // PIECE))
            ]
            # without this fence the compiler issues every read just before its use: 26.6 us at
            # 16x256 rows and 4096 keys, 18.2 with it
            fence_reads()
            for piece in pieces:
                v = reduction.source.evaluate([piece.load().to(Float32)], self.k.math)
                total = folded(total, v, reduction.op)
        return total * reduction.scale

    def read(self, memory: Memory, operand: int, stage: Any, key: Any, piece: Any) -> cute.Tensor:
        """Read eight elements of a key's row."""
        if self.has_rows(operand):
            return fetched(self.linear(memory, operand, stage, key, piece))
        register = fragment(PIECE, self.k.dtype)
        for i in range(PIECE):
            register[i] = self.across(memory, operand, stage, key, piece * PIECE + i)[0]
        return register

    def has_rows(self, operand: int) -> bool:
        """True if the elements of a key are contiguous; otherwise the keys are."""
        return self.k.inner_major if operand == self.plan.key_load else self.k.column_major

    def ring(self, memory: Memory, operand: int, stage: Any) -> tuple[cute.Pointer, int]:
        """Start of a stage's tile of an operand, and the (padded) length of a key's row."""
        is_key = operand == self.plan.key_load
        tensor = memory.keys if is_key else memory.values
        length = self.k.depth if is_key else self.k.width
        pointer = cute.recast_ptr(tensor.iterator, dtype=self.k.dtype)
        return pointer + cute.assume(stage * self.k.key_tile * length, divby=PIECE), length

    def linear(self, memory: Memory, operand: int, stage: Any, key: Any, piece: Any) -> cute.Tensor:
        """View of eight contiguous elements of a key.
        Rows of one chunk each, all keys of a chunk one after the other."""
        pointer, length = self.ring(memory, operand, stage)
        chunk = chunk_of(length)
        per = chunk // PIECE
        row = (piece // per) * self.k.key_tile + key
        inside = byte_piece(length, piece % per, key)
        offset = cute.assume(row * chunk + inside * PIECE, divby=PIECE)
        return neighbours(pointer + offset, PIECE)

    def across(self, memory: Memory, operand: int, stage: Any, key: Any, index: Any) -> cute.Tensor:
        """View of one element of a key in a tile whose chunks hold one element of 64 keys."""
        pointer, length = self.ring(memory, operand, stage)
        chunk = chunk_of(self.k.key_tile)
        row = (key // chunk) * length + index
        inside = byte_piece(self.k.key_tile, key % chunk // PIECE, index)
        offset = row * chunk + inside * PIECE + key % PIECE
        return one(pointer + offset)

    def pair(self, memory: Memory, operation: int, stage: Any, key: Any) -> cute.Tensor:
        """Values of two neighbouring keys, the first of which is even."""
        offset = cute.assume(self.slot(self.order.index(operation), stage, key), divby=2)
        return fetched(neighbours(memory.key_values + offset, 2))

    @cute.jit
    def clean(self, here, stage, keys, rows):
        """Set values behind the last key to 0.
        Uninitialised memory may hold NaN, and 0 times NaN is NaN. Of two warpgroups that walk over
        the same tiles the first one does. The second one waits for it, and not the other way round:
        the first may have to end its turn."""
        if cutlass.const_expr(self.clears):
            if keys + self.k.key_tile > rows.end:
                if cutlass.const_expr(self.k.row_groups == 1):
                    self.clear_tile(here, stage, keys, rows)
                else:
                    cleared = Meeting(CLEARED_BARRIER, 128 * self.k.row_groups)
                    if here.group == 0:
                        self.clear_tile(here, stage, keys, rows)
                        cleared.arrive()
                    else:
                        cleared.meet()

    @cute.jit
    def clear_tile(self, here, stage, keys, rows):
        """Clear the values of a stage behind the last key; by a warpgroup."""
        if here.member < self.k.key_tile and keys + here.member >= rows.end:
            self.clear(here.memory, stage, here.member)
        fence_warp()
        here.group_meets()

    def clear(self, memory: Memory, stage: Any, key: Any) -> None:
        """Set the values of one key to 0."""
        zeros = filled(PIECE, 0.0, self.k.dtype)
        load = self.plan.value_load
        for piece in range(self.k.width // PIECE):
            if self.has_rows(load):
                cute.autovec_copy(zeros, self.linear(memory, load, stage, key, piece))
            else:
                for i in range(PIECE):
                    self.across(memory, load, stage, key, piece * PIECE + i)[0] = zeros[i]
