"""Mirage's JSON, validated: all used fields have their type and range, and all shapes agree.

A file holds muGraphs; a muGraph is a list of kernel-level operators; a ``kn_customized_op`` has a
block graph, which is again a list of operators. Tensors are described wherever they occur and
identified by their ``guid``. Ignored: strides, layouts, offsets, ``block_dim`` and ``after_accum``,
which do not change the result of a muGraph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cutesuper.contrib.mirage.fields import GRID, Fields, integer, items
from cutesuper.contrib.mirage.operators import BLOCK, KERNEL, SCALARS, operator_of, result_shape
from cutesuper.errors import FormatError
from cutesuper.ir.dims import show_shape
from cutesuper.ir.dtypes import DType, bfloat16, float16, float32

#: codes of element types in published files: 920 and 921 in the first releases, then 940 and 941,
#: whose meaning is exchanged in releases since March 2026
DTYPES: Mapping[int, DType] = {
    920: bfloat16,
    921: float16,
    940: bfloat16,
    941: float16,
    950: float32,
}
MAX_RANK = 4


@dataclass(frozen=True)
class Tensor:
    """A tensor in device memory, or a tile in shared memory."""

    guid: int
    shape: tuple[int, ...]
    dtype: DType


@dataclass(frozen=True)
class Operator:
    """One operator of either level.

    Attributes:
        where: muGraph, operator and block operator, for messages.
        name: see `cutesuper.contrib.mirage.operators`.
        inputs: operands.
        outputs: results.
        dim: the dimension it reduces or concatenates.
        scalars: its further numbers (`cutesuper.contrib.mirage.operators.SCALARS`).
        block: the block graph of a customized operator.
        device: for block inputs and outputs, the tensor in device memory.
        splits: for the same, the dimension of that tensor that x, y and z divide, or None.
        loop_dim: for block inputs, the dimension that the loop divides, or None.
    """

    where: str
    name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    dim: int = 0
    scalars: dict[str, float] = field(default_factory=dict)
    block: Block | None = None
    device: Tensor | None = None
    splits: tuple[int | None, ...] = ()
    loop_dim: int | None = None


@dataclass(frozen=True)
class Block:
    """A block graph.

    Attributes:
        grid: blocks along x, y and z.
        loop: iterations.
        dimx: width to which ``reduction_to_dimx`` and ``redtox`` reduce.
        operators: in an order in which they can run.
    """

    grid: tuple[int, ...]
    loop: int
    dimx: int
    operators: tuple[Operator, ...]


@dataclass(frozen=True)
class Document:
    """A muGraph as stored in the file.

    Attributes:
        where: for messages.
        operators: of the kernel level, inputs and outputs left out.
        inputs: in the order of the file.
        outputs: in the order of the file; if none is marked, the tensors that no operator reads.
    """

    where: str
    operators: tuple[Operator, ...]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


def read_document(data: Any, where: str, dtype: DType | None) -> Document:
    """Read one muGraph: a list of operators.

    Args:
        data: the result of the JSON parser.
        where: beginning of messages.
        dtype: of all tensors; None reads it from the file.

    Raises:
        FormatError: names operator, field and problem.
    """
    tensors = _Tensors(dtype)
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []
    operators: list[Operator] = []
    for i, entry in enumerate(items(data, where)):
        op = _read_kernel_operator(Fields(entry, f"{where}, operator {i}"), tensors)
        if op.name == "input":
            inputs += op.outputs
        elif op.name == "output":
            outputs += op.inputs
        else:
            operators.append(op)
    if not outputs:
        read = {t.guid for op in operators for t in op.inputs}
        outputs = [t for op in operators for t in op.outputs if t.guid not in read]
    if not outputs:
        raise FormatError(f"{where}: it computes nothing; it needs an operator and an output")
    if len({t.guid for t in outputs}) < len(outputs):
        raise FormatError(f"{where}: one tensor is an output twice; mark it once")
    if any(t in inputs for t in outputs):
        raise FormatError(f"{where}: an output is an input as it is; compute something")
    return Document(where, tuple(operators), tuple(inputs), tuple(outputs))


class _Tensors:
    """The tensors of one level that exist so far."""

    def __init__(self, dtype: DType | None) -> None:
        self.dtype = dtype
        self.known: dict[int, Tensor] = {}

    def read(self, data: Any, where: str) -> Tensor:
        """The description of a tensor."""
        f = Fields(data, where)
        rank = f.integer("num_dims", 1, MAX_RANK)
        extents = f.items("dim")
        if len(extents) < rank:
            raise FormatError(f"{where}: dim has {len(extents)} entries, num_dims is {rank}")
        shape = tuple(integer(n, f"{where}: dim {i}", 1) for i, n in enumerate(extents[:rank]))
        return Tensor(f.integer("guid", 0, 2**64), shape, self._dtype(f))

    def _dtype(self, f: Fields) -> DType:
        code = f.integer("data_type", 0)
        if self.dtype is not None:
            return self.dtype
        if code not in DTYPES:
            known = ", ".join(f"{k} ({v})" for k, v in DTYPES.items())
            raise FormatError(
                f"{f.where}: data_type {code} is none of {known}; if you know what it means, give "
                "load_mirage its dtype"
            )
        return DTYPES[code]

    def use(self, data: Any, where: str) -> Tensor:
        """A tensor that must exist, with the same description as where it was made."""
        t = self.read(data, where)
        made = self.known.get(t.guid)
        if made is None:
            raise FormatError(f"{where}: no operator before it makes the tensor with guid {t.guid}")
        if made != t:
            raise FormatError(
                f"{where}: it is {t.dtype}{show_shape(t.shape)} here and was made as "
                f"{made.dtype}{show_shape(made.shape)}"
            )
        return t

    def make(self, data: Any, where: str) -> Tensor:
        """A tensor that must be new."""
        t = self.read(data, where)
        if t.guid in self.known:
            raise FormatError(f"{where}: another tensor has the guid {t.guid}")
        self.known[t.guid] = t
        return t


def _read_operator(f: Fields, level: str, tensors: _Tensors) -> tuple[Fields, Operator]:
    """The fields that all operators have, as an `Operator`.
    Returns the fields again as well, with the operator's name in messages."""
    text = f.text("op_type")
    f = Fields(f.data, f"{f.where} ({text[:40]})")
    name, dim = operator_of(text, level, f.where)
    used, made = f.items("input_tensors"), f.items("output_tensors")
    inputs = tuple(tensors.use(t, f"{f.where}, operand {i}") for i, t in enumerate(used))
    outputs = tuple(tensors.make(t, f"{f.where}, result {i}") for i, t in enumerate(made))
    return f, Operator(f.where, name, inputs, outputs, dim)


