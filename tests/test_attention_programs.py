"""The hand-written attention programs of `tests.attention` compute their graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cutesuper as cs
from benchmarks.workloads_attention import serving
from cutesuper.ir.evaluate import evaluate
from cutesuper.verify.numeric import compare
from tests import zoo
from tests.attention import Attention, serving_inputs, with_logits

SMALL: dict[str, Any] = {"rows": 6, "keys": 40, "width": 8, "key_tile": 8, "row_tile": 4}
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "keys last": {"keys_last": True, "scale": None},
    "groups": {"group": 3},
    "groups alone": {"group": 3, "rows": 0},
    "causal": {"causal": "top_left"},
    "causal, last rows": {"causal": "bottom_right", "group": 2},
    "norms": {"norm": "QV", "keys_last": True, "scale": None},
    "norm of keys": {"norm": "QK", "group": 2},
    "ragged": {"keys": 37},
}


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("form", FORMS)
def test_programs_by_hand(form: str, cluster: int) -> None:
    options: dict[str, Any] = SMALL | FORMS[form] | {"cluster": cluster}
    attention = Attention(**options)
    report = compare(attention.graph(), attention.mugraph())
    assert report, report.message


@pytest.mark.parametrize("page", [0, 16])
def test_inputs_of_sequences(page: int) -> None:
    """A sequence of no keys is zero, others average their own values."""
    graph = serving(page).graph(cs, (3, 48, 4, 2, 16), "bfloat16")
    inputs = serving_inputs(graph, 1, "cpu", [0, 20, 48])
    [y] = evaluate(graph, inputs, torch.float64)
    assert (y[0] == 0).all() and (y[1:] != 0).all()
    assert all(zoo.judge(graph, inputs, [y.bfloat16()]))


@pytest.mark.parametrize("largest", [1e4, -1e4])
def test_logits_become_as_large_as_asked(largest: float) -> None:
    attention = Attention(rows=6, keys=40)
    inputs = zoo.draw(attention.graph(), 1)
    with_logits(attention, inputs, largest)
    scores = inputs[0].double() @ inputs[1].double().mT * 0.125
    assert scores.abs().max() == pytest.approx(1e4, rel=1e-2)
