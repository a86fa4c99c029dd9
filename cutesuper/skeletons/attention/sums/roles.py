"""Roles of the operations of a block program in the attention loop with plain sums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from cutesuper.errors import LoweringError
from cutesuper.ir.block import ENDING, LOAD, STORE, AxisKind, BlockOp, KernelStep
from cutesuper.ir.dims import Symbol
from cutesuper.ir.operators.base import CONSTANT, TABLE
from cutesuper.ir.thread import fuse
from cutesuper.ir.unseen import Fate, fate
from cutesuper.skeletons.attention.plan import Mask
from cutesuper.skeletons.attention.roles import MAX_RANK, PIECE_BYTES, mask_of
from cutesuper.skeletons.attention.sums.form import masked_or_longest
from cutesuper.skeletons.attention.sums.plan import LoopSum, Score, Sight, StoredScores, SumsPlan
from cutesuper.skeletons.attention.sums.schedule import SumsSchedule
from cutesuper.skeletons.base import Argument, Output, Pages, View, arguments_of, view_of
from cutesuper.skeletons.cost import Setting
from cutesuper.skeletons.normalize import quotients_by_statistics, with_reciprocals
from cutesuper.skeletons.operands import (
    check_element_type,
    check_parts,
    check_same_type,
    unaligned,
)


def recognized_sums(step: KernelStep, setting: Setting) -> SumsPlan:
    """The roles of a kernel's operations, as a plan without a schedule.
    Raises LoweringError for a structure that this loop cannot run."""
    roles = SumsRoles(step, arguments_of(step, setting.tensors))
    plan = roles.plan(SumsSchedule(2, dependent_launch=setting.dependent_launch))
    check_parts(plan.arguments, roles.where)
    _check_operands(plan, roles.where)
    return plan


class SumsRoles:
    """Assigns every operation of a block program its role."""

    def __init__(self, step: KernelStep, arguments: tuple[Argument, ...]) -> None:
        program = step.program
        self.program = with_reciprocals(program, quotients_by_statistics(program))
        self.arguments, self.where = arguments, f"kernel {step.name}"
        self.ops = ops = self.program.ops
        products = [i for i, op in enumerate(ops) if op.facets.contracts]
        after = [self.program.dependence.after([i]) - {i} for i in products]
        self.second = [i for i in products if any(i in found for found in after)]
        self.first = [i for i in products if i not in self.second]
        if any(i in found for i in self.second for found in self._after_each(self.second)):
            raise self._refuse("a product of a product of a product")
        self.loop = self._axis(AxisKind.LOOP) or self._none("loop")
        self.visits = self._axis(AxisKind.PERSISTENT)
        if shared := self._axis(AxisKind.CLUSTER):
            raise self._refuse(f"a cluster divides {shared}")
        if self.visits in [a.dim for a in self.program.of_kind(AxisKind.GRID)]:
            raise self._refuse(f"the grid divides {self.visits}, along which a block visits all")

    def _after_each(self, products: list[int]) -> list[set[int]]:
        return [self.program.dependence.after([i]) - {i} for i in products]

    def _axis(self, kind: AxisKind) -> str | None:
        return next((a.dim for a in self.program.of_kind(kind)), None)

    def _none(self, what: str) -> str:
        raise self._refuse(f"it has no {what} axis")

    def plan(self, schedule: SumsSchedule) -> SumsPlan:
        scores = tuple(map(self._score, self.first))
        sums = tuple(map(self._sum, self.second))
        self.rows = self._rows(scores, sums)
        operands = tuple(dict.fromkeys(s.operand for s in sums))
        summed = self.program.dependence.after(self.second)
        places = [i for i, op in enumerate(self.ops) if op.kind == STORE]
        stores = tuple(
            StoredScores(self.ops[i].inputs[0], self._view(i)) for i in places if i not in summed
        )
        between = self._between(scores, (*operands, *(s.value for s in stores)))
        finals = {s.final for s in sums}
        outputs = tuple(self._output(i, finals) for i in places if i in summed)
        rows, loops, beside = self._vectors(scores, between, outputs, finals)
        plan = SumsPlan(
            self.program, self.arguments, self._dtype(scores), self.rows, self.loop, self.visits,
            scores, sums, operands, stores, between, rows, loops, beside, (), outputs, schedule,
        )  # fmt: skip
        return replace(plan, sights=self._sights(plan))

    def _output(self, i: int, finals: set[int]) -> Output:
        source = self.ops[i].inputs[0]
        return Output(self._view(i), fuse(self.program, source, self._is_leaf(finals), self.where))

    # ----------------------------------------------------------------------------------- products

    def _score(self, i: int) -> Score:
        op = self.ops[i]
        streams = [j for j in op.inputs if self.loop in self.ops[j].dims]
        if len(streams) != 1 or any(self.ops[j].kind != LOAD for j in op.inputs):
            raise self._refuse(f"operation {i} is no product of a tile of rows and one of the loop")
        (resident,) = (j for j in op.inputs if j != streams[0])
        if self.visits in self.ops[resident].dims:
            raise self._refuse(f"operation {resident} stays, and differs along {self.visits}")
        return Score(i, resident, streams[0], op.attributes["over"])

    def _sum(self, i: int) -> LoopSum:
        op = self.ops[i]
        loads = [j for j in op.inputs if self.ops[j].kind == LOAD]
        if len(loads) != 1 or op.attributes["over"] != self.loop:
            raise self._refuse(f"operation {i} is no sum over {self.loop} of scores and a tensor")
        (operand,) = (j for j in op.inputs if j != loads[0])
        columns = [d for d in self.ops[loads[0]].dims if not self.program.axes_of(d)]
        if len(columns) != 1:
            raise self._refuse(f"a streamed operand with {len(columns)} labels held whole")
        final = self._complete(i)
        if self.visits and (self.visits not in op.dims or self.visits in self.ops[final].dims):
            raise self._refuse(f"operation {i} is no sum over {self.visits}, and every visit adds")
        return LoopSum(operand, loads[0], columns[0], final)

    def _complete(self, i: int) -> int:
        """Follow a sum to where it has ended over the loop and over all visits."""
        while True:
            users = [n for n, op in enumerate(self.ops) if i in op.inputs]
            ends = [n for n in users if self._continues(self.ops[n])]
            if not ends:
                return i
            if len(users) > 1:
                raise self._refuse(f"the partial result of operation {i} is used")
            i = ends[0]

    def _continues(self, op: BlockOp) -> bool:
        return op.kind in ENDING or (op.facets.sums and op.attributes["over"] == self.visits)

    def _rows(self, scores: tuple[Score, ...], sums: tuple[LoopSum, ...]) -> str:
        """The label of the residents by whose position masks hide; else the longest of them.
        Only labels count that nothing has that streams by, as in the form."""
        streams = {d for s in (*scores, *sums) for d in self.ops[s.stream].dims}
        own = [d for d in self.ops[scores[0].resident].dims if d not in streams]
        if not own:
            raise self._refuse("its rows have no label of their own")
        rows = masked_or_longest(own, self.ops, self.program.dims)
        for s in scores:
            if rows not in self.ops[s.resident].dims:
                raise self._refuse(f"operation {s.resident} does not have the label {rows}")
        return rows

    def _dtype(self, scores: tuple[Score, ...]) -> str:
        return self.arguments[self._view(scores[0].resident).argument].dtype

    # -------------------------------------------------------------------------------- in between

    def _between(self, scores: tuple[Score, ...], made: tuple[int, ...]) -> tuple[int, ...]:
        """The element-wise operations on scores, in order."""
        products = {s.value for s in scores}
        before = {j for i in products for j in self.program.dependence.before(i)}
        found = {j for i in made for j in self.program.dependence.before(i)} - before
        used = {j for i in found for j in self.ops[i].inputs}
        found |= {i for i in used if self.ops[i].kind == CONSTANT}
        between = tuple(sorted(i for i in found if self.ops[i].kind != LOAD))
        for i in between:
            if not self._runs(self.ops[i]):
                raise self._refuse(f"{self.ops[i].kind} (operation {i}) between its products")
        if missing := products - used - set(made):
            raise self._refuse(f"operation {missing.pop()} is used outside of the loop")
        return between

    def _runs(self, op: BlockOp) -> bool:
        """True if a thread computes an operation on its own elements."""
        if op.kind == CONSTANT:
            return True
        operator = TABLE.get(op.kind)
        return operator is not None and (
            operator.elementwise or (operator.masks and operator.fill != 0)
        )

    def _is_leaf(self, finals: set[int]) -> Callable[[int], bool]:
        return lambda i: i in finals or self.ops[i].kind == LOAD

    def _vectors(
        self,
        scores: tuple[Score, ...],
        between: tuple[int, ...],
        outputs: tuple[Output, ...],
        finals: set[int],
    ) -> tuple[tuple[int, ...], tuple[int, ...], dict[int, View]]:
        """Loads with one number for each row, for each element of the loop, and for both."""
        multiplied = {i for s in scores for i in (s.resident, s.stream)}
        used = [j for i in between for j in self._floats(i) if self.ops[j].kind == LOAD]
        used += [j for o in outputs for j in o.expression.leaves if j not in finals]
        rows, loops, beside = dict[int, None](), dict[int, None](), dict[int, View]()
        for i in used:
            labels = set(self.ops[i].dims) - {*self._batch(), self.visits}
            if i in multiplied or not labels <= {self.rows, self.loop}:
                raise self._refuse(
                    f"operation {i} (load [{', '.join(self.ops[i].dims)}]) is read beside the "
                    f"scores, where only numbers along {self.rows} and {self.loop} can be"
                )
            per_loop = self.loop in labels or self.visits in self.ops[i].dims
            if per_loop and (self.rows in labels or not self._is_copied(i)):
                beside[i] = self._view(i)
            else:
                (loops if per_loop else rows)[i] = None
        return tuple(rows), tuple(loops), beside

    def _is_copied(self, i: int) -> bool:
        """True for a vector that is copied as it is: shared memory holds float32."""
        return self.arguments[self._view(i).argument].dtype == "float32"

    def _floats(self, i: int) -> tuple[int, ...]:
        """Operands of an operation that are no integers."""
        op = self.ops[i]
        return op.inputs[:1] if op.facets.masks else op.inputs

    def _batch(self) -> list[str]:
        return [a.dim for a in self.program.of_kind(AxisKind.GRID) if a.dim != self.rows]

    # -------------------------------------------------------------------------------------- masks

    def _sights(self, plan: SumsPlan) -> tuple[Sight, ...]:
        """The masks as limits of the loop.
        Where one hides a score, all that is made of it has to be 0."""
        found = list[Sight]()
        for i in plan.between:
            op = self.ops[i]
            if not op.facets.masks:
                continue
            for made in plan.made:
                if self._fate(i, made) != 0.0:
                    raise self._refuse(f"operation {made} is not 0 where operation {i} hides")
            columns, rows = op.attributes["columns"], op.attributes["rows"]
            if {columns, rows} - {None} - {self.loop, self.rows}:
                raise self._refuse(f"{op.kind} (operation {i}) hides {columns} by {rows}")
            mask: Mask = mask_of(self.program, op, self._lengths(op))
            found.append(Sight(mask, columns == self.rows))
        return tuple(found)

    def _lengths(self, op: BlockOp) -> View | None:
        if len(op.inputs) < 2:
            return None
        view = self._view(op.inputs[1])
        if not set(view.labels) <= {*self._batch(), op.attributes.get("rises")} - {self.visits}:
            raise self._refuse(f"{op.facets.counts} along {', '.join(view.labels)}")
        return view

    def _fate(self, mask: int, made: int) -> float | None:
        """The value of an operation in the elements that a mask hides.
        None if it depends on data."""
        known: dict[int, Fate | None] = {}
        for i in self.program.dependence.before(made):
            op = self.ops[i]
            args = [known[j] for j in op.inputs]
            if i == mask:
                known[i] = Fate(op.facets.fill)
            elif op.facets.masks:
                known[i] = args[0]
            elif op.kind == LOAD or op.facets.contracts:
                known[i] = None
            else:
                known[i] = fate(op.kind, args, op.attributes)
        found = known[made]
        return None if found is None else found.value

    # -------------------------------------------------------------------------------------- other

    def _view(self, i: int) -> View:
        return view_of(self.ops[i], self.arguments)

    def _refuse(self, why: str) -> LoweringError:
        return LoweringError(
            f"{self.where}: the attention loop with plain sums cannot run this program: {why}"
        )


def _check_operands(plan: SumsPlan, where: str) -> None:
    check_element_type(where, plan.dtype)
    for load in (*plan.residents, *plan.streams):
        view, arg = plan.view(load), plan.arguments[plan.view(load).argument]
        shape = f"{arg.name}{list(map(str, arg.shape))}"
        check_same_type(where, plan.dtype, arg)
        if isinstance(view, Pages) or len(view.labels) > MAX_RANK:
            raise LoweringError(f"{where}: {shape} is no tensor of at most {MAX_RANK} labels")
        if not view.contiguous(plan.inner(load)):
            raise LoweringError(f"{where}: {shape} must be contiguous along {plan.inner(load)}")
        if any(s * plan.element_bytes % PIECE_BYTES for s in view.places):
            raise unaligned(where, arg)
    for s in plan.stores:
        arg = plan.arguments[s.view.argument]
        if not s.view.contiguous(plan.loop) or plan.visits:
            raise LoweringError(
                f"{where}: {arg.name}{list(map(str, arg.shape))} is stored tile by tile, and not "
                f"contiguous along {plan.loop} alone"
            )
    for output in plan.outputs:
        columns = {s.columns for s in plan.sums if s.final in output.expression.leaves}
        arg = plan.arguments[output.view.argument]
        if len(columns) != 1 or not output.view.contiguous(next(iter(columns))):
            raise LoweringError(
                f"{where}: {arg.name}{list(map(str, arg.shape))} is stored, and not contiguous "
                "along the columns of one sum"
            )
        if any(isinstance(plan.program.dims[d], Symbol) for d in columns):
            raise LoweringError(f"{where}: {arg.name} has symbolic columns")
