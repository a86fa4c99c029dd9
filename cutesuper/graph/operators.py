"""The operator table: one class per operator, with everything the system knows about it.

A new operator is one class here. Its facets:

* ``shape``      the shape rule (and the errors a user sees),
* ``reference``  what PyTorch computes, in the element type of its arguments,
* ``symbolic``   the meaning over an abstract algebra: the verifier hands in a finite field, the
                 search hands in normal forms. An operator without algebra is ``a.opaque(...)``,
                 a function about which nothing is known but that equal arguments give equal values,
* ``scalar``     element-wise operators only: the formula on one element, written over a namespace
                 of scalar functions ``m`` that the lowering (CuTe) or a test (Python) supplies,
* ``expand``     composite operators only: the same thing in primitive operators,
* ``flops``      floating-point operations, for the cost model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from cutesuper.errors import OperatorError, ShapeError
from cutesuper.graph.dims import Dim, Shape, broadcast, show_shape, size

if TYPE_CHECKING:
    from cutesuper.graph.kernel import KernelGraph, Tensor

Attributes = dict[str, Any]

#: the greatest float32: kernels compute in float32 whatever the element type
LARGEST = 3.4028234663852886e38


class Operator:
    """Base of all operators; instances are stateless, there is one per name in `TABLE`."""

    name: ClassVar[str]
    arity: ClassVar[int]
    #: attribute name -> default; `...` marks a required attribute
    attributes: ClassVar[Attributes] = {}
    elementwise: ClassVar[bool] = False
    #: "sum", "mean" or "max" for reductions over one dimension that stays with extent 1
    reduces: ClassVar[str | None] = None
    composite: ClassVar[bool] = False

    def shape(self, shapes: list[Shape], attributes: Attributes) -> Shape:
        """Shape of the result. Raises ShapeError."""
        raise NotImplementedError

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        """The result on torch tensors, in their element type."""
        raise NotImplementedError

    def symbolic(self, a: Any, args: list[Any], attributes: Attributes) -> Any:
        """The result over the algebra ``a`` (add, sub, mul, div, exp, opaque, constant)."""
        raise NotImplementedError

    def scalar(self, m: Any, args: list[Any], attributes: Attributes) -> Any:
        """One element of the result, from elements of the arguments."""
        raise NotImplementedError

    def expand(self, g: KernelGraph, args: list[Tensor], attributes: Attributes) -> Tensor:
        """The same value in primitive operators (composite operators only)."""
        raise NotImplementedError

    def flops(self, shapes: list[Shape], result: Shape) -> float:
        """Floating-point operations; symbolic extents count with their hint."""
        return float(size(result))

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


def show_call(name: str, shapes: list[Shape]) -> str:
    """``matmul([16, 4096], [4096, 6144])``: how a call is quoted in messages."""
    return f"{name}({', '.join(show_shape(s) for s in shapes)})"


def _torch() -> Any:
    import torch

    return torch


TABLE: dict[str, Operator] = {}


def operator(cls: type[Operator]) -> type[Operator]:
    """Class decorator: enter the operator into `TABLE` under its name."""
    TABLE[cls.name] = cls()
    return cls


def lookup(name: str) -> Operator:
    """The operator called ``name``. Raises OperatorError with the nearest known names."""
    if name in TABLE:
        return TABLE[name]
    import difflib

    near = difflib.get_close_matches(str(name), TABLE, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(sorted(TABLE))}"
    raise OperatorError(f"operator {name!r}: does not exist; {hint}")


# --------------------------------------------------------------------------------------- leaves


@operator
class Input(Operator):
    """A tensor that the caller supplies."""

    name = "input"
    arity = 0


@operator
class Constant(Operator):
    """A scalar known when the graph is built (shape ``()``)."""

    name = "constant"
    arity = 0
    attributes: ClassVar[Attributes] = {"value": ...}
    elementwise = True

    def shape(self, shapes: list[Shape], attributes: Attributes) -> Shape:
        return ()

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        # zero dimensions: PyTorch then promotes to the other operand's element type
        return _torch().tensor(attributes["value"], dtype=_torch().float64)

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


class _Elementwise(Operator):
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


class _Binary(_Elementwise):
    arity = 2


class _Unary(_Elementwise):
    arity = 1

    def symbolic(self, a: Any, args: list[Any], attributes: Attributes) -> Any:
        """Uninterpreted unless a subclass knows better; the attributes are part of the name."""
        # sorted: attributes come from graphs, block programs and files in any order
        tag = ",".join(f"{k}={v!r}" for k, v in sorted(attributes.items()))
        return a.opaque(f"{self.name}({tag})" if tag else self.name, args[0])


@operator
class Add(_Binary):
    name = "add"

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        return args[0] + args[1]

    def symbolic(self, a: Any, args: list[Any], attributes: Attributes) -> Any:
        return a.add(*args)

    def scalar(self, m: Any, args: list[Any], attributes: Attributes) -> Any:
        return args[0] + args[1]


@operator
class Sub(_Binary):
    name = "sub"

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        return args[0] - args[1]

    def symbolic(self, a: Any, args: list[Any], attributes: Attributes) -> Any:
        return a.sub(*args)

    def scalar(self, m: Any, args: list[Any], attributes: Attributes) -> Any:
        return args[0] - args[1]


@operator
class Mul(_Binary):
    name = "mul"

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        return args[0] * args[1]

    def symbolic(self, a: Any, args: list[Any], attributes: Attributes) -> Any:
        return a.mul(*args)

    def scalar(self, m: Any, args: list[Any], attributes: Attributes) -> Any:
        return args[0] * args[1]


@operator
class Div(_Binary):
    name = "div"

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        return args[0] / args[1]

    def symbolic(self, a: Any, args: list[Any], attributes: Attributes) -> Any:
        return a.div(*args)

    def scalar(self, m: Any, args: list[Any], attributes: Attributes) -> Any:
        return m.div(args[0], args[1])


@operator
class Exp(_Unary):
    name = "exp"

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        return args[0].exp()

    def symbolic(self, a: Any, args: list[Any], attributes: Attributes) -> Any:
        return a.exp(args[0])

    def scalar(self, m: Any, args: list[Any], attributes: Attributes) -> Any:
        return m.exp(args[0])


@operator
class Sqrt(_Unary):
    name = "sqrt"

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        return args[0].sqrt()

    def scalar(self, m: Any, args: list[Any], attributes: Attributes) -> Any:
        return m.sqrt(args[0])


@operator
class Rsqrt(_Unary):
    """1 / sqrt(x): defined through `Sqrt` so that dividing by a root and this are one thing."""

    name = "rsqrt"

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        return args[0].rsqrt()

    def symbolic(self, a: Any, args: list[Any], attributes: Attributes) -> Any:
        return a.div(a.constant(1.0), a.opaque("sqrt", args[0]))

    def scalar(self, m: Any, args: list[Any], attributes: Attributes) -> Any:
        return m.rsqrt(args[0])


@operator
class Square(_Unary):
    name = "square"

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        return args[0] * args[0]

    def symbolic(self, a: Any, args: list[Any], attributes: Attributes) -> Any:
        return a.mul(args[0], args[0])

    def scalar(self, m: Any, args: list[Any], attributes: Attributes) -> Any:
        return args[0] * args[0]


@operator
class Silu(_Unary):
    name = "silu"

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        return _torch().nn.functional.silu(args[0])

    def scalar(self, m: Any, args: list[Any], attributes: Attributes) -> Any:
        return args[0] * m.sigmoid(args[0])


@operator
class Gelu(_Unary):
    """x Phi(x) with the error function, as PyTorch's default (approximate='none')."""

    name = "gelu"

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        return _torch().nn.functional.gelu(args[0])

    def scalar(self, m: Any, args: list[Any], attributes: Attributes) -> Any:
        return 0.5 * args[0] * (1.0 + m.erf(args[0] * 0.7071067811865476))


