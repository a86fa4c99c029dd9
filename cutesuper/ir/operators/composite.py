"""Operators composed of other operators; see `cutesuper.ir.operators.base`."""

from __future__ import annotations

from functools import reduce
from math import inf
from typing import TYPE_CHECKING, Any, ClassVar

from cutesuper.errors import OperatorError, ShapeError
from cutesuper.ir.dims import Shape, Symbol, broadcast, extent, size
from cutesuper.ir.operators.base import (
    LARGEST,
    Attributes,
    Counts,
    Operator,
    normal_dim,
    operator,
    show_call,
    torch_module,
)
from cutesuper.ir.operators.index import LabelWeight, LengthMask, Pick
from cutesuper.ir.operators.reduce import Max, shares

if TYPE_CHECKING:
    from cutesuper.ir.derivation import Derivation
    from cutesuper.ir.graph import KernelGraph, Tensor


@operator
class RmsNorm(Operator):
    """x / sqrt(mean(x^2, last dim) + eps), times an optional weight (arXiv:1910.07467)."""

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
            raise ShapeError(
                f"{call}: the weight must have shape [{shapes[0][-1]}], the normalized dimension"
            )
        return shapes[0]

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        import torch

        x, eps = args[0], attributes["eps"]
        if len(args) == 2 and args[1].dtype != x.dtype:  # PyTorch warns, and computes this
            return torch.nn.functional.rms_norm(x, x.shape[-1:], None, eps) * args[1]
        weight = args[1] if len(args) == 2 else None
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)

    def expand(self, g: KernelGraph, args: list[Tensor], attributes: Attributes) -> Tensor:
        x = args[0]
        mean = g.mean(g.square(x), -1)
        norm = g.sqrt(g.add(mean, attributes["eps"]) if attributes["eps"] else mean)
        y = g.div(x, norm)
        return g.mul(y, args[1]) if len(args) == 2 else y

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> list[Tensor]:
        """With r = 1 / sqrt(mean x^2 + eps), x^ = x r: dx = r (w dy - x^ mean(x^ w dy)).

        This follows from d r / d x = -r^3 x / n. dw = dy x^.
        """
        x = args[0]
        rstd = g.named(g.rsqrt(g.add(g.mean(g.square(x), -1), attributes["eps"])), "rstd")
        normal = g.mul(x, rstd)
        scaled = g.mul(dy, args[1]) if len(args) == 2 else dy
        shared = g.mean(g.mul(normal, scaled), -1)
        dx = g.mul(g.sub(scaled, g.mul(normal, shared)), rstd)
        return [dx, g.mul(dy, normal)][: len(args)]

    def flops(self, shapes: list[Shape], result: Shape) -> float:
        return 4.0 * size(result)


