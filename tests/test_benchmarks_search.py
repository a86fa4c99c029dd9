"""Measurements of the search: its table, forward enumeration against saturation, the plot."""

from __future__ import annotations

import copy
import os
from itertools import product
from xml.etree import ElementTree

import pytest

from benchmarks import cli, report
from benchmarks.search import ablation, measure, plot
from benchmarks.search import report as tables
from benchmarks.search.forward import AnySpace, Enumeration, saturated
from benchmarks.search.fresh import in_fresh_process
from benchmarks.search.programs import PROGRAMS
from cutesuper.egraph.labelled import label
from cutesuper.egraph.saturate import saturate
from cutesuper.egraph.space import Space
from cutesuper.egraph.splits import splits
from cutesuper.errors import SearchError
from cutesuper.ir.graph import new_kernel_graph
from cutesuper.search.cuts import Flat
from cutesuper.search.region import Counts, Found
from cutesuper.search.search import search
from cutesuper.targets import H200

SVG = "{http://www.w3.org/2000/svg}"

# ----------------------------------------------------------------------------------- all programs


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """The output of the command for one program while this process is large."""
    path = tmp_path_factory.mktemp("search") / "search.json"
    ballast = bytearray(os.urandom(1 << 20) * 400)
    assert cli.main(["search", "GatedMLP", "--json", str(path)]) == 0
    assert len(ballast) == 400 << 20
    return report.load_results(path)


def test_command_writes_what_it_found(searched):
    (case,) = searched["cases"]
    assert case["program"] == "GatedMLP"
    assert case["error"] is None
    assert 1 <= case["feasible"] <= case["splits"] <= case["classes"] <= case["tried"]
    assert case["verified"] >= 1
    assert case["rejected"] == 0
    best, unfused = case["best"], case["unfused"]
    assert 1 <= best["kernels"] < unfused["kernels"] == 4
    assert best["bytes"] == 2 * (8 * 4096 + 2 * 4096 * 4096 + 8 * 4096)
    assert unfused["bytes"] == best["bytes"] + 2 * 8 * 4096 * 7
    assert 0 < best["predicted_us"] < unfused["predicted_us"]
    assert 0 < case["cpu_s"] < PROGRAMS["GatedMLP"].seconds


def test_memory_is_that_of_the_search_alone(searched):
    """``ru_maxrss`` would tell the 400 MB of the process that started it."""
    assert 20 < searched["cases"][0]["peak_mb"] < 300


def test_bytes_and_operators_without_fusion():
    g = new_kernel_graph()
    x, y = g.new_input((64, 1024)), g.new_input((64, 1024))
    g.mark_output(g.relu(g.transpose(g.transpose(g.add(x, y)))))
    n = 64 * 1024 * 2
    alone = measure.unfused(g)
    assert (alone["kernels"], alone["bytes"]) == (2, 5 * n)
    best = search(g, H200).candidates[0]
    assert measure.bytes_moved(best.mugraph) == 3 * n
    assert alone["predicted_us"] > best.cost_us > alone["predicted_us"] / 3


def test_statistics_between_kernels_are_float32():
    g = new_kernel_graph()
    x = g.new_input((64, 1024))
    g.mark_output(g.div(x, g.sum(x, -1)))
    assert measure.unfused(g)["bytes"] == 3 * 64 * 1024 * 2 + 2 * 64 * 4


def test_an_operator_that_cannot_run_alone_is_named(monkeypatch, searched):
    nothing = Found((), SearchError("too large"), Counts())
    monkeypatch.setattr(measure, "search_region", lambda *_: nothing)
    found = measure.unfused(PROGRAMS["GatedMLP"].build())
    assert found["predicted_us"] is None
    assert found["error"].startswith("matmul(X[8, 4096], A[4096, 4096]")
    case = searched["cases"][0] | {"unfused": found}
    row = dict(zip(tables.SEARCH, tables.search_rows({"cases": [case]})[0], strict=True))
    assert row["us"].endswith(" / ?")
    assert row["speed-up"] == ""


def test_a_program_that_fails_is_reported_and_costs_the_others_nothing(monkeypatch, capsys):
    assert in_fresh_process(measure.measure, "no such program") == {
        "error": "KeyError: 'no such program'"
    }
    assert "without an answer" in in_fresh_process(os._exit, 3)["error"]
    answers = {"GQA": {"error": "SearchError: nothing fits"}}
    monkeypatch.setattr("benchmarks.search.table.in_fresh_process", lambda f, n: answers[n])
    assert cli.main(["search", "GQA"]) == 1
    assert "GQA: SearchError: nothing fits" in capsys.readouterr().out


def test_unknown_programs_are_refused(capsys):
    for command in ("search", "ablation"):
        with pytest.raises(SystemExit) as stop:
            cli.main([command, "GPT"])
        assert stop.value.code == 2
        message = capsys.readouterr().err
        assert "unknown program 'GPT'; one of: RMSNorm + Linear, GatedMLP" in message


