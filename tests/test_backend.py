"""torch.compile(backend="cutesuper") without a GPU: numbers, dynamic batches, training, and what
PyTorch does around it."""

from __future__ import annotations

import contextlib
import copy
import importlib.machinery
import importlib.metadata
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import cutesuper as cs
from cutesuper import source_tree
from cutesuper.errors import OptionError

torch = pytest.importorskip("torch")

from torch._dynamo.exc import BackendCompilerFailed  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402
from torch.nn import functional  # noqa: E402

from cutesuper import pipeline  # noqa: E402
from cutesuper.runtime.cache import ROOT_VARIABLE  # noqa: E402
from cutesuper.runtime.programs import Kept  # noqa: E402
from cutesuper.torch import internals  # noqa: E402
from cutesuper.torch.compile import ahead, backend, region_operator, selection  # noqa: E402
from cutesuper.torch.compile.options import read_options  # noqa: E402
from tests.backends import (  # noqa: E402
    MODELS,
    GatedMLP,
    Layers,
    compiled,
    gradients,
    judge,
    judge_gradients,
    losses,
)

pytestmark = pytest.mark.filterwarnings("error:.*please report")
ROOT = Path(__file__).resolve().parent.parent
WIDTH = 32


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.manual_seed(0)
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def made(name: str, dtype: Any = torch.float32, batch: int = 2) -> tuple[Any, Any]:
    """A model and its input."""
    make, shape = MODELS[name]
    return make(WIDTH).to(dtype), torch.randn(shape(batch, WIDTH), dtype=dtype)


def taken(reports: Any) -> int:
    return sum(r.taken for r in reports)


# --- models ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_inference(name: str) -> None:
    model, x = made(name, torch.bfloat16)
    model.eval()
    call, reports = compiled(model, fullgraph=True)
    with torch.no_grad():
        y = call(x)
    judge(model, y, x)
    assert taken(reports) == sum(len(r.regions) for r in reports) > 0


@pytest.mark.parametrize("name", MODELS)
def test_gradients(name: str) -> None:
    model, x = made(name, torch.bfloat16)
    call, reports = compiled(copy.deepcopy(model), fullgraph=True)
    judge_gradients(model, gradients(call._orig_mod, call, x), x)  # pyright: ignore
    assert [r.phase for r in reports] == ["forward", "backward"]
    assert all(r.taken for r in reports)


@pytest.mark.parametrize("name", ["block", "conv net"])
def test_loss_curves(name: str) -> None:
    model, x = made(name)
    twin = copy.deepcopy(model)
    call, reports = compiled(model)
    ours, theirs = losses(model, call, x, 3), losses(twin, twin, x, 3)
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert theirs[2] < theirs[0] and taken(reports) > 1


@pytest.mark.parametrize("name", ["gated MLP", "MLP"])
def test_any_batch_is_one_graph(name: str) -> None:
    model, _ = made(name)
    call, reports = compiled(model, dynamic=True, fullgraph=True)
    for batch in (4, 9, 2, 17):
        x = made(name, batch=batch)[1]
        judge_gradients(model, gradients(model, call, x), x)
    assert [r.phase for r in reports] == ["forward", "backward"]
    assert all(r.taken for r in reports)


def test_a_batch_that_becomes_dynamic() -> None:
    model, _ = made("gated MLP")
    call, reports = compiled(model)
    with torch.no_grad():
        for batch in (4, 6, 7, 12):
            x = made("gated MLP", batch=batch)[1]
            judge(model, call(x), x)
    assert counters["stats"]["unique_graphs"] == 2 and len(reports) == 2


# --- programs that are no models ------------------------------------------------------------------

W = torch.randn(16, 16, generator=torch.Generator().manual_seed(1)) / 4


def mutates_at_the_end(x: Any) -> Any:
    y = functional.relu(x @ W)
    x.mul_(2)
    return y, x.sum(-1)


def mutates_between(x: Any) -> Any:
    x.copy_(functional.relu(x) * 2)
    return torch.tanh(x) @ W


def writes_a_part(x: Any) -> Any:
    y = x * 2
    y[0] = 0
    return y


def sums(x: Any) -> Any:
    return x.sum(), x.mean() * 3, torch.tensor(2.0) * x


def integers(x: Any) -> Any:
    i = (x * 10).long()
    return i + 1, i.float().exp(), i > 3, torch.where(i > 3, x, 0.0)


def aliases(x: Any) -> Any:
    y = functional.relu(x)
    return y, y[:2], y.t(), x, x.t()


def views(x: Any) -> Any:
    y = (x @ W).view(-1, 4, 16).permute(2, 0, 1)
    return y * 2, y.sum(0), y[1:]


