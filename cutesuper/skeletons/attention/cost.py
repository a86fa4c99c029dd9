"""Cost model of kernels of two chained products, in microseconds.

It is built like `skeletons.matmul.cost`, with the same causes where they apply; the constants and
their measurements are in `targets`. The main effects are:

* *Waves.* About 64 blocks saturate the memory, so more parts do not read faster; but clusters that
  do not fit at once wait for a whole block. 32 clusters of 4, of which 30 fit, take 12.1 us; 8
  clusters of 8 take 7.3.
* *Joining.* The grid joins in memory, 1.3 us and more; warpgroups and clusters in shared memory.
* *The chain.* Products and softmax of one tile of keys wait for each other, so a block takes at
  least as long as its tiles one after the other; two warpgroups with 64 rows take turns.
* *Masks.* Causal blocks have different lengths, and begin one after the other where SMs are free.
* *Lengths* that only the kernel knows: the mean of the costs of equal and of mixed lengths. Parts
  divide each sequence, so lengths matter only between sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from math import prod

from cutesuper.egraph.extract import Price
from cutesuper.egraph.saturate import Derivation, Table
from cutesuper.ir.block import ENDING, LOAD, STORE, BlockOp, BlockProgram
from cutesuper.ir.dims import ceil_div, extent
from cutesuper.skeletons.attention.form import AttentionForm, is_mask
from cutesuper.skeletons.cost import Cost, bytes_moved, overlapped
from cutesuper.targets import Target

#: rows of one warpgroup's products
WARPGROUP_ROWS = 64
#: rows up to which a thread has one row in place of two, and up to which blocks are small enough
#: for two on an SM
FEW_ROWS, TWO_BLOCKS_ROWS = 8, 16
#: elements of the inner label up to which two blocks fit
TWO_BLOCKS_INNER = 128
#: shared memory of a block for which an SM holds two
HALF_SM = 113 * 1024
#: barriers, row scalars
RESERVED_BYTES = 2048
MIN_STAGES = 2
#: factor on reading time where dependent launches crowd: 1x16384 keys in 8 clusters of 8, of which
#: 15 fit, took 25.1 us and plainly launched 18.8; 2x4096 in 16 of 4 13.4 and 11.3
LATE = 1.5
#: blocks per SM, one after the other, from which on it does not matter that some are shorter
EVEN_ROUNDS = 8
#: the fractional parts of its multiples are spread evenly and not sorted
GOLDEN = 0.618034
#: operations on a score beside the exponential that cost nothing: they fill the lanes while the
#: exponentials are computed (scale, maximum, difference, sum)
FREE_OPS = 4
#: registers of a thread for accumulators: results, scores in fp32 and once more in 16 bits
MAX_REGISTERS = 180


@dataclass(frozen=True)
class AttentionSize:
    """Extents of one candidate.

    Attributes:
        rows: tile of every row label, in the order of `AttentionForm.rows`.
        held: rows that the warpgroups compute, including padding: 64 or 128.
        keys: tile of the keys.
        cluster, grid: parts of the keys.
    """

    rows: tuple[int, ...]
    held: int
    keys: int
    cluster: int
    grid: int


def attention_price(table: Table, form: AttentionForm, target: Target) -> Price:
    """Cost of one derivation while sizes are unknown; see `egraph.extract`.

    A change to a row of Q has to be written back before the first product, so it costs more than
    the same change to the scores; values of a key are computed again for every tile of rows.
    """
    dims = {d: extent(n) for d, n in table.space.program.dims.items()}
    again = max(1.0, prod(dims[d] for d in form.rows) / WARPGROUP_ROWS)
    rate = target.rates.lanes_per_us * target.sms

    def cost(i: int, d: Derivation) -> float:
        labels = table.classes[i].labels
        if d.kind in (LOAD, "constant"):
            return 0.0
        over = dims.get(d.over or "", 1)
        rows = not labels.isdisjoint(form.rows)
        count = prod(dims[x] for x in labels) * over * (1.0 if rows else again)
        if d.kind == "matmul":
            return 2.0 * count / target.tensor_flops * 1e6
        if rows and form.inner in labels:
            count *= 2 * dims[form.keys] / dims[form.inner]
        each = target.rates.instructions.get(d.kind, 1)
        if d.kind == "div" and table.classes[d.inputs[1]].labels < labels:
            each = 1  # the reciprocal multiplies
        return max(1e-4, count * each / rate)

    return cost


class AttentionModel:
    """Prices the candidates of one structure.

    Args:
        structure: a block program of the form, with any extents.
        form: labels of the structure.
        target: the device.
        itemsizes: bytes per element of every tensor.
        dependent_launch: True if the next kernel's blocks start while this one runs.
    """

    def __init__(
        self,
        structure: BlockProgram,
        form: AttentionForm,
        target: Target,
        itemsizes: dict[str, int],
        dependent_launch: bool = False,
    ) -> None:
        self.form, self.target, self.dependent_launch = form, target, dependent_launch
        self.dims = {d: extent(n) for d, n in structure.dims.items()}
        self.moved = bytes_moved(structure, itemsizes)
        ops = structure.ops
        #: bytes of one key, in K and V
        self.key_bytes = sum(
            prod(self.dims[d] for d in op.dims if d in (form.inner, form.columns))
            * itemsizes[op.attributes["tensor"]]
            for op in ops if op.kind == LOAD and form.keys in op.dims
        )  # fmt: skip
        scores = [op for op in ops if self._on_scores(op, ops)]
        self.exps = sum(op.kind == "exp" for op in scores)
        rest = sum(op.kind != "exp" for op in scores)
        self.others = max(0, rest - FREE_OPS)
        #: elements of K and V that are read for values of a key, for each key
        self.read = sum(
            self.dims[op.attributes["over"]]
            for op in ops
            if op.attributes.get("over") in (form.inner, form.columns)
            and op.kind != "matmul" and form.keys in op.dims
        )  # fmt: skip
        #: the label whose position hides keys, and the number of keys before those of position 0
        self.causal = form.causal(structure)
        hidden = self.dims[self.causal] if self.causal else 0
        aligned = any(op.attributes.get("alignment") == "top_left" for op in ops)
        self.before = 0 if aligned else self.dims[form.keys] - hidden
        #: sequences of different lengths
        self.sequences = prod(
            self.dims[d] for op in ops if is_mask(op.kind)
            for i in op.inputs[1:] for d in ops[i].dims
        )  # fmt: skip

    def _on_scores(self, op: BlockOp, ops: tuple[BlockOp, ...]) -> bool:
        """True if an operation is computed for every score."""
        if op.kind in (LOAD, STORE, "matmul", "constant", *ENDING) or is_mask(op.kind):
            return False
        labels = ops[op.inputs[0]].dims if "over" in op.attributes else op.dims
        return self.form.keys in labels and not set(labels).isdisjoint(self.form.rows)

    # ------------------------------------------------------------------------------------- blocks

    def tiles(self, size: AttentionSize) -> int:
        """Number of tiles of rows, over all batches."""
        rows = zip(self.form.rows, size.rows, strict=True)
        return prod(ceil_div(self.dims[d], n) for d, n in rows) * prod(
            self.dims[d] for d in self.form.batch
        )

    def loop(self, size: AttentionSize) -> int:
        """Number of tiles of keys that a block walks over, if none is hidden."""
        return ceil_div(self.dims[self.form.keys], size.keys * size.cluster * size.grid)

    def loops(self, size: AttentionSize) -> list[int]:
        """`loop` for each tile of the label whose position hides keys, the longest first. Parts
        divide the keys that a tile of rows sees."""
        if self.causal is None:
            return [self.loop(size)]
        tile = size.rows[self.form.rows.index(self.causal)]
        whole, keys = self.dims[self.causal], self.dims[self.form.keys]
        ends = (min((i + 1) * tile, whole) for i in reversed(range(ceil_div(whole, tile))))
        seen = (min(keys, max(0, self.before + end)) for end in ends)
        return [ceil_div(n, size.keys * size.cluster * size.grid) for n in seen]

    def resident(self, size: AttentionSize) -> int:
        """Blocks that share an SM: two if there are few rows and more blocks than SMs.

        Clusters do not share SMs: they would crowd on some while others idle.
        """
        blocks = self.tiles(size) * size.cluster * size.grid
        if prod(size.rows) > TWO_BLOCKS_ROWS or size.cluster > 1 or blocks <= self.target.sms:
            return 1
        shared = self._fixed_bytes(size, 1) + 2 * size.keys * self.key_bytes
        return 1 + (shared <= HALF_SM and self.dims[self.form.inner] <= TWO_BLOCKS_INNER)

    def key_groups(self, size: AttentionSize) -> int:
        """Warpgroups that take turns along the keys: two for 64 rows, if each has a stage and work
        to do, and no other block is on the SM."""
        if size.held > WARPGROUP_ROWS or self.loop(size) == 1 or self.resident(size) > 1:
            return 1
        two = self._fixed_bytes(size, 2) + 2 * size.keys * self.key_bytes
        return 2 if two <= self.target.shared_bytes else 1

    # ------------------------------------------------------------------------------------- memory

    def shared_bytes(self, size: AttentionSize) -> int:
        """Shared memory with the fewest stages that leave no warpgroup without one, in bytes."""
        groups = self.key_groups(size)
        return self._fixed_bytes(size, groups) + MIN_STAGES * size.keys * self.key_bytes

    def _fixed_bytes(self, size: AttentionSize, groups: int) -> int:
        """Bytes for the rows, and for joining ``groups`` warpgroups along the keys and the blocks
        of a cluster.

        A thread sends all but its share of the pieces to others.
        """
        threads, pieces, own = self._pieces(size, groups)
        met = 16 * threads * (pieces + 1) if groups > 1 else 0
        sent = 4 * threads * (4 * own + 1) * size.cluster if size.cluster > 1 else 0
        return 2 * size.held * self.dims[self.form.inner] + met + sent + RESERVED_BYTES

    def _pieces(self, size: AttentionSize, groups: int) -> tuple[int, int, int]:
        """Number of threads of a block that have rows; of 16-byte pieces of the result that each of
        them computes; and of pieces that each finishes."""
        held = min(prod(size.rows), WARPGROUP_ROWS)
        threads = 32 * ceil_div(held, 16) * groups * size.held // WARPGROUP_ROWS
        pieces = ceil_div(self.dims[self.form.columns], 16 if held <= FEW_ROWS else 8)
        return threads, pieces, ceil_div(ceil_div(pieces, groups), size.cluster)

    def registers(self, size: AttentionSize) -> float:
        """Registers of a thread for the accumulators."""
        return self.dims[self.form.columns] / 2 + 0.75 * size.keys

    # --------------------------------------------------------------------------------------- time

    def cost(self, size: AttentionSize) -> Cost:
        """Cost of a size: waves of clusters, or clusters in turn if a mask makes some shorter."""
        loops, ends = self.loops(size), self._ends_us(size)
        if len(loops) == 1:
            busy, causes = self._waves(size, loops[0], sum(ends.values()))
        else:
            busy, causes = self._turns(size, loops, sum(ends.values()))
        if self.sequences > 1 and len(loops) == 1:
            causes["mixed"] = self._mixed_us(size, sum(ends.values()))
            busy = (busy + causes["mixed"]) / 2
        launch = self.target.launch_us
        return Cost(launch + busy, {"launch": launch} | ends | causes)

    def _waves(self, size: AttentionSize, loop: int, ends: float) -> tuple[float, dict[str, float]]:
        """Cost of equal clusters. Beginnings and ends of blocks hide behind the memory of the
        device, but not those of the last wave."""
        units, slots, at_once = self._units(size)
        last = (units - 1) % at_once + 1
        full, active = (units - last) // at_once, min(units, at_once)
        exponent = self.target.attention.overlap
        own = self._block_us(size, loop, ceil_div(active, slots))
        shared = self._shared_us(size, active / units, loop * active * size.cluster)
        total = full * overlapped(
            exponent, ends + overlapped(exponent, *own.values()), *shared.values()
        )
        causes = {cause: full * us for cause, us in (own | shared).items()}
        own = self._block_us(size, loop, ceil_div(last, slots))
        shared = self._shared_us(size, last / units, loop * last * size.cluster)
        total += ends + overlapped(exponent, *own.values(), *shared.values())
        return total, {cause: causes[cause] + us for cause, us in (own | shared).items()}

    def _turns(
        self, size: AttentionSize, loops: list[int], ends: float
    ) -> tuple[float, dict[str, float]]:
        """Cost of clusters of different lengths: the next in order begins where one has ended.

        With 512 blocks for 2048 positions the last ends 19% later than the mean; with 1024 and more
        they end together.
        """
        units, slots, _ = self._units(size)
        exponent = self.target.attention.overlap
        mean = sum(loops) / len(loops)
        if units > EVEN_ROUNDS * slots:
            own = self._block_us(size, mean, 1)
            turns = units / slots * (ends + overlapped(exponent, *own.values()))
        else:
            times = {
                n: ends + overlapped(exponent, *self._block_us(size, n, 1).values())
                for n in set(loops)
            }
            busy = [0.0] * slots
            for n in loops * (units // len(loops)):
                heapreplace(busy, busy[0] + times[n])
            turns = max(busy)
        shared = self._shared_us(size, 1.0, mean * units * size.cluster)
        return overlapped(exponent, turns, *shared.values()), {"blocks": turns} | shared

    def _mixed_us(self, size: AttentionSize, ends: float) -> float:
        """Time for unsorted sequences of all lengths up to the longest, each divided into the same
        number of parts.

        Blocks share the memory evenly, so a long one is not late while there are others; once there
        are fewer than the memory can serve, each is limited by the rate of an SM.
        """
        units, _, at_once = self._units(size)
        loop, count = self.loop(size), self.sequences
        exponent = self.target.attention.overlap
        alone = overlapped(exponent, *self._block_us(size, loop, 1).values()) / loop
        all_of_it = self._shared_us(size, 1.0, loop * units * size.cluster)
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

    def _units(self, size: AttentionSize) -> tuple[int, int, int]:
        """Number of clusters; of those that run at once with one block on each SM; and of those
        that run at once with as many blocks as an SM can hold."""
        slots = self.target.clusters[size.cluster]
        return self.tiles(size) * size.grid, slots, slots * self.resident(size)

    def _shared_us(self, size: AttentionSize, share: float, loops: float) -> dict[str, float]:
        """Work that all blocks share: ``share`` of the bytes of memory, ``loops`` tiles of keys."""
        t = self.target
        late = LATE if self.dependent_launch and self._crowds(size) else 1.0
        return {
            "memory": late * share * self.moved / (t.bandwidth * t.attention.streamed) * 1e6,
            "l2": loops * size.keys * self.key_bytes / (t.l2_bandwidth * t.attention.from_l2) * 1e6,
        }

    def _crowds(self, size: AttentionSize) -> bool:
        """True if some of the next launch's clusters find room beside this launch's, and some do
        not: these begin behind all others. Where hardly any does, as with 64 pairs of 66, nothing
        is lost (1x16384 keys in 64 pairs 19.5 us, in 40 pairs 25.4)."""
        units, fit = self.tiles(size) * size.grid, self.target.clusters[size.cluster]
        if units > fit:
            return size.cluster > 2
        return units / 10 < fit - units < units

    def _block_us(self, size: AttentionSize, loop: float, shared_by: int) -> dict[str, float]:
        """Time by cause of a block with ``loop`` tiles of keys; ``shared_by`` blocks share its
        SM."""
        r = self.target.rates
        tensor, lanes = self._tile_us(size)
        loop = max(1.0, loop)
        tiles = shared_by * loop * size.held // WARPGROUP_ROWS
        steps = max(1.0, loop / self.key_groups(size))
        return {
            "ingest": shared_by * loop * size.keys * self.key_bytes / r.sm_bytes_per_us,
            "chain": steps * self._step_us(size),
            "tensor": tiles * tensor,
            "lanes": tiles * lanes,
            "values": shared_by * loop * self._values_us(size),
        }

    def _tile_us(self, size: AttentionSize) -> tuple[float, float]:
        """Time of a warpgroup's products on a tile of keys, and of the work between them."""
        t, r = self.target, self.target.rates
        area = WARPGROUP_ROWS * size.keys
        widths = self.dims[self.form.inner] + self.dims[self.form.columns]
        tensor = 2.0 * area * widths * t.sms / (t.tensor_flops * r.tensor_efficiency) * 1e6
        lanes = area * (self.exps / t.attention.exps_per_us + self.others / r.lanes_per_us)
        return tensor, lanes / 2 if prod(size.rows) <= FEW_ROWS else lanes

    def _values_us(self, size: AttentionSize) -> float:
        """Time for the values of a tile's keys, computed by warps of their own."""
        return size.keys * self.read / self.target.attention.value_reads_per_us

    def _step_us(self, size: AttentionSize) -> float:
        """Time of a tile of keys from its first product to its last. Warpgroups of different rows
        meet at the tensor cores; one computes exponentials while the other multiplies."""
        tensor, lanes = self._tile_us(size)
        groups = size.held // WARPGROUP_ROWS
        work = max(groups * tensor, tensor + lanes)
        return self.target.attention.step_us + work + self._values_us(size)

    def _ends_us(self, size: AttentionSize) -> dict[str, float]:
        """Time of the beginning of a block, which waits for its first stage, and of its end."""
        c, r = self.target.attention, self.target.rates
        stage = size.keys * self.key_bytes / r.sm_bytes_per_us
        ramp = c.ramp_us + r.first_stage * stage
        return {"ramp": ramp, "exchange": self._join_us(size)}

    def _join_us(self, size: AttentionSize) -> float:
        """Time to combine the parts of the keys, in a cluster and over the grid."""
        c, groups = self.target.attention, self.key_groups(size)
        threads, _, own = self._pieces(size, groups)
        results, total = prod(size.rows) * self.dims[self.form.columns] / 1024, 0.0
        if groups > 1:
            total += c.meet_us * results
        if size.cluster > 1:
            total += c.cluster_us + c.cluster_sent_us * results
        if size.grid > 1:
            moved = 4 * threads * own * (1 + size.grid) / 1024  # one part written, all read
            total += c.grid_us + c.grid_moved_us * moved
        return total
