"""Predicted against measured: correlations, the sample, isolation of what hangs, tables."""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import dataclass
from functools import partial
from math import sqrt
from types import SimpleNamespace

import pytest
import torch

import cutesuper as cs
from benchmarks import candidates, cli, isolate, rank, rank_report, report
from benchmarks.candidates import Offer, Prepared, pool, sample
from benchmarks.check import measure_error
from benchmarks.correlation import kendall, ranks, spearman
from benchmarks.device import environment
from benchmarks.isolate import Job, Lost, Telling, Worker
from benchmarks.peers import Implementation, Launcher
from benchmarks.workloads import RANKED
from cutesuper.errors import CompileError, SearchError
from cutesuper.ir.evaluate import run_reference
from cutesuper.search.search import SearchOptions, search
from cutesuper.skeletons.planner import make_plan
from cutesuper.targets import H200
from tests.benchmark_fakes import KNOBS, PLAIN, TINY, FakeBackend, right
from tests.fake_runtime import record_launches
from tests.tune_fakes import waits_only_for

# -------------------------------------------------------------------------------------- correlation


def test_ranks_share_ties():
    assert ranks([10, 30, 10, 20]) == [1.5, 4.0, 1.5, 3.0]
    assert ranks([]) == []


def test_correlations_by_hand():
    # ranks differ by 1, 1, 0, 1, 1: rho = 1 - 6 * 4 / (5 * 24); 8 of 10 pairs agree, 2 do not
    x, y = [1, 2, 3, 4, 5], [20, 10, 30, 50, 40]
    assert spearman(x, y) == pytest.approx(0.8)
    assert kendall(x, y) == pytest.approx(0.6)
    assert spearman(x, x) == kendall(x, x) == pytest.approx(1)
    assert spearman(x, x[::-1]) == kendall(x, x[::-1]) == pytest.approx(-1)


def test_correlations_with_ties_by_hand():
    # ranks 1.5 1.5 3 4 and 1 2.5 2.5 4: centred -1 -1 .5 1.5 and -1.5 0 0 1.5, products 3.75,
    # squares 4.5 and 4.5; of 6 pairs 4 agree, 1 is tied in x, 1 in y
    x, y = [1, 1, 2, 3], [5, 6, 6, 9]
    assert spearman(x, y) == pytest.approx(3.75 / 4.5)
    assert kendall(x, y) == pytest.approx(4 / sqrt(5 * 5))


@pytest.mark.parametrize("values", [[], [3.0], [2.0, 2.0, 2.0]])
def test_no_order_no_correlation(values):
    other = [float(i) for i, _ in enumerate(values)]
    for correlation in (spearman, kendall):
        assert correlation(values, other) is None
        assert correlation(other, values) is None


# ---------------------------------------------------------------------------------------- workloads

SMALL = {3: (4, 64, 32), 2: (4, 64)}


@pytest.mark.parametrize("workload", RANKED.values(), ids=lambda w: w.name)
def test_ranked_workloads_say_the_same_three_times(workload):
    """PyTorch, the float64 definition and the kernel graph."""
    shape = SMALL[len(workload.axes)]
    generator = torch.Generator().manual_seed(1)
    inputs = [
        torch.randn(s.dims, generator=generator).mul(s.std).add(s.mean).half()
        for s in workload.inputs(shape)
    ]
    full = workload.computations["full"]
    [reference] = full.reference(*[t.double() for t in inputs])
    [exact] = full.eager(*[t.double() for t in inputs])
    torch.testing.assert_close(exact, reference, rtol=1e-12, atol=1e-12)
    assert tuple(reference.shape) == workload.outputs(shape)[0].dims
    graph = workload.graph(cs, shape, "float16")
    constants = [graph.nodes[i].constant for i in graph.inputs]
    assert constants == [spec.constant for spec in workload.inputs(shape)]
    [ours] = run_reference(graph, inputs)
    assert measure_error(ours, reference).relative < 2e-3
    rows = [t[[0, 3]] if s.rows else t for s, t in zip(workload.inputs(shape), inputs, strict=True)]
    [some] = full.reference(*[t.double() for t in rows])
    torch.testing.assert_close(some, reference[[0, 3]])


