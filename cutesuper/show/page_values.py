"""Notes on a selected value: its tile, its place in memory, its producer, its users."""

from __future__ import annotations

from math import prod

from cutesuper.ir.block import (
    ENDING,
    LOAD,
    STORE,
    Axis,
    AxisKind,
    BlockProgram,
)
from cutesuper.ir.check import ITERATED, ValueState
from cutesuper.ir.outline import call, phrase, sections
from cutesuper.show.page_block import BlockDrawing
from cutesuper.show.page_parts import Html, count, el, join, tile_text
from cutesuper.show.panel import Key


def value_notes(drawing: BlockDrawing) -> list[Html]:
    """A note for every box of a drawing, hidden until the box is selected."""
    return [
        _operation_note(drawing, key) if key.what == "op" else _tensor_note(drawing, key)
        for key in drawing.row
    ]


def _operation_note(drawing: BlockDrawing, key: Key) -> Html:
    program, index = drawing.program, int(str(key.name))
    op, state = program.ops[index], drawing.states[index]
    facts: dict[str, str] = {"What": meaning(program, index)}
    if op.kind != STORE:
        size = prod(program.tile[d] for d in op.dims)
        facts["Labels"] = ", ".join(op.dims) or "none"
        facts["Tile"] = f"{tile_text(program.tile, op.dims)}, {count(size, 'element')}"
        facts["Lives"] = lives(program, state, index)
        facts["Complete"] = complete(program, state)
    return _note(drawing, key, f"{index}  {call(program, index)}", facts)


def _tensor_note(drawing: BlockDrawing, key: Key) -> Html:
    mu, name = drawing.mu, str(key.name)
    t = mu.tensors[name]
    readers = [s.name for s in mu.steps if name in s.reads]
    writers = [s.name for s in mu.steps if name in s.writes]
    facts: dict[str, str] = {
        "Tensor": f"{drawing.role(key)}, {drawing.storage(key)}, in device memory",
        "Shared out": drawing.shared_out(key),
    }
    if t.constant:
        facts["Constant"] = "not written meanwhile: it may be loaded early"
    if writers:
        facts["Written by"] = ", ".join(writers)
    if readers:
        facts["Read by"] = ", ".join(readers)
    return _note(drawing, key, drawing.title(key), facts)


def _note(drawing: BlockDrawing, key: Key, title: str, facts: dict[str, str]) -> Html:
    terms = [el("dt", k) + el("dd", v) for k, v in facts.items()]
    links = {
        "From": [a for a, b in drawing.edges if b == key],
        "To": [b for a, b in drawing.edges if a == key],
    }
    for word, keys in links.items():
        if keys:
            buttons = [
                el("button", drawing.title(k), type="button", data_go=drawing.id(k)) for k in keys
            ]
            terms.append(el("dt", word) + el("dd", join(buttons, " ")))
    return el(
        "article",
        el("h4", title),
        el("dl", *map(Html, terms)),
        class_="note",
        id=f"{drawing.id(key)}-note",
        hidden=True,
    )


def meaning(program: BlockProgram, index: int) -> str:
    """A sentence on the work of an operation on the GPU."""
    op = program.ops[index]
    if op.kind in (LOAD, STORE):
        way = "a tile from" if op.kind == LOAD else "the tile to"
        return f"copies {way} device memory, {often(program, index)}"
    if op.kind in ENDING:
        return _combines(program, program.axis(op.attributes["axis"]), op.rescaled)
    if op.facets.contracts:
        return f"multiplies tiles over {op.attributes['over']} on the tensor cores"
    if "over" in op.attributes:
        return f"reduces the tile along {op.attributes['over']}"
    return f"{phrase(program, index)} for every element of the tile"


def _combines(program: BlockProgram, axis: Axis, rescaled: bool) -> str:
    n = program.parts(axis)
    how = ", rescaled to the common maximum" if rescaled else ""
    if axis.kind == AxisKind.CLUSTER:
        return f"combines partial results of {count(n, 'block')} through shared memory{how}"
    if axis.kind == AxisKind.GRID:
        return (
            f"combines partial results of {count(n, 'block')} through device memory{how}; the last "
            "block to arrive does this and all that follows"
        )
    return f"combines the partial results of {count(n, 'iteration')} of {axis.name}{how}"


def often(program: BlockProgram, index: int) -> str:
    """Text on how many times a block runs an operation."""
    n = times(program, index)
    return "once per block" if n == 1 else f"{n:,} times per block"


def times(program: BlockProgram, index: int) -> int:
    """Number of times that a block runs an operation: the iterations of the loops around it.

    A tile used by two walks over a loop is loaded in both.
    """
    parts = sections(program)
    mine = next(s for s in parts if index in s.ops)
    walks = {mine.number}
    if program.ops[index].kind == LOAD and mine.loops:
        walks |= {
            s.number
            for s in parts
            for i in s.ops
            if s.loops == mine.loops and index in program.ops[i].inputs
        }
    return len(walks) * prod(program.parts(a) for a in mine.loops)


def lives(program: BlockProgram, state: ValueState, index: int) -> str:
    """The place of a value, by the loops that it cannot leave."""
    parts = sections(program)
    walk = next(s.number for s in parts if index in s.ops)
    which = f", walk {walk}" if max(s.number for s in parts) > 1 else ""
    inner = [a for a in program.axes if a.name in state.inside]
    if inner:
        loops = " and ".join(f"{a.name} ({count(program.parts(a), 'iteration')})" for a in inner)
        return f"inside {loops}{which}: another value in every iteration"
    ended = {name for name, _ in state.closed}
    after = [a.name for a in program.axes if a.kind in ITERATED and a.name in ended]
    return f"in the block, once {' and '.join(after)} has ended" if after else "in the block"


def complete(program: BlockProgram, state: ValueState) -> str:
    """Text on whether a value is a partial result, and over which axes."""
    if not state.pending:
        return "yes: no axis is left to combine over"
    axes = [program.axis(name) for name in sorted(state.pending)]
    shown = " and ".join(f"{a.name} ({program.parts(a)})" for a in axes)
    return f"no: a partial result over {shown}"


def loaded(program: BlockProgram, index: int, itemsize: int) -> int:
    """Bytes that all blocks together request in a load, padding included."""
    tile = prod(program.tile[d] for d in program.ops[index].dims)
    return tile * itemsize * times(program, index) * program.blocks()
