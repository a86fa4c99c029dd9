"""Regions of the backend: their operator, how they are tried and timed, what is said of them."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import cutesuper as cs
from cutesuper.errors import (
    DeviceError,
    DTypeError,
    FormatError,
    GraphError,
    OptionError,
    SearchError,
    ShapeError,
)
from cutesuper.runtime.calling import Launches

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.nn import functional  # noqa: E402

from cutesuper import measure, pipeline, searches  # noqa: E402
from cutesuper.runtime import records as kept_records  # noqa: E402
from cutesuper.runtime.cache import ROOT_VARIABLE, KernelCache  # noqa: E402
from cutesuper.runtime.programs import Kept  # noqa: E402
from cutesuper.targets.roofline import baseline  # noqa: E402
from cutesuper.torch import internals  # noqa: E402
from cutesuper.torch.aten import table  # noqa: E402
from cutesuper.torch.compile import (  # noqa: E402
    ahead,
    backend,
    case,
    partition,
    region,
    region_operator,
    rest,
    selection,
    whole,
)
from cutesuper.torch.compile.likeness import Likeness  # noqa: E402
from cutesuper.torch.compile.options import read_options  # noqa: E402
from cutesuper.torch.compile.region_operator import key_of, program_of  # noqa: E402
from cutesuper.torch.compile.report import (  # noqa: E402
    GraphReport,
    OutsideReport,
    RegionReport,
    Report,
)
from cutesuper.torch.compile.selection import Verdict  # noqa: E402
from cutesuper.torch.compile.trial import Sample  # noqa: E402
from tests.backends import Attention, Between, GatedMLP, Layers, compiled, judge  # noqa: E402

pytestmark = pytest.mark.filterwarnings("error:.*please report")


def share_searches(monkeypatch: pytest.MonkeyPatch, cache: KernelCache) -> None:
    read, keep = searches.read, searches.keep
    monkeypatch.setattr(searches, "read", lambda about, graph, *_: read(about, graph, cache))
    monkeypatch.setattr(searches, "keep", lambda *found: keep(*found[:3], cache=cache))


@pytest.fixture(autouse=True)
def fresh(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    session_cache: Path,
) -> None:  # fmt: skip
    """Nothing is known of regions; what was found for equal graphs is, unless searches are
    counted."""
    if "searched" not in request.fixturenames:
        share_searches(monkeypatch, KernelCache(session_cache))
    torch.manual_seed(0)
    torch.compiler.reset()
    monkeypatch.setattr(region_operator, "_programs", Kept())
    monkeypatch.setattr(selection, "_verdicts", Kept())
    monkeypatch.setattr(ahead, "shared", lambda: None)
    monkeypatch.setenv(ROOT_VARIABLE, str(tmp_path))


def norm_linear(name: str = "X", rows: Any = None, symbol: str = "M", hint: int = 16) -> Any:
    g = cs.new_kernel_graph()
    x = g.new_input((rows or cs.symbol(symbol, hint), 32), cs.bfloat16, name)
    w = g.new_input((32, 48), cs.bfloat16, f"{name}w")
    y = g.matmul(g.rms_norm(x, normalized_shape=(32,)), w)
    g.mark_output(y)
    g.mark_output(g.silu(y), cs.float32)
    return g


def tensors(rows: int) -> list[Any]:
    return [torch.randn(rows, 32).bfloat16(), torch.randn(32, 48).bfloat16() / 6]


# --- the operator ---------------------------------------------------------------------------------


def test_keys_are_those_of_the_program() -> None:
    key = key_of(norm_linear())
    assert key == key_of(norm_linear("A", symbol="N", hint=512))
    others = [key_of(norm_linear(rows=16)), key_of(norm_linear(), cs.H100),
              key_of(norm_linear(), cs.H200)]  # fmt: skip
    assert len({key, *others}) == 4
    program = program_of(key)
    assert program is program_of(str(key)) and program.target is None
    assert program_of(others[1]).target is cs.H100
    assert program.symbols == (region_operator.ROWS,) and program_of(others[0]).symbols == ()


@pytest.mark.parametrize(
    "edit",
    [lambda k: k[:-4], lambda k: k.replace(f":{region_operator.VERSION}:", ":1:", 1),
     lambda k: "f" * 16 + k[16:], lambda k: "", lambda k: "a:b:c:d"],
)  # fmt: skip
def test_a_key_that_is_none(edit: Any) -> None:
    edited = edit(key_of(norm_linear()))
    with pytest.raises(FormatError, match="not a key of this version"):
        region_operator.region(edited, tensors(2))


def several_extents(*names: str) -> Any:
    """Rows of two symbolic extents, and as many factors as the second."""
    batch, length = (cs.symbol(n, 4) for n in names)
    g = cs.new_kernel_graph()
    x, w = g.new_input((batch, length, 2, 8), cs.float32), g.new_input((length, 1, 8), cs.float32)
    g.mark_output(g.mul(x, w))
    return g


def test_several_symbolic_extents() -> None:
    """Each has a name of its own in the key, a bucket, and a share in what offsets allow."""
    key = key_of(several_extents("B", "S"))
    assert key == key_of(several_extents("N", "A"))
    program = program_of(key)
    assert program.symbols == ("M", "M1") and program._bucket((3, 100)) == (8, 128)
    x, w = torch.randn(3, 5, 2, 8), torch.randn(5, 1, 8)
    [y] = region_operator.region(key, [x, w])
    assert torch.equal(y, x * w)
    assert program.fits((2**13, 2**13)) and not program.fits((2**13, 2**14))
    wanted = program.wanted((4, 100), cs.H200)
    assert wanted is not None and wanted[0].nodes[0].shape[:2] == (
        cs.symbol("M", 8), cs.symbol("M1", 128),
    )  # fmt: skip


def test_graphs_that_have_no_key() -> None:
    with pytest.raises(GraphError, match="no input"):
        key_of(cs.new_kernel_graph())


def test_the_operator_computes_the_graph() -> None:
    key = key_of(norm_linear())
    x, w = tensors(5)
    y, z = region_operator.region(key, [x, w])
    want = functional.rms_norm(x.float(), (32,), eps=1e-6) @ w.float()
    torch.testing.assert_close(y, want.bfloat16(), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(z, functional.silu(want), rtol=1e-5, atol=1e-5)
    turned = [t.t().contiguous().t() for t in (x, w)]
    shifted = torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape)
    for given in (turned, [shifted, w]):
        assert all(torch.equal(a, b) for a, b in zip(region_operator.region(key, given), (y, z),
                                                     strict=True))  # fmt: skip
    torch.library.opcheck(region_operator.region, (key, [x, w]))


def test_no_rows() -> None:
    made = region_operator.region(key_of(norm_linear()), tensors(0))
    assert [t.shape for t in made] == [(0, 48), (0, 48)]
    g = cs.new_kernel_graph()
    g.mark_output(g.sum(g.new_input((cs.symbol("M"), 4), cs.float32), dim=0))
    assert torch.equal(region_operator.region(key_of(g), [torch.zeros(0, 4)])[0], torch.zeros(1, 4))


def test_wrong_tensors() -> None:
    key = key_of(norm_linear())
    x, w = tensors(4)
    for given, error in (
        ([x], cs.errors.ShapeError), ([x[:, :16], w], cs.errors.ShapeError),
        ([x.float(), w], cs.errors.DTypeError), ([x, w.requires_grad_()], GraphError),
    ):  # fmt: skip
        with pytest.raises(error):
            region_operator.region(key, given)


def test_sizes_are_symbols_of_torch() -> None:
    key = key_of(norm_linear())

    def f(x: Any, w: Any) -> Any:
        return region_operator.region(key, [x * 1, w])[1] + 1

    call = torch.compile(f, backend="aot_eager", dynamic=True, fullgraph=True)
    for rows in (3, 8, 5):
        x, w = tensors(rows)
        assert torch.equal(call(x, w), f(x, w))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1


# --- on a GPU that is not there -------------------------------------------------------------------


GPU = torch.device("cuda", 0)


class Kernels:
    """The program of `norm_linear`, of which the reference stands for compiled kernels.

    Attributes:
        program: to be asked for kernels for `GPU`.
        buckets: those for which kernels were made.
    """

    def __init__(self) -> None:
        self.program = program_of(key_of(norm_linear()))
        self.buckets: list[int] = []

    def variant(self, extents: tuple[int, ...], device: Any) -> Any:
        assert device == GPU
        self.buckets += self.program._bucket(extents)
        if self.buckets[-1] == 64:
            raise SearchError("nothing was found")

        def launch(values: list[Any]) -> None:
            self.program._reference(values[:2], values[2:], 0)

        return SimpleNamespace(launches=Launches((), launch))

    def run(self, rows: int) -> None:
        inputs = tensors(rows)
        outputs = self.program._outputs(inputs, {"M": rows}, ())
        self.program._runner((rows,), GPU)(inputs, outputs, {"M": rows})
        assert all(map(torch.equal, outputs, self.program(inputs)))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    made = Kernels()
    monkeypatch.setattr(made.program, "variant", made.variant)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    return made


def test_a_variant_for_each_bucket(kernels: Kernels) -> None:
    for rows in (1, 8, 9, 16, 5, 5000, 9000):
        kernels.run(rows)
    assert kernels.buckets == [8, 16, 4096]
    most = 2**31 // 48
    assert kernels.program._runner((most,), GPU) is not kernels.program._reference
    with pytest.raises(ShapeError, match=rf"called with {most + 1} rows, .* at most {most} of"):
        kernels.program._runner((most + 1,), GPU)


def test_a_tensor_between_kernels_that_is_too_large(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its offsets would not fit into the 32 bits that they have where rows are symbolic; nothing of
    the definition is that large."""
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    program = kernels.program
    monkeypatch.setattr(program, "target_on", lambda device: cs.H200)
    monkeypatch.setattr(program, "found", lambda rows, target: ())
    sizes = iter([(cs.symbol("M", 16), 2**20), (cs.symbol("M", 2**16), 2**16)])

    def compiled(*args: Any) -> Any:
        return SimpleNamespace(intermediates=((next(sizes), torch.float32),))

    monkeypatch.setattr(region_operator.pipeline, "compiled", compiled)
    program.variant((16,), GPU)
    assert program.most == {("M",): (2**31 - 1) // 2**20}
    with pytest.raises(ShapeError, match="a tensor between kernels of shape"):
        program.variant((5000,), GPU)


def test_more_rows_than_kernels_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled model is compiled anew for them, and what was a region is PyTorch's, as the report
    says: nothing but Inductor's code would be as fast."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 24), torch.nn.Softmax(-1))
    monkeypatch.setattr(region_operator, "MAX_ELEMENTS", 24 * 20)
    call, reports = compiled(model, dynamic=True)
    called: list[int] = []
    real = region_operator.Program.__call__

    def counted(self: Any, inputs: Any) -> Any:
        called.append(len(inputs[0]))
        return real(self, inputs)

    monkeypatch.setattr(region_operator.Program, "__call__", counted)
    with torch.no_grad():
        for rows, taken in ((4, True), (20, True), (21, False), (100, False), (5, True)):
            x = torch.randn(rows, 16)
            judge(model, call(x), x)  # what is tried calls the operator too
            called.clear()
            call(x)
            assert bool(called) == taken
    assert [[r.verdict.taken for r in report.regions] for report in reports] == [[True], [False]]
    assert reports[1].regions[0].verdict.reason.startswith("more than 20 rows")


def test_a_bucket_without_kernels(kernels: Kernels) -> None:
    with pytest.warns(RuntimeWarning, match=r"called with 50 rows, for which there are no kernels "
                                            r"\(nothing was found\)"):  # fmt: skip
        kernels.run(50)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernels.run(60)
    assert kernels.buckets == [64]


def test_a_capture_that_needs_new_kernels(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels.run(5)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    kernels.run(7)
    with pytest.raises(DeviceError, match=r"about 20 rows: .* falls into the capture"):
        kernels.run(20)


def test_a_target_of_another_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    assert program_of(key_of(norm_linear(), cs.H100)).target_on(GPU) is cs.H100
    with pytest.raises(DeviceError, match=r"'b200': its kernels are for sm_100, .* \(sm_90\)"):
        program_of(key_of(norm_linear(), cs.B200)).target_on(GPU)


# --- decisions ------------------------------------------------------------------------------------


@dataclass
class Clock:
    """A device that takes as long as it is told for each recording, and for all further ones as
    long as for the last two."""

    times: list[float]
    free: int = 10**9
    device = torch.device("cpu")
    l2_bytes = 1
    recorded: int = 0
    compiled: int = 0
    replays: list[int] = field(default_factory=list)

    def free_bytes(self) -> int:
        return self.free

    def record(self, launch: Any, count: int) -> tuple[int, int]:
        for n in range(count):
            launch(n)
        self.recorded += 1
        return self.recorded - 1, count

    def time(self, recording: tuple[int, int]) -> float:
        place, count = recording
        self.replays.append(place)
        known = place if place < len(self.times) else len(self.times) - 2 + place % 2
        return count * self.times[known]


def take_faster(monkeypatch: pytest.MonkeyPatch, model: Any, x: Any, clock: Clock) -> Any:
    def eager(module: Any, inputs: Any, options: Any) -> Any:
        clock.compiled += 1
        return lambda given: module(*given)

    monkeypatch.setattr(measure, "device_of", lambda device: clock)
    monkeypatch.setattr(selection, "_compiled", eager)
    monkeypatch.setattr(internals, "compile_for_trial", internals.run_eagerly)
    call, reports = compiled(model, take="faster")
    with torch.no_grad():
        judge(model, call(x), x)
    [report] = reports
    return report


@pytest.mark.parametrize("dynamic", [False, True])
def test_both_sides_are_compiled_while_the_model_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, dynamic: bool
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    clock = Clock([1.0, 2.0])
    monkeypatch.setattr(measure, "device_of", lambda device: clock)
    monkeypatch.setattr(whole, "_plainly_faster", lambda *_: None)
    linear = torch.nn.Linear
    # products, which Inductor leaves to PyTorch, so that this takes no C++ compiler
    model = torch.nn.Sequential(linear(16, 16, bias=False), linear(16, 16, bias=False)).bfloat16()
    call, reports = compiled(model, take="faster", dynamic=dynamic)
    x = torch.randn(4, 3, 16).bfloat16()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        y = call(x)
    judge(model, y, x)
    assert [g.taken for g in reports] == [1] and clock.recorded == 4, "the region, and the whole"


@pytest.fixture
def gated() -> tuple[Any, Any]:
    return GatedMLP(16, 24).bfloat16(), torch.randn(4, 16).bfloat16()


@pytest.mark.parametrize(("ours", "taken"), [(98.1, False), (97.9, True), (150.0, False)])
def test_faster_is_two_percent(
    monkeypatch: pytest.MonkeyPatch, gated: Any, ours: float, taken: bool
) -> None:
    monkeypatch.setattr(case, "halves", lambda region: None)
    report = take_faster(monkeypatch, *gated, Clock([ours, 100.0]))
    [verdict] = [r.verdict for r in report.regions]
    assert verdict.taken == taken
    assert (verdict.measured_us, verdict.inductor_us) == pytest.approx((ours, 100.0))
    assert verdict.reason == f"{ours:.1f} us, Inductor's code 100.0 us"
    assert verdict.kernels[0].startswith("k0: ") and verdict.predicted_us


def test_a_part_that_is_faster(monkeypatch: pytest.MonkeyPatch, gated: Any) -> None:
    # the whole, then its first part, then the second and whatever that is made of; the whole graph
    times = [200.0, 100.0, 10.0, 100.0, *[300.0, 100.0] * 4]
    monkeypatch.setattr(whole._Trial, "_times", lambda *given: [90.0, 100.0])
    report = take_faster(monkeypatch, *gated, Clock(times))
    assert report.regions[0].verdict.taken and len(report.regions) > 1
    assert report.taken == 1


class Two(torch.nn.Module):
    """Regions with an operator between them that has no kernel graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GatedMLP(16, 24), GatedMLP(16, 40)

    def forward(self, x: Any) -> Any:
        return self.second(self.first(x).cumprod(0) / 4)


#: times of the whole graph with kernels, for each choice of regions, where Inductor's takes 100
WHOLE = {
    "all kept": ([99.0], "99.0 us with all that are fast alone, 100.0", [True, True]),
    "one given back": (
        [130.0, 90.0], "130.0 us with all that are fast alone, 90.0 us with 1 of them given back",
        [False, True]),
    "all given back": (
        [130.0, 101.0], "130.0 us with all that are fast alone, 100.0 us with 2 of them given back",
        [False, False]),
}  # fmt: skip


@pytest.mark.parametrize("name", WHOLE)
def test_what_makes_the_whole_slower_is_given_back(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    times, text, kept = WHOLE[name]
    monkeypatch.setattr(whole, "_plainly_faster", lambda *_: None)
    monkeypatch.setattr(case, "halves", lambda region: None)
    model, x = Two().bfloat16(), torch.randn(4, 16).bfloat16()
    # the second region saves more, and so it is given back last
    alone = [50.0, 60.0, 50.0, 90.0]
    clock = Clock([*alone, *(t for us in times for t in (us, 100.0))])
    report = take_faster(monkeypatch, model, x, clock)
    assert [r.verdict.taken for r in report.regions] == kept
    assert f"whole graph: {text}" in str(Report(read_options(None), (report,)))
    given_back = [r.verdict.reason for r in report.regions if not r.verdict.taken]
    assert all("given back: the whole graph is slower with it; alone" in r for r in given_back)
    count = clock.recorded
    torch.compiler.reset()
    selection._verdicts.clear()
    again = take_faster(monkeypatch, model, x, clock)
    assert [r.verdict.taken for r in again.regions] == kept and again.whole == report.whole
    assert clock.recorded == count, "it is known from disk"


class Beside(torch.nn.Module):
    """A norm and a product beside what stays PyTorch's."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(1024, 1024, bias=False)

    def forward(self, x: Any) -> Any:
        return self.up(functional.rms_norm(x, x.shape[-1:])).cumprod(-1)


@pytest.mark.parametrize(("alone", "timed"), [(50.0, False), (97.0, True)])
def test_nothing_is_timed_where_regions_save_more_than_the_rest_takes(
    monkeypatch: pytest.MonkeyPatch, alone: float, timed: bool
) -> None:
    """The rest takes 1.5 us and more, and so does writing and reading what lies between."""
    monkeypatch.setattr(case, "halves", lambda region: None)
    # Inductor's code first, as the model expects it to be faster by 1 %
    clock = Clock([100.0, alone, 100.0, 80.0, 100.0])
    model, x = Beside().bfloat16(), torch.rand(64, 1024).bfloat16()
    report = take_faster(monkeypatch, model, x, clock)
    assert report.taken == 1 and report.whole is not None
    assert (report.whole.ours_us is not None) == timed
    assert clock.recorded == (5 if timed else 3)
    if not timed:
        found = re.search(
            r"save 50.0 us alone, their borders cost (\S+) .* outside takes (\S+)",
            report.whole.reason,
        )
        assert found and all(1.5 < float(us) < 3.0 for us in found.groups())


def test_caches_cross_no_border() -> None:
    """Of a step that appends to a cache and attends, what crosses is as small as the token."""
    seen: set[Any] = set()

    class Step(torch.nn.Module):
        def forward(self, x: Any, cache: Any, place: Any) -> Any:
            y = torch.nn.functional.rms_norm(x, x.shape[-1:])
            cache.index_copy_(1, place, y)
            return ((y @ cache.mT).softmax(-1) @ cache).cumprod(-1)

    kept = backend.decide

    def decide(regions: Any, *given: Any, **more: Any) -> Any:
        seen.update(whole._crossing(regions, fuses=True))
        assert len(regions) == 1
        return kept(regions, *given, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "decide", decide)
        call, _ = compiled(Step())
        call(torch.randn(2, 1, 64), torch.zeros(2, 512, 64), torch.tensor([3]))
    assert [n.meta["val"].shape for n in seen] == [(2, 1, 64)], seen


@pytest.mark.parametrize(("fuses", "crossing"), [(False, []), (True, [(64, 32), (64, 32)])])
def test_what_libraries_read_and_write_is_stored_anyway(fuses: bool, crossing: list[Any]) -> None:
    """Between two products stands a region: Inductor has it in a kernel of its own, too."""
    seen: list[Any] = []

    def decide(regions: Any, *_: Any, **__: Any) -> Any:
        norms = [r for r in regions if not r.products]
        seen.extend(whole._crossing(norms, fuses))
        return []

    def step(x: Any, w: Any) -> Any:
        y = functional.rms_norm(x @ w, (32,)) @ w
        return y.cumprod(-1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "decide", decide)
        patch.setattr("cutesuper.torch.compile.partition.MOST_PRODUCTS", 0)
        call, _ = compiled(step)
        call(torch.randn(64, 32), torch.randn(32, 32))
    assert [tuple(n.meta["val"].shape) for n in seen] == crossing


def test_nodes_are_looked_at_once_while_graphs_are_unchanged() -> None:
    graph = make_fx(lambda x: x.exp() + 1, tracing_mode="fake")(torch.randn(3)).graph
    node = next(n for n in graph.nodes if n.target is torch.ops.aten.add.Tensor)
    with table.unchanged():
        first = table.arguments_of(node)
        assert table.arguments_of(node) is first
        node.update_arg(1, 2)
        assert table.arguments_of(node)["other"] == 1
    assert table.arguments_of(node)["other"] == 2
    with table.unchanged():
        assert table.arguments_of(node)["other"] == 2


@pytest.mark.parametrize(("saved", "ready"), [(1.0, 1), (1e3, 0)])
def test_inductor_s_graph_is_not_compiled_where_nobody_is_expected_to_time_it(
    monkeypatch: pytest.MonkeyPatch, saved: float, ready: int
) -> None:
    monkeypatch.setattr(measure, "device_of", lambda device: Clock([]))
    seen: list[Any] = []

    def decide(regions: Any, options: Any, meanwhile: Any) -> Any:
        options = replace(options, take="faster", target=cs.H200)
        asked: list[Any] = []
        beside = whole.Comparison(seen[0], options, asked.append)
        beside.begin([(r, saved) for r in regions])
        seen.append(len(asked))
        return []

    def taken(gm: Any, *given: Any) -> Any:
        seen.append(gm)
        return kept(gm, *given)

    kept = backend.Comparison
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "Comparison", taken)
        patch.setattr(backend, "decide", decide)
        call, _ = compiled(Beside().bfloat16())
        call(torch.rand(64, 1024).bfloat16())
    assert seen[1] == ready


@pytest.mark.parametrize(
    ("function", "moved", "kernels"),
    [
        # a cast is read through, and so is a repeated vector; the result is what the cast stores
        (lambda x, w, v: (x.float() * v.expand(64, -1)).exp().bfloat16(), 64 * 32 * 4 + 64, 1),
        # products are calls of a library, between two kernels
        (lambda x, w, v: (x.exp() @ w).exp(), 64 * 32 * 8, 2),
        (lambda x, w, v: (x.exp().sum(-1), x.tanh()), 64 * 32 * 6 + 128, 2),
        # a product between them, whichever way is shorter
        (lambda x, w, v: ((y := x.exp()) @ w + y).tanh(), 64 * 32 * 10, 2),
        # parts of one tensor are all of it
        (lambda x, w, v: x[:, :16].exp() * x[:, 16:], 64 * 32 * 3, 1),
    ],
)  # fmt: skip
def test_what_is_outside_takes_as_many_kernels_as_inductor_makes(
    function: Any, moved: int, kernels: int
) -> None:
    given = [torch.randn(s, dtype=torch.bfloat16) for s in ((64, 32), (32, 32), (32,))]
    graph = make_fx(function, tracing_mode="fake")(*given).graph
    target = replace(cs.H200, bandwidth=1e6, launch_us=1e-6)
    us = rest.fused_us(graph, [], target, fuses=False)
    assert us == pytest.approx(moved + kernels * 1e-6, abs=1e-7)


def test_a_whole_graph_that_cannot_be_timed(monkeypatch: pytest.MonkeyPatch, gated: Any) -> None:
    monkeypatch.setattr(case, "halves", lambda region: None)
    monkeypatch.setattr(whole, "_SHARE", 1e-9)
    monkeypatch.setattr(whole, "_plainly_faster", lambda *_: None)
    report = take_faster(monkeypatch, *gated, Clock([50.0, 100.0]))
    assert report.taken == 1 and report.whole is not None
    assert "not timed (for want of memory: inputs of" in str(Report(read_options(None), (report,)))


def test_inputs_in_less_memory_than_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = torch.fx.Graph()
    mode = torch._subclasses.FakeTensorMode()
    shapes = {"w": (64, 32), "x": (32, 64), "lengths": (3,), "place": ()}
    with mode:
        for name, shape in shapes.items():
            dtype = torch.int64 if len(shape) < 2 else torch.bfloat16
            graph.placeholder(name).meta["val"] = torch.empty(shape, dtype=dtype)
    graph.output(())
    gm = torch.fx.GraphModule({}, graph)
    lengths = next(n for n in graph.nodes if n.name == "lengths")
    monkeypatch.setattr(whole, "lengths_in", lambda region: {lengths: (0, 23)})
    taken: Any = [SimpleNamespace(region=None)]
    sets = whole.Memory(gm, taken, Clock([], free=12_000)).sets()
    w, x, drawn, place = sets[0]
    assert [t.shape for t in sets[0]] == [torch.Size(s) for s in shapes.values()]
    assert w.data_ptr() == x.data_ptr() and x.isfinite().all(), "one after the other in the pool"
    assert place == 0 and int(drawn.min()) >= 0 and int(drawn.max()) <= 23
    assert len(sets) == measure.TRIAL_SETS.most
    with pytest.raises(MemoryError):
        whole.Memory(gm, taken, Clock([], free=9_000))


@pytest.mark.parametrize(("factor", "theirs", "tried"), [(10.0, 1.0, False), (10.0, 1e6, True)])
def test_what_is_out_of_reach_is_not_compiled(
    monkeypatch: pytest.MonkeyPatch, gated: Any, factor: float, theirs: float, tried: bool
) -> None:
    """Inductor's code is timed first where the model expects it to be faster."""
    kept, compiled_here = selection._found, list[Any]()

    def found(tried_case: Any) -> Verdict:
        v = kept(tried_case)
        return replace(v, predicted_us=v.baseline_us * factor)

    monkeypatch.setattr(selection, "_found", found)
    monkeypatch.setattr(selection, "_compile", compiled_here.append)
    monkeypatch.setattr(case, "halves", lambda region: None)
    monkeypatch.setattr(whole, "_plainly_faster", lambda *_: None)
    clock = Clock([theirs, *[2.0, theirs] * 2])
    [region] = take_faster(monkeypatch, *gated, clock).regions
    v = region.verdict
    assert bool(compiled_here) == tried == v.taken
    assert clock.recorded == (5 if tried else 1) and v.inductor_us == pytest.approx(theirs)
    assert clock.compiled == 1, "Inductor's code is compiled once; kernels alone are not"
    if not tried:
        assert v.reason == f"{v.predicted_us:.1f} us expected, Inductor's code 1.0 us"
        assert v.measured_us is None and region.seconds.trial > 0


def test_there_is_an_end_to_trials_of_little_hope(
    monkeypatch: pytest.MonkeyPatch, gated: Any
) -> None:
    """What the model expects to matter is tried, however long that takes; the rest is not."""
    kept, factor = selection._found, 1.01
    monkeypatch.setattr(
        selection, "_found", lambda c: replace(v := kept(c), predicted_us=v.baseline_us * factor)
    )
    monkeypatch.setattr(selection, "PATIENCE_S", -1.0)
    monkeypatch.setattr(case, "halves", lambda region: None)

    def faster() -> tuple[Verdict, int]:
        torch.compiler.reset()
        selection._verdicts.clear()
        clock = Clock([2.0, 100.0] if factor < 1 else [100.0, 2.0, 100.0, 2.0, 100.0])
        [region] = take_faster(monkeypatch, *gated, clock).regions
        return region.verdict, clock.recorded

    verdict, recorded = faster()
    assert not verdict.taken and recorded == 0
    assert "expected" in verdict.reason and "too little to try it" in verdict.reason
    monkeypatch.setattr(selection, "PATIENCE_S", 100.0)
    assert faster() == (verdict, 0), "the next process knows it"
    KernelCache().clear()
    assert faster()[0].taken
    KernelCache().clear()
    monkeypatch.setattr(selection, "PATIENCE_S", -1.0)
    factor = 0.98
    assert faster()[0].taken


def test_what_is_slower_is_not_checked(monkeypatch: pytest.MonkeyPatch, gated: Any) -> None:
    monkeypatch.setattr(case, "halves", lambda region: None)
    monkeypatch.setattr(selection, "_checked", lambda *_: pytest.fail("it is slower anyway"))
    assert take_faster(monkeypatch, *gated, Clock([100.0, 2.0])).taken == 0


def test_the_folder_of_records_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_records, "MOST", 10)
    kept_records._bound.cache_clear()
    for n in range(9):
        kept_records.write(("question", n), {"answer": n})
    folder = KernelCache().root / "regions"
    for n, path in enumerate(sorted(folder.iterdir())):
        os.utime(path, (n, n))
    oldest = min(folder.iterdir())
    read = next(n for n in range(9) if kept_records.path_of(("question", n)) == oldest)
    assert kept_records.read(("question", read)) == {"answer": read}, "and so it is the newest"
    kept_records.write(("question", 9), {"answer": 9})
    assert len(list(folder.iterdir())) == 10, "a process looks once"
    kept_records._bound.cache_clear()
    kept_records.write(("question", 10), {"answer": 10})
    assert len(list(folder.iterdir())) == 10
    assert all(kept_records.read(("question", n)) == {"answer": n} for n in (read, 10))
    KernelCache().clear()
    assert kept_records.read(("question", 10)) is None and not folder.exists()


