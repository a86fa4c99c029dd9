"""Operators that were added: changed ones are never taken for what they were before."""

from __future__ import annotations

import importlib
import math
import os
import shutil
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cutesuper as cs
from cutesuper.errors import FormatError, OperatorError, TuningError
from cutesuper.ir.definitions import (
    Defined,
    added,
    are_still,
    definition,
    definitions,
    unknown,
)
from cutesuper.ir.fingerprint import Unknown, fingerprint
from cutesuper.ir.graph import KernelGraph
from cutesuper.ir.operators.base import TABLE, Elementwise, Operator, lookup, opaque, operator
from cutesuper.pipeline import Options, choose, compile_plans
from cutesuper.runtime.cache import KernelCache
from cutesuper.runtime.toolchain import CUDART_VARIABLE
from cutesuper.search.region_cache import KnownRegions
from cutesuper.search.search import search
from cutesuper.store import canonical
from cutesuper.targets import find_target
from tests import definitions as written
from tests.definitions import CHANGES, module, scaled, with_code
from tests.fake_runtime import build_fake_runtime

torch = pytest.importorskip("torch")

NAME = "times_some"


@pytest.fixture(autouse=True)
def table() -> Iterator[None]:
    """Whatever a test adds is gone after it."""
    before = dict(TABLE)
    yield
    for name in set(TABLE) - set(before):
        del TABLE[name]
    for name, op in before.items():
        TABLE[name] = op


class _Times(Elementwise):
    name = NAME
    arity = 1

    def symbolic(self, a: Any, args: list[Any], attributes: Any) -> Any:
        return opaque(self.name, a, args, attributes)


def times(factor: float, held: Any = None) -> Operator:
    """Enter an operator that multiplies, and holds something besides."""

    @operator
    class Times(_Times):
        holds = held

        def reference(self, args: list[Any], attributes: Any) -> Any:
            return args[0] * factor

        def scalar(self, m: Any, args: list[Any], attributes: Any) -> Any:
            return args[0] * factor

        def derivative(self, g: Any, args: Any, attributes: Any, y: Any, dy: Any) -> Any:
            return (g.mul(dy, factor),)

    del Times
    return TABLE[NAME]


def graph(rows: Any = 16, name: str = NAME) -> KernelGraph:
    g = cs.new_kernel_graph()
    x = g.new_input(dims=(rows, 512), dtype=cs.float16, name="x")
    g.mark_output(g.apply(name, g.mul(x, x)))
    return g


# ------------------------------------------------------------------------------------ fingerprints


@pytest.mark.parametrize("name", CHANGES)
def test_whatever_changes_is_another_definition(name: str) -> None:
    make = CHANGES[name]
    assert fingerprint(make(3.0)) == fingerprint(make(3.0))
    assert fingerprint(make(3.0)) != fingerprint(make(5.0))


def test_a_global_that_changes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint(scaled)
    monkeypatch.setattr(written, "FACTOR", 5.0)
    assert fingerprint(scaled) != before
    monkeypatch.undo()
    assert fingerprint(scaled) == before


def test_a_module_that_is_imported_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    f = with_code("def f(x):\n import some_helpers\n return some_helpers.K * x")
    with pytest.raises(Unknown, match="imports some_helpers, which is not loaded"):
        fingerprint(f)
    g = with_code("def f(x):\n from some_helpers import K, part\n return K * x")
    for function in (f, g):
        found = set[str]()
        for k in (3.0, 5.0):
            monkeypatch.setitem(sys.modules, "some_helpers", module("some_helpers", K=k, part=0))
            found.add(fingerprint(function))
        assert len(found) == 2
    monkeypatch.setitem(sys.modules, "some_helpers", module("some_helpers", K=3.0))
    with pytest.raises(Unknown, match=r"imports some_helpers\.part, which is not loaded"):
        fingerprint(g)
    inner = with_code("def f(x):\n import some_helpers.inner\n return some_helpers.K * x")
    monkeypatch.setitem(sys.modules, "some_helpers.inner", module("some_helpers.inner"))
    before = fingerprint(inner)
    monkeypatch.setattr(sys.modules["some_helpers"], "K", 5.0)
    assert fingerprint(inner) != before