def test_cases_are_parsed_or_refused():
    assert [s for _, s in rank.parse_case("rmsnorm")] == [(4096, 4096), (128, 4096)]
    assert len(rank.parse_case("rmsnorm_gain_linear")) == 8
    assert rank.parse_case("softmax:7x64") == [(RANKED["softmax"], (7, 64))]
    with pytest.raises(ValueError, match="unknown workload 'nothing'; known: gated_mlp"):
        rank.parse_case("nothing")
    with pytest.raises(ValueError, match="rowsxcolumns"):
        rank.parse_case("softmax:1x2x3")


# --------------------------------------------------------------------------------------- the sample


def offer(position, structure="A", sizes=None, cost=None, kernels=1, make=None):
    return Offer(
        name=f"c{position:03d}",
        position=position,
        mugraph=SimpleNamespace(steps=[None] * kernels),
        predicted_us=float(position) if cost is None else cost,
        parts={"launch": 1.8},
        structure=structure,
        sizes=sizes or f"M={position}",
        make=make,
    )


def test_half_of_the_front_may_have_one_structure():
    offers = [offer(i) for i in range(1, 21)] + [offer(i, "B") for i in range(21, 41)]
    chosen = sample(offers, 8)
    assert [o.position for o in chosen if o.structure == "A"][:4] == [1, 2, 3, 4]
    assert sum(o.position in range(21, 25) for o in chosen) == 4
    # 2 of the programs with the fewest kernels (all 32 left) at equal distances: 20, then the last
    assert {20, 40} <= {o.position for o in chosen}
    assert len(chosen) == 12


def test_the_rest_has_every_structure():
    offers = [offer(i) for i in range(1, 9)]
    offers += [offer(i, f"two {i % 5}", kernels=2) for i in range(9, 60)]
    chosen = sample(offers, 4)
    assert [o.position for o in chosen] == [1, 2, 8, 9, 10, 11]
    # 3..8 are left of the fewest kernels: the last of them; then a structure never taken
    assert len({o.structure for o in chosen}) == 4


def test_twins_count_once():
    offers = [
        offer(1, "A", "M=64", 10.0), offer(2, "B", "M=64", 10.05), offer(3, "C", "M=64", 10.2),
        offer(4, "A", "M=32", 10.2), offer(5, "B", "M=32", 10.21),
    ]  # fmt: skip
    assert [o.position for o in sample(offers, 8)] == [1, 3, 4]


def test_few_candidates_are_all_taken():
    assert [o.position for o in sample([offer(1), offer(2)], 24)] == [1, 2]
    assert sample([], 24) == []


def test_pool_is_the_search_and_every_size_of_the_fewest_kernels():
    graph = PLAIN.graph(cs, (300, 1024, 1000), "float16")
    offers = pool(graph, H200)
    assert [o.position for o in offers] == list(range(1, len(offers) + 1))
    predictions = [o.predicted_us for o in offers]
    assert predictions == sorted(predictions)
    assert len({(o.structure, o.sizes) for o in offers}) == len(offers)
    found = search(graph, H200, options=SearchOptions(keep=16, lowered=True)).candidates
    assert predictions[0] == pytest.approx(found[0].cost_us)
    known = {c.structure: c for c in search(
        graph, H200,
        options=SearchOptions(keep=candidates.POOL, sizes_per_structure=64, lowered=True),
    ).candidates}  # fmt: skip
    fewest = [o for o in offers if len(o.mugraph.steps) == 1]
    assert len(fewest) > sum(len(c.mugraph.steps) == 1 for c in known.values())
    for o in fewest:
        # a prediction made with dear launches is the same when they are taken off again
        assert o.parts["launch"] == pytest.approx(H200.launch_us, abs=1e-6)
        step = o.mugraph.steps[0]
        text = f"{o.structure} with {o.sizes}"
        if text in known:
            assert o.predicted_us == pytest.approx(known[text].cost_us, abs=1e-6)
        make_plan(step, o.mugraph.tensors, H200)


