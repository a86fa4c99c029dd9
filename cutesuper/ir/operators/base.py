"""The operator table: one class per operator, with everything the system knows about it.

A new operator is one class: here, in `pointwise` (of one number), `select` (comparisons and
choices), `reduce` (sums, maxima, products of matrices), `layout` (transpose, concatenation, mask),
`index` (lengths, pages, indices of rows, labels), `composed` or `composite` (made of others),
modules of this package. Facets:

* ``shape``      the shape rule (and the errors a user sees),
* ``reference``  the result of PyTorch, in the element type of its arguments,
* ``symbolic``   the meaning over an abstract algebra: the verifier hands in a finite field, the
                 search hands in normal forms. An operator without algebra is ``a.opaque(...)``,
                 a function about which nothing is known but that equal arguments give equal values,
* ``scalar``     element-wise operators only: the formula on one element, written over a namespace
                 of scalar functions ``m`` that the lowering (CuTe) or a test (Python) supplies,
* ``visible``    masking operators only: the elements that stay, by position, written both for
                 arrays (the verifier, the references) and for traced values (the lowering),
* ``at``         the same as ``scalar``, for masking operators: the formula on one element and its
                 position; it follows from ``visible`` and `Operator.fill`,
* ``numbers``    element-wise operators of integers only: the result as plain numbers,
* ``largest``    operators with an integer operand only: its largest value that matters,
* ``expand``     composite operators only: the same function in primitive operators,
* ``derivative`` cotangents of the operands from that of the result, in operators of the table,
* ``flops``      floating-point operations, for the cost model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from math import inf
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from cutesuper.errors import OperatorError, ShapeError
from cutesuper.ir.arguments import shown
from cutesuper.ir.dims import Shape, broadcast, show_shape, size
from cutesuper.ir.dtypes import DType, int32

if TYPE_CHECKING:
    from cutesuper.ir.derivation import Derivation
    from cutesuper.ir.graph import KernelGraph, Tensor
    from cutesuper.ir.operators.monoid import Monoid

    Cotangents = Sequence[Tensor | None]

Attributes = dict[str, Any]
_Entry = TypeVar("_Entry")


def each(entry: _Entry | tuple[_Entry, ...]) -> tuple[_Entry, ...]:
    """The entries of an attribute that has one, or several as a tuple."""
    return entry if isinstance(entry, tuple) else (entry,)


def one_or_all(entries: tuple[_Entry, ...]) -> _Entry | tuple[_Entry, ...]:
    """The inverse of `each`: an attribute is no tuple where there is one entry."""
    first, *others = entries
    return entries if others else first


#: the greatest float32: kernels compute in float32 for every element type
LARGEST = 3.4028234663852886e38


class Counts(StrEnum):
    """Meaning of the integer operand of an operator."""

    LENGTHS = "lengths"  # of sequences: how many columns are seen
    LIMITS = "limits"  # of sequences or rows: the first column that is seen, or is not
    PAGES = "pages"  # a table: which page of a cache
    ROWS = "indices"  # of rows: which row of a table
    LABELS = "labels"  # of classes: one column


class Operator:
    """Base of all operators; instances are stateless, there is one per name in `TABLE`."""

    name: ClassVar[str]
    arity: ClassVar[int]
    #: attribute name -> default; `...` marks a required attribute
    attributes: ClassVar[Attributes] = {}
    elementwise: ClassVar[bool] = False
    #: operators of PyTorch that compute the same, for the front end: ``aten.exp.default``
    torch_names: ClassVar[tuple[str, ...]] = ()
    #: for reductions over one dimension, which stays with extent 1: how they combine elements
    reduces: ClassVar[Monoid | None] = None
    #: for reductions: the result is divided by the extent of the whole dimension
    averages: ClassVar[bool] = False
    #: the sum, over a dimension that two operands share, of their products
    contracts: ClassVar[bool] = False
    #: the result is the sum of the operands with these signs
    signs: ClassVar[tuple[int, ...] | None] = None
    #: the result is the product of the operands, raised to these powers
    powers: ClassVar[tuple[int, ...] | None] = None
    #: e^x: makes products of sums
    exponential: ClassVar[bool] = False
    #: the operator that computes 1 / result from the same operand, in one step
    reciprocal: ClassVar[str | None] = None
    #: the place of the only element along a dimension, which is stored as an integer
    only_place: ClassVar[bool] = False
    #: changes the order of dimensions and nothing else
    permutes: ClassVar[bool] = False
    #: makes the elements of the last dimension of others of their row: it changes their places, and
    #: signs (see `Operator.places`), or it `scans`
    turns: ClassVar[bool] = False
    #: turns elements into the sum of all up to each, or from each on (``reverse``)
    scans: ClassVar[bool] = False
    #: changes the element type and nothing else
    converts: ClassVar[bool] = False
    #: keeps each element or puts `fill` in its place, by its position along the last two
    #: dimensions; see `visible` and `at`
    masks: ClassVar[bool] = False
    #: for masking operators: -inf (elements that a softmax does not see) or 0
    fill: ClassVar[float] = -inf
    #: for masking operators with fill 0: the column that the integer operand names is all that
    #: stays of a row, so that the sum of the row is one element
    one_column: ClassVar[bool] = False
    #: one operand is a condition that says which elements of another stay
    chooses: ClassVar[bool] = False
    #: turns elements into -inf by a condition (masks do it by position)
    hides: ClassVar[bool] = False
    #: results are above 0 for all arguments in the domain
    above_zero: ClassVar[bool] = False
    #: 0 for many arguments
    flat: ClassVar[bool] = False
    #: 0 at 0, and the verifier knows it (not for `sqrt`, which would loosen all bounds of norms)
    keeps_zero: ClassVar[bool] = False
    #: NaN for many arguments
    partial: ClassVar[bool] = False
    #: and for all those of one sign
    partial_by_sign: ClassVar[bool] = False
    composite: ClassVar[bool] = False
    #: for composite operators: the one number that they make of a row of -inf that is hidden, if
    #: any
    of_hidden: ClassVar[float | None] = None
    #: puts tensors together or takes one apart; `cutesuper.ir.remove_concat` removes it
    cuts: ClassVar[bool] = False
    #: for operators that cut: puts tensors together
    joins: ClassVar[bool] = False
    #: all operands have one element type: products, and operators that put tensors together
    one_type: ClassVar[bool] = False
    #: positions of the integer operands; all others are numbers. Where there may be more than
    #: these, `integers_among` has all
    integers: ClassVar[tuple[int, ...]] = ()
    #: element types of the integer operands
    integer_types: ClassVar[tuple[DType, ...]] = (int32,)
    #: meaning of the integer operands
    counts: ClassVar[Counts | None] = None
    #: positions of the operands that must be inputs of the graph, as the integer operands of any
    #: operator are
    of_inputs: ClassVar[tuple[int, ...]] = ()
    #: for operators that put parts of an input together: the attribute of a load that names the
    #: integers which say where the parts lie
    through: ClassVar[str | None] = None
    #: for such operators: a kernel may store what they put together
    stored: ClassVar[bool] = False
    #: the result is the first operand, an input, with the last operand at the places that integers
    #: name: the kernel that computes the last operand stores it there
    puts: ClassVar[bool] = False

    def integers_among(self, count: int) -> tuple[int, ...]:
        """Positions of the integer operands among so many."""
        return self.integers

    @property
    def sums(self) -> bool:
        """True for the plain sum over a dimension."""
        return self.reduces is not None and self.reduces.linear and not self.averages

    @property
    def selects(self) -> bool:
        """True for reductions to one of the elements, as a maximum is."""
        return self.reduces is not None and self.reduces.selects

    @property
    def commutes(self) -> bool:
        """True for the sum and the product of two operands: their order does not matter."""
        return (1, 1) in (self.signs, self.powers)

    @property
    def adds(self) -> bool:
        """True for the sum of two operands."""
        return self.signs == (1, 1)

    @property
    def subtracts(self) -> bool:
        """True for the difference of two operands."""
        return self.signs == (1, -1)

    @property
    def multiplies(self) -> bool:
        """True for the product of two operands, element by element."""
        return self.powers == (1, 1)

    @property
    def divides(self) -> bool:
        """True for the quotient of two operands."""
        return self.powers == (1, -1)

    @property
    def gathers(self) -> bool:
        """True if it puts parts of an input together, pages or rows, that integers name."""
        return self.through is not None

    def origin(self, dim: int, rank: int) -> tuple[int, int] | None:
        """The operand, and its dimension, that a dimension of the result is.
        Operators that gather only; None if its extent follows from both operands.

        Args:
            dim: of the result.
            rank: number of dimensions of the integers.
        """
        raise NotImplementedError

    def element(self, index: Shape, result: Shape) -> Shape:
        """Shape of the part that one integer names, from those of the integers and of the result.
        Operators that gather only."""
        raise NotImplementedError

    def shape(self, shapes: list[Shape], attributes: Attributes) -> Shape:
        """Shape of the result. Raises ShapeError."""
        raise NotImplementedError

    def dtype(self, attributes: Attributes) -> DType | None:
        """Element type of the result, if the operands do not decide it."""
        return None

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        """The result on torch tensors, in their element type."""
        raise NotImplementedError

    def symbolic(self, a: Any, args: list[Any], attributes: Attributes) -> Any:
        """The result over the algebra ``a`` (add, sub, mul, div, exp, opaque, constant)."""
        raise NotImplementedError

    def scalar(self, m: Any, args: list[Any], attributes: Attributes) -> Any:
        """One element of the result, from elements of the arguments."""
        raise NotImplementedError

    def hidden(self, a: Any, args: list[Any], attributes: Attributes) -> Any:
        """Mask of results that are -inf (element-wise operators whose `symbolic` is opaque).

        Called where an operand may be -inf, and always for operators that hide.

        Args:
            a: the field, with ``gone(x)`` (1 where x is -inf, 0 elsewhere) and ``fails(x)`` (1
                where the condition x does not hold).
            args: values of the operands.
            attributes: the operator's attributes.

        Returns:
            A value that is 0 where results are numbers; None where all are.

        Raises:
            Unbounded: the function is +inf there.
            NoNumber: it is NaN there.
        """
        return None

    def visible(
        self,
        rows: Any,
        columns: Any,
        extents: tuple[Any, Any],
        attributes: Attributes,
        integers: Any = None,
    ) -> Any:
        """Mask of elements that stay, for positions that broadcast (masking operators only).

        It uses comparisons, ``&``, ``+`` and ``-`` only: all arguments are NumPy arrays when a
        program is verified or run as a reference, and traced values in a kernel.

        Args:
            rows: positions along the last dimension but one, in the whole tensor.
            columns: positions along the last dimension, in the whole tensor.
            extents: whole extents of these two dimensions.
            attributes: the operator's attributes.
            integers: its integer operand, if it has one.
        """
        raise NotImplementedError

    def at(
        self,
        m: Any,
        args: list[Any],
        rows: Any,
        columns: Any,
        extents: tuple[Any, Any],
        attributes: Attributes,
    ) -> Any:
        """One element of the result, from elements of the arguments and the element's position.
        Masking operators only: what `scalar` is for element-wise operators.

        Args:
            m: as for `scalar`, with ``where(condition, x, y)`` and ``position(integer)``, which
                limits an integer to what positions are computed in (-1 where it does not fit).
            args: elements or fragments; the integer operand as it is stored.
            rows: position along the label ``rows`` of the block program's operation, in the whole
                tensor, regardless of the axes that split that label; any value if the label is
                None.
            columns: the same along ``columns``: for a fragment along the columns the fragment of
                their positions.
            extents: of the dimensions with these labels, whole; used where rows count from the end.
            attributes: of the operator (a block program's may be passed as they are).
        """
        integers = [m.position(i) for i in args[1:]]
        return m.where(
            self.visible(rows, columns, extents, attributes, *integers), args[0], self.fill
        )

    @property
    def empties(self) -> bool:
        """True if it may hide rows as a whole: see `cutesuper.ir.unseen`."""
        return self.masks and self.fill == -inf and bool(self.integers)

    def places(self, extent: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The source and the sign of each element where a dimension of this extent is turned."""
        raise NotImplementedError

    def numbers(self, integers: NDArray[np.int64], attributes: Attributes) -> NDArray[np.float64]:
        """The result for some integers; NaN counts as a number here."""
        raise NotImplementedError

    def largest(self, shapes: list[Shape], attributes: Attributes, operand: int) -> int:
        """The largest value of an integer operand, of this position, that makes a difference."""
        raise NotImplementedError

    def outside(self, shapes: list[Shape], attributes: Attributes) -> tuple[int, ...]:
        """Integers with which the verifier tries labels: out of range, ignored, or the last one.
        At most 5 for all operators of a program, so that there are enough trials."""
        raise NotImplementedError

    def expand(self, g: KernelGraph, args: list[Tensor], attributes: Attributes) -> Tensor:
        """The same value in primitive operators (composite operators only)."""
        raise NotImplementedError

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> Cotangents:
        """The cotangent of each operand, from that of the result.

        Every tensor here may have more dimensions than the value it belongs to, of extent 1 in
        front (sums keep their dimension), and an extent of 1 where the values are all the same.
        Sums over dimensions along which an operand was broadcast are left to
        `cutesuper.autodiff.gradient`.

        Args:
            g: builds and simplifies.
            args: the operands.
            attributes: the operator's attributes, with defaults.
            y: the result, for formulas that are shorter with it.
            dy: its cotangent.

        Returns:
            One for each operand; None is zero.
        """
        raise NotImplementedError

    def flops(self, shapes: list[Shape], result: Shape) -> float:
        """Floating-point operations; symbolic extents count with their hint."""
        return float(size(result))

    def in_front(self, attributes: Attributes) -> Attributes:
        """Attributes of the same for operands with one more extent of 1 in front.
        Numbers of dimensions that are counted from the front change."""
        if attributes.get("dim", -1) < 0:
            return attributes
        return {**attributes, "dim": attributes["dim"] + 1}

    def check_attributes(self, given: Attributes) -> Attributes:
        """Fill in defaults; refuse unknown or missing attributes."""
        unknown = sorted(set(given) - set(self.attributes))
        if unknown:
            known = ", ".join(self.attributes) or "none"
            raise OperatorError(
                f"{self.name}({', '.join(unknown)}=...): unknown attribute; it has: {known}"
            )
        full = {**self.attributes, **given}
        missing = [k for k, v in full.items() if v is ...]
        if missing:
            raise OperatorError(f"{self.name}: attribute {', '.join(missing)} is required")
        return full


class Items(tuple[tuple[str, Any], ...]):
    """Attributes as sorted items, for comparing: equal if they are written alike.

    To Python 0.0 equals -0.0, and 1 equals True, but programs with one are not programs with the
    other.
    """

    _text: str

    def __new__(cls, attributes: Attributes) -> Items:
        made = super().__new__(cls, sorted(attributes.items()))
        made._text = tuple.__repr__(made)
        return made

    def __getnewargs__(self) -> tuple[Attributes]:
        return (dict(self),)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Items) and self._text == other._text

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._text)


