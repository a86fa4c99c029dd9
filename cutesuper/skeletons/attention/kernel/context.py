"""Facts that the parts of an attention kernel read.
The plan, what follows from it and, while tracing, the memory of the block, its place in the problem
and the thread.

Parts are given these and the parts that they use, never the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cutlass.cute as cute

from cutesuper.device.architecture import products
from cutesuper.device.barriers import Barriers, Meeting
from cutesuper.device.math import ScoreMath
from cutesuper.device.memory import EVICT_FIRST
from cutesuper.device.pipeline import Ring
from cutesuper.device.products import FREE_BARRIER, Products
from cutesuper.skeletons.attention.plan import AttentionPlan
from cutesuper.skeletons.kernel.arguments import ELEMENT, Extents, batch_labels, labelled

#: named barriers: one per warpgroup, one for warpgroups that share rows, and one for taking turns;
#: behind those of products, one for values that have been cleared
GROUP_BARRIER, ROWS_BARRIER, TURN_BARRIER, CLEARED_BARRIER = 1, 3, 5, FREE_BARRIER


@dataclass(frozen=True)
class Known:
    """The plan of a kernel, and facts that follow from it.

    Attributes:
        plan: of the kernel.
        cores: the tensor cores.
        extents: of labels.
        dtype: of the operands.
        math: scalar functions.
        key_view, value_view: of keys and values.
        inner_major, column_major: true if the elements of a key, of a value are contiguous.
        stages: of the rings.
        key_groups, row_groups: warpgroups along the keys, along the rows.
        warpgroups: of consumers.
        producer: index of the producer warp, behind them.
        key_tile: keys of a tile.
        depth, width: elements of a query, of a value, with padding.
        dependent: true if the launch depends on the one before.
    """

    plan: AttentionPlan
    cores: Products
    extents: Extents
    dtype: Any
    math: ScoreMath
    key_view: Any
    value_view: Any
    inner_major: bool
    column_major: bool
    stages: int
    key_groups: int
    row_groups: int
    warpgroups: int
    producer: int
    key_tile: int
    depth: int
    width: int
    dependent: bool

    @staticmethod
    def of(plan: AttentionPlan) -> Known:
        """Derive the facts of a plan, for the architecture that is being compiled for."""
        extents, s = Extents(plan.program, plan.arguments), plan.schedule
        keys, values = plan.view(plan.key_load), plan.view(plan.value_load)
        return Known(
            plan, products(), extents, ELEMENT[plan.dtype], ScoreMath(), keys, values,
            keys.contiguous(plan.inner), values.contiguous(plan.columns), s.stages,
            s.key_groups, s.row_groups, plan.warpgroups, 4 * plan.warpgroups,
            plan.key_tile, plan.depth, plan.width, s.dependent_launch,
        )  # fmt: skip

    @property
    def steps(self) -> int | None:
        """Key tiles of every block, if all blocks have the same number."""
        plan = self.plan
        if plan.varying:
            return None
        tiles = -(-plan.key_extent // self.key_tile)
        return tiles // plan.parts if tiles % plan.parts == 0 else None

    @property
    def hint(self) -> int | None:
        """L2 eviction hint for keys and values, or None."""
        return EVICT_FIRST if self.plan.schedule.stream_keys else None

    def batch_of(self, view: Any) -> tuple[str, ...]:
        """The batch labels of an operand."""
        return batch_labels(self.plan.batch, view)

    def coordinates(self, view: Any, place: Place) -> tuple[Any, ...]:
        """Coordinates of a block's batch in an operand."""
        return tuple(place.batch[d] for d in self.batch_of(view))

    def matrix(self, view: Any, labels: tuple[str, ...], tensors: list[cute.Tensor]) -> cute.Tensor:
        """An operand as TMA loads see it, with modes (labels..., its batch labels...)."""
        return labelled(self.extents, view, (*labels, *self.batch_of(view)), tensors)


@dataclass(frozen=True)
class Memory:
    """Shared memory of a block.

    Attributes:
        rows, keys, values: operands.
        row_values, key_values: fp32.
        meeting, exchange: through which warpgroups and blocks exchange items (fp32).
        last: for each warpgroup, 1 if its part of the grid is the last one (int32).
        values_ready: stages whose values of keys are there.
        received: by warpgroup, bytes that the cluster sends.
        key_ring, value_ring: full and empty stages.
        rows_full: bytes of the rows.
        cores: what the tensor cores need.
    """

    rows: cute.Tensor
    keys: cute.Tensor
    values: cute.Tensor
    row_values: cute.Pointer
    key_values: cute.Pointer
    values_ready: Barriers
    meeting: cute.Pointer
    exchange: cute.Pointer
    received: Barriers
    last: cute.Pointer
    key_ring: Ring
    value_ring: Ring
    rows_full: Barriers
    cores: Any


@dataclass(frozen=True)
class Place:
    """The work of a block.

    Attributes:
        part: of the keys.
        rank: of the block in its cluster.
        tile: index among the tiles of rows of all batches.
        tiles: index of the tile along each row label.
        batch: coordinates along batch labels.
        lengths, offsets: of masks.
        keys: number of all keys.
    """

    part: Any
    rank: Any
    tile: Any
    tiles: dict[str, Any]
    batch: dict[str, Any]
    lengths: list[Any]
    offsets: list[Any]
    keys: Any


@dataclass(frozen=True)
class Load:
    """The bulk loads of an operand: TMA atom, slots in shared memory, and tiles of the tensor.
    In a cache of pages, boxes of a page."""

    atom: cute.CopyAtom
    slots: Any
    tiles: Any


@dataclass(frozen=True)
class RowFacts:
    """Facts of the rows of a consumer thread.

    Attributes:
        values: fp32, of each row, in the order of the plan.
        beside: for each load that meets the scores, the offsets of the rows in its tensor.
        begins, limits: the first key that each row sees, if masks hide keys in front of one, and
            the end of its keys.
        latest, least: the first of these of the last row of the tile, the second of the first row.
        end: of the keys that have been written.
    """

    values: list[list[Any]]
    beside: dict[int, list[Any]]
    begins: list[Any]
    limits: list[Any]
    latest: Any
    least: Any
    end: Any


@dataclass(frozen=True)
class Here:
    """The surroundings of a consumer thread.

    Attributes:
        memory: of the block.
        tensors: the arguments.
        scratch: device memory for partial results and counters; none if the grid has no parts.
        place: of the block.
        warp: index in the block, uniform.
        lane: in the warp.
        thread: index in the block.
        group: the warpgroup.
        member: index of the thread in its warpgroup.
    """

    memory: Memory
    tensors: list[cute.Tensor]
    scratch: list[cute.Tensor]
    place: Place
    warp: Any
    lane: Any
    thread: Any
    group: Any
    member: Any

    def after_loop(self) -> Here:
        """The same thread; its indices are computed again, not kept in registers."""
        return replace(self, group=self.warp // 4, member=self.thread % 128)

    def group_meets(self) -> None:
        """Wait for all threads of this warpgroup."""
        Meeting(GROUP_BARRIER + self.group, 128).meet()
