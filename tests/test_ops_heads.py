"""Losses of linear layers whose logits are never stored whole; no GPU, but for the last tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import cutesuper as cs
from cutesuper.errors import DTypeError, GraphError, OperatorError, ShapeError
from cutesuper.verify.numeric import acceptable

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from cutesuper.autodiff.gradient import joint  # noqa: E402
from cutesuper.ir.dims import extent  # noqa: E402
from cutesuper.pipeline import Options, find  # noqa: E402
from cutesuper.runtime.calling import reference_of  # noqa: E402
from cutesuper.runtime.memory import Use, homes, overwritten  # noqa: E402
from cutesuper.targets import H200  # noqa: E402
from cutesuper.torch.ops import programs  # noqa: E402
from cutesuper.torch.ops.heads import (  # noqa: E402
    Head,
    HeadOperator,
    Part,
    chunks,
    cross_entropy,
    definition,
    library,
)

F = torch.nn.functional
INF = float("inf")


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 128 rows, whatever the rows are."""
    monkeypatch.setattr(definition, "CHUNK_BYTES", 1)
    monkeypatch.setattr(chunks, "_rows", type(chunks._rows)())


def arguments(rows: int, k: int = 16, v: int = 37, bias: bool = True, **made: Any) -> list[Any]:
    torch.manual_seed(rows)
    found: list[Any] = [
        torch.randn(rows, k, **made),
        torch.randn(v, k, **made) * k**-0.5,
        torch.randint(v, (rows,), device=made.get("device")),
        torch.randn(v, **made) if bias else None,
    ]
    found[2][1::5] = -100
    return found


def plain(
    x: Any, weight: Any, target: Any, bias: Any = None, *, z_loss: float = 0.0,
    softcap: float | None = None, reduction: str = "mean", **options: Any,
) -> Any:  # fmt: skip
    """The same with functions of PyTorch; 16-bit logits become float32."""
    z = F.linear(x, weight, bias)
    z = z if z.dtype == torch.float64 else z.float()
    z = z if softcap is None else softcap * (z / softcap).tanh()
    losses = F.cross_entropy(z, target, reduction="none", **options)
    counts = target != options.get("ignore_index", -100)
    losses = losses + z_loss * z.logsumexp(-1).square() * counts
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / counts.sum()


def gradients(run: Callable[..., Any], given: list[Any], dtype: Any, **options: Any) -> list[Any]:
    """The loss, and the gradients of all floating-point arguments for a cotangent that is no power
    of two."""
    leaves = [
        t.detach().to(dtype).requires_grad_() if t is not None and t.is_floating_point() else t
        for t in given
    ]
    loss = run(*leaves, **options)
    wrt = [t for t in leaves if t is not None and t.requires_grad]
    torch.manual_seed(7)
    return [loss.detach(), *torch.autograd.grad(loss, wrt, 0.3 * torch.randn(loss.shape).to(loss))]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"ignore_index": 3, "label_smoothing": 0.1},
    {"z_loss": 1e-2},
    {"softcap": 3.0, "label_smoothing": 0.2, "z_loss": 1e-3},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_losses_and_gradients(options: dict[str, Any], reduction: str, small_chunks: None) -> None:
    for rows in (2, 128, 300):
        given = arguments(rows, bias=rows != 128)
        if "ignore_index" in options:
            given[2] = given[2].abs() % 37
        found, want = (
            gradients(run, given, torch.float32, reduction=reduction, **options)
            for run in (cs.ops.linear_cross_entropy, plain)
        )
        torch.testing.assert_close(found, want)


def test_more_chunks_are_added_in_float32(small_chunks: None) -> None:
    """The sums of 6 chunks are rounded once."""
    given = arguments(6 * 128 - 1, bias=False)
    given[:2] = (t.bfloat16() for t in given[:2])
    found, eager, want = (
        gradients(run, given, dtype)
        for run, dtype in (
            (cs.ops.linear_cross_entropy, torch.bfloat16),
            (plain, torch.bfloat16),
            (plain, torch.float64),
        )
    )
    for ours, exact, theirs in zip(found, want, eager, strict=True):
        assert (report := acceptable(ours, exact, theirs, ours.dtype)), report
    kinds: list[Any] = [k for call, k, *_ in programs._programs if call == "linear_cross_entropy"]
    forms = [form for _, form in kinds]
    assert any(f.wide and f.adds for f in forms)


