"""Skeleton 3, the attention loop: two chained products with running state; roles and memory plan.

A block owns a tile of rows (queries) and walks over its part of the keys: a producer warp fills a
ring of stages with tiles of both column-side operands (TMA), consumer warpgroups multiply rows and
keys, apply the element-wise function of the program to the scores in registers, and multiply the
result, still in registers, by the values. Running maximum, sums and results stay in registers; at
the end the warpgroups of a block, the blocks of a cluster and those of the grid that share a tile
of rows are combined, in this order (FlashAttention, arXiv:2205.14135; split keys: Flash-Decoding).

A warpgroup has 64 rows, which may combine several labels: the query heads that share a key head,
and positions. Two of them may multiply together, as one block of 128 rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from math import exp, isclose, prod

from cutesuper.errors import LoweringError
from cutesuper.ir.arraymath import ArrayMath
from cutesuper.ir.block import AxisKind, BlockProgram
from cutesuper.ir.dims import MAX_ELEMENTS, Dim, Symbol, Tiles, ceil_div, extent
from cutesuper.ir.dtypes import as_dtype
from cutesuper.ir.thread import ThreadExpression
from cutesuper.skeletons.attention.schedule import AttentionSchedule, room
from cutesuper.skeletons.base import (
    Argument,
    Limit,
    Output,
    Plan,
    Scratch,
    View,
    exceeded_accumulators,
    view_of,
)
from cutesuper.targets import Target

#: most elements of a row of Q, and of one of V: a warpgroup holds 64 x 256 accumulators
MAX_WIDTH = 256
#: keys of a stage
KEY_TILES = (64, 128)
#: registers of a thread, and those that addresses and counters take
THREAD_REGISTERS, OTHER_REGISTERS = 255, 40
#: rows of a WGMMA instruction
ROW_BLOCK = 64
#: bytes of keys and values that blocks of masked rows read at the same time: L2 holds 50 MB
TOGETHER_BYTES = 32 << 20
#: unit of the contracted dimension of a 16-bit WGMMA instruction
DEPTH = 16
#: rows up to which a warpgroup's results lie in the first half of every register quadruple
FEW_ROWS = 8


@dataclass(frozen=True)
class Reduction:
    """A reduction of a loaded tile along its last label: values of rows, or of keys.

    Attributes:
        value: the operation.
        operand: the load.
        source: the reduced value, an expression over the load.
        op: name of the monoid.
        scale: factor of the result (1/K for a mean).
    """

    value: int
    operand: int
    source: ThreadExpression
    op: str
    scale: float


@dataclass(frozen=True)
class Mask:
    """The keys that a row sees: those before a limit, or those from it on.
    The limit is ``offset + length + position``.

    Attributes:
        lengths: the tensor of lengths or limits, None if there is none.
        rows: the label whose position counts, None if there is none.
        offset: for causal attention from the first key 1, to the last key 1 + keys - rows, without
            extents that are symbolic.
        added, taken: labels whose symbolic extents count as well: of the keys, of the rows.
        lower: whether the row sees the keys from the limit on.
        limits: whether they are limits, not the lengths of sequences, behind which memory may hold
            anything.
        rising: the label of the rows along which limits differ and do not fall, None if there is
            none.
    """

    lengths: View | None
    rows: str | None
    offset: int
    added: str | None = None
    taken: str | None = None
    lower: bool = False
    limits: bool = False
    rising: str | None = None

    @property
    def written(self) -> bool:
        """True for lengths, which say how many keys were written."""
        return self.lengths is not None and not self.limits

    def along(self, labels: Iterable[str]) -> list[str]:
        """The labels along which its lengths differ, of some."""
        return [] if self.lengths is None else [d for d in labels if d in self.lengths.labels]

    def apart(self, labels: Iterable[str]) -> list[str]:
        """The labels, of some, of which a tile has one position.
        The first and the last row of a tile say what its rows see, where limits do not fall."""
        return [d for d in self.along(labels) if d != self.rising]


@dataclass(frozen=True)
class Sum:
    """A value that the loop accumulates.

    Attributes:
        source: the summand of one tile; its leaves are the scores' product or its weight, values of
            rows and of keys.
        final: the operation that completes it.
        rescaled: True if it is multiplied by exp(old - new) when the running maximum rises.
        inverse: the operation that is its reciprocal, which is 0 for 0; None if there is none.
    """

    source: ThreadExpression
    final: int
    rescaled: bool
    inverse: int | None = None


@dataclass(frozen=True)
class AttentionPlan(Plan[AttentionSchedule]):
    """The plan of an attention-loop kernel.

    Attributes:
        program: the block program; leaves of the expressions are its operations.
        arguments: tensor arguments in order, inputs first.
        dtype: element type of the operands.
        own_labels: those of the query that keys and values have not; `rows` are those of a tile.
        keys, inner, columns: labels of the loop, of the first product, and of the result.
        row_load, key_load, value_load: the loads of the three operands.
        product: the first product.
        prologue: the operand in place of the query, None if that is used as loaded.
        row_reductions, row_values: those of the query, before the loop.
        key_reductions, key_values: those of a tile of keys or values.
        vectors: loads of the prologue with the inner label only.
        beside: loads of numbers of rows and keys that meet the scores, as biases and conditions.
        row_loads: loads of numbers of rows that meet the results.
        scores: the function of the product whose running maximum is taken, without ``factor``; not
            used without a maximum.
        factor, row_factor: positive; the scores are ``factor * scores``, and times a value of the
            row if there is one.
        masks: limits of the visible keys.
        maximum: the operation that completes the running maximum, None if there is none.
        weight: the operation exp(scores - maximum of the tile).
        row_sums: accumulated numbers of rows, one at most.
        result: the accumulated product with the values.
        outputs: the stored tensors: results, and values of rows such as the logarithm of a sum.
        schedule: the kernel's knobs.
    """

    program: BlockProgram
    arguments: tuple[Argument, ...]
    dtype: str
    own_labels: tuple[str, ...]
    keys: str
    inner: str
    columns: str
    row_load: int
    key_load: int
    value_load: int
    product: int
    prologue: ThreadExpression | None
    row_reductions: tuple[Reduction, ...]
    row_values: dict[int, ThreadExpression]
    key_reductions: tuple[Reduction, ...]
    key_values: dict[int, ThreadExpression]
    vectors: dict[int, View]
    beside: dict[int, View]
    row_loads: dict[int, View]
    scores: ThreadExpression
    factor: float
    row_factor: int | None
    masks: tuple[Mask, ...]
    maximum: int | None
    weight: int | None
    row_sums: tuple[Sum, ...]
    result: Sum
    outputs: tuple[Output, ...]
    schedule: AttentionSchedule

    def view(self, load: int) -> View:
        """A load's view of its tensor."""
        return view_of(self.program.ops[load], self.arguments)

    @cached_property
    def element_bytes(self) -> int:
        """Bytes of an element of the operands."""
        return as_dtype(self.dtype).itemsize

    @property
    def paged(self) -> bool:
        """True if keys or values lie in pages."""
        loads = (self.program.ops[i] for i in (self.key_load, self.value_load))
        return any("table" in op.attributes for op in loads)

    def tells_maximum(self, output: Output) -> bool:
        """True if an output changes with a smaller maximum and all that is relative to it larger.
        The quotient of a result and a sum is the same, and so is the maximum plus the logarithm of
        a sum."""
        relative = {self.result.final, *(s.final for s in self.row_sums)}
        inverse = {s.inverse for s in self.row_sums}
        found: list[float] = []
        for lag in (0.0, 0.25):
            known = [1.5 + 0.125 * n for n in range(len(output.expression.leaves))]
            for n, i in enumerate(output.expression.leaves):
                known[n] -= lag * (i == self.maximum)
                known[n] *= exp(lag * ((i in relative) - (i in inverse)))
            found.append(float(output.expression.evaluate(known, ArrayMath)))
        return not isclose(*found, rel_tol=1e-9, abs_tol=1e-9)

    def tile(self, label: str) -> int:
        """Extent of a label in the block's tile."""
        return self.program.tile[label]

    def extent(self, label: str) -> int:
        """Extent of a label; a symbolic one counts with its hint."""
        return extent(self.program.dims[label])

    # ---------------------------------------------------------------------------------- tiles

    @cached_property
    def rows(self) -> tuple[str, ...]:
        """Labels of the rows of a tile, the slowest first.
        Those held whole vary fastest, so that tiles of the other label are whole runs."""
        tiled = [d for d in self.own_labels if self.tile(d) > 1] or self.own_labels[-1:]
        return tuple(sorted(tiled, key=self._is_whole))

    def _is_whole(self, label: str) -> bool:
        dim = self.program.dims[label]
        return not isinstance(dim, Symbol) and self.tile(label) >= dim

    @cached_property
    def batch(self) -> tuple[str, ...]:
        """Labels of which a block has one element each."""
        taken = {*self.rows, self.keys, self.inner, self.columns}
        return tuple(d for d in self.program.dims if d not in taken)

    @cached_property
    def block_rows(self) -> int:
        """Rows of a block's tile."""
        return prod(self.tile(d) for d in self.rows)

    @property
    def row_blocks(self) -> int:
        """Instructions that these rows fill, the last one in part."""
        return ceil_div(self.block_rows, ROW_BLOCK)

    @property
    def instructions(self) -> int:
        """Instructions that multiply all rows: one for each warpgroup along them, or for two."""
        return self.schedule.row_groups // (1 + self.schedule.together)

    @property
    def row_tile(self) -> tuple[int, ...]:
        """Extents of the rows of one instruction, slowest first."""
        first, *others = (self.tile(d) for d in self.rows)
        return (ceil_div(first, self.instructions), *others)

    @cached_property
    def group_rows(self) -> int:
        """Rows of one warpgroup that are computed, at most 64."""
        return ceil_div(prod(self.row_tile), 1 + self.schedule.together)

    @property
    def key_tile(self) -> int:
        """Keys of a stage."""
        return self.tile(self.keys)

    @property
    def depth(self) -> int:
        """The inner extent, padded for the WGMMA instruction."""
        return DEPTH * ceil_div(self.tile(self.inner), DEPTH)

    @property
    def width(self) -> int:
        """Columns of the result, padded for the copies."""
        return DEPTH * ceil_div(self.tile(self.columns), DEPTH)

    @cached_property
    def cluster(self) -> int:
        """Blocks of a cluster, each with a part of the keys."""
        return self.program.parts_along(self.keys, AxisKind.CLUSTER)

    @cached_property
    def grid_parts(self) -> int:
        """Clusters that share a tile of rows, each with a part of the keys."""
        return self.program.parts_along(self.keys, AxisKind.GRID)

    @property
    def parts(self) -> int:
        """Number of parts of the keys."""
        return self.cluster * self.grid_parts

    @property
    def key_extent(self) -> int:
        """Number of all keys."""
        return self.extent(self.keys)

    @cached_property
    def loop(self) -> int:
        """Tiles of keys that a block walks over, if all keys are visible."""
        return ceil_div(self.key_extent, self.key_tile * self.parts)

    @cached_property
    def row_tiles(self) -> int:
        """Tiles of rows in all batches."""
        return self.program.blocks() // self.parts

    @property
    def varying(self) -> bool:
        """True if the number of visible keys differs between tiles of rows or calls."""
        return bool(self.masks) or self.grows(self.keys)

    @property
    def begins(self) -> bool:
        """True if keys in front of a limit are hidden."""
        return any(m.lower for m in self.masks)

    def grows(self, label: str) -> bool:
        """True if the extent of a label is symbolic."""
        return isinstance(self.program.dims[label], Symbol)

    def offset(self, mask: Mask) -> int:
        """The offset of a mask; symbolic extents count with their hint."""
        added, taken = (self.extent(d) if d else 0 for d in (mask.added, mask.taken))
        found = mask.offset + added - taken
        return found if mask.lengths is not None else max(1, found)

    @property
    def ragged(self) -> bool:
        """True if the last tile of keys may reach past their end."""
        return self.varying or self.key_extent % self.key_tile != 0

    @property
    def least_stages(self) -> int:
        """Fewest stages with which the ring does not stall.
        Values of the next tile's keys, which need both its operands, are waited for before this
        tile's stage is released."""
        ahead = bool(self.key_values) and self.schedule.overlapped
        return self.schedule.key_groups * (2 if ahead else 1)

    # -------------------------------------------------------------------------------- threads

    @property
    def warpgroups(self) -> int:
        """Consumer warpgroups."""
        return self.schedule.row_groups * self.schedule.key_groups

    @property
    def live_registers(self) -> int:
        """Registers of a thread for results, scores, weights as an operand, and values of keys.
        And for tensors beside scores."""
        beside = sum(as_dtype(self.arguments[v.argument].dtype).itemsize
                     for v in self.beside.values()) * self.key_tile // 8  # fmt: skip
        return self.product_registers + len(self.key_values) * self.key_tile // 4 + beside

    @property
    def product_registers(self) -> int:
        """Registers of a thread for results, scores, and weights as an operand."""
        # a warpgroup's 64 rows of fp32 numbers take half a register a thread for each column
        return self.width // 2 + self.key_tile // 2 + self.key_tile * self.element_bytes // 8

    @property
    def registers(self) -> tuple[int, int] | None:
        """Registers per thread of (consumers, producer); None if all threads have an equal share.
        An equal share does if it holds the live values of the loop.

        The compiler gives 288 threads as many registers as 384, 168 each; the producer's warpgroup
        hands most of its own over: 2 x 128 x 240 + 128 x 24, or 2 x 128 x 216 + 128 x 72 where its
        other warps compute. With pages it keeps 40: the coordinates of 8 boxes in 24 registers took
        16 bytes of stack.
        """
        if self.warpgroups < 2 or self.live_registers <= 128:
            return None
        if self.helpers:
            return 216, 72
        return (232, 40) if self.paged else (240, 24)

    @property
    def helpers(self) -> int:
        """Warps that compute values of keys: the other three of the producer's warpgroup.
        When the consumers computed them, the norm of 16x4096 values took 4.5 of 18.4 us."""
        return 3 if self.key_values else 0

    @property
    def threads(self) -> int:
        """Threads of the consumer warpgroups and the producer warp.
        A whole warpgroup for the producer if it has helpers or hands over registers."""
        alone = self.registers is None and not self.helpers
        return 128 * self.warpgroups + (32 if alone else 128)

    @property
    def active_threads(self) -> int:
        """Threads of a warpgroup that have rows."""
        return 32 * ceil_div(self.group_rows, 16)

    @property
    def few_rows(self) -> bool:
        """True if a thread has one row; otherwise it has two."""
        return self.group_rows <= FEW_ROWS and not self.schedule.together

    @property
    def items(self) -> int:
        """16-byte pieces of the result that an active thread has."""
        return ceil_div(self.width // 8, 2 if self.few_rows else 1)

    @property
    def group_items(self) -> int:
        """Pieces that a thread finishes after the warpgroups of a block have met."""
        return ceil_div(self.items, self.schedule.key_groups)

    @property
    def owned_items(self) -> int:
        """Pieces that it finishes after the blocks of a cluster have met, at most."""
        return ceil_div(self.group_items, self.cluster)

    @property
    def part_words(self) -> int:
        """Number of fp32 values that a warpgroup leaves for the one that combines its items.
        Owned items of every active thread, then the maximum and sum of both rows of every
        fourth."""
        return 4 * self.active_threads * self.owned_items + self.active_threads

    # --------------------------------------------------------------------------------- memory

    @property
    def query_bytes(self) -> int:
        """Shared memory of the rows, in bytes."""
        return self.element_bytes * ROW_BLOCK * self.schedule.row_groups * self.depth

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a stage, in bytes: a tile of keys and one of values."""
        return self.element_bytes * self.key_tile * (self.depth + self.width)

    @property
    def keys_together(self) -> int:
        """Keys of all sequences and heads whose blocks take turns, if a mask makes some shorter."""
        return TOGETHER_BYTES * self.key_tile // self.stage_bytes

    @property
    def meeting_bytes(self) -> int:
        """Shared memory in which the warpgroups of a block meet, in bytes."""
        if self.schedule.key_groups == 1:
            return 0
        return 16 * self.active_threads * (self.items + 1) * self.warpgroups

    @property
    def exchange_bytes(self) -> int:
        """Shared memory that receives data from the cluster, in bytes, including statistics."""
        if self.cluster == 1:
            return 0
        return 4 * self.part_words * self.cluster * self.warpgroups

    @property
    def slot_bytes(self) -> int:
        """Shared memory of a stage with its values of keys, in bytes."""
        return self.stage_bytes + 4 * self.key_tile * len(self.key_values)

    @property
    def fixed_bytes(self) -> int:
        """Shared memory beside the ring, in bytes, with room for barriers and alignment."""
        row_values = 4 * ROW_BLOCK * self.schedule.row_groups * max(1, len(self.row_values))
        return self.query_bytes + self.meeting_bytes + self.exchange_bytes + row_values + 1024

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block, in bytes."""
        return self.fixed_bytes + self.slot_bytes * self.schedule.stages

    @property
    def stages(self) -> int:
        """Slots of the shared-memory ring."""
        return self.schedule.stages

    @property
    def scratch(self) -> tuple[Scratch, ...]:
        """Partial results of the grid's parts, and a counter for every group that combines them."""
        if self.grid_parts == 1:
            return ()
        units = self.cluster * self.warpgroups
        words = self.part_words * self.grid_parts * units
        return (
            Scratch(self._tiles(words), "float32", False),
            Scratch(self._tiles(units), "int32", True),
        )

    def _tiles(self, each: int) -> tuple[Dim | Tiles, ...]:
        """Shape of memory with ``each`` elements for every tile of rows.
        A block has one element of the batch, whatever tile the program has there."""
        shape: list[Dim | Tiles] = []
        for d in self.batch + self.rows:
            dim, tile = self.program.dims[d], self.tile(d) if d in self.rows else 1
            if isinstance(dim, Symbol):
                shape.append(dim if tile == 1 else Tiles(dim, tile))
            else:
                each *= ceil_div(dim, tile)
        return (*shape, each)


# --------------------------------------------------------------------------------------- limits


def exceeded(plan: AttentionPlan, target: Target) -> Limit | None:
    """The first limit that a plan exceeds; None if there is a kernel for it."""
    return next(chain(_by_tile(plan), _by_schedule(plan), _by_resources(plan, target)), None)


def _by_tile(plan: AttentionPlan) -> Iterator[Limit]:
    for label in (plan.inner, plan.columns):
        if plan.tile(label) < plan.extent(label) or plan.extent(label) > MAX_WIDTH:
            yield Limit(
                "an inner label or columns that a block cannot hold whole",
                f"tile {label}={plan.tile(label)} of {plan.extent(label)}; a block holds it whole, "
                f"at most {MAX_WIDTH}",
            )
    for mask in plan.masks:
        if apart := [d for d in mask.apart(plan.rows) if plan.tile(d) > 1]:
            yield Limit(
                "lengths that differ between the rows of a tile",
                "the attention loop cannot run this program: lengths differ between the rows of a "
                f"tile; let {apart[0]} have a tile of 1",
                LoweringError,
            )
    if plan.key_tile not in KEY_TILES:
        yield Limit(
            "tiles of keys that no instruction has",
            f"tile {plan.keys}={plan.key_tile}; must be {' or '.join(map(str, KEY_TILES))}",
        )


def _by_schedule(plan: AttentionPlan) -> Iterator[Limit]:
    s = plan.schedule
    groups = s.row_groups, s.key_groups
    if groups not in ((1, 1), (1, 2), (2, 1)) or s.resident not in (1, 2):
        yield Limit(
            "more than two warpgroups",
            f"{groups[0]} x {groups[1]} consumer warpgroups in {s.resident} block(s) of an SM; one "
            "or two are possible",
        )
    if s.together and s.row_groups != 2:
        yield Limit(
            "rows that warpgroups cannot share",
            f"together={s.together} needs two warpgroups along the rows, not {s.row_groups}; use "
            "together=False",
        )
    if plan.tile(plan.rows[0]) % plan.instructions or plan.group_rows > ROW_BLOCK:
        yield Limit(
            "rows that warpgroups cannot share",
            f"a tile of {' x '.join(str(plan.tile(d)) for d in plan.rows)} rows for "
            f"{s.row_groups} warpgroup(s) of at most {ROW_BLOCK} rows",
        )
    if s.stages < plan.least_stages or s.stages % s.key_groups:
        yield Limit(
            "rings that stand still",
            f"{s.stages} stages for {s.key_groups} warpgroups along the keys, which take them in "
            f"turn; use a multiple, at least {plan.least_stages}",
        )


def _by_resources(plan: AttentionPlan, target: Target) -> Iterator[Limit]:
    s, memory = plan.schedule, room(target, plan.schedule.resident)
    if plan.shared_bytes > memory:
        yield Limit(
            "stages exceed the shared memory",
            f"{s.stages} stages of {plan.stage_bytes} bytes, {plan.query_bytes} bytes of rows and "
            f"{plan.meeting_bytes + plan.exchange_bytes} bytes of exchange do not fit into "
            f"{memory} bytes of shared memory; use smaller tiles",
        )
    if s.together and target.doubled == 1.0:
        yield Limit(
            "rows that warpgroups cannot share",
            f"together={s.together}: no instruction of {target.name} ({target.arch}) multiplies "
            f"{2 * ROW_BLOCK} rows; use together=False",
        )
    known = plan.scratch[0].shape[-1] if plan.scratch else 0  # behind the symbolic extents
    if isinstance(known, int) and known > MAX_ELEMENTS:
        yield Limit(
            "partial results beyond offsets of 32 bits",
            f"{known} numbers of partial results, more than {MAX_ELEMENTS}; use fewer parts of "
            f"{plan.keys} in the grid, or split the batch",
        )
    held = 128 * plan.warpgroups // (1 + s.together) * plan.product_registers
    waits = plan.cluster > 1 or s.resident > 1
    if limit := exceeded_accumulators(plan, held, waits, target):
        yield limit
    equal = min(THREAD_REGISTERS, target.registers // (plan.threads * s.resident))
    most, _ = plan.registers or (equal, equal)
    if plan.live_registers > most - OTHER_REGISTERS:
        yield Limit(
            "accumulators exceed the registers",
            f"{plan.live_registers} of {most} registers for the products of a thread, and "
            f"{plan.threads} threads in {s.resident} block(s) of an SM; use a tile of 64 keys",
        )
