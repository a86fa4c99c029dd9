"""The plan of an attention loop with plain sums: roles, tiles, threads, memory and limits.

A block owns a tile of rows of all resident operands. A producer warp fills a ring of stages with
tiles of all operands that stream by (TMA) and of vectors along the loop; consumer warpgroups of 64
rows multiply the scores, compute the operands of the sums from them in registers, and multiply
these by tiles of the same stages. Accumulators stay in registers until the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from cutesuper.errors import LoweringError
from cutesuper.ir.block import AxisKind, BlockProgram
from cutesuper.ir.dims import Symbol, ceil_div, extent
from cutesuper.ir.dtypes import as_dtype
from cutesuper.skeletons.attention.plan import (
    DEPTH,
    ROW_BLOCK,
    THREAD_REGISTERS,
    TOGETHER_BYTES,
    Mask,
)
from cutesuper.skeletons.attention.sums.schedule import SumsSchedule
from cutesuper.skeletons.base import (
    Argument,
    Limit,
    Output,
    Plan,
    View,
    exceeded_accumulators,
    view_of,
)
from cutesuper.targets import Target

#: elements of the loop's label in a stage
LOOP_TILES = (32, 64, 128)
#: registers of a thread that addresses and counters take
FREE_REGISTERS = 24


@dataclass(frozen=True)
class Score:
    """A product of rows and a tile of the loop.
    The operation, its resident operand, its streamed one (loads), and the label that it
    contracts."""

    value: int
    resident: int
    stream: int
    inner: str


@dataclass(frozen=True)
class LoopSum:
    """A sum over the loop of products with a function of the scores.

    Attributes:
        operand: the operation that is multiplied, a function of scores and vectors.
        stream: the other operand, a load.
        columns: its label, and that of the result.
        final: the operation that completes the sum.
    """

    operand: int
    stream: int
    columns: str
    final: int


@dataclass(frozen=True)
class StoredScores:
    """A function of the scores that is stored, tile by tile: the operation, and its tensor."""

    value: int
    view: View


@dataclass(frozen=True)
class Phase:
    """A part of the work between scores and sums.
    All but the last are done while later scores are multiplied.

    Attributes:
        score: place of the last score that it needs.
        ops: operations that it computes, in order.
        slots: the values that it leaves, each with its fragment; after the last phase the operands
            of the sums, and what is stored.
    """

    score: int
    ops: tuple[int, ...]
    slots: dict[int, int]


def _placed(values: tuple[int, ...], before: dict[int, int]) -> dict[int, int]:
    """A fragment for each value.
    Those that have one stay there: where a value moved to the fragment of a product in flight, the
    compiler copied that product before it had ended."""
    kept = {v: before[v] for v in values if v in before}
    free = (n for n in range(len(values) + len(before)) if n not in kept.values())
    return {v: kept[v] if v in kept else next(free) for v in values}


@dataclass(frozen=True)
class Sight:
    """A mask as a limit of the loop.
    In a program where the rows are its columns, ``across``, the loop begins where the first row is
    seen, and ends where the last one is if the limit is a lower one."""

    mask: Mask
    across: bool


@dataclass(frozen=True)
class SumsPlan(Plan[SumsSchedule]):
    """The plan of a kernel.

    Attributes:
        program: the block program; the numbers of operations are its own.
        arguments: tensor arguments in order, inputs first.
        dtype: element type of all operands of products.
        rows: label of a tile's rows.
        loop: label of the loop.
        visits: label whose elements the loop is walked for, one after the other, or None.
        scores: the products that are computed again.
        sums: what is accumulated.
        operands: the different operands of sums, functions of the scores.
        stores: further functions of the scores, which are stored.
        between: the element-wise operations between scores and what is made of them, in order.
        row_vectors, loop_vectors: loads with one number for each row, for each element of the loop.
        beside: loads that meet the scores, with a number for each row and element of the loop.
        sights: limits of what is visible.
        outputs: the stored tensors.
        schedule: the kernel's knobs.
    """

    program: BlockProgram
    arguments: tuple[Argument, ...]
    dtype: str
    rows: str
    loop: str
    visits: str | None
    scores: tuple[Score, ...]
    sums: tuple[LoopSum, ...]
    operands: tuple[int, ...]
    stores: tuple[StoredScores, ...]
    between: tuple[int, ...]
    row_vectors: tuple[int, ...]
    loop_vectors: tuple[int, ...]
    beside: dict[int, View]
    sights: tuple[Sight, ...]
    outputs: tuple[Output, ...]
    schedule: SumsSchedule

    def view(self, load: int) -> View:
        """A load's view of its tensor."""
        return view_of(self.program.ops[load], self.arguments)

    @cached_property
    def element_bytes(self) -> int:
        """Bytes of an element of the operands."""
        return as_dtype(self.dtype).itemsize

    @cached_property
    def residents(self) -> tuple[int, ...]:
        """Loads whose rows stay in the block."""
        return tuple(dict.fromkeys(s.resident for s in self.scores))

    @cached_property
    def streams(self) -> tuple[int, ...]:
        """Loads that stream by."""
        every = (*(s.stream for s in self.scores), *(s.stream for s in self.sums))
        return tuple(dict.fromkeys(every))

    @cached_property
    def made(self) -> tuple[int, ...]:
        """Operands of sums, and stored values: all that is made of the scores."""
        return tuple(dict.fromkeys((*self.operands, *(s.value for s in self.stores))))

    # --------------------------------------------------------------------------------- phases

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """The work between scores and sums: one phase for each score, as soon as it is there.
        A phase ends where what it leaves does not fit into the fragments of the scores so far.

        before: ``P = exp(S - l)``, ``D = P * (T - d)`` with the scores S and T, sums of D and P;
        after: P, left in the place of S, while T is computed; then D, left with P.

        Operands are multiplied behind the last phase: when one was packed during a product, the
        compiler serialised all products.
        """
        found, done = list[Phase](), set[int]()
        slots: dict[int, int] = {}
        for score in range(len(self.scores)):
            ops = [i for i in self.between if i not in done and self._needs(i) <= score]
            last = score == len(self.scores) - 1
            left = self.made if last else self._kept(score)
            if last or (ops and len(left) <= score + 1):
                slots = _placed(left, slots)
                found.append(Phase(score, tuple(ops), slots))
                done.update(i for i in ops if self._needs(i) >= 0)
        return tuple(found)

    def _needs(self, i: int) -> int:
        """Place of the last score that an operation needs; -1 if it needs none."""
        reaches = self.program.dependence.reaches
        places = enumerate(s.value for s in self.scores)
        return max((n for n, j in places if i == j or reaches(j, i)), default=-1)

    def _kept(self, score: int) -> tuple[int, ...]:
        """Values that depend on scores up to one, and are used when later ones are there."""
        later = [i for i in self.between if self._needs(i) > score]
        used = (*self.made, *(j for i in later for j in self.program.ops[i].inputs))
        return tuple(dict.fromkeys(j for j in used if 0 <= self._needs(j) <= score))

    # ---------------------------------------------------------------------------------- tiles

    def extent(self, label: str) -> int:
        """Extent of a label; a symbolic one counts with its hint."""
        return extent(self.program.dims[label])

    def grows(self, label: str) -> bool:
        """True if the extent of a label is symbolic."""
        return isinstance(self.program.dims[label], Symbol)

    def inner(self, load: int) -> str:
        """The label of an operand that a block holds whole."""
        return next(d for d in self.program.ops[load].dims if not self.program.axes_of(d))

    def width(self, label: str) -> int:
        """Extent of such a label, padded for the instruction."""
        return DEPTH * ceil_div(self.extent(label), DEPTH)

    @cached_property
    def batch(self) -> tuple[str, ...]:
        """Labels of which a block has one element each."""
        axes = self.program.of_kind(AxisKind.GRID)
        return tuple(a.dim for a in axes if a.dim != self.rows)

    @property
    def loop_tile(self) -> int:
        """Elements of the loop's label in a stage."""
        return self.program.tile[self.loop]

    @cached_property
    def tiles(self) -> int:
        """Tiles of a walk over the loop, if everything is visible."""
        return ceil_div(self.extent(self.loop), self.loop_tile)

    @cached_property
    def turns(self) -> int:
        """Walks over the loop."""
        return self.extent(self.visits) if self.visits else 1

    @property
    def ragged(self) -> bool:
        """True if the last tile may reach past the end of the loop, or of its visible part."""
        whole = not self.grows(self.loop) and self.extent(self.loop) % self.loop_tile == 0
        return bool(self.sights) or not whole

    @property
    def clears(self) -> bool:
        """True if memory that streams by may hold anything behind a length."""
        return any(s.mask.written and not s.across for s in self.sights)

    @property
    def begins(self) -> bool:
        """True if a mask hides elements in front of a limit."""
        return any(s.mask.lower for s in self.sights)

    # -------------------------------------------------------------------------------- threads

    @property
    def fragments(self) -> int:
        """Fragments of a tile of scores that a thread has."""
        return max(len(self.scores), len(self.made))

    @property
    def product_registers(self) -> int:
        """Registers of a thread that products read and write."""
        results = sum(self.width(s.columns) // 2 for s in self.sums)
        words = self.loop_tile * self.element_bytes // 8
        return results + len(self.scores) * self.loop_tile // 2 + len(self.operands) * words

    @property
    def live_registers(self) -> int:
        """Registers of a thread for accumulators, scores, and operands of sums.
        All operands, if the next tile's scores are computed while these are multiplied, else one at
        a time."""
        results = sum(self.width(s.columns) // 2 for s in self.sums)
        words = self.loop_tile * self.element_bytes // 8
        live = len(self.operands) if self.schedule.overlapped else 1
        sizes = [as_dtype(self.arguments[v.argument].dtype).itemsize for v in self.beside.values()]
        beside = sum(sizes) * self.loop_tile // 8
        return results + self.fragments * self.loop_tile // 2 + live * words + beside

    @property
    def registers(self) -> tuple[int, int] | None:
        """Registers per thread of (consumers, producer) where the producer hands some over.
        None for one warpgroup, which has all that a thread can have."""
        if self.schedule.row_groups == 1:
            return None
        return (232, 40) if self.loop_vectors else (240, 24)

    @property
    def threads(self) -> int:
        """Threads of the consumer warpgroups and of the producer."""
        return 128 * self.schedule.row_groups + (32 if self.registers is None else 128)

    # --------------------------------------------------------------------------------- memory

    @property
    def resident_bytes(self) -> int:
        """Shared memory of the resident operands, in bytes."""
        width = sum(self.width(self.inner(i)) for i in self.residents)
        return self.element_bytes * ROW_BLOCK * self.schedule.row_groups * width

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a stage, in bytes."""
        width = sum(self.width(self.inner(i)) for i in self.streams)
        return self.loop_tile * (self.element_bytes * width + 4 * len(self.loop_vectors))

    @property
    def loop_together(self) -> int:
        """Elements of all walks of blocks that take turns, if a mask makes some shorter."""
        return TOGETHER_BYTES * self.loop_tile // self.stage_bytes

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block, in bytes, with room for barriers and alignment."""
        return self.resident_bytes + self.stage_bytes * self.schedule.stages + 1024


# --------------------------------------------------------------------------------------- limits


def exceeded(plan: SumsPlan, target: Target) -> Limit | None:
    """The first limit that a plan exceeds; None if there is a kernel for it."""
    return next(_limits(plan, target), None)


def _limits(plan: SumsPlan, target: Target) -> Iterator[Limit]:
    s = plan.schedule
    if plan.loop_tile not in LOOP_TILES:
        yield Limit(
            "tiles of the loop that no kernel has",
            f"tile {plan.loop}={plan.loop_tile}; must be {', '.join(map(str, LOOP_TILES))}",
        )
    held = [*plan.batch, *([plan.visits] if plan.visits else [])]
    if wide := [d for d in held if plan.program.tile[d] != 1]:
        yield Limit(
            "tiles of batches",
            f"a tile of {plan.program.tile[wide[0]]} elements of {wide[0]}; a block has one",
            LoweringError,
        )
    if s.row_groups not in (1, 2) or plan.program.tile[plan.rows] != ROW_BLOCK * s.row_groups:
        yield Limit(
            "rows that warpgroups cannot share",
            f"a tile of {plan.program.tile[plan.rows]} rows for {s.row_groups} warpgroup(s); each "
            f"has {ROW_BLOCK}, and there are one or two",
        )
    if s.stages < 2:
        yield Limit("rings that stand still", f"{s.stages} stage(s), of which two are in use")
    if plan.shared_bytes > target.shared_bytes:
        yield Limit(
            "stages exceed the shared memory",
            f"{s.stages} stages of {plan.stage_bytes} bytes and {plan.resident_bytes} of rows do "
            f"not fit into {target.shared_bytes} bytes of shared memory; use smaller tiles",
        )
    held = 128 * s.row_groups * plan.product_registers
    if limit := exceeded_accumulators(plan, held, False, target):
        yield limit
    most = plan.registers[0] if plan.registers else THREAD_REGISTERS
    if plan.live_registers > most - FREE_REGISTERS:
        yield Limit(
            "accumulators exceed the registers",
            f"{plan.live_registers} of {most} registers for the products of a thread; use a "
            "smaller tile of the loop",
        )