def test_calls_of_tensors_of_more_than_2_31_elements() -> None:
    """Kernels see a chunk of the rows; their offsets in a weight have as many bits as they need."""
    with FakeTensorMode():
        x, weight = (torch.empty(n, 4096, device="cuda") for n in (2**20, 2**19))
        target = torch.empty(2**20, device="cuda", dtype=torch.int64)
        call = chunks.Call(
            cross_entropy._operator.head, [x, weight, target, None], (-100, 0.0, 0.0, 0.0)
        )
    assert call.count == 2**20


def test_frozen_parts() -> None:
    x, weight, target, _ = arguments(9)
    loss = cs.ops.linear_cross_entropy(x.requires_grad_(), weight, target)
    [dx] = torch.autograd.grad(loss, x)
    [want] = torch.autograd.grad(plain(x, weight, target), x)
    torch.testing.assert_close(dx, want)
    assert not cs.ops.linear_cross_entropy(x.detach(), weight, target).requires_grad


def test_rows_that_do_not_count() -> None:
    x, weight, target, _ = arguments(6)
    x.requires_grad_()
    loss = cs.ops.linear_cross_entropy(x, weight, target.fill_(-100))
    assert loss.isnan() and not torch.autograd.grad(loss, x)[0].any()
    target[2] = 37  # neither a class nor ignored
    assert cs.ops.linear_cross_entropy(x, weight, target, reduction="sum").isnan()


def test_no_rows() -> None:
    x, weight, target, _ = arguments(2)
    loss = cs.ops.linear_cross_entropy(x[:0], weight.requires_grad_(), target[:0], reduction="sum")
    assert loss == 0 and not torch.autograd.grad(loss, weight)[0].any()


def test_leading_dimensions_and_the_module() -> None:
    x, weight, target, bias = arguments(12)
    whole = cs.ops.linear_cross_entropy(x, weight, target, bias, reduction="none")
    some = cs.ops.linear_cross_entropy(
        x.view(3, 4, 16), weight, target.view(3, 4), bias, reduction="none"
    )
    assert torch.equal(some, whole.view(3, 4))
    loss = cs.nn.LinearCrossEntropyLoss(label_smoothing=0.1)(x, weight, target, bias)
    torch.testing.assert_close(loss, plain(x, weight, target, bias, label_smoothing=0.1))


def test_autocast() -> None:
    given = [t.requires_grad_() if t.is_floating_point() else t for t in arguments(9)]
    with torch.autocast("cpu", torch.bfloat16):
        loss = cs.ops.linear_cross_entropy(*given)
        want = F.cross_entropy(F.linear(given[0], given[1], given[3]).float(), given[2])
    torch.testing.assert_close(loss, want, rtol=1e-3, atol=0)  # PyTorch rounds the logits
    assert torch.autograd.grad(loss, given[1])[0].dtype == torch.float32


def test_compiled() -> None:
    x, weight, target, _ = arguments(9)

    def loss(x: Any, weight: Any) -> Any:
        return cs.ops.linear_cross_entropy(x * 2, weight, target) * 3

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    found, want = (gradients(run, [x, weight], torch.float32) for run in (compiled, loss))
    assert all(map(torch.equal, found, want))


def test_library() -> None:
    x, weight, target, _ = arguments(9)
    x.requires_grad_()
    given = (x, weight, target, None, -100, 0.0, 0.0, 0.0)
    factors, needs = torch.rand(9), [True, False, False, False]
    ops = torch.ops.cutesuper
    torch.library.opcheck(ops.linear_cross_entropy.default, given)
    torch.library.opcheck(ops.linear_cross_entropy_total.default, (*given, factors, needs))


