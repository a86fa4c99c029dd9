"""Tuned schedules on disk: their key, what is read, what is refused and never used."""

from __future__ import annotations

import json
import stat
import tomllib
import zipfile
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cutlass")

import cutesuper as cs
from cutesuper import store
from cutesuper.errors import FormatError
from cutesuper.ir.graph import KernelGraph
from cutesuper.pipeline import Choice, Options, choose, stored_choice
from cutesuper.skeletons.attention.schedule import AttentionSchedule
from cutesuper.skeletons.matmul.schedule import MatmulSchedule
from cutesuper.store import Measured, canonical, file_name, find, read_entry, save
from cutesuper.targets import TARGETS, settings
from tests import zoo

ROOT = Path(__file__).resolve().parent.parent
OPTIONS = Options(cs.H200)
SEEN = Measured(10.12, 0.08, 10.4, 10.0, 7, "H200", "580.1", "13.0", "2.11", "4.8", "0.1", None)


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The user's folder and the shipped one of this test."""
    user, shipped = tmp_path / "user", tmp_path / "shipped"
    monkeypatch.setattr(store, "user_folder", lambda: user)
    monkeypatch.setattr(store, "shipped_folder", lambda: shipped)
    return user, shipped


def graph(m: Any = 16, k: int = 256, n: int = 128, **options: Any) -> KernelGraph:
    return zoo.rms_norm_linear(m, k, n, **options)


def other_schedules(choice: Choice) -> list[MatmulSchedule]:
    """Not the default: one stage more."""
    found = [plan.schedule for plan in choice.plans]
    assert all(isinstance(s, MatmulSchedule) for s in found)
    return [replace(s, stages=s.stages + 1) for s in found if isinstance(s, MatmulSchedule)]


def stored(g: KernelGraph | None = None, folder: Path | None = None) -> Path:
    """A file for a graph: the model's choice with other schedules."""
    g = g or graph()
    _, choice = choose(g, OPTIONS)
    mu = choice.candidate.mugraph
    return save(g, "sm_90a", False, mu, other_schedules(choice), SEEN, folder)


# ------------------------------------------------------------------------------------------- key


def test_the_key_does_not_depend_on_names_or_on_dead_values() -> None:
    g = cs.new_kernel_graph()
    w = g.new_input((256, 128), "float16", name="V", constant=True)  # later: the order counts
    x = g.new_input((16, 256), "float16", name="tokens")
    assert canonical(g) != canonical(graph())
    g = cs.new_kernel_graph()
    x = g.new_input((16, 256), "float16", name="tokens")
    w = g.new_input((256, 128), "float16", name="V", constant=True)
    g.exp(x)
    g.mark_output(g.matmul(g.rms_norm(x, eps=zoo.EPS), w))
    assert canonical(g) == canonical(graph())
    assert file_name(g, "sm_90a", True) == file_name(graph(), "sm_90a", True)


def test_the_order_of_building_does_not_count() -> None:
    first, second = cs.new_kernel_graph(), cs.new_kernel_graph()
    for g, turned in ((first, False), (second, True)):
        x = g.new_input((8, 8), "float16", name="X")
        a, b = (g.silu(x), g.exp(x)) if turned else (g.exp(x), g.silu(x))
        g.mark_output(g.sub(b, a) if turned else g.sub(a, b))
    assert canonical(first) == canonical(second)


def test_everything_else_does() -> None:
    symbolic = [graph(cs.symbol("M", hint)) for hint in (16, 32)]
    constant = graph()
    constant.nodes[0] = replace(constant.nodes[0], constant=True)
    eps = cs.new_kernel_graph()
    x, w = eps.new_input((16, 256)), eps.new_input((256, 128), constant=True)
    eps.mark_output(eps.matmul(eps.rms_norm(x, eps=1e-5), w))
    graphs = [graph(), graph(17), graph(dtype="bfloat16"), graph(gain=True), constant, eps]
    graphs += [graph(transposed=True, n=256), *symbolic]
    names = {file_name(g, arch, pdl) for g in graphs for arch in ("sm_90a", "sm_100a")
             for pdl in (True, False)}  # fmt: skip
    assert len(names) == 4 * len(graphs)
    assert str(file_name(graph(), "sm_90a", True)).startswith(
        "sm90/rms_norm-matmul_16x256_256x128_float16_pdl-"
    )


# --------------------------------------------------------------------------------- what is read


def test_attention_is_stored_with_its_knobs() -> None:
    g = cs.new_kernel_graph()
    q, k, v = (g.new_input((8, n, 64), "float16") for n in (4, 1000, 1000))
    g.mark_output(g.scaled_dot_product_attention(q, k, v, scale=0.125))
    _, choice = choose(g, OPTIONS)
    [plan] = choice.plans
    assert isinstance(plan.schedule, AttentionSchedule)
    tuned = replace(plan.schedule, stages=2, stream_keys=not plan.schedule.stream_keys)
    assert tuned != plan.schedule
    path = save(g, "sm_90a", False, choice.candidate.mugraph, [tuned], SEEN, None)
    assert json.loads(path.read_text())["schedules"][0]["kind"] == "attention"
    found = stored_choice(g, OPTIONS)
    assert found is not None and [p.schedule for p in found.plans] == [tuned]


