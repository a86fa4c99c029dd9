"""A Mirage kernel as a list of small steps, to which both levels and all accumulators reduce.

before: ``tb_forloop_accum_red_ld_rms_op(X)``; after: ``square``, ``reduce`` (mean over the last
dimension), ``close`` (mean over the loop), ``sqrt``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import gcd
from typing import Any

from cutesuper.contrib.mirage.document import Operator, Tensor
from cutesuper.contrib.mirage.operators import BINARY, UNARY, Extents

#: tile of a matrix product that Mirage leaves to a library: at most this many along each dimension
PRODUCT_TILE = 64


@dataclass(frozen=True)
class Step:
    """One step; its value is identified by its position in the list.

    Attributes:
        kind: ``load``, ``store``, ``matmul``, ``reduce`` (over a dimension of the tile), ``close``
            (over the loop), ``scale`` (by ``value``), or an element-wise operator of our table.
        inputs: positions of the operands.
        shape: of the tile; for a ``store``, of the stored tile.
        where: for messages.
        attributes: ``load``, ``store``: ``tensor`` (a `Tensor`), ``splits`` (for each grid axis the
            dimension that it divides, or None), ``loop`` (the dimension that the loop divides, or
            None). ``reduce``, ``close``: ``how`` ("sum", "mean" or "max"). ``reduce``: ``dim``,
            ``width`` (the remaining extent: sums of every width-th element), ``loop``
            (whether a ``close`` follows, so that a mean is one over both). Else the operator's own.
    """

    kind: str
    inputs: tuple[int, ...]
    shape: Extents
    where: str
    attributes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Kernel:
    """A kernel: its grid axes, the iterations of its loop, its steps."""

    where: str
    grid: tuple[int, ...]
    loop: int
    steps: tuple[Step, ...]


class Steps:
    """A growing list of steps; methods return the position of the result."""

    def __init__(self) -> None:
        self.list: list[Step] = []

    def add(self, op: Operator, kind: str, *inputs: int, shape: Extents, **attributes: Any) -> int:
        """Append any step."""
        self.list.append(Step(kind, inputs, shape, op.where, attributes))
        return len(self.list) - 1

    def tensor(
        self,
        op: Operator,
        kind: str,
        tensor: Tensor,
        *inputs: int,
        shape: Extents,
        splits: tuple[int | None, ...],
        loop: int | None = None,
    ) -> int:
        """Append a load or a store."""
        return self.add(op, kind, *inputs, shape=shape, tensor=tensor, splits=splits, loop=loop)

    def reduce(
        self, op: Operator, how: str, x: int, dim: int, width: int = 1, loop: bool = False
    ) -> int:
        """Reduce one dimension of a tile to ``width``."""
        before = self.list[x].shape
        shape = (*before[:dim], width, *before[dim + 1 :])
        return self.add(op, "reduce", x, shape=shape, how=how, dim=dim, width=width, loop=loop)

    def compute(self, op: Operator, *args: int, dimx: int = 1) -> int:
        """Append an operator that is not a load, store, product or concatenation."""
        shape, name = self.list[args[0]].shape, op.name
        if name in UNARY:
            return self.add(op, name, *args, shape=shape)
        if name in BINARY:
            pair = zip(shape, self.list[args[1]].shape, strict=True)
            return self.add(op, name, *args, shape=tuple(x if y == 1 else y for x, y in pair))
        if name == "clamp":
            low, high = op.scalars["min_val"], op.scalars["max_val"]
            return self.add(op, name, *args, shape=shape, min=low, max=high)
        if name == "mul_scalar":
            return self.add(op, "scale", *args, shape=shape, value=op.scalars["scalar"])
        if name == "rms_norm":
            return self._rms_norm(op, args[0])
        if name.startswith("reduction"):
            how = "max" if name == "reduction_max" else "sum"
            width = dimx if name == "reduction_to_dimx" else 1
            return self.reduce(op, how, args[0], op.dim, width)
        return self._accumulate(op, args[0], dimx)

    def _rms_norm(self, op: Operator, x: int) -> int:
        """``x / sqrt(mean x^2)`` over the last dimension of the tile, without eps and weight."""
        shape = self.list[x].shape
        squares = self.add(op, "square", x, shape=shape)
        mean = self.reduce(op, "mean", squares, len(shape) - 1)
        norm = self.add(op, "sqrt", mean, shape=self.list[mean].shape)
        return self.add(op, "div", x, norm, shape=shape)

    def _accumulate(self, op: Operator, x: int, dimx: int) -> int:
        """Append an accumulator: its work in each iteration, over the loop, and after it."""
        kind = op.name.removeprefix("forloop_accum_")
        how = {"red_ld_mean": "mean", "red_ld_rms": "mean", "max": "max"}.get(kind, "sum")
        if kind == "red_ld_rms":
            x = self.add(op, "square", x, shape=self.list[x].shape)
        if kind not in ("nored", "max"):
            width = dimx if kind == "redtox_ld_sum" else 1
            x = self.reduce(op, how, x, len(self.list[x].shape) - 1, width, loop=True)
        shape = self.list[x].shape
        x = self.add(op, "close", x, shape=shape, how=how)
        return self.add(op, "sqrt", x, shape=shape) if kind == "red_ld_rms" else x


def library_kernel(op: Operator) -> Kernel:
    """An operator that Mirage leaves to a library, as a kernel of its own.

    A matrix product has a block for each tile of 64 x 64 results and walks the contracted dimension
    in steps of 64 (or what divides the extents); anything else has a block for each row.
    """
    if op.name == "matmul":
        return _product_kernel(op)
    return _row_kernel(op)


def _product_kernel(op: Operator) -> Kernel:
    steps = Steps()
    (a, b), (result,) = op.inputs, op.outputs
    last = len(result.shape) - 1
    batch = tuple(range(last - 1))
    m, n = (gcd(k, PRODUCT_TILE) for k in result.shape[-2:])
    inner = gcd(a.shape[-1], PRODUCT_TILE)
    ones = (1,) * len(batch)
    tile = (*ones, m, n)
    x = steps.tensor(
        op, "load", a, shape=(*ones, m, inner), splits=(*batch, last - 1, None), loop=last
    )
    y = steps.tensor(
        op, "load", b, shape=(*ones, inner, n), splits=(*batch, None, last), loop=last - 1
    )
    product = steps.add(op, "matmul", x, y, shape=tile)
    total = steps.add(op, "close", product, shape=tile, how="sum")
    steps.tensor(op, "store", result, total, shape=tile, splits=(*batch, last - 1, last))
    grid = tuple(k // t for k, t in zip(result.shape, tile, strict=True))
    return Kernel(op.where, grid, a.shape[-1] // inner, tuple(steps.list))


def _row_kernel(op: Operator) -> Kernel:
    """A kernel by rows: the row is the dimension that is reduced, else the last one."""
    steps = Steps()
    (result,) = op.outputs
    row = op.dim if op.name == "reduction" else len(result.shape) - 1

    def access(kind: str, t: Tensor, *inputs: int) -> int:
        splits = tuple(d if d != row and n > 1 else None for d, n in enumerate(t.shape))
        shape = tuple(n if d == row else 1 for d, n in enumerate(t.shape))
        return steps.tensor(op, kind, t, *inputs, shape=shape, splits=splits)

    access("store", result, steps.compute(op, *(access("load", t) for t in op.inputs)))
    whole = (max(n) for n in zip(*(t.shape for t in op.inputs), strict=True))
    grid = tuple(1 if d == row else n for d, n in enumerate(whole))
    return Kernel(op.where, grid, 1, tuple(steps.list))