def test_no_second_derivative() -> None:
    x, weight, target, _ = arguments(9)
    x.requires_grad_()
    for reduction in ("none", "sum"):
        loss = cs.ops.linear_cross_entropy(x, weight, target, reduction=reduction).sum()
        [dx] = torch.autograd.grad(loss, x, torch.ones_like(loss).requires_grad_(), None, True)
        with pytest.raises(GraphError, match="create_graph"):
            dx.sum().backward()


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"target": torch.zeros(3, dtype=torch.int64)}, ShapeError, r"target\[3\]"),
        ({"weight": torch.zeros(37, 15)}, ShapeError, r"weight\[37, 15\]"),
        ({"bias": torch.zeros(36)}, ShapeError, r"bias\[36\]"),
        ({"target": torch.zeros(9)}, DTypeError, "int64"),
        ({"x": None}, DTypeError, "x=None"),
        ({"softcap": 0.0}, OperatorError, "softcap"),
        ({"label_smoothing": 1.5}, OperatorError, "label_smoothing"),
        ({"z_loss": INF}, OperatorError, "z_loss"),
        ({"reduction": "max"}, OperatorError, "reduction"),
        ({"ignore_index": 1 << 40}, OperatorError, "ignore_index"),
    ],
)
def test_refusals(change: dict[str, Any], error: type[Exception], match: str) -> None:
    x, weight, target, bias = arguments(9)
    given = {"x": x, "weight": weight, "target": target, "bias": bias}
    with pytest.raises(error, match=match):
        cs.ops.linear_cross_entropy(**{**given, **change})


# --- other heads ---------------------------------------------------------------------------------


def _distilled(g: Any, x: Any, weight: Any, teacher: Any) -> Any:
    """``KL(softmax(teacher) || softmax(x weight^T))`` of each row."""
    ours, theirs = g.log_softmax(g.matmul(x, g.transpose(weight))), g.log_softmax(teacher)
    return g.sum(g.mul(g.exp(theirs), g.sub(theirs, ours)), -1)


_distillation = HeadOperator(
    Head(
        "test_linear_kl",
        (Part("x", 1, rows=True), Part("weight", 2), Part("teacher", 1, rows=True)),
        (),
        _distilled,
    )
)


def _kl(x: Any, weight: Any, teacher: Any) -> Any:
    ours = F.linear(x, weight).to(torch.promote_types(x.dtype, torch.float32)).log_softmax(-1)
    theirs = teacher.detach().to(ours.dtype).log_softmax(-1)
    return F.kl_div(ours, theirs, reduction="sum", log_target=True)


def _our_kl(x: Any, weight: Any, teacher: Any) -> Any:
    factors = torch.ones(len(x), device=x.device)
    return _distillation.total((x, weight, teacher.detach()), (), factors)


def test_another_head(small_chunks: None) -> None:
    x, weight, *_ = arguments(200)
    teacher = torch.randn(200, 37)
    found: list[Any] = []
    for run in (_our_kl, _kl):
        x, weight = (t.detach().requires_grad_() for t in (x, weight))
        loss = run(x, weight, teacher)
        found.append([loss, *torch.autograd.grad(loss, (x, weight))])
    torch.testing.assert_close(*found)


# --- memory --------------------------------------------------------------------------------------


def use(reads: set[int], writes: set[int], *pairs: tuple[int, int]) -> Use:
    return Use(frozenset(reads), frozenset(writes), frozenset(pairs))


def test_tensors_share_memory_once_nothing_reads_them() -> None:
    """Logits 1, their derivative 2, a copy of it 3, all of one size."""
    steps = [use({0}, {1}), use({1}, {2}), use({2}, {3}), use({3}, {4})]
    assert homes(steps, dict.fromkeys((1, 2, 3), 8)) == {3: 1}
    steps[1] = use({1}, {2}, (1, 2))
    assert homes(steps, dict.fromkeys((1, 2, 3), 8)) == {2: 1}
    assert homes(steps, {1: 8, 2: 4, 3: 8}) == {3: 1}
    steps[3] = use({3, 1}, {4})
    assert homes(steps, dict.fromkeys((1, 2, 3), 8)) == {}


