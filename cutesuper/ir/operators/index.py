"""Operators with an integer operand: lengths, limits, tables of pages, indices, labels.

Lengths and tables serve a cache of keys and values: every sequence of a batch has its own length,
and its keys may lie in pages anywhere in memory (arXiv:2309.06180). Limits are windows, padding,
and sequences in a row. Indices name rows of a table, as of an embedding. Labels select the
log-probability that a cross entropy takes from each row. See
`cutesuper.ir.operators.base`.
"""

from __future__ import annotations

from math import nan, prod
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from cutesuper.errors import GraphError, OperatorError, ShapeError
from cutesuper.ir.dims import Dim, Shape, Symbol, extent, show_shape
from cutesuper.ir.dtypes import DType, int32, int64
from cutesuper.ir.operators.base import (
    Attributes,
    Counts,
    Operator,
    each,
    one_or_all,
    opaque,
    operator,
    show_call,
)

if TYPE_CHECKING:
    from cutesuper.ir.derivation import Derivation
    from cutesuper.ir.graph import Tensor


class _Limits(Operator):
    """Columns hidden by integers, to which columns are compared.
    Rows that see nothing have no maximum; softmax makes zeros of them."""

    arity = 2
    attributes: ClassVar[Attributes] = {"causal": False}
    masks = True
    integers: ClassVar[tuple[int, ...]] = (1,)

    def check_attributes(self, given: Attributes) -> Attributes:
        full = super().check_attributes(given)
        for name, value in full.items():
            if not isinstance(value, bool):
                raise OperatorError(f"{self.name}({name}={value!r}): must be True or False")
        return full

    def largest(self, shapes: list[Shape], attributes: Attributes, operand: int) -> int:
        return extent(shapes[0][-1])

    def keep(self, shape: tuple[int, ...], limits: Any, attributes: Attributes) -> Any:
        """Mask of the scores that stay, as a torch tensor that broadcasts to their shape."""
        import torch

        m, n = shape[-2:]
        rows, columns = np.arange(m)[:, None], np.arange(n)
        ends = limits.cpu().numpy().reshape(*limits.shape, *[1] * (len(shape) - limits.dim()))
        keep = self.visible(rows, columns, (m, n), attributes, ends)
        return torch.from_numpy(np.ascontiguousarray(keep)).to(limits.device)

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        import torch

        scores, limits = args
        keep = self.keep(tuple(scores.shape), limits, attributes)
        return scores.masked_fill(~keep, -torch.inf)

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> list[Tensor | None]:
        """dy where elements stay, 0 elsewhere, as for ``causal_mask``."""
        if g.vanishes(dy, y):
            return [dy, None]
        zero = g.apply(self.name, g.zeros(args[0]), args[1], **attributes)
        return [g.keep(g.exp(zero), dy), None]

    def symbolic(self, a: Any, args: list[Any], attributes: Attributes) -> Any:
        """A function of the scores; the integers they meet are part of its name."""
        return opaque(self.name, a, args, {**attributes, str(self.counts): args[1]})


@operator
class LengthMask(_Limits):
    """scores[..., i, j] where column j lies in its sequence, -inf elsewhere.

    ``lengths`` has the first dimensions of ``scores`` (``[B]`` for ``[B, H, G, L, S]``). Column j
    stays where ``j < lengths[b]``; with ``causal`` where ``j < lengths[b] - (L - 1 - i)``, so that
    the last row sees all of its sequence. A length above S counts as S, one below 0 as 0.
    """

    name = "length_mask"
    counts = Counts.LENGTHS

    def shape(self, shapes: list[Shape], attributes: Attributes) -> Shape:
        scores, lengths = shapes
        call = show_call(self.name, shapes)
        if len(scores) < 3:
            raise ShapeError(
                f"{call}: scores need a dimension of sequences in front of rows and "
                "columns; give them one of extent 1"
            )
        k = len(lengths)
        if not 0 < k <= len(scores) - 2 or lengths != scores[:k]:
            raise ShapeError(
                f"{call}: lengths must have the first dimensions of the scores, without rows and "
                f"columns: {show_shape(scores[:1])} or more of {show_shape(scores[:-2])}"
            )
        return scores

    def visible(
        self,
        rows: Any,
        columns: Any,
        extents: tuple[Any, Any],
        attributes: Attributes,
        integers: Any = None,
    ) -> Any:
        if attributes["causal"]:  # the last column that the last row would see in its place
            columns = columns + (extents[0] - 1 - rows)
        return (columns < integers) & (columns < extents[1])


