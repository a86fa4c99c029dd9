"""Roles of the operations of a block program in the attention loop.
See `skeletons.attention.plan`."""

from __future__ import annotations

from dataclasses import replace

from cutesuper.errors import LoweringError
from cutesuper.ir.block import ENDING, LOAD, BlockOp, BlockProgram, KernelStep
from cutesuper.ir.dims import Symbol
from cutesuper.ir.operators.base import CONSTANT
from cutesuper.ir.operators.monoid import MAX, SUM
from cutesuper.ir.thread import ThreadExpression, fuse
from cutesuper.skeletons.attention.plan import AttentionPlan, Mask, Reduction, Sum
from cutesuper.skeletons.attention.schedule import AttentionSchedule
from cutesuper.skeletons.base import Argument, Output, Pages, View, arguments_of, view_of
from cutesuper.skeletons.cost import Setting
from cutesuper.skeletons.form import FOLDED
from cutesuper.skeletons.normalize import is_reciprocal, quotients_by_statistics, with_reciprocals
from cutesuper.skeletons.operands import (
    check_element_type,
    check_parts,
    check_same_type,
    unaligned,
)

#: operators whose results are positive, and not 0 for any finite value: -inf times 0 would be NaN
POSITIVE = ("rsqrt",)


#: bytes of the pieces that TMA (bulk tensor loads) moves
PIECE_BYTES = 16
#: dimensions of a TMA copy
MAX_RANK = 5
#: positions of a page that TMA supports
PAGE_SIZES = (16, 32, 64, 128, 256)


def recognized(step: KernelStep, setting: Setting) -> AttentionPlan:
    """The roles of a kernel's operations, as a plan without a schedule.
    They do not depend on its extents. Raises LoweringError for a structure that this skeleton
    cannot run."""
    roles = AttentionRoles(step, arguments_of(step, setting.tensors))
    plan = roles.plan(AttentionSchedule(2, dependent_launch=setting.dependent_launch))
    check_parts(plan.arguments, roles.where)
    _check_operands(plan, roles.where)
    return plan


def _with_reciprocals(program: BlockProgram) -> BlockProgram:
    """The program with a reciprocal for each row or key in place of quotients.

    The quotients are of scores or results: 16.2 -> 8.1 us at 2x256 rows, 4096 keys, with norms of
    rows and values. A sum has a reciprocal of its own wherever it divides, also as a factor
    (``sum * x``): for rows that see nothing it is 0.
    """
    ops = program.ops
    late = program.dependence.after(i for i, op in enumerate(ops) if op.facets.contracts)

    def is_sum(i: int) -> bool:
        closed = ops[i].kind in ENDING and is_sum(ops[i].inputs[0])
        return closed or (i in late and ops[i].facets.reduces is SUM)

    sums = {i for i in range(len(ops)) if is_sum(i)}
    with_sums = set(sums)  # and products and quotients of them
    for i, op in enumerate(ops):
        if op.facets.powers and not with_sums.isdisjoint(op.inputs):
            with_sums.add(i)
    by_sums = {i for i, op in enumerate(ops) if op.facets.divides and op.inputs[1] in with_sums}
    return with_reciprocals(program, quotients_by_statistics(program) | by_sums, with_sums - sums)


