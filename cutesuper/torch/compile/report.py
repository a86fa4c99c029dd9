"""The readable report of `cutesuper.explain`: the backend's decisions about a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Literal

from torch import fx

from cutesuper.ir.graph_text import aligned
from cutesuper.torch.compile.case import Seconds
from cutesuper.torch.compile.options import BackendOptions
from cutesuper.torch.compile.region import places
from cutesuper.torch.compile.selection import Decision, Verdict
from cutesuper.torch.compile.whole import Whole

Phase = Literal["inference", "forward", "backward"]

#: the place of nodes for which PyTorch gives no source
UNKNOWN = "?"
#: most places that are listed for a reason
_PLACES = 4


@dataclass(frozen=True)
class RegionReport:
    """A region and the decision about it.

    Attributes:
        where: lines of the user's program, like ``model.py:12-14``.
        operators: the number of its nodes in the graph.
        verdict: the decision.
        seconds: that deciding took; none for one that was decided before.
    """

    where: str
    operators: int
    verdict: Verdict
    seconds: Seconds = field(default_factory=Seconds)


@dataclass(frozen=True)
class OutsideReport:
    """Nodes that are in no region, for one reason.

    Attributes:
        reason: why.
        where: lines of the user's program.
        operators: the number of nodes.
    """

    reason: str
    where: tuple[str, ...]
    operators: int


@dataclass(frozen=True)
class GraphReport:
    """A graph that Inductor was given.

    Attributes:
        phase: inference, forward or backward.
        regions: in order.
        outside: nodes that are in no region.
        seconds: from the search for regions to the last decision.
        whole: the times of the whole graph; None if no region is fast alone, or nothing is timed.
    """

    phase: Phase
    regions: tuple[RegionReport, ...]
    outside: tuple[OutsideReport, ...]
    seconds: float = 0.0
    whole: Whole | None = None

    @property
    def taken(self) -> int:
        """Regions that get kernels."""
        return sum(r.verdict.taken for r in self.regions)


@dataclass(frozen=True)
class Report:
    """The backend's decisions about a model; prints as a table.

    Attributes:
        options: of the backend.
        graphs: forward and backward, for every graph that PyTorch found.
    """

    options: BackendOptions
    graphs: tuple[GraphReport, ...]

    @property
    def taken(self) -> int:
        """Regions that get kernels."""
        return sum(g.taken for g in self.graphs)

    def __str__(self) -> str:
        count = sum(len(g.regions) for g in self.graphs)
        head = f"take={self.options.take!r}: {self.taken} of {count} region(s) taken"
        if not self.graphs:
            return f"{head}; PyTorch found nothing to compile"
        return "\n\n".join([head, *(_graph_text(n, g) for n, g in enumerate(self.graphs))])


def graph_report(
    phase: Phase, decisions: Sequence[Decision], refused: Mapping[fx.Node, str]
) -> GraphReport:
    """The report of the decisions about a graph; its nodes still have their metadata."""
    regions = tuple(
        RegionReport(d.region.place or UNKNOWN, len(d.region.nodes), d.verdict, d.seconds)
        for d in decisions
    )
    groups: dict[str, list[fx.Node]] = {}
    for node, reason in refused.items():
        groups.setdefault(reason, []).append(node)
    outside = tuple(
        OutsideReport(reason, tuple(dict.fromkeys(map(_place, nodes))), len(nodes))
        for reason, nodes in groups.items()
    )
    return GraphReport(phase, regions, outside)


def nothing_taken(phase: Phase, graph: fx.Graph, reason: str) -> GraphReport:
    """The report of a graph in which no regions were looked for."""
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    return graph_report(phase, (), dict.fromkeys(nodes, reason))


def _place(node: fx.Node) -> str:
    return places([node]) or UNKNOWN


# --------------------------------------------------------------------------------------------- text


def _graph_text(number: int, graph: GraphReport) -> str:
    head = f"graph {number} ({graph.phase}): {graph.taken} of {len(graph.regions)} region(s) taken"
    head += f", decided in {graph.seconds:.1f} s"
    rows = [_HEAD]
    rows += [_row(r) for r in graph.regions]
    lines = [head, *_whole_text(graph.whole), *(aligned(rows) if graph.regions else [])]
    lines += [f"  {r.where} {k}" for r in graph.regions if r.verdict.taken
              for k in r.verdict.kernels]  # fmt: skip
    for o in graph.outside:
        more = f" and {len(o.where) - _PLACES} more" if len(o.where) > _PLACES else ""
        places = ", ".join(o.where[:_PLACES])
        lines.append(f"  outside, {o.operators} x {o.reason} ({places}{more})")
    return "\n".join(lines)


def _whole_text(whole: Whole | None) -> list[str]:
    if whole is None:
        return []
    if whole.ours_us is None:
        return [f"  whole graph: not timed ({whole.reason})"]
    times = f"  whole graph: {whole.ours_us:.1f} us with all that are fast alone"
    if whole.given_back:
        times += f", {whole.kept_us:.1f} us with {whole.given_back} of them given back"
    return [f"{times}, {whole.inductor_us:.1f} us of Inductor's code"]


_HEAD = (
    "region", "operators", "kernels", "us, model", "us, measured",
    "s: search", "compile", "trial", "",
)  # fmt: skip


def _row(region: RegionReport) -> tuple[str, ...]:
    v = region.verdict
    return (
        region.where,
        str(region.operators),
        str(len(v.kernels) or "-"),
        _pair(v.predicted_us, v.baseline_us),
        _pair(v.measured_us, v.inductor_us),
        *(f"{s:.1f}" for s in astuple(region.seconds)),
        ("taken: " if v.taken else "not taken: ") + v.reason,
    )


def _pair(ours: float | None, theirs: float | None) -> str:
    if ours is None or theirs is None:
        return "-"
    return f"{ours:.1f} vs. {theirs:.1f}"