@operator
class LayerNorm(Operator):
    """(x - mean x) / sqrt(mean (x - mean x)^2 + eps) over the last dimension.
    With an optional weight and bias (arXiv:1607.06450)."""

    name = "layer_norm"
    arity = -1  # x; x and weight; x, weight and bias
    attributes: ClassVar[Attributes] = {"eps": 1e-5}
    composite = True

    def check_attributes(self, given: Attributes) -> Attributes:
        full = super().check_attributes(given)
        eps = full["eps"]
        if not isinstance(eps, int | float) or not 0 <= eps <= LARGEST:
            raise OperatorError(f"layer_norm(eps={eps!r}): must be a number of at least 0")
        return {"eps": float(eps)}

    def shape(self, shapes: list[Shape], attributes: Attributes) -> Shape:
        call = show_call(self.name, shapes)
        if len(shapes) not in (1, 2, 3):
            raise ShapeError(f"{call}: takes x, x and a weight, or x, a weight and a bias")
        if not shapes[0]:
            raise ShapeError(f"{call}: x needs at least one dimension")
        if any(s != shapes[0][-1:] for s in shapes[1:]):
            raise ShapeError(
                f"{call}: weight and bias must have shape [{shapes[0][-1]}], the "
                "normalized dimension"
            )
        return shapes[0]

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        import torch

        x, eps = args[0], attributes["eps"]
        if any(a.dtype != x.dtype for a in args):  # PyTorch takes one type, or float32 beside x
            y = torch.nn.functional.layer_norm(x, x.shape[-1:], None, None, eps) * args[1]
            return y + args[2] if len(args) == 3 else y
        return torch.nn.functional.layer_norm(x, x.shape[-1:], *args[1:], eps=eps)

    def expand(self, g: KernelGraph, args: list[Tensor], attributes: Attributes) -> Tensor:
        centred = g.sub(args[0], g.mean(args[0], -1))
        variance = g.mean(g.square(centred), -1)
        eps = attributes["eps"]
        y = g.div(centred, g.sqrt(g.add(variance, eps) if eps else variance))
        y = g.mul(y, args[1]) if len(args) > 1 else y
        return g.add(y, args[2]) if len(args) > 2 else y

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> list[Tensor]:
        """The gradients dx = r (w dy - mean(w dy) - x^ mean(x^ w dy)), dw = dy x^, db = dy.
        Here x^ = (x - mean) r and r = 1 / sqrt(var + eps); both means are taken at once, because
        the mean of x^ is 0."""
        x = args[0]
        centred = g.sub(x, g.named(g.mean(x, -1), "mean"))
        variance = g.mean(g.square(centred), -1)
        rstd = g.named(g.rsqrt(g.add(variance, attributes["eps"])), "rstd")
        normal = g.mul(centred, rstd)
        scaled = g.mul(dy, args[1]) if len(args) > 1 else dy
        shared = g.mul(normal, g.mean(g.mul(normal, scaled), -1))
        dx = g.mul(g.sub(g.sub(scaled, g.mean(scaled, -1)), shared), rstd)
        return [dx, g.mul(dy, normal), g.full(dy, y)][: len(args)]

    def flops(self, shapes: list[Shape], result: Shape) -> float:
        return 7.0 * size(result)


@operator
class Softmax(Operator):
    """exp(x - max x) / sum exp(x - max x) along ``dim``.

    A row that the graph hides as a whole is 0, as in attention (PyTorch's softmax gives NaN); one
    that is -inf because an input is, is NaN.
    """

    name = "softmax"
    arity = 1
    attributes: ClassVar[Attributes] = {"dim": -1}
    composite = True
    of_hidden = 0.0

    def shape(self, shapes: list[Shape], attributes: Attributes) -> Shape:
        attributes["dim"] = normal_dim(self.name, shapes[0], attributes["dim"])
        return shapes[0]

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        return args[0].softmax(attributes["dim"])

    def expand(self, g: KernelGraph, args: list[Tensor], attributes: Attributes) -> Tensor:
        dim = attributes["dim"]
        e = g.exp(g.sub(args[0], g.max(args[0], dim)))
        return g.div(e, g.sum(e, dim))

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> list[Tensor]:
        """dx = y (dy - sum(y dy)), since d y_i / d x_j = y_i (1[i = j] - y_j)."""
        y = g.again(y)
        shared = g.sum(g.mul(y, dy), attributes["dim"] - len(y.shape))
        return [g.mul(y, g.sub(dy, shared))]

    def flops(self, shapes: list[Shape], result: Shape) -> float:
        return 5.0 * size(result)


