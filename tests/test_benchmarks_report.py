"""Tables on the terminal, in Markdown and in the pages; the summary in the README."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks import plots, report, summary, tables
from benchmarks.best import with_best
from benchmarks.tables import describe_environment
from tests.benchmark_fakes import (
    measure,
    right,
    writer,
)

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks/results"


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
    assert rows["cutesuper"][-1] == "win"
    assert rows["cutesuper-pdl"][3] == "0.75x"
    assert rows["cutesuper-pdl"][-1] == "loss"
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
        assert " loss" in text
        assert "commit 0123456789 (modified)" in text


def test_markdown(results):
    lines = report.markdown(results).splitlines()
    assert lines[0].startswith("| shape | **cutesuper** | **cutesuper, dependent launch** |")
    assert lines[1].count("---") == lines[0].count("|") - 1
    assert lines[2] == (
        "| 16x4096x4096 | 10.00 | 20.00 | 20.40 | 15.00 | failed | 9.90 | 9.60 / ? | 1.50x |"
    )
    assert "H200, driver 580, torch 2.11" in lines[-1]


def test_a_page_is_rewritten_between_its_markers(results, tmp_path, capsys):
    page, data = tmp_path / "page.md", tmp_path / "r.json"
    text = "a\n<!-- bench:rmsnorm_linear -->\nold \\1\n<!-- /bench:rmsnorm_linear -->\nz\n"
    page.write_text(text)
    report.save_results(results, data)
    assert report.main(["--page", str(page), str(data)]) == 0
    new = page.read_text()
    assert new.startswith("a\n<!-- bench:rmsnorm_linear -->\n| shape |")
    assert new.endswith("<!-- /bench:rmsnorm_linear -->\nz\n")
    assert "\\1" not in new
    assert report.main(["--page", str(page), str(data)]) == 0
    assert page.read_text() == new
    page.write_text("no markers")
    assert report.main(["--page", str(page), str(data)]) == 1
    assert "expected exactly one <!-- bench:rmsnorm_linear -->" in capsys.readouterr().out
    assert page.read_text() == "no markers"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["page.md", "r.json"]


def test_results_go_to_the_pages_that_have_their_markers(results, tmp_path, capsys):
    data, names = tmp_path / "r.json", ("with.md", "without.md", "half.md")
    pages = [tmp_path / name for name in names]
    report.save_results(results, data)
    pages[0].write_text("<!-- bench:rmsnorm_linear -->\n<!-- /bench:rmsnorm_linear -->\n")
    pages[1].write_text("<!-- bench:rmsnorm_linear_nk -->\n<!-- /bench:rmsnorm_linear_nk -->\n")
    pages[2].write_text("<!-- bench:rmsnorm_linear -->\n")
    before = [page.read_text() for page in pages]
    options = [["--page", str(page)] for page in pages]
    assert report.main([*options[0], *options[1], *options[2], str(data)]) == 1
    assert "expected exactly one <!-- bench:rmsnorm_linear -->" in capsys.readouterr().out
    assert [page.read_text() for page in pages] == before
    assert report.main([*options[0], *options[1], str(data)]) == 0
    assert "| shape |" in pages[0].read_text() and pages[1].read_text() == before[1]


def test_tables_of_the_documentation_are_those_of_the_results():
    loaded = report.merged([report.load_results(path) for path in sorted(RESULTS.glob("*.json"))])
    pages = {path: path.read_text() for path in sorted((RESULTS.parents[1] / "docs").glob("*.md"))}
    made = pages
    for result in loaded:
        made = report.rewrite_pages(made, result)
    assert [p.name for p in pages if pages[p] != made[p]] == []


def test_the_summary_is_that_of_the_results(tmp_path):
    page, drawn = tmp_path / "README.md", tmp_path / "summary.svg"
    page.write_text((RESULTS.parents[1] / "README.md").read_text())
    assert summary.main([str(RESULTS), str(page), str(drawn)]) == 0
    assert page.read_text() == (RESULTS.parents[1] / "README.md").read_text()
    assert drawn.read_text() == (RESULTS.parents[1] / "docs/summary.svg").read_text()
    texts = [e.text for e in ElementTree.parse(drawn).iter("{http://www.w3.org/2000/svg}text")]
    for line in summary.read_lines(RESULTS):
        assert {line.choice.program, f"{line.ratio:.2f}x"} <= set(texts)
        assert line.ratio == line.peer_us / line.ours_us


def test_the_plots_are_those_of_the_results(tmp_path):
    pytest.importorskip("matplotlib")
    shown = RESULTS.parents[1] / "docs/plots"
    written = plots.write_plots(RESULTS, tmp_path)
    assert {p.name for p in written} == {p.name for p in shown.iterdir()}
    for path in written:
        if path.suffix == ".svg":  # the curves themselves depend on the version of matplotlib
            texts = [
                [e.text for e in ElementTree.parse(file).iter("{http://www.w3.org/2000/svg}text")]
                for file in (path, shown / path.name)
            ]
            assert texts[0] == texts[1] and any("commit" in text for text in texts[0])


def test_the_summary_refuses_results_without_its_cases(results, tmp_path, capsys, monkeypatch):
    page, drawn = tmp_path / "README.md", tmp_path / "summary.svg"
    page.write_text("unchanged")
    results["cases"][0]["key"] = "here"
    report.save_results(results, tmp_path / "r.json")
    for key, ours, message in (
        ("here", "cutesuper", "expected exactly one <!-- bench:headline -->"),
        ("there", "cutesuper", "r.json: no case there"),
        ("here", "another", "r.json: here lacks another, a peer or a floor"),
    ):
        monkeypatch.setattr(summary, "CHOICES", (summary.Choice("r", key, "program", ours),))
        assert summary.main([str(tmp_path), str(page), str(drawn)]) == 1
        assert message in capsys.readouterr().out
    assert page.read_text() == "unchanged" and not drawn.exists()


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


def test_a_difference_within_one_per_cent_is_a_tie() -> None:
    """Noise is neither a win nor a loss, in words, tables and the picture alike."""
    words = [tables.outcome_of(r) for r in (0.98, 0.9901, 1.0, 1.0099, 1.02)]
    assert words == ["loss", "tie", "tie", "tie", "win"]
    ratios = {"a": 2.0, "b": 0.9901, "c": 0.9889, "d": 1.5}
    assert tables.tally_text(ratios) == (
        "2 wins, 1 tie (within 1 %), 1 loss; tie: b (0.990x); loss: c (0.989x)"
    )
    for name in ("benchmarks", "performance"):
        text = (Path(report.__file__).parents[1] / "docs" / f"{name}.md").read_text()
        assert "faster than every" not in text and "faster than all" not in text


def test_the_fastest_choice_of_a_peer_in_several_runs() -> None:
    """The other entries stay those of one run, and the table says what was done."""

    def run(gpu: str, **us: float | None) -> dict[str, Any]:
        entries = [
            {"name": n.replace("_", "-"), "status": "ok" if t else "wrong",
             "time_us": {"median": t} if t else None}
            for n, t in us.items()
        ]  # fmt: skip
        case = {"key": "lora/16", "implementations": entries}
        environment = {"gpu": gpu, "commit": "abc"}
        return {"kind": "peers", "name": "lora", "cases": [case], "environment": environment}

    new = run("H200", cutesuper=3.0, compile_max=9.0)
    others = [run("H200", cutesuper=2.0, compile_max=t) for t in (8.0, None, 8.5)]
    found = with_best(new, others, "compile-max")
    times = [i["time_us"]["median"] for i in found["cases"][0]["implementations"]]
    assert times == [3.0, 8.0]
    assert "torch.compile max-autotune: the fastest of 4 runs" in describe_environment(found)
    assert "best_of" not in new["environment"]
    with pytest.raises(ValueError, match="H100"):
        with_best(new, [run("H100", compile_max=1.0)], "compile-max")