@operator
class Relu(_Unary):
    name = "relu"

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        return _torch().relu(args[0])

    def scalar(self, m: Any, args: list[Any], attributes: Attributes) -> Any:
        return m.maximum(args[0], 0.0)


@operator
class Sigmoid(_Unary):
    name = "sigmoid"

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        return _torch().sigmoid(args[0])

    def scalar(self, m: Any, args: list[Any], attributes: Attributes) -> Any:
        return m.sigmoid(args[0])


@operator
class Tanh(_Unary):
    name = "tanh"

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        return _torch().tanh(args[0])

    def scalar(self, m: Any, args: list[Any], attributes: Attributes) -> Any:
        return m.tanh(args[0])


@operator
class Clamp(_Unary):
    name = "clamp"
    attributes: ClassVar[Attributes] = {"min": ..., "max": ...}

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        return args[0].clamp(attributes["min"], attributes["max"])

    def scalar(self, m: Any, args: list[Any], attributes: Attributes) -> Any:
        return m.minimum(m.maximum(args[0], attributes["min"]), attributes["max"])

    def check_attributes(self, given: Attributes) -> Attributes:
        full = super().check_attributes(given)
        try:
            low, high = float(full["min"]), float(full["max"])
        except (TypeError, ValueError, OverflowError):
            raise OperatorError(f"clamp(min={full['min']!r}, max={full['max']!r}): "
                                "both must be numbers") from None
        if not low <= high:
            raise OperatorError(f"clamp(min={low:g}, max={high:g}): min must not exceed max")
        return {"min": low, "max": high}


