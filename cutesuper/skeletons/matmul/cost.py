"""Cost model of matmul-loop kernels, in microseconds; rates are given with the target."""

from __future__ import annotations

from math import prod

from cutesuper.ir.block import (
    LOAD,
    AxisKind,
    BlockOp,
    BlockProgram,
)
from cutesuper.ir.dims import ceil_div, extent
from cutesuper.skeletons.cost import (
    Cost,
    bytes_moved,
    computes,
    instructions,
    overlapped,
    tile_bytes,
)
from cutesuper.skeletons.matmul.form import MatmulForm
from cutesuper.skeletons.matmul.hidden import hidden_width
from cutesuper.skeletons.matmul.sharing import rows_shared_by
from cutesuper.skeletons.matmul.vectors import MAX_VECTORS
from cutesuper.targets import Target

#: bytes that the schedule of a matmul kernel keeps in flight, if four stages are not more
RING_BYTES = 120 * 1024
#: shared memory of a block beside its stages: barriers, statistics, alignment, and the system's
BLOCK_BYTES = 4096
#: most accumulators for which one warpgroup is enough
WARPGROUP_ACCUMULATORS = 64 * 128
#: registers of a thread beside the accumulators, roughly; they decide if an SM holds two blocks
OTHER_REGISTERS = 60
#: rows beyond which the loads of row values hide behind each other: 4096^3 with statistics from
#: another kernel pays 5.6 us for each wave of 128 rows, 300x1024x1000 4.7 us for 64
MOST_VECTOR_ROWS = 64
#: rows that the instruction for vectors (`skeletons.matmul.vectors`) counts as: it has 8, but reads
#: the column operand (2 KB at 128 bytes per cycle) as long as an instruction of 32 rows computes
VECTOR_ROWS = 32


