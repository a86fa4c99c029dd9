"""The border of a program: the tensors of the caller, and the parts of them that kernels work on.

A kernel graph may slice an input, and concatenate an output (`cutesuper.ir.remove_concat` leaves
both at its border). Inside, each part is a tensor of its own, which the search and the verifier
treat like any other; a kernel finds it in the memory of the larger tensor
(`cutesuper.ir.block.Part`).

before::

    y = concat([silu(slice(X, 1, 0, 4)), slice(X, 1, 4, 8)], 1)

after, inside: inputs ``X[:, 0:4]`` and ``X[:, 4:8]``, and two outputs. What holds for any tensors
holds for parts of one, also where they overlap: a program that is right inside is right.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from cutesuper.ir.block import MuGraph, Part, TensorSpec
from cutesuper.ir.dims import Dim, Shape, extent, show_shape
from cutesuper.ir.graph import KernelGraph, Node
from cutesuper.ir.operators.base import INPUT

#: bytes of which bulk copies take multiples
ALIGNMENT = 16


@dataclass(frozen=True, order=True)
class Place:
    """A tensor inside, as a part of a tensor at the border.

    Attributes:
        tensor: position of the input or output.
        starts: its first element along each dimension; empty for the whole tensor.
        ends: behind its last element, with hints of symbolic extents; empty likewise.
    """

    tensor: int
    starts: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()

    @property
    def box(self) -> tuple[slice, ...]:
        """The part as an index of the tensor; of a whole tensor, that of all its elements."""
        return tuple(slice(*r) for r in zip(self.starts, self.ends, strict=True))


@dataclass(frozen=True)
class PartOf:
    """A part of a tensor of shape ``whole``, whose first element is at ``starts``."""

    whole: Shape
    starts: tuple[int, ...]

    def aligned(self, shape: Shape, itemsize: int) -> bool:
        """True if all rows of the part, of this shape, begin and end at multiples of 16 bytes."""
        ends = (self.whole[-1], self.starts[-1], shape[-1])
        return all(isinstance(n, int) and n * itemsize % ALIGNMENT == 0 for n in ends)

    def __str__(self) -> str:
        return f"a tensor {show_shape(self.whole)}, from {list(self.starts)} on"


@dataclass(frozen=True)
class Border:
    """The tensors inside, in order.

    Attributes:
        inputs: inputs as wholes, then their parts.
        outputs: outputs, or in place of each its parts.
        given: shapes of the inputs at the border.
        made: shapes of the outputs at the border.
    """

    inputs: tuple[Place, ...]
    outputs: tuple[Place, ...]
    given: tuple[Shape, ...]
    made: tuple[Shape, ...]

    @property
    def whole(self) -> bool:
        """True if kernels work on whole tensors only."""
        return not any(p.starts for p in (*self.inputs, *self.outputs))

    def parts(self, inputs: Sequence[str], outputs: Sequence[str]) -> dict[str, PartOf]:
        """By the name of each tensor inside that is a part, the place of it."""
        sides = (self.inputs, inputs, self.given), (self.outputs, outputs, self.made)
        return {
            name: PartOf(shapes[p.tensor], p.starts)
            for places, names, shapes in sides
            for p, name in zip(places, names, strict=True)
            if p.starts
        }


def inside(graph: KernelGraph) -> tuple[KernelGraph, Border]:
    """The program inside the border.

    Args:
        graph: expanded; its slices are of inputs, and its concatenations are outputs.
    """
    places = _places(graph)
    sections = [list(_sections(graph, o)) for o in graph.outputs]
    first = [Place(n) for n in range(len(graph.inputs))]
    border = Border(
        (*first, *sorted(set(places.values()) - set(first))),
        tuple(p if len(own) > 1 else Place(n)
              for n, own in enumerate(sections) for p in (replace(p, tensor=n) for _, p in own)),
        tuple(graph.nodes[i].shape for i in graph.inputs),
        tuple(graph.nodes[i].shape for i in graph.outputs),
    )  # fmt: skip
    if border.whole:
        return graph, border
    return _Inside(graph, border, places, [i for own in sections for i, _ in own]).build(), border


def _places(graph: KernelGraph) -> dict[int, Place]:
    """The inputs, and the slices of inputs that are used as they are, by node."""
    found: dict[int, Place] = {}
    for i, node in enumerate(graph.nodes):
        if node.operator == INPUT:
            found[i] = Place(len(found))
    inner: set[int] = set()
    for i, node in enumerate(graph.nodes):
        if node.facets.cuts and not node.facets.joins:
            [j] = node.inputs
            found[i] = _sliced(found[j], node, graph.nodes[j].shape)
            inner.add(j)
    used = {j for n in graph.nodes if not n.facets.cuts or n.facets.joins for j in n.inputs}
    return {i: p for i, p in found.items() if not p.starts or i in used or i not in inner}


def _sliced(place: Place, node: Node, shape: Shape) -> Place:
    """The place of a slice of a tensor at ``place``."""
    d, start, stop = (node.attributes[k] for k in ("dim", "start", "stop"))
    starts = place.starts or (0,) * len(shape)
    ends = place.ends or tuple(map(extent, shape))
    base = starts[d]
    return Place(
        place.tensor,
        (*starts[:d], base + start, *starts[d + 1 :]),
        (*ends[:d], base + stop, *ends[d + 1 :]),
    )


def _sections(graph: KernelGraph, i: int) -> Iterator[tuple[int, Place]]:
    """The nodes that a value is put together from, each with its place in it."""
    node = graph.nodes[i]
    if not node.facets.joins:
        yield i, Place(0, (0,) * len(node.shape), tuple(map(extent, node.shape)))
        return
    d, start = node.attributes["dim"], 0
    for j in node.inputs:
        for k, p in _sections(graph, j):
            yield k, Place(0, _plus(p.starts, d, start), _plus(p.ends, d, start))
        start += extent(graph.nodes[j].shape[d])


def _plus(at: tuple[int, ...], d: int, more: int) -> tuple[int, ...]:
    return (*at[:d], at[d] + more, *at[d + 1 :])


class _Inside:
    """Builds the program inside: inputs, parts of them, then everything else.

    Args:
        graph: the whole program.
        border: its border.
        places: of its inputs and their slices, by node.
        stored: the nodes that are stored, in the order of the border's outputs.
    """

    def __init__(
        self, graph: KernelGraph, border: Border, places: dict[int, Place], stored: Sequence[int]
    ) -> None:
        self.graph, self.border, self.places, self.stored = graph, border, places, stored

    def build(self) -> KernelGraph:
        graph, g, new = self.graph, KernelGraph(), dict[int, int]()
        given = [graph.nodes[i] for i in graph.inputs]
        for place in self.border.inputs:
            g.nodes.append(self._input(given, place))
        for i, place in self.places.items():
            new[i] = self.border.inputs.index(place)
        for i, node in enumerate(graph.nodes):
            if i not in new and not node.facets.cuts:
                new[i] = len(g.nodes)
                g.nodes.append(replace(node, inputs=tuple(new[j] for j in node.inputs)))
        g.outputs = [new[i] for i in self.stored]
        for n, place in zip(g.outputs, self.border.outputs, strict=True):
            dtype = graph.nodes[graph.outputs[place.tensor]].dtype
            g.nodes[n] = replace(g.nodes[n], dtype=dtype)
        return g

    def _input(self, given: list[Node], place: Place) -> Node:
        whole = given[place.tensor]
        if not place.starts:
            return whole
        name = _name(whole.name, whole.shape, place, {n.name for n in given})
        return replace(whole, name=name, shape=_shape(whole.shape, place))


def with_copies(graph: KernelGraph, border: Border) -> KernelGraph:
    """A program inside whose kernels may read and write copies in place of parts.

    before: ``X[:, 0:3] @ W``; after: ``convert(X[:, 0:3]) @ W``, in which a kernel of rows may make
    the copy. Outputs that are used in another type than they are stored in are not copied: a copy
    would be rounded to that type.
    """
    g, new = KernelGraph(), dict[int, int]()
    cut = {i for i, p in zip(graph.inputs, border.inputs, strict=True) if p.starts}
    for i, node in enumerate(graph.nodes):
        new[i] = len(g.nodes)
        g.nodes.append(replace(node, inputs=tuple(new[j] for j in node.inputs)))
        if i in cut:
            new[i] = _copy(g, new[i])
    for n, place in zip(graph.outputs, border.outputs, strict=True):
        copied = place.starts and _has_one_type(graph, n)
        g.outputs.append(_copy(g, new[n]) if copied else new[n])
    return g


def _has_one_type(graph: KernelGraph, i: int) -> bool:
    """True if an output has the same type for its caller and for its users in the graph."""
    used = any(i in n.inputs for n in graph.nodes)
    return not used or graph.own_dtype(graph.tensor(i)) == graph.nodes[i].dtype


def _copy(g: KernelGraph, i: int) -> int:
    """A copy of a value; integers, with which nothing is computed, are not copied."""
    dtype = g.nodes[i].dtype
    return i if dtype.integer else g.convert(g.tensor(i), dtype).index


def _shape(whole: Shape, place: Place) -> Shape:
    """Shape of a part; dimensions that it has as a whole keep their symbols."""

    def own(d: Dim, start: int, end: int) -> Dim:
        return d if (start, end) == (0, extent(d)) else end - start

    return tuple(own(d, *r) for d, r in zip(whole, _ranges(place), strict=True))


def _ranges(place: Place) -> Iterator[tuple[int, int]]:
    return zip(place.starts, place.ends, strict=True)


def _name(of: str, whole: Shape, place: Place, taken: Collection[str]) -> str:
    """Name of a part: ``X[:, 0:4]``."""
    shown = (
        ":" if r == (0, extent(d)) else f"{r[0]}:{r[1]}"
        for d, r in zip(whole, _ranges(place), strict=True)
    )
    name = f"{of}[{', '.join(shown)}]"
    while name in taken:
        name += "_"
    return name


# --------------------------------------------------------------------------------------- muGraphs


def whole_mugraph(mu: MuGraph, graph: KernelGraph, border: Border) -> MuGraph:
    """A muGraph of the program inside as one of the whole program.

    Args:
        mu: its inputs and outputs are those inside.
        graph: the whole program.
        border: its border.
    """
    if border.whole:
        return mu
    given = [graph.nodes[i] for i in graph.inputs]
    taken = {n.name for n in given} | set(mu.tensors) - set(mu.outputs)
    outputs = [_free(f"out{n}", taken) for n in range(len(graph.outputs))]
    made = [graph.nodes[i] for i in graph.outputs]
    names = {
        name: _name(outputs[p.tensor], made[p.tensor].shape, p, taken)
        if p.starts
        else outputs[p.tensor]
        for name, p in zip(mu.outputs, border.outputs, strict=True)
    }
    mu = mu.renamed(names)
    tensors = {
        name: TensorSpec(name, n.shape, n.dtype) for name, n in zip(outputs, made, strict=True)
    } | mu.tensors
    wholes = mu.inputs[: len(given)]
    for side, names_of, of in (
        (border.inputs, mu.inputs, wholes),
        (border.outputs, mu.outputs, outputs),
    ):
        for name, p in zip(names_of, side, strict=True):
            if p.starts:
                part = Part(of[p.tensor], p.starts)
                tensors[name] = replace(tensors[name], part=part)
    return MuGraph(tensors, wholes, tuple(outputs), mu.steps)


def _free(name: str, taken: Collection[str]) -> str:
    while name in taken:
        name += "_"
    return name


def inside_mugraph(mu: MuGraph) -> tuple[MuGraph, Border]:
    """The inverse of `whole_mugraph`; any muGraph has a program inside."""
    of = {t.part.of for t in mu.tensors.values() if t.part is not None}
    read = sorted((_place_of(mu.tensors[m], mu.inputs), m) for n in mu.inputs for m in mu.parts(n))
    inputs = [*((Place(n), name) for n, name in enumerate(mu.inputs)), *read]
    outputs: list[tuple[Place, str]] = []
    for n, name in enumerate(mu.outputs):
        own = [(_place_of(mu.tensors[m], mu.outputs), m) for m in mu.parts(name)]
        outputs += own or [(Place(n), name)]
    tensors = {
        n: replace(t, part=None) for n, t in mu.tensors.items() if n in mu.inputs or n not in of
    }
    given, made = (tuple(mu.tensors[n].shape for n in side) for side in (mu.inputs, mu.outputs))
    border = Border(tuple(p for p, _ in inputs), tuple(p for p, _ in outputs), given, made)
    names = [tuple(name for _, name in side) for side in (inputs, outputs)]
    return MuGraph(tensors, names[0], names[1], mu.steps), border


def _place_of(t: TensorSpec, border: Sequence[str]) -> Place:
    assert t.part is not None
    ends = tuple(s + extent(d) for s, d in zip(t.part.starts, t.shape, strict=True))
    return Place(border.index(t.part.of), t.part.starts, ends)