@operator
class Amax(Operator):
    """Largest element along several dimensions, which stay with extent 1.

    It is a maximum of maxima, whose gradient all elements that are equal to it share evenly, as in
    PyTorch.
    """

    name = "amax"
    arity = 1
    attributes: ClassVar[Attributes] = {"dims": ...}
    composite = True

    def shape(self, shapes: list[Shape], attributes: Attributes) -> Shape:
        dims = attributes["dims"]
        if not isinstance(dims, list | tuple):
            raise ShapeError(f"amax(dims={dims!r}): must be a list of dimensions")
        dims = attributes["dims"] = tuple(normal_dim(self.name, shapes[0], d) for d in dims)
        if not dims or len(set(dims)) < len(dims):
            raise ShapeError(
                f"{show_call(self.name, shapes)}: dims={list(dims)} must name at least one "
                "dimension, and each once"
            )
        for dim in dims:
            Max().shape(shapes, {"dim": dim})
        return tuple(1 if i in dims else n for i, n in enumerate(shapes[0]))

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        return args[0].amax(attributes["dims"], keepdim=True)

    def expand(self, g: KernelGraph, args: list[Tensor], attributes: Attributes) -> Tensor:
        return reduce(g.max, attributes["dims"], args[0])

    def in_front(self, attributes: Attributes) -> Attributes:
        return {"dims": tuple(d + 1 for d in attributes["dims"])}

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> list[Tensor]:
        return [shares(g, args[0], attributes["dims"], y, dy)]

    def flops(self, shapes: list[Shape], result: Shape) -> float:
        return float(size(shapes[0]))


@operator
class LogSumExp(Operator):
    """log(sum exp x) along ``dim``, which stays with extent 1: max x + log(sum exp(x - max x)).

    The result is -inf where all of x is -inf.
    """

    name = "logsumexp"
    arity = 1
    attributes: ClassVar[Attributes] = {"dim": -1}
    composite = True
    of_hidden = -inf

    def shape(self, shapes: list[Shape], attributes: Attributes) -> Shape:
        dim = attributes["dim"] = normal_dim(self.name, shapes[0], attributes["dim"])
        return (*shapes[0][:dim], 1, *shapes[0][dim + 1 :])

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        return args[0].logsumexp(attributes["dim"], keepdim=True)

    def expand(self, g: KernelGraph, args: list[Tensor], attributes: Attributes) -> Tensor:
        """Return an infinite maximum as the result: inf - inf would be NaN.
        (The same is done if its square overflows: the logarithm that is left out is lost beside
        it.)"""
        dim = attributes["dim"]
        largest = g.max(args[0], dim)
        rest = g.log(g.sum(g.exp(g.sub(args[0], largest)), dim))
        return g.add(g.keep(g.apply("finite", largest), rest), largest)

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> list[Tensor]:
        """dx = dy exp(x - y): y is at least the maximum, so nothing overflows."""
        return [g.mul(dy, g.exp(g.sub(args[0], g.named(y, "lse"))))]

    def flops(self, shapes: list[Shape], result: Shape) -> float:
        return 4.0 * size(shapes[0])


@operator
class LogSoftmax(Operator):
    """x - logsumexp x along ``dim``.

    A row that the graph hides as a whole is -inf, the logarithm of its softmax (PyTorch gives NaN).
    """

    name = "log_softmax"
    arity = 1
    attributes: ClassVar[Attributes] = {"dim": -1}
    composite = True
    of_hidden = -inf

    def shape(self, shapes: list[Shape], attributes: Attributes) -> Shape:
        attributes["dim"] = normal_dim(self.name, shapes[0], attributes["dim"])
        return shapes[0]

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        return args[0].log_softmax(attributes["dim"])

    def expand(self, g: KernelGraph, args: list[Tensor], attributes: Attributes) -> Tensor:
        """The maximum is subtracted first: log-sum-exps of 10,000 are off by 0.0005."""
        dim = attributes["dim"]
        shifted = g.sub(args[0], g.max(args[0], dim))
        return g.sub(shifted, g.log(g.sum(g.exp(shifted), dim)))

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> list[Tensor]:
        """dx = dy - exp(y) sum(dy), since d y_i / d x_j = 1[i = j] - exp(y_j)."""
        dim = attributes["dim"] - len(y.shape)
        return [g.sub(dy, g.mul(g.exp(y), g.sum(g.full(dy, y), dim)))]

    def flops(self, shapes: list[Shape], result: Shape) -> float:
        return 5.0 * size(result)


