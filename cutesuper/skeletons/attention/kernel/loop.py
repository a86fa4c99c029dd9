"""The attention loop as a traced kernel: walks an `AttentionPlan`.

Roles of the warps of a block: consumer warpgroups of 64 rows (scores, weights, results in
registers) and one producer warp (TMA loads). Warpgroups along the keys take stages in turn: while
one computes exponentials, the tensor cores work for the other.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.memory

from cutesuper.device.barriers import Barriers, initialise
from cutesuper.device.cluster import announce, wait_for_cluster
from cutesuper.device.launch import (
    give_registers,
    start_successor,
    take_registers,
    wait_for_predecessor,
)
from cutesuper.device.math import DeviceMath
from cutesuper.device.memory import (
    EVICT_FIRST,
    ask_for_descriptors,
    bulk_load,
    operand,
    operand_layout,
    partition,
    tile_atom,
)
from cutesuper.device.pipeline import Ring
from cutesuper.device.products import Product, products
from cutesuper.skeletons.attention.kernel.consumer import Consumer
from cutesuper.skeletons.attention.kernel.join import Join
from cutesuper.skeletons.attention.kernel.keys import KeyValues
from cutesuper.skeletons.attention.kernel.pages import PagedLoads
from cutesuper.skeletons.attention.kernel.rows import Rows
from cutesuper.skeletons.attention.kernel.scores import Scores
from cutesuper.skeletons.attention.plan import AttentionPlan
from cutesuper.skeletons.base import Pages
from cutesuper.skeletons.kernel.arguments import ELEMENT, Extents, batch_labels, described, labelled


class AttentionKernel:
    """The kernel: launches a cluster for each tile of rows and part of the grid; see the module's
    docstring."""

    def __init__(self, plan: AttentionPlan) -> None:
        self.plan = plan
        self.extents = Extents(plan.program, plan.arguments)
        self.dtype = ELEMENT[plan.dtype]
        s = plan.schedule
        self.stages, self.key_groups, self.row_groups = s.stages, s.key_groups, s.row_groups
        self.warpgroups = plan.warpgroups
        self.producer = 4 * plan.warpgroups
        self.dependent = s.dependent_launch
        self.key_tile, self.depth, self.width = plan.key_tile, plan.depth, plan.width
        self.math = DeviceMath(fast=True)
        self.cores = products()
        self.key_view, self.value_view = plan.view(plan.key_load), plan.view(plan.value_load)
        self.inner_major = self.key_view.stride(plan.inner) == 1
        self.column_major = self.value_view.stride(plan.columns) == 1
        self.rows = Rows(self)
        self.pages = PagedLoads(self)
        self.scores = Scores(self)
        self.key_values = KeyValues(self)
        self.join = Join(self)
        tiles = -(-plan.key_extent // self.key_tile)
        #: key tiles of every block, if all blocks have the same number
        self.steps = tiles // plan.parts if not plan.varying and tiles % plan.parts == 0 else None
        self.consumer = Consumer(self)

    # ------------------------------------------------------------------------------------ host

    @cute.jit
    def __call__(self, *args):
        """Launch; the arguments are the plan's tensors in order, its scratch, then the stream."""
        plan = self.plan
        count = len(plan.arguments)
        tensors, scratch, stream = list(args[:count]), list(args[count:-1]), args[-1]
        keys, values = self.key_layout(1), self.value_layout(1)
        atoms = [
            self.rows.atom(tensors),
            self.atom(
                self.key_view,
                {plan.keys: self.key_tile, plan.inner: self.depth},
                cute.slice_(keys, (None, None, 0)),
                tensors,
            ),
            self.atom(
                self.value_view,
                {plan.columns: self.width, plan.keys: self.key_tile},
                cute.slice_(values, (None, None, 0)),
                tensors,
            ),
        ]
        batch = 1
        for label in plan.batch:
            batch = batch * self.extents.of(label, tensors)
        self.kernel([a[0] for a in atoms], [a[1] for a in atoms], tensors, scratch).launch(
            # one grid dimension: the others end at 65535
            grid=(plan.parts * self.rows.tiles(tensors) * batch, 1, 1),
            block=(plan.threads, 1, 1),
            cluster=(plan.cluster, 1, 1),
            stream=stream,
            use_pdl=self.dependent,
            min_blocks_per_mp=plan.schedule.resident,
            # set where blocks share an SM; otherwise the compiler asks a driver for it
            **({"preferred_smem_carveout": 100} if plan.schedule.resident > 1 else {}),
        )

    def matrix(self, view: Any, labels: tuple[str, ...], tensors: list[cute.Tensor]) -> cute.Tensor:
        """An operand as TMA loads see it, with modes (labels..., its batch labels...)."""
        tensor = labelled(self.extents, view, (*labels, *self.batch_of(view)), tensors)
        shape = tuple(described(n) for n in tensor.shape)
        return cute.make_tensor(tensor.iterator, cute.make_layout(shape, stride=tensor.stride))

    def atom(
        self,
        view: Any,
        tile: dict[str, int],
        stage: cute.ComposedLayout,
        tensors: list[cute.Tensor],
    ) -> Any:
        """The TMA load of a column-side operand with modes (labels..., its batch labels...)."""
        if isinstance(view, Pages):
            return self.pages.atom(view, stage, tensors)
        return tile_atom(self.matrix(view, tuple(tile), tensors), stage, tuple(tile.values()))

    def batch_of(self, view: Any) -> tuple[str, ...]:
        """The batch labels of an operand."""
        return batch_labels(self.plan.batch, view)

    def key_layout(self, stages: int) -> cute.ComposedLayout:
        """Layout of the key tiles ``[key, inner, stage]``, swizzled."""
        return operand_layout(self.dtype, (self.key_tile, self.depth), stages, self.inner_major)

    def value_layout(self, stages: int) -> cute.ComposedLayout:
        """Layout of the value tiles ``[column, key, stage]``, swizzled."""
        tile = (self.width, self.key_tile)
        return operand_layout(self.dtype, tile, stages, not self.column_major)

    def score_product(self) -> Product:
        """The product of rows and keys, both in shared memory."""
        return self.cores.product(self.dtype, self.key_tile, (True, self.inner_major))

    def value_product(self) -> Product:
        """The product of weights, in registers, and values."""
        along = (True, not self.column_major)
        return self.cores.product(self.dtype, self.width, along, registers=True)

    # ---------------------------------------------------------------------------------- device

    @cute.kernel
    def kernel(
        self,
        atoms: list[cute.CopyAtom],
        coords: list[cute.Tensor],
        tensors: list[cute.Tensor],
        scratch: list[cute.Tensor],
    ):
        tidx, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = tidx % 32
        if warp == 0:
            ask_for_descriptors(atoms)
        smem = self.allocate()
        loads = self.partition_all(atoms, coords, smem)
        if cutlass.const_expr(self.dependent and (self.rows.has_lengths or self.plan.paged)):
            wait_for_predecessor()
        place = self.rows.place(tensors)
        first, count = self.span(tensors, place)
        place["tables"] = self.pages.open(tensors, place, first)
        if warp == self.producer:
            self.set_up(smem, place)
            if cutlass.const_expr(self.dependent):
                start_successor()
                wait_for_predecessor()
            self.fill(atoms, loads, smem, place, first, count)
        elif cutlass.const_expr(self.dependent):
            start_successor()
        cute.arch.sync_threads()
        if cutlass.const_expr(self.plan.cluster > 1):
            announce()
        registers = self.plan.registers
        if warp >= self.producer:
            if cutlass.const_expr(registers is not None):
                give_registers(registers[1])
            if warp == self.producer:
                self.produce(atoms, loads, smem, place, first, count)
            elif cutlass.const_expr(self.plan.helpers > 0):
                self.key_values.run(
                    smem, tidx - 32 * (self.producer + 1), lane, place, first, count
                )
            if cutlass.const_expr(self.plan.cluster > 1):
                wait_for_cluster()
        else:
            if cutlass.const_expr(registers is not None):
                take_registers(registers[0])
            self.consumer.consume(smem, tensors, scratch, tidx, warp, lane, place, first, count)

    def allocate(self) -> dict[str, Any]:
        """Allocate shared memory: operands, exchange buffers, barriers."""
        alloc = cutlass.memory.SmemAllocator()
        smem = {
            "rows": operand(alloc, self.dtype, self.rows.layout(self.row_groups)),
            "keys": operand(alloc, self.dtype, self.key_layout(self.stages)),
            "values": operand(alloc, self.dtype, self.value_layout(self.stages)),
        }
        self.rows.allocate(alloc, smem)
        self.key_values.allocate(alloc, smem)
        self.join.allocate(alloc, smem)
        full = [Barriers.allocate(alloc, self.stages) for _ in range(2)]
        readers = 4 * self.row_groups + self.plan.helpers
        empty = [Barriers.allocate(alloc, self.stages, readers) for _ in range(2)]
        smem["key_ring"], smem["value_ring"] = (
            Ring(self.stages, *pair) for pair in zip(full, empty, strict=True)
        )
        smem["rows_full"] = Barriers.allocate(alloc)
        return smem

    def partition_all(self, atoms: list[Any], coords: list[Any], smem: dict[str, Any]) -> Any:
        """Slots in shared memory and tiles in device memory, for rows, keys and values."""
        found = [self.rows.partition(atoms[0], coords[0], smem)]
        boxes = (
            (self.key_view, smem["keys"], (self.key_tile, self.depth)),
            (self.value_view, smem["values"], (self.width, self.key_tile)),
        )
        for atom, coord, (view, ring, tile) in zip(atoms[1:], coords[1:], boxes, strict=True):
            if isinstance(view, Pages):
                found.append(self.pages.partition(view, atom, coord, ring))
                continue
            tiles = cute.local_tile(coord, tile, (None,) * cute.rank(coord))
            found.append(partition(atom, ring, tiles, 2))
        return found

    @cute.jit
    def set_up(self, smem, place):
        """Initialise the barriers; called by the producer warp before anything else."""
        keys, values = smem["key_ring"], smem["value_ring"]
        arrays = [keys.full, values.full, keys.empty, values.empty, smem["rows_full"]]
        arrays += [smem["values_ready"]] * (self.plan.helpers > 0)
        arrays += [smem["received"]] * (self.plan.cluster > 1)
        initialise(arrays)
        if cutlass.const_expr(self.plan.cluster > 1):
            self.join.expect(smem, place)

    @cute.jit
    def span(self, tensors, place):
        """The key tiles of this block: the first one, and their number (Int32)."""
        plan = self.plan
        part = place["part"]
        if cutlass.const_expr(self.steps is not None):
            first, count = part * self.steps, self.steps
        else:
            tiles = (self.rows.visible(tensors, place) + self.key_tile - 1) // self.key_tile
            first = part * tiles // plan.parts
            count = (part + 1) * tiles // plan.parts - first
        return first, count

    # -------------------------------------------------------------------------------- producer

    @cute.jit
    def fill(self, atoms, loads, smem, place, first, count):
        """Load the rows and the first round of the ring."""
        smem["rows_full"].only.expect_once(self.rows.bytes)
        self.rows.load(atoms[0], loads[0], smem, place)
        for i in cutlass.range(min(self.stages, count), unroll=1):
            self.pages.turn(place, first, first + i)
            self.load_operand(0, atoms, loads, smem, place, first + i, i)
            self.load_operand(1, atoms, loads, smem, place, first + i, i)

    @cute.jit
    def produce(self, atoms, loads, smem, place, first, count):
        """Load the remaining tiles, each once its stage has been read."""
        rings = smem["key_ring"], smem["value_ring"]
        at = rings[0].first()
        for i in cutlass.range(self.stages, count, unroll=1):
            self.pages.turn(place, first, first + i)
            for n in cutlass.range_constexpr(2):
                rings[n].wait_empty(at)
                self.load_operand(n, atoms, loads, smem, place, first + i, at.stage)
            at = rings[0].next(at)

    @cute.jit
    def load_operand(self, n: cutlass.Constexpr, atoms, loads, smem, place, tile, stage):
        """Load one tile of keys (n = 0) or of values (n = 1)."""
        view = (self.key_view, self.value_view)[n]
        ring = smem[("key_ring", "value_ring")[n]]
        barrier = ring.expect(stage, 2 * self.key_tile * (self.depth, self.width)[n])
        if cutlass.const_expr(isinstance(view, Pages)):
            self.pages.load(view, atoms[1 + n], loads[1 + n], place, tile, stage, barrier)
        else:
            slots, tiles = loads[1 + n]
            where = (0, tile) if n else (tile, 0)
            at = (None, *where, *self.coordinates(view, place))
            bulk_load(atoms[1 + n], tiles[at], slots[None, stage], barrier, self.hint)

    @property
    def hint(self) -> int | None:
        """L2 eviction hint for keys and values, or None."""
        return EVICT_FIRST if self.plan.schedule.stream_keys else None

    def coordinates(self, view: Any, place: dict[str, Any]) -> tuple[Any, ...]:
        """Coordinates of this block's batch in an operand."""
        return tuple(place["batch"][d] for d in self.batch_of(view))
