"""The attention loop: two chained products with running state between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from cutesuper.egraph.extract import Price
from cutesuper.egraph.labelled import LabelledProgram, Region
from cutesuper.egraph.products import are_chained, matrix_products
from cutesuper.egraph.saturate import Table
from cutesuper.egraph.space import Space
from cutesuper.ir.block import BlockProgram, KernelStep
from cutesuper.skeletons.attention.cost import attention_price
from cutesuper.skeletons.attention.explain import attention_lines
from cutesuper.skeletons.attention.form import attention_form, hoisted, settled
from cutesuper.skeletons.attention.plan import AttentionPlan, exceeded
from cutesuper.skeletons.attention.roles import recognized
from cutesuper.skeletons.attention.schedule import AttentionSchedule, scheduled
from cutesuper.skeletons.attention.sizes import attention_sizes
from cutesuper.skeletons.base import Plan, Skeleton
from cutesuper.skeletons.cost import Setting, Sized
from cutesuper.skeletons.form import Form, check_index, needs_positions
from cutesuper.skeletons.legality import is_chained, refuse_index
from cutesuper.targets import Target


class Attention(Skeleton):
    """Skeleton of chained products. Only segments between waists are searched: with norms of Q, K
    and V there are 20 others, 0.3 to 1 s each."""

    name = "an attention loop"
    plans = (AttentionPlan,)
    schedules = (AttentionSchedule,)
    between_waists = True
    inner_symbols = True

    def recognize(self, region: Region, program: LabelledProgram, target: Target) -> Form | None:
        """Rules for products of which the last one depends on another."""
        products = matrix_products(program)
        positions = needs_positions(region) is not None
        if not products or (positions and not are_chained(program)):
            return None
        check_index(region)
        return attention_form(region, program, products)

    def prepared(self, program: LabelledProgram, form: Any) -> Space | None:
        """The space of the program with factors moved behind products; see `attention.form`."""
        moved = hoisted(program, form)
        return Space(moved, sealed=settled(moved, form))

    def price(self, table: Table, form: Any, target: Target, itemsize: int) -> Price:
        """See `attention.cost.attention_price`."""
        return attention_price(table, form, target)

    def sizes(
        self, structure: BlockProgram, form: Any, setting: Setting, pruned: Counter[str]
    ) -> Iterable[Sized]:
        """See `attention.sizes.attention_sizes`."""
        return attention_sizes(structure, setting, pruned)

    def runs(self, step: KernelStep) -> bool:
        """True if a product multiplies a value that is computed from another product."""
        return is_chained(step)

    def plan(self, step: KernelStep, setting: Setting, schedule: Any) -> Plan[Any]:
        """Recognise the roles and choose a schedule; sizes are held to the same limits."""
        refuse_index(step)
        target, plan = setting.target, recognized(step, setting)
        plan = scheduled(plan, target) if schedule is None else replace(plan, schedule=schedule)
        if limit := exceeded(plan, target):
            raise limit.refused(step.name)
        return plan

    def explain(self, plan: Any) -> list[str]:
        """See `attention.explain.attention_lines`."""
        return attention_lines(plan)

    def build(self, plan: Any) -> Any:
        """The kernel of `attention.kernel.loop`."""
        from cutesuper.skeletons.attention.kernel.loop import AttentionKernel

        return AttentionKernel(plan)