@operator
class CrossEntropy(Operator):
    """logsumexp(x) - x[label] of each row: x[..., M, N], labels[..., M, 1] -> [..., M, 1].

    Rows whose label is ``ignore_index`` are 0, rows whose label is otherwise not a column are NaN
    (`LabelWeight`).
    """

    name = "cross_entropy"
    arity = 2
    attributes: ClassVar[Attributes] = {"ignore_index": -100}
    integers: ClassVar[tuple[int, ...]] = (1,)
    integer_types = Pick.integer_types
    counts = Counts.LABELS
    composite = True

    def check_attributes(self, given: Attributes) -> Attributes:
        full = super().check_attributes(given)
        LabelWeight().check_attributes({**full, "classes": 1})
        return full

    def shape(self, shapes: list[Shape], attributes: Attributes) -> Shape:
        x, labels = shapes
        if len(x) < 2 or labels != (*x[:-1], 1):
            raise ShapeError(
                f"{show_call(self.name, shapes)}: takes [rows, classes], and one "
                "label for each row, [rows, 1]"
            )
        if isinstance(x[-1], Symbol):
            raise ShapeError(
                f"{show_call(self.name, shapes)}: the number of classes has to be "
                "known before the call"
            )
        return labels

    def largest(self, shapes: list[Shape], attributes: Attributes, operand: int) -> int:
        return extent(shapes[0][-1]) - 1

    def outside(self, shapes: list[Shape], attributes: Attributes) -> tuple[int, ...]:
        return (attributes["ignore_index"], -1, extent(shapes[0][-1]))

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        x, labels = args
        n = x.shape[-1]
        weight = LabelWeight().numbers(labels.cpu().numpy(), {"classes": n, **attributes})
        losses = -x.log_softmax(-1).gather(-1, labels.long().clamp(0, n - 1))
        return losses * torch_module().from_numpy(weight).to(losses)

    def expand(self, g: KernelGraph, args: list[Tensor], attributes: Attributes) -> Tensor:
        """The maximum is subtracted from both terms, see `LogSoftmax`."""
        x, labels = args
        shifted, total = self._row(g, x)
        weight = g.label_weight(labels, extent(x.shape[-1]), **attributes)
        return g.mul(weight, g.sub(g.log(total), g.sum(self._picked(g, shifted, labels), -1)))

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> list[Tensor | None]:
        """dx = dy weight (exp(x - max x) / sum exp(x - max x) - 1[column = label])."""
        x, labels = args
        shifted, total = self._row(g, x)
        g.named(g.tensor(shifted.node.inputs[1]), "max")
        share = g.div(g.exp(shifted), g.named(total, "sum"))
        label = self._picked(g, g.add(g.zeros(x), 1.0), labels)
        weight = g.label_weight(labels, extent(x.shape[-1]), **attributes)
        return [g.mul(g.mul(dy, weight), g.sub(share, label)), None]

    def _row(self, g: KernelGraph, x: Tensor) -> tuple[Tensor, Tensor]:
        """The shifted row, and the sum of its exponentials."""
        shifted = g.sub(x, g.max(x, -1))
        return shifted, g.sum(g.exp(shifted), -1)

    def _picked(self, g: KernelGraph, x: Tensor, labels: Tensor) -> Tensor:
        """The element of a row that its label picks; with one column the weight decides alone."""
        return x if x.shape[-1] == 1 else g.pick(x, labels)

    def flops(self, shapes: list[Shape], result: Shape) -> float:
        return 6.0 * size(shapes[0])


