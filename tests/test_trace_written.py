"""Functions as people write them are traced, and comparisons and choices follow PyTorch's rules for
NaN."""

from __future__ import annotations

import copy
import inspect
import re
from math import inf, nan
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import cutesuper as cs
from cutesuper import pipeline
from cutesuper.errors import TraceError
from cutesuper.targets import H200
from tests.backends import compiled
from tests.complex_numbers import COMPLEX, Rotated, rotary
from tests.small_models import MODELS
from tests.tracing import check, randn, traced
from tests.written import WRITTEN

NAMES = [c[0] for c in WRITTEN]
X = randn(3, 5, 32)


@pytest.mark.parametrize(("fn", "inputs"), [c[1:] for c in WRITTEN], ids=NAMES)
def test_traced_is_eager(monkeypatch: pytest.MonkeyPatch, fn: Any, inputs: Any) -> None:
    check(traced(monkeypatch, fn, inputs), fn, inputs)


LOSSES = (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.soft_margin_loss, F.kl_div,
          F.poisson_nll_loss, F.binary_cross_entropy_with_logits,
          F.hinge_embedding_loss)  # fmt: skip
TYPES = ((torch.float16, torch.bfloat16), (torch.bfloat16, torch.float32),
         (torch.float32, torch.float16))  # fmt: skip


@pytest.mark.filterwarnings("ignore:reduction")
@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_of_two_element_types(
    monkeypatch: pytest.MonkeyPatch, loss: Any, types: tuple[torch.dtype, torch.dtype]
) -> None:
    """PyTorch's type, for all reductions; none where PyTorch traces another one than it computes,
    which is that of the first operand."""
    inputs = tuple(torch.rand(6, 8).to(t) for t in types)

    def losses(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return tuple(loss(x, y, reduction=r) for r in ("none", "mean", "sum"))

    if loss in (F.huber_loss, F.soft_margin_loss) and types[0] != torch.float32:
        assert losses(*inputs)[0].dtype == types[0]
        text = rf"{loss.__name__}, at .*: two element types.* Convert the second"
        with pytest.raises(TraceError, match=text):
            traced(monkeypatch, losses, inputs)
        return
    check(traced(monkeypatch, losses, inputs), losses, inputs)


def test_a_loss_of_two_element_types_is_seen_where_no_gradient_is_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @torch.no_grad()
    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.huber_loss(x, y)

    with pytest.raises(TraceError, match="two element types"):
        traced(monkeypatch, lambda x, y: loss(x, y) + x.sum(), (X.half(), X))


@pytest.mark.parametrize(("fn", "inputs"), [c[1:] for c in MODELS], ids=[c[0] for c in MODELS])
def test_models_are_traced_whole(monkeypatch: pytest.MonkeyPatch, fn: Any, inputs: Any) -> None:
    check(traced(monkeypatch, fn, inputs), fn, inputs)


@pytest.mark.parametrize(("fn", "inputs"), [c[1:] for c in COMPLEX], ids=[c[0] for c in COMPLEX])
def test_complex_numbers(monkeypatch: pytest.MonkeyPatch, fn: Any, inputs: Any) -> None:
    check(traced(monkeypatch, fn, inputs), fn, inputs)


def test_complex_numbers_of_any_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    fn = Rotated()
    shapes = {"x": {0: torch.export.Dim("batch")}}
    program = traced(monkeypatch, fn, (randn(2, 6, 32),), dynamic_shapes=shapes)
    for batch in (1, 2, 5):
        check(program, fn, (randn(batch, 6, 32),))


@pytest.mark.parametrize("length", [1, 5])
def test_rotary_embeddings_compile(length: int) -> None:
    """Queries and keys are rows of their heads; angles are made ready once for both."""
    q, k, freqs = randn(2, length, 4, 64), randn(2, length, 2, 64), randn(length, 32)
    inputs = (q.bfloat16(), k.bfloat16(), torch.polar(torch.ones_like(freqs), freqs))
    program = cs.superoptimize(rotary, inputs, target="h200")
    check(program, rotary, inputs)
    for region in program.regions:
        graph = region.kernel.graph
        assert len(region.kernel.kernels) == 1
        assert all(graph.nodes[i].shape[-1] == 64 for i in (*graph.inputs, *graph.outputs))
        assert [graph.nodes[i].dtype.name for i in graph.outputs] == ["bfloat16"]
    moved = [line.split()[0] for line in program.outside]
    assert sorted(moved) == sorted(
        [
            "aten.index_select.default",
            *["aten.flip.default"] * moved.count("aten.flip.default"),
        ]
    )
    targets = [str(n.target) for n in program.graph_module.graph.nodes]
    assert targets.count("aten.index_select.default") == 2


@pytest.mark.gpu
@pytest.mark.parametrize("name", [c[0] for c in COMPLEX if c[0] != "attention of Llama"])
def test_complex_numbers_on_a_gpu(name: str) -> None:
    """Attention in half only: there are no products of float32."""
    [(fn, inputs)] = [c[1:] for c in COMPLEX if c[0] == name]
    fn = copy.deepcopy(fn).cuda() if isinstance(fn, nn.Module) else fn
    given = [t.cuda() for t in inputs]
    with torch.device("cuda"):
        check(cs.superoptimize(fn, given), fn, given)


@pytest.mark.parametrize(("mask", "length"), [
    ("none", 1), ("none", 7), ("bool", 1), ("bool", 7), ("float", 7), ("positions", 1),
])  # fmt: skip
def test_attention_that_pytorch_composes_is_one_region(mask: str, length: int) -> None:
    """The program for a GPU without a kernel for shared keys and a mask."""

    def attend(q: Tensor, k: Tensor, v: Tensor, given: Tensor) -> Tensor:
        visible = {
            "none": None, "bool": given == 0, "float": given,
            "positions": (torch.arange(7) <= torch.tensor([3, 6])[:, None])[:, None, None],
        }[mask]  # fmt: skip
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)

    q, k, v = randn(2, 4, length, 16), randn(2, 2, 7, 16), randn(2, 2, 7, 16) - 0.2
    hidden = torch.zeros(2, 1, length, 7)
    hidden[1, ..., 4:] = -inf
    with sdpa_kernel(SDPBackend.MATH):
        for inputs in [(q, k, v, hidden), tuple(t.bfloat16() for t in (q, k, v, hidden))]:
            torch.compiler.reset()
            call, reports = compiled(attend)
            check(call, attend, inputs)
            assert [len(r.regions) for r in reports] == [1]