def show_call(name: str, shapes: list[Shape]) -> str:
    """A call as quoted in messages: ``matmul([16, 4096], [4096, 6144])``."""
    return f"{name}({', '.join(show_shape(s) for s in shapes)})"


def torch_module() -> Any:
    """PyTorch, imported only when a reference runs: the search does not need it."""
    import torch

    return torch


class _Table(dict[str, "Operator"]):
    """Operators by name.

    Attributes:
        changes: number of times that a name got another operator, or lost the one it had. Objects
            made from operators compare it, to find out that they have to check again.
    """

    changes = 0

    def __setitem__(self, name: str, new: Operator) -> None:
        self.changes += name in self and self[name] is not new
        super().__setitem__(name, new)

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        self.changes += 1


TABLE = _Table()
_Class = TypeVar("_Class", bound=Operator)


def operator(cls: type[_Class]) -> type[_Class]:
    """Class decorator: enter the operator into `TABLE` under its name."""
    TABLE[cls.name] = cls()
    return cls


def enter_formulas(
    base: type[_Class], name: str, doc: str, formulas: Mapping[str, Any], **facets: Any
) -> type[_Class]:
    """Enter an operator that is made of functions.

    Args:
        base: its class, which calls the functions.
        name: of the operator.
        doc: what it computes.
        formulas: the functions by name; None is left to ``base``.
        facets: further attributes of the class.
    """
    made = {k: staticmethod(f) for k, f in formulas.items() if f is not None}
    written = next(f.__module__ for f in formulas.values() if f is not None)
    # code that is run without a name of its own has none
    place = {"__doc__": doc, "__module__": written or "__main__"}
    cls: Any = type(name.capitalize(), (base,), {**made, **place, "name": name, **facets})
    return operator(cls)


