"""Masks that are made of positions become lengths: traced, and compiled by the backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from cutesuper.torch.compile import trace  # noqa: E402
from cutesuper.torch.compile.partition import Partition  # noqa: E402
from cutesuper.torch.compile.region import Region  # noqa: E402
from cutesuper.torch.compile.region_operator import key_of  # noqa: E402
from cutesuper.torch.compile.trial import Sample, lengths_in  # noqa: E402
from cutesuper.verify.numeric import acceptable  # noqa: E402
from tests.backends import compiled  # noqa: E402
from tests.tracing import check, exported, in_parts, randn, traced  # noqa: E402

pytestmark = pytest.mark.filterwarnings("error:.*please report")

#: keys that there is room for
S = 24
Mask = Callable[[Tensor, Tensor], Tensor]


def _keys(p: Tensor) -> Tensor:
    return torch.arange(S, device=p.device)


def _added(q: Tensor, p: Tensor) -> Tensor:
    """The formula of `examples/llama/decode.py`."""
    zeros = torch.zeros(p.shape[0], S, dtype=q.dtype, device=q.device)
    return zeros.masked_fill(_keys(p) > p[:, None], -torch.inf)[:, None, None]


#: a mask of a query and the positions of its sequences
MASKS: dict[str, Mask] = {
    "bool": lambda q, p: (_keys(p) <= p[:, None])[:, None, None],
    "turned": lambda q, p: (p[:, None] >= _keys(p))[:, None, None],
    "lengths": lambda q, p: (_keys(p) < (p + 1)[:, None])[:, None, None],
    "turned lengths": lambda q, p: ((p + 1).view(-1, 1, 1, 1) > _keys(p)),
    "turned not": lambda q, p: ~(p[:, None] < _keys(p))[:, None, None],
    "turned where": lambda q, p: torch.where((p + 1)[:, None] <= _keys(p), -torch.inf, 0.0).to(
        q.dtype)[:, None, None],
    "not": lambda q, p: ~(_keys(p) > p[:, None])[:, None, None],
    "keys from 1": lambda q, p: (torch.arange(1, S + 1) < (p + 2)[:, None])[:, None, None],
    "int32": lambda q, p: (_keys(p).int() <= p.int()[:, None])[:, None, None],
    "int32 lengths": lambda q, p: (_keys(p) < (p + 1).int()[:, None])[:, None, None],
    "for each head": lambda q, p: (_keys(p) <= p[:, None])[:, None, None].expand(
        -1, q.shape[1], -1, -1),
    "added": _added,
    "where": lambda q, p: torch.where(_keys(p) <= p[:, None], 0.0, -torch.inf).to(q.dtype)[
        :, None, None],
    "where tensors": lambda q, p: torch.where(
        (_keys(p) >= (p + 1)[:, None])[:, None, None], q.new_full((), -torch.inf), q.new_zeros(())),
    "aligned": lambda q, p: F.pad(_added(q, p), (0, 8))[..., :S].expand(-1, q.shape[1], -1, -1),
    "limits beyond the keys": lambda q, p: (
        (_keys(p) <= p[:, None]) & (_keys(p) > torch.arange(1) - 3) & (_keys(p) < S)
    )[:, None, None],
    "either hidden": lambda q, p: ~((_keys(p) > p[:, None]) | (_keys(p) < -1))[:, None, None],
    "a count and a position": lambda q, p: (_keys(p) <= (torch.arange(1) + p[:, None]))[
        :, None, None],
    "a difference": lambda q, p: (p[:, None] - _keys(p) >= 0)[:, None, None],
    "a turned difference": lambda q, p: (-(p[:, None] - _keys(p)) < 1)[:, None, None],
}  # fmt: skip


class Decode(nn.Module):
    """Attention of one query of each sequence."""

    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, q: Tensor, k: Tensor, v: Tensor, p: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, self.mask(q, p), enable_gqa=True)


def tensors(batch: int = 3, heads: int = 4, length: int = 1) -> tuple[Tensor, ...]:
    """Queries, keys and values of two heads, positions: the first key, some, all."""
    p = torch.tensor([0, S - 1, 7, 12, S - 2][:batch])
    keys, values = randn(batch, 2, S, 16), randn(batch, 2, S, 16) - 0.2
    return randn(batch, heads, length, 16), keys, values, p


def operators(program: Any) -> list[str]:
    nodes = program.kernel.graph.nodes
    return [n.operator for n in nodes if n.operator not in ("input", "transpose")]


# ------------------------------------------------------------------------------------------ traced


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("name", MASKS)
def test_lengths_in_the_place_of_a_mask(
    monkeypatch: pytest.MonkeyPatch, name: str, heads: int, batch: int
) -> None:
    fn, inputs = Decode(MASKS[name]), tensors(batch, heads)
    program = traced(monkeypatch, fn, inputs)
    graph = program.kernel.graph
    assert operators(program) == ["scaled_dot_product_attention"]
    lengths = graph.nodes[graph.inputs[-1]]
    assert (lengths.shape, lengths.dtype.name) == ((batch,), "int32")
    for shift in (0, 1, 5):
        check(program, fn, (*inputs[:3], (inputs[3] + shift) % S))
    # nothing makes a mask any more, only what makes positions of positions is left
    assert all("add" in line or "_to_copy" in line for line in program.outside)


def _from(p: Tensor, queries: int) -> Tensor:
    """The positions of queries behind those that are in a cache, as transformers counts them."""
    return torch.arange(queries) + p[0]


#: masks that are the same for all sequences, of one query or several
OF_ALL: dict[str, tuple[Mask, int, bool]] = {
    "one position": (lambda q, p: _keys(p) <= p[:1, None], 1, True),
    "behind a cache": (lambda q, p: (_keys(p) + 0 <= _from(p, 1)[:, None])[None, None], 1, True),
    "several queries": (lambda q, p: (_keys(p) <= _from(p, 5)[:, None])[None, None], 5, True),
    "only queries": (lambda q, p: _keys(p) <= torch.arange(5)[:, None], 5, False),
    "a triangle": (lambda q, p: torch.ones(5, S, dtype=torch.bool).tril(), 5, False),
    "a triangle that is added": (lambda q, p: torch.full((5, S), -torch.inf).triu(1), 5, False),
    "outside of a triangle": (lambda q, p: ~torch.ones(5, S, dtype=torch.bool).triu(3), 5, True),
    "a difference": (lambda q, p: torch.arange(5)[:, None] - _keys(p) >= 0, 5, False),
    "a difference of the last queries": (
        lambda q, p: torch.arange(S - 5, S)[:, None] - _keys(p) >= 0, 5, True),
    "a cache and a difference": (lambda q, p: _from(p, 5)[:, None] - _keys(p) >= 0, 5, True),
    "a window of all keys": (
        lambda q, p: (_keys(p) <= torch.arange(5)[:, None])
        & (_keys(p) > torch.arange(5)[:, None] - S), 5, False),
}  # fmt: skip


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", OF_ALL)
def test_one_length_of_all_sequences(
    monkeypatch: pytest.MonkeyPatch, name: str, batch: int
) -> None:
    mask, queries, has_lengths = OF_ALL[name]
    q, k, v, _ = tensors(batch, 4, queries)
    inputs = (q, k, v, torch.tensor([3] * batch))
    program = traced(monkeypatch, Decode(mask), inputs)
    assert operators(program) == ["scaled_dot_product_attention"]
    assert len(program.kernel.graph.inputs) == 3 + has_lengths
    for position in (0, 9, S - queries):
        check(program, Decode(mask), (q, k, v, torch.full((batch,), position)))


def _window(p: Tensor, rows: Tensor, width: int) -> Tensor:
    """Keys up to each row's place, as many as a window has."""
    return (_keys(p) <= rows[..., None]) & (_keys(p) > rows[..., None] - width)


