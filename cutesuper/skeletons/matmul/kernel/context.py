"""Facts that the parts of a matmul kernel read.
The plan, what follows from it and, while tracing, the memory of the block, its tile and the thread.

Parts are given these and the parts that they use, never the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cutlass.cute as cute

from cutesuper.device.architecture import products
from cutesuper.device.barriers import Barriers, Meeting
from cutesuper.device.math import DeviceMath
from cutesuper.device.memory import operand_layout
from cutesuper.device.pipeline import Ring
from cutesuper.device.products import FREE_BARRIER, Products
from cutesuper.skeletons.base import view_of
from cutesuper.skeletons.kernel.arguments import (
    ELEMENT,
    Extents,
    batch_labels,
    labelled,
    unravel,
)
from cutesuper.skeletons.matmul.kernel.columns import ColumnGroup, column_groups
from cutesuper.skeletons.matmul.plan import ROW_BOX, MatmulPlan

#: named barriers: that on which the epilogue waits for the row values (0 is that of the whole
#: block), of the consumers, of the helpers, and the first of the consumer warpgroups, which have
#: one each
ROW_VALUES_BARRIER, CONSUMERS_BARRIER, HELPERS_BARRIER, WARPGROUP_BARRIER = 1, 2, 3, 4
#: that on which helpers wait until the row values of a tile have been read
ROWS_READ_BARRIER = FREE_BARRIER
#: steps between the beginnings of neighbouring blocks that are staggered; 17 is as good as 5
STAGGER = 5


@dataclass(frozen=True)
class Known:
    """The plan of a kernel, and facts that follow from it.

    Attributes:
        plan: of the kernel.
        cores: the tensor cores.
        extents: of labels.
        dtype: of the operands.
        math: scalar functions.
        m, n, k: extents of a tile.
        groups: column operands: of the columns, of the hidden labels, of products after the loop.
        stages: of the ring.
        warpgroups: of consumers.
        consumers, helpers: warps of these roles; the producer is the warp behind them.
        cluster: blocks that share the contracted label.
        blocks: of 64 columns in a tile.
        together: of them that an instruction takes: 1, or 2 where they lie alternating.
        chunks: pieces of 128 bytes along the contracted label in a tile.
        values: accumulators of one thread and column.
        columns: that this block finishes.
        results: accumulators of each column and row.
        dependent: true if the launch depends on the one before.
    """

    plan: MatmulPlan
    cores: Products
    extents: Extents
    dtype: Any
    math: DeviceMath
    m: int
    n: int
    k: int
    groups: tuple[ColumnGroup, list[ColumnGroup], list[ColumnGroup]]
    stages: int
    warpgroups: int
    consumers: int
    helpers: int
    cluster: int
    blocks: int
    together: int
    chunks: int
    values: int
    columns: int
    results: int
    dependent: bool

    @staticmethod
    def of(plan: MatmulPlan) -> Known:
        """Derive the facts of a plan, for the architecture that is being compiled for."""
        extents, s = Extents(plan.program, plan.arguments), plan.schedule
        m, n, k = plan.tile
        wide = plan.element_bytes > 2 or any(plan.itemsize(o.view) > 2 for o in plan.outputs)
        cores = products()
        together = 1 + (plan.doubles and cores.doubles)
        return Known(
            plan, cores, extents, ELEMENT[plan.dtype], DeviceMath(fast=not wide), m, n, k,
            column_groups(plan), s.stages, s.warpgroups, 4 * s.warpgroups, plan.helpers,
            plan.cluster, plan.blocks_n, together, k // plan.chunk, m // 4, n // plan.cluster,
            len(plan.finals), s.dependent_launch,
        )  # fmt: skip

    @property
    def producer(self) -> int:
        """Index of the producer warp."""
        return self.consumers + self.helpers

    @property
    def issuer(self) -> int:
        """Index of the issuer, behind the producer and the copiers."""
        return self.producer + 1 + self.plan.copiers

    @property
    def readers(self) -> int:
        """Arrivals that give back a stage: of those that multiply it, and helpers that read it."""
        reading = self.helpers if self.plan.reads_stages else 0
        return reading + (1 if self.plan.schedule.issuer else self.consumers)

    def block(self, i: int, warp: Any) -> Any:
        """The ``i``-th block of columns of a consumer warp's warpgroup."""
        group = warp // 4
        if self.together == 1:
            return group + self.warpgroups * i
        return 2 * (group + self.warpgroups * (i // 2)) + i % 2

    def row_values_meeting(self) -> Meeting:
        """The barrier of the row values: helpers have written them, consumers wait for them."""
        return Meeting(ROW_VALUES_BARRIER, 32 * (self.helpers + self.consumers))

    def rows_read_meeting(self) -> Meeting:
        """The barrier of row values that are read: consumers come there behind their tile."""
        return Meeting(ROWS_READ_BARRIER, 32 * (self.helpers + self.consumers))

    def consumers_meet(self) -> None:
        """Wait for all consumer warps at their barrier."""
        Meeting(CONSUMERS_BARRIER, 32 * self.consumers).meet()

    # ---------------------------------------------------------------------------------- labels

    def batch_of(self, view: Any) -> tuple[str, ...]:
        """The batch labels of an operand."""
        return batch_labels(self.plan.batch, view)

    def batch_index(self, bz: Any, tensors: list[cute.Tensor]) -> dict[str, Any]:
        """The batch labels' coordinates of a block; the last label varies fastest."""
        return unravel(bz, {d: self.extents.of(d, tensors) for d in self.plan.batch})

    def batch_offset(self, view: Any, here: Here) -> Any:
        """Offset of a block's slice of a tensor, in elements."""
        offset = 0
        for label in self.plan.batch:
            offset = offset + self.along(view, label, here.tile.batch[label], here)
        return offset

    def along(self, view: Any, label: str, index: Any, here: Here) -> Any:
        """Offset of the ``index``-th element of a tensor along a label, in elements."""
        return index * self.extents.stride(view, label, here.tensors)

    def iterations(self, tensors: list[cute.Tensor]) -> Any:
        """Iterations of a block's loop: an int, or a run-time number for a symbolic extent.
        Tiles past the end of the tensors are zeros."""
        plan = self.plan
        if not plan.open_depth:
            return plan.iterations
        return cute.ceil_div(self.extents.of(plan.contracted, tensors), self.k * plan.ranks)

    def step(self, tile: Tile, iteration: Any) -> Any:
        """The step along the contracted label that a block takes in an iteration of its loop.

        Weights (N, K) of 8 KB a row that all blocks read from the same step on come at 4.34 TB/s
        (H200, 2 x 14336 x 4096, one dependent launch after the other) and at 4.38 from steps that
        are apart; with 256 bytes of a row in a step at 4.46 and 4.50. Four layers of Mistral-7B
        and its head take 499 us for one row, in place of 504.
        """
        own = iteration
        if self.plan.staggered:
            own = (iteration + tile.column * STAGGER) % tile.iterations
        return tile.rank * tile.iterations + own

    def is_early(self, operation: int) -> bool:
        """True if a load may be issued before the dependency wait."""
        arguments = self.plan.arguments
        view = view_of(self.plan.program.ops[operation], arguments)
        return not self.dependent or arguments[view.argument].constant

    def is_bulk(self, operation: int, early: bool) -> bool:
        """True if a bulk load brings an operand, before the dependency wait or after.
        Before it if ``early``."""
        return operation not in self.plan.copied and self.is_early(operation) == early

    # ------------------------------------------------------------------------------ row operands

    def ring_layout(self) -> cute.ComposedLayout:
        """Layout of a row operand in the ring, as the instruction reads it."""
        if self.plan.turned:
            return operand_layout(self.dtype, (self.m, self.k), self.stages, False)
        return self.row_layout(self.plan.held_rows, self.stages * self.chunks)

    def box_layout(self, parts: int) -> cute.ComposedLayout:
        """Layout of the same in boxes ``[rows, depth, box]`` where rows lie side by side.
        Blocks that share rows load ``parts`` of each."""
        boxes = self.stages * self.row_boxes * parts
        return operand_layout(self.dtype, (ROW_BOX, self.k // parts), boxes, False)

    @property
    def row_boxes(self) -> int:
        """Boxes of a tile whose rows lie side by side."""
        return self.m // ROW_BOX

    def row_step(self, b: cute.Tensor, stage: Any, kk: int) -> cute.Tensor:
        """Step ``kk`` along the contracted label, of the row operand ``b`` of a stage."""
        if self.plan.turned:
            return b[None, None, kk, stage]
        return b[None, None, kk % 4, stage * self.chunks + kk // 4]

    def row_layout(self, height: int, slots: int) -> cute.ComposedLayout:
        """Layout of ``slots`` pieces of ``height`` rows and one chunk, one behind the other."""
        return operand_layout(self.dtype, (height, self.plan.chunk), slots, True)

    def row_tensor(
        self, view: Any, inner: str, tensors: list[cute.Tensor], chunked: bool
    ) -> cute.Tensor:
        """A row operand along ``inner``.
        If chunked, with modes (row, element of a chunk, chunk, batch...), so that one box is many
        128-byte columns: 2 KB boxes kept the loads 0.1 us behind the weights."""
        plan = self.plan
        batch = self.batch_of(view)
        plain = labelled(self.extents, view, (plan.row, inner, *batch), tensors)
        if not chunked:
            return plain
        k, chunk = plan.program.dims[inner], plan.chunk
        shape = (plain.shape[0], chunk, k // chunk, *plain.shape[2:])
        stride = (plain.stride[0], 1, chunk, *plain.stride[2:])
        return cute.make_tensor(plain.iterator, cute.make_layout(shape, stride=stride))


@dataclass(frozen=True)
class Memory:
    """Shared memory of a block.

    Attributes:
        hidden: a `tails.HiddenMemory`.
        columns, rows, vectors, vector_rows: operands in the ring.
        low_rows: the low parts of the rows in the ring; None if operands are not split.
        partials: partial sums that the cluster sends (fp32).
        drained: all blocks of the cluster have read their rings, where partial sums arrive
            then; None if they arrive elsewhere.
        statistics, row_values: of the rows, fp32.
        warp_sums, block_sums: of the reductions along the columns; None without any.
        pieces: of the tile on its way to memory.
        pieces_full: pieces that bulk loads have brought; None without any.
        ring: full and empty stages.
        ready: stages that the helpers have rewritten.
        received, reduced, columns_reduced: bytes of partial sums, statistics, reductions.
        after_full: bytes of the operands after the loop.
        words: that threads have asked for, of operands that they copy; None without any.
        cores: what the tensor cores need.
        handout: answers about the next tiles; None if tiles are not handed out.
    """

    hidden: Any
    columns: Any
    rows: list[cute.Tensor]
    vectors: list[cute.Tensor]
    vector_rows: Any
    low_rows: Any
    partials: cute.Pointer
    statistics: cute.Pointer
    row_values: cute.Pointer
    pieces: Any
    pieces_full: Any
    ring: Ring
    ready: Barriers
    drained: Any
    received: Barriers
    reduced: Barriers
    after_full: Any
    warp_sums: Any
    block_sums: Any
    columns_reduced: Any
    words: Any
    cores: Any
    handout: Any


@dataclass(frozen=True)
class Tile:
    """A tile of the output, and its place.
    Indices along rows and columns, the ``rank`` in the split of the contracted label, the
    coordinates along batch labels, the iterations of the loop, the number of tiles before it in
    this block, and the index in `MatmulPlan.sections` of the columns."""

    row: Any
    column: Any
    rank: Any
    batch: dict[str, Any]
    iterations: Any
    turn: Any = 0
    section: Any = 0


@dataclass(frozen=True)
class Here:
    """The surroundings of a thread that works at a tile.

    Attributes:
        memory: of the block.
        tensors: the arguments.
        thread: index in its role (Int32).
        warp: index in the block, uniform.
        lane: in the warp.
        tile: the one that it works at.
        scratch: tensors in device memory for partial sums and counters, given to consumers and
            helpers; none if blocks do not meet.
    """

    memory: Memory
    tensors: list[cute.Tensor]
    thread: Any
    warp: Any
    lane: Any
    tile: Tile
    scratch: Any = ()

    def at(self, tile: Tile) -> Here:
        """The same thread at another tile."""
        return replace(self, tile=tile)

    def by(self, thread: Any) -> Here:
        """The same tile for a thread that is numbered otherwise."""
        return replace(self, thread=thread)

    @property
    def quarter(self) -> Any:
        """The quarter of the rows that this thread has accumulators of."""
        return self.lane % 4


@dataclass(frozen=True)
class Loads:
    """The bulk loads of a block: by operand the TMA atom, the slots, and the tiles.
    Slots in shared memory, tiles of the tensor."""

    atoms: list[cute.CopyAtom]
    slots: list[Any]
    sources: list[Any]

    def behind(self, first: int) -> Loads:
        """The loads from the ``first`` one on."""
        return Loads(self.atoms[first:], self.slots[first:], self.sources[first:])