def lookup(name: str) -> Operator:
    """The operator called ``name``. Raises OperatorError with the nearest known names."""
    if isinstance(name, str) and name in TABLE:
        return TABLE[name]
    import difflib

    near = difflib.get_close_matches(str(name), TABLE, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(sorted(TABLE))}"
    raise OperatorError(f"operator {shown(name)}: does not exist; {hint}")


#: names of the leaves of a graph: its structure, as load and store are that of a block program
INPUT, CONSTANT = "input", "constant"


def facets(kind: str) -> Operator:
    """The operator called ``kind``; one without any facet for loads, stores and ends of axes."""
    return TABLE.get(kind, _STRUCTURE)


_STRUCTURE = Operator()

# --------------------------------------------------------------------------------------- leaves


@operator
class Input(Operator):
    """A tensor that the caller supplies."""

    name = INPUT
    arity = 0


@operator
class Constant(Operator):
    """A scalar known when the graph is built (shape ``()``)."""

    name = CONSTANT
    arity = 0
    attributes: ClassVar[Attributes] = {"value": ...}
    elementwise = True

    def shape(self, shapes: list[Shape], attributes: Attributes) -> Shape:
        return ()

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        # zero dimensions: PyTorch then promotes to the other operand's element type
        # (made by an operator, which other programs can trace)
        return torch_module().full((), attributes["value"], dtype=torch_module().float64)

    def symbolic(self, a: Any, args: list[Any], attributes: Attributes) -> Any:
        return a.constant(attributes["value"])

    def scalar(self, m: Any, args: list[Any], attributes: Attributes) -> Any:
        return attributes["value"]

    def check_attributes(self, given: Attributes) -> Attributes:
        full = super().check_attributes(given)
        value = full["value"]
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not abs(value) <= LARGEST:
            raise OperatorError(f"constant({value!r}): must be a finite number in float32's range")
        return {"value": float(value)}


