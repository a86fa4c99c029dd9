"""Element-wise operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from math import inf, isfinite, isnan, log
from typing import Any

import torch
from torch import fx

from cutesuper.ir.graph import KernelGraph, Operand, Tensor
from cutesuper.ir.operators.base import CONSTANT, TABLE
from cutesuper.ir.operators.composed import power
from cutesuper.torch.aten.factored_dims import Mismatch, Part
from cutesuper.torch.aten.graph_builder import (
    FLOATS,
    INTEGERS,
    Builder,
    Built,
    Shapes,
    Slots,
    Unsupported,
    Value,
    correspondence,
    fake,
    translated,
)
from cutesuper.torch.aten.table import Arguments, Entry, enter, enter_all, number

Formula = Callable[..., Operand]


def shape_of(s: Shapes, node: fx.Node, operands: Sequence[Any]) -> Value:
    """The dimensions of an element-wise result of tensors and numbers."""
    return s.broadcast(node, [s.of(o) for o in operands if isinstance(o, fx.Node)])


def aligned(b: Builder, node: fx.Node, operands: Sequence[Any]) -> tuple[list[Any], Slots]:
    """Operands as the kernel graph broadcasts them, and the slots of the result.

    Numbers and None stay as they are. A value that was reduced has only one order of dimensions, so
    the others follow it.
    """
    result = b.value(node)
    parts = {o: correspondence(result, b.value(o)) for o in operands if isinstance(o, fx.Node)}
    slots = _common(b, result, parts)
    found = [
        _operand(b, node, o, translated(slots, parts[o]))
        if isinstance(o, fx.Node)
        else None
        if o is None
        else number(node, o)
        for o in operands
    ]
    return found, slots


def _common(b: Builder, result: Value, parts: dict[fx.Node, dict[Part, Part]]) -> Slots:
    """The slots of a result that need the least rearrangement of computed operands."""
    natural = b.natural(result)
    choices = [natural]
    for t, own in parts.items():
        if isinstance(b.of(t).tensor, Tensor):
            choices.append(translated(b.of(t).slots, {p: mine for mine, p in own.items()}))
    for slots in choices:
        if {s for s in natural if s} <= set(slots) and all(
            b.fits(t, translated(slots, own)) for t, own in parts.items()
        ):
            return slots
    return natural


def _operand(b: Builder, node: fx.Node, operand: fx.Node, slots: Slots) -> Operand:
    own = b.of(operand)
    return own.tensor if isinstance(own.tensor, float) else b.tensor(node, operand, slots)


@dataclass(frozen=True)
class Pointwise(Entry):
    """A formula on numbers and elements.

    Attributes:
        operands: names of its arguments that are tensors or numbers.
        formula: ``formula(graph, *operands, **options)``.
        options: names of arguments that are numbers and strings, passed by name.
        condition: its result is a condition.
    """

    operands: tuple[str, ...]
    formula: Formula
    options: tuple[str, ...] = ()
    condition: bool = False

    def shape(self, s: Shapes, node: fx.Node, a: Arguments) -> Value:
        dtype = fake(node).dtype
        if dtype not in FLOATS and not (self.condition and dtype is torch.bool):
            raise Unsupported(node, f"computes {dtype}")
        given = [a[o] for o in self.operands if isinstance(a[o], fx.Node)]
        if self.condition and any(fake(o).dtype in INTEGERS for o in given):
            raise Unsupported(node, "compares integers, which kernels read as float32")
        return shape_of(s, node, [a[o] for o in self.operands])

    def build(self, b: Builder, node: fx.Node, a: Arguments) -> Built:
        given = [a[o] for o in self.operands]
        numbers = [_constant(b, node, o) for o in given]
        if None not in numbers:
            return Built(_folded(node, a, dict(zip(self.operands, numbers, strict=True))))
        operands, slots = aligned(b, node, given)
        y = self.formula(b.g, *operands, **{o: a[o] for o in self.options if o in a})
        return _built(y, slots, node, self.condition)


def _built(y: Operand, slots: Slots, node: fx.Node, condition: bool = False) -> Built:
    """A result that may have fewer dimensions than its operands are aligned to, or more."""
    if not isinstance(y, Tensor):
        raise Unsupported(node, "computes with numbers only")
    slots = ((None,) * (len(y.shape) - len(slots)) + slots)[-len(y.shape) or len(slots) :]
    return Built(y, slots, None, condition)


@dataclass(frozen=True)
class Logic(Entry):
    """A formula on conditions, whose result is a condition.

    Attributes:
        operands: names of its arguments.
        formula: ``formula(graph, *operands)`` of tensors that are 1 or 0.
    """

    operands: tuple[str, ...]
    formula: Formula

    def shape(self, s: Shapes, node: fx.Node, a: Arguments) -> Value:
        for o in self.operands:
            if not isinstance(a[o], fx.Node) or fake(a[o]).dtype is not torch.bool:
                raise Unsupported(node, "computes with the bits of numbers")
        return shape_of(s, node, [a[o] for o in self.operands])

    def build(self, b: Builder, node: fx.Node, a: Arguments) -> Built:
        operands, slots = aligned(b, node, [a[o] for o in self.operands])
        return _built(self.formula(b.g, *operands), slots, node, True)


@enter(
    "aten.where.self",
    "aten.where.ScalarSelf",
    "aten.where.ScalarOther",
    "aten.where.Scalar",
    "aten.masked_fill.Scalar",
    "aten.masked_fill.Tensor",
)
class Where(Entry):
    """One of two values; the one that is not chosen makes no difference, NaN or not."""

    def shape(self, s: Shapes, node: fx.Node, a: Arguments) -> Value:
        condition, yes, no = self.operands(a)
        if not isinstance(condition, fx.Node) or fake(node).dtype not in FLOATS:
            raise Unsupported(node, f"computes {fake(node).dtype}")
        if fake(condition).dtype is not torch.bool:
            raise Unsupported(node, f"chooses by {fake(condition).dtype}")
        return shape_of(s, node, [condition, yes, no])

    def build(self, b: Builder, node: fx.Node, a: Arguments) -> Built:
        condition, yes, no = self.operands(a)
        left, right = (_constant(b, node, v) for v in (yes, no))
        infinite = [v for v in (left, right) if v is not None and not isfinite(v)]
        if len(infinite) > 1 or any(isnan(v) for v in infinite):
            raise Unsupported(node, f"fills with {infinite[-1]}")
        finite = [v for v, n in ((yes, left), (no, right)) if n not in infinite]
        [c, *values], slots = aligned(b, node, [condition, *finite])
        if not isinstance(c, Tensor):
            raise Unsupported(node, "chooses by a number")
        if infinite:
            on = b.g.sub(1.0, c) if left in infinite else c
            put = b.g.hide if infinite[0] < 0 else b.g.lift
            return _built(put(on, values[0]), slots, node)
        x, y = values
        parts = [b.g.keep(on, v) for on, v in ((c, x), (b.g.sub(1.0, c), y)) if v != 0.0]
        return _built(reduce(b.g.add, parts) if parts else b.g.mul(c, 0.0), slots, node)

    def operands(self, a: Arguments) -> tuple[Any, Any, Any]:
        """The condition, and the values for where it holds and where it does not."""
        if "mask" in a:
            return a["mask"], a["value"], a["self"]
        return a["condition"], a["self"], a["other"]


def _constant(b: Builder, node: fx.Node, operand: Any) -> float | None:
    if operand is None:
        return None
    if isinstance(operand, fx.Node):
        value = b.of(operand).tensor
        return value if isinstance(value, float) else None
    return number(node, operand)


def _folded(node: fx.Node, a: Arguments, numbers: dict[str, float | None]) -> float:
    """An operator of numbers only, computed by PyTorch."""
    given = {**a, **{k: torch.tensor(v, dtype=torch.float64) for k, v in numbers.items()}}
    positional = [s.name for s in node.target._schema.arguments if not s.kwarg_only]  # type: ignore[union-attr]
    values = [given[k] if isinstance(a[k], fx.Node) else a[k] for k in positional if k in given]
    named = {k: v for k, v in given.items() if k not in positional}
    if not any(isinstance(v, torch.Tensor) for v in values):
        raise Unsupported(node, "computes with numbers only")
    return float(node.target(*values, **named))  # type: ignore[operator]


# ---------------------------------------------------------------------------------------- formulas


def added(g: KernelGraph, x: Operand, y: Operand, alpha: float = 1) -> Operand:
    """``x + alpha y``."""
    return g.add(x, y if alpha == 1 else g.mul(y, alpha))


def _sub(g: KernelGraph, x: Operand, y: Operand, alpha: float = 1) -> Operand:
    return g.sub(x, y if alpha == 1 else g.mul(y, alpha))


def _rounded_div(
    g: KernelGraph, x: Operand, y: Operand, rounding_mode: str | None = None
) -> Operand:
    if rounding_mode == "floor":
        return g.floor_divide(x, y)
    quotient = _div(g, x, y)
    return _trunc(g, quotient) if rounding_mode == "trunc" else quotient  # type: ignore[arg-type]


def _div(g: KernelGraph, x: Operand, y: Operand) -> Operand:
    """x / y; x / (1 + exp(-x)) is silu and 1 / (1 + exp(-x)) sigmoid: one function, not four."""
    argument = _sigmoid_argument(y)
    if argument is not None and x == 1.0:
        return g.sigmoid(argument)
    if argument is not None and isinstance(x, Tensor) and x.index == argument.index:
        return g.silu(argument)
    if argument is not None:
        return g.mul(x, g.sigmoid(argument))
    return g.div(x, y)


def _sigmoid_argument(y: Operand) -> Tensor | None:
    """z where y is 1 + exp(-z)."""
    terms = _operands(y, "add")
    if len(terms) != 2 or not any(_number(t) == 1.0 for t in terms):
        return None
    e = next((t for t in terms if t.node.facets.exponential), None)
    factors = _operands(_operands(e, "exp")[0], "mul") if e is not None else []
    if len(factors) != 2 or not any(_number(f) == -1.0 for f in factors):
        return None
    return next((f for f in factors if _number(f) != -1.0), None)


def _operands(t: Operand | None, operator: str) -> list[Tensor]:
    if not isinstance(t, Tensor) or t.node.operator != operator:
        return []
    return [t.graph.tensor(i) for i in t.node.inputs]


def _number(t: Tensor) -> float | None:
    return t.node.attributes["value"] if t.node.operator == CONSTANT else None


def _exp2(g: KernelGraph, x: Operand) -> Operand:
    return g.exp(g.mul(x, log(2.0)))


#: the largest exponent that is multiplied out, and steps between exponents (roots of roots)
_MOST_POWER, _ROOTS = 16, 4


def _pow(g: KernelGraph, x: Operand, exponent: Operand) -> Operand:
    if x == 2.0:
        return _exp2(g, exponent)
    if not isinstance(x, Tensor) or isinstance(exponent, Tensor):
        return g.pow(x, exponent)
    size = abs(exponent)
    if size > _MOST_POWER or size * _ROOTS != int(size * _ROOTS):
        return g.pow(x, exponent)
    # the parts of whole powers and of these have PyTorch's slopes
    plain = exponent in (-1.0, -0.5, 0.5) or (exponent >= 0 and exponent == int(exponent))
    return power(g, x, exponent) if plain else g.power(x, exponent)


def _clamp(
    g: KernelGraph,
    x: Tensor,
    min: float | None = None,  # noqa: A002
    max: float | None = None,  # noqa: A002
) -> Operand:
    low = -inf if min is None else float(min)
    high = inf if max is None else float(max)
    return g.clamp(x, low, high)


def _between(
    g: KernelGraph,
    x: Tensor,
    min: Operand | None = None,  # noqa: A002
    max: Operand | None = None,  # noqa: A002
) -> Operand:
    if not isinstance(min, Tensor) and not isinstance(max, Tensor):
        return _clamp(g, x, min, max)
    x = x if min is None else g.raised(x, min)
    return x if max is None else g.mul(g.raised(_negative(g, x), _negative(g, max)), -1.0)


def _maximum(g: KernelGraph, x: Operand, y: Operand) -> Tensor:
    """No clamp where one is a number: where both are equal, each has half of the cotangent."""
    if not isinstance(x, Tensor) and not isinstance(y, Tensor):
        raise Mismatch("compares numbers only")
    return g.maximum(x, y)


def _minimum(g: KernelGraph, x: Operand, y: Operand) -> Tensor:
    return g.mul(_maximum(g, _negative(g, x), _negative(g, y)), -1.0)


def _negative(g: KernelGraph, x: Operand) -> Operand:
    return g.mul(x, -1.0) if isinstance(x, Tensor) else -x


def _gelu(g: KernelGraph, x: Tensor, approximate: str = "none") -> Operand:
    return g.gelu(x) if approximate == "none" else g.gelu_tanh(x)


def _sign(g: KernelGraph, x: Tensor) -> Tensor:
    return g.sub(g.step(x), g.step(g.mul(x, -1.0)))


def _trunc(g: KernelGraph, x: Tensor) -> Operand:
    return g.mul(g.floor(g.abs(x)), _sign(g, x))


#: log(1 + e^x) is x in float32 from here on: e^-17 is less than half an ulp of 17
_SAME = 17.0


def _softplus(g: KernelGraph, x: Tensor, beta: float = 1, threshold: float = 20) -> Operand:
    """log(1 + e^(b x)) / b, and x where b x is above the threshold."""
    inner = x if beta == 1 else g.mul(x, float(beta))
    y = g.log1p_exp(inner)
    y = y if beta == 1 else g.div(y, float(beta))
    if threshold >= _SAME:
        return y
    above = g.step(g.sub(inner, float(threshold)))
    return g.add(g.keep(above, x), g.keep(g.sub(1.0, above), y))


def _xlogy(g: KernelGraph, x: Operand, y: Operand) -> Operand:
    if isinstance(y, Tensor):
        return g.xlogy(x, y)
    if not 0 < y < inf:
        raise Mismatch(f"takes the logarithm of {y}")
    return g.mul(x, log(y))


def _logit(g: KernelGraph, x: Tensor, eps: float | None = None) -> Operand:
    return g.logit(x if eps is None else g.clamp(x, eps, 1.0 - eps))


def _celu(g: KernelGraph, x: Tensor, alpha: float = 1.0) -> Operand:
    return g.elu(x, alpha, 1.0, 1.0 / alpha)


def _hardsigmoid(g: KernelGraph, x: Tensor) -> Operand:
    return g.div(g.hardtanh(g.add(x, 3.0), 0.0, 6.0), 6.0)


def _addcmul(g: KernelGraph, x: Operand, y: Operand, z: Operand, value: float = 1) -> Operand:
    product = g.mul(y, z)
    return g.add(x, product if value == 1 else g.mul(product, float(value)))


def _addcdiv(g: KernelGraph, x: Operand, y: Operand, z: Operand, value: float = 1) -> Operand:
    quotient = g.div(y, z)
    return g.add(x, quotient if value == 1 else g.mul(quotient, float(value)))


def _lerp(g: KernelGraph, x: Operand, y: Operand, weight: Operand) -> Operand:
    """x + w (y - x), computed like PyTorch from the nearer end, where an infinite one stays."""
    if isinstance(weight, float) and abs(weight) >= 0.5:
        return g.sub(y, g.mul(g.sub(y, x), 1.0 - weight))
    return g.add(x, g.mul(g.sub(y, x), weight))


_X, _XY = ("self",), ("self", "other")


def _unary(formula: Formula, *options: str) -> Pointwise:
    return Pointwise(_X, formula, options)


def of_function(name: str) -> Pointwise:
    """The entry of a function of the table of operators, whose attributes have PyTorch's names."""
    formula = lambda g, *x, **options: g.apply(name, *x, **options)  # noqa: E731
    operator = TABLE[name]
    return Pointwise(_XY[: operator.arity], formula, tuple(operator.attributes))


