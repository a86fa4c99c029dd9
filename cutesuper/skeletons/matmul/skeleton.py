"""The matmul loop: products that share a row operand, and the operations around them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from cutesuper.egraph.distribute import distributed
from cutesuper.egraph.extract import Price
from cutesuper.egraph.labelled import LabelledProgram, Region
from cutesuper.egraph.products import are_chained, matrix_products
from cutesuper.egraph.saturate import Table
from cutesuper.errors import SearchError
from cutesuper.ir.block import AxisKind, BlockProgram, KernelStep
from cutesuper.ir.operators.base import Counts, lookup
from cutesuper.skeletons import operands
from cutesuper.skeletons.base import Plan, Skeleton, arguments_of
from cutesuper.skeletons.cost import Setting, Sized, additive_price
from cutesuper.skeletons.form import (
    Form,
    check_parts,
    check_symbols,
    check_taken,
    needs_positions,
    single_reduction,
    unsized,
)
from cutesuper.skeletons.legality import is_chained, refuse_index, without_running_state
from cutesuper.skeletons.matmul.explain import matmul_lines
from cutesuper.skeletons.matmul.form import MatmulForm, matmul_form
from cutesuper.skeletons.matmul.least import least_us
from cutesuper.skeletons.matmul.plan import MatmulPlan, exceeded, exceeded_by_tile
from cutesuper.skeletons.matmul.roles import plan_of
from cutesuper.skeletons.matmul.schedule import MatmulSchedule, default_schedule
from cutesuper.skeletons.matmul.sizes import matmul_sizes
from cutesuper.targets import Target


class Matmul(Skeleton):
    """Skeleton of products in one mainloop.

    None of the 1,050 splits of programs around a product that could be searched at all had more
    than 159 classes; finding out that a split has 500 takes 0.5 s, and two thirds of the regions of
    a GPT's layer have as many. So a split may have 0.4 of the usual number of classes.
    """

    name = "a matmul loop"
    plans = (MatmulPlan,)
    schedules = (MatmulSchedule,)

    def recognize(self, region: Region, program: LabelledProgram, target: Target) -> Form | None:
        """Rules for products of operands that depend on no position."""
        products = matrix_products(program)
        if not products:
            return None
        check_taken(region)
        check_parts(region)
        labels = [op.kind for op in region.ops if lookup(op.kind).counts == Counts.LABELS]
        if labels:
            raise SearchError(f"{labels[0]} reads labels, which kernels with products do not")
        reason = needs_positions(region)
        if reason is None:
            form = matmul_form(region, program, products, target)
            check_symbols(program)
            return form
        if are_chained(program):
            return None
        raise SearchError(reason)

    def otherwise(self, program: LabelledProgram, form: Any) -> LabelledProgram | None:
        """The program with products of sums as sums of products; see `egraph.distribute`."""
        return distributed(program, form.contracted)

    def price(self, table: Table, form: Any, target: Target, itemsize: int) -> Price:
        """The additive price; operands of the loop pass through registers on their way."""
        return additive_price(table, form.contracted, target, itemsize)

    def class_share(self, program: LabelledProgram) -> float:
        """See the class."""
        return 0.4

    def least_us(
        self, program: LabelledProgram, form: Any, target: Target, memory_us: float
    ) -> float:
        """See `matmul.least.least_us`."""
        return least_us(program, form, target, memory_us)

    def sizes(
        self, structure: BlockProgram, form: Any, setting: Setting, pruned: Counter[str]
    ) -> Iterable[Sized]:
        """See `matmul.sizes.matmul_sizes`."""
        return matmul_sizes(structure, form, setting, pruned)

    def restructured(
        self, program: BlockProgram, setting: Setting
    ) -> tuple[BlockProgram, Form] | None:
        """Rows and columns of the first product; the contracted label keeps its axes."""
        reduced = single_reduction(program)
        products = [op for op in program.ops if op.facets.contracts]
        if not reduced or not products:
            return None
        a, b = (set(program.ops[i].dims) for i in products[0].inputs)
        rows, columns = ([d for d in program.dims if d in x] for x in (a - b, b - a))
        own = tuple(a.kind for a in program.axes_of(reduced[0]))
        if not rows or not columns or AxisKind.LOOP not in own:
            return None
        beside = tuple(d for d in program.alternatives if d != columns[-1])
        batch = [d for d in program.dims if d not in (rows[-1], columns[-1], *reduced, *beside)]
        kinds = dict.fromkeys(program.dims, (AxisKind.GRID,)) | {reduced[0]: own}
        loaded = next(op for op in program.loads() if reduced[0] in op.dims)
        form = MatmulForm(
            rows[-1], columns[-1], reduced[0], tuple(batch), beside=beside,
            element_bytes=setting.itemsizes[loaded.attributes["tensor"]],
        )  # fmt: skip
        return unsized(program, kinds), form

    def runs(self, step: KernelStep) -> bool:
        """True if there are products, and none multiplies a product within a loop."""
        return any(op.facets.contracts for op in step.program.ops) and not is_chained(step)

    def plan(self, step: KernelStep, setting: Setting, schedule: Any) -> Plan[Any]:
        """Recognise the roles and choose a schedule; sizing holds plans against the same limits."""
        target = setting.target
        refuse_index(step, stores=False)
        step = without_running_state(step, setting.tensors)
        arguments = arguments_of(step, setting.tensors)
        operands.check_parts(arguments, f"kernel {step.name}")
        plan, _ = plan_of(step, arguments, schedule or MatmulSchedule(stages=1))
        limit = exceeded_by_tile(plan)
        if limit is None and schedule is None:
            plan = plan.scheduled(default_schedule(plan, target, setting.dependent_launch))
        if limit := limit or exceeded(plan, target):
            raise limit.refused(step.name)
        return plan

    def explain(self, plan: Any) -> list[str]:
        """See `matmul.explain.matmul_lines`."""
        return matmul_lines(plan)

    def build(self, plan: Any) -> Any:
        """The kernel of `matmul.kernel.loop`."""
        from cutesuper.skeletons.matmul.kernel.loop import MatmulKernel

        return MatmulKernel(plan)
