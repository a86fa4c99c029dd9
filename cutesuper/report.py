"""What `Kernel.explain`, `Kernel.draw` and the demo tell: program, choice, plan, figures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cutesuper.graph.block import LOAD
from cutesuper.graph.draw import kernel_graph_text, mugraph_text
from cutesuper.graph.kernel import KernelGraph
from cutesuper.graph.page import Facts, mugraph_page
from cutesuper.graph.target import Target
from cutesuper.schedule.matmul import MatmulPlan, grid_shape
from cutesuper.schedule.plan import View
from cutesuper.schedule.planner import KernelPlan
from cutesuper.schedule.rows import RowPlan

if TYPE_CHECKING:
    from cutesuper.optimize import Choice, Options
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
    lines = _matmul_lines(plan) if isinstance(plan, MatmulPlan) else _row_lines(plan)
    return f"kernel {name}\n" + "\n".join(f"  {line}" for line in lines)


def _names(plan: KernelPlan, views: dict[int, View]) -> str:
    return ", ".join(plan.arguments[v.argument].name for v in views.values())


def _leaf_names(plan: MatmulPlan, leaves: tuple[int, ...]) -> list[str]:
    """How a person calls the leaves of an expression."""
    finals = {final: n for n, (_, final) in enumerate(plan.products)}
    vectors = {p.value: n for n, p in enumerate(plan.vector_products)}
    statistics = {s.value: n for n, s in enumerate(plan.statistics)}
    names: list[str] = []
    for i in leaves:
        op = plan.program.ops[i]
        if i in finals:
            names.append(f"accumulator{finals[i]}")
        elif i in vectors:
            names.append(f"vector{vectors[i]}")
        elif plan.shift is not None and i == plan.shift.value:
            names.append("shifted")
        elif i in statistics:
            names.append(f"statistic{statistics[i]}")
        elif i in plan.row_values:
            names.append(f"row{list(plan.row_values).index(i)}")
        else:
            names.append(str(op.attributes["tensor"]) if op.kind == LOAD else f"value{i}")
    return names


def _matmul_lines(plan: MatmulPlan) -> list[str]:
    m, n, k = plan.tile
    s = plan.schedule
    x, y, z = grid_shape(plan)
    lines = [
        (
            f"matmul loop: {plan.row} {m} x {plan.column} {n} per tile, {plan.contracted} {k} per "
            f"stage, {plan.iterations} iterations"
        ),
        f"grid {x} x {y} x {z} blocks in clusters of {plan.cluster}, {plan.threads} threads: "
        f"{s.warpgroups} consumer warpgroup(s)"
        + (", 4 helper warps" if plan.has_helpers else "")
        + ", 1 producer warp",
        (
            f"ring of {s.stages} stages x {plan.stage_bytes} bytes: {_names(plan, plan.columns)} "
            f"(64 columns a box), {_names(plan, plan.rows | plan.vectors)}"
        ),
    ]
    if plan.shift is not None:
        names = [plan.arguments[plan.staged(i).argument].name for i in plan.shift.source.leaves]
        lines.append(
            f"shifted: {plan.shift.source.text(names)}, less the mean of a sample of its row"
            + ("" if plan.shift.products else " (in statistics)")
        )
    if plan.prologue is not None:
        names = _leaf_names(plan, plan.prologue.leaves)
        lines.append(f"row operand, rewritten in the stage: {plan.prologue.text(names)}")
    for i, p in enumerate(plan.vector_products):
        vector = plan.vector_rows[p.vector]
        text = "ones" if vector is None else vector.text(_leaf_names(plan, vector.leaves))
        weight = plan.arguments[plan.columns[p.column].argument].name
        lines.append(f"vector{i} per column, in the same loop: {text} times {weight}")
    for i, st in enumerate(plan.statistics):
        text = st.source.text(_leaf_names(plan, st.source.leaves))
        scale = f" * {st.scale:g}" if st.scale != 1 else ""
        lines.append(f"statistic{i} per row, in the same loop: {st.op} of {text}{scale}")
    if plan.cluster > 1:
        lines.append(
            f"cluster: each block finishes {n // plan.cluster} columns; {plan.exchange_bytes} "
            "bytes of partial sums arrive through distributed shared memory"
        )
    for i, e in enumerate(plan.row_values.values()):
        lines.append(f"row{i}, once per row: {e.text(_leaf_names(plan, e.leaves))}")
    for o in plan.outputs:
        name = plan.arguments[o.view.argument].name
        lines.append(f"{name} = {o.expression.text(_leaf_names(plan, o.expression.leaves))}")
    barriers = ["full", "empty"] + ["ready"] * plan.rewrites
    if plan.cluster > 1:
        barriers += ["received"] + ["reduced"] * bool(plan.statistics)
    lines.append(f"barriers: {', '.join(barriers)}; {plan.shared_bytes} bytes of shared memory")
    if s.dependent_launch:
        early = [a.name for a in plan.arguments if a.constant] or ["nothing"]
        lines.append(f"dependent launch: {', '.join(early)} loaded before the dependency wait")
    return lines


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
    return (
        f"{step.name}: {r.registers} registers, {r.stack_bytes} bytes of stack, {r.shared_bytes} "
        f"bytes shared, {r.threads} threads, {step.stages} stage(s); {mix}; compiled {how}"
    )
