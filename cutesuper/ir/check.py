"""Legality checks for graphs that are built, searched or read from a file."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod
from typing import Any

from cutesuper.errors import GraphError, OperatorError, ShapeError
from cutesuper.ir.arguments import shown
from cutesuper.ir.block import (
    ACCUMULATE,
    CLUSTER_REDUCE,
    ENDING,
    GRID_REDUCE,
    LOAD,
    PAIR,
    PUT,
    PUTTING,
    STORE,
    THROUGH,
    Axis,
    AxisKind,
    BlockOp,
    BlockProgram,
    KernelStep,
    MuGraph,
    mapped_labels,
)
from cutesuper.ir.dims import Shape, Symbol, extent, show_shape
from cutesuper.ir.graph import KernelGraph
from cutesuper.ir.operators.base import TABLE, Operator, each, lookup
from cutesuper.ir.operators.index import rows_of
from cutesuper.ir.operators.monoid import monoid
from cutesuper.ir.precision import PRECISIONS, precision_of

ITERATED = (AxisKind.LOOP, AxisKind.PERSISTENT)
#: the kinds of axes that a symbolic label may leave open, from the outermost to the innermost
OPENED = (AxisKind.GRID, AxisKind.PERSISTENT, AxisKind.LOOP)
#: the kinds of axes that an operation may end
_ENDED_BY = {
    ACCUMULATE: ITERATED,
    CLUSTER_REDUCE: (AxisKind.CLUSTER,),
    GRID_REDUCE: (AxisKind.GRID,),
}
#: attributes of a masking operator: the labels along which it takes positions
_MASKED = ("rows", "columns")
#: the label of the rows along which limits do not fall, where they differ along it
_RISES = "rises"
#: most walks over one loop axis: mean, variance and product of LayerNorm + Linear take 3
MAX_PASSES = 3


def check_graph(call: str, graph: Any) -> None:
    """Refuse anything but a kernel graph. Raises GraphError."""
    if not isinstance(graph, KernelGraph):
        raise GraphError(
            f"{call}({type(graph).__name__}): give it a kernel graph, made with "
            "cutesuper.new_kernel_graph()"
        )


def check_is_mugraph(call: str, mugraph: Any) -> None:
    """Refuse anything but a muGraph. Raises GraphError."""
    if not isinstance(mugraph, MuGraph):
        raise GraphError(
            f"{call}({type(mugraph).__name__}): give it a muGraph: what the search finds "
            "(kernel.mugraph, cutesuper.mugraphs), or what cutesuper.load_mirage or "
            "cutesuper.loads read"
        )


def check_kernel_graph(graph: KernelGraph) -> None:
    """Refuse a graph that cannot be optimized.

    Raises:
        GraphError: not a kernel graph, no inputs, no outputs, or an input that no output depends
            on.
    """
    check_graph("kernel graph", graph)
    if not graph.inputs:
        raise GraphError("kernel graph: it has no inputs; add one with new_input(dims=, dtype=)")
    if not graph.outputs:
        raise GraphError("kernel graph: no output is marked; call mark_output(tensor)")
    needed = graph.needed(graph.outputs)
    unused = [graph.nodes[i].name for i in graph.inputs if i not in needed]
    if unused:
        raise GraphError(
            f"kernel graph: no output depends on input {', '.join(unused)}; remove it or use it"
        )


@dataclass(frozen=True)
class ValueState:
    """Dependences of a value of a block program, besides its own labels.

    Attributes:
        pending: axes over which it is a partial result (its label was reduced in the tile only).
        inside: loop and persistent axes inside which it lives.
        closed: loop and persistent axes that must have ended before it exists. An axis that must
            have ended twice is listed as ``("K.loop", 1)`` and ``("K.loop", 2)``, so that the union
            is the maximum. A grid axis is listed once its parts have been combined: such a value
            exists once, after all blocks have left their parts.
    """

    pending: frozenset[str]
    inside: frozenset[str]
    closed: frozenset[tuple[str, int]]


def pass_of(state: ValueState, axis_name: str) -> int:
    """Number of the walk over a loop in which a value inside the loop is computed; the first is 1.

    It is one more than the number of walks that must have ended before the value. For a value
    outside of the loop it is the earliest walk that can use it. A value of walk 1 (a load) that
    only walk 2 uses may as well run in walk 2.
    """
    return 1 + sum(name == axis_name for name, _ in state.closed)


def passes(program: BlockProgram, states: list[ValueState]) -> dict[str, int]:
    """Number of walks over each loop and persistent axis, by name.

    Args:
        program: a legal block program.
        states: the result of `check_block_program` for it.
    """
    return {
        a.name: max([pass_of(s, a.name) for s in states if a.name in s.inside], default=1)
        for a in program.axes
        if a.kind in ITERATED
    }


def check_block_program(program: BlockProgram) -> list[ValueState]:
    """Refuse an illegal block program; return the state of every value.

    Raises:
        GraphError: naming the operation and the error.
    """
    _check_axes(program)
    states: list[ValueState] = []
    for i, op in enumerate(program.ops):
        where = f"block program, operation {i} ({op.kind})"
        if any(not 0 <= j < i for j in op.inputs):
            raise GraphError(f"{where}: inputs {list(op.inputs)} must come before it")
        if any(program.ops[j].kind == STORE for j in op.inputs):
            raise GraphError(f"{where}: a stored tensor cannot be an operand; use the value itself")
        _check_dims(program, op, where)
        states.append(_state(program, op, states, where))
    if not program.stores():
        raise GraphError("block program: it stores nothing")
    return states


def _check_axes(program: BlockProgram) -> None:
    names = [a.name for a in program.axes]
    if len(set(names)) < len(names):
        raise GraphError(f"block program: an axis occurs twice in {', '.join(names)}")
    if set(program.tile) != set(program.dims):
        raise GraphError("block program: every label needs a tile extent, and only labels have one")
    for kind in (AxisKind.CLUSTER, AxisKind.LOOP, AxisKind.PERSISTENT):
        if len(program.of_kind(kind)) > 1:
            raise GraphError(f"block program: more than one {kind} axis")
    for a in program.axes:
        if a.dim not in program.dims:
            raise GraphError(f"block program: axis {a} splits the unknown label {a.dim}")
        symbolic = a.kind in OPENED and isinstance(program.dims[a.dim], Symbol)
        if (a.extent is None and not symbolic) or (a.extent is not None and a.extent < 1):
            raise GraphError(f"block program: axis {a} needs a positive extent")
    for dim, tile in program.tile.items():
        covered = program.covered(dim)
        if tile < 1 or (covered is not None and covered < extent(program.dims[dim])):
            raise GraphError(
                f"block program: axes and tile cover {covered} of the {program.dims[dim]} "
                f"elements of {dim}"
            )
        _check_open(program, dim)


def _check_open(program: BlockProgram, dim: str) -> None:
    """Check that exactly one axis of a symbolic label is open, so that it grows with the label."""
    opened = [a.name for a in program.axes_of(dim) if a.extent is None]
    if isinstance(program.dims[dim], Symbol) and not opened:
        raise GraphError(
            f"block program: {dim} is symbolic and needs an open axis: grid, persistent or loop"
        )
    if len(opened) > 1:
        raise GraphError(
            f"block program: {' and '.join(opened)} are both open; give one of them an extent"
        )


def _check_attributes(op: BlockOp, where: str) -> None:
    needed: dict[str, tuple[str, ...]] = {LOAD: ("tensor", "map"), STORE: ("tensor", "map")}
    needed |= dict.fromkeys(ENDING, ("axis", "op"))
    if op.kind not in needed:
        try:
            operator = lookup(op.kind)
            if operator.elementwise:
                operator.check_attributes(op.attributes)
                return
            if operator.masks:
                own = {k: v for k, v in op.attributes.items() if k not in (*_MASKED, _RISES)}
                operator.check_attributes(own)
        except OperatorError as e:
            raise GraphError(f"{where}: {e}") from None
        if not (operator.contracts or operator.reduces or operator.masks or operator.turns):
            raise GraphError(f"{where}: not an operation of a block program")
        needed[op.kind] = _MASKED if operator.masks else ("along" if operator.turns else "over",)
        if operator.integers:
            needed[op.kind] = (*_MASKED, *operator.attributes)
    if precision_of(op.attributes) not in PRECISIONS:
        raise GraphError(f"{where}: its precision must be {' or '.join(PRECISIONS)}")
    missing = set(needed[op.kind]) - set(op.attributes)
    if missing:
        raise GraphError(f"{where}: it needs the attribute {', '.join(sorted(missing))}")
    if not isinstance(op.attributes.get("map", ()), tuple):
        raise GraphError(f"{where}: its map must be a tuple of labels")
    if any(isinstance(e, tuple) and len(e) < 2 for e in op.attributes.get("map", ())):
        raise GraphError(f"{where}: its map has a tuple of fewer than two labels; name the label")
    if op.gathering is not None:
        _check_through(op, where)
    elif op.kind == STORE and {*THROUGH, *PUTTING} & set(op.attributes):
        _check_put(op, where)


def _check_put(op: BlockOp, where: str) -> None:
    """Check a store of rows: it has an index for each of its dimensions, and a base.
    The rows have one label."""
    index, base, dim = (op.attributes.get(k) for k in PUTTING)
    names, mapping = each(index), op.attributes["map"]
    dims: tuple[Any, ...] = each(dim)
    if "table" in op.attributes:
        raise GraphError(f"{where}: only a load goes through a table of pages")
    if not all(isinstance(name, str) for name in (*names, base)):
        raise GraphError(f"{where}: index={index!r} and base={base!r} must be names of tensors")
    rank = len(mapping) + len(dims) - 1
    if any(isinstance(d, bool) or not isinstance(d, int) or not 0 <= d < rank for d in dims):
        raise GraphError(f"{where}: dim={dim!r} must be one of its {rank} dimensions")
    if len(names) != len(dims) or not dims or list(dims) != sorted(set(dims)):
        raise GraphError(
            f"{where}: dim={dim!r} must be as many dimensions, in rising order, as {index!r}"
        )
    if isinstance(mapping[dims[0]], tuple):
        raise GraphError(f"{where}: the rows, dimension {dims[0]}, must have a label of their own")


def _check_through(op: BlockOp, where: str) -> None:
    """Check a load through a table or an index: there is one of them, which is a name.
    The first two dimensions of sequences in pages have one label each."""
    given, mapping = [k for k in THROUGH if k in op.attributes], op.attributes["map"]
    if len(given) > 1:
        raise GraphError(f"{where}: it goes through {' and '.join(given)}; one of them")
    name = op.attributes[given[0]]
    if not isinstance(name, str):
        raise GraphError(f"{where}: {given[0]}={name!r} must be the name of a tensor")
    if given[0] != "table":
        return
    if len(mapping) < 2 or any(isinstance(e, tuple) for e in mapping[:2]):
        raise GraphError(
            f"{where}: through the table {name} its map must begin with the label of the sequences "
            "and that of the positions, each alone"
        )


def _check_dims(program: BlockProgram, op: BlockOp, where: str) -> None:
    _check_attributes(op, where)
    args = [program.ops[j].dims for j in op.inputs]
    if op.kind == LOAD:
        _arity(op, 0, where)
        labels = [d for entry in op.attributes["map"] for d in mapped_labels(entry)]
        expected = set(labels)
        if len(expected) < len(labels):
            raise GraphError(f"{where}: {op.attributes['tensor']} has one label twice")
    elif op.kind in (STORE, *ENDING):
        if op.rescaled:
            _check_rescaled(program, op, where)
        else:
            _arity(op, 1, where)
        expected = set(args[0])
    else:
        operator = lookup(op.kind)
        _arity(op, operator.arity, where)
        expected = set().union(*args)
        if operator.integers:
            _check_integer_operand(program, op, where)
        if operator.masks and operator.integers:
            _check_counted(program, op, where)
        elif operator.masks:
            _check_positions(op, args[0], where)
        elif operator.turns:
            _check_whole(program, op, args[0], where)
        elif not operator.elementwise:
            over = op.attributes["over"]
            if any(over not in a for a in args):
                raise GraphError(f"{where}: an operand does not have the label {over}")
            expected -= {over}
    unknown = expected - set(program.dims)
    if unknown:
        raise GraphError(f"{where}: unknown label {', '.join(sorted(map(str, unknown)))}")
    if op.dims != tuple(d for d in program.dims if d in expected):
        raise GraphError(f"{where}: its labels are {list(op.dims)}, expected {sorted(expected)}")


def _check_rescaled(program: BlockProgram, op: BlockOp, where: str) -> None:
    """Check that operands are a value, a maximum of each part, and the maximum of those."""
    (value, part), whole = op.inputs[:2], program.ops[op.inputs[2]]
    if not monoid(op.attributes["op"]).linear:
        raise GraphError(f"{where}: only a sum is rescaled by maxima; a maximum takes 1 operand")
    same = whole.kind == op.kind and whole.attributes["axis"] == op.attributes["axis"]
    if not same or whole.inputs != (part,) or not monoid(whole.attributes["op"]).selects:
        raise GraphError(
            f"{where}: operand 2 (operation {op.inputs[2]}) is not the {op.kind} max of operand 1 "
            f"(operation {part}) over {op.attributes['axis']}"
        )
    alien = set(program.ops[part].dims) - set(program.ops[value].dims)
    if alien:
        raise GraphError(
            f"{where}: the maximum (operation {part}) has the label {', '.join(sorted(alien))}, "
            f"which what is summed (operation {value}) has not"
        )


def _check_whole(program: BlockProgram, op: BlockOp, labels: tuple[str, ...], where: str) -> None:
    """Check that a block has the whole of the label along which an operator works."""
    along = op.attributes["along"]
    if along not in labels:
        raise GraphError(f"{where}: its operand does not have the label {along}")
    if axes := program.axes_of(along):
        raise GraphError(
            f"{where}: it works along {along}, which {axes[0].name} divides; a block must have it "
            "whole"
        )


def _check_positions(op: BlockOp, labels: tuple[str, ...], where: str) -> None:
    given = op.attributes["rows"], op.attributes["columns"]
    absent = [d for d in given if d not in labels]
    if absent or given[0] == given[1]:
        raise GraphError(
            f"{where}: rows={given[0]!r} and columns={given[1]!r} must be two labels of its "
            f"operand, which has {', '.join(labels) or 'none'}"
        )


def _check_integer_operand(program: BlockProgram, op: BlockOp, where: str) -> None:
    operator = lookup(op.kind)
    for k in operator.integers:
        source = program.ops[op.inputs[k]]
        if source.kind != LOAD or source.gathering is not None:
            raise GraphError(
                f"{where}: operand {k} (operation {op.inputs[k]}) must be a plain load of the "
                f"{operator.counts}"
            )


def _check_counted(program: BlockProgram, op: BlockOp, where: str) -> None:
    """Check that the operands are a matrix and integers for its rows.
    Rows must be named where they count."""
    labels, lengths = (program.ops[j].dims for j in op.inputs)
    rows, columns = (op.attributes[k] for k in _MASKED)
    if columns not in labels or (rows is not None and rows not in labels) or rows == columns:
        raise GraphError(
            f"{where}: rows={rows!r} and columns={columns!r} must be two labels of its operand, "
            f"which has {', '.join(labels) or 'none'} (rows may be None)"
        )
    rises = op.attributes.get(_RISES)
    if rises is not None and rises not in lengths:
        raise GraphError(f"{where}: {_RISES}={rises!r} must be a label of the limits")
    if op.attributes.get("causal") and rows is None:
        raise GraphError(f"{where}: causal=True counts rows; name their label")
    alien = set(lengths) - (set(labels) - {rows, columns})
    if alien:
        raise GraphError(
            f"{where}: the {lookup(op.kind).counts} have the label {', '.join(sorted(alien))}; "
            "there is one for all rows and columns that are counted"
        )


def _arity(op: BlockOp, arity: int, where: str) -> None:
    if len(op.inputs) != arity:
        raise GraphError(f"{where}: takes {arity} operand(s), got {len(op.inputs)}")


def _state(program: BlockProgram, op: BlockOp, states: list[ValueState], where: str) -> ValueState:
    # the whole maximum of a rescaled sum is the end of the very same axis: it adds no dependence
    args = [states[j] for j in (op.inputs[:2] if op.rescaled else op.inputs)]
    pending = frozenset[str]().union(*(a.pending for a in args))
    inside = frozenset[str]().union(*(a.inside for a in args))
    closed = frozenset[tuple[str, int]]().union(*(a.closed for a in args))
    if op.kind == LOAD:
        inside = frozenset(a.name for a in program.axes if a.dim in op.dims and a.kind in ITERATED)
    elif op.kind == STORE:
        _check_store(program, op, pending, inside, where)
    elif op.kind in ENDING:
        axis = _reduced_axis(program, op, where)
        for k, a in enumerate(args):
            if axis.name not in a.pending:
                which = f"operand {k} (operation {op.inputs[k]})" if op.rescaled else "its operand"
                raise GraphError(f"{where}: {which} is no partial result over {axis.name}")
        if axis.dim in op.dims:  # the other tiles of the label would be added to this one
            raise GraphError(f"{where}: its operand still has the label {axis.dim}")
        if axis.kind == AxisKind.GRID:
            _check_grid_reduce(axis, pending, inside, where)
        pending -= {axis.name}
        if axis.kind != AxisKind.CLUSTER:
            inside -= {axis.name}
            closed |= {(axis.name, 1 + sum(name == axis.name for name, _ in closed))}
    elif "over" in op.attributes:
        pending |= {a.name for a in program.axes_of(op.attributes["over"])}
    state = ValueState(pending, inside, closed)
    for name in sorted(inside):
        _check_pass(program.axis(name), pass_of(state, name), where)
    _check_combined(program, op, state, where)
    return state


def _check_grid_reduce(
    axis: Axis, pending: frozenset[str], inside: frozenset[str], where: str
) -> None:
    """Check that the number of blocks is known, and that only grid axes are still pending.
    Each block leaves one result."""
    if axis.extent is None:
        raise GraphError(
            f"{where}: {axis.name} is open; the number of partial results must be known: give it "
            "an extent, and the label a persistent axis"
        )
    others = sorted(n for n in (pending | inside) - {axis.name} if not n.endswith(AxisKind.GRID))
    if others:
        raise GraphError(
            f"{where}: {', '.join(others)} must have ended before blocks leave what they have for "
            f"{axis.name}"
        )


def _check_combined(program: BlockProgram, op: BlockOp, state: ValueState, where: str) -> None:
    """Check that a value combined over the grid meets no value that differs between blocks.
    A partial result of several grid axes is combined over all of them, one after the other."""
    for name, _ in sorted(state.closed):
        axis = program.axis(name)
        if axis.kind != AxisKind.GRID:
            continue
        if axis.dim in op.dims or name in state.pending:
            raise GraphError(
                f"{where}: uses what was combined over {name} together with the part of a block; "
                "the former is there once, when all blocks have left their parts"
            )
        others = sorted(n for n in state.pending if n.endswith(AxisKind.GRID))
        if others and op.kind != GRID_REDUCE:
            raise GraphError(
                f"{where}: what was combined over {name} is still a partial result over "
                f"{', '.join(others)}; combine it over that next"
            )


def _check_pass(axis: Axis, number: int, where: str) -> None:
    if axis.kind == AxisKind.PERSISTENT and number > 1:
        raise GraphError(f"{where}: uses the result of {axis.name} inside that loop")
    if number > MAX_PASSES:
        raise GraphError(
            f"{where}: needs {axis.name} to be walked {number} times; a loop is walked at most "
            f"{MAX_PASSES} times"
        )


def _reduced_axis(program: BlockProgram, op: BlockOp, where: str) -> Axis:
    try:
        axis = program.axis(op.attributes["axis"])
    except KeyError:
        raise GraphError(f"{where}: there is no axis {op.attributes.get('axis')!r}") from None
    if axis.kind not in _ENDED_BY[op.kind]:
        raise GraphError(f"{where}: cannot reduce over the {axis.kind} axis {axis.name}")
    try:
        monoid(op.attributes.get("op"))
    except OperatorError as error:
        raise GraphError(f"{where}: {error}") from None
    return axis


def _check_store(
    program: BlockProgram, op: BlockOp, pending: frozenset[str], inside: frozenset[str], where: str
) -> None:
    mapped = {d for entry in op.attributes["map"] for d in mapped_labels(entry)}
    if mapped != set(op.dims) | pending:
        missing = sorted(pending - mapped)
        why = (
            f"it is a partial result over {', '.join(missing)}"
            if missing
            else (
                f"it has the labels {list(op.dims)} and is mapped to {list(op.attributes['map'])}"
            )
        )
        raise GraphError(f"{where}: {why}; reduce it, or give the tensor a dimension for it")
    left = {name for name in inside if program.axis(name).dim not in op.dims}
    if left:
        raise GraphError(f"{where}: it is stored in every iteration of {', '.join(sorted(left))}")


def check_mugraph(mu: MuGraph) -> None:
    """Refuse an illegal muGraph: programs, names, shapes and the order of kernels.

    Raises:
        GraphError: naming the kernel and the tensor.
    """
    for name in (*mu.inputs, *mu.outputs):
        if name not in mu.tensors:
            raise GraphError(f"muGraph: tensor {name} is not described")
    parts = {name: mu.parts(name) for name in mu.outputs}
    _check_parts(mu, parts)
    known = {*mu.inputs, *(p for name in mu.inputs for p in mu.parts(name))}
    pairs = set[str]()
    for step in mu.steps:
        check_block_program(step.program)
        for op in (*step.program.loads(), *step.program.stores()):
            _check_map(mu, step.program, op, f"muGraph, kernel {step.name}")
        _check_integers(mu, step, pairs)
        found = step.program.partials()
        pairs |= {name for name, t in found.items() if t.dtype == PAIR}
        unknown = [n for n in step.reads if n not in known]
        if unknown:
            raise GraphError(f"muGraph, kernel {step.name}: reads {unknown[0]} before it is made")
        for name in step.writes:
            if name in known:
                raise GraphError(f"muGraph, kernel {step.name}: {name} is written twice")
            if parts.get(name):
                raise GraphError(f"muGraph, kernel {step.name}: {name} is written in its parts")
            known.add(name)
    missing = [n for name, own in parts.items() for n in own or (name,) if n not in known]
    if missing:
        raise GraphError(f"muGraph: no kernel writes the output {missing[0]}")


def _check_parts(mu: MuGraph, of_outputs: dict[str, tuple[str, ...]]) -> None:
    """Check that parts lie inside of inputs and outputs.
    Those of an output are all of it, each element once."""
    found = ((t, t.part.of, t.part.starts) for t in mu.tensors.values() if t.part is not None)
    for t, of, starts in found:
        if of not in (*mu.inputs, *mu.outputs) or t.name in (*mu.inputs, *mu.outputs):
            raise GraphError(f"muGraph: {t.name} is a part of {of}; parts are of inputs or outputs")
        whole = mu.tensors[of]
        fits = len(starts) == len(t.shape) == len(whole.shape) and all(
            (start == 0 and n == d)
            or (isinstance(n, int) and isinstance(d, int) and 0 <= start <= d - n)
            for start, n, d in zip(starts, t.shape, whole.shape, strict=True)
        )
        if not fits or (t.dtype, t.constant) != (whole.dtype, whole.constant):
            raise GraphError(
                f"muGraph: {t.name}, {t.dtype}{show_shape(t.shape)} from {list(starts)} on, does "
                f"not lie in {of}, {whole.dtype}{show_shape(whole.shape)}"
            )
    for name, own in of_outputs.items():
        boxes = [(p.starts, s.shape) for s in map(mu.tensors.get, own) if s and (p := s.part)]
        covered = sum(prod(map(extent, shape)) for _, shape in boxes)
        if own and (covered != prod(map(extent, mu.tensors[name].shape)) or _overlap(boxes)):
            raise GraphError(f"muGraph: the parts of {name} are not all of it, each element once")


def _overlap(boxes: list[tuple[tuple[int, ...], Shape]]) -> bool:
    """True if two boxes, each its first element and its extents, have an element in common."""
    return any(
        all(
            a < b + extent(m) and b < a + extent(n) for a, n, b, m in zip(*one, *other, strict=True)
        )
        for one, other in combinations(boxes, 2)
    )


def _check_map(mu: MuGraph, program: BlockProgram, op: BlockOp, where: str) -> None:
    name: str = op.attributes["tensor"]
    if name not in mu.tensors:
        raise GraphError(f"{where}: tensor {name} is not described")
    shape = mu.tensors[name].shape
    if (operator := op.gathering) is not None:
        shape = _gathered(mu, op, operator, where)
    elif op.puts:
        shape = _put(mu, op, where)
    mapping: tuple[Any, ...] = op.attributes["map"]
    if len(shape) != len(mapping):
        raise GraphError(f"{where}: {name} has {len(shape)} dimensions, its map {len(mapping)}")
    for d, entry in zip(shape, mapping, strict=True):
        want = _mapped_extent(program, mapped_labels(entry), where)
        if d != want:
            raise GraphError(f"{where}: extent {d} of {name} is mapped to {entry} of extent {want}")


def _gathered(mu: MuGraph, op: BlockOp, operator: Operator, where: str) -> Shape:
    """Shape of the tensor that a load gathers."""
    names = op.tensors
    for name in names:
        if name not in mu.tensors:
            raise GraphError(f"{where}: tensor {name} is not described")
        if name not in mu.inputs:
            raise GraphError(f"{where}: {name} is no input; pages and tables, rows and indices are")
    try:
        return operator.shape([mu.tensors[n].shape for n in names], {})
    except ShapeError as e:
        raise GraphError(f"{where}: load of {names[0]} through {names[1]}: {e}") from None


def _put(mu: MuGraph, op: BlockOp, where: str) -> Shape:
    """Shape of the rows that a store puts into an output."""
    name, *indices = op.tensors
    base, dims = op.attributes["base"], each(op.attributes["dim"])
    for given in (*indices, base):
        if given not in mu.inputs:
            raise GraphError(f"{where}: {given} is no input; an index and what rows go into are")
    if name not in mu.outputs:
        raise GraphError(f"{where}: {name} is no output; what rows are put into is one")
    into, made = mu.tensors[base], mu.tensors[name]
    if (into.shape, into.dtype) != (made.shape, made.dtype):
        raise GraphError(
            f"{where}: {name} is {made.dtype}{show_shape(made.shape)}, and {base}, which it is "
            f"but for the rows, is {into.dtype}{show_shape(into.shape)}"
        )
    if len(into.shape) <= dims[-1]:
        raise GraphError(f"{where}: {base} has {len(into.shape)} dimensions, and dim={dims}")
    places = mu.tensors[indices[0]].shape
    for index, d in zip(indices, dims, strict=True):
        shape = mu.tensors[index].shape
        if len(shape) != 1 or isinstance(into.shape[d], Symbol):
            raise GraphError(
                f"{where}: {index}{show_shape(shape)} must have one dimension, and the extent "
                f"{into.shape[d]} of {base} must be a number"
            )
        if shape != places:
            raise GraphError(
                f"{where}: {index}{show_shape(shape)} and {indices[0]}{show_shape(places)} must "
                "have one shape"
            )
    return rows_of(into.shape, dims, places[0])


def _check_integers(mu: MuGraph, step: KernelStep, pairs: Collection[str]) -> None:
    """Check that integers are operands of operators or indices of loads that take them.
    Their types are those that these take. ``pairs``: names of partial results that are pairs."""
    where, ops = f"muGraph, kernel {step.name}", step.program.ops
    _check_places(ops, where)
    for i, op in enumerate(ops):
        if op.kind not in (LOAD, STORE):
            continue
        name, operator = op.attributes["tensor"], TABLE[PUT] if op.puts else op.gathering
        uses = [(o, k) for o in ops for k, j in enumerate(o.inputs) if j == i]
        takers = [TABLE[o.kind] for o, k in uses if o.kind in TABLE and k in TABLE[o.kind].integers]
        dtype = mu.tensors[name].dtype
        integers = dtype.integer
        for taker in takers:
            if dtype not in taker.integer_types:
                allowed = " or ".join(d.name for d in taker.integer_types)
                raise GraphError(f"{where}: {taker.name} takes {allowed}, and {name} is {dtype}")
        stored = ops[op.inputs[0]] if op.kind == STORE else op
        places = op.kind == STORE and (stored.places or stored.facets.only_place)
        if places and not integers:
            raise GraphError(
                f"{where}: {name} is {dtype}, and takes places (argmax), which are int64"
            )
        if op.kind == LOAD and op.places != (name in pairs):
            raise GraphError(
                f"{where}: {name} is {'' if op.places else 'not '}loaded as pairs of numbers and "
                "places; partial results of argmax are, and nothing else"
            )
        places = places or op.places
        if integers and not places and (op.kind == STORE or len(takers) < len(uses)):
            raise GraphError(f"{where}: {name} is {dtype}, and only lengths, tables and labels are")
        if operator is None:
            continue
        allowed = " or ".join(d.name for d in operator.integer_types)
        for through in op.tensors[1:]:
            if integers or mu.tensors[through].dtype not in operator.integer_types:
                of = "cache" if operator.through == "table" else "table"
                raise GraphError(
                    f"{where}: the {operator.through or 'index'} {through} must be {allowed}, the "
                    f"{of} {name} must not"
                )


def _check_places(ops: Sequence[BlockOp], where: str) -> None:
    """Check that places of elements are combined and stored, and nothing else is done with them."""
    for i, op in enumerate(ops):
        given = [ops[j] for j in op.inputs if ops[j].places]
        combines = op.places and (op.kind in ENDING or any(o.kind == LOAD for o in given))
        if op.kind not in (LOAD, STORE) and bool(given) != combines:
            raise GraphError(
                f"{where}: {op.kind} (operation {i}) of {shown(op.inputs)}: places of elements are "
                "combined by argmax and stored, and nothing else is done with them"
            )


def _mapped_extent(program: BlockProgram, labels: tuple[str, ...], where: str) -> Any:
    """Extent of a dimension with these labels or axes; if several, they must cover it exactly."""
    extents: dict[str, Any] = {a.name: a.extent for a in program.axes} | program.dims
    if len(labels) == 1:
        return extents.get(labels[0])
    ragged = {d for d in program.dims if program.ragged(d)}
    inexact = [d for d in labels if extents[d] is None or d in ragged]
    if inexact:
        raise GraphError(
            f"{where}: {', '.join(labels)} share a dimension, so axes and tile of {inexact[0]} "
            "must cover it exactly"
        )
    return prod(extents[d] for d in labels)
