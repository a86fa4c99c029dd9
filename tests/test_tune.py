"""The tuner: what it tries, what failures cost, what it decides, what it stores, the command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

import cutesuper as cs
from cutesuper import pipeline, store
from cutesuper.cli import main
from cutesuper.errors import CompileError, DeviceError, GraphError, ScheduleError, TuningError
from cutesuper.ir.graph import KernelGraph
from cutesuper.pipeline import Options, choose
from cutesuper.runtime.cache import KernelCache
from cutesuper.skeletons.matmul.schedule import MatmulSchedule
from cutesuper.skeletons.planner import make_plan
from cutesuper.skeletons.registry import SKELETONS
from cutesuper.skeletons.rows.schedule import RowSchedule
from cutesuper.skeletons.schedule import Schedule
from cutesuper.skeletons.variants import changed, planned, variants
from cutesuper.tune import candidates, process, tuner
from cutesuper.tune.candidates import Trial, make_trials
from cutesuper.tune.process import make_sets
from cutesuper.tune.tuner import Tuned, decide, tune
from tests import zoo
from tests.fake_runtime import record_launches
from tests.tune_fakes import FakeDevice, waits_only_for

M, K, N = 16, 128, 64


def small() -> KernelGraph:
    return zoo.rms_norm_linear(M, K, N)


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder of this test; nothing is shipped."""
    folder = tmp_path / "user"
    monkeypatch.setattr(store, "user_folder", lambda: folder)
    monkeypatch.setattr(store, "shipped_folder", lambda: tmp_path / "shipped")
    return folder


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled: the scripted device computes from the muGraph."""
    monkeypatch.setattr(candidates, "compile_many", lambda requests, **_: [None for _ in requests])


def run(script: dict[str, Any], graph: KernelGraph | None = None, **options: Any) -> Tuned:
    defaults: dict[str, Any] = {"target": "h200", "candidates": 4, "hang_s": 12.0, "budget_s": 120}
    make = partial(FakeDevice, script)
    return tune(graph or small(), make_device=make, **(defaults | options))


# -------------------------------------------------------------------------------- what is tried


def plans_of(graph: KernelGraph, dependent: bool = False) -> list[list[Schedule]]:
    """Schedules of every kernel of the model's choice."""
    _, choice = choose(graph, Options(cs.H200, dependent))
    mu = choice.candidate.mugraph
    return [
        [p.schedule for p in variants(s, mu.tensors, cs.H200, plan)]
        for s, plan in zip(mu.steps, choice.plans, strict=True)
    ]


def test_schedules_differ_in_one_knob_and_the_default_comes_first() -> None:
    [found] = plans_of(zoo.rms_norm_linear(16, 4096, 4096), dependent=True)
    first = found[0]
    assert isinstance(first, MatmulSchedule) and first.dependent_launch
    texts = [changed(s, first) for s in found]
    assert texts[0] == "" and len(set(texts)) == len(texts) > 5
    assert {f"stages={first.stages - 1}", "stream_columns=no", "head=2"} <= set(texts)
    assert all(s.dependent_launch for s in found)


def test_rows_keep_their_width() -> None:
    [found] = plans_of(zoo.rows("rms_norm", (128, 4096)))
    assert len(found) > 3
    for s in found:
        assert isinstance(s, RowSchedule)
        assert s.lanes * s.vector * s.chunks == 4096


def test_every_number_has_values_to_try() -> None:
    """A knob that is added to a schedule needs a line in its ``knobs``, unless it is a truth."""
    for kind in (k for s in SKELETONS for k in s.schedules):
        numbers = {f.name for f in fields(kind) if f.type == "int"}
        assert numbers - set(kind.fixed) == set(kind.knobs)


MISTAKES: list[tuple[str, dict[str, Any]]] = [
    ("linear", {"warpgroups": 0}),
    ("linear", {"warpgroups": 2}),  # one block of 64 columns
    ("linear", {"warpgroups": 4}),
    ("linear", {"head": 9}),
    ("linear", {"stages": 0}),
    ("linear", {"stages": 1, "head": 1}),
    ("linear", {"stages": 1000}),
    ("rows", {"rows": 0}),
    ("rows", {"lanes": 0}),
    ("rows", {"lanes": 3}),
    ("rows", {"vector": 16}),
    ("rows", {"chunks": 0}),
    ("rows", {"lanes": 4, "rows": 1}),
    ("rows", {"interleaved": True}),
]