def test_table_of_the_search(searched):
    results = copy.deepcopy(searched)
    (case,) = results["cases"]
    case |= {"cpu_s": 6.0, "in_time": False, "feasible": 18, "splits": 20, "verified": 4}
    case["rejected"] = 1
    case["best"] |= {"bytes": 1_234_567, "predicted_us": 5.0, "kernels": 1}
    case["unfused"] |= {"bytes": 2.5e9, "predicted_us": 12.5}
    results["cases"].append({"program": "GQA", "error": "SearchError: a | b"})
    first, second = tables.search_rows(results)
    row = dict(zip(tables.SEARCH, first, strict=True))
    assert row["splits"] == "18 of 20"
    assert row["verified"] == "4 of 5"
    assert row["CPU s"] == "6.00 (5: over)"
    assert row["kernels"] == "1 / 4"
    assert row["MB moved"] == "1.23 / 2500"
    assert row["us"] == "5.0 / 12.5"
    assert row["speed-up"] == "2.5x"
    assert (second[0], second[-1]) == ("GQA", "SearchError: a | b")
    text = tables.search_markdown(results)
    assert "1 of 2 programs: 4 of 5 structures verified; 0 within their limit" in text
    assert "(not: GatedMLP)" in text
    assert "a \\| b" in text
    widths = {line.count("|") - line.count("\\|") for line in text.splitlines()[:4]}
    assert widths == {len(tables.SEARCH) + 1}


# ------------------------------------------------------------- forward enumeration and saturation


def gated_difference():
    """Two outputs, a difference and a quotient."""
    g = new_kernel_graph()
    x, y = g.new_input((64, 1024)), g.new_input((64, 1024))
    centred = g.sub(x, g.sum(x, -1))
    g.mark_output(centred)
    g.mark_output(g.div(g.sigmoid(centred), y))
    return g


def split_of(graph, wanted):
    flat = Flat(graph.expanded())
    program = label(flat.segment(flat.order).region)
    return program, next(s for s in splits(program) if str(s) == wanted)


CASES = {
    "RMSNorm + Linear": (lambda: ablation.problem("RMSNorm + Linear"), 7, 8),
    "GatedMLP": (lambda: ablation.problem("GatedMLP"), 6, 9),
    "LoRA": (lambda: ablation.problem("LoRA"), 5, 8),
    "two outputs": (lambda: split_of(gated_difference(), "M:grid K:whole"), 5, 7),
}


@pytest.mark.parametrize("name", CASES)
def test_enumeration_and_saturation_find_the_same_programs(name):
    make, few, many = CASES[name]
    program, split = make()
    ours = saturated(Space(program), split)
    ordered = Enumeration(Space(program), split, many).run()
    assert ordered.finished
    assert ordered.programs == {p for p, length in ours.programs.items() if length <= many}
    assert ordered.complete == len(ordered.programs) >= 1
    short = Enumeration(Space(program), split, few).run()
    every = Enumeration(Space(program), split, few, ordered=False).run()
    assert every.programs == short.programs <= ordered.programs
    assert every.complete >= short.complete
    assert every.states > short.states


def sets_of_steps(program, split, most):
    """All sets of at most so many operators that can be computed, breadth first from saturation."""
    table = saturate(Space(program), split)
    steps = {
        (i, frozenset(d.inputs)) for i, ds in enumerate(table.derivations) for d in ds if d.inputs
    }
    leaves = {i for i, ds in enumerate(table.derivations) if any(not d.inputs for d in ds)}
    found, layer = set(), {frozenset()}
    for _ in range(most):
        grown = set()
        for chosen in layer:
            have = leaves | {i for i, _ in chosen}
            if all(any(i in have for i in goal) for goal in table.finished()):
                continue
            grown |= {chosen | {s} for s in steps if s[0] not in have and s[1] <= have}
        found |= grown
        layer = grown
    return found


@pytest.mark.parametrize("name", CASES)
def test_each_set_of_operators_is_met_once(name):
    make, few, _ = CASES[name]
    program, split = make()
    expected = sets_of_steps(program, split, few)
    assert Enumeration(Space(program), split, few).run().states == len(expected)


def test_expression_test_only_leaves_out_what_is_useless():
    program, split = ablation.problem("LoRA")
    tested = Enumeration(Space(program), split, 4).run()
    everything = Enumeration(AnySpace(program), split, 4).run()
    assert everything.programs == tested.programs
    assert len(tested.programs) == 1
    assert everything.states > 50 * tested.states


def test_enumeration_stops_when_its_time_is_up():
    program, split = ablation.problem("RMSNorm backward")
    count = Enumeration(Space(program), split, 14, limit_s=0.05).run()
    assert not count.finished
    assert 0.05 < count.cpu_s < 2


def test_a_maximum_is_refused():
    flat = Flat(PROGRAMS["softmax(X W)"].build().expanded())
    program = label(flat.segment(flat.order).region)
    with pytest.raises(ValueError, match="the program has a maximum"):
        Enumeration(Space(program), next(splits(program)), 3)


