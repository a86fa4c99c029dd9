"""A block graph as steps. A concatenation disappears: ``[A B] @ [C; D] = A @ C + B @ D``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cutesuper.contrib.mirage.document import Block, Operator, Tensor
from cutesuper.contrib.mirage.operators import UNARY
from cutesuper.contrib.mirage.steps import Kernel, Steps
from cutesuper.errors import FormatError

#: operators that apply to the parts of a concatenation one by one
_BY_PARTS = (*UNARY, "clamp", "mul_scalar", "forloop_accum_nored")


@dataclass(frozen=True)
class _Tile:
    """A tile: one step, or several that are joined along a dimension."""

    steps: tuple[int, ...]
    dim: int | None = None


def block_kernel(op: Operator, block: Block) -> Kernel:
    """The steps of a customized operator.

    Raises:
        FormatError: an operator that no block program expresses.
    """
    return _Translation(op, block).run()


class _Translation:
    def __init__(self, op: Operator, block: Block) -> None:
        self.op, self.block = op, block
        self.steps = Steps()
        self.tiles: dict[int, _Tile] = {}

    def run(self) -> Kernel:
        for op in self.block.operators:
            tile = self._tile(op)
            if op.outputs:
                self.tiles[op.outputs[0].guid] = tile
        steps = tuple(self.steps.list)
        return Kernel(self.op.where, self.block.grid, self.block.loop, steps)

    def _tile(self, op: Operator) -> _Tile:
        if op.device is not None:
            return self._access(op, op.device)
        if op.name == "concat":
            return _Tile(tuple(self._only(t, op) for t in op.inputs), op.dim)
        if op.name == "concat_then_matmul":
            a, b, c, d = (self._only(t, op) for t in op.inputs)
            return self._products(op, [(a, c), (b, d)])
        if op.name == "matmul":
            return self._matmul(op)
        if op.name == "reduction_max":
            self._check_maximum(op)
        if op.name in _BY_PARTS:
            tile = self.tiles[op.inputs[0].guid]
            return _Tile(tuple(self.steps.compute(op, x) for x in tile.steps), tile.dim)
        args = [self._only(t, op) for t in op.inputs]
        return _Tile((self.steps.compute(op, *args, dimx=self.block.dimx),))

    def _access(self, op: Operator, device: Tensor) -> _Tile:
        kind = "load" if op.name == "input" else "store"
        args = [self._only(t, op) for t in op.inputs]
        shape = (*op.inputs, *op.outputs)[0].shape
        step = self.steps.tensor(
            op, kind, device, *args, shape=shape, splits=op.splits, loop=op.loop_dim
        )
        return _Tile((step,))

    def _check_maximum(self, op: Operator) -> None:
        difference = op.outputs[1].guid
        used = any(t.guid == difference for o in self.block.operators for t in o.inputs)
        if used or self.block.loop > 1:
            raise FormatError(
                f"{op.where}: it keeps a maximum over the iterations so far, which no operation of "
                "a block program does; only a loop of 1 iteration can be read"
            )

    def _only(self, t: Tensor, op: Operator) -> int:
        tile = self.tiles[t.guid]
        if tile.dim is not None:
            raise FormatError(
                f"{op.where}: a concatenation can only be multiplied by another one (a sum of "
                "products then); no block program holds it as one tile"
            )
        return tile.steps[0]

    def _matmul(self, op: Operator) -> _Tile:
        a, b = (self.tiles[t.guid] for t in op.inputs)
        if a.dim is None and b.dim is None:
            return self._products(op, [(a.steps[0], b.steps[0])])
        last = len(op.outputs[0].shape) - 1
        steps = self.steps.list
        inner = [steps[i].shape[-1] for i in a.steps], [steps[i].shape[-2] for i in b.steps]
        if (a.dim, b.dim) != (last, last - 1) or inner[0] != inner[1]:
            raise FormatError(
                f"{op.where}: both operands must be concatenations along the contracted dimension, "
                "of parts with the same extents"
            )
        return self._products(op, list(zip(a.steps, b.steps, strict=True)))

    def _products(self, op: Operator, pairs: Sequence[tuple[int, int]]) -> _Tile:
        shape = op.outputs[0].shape
        total, *others = (self.steps.add(op, "matmul", *pair, shape=shape) for pair in pairs)
        for x in others:
            total = self.steps.add(op, "add", total, x, shape=shape)
        return _Tile((total,))
