"""Values of keys: reductions of the tiles of keys and values that a warpgroup multiplies.

``rms(V)`` scales the weight of every key by the root of its mean square. The tile is in shared
memory already: a thread reads one key's row, 16 bytes at a time, and leaves the value where all
threads of the warpgroup find it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from cutesuper.device.math import choose, nan_max
from cutesuper.device.memory import element, fence_reads
from cutesuper.lower.attention_rows import PIECE, byte_piece, chunk_of
from cutesuper.schedule.attention import Reduction

if TYPE_CHECKING:
    from cutesuper.lower.attention import AttentionKernel

#: named barrier of the first warpgroup; the others follow
GROUP_BARRIER = 1


class KeyValues:
    """Reads tiles with ordinary loads; also clears values that lie behind a sequence's length."""

    def __init__(self, kernel: AttentionKernel) -> None:
        self.k = kernel
        self.plan = plan = kernel.plan
        self.clears = any(m.lengths is not None for m in plan.masks)
        self.order = list(plan.key_values)
        of_keys = {r.value for r in plan.key_reductions if r.operand == plan.key_load}
        #: values that need nothing but the tile of keys, and all others
        self.early = [i for i, e in plan.key_values.items() if set(e.leaves) <= of_keys]
        self.late = [i for i in plan.key_values if i not in self.early]

    @property
    def reads(self) -> bool:
        """Whether warps read or write a stage other than through the tensor cores."""
        return self.clears or bool(self.order)

    def allocate(self, alloc: Any, smem: dict[str, Any]) -> None:
        """Every value of every key in the ring, twice."""
        count = 2 * len(self.order) * self.k.key_tile * self.k.stages
        smem["key_values"] = alloc.allocate_array(Float32, max(4, count), byte_alignment=16)

    def round(self, stage: Any, phase: Any) -> Any:
        """Which tile's values: those of the ring's last round may still be read when the next tile
        of keys is there, because a stage of keys is given back before its weights are computed."""
        return stage + phase * self.k.stages

    def slot(self, n: int, tile: Any, key: Any) -> Any:
        """Where a value lies; the tile is a number of `round`."""
        return (tile * len(self.order) + n) * self.k.key_tile + key

    @cute.jit
    def of_keys(self, smem, thread, group, stage, phase, keys, rows):
        """What needs the tile of keys only, while it is multiplied."""
        if cutlass.const_expr(len(self.early) > 0):
            self.compute(smem, thread, stage, phase, keys, rows, self.early)
            self.meet(group)

    @cute.jit
    def of_values(self, smem, thread, group, stage, phase, keys, rows):
        """The rest."""
        if cutlass.const_expr(len(self.late) > 0):
            cute.arch.mbarrier_wait(smem["values_full"] + stage, phase)
            self.compute(smem, thread, stage, phase, keys, rows, self.late)
            self.meet(group)

    @cute.jit
    def meet(self, group):
        """All threads of a warpgroup."""
        cute.arch.barrier(barrier_id=GROUP_BARRIER + group, number_of_threads=128)

    @cute.jit
    def compute(self, smem, thread, stage, phase, keys, rows, wanted: cutlass.Constexpr):
        """Some values of a tile. Behind the last key they are 1: weights are 0 there, and what was
        computed of no key may be 0 as well, of which 0 / 0 would be NaN."""
        if thread < self.k.key_tile:
            tile, exists = self.round(stage, phase), keys + thread < rows["end"]
            self.compute_key(smem, thread, stage, tile, exists, wanted)

    def compute_key(
        self, smem: dict[str, Any], key: Any, stage: Any, tile: Any, exists: Any,
        wanted: list[int],
    ) -> None:
        """The values of one key."""
        needed = {i for w in wanted for i in self.plan.key_values[w].leaves}
        totals = {
            r.value: self.reduce(smem, stage, key, r)
            for r in self.plan.key_reductions if r.value in needed
        }
        for w in wanted:
            e = self.plan.key_values[w]
            value = e.evaluate([totals[i] for i in e.leaves], self.k.math)
            slot = smem["key_values"] + self.slot(self.order.index(w), tile, key)
            cute.make_tensor(slot, cute.make_layout(1))[0] = choose(exists, value, 1.0)

    @cute.jit
    def reduce(self, smem, stage, key, reduction: cutlass.Constexpr):
        """One key's row, reduced; two pieces at a time, since scores and results live meanwhile."""
        whole = self.plan.tile(
            self.plan.inner if reduction.operand == self.plan.key_load else self.plan.columns
        )
        total = Float32(0.0 if reduction.op == "sum" else -float("inf"))
        for piece in cutlass.range(whole // PIECE, unroll=2):
            total = self.add(total, smem, stage, key, piece, reduction)
        return total * reduction.scale

    def add(
        self, total: Any, smem: dict[str, Any], stage: Any, key: Any, piece: Any,
        reduction: Reduction,
    ) -> Any:
        """Eight elements more."""
        x = self.read(smem, reduction.operand, stage, key, piece)
        v = reduction.source.evaluate([x], self.k.math)
        if reduction.op == "max":
            lowest = Float32(-float("inf"))
            return nan_max(total, v.reduce(cute.ReductionOp.MAX, lowest, 0))
        return total + v.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)

    def read(self, smem: dict[str, Any], operand: int, stage: Any, key: Any, piece: Any) -> Any:
        """Eight elements of a key's row."""
        register = cute.make_rmem_tensor(cute.make_layout(PIECE), self.k.dtype)
        if self.has_rows(operand):
            cute.autovec_copy(self.linear(smem, operand, stage, key, piece), register)
        else:
            for i in range(PIECE):
                register[i] = self.across(smem, operand, stage, key, piece * PIECE + i)[0]
        return register.load().to(Float32)

    def has_rows(self, operand: int) -> bool:
        """Whether the elements of a key lie next to each other; otherwise keys do."""
        return self.k.inner_major if operand == self.plan.key_load else self.k.column_major

    def ring(self, smem: dict[str, Any], operand: int, stage: Any) -> tuple[cute.Pointer, int]:
        """Where the tiles of an operand begin in a stage, and the (padded) length of a key's row."""
        name, length = ("keys", self.k.depth) if operand == self.plan.key_load else (
            "values", self.k.width
        )
        pointer = cute.recast_ptr(smem[name].iterator, dtype=self.k.dtype)
        return pointer + cute.assume(stage * self.k.key_tile * length, divby=PIECE), length

    def linear(
        self, smem: dict[str, Any], operand: int, stage: Any, key: Any, piece: Any
    ) -> cute.Tensor:
        """Where they lie: rows of a chunk each, all keys of a chunk one after the other."""
        pointer, length = self.ring(smem, operand, stage)
        chunk = chunk_of(length)
        per = chunk // PIECE
        row = (piece // per) * self.k.key_tile + key
        inside = byte_piece(length, piece % per, key)
        offset = cute.assume(row * chunk + inside * PIECE, divby=PIECE)
        return cute.make_tensor(pointer + offset, cute.make_layout(PIECE))

    def across(
        self, smem: dict[str, Any], operand: int, stage: Any, key: Any, index: Any
    ) -> cute.Tensor:
        """Where one of them lies if a chunk has one element of 64 keys."""
        pointer, length = self.ring(smem, operand, stage)
        chunk = chunk_of(self.k.key_tile)
        row = (key // chunk) * length + index
        inside = byte_piece(self.k.key_tile, key % chunk // PIECE, index)
        offset = row * chunk + inside * PIECE + key % PIECE
        return cute.make_tensor(pointer + offset, cute.make_layout(1))

    def value(self, smem: dict[str, Any], operation: int, tile: Any, key: Any) -> Any:
        """A value of a key. Read where it is used: a thread's 32 values of a tile of 128 keys kept
        in registers took 184 to 504 bytes of stack."""
        n = self.order.index(operation)
        return element(smem["key_values"], self.slot(n, tile, key))

    @cute.jit
    def clean(self, smem, thread, group, stage, keys, rows):
        """Set values behind the last key to 0: memory that nobody has written may hold NaN, and
        0 times NaN is NaN."""
        if cutlass.const_expr(self.clears):
            if keys + self.k.key_tile > rows["end"]:
                if thread < self.k.key_tile and keys + thread >= rows["end"]:
                    self.clear(smem, stage, thread)
                fence_reads()
                self.meet(group)

    def clear(self, smem: dict[str, Any], stage: Any, key: Any) -> None:
        """Set the values of one key to 0."""
        zeros = cute.make_rmem_tensor(cute.make_layout(PIECE), self.k.dtype)
        zeros.fill(0.0)
        load = self.plan.value_load
        for piece in range(self.k.width // PIECE):
            if self.has_rows(load):
                cute.autovec_copy(zeros, self.linear(smem, load, stage, key, piece))
            else:
                for i in range(PIECE):
                    self.across(smem, load, stage, key, piece * PIECE + i)[0] = zeros[i]