# --------------------------------------------------------------------------- the ablation's results


def cell(variant, most, states, finished=True):
    return {"variant": variant, "most": most, "states": states, "complete": 1, "programs": 1,
            "same": finished, "finished": finished, "cpu_s": 0.0123}  # fmt: skip


@pytest.fixture
def ablated():
    forwards, orders, untested = tables.VARIANTS
    cells = [
        cell(forwards, 4, 171), cell(forwards, 5, 354), cell(orders, 4, 1178),
        cell(orders, 5, 7059), cell(untested, 4, 536771, finished=False),
    ]  # fmt: skip
    saturation = {"classes": 22, "tried": 134, "cpu_s": 0.005, "programs": {"5": 2, "7": 1}}
    case = {"split": "K:loop", "saturation": saturation, "cells": cells}
    return {
        "schema": 1, "kind": "ablation", "name": "ablation", "title": "parts", "limit_s": 20.0,
        "environment": {"cpu": "a CPU", "python": "3.11", "numpy": "2", "cutesuper": "0.1.0",
                        "commit": "0123456789abcdef", "dirty": False, "date": "2025-01-01"},
        "cases": [{"program": name, **case} for name in ("RMSNorm + Linear", "LoRA")],
    }  # fmt: skip


def test_every_variant_is_run_until_its_time_is_up():
    found = ablation.measure("LoRA", (2, 3, 4), 60.0)
    cells = found["cells"]
    assert [(c["variant"], c["most"]) for c in cells] == list(product(tables.VARIANTS, (2, 3, 4)))
    assert all(c["finished"] and c["same"] for c in cells)
    assert [c["programs"] for c in cells] == [0, 0, 1] * 3
    assert found["saturation"]["programs"] == {4: 1, 5: 2, 6: 3}
    stopped = ablation.measure("LoRA", (3, 4), 1e-6)["cells"]
    assert [(c["variant"], c["most"]) for c in stopped] == list(product(tables.VARIANTS, (3,)))
    assert not any(c["finished"] for c in stopped)


def test_splits_of_the_ablation_exist():
    for name, wanted in ablation.SPLITS.items():
        assert str(ablation.problem(name)[1]) == wanted


def test_tables_of_the_ablation(ablated, tmp_path):
    text = tables.ablation_markdown(ablated)
    lines = text.splitlines()
    times = "171 in 0.012 s | 1,178 in 0.012 s | > 536,771 in 20 s | 22 in 0.005 s |"
    assert f"| 4 |  |  |  | {times}" in lines
    times = "354 in 0.012 s | 7,059 in 0.012 s | - | 22 in 0.005 s |"
    assert f"| 5 | 11 | 58 | 768 | {times}" in lines
    times = times.replace("-", "> 536,771 in 20 s, at 4 operators")
    assert f"| LoRA (K:loop) | 5 | {times} 3 |" in lines
    assert "In 8 of the 8 runs that finished" in text
    assert "arXiv:2405.05751, Table 5" in text
    document, data = tmp_path / "search.md", tmp_path / "ablation.json"
    document.write_text("a\n<!-- bench:ablation -->\n<!-- /bench:ablation -->\nz\n")
    report.save_results(ablated, data)
    assert report.main(["--page", str(document), str(data)]) == 0
    assert text in document.read_text()


def test_plot_is_well_formed_and_shows_every_run(ablated, tmp_path):
    text = plot.render(ablated)
    root = ElementTree.fromstring(text)
    shown = [e.text for e in root.iter(f"{SVG}text")]
    assert "LoRA (needs 5)" in shown
    assert "not finished after 20 s" in shown
    cells = [c for case in ablated["cases"] for c in case["cells"]]
    classes = [e.get("class", "").split() for e in root.iter(f"{SVG}path")]
    finished = sum(c["finished"] for c in cells)
    assert sum("mark" in c for c in classes) == finished + len(tables.VARIANTS)
    assert sum("hollow" in c for c in classes) == len(cells) - finished + 1
    assert sum("saturation" in c for c in classes) == len(ablated["cases"]) + 1
    style = next(root.iter(f"{SVG}style")).text
    assert "prefers-color-scheme: dark" in style
    used = {name for c in classes for name in c} - {"line", "mark", "hollow", "series"}
    assert all(style.count(f".{name} {{ color:") == 2 for name in used)
    data, picture = tmp_path / "ablation.json", tmp_path / "a.svg"
    report.save_results(ablated, data)
    assert plot.main([str(data), str(picture)]) == 0
    assert picture.read_text() == text


def test_plot_refuses_other_results(searched, tmp_path, capsys):
    data, picture = tmp_path / "search.json", tmp_path / "a.svg"
    report.save_results(searched, data)
    assert plot.main([str(data), str(picture)]) == 1
    assert "not the results of an ablation" in capsys.readouterr().out
    assert not picture.exists()