def many_strides(x: Any) -> Any:
    return torch.sigmoid(x.t()), (x[:, ::2] * 2).t(), x.exp().as_strided((3, 4), (16, 2))


def parts(x: Any) -> Any:
    a, b = (x @ W).chunk(2, -1)
    return a * torch.sigmoid(b), torch.cat([x.exp(), x], -1).relu()


def rows(x: Any) -> Any:
    normed = functional.layer_norm(x, (16,)), functional.rms_norm(x, (16,))
    return (*normed, functional.softmax(x, -1), functional.log_softmax(x, 0), x.logsumexp(-1))


def undefined(x: Any) -> Any:
    return torch.log(x), torch.rsqrt(x)


PROGRAMS: dict[str, Callable[[Any], Any]] = {
    f.__name__: f
    for f in (mutates_at_the_end, mutates_between, writes_a_part, sums, integers, aliases, views,
              many_strides, parts, rows, undefined)
} | {
    "the same twice": lambda x: (y := torch.exp(x), y),
    "float64": lambda x: (x.double() @ W.double()).exp(),
    "an input as output": lambda x: (x, torch.exp(x)),
    "a gather": lambda x: functional.embedding(torch.tensor([1, 2]), x).exp(),
    "an extent as a number": lambda x: x * x.shape[0],
    "expanded": lambda x: (x[:1].expand(5, 16).exp(), x.mean(0).expand(3, 16) * 1),
    "dead code": lambda x: (x.exp() @ W, x * 2)[1],
    "a scan": lambda x: x.exp().cumprod(0) * 2,
    "channels last": lambda x: x.reshape(1, 4, 16, 4).to(memory_format=torch.channels_last) * 2,
}  # fmt: skip


def outcome(call: Callable[[Any], Any], x: Any) -> list[Any]:
    """Results, and the argument afterwards."""
    results = call(x)
    return [*(results if isinstance(results, tuple) else (results,)), x]


def check_program(fn: Callable[[Any], Any], x: Any, **how: Any) -> None:
    call, _ = compiled(fn, **how)
    found, want = outcome(call, x.clone()), outcome(fn, x.clone())
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True, check_stride=b.numel() > 1)
        assert a.requires_grad == b.requires_grad
    for n, a in enumerate(want):
        same = [a is b for b in want[:n]]
        assert [found[n] is b for b in found[:n]] == same or not x.numel(), "another alias"