def test_what_cannot_be_timed(monkeypatch: pytest.MonkeyPatch, gated: Any) -> None:
    class Refuses(Clock):
        def record(self, launch: Any, count: int) -> Any:
            raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(case, "halves", lambda region: None)
    report = take_faster(monkeypatch, *gated, Refuses([1.0]))
    assert "it cannot be timed: operation not permitted" in report.regions[0].verdict.reason
    torch.compiler.reset()
    selection._verdicts.clear()
    report = take_faster(monkeypatch, *gated, Clock([1.0], free=1000))
    assert "for want of memory: 2 sets of inputs" in report.regions[0].verdict.reason
    assert report.taken == 0


def test_modelled(monkeypatch: pytest.MonkeyPatch, gated: Any, tmp_path: Path) -> None:
    model, x = gated
    for factor, taken in ((1.0, True), (100.0, False)):
        monkeypatch.setenv(ROOT_VARIABLE, str(tmp_path / f"{factor}"))
        kept = selection._found

        def found(*args: Any, factor: float = factor, kept: Any = kept) -> Verdict:
            v = kept(*args)
            return replace(v, predicted_us=v.predicted_us * factor)

        torch.compiler.reset()
        selection._verdicts.clear()
        monkeypatch.setattr(selection, "_found", found)
        call, reports = compiled(model, take="modelled")
        with torch.no_grad():
            judge(model, call(x), x)
        assert bool(reports[0].taken) == taken
        assert "us expected" in reports[0].regions[0].verdict.reason
        monkeypatch.setattr(selection, "_found", kept)


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of nodes of the graphs that are searched."""
    found: list[int] = []
    choose = pipeline.choose

    def counted(graph: Any, *args: Any, **more: Any) -> Any:
        found.append(len(graph.nodes))
        return choose(graph, *args, **more)

    monkeypatch.setattr(pipeline, "choose", counted)
    return found


def decided_again(model: Any, x: Any) -> list[tuple[bool, str]]:
    """The verdicts of a process that has decided nothing, for a model and its gradients."""
    torch.compiler.reset()
    selection._verdicts.clear()
    region_operator._programs.clear()
    call, reports = compiled(model, take="modelled")
    call(x).float().sum().backward()
    return [(r.verdict.taken, r.verdict.reason) for g in reports for r in g.regions]


def test_another_process_searches_nothing(gated: Any, searched: list[int]) -> None:
    """Neither refused nor taken regions are searched again."""
    model = torch.nn.Sequential(gated[0], Between(), torch.nn.Linear(16, 16).bfloat16())
    gated = (model, gated[1])
    first = decided_again(*gated)
    count = len(searched)
    assert count and {taken for taken, _ in first} == {True, False}
    assert decided_again(*gated) == first and len(searched) == count
    records = list(KernelCache().root.glob("regions/*.json"))
    assert records
    for path in records:
        path.write_text("{")
    assert decided_again(*gated) == first and len(searched) == 2 * count, "as if nothing was there"


def test_a_refusal_that_may_pass_is_not_recorded(
    monkeypatch: pytest.MonkeyPatch, gated: Any
) -> None:
    def no_memory(*args: Any) -> Verdict:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(selection, "_found", no_memory)
        assert "for want of memory: no room" in decided_again(*gated)[0][1]
    assert any(taken for taken, _ in decided_again(*gated))


def test_equal_layers_are_not_searched_again(searched: list[int]) -> None:
    """Forward and backward; the first and the last layer have other neighbours."""

    def one() -> Any:
        return torch.nn.Sequential(
            torch.nn.RMSNorm(16), torch.nn.Linear(16, 16, bias=False), Between()
        )

    counts: list[int] = []
    for layers in (3, 4):
        model = Layers(one, layers).bfloat16()
        searched.clear()
        shutil.rmtree(KernelCache().root / "regions", ignore_errors=True)
        decided_again(model, torch.randn(4, 16).bfloat16())
        counts.append(len(searched))
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("parts", [True, False])
def test_a_search_that_finds_nothing(
    monkeypatch: pytest.MonkeyPatch, gated: Any, parts: bool
) -> None:
    model, x = gated
    tried: list[int] = []

    def found(tried_case: Any) -> Verdict:
        tried.append(len(tried_case.region.nodes))
        if tried[-1] == tried[0] or not parts:
            raise SearchError("nothing fits")
        return Verdict(True, "", predicted_us=1.0, baseline_us=2.0)

    monkeypatch.setattr(selection, "_found", found)
    call, reports = compiled(model, take="modelled")
    with torch.no_grad():
        judge(model, call(x), x)
    regions = reports[0].regions
    if parts:
        assert len(tried) == 3 and tried[1] + tried[2] == tried[0]
        assert reports[0].taken == len(regions) == 2
    else:
        assert len(tried) > 3 and min(tried) < 6, "down to single products"
        assert [r.verdict.reason for r in regions] == ["no kernels: nothing fits"]


@pytest.mark.parametrize("damage", ["values", "strides"])
def test_wrong_kernels_are_not_used(
    monkeypatch: pytest.MonkeyPatch, gated: Any, damage: str
) -> None:
    model, x = gated
    call_program = region_operator.Program.__call__

    def wrong(self: Any, inputs: Any) -> list[Any]:
        made = call_program(self, inputs)
        if damage == "strides":
            return [t.t().contiguous().t() for t in made]
        return [t * 1.05 for t in made]

    if damage == "strides":  # views of what the operator returns put them right: take these away
        monkeypatch.setattr(case.Sample, "kernels", property(
            lambda self: lambda *a: [t.t().contiguous().t() for t in self.module(*a)]
        ))  # fmt: skip
    else:
        monkeypatch.setattr(region_operator.Program, "__call__", wrong)
    call, reports = compiled(model)
    with torch.no_grad(), pytest.warns(RuntimeWarning, match="gets no kernels: not what PyTorch"):
        y = call(x)
    judge(model, y, x)
    [report] = reports
    assert report.taken == 0
    expected = "exceeds the limit" if damage == "values" else "has the strides"
    assert all(expected in r.verdict.reason and r.verdict.broken for r in report.regions)


def test_what_must_not_fail(monkeypatch: pytest.MonkeyPatch, gated: Any) -> None:
    model, x = gated

    def fails(*args: Any, **options: Any) -> Any:
        raise ZeroDivisionError("in the search")

    for module, name, message in (
        (
            selection,
            "_found",
            "gets no kernels: ZeroDivisionError while it was tried: in the search",
        ),
        (backend, "partition", r"no regions were chosen \(ZeroDivisionError: in the search\)"),
    ):
        torch.compiler.reset()
        with monkeypatch.context() as patch:
            patch.setattr(module, name, fails)
            call, reports = compiled(model, take="modelled")
            with torch.no_grad(), pytest.warns(RuntimeWarning, match=message):
                judge(model, call(x), x)
        assert [r.taken for r in reports] == [0]


def test_element_wise_work_is_left_alone() -> None:
    call, reports = compiled(lambda x: torch.exp(x) * 2 + 1, take="modelled")
    call(torch.randn(4, 4))
    [region] = reports[0].regions
    assert "nothing but element-wise work" in region.verdict.reason and not region.verdict.taken


# --- prices ---------------------------------------------------------------------------------------


def test_a_roofline() -> None:
    m, k, n = 16, 4096, 8192
    g = cs.new_kernel_graph()
    x = g.new_input((m, k), cs.float16)
    w = g.new_input((n, k), cs.float16)
    bias = g.new_input((n,), cs.float16)
    h = g.rms_norm(x, normalized_shape=(k,))
    g.mark_output(g.relu(g.add(g.matmul(h, g.transpose(w)), bias)))
    found = baseline(g, cs.H200)
    assert found.kernels == 3, "the norm, the product, what follows"
    moved = [2 * 2 * m * k, 2 * (m * k + n * k + m * n), 2 * (2 * m * n + n)]
    us = sum(b / cs.H200.bandwidth for b in moved) * 1e6 + 3 * cs.H200.launch_us
    us += cs.H200.libraries.product_us
    assert found.us == pytest.approx(us)


def test_a_roofline_of_the_tensor_cores() -> None:
    n = 8192
    g = cs.new_kernel_graph()
    a, b = (g.new_input((n, n), cs.bfloat16) for _ in range(2))
    g.mark_output(g.matmul(a, b))
    assert baseline(g, cs.H200).us == pytest.approx(
        2 * n**3 / cs.H200.tensor_flops * 1e6 + cs.H200.launch_us + cs.H200.libraries.product_us
    )


@pytest.mark.parametrize(
    ("rows", "keys", "least"),
    [
        (1, 4096, 11.5),
        (1, 65536, 66.5),
        (2048, 2048, 82.3),
        (4096, 4096, 269),
        (16384, 16384, 3605),
    ],
)
def test_a_roofline_of_attention(rows: int, keys: int, least: float) -> None:
    """Between the roofline of its bytes and what PyTorch was measured to take."""
    g = cs.new_kernel_graph()
    query = g.new_input((1, 8, 4, rows, 128), cs.bfloat16)
    key, value = (g.new_input((1, 8, 1, keys, 128), cs.bfloat16) for _ in range(2))
    g.mark_output(g.scaled_dot_product_attention(query, key, value, is_causal=rows > 1))
    bare = 2 * 2 * 8 * keys * 128 / cs.H200.bandwidth * 1e6
    assert bare + 3 < baseline(g, cs.H200).us <= least * 1.03
    if rows > 1:
        assert baseline(g, cs.H200).us > least * 0.95


def test_medians() -> None:
    drawn: list[int] = []
    seen: dict[str, list[int]] = {"a": [], "b": []}

    def draw(n: int) -> list[Any]:
        drawn.append(n)
        return [torch.full((1000,), float(n)), 3]

    clock = Clock([5.0, 7.0])
    calls = [lambda given, name=name: seen[name].append(int(given[0][0])) for name in seen]
    assert measure.device_us(calls, draw, clock) == pytest.approx([5.0, 7.0])
    assert drawn == list(range(measure.TRIAL_SETS.most)) == seen["a"] == seen["b"]
    rounds = measure.TRIAL_ROUNDS.warm + measure.TRIAL_ROUNDS.count
    assert sorted(clock.replays) == [0] * rounds + [1] * rounds
    pairs = {tuple(clock.replays[i : i + 2]) for i in range(0, 2 * rounds, 2)}
    assert pairs == {(0, 1), (1, 0)}, "they take turns, in both orders"
    few = Clock([1.0], free=3 * 4000 * 4)
    drawn.clear()
    measure.device_us([lambda given: None], draw, few)
    assert len(drawn) == 3


# --- explain --------------------------------------------------------------------------------------


def test_explain_a_training_step() -> None:
    model = GatedMLP(16, 24).bfloat16()
    x = torch.randn(4, 16).bfloat16()
    state = torch.get_rng_state()
    report = cs.explain(model, (x,), options={"take": "all"})
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())
    assert [g.phase for g in report.graphs] == ["forward", "backward"]
    assert report.taken == sum(len(g.regions) for g in report.graphs) > 1
    text = str(report)
    assert text.startswith(f"take='all': {report.taken} of {report.taken} region(s) taken\n")
    assert "backends.py:3" in text and "taken: all regions are taken" in text
    with torch.no_grad():
        report = cs.explain(torch.compile(model), [x])
    assert [g.phase for g in report.graphs] == ["inference"] and report.taken == 0


def test_explain_a_function_with_a_break() -> None:
    def f(x: Any, w: Any) -> Any:
        y = torch.relu(x @ w)
        torch._dynamo.graph_break()
        return torch.cumprod(y, 0).exp() + torch.sort(y).values

    report = cs.explain(f, (torch.randn(4, 8), torch.randn(8, 8)), options={"take": "all"})
    assert len(report.graphs) == 2
    reasons = {o.reason for g in report.graphs for o in g.outside}
    assert any(r.startswith("cumprod is no") for r in reasons)
    assert any(r.startswith("sort is no") for r in reasons)
    places = [p for g in report.graphs for o in g.outside for p in o.where]
    assert places and all(p.startswith("test_backend_regions.py:") for p in places)


def test_explain_says_what_it_cannot_take() -> None:
    with pytest.raises(OptionError, match="give it the arguments of the model as a tuple"):
        cs.explain(torch.exp, torch.ones(2))  # type: ignore[arg-type]
    report = cs.explain(lambda x: x, (torch.ones(2),))
    assert "nothing to compile" in str(report)


def test_the_text_of_a_report() -> None:
    times = "9.0 us, Inductor's code 12.0 us"
    taken = Verdict(True, times, ("k0: y = relu(x)",), 8.04, 11.0, 9, 12)
    refused = Verdict(False, "no kernels: nothing fits")
    graph = GraphReport(
        "forward",
        (
            RegionReport("model.py:3-5", 12, taken, case.Seconds(1.25, 0.5, 12.0)),
            RegionReport("model.py:9", 1, refused),
            RegionReport("model.py:11", 1, refused),
        ),
        (OutsideReport("aten.sort is no operator", tuple(f"model.py:{n}" for n in range(6)), 7),),
        3.5,
    )
    report = Report(read_options({}), (graph,))
    expected = """\
