"""A muGraph as one self-contained HTML page: no network, no fonts, no other files.

First an overview: the kernels, what each reads, writes and fuses, where time is predicted to go.
Then every kernel with a drawing of its block program, in which values can be selected. Facts that
the graph does not contain (costs, verdicts) are arguments.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

from cutesuper.errors import GraphError
from cutesuper.ir.block import MuGraph
from cutesuper.ir.graph import KernelGraph
from cutesuper.ir.outline import show_bytes
from cutesuper.show.page_fusion import definition_title, kernel_title, kernels_of
from cutesuper.show.page_kernel import Priced, bytes_of, kernel_card, launches
from cutesuper.show.page_overview import definition, program
from cutesuper.show.page_parts import Html, count, el, join, meter, micros, scroll, table


@dataclass(frozen=True)
class Facts:
    """Facts on a page besides the muGraph; empty ones are left out.

    Attributes:
        graph: the definition.
        target: the GPU, ``h200 (sm_90a)``.
        costs: one for every kernel.
        verification: a sentence on how the muGraph was verified against the definition.
        bound_log2: log2 of the chance that a wrong program passes.
        notes: text for every kernel, shown unchanged (its plan, its registers).
    """

    graph: KernelGraph | None = None
    target: str = ""
    costs: Sequence[Priced] = ()
    verification: str = ""
    bound_log2: float | None = None
    notes: Sequence[str] = ()


def mugraph_page(mu: MuGraph, facts: Facts = Facts()) -> str:
    """The page as one HTML document.

    Args:
        mu: a muGraph.
        facts: other facts about it.

    Raises:
        GraphError: a program is illegal, or facts do not belong to it: another number of kernels,
            inputs or outputs.
    """
    _check(mu, facts)
    kernels = kernels_of(facts.graph, mu) if facts.graph else {}
    titles = [kernel_title(s.program, facts.graph, kernels, k) for k, s in enumerate(mu.steps)]
    name = definition_title(facts.graph) if facts.graph else " | ".join(titles)
    cards = [
        kernel_card(
            mu, k, titles[k],
            facts.costs[k] if facts.costs else None,
            facts.notes[k] if facts.notes else "",
        )
        for k in range(len(mu.steps))
    ]  # fmt: skip
    body = [
        _head(mu, facts, name),
        _overview(mu, facts, titles, kernels),
        *cards,
        _verification(facts),
    ]
    return _document(name, body)


def _check(mu: MuGraph, facts: Facts) -> None:
    for what, given in (("costs", facts.costs), ("notes", facts.notes)):
        if given and len(given) != len(mu.steps):
            raise GraphError(
                f"mugraph_page: {len(given)} {what} for {count(len(mu.steps), 'kernel')}; give one "
                "for each kernel, in order, or none"
            )
    if facts.graph:
        _check_border(mu, facts.graph)


def _check_border(mu: MuGraph, graph: KernelGraph) -> None:
    own = len(mu.inputs), len(mu.outputs)
    given = len(graph.inputs), len(graph.outputs)
    if own != given:
        raise GraphError(
            f"mugraph_page: the definition has {given[0]} inputs and {given[1]} outputs, the "
            f"muGraph {own[0]} and {own[1]}; give the graph that it computes"
        )


def _document(name: str, body: Sequence[Html]) -> str:
    """The document of head and body; the policy admits the page's own script and nothing else."""
    package = files("cutesuper.show")
    style = (package / "page.css").read_text(encoding="utf-8")
    script = (package / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    head = [
        Html('<meta charset="utf-8">'),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Html('<meta name="color-scheme" content="light dark">'),
        Html('<link rel="icon" href="data:,">'),
        el("title", f"muGraph: {name}"),
        el("style", Html(style)),
    ]
    main = el("main", *body)
    page = el("html", el("head", *head), el("body", main, el("script", Html(script))), lang="en")
    return f"<!DOCTYPE html>\n{page}\n"


def _head(mu: MuGraph, facts: Facts, name: str) -> Html:
    total = sum(bytes_of(mu, n) for s in mu.steps for n in {*s.reads, *s.writes})
    tiles = [(count(len(mu.steps), "kernel"), launches(mu))]
    if facts.costs:
        where = f"predicted on {facts.target}" if facts.target else "predicted"
        tiles.append((micros(sum(c.total for c in facts.costs)), where))
    tiles.append((show_bytes(total), "to and from device memory"))
    if facts.verification:
        bound = facts.bound_log2
        chance = "equal" if bound is None else el("span", "2", el("sup", f"{bound:.0f}"))
        tiles.append((chance, "no bound stated" if bound is None else "bound on a false accept"))
    shown = [el("li", el("b", big), el("span", small)) for big, small in tiles]
    symbols = [f"{s.name} = {s.hint}" for s in mu.symbols().values()]
    note = [el("p", f"Numbers are for {', '.join(symbols)}.", class_="faint")] if symbols else []
    return el(
        "header", el("p", "muGraph", class_="eyebrow"), el("h1", name),
        el("p", f"{', '.join(mu.inputs)} → {', '.join(mu.outputs)}", class_="border"),
        el("ul", *shown, class_="tiles"), *note, class_="top",
    )  # fmt: skip


def _overview(
    mu: MuGraph, facts: Facts, titles: Sequence[str], kernels: dict[int, tuple[int, ...]]
) -> Html:
    details = [
        " · ".join(
            ([micros(facts.costs[k].total)] if facts.costs else [])
            + [count(s.program.blocks(), "block")]
        )
        for k, s in enumerate(mu.steps)
    ]
    sides = [
        el(
            "figure",
            el("figcaption", el("b", "Program"), " — the kernels that run"),
            scroll("the kernels and the tensors between them", program(mu, titles, details)),
        )
    ]
    if facts.graph:
        sides.insert(
            0,
            el(
                "figure",
                el("figcaption", el("b", "Definition"), " — what is to be computed"),
                scroll("the definition", definition(facts.graph, kernels)),
            ),
        )
    shares = _shares(mu, facts, titles) if len(mu.steps) > 1 else []
    return el(
        "section", el("div", *sides, class_="sides"), *shares, class_="card", aria_label="overview"
    )


def _shares(mu: MuGraph, facts: Facts, titles: Sequence[str]) -> list[Html]:
    """A row for every kernel: its work and its part of the time, or of the bytes."""
    rows: list[list[str]] = []
    most = max((c.total for c in facts.costs), default=0.0)
    for k, step in enumerate(mu.steps):
        cells: list[str] = [
            el("td", el("a", step.name, href=f"#kernel-{k}", class_=f"badge kc{k % 6}")),
            titles[k],
            ", ".join(step.reads),
            ", ".join(step.writes),
            el(
                "td",
                show_bytes(sum(bytes_of(mu, n) for n in {*step.reads, *step.writes})),
                class_="num",
            ),
        ]
        if facts.costs:
            total = facts.costs[k].total
            cells.append(el("td", meter("", total, most, micros(total), f"kc{k % 6}")))
        rows.append(cells)
    head = ["Kernel", "Computes", "Reads", "Writes", "Moves"] + ["Predicted"] * bool(facts.costs)
    return [table("kernels", head, rows)]


def _verification(facts: Facts) -> Html:
    if not facts.verification:
        return join([])
    about = (
        "Definition and program were evaluated on the same uniformly random residues modulo large "
        "primes; a program that computes something else passes by chance only."
    )
    return el(
        "section",
        el("h2", "Verified"),
        el("p", facts.verification, class_="sentence"),
        el("p", about, class_="faint"),
        class_="card",
    )
