"""What a kernel costs, in microseconds; the constants and their origin are in `graph.targets`.

Two models. `price` is additive and knows no sizes: it orders programs while they are extracted.
`matmul_cost` and `row_cost` know everything and order sized programs. The aim is the right order,
not the right number: on one H200 sized matmul kernels come out within some 10% of measurements.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from cutesuper.graph.block import LOAD, STORE, AxisKind, BlockOp, BlockProgram
from cutesuper.graph.dims import ceil_div, extent
from cutesuper.graph.target import Target
from cutesuper.search.extract import Price
from cutesuper.search.forms import Form, MatmulForm
from cutesuper.search.saturate import Derivation, Table

#: rows of a block while sizes are unknown
NOMINAL_TILE = 64


@dataclass(frozen=True)
class Cost:
    """Microseconds by cause; ``total`` is not their sum (memory and arithmetic overlap)."""

    total: float
    parts: dict[str, float]


# -------------------------------------------------------------------------------- before sizing


def price(table: Table, form: Form, target: Target, itemsize: int) -> Price:
    """Cost of one derivation while sizes are unknown; see `extract`.

    A value that lacks a grid label is computed again by every block along it: a prologue on
    ``X[M, K]`` is paid once for each block of columns, a division of ``[M, N]`` only once.
    """
    dims = table.space.program.dims
    rate = target.rates.lanes_per_us * target.sms

    def elements(labels: frozenset[str]) -> float:
        own = prod(extent(dims[x]) for x in labels)
        again = prod(
            max(1.0, extent(dims[a.dim]) / NOMINAL_TILE)
            for a in table.split.axes
            if a.kind == AxisKind.GRID and a.dim not in labels
        )
        return own * again

    def cost(i: int, d: Derivation) -> float:
        labels = table.classes[i].labels
        if d.kind == "constant":
            return 0.0
        if d.kind == LOAD:
            return prod(extent(dims[x]) for x in labels) * itemsize / target.bandwidth * 1e6
        over = extent(dims[d.over]) if d.over in dims else 1
        if d.kind == "matmul":
            return 2.0 * elements(labels) * over / target.tensor_flops * 1e6
        if isinstance(form, MatmulForm) and form.contracted in labels:
            over = 2  # a prologue: operands pass through registers on their way
        return max(1e-4, elements(labels) * over * target.rates.instructions.get(d.kind, 1) / rate)

    return cost


# --------------------------------------------------------------------------------- with all sizes


def bytes_moved(program: BlockProgram, itemsizes: dict[str, int]) -> float:
    """Bytes that device memory must deliver and take: each tensor once."""
    tensors = {
        op.attributes["tensor"]: prod(
            extent(program.dims[x]) for x in op.attributes["map"] if x in program.dims
        )
        for op in program.ops
        if op.kind in (LOAD, STORE)
    }
    return sum(n * itemsizes[t] for t, n in tensors.items())


def tile_bytes(program: BlockProgram, op: BlockOp, itemsizes: dict[str, int]) -> int:
    """Bytes of the tile that a load or a store moves at a time."""
    return prod(program.tile[d] for d in op.dims) * itemsizes[op.attributes["tensor"]]


def instructions(program: BlockProgram, target: Target) -> float:
    """Arithmetic instructions of all blocks together."""
    total = 0.0
    for op in program.ops:
        if op.kind in (LOAD, STORE, "matmul", "constant"):
            continue
        dims = program.ops[op.inputs[0]].dims if "over" in op.attributes else op.dims
        inner = prod(program.tile[d] for d in dims)
        times = prod(
            program.parts(a) for a in program.axes if a.kind != AxisKind.GRID and a.dim in dims
        )
        total += inner * times * target.rates.instructions.get(op.kind, 1)
    grid = prod(program.parts(a) for a in program.of_kind(AxisKind.GRID))
    return total * grid


def matmul_cost(
    program: BlockProgram, form: MatmulForm, target: Target, itemsizes: dict[str, int]
) -> Cost:
    """A sized matmul kernel."""
    r = target.rates
    clusters = [program.parts(a) for a in program.of_kind(AxisKind.CLUSTER)]
    cluster = clusters[0] if clusters else 1
    loop = program.parts(program.of_kind(AxisKind.LOOP)[0])
    blocks, slots = program.blocks(), cluster * target.clusters[cluster]
    stage = sum(
        tile_bytes(program, op, itemsizes) for op in program.loads() if form.contracted in op.dims
    )
    waves = ceil_div(blocks, slots)
    memory = _memory_us(bytes_moved(program, itemsizes), blocks, slots, target)
    l2 = blocks * loop * stage / target.l2_bandwidth * 1e6
    tensor = _tensor_us(program, form, target, waves)
    rate = r.sm_bytes_per_us if memory > tensor else r.sm_bytes_per_us_idle
    ingest = waves * loop * stage / rate
    lanes = instructions(program, target) / (r.lanes_per_us * min(target.sms, blocks))
    iteration = r.iteration_us + (0.0 if _plain_rows(program) else r.prologue_us)
    stream = max(memory, l2, ingest) + loop * iteration * waves
    ramp = r.first_stage * stage / r.sm_bytes_per_us + (waves - 1) * r.wave_us
    sent = _sent_kb(program, form, cluster)
    exchange = r.exchange_us * (cluster - 1) + r.exchange_us_per_kb * sent
    busy = max(stream + r.contention * lanes, tensor + r.exposed * lanes, lanes)
    total = target.launch_us + busy + ramp + exchange
    parts = {"memory": memory, "l2": l2, "ingest": ingest, "tensor": tensor, "lanes": lanes}
    return Cost(total, parts | {"launch": target.launch_us, "ramp": ramp, "exchange": exchange})


def _sent_kb(program: BlockProgram, form: MatmulForm, cluster: int) -> float:
    """What a block of a cluster sends to its peers: fp32 partial sums of their columns."""
    products = sum(op.kind == "matmul" for op in program.ops)
    area = program.tile[form.row] * program.tile[form.column]
    return 4 * products * area * (cluster - 1) / cluster / 1024


def _plain_rows(program: BlockProgram) -> bool:
    operands = {op.inputs[0] for op in program.ops if op.kind == "matmul"}
    return all(program.ops[i].kind == LOAD for i in operands)


def _memory_us(moved: float, blocks: int, slots: int, target: Target) -> float:
    """Waves of blocks, each at the rate of the memory or of as many SMs as have a block."""
    time, left = 0.0, blocks
    while left > 0:
        active = min(left, slots)
        rate = min(target.bandwidth / 1e6, active * target.rates.sm_bytes_per_us)
        time += moved * active / blocks / rate
        left -= active
    return time


def _tensor_us(program: BlockProgram, form: MatmulForm, target: Target, waves: int) -> float:
    """Products at the rate that the area of the accumulators allows, wave by wave."""
    r = target.rates
    products = sum(op.kind == "matmul" for op in program.ops)
    area = program.tile[form.row] * program.tile[form.column]
    efficiency = r.tensor_efficiency * area / (area + r.half_area)
    loop = program.of_kind(AxisKind.LOOP)[0]
    flops = 2.0 * products * area * program.parts(loop) * program.tile[form.contracted]
    return waves * flops * target.sms / (target.tensor_flops * efficiency) * 1e6


def row_cost(program: BlockProgram, target: Target, itemsizes: dict[str, int]) -> Cost:
    """A sized kernel of resident rows."""
    r = target.rates
    blocks = program.blocks()
    held = sum(tile_bytes(program, op, itemsizes) for op in program.loads())
    resident = max(1, min(8, target.shared_bytes // max(1, held)))
    waves = ceil_div(blocks, resident * target.sms)
    moved = bytes_moved(program, itemsizes)
    memory = _memory_us(moved, blocks, target.sms, target) if blocks < target.sms else (
        moved / target.bandwidth * 1e6
    )
    lanes = instructions(program, target) / (r.lanes_per_us * min(target.sms, blocks))
    ramp = held / r.sm_bytes_per_us + r.block_us * min(waves, 4) / resident
    total = target.launch_us + max(memory, lanes) + ramp
    parts = {"memory": memory, "lanes": lanes, "launch": target.launch_us, "ramp": ramp}
    return Cost(total, parts)
