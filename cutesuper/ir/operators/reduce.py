"""Reductions over a dimension, and products of matrices; see `cutesuper.ir.operators.base`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any, ClassVar

from cutesuper.errors import OperatorError, ShapeError
from cutesuper.ir.dims import Shape, broadcast, size
from cutesuper.ir.dtypes import DType, int64
from cutesuper.ir.operators.base import Attributes, Operator, normal_dim, operator, show_call
from cutesuper.ir.operators.monoid import MAX, PLACE, SUM, Monoid
from cutesuper.ir.precision import EXACT, PRECISIONS, rounded

if TYPE_CHECKING:
    from cutesuper.ir.derivation import Derivation
    from cutesuper.ir.graph import Tensor
    from cutesuper.ir.operators.base import Cotangents


class Reduction(Operator):
    """Combines the elements along ``dim``, which stays with extent 1.

    A reduction is its name, its monoid, PyTorch's names for it, and its derivative. The shape, the
    meaning in a finite field and what kernels do follow from the monoid.

    Attributes:
        method: that of a torch tensor, with ``dim`` and ``keepdim``.
    """

    arity = 1
    attributes: ClassVar[Attributes] = {"dim": ...}
    method: ClassVar[str]

    def check_attributes(self, given: Attributes) -> Attributes:
        """Fill in defaults; refuse PyTorch's ``keepdim`` too."""
        if "keepdim" in given:
            raise OperatorError(
                f"{self.name}(keepdim=...): the dimension stays, with extent 1; leave keepdim out"
            )
        return super().check_attributes(given)

    def shape(self, shapes: list[Shape], attributes: Attributes) -> Shape:
        dim = normal_dim(self.name, shapes[0], attributes["dim"])
        attributes["dim"] = dim
        how = self.reduces
        if shapes[0][dim] == 0 and how is not None and (how.selects or how.places):
            raise ShapeError(f"{show_call(self.name, shapes)}: there is no element along dim={dim} "
                             "to choose; PyTorch refuses it as well")  # fmt: skip
        return tuple(1 if i == dim else d for i, d in enumerate(shapes[0]))

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        return getattr(args[0], self.method)(attributes["dim"], keepdim=True)

    def flops(self, shapes: list[Shape], result: Shape) -> float:
        return float(size(shapes[0]))


@operator
class Sum(Reduction):
    """Sum over a dimension."""

    name = method = "sum"
    reduces = SUM
    torch_names = ("aten.sum.dim_IntList", "aten.sum.default")

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> Cotangents:
        return (dy,)


@operator
class Mean(Reduction):
    """Sum divided by the extent of the whole dimension."""

    name = method = "mean"
    reduces = SUM
    averages = True
    torch_names = ("aten.mean.dim", "aten.mean.default")

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> Cotangents:
        return (g.over_extent(dy, attributes["dim"] - len(y.shape), args[0]),)


@operator
class Max(Reduction):
    """Largest element along a dimension; `Amax` is that along several."""

    name = "max"
    method = "amax"
    reduces = MAX

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> Cotangents:
        """Even shares of the cotangent for elements that share the maximum, as of ``amax``."""
        return (shares(g, args[0], (attributes["dim"],), y, dy),)


def shares(g: Derivation, x: Tensor, dims: Sequence[int], y: Tensor, dy: Tensor) -> Tensor:
    """The cotangent of x from that of its maximum y along some dimensions.

    All elements that are equal to the maximum have the same share.
    """
    largest = g.at_least(x, y)
    return g.mul(largest, g.div(dy, reduce(g.sum, dims, largest)))


@operator
class Prod(Reduction):
    """Product of the elements along a dimension."""

    name = method = "prod"
    reduces = Monoid("prod", "product", "mul", "mul", 1.0)
    torch_names = ("aten.prod.dim_int", "aten.prod.default")

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> Cotangents:
        """The product of the others: of all divided by the element where no other element is 0.
        With 1 in place of zeros; 0 elsewhere."""
        [x], dim = args, attributes["dim"]
        zero = g.mul(g.at_least(x, 0.0), g.at_least(0.0, x))
        others = g.sub(g.sum(zero, dim), zero)
        filled = g.add(x, zero)
        product = g.div(g.prod(filled, dim), filled)
        return (g.mul(dy, g.keep(g.at_least(0.5, others), product)),)


@operator
class ArgMax(Reduction):
    """Place of the largest element along a dimension, int64.
    Of equal ones the first, as PyTorch has it, and of NaN the first where there is any."""

    name = method = "argmax"
    reduces = PLACE

    def shape(self, shapes: list[Shape], attributes: Attributes) -> Shape:
        result = super().shape(shapes, attributes)
        if shapes[0][attributes["dim"]] == 1:
            raise ShapeError(
                f"{show_call(self.name, shapes)}: along dim={attributes['dim']} there is one "
                "element; use graph.argmax(x, dim), or only_place(x), which is 0"
            )
        return result

    def dtype(self, attributes: Attributes) -> DType:
        return int64

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> Cotangents:
        """None: places are integers."""
        return (None,)


@operator
class Matmul(Operator):
    """A[..., M, K] @ B[..., K, N]; leading dimensions broadcast."""

    name = "matmul"
    contracts = True
    arity = 2
    one_type = True
    attributes: ClassVar[Attributes] = {"precision": EXACT}

    def check_attributes(self, given: Attributes) -> Attributes:
        """Leave the default out, so that it is written in one way."""
        full = super().check_attributes(given)
        if full["precision"] not in PRECISIONS:
            raise OperatorError(
                f"matmul(precision={full['precision']!r}): use {' or '.join(map(repr, PRECISIONS))}"
            )
        return {} if full["precision"] == EXACT else full

    def shape(self, shapes: list[Shape], attributes: Attributes) -> Shape:
        a, b = shapes
        call = show_call(self.name, shapes)
        if len(a) < 2 or len(b) < 2:
            raise ShapeError(
                f"{call}: both operands need at least 2 dimensions; give a vector an extent of 1"
            )
        if a[-1] != b[-2]:
            raise ShapeError(
                f"{call}: inner dimensions {a[-1]} and {b[-2]} differ; "
                "transpose one operand if it is stored the other way"
            )
        lead = broadcast(a[:-2], b[:-2])
        if lead is None:
            raise ShapeError(f"{call}: leading dimensions do not broadcast")
        return (*lead, a[-2], b[-1])

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        a, b = (rounded(x, attributes) for x in args)
        return a @ b

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> Cotangents:
        """Cotangents of the operands.
        If the product was summed, dy has one value for each row or column, so the other operand is
        summed and no product with repeated values is made.

        before: dy ``[M, 1]`` repeated to ``[M, N]``, ``dy @ B^T``; after: ``dy * sum(B^T)``.
        """
        if dy.shape[:-2] != y.shape[:-2]:
            dy = g.full(dy, y)
        columns = g.transpose(args[1])
        same = dy.shape[-1] != y.shape[-1]
        first = g.mul(dy, g.sum(columns, -2)) if same else g.matmul(dy, columns, **attributes)
        rows = g.transpose(args[0])
        same = dy.shape[-2] != y.shape[-2]
        return first, g.mul(g.sum(rows, -1), dy) if same else g.matmul(rows, dy, **attributes)

    def flops(self, shapes: list[Shape], result: Shape) -> float:
        return 2.0 * size(result) * size((shapes[0][-1],))
