"""The plan of an attention loop with plain sums in words; see `cutesuper.report`."""

from __future__ import annotations

from collections.abc import Iterable

from cutesuper.ir.dims import ceil_div
from cutesuper.ir.operators.base import CONSTANT
from cutesuper.ir.thread import ThreadExpression
from cutesuper.skeletons.attention.explain import beside_lines, launch_lines, visible
from cutesuper.skeletons.attention.sums.plan import Sight, StoredScores, SumsPlan


def sums_lines(plan: SumsPlan) -> list[str]:
    """The plan line by line: places of all data, roles of all warps, order of the work."""
    lines = [*_block_lines(plan), *_score_lines(plan)]
    lines += beside_lines(_name(plan, i) for i in plan.beside)
    lines += _phase_lines(plan)
    lines += [_store_line(plan, s) for s in plan.stores]
    lines += [f"visible: {_sight(plan, s)}" for s in plan.sights]
    lines += [_output_line(plan, n) for n in range(len(plan.outputs))]
    return lines + launch_lines(plan)


def _block_lines(plan: SumsPlan) -> list[str]:
    s, rows = plan.schedule, plan.program.tile[plan.rows]
    tiles = ceil_div(plan.extent(plan.rows), rows)
    visits = f", once for each of {plan.turns} {plan.visits}" if plan.visits else ""
    held = "" if plan.registers is None else "; {} registers for consumers, {} for others".format(
        *plan.registers
    )  # fmt: skip
    order = "in turns with the next tile's scores" if s.overlapped else "one tile after the other"
    streams = _names(plan, (*plan.streams, *plan.loop_vectors))
    lines = [
        ("attention loop with plain sums", f"rows {plan.rows} {rows}, {plan.loop} ",
         f"{plan.loop_tile} per stage{visits}"),
        (f"grid {tiles} x {plan.program.blocks() // tiles} blocks, {plan.threads} threads",
         f"{s.row_groups} consumer warpgroup(s), 1 producer warp", held),
        (f"ring of {s.stages} stages x {plan.stage_bytes} bytes", f"{streams}; ",
         f"{_names(plan, plan.residents)} stay, {plan.resident_bytes} bytes"),
    ]  # fmt: skip
    return [*(f"{what}: {first}{rest}" for what, first, rest in lines), f"products {order}"]


def _score_lines(plan: SumsPlan) -> list[str]:
    return [
        f"score{n}: {_name(plan, s.resident)} times {_name(plan, s.stream)} over {s.inner}"
        for n, s in enumerate(plan.scores)
    ]


def _phase_lines(plan: SumsPlan) -> list[str]:
    """``after score0: exp(sub(score0, lse))``, then what is summed."""
    lines = [
        f"after score{p.score}, while the next is multiplied: "
        + "; ".join(_operand(plan, i) for i in p.slots)
        for p in plan.phases[:-1]
    ]
    return lines + [
        f"sum{n} over {plan.loop}: {_operand(plan, s.operand)} times {_name(plan, s.stream)}"
        for n, s in enumerate(plan.sums)
    ]


def _store_line(plan: SumsPlan, s: StoredScores) -> str:
    return f"{plan.arguments[s.view.argument].name} = {_operand(plan, s.value)}, tile by tile"


def _operand(plan: SumsPlan, operand: int) -> str:
    """An operand of a sum, as a function of scores and vectors."""
    texts = _given_names(plan)
    for i in plan.between:
        op = plan.program.ops[i]
        args = [texts[j] for j in (op.inputs[:1] if op.facets.masks else op.inputs)]
        if op.kind == CONSTANT:
            texts[i] = f"{op.attributes['value']:g}"
        else:
            texts[i] = args[0] if op.facets.masks else f"{op.kind}({', '.join(args)})"
    return texts[operand]


def _sight(plan: SumsPlan, sight: Sight) -> str:
    columns, rows = (plan.rows, plan.loop) if sight.across else (plan.loop, plan.rows)
    return visible(plan, sight.mask, columns, rows)


def _output_line(plan: SumsPlan, n: int) -> str:
    output = plan.outputs[n]
    return f"{plan.arguments[output.view.argument].name} = {_text(plan, output.expression)}"


def _name(plan: SumsPlan, load: int) -> str:
    return plan.arguments[plan.view(load).argument].name


def _names(plan: SumsPlan, loads: Iterable[int]) -> str:
    return ", ".join(_name(plan, i) for i in loads)


def _given_names(plan: SumsPlan) -> dict[int, str]:
    names = {s.value: f"score{n}" for n, s in enumerate(plan.scores)}
    vectors = (*plan.row_vectors, *plan.loop_vectors, *plan.beside)
    return names | {i: _name(plan, i) for i in vectors}


def _text(plan: SumsPlan, expression: ThreadExpression) -> str:
    names = _given_names(plan) | {s.final: f"sum{n}" for n, s in enumerate(plan.sums)}
    return expression.text([names[i] for i in expression.leaves])
