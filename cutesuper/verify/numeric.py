"""Floating point: muGraphs run with PyTorch, and the rule by which compiled kernels are accepted.

`execute` is the meaning of a muGraph in numbers, tile by tile, without a GPU; `compare` checks it
against the kernel graph in float64. `acceptable` is the one rule for the output of any kernel: its
error against float64 may be twice that of PyTorch in the same element type, plus 2 ulp (the rule of
FlashAttention's tests).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import floor, isfinite, log2, prod
from string import ascii_letters
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cutesuper.errors import ShapeError
from cutesuper.graph.block import MuGraph
from cutesuper.graph.check import check_mugraph
from cutesuper.graph.dims import extent, show_shape
from cutesuper.graph.dtypes import as_dtype
from cutesuper.graph.evaluate import evaluate, hidden_difference
from cutesuper.graph.kernel import KernelGraph
from cutesuper.graph.operators import Attributes, Operator, lookup
from cutesuper.graph.unseen import guarded_mugraph
from cutesuper.verify.equivalence import check_interface, evaluate_mugraph
from cutesuper.verify.extents import real_sizes
from cutesuper.verify.integers import Integers, draw_integers
from cutesuper.verify.tiles import CHUNK_ELEMENTS, Mapped, Window


@dataclass(frozen=True, eq=False)
class TorchValue:
    """A tensor with named dimensions."""

    dims: tuple[str, ...]
    data: torch.Tensor


class TorchDomain:
    """PyTorch as the algebra of `cutesuper.verify.tiles.BlockRun`."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def elementwise(self, kind: str, args: list[TorchValue], attributes: Attributes) -> TorchValue:
        """The reference of the operator, operands aligned by name."""
        if kind == "constant":
            return self.constant(attributes["value"])
        dims = tuple(dict.fromkeys(d for x in args for d in x.dims))
        data = [_align(x, dims) for x in args]
        result = lookup(kind).reference(data, attributes)
        # -inf - -inf = -inf, see `cutesuper.graph.field`
        return TorchValue(dims, hidden_difference(result, data) if kind == "sub" else result)

    def add(self, x: TorchValue, y: TorchValue) -> TorchValue:
        """Sum of two values of the same dimensions."""
        return TorchValue(x.dims, x.data + _align(y, x.dims))

    def larger(self, x: TorchValue, y: TorchValue) -> TorchValue:
        """Maximum of two values of the same dimensions."""
        return TorchValue(x.dims, torch.maximum(x.data, _align(y, x.dims)))

    def div(self, x: TorchValue, y: TorchValue) -> TorchValue:
        """Quotient by a constant."""
        return TorchValue(x.dims, x.data / y.data)

    def constant(self, value: float) -> TorchValue:
        """A scalar."""
        return TorchValue((), torch.tensor(value, dtype=self.dtype))

    def sum(self, x: TorchValue, dims: Iterable[str], extents: Mapping[str, int]) -> TorchValue:
        """Sum; a dimension that x lacks multiplies by its extent."""
        over = tuple(dims)
        factor = prod(extents[d] for d in over if d not in x.dims)
        axes = [x.dims.index(d) for d in over if d in x.dims]
        total = x.data.sum(axes) if axes else x.data
        kept = tuple(d for d in x.dims if d not in over)
        return TorchValue(kept, total if factor == 1 else total * factor)

    def max(self, x: TorchValue, dims: Iterable[str], valid: Any = None) -> TorchValue:
        """Maximum over the elements that exist."""
        if valid is not None:
            x = self._where(x, valid, -torch.inf)
        over = [d for d in dims if d in x.dims]
        kept = tuple(d for d in x.dims if d not in over)
        axes = [x.dims.index(d) for d in over]
        return TorchValue(kept, x.data.amax(axes) if axes else x.data)

    def matmul(self, x: TorchValue, y: TorchValue, over: Iterable[str]) -> TorchValue:
        """Contraction by name."""
        names = dict.fromkeys((*x.dims, *y.dims))
        letter = dict(zip(names, ascii_letters, strict=False))
        dims = tuple(d for d in names if d not in set(over))
        left, right, out = ("".join(letter[d] for d in v) for v in (x.dims, y.dims, dims))
        return TorchValue(dims, torch.einsum(f"{left},{right}->{out}", x.data, y.data))

    def masked(self, x: TorchValue, valid: Any) -> TorchValue:
        """Zero where an element does not exist."""
        return self._where(x, valid, 0.0)

    def mask(
        self, x: TorchValue, names: tuple[str, ...], keep: NDArray[np.bool_], operator: Operator
    ) -> TorchValue:
        """What a masking operator makes of x, where ``keep`` has the dimensions ``names``."""
        return self._where(x, (names, keep), operator.fill)

    def literal(self, names: tuple[str, ...], numbers: NDArray[np.float64]) -> TorchValue:
        """Plain numbers."""
        return TorchValue(names, torch.from_numpy(numbers).to(self.dtype))

    def without_q(self, x: TorchValue) -> TorchValue:
        """There is only one kind of number here."""
        return x

    def gather(
        self, x: TorchValue, table: NDArray[np.int64], shape: tuple[int, ...]
    ) -> TorchValue:
        """Pages of x in the order of a table, as a tensor of this shape."""
        pages = x.data[torch.from_numpy(table).to(x.data.device)]
        return TorchValue(tuple(map(str, range(len(shape)))), pages.reshape(shape))

    def load(self, x: TorchValue, mapped: Sequence[Mapped], window: Window) -> TorchValue:
        """Tiles of a tensor, zero past its end."""
        names = tuple(p for m in mapped for p in m.parts)
        data = x.data.reshape([m.extent for m in mapped])
        beyond = [prod(m.extents) - m.extent for m in mapped]
        if any(beyond):
            data = torch.nn.functional.pad(data, [n for b in reversed(beyond) for n in (0, b)])
        data = data.reshape([n for m in mapped for n in m.extents])
        return TorchValue(names, data[_place(names, window)])

    def store(
        self, x: TorchValue, mapped: Sequence[Mapped], window: Window, into: TorchValue | None
    ) -> TorchValue:
        """Put tiles where they belong."""
        names = tuple(p for m in mapped for p in m.parts)
        if not window:
            return TorchValue(names, _align(x, names))
        if into is None:
            covered = [n for m in mapped for n in m.extents]
            into = TorchValue(names, torch.zeros(covered, dtype=self.dtype, device=x.data.device))
        into.data[_place(names, window)] = _align(x, names)
        return into

    def finish(self, x: TorchValue, mapped: Sequence[Mapped]) -> TorchValue:
        """The tensor behind stored tiles, without the padding."""
        data = x.data.reshape([prod(m.extents) for m in mapped])
        dims = tuple(str(i) for i in range(len(mapped)))
        return TorchValue(dims, data[tuple(slice(m.extent) for m in mapped)])

    def _where(
        self, x: TorchValue, valid: tuple[tuple[str, ...], NDArray[np.bool_]], other: float
    ) -> TorchValue:
        exists = torch.from_numpy(np.array(valid[1])).to(x.data.device)
        keep = _align(TorchValue(valid[0], exists), x.dims)
        return TorchValue(x.dims, torch.where(keep, x.data, other))