def _apart(p: Tensor, rows: Tensor, first: int, end: int) -> Tensor:
    """Keys by how far they are in front of each row's place."""
    d = rows[..., None] - _keys(p)
    return (d >= first) & (d < end)


#: masks that hide keys in front of one
WINDOWS: dict[str, tuple[Mask, int, list[str]]] = {
    "a step": (lambda q, p: _window(p, p, 4)[:, None, None], 1, ["length", "limit"]),
    "behind a cache": (lambda q, p: _window(p, _from(p, 5), 4), 5, ["length", "limit"]),
    "a prompt": (lambda q, p: _window(p, torch.arange(9), 3), 9, ["causal", "limit"]),
    "a difference": (lambda q, p: _apart(p, torch.arange(9), 0, 3), 9, ["causal", "limit"]),
    "a difference of a step": (
        lambda q, p: _apart(p, p, 0, 4)[:, None, None], 1, ["length", "limit"]),
    "a difference behind a cache": (
        lambda q, p: _apart(p, _from(p, 5), 0, 4), 5, ["length", "limit"]),
    "both sides": (lambda q, p: _apart(p, torch.arange(9), -2, 3), 9, ["length", "limit"]),
    "both sides at once": (lambda q, p: (torch.arange(9)[:, None] - _keys(p)).abs() <= 2, 9,
                           ["length", "limit"]),
    "not both sides": (lambda q, p: torch.where(
        (_keys(p) - torch.arange(9)[:, None]).abs() > 2, -torch.inf, 0.0).to(q.dtype), 9,
        ["length", "limit"]),
    "all but the last": (lambda q, p: torch.arange(S)[:, None] - _keys(p) > -3, S, ["limit"]),
    "both sides of as many": (lambda q, p: (torch.arange(S)[:, None] - _keys(p)).abs() < 4, S,
                              ["limit", "limit"]),
    "a band": (lambda q, p: torch.ones(9, S, dtype=torch.bool).tril()
               & torch.ones(9, S, dtype=torch.bool).triu(-2), 9, ["causal", "limit"]),
    "the lowest number": (lambda q, p: torch.where(
        _window(p, _from(p, 5), 4), 0.0, torch.finfo(torch.float32).min), 5, ["length", "limit"]),
    "what is behind": (lambda q, p: (_keys(p) >= p[:, None])[:, None, None], 1, ["limit"]),
    "padding in front": (lambda q, p: (_keys(p) >= p[:, None])[:, None, None], 9, ["limit"]),
    "added, turned": (lambda q, p: torch.where(
        (_keys(p) <= p[:, None])[:, None, None], -torch.inf, 0.0).to(q.dtype), 1, ["limit"]),
}  # fmt: skip


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", WINDOWS)
def test_limits_in_the_place_of_a_mask(
    monkeypatch: pytest.MonkeyPatch, name: str, batch: int
) -> None:
    mask, queries, masks = WINDOWS[name]
    q, k, v, _ = tensors(batch, 4, queries)
    p = torch.tensor([3, 5, 9][:batch])
    program = traced(monkeypatch, Decode(mask), (q, k, v, p))
    assert [n for n in operators(program) if "_mask" in n] == [f"{n}_mask" for n in masks]
    for shift in (0, 4, S - queries - 9):
        check(program, Decode(mask), (q, k, v, p + max(0, shift)))


