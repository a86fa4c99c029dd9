"""Functions of which PyTorch computes a part."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cutesuper as cs
from cutesuper.errors import LoweringError, OptionError, TraceError
from cutesuper.targets import find_target
from cutesuper.targets.roofline import baseline
from cutesuper.torch.compile import trace
from cutesuper.torch.compile.trace import superoptimize_callable
from tests.tracing import Reference, check, randn, traced

X, W, R = randn(6, 32), randn(24, 32), randn(32)
IMAGE, ONE, THREE, BIAS = randn(2, 16, 5, 7), randn(24, 16, 1, 1), randn(8, 24, 3, 3), randn(24)
LAST = IMAGE.to(memory_format=torch.channels_last)

PARTS: dict[str, tuple[Any, Any, list[str]]] = {  # program, inputs, what PyTorch computes
    "cumprod": (lambda x, w: F.silu(torch.cumprod(F.linear(x, w), -1)), (X, W), ["cumprod"]),
    "convolution": (lambda x, w, y: F.relu(F.conv2d(F.relu(F.conv2d(x, w)), y, padding=1)),
                    (IMAGE, ONE, THREE), ["conv2d"]),
    "nothing else": (torch.linalg.inv, (randn(4, 4) + 9 * torch.eye(4),),
                     ["linalg_inv"]),
    "sorted": (lambda x: F.rms_norm(torch.cumprod(x, 0).sort(-1)[0], (32,)), (X,),
               ["cumprod", "sort"]),
}  # fmt: skip


@pytest.mark.parametrize("name", PARTS)
def test_the_rest_is_pytorchs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fn, inputs, left = PARTS[name]
    with pytest.raises(TraceError):
        traced(monkeypatch, fn, inputs)
    program = traced(monkeypatch, fn, inputs, rest="torch")
    check(program, fn, inputs)
    assert [line.split()[0] for line in program.outside] == left


def test_what_is_left_is_called_as_the_user_wrote_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as PyTorch's decompositions call it; a part of another function is named besides."""

    def fn(x: torch.Tensor) -> Any:
        return F.relu(x.cumprod(0)), torch.median(x, -1).values, x.sort().values

    with torch.no_grad():
        lines = superoptimize_callable(fn, (randn(32, 8),), rest="torch", target="h200").outside
    names = [line.split(" (")[0] for line in lines]
    assert {"cumprod", "median", "sort"} <= set(names)
    assert not any("prims." in line for line in lines)