def _place(names: tuple[str, ...], window: Window) -> tuple[slice, ...]:
    return tuple(slice(*window[n]) if n in window else slice(None) for n in names)


def _align(x: TorchValue, dims: tuple[str, ...]) -> torch.Tensor:
    if x.dims == dims:
        return x.data
    data = x.data.permute([x.dims.index(d) for d in dims if d in x.dims])
    return data[tuple(slice(None) if d in x.dims else None for d in dims)]


def execute(
    mu: MuGraph, inputs: Sequence[torch.Tensor], dtype: torch.dtype = torch.float64
) -> list[torch.Tensor]:
    """Run the block programs of a muGraph with PyTorch, tile by tile, with the guards for hidden
    rows that its kernels have.

    Args:
        mu: a legal muGraph.
        inputs: one tensor for each input, of its shape (symbolic extents: of their hint).
        dtype: all arithmetic is done in it.

    Returns:
        The outputs in ``dtype``.

    Raises:
        GraphError: an illegal muGraph.
        ShapeError: an input of another shape.
    """
    check_mugraph(mu)
    if len(inputs) != len(mu.inputs):
        raise ShapeError(f"execute: {len(inputs)} tensors for {len(mu.inputs)} inputs")
    tensors: dict[str, Any] = {}
    for name, x in zip(mu.inputs, inputs, strict=True):
        shape = tuple(map(extent, mu.tensors[name].shape))
        if tuple(x.shape) != shape:
            raise ShapeError(
                f"execute: input {name} has shape {list(x.shape)}, expected {list(shape)}"
            )
        tensors[name] = _numbers(x, mu.tensors[name].dtype.integer, dtype)
    mu = guarded_mugraph(mu)
    found = evaluate_mugraph(TorchDomain(dtype), mu, real_sizes(mu), tensors, CHUNK_ELEMENTS)
    return [found[name].data for name in mu.outputs]