@pytest.mark.parametrize(("kind", "change"), MISTAKES, ids=str)
def test_schedules_that_no_kernel_can_run_with_are_refused(
    kind: str, change: dict[str, Any]
) -> None:
    graph = small() if kind == "linear" else zoo.rows("rms_norm", (64, 256))
    mu = choose(graph, Options(cs.H200))[1].candidate.mugraph
    [step] = mu.steps
    good = make_plan(step, mu.tensors, cs.H200).schedule
    assert planned(step, mu.tensors, cs.H200, good).schedule == good
    with pytest.raises(ScheduleError, match="kernel k0: "):
        planned(step, mu.tensors, cs.H200, replace(good, **change))


def test_trials_are_taken_along_diagonals() -> None:
    graph, options = zoo.rms_norm_linear(16, 1024, 1024), Options(cs.H200)
    result, choice = choose(graph, options, keep=64)
    trials = make_trials(options, result.candidates, 10, KernelCache())
    assert [t.rank for t in trials] == [1, 1, 2, 1, 2, 3, 1, 2, 3, 4]
    assert [t.name for t in trials] == [f"c{n:03d}" for n in range(1, 11)]
    first = trials[0]
    assert first.program.mugraph is choice.candidate.mugraph and not first.change
    assert trials[1].change and not trials[2].change
    keys = {tuple(p.key for p in t.program.plans) for t in trials}
    assert len(keys) == len(trials), "no two are the same kernels"


def test_kernels_of_one_program_are_varied_in_turn() -> None:
    options = Options(cs.H200)
    result, _ = choose(zoo.rms_norm_linear(16, 1024, 512), options, keep=64)
    two = next(c for c in result.candidates if len(c.mugraph.steps) == 2)
    trials = make_trials(options, [two], 5, KernelCache())
    assert [t.change[:4] for t in trials] == ["", "k0: ", "k1: ", "k0: ", "k1: "]


def test_candidates_are_sent_to_the_measuring_process_and_launch_their_kernels() -> None:
    """Compiled, sent through a pickle, loaded from the cache, launched on a runtime that only
    records."""
    launches = record_launches(
        """
        import pickle, time
        import cutesuper as cs
        from cutesuper.pipeline import Options, choose
        from cutesuper.runtime.cache import KernelCache
        from cutesuper.tune.candidates import compile_trials, make_trials
        from tests import zoo
        from tests.fake_runtime import cuda_tensor

        options, cache = Options(cs.H200), KernelCache()
        result, _ = choose(zoo.rms_norm_linear(16, 128, 64), options, keep=64)
        trials = make_trials(options, result.candidates[:1], 2, cache)
        compile_trials(trials, cache, time.monotonic() + 60)
        assert [t.status for t in trials] == ["waiting"] * 2, trials
        tensors = [cuda_tensor(s, "float16") for s in ((16, 128), (128, 64), (16, 64))]
        for trial in trials:
            launches = pickle.loads(pickle.dumps(trial.program)).variant().launches
            assert not launches.intermediates
            launches.launch(tensors)
        """
    )
    assert len(launches) == 2


# ----------------------------------------------------------------------------- the whole road


