"""Text reports for `Kernel.explain`, `Kernel.draw` and the demo: program, choice, plan, figures."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable
from math import ceil
from typing import TYPE_CHECKING

from cutesuper.ir.dims import Symbol, show_shape
from cutesuper.ir.graph import KernelGraph
from cutesuper.ir.graph_text import kernel_graph_text
from cutesuper.ir.text import mugraph_text
from cutesuper.skeletons.planner import KernelPlan
from cutesuper.skeletons.registry import skeleton_of
from cutesuper.targets.roofline import baseline, eager, traffic, work

if TYPE_CHECKING:
    from cutesuper.pipeline import Choice, Options
    from cutesuper.runtime.kernel import CompiledStep
    from cutesuper.search.search import Candidate, SearchResult
    from cutesuper.store import Entry
    from cutesuper.verify.equivalence import Verification

#: number of alternatives in a report
ALTERNATIVES = 5
#: most columns of a line
WIDTH = 120


def variant_report(
    graph: KernelGraph,
    options: Options,
    result: SearchResult,
    choice: Choice,
    steps: tuple[CompiledStep, ...],
) -> Callable[[], str]:
    """The full report on one compiled program: a summary of ten lines, then its sections.
    The sections are written when they are asked for; what comes of the search is written now, so
    that its other candidates need not be kept."""
    sections = {
        "program": kernel_graph_text(graph),
        "search": stored_text(choice.stored) if choice.stored else search_text(options, result),
        "muGraph": mugraph_text(choice.candidate.mugraph),
        "verification": choice.verification.summary(),
        "cost": cost_text(choice.candidate),
        "alternatives": alternatives_text(result, choice),
    }
    head = summary_text(graph, options, result, choice, steps)
    known = [head, *(f"== {name} ==\n{text}" for name, text in sections.items())]

    def report() -> str:
        plan = "\n\n".join(plan_text(s.name, s.plan) for s in steps)
        figures = "\n".join(figures_text(s) for s in steps)
        return narrow("\n\n".join([*known, f"== plan ==\n{plan}", f"== compiled ==\n{figures}"]))

    return report


def no_kernels_text(graph: KernelGraph) -> str:
    """The report on a program whose tensors have no elements."""
    empty = next(n for n in graph.nodes if 0 in n.shape)
    why = f"{empty.name}{show_shape(empty.shape)} has no elements"
    return (f"no kernels: {why}, and PyTorch computes what there is\n\n== program ==\n"
            f"{kernel_graph_text(graph)}")  # fmt: skip


def narrow(text: str) -> str:
    """A text with long lines folded, words whole unless they are longer than a line."""
    return "\n".join(part for line in text.split("\n") for part in _folded(line))


def _folded(line: str) -> list[str]:
    if len(line) <= WIDTH:
        return [line]
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    return textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_on_hyphens=False)


def summary_text(
    graph: KernelGraph,
    options: Options,
    result: SearchResult,
    choice: Choice,
    steps: tuple[CompiledStep, ...],
) -> str:
    """The first screen of a report: what was made, how fast it is, how sure that is."""
    target, candidate = options.target, choice.candidate
    us = choice.stored.measured.median_us if choice.stored else candidate.cost_us
    said = f"{us:.2f} us {'measured' if choice.stored else 'predicted'}" if us else "not predicted"
    others = f"Inductor {baseline(graph, target).us:.2f} us, eager {eager(graph, target).us:.2f} us"
    moved, flops = traffic(graph), work(graph)
    rows = {
        "kernels": f"{len(steps)}: {', '.join(s.name for s in steps)}",
        "time": f"{said}; by a roofline {others}",
        "memory": f"{moved / 1e6:.3f} MB at least"
                  f"{_rate(moved / 1e3, us, target.bandwidth / 1e9)} GB/s",
        "products": _products_line(graph, flops, us, target.tensor_flops) if flops else "none",
        "equal": certainty_text(choice.verification),
        "search": _search_line(options, result, choice),
        "left out": f"{result.statistics.pruned.total()} programs; "
                    f"{len(choice.refused)} better one(s) could not be run",
    }  # fmt: skip
    sizes = ", ".join(f"{name} = {hint}" for name, hint in _hints(graph).items())
    head = f"optimized for {target.name} ({target.arch})" + (f", for {sizes}" if sizes else "")
    return "\n".join([head, *(f"  {name:<10}{text}" for name, text in rows.items())])


def _products_line(graph: KernelGraph, flops: float, us: float, most: float) -> str:
    """Operations of the tensor cores, and their rate if no mask leaves any of them out."""
    if any(n.facets.masks for n in graph.nodes):
        return f"{flops / 1e9:.3f} GFLOP with those that masks hide"
    return f"{flops / 1e9:.3f} GFLOP{_rate(flops / 1e6, us, most / 1e12)} TFLOP/s"


def _hints(graph: KernelGraph) -> dict[str, int]:
    """The numbers that symbolic extents are optimized for, by name."""
    extents = (d for i in graph.inputs for d in graph.nodes[i].shape)
    return {d.name: d.hint for d in extents if isinstance(d, Symbol)}


def _rate(amount: float, us: float, most: float) -> str:
    """``, 3,497 of 4,350``: an amount in a time beside what the GPU reaches."""
    return f", {amount / us:,.0f} of {most:,.0f}" if us else f", at most {most:,.0f}"


def certainty_text(v: Verification) -> str:
    """The certainty that a program is the same function, on a line."""
    bound = "no bound of the error"
    if v.bound_log2 is not None:
        bound = f"wrong with less than 2^{ceil(v.bound_log2)}"
    return f"verified in {v.trials} trials over finite fields, {bound}"


def _search_line(options: Options, result: SearchResult, choice: Choice) -> str:
    if choice.stored:
        return "none, a tuned program"
    s = result.statistics
    earlier = "" if result.kept is None else "kept on disk: "
    found = f"{earlier}{s.seconds:.2f} s, {s.programs} programs, {s.verified} verified"
    cut = cut_text(options, result)
    return f"{found}; {cut}" if cut else found


def cut_text(options: Options, result: SearchResult) -> str:
    """The reason why a search ended before it was complete; empty if it was."""
    if result.statistics.complete:
        return ""
    if result.statistics.interrupted:
        return "cut short by Ctrl-C: there may be a faster program"
    if options.budget_s is None:
        return "cut short, a part of it took too long: there may be a faster program"
    return f"cut short by the budget of {options.budget_s:g} s: there may be a faster program"


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


def search_text(options: Options, result: SearchResult) -> str:
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
    lines += ["kept on disk from an earlier search"] * (result.kept is not None)
    lines += filter(None, [cut_text(options, result)])
    lines += [f"left out: {count} x {reason}" for reason, count in s.pruned.most_common() if count]
    return "\n".join(lines)


def cost_text(candidate: Candidate) -> str:
    """Predicted time by cause, microseconds."""
    parts = ", ".join(f"{k} {v:.2f}" for k, v in candidate.breakdown.items() if v >= 0.005)
    return f"predicted {candidate.cost_us:.2f} us" + (f" ({parts})" if parts else "")


def alternatives_text(result: SearchResult, choice: Choice) -> str:
    """The next best candidates, and better ones that could not be run."""
    refused = Counter(choice.refused)
    lines = [f"refused: {n} x {why}" if n > 1 else f"refused: {why}" for why, n in refused.items()]
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
