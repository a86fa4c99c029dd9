"""Forms of PyTorch's compiler in compiled models: softmax, divergences, halves that are turned."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import fx, nn  # noqa: E402

from cutesuper.torch.compile.forms import settle_forms  # noqa: E402
from cutesuper.torch.compile.written_turns import settle_turns  # noqa: E402
from tests.backends import compiled, gradients, judge, judge_gradients  # noqa: E402

pytestmark = pytest.mark.filterwarnings("error:.*please report")
aten = torch.ops.aten


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    """Extents that differ from those of an earlier test would be open ones."""
    torch.compiler.reset()


class Attention(nn.Module):
    """Self-attention as it is written by hand."""

    def __init__(self, scale: Any) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Any) -> Any:
        return self.scale(x @ x.mT).softmax(-1) @ x


class Pool(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(16, 1)

    def forward(self, x: Any) -> Any:
        return (self.weight(x).softmax(1) * x).sum(1)


SCALES: dict[str, Any] = {
    "times": lambda s: s * 0.25,
    "divided": lambda s: s / 4.0,
    "negative": lambda s: s * -0.25,
    "capped": lambda s: torch.tanh(s / 5.0) * 5.0,
    "written behind": lambda s: 0.25 * s,
}


@pytest.mark.parametrize("scale", SCALES)
def test_attention_by_hand_is_one_region(scale: str) -> None:
    model = Attention(SCALES[scale])
    x = torch.randn(2, 3, 12, 16).bfloat16()
    call, reports = compiled(model)
    with torch.no_grad():
        judge(model, call(x), x)
    [report] = reports
    assert report.taken == len(report.regions) == 1 and not report.outside


@pytest.mark.parametrize("make", [
    lambda: Attention(SCALES["times"]), lambda: Attention(SCALES["negative"]), Pool,
])  # fmt: skip
def test_gradients(make: Any) -> None:
    model = make().bfloat16()
    x = torch.randn(4, 12, 16).bfloat16()
    call, reports = compiled(model)
    judge_gradients(model, gradients(model, call, x), x)
    assert [len(r.outside) for r in reports] == [0, 0]


def test_rows_that_are_not_finite() -> None:
    model = Attention(SCALES["times"])
    x = torch.randn(2, 12, 16)
    x[0, 3, 5] = torch.inf
    call, _ = compiled(model)
    with torch.no_grad():
        torch.testing.assert_close(call(x), model(x), equal_nan=True)


class Divergence(nn.Module):
    def forward(self, x: Any) -> Any:
        target = (x * 2).softmax(-1)
        return torch.xlogy(target, target) - target * x.log_softmax(-1)


def test_divergences_are_one_region() -> None:
    model = Divergence()
    x = torch.randn(12, 40).bfloat16()
    call, reports = compiled(model)
    with torch.no_grad():
        judge(model, call(x), x)
        x[3, 5] = torch.nan
        found, expected = call(x), model(x)
    assert found.isnan().equal(expected.isnan()) and found.isnan().any()
    [report] = reports
    assert report.taken == len(report.regions) == 1 and not report.outside


class Turned(nn.Module):
    """Rotary positions, of halves as they are, and of a part of each row."""

    def __init__(self, part: int) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Any, cos: Any, sin: Any) -> Any:
        y = x if self.part == x.shape[-1] else x[..., : self.part]
        a, b = y.chunk(2, -1)
        y = y * cos + torch.cat((-b, a), -1) * sin
        return y if self.part == x.shape[-1] else torch.cat((y, x[..., self.part :]), -1)


@pytest.mark.parametrize("part", [16, 12])
def test_halves_are_turned_back(part: int) -> None:
    model = Turned(part)
    x, cos, sin = (torch.randn(2, 3, 8, n, requires_grad=True) for n in (16, part, part))
    call, reports = compiled(model)
    weights = torch.linspace(-1, 1, 16)
    found = torch.autograd.grad((call(x, cos, sin) * weights).sum(), (x, cos, sin))
    wanted = torch.autograd.grad((model(x, cos, sin) * weights).sum(), (x, cos, sin))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)
    scattered = [o.reason for o in reports[1].outside if "slice_scatter" in o.reason]
    assert bool(scattered) == (part < 16)


def scattered(begin: int, zeros: float, sign: Any) -> fx.Graph:
    """Parts of a row that are put into a filled tensor each, and added."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    graph = fx.Graph()
    with FakeTensorMode():
        row, half = torch.empty(4, 8), torch.empty(4, 8 - begin)
        x, y = graph.placeholder("x"), graph.placeholder("y")
        x.meta["val"], y.meta["val"] = torch.empty(4, begin), half
        filled = graph.call_function(aten.full.default, ([4, 8], zeros))
        turned = graph.call_function(sign, (y,))
        left = graph.call_function(aten.slice_scatter.default, (filled, x, 1, 0, 4))
        right = graph.call_function(aten.slice_scatter.default, (filled, turned, 1, begin, 8))
        both = graph.call_function(aten.add.Tensor, (right, left))
        for node, value in ((filled, row), (turned, half), (left, row), (right, row), (both, row)):
            node.meta["val"] = value
        graph.output(both)
    return graph


