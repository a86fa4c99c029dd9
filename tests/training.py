"""Operators with gradients beside what PyTorch computes: in float64, and in the same types.

One table for the tests without a GPU and with one. Results and gradients are judged by the rule of
`cutesuper.verify.numeric.acceptable`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import cutesuper as cs
from cutesuper.verify.numeric import acceptable

F = torch.nn.functional


@dataclass(frozen=True)
class Case:
    """An operator.

    Attributes:
        ours: takes the tensors.
        theirs: the same with functions of PyTorch, differentiable.
        shapes: of the tensors, for rows ``lead`` of n elements.
        labels: whether the second tensor is one class of n for each row, or -100.
    """

    ours: Callable[..., Any]
    theirs: Callable[..., Any]
    shapes: Callable[[tuple[int, ...], int], list[tuple[int, ...]]]
    labels: bool = False


def _rms(x: Any, w: Any = None, offset: float = 0.0, eps: float = 1e-6) -> Any:
    """RMSNorm, by its definition where there is an offset, which PyTorch has not."""
    if w is None or not offset:
        return F.rms_norm(x, x.shape[-1:], w, eps)
    return (F.rms_norm(x, x.shape[-1:], None, eps) * (w + offset)).to(x.dtype)


def _rms_heads(x: Any, w: Any) -> Any:
    return (F.rms_norm(x, x.shape[-1:], None, 1e-6) * w).to(x.dtype)


def _add_rms(x: Any, r: Any, w: Any) -> Any:
    total = x + r
    return _rms(total, w).to(x.dtype), total.to(r.dtype)


def _layer(x: Any, w: Any = None, b: Any = None) -> Any:
    """LayerNorm, in steps where types differ, which PyTorch does not take in all combinations."""
    if {t.dtype for t in (w, b) if t is not None} <= {x.dtype}:
        return F.layer_norm(x, x.shape[-1:], w, b)
    y = F.layer_norm(x, x.shape[-1:])
    y = y if w is None else y * w
    return (y if b is None else y + b).to(x.dtype)


def _cross_entropy(reduction: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Losses are float32, which PyTorch computes for 16-bit logits if these are converted."""

    def theirs(x: Any, t: Any) -> Any:
        wide = x if x.dtype is torch.float64 else x.float()
        losses = F.cross_entropy(wide.reshape(-1, x.shape[-1]), t.flatten(), reduction=reduction)
        return losses.view(t.shape) if reduction == "none" else losses

    return lambda x, t: cs.ops.cross_entropy(x, t, reduction=reduction), theirs


def _normalized_update(x: Any, h: Any, alpha: Any) -> Any:
    def rms(t: Any) -> Any:
        return t * t.square().mean(-1, keepdim=True).rsqrt()

    return rms(x + alpha * (rms(h) + x)).to(x.dtype)


def _rows_and_vector(count: int) -> Callable[[tuple[int, ...], int], list[tuple[int, ...]]]:
    return lambda m, n: [*[(*m, n)] * count, (n,)]


def _rows(count: int) -> Callable[[tuple[int, ...], int], list[tuple[int, ...]]]:
    return lambda m, n: [(*m, n)] * count


CASES: dict[str, Case] = {
    "rms_norm": Case(cs.ops.rms_norm, _rms, _rows_and_vector(1)),
    "rms_norm without weight": Case(cs.ops.rms_norm, _rms, _rows(1)),
    "rms_norm of Gemma": Case(
        lambda x, w: cs.ops.rms_norm(x, w, eps=1e-5, weight_offset=1.0),
        lambda x, w: _rms(x, w, 1.0, 1e-5),
        _rows_and_vector(1),
    ),
    "rms_norm of heads": Case(cs.ops.rms_norm, _rms_heads, lambda m, n: [(*m, 4, n), (4, n)]),
    "rms_norm with residual": Case(
        lambda x, r, w: cs.ops.rms_norm(x, w, residual=r), _add_rms, _rows_and_vector(2)
    ),
    "layer_norm": Case(cs.ops.layer_norm, _layer, lambda m, n: [(*m, n), (n,), (n,)]),
    "layer_norm without bias": Case(cs.ops.layer_norm, _layer, _rows_and_vector(1)),
    "layer_norm with bias only": Case(
        lambda x, b: cs.ops.layer_norm(x, bias=b),
        # PyTorch 2.11 fails in its backward pass unless the weight has a gradient as well
        lambda x, b: _layer(x, b * 0 + 1, b),
        _rows_and_vector(1),
    ),
    "layer_norm without weight": Case(cs.ops.layer_norm, _layer, _rows(1)),
    "softmax": Case(cs.ops.softmax, lambda x: x.softmax(-1), _rows(1)),
    "log_softmax": Case(cs.ops.log_softmax, lambda x: x.log_softmax(-1), _rows(1)),
    **{
        f"cross_entropy, {r}": Case(*_cross_entropy(r), lambda m, n: [(*m, n), m], labels=True)
        for r in ("mean", "sum", "none")
    },
    "swiglu": Case(cs.ops.swiglu, lambda a, b: (F.silu(a) * b).to(a.dtype), _rows(2)),
    "geglu": Case(cs.ops.geglu, lambda a, b: (F.gelu(a) * b).to(a.dtype), _rows(2)),
    "geglu by tanh": Case(
        lambda a, b: cs.ops.geglu(a, b, approximate="tanh"),
        lambda a, b: (F.gelu(a, approximate="tanh") * b).to(a.dtype),
        _rows(2),
    ),
    **{
        f"add_activation, {name}": Case(
            partial(cs.ops.add_activation, activation=name),  # type: ignore[arg-type]
            lambda x, p, b, f=f: f(x + 0.5 * p + b).to(x.dtype),
            _rows_and_vector(2),
        )
        for name, f in (("relu", torch.relu), ("sigmoid", torch.sigmoid))
    },
    "normalized_update": Case(cs.ops.normalized_update, _normalized_update, _rows_and_vector(2)),
}


