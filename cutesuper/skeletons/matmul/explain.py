"""The plan of a matmul loop in words."""

from __future__ import annotations

from collections.abc import Iterator

from cutesuper.ir.block import LOAD
from cutesuper.ir.thread import ThreadExpression
from cutesuper.skeletons.matmul.plan import (
    COLUMN_BLOCK,
    ROW_BOX,
    STORE_COLUMNS,
    STORE_ROWS,
    MatmulPlan,
    Tail,
    grid_shape,
)


def _leaf_names(plan: MatmulPlan, leaves: tuple[int, ...]) -> list[str]:
    """Readable names for the leaves of an expression."""
    values = {final: f"accumulator{n}" for final, n in plan.finals.items()}
    values |= {final: f"hidden{n}" for n, (_, final) in enumerate(_hidden_products(plan))}
    values |= {p.value: f"vector{n}" for n, p in enumerate(plan.vector_products)}
    values |= {s.value: f"statistic{n}" for n, s in enumerate(plan.statistics)}
    values |= {r.value: f"reduction{n}" for n, r in enumerate(plan.reductions)}
    values |= {i: f"row{n}" for n, i in enumerate(plan.row_values) if i not in values}
    values |= {} if plan.shift is None else {plan.shift.value: "shifted"}
    ops = plan.program.ops
    return [
        values.get(i) or (str(ops[i].attributes["tensor"]) if ops[i].kind == LOAD else f"value{i}")
        for i in leaves
    ]


def _hidden_products(plan: MatmulPlan) -> list[tuple[int, int]]:
    """Column operand and accumulator of every product of the loop along a hidden label."""
    return [product for t in plan.tails for product in t.products]


def _text(plan: MatmulPlan, expression: ThreadExpression) -> str:
    return expression.text(_leaf_names(plan, expression.leaves))


def matmul_lines(plan: MatmulPlan) -> list[str]:
    """Tiles, grid, ring, and every expression, line by line."""
    lines = [*_loop_lines(plan), *_operand_lines(plan), *(_tail_line(plan, t) for t in plan.tails)]
    if plan.cluster > 1:
        lines.append(
            f"cluster: each block finishes {plan.tile[1] // plan.cluster} columns; "
            f"{plan.exchange_bytes} bytes of partial sums arrive through distributed shared memory"
        )
    if plan.parts > 1:
        partials, counters = (s.shape[0] for s in plan.scratch)
        lines.append(
            f"{plan.parts} blocks share each tile, each with a part of {plan.contracted}: they "
            f"leave their sums in {partials} float32 of device memory, meet at {counters} "
            "counter(s), and add up a part of the tile each, in order"
        )
    for i, e in enumerate(plan.row_values.values()):
        lines.append(f"row{i}, once per row: {_text(plan, e)}")
    lines += [*_reduction_lines(plan), *_output_lines(plan)]
    lines.append(f"barriers: {_barriers(plan)}; {plan.shared_bytes} bytes of shared memory")
    if plan.schedule.dependent_launch:
        early = [a.name for a in plan.arguments if a.constant] or ["nothing"]
        lines.append(f"dependent launch: {', '.join(early)} loaded before the dependency wait")
    return lines


def _loop_lines(plan: MatmulPlan) -> list[str]:
    """The grid, the threads, the ring, and how blocks walk and share."""
    m, n, k = plan.tile
    s = plan.schedule
    x, y, z = grid_shape(plan)
    columns = " or ".join(p.column for p in plan.sections)
    at_hint = f" where {plan.contracted} is as hinted" if plan.open_depth else ""
    lines = [
        (
            f"matmul loop: {plan.row} {m} x {columns} {n} per tile, {plan.contracted} {k} per "
            f"stage, {plan.iterations} iterations{at_hint}"
        ),
        f"grid {x} x {y} x {z} blocks in clusters of {plan.cluster_size * s.share_rows}, "
        f"{plan.threads} threads: {s.warpgroups} consumer warpgroup(s)"
        + (f", {plan.helpers} helper warps" if plan.has_helpers else "")
        + (f", {plan.copiers} copier warps" if plan.copiers else "")
        + ", 1 producer warp"
        + ", 1 warp that issues products" * s.issuer,
        f"ring of {s.stages} stages x {plan.held_bytes} bytes: {_ring(plan)}",
        *_copy_lines(plan),
    ]
    if plan.beside:
        tiles = (
            f"{tiles} of {p.column}"
            for tiles, p in zip(plan.section_tiles, plan.sections, strict=True)
        )
        lines.append(f"tiles, one after the other: {', '.join(tiles)}")
    if s.joint:
        lines.append(
            f"cluster: one instruction multiplies for 2 blocks along {plan.column}, each with a "
            "half of the row tile"
        )
    elif s.share_rows > 1:
        lines.append(
            f"cluster: {s.share_rows} blocks along {plan.column} load the row tile together"
        )
    if s.persistent:
        taken = ", each taking the next one that none has" if s.hand_out else ""
        lines.append(
            f"clusters walk over groups of {plan.group} tiles along {plan.row}, step by step along "
            f"{plan.column}{taken}"
        )
    return lines