def test_the_winner_is_stored_and_then_used_without_a_search(
    user: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned = run({"c001": 9.0, "c003": 5.0}, candidates=3)
    assert [t.status for t in tuned.trials] == ["ok"] * 3
    assert tuned.winner.name == "c003" and tuned.model.name == "c001"
    assert tuned.path.parent == user / "sm90"
    m = tuned.measured
    assert (m.gpu, m.driver, m.cuda, m.timed) == ("scripted", "1.2", None, 3)
    assert m.torch == torch.__version__
    assert m.model_us is not None and 5.0 <= m.median_us < 5.1 < 9.0 <= m.model_us

    plain = cs.superoptimize(small(), target="h200", tuned=False)
    assert plain.kernels[0].plan.schedule == tuned.model.program.plans[0].schedule
    monkeypatch.setattr(pipeline, "search", None)
    other = zoo.rms_norm_linear(M, K, N)
    other.nodes[0] = replace(other.nodes[0], name="hidden")
    for graph in (small(), other):
        kernel = cs.superoptimize(graph, target="h200")
        assert [s.plan.key for s in kernel.kernels] == [p.key for p in tuned.winner.program.plans]
        assert kernel.kernels[0].artifact.from_cache, "compiled by the tuner"
        text = " ".join(kernel.explain().split())
        assert f"tunedprogramof{tuned.path}" in text.replace(" ", "")
        assert f"measured {m.median_us:.2f} us" in text and "scripted, driver 1.2" in text
        inputs = zoo.draw(graph, 1)
        assert all(zoo.judge(graph, inputs, kernel(inputs)))
    assert kernel.mugraph.inputs == ("hidden", "W")


def test_a_failure_costs_that_candidate_only(
    user: Path, uncompiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiled(requests: list[Any], **_: Any) -> list[Any]:
        return [CompileError("ptxas died") if i == 7 else None for i in range(len(requests))]

    monkeypatch.setattr(candidates, "compile_many", compiled)
    waits_only_for(monkeypatch, "c002: timing")
    accidents = ["hangs", "crashes", "raises", "wrong", "wrong later", "breaks"]
    script = {f"c{n:03d}": how for n, how in enumerate(accidents, start=2)} | {"c009": 5.0}
    tuned = run(script, zoo.rms_norm_linear(16, 256, 256), candidates=9)
    found = {t.name: (t.status, t.reason) for t in tuned.trials}
    assert found["c001"] == found["c009"] == ("ok", "")
    assert found["c002"] == ("failed", "no progress for 12 s in c002: timing")
    assert found["c003"] == ("failed", "the process died in c003: load")
    assert found["c004"] == ("failed", "OSError: no such kernel")
    assert found["c005"][0] == found["c006"][0] == "wrong"
    assert found["c005"][1].startswith("before timing: 2 x eager + 2 ulp: error exceeds")
    assert found["c006"][1].startswith("after timing: ")
    assert found["c007"][0] == "failed" and "illegal memory access" in found["c007"][1]
    assert found["c008"] == ("failed", "compile: ptxas died")
    assert (tuned.winner.name, tuned.measured.timed) == ("c009", 2)


@pytest.mark.usefixtures("user", "uncompiled")
def test_a_candidate_that_hangs_in_the_last_stage() -> None:
    """The others are timed again without it."""
    calls: list[list[str]] = []

    class Flaky:
        """A worker that loses c002 as soon as it is not alone."""

        def __init__(self, *_: Any) -> None: ...

        def greeting(self) -> dict[str, Any]:
            return {}

        def ask(self, job: Any) -> dict[str, Any]:
            names = [p.name for p in job.programs]
            calls.append(names)
            if "c002" in names and len(names) > 1:
                raise tuner.Lost("c002: timing", "no progress")
            return {n: SimpleNamespace(status="ok", samples=[1.0, 1.0]) for n in names}

        def close(self) -> None: ...

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuner, "Worker", Flaky)
        tuned = run({}, candidates=3)
    assert [sorted(c) for c in calls[3:]] == [["c001", "c002", "c003"], ["c001", "c003"]]
    assert tuned.trials[1].reason == "no progress in c002: timing"
    assert tuned.winner is tuned.model, "as fast as the others"


@pytest.mark.usefixtures("uncompiled")
def test_nothing_is_stored_when_all_fail(user: Path) -> None:
    with pytest.raises(TuningError, match="no candidate could be timed: wrong: before timing"):
        run({f"c{n:03d}": "wrong" for n in range(1, 5)})
    assert not user.exists()


@pytest.mark.usefixtures("user", "uncompiled")
def test_the_model_s_choice_may_fail() -> None:
    tuned = run({"c001": "raises", "c002": 7.0})
    assert tuned.winner.name == "c002"
    assert tuned.measured.model_us is None


@pytest.mark.usefixtures("user", "uncompiled")
def test_no_memory_is_said() -> None:
    with pytest.raises(TuningError, match="nothing can be measured here: MemoryError: a set of"):
        tune(small(), target="h200", make_device=partial(FakeDevice, {}, 1000))


@pytest.mark.usefixtures("user")
def test_the_budget_ends_the_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a budget that is used up by searching and starting, only the model's choice is timed,
    for the least number of rounds."""
    monkeypatch.setattr(candidates, "WAVE", 1)
    monkeypatch.setattr(candidates, "available_processors", lambda: 1)
    waves: list[int] = []

    def compiled(requests: list[Any], **_: Any) -> list[Any]:
        waves.append(len(requests))
        return [None for _ in requests]

    # the first wave takes longer than the whole budget, however fast the machine is
    clock = SimpleNamespace(monotonic=lambda: 1000.0 * len(waves))
    monkeypatch.setattr(tuner, "time", clock)
    monkeypatch.setattr(candidates, "time", clock)
    monkeypatch.setattr(candidates, "compile_many", compiled)
    tuned = run({"c001": "slow"}, budget_s=900.0)
    assert len(waves) == 1
    assert [t.status for t in tuned.trials] == ["ok"] + ["left out"] * 3
    assert tuned.trials[1].reason == "the budget was used up before it was compiled"
    assert len(tuned.model.samples) == 3


@pytest.mark.usefixtures("uncompiled")
def test_a_symbol_is_tuned_for_the_bucket_of_its_hint(
    user: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned = run({"c002": 5.0}, zoo.rms_norm_linear(cs.symbol("M", 20), K, N), candidates=2)
    assert "m32x128" in tuned.path.name
    kernel = cs.superoptimize(zoo.rms_norm_linear(cs.symbol("tokens", 30), K, N), target="h200")
    assert str(tuned.path) in "".join(kernel.explain().split())  # a long one is broken
    other = cs.superoptimize(zoo.rms_norm_linear(cs.symbol("tokens", 8), K, N), target="h200")
    assert "structures extracted" in other.explain()


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="timing needs a CUDA GPU"):
        tune(small())
    with pytest.raises(GraphError, match="give it a kernel graph"):
        tune(None)  # type: ignore[arg-type]
    with pytest.raises(TuningError, match="must be positive"):
        tune(small(), budget_s=0)


def test_a_script_without_a_main_guard_can_tune(tmp_path: Path) -> None:
    """The measuring process must not run the caller's script again."""
    script = tmp_path / "script.py"
    script.write_text(
        "print('begin')\n"
        "from functools import partial\n"
        "from pathlib import Path\n"
        "import cutesuper as cs\n"
        "from tests import zoo\n"
        "from tests.tune_fakes import FakeDevice\n"
        "t = cs.tune(zoo.rms_norm_linear(16, 128, 64), target='h200', candidates=1,\n"
        f"            folder={str(tmp_path)!r}, make_device=partial(FakeDevice, {{}}))\n"
        "print(t.winner.name)\n"
    )
    root = str(Path(__file__).resolve().parent.parent)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, cwd=root,
        env={**os.environ, "PYTHONPATH": root}, timeout=600, check=False,
    )  # fmt: skip
    assert done.stdout.split() == ["begin", "c001"], done.stderr