@pytest.mark.parametrize("name", ["a step", "a prompt", "what is behind"])
def test_limits_are_tried(name: str) -> None:
    mask, queries, _ = WINDOWS[name]
    [region] = regions(Decode(mask), tensors(3, 4, queries))
    sample = Sample(region, key_of(region.graph))
    assert all(sample.difference(seed) is None for seed in range(3))


def test_queries_behind_a_cache_are_tried_with_keys_that_are_there() -> None:
    mask, queries, _ = OF_ALL["several queries"]
    [region] = regions(Decode(mask), tensors(3, 4, queries))
    assert list(lengths_in(region).values()) == [(0, S - queries)]
    sample = Sample(region, key_of(region.graph))
    assert all(sample.difference(seed) is None for seed in range(3))


@pytest.mark.parametrize("fill", [-torch.inf, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_mask_that_is_added_to_scores(
    monkeypatch: pytest.MonkeyPatch, batch: int, queries: int, fill: float
) -> None:
    """Attention as models write it, with capped scores and keys that heads share."""

    def attend(q: Tensor, k: Tensor, v: Tensor, p: Tensor) -> Tensor:
        seen = _keys(p) <= _from(p, queries)[:, None]
        mask = torch.where(seen, 0.0, fill)[None, None].expand(batch, 1, queries, S)
        k, v = (t[:, :, None].expand(-1, -1, 2, -1, -1).reshape(-1, 4, S, 16) for t in (k, v))
        scores = torch.tanh(q @ k.mT * 0.25 / 2.0) * 2.0 + mask
        return F.softmax(scores, -1) @ v

    q, k, v, _ = tensors(batch, 4, queries)
    inputs = (q, k, v, torch.tensor([3] * batch))
    program = traced(monkeypatch, attend, inputs)
    assert "length_mask" in operators(program)
    for position in (0, 9, S - queries):
        check(program, attend, (q, k, v, torch.full((batch,), position)))


@pytest.mark.filterwarnings("error:.*please report")
def test_a_mask_behind_another_input() -> None:
    """The cache is written at a place that is computed from the mask's limit."""

    def step(q: Tensor, k: Tensor, v: Tensor, p: Tensor) -> Tensor:
        place = torch.arange(1) + p
        k.index_copy_(2, place, q)
        seen = torch.where(torch.arange(S) <= place[:, None], 0.0, torch.finfo(torch.float32).min)
        return F.softmax(q @ k.mT + seen, -1) @ v

    q, k, v = (torch.randn(2, 4, n, 16) for n in (1, S, S))
    compiled = torch.compile(step, backend="cutesuper", options={"take": "all"}, dynamic=False)
    expected, own = k.clone(), k.clone()
    with torch.no_grad():
        found = compiled(q, own, v, torch.tensor(6))
        torch.testing.assert_close(found, step(q, expected, v, torch.tensor(6)))
    assert torch.equal(own, expected)


@pytest.mark.parametrize("name", ["bool", "added", "for each head", "where tensors"])
@pytest.mark.parametrize("heads", [2, 4])
def test_any_batch(monkeypatch: pytest.MonkeyPatch, name: str, heads: int) -> None:
    fn = Decode(MASKS[name])
    batch = torch.export.Dim("batch", min=2)
    program = traced(monkeypatch, fn, tensors(3, heads), dynamic_shapes=({0: batch},) * 4)
    graph = program.kernel.graph
    assert [str(d) for d in graph.nodes[graph.inputs[-1]].shape] == ["M"]
    for n in (3, 2, 5):
        check(program, fn, tensors(n, heads))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_lengths_outside_of_the_keys(monkeypatch: pytest.MonkeyPatch, dtype: Any) -> None:
    """All keys, however large, and none below; PyTorch may make NaN of a row that sees none."""
    fn, (q, k, v, _) = Decode(MASKS["bool"]), tensors(4)
    limits = torch.iinfo(dtype)
    program = traced(monkeypatch, fn, (q, k, v, torch.zeros(4, dtype=dtype)))
    p = torch.tensor([limits.max, S, limits.min, -1], dtype=dtype)
    mine, eager = program(q, k, v, p), fn(q, k, v, p)
    torch.testing.assert_close(mine[:2], eager[:2])
    assert not mine[2:].any()


class Layers(nn.Module):
    """One mask for two layers, with projections in front."""

    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self.q = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(2))
        self.mask = mask

    def forward(self, x: Tensor, k: Tensor, v: Tensor, p: Tensor) -> Tensor:
        mask = self.mask(x, p)
        for layer in self.q:
            q = layer(x).view(-1, 4, 1, 16)
            x = x + F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).flatten(1)
        return x


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", ["bool", "added"])
def test_one_mask_of_several_layers(monkeypatch: pytest.MonkeyPatch, name: str, batch: int) -> None:
    fn, (_, *rest) = Layers(MASKS[name]), tensors(batch)
    inputs = (randn(batch, 64), *rest)
    program = traced(monkeypatch, fn, inputs)
    check(program, fn, inputs)
    assert not program.outside
    regions = [[n.operator for n in r.kernel.graph.nodes] for r in program.regions]
    assert sum(r.count("scaled_dot_product_attention") for r in regions) == 2


