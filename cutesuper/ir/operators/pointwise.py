"""Functions of one number, element by element; see `cutesuper.ir.operators.base`.

A function is one line of `FUNCTIONS`. The method of a kernel graph, the operator of PyTorch in the
front end, the formula in kernels, at plan time and in the tests follow from its name.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, isnan, nan, pi, sqrt
from typing import TYPE_CHECKING, Any, ClassVar

from cutesuper.errors import DTypeError, OperatorError
from cutesuper.ir.dtypes import ALL, DType, as_dtype, int64
from cutesuper.ir.field import NoNumber, Unbounded
from cutesuper.ir.operators.base import (
    LARGEST,
    Attributes,
    Elementwise,
    enter_formulas,
    opaque,
    operator,
    torch_module,
)

if TYPE_CHECKING:
    from cutesuper.ir.derivation import Derivation
    from cutesuper.ir.graph import Tensor

    #: the cotangent of the operand, from the graph, the operand, the result and its cotangent
    Slope = Callable[[Derivation, Tensor, Tensor, Tensor], Tensor | None]


class _Unary(Elementwise):
    arity = 1
    #: the value at -inf; NaN if undefined or +inf
    at_hidden: ClassVar[float] = nan

    def hidden(self, a: Any, args: list[Any], attributes: Attributes) -> Any:
        """Mask of results that are -inf: the operand's, if the function maps -inf to -inf."""
        [x] = args
        value = self.limit(attributes)
        if isnan(value) and x.gone().any():
            kind = NoNumber if self._is_nan(attributes) else Unbounded
            raise kind(f"a masked element (-inf) is the argument of {self.name}")
        return a.gone(x) if value == -inf else None

    def _is_nan(self, attributes: Attributes) -> bool:
        """True if PyTorch gives NaN for -inf."""
        return bool(self.reference([torch_module().tensor(-inf)], attributes).isnan())

    def limit(self, attributes: Attributes) -> float:
        """The value at -inf, for these attributes."""
        return self.at_hidden

    def symbolic(self, a: Any, args: list[Any], attributes: Attributes) -> Any:
        """Uninterpreted unless a subclass knows better."""
        return opaque(self.name, a, args, attributes)


class Function(_Unary):
    """A function without attributes; `function` makes one.

    Attributes:
        domain: the arguments that have a result.
        slope, of_tensor, of_element, of_value: arguments of `function`.
    """

    domain: ClassVar[tuple[float, float]] = (-inf, inf)
    slope: ClassVar[Any]
    of_tensor: ClassVar[Any] = None
    of_element: ClassVar[Any] = None
    of_value: ClassVar[Any] = None

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        if self.of_tensor is None:
            return getattr(args[0], self.name)()
        return self.of_tensor(torch_module(), args[0])

    def scalar(self, m: Any, args: list[Any], attributes: Attributes) -> Any:
        if self.of_element is None:
            return getattr(m, self.name)(args[0])
        return self.of_element(m, args[0])

    def symbolic(self, a: Any, args: list[Any], attributes: Attributes) -> Any:
        if self.of_value is None:
            return super().symbolic(a, args, attributes)
        return self.of_value(a, args[0])

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> tuple[Tensor | None]:
        return (self.slope(g, args[0], y, dy),)


def function(
    name: str,
    doc: str,
    slope: Slope,
    of_tensor: Callable[[Any, Any], Any] | None = None,
    of_element: Callable[[Any, Any], Any] | None = None,
    of_value: Callable[[Any, Any], Any] | None = None,
    **facets: Any,
) -> type[Function]:
    """Enter a function of one number into the table of operators.

    Args:
        name: of the operator, and where nothing else is said of the method of torch tensors, of the
            functions of kernels (``cute.math``) and of Python (``math``, ``numpy``), and of
            PyTorch's operator, ``aten.<name>.default``.
        doc: what it computes.
        slope: the cotangent of the operand, from the graph, the operand, the result and its
            cotangent; None is zero.
        of_tensor: the result from `torch` and a tensor.
        of_element: the result from a namespace ``m`` of scalar functions and one element.
        of_value: the result from an algebra and a value; else nothing is known of the function.
        facets: further attributes of its class: ``at_hidden``, ``keeps_zero``, ``domain``, ...

    Raises:
        OperatorError: a facet that no function has.
    """
    unknown = sorted(k for k in facets if not hasattr(Function, k))
    if unknown:
        raise OperatorError(f"function {name}: no function has the facet {', '.join(unknown)}")
    formulas = {
        "slope": slope, "of_tensor": of_tensor, "of_element": of_element, "of_value": of_value
    }  # fmt: skip
    facets |= {"torch_names": (f"aten.{name}.default",), "partial": "domain" in facets,
               "partial_by_sign": facets.get("domain") == (0.0, inf)}  # fmt: skip
    return enter_formulas(Function, name, doc, formulas, **facets)


