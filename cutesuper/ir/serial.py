"""Kernel graphs and muGraphs as JSON.
Input is validated: shapes are inferred again, and `ir.check` runs on the result."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from cutesuper.errors import CutesuperError, FormatError, GraphError
from cutesuper.ir.block import (
    Axis,
    AxisKind,
    BlockOp,
    BlockProgram,
    KernelStep,
    MuGraph,
    Part,
    TensorSpec,
)
from cutesuper.ir.check import check_kernel_graph, check_mugraph
from cutesuper.ir.dims import Dim, Symbol
from cutesuper.ir.dtypes import as_dtype
from cutesuper.ir.graph import KernelGraph, symbol
from cutesuper.ir.operators.base import INPUT

VERSION = 1
T = TypeVar("T")


def dumps(graph: KernelGraph | MuGraph) -> str:
    """A graph as JSON text; equal graphs give equal text.
    Raises GraphError for anything else, and for a kernel graph that `loads` would refuse."""
    if isinstance(graph, KernelGraph):
        check_kernel_graph(graph)
    return json.dumps(to_dict(graph), indent=1, sort_keys=True)


def loads(text: str) -> KernelGraph | MuGraph:
    """Read the output of `dumps`.

    Raises:
        FormatError: for anything that is not a legal graph, with the reason.
    """
    if not isinstance(text, str | bytes | bytearray):
        raise FormatError(f"loads({type(text).__name__}): give it the text that dumps wrote")
    try:
        return from_dict(json.loads(text))
    except CutesuperError:
        raise
    except (ValueError, RecursionError) as e:
        raise FormatError(f"graph JSON: not JSON at all: {e}") from None


def to_dict(graph: KernelGraph | MuGraph) -> dict[str, Any]:
    """A graph as plain lists and dictionaries. Raises GraphError for anything else."""
    if isinstance(graph, KernelGraph):
        return {"format": "kernel_graph", "version": VERSION, **_kernel_graph_dict(graph)}
    if not isinstance(graph, MuGraph):
        raise GraphError(
            f"dumps({type(graph).__name__}): give it a kernel graph, kernel.graph or kernel.mugraph"
        )
    return {"format": "mugraph", "version": VERSION, **_mugraph_dict(graph)}


def from_dict(data: Any) -> KernelGraph | MuGraph:
    """Read the output of `to_dict`. Raises FormatError."""
    if not isinstance(data, dict) or data.get("format") not in ("kernel_graph", "mugraph"):
        raise FormatError("graph JSON: 'format' must be 'kernel_graph' or 'mugraph'")
    if data.get("version") != VERSION or type(data["version"]) is not int:
        raise FormatError(
            f"graph JSON: version {data.get('version')!r} is not {VERSION}; write it again with "
            "this release"
        )
    try:
        if data["format"] == "kernel_graph":
            return _read_kernel_graph(data)
        return _read_mugraph(data)
    except FormatError:
        raise
    except CutesuperError as e:
        raise FormatError(f"graph JSON: not a legal graph: {e}") from e
    except (KeyError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as e:
        raise FormatError(f"graph JSON: malformed ({type(e).__name__}: {e})") from e


# ------------------------------------------------------------------------------- kernel graphs


def _kernel_graph_dict(g: KernelGraph) -> dict[str, Any]:
    nodes: list[dict[str, Any]] = []
    for n in g.nodes:
        entry: dict[str, Any] = {"operator": n.operator}
        if n.operator == INPUT:
            entry |= {"name": n.name, "dims": [_dim(d) for d in n.shape], "dtype": n.dtype.name}
            entry |= {"constant": n.constant}
        else:
            entry |= {"inputs": list(n.inputs), "attributes": _attributes(n.attributes)}
            args = [g.tensor(j) for j in n.inputs]
            if n.dtype != g.result_dtype(n.operator, args, n.attributes):
                entry |= {"dtype": n.dtype.name}  # an output stored as another type
        nodes.append(entry)
    return {"nodes": nodes, "outputs": list(g.outputs)}


def _read_kernel_graph(data: dict[str, Any]) -> KernelGraph:
    g = KernelGraph()
    for entry in data["nodes"]:
        if entry["operator"] == INPUT:
            dims = [_read_dim(d, least=0) for d in entry["dims"]]
            constant = _read(bool, entry["constant"])
            g.new_input(dims, entry["dtype"], _read(str, entry["name"]), constant)
        else:
            args = [g.tensor(_index(i, len(g.nodes))) for i in _read(list, entry["inputs"])]
            attributes = {str(k): _tupled(v) for k, v in entry["attributes"].items()}
            g.apply(entry["operator"], *args, **attributes)
    for i in data["outputs"]:
        stored = data["nodes"][_index(i, len(g.nodes))].get("dtype")
        g.mark_output(g.tensor(i), stored)
    check_kernel_graph(g)
    return g


# ------------------------------------------------------------------------------------ muGraphs


def _mugraph_dict(mu: MuGraph) -> dict[str, Any]:
    return {
        "tensors": [
            {
                "name": t.name,
                "dims": [_dim(d) for d in t.shape],
                "dtype": t.dtype.name,
                "constant": t.constant,
            }
            | ({"part": [t.part.of, list(t.part.starts)]} if t.part else {})
            for t in mu.tensors.values()
        ],
        "inputs": list(mu.inputs),
        "outputs": list(mu.outputs),
        "steps": [{"name": s.name, **program_dict(s.program)} for s in mu.steps],
    }


def program_dict(program: BlockProgram) -> dict[str, Any]:
    """A block program as plain lists and dictionaries."""
    return {
        "dims": [[k, _dim(v)] for k, v in program.dims.items()],
        "axes": [[a.dim, a.kind.value, a.extent] for a in program.axes],
        "tile": [[k, v] for k, v in program.tile.items()],
        "ops": [
            [op.kind, list(op.inputs), list(op.dims), _attributes(op.attributes)]
            for op in program.ops
        ],
    }


def read_program(data: dict[str, Any]) -> BlockProgram:
    """Read the output of `program_dict`; the caller checks legality."""
    axes = tuple(Axis(_read(str, d), AxisKind(k), _extent(e)) for d, k, e in data["axes"])
    ops = tuple(
        BlockOp(
            _read(str, kind),
            tuple(_read(int, i) for i in inputs),
            tuple(_read(str, d) for d in dims),
            {k: _tupled(v) for k, v in attrs.items()},
        )
        for kind, inputs, dims, attrs in data["ops"]
    )
    dims = _unique([(_read(str, k), _read_dim(v)) for k, v in data["dims"]])
    tile = _unique([(_read(str, k), _read(int, v)) for k, v in data["tile"]])
    return BlockProgram(dims, axes, tile, ops)


def _read_mugraph(data: dict[str, Any]) -> MuGraph:
    specs = [
        TensorSpec(
            _read(str, t["name"]),
            tuple(_read_dim(d) for d in t["dims"]),
            as_dtype(t["dtype"]),
            _read(bool, t["constant"]),
            _read_part(t["part"]) if "part" in t else None,
        )
        for t in data["tensors"]
    ]
    steps = tuple(KernelStep(_read(str, s["name"]), read_program(s)) for s in data["steps"])
    inputs = tuple(_read(str, n) for n in _read(list, data["inputs"]))
    outputs = tuple(_read(str, n) for n in _read(list, data["outputs"]))
    mu = MuGraph(_unique([(t.name, t) for t in specs]), inputs, outputs, steps)
    check_mugraph(mu)
    return mu


# --------------------------------------------------------------------------------------- parts


def _dim(d: Dim) -> Any:
    return {"symbol": d.name, "hint": d.hint} if isinstance(d, Symbol) else d


def _read_dim(d: Any, least: int = 1) -> Dim:
    if isinstance(d, dict):
        return symbol(d["symbol"], d["hint"])
    if isinstance(d, bool) or not isinstance(d, int) or d < least:
        raise FormatError(f"graph JSON: extent {d!r} is not an int from {least} on")
    return d


def _read_part(data: Any) -> Part:
    of, starts = _read(list, data)
    return Part(_read(str, of), tuple(_read(int, n) for n in _read(list, starts)))


def _read(kind: type[T], value: Any) -> T:
    """Return ``value`` if it has that JSON type (a bool is not an int), never converted."""
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise FormatError(f"graph JSON: {value!r} is not of type {kind.__name__}")
    return value


def _unique(pairs: list[tuple[str, T]]) -> dict[str, T]:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise FormatError(f"graph JSON: a name occurs twice in {', '.join(k for k, _ in pairs)}")
    return result


def _extent(e: Any) -> int | None:
    return None if e is None else _read(int, e)


def _index(i: Any, count: int) -> int:
    if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < count:
        raise FormatError(f"graph JSON: node {i!r} does not come before its use")
    return i


def _attributes(attributes: dict[str, Any]) -> dict[str, Any]:
    return {k: list(v) if isinstance(v, tuple) else v for k, v in attributes.items()}


def _tupled(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    return tuple(tuple(v) if isinstance(v, list) else v for v in value)  # labels that share one
