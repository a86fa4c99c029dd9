"""Every example runs, on a machine without a GPU too."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
EXPECTED = {
    "rmsnorm_linear": "largest difference from PyTorch: 0.0",
    "decode_chain": " 40 tokens, 4 layers: relative error 3",
    "verify_by_hand": "no eps:  not equal",
    "mirage_graph": "muGraph 1: not equal",
}
TRAINING = {"train_llama", "train_distributed", "transformers_llama"}
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def run(*arguments: str) -> str:
    """What an example prints; arguments of the interpreter, which end with the example's."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_example_is_listed() -> None:
    scripts = {p.stem for p in (ROOT / "examples").glob("*.py")}
    assert scripts == set(EXPECTED) | TRAINING
    page = (ROOT / "examples" / "README.md").read_text()
    assert all(f"({name}.py)" in page for name in scripts)


@pytest.mark.parametrize("name", EXPECTED)
def test_example(name: str) -> None:
    pytest.importorskip("cutlass")
    assert EXPECTED[name] in run(f"examples/{name}.py")


def check_losses(path: Path, ways: list[str]) -> None:
    """What was written says that losses agree, and they do, and fall."""
    written = json.loads(path.read_text())
    assert written["same_losses"] and [r["way"] for r in written["results"]] == ways
    first = written["results"][0]["losses"]
    assert first[-1] < 0.97 * first[0]
    for result in written["results"][1:]:
        assert result["losses"] == pytest.approx(first, rel=written["tolerance"])


def test_training(tmp_path: Path) -> None:
    path = tmp_path / "losses.json"
    printed = run(
        "examples/train_llama.py", "--device", "cpu", "--steps", "8", "--layers", "1", "--json",
        str(path),
    )  # fmt: skip
    assert "loss curves: the same" in printed
    check_losses(path, ["eager", "ours"])


def test_training_with_other_operators_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    report = importlib.import_module("llama.report")
    training = importlib.import_module("llama.training")
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
