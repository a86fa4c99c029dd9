"""Reverse-mode differentiation: from a kernel graph to the kernel graph of its derivative.

The program and its derivative are first built as one graph, in which every value occurs once
(`cutesuper.ir.derivation`); each operator defines its derivative (`Operator.derivative`). Then the
graph is cut: the backward pass computes the gradients from the program's inputs and the values that
the forward pass keeps. Other values are computed again.

before::

    y = rms_norm(x, w)                                  inputs x, w

after, where the forward pass keeps rstd::

    xhat = x * rstd;  wdy = dy * w                      inputs x, w, rstd, dy
    dx = (wdy - xhat * mean(xhat * wdy)) * rstd;  dw = sum(dy * xhat)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cutesuper.autodiff.recompute import Reuse, choose
from cutesuper.errors import GraphError
from cutesuper.ir.arguments import shown
from cutesuper.ir.derivation import Derivation
from cutesuper.ir.dtypes import DType, float32
from cutesuper.ir.graph import KernelGraph, Tensor
from cutesuper.ir.operators.base import INPUT, lookup
from cutesuper.ir.unseen import fates_of, guarded_graph

#: names or tensors
Names = str | Tensor | Sequence[str | Tensor]


class Split(NamedTuple):
    """A forward and a backward pass.

    Attributes:
        forward: the outputs of the program, then the other values that are kept.
        backward: the gradients.
        saved: for each input of ``backward`` that the forward pass keeps, by name: its output in
            ``forward``.
        gradients: for each name of ``wrt``: the output of ``backward``, or the name of the input of
            ``backward`` that it equals (``x + r`` passes its cotangent on unchanged).
        cotangents: for each input of ``backward`` that is a cotangent, by name: the program's
            output it belongs to.
    """

    forward: KernelGraph
    backward: KernelGraph
    saved: dict[str, int]
    gradients: dict[str, int | str]
    cotangents: dict[str, int]


def grad(graph: KernelGraph, wrt: Names | None = None, outputs: Names | None = None) -> KernelGraph:
    """The gradients of a program, as a kernel graph that computes everything from the inputs.

    Use `split` where the forward pass may keep values.

    Args:
        graph: any kernel graph.
        wrt: inputs, by name or as tensors; None is all of them but integers.
        outputs: outputs whose cotangents are given, by name or as tensors; None is all outputs of
            the graph that depend on ``wrt``, but places (`argmax`), which have none.

    Returns:
        A kernel graph. Its inputs are those of ``graph`` that it needs, then the cotangent of each
        output, with its shape, called ``d`` and its name (``dt5``). Its outputs are the gradients
        of ``wrt``, in that order, in the element types of the inputs. A gradient has the shape of
        its input, with extents of 1 in front where the input was broadcast to more dimensions:
        that of a bias ``[N]`` added to ``[M, N]`` is ``[1, N]``.

    Raises:
        GraphError: an unknown name, an input that no output depends on, a gradient that is one of
            the inputs or another gradient (``x + r``), a derivative that needs an extent which is
            known only at the call.
    """
    joint = _Joint.of("grad", graph, wrt, outputs)
    backward, _, gradients = joint.backward({})
    _refuse_equal(gradients)
    return backward


def joint(graph: KernelGraph, wrt: Names | None = None) -> KernelGraph:
    """A program and its gradients as one kernel graph, in which every value is computed once.

    Arguments and errors are those of `grad`; outputs are those of ``graph``, then the gradients.
    """
    both = _Joint.of("joint", graph, wrt, None)
    outputs = [both.values[i] for i in graph.outputs]
    made, _, gradients = both.backward({}, outputs)
    _refuse_equal(gradients)
    return made


def split(
    graph: KernelGraph,
    wrt: Names | None = None,
    save: str | Sequence[str | Tensor] = "auto",
    outputs: Names | None = None,
) -> Split:
    """A forward pass that keeps values, and the backward pass that uses them.

    Args:
        graph: any kernel graph.
        wrt: as for `grad`.
        save: ``"none"``: compute everything again from the inputs. ``"auto"``: keep small or
            expensive values, the last such value on the way to each use:

            * results of reductions and products whose last extent is 1 (rstd, a maximum), but for
              those of products whose rows are computed and reduced again;
            * products over more than ``FLOPS_PER_BYTE * itemsize`` elements (344 in 16 bits):
              computing one element again takes longer than writing and reading it, which is why
              the scores of attention, over a head dimension, are computed again;
            * outputs that contain a product, which the caller has anyway, if keeping them spares
              computing that product again.

            Element-wise results are computed again from these. Otherwise the values to keep:
            tensors of ``graph``, or names of values inside of its operators (``"rstd"``; what has
            no name of its own is called by its operator, the second one ``"exp2"``).
        outputs: as for `grad`.

    Returns:
        See `Split`. Inputs of ``backward``: those of ``graph`` that it needs, the saved values,
        the cotangents. Saved statistics of rows are float32, but for outputs of ``graph`` and
        operands of products.

    Raises:
        GraphError: as for `grad`, but that gradients may be equal; or a value to keep that the
            backward pass does not use.
    """
    joint = _Joint.of("split", graph, wrt, outputs)
    kept = choose(joint.reuse(), save)
    joint.store(kept)
    backward, used, gradients = joint.backward(kept)
    forward, positions = joint.forward(used)
    given = {backward.nodes[i].name for i in backward.inputs}
    cotangents = {name: n for name, n in joint.ends.items() if name in given}
    return Split(forward, backward, positions, gradients, cotangents)


@dataclass
class _Joint:
    """A program and its derivative in one graph.

    Attributes:
        graph: the program.
        both: program and derivative.
        values: node of ``both`` for each node of the program.
        inputs: node of ``both`` and name of each input.
        cotangents: the same for the cotangents of outputs.
        ends: the program's output that each cotangent belongs to, by the cotangent's name.
        gradients: node of ``both`` for each name of ``wrt``.
        call: the public function, for messages.
    """

    graph: KernelGraph
    call: str
    both: Derivation = field(default_factory=Derivation)
    values: dict[int, int] = field(default_factory=dict)
    inputs: list[tuple[int, str]] = field(default_factory=list)
    cotangents: list[tuple[int, str]] = field(default_factory=list)
    ends: dict[str, int] = field(default_factory=dict)
    gradients: dict[str, int] = field(default_factory=dict)

    @staticmethod
    def of(call: str, graph: KernelGraph, wrt: Names | None, outputs: Names | None) -> _Joint:
        """Differentiate a program with respect to some inputs."""
        if not isinstance(graph, KernelGraph):
            raise GraphError(f"{call}({type(graph).__name__}): give it a kernel graph")
        if not graph.outputs:
            raise GraphError(f"{call}: the graph has no output; call mark_output(tensor) first")
        joint = _Joint(graph, call)
        joint._copy()
        targets = _find(call, graph, "wrt", wrt, _real_inputs(graph))
        active = _depending(graph, set(targets))
        ends = _find(call, graph, "outputs", outputs, graph.outputs)
        if outputs is None:
            ends = [i for i in ends if i in active]
        for i in ends:
            if i not in active:
                raise GraphError(
                    f"{call}: output {graph.tensor(i)!r} does not depend on "
                    f"{_listed(graph, targets)}; leave it out of outputs"
                )
        joint._take(targets, joint._differentiate(active, joint._cotangents(ends)))
        return joint

    # ------------------------------------------------------------------------- differentiation

    def _copy(self) -> None:
        """Copy the program.
        Composite operators are expanded, so that derivatives can share their intermediate
        values."""
        g, needed = self.both, self.graph.needed(self.graph.outputs)
        with g.verbatim():
            for i, n in enumerate(self.graph.nodes):
                if n.operator == INPUT:
                    g.nodes.append(n)
                    self.values[i] = len(g.nodes) - 1
                    self.inputs.append((self.values[i], n.name))
                elif i in needed:
                    args = self._operands(i)
                    op, attributes = lookup(n.operator), dict(n.attributes)
                    value = (
                        op.expand(g, args, attributes)
                        if op.composite
                        else g.apply(n.operator, *args, **attributes)
                    )
                    self.values[i] = value.index
        # if several outputs are one value, the first gives the name
        ends = reversed(self.graph.outputs)
        g.types |= {self.values[i]: self.graph.nodes[i].dtype for i in ends}
        outputs = {self.values[i] for i in self.graph.outputs}
        for i in outputs:
            before = g.nodes[i].inputs
            if g.nodes[i].facets.permutes and before[0] not in outputs and not self._rounded(i):
                g.stored[before[0]] = i

    def _rounded(self, i: int) -> bool:
        """True if a value is an output that is rounded to another type than it is computed in."""
        own = self.both.nodes[i].dtype
        return self.both.types.get(i, own) not in (own, float32)

    def _operands(self, i: int) -> list[Tensor]:
        return [self.both.tensor(self.values[j]) for j in self.graph.nodes[i].inputs]

    def _cotangents(self, ends: list[int]) -> dict[int, Tensor]:
        """An input for the cotangent of each output, by node of the program."""
        result: dict[int, Tensor] = {}
        used = {name for _, name in self.inputs}
        for i in ends:
            t = self.graph.tensor(i)
            name = f"d{t.name}"
            while name in used:
                name += "_"
            used.add(name)
            result[i] = self.both.new_input(t.shape, t.dtype, name)
            self.cotangents.append((result[i].index, name))
            self.ends[name] = self.graph.outputs.index(i)
        return result

    def _differentiate(self, active: set[int], known: dict[int, Tensor]) -> dict[int, Tensor]:
        """Cotangents of all values, from the outputs backwards."""
        for i in reversed(range(len(self.graph.nodes))):
            if i in known and self.graph.nodes[i].operator != INPUT:
                for j, t in self._contributions(i, active, known[i]):
                    known[j] = self._sum(j, known[j], t) if j in known else t
        return known

    def _sum(self, i: int, a: Tensor, b: Tensor) -> Tensor:
        """Two contributions to the cotangent of a value, added in float32 if that is its type."""
        if self.both.nodes[self.values[i]].dtype == float32:
            a, b = (self.both.converted(t, float32) for t in (a, b))
        return self.both.add(a, b)

    def _take(self, targets: list[int], known: dict[int, Tensor]) -> None:
        """Take the cotangents of inputs as the gradients."""
        g = self.both
        for i in targets:
            x = self.graph.tensor(i)
            if i not in known:
                raise GraphError(
                    f"{self.call}: no output depends on {x!r} (or only through step, whose "
                    "derivative is zero); leave it out of wrt"
                )
            gradient = g.full(known[i], g.tensor(self.values[i]))
            self.gradients[x.name] = self._of_type(gradient, x.dtype).index

    def _of_type(self, t: Tensor, dtype: DType) -> Tensor:
        """A gradient in the type of its input.
        A value that is the gradient of inputs of different types (``x + w``) exists once for each
        type."""
        g = self.both
        given = t.node.operator == INPUT
        if (t.dtype if given else g.types.setdefault(t.index, dtype)) == dtype:
            return t
        one = g.apply("constant", value=1.0)
        return self._of_type(g.once("mul", [t, one], {}), dtype)

    def _contributions(self, i: int, active: set[int], dy: Tensor) -> list[tuple[int, Tensor]]:
        """Contributions of node i to the cotangents of its operands."""
        node, args = self.graph.nodes[i], [self.both.again(t) for t in self._operands(i)]
        op, y = lookup(node.operator), self.both.tensor(self.values[i])
        if op.one_type or op.cuts:
            dy = self.both.converted(dy, y.dtype)
        parts = op.derivative(self.both, args, dict(node.attributes), y, dy)
        return [
            (j, self.both.unbroadcast(t, y, a, op.elementwise))
            for j, a, t in zip(node.inputs, args, parts, strict=True)
            if j in active and t is not None
        ]

    # ------------------------------------------------------------------------------ two programs

    def backward(
        self, kept: dict[int, str], outputs: Sequence[int] = ()
    ) -> tuple[KernelGraph, dict[int, str], dict[str, int | str]]:
        """The backward pass, after ``outputs`` that it computes as well.
        With the kept values that it uses, and the places of the gradients."""
        given = {**dict(self.inputs), **kept, **dict(self.cotangents)}
        gradients = (i for i in self.gradients.values() if i not in given)
        roots = list(dict.fromkeys((*outputs, *gradients)))
        nodes = self.both.needed(roots, set(given))
        used = {j for i in nodes for j in self.both.nodes[i].inputs} | set(self.gradients.values())
        inputs = [(i, name) for i, name in given.items() if i in used]
        places: dict[str, int | str] = {
            name: given[i] if i in given else roots.index(i) for name, i in self.gradients.items()
        }
        graph = self.both.extract(inputs, roots)
        fates = fates_of(self.both)
        hidden = {
            n: found
            for n, (i, _) in enumerate(inputs)
            if (found := fates[i]) is not None and found.hidden
        }
        saved = {i: name for i, name in kept.items() if i in used}
        return guarded_graph(graph, hidden), saved, places

    def reuse(self) -> Reuse:
        """The values that the forward pass could keep for the backward pass."""
        return Reuse(
            self.both,
            inputs=dict((*self.inputs, *self.cotangents)),
            cotangents={i for i, _ in self.cotangents},
            outputs={v for i in self.graph.outputs if not self._rounded(v := self.values[i])},
            gradients=list(self.gradients.values()),
            values={(self.graph, i): v for i, v in self.values.items()},
        )

    def store(self, kept: dict[int, str]) -> None:
        """Choose the element types in which the forward pass keeps values.

        Their own, whatever a value is rounded to as an output of the program. Statistics of rows
        are float32, as between the kernels of a program, but for operands of products, which have
        one element type. What such an operand is computed from may be larger than 16 bits hold:
        of 1 / sqrt(x^2 + 1e-5) the cube.
        """
        g = self.both
        for i in kept:
            if self._rounded(i):
                del g.types[i]
        nodes = g.needed(self.gradients.values(), {i for i, _ in self.inputs} | set(kept))
        operands = set[int]()
        for i in sorted(nodes, reverse=True):
            n = g.nodes[i]
            if lookup(n.operator).one_type or (n.facets.permutes and i in operands):
                operands.update(n.inputs)
        for i in kept.keys() - operands:
            if g.nodes[i].shape[-1:] == (1,):
                g.types.setdefault(i, float32)

    def forward(self, kept: dict[int, str]) -> tuple[KernelGraph, dict[str, int]]:
        """The program with further outputs, and the output that holds each kept value."""
        outputs = [self.values[i] for i in self.graph.outputs]
        types = [self.graph.nodes[i].dtype for i in self.graph.outputs]
        own = {i: self.both.types.get(i, self.both.nodes[i].dtype) for i in kept}
        rounded = [own.get(i, dtype) != dtype for i, dtype in zip(outputs, types, strict=True)]
        if not set(kept) - set(outputs) and not any(rounded):
            return self.graph, {name: outputs.index(i) for i, name in kept.items()}
        for n, dtype in enumerate(types):
            while rounded[n] or outputs[n] in outputs[:n]:
                outputs[n], rounded[n] = self._once_more(outputs[n], dtype), False
        outputs += [i for i in kept if i not in outputs]
        places = {name: outputs.index(i) for i, name in kept.items()}
        return self.both.extract(self.inputs, outputs), places

    def _once_more(self, i: int, dtype: DType) -> int:
        """Copy a value that is an output already, so that it can be another output too."""
        one = self.both.apply("constant", value=1.0)
        again = self.both.once("mul", [self.both.tensor(i), one], {}).index
        self.both.types[again] = dtype
        return again


def reached(graph: KernelGraph, wrt: Sequence[str] | None = None) -> tuple[str, ...]:
    """Names of the inputs that have a gradient.
    An output depends on each of them, not only through operators whose derivative is zero
    everywhere.

    Args:
        graph: any.
        wrt: the inputs to consider; None is all but integers.

    Raises:
        GraphError: as for `grad`: a derivative that needs an extent known only at the call.
    """
    joint = _Joint(graph, "grad")
    inputs = [i for i in _real_inputs(graph) if wrt is None or graph.nodes[i].name in wrt]
    joint._copy()
    active = _depending(graph, set(inputs))
    known = joint._differentiate(
        active, joint._cotangents([i for i in graph.outputs if i in active])
    )
    return tuple(graph.nodes[i].name for i in inputs if i in known)


def _real_inputs(graph: KernelGraph) -> list[int]:
    """The inputs that are not integers: lengths, tables and labels have no gradient."""
    return [i for i in graph.inputs if not graph.nodes[i].dtype.integer]


def _find(
    call: str, graph: KernelGraph, argument: str, given: Names | None, known: list[int]
) -> list[int]:
    """Nodes of the program, given by name or as tensors; None is all nodes that may be given."""
    if given is None:
        return list(known)
    if not isinstance(given, str | Tensor | Iterable):
        raise GraphError(
            f"{call}({argument}={shown(given)}): give names or tensors, or None for all"
        )
    items = [given] if isinstance(given, str | Tensor) else list(given)
    names = {graph.nodes[i].name: i for i in known}
    integers = {n.name: i for i, n in enumerate(graph.nodes) if n.dtype.integer}
    found: list[int] = []
    for item in items:
        i = (
            item.index
            if isinstance(item, Tensor) and item.graph is graph
            else ((names | integers).get(str(item)))
        )
        if i is not None and graph.nodes[i].dtype.integer:
            raise GraphError(
                f"{call}({argument}={item!r}): {graph.tensor(i)!r} has no gradient; leave it out"
            )
        if i is None or i not in known:
            kind = "an input" if argument == "wrt" else "an output"
            raise GraphError(
                f"{call}({argument}={item!r}): is not {kind} of the graph; it has: "
                f"{', '.join(names) or 'none'}"
            )
        if i in found:
            raise GraphError(f"{call}({argument}=...): {graph.nodes[i].name} is there twice")
        found.append(i)
    if not found:
        raise GraphError(f"{call}({argument}=[]): name at least one, or None for all")
    return found


def _depending(graph: KernelGraph, on: set[int]) -> set[int]:
    """All nodes that are computed from the given ones, but places, and these themselves."""
    found = set(on)
    for i, n in enumerate(graph.nodes):
        if found & set(n.inputs) and not n.dtype.integer:
            found.add(i)
    return found


def _listed(graph: KernelGraph, nodes: list[int]) -> str:
    return " or ".join(graph.nodes[i].name for i in nodes)


def _refuse_equal(gradients: dict[str, int | str]) -> None:
    """Refuse gradients that equal an input or each other: a graph computes each output, once."""
    first: dict[int | str, str] = {}
    for name, place in gradients.items():
        other = f"that of {first[place]}" if place in first else f"its input {place}"
        if place in first or isinstance(place, str):
            rest = [n for n in gradients if n != name]
            raise GraphError(
                f"grad: the gradient of {name} is {other}, and an output has to be something new; "
                f"use wrt={rest}, or split, which says so in gradients"
            )
        first[place] = name
