"""Training operators in the benchmarks: passes, peers that stand in for libraries, the command."""

from __future__ import annotations

import sys
import types
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import cutesuper as cs
from benchmarks import ahead, problem, report, sweep, training, training_torch
from benchmarks import training_operators as operators
from benchmarks.check import check_outputs
from benchmarks.entry import Entry
from benchmarks.peers import Implementation, Launcher
from benchmarks.problem import SetPlan, make_problem, slab_bytes
from benchmarks.sweep import Item, Sweep
from benchmarks.training_libraries import LIBRARIES, absent_from
from benchmarks.training_programs import definitions, ours
from benchmarks.workloads_training import Step, workload_of
from cutesuper.ir.dims import Symbol
from cutesuper.ir.evaluate import run_reference
from tests.benchmark_fakes import FLOORS, KNOBS
from tests.test_benchmarks_sweep import Clock

OPERATORS = {
    op.name: op
    for op in (
        operators.rms_norm(), operators.rms_norm(torch.float32), operators.layer_norm(),
        operators.softmax(), operators.cross_entropy(), operators.swiglu(),
        operators.add_activation("relu"), operators.add_activation("sigmoid"),
        operators.normalized_update(),
    )
}  # fmt: skip
SHAPE = (24, 40)
EVERY = pytest.mark.parametrize("name", OPERATORS)
STEPS = pytest.mark.parametrize("step", Step)


def problem_of(name, step, dtype=torch.bfloat16, shape=SHAPE, **options):
    workload = workload_of(OPERATORS[name], step, **options)
    specs = (*workload.inputs(shape), *workload.outputs(shape))
    return make_problem(
        workload, shape, str(dtype).removeprefix("torch."), dtype, device=torch.device("cpu"),
        multiprocessors=132, plan=SetPlan(2, slab_bytes(specs, dtype), True), seed=0,
        reference_rows=16,
    )  # fmt: skip


def verdict(made, launcher, index=1):
    launcher.launch(index)  # what ran before must not matter
    return check_outputs(launcher.launch(index), made.expected("full", index))


# ------------------------------------------------------------------------------------------- passes


@EVERY
@STEPS
def test_pytorch_computes_the_definition(name, step):
    made = problem_of(name, step, torch.float64)
    full = made.workload.computations["full"]
    inputs = [t.double() if t.is_floating_point() else t for t in made.inputs[0]]
    for spec, value, exact in zip(
        made.workload.outputs(SHAPE), full.eager(*inputs), full.reference(*inputs), strict=True
    ):
        assert tuple(value.shape) == spec.dims
        torch.testing.assert_close(value, exact, rtol=1e-9, atol=1e-11)


def test_what_has_to_move():
    rows, columns = SHAPE
    big, column = 2 * rows * columns, 2 * columns
    moved = {
        (name, step): workload_of(OPERATORS[name], step).bytes_moved(SHAPE, torch.bfloat16)
        for name in OPERATORS
        for step in Step
    }
    assert moved["rms_norm", Step.FORWARD] == 2 * big + column
    assert moved["rms_norm", Step.BACKWARD] == 3 * big + 2 * column
    assert moved["rms_norm/float32", Step.BACKWARD] == 3 * big + 4 * column
    assert moved["softmax", Step.BACKWARD] == 3 * big
    # logits and int64 labels; losses in the type of the logits, their cotangents in float32
    assert moved["cross_entropy", Step.FORWARD] == big + 8 * rows + 2 * rows
    assert moved["cross_entropy", Step.BACKWARD] == 2 * big + 8 * rows + 4 * rows
    assert moved["swiglu", Step.BACKWARD] == 5 * big


def test_sums_over_rows_are_judged_by_all_rows(monkeypatch):
    """In pieces, of which the last is shorter; other gradients by some rows."""
    monkeypatch.setattr(problem, "PIECE_ELEMENTS", 7 * SHAPE[1])
    made = problem_of("layer_norm", Step.BACKWARD)
    dx, dw, db = made.expected("full", 0)
    assert dx.reference.shape == (16, 40) and dx.rows is not None
    exact = [t.double() for t in made.inputs[0]]
    whole = made.workload.computations["full"].reference(*exact)
    torch.testing.assert_close(dx.reference, whole[0][dx.rows])
    torch.testing.assert_close(dw.reference, whole[1])
    torch.testing.assert_close(db.reference, whole[2])
    assert dw.rows is None and db.rows is None
    wrong = [t.to(torch.bfloat16) for t in whole]
    wrong[1] = wrong[1] - exact[-1][-1].to(torch.bfloat16)
    assert "output 1" in check_outputs(wrong, made.expected("full", 0)).reason


