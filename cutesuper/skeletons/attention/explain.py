"""The plan of an attention loop in words; see `cutesuper.report`."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

from cutesuper.ir.block import AxisKind
from cutesuper.ir.dims import ceil_div, extent
from cutesuper.ir.thread import ThreadExpression
from cutesuper.skeletons.attention.plan import AttentionPlan, Mask, Reduction
from cutesuper.skeletons.base import Plan


def attention_lines(plan: AttentionPlan) -> list[str]:
    """The plan line by line: places of all data, roles of all warps, joining of the keys' parts."""
    lines = [_tile_line(plan), *_block_lines(plan), *_row_lines(plan), *_key_lines(plan)]
    lines += [
        *beside_lines(_name(plan, i) for i in plan.beside),
        *(f"{_name(plan, i)}: read where results are stored" for i in plan.row_loads),
        _score_line(plan),
        *_sum_lines(plan),
        *_join_lines(plan),
    ]
    lines += [
        f"{_tensor(plan, o.view.argument)} = {_text(plan, o.expression)}" for o in plan.outputs
    ]
    if any(s.inverse is not None for s in plan.row_sums):
        lines.append("rows that see no key are 0")
    return lines + launch_lines(plan)


def launch_lines(plan: Plan[Any]) -> list[str]:
    """The end of a plan in words: its shared memory, and its launch."""
    lines = [f"{plan.shared_bytes} bytes of shared memory"]
    if plan.schedule.dependent_launch:
        lines.append("dependent launch: nothing loaded before the dependency wait")
    return lines


def beside_lines(names: Iterable[str]) -> list[str]:
    """A line for each tensor that meets scores, by its name."""
    return [f"{name}: read in registers while scores are multiplied" for name in names]


def visible(plan: Plan[Any], mask: Mask, columns: str, rows: str) -> str:
    """``N < lengths + L - 9``: the part of a label that a mask leaves to a row."""
    terms = [] if mask.lengths is None else [plan.arguments[mask.lengths.argument].name]
    terms += [rows] if mask.rows is not None else []
    terms += [str(plan.program.dims[mask.added])] if mask.added else []
    terms += [f"-{plan.program.dims[mask.taken]}"] if mask.taken else []
    limit = " + ".join([*terms, *([str(mask.offset)] if mask.offset else [])])
    return f"{columns} {'>=' if mask.lower else '<'} {limit.replace('+ -', '- ') or 0}"


def _tile_line(plan: AttentionPlan) -> str:
    rows = " x ".join(f"{d} {plan.tile(d)}" for d in plan.rows)
    return (
        f"attention loop: rows {rows}, {plan.keys} {plan.key_tile} per stage, "
        f"{plan.inner} {plan.tile(plan.inner)} and {plan.columns} {plan.tile(plan.columns)} whole"
    )


def _block_lines(plan: AttentionPlan) -> list[str]:
    s, program = plan.schedule, plan.program
    tiles = prod(ceil_div(extent(program.dims[d]), plan.tile(d)) for d in plan.rows)
    batch = prod(extent(program.dims[d]) for d in plan.batch)
    warps = "1 producer warp" + (f", {plan.helpers} helper warps" if plan.helpers else "")
    handed = (
        ""
        if plan.registers is None
        else (f"; {plan.registers[0]} registers for consumers, {plan.registers[1]} for others")
    )
    turns = "in turns with the next tile's scores" if s.overlapped else "one tile after the other"
    turns += ", by two warpgroups together" if s.together else ""
    return [
        (
            f"grid {plan.parts} x {tiles} x {batch} blocks in clusters of {plan.cluster}, "
            f"{plan.threads} threads: {plan.warpgroups} consumer warpgroup(s), {s.row_groups} "
            f"along the rows and {s.key_groups} along the keys, {warps}{handed}"
        ),
        (
            f"ring of {s.stages} stages x {plan.stage_bytes} bytes: {_name(plan, plan.key_load)}, "
            f"{_name(plan, plan.value_load)}; {_name(plan, plan.row_load)} stays, "
            f"{plan.query_bytes} bytes"
        ),
        f"products {turns}; {s.resident} block(s) share a multiprocessor",
    ]


