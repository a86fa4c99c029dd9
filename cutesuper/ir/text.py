"""Graphs as text that lines up; pictures are made in `cutesuper.show.svg`."""

from __future__ import annotations

from collections.abc import Iterable

from cutesuper.ir.block import AxisKind, BlockProgram, MuGraph, TensorSpec
from cutesuper.ir.check import ValueState, check_block_program
from cutesuper.ir.dims import Symbol, extent, show_shape, size
from cutesuper.ir.graph import KernelGraph, Node
from cutesuper.ir.outline import call, loop_titles, sections, show_bytes, tile_of
from cutesuper.show.svg import mugraph_svg

INDENT = "  "


def kernel_graph_text(graph: KernelGraph) -> str:
    """One line for each node; outputs end in ``-> output 0``.

    ::

        kernel graph: 2 inputs, 1 output
          X   input          [16, 4096]    float16
          W   input          [4096, 6144]  float16
          t2  rms_norm(X)    [16, 4096]    float16  eps=1e-06
          t3  matmul(t2, W)  [16, 6144]    float16  -> output 0
    """
    rows = [_node_row(graph, i, n) for i, n in enumerate(graph.nodes)]
    head = f"kernel graph: {_count(graph.inputs, 'input')}, {_count(graph.outputs, 'output')}"
    return "\n".join([head, *_aligned(rows)])


def _node_row(graph: KernelGraph, index: int, node: Node) -> tuple[str, ...]:
    operands = ", ".join(graph.nodes[j].name for j in node.inputs)
    what = node.operator if not node.inputs else f"{node.operator}({operands})"
    notes = [f"{k}={_value(v)}" for k, v in node.attributes.items()]
    if node.constant:
        notes.append("constant")
    if index in graph.outputs:
        notes.append(f"-> output {graph.outputs.index(index)}")
    return node.name, what, show_shape(node.shape), str(node.dtype), " ".join(notes)


def _value(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


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
    lines = [f"muGraph: {_count(mu.steps, 'kernel')}"]
    lines += _aligned([_tensor_row(mu, t) for t in mu.tensors.values()])
    for step in mu.steps:
        lines += ["", f"kernel {step.name}: {', '.join(step.reads)} -> {', '.join(step.writes)}"]
        lines += [INDENT + line for line in program_text(step.program).splitlines()]
    return "\n".join(lines)


def _tensor_row(mu: MuGraph, t: TensorSpec) -> tuple[str, ...]:
    count = show_bytes(size(t.shape) * t.dtype.itemsize)
    role = "in" if t.name in mu.inputs else "out" if t.name in mu.outputs else "between"
    return role, t.name, show_shape(t.shape), str(t.dtype), count, "constant" if t.constant else ""


def _count(things: Iterable[object], noun: str) -> str:
    n = len(list(things))
    return f"{n} {noun}{'' if n == 1 else 's'}"


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        (INDENT + "  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True))).rstrip()
        for r in rows
    ]


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


__all__ = ["blocks_text", "kernel_graph_text", "mugraph_svg", "mugraph_text", "program_text"]
