"""Fitting the cost model to measurements: programs are found again, constants recovered."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import cutesuper as cs
from benchmarks import calibrate, candidates, cli
from benchmarks.workloads import RANKED
from cutesuper.targets import H200

SHAPE = (16, 1024, 512)


def results(target):
    """A ranking run whose times are what the model says for ``target``."""
    offers = candidates.sample(
        candidates.pool(RANKED["rmsnorm_linear"].graph(cs, SHAPE, "float16"), H200), 8
    )
    entries = [
        {
            "structure": o.structure, "sizes": o.sizes, "kernels": len(o.mugraph.steps),
            "predicted_us": o.predicted_us, "time_us": {"median": o.predicted_us},
        }
        for o in offers
    ]  # fmt: skip
    case = {
        "workload": "rmsnorm_linear", "title": "RMSNorm + Linear", "label": "16x1024x512",
        "shape": list(SHAPE), "error": None, "candidates": entries,
    }  # fmt: skip
    timed = calibrate.find_case(case, "float16", H200).timed
    for entry, t in zip(entries, timed, strict=True):
        assert t.predicted(H200) == pytest.approx(entry["predicted_us"])  # the same program
        entry["time_us"] = {"median": t.predicted(target)}
    return {"kind": "rank", "dtype": "float16", "top": 8, "cases": [case]}


def test_constants_are_recovered():
    slower = calibrate.with_constants(H200, {"launch_us": 3.0})
    measured = results(slower)
    case = calibrate.find_case(measured["cases"][0], "float16", H200)
    fitted = calibrate.fit([case], H200)
    before, after = (
        calibrate.predicted(measured, [case], t)["cases"][0]["summary"] for t in (H200, fitted)
    )
    assert before["error"] > 0.2 and after["error"] < 0.03
    assert 2.5 < fitted.launch_us < 3.5
    assert fitted == calibrate.with_constants(fitted, {"launch_us": fitted.launch_us})


def test_structures_that_are_gone_are_left_out():
    case = results(H200)["cases"][0]
    gone = case["candidates"][0] | {"structure": "k0: out0 = exp(x)"}
    found = calibrate.find_case(case | {"candidates": [gone, *case["candidates"]]}, "float16", H200)
    assert len(found.timed) == len(case["candidates"])


def test_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(calibrate, "EVALUATIONS", 1)
    path = tmp_path / "rank.json"
    path.write_text(json.dumps(results(replace(H200, launch_us=2.0))))
    assert cli.main(["calibrate", str(path)]) == 0
    out = capsys.readouterr().out
    assert "candidates of 1 cases found again" in out and "sm_bytes_per_us" in out


@pytest.mark.parametrize("text", ["{}", "no JSON"])
def test_other_files_are_refused(tmp_path, capsys, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(SystemExit) as caught:
        cli.main(["calibrate", str(path)])
    assert caught.value.code == 2
    assert "error:" in capsys.readouterr().err
