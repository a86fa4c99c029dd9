"""Results of searches on disk: another process finds them, checks them, and searches nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import cutesuper as cs
from cutesuper import pipeline, searches
from cutesuper.ir import serial
from cutesuper.ir.graph import KernelGraph
from cutesuper.pipeline import Options
from cutesuper.report import search_text
from cutesuper.runtime.cache import ROOT_VARIABLE, KernelCache
from cutesuper.search.bounds import TooDear
from cutesuper.search.search import SearchResult
from cutesuper.targets import H200
from cutesuper.verify.equivalence import Verification

PLAIN = Options(H200, tuned=False)


def norm(width: int = 64) -> KernelGraph:
    g = cs.new_kernel_graph()
    x, w = g.new_input((16, width), cs.bfloat16), g.new_input((width, 64), cs.bfloat16)
    g.mark_output(g.matmul(g.rms_norm(x, normalized_shape=(width,)), w))
    return g


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(ROOT_VARIABLE, str(tmp_path))
    return tmp_path / "regions"


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The graphs that are searched."""
    found: list[Any] = []
    search = pipeline.search

    def counted(graph: KernelGraph, *args: Any, **more: Any) -> SearchResult:
        found.append(graph)
        return search(graph, *args, **more)

    monkeypatch.setattr(pipeline, "search", counted)
    return found


def test_another_process_searches_nothing(searched: list[Any]) -> None:
    result, choice = pipeline.find(norm(), PLAIN)
    again, same = pipeline.find(norm(), PLAIN)
    assert len(searched) == 1 and (result.kept, again.kept) == (None, 0)
    assert serial.dumps(same.candidate.mugraph) == serial.dumps(choice.candidate.mugraph)
    assert replace(same.candidate, mugraph=choice.candidate.mugraph) == choice.candidate
    assert [p.key for p in same.plans] == [p.key for p in choice.plans]
    assert same.refused == choice.refused and same.verification
    assert again.statistics == result.statistics
    assert [c.structure for c in again.candidates] == [c.structure for c in result.candidates][:6]
    assert "kept on disk" in search_text(PLAIN, again)


def test_what_was_compared_at_real_extents_is_not_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless what was compared is another program."""
    whole: list[bool] = []
    check = pipeline.Verifier.check

    def counted(self: Any, mu: Any, bound: bool = True, full: bool = False) -> Any:
        whole.append(full)
        return check(self, mu, bound, full)

    first = _verification()
    monkeypatch.setattr(pipeline.Verifier, "check", counted)
    assert _verification() == first and first.real_extents and whole == [False]
    [path] = folder.iterdir()
    path.write_text(path.read_text().replace(_digest_of(path), "0" * 64))
    assert _verification() == first and whole == [False, True]


def _verification() -> Verification:
    """Of the program that is found, whatever numbers were drawn."""
    return replace(pipeline.find(norm(), PLAIN)[1].verification, seed=0)


def _digest_of(path: Path) -> str:
    return json.loads(path.read_text())["compared"]["digest"]


def test_that_all_programs_are_too_dear_is_known_to_another_process(searched: list[Any]) -> None:
    for _ in range(2):
        with pytest.raises(TooDear, match="allowed"):
            pipeline.find(norm(), PLAIN, most_us=1.0)
    assert len(searched) == 1
    least = pipeline.find(norm(), PLAIN)[1].candidate.cost_us
    assert pipeline.find(norm(), PLAIN, most_us=least)[0].kept == 0 and len(searched) == 2


def test_what_decides_a_search_decides_what_is_found(
    searched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = replace(H200, sms=100)
    for options in (PLAIN, replace(PLAIN, seed=1), replace(PLAIN, dependent_launch=True),
                    replace(PLAIN, target=other)):  # fmt: skip
        before = len(searched)
        pipeline.find(norm(), options)
        assert len(searched) == before + 1
    pipeline.find(norm(128), PLAIN)
    assert len(searched) == 5
    monkeypatch.setattr(searches, "definitions", lambda names: {"rms_norm": "another one"})
    pipeline.find(norm(), PLAIN)
    assert len(searched) == 6
    monkeypatch.setattr(searches.records, "_sources", lambda: "another version")
    pipeline.find(norm(), PLAIN)
    assert len(searched) == 7


def test_what_is_not_kept(searched: list[Any], folder: Path) -> None:
    about = searches.question(norm(), H200, pipeline.SearchOptions())
    found = pipeline.choose(norm(), PLAIN)[0]
    searches.keep(about, replace(found, statistics=replace(found.statistics, complete=False)))
    assert not folder.exists()
    pipeline.find(norm(), PLAIN)
    assert pipeline.find(norm(), replace(PLAIN, budget_s=1e-9))[0].kept == 0
    assert len(searched) == 2


def _edited(record: dict[str, Any], change: str) -> Any:
    candidate = record["candidates"][0]
    ops = candidate["mugraph"]["steps"][0]["ops"]
    if change == "another program":
        for op in (op for step in candidate["mugraph"]["steps"] for op in step["ops"]):
            if op[0] == "constant":
                op[3]["value"] += 3.0
    elif change == "another place":
        record["chosen"] = 1
    elif change == "an illegal program":
        ops.pop()
    elif change == "another border":
        candidate["mugraph"]["inputs"].reverse()
    elif change == "no number":
        candidate["cost_us"] = float("nan")
    elif change == "no costs":
        candidate["kernels"] = []
    elif change == "no statistics":
        del record["statistics"]["classes"]
    elif change == "nothing compared":
        del record["compared"]
    elif change == "no dictionary":
        return [record]
    return record


@pytest.mark.parametrize(
    "change",
    ["another program", "another place", "an illegal program", "another border", "no number",
     "no costs", "no statistics", "no dictionary", "nothing compared"],
)  # fmt: skip
def test_records_that_were_changed_are_not_believed(
    change: str, searched: list[Any], folder: Path
) -> None:
    first = pipeline.find(norm(), PLAIN)[1].candidate
    [path] = folder.iterdir()
    text = path.read_text()
    path.write_text(json.dumps(_edited(json.loads(text), change)))
    assert path.read_text() != text
    result, choice = pipeline.find(norm(), PLAIN)
    assert choice.candidate.structure == first.structure and len(searched) == 2
    assert result.kept is None and pipeline.find(norm(), PLAIN)[0].kept == 0


def test_files_that_others_could_have_written(searched: list[Any], folder: Path) -> None:
    pipeline.find(norm(), PLAIN)
    [path] = folder.iterdir()
    path.chmod(0o666)
    assert pipeline.find(norm(), PLAIN)[0].kept is None
    path.chmod(0o600)
    assert pipeline.find(norm(), PLAIN)[0].kept == 0


def test_programs_that_no_kernel_runs(searched: list[Any]) -> None:
    g = norm()
    first, again = (cs.mugraphs(g, keep=4, target=H200) for _ in range(2))
    assert len(searched) == 1 and again.kept == 0
    both = zip(again.candidates, first.candidates, strict=True)
    assert all(replace(c, mugraph=d.mugraph) == d for c, d in both)
    assert cs.mugraphs(g, keep=3, target=H200).statistics.regions and len(searched) == 2


def test_results_lie_beside_the_kernels_of_the_cache(tmp_path: Path, searched: list[Any]) -> None:
    cache = KernelCache(tmp_path / "own")
    for _ in range(2):
        pipeline.Prospect(norm(), PLAIN, cache, None)
    assert len(searched) == 1 and list((tmp_path / "own" / "regions").iterdir())
    cache.clear()
    pipeline.Prospect(norm(), PLAIN, cache, None)
    assert len(searched) == 2
