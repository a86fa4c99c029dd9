"""Probing of modules: calls of copies on random numbers.
They determine what a module computes, and check what replaces it.

Probing has no side effects: hooks do not run, random number generators keep their state, and the
module itself is not called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from cutesuper.errors import CutesuperError
from cutesuper.torch.patch.replacement import Replacement, replace
from cutesuper.verify.numeric import acceptable

#: relative to the largest element of a row: float32 sums of 10,000 terms stay far below it, the
#: smallest mistakes (a variance over n - 1 elements) above it for rows of up to 50,000
TOLERANCE = 1e-5


class Failed(Exception):
    """A module is not a known one; the message says why."""


def drawn(*shape: int, seed: int, like: Tensor | None = None) -> Tensor:
    """Normal random numbers, always the same; of the type and on the device of a tensor."""
    generator = torch.Generator("cpu").manual_seed(seed)
    x = torch.randn(*shape, generator=generator, device="cpu", dtype=torch.float32)
    return x if like is None else x.to(like.device, like.dtype)


@contextmanager
def unnoticed(device: torch.device) -> Iterator[None]:
    """Run without gradients and autocast, and restore the state of random generators."""
    devices = [device] if device.type == "cuda" else []
    with (
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
        torch.random.fork_rng(devices),
    ):
        yield


def run(module: nn.Module, x: Tensor) -> Tensor:
    """The result of a copy for a tensor, in training and in evaluation mode.

    Raises:
        Failed: it is not a tensor, the two differ, or there is no result at all.
    """
    found: list[Tensor] = []
    with unnoticed(x.device):
        for training in (False, True):
            try:
                y = module.train(training).forward(x.clone())
            except CutesuperError as error:
                raise Failed(f"{type(error).__name__}: {error}") from error
            except Exception as error:  # whatever the code of a model raises
                raise Failed(f"it cannot be called with one tensor: {_short(error)}") from error
            if not isinstance(y, Tensor):
                raise Failed(f"it returns a {type(y).__name__}, no tensor")
            found.append(y)
    if found[0].shape != found[1].shape or not torch.equal(*found):
        raise Failed("it computes something else in training, or something random")
    return found[0]


def _short(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def close_to(found: Tensor, exact: Tensor) -> bool:
    """True if float32 values agree with a definition in float64."""
    if found.shape != exact.shape or found.dtype != torch.float32:
        return False
    error = (found.double() - exact).abs().amax(-1)
    return bool((error <= TOLERANCE * exact.abs().amax(-1)).all())


def within_rule(ours: Tensor, exact: Tensor, theirs: Tensor) -> None:
    """Raise Failed unless our error against float64 is at most twice theirs plus 2 ulp."""
    if ours.dtype != theirs.dtype:
        raise Failed(f"cutesuper returns {ours.dtype}, the module {theirs.dtype}")
    report = acceptable(ours, exact, theirs, theirs.dtype)
    if not report:
        raise Failed(f"cutesuper computes something else: {report.message}")


def replace_checked(
    module: nn.Module,
    twin: nn.Module,
    replacement: type[Replacement],
    how: Callable[[nn.Module], Any],
    x: Tensor,
    exact: Tensor,
) -> list[nn.Module]:
    """Replace a module, if that was right for a copy.

    Args:
        module: to be replaced.
        twin: a copy, which is called and replaced first.
        replacement: the class in front of the original one.
        how: describes the computation of the module, or of its copy.
        x: the operand of the copy.
        exact: its result in float64.

    Returns:
        The module alone.

    Raises:
        Failed: the result differs, or there are no kernels for it.
    """
    theirs = run(twin, x)
    replace(twin, replacement, how(twin))
    within_rule(run(twin, x), exact, theirs)
    replace(module, replacement, how(module))
    return [module]