class AttentionRoles:
    """Assigns every operation of a block program its role in the attention loop."""

    def __init__(self, step: KernelStep, arguments: tuple[Argument, ...]) -> None:
        self.program, self.arguments = _with_reciprocals(step.program), arguments
        self.where = f"kernel {step.name}"
        self.ops = ops = self.program.ops
        products = [i for i, op in enumerate(ops) if op.facets.contracts]
        reaches = self.program.dependence.reaches
        if len(products) != 2 or not reaches(*products):
            raise self._refuse(
                f"it has {len(products)} matrix products; it runs two, the second "
                "of what it computes from the first"
            )
        self.product, self.second = products
        self._find_labels()
        self.row_reductions: dict[int, Reduction] = {}
        self.key_reductions: dict[int, Reduction] = {}
        self.beside: dict[int, View] = {}
        self.row_loads: dict[int, View] = {}

    def _find_labels(self) -> None:
        ops = self.ops
        over = ops[self.product].attributes["over"]
        self.inner, self.keys = over, ops[self.second].attributes["over"]
        sides = ops[self.product].inputs
        with_keys = [i for i in sides if self.keys in ops[i].dims]
        if len(with_keys) != 1:
            raise self._refuse(
                f"no operand of operation {self.product} has the label {self.keys} "
                f"of the second product alone"
            )
        self.key_load = with_keys[0]
        self.row_operand = sides[0] if sides[1] == self.key_load else sides[1]
        values = [i for i in ops[self.second].inputs if not self._is_score(i)]
        if len(values) != 1:
            raise self._refuse(f"operation {self.second} multiplies two scores")
        self.value_load = values[0]
        self.weights = next(i for i in ops[self.second].inputs if i != self.value_load)
        for i in (self.key_load, self.value_load):
            if ops[i].kind != LOAD:
                raise self._refuse(
                    f"operation {i} ({ops[i].kind}) is multiplied where only a "
                    "tensor in memory can be; store it, or move what is done to it "
                    "to the other operand"
                )
        rows = [i for i in self.program.dependence.before(self.row_operand) if ops[i].kind == LOAD]
        matrices = [i for i in rows if set(ops[i].dims) - {self.inner}]
        if len(matrices) != 1:
            raise self._refuse("the first operand of the first product is made of several tensors")
        self.row_load = matrices[0]
        self.vectors = [i for i in rows if i != self.row_load]
        columns = set(ops[self.value_load].dims) - {self.keys} - set(ops[self.row_load].dims)
        columns -= set(ops[self.key_load].dims)
        if len(columns) != 1:
            raise self._refuse(f"values have {len(columns)} labels of their own; one is possible")
        (self.columns,) = columns
        shared = {*ops[self.key_load].dims, *ops[self.value_load].dims}
        self.own_labels = tuple(d for d in ops[self.row_load].dims if d not in shared)
        if not self.own_labels:
            raise self._refuse("its rows have no label of their own")

    def plan(self, schedule: AttentionSchedule) -> AttentionPlan:
        prologue = fuse(self.program, self.row_operand, self._is_row_leaf, self.where)
        maximum, weight, scores, factor, masks = self._scores()
        leaves = {self.product} if weight is None else {weight}
        result = self._sum(self.second, self.weights, leaves, weight)
        sums = tuple(
            self._with_inverse(self._sum(i, op.inputs[0], leaves, weight))
            for i, op in enumerate(self.ops)
            if op.facets.reduces is SUM and op.attributes["over"] == self.keys
        )
        if len(sums) > 1:
            raise self._refuse(f"{len(sums)} sums over {self.keys}; a row has room for one")
        finals = {result.final, *(i for s in sums for i in (s.final, s.inverse) if i is not None)}
        if maximum is not None:
            finals.add(maximum)
        outputs = tuple(
            Output(self._view(i), self._epilogue(op.inputs[0], finals))
            for i, op in enumerate(self.ops)
            if op.kind == "store"
        )
        loop = [scores, result.source, *(s.source for s in sums)]
        around = [prologue, *(o.expression for o in outputs)]
        self._find_beside(loop, around)
        self._find_row_loads(loop, outputs)
        expressions = [*around, *loop]
        row_values, key_values = self._values(expressions, finals | leaves | {self.product})
        scores, row_factor = self._without_row_factor(scores, row_values)
        plain = prologue.trivial and prologue.leaves == (self.row_load,)
        return AttentionPlan(
            program=self.program, arguments=self.arguments,
            dtype=self.arguments[self._view(self.key_load).argument].dtype,
            own_labels=self.own_labels, keys=self.keys, inner=self.inner, columns=self.columns,
            row_load=self.row_load, key_load=self.key_load, value_load=self.value_load,
            product=self.product, prologue=None if plain else prologue,
            row_reductions=tuple(self.row_reductions.values()), row_values=row_values,
            key_reductions=tuple(self.key_reductions.values()), key_values=key_values,
            vectors={i: self._view(i) for i in self.vectors}, beside=self.beside,
            row_loads=self.row_loads, scores=scores, factor=factor, row_factor=row_factor,
            masks=masks, maximum=maximum, weight=weight, row_sums=sums, result=result,
            outputs=outputs, schedule=schedule,
        )  # fmt: skip

    # ----------------------------------------------------------------------------- the scores

    def _scores(
        self,
    ) -> tuple[int | None, int | None, ThreadExpression, float, tuple[Mask, ...]]:
        """Running maximum, weight, and the maximum's operand: expression, factor, masks."""
        tops = [
            i
            for i, op in enumerate(self.ops)
            if op.facets.reduces is MAX and op.attributes["over"] == self.keys
        ]
        if len(tops) > 1:
            raise self._refuse(f"{len(tops)} maxima over {self.keys}; one can run")
        if not tops:
            masked = next((i for i, op in enumerate(self.ops) if op.facets.masks), None)
            if masked is not None:
                raise self._refuse(
                    f"{self.ops[masked].kind} (operation {masked}) without a "
                    "maximum: use softmax, which subtracts one"
                )
            return None, None, ThreadExpression((self.product,), ()), 1.0, ()
        (top,) = tops
        scores = self.ops[top].inputs[0]
        weights = [
            i
            for i, op in enumerate(self.ops)
            if op.facets.exponential
            and self.ops[op.inputs[0]].facets.subtracts
            and self.ops[op.inputs[0]].inputs == (scores, top)
        ]
        if len(weights) != 1:
            raise self._refuse(
                f"the maximum (operation {top}) is not subtracted from what it is "
                "the maximum of, under one exponential"
            )
        inner, factor, masks = self._below_masks(scores)
        expression = fuse(self.program, inner, self._is_score_leaf, self.where)
        return self._complete(top), weights[0], expression, factor, masks

    def _below_masks(self, i: int) -> tuple[int, float, tuple[Mask, ...]]:
        """The operation below masks and positive factors, which leave -inf unchanged."""
        factor, masks = 1.0, list[Mask]()
        while True:
            op = self.ops[i]
            if op.facets.masks:
                masks.append(self._mask(op))
                i = op.inputs[0]
                continue
            number = self._number(op.inputs[-1]) if op.facets.powers else None
            if op.facets.multiplies and number is None:
                number = self._number(op.inputs[0])
                rest = op.inputs[1]
            else:
                rest = op.inputs[0] if op.inputs else i
            if number is None or number <= 0:
                return i, factor, tuple(masks)
            factor = factor / number if op.facets.divides else factor * number
            i = rest

    def _without_row_factor(
        self, scores: ThreadExpression, values: dict[int, ThreadExpression]
    ) -> tuple[ThreadExpression, int | None]:
        """A positive value of the row by which all its scores are multiplied.
        It multiplies the maximum as well, and is combined with the constant factor in one
        multiplication.

        before: ``mul(product, rsqrt of the row)``; after: ``product``, the operation of the root.
        """
        last = scores.ops[-1] if scores.ops else None
        if last is None or not last.facets.multiplies:
            return scores, None
        for place, other in (last.args, last.args[::-1]):
            value = values.get(scores.leaves[place]) if place < len(scores.leaves) else None
            if value is None or not value.ops or value.ops[-1].kind not in POSITIVE:
                continue
            if other < len(scores.leaves):
                return ThreadExpression((scores.leaves[other],), ()), scores.leaves[place]
            return replace(scores, ops=scores.ops[:-1]), scores.leaves[place]
        return scores, None

    def _number(self, i: int) -> float | None:
        op = self.ops[i]
        return float(op.attributes["value"]) if op.kind == CONSTANT else None

    def _mask(self, op: BlockOp) -> Mask:
        """The limit of visible keys that a masking operation sets."""
        a = op.attributes
        if op.facets.fill == 0:
            raise self._refuse(f"{op.kind} makes zeros of scores, and masks hide them")
        if a["columns"] != self.keys:
            raise self._refuse(f"{op.kind} hides {a['columns']}, the loop runs over {self.keys}")
        lengths = self._view(op.inputs[1]) if len(op.inputs) > 1 else None
        return mask_of(self.program, op, lengths)

    # ------------------------------------------------------------------------ what accumulates

    def _sum(self, tile: int, source: int, leaves: set[int], weight: int | None) -> Sum:
        """A sum over the keys, from the operation that sums a tile."""
        final = self._complete(tile)
        rescaled = self.ops[final].rescaled if final != tile else weight is not None
        if rescaled != (weight is not None):
            raise self._refuse(
                f"operation {final} is {'' if rescaled else 'not '}rescaled, and "
                f"the loop {'has no' if weight is None else 'has a'} maximum"
            )

        def is_leaf(i: int) -> bool:
            return i in leaves or self._is_value(i)

        expression = fuse(self.program, source, is_leaf, self.where)
        if self.ops[tile].facets.averages:
            raise self._refuse(f"mean over {self.keys} (operation {tile}); sum, and divide")
        return Sum(expression, final, rescaled)

    def _complete(self, value: int) -> int:
        """Follow a value through its accumulate, cluster_reduce and grid_reduce."""
        axes = {a.name for a in self.program.axes_of(self.keys)}
        while axes:
            users = [
                i for i, op in enumerate(self.ops) if op.kind in ENDING and op.inputs[0] == value
            ]
            if len(users) != 1:
                raise self._refuse(
                    f"the partial result of operation {value} is used before it is "
                    f"complete over {', '.join(sorted(axes))}"
                )
            value = users[0]
            axes -= {self.ops[value].attributes["axis"]}
        return value

    def _with_inverse(self, s: Sum) -> Sum:
        """The sum with its reciprocal, if there is one."""
        users = [i for i, op in enumerate(self.ops) if s.final in op.inputs]
        return replace(s, inverse=next((i for i in users if is_reciprocal(self.program, i)), None))

    # ---------------------------------------------------------------------------------- leaves

    def _is_value(self, i: int) -> bool:
        """True if an operation is a value of rows or of keys, which the scores use as it is."""
        if self.ops[i].kind == CONSTANT or self._is_score(i):
            return False
        return self.ops[i].kind == LOAD or not self._is_beside(i)

    def _is_beside(self, i: int) -> bool:
        """True for an element-wise function of numbers of rows and keys."""
        made = [self.ops[j] for j in self.program.dependence.before(i)]
        matrix = {self.inner, self.columns}
        return not any(matrix & set(op.dims) or "over" in op.attributes for op in made)

    def _is_score(self, i: int) -> bool:
        """True if an operation is the first product, or depends on it."""
        return i == self.product or self.program.dependence.reaches(self.product, i)

    def _is_score_leaf(self, i: int) -> bool:
        return i == self.product or self._is_value(i)

    def _is_row_leaf(self, i: int) -> bool:
        """True for leaves of the prologue: loads, and values of rows."""
        op = self.ops[i]
        return op.kind == LOAD or (op.kind != CONSTANT and self.inner not in op.dims)

    def _epilogue(self, i: int, finals: set[int]) -> ThreadExpression:
        def is_leaf(j: int) -> bool:
            return j in finals or self._is_value(j)

        return fuse(self.program, i, is_leaf, self.where)

    def _values(
        self, expressions: list[ThreadExpression], known: set[int]
    ) -> tuple[dict[int, ThreadExpression], dict[int, ThreadExpression]]:
        """The values of rows and of keys that are leaves of the expressions."""
        row_values, key_values = dict[int, ThreadExpression](), dict[int, ThreadExpression]()
        for i in sorted({i for e in expressions for i in e.leaves} - known):
            labels = set(self.ops[i].dims)
            if i == self.row_load or i in (*self.vectors, *self.beside, *self.row_loads):
                continue
            if self.keys in labels and not labels & set(self.own_labels):
                key_values[i] = fuse(self.program, i, self._reduces_keys, self.where)
            elif not labels & {self.keys, self.inner, self.columns}:
                row_values[i] = fuse(self.program, i, self._reduces_rows, self.where)
            else:
                raise self._refuse(
                    f"operation {i} ({self.ops[i].kind} [{', '.join(self.ops[i].dims)}]) is needed "
                    "beside the scores, where only values of a row or of a key can be"
                )
        return row_values, key_values

    def _find_beside(self, loop: list[ThreadExpression], around: list[ThreadExpression]) -> None:
        """The loads of numbers of rows and keys that only the loop needs."""
        others = {i for e in around for i in e.leaves}
        for i in sorted({i for e in loop for i in e.leaves} - others):
            op = self.ops[i]
            if op.kind == LOAD and self._is_beside(i):
                self.beside[i] = self._view(i)

    def _find_row_loads(self, loop: list[ThreadExpression], outputs: tuple[Output, ...]) -> None:
        """The loads of numbers of rows that only the outputs need."""
        others = {i for e in loop for i in e.leaves}
        for i in sorted({i for o in outputs for i in o.expression.leaves} - others):
            op = self.ops[i]
            if op.kind == LOAD and not {self.keys, self.inner, self.columns} & set(op.dims):
                self.row_loads[i] = self._view(i)

    def _reduces_rows(self, i: int) -> bool:
        return self._reduction(i, self.row_load, self.inner, self.row_reductions)

    def _reduces_keys(self, i: int) -> bool:
        return self._reduction(i, self.key_load, self.inner, self.key_reductions) or (
            self._reduction(i, self.value_load, self.columns, self.key_reductions)
        )

    def _reduction(self, i: int, load: int, over: str, found: dict[int, Reduction]) -> bool:
        """True if an operation reduces a load along a label.
        The reduction is put into ``found``."""
        op = self.ops[i]
        how = op.facets.reduces
        if how not in FOLDED or op.attributes["over"] != over:
            return False
        source = fuse(self.program, op.inputs[0], lambda j: j == load, self.where)
        found[i] = Reduction(i, load, source, how.name, self.program.factor(op))
        return True

    # ----------------------------------------------------------------------------------- other

    def _view(self, i: int) -> View:
        return view_of(self.ops[i], self.arguments)

    def _refuse(self, why: str) -> LoweringError:
        return LoweringError(f"{self.where}: the attention loop cannot run this program: {why}")


