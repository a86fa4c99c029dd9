"""Operators that compare and choose, with PyTorch's rules for NaN and infinities.

A difference cannot compare and a product cannot choose: inf - inf and 0 * inf are NaN. See
`cutesuper.ir.operators.base`.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any, ClassVar

from cutesuper.ir.operators.base import Attributes, Elementwise, operator, torch_module

if TYPE_CHECKING:
    from cutesuper.ir.derivation import Derivation
    from cutesuper.ir.graph import Tensor

_PLACES = ("first", "second")


class OfTwo(Elementwise):
    """A function of two numbers without algebra: as a product it could be computed as one."""

    arity = 2

    def symbolic(self, a: Any, args: list[Any], attributes: Attributes) -> Any:
        """An opaque function of g(x) + h(y), which tells pairs apart.
        No other operator of a program uses g and h, so no other y makes up for another x, and -inf
        is treated like any number."""
        first, second = (a.opaque(f"{k} of two", x) for k, x in zip(_PLACES, args, strict=True))
        return a.opaque(self.name, a.add(first, second))


@operator
class AtLeast(OfTwo):
    """1 where x >= y, 0 elsewhere (NaN too)."""

    name = "at_least"
    flat = True

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        keep = args[0] >= args[1]
        return keep.to(torch_module().result_type(*args))

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        return None, None

    def scalar(self, m: Any, args: list[Any], attributes: Attributes) -> Any:
        return m.at_least(*args)


@operator
class Maximum(OfTwo):
    """The larger of x and y, NaN if either is."""

    name = "maximum"
    flat = True

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        dtype = torch_module().result_type(*args)
        return torch_module().maximum(*(x.to(dtype) for x in args))

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> tuple[Tensor, Tensor]:
        """dy to each operand that is not smaller; half where they are equal, as in PyTorch."""
        left, right = (g.at_least(*pair) for pair in (args, args[::-1]))
        equal = g.mul(left, right)
        share = g.mul(dy, g.sub(1.0, g.mul(equal, 0.5)))
        not_smaller = (g.add(g.sub(1.0, other), equal) for other in (right, left))
        return tuple(g.keep(c, share) for c in not_smaller)  # type: ignore[return-value]

    def hidden(self, a: Any, args: list[Any], attributes: Attributes) -> Any:
        """Mask of the results that are -inf: those where both operands are."""
        return a.mul(*map(a.gone, args))

    def scalar(self, m: Any, args: list[Any], attributes: Attributes) -> Any:
        return m.maximum(*args)


class _Choice(OfTwo):
    """x where a condition (1 or 0) holds, another number elsewhere for any value of x."""

    other: ClassVar[float]
    chooses = True

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        condition, x = args
        x = x.to(torch_module().result_type(condition, x))
        return torch_module().where(condition > 0.5, x, self.other)

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        return None, g.keep(args[0], dy)

    def scalar(self, m: Any, args: list[Any], attributes: Attributes) -> Any:
        return m.kept(*args, self.other)

    def hidden(self, a: Any, args: list[Any], attributes: Attributes) -> Any:
        """Mask of the results that are -inf: those where x is and the condition holds."""
        condition, x = args
        return a.mul(a.gone(x), a.sub(a.constant(1.0), a.fails(condition)))


@operator
class Keep(_Choice):
    """x where a condition holds, 0 elsewhere: ``keep(c, x) + keep(1 - c, y)`` is a choice."""

    name = "keep"
    flat = True
    other = 0.0


@operator
class Lift(_Choice):
    """x where a condition holds, inf elsewhere: a number like any other, nothing that is hidden."""

    name = "lift"
    other = inf


@operator
class Hide(_Choice):
    """x where a condition holds, -inf elsewhere, so that a softmax does not see it."""

    name = "hide"
    other = -inf
    hides = True

    @property
    def empties(self) -> bool:
        return True

    def hidden(self, a: Any, args: list[Any], attributes: Attributes) -> Any:
        """Mask of the results that are -inf: those where x is or the condition does not hold."""
        condition, x = args
        return a.add(a.gone(x), a.fails(condition))
