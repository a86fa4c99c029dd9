"""The producer warp of the attention loop: descriptors and order of its bulk loads."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute

from cutesuper.device.memory import bulk_load, operand_layout, partition, tile_atom
from cutesuper.skeletons.attention.kernel.context import Known, Load, Memory
from cutesuper.skeletons.attention.kernel.pages import PagedLoads
from cutesuper.skeletons.attention.kernel.rows import Rows
from cutesuper.skeletons.base import Pages


class Producer:
    """The bulk loads of a block: rows, keys, values, in this order everywhere."""

    def __init__(self, known: Known, rows: Rows) -> None:
        self.k, self.rows = known, rows
        self.pages = PagedLoads(known, rows)
        plan = known.plan
        self.views = known.key_view, known.value_view
        #: labels and extents of the tiles of keys and of values
        self.tiles: tuple[dict[str, int], dict[str, int]] = (
            {plan.keys: known.key_tile, plan.inner: known.depth},
            {plan.columns: known.width, plan.keys: known.key_tile},
        )
        #: bytes of a stage
        self.bytes = tuple(
            plan.element_bytes * known.key_tile * n for n in (known.depth, known.width)
        )

    # ------------------------------------------------------------------------------------ host

    def layout(self, n: int, stages: int) -> cute.ComposedLayout:
        """Layout of the swizzled tiles of keys or values.
        Keys ``[key, inner, stage]`` (n = 0), values ``[column, key, stage]`` (n = 1)."""
        k, shape = self.k, (*self.tiles[n].values(),)
        along = k.inner_major if n == 0 else not k.column_major
        return operand_layout(k.dtype, (shape[0], shape[1]), stages, along)

    def atoms(self, tensors: list[cute.Tensor]) -> list[Any]:
        """The TMA loads, each with its coordinate tensor."""
        layouts = [self.layout(n, 1) for n in range(2)]
        return [
            self.rows.atom(tensors),
            *(self.atom(n, cute.slice_(layouts[n], (None, None, 0)), tensors) for n in range(2)),
        ]

    def atom(self, n: int, stage: cute.ComposedLayout, tensors: list[cute.Tensor]) -> Any:
        """The copy atom of keys or of values, with modes (labels..., its batch labels...)."""
        view, tile = self.views[n], self.tiles[n]
        if isinstance(view, Pages):
            return self.pages.atom(view, stage, tensors)
        return tile_atom(self.k.matrix(view, tuple(tile), tensors), stage, tuple(tile.values()))

    # ---------------------------------------------------------------------------------- device

    def partition(self, atoms: list[Any], coords: list[Any], memory: Memory) -> list[Load]:
        """Slots in shared memory and tiles in device memory."""
        found = [Load(atoms[0], *self.rows.partition(atoms[0], coords[0], memory))]
        for n, ring in enumerate((memory.keys, memory.values)):
            atom, coord, view = atoms[1 + n], coords[1 + n], self.views[n]
            if isinstance(view, Pages):
                pair = self.pages.partition(view, atom, coord, ring)
            else:
                tile = tuple(self.tiles[n].values())
                tiles = cute.local_tile(coord, tile, (None,) * cute.rank(coord))
                pair = partition(atom, ring, tiles, 2)
            found.append(Load(atom, *pair))
        return found

    @cute.jit
    def fill(self, loads, tables, memory, place, first, count):
        """Load the rows and the first round of the ring."""
        memory.rows_full.only.expect_once(self.rows.bytes)
        self.rows.load(loads[0], memory, place)
        for i in cutlass.range(min(self.k.stages, count), unroll=1):
            self.pages.turn(tables, first, first + i)
            for n in cutlass.range_constexpr(2):
                self.load(n, loads[1 + n], tables, memory, place, first + i, i)

    @cute.jit
    def run(self, loads, tables, memory, place, first, count):
        """Load the remaining tiles, each once its stage has been read."""
        rings = memory.key_ring, memory.value_ring
        at = rings[0].first()
        for i in cutlass.range(self.k.stages, count, unroll=1):
            self.pages.turn(tables, first, first + i)
            for n in cutlass.range_constexpr(2):
                rings[n].wait_empty(at)
                self.load(n, loads[1 + n], tables, memory, place, first + i, at.stage)
            at = rings[0].next(at)

    @cute.jit
    def load(self, n: cutlass.Constexpr, load, tables, memory, place, tile, stage):
        """Load one tile of keys (n = 0) or of values (n = 1)."""
        view = self.views[n]
        ring = (memory.key_ring, memory.value_ring)[n]
        barrier = ring.expect(stage, self.bytes[n])
        if cutlass.const_expr(isinstance(view, Pages)):
            self.pages.load(view, load, tables[view.table], place, tile, stage, barrier)
        else:
            where = (0, tile) if n else (tile, 0)
            at = (None, *where, *self.k.coordinates(view, place))
            bulk_load(load.atom, load.tiles[at], load.slots[None, stage], barrier, self.k.hint)