def _binary(formula: Formula, *options: str) -> Pointwise:
    return Pointwise(_XY, formula, options)


def _condition(formula: Formula) -> Pointwise:
    return Pointwise(_XY, formula, (), True)


#: the largest number of float32, which stands for the number next to infinity
_LARGEST = torch.finfo(torch.float32).max


def _greater(g: KernelGraph, x: Operand, y: Operand) -> Operand:
    if x == inf:
        return _at_least(g, _LARGEST, y)
    if y == -inf:
        return _at_least(g, x, -_LARGEST)
    if x == -inf or y == inf:
        return g.mul(_is_number(g, x if isinstance(x, Tensor) else y), 0.0)  # type: ignore[arg-type]
    return g.step(x if isinstance(x, Tensor) and y == 0.0 else g.sub(x, y))


def _equal(g: KernelGraph, x: Operand, y: Operand) -> Tensor:
    return g.mul(_at_least(g, x, y), _at_least(g, y, x))


def _is_number(g: KernelGraph, x: Tensor) -> Tensor:
    """1 where x is not NaN, without ``x == x``, which is 1 in any algebra."""
    return g.maximum(g.at_least(x, 0.0), g.at_least(0.0, x))


def infinite(g: KernelGraph, x: Tensor, sign: float) -> Tensor:
    """1 where x is inf or -inf, as ``sign`` says: half of it is at least the largest number.

    What is subtracted from a number, to compare them, must not be hidden (-inf).
    """
    half = g.mul(x, 0.5)
    return g.at_least(half, _LARGEST) if sign > 0 else g.at_least(-_LARGEST, half)