# ------------------------------------------------------------------------------------- the backend


class Step(nn.Module):
    """A step of decoding that writes into its cache."""

    def __init__(self, mask: Mask, way: str) -> None:
        super().__init__()
        self.qkv = nn.Linear(64, 128, bias=False)
        self.mask, self.way = mask, way

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, p: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split((64, 32, 32), -1)
        q, k, v = (t.unflatten(-1, (-1, 16)) for t in (q, k, v))
        if self.way == "index":
            rows = torch.arange(len(p), device=p.device)
            keys[rows, :, p], values[rows, :, p] = k, v
        else:  # all sequences at one position
            keys.index_copy_(2, p[:1], k[:, :, None])
            values.index_copy_(2, p[:1], v[:, :, None])
        y = F.scaled_dot_product_attention(
            q[:, :, None], keys, values, self.mask(q, p), enable_gqa=True
        )
        return x + y.flatten(1)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("way", ["index", "index_copy"])
@pytest.mark.parametrize("name", ["bool", "added", "where"])
def test_a_cache_that_is_written_to(name: str, way: str, dynamic: bool) -> None:
    torch.manual_seed(0)
    torch.compiler.reset()
    fn = Step(MASKS[name], way)
    call, reports = compiled(fn, fullgraph=True, dynamic=dynamic)
    for batch in (3, 4):
        _, keys, values, p = tensors(batch)
        x = randn(batch, 64)
        given = [(x, keys.clone(), values.clone(), p) for _ in range(2)]
        exact = tuple(t.double() if t.is_floating_point() else t.clone() for t in given[0])
        with torch.no_grad():
            eager, mine = fn(*given[0]), call(*given[1])
            report = acceptable(mine, fn.double()(*exact), eager, eager.dtype)
            fn.float()
        assert report, report.message
        for a, b in zip(given[0][1:3], given[1][1:3], strict=True):
            torch.testing.assert_close(a, b)
    assert len(reports) == (1 if dynamic else 2)
    for graph in reports:
        assert all(r.verdict.taken for r in graph.regions)
        assert not any("mask" in o.reason or "compares" in o.reason for o in graph.outside)


