"""RMSNorm and LayerNorm of a model, recognized by their results, replaced by `cutesuper.ops`.

A candidate has a weight ``[N]``, perhaps a bias, and an attribute that could be an epsilon. Its
kind is determined by calling it with other weights than its own, as weights of one would reveal
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from cutesuper.torch.ops.rowwise.norms import layer_norm, rms_norm
from cutesuper.torch.patch.probing import Failed, close_to, drawn, replace_checked, run
from cutesuper.torch.patch.replacement import HOW, Replacement, copied
from cutesuper.torch.patch.usual_calls import is_usual

#: an epsilon is larger than 0 and smaller than this
LARGEST_EPS = 0.01


@dataclass(frozen=True)
class Norm:
    """The computation of a norm.

    Attributes:
        kind: of rows, with ``x / sqrt(mean(x^2) + eps)`` or ``(x - mean) / sqrt(var + eps)``.
        eps: the name of the attribute that holds it, as it may change. A value of None is the
            epsilon of the element type of x, as in PyTorch.
        offset: number added to the weight.
        weight, bias: names of the parameters.
    """

    kind: Literal["RMSNorm", "LayerNorm"]
    eps: str
    offset: float
    weight: str
    bias: str | None

    def __str__(self) -> str:
        offset = f", weight + {self.offset:g}" if self.offset else ""
        operator = "rms_norm" if self.kind == "RMSNorm" else "layer_norm"
        return f"cs.ops.{operator}{offset}"

    def exact(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """The definition, in float64."""
        x, weight = x.double(), weight.double()
        if self.kind == "LayerNorm":
            x = x - x.mean(-1, keepdim=True)
        y = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (weight + self.offset)
        return y if bias is None else y + bias.double()


class ReplacedNorm(Replacement):
    """A norm."""

    def replaced(self, *args: Any, **options: Any) -> Any:
        """The norm of one tensor; the original for anything else."""
        how: Norm = self.__dict__[HOW]
        weight: Tensor = getattr(self, how.weight)
        usual = not options and len(args) == 1 and is_usual(args[0], weight)
        if not usual or args[0].shape[-1:] != weight.shape:
            return self.original(*args, **options)
        eps = _epsilon(self, how.eps, args[0])  # type: ignore[arg-type]
        if how.kind == "RMSNorm":
            return rms_norm(args[0], weight, eps=eps, weight_offset=how.offset)
        bias = None if how.bias is None else getattr(self, how.bias)
        return layer_norm(args[0], weight, bias, eps=eps)


def is_candidate(module: nn.Module) -> bool:
    """True if a module may be a norm, by its attributes."""
    shapes = {() if is_lazy(p) else tuple(p.shape) for p in module.parameters(recurse=False)}
    plain = not any(True for _ in module.children()) and not any(True for _ in module.buffers())
    vector = len(shapes) == 1 and len(next(iter(shapes))) == 1 and len(module._parameters) <= 2
    own = type(module).__module__.startswith("cutesuper.")
    return plain and vector and not own and any(True for _ in _epsilons(module))


def _epsilons(module: nn.Module) -> Iterator[str]:
    """Attributes that could be epsilons, those with such a name first."""
    names = [
        n for n, v in vars(module).items()
        if (isinstance(v, float) and 0.0 < v < LARGEST_EPS) or (v is None and "eps" in n)
    ]  # fmt: skip
    return iter(sorted(names, key=lambda n: "eps" not in n))


def _epsilon(module: nn.Module, name: str, x: Tensor) -> float:
    found = getattr(module, name)
    return torch.finfo(x.dtype).eps if found is None else found


def find(module: nn.Module) -> Norm:
    """The computation of a candidate.

    Raises:
        Failed: no known computation, with the reason.
    """
    names = [n for n, p in module._parameters.items() if p is not None]
    parts = {n: _other(module._parameters[n], seed) for seed, n in enumerate(names)}
    twin = copied(module, **parts)
    x = _rows(parts[names[0]])
    found = run(twin, x)
    for how in _forms(module, names):
        bias = None if how.bias is None else parts[how.bias]
        exact = how.exact(x, parts[how.weight], bias, _epsilon(module, how.eps, x))
        if close_to(found, exact):
            return how
    raise Failed("it computes neither RMSNorm nor LayerNorm")


def _forms(module: nn.Module, names: list[str]) -> Iterator[Norm]:
    weight, *others = names
    for eps in _epsilons(module):
        if not others:
            yield Norm("RMSNorm", eps, 0.0, weight, None)
            yield Norm("RMSNorm", eps, 1.0, weight, None)
            yield Norm("LayerNorm", eps, 0.0, weight, None)
        else:
            yield Norm("LayerNorm", eps, 0.0, weight, others[0])


def install(module: nn.Module, how: Norm) -> list[nn.Module]:
    """Let a norm compute with `cutesuper.ops`, if the result is the same.

    Returns:
        The modules that were replaced.

    Raises:
        Failed: the result differs, or there are no kernels for it.
    """
    twin = copied(module)
    weight = getattr(module, how.weight)
    bias = None if how.bias is None else getattr(module, how.bias)
    x = _rows(weight)
    exact = how.exact(x, weight, bias, _epsilon(module, how.eps, x))
    return replace_checked(module, twin, ReplacedNorm, lambda _: how, x, exact)


def _other(p: Any, seed: int) -> nn.Parameter:
    values = drawn(p.numel(), seed=seed).to(p.device)
    return nn.Parameter(values, requires_grad=False)


def _rows(like: Tensor) -> Tensor:
    """Rows whose mean square is far above, near and below an epsilon, with a mean."""
    scale = torch.tensor([1e2, 1.0, 1e-2, 1e-3, 1e-4], device="cpu")
    x = (drawn(len(scale), like.numel(), seed=2) + 0.3) * scale[:, None]
    return x.to(like.device, like.dtype)