def test_parts_without_a_kernel_are_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A region that no kernel runs is halved as for torch.compile; what is left is named."""

    def optimize(graph: cs.KernelGraph, **options: Any) -> Reference:
        if any(n.operator == "matmul" for n in graph.nodes):
            raise LoweringError("no products today")
        return Reference(graph)

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(F.linear(F.rms_norm(x, (32,)), w), (24,)).exp()

    monkeypatch.setattr(trace, "optimize_graph", optimize)
    with torch.no_grad():
        program = superoptimize_callable(fn, (X, W), rest="torch", target="h200")
    check(program, fn, (X, W))
    assert len(program.regions) == 2
    monkeypatch.setattr(Reference, "explain", lambda self: "", raising=False)
    monkeypatch.setattr(Reference, "predicted_us", 1.25, raising=False)
    monkeypatch.setattr(Reference, "target", find_target("h200"), raising=False)
    monkeypatch.setattr(Reference, "kernels", ["k0"], raising=False)
    bound = SimpleNamespace(bound_log2=-71.5)
    variant = SimpleNamespace(verification=bound, cut="cut short by Ctrl-C")
    monkeypatch.setattr(Reference, "variant", variant, raising=False)
    lines = program.explain().splitlines()
    head = " ".join(line.strip() for line in lines[: lines.index("  kernels   2")])
    assert head.endswith(
        "2 region(s), 4.00 us predicted, of which 1.50 us at least are PyTorch's operators"
    )
    [others] = [line for line in lines if line.startswith("  others")]
    assert "with the same operators of PyTorch" in others
    us = float(others.split("Inductor ")[1].split(" us")[0])
    one = baseline(program.regions[0].kernel.graph, find_target("h200")).us
    two = baseline(program.regions[1].kernel.graph, find_target("h200")).us
    assert us == pytest.approx(one + two + 1.5, abs=0.06)
    totals = lines[lines.index("  kernels   2") :]
    assert totals[2].endswith("2 of 2 region(s) verified over finite fields, 2 of them wrong with "
                              "less than 2^-71")  # fmt: skip
    assert totals[3] == "  search    region 0: cut short by Ctrl-C"
    assert totals[5].startswith("  region 0  1.25 us, 1 kernel(s), test_rest.py:")
    assert any(line.startswith("PyTorch computes 1 operator(s), 1.5 us") for line in totals[7:9])
    assert any(line.endswith(": X is x") for line in totals)
    assert any("1 x linear: no products today (test_rest.py:" in n for n in lines)


def test_one_region_is_compared_with_what_is_left_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    program = traced(monkeypatch, lambda x: x.exp().sort().values, (X,), rest="torch")
    region = program.regions[0].kernel
    facts = {"explain": lambda self: "", "predicted_us": 2.0, "kernels": ["k0"],
             "target": find_target("h200"),
             "variant": SimpleNamespace(verification=None, cut="")}  # fmt: skip
    for name, value in facts.items():
        monkeypatch.setattr(Reference, name, value, raising=False)
    rest = sum(n.us for n in program._latest.outside)
    text = program.explain()
    assert f"{2 + rest:.2f} us predicted" in text
    assert f"Inductor {baseline(region.graph, region.target).us + rest:.2f} us" in text


def test_buffers_are_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    def model() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Conv2d(16, 8, 3), nn.BatchNorm2d(8)).train()

    mine, eager = model(), model()
    program = traced(monkeypatch, mine, (IMAGE,), rest="torch")
    with torch.no_grad():
        torch.testing.assert_close(program(IMAGE), eager(IMAGE))
    torch.testing.assert_close(dict(mine.named_buffers()), dict(eager.named_buffers()))


@pytest.mark.parametrize("rest", ["refuse", "torch"])
def test_buffers_get_their_new_values(rest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where gradients are recorded, for which the old values are kept."""
    mine, eager = nn.BatchNorm1d(32), nn.BatchNorm1d(32)
    program = traced(monkeypatch, mine, (X,), rest=rest)
    for x in (X, 2 * X):
        y, wanted = ((f(x) * x).sum() for f in (program, eager))
        y.backward()
        wanted.backward()
    torch.testing.assert_close(dict(mine.named_buffers()), dict(eager.named_buffers()))
    torch.testing.assert_close(mine.weight.grad, eager.weight.grad, rtol=1e-4, atol=1e-4)
    assert not any(b.requires_grad for b in mine.buffers())


def test_gradients_pass_through_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = torch.empty_like(x)
        z[:, :8], z[:, 8:] = x[:, :8].exp(), y
        z[0] = 2.0
        return z

    inputs = X.clone().requires_grad_(), randn(6, 1, dtype=torch.float16).requires_grad_()
    program = traced(monkeypatch, fn, inputs)
    mine, eager = (torch.autograd.grad(f(*inputs).square().sum(), inputs) for f in (program, fn))
    torch.testing.assert_close(mine, eager)


#: small integers, so that windows have several largest elements
TIED = torch.arange(2 * 3 * 4 * 6).reshape(2, 3, 4, 6).fmod(5).float()
POOLS: dict[str, Any] = {
    "max 1": lambda x: F.max_pool1d(x[0], 2).exp(),
    "max 2": lambda x: F.max_pool2d(x, (2, 3)).exp(),
    "max 3": lambda x: F.max_pool3d(x, (3, 2, 2)).exp(),
    "mean 1": lambda x: F.avg_pool1d(x[0], 3).exp(),
    "mean 2": lambda x: F.avg_pool2d(x, 2, ceil_mode=True).exp(),
    "mean 3": lambda x: F.avg_pool3d(x, (3, 2, 2)).exp(),
    "to an extent": lambda x: F.adaptive_avg_pool2d(x, (2, 3)).exp(),
    "most of rows": lambda x: torch.max(x, 1)[0].exp(),
    "nothing else": lambda x: torch.max(x, 1)[0],
    "least of rows": lambda x: torch.min(x, -1, keepdim=True).values.exp(),
}


