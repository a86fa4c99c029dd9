"""Pooling of windows that do not overlap, as reductions of parts of dimensions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten


def _windows(x: Tensor, kernel: Sequence[int], stride: Sequence[int]) -> Tensor | None:
    """The windows side by side, ``[N, C, out.., kernel..]``.
    None if they overlap, have gaps, or leave elements out."""
    first = x.dim() - len(kernel)
    pairs = list(zip(x.shape[first:], kernel, strict=True))
    if list(kernel) != list(stride) or any(not isinstance(n, int) or n % k for n, k in pairs):
        return None
    parts = x.reshape(*x.shape[:first], *(n for e, k in pairs for n in (e // k, k)))
    inner = range(first + 1, parts.dim(), 2)
    return parts.movedim(list(inner), list(range(-len(kernel), 0)))


def _each(values: int | Sequence[int], dims: int) -> list[int]:
    """A number for each dimension; one stands for all."""
    found = [values] if isinstance(values, int) else list(values)
    return found * dims if len(found) == 1 else found


def _average(
    dims: int, x: Tensor, kernel_size: Any, stride: Any = (), padding: Any = 0,
    ceil_mode: bool = False, count_include_pad: bool = True, divisor_override: int | None = None,
) -> Any:  # fmt: skip
    """``avg_pool`` as a mean; NotImplemented for windows that `_windows` does not know."""
    del ceil_mode, count_include_pad  # of what is beyond the ends
    kernel = _each(kernel_size, dims)
    windows = _windows(x, kernel, _each(stride, dims) or kernel)
    if windows is None or any(_each(padding, dims)) or divisor_override is not None:
        return NotImplemented
    return windows.mean(tuple(range(-dims, 0)))


def _largest(
    dims: int, x: Tensor, kernel_size: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1,
    ceil_mode: bool = False,
) -> Any:  # fmt: skip
    """``max_pool`` as a maximum along one dimension.
    Its gradient goes to the first of equal elements, too. NotImplemented for windows that
    `_windows` does not know."""
    del ceil_mode
    kernel = _each(kernel_size, dims)
    windows = _windows(x, kernel, _each(stride, dims) or kernel)
    alone = not any(_each(padding, dims)) and all(d == 1 for d in _each(dilation, dims))
    if windows is None or not alone:
        return NotImplemented
    return windows.flatten(-dims).max(-1).values


def _adaptive(dims: int, x: Tensor, output_size: Any) -> Any:
    """``adaptive_avg_pool`` to extents that divide those of the input; else NotImplemented."""
    out, extents = _each(output_size, dims), x.shape[x.dim() - dims :]
    if any(not isinstance(n, int) or n % o for n, o in zip(extents, out, strict=True)):
        return NotImplemented
    return _average(dims, x, [n // o for n, o in zip(extents, out, strict=True)])


def _largest_of_all(dims: int, x: Tensor, output_size: Any) -> Any:
    """``adaptive_max_pool`` to one element and its place, as `_largest`; else NotImplemented."""
    if any(n != 1 for n in _each(output_size, dims)):
        return NotImplemented
    found = x.flatten(-dims).max(-1)
    return tuple(t.reshape(*t.shape, *[1] * dims) for t in found)


#: formulas of operators, by which a program is decomposed
POOLING: dict[Any, Callable[..., Any]] = {
    operator.default: partial(formula, dims)
    for formula, operators in (
        (_average, (_aten.avg_pool1d, _aten.avg_pool2d, _aten.avg_pool3d)),
        (_largest, (_aten.max_pool1d, _aten.max_pool2d, _aten.max_pool3d)),
        (_adaptive, (_aten.adaptive_avg_pool1d, _aten.adaptive_avg_pool2d)),
    )
    for dims, operator in enumerate(operators, 1)
} | {
    _aten.adaptive_max_pool2d.default: partial(_largest_of_all, 2),
    _aten.adaptive_max_pool3d.default: partial(_largest_of_all, 3),
}