take='faster': 1 of 3 region(s) taken
  decided in 3.5 s; 7 operator(s) are in no region
  taken: 9.0 us, Inductor's code 12.0 us
  without a price: 2 region(s), for the reasons below
  takes long: model.py:3-5, 12.0 us of Inductor's

graph 0 (forward): 1 of 3 region(s) taken, decided in 3.5 s
  region        operators  kernels  us, model     us, measured  s: search  compile  trial
  model.py:3-5  12         1        8.0 vs. 11.0  9.0 vs. 12.0  1.2        0.5      12.0   taken
  2 x not taken: no kernels: nothing fits (model.py:9, model.py:11)
  model.py:3-5 k0: y = relu(x)
  outside, 7 x aten.sort is no operator (model.py:0, model.py:1, model.py:2, model.py:3 and 2 more)\
"""
    assert str(report) == expected


def test_no_line_of_a_report_is_wide_and_no_row_of_its_table_wraps() -> None:
    name = "_".join(["modeling_of_something"] * 3) + ".py"
    kernel = f"k0: out0 = {'add(' * 60}x0{', x1)' * 60}"
    taken = Verdict(True, "9.0 us", (kernel,), 1008.04, 1011.0, 1009, 1012)
    refused = Verdict(False, "at least 15.8 us expected", (), 15.8, 10.5)
    regions = [RegionReport(f"{name}:3-5", 12, taken), RegionReport(f"{name}:9", 1, refused)]
    graph = GraphReport("inference", tuple(regions), (OutsideReport("x" * 300, ("?",), 1),))
    lines = str(Report(read_options({}), (graph,))).splitlines()
    assert max(map(len, lines)) <= 120
    rows = [line for line in lines if line.endswith((" taken", " left")) and "..." in line]
    assert len(rows) == 2 and f"  {name}:3-5 k0: out0 =" in "\n".join(lines)
    assert not any(line.strip().startswith("taken: 9.0") for line in lines)


def test_explain_takes_arguments_by_name() -> None:
    def f(x: Any, *, scale: Any) -> Any:
        return torch.relu(x) * scale

    x = torch.randn(4, 64).bfloat16()
    report = cs.explain(f, example_kwargs={"x": x, "scale": x}, options={"take": "all"})
    assert report.taken == 1
    with pytest.raises(OptionError, match="by name as a dict"):
        cs.explain(f, (x,), example_kwargs=[x])  # type: ignore[arg-type]


def test_regions_name_what_they_read_as_the_model_does() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.h = torch.nn.ModuleList(torch.nn.Linear(64, 64, bias=False) for _ in range(2))

        def forward(self, ids: Any) -> Any:
            return self.h[1](self.h[0](ids).relu().sort().values)

    model = Model().bfloat16()
    report = cs.explain(model, (torch.randn(4, 64).bfloat16(),), options={"take": "all"})
    forward, _ = report.graphs
    assert forward.regions[0].reads[:2] == ("ids", "h.0.weight")
    values, weight = forward.regions[1].reads
    assert values.startswith("a value of test_backend_regions.py:") and weight == "h.1.weight"


def test_equal_layers_are_one_row_of_a_report() -> None:
    taken = Verdict(True, "3.0 us", ("k0: out0 = add(matmul(x0, x1), x2)",), 3.0, 4.0)
    first, value = ("ids", "h.0.w", "h.0.b"), "a value of model.py:2"
    others = [(value, f"h.{i}.w", f"h.{i}.b") for i in (1, 2)]
    layers = [
        RegionReport("model.py:3", 2, taken, case.Seconds(1.0), reads) for reads in (first, *others)
    ]
    graph = GraphReport("inference", (*layers, replace(layers[0], where="model.py:9")), ())
    lines = str(Report(read_options({}), (graph,))).splitlines()
    assert "  takes long: model.py:3 x 3, 12.0 us of Inductor's" in lines
    rows = [line.split() for line in lines if " vs. " in line]
    assert [" ".join(row) for row in rows] == [
        "model.py:3 x 3 2 1 3.0 vs. 4.0 - 3.0 0.0 0.0 taken",
        "model.py:9 2 1 3.0 vs. 4.0 - 1.0 0.0 0.0 taken",
    ]
    assert lines[-3:] == [
        "  model.py:3 x 3 k0: out0 = add(matmul(x0, h.*.w), h.*.b)",
        f"    x0 is ids or {value}",
        "  model.py:9 k0: out0 = add(matmul(ids, h.0.w), h.0.b)",
    ]


# --- conversions ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("cast", "times"), [(False, 1), (True, 2)])
def test_a_part_is_converted_again_only_without_what_is_in_front(
    monkeypatch: pytest.MonkeyPatch, cast: bool, times: int
) -> None:
    """What has nothing in front of it would be refused again."""
    made: list[Any] = []
    converted = region._converted  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(
        region, "_converted", lambda *given: (made.append(given), converted(*given))[1]
    )

    def call(x: Any) -> Any:
        return torch.fft.fft(x.float() if cast else x).real

    x = torch.randn(4, 8, dtype=torch.bfloat16 if cast else torch.float32)
    with FakeTensorMode(allow_non_fake_inputs=True):
        graph = make_fx(call)(x).graph
    node = next(n for n in graph.nodes if "fft" in str(n.target))
    with pytest.raises(partition.Unsupported):
        region.convert([node])
    assert len(made) == times


# --- parts that are alike -------------------------------------------------------------------------


def test_parts_that_are_alike_have_one_kernel_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversion says of the other layers what is known of the first."""
    alike, hits = partition._Growing._alike, list[bool]()

    def checked(self: Any, nodes: Any) -> Any:
        known = self._likeness.of(nodes) in self._made
        found = alike(self, nodes)
        if known:
            try:
                key = partition.convert(nodes, self.constants).key
            except partition.Unsupported:
                key = None
            hits.append(key == (None if found is None else found.key))
        return found

    monkeypatch.setattr(partition._Growing, "_alike", checked)
    model = Layers(lambda: torch.nn.Sequential(GatedMLP(16, 24), Attention(16, 2, 1)), 3).bfloat16()
    call, reports = compiled(model, take="all")
    call(torch.randn(2, 4, 16).bfloat16()).float().sum().backward()
    assert [r.phase for r in reports] == ["forward", "backward"]
    assert len(hits) > 20 and all(hits)


