"""Kernel graph methods that each apply one operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Any

from cutesuper.errors import OperatorError, ShapeError
from cutesuper.ir.operators.base import TABLE, Operator, each, normal_dim
from cutesuper.ir.precision import EXACT

if TYPE_CHECKING:
    from cutesuper.ir.graph import Operand, Tensor


class NamedOperators:
    """Operators of the table under their names; each method goes through `apply`.

    Functions of one number and reductions have their methods from the table: ``g.exp(x)``,
    ``g.sum(x, 1)``. Methods are written here where they say more than the table.
    """

    def apply(self, operator: str, *operands: Operand, **attributes: Any) -> Tensor:
        """The value of an operator; a kernel graph has this method."""
        raise NotImplementedError

    def _operand(self, operator: str, value: Any) -> Tensor:
        """A tensor of the graph, or a number as one; a kernel graph has this method."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Callable[..., Tensor]:
        """The method of an operator without one of its own: its operands, then its attributes."""
        operator = TABLE.get(name)
        if operator is None or operator.arity < 1:
            near = get_close_matches(name, dir(self), n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise AttributeError(f"{type(self).__name__} has no attribute {name}{hint}")
        method = partial(self._apply_in_order, operator)
        method.__doc__ = operator.__doc__
        return method

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *(n for n, o in TABLE.items() if o.arity > 0)})

    def _apply_in_order(self, operator: Operator, *args: Any, **attributes: Any) -> Tensor:
        """The value of an operator, some of whose attributes follow the operands."""
        operands, further = args[: operator.arity], args[operator.arity :]
        if len(further) > len(operator.attributes):
            return self.apply(operator.name, *args, **attributes)  # says how many it takes
        named = zip(operator.attributes, further, strict=False)
        return self.apply(operator.name, *operands, **dict(named), **attributes)

    def matmul(self, a: Tensor, b: Tensor, precision: str = EXACT) -> Tensor:
        """``a[..., M, K] @ b[..., K, N]``.
        For the precision of float32 operands see `cutesuper.ir.precision`."""
        return self.apply("matmul", a, b, precision=precision)

    def add(self, a: Operand, b: Operand) -> Tensor:
        """``a + b`` with broadcasting."""
        return self.apply("add", a, b)

    def sub(self, a: Operand, b: Operand) -> Tensor:
        """``a - b`` with broadcasting."""
        return self.apply("sub", a, b)

    def mul(self, a: Operand, b: Operand) -> Tensor:
        """``a * b`` with broadcasting."""
        return self.apply("mul", a, b)

    def div(self, a: Operand, b: Operand) -> Tensor:
        """``a / b`` with broadcasting."""
        return self.apply("div", a, b)

    def at_least(self, a: Operand, b: Operand) -> Tensor:
        """1 where ``a >= b``, 0 elsewhere (NaN too)."""
        return self.apply("at_least", a, b)

    def maximum(self, a: Operand, b: Operand) -> Tensor:
        """The larger of ``a`` and ``b``, NaN if either is."""
        return self.apply("maximum", a, b)

    def keep(self, condition: Operand, a: Operand) -> Tensor:
        """``a`` where the condition is 1, 0 where it is 0, even if ``a`` is NaN there."""
        return self.apply("keep", condition, a)

    def hide(self, condition: Operand, a: Operand) -> Tensor:
        """``a`` where the condition is 1, -inf where it is 0, even if ``a`` is NaN there."""
        return self.apply("hide", condition, a)

    def lift(self, condition: Operand, a: Operand) -> Tensor:
        """``a`` where the condition is 1, inf where it is 0, even if ``a`` is NaN there."""
        return self.apply("lift", condition, a)

    def clamp(self, a: Tensor, min: float, max: float) -> Tensor:  # noqa: A002 (PyTorch's names)
        """``a`` limited to [min, max]."""
        return self.apply("clamp", a, min=min, max=max)

    def convert(self, a: Tensor, dtype: Any) -> Tensor:
        """``a`` converted to another element type (fp16, bf16 or fp32).
        It is stored in that type, if it is stored.

        Products take operands of one type: this is how a float32 tensor becomes one of 16 bits.
        Everything is computed in fp32, so values that stay inside a
        kernel are not rounded.
        """
        return self.apply("convert", a, dtype=dtype)

    def reduction(self, a: Tensor, dim: int) -> Tensor:
        """Mirage's name for `sum`."""
        return self.sum(a, dim)

    def argmax(self, a: Tensor, dim: int, **attributes: Any) -> Tensor:
        """Place of the largest element along ``dim``, int64: the first of equal ones, or of NaN."""
        shape = self._operand("argmax", a).shape
        if not attributes and shape[normal_dim("argmax", shape, dim)] == 1:
            return self.apply("only_place", a)
        return self.apply("argmax", a, dim=dim, **attributes)

    def cumsum(self, a: Tensor, dim: int = -1, reverse: bool = False) -> Tensor:
        """Sums along ``dim`` of the elements up to each, or from each on (``reverse``)."""
        dim = normal_dim("cumsum", a.shape, dim) if a.shape else -1
        if dim in (-1, len(a.shape) - 1):
            return self.apply("cumsum", a, reverse=reverse)
        order = [d for d in range(len(a.shape)) if d != dim] + [dim]
        y = self.apply("cumsum", self.transpose(a, order), reverse=reverse)
        return self.transpose(y, sorted(range(len(order)), key=order.__getitem__))

    def softmax(self, a: Tensor, dim: int = -1) -> Tensor:
        """``exp(a - max a) / sum exp(a - max a)`` along ``dim``."""
        return self.apply("softmax", a, dim=dim)

    def logsumexp(self, a: Tensor, dim: int = -1) -> Tensor:
        """``log(sum exp(a))`` along ``dim``, which stays with extent 1; nothing overflows."""
        return self.apply("logsumexp", a, dim=dim)

    def root(self, a: Tensor) -> Tensor:
        """``sqrt(a)`` of sums of squares: its gradient is 0 where ``a`` is 0."""
        return self.apply("root", a)

    def log_softmax(self, a: Tensor, dim: int = -1) -> Tensor:
        """``a - logsumexp(a)`` along ``dim``."""
        return self.apply("log_softmax", a, dim=dim)

    def concat(self, tensors: Sequence[Tensor], dim: int) -> Tensor:
        """Tensors one after the other along ``dim``; their other extents are equal.

        It vanishes when the graph is expanded: its users work on its parts (see
        `cutesuper.ir.remove_concat`), and kernels store the parts of an output into one tensor.
        """
        if not isinstance(tensors, list | tuple):
            raise OperatorError(f"concat({tensors!r}): takes a list of tensors, and dim")
        return self.apply("concat", *tensors, dim=dim)

    def slice(self, a: Tensor, dim: int, start: int, stop: int) -> Tensor:
        """Elements ``start`` to ``stop`` (exclusive, negative from the end) along ``dim``.

        What is sliced is computed for these elements only, if nothing else needs the others; a
        slice of an input is read where it lies.
        """
        return self.apply("slice", a, dim=dim, start=start, stop=stop)

    def causal_mask(self, scores: Tensor, alignment: str = "top_left") -> Tensor:
        """``scores[..., i, j]`` where row i sees column j, -inf elsewhere.

        Args:
            scores: ``[..., M, N]``.
            alignment: ``"top_left"``: j <= i, PyTorch's ``is_causal``. ``"bottom_right"``:
                j <= i + N - M, the last row sees all columns; M must not exceed N.
        """
        return self.apply("causal_mask", scores, alignment=alignment)

    def length_mask(self, scores: Tensor, lengths: Tensor, causal: bool = False) -> Tensor:
        """``scores[b, ..., i, j]`` where ``j < lengths[b]``, -inf elsewhere.

        Args:
            scores: ``[B, ..., L, S]``.
            lengths: an int32 input with the first dimensions of the scores, ``[B]``. A length above
                S counts as S; a row that sees nothing is 0 after a softmax.
            causal: row i sees ``j < lengths[b] - (L - 1 - i)``: the last row sees its whole
                sequence, as in decoding with a cache.
        """
        return self.apply("length_mask", scores, lengths, causal=causal)

    def limit_mask(
        self, scores: Tensor, limits: Tensor, lower: bool = True, causal: bool = False
    ) -> Tensor:
        """``scores[b, ..., i, j]`` where ``j >= limit``, or ``j < limit``, -inf elsewhere.

        Args:
            scores: ``[B, ..., L, S]``.
            limits: an int32 input: of sequences ``[B]``, or of rows ``[B, ..., L, 1]``, where any
                extent may be 1, which must not fall from a row to the next. Rows that see nothing
                are 0 after a softmax. Hidden columns must be finite.
            lower: which of these.
            causal: limits of sequences are those of the last row; row i has ``limits[b] - (L - 1 -
                i)``.
        """
        return self.apply("limit_mask", scores, limits, lower=lower, causal=causal)

    def pick(self, a: Tensor, labels: Tensor) -> Tensor:
        """``a[..., i, j]`` where j is the label of row i, 0 elsewhere.

        Args:
            a: ``[..., M, N]``.
            labels: an int64 or int32 input ``[..., M, 1]``. A label below 0 or above N - 1 picks
                nothing; `label_weight` tells such labels apart.
        """
        return self.apply("pick", a, labels)

    def label_weight(self, labels: Tensor, classes: int, ignore_index: int = -100) -> Tensor:
        """1 for a label in [0, classes), 0 for ``ignore_index``, NaN for any other; float32.

        Args:
            labels: an int64 or int32 input.
            classes: at least 1.
            ignore_index: may be one of the classes, which then counts 0.
        """
        return self.apply("label_weight", labels, classes=classes, ignore_index=ignore_index)

    def cross_entropy(self, a: Tensor, labels: Tensor, ignore_index: int = -100) -> Tensor:
        """``logsumexp(a) - a[label]`` of each row, 0 where the label is ``ignore_index``.

        Args:
            a: ``[..., M, N]``.
            labels: an int64 or int32 input ``[..., M, 1]``. A label that is neither a column nor
                ``ignore_index`` makes NaN of its row.
            ignore_index: may be one of the columns.
        """
        return self.apply("cross_entropy", a, labels, ignore_index=ignore_index)

    def gather_pages(self, cache: Tensor, table: Tensor) -> Tensor:
        """Sequences whose parts lie in pages: ``[B, n * P, ...]``.

        Args:
            cache: an input ``[pages, P, ...]``.
            table: an int32 input ``[B, n]``: the pages of each sequence in order. The cache beyond
                a sequence's length is read and has no effect, so the table has to name existing
                pages there as well.
        """
        return self.apply("gather_pages", cache, table)

    def take_rows(self, table: Tensor, index: Tensor) -> Tensor:
        """Rows of a table, as of an embedding: ``table[index]``, ``[*index, ...]``.

        Args:
            table: an input ``[V, ...]`` of at least two dimensions; V is a number.
            index: an int64 or int32 input of any rank. From -V to -1 it counts from the end; an
                index that is no row gives NaN, and nothing is read outside of the table.
        """
        return self.apply("take_rows", table, index)

    def put_rows(
        self,
        base: Tensor,
        index: Tensor | tuple[Tensor, ...],
        rows: Tensor,
        dim: int | tuple[int, ...] = 0,
    ) -> Tensor:
        """``base`` with ``rows`` at the indexed places of dimension ``dim``: an append to a cache.

        Args:
            base: an input.
            index: an int64 or int32 input [T], or one for each of several dimensions; places below
                0 count from the end, and rows of places that do not exist are left out. Of equal
                places either row may be stored.
            rows: shape of ``base`` with T in the place of dimension ``dim``, or of the first of
                several and without the others; of its element type.
            dim: a dimension of ``base``, or several in rising order.

        The result must be an output of the graph.
        """
        return self.apply("put_rows", base, *each(index), rows, dim=dim)

    def scaled_dot_product_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        is_causal: bool = False,
        scale: float | None = None,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """``softmax(query key^T * scale) value``, as in ``torch.nn.functional``.

        Leading dimensions broadcast: G query heads for each head of keys and values are ``[B, H, G,
        M, d]`` with keys ``[B, H, 1, S, d]``.

        Args:
            query: ``[..., M, d]``.
            key: ``[..., S, d]``.
            value: ``[..., S, e]``.
            is_causal: row i sees keys 0..i; with ``lengths`` the last row sees the last key of its
                sequence, and row i those up to M - 1 - i before it.
            scale: None for ``1 / sqrt(d)``.
            lengths: an int32 input ``[B]``, keys of each sequence, or None. Rows that see no key
                are 0.
        """
        operands = (query, key, value) if lengths is None else (query, key, value, lengths)
        return self.apply(
            "scaled_dot_product_attention", *operands, is_causal=is_causal, scale=scale
        )

    def transpose(self, a: Tensor, dims: Sequence[int] | None = None, *more: int) -> Tensor:
        """Permute dimensions; without ``dims`` the last two change places."""
        if more:
            raise OperatorError(
                f"transpose(x, {dims}, {', '.join(map(str, more))}): give the new order of all "
                "dimensions, as transpose(x, (0, 2, 1)); without one the last two change places"
            )
        return self.apply("transpose", a, dims=dims)

    def rms_norm(
        self,
        a: Tensor,
        weight: Tensor | None = None,
        normalized_shape: Sequence[int] | None = None,
        eps: float = 1e-6,
    ) -> Tensor:
        """``a / sqrt(mean(a^2) + eps) * weight`` over the last dimension.

        Args:
            a: any rank.
            weight: shape ``[n]`` where n is a's last extent, or None.
            normalized_shape: ``(n,)`` if given; anything else is refused.
            eps: added to the mean of squares; 0 is allowed.
        """
        a = self._operand("rms_norm", a)
        if isinstance(weight, list | tuple):  # rms_norm(X, (n,)): PyTorch's second argument
            weight, normalized_shape = None, weight
        given = normalized_shape
        if given is not None and (
            not isinstance(given, list | tuple) or tuple(given) != a.shape[-1:]
        ):
            raise ShapeError(
                f"rms_norm({a!r}, normalized_shape={given!r}): must be the last "
                f"dimension, ({a.shape[-1] if a.shape else ''},)"
            )
        operands = (a,) if weight is None else (a, weight)
        return self.apply("rms_norm", *operands, eps=eps)

    def layer_norm(
        self, a: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
    ) -> Tensor:
        """``(a - mean a) / sqrt(var a + eps) * weight + bias`` over the last dimension.

        Args:
            a: any rank.
            weight: shape ``[n]`` where n is a's last extent, or None.
            bias: the same, or None.
            eps: added to the variance; 0 is allowed.
        """
        if weight is None:
            y = self.apply("layer_norm", a, eps=eps)
            return y if bias is None else self.add(y, bias)
        operands = (a, weight) if bias is None else (a, weight, bias)
        return self.apply("layer_norm", *operands, eps=eps)
