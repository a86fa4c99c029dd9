"""Programs whose gradients are looked at, and how they are compared with PyTorch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import cutesuper as cs
from cutesuper import pipeline
from cutesuper.ir.dims import Dim, extent
from cutesuper.ir.graph import KernelGraph
from cutesuper.runtime.kernel import Kernel, Variant
from cutesuper.verify.numeric import acceptable
from tests.tracing import randn


def unsearched(monkeypatch: Any, keep: bool = True) -> None:
    """Kernels are neither searched for nor compiled: on the CPU the reference executor runs.

    Args:
        monkeypatch: of the test.
        keep: whether programs that keep values for the backward pass look cheaper.
    """

    def find(graph: KernelGraph, *_: Any) -> Any:
        cost = 1000.0 - len(graph.outputs) if keep else 1.0 + len(graph.outputs)
        return None, SimpleNamespace(candidate=SimpleNamespace(cost_us=cost))

    def compiled(graph: KernelGraph, *_: Any) -> Variant:
        return Variant(SimpleNamespace(inputs=(), outputs=()), ())  # type: ignore[arg-type]

    monkeypatch.setattr(pipeline, "find", find)
    monkeypatch.setattr(pipeline, "compiled", compiled)


def uncompiled(monkeypatch: Any) -> None:
    """Kernels are searched for and not compiled."""
    monkeypatch.setattr(pipeline, "compile_plans", lambda *_: ())


@dataclass(frozen=True)
class Case:
    """A program, as a kernel graph and with functions of PyTorch.

    Attributes:
        build: ``build(g, *inputs)`` returns the outputs.
        theirs: the same with PyTorch.
        shapes: of the inputs; 64 in front stands for the rows.
    """

    build: Callable[..., Any]
    theirs: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]

    def graph(self, dtype: Any, rows: Dim = 64) -> KernelGraph:
        """The kernel graph; the first extent of the first input may be symbolic."""
        g = cs.new_kernel_graph()
        shapes = [tuple(s) for s in self.shapes]
        inputs = [
            g.new_input((rows, *s[1:]) if s[0] == 64 else s, dtype, name=n)
            for s, n in zip(shapes, "xwvub", strict=False)
        ]
        made = self.build(g, *inputs)
        for t in made if isinstance(made, tuple) else (made,):
            g.mark_output(t)
        return g

    def draw(self, dtype: torch.dtype, device: str = "cpu", rows: int = 64) -> list[Tensor]:
        """Leaves; weights of products in the scale that layers have."""
        made = []
        for n, s in enumerate(self.shapes):
            shape = (rows, *s[1:]) if s[0] == 64 else s
            scale = s[0] ** -0.5 if n and len(s) == 2 and s[0] != 64 else 1.0
            made.append((randn(*shape) * scale).to(device, dtype).requires_grad_())
        return made


def _gated(x: Tensor, w: Tensor, v: Tensor, u: Tensor) -> Tensor:
    return (F.silu(x @ w) * (x @ v)) @ u


CASES: dict[str, Case] = {
    "linear": Case(lambda g, x, w: x @ w, lambda x, w: x @ w, ((64, 128), (128, 96))),
    "norm and linear": Case(
        lambda g, x, w, v: g.rms_norm(x, v, eps=1e-6) @ w,
        lambda x, w, v: F.rms_norm(x, v.shape, v, 1e-6) @ w, ((64, 128), (128, 96), (128,)),
    ),
    "gated MLP": Case(
        lambda g, x, w, v, u: (g.silu(x @ w) * (x @ v)) @ u, _gated,
        ((64, 128), (128, 96), (128, 96), (96, 128)),
    ),
    "softmax": Case(
        lambda g, x: g.softmax(x), lambda x: torch.softmax(x, -1), ((64, 160),)
    ),
    "layer norm": Case(
        lambda g, x, w, v: g.layer_norm(x, w, v), lambda x, w, v: F.layer_norm(x, w.shape, w, v),
        ((64, 128), (128,), (128,)),
    ),
    "attention": Case(
        lambda g, x, w, v: g.scaled_dot_product_attention(x, w, v),
        F.scaled_dot_product_attention, ((2, 64, 64), (2, 128, 64), (2, 128, 64)),
    ),
    "residual": Case(
        lambda g, x, w: x + g.gelu(x @ w), lambda x, w: x + F.gelu(x @ w), ((64, 128), (128, 128))
    ),
    "two outputs": Case(
        lambda g, x, w: (x + w, g.rms_norm(x + w, eps=1e-6)),
        lambda x, w: (x + w, F.rms_norm(x + w, x.shape[-1:], eps=1e-6)), ((64, 128), (64, 128)),
    ),
    "bias": Case(
        lambda g, x, w, v: g.relu(x @ w + v), lambda x, w, v: F.relu(x @ w + v),
        ((64, 128), (128, 96), (96,)),
    ),
}  # fmt: skip


def gradients(
    call: Callable[..., Any], leaves: Sequence[Tensor], cotangents: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Results and gradients of all leaves."""
    made = call(*leaves)
    results = list(made) if isinstance(made, tuple) else [made]
    found = torch.autograd.grad(results, list(leaves), [d.to(y.dtype) for y, d in
                                zip(results, cotangents, strict=True)])  # fmt: skip
    return results, list(found)


def judge(kernel: Callable[..., Any], theirs: Callable[..., Any], leaves: Sequence[Tensor]) -> None:
    """Errors of results and gradients, against float64, are at most twice those of PyTorch in the
    element type of the leaves, plus 2 ulp."""
    made = theirs(*leaves)
    outputs = made if isinstance(made, tuple) else (made,)
    r = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(y.shape, generator=r).to(y.device, y.dtype) for y in outputs]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    mine = gradients(kernel, leaves, cotangents)
    eager = gradients(theirs, leaves, cotangents)
    exact = gradients(theirs, wide, cotangents)
    names = [f"result {n}" for n in range(len(outputs))]
    names += [f"gradient {n}" for n in range(len(leaves))]
    for what, y, e, x in zip(names, *([*p[0], *p[1]] for p in (mine, eager, exact)), strict=True):
        report = acceptable(y, x, e, y.dtype)
        assert report, (what, report)
    for t, d in zip(leaves, mine[1], strict=True):
        assert d.shape == t.shape and d.dtype is t.dtype


def kernel_of(name: str, dtype: Any = torch.float32, **options: Any) -> Kernel:
    """A kernel of a case, for the H200."""
    rows = options.pop("rows", 64)
    return cs.superoptimize(CASES[name].graph(dtype, rows), target="h200", **options)


def shapes_of(graph: KernelGraph) -> list[tuple[int, ...]]:
    """The shapes of the inputs, at the hints of symbols."""
    return [tuple(map(extent, graph.nodes[i].shape)) for i in graph.inputs]