def test_with_what_inductor_makes_of_the_rest() -> None:
    torch.compiler.reset()
    fn, (_, k, v, p) = Step(MASKS["bool"], "index"), tensors()
    x, caches = randn(3, 64), [(k.clone(), v.clone()) for _ in range(2)]
    call = torch.compile(fn, backend="cutesuper", options={"take": "all"}, fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(call(x, *caches[0], p), fn(x, *caches[1], p))
    torch.testing.assert_close(*caches)


def parts(fn: Any, inputs: Any) -> Partition:
    """Regions; the program of them gives what the original gives."""
    module, found = in_parts(fn, inputs)
    check(module, fn, inputs)
    return found


def regions(fn: Any, inputs: Any) -> tuple[Region, ...]:
    return trace.regions_of(exported(fn, inputs), "fn")[0]


@pytest.mark.parametrize("name", ["bool", "added", "keys from 1"])
def test_what_is_tried_are_lengths_of_at_least_one(name: str) -> None:
    [region] = regions(Decode(MASKS[name]), tensors())
    sample = Sample(region, key_of(region.graph))
    [place] = [i for i, n in enumerate(sample.sources) if not n.meta["val"].is_floating_point()]
    [(offset, most)] = [o.lengths for o in region.inputs if o.lengths]
    drawn = torch.cat([sample.draw(seed)[place] for seed in range(100)]) + offset
    assert most == S
    assert (int(drawn.min()), int(drawn.max())) == (1, S)
    assert sample.difference() is None


@pytest.mark.parametrize("name", ["bool", "added"])
def test_a_length_that_is_wrong_is_found(name: str) -> None:
    [region] = regions(Decode(MASKS[name]), tensors())
    inputs = tuple(
        replace(o, lengths=(o.lengths[0] - 1, S)) if o.lengths else o for o in region.inputs
    )
    wrong = replace(region, inputs=inputs)
    assert "result 0" in (Sample(wrong, key_of(wrong.graph)).difference() or "")


@pytest.mark.parametrize("name", ["bool", "added"])
def test_a_mask_that_others_read_is_made(name: str) -> None:
    class Shared(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, p: Tensor) -> Any:
            mask = MASKS[name](q, p)
            y = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
            return y, torch.where(mask == 0, 1.0, 2.0).to(q.dtype)

    found = parts(Shared(), tensors())
    assert "scaled_dot_product_attention" in [
        n.operator for r in found.regions for n in r.graph.nodes
    ]


# ------------------------------------------------------------------------------------- other masks

#: masks that are no limits, or not alone
OTHERS: dict[str, tuple[Mask, int]] = {
    "from outside": (lambda q, p: MASK, 1),
    "of several queries": (MASKS["bool"], 2),
    "of two conditions": (lambda q, p: MASKS["bool"](q, p) & MASKS["turned"](q, p - 1), 1),
    "the lowest number": (lambda q, p: torch.where(
        MASKS["bool"](q, p), 0.0, torch.finfo(torch.float32).min).to(q.dtype), 1),
    "the lowest number, and a row without keys": (lambda q, p: torch.where(
        _keys(p) < _from(p, 1)[:, None], 0.0, torch.finfo(torch.float32).min).to(q.dtype), 1),
    "two lower limits": (lambda q, p: (
        (_keys(p) >= p[:, None]) & (_keys(p) >= p[:1, None] - 3))[:, None, None], 1),
    "the lowest number in front": (lambda q, p: torch.where(
        _keys(p) >= _from(p, 1)[:, None], 0.0, torch.finfo(torch.float32).min).to(q.dtype), 1),
    "lengths that are differences": (
        lambda q, p: (_keys(p) < (S - p)[:, None])[:, None, None], 1),
    "a triangle of numbers": (lambda q, p: torch.full((3, S), 0.5).tril(), 3),
    "far away": (lambda q, p: (torch.arange(3)[:, None] - _keys(p)).abs() >= 2, 3),
    "the parity of a difference": (
        lambda q, p: (torch.arange(3)[:, None] - _keys(p)) % 2 == 0, 3),
    "every second key": (lambda q, p: (torch.arange(0, 2 * S, 2) <= p[:, None])[:, None, None], 1),
    "heads at positions": (lambda q, p: (_keys(p) <= p[:, None])[None, :, None], 1),
    "positions that differ for heads": (
        lambda q, p: (_keys(p) <= (p[:, None] + torch.arange(4))[:, :, None])[:, :, None], 1),
    "keys in another order": (lambda q, p: (_keys(p).flip(0) <= p[:, None])[:, None, None], 1),
    "positions of floats": (lambda q, p: (_keys(p) <= p.float()[:, None])[:, None, None], 1),
    "padding": (lambda q, p: PADDING[:, None, None], 3),
    "no padding": (lambda q, p: ~PADDING[:, None, None], 3),
    "padding before positions": (lambda q, p: (
        _keys(p) <= _from(p, 3)[:, None]) & PADDING[:, None, None], 3),
    "padding or later": (lambda q, p: torch.where(
        (_keys(p) > _from(p, 3)[:, None]) | ~PADDING[:, None, None], -torch.inf, 0.0), 3),
    "padding, the lowest number": (lambda q, p: torch.where(
        PADDING[:, None, None], 0.0, torch.finfo(torch.float32).min), 3),
    "padding and a window": (lambda q, p: _window(p, p, 4)[:, None, None]
        & PADDING[:, None, None], 1),
    "padding, whatever the row": (lambda q, p: (
        (torch.arange(3) >= 0)[:, None] & PADDING[:, None, None]), 3),
    "padding of heads": (lambda q, p: PADDING[None, :, None] & PADDING[:, None, None], 3),
    "a bias": (lambda q, p: torch.where(PADDING[:, None, None], q[..., :1], -torch.inf), 3),
}  # fmt: skip
MASK = torch.ones(4, 1, 1, S, dtype=torch.bool)
PADDING = torch.arange(S) >= torch.tensor([0, 3, 9, 20])[:, None]


@pytest.mark.parametrize("name", OTHERS)
def test_other_masks_are_read(name: str) -> None:
    mask, length = OTHERS[name]
    fn, inputs = Decode(mask), tensors(4, length=length)
    program, found = in_parts(fn, inputs)
    assert not [n for n in found.refused if "attention" in str(n.target)]
    for shift in (0, 5):
        check(program, fn, (*inputs[:3], (inputs[3] + shift) % S))
