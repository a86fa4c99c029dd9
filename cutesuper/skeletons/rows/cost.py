"""Cost model of row kernels, in microseconds, from their plans.
`targets` has the constants and their origin."""

from __future__ import annotations

from math import prod
from typing import Literal

from cutesuper.ir.dims import ceil_div, extent
from cutesuper.skeletons.cost import SPECIAL, Cost, computes, instructions, overlapped
from cutesuper.skeletons.rows.form import PersistentForm, RowForm
from cutesuper.skeletons.rows.plan import RowLoopPlan, RowPlan
from cutesuper.skeletons.rows.settings import stage_limit
from cutesuper.targets import Target

#: elements that a block of an element-wise kernel takes
ROW_ELEMENTS = 2048


def price(plan: RowPlan | RowLoopPlan, target: Target) -> Cost:
    """Cost of a planned kernel."""
    if isinstance(plan, RowPlan) or not (plan.sums or plan.cluster > 1):
        return _resident(plan, target)
    return _visited(plan, target) if plan.sums else _clustered(plan, target)


def least_ramp_us(form: RowForm | PersistentForm, reduces: bool, target: Target) -> float:
    """Time that any kernel of a form takes beside launch and memory, at least."""
    if isinstance(form, PersistentForm):
        return target.rows.start_us
    if form.clustered:
        return target.rows.block_us
    return target.rates.reduction_us * (form.reduced and reduces)


def _resident(plan: RowPlan | RowLoopPlan, target: Target) -> Cost:
    """Cost of rows that one block holds."""
    r, reductions = target.rates, _reductions(plan)
    sections = plan.sections if isinstance(plan, RowPlan) else (plan,)
    rows = sum(_rows(s) for s in sections)
    elements = rows * plan.length
    blocks = rows * plan.parts if reductions else ceil_div(elements, ROW_ELEMENTS)
    sms = min(target.sms, blocks)
    moved = plan.moved_bytes
    taken = sum(
        _rows(s) * (plan.length if plan.column in v.labels else 1) * plan.itemsize(v)
        for s in sections
        for v in s.views  # a tensor of columns is read again for every row
    )
    parts = {
        "memory": moved / target.bandwidth * 1e6,
        "ingest": moved / (sms * r.sm_bytes_per_us),
        "l2": taken / target.l2_bandwidth * 1e6,
        "lanes": sum(_arithmetic(s, target, True) for s in sections) / (sms * r.lanes_per_us),
    }
    busy = overlapped(r.overlap, *parts.values())
    ramp = r.reduction_us * reductions
    return Cost(target.launch_us + busy + ramp, parts | {"launch": target.launch_us, "ramp": ramp})


def _visited(plan: RowLoopPlan, target: Target) -> Cost:
    """Cost of rows that blocks visit in turn, and sums over them; all blocks run at once.

    RMSNorm's backward pass in bf16 on one H200, rows x elements, predicted (measured, as a
    prototype): 1024x4096 10.3 (10.6), 4096x1024 10.3 (9.95), 4096x2048 16.3 (16.0), 4096x4096 28.3
    (28.6), 4096x8192 52.3 (53.7), 4096x16384 102.2 (101.6), 32768x4096 197.2 (192.5).
    """
    r, moved, most = target.rows, plan.moved_bytes, plan.visits * plan.tile_rows
    busy_walkers = ceil_div(plan.row_count, most)  # the others find no rows
    blocks = busy_walkers * plan.outer_count * plan.parts
    # blocks whose share of the rows is smaller wait for the others
    share = most * busy_walkers / plan.row_count
    waves = ceil_div(blocks, target.sms)  # one, unless blocks do not wait
    if waves > 1:
        share *= waves * target.sms / blocks
        blocks = target.sms
    stage = plan.tile_rows * sum(plan.row_bytes.values())
    deep = r.deep if min(plan.stages, 2) * stage > 2 * stage_limit(target) else 1.0
    others = plan.cluster - 1 if _reductions(plan) else 0
    parts = {
        "memory": deep * share * moved / target.bandwidth * 1e6,
        "ingest": share * moved / (blocks * target.rates.sm_bytes_per_us),
        # while a block waits for its cluster it computes nothing, but memory transfers go on
        "lanes": share * _arithmetic(plan, target) / (blocks * target.rates.lanes_per_us)
        + plan.visits * others * r.cluster_us,
    }
    busy = overlapped(target.rates.overlap, *parts.values())
    parts |= {
        "launch": target.launch_us,
        "ramp": r.start_us,
        "visits": waves * plan.visits * r.visit_us,
        "finish": r.finish_us * (plan.partials > 1),
    }
    own = ("launch", "ramp", "visits", "finish")
    return Cost(busy + sum(parts[cause] for cause in own), parts)