def test_inputs_are_overwritten_by_the_last_that_reads_them() -> None:
    assert overwritten([use({0}, {1}), use({0, 1}, {2}, (0, 2))], 0, 2)
    assert not overwritten([use({0}, {2}, (0, 2)), use({0}, {1})], 0, 2)
    assert not overwritten([use({0}, {2})], 0, 2)
    assert not overwritten([use({0}, {2}, (0, 2)), use({2}, {1})], 0, 2)


def test_sums_stay_where_they_are() -> None:
    """A product adds to the sum so far in its memory, where the pieces of a tile do not overlap."""
    for rows, in_place in ((16384, {("so_far", "out0")}), (336, set[Any]())):
        g = cs.KernelGraph()
        z, x = (g.new_input((rows if n == 0 else 128, 128), "bfloat16") for n in range(2))
        g.mark_output(g.add(g.new_input((rows, 128), "bfloat16", "so_far"), g.matmul(z, x)))
        [plan] = find(g, Options(H200))[1].plans
        names = {(plan.arguments[i].name, plan.arguments[o].name) for i, o in plan.in_place}
        assert names == in_place


def test_what_another_output_needs_stays() -> None:
    """Outputs are stored one after the other: none may lie where a later one still reads."""
    g = cs.KernelGraph()
    x, a, b = (g.new_input((16384, 128), "bfloat16", n) for n in "xab")
    product = x @ g.new_input((128, 128), "bfloat16")
    g.mark_output(product * a)
    g.mark_output(product * b)
    [plan] = find(g, Options(H200))[1].plans
    names = {(plan.arguments[i].name, plan.arguments[o].name) for i, o in plan.in_place}
    assert names == {("a", "out0"), ("b", "out1")}


# --- kernels -------------------------------------------------------------------------------------


def judge(ours: Callable[..., Any], theirs: Callable[..., Any], given: list[Any]) -> None:
    dtype = given[0].dtype
    found, eager = (gradients(run, given, dtype) for run in (ours, theirs))
    want = gradients(theirs, given, torch.float64)
    for a, exact, b in zip(found, want, eager, strict=True):
        assert (report := acceptable(a, exact, b, a.dtype)), report


def form_of(
    rows: int, k: int, v: int, dtype: Any = torch.bfloat16, bias: bool = False, **of: Any
) -> definition.Form:
    with FakeTensorMode():
        given = arguments(rows, k, v, bias, dtype=dtype)
        kind = definition.kind_of(cross_entropy._operator.head, given, (-100, 0.1, 1e-3, 5.0))
    return definition.Form(kind, rows, (True, True, False, bias), **of)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("adds", [False, True])
def test_products_of_the_library(bias: bool, adds: bool) -> None:
    """The same numbers, with the error of 16-bit logits; sums and logits stay where they are."""
    graph = form_of(40, 24, 48, bias=bias, adds=adds).graph(cross_entropy._operator.head)
    cut = library.cut(graph)
    assert cut is not None and len(cut.products) == 3 and len(cut.last) == 2
    assert not any(n.facets.contracts for n in cut.rows.nodes)
    rows = programs.Program(cut.rows, reference_of(cut.rows), None)
    program = cut.program(rows)
    assert all(program.replaces(f"{n}_so_far", k) for n, k in (("weight", 2), ("bias", 3)))
    assert not program.replaces("weight", 2)
    torch.manual_seed(0)
    labels = {"target": torch.randint(48, (40, 1))}
    inputs = [
        labels[n] if n in labels else torch.randn([extent(d) for d in graph.nodes[i].shape]) * 0.3
        for n, i in zip(program.names, graph.inputs, strict=True)
    ]
    inputs = [t.to(graph.nodes[i].dtype.torch) for t, i in zip(inputs, graph.inputs, strict=True)]
    outputs = [graph.nodes[i] for i in graph.outputs]
    found, want, exact = (
        [torch.full([extent(d) for d in n.shape], torch.nan, dtype=n.dtype.torch) for n in outputs]
        for _ in range(3)
    )
    program.run(inputs, found, 40)
    reference_of(graph)(inputs, want, 40)
    reference_of(graph)([t.double() if t.is_floating_point() else t for t in inputs], exact, 40)
    for a, e, b in zip(found, exact, want, strict=True):
        assert (a.double() - e.double()).norm() <= 0.02 * e.double().norm(), (a, b)


