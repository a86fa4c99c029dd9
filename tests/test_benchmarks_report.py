"""Tables on the terminal, in Markdown and in the README."""

from __future__ import annotations

import sys

import pytest

from benchmarks import report
from tests.benchmark_fakes import (
    measure,
    right,
    writer,
)


def entry(name, kind, time_us, status="ok", **extra):
    spread = None
    if time_us is not None:
        spread = {"median": time_us, "p10": time_us, "p90": time_us, "min": time_us, "samples": 20}
    check = {"passed": True, "relative_error": 2e-4, "torch_relative_error": 3e-4, "reason": ""}
    return {
        "name": name, "kind": kind, "dependent": False, "status": status, "error": None,
        "prepare_seconds": 1.0, "time_us": spread, "host_us": spread, "bandwidth_gbs": 3000.0,
        "tflops": 50.0, "floor_percent": 90.0, "check_before": check, "check_after": check,
    } | extra  # fmt: skip


@pytest.fixture
def results():
    implementations = [
        entry("floor-plain", "floor", 9.6, check_before=None, host_us=None),
        entry("cutesuper", "ours", 10.0),
        entry("cutesuper-pdl", "ours", 20.0),
        entry("eager", "peer", 20.4),
        entry("compile", "peer", 15.0),
        entry("compile-max", "peer", None, status="failed", error="prepare: OSError: a | b"),
        entry("matmul-alone", "part", 9.9),
    ]
    case = {
        "shape": [16, 4096, 4096], "label": "16x4096x4096", "error": None, "bytes": 33_816_576,
        "flops": 536870912, "sets": {"count": 64, "set_bytes": 33_816_576, "flush": False},
        "clocks": {}, "floor_us": {"plain": 9.6, "pdl": None}, "implementations": implementations,
    }  # fmt: skip
    return {
        "schema": 1, "name": "rmsnorm_linear", "workload": "rmsnorm_linear", "quick": False,
        "title": "RMSNorm + Linear", "dtype": "float16", "cases": [case],
        "environment": {"gpu": "H200", "driver": "580", "commit": "0123456789abcdef",
                        "dirty": True, "torch": "2.11"},
    }  # fmt: skip


def test_table_shows_losses_and_failures(results):
    rows = {row[0]: row for row in report.case_rows(results["cases"][0])}
    assert rows["cutesuper"][3] == "1.50x"
    assert rows["cutesuper"][-1] == "faster"
    assert rows["cutesuper-pdl"][3] == "0.75x"
    assert rows["cutesuper-pdl"][-1] == "SLOWER than a peer"
    assert rows["compile-max"][-1] == "failed: prepare: OSError: a | b"
    assert rows["matmul-alone"][3] == ""  # a part is no peer
    assert list(rows)[-1] == "compile-max"
    text = report.plain_table("title", report.case_rows(results["cases"][0]))
    assert len(text.splitlines()) == 9


def test_printing_works_with_and_without_rich(results, capsys, monkeypatch):
    report.print_results(results)
    with_rich = capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "rich.console", None)
    report.print_results(results)
    plain = capsys.readouterr().out
    for text in (with_rich, plain):
        assert "16x4096x4096" in text
        assert "SLOWER than a peer" in text
        assert "commit 0123456789 (modified)" in text


def test_markdown(results):
    lines = report.markdown(results).splitlines()
    assert lines[0].startswith("| shape | **cutesuper** | **cutesuper, dependent launch** |")
    assert lines[1].count("---") == lines[0].count("|") - 1
    assert lines[2] == (
        "| 16x4096x4096 | 10.00 | 20.00 | 20.40 | 15.00 | failed | 9.90 | 9.60 / ? | 1.50x |"
    )
    assert "H200, driver 580, torch 2.11" in lines[-1]


def test_readme_is_rewritten_between_its_markers(results, tmp_path, capsys):
    readme, data = tmp_path / "README.md", tmp_path / "r.json"
    text = "a\n<!-- bench:rmsnorm_linear -->\nold \\1\n<!-- /bench:rmsnorm_linear -->\nz\n"
    readme.write_text(text)
    report.save_results(results, data)
    assert report.main(["--readme", str(readme), str(data)]) == 0
    new = readme.read_text()
    assert new.startswith("a\n<!-- bench:rmsnorm_linear -->\n| shape |")
    assert new.endswith("<!-- /bench:rmsnorm_linear -->\nz\n")
    assert "\\1" not in new
    assert report.main(["--readme", str(readme), str(data)]) == 0
    assert readme.read_text() == new
    readme.write_text("no markers")
    assert report.main(["--readme", str(readme), str(data)]) == 1
    assert "expected exactly one <!-- bench:rmsnorm_linear -->" in capsys.readouterr().out
    assert readme.read_text() == "no markers"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["README.md", "r.json"]


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": 2}', '{"schema": 1}'])
def test_foreign_files_are_refused(tmp_path, text, capsys):
    path = tmp_path / "x.json"
    path.write_text(text)
    assert report.main([str(path)]) == 1
    assert "x.json" in capsys.readouterr().out


def test_report_prints(results, tmp_path, capsys):
    data = tmp_path / "r.json"
    report.save_results(results, data)
    assert report.main([str(data)]) == 0
    assert report.main(["--markdown", str(data)]) == 0
    assert "| shape |" in capsys.readouterr().out


def test_markdown_of_a_real_run_has_all_implementations():
    results = measure(writer(right), "eager")
    assert "4x64x32" in report.markdown(results)
    assert len(report.case_rows(results["cases"][0])) == 4
