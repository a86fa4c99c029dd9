"""The backend's share of models of transformers: programs, and their results by the reference.

A golden file has a line for each region, with the operators of its kernel graph in order, and one
for each reason why something is in no region.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from cutesuper.verify.numeric import acceptable  # noqa: E402
from tests.families import (  # noqa: E402
    FAMILIES,
    batch_of,
    gradients,
    inputs_of,
    model_of,
    taken,
)

#: a step of each family, and prompts
CASES = [
    *((name, "step") for name in FAMILIES),
    *((name, "prompt") for name in ("llama", "gemma2", "mistral")),
    ("llama", "padded step"),
    ("gemma3", "padded prompt"),
]


@pytest.mark.parametrize(("name", "what"), CASES)
def test_programs_of_a_family(
    name: str, what: str, golden: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.no_grad():
        model = model_of(name)
        given = inputs_of(model, what)
        eager, exact = (logits(model, copy.deepcopy(given), d) for d in (None, torch.float64))
        found, text = taken(lambda call: call(**given).logits, model, monkeypatch)
    report = acceptable(found, exact, eager, eager.dtype)
    assert report, report.message
    golden(f"families/{name}_{what.replace(' ', '_')}.txt", text)


@pytest.mark.parametrize("name", FAMILIES)
def test_training_of_a_family(
    name: str, golden: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention of both passes is a kernel's, with limits in the place of the mask."""
    model = model_of(name).train()
    given, double = batch_of(model), in_double(model)
    eager, exact = (gradients(m, m, given) for m in (model, double))
    found, text = taken(lambda call: gradients(model, call, given), model, monkeypatch)
    for ours, theirs, want in zip(found, eager, exact, strict=True):
        report = acceptable(ours, want, theirs, theirs.dtype)
        assert report, report.message
    assert "has a mask" not in text
    golden(f"families/{name}_training.txt", text)


def in_double(model: Any) -> Any:
    """A copy of a model in float64."""
    model = copy.deepcopy(model).double()
    model.set_experts_implementation("eager")  # others have no float64
    return model


def logits(model: Any, given: dict[str, Any], dtype: Any) -> Any:
    """Logits of the model as it is, or of a copy in another element type."""
    if dtype is None:
        return model(**given).logits
    model = in_double(model)
    for layer in given["past_key_values"].layers:
        layer.keys, layer.values = layer.keys.to(dtype), layer.values.to(dtype)
    return model(**given).logits
