"""Cost model of row kernels, in microseconds; `targets` has the constants and their origin.

It covers rows that one block holds (`row_cost`), rows that blocks visit in turn
(`persistent_cost`), and rows split over a cluster (`cluster_cost`).
"""

from __future__ import annotations

from math import prod

from cutesuper.ir.block import LOAD, STORE, AxisKind, BlockOp, BlockProgram
from cutesuper.ir.dims import ceil_div, extent
from cutesuper.skeletons.cost import (
    Cost,
    bytes_moved,
    computes,
    instructions,
    overlapped,
    tile_bytes,
)
from cutesuper.skeletons.rows.limits import row_label
from cutesuper.skeletons.rows.loop_form import STAGE_BYTES, PersistentForm
from cutesuper.targets import Target

#: elements that a block of an element-wise kernel takes
ROW_ELEMENTS = 2048


def row_cost(program: BlockProgram, target: Target, itemsizes: dict[str, int]) -> Cost:
    """Cost of a kernel of resident rows; the tile does not matter: the schedule has its own."""
    r, label = target.rates, _along_rows(program)
    length = extent(program.dims[label]) if label else 1
    rows = prod(extent(n) for d, n in program.dims.items() if d != label)

    def elements(op: BlockOp) -> int:
        return rows * (length if label in op.dims else 1)

    reductions = [op for op in program.ops if "over" in op.attributes]
    sms = min(target.sms, rows if reductions else ceil_div(rows * length, ROW_ELEMENTS))
    moved = bytes_moved(program, itemsizes)
    taken = sum(
        elements(op) * itemsizes[op.attributes["tensor"]]
        for op in program.ops if op.kind in (LOAD, STORE)
    )  # fmt: skip
    count = sum(
        elements(program.ops[op.inputs[0]] if op in reductions else op)
        * instructions(program, op, target)
        for op in program.ops if computes(op)
    )  # fmt: skip
    parts = {
        "memory": moved / target.bandwidth * 1e6,
        "ingest": moved / (sms * r.sm_bytes_per_us),
        "l2": taken / target.l2_bandwidth * 1e6,
        "lanes": count / (sms * r.lanes_per_us),
    }
    busy = overlapped(r.overlap, *parts.values())
    ramp = r.reduction_us * len(reductions)
    return Cost(target.launch_us + busy + ramp, parts | {"launch": target.launch_us, "ramp": ramp})


def _along_rows(program: BlockProgram) -> str | None:
    """The label along the rows, as the schedule finds it."""

    def maps(ops: tuple[BlockOp, ...]) -> list[list[str]]:
        return [[d for d in op.attributes["map"] if d in program.dims] for op in ops]

    reduced = sorted({op.attributes["over"] for op in program.ops if "over" in op.attributes})
    return row_label(program.dims, reduced, maps(program.stores()), maps(program.loads()))


def stage_bytes(program: BlockProgram, form: PersistentForm, itemsizes: dict[str, int]) -> int:
    """Bytes of the rows that a block loads for a visit."""
    loads = [op for op in program.loads() if {form.visited, form.row} <= set(op.dims)]
    return sum(tile_bytes(program, op, itemsizes) for op in loads)


def persistent_cost(
    program: BlockProgram, form: PersistentForm, target: Target, itemsizes: dict[str, int]
) -> Cost:
    """Cost of rows that blocks visit in turn; all blocks run at once.

    RMSNorm's backward pass in bf16 on one H200, rows x elements, predicted (measured, as a
    prototype): 1024x4096 10.3 (10.6), 4096x1024 10.3 (9.95), 4096x2048 16.3 (16.0), 4096x4096 28.3
    (28.6), 4096x8192 52.3 (53.7), 4096x16384 102.2 (101.6), 32768x4096 197.2 (192.5).
    """
    r, blocks = target.rows, program.blocks()
    rows = prod(extent(program.dims[d]) for d in form.rows)
    visits = program.parts_along(form.visited, AxisKind.PERSISTENT)
    # blocks whose share of the rows is smaller wait for the others
    share = prod(
        program.parts_along(d, AxisKind.GRID) * program.tile[d] for d in form.rows
    ) * visits / rows  # fmt: skip
    moved = bytes_moved(program, itemsizes)
    deep = r.deep if stage_bytes(program, form, itemsizes) > STAGE_BYTES else 1.0
    reductions = sum(op.attributes.get("over") == form.row for op in program.ops)
    others = program.parts_along(form.row, AxisKind.CLUSTER) - 1 if reductions else 0
    parts = {
        "memory": deep * share * moved / target.bandwidth * 1e6,
        "ingest": share * moved / (blocks * target.rates.sm_bytes_per_us),
        # while a block waits for its cluster it computes nothing, but memory transfers go on
        "lanes": share * _arithmetic(program, target) / (blocks * target.rates.lanes_per_us)
        + visits * others * r.cluster_us,
    }
    busy = overlapped(target.rates.overlap, *parts.values())
    parts |= {
        "launch": target.launch_us,
        "ramp": r.start_us,
        "visits": visits * r.visit_us,
        "finish": r.finish_us * any(program.parts_along(d, AxisKind.GRID) > 1 for d in form.summed),
    }
    own = ("launch", "ramp", "visits", "finish")
    return Cost(busy + sum(parts[cause] for cause in own), parts)


def _arithmetic(program: BlockProgram, target: Target) -> float:
    """Number of instructions for all elements."""
    count = 0.0
    for op in filter(computes, program.ops):
        labels = program.ops[op.inputs[0]].dims if "over" in op.attributes else op.dims
        elements = prod(extent(program.dims[d]) for d in labels)
        count += elements * instructions(program, op, target)
    return count


def writes_rows(program: BlockProgram, row: str) -> bool:
    """True if results run along the rows; otherwise rows are only read."""
    return any(row in op.dims for op in program.stores())


def cluster_cost(program: BlockProgram, target: Target, itemsizes: dict[str, int]) -> Cost:
    """Cost of rows split over clusters, one row in each: waves of blocks that load, exchange and
    store; loads and stores overlap with the waiting. Three blocks share an SM if each has one tile,
    else two, or one with two stages. In bf16, predicted (measured): LayerNorm forward 16384x65536
    1169 (1104), RMSNorm 1017 (1091), softmax 1348 (1013), its gradient 1518 (1462)."""
    rates, (axis,) = target.rates, program.of_kind(AxisKind.CLUSTER)
    cluster, row = program.parts(axis), axis.dim
    vectors = any(op.dims == (row,) for op in program.loads())
    resident = 3 if writes_rows(program, row) and not vectors else 2
    at_once = resident * cluster * target.clusters[cluster]
    reductions = sum("over" in op.attributes for op in program.ops)
    waits = reductions * (rates.reduction_us + target.rows.cluster_us * (cluster - 1))
    moved, sms = bytes_moved(program, itemsizes), cluster * target.clusters[cluster]
    active = min(sms, program.blocks())
    waves = ceil_div(program.blocks(), at_once)
    parts = {
        "memory": moved / target.bandwidth * 1e6,
        "ingest": moved / (active * rates.sm_bytes_per_us),
        # while a block waits for its cluster it computes nothing, but memory transfers go on
        "lanes": _arithmetic(program, target) / (active * rates.lanes_per_us) + waves * waits,
    }
    busy = overlapped(rates.overlap, *parts.values())
    parts |= {"launch": target.launch_us, "ramp": target.rows.block_us}
    return Cost(target.launch_us + target.rows.block_us + busy, parts)