# ------------------------------------------------------------------- reductions and contractions


class _Reduction(Operator):
    """Reduces ``dim``, which stays with extent 1."""

    arity = 1
    attributes: ClassVar[Attributes] = {"dim": ...}

    def shape(self, shapes: list[Shape], attributes: Attributes) -> Shape:
        dim = normal_dim(self.name, shapes[0], attributes["dim"])
        attributes["dim"] = dim
        return tuple(1 if i == dim else d for i, d in enumerate(shapes[0]))

    def flops(self, shapes: list[Shape], result: Shape) -> float:
        return float(size(shapes[0]))


@operator
class Sum(_Reduction):
    name = "sum"
    reduces = "sum"

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        return args[0].sum(attributes["dim"], keepdim=True)


@operator
class Mean(_Reduction):
    """Sum divided by the extent of the whole dimension."""

    name = "mean"
    reduces = "mean"

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        return args[0].mean(attributes["dim"], keepdim=True)


@operator
class Max(_Reduction):
    name = "max"
    reduces = "max"

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        return args[0].amax(attributes["dim"], keepdim=True)


@operator
class Matmul(Operator):
    """A[..., M, K] @ B[..., K, N]; leading dimensions broadcast."""

    name = "matmul"
    arity = 2

    def shape(self, shapes: list[Shape], attributes: Attributes) -> Shape:
        a, b = shapes
        call = show_call(self.name, shapes)
        if len(a) < 2 or len(b) < 2:
            raise ShapeError(f"{call}: both operands need at least 2 dimensions; "
                             "give a vector an extent of 1")
        if a[-1] != b[-2]:
            raise ShapeError(f"{call}: inner dimensions {a[-1]} and {b[-2]} differ; "
                             "transpose one operand if it is stored the other way")
        lead = broadcast(a[:-2], b[:-2])
        if lead is None:
            raise ShapeError(f"{call}: leading dimensions do not broadcast")
        return (*lead, a[-2], b[-1])

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        return args[0] @ args[1]

    def flops(self, shapes: list[Shape], result: Shape) -> float:
        return 2.0 * size(result) * size((shapes[0][-1],))


