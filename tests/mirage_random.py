"""Random muGraphs in Mirage's JSON: any maps, any order of operators, one or two block graphs."""

from __future__ import annotations

from itertools import permutations
from typing import Any

from hypothesis import strategies as st

from tests.mirage_json import Block, Graph, Json, shape

ACCUMULATORS = ("nored", "red_ld_sum", "red_ld_mean", "red_ld_rms", "redtox_ld_sum", "max")
UNARY = ("square", "sqrt", "rms_norm", "reduction_0", "reduction_1", "reduction_1_to_dimx")
BINARY = ("add", "mul", "div", "matmul")
DIMX = 2


@st.composite
def graphs(draw: st.DrawFn) -> list[Json]:
    """A muGraph of two or three inputs; every extent of a tensor divides 24."""
    g = Graph()
    extents = st.sampled_from((2, 4, 6, 8, 12))
    tensors = [g.input(draw(extents), draw(extents)) for _ in range(draw(st.integers(2, 3)))]
    for _ in range(draw(st.integers(1, 2))):
        tensors += _block(draw, g, tensors[-3:])
    return g.output(tensors[-1])


def _block(draw: st.DrawFn, g: Graph, tensors: list[Json]) -> list[Json]:
    grid = draw(st.sampled_from(((1, 1), (2, 1), (2, 2), (3, 1), (2, 3))))
    b = g.block(*grid, loop=draw(st.sampled_from((1, 1, 2, 3))), dimx=DIMX)
    #: tiles, and the grid axes on which they depend
    tiles = [_load(draw, b, t) for t in tensors]
    tiles = _compute(draw, tiles, b, draw(st.integers(0, 4)))
    after = [(b.acc(t, draw(st.sampled_from(_accumulators(t)))), v) for t, v in tiles[-2:]]
    after = _compute(draw, after, b, draw(st.integers(0, 2)))
    chosen = [after[-1], *after[:-1]][: draw(st.integers(1, 2))]
    for tile, varies in chosen:
        b.store(tile, **_places(draw, varies))
    return b.done()


def _load(draw: st.DrawFn, b: Block, t: Json) -> tuple[Json, frozenset[str]]:
    """Any legal map of grid and loop to dimensions."""
    parts, where, varies = [1, 1], {}, set[str]()
    for axis, n in zip("xyz", b.grid, strict=True):
        dim = draw(st.sampled_from((-1, 0, 1)))
        if n > 1 and dim >= 0 and parts[dim] == 1 and shape(t)[dim] % n == 0:
            where[axis], parts[dim] = dim, n
            varies.add(axis)
    loop = draw(st.sampled_from((-1, 0, 1)))
    if loop >= 0 and shape(t)[loop] % (parts[loop] * b.loop):
        loop = -1
    return b.load(t, **where, loop=loop), frozenset(varies)


def _compute(
    draw: st.DrawFn, tiles: list[tuple[Json, frozenset[str]]], b: Block, count: int
) -> list[tuple[Json, frozenset[str]]]:
    tiles = list(tiles)
    for _ in range(count):
        x, varies = draw(st.sampled_from(tiles))
        y, other = draw(st.sampled_from(tiles))
        fitting = [n for n in UNARY if "dimx" not in n or shape(x)[1] % DIMX == 0]
        fitting += [n for n in BINARY if _fits(n, shape(x), shape(y))]
        name = draw(st.sampled_from(fitting))
        args = (x, y) if name in BINARY else (x,)
        tiles.append((b.op(name, *args), varies | other if name in BINARY else varies))
    return tiles


def _fits(name: str, a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    if name == "matmul":
        return a[1] == b[0]
    return all(m == n or 1 in (m, n) for m, n in zip(a, b, strict=True))


def _accumulators(tile: Json) -> list[str]:
    return [a for a in ACCUMULATORS if "redtox" not in a or shape(tile)[1] % DIMX == 0]


def _places(draw: st.DrawFn, varies: frozenset[str]) -> dict[str, Any]:
    """A dimension for every axis on which the tile depends."""
    places = list(permutations((0, 1), len(varies)))
    return dict(zip(sorted(varies), draw(st.sampled_from(places)), strict=True))
