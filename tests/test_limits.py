"""Limits of the keys that rows see: the operator, programs that are found, and calls on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cutesuper as cs
from cutesuper.autodiff.gradient import split
from cutesuper.errors import CutesuperError, OperatorError, ShapeError
from cutesuper.ir.graph import KernelGraph, new_kernel_graph
from cutesuper.search.search import SearchOptions, search
from cutesuper.targets import H200
from cutesuper.torch.ops.attention.flex import _ranges
from cutesuper.verify.equivalence import Verifier
from tests.limits import CASES, Case, case, exact, sides
from tests.mutants import change

LOWERED = SearchOptions(lowered=True)

# --------------------------------------------------------------------------------------- the graph


def attention(rows: bool, causal: bool = False) -> KernelGraph:
    """Attention with a lower limit: of rows, or of sequences."""
    g = new_kernel_graph()
    q = g.new_input((2, 2, 2, 64, 64), "bfloat16", "Q")
    k, v = (g.new_input((2, 2, 1, 512, 64), "bfloat16", n) for n in "KV")
    n = g.new_input((2,), "int32", "lengths")
    first = g.new_input((1, 1, 1, 64, 1) if rows else (2,), "int32", "first")
    scores = g.length_mask(g.mul(g.matmul(q, g.transpose(k)), 0.125), n, causal)
    scores = g.limit_mask(scores, first, causal=causal and not rows)
    g.mark_output(g.matmul(g.softmax(scores), v))
    return g


def test_one_kernel_whose_limits_are_verified() -> None:
    g = attention(True)
    best = search(g, H200, options=LOWERED, near=1.02).candidates[0].mugraph
    [step], verifier = best.steps, Verifier(g)
    assert verifier.check(best, bound=False).equal
    [place] = [i for i, op in enumerate(step.program.ops) if op.kind == "limit_mask"]
    wrong = {**step.program.ops[place].attributes, "lower": False}
    assert not verifier.check(change(best, 0, place, attributes=wrong), bound=False).equal


@pytest.mark.parametrize(("rows", "causal"), [(True, False), (False, True)])
def test_gradients_have_each_mask_once(rows: bool, causal: bool) -> None:
    """Scores that are computed again are masked once; their cotangents are 0 where they are."""
    both = split(attention(rows, causal), ("Q", "K", "V"), save=["out", "lse"])
    masks = [n.operator for n in both.backward.nodes if "_mask" in n.operator]
    assert masks == ["length_mask", "limit_mask"]


REFUSED: dict[str, tuple[tuple[int, ...], dict[str, Any], str]] = {
    "other sequences": ((3,), {}, "limits have the first dimensions of the scores"),
    "columns": ((2, 3, 4, 8), {}, "limits have the first dimensions of the scores"),
    "rows that count": ((2, 1, 4, 1), {"causal": True}, "limits of rows are what they are"),
    "no flag": ((2,), {"lower": 1}, "limit_mask(lower=1): must be True or False"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_limits_that_are_refused(name: str) -> None:
    shape, options, why = REFUSED[name]
    g = new_kernel_graph()
    x, n = g.new_input((2, 3, 4, 8), "float32"), g.new_input(shape, "int32")
    with pytest.raises((ShapeError, OperatorError)) as error:
        g.limit_mask(x, n, **options)
    assert why in str(error.value)


# ----------------------------------------------------------------------------------------- calls


def call(c: Case, *own: Any) -> Any:
    return cs.ops.attention(*own, enable_gqa=True, **c.options)


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=3, deadline=None)
@given(st.integers(1, 60), st.integers(1, 90), st.integers(0, 1000))
def test_results_and_gradients(name: str, rows: int, keys: int, seed: int) -> None:
    b = 1 if name.startswith("packed") else 3
    own = sides(b, 2, 2, rows, keys, 8, torch.float32, "cpu", seed)
    c = case(name, *own, seed)
    ours = [t.clone().requires_grad_() for t in own]
    wants = [t.double().requires_grad_() for t in own]
    y, want = call(c, *ours), exact(c, *wants)
    torch.testing.assert_close(y.double(), want, rtol=1e-4, atol=1e-5)
    found = torch.autograd.grad(y.sum(), ours)
    for mine, other in zip(found, torch.autograd.grad(want.sum(), wants), strict=True):
        torch.testing.assert_close(mine.double(), other, rtol=1e-4, atol=1e-4)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 3), st.integers(0, 99))
def test_limits_of_packed_sequences_do_not_fall(counts: list[int], window: int, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    others = torch.randint(0, 9, (len(counts),), generator=rng)
    cu_q, cu_k = (torch.cat([torch.zeros(1, dtype=torch.int64), t.cumsum(0)])
                  for t in (torch.tensor(counts), others))  # fmt: skip
    made = cs.ops.packed_limits(
        cu_q, cu_k, rows=sum(counts) + 2, is_causal=True, window=window or None
    )
    for t in made.values():
        assert t.dtype == torch.int32 and not (t.diff() < 0).any()


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a window that is not causal": ({"window": 4}, "attention(window=4, is_causal=False)"),
    "a window of three sides": ({"window": (1, 2, 3)}, "attention(window=(1, 2, 3), is_causal=F"),
    "a side that is no number": ({"window": (1, True)}, "how many a row sees before and behind"),
    "an empty window": ({"window": 0, "is_causal": True}, "attention(window=0, is_causal=True)"),
    "starts of int64": ({"key_starts": torch.zeros(2, dtype=torch.int64)}, "key_starts is torch.i"),
    "starts of others": ({"key_starts": torch.zeros(3).int()}, "key_starts has shape [3]"),
    "ends of sequences": ({"key_ends": torch.zeros(2).int()}, "key_ends has shape [2]"),
}


@pytest.mark.parametrize("name", WRONG)
def test_calls_that_are_refused(name: str) -> None:
    options, why = WRONG[name]
    q = torch.randn(2, 2, 5, 8)
    with pytest.raises(CutesuperError) as error:
        cs.ops.attention(q, q, q, **options)
    assert why in str(error.value)


@pytest.mark.parametrize("name", CASES)
def test_one_key(name: str) -> None:
    """No backward pass sums along rows then."""
    c = case(name, *sides(1, 2, 2, 3, 1, 8, torch.float32, "cpu"))
    ours, wants = ([t.clone().requires_grad_() for t in (c.query, c.key, c.value)] for _ in "ab")
    found = torch.autograd.grad(call(c, *ours).sum(), ours)
    for mine, other in zip(found, torch.autograd.grad(exact(c, *wants).sum(), wants), strict=True):
        torch.testing.assert_close(mine, other)


def test_compilers_see_the_operator() -> None:
    own = sides(2, 2, 2, 7, 9, 8, torch.float32, "cpu")
    c = case("left padding in a window", *own, 3)
    compiled = torch.compile(lambda *t: call(c, *t), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*own), call(c, *own))


# ------------------------------------------------------------------------------------- block masks


def _mask(seen: Any) -> Any:
    i, j = torch.arange(12)[:, None], torch.arange(16)
    return seen(i, j).expand(12, 16)[None, None]


RANGES: dict[str, Any] = {
    "a window on both sides": lambda i, j: (j - i).abs() < 3,
    "a prefix": lambda i, j: (j <= i) | (j < 5),
    "documents": lambda i, j: i // 5 == j // 5,
    "rows that see nothing": lambda i, j: (i // 5 == j // 5) & (i % 5 > 1),
}
OTHERS: dict[str, Any] = {
    "every second key": lambda i, j: j % 2 == i % 2,
    "from the end": lambda i, j: j <= 11 - i,
}


@pytest.mark.parametrize("name", RANGES)
def test_masks_that_are_ranges(name: str) -> None:
    mask, j = _mask(RANGES[name]), torch.arange(16)
    found = _ranges(mask)
    assert found is not None
    assert torch.equal((j >= found["starts"]) & (j < found["ends"]), mask)


@pytest.mark.parametrize("name", OTHERS)
def test_masks_that_are_none(name: str) -> None:
    assert _ranges(_mask(OTHERS[name])) is None