def paged(names: str) -> KernelGraph:
    g = cs.new_kernel_graph()
    q = g.new_input((2, 2, 4, 64), name=names[0])
    caches = [g.new_input((40, 16, 2, 64), name=n) for n in names[1:3]]
    table = g.new_input((2, 16), dtype="int32", name=names[3])
    lengths = g.new_input((2,), dtype="int32", name=names[4])
    k, v = (g.transpose(g.gather_pages(c, table), (0, 2, 1, 3)) for c in caches)
    g.mark_output(g.scaled_dot_product_attention(q, k, v, lengths=lengths))
    return g


def test_attention_over_pages_is_stored_with_its_table() -> None:
    g = paged("QKVTL")
    _, choice = choose(g, OPTIONS)
    schedules = [plan.schedule for plan in choice.plans]
    save(g, "sm_90a", False, choice.candidate.mugraph, schedules, SEEN, None)
    for names in ("QKVTL", "abcde", "VKQLT"):
        found = stored_choice(paged(names), OPTIONS)
        assert found is not None and found.candidate.mugraph.inputs == tuple(names)


def test_what_is_stored_is_read_under_other_names() -> None:
    path = stored()
    g = graph()
    for i, name in ((0, "y0"), (1, "tokens")):  # y0 is how the file calls its output
        g.nodes[i] = replace(g.nodes[i], name=name)
    [entry] = find(g, "sm_90a", False)
    assert (entry.path, entry.measured) == (path, SEEN)
    assert entry.mugraph.inputs == ("y0", "tokens")
    assert entry.mugraph.outputs == ("y0_",)
    choice = stored_choice(g, OPTIONS)
    assert choice is not None and choice.stored == entry and choice.verification
    assert [p.schedule for p in choice.plans] == list(entry.schedules)
    assert not list(find(g, "sm_90a", True)) and not list(find(g, "sm_100a", False))


def test_names_of_the_user_are_not_stored() -> None:
    g = graph(cs.symbol("secret_extent", 16))
    g.nodes[0] = replace(g.nodes[0], name="secret_name")
    text = stored(g).read_text()
    assert "secret" not in text


def test_symbolic_extents_match_the_hint() -> None:
    path = stored(graph(cs.symbol("M", 32)))
    kernel = cs.superoptimize(graph(cs.symbol("tokens", 20)), target="h200")
    # a path that is longer than a line is broken
    assert f"tunedprogramof{path}" in "".join(kernel.explain().split())
    assert "tokens" in kernel.mugraph.symbols()
    assert not list(find(graph(cs.symbol("M", 16)), "sm_90a", False))


def test_the_user_s_file_comes_first(folders: tuple[Path, Path]) -> None:
    _, shipped = folders
    second = stored(folder=shipped)
    assert [e.path for e in find(graph(), "sm_90a", False)] == [second]
    first = stored()
    assert [e.path for e in find(graph(), "sm_90a", False)] == [first, second]
    first.write_text("{}")
    with pytest.warns(RuntimeWarning, match=str(first)):
        choice = stored_choice(graph(), OPTIONS)
    assert choice is not None and choice.stored is not None
    assert choice.stored.path == second


def test_a_file_is_replaced_as_a_whole() -> None:
    path = stored()
    path.write_text("{}")
    assert stored() == path
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    read_entry(path, graph(), "sm_90a", False)


# ------------------------------------------------------------------------------ what is refused

Edit = Callable[[dict[str, Any]], object]


def test_what_others_can_write_is_not_used() -> None:
    path = stored()
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    [entry] = store.find(graph(), "sm_90a", False)
    assert entry.path == path
    for place in (path, path.parent):
        before = stat.S_IMODE(place.stat().st_mode)
        place.chmod(0o777)
        with pytest.warns(RuntimeWarning, match=rf"is not used: {place} can be written by others"):
            assert list(store.find(graph(), "sm_90a", False)) == []
        place.chmod(before)
    assert len(list(store.find(graph(), "sm_90a", False))) == 1


def constant_input(data: dict[str, Any]) -> None:
    data["mugraph"]["tensors"][0]["constant"] = True


