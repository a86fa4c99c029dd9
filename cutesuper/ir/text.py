"""MuGraphs as aligned text; `cutesuper.show.svg` makes pictures."""

from __future__ import annotations

from cutesuper.ir.block import AxisKind, BlockProgram, MuGraph, TensorSpec
from cutesuper.ir.check import ValueState, check_block_program
from cutesuper.ir.dims import Symbol, extent, show_shape, size
from cutesuper.ir.graph_text import INDENT, aligned, counted
from cutesuper.ir.outline import call, loop_titles, sections, show_bytes, tile_of


def program_text(program: BlockProgram) -> str:
    """Axes and tiles on the first lines, then the operations, indented as they are nested.

    ::

        N.grid 48  K.cluster 2  K.loop 16   tile M 16  N 128  K 128
        for K.loop in 16:
           0  load X              M 16  K 128
           ...

    Raises:
        GraphError: the program is illegal.
    """
    states = check_block_program(program)
    axes = "  ".join(f"{a.name} {'?' if a.extent is None else a.extent}" for a in program.axes)
    tile = "  ".join(f"{d} {e}" for d, e in program.tile.items())
    whole = "  ".join(
        f"{d} {'about ' if isinstance(e, Symbol) else ''}{extent(e)}"
        for d, e in program.dims.items()
    )
    lines = [f"{axes or 'one block'}   tile {tile}", f"{blocks_text(program)} for {whole}"]
    open_loops: list[str] = []
    rows: list[tuple[int, tuple[str, ...] | str]] = []
    for section in sections(program):
        names = loop_titles(program, section)
        for depth, title in enumerate(names):
            if open_loops[: depth + 1] != names[: depth + 1]:
                rows.append((depth, f"{title}:"))
        if section.ended is not None:
            rows.append((len(names), f"after {section.ended.name}:"))
        open_loops = names
        depth = len(names) + (section.ended is not None)
        rows += [(depth, _op_row(program, states, i)) for i in section.ops]
    return "\n".join(lines + _aligned_nested(rows))


def blocks_text(program: BlockProgram) -> str:
    """``96 blocks in clusters of 2``; ``16 blocks (for M = 16)`` where M is symbolic."""
    text = f"{program.blocks()} block{'s' if program.blocks() != 1 else ''}"
    for axis in program.of_kind(AxisKind.CLUSTER):
        text += f" in clusters of {axis.extent}"
    return text


def _op_row(program: BlockProgram, states: list[ValueState], index: int) -> tuple[str, ...]:
    op = program.ops[index]
    partial = "" if op.kind == "store" else ", ".join(sorted(states[index].pending))
    return (
        f"{index:>2}",
        call(program, index),
        tile_of(program, op),
        f"partial over {partial}" if partial else "",
    )


def mugraph_text(mu: MuGraph) -> str:
    """The tensors in device memory, then every kernel with its block program.

    Raises:
        GraphError: a program is illegal.
    """
    lines = [f"muGraph: {counted(mu.steps, 'kernel')}"]
    lines += aligned([_tensor_row(mu, t) for t in mu.tensors.values()])
    for step in mu.steps:
        lines += ["", f"kernel {step.name}: {', '.join(step.reads)} -> {', '.join(step.writes)}"]
        lines += [INDENT + line for line in program_text(step.program).splitlines()]
    return "\n".join(lines)


def _tensor_row(mu: MuGraph, t: TensorSpec) -> tuple[str, ...]:
    count = show_bytes(size(t.shape) * t.dtype.itemsize)
    role = "in" if t.name in mu.inputs else "out" if t.name in mu.outputs else "between"
    role = "part" if t.part else role
    return role, t.name, show_shape(t.shape), str(t.dtype), count, "constant" if t.constant else ""


def _aligned_nested(rows: list[tuple[int, tuple[str, ...] | str]]) -> list[str]:
    cells = [(depth, row) for depth, row in rows if isinstance(row, tuple)]
    # the second column absorbs the indentation, so that tiles line up across all sections
    calls = max(len(INDENT) * depth + len(row[1]) for depth, row in cells)
    tiles = max(len(row[2]) for _, row in cells)
    lines: list[str] = []
    for depth, row in rows:
        if isinstance(row, str):
            lines.append(INDENT * depth + row)
            continue
        width = calls - len(INDENT) * depth
        text = f"{row[0]}  {row[1].ljust(width)}   {row[2].ljust(tiles)}   {row[3]}"
        lines.append((INDENT * depth + text).rstrip())
    return lines
