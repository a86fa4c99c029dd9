"""Small programs, rewriting of kernel graphs at one node, and axioms of arithmetic as rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from cutesuper.errors import ShapeError
from cutesuper.ir.graph import KernelGraph, Tensor, new_kernel_graph

# --------------------------------------------------------------------------------------- programs


def rms_linear(g: KernelGraph) -> list[Tensor]:
    x, w = g.new_input((4, 8), name="X"), g.new_input((8, 6), name="W")
    return [g.matmul(g.rms_norm(x), w)]


def weighted_norm(g: KernelGraph) -> list[Tensor]:
    x, s = g.new_input((4, 8), name="X"), g.new_input((8,), name="S")
    return [g.rms_norm(x, s)]


def gated(g: KernelGraph) -> list[Tensor]:
    x = g.new_input((4, 8), name="X")
    a, b = (g.new_input((8, 6), name=n) for n in "AB")
    return [g.mul(g.silu(g.matmul(x, a)), g.matmul(x, b))]


def softmax(g: KernelGraph) -> list[Tensor]:
    return [g.softmax(g.new_input((4, 8), name="X"))]


def attention(g: KernelGraph) -> list[Tensor]:
    q, k, v = (g.new_input(s, name=n) for n, s in (("Q", (4, 3)), ("K", (5, 3)), ("V", (5, 6))))
    e = g.exp(g.mul(g.matmul(q, g.transpose(k)), 0.5))
    return [g.div(g.matmul(e, v), g.sum(e, -1))]


def causal(g: KernelGraph) -> list[Tensor]:
    q, k, v = (g.new_input(s, name=n) for n, s in (("Q", (4, 3)), ("K", (5, 3)), ("V", (5, 6))))
    return [g.scaled_dot_product_attention(q, k, v, is_causal=True)]


def lora(g: KernelGraph) -> list[Tensor]:
    x, w = g.new_input((4, 8), name="X"), g.new_input((8, 6), name="W")
    a, b = g.new_input((8, 2), name="A"), g.new_input((2, 6), name="B")
    return [g.matmul(g.concat([x, g.matmul(x, a)], 1), g.concat([w, b], 0))]


def layer_norm(g: KernelGraph) -> list[Tensor]:
    x = g.new_input((4, 8), name="X")
    centred = g.sub(x, g.mean(x, -1))
    return [g.div(centred, g.sqrt(g.add(g.mean(g.square(centred), -1), 1e-5)))]


def residual(g: KernelGraph) -> list[Tensor]:
    x, r = (g.new_input((4, 8), name=n) for n in "XR")
    w, b = g.new_input((8, 6), name="W"), g.new_input((6,), name="b")
    return [g.add(g.matmul(g.add(x, r), w), b)]


def backward(g: KernelGraph) -> list[Tensor]:
    x, w, d = (g.new_input(s, name=n) for n, s in (("X", (4, 8)), ("W", (8,)), ("D", (4, 8))))
    hat = g.div(x, g.sqrt(g.mean(g.square(x), -1)))
    c = g.mul(d, w)
    return [g.sub(c, g.mul(hat, g.mean(g.mul(c, hat), -1))), g.sum(g.mul(d, hat), 0)]


def moments(g: KernelGraph) -> list[Tensor]:
    x = g.new_input((4, 8), name="X")
    return [g.mean(x, -1), g.mean(g.square(x), -1)]


def mixture(g: KernelGraph) -> list[Tensor]:
    x, r = (g.new_input((4, 8), name=n) for n in "XR")
    w, t = g.new_input((8,), name="W"), g.new_input((4, 1), name="T")
    both = g.add(g.mul(x, w), g.mul(r, w))
    return [g.sum(g.mul(both, t), -1), g.exp(g.sub(g.mul(both, both), x))]


PROGRAMS: dict[str, Callable[[KernelGraph], list[Tensor]]] = {
    f.__name__: f
    for f in (
        rms_linear, weighted_norm, gated, softmax, attention, causal, lora, layer_norm, residual,
        backward, moments, mixture,
    )
}  # fmt: skip


def program(name: str) -> KernelGraph:
    """The program in primitive operators."""
    g = new_kernel_graph()
    for y in PROGRAMS[name](g):
        g.mark_output(y)
    return g.expanded()


# ----------------------------------------------------------------------------------------- sites


@dataclass(frozen=True)
class Site:
    """A node of an old graph while a new one is made from it."""

    g: KernelGraph
    old: KernelGraph
    index: int
    new: dict[int, Tensor]

    @property
    def kind(self) -> str:
        return self.old.nodes[self.index].operator

    @property
    def dim(self) -> int:
        return self.old.nodes[self.index].attributes["dim"]

    @cached_property
    def args(self) -> list[Tensor]:
        return [self.new[j] for j in self.old.nodes[self.index].inputs]

    def arg(self, k: int) -> Site:
        return replace(self, index=self.old.nodes[self.index].inputs[k])

    def is_(self, kind: str, *kinds: str | None) -> bool:
        """True if the node is of a kind, and its operands of theirs (None: of any)."""
        return self.kind == kind and all(
            k is None or self.arg(n).kind == k for n, k in enumerate(kinds)
        )

    def copy(self) -> Tensor:
        """The node as it is."""
        node = self.old.nodes[self.index]
        return self.g.apply(node.operator, *self.args, **dict(node.attributes))

    @property
    def shape(self) -> tuple[Any, ...]:
        return self.old.nodes[self.index].shape


#: the new value of a node, None where the rule does not apply
Rule = Callable[[Site], Tensor | None]


def rewritten(old: KernelGraph, index: int, rule: Rule) -> KernelGraph | None:
    """The graph with one node made by a rule, without what nothing needs then.

    None where the rule does not apply, or what it makes has no place in the graph.
    """
    g = new_kernel_graph()
    new: dict[int, Tensor] = {}
    for i, node in enumerate(old.nodes):
        if node.operator == "input":
            new[i] = g.new_input(node.shape, node.dtype, node.name)
            continue
        site = Site(g, old, i, new)
        try:
            value = rule(site) if i == index else site.copy()
        except ShapeError:
            return None
        if value is None:
            return None
        new[i] = value
    if any(new[i].shape != old.nodes[i].shape for i in old.outputs):
        return None
    if any(new[i].node.operator in ("input", "constant") for i in old.outputs):
        return None
    g.outputs = [new[i].index for i in old.outputs]
    return g.expanded()


def results(old: KernelGraph, rule: Rule) -> Iterator[KernelGraph]:
    """The graph with a rule applied at each node where it can be."""
    for i, node in enumerate(old.nodes):
        if node.operator not in ("input", "constant"):
            g = rewritten(old, i, rule)
            if g is not None:
                yield g


# ---------------------------------------------------------------------------------------- axioms

AXIOMS: dict[str, Rule] = {}


def axiom(rule: Rule) -> Rule:
    AXIOMS[rule.__name__] = rule
    return rule


def narrow(t: Tensor, shape: tuple[Any, ...], dim: int) -> bool:
    """True if t does not vary along a dimension of ``shape``, to which it broadcasts."""
    d = dim - len(shape)
    return len(t.shape) < -d or t.shape[d] == 1


@axiom
def commute(s: Site) -> Tensor | None:
    return s.g.apply(s.kind, *s.args[::-1]) if s.kind in ("add", "mul") else None


@axiom
def associate(s: Site) -> Tensor | None:
    """(a + b) + c = a + (b + c)"""
    if s.kind not in ("add", "mul") or s.arg(0).kind != s.kind:
        return None
    (a, b), c = s.arg(0).args, s.args[1]
    return s.g.apply(s.kind, a, s.g.apply(s.kind, b, c))


@axiom
def distribute(s: Site) -> Tensor | None:
    """(a + b) * c = a * c + b * c, also for - and /, and for matrix products"""
    if s.kind not in ("mul", "div", "matmul") or s.arg(0).kind not in ("add", "sub"):
        return None
    (a, b), c = s.arg(0).args, s.args[1]
    return s.g.apply(s.arg(0).kind, s.g.apply(s.kind, a, c), s.g.apply(s.kind, b, c))


@axiom
def factor(s: Site) -> Tensor | None:
    """a * c + b * c = (a + b) * c"""
    if not (s.is_("add", "mul", "mul") or s.is_("sub", "mul", "mul")):
        return None
    (a, b), (c, d) = s.arg(0).args, s.arg(1).args
    pairs = [(x, y, z) for x, z in ((a, b), (b, a)) for y, w in ((c, d), (d, c)) if z == w]
    return s.g.mul(s.g.apply(s.kind, *pairs[0][:2]), pairs[0][2]) if pairs else None


@axiom
def scale_after_product(s: Site) -> Tensor | None:
    """(x / s) @ w = (x @ w) / s, and for *, where s has no column"""
    if s.kind != "matmul" or s.arg(0).kind not in ("mul", "div"):
        return None
    x, c = s.arg(0).args
    if not narrow(c, s.arg(0).shape, len(s.arg(0).shape) - 1):
        return None
    return s.g.apply(s.arg(0).kind, s.g.matmul(x, s.args[1]), c)


@axiom
def scale_before_product(s: Site) -> Tensor | None:
    """(x @ w) / s = (x / s) @ w, and for *, where s has no column"""
    if s.kind not in ("mul", "div") or s.arg(0).kind != "matmul":
        return None
    (x, w), c = s.arg(0).args, s.args[1]
    if not narrow(c, s.shape, len(s.shape) - 1):
        return None
    return s.g.matmul(s.g.apply(s.kind, x, c), w)


@axiom
def quotient_of_quotient(s: Site) -> Tensor | None:
    """a / b = ((a / 3) / b) * 3, then (a / 3) / b = a / (3 * b)"""
    if s.kind != "div":
        return None
    a, b = s.args
    return s.g.mul(s.g.div(a, s.g.mul(3.0, b)), 3.0)


@axiom
def multiply_by_inverse(s: Site) -> Tensor | None:
    return s.g.mul(s.args[0], s.g.div(1.0, s.args[1])) if s.kind == "div" else None


@axiom
def divide_late(s: Site) -> Tensor | None:
    """(a / b) * c = (a * c) / b"""
    if not s.is_("mul", "div"):
        return None
    (a, b), c = s.arg(0).args, s.args[1]
    return s.g.div(s.g.mul(a, c), b)


@axiom
def square_is_a_product(s: Site) -> Tensor | None:
    return s.g.mul(s.args[0], s.args[0]) if s.kind == "square" else None


@axiom
def product_is_half_of_squares(s: Site) -> Tensor | None:
    """2 a b = (a + b)^2 - a^2 - b^2"""
    if s.kind != "mul":
        return None
    g, (a, b) = s.g, s.args
    return g.mul(g.sub(g.sub(g.square(g.add(a, b)), g.square(a)), g.square(b)), 0.5)


@axiom
def mean_is_a_sum_over_a_count(s: Site) -> Tensor | None:
    """A count that follows the extent: a sum of ones."""
    if s.kind != "mean":
        return None
    g, [x] = s.g, s.args
    return g.div(g.sum(x, s.dim), g.sum(g.add(g.mul(x, 0.0), 1.0), s.dim))


@axiom
def sum_is_a_mean_times_a_count(s: Site) -> Tensor | None:
    if s.kind != "sum":
        return None
    g, [x] = s.g, s.args
    return g.mul(g.mean(x, s.dim), g.sum(g.add(g.mul(x, 0.0), 1.0), s.dim))


@axiom
def split_reduction(s: Site) -> Tensor | None:
    """sum(x) = sum(x + y) - sum(y), for y = 2 x"""
    if s.kind not in ("sum", "mean"):
        return None
    g, [x] = s.g, s.args
    y = g.mul(x, 2.0)
    return g.sub(g.apply(s.kind, g.add(x, y), dim=s.dim), g.apply(s.kind, y, dim=s.dim))


@axiom
def scale_after_reduction(s: Site) -> Tensor | None:
    """sum(x / c) = sum(x) / c, where c does not vary along the dimension"""
    if s.kind not in ("sum", "mean") or s.arg(0).kind not in ("mul", "div"):
        return None
    x, c = s.arg(0).args
    if not narrow(c, s.arg(0).shape, s.dim) or narrow(x, s.arg(0).shape, s.dim):
        return None
    return s.g.apply(s.arg(0).kind, s.g.apply(s.kind, x, dim=s.dim), c)


@axiom
def transposed_product(s: Site) -> Tensor | None:
    """a @ b = (b^T @ a^T)^T"""
    if s.kind != "matmul":
        return None
    a, b = map(s.g.transpose, s.args)
    return s.g.transpose(s.g.matmul(b, a))


@axiom
def transposed_reduction(s: Site) -> Tensor | None:
    if s.kind not in ("sum", "mean"):
        return None
    return s.g.transpose(s.g.apply(s.kind, s.g.transpose(s.args[0]), dim=1 - s.dim))


@axiom
def exponential_of_a_sum(s: Site) -> Tensor | None:
    """exp(a - b) = exp(a) / exp(b); exp(a + b) = exp(a) * exp(b)"""
    if s.kind != "exp" or s.arg(0).kind not in ("add", "sub"):
        return None
    a, b = map(s.g.exp, s.arg(0).args)
    return s.g.mul(a, b) if s.arg(0).kind == "add" else s.g.div(a, b)


@axiom
def exponential_of_a_half(s: Site) -> Tensor | None:
    """exp(x) = exp(x / 2)^2"""
    return s.g.square(s.g.exp(s.g.mul(s.args[0], 0.5))) if s.kind == "exp" else None


@axiom
def other_shift(s: Site) -> Tensor | None:
    """The shift of a softmax cancels, whatever it is."""
    if not s.is_("sub", None, "max"):
        return None
    x, top = s.args
    return s.g.sub(x, s.g.add(s.g.mul(top, 0.5), 1.0))


@axiom
def no_shift(s: Site) -> Tensor | None:
    return s.args[0] if s.is_("sub", None, "max") else None


@axiom
def root_is_an_inverse(s: Site) -> Tensor | None:
    return s.g.div(1.0, s.g.rsqrt(s.args[0])) if s.kind == "sqrt" else None


@axiom
def reciprocal_root(s: Site) -> Tensor | None:
    """a / sqrt(b) = a * rsqrt(b)"""
    if not s.is_("div", None, "sqrt"):
        return None
    return s.g.mul(s.args[0], s.g.rsqrt(s.arg(1).args[0]))


@axiom
def times_one(s: Site) -> Tensor | None:
    return s.g.mul(s.copy(), 1.0)


@axiom
def plus_zero(s: Site) -> Tensor | None:
    return s.g.add(s.g.sub(s.copy(), 0.0), 0.0)


@axiom
def half_of_twice(s: Site) -> Tensor | None:
    value = s.copy()
    return s.g.div(s.g.add(value, value), 2.0)


@axiom
def minus_is_plus_negative(s: Site) -> Tensor | None:
    return s.g.add(s.args[0], s.g.mul(s.args[1], -1.0)) if s.kind == "sub" else None


@axiom
def mask_late(s: Site) -> Tensor | None:
    """mask(x * c) = mask(x) * c for a positive number c"""
    if not s.is_("causal_mask", "mul", None) or s.arg(0).arg(1).kind != "constant":
        return None
    x, c = s.arg(0).args
    return s.g.mul(s.g.causal_mask(x), c)


@axiom
def mask_of_a_shifted_value(s: Site) -> Tensor | None:
    """mask(x) - m = mask(x - m)"""
    if not s.is_("sub", "causal_mask"):
        return None
    return s.g.causal_mask(s.g.sub(s.arg(0).args[0], s.args[1]))
