"""torch.compile(backend="cutesuper") on a GPU: kernels in the place of regions, by the rule of
`acceptable`, in all modes that Inductor has."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cutesuper as cs

torch = pytest.importorskip("torch")

from torch._dynamo.utils import counters  # noqa: E402

from cutesuper import measure  # noqa: E402
from cutesuper.errors import DeviceError  # noqa: E402
from cutesuper.runtime.cache import ROOT_VARIABLE  # noqa: E402
from cutesuper.runtime.programs import Kept  # noqa: E402
from cutesuper.torch.compile import region_operator, selection  # noqa: E402
from cutesuper.torch.compile.region_operator import key_of  # noqa: E402
from cutesuper.verify.numeric import acceptable  # noqa: E402
from tests.backends import (  # noqa: E402
    MODELS,
    GatedMLP,
    Layers,
    gradients,
    judge,
    judge_gradients,
    losses,
)
from tests.test_positions import MASKS, Decode, S  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("error:.*please report")]

WIDTH = 256


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels are for sm_90a")
    torch.manual_seed(0)
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()
    torch.cuda.empty_cache()


def made(name: str, dtype: Any = torch.bfloat16, batch: int = 2) -> tuple[Any, Any]:
    make, shape = MODELS[name]
    return make(WIDTH).cuda().to(dtype), torch.randn(shape(batch, WIDTH), device="cuda").to(dtype)


def compile_with(model: Any, take: str = "all", inductor: Any = None, **how: Any) -> Any:
    options = {"take": take, **({"inductor": inductor} if inductor else {})}
    return torch.compile(model, backend="cutesuper", options=options, **how)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MODELS)
def test_inference(name: str, dtype: Any, launched: list[Any]) -> None:
    model, x = made(name, dtype)
    call = compile_with(model.eval(), fullgraph=True)
    with torch.no_grad():
        for _ in range(2):
            judge(model, call(x), x)
    assert launched


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", ["bool", "added"])
def test_masks_of_positions(name: str, batch: int, launched: list[Any]) -> None:
    """Each query head with keys of its own: PyTorch keeps the attention whole."""
    model, given, exact = decoding(name, batch, heads=2)
    call = compile_with(model, fullgraph=True)
    with torch.no_grad():
        for shift in (0, 1, 9):
            p = (given[3] + shift) % S
            report = acceptable(call(*given[:3], p), model(*exact, p), model(*given[:3], p),
                                torch.bfloat16)  # fmt: skip
            assert report, report.message
    assert launched


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("heads", [2, 8])
@pytest.mark.parametrize("name", ["bool", "added", "int32 lengths"])
def test_traced_masks_of_positions(name: str, heads: int, batch: int) -> None:
    model, given, exact = decoding(name, batch, heads)
    with torch.no_grad():
        program = cs.superoptimize(model, given)
        assert len(program.kernel.graph.inputs) == 4
        for shift in (0, 1, 9):
            p = (given[3] + shift) % S
            report = acceptable(program(*given[:3], p), model(*exact, p), model(*given[:3], p),
                                torch.bfloat16)  # fmt: skip
            assert report, report.message


def decoding(name: str, batch: int, heads: int) -> tuple[Any, tuple[Any, ...], list[Any]]:
    """Attention of one query, its inputs, and those of numbers in float64."""
    q, k, v = (
        torch.randn(batch, h, n, 64, device="cuda").bfloat16()
        for h, n in ((heads, 1), (2, S), (2, S))
    )
    p = torch.tensor([S - 1, 0, 7][:batch], device="cuda")
    return Decode(MASKS[name]), (q, k, v, p), [t.double() for t in (q, k, v)]


@pytest.mark.parametrize("name", MODELS)
def test_gradients(name: str, launched: list[Any]) -> None:
    model, x = made(name)
    call = compile_with(copy.deepcopy(model), fullgraph=True)
    judge_gradients(model, gradients(call._orig_mod, call, x), x)
    assert launched


@pytest.mark.parametrize("name", MODELS)
def test_faster(name: str) -> None:
    model, x = made(name)
    call = compile_with(model.eval(), take="faster")
    with torch.no_grad():
        judge(model, call(x), x)
        report = cs.explain(model, (x,))
    timed = [r.verdict for g in report.graphs for r in g.regions if r.verdict.inductor_us]
    assert timed or name == "conv net"
    for v in timed:
        assert v.inductor_us is not None
        if v.measured_us is None:  # out of reach
            assert not v.taken and v.predicted_us > v.inductor_us * selection.REACH
            continue
        alone = v.measured_us <= v.inductor_us * (1 - selection.GAIN)
        # copies around a region that is faster alone may make the whole graph slower with it
        assert v.taken == (alone and not v.reason.startswith("given back"))
        assert 0.5 < v.inductor_us < 1000


def test_faster_takes_what_is_faster() -> None:
    """A gated MLP of one token at the sizes of a 7B model, which the benchmarks show to be."""
    model = GatedMLP(4096, 4096).cuda().bfloat16()
    x = torch.randn(8, 4096, device="cuda").bfloat16()
    with torch.no_grad():
        report = cs.explain(model, (x,))
        assert report.taken, str(report)
        judge(model, compile_with(model, take="faster")(x), x)


def test_what_gets_no_kernels_is_as_fast_as_with_inductor() -> None:
    class Scan(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            for _ in range(3):
                x = torch.atan2(torch.cumprod(x, -1), torch.ones_like(x)) * torch.sigmoid(x)
            return x

    model = Scan()
    x = torch.randn(4096, 4096, device="cuda").bfloat16()
    with torch.no_grad():
        assert not cs.explain(model, (x,)).taken
        calls = [compile_with(model, "faster"), torch.compile(model)]
        for call in calls:
            call(x)
        clock = measure.device_of(x.device)
        assert clock is not None
        ours, theirs = measure.device_us(
            [lambda given, call=call: call(*given) for call in calls],
            lambda n: [torch.randn_like(x)],
            clock,
        )
    assert ours < 1.03 * theirs


def test_equal_layers_are_judged_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    counted: list[int] = []
    real = measure.device_us
    monkeypatch.setattr(measure, "device_us", lambda *a: counted.append(1) or real(*a))
    monkeypatch.setattr(selection, "_verdicts", Kept())

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = GatedMLP(WIDTH, WIDTH)

        def forward(self, x: Any) -> Any:
            return torch.atan2(torch.cumprod(self.mlp(x), -1), torch.ones_like(x))

    x = torch.randn(16, WIDTH, device="cuda").bfloat16()
    found: dict[int, int] = {}
    with torch.no_grad():
        for layers in (2, 4):
            counted.clear()
            selection._verdicts.clear()
            monkeypatch.setenv(ROOT_VARIABLE, str(tmp_path / f"{layers}"))
            cs.explain(Layers(Layer, layers).cuda().bfloat16(), (x,))
            found[layers] = len(counted)
    assert found[2] == found[4] > 0


def test_modelled() -> None:
    model, x = made("gated MLP")
    with torch.no_grad():
        report = cs.explain(model, (x,), options={"take": "modelled"})
        judge(model, compile_with(model, take="modelled")(x), x)
    verdicts = [r.verdict for g in report.graphs for r in g.regions]
    assert verdicts and all(v.measured_us is None for v in verdicts)


# --- CUDA graphs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["mode", "option"])
@pytest.mark.parametrize("take", ["all", "faster"])
@pytest.mark.parametrize("name", ["gated MLP", "block"])
def test_cuda_graphs(name: str, take: str, how: str) -> None:
    model, _ = made(name)
    if how == "mode" and take == "faster":
        call = torch.compile(model, backend="cutesuper", mode="reduce-overhead")
    else:
        call = compile_with(model, take, {"triton.cudagraphs": True})
    with torch.no_grad():
        for _ in range(4):
            x = made(name)[1]
            torch.compiler.cudagraph_mark_step_begin()
            judge(model, call(x).clone(), x)
    assert not counters["inductor"]["cudagraph_skips"]


def test_training_in_cuda_graphs() -> None:
    model, x = made("gated MLP", torch.bfloat16, batch=8)
    twin = copy.deepcopy(model)
    call = compile_with(model, "all", {"triton.cudagraphs": True})
    ours, theirs = losses(model, call, x, 5), losses(twin, twin, x, 5)
    assert ours == pytest.approx(theirs, rel=2e-2)
    assert not counters["inductor"]["cudagraph_skips"]


def test_a_capture_by_hand() -> None:
    model, x = made("gated MLP")
    call = compile_with(model)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        call(x)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            y = call(x)
        x.copy_(torch.randn_like(x))
        graph.replay()
        judge(model, y, x)


def test_a_capture_that_needs_new_kernels() -> None:
    g = cs.new_kernel_graph()
    x = g.new_input((cs.symbol("M"), 64), cs.bfloat16)
    g.mark_output(g.softmax(g.mul(x, 3.25)))
    key = key_of(g)
    given = torch.randn(5, 64, device="cuda").bfloat16()
    region_operator.region(key, [given])
    torch.cuda.synchronize()
    rows = given.repeat(20, 1)
    with (
        pytest.raises(DeviceError, match="falls into the capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        region_operator.region(key, [rows])
    torch.cuda.synchronize()
    [y] = region_operator.region(key, [rows])
    torch.testing.assert_close(y, torch.softmax(rows * 3.25, -1), rtol=0.02, atol=0.01)


# --- batches, training ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["MLP", "gated MLP", "block"])
def test_any_batch_is_one_graph(name: str, launched: list[Any]) -> None:
    model, _ = made(name)
    call = compile_with(model, dynamic=True, fullgraph=True)
    with torch.no_grad():
        for batch in (4, 9, 2, 70, 200):
            x = made(name, batch=batch)[1]
            judge(model, call(x), x)
    assert counters["stats"]["unique_graphs"] == 1
    assert len(set(launched)) >= 4


def test_any_batch_in_cuda_graphs() -> None:
    model, _ = made("gated MLP")
    call = compile_with(model, "all", {"triton.cudagraphs": True}, dynamic=True)
    with torch.no_grad():
        for batch in (4, 9, 4, 70, 9, 70, 4):
            x = made("gated MLP", batch=batch)[1]
            torch.compiler.cudagraph_mark_step_begin()
            judge(model, call(x).clone(), x)


@pytest.mark.parametrize("take", ["all", "faster"])
@pytest.mark.parametrize("name", ["gated MLP", "block", "conv net"])
def test_loss_curves(name: str, take: str) -> None:
    model, x = made(name, batch=8)
    twin = copy.deepcopy(model)
    call = compile_with(model, take)
    ours, theirs = losses(model, call, x, 3), losses(twin, twin, x, 3)
    assert ours == pytest.approx(theirs, rel=2e-2)


def test_autocast(launched: list[Any]) -> None:
    model, x = made("gated MLP", torch.float32, batch=8)
    call = compile_with(model)
    with torch.autocast("cuda", torch.bfloat16):
        loss = call(x).float().square().mean()
        want = model(x).float().square().mean()
    loss.backward()
    assert float(loss) == pytest.approx(float(want), rel=2e-2) and launched
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