def _at_least(g: KernelGraph, x: Operand, y: Operand) -> Operand:
    if isinstance(x, Tensor) and isinstance(y, Tensor) and x.index == y.index:
        return _is_number(g, x)
    if x == inf or y == -inf:
        return _is_number(g, x if isinstance(x, Tensor) else y)  # type: ignore[arg-type]
    if x == -inf or y == inf:
        return infinite(g, *((x, 1.0) if isinstance(x, Tensor) else (y, -1.0)))  # type: ignore[arg-type]
    return g.at_least(x, y)


_GREATER = _condition(_greater)
_LESS = _condition(lambda g, x, y: _greater(g, y, x))
_AT_MOST = _condition(lambda g, x, y: _at_least(g, y, x))
_AT_LEAST = _condition(_at_least)
_EQUAL = _condition(_equal)
_UNEQUAL = _condition(lambda g, x, y: g.sub(1.0, _equal(g, x, y)))


_AND = Logic(_XY, lambda g, x, y: g.mul(x, y))
_OR = Logic(_XY, lambda g, x, y: g.maximum(x, y))
_XOR = Logic(_XY, lambda g, x, y: g.square(g.sub(x, y)))
_NOT = Logic(_X, lambda g, x: g.sub(1.0, x))


def _both(name: str, entry: Entry) -> dict[str, Entry]:
    return {f"aten.{name}.Tensor": entry, f"aten.{name}.Scalar": entry}


