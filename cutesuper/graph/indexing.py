"""Operators with an int32 operand: lengths of sequences, tables of pages.

They are what a cache of keys and values needs: every sequence of a batch has a length of its own,
and its keys may lie in pages anywhere in memory (arXiv:2309.06180). See
`cutesuper.graph.operators`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from cutesuper.errors import GraphError, OperatorError, ShapeError
from cutesuper.graph.dims import Shape, Symbol, extent, show_shape
from cutesuper.graph.operators import Attributes, Operator, opaque, operator, show_call

if TYPE_CHECKING:
    from cutesuper.graph.derivation import Derivation
    from cutesuper.graph.kernel import Tensor


@operator
class LengthMask(Operator):
    """scores[..., i, j] where column j lies in its sequence, -inf elsewhere.

    ``lengths`` has the first dimensions of ``scores`` (``[B]`` for ``[B, H, G, L, S]``). Column j
    stays where ``j < lengths[b]``; with ``causal`` where ``j < lengths[b] - (L - 1 - i)``, so that
    the last row sees all of its sequence. A length above S is S, one below 0 is 0. Rows that see
    nothing have no maximum; softmax makes zeros of them.
    """

    name = "length_mask"
    arity = 2
    attributes: ClassVar[Attributes] = {"causal": False}
    masks = True
    integers: ClassVar[tuple[int, ...]] = (1,)

    def check_attributes(self, given: Attributes) -> Attributes:
        full = super().check_attributes(given)
        if not isinstance(full["causal"], bool):
            raise OperatorError(f"length_mask(causal={full['causal']!r}): must be True or False")
        return full

    def shape(self, shapes: list[Shape], attributes: Attributes) -> Shape:
        scores, lengths = shapes
        call = show_call(self.name, shapes)
        if len(scores) < 3:
            raise ShapeError(f"{call}: scores need a dimension of sequences in front of rows and "
                             "columns; give them one of extent 1")
        k = len(lengths)
        if not 0 < k <= len(scores) - 2 or lengths != scores[:k]:
            raise ShapeError(
                f"{call}: lengths must have the first dimensions of the scores, without rows and "
                f"columns: {show_shape(scores[:1])} or more of {show_shape(scores[:-2])}"
            )
        if attributes["causal"] and isinstance(scores[-2], Symbol):
            raise ShapeError(
                f"{call}: causal=True counts rows from the last one, so their number {scores[-2]} "
                "has to be known before the call; use a number in place of the symbol"
            )
        return scores

    def visible(
        self,
        rows: NDArray[Any],
        columns: NDArray[Any],
        extents: tuple[int, int],
        attributes: Attributes,
        lengths: NDArray[Any] | None = None,
    ) -> NDArray[np.bool_]:
        assert lengths is not None
        end = np.minimum(lengths, extents[1])
        if attributes["causal"]:
            end = end - (extents[0] - 1 - rows)
        return np.less(columns, end)

    def largest(self, shapes: list[Shape]) -> int:
        return extent(shapes[0][-1])

    def keep(self, shape: tuple[int, ...], lengths: Any, attributes: Attributes) -> Any:
        """Which elements of scores of a shape stay, as a torch tensor that broadcasts to them."""
        import torch

        m, n = shape[-2:]
        rows, columns = np.arange(m)[:, None], np.arange(n)
        ends = lengths.cpu().numpy().reshape(*lengths.shape, *[1] * (len(shape) - lengths.dim()))
        keep = self.visible(rows, columns, (m, n), attributes, ends)
        return torch.from_numpy(np.ascontiguousarray(keep)).to(lengths.device)

    def reference(self, args: list[Any], attributes: Attributes) -> Any:
        import torch

        scores, lengths = args
        keep = self.keep(tuple(scores.shape), lengths, attributes)
        return scores.masked_fill(~keep, -torch.inf)

    def derivative(
        self, g: Derivation, args: list[Tensor], attributes: Attributes, y: Tensor, dy: Tensor
    ) -> list[Tensor | None]:
        """dy where elements stay, 0 elsewhere, as for ``causal_mask``."""
        if g.vanishes(dy, y):
            return [dy, None]
        zero = g.apply(self.name, g.zeros(args[0]), args[1], **attributes)
        return [g.mul(dy, g.exp(zero)), None]

    def symbolic(self, a: Any, args: list[Any], attributes: Attributes) -> Any:
        """A function of the scores; which lengths they meet is part of its name."""
        return opaque(self.name, a, args, {**attributes, "lengths": args[1]})


@operator
class GatherPages(Operator):
    """Sequences put together from pages: cache[pages, P, ...], table[B, n] -> [B, n * P, ...].

    Element ``[b, s, ...]`` of the result is ``cache[table[b, s // P], s % P, ...]``. Nothing is
    copied: whatever reads the result reads the cache through the table.
    """

    name = "gather_pages"
    arity = 2
    integers: ClassVar[tuple[int, ...]] = (1,)
    of_inputs = True

    def shape(self, shapes: list[Shape], attributes: Attributes) -> Shape:
        cache, table = shapes
        call = show_call(self.name, shapes)
        if len(cache) < 2:
            raise ShapeError(f"{call}: a cache is [pages, positions of a page, ...]")
        if len(table) != 2:
            raise ShapeError(f"{call}: a table is [sequences, pages of a sequence]")
        return (table[0], extent(table[1]) * extent(cache[1]), *cache[2:])

    def largest(self, shapes: list[Shape]) -> int:
        return extent(shapes[0][0]) - 1

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

    def flops(self, shapes: list[Shape], result: Shape) -> float:
        return 0.0
