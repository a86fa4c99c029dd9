"""Simplification rules of `cutesuper.ir.derivation` for the leftovers of derivative formulas.

One function for each operator that has rules: it returns a simpler value, or None. Constants are
moved out of products and sums, where they meet; nodes of the program itself are left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from cutesuper.ir.dims import broadcast, extent
from cutesuper.ir.operators.base import CONSTANT, LARGEST, lookup

if TYPE_CHECKING:
    from cutesuper.ir.derivation import Derivation
    from cutesuper.ir.graph import Tensor

Rule = Callable[["Derivation", list["Tensor"], dict[str, Any]], "Tensor | None"]


def _number(t: Tensor) -> float | None:
    """The value of a constant."""
    return t.node.attributes["value"] if t.node.operator == CONSTANT else None


def _scaled(g: Derivation, t: Tensor) -> tuple[float, Tensor]:
    """before: ``mul(x, -2)``; after: (-2, x)."""
    if t.node.facets.multiplies and t.index not in g.given and not g.is_zeros(t):
        x, c = (g.tensor(i) for i in t.node.inputs)
        value = _number(c)
        if value is not None:
            return value, x
    return 1.0, t


def _folded(operator: str, a: float, b: float) -> float | None:
    """The value of an operator on constants; None if it is not a float32."""
    if lookup(operator).divides and b == 0:
        return None
    value = lookup(operator).reference([a, b], {})
    return value if abs(value) <= LARGEST else None


def _constant(g: Derivation, operator: str, args: list[Tensor]) -> Tensor | None:
    a, b = map(_number, args)
    value = None if a is None or b is None else _folded(operator, a, b)
    return None if value is None else g.apply("constant", value=value)


def _add(g: Derivation, args: list[Tensor], attributes: dict[str, Any]) -> Tensor | None:
    for x, zero in (args, args[::-1]):
        nothing = g.is_zeros(zero) and broadcast(x.shape, zero.shape) == x.shape
        if nothing or _number(zero) == 0:
            return x
    x, y = args
    if x.index == y.index and _number(x) is None:
        return g.mul(x, 2.0)
    if x.node.facets.joins and y.node.facets.joins:
        return _add_parts(g, x, y)
    return _constant(g, "add", args) or _sum(g, x, y, 1.0)


def _sub(g: Derivation, args: list[Tensor], attributes: dict[str, Any]) -> Tensor | None:
    x, y = args
    if _number(y) == 0:
        return x
    if _number(x) == 0:
        return g.mul(y, -1.0)
    return _constant(g, "sub", args) or _sum(g, x, y, -1.0)


def _sum(g: Derivation, x: Tensor, y: Tensor, sign: float) -> Tensor | None:
    """``x + sign y`` where an operand has a constant factor: a sign or a common factor moves out.

    before: ``add(mul(x, -2), mul(y, -2))``, ``sub(x, mul(y, -3))``, ``sub(x, mul(x, 0.3))``;
    after: ``mul(add(x, y), -2)``, ``add(x, mul(y, 3))``, ``mul(x, 0.7)``.
    """
    (c, u), (d, v) = _scaled(g, x), _scaled(g, y)
    if u.index == v.index and c + sign * d != 0:
        return g.mul(u, c + sign * d)
    if 1 not in (c, d) and abs(c) == abs(d):
        inner = g.add(u, v) if c == sign * d else g.sub(u, v)
        return g.mul(inner, c)
    if d < 0:
        positive = g.mul(v, -d)
        return g.sub(x, positive) if sign > 0 else g.add(x, positive)
    if c < 0 and sign > 0:
        return g.sub(y, g.mul(u, -c))
    return None


def _mul(g: Derivation, args: list[Tensor], attributes: dict[str, Any]) -> Tensor | None:
    x, y = args
    if _number(x) is not None and _number(y) is None:
        x, y = y, x
    if _number(y) == 1:
        return x
    known = _constant(g, "mul", [x, y])
    if known is not None:
        return known
    (c, u), (d, v) = _scaled(g, x), _scaled(g, y)
    number = _number(y)
    if number is not None:
        d, v = number, None
    elif c == d == 1:
        return None
    product = _folded("mul", c, d)
    if product is None:
        return None
    if v is not None:
        return g.mul(g.mul(u, v), product)
    if product == 1:
        return u
    return g.once("mul", [u, g.apply("constant", value=product)], {})


def _div(g: Derivation, args: list[Tensor], attributes: dict[str, Any]) -> Tensor | None:
    x, y = args
    if _number(y) == 1:
        return x
    c, u = _scaled(g, x)
    return _constant(g, "div", args) or (None if c == 1 else g.mul(g.div(u, y), c))


def _matmul(g: Derivation, args: list[Tensor], attributes: dict[str, Any]) -> Tensor | None:
    (c, a), (d, b) = (_scaled(g, t) for t in args)
    product = _folded("mul", c, d)
    return None if c == d == 1 or product is None else g.mul(g.matmul(a, b), product)


def _reduce(
    g: Derivation, args: list[Tensor], attributes: dict[str, Any], name: str
) -> Tensor | None:
    [x], dim = args, attributes["dim"]
    if x.shape[dim] == 1:
        return x
    c, u = _scaled(g, x)
    if c != 1:
        return g.mul(g.apply(name, u, dim=dim), c)
    last = dim % len(x.shape) == len(x.shape) - 1
    return _sum_of_products(g, x) if lookup(name).sums and last else None


def _sum_of_products(g: Derivation, x: Tensor) -> Tensor | None:
    """Move a product out of a sum.
    before: ``sum(P * (D @ V^T), -1)``, where the program has ``P @ V``; after: ``sum(D * (P @ V),
    -1)``.

    Both are the diagonal of P V D^T. In attention P has a column for each key, D for each of a
    head's dimensions (arXiv:2205.14135, appendix B.4).
    """
    if not x.node.facets.multiplies:
        return None
    factors = [g.tensor(i) for i in x.node.inputs]
    for p, q in (factors, factors[::-1]):
        if not q.node.facets.contracts or q.index in g.given:
            continue
        d, v = (g.tensor(i) for i in q.node.inputs)
        known = g.known("matmul", [p, g.transpose(v)])
        if known is None or known.index not in g.given:
            continue
        if broadcast(d.shape, known.shape) == d.shape:
            return g.sum(g.mul(d, g.again(known)), -1)
    return None


def _transpose(g: Derivation, args: list[Tensor], attributes: dict[str, Any]) -> Tensor | None:
    [x], rank = args, len(args[0].shape)
    dims = tuple(attributes.get("dims") or (*range(rank - 2), rank - 1, rank - 2))
    if dims == tuple(range(rank)):
        return x
    c, u = _scaled(g, x)
    if c != 1:
        return g.mul(g.transpose(u, dims), c)
    if x.node.facets.permutes:
        before = x.node.attributes["dims"]
        return g.transpose(g.tensor(x.node.inputs[0]), tuple(before[d] for d in dims))
    swapped = dims == (*range(rank - 2), rank - 1, rank - 2)
    if swapped and x.node.facets.contracts and x.index not in g.given:
        a, b = (g.tensor(i) for i in x.node.inputs)
        return g.matmul(g.transpose(b), g.transpose(a), **x.node.attributes)
    return None


def _slice(g: Derivation, args: list[Tensor], attributes: dict[str, Any]) -> Tensor | None:
    """before: columns 6..8 of ``concat([a[M, 6], b[M, 4]], 1)``; after: columns 0..2 of b."""
    [x], start, stop = args, attributes["start"], attributes["stop"]
    dim = attributes["dim"] % len(x.shape)
    if (start, stop) == (0, x.shape[dim]):
        return x
    if g.is_zeros(x):
        step = g.tensor(x.node.inputs[0])
        return g.zeros(g.slice(g.tensor(step.node.inputs[0]), dim, start, stop))
    if not x.node.facets.joins or x.node.attributes["dim"] != dim:
        return None
    for part, (first, end) in _parts(g, x):
        if first <= start and stop <= end:
            return g.slice(part, dim, start - first, stop - first)
    return None


def _parts(g: Derivation, t: Tensor) -> list[tuple[Tensor, tuple[int, int]]]:
    """The operands of a concatenation, with the start and end of each."""
    dim = t.node.attributes["dim"]
    parts = [g.tensor(i) for i in t.node.inputs]
    ends = accumulate((extent(p.shape[dim]) for p in parts), initial=0)
    return list(zip(parts, pairwise(ends), strict=True))


def _add_parts(g: Derivation, x: Tensor, y: Tensor) -> Tensor | None:
    """before: ``concat([0, a], 1) + concat([b, 0], 1)``; after: ``concat([b, a], 1)``."""
    dim = x.node.attributes["dim"]
    if x.shape != y.shape or dim != y.node.attributes["dim"]:
        return None
    cuts = sorted({cut for t in (x, y) for _, ends in _parts(g, t) for cut in ends})
    cells = [g.add(g.slice(x, dim, *c), g.slice(y, dim, *c)) for c in pairwise(cuts)]
    return g.concat(cells, dim)


RULES: dict[str, Rule] = {
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "div": _div,
    "matmul": _matmul,
    "sum": partial(_reduce, name="sum"),
    "mean": partial(_reduce, name="mean"),
    "transpose": _transpose,
    "slice": _slice,
}
