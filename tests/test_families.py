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
from tests.families import FAMILIES, inputs_of, model_of, taken  # noqa: E402

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
        found, text = taken(model, given, monkeypatch)
    report = acceptable(found, exact, eager, eager.dtype)
    assert report, report.message
    golden(f"families/{name}_{what.replace(' ', '_')}.txt", text)


def logits(model: Any, given: dict[str, Any], dtype: Any) -> Any:
    """Logits of the model as it is, or of a copy in another element type."""
    if dtype is None:
        return model(**given).logits
    model = copy.deepcopy(model).to(dtype)
    model.set_experts_implementation("eager")  # others have no float64
    for layer in given["past_key_values"].layers:
        layer.keys, layer.values = layer.keys.to(dtype), layer.values.to(dtype)
    return model(**given).logits