def _numbers(x: torch.Tensor, integers: bool, dtype: torch.dtype) -> TorchValue | Integers:
    if integers:
        return Integers((), x.cpu().numpy().astype(np.int64))
    return TorchValue(tuple(map(str, range(x.dim()))), x.to(dtype))


# -------------------------------------------------------------------------------------- the rule


@dataclass(frozen=True)
class Report:
    """Whether an output is acceptable, with the figures behind it.

    Attributes:
        ok: the verdict; also the truth value.
        max_abs: largest absolute error.
        relative: Frobenius norm of the error over that of the reference.
        allowed_max_abs: what ``max_abs`` may be.
        allowed_relative: what ``relative`` may be.
        message: for people.
    """

    ok: bool
    max_abs: float
    relative: float
    allowed_max_abs: float
    allowed_relative: float
    message: str

    def __bool__(self) -> bool:
        return self.ok


def acceptable(
    out: torch.Tensor, reference64: torch.Tensor, eager: torch.Tensor, dtype: Any
) -> Report:
    """The acceptance rule: error at most 2 x that of eager PyTorch, plus 2 ulp.

    Args:
        out: what a kernel computed.
        reference64: the same in float64.
        eager: the same by PyTorch in ``dtype``.
        dtype: element type of the output; one ulp is taken at the largest magnitude of the
            reference.

    Returns:
        A report. NaN and infinities pass only where the reference, rounded to ``dtype``, has the
        same; elsewhere errors are measured.
    """
    kind = as_dtype(dtype)
    ulp = kind.eps
    reference = reference64.detach().to(torch.float64)
    if out.shape != reference.shape:
        return _failed(f"shape {list(out.shape)}, expected {show_shape(tuple(reference.shape))}")
    if out.dtype != kind.torch:
        return _failed(f"element type {out.dtype}, expected {kind}")
    rounded = reference.to(kind.torch).to(torch.float64)
    odd = _nonfinite(out, rounded)
    if odd:
        return _failed(odd)
    finite = rounded.isfinite()
    want = torch.where(finite, reference, 0.0)
    error, relative = _errors(out, want, finite)
    eager_error, eager_relative = _errors(eager, want, finite & eager.isfinite().to(finite.device))
    top = float(want.abs().max()) if want.numel() else 0.0
    scale = 2.0 ** floor(log2(top)) if top > 0 else 0.0
    limit, relative_limit = 2 * eager_error + 2 * ulp * scale, 2 * eager_relative + 2 * ulp
    return _judge(error, relative, limit, relative_limit, "2 x eager + 2 ulp")


