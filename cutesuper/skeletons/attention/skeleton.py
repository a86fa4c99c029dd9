"""The attention loop: two chained products with running state between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from cutesuper.egraph.extract import Price
from cutesuper.egraph.labelled import LabelledProgram, Region
from cutesuper.egraph.products import are_chained, matrix_products
from cutesuper.egraph.saturate import Table
from cutesuper.egraph.space import Space
from cutesuper.ir.block import BlockProgram, KernelStep
from cutesuper.skeletons.attention.cost import ChainedModel, chained_price
from cutesuper.skeletons.attention.explain import attention_lines
from cutesuper.skeletons.attention.form import chained_form
from cutesuper.skeletons.attention.hoist import hoisted, settled
from cutesuper.skeletons.attention.plan import AttentionPlan
from cutesuper.skeletons.attention.planner import plan_attention
from cutesuper.skeletons.attention.schedule import AttentionSchedule
from cutesuper.skeletons.attention.sizes import chained_sizes
from cutesuper.skeletons.base import Plan, Skeleton
from cutesuper.skeletons.cost import Setting, Sized
from cutesuper.skeletons.form import Form, needs_positions
from cutesuper.skeletons.legality import is_chained
from cutesuper.targets import Target


class Attention(Skeleton):
    """Skeleton of chained products. Only segments between waists are searched: with norms of Q, K
    and V there are 20 others, 0.3 to 1 s each."""

    name = "an attention loop"
    plans = (AttentionPlan,)
    schedules = (AttentionSchedule,)
    between_waists = True

    def recognize(self, region: Region, program: LabelledProgram, target: Target) -> Form | None:
        """Rules for products of which the last one depends on another."""
        products = matrix_products(program)
        positions = needs_positions(region) is not None
        if not products or (positions and not are_chained(program)):
            return None
        return chained_form(region, program, products)

    def prepared(self, program: LabelledProgram, form: Any) -> Space | None:
        """The space of the program with factors moved behind products; see `attention.hoist`."""
        moved = hoisted(program, form)
        return Space(moved, sealed=settled(moved, form))

    def price(self, table: Table, form: Any, target: Target, itemsize: int) -> Price:
        """See `attention.cost.chained_price`."""
        return chained_price(table, form, target)

    def sizes(
        self, structure: BlockProgram, form: Any, setting: Setting, pruned: Counter[str]
    ) -> Iterable[Sized]:
        """See `attention.sizes.chained_sizes`."""
        target, launch = setting.target, setting.dependent_launch
        model = ChainedModel(structure, form, target, setting.itemsizes, launch)
        return (Sized(*s) for s in chained_sizes(structure, form, model, pruned))

    def runs(self, step: KernelStep) -> bool:
        """True if a product multiplies a value that is computed from another product."""
        return is_chained(step)

    def plan(self, step: KernelStep, setting: Setting, schedule: Any) -> Plan[Any]:
        """See `attention.planner.plan_attention`."""
        launch = setting.dependent_launch
        return plan_attention(step, setting.tensors, setting.target, schedule, launch)

    def explain(self, plan: Any) -> list[str]:
        """See `attention.explain.attention_lines`."""
        return attention_lines(plan)

    def build(self, plan: Any) -> Any:
        """The kernel of `attention.kernel.loop`."""
        from cutesuper.skeletons.attention.kernel.loop import AttentionKernel

        return AttentionKernel(plan)