def test_extents_that_depend_on_data_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TraceError, match=r"mul, at .*depends on data, as torch.nonzero"):
        traced(monkeypatch, lambda x: x[x > 0] * 2, (X,))


#: of these the backend is tried as well, forward and backward
COMPILED = (
    "rms2 gemma", "rope halves", "gqa repeat_interleave", "mask tril masked_fill", "mask arange",
    "nanogpt attention", "sliding window", "timm qkv", "qkv split per head", "einsum heads",
    "geglu", "cosine sim", "infonce", "cross entropy smoothing", "smooth l1", "groupnorm",
    "ppo clip", "linear attention", "adaLN", "vit cls cat", "where bool in", "shift tokens",
)  # fmt: skip


@pytest.mark.parametrize("name", COMPILED)
def test_the_backend_is_eager(name: str) -> None:
    _, fn, inputs = WRITTEN[NAMES.index(name)]
    torch.compiler.reset()
    call, reports = compiled(fn)
    check(call, fn, inputs)
    torch.compiler.reset()
    call, more = compiled(fn)
    assert all(r.verdict.taken for report in reports for r in report.regions)
    own, exact = (_gradients(fn, fn, inputs, kind) for kind in (None, torch.float64))
    for mine, theirs, want in zip(_gradients(fn, call, inputs), own, exact, strict=True):
        scale = float(want.abs().max()) + 1e-6
        limit = 2 * float((theirs - want).abs().max()) + 4 * scale * torch.finfo(theirs.dtype).eps
        assert float((mine - want).abs().max()) <= limit
    assert sum(len(r.regions) for r in (*reports, *more)) > 1


def _gradients(fn: Any, call: Any, inputs: Any, dtype: torch.dtype | None = None) -> list[Tensor]:
    given = [t.to(dtype) if dtype and t.is_floating_point() else t for t in inputs]
    given = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in given]
    if isinstance(fn, nn.Module) and dtype:
        call = _as(fn, dtype)
    parameters = list(call.parameters()) if isinstance(call, nn.Module) else []
    results = call(*given)
    results = (results,) if isinstance(results, Tensor) else results
    loss = sum((y * torch.linspace(-1, 1, y.numel()).view(y.shape).to(y)).sum() for y in results)
    sources = [t for t in (*given, *parameters) if t.requires_grad]
    return list(torch.autograd.grad(loss, sources, materialize_grads=True))  # type: ignore[arg-type]