def test_parts_that_are_not_alike() -> None:
    def f(x: Any, t: Any, mask: Any) -> Any:
        heads = x[None, None]
        one, other = (torch.where(m, 0.0, -torch.inf) for m in (mask[None] < 2, mask[None] < 3))
        attend = functional.scaled_dot_product_attention
        return (torch.exp(x), torch.exp(x.t()), torch.exp(t), torch.exp(x * 1), torch.exp(x).half(),
                attend(heads, heads, heads, attn_mask=one),
                attend(heads, heads, heads, attn_mask=other))  # fmt: skip

    x = torch.randn(4, 4)
    program = torch.export.export(Function(f), (x, x.clone().t(), torch.arange(4)))
    described = Likeness(())
    for name, kinds in (("exp", 3), ("scaled_dot", 2)):
        nodes = [n for n in program.graph.nodes if name in str(n.target)]
        assert len({described.of([n]) for n in nodes}) >= kinds
        assert len({Likeness(()).of([n]) for n in (nodes[0], nodes[0])}) == 1
    a, b, *_ = (n for n in program.graph.nodes if n.op == "placeholder")
    assert described.of([a]) != Likeness({a}).of([a]) and described.of([a]) != described.of([b])


class Function(torch.nn.Module):
    """A function as a module."""

    def __init__(self, f: Any) -> None:
        super().__init__()
        self.f = f

    def forward(self, *args: Any) -> Any:
        return self.f(*args)


