"""The factors of the dimensions of every value of a kernel, and the tiles that share them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from math import prod

from cutesuper.contrib.mirage.factors import Factors, Sequel
from cutesuper.contrib.mirage.fields import GRID
from cutesuper.contrib.mirage.steps import Kernel, Step
from cutesuper.errors import FormatError

#: guid of a tensor -> extents into which its store divided each of its dimensions
Cuts = Mapping[int, tuple[tuple[int, ...], ...]]


@dataclass
class Value:
    """Known facts about the value of a step.

    Attributes:
        dims: the factors of each dimension of its tile.
        varies: factors of the grid and of the loop that it depends on.
        ended: whether it exists only after the loop.
        gone: factors that the step reduces or contracts.
        whole: for loads and stores, the factors of each dimension of the tensor.
    """

    dims: tuple[Sequel, ...]
    varies: frozenset[int] = frozenset()
    ended: bool = False
    gone: Sequel = ()
    whole: tuple[Sequel, ...] = ()

    @property
    def factors(self) -> set[int]:
        """All factors of the tile."""
        return {f for d in self.dims for f in d}


class Indices:
    """The factors of all values of a kernel.

    Args:
        kernel: its steps.
        cuts: divisions of tensors from earlier kernels; loads follow them where possible.

    Raises:
        FormatError: a step that has no meaning for a block program.
    """

    def __init__(self, kernel: Kernel, cuts: Cuts) -> None:
        self.kernel = kernel
        self.factors = Factors()
        self.grid = tuple(self.factors.new(n) for n in kernel.grid)
        self.loop = self.factors.new(kernel.loop)
        self.values: list[Value] = []
        for step in kernel.steps:
            self.values.append(self._value(step, cuts))
        self._settle()
        self._check_repeated()
        self._share()

    @property
    def axes(self) -> frozenset[int]:
        """The factors of the grid and of the loop."""
        return frozenset(f for g in self.grid for f in g) | set(self.loop)

    def of_kind(self, kind: str) -> Iterator[tuple[Step, Value]]:
        """All steps of a kind with their values."""
        return (p for p in zip(self.kernel.steps, self.values, strict=True) if p[0].kind == kind)

    def reduced(self) -> list[frozenset[int]]:
        """For every step the factors that it, or a step it depends on, has reduced."""
        result: list[frozenset[int]] = []
        for step, v in zip(self.kernel.steps, self.values, strict=True):
            result.append(frozenset(v.gone).union(*(result[i] for i in step.inputs)))
        return result

    # values --------------------------------------------------------------------------------

    def _value(self, step: Step, cuts: Cuts) -> Value:
        if step.kind == "load":
            return self._load(step, cuts)
        args = [self.values[i] for i in step.inputs]
        self._check_phase(step, args)
        varies = frozenset[int]().union(*(a.varies for a in args))
        ended, dims = args[0].ended, args[0].dims
        if step.kind == "store":
            return self._store(step, args[0])
        if step.kind == "matmul":
            return self._matmul(step, args[0], args[1], varies)
        if step.kind == "reduce":
            return self._reduce(step, args[0])
        if step.kind == "close":
            return Value(dims, varies - set(self.loop), True)
        if len(args) == 2:
            dims = tuple(
                self._same(a, b, step.where) for a, b in zip(dims, args[1].dims, strict=True)
            )
        return Value(dims, varies, ended)

    def _same(self, a: Sequel, b: Sequel, where: str) -> Sequel:
        if a and b:
            self.factors.unify(a, b, where)
        return a or b

    def _check_phase(self, step: Step, args: list[Value]) -> None:
        if not self.loop:
            return
        if len({a.ended for a in args}) > 1:
            raise FormatError(
                f"{step.where}: one operand is accumulated over the loop, the other is not"
            )
        if step.kind == "close" and args[0].ended:
            raise FormatError(f"{step.where}: its operand is accumulated already")
        if step.kind == "store" and not args[0].ended:
            raise FormatError(f"{step.where}: it would store in every iteration; accumulate first")

    def _load(self, step: Step, cuts: Cuts) -> Value:
        a = step.attributes
        tensor, dims, whole = a["tensor"], [], []
        varies: set[int] = set()
        for d, n in enumerate(step.shape):
            axes = self._axes_of(step, d) + (self.loop if a["loop"] == d else ())
            tile = self.factors.new(n)
            for inner in _boundaries(cuts.get(tensor.guid, ())[d : d + 1]):
                if inner < n:
                    self.factors.cut(tile, inner)
            dims.append(tile)
            whole.append(axes + tile)
            varies.update(axes)
        return Value(tuple(dims), frozenset(varies), whole=tuple(whole))

    def _axes_of(self, step: Step, dim: int) -> Sequel:
        splits = step.attributes["splits"]
        return tuple(f for g, s in zip(self.grid, splits, strict=True) if s == dim for f in g)

    def _store(self, step: Step, x: Value) -> Value:
        whole = tuple(self._axes_of(step, d) + dim for d, dim in enumerate(x.dims))
        stored = {f for d in whole for f in d if f in self.axes}
        for name, axis in zip(GRID, self.grid, strict=False):
            if set(axis) & (x.varies - stored):
                raise FormatError(
                    f"{step.where}: blocks along {name} store different values in one place; map "
                    f"{name} to a dimension of the tensor"
                )
            if set(axis) & (stored - x.varies):
                raise FormatError(
                    f"{step.where}: all blocks along {name} store the same values side by side; no "
                    "block program repeats a value along a dimension"
                )
        return Value(x.dims, x.varies, True, whole=whole)

    def _matmul(self, step: Step, a: Value, b: Value, varies: frozenset[int]) -> Value:
        for x, y in zip(a.dims[:-2], b.dims[:-2], strict=True):
            self.factors.unify(x, y, step.where)
        self.factors.unify(a.dims[-1], b.dims[-2], step.where)
        return Value((*a.dims[:-1], b.dims[-1]), varies, a.ended, gone=a.dims[-1])

    def _reduce(self, step: Step, x: Value) -> Value:
        dim = step.attributes["dim"]
        parts = self.factors.cut(x.dims[dim], step.attributes["width"])
        if parts is None:
            raise FormatError(
                f"{step.where}: its operand is divided along dimension {dim} in a way that does "
                f"not fit the {step.attributes['width']} elements that it is reduced to"
            )
        outer, inner = parts
        dims = (*x.dims[:dim], inner, *x.dims[dim + 1 :])
        return Value(dims, x.varies, x.ended, gone=outer)

    # afterwards ----------------------------------------------------------------------------

    def _settle(self) -> None:
        for v in self.values:
            v.dims = tuple(map(self.factors.settled, v.dims))
            v.whole = tuple(map(self.factors.settled, v.whole))
            v.gone = self.factors.settled(v.gone)

    def _check_repeated(self) -> None:
        for step, v in zip(self.kernel.steps, self.values, strict=True):
            flat = [f for d in (v.whole or v.dims) for f in d]
            if len(set(flat)) < len(flat):
                raise FormatError(
                    f"{step.where}: two dimensions of one tile are the same index here (a diagonal "
                    "or a product of a tile with itself); no labels describe that"
                )

    def _share(self) -> None:
        """Let tiles along one axis share their outermost factor if they never meet.

        The axis then belongs to one label. Partial sums of 8 x 64 and of 8 x 128 elements that are
        read in 4 iterations both become ``[loop, 2, ...]``.
        """
        for axes in dict.fromkeys(a for a, _ in self._tiles()):
            tiles = [f for a, f in self._tiles() if a == axes]
            firsts = [f for f in dict.fromkeys(tiles) if f is not None]
            extents = {self.factors.extent(f) for f in firsts}
            # tiles of other extents are only split for a loop: a program has one loop label
            alike = len(extents) == 1 or set(self.loop) & set(axes)
            nested = all(n % min(extents) == 0 for n in extents)
            if axes and alike and nested and None not in tiles and not self._meet(firsts):
                self._join(firsts, min(extents))

    def _tiles(self) -> list[tuple[Sequel, int | None]]:
        """The axes of every loaded dimension, and the factor that follows them."""
        loaded = [dim for _, v in self.of_kind("load") for dim in v.whole]
        result: list[tuple[Sequel, int | None]] = []
        for dim in loaded:
            axes = tuple(f for f in dim if f in self.axes)
            result.append((axes, next(iter(dim[len(axes) :]), None)))
        return result

    def _join(self, firsts: list[int], least: int) -> None:
        for f in firsts:
            if (n := self.factors.extent(f)) > least:
                self.factors.split(f, n // least)
        first, *others = (self.factors.settled((f,))[:1] for f in firsts)
        for f in others:
            self.factors.unify(first, f, self.kernel.where)
        self._settle()

    def _meet(self, factors: list[int]) -> bool:
        """True if a step has two of the factors among its operands and its result."""
        together = [
            v.factors.union(*(self.values[i].factors for i in s.inputs))
            for s, v in zip(self.kernel.steps, self.values, strict=True)
        ]
        return any({a, b} <= t for a, b in combinations(factors, 2) for t in together)


def _boundaries(extents: tuple[tuple[int, ...], ...]) -> list[int]:
    """Boundaries between divided dimensions, in elements from the inside.
    (8, 4, 64): at 256 and 64."""
    return [prod(e[i:]) for e in extents for i in range(1, len(e))]