def _as(fn: nn.Module, dtype: torch.dtype) -> nn.Module:
    import copy

    return copy.deepcopy(fn).to(dtype)


# ------------------------------------------------------------------------------- NaN and infinities

SPECIAL = torch.tensor([nan, inf, -inf, 0.0, -0.0, 1.0, -1.0])
A, B = (t.clone() for t in torch.meshgrid(SPECIAL, SPECIAL, indexing="ij"))


def _no_nan(x: Tensor, y: Tensor) -> Tensor:
    return torch.where(torch.isnan(x) | torch.isnan(y), 1.0, torch.minimum(x, y))


RULES: dict[str, Any] = {
    "at most": lambda x, y: torch.where(x <= y, 0.0, x),
    "at most a number": lambda x, y: torch.where(x <= 0, 0.0, y),
    "less": lambda x, y: torch.where(x < y, x, y),
    "at least": lambda x, y: torch.where(x >= y, x, 2.0),
    "greater": lambda x, y: torch.where(x > y, 1.0, y),
    "equal": lambda x, y: torch.where(x == y, x, 3.0),
    "unequal": lambda x, y: torch.where(x != y, y, 3.0),
    "itself": lambda x, y: torch.where(x == x, x, y),
    "not itself": lambda x, y: torch.where(x != x, y, x),
    "isnan": lambda x, y: torch.where(torch.isnan(x), y, x),
    "not": lambda x, y: torch.where(~(x > y), x, y),
    "and": lambda x, y: torch.where((x > 0) & (y > 0), x, y),
    "or": lambda x, y: torch.where((x > 0) | (y <= 0), x, y),
    "masked_fill": lambda x, y: x.masked_fill(y > 0, -inf),
    "infinite where true": lambda x, y: torch.where(x > 0, inf, y),
    "times a condition": lambda x, y: x * (y > 0),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "relu": lambda x, y: F.relu(x) + F.relu(y),
    "clamp": lambda x, y: x.clamp(-0.5, 0.5),
    "clamp from below": lambda x, y: x.clamp(min=0.0),
    "clamp by tensors": lambda x, y: torch.clamp(x, y, y + 1),
    "absolute": lambda x, y: x.abs(),
    "sign": lambda x, y: torch.sign(x),
    "leaky relu": lambda x, y: F.leaky_relu(x),
    "elu": lambda x, y: F.elu(x),
    "log1p and expm1": lambda x, y: (torch.log1p(x), torch.expm1(x)),
    "angles": lambda x, y: torch.sin(x) + torch.cos(x),
    "inverse angles": lambda x, y: (torch.asin(x), torch.acos(x), torch.atan(x)),
    "hyperbolic functions": lambda x, y: (torch.sinh(x), torch.cosh(x), torch.asinh(x)),
    "inverse hyperbolic functions": lambda x, y: (torch.acosh(x), torch.atanh(x)),
    "erfc": lambda x, y: torch.erfc(x),
    "rounding": lambda x, y: (torch.floor(x), torch.ceil(x), torch.round(x), torch.trunc(x)),
    "logsumexp": lambda x, y: (x.logsumexp(-1), y.logsumexp(0), _no_nan(x, y).logsumexp(-1)),
    "softmax of one": lambda x, y: (x.unsqueeze(0).softmax(0), y.unsqueeze(-1).log_softmax(-1)),
    "layer norm of one": lambda x, y: F.layer_norm(x.unsqueeze(-1), (1,)),
    "hard functions": lambda x, y: F.hardtanh(x) + F.relu6(y),
    "amax and amin": lambda x, y: x.amax(-1) + y.amin(0),
    "xlogy": torch.xlogy,
    "lerp from the end": lambda x, y: torch.lerp(x, y, 0.7),
    "lerp from the start": lambda x, y: torch.lerp(x, y, 0.2),
    "infinite": lambda x, y: torch.where((x == inf) | (y == -inf), 7.0, x),
    "next to infinite": lambda x, y: torch.where((x < inf) & (y > -inf), 7.0, x),
    "never": lambda x, y: torch.where((x > inf) | (y < -inf), 7.0, y),
    "never or equal": lambda x, y: torch.where((x >= inf) | (y <= -inf), 7.0, y),
    "limits that are no limits": lambda x, y: torch.where((x <= inf) & (y >= -inf), 7.0, y),
    "NaN somewhere": lambda x, y: torch.where(torch.isnan(x).any(-1, keepdim=True), 0.0, y),
}


