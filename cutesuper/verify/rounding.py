"""Rounding to 16 bits in the kernels of a muGraph: its emulation, and a range check for float16.

A kernel computes in float32. It rounds the operands of its matrix products to the products' operand
type, and stored values to the type of their tensor. `RoundingRun` passes operands to a callback;
`check_rounding` refuses values that float16 cannot hold, by the rule of `cutesuper.ir.rounding`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cutesuper.errors import VerificationError
from cutesuper.ir.arraymath import Array
from cutesuper.ir.block import BlockOp, BlockProgram, KernelStep, MuGraph
from cutesuper.ir.border import inside, inside_mugraph
from cutesuper.ir.dtypes import DType, float16
from cutesuper.ir.graph import KernelGraph
from cutesuper.ir.operators.base import Attributes, Operator, lookup
from cutesuper.ir.rounding import Trials, fits, narrow, node_values, proportional
from cutesuper.verify.extents import SizeChooser, resized_graph
from cutesuper.verify.integers import Integers, Places, draw_integers
from cutesuper.verify.narrowing import computed_operands, narrows, product_type
from cutesuper.verify.tiles import BlockRun, Mapped, Window
from cutesuper.verify.torchdomain import TorchDomain, TorchValue, align

#: takes an operand of a product (operation and value), and returns the value to multiply
Visit = Callable[[int, Any], Any]


class RoundingRun(BlockRun):
    """A run of a block program with a callback for the operands of all products."""

    def __init__(
        self,
        a: Any,
        program: BlockProgram,
        tensors: Mapping[str, Any],
        visit: Visit,
        chunk_elements: int | None = None,
    ) -> None:
        super().__init__(a, program, tensors, set(), chunk_elements)
        self._visit = visit

    def _over(self, op: BlockOp, args: list[Any], window: Window) -> Any:
        if op.facets.contracts:
            args = [self._visit(i, x) for i, x in zip(op.inputs, args, strict=True)]
        return super()._over(op, args, window)


def check_rounding(graph: KernelGraph, mu: MuGraph) -> None:
    """Refuse a muGraph that rounds to float16 a value that float16 cannot hold.

    Args:
        graph: the definition.
        mu: a legal muGraph that computes it.

    Raises:
        VerificationError: names the value and the kernel.
    """
    if narrows(mu):
        _Check(inside(graph.expanded())[0], inside_mugraph(mu)[0]).run()


class _Check:
    """All trials of a muGraph and its graph, at small extents.

    A tensor between two kernels that is a value of the graph is drawn like an input, for the graph
    too: each kernel is judged by its own results on the tensors that it loads.
    """

    def __init__(self, graph: KernelGraph, mu: MuGraph) -> None:
        self.mu, self.narrow = mu, narrow(graph)
        self.sizes = SizeChooser(graph).small(mu, False)
        self.graph = resized_graph(graph, self.sizes.inputs)
        self.domain = _TrialDomain()

    def run(self) -> None:
        trials, plain = Trials(), _Plain()
        views = dict(self._views(plain))
        given = self._inputs(trials)
        tensors = {n: given[i] for n, i in zip(self.mu.inputs, self.graph.inputs, strict=True)}
        for name, nodes in views.items():
            spec = self.mu.tensors[name]
            x = trials.draw(name, self.sizes.tensors[name], spec.dtype, len(spec.shape))
            tensors[name] = x
            given |= {i: _transposed(x, _inverse(order)) for i, order in nodes.items()}
        multiplied = self._multiplied(given)
        for step, program in zip(self.mu.steps, self.sizes.programs, strict=True):
            read = {i for n in step.reads for i in views.get(n, ())} | {*self.graph.inputs}
            # what it computes for itself, though another kernel stores it, is not drawn
            own = self._multiplied({i: x for i, x in given.items() if i in read})
            found = self._kernel(step, program, tensors, [*multiplied, *own])
            for name, x in found.items():
                self._check_stored(step, name, x, views.get(name))
                tensors.setdefault(name, x)

    def _multiplied(self, given: Mapping[int, Any]) -> list[Array]:
        """The operands of the graph's products, where some of its values are given."""
        values = node_values(self.graph, self._with_pages(given))
        return [values[i] for n in self.graph.nodes if n.facets.contracts for i in n.inputs]

    def _kernel(
        self,
        step: KernelStep,
        program: BlockProgram,
        tensors: Mapping[str, Any],
        multiplied: Sequence[Array],
    ) -> dict[str, Array]:
        """The stored tensors of a kernel. Raises VerificationError."""
        wanted = computed_operands(program) if product_type(step, self.mu) == float16 else []

        def visit(i: int, x: TorchValue) -> TorchValue:
            value = _whole(x, program.ops[i])
            if (
                i in wanted
                and not fits(value)
                and not any(proportional(value, y) for y in multiplied)
            ):
                raise _refusal(
                    f"kernel {step.name}: operation {i} ({program.ops[i].kind}) is an "
                    "operand of a product"
                )
            return x

        loaded = self._loaded(step, tensors)
        run = RoundingRun(self.domain, program, loaded, visit)
        return {n: x.data.numpy() for n, x in run.run().items()}

    def _check_stored(
        self, step: KernelStep, name: str, x: Array, nodes: Mapping[int, Any] | None
    ) -> None:
        if name in self.mu.outputs or self.mu.tensors[name].dtype != float16:
            return
        may = fits(x) if nodes is None else not self.narrow.isdisjoint(nodes)
        if not may:
            raise _refusal(f"kernel {step.name}: {name} is stored for another kernel")

    # ---------------------------------------------------------------------------------- the draw

    def _inputs(self, trials: Trials | _Plain) -> dict[int, Any]:
        g, given = self.graph, dict[int, Any]()
        for i, shape in zip(g.inputs, self.sizes.inputs, strict=True):
            node = g.nodes[i]
            given[i] = (
                draw_integers(g, i, shape, [0, i])
                if node.dtype.integer
                else trials.draw(i, shape, node.dtype, len(shape))
            )
        return given

    def _with_pages(self, given: Mapping[int, Any]) -> dict[int, Array]:
        """The given values, and those gathered from them.
        Integers become ones, on which nothing depends."""
        full = {
            i: np.ones((1, *x.data.shape)) if isinstance(x, Integers) else x
            for i, x in given.items()
        }
        for i, node in enumerate(self.graph.nodes):
            if node.facets.gathers:
                cache, table = (given[j] for j in node.inputs)
                full[i] = cache[:, table.data].reshape(-1, *node.shape)
        return full

    def _loaded(self, step: KernelStep, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """The tensors that a kernel reads, and those that it puts rows into."""
        return {n: self._value(tensors[n]) for n in (*step.reads, *step.bases.values())}

    def _value(self, x: Any) -> Any:
        return x if isinstance(x, Integers) else TorchValue((), torch.from_numpy(x))

    def _views(self, plain: _Plain) -> Iterator[tuple[str, dict[int, tuple[int, ...]]]]:
        """The nodes of the graph that equal each stored tensor, with their orders of dimensions."""
        given = self._inputs(plain)
        tensors = {n: given[i] for n, i in zip(self.mu.inputs, self.graph.inputs, strict=True)}
        values = node_values(self.graph, self._with_pages(given))
        for step, program in zip(self.mu.steps, self.sizes.programs, strict=True):
            loaded = self._loaded(step, tensors)
            for name, x in RoundingRun(self.domain, program, loaded, _as_it_is).run().items():
                tensors[name] = x.data.numpy()
                found = {i: o for i, y in enumerate(values) if (o := _order(tensors[name], y))}
                if found:
                    yield name, found


class _Plain:
    """Draws tensors of magnitude 1, in one trial."""

    def draw(self, name: Any, shape: Sequence[int], dtype: DType, rank: int) -> Array:
        rng = np.random.default_rng([name, *shape])
        return rng.standard_normal((1, *shape))


def _whole(x: TorchValue, op: BlockOp) -> Array:
    """A value summed over the axes of which it is a partial result.
    Each block of a cluster multiplies a part of ``(X A) B``."""
    own = ("trial", *op.dims)
    parts = [n for n, part in enumerate(x.dims) if part.split(".")[0] not in own]
    return (x.data.sum(parts) if parts else x.data).numpy()


def _as_it_is(i: int, x: Any) -> Any:
    return x


def _order(x: Array, y: Array) -> tuple[int, ...] | None:
    """The order of y's dimensions in which y equals x; None if there is none."""
    if x.size != y.size or x.ndim != y.ndim:
        return None
    for order in permutations(range(x.ndim - 1)):
        moved = _transposed(y, order)
        if moved.shape == x.shape and np.allclose(moved, x, rtol=1e-9, atol=1e-12):
            return order
    return None


def _transposed(x: Array, order: Sequence[int]) -> Array:
    return x.transpose(0, *(1 + d for d in order))


def _inverse(order: Sequence[int]) -> list[int]:
    return [order.index(d) for d in range(len(order))]


def _refusal(what: str) -> VerificationError:
    return VerificationError(
        f"{what} as float16, which cannot hold it: of inputs of the order of 2^-12 or 2^12 it is "
        "too large, or loses its digits, and the graph rounds no such value; multiply what is "
        "loaded or normalized, store float32 between kernels, or use bfloat16"
    )


class _TrialDomain(TorchDomain):
    """All trials at once, as the first dimension of every tensor.
    Masks hide nothing, and weights of labels are 1, as in the graph's values: those of wrong labels
    are NaN."""

    def __init__(self) -> None:
        super().__init__(torch.float64)

    def elementwise(self, kind: str, args: list[TorchValue], attributes: Attributes) -> TorchValue:
        found = super().elementwise(kind, args, attributes)
        if not lookup(kind).hides:
            return found
        return TorchValue(found.dims, align(args[-1], found.dims).expand_as(found.data))

    def literal(self, names: tuple[str, ...], numbers: NDArray[np.float64]) -> TorchValue:
        return super().literal(names, np.ones_like(numbers))

    def load(self, x: TorchValue, mapped: Sequence[Mapped], window: Window) -> TorchValue:
        return super().load(x, [self._trials(x), *mapped], window)

    def store(
        self, x: TorchValue, mapped: Sequence[Mapped], window: Window, into: TorchValue | None
    ) -> TorchValue:
        if "trial" not in x.dims:  # it depends on integers alone, which all trials share
            x = TorchValue(("trial", *x.dims), x.data[None])
        return super().store(x, [self._trials(x), *mapped], window, into)

    def finish(self, x: TorchValue, mapped: Sequence[Mapped]) -> TorchValue:
        return super().finish(x, [self._trials(x), *mapped])

    def gather(
        self, x: TorchValue, integers: NDArray[np.int64], operator: Operator, shape: tuple[int, ...]
    ) -> TorchValue:
        return TorchValue((), x.data[:, torch.from_numpy(integers)].reshape(-1, *shape))

    def put(
        self,
        x: TorchValue,
        places: Places,
        rows: TorchValue,
        shape: tuple[int, ...],
    ) -> TorchValue:
        behind = replace(places, dims=tuple(d + 1 for d in places.dims))  # the trials
        return super().put(x, behind, rows, shape)

    def mask(
        self, x: TorchValue, names: tuple[str, ...], keep: NDArray[np.bool_], operator: Operator
    ) -> TorchValue:
        return x

    def _trials(self, x: TorchValue) -> Mapped:
        at = x.dims.index("trial") if "trial" in x.dims else 0
        n = int(x.data.shape[at])
        return Mapped(("trial",), (n,), n)
