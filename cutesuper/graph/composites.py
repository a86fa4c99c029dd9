"""Operators that are made of others; see `cutesuper.graph.operators`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from cutesuper.errors import OperatorError, ShapeError
from cutesuper.graph.dims import Shape, broadcast, extent, size
from cutesuper.graph.indexing import LengthMask
from cutesuper.graph.operators import (
    LARGEST,
    Attributes,
    Operator,
    normal_dim,
    operator,
    show_call,
)

if TYPE_CHECKING:
    from cutesuper.graph.derivation import Derivation
    from cutesuper.graph.kernel import KernelGraph, Tensor


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
        import torch

        x = args[0]
        weight = args[1] if len(args) == 2 else None
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, attributes["eps"])

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

        From d r / d x = -r^3 x / n. dw = dy x^.
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
class Softmax(Operator):
    """exp(x - max x) / sum exp(x - max x) along ``dim``; 0 where all of x is -inf.

    PyTorch gives NaN there, except in attention; kernels follow attention.
    """

    name = "softmax"
    arity = 1
    attributes: ClassVar[Attributes] = {"dim": -1}
    composite = True

    def shape(self, shapes: list[Shape], attributes: Attributes) -> Shape:
        attributes["dim"] = normal_dim(self.name, shapes[0], attributes["dim"])
        return shapes[0]

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        dim = attributes["dim"]
        hidden = (args[0] == -float("inf")).all(dim, keepdim=True)
        return args[0].softmax(dim).masked_fill(hidden, 0.0)

    def expand(self, g: KernelGraph, args: list[Tensor], attributes: Attributes) -> Tensor:
        dim = attributes["dim"]
        e = g.exp(g.sub(args[0], g.max(args[0], dim)))
        return g.div(e, g.sum(e, dim))

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> list[Tensor]:
        """dx = y (dy - sum(y dy)), since d y_i / d x_j = y_i (1[i = j] - y_j)."""
        shared = g.sum(g.mul(y, dy), attributes["dim"] - len(y.shape))
        return [g.mul(y, g.sub(dy, shared))]

    def flops(self, shapes: list[Shape], result: Shape) -> float:
        return 5.0 * size(result)


@operator
class ScaledDotProductAttention(Operator):
    """softmax(query key^T * scale) value (arXiv:1706.03762).

    Causal: row i sees keys 0..i. With a fourth operand, the lengths of the sequences, the last row
    sees the last key of its sequence instead (`LengthMask`).
    """

    name = "scaled_dot_product_attention"
    arity = -1  # query, key, value; or these and lengths
    integers: ClassVar[tuple[int, ...]] = (3,)
    attributes: ClassVar[Attributes] = {"is_causal": False, "scale": None}
    composite = True

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
            raise ShapeError(f"{call}: query and key differ in their last extent, {query[-1]} and "
                             f"{key[-1]}")
        if key[-2] != value[-2]:
            raise ShapeError(f"{call}: {key[-2]} keys for {value[-2]} values; the last extents but "
                             "one must be equal")
        scores = broadcast(query[:-2], key[:-2])
        lead = None if scores is None else broadcast(scores, value[:-2])
        if scores is None or lead is None:
            raise ShapeError(f"{call}: leading dimensions do not broadcast")
        if len(shapes) == 4:
            masked = (*scores, query[-2], key[-2])
            LengthMask().shape([masked, shapes[3]], {"causal": attributes["is_causal"]})
        return (*lead, query[-2], value[-1])

    def largest(self, shapes: list[Shape]) -> int:
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
        weights = g.tensor(y.node.inputs[0])  # the product that `expand` ends with
        dy = g.full(dy, y)
        shared = g.sum(g.mul(dy, y), -1)
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