@pytest.mark.parametrize("name", RULES)
def test_nan_and_infinities_are_pytorchs(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """In the reference; and each region has a program that the verifier accepts."""
    program = traced(monkeypatch, RULES[name], (A, B))
    torch.testing.assert_close(program(A, B), RULES[name](A, B), equal_nan=True)
    for region in program.regions:
        pipeline.find(region.kernel.graph, pipeline.Options(H200))


#: infinities that are chosen, as data and so that a minimum or a softmax does not see them
LIFTED: dict[str, Any] = {
    "another value": lambda x, y: torch.where(x > 0, y, inf),
    "a number": lambda x, y: torch.where(x > 0, inf, 2.0),
    "both infinities": lambda x, y: torch.where(x > 0, inf, torch.where(y > 0, -inf, x)),
    "amin": lambda x, y: x.masked_fill(y > 0, inf).amin(-1),
    "minimum": lambda x, y: torch.minimum(torch.where(x > 0, inf, y), x),
    "softmin": lambda x, y: (-x.masked_fill(y > 0, inf)).softmax(-1),
    "exponential": lambda x, y: torch.exp(-torch.where(x > 0, inf, y)),
    "reciprocal": lambda x, y: 1 / torch.where(x > 0, inf, y.exp()),
    "added": lambda x, y: y + torch.where(x > 0, inf, 0.0),
}


@pytest.mark.parametrize("name", LIFTED)
def test_infinities_that_are_chosen(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    x, y = randn(16, 64), randn(64, 16).mT.contiguous()
    y[3] = 1.0
    program = traced(monkeypatch, LIFTED[name], (x, y))
    torch.testing.assert_close(program(x, y), LIFTED[name](x, y), equal_nan=True)
    for region in program.regions:
        pipeline.find(region.kernel.graph, pipeline.Options(H200))


@pytest.mark.gpu
@pytest.mark.ptx
def test_infinities_that_are_chosen_on_a_gpu() -> None:
    """The first half of each row, so that blocks of a long one see nothing at first."""

    def softmin(x: Tensor, y: Tensor) -> Tensor:
        return (-torch.where(y > 0, inf, x)).softmax(-1)

    x, y = randn(4, 40000).cuda(), torch.zeros(4, 40000).cuda()
    y[:, :20000] = 1.0
    check(cs.superoptimize(softmin, (x, y)), softmin, (x, y))


@pytest.mark.gpu
@pytest.mark.ptx
def test_slopes_of_a_mean_of_a_linear_layer() -> None:
    """A backward pass with a sum over everything beside its products."""
    x, w, c = (t.half().cuda().requires_grad_() for t in (randn(8, 1, 8), randn(8, 8), randn(8)))
    mean = lambda x, w, c: F.linear(x, w, c).mean()  # noqa: E731
    program = cs.superoptimize(mean, (x, w, c))
    found, wanted = (torch.autograd.grad(f(x, w, c), (x, w, c)) for f in (program, mean))
    torch.testing.assert_close(found, wanted)


#: of these the kernels run without a GPU as well
SMALL = ("infinite where true", "masked_fill")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.ptx) if n in SMALL else n for n in RULES]
)
def test_nan_and_infinities_on_a_gpu(name: str) -> None:
    x, y = A.repeat(8, 8).cuda(), B.repeat(8, 8).cuda()
    program = cs.superoptimize(RULES[name], (x, y))
    torch.testing.assert_close(program(x, y), RULES[name](x, y), equal_nan=True)


@pytest.mark.gpu
def test_a_mask_that_is_read_on_a_gpu() -> None:
    x, mask = randn(64, 256).bfloat16().cuda(), (randn(64, 256) > 1).cuda()

    def masked(x: Tensor) -> Tensor:
        return x.masked_fill(mask.to(x.device), -inf).softmax(-1)

    check(cs.superoptimize(masked, (x,)), masked, (x,))