def compare(
    graph: KernelGraph, mu: MuGraph, seed: int = 0, rtol: float = 1e-9, stress: bool = True
) -> Report:
    """Run a muGraph and its kernel graph in float64 on normal inputs; the worst output counts.

    Args:
        graph: what to compute.
        mu: a legal muGraph with the graph's inputs and outputs.
        seed: of the inputs.
        rtol: allowed error, relative to the largest element and to the Frobenius norm.
        stress: where the graph has a maximum, compare on inputs of magnitude 1000 as well. The
            maximum under an exponential cancels (safe softmax), so a muGraph that leaves it out is
            equal, but overflows here.

    Raises:
        GraphError: an illegal muGraph, or one with other inputs or outputs than the graph.
    """
    check_mugraph(mu)
    check_interface(graph, mu)
    report = _compare_at(graph, mu, seed, rtol, 1.0)
    if report and stress and any(n.operator == "max" for n in graph.expanded().nodes):
        # scores of 1e6 carry errors of 1e-10, which an exponential makes relative ones
        report = _compare_at(graph, mu, seed, max(rtol, 1e-5), 1e3)
    return report


def _compare_at(
    graph: KernelGraph, mu: MuGraph, seed: int, rtol: float, magnitude: float
) -> Report:
    generator = torch.Generator().manual_seed(seed)
    shapes = {i: tuple(map(extent, graph.nodes[i].shape)) for i in graph.inputs}
    inputs = [
        _drawn(graph, i, shape, seed)
        if graph.nodes[i].dtype.integer
        else magnitude * torch.randn(shape, generator=generator, dtype=torch.float64)
        for i, shape in shapes.items()
    ]
    reports = []
    for name, want, found in zip(
        mu.outputs, evaluate(graph, inputs, torch.float64), execute(mu, inputs), strict=True
    ):
        odd = _nonfinite(found, want)
        if odd:
            return _failed(f"output {name}, inputs of magnitude {magnitude:g}: {odd}")
        finite = want.isfinite()
        want = torch.where(finite, want, 0.0)
        error, relative = _errors(found, want, finite)
        top = float(want.abs().max()) if want.numel() else 0.0
        rule = f"output {name}, inputs of magnitude {magnitude:g}, rtol {rtol:g}"
        reports.append(_judge(error, relative, rtol * top, rtol, rule))
    return min(reports, key=lambda r: (r.ok, -r.relative))


def _drawn(graph: KernelGraph, i: int, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    numbers = draw_integers(graph, i, shape, [seed, 0, i]).data
    return torch.from_numpy(numbers).to(graph.nodes[i].dtype.torch)


def _errors(x: torch.Tensor, want: torch.Tensor, finite: torch.Tensor) -> tuple[float, float]:
    """Largest absolute error and relative Frobenius norm, over the finite elements."""
    if not want.numel():
        return 0.0, 0.0
    difference = torch.where(finite, x.detach().to(want) - want, 0.0)
    norm, size = float(difference.norm()), float(want.norm())
    return float(difference.abs().max()), norm / size if size else norm


def _nonfinite(x: torch.Tensor, want: torch.Tensor) -> str | None:
    """What is wrong with the NaN and infinities of ``x``, if anything."""
    got = x.detach().to(want)
    same = (got.isnan() & want.isnan()) | (got == want)
    bad = ~torch.where(got.isfinite() & want.isfinite(), True, same)
    count = int(bad.sum())
    if not count:
        return None
    at = [int(i) for i in bad.nonzero()[0]]
    return (
        f"{count} of {bad.numel()} elements are NaN or infinite where the reference is not (or the "
        f"other way round), first at {at}: {float(got[tuple(at)])} for {float(want[tuple(at)])}"
    )


def _judge(error: float, relative: float, limit: float, relative_limit: float, rule: str) -> Report:
    ok = isfinite(error) and error <= limit and isfinite(relative) and relative <= relative_limit
    verdict = "within" if ok else "exceeds"
    return Report(
        ok,
        error,
        relative,
        limit,
        relative_limit,
        f"{rule}: error {verdict} the limit; max {error:.3g} (allowed {limit:.3g}), "
        f"relative {relative:.3g} (allowed {relative_limit:.3g})",
    )


def _failed(message: str) -> Report:
    return Report(False, float("inf"), float("inf"), 0.0, 0.0, message)
