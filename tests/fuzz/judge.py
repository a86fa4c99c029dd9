"""The judge: what the outputs of a program should be, and whether given ones will do.

The program is evaluated several times with `tests.fuzz.formulas`, in float64:

* exactly;
* rounded to the nearest at each operator, to the element type of its value, as eager PyTorch does,
  operands of products to their common type of 16 bits whatever the result is marked as, numbers of
  the program to float32, and four times with random roundings: what errors usually are;
* with a bound for every element (`Balls`): how large an error may be at worst, if each value is
  rounded to its element type and float32 sums are added up in any order.

An output is **wrong** if

* its shape or element type is another one;
* an element is NaN or infinite where the exact one is not, and no value that it is made of leaves
  the range of its element type (of float32 inside of operators that are made of others), or it is
  finite where the exact one is not;
* an element is off by more than `AT_WORST` times its bound. Sums of many terms are never as far off
  as they may be at worst: the bound is at most what `spread` makes of the rounded evaluations;
* the largest error, or the Frobenius norm of the errors relative to that of the exact output, is
  more than `USUALLY` times the largest of those of the five rounded evaluations, plus 4 ulp. Only
  elements that are well conditioned count.

Where a computed value that is compared or rounded may be on either side of the threshold, one
element decides: rounded evaluations say nothing there, and bounds are those of the worst case.

Elements whose bound is infinite (next to a pole, or beyond the range) are not judged. An output is
*unjudged* if no rule is broken, and most of its elements have no bound, or such a wide one that an
error of half the largest element would pass: the cosine of large numbers of 16 bits, for instance,
or a difference of equal numbers. NaN is not asked for in programs with masks, where the
arithmetic of hidden elements has rules of its own (``docs/verification.md``, "Masks").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cutesuper.ir.graph import KernelGraph, Node
from cutesuper.ir.operators.base import lookup
from tests.fuzz.arithmetic import (
    Arithmetic,
    Ball,
    Balls,
    Numbers,
    Places,
    reach,
    smallest,
    unit,
)
from tests.fuzz.formulas import FORMULAS, OF_EMPTY, WITH_HIDDEN_ROWS, softmax_by_data

#: times the bound of an element
AT_WORST = 4.0
#: times the largest error of rounded evaluations
USUALLY = 6.0
#: with random roundings
SAMPLES = 4
#: of the largest element: an error of an element that is seen where an output is judged
SEEN = 0.5
#: times that a value next to zero may have vanished on the way
UNDERFLOWS = 64

MASKS = {"causal_mask", "length_mask", "limit_mask", "hide", "lift", "scaled_dot_product_attention"}


def run(graph: KernelGraph, inputs: Sequence[Tensor], m: Arithmetic) -> list[Any]:
    """The outputs of a kernel graph by the formulas, on the numbers of an arithmetic."""
    hidden = any(node.operator in HIDING for node in graph.nodes)
    formulas = WITH_HIDDEN_ROWS if hidden else FORMULAS
    values: list[Any] = []
    feed, (gone, empty), sums = iter(inputs), _gone_and_empty(graph), _of_products(graph)
    for node in graph.nodes:
        if node.operator == "input":
            x = next(feed)
            values.append(x if node.dtype.integer else m.given(x))
        elif node.operator == "constant":
            values.append(m.constant(node.attributes["value"]))
        else:
            args = [values[j] for j in node.inputs]
            dtype, factors = node.dtype.torch, _factors(graph, node)
            attributes = dict(node.attributes) | {"factors": factors}
            if node.operator == "matmul":
                args = [m.store(x, factors, limited=False) for x in args]
                pairs = zip(node.inputs, args, strict=True)
                args = [m.in_parts(x, factors) if j in sums else x for j, x in pairs]
            by_none = node.operator == "div" and node.inputs[1] in empty
            formula = OF_EMPTY if by_none else formulas[node.operator]
            if node.operator == "softmax" and node.inputs[0] not in gone:
                formula = softmax_by_data
            dims = _compared(graph, node)
            y = m.largest(args[0], dims) if dims else formula(m, args, attributes, dtype)
            own = graph.own_dtype(graph.tensor(len(values))).torch
            if dtype.itemsize == own.itemsize and not node.dtype.integer:
                y = m.store(y, own)  # before it is an output of another type of 16 bits
            values.append(y if node.dtype.integer else m.store(y, dtype))
    return [values[i] for i in graph.outputs]


#: -inf of elements that are all -inf, and 0 of such that are all 0
KEPT = ("sum", "mean", "max", "transpose", "convert", "causal_mask")
#: -inf where their first operand is, as for positive divisors
FIRST = ("sub", "div", *KEPT)
#: they may hide a row as a whole
HIDING = ("length_mask", "limit_mask", "hide")


def _gone_and_empty(graph: KernelGraph) -> tuple[set[int], set[int]]:
    """The nodes that are -inf in rows which the graph hides as a whole, and those that are 0."""
    gone, zero = set[int](), set[int]()
    for i, node in enumerate(graph.nodes):
        op, args = node.operator, node.inputs
        lost, none = ([j in known for j in args] for known in (gone, zero))
        if op in HIDING or (any(lost) if op in ("add", "mul") else op in FIRST and lost[0]):
            gone.add(i)
        if (
            (op in ("exp", "softmax") and lost[0])
            or (op == "mul" and any(none))
            or (op in ("add", "sub") and all(none))
            or (op in ("div", "square", "sqrt", "relu", *KEPT) and none[0])
            or (op == "keep" and none[1])
        ):
            zero.add(i)
    return gone, zero


def _of_products(graph: KernelGraph) -> set[int]:
    """The nodes that are made of products, element by element. Of (X A) B each block of a cluster
    takes a part of X A, and rounds it (docs/lowering/matmul.md)."""
    found = set[int]()
    for i, node in enumerate(graph.nodes):
        if node.facets.contracts or (
            lookup(node.operator).elementwise and found.intersection(node.inputs)
        ):
            found.add(i)
    return found


def _compared(graph: KernelGraph, node: Node) -> list[int]:
    """The dimensions along which a node compares its operand with the maximum of the same one."""
    of, dims = graph.nodes[node.inputs[-1]], list[int]()
    while (node.operator, of.operator) == ("at_least", "max"):
        dims.append(of.attributes["dim"])
        if of.inputs[0] == node.inputs[0]:
            return dims
        of = graph.nodes[of.inputs[0]]
    return []


def _factors(graph: KernelGraph, node: Node) -> torch.dtype:
    """The type that a product's operands are rounded to, also where one of them is an output that
    is marked as float32: tensor cores take two of one type."""
    types = [graph.nodes[j].dtype.torch for j in node.inputs if not graph.nodes[j].dtype.integer]
    return min(types, key=lambda t: t.itemsize, default=node.dtype.torch)


@dataclass(frozen=True)
class Expected:
    """The right value of an output.

    Attributes:
        ball: exact numbers and bounds.
        samples: rounded evaluations.
        dtype: element type.
        jumps: what is compared or rounded in the program may be on either side.
        masks: it hides elements.
    """

    ball: Ball
    samples: tuple[Tensor, ...]
    dtype: torch.dtype
    jumps: bool = False
    masks: bool = False


@dataclass(frozen=True)
class Verdict:
    """About one output: "right", "wrong" or "unjudged", and why."""

    kind: str
    reason: str = ""

    @property
    def wrong(self) -> bool:
        """True if the output will not do."""
        return self.kind == "wrong"


RIGHT = Verdict("right")


def expected(graph: KernelGraph, inputs: Sequence[Tensor]) -> list[Expected]:
    """The right outputs of a kernel graph."""
    m = Balls()
    balls = run(graph, inputs, m)
    runs = [run(graph, inputs, Numbers("nearest"))]
    runs += [run(graph, inputs, Numbers("random", s)) for s in range(SAMPLES)]
    masks = any(n.operator in MASKS for n in graph.nodes)
    found = []
    for ball, samples, i in zip(balls, zip(*runs, strict=True), graph.outputs, strict=True):
        dtype = graph.nodes[i].dtype.torch
        if not m.jumped and not isinstance(ball, Places):
            usual = torch.where(ball.v.isfinite(), spread(ball.v, samples, dtype), torch.inf)
            ball = Ball(ball.v, torch.where(ball.e.isfinite(), ball.e.minimum(usual), ball.e))
        found.append(Expected(ball, samples, dtype, m.jumped, masks))
    return found


def spread(v: Tensor, samples: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """A bound for the errors of elements, from rounded evaluations: four times as far as these are
    off there, and once as far as they are off anywhere. Infinite where one of them is."""
    off = torch.stack([torch.where(s == v, 0.0, (s - v).abs()) for s in samples]).amax(0)
    off = torch.where(off.isnan(), torch.inf, off)
    finite = off.isfinite() & v.isfinite()
    most, size = (torch.where(finite, x, 0.0).flatten() for x in (off, v.abs()))
    if not v.numel():
        return off
    return 4 * off + most.max() + 2 * unit(dtype) * size.max()


def judged(outputs: Sequence[Tensor], wanted: Sequence[Expected]) -> Verdict:
    """The worst verdict about some outputs."""
    verdicts = [judge(y, w) for y, w in zip(outputs, wanted, strict=True)]
    wrong = [(i, v) for i, v in enumerate(verdicts) if v.wrong]
    if wrong:
        i, v = wrong[0]
        return Verdict("wrong", f"output {i}: {v.reason}")
    return next((v for v in verdicts if v.kind == "unjudged"), RIGHT)


def judge(y: Tensor, want: Expected) -> Verdict:
    """About one output."""
    v, e = want.ball.v, want.ball.e
    if y.shape != v.shape:
        return Verdict("wrong", f"shape {list(y.shape)}, expected {list(v.shape)}")
    if y.dtype != want.dtype:
        return Verdict("wrong", f"element type {y.dtype}, expected {want.dtype}")
    if isinstance(want.ball, Places):
        return _placed(y.detach().cpu(), want.ball)
    y = y.detach().cpu().double()
    known = e.isfinite() & ~(v.isnan() & want.masks)
    rules = (_odd, _at_worst, _usually, _unseen) if known.any() else (_unseen,)
    return next((found for rule in rules if (found := rule(y, want, known))), RIGHT)


def _placed(y: Tensor, want: Places) -> Verdict:
    inside = (y >= 0) & (y < want.allowed.shape[want.dim])
    right = inside & want.allowed.gather(want.dim, torch.where(inside, y, 0))
    if right.all():
        return RIGHT
    at = tuple(int(i) for i in (~right).nonzero()[0])
    return Verdict(
        "wrong", f"{int((~right).sum())} of {y.numel()} places; first at {list(at)}: {int(y[at])} "
        f"for {int(want.v[at])}"
    )  # fmt: skip


def _odd(y: Tensor, want: Expected, known: Tensor) -> Verdict | None:
    """NaN and infinities in other places."""
    v = want.ball.v
    near = known & (v.abs() + want.ball.e > reach(want.dtype))  # may be rounded to infinity
    same = torch.where(v.isnan(), y.isnan(), y == v)
    bad = known & ~near & ~torch.where(v.isfinite(), y.isfinite(), same)
    return _shown(y, want, bad, "NaN or infinite where it should not be, or the other way round")


def _at_worst(y: Tensor, want: Expected, known: Tensor) -> Verdict | None:
    v, e = want.ball.v, want.ball.e
    finite = known & v.isfinite() & y.isfinite()
    bad = finite & ((y - v).abs() > AT_WORST * (e + smallest(want.dtype)))
    return _shown(y, want, bad, f"off by more than {AT_WORST:g} times what rounding explains")


def _usually(y: Tensor, want: Expected, known: Tensor) -> Verdict | None:
    v, e = want.ball.v, want.ball.e
    if want.jumps:
        return None
    top = float(torch.where(v.isfinite() & known, v.abs(), 0.0).max())
    calm = known & v.isfinite() & y.isfinite() & (e <= 0.05 * v.abs() + 64 * unit(want.dtype) * top)
    size = float(torch.where(calm, v, 0.0).norm())
    found = _errors(y, v, calm, size)
    usual = [_errors(s, v, calm & s.isfinite(), size) for s in want.samples]
    ulp = 2 * unit(want.dtype)
    for what, error, others, floor in zip(
        ("largest error", "relative error"), found, zip(*usual, strict=True),
        (4 * ulp * top + smallest(want.dtype), 4 * ulp), strict=True,
    ):  # fmt: skip
        limit = USUALLY * max(others) + floor
        if error > limit:
            return Verdict(
                "wrong", f"{what} {error:.3g}, {max(others):.3g} is usual, {limit:.3g} allowed"
            )
    return None


def _unseen(y: Tensor, want: Expected, known: Tensor) -> Verdict | None:
    """Not much would be seen of an error."""
    v, e = want.ball.v, want.ball.e
    if not v.numel():
        return None
    top = torch.where(known & v.isfinite(), v.abs(), 0.0).max()
    sharp = known & (AT_WORST * e <= SEEN * top + UNDERFLOWS * smallest(want.dtype))
    share = float(sharp.double().mean())
    if 2 * share >= 1:
        return None
    return Verdict("unjudged", f"{share:.0%} of the elements have a bound that says something")


def _errors(x: Tensor, v: Tensor, keep: Tensor, size: float) -> tuple[float, float]:
    if not keep.any():
        return 0.0, 0.0
    d = torch.where(keep, x - v, 0.0)
    norm = float(d.norm())
    return float(d.abs().max()), norm / size if size else norm


def _shown(y: Tensor, want: Expected, bad: Tensor, what: str) -> Verdict | None:
    count = int(bad.sum())
    if not count:
        return None
    at = tuple(int(i) for i in bad.nonzero()[0])
    v, e = float(want.ball.v[at]), float(want.ball.e[at])
    return Verdict(
        "wrong",
        f"{count} of {bad.numel()} elements {what}; first at {list(at)}: "
        f"{float(y[at]):.6g} for {v:.6g}, bound {e:.3g}",
    )