def test_choices_compile() -> None:
    """A mask that is read, a comparison, a fill with -inf and a maximum, in one kernel."""

    def masked(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        scores = torch.where(x >= y, x, 0.5 * torch.maximum(x, y))
        return scores.masked_fill(mask, -inf).softmax(-1)

    x, y = randn(64, 256).bfloat16(), randn(64, 256).bfloat16() + 0.1
    mask = randn(64, 256) > 1
    program = cs.superoptimize(masked, (x, y, mask), target="h200")
    assert len(program.kernel.kernels) == 1
    check(program, masked, (x, y, mask))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_functions_compile(dtype: torch.dtype) -> None:
    """All in one kernel; sine and cosine for angles of any size."""

    def functions(x: Tensor) -> Tensor:
        waves = torch.sin(x) * torch.cos(x)
        steps = torch.floor(x) + torch.ceil(x) - torch.round(x) * torch.trunc(x)
        return waves + steps + torch.log1p(x * x) + torch.expm1(x)

    x = randn(64, 256).to(dtype)
    program = cs.superoptimize(functions, (x,), target="h200")
    ptx = program.kernel.ptx
    assert len(program.kernel.kernels) == 1
    assert not re.search(r"(sin|cos)\.approx", ptx) and "cvt.rmi" in ptx and "cvt.rni" in ptx
    check(program, functions, (x,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inverse_and_hyperbolic_functions_compile(dtype: torch.dtype) -> None:
    def functions(x: Tensor) -> Tensor:
        inside = (x * 0.25).clamp(-0.9, 0.9)
        inverse = torch.asin(inside) - torch.acos(inside) + torch.atan(x) + torch.atanh(inside)
        hyperbolic = torch.sinh(x) - torch.cosh(x) + torch.asinh(x) - torch.acosh(x * x + 1.5)
        return inverse + hyperbolic + torch.erfc(x)

    x = randn(64, 256).to(dtype)
    program = cs.superoptimize(functions, (x,), target="h200")
    assert len(program.kernel.kernels) == 1 and program.kernel.ptx
    check(program, functions, (x,))


def _infinite_rows(n: int) -> Tensor:
    """Rows of half infinities, of those only, with inf, with both, with NaN, and one of numbers."""
    x = randn(6, n)
    x[0, : n // 2] = x[1] = x[3, 1] = -inf
    x[2, n // 3] = x[3, 0] = inf
    x[4, -1] = nan
    return x


def _logsumexp(x: Tensor) -> Tensor:
    return x.logsumexp(-1)


@pytest.mark.parametrize("n", [40, 70000])
def test_logsumexp_of_infinite_rows_compiles(n: int) -> None:
    x = _infinite_rows(n)
    program = cs.superoptimize(_logsumexp, (x,), target="h200")
    assert len(program.kernel.kernels) == 1
    torch.testing.assert_close(program(x), _logsumexp(x), equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [40, 4096, 70000, 200000])
def test_logsumexp_of_infinite_rows_on_a_gpu(n: int, dtype: torch.dtype) -> None:
    x = _infinite_rows(n).to("cuda", dtype)
    program = cs.superoptimize(_logsumexp, (x,))
    torch.testing.assert_close(program(x), _logsumexp(x), equal_nan=True)


def test_a_layer_of_torch_nn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout that drops nothing stands between its regions."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    check(traced(monkeypatch, layer, (X,)), layer, (X,))


def test_regions_that_need_each_other_through_the_rest() -> None:
    """cumprod, which no kernel computes, stands between two of them."""

    def loss(x: Tensor, y: Tensor) -> Tensor:
        p = x.sigmoid()
        return ((p * 2).cumprod(-1) * y + p * y.exp()).mean()

    call, _ = compiled(loss)
    check(call, loss, (X, X + 0.1))


def test_what_computes_no_numbers_is_left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    def embedded(ids: Tensor, table: Tensor) -> Tensor:
        weights = (ids != 0).unsqueeze(-1)
        return (F.embedding(ids, table) * weights).sum(1) / weights.sum(1)

    ids, table = torch.tensor([[3, 1, 0], [2, 2, 2]]), randn(8, 16)
    program = traced(monkeypatch, embedded, (ids, table))
    check(program, embedded, (ids, table))
    check(program, embedded, (ids.flip(1) + 1, table))
    line = inspect.getsourcelines(embedded)[1] + 2
    assert f"sum (test_trace_written.py:{line})" in program.outside
    assert not any("embedding" in text for text in program.outside)  # rows that kernels take