@operator
class Transpose(Operator):
    """Permutes dimensions; ``dims`` is a permutation (default: the last two change places)."""

    name = "transpose"
    arity = 1
    attributes: ClassVar[Attributes] = {"dims": None}

    def shape(self, shapes: list[Shape], attributes: Attributes) -> Shape:
        rank = len(shapes[0])
        dims = attributes["dims"]
        if dims is None:
            if rank < 2:
                raise ShapeError(f"{show_call(self.name, shapes)}: needs at least 2 dimensions")
            dims = (*range(rank - 2), rank - 1, rank - 2)
        if not isinstance(dims, list | tuple):
            raise ShapeError(f"transpose(dims={dims!r}): must be a permutation of dimensions")
        dims = tuple(d + rank if isinstance(d, int) and d < 0 else d for d in dims)
        if sorted(dims, key=str) != sorted(range(rank), key=str):
            raise ShapeError(f"{show_call(self.name, shapes)}: dims={list(dims)} is not a "
                             f"permutation of 0..{rank - 1}")
        attributes["dims"] = dims
        return tuple(shapes[0][d] for d in dims)

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        return args[0].permute(attributes["dims"])

    def flops(self, shapes: list[Shape], result: Shape) -> float:
        return 0.0


# ------------------------------------------------------------------------------------ composites


@operator
class RmsNorm(Operator):
    """x / sqrt(mean(x^2, last dim) + eps), times a weight if there is one (arXiv:1910.07467)."""

    name = "rms_norm"
    arity = -1  # x, or x and weight
    attributes: ClassVar[Attributes] = {"eps": 1e-6}
    composite = True

    def check_attributes(self, given: Attributes) -> Attributes:
        full = super().check_attributes(given)
        eps = full["eps"]
        if not isinstance(eps, int | float) or not 0 <= eps < 1:
            raise OperatorError(f"rms_norm(eps={eps!r}): must be a number in [0, 1)")
        return {"eps": float(eps)}

    def shape(self, shapes: list[Shape], attributes: Attributes) -> Shape:
        call = show_call(self.name, shapes)
        if len(shapes) not in (1, 2):
            raise ShapeError(f"{call}: takes x, or x and a weight")
        if not shapes[0]:
            raise ShapeError(f"{call}: x needs at least one dimension")
        if len(shapes) == 2 and shapes[1] != shapes[0][-1:]:
            raise ShapeError(f"{call}: the weight must have shape [{shapes[0][-1]}], "
                             "the normalized dimension")
        return shapes[0]

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        x = args[0]
        weight = args[1] if len(args) == 2 else None
        return _torch().nn.functional.rms_norm(x, x.shape[-1:], weight, attributes["eps"])

    def expand(self, g: KernelGraph, args: list[Tensor], attributes: Attributes) -> Tensor:
        x = args[0]
        mean = g.mean(g.square(x), -1)
        norm = g.sqrt(g.add(mean, attributes["eps"]) if attributes["eps"] else mean)
        y = g.div(x, norm)
        return g.mul(y, args[1]) if len(args) == 2 else y

    def flops(self, shapes: list[Shape], result: Shape) -> float:
        return 4.0 * size(result)


@operator
class Softmax(Operator):
    """exp(x - max x) / sum exp(x - max x) along ``dim``."""

    name = "softmax"
    arity = 1
    attributes: ClassVar[Attributes] = {"dim": -1}
    composite = True

    def shape(self, shapes: list[Shape], attributes: Attributes) -> Shape:
        attributes["dim"] = normal_dim(self.name, shapes[0], attributes["dim"])
        return shapes[0]

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        return args[0].softmax(attributes["dim"])

    def expand(self, g: KernelGraph, args: list[Tensor], attributes: Attributes) -> Tensor:
        dim = attributes["dim"]
        e = g.exp(g.sub(args[0], g.max(args[0], dim)))
        return g.div(e, g.sum(e, dim))

    def flops(self, shapes: list[Shape], result: Shape) -> float:
        return 5.0 * size(result)


def normal_dim(name: str, shape: Shape, dim: Any) -> int:
    """``dim`` counted from the front. Raises ShapeError when the shape has no such dimension."""
    if isinstance(dim, bool) or not isinstance(dim, int) or not -len(shape) <= dim < len(shape):
        use = f"use {-len(shape)}..{len(shape) - 1}" if shape else "the operand has none"
        raise ShapeError(f"{name}({show_shape(shape)}, dim={dim!r}): no such dimension; {use}")
    return dim % len(shape)


__all__ = ["TABLE", "Attributes", "Dim", "Operator", "lookup", "normal_dim", "operator"]
