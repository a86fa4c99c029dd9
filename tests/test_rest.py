"""Functions of which PyTorch computes a part."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask

import cutesuper as cs
from cutesuper.errors import GraphError, LoweringError, OptionError, TraceError
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


HALVES = tuple(randn(2, n, 9, 16).half() for n in (4, 2, 2))
HEADS = tuple(t.float() for t in HALVES)
DOCUMENTS, SLOPES = torch.arange(9) // 4, randn(4)
LABELS, NO_CLASS = torch.tensor([3, 0, -100, 23, 7, 2]), torch.tensor([3, 0, 99, -100, 7, 2])


def attends(**options: Any) -> Any:
    return lambda *t: cs.ops.attention(t[0] * 2, *t[1:3], *t[3:], enable_gqa=True, **options)


def flexible(**options: Any) -> Any:
    return lambda q, k, v: cs.ops.flex_attention(q, k, v, enable_gqa=True, **options)


def seen(mask: Any, **front: int) -> Any:
    block = create_block_mask(mask, front.get("batch"), front.get("heads"), 9, 9, device="cpu")
    return {"block_mask": block}


def causal(b: Any, h: Any, row: Any, key: Any) -> Any:
    return row >= key


#: function and inputs; those that end in a star leave one operator of ours whole
OWN: dict[str, tuple[Any, Any]] = {
    "rms_norm": (lambda x, w, r: F.linear(cs.ops.rms_norm(x, r), w), (X, W, R)),
    "layer_norm": (lambda x, r: cs.ops.layer_norm(x * 2, r, r), (X, R)),
    "swiglu": (lambda x, w: cs.ops.swiglu(F.linear(x, w), F.linear(x, w * 2)), (X, W)),
    "geglu": (lambda x: cs.ops.geglu(x, x * 2), (X,)),
    "softmax": (lambda x: cs.ops.softmax(x * 2, -1), (X,)),
    "log_softmax": (lambda x: cs.ops.log_softmax(x * 2, -1), (X,)),
    "add_activation": (lambda x, r: cs.ops.add_activation(x, x * 0.5, r), (X, R)),
    "normalized_update": (
        lambda x, r: cs.ops.normalized_update(F.normalize(x, dim=-1), x * 2, r), (X, R)),
    "cross_entropy": (lambda x, w, t: cs.ops.cross_entropy(F.linear(x, w), t), (X, W, LABELS)),
    "cross_entropy of each row": (
        lambda x, t: cs.ops.cross_entropy(x * 2, t, reduction="none"), (X, NO_CLASS)),
    "cross_entropy in three dimensions": (
        lambda x, t: cs.ops.cross_entropy(
            x.view(2, 3, 32), t.view(2, 3), reduction="sum", ignore_index=3),
        (X.bfloat16(), LABELS.int())),
    "cross_entropy of one row": (cs.ops.cross_entropy, (X[:1].clone(), LABELS[:1].clone())),
    "cross_entropy of nothing that counts": (
        cs.ops.cross_entropy, (X, torch.full((6,), -100))),
    "cross_entropy of a vector *": (lambda x, t: cs.ops.cross_entropy(x[0], t[0]), (X, LABELS)),
    "linear_cross_entropy *": (cs.ops.linear_cross_entropy, (X, W, LABELS)),
    "linear_cross_entropy of each row *": (
        lambda *t: cs.ops.linear_cross_entropy(*t, reduction="none"), (X, W, LABELS)),
    "linear_cross_entropy of half *": (
        lambda *t: cs.ops.linear_cross_entropy(*t, softcap=5.0), (X.half(), W.half(), LABELS)),
    "flex_attention": (flexible(), HEADS),
    "distances": (flexible(score_mod=lambda s, b, h, i, j: s + SLOPES[h] * (j - i)), HEADS),
    "capped": (flexible(score_mod=lambda s, b, h, i, j: 3 * torch.tanh(s / 3)), HEADS),
    "hidden scores": (
        flexible(score_mod=lambda s, b, h, i, j: torch.where(i >= j, s, -torch.inf)), HEADS),
    "causal": (flexible(**seen(causal)), HEADS),
    "documents": (
        flexible(**seen(lambda b, h, i, j: DOCUMENTS[i] == DOCUMENTS[j])), HEADS),
    "a row that sees nothing": (flexible(**seen(lambda b, h, i, j: (i >= j) & (i != 4))), HEADS),
    "other heads": (flexible(**seen(lambda b, h, i, j: (i >= j) | (h == 1), heads=4)), HEADS),
    "changed and causal": (
        flexible(**seen(causal), score_mod=lambda s, b, h, i, j: s * 2, scale=0.3), HALVES),
    "changed, and a row that sees nothing": (
        flexible(**seen(lambda b, h, i, j: (i >= j) & (i != 4)),
                 score_mod=lambda s, b, h, i, j: s * 2), HEADS),
    "one tensor": (
        lambda q: cs.ops.flex_attention(q, q, q, **seen(lambda b, h, i, j: i - j < 3)),
        HEADS[:1]),
    "attention *": (attends(is_causal=True), HALVES),
    "attention in a window *": (attends(is_causal=True, window=4), HALVES),
    "attention with a mask *": (attends(), (*HALVES, torch.eye(9, dtype=torch.bool))),
    "attention of lengths *": (
        lambda q, k, v, n: cs.ops.attention(q, k, v, enable_gqa=True, key_lengths=n),
        (*HALVES, torch.tensor([5, 9], dtype=torch.int32))),
    "attention with sums *": (attends(return_lse=True), HALVES),
    "packed sequences *": (
        lambda q, k, v, n: cs.ops.attention(
            q, k, v, enable_gqa=True, **cs.ops.packed_limits(n, rows=9)),
        (*(t[:1] for t in HALVES), torch.tensor([0, 4, 9], dtype=torch.int32))),
    "CrossEntropyLoss": (cs.nn.CrossEntropyLoss(), (X, LABELS)),
    "LayerNorm": (cs.nn.LayerNorm(32), (X,)),
    "LinearCrossEntropyLoss *": (cs.nn.LinearCrossEntropyLoss(), (X, W, LABELS)),
    "LogSoftmax": (cs.nn.LogSoftmax(-1), (X,)),
    "RMSNorm": (cs.nn.RMSNorm(32), (X,)),
    "Softmax": (cs.nn.Softmax(-1), (X,)),
    "SwiGLU": (cs.nn.SwiGLU(), (X, X * 2)),
}  # fmt: skip


def total(y: Any) -> torch.Tensor:
    """A number that depends on all elements of the results."""
    parts = y if isinstance(y, tuple) else (y,)
    return torch.stack([t.float().square().sum() for t in parts]).sum()


@pytest.mark.parametrize("name", OWN)
def test_our_operators_are_fused_or_left_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where gradients are recorded."""
    fn, inputs = OWN[name]
    close = {"rtol": 2e-2, "atol": 1e-2} if inputs[0].dtype.itemsize == 2 else {}
    program = traced(monkeypatch, fn, inputs)
    with torch.no_grad():
        torch.testing.assert_close(program(*inputs), fn(*inputs), equal_nan=True, **close)
    left = [line for line in program.outside if line.startswith("cutesuper.")]
    numbers = [line for line in program.outside if "softmax" in line or "attention" in line]
    assert len(left) == name.endswith("*") and len(program.regions) + len(left) > 0
    assert numbers == [line for line in left if "attention" in line]
    given = [t.clone().requires_grad_() if t.is_floating_point() else t for t in inputs]
    wanted = [t for t in given if t.requires_grad]
    mine, eager = (torch.autograd.grad(total(f(*given)), wanted) for f in (program, fn))
    close = close or {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(mine, eager, equal_nan=True, **close)


def test_all_our_operators_are_tried() -> None:
    for name in (*cs.ops.__all__, *cs.nn.__all__):
        tried = {n.split()[0] for n in OWN} | {"packed_limits"}
        assert name in tried, name


@torch.library.custom_op("cutesuper_tests::triple", mutates_args=())
def triple(x: torch.Tensor) -> torch.Tensor:
    return x.detach() * 3


triple.register_fake(torch.empty_like)
triple.register_autograd(lambda _, cotangent: cotangent * 3)


def test_gradients_of_registered_operators_are_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    x = X.clone().requires_grad_()
    program = traced(monkeypatch, lambda x: triple(x.exp()).square(), (X,), rest="torch")
    [mine] = torch.autograd.grad(program(x).sum(), x)
    torch.testing.assert_close(mine, 18 * (2 * X).exp())


def test_sums_of_flexible_attention_have_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    fn = flexible(return_lse=True, **seen(causal))
    program = traced(monkeypatch, fn, HEADS)
    with torch.no_grad():
        torch.testing.assert_close(program(*HEADS), fn(*HEADS))
    y, _ = program(HEADS[0].clone().requires_grad_(), *HEADS[1:])
    with pytest.raises(GraphError, match="it stops gradients"):
        y.sum().backward()


def test_errors_of_our_operators_are_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    short = tuple(t[:, :, :5] for t in HEADS)
    with pytest.raises(TraceError, match=r"block_mask is one of \[9, 9\].*make it for these"):
        traced(monkeypatch, flexible(**seen(causal)), short)
    sums = flexible(score_mod=lambda s, b, h, i, j: s.sum(-1))
    with pytest.raises(TraceError, match="a function of one score at a time"):
        traced(monkeypatch, sums, HEADS)


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
