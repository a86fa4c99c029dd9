"""Functions of one or two numbers that are made of others, with slopes of their own.

A slope that follows from the parts is not PyTorch's where pieces meet, and where a cotangent is
infinite: in ``dy u + dy v`` infinities meet that ``dy (u + v)`` has not. A function of one number
is one entry of `COMPOSED`; what follows from its name is what follows from that of a `function`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from math import inf, isfinite, pi, sqrt
from typing import TYPE_CHECKING, Any, ClassVar

from cutesuper.errors import OperatorError
from cutesuper.ir.dims import Shape, size
from cutesuper.ir.operators.base import (
    LARGEST,
    Attributes,
    Elementwise,
    enter_formulas,
    operator,
    torch_module,
)
from cutesuper.ir.operators.pointwise import Clamp

if TYPE_CHECKING:
    from cutesuper.ir.derivation import Derivation
    from cutesuper.ir.graph import KernelGraph, Tensor


class Composed(Elementwise):
    """A function of one number; `composed` makes one. Its attributes are finite numbers.

    Attributes:
        made_of, slope, of_tensor: arguments of `composed`.
    """

    arity = 1
    composite = True
    made_of: ClassVar[Any]
    slope: ClassVar[Any]
    of_tensor: ClassVar[Any] = None

    def check_attributes(self, given: Attributes) -> Attributes:
        full = super().check_attributes(given)
        for name, n in full.items():
            if not isinstance(n, int | float) or isinstance(n, bool) or not isfinite(n):
                raise OperatorError(f"{self.name}({name}={n!r}): must be a finite number")
        return {name: float(n) for name, n in full.items()}

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        if self.of_tensor is not None:
            return self.of_tensor(args[0], **attributes)
        return getattr(torch_module().ops.aten, self.name)(args[0], **attributes)

    def expand(self, g: KernelGraph, args: list[Tensor], attributes: Attributes) -> Tensor:
        return self.made_of(g, args[0], **attributes)

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> list[Tensor]:
        return [self.slope(g, args[0], y, dy, **attributes)]

    def flops(self, shapes: list[Shape], result: Shape) -> float:
        return float(size(result))


def composed(
    name: str,
    doc: str,
    made_of: Callable[..., Tensor],
    slope: Callable[..., Tensor],
    of_tensor: Callable[..., Any] | None = None,
    **attributes: float,
) -> type[Composed]:
    """Enter a function of one number that is made of others into the table of operators.

    Args:
        name: of the operator, and of PyTorch's, ``aten.<name>.default``.
        doc: what it computes.
        made_of: the result in primitive operators, from the graph and the operand.
        slope: the cotangent of the operand, from the graph, the operand, the result and its
            cotangent.
        of_tensor: the result from a tensor, where PyTorch's operator has another name.
        attributes: their names and defaults; the three functions take them by name.
    """
    formulas = {"made_of": made_of, "slope": slope, "of_tensor": of_tensor}
    names = (f"aten.{name}.default",)
    return enter_formulas(Composed, name, doc, formulas, attributes=attributes, torch_names=names)


def _size(g: KernelGraph, x: Tensor) -> Tensor:
    """|x|."""
    return g.add(g.relu(x), g.relu(g.mul(x, -1.0)))


def _log1p_exp(g: KernelGraph, x: Tensor) -> Tensor:
    """max(x, 0) + log(1 + e^-|x|)."""
    return g.add(g.relu(x), g.log1p(g.exp(g.mul(_size(g, x), -1.0))))


def except_where(g: KernelGraph, condition: Tensor, x: Tensor) -> Tensor:
    """x where a condition does not hold, 0 where it does; a comparison with NaN does not."""
    return g.keep(g.sub(1.0, condition), x)


def _elu(g: KernelGraph, x: Tensor, alpha: float, scale: float, input_scale: float) -> Tensor:
    """Each of the two parts is 0 on the other's side."""
    below = g.mul(g.expm1(g.mul(g.clamp(x, -inf, 0.0), input_scale)), alpha)
    return g.mul(g.add(g.relu(x), below), scale)


