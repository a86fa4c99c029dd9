"""What a kernel of two chained products costs, in microseconds.

Like `search.cost`, with the same causes where they are the same; the constants and what they were
measured on stand in `graph.targets`. Two things decide here that do not elsewhere:

* *The chain.* Products and softmax of one tile of keys wait for each other, so a block takes at
  least as long as its tiles one after the other. Two warpgroups halve that where they take
  different tiles of the keys (64 rows), and not where they take different rows (128).
* *Joining.* A cluster and the grid add up whole results. With few rows that is cheap and fills the
  chip; with 64 x 64 results, 64 blocks in clusters take less time than 128 that meet in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from cutesuper.graph.block import ENDING, LOAD, STORE, BlockOp, BlockProgram
from cutesuper.graph.dims import ceil_div, extent
from cutesuper.graph.target import Target
from cutesuper.search.chained_form import ChainedForm, is_mask
from cutesuper.search.cost import Cost, bytes_moved, overlapped
from cutesuper.search.extract import Price
from cutesuper.search.saturate import Derivation, Table

#: rows of one warpgroup's products
WARPGROUP_ROWS = 64
#: shared memory of a block so that an SM holds two
HALF_SM = 113 * 1024
#: and the registers of a thread for accumulators
HALF_REGISTERS = 112
#: barriers, row scalars
RESERVED_BYTES = 4096
MIN_STAGES = 2
#: operations on a score beside the exponential that cost nothing: they fill the lanes while the
#: exponentials are computed (scale, maximum, difference, sum)
FREE_OPS = 4
#: registers of a thread for accumulators: results, scores in fp32 and once more in 16 bits
MAX_REGISTERS = 180


@dataclass(frozen=True)
class ChainedSize:
    """Extents of one candidate.

    Attributes:
        rows: tile of every row label, in the order of `ChainedForm.rows`.
        held: rows that the warpgroups compute, padding included: 64 or 128.
        keys: tile of the keys.
        cluster, grid: parts of the keys.
    """

    rows: tuple[int, ...]
    held: int
    keys: int
    cluster: int
    grid: int


def chained_price(table: Table, form: ChainedForm, target: Target) -> Price:
    """Cost of one derivation while sizes are unknown; see `search.extract`.

    What changes a row of Q has to be written back before the first product, so it costs more than
    the same on the scores; values of a key are computed again for every tile of rows.
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


