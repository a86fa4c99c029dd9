"""Rows: element-wise programs and reductions, by blocks that hold rows or walk over them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from cutesuper.egraph.labelled import LabelledProgram, Region
from cutesuper.egraph.products import matrix_products
from cutesuper.errors import SearchError
from cutesuper.ir.block import LOAD, AxisKind, BlockProgram, KernelStep
from cutesuper.ir.operators.base import CONSTANT
from cutesuper.skeletons.base import Plan, Skeleton
from cutesuper.skeletons.cost import Setting, Sized
from cutesuper.skeletons.form import Form, needs_positions, single_reduction, unsized
from cutesuper.skeletons.legality import without_running_state
from cutesuper.skeletons.rows.cost import least_ramp_us
from cutesuper.skeletons.rows.explain import row_lines, row_loop_lines
from cutesuper.skeletons.rows.form import PersistentForm, RowForm, exceeds_a_cluster, row_form
from cutesuper.skeletons.rows.plan import RowLoopPlan, RowPlan
from cutesuper.skeletons.rows.planner import plan_of
from cutesuper.skeletons.rows.roles import row_label
from cutesuper.skeletons.rows.schedule import RowLoopSchedule, RowSchedule
from cutesuper.skeletons.rows.sizes import cluster_sizes, part_sizes, persistent_sizes, row_sizes
from cutesuper.targets import Target


class Rows(Skeleton):
    """Skeleton of programs without products: whole rows in a block, in a cluster, or in turn."""

    name = "a row kernel"
    plans = (RowPlan, RowLoopPlan)
    schedules = (RowSchedule, RowLoopSchedule)

    def recognize(self, region: Region, program: LabelledProgram, target: Target) -> Form | None:
        """Rules for regions without products, and without positions except those of labels."""
        if matrix_products(program):
            return None
        reason = needs_positions(region)
        if reason is not None:
            raise SearchError(reason)
        return row_form(region, program, target)

    def divides(self, length: int, alone: bool) -> bool:
        """True for rows that neither a block nor a cluster holds."""
        return exceeds_a_cluster(length, alone)

    def class_share(self, program: LabelledProgram) -> float:
        """Less for long programs that reduce rows, of which memory decides the time.
        Of 20 chains of norms and their gradients with 24 to 30 operators none got 0.1 % cheaper
        than as it is written, in up to 1.5 s each."""
        long = sum(op.kind not in (LOAD, CONSTANT) for op in program.ops) > 24
        return 0.4 if long and program.reduced else 1.0

    def least_us(
        self, program: LabelledProgram, form: Any, target: Target, memory_us: float
    ) -> float:
        """Launch, memory, and costs of the kind of rows; see `rows.cost`."""
        return target.launch_us + memory_us + least_ramp_us(form, bool(program.reduced), target)

    def sizes(
        self, structure: BlockProgram, form: Any, setting: Setting, pruned: Counter[str]
    ) -> Iterable[Sized]:
        """Sizes by the kind of rows; see `rows.sizes`."""
        if isinstance(form, PersistentForm):
            return persistent_sizes(structure, form, setting, pruned)
        sizes = cluster_sizes if form.clustered else part_sizes if form.parted else row_sizes
        return sizes(structure, form, setting, pruned)

    def restructured(
        self, program: BlockProgram, setting: Setting
    ) -> tuple[BlockProgram, Form] | None:
        """Rows along the reduced label or the last one, if all axes are grid axes.
        None for parts of rows, whose number another kernel knows."""
        reduced = single_reduction(program)
        if not reduced and reduced is not None:
            reduced = list({op.attributes["along"]: None for op in program.ops if op.facets.turns})
        if reduced is None or any(a.kind != AxisKind.GRID for a in program.axes):
            return None
        if any(op.facets.contracts for op in program.ops) or program.partials():
            return None
        stored = [[d for d in op.attributes["map"] if d] for op in program.stores()]
        read = [[d for d in op.attributes["map"] if d] for op in program.loads()]
        row = row_label(program.dims, reduced, stored, read)
        if row is None:
            return None
        kinds: dict[str, tuple[AxisKind, ...]] = dict.fromkeys(program.dims, (AxisKind.GRID,))
        kinds |= {row: ()} if reduced else {}
        return unsized(program, kinds), RowForm(row, bool(reduced))

    def runs(self, step: KernelStep) -> bool:
        """True if there is no product."""
        return not any(op.facets.contracts for op in step.program.ops)

    def plan(self, step: KernelStep, setting: Setting, schedule: Any) -> Plan[Any]:
        """See `rows.planner.plan_of`.
        What the search prices has no guards: a program would be cheaper for hiding its rows from
        them."""
        return plan_of(without_running_state(step, setting.tensors), setting, schedule)

    def explain(self, plan: Any) -> list[str]:
        """See `rows.explain`."""
        return row_loop_lines(plan) if isinstance(plan, RowLoopPlan) else row_lines(plan)

    def build(self, plan: Any) -> Any:
        """The kernel of `rows.kernel.loop`, or of `rows.kernel.rows`."""
        if isinstance(plan, RowLoopPlan):
            from cutesuper.skeletons.rows.kernel.loop import RowLoopKernel

            return RowLoopKernel(plan)
        from cutesuper.skeletons.rows.kernel.rows import RowKernel

        return RowKernel(plan)
