"""The check of outputs: one rule, applied before timing and again afterwards.

FlashAttention's rule: the error against float64 may be twice PyTorch's own error in the same
element type, plus two units in the last place. It is applied twice, to the largest error and to
the root mean square, so that neither one bad element nor a small error everywhere passes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

FACTOR = 2.0  # times PyTorch's error
ULPS = 2.0  # plus this many units in the last place


@dataclass(frozen=True)
class Error:
    """Distance of a tensor from its reference; NaN when any element is NaN."""

    largest: float  # largest absolute difference
    rms: float  # root mean square difference
    relative: float  # norm of the difference over norm of the reference


@dataclass(frozen=True)
class Expected:
    """The expected value of one output.

    ``reference`` is float64 and holds only the rows ``rows`` (indices into the first dimension of
    the output of extents ``dims``), or all of it when ``rows`` is None.
    """

    reference: torch.Tensor
    torch_error: Error
    dims: tuple[int, ...]
    dtype: torch.dtype
    rows: torch.Tensor | None = None
    wider: bool = False  # float32 is accepted too

    def select(self, value: torch.Tensor) -> torch.Tensor:
        """The part of an output that the reference covers."""
        return value if self.rows is None else value[self.rows]


@dataclass(frozen=True)
class Verdict:
    """Result of a check: ``reason`` is empty when it passed.

    ``relative_error`` is the worst over the outputs; ``torch_relative_error`` is PyTorch's.
    ``errors`` are the relative errors of the outputs, one by one.
    """

    passed: bool
    relative_error: float
    torch_relative_error: float
    reason: str = ""
    errors: tuple[float, ...] = ()


def ulp(scale: float, dtype: torch.dtype) -> float:
    """One unit in the last place of ``dtype`` for numbers of magnitude ``scale``.

    Below the smallest normal number the spacing is constant; NaN and infinity have none (NaN).
    """
    info = torch.finfo(dtype)
    if not math.isfinite(scale):
        return math.nan
    scale = max(abs(scale), info.tiny)
    return info.eps * 2.0 ** math.floor(math.log2(scale))


def measure_error(value: torch.Tensor, reference: torch.Tensor) -> Error:
    """Compare with a float64 reference of the same shape."""
    difference = value.double() - reference
    norm = reference.norm().item()
    distance = difference.norm().item()
    return Error(
        largest=difference.abs().max().item(),
        rms=distance / math.sqrt(reference.numel()),
        relative=distance / norm if norm > 0 else distance,
    )


def check_outputs(values: Sequence[torch.Tensor], expected: Sequence[Expected]) -> Verdict:
    """Apply the rule to every output; NaN and infinity never pass, whatever the reference holds."""
    if len(values) != len(expected):
        reason = f"{len(values)} outputs, expected {len(expected)}"
        return Verdict(False, math.nan, math.nan, reason)
    errors, reasons = [], []
    for i, (value, wanted) in enumerate(zip(values, expected, strict=True)):
        error, reason = _check_one(value, wanted)
        errors.append(error.relative)
        if reason:
            reasons.append(f"output {i}: {reason}")
    return Verdict(
        passed=not reasons,
        relative_error=_worst(errors),
        torch_relative_error=_worst([w.torch_error.relative for w in expected]),
        reason="; ".join(reasons),
        errors=tuple(errors),
    )


def _worst(errors: Sequence[float]) -> float:
    return math.nan if any(math.isnan(e) for e in errors) else max(errors, default=0.0)


def _check_one(value: torch.Tensor, wanted: Expected) -> tuple[Error, str]:
    nothing = Error(math.nan, math.nan, math.nan)
    if tuple(value.shape) != wanted.dims:
        return nothing, f"shape {list(value.shape)}, expected {list(wanted.dims)}"
    if value.dtype != wanted.dtype and not (wanted.wider and value.dtype == torch.float32):
        return nothing, f"dtype {value.dtype}, expected {wanted.dtype}"
    bad = value.numel() - int(torch.isfinite(value).sum())
    if bad:
        return nothing, f"{bad} of {value.numel()} elements are not finite (or were not written)"
    error = measure_error(wanted.select(value), wanted.reference)
    peer, reference = wanted.torch_error, wanted.reference
    limits = (
        ("largest error", error.largest, peer.largest, reference.abs().max().item()),
        ("rms error", error.rms, peer.rms, reference.square().mean().sqrt().item()),
    )
    for what, ours, theirs, scale in limits:
        limit = FACTOR * theirs + ULPS * ulp(scale, wanted.dtype)
        if not ours <= limit:  # also true for NaN
            return error, f"{what} {ours:.3g} above {limit:.3g} (PyTorch has {theirs:.3g})"
    return error, ""


def worst_of(verdicts: Sequence[Verdict]) -> Verdict:
    """The worst of several checks; the reason is the first one given."""
    return Verdict(
        passed=all(v.passed for v in verdicts),
        relative_error=_worst([v.relative_error for v in verdicts]),
        torch_relative_error=_worst([v.torch_relative_error for v in verdicts]),
        reason=next((v.reason for v in verdicts if v.reason), ""),
        errors=tuple(map(_worst, zip(*(v.errors for v in verdicts), strict=False))),
    )


def poison(tensors: Sequence[torch.Tensor]) -> None:
    """Fill with NaN, so that elements that are never written are detected."""
    for tensor in tensors:
        tensor.fill_(math.nan)