@pytest.mark.parametrize("how", ["dynamic", "transposed"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str, how: str) -> None:
    x = torch.randn(16, 16)
    check_program(
        PROGRAMS[name], x.t() if how == "transposed" else x, dynamic=how == "dynamic" or None
    )


@pytest.mark.parametrize("name", ["views", "sums", "parts", "aliases", "mutates_at_the_end"])
@pytest.mark.parametrize("context", ["no_grad", "inference_mode", "autocast", "nothing to compute"])
def test_contexts(name: str, context: str) -> None:
    around: Any = {
        "no_grad": torch.no_grad(), "inference_mode": torch.inference_mode(),
        "autocast": torch.autocast("cpu", torch.bfloat16),
    }.get(context, contextlib.nullcontext())  # fmt: skip
    with around:
        x = torch.randn(0 if context == "nothing to compute" else 16, 16)
        if context != "autocast":
            check_program(PROGRAMS[name], x)
            return
        found, want = outcome(compiled(PROGRAMS[name])[0], x.clone()), outcome(PROGRAMS[name], x)
        for a, b in zip(found, want, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)  # sums of bfloat16


def test_random_numbers_are_those_of_the_generator() -> None:
    def drops(x: Any) -> Any:
        return functional.dropout((x @ W).exp(), 0.5)

    x = torch.rand(64, 16)
    call, reports = compiled(drops)
    with internals.random_as_in_eager():
        y = call(x)
    kept = y != 0
    assert 0.3 < float(kept.float().mean()) < 0.7 and taken(reports)
    torch.testing.assert_close(y[kept], 2 * (x @ W).exp()[kept])
    assert not torch.equal(call(x) != 0, kept)
    torch.compiler.reset()
    assert cs.explain(drops, (x,), options={"take": "all"}).taken


# --- decisions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gated MLP", "conv net"])
def test_what_is_refused_is_left_as_it_was(name: str) -> None:
    """On a CPU "faster" takes nothing, and Inductor is given the graphs that it always gets."""
    given: dict[str, list[str]] = {}

    def noted(of: str) -> Any:
        def finish(gm: Any, inputs: Any, **rest: Any) -> Any:
            given.setdefault(of, []).append(gm.code)
            return internals.run_eagerly(gm, inputs, **rest)

        return finish

    model, x = made(name)
    options = read_options({})

    def ours(gm: Any, inputs: Any) -> Any:
        return backend.compile_graph(gm, inputs, options, reports.append, noted("ours"))

    def theirs(gm: Any, inputs: Any) -> Any:
        return internals.compile_with(gm, inputs, noted("Inductor"), {})

    reports: list[Any] = []
    for chosen in (ours, theirs):
        torch.compiler.reset()
        gradients(model, torch.compile(model, backend=chosen), x)
    assert given["ours"] == given["Inductor"] and len(given["ours"]) == 2
    verdicts = [r.verdict for g in reports for r in g.regions]
    assert verdicts and not any(v.taken for v in verdicts)
    assert all("on the CPU" in v.reason or "element-wise" in v.reason for v in verdicts)


class Scan(torch.nn.Module):
    """A step that no region has."""

    def forward(self, x: Any) -> Any:
        return torch.cumprod(x, 0)


def test_equal_layers_are_searched_for_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    searched: list[Any] = []
    find = pipeline.find
    monkeypatch.setattr(pipeline, "find", lambda *a, **k: searched.append(1) or find(*a, **k))
    judged: list[Any] = []
    checked = selection._checked
    monkeypatch.setattr(selection, "_checked", lambda *a: judged.append(1) or checked(*a))
    monkeypatch.setattr(selection, "_verdicts", Kept())
    monkeypatch.setattr(ahead, "shared", lambda: None)
    monkeypatch.setenv(ROOT_VARIABLE, str(tmp_path))
    monkeypatch.setattr(region_operator, "_programs", Kept())
    model = Layers(lambda: torch.nn.Sequential(GatedMLP(16, 24), Scan()), 3).bfloat16()
    x = torch.randn(4, 16, dtype=torch.bfloat16)
    call, reports = compiled(model, take="modelled")
    with torch.no_grad():
        judge(model, call(x), x)
    [report] = reports
    assert report.taken == len(report.regions) == 3
    # the kernels of the first layer have none of the model in front of them
    assert len(searched) == len(judged) == len(region_operator._programs) == 2


def test_threads() -> None:
    model, _ = made("gated MLP")
    call, _ = compiled(model)
    inputs = [torch.randn(n, 3, WIDTH) for n in (2, 5, 4, 9, 7, 8)]
    for t in inputs:
        # not dynamic=True, which sets an option of the whole process for a while
        torch._dynamo.mark_dynamic(t, 0)

    def run(t: Any) -> Any:
        with torch.no_grad():
            return call(t)

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(run, inputs))
    for y, t in zip(found, inputs, strict=True):
        judge(model, y, t)


# --- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("all", "options='all'; they are a dictionary"),
        ({"tak": "all"}, "there is no option 'tak', only take, target, budget_s, inductor"),
        ({"take": "most"}, "take='most'; it is one of 'faster', 'modelled', 'all'"),
        ({"take": ["all"]}, r"take=\['all'\]; it is one of"),
        ({"target": 9}, "target=9; give it the name of a GPU"),
        ({"target": "a100"}, "unknown; use one of"),
        ({"budget_s": 0}, "budget_s=0; it is a positive number"),
        ({"budget_s": True}, "budget_s=True; it is a positive number"),
        ({"inductor": True}, "inductor=True; it is a dictionary"),
        ({"inductor": {"triton.cudagraph": True}}, "has no option 'triton.cudagraph'"),
        ({"inductor": {"cpp_wrapper": True}}, "kernels are called from Python; leave it out"),
    ],
)  # fmt: skip
def test_wrong_options(options: Any, message: str) -> None:
    with pytest.raises((OptionError, cs.errors.DeviceError), match=message):
        cs.explain(lambda x: x * 2, (torch.ones(2),), options=options)


def test_a_wrong_option_of_torch_compile() -> None:
    call = torch.compile(lambda x: x * 2, backend="cutesuper", options={"tak": "all"})
    with pytest.raises(BackendCompilerFailed, match="there is no option 'tak'"):
        call(torch.ones(2))


def test_options_of_inductor() -> None:
    options = read_options({"inductor": {"triton.cudagraphs": False}}, mode="reduce-overhead")
    assert options.inductor["triton.cudagraphs"] is False, "what is said outright counts"
    assert read_options(None, "reduce-overhead").inductor == {"triton.cudagraphs": True}
    with pytest.raises(OptionError, match="mode='fast'"):
        read_options({}, "fast")
    chosen = read_options({"take": "all", "target": "h100", "budget_s": 3})
    assert (chosen.take, chosen.target, chosen.budget_s) == ("all", cs.H100, 3)


# --- with Inductor --------------------------------------------------------------------------------