# --- calls of the same form -----------------------------------------------------------------------


class Counted:
    """A program on the CPU, which counts as a GPU, whose kernels are the reference executor.

    Attributes:
        program: of the graph.
        launches: number of calls of its kernels.
    """

    def __init__(self, graph: Any, monkeypatch: pytest.MonkeyPatch, between: Any = ()) -> None:
        self.program, self.launches = program_of(key_of(graph)), 0
        self.between = between
        monkeypatch.setattr(self.program, "variant", self._variant)
        monkeypatch.setattr(region_operator, "KERNEL_DEVICES", {"cpu"})
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        self.checks: list[int] = []
        checked = self.program._checked
        monkeypatch.setattr(
            self.program, "_checked", lambda *a: self.checks.append(1) or checked(*a)
        )

    def _variant(self, extents: Any, device: Any) -> Any:
        def launch(values: list[Any]) -> None:
            self.launches += 1
            count = len(self.program.graph.inputs)
            outputs = len(self.program.graph.outputs)
            assert [tuple(t.shape) for t in values[count + outputs :]] == [
                s for s, _ in self.between
            ]
            self.program._reference(values[:count], values[count : count + outputs], 0)

        return SimpleNamespace(launches=Launches(self.between, launch))

    def __call__(self, *inputs: Any, places: Any = ()) -> tuple[Any, bool]:
        """The results, and whether the call was checked."""
        self.checks.clear()
        return self.program(list(inputs), places), bool(self.checks)


