"""Floating point: muGraphs run with PyTorch, and the acceptance rule for compiled kernels.

`execute` is the meaning of a muGraph in numbers, tile by tile, without a GPU; `compare` checks it
against the kernel graph in float64. `acceptable` is the one rule for the output of any kernel: its
error against float64 may be twice that of PyTorch in the same element type, plus 2 ulp (the rule of
FlashAttention's tests).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import floor, isfinite, log2
from typing import Any

import numpy as np
import torch

from cutesuper.errors import ShapeError
from cutesuper.ir.block import KernelStep, MuGraph
from cutesuper.ir.border import Place, inside_mugraph
from cutesuper.ir.check import check_mugraph
from cutesuper.ir.dims import extent, show_shape
from cutesuper.ir.dtypes import as_dtype
from cutesuper.ir.evaluate import evaluate
from cutesuper.ir.graph import KernelGraph
from cutesuper.ir.unseen import guarded_mugraph
from cutesuper.verify.equivalence import check_interface, evaluate_mugraph
from cutesuper.verify.extents import real_sizes
from cutesuper.verify.integers import Integers, draw_integers
from cutesuper.verify.narrowing import product_type
from cutesuper.verify.rounding import RoundingRun
from cutesuper.verify.tiles import CHUNK_ELEMENTS
from cutesuper.verify.torchdomain import TorchDomain, TorchValue


def execute(
    mu: MuGraph,
    inputs: Sequence[torch.Tensor],
    dtype: torch.dtype = torch.float64,
    rounded: bool = False,
) -> list[torch.Tensor]:
    """Run the block programs of a muGraph with PyTorch, tile by tile.
    With its kernels' guards for hidden rows.

    Args:
        mu: a legal muGraph.
        inputs: one tensor for each input, of its shape (symbolic extents: of their hint).
        dtype: type of all arithmetic.
        rounded: round as kernels do: operands of matrix products to the products' operand type, and
            stored values to the type of their tensor. Rows that a kernel shifts next to zero
            (`cutesuper.skeletons.matmul.shift`) are not shifted here.

    Returns:
        The outputs in ``dtype``.

    Raises:
        GraphError: an illegal muGraph.
        ShapeError: an input of another shape.
    """
    check_mugraph(mu)
    if len(inputs) != len(mu.inputs):
        raise ShapeError(f"execute: {len(inputs)} tensors for {len(mu.inputs)} inputs")
    whole, tensors = mu, dict[str, Any]()
    mu, border = inside_mugraph(whole)
    for name, place in zip(mu.inputs, border.inputs, strict=True):
        x = inputs[place.tensor]
        if place.starts:
            x = x[place.box]
        shape = tuple(map(extent, mu.tensors[name].shape))
        if tuple(x.shape) != shape:
            raise ShapeError(
                f"execute: input {name} has shape {list(x.shape)}, expected {list(shape)}"
            )
        tensors[name] = _numbers(x, mu.tensors[name].dtype.integer, dtype)
    mu = guarded_mugraph(mu)
    if rounded:
        found = _rounded(mu, tensors, dtype)
    else:
        found = evaluate_mugraph(TorchDomain(dtype), mu, real_sizes(mu), tensors, CHUNK_ELEMENTS)
    made = [found[name].data for name in mu.outputs]
    return put_together(whole, made, border.outputs)


def put_together(
    mu: MuGraph, made: list[torch.Tensor], places: Sequence[Place]
) -> list[torch.Tensor]:
    """The outputs of a muGraph, from their parts."""
    if not any(p.starts for p in places):
        return made
    shapes = [tuple(map(extent, mu.tensors[name].shape)) for name in mu.outputs]
    kinds = {p.tensor: x.dtype for x, p in zip(made, places, strict=True)}
    outputs = [made[0].new_empty(shape, dtype=kinds[n]) for n, shape in enumerate(shapes)]
    for x, place in zip(made, places, strict=True):
        outputs[place.tensor][place.box or ...] = x
    return outputs


def _rounded(mu: MuGraph, tensors: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """All tensors, rounded as kernels round."""

    def stored(name: str, x: Any) -> Any:
        kind = mu.tensors[name].dtype
        return x if kind.integer else _in_type(x, kind.torch)

    domain, known = TorchDomain(dtype), {n: stored(n, x) for n, x in tensors.items()}
    for step, program in zip(mu.steps, real_sizes(mu).programs, strict=True):
        visit = _multiplied(step, mu)
        run = RoundingRun(domain, program, known, visit, CHUNK_ELEMENTS)
        known |= {n: stored(n, x) for n, x in run.run().items()}
    return known


def _multiplied(step: KernelStep, mu: MuGraph) -> Callable[[int, TorchValue], TorchValue]:
    kind = product_type(step, mu).torch
    return lambda _, x: _in_type(x, kind)


def _in_type(x: TorchValue, kind: torch.dtype) -> TorchValue:
    """x rounded to an element type, in the type of the arithmetic."""
    return TorchValue(x.dims, x.data.to(kind).to(x.data.dtype))


def _numbers(x: torch.Tensor, integers: bool, dtype: torch.dtype) -> TorchValue | Integers:
    if integers:
        return Integers((), x.cpu().numpy().astype(np.int64))
    return TorchValue(tuple(map(str, range(x.dim()))), x.to(dtype))


# -------------------------------------------------------------------------------------- the rule


@dataclass(frozen=True)
class Report:
    """Verdict on an output, with the figures behind it.

    Attributes:
        ok: the verdict; also the truth value.
        max_abs: largest absolute error.
        relative: Frobenius norm of the error over that of the reference.
        allowed_max_abs: limit of ``max_abs``.
        allowed_relative: limit of ``relative``.
        message: text for people.
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
        out: a kernel's output.
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
        graph: the definition.
        mu: a legal muGraph with the graph's inputs and outputs.
        seed: of the inputs.
        rtol: allowed error, relative to the largest element and to the Frobenius norm.
        stress: if the graph has a maximum, compare on inputs of magnitude 1000 as well. The
            maximum under an exponential cancels (safe softmax), so a muGraph that leaves it out is
            equal, but overflows here.

    Raises:
        GraphError: an illegal muGraph, or one with other inputs or outputs than the graph.
    """
    check_mugraph(mu)
    check_interface(graph, mu)
    report = _compare_at(graph, mu, seed, rtol, 1.0)
    if report and stress and any(n.facets.selects for n in graph.expanded().nodes):
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
        want = torch.where(finite, want, 0.0).double()
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
    """Description of wrong NaN and infinities in ``x``, or None."""
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
