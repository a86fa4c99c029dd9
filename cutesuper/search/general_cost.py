"""Cost model for block programs of any form, for all candidate extents of a structure at once.

It is a roofline model over the same quantities as `skeletons.matmul.cost`, with the same constants
(`targets`): bytes from device memory in waves of blocks, bytes that one SM takes in, L2, tensor
cores by the area of their accumulators, arithmetic, iterations, the exchange in a cluster. Programs
of a skeleton (`search.forms`) are priced by that skeleton; this model ranks all others.
"""

from __future__ import annotations

from functools import cached_property
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cutesuper.ir.block import (
    ACCUMULATE,
    CLUSTER_REDUCE,
    ENDING,
    LOAD,
    STORE,
    AxisKind,
    BlockOp,
)
from cutesuper.ir.dims import extent
from cutesuper.ir.operators.base import CONSTANT
from cutesuper.search.general_sizes import Numbers, Shape, Sizes
from cutesuper.skeletons.cost import MIN_STAGES, RESERVED_BYTES, Cost, overlapped
from cutesuper.targets import Target

Reals = NDArray[np.float64]

#: fp32 values that the registers of a block hold besides addresses and operands
REGISTER_VALUES = 48 * 1024
#: elements of a row program that the threads of a block hold
ROW_VALUES = 64 * 1024
#: data that is read again comes from L2 if it is at most this large
L2_BYTES = 40e6
#: most blocks of a kernel without matrix products that share an SM
RESIDENT = 8
#: smallest tile of a tensor core instruction: one side of 64, the other of 8
TENSOR_SIDE, TENSOR_OTHER, TENSOR_INNER = 64, 8, 16