def test_what_is_left_to_kernels() -> None:
    """Other types, rows that begin anywhere, and sums in float32."""
    head = cross_entropy._operator.head
    assert library.cut(form_of(64, 32, 48, torch.float16).graph(head)) is None
    assert library.cut(form_of(64, 32, 57).graph(head)) is None
    assert library.cut(form_of(64, 32, 48, adds=True, wide=True).graph(head)) is None


def graph_of(
    losses: Callable[..., Any], shapes: dict[str, tuple[int, int]], wrt: list[str]
) -> cs.KernelGraph:
    g = cs.KernelGraph()
    g.mark_output(losses(g, *(g.new_input(s, "bfloat16", n) for n, s in shapes.items())))
    return joint(g, wrt)


def test_two_products_in_front() -> None:
    """The derivatives of both have memory of their own."""

    def losses(g: Any, x: Any, w: Any, y: Any, v: Any) -> Any:
        p, q = g.matmul(x, g.transpose(w)), g.matmul(y, g.transpose(v))
        return g.sum(g.mul(g.softmax(p), g.square(q)), -1)

    shapes = {"x": (40, 24), "w": (48, 24), "y": (40, 16), "v": (48, 16)}
    graph = graph_of(losses, shapes, list(shapes))
    cut = library.cut(graph)
    assert cut is not None and len(cut.first) == 2 and len(cut.last) == 4
    torch.manual_seed(0)
    given, outputs = ([graph.nodes[i] for i in of] for of in (graph.inputs, graph.outputs))
    inputs = [torch.randn([extent(d) for d in n.shape]).to(n.dtype.torch) * 0.5 for n in given]
    found, want = ([torch.zeros([extent(d) for d in n.shape], dtype=n.dtype.torch)
                    for n in outputs] for _ in range(2))  # fmt: skip
    cut.program(programs.Program(cut.rows, reference_of(cut.rows), None)).run(inputs, found, 40)
    reference_of(graph)(inputs, want, 40)
    for a, b in zip(found, want, strict=True):
        assert (a.double() - b.double()).norm() <= 0.02 * b.double().norm()


