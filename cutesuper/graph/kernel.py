"""The kernel graph: *what* to compute, a DAG of tensor operators, and its Python builder."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from cutesuper.errors import DTypeError, GraphError, OperatorError, ShapeError
from cutesuper.graph.dims import Dim, Shape, Symbol, show_shape
from cutesuper.graph.dtypes import DType, as_dtype, float16, float32, int32
from cutesuper.graph.operators import Attributes, Operator, lookup

if TYPE_CHECKING:
    from cutesuper.runtime.kernel import Kernel


@dataclass(frozen=True)
class Node:
    """One operator application. ``inputs`` are indices of earlier nodes."""

    operator: str
    inputs: tuple[int, ...]
    attributes: Attributes
    shape: Shape
    dtype: DType
    name: str
    #: inputs only: never written while a kernel that reads it may be in flight (a weight)
    constant: bool = False


@dataclass(frozen=True, eq=False)
class Tensor:
    """A value of a graph, as the builder hands it out."""

    graph: KernelGraph
    index: int

    @property
    def node(self) -> Node:
        return self.graph.nodes[self.index]

    @property
    def shape(self) -> Shape:
        return self.node.shape

    @property
    def dtype(self) -> DType:
        return self.node.dtype

    @property
    def name(self) -> str:
        return self.node.name

    def __repr__(self) -> str:
        return f"{self.name}{show_shape(self.shape)} {self.dtype}"

    def __add__(self, other: Tensor | float) -> Tensor:
        return self.graph.add(self, other)

    def __radd__(self, other: float) -> Tensor:
        return self.graph.add(other, self)

    def __sub__(self, other: Tensor | float) -> Tensor:
        return self.graph.sub(self, other)

    def __rsub__(self, other: float) -> Tensor:
        return self.graph.sub(other, self)

    def __mul__(self, other: Tensor | float) -> Tensor:
        return self.graph.mul(self, other)

    def __rmul__(self, other: float) -> Tensor:
        return self.graph.mul(other, self)

    def __truediv__(self, other: Tensor | float) -> Tensor:
        return self.graph.div(self, other)

    def __rtruediv__(self, other: float) -> Tensor:
        return self.graph.div(other, self)

    def __matmul__(self, other: Tensor) -> Tensor:
        return self.graph.matmul(self, other)


Operand = Tensor | float | int

#: names that the graph gives to results; an input must not have one of them
VALUE_NAME = re.compile(r"t\d+")


@dataclass(eq=False)
class KernelGraph:
    """A program as a DAG of tensor operators; build it with its methods.

    Every method takes tensors of this graph (numbers where an operand may be a scalar), checks
    shapes and element types at once, and returns the new tensor.
    """

    nodes: list[Node] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)

    # ------------------------------------------------------------------------------- building

    def new_input(
        self,
        dims: Sequence[Dim],
        dtype: Any = float16,
        name: str | None = None,
        constant: bool = False,
    ) -> Tensor:
        """Add an input.

        Args:
            dims: extents; the first one may be a `Symbol` (``cs.symbol("M")``).
            dtype: fp16, bf16 or fp32; int32 for lengths and tables of pages (`length_mask`,
                `gather_pages`).
            name: for messages and drawings; default ``X``, ``W``, ... by position.
            constant: nobody writes this tensor while a kernel that reads it may be in flight, so a
                kernel launched with ``dependent_launch=True`` may load it before its predecessor
                in the stream has finished. Weights are, activations are not.

        Raises:
            ShapeError: an extent that is not a positive int (or a leading Symbol).
            DTypeError: another element type.
        """
        shape = tuple(dims) if isinstance(dims, list | tuple) else None
        if shape is None:
            raise ShapeError(f"new_input(dims={dims!r}): dims must be a tuple of extents")
        if not shape:
            raise ShapeError("new_input(dims=[]): a tensor needs a dimension; use dims=(1,) for a "
                             "scalar, or a number where an operand may be one")
        for i, d in enumerate(shape):
            ok = isinstance(d, Symbol) and i == 0
            ok = ok or (isinstance(d, int) and not isinstance(d, bool) and d > 0)
            if not ok:
                raise ShapeError(
                    f"new_input(dims={list(shape)}): extent {i} is {d!r}; extents are positive "
                    "ints, and only the first may be symbolic"
                )
            if isinstance(d, Symbol):
                self._check_symbol(d)
        name = self._fresh_name() if name is None else name
        if not isinstance(name, str) or not name or VALUE_NAME.fullmatch(name):
            raise GraphError(
                f"new_input(name={name!r}): a name is a text; t0, t1, ... are taken by results"
            )
        if any(n.name == name for n in self.nodes if n.operator == "input"):
            raise GraphError(f"new_input(name={name!r}): another input has this name")
        node = Node("input", (), {}, shape, as_dtype(dtype), name, constant)
        return self._append(node)

    def apply(self, operator: str, *operands: Operand, **attributes: Any) -> Tensor:
        """Apply an operator of the table by name; the named methods all come through here."""
        op = lookup(operator)
        if op.name == "input":
            raise OperatorError("apply('input'): use new_input(dims=, dtype=)")
        args = [self._operand(operator, a) for a in operands]
        if op.arity >= 0 and len(args) != op.arity:
            raise OperatorError(f"{operator}: takes {op.arity} operand(s), got {len(args)}")
        attributes = op.check_attributes(attributes)
        _check_kinds(op, args)
        shape = op.shape([t.shape for t in args], attributes)
        dtype = self.result_dtype(operator, args)
        node = Node(
            operator, tuple(t.index for t in args), attributes, shape, dtype, self._value_name()
        )
        return self._append(node)

    def mark_output(self, tensor: Tensor, dtype: Any = None) -> Tensor:
        """Declare a tensor as an output; outputs are returned in the order of these calls.

        Args:
            tensor: computed from inputs, and no output yet.
            dtype: fp32 for a statistic of rows (last extent 1) of a 16-bit program, which a
                backward pass reads: rounded to 16 bits, a maximum of 50 is off by 0.1, and what is
                left of its exponentials by 10 %. None: the element type of the inputs.

        Raises:
            GraphError: an input, or an output twice.
            DTypeError: another element type than these.
        """
        t = self._operand("mark_output", tensor)
        if t.node.operator in ("input", "constant"):
            raise GraphError(f"mark_output({t!r}): an input cannot be an output; compute something")
        if t.index in self.outputs:
            raise GraphError(f"mark_output({t!r}): it is already an output")
        if dtype is not None:
            self._store_as(t, as_dtype(dtype))
        self.outputs.append(t.index)
        return t

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """``a[..., M, K] @ b[..., K, N]``."""
        return self.apply("matmul", a, b)

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

    def exp(self, a: Tensor) -> Tensor:
        """e to the power of ``a``."""
        return self.apply("exp", a)

    def sqrt(self, a: Tensor) -> Tensor:
        """Square root."""
        return self.apply("sqrt", a)

    def rsqrt(self, a: Tensor) -> Tensor:
        """1 / square root."""
        return self.apply("rsqrt", a)

    def square(self, a: Tensor) -> Tensor:
        """``a * a``."""
        return self.apply("square", a)

    def silu(self, a: Tensor) -> Tensor:
        """``a * sigmoid(a)``."""
        return self.apply("silu", a)

    def gelu(self, a: Tensor) -> Tensor:
        """``a Phi(a)`` with the error function."""
        return self.apply("gelu", a)

    def relu(self, a: Tensor) -> Tensor:
        """``max(a, 0)``."""
        return self.apply("relu", a)

    def sigmoid(self, a: Tensor) -> Tensor:
        """``1 / (1 + exp(-a))``."""
        return self.apply("sigmoid", a)

    def tanh(self, a: Tensor) -> Tensor:
        """Hyperbolic tangent."""
        return self.apply("tanh", a)

    def erf(self, a: Tensor) -> Tensor:
        """The error function."""
        return self.apply("erf", a)

    def step(self, a: Tensor) -> Tensor:
        """1 where ``a > 0``, 0 elsewhere."""
        return self.apply("step", a)

    def clamp(self, a: Tensor, min: float, max: float) -> Tensor:  # noqa: A002 (PyTorch's names)
        """``a`` limited to [min, max]."""
        return self.apply("clamp", a, min=min, max=max)

    def sum(self, a: Tensor, dim: int) -> Tensor:
        """Sum over ``dim``, which stays with extent 1."""
        return self.apply("sum", a, dim=dim)

    def reduction(self, a: Tensor, dim: int) -> Tensor:
        """Mirage's name for `sum`."""
        return self.sum(a, dim)

    def mean(self, a: Tensor, dim: int) -> Tensor:
        """Mean over ``dim``, which stays with extent 1."""
        return self.apply("mean", a, dim=dim)

    def max(self, a: Tensor, dim: int) -> Tensor:
        """Maximum over ``dim``, which stays with extent 1."""
        return self.apply("max", a, dim=dim)

    def softmax(self, a: Tensor, dim: int = -1) -> Tensor:
        """``exp(a - max a) / sum exp(a - max a)`` along ``dim``."""
        return self.apply("softmax", a, dim=dim)

    def concat(self, tensors: Sequence[Tensor], dim: int) -> Tensor:
        """Tensors one after the other along ``dim``; their other extents are equal.

        It has to vanish when the graph is expanded: what uses it works on its parts (see
        `cutesuper.graph.pieces`). It cannot be an output.
        """
        if not isinstance(tensors, list | tuple):
            raise OperatorError(f"concat({tensors!r}): takes a list of tensors, and dim")
        return self.apply("concat", *tensors, dim=dim)

    def slice(self, a: Tensor, dim: int, start: int, stop: int) -> Tensor:
        """Elements ``start`` to ``stop`` (exclusive, negative from the end) along ``dim``.

        Of something that is computed from parts, or put together from them; a piece of an input
        is refused when the graph is expanded.
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
            lengths: an int32 input with the first dimensions of the scores, ``[B]``. More than S
                is S; a row that sees nothing is 0 after a softmax.
            causal: row i sees ``j < lengths[b] - (L - 1 - i)``: the last row sees its whole
                sequence, as in decoding with a cache.
        """
        return self.apply("length_mask", scores, lengths, causal=causal)

    def gather_pages(self, cache: Tensor, table: Tensor) -> Tensor:
        """Sequences whose parts lie in pages: ``[B, n * P, ...]``.

        Args:
            cache: an input ``[pages, P, ...]``.
            table: an int32 input ``[B, n]``: the pages of each sequence in order. What is in the
                cache beyond a sequence's length is read and has no effect, so the table has to
                name existing pages there as well.
        """
        return self.apply("gather_pages", cache, table)

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

    def transpose(self, a: Tensor, dims: Sequence[int] | None = None) -> Tensor:
        """Permute dimensions; without ``dims`` the last two change places."""
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

    # ------------------------------------------------------------------------------- reading

    @property
    def inputs(self) -> list[int]:
        """Indices of the input nodes, in the order they were made."""
        return [i for i, n in enumerate(self.nodes) if n.operator == "input"]

    def tensor(self, index: int) -> Tensor:
        """The builder's handle of node ``index``."""
        return Tensor(self, index)

    def superoptimize(self, **options: Any) -> Kernel:
        """Search, verify and compile the best program; see `cutesuper.superoptimize`."""
        from cutesuper.optimize import superoptimize

        return superoptimize(self, **options)

    def result_dtype(self, operator: str, args: Sequence[Tensor]) -> DType:
        """The element type of an operator's result.

        Statistics of rows (last extent 1) may be float32 beside 16-bit operands of element-wise
        operators; everything is computed in float32 anyway. Raises DTypeError.
        """
        given = [t for t in args if t.node.operator != "constant" and t.dtype != int32]
        dtypes = {t.dtype for t in given}
        if len(dtypes) > 1 and lookup(operator).elementwise:
            dtypes -= {float32 for t in given if t.shape[-1:] == (1,)}
            dtypes |= {t.dtype for t in given if t.shape[-1:] != (1,)}
        if len(dtypes) > 1:
            raise DTypeError(
                f"{operator}({', '.join(map(repr, args))}): element types differ; "
                "use one type for all inputs (float32 is for statistics of rows, of last extent 1)"
            )
        return dtypes.pop() if dtypes else float16

    def needed(self, values: Iterable[int]) -> set[int]:
        """Indices of all nodes that these depend on, themselves among them."""
        found = set(values)
        for i in reversed(range(len(self.nodes))):
            if i in found:
                found.update(self.nodes[i].inputs)
        return found

    def expanded(self) -> KernelGraph:
        """The same program in primitive operators, without nodes that no output needs.

        before: ``y = rms_norm(x)``; after: ``y = div(x, sqrt(add(mean(square(x)), 1e-6)))``.
        Inputs keep their order, their names and their attributes, used or not.

        Raises:
            OperatorError, GraphError: a concatenation or a slice that cannot be removed, see
                `cutesuper.graph.pieces`.
        """
        needed = self.needed(self.outputs)
        g = KernelGraph()
        new: dict[int, Tensor] = {}
        for i, n in enumerate(self.nodes):
            if n.operator == "input":
                new[i] = g._append(n)
            elif i in needed:
                args = [new[j] for j in n.inputs]
                op = lookup(n.operator)
                attributes = dict(n.attributes)
                new[i] = (
                    op.expand(g, args, attributes)
                    if op.composite
                    else g.apply(n.operator, *args, **attributes)
                )
        g.outputs = [new[i].index for i in self.outputs]
        if any(lookup(n.operator).cuts for n in g.nodes):
            from cutesuper.graph.pieces import without_pieces

            g = without_pieces(g)
        return g._with_types_of(self)

    def apart(self, groups: Sequence[Sequence[int]]) -> KernelGraph:
        """The same program, where groups of outputs share nothing but inputs.

        before: ``dq`` and ``dk`` both made from ``P = exp(Q K^T - L)``; after: P is computed for
        each, so that kernels for them need not store it.

        Args:
            groups: positions of outputs; every output is in one group.
        """
        g = KernelGraph()
        inputs = {i: g._append(self.nodes[i]) for i in self.inputs}
        made: dict[int, int] = {}
        for group in groups:
            needed = self.needed(self.outputs[n] for n in group)
            new = dict(inputs)
            for i, n in enumerate(self.nodes):
                if i in needed and n.operator != "input":
                    new[i] = g.apply(n.operator, *(new[j] for j in n.inputs), **dict(n.attributes))
            made |= {n: new[self.outputs[n]].index for n in group}
        g.outputs = [made[n] for n in range(len(self.outputs))]
        return g._with_types_of(self)

    def with_hints(self, hints: dict[str, int]) -> KernelGraph:
        """The same program with other hints for its symbolic extents."""
        g = KernelGraph(outputs=list(self.outputs))
        for n in self.nodes:
            shape = tuple(
                Symbol(d.name, hints.get(d.name, d.hint)) if isinstance(d, Symbol) else d
                for d in n.shape
            )
            g.nodes.append(replace(n, shape=shape))
        return g

    def __repr__(self) -> str:
        from cutesuper.graph.draw import kernel_graph_text

        return kernel_graph_text(self)

    # ------------------------------------------------------------------------------- helpers

    def _append(self, node: Node) -> Tensor:
        self.nodes.append(node)
        return Tensor(self, len(self.nodes) - 1)

    def _operand(self, operator: str, value: Any) -> Tensor:
        if isinstance(value, Tensor):
            if value.graph is not self:
                raise GraphError(f"{operator}: {value!r} belongs to another graph")
            return value
        if isinstance(value, int | float) and not isinstance(value, bool):
            return self.apply("constant", value=value)
        raise OperatorError(
            f"{operator}: operand {type(value).__name__} is neither a tensor of this graph nor a "
            "number; graph methods take what new_input() and other methods return"
        )

    def _store_as(self, t: Tensor, dtype: DType) -> None:
        if dtype not in (t.dtype, float32) or (dtype != t.dtype and t.shape[-1:] != (1,)):
            raise DTypeError(
                f"mark_output({t!r}, {dtype}): only statistics of rows, whose last extent is 1, "
                "may have another type than the inputs, float32; leave dtype out"
            )
        self.nodes[t.index] = replace(t.node, dtype=dtype)

    def _with_types_of(self, other: KernelGraph) -> KernelGraph:
        """This graph, whose outputs are stored as those of another one."""
        for i, j in zip(self.outputs, other.outputs, strict=True):
            self.nodes[i] = replace(self.nodes[i], dtype=other.nodes[j].dtype)
        return self

    def _check_symbol(self, symbol: Symbol) -> None:
        for other in (d for n in self.nodes for d in n.shape if isinstance(d, Symbol)):
            if other.name == symbol.name and other != symbol:
                raise ShapeError(
                    f"new_input: symbol {symbol} has the hint {symbol.hint} here and {other.hint} "
                    "in another input; use one Symbol object for both"
                )

    def _fresh_name(self) -> str:
        names = "XWABCDEFGHIJKLMNOPQRSTUVYZ"
        used = {n.name for n in self.nodes}
        return next((c for c in names if c not in used), f"I{len(self.nodes)}")

    def _value_name(self) -> str:
        return f"t{len(self.nodes)}"


