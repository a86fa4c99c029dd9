"""Functions of one number, element by element; see `cutesuper.ir.operators.base`."""

from __future__ import annotations

from math import inf, isnan, nan, pi, sqrt
from typing import TYPE_CHECKING, Any, ClassVar

from cutesuper.errors import DTypeError, OperatorError
from cutesuper.ir.dtypes import ALL, DType, as_dtype
from cutesuper.ir.field import Unbounded
from cutesuper.ir.operators.base import Attributes, Elementwise, opaque, operator, torch_module

if TYPE_CHECKING:
    from cutesuper.ir.derivation import Derivation
    from cutesuper.ir.graph import Tensor


class _Unary(Elementwise):
    arity = 1
    #: the value at -inf; NaN if undefined or +inf
    at_hidden: ClassVar[float] = nan

    def hidden(self, a: Any, args: list[Any], attributes: Attributes) -> Any:
        """Mask of results that are -inf: the operand's, if the function maps -inf to -inf."""
        [x] = args
        value = self.limit(attributes)
        if isnan(value) and x.gone().any():
            raise Unbounded(f"a masked element (-inf) is the argument of {self.name}")
        return a.gone(x) if value == -inf else None

    def limit(self, attributes: Attributes) -> float:
        """The value at -inf, for these attributes."""
        return self.at_hidden

    def symbolic(self, a: Any, args: list[Any], attributes: Attributes) -> Any:
        """Uninterpreted unless a subclass knows better."""
        return opaque(self.name, a, args, attributes)


class _Named(_Unary):
    """A function with the same name in PyTorch and in the scalar namespace of kernels."""

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        return getattr(args[0], self.name)()

    def scalar(self, m: Any, args: list[Any], attributes: Attributes) -> Any:
        return getattr(m, self.name)(args[0])


@operator
class Exp(_Named):
    """e^x."""

    name = "exp"
    exponential = True
    at_hidden = 0.0
    above_zero = True

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> tuple[Tensor | None]:
        return (g.mul(dy, y),)

    def symbolic(self, a: Any, args: list[Any], attributes: Attributes) -> Any:
        return a.exp(args[0])


@operator
class Log(_Named):
    """Natural logarithm. Opaque: a verified program has the same arguments, not e^log(x) = x."""

    name = "log"
    partial = True

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> tuple[Tensor | None]:
        return (g.div(dy, args[0]),)


@operator
class Sqrt(_Named):
    """Square root."""

    name = "sqrt"
    reciprocal = "rsqrt"
    partial = True
    above_zero = True

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> tuple[Tensor | None]:
        return (g.mul(g.div(dy, y), 0.5),)


@operator
class Rsqrt(_Named):
    """1 / sqrt(x), defined through `Sqrt` so that it equals a division by a root."""

    name = "rsqrt"
    partial = True
    above_zero = True

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> tuple[Tensor | None]:
        return (g.mul(g.mul(dy, g.mul(g.square(y), y)), -0.5),)

    def symbolic(self, a: Any, args: list[Any], attributes: Attributes) -> Any:
        return a.div(a.constant(1.0), a.opaque("sqrt", args[0]))


@operator
class Square(_Unary):
    """x x."""

    name = "square"
    powers = (2,)
    above_zero = True

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        return args[0] * args[0]

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> tuple[Tensor | None]:
        return (g.mul(g.mul(dy, args[0]), 2.0),)

    def symbolic(self, a: Any, args: list[Any], attributes: Attributes) -> Any:
        return a.mul(args[0], args[0])

    def scalar(self, m: Any, args: list[Any], attributes: Attributes) -> Any:
        return args[0] * args[0]


@operator
class Silu(_Unary):
    """x sigmoid(x)."""

    name = "silu"
    keeps_zero = True

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        return torch_module().nn.functional.silu(args[0])

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> tuple[Tensor | None]:
        """With s = sigmoid(x): s (1 + x (1 - s))."""
        s = g.sigmoid(args[0])
        slope = g.mul(s, g.add(g.mul(args[0], g.sub(1.0, s)), 1.0))
        return (g.mul(dy, slope),)

    def scalar(self, m: Any, args: list[Any], attributes: Attributes) -> Any:
        return args[0] * m.sigmoid(args[0])