def _elu_slope(
    g: Derivation, x: Tensor, y: Tensor, dy: Tensor, alpha: float, scale: float, input_scale: float
) -> Tensor:
    positive = g.step(x)
    e = g.exp(g.mul(g.clamp(x, -inf, 0.0), input_scale))
    below = except_where(g, positive, g.mul(e, alpha * input_scale))
    return g.mul(dy, g.mul(g.add(positive, below), scale))


#: of `gelu_tanh`: sqrt(2 / pi) (x + 0.044715 x^3)
_CUBE, _INNER = 0.044715, sqrt(2 / pi)


def _inner(g: KernelGraph, x: Tensor) -> Tensor:
    return g.mul(g.add(x, g.mul(g.mul(g.square(x), x), _CUBE)), _INNER)


def _gelu_tanh_slope(g: Derivation, x: Tensor, y: Tensor, dy: Tensor) -> Tensor:
    """With t = tanh(u): (1 + t) / 2 + x (1 - t^2) u' / 2."""
    t = g.tanh(_inner(g, x))
    inner = g.mul(g.add(g.mul(g.square(x), 3 * _CUBE), 1.0), _INNER)
    right = g.mul(g.mul(g.mul(x, 0.5), g.sub(1.0, g.square(t))), inner)
    return g.mul(dy, g.add(g.mul(g.add(t, 1.0), 0.5), right))


def _mish_slope(g: Derivation, x: Tensor, y: Tensor, dy: Tensor) -> Tensor:
    """With t = tanh(log(1 + e^x)): t + x sigmoid(x) (1 - t^2)."""
    t = g.tanh(_log1p_exp(g, x))
    rest = g.mul(g.mul(x, g.sigmoid(x)), g.sub(1.0, g.square(t)))
    return g.mul(dy, g.add(t, rest))


def _hardswish_slope(g: Derivation, x: Tensor, y: Tensor, dy: Tensor) -> Tensor:
    """0 up to -3, x / 3 + 1/2 up to 3, where it jumps from 3/2 to 1."""
    last = g.at_least(x, 3.0)
    middle = except_where(g, last, g.add(g.div(x, 3.0), 0.5))
    return except_where(g, g.at_least(-3.0, x), g.mul(dy, g.add(middle, last)))


def _sinc(g: KernelGraph, x: Tensor) -> Tensor:
    """Divided by 1 where x is 0."""
    angle = g.mul(x, pi)
    zero = is_zero(g, angle)
    return g.add(except_where(g, zero, g.div(g.sin(angle), g.add(angle, zero))), zero)


def _sinc_slope(g: Derivation, x: Tensor, y: Tensor, dy: Tensor) -> Tensor:
    """(a cos a - sin a) / (a x) with a = pi x; 0 where the divisor is."""
    angle, divisor = g.mul(x, pi), g.mul(g.square(x), pi)
    cosine, sine = g.mul(angle, g.cos(angle)), g.sin(angle)
    return except_where(g, g.at_least(0.0, divisor), g.mul(dy, g.div(g.sub(cosine, sine), divisor)))


def _entr(g: KernelGraph, x: Tensor) -> Tensor:
    """The logarithm of the condition that x is not negative is 0 or -inf."""
    positive = g.relu(x)
    y = except_where(g, g.at_least(0.0, positive), g.mul(positive, g.log(positive)))
    return g.sub(g.log(g.at_least(x, 0.0)), y)