@operator
class LimitMask(_Limits):
    """scores[..., i, j] on one side of a limit, -inf elsewhere: of sequences, or of rows.

    Column j stays where ``j >= limit`` if ``lower``, else where ``j < limit``. Limits are

    * of sequences: they have the first dimensions of ``scores``, as those of `LengthMask`; with
      ``causal`` that of row i is ``limits[b] - (L - 1 - i)``, as a window of W columns has
      ``lengths - W``;
    * of rows: they have all dimensions, the last of extent 1, as others may be. They must not fall
      from a row to the next, as those of windows and of sequences in a row do not: kernels take
      the limits of the first and the last row of a tile for those of all its rows.
    """

    name = "limit_mask"
    attributes: ClassVar[Attributes] = {"lower": True, "causal": False}
    counts = Counts.LIMITS

    def shape(self, shapes: list[Shape], attributes: Attributes) -> Shape:
        scores, limits = shapes
        call, k = show_call(self.name, shapes), len(limits)
        of_rows = k == len(scores) and limits[-1] == 1
        fits = all(n == m or (of_rows and n == 1) for n, m in zip(limits, scores, strict=False))
        if not fits or not (of_rows or 0 < k <= len(scores) - 2):
            raise ShapeError(
                f"{call}: limits have the first dimensions of the scores: one or more of "
                f"{show_shape(scores[:-2])} for sequences, or {show_shape((*scores[:-1], 1))} for "
                "rows, where others may be 1 as well"
            )
        if of_rows and attributes["causal"]:
            raise ShapeError(f"{call}: limits of rows are what they are; use causal=False")
        return scores

    def visible(
        self,
        rows: Any,
        columns: Any,
        extents: tuple[Any, Any],
        attributes: Attributes,
        integers: Any = None,
    ) -> Any:
        if attributes["causal"]:
            columns = columns + (extents[0] - 1 - rows)
        return columns >= integers if attributes["lower"] else columns < integers


class _Gather(Operator):
    """Parts of an input put together as integers say.
    Nothing is copied: users of the result read the input through the integers."""

    arity = 2
    integers: ClassVar[tuple[int, ...]] = (1,)
    of_inputs = (0, 1)

    def largest(self, shapes: list[Shape], attributes: Attributes, operand: int) -> int:
        return extent(shapes[0][0]) - 1

    def flops(self, shapes: list[Shape], result: Shape) -> float:
        return 0.0