# ---------------------------------------------------------------------------------- element-wise


class Elementwise(Operator):
    """Works element by element; operands broadcast."""

    elementwise = True

    def shape(self, shapes: list[Shape], attributes: Attributes) -> Shape:
        result: Shape = ()
        for s in shapes:
            merged = broadcast(result, s)
            if merged is None:
                raise ShapeError(
                    f"{show_call(self.name, shapes)}: shapes do not broadcast; extents must be "
                    "equal or 1, counted from the last dimension"
                )
            result = merged
        return result


class _Binary(Elementwise):
    arity = 2


def opaque(name: str, a: Any, args: list[Any], attributes: Attributes) -> Any:
    """A function of one argument without algebra; the attributes are part of its name."""
    # sorted: attributes come from graphs, block programs and files in any order
    tag = ",".join(f"{k}={v!r}" for k, v in sorted(attributes.items()))
    return a.opaque(f"{name}({tag})" if tag else name, args[0])


@operator
class Add(_Binary):
    """The sum of two operands."""

    name = "add"
    signs = (1, 1)

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        return args[0] + args[1]

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> Cotangents:
        return dy, dy

    def symbolic(self, a: Any, args: list[Any], attributes: Attributes) -> Any:
        return a.add(*args)

    def scalar(self, m: Any, args: list[Any], attributes: Attributes) -> Any:
        return args[0] + args[1]


