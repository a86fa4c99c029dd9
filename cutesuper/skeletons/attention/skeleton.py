"""The attention loop: products with running state between them, or with plain sums.
Two chained products with running state, or several products whose functions are summed without
any."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from cutesuper.egraph.extract import Price
from cutesuper.egraph.labelled import LabelledProgram, Region
from cutesuper.egraph.products import are_chained, matrix_products
from cutesuper.egraph.saturate import Table
from cutesuper.egraph.space import Space
from cutesuper.errors import LoweringError, ScheduleError, SearchError, frameless
from cutesuper.ir.block import BlockProgram, KernelStep
from cutesuper.skeletons.attention.cost import attention_price
from cutesuper.skeletons.attention.explain import attention_lines
from cutesuper.skeletons.attention.form import attention_form, hoisted, settled
from cutesuper.skeletons.attention.plan import MAX_WIDTH, AttentionPlan, exceeded
from cutesuper.skeletons.attention.roles import recognized
from cutesuper.skeletons.attention.schedule import AttentionSchedule, scheduled
from cutesuper.skeletons.attention.sizes import attention_sizes
from cutesuper.skeletons.attention.sums.explain import sums_lines
from cutesuper.skeletons.attention.sums.form import SumsForm, sums_form
from cutesuper.skeletons.attention.sums.plan import SumsPlan
from cutesuper.skeletons.attention.sums.plan import exceeded as exceeded_sums
from cutesuper.skeletons.attention.sums.roles import recognized_sums
from cutesuper.skeletons.attention.sums.schedule import SumsSchedule
from cutesuper.skeletons.attention.sums.sizes import scheduled_sums, sums_sizes
from cutesuper.skeletons.base import Plan, Skeleton
from cutesuper.skeletons.cost import Setting, Sized
from cutesuper.skeletons.form import Form, check_index, check_parts, needs_positions
from cutesuper.skeletons.legality import is_chained, refuse_index
from cutesuper.targets import Target


class Attention(Skeleton):
    """Skeleton of chained products.
    Only segments between waists are searched: with norms of Q, K and V there are 20 others, 0.3 to
    1 s each.

    It has two plans: `AttentionPlan` for two products, with a running maximum, and `SumsPlan` for
    any number of them without one.
    """

    name = "an attention loop"
    plans = (AttentionPlan, SumsPlan)
    schedules = (AttentionSchedule, SumsSchedule)
    between_waists = True
    widest_chain = MAX_WIDTH

    def recognize(self, region: Region, program: LabelledProgram, target: Target) -> Form | None:
        """Rules for products of which the last one depends on another."""
        products = matrix_products(program)
        positions = needs_positions(region) is not None
        if not products or (positions and not are_chained(program)):
            return None
        check_index(region)
        check_parts(region)
        try:
            return attention_form(region, program, products)
        except SearchError as error:
            with suppress(SearchError):
                return sums_form(region, program, products)
            raise frameless(error) from None

    def searches(self, form: Any) -> bool:
        """False for plain sums: their products are computed as they are written."""
        return not isinstance(form, SumsForm)

    def prepared(self, program: LabelledProgram, form: Any) -> Space | None:
        """The space of the program with factors moved behind products; see `attention.form`."""
        moved = hoisted(program, form)
        return Space(moved, sealed=settled(moved, form))

    def bandwidth(self, target: Target) -> float:
        """Bandwidth of keys and values that are streamed."""
        return target.bandwidth * target.attention.streamed

    def price(self, table: Table, form: Any, target: Target, itemsize: int) -> Price:
        """See `attention.cost.attention_price`."""
        return attention_price(table, form, target)

    def sizes(
        self, structure: BlockProgram, form: Any, setting: Setting, pruned: Counter[str]
    ) -> Iterable[Sized]:
        """See `attention.sizes.attention_sizes` and `attention.sums.sizes.sums_sizes`."""
        if isinstance(form, SumsForm):
            return sums_sizes(structure, setting, pruned)
        return attention_sizes(structure, setting, pruned)

    def runs(self, step: KernelStep) -> bool:
        """True if a product multiplies a value that is computed from another product."""
        return is_chained(step)

    def plan(self, step: KernelStep, setting: Setting, schedule: Any) -> Plan[Any]:
        """Recognise the roles and choose a schedule; sizes are held to the same limits."""
        refuse_index(step)
        target = setting.target
        try:
            plan = recognized(step, setting)
        except LoweringError as error:
            several = sum(op.facets.contracts for op in step.program.ops) > 2
            with suppress(LoweringError, *(() if several else (ScheduleError,))):
                return _sums_plan(step, setting, schedule)
            raise frameless(error) from None
        plan = scheduled(plan, target) if schedule is None else replace(plan, schedule=schedule)
        if limit := exceeded(plan, target):
            raise limit.refused(step.name)
        return plan

    def explain(self, plan: Any) -> list[str]:
        """See `attention.explain.attention_lines` and `attention.sums.explain.sums_lines`."""
        return sums_lines(plan) if isinstance(plan, SumsPlan) else attention_lines(plan)

    def build(self, plan: Any) -> Any:
        """The kernel of `attention.kernel.loop`, or of `attention.kernel.sums`."""
        from cutesuper.skeletons.attention.kernel.loop import AttentionKernel
        from cutesuper.skeletons.attention.kernel.sums import SumsKernel

        return SumsKernel(plan) if isinstance(plan, SumsPlan) else AttentionKernel(plan)


def _sums_plan(step: KernelStep, setting: Setting, schedule: Any) -> SumsPlan:
    """The plan without running state. Raises LoweringError for another structure, ScheduleError."""
    plan, target = recognized_sums(step, setting), setting.target
    plan = scheduled_sums(plan, target) if schedule is None else replace(plan, schedule=schedule)
    if limit := exceeded_sums(plan, target):
        raise limit.refused(step.name)
    return plan