@operator
class Gelu(_Unary):
    """x Phi(x) with the error function, as PyTorch's default (approximate='none')."""

    name = "gelu"
    keeps_zero = True

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        return torch_module().nn.functional.gelu(args[0])

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> tuple[Tensor | None]:
        """Phi(x) + x phi(x), the normal distribution and its density."""
        x = args[0]
        below = g.add(g.mul(g.erf(g.mul(x, sqrt(0.5))), 0.5), 0.5)
        density = g.mul(g.exp(g.mul(g.square(x), -0.5)), 1 / sqrt(2 * pi))
        return (g.mul(dy, g.add(below, g.mul(x, density))),)

    def scalar(self, m: Any, args: list[Any], attributes: Attributes) -> Any:
        return 0.5 * args[0] * (1.0 + m.erf(args[0] * 0.7071067811865476))


@operator
class Relu(_Unary):
    """max(x, 0)."""

    name = "relu"
    keeps_zero = True
    flat = True
    at_hidden = 0.0

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        return torch_module().relu(args[0])

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> tuple[Tensor | None]:
        """dy where the result is positive: the result may be kept in place of the operand."""
        return (g.mul(dy, g.step(y)),)

    def scalar(self, m: Any, args: list[Any], attributes: Attributes) -> Any:
        return m.maximum(args[0], 0.0)


@operator
class Sigmoid(_Unary):
    """1 / (1 + e^-x)."""

    name = "sigmoid"
    at_hidden = 0.0
    above_zero = True

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        return torch_module().sigmoid(args[0])

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> tuple[Tensor | None]:
        return (g.mul(dy, g.mul(y, g.sub(1.0, y))),)

    def scalar(self, m: Any, args: list[Any], attributes: Attributes) -> Any:
        return m.sigmoid(args[0])


@operator
class Tanh(_Unary):
    """Hyperbolic tangent."""

    name = "tanh"
    keeps_zero = True
    at_hidden = -1.0

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        return torch_module().tanh(args[0])

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> tuple[Tensor | None]:
        return (g.mul(dy, g.sub(1.0, g.square(y))),)

    def scalar(self, m: Any, args: list[Any], attributes: Attributes) -> Any:
        return m.tanh(args[0])


@operator
class Erf(_Named):
    """The error function."""

    name = "erf"
    keeps_zero = True
    at_hidden = -1.0

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> tuple[Tensor | None]:
        slope = g.mul(g.exp(g.mul(g.square(args[0]), -1.0)), 2 / sqrt(pi))
        return (g.mul(dy, slope),)


@operator
class Log1p(_Named):
    """log(1 + x), accurate next to x = 0."""

    name = "log1p"
    keeps_zero = True
    partial = True

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> tuple[Tensor | None]:
        return (g.div(dy, g.add(args[0], 1.0)),)


@operator
class Expm1(_Named):
    """e^x - 1, accurate next to x = 0."""

    name = "expm1"
    keeps_zero = True
    at_hidden = -1.0

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> tuple[Tensor | None]:
        return (g.mul(dy, g.exp(args[0])),)


@operator
class Sin(_Named):
    """Sine, of radians of any size."""

    name = "sin"
    keeps_zero = True

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> tuple[Tensor | None]:
        return (g.mul(dy, g.cos(args[0])),)


@operator
class Cos(_Named):
    """Cosine, of radians of any size."""

    name = "cos"

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> tuple[Tensor | None]:
        return (g.mul(g.mul(dy, g.sin(args[0])), -1.0),)


@operator
class Asin(_Named):
    """Inverse sine."""

    name = "asin"
    keeps_zero = True
    partial = True

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> tuple[Tensor | None]:
        return (g.mul(dy, g.rsqrt(g.sub(1.0, g.square(args[0])))),)


@operator
class Acos(_Named):
    """Inverse cosine."""

    name = "acos"
    partial = True

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> tuple[Tensor | None]:
        return (g.mul(g.mul(dy, g.rsqrt(g.sub(1.0, g.square(args[0])))), -1.0),)


@operator
class Atan(_Named):
    """Inverse tangent."""

    name = "atan"
    keeps_zero = True
    at_hidden = -pi / 2

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> tuple[Tensor | None]:
        return (g.div(dy, g.add(g.square(args[0]), 1.0)),)


@operator
class Sinh(_Named):
    """Hyperbolic sine."""

    name = "sinh"
    keeps_zero = True
    at_hidden = -inf

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> tuple[Tensor | None]:
        return (g.mul(dy, g.cosh(args[0])),)


@operator
class Cosh(_Named):
    """Hyperbolic cosine."""

    name = "cosh"
    above_zero = True

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> tuple[Tensor | None]:
        return (g.mul(dy, g.sinh(args[0])),)