def test_results_may_be_wider_where_that_is_said():
    made = problem_of("cross_entropy", Step.FORWARD)
    [loss] = made.workload.computations["full"].eager(*made.inputs[0])
    assert check_outputs([loss], made.expected("full", 0)).passed
    assert check_outputs([loss.float()], made.expected("full", 0)).passed
    norm = problem_of("rms_norm", Step.FORWARD)
    [y] = norm.workload.computations["full"].eager(*norm.inputs[0])
    assert "dtype torch.float32" in check_outputs([y.float()], norm.expected("full", 0)).reason


def test_errors_are_told_for_each_output():
    made = problem_of("rms_norm", Step.BACKWARD)
    dx, dw = made.workload.computations["full"].eager(*made.inputs[0])
    told = check_outputs([dx, dw + 1], made.expected("full", 0)).errors
    assert told[0] < 0.01 < told[1]


def test_labels_are_drawn_anew_for_each_set():
    made = problem_of("cross_entropy", Step.BACKWARD)
    first, second = (inputs[1] for inputs in made.inputs)
    assert first.dtype == torch.int64 and not torch.equal(first, second)
    assert first.min() >= 0 and first.max() < SHAPE[1]
    assert made.inputs[0][2].dtype == torch.float32


# ------------------------------------------------------------------------------------------ PyTorch


@EVERY
@STEPS
@pytest.mark.parametrize("peer", ["eager", "compile"])
def test_pytorch_takes_part(name, step, peer, monkeypatch):
    """Compiled by what needs no compiler: autograd sees the same functions."""
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: real(f, backend="aot_eager"))
    torch.compiler.reset()  # as the harness does before a case
    made = problem_of(name, step)
    [implementation] = [i for i in training_torch.TORCH if i.name == peer]
    assert verdict(made, implementation.make(made)).passed


@pytest.mark.parametrize("name", ["layer_norm", "add_activation/sigmoid", "normalized_update"])
def test_a_tape_does_what_autograd_does(name):
    made = problem_of(name, Step.BACKWARD)
    full = made.workload.computations["full"]
    launcher = training_torch.TORCH[0].make(made)
    for i in range(2):
        for a, b in zip(launcher.launch(i), full.eager(*made.inputs[i]), strict=True):
            assert torch.equal(a, b)


def test_a_compiled_backward_pass_runs_again_and_again(monkeypatch):
    """On every stream anew: what autograd runs follows the stream of the forward pass."""
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: real(f, backend="aot_eager"))
    torch.compiler.reset()
    made = problem_of("layer_norm", Step.BACKWARD)
    full = made.workload.computations["full"]
    entry = Entry(training_torch.TORCH[1])
    entry.launcher = launcher = training_torch.TORCH[1].make(made)
    for i in (0, 1, 0, 1):
        for a, b in zip(launcher.launch(i), full.eager(*made.inputs[i]), strict=True):
            assert torch.equal(a, b)
    again = launcher.close.__self__
    [y, *_] = again._results
    entry.fail("failed", "for another reason")
    assert entry.launcher is None and not again._results
    with pytest.raises(RuntimeError, match="second time"):  # nothing is kept for it
        torch.autograd.grad(y, again._sets[0][1], torch.zeros_like(y))


@pytest.mark.parametrize("name", ["softmax", "swiglu"])
def test_floors_move_what_the_pass_moves(name, monkeypatch):
    calls = []
    for function in ("neg", "add"):
        monkeypatch.setattr(torch, function, lambda *t, f=function: calls.append((f, len(t))))
    floor = training_torch.COPY.make(problem_of(name, Step.FORWARD))
    floor.launch(1)
    assert calls == [("neg", 1) if name == "softmax" else ("add", 2)]