def _arity(op: Operator, inputs: int, outputs: int) -> None:
    if (len(op.inputs), len(op.outputs)) != (inputs, outputs):
        raise FormatError(
            f"{op.where}: it has {len(op.inputs)} operand(s) and {len(op.outputs)} result(s), "
            f"expected {inputs} and {outputs}"
        )


def _computed(f: Fields, op: Operator, arity: int, dimx: int) -> Operator:
    """An operator that computes, with its numbers, after a check of its results' shapes."""
    _arity(op, arity, 2 if op.name == "reduction_max" else 1)
    shape = result_shape(op.name, op.dim, [t.shape for t in op.inputs], dimx, op.where)
    for t in op.outputs:
        if t.shape != shape:
            raise FormatError(
                f"{op.where}: its result is {show_shape(t.shape)}, its operands give "
                f"{show_shape(shape)}"
            )
    needed = SCALARS.get(op.name, ())
    absent = [s for s in needed if not f.has(s)]
    if absent:
        raise FormatError(
            f"{op.where}: Mirage does not write {' and '.join(absent)} into its files; add the "
            "field(s) to this operator"
        )
    return replace(op, scalars={s: f.number(s) for s in needed})


# -------------------------------------------------------------------------------- the kernel level


def _read_kernel_operator(f: Fields, tensors: _Tensors) -> Operator:
    f, op = _read_operator(f, "kn", tensors)
    if op.name == "input":
        _arity(op, 0, 1)
    elif op.name == "output":
        _arity(op, 1, 0)
    elif op.name == "customized":
        return replace(op, block=_read_block(f, op, tensors.dtype))
    else:
        return _computed(f, op, KERNEL[op.name], dimx=1)
    return op