@operator
class Asinh(_Named):
    """Inverse hyperbolic sine."""

    name = "asinh"
    keeps_zero = True
    at_hidden = -inf

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> tuple[Tensor | None]:
        return (g.mul(dy, g.rsqrt(g.add(g.square(args[0]), 1.0))),)


@operator
class Acosh(_Named):
    """Inverse hyperbolic cosine."""

    name = "acosh"
    partial = True

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> tuple[Tensor | None]:
        return (g.mul(dy, g.rsqrt(g.sub(g.square(args[0]), 1.0))),)


@operator
class Atanh(_Named):
    """Inverse hyperbolic tangent."""

    name = "atanh"
    keeps_zero = True
    partial = True

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> tuple[Tensor | None]:
        return (g.div(dy, g.sub(1.0, g.square(args[0]))),)


@operator
class Erfc(_Named):
    """1 - erf(x), accurate next to a result of 0."""

    name = "erfc"
    at_hidden = 2.0
    above_zero = True

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> tuple[Tensor | None]:
        slope = g.mul(g.exp(g.mul(g.square(args[0]), -1.0)), -2 / sqrt(pi))
        return (g.mul(dy, slope),)


class _Flat(_Unary):
    """A function that is constant between its steps."""

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> tuple[Tensor | None]:
        return (None,)


@operator
class Step(_Flat):
    """1 where x > 0, 0 elsewhere (NaN too): the derivative of relu, and comparisons."""

    name = "step"
    keeps_zero = True
    flat = True
    at_hidden = 0.0

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        return (args[0] > 0).to(args[0].dtype)

    def scalar(self, m: Any, args: list[Any], attributes: Attributes) -> Any:
        return m.step(args[0])


@operator
class Floor(_Flat, _Named):
    """The largest integer that is at most x."""

    name = "floor"
    keeps_zero = True
    flat = True
    at_hidden = -inf


@operator
class Round(_Flat, _Named):
    """The nearest integer, the even one of two."""

    name = "round"
    keeps_zero = True
    flat = True
    at_hidden = -inf


@operator
class Convert(_Unary):
    """x, stored as another element type if it is stored: everything is computed in float32."""

    name = "convert"
    converts = True
    keeps_zero = True
    at_hidden = -inf
    attributes: ClassVar[Attributes] = {"dtype": ...}

    def dtype(self, attributes: Attributes) -> DType:
        return ALL[attributes["dtype"]]

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        return args[0]

    def symbolic(self, a: Any, args: list[Any], attributes: Attributes) -> Any:
        return args[0]

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> tuple[Tensor]:
        return (dy,)

    def scalar(self, m: Any, args: list[Any], attributes: Attributes) -> Any:
        return args[0]

    def check_attributes(self, given: Attributes) -> Attributes:
        dtype = as_dtype(super().check_attributes(given)["dtype"])
        if dtype.integer:
            raise DTypeError(
                f"convert(dtype={dtype}): nothing is computed in integers; use one of "
                f"{', '.join(ALL)}"
            )
        return {"dtype": dtype.name}


@operator
class Clamp(_Unary):
    """x limited to [min, max]."""

    name = "clamp"
    flat = True
    attributes: ClassVar[Attributes] = {"min": ..., "max": ...}

    def limit(self, attributes: Attributes) -> float:
        return attributes["min"]

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        return args[0].clamp(attributes["min"], attributes["max"])

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> tuple[Tensor | None]:
        """dy from min to max, both included, as in PyTorch."""
        x, inside = args[0], dy
        if attributes["min"] > -inf:
            below = g.step(g.sub(attributes["min"], x))
            inside = g.mul(inside, g.sub(1.0, below))
        if attributes["max"] < inf:
            above = g.step(g.sub(x, attributes["max"]))
            inside = g.mul(inside, g.sub(1.0, above))
        return (inside,)

    def scalar(self, m: Any, args: list[Any], attributes: Attributes) -> Any:
        return m.minimum(m.maximum(args[0], attributes["min"]), attributes["max"])

    def check_attributes(self, given: Attributes) -> Attributes:
        full = super().check_attributes(given)
        try:
            low, high = float(full["min"]), float(full["max"])
        except (TypeError, ValueError, OverflowError):
            raise OperatorError(
                f"clamp(min={full['min']!r}, max={full['max']!r}): both must be numbers"
            ) from None
        if not low <= high:
            raise OperatorError(f"clamp(min={low:g}, max={high:g}): min must not exceed max")
        return {"min": low, "max": high}