# ---------------------------------------------------------------------------------------- libraries


def _norm(x, w, b, eps, centred):
    x64 = x.double()
    mean = x64.mean(-1, keepdim=True) if centred else torch.zeros_like(x64[:, :1])
    rstd = torch.rsqrt((x64 - mean).square().mean(-1, keepdim=True) + eps)
    y = (x64 - mean) * rstd * w.double() + (0.0 if b is None else b.double())
    return y.to(x.dtype), mean.float()[:, 0], rstd.float()[:, 0]


def _norm_gradients(x, w, dy, mean, rstd, centred):
    xhat = (x.double() - mean.double()[:, None]) * rstd.double()[:, None]
    wdy = dy.double() * w.double()
    inner = xhat * (xhat * wdy).mean(-1, keepdim=True)
    inner = inner + (wdy.mean(-1, keepdim=True) if centred else 0.0)
    dx = (wdy - inner) * rstd.double()[:, None]
    return dx.to(x.dtype), (dy.double() * xhat).sum(0).to(w.dtype), dy.double().sum(0).to(w.dtype)


def _softmax_gradient(dy, y):
    return (y.double() * (dy.double() - (dy.double() * y.double()).sum(-1, keepdim=True))).to(
        y.dtype
    )


@pytest.fixture
def quack(monkeypatch):
    """A stand-in for quack: the arguments of its functions, computed in float64."""
    norms, softmaxes, losses = (types.ModuleType(f"quack.{n}") for n in ("r", "s", "c"))

    def rmsnorm_fwd(x, weight=None, eps=1e-6, store_rstd=False):
        y, _, rstd = _norm(x, weight, None, eps, centred=False)
        return y, x, rstd if store_rstd else None

    def rmsnorm_bwd(x, weight, dout, rstd):
        dx, dw, _ = _norm_gradients(x, weight, dout, torch.zeros_like(rstd), rstd, centred=False)
        return dx, dw, None, None

    def layernorm_fwd(x, weight, bias=None, eps=1e-6, return_rstd=False, return_mean=False):
        assert weight.dtype == bias.dtype == torch.float32 and return_rstd and return_mean
        y, mean, rstd = _norm(x, weight, bias, eps, centred=True)
        return y, rstd, mean

    def layernorm_bwd(x, weight, dout, rstd, mean, has_bias=True):
        return _norm_gradients(x, weight, dout, mean, rstd, centred=True)

    def cross_entropy_fwd(x, target, return_lse=False):
        loss = F.cross_entropy(x.double(), target, reduction="none").float()
        return loss, torch.logsumexp(x.double(), -1).float()

    def cross_entropy_bwd(x, target, dloss, lse):
        p = torch.exp(x.double() - lse.double()[:, None]) - F.one_hot(target, x.shape[1])
        return (p * dloss.double()[:, None]).to(x.dtype)

    norms.rmsnorm_fwd, norms.rmsnorm_bwd = rmsnorm_fwd, rmsnorm_bwd
    norms.layernorm_fwd, norms.layernorm_bwd = layernorm_fwd, layernorm_bwd
    norms.rmsnorm = lambda x, w, eps: F.rms_norm(x, (x.shape[-1],), w, eps)
    softmaxes.softmax_fwd = lambda x: F.softmax(x.double(), -1).to(x.dtype)
    softmaxes.softmax_bwd = _softmax_gradient
    softmaxes.softmax = lambda x: F.softmax(x, -1)
    losses.cross_entropy_fwd, losses.cross_entropy_bwd = cross_entropy_fwd, cross_entropy_bwd
    losses.cross_entropy = F.cross_entropy
    monkeypatch.setitem(sys.modules, "quack", types.ModuleType("quack"))
    named = {"rmsnorm": norms, "softmax": softmaxes, "cross_entropy": losses}
    for name, module in named.items():
        monkeypatch.setitem(sys.modules, f"quack.{name}", module)


def library(name):
    return next(i for i in LIBRARIES if i.name == name)


@pytest.mark.parametrize("name", ["rms_norm", "rms_norm/float32", "layer_norm", "softmax",
                                  "cross_entropy"])  # fmt: skip
