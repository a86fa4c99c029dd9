"""Cost model of matmul-loop kernels, in microseconds; rates are given with the target.

Everything that a kernel takes and does is read from its plan.
"""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache
from math import prod

from cutesuper.ir.block import LOAD
from cutesuper.ir.dims import ceil_div, extent
from cutesuper.skeletons.cost import Cost, computes, instructions, overlapped
from cutesuper.skeletons.matmul.plan import COLUMN_BLOCK, MatmulPlan
from cutesuper.targets import Target

#: registers of a thread beside the accumulators, roughly; they decide if an SM holds two blocks
OTHER_REGISTERS = 60


def price(plan: MatmulPlan, target: Target) -> Cost:
    """Cost of a matmul kernel: waves of blocks, each as slow as its slowest part, and ends."""
    target = at_rows(extent(plan.program.dims[plan.row]), target)
    r, blocks = target.rates, plan.program.blocks()
    slots = plan.cluster_size * target.clusters[plan.cluster_size]
    at_once = slots * _resident(plan, target)
    moved = plan.moved_bytes * (1 + r.piece_bytes / _piece(plan)) + _reread_bytes(plan, target)
    parts = dict[str, float]()
    own = _staged_us(plan, target), _tensor_us(plan, target)
    busy = 0.0
    for times, active in ((blocks // at_once, at_once), (1, blocks % at_once)):
        if not times * active:
            continue
        wave = _wave(plan, target, active, moved * active / blocks, own)
        parts = {cause: parts.get(cause, 0.0) + times * us for cause, us in wave.items()}
        tensor = wave.pop("tensor")
        rest = overlapped(r.overlap, *wave.values())
        busy += times * overlapped(r.tensor_overlap, rest, tensor)
    rounds = ceil_div(blocks, slots)  # blocks of one SM, one after the other or side by side
    exchange, store = (rounds * us for us in max(_end(p, target) for p in plan.sections))
    after = rounds * _after_us(plan, target) + _statistics_us(plan, target, busy)
    ramp = r.first_stage * plan.stage_bytes / r.sm_bytes_per_us + (rounds - 1) * r.block_us
    parts |= {"launch": target.launch_us, "ramp": ramp, "exchange": exchange, "store": store}
    parts |= {"after": after} if after else {}
    return Cost(target.launch_us + busy + ramp + exchange + store + after, parts)


@cache
def at_rows(rows: int, target: Target) -> Target:
    """The target with the constants for products of this many rows."""
    w = target.wide
    if rows < w.rows:
        return target
    own = {f.name: getattr(w, f.name) for f in fields(w) if hasattr(target.rates, f.name)}
    rates = replace(target.rates, tensor_overlap=w.overlap, **own)
    return replace(target, l2_bandwidth=w.l2_bandwidth, tensor_flops=w.tensor_flops, rates=rates)


def _wave(
    plan: MatmulPlan, target: Target, active: int, moved: float, own: tuple[float, float]
) -> dict[str, float]:
    """Time of ``active`` blocks, by cause, while they share ``moved`` bytes of memory.
    ``own``: an iteration's time in the helper warps, and in the tensor cores."""
    r, loop = target.rates, plan.iterations
    on_one = loop * active / max(1, min(target.sms, active))  # iterations of blocks on one SM
    # blocks that load the row tile together read a part of it each
    read = plan.stage_bytes - plan.row_bytes * (1 - 1 / plan.schedule.share_rows)
    copied = plan.copied_bytes
    return {
        "memory": moved / target.bandwidth * 1e6,
        "ingest": on_one * plan.stage_bytes / r.sm_bytes_per_us,
        "l2": active * loop * read / target.l2_bandwidth * 1e6,
        # hidden labels add one box and one instruction: LoRA 16x4096x4096, weights (N, K), takes
        # 10.9 in 32 iterations and 10.5 in 16
        "iterations": loop * r.iteration_us * (1 + len(plan.tails)) + on_one * own[0],
        "tensor": on_one * own[1],
    } | {  # what few kernels have
        cause: on_one * us for cause, us in (
            ("copies", copied / r.copied_bytes_per_us),
            ("latency", r.latency_us / max(1, plan.schedule.stages - 1)),
            ("shared", _shared_bytes(plan, target) / r.shared_bytes_per_us),
        ) if us
    }  # fmt: skip


def _shared_bytes(plan: MatmulPlan, target: Target) -> float:
    """Bytes of shared memory that an iteration writes, and that products and helpers read.
    Each block of columns reads all rows; columns that go through registers cost more."""
    m, n, k = plan.tile
    columns = n * len(plan.products)
    each = target.rates.scaled_reads if plan.schedule.scales_columns else 1.0
    helped = bool(plan.statistics) * (not plan.schedule.reduces_once) + 2 * plan.rewrites_rows
    return plan.stage_bytes + plan.element_bytes * k * (
        columns * (each + m / COLUMN_BLOCK) + helped * m / plan.schedule.share_rows
    )


def _reread_bytes(plan: MatmulPlan, target: Target) -> float:
    """Bytes of the weights that row tiles read after the first one.
    Those of a round, which read them at about the same time, but for what L2 loses, ``reread``;
    later rounds all that L2 does not hold."""
    views = {v.argument: v for p in plan.sections for v in p.columns.values()}
    shapes = (plan.arguments[a].shape for a in views)
    whole = sum(
        plan.itemsize(v) * prod(map(extent, s)) for v, s in zip(views.values(), shapes, strict=True)
    )
    tiles = ceil_div(extent(plan.program.dims[plan.row]), plan.tile[0])
    if plan.schedule.persistent:
        together = plan.group
    else:
        together = max(1, target.sms // sum(p.column_tiles for p in plan.sections))
    again = max(0.0, whole - target.rates.kept_bytes) * (ceil_div(tiles, together) - 1)
    return target.rates.reread * whole * (1 - 1 / tiles) + again


def _piece(plan: MatmulPlan) -> int:
    """Contiguous bytes that an iteration loads, in its largest tile."""
    tile = plan.program.tile
    staged = sorted((plan.rows | plan.vectors | plan.columns | plan.hidden).items())
    views = [view for _, view in staged]
    largest = max(views, key=lambda v: prod(tile[d] for d in v.labels))
    return tile[largest.labels[-1]] * plan.itemsize(largest)


def _resident(plan: MatmulPlan, target: Target) -> int:
    """Number of blocks that one SM holds."""
    registers = plan.threads * OTHER_REGISTERS + plan.accumulators
    by_memory = target.sm_shared_bytes // (plan.shared_bytes + target.reserved_bytes)
    return max(1, min(by_memory, target.registers // registers))


def _staged_us(plan: MatmulPlan, target: Target) -> float:
    """Time of the helper warps in an iteration: they rewrite the rows, or only read them.
    The rates are those of four warps."""
    if not plan.rewrites_rows and (not plan.statistics or plan.schedule.reduces_once):
        return 0.0
    r, (m, _, k) = target.rates, plan.tile
    rate = r.prologue_per_us if plan.rewrites_rows else r.statistic_per_us
    count = sum(
        r.instructions.get(op.kind, 1) for op in plan.program.ops
        if op.kind != LOAD and not op.facets.contracts
        and plan.contracted in (*op.dims, op.attributes.get("over"))
        and plan.column not in op.dims
    )  # fmt: skip
    return m * k * (1 / rate + count / r.lanes_per_us) * 4 / plan.helpers


def _tensor_us(plan: MatmulPlan, target: Target) -> float:
    """Time of the products of an iteration, at the rate that the accumulators' area allows."""
    r, (m, n, k) = target.rates, plan.tile
    areas = [m * n] * len(plan.products) + [m * t.padded for t in plan.tails for _ in t.products]
    flops = 2.0 * (sum(areas) + r.vector_rows * n * len(plan.vector_columns)) * k
    flops *= plan.halves * (3 if plan.split else 1)  # TF32 has half the rate
    return multiplied_us(flops, max(areas), target) / (target.doubled if plan.doubles else 1.0)


def multiplied_us(flops: float, area: int, target: Target) -> float:
    """Time of an SM's products at the rate that this area of accumulators allows."""
    r = target.rates
    efficiency = r.tensor_efficiency * area / (area + r.half_area)
    return flops * target.sms / (target.tensor_flops * efficiency) * 1e6


def _end(plan: MatmulPlan, target: Target) -> tuple[float, float]:
    """Time of a block's cluster exchange, and of its epilogue; each block finishes some columns."""
    r, (m, n, _) = target.rates, plan.tile
    finished = m * n * len(plan.finals) / plan.ranks
    sent = 4 * finished * (plan.cluster - 1) / 1024
    per_store = r.store_us if plan.ranks == 1 else r.cluster_store_us
    count = sum(
        instructions(plan.program, op, target) for op in plan.program.ops
        if plan.contracted not in op.dims and plan.column in op.dims and computes(op)
    )  # fmt: skip
    vectors = sum(plan.row in v.labels and plan.column not in v.labels for v in plan.loads.values())
    rows = min(m, r.row_loads) * (plan.ranks == 1)
    arithmetic = m * n / plan.ranks * count / r.lanes_per_us
    store = per_store * finished / 1024 + arithmetic + r.row_load_us * vectors * rows
    return r.exchange_us_per_kb * sent + _meeting_us(plan, target), store


def _meeting_us(plan: MatmulPlan, target: Target) -> float:
    """Time in which the blocks that share tiles over the grid write their sums, meet, and read."""
    if plan.parts == 1:
        return 0.0
    m, n, _ = plan.tile
    left = 4 * m * n * len(plan.finals) * plan.program.blocks()
    return target.rows.finish_us + 2 * left / target.l2_bandwidth * 1e6


def _statistics_us(plan: MatmulPlan, target: Target, busy: float) -> float:
    """Time for which the first tile waits, after its ``busy`` loop, for the statistics of all rows.
    None if blocks do not share them out."""
    if not plan.schedule.reduces_once:
        return 0.0
    dims, element = plan.program.dims, plan.element_bytes
    read = element * len(plan.rows) * extent(dims[plan.row]) * extent(dims[plan.contracted])
    needed = read / plan.launched / target.rates.helper_bytes_per_us + target.rows.finish_us
    rounds = ceil_div(sum(p.tiles for p in plan.sections), plan.launched)
    return max(0.0, needed - busy / rounds)


def _after_us(plan: MatmulPlan, target: Target) -> float:
    """Time of products after the loop, and of reductions along the columns."""
    r, spread = target.rates, plan.column_cluster > 1
    reduction = r.column_reduction_us + spread * r.cluster_reduction_us
    return r.after_product_us * len(plan.tails) + len(plan.reductions) * reduction