def test_what_cannot_be_searched_planned_or_compiled_says_why(monkeypatch):
    def refuse(step, tensors, target):
        if len(tensors) > 3:
            raise ValueError("no skeleton")
        return make_plan(step, tensors, target)

    def compile_none(requests, workers, cache, *, keep_errors):
        assert keep_errors
        return [CompileError("kernel ranked: ptxas died") for _ in requests]

    def pool_of_others(graph, target):
        if graph.nodes[0].shape == (4, 63):
            raise SearchError("no kernel can run it")
        return pool(graph, target)

    pool = candidates.pool
    monkeypatch.setattr(candidates, "pool", pool_of_others)
    monkeypatch.setattr(candidates, "make_plan", refuse)
    monkeypatch.setattr(candidates, "compile_many", compile_none)
    good, bad = candidates.prepare(
        [(RANKED["rmsnorm_linear"], (8, 64, 64)), (RANKED["linear_bias_relu"], (4, 63, 33))],
        "float16", 2, H200,
    )  # fmt: skip
    assert bad.error.startswith("search: SearchError: ")
    assert bad.offers == []
    assert {o.refused for o in good.offers} == {
        "plan: ValueError: no skeleton", "compile: CompileError: kernel ranked: ptxas died"
    }  # fmt: skip
    assert all(o.make is None for o in good.offers)


def test_prepared_candidates_launch_their_kernels():
    """Searched, compiled, sent through a pickle and launched on a runtime that only records."""
    launches = record_launches(
        """
        import pickle
        from types import SimpleNamespace
        from tests.fake_runtime import cuda_tensor
        from benchmarks.candidates import prepare
        from benchmarks.workloads import RANKED
        from cutesuper.targets import H200

        [case] = prepare([(RANKED["linear_bias_relu"], (16, 128, 64))], "float16", 2, H200)
        offers = [o for o in case.offers if len(o.mugraph.steps) == 1]
        assert offers and not any(o.refused for o in case.offers), case
        tensors = [cuda_tensor(s, "float16") for s in ((16, 128), (128, 64), (64,), (16, 64))]
        problem = SimpleNamespace(inputs=[tensors[:3]], outputs=[tensors[3:]])
        for offer in offers[:2]:
            make = pickle.loads(pickle.dumps(offer.make))
            assert make(problem).launch(0) == tensors[3:]
        """
    )
    assert len(launches) == 2
    assert all("MatmulKernel" in launch.kernel for launch in launches)


# ---------------------------------------------------------------------------------------- isolation


class Breakable(FakeBackend):
    """A device that a process loses when an implementation breaks it."""

    gone = False

    def synchronize(self):
        self.broken = self.gone
        super().synchronize()


@dataclass(frozen=True)
class Behaves:
    """An implementation of RMSNorm + Linear on the CPU that does what its name says."""

    how: str = "right"

    def __call__(self, problem):
        if self.how == "explodes":
            raise OSError("no kernel")
        if self.how == "dies":
            os._exit(1)
        if self.how == "breaks":
            Breakable.gone = True
        factor = 2.0 if self.how == "wrong" else 1.0
        calls = []

        def launch(i):
            calls.append(i)
            # after the check (4 launches) and the recording (3): in the first warm-up
            if self.how == "hangs" and len(calls) > 7:
                time.sleep(100)
            problem.outputs[i][0].copy_(factor * right(*problem.inputs[i]))
            return problem.outputs[i]

        return Launcher(launch)


def job(*how):
    makers = tuple(Implementation(f"c{i:03d}", "ours", Behaves(h)) for i, h in enumerate(how, 1))
    return Job("rmsnorm_linear", TINY, "float16", makers, KNOBS)


class Messages(list):
    """The sending end of a connection."""

    send = list.append


def test_rounds_are_told_and_timed_one_by_one():
    backend, told = FakeBackend(), Messages()
    data = isolate.measure(job("right", "wrong", "right"), Telling(backend, told))
    assert [e["status"] for e in data["implementations"]] == ["ok", "wrong", "ok"]
    steps = [text for kind, text in told if kind == "step"]
    assert "4x64x32 c002: prepare" in steps
    assert steps.count("4x64x32 c003: timing") == KNOBS.rounds
    assert "4x64x32 c002: timing" not in steps
    assert all(len(order) == 1 for order in backend.orders)


def test_the_culprit_is_who_was_named():
    names = ("c001", "c010")
    assert Lost("4x64x32 c010: prepare", "no progress").culprit(names) == "c010"
    assert Lost("4x64x32: timing one of c001 c010", "no progress").culprit(names) is None
    assert job("right", "right").without(["c001"]).names == ("c002",)


