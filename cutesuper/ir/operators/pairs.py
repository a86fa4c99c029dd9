"""Functions of two numbers, element by element; see `cutesuper.ir.operators.base`.

A function is one line of `PAIRS`, as one of one number is of `FUNCTIONS` (`pointwise`). All that
search and verifier know is that equal pairs give equal values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from cutesuper.errors import OperatorError
from cutesuper.ir.field import NoNumber
from cutesuper.ir.operators.base import Attributes, enter_formulas, torch_module
from cutesuper.ir.operators.composed import except_where, is_zero
from cutesuper.ir.operators.select import OfTwo

if TYPE_CHECKING:
    from cutesuper.ir.derivation import Derivation
    from cutesuper.ir.graph import Tensor

    #: the cotangents of both operands, from the graph, the operands, the result and its cotangent
    Slopes = Callable[[Derivation, Tensor, Tensor, Tensor, Tensor], Sequence[Tensor | None]]

#: how PyTorch's names go on, by which operands are tensors
_OVERLOADS = ("default", "Tensor", "Scalar", "Scalar_Tensor")


class Pair(OfTwo):
    """A function of two numbers without attributes; `pair` makes one.

    Attributes:
        slopes, of_tensors, of_elements: arguments of `pair`.
    """

    slopes: ClassVar[Any]
    of_tensors: ClassVar[Any] = None
    of_elements: ClassVar[Any] = None

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        torch = torch_module()
        operands = (x.to(torch.result_type(*args)) for x in args)
        if self.of_tensors is None:
            return getattr(torch, self.name)(*operands)
        return self.of_tensors(torch, *operands)

    def scalar(self, m: Any, args: list[Any], attributes: Attributes) -> Any:
        if self.of_elements is None:
            return getattr(m, self.name)(*args)
        return self.of_elements(m, *args)

    def hidden(self, a: Any, args: list[Any], attributes: Attributes) -> Any:
        """None: a hidden operand is refused."""
        if any(x.gone().any() for x in args):
            raise NoNumber(f"a masked element (-inf) is an argument of {self.name}")

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> Sequence[Tensor | None]:
        return self.slopes(g, *args, y, dy)


def pair(
    name: str,
    doc: str,
    slopes: Slopes,
    of_tensors: Callable[[Any, Any, Any], Any] | None = None,
    of_elements: Callable[[Any, Any, Any], Any] | None = None,
    **facets: Any,
) -> type[Pair]:
    """Enter a function of two numbers into the table of operators.

    Args:
        name: of the operator, and where nothing else is said of PyTorch's, ``torch.<name>`` and
            ``aten.<name>``, and of the functions of kernels and of Python (``math``, ``numpy``).
        doc: what it computes.
        slopes: the cotangents of both operands, from the graph, the operands, the result and its
            cotangent; None is zero.
        of_tensors: the result from `torch` and two tensors of one element type.
        of_elements: the result from a namespace ``m`` of scalar functions and two elements.
        facets: further attributes of its class, as ``flat``.

    Raises:
        OperatorError: a facet that no operator has.
    """
    unknown = sorted(k for k in facets if not hasattr(Pair, k))
    if unknown:
        raise OperatorError(f"pair {name}: no operator has the facet {', '.join(unknown)}")
    formulas = {"slopes": slopes, "of_tensors": of_tensors, "of_elements": of_elements}
    names = tuple(f"aten.{name}.{o}" for o in _OVERLOADS)
    return enter_formulas(Pair, name, doc, formulas, torch_names=names, **facets)


def _pow_slopes(g: Derivation, x: Tensor, y: Tensor, z: Tensor, dz: Tensor) -> tuple[Tensor, ...]:
    """y x^(y - 1), 0 where y is 0; z log x, 0 where x is 0 and y is not negative."""
    steep = g.mul(dz, g.mul(y, g.pow(x, g.sub(y, 1.0))))
    nothing = g.mul(is_zero(g, x), g.at_least(y, 0.0))
    return (
        except_where(g, is_zero(g, y), steep),
        g.mul(dz, except_where(g, nothing, g.mul(z, g.log(x)))),
    )


def _truncated(g: Derivation, x: Tensor) -> Tensor:
    return g.sub(g.floor(g.relu(x)), g.floor(g.relu(g.mul(x, -1.0))))


def _atan2_slopes(g: Derivation, x: Tensor, y: Tensor, z: Tensor, dz: Tensor) -> tuple[Tensor, ...]:
    """y / (x^2 + y^2) and -x / (x^2 + y^2), 0 at the origin."""
    size = g.add(g.square(x), g.square(y))
    share = g.mul(dz, except_where(g, is_zero(g, size), g.div(1.0, size)))
    return g.mul(share, y), g.mul(g.mul(share, x), -1.0)


def _beyond(m: Any, rest: Any, y: Any) -> Any:
    """1 where the rest of a division and the divisor have different signs, 0 elsewhere."""
    return m.step(rest) * m.step(-y) + m.step(-rest) * m.step(y)


def _remainder(m: Any, x: Any, y: Any) -> Any:
    rest = m.fmod(x, y)
    return rest + m.kept(_beyond(m, rest, y), y, 0.0)


def _floor_divide(m: Any, x: Any, y: Any) -> Any:
    """The multiple of y that the rest leaves, divided; floor(x / y) is 60 for 6 / 0.1, not 59."""
    rest = m.fmod(x, y)
    whole = m.round((x - rest) / y) - _beyond(m, rest, y)
    zero = m.at_least(y, 0.0) * m.at_least(0.0, y)
    return m.kept(1.0 - zero, whole, 0.0) + m.kept(zero, x / y, 0.0)


PAIRS = (
    pair("pow", "x^y.", _pow_slopes, partial=True),
    pair("fmod", "The rest of x beside whole multiples of y, which has the sign of x.",
        lambda g, x, y, z, dz: (dz, g.mul(g.mul(dz, _truncated(g, g.div(x, y))), -1.0)),
        flat=True),
    pair("remainder", "x - y floor(x / y), which has the sign of y.",
        lambda g, x, y, z, dz: (dz, g.mul(g.mul(dz, g.floor_divide(x, y)), -1.0)),
        of_elements=_remainder, flat=True),
    pair("floor_divide", "floor(x / y).", lambda g, x, y, z, dz: (None, None),
        lambda torch, x, y: torch.div(x, y, rounding_mode="floor"), _floor_divide, flat=True),
    pair("atan2", "The angle of the point (y, x), in radians.", _atan2_slopes),
    pair("copysign", "The size of x with the sign of y.",
        lambda g, x, y, z, dz: (g.mul(dz, except_where(g, is_zero(g, x), g.div(z, x))), None)),
)  # fmt: skip
#: classes of the package are found under their names: see `cutesuper.ir.definitions`
globals().update({cls.__name__: cls for cls in PAIRS})
