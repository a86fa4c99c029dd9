"""The plans of row kernels in words."""

from __future__ import annotations

from cutesuper.skeletons.rows.plan import RowLoopPlan, RowPlan


def row_loop_lines(plan: RowLoopPlan) -> list[str]:
    """Tiles, ring, reductions, sums over rows, tensors."""
    s = plan.schedule
    rows = " x ".join(plan.rows)
    per = f"{plan.width} of {plan.length}" if plan.parts > 1 else f"{plan.length}"
    who = "cluster" if plan.cluster > 1 else "block"
    tile = f"{plan.tile_rows} row(s) of {per} elements"
    walk = f"{plan.walkers or s.blocks} {who}s walk over {rows}, {tile} at a time"
    if plan.one_tile:
        walk = f"a {who} for each tile of {rows}, {tile}"
    lines = [
        f"row loop: {walk}, {plan.threads} threads each",
        _threads_line(plan, s.kept),
        _ring_line(plan),
    ]
    if plan.cluster > 1:
        lines.append(f"cluster of {plan.cluster}: each block has a part of a row")
    if plan.outer:
        lines.append(f"a block has one element of {', '.join(plan.outer)}")
    exchanges = sum(bool(level.reductions) for level in plan.levels)
    reductions = sum(len(level.reductions) for level in plan.levels)
    lines.append(f"reductions along {plan.column}: {reductions}, in {exchanges} exchange(s)")
    if plan.picked:
        lines.append(f"read by itself: {len(plan.picked)} element(s) of a row, where its label is")
    if plan.sums:
        lines.append(_sum_line(plan))
    return [*lines, _tensors_line(plan)]


def _ring_line(plan: RowLoopPlan) -> str:
    s = plan.schedule
    if not s.stages:
        return f"tiles go straight to registers; {plan.shared_bytes} bytes of shared memory"
    return (
        f"{s.stages} stage(s) of {plan.stage_bytes} bytes; {plan.shared_bytes} bytes of shared "
        "memory"
    )


def _sum_line(plan: RowLoopPlan) -> str:
    names = [plan.arguments[plan.stores[i].argument].name for i in plan.stores]
    looped = {i for level in plan.levels for i in level.stores}
    summed = [n for n, i in zip(names, plan.stores, strict=True) if i not in looped]
    how = (
        f"every block has {plan.slice_columns} columns of all rows, and reads them again"
        if plan.schedule.sliced
        else "every block has all rows of its columns"
        if plan.alone
        else f"all blocks meet, then each adds up {plan.slice_columns} columns of {plan.partials} "
        "partial results"
    )
    return f"summed over rows: {', '.join(summed)}; {how}"


def row_lines(plan: RowPlan) -> list[str]:
    """Rows, threads and tensors of a row kernel, line by line."""
    s = plan.schedule
    rows = " and ".join(" x ".join(s.rows) or "1" for s in plan.sections)
    return [
        f"rows: {rows} rows of {plan.column}, {s.rows} per block of {plan.threads} threads",
        _threads_line(plan, kept=True),
        f"reductions: {len(plan.reductions)}; {plan.shared_bytes} bytes of shared memory",
        _tensors_line(plan),
    ]


def _threads_line(plan: RowPlan | RowLoopPlan, kept: bool) -> str:
    s = plan.schedule
    where = "rows stay in registers" if kept else "rows are read again after a reduction"
    how = f"{s.chunks} access(es) of {s.vector} elements each"
    return f"{s.lanes} threads share a row, {how}; {where}"


def _tensors_line(plan: RowPlan | RowLoopPlan) -> str:
    return f"reads {plan.names(plan.loads.values())}; writes {plan.names(plan.stores.values())}"
