"""Attention over sequences of different lengths, in pages or not: graphs, and muGraphs that are
right or wrong in one place."""

from __future__ import annotations

from math import prod
from typing import Any

from cutesuper.ir.block import LOAD, MuGraph
from cutesuper.ir.dims import extent
from cutesuper.ir.graph import KernelGraph, new_kernel_graph
from tests.mugraphs import Block, mugraph

SMALL = {"B": 4, "H": 2, "G": 2, "L": 4, "S": 24, "D": 8, "E": 4}
SPLITS: dict[str, dict[str, int | None]] = {
    "one block": {},
    "blocks and loop": {"B.grid": 4, "H.grid": 2, "S.loop": 3},
    "cluster and loop": {"B.grid": 2, "L.grid": 2, "S.cluster": 2, "S.loop": 3},
    "persistent sequences": {"B.persistent": 2, "S.loop": 4},
}


def attention(causal: bool = False, page: int | None = None, **extents: int) -> KernelGraph:
    """softmax(length_mask(Q K^T / 2)) V, G query heads for each of H heads of K and V.

    K and V are ``[B, S, H, 1, d]``; ``page``: ``[pages, page, H, 1, d]``, read through one table.
    """
    n = {**SMALL, **extents}
    g = new_kernel_graph()
    q = g.new_input(tuple(n[d] for d in "BHGLD"), name="Q")
    lead = (n["B"], n["S"]) if page is None else (n["B"] * n["S"] // page + 3, page)
    k, v = (g.new_input((*lead, n["H"], 1, n[d]), name=x) for x, d in (("K", "D"), ("V", "E")))
    if page is not None:
        table = g.new_input((n["B"], n["S"] // page), "int32", name="table")
        k, v = g.gather_pages(k, table), g.gather_pages(v, table)
    lengths = g.new_input((n["B"],), "int32", name="lengths")
    scores = g.mul(g.matmul(q, g.transpose(k, (0, 2, 3, 4, 1))), 0.5)
    hidden = g.length_mask(scores, lengths, causal)
    g.mark_output(g.matmul(g.softmax(hidden), g.transpose(v, (0, 2, 3, 1, 4))))
    return g


def kernel(
    g: KernelGraph,
    axes: dict[str, int | None] | None = None,
    *,
    causal: bool = False,
    online: bool = False,
    masked: frozenset[str] = frozenset(("max", "sum", "product")),
    extra: str | None = None,
    tables: tuple[str | None, str | None] | None = None,
    caches: tuple[str, str] = ("K", "V"),
    batch: str = "B",
) -> MuGraph:
    """Two walks over the keys, or one with rescaled sums; the other flags make it wrong.

    Args:
        g: of `attention`, perhaps with further inputs.
        axes: splits of labels.
        causal: of the mask.
        online: sums are rescaled.
        masked: uses of the scores that see masked ones.
        extra: ``"top_left"``: PyTorch's causal mask on top.
        tables: through which K and V are read; default: what the graph has.
        caches: the tensors that are read for K and V.
        batch: the label of the lengths.
    """
    names = {g.nodes[i].name: g.nodes[i].shape for i in g.inputs}
    paged = "table" in names
    tables = (("table", "table") if paged else (None, None)) if tables is None else tables
    b = Block(*_split(g, axes or {}))
    q = b.load("Q", "B", "H", "G", "L", "D")
    k, v = (
        _load(b, cache, table, "B", "S", "H", None, d)
        for cache, table, d in zip(caches, tables, "DE", strict=True)
    )
    plain = b.op("mul", b.op("matmul", q, k, over="D"), b.const(0.5))
    lengths = b.load("lengths", batch)
    hidden = b.op(
        "length_mask", plain, lengths, rows="L" if causal else None, columns="S", causal=causal
    )
    if extra is not None:
        hidden = b.op("causal_mask", hidden, rows="L", columns="S", alignment=extra)
    uses = {u: hidden if u in masked else plain for u in ("max", "sum", "product")}
    part = b.op("max", uses["max"], over="S")
    top = b.close(part, "S", "max")
    if online:
        exps = [b.op("exp", b.op("sub", uses[u], part)) for u in ("sum", "product")]
        low, high = b.op("sum", exps[0], over="S"), b.op("matmul", exps[1], v, over="S")
        _, low, high = b.online("S", part, low, high)
    else:
        exps = [b.op("exp", b.op("sub", uses[u], top)) for u in ("sum", "product")]
        low = b.close(b.op("sum", exps[0], over="S"), "S")
        high = b.close(b.op("matmul", exps[1], v, over="S"), "S")
    b.store("Z", b.op("div", high, low), "B", "H", "G", "L", "E")
    return mugraph(g, b.step())


def paged_causal(alignment: str) -> KernelGraph:
    """softmax(causal_mask(Q K^T)) V of 6 rows and 24 columns in pages of 4, without lengths."""
    g = new_kernel_graph()
    q = g.new_input((2, 6, 8), name="Q")
    k, v = (g.new_input((15, 4, 8), name=x) for x in "KV")
    table = g.new_input((2, 6), "int32", name="table")
    k, v = g.gather_pages(k, table), g.gather_pages(v, table)
    scores = g.causal_mask(g.matmul(q, g.transpose(k, (0, 2, 1))), alignment)
    g.mark_output(g.matmul(g.softmax(scores), v))
    return g


def paged_causal_kernel(g: KernelGraph, alignment: str, axes: dict[str, int | None]) -> MuGraph:
    """The kernel of `paged_causal`, in two walks."""
    extents: dict[str, Any] = {"B": 2, "M": 6, "S": 24, "D": 8, "E": 8}
    tile = {
        x: -(-n // prod(p or 1 for a, p in axes.items() if a.startswith(f"{x}.")))
        for x, n in extents.items()
    }
    b = Block(extents, axes, tile)
    q = b.load("Q", "B", "M", "D")
    k, v = (_load(b, x, "table", "B", "S", d) for x, d in (("K", "D"), ("V", "E")))
    scores = b.op("matmul", q, k, over="D")
    scores = b.op("causal_mask", scores, rows="M", columns="S", alignment=alignment)
    top = b.close(b.op("max", scores, over="S"), "S", "max")
    e = b.op("exp", b.op("sub", scores, top))
    low, high = b.op("sum", e, over="S"), b.op("matmul", e, v, over="S")
    b.store("Z", b.op("div", b.close(high, "S"), b.close(low, "S")), "B", "M", "E")
    return mugraph(g, b.step())


def stored_weights() -> tuple[KernelGraph, MuGraph]:
    """``A @ (e / sum e)``: one kernel stores the exponentials e of masked scores, another one
    divides and multiplies; there are sequences that see nothing, and tails."""
    m, n, r, batch = 8, 12, 6, 12
    g = new_kernel_graph()
    a, x = g.new_input((batch, r, m), name="A"), g.new_input((batch, m, n), name="X")
    lengths = g.new_input((batch,), "int32", name="lengths")
    y = g.exp(g.length_mask(x, lengths))
    g.mark_output(g.matmul(a, g.div(y, g.sum(y, -1))))
    walks: dict[str, int | None] = {"B.grid": 2, "B.persistent": 2, "B.loop": 3}
    b = Block({"B": batch, "M": m, "N": n}, {**walks, "M.grid": 2}, {"B": 1, "M": 4, "N": n})
    scores = b.op(
        "length_mask",
        b.load("X", "B", "M", "N"),
        b.load("lengths", "B"),
        rows=None,
        columns="N",
        causal=False,
    )
    b.store("e", b.op("exp", scores), "B", "M", "N")
    dims = {"B": batch, "R": r, "M": m, "N": n}
    c = Block(dict(dims), {**walks, "R.grid": 2}, {**dims, "B": 1, "R": 3})
    e = c.load("e", "B", "M", "N")
    weights = c.op("div", e, c.op("sum", e, over="N"))
    c.store("Z", c.op("matmul", c.load("A", "B", "R", "M"), weights, over="M"), "B", "R", "N")
    return g, mugraph(g, b.step("exponentials"), c.step("products"), e=(batch, m, n))


def _load(b: Block, tensor: str, table: str | None, *labels: str | None) -> int:
    pages = {} if table is None else {"table": table}
    return b._add(LOAD, (), {x for x in labels if x}, tensor=tensor, map=labels, **pages)


def _split(g: KernelGraph, axes: dict[str, int | None]) -> tuple[Any, Any, dict[str, int]]:
    out = g.nodes[g.outputs[0]].shape
    [q] = [g.nodes[i].shape for i in g.inputs if g.nodes[i].name == "Q"]
    keys = next(n.shape[-1] for n in g.nodes if n.operator == "length_mask")
    dims = dict(zip("BHGLE", map(extent, out), strict=True)) | {"S": extent(keys)}
    dims |= {"D": extent(q[-1])}
    tile = {
        x: -(-n // prod(p or 1 for a, p in axes.items() if a.startswith(f"{x}.")))
        for x, n in dims.items()
    }
    return dims, axes, tile


__all__ = [
    "SMALL",
    "SPLITS",
    "attention",
    "kernel",
    "paged_causal",
    "paged_causal_kernel",
    "stored_weights",
]