enter_all({
    "aten.add.Scalar": _binary(added, "alpha"),
    **_both("sub", _binary(_sub, "alpha")),
    **_both("rsub", _binary(lambda g, x, y, alpha=1: _sub(g, y, x, alpha), "alpha")),
    **_both("mul", _binary(lambda g, x, y: g.mul(x, y))),
    **_both("div", _binary(_div)),
    **dict.fromkeys(
        ("aten.div.Tensor_mode", "aten.div.Scalar_mode"), _binary(_rounded_div, "rounding_mode")),
    "aten.true_divide.Tensor": _binary(_div),
    "aten.reciprocal.default": _unary(lambda g, x: _div(g, 1.0, x)),
    "aten.neg.default": _unary(lambda g, x: g.mul(x, -1.0)),
    "aten.exp2.default": _unary(_exp2),
    "aten.log2.default": _unary(lambda g, x: g.mul(g.log(x), 1 / log(2.0))),
    "aten.log10.default": _unary(lambda g, x: g.mul(g.log(x), 1 / log(10.0))),
    "aten.ceil.default": _unary(lambda g, x: g.mul(g.floor(g.mul(x, -1.0)), -1.0)),
    "aten.trunc.default": _unary(_trunc),
    "aten.relu6.default": _unary(lambda g, x: g.hardtanh(x, 0.0, 6.0)),
    "aten.gelu.default": _unary(_gelu, "approximate"),
    "aten.softplus.default": _unary(_softplus, "beta", "threshold"),
    "aten.log_sigmoid.default": _unary(
        lambda g, x: g.mul(_softplus(g, g.mul(x, -1.0)), -1.0)),
    "aten.celu.default": _unary(_celu, "alpha"),
    "aten.hardsigmoid.default": _unary(_hardsigmoid),
    "aten.hardtanh.default": Pointwise(
        _X, lambda g, x, min_val=-1.0, max_val=1.0: g.hardtanh(x, min_val, max_val),
        ("min_val", "max_val")),
    "aten.clamp.default": _unary(_clamp, "min", "max"),
    "aten.clamp.Tensor": Pointwise(("self", "min", "max"), _between),
    "aten.clamp_min.Tensor": Pointwise(("self", "min"), _between),
    "aten.clamp_max.Tensor": Pointwise(
        ("self", "max"), lambda g, x, high: _between(g, x, None, high)),
    "aten.sign.default": _unary(_sign),
    **dict.fromkeys(
        ("aten.xlogy.Tensor", "aten.xlogy.Scalar_Self", "aten.xlogy.Scalar_Other"),
        _binary(_xlogy)),
    "aten.hypot.default": _binary(lambda g, x, y: g.hypot(x, y)),
    **dict.fromkeys(("aten.logit.default", "aten.special_logit.default"), _unary(_logit, "eps")),
    "aten.isnan.default": Pointwise(
        _X, lambda g, x: g.sub(1.0, _is_number(g, x)), (), True),
    "aten.clamp_min.default": _unary(_clamp, "min"),
    "aten.clamp_max.default": _unary(_clamp, "max"),
    "aten.maximum.default": _binary(_maximum),
    "aten.minimum.default": _binary(_minimum),
    "aten.max.other": _binary(_maximum),
    "aten.min.other": _binary(_minimum),
    "aten.pow.Tensor_Scalar": Pointwise(("self", "exponent"), _pow),
    "aten.pow.Tensor_Tensor": Pointwise(("self", "exponent"), _pow),
    "aten.pow.Scalar": Pointwise(("self", "exponent"), _pow),
    "aten.addcmul.default": Pointwise(("self", "tensor1", "tensor2"), _addcmul, ("value",)),
    "aten.addcdiv.default": Pointwise(("self", "tensor1", "tensor2"), _addcdiv, ("value",)),
    # of Inductor, in the backward pass of softmax
    "prims.fma.default": Pointwise(("a", "b", "c"), lambda g, x, y, z: g.add(g.mul(x, y), z)),
    "aten.lerp.Scalar": Pointwise(("self", "end", "weight"), _lerp),
    "aten.lerp.Tensor": Pointwise(("self", "end", "weight"), _lerp),
    **_both("gt", _GREATER), **_both("lt", _LESS), **_both("le", _AT_MOST),
    **_both("ge", _AT_LEAST), **_both("eq", _EQUAL), **_both("ne", _UNEQUAL),
    "aten.logical_and.default": _AND, "aten.bitwise_and.Tensor": _AND,
    "aten.__and__.Tensor": _AND,
    "aten.logical_or.default": _OR, "aten.bitwise_or.Tensor": _OR, "aten.__or__.Tensor": _OR,
    "aten.logical_xor.default": _XOR, "aten.bitwise_xor.Tensor": _XOR,
    "aten.logical_not.default": _NOT, "aten.bitwise_not.default": _NOT,
})  # fmt: skip