def _gelu_slope(g: Derivation, x: Tensor, y: Tensor, dy: Tensor) -> Tensor:
    """Phi(x) + x phi(x), the normal distribution and its density."""
    below = g.add(g.mul(g.erf(g.mul(x, sqrt(0.5))), 0.5), 0.5)
    density = g.mul(g.exp(g.mul(g.square(x), -0.5)), 1 / sqrt(2 * pi))
    return g.mul(dy, g.add(below, g.mul(x, density)))


def _silu_slope(g: Derivation, x: Tensor, y: Tensor, dy: Tensor) -> Tensor:
    """With s = sigmoid(x): s (1 + x (1 - s))."""
    s = g.sigmoid(x)
    return g.mul(dy, g.mul(s, g.add(g.mul(x, g.sub(1.0, s)), 1.0)))


def _bell(g: Derivation, x: Tensor, factor: float) -> Tensor:
    """The slope of the error function, times a number: e^(-x^2)."""
    return g.mul(g.exp(g.mul(g.square(x), -1.0)), factor)


FUNCTIONS = (
    function("exp", "e^x.", lambda g, x, y, dy: g.mul(dy, y), of_value=lambda a, x: a.exp(x),
        at_hidden=0.0, above_zero=True, exponential=True),
    # opaque: a verified program has the same arguments, not e^log(x) = x
    function("log", "Natural logarithm.", lambda g, x, y, dy: g.div(dy, x), domain=(0.0, inf)),
    function("sqrt", "Square root.", lambda g, x, y, dy: g.mul(g.div(dy, y), 0.5),
        of_value=lambda a, x: a.root(x), domain=(0.0, inf), above_zero=True, reciprocal="rsqrt"),
    # defined through `sqrt`, so that it equals a division by a root
    function("rsqrt", "1 / sqrt(x).",
        lambda g, x, y, dy: g.mul(g.mul(dy, g.mul(g.square(y), y)), -0.5),
        of_value=lambda a, x: a.div(a.constant(1.0), a.root(x)),
        domain=(0.0, inf), above_zero=True),
    function("square", "x x.", lambda g, x, y, dy: g.mul(g.mul(dy, x), 2.0),
        of_tensor=lambda torch, x: x * x, of_element=lambda m, x: x * x,
        of_value=lambda a, x: a.mul(x, x), above_zero=True, powers=(2,)),
    function("silu", "x sigmoid(x).", _silu_slope,
        of_tensor=lambda torch, x: torch.nn.functional.silu(x),
        of_element=lambda m, x: x * m.sigmoid(x), keeps_zero=True),
    # of inf PyTorch gives inf on a GPU, and NaN on a CPU if a vector of it is as long as a register
    function("gelu", "x Phi(x) with the error function, as PyTorch's default.", _gelu_slope,
        of_tensor=lambda torch, x: torch.nn.functional.gelu(x).where(x != torch.inf, x),
        of_element=lambda m, x: 0.5 * x * (1.0 + m.erf(x * 0.7071067811865476)), keeps_zero=True),
    # dy where the result is not 0, so for NaN: the result may be kept in place of the operand
    function("relu", "max(x, 0).", lambda g, x, y, dy: g.keep(g.sub(1.0, g.at_least(0.0, y)), dy),
        of_element=lambda m, x: m.maximum(x, 0.0), keeps_zero=True, flat=True, at_hidden=0.0),
    function("sigmoid", "1 / (1 + e^-x).", lambda g, x, y, dy: g.mul(dy, g.mul(y, g.sub(1.0, y))),
        at_hidden=0.0, above_zero=True),
    function("tanh", "Hyperbolic tangent.",
        lambda g, x, y, dy: g.mul(dy, g.sub(1.0, g.square(y))), keeps_zero=True, at_hidden=-1.0),
    function("erf", "The error function.",
        lambda g, x, y, dy: g.mul(dy, _bell(g, x, 2 / sqrt(pi))), keeps_zero=True, at_hidden=-1.0),
    function("log1p", "log(1 + x), accurate next to x = 0.",
        lambda g, x, y, dy: g.div(dy, g.add(x, 1.0)), keeps_zero=True, domain=(-1.0, inf)),
    function("expm1", "e^x - 1, accurate next to x = 0.",
        lambda g, x, y, dy: g.mul(dy, g.exp(x)), keeps_zero=True, at_hidden=-1.0),
    function("sin", "Sine, of radians of any size.", lambda g, x, y, dy: g.mul(dy, g.cos(x)),
        keeps_zero=True),
    function("cos", "Cosine, of radians of any size.",
        lambda g, x, y, dy: g.mul(g.mul(dy, g.sin(x)), -1.0)),
    function("asin", "Inverse sine, in radians.",
        lambda g, x, y, dy: g.mul(dy, g.rsqrt(g.sub(1.0, g.square(x)))),
        keeps_zero=True, domain=(-1.0, 1.0)),
    function("acos", "Inverse cosine, in radians.",
        lambda g, x, y, dy: g.mul(g.mul(dy, g.rsqrt(g.sub(1.0, g.square(x)))), -1.0),
        domain=(-1.0, 1.0)),
    function("atan", "Inverse tangent, in radians.",
        lambda g, x, y, dy: g.div(dy, g.add(g.square(x), 1.0)), keeps_zero=True, at_hidden=-pi / 2),
    function("sinh", "Hyperbolic sine.", lambda g, x, y, dy: g.mul(dy, g.cosh(x)),
        keeps_zero=True, at_hidden=-inf),
    function("cosh", "Hyperbolic cosine.", lambda g, x, y, dy: g.mul(dy, g.sinh(x)),
        above_zero=True),
    function("asinh", "Inverse hyperbolic sine.",
        lambda g, x, y, dy: g.mul(dy, g.rsqrt(g.add(g.square(x), 1.0))),
        keeps_zero=True, at_hidden=-inf),
    function("acosh", "Inverse hyperbolic cosine.",
        lambda g, x, y, dy: g.mul(dy, g.rsqrt(g.sub(g.square(x), 1.0))), domain=(1.0, inf)),
    function("atanh", "Inverse hyperbolic tangent.",
        lambda g, x, y, dy: g.div(dy, g.sub(1.0, g.square(x))),
        keeps_zero=True, domain=(-1.0, 1.0)),
    function("erfc", "1 - erf(x), accurate next to a result of 0.",
        lambda g, x, y, dy: g.mul(dy, _bell(g, x, -2 / sqrt(pi))), at_hidden=2.0, above_zero=True),
    function("step", "1 where x > 0, 0 elsewhere (NaN too): the slope of relu, and comparisons.",
        lambda g, x, y, dy: None, of_tensor=lambda torch, x: (x > 0).to(x.dtype),
        keeps_zero=True, flat=True, at_hidden=0.0),
    function("finite", "1 where x x is finite in float32, 0 for larger x, infinities and NaN.",
        lambda g, x, y, dy: None, of_tensor=lambda torch, x: (x * x <= LARGEST).to(x.dtype),
        of_element=lambda m, x: m.at_least(LARGEST, x * x), at_hidden=0.0),
    function("floor", "The largest integer that is at most x.", lambda g, x, y, dy: None,
        keeps_zero=True, flat=True, at_hidden=-inf),
    function("round", "The nearest integer, the even one of two.", lambda g, x, y, dy: None,
        keeps_zero=True, flat=True, at_hidden=-inf),
)  # fmt: skip
#: classes of the package are found under their names: see `cutesuper.ir.definitions`
globals().update({cls.__name__: cls for cls in FUNCTIONS})


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
class OnlyPlace(_Unary):
    """Place of the only element along a dimension of one: 0, int64, whatever the element is."""

    name = "only_place"
    only_place = True
    keeps_zero = True
    flat = True
    at_hidden = 0.0

    def dtype(self, attributes: Attributes) -> DType:
        return int64

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        return torch_module().zeros_like(args[0])

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> tuple[None]:
        """None: places are integers."""
        return (None,)

    def scalar(self, m: Any, args: list[Any], attributes: Attributes) -> Any:
        return m.at_least(args[0], 0.0) * 0.0


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
        """dy from min to max, both included, as in PyTorch; nothing of it for NaN."""
        x, inside = args[0], dy
        if attributes["min"] == -inf and attributes["max"] == inf:
            inside = g.keep(g.maximum(g.at_least(x, 0.0), g.at_least(0.0, x)), dy)
        if attributes["min"] > -inf:
            inside = g.keep(g.at_least(x, attributes["min"]), inside)
        if attributes["max"] < inf:
            inside = g.keep(g.at_least(attributes["max"], x), inside)
        return (inside,)

    def scalar(self, m: Any, args: list[Any], attributes: Attributes) -> Any:
        return m.minimum(m.maximum(args[0], attributes["min"]), attributes["max"])

    def check_attributes(self, given: Attributes) -> Attributes:
        full = super().check_attributes(given)
        try:
            low, high = float(full["min"]), float(full["max"])
        except (TypeError, ValueError, OverflowError):
            raise OperatorError(
                f"{self.name}(min={full['min']!r}, max={full['max']!r}): both must be numbers"
            ) from None
        if not low <= high:
            raise OperatorError(f"{self.name}(min={low:g}, max={high:g}): min must not exceed max")
        return {"min": low, "max": high}
