"""The chain: every layer reads the one before; its end is checked, before and after timing."""

from __future__ import annotations

import pytest
import torch

from benchmarks import chain, report
from benchmarks.peers import Implementation, Launcher, choose
from benchmarks.problem import SetPlan, make_problem
from tests.benchmark_fakes import FLOORS, KNOBS, PLAIN, FakeBackend, entries_of, right, writer

SQUARE = (4, 64, 64)


def measure(*peers):
    return chain.run(
        choose(peers, among=chain.IMPLEMENTATIONS),
        KNOBS,
        shape=SQUARE,
        floors=FLOORS,
        backend=FakeBackend(),
    )


def problem_of(count=5):
    return chain.chained(
        make_problem(
            PLAIN,
            SQUARE,
            "float16",
            torch.float16,
            device=torch.device("cpu"),
            multiprocessors=132,
            plan=SetPlan(count, 0, True),
            seed=0,
        )
    )


def test_layers_read_what_the_one_before_writes():
    problem = problem_of()
    for (before,), (x, _) in zip(problem.outputs, problem.inputs[1:], strict=False):
        assert x is before
    assert len({w.data_ptr() for _, w in problem.inputs}) == 5
    value = problem.inputs[0][0].double()
    for _, w in problem.inputs:
        [value] = PLAIN.computations["full"].reference(value, w.double())
    [expected] = problem.expected("full", 4)
    torch.testing.assert_close(expected.reference, value)
    assert 0.3 < value.square().mean().sqrt() < 3
    assert 0 < expected.torch_error.relative < 5e-3


def test_errors_grow_with_the_root_of_the_depth():
    """The basis of the chain's tolerance: 16 times the layers, about 4 times the error."""
    shallow, deep = (problem_of(n).expected("full", n - 1)[0].torch_error for n in (2, 32))
    assert 2.5 < deep.relative / shallow.relative < 6.5


def test_times_are_of_one_layer():
    results = measure(writer(right), "eager")
    [case] = results["cases"]
    assert case["sets"]["count"] == chain.LAYERS == 32
    entries = entries_of(results)
    assert [e["status"] for e in entries.values()] == ["ok"] * 4
    assert entries["cutesuper"]["time_us"]["median"] == 3.0
    text = report.KINDS["chain"].markdown(results)
    lines = text.splitlines()
    assert lines[2].startswith("| **cutesuper** | 3.00 | 96 | 1.33x |")
    assert lines[3].startswith("| PyTorch eager | 4.00 | 128 |  |")
    assert lines[4] == "| floor | 1.00 | 32 |  |  |"
    assert lines[5] == "| floor, dependent launch | 2.00 | 64 |  |  |"


def test_a_layer_that_reads_too_early_is_wrong():
    """As a dependent launch that does not wait for the kernel before."""

    def make(problem):
        stale = [x.clone() for x, _ in problem.inputs]

        def launch(i):
            problem.outputs[i][0].copy_(right(stale[i] if i == 20 else problem.inputs[i][0],
                                              problem.inputs[i][1]))  # fmt: skip
            return problem.outputs[i]

        return Launcher(launch)

    entry = entries_of(measure(Implementation("cutesuper-pdl", "ours", make)))["cutesuper-pdl"]
    assert entry["status"] == "wrong"
    assert entry["error"].startswith("before timing")


def test_one_layer_off_by_a_percent_is_wrong():
    calls = []

    def skewed(x, w):
        calls.append(None)
        y = right(x, w)
        y[:, ::2] *= 1.01 if len(calls) % 32 == 7 else 1.0
        return y

    assert entries_of(measure(writer(skewed)))["cutesuper"]["status"] == "wrong"


def test_results_that_are_allocated_feed_the_next_layer(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    [compiled] = choose(["compile"], among=chain.IMPLEMENTATIONS)
    problem = problem_of()
    launcher = compiled.make(problem)
    for _ in range(2):
        for i in range(5):
            value = launcher.launch(i)
        error = (value[0] - problem.expected("full", 4)[0].reference).abs().max()
        assert error < 0.02
    assert entries_of(measure("compile"))["compile"]["status"] == "ok"


def test_failures_are_told():
    def explode(_):
        raise OSError("no compiler")

    results = measure(Implementation("compile", "peer", explode), "eager")
    text = report.KINDS["chain"].markdown(results)
    assert "| torch.compile | failed |" in text
    assert "compile: failed: prepare: OSError: no compiler" in text


def test_only_square_layers_chain():
    with pytest.raises(ValueError, match="reads what the one before writes"):
        chain.run([], KNOBS, shape=(4, 64, 32), backend=FakeBackend())


def test_wrong_arguments(capsys):
    with pytest.raises(SystemExit) as caught:
        chain.main(["--peers", "compile-max"], "chain")
    assert caught.value.code == 2
    assert "unknown implementation 'compile-max'" in capsys.readouterr().err
