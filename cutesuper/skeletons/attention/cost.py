"""Cost model of the attention loop, in microseconds.

It is built like `skeletons.matmul.cost`, with the same causes where they apply; the constants and
their measurements are in `targets`. Warpgroups, stages, blocks of an SM and what they exchange are
those of the plan. The main effects are:

* *Waves.* About 64 blocks saturate the memory, so more parts do not read faster; but clusters that
  do not fit at once wait for a whole block. 32 clusters of 4, of which 30 fit, take 12.1 us; 8
  clusters of 8 take 7.3.
* *Joining.* The grid joins in memory, 1.3 us and more; warpgroups and clusters in shared memory.
* *The chain.* Products and softmax of one tile of keys wait for each other, so a block takes at
  least as long as its tiles one after the other; two warpgroups with 64 rows take turns, or
  multiply together and wait for each other.
* *Masks.* Causal blocks have different lengths, and begin one after the other where SMs are free.
* *Lengths* that only the kernel knows: the mean of the costs of equal and of mixed lengths. Parts
  divide each sequence, so lengths matter only between sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from itertools import repeat
from math import prod

from cutesuper.egraph.extract import Price
from cutesuper.egraph.saturate import Derivation, Table
from cutesuper.ir.block import LOAD, BlockOp
from cutesuper.ir.dims import ceil_div, extent
from cutesuper.ir.dtypes import as_dtype
from cutesuper.ir.operators.base import CONSTANT, facets
from cutesuper.skeletons.attention.form import AttentionForm
from cutesuper.skeletons.attention.plan import ROW_BLOCK, AttentionPlan
from cutesuper.skeletons.cost import Cost, bytes_moved, computes, overlapped
from cutesuper.targets import Target

#: blocks per SM, one after the other, from which on it does not matter that some are shorter
EVEN_ROUNDS = 8
#: the fractional parts of its multiples are spread evenly and not sorted
GOLDEN = 0.618034
#: operations on a score beside the exponential that cost nothing: they fill the lanes while the
#: exponentials are computed (scale, maximum, difference, sum)
FREE_OPS = 4
#: fp32 numbers of a 16-byte piece, and results in the unit of the constants
PIECE, RESULTS = 4, 1024


def attention_price(table: Table, form: AttentionForm, target: Target) -> Price:
    """Cost of one derivation while sizes are unknown; see `egraph.extract`.

    A change to a row of Q has to be written back before the first product, so it costs more than
    the same change to the scores; values of a key are computed again for every tile of rows.
    """
    dims = {d: extent(n) for d, n in table.space.program.dims.items()}
    again = max(1.0, prod(dims[d] for d in form.rows) / ROW_BLOCK)
    rate = target.rates.lanes_per_us * target.sms

    def cost(i: int, d: Derivation) -> float:
        labels = table.classes[i].labels
        if d.kind in (LOAD, CONSTANT):
            return 0.0
        over = dims.get(d.over or "", 1)
        rows = not labels.isdisjoint(form.rows)
        count = prod(dims[x] for x in labels) * over * (1.0 if rows else again)
        if facets(d.kind).contracts:
            return 2.0 * count / target.tensor_flops * 1e6
        if rows and form.inner in labels:
            count *= 2 * dims[form.keys] / dims[form.inner]
        each = target.rates.instructions.get(d.kind, 1)
        if facets(d.kind).divides and table.classes[d.inputs[1]].labels < labels:
            each = 1  # the reciprocal multiplies
        return max(1e-4, count * each / rate)

    return cost


def price(plan: AttentionPlan, target: Target) -> Cost:
    """Cost of a planned kernel."""
    return _Model(plan, target).cost()


@dataclass(frozen=True)
class _Work:
    """The work of a program, at any sizes.

    Attributes:
        moved: bytes that device memory reads and writes, each tensor once.
        key_bytes: bytes of one key, in K and V.
        exps, others: exponentials of a score, and operations that they do not hide.
        read: elements of K and V that are read for values of a key, for each key.
        sequences: sequences of different lengths.
    """

    moved: float
    key_bytes: int
    exps: int
    others: int
    read: int
    sequences: int


def _work(plan: AttentionPlan) -> _Work:
    itemsizes = {a.name: as_dtype(a.dtype).itemsize for a in plan.arguments}
    widths = {plan.key_load: plan.extent(plan.inner), plan.value_load: plan.extent(plan.columns)}
    scores = [op for op in plan.program.ops if _on_scores(plan, op)]
    exps = sum(op.facets.exponential for op in scores)
    lengths = [d for m in plan.masks if m.written for d in m.along(plan.batch)]
    return _Work(
        bytes_moved(plan.program, itemsizes),
        sum(widths.values()) * plan.element_bytes,
        exps,
        max(0, len(scores) - exps - FREE_OPS),
        sum(widths[r.operand] for r in plan.key_reductions),
        prod(map(plan.extent, lengths)),
    )


def _on_scores(plan: AttentionPlan, op: BlockOp) -> bool:
    """True if an operation is computed for every score."""
    if not computes(op) or op.facets.masks:
        return False
    labels = plan.program.ops[op.inputs[0]].dims if "over" in op.attributes else op.dims
    return plan.keys in labels and not set(labels).isdisjoint(plan.own_labels)


class _Model:
    """Prices one plan."""

    def __init__(self, plan: AttentionPlan, target: Target) -> None:
        self.plan, self.target, self.rates = plan, target, target.attention
        self.work = _work(plan)
        #: clusters; those that run at once with one block on each SM, and with all that it can hold
        self.units = plan.row_tiles * plan.grid_parts
        self.slots = target.clusters[plan.cluster]
        self.at_once = self.slots * plan.schedule.resident
        #: bytes of a tile of keys and values, and results of a block in units
        self.tile_bytes = plan.key_tile * self.work.key_bytes
        self.results = plan.block_rows * plan.extent(plan.columns) / RESULTS

    def loops(self) -> list[int]:
        """Tiles of keys of a block for each tile of the masked label, the longest first.
        The position along that label hides keys. Parts divide the keys that a tile of rows sees."""
        p = self.plan
        mask = next((m for m in p.masks if m.rows is not None and not m.lower), None)
        if mask is None or mask.rows is None:
            return [p.loop]
        tile, whole = p.tile(mask.rows), p.extent(mask.rows)
        before = p.offset(mask) - 1 + (p.key_extent if mask.lengths is not None else 0)
        ends = (min((i + 1) * tile, whole) for i in reversed(range(ceil_div(whole, tile))))
        seen = (min(p.key_extent, max(0, before + end)) for end in ends)
        return [ceil_div(n, p.key_tile * p.parts) for n in seen]

    def cost(self) -> Cost:
        """Waves of clusters, or clusters in turn if a mask makes some shorter."""
        loops, ends = self.loops(), self._ends_us()
        if len(loops) == 1:
            busy, causes = self._waves(loops[0], sum(ends.values()))
        else:
            busy, causes = self._turns(loops, sum(ends.values()))
        if self.work.sequences > 1 and len(loops) == 1:
            causes["mixed"] = self._mixed_us(sum(ends.values()))
            busy = (busy + causes["mixed"]) / 2
        launch = self.target.launch_us
        return Cost(launch + busy, {"launch": launch} | ends | causes)

    def _waves(self, loop: int, ends: float) -> tuple[float, dict[str, float]]:
        """Cost of equal clusters.
        Beginnings and ends of blocks hide behind the memory of the device, but not those of the
        last wave."""
        units, at_once = self.units, self.at_once
        last = (units - 1) % at_once + 1
        full, active = (units - last) // at_once, min(units, at_once)
        exponent = self.rates.overlap
        own = self._block_us(loop, ceil_div(active, self.slots))
        shared = self._shared_us(active / units, loop * active * self.plan.cluster)
        total = full * overlapped(
            exponent, ends + overlapped(exponent, *own.values()), *shared.values()
        )
        causes = {cause: full * us for cause, us in (own | shared).items()}
        own = self._block_us(loop, ceil_div(last, self.slots))
        shared = self._shared_us(last / units, loop * last * self.plan.cluster)
        total += ends + overlapped(exponent, *own.values(), *shared.values())
        return total, {cause: causes[cause] + us for cause, us in (own | shared).items()}

    def _turns(self, loops: list[int], ends: float) -> tuple[float, dict[str, float]]:
        """Cost of clusters of different lengths: the next in order begins where one has ended.

        They end together where there are many of them.
        """
        units, slots = self.units, self.slots
        exponent = self.rates.overlap
        mean = sum(loops) / len(loops)
        if units > EVEN_ROUNDS * slots:
            own = self._block_us(mean, 1)
            turns = units / slots * (ends + overlapped(exponent, *own.values()))
        else:
            times = {
                n: ends + overlapped(exponent, *self._block_us(n, 1).values()) for n in set(loops)
            }
            busy = [0.0] * slots
            for n in self._in_order(loops):
                heapreplace(busy, busy[0] + times[n])
            turns = max(busy)
        shared = self._shared_us(1.0, mean * units * self.plan.cluster)
        return overlapped(exponent, turns, *shared.values()), {"blocks": turns} | shared

    def _in_order(self, loops: list[int]) -> Iterator[int]:
        """The tiles of keys of all blocks, in the order in which they begin."""
        members = self.units // len(loops)
        abreast = max(1, self.plan.keys_together // self.plan.key_extent)
        for first in range(0, members, abreast):
            for n in loops:
                yield from repeat(n, min(abreast, members - first))

    def _mixed_us(self, ends: float) -> float:
        """Time for unsorted sequences of all lengths up to the longest.
        Each is divided into the same number of parts.

        Blocks share the memory evenly, so a long one is not late while there are others; once there
        are fewer than the memory can serve, each is limited by the rate of an SM.
        """
        units, at_once = self.units, self.at_once
        loop, count = self.plan.loop, self.work.sequences
        exponent = self.rates.overlap
        alone = overlapped(exponent, *self._block_us(loop, 1).values()) / loop
        all_of_it = self._shared_us(1.0, loop * units * self.plan.cluster)
        shared = overlapped(exponent, *all_of_it.values()) / (loop * units)
        fixed = ends / max(alone, at_once * shared)  # in tiles
        if units > EVEN_ROUNDS * at_once:
            mean = fixed + loop * (count + 1) / (2 * count)
            return units * mean * max(shared, alone / at_once)
        us, walked = 0.0, 0.0  # by a block that has run from the beginning
        running: list[float] = []

        def next_one() -> None:
            nonlocal us, walked
            us += (running[0] - walked) * max(alone, len(running) * shared)
            walked = heappop(running)

        for rank in sorted(range(count), key=lambda i: i * GOLDEN % 1):
            for _ in range(units // count):
                if len(running) == at_once:
                    next_one()
                heappush(running, walked + fixed + max(1.0, loop * (rank + 1) / count))
        while running:
            next_one()
        return us

    def _shared_us(self, share: float, loops: float) -> dict[str, float]:
        """Work that all blocks share: ``share`` of the bytes of memory, ``loops`` tiles of keys."""
        t, c = self.target, self.rates
        late = c.late if self.plan.schedule.dependent_launch and self._crowds() else 1.0
        return {
            "memory": late * share * self.work.moved / (t.bandwidth * c.streamed) * 1e6,
            "l2": loops * self.tile_bytes / (t.l2_bandwidth * c.from_l2) * 1e6,
        }

    def _crowds(self) -> bool:
        """True if only some of the next launch's clusters find room beside this launch's.
        The others begin behind all. Where hardly any does, as with 64 pairs of 66, nothing is
        lost."""
        if self.units > self.slots:
            return self.plan.cluster > 2
        return self.units / self.rates.crowd < self.slots - self.units < self.units

    def _block_us(self, loop: float, shared_by: int) -> dict[str, float]:
        """Time by cause of a block with ``loop`` tiles of keys.
        ``shared_by`` blocks share its SM."""
        s = self.plan.schedule
        tensor, lanes = self._tile_us()
        loop = max(1.0, loop)
        return {
            "ingest": shared_by * loop * self.tile_bytes / self.target.rates.sm_bytes_per_us,
            "chain": max(1.0, loop / s.key_groups) * self._step_us(),
            "tensor": shared_by * loop * s.row_groups * tensor,
            "lanes": shared_by * loop * s.row_groups * lanes,
            "values": shared_by * loop * self._values_us(),
        }

    def _tile_us(self) -> tuple[float, float]:
        """Time of a warpgroup's products on a tile of keys, and of the work between them."""
        t, r, p = self.target, self.target.rates, self.plan
        area = ROW_BLOCK * p.key_tile
        flops = 2.0 * area * (p.depth + p.width)
        rate = t.tensor_flops * (t.doubled if p.schedule.together else 1.0)
        tensor = flops * t.sms / (rate * r.tensor_efficiency) * 1e6
        lanes = area * (self.work.exps / self.rates.exps_per_us + self.work.others / r.lanes_per_us)
        return tensor, lanes / 2 if p.few_rows else lanes

    def _values_us(self) -> float:
        """Time for the values of a tile's keys, computed by warps of their own."""
        return self.plan.key_tile * self.work.read / self.rates.value_reads_per_us

    def _step_us(self) -> float:
        """Time of a tile of keys from its first product to its last.
        Warpgroups of different rows meet at the tensor cores and where exponentials are computed,
        during which their products of values run. Along the keys, one computes exponentials while
        the other multiplies. Those that multiply together wait for each other."""
        tensor, lanes = self._tile_us()
        s = self.plan.schedule
        groups, latencies = s.row_groups, self.rates.step_us
        work = max(groups * tensor, tensor + lanes)
        if s.together:  # products of values hide behind the next tile's exponentials
            work = tensor + (max(tensor, 2 * lanes) if s.overlapped else tensor + 2 * lanes)
        elif s.overlapped and groups > 1:
            latencies, work = self.rates.apart_us, max(groups * tensor, tensor + groups * lanes)
        return latencies + work + self._values_us()

    def _ends_us(self) -> dict[str, float]:
        """Time of the beginning of a block, which waits for its first stage, and of its end."""
        r = self.target.rates
        ramp = self.rates.ramp_us + r.first_stage * self.tile_bytes / r.sm_bytes_per_us
        return {"ramp": ramp, "exchange": self._join_us()}

    def _join_us(self) -> float:
        """Time to combine the parts of the keys, in a cluster and over the grid."""
        c, p, total = self.rates, self.plan, 0.0
        if p.schedule.key_groups > 1:
            total += c.meet_us * self.results
        if p.cluster > 1:
            total += c.cluster_us + c.cluster_sent_us * self.results
        if p.grid_parts > 1:
            left = PIECE * p.owned_items * p.active_threads * p.warpgroups / RESULTS
            total += c.grid_us + c.grid_moved_us * left * (1 + p.grid_parts)  # all parts are read
        return total