def test_a_hang_and_a_crash_cost_only_themselves(monkeypatch):
    waits_only_for(monkeypatch, "c004: warm-up")
    worker = Worker(Breakable, timeout=1.0)
    try:
        assert worker.environment()["gpu"] == "scripted"
        offers = [offer(i, make=Behaves(h)) for i, h in enumerate(
            ("right", "dies", "explodes", "hangs", "breaks", "right"), 1)]  # fmt: skip
        case = rank._measured(worker, Prepared(PLAIN, TINY, offers), KNOBS, None)
    finally:
        worker.close()
    found = {c["name"]: (c["status"], c["error"]) for c in case["candidates"]}
    assert found["c001"] == found["c006"] == ("ok", None)
    assert found["c002"] == ("failed", "the process died in 4x64x32 c002: prepare")
    assert found["c003"] == ("failed", "prepare: OSError: no kernel")
    assert found["c004"] == ("failed", "no progress for 1 s in 4x64x32 c004: warm-up")
    status, error = found["c005"]
    assert status == "failed"
    assert error.startswith("the device stopped working: RuntimeError: CUDA error")
    assert error.endswith("in 4x64x32 c005: prepare")
    assert case["error"] is None
    assert case["summary"]["timed"] == 2


# ------------------------------------------------------------------------------------------ the run


class InProcess:
    """A worker without a process."""

    def __init__(self, make_backend, timeout):
        self.backend, self.lose = make_backend(), {}

    def environment(self):
        return environment(self.backend)

    def measure(self, job):
        for name in job.names:
            if name in self.lose:
                raise Lost(f"4x64x32 {name}: prepare", self.lose[name])
        return isolate.measure(job, Telling(self.backend, Messages()))

    def close(self):
        self.backend = None


@pytest.fixture
def in_process(monkeypatch):
    monkeypatch.setattr(rank, "Worker", InProcess)


def prepared(cases):
    """Three that run (the fake clock says 1, 2 and 3 us), a wrong one, and one without kernels."""
    costs, kernels = (1.5, 2.5, 3.0, 3.5), (1, 1, 2, 1)
    offers = [
        offer(i, make=Behaves(how), cost=cost, kernels=k)
        for i, how, cost, k in zip((1, 2, 3, 4), ("right", "wrong", "right", "right"), costs,
                                   kernels, strict=True)
    ]  # fmt: skip
    offers.append(offer(5, cost=9.0))
    offers[-1].refused = "plan: ScheduleError: too large"
    return [Prepared(w, s, offers, found=10, structures=2) for w, s in cases]


def run(cases=((PLAIN, TINY),), **options):
    return rank.run(
        cases, options.pop("prepare", prepared), settings=KNOBS, make_backend=FakeBackend, **options
    )


def test_run_describes_every_candidate(in_process):
    seen = []
    results = run(case_done=lambda r: seen.append(len(r["cases"])))
    assert json.loads(json.dumps(results, allow_nan=False)) == results
    assert seen == [1]
    assert {"gpu", "torch", "commit", "cutlass_dsl"} <= results["environment"].keys()
    [case] = results["cases"]
    first = case["candidates"][0]
    assert first["time_us"]["median"] == 1.0
    assert {"structure", "sizes", "predicted_us", "parts", "kernels", "position"} <= first.keys()
    assert [c["status"] for c in case["candidates"]] == ["ok", "wrong", "ok", "ok", "failed"]
    assert case["candidates"][1]["error"].startswith("before timing: output 0")
    assert case["candidates"][4]["error"] == "plan: ScheduleError: too large"
    assert case["search"] == {"found": 10, "structures": 2, "seconds": 0.0}
    # times 1, 2, 3 us; predictions 1.5, 3, 3.5
    assert case["summary"] == {
        "timed": 3, "spearman": pytest.approx(1), "kendall": pytest.approx(1),
        "spearman_alike": pytest.approx(1), "best_place": 1, "best_in_top5": True, "regret": 0.0,
        "error": pytest.approx((0.5 + 0.5 + 0.5 / 3) / 3),
    }  # fmt: skip


def timed(*pairs):
    return [{"predicted_us": p, "time_us": m and {"median": m}, "kernels": k} for p, m, k in pairs]