OTHERS: dict[str, Callable[..., Any]] = {
    "rows are computed": lambda g, x, w, y: g.logsumexp(g.matmul(g.rms_norm(x), g.transpose(w))),
    "a number before": lambda g, x, w, y: g.logsumexp(g.matmul(g.mul(x, 2.0), g.transpose(w))),
    "nothing between": lambda g, x, w, y: g.sum(g.mul(g.matmul(x, g.transpose(w)), y), -1),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("wrt", [["x"], ["w"], ["x", "w"]])
def test_other_heads_are_left_to_kernels(name: str, wrt: list[str]) -> None:
    shapes = {"x": (64, 32), "w": (48, 32), "y": (64, 48)}
    assert library.cut(graph_of(OTHERS[name], shapes, wrt)) is None


@pytest.mark.parametrize(("rows", "k", "v"), [(4096, 4096, 128256), (8192, 2048, 128256)])
def test_large_products_are_the_library_s(rows: int, k: int, v: int) -> None:
    graph = form_of(rows, k, v).graph(cross_entropy._operator.head)
    cut = library.cut(graph)
    assert cut is not None and library.is_faster(graph, cut, H200)


@pytest.mark.gpu
@pytest.mark.ptx
@pytest.mark.parametrize("bias", [False, True])
def test_kernels_between_products_of_the_library(
    bias: bool, small_chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "is_faster", lambda *_: True)
    for kept in ("_cuts", "_programs"):
        monkeypatch.setattr(library, kept, type(library._cuts)())
    given = arguments(320, 64, 336, bias=bias, device="cuda", dtype=torch.bfloat16)
    judge(cs.ops.linear_cross_entropy, plain, given)
    assert [c for c in library._cuts.values() if c is not None]


@pytest.mark.gpu
@pytest.mark.ptx
def test_kernels_of_three_chunks(small_chunks: None) -> None:
    given = arguments(320, 64, 336, bias=False, device="cuda", dtype=torch.bfloat16)
    judge(cs.ops.linear_cross_entropy, plain, given)


@pytest.mark.gpu
@pytest.mark.ptx
def test_kernels_of_chunks_of_large_tensors(small_chunks: None, narrow: None) -> None:
    """As if offsets in the weight needed 64 bits."""
    given = arguments(300, 64, 344, bias=False, device="cuda", dtype=torch.bfloat16)
    judge(cs.ops.linear_cross_entropy, plain, given)


@pytest.mark.gpu
@pytest.mark.ptx
def test_logits_are_rounded_after_their_bias() -> None:
    """As PyTorch rounds them: at logits of 64, rounding them before would change all by 10 %."""
    g = cs.KernelGraph()
    x, w, b = (g.new_input(s, "bfloat16") for s in ((16, 64), (64, 2304), (2304,)))
    g.mark_output(g.softmax(g.add(g.matmul(x, w), b)), "float32")
    torch.manual_seed(0)
    given = [torch.randn(g.nodes[i].shape, device="cuda", dtype=torch.bfloat16) for i in g.inputs]
    given[0] *= 4
    logits = torch.addmm(given[2], given[0], given[1]).double()
    torch.testing.assert_close(
        cs.superoptimize(g)(*given).double(), logits.softmax(-1), rtol=1e-2, atol=1e-5
    )


@pytest.mark.gpu
def test_kernels_of_odd_extents() -> None:
    given = arguments(37, 65, 51, device="cuda", dtype=torch.float16)
    judge(cs.ops.linear_cross_entropy, plain, given)


@pytest.mark.gpu
def test_kernels_of_another_head() -> None:
    given = arguments(300, 64, 336, bias=False, device="cuda", dtype=torch.bfloat16)[:2]
    teacher = torch.randn(300, 336, device="cuda", dtype=torch.bfloat16)
    judge(lambda x, w: _our_kl(x, w, teacher), lambda x, w: _kl(x, w, teacher), given)


@pytest.mark.gpu
@pytest.mark.parametrize(("v", "k", "rows"), [(128256, 512, 4099), (50257, 768, 12345)])
@pytest.mark.parametrize("scale", [2.0**-6, 8.0])
def test_vocabularies(v: int, k: int, rows: int, scale: float) -> None:
    given = arguments(rows, k, v, bias=v % 2 == 1, device="cuda", dtype=torch.bfloat16)
    given[0] *= scale
    judge(cs.ops.linear_cross_entropy, plain, given)


@pytest.mark.gpu
def test_peak_memory() -> None:
    """One chunk of logits and the gradients, not the logits of all rows."""
    rows, k, v = 8192, 1024, 128256
    given = [
        t.requires_grad_() if t.is_floating_point() else t
        for t in arguments(rows, k, v, bias=False, device="cuda", dtype=torch.bfloat16)[:3]
    ]
    cs.ops.linear_cross_entropy(*given).backward()
    for t in given:
        t.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    cs.ops.linear_cross_entropy(*given).backward()
    most = torch.cuda.max_memory_allocated() - before
    gradients = sum(2 * t.numel() for t in given[:2])
    assert most < 2 * definition.CHUNK_BYTES + 2.1 * gradients < rows * v * 2 * 2