def _operand_lines(plan: MatmulPlan) -> list[str]:
    """Changes of the row operand, and the sums that are accumulated beside the products."""
    lines: list[str] = []
    if plan.shift is not None:
        names = [plan.arguments[plan.staged(i).argument].name for i in plan.shift.source.leaves]
        lines.append(
            f"shifted: {plan.shift.source.text(names)}, less the mean of a sample of its row"
            + ("" if plan.shift.products else " (in statistics)")
        )
    if plan.split:
        lines.append(
            "float32 operands as two TF32 numbers each, x = high + low: high high + high low + low "
            f"high, {plan.chunk} of {plan.contracted} at a time, added up in float32"
        )
    elif plan.element_bytes == 4:
        lines.append("float32 operands, rounded to TF32")
    if plan.schedule.scales_columns and plan.factor is not None:
        lines.append(f"columns, multiplied in registers: by {_text(plan, plan.factor)}")
    elif plan.prologue is not None:
        lines.append(f"row operand, rewritten in the stage: {_text(plan, plan.prologue)}")
    for i, (vector, weight) in enumerate(_vector_names(plan)):
        lines.append(f"vector{i} per column, in the same loop: {vector} times {weight}")
    once = plan.schedule.reduces_once
    for i, st in enumerate(plan.statistics):
        scale = f" * {st.scale:g}" if st.scale != 1 else ""
        text = _text(plan, st.source)
        where = "by one block, from device memory" if once else "in the same loop"
        lines.append(f"statistic{i} per row, {where}: {st.op} of {text}{scale}")
    return lines


def _output_lines(plan: MatmulPlan) -> list[str]:
    """The expression of each output, and how it is stored."""
    lines: list[str] = []
    bulk = plan.schedule.bulk_store
    for p in plan.sections:
        for o in p.outputs:
            whole = p.column in o.view.labels
            how = f", {STORE_ROWS}x{STORE_COLUMNS} a bulk store" if whole and bulk else ""
            how = how if whole else ", once per row"
            lines.append(f"{plan.names([o.view])} = {_text(p, o.expression)}{how}")
    if bulk and plan.pieced:
        loaded = plan.names(plan.loads[op] for op in plan.pieced)
        lines.append(f"{loaded}: a bulk load into the place of each piece that leaves")
    return lines


def _vector_names(plan: MatmulPlan) -> Iterator[tuple[str, str]]:
    """Every vector that is multiplied by column operands, and these."""
    for i, product in enumerate(plan.vector_products):
        vector = plan.vector_rows[product.vector]
        text = "ones" if vector is None else _text(plan, vector)
        products = (p.vector_products[i].column for p in plan.sections)
        views = (p.columns[c] for p, c in zip(plan.sections, products, strict=True))
        yield text, " or ".join(plan.names([v]) for v in views)


def _ring(plan: MatmulPlan) -> str:
    """Contents of a stage: column operands, those along hidden labels, row operands."""
    columns = " or ".join(plan.names(p.columns.values()) for p in plan.sections)
    parts = [f"{columns} ({COLUMN_BLOCK} columns a box)"] if columns else []
    number = 0
    for t in plan.tails:
        width = min(COLUMN_BLOCK, t.width(plan.narrow))
        for load, _ in t.products:
            name = plan.arguments[plan.hidden[load].argument].name
            parts.append(f"{name} for hidden{number} ({width} columns a box)")
            number += 1
    rows = plan.names((plan.rows | plan.vectors).values())
    return ", ".join([*parts, f"{rows} ({ROW_BOX} rows a box)" if plan.turned else rows])


def _copy_lines(plan: MatmulPlan) -> list[str]:
    """Operands that threads copy, and why; none if bulk loads bring all."""
    views = list(plan.copied.values())
    if not views:
        return []
    each = plan.copied_bytes
    line = (
        "copied by threads, as bulk loads take rows of multiples of 16 bytes only: "
        f"{plan.names(views)}; {each} bytes a stage"
    )
    return [line]


def _tail_line(plan: MatmulPlan, tail: Tail) -> str:
    """A product after the loop: its operands, where they come from, and where the result goes."""
    shared = sum(final == tail.final for _, final in plan.products)
    shared += sum(t.final == tail.final for t in plan.tails)
    how = "by a bulk load" if plan.loaded(tail) else f"rounded to {plan.dtype}"
    who = ""
    if plan.cluster > 1:
        who = " by one block of the cluster" if tail.once else " by every block with its part"
    return (
        f"after the loop: {_text(plan, tail.source)} [{plan.row}, {tail.hidden} {tail.extent}], "
        f"{how}, times {plan.arguments[tail.view.argument].name}, "
        f"{'added to' if shared > 1 else 'into'} accumulator{plan.finals[tail.final]}{who}"
    )


def _reduction_lines(plan: MatmulPlan) -> list[str]:
    """Reductions along the columns, and how blocks share them."""
    lines = [
        f"reduction{i} along {plan.column}: {r.op} of {_text(plan, r.source)}"
        + (f" * {r.scale:g}" if r.scale != 1 else "")
        for i, r in enumerate(plan.reductions)
    ]
    if lines and plan.column_cluster > 1:
        lines.append(
            f"cluster: each block has {plan.tile[1]} columns and sends what it has reduced of "
            f"{plan.tile[0]} rows to all {plan.column_cluster}"
        )
    return lines


def _barriers(plan: MatmulPlan) -> str:
    names = ["full", "empty"] + ["ready"] * plan.rewrites
    names += ["received"] * (plan.cluster > 1)
    shared = plan.cluster > 1 or plan.splits_statistics
    names += ["reduced"] * (bool(plan.statistics) and shared)
    names += ["after_full"] * bool(plan.tails)
    exchanged = bool(plan.reductions) and plan.column_cluster > 1
    return ", ".join(names + ["columns_reduced"] * exchanged)
