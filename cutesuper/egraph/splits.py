"""Splits: the axis kinds that divide each label, and the rules that a kernel skeleton adds.

One choice for all tensors: an axis that splits a label splits every tensor that has the label. A
program of three labels has about ten to a hundred splits; choosing maps for each tensor would give
thousands.

before: labels M, N (stored) and K (contracted); after, among 49 splits:
``M:grid N:grid K:loop`` and ``M:grid N:grid K:cluster+loop``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from cutesuper.egraph.labelled import LabelledProgram
from cutesuper.ir.block import ORDER, Axis, AxisKind
from cutesuper.ir.dims import extent


@dataclass(frozen=True)
class Split:
    """The axis kinds that divide each label, outermost first.

    Attributes:
        kinds: the axis kinds of every label.
        parted: the label that is reduced and divided by the grid: blocks store partial results,
            which a second kernel combines.
        joined: the labels that are reduced and divided by the grid, where the blocks combine their
            results themselves (``grid_reduce``), in the order in which they are combined.
        passes: most walks of a block over its loop. LayerNorm and a product take three: the mean,
            the variance, the product.
    """

    kinds: tuple[tuple[str, tuple[AxisKind, ...]], ...]
    parted: str | None = None
    joined: tuple[str, ...] = ()
    passes: int = 1

    @property
    def parted_axis(self) -> str | None:
        """Name of the grid axis over which a second kernel combines."""
        return None if self.parted is None else f"{self.parted}.{AxisKind.GRID}"

    @property
    def divided_axes(self) -> tuple[str, ...]:
        """Names of the grid axes that divide reduced labels, however their parts are combined."""
        labels = self.joined if self.parted is None else (self.parted,)
        return tuple(f"{label}.{AxisKind.GRID}" for label in labels)

    @property
    def axes(self) -> tuple[Axis, ...]:
        """One axis of extent 1 for each kind of each label."""
        return tuple(Axis(label, kind, 1) for label, kinds in self.kinds for kind in kinds)

    def parts(self, label: str) -> tuple[str, ...]:
        """Names of the parts of a label: its axes, and its tile."""
        kinds = dict(self.kinds)[label]
        return (*(f"{label}.{k}" for k in kinds), f"{label}.tile")

    def tile_parts(self, label: str) -> tuple[str, ...]:
        """The parts that a reduction of a tile covers: the tile, and parts without an axis."""
        absent = set(all_parts(label)) - set(self.parts(label))
        return tuple(sorted((*absent, f"{label}.tile")))

    def __str__(self) -> str:
        shown = ((label, "+".join(kinds)) for label, kinds in self.kinds)
        text = " ".join(f"{label}:{kinds or 'whole'}" for label, kinds in shown)
        return text if self.passes == 1 else f"{text}, {self.passes} passes"


def all_parts(label: str) -> tuple[str, ...]:
    """Every part that a label may have."""
    return (*(f"{label}.{k}" for k in ORDER), f"{label}.tile")


class State(NamedTuple):
    """Dependences of a value besides its labels; see `ir.check.ValueState`.

    Here a grid axis that divides a reduced label counts as an axis inside which values live until
    its parts are combined, by a second kernel or in the same launch (`Split.divided_axes`).
    """

    inside: frozenset[str]
    closed: frozenset[tuple[str, int]]
    pending: frozenset[str]


class Operand(NamedTuple):
    """An operand of a contraction; ``loaded``: True if it is a plain load."""

    labels: frozenset[str]
    state: State
    loaded: bool


class Rules(Protocol):
    """Operations that a kernel skeleton supports; checked before a class is formed.

    Attributes:
        vectors: True if a matrix may be contracted with a vector as well; otherwise they are
            multiplied and summed.
    """

    @property
    def vectors(self) -> bool: ...

    def computes(self, operands: tuple[frozenset[str], ...], state: State) -> bool:
        """True if an element-wise operator may take values with these labels.

        ``state``: the result's state. Unary operators pass one operand.
        """
        ...

    def reduces(self, labels: frozenset[str], over: str, state: State) -> bool:
        """True if a tile with these labels and this state may be reduced over a label."""
        ...

    def contracts(self, a: Operand, b: Operand, over: str) -> bool:
        """True if the product of two tiles may be contracted, in this order."""
        ...


class AnyRules:
    """Rules that allow everything `ir.check` allows."""

    @property
    def vectors(self) -> bool:
        return False

    def computes(self, operands: tuple[frozenset[str], ...], state: State) -> bool:
        return True

    def reduces(self, labels: frozenset[str], over: str, state: State) -> bool:
        return True

    def contracts(self, a: Operand, b: Operand, over: str) -> bool:
        return True


#: shorter dimensions are not divided when they are contracted: by a loop, or by any other axis
MIN_LOOPED, MIN_PARTED = 129, 512

_GRID, _CLUSTER = AxisKind.GRID, AxisKind.CLUSTER
_PERSISTENT, _LOOP = AxisKind.PERSISTENT, AxisKind.LOOP
#: role of a label in a program -> the axis kinds that may divide it
_REDUCED: tuple[tuple[AxisKind, ...], ...] = (
    (),
    (_LOOP,),
    (_CLUSTER,),
    (_CLUSTER, _LOOP),
    (_GRID,),
    (_GRID, _LOOP),
)
_STORED: tuple[tuple[AxisKind, ...], ...] = ((_GRID,),)
_BOTH: tuple[tuple[AxisKind, ...], ...] = (
    (),
    (_LOOP,),
    (_CLUSTER,),
    (_CLUSTER, _LOOP),
    (_GRID,),
    (_GRID, _PERSISTENT),
)


def splits(program: LabelledProgram) -> Iterator[Split]:
    """Every assignment of axis kinds to labels, fewest axes first.

    There is at most one cluster, one loop and one persistent axis, and at most one reduced label
    divided by the grid (a second kernel then combines the partial results). A label that is only
    stored is a grid axis, which may have an extent of 1; a loop over it would only repeat work.
    """
    reduced, again = set(program.reduced), _needed_again(program)
    contracted = {op.over for op in program.ops if op.facets.contracts}
    # pairs of numbers and places are not stored for a second kernel
    paired = {op.over for op in program.ops if op.facets.reduces and op.facets.reduces.places}
    stored = {d for _, m in program.outputs for d in m if d is not None}
    chosen: list[tuple[tuple[AxisKind, ...], ...]] = [()]
    for label, dim in program.dims.items():
        kinds = _STORED if label not in reduced else _BOTH if label in stored else _REDUCED
        if label in reduced:
            least = MIN_LOOPED if label in contracted else 2
            kinds = tuple(k for k in kinds if _pays(k, extent(dim), least))
        if label in again | paired:
            kinds = tuple(k for k in kinds if _GRID not in k)
        chosen = [(*c, o) for c in chosen for o in kinds if _once((*c, o))]
    for c in sorted(chosen, key=lambda c: sum(map(len, c))):
        kinds_of = dict(zip(program.dims, c, strict=True))
        parted = tuple(d for d in program.dims if d in reduced and _GRID in kinds_of[d])
        if len(parted) <= 1 and not _nested(c):
            looped = {d for d, ks in kinds_of.items() if _LOOP in ks}
            passes = 2 if looped & again else 1
            whole = tuple(kinds_of.items())
            yield Split(whole, parted[0] if parted else None, passes=passes)


def _nested(kinds: tuple[tuple[AxisKind, ...], ...]) -> bool:
    """True if a loop over one label would run inside tiles of another that blocks visit in turn.

    An accumulator over the visits would then have a part for each iteration, which ends too early.
    """
    flat = [k for ks in kinds for k in ks]
    return _PERSISTENT in flat and _LOOP in flat


def _needed_again(program: LabelledProgram) -> set[str]:
    """Labels of an output that depends on a reduction over them, as softmax does.
    A loop over such a label has to be walked again, and a second kernel cannot continue after the
    grid has ended."""
    over: list[set[str]] = []
    for op in program.ops:
        before = set[str]().union(*(over[i] for i in op.inputs))
        over.append(before | ({op.over} if op.over is not None else set()))
    return {d for i, m in program.outputs for d in m if d is not None and d in over[i]}


def _pays(kinds: tuple[AxisKind, ...], whole: int, looped: int) -> bool:
    """True if a reduced label is long enough for these axes.
    ``looped``: the least extent for a loop.

    The head dimension of attention is held as a whole: 1845 splits of its backward pass become 150.
    """
    return whole >= (looped if kinds == (_LOOP,) else MIN_PARTED if kinds else 0)


def _once(kinds: tuple[tuple[AxisKind, ...], ...]) -> bool:
    flat = [k for ks in kinds for k in ks if k != _GRID]
    return len(set(flat)) == len(flat)
