"""Every example runs, on a machine without a GPU too.

Most run inside of this process, where PyTorch is imported already.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.compiling import leave_inductor_out, taken

ROOT = Path(__file__).resolve().parent.parent
EXPECTED = {
    "rmsnorm_linear": "largest difference from PyTorch: 0.0",
    "decode_chain": " 40 tokens, 4 layers: relative error 3",
    "verify_by_hand": "no eps:  not equal",
    "mirage_graph": "muGraph 1: not equal",
}
TRAINING = {"train_llama", "train_distributed", "transformers_llama"}
#: examples that compare ways, smaller than they are by default; and how many tasks they have
COMPARING: dict[str, tuple[list[str], int]] = {
    "llama_decode": (["--batch", "3", "--layers", "1"], 8),
    "ngpt_block": (["--context", "4"], 5),
    "lora_llama": (["--context", "4"], 5),
    "qk_norm_attention": (["--prompt", "8"], 3),
    "dlrm": ([], 6),
}
WAYS = ("eager", "compile", "backend", "ours")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def run(*arguments: str) -> str:
    """The output of an example; arguments of the interpreter, which end with the example's."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=900,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports a module as a script in examples/ would; one thread, which on busy processors is
    faster than several that wait for each other."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield importlib.import_module
    torch.set_num_threads(threads)


def test_every_example_is_listed() -> None:
    scripts = {p.stem for p in (ROOT / "examples").glob("*.py")}
    assert scripts == set(EXPECTED) | TRAINING | set(COMPARING)
    page = (ROOT / "examples" / "README.md").read_text()
    assert all(f"({name}.py)" in page for name in scripts)


@pytest.mark.parametrize("name", EXPECTED)
def test_example(
    name: str, example: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("cutlass")
    example(name).main()
    assert EXPECTED[name] in capsys.readouterr().out


def test_an_example_is_a_script() -> None:
    assert "--ways A,B" in run("examples/qk_norm_attention.py", "--help")


# ----------------------------------------------------------------------------------- several ways


@pytest.mark.parametrize("name", COMPARING)
def test_ways_are_compared_and_timed(
    name: str, example: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], tmp_path: Path,
) -> None:  # fmt: skip
    """Code for torch.compile runs eagerly: that needs no compiler for the CPU."""
    pytest.importorskip("cutlass")
    reports = leave_inductor_out(monkeypatch)
    path, plot = tmp_path / "times.json", tmp_path / "plot.svg"
    arguments, tasks = COMPARING[name]
    files = ["--json", str(path), "--out", str(plot)]
    status = example(name).main(["--device", "cpu", "--ways", ",".join(WAYS), *arguments, *files])
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert taken(reports) > 0
    assert f"{len(WAYS) * tasks} results: all within the rule" in printed
    written = json.loads(path.read_text())
    assert written["same"] and len({r["task"] for r in written["results"]}) == tasks
    for r in written["results"]:
        assert r["way"] in WAYS
        assert 0 <= r["error"] <= r["allowed"] < 0.5 and r["ms"] > 0
    if importlib.util.find_spec("matplotlib"):
        assert "<svg" in plot.read_text()
    else:
        assert "no plot: matplotlib is not installed" in printed and not plot.exists()


def wrong_update(module: ModuleType) -> tuple[Any, str, Any]:
    """An update that goes further than it was told to."""
    far = replace(module.OURS, update=lambda h, step, a: module.TORCH.update(h, step, 4 * a))
    return module, "OURS", far


def wrong_scale(module: ModuleType) -> tuple[Any, str, Any]:
    """Attention that forgets the norm of keys."""
    return module, "ours", lambda q, k, v, wq, wk, causal: module.plain(q, k, v, wq, None, causal)