@operator
class ScaledDotProductAttention(Operator):
    """softmax(query key^T * scale) value (arXiv:1706.03762).

    Causal: row i sees keys 0..i. With a fourth operand, the lengths of the sequences, the last row
    sees the last key of its sequence instead (`LengthMask`).
    """

    name = "scaled_dot_product_attention"
    arity = -1  # query, key, value; or these and lengths
    integers: ClassVar[tuple[int, ...]] = (3,)
    counts = Counts.LENGTHS
    attributes: ClassVar[Attributes] = {"is_causal": False, "scale": None}
    composite = True
    one_type = True

    def check_attributes(self, given: Attributes) -> Attributes:
        full = super().check_attributes(given)
        causal, scale = full["is_causal"], full["scale"]
        if not isinstance(causal, bool):
            raise OperatorError(f"{self.name}(is_causal={causal!r}): must be True or False")
        number = isinstance(scale, int | float) and not isinstance(scale, bool)
        if scale is not None and not (number and 0 < scale <= LARGEST):
            raise OperatorError(
                f"{self.name}(scale={scale!r}): must be a positive number, or None for 1 / sqrt of "
                "the last extent of query"
            )
        return {"is_causal": causal, "scale": None if scale is None else float(scale)}

    def shape(self, shapes: list[Shape], attributes: Attributes) -> Shape:
        call = show_call(self.name, shapes)
        if len(shapes) not in (3, 4):
            raise ShapeError(f"{call}: takes query, key and value, or these and lengths")
        query, key, value = shapes[:3]
        if min(map(len, shapes[:3])) < 2:
            raise ShapeError(f"{call}: every operand needs at least 2 dimensions")
        if query[-1] != key[-1]:
            raise ShapeError(
                f"{call}: query and key differ in their last extent, {query[-1]} and {key[-1]}"
            )
        if key[-2] != value[-2]:
            raise ShapeError(
                f"{call}: {key[-2]} keys for {value[-2]} values; the last extents but "
                "one must be equal"
            )
        scores = broadcast(query[:-2], key[:-2])
        lead = None if scores is None else broadcast(scores, value[:-2])
        if scores is None or lead is None:
            raise ShapeError(f"{call}: leading dimensions do not broadcast")
        if len(shapes) == 4:
            masked = (*scores, query[-2], key[-2])
            LengthMask().shape([masked, shapes[3]], {"causal": attributes["is_causal"]})
        return (*lead, query[-2], value[-1])

    def largest(self, shapes: list[Shape], attributes: Attributes, operand: int) -> int:
        return extent(shapes[1][-2])

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        import torch

        query, key, value = args[:3]
        causal, mask = attributes["is_causal"], None
        if len(args) == 4:
            lead = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2])
            scores = (*lead, query.shape[-2], key.shape[-2])
            mask, causal = LengthMask().keep(scores, args[3], {"causal": causal}), False
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, mask, is_causal=causal, scale=attributes["scale"]
        )

    def expand(self, g: KernelGraph, args: list[Tensor], attributes: Attributes) -> Tensor:
        query, key, value = args[:3]
        scale, causal = attributes["scale"], attributes["is_causal"]
        scale = extent(query.shape[-1]) ** -0.5 if scale is None else scale
        scores = g.mul(g.matmul(query, g.transpose(key)), scale)
        if len(args) == 4:
            scores = g.length_mask(scores, args[3], causal)
        elif causal:
            scores = g.causal_mask(scores)
        weights = Softmax().expand(g, [scores], {"dim": len(scores.shape) - 1})
        return g.matmul(weights, value)

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> list[Tensor | None]:
        """With y = P V: dV = P^T dy, dS = P (dy V^T - sum(dy y)) (arXiv:2205.14135, appendix B)."""
        query, key, value = args[:3]
        scale = attributes["scale"]
        scale = extent(query.shape[-1]) ** -0.5 if scale is None else scale
        weights = g.again(g.tensor(y.node.inputs[0]))  # the product that `expand` ends with
        dy = g.full(dy, y)
        shared = g.sum(g.mul(dy, g.again(y)), -1)
        scores = g.mul(g.mul(weights, g.sub(g.matmul(dy, g.transpose(value)), shared)), scale)
        return [
            g.matmul(scores, key),
            g.matmul(g.transpose(scores), query),
            g.matmul(g.transpose(weights), dy),
            *[None] * (len(args) - 3),
        ]

    def flops(self, shapes: list[Shape], result: Shape) -> float:
        scores = size((*result[:-1], shapes[1][-2]))
        return scores * (2.0 * extent(shapes[0][-1]) + 2.0 * extent(result[-1]) + 5.0)