def _check_kinds(op: Operator, args: list[Tensor]) -> None:
    """int32 tensors where an operator takes them, and nowhere else; inputs where it needs them.

    Raises:
        DTypeError, GraphError: naming the operand.
    """
    for k, t in enumerate(args):
        if k in op.integers and t.dtype != int32:
            raise DTypeError(
                f"{op.name}: operand {k}, {t!r}, must be an int32 input; use "
                "new_input(dims=, dtype='int32')"
            )
        if k not in op.integers and t.dtype == int32:
            raise DTypeError(
                f"{op.name}: operand {k}, {t!r}, is int32, which only lengths (length_mask, "
                "scaled_dot_product_attention) and tables (gather_pages) are; use float16, "
                "bfloat16 or float32"
            )
        if op.of_inputs and t.node.operator != "input":
            raise GraphError(
                f"{op.name}: operand {k}, {t!r}, is computed; it reads inputs of the graph only, "
                "which lie in memory"
            )


def new_kernel_graph() -> KernelGraph:
    """An empty kernel graph."""
    return KernelGraph()


def symbol(name: str, hint: int = 16) -> Symbol:
    """A leading extent that may differ from call to call; see `Symbol`.

    Raises:
        ShapeError: a name that is no identifier, or a hint below 1.
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise ShapeError(f"symbol({name!r}): the name must be an identifier")
    if isinstance(hint, bool) or not isinstance(hint, int) or hint < 1:
        raise ShapeError(f"symbol({name!r}, hint={hint!r}): the hint must be a positive int")
    return Symbol(name, hint)