def _clustered(plan: RowLoopPlan, target: Target) -> Cost:
    """Cost of rows split over clusters: waves of blocks that load, exchange and store.
    Loads and stores, special functions and other arithmetic of one block overlap with each other
    and with the waiting of another. An SM has blocks with one tile each, else two tiles, of two
    blocks or of two stages. In bf16, predicted (measured), 16384x65536: LayerNorm 1029 (1104),
    RMSNorm 1002 (1091), softmax 1005 (1012), its gradient 1499 (1462), cross-entropy 546 (488);
    4096x262144: softmax 1082 (1069), cross-entropy 621 (509)."""
    rates, moved, blocks = target.rates, plan.moved_bytes, plan.program.blocks()
    clusters = target.clusters[plan.cluster]
    at_once = (plan.schedule.resident if plan.one_tile else 2) * plan.cluster * clusters
    exchange = rates.reduction_us + target.rows.cluster_us * (plan.cluster - 1)
    active = min(plan.cluster * clusters, blocks)
    work = _work(plan, target)
    parts = {
        "memory": moved / target.bandwidth * 1e6,
        "ingest": moved / (active * rates.sm_bytes_per_us),
        "waits": ceil_div(blocks, at_once) * (_reductions(plan) * exchange),
    } | {pipe: count / (active * rates.lanes_per_us) for pipe, count in work.items()}
    busy = overlapped(rates.overlap, *parts.values())
    parts |= {"launch": target.launch_us, "ramp": target.rows.block_us}
    return Cost(target.launch_us + target.rows.block_us + busy, parts)


def _rows(plan: RowPlan | RowLoopPlan) -> int:
    """Number of rows, of all labels."""
    if isinstance(plan, RowPlan):
        return plan.row_count
    return prod(map(extent, plan.program.dims.values())) // plan.length


def _reductions(plan: RowPlan | RowLoopPlan) -> int:
    """Number of reductions along the row."""
    return sum(
        op.attributes.get("over") == plan.column or op.facets.scans for op in plan.program.ops
    )


def _arithmetic(plan: RowPlan | RowLoopPlan, target: Target, again: bool = False) -> float:
    """Number of instructions for all elements. Arguments are those of `_work`."""
    return sum(_work(plan, target, again).values())


def _work(
    plan: RowPlan | RowLoopPlan, target: Target, again: bool = False
) -> dict[Literal["lanes", "special"], float]:
    """Number of instructions for all elements, and apart those that stand for special functions.
    ``again``: values that do not depend on the row are computed again for each."""
    program = plan.program
    counts: dict[Literal["lanes", "special"], float] = {"lanes": 0.0, "special": 0.0}
    ops, rows = program.ops, program.dims.keys() - {plan.column}
    if isinstance(plan, RowPlan):
        ops, rows = [program.ops[i] for i in plan.order], {*plan.rows}
    for op in filter(computes, ops):
        labels = set(program.ops[op.inputs[0]].dims if "over" in op.attributes else op.dims)
        if again:
            labels |= rows
        each = instructions(program, op, target)
        elements = prod(extent(program.dims[d]) for d in labels)
        counts["special" if each >= SPECIAL else "lanes"] += elements * each
    return counts
