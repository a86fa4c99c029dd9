"""The readable report of `cutesuper.explain`: the backend's decisions about a model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Literal

from torch import fx

from cutesuper.ir.graph_text import aligned
from cutesuper.report import WIDTH, narrow
from cutesuper.torch.compile.case import Seconds
from cutesuper.torch.compile.options import BackendOptions
from cutesuper.torch.compile.region import names_read, places
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
        reads: the user's names of the tensors that are x0, x1 and so on of its kernels.
    """

    where: str
    operators: int
    verdict: Verdict
    seconds: Seconds = field(default_factory=Seconds)
    reads: tuple[str, ...] = ()


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
        passing: whether another process may decide otherwise.
    """

    phase: Phase
    regions: tuple[RegionReport, ...]
    outside: tuple[OutsideReport, ...]
    seconds: float = 0.0
    whole: Whole | None = None
    passing: bool = False

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
        first = "\n".join([head, *_summary(self.graphs)])
        return narrow("\n\n".join([first, *(_graph_text(n, g) for n, g in enumerate(self.graphs))]))


def graph_report(
    phase: Phase,
    decisions: Sequence[Decision],
    refused: Mapping[fx.Node, str],
    name: Callable[[fx.Node], str] = str,
) -> GraphReport:
    """The report of the decisions about a graph; its nodes still have their metadata.
    ``name`` is the user's, of an argument of the graph."""
    regions = tuple(
        RegionReport(
            d.region.place or UNKNOWN,
            len(d.region.nodes),
            d.verdict,
            d.seconds,
            tuple(names_read(d.region, name)),
        )
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
    groups = list(_groups(graph.regions))
    rows = [_row(g) for g in groups if g.one.verdict.predicted_us is not None]
    lines = [head, *_whole_text(graph.whole), *(_table([_HEAD, *rows]) if rows else [])]
    lines += _reasons([r for g in groups if not g.is_told for r in g.regions])
    lines += [line for g in groups if g.one.verdict.taken for line in _kernel_lines(g)]
    lines += [f"  outside, {o.operators} x {o.reason} ({_some(o.where)})" for o in graph.outside]
    return "\n".join(lines)


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    """Aligned rows, none of which is wider than a report.
    Places that do not fit are cut: the lines below the table have them in full."""
    most = WIDTH - len(max(aligned([("", *row[1:]) for row in rows]), key=len))
    cut = [
        (where if len(where) <= most else where[: most - 3] + "...", *rest) for where, *rest in rows
    ]
    return aligned(cut)


def _some(where: Sequence[str]) -> str:
    more = f" and {len(where) - _PLACES} more" if len(where) > _PLACES else ""
    return ", ".join(where[:_PLACES]) + more


def _reasons(regions: Sequence[RegionReport]) -> list[str]:
    """Why regions are taken and others are not, equal reasons counted."""
    groups: dict[str, list[str]] = {}
    for r in regions:
        what = ("taken: " if r.verdict.taken else "not taken: ") + r.verdict.reason
        groups.setdefault(what, []).append(r.where)
    counts = {what: f"{len(where)} x " * (len(where) > 1) for what, where in groups.items()}
    return [
        f"  {counts[what]}{what} ({_some(tuple(dict.fromkeys(where)))})"
        for what, where in groups.items()
    ]


def _summary(graphs: Sequence[GraphReport]) -> list[str]:
    """The totals of a model: regions taken, the longest ones, the most useful next kernel."""
    regions = [r for g in graphs for r in g.regions]
    groups = [g for graph in graphs for g in _groups(graph.regions)]
    timed = sorted((g for g in groups if g.times), key=lambda g: -g.times[1])
    taken = [g.times for g in timed if g.one.verdict.taken]
    left = [g for g in timed if not g.one.verdict.taken]
    rest = sum(r.verdict.predicted_us is None and not r.verdict.taken for r in regions)
    outside = sum(o.operators for g in graphs for o in g.outside)
    seconds = sum(g.seconds for g in graphs)
    lines = [f"  decided in {seconds:.1f} s; {outside} operator(s) are in no region"]
    if taken:
        ours, theirs = map(sum, zip(*taken, strict=True))
        lines.append(f"  taken: {ours:.1f} us, Inductor's code {theirs:.1f} us")
    if left:
        lines.append(f"  left to Inductor: {sum(g.times[1] for g in left):.1f} us")
    if rest:
        lines.append(f"  without a price: {rest} region(s), for the reasons below")
    lines += [f"  takes long: {g.where}, {g.times[1]:.1f} us of Inductor's" for g in timed[:3]]
    lines += [f"  would help: kernels for {g.where}, {g.one.verdict.reason}" for g in left[:1]]
    return lines


@dataclass(frozen=True)
class _Group:
    """Regions of a graph that are alike, such as those of equal layers."""

    regions: tuple[RegionReport, ...]

    @property
    def one(self) -> RegionReport:
        """The first of them."""
        return self.regions[0]

    @property
    def where(self) -> str:
        """``model.py:12-14 x 16``."""
        count = len(self.regions)
        return self.one.where + (f" x {count}" if count > 1 else "")

    @property
    def times(self) -> tuple[float, ...]:
        """Microseconds of all kernels and of Inductor's: measured, else by the model.
        Empty if neither is known."""
        v, count = self.one.verdict, len(self.regions)
        for ours, theirs in ((v.measured_us, v.inductor_us), (v.predicted_us, v.baseline_us)):
            if ours is not None and theirs is not None:
                return count * ours, count * theirs
        return ()

    @property
    def is_told(self) -> bool:
        """True if its row of the table says why the regions are taken: they are faster."""
        return self.one.verdict.taken and bool(self.times)

    @property
    def seconds(self) -> list[float]:
        """Seconds of the search, of compiling and of trials of all."""
        return [sum(s) for s in zip(*(astuple(r.seconds) for r in self.regions), strict=True)]

    @property
    def reads(self) -> list[str]:
        """Names of the tensors that all read: ``layers.*.weight``."""
        return [_common(names) for names in zip(*(r.reads for r in self.regions), strict=False)]


def _groups(regions: Sequence[RegionReport]) -> Iterator[_Group]:
    """Regions of the same lines with the same verdict, in order of the first ones."""
    found: dict[tuple[str, int, Verdict], list[RegionReport]] = {}
    for r in regions:
        found.setdefault((r.where, r.operators, r.verdict), []).append(r)
    yield from (_Group(tuple(some)) for some in found.values())


def _common(names: Sequence[str]) -> str:
    """One name for several; before: ``h.0.weight``, ``h.1.weight``; after: ``h.*.weight``."""
    parts = [name.split(".") for name in names]
    if any(" " in name for name in names) or len({len(p) for p in parts}) > 1:
        return " or ".join(dict.fromkeys(names))
    return ".".join(p[0] if len(set(p)) == 1 else "*" for p in zip(*parts, strict=True))


def _kernel_lines(group: _Group) -> Iterator[str]:
    """The kernels of equal regions, with the user's names of their tensors."""
    reads = group.reads
    names = {f"x{i}": name for i, name in enumerate(reads) if " " not in name}
    kernels = group.one.verdict.kernels
    for kernel in kernels:
        text = re.sub(r"\bx\d+\b", lambda found: names.get(found[0], found[0]), kernel)
        yield f"  {group.where} {text}"
    others = [f"x{i} is {n}" for i, n in enumerate(reads) if f"x{i}" not in names]
    if kernels and others:
        yield f"    {', '.join(others)}"


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


def _row(group: _Group) -> tuple[str, ...]:
    """A row of the table; times are those of one region, and the seconds those of all."""
    v = group.one.verdict
    return (
        group.where,
        str(group.one.operators),
        str(len(v.kernels) or "-"),
        _pair(v.predicted_us, v.baseline_us),
        _pair(v.measured_us, v.inductor_us),
        *(f"{s:.1f}" for s in group.seconds),
        "taken" if v.taken else "left",
    )


def _pair(ours: float | None, theirs: float | None) -> str:
    if ours is None or theirs is None:
        return "-"
    return f"{ours:.1f} vs. {theirs:.1f}"
