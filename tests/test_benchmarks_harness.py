"""The harness on a scripted clock: interleaving, checks before and after, failures."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import harness
from benchmarks.entry import describe_error
from benchmarks.harness import DeviceLostError, Monitor, Settings
from benchmarks.peers import PEERS, Implementation, Launcher, choose
from tests.benchmark_fakes import (
    GAIN,
    KNOBS,
    PLAIN,
    FakeBackend,
    entries_of,
    measure,
    right,
    writer,
)


def test_run_interleaves_times_checks_and_describes():
    backend = FakeBackend()
    results = measure(
        writer(right), writer(right, "cutesuper-pdl", dependent=True), "eager", "matmul-alone",
        backend=backend,
    )  # fmt: skip
    assert json.loads(json.dumps(results, allow_nan=False)) == results
    assert all(sorted(order) == list(range(6)) for order in backend.orders)
    assert len(backend.orders) == KNOBS.rounds
    assert len({tuple(order) for order in backend.orders}) > 1
    assert all(backend.flushes)  # 8 tiny sets do not outgrow any L2
    case = results["cases"][0]
    assert case["label"] == "4x64x32"
    assert case["sets"] == {"count": 8, "set_bytes": 4864, "flush": True}
    assert case["bytes"] == 2 * (4 * 64 + 64 * 32 + 4 * 32)
    assert case["floor_us"] == {"plain": 1.0, "pdl": 2.0}
    entries = entries_of(results)
    assert [e["status"] for e in entries.values()] == ["ok"] * 6
    ours = entries["cutesuper"]
    assert ours["time_us"] == {"median": 3.0, "p10": 3.0, "p90": pytest.approx(3.9), "min": 3.0,
                               "samples": 5}  # fmt: skip
    assert ours["bandwidth_gbs"] == pytest.approx(case["bytes"] / 3.0 / 1e3)
    assert ours["tflops"] == pytest.approx(2 * 4 * 64 * 32 / 3.0 / 1e6)
    assert ours["floor_percent"] == pytest.approx(100 / 3)
    assert entries["cutesuper-pdl"]["floor_percent"] == pytest.approx(100 * 2 / 4)
    assert ours["check_before"]["passed"]
    assert ours["check_after"]["passed"]
    assert 0 < ours["check_before"]["relative_error"] < 1e-3
    assert ours["host_us"]["samples"] == 2
    assert ours["host_us"]["median"] > 0
    assert entries["floor-plain"]["host_us"] is None
    environment = results["environment"]
    assert environment["torch"] == torch.__version__
    assert {"commit", "dirty", "python", "triton", "cutlass_dsl", "quack", "gpu"} <= set(
        environment
    )
    assert case["clocks"] == {"before": {"sm_mhz": 1980.0}, "after": {"sm_mhz": 1980.0}}


def test_same_seed_same_order():
    first, second = FakeBackend(), FakeBackend()
    measure(writer(right), "eager", backend=first)
    measure(writer(right), "eager", backend=second)
    assert first.orders == second.orders


def test_wrong_results_are_not_timed():
    results = measure(writer(lambda x, w: right(x, w) * 1.01), "eager")
    ours = entries_of(results)["cutesuper"]
    assert ours["status"] == "wrong"
    assert ours["error"].startswith("before timing: output 0")
    assert ours["time_us"] is None
    assert entries_of(results)["eager"]["status"] == "ok"


def half(problem):
    def launch(i):
        problem.outputs[i][0][:, :16] = right(*problem.inputs[i])[:, :16]
        return problem.outputs[i]

    return Launcher(launch)


def test_unwritten_outputs_are_seen_even_when_stale_memory_is_right():
    # "eager" has written the right values into the same memory before
    results = measure("eager", Implementation("cutesuper", "ours", half))
    assert "64 of 128 elements" in entries_of(results)["cutesuper"]["error"]


def test_what_goes_wrong_during_timing_is_seen_afterwards():
    calls = []

    def fickle(x, w):
        calls.append(None)
        return right(x, w) if len(calls) < 20 else torch.zeros(4, 32).half()

    ours = entries_of(measure(writer(fickle), "eager"))["cutesuper"]
    assert ours["status"] == "wrong"
    assert ours["error"].startswith("after timing")
    assert ours["check_before"]["passed"]
    assert not ours["check_after"]["passed"]
    assert ours["time_us"] is None


def test_inputs_damaged_by_an_implementation_are_seen():
    def spoil(x, w):
        y = right(x, w)
        w.zero_()
        return y

    entries = entries_of(measure(writer(spoil)))
    assert entries["cutesuper"]["status"] == "wrong"


def test_a_failing_peer_does_not_stop_the_others():
    def explode(_):
        raise OSError("\x1b[91m\n  no compiler\x1b[0m\nsecond line")

    results = measure(writer(right), Implementation("compile", "peer", explode), "eager")
    entries = entries_of(results)
    assert entries["compile"]["status"] == "failed"
    assert entries["compile"]["error"] == "prepare: OSError: no compiler"
    assert entries["eager"]["status"] == entries["cutesuper"]["status"] == "ok"


def test_a_failing_floor_leaves_the_percentage_empty():
    def explode(_):
        raise ImportError("no CuTe DSL")

    broken = (Implementation("floor-plain", "floor", explode),)
    results = measure(writer(right), floors=broken)
    assert results["cases"][0]["floor_us"] == {"plain": None, "pdl": None}
    assert entries_of(results)["cutesuper"]["floor_percent"] is None


def test_a_lost_device_ends_the_run_with_partial_results():
    backend = FakeBackend()

    def crash(_):
        backend.broken = True
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    seen = []

    class Watch(Monitor):
        def started(self, results):
            seen.append(results)

    with pytest.raises(DeviceLostError, match="illegal memory access"):
        measure("eager", Implementation("cutesuper", "ours", crash), "matmul-alone",
                backend=backend, monitor=Watch())  # fmt: skip
    entries = entries_of(seen[0])
    assert entries["cutesuper"]["status"] == "failed"
    assert entries["matmul-alone"]["status"] == "pending"


def test_a_device_lost_while_timing_leaves_no_times():
    backend = FakeBackend()

    def crash(_recordings, _flush):
        raise RuntimeError("CUDA error: unspecified launch failure")

    backend.time_round = crash
    seen = []

    class Watch(Monitor):
        def started(self, results):
            seen.append(results)

    with pytest.raises(DeviceLostError, match="unspecified launch failure"):
        measure(writer(right), "eager", backend=backend, monitor=Watch())
    for entry in entries_of(seen[0]).values():
        assert entry["status"] == "failed"
        assert entry["error"].startswith("timing: RuntimeError: CUDA error")


def test_parts_may_have_outputs_of_their_own():
    results = harness.run(
        "gated_mlp", shapes=["4x64x32"], peers=["eager", "matmul-alone"], floors=(),
        settings=KNOBS, backend=FakeBackend(),
    )  # fmt: skip
    for entry in entries_of(results).values():
        assert entry["status"] == "ok", entry["error"]
        assert entry["check_after"]["passed"]


def test_a_monitor_sees_every_step_and_the_unfinished_one():
    steps, states = [], []

    class Watch(Monitor):
        def started(self, results):
            self.results = results

        def step(self, name):
            steps.append(name)
            if name.endswith("eager: prepare"):
                states.append(entries_of(self.results)["eager"]["error"])
            return super().step(name)

        def case_done(self, results, case):
            steps.append(f"done {case['label']}")

    measure(writer(right), "eager", monitor=Watch())
    assert "4x64x32 cutesuper: prepare" in steps
    assert "4x64x32 cutesuper: host time" in steps
    assert steps[-1] == "done 4x64x32"
    assert states == ["did not finish: prepare"]


def test_no_memory_is_reported_in_the_case():
    results = harness.run(
        PLAIN, shapes=[(4, 4096, 4096)], peers=["eager"], floors=(), settings=KNOBS,
        backend=FakeBackend(),
    )  # fmt: skip
    assert "smaller shape" in results["cases"][0]["error"]
    assert entries_of(results)["eager"]["status"] == "failed"


def test_names_are_checked():
    with pytest.raises(ValueError, match="unknown implementation 'torch'"):
        choose(["torch"])
    with pytest.raises(ValueError, match="not defined for dtype 'int8'"):
        harness.run(PLAIN, dtype="int8", backend=FakeBackend())
    assert [p.name for p in choose(None)] == [p.name for p in PEERS]
    assert "compile-max" not in [p.name for p in choose(None, quick=True)]


def test_bfloat16_has_its_own_name():
    results = harness.run(
        GAIN, shapes=["4x64x32"], dtype="bfloat16", peers=["eager"], floors=(), settings=KNOBS,
        backend=FakeBackend(),
    )  # fmt: skip
    assert results["name"] == "rmsnorm_gain_linear-bfloat16"
    assert entries_of(results)["eager"]["status"] == "ok"


def test_errors_become_one_line():
    assert describe_error(ValueError("a\nb")) == "ValueError: a"
    assert describe_error(KeyError()) == "KeyError: "
    assert len(describe_error(ValueError("x" * 1000))) == 300


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_quick_run_on_the_device():
    settings = Settings(rounds=3, host_batches=2, least_sets=4, most_sets=16)
    results = harness.run(
        PLAIN, shapes=[(16, 1024, 512)], peers=["eager", "matmul-alone"], settings=settings
    )
    for item in results["cases"][0]["implementations"]:
        assert item["status"] == "ok", item["error"]
        assert item["time_us"]["median"] > 0.3
    assert results["cases"][0]["floor_us"]["plain"] > 0.5