COMPOSED = (
    composed("abs", "The absolute value.", _size,
        lambda g, x, y, dy: g.mul(dy, g.sub(g.step(x), g.step(g.mul(x, -1.0))))),
    # without it, gradients of a row of zeros are 0 inf; the root of the smallest float32 is 3.7e-23
    composed("root", "sqrt(x) of sums of squares, whose slope at 0 is 0, as PyTorch has it for "
        "norms and standard deviations.", lambda g, x: g.sqrt(x),
        lambda g, x, y, dy: g.keep(g.at_least(y, 1e-30), g.mul(g.div(dy, y), 0.5)),
        lambda x: x.sqrt()),
    composed("log1p_exp", "log(1 + e^x), PyTorch's softplus; large x overflow nowhere.", _log1p_exp,
        lambda g, x, y, dy: g.mul(dy, g.sigmoid(x)),
        lambda x: x.relu() + (-x.abs()).exp().log1p()),
    composed("leaky_relu", "x above 0, ``negative_slope`` times x below, whose slope counts at 0.",
        lambda g, x, negative_slope: g.sub(
            g.relu(x), g.mul(g.relu(g.mul(x, -1.0)), negative_slope)),
        lambda g, x, y, dy, negative_slope: g.mul(
            dy, g.add(g.mul(g.step(x), 1.0 - negative_slope), negative_slope)),
        negative_slope=0.01),
    composed("elu", "``scale`` times x above 0, ``scale alpha (e^(input_scale x) - 1)`` below.",
        _elu, _elu_slope, alpha=1.0, scale=1.0, input_scale=1.0),
    composed("softshrink", "What x has more than ``lambd``, above 0 and below.",
        lambda g, x, lambd: g.sub(x, g.clamp(x, -lambd, lambd)),
        lambda g, x, y, dy, lambd: g.keep(g.step(g.sub(_size(g, x), lambd)), dy), lambd=0.5),
    composed("gelu_tanh", "0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), arXiv:1606.08415.",
        lambda g, x: g.mul(g.mul(x, 0.5), g.add(g.tanh(_inner(g, x)), 1.0)), _gelu_tanh_slope,
        lambda x: torch_module().nn.functional.gelu(x, approximate="tanh")),
    composed("mish", "x tanh(log(1 + e^x)), arXiv:1908.08681.",
        lambda g, x: g.mul(x, g.tanh(_log1p_exp(g, x))), _mish_slope),
    composed("hardswish", "x limited(x + 3, 0, 6) / 6.",
        lambda g, x: g.mul(x, g.div(g.clamp(g.add(x, 3.0), 0.0, 6.0), 6.0)), _hardswish_slope),
    composed("tan", "Tangent, of radians.", lambda g, x: g.div(g.sin(x), g.cos(x)),
        lambda g, x, y, dy: g.mul(dy, g.add(g.square(y), 1.0))),
    composed("sinc", "sin(pi x) / (pi x), 1 at 0.", _sinc, _sinc_slope),
    composed("special_entr", "-x log(x), 0 at 0, -inf below.", _entr,
        lambda g, x, y, dy: g.mul(dy, g.sub(-1.0, g.log(x)))),
    # the root of x (1 - x) is NaN where the result is
    composed("logit", "log(x / (1 - x)).", lambda g, x: g.log(g.div(x, g.sub(1.0, x))),
        lambda g, x, y, dy: g.mul(dy, g.square(g.rsqrt(g.mul(x, g.sub(1.0, x)))))),
)  # fmt: skip
#: classes of the package are found under their names: see `cutesuper.ir.definitions`
globals().update({cls.__name__: cls for cls in COMPOSED})


@operator
class Power(Composed):
    """x to a power that is a multiple of 1/4; its slope at 0 is PyTorch's, 0 or infinite."""

    name = "power"
    attributes: ClassVar[Attributes] = {"exponent": ...}

    def check_attributes(self, given: Attributes) -> Attributes:
        full = super().check_attributes(given)
        if full["exponent"] % 0.25:
            raise OperatorError(f"power(exponent={full['exponent']:g}): must be a multiple of 1/4")
        return full

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        return args[0] ** attributes["exponent"]

    def expand(self, g: KernelGraph, args: list[Tensor], attributes: Attributes) -> Tensor:
        return power(g, args[0], attributes["exponent"])

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> list[Tensor]:
        """dx = dy n x^(n - 1), 0 for n = 0 whatever x is."""
        n = attributes["exponent"]
        return [g.zeros(y) if n == 0 else g.mul(dy, g.mul(power(g, args[0], n - 1), n))]


def power(g: KernelGraph, x: Tensor, exponent: float) -> Tensor:
    """x to a power that is a multiple of 1/4."""
    if exponent == 1.0:
        return g.mul(x, 1.0)
    if exponent == -0.5:
        return g.rsqrt(x)
    whole, part = divmod(abs(exponent), 1)
    factors = [*_whole_power(g, x, int(whole)), *_roots(g, x, part)]
    y = reduce(g.mul, factors) if factors else g.add(g.keep(0.0, x), 1.0)
    return g.div(1.0, y) if exponent < 0 else y