class ChainedModel:
    """Prices the candidates of one structure.

    Args:
        structure: a block program of the form, with any extents.
        form: its labels.
        target: the device.
        itemsizes: bytes per element of every tensor.
    """

    def __init__(
        self, structure: BlockProgram, form: ChainedForm, target: Target, itemsizes: dict[str, int]
    ) -> None:
        self.form, self.target = form, target
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
        #: elements of K and V, for each key, that are read for values of the key
        self.read = sum(
            self.dims[op.attributes["over"]]
            for op in ops
            if op.attributes.get("over") in (form.inner, form.columns)
            and op.kind != "matmul" and form.keys in op.dims
        )  # fmt: skip
        #: part of the scores that is not hidden
        self.seen = self._seen(structure)

    def _on_scores(self, op: BlockOp, ops: tuple[BlockOp, ...]) -> bool:
        """Whether an operation is computed for every score."""
        if op.kind in (LOAD, STORE, "matmul", "constant", *ENDING) or is_mask(op.kind):
            return False
        labels = ops[op.inputs[0]].dims if "over" in op.attributes else op.dims
        return self.form.keys in labels and not set(labels).isdisjoint(self.form.rows)

    def _seen(self, structure: BlockProgram) -> float:
        """Half of the positions that rows and keys share are hidden by a causal mask."""
        rows = self.form.causal(structure)
        keys = self.dims[self.form.keys]
        return 1.0 if rows is None else 1 - min(self.dims[rows], keys) / (2 * keys)

    # ------------------------------------------------------------------------------------- memory

    def shared_bytes(self, size: ChainedSize) -> int:
        """Shared memory with the least number of stages; what is joined takes their place."""
        ring = MIN_STAGES * size.keys * self.key_bytes
        joined = 4 * size.held * self.dims[self.form.columns]
        return 2 * size.held * self.dims[self.form.inner] + max(ring, joined) + RESERVED_BYTES

    def registers(self, size: ChainedSize) -> float:
        """Of a thread, for the accumulators."""
        return self.dims[self.form.columns] / 2 + 0.75 * size.keys

    def resident(self, size: ChainedSize) -> int:
        """Blocks that share an SM. Clusters do not: they crowd on some SMs while others idle.

        32 x 4096 x 128 (decoding) takes 7.85 in 64 clusters of 2, 10.3 in 32 clusters of 4, of
        which 30 fit with one block on an SM.
        """
        small = self.shared_bytes(size) <= HALF_SM and self.registers(size) <= HALF_REGISTERS
        return 1 + (size.cluster == 1 and small and size.held == WARPGROUP_ROWS)

    # --------------------------------------------------------------------------------------- time

    def tiles(self, size: ChainedSize) -> int:
        """Tiles of rows, of all batches."""
        rows = zip(self.form.rows, size.rows, strict=True)
        return prod(ceil_div(self.dims[d], n) for d, n in rows) * prod(
            self.dims[d] for d in self.form.batch
        )

    def loop(self, size: ChainedSize) -> int:
        """Tiles of keys that a block walks."""
        return ceil_div(self.dims[self.form.keys], size.keys * size.cluster * size.grid)

    def cost(self, size: ChainedSize) -> Cost:
        """Waves of blocks, and what joins their parts."""
        t, r = self.target, self.target.rates
        c = t.chained
        blocks = self.tiles(size) * size.cluster * size.grid
        slots = size.cluster * t.clusters[size.cluster]
        at_once = slots * self.resident(size)
        parts = dict.fromkeys(("memory", "ingest", "l2", "chain", "tensor", "lanes"), 0.0)
        busy = 0.0
        for times, active in ((blocks // at_once, at_once), (1, blocks % at_once)):
            if times and active:
                wave = self._wave(size, active, blocks, ceil_div(active, slots))
                parts = {cause: us + times * wave[cause] for cause, us in parts.items()}
                busy += times * overlapped(r.overlap, *wave.values())
        rounds = ceil_div(blocks, at_once)
        stage = size.keys * self.key_bytes
        ramp = rounds * (c.ramp_us + c.last_step * self._step_us(size))
        ramp += r.first_stage * stage / r.sm_bytes_per_us
        exchange = rounds * self._join_us(size)
        parts |= {"launch": t.launch_us, "ramp": ramp, "exchange": exchange}
        return Cost(t.launch_us + busy + ramp + exchange, parts)

    def _wave(
        self, size: ChainedSize, active: int, blocks: int, shared_by: int
    ) -> dict[str, float]:
        """What ``active`` blocks wait for, of which each SM has ``shared_by``, by cause."""
        t, r = self.target, self.target.rates
        loop = self.loop(size)
        if size.cluster * size.grid == 1:
            loop *= self.seen  # of divided keys one part is seen whole
        tensor, lanes = self._tile_us(size)
        groups = size.held // WARPGROUP_ROWS
        steps = loop / 2 if groups == 1 else loop  # two warpgroups take turns along the keys
        stage = size.keys * self.key_bytes
        return {
            "memory": self.moved * active / blocks / t.bandwidth * 1e6,
            "ingest": shared_by * loop * stage / r.sm_bytes_per_us,
            "l2": active * loop * stage / t.l2_bandwidth * 1e6,
            "chain": max(1.0, steps) * self._step_us(size),
            "tensor": shared_by * loop * groups * tensor,
            "lanes": shared_by * loop * groups * lanes,
        }

    def _tile_us(self, size: ChainedSize) -> tuple[float, float]:
        """The products of a warpgroup on a tile of keys, and what lies between them."""
        t, r = self.target, self.target.rates
        area = WARPGROUP_ROWS * size.keys
        widths = self.dims[self.form.inner] + self.dims[self.form.columns]
        tensor = 2.0 * area * widths * t.sms / (t.tensor_flops * r.tensor_efficiency) * 1e6
        lanes = area * (self.exps / t.chained.exps_per_us + self.others / r.lanes_per_us)
        return tensor, lanes + size.keys * self.read / r.statistic_per_us

    def _step_us(self, size: ChainedSize) -> float:
        """A tile of keys from its first product to its last; warpgroups of different rows meet at
        the tensor cores."""
        tensor, lanes = self._tile_us(size)
        groups = size.held // WARPGROUP_ROWS
        return self.target.chained.step_us / groups + groups * tensor + lanes

    def _join_us(self, size: ChainedSize) -> float:
        """Combining the parts of the keys, in a cluster and over the grid."""
        c = self.target.chained
        results = prod(size.rows) * self.dims[self.form.columns] / 1024
        total = 0.0
        own = results / size.cluster  # those that a block finishes
        if size.cluster > 1:
            total += c.cluster_us + c.cluster_part_us * size.cluster
            total += c.cluster_sent_us * results + c.cluster_read_us * own
        if size.grid > 1:
            total += c.grid_us + c.grid_part_us * size.grid + c.grid_sent_us * own
            total += 4096 * own * size.grid / self.target.rates.sm_bytes_per_us
        return total