@operator
class GatherPages(_Gather):
    """Sequences put together from pages: cache[pages, P, ...], table[B, n] -> [B, n * P, ...].

    Element ``[b, s, ...]`` of the result is ``cache[table[b, s // P], s % P, ...]``.
    """

    name = "gather_pages"
    counts = Counts.PAGES
    through = "table"

    def shape(self, shapes: list[Shape], attributes: Attributes) -> Shape:
        cache, table = shapes
        call = show_call(self.name, shapes)
        if len(cache) < 2:
            raise ShapeError(f"{call}: a cache is [pages, positions of a page, ...]")
        if len(table) != 2:
            raise ShapeError(f"{call}: a table is [sequences, pages of a sequence]")
        if isinstance(cache[1], Symbol) or isinstance(table[1], Symbol):
            raise ShapeError(
                f"{call}: positions of a page and pages of a sequence must be known before the "
                "call; use numbers in place of symbols"
            )
        return (table[0], table[1] * cache[1], *cache[2:])

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        cache, table = args
        return cache[table.long()].flatten(1, 2)

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> list[Tensor]:
        raise GraphError(
            f"derivative of gather_pages({args[0]!r}): the gradient of a cache would add up pages "
            "of several sequences, which no operator does; leave it out of wrt, or pass the "
            "gathered tensor as an input"
        )

    def origin(self, dim: int, rank: int) -> tuple[int, int] | None:
        return {0: (1, 0), 1: None}.get(dim, (0, dim))

    def element(self, index: Shape, result: Shape) -> Shape:
        return (extent(result[1]) // extent(index[1]), *result[2:])


#: element types of labels and of indices: PyTorch's are int64
_LABELS: tuple[DType, ...] = (int64, int32)


@operator
class TakeRows(_Gather):
    """Rows of a table by an index: table[V, ...], index[...] -> [*index, *rest of the table].

    Element ``[i, ...]`` of the result is ``table[index[i], ...]``, for an index of any rank.
    Indices from -V to -1 count from the end, as in PyTorch's ``table[index]``. Any other integer
    that is no row gives a row of NaN: nothing is read outside of the table.
    """

    name = "take_rows"
    integer_types = _LABELS
    counts = Counts.ROWS
    through = "index"
    stored = True

    def shape(self, shapes: list[Shape], attributes: Attributes) -> Shape:
        table, index = shapes
        call = show_call(self.name, shapes)
        if len(table) < 2:
            raise ShapeError(f"{call}: a table is [rows, elements of a row]")
        if isinstance(table[0], Symbol):
            raise ShapeError(
                f"{call}: the number of rows of a table, {table[0]}, must be known before the "
                "call; use a number in place of the symbol"
            )
        if not index:
            raise ShapeError(f"{call}: an index has a dimension; give it one of extent 1")
        return (*index, *table[1:])

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        import torch

        table, index = args
        count = table.shape[0]
        known = (index >= -count) & (index < count)
        rows = table[torch.where(known, index, 0).long()]
        return rows.masked_fill(~known.reshape(*known.shape, *[1] * (table.dim() - 1)), torch.nan)

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> list[Tensor]:
        raise GraphError(
            f"derivative of take_rows({args[0]!r}): the gradient of a table would add up the rows "
            "of equal indices, which no operator does; leave it out of wrt, or pass the rows that "
            "are taken as an input"
        )

    def origin(self, dim: int, rank: int) -> tuple[int, int] | None:
        return (1, dim) if dim < rank else (0, dim - rank + 1)

    def element(self, index: Shape, result: Shape) -> Shape:
        return result[len(index) :]


def row_dims(rank: int, dims: tuple[int, ...]) -> list[int]:
    """The dimension of a tensor that each dimension of rows is which are put into it.
    Along the first of ``dims``, for which there are indices, the rows are counted instead."""
    return [d for d in range(rank) if d not in dims[1:]]


def rows_of(base: Shape, dims: tuple[int, ...], count: Dim) -> Shape:
    """Shape of as many rows that are put into a tensor at places along ``dims``."""
    return tuple(count if d == dims[0] else base[d] for d in row_dims(len(base), dims))


@operator
class PutRows(Operator):
    """A tensor with other rows at the places that indices name: base, index[T], ..., rows.

    ``dim`` is a dimension of ``base``, or several in rising order, and there is an index for each
    of them. ``rows`` has the shape of ``base`` with T in the place of the first of them, and
    without the others. The result has row i of these at place ``index[i]`` of each dimension, and
    is ``base`` elsewhere. Places from -V to -1 count from the end (V is the extent of ``base``
    there). A row of any other place is left out: nothing is written outside of the tensor. Of
    equal places either row may be stored, as in PyTorch's ``index_copy``.

    before: keys ``[B, G, D]`` and positions ``[B]`` of a cache ``[B, G, S, D]``; after, with
    ``dim=(0, 2)`` and indices 0, 1, ... and the positions: ``cache[b, :, positions[b]] = keys[b]``.
    """

    name = "put_rows"
    arity = -1
    attributes: ClassVar[Attributes] = {"dim": 0}
    integers: ClassVar[tuple[int, ...]] = (1,)
    integer_types = _LABELS
    counts = Counts.ROWS
    of_inputs = (0,)
    one_type = True
    puts = True

    def integers_among(self, count: int) -> tuple[int, ...]:
        return tuple(range(1, count - 1))

    def check_attributes(self, given: Attributes) -> Attributes:
        full = super().check_attributes(given)
        dims = each(full["dim"])
        if any(isinstance(d, bool) or not isinstance(d, int) or d < 0 for d in dims):
            raise OperatorError(f"put_rows(dim={full['dim']!r}): must be an int of at least 0")
        if not dims:
            raise OperatorError("put_rows(dim=()): must be an int of at least 0, or several")
        if list(dims) != sorted(set(dims)):
            raise OperatorError(f"put_rows(dim={full['dim']!r}): several must be in rising order")
        return full | {"dim": one_or_all(dims)}

    def shape(self, shapes: list[Shape], attributes: Attributes) -> Shape:
        base, rows, indices = shapes[0], shapes[-1], shapes[1:-1]
        call, dim, dims = show_call(self.name, shapes), attributes["dim"], each(attributes["dim"])
        if len(indices) != len(dims):
            raise ShapeError(
                f"{call}: takes a tensor, an index for each dimension of dim={dim}, and rows"
            )
        if dims[-1] >= len(base):
            raise ShapeError(f"{call}: dim={dim}, and the tensor has {len(base)} dimensions")
        for d in dims:
            if isinstance(base[d], Symbol):
                raise ShapeError(
                    f"{call}: the number of places, {base[d]}, must be known before the call; use "
                    "a number in place of the symbol"
                )
        if any(len(index) != 1 for index in indices):
            raise ShapeError(f"{call}: an index has one dimension, a place for each row")
        [count, *others], places = (i[0] for i in indices), prod(extent(base[d]) for d in dims)
        if any(other != count for other in others):
            raise ShapeError(f"{call}: the indices must have one shape")
        if isinstance(count, Symbol) and places == 1:
            raise ShapeError(
                f"{call}: the one place along dim={dim} takes one row; use 1 in place of {count}"
            )
        if not isinstance(count, Symbol) and count > places:
            raise ShapeError(f"{call}: {count} rows, and {places} places along dim={dim}")
        if rows != (want := rows_of(base, dims, count)):
            raise ShapeError(f"{call}: the rows must be {show_shape(want)}")
        return base

    def largest(self, shapes: list[Shape], attributes: Attributes, operand: int) -> int:
        return extent(shapes[0][each(attributes["dim"])[operand - 1]]) - 1

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        import torch

        base, *indices, rows = args
        dims, made = each(attributes["dim"]), base.clone()
        pairs = [(i.long(), base.shape[d]) for i, d in zip(indices, dims, strict=True)]
        inside = [(index >= -count) & (index < count) for index, count in pairs]
        known = torch.stack(inside).all(0).nonzero().flatten()
        places = tuple(index.index_select(0, known) % count for index, count in pairs)
        given = rows.movedim(dims[0], 0).index_select(0, known)
        made.movedim(dims, tuple(range(len(dims))))[places] = given.to(base.dtype)
        return made

    def flops(self, shapes: list[Shape], result: Shape) -> float:
        return 0.0

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> list[Tensor]:
        raise GraphError(
            f"derivative of put_rows({args[0]!r}): the gradient of the rows would be taken from a "
            "gradient that is computed, and rows are taken from inputs only; differentiate a graph "
            "of the rows alone"
        )


@operator
class Pick(Operator):
    """x[..., i, j] where j is the label of row i, 0 elsewhere: x[..., M, N], labels[..., M, 1].

    A label that is not a column gives a row of zeros; `LabelWeight` tells such labels apart.
    """

    name = "pick"
    arity = 2
    masks = True
    fill = 0.0
    one_column = True
    integers: ClassVar[tuple[int, ...]] = (1,)
    integer_types = _LABELS
    counts = Counts.LABELS

    def shape(self, shapes: list[Shape], attributes: Attributes) -> Shape:
        x, labels = shapes
        if len(x) < 2 or labels != (*x[:-1], 1):
            want = (
                f"one for each row, {show_shape((*x[:-1], 1))}"
                if len(x) > 1
                else ("one for each row of [rows, columns]")
            )
            raise ShapeError(f"{show_call(self.name, shapes)}: labels must be {want}")
        return x

    def visible(
        self,
        rows: Any,
        columns: Any,
        extents: tuple[Any, Any],
        attributes: Attributes,
        integers: Any = None,
    ) -> Any:
        return columns == integers

    def largest(self, shapes: list[Shape], attributes: Attributes, operand: int) -> int:
        return extent(shapes[0][-1]) - 1

    def outside(self, shapes: list[Shape], attributes: Attributes) -> tuple[int, ...]:
        columns = extent(shapes[0][-1])
        return (-1, columns)

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        import torch

        x, labels = args
        columns = torch.arange(x.shape[-1], device=x.device)
        return x.masked_fill(columns != labels, 0.0)

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> list[Tensor | None]:
        """dy at the label's column: dy times a pick from ones."""
        ones = g.add(g.zeros(args[0]), 1.0)
        return [g.mul(dy, g.apply(self.name, ones, args[1])), None]

    def symbolic(self, a: Any, args: list[Any], attributes: Attributes) -> Any:
        """A function of x; the labels it meets are part of its name."""
        return opaque(self.name, a, args, {**attributes, "labels": args[1]})


@operator
class LabelWeight(Operator):
    """Weight of a row by its label: 1 for 0..classes - 1, 0 for ``ignore_index``.

    The weight is NaN for any other label: a loss multiplied by it shows that a label is wrong,
    where an index out of range would read elsewhere or count as nothing. ``ignore_index`` may be
    one of the classes, which then counts 0.
    """

    name = "label_weight"
    arity = 1
    attributes: ClassVar[Attributes] = {"classes": ..., "ignore_index": -100}
    elementwise = True
    integers: ClassVar[tuple[int, ...]] = (0,)
    integer_types = _LABELS
    counts = Counts.LABELS

    def check_attributes(self, given: Attributes) -> Attributes:
        full = super().check_attributes(given)
        for name, value in full.items():
            if isinstance(value, bool) or not isinstance(value, int):
                raise OperatorError(f"label_weight({name}={value!r}): must be an int")
        if not 0 < full["classes"] < 1 << 31 or not -(1 << 31) <= full["ignore_index"] < 1 << 31:
            raise OperatorError(
                f"label_weight(classes={full['classes']}, ignore_index={full['ignore_index']}): "
                "there is at least one class, and both fit into 32 bits"
            )
        return full

    def shape(self, shapes: list[Shape], attributes: Attributes) -> Shape:
        return shapes[0]

    def numbers(self, integers: NDArray[np.int64], attributes: Attributes) -> NDArray[np.float64]:
        known = (integers >= 0) & (integers < attributes["classes"])
        counted = np.where(known, 1.0, np.nan)
        return np.where(integers == attributes["ignore_index"], 0.0, counted)

    def largest(self, shapes: list[Shape], attributes: Attributes, operand: int) -> int:
        return attributes["classes"] - 1

    def outside(self, shapes: list[Shape], attributes: Attributes) -> tuple[int, ...]:
        classes = attributes["classes"]
        return (attributes["ignore_index"], -1, classes, classes - 1)

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        import torch

        found = self.numbers(args[0].cpu().numpy(), attributes)
        return torch.from_numpy(found).to(args[0].device, torch.float32)

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> list[Tensor | None]:
        return [None]

    def symbolic(self, a: Any, args: list[Any], attributes: Attributes) -> Any:
        return opaque(self.name, a, args, attributes)

    def scalar(self, m: Any, args: list[Any], attributes: Attributes) -> Any:
        label, ignored = args[0], attributes["ignore_index"]
        known = (label >= 0) & (label < attributes["classes"])
        return m.where(label == ignored, 0.0, m.where(known, 1.0, nan))