def _whole_power(g: KernelGraph, x: Tensor, n: int) -> list[Tensor]:
    """Squares of squares of x, whose product is x^n."""
    factors: list[Tensor] = []
    while n:
        if n % 2:
            factors.append(x)
        n //= 2
        x = g.square(x) if n else x
    return factors[::-1]


def _roots(g: KernelGraph, x: Tensor, part: float) -> list[Tensor]:
    """Roots of roots of x, whose product is x^part for a part of 0, 1/4, 1/2 or 3/4."""
    roots: list[Tensor] = []
    while part:
        x, part = g.sqrt(x), part * 2
        roots += [x] * (part >= 1)
        part %= 1
    return roots


@operator
class Hardtanh(Clamp):
    """x limited to [min, max], as `Clamp`; the slope at both ends is 0, as PyTorch's."""

    name = "hardtanh"
    composite = True

    def expand(self, g: KernelGraph, args: list[Tensor], attributes: Attributes) -> Tensor:
        return g.clamp(args[0], attributes["min"], attributes["max"])

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> tuple[Tensor]:
        x, low, high = args[0], attributes["min"], attributes["max"]
        above = g.step(g.sub(x, low)) if low > -inf else g.at_least(x, -LARGEST)
        below = g.step(g.sub(high, x)) if high < inf else g.at_least(LARGEST, x)
        return (g.keep(g.mul(above, below), dy),)


class _OfTwo(Elementwise):
    """A function of two numbers that is made of others."""

    arity = 2
    composite = True


@operator
class Raised(_OfTwo):
    """max(x, y) as PyTorch's clamp: where both are equal, all of the cotangent is x's."""

    name = "raised"

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        return args[0].clamp(min=args[1])

    def expand(self, g: KernelGraph, args: list[Tensor], attributes: Attributes) -> Tensor:
        return g.maximum(*args)

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> list[Tensor]:
        """Neither has any of it where one is NaN."""
        own = g.at_least(*args)
        less = except_where(g, own, g.at_least(*args[::-1]))
        return [g.keep(own, dy), g.keep(less, dy)]


@operator
class Hypot(_OfTwo):
    """sqrt(x^2 + y^2), whose squares overflow nowhere; NaN where x or y is."""

    name = "hypot"

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        return args[0].hypot(args[1])

    def expand(self, g: KernelGraph, args: list[Tensor], attributes: Attributes) -> Tensor:
        """With the larger one in front of the root; an infinite one is the result."""
        x, y = (_size(g, t) for t in args)
        most = g.maximum(x, y)
        least = g.mul(g.maximum(g.mul(x, -1.0), g.mul(y, -1.0)), -1.0)
        ratio = g.keep(g.at_least(LARGEST, most), g.div(least, g.add(most, is_zero(g, most))))
        return g.mul(most, g.sqrt(g.add(g.square(ratio), 1.0)))

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> list[Tensor]:
        return [g.mul(dy, g.div(t, y)) for t in args]


@operator
class Xlogy(_OfTwo):
    """x log y, 0 where x is 0, even if y is 0 or infinite; NaN where y is."""

    name = "xlogy"

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        return args[0].xlogy(args[1])

    def expand(self, g: KernelGraph, args: list[Tensor], attributes: Attributes) -> Tensor:
        x, y = args
        number = g.maximum(g.at_least(y, 0.0), g.at_least(0.0, y))
        return except_where(g, g.mul(is_zero(g, x), number), g.mul(x, g.log(y)))

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> list[Tensor]:
        """dx = xlogy(dy, y), 0 where x is 0 and y is not positive; dy x / y."""
        x, y = args
        nothing = g.mul(is_zero(g, x), g.at_least(0.0, y))
        own = self.expand(g, [dy, y], attributes)
        return [except_where(g, nothing, own), g.div(g.mul(dy, x), y)]


def is_zero(g: KernelGraph, x: Tensor) -> Tensor:
    """1 where x is 0, 0 elsewhere (NaN too)."""
    return g.mul(g.at_least(x, 0.0), g.at_least(0.0, x))