@pytest.mark.parametrize("name", POOLS)
def test_pooling(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels compute it; PyTorch the maxima of which gradients are recorded: they go to the first
    of equal elements."""
    fn, x = POOLS[name], TIED.clone().requires_grad_()
    program = traced(monkeypatch, fn, (x,))
    check(program, fn, (x.detach(),))
    assert not program.outside
    mine, eager = (torch.autograd.grad(f(x).sum(), x) for f in (program, fn))
    torch.testing.assert_close(mine, eager)
    check(program, fn, (x.detach(),))
    assert not program.outside


def test_other_windows_are_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    for fn in (
        lambda x: F.max_pool2d(x, 2, 1).exp(),
        lambda x: F.max_pool2d(x, 2, dilation=2).exp(),
        lambda x: F.avg_pool2d(x, 2, padding=1).exp(),
        lambda x: F.avg_pool2d(x, 2, divisor_override=3).exp(),
        lambda x: F.avg_pool2d(x, 4).exp(),
        lambda x: F.adaptive_avg_pool2d(x, 5).exp(),
    ):
        program = traced(monkeypatch, fn, (TIED,), rest="torch")
        check(program, fn, (TIED,))
        assert len(program.outside) == 1


def test_another_rest_is_refused() -> None:
    with pytest.raises(OptionError, match=r"rest='eager'.*'refuse' or 'torch'"):
        cs.superoptimize(F.relu, (X,), rest="eager")  # type: ignore[call-overload]


@pytest.mark.parametrize("x", [IMAGE, LAST], ids=["channels first", "channels last"])
@pytest.mark.parametrize("bias", [(), (BIAS,)], ids=["plain", "bias"])
def test_convolutions_of_one_element_are_products(
    x: torch.Tensor, bias: tuple[torch.Tensor, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fn(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
        return F.relu(F.conv2d(x, w, b))

    program = traced(monkeypatch, fn, (x, ONE, *bias))
    check(program, fn, (x, ONE, *bias))
    assert program(x, ONE, *bias).stride() == fn(x, ONE, *bias).stride()
    assert not program.outside and len(program.regions) == 1


OWN: dict[str, tuple[Any, Any]] = {
    "rms_norm": (lambda x, w, r: F.linear(cs.ops.rms_norm(x, r), w), (X, W, R)),
    "swiglu": (lambda x, w: cs.ops.swiglu(F.linear(x, w), F.linear(x, w * 2)), (X, W)),
    "softmax": (lambda x: cs.ops.softmax(x * 2, -1), (X,)),
    "a module": (cs.nn.LayerNorm(32), (X,)),
}


@pytest.mark.parametrize("name", OWN)
def test_our_operators_are_fused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fn, inputs = OWN[name]
    program = traced(monkeypatch, fn, inputs)
    with torch.no_grad():
        torch.testing.assert_close(program(*inputs), fn(*inputs))
    assert not program.outside


def test_our_other_operators_run_their_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    q = randn(1, 2, 8, 16).half()
    program = traced(monkeypatch, lambda q: cs.ops.attention(q, q, q), (q,))
    assert torch.equal(program(q), cs.ops.attention(q, q, q))
    assert [line.split()[0] for line in program.outside] == ["cutesuper.attention.default"]


@pytest.mark.gpu
@pytest.mark.ptx
@pytest.mark.parametrize("last", [False, True])
def test_a_convolution_on_the_device(last: bool) -> None:
    """As one product, in both orders of memory."""
    torch.manual_seed(5)
    x = torch.randn(2, 64, 4, 4, device="cuda", dtype=torch.float16)
    x = x.to(memory_format=torch.channels_last) if last else x
    w = torch.randn(32, 64, 1, 1, device="cuda", dtype=torch.float16) / 8
    program = cs.superoptimize(lambda x, w: F.relu(F.conv2d(x, w)), (x, w), rest="torch")
    y = program(x, w)
    exact = F.relu(torch.einsum("oc,nchw->nohw", w.double()[:, :, 0, 0], x.double()))
    torch.testing.assert_close(y.double(), exact, rtol=2e-3, atol=2e-3)
    assert not program.outside and y.is_contiguous(memory_format=torch.channels_last) == last


def test_casts_of_quantized_weights_are_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.linear(x, w.to(x.dtype))

    inputs = X, torch.randint(-8, 8, (24, 32), dtype=torch.int8)
    program = traced(monkeypatch, fn, inputs)
    check(program, fn, inputs)
    [line] = program.outside
    assert line.startswith("to (aten._to_copy.default) (test_rest.py:")