@STEPS
def test_quack_takes_part(name, step, quack):
    made = problem_of(name, step)
    assert verdict(made, library("quack").make(made)).passed


@pytest.mark.parametrize("name", ["rms_norm", "softmax", "cross_entropy"])
@STEPS
def test_the_host_time_of_quack_is_that_of_its_calls(name, step, quack):
    made = problem_of(name, step, host=True)
    assert verdict(made, library("quack").make(made)).passed


def test_quack_has_no_gradients_of_layer_norm_in_autograd(quack):
    with pytest.raises(ValueError, match="no call of layer_norm with autograd"):
        library("quack").make(problem_of("layer_norm", Step.FORWARD, host=True))


@pytest.fixture
def liger(monkeypatch):
    """A stand-in for Liger: the arguments of its functions, computed in float64."""
    modules = {
        n: types.ModuleType(n)
        for n in ("rms_norm", "layer_norm", "softmax", "cross_entropy", "swiglu")
    }

    def rms_norm_forward(X, W, eps, offset, casting_mode, row_mode):
        assert (offset, casting_mode, row_mode) == (0.0, "llama", None)
        y, _, rstd = _norm(X, W, None, eps, centred=False)
        return y, X, rstd, 64, 4, 1

    def rms_norm_backward(dY, X, W, RSTD, offset, casting_mode, BLOCK_SIZE, num_warps, in_place,
                          row_mode, needs_dw=None):  # fmt: skip
        assert (casting_mode, BLOCK_SIZE, num_warps, in_place, row_mode) == (1, 64, 4, False, None)
        return _norm_gradients(X, W, dY, torch.zeros_like(RSTD), RSTD, centred=False)[:2]

    def layer_norm_forward(X, W, B, eps):
        y, mean, rstd = _norm(X, W, B, eps, centred=True)
        return y, X, mean, rstd, 64, 4

    def layer_norm_backward(dY, X, W, B, Mean, RSTD):
        return _norm_gradients(X, W, dY, Mean, RSTD, centred=True)

    class Kernel:
        def __getitem__(self, grid):
            def launch(X_ptr, X_stride, Y_ptr, loss_ptr, n_cols, BLOCK_SIZE, **options):
                assert (grid, X_stride, n_cols, BLOCK_SIZE) == ((24,), 40, 40, 64)
                loss = F.cross_entropy(X_ptr.double(), Y_ptr, reduction="none")
                loss_ptr.copy_(loss)

            return launch

    modules["rms_norm"].rms_norm_forward = rms_norm_forward
    modules["rms_norm"].rms_norm_backward = rms_norm_backward
    modules["layer_norm"].layer_norm_forward = layer_norm_forward
    modules["layer_norm"].layer_norm_backward = layer_norm_backward
    modules["softmax"]._softmax_forward = lambda x: (
        F.softmax(x.double(), -1).to(x.dtype),
        64,
        4,
        False,
    )
    modules["softmax"]._softmax_backward = lambda dy, y, block, warps, several: _softmax_gradient(
        dy, y
    )
    modules["cross_entropy"].liger_cross_entropy_kernel = Kernel()
    modules["cross_entropy"].MAX_FUSED_SIZE = 32768
    modules["swiglu"].swiglu_forward = lambda a, b: (
        a,
        b,
        (F.silu(a.double()) * b.double()).to(a.dtype),
    )
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, f"liger_kernel.ops.{name}", module)
    for package in ("liger_kernel", "liger_kernel.ops"):
        monkeypatch.setitem(sys.modules, package, types.ModuleType(package))


@pytest.mark.parametrize(
    ("name", "step"),
    [
        *((n, s) for n in ("rms_norm", "layer_norm", "softmax") for s in Step),
        ("cross_entropy", Step.FORWARD), ("swiglu", Step.FORWARD),
    ],
)  # fmt: skip
def test_liger_takes_part(name, step, liger):
    made = problem_of(name, step)
    assert verdict(made, library("liger").make(made)).passed


@pytest.mark.parametrize("name", ["cross_entropy", "swiglu"])
def test_what_liger_does_in_place_is_refused_with_the_reason(name, liger):
    with pytest.raises(ValueError, match="Liger writes gradients over"):
        library("liger").make(problem_of(name, Step.BACKWARD))
    with pytest.raises(ValueError, match="a call cannot be repeated"):
        library("liger").make(problem_of(name, Step.BACKWARD, host=True))


