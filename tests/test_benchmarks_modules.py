"""Modules in the benchmarks: their extents, who takes part, and their table."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks import modules, report, sweep
from benchmarks.harness import Monitor
from benchmarks.module_list import MODULES, Module
from tests.benchmark_fakes import FLOORS, KNOBS, entries_of
from tests.compiling import leave_inductor_out, taken
from tests.test_benchmarks_sweep import Clock

TINY = {
    "normed_product": Module(
        lambda x, n, w: F.linear(F.rms_norm(x, (16,), n), w), ((12, 16),), ((16,), (8, 16))
    ),
    "loss_and_rows": Module(
        lambda x, y: (F.cross_entropy(x.float(), y, reduction="none"), x.softmax(-1)),
        ((12, 20),), labels=(12, 20),
    ),
}  # fmt: skip


def test_everybody_computes_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules, "MODULES", TINY)
    reports = leave_inductor_out(monkeypatch)
    made = modules.make_sweep(list(TINY), modules.IMPLEMENTATIONS)
    items = sweep.Sweep(made.kind, made.title, made.items, (*FLOORS[:1], *modules.IMPLEMENTATIONS))
    results = sweep.run(items, KNOBS, backend=Clock(), monitor=Monitor())
    assert taken(reports)
    for case in results["cases"]:
        entries: dict[str, Any] = {e["name"]: e for e in case["implementations"]}
        for peer in modules.IMPLEMENTATIONS:
            assert entries[peer.name]["status"] == "ok", entries[peer.name]["error"]
    [product, loss] = results["cases"]
    assert product["bytes"] == 2 * (12 * 16 + 16 + 8 * 16 + 12 * 8)
    assert loss["bytes"] == 2 * 12 * 20 * 2 + 8 * 12 + 4 * 12
    assert entries_of(results)["eager"]["check_after"]["passed"]
    table = report.KINDS["modules"].markdown(report.merged([results])[0])
    assert "2 modules: " in table and "| normed product |" in table and "speedup" in table


@pytest.mark.parametrize("name", MODULES)
def test_extents(name: str) -> None:
    """Everything fits together, and a few sets into memory."""
    workload = modules.workload_of(name)
    assert all(isinstance(d, int) for spec in workload.outputs((1,)) for d in spec.dims)
    assert workload.bytes_moved((1,), torch.bfloat16) < 3e8


def test_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        modules.main(["--only", "no_module"], "")
    assert "no_module" in capsys.readouterr().err
