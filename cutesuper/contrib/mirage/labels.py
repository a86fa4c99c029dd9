"""Conversion of factors to labels: a label's axes and tile are factors that stay together.

before: the dimension K is divided ``[y, loop, 128]`` in every tensor that has it, and every sum
over the loop follows one over the 128 elements; after: one label K with a grid axis, a loop axis
and a tile of 128.

Factors that are used separately become labels of their own, with a tile of 1, and a dimension of a
tensor is then several labels. A sum over the loop of ``[y, loop, 128]`` that keeps the 128 elements
needs ``("N", "J")``, where N has the axes and J is the tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, count

from cutesuper.contrib.mirage.factors import Sequel
from cutesuper.contrib.mirage.indices import Indices
from cutesuper.ir.block import Axis, AxisKind

#: an entry of a map: a label or an axis, and its extent
Entry = tuple[str, int]
#: names of labels that are not rows, columns or inner dimensions of a product
_LETTERS = "BDEFGHIJLOPQRSTUVWXYZ"


@dataclass(frozen=True)
class Label:
    """A label, described by its factors.

    Attributes:
        name: in the block program.
        grid: the factor of its grid axis, or None.
        loop: the factor of its loop axis, or None.
        tile: the factor of its tile, or None for a tile of 1.
    """

    name: str
    grid: int | None
    loop: int | None
    tile: int | None

    @property
    def factors(self) -> Sequel:
        """The factors, outermost first."""
        return tuple(f for f in (self.grid, self.loop, self.tile) if f is not None)


class Labels:
    """The labels of a kernel."""

    def __init__(self, indices: Indices) -> None:
        self._indices = indices
        self._extent = indices.factors.extent
        self._loaded = [dim for _, v in indices.of_kind("load") for dim in v.whole]
        self._stores = [
            (i, indices.values[i])
            for i, step in enumerate(indices.kernel.steps)
            if step.kind == "store"
        ]
        self._reduced = indices.reduced()
        groups = [self._divided(sequel) for sequel in self._chains()]
        self.labels = tuple(self._named([group for parts in groups for group in parts]))
        self.of = {f: label for label in self.labels for f in label.factors}

    def extent(self, label: Label) -> int:
        """Extent of the whole dimension."""
        return self._indices.factors.size(label.factors)

    def tile(self, label: Label) -> int:
        """Extent that a block holds at a time."""
        return 1 if label.tile is None else self._extent(label.tile)

    def axes(self) -> tuple[Axis, ...]:
        """The axes of the block program."""
        found: list[Axis] = []
        for x in self.labels:
            if x.grid is not None:
                found.append(Axis(x.name, AxisKind.GRID, self._extent(x.grid)))
            if x.loop is not None:
                found.append(Axis(x.name, AxisKind.LOOP, self._extent(x.loop)))
        return tuple(found)

    def entries(self, dim: Sequel) -> Iterator[Entry]:
        """The labels of one dimension of a loaded or stored tensor, with their extents.

        In a store an axis (``K.grid``) replaces its label if the label is reduced, and the results
        of its parts are stored side by side.
        """
        left = list(dim)
        while left:
            first = left.pop(0)
            label = self.of[first]
            rest = [f for f in label.factors if f != first]
            if left[: len(rest)] == rest:
                del left[: len(rest)]
                yield label.name, self.extent(label)
            else:
                yield f"{label.name}.grid", self._extent(first)

    # groups of factors ---------------------------------------------------------------------

    def _chains(self) -> list[Sequel]:
        """Factors that are always neighbours where tensors are loaded, outermost first."""
        after: dict[int, set[int | None]] = {}
        before: dict[int, set[int | None]] = {}
        for dim in self._loaded:
            for f, g in zip((None, *dim), (*dim, None), strict=True):
                if f is not None:
                    after.setdefault(f, set()).add(g)
                if g is not None:
                    before.setdefault(g, set()).add(f)
        chains: list[Sequel] = []
        for f in after:
            outer = next(iter(before[f]), None)
            if outer in self._indices.axes and self._follows(outer, f, before, after):
                continue  # it is in the chain of the axis
            found = [f]
            while found[-1] in self._indices.axes:
                inner = next(iter(after[found[-1]]), None)
                if inner is None or not self._follows(found[-1], inner, before, after):
                    break
                found.append(inner)
            chains.append(tuple(found))
        return chains

    def _follows(
        self,
        f: int | None,
        g: int,
        before: dict[int, set[int | None]],
        after: dict[int, set[int | None]],
    ) -> bool:
        return f is not None and before[g] == {f} and after[f] == {g}

    def _divided(self, sequel: Sequel) -> list[Sequel]:
        """The division of a chain into as few labels as the steps allow."""
        ways = [[sequel]]
        if len(sequel) == 3:
            ways += [[sequel[:1], sequel[1:]], [sequel[:2], sequel[2:]]]
        ways.append([(f,) for f in sequel])
        return next(way for way in ways if all(map(self._together, way)))

    def _together(self, group: Sequel) -> bool:
        """True if one label with these factors describes the steps correctly."""
        if len(group) == 1:
            return True
        grid, loop, tile = self._parts(group)
        return (
            self._stored_together(grid, tile)
            and (loop is None or self._accumulated_together(loop, tile))
            and (tile is None or self._averaged_together(grid, loop, tile))
            and not (tile is None and grid is not None and self._averages_loop())
        )

    def _parts(self, group: Sequel) -> tuple[int | None, int | None, int | None]:
        """The factors of grid, loop and tile."""
        loop = next((f for f in group if f in self._indices.loop), None)
        tile = next((f for f in group if f not in self._indices.axes), None)
        return next((f for f in group if f not in (loop, tile)), None), loop, tile

    def _stored_together(self, grid: int | None, tile: int | None) -> bool:
        """True if stores write the parts side by side.
        Of values that are reduced over the tile, only the parts along the grid."""
        if grid is None or tile is None:
            return True
        for i, value in self._stores:
            if tile in value.factors and tile in self._reduced[i]:
                return False  # a block would use its own part of a sum as if it were the whole
            for dim in value.whole:
                for f, g in zip((None, *dim), (*dim, None), strict=True):
                    apart = f == grid and g != tile and tile in value.factors
                    if apart or (g == tile and f != grid):
                        return False
        return True

    def _accumulated_together(self, loop: int, tile: int | None) -> bool:
        """True if accumulated values have been reduced over the tile.
        For a mean or maximum, just before."""
        if tile is None:
            return True
        for step, _ in self._indices.of_kind("close"):
            value = self._indices.values[step.inputs[0]]
            if loop not in value.varies:
                continue
            if tile in value.factors or step.attributes["how"] == "max":
                return False
            if step.attributes["how"] == "mean" and tile not in value.gone:
                return False
        return True

    def _averaged_together(self, grid: int | None, loop: int | None, tile: int) -> bool:
        """True unless a mean is taken over the tile of a label with other parts."""
        for step, value in self._indices.of_kind("reduce"):
            other = grid is not None or (loop is not None and not step.attributes["loop"])
            if other and step.attributes["how"] == "mean" and tile in value.gone:
                return False
        return True

    def _averages_loop(self) -> bool:
        return any(s.attributes["how"] == "mean" for s, _ in self._indices.of_kind("close"))

    # names ---------------------------------------------------------------------------------

    def _named(self, groups: list[Sequel]) -> Iterator[Label]:
        """Labels named M, N and K by their role in a product; others get the remaining letters."""
        roles = self._roles()
        used: set[str] = set()
        for group in groups:
            wanted = [roles[f] for f in group if f in roles]
            numbered = (f"L{n}" for n in count(1))
            name = next(c for c in chain(wanted[-1:], _LETTERS, numbered) if c not in used)
            used.add(name)
            yield Label(name, *self._parts(group))

    def _roles(self) -> dict[int, str]:
        roles: dict[int, str] = {}
        for step, value in self._indices.of_kind("matmul"):
            a, b = (self._indices.values[i].dims for i in step.inputs)
            for dim, role in ((value.gone, "K"), (a[-2], "M"), (b[-1], "N")):
                for f in dim:
                    roles.setdefault(f, role)
        return roles
