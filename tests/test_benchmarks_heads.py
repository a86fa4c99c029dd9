"""Linear layers with their cross entropy in the benchmarks, and their table."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import heads, report

CPU = torch.device("cpu")
SMALL = heads.Head(40, 32, 96)


def results_of(names: list[str]) -> dict[str, Any]:
    environment = {"gpu": "a GPU", "torch": "2.11.0", "date": "2026-11-29", "commit": "abc"}
    return {
        "schema": 1, "kind": "heads", "name": "heads", "title": "Heads", "dtype": "bfloat16",
        "environment": environment, "cases": [heads.measured(SMALL, names, 2, CPU)],
    }  # fmt: skip


def test_what_is_right_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    results = results_of(["cutesuper", "eager"])
    [case] = results["cases"]
    assert [e["status"] for e in case["implementations"]] == ["ok", "ok"]
    assert all(e["time_us"]["samples"] == 2 for e in case["implementations"])
    assert case["flops"] == 6 * 40 * 32 * 96
    report.KINDS["heads"].show(results)
    [line] = [x for x in capsys.readouterr().out.splitlines() if "| 40 | 32 | 96 |" in x]
    cells = [c.strip() for c in line.strip("|").split("|")]
    assert cells[3].endswith("ms, 0.0 GB, 0 s") and cells[-1].endswith("x")


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (lambda x, w, t: heads._eager(x, w, t) * 1.01, "the loss is"),
        (lambda x, w, t: heads._eager(x, w + 0.05 * (w - w.detach()), t), "output 1: "),
    ],
    ids=["loss", "gradient"],
)
def test_what_is_wrong_is_not(
    loss: heads.Loss, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(heads.IMPLEMENTATIONS, "compile", lambda: loss)
    [case] = results_of(["compile", "eager"])["cases"]
    [wrong, right] = case["implementations"]
    assert (wrong["status"], right["status"]) == ("wrong", "ok")
    assert reason in wrong["error"] and wrong["time_us"] is None


def test_what_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> heads.Loss:
        raise ImportError("no such library\nand more")

    monkeypatch.setitem(heads.IMPLEMENTATIONS, "liger", missing)
    results = results_of(["liger", "eager"])
    [entry] = [e for e in results["cases"][0]["implementations"] if e["name"] == "liger"]
    assert entry["status"] == "failed" and entry["error"] == "ImportError: no such library"
    assert "no such library" in heads.heads_markdown(results)