@pytest.mark.parametrize(
    ("begin", "zeros", "sign", "changed"),
    [(4, 0, aten.neg.default, True), (4, 1, aten.neg.default, False),
     (4, 0, aten.abs.default, False), (5, 0, aten.neg.default, False)],
)  # fmt: skip
def test_only_halves_in_zeros_are_turned(
    begin: int, zeros: float, sign: Any, changed: bool
) -> None:
    graph = scattered(begin, zeros, sign)
    settle_forms(graph)
    graph.lint()
    assert any(n.target is aten.cat.default for n in graph.nodes) == changed


class Halves(nn.Module):
    """Halves of rows made of both with factors of a half, as in rotary positions, and otherwise."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Any, cos: Any, sin: Any) -> Any:
        a, b = x.chunk(2, dim=-1)
        parts = {
            "forth": lambda: (a * cos - b * sin, a * sin + b * cos),
            "other order": lambda: (cos * a - sin * b, b * cos + sin * a),
            "back": lambda: (a * cos + b * sin, b * cos - a * sin),
            "both added": lambda: (a * cos + b * sin, b * cos + a * sin),
            "the wrong one subtracted": lambda: (b * sin - a * cos, a * sin + b * cos),
            "one factor": lambda: (a * cos - b * cos, a * sin + b * sin),
            "one half": lambda: (a * cos - a * sin, b * sin + b * cos),
            "halves in the other place": lambda: (b * cos - a * sin, b * sin + a * cos),
        }
        return torch.cat(parts[self.kind](), dim=-1)


@pytest.mark.parametrize(
    ("kind", "turned"),
    [("forth", True), ("other order", True), ("back", True), ("both added", True),
     ("the wrong one subtracted", True), ("one factor", False), ("one half", False),
     ("halves in the other place", True)],
)  # fmt: skip
def test_halves_that_are_made_of_both_are_those_of_whole_rows(kind: str, turned: bool) -> None:
    """Bits do not change. Factors of one half that have other shapes than each other stay."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    given = torch.randn(2, 4, 8), torch.randn(2, 1, 4), torch.randn(4)
    model = Halves(kind)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        traced = make_fx(model)(*map(mode.from_tensor, given))
    settle_turns(traced.graph)
    traced.graph.eliminate_dead_code()
    traced.graph.lint()
    traced.recompile()
    assert torch.equal(traced(*given), model(*given))
    negations = [n for n in traced.graph.nodes if n.target is aten.neg.default]
    assert bool(negations) == turned


def choice(other: bool) -> fx.Graph:
    """A choice between two forms by whether scores are finite, or whether something else is."""
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    largest = graph.call_function(aten.amax.default, (x, [-1], True))
    written = graph.call_function(aten.sub.Tensor, (x, largest))
    stable = graph.call_function(aten.mul.Tensor, (written, 1))
    size = graph.call_function(aten.abs.default, (y if other else x,))
    finite = graph.call_function(aten.ne.Scalar, (size, torch.inf))
    every = graph.call_function(aten.all.dim, (finite, -1, True))
    graph.output(graph.call_function(aten.where.self, (every, stable, written)))
    return graph


def test_other_choices_stay() -> None:
    for other in (True, False):
        graph = choice(other)
        settle_forms(graph)
        assert any(n.target is aten.where.self for n in graph.nodes) == other
        graph.lint()


class Clamped(nn.Module):
    """Rotary positions of heads that were changed in place before, and are shown several times."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(24, 32, bias=False)

    def forward(self, x: Any, cos: Any, sin: Any) -> Any:
        y = self.project(x)
        y.clamp_(min=-0.5, max=0.5)
        heads = y.unflatten(-1, (4, 8)).transpose(1, 2)
        a, b = heads[..., :4], heads[..., 4:]
        return heads * cos + torch.cat((-b, a), -1) * sin


def test_views_behind_a_change_in_place_are_one() -> None:
    x, cos, sin = torch.randn(2, 3, 24), *torch.randn(2, 3, 8)
    model = Clamped()
    call, reports = compiled(model)
    with torch.no_grad():
        torch.testing.assert_close(call(x, cos, sin), model(x, cos, sin))
    assert not reports[0].outside
    assert len(reports[0].regions) == 2


class Packed(nn.Module):
    """Queries, and the one head of keys and values beside them, that an index takes."""

    def forward(self, x: Any, w: Any, cos: Any) -> Any:
        heads = (x @ w).unflatten(-1, (6, 8))
        q, k, v = heads[..., :-2, :], heads[..., [-2], :], heads[..., [5], :]
        return (q * cos).transpose(1, 2), (k * cos).transpose(1, 2), v.transpose(1, 2) * 2.0


def test_parts_of_one_element_are_ranges() -> None:
    given = torch.randn(2, 3, 24), torch.randn(24, 48), torch.randn(2, 3, 1, 8)
    call, reports = compiled(Packed())
    with torch.no_grad():
        for found, wanted in zip(call(*given), Packed()(*given), strict=True):
            torch.testing.assert_close(found, wanted)
    assert not any("index" in o.reason for o in reports[0].outside)


def test_other_indices_stay() -> None:
    def taken(x: Any) -> Any:
        return x[:, [3, 0]] * 2.0

    x = torch.randn(4, 4, 8)
    call, reports = compiled(taken)
    with torch.no_grad():
        torch.testing.assert_close(call(x), taken(x))
    assert any("index" in o.reason for o in reports[0].outside)
