"""Tensor-core products of Hopper: WGMMA, issued by the warpgroup that has the accumulators.
`device.hopper.tf32` has the statements for fp32 operands.

The first operand has 64 rows (M) and lies in shared memory or registers, the second one has 8 to
256 (N). Thread t of warp w has, of accumulators ``[M, N]``, value v at row
``16 w + 8 (v / 2 % 2) + t / 4`` and column ``8 (v / 4) + 2 (t % 4) + v % 2``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass.cute as cute
import cutlass.memory
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from cutesuper.device.barriers import Barriers
from cutesuper.device.hopper import tf32
from cutesuper.device.products import AllWarps, Consumers, GatheredProduct, Product, Products
from cutesuper.device.tf32 import gathered


@dataclass(frozen=True)
class WarpgroupProduct(Product):
    """One shape of WGMMA.

    Attributes:
        mma: the instruction; changed by `accumulate`.
        rows: of the first operand.
        dtype: of the operands.
    """

    mma: cute.TiledMma
    rows: int
    dtype: Any

    def first(self, memory: cute.Tensor) -> cute.Tensor:
        return self.mma.make_fragment_A(self.mma.get_slice(0).partition_A(memory))

    def second(self, memory: cute.Tensor) -> cute.Tensor:
        return self.mma.make_fragment_B(self.mma.get_slice(0).partition_B(memory))

    def accumulator(self, columns: int) -> cute.Tensor:
        return cute.make_rmem_tensor(self.mma.partition_shape_C((self.rows, columns)), Float32)

    def accumulate(self, on: bool) -> None:
        self.mma.set(warpgroup.Field.ACCUMULATE, on)

    def packed(self, words: cute.Tensor) -> cute.Tensor:
        # accumulators are 2 columns, row and row + 8, blocks of 8 columns: 8 numbers for 16 columns
        count = cute.size(words)
        layout = cute.make_layout(((2, 2, 2), 1, count // 4), stride=((1, 2, 4), 0, 8))
        return cute.make_tensor(cute.recast_ptr(words.iterator, dtype=self.dtype), layout)

    def put(self, operand: cute.Tensor, words: cute.Tensor) -> None:
        pass

    def multiply(self, accumulator: cute.Tensor, first: cute.Tensor, second: cute.Tensor) -> None:
        cute.gemm(self.mma, accumulator, first, second, accumulator)


@dataclass(frozen=True)
class RoundedProduct(GatheredProduct):
    """One shape of WGMMA for TF32 operands.

    Attributes:
        rows, columns: of the first and the second operand (M, N).
    """

    rows: int
    columns: int

    def first(self, memory: cute.Tensor) -> Any:
        return tf32.Steps(memory)

    def second(self, memory: cute.Tensor) -> Any:
        return tf32.Steps(memory)

    def gathered(self, memory: cute.Tensor, step: int, slot: Any, thread: Any) -> list[Float32]:
        return gathered(memory, step, slot, thread)

    def bring(self, steps: list[list[Float32]]) -> list[Any]:
        return steps

    def accumulator(self, columns: int) -> cute.Tensor:
        assert columns == self.columns
        return cute.make_rmem_tensor(cute.make_layout(((2, 2, columns // 8), 1, 1)), Float32)

    def accumulate(self, on: bool) -> None:
        assert on, "`replace` is another product"

    def packed(self, words: cute.Tensor) -> Any:
        raise NotImplementedError("fp32 numbers are gathered, not packed")

    def put(self, operand: Any, words: cute.Tensor) -> None:
        raise NotImplementedError("fp32 numbers are gathered, not packed")

    def multiply(self, accumulator: cute.Tensor, first: Any, second: Any) -> None:
        tf32.issue(accumulator, first, second, True)

    def replace(self, accumulator: cute.Tensor, first: Any, second: Any) -> None:
        tf32.issue(accumulator, first, second, False)

    def settle(self, accumulator: cute.Tensor) -> None:
        tf32.updated(accumulator, "", [], [])


@dataclass(frozen=True)
class WarpgroupProducts(Products):
    """WGMMA: accumulators are registers, which the code behind the products reads in place."""

    block: ClassVar[int] = 64

    def product(
        self,
        dtype: Any,
        columns: int,
        along: tuple[bool, bool],
        registers: bool = False,
        double: bool = False,
    ) -> Product:
        assert not double
        if dtype is Float32:
            assert along[1]
            return RoundedProduct(self.block, columns)
        first, second = (OperandMajorMode.K if k else OperandMajorMode.MN for k in along)
        source = (warpgroup.OperandSource.RMEM,) if registers else ()
        mma = sm90.make_trivial_tiled_mma(
            dtype, dtype, first, second, Float32, (1, 1, 1), (self.block, columns), *source
        )
        return WarpgroupProduct(mma, self.block, dtype)

    def allocate(self, alloc: cutlass.memory.SmemAllocator, consumers: Consumers) -> None:
        del alloc, consumers

    def barriers(self, memory: None) -> list[Barriers]:
        return []

    def open(
        self, memory: None, consumers: Consumers, registers: int, dependent: bool
    ) -> WarpgroupProducts:
        assert not consumers.joint and not consumers.together
        return self

    def close(self) -> None:
        pass

    def issue(self) -> AllWarps:
        return AllWarps()

    def clear(self, accumulator: cute.Tensor) -> None:
        accumulator.fill(0.0)

    def registers(self, accumulator: cute.Tensor) -> cute.Tensor:
        return accumulator

    def fetch(self, accumulator: cute.Tensor, to: cute.Tensor) -> None:
        assert to is accumulator

    def total(self, accumulator: cute.Tensor) -> cute.Tensor:
        accumulator.fill(0.0)
        return accumulator

    def add(self, accumulator: cute.Tensor, total: cute.Tensor) -> None:
        assert total is accumulator

    def begin(self) -> None:
        warpgroup.fence()

    def end(self) -> None:
        warpgroup.commit_group()

    def wait(self, left: int) -> None:
        warpgroup.wait_group(left)

    def row(self, block: Any, half: int, warp: Any, lane: Any) -> Any:
        return block * self.block + (warp % 4) * 16 + half * 8 + lane // 4