@torch.no_grad()
def test_calls_of_a_known_form_are_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Counted(norm_linear(rows=8), monkeypatch, between=[((8, 3), torch.float32)])
    x, w = tensors(8)
    expected, checked = call(x, w)
    assert checked
    found, checked = call(x, w)
    assert not checked and call.launches == 2 and all(map(torch.equal, found, expected))
    assert [(t.dtype, t.stride()) for t in found] == [(t.dtype, t.stride()) for t in expected]
    assert found[0].data_ptr() != expected[0].data_ptr()
    others = [x.T.contiguous().T, torch.cat((x.new_zeros(1), x.flatten()))[1:].view(8, 32)]
    for other in others:  # not contiguous, not aligned
        found, checked = call(other, w)
        assert checked and all(map(torch.equal, found, expected))
    for wrong in (x[:4], x.float()):
        with pytest.raises((ShapeError, DTypeError)):
            call(wrong, w)
    with pytest.raises(ShapeError):
        call.program([x])
    with torch.enable_grad(), pytest.raises(GraphError, match="no backward"):
        call(x.clone().requires_grad_(), w)


@torch.no_grad()
def test_calls_with_open_extents_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Counted(norm_linear(), monkeypatch)
    for rows in (8, 8, 16):
        expected, checked = call(*tensors(rows))
        assert checked and expected[0].shape == (rows, 48)