class Model:
    """Prices of the candidate extents of one structure.

    Args:
        shape: the structure.
        sizes: candidates.
        target: the device.
        itemsizes: bytes per element of every tensor.
    """

    def __init__(
        self, shape: Shape, sizes: Sizes, target: Target, itemsizes: dict[str, int]
    ) -> None:
        self.shape, self.sizes, self.target, self.itemsizes = shape, sizes, target, itemsizes
        self.structure = shape.structure
        self.elements = [sizes.elements(op.dims) for op in self.structure.ops]
        self.loops = [a.name for a in self.structure.of_kind(AxisKind.LOOP)]
        self.stage, self.once, self.again = self._loads()
        self.shared = self._shared()

    # ------------------------------------------------------------------------------------ memory

    def _bytes(self, i: int) -> Reals:
        op = self.structure.ops[i]
        return self.elements[i].astype(float) * self.itemsizes[op.attributes["tensor"]]

    def _loads(self) -> tuple[Reals, Reals, Reals]:
        """Bytes loaded in an iteration, bytes loaded outside loops, and whole rows read again."""
        zero = np.zeros(self.sizes.count)
        stage, once, again = zero.copy(), zero.copy(), zero.copy()
        for i, op in enumerate(self.structure.ops):
            if op.kind != LOAD:
                continue
            if set(self.loops) & self.shape.states[i].inside:
                stage += self._bytes(i)
                if self.shape.runs[i] > 1:
                    again += self._bytes(i) * self.sizes.times(self.loops)
            else:
                once += self._bytes(i)
        return stage, once, again

    def _shared(self) -> Reals:
        """Shared-memory bytes of the fewest stages, resident tensors, operands and the exchange."""
        staged = MIN_STAGES * self.stage if self.loops else 0.0 * self.stage
        operands = np.zeros(self.sizes.count)
        ops = self.structure.ops
        for i in self.shape.products:
            for j in ops[i].inputs:
                operands += 2.0 * self.elements[j] * (ops[j].kind != LOAD)
        exchange = self._exchanged() * 4.0
        return staged + self.once + np.maximum(operands, exchange) + RESERVED_BYTES

    def _exchanged(self) -> Reals:
        """Number of fp32 values that blocks of a cluster combine."""
        total = np.zeros(self.sizes.count)
        for op, elements in zip(self.structure.ops, self.elements, strict=True):
            if op.kind == CLUSTER_REDUCE:
                total += elements
        return total

    def resident(self) -> NDArray[np.bool_]:
        """True where the rows that several passes read stay in shared memory."""
        return self.shared + self.again <= self.target.shared_bytes

    def registers(self) -> Reals:
        """Number of fp32 values that live at once: accumulators, and the largest other value."""
        live = np.zeros(self.sizes.count)
        other = np.zeros(self.sizes.count)
        ops, users = self.structure.ops, self._users
        for i, op in enumerate(ops):
            if op.kind == ACCUMULATE:
                live += self.elements[i]
            elif i in self.shape.products and all(ops[u].kind == ACCUMULATE for u in users[i]):
                continue  # the accumulator itself
            elif op.kind not in (LOAD, STORE, CONSTANT):
                other = np.maximum(other, self.elements[i])
        return live + other

    @cached_property
    def _users(self) -> list[list[int]]:
        """For every operation, the operations that use it."""
        users: list[list[int]] = [[] for _ in self.structure.ops]
        for i, op in enumerate(self.structure.ops):
            for j in op.inputs:
                users[j].append(i)
        return users

    def fits(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """True where shared memory suffices, and True where registers do."""
        values = REGISTER_VALUES if self.shape.products else ROW_VALUES
        return self.shared <= self.target.shared_bytes, self.registers() <= values

    # -------------------------------------------------------------------------------------- time

    def price(self) -> tuple[Reals, dict[str, Reals]]:
        """Total microseconds, and microseconds by cause."""
        t, r, sizes = self.target, self.target.rates, self.sizes
        cluster = sizes.times([a.name for a in self.structure.of_kind(AxisKind.CLUSTER)])
        grid = [a.name for a in self.structure.of_kind(AxisKind.GRID)]
        blocks = sizes.times(grid) * cluster
        slots = cluster * np.array([t.clusters.get(int(n), 1) for n in cluster])
        resident = np.ones(sizes.count)
        if not self.shape.products:
            resident = np.clip(t.shared_bytes // self.shared, 1, RESIDENT)
        rounds = np.ceil(blocks / slots)
        moved, loaded = self._traffic(blocks)
        sms = np.minimum(t.sms, blocks)
        staged, looped, end = self._arithmetic()
        parts = {
            "memory": moved / t.bandwidth * 1e6 * (1 + r.piece_bytes / self._piece()),
            "ingest": rounds * loaded / r.sm_bytes_per_us,
            "l2": blocks * loaded / t.l2_bandwidth * 1e6,
            "iterations": np.ceil(rounds / resident) * self._iterations() * r.iteration_us
            + rounds * (self._staged_us() + staged / r.lanes_per_us),
            "lanes": looped * blocks / (r.lanes_per_us * sms),
        }
        tensor = rounds * self._tensor()
        busy = np.maximum(overlapped(r.overlap, *parts.values()), tensor)
        stage = np.where(self.stage > 0, self.stage, self.once)
        ramp = r.first_stage * stage / r.sm_bytes_per_us + self._reductions() * r.reduction_us
        ramp = ramp + (np.ceil(rounds / resident) - 1) * r.block_us
        exchange, store = (rounds * us for us in self._end_us(cluster))
        store = store + rounds * end / r.lanes_per_us / np.maximum(cluster, 1)
        launch = np.full(sizes.count, t.launch_us)
        parts |= {"tensor": tensor, "launch": launch, "ramp": ramp}
        parts |= {"exchange": exchange, "store": store}
        return launch + busy + ramp + exchange + store, parts

    def _traffic(self, blocks: Any) -> tuple[Reals, Reals]:
        """Total bytes of device memory, and bytes that one block takes in."""
        structure, sizes = self.structure, self.sizes
        resident = self.resident()
        loaded = np.zeros(sizes.count)
        tensors: dict[str, Reals] = {}
        for i, op in enumerate(structure.ops):
            if op.kind not in (LOAD, STORE):
                continue
            whole = np.full(sizes.count, float(self._whole(op)))
            for d in op.attributes["map"]:
                whole = whole * sizes.parts[d] if d in sizes.parts else whole
            name = op.attributes["tensor"]
            whole = whole * self.itemsizes[name]
            runs = np.where(resident, 1, self.shape.runs[i]) if op.kind == LOAD else 1
            if op.kind == LOAD:
                iterations = sizes.times(self.shape.iterated(i))
                loaded += self._bytes(i) * iterations * runs
                whole = whole * np.where(whole > L2_BYTES, runs, 1)
            tensors[name] = np.maximum(tensors.get(name, whole), whole)
        moved = np.zeros(sizes.count)
        for n in tensors.values():
            moved += n
        return moved, loaded

    def _piece(self) -> Reals:
        """Contiguous bytes that an iteration of products loads, in its largest tile."""
        piece, largest = np.full(self.sizes.count, np.inf), np.zeros(self.sizes.count)
        for i, op in enumerate(self.structure.ops):
            looped = op.kind == LOAD and set(self.loops) & self.shape.states[i].inside
            if self.shape.products and looped:
                last = tuple(d for d in op.attributes["map"] if d in self.sizes.tile)[-1:]
                own = self.sizes.elements(last) * float(self.itemsizes[op.attributes["tensor"]])
                piece = np.where(self._bytes(i) > largest, own, piece)
                largest = np.maximum(largest, self._bytes(i))
        return piece

    def _whole(self, op: BlockOp) -> int:
        dims = self.structure.dims
        return prod(extent(dims[d]) for d in op.attributes["map"] if d in dims)

    def _tensor(self) -> Reals:
        """Time of the products of one wave, at the rate that each accumulator's area allows."""
        r, total = self.target.rates, np.zeros(self.sizes.count)
        for i, p in self.shape.products.items():

            def side(labels: frozenset[str]) -> Any:
                ordered = tuple(d for d in self.structure.dims if d in labels)
                return self.sizes.elements(ordered)

            rows, columns = side(p.rows), side(p.columns)
            inner = -(-self.sizes.tile[p.over] // TENSOR_INNER) * TENSOR_INNER
            long = np.maximum(rows, columns)
            short = np.minimum(rows, columns)
            long = -(-long // TENSOR_SIDE) * TENSOR_SIDE
            area = long * (-(-short // TENSOR_OTHER) * TENSOR_OTHER)
            shared = self.structure.ops[i].dims
            batch = side(frozenset(shared) - p.rows - p.columns)
            efficiency = r.tensor_efficiency * area / (area + r.half_area)
            flops = 2.0 * area * inner * batch * self._times(i)
            total += flops * self.target.sms / (self.target.tensor_flops * efficiency) * 1e6
        return total

    def _arithmetic(self) -> tuple[Reals, Reals, Reals]:
        """Instructions of one block: on operands staged for products, in loops, and after them."""
        staged, looped, end = (np.zeros(self.sizes.count) for _ in range(3))
        ops, after = self.structure.ops, self._after_products
        for i, op in enumerate(ops):
            if op.facets.contracts or op.kind in (LOAD, STORE, CONSTANT):
                continue
            source = op.inputs[0] if "over" in op.attributes else i
            if op.kind in ENDING and not op.rescaled:
                continue  # the tensor cores add up, or there are only a few values of a row
            each = self.target.rates.instructions.get(op.kind, 1)
            if op.facets.divides and len(ops[op.inputs[1]].dims) < len(op.dims):
                each = 1  # the reciprocal of a row's value multiplies
            count = self.elements[source] * self._times(source) * each
            iterated = bool(self.shape.iterated(source))
            if not self.shape.products or (iterated and i in after):
                looped += count
            elif iterated:
                staged += count
            else:
                end += count
        return staged, looped, end

    @cached_property
    def _after_products(self) -> set[int]:
        """The operations that are a product, or depend on one."""
        return self.structure.dependence.after(self.shape.products)

    def _times(self, i: int) -> Any:
        """Number of times that a block runs an operation."""
        return self.sizes.times(self.shape.iterated(i)) * self.shape.runs[i]

    def _iterations(self) -> Reals:
        """Number of iterations of a block in all passes."""
        inner = [
            a.name for k in (AxisKind.LOOP, AxisKind.PERSISTENT) for a in self.structure.of_kind(k)
        ]
        if not inner:
            return np.zeros(self.sizes.count)
        count: Reals = np.asarray(self.sizes.times(inner), dtype=np.float64)
        return count * max(self.shape.runs, default=1)

    def _staged_us(self) -> Reals:
        """Time for operands that a block computes from loads, or only reads for statistics.
        Results of a product stay in registers."""
        ops, after = self.structure.ops, self._after_products
        rewritten, read = np.zeros(self.sizes.count), np.zeros(self.sizes.count)
        if not self.shape.products:
            return read
        for j in {j for i in self.shape.products for j in ops[i].inputs}:
            if ops[j].kind != LOAD and j not in after:
                rewritten += self.elements[j] * self._times(j)
        for i, op in enumerate(ops):
            if not op.facets.contracts and "over" in op.attributes and i not in after:
                read += self.elements[op.inputs[0]] * self._times(op.inputs[0])
        r = self.target.rates
        read[rewritten > 0] = 0.0
        return rewritten / r.prologue_per_us + read / r.statistic_per_us

    def _reductions(self) -> int:
        """Reductions of a row program: across warps, over iterations, across a cluster."""
        if self.shape.products:
            return 0
        return sum("over" in op.attributes or op.kind in ENDING for op in self.structure.ops)

    def _end_us(self, cluster: Numbers) -> tuple[Reals, Reals]:
        """Time of a block's exchange with its cluster, and of its epilogue."""
        r, share = self.target.rates, np.maximum(cluster, 1)
        sent = 4.0 * self._exchanged() * (cluster - 1) / share / 1024
        stored, users = np.zeros(self.sizes.count), self._users
        for i in self.shape.products:
            summed = any(self.structure.ops[u].kind == ACCUMULATE for u in users[i])
            if summed or not self.shape.iterated(i):
                stored += self.elements[i] / share / 1024
        per_store = np.where(cluster > 1, r.cluster_store_us, r.store_us)
        return r.exchange_us_per_kb * sent, np.asarray(stored * per_store, dtype=np.float64)

    def cost(self, total: Reals, parts: dict[str, Reals], i: int) -> Cost:
        """Cost of candidate i."""
        return Cost(float(total[i]), {k: float(v[i]) for k, v in parts.items()})
