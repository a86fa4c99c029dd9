"""Training steps of models in the benchmarks, and their table."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks import models, report, steps
from benchmarks.models_report import steps_markdown

TINY = models.Family("Llama", models._extents(96, 64, 2, 96, 4, 2, 16, True), "LlamaForCausalLM")
TINY_GPT = models.Family(
    "GPT2", {"vocab_size": 96, "n_embd": 64, "n_layer": 1, "n_head": 4} | steps._NO_DROPOUT,
    "GPT2LMHeadModel",
)  # fmt: skip
RECIPES = {"tiny": steps.Recipe(TINY, 2, 8), "tiny-gpt": steps.Recipe(TINY_GPT, 2, 8)}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "RECIPES", RECIPES)
    monkeypatch.setattr(models, "POSITIONS", 64)


@pytest.mark.parametrize("name", RECIPES)
def test_a_model_trains(name: str) -> None:
    """The same weights and tokens in every process; the loss of 8 batches seen twice falls."""
    make, device = steps.IMPLEMENTATIONS["eager"], torch.device("cpu")
    first, second = (steps.Training(RECIPES[name], make, device).measure(14) for _ in range(2))
    assert first["losses"] == second["losses"]
    assert len(first["losses"]) == 1 + steps.WARM + 14 and len(first["ms"]) == 14
    assert sum(first["losses"][8:16]) < sum(first["losses"][:8])
    assert first["first_s"] > 0 and min(first["ms"]) > 0


def test_every_recipe_is_without_dropout() -> None:
    for recipe in (steps._recipe("gpt2-medium", 1, 1, **steps._NO_DROPOUT), *RECIPES.values()):
        model = recipe.family.build(torch.device("meta"), torch.bfloat16)
        rates = [m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)]
        assert not any(rates)


def outcome(ms: float, loss: float, **more: Any) -> dict[str, Any]:
    found = {"first_s": 10.0, "ms": [ms, ms], "peak_gib": 8.0, "losses": [loss, loss / 2]}
    return found | {"kernels_ms": {"Triton": 1.5}} | more


def results_of(monkeypatch: pytest.MonkeyPatch, found: dict[str, Any]) -> dict[str, Any]:
    def answer(name: str, implementation: str, steps: int, folder: str, timeout: float) -> Any:
        given = found[implementation]
        if isinstance(given, Exception):
            raise given
        return dict(given)

    monkeypatch.setattr(steps, "_in_process", answer)
    entries = [steps.measured("tiny", name, 2, 300.0) for name in found]
    environment = {"gpu": "a GPU", "torch": "2.11.0", "date": "2026-11-29", "commit": "abc"}
    return {
        "schema": 1, "kind": "steps", "name": "steps", "title": "Steps", "dtype": "bfloat16",
        "environment": environment, "cases": [steps._case("tiny", entries)],
    }  # fmt: skip


def test_the_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    results = results_of(monkeypatch, {
        "compile": outcome(50.0, 12.0), "cutesuper-backend": outcome(40.0, 12.01),
        "eager": RuntimeError("no memory"),
        "cutesuper-patch": subprocess.TimeoutExpired("python", 300.0),
    })  # fmt: skip
    text = steps_markdown(results)
    [ours] = [line for line in text.splitlines() if "backend=" in line and "40.00" in line]
    cells = [c.strip() for c in ours.strip("|").split("|")]
    assert cells[0] == "tiny" and cells[1:3] == ["2", "2 x 8"]
    assert cells[-4:] == ["40.000", "8.00", "10 / 10", "1.25x"]
    assert "no memory" in text and "not done after 300 s" in text
    report.KINDS["steps"].show(results)
    assert "1.25x" in capsys.readouterr().out


def test_losses_that_differ_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    results = results_of(monkeypatch, {
        "compile": outcome(50.0, 12.0), "eager": outcome(60.0, 12.0),
        "cutesuper-backend": outcome(40.0, 12.5),
    })  # fmt: skip
    [case] = results["cases"]
    assert [e["status"] for e in case["implementations"]] == ["ok", "ok", "wrong"]
    assert case["implementations"][2]["time_us"] is None
    assert "losses differ by 4.2%" in steps_markdown(results)


def test_kinds_of_kernels() -> None:
    for name, kind in {
        "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT": "products of cuBLAS",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16": "attention",
        "kernel_cutlass_kernel_cutesuperskeletonsattentionkernelloopAttentionKernel": "attention",
        "kernel_cutlass_kernel_cutesuperskeletonsmatmulkernelloopMatmulKernel": (
            "products of cutesuper"
        ),
        "kernel_cutlass_kernel_cutesuperskeletonsrowskernelrowsRowKernel": "rows of cutesuper",
        "triton_red_fused__log_softmax": "Triton",
        "multi_tensor_apply_kernel": "optimizer",
        "Memset (Device)": "others",
    }.items():
        assert steps.kind_of(name) == kind


def test_a_process_that_fails_says_why(tmp_path: Any) -> None:
    with pytest.raises(RuntimeError, match="KeyError"):
        steps._in_process("no such model", "eager", 1, str(tmp_path), 120.0)