def mask_of(program: BlockProgram, op: BlockOp, lengths: View | None) -> Mask:
    """The limit of visible columns that a masking operation sets, with the lengths it takes."""
    a = op.attributes
    lower, limits = a.get("lower", False), "lower" in a
    if lengths is not None and not a["causal"]:
        return Mask(lengths, None, 0, lower=lower, limits=limits, rising=a.get("rises"))
    if lengths is None and a["alignment"] == "top_left":
        return Mask(None, a["rows"], 1)
    added, columns = (None, 0) if lengths is not None else _end(program, a["columns"])
    taken, rows = _end(program, a["rows"])
    return Mask(lengths, a["rows"], 1 + columns - rows, added, taken, lower, limits)


def _end(program: BlockProgram, label: str) -> tuple[str | None, int]:
    """A label whose extent is symbolic, and the extent of one where it is not."""
    dim = program.dims[label]
    return (label, 0) if isinstance(dim, Symbol) else (None, dim)


def _check_operands(plan: AttentionPlan, where: str) -> None:
    check_element_type(where, plan.dtype)
    for i, op in enumerate(plan.program.ops):
        if "table" in op.attributes:
            _check_pages(plan, where, i)
    matrices = {
        plan.row_load: (plan.inner,),
        plan.key_load: (plan.inner, plan.keys),
        plan.value_load: (plan.columns, plan.keys),
    }
    for load, contiguous in matrices.items():
        _check_matrix(plan, where, plan.view(load), contiguous)
    for i, view in plan.vectors.items():
        if view.labels != (plan.inner,):
            raise LoweringError(
                f"{where}: operation {i} is multiplied with the rows and has the "
                f"labels {', '.join(view.labels)}; only {plan.inner} is possible"
            )
        check_same_type(where, plan.dtype, plan.arguments[view.argument])
    for output in plan.outputs:
        _check_output(plan, where, output.view)