def test_who_has_an_operator_at_all():
    assert absent_from("softmax") == frozenset()
    assert absent_from("swiglu") == {"quack"}
    assert absent_from("add_activation") == {"liger", "quack"}


# --------------------------------------------------------------------------------------------- ours


class Interpreted:
    """A program that the reference executor runs."""

    def __init__(self, made, dependent):
        self.graph = made.workload.graph(cs, made.shape, made.dtype_name)

    def __call__(self, inputs):
        return run_reference(self.graph, inputs)


AVAILABLE = [name for name, op in OPERATORS.items() if op.call in definitions()]


@pytest.mark.parametrize("name", AVAILABLE)
@STEPS
@pytest.mark.parametrize("host", [False, True])
def test_programs_of_calls_take_part(name, step, host):
    made = problem_of(name, step, host=host)
    plain, _ = ours(Interpreted)
    assert verdict(made, plain.make(made)).passed


def test_programs_are_those_of_the_class_of_row_numbers():
    graph = workload_of(OPERATORS["rms_norm"], Step.BACKWARD).graph(cs, (3000, 40), "bfloat16")
    leading = [graph.nodes[i].shape[0] for i in graph.inputs]
    assert {rows.hint for rows in leading if isinstance(rows, Symbol)} == {2048}


def test_an_operator_that_is_not_there_is_named():
    missing = replace(OPERATORS["rms_norm"], name="rms_norm_of_nothing")
    with pytest.raises(ValueError, match="no operator 'rms_norm_of_nothing'"):
        workload_of(missing, Step.FORWARD).graph(cs, SHAPE, "bfloat16")
    other = replace(OPERATORS["rms_norm"], options=(("eps", 1e-6),))
    with pytest.raises(ValueError, match=r"takes .*weight_offset.*, the benchmark gives"):
        workload_of(other, Step.FORWARD).graph(cs, SHAPE, "bfloat16")


def test_a_graph_that_cannot_be_made_does_not_stop_the_preparation():
    missing = replace(OPERATORS["rms_norm"], name="rms_norm_of_nothing")
    items = [Item("a", workload_of(missing, Step.FORWARD), SHAPE, dtype="bfloat16")]
    ahead.Ahead(None).prepare(items, ["cutesuper"])


# ----------------------------------------------------------------------------- the command


def test_every_case_has_one_floor_and_a_name_of_its_own():
    items = training.chosen(None)
    assert len({item.key for item in items}) == len(items)
    floors = {*(f.name for f in training.READ), training.COPY.name}
    for item in items:
        assert len(floors - item.absent) == (0 if item.key.startswith("host/") else 1)
        assert item.key.startswith(f"{item.labels['group']}/")


def test_sections_and_beginnings_of_cases_are_chosen():
    rms = training.chosen("rmsnorm")
    assert [i.labels["target_us"] for i in rms[:2]] == [2.6, 6.3]
    assert len(rms) == 18 and rms[8].labels["target_us"] == 3.6
    few = training.chosen("rmsnorm/rms_norm/backward,host/softmax")
    assert len(few) == 10
    with pytest.raises(ValueError, match="--only 'rms': one of rmsnorm, layernorm"):
        training.chosen("rms")


def pytorch_as(name, kind):
    def make(made):
        full = made.workload.computations["full"].eager
        return Launcher(lambda i: full(*made.inputs[i]))

    return Implementation(name, kind, make)


@pytest.fixture
def scripted(monkeypatch):
    """The command on the scripted backend at small extents; everybody is PyTorch but Liger."""
    runs, for_real = [], sweep.run
    refuses = Implementation(
        "liger", "peer", lambda made: (_ for _ in ()).throw(ValueError("in place"))
    )

    def run(wanted, settings, **options):
        runs.append(wanted)
        items = tuple(
            replace(i, shape=SHAPE, absent=i.absent - {f.name for f in FLOORS})
            for i in wanted.items
        )
        everybody = tuple(
            pytorch_as(i.name, i.kind) for i in wanted.implementations
            if i.kind != "floor" and i.name != "liger"
        )  # fmt: skip
        tiny = Sweep(wanted.kind, wanted.title, items, (*FLOORS, *everybody, refuses),
                     notes=wanted.notes)  # fmt: skip
        return for_real(tiny, KNOBS, backend=Clock(), **options)

    monkeypatch.setattr(sweep, "run", run)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return runs