def test_summary_by_hand():
    # the model's first choice failed; of what ran the third is fastest
    s = rank.summarize(timed((1.0, None, 1), (2.0, 4.0, 1), (3.0, 5.0, 2), (4.0, 2.0, 1)))
    assert s["timed"] == 3
    assert s["best_place"] == 3
    assert s["regret"] == pytest.approx(1.0)
    assert s["error"] == pytest.approx((0.5 + 0.4 + 1.0) / 3)
    assert s["spearman"] == pytest.approx(-0.5)
    assert s["kendall"] == pytest.approx(-1 / 3)
    assert s["spearman_alike"] == pytest.approx(-1.0)
    late = rank.summarize(timed(*[(i, 10.0 - i, 1) for i in range(1, 7)]))
    assert (late["best_place"], late["best_in_top5"]) == (6, False)
    nothing = rank.summarize(timed((1.0, None, 1)))
    assert nothing.pop("timed") == 0
    assert set(nothing) == set(s) - {"timed"}
    assert set(nothing.values()) == {None}


def test_a_case_with_too_many_losses_is_given_up(in_process, monkeypatch):
    def broken(make_backend, timeout):
        worker = InProcess(make_backend, timeout)
        worker.lose = {f"c{i:03d}": "the process died" for i in range(1, 8)}
        return worker

    def many(cases):
        return [Prepared(w, s, [offer(i, make=Behaves()) for i in range(1, 9)]) for w, s in cases]

    monkeypatch.setattr(rank, "Worker", broken)
    [case] = run(prepare=many)["cases"]
    assert "given up after 4 candidates" in case["error"]
    assert case["candidates"][0]["error"] == "the process died in 4x64x32 c001: prepare"
    assert "given up" in case["candidates"][7]["error"]
    assert case["summary"]["timed"] == 0


def test_what_no_candidate_did_fails_the_case_only(in_process, monkeypatch):
    class Broken(InProcess):
        def measure(self, job):
            if job.shape == TINY:
                raise Lost("4x64x32: float64 reference of full", "no progress")
            return super().measure(job)

    monkeypatch.setattr(rank, "Worker", Broken)
    first, second = run(((PLAIN, TINY), (PLAIN, (2, 64, 32))))["cases"]
    assert first["error"] == "no progress in 4x64x32: float64 reference of full"
    assert second["summary"]["timed"] == 3


def test_cases_that_have_not_begun_in_time_are_left_out(in_process, monkeypatch):
    begun, done = [], threading.Event()

    def slow(cases):
        begun.append(len(cases))
        if len(begun) > 1:
            assert done.wait(600)
        return prepared(cases)

    # the budget is used up when the first case is done
    clock = SimpleNamespace(monotonic=lambda: 10.0 * done.is_set())
    monkeypatch.setattr(rank, "time", clock)
    cases = [(PLAIN, TINY)] * (rank.CHUNK + 2)
    results = run(cases, prepare=slow, budget_s=5.0, case_done=lambda _: done.set())
    errors = [case["error"] for case in results["cases"]]
    assert len(errors) == len(cases)
    assert errors[0] is None
    assert errors[-1] == "left out: the budget was used up"
    assert results["cases"][-1]["candidates"] == []


# --------------------------------------------------------------------------------------- the tables


def test_tables_show_order_and_reasons(in_process, capsys):
    results = run()
    report._kind(results).show(results)
    text = capsys.readouterr().out
    assert "RMSNorm + Linear 4x64x32: 3 of 5 candidates timed, chosen from 10 of 2" in text
    assert "failed: plan: ScheduleError: too large" in text
    assert "median" in text
    rows = rank_report.case_rows(results["cases"][0], {"A": "A"})
    assert [row[0] for row in rows] == ["1", "3", "4", "2", "5"]
    assert rows[0][1:5] == ["1.50", "1.00", "1.00..1.30", "+50%"]


def test_structures_have_letters():
    case = {"candidates": [{"structure": f"s{i}"} for i in [*range(28), 0, 1]]}
    letters = rank_report.structure_letters(case)
    assert len(letters) == 28
    assert (letters["s0"], letters["s25"], letters["s27"]) == ("A", "Z", "B1")