def wrong_adapter(module: ModuleType) -> tuple[Any, str, Any]:
    """An adapter without its factor."""
    return module, "our_add", lambda x, p, bias: (x + p + bias).relu()


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("ngpt_block", wrong_update, "forward, ours: result has error"),
        ("qk_norm_attention", wrong_scale, "decode, raw keys, ours: result has error"),
        ("dlrm", wrong_adapter, "adapters, training step, ours: "),
    ],
)
def test_what_is_wrong_has_no_times(
    name: str, change: Callable[[ModuleType], tuple[Any, str, Any]], told: str,
    example: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    module = example(name)
    monkeypatch.setattr(*change(module))
    if name == "dlrm":  # what is served is not in question
        monkeypatch.setattr(module.Serving, "tasks", lambda _: [])
    assert module.main(["--device", "cpu", "--ways", "eager,ours"]) == 1
    printed = capsys.readouterr().out
    assert f"NOT within the rule: {told}" in printed or f"; {told}" in printed
    assert "speedup" not in printed


def test_decoding_that_forgets_is_noticed(
    example: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Keys of the tokens that were generated are not seen; that shows after the first of them."""
    module, ways = example("llama_decode"), example("llama.decode_ways")

    def attend(q: Any, place: Any, cache: Any) -> Any:
        fixed = place._replace(mask=place.mask.index_fill(-1, place.positions - 1, -torch.inf))
        return module.TORCH.attend(q, fixed, cache)

    parts = replace(module.TORCH, attend=attend)
    layer = ways.partial(ways.Layer.forward, parts=parts)
    forgets = ways.Way(ways.partial(ways.decode, layer=layer), module.TORCH)
    monkeypatch.setitem(module.WAYS, "ours", lambda device: forgets)
    assert module.main(["--device", "cpu", "--batch", "1", "--context", "16"]) == 1
    printed = capsys.readouterr().out
    assert "NOT within the rule: batch 1, ours: logits has error" in printed
    assert "tokens/s" not in printed


def test_no_matplotlib(
    example: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.setattr(example("common.report"), "can_plot", lambda: False)
    plot = tmp_path / "plot.png"
    arguments = ["--device", "cpu", "--ways", "eager", "--out", str(plot)]
    assert example("qk_norm_attention").main(arguments) == 0
    printed = capsys.readouterr().out
    assert "no plot: matplotlib is not installed (pip install matplotlib)" in printed
    assert "speedup" in printed and not plot.exists()


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("llama_decode", ["--context", "8", "--steps", "8"], "no room for so many steps"),
        ("llama_decode", ["--batch", "0"], "--batch 0: must be positive"),
        ("ngpt_block", ["--width", "24"], "the width must be a multiple"),
        ("lora_llama", ["--ways", "eager,mine"], "'mine' is none of eager, compile, backend, ours"),
        ("qk_norm_attention", ["--groups", "3"], "groups must divide heads"),
        ("dlrm", ["--rows", "-1"], "--rows -1: must be positive"),
    ],
)
def test_wrong_arguments(
    name: str, arguments: list[str], told: str, example: Callable[[str], ModuleType],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    with pytest.raises(SystemExit) as caught:
        example(name).main(["--device", "cpu", *arguments])
    assert caught.value.code == 2
    assert told in capsys.readouterr().err


# ---------------------------------------------------------------------------------------- training


def check_losses(path: Path, ways: list[str]) -> None:
    """Check that losses agree, as the report says, and fall."""
    written = json.loads(path.read_text())
    assert written["same_losses"] and [r["way"] for r in written["results"]] == ways
    first = written["results"][0]["losses"]
    assert first[-1] < 0.97 * first[0]
    for result in written["results"][1:]:
        assert result["losses"] == pytest.approx(first, rel=written["tolerance"])


def test_training(
    example: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "losses.json"
    arguments = ["--device", "cpu", "--steps", "8", "--layers", "1", "--json", str(path)]
    assert example("train_llama").main(arguments) == 0
    assert "loss curves: the same" in capsys.readouterr().out
    check_losses(path, ["eager", "ours"])


def test_training_with_other_operators_is_noticed(example: Callable[[str], ModuleType]) -> None:
    report, training = example("llama.report"), example("llama.training")
    plan = training.Plan(None, 1, 2, torch.device("cpu"), torch.float32)
    results = [training.Result("a", losses, 1.0, 1.0, None) for losses in ([5.0, 4.0], [5.0, 4.1])]
    assert report.agreement(plan, results[:1] * 2)[0]
    assert not report.agreement(plan, results)[0]
    unknown = training.Result("b", [5.0, float("nan")], 1.0, 1.0, None)
    assert not report.agreement(plan, [unknown, *results[:1]])[0]
    assert not report.agreement(plan, [*results[:1], unknown])[0]


def test_training_on_two_devices(tmp_path: Path) -> None:
    path = tmp_path / "losses.json"
    run(
        *TORCHRUN, "examples/train_distributed.py", "--device", "cpu", "--steps", "8", "--layers",
        "1", "--json", str(path),
    )  # fmt: skip
    check_losses(path, ["one device", "ddp on 2", "fsdp2 on 2"])


#: a model for which compiling takes longer than training
SMALL = (
    "--device", "cuda", "--steps", "20", "--layers", "2", "--width", "256", "--head", "64",
    "--vocabulary", "1024", "--context", "128",
)  # fmt: skip


#: smaller than by default, so that the GPU is not the reason to leave a test out
SMALLER = {
    "llama_decode": ["--layers", "2", "--context", "512", "--steps", "8", "--batch", "1", "3"],
    "ngpt_block": ["--width", "512", "--context", "128"],
    "lora_llama": ["--width", "512", "--hidden", "1024", "--context", "128"],
    "qk_norm_attention": ["--keys", "512", "--prompt", "256"],
    "dlrm": ["--rows", "1000"],
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", SMALLER)
def test_ways_are_compared_on_a_gpu(name: str, tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    run(f"examples/{name}.py", *SMALLER[name], "--ways", ",".join(WAYS), "--json", str(path))
    written = json.loads(path.read_text())
    assert written["same"] and {r["way"] for r in written["results"]} == set(WAYS)


@pytest.mark.gpu
def test_training_on_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "losses.json"
    ways = ["eager", "compile", "ours", "ours+compile"]
    run("examples/train_llama.py", *SMALL, "--ways", ",".join(ways), "--json", str(path))
    check_losses(path, ways)


@pytest.mark.gpu
def test_training_on_two_gpus(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    path = tmp_path / "losses.json"
    run(*TORCHRUN, "examples/train_distributed.py", *SMALL, "--json", str(path))
    check_losses(path, ["one device", "ddp on 2", "fsdp2 on 2"])