@torch.no_grad()
def test_rows_are_put_in_place_by_calls_of_a_known_form(monkeypatch: pytest.MonkeyPatch) -> None:
    g = cs.new_kernel_graph()
    table = g.new_input((6, 16), cs.bfloat16, "table")
    rows, index = g.new_input((2, 16), cs.bfloat16, "rows"), g.new_input((2,), cs.int64, "index")
    g.mark_output(g.put_rows(table, index, rows))
    call = Counted(g, monkeypatch)
    inputs = [torch.randn(6, 16).bfloat16(), torch.randn(2, 16).bfloat16(), torch.tensor([4, 1])]
    for n in range(2):
        own = inputs[0].clone()
        expected = own.clone().index_put_((inputs[2],), inputs[1])
        found, checked = call(own, *inputs[1:], places=[0])
        assert found == [] and checked == (n == 0) and torch.equal(own, expected)
        own = inputs[0].clone()
        [found], checked = call(own, *inputs[1:])
        assert checked and torch.equal(own, inputs[0]) and torch.equal(found, expected)
    assert call.launches == 4


def masked(x: Any, _: Any) -> Any:
    return torch.softmax(x @ x.mT + torch.ones(8, 8).tril().log().to(x.dtype), -1) @ x


def normed(x: Any, w: Any) -> Any:
    return functional.rms_norm(x.view(-1, 64), w.shape, w).view(x.shape)


@pytest.mark.parametrize(("model", "bare"), [(normed, True), (masked, False)])
def test_kernels_that_need_something_beside_them(
    monkeypatch: pytest.MonkeyPatch, model: Any, bare: bool
) -> None:
    """They are compiled with it, to be timed. Views need nothing."""
    found, decide = list[bool](), backend.decide

    def noted(regions: Any, *rest: Any, **options: Any) -> Any:
        found.extend(Sample(r, key_of(r.graph)).bare for r in regions)
        return decide(regions, *rest, **options)

    monkeypatch.setattr(backend, "decide", noted)
    call, _ = compiled(model, take="modelled")
    call(torch.randn(4, 8, 64).bfloat16(), torch.ones(64).bfloat16())
    assert found == [bare]