def test_a_document_is_rewritten_between_its_markers(in_process, tmp_path, capsys):
    results = run(((PLAIN, TINY), (PLAIN, (2, 64, 32))))
    results["cases"][1] |= {"error": "left out", "candidates": [], "summary": rank.summarize([])}
    data, document = tmp_path / "rank.json", tmp_path / "search.md"
    report.save_results(results, data)
    document.write_text("a\n<!-- bench:rank -->\nold\n<!-- /bench:rank -->\nz\n")
    assert report.main(["--page", str(document), str(data)]) == 0
    lines = document.read_text().splitlines()
    assert lines[2].startswith("| workload | timed | Spearman | as many kernels | Kendall |")
    assert lines[4] == (
        "| RMSNorm + Linear 4x64x32 | 3 of 5 | 1.00 | 1.00 | 1.00 | no. 1 | 0.0% | 38.9% |"
    )
    assert lines[5] == "| RMSNorm + Linear 2x64x32 | 0 of 0 |  |  |  | left out |  |  |"
    assert "model's first five in 1 of 1 cases; regret 0.0% in the median" in lines[7]
    assert (lines[0], lines[-1]) == ("a", "z")
    assert report.main([str(data)]) == 0
    assert report.main(["--markdown", str(data)]) == 0
    assert lines[2] in capsys.readouterr().out


@pytest.mark.parametrize("change", [{"kind": "nothing"}, {"cases": None}])
def test_foreign_rankings_are_refused(in_process, tmp_path, change, capsys):
    results = run() | change
    if results["cases"] is None:
        del results["cases"]
    path = tmp_path / "rank.json"
    report.save_results(results, path)
    assert report.main([str(path)]) == 1
    assert "rank.json: " in capsys.readouterr().out


# ------------------------------------------------------------------------------------- command line


@pytest.mark.parametrize(
    "arguments", [["nothing"], ["softmax:1"], ["--top", "1"], ["--budget-s", "0"]]
)
def test_wrong_arguments(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["rank", *arguments])
    assert caught.value.code == 2
    assert "python -m benchmarks rank: error:" in capsys.readouterr().err


def test_without_a_gpu_the_exit_code_is_2(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as caught:
        cli.main(["rank", "softmax"])
    assert caught.value.code == 2
    assert "needs a CUDA GPU" in capsys.readouterr().err


@pytest.fixture
def scripted(in_process, monkeypatch):
    """The command line with fake candidates on the scripted backend."""

    def fake_run(cases, prepare_cases, **options):
        small = [(w, TINY if len(w.axes) == 3 else (4, 64)) for w, _ in cases]
        return rank_run(small, prepared, settings=KNOBS, make_backend=FakeBackend, **options)

    rank_run = rank.run
    monkeypatch.setattr(rank, "run", fake_run)
    monkeypatch.setattr(rank, "current_target", lambda: H200)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def test_command_line_prints_and_saves(scripted, tmp_path, capsys):
    path = tmp_path / "rank.json"
    case = "rmsnorm_linear:16x4096x4096"
    assert cli.main(["rank", case, "--top", "6", "--json", str(path)]) == 0
    results = report.load_results(path)
    assert (results["name"], results["top"], len(results["cases"])) == ("rank", 6, 1)
    assert "first five in 1 of 1 cases" in capsys.readouterr().out


def test_an_incomplete_run_has_exit_code_1(scripted, tmp_path, capsys):
    assert cli.main(["rank", "rmsnorm_linear", "--budget-s", "1e-9"]) == 1
    assert "left out" in capsys.readouterr().out


def test_no_process_no_ranking(scripted, monkeypatch, capsys):
    def lost(*_, **__):
        raise Lost("start-up", "the process died")

    monkeypatch.setattr(rank, "run", lost)
    with pytest.raises(SystemExit) as caught:
        cli.main(["rank", "rmsnorm_linear"])
    assert caught.value.code == 3
    assert "the process died in start-up" in capsys.readouterr().err


@pytest.mark.gpu
def test_ranking_on_the_device():
    prepare = partial(candidates.prepare, dtype="float16", top=2, target=H200)
    cases = [*rank.parse_case("rmsnorm_linear:16x1024x512"), *rank.parse_case("softmax:64x512")]
    # a program of rows that one kernel computes has no other candidate
    for case, timed in zip(rank.run(cases, prepare, top=2)["cases"], (3, 1), strict=True):
        assert [c["error"] for c in case["candidates"]] == [None] * timed
        assert case["summary"]["timed"] == timed