# ----------------------------------------------------------------------------- inputs, decision


def test_inputs_outgrow_the_cache_and_products_stay_of_order_1(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = zoo.rms_norm_linear(16, 1024, 64, transposed=True)
    device = FakeDevice()
    inputs, outputs = make_sets(graph, device, 0)
    assert len(inputs) == len(outputs) == 128
    x, w = inputs[5]
    assert x.shape == (16, 1024) and w.shape == (64, 1024) and x.dtype is torch.float16
    assert x.std() == pytest.approx(1, rel=0.05) and w.std() == pytest.approx(1 / 32, rel=0.05)
    assert not torch.equal(x, inputs[6][0])
    again, _ = make_sets(graph, device, 0)
    assert torch.equal(again[5][0], x)
    monkeypatch.setattr(process, "SETS", replace(process.SETS, cold_bytes=10**7))
    many, _ = make_sets(zoo.rows("exp", (256, 256)), FakeDevice(), 0)
    assert len(many) == 39  # 262 KB each
    few, _ = make_sets(zoo.rows("exp", (256, 256)), FakeDevice(free=10**6), 0)
    assert len(few) == 1


def trial(name: str, *samples: float, final: bool = True) -> Trial:
    program = SimpleNamespace(name=name)
    return Trial(program, 1, "", 1.0, "", "ok", "", list(samples), final)  # type: ignore[arg-type]


def test_the_model_is_beaten_by_more_than_the_spread_or_kept() -> None:
    model = trial("c001", 10.0, 10.0, 10.0)
    clear, close = trial("c002", 9.0, 9.1, 9.0), trial("c003", 9.9, 10.3, 9.9)
    assert decide([model, clear, close]) is clear
    assert decide([model, close]) is model
    noisy = trial("c001", 10.0, 8.0, 12.0)
    assert decide([noisy, clear]) is noisy
    assert decide([trial("c001", final=False), close]) is close
    assert decide([model, trial("c004", 1.0, final=False), close]) is model


# ------------------------------------------------------------------------------ command line


@pytest.fixture
def scripted(uncompiled: None, user: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tuner, "_cuda", lambda: partial(FakeDevice, {"c002": 5.0, "c003": "wrong"}))
    monkeypatch.setattr(tuner, "as_target", lambda target: cs.H200)
    return user


def test_command_on_a_file(
    scripted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved, folder = tmp_path / "graph.json", tmp_path / "elsewhere"
    saved.write_text(cs.dumps(small()))
    arguments = ["--candidates", "3", "--store", str(folder), "--dependent-launch"]
    assert main(["tune", str(saved), *arguments]) == 0
    out = capsys.readouterr().out
    for text in ("predicted", "measured", "spread", "winner", "wrong", "c003: before timing",
                 "x the cost model's choice (10.0"):  # fmt: skip
        assert text in out

    [path] = folder.glob("sm90/*_pdl-*.json")
    assert f"stored in {path}" in out
    assert json.loads(path.read_text())["dependent_launch"] is True
    assert not scripted.exists()


def test_command_on_a_workload(scripted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--shape", "4x64", "--dtype", "bfloat16", "--candidates", "1"]
    assert main(["tune", "softmax", *arguments]) == 0
    assert "not beaten by more than the spread" in capsys.readouterr().out
    [path] = scripted.glob("sm90/softmax_4x64_bfloat16-*.json")
    assert json.loads(path.read_text())["measured"]["timed"] == 1


@pytest.mark.usefixtures("scripted")
def test_command_says_why_it_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "graph.json"
    saved.write_text("{}")
    assert main(["tune", str(saved)]) == 1
    assert "FormatError" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "unknown workload 'nothing'"),
        (["softmax", "--shape", "3"], "rowsxcolumns"),
        (["softmax", "--dtype", "float64"], "--dtype float64"),
        (["missing.json"], "missing.json"),
        (["missing.json", "--shape", "3"], "--shape and --dtype are for workloads"),
        (["softmax", "--budget-s", "0"], "must be positive"),
        (["softmax"], "timing needs a CUDA GPU"),
    ],
)
def test_wrong_arguments_and_no_gpu(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["tune", *arguments]) == 2
    assert message in capsys.readouterr().err


# --------------------------------------------------------------------------------------- the GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dependent", [False, True], ids=["plain", "dependent"])
def test_tuning_on_the_device(dependent: bool, user: Path) -> None:
    graph = zoo.rms_norm_linear(16, 1024, 512)
    tuned = tune(graph, dependent_launch=dependent, budget_s=40, candidates=8)
    assert {t.status for t in tuned.trials} <= {"ok", "left out"}, tuned.trials
    assert tuned.seconds < 60
    assert tuned.measured.model_us is not None
    assert 1 < tuned.measured.median_us <= tuned.measured.model_us < 100
    kernel = cs.superoptimize(graph, dependent_launch=dependent)
    assert f"tunedprogramof{tuned.path}" in "".join(kernel.explain().split())
    inputs = zoo.draw(graph, 3, "cuda")
    outputs = [torch.full((16, 512), torch.nan, dtype=torch.float16, device="cuda")]
    kernel(inputs, out=outputs)
    torch.cuda.synchronize()
    assert all(zoo.judge(graph, inputs, outputs, [zoo.eager_norm_linear(inputs)]))
