"""Block programs for readers: operations in nested sections, with a short phrase for each.

before: a flat list of operations, of which 0 to 4 depend on ``K.loop``; after::

    Section()                          operations outside of the loop
    Section(loops=(K.loop,))           0 to 4 and the accumulators that end the loop
    Section(ended=(K.loop,))           operations that use these
"""

from __future__ import annotations

from dataclasses import dataclass

from cutesuper.ir.block import (
    ACCUMULATE,
    ENDING,
    LOAD,
    STORE,
    Axis,
    AxisKind,
    BlockOp,
    BlockProgram,
)
from cutesuper.ir.check import ValueState, check_block_program, pass_of
from cutesuper.ir.operators.base import CONSTANT


@dataclass(frozen=True)
class Section:
    """Operations that run together.

    Attributes:
        loops: the persistent and loop axes that they are inside of, outermost first.
        number: number of the walk over the innermost of ``loops``, 1 for the first.
        ended: the innermost axis that ended just before, if that is why this section exists.
        ops: indices into the program; constants are left out (they are shown where they are used).
    """

    loops: tuple[Axis, ...]
    number: int
    ended: Axis | None
    ops: tuple[int, ...]


def sections(program: BlockProgram) -> tuple[Section, ...]:
    """The program in the order in which it runs; empty sections are left out.
    They are cached with the program, since every value of a page needs them.

    Raises:
        GraphError: the program is illegal.
    """
    kept = program.__dict__
    if "sections" not in kept:
        kept["sections"] = _sections(program)
    return kept["sections"]


def _sections(program: BlockProgram) -> tuple[Section, ...]:
    states = check_block_program(program)
    outer = next(iter(program.of_kind(AxisKind.PERSISTENT)), None)
    inner = next(iter(program.of_kind(AxisKind.LOOP)), None)
    shown = [i for i, op in enumerate(program.ops) if op.kind != CONSTANT]
    phases = [_phases(program, axis, states) for axis in (outer, inner)]
    where = {i: (phases[0][i], phases[1][i]) for i in shown}
    if any(p % 2 and k for p, k in where.values()):
        # the loop runs once per visited tile: all of it stands inside the persistent axis
        where = {i: (1, k) if p == 0 and k else (p, k) for i, (p, k) in where.items()}
    return tuple(
        Section(
            tuple(a for a, phase in ((outer, p), (inner, k)) if a and phase % 2),
            (k + 1) // 2 if k % 2 else 1,
            inner if k and not k % 2 and p != 2 else outer if p == 2 else None,
            tuple(i for i in shown if where[i] == (p, k)),
        )
        for p, k in sorted(set(where.values()))
    )


def _phases(program: BlockProgram, axis: Axis | None, states: list[ValueState]) -> list[int]:
    """Phase of each operation: 0 before the axis, 1 in its first walk, 2 after it.
    3 in the next."""
    if axis is None:
        return [0] * len(states)
    phases: list[int] = []
    for op, state in zip(program.ops, states, strict=True):
        number = pass_of(state, axis.name)
        ends = op.kind == ACCUMULATE and op.attributes["axis"] == axis.name
        inside = axis.name in state.inside
        phases.append(2 * number - 1 if inside else 2 * number - 3 if ends else 2 * number - 2)
    first: dict[int, int] = {}  # for every operation the earliest phase that uses it
    for i in reversed(range(len(phases))):
        if i in first and axis.name in states[i].inside:
            phases[i] = first[i]  # a tile is loaded in the walk that uses it first
        for j in program.ops[i].inputs:
            first[j] = min(first.get(j, phases[i]), phases[i])
    return phases


def loop_titles(program: BlockProgram, section: Section) -> list[str]:
    """The section's loops as titles: ``for K.loop in 16``, and ``for K.loop in 16, walk 2``.
    ``in about 16`` if the axis is open."""
    titles = [
        f"for {a.name} in {'about ' if a.extent is None else ''}{program.parts(a)}"
        for a in section.loops
    ]
    if section.number > 1:
        titles[-1] += f", walk {section.number}"
    return titles


def phrase(program: BlockProgram, index: int) -> str:
    """Short name of an operation, without its operands: ``matmul over K``, ``load X``."""
    op = program.ops[index]
    attributes = op.attributes
    if op.kind in (LOAD, STORE):
        return f"{op.kind} {_tensors(op)}"
    if op.kind in ENDING:
        verb = op.kind.removesuffix("_reduce")
        how = "rescaled sum" if op.rescaled else attributes["op"]
        return f"{verb} {how} over {attributes['axis']}"
    if "over" in attributes:
        return f"{op.kind} over {attributes['over']}"
    given = ", ".join(f"{k}={v:g}" for k, v in attributes.items() if isinstance(v, int | float))
    constants = [constant(program, j) for j in op.inputs]
    given = ", ".join(filter(None, [given, *constants]))
    return f"{op.kind} {given}" if given else op.kind


def call(program: BlockProgram, index: int) -> str:
    """Short name of an operation with its operands: ``matmul(0, 1) over K``."""
    op = program.ops[index]
    operands = ", ".join(constant(program, j) or str(j) for j in op.inputs)
    if op.kind == LOAD:
        return phrase(program, index)
    if op.kind == STORE:
        return f"store {operands} -> {_tensors(op)}"
    if op.kind in ENDING or "over" in op.attributes:
        name, _, rest = phrase(program, index).partition(" ")
        return f"{name}({operands}) {rest}"
    given = ", ".join(f"{k}={v}" for k, v in op.attributes.items())
    return f"{op.kind}({', '.join(filter(None, [operands, given]))})"


def _tensors(op: BlockOp) -> str:
    """The tensor of a load or store, and the integers through which it is read or written."""
    name, *integers = op.tensors
    return f"{name} through {' and '.join(integers)}" if integers else name


def constant(program: BlockProgram, index: int) -> str:
    """The number that operation ``index`` stands for, or an empty string."""
    op = program.ops[index]
    return f"{op.attributes['value']:g}" if op.kind == CONSTANT else ""


def tile_of(program: BlockProgram, op: BlockOp) -> str:
    """The tile that a block holds of a value: ``M 16  K 128``; ``scalar`` without labels."""
    return "  ".join(f"{d} {program.tile[d]}" for d in op.dims) or "scalar"


def show_bytes(count: int) -> str:
    """A size in bytes as text: ``131072`` -> ``128.0 KiB``."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{count} B" if units[0] == "B" else f"{value:.1f} {units[0]}"