def tensors_of(
    name: str,
    lead: tuple[int, ...],
    n: int,
    dtype: Any,
    vectors: Any = None,
    device: str = "cpu",
) -> list[torch.Tensor]:
    """Normal numbers; what all rows share is near 1 and may have a type of its own; classes, of
    which some are ignored."""
    case = CASES[name]
    made: list[torch.Tensor] = []
    for k, shape in enumerate(case.shapes(lead, n)):
        if case.labels and k:
            target = torch.randint(n, shape, device=device)
            made.append(target.masked_fill(torch.rand(shape, device=device) < 0.1, -100))
        elif shape[: len(lead)] == lead and len(shape) > len(lead):
            made.append(torch.randn(shape, device=device).to(dtype))
        else:
            vector = 1 + 0.2 * torch.randn(shape, device=device)
            made.append(vector.to(dtype if vectors is None else vectors))
    return made


def leaves_of(name: str, lead: tuple[int, ...], n: int, *types: Any, **options: Any) -> list[Any]:
    """The same, with gradients."""
    made = tensors_of(name, lead, n, *types, **options)
    return [t.requires_grad_(t.is_floating_point()) for t in made]


def total(made: Any) -> Any:
    """A loss on which all results have their own weight."""
    results = made if isinstance(made, tuple) else (made,)
    return sum((y.float() ** 2).sum() * (n + 1) for n, y in enumerate(results))


def gradients_of(loss: Any, tensors: Sequence[Any], **options: Any) -> tuple[Any, ...]:
    """The gradients of a loss, for those tensors that have one."""
    return torch.autograd.grad(loss, [t for t in tensors if t.requires_grad], **options)


def doubled(tensors: Sequence[Any]) -> list[Any]:
    """Twice the numbers, the same classes: tensors that are no leaves."""
    return [2 * t if t.is_floating_point() else t for t in tensors]


@dataclass(frozen=True)
class Outcome:
    """Results and gradients of a call, each None where there is none."""

    results: list[Any]
    gradients: list[Any]

    def named(self) -> list[tuple[str, Any]]:
        results = [(f"result {n}", t) for n, t in enumerate(self.results)]
        return [*results, *((f"gradient {n}", t) for n, t in enumerate(self.gradients))]


def outcome(
    call: Callable[..., Any],
    tensors: Sequence[torch.Tensor],
    cotangents: Sequence[Any],
    needs: Sequence[bool] | None = None,
    dtype: Any = None,
) -> Outcome:
    """Run forwards and backwards.

    Args:
        call: takes the tensors.
        tensors: inputs.
        cotangents: of the results, None where one is not used.
        needs: which gradients are asked for; None: all.
        dtype: to compute in.
    """
    needs = [t.is_floating_point() for t in tensors] if needs is None else needs
    leaves = [
        (t.to(dtype) if dtype and t.is_floating_point() else t).detach().clone().requires_grad_(n)
        for t, n in zip(tensors, needs, strict=True)
    ]
    made = call(*leaves)
    results = list(made) if isinstance(made, tuple) else [made]
    ends = zip(results, cotangents, strict=True)
    pairs = [(y, d) for y, d in ends if d is not None and y.requires_grad]
    wanted = [t for t, n in zip(leaves, needs, strict=True) if n]
    grads = iter(
        torch.autograd.grad([y for y, _ in pairs], wanted, [d.to(y.dtype) for y, d in pairs])
        if wanted
        else ()
    )
    return Outcome([y.detach() for y in results], [next(grads) if n else None for n in needs])


def judge(
    name: str,
    tensors: Sequence[torch.Tensor],
    needs: Sequence[bool] | None = None,
    unused: Sequence[int] = (),
) -> Outcome:
    """Compare a case with float64; returns what the operator gave.

    Args:
        name: of the case.
        tensors: inputs.
        needs: which gradients are asked for; None: all.
        unused: results that the loss does not depend on.
    """
    case = CASES[name]
    with torch.no_grad():
        made = case.ours(*tensors)
    results = made if isinstance(made, tuple) else (made,)
    cotangents = [None if n in unused else torch.randn_like(y) for n, y in enumerate(results)]
    found = outcome(case.ours, tensors, cotangents, needs)
    exact = outcome(case.theirs, tensors, cotangents, needs, torch.float64)
    eager = outcome(case.theirs, tensors, cotangents, needs)
    plain = [(f"result {n} without gradients", y) for n, y in enumerate(results)]
    triples = zip(
        [*plain, *found.named()],
        [*exact.named()[: len(plain)], *exact.named()],
        [*eager.named()[: len(plain)], *eager.named()],
        strict=True,
    )
    for (what, y), (_, want), (_, peer) in triples:
        if want is None:
            assert y is None
        elif want.numel():
            assert y.shape == want.shape and y.dtype == peer.dtype, what
            report = acceptable(y, want, peer, y.dtype)
            assert report, f"{name}, {what}: {report.message}"
    return found
