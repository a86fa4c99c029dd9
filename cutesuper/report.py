"""Text reports for `Kernel.explain`, `Kernel.draw` and the demo: program, choice, plan, figures."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from cutesuper.ir.graph import KernelGraph
from cutesuper.ir.graph_text import kernel_graph_text
from cutesuper.ir.text import mugraph_text
from cutesuper.skeletons.planner import KernelPlan
from cutesuper.skeletons.registry import skeleton_of

if TYPE_CHECKING:
    from cutesuper.pipeline import Choice, Options
    from cutesuper.runtime.kernel import CompiledStep
    from cutesuper.search.search import Candidate, SearchResult
    from cutesuper.store import Entry

#: number of alternatives in a report
ALTERNATIVES = 5


def variant_report(
    graph: KernelGraph,
    options: Options,
    result: SearchResult,
    choice: Choice,
    steps: tuple[CompiledStep, ...],
) -> Callable[[], str]:
    """The full report on one compiled program, section by section, when it is asked for; what
    comes of the search is written now, so that its other candidates need not be kept."""
    sections = {
        "program": kernel_graph_text(graph),
        "search": stored_text(choice.stored) if choice.stored else search_text(result),
        "muGraph": mugraph_text(choice.candidate.mugraph),
        "verification": choice.verification.summary(),
        "cost": cost_text(choice.candidate),
        "alternatives": alternatives_text(result, choice),
    }
    head = f"optimized for {options.target.name} ({options.target.arch})"
    known = [head, *(f"== {name} ==\n{text}" for name, text in sections.items())]

    def report() -> str:
        plan = "\n\n".join(plan_text(s.name, s.plan) for s in steps)
        figures = "\n".join(figures_text(s) for s in steps)
        return "\n\n".join([*known, f"== plan ==\n{plan}", f"== compiled ==\n{figures}"])

    return report


def stored_text(entry: Entry) -> str:
    """Origin and measurements of a tuned program."""
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
    """Statistics of the search: explored and omitted programs."""
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
    """The plan of one kernel: placement of its data and roles of its warps."""
    lines = skeleton_of(plan).explain(plan)
    return f"kernel {name}\n" + "\n".join(f"  {line}" for line in lines)


def kernel_notes(step: CompiledStep) -> str:
    """Plan and figures of one kernel, for the HTML page."""
    return f"{plan_text(step.name, step.plan)}\n\n{figures_text(step)}"


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
        f"bytes shared, {r.threads} threads, {r.stages} stage(s); {mix}; compiled {how}"
    )
