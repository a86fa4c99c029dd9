"""Steps of models of the transformers library in the benchmarks, and their table."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks import models, report, sweep
from benchmarks.harness import Monitor
from tests.benchmark_fakes import FLOORS, KNOBS
from tests.compiling import leave_inductor_out, taken
from tests.test_benchmarks_sweep import Clock

TINY = {
    "tiny": models.Family(
        "Llama", models._extents(96, 64, 2, 96, 4, 2, 16, True), "LlamaForCausalLM"
    ),
    "tiny-gpt": models.Family(
        "GPT2", {"vocab_size": 96, "n_embd": 64, "n_layer": 1, "n_head": 4}, "GPT2LMHeadModel"
    ),
    "tiny-windows": models.Family(
        "Gemma3Text",
        models._extents(96, 64, 2, 96, 4, 2, 16, True)
        | {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
        "Gemma3ForCausalLM",
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def reports(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Small models, compiled by what needs no compiler."""
    monkeypatch.setattr(models, "MODELS", TINY)
    monkeypatch.setattr(models, "POSITIONS", 64)
    yield leave_inductor_out(monkeypatch)
    models._model.cache_clear()


def results_of(*names: str) -> dict[str, Any]:
    made = models.make_sweep(names, ((2, 8),), models.IMPLEMENTATIONS)
    items = sweep.Sweep(made.kind, made.title, made.items, (*FLOORS[:1], *models.IMPLEMENTATIONS))
    return sweep.run(items, KNOBS, backend=Clock(), monitor=Monitor())


def test_everybody_computes_the_step(reports: Any) -> None:
    results = results_of(*TINY)
    assert taken(reports) > 1
    assert [case["error"] for case in results["cases"]] == [None] * 3
    for case in results["cases"]:
        entries = {e["name"]: e for e in case["implementations"]}
        for made in models.IMPLEMENTATIONS:
            entry = entries[made.name]
            assert entry["status"] == "ok", (case["key"], entry["error"])
            assert entry["check_before"]["passed"] and entry["check_after"]["passed"]
    llama, _, windows = results["cases"]
    weights = 2 * (64 * (2 + (4 + 2 * 2) * 16 + 4 * 16 + 3 * 96)) + 64 * (1 + 96)
    assert llama["bytes"] == 2 * (weights + 2 * 2 * 2 * 2 * 8 * 16 + 2 * 96)
    assert windows["bytes"] == llama["bytes"] + 2 * (
        64 * 2 * 2 + 4 * 16 - 2 * 2 * 2 * 4 * 16  # norms; half of a layer's cache
    )
    text = report.merged([results])[0]
    table = report.KINDS["models"].markdown(text)
    assert "| tiny | 2 | 8 |" in table and "speedup" in table


def test_steps_are_the_same_one() -> None:
    model = models._model("tiny", torch.device("cpu"), torch.float32)
    with torch.no_grad():
        step = models.Step.of(model, 2, 8)
        first, second, exact = step.logits(model), step.logits(model), step.in_float64()
    assert torch.equal(first, second) and exact.dtype is torch.float64
    torch.testing.assert_close(first.double(), exact, rtol=1e-4, atol=1e-5)


def test_a_patched_model_shares_its_weights() -> None:
    model = models._model("tiny", torch.device("cpu"), torch.float32)
    patched = models._patched(model)
    assert {id(p) for p in patched.parameters()} == {id(p) for p in model.parameters()}
    assert type(patched.model.norm) is not type(model.model.norm)


@pytest.mark.parametrize("options", [["--only", "gpt-5"], ["--batches", "0"], ["--tokens", "x"]])
def test_refusals(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        models.main(options, "")
    assert "gpt-5" in capsys.readouterr().err or options[-1] in "0x"
