"""The command line: what it prints, what it writes, its exit codes."""

from __future__ import annotations

import errno
import io
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch

pytest.importorskip("cutlass")

import cutesuper as cs
from cutesuper import api, console
from cutesuper.cli import main
from cutesuper.errors import FormatError
from cutesuper.runtime import toolchain
from tests import zoo
from tests.fake_runtime import build_fake_runtime


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "graph.json"
    path.write_text(cs.dumps(zoo.rms_norm_linear(16, 128, 64)))
    return path


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("extra", [[], ["--weight", "--dtype", "bfloat16"]])
def test_demo(extra: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--shape", "16x128x64", *extra]) == 0
    out = capsys.readouterr().out
    for text in ("muGraph: 1 kernel", "verification", "plan", "from the definition to a compiled"):
        assert text in out
    assert "running through the reference executor on the CPU" in out
    assert "error within the limit" in out
    assert ("G  " in out) == ("--weight" in extra)


@pytest.mark.usefixtures("no_gpu")
def test_demo_fails_when_the_result_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = cs.Kernel.__call__
    monkeypatch.setattr(cs.Kernel, "__call__", lambda self, *a: right(self, *a) * 1.1)
    assert main(["demo", "--shape", "16x128x64"]) == 1
    assert "error exceeds the limit" in capsys.readouterr().out


@pytest.mark.usefixtures("no_gpu")
def test_explain(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture, page = tmp_path / "graph.svg", tmp_path / "graph.html"
    arguments = ["explain", str(saved), "--target", "h100", "--svg", str(picture)]
    assert main([*arguments, "--html", str(page), "--dependent-launch"]) == 0
    out = capsys.readouterr().out
    assert "optimized for h100 (sm_90a)" in out
    assert "dependent launch: W loaded before the dependency wait" in out
    assert picture.read_text().startswith("<svg")
    html = page.read_text(encoding="utf-8")
    assert html.startswith("<!DOCTYPE html>")
    for text in ("predicted on h100 (sm_90a)", "matmul loop: ", "registers", "bound on a false"):
        assert text in html


@pytest.mark.usefixtures("no_gpu")
def test_explain_writes_pages_to_html_files_only(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "graph.svg"
    assert main(["explain", str(saved), "--html", str(page)]) == 2
    assert "give a name that ends in .html" in capsys.readouterr().err
    assert not page.exists()


MODEL = """
import torch

def doubled(x, y):
    return torch.nn.functional.silu(x) * 2 + y

number = 3
"""


@pytest.mark.usefixtures("no_gpu")
def test_compile_for_two_architectures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A function becomes one library; which program it runs is seen when it is loaded."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    monkeypatch.setenv(toolchain.CUDART_VARIABLE, str(build_fake_runtime().cudart_static))
    (tmp_path / "model.py").write_text(MODEL)
    function, out = f"{tmp_path / 'model.py'}:doubled", tmp_path / "new" / "build"
    arguments = ["--shapes", "8x512,8x512:float32", "--dtype", "float32", "--target", "h100,b200"]
    assert main(["compile", function, *arguments, "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out / 'doubled.so'}\n"
    for target, arch in (("h100", "sm_90a"), ("b200", "sm_100a")):
        assert f"for {target} ({arch})" in (out / f"doubled.{target}" / "report.txt").read_text()
        [ptx] = (out / f"doubled.{target}").glob("*.ptx")
        assert f".target {arch}" in ptx.read_text()
        monkeypatch.setenv("FAKE_CUDA_CAPABILITY", arch.strip("sm_a"))
        program = cs.load(out / "doubled.so")
        assert program.arch == arch
        x, y = torch.randn(2, 8, 512)
        torch.testing.assert_close(program(x, y), torch.nn.functional.silu(x) * 2 + y)


def test_compile_says_what_is_wrong(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model.py"
    model.write_text(MODEL)
    for arguments, text in (
        ([str(saved), "--shapes", "8x8"], "a graph has its shapes and types"),
        ([f"{model}:nothing"], "has no attribute 'nothing'; give FILE.py:NAME or MODULE:NAME"),
        ([f"{model}:doubled"], "give the shapes of its arguments, as --shapes 16x4096"),
        ([f"{model}:number"], "it is int, and no function"),
        ([f"{tmp_path / 'no.py'}:f"], "FileNotFoundError"),
        ([f"{model}:doubled", "--shapes", "8xn"], "--shapes 8xn: give extents and a type"),
        ([f"{model}:doubled", "--shapes", "8:int9"], "--shapes 8:int9: give extents and a type"),
    ):
        assert main(["compile", *arguments, "--out", str(tmp_path)]) == 2
        assert text in capsys.readouterr().err


def test_explain_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "graph.json"
    assert main(["explain", str(path)]) == 2
    assert "No such file" in capsys.readouterr().err
    path.write_bytes(b"\xff\xfe")
    assert main(["explain", str(path)]) == 2
    assert "not a text in UTF-8" in capsys.readouterr().err
    path.write_text("{}")
    assert main(["explain", str(path)]) == 1
    assert "cutesuper: FormatError: " in capsys.readouterr().err
    from tests.programs import norm_linear

    path.write_text(cs.dumps(norm_linear()))
    assert main(["explain", str(path)]) == 2
    assert "is a muGraph; give a kernel graph" in capsys.readouterr().err


def test_explain_names_the_file_that_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "graph é.json"
    path.write_text("[" * 100_000)
    assert main(["explain", str(path)]) == 1
    assert str(path) in capsys.readouterr().err


def test_explain_looks_where_it_writes_before_it_searches(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (tmp_path / "no folder" / "x.svg", tmp_path):
        assert main(["explain", str(saved), "--svg", str(name)]) == 2
        assert "there cannot be a file of this name" in capsys.readouterr().err


@pytest.mark.usefixtures("no_gpu")
def test_ctrl_c_and_a_full_disk(
    saved: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(api, "superoptimize", interrupted)
        assert main(["explain", str(saved)]) == 130
    assert capsys.readouterr().err == "cutesuper: interrupted\n"

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(api, "superoptimize", full)
    assert main(["explain", str(saved)]) == 1
    assert "No space left" in capsys.readouterr().err


def test_names_that_the_terminal_cannot_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    g = cs.new_kernel_graph()
    g.mark_output(g.exp(g.new_input((16, 64), name="é")))
    path = tmp_path / "graph.json"
    path.write_text(cs.dumps(g))
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    assert main(["explain", str(path), "--target", "h200"]) == 0
    assert b"\\xe9" in cast("Any", out).buffer.getvalue()


@pytest.mark.parametrize("command", ["explain", "export", "compile"])
def test_unknown_targets_are_wrong_arguments(
    command: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [] if command == "explain" else ["--out", str(tmp_path / "x")]
    for target, text in (
        ("mi300", "target 'mi300': unknown; use one of h200"),
        ("h100,mi300", "'mi300'" if command == "compile" else "compile` compiles for several"),
    ):
        with pytest.raises(SystemExit) as caught:
            main([command, str(saved), "--target", target, *arguments])
        assert caught.value.code == 2
        assert text in capsys.readouterr().err


@pytest.mark.usefixtures("no_gpu")
def test_explain_and_export_take_functions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, library, header = (tmp_path / name for name in ("model.py", "x.so", "x.h"))
    model.write_text(MODEL)
    given = [f"{model}:doubled", "--shapes", "8x512,8x512", "--dtype", "float32"]
    assert main(["explain", *given, "--target", "h200"]) == 0
    assert "region 0 (model.py:5): " in capsys.readouterr().out
    written = ["--out", str(library), "--header", str(header)]
    assert main(["export", *given, "--target", "h200", *written]) == 0
    assert capsys.readouterr().out.endswith(f": {library}, {header}\n")
    assert library.stat().st_size and "x_run(" in header.read_text()
    assert main(["explain", f"{model}:doubled"]) == 2
    assert f"explain {model}:doubled: give the shapes" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [[], ["nothing"], ["demo", "--dtype", "int8"], ["demo", "--fast"], ["explain"]],
)
def test_wrong_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize("shape", ["16x128", "axbxc", "", "16x128x64x2"])
def test_wrong_shapes(shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--shape", shape]) == 2
    assert "give M x K x N, e.g. 16x4096x6144" in capsys.readouterr().err


@pytest.mark.parametrize("shape", ["0x128x64", "16x-128x64", "16x128x0"])
def test_shapes_that_no_kernel_has(shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--shape", shape]) == 2
    assert "give extents from 1 on" in capsys.readouterr().err


@pytest.mark.usefixtures("no_gpu")
def test_bench_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "rmsnorm_linear"])
    assert caught.value.code == 2
    assert "need a CUDA GPU" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------- console


def test_version_and_module() -> None:
    command = [sys.executable, "-m", "cutesuper", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"cutesuper {cs.__version__}\n"


@pytest.mark.usefixtures("no_gpu")
def test_export(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    library, header = tmp_path / "norm.so", tmp_path / "norm.h"
    arguments = ["export", str(saved), "--out", str(library), "--budget-s", "60"]
    assert main([*arguments, "--target", "h200", "--header", str(header)]) == 0
    assert str(header) in capsys.readouterr().out
    assert "norm_run(" in header.read_text()
    assert cs.load(library).arch == "sm_90a"


def test_export_looks_at_names_first(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(saved), "--out", str(tmp_path / "none" / "x.so")]) == 2
    assert "there cannot be a file of this name" in capsys.readouterr().err
    assert main(["export", str(saved), "--out", str(tmp_path / "x.so"), "--header", "x.txt"]) == 1
    assert "must be a name in C and end in .h" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        main(["explain", str(saved), "--budget-s", "0"])
    assert caught.value.code == 2


def test_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from cutesuper.runtime.cache import FILES, KernelCache

    monkeypatch.setenv("CUTESUPER_CACHE", str(tmp_path / "cache"))
    store = KernelCache()
    tensor = {"kind": "tensor", "shape": [16, "M"], "dtype": "float16"}
    taken = {"arguments": [tensor, {"kind": "int"}], "symbols": {}}
    entries = [
        store.store(digit * 64, {"arch": "sm_90a", "arguments": taken}, dict.fromkeys(FILES, b"1"))
        for digit in "ab"
    ]
    assert main(["cache", "size"]) == 0
    assert "2 kernel(s), 6 bytes" in capsys.readouterr().out
    assert main(["cache", "list"]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        [digit * 16, "sm_90a", "3", "bytes", "16xM", "float16"] for digit in "ab"
    ]
    assert main(["cache", "verify"]) == 0
    assert entries[0].path
    (entries[0].path / FILES[0]).write_bytes(b"2")
    assert main(["cache", "verify"]) == 1
    assert "a" * 64 + ": damaged" in capsys.readouterr().out
    assert main(["cache", "clear"]) == 0
    assert "2 kernel(s) removed" in capsys.readouterr().out
    assert list(store.names()) == []


@pytest.mark.usefixtures("no_gpu")
def test_the_doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for text in (f"cutesuper            {cs.__version__}", "CuTe DSL", "calls on CPU tensors run"):
        assert text in out
    monkeypatch.setattr(console.toolchain, "package_version", lambda _: None)
    console.toolchain.dsl_versions.cache_clear()
    try:
        assert main(["doctor"]) == 1
    finally:
        console.toolchain.dsl_versions.cache_clear()
    assert "MISSING  compiler             compiling a kernel needs" in capsys.readouterr().out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    out = capsys.readouterr().out
    for text in ("doctor", "verify", "budget-s"):
        assert text in out
    if shell == "fish":
        for line in ("from explain' -l target -x -a 'h200 h100", "from cache' -a 'list size"):
            assert f"complete -c cutesuper -n '__fish_seen_subcommand_{line}" in out


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("expl", ["explain"]),
        ("explain --target h", ["h200", "h100"]),
        ("compile --dtype b", ["bfloat16"]),
        ("demo --dtype ", ["float16", "bfloat16"]),
        ("cache ver", ["verify"]),
        ("bench rmsnorm_linear", ["rmsnorm_linear", "rmsnorm_linear_nk"]),
        ("bench --bud", ["--budget-s"]),
        ("tune --dep", ["--dependent-launch"]),
    ],
)
def test_bash_completes(
    typed: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["completion", "bash"])
    given = " ".join(f"'{word}'" for word in ["cutesuper", *typed.split(" ")])
    asked = f"COMP_WORDS=({given}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _cutesuper"
    script = f'{capsys.readouterr().out}\n{asked}\nprintf "%s\\n" "${{COMPREPLY[@]}}"\n'
    command = ["bash", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.split() == words


def test_every_option_has_a_help_text() -> None:
    from cutesuper.cli import _parser

    for name, parser in _parser()[1].items():
        told = {a.dest: a.help for a in parser._actions if a.option_strings}
        assert name == "demo" or None not in told.values(), name


@pytest.mark.parametrize("begun", ["-m cutesuper", "cutesuper"])
def test_ctrl_c_while_the_package_is_imported(begun: str, tmp_path: Path) -> None:
    """A module that is imported on the way raises it; main has not begun."""
    (tmp_path / "rich").mkdir()
    (tmp_path / "rich" / "__init__.py").write_text("raise KeyboardInterrupt")
    if begun == "cutesuper":
        begun = str(tmp_path / "cutesuper")
        Path(begun).write_text("from cutesuper.cli import main\n")
    root = str(Path(cs.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, *begun.split(), "doctor"], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{root}"},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (130, "cutesuper: interrupted\n")


def test_pictures_say_what_they_are(tmp_path: Path) -> None:
    g = cs.new_kernel_graph()
    g.mark_output(g.exp(g.new_input((16, 64))))
    kernel = cs.superoptimize(g, target="h200")
    for name in ("p.png", "p"):
        with pytest.raises(FormatError, match=r"let the name end in \.svg or \.html"):
            kernel.draw(tmp_path / name)
    assert list(tmp_path.iterdir()) == []
