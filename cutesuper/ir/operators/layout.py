"""Operators that arrange or hide elements; see `cutesuper.ir.operators.base`."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from cutesuper.errors import GraphError, OperatorError, ShapeError
from cutesuper.ir.arguments import shown
from cutesuper.ir.dims import Dim, Shape, Symbol, extent, show_shape
from cutesuper.ir.operators.base import (
    Attributes,
    Operator,
    normal_dim,
    opaque,
    operator,
    show_call,
)

if TYPE_CHECKING:
    from cutesuper.ir.derivation import Derivation
    from cutesuper.ir.graph import Tensor


@operator
class Transpose(Operator):
    """Permutes dimensions; ``dims`` is a permutation (default: the last two change places)."""

    name = "transpose"
    permutes = True
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
            raise ShapeError(
                f"{show_call(self.name, shapes)}: dims={list(dims)} is not a "
                f"permutation of 0..{rank - 1}"
            )
        attributes["dims"] = dims
        return tuple(shapes[0][d] for d in dims)

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        return args[0].permute(attributes["dims"])

    def in_front(self, attributes: Attributes) -> Attributes:
        return {"dims": (0, *(d + 1 for d in attributes["dims"]))}

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> list[Tensor]:
        dims = attributes["dims"]
        lead = len(dy.shape) - len(dims)
        back = sorted(range(len(dims)), key=lambda d: dims[d])
        return [g.transpose(dy, (*range(lead), *(lead + d for d in back)))]

    def flops(self, shapes: list[Shape], result: Shape) -> float:
        return 0.0


@operator
class RotateHalf(Operator):
    """``[-b, a]`` of the halves ``[a, b]`` of the last dimension, as rotary positions have it.
    ``x cos + rotate_half(x) sin`` (Su et al., RoFormer, 2021)."""

    name = "rotate_half"
    arity = 1
    turns = True

    def shape(self, shapes: list[Shape], attributes: Attributes) -> Shape:
        [shape] = shapes
        if not shape or extent(shape[-1]) % 2:
            raise ShapeError(f"{show_call(self.name, shapes)}: the last extent must be even")
        return shape

    def places(self, extent: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        half = extent // 2
        moved = np.roll(np.arange(extent), -half)
        return moved, np.where(moved >= half, -1.0, 1.0)

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        import torch

        [x] = args
        half = x.shape[-1] // 2
        return torch.cat((-x[..., half:], x[..., :half]), -1)

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> list[Tensor]:
        return [g.mul(g.apply(self.name, g.full(dy, y)), -1.0)]

    def symbolic(self, a: Any, args: list[Any], attributes: Attributes) -> Any:
        """A function of the row to the search; the verifier moves elements, by `places`."""
        return opaque(self.name, a, args, attributes)


@operator
class RotatePairs(RotateHalf):
    """``[-b, a, -d, c, ...]`` of the pairs ``[a, b, c, d, ...]`` of the last dimension.
    Rotary positions whose halves lie interleaved have it."""

    name = "rotate_pairs"

    def places(self, extent: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        moved = np.arange(extent)
        pairs = moved[: extent // 2 * 2]  # the verifier has odd extents, too
        pairs ^= 1
        return moved, np.where(moved > np.arange(extent), -1.0, 1.0)

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        import torch

        [x] = args
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


@operator
class Cumsum(Operator):
    """Sums along the last dimension: of the elements up to each, or from each on (``reverse``)."""

    name = "cumsum"
    arity = 1
    attributes: ClassVar[Attributes] = {"reverse": False}
    turns = True
    scans = True

    def check_attributes(self, given: Attributes) -> Attributes:
        full = super().check_attributes(given)
        if not isinstance(full["reverse"], bool):
            raise OperatorError(f"cumsum(reverse={full['reverse']!r}): must be True or False")
        return full

    def shape(self, shapes: list[Shape], attributes: Attributes) -> Shape:
        if not shapes[0]:
            raise ShapeError(f"{show_call(self.name, shapes)}: the operand has no dimension")
        return shapes[0]

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        [x] = args
        return x.flip(-1).cumsum(-1).flip(-1) if attributes["reverse"] else x.cumsum(-1)

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> list[Tensor]:
        """The sums of dy in the other direction: an element is in all sums behind it."""
        return [g.apply(self.name, g.full(dy, y), reverse=not attributes["reverse"])]

    def symbolic(self, a: Any, args: list[Any], attributes: Attributes) -> Any:
        """A function of the row to the search; the verifier sums."""
        return opaque(self.name, a, args, attributes)


@operator
class Concat(Operator):
    """Tensors one after the other along ``dim``."""

    name = "concat"
    joins = True
    arity = -1
    attributes: ClassVar[Attributes] = {"dim": ...}
    cuts = True
    one_type = True

    def shape(self, shapes: list[Shape], attributes: Attributes) -> Shape:
        if not shapes:
            raise ShapeError("concat([]): takes at least one tensor")
        call = f"{show_call(self.name, shapes)[:-1]}, dim={attributes['dim']})"
        first = shapes[0]
        dim = attributes["dim"] = normal_dim(self.name, first, attributes["dim"])
        total = 0
        for s in shapes:
            if len(s) != len(first) or any(
                d != e for k, (d, e) in enumerate(zip(s, first, strict=True)) if k != dim
            ):
                raise ShapeError(f"{call}: all extents but those of dimension {dim} must be equal")
            total += self._number(s[dim], call)
        return (*first[:dim], total, *first[dim + 1 :])

    def _number(self, n: Dim, call: str) -> int:
        if isinstance(n, Symbol):
            raise ShapeError(
                f"{call}: extent {n} is known only at the call; concatenate along another dimension"
            )
        return n

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        import torch

        return torch.cat(args, attributes["dim"])

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> list[Tensor]:
        """A piece of dy for each operand."""
        dim, dy = attributes["dim"] - len(y.shape), g.full(dy, y)
        ends = accumulate((extent(a.shape[dim]) for a in args), initial=0)
        return [g.slice(dy, dim, *ends) for ends in pairwise(ends)]

    def flops(self, shapes: list[Shape], result: Shape) -> float:
        return 0.0


@operator
class Slice(Operator):
    """The elements ``start`` to ``stop`` (exclusive) along ``dim``; negative: from the end."""

    name = "slice"
    arity = 1
    attributes: ClassVar[Attributes] = {"dim": ..., "start": ..., "stop": ...}
    cuts = True

    def shape(self, shapes: list[Shape], attributes: Attributes) -> Shape:
        shape = shapes[0]
        start, stop = attributes["start"], attributes["stop"]
        dim = normal_dim(self.name, shape, attributes["dim"])
        call = f"slice({show_shape(shape)}, dim={dim}, start={start!r}, stop={stop!r})"
        n = shape[dim]
        if isinstance(n, Symbol):
            raise ShapeError(
                f"{call}: extent {n} is known only at the call; slice along another dimension"
            )
        if any(isinstance(k, bool) or not isinstance(k, int) for k in (start, stop)):
            raise ShapeError(f"{call}: start and stop must be ints")
        start, stop = (k + n if k < 0 else k for k in (start, stop))
        if not 0 <= start < stop <= n:
            raise ShapeError(f"{call}: must leave at least one of elements 0..{n - 1}")
        attributes |= {"dim": dim, "start": start, "stop": stop}
        return (*shape[:dim], stop - start, *shape[dim + 1 :])

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        start, stop = attributes["start"], attributes["stop"]
        return args[0].narrow(attributes["dim"], start, stop - start)

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> list[Tensor]:
        """Zeros around dy; they vanish where the slices of a tensor cover it.
        Of an input they are stored beside it."""
        [x], dim = args, attributes["dim"]
        start, stop, n = attributes["start"], attributes["stop"], extent(x.shape[dim])
        if len(dy.shape) > len(x.shape):
            raise GraphError(
                f"derivative of slice({show_shape(x.shape)}, dim={dim}, start={start}, "
                f"stop={stop}): the slice was broadcast to more dimensions, and zeros around its "
                f"gradient {show_shape(dy.shape)} have no tensor to be made from; give the tensor "
                "leading extents of 1, or slice what is computed with it"
            )
        parts = [g.full(dy, y)]
        if start > 0:
            parts.insert(0, g.zeros(g.slice(x, dim, 0, start)))
        if stop < n:
            parts.append(g.zeros(g.slice(x, dim, stop, n)))
        return [g.concat(parts, dim)]

    def flops(self, shapes: list[Shape], result: Shape) -> float:
        return 0.0


@operator
class CausalMask(Operator):
    """scores[..., i, j] where j <= i + offset, -inf elsewhere.

    The offset is 0 for ``top_left`` (what PyTorch calls ``is_causal``), and N - M for
    ``bottom_right``, where the last row sees every column (FlashAttention; decoding); where a call
    gives symbolic extents more rows than columns, it is 0. Factors of a masked value have to be
    positive, as the scale of attention is: they leave -inf unchanged.
    """

    name = "causal_mask"
    arity = 1
    attributes: ClassVar[Attributes] = {"alignment": "top_left"}
    masks = True

    def check_attributes(self, given: Attributes) -> Attributes:
        full = super().check_attributes(given)
        if str(full["alignment"]) not in ("top_left", "bottom_right"):
            raise OperatorError(
                f"causal_mask(alignment={shown(full['alignment'])}): must be 'top_left' (row i "
                "sees columns 0..i) or 'bottom_right' (the last row sees all columns)"
            )
        return full

    def shape(self, shapes: list[Shape], attributes: Attributes) -> Shape:
        call = show_call(self.name, shapes)
        if len(shapes[0]) < 2:
            raise ShapeError(f"{call}: needs rows and columns, the last two dimensions")
        if attributes["alignment"] == "top_left":
            return shapes[0]
        rows, columns = shapes[0][-2:]
        if isinstance(rows, Symbol) or isinstance(columns, Symbol):
            return shapes[0]
        if rows > columns:
            raise ShapeError(
                f"{call}: 'bottom_right' leaves the first {rows - columns} rows without any "
                "column; give it no more rows than columns, or use 'top_left'"
            )
        return shapes[0]

    def visible(
        self,
        rows: Any,
        columns: Any,
        extents: tuple[Any, Any],
        attributes: Attributes,
        integers: Any = None,
    ) -> Any:
        offset = 0
        if attributes["alignment"] == "bottom_right":
            # Never below 0 in a graph of known extents. The verifier may ask at small extents that
            # have more rows than columns: there both programs need the same mask, any one that
            # leaves every row a column (a maximum of nothing and a sum of 0 would follow).
            offset = max(0, extents[1] - extents[0])
        return columns <= rows + offset

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        import torch

        m, n = args[0].shape[-2:]
        rows, columns = np.arange(m)[:, None], np.arange(n)[None, :]
        keep = self.visible(rows, columns, (m, n), attributes)
        gone = torch.from_numpy(~keep).to(args[0].device)
        return args[0].masked_fill(gone, -torch.inf)

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> list[Tensor]:
        """dy where elements stay, 0 elsewhere: this factor is ``exp`` of 0 and of -inf."""
        if g.vanishes(dy, y):
            return [dy]
        return [g.keep(g.exp(g.apply(self.name, g.zeros(args[0]), **attributes)), dy)]

    def symbolic(self, a: Any, args: list[Any], attributes: Attributes) -> Any:
        return opaque(self.name, a, args, attributes)
