"""What `Kernel.explain`, `Kernel.draw` and the demo tell: program, choice, plan, figures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cutesuper.ir.block import LOAD
from cutesuper.ir.graph import KernelGraph
from cutesuper.ir.text import kernel_graph_text, mugraph_text
from cutesuper.ir.thread import ThreadExpression
from cutesuper.show.page import Facts, mugraph_page
from cutesuper.skeletons.attention.explain import attention_lines
from cutesuper.skeletons.base import View
from cutesuper.skeletons.matmul.plan import COLUMN_BLOCK, MatmulPlan, grid_shape
from cutesuper.skeletons.matmul.tails import Tail
from cutesuper.skeletons.matmul.tiles import STORE_COLUMNS, STORE_ROWS
from cutesuper.skeletons.planner import KernelPlan
from cutesuper.skeletons.rows.loop_explain import row_loop_lines
from cutesuper.skeletons.rows.loop_plan import RowLoopPlan
from cutesuper.skeletons.rows.plan import RowPlan
from cutesuper.targets import Target

if TYPE_CHECKING:
    from cutesuper.pipeline import Choice, Options
    from cutesuper.runtime.kernel import CompiledStep, Variant
    from cutesuper.search.search import Candidate, SearchResult
    from cutesuper.store import Entry

#: alternatives that a report lists
ALTERNATIVES = 5


def variant_report(
    graph: KernelGraph,
    options: Options,
    result: SearchResult,
    choice: Choice,
    steps: tuple[CompiledStep, ...],
) -> str:
    """The whole story of one compiled program, section by section."""
    sections = {
        "program": kernel_graph_text(graph),
        "search": stored_text(choice.stored) if choice.stored else search_text(result),
        "muGraph": mugraph_text(choice.candidate.mugraph),
        "verification": choice.verification.summary(),
        "cost": cost_text(choice.candidate),
        "alternatives": alternatives_text(result, choice),
        "plan": "\n\n".join(plan_text(s.name, s.plan) for s in steps),
        "compiled": "\n".join(figures_text(s) for s in steps),
    }
    head = f"optimized for {options.target.name} ({options.target.arch})"
    body = [f"== {name} ==\n{text}" for name, text in sections.items()]
    return "\n\n".join([head, *body])


def variant_page(graph: KernelGraph, target: Target, variant: Variant) -> str:
    """One compiled program as an HTML page, with the definition beside it."""
    verified = variant.verification
    facts = Facts(
        graph,
        f"{target.name} ({target.arch})",
        variant.costs,
        verified.summary() if verified else "",
        verified.bound_log2 if verified else None,
        tuple(f"{plan_text(s.name, s.plan)}\n\n{figures_text(s)}" for s in variant.steps),
    )
    return mugraph_page(variant.mugraph, facts)


def stored_text(entry: Entry) -> str:
    """Where a tuned program came from and what was measured."""
    m = entry.measured
    model = "did not run" if m.model_us is None else f"took {m.model_us:.2f} us"
    versions = {
        "driver": m.driver, "CUDA": m.cuda, "torch": m.torch, "CuTe DSL": m.cutlass_dsl,
        "cutesuper": m.cutesuper, "commit": m.commit,
    }  # fmt: skip
    known = [f"{k} {v}" for k, v in versions.items() if v]
    return (
        f"none: the tuned program of {entry.path}\n"
        f"measured {m.median_us:.2f} us (spread {m.spread_us:.2f}), the cost model's choice "
        f"{model}; {m.timed} candidate(s) timed\n" + ", ".join([m.gpu or "unknown GPU", *known])
    )


def search_text(result: SearchResult) -> str:
    """What the search looked at and what it left out."""
    s = result.statistics
    lines = [
        (
            f"{s.splits} splits of {s.regions} region(s), {s.feasible} feasible; {s.tried} results "
            f"formed, {s.classes} classes kept"
        ),
        (
            f"{s.programs} structures extracted, {s.verified} verified, {s.rejected} rejected; "
            f"{s.seconds:.2f} s, peak {s.peak_mb:.0f} MB"
        ),
    ]
    lines += [f"left out: {count} x {reason}" for reason, count in s.pruned.most_common()]
    return "\n".join(lines)


def cost_text(candidate: Candidate) -> str:
    """Predicted time by cause, microseconds."""
    parts = ", ".join(f"{k} {v:.2f}" for k, v in candidate.breakdown.items() if v >= 0.005)
    return f"predicted {candidate.cost_us:.2f} us" + (f" ({parts})" if parts else "")


def alternatives_text(result: SearchResult, choice: Choice) -> str:
    """The next best candidates, and better ones that could not be run."""
    lines = [f"refused: {reason}" for reason in choice.refused]
    others = [c for c in result.candidates if c is not choice.candidate]
    lines += [f"{c.cost_us:8.2f} us  {c.structure}" for c in others[:ALTERNATIVES]]
    return "\n".join(lines) or "none"


def plan_text(name: str, plan: KernelPlan) -> str:
    """Where everything lives and who does what, for one kernel."""
    if isinstance(plan, MatmulPlan):
        lines = _matmul_lines(plan)
    elif isinstance(plan, RowPlan):
        lines = _row_lines(plan)
    elif isinstance(plan, RowLoopPlan):
        lines = row_loop_lines(plan)
    else:
        lines = attention_lines(plan)
    return f"kernel {name}\n" + "\n".join(f"  {line}" for line in lines)


def _names(plan: KernelPlan, views: dict[int, View]) -> str:
    return ", ".join(plan.arguments[v.argument].name for v in views.values())


def _leaf_names(plan: MatmulPlan, leaves: tuple[int, ...]) -> list[str]:
    """How a person calls the leaves of an expression."""
    values = {final: f"accumulator{n}" for final, n in plan.finals.items()}
    values |= {final: f"hidden{n}" for n, (_, final) in enumerate(_hidden_products(plan))}
    values |= {p.value: f"vector{n}" for n, p in enumerate(plan.vector_products)}
    values |= {s.value: f"statistic{n}" for n, s in enumerate(plan.statistics)}
    values |= {r.value: f"reduction{n}" for n, r in enumerate(plan.reductions)}
    values |= {i: f"row{n}" for n, i in enumerate(plan.row_values) if i not in values}
    values |= {} if plan.shift is None else {plan.shift.value: "shifted"}
    ops = plan.program.ops
    return [
        values.get(i) or (str(ops[i].attributes["tensor"]) if ops[i].kind == LOAD else f"value{i}")
        for i in leaves
    ]


def _hidden_products(plan: MatmulPlan) -> list[tuple[int, int]]:
    """Column operand and accumulator of every product of the loop along a hidden label."""
    return [product for t in plan.tails for product in t.products]


def _text(plan: MatmulPlan, expression: ThreadExpression) -> str:
    return expression.text(_leaf_names(plan, expression.leaves))


def _matmul_lines(plan: MatmulPlan) -> list[str]:
    m, n, k = plan.tile
    s = plan.schedule
    x, y, z = grid_shape(plan)
    lines = [
        (
            f"matmul loop: {plan.row} {m} x {plan.column} {n} per tile, {plan.contracted} {k} per "
            f"stage, {plan.iterations} iterations"
        ),
        f"grid {x} x {y} x {z} blocks in clusters of {plan.cluster_size * s.share_rows}, "
        f"{plan.threads} threads: {s.warpgroups} consumer warpgroup(s)"
        + (f", {plan.helpers} helper warps" if plan.has_helpers else "")
        + ", 1 producer warp",
        f"ring of {s.stages} stages x {plan.stage_bytes} bytes: {_ring(plan)}",
    ]
    if s.share_rows > 1:
        lines.append(
            f"cluster: {s.share_rows} blocks along {plan.column} load the row tile together"
        )
    if s.persistent:
        lines.append(f"every cluster walks a run of tiles along {plan.column}")
    if plan.shift is not None:
        names = [plan.arguments[plan.staged(i).argument].name for i in plan.shift.source.leaves]
        lines.append(
            f"shifted: {plan.shift.source.text(names)}, less the mean of a sample of its row"
            + ("" if plan.shift.products else " (in statistics)")
        )
    if plan.prologue is not None:
        lines.append(f"row operand, rewritten in the stage: {_text(plan, plan.prologue)}")
    for i, p in enumerate(plan.vector_products):
        vector = plan.vector_rows[p.vector]
        text = "ones" if vector is None else _text(plan, vector)
        weight = plan.arguments[plan.columns[p.column].argument].name
        lines.append(f"vector{i} per column, in the same loop: {text} times {weight}")
    for i, st in enumerate(plan.statistics):
        scale = f" * {st.scale:g}" if st.scale != 1 else ""
        text = _text(plan, st.source)
        lines.append(f"statistic{i} per row, in the same loop: {st.op} of {text}{scale}")
    lines += [_tail_line(plan, t) for t in plan.tails]
    if plan.cluster > 1:
        lines.append(
            f"cluster: each block finishes {n // plan.cluster} columns; {plan.exchange_bytes} "
            "bytes of partial sums arrive through distributed shared memory"
        )
    for i, e in enumerate(plan.row_values.values()):
        lines.append(f"row{i}, once per row: {_text(plan, e)}")
    lines += _reduction_lines(plan)
    for o in plan.outputs:
        name = plan.arguments[o.view.argument].name
        whole = plan.column in o.view.labels
        how = f", {STORE_ROWS}x{STORE_COLUMNS} a bulk store" if whole and s.bulk_store else ""
        how = how if whole else ", once per row"
        lines.append(f"{name} = {_text(plan, o.expression)}{how}")
    lines.append(f"barriers: {_barriers(plan)}; {plan.shared_bytes} bytes of shared memory")
    if s.dependent_launch:
        early = [a.name for a in plan.arguments if a.constant] or ["nothing"]
        lines.append(f"dependent launch: {', '.join(early)} loaded before the dependency wait")
    return lines


def _ring(plan: MatmulPlan) -> str:
    """What a stage holds: column operands, those along hidden labels, row operands."""
    parts = [f"{_names(plan, plan.columns)} ({COLUMN_BLOCK} columns a box)"] if plan.columns else []
    number = 0
    for t in plan.tails:
        width = min(COLUMN_BLOCK, t.width(bool(plan.columns)))
        for load, _ in t.products:
            name = plan.arguments[plan.hidden[load].argument].name
            parts.append(f"{name} for hidden{number} ({width} columns a box)")
            number += 1
    return ", ".join([*parts, _names(plan, plan.rows | plan.vectors)])


def _tail_line(plan: MatmulPlan, tail: Tail) -> str:
    """A product after the loop: what is multiplied, where it comes from, where the result goes."""
    shared = sum(final == tail.final for _, final in plan.products)
    shared += sum(t.final == tail.final for t in plan.tails)
    how = "by a bulk load" if plan.loaded(tail) else f"rounded to {plan.dtype}"
    who = ""
    if plan.cluster > 1:
        who = " by one block of the cluster" if tail.once else " by every block with its part"
    return (
        f"after the loop: {_text(plan, tail.source)} [{plan.row}, {tail.hidden} {tail.extent}], "
        f"{how}, times {plan.arguments[tail.view.argument].name}, "
        f"{'added to' if shared > 1 else 'into'} accumulator{plan.finals[tail.final]}{who}"
    )


def _reduction_lines(plan: MatmulPlan) -> list[str]:
    """Reductions along the columns, and how blocks share them."""
    lines = [
        f"reduction{i} along {plan.column}: {r.op} of {_text(plan, r.source)}"
        + (f" * {r.scale:g}" if r.scale != 1 else "")
        for i, r in enumerate(plan.reductions)
    ]
    if lines and plan.column_cluster > 1:
        lines.append(
            f"cluster: each block has {plan.tile[1]} columns and sends what it has reduced of "
            f"{plan.tile[0]} rows to all {plan.column_cluster}"
        )
    return lines


def _barriers(plan: MatmulPlan) -> str:
    names = ["full", "empty"] + ["ready"] * plan.rewrites
    names += ["received"] * (plan.cluster > 1)
    shared = plan.schedule.share_rows > 1 and plan.prologue is None
    names += ["reduced"] * (bool(plan.statistics) and (plan.cluster > 1 or shared))
    names += ["after_full"] * bool(plan.tails)
    exchanged = bool(plan.reductions) and plan.column_cluster > 1
    return ", ".join(names + ["columns_reduced"] * exchanged)


def _row_lines(plan: RowPlan) -> list[str]:
    s = plan.schedule
    rows = " x ".join(plan.rows) or "1"
    return [
        f"rows: {rows} rows of {plan.column}, {s.rows} per block of {plan.threads} threads",
        (
            f"{s.lanes} threads share a row, {s.chunks} access(es) of {s.vector} elements each; "
            "rows stay in registers"
        ),
        f"reductions: {len(plan.reductions)}; {plan.shared_bytes} bytes of shared memory",
        f"reads {_names(plan, plan.loads)}; writes {_names(plan, plan.stores)}",
    ]


def figures_text(step: CompiledStep) -> str:
    """Registers, shared memory and instruction mix of one kernel."""
    r = step.resources
    kept = ("HGMMA", "UTMALDG", "UBLKCP", "LDG.E.128", "STG.E.128", "MUFU", "LDL", "STL")
    mix = ", ".join(f"{k} {r.instructions[k]}" for k in kept if r.instructions.get(k))
    how = "from the cache" if step.artifact.from_cache else f"in {step.artifact.compile_s:.1f} s"
    if unknown := step.artifact.request.unknown:
        how += f", not kept on disk: an operator may change unseen ({'; '.join(unknown)})"
    return (
        f"{step.name}: {r.registers} registers, {r.stack_bytes} bytes of stack, {r.shared_bytes} "
        f"bytes shared, {r.threads} threads, {step.stages} stage(s); {mix}; compiled {how}"
    )
