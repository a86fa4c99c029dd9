"""Element-wise work in functions on tensors of more than 2^31 elements."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from cutesuper.ir.dims import MAX_ELEMENTS, extent  # noqa: E402
from cutesuper.pipeline import check_definition  # noqa: E402
from cutesuper.torch.aten import factored_dims  # noqa: E402
from tests.tracing import check, randn, traced  # noqa: E402

#: shapes of which no single dimension of a kernel holds all elements
LARGE = {"one dimension": (2**31 + 64,), "several": (2**20, 4096), "three": (2**11, 2**10, 2**12)}


@pytest.mark.parametrize("name", LARGE)
def test_dimensions_are_divided(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Memory that nothing is written to takes no space."""
    x = torch.empty(LARGE[name], dtype=torch.bfloat16)
    program = traced(monkeypatch, lambda x: torch.relu(x) * 2, (x,))
    graph = program.kernel.graph
    extents = list(map(extent, graph.nodes[graph.inputs[0]].shape))
    assert len(extents) == 2 and prod(extents) == x.numel()
    assert max(extents) <= MAX_ELEMENTS and extents[1] % 8 == 0
    check_definition("superoptimize", graph)


def test_values_of_divided_dimensions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factored_dims, "MAX_ELEMENTS", 100)

    def fn(x: Tensor, y: Tensor, b: Tensor) -> Any:
        return torch.relu(x) * 2 + y.flatten(), y * b

    inputs = randn(22 * 64), randn(22, 64), randn(64)
    check(traced(monkeypatch, fn, inputs), fn, inputs)


def test_a_dimension_of_a_prime_number_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factored_dims, "MAX_ELEMENTS", 100)
    program = traced(monkeypatch, torch.relu, (randn(8209),))
    assert program.kernel.graph.nodes[0].shape == (8209,)
