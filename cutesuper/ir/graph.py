"""The kernel graph: *what* to compute, a DAG of tensor operators, and its Python builder."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, ClassVar

from cutesuper.errors import DTypeError, GraphError, OperatorError, ShapeError
from cutesuper.ir.arguments import check_options, shown
from cutesuper.ir.dims import Dim, Shape, Symbol, extent, show_shape
from cutesuper.ir.dtypes import ALL, DType, as_dtype, float16, float32
from cutesuper.ir.operators.base import (
    CONSTANT,
    INPUT,
    Attributes,
    Operator,
    each,
    facets,
    lookup,
)
from cutesuper.ir.operators.builders import NamedOperators


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

    @property
    def facets(self) -> Operator:
        """The operator's entry in the table."""
        return facets(self.operator)

    @property
    def given(self) -> bool:
        """True for inputs, and for values put together from parts of them: no kernel makes them."""
        return self.operator == INPUT or self.facets.gathers


@dataclass(frozen=True, eq=False)
class Tensor:
    """Handle of a value of a graph, as returned by the builder."""

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

#: names that the graph gives to results; an input must not have such a name
VALUE_NAME = re.compile(r"t\d+")


@dataclass(eq=False)
class KernelGraph(NamedOperators):
    """A program as a DAG of tensor operators; build it with its methods.

    Every method takes tensors of this graph (numbers where an operand may be a scalar), checks
    shapes and element types at once, and returns the new tensor.
    """

    #: `cutesuper.superoptimize` of this graph; the package sets it, since the IR does not know the
    #: stages that use it
    superoptimize: ClassVar[Callable[..., Any]]

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
            dims: extents, of which any may be a `Symbol` (``cs.symbol("M")``). Which ones a kernel
                takes is up to its loop: matrix products the first extent, rows any but that of a
                row, attention those of rows and keys. With an extent of 0 there is no kernel, and
                PyTorch computes what there is.
            dtype: fp16, bf16 or fp32, which may differ from input to input; int32 for lengths and
                tables of pages (`length_mask`, `gather_pages`); int64 or int32 for labels (`pick`,
                `label_weight`) and indices of rows (`take_rows`, `put_rows`).
            name: for messages and drawings; default ``X``, ``W``, ... by position.
            constant: this tensor is not written while a kernel that reads it may be in flight, so a
                kernel launched with ``dependent_launch=True`` may load it before its predecessor in
                the stream has finished. Weights are, activations are not.

        Raises:
            ShapeError: an extent that is neither an int from 0 on nor a Symbol.
            DTypeError: another element type.
            GraphError: a name that is taken, or that cannot be printed.
            OptionError: ``constant`` is neither True nor False.
        """
        shape = tuple(dims) if isinstance(dims, list | tuple) else None
        if shape is None:
            raise ShapeError(f"new_input(dims={dims!r}): dims must be a tuple of extents")
        if not shape:
            raise ShapeError(
                "new_input(dims=[]): a tensor needs a dimension; use dims=(1,) for a "
                "scalar, or a number where an operand may be one"
            )
        for i, d in enumerate(shape):
            number = isinstance(d, int) and not isinstance(d, bool) and d >= 0
            if not (number or isinstance(d, Symbol)):
                texts = [str(e) if isinstance(e, Symbol) else repr(e) for e in shape]
                raise ShapeError(
                    f"new_input(dims=[{', '.join(texts)}]): extent {i} is {texts[i]}; extents are "
                    "ints from 0 on, or symbols"
                )
            if isinstance(d, Symbol):
                self._check_symbol(d)
        check_options(constant=constant)
        name = self._fresh_name() if name is None else name
        if not (isinstance(name, str) and name and name.isprintable()):
            raise GraphError(f"new_input(name={shown(name)}): a name is a text that can be printed")
        if VALUE_NAME.fullmatch(name):
            raise GraphError(f"new_input(name={name!r}): t0, t1, ... are taken by results")
        if any(n.name == name for n in self.nodes if n.operator == INPUT):
            raise GraphError(f"new_input(name={name!r}): another input has this name")
        node = Node("input", (), {}, shape, as_dtype(dtype), name, constant)
        return self._append(node)

    def apply(self, operator: str, *operands: Operand, **attributes: Any) -> Tensor:
        """Apply an operator of the table by name; the named methods all come through here."""
        op = lookup(operator)
        if op.name == INPUT:
            raise OperatorError("apply('input'): use new_input(dims=, dtype=)")
        args = [self._operand(operator, a) for a in operands]
        if op.arity >= 0 and len(args) != op.arity:
            raise OperatorError(f"{operator}: takes {op.arity} operand(s), got {len(args)}")
        attributes = op.check_attributes(attributes)
        _check_kinds(op, args)
        shape = op.shape([t.shape for t in args], attributes)
        dtype = self.result_dtype(operator, args, attributes)
        node = Node(
            operator, tuple(t.index for t in args), attributes, shape, dtype, self._value_name()
        )
        return self._append(node)

    def mark_output(self, tensor: Tensor, dtype: Any = None) -> Tensor:
        """Declare a tensor as an output; outputs are returned in the order of these calls.

        Args:
            tensor: computed from inputs, not an output yet.
            dtype: type in which it is stored: fp16, bf16 or fp32, whatever the inputs are
                (everything is computed in fp32). None: the type of the inputs that it is computed
                from, fp32 where they differ (see `result_dtype`). Statistics of rows for a backward
                pass are best fp32: rounded to 16 bits, a maximum of 50 is off by 0.1, and what is
                left of its exponentials by 10 %.

        Raises:
            GraphError: an input, or an output twice.
            DTypeError: another element type than these.
        """
        t = self._operand("mark_output", tensor)
        if t.node.operator in (INPUT, CONSTANT):
            raise GraphError(f"mark_output({t!r}): an input cannot be an output; compute something")
        if t.index in self.outputs:
            raise GraphError(f"mark_output({t!r}): it is already an output")
        if dtype is not None:
            self._store_as(t, as_dtype(dtype))
        self.outputs.append(t.index)
        return t

    # ------------------------------------------------------------------------------- reading

    @property
    def inputs(self) -> list[int]:
        """Indices of the input nodes, in the order they were made."""
        return [i for i, n in enumerate(self.nodes) if n.operator == INPUT]

    @property
    def continued(self) -> dict[int, int]:
        """The outputs that rows are put into, by position, each with the position of its input."""
        made = {n: self.nodes[i] for n, i in enumerate(self.outputs)}
        return {n: self.inputs.index(p.inputs[0]) for n, p in made.items() if p.facets.puts}

    @property
    def vacant(self) -> bool:
        """True if a tensor has no elements whatever the symbols are: an extent is 0."""
        return any(0 in n.shape for n in self.nodes)

    def tensor(self, index: int) -> Tensor:
        """Handle of node ``index``, as returned by the builder."""
        return Tensor(self, index)

    def result_dtype(self, operator: str, args: Sequence[Tensor], attributes: Attributes) -> DType:
        """Element type of an operator's result, unless it is an output of another type.

        The type it converts to, else that of its operands; float32 where they differ, as in
        PyTorch. But float32 statistics of rows (last extent 1) leave the type to the other
        operands: ``x * rstd`` has the type of x.

        Raises:
            DTypeError: operands of different types of an operator that multiplies matrices or puts
                tensors together.
        """
        converted = lookup(operator).dtype(attributes)
        if converted is not None:
            return converted
        given = [(t, self.own_dtype(t)) for t in args if t.node.operator != CONSTANT]
        given = [(t, d) for t, d in given if not d.integer]
        dtypes = {d for _, d in given}
        if len(dtypes) > 1 and lookup(operator).one_type:
            raise DTypeError(
                f"{operator}({', '.join(map(repr, args))}): element types differ; products take "
                "operands of one type, and tensors that are put together have one: convert one"
            )
        if len(dtypes) > 1:
            dtypes -= {float32 for t, _ in given if t.shape[-1:] == (1,)}
            dtypes |= {d for t, d in given if t.shape[-1:] != (1,)}
        if not dtypes:  # only numbers, or integers, one for each row
            return float32 if lookup(operator).integers else float16
        return dtypes.pop() if len(dtypes) == 1 else float32

    def needed(self, values: Iterable[int], given: Collection[int] = ()) -> set[int]:
        """Indices of these values and of all nodes they depend on, back to those that are given."""
        found = {i for i in values if i not in given}
        for i in reversed(range(len(self.nodes))):
            if i in found:
                found.update(j for j in self.nodes[i].inputs if j not in given)
        return found

    def expanded(self) -> KernelGraph:
        """The same program in primitive operators, without nodes that no output needs.
        Concatenations and slices remain at its border only (`cutesuper.ir.border`).

        before: ``y = rms_norm(x)``; after: ``y = div(x, sqrt(add(mean(square(x)), 1e-6)))``.
        Inputs keep their order, their names and their attributes, used or not. A graph with an
        extent of 0 stays as it is: it has no kernels, and a maximum of nothing is refused.

        Raises:
            OperatorError, GraphError: a concatenation or a slice that cannot be removed, see
                `cutesuper.ir.remove_concat`.
        """
        if self.vacant:
            return self
        g = self._primitive()
        if any(lookup(n.operator).cuts for n in g.nodes):
            from cutesuper.ir.remove_concat import without_pieces

            g = without_pieces(g)._with_types_of(self)
        return g

    @property
    def joins_sums(self) -> bool:
        """True if an output that is put together from pieces needs a reduction over pieces.
        All of them are read before any is made, in a kernel for each width."""
        from cutesuper.ir.remove_concat import joins_sums

        joins = any(n.facets.joins for n in self.nodes)
        return joins and joins_sums(self._primitive())

    def _primitive(self) -> KernelGraph:
        """The same program in primitive operators, without nodes that no output needs."""
        needed = self.needed(self.outputs)
        used = self._with_parts(j for n in self.nodes if not n.facets.cuts for j in n.inputs)
        used &= self._with_parts(self.outputs)
        g = KernelGraph()
        new: dict[int, Tensor] = {}
        for i, n in enumerate(self.nodes):
            if n.operator == INPUT:
                new[i] = g._append(n)
            elif i in needed:
                args, first = [new[j] for j in n.inputs], len(g.nodes)
                op = lookup(n.operator)
                if op.one_type:  # an output may be stored in another type than it is used in
                    args = [g._as_used(self, j, t) for j, t in zip(n.inputs, args, strict=True)]
                attributes = dict(n.attributes)
                new[i] = (
                    op.expand(g, args, attributes)
                    if op.composite
                    else g.apply(n.operator, *args, **attributes)
                )
                if op.stored:  # so that there is something to compute, and a place for a cut
                    new[i] = g.convert(new[i], new[i].dtype)
                if op.composite and n.dtype == float32:
                    g._widen(first)
                elif op.composite and op.elementwise and new[i].index >= first:
                    # 1 + tanh(u) of GELU cancels: a 16-bit tanh(u) was 14% off at x = -2.9
                    g._widen(first)
                    if i in used:  # by others than the caller: its type follows from operands
                        new[i] = g.convert(new[i], self.own_dtype(self.tensor(i)))
                    else:
                        g.nodes[new[i].index] = replace(new[i].node, dtype=n.dtype)
        g.outputs = [new[i].index for i in self.outputs]
        return g._with_types_of(self)

    def _with_parts(self, values: Iterable[int]) -> set[int]:
        """These values, and those that they are put together from or cut out of."""
        found = set(values)
        for i in reversed(range(len(self.nodes))):
            if i in found and self.nodes[i].facets.cuts:
                found.update(self.nodes[i].inputs)
        return found

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
                if i in needed and n.operator != INPUT:
                    new[i] = g.copy_node(self, i, [new[j] for j in n.inputs])
            made |= {n: new[self.outputs[n]].index for n in group}
        g.outputs = [made[n] for n in range(len(self.outputs))]
        return g._with_types_of(self)

    def copy_node(self, other: KernelGraph, i: int, operands: Sequence[Tensor]) -> Tensor:
        """Node ``i`` of another graph with operands of this one, in the type that it has there.
        Its users need that type, which may be a wider one than follows from the operands. An input
        stays as it is."""
        node = other.nodes[i]
        if node.operator == INPUT:
            return self._append(node)
        t = self.apply(node.operator, *operands, **dict(node.attributes))
        self.nodes[t.index] = replace(t.node, dtype=other.own_dtype(other.tensor(i)))
        return t

    def with_hints(self, hints: dict[str, int]) -> KernelGraph:
        """The same program with other hints for its symbolic extents.
        Of rows that are put there are never more than places, or they would have to share some."""
        for rows, places in self._places():
            hints = {**hints, rows.name: min(hints.get(rows.name, rows.hint), places)}
        g = KernelGraph(outputs=list(self.outputs))
        for n in self.nodes:
            shape = tuple(
                Symbol(d.name, hints.get(d.name, d.hint)) if isinstance(d, Symbol) else d
                for d in n.shape
            )
            g.nodes.append(replace(n, shape=shape))
        return g

    def __repr__(self) -> str:
        from cutesuper.ir.graph_text import kernel_graph_text

        return kernel_graph_text(self)

    # ------------------------------------------------------------------------------- helpers

    def _places(self) -> Iterator[tuple[Symbol, int]]:
        """Symbolic numbers of rows that are put into tensors, and how many places there are."""
        for n in self.nodes:
            rows = self.nodes[n.inputs[1]].shape[0] if n.facets.puts else 0
            if isinstance(rows, Symbol):
                yield rows, prod(extent(n.shape[d]) for d in each(n.attributes["dim"]))

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
        if dtype == t.dtype:
            return
        if t.dtype.integer:
            raise DTypeError(f"mark_output({t!r}, {dtype}): it is {t.dtype}; leave the type out")
        if dtype.integer:
            raise DTypeError(
                f"mark_output({t!r}, {dtype}): nothing is computed in integers; use one of "
                f"{', '.join(ALL)}"
            )
        if t.node.facets.puts and dtype != t.dtype:
            raise DTypeError(
                f"mark_output({t!r}, {dtype}): rows are put into a tensor of {t.dtype}, which the "
                "result continues; leave the type out"
            )
        self.nodes[t.index] = replace(t.node, dtype=dtype)

    def own_dtype(self, t: Tensor) -> DType:
        """The type of a value, even if it is stored as another type because it is an output."""
        if t.index not in self.outputs:
            return t.dtype
        args = [self.tensor(i) for i in t.node.inputs]
        return self.result_dtype(t.node.operator, args, t.node.attributes)

    def _as_used(self, other: KernelGraph, i: int, t: Tensor) -> Tensor:
        """A value of this graph in the type that node ``i`` of another graph has for its users."""
        dtype = other.own_dtype(other.tensor(i))
        return t if dtype == t.dtype else self.convert(t, dtype)

    def _with_types_of(self, other: KernelGraph) -> KernelGraph:
        """The graph with outputs stored in the types of another graph's outputs."""
        for i, j in zip(self.outputs, other.outputs, strict=True):
            self.nodes[i] = replace(self.nodes[i], dtype=other.nodes[j].dtype)
        return self

    def _widen(self, first: int) -> None:
        """Let values of a composite operator of float32 be float32 as well.
        A kernel that stores one does not round it then. Operands of products keep their type."""
        kept = set[int]()
        for i in reversed(range(first, len(self.nodes))):
            node = self.nodes[i]
            if node.facets.one_type or (node.facets.permutes and i in kept):
                kept.update(node.inputs)
            if i not in kept:
                self.nodes[i] = replace(node, dtype=float32)

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
    """Check that integers stand exactly where an operator takes them, and inputs where required.

    Raises:
        DTypeError, GraphError: naming the operand.
    """
    integers = op.integers_among(len(args))
    for k, t in enumerate(args):
        taken = t.dtype in op.integer_types and t.node.operator == INPUT
        if k in integers and not taken:
            names = [d.name for d in op.integer_types]
            raise DTypeError(
                f"{op.name}: operand {k}, {t!r}, must be an {' or '.join(names)} input; use "
                f"new_input(dims=, dtype={names[0]!r})"
            )
        if k not in integers and t.dtype.integer:
            raise DTypeError(
                f"{op.name}: operand {k}, {t!r}, is {t.dtype}, which only lengths (length_mask, "
                "scaled_dot_product_attention), tables (gather_pages), indices (take_rows, "
                "put_rows), labels (pick, label_weight, cross_entropy) and places (argmax) are; "
                "use float16, bfloat16 or float32"
            )
        if k in op.of_inputs and t.node.operator != INPUT:
            raise GraphError(
                f"{op.name}: operand {k}, {t!r}, is computed; it reads inputs of the graph only, "
                "which lie in memory"
            )


def new_kernel_graph() -> KernelGraph:
    """An empty kernel graph."""
    return KernelGraph()


def symbol(name: str, hint: int = 16) -> Symbol:
    """An extent that may differ from call to call; see `Symbol`.

    Raises:
        ShapeError: a name that is not an identifier, or a hint below 1.
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise ShapeError(f"symbol({name!r}): the name must be an identifier")
    if isinstance(hint, bool) or not isinstance(hint, int) or hint < 1:
        raise ShapeError(f"symbol({name!r}, hint={hint!r}): the hint must be a positive int")
    return Symbol(name, hint)
