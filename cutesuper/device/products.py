"""Tensor-core products: who issues them, where their accumulators live, and how others get at them.

Kernels ask `device.architecture` for those that they are compiled for, and know nothing else of it.
What an architecture must answer is `Products` and `Product`; behind them a consumer
thread always sees accumulators as fragments in the order that `device.hopper.products` describes,
wherever the instruction leaves them.

All consumer warps of a block `open` the products, and `close` them after the last `fetch`. Between
them they multiply in groups: `begin`; products inside of `issue`; `end`; `wait`.

One more warp, the issuer, may issue them for all warpgroups. It has the `issuers` in place of
`open`. For every group both call `begin` and `end`; only the issuer runs what is inside of `issue`,
and only consumers `wait`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32

from cutesuper.device.barriers import Barrier, Barriers

#: first named barrier behind those that products need on any architecture
FREE_BARRIER = 10


@dataclass(frozen=True)
class Consumers:
    """The warpgroups that multiply, the first ones of a block.

    Attributes:
        warpgroups: number of them.
        joint: true if products are those of two blocks, a cluster: each has the first operand of
            its own results, and half of the rows of the second one. Only where a target says so
            (`Target.joint`); with first operands of two blocks of rows.
        together: true if two warpgroups multiply with one instruction, whose rows they share: 16
            of the first one and 16 of the second in turn. Only where a target says so
            (`Target.doubled`).
        issuer: true if another warp issues the products of all of them. Only where accumulators
            have a memory of their own (`Target.accumulators`); not joint, nor together.
    """

    warpgroups: int
    joint: bool = False
    together: bool = False
    issuer: bool = False


class Product(ABC):
    """A product of two operands with fp32 accumulators, as one shape of the instruction.
    A step takes 32 bytes along the contracted label."""

    @abstractmethod
    def first(self, memory: cute.Tensor) -> cute.Tensor:
        """The first operand in shared memory as the instruction takes it: ``[M, 1, step, ...]``."""

    @abstractmethod
    def second(self, memory: cute.Tensor) -> cute.Tensor:
        """The second operand in shared memory: ``[N, 1, step, ...]``."""

    @abstractmethod
    def accumulator(self, columns: int) -> Any:
        """fp32 accumulators ``[M, columns]``, not initialised; wherever they are."""

    @abstractmethod
    def accumulate(self, on: bool) -> None:
        """Add products to the accumulators from here on, or replace them.
        It cannot change inside a run-time loop."""

    @abstractmethod
    def packed(self, words: cute.Tensor) -> Any:
        """A first operand that is in registers, for products with ``registers`` only.
        ``words`` are its 16-bit numbers in the order of accumulators, two in each."""

    @abstractmethod
    def put(self, operand: Any, words: cute.Tensor) -> None:
        """Bring words that have changed to where products read them."""

    @abstractmethod
    def multiply(self, accumulator: Any, first: cute.Tensor, second: cute.Tensor) -> None:
        """Issue one step along the contracted label; inside of `Products.issue`."""


class GatheredProduct(Product):
    """A product of two fp32 operands as TF32; threads may bring the first one to registers."""

    @abstractmethod
    def gathered(self, memory: cute.Tensor, step: int, slot: Any, thread: Any) -> list[Float32]:
        """A thread's numbers of a step of the first operand in shared memory, for `bring`.
        Whichever of its labels is contiguous."""

    @abstractmethod
    def bring(self, steps: list[list[Float32]]) -> list[Any]:
        """Bring a thread's numbers of some steps to where `multiply` and `replace` take them.
        They take the place of those before, whose products have been waited for."""

    @abstractmethod
    def replace(self, accumulator: Any, first: Any, second: Any) -> None:
        """Issue one step whose products take the place of the accumulators."""

    @abstractmethod
    def settle(self, accumulator: Any) -> None:
        """Keep reads of accumulators behind the wait for them."""


class AllWarps(nullcontext[None]):
    """Statements that all warps run; the DSL asks for the attribute."""

    __dsl_trace_time_ctxmgr__ = True


class Products(ABC):
    """The tensor cores of an architecture; a frozen dataclass, which run-time loops may use.

    Attributes:
        block: rows (M) of an instruction.
        doubles: true if an instruction may take two blocks of rows, too.
    """

    block: ClassVar[int]
    doubles: ClassVar[bool] = False

    @abstractmethod
    def product(
        self,
        dtype: Any,
        columns: int,
        along: tuple[bool, bool],
        registers: bool = False,
        double: bool = False,
    ) -> Product:
        """A product with ``columns`` as its N extent.

        Args:
            dtype: of both operands.
            columns: elements of the second operand's free label.
            along: for each operand, true if the contracted label is its contiguous one.
            registers: true if threads bring the first operand.
            double: true if the first operand has two blocks of rows, 16 of one and 16 of the other
                in turn; only where the architecture `doubles`.
        """

    @abstractmethod
    def allocate(self, alloc: cutlass.memory.SmemAllocator, consumers: Consumers) -> Any:
        """Allocate the shared memory of their products."""

    @abstractmethod
    def barriers(self, memory: Any) -> list[Barriers]:
        """Barriers of that memory; they are initialised with the others of the block."""

    @abstractmethod
    def open(self, memory: Any, consumers: Consumers, registers: int, dependent: bool) -> Products:
        """Take room for ``registers`` accumulators of each thread of the consumer warpgroups.
        The result multiplies.

        Args:
            memory: of `allocate`.
            consumers: the same as there.
            registers: 32-bit numbers of a thread that products read and write.
            dependent: true if the launch depends on the one before, which needs such room too.
        """

    def issuers(self, memory: Any, consumers: Consumers, registers: int) -> Sequence[Products]:
        """The products of each warpgroup, as its issuer has them; called where consumers `open`."""
        raise NotImplementedError("warpgroups issue the products of their own registers")

    def release(self, barrier: Barrier, blocks: int) -> None:
        """Arrive once all products that this issuer has issued have read their operands.
        On the barriers of the first ``blocks`` of the cluster."""
        raise NotImplementedError("warpgroups issue the products of their own registers")

    @abstractmethod
    def close(self) -> None:
        """Give that room back."""

    @abstractmethod
    def issue(self) -> AbstractContextManager[Any]:
        """The block of statements that only threads run that issue products."""

    @abstractmethod
    def clear(self, accumulator: Any) -> None:
        """Set accumulators to zero."""

    def zeroed(self, product: Product, columns: int, rows: int, blocks: int) -> list[list[Any]]:
        """Accumulators of zeros: ``blocks`` in each of the ``rows``, with this N extent."""
        found = [[product.accumulator(columns) for _ in range(blocks)] for _ in range(rows)]
        for row in found:
            for accumulator in row:
                self.clear(accumulator)
        return found

    @abstractmethod
    def registers(self, accumulator: Any) -> cute.Tensor:
        """A thread's fragment for accumulators."""

    @abstractmethod
    def fetch(self, accumulator: Any, to: cute.Tensor) -> None:
        """Bring accumulators whose products have been waited for to their fragment."""

    @abstractmethod
    def total(self, accumulator: Any) -> cute.Tensor:
        """A fragment of zeros for accumulators, which may be changed between groups of products."""

    @abstractmethod
    def add(self, accumulator: Any, total: cute.Tensor) -> None:
        """Add the products since the last call to it; they have been waited for."""

    def fetched(self, accumulators: list[list[Any]]) -> list[list[cute.Tensor]]:
        """Fragments of accumulators, one of each block of rows.
        Their products have been waited for."""
        found = [[self.registers(a) for a in row] for row in accumulators]
        for row, fragments in zip(accumulators, found, strict=True):
            for accumulator, fragment in zip(row, fragments, strict=True):
                self.fetch(accumulator, fragment)
        return found

    @abstractmethod
    def begin(self) -> None:
        """Order accesses to accumulators and registers before the products to come."""

    @abstractmethod
    def end(self) -> None:
        """End a group of products."""

    @abstractmethod
    def wait(self, left: int) -> None:
        """Wait for all groups but the last ``left``.
        They have read their operands, and their results are there."""

    @abstractmethod
    def row(self, block: Any, half: int, warp: Any, lane: Any) -> Any:
        """The row (M) of one half of a thread's accumulators, of a block of rows."""