DAMAGED: dict[str, tuple[Edit, str]] = {
    "foreign": (lambda d: d.clear(), "'format'"),
    "old": (lambda d: d.update(version=0), "'version'"),
    "field missing": (lambda d: d.pop("arch"), "arch"),
    "field unknown": (lambda d: d.update(extra=1), "extra"),
    "other program": (lambda d: d["program"]["outputs"].append(0), "'program'"),
    "other launch": (lambda d: d.update(dependent_launch=True), "'dependent_launch'"),
    "a number for a bool": (lambda d: d.update(dependent_launch=0), "'dependent_launch'"),
    "other architecture": (lambda d: d.update(arch="sm_100a"), "'arch'"),
    "no muGraph": (lambda d: d.update(mugraph=[]), "graph JSON"),
    "illegal muGraph": (lambda d: d["mugraph"]["steps"].clear(), "not a legal graph"),
    "a kernel graph": (lambda d: d.update(mugraph={"format": "kernel_graph", "version": 1,
                       "nodes": [], "outputs": []}), "graph JSON|'mugraph'"),
    "constant without leave": (constant_input, "other constant tensors"),
    "no schedules": (lambda d: d["schedules"].clear(), "'schedules'"),
    "schedule of nothing": (lambda d: d["schedules"][0].update(kind="x"), "schedule: 'kind'"),
    "knob missing": (lambda d: d["schedules"][0].pop("stages"), "stages"),
    "knob of another type": (lambda d: d["schedules"][0].update(stages=True), "stages=True"),
    "another launch": (lambda d: d["schedules"][0].update(dependent_launch=True), "'schedules'"),
    "time of nothing": (lambda d: d["measured"].update(median_us="fast"), "measured.median_us"),
    "NaN": (lambda d: d["measured"].update(spread_us=float("nan")), "measured.spread_us"),
    "no count": (lambda d: d["measured"].update(timed=0), "measured.timed"),
    "no name": (lambda d: d["measured"].update(gpu=7), "measured.gpu"),
    "measured less": (lambda d: d["measured"].pop("gpu"), "'measured'"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files_are_refused(name: str) -> None:
    edit, message = DAMAGED[name]
    path = stored()
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))
    with pytest.raises(FormatError, match=message) as caught:
        read_entry(path, graph(), "sm_90a", False)
    assert str(path) in str(caught.value)
    with pytest.warns(RuntimeWarning, match="is not used"):
        assert stored_choice(graph(), OPTIONS) is None


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"null"])
def test_what_is_no_json_is_refused(content: bytes) -> None:
    path = stored()
    path.write_bytes(content)
    with pytest.raises(FormatError, match="sm90"):
        read_entry(path, graph(), "sm_90a", False)


def other_function(data: dict[str, Any]) -> None:
    """mean(square(X)) becomes mean(exp(X))."""
    ops = data["mugraph"]["steps"][0]["ops"]
    [square] = [op for op in ops if op[0] == "square"]
    square[0] = "exp"


TAMPERED: dict[str, Edit] = {
    "not equivalent": other_function,
    "a plan that does not fit": lambda d: d["schedules"][0].update(stages=500),
    "warpgroups that leave columns out": lambda d: d["schedules"][0].update(warpgroups=4),
    "schedule of the other skeleton": lambda d: d["schedules"].__setitem__(0, {
        "kind": "rows", "lanes": 32, "vector": 8, "chunks": 1, "rows": 4, "interleaved": False,
        "dependent_launch": False}),
}  # fmt: skip


@pytest.mark.parametrize("name", TAMPERED)
def test_tampered_files_are_never_used(name: str) -> None:
    """Legal as files; refused by the verifier or the planner, and the search runs."""
    path = stored()
    data = json.loads(path.read_text())
    TAMPERED[name](data)
    path.write_text(json.dumps(data))
    read_entry(path, graph(), "sm_90a", False)
    with pytest.warns(RuntimeWarning, match=f"tuned schedule {path} is not used"):
        kernel = cs.superoptimize(graph(), target="h200")
    assert "structures extracted" in kernel.explain()
    assert kernel.mugraph == choose(graph(), OPTIONS)[1].candidate.mugraph


# ------------------------------------------------------------------------------------- the wheel


def test_the_repository_s_schedules_are_found_and_can_all_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    assert store.shipped_folder() == ROOT / "schedules"
    for path in store.shipped_folder().glob("*/*.json"):
        data = json.loads(path.read_text())
        if data["format"] == settings.FORMAT:  # read on import; see test_settings.py
            assert path.parent.name in {t.settings for t in TARGETS.values()}
            continue
        assert data["format"] == store.FORMAT and data["version"] == store.VERSION
        assert path.parent.name == data["arch"].rstrip("af").replace("_", "")


def test_the_wheel_holds_the_schedules(tmp_path: Path) -> None:
    """The entry in pyproject.toml; the wheel itself where its builder is installed."""
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    forced = wheel["targets"]["wheel"]["force-include"]
    assert forced == {"schedules": "cutesuper/schedules"}
    assert "schedules" in wheel["targets"]["sdist"]["include"]
    if find_spec("hatchling") is None:
        return
    from hatchling.builders.wheel import WheelBuilder  # type: ignore[import-not-found]

    [path] = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    names = zipfile.ZipFile(path).namelist()
    settings = {f"cutesuper/schedules/sm90/{s}.json" for s in ("rows", "matmul", "attention")}
    assert settings | {"cutesuper/store.py"} <= set(names)