def _check_output(plan: AttentionPlan, where: str, view: View) -> None:
    arg = plan.arguments[view.argument]
    if plan.columns in view.labels and not view.contiguous(plan.columns):
        raise LoweringError(
            f"{where}: {arg.name}{list(map(str, arg.shape))} is stored, and not contiguous along "
            f"{plan.columns}; only results with this label, in this order, can be"
        )


def _check_pages(plan: AttentionPlan, where: str, load: int) -> None:
    """Refuse pages of operands other than keys and values, and pages that no TMA load supports."""
    view = plan.view(load)
    assert isinstance(view, Pages)
    cache, table = plan.arguments[view.argument], plan.arguments[view.table]
    what = f"{where}: {cache.name}{list(map(str, cache.shape))} through the table {table.name}"
    if load not in (plan.key_load, plan.value_load) or view.positions != plan.keys:
        raise LoweringError(
            f"{what}: only keys and values are read through a table, along "
            f"{plan.keys}; gather the pages before"
        )
    if view.sequences not in (None, *plan.batch):
        raise LoweringError(
            f"{what}: {view.sequences} is no label of the batch; gather the pages before"
        )
    if view.size not in PAGE_SIZES:
        raise LoweringError(
            f"{what}: pages of {view.size} positions; use "
            f"{', '.join(map(str, PAGE_SIZES[:-1]))} or {PAGE_SIZES[-1]}"
        )
    if len(view.labels) >= MAX_RANK:
        raise LoweringError(
            f"{what}: a cache of pages has at most {MAX_RANK} dimensions longer "
            f"than 1, this one {len(view.labels) + 1}; merge those of the heads"
        )


def _check_matrix(plan: AttentionPlan, where: str, view: View, contiguous: tuple[str, ...]) -> None:
    arg = plan.arguments[view.argument]
    shape = f"{arg.name}{list(map(str, arg.shape))}"
    check_same_type(where, plan.dtype, arg)
    if len(view.labels) > MAX_RANK:
        raise LoweringError(
            f"{where}: {shape} has {len(view.labels)} labels, and bulk tensor "
            f"copies {MAX_RANK} dimensions; merge some"
        )
    along = next((d for d in contiguous if view.contiguous(d)), None)
    if along is not None and plan.grows(along):
        raise LoweringError(
            f"{where}: {shape} is stored along {arg.shape[-1]}, which is symbolic; give it a last "
            "dimension that is a number"
        )
    if along is None:
        raise LoweringError(f"{where}: {shape} must be contiguous along {' or '.join(contiguous)}")
    if any(s * plan.element_bytes % PIECE_BYTES for s in view.places):
        raise unaligned(where, arg)