@operator
class Sub(_Binary):
    """The difference of two operands."""

    name = "sub"
    signs = (1, -1)

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        return args[0] - args[1]

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> Cotangents:
        return dy, g.mul(dy, -1.0)

    def symbolic(self, a: Any, args: list[Any], attributes: Attributes) -> Any:
        return a.sub(*args)

    def scalar(self, m: Any, args: list[Any], attributes: Attributes) -> Any:
        return args[0] - args[1]


@operator
class Mul(_Binary):
    """The product of two operands, element by element."""

    name = "mul"
    powers = (1, 1)

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        return args[0] * args[1]

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> Cotangents:
        return g.mul(dy, args[1]), g.mul(dy, args[0])

    def symbolic(self, a: Any, args: list[Any], attributes: Attributes) -> Any:
        return a.mul(*args)

    def scalar(self, m: Any, args: list[Any], attributes: Attributes) -> Any:
        return args[0] * args[1]


@operator
class Div(_Binary):
    """The quotient of two operands."""

    name = "div"
    powers = (1, -1)

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        return args[0] / args[1]

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> Cotangents:
        da = g.div(dy, args[1])
        return da, g.mul(g.mul(da, y), -1.0)

    def symbolic(self, a: Any, args: list[Any], attributes: Attributes) -> Any:
        return a.div(*args)

    def scalar(self, m: Any, args: list[Any], attributes: Attributes) -> Any:
        return m.div(args[0], args[1])


def normal_dim(name: str, shape: Shape, dim: Any) -> int:
    """``dim`` counted from the front. Raises ShapeError when the shape has no such dimension."""
    if isinstance(dim, bool) or not isinstance(dim, int) or not -len(shape) <= dim < len(shape):
        use = f"use {-len(shape)}..{len(shape) - 1}" if shape else "the operand has none"
        raise ShapeError(f"{name}({show_shape(shape)}, dim={dim!r}): no such dimension; {use}")
    return dim % len(shape)