def _row_lines(plan: AttentionPlan) -> list[str]:
    lines = [_reduction(plan, "row", n, r) for n, r in enumerate(plan.row_reductions)]
    lines += [
        f"row{n}, once per row: {_text(plan, e)}" for n, e in enumerate(plan.row_values.values())
    ]
    if plan.prologue is not None:
        lines.append(f"rows, rewritten in shared memory: {_text(plan, plan.prologue)}")
    return lines


def _key_lines(plan: AttentionPlan) -> list[str]:
    lines = [_reduction(plan, "key", n, r) for n, r in enumerate(plan.key_reductions)]
    return lines + [
        f"key{n}, by helper warps, once per key and block: {_text(plan, e)}"
        for n, e in enumerate(plan.key_values.values())
    ]


def _reduction(plan: AttentionPlan, side: str, n: int, r: Reduction) -> str:
    scale = f" * {r.scale:g}" if r.scale != 1 else ""
    return f"{side} statistic{n}: {r.op} of {_text(plan, r.source)}{scale}"


def _score_line(plan: AttentionPlan) -> str:
    names = _name(plan, plan.row_load), _name(plan, plan.key_load)
    line = f"score: {names[0]} times {names[1]} over {plan.inner}"
    if plan.maximum is None:
        return line
    if not plan.scores.trivial or plan.factor != 1.0:
        line += f", then {_text(plan, plan.scores)} * {plan.factor:g}"
    line += "".join(f", keys {visible(plan, m, plan.keys, m.rows or '')}" for m in plan.masks)
    return f"{line}; weight: exp(score - running maximum)"


def _sum_lines(plan: AttentionPlan) -> list[str]:
    values = _name(plan, plan.value_load)
    lines = [
        f"sum{n} over {plan.keys}: {_text(plan, s.source)}" for n, s in enumerate(plan.row_sums)
    ]
    return [*lines, f"result over {plan.keys}: {_text(plan, plan.result.source)} times {values}"]


def _join_lines(plan: AttentionPlan) -> list[str]:
    """The steps that join the results of warpgroups, blocks and clusters, in order."""
    lines = []
    if plan.schedule.key_groups > 1:
        lines.append(f"warpgroups: combined through {plan.meeting_bytes} bytes of shared memory")
    if plan.cluster > 1:
        lines.append(
            f"cluster: {plan.cluster} blocks with a part of {plan.keys} each; "
            f"{plan.exchange_bytes} bytes arrive through distributed shared memory"
        )
    if plan.grid_parts > 1:
        partials, counters = (" x ".join(map(str, s.shape)) for s in plan.scratch)
        what = "clusters" if AxisKind.CLUSTER in {a.kind for a in plan.program.axes} else "blocks"
        lines.append(
            f"grid: {plan.grid_parts} {what} with a part of {plan.keys} each; the last one to "
            f"arrive adds {partials} fp32 values in device memory, counted by {counters} counters"
        )
    return lines


def _tensor(plan: AttentionPlan, argument: int) -> str:
    return plan.arguments[argument].name


def _name(plan: AttentionPlan, load: int) -> str:
    return _tensor(plan, plan.view(load).argument)


def _text(plan: AttentionPlan, expression: ThreadExpression) -> str:
    """An expression whose leaves have the names of the other lines."""
    names = {r.value: f"statistic{n}" for n, r in enumerate(plan.row_reductions)}
    names |= {r.value: f"statistic{n}" for n, r in enumerate(plan.key_reductions)}
    names |= {i: f"row{n}" for n, i in enumerate(plan.row_values) if i not in names}
    names |= {i: f"key{n}" for n, i in enumerate(plan.key_values) if i not in names}
    sums = enumerate(plan.row_sums)
    for n, s in sums:
        names |= {s.final: f"sum{n}"} | ({} if s.inverse is None else {s.inverse: f"(1 / sum{n})"})
    names |= {plan.product: "score", plan.result.final: "result"}
    names |= {} if plan.maximum is None else {plan.maximum: "maximum"}
    names |= {} if plan.weight is None else {plan.weight: "weight"}
    loads = [i for i, op in enumerate(plan.program.ops) if op.kind == "load"]
    names |= {i: _name(plan, i) for i in loads if i not in names}
    return expression.text([names[i] for i in expression.leaves])
