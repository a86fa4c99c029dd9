"""MuGraphs of softmax and attention with maxima, and of loops that are walked several times."""

from __future__ import annotations

from collections.abc import Callable

from cutesuper.ir.block import MuGraph
from cutesuper.ir.dims import Dim
from cutesuper.ir.graph import KernelGraph, new_kernel_graph
from tests.mugraphs import Block, mugraph

Case = Callable[[], tuple[KernelGraph, MuGraph]]
SCALE = 0.125


def safe_attention(
    heads: int = 2, m: int = 4, n: int = 48, d: int = 8, scale: float | None = None
) -> KernelGraph:
    """softmax(Q K) V, or softmax(scale * Q K) V."""
    g = new_kernel_graph()
    q, k, v = (
        g.new_input(s, name=c)
        for s, c in (((heads, m, d), "Q"), ((heads, d, n), "K"), ((heads, n, d), "V"))
    )
    scores = g.matmul(q, k) if scale is None else g.mul(g.matmul(q, k), scale)
    g.mark_output(g.matmul(g.softmax(scores), v))
    return g


def attention_block(g: KernelGraph, **split: int) -> Block:
    """Two heads for each block; ``split`` says how the keys N are divided: ``loop=3``."""
    (h, m, d), n = g.nodes[0].shape, g.nodes[1].shape[2]
    assert isinstance(h, int) and isinstance(m, int) and isinstance(d, int) and isinstance(n, int)
    axes: dict[str, int | None] = {"H.grid": h // 2}
    axes |= {f"N.{kind}": extent for kind, extent in split.items()}
    tile = n
    for extent in split.values():
        tile = -(-tile // extent)
    dims: dict[str, Dim] = {"H": h, "M": m, "D": d, "N": n, "E": d}
    return Block(dims, axes, {"H": 2, "M": m, "D": d, "N": tile, "E": d})


def scores(b: Block, scale: float | None = None) -> int:
    s = b.op("matmul", b.load("Q", "H", "M", "D"), b.load("K", "H", "D", "N"), over="D")
    return s if scale is None else b.op("mul", s, b.const(scale))


def weighted(b: Block, e: int) -> tuple[int, int]:
    """Numerator and denominator of one tile of keys."""
    return b.op("matmul", e, b.load("V", "H", "N", "E"), over="N"), b.op("sum", e, over="N")


def online_attention(
    g: KernelGraph, scale: float | None = None, common: bool = False, **split: int
) -> MuGraph:
    """A running maximum over all axes of the keys, in one walk; the last block joins the grid.

    ``common``: one maximum for all rows of the tile.
    """
    b = attention_block(g, **split)
    s = scores(b, scale)
    part = b.op("max", s, over="N")
    part = b.op("max", part, over="M") if common else part
    num, den = weighted(b, b.op("exp", b.op("sub", s, part)))
    _, num, den = b.online("N", part, num, den, grid=True)
    b.store("Z", b.op("div", num, den), "H", "M", "E")
    return mugraph(g, b.step())


def split_attention(
    g: KernelGraph, scale: float | None = None, normalised: bool = False, **split: int
) -> MuGraph:
    """Keys over a grid axis as well (``grid=2``): a second kernel merges what blocks leave.

    ``normalised``: blocks divide by their denominator, and the merge multiplies by it again.
    """
    b = attention_block(g, **split)
    s = scores(b, scale)
    part = b.op("max", s, over="N")
    num, den = weighted(b, b.op("exp", b.op("sub", s, part)))
    part, num, den = b.online("N", part, num, den)
    b.store("A", b.op("div", num, den) if normalised else num, "N.grid", "H", "M", "E")
    b.store("L", den, "N.grid", "H", "M")
    b.store("T", part, "N.grid", "H", "M")
    c, parts = merge_block(g, split["grid"])
    num, den = c.load("A", "S", "H", "M", "E"), c.load("L", "S", "H", "M")
    part = c.load("T", "S", "H", "M")
    weight = c.op("exp", c.op("sub", part, c.op("max", part, over="S")))
    den = c.op("mul", den, weight)
    num = c.op("mul", num, den if normalised else weight)
    c.store("Z", c.op("div", c.op("sum", num, over="S"), c.op("sum", den, over="S")), *"HME")
    return mugraph(g, b.step("parts"), c.step("merge"), **parts)


def merge_block(g: KernelGraph, grid: int) -> tuple[Block, dict[str, tuple[int, ...]]]:
    """The second kernel of `split_attention`, and the shapes of what it reads."""
    h, m, d = g.nodes[0].shape
    assert isinstance(h, int) and isinstance(m, int) and isinstance(d, int)
    tile = {"S": grid, "H": 1, "M": m, "E": d}
    shapes = {"A": (grid, h, m, d), "L": (grid, h, m), "T": (grid, h, m)}
    return Block({**tile, "H": h}, {"H.grid": h}, tile), shapes


def two_walk_attention(g: KernelGraph, scale: float | None = None, **split: int) -> MuGraph:
    """The maximum in the first walk over the keys, plain sums in the second."""
    b = attention_block(g, **split)
    s = scores(b, scale)
    top = b.close(b.op("max", s, over="N"), "N", "max")
    num, den = weighted(b, b.op("exp", b.op("sub", s, top)))
    b.store("Z", b.op("div", b.close(num, "N"), b.close(den, "N")), "H", "M", "E")
    return mugraph(g, b.step())


def row_block(g: KernelGraph, **split: int) -> Block:
    """Two rows for each block; ``split`` says how the columns N are divided."""
    m, n = g.nodes[0].shape
    assert isinstance(m, int) and isinstance(n, int)
    axes: dict[str, int | None] = {"M.grid": m // 2}
    axes |= {f"N.{kind}": extent for kind, extent in split.items()}
    tile = n
    for extent in split.values():
        tile = -(-tile // extent)
    return Block({"M": m, "N": n}, axes, {"M": 2, "N": tile})


def online_softmax(g: KernelGraph, **split: int) -> MuGraph:
    """Maximum and denominator in the first walk, results in the second."""
    b = row_block(g, **split)
    x = b.load("X", "M", "N")
    part = b.op("max", x, over="N")
    total = b.op("sum", b.op("exp", b.op("sub", x, part)), over="N")
    top, total = b.online("N", part, total)
    b.store("Z", b.op("div", b.op("exp", b.op("sub", x, top)), total), "M", "N")
    return mugraph(g, b.step())


def three_walk_softmax(g: KernelGraph, **split: int) -> MuGraph:
    """Maximum, denominator and results in a walk each."""
    b = row_block(g, **split)
    x = b.load("X", "M", "N")
    e = b.op("exp", b.op("sub", x, b.close(b.op("max", x, over="N"), "N", "max")))
    b.store("Z", b.op("div", e, b.close(b.op("sum", e, over="N"), "N")), "M", "N")
    return mugraph(g, b.step())


def split_softmax(g: KernelGraph, grid: int, loop: int) -> MuGraph:
    """Statistics of parts of the rows in one kernel, results in another."""
    b = row_block(g, grid=grid, loop=loop)
    m, n = g.nodes[0].shape
    assert isinstance(m, int) and isinstance(n, int)
    x = b.load("X", "M", "N")
    part = b.op("max", x, over="N")
    total = b.op("sum", b.op("exp", b.op("sub", x, part)), over="N")
    part, total = b.online("N", part, total)
    b.store("L", total, "N.grid", "M")
    b.store("T", part, "N.grid", "M")
    c = Block(
        {"S": grid, "M": m, "N": n}, {"M.grid": m, "N.grid": 2}, {"S": grid, "M": 1, "N": n // 2}
    )
    part = c.load("T", "S", "M")
    top = c.op("max", part, over="S")
    weight = c.op("exp", c.op("sub", part, top))
    total = c.op("sum", c.op("mul", c.load("L", "S", "M"), weight), over="S")
    e = c.op("exp", c.op("sub", c.load("X", "M", "N"), top))
    c.store("Z", c.op("div", e, total), "M", "N")
    return mugraph(g, b.step("parts"), c.step("rows"), L=(grid, m), T=(grid, m))


def layer_norm_linear(m: int = 8, k: int = 48, n: int = 32) -> KernelGraph:
    """(X - mean) / sqrt(variance + eps) @ W."""
    g = new_kernel_graph()
    x, w = g.new_input((m, k), name="X"), g.new_input((k, n), name="W")
    centred = g.sub(x, g.mean(x, -1))
    deviation = g.sqrt(g.add(g.mean(g.square(centred), -1), 1e-6))
    g.mark_output(g.matmul(g.div(centred, deviation), w))
    return g


def walked_block(g: KernelGraph, **split: int) -> Block:
    """All rows, two tiles of columns; ``split`` says how the contracted label K is divided."""
    (m, k), n = g.nodes[0].shape, g.nodes[g.outputs[0]].shape[1]
    assert isinstance(m, int) and isinstance(k, int) and isinstance(n, int)
    axes: dict[str, int | None] = {"N.grid": 2}
    axes |= {f"K.{kind}": extent for kind, extent in split.items()}
    tile = k
    for extent in split.values():
        tile = -(-tile // extent)
    return Block({"M": m, "K": k, "N": n}, axes, {"M": m, "K": tile, "N": -(-n // 2)})


def three_walk_layer_norm(g: KernelGraph, **split: int) -> MuGraph:
    """Mean, variance and product in a walk each."""
    b = walked_block(g, **split)
    x = b.load("X", "M", "K")
    centred = b.op("sub", x, b.close(b.op("mean", x, over="K"), "K"))
    variance = b.close(b.op("mean", b.op("square", centred), over="K"), "K")
    deviation = b.op("sqrt", b.op("add", variance, b.const(1e-6)))
    product = b.op("matmul", b.op("div", centred, deviation), b.load("W", "K", "N"), over="K")
    b.store("Z", b.close(product, "K"), "M", "N")
    return mugraph(g, b.step())


def two_walk_rms_linear(g: KernelGraph, **split: int) -> MuGraph:
    """The norm in the first walk, the product of what is normalised in the second."""
    b = walked_block(g, **split)
    x = b.load("X", "M", "K")
    mean = b.close(b.op("mean", b.op("square", x), over="K"), "K")
    y = b.op("div", x, b.op("sqrt", b.op("add", mean, b.const(1e-6))))
    b.store("Z", b.close(b.op("matmul", y, b.load("W", "K", "N"), over="K"), "K"), "M", "N")
    return mugraph(g, b.step())


def rms_rows(m: int = 8, n: int = 48) -> KernelGraph:
    g = new_kernel_graph()
    g.mark_output(g.rms_norm(g.new_input((m, n), name="X")))
    return g


def two_walk_rms_rows(g: KernelGraph, **split: int) -> MuGraph:
    """Rows that do not fit into a block: squares in the first walk, results in the second."""
    b = row_block(g, **split)
    x = b.load("X", "M", "N")
    mean = b.close(b.op("mean", b.op("square", x), over="N"), "N")
    b.store("Z", b.op("div", x, b.op("sqrt", b.op("add", mean, b.const(1e-6)))), "M", "N")
    return mugraph(g, b.step())


# -------------------------------------------------------------------------- wrong in one walk


def streamed(numerator: str, denominator: str, scale: float | None = None) -> Case:
    """One walk, both sums rescaled by the running maximum of the scores. What is summed: ``e`` is
    ``exp(s - part)``, ``s`` is ``exp(s)``, ``o`` has the maximum over other rows as well, ``c`` the
    maximum over all rows for each column, ``u`` unscaled scores, ``-`` is ``exp(part - s)``."""

    def broken() -> tuple[KernelGraph, MuGraph]:
        g = safe_attention(scale=scale)
        b = attention_block(g, loop=3)
        raw = scores(b)
        s = raw if scale is None else b.op("mul", raw, b.const(scale))
        part = b.op("max", s, over="N")
        known = {
            "e": b.op("sub", s, part),
            "s": s,
            "o": b.op("sub", s, b.op("max", part, over="M")),
            "c": b.op("sub", s, b.op("max", s, over="M")),
            "u": b.op("sub", raw, part),
            "-": b.op("sub", part, s),
        }
        num = weighted(b, b.op("exp", known[numerator]))[0]
        den = weighted(b, b.op("exp", known[denominator]))[1]
        _, num, den = b.online("N", part, num, den)
        b.store("Z", b.op("div", num, den), "H", "M", "E")
        return g, mugraph(g, b.step())

    return broken


def other_part() -> tuple[KernelGraph, MuGraph]:
    """Rescaled by a running maximum of the values in place of the scores."""
    g = safe_attention()
    b = attention_block(g, loop=3)
    s = scores(b)
    num, den = weighted(b, b.op("exp", b.op("sub", s, b.op("max", s, over="N"))))
    part = b.op("max", b.op("max", b.load("V", "H", "N", "E"), over="E"), over="N")
    _, num, den = b.online("N", part, num, den)
    b.store("Z", b.op("div", num, den), "H", "M", "E")
    return g, mugraph(g, b.step())


def two_maxima() -> tuple[KernelGraph, MuGraph]:
    """The numerator has the maximum of its row, the denominator that of all rows."""
    g = safe_attention()
    b = attention_block(g, loop=3)
    s = scores(b)
    row = b.op("max", s, over="N")
    parts = (row, b.op("max", row, over="M"))
    sums = [
        b.online("N", part, weighted(b, b.op("exp", b.op("sub", s, part)))[which])[1]
        for which, part in enumerate(parts)
    ]
    b.store("Z", b.op("div", *sums), "H", "M", "E")
    return g, mugraph(g, b.step())


def column_maximum() -> tuple[KernelGraph, MuGraph]:
    """Each key has its own maximum, over the queries."""
    g = safe_attention()
    b = attention_block(g, loop=3)
    s = scores(b)
    num, den = weighted(b, b.op("exp", b.op("sub", s, b.op("max", s, over="M"))))
    b.store("Z", b.op("div", b.close(num, "N"), b.close(den, "N")), "H", "M", "E")
    return g, mugraph(g, b.step())


def rescaled_in_the_second_walk() -> tuple[KernelGraph, MuGraph]:
    """A wrong kernel: a value that is relative to the whole maximum is rescaled once more."""
    g = safe_attention()
    b = attention_block(g, loop=3)
    s = scores(b)
    part = b.op("max", s, over="N")
    top = b.acc(part, "N.loop", "max")
    num, den = weighted(b, b.op("exp", b.op("sub", s, top)))
    num, den = b.rescaled(num, part, top), b.rescaled(den, part, top)
    b.store("Z", b.op("div", num, den), "H", "M", "E")
    return g, mugraph(g, b.step())
