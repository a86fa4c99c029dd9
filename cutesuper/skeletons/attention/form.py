"""The form of two chained products in one loop over the label between them, such as attention.

``f(Q K) V``: Q ``[rows, inner]``, K ``[inner, keys]``, V ``[keys, columns]``. A block holds some
rows and walks over the keys once, with running maxima and rescaled sums, or plain sums. A cluster
and the grid may also divide the keys (split-K): both join their parts inside the kernel.

before: ``softmax(Q K) V``, 6 operators and scores of rows x keys in memory; after: one kernel that
reads Q, K and V once, for ``Q[256, 64]`` and 4096 keys as ``N.cluster(8) N.loop(4)``, tile M=64
N=128.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from cutesuper.egraph.labelled import LabelledOp, LabelledProgram, Region
from cutesuper.egraph.products import (
    after_products,
    check_one_type,
    is_product,
    labels_of,
    shown,
)
from cutesuper.egraph.splits import Operand, Split, State
from cutesuper.errors import SearchError
from cutesuper.ir.block import CLUSTER_REDUCE, GRID_REDUCE, AxisKind, BlockProgram
from cutesuper.ir.dims import Symbol, extent
from cutesuper.ir.operators.monoid import SUM
from cutesuper.skeletons.attention.plan import MAX_WIDTH
from cutesuper.skeletons.form import ALIGN, check_reductions
from cutesuper.skeletons.operands import MULTIPLIED


@dataclass(frozen=True)
class AttentionForm:
    """``f([batch..., rows..., inner] @ [batch..., inner, keys]) @ [batch..., keys, columns]``.

    Q, K and V of a block are plain loads. Other computations are:

    * before the loop, from Q and vectors along ``inner``: the row operand, values of a row;
    * in the loop, from the tile of K or V: values of a key, by reductions over ``inner`` or
      ``columns``; from the scores: anything element-wise, with values of rows and keys; sums and
      maxima over the keys;
    * after the loop: anything element-wise on ``[rows, columns]``, with values of a row.

    Attributes:
        rows: labels that Q has and K does not: query heads of one head of K and V, positions.
        inner: the label of the first product, held whole.
        keys: the label of the second product and of the loop.
        columns: the last label of the result, held whole.
        batch: all other labels; a block has one element of each.
    """

    rows: tuple[str, ...]
    inner: str
    keys: str
    columns: str
    batch: tuple[str, ...]
    vectors = False

    def splits(self, program: LabelledProgram) -> Iterator[Split]:
        """Splits with the keys divided by the loop, and by a cluster, the grid, or both as well."""
        whole = (self.inner, self.columns)
        kinds: dict[str, tuple[AxisKind, ...]] = {
            d: () if d in whole else (AxisKind.GRID,) for d in program.dims
        }
        grid, cluster, loop = (AxisKind.GRID,), (AxisKind.CLUSTER,), (AxisKind.LOOP,)
        for own in (loop, cluster + loop, grid + loop, grid + cluster + loop):
            joined = (self.keys,) if AxisKind.GRID in own else ()
            yield Split(tuple((kinds | {self.keys: own}).items()), joined=joined)

    # ------------------------------------------------------------------------ rules of saturation

    def computes(self, operands: tuple[frozenset[str], ...], state: State) -> bool:
        """True except for arithmetic on partial sums, and for values that mix labels of products.
        Scores minus the maximum of their tile are allowed; only products may bring these labels
        together."""
        labels = frozenset[str]().union(*operands)
        if state.pending and self.keys not in labels:
            # a maximum, by which scores may be shifted; no operator of one number takes it
            return len(operands) == 1 and self.columns not in labels
        sides = [not labels.isdisjoint(self.rows)]
        sides += [d in labels for d in (self.inner, self.keys, self.columns)]
        if sum(sides) > 2 or {self.inner, self.columns} <= labels:
            return False
        if self.keys in labels and not labels.isdisjoint((self.inner, self.columns)):
            return all(x == labels for x in operands)  # only reductions follow
        # a factor of Q from a row or a number is as well a factor of the scores
        return self.inner not in labels or all(self.inner in x for x in operands)

    def reduces(self, labels: frozenset[str], over: str, state: State) -> bool:
        """True for the reductions that the loop runs.
        Of Q and K over the inner label, of V over its columns, and of scores over the keys."""
        rows = not labels.isdisjoint(self.rows)
        if over == self.keys:
            return rows
        if state.pending:
            return False
        return over == self.inner or (over == self.columns and self.keys in labels)

    def contracts(self, a: Operand, b: Operand, over: str) -> bool:
        """True for an operand with the rows first, and a plain load second."""
        rows = not a.labels.isdisjoint(self.rows)
        if not b.loaded or not rows or not b.labels.isdisjoint(self.rows):
            return False
        if over == self.inner:
            return self.keys in b.labels and self.keys not in a.labels and not a.state.pending
        return over == self.keys and self.columns in b.labels and self.columns not in a.labels

    def refuses(self, program: BlockProgram) -> str | None:
        """Refuse products that are computed twice, and axes that divide nothing."""
        for over in (self.inner, self.keys):
            products = (op for op in program.ops if op.facets.contracts)
            count = sum(op.attributes["over"] == over for op in products)
            if count != 1:
                return f"{count} products over {over} in a chain of two"
        kinds = {op.kind for op in program.ops}
        if program.of_kind(AxisKind.CLUSTER) and CLUSTER_REDUCE not in kinds:
            return "an unused cluster axis"
        if any(a.dim == self.keys for a in program.of_kind(AxisKind.GRID)) and (
            GRID_REDUCE not in kinds
        ):
            return "an unused grid axis"
        return None


def attention_form(
    region: Region, program: LabelledProgram, products: list[LabelledOp]
) -> AttentionForm:
    """The form of a region with two products, where one multiplies a function of the other.

    Raises:
        SearchError: with the reason why this form cannot run it.
    """
    check_reductions(program)
    if len(products) != 2:
        raise SearchError(f"{len(products)} matrix products in one kernel")
    first, second = products
    after = after_products(program)
    if after.isdisjoint(second.inputs):
        raise SearchError("two matrix products that do not use each other")
    form = _roles(program, first, second, after)
    _check_extents(program, form)
    _check_reductions(program, form, program.ops.index(second))
    _check_masks(program, form)
    for _, mapping in program.outputs:
        labels = labels_of(mapping)
        if form.columns in labels and labels[-1] != form.columns:
            raise SearchError(f"the attention loop stores its columns {form.columns} last")
    if all(form.columns not in labels_of(mapping) for _, mapping in program.outputs):
        raise SearchError(f"the attention loop: no output has its columns {form.columns}")
    loads = [op for op in program.of_kind("load") if _multiplied(region, program, op, form)]
    check_one_type(region, loads)
    return form


def _roles(
    program: LabelledProgram, first: LabelledOp, second: LabelledOp, after: set[int]
) -> AttentionForm:
    inner, keys = str(first.over), str(second.over)
    sides = [program.ops[i].labels for i in first.inputs]
    key_sides = [s for s in sides if keys in s]
    late = [i in after for i in second.inputs]
    if len(key_sides) != 1 or all(late):
        raise SearchError("both operands of a product depend on the one before")
    (k,), q = key_sides, next(s for s in sides if keys not in s)
    scores = program.ops[second.inputs[late.index(True)]].labels
    v = program.ops[second.inputs[late.index(False)]].labels
    rows = tuple(d for d in program.dims if d in q - k)
    columns = [d for d in program.dims if d in v - scores]
    if len(columns) != 1 or not v.isdisjoint(rows):
        raise SearchError(f"{shown(columns) or 'no label'} for the columns of the attention loop")
    if columns == [inner]:
        raise SearchError(f"the attention loop: its columns have the label {inner} of the scores")
    used = (*rows, inner, keys, columns[0])
    batch = tuple(d for d in program.dims if d not in used)
    if not q | k | v <= {*used, *batch}:
        raise SearchError("the attention loop: labels that no tensor has")
    return AttentionForm(rows, inner, keys, columns[0], batch)


def _check_extents(program: LabelledProgram, form: AttentionForm) -> None:
    for name in (form.inner, form.keys, form.columns):
        whole = program.dims[name]
        if name == form.keys:
            continue
        if isinstance(whole, Symbol):
            raise SearchError(
                f"the attention loop: the extent {whole} may only be one of rows, keys or batches"
            )
        if whole % ALIGN or whole > MAX_WIDTH:
            raise SearchError(
                f"the attention loop: {whole} elements of {name} in a row; a block holds "
                f"multiples of {ALIGN} up to {MAX_WIDTH}"
            )


def _check_reductions(program: LabelledProgram, form: AttentionForm, last: int) -> None:
    """Check the reductions besides the products. Raises SearchError."""
    after = {last}
    for i, op in enumerate(program.ops):
        if not after.isdisjoint(op.inputs):
            after.add(i)
        if op.over is None or i == last:
            continue
        if i in after:
            raise SearchError(f"{op.kind} of what the attention loop gives: another kernel")
        if op.over not in (form.inner, form.keys, form.columns):
            raise SearchError(f"the attention loop: {op.kind} over {op.over}")
    if any(i not in after and not _of_rows(program, form, i) for i, _ in program.outputs):
        raise SearchError("the attention loop: an output that does not depend on the second one")


def _of_rows(program: LabelledProgram, form: AttentionForm, i: int) -> bool:
    """True for a value of a row that a reduction over the keys gives, as the logarithm of a sum."""
    if not program.ops[i].labels.isdisjoint((form.inner, form.keys, form.columns)):
        return False
    return any(program.ops[j].over == form.keys for j in program.dependence.before(i))


def _check_masks(program: LabelledProgram, form: AttentionForm) -> None:
    """Check that masks are limits of the loop over the keys. Raises SearchError."""
    for op in program.ops:
        if not op.facets.masks:
            continue
        rows, columns = op.attributes["rows"], op.attributes["columns"]
        if columns != form.keys or rows not in (None, *form.rows):
            raise SearchError(
                f"the attention loop: {op.kind} hides {columns}"
                f"{'' if rows is None else f' by the position of {rows}'}, and the loop over "
                f"{form.keys} may hide {form.keys} by that of {shown(form.rows)}; mask scores "
                "whose last dimension the second product contracts"
            )


def _multiplied(
    region: Region, program: LabelledProgram, op: LabelledOp, form: AttentionForm
) -> bool:
    """True for loads of Q, K, V and inner vectors, not for lengths and operands of the scores.
    Raises SearchError."""
    own = labels_of(op.attributes["map"])
    matrix = [d for d in own if d not in form.batch]
    kinds = {"rows" if d in form.rows else d for d in matrix}
    staged = {
        frozenset(("rows", form.inner)): (form.inner,),
        frozenset((form.inner, form.keys)): (form.inner, form.keys),
        frozenset((form.keys, form.columns)): (form.columns, form.keys),
    }
    last = staged.get(frozenset(kinds), (form.inner,) if own == [form.inner] else None)
    dtype = region.input_dtypes[op.attributes["tensor"]]
    if last is None:
        if dtype.integer:
            return False
        if kinds <= {"rows"} or (kinds <= {"rows", form.keys} and _meets_scores(program, op, form)):
            return False
        raise SearchError(
            f"the attention loop: a tensor along {shown(own) or 'nothing'} is read; beside their "
            f"three matrices there may be vectors along {form.inner}, numbers of rows, those of "
            "keys that meet the scores, and lengths"
        )
    if dtype.name not in MULTIPLIED:
        raise SearchError(
            f"the attention loop in {dtype}: the tensor cores take float16 and bfloat16"
        )
    whole = program.dims[own[-1]]
    if own[-1] not in last or isinstance(whole, Symbol) or whole % ALIGN:
        raise SearchError(
            f"the attention loop: a tensor is stored along {own[-1]} ({whole} elements); its last "
            f"dimension must be {shown(last)}, a multiple of {ALIGN}"
        )
    return True


def _meets_scores(program: LabelledProgram, load: LabelledOp, form: AttentionForm) -> bool:
    """True for a load that is used in front of a product over the keys, not of its result."""
    products = (i for i, op in enumerate(program.ops) if _contracts(op, form.keys))
    own = program.ops.index(load)
    return any(program.dependence.reaches(own, i) for i in products)


def _contracts(op: LabelledOp, over: str) -> bool:
    return op.facets.contracts and op.over == over


# ------------------------------------------------------------------------------ the hoisted form


class Factor(NamedTuple):
    """An operation as a factor or as a divisor."""

    value: int
    inverse: bool


Monomial = tuple[Factor, ...]


def hoisted(program: LabelledProgram, form: AttentionForm) -> LabelledProgram:
    """The program with factors of its products' operands moved behind the products.

    A factor of a row of Q, or of a key of K or V, is a factor of the scores as well; so Q, K and V
    are multiplied as they are loaded, and a denominator that is known only after the last key
    divides once.

    before: ``softmax(Q / q * A @ (K / k * B) * c) @ V`` with row values q, values of keys k,
    weights A and B; after: ``S = (Q * (A * B) @ K) * (c / q) / k``, ``E = exp(S - max S)``,
    ``(E @ V) / sum(E)``.

    Normal forms (`expression`) would find the same by trying every order of the factors: 2.9 s for
    this example, and 0.3 s from the hoisted form, where the scores are one atom. Like every result,
    it is verified against the graph as the user wrote it.
    """
    return _Hoist(program, form).run()


def settled(program: LabelledProgram, form: AttentionForm) -> frozenset[int]:
    """Operations that depend on no reduction over the keys; one way to compute them is enough."""
    late: set[int] = set()
    for i, op in enumerate(program.ops):
        if op.over == form.keys or not late.isdisjoint(op.inputs):
            late.add(i)
    return frozenset(range(len(program.ops))) - late


class _Hoist:
    def __init__(self, program: LabelledProgram, form: AttentionForm) -> None:
        self.program, self.form = program, form
        self.ops: list[LabelledOp] = []

    def run(self) -> LabelledProgram:
        values: list[Monomial] = []
        for op in self.program.ops:
            values.append(self._again(op, [values[i] for i in op.inputs]))
        outputs = tuple((self._made(values[i]), m) for i, m in self.program.outputs)
        return replace(self.program, ops=tuple(self.ops), outputs=outputs).needed()

    def _again(self, op: LabelledOp, args: list[Monomial]) -> Monomial:
        """An operation as a product of factors, which are only made if their value is needed."""
        if op.facets.multiplies:
            return args[0] + args[1]
        if op.facets.divides:
            return args[0] + tuple(Factor(f.value, not f.inverse) for f in args[1])
        if is_product(self.program, op) and (found := self._product(op, args)):
            return found
        if op.facets.contracts:
            op, args = replace(op, kind="sum", inputs=op.inputs[:1]), [args[0] + args[1]]
        if op.over is not None and op.facets.reduces is SUM:
            inside = self._having(op.over, args[0])
            if inside:
                return (self._reduced(op, inside), *self._lacking(op.over, args[0]))
        return (self._plain(op, tuple(self._made(a) for a in args)),)

    def _product(self, op: LabelledOp, args: list[Monomial]) -> Monomial:
        """A product; only a load is left of the operand without rows.

        Nothing if that operand is made of vectors: then it is a sum, as a product with a vector is.
        """
        assert op.over is not None
        column = self.form.keys if op.over == self.form.inner else self.form.columns
        left, right = sorted(args, key=lambda a: column in self._labels(a))
        loaded = self._having(column, self._having(op.over, right))
        if not loaded:
            return ()
        vectors = tuple(f for f in self._having(op.over, right) if f not in loaded)
        operands = self._made(self._having(op.over, left) + vectors), self._made(loaded)
        outside = self._lacking(op.over, left) + self._lacking(op.over, right)
        return (self._plain(op, operands), *outside)

    def _reduced(self, op: LabelledOp, inside: Monomial) -> Factor:
        return self._plain(op, (self._made(inside),))

    def _plain(self, op: LabelledOp, inputs: tuple[int, ...]) -> Factor:
        labels = frozenset[str]().union(*(self.ops[i].labels for i in inputs)) - {op.over}
        made = replace(op, inputs=inputs, labels=labels if inputs else op.labels)
        return Factor(self._add(made), False)

    # ------------------------------------------------------------------------------------ factors

    def _labels(self, factors: Monomial) -> frozenset[str]:
        return frozenset[str]().union(*(self.ops[f.value].labels for f in factors))

    def _having(self, label: str, factors: Monomial) -> Monomial:
        return tuple(f for f in factors if label in self.ops[f.value].labels)

    def _lacking(self, label: str, factors: Monomial) -> Monomial:
        return tuple(f for f in factors if label not in self.ops[f.value].labels)

    def _made(self, factors: Monomial) -> int:
        """The operation that computes a monomial.
        Numbers meet values of rows, and vectors meet vectors, before either meets a matrix."""
        groups: list[Factor] = []
        for f in sorted(factors, key=lambda f: self._elements(f.value)):
            labels = self.ops[f.value].labels
            for g in [g for g in groups if self.ops[g.value].labels <= labels]:
                groups.remove(g)
                f = self._times(g, f)
            groups.append(f)
        whole = groups[0]
        for g in groups[1:]:
            whole = self._times(whole, g)
        if whole.inverse:
            one = self._add(LabelledOp("constant", (), frozenset(), {"value": 1.0}))
            whole = self._times(Factor(one, False), whole)
        return whole.value

    def _elements(self, i: int) -> int:
        return prod(extent(self.program.dims[d]) for d in self.ops[i].labels)

    def _times(self, a: Factor, b: Factor) -> Factor:
        """One factor that combines two."""
        if a.inverse == b.inverse:
            return Factor(self._binary("mul", a.value, b.value), a.inverse)
        over, under = (b, a) if a.inverse else (a, b)
        return Factor(self._binary("div", over.value, under.value), False)

    def _binary(self, kind: str, a: int, b: int) -> int:
        return self._add(LabelledOp(kind, (a, b), self.ops[a].labels | self.ops[b].labels, {}))

    def _add(self, op: LabelledOp) -> int:
        if op not in self.ops:
            self.ops.append(op)
        return self.ops.index(op)