class Mixed(torch.nn.Module):
    """Regions around a convolution. Inductor calls PyTorch for all that is left of it, so nothing
    has to go through a C++ compiler, which takes half a minute."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(16, 24), torch.nn.Linear(24, 16)
        self.middle = torch.nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, x: Any) -> Any:
        return self.last(self.middle(self.first(x).unsqueeze(1)).squeeze(1))


@pytest.fixture(scope="module")
def mixed() -> Any:
    torch.manual_seed(3)
    return Mixed()


def test_trains_with_inductor(mixed: Any) -> None:
    twin = copy.deepcopy(mixed)
    call = torch.compile(mixed, backend="cutesuper", options={"take": "all"})
    x = torch.randn(5, 16)
    assert losses(mixed, call, x, 3) == pytest.approx(losses(twin, twin, x, 3), rel=1e-4)


def test_a_wrapper_in_cpp(mixed: Any) -> None:
    """Inductor gets everything if the environment asks for it."""
    from torch._inductor import config

    reports: list[Any] = []
    given: list[dict[str, Any]] = []

    def finish(gm: Any, inputs: Any, **rest: Any) -> Any:
        given.append(rest)
        return internals.run_eagerly(gm, inputs)

    def chosen(gm: Any, inputs: Any) -> Any:
        options = read_options({"take": "all"})
        return backend.compile_graph(gm, inputs, options, reports.append, finish)

    x = torch.randn(6, 16)
    with config.patch(cpp_wrapper=True), torch.no_grad():
        judge(mixed, torch.compile(mixed, backend=chosen)(x), x)
    assert given[0]["cpp_wrapper"] and not reports[0].regions
    assert [o.reason for o in reports[0].outside] == ["cpp_wrapper calls no operators of Python"]


def test_code_from_the_cache_in_another_process(
    mixed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor's cache holds calls of regions; keys are understood by whoever meets them, and
    AOTAutograd's cache, which knows nothing of backends, is not used."""
    calls: list[str] = []
    read = region_operator._read
    monkeypatch.setattr(region_operator, "_read", lambda key: calls.append(key) or read(key))

    def run(name: str) -> Any:
        torch.compiler.reset()
        monkeypatch.setattr(region_operator, "_programs", Kept())
        calls.clear()
        options = {"take": "all"} if name == "cutesuper" else None
        with torch.no_grad():
            return torch.compile(mixed, backend=name, options=options, dynamic=True)(x)

    x = torch.randn(6, 16)
    for name in ("inductor", "cutesuper", "inductor", "cutesuper"):
        judge(mixed, run(name), x)
        assert bool(calls) == (name == "cutesuper")
    assert counters["inductor"]["fxgraph_cache_hit"] >= 1
    # as if nothing of this process had seen the model before
    call = torch.compile(mixed, backend="cutesuper", options={"take": "all"})
    with torch.no_grad():
        call(x)
        monkeypatch.setattr(region_operator, "_programs", Kept())
        judge(mixed, call(x), x)


def test_the_entry_point(tmp_path: Path) -> None:
    """torch.compile finds the backend of an installed package that nobody has imported."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    folder = tmp_path / "cutesuper-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: cutesuper\nVersion: 0\n")
    lines = [f"{k} = {v}" for k, v in points["torch_dynamo_backends"].items()]
    (folder / "entry_points.txt").write_text("\n".join(["[torch_dynamo_backends]", *lines]))
    script = (
        "import sys, torch\n"
        "call = torch.compile(lambda x, w: torch.relu(x @ w), backend='cutesuper',\n"
        "                     options={'take': 'all'})\n"
        "assert torch.equal(call(torch.ones(8, 16), torch.eye(16)), torch.ones(8, 16))\n"
        "from cutesuper.torch.compile import region_operator\n"
        "assert len(region_operator._programs) == 1\n"
        "import cutesuper\n"
        "print(cutesuper.explain(lambda x: x.exp(), (torch.ones(3),)))\n"
    )
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "0 of 1 region(s) taken" in done.stdout


def test_importing_the_package_does_not_import_torch() -> None:
    script = "import sys, cutesuper; assert 'torch' not in sys.modules, 'torch'"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


def test_the_name_is_known_where_the_package_is_not_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PyTorch looks for entry points; a source tree that was imported has those of the project."""
    others = [f for f in sys.meta_path if f is not importlib.machinery.PathFinder]
    monkeypatch.setattr(sys, "meta_path", others)
    monkeypatch.setattr(source_tree, "package_version", lambda name: None)
    assert not importlib.metadata.entry_points(group="torch_dynamo_backends")
    source_tree.announce()
    [found] = importlib.metadata.entry_points(group="torch_dynamo_backends")
    assert importlib.metadata.version("cutesuper") == cs.__version__
    assert (found.name, found.load()) == ("cutesuper", backend.cutesuper)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["torch_dynamo_backends"] == {found.name: found.value}
    assert source_tree.SourceTree().locate_file("cutesuper/py.typed").exists()