def rewritten(tmp_path, *files, marker="training"):
    document = tmp_path / "document.md"
    document.write_text(f"<!-- bench:{marker} -->\n<!-- /bench:{marker} -->\n")
    assert report.main(["--page", str(document), *map(str, files)]) == 0
    return document.read_text()


def test_one_run_fills_the_summary_and_the_details(scripted, tmp_path):
    path = tmp_path / "training.json"
    assert training.main(["--only", "rmsnorm/rms_norm/backward/128x4096", "--json", str(path)],
                         "") == 0  # fmt: skip
    # recordings: two floors, ours twice, eager, compile, quack
    details = rewritten(tmp_path, path, marker="training-details")
    assert "**RMSNorm**\n\nRMSNorm, backward, bfloat16:" in details
    [row] = [line for line in details.splitlines() if line.startswith("| 24x40")]
    assert row.startswith(
        "| 24x40 | 5.00 | 6.00 | failed | 7.00 | 1.00 | 3.6 | 3.00 | 4.00 | 2 | 1.67x / 1.25x |"
    )
    assert "no larger than quack's (within 1%) in 1 of 1 cases." in details
    assert "liger: failed: prepare: ValueError: in place" in details
    assert "mix_order_reduction o" in details
    summary = rewritten(tmp_path, path)
    assert (
        "| RMSNorm | backward | 1 | 1 / 0 / 0 | 1.67x (1.67 to 1.67) | 2.00x (2.00 to 2.00) | - "
        "| 2.33x (2.33 to 2.33) | 33 to 33 % |"
    ) in summary
    assert scripted[0].prepare is not None


def test_host_times_have_a_table_of_their_own(scripted, tmp_path):
    path, more = tmp_path / "host.json", tmp_path / "softmax.json"
    assert training.main(["--only", "host", "--json", str(path)], "") == 0
    [case, *_] = report.load_results(path)["cases"]
    entries = {e["name"]: e for e in case["implementations"]}
    assert entries["cutesuper"]["host_us"]["median"] > 0
    assert entries["cutesuper"]["time_us"] is None and "cutesuper-pdl" not in entries
    assert training.main(["--only", "softmax/softmax/backward/32768x256", "--json", str(more)],
                         "") == 0  # fmt: skip
    text = rewritten(tmp_path, more, path, marker="training-details")
    assert "**Softmax**" in text and "**Host time of a call in eager mode**" in text
    assert "| operator | pass | PyTorch eager | torch.compile | Liger | quack | **cute" in text
    assert "| softmax | backward |" in text
    assert "fastest other column, in 1 cases: 1 win, 0 ties" in text
    kernels = report.load_results(more)["cases"][0]["implementations"]
    assert all(e["host_us"] is None for e in kernels)


def test_losses_are_told(scripted, tmp_path):
    path = tmp_path / "training.json"
    training.main(["--only", "rmsnorm/rms_norm/backward/128x4096", "--json", str(path)], "")
    results = report.load_results(path)
    entries = {e["name"]: e for e in results["cases"][0]["implementations"]}
    entries["quack"]["time_us"]["median"] = 1.5
    entries["quack"]["check_before"]["errors"][1] *= 0.9
    text = report.KINDS["training"].markdown(results)
    assert "loss: RMSNorm, backward 24x40 (0.500x)." in text
    assert "in 0 of 1 cases; larger: RMSNorm, backward 24x40 (" in text
    assert "| RMSNorm | backward | 1 | 0 / 0 / 1 |" in text


@pytest.mark.parametrize(
    "arguments", [["--only", "rms"], ["--peers", "matmul-alone"], ["--skip", "x"]]
)
def test_wrong_arguments(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        training.main(arguments, "")
    assert caught.value.code == 2
    assert "error:" in capsys.readouterr().err