@pytest.mark.parametrize(
    ("thing", "reason"),
    [
        (with_code("def f(x): return eval('x')"), "calls eval, which hides what it uses"),
        (with_code("def f(x): return open('k').read()"), "calls open"),
        (with_code("def f(x): return L", L=threading.Lock()), "a lock has no value to compare"),
        (with_code("def f(x): return m", m=module("nobodys", lock=threading.Lock())), "a lock has"),
    ],
)
def test_what_cannot_be_known(thing: Any, reason: str) -> None:
    with pytest.raises(Unknown, match=reason):
        fingerprint(thing)


def test_nesting_without_an_end() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(Unknown, match="nested too deeply"):
        fingerprint(deep)


def test_libraries_count_by_their_version(monkeypatch: pytest.MonkeyPatch) -> None:
    from cutesuper.ir import fingerprint as module

    code = "def f(x): return np.exp(x) + torch.relu(x) + math.pi"
    f = with_code(code, np=np, torch=torch, math=math)
    before = fingerprint(f)
    monkeypatch.setattr(module, "_version", lambda top: "0.0")
    assert fingerprint(f) != before


def test_the_package_of_an_operator_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be installed again with the same version; other packages may not."""
    folder = tmp_path / "site-packages"
    for name in ("home_of_it", "other_home"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("from .part import f\n__version__ = '1'\n")
    monkeypatch.syspath_prepend(str(folder))
    found: dict[str, set[str]] = {"home_of_it": set(), "other_home": set()}
    for factor in (3.0, 5.0):
        for name, hashes in found.items():
            code = f"def f(x): return g(x)\ndef g(x): return {factor}"
            (folder / name / "part.py").write_text(code)
            for module_name in (name, f"{name}.part"):
                monkeypatch.delitem(sys.modules, module_name, raising=False)
            importlib.invalidate_caches()
            monkeypatch.setattr(sys, "dont_write_bytecode", True)
            f = importlib.import_module(name).f
            hashes.add(fingerprint(f, home=frozenset(["home_of_it"])))
    assert {name: len(hashes) for name, hashes in found.items()} == {
        "home_of_it": 2, "other_home": 1,
    }  # fmt: skip


_SCRIPT = """
from tests.definitions import CHANGES
from cutesuper.ir.fingerprint import fingerprint
print(*(fingerprint(make(3.0)) for make in CHANGES.values()))
"""


def test_other_processes_have_the_same_hashes() -> None:
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(root), "PYTHONHASHSEED": "7"},
    )  # fmt: skip
    assert done.stdout.split() == [fingerprint(make(3.0)) for make in CHANGES.values()]


# --------------------------------------------------------------------------------------- operators


def test_the_package_has_no_added_operators() -> None:
    assert added(TABLE) == ()
    assert definitions(TABLE) == {}


def test_what_counts_as_added(monkeypatch: pytest.MonkeyPatch) -> None:
    times(3.0)
    assert added([NAME, "mul", "nothing"]) == (NAME,)
    TABLE["mul"] = type("Mul", (type(TABLE["mul"]),), {})()  # a subclass may override anything
    assert added(["mul", "add"]) == ("mul",)
    monkeypatch.setattr(type(TABLE["silu"]), "scalar", lambda self, m, args, attributes: args[0])
    assert added(["silu"]) == ("silu",)
    TABLE["exp"].factor = 2.0  # type: ignore[attr-defined]
    try:
        assert added(["exp"]) == ("exp",)
    finally:
        del TABLE["exp"].factor  # type: ignore[attr-defined]


def test_an_operator_that_asks_for_others_by_name() -> None:
    class Twice(_Times):
        name = "twice"

        def scalar(self, m: Any, args: list[Any], attributes: Any) -> Any:
            return 2.0 * lookup(NAME).scalar(m, args, attributes)

    times(3.0)
    operator(Twice)
    before = definition(TABLE["twice"])
    times(5.0)
    assert before is not None
    assert definition(TABLE["twice"]) != before


def test_the_table_counts_changes() -> None:
    count = TABLE.changes
    op = times(3.0)
    assert TABLE.changes == count  # nothing knew it before
    TABLE[NAME] = op
    assert TABLE.changes == count
    times(3.0)
    assert TABLE.changes == count + 1
    del TABLE[NAME]
    assert TABLE.changes == count + 2


def test_a_snapshot_of_the_operators_of_a_graph() -> None:
    times(3.0)
    made = Defined(graph(), "make it again")
    made.check()
    times(3.0)  # a cell that was run twice
    made.check_table()
    times(5.0)
    with pytest.raises(OperatorError, match=f"operator {NAME}: .* make it again"):
        made.check_table()
    del TABLE[NAME]
    with pytest.raises(OperatorError, match="defined anew"):
        made.check()
    plain = Defined(graph(name="silu"), "make it again")
    TABLE["silu"] = type("Silu", (type(TABLE["silu"]),), {})()
    with pytest.raises(OperatorError, match="operator silu"):
        plain.check()


def test_what_nobody_can_know() -> None:
    times(3.0, threading.Lock())
    assert list(unknown([NAME, "mul"])) == [NAME]
    assert definition(TABLE[NAME]) is None
    made = Defined(graph(), "make it again")
    made.check()
    first, second = (definitions([NAME]) for _ in range(2))
    assert first != second
    assert are_still([*first.values()], [NAME])  # in this process
    assert not are_still(["from another one"], [NAME])
    times(3.0, threading.Lock())
    with pytest.raises(OperatorError):
        made.check()


# ------------------------------------------------------------------------------- what is remembered


def test_keys_of_kernels() -> None:
    options = Options(find_target("h200"))
    keys: list[str] = []
    for factor in (3.0, 5.0, 3.0):
        times(factor)
        keys.append(choose(graph(), options)[1].plans[0].key)
    assert keys[0] == keys[2] != keys[1]
    plain = choose(graph(name="silu"), options)[1].plans[0].key
    assert "silu" in plain
    assert len(plain.split("sha")) == 1
    TABLE["silu"] = type("Silu", (type(TABLE["silu"]),), {})()
    assert choose(graph(name="silu"), options)[1].plans[0].key.startswith(plain[:-1] + ",")


def test_regions_that_were_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    from cutesuper.search import region_cache as module

    asked: list[Any] = []
    search_region = module.search_region

    def count(*args: Any) -> Any:
        asked.append(args)
        return search_region(*args)

    monkeypatch.setattr(module, "search_region", count)
    regions = KnownRegions()
    for factor, new in ((3.0, True), (3.0, False), (5.0, True), (3.0, False)):
        times(factor)
        before = len(asked)
        search(graph(), find_target("h200"), known=regions)
        assert (len(asked) > before) is new


def test_an_executor_is_not_asked_about_them() -> None:
    """Its processes have other tables; a thread would do, but nobody can tell."""

    class Executor(ThreadPoolExecutor):
        def submit(self, fn: Any, region: Any, *args: Any) -> Any:  # type: ignore[override]
            assert not added(op.kind for op in region.ops)
            return super().submit(fn, region, *args)

    times(3.0)
    g = graph()
    y = g.new_input(dims=(64, 64), dtype=cs.float16, name="y")
    g.mark_output(g.silu(y))
    with Executor(1) as executor:
        found = search(g, find_target("h200"), executor=executor)
    assert found.candidates


def test_tuned_programs() -> None:
    from cutesuper.store import file_name

    files: list[Path] = []
    for factor in (3.0, 5.0, 3.0):
        times(factor)
        files.append(file_name(graph(), "sm_90a", False))
    assert files[0] == files[2] != files[1]
    assert "operators" not in canonical(graph(name="silu"))
    with pytest.raises(TuningError, match=f"tune: {NAME}: .* the one that measures does not know"):
        cs.tune(graph(), target="h200")


def test_kernels_refuse_to_mix_definitions(monkeypatch: pytest.MonkeyPatch) -> None:
    from cutesuper.runtime.kernel import Kernel

    made: list[Any] = []
    times(3.0)
    kernel = Kernel(graph(cs.symbol("M")), find_target("h200"), lambda h: made.append(h) or None)  # type: ignore[arg-type,return-value]
    x = torch.ones(4, 512, dtype=torch.float16)
    assert kernel(x)[0, 0] == 3.0
    times(3.0)
    assert kernel(x)[0, 0] == 3.0
    times(5.0)
    for call in (lambda: kernel(x), lambda: kernel._variant((4096,)), kernel.gradient):
        with pytest.raises(OperatorError, match="superoptimize the graph again"):
            call()
    assert len(made) == 1


def test_regions_of_compiled_models() -> None:
    from cutesuper.torch.compile.region_operator import key_of, program_of

    times(3.0)
    key, x = key_of(graph()), torch.ones(16, 512, dtype=torch.float16)
    assert torch.ops.cutesuper.region(key, [x])[0][0, 0] == 3.0
    times(5.0)
    other = key_of(graph())
    assert other != key
    with pytest.raises(OperatorError, match=r"torch\.compiler\.reset"):
        torch.ops.cutesuper.region(key, [x])
    assert torch.ops.cutesuper.region(other, [x])[0][0, 0] == 5.0
    times(7.0)
    with pytest.raises(FormatError, match="are not what they were"):  # from a cache on disk
        program_of.__globals__["_read"](other)
    assert ":" not in key_of(graph(name="silu")).split(":")[3]


def test_a_decorated_function_is_traced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from cutesuper.torch.compile import trace

    made: list[int] = []
    monkeypatch.setattr(
        trace, "superoptimize_callable", lambda *_, **__: made.append(1) or (lambda x: x)
    )
    f = cs.superoptimize(lambda x: x * 2)
    times(3.0)
    for factor, count in ((None, 1), (None, 1), (5.0, 2)):
        if factor:
            times(factor)
        f(torch.ones(3))
        assert len(made) == count


def test_operators_for_pytorch() -> None:
    from cutesuper.torch.ops.rowwise import Built, Definition, Operand, Output, Role, RowOperator

    def build(g: Any, x: Any) -> Built:
        return Built((g.apply(NAME, x),))

    times(3.0)
    run = RowOperator(
        Definition(
            "times_for_tests", (Operand("x", Role.ROWS),), (), (Output("y", like="x"),), build
        )
    )
    x = torch.ones(4, 8)
    assert run((x,), ())[0, 0] == 3.0
    assert torch.ops.cutesuper.times_for_tests(x)[0][0, 0] == 3.0
    times(5.0)
    assert run((x,), ())[0, 0] == 5.0
    assert torch.ops.cutesuper.times_for_tests(x)[0][0, 0] == 5.0


# --------------------------------------------------------------------------------------- compiled


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> KernelCache:
    pytest.importorskip("cutlass")
    return KernelCache(tmp_path_factory.mktemp("kernels"))


def compiled(cache: KernelCache, g: KernelGraph | None = None) -> Any:
    options = Options(find_target("h200"))
    return compile_plans(choose(g or graph(), options)[1], options, cache)


def test_a_changed_operator_is_compiled_again(kernels: KernelCache) -> None:
    constants = {3.0: "0f40400000", 5.0: "0f40A00000"}
    for factor, hit in ((3.0, False), (5.0, False), (3.0, True)):
        times(factor)
        [step] = compiled(kernels)
        assert step.artifact.from_cache is hit
        assert [k for k, text in constants.items() if text in step.artifact.ptx] == [factor]


def test_exported_libraries(
    kernels: KernelCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their kernels are what they were; the reference executor would be another program."""
    if shutil.which("gcc") is None:
        pytest.skip("exporting needs gcc")
    monkeypatch.setenv(CUDART_VARIABLE, str(build_fake_runtime().cudart_static))
    times(3.0)
    cs.superoptimize(graph(), target="h200", cache=kernels).export(tmp_path / "times.so")
    program, x = cs.load(tmp_path / "times.so"), torch.ones(16, 512, dtype=torch.float16)
    assert program(x)[0, 0] == 3.0
    times(5.0)
    with pytest.raises(OperatorError, match=f"operator {NAME}: .* on a GPU, or export it again"):
        program(x)
    with pytest.raises(OperatorError, match=NAME):
        cs.load(tmp_path / "times.so")(x)
    times(3.0)
    assert program(x)[0, 0] == 3.0


def test_several_kernels_are_compiled_in_this_process(
    kernels: KernelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cutesuper.runtime import compile as module

    def refuse(*_: Any) -> Any:
        raise AssertionError("workers do not know added operators")

    monkeypatch.setattr(module, "run_in_workers", refuse)
    times(3.0)
    [step] = compiled(kernels)
    request = step.artifact.request
    artifacts = module.compile_many([request, request], workers=2, cache=kernels)
    assert len({a.digest for a in artifacts}) == 1


def test_what_nobody_can_know_is_not_kept(kernels: KernelCache) -> None:
    times(7.0, threading.Lock())
    before = {entry.digest for entry in kernels.entries()}
    with pytest.warns(RuntimeWarning, match=f"not kept in the cache.*{NAME}: a lock has no value"):
        [step] = compiled(kernels)
    assert {entry.digest for entry in kernels.entries()} == before
    assert "0f40E00000" in step.artifact.ptx
    from cutesuper.report import figures_text

    assert f"not kept on disk: an operator may change unseen ({NAME}: " in figures_text(step)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        [again] = compiled(kernels)
    assert not again.artifact.from_cache
