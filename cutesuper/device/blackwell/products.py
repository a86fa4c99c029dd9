"""Tensor-core products of Blackwell: tcgen05, whose accumulators are columns of tensor memory.

The first operand has 64 or 128 rows (M) and lies in shared memory, as the second one, which has 8
to 256 (N). The first warp of a consumer warpgroup issues its products, one thread of it each; a
group of products ends with a commit, an arrival on a barrier once all of them are done. An
accumulator ``[64, N]`` takes N columns of tensor memory, 16 lanes of each warp. Loads of 16 lanes
and 256 bits leave it in the order of WGMMA (`device.hopper.products`).

An accumulator ``[128, N]`` has all 32 lanes of each warp. If 16 rows of one block and 16 of another
take turns in the first operand, the lower lanes of all warps are an accumulator of the first block,
and the upper ones of the second. Such products run at twice the rate. Two warpgroups may have 64
rows of them each: warps of both reach the same 32 lanes, of which the first has the lower ones and
the second the upper ones. They wait for each other before the first one issues for both.

Products of two blocks of a cluster, the leader and its peer, may be one instruction of 256 rows. It
reads 128 rows of the first operand and half of the second one from the shared memory of each, and
leaves each the accumulators of its rows, at the same columns. The leader issues it once the peer
has announced that its part is there and its accumulators are free; the commit arrives at both.

A warp of its own may issue the products of all warpgroups (`Consumers.issuer`). These announce that
they have fetched the accumulators, and wait for the last commit; commits also tell the loads that
stages are free, so that consumers have nothing to do with stages.

Source: NVIDIA, Parallel Thread Execution ISA 8.8, tcgen05.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import cutlass
import cutlass.cute as cute
import cutlass.memory
import cutlass.utils.blackwell_helpers as sm100
from cutlass import Float32, Int16, Int32
from cutlass._mlir.dialects import llvm, scf
from cutlass.cute.arch.elect import IfOpRegion
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
from cutlass.cutlass_dsl import T, dsl_user_op

from cutesuper.device.barriers import Barrier, Barriers, Meeting
from cutesuper.device.cluster import rank_in_cluster
from cutesuper.device.fragments import filled, fragment
from cutesuper.device.launch import wait_for_predecessor
from cutesuper.device.products import AllWarps, Consumers, GatheredProduct, Product, Products
from cutesuper.device.tf32 import STEP, gathered

#: named barriers of this module: of all consumers, and the first of the warpgroups, which have one
#: each
ALL_BARRIER, GROUP_BARRIER = 7, 8
#: fewest columns of tensor memory that a block can have; it has a power of two
LEAST_COLUMNS = 32
#: of a multiprocessor: blocks whose products are joint have all of them, so the same ones
ALL_COLUMNS = 512
#: most columns of one statement: one of 256 needs more registers than each of 512 threads has
MOST_LOADED = 128
#: place of the lane in an address of tensor memory, and for the 32 lanes of a warp
LANE_SHIFT, LANES_SHIFT = 16, 21
#: groups of products whose ends are told apart; a power of two
GROUPS = 4


def before_meeting() -> None:
    """Order products and accesses to tensor memory before the next barrier, for other threads."""
    cute.arch.inline_ptx("tcgen05.fence::before_thread_sync;")


def after_meeting() -> None:
    """Order products and accesses to tensor memory behind the last barrier."""
    cute.arch.inline_ptx("tcgen05.fence::after_thread_sync;")


@dataclass(frozen=True)
class TensorMemory:
    """The shared memory that the products of a block need.

    Attributes:
        address: of the columns of tensor memory (Int32).
        done: barriers of the groups of each warpgroup.
        peer: the same, at which the peer announces its part of a group; None if products are not
            joint.
        left: at which the other block says that it needs no tensor memory any more; None likewise.
    """

    address: cute.Pointer
    done: Barriers
    peer: Barriers | None = None
    left: Barriers | None = None


@dataclass(frozen=True)
class Accumulator:
    """fp32 accumulators of one or two blocks of 64 rows in tensor memory.

    Attributes:
        blocks: of rows, each in 16 lanes of every warp.
        columns: of the accumulator.
        tensor: as products take it.
        filled: one register: 0 if the next product replaces what is there (Int32).
    """

    blocks: int
    columns: int
    tensor: cute.Tensor
    filled: cute.Tensor


@dataclass(frozen=True)
class Open:
    """Tensor memory as the consumers use it.

    Attributes:
        memory: of the block in shared memory.
        consumers: the warpgroups.
        base: first column of this thread's warpgroup (Float32 pointer).
        columns: allocated for the block.
        warp: index in the block, uniform; None in an issuer.
        rank: in the pair whose products are joint; None if they are not.
        issued: the warpgroup whose products this warp issues; None in the warps of consumers.
        ended: one register: groups of products that have ended (Int32).
        taken: columns that accumulators of this warpgroup have, while tracing.
    """

    memory: TensorMemory
    consumers: Consumers
    base: cute.Pointer
    columns: int
    warp: Any
    rank: Any
    issued: int | None
    ended: cute.Tensor
    taken: list[int] = field(default_factory=list[int])

    @property
    def group(self) -> Any:
        """Index among the warpgroups with products of their own."""
        if self.consumers.together:
            return 0
        return self.warp // 4 if self.issued is None else self.issued

    def take(self, columns: int) -> cute.Pointer:
        """The next columns of this warpgroup."""
        first = sum(self.taken)
        self.taken.append(columns)
        return self.base + first

    def address(self, place: cute.Pointer) -> Any:
        """A column as this warp reaches it."""
        found = place.toint() + (self.warp % 4 << LANES_SHIFT)
        return found + (self.warp // 4 * 16 << LANE_SHIFT) if self.consumers.together else found


@dataclass(frozen=True)
class TensorProduct(Product):
    """One shape of tcgen05.mma.

    Attributes:
        cores: which issue it.
        dtype: of the operands.
        majors: of the operands.
        columns: of the second operand.
        source: of the first operand: shared or tensor memory.
        blocks: of 64 rows, of a warpgroup.
        replaces: True in a list if products replace accumulators; changed by `accumulate`.
    """

    cores: TensorProducts
    dtype: Any
    majors: tuple[Any, Any]
    columns: int
    source: tcgen05.OperandSource
    blocks: int = 1
    replaces: list[bool] = field(default_factory=lambda: [False])

    @property
    def rows(self) -> int:
        """Rows of the instruction, of a block of threads."""
        return self.blocks * self.cores.block * (1 + self.cores.opened().consumers.together)

    def instruction(self, joint: bool = False) -> cute.TiledMma:
        """The instruction, made anew each time, since a flag of a run-time loop stays inside.

        ``joint``: that of two blocks, instead of this block's part of it.
        """
        group = tcgen05.CtaGroup.TWO if joint else tcgen05.CtaGroup.ONE
        part = self.rows, self.columns // (1 + self.cores.joint)
        shape = (2 * self.rows, self.columns) if joint else part
        return sm100.make_trivial_tiled_mma(
            self.dtype, self.dtype, *self.majors, Float32, group, shape, self.source
        )

    def first(self, memory: cute.Tensor) -> cute.Tensor:
        mma = self.instruction()
        return mma.make_fragment_A(mma.get_slice(0).partition_A(memory))

    def second(self, memory: cute.Tensor) -> cute.Tensor:
        mma = self.instruction()
        return mma.make_fragment_B(mma.get_slice(0).partition_B(memory))

    def accumulator(self, columns: int) -> Accumulator:
        mma, blocks = self.instruction(self.cores.joint), 1 + self.cores.joint
        one = mma.make_fragment_C(mma.partition_shape_C((self.rows * blocks, self.columns))).layout
        # side by side; the layout for all of them has every second one in other lanes
        shape = (one.shape[0], 1, columns // self.columns)
        layout = cute.make_layout(shape, stride=(one.stride[0], 0, self.columns))
        tensor = cute.make_tensor(self.cores.opened().take(columns), layout)
        return Accumulator(self.blocks, columns, tensor, filled(1, 0, Int32))

    def accumulate(self, on: bool) -> None:
        self.replaces[0] = not on

    def packed(self, words: cute.Tensor) -> cute.Tensor:
        columns, mma = 2 * cute.size(words), self.instruction()  # of two numbers
        shape = mma.partition_shape_A((self.rows, 2 * columns))
        base = self.cores.opened().take(columns)
        return cute.make_tensor(
            cute.recast_ptr(base, dtype=self.dtype), mma.make_fragment_A(shape).layout
        )

    def put(self, operand: cute.Tensor, words: cute.Tensor) -> None:
        place = cute.recast_ptr(operand.iterator, dtype=Float32)
        store([words[n] for n in range(cute.size(words))], self.cores.opened().address(place))

    def multiply(self, accumulator: Accumulator, first: Any, second: Any) -> None:
        mma = self.instruction(self.cores.joint)
        adds = False if self.replaces[0] else accumulator.filled[0] != 0
        mma.set(tcgen05.Field.ACCUMULATE, adds)
        cute.gemm(mma, accumulator.tensor, first, second, accumulator.tensor)
        accumulator.filled[0] = Int32(1)


@dataclass(frozen=True)
class RoundedProduct(TensorProduct, GatheredProduct):
    """The same for TF32 operands. What threads gather goes to tensor memory.

    Attributes:
        place: in a list, the columns that `bring` has taken.
    """

    place: list[cute.Pointer] = field(default_factory=list[cute.Pointer])

    def gathered(self, memory: cute.Tensor, step: int, slot: Any, thread: Any) -> list[Float32]:
        return gathered(memory, step, slot, thread)

    def bring(self, steps: list[list[Float32]]) -> list[Any]:
        cores, mma = self.cores.opened(), self.instruction()
        if not self.place:
            self.place.append(cores.take(STEP * len(steps)))
        [place] = self.place
        store([word for words in steps for word in words], cores.address(place))
        shape = mma.partition_shape_A((self.cores.block, STEP * len(steps)))
        first = cute.recast_ptr(place, dtype=self.dtype)
        operand = cute.make_tensor(first, mma.make_fragment_A(shape).layout)
        return [operand[None, None, n] for n in range(len(steps))]

    def replace(self, accumulator: Accumulator, first: Any, second: Any) -> None:
        accumulator.filled[0] = Int32(0)
        self.multiply(accumulator, first, second)

    def settle(self, accumulator: Accumulator) -> None:
        pass


@dataclass(frozen=True)
class TensorProducts(Products):
    """tcgen05: the first warp of each consumer warpgroup issues, or of two that multiply together.
    Or a warp of its own does. Consumer warps are the first of the block.

    Attributes:
        state: tensor memory; None before `open`.
    """

    state: Open | None = None
    block: ClassVar[int] = 64
    doubles: ClassVar[bool] = True

    def opened(self) -> Open:
        """Tensor memory after `open`."""
        assert self.state is not None, "open the products before they are used"
        return self.state

    @property
    def joint(self) -> bool:
        """True if they are those of two blocks."""
        return self.opened().consumers.joint

    def product(
        self,
        dtype: Any,
        columns: int,
        along: tuple[bool, bool],
        registers: bool = False,
        double: bool = False,
    ) -> TensorProduct:
        first, second = (OperandMajorMode.K if k else OperandMajorMode.MN for k in along)
        source = tcgen05.OperandSource.TMEM if registers else tcgen05.OperandSource.SMEM
        if dtype is Float32:
            majors = OperandMajorMode.K, OperandMajorMode.K
            return RoundedProduct(self, cutlass.TFloat32, majors, columns, source, 1 + double)
        return TensorProduct(self, dtype, (first, second), columns, source, 1 + double)

    # ----------------------------------------------------------------------------------- memory

    def allocate(self, alloc: cutlass.memory.SmemAllocator, consumers: Consumers) -> TensorMemory:
        address = alloc.allocate_array(Int32, 1, byte_alignment=4)
        groups = GROUPS * apart(consumers)
        memory = TensorMemory(address, Barriers.allocate(alloc, groups))
        if not consumers.joint:
            return memory
        return replace(memory, peer=Barriers.allocate(alloc, groups), left=Barriers.allocate(alloc))

    def barriers(self, memory: TensorMemory) -> list[Barriers]:
        return [b for b in (memory.done, memory.peer, memory.left) if b is not None]

    def open(
        self, memory: TensorMemory, consumers: Consumers, registers: int, dependent: bool
    ) -> TensorProducts:
        columns = columns_of(consumers, registers)
        index, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(index // 32)
        self._take(memory, columns, consumers, warp, dependent)
        base = cute.arch.retrieve_tmem_ptr(Float32, 16, memory.address)
        if not consumers.together:
            base = base + cute.assume(warp // 4 * (columns // consumers.warpgroups), divby=8)
        rank = rank_in_cluster() if consumers.joint else None
        ended = filled(1, 0, Int32)
        return replace(self, state=Open(memory, consumers, base, columns, warp, rank, None, ended))

    def issuers(
        self, memory: TensorMemory, consumers: Consumers, registers: int
    ) -> Sequence[TensorProducts]:
        columns, found = columns_of(consumers, registers), list[TensorProducts]()
        address_meeting(consumers).meet()
        base = cute.arch.retrieve_tmem_ptr(Float32, 16, memory.address)
        for group in range(consumers.warpgroups):
            first, ended = base + group * (columns // consumers.warpgroups), filled(1, 0, Int32)
            state = Open(memory, consumers, first, columns, None, None, group, ended)
            found.append(replace(self, state=state))
        return found

    @cute.jit
    def _take(
        self,
        memory,
        columns: cutlass.Constexpr,
        consumers: cutlass.Constexpr,
        warp,
        dependent: cutlass.Constexpr,
    ):
        """Allocate columns, all of them where products are joint.

        Waits until another block of the multiprocessor gives them back.

        Blocks of the launch before have started, but may not have theirs: without the wait for them
        both launches would wait for each other.
        """
        if warp == 0:
            if cutlass.const_expr(dependent):
                wait_for_predecessor()
            cute.arch.alloc_tmem(columns, memory.address, is_two_cta=consumers.joint)
            cute.arch.relinquish_tmem_alloc_permit(is_two_cta=consumers.joint)
        address_meeting(consumers).meet()

    @cute.jit
    def close(self):
        state = self.opened()
        before_meeting()
        Meeting(ALL_BARRIER, 128 * state.consumers.warpgroups).meet()
        after_meeting()
        if state.warp == 0:
            if cutlass.const_expr(self.joint):
                with cute.arch.elect_one():
                    state.memory.left.only.arrive(state.rank ^ 1)
                state.memory.left.only.wait(0)
            first = cute.arch.retrieve_tmem_ptr(Float32, 16, state.memory.address)
            cute.arch.dealloc_tmem(first, state.columns, is_two_cta=self.joint)

    # ----------------------------------------------------------------------------------- groups

    def begin(self) -> None:
        state = self.opened()
        if state.issued is not None:
            self._meeting().meet()  # `issue` has the fence
            return
        before_meeting()
        if state.consumers.issuer:
            self._meeting().arrive()
            return
        self._meeting().meet()
        after_meeting()
        if self.joint:
            self._join()

    def _meeting(self) -> Meeting:
        """The barrier of the threads that wait for a group to begin."""
        state, threads = self.opened(), 128 * (1 + self.opened().consumers.together)
        return Meeting(GROUP_BARRIER + state.group, threads + 32 * state.consumers.issuer)

    @cute.jit
    def _join(self):
        """Tell the leader that this block is ready for a group, or wait for the peer that is."""
        state = self.opened()
        group = state.ended[0]
        announced = self._barrier(state.memory.peer, group)
        if state.warp % 4 == 0:
            if state.rank == 0:
                announced.wait(phase(group))
                after_meeting()
            else:
                before_meeting()
                with cute.arch.elect_one():
                    announced.arrive(0)

    def issue(self) -> IfOpRegion | AllWarps:
        if self.opened().issued is not None:
            after_meeting()
            return AllWarps()
        issuing = self._issues()
        return IfOpRegion(scf.IfOp(issuing.ir_value()).then_block)

    def _issues(self) -> Any:
        """True in the warps that issue products."""
        state = self.opened()
        first = state.warp == 0 if state.consumers.together else state.warp % 4 == 0
        return first & (state.rank == 0) if self.joint else first

    @cute.jit
    def end(self):
        ended = self.opened().ended
        if cutlass.const_expr(self.opened().issued is not None):
            self.release(self._barrier(self.opened().memory.done, ended[0]), 1)
        elif cutlass.const_expr(not self.opened().consumers.issuer):
            if self._issues():
                with cute.arch.elect_one():
                    done = self._barrier(self.opened().memory.done, ended[0]).pointer
                    if cutlass.const_expr(self.joint):
                        tcgen05.commit(done, Int16(3), tcgen05.CtaGroup.TWO)
                    else:
                        tcgen05.commit(done)
        ended[0] = ended[0] + 1

    @cute.jit
    def release(self, barrier, blocks: cutlass.Constexpr):
        with cute.arch.elect_one():
            if cutlass.const_expr(blocks > 1):
                tcgen05.commit(barrier.pointer, Int16((1 << blocks) - 1))
            else:
                tcgen05.commit(barrier.pointer)

    def wait(self, left: int) -> None:
        assert left < GROUPS
        group = self.opened().ended[0] - (1 + left)
        self._barrier(self.opened().memory.done, group).wait(phase(group))
        after_meeting()

    def _barrier(self, barriers: Barriers, group: Any) -> Barrier:
        """The barrier of a group of this warpgroup, or of two."""
        return barriers[self.opened().group * GROUPS + (group & (GROUPS - 1))]

    # ----------------------------------------------------------------------------- accumulators

    def clear(self, accumulator: Accumulator) -> None:
        accumulator.filled[0] = Int32(0)

    def registers(self, accumulator: Accumulator) -> cute.Tensor:
        return fragment(accumulator.columns // 2)

    def fetch(self, accumulator: Accumulator, to: cute.Tensor) -> None:
        for v, value in enumerate(self._values(accumulator)):
            to[v] = value

    def fetched(self, accumulators: list[list[Accumulator]]) -> list[list[cute.Tensor]]:
        found = [[self.registers(a) for a in row for _ in range(a.blocks)] for row in accumulators]
        for row, fragments in zip(accumulators, found, strict=True):
            blocks = [(a, n) for a in row for n in range(a.blocks)]
            for (accumulator, n), fragment_ in zip(blocks, fragments, strict=True):
                for v, value in enumerate(self._values(accumulator, n)):
                    fragment_[v] = value
        return found

    def total(self, accumulator: Accumulator) -> cute.Tensor:
        self.clear(accumulator)
        return filled(accumulator.columns // 2, 0.0)

    def add(self, accumulator: Accumulator, total: cute.Tensor) -> None:
        for v, value in enumerate(self._values(accumulator)):
            total[v] = total[v] + value
        self.clear(accumulator)

    def _values(self, accumulator: Accumulator, block: int = 0) -> list[Float32]:
        place = self.opened().address(accumulator.tensor.iterator) + (16 * block << LANE_SHIFT)
        return [
            value
            for first in range(0, accumulator.columns, MOST_LOADED)
            for value in loaded(place + first, min(MOST_LOADED, accumulator.columns - first))
        ]

    def row(self, block: Any, half: int, warp: Any, lane: Any) -> Any:
        return block * self.block + (warp % 4) * 16 + half * 8 + lane // 4


def apart(consumers: Consumers) -> int:
    """Warpgroups with products of their own."""
    return 1 if consumers.together else consumers.warpgroups


def columns_of(consumers: Consumers, registers: int) -> int:
    """Columns that a block takes for ``registers`` accumulators of each thread."""
    if consumers.joint:
        return ALL_COLUMNS
    # two columns of 64 rows are one register of 128 threads
    return max(LEAST_COLUMNS, 1 << (2 * registers * apart(consumers) - 1).bit_length())


def address_meeting(consumers: Consumers) -> Meeting:
    """The barrier behind which the address of tensor memory is known."""
    return Meeting(ALL_BARRIER, 128 * consumers.warpgroups + 32 * consumers.issuer)


def phase(group: Any) -> Any:
    """Phase of the barrier of a group of products.

    Made of bits, since groups before the first one are negative, and have ended.
    """
    return (group >> (GROUPS.bit_length() - 1)) & 1


@dsl_user_op
def store(words: list[Any], address: Any, *, loc: Any = None, ip: Any = None) -> None:
    """Store a thread's words to tensor memory, two for each four columns.
    Waits until they are there."""
    lines, at = list[str](), 0
    for first, width in pieces(2 * len(words)):
        registers = ", ".join(f"${v}" for v in range(at, at + width // 2))
        name = f"tcgen05.st.sync.aligned.16x128b.x{width // 4}.b32"
        lines.append(f"{name} [${len(words)} + {first}], {{{registers}}};")
        at += width // 2
    lines.append("tcgen05.wait::st.sync.aligned;")
    given = [x if isinstance(x, Float32) else Int32(x) for x in (*words, address)]
    llvm.inline_asm(
        None, [x.ir_value(loc=loc, ip=ip) for x in given], "\n".join(lines),
        ",".join("f" if isinstance(x, Float32) else "r" for x in given), has_side_effects=True,
        is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )  # fmt: skip


@dsl_user_op
def loaded(address: Any, columns: int, *, loc: Any = None, ip: Any = None) -> list[Float32]:
    """A thread's values of ``columns`` columns of tensor memory.

    Loads and the wait for them are one statement: between two of them the compiler moves what reads
    the registers.
    """
    count, at, lines = columns // 2, 0, list[str]()
    for first, width in pieces(columns):
        registers = ", ".join(f"${v}" for v in range(at, at + width // 2))
        name = f"tcgen05.ld.sync.aligned.16x256b.x{width // 8}.b32"
        lines.append(f"{name} {{{registers}}}, [${count} + {first}];")
        at += width // 2
    lines.append("tcgen05.wait::ld.sync.aligned;")
    found = llvm.inline_asm(
        llvm.StructType.get_literal([T.f32()] * count),
        [Int32(address).ir_value(loc=loc, ip=ip)], "\n".join(lines), "=f," * count + "r",
        has_side_effects=True, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc, ip=ip,
    )  # fmt: skip
    values = (llvm.extractvalue(T.f32(), found, [v], loc=loc, ip=ip) for v in range(count))
    return [Float32(v) for v in values]


def pieces(columns: int) -> Iterator[tuple[int, int]]:
    """First column and number of columns of loads of powers of two.

    >>> list(pieces(104))
    [(0, 64), (64, 32), (96, 8)]
    """
    first = 0
    while first < columns:
        count = 1 << ((columns - first).bit_length() - 1)
        yield first, count
        first += count