# --------------------------------------------------------------------------------- the block level


def _read_block(f: Fields, op: Operator, dtype: DType | None) -> Block:
    f = Fields(f.get("bgraph"), f"{op.where}: bgraph")
    grid = f.triple("grid_dim", 1)
    loop, dimx = f.integer("forloop_range", 1), f.integer("reduction_dimx", 1)
    tiles = _Tensors(dtype)
    block = Block(grid, loop, dimx, ())
    operators = tuple(
        _read_block_operator(Fields(entry, f"{op.where}, block operator {i}"), block, tiles)
        for i, entry in enumerate(f.items("operators"))
    )
    for what, name, outside in (("reads", "input", op.inputs), ("writes", "output", op.outputs)):
        inside = [o.device for o in operators if o.name == name]
        if inside != list(outside):
            raise FormatError(
                f"{f.where}: it {what} other tensors, or in another order, than the operator says"
            )
    return replace(block, operators=operators)


def _read_block_operator(f: Fields, block: Block, tiles: _Tensors) -> Operator:
    f, op = _read_operator(f, "tb", tiles)
    if op.name not in ("input", "output"):
        return _computed(f, op, BLOCK[op.name], block.dimx)
    device = tiles.read(f.get("dtensor"), f"{op.where}, dtensor")
    if op.name == "input":
        _arity(op, 0, 1)
        (tile,) = op.outputs
        loop_dim = f.integer("forloop_dim", -1, len(device.shape) - 1)
        splits = _splits(f, "input_map", block, device)
    else:
        _arity(op, 1, 0)
        (tile,), loop_dim = op.inputs, -1
        splits = _splits(f, "output_map", block, device)
    parts = [1] * len(device.shape)
    for dim, n in (*zip(splits, block.grid, strict=True), (loop_dim, block.loop)):
        if dim is not None and dim >= 0:
            parts[dim] *= n
    expected = tuple(n // k for n, k in zip(device.shape, parts, strict=True))
    whole = all(n % k == 0 for n, k in zip(device.shape, parts, strict=True))
    if not whole or tile.shape != expected:
        raise FormatError(
            f"{op.where}: grid and loop divide {show_shape(device.shape)} into {parts} parts, the "
            f"tile is {show_shape(tile.shape)}"
        )
    loop = loop_dim if loop_dim >= 0 and block.loop > 1 else None
    return replace(op, device=device, splits=splits, loop_dim=loop)


def _splits(f: Fields, name: str, block: Block, device: Tensor) -> tuple[int | None, ...]:
    """The dimension that each grid axis divides; an axis of one block divides none."""
    rank = len(device.shape)
    given = f.triple(name, -1, MAX_RANK - 1)
    splits = tuple(d if n > 1 and d >= 0 else None for d, n in zip(given, block.grid, strict=True))
    used = [d for d in splits if d is not None]
    for axis, dim in zip(GRID, splits, strict=True):
        if dim is not None and dim >= rank:
            raise FormatError(
                f"{f.where}: {name} maps {axis} to dimension {dim} of {show_shape(device.shape)}"
            )
    if len(set(used)) < len(used):
        raise FormatError(
            f"{f.where}: {name} divides one dimension over two grid axes, which Mirage itself "
            "computes as overlapping tiles; use one axis of as many blocks"
        )
    return splits