def matmul_cost(
    program: BlockProgram, form: MatmulForm, target: Target, itemsizes: dict[str, int]
) -> Cost:
    """Cost of a sized matmul kernel: waves of blocks, each as slow as its slowest part, and
    ends."""
    r, blocks = target.rates, program.blocks()
    cluster = _extent_of(program, AxisKind.CLUSTER)
    slots = cluster * target.clusters[cluster]
    at_once = slots * _resident(program, form, target, stage_bytes(program, form, itemsizes))
    stage = sum(
        tile_bytes(program, op, itemsizes) for op in program.loads() if form.contracted in op.dims
    )
    read = stage - _shared_bytes(program, form, itemsizes)
    moved = bytes_moved(program, itemsizes) * (1 + r.piece_bytes / _piece(program, form, itemsizes))
    parts = dict.fromkeys(("memory", "ingest", "l2", "iterations", "tensor"), 0.0)
    busy = 0.0
    for times, active in ((blocks // at_once, at_once), (1, blocks % at_once)):
        wave = _wave(program, form, target, active, moved * active / blocks, stage, read)
        parts = {cause: us + times * wave[cause] for cause, us in parts.items()}
        tensor = wave.pop("tensor")
        busy += times * max(overlapped(r.overlap, *wave.values()), tensor)
    rounds = ceil_div(blocks, slots)  # blocks of one SM, one after the other or side by side
    exchange, store = (rounds * us for us in _end(program, form, target))
    after = rounds * _after_us(program, form, target)
    ramp = r.first_stage * stage / r.sm_bytes_per_us + (rounds - 1) * r.block_us
    parts |= {"launch": target.launch_us, "ramp": ramp, "exchange": exchange, "store": store}
    parts |= {"after": after} if after else {}
    return Cost(target.launch_us + busy + ramp + exchange + store + after, parts)


def _wave(
    program: BlockProgram, form: MatmulForm, target: Target, active: int, moved: float, stage: int,
    read: float,
) -> dict[str, float]:  # fmt: skip
    """Time of ``active`` blocks, by cause, while they share ``moved`` bytes of memory; a stage
    takes ``stage`` bytes, of which a block itself reads ``read`` from L2."""
    r, loop = target.rates, _extent_of(program, AxisKind.LOOP)
    shared_by = active / max(1, min(target.sms, active))  # blocks on an SM
    computed = shared_by * loop * _staged_us(program, form, target)
    return {
        "memory": moved / target.bandwidth * 1e6,
        "ingest": shared_by * loop * stage / r.sm_bytes_per_us,
        "l2": active * loop * read / target.l2_bandwidth * 1e6,
        # hidden labels add one box and one instruction: LoRA 16x4096x4096, weights (N, K), takes
        # 10.9 in 32 iterations and 10.5 in 16
        "iterations": loop * r.iteration_us * (1 + len(form.hidden)) * min(1, active) + computed,
        "tensor": shared_by * loop * _tensor_us(program, form, target),
    }


def _piece(program: BlockProgram, form: MatmulForm, itemsizes: dict[str, int]) -> int:
    """Contiguous bytes that an iteration loads, in its largest tile."""
    staged = [op for op in program.loads() if form.contracted in op.dims]
    largest = max(staged, key=lambda op: tile_bytes(program, op, itemsizes))
    labels = [d for d in largest.attributes["map"] if d in program.tile]
    return prod(program.tile[d] for d in labels[-1:]) * itemsizes[largest.attributes["tensor"]]


def _shared_bytes(program: BlockProgram, form: MatmulForm, itemsizes: dict[str, int]) -> float:
    """Bytes of a stage that a block gets from the blocks that load the row tile with it."""
    over = {op.attributes["over"] for op in program.ops if "over" in op.attributes}
    if _extent_of(program, AxisKind.CLUSTER) > 1 or over != {form.contracted}:
        return 0.0
    rows, columns = program.tile[form.row], program.tile[form.column]
    tiles = ceil_div(extent(program.dims[form.column]), columns)
    blocks = rows_shared_by(rows, columns, len(_products(program, form)), tiles)
    loads = [op for op in program.loads() if {form.row, form.contracted} <= set(op.dims)]
    return (1 - 1 / blocks) * sum(tile_bytes(program, op, itemsizes) for op in loads)


def _extent_of(program: BlockProgram, kind: AxisKind) -> int:
    """Number of parts along the axis of a kind, 1 if there is none."""
    return prod(program.parts(a) for a in program.of_kind(kind))


def padded(columns: int) -> int:
    """Number of columns, padded for the WGMMA instruction."""
    return 64 * ceil_div(columns, 64)


def _free(program: BlockProgram, form: MatmulForm, op: BlockOp) -> str:
    """The column or hidden label of a product of the loop."""
    return next((d for d in form.hidden if d in op.dims), form.column)


def _products(program: BlockProgram, form: MatmulForm) -> list[str]:
    """Column or hidden label of every product of rows in the loop."""
    return [
        _free(program, form, op) for op in program.ops
        if op.kind == "matmul" and op.attributes["over"] == form.contracted
        and form.row in op.dims
    ]  # fmt: skip


def column_blocks(program: BlockProgram, form: MatmulForm) -> list[int]:
    """Number of blocks of 64 columns of every product of the loop, and of a product after it."""
    labels = {*_products(program, form), form.column}
    return [padded(program.tile[d]) // 64 for d in labels]


def results(program: BlockProgram, form: MatmulForm) -> int:
    """Accumulators that reach the epilogue; a product after the loop adds to one of the loop."""
    count = max(1, _products(program, form).count(form.column))
    return count * program.tile[form.row] * program.tile[form.column]


def accumulators(program: BlockProgram, form: MatmulForm) -> int:
    """Number of all accumulators of a block for products of rows."""
    hidden = (d for d in _products(program, form) if d != form.column)
    between = sum(padded(program.tile[d]) for d in hidden)
    return results(program, form) + program.tile[form.row] * between


def vector_accumulators(program: BlockProgram, form: MatmulForm) -> int:
    """Number of accumulators for products of vectors, if all column operands have some."""
    count = _products(program, form).count(form.column)
    return form.vectors * MAX_VECTORS * program.tile[form.column] * count


def stage_bytes(program: BlockProgram, form: MatmulForm, itemsizes: dict[str, int]) -> int:
    """Bytes of a stage in shared memory, with hidden labels as wide as they are staged, and with
    the tile of vectors."""
    total = form.vectors * 2 * MAX_VECTORS * program.tile[form.contracted]
    narrow = form.column in _products(program, form)
    for op in program.loads():
        if form.contracted in op.dims:
            hidden = [program.tile[d] for d in op.dims if d in form.hidden]
            whole = tile_bytes(program, op, itemsizes)
            total += whole // hidden[0] * hidden_width(hidden[0], narrow) if hidden else whole
    return total


def fixed_bytes(program: BlockProgram, form: MatmulForm) -> int:
    """Shared memory of a block beside its stages, in bytes: the buffer of the cluster's exchange,
    and both operands of products after the loop."""
    split = _extent_of(program, AxisKind.CLUSTER) > 1 and not form.reduced
    tiles = program.tile[form.row] + program.tile[form.column]
    after = sum(2 * tiles * padded(program.tile[d]) for d in form.hidden)
    return BLOCK_BYTES + 4 * results(program, form) * split + after


def _resident(program: BlockProgram, form: MatmulForm, target: Target, stage: int) -> int:
    """Number of blocks that one SM holds, with the stages that the schedule takes."""
    loop = _extent_of(program, AxisKind.LOOP)
    held, fixed = accumulators(program, form), fixed_bytes(program, form)
    stages = min((target.shared_bytes - fixed) // stage, max(2, loop), max(4, RING_BYTES // stage))
    wide = held > WARPGROUP_ACCUMULATORS and program.tile[form.column] % 128 == 0
    threads = 128 * (1 + wide) + 128 * bool(_helped(program, form)) + 32
    registers = threads * OTHER_REGISTERS + held
    by_memory = target.shared_bytes // (stages * stage + fixed)
    return max(1, min(by_memory, target.registers // registers))


def _helped(program: BlockProgram, form: MatmulForm) -> list[BlockOp]:
    """Operations on staged rows: prologues, and the sources of statistics."""
    return [
        op for op in program.ops
        if op.kind not in (LOAD, "matmul")
        and form.contracted in (*op.dims, op.attributes.get("over"))
        and form.column not in op.dims
    ]  # fmt: skip


def _staged_us(program: BlockProgram, form: MatmulForm, target: Target) -> float:
    """Time of the helper warps in an iteration: they rewrite the rows, or only read them."""
    r, helped = target.rates, _helped(program, form)
    if not helped:
        return 0.0
    operands = {
        op.inputs[0] for op in program.ops
        if op.kind == "matmul" and op.attributes["over"] == form.contracted
    }  # fmt: skip
    # with vectors, rows are centred before the product: see `skeletons.matmul.shift`
    rewritten = form.vectors or any(program.ops[i].kind != LOAD for i in operands)
    count = sum(r.instructions.get(op.kind, 1) for op in helped)
    elements = program.tile[form.row] * program.tile[form.contracted]
    rate = r.prologue_per_us if rewritten else r.statistic_per_us
    return elements * (1 / rate + count / r.lanes_per_us)


def _tensor_us(program: BlockProgram, form: MatmulForm, target: Target) -> float:
    """Time of the products of an iteration, at the rate that the accumulators' area allows."""
    rows = program.tile[form.row]
    areas = [rows * padded(program.tile[d]) for d in _products(program, form)]
    area = max(areas)
    efficiency = target.rates.tensor_efficiency * area / (area + target.rates.half_area)
    vectors = form.vectors * VECTOR_ROWS * program.tile[form.column] * len(areas)
    flops = 2.0 * (sum(areas) + vectors) * program.tile[form.contracted]
    return flops * target.sms / (target.tensor_flops * efficiency) * 1e6


def _end(program: BlockProgram, form: MatmulForm, target: Target) -> tuple[float, float]:
    """Time of a block's cluster exchange, and of its epilogue; each block finishes some columns."""
    r = target.rates
    cluster = 1 if form.reduced else _extent_of(program, AxisKind.CLUSTER)
    area = program.tile[form.row] * program.tile[form.column]
    finished = results(program, form) / cluster
    sent = 4 * finished * (cluster - 1) / 1024
    per_store = r.store_us if cluster == 1 else r.cluster_store_us
    ends = [op for op in program.ops if form.contracted not in op.dims]
    count = sum(
        instructions(program, op, target) for op in ends if form.column in op.dims and computes(op)
    )
    vectors = sum(
        op.kind == LOAD and form.row in op.dims and form.column not in op.dims for op in ends
    )
    rows = min(program.tile[form.row], MOST_VECTOR_ROWS) * (cluster == 1)
    arithmetic = area / cluster * count / r.lanes_per_us
    store = per_store * finished / 1024 + arithmetic + r.row_load_us * vectors * rows
    return r.exchange_us_per_kb * sent, store


def _after_us(program: BlockProgram, form: MatmulForm, target: Target) -> float:
    """Time of products after the loop, and of reductions along the columns."""
    r = target.rates
    after = r.after_product_us * len(form.hidden)
    if form.reduced:
        spread = bool(program.of_kind(AxisKind.CLUSTER))
        count = sum(op.attributes.get("over") == form.column for op in program.ops)
        after += count * (r.column_reduction_us + spread * r.cluster_reduction_us)
    return after
