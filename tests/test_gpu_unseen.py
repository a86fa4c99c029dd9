"""Rows that a mask hides as a whole, on a GPU: the programs of `tests.test_unseen`, run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

import cutesuper as cs
from cutesuper.ir.evaluate import evaluate
from tests.test_gpu import check
from tests.test_unseen import BLIND, GRAPHS, inputs_of, value_of

pytestmark = [pytest.mark.gpu, pytest.mark.ptx]


def drawn(graph: Any) -> list[torch.Tensor]:
    return [x.half().cuda() for x in inputs_of(graph, torch.float32)]


@pytest.mark.parametrize("name", GRAPHS)
def test_a_hidden_row_is_zero(name: str) -> None:
    kernel = cs.superoptimize(GRAPHS[name]())
    [y] = check(kernel, drawn(kernel.graph))
    assert (y[..., BLIND, :] == value_of(name)).all()


def test_gradients_of_attention() -> None:
    """With what the forward pass keeps of such a row: a maximum of -inf, and a sum of 0."""
    halves = cs.split(GRAPHS["attention"](), wrt=["q", "k", "v"])
    forward, backward = (cs.superoptimize(g) for g in (halves.forward, halves.backward))
    given = drawn(forward.graph)
    made = check(forward, given)
    names = [forward.graph.nodes[i].name for i in forward.graph.inputs]
    feed = dict(zip(names, given, strict=True))
    feed |= {n: made[i] for n, i in halves.saved.items()}
    feed |= {n: torch.randn_like(made[i]) for n, i in halves.cotangents.items()}
    inputs = [feed[backward.graph.nodes[i].name] for i in backward.graph.inputs]
    assert all(x.isfinite().all() for x in evaluate(backward.graph, inputs, torch.float64))
    found = check(backward, inputs)
    assert not found[int(halves.gradients["q"])][..., BLIND, :].any()
