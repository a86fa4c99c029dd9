"""Integers that depend on no input: what masks are made of is known when a model is compiled."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import fx, nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.nn import functional  # noqa: E402

from cutesuper.torch import internals  # noqa: E402
from cutesuper.torch.compile import backend  # noqa: E402
from cutesuper.torch.compile.constants import settle_constants  # noqa: E402
from cutesuper.torch.compile.options import read_options  # noqa: E402
from tests.backends import compiled, gradients, judge_gradients  # noqa: E402

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    """Extents that differ from those of an earlier test would be open ones."""
    torch.compiler.reset()


def documents(positions: Any) -> Any:
    """The number of the packed sequence that each token belongs to, from its position."""
    before = positions[:, :1] - 1
    return (torch.diff(positions, prepend=before, dim=-1) != 1).cumsum(-1)


class Packed(nn.Module):
    """Attention within packed sequences, as transformers writes it where nobody gave a mask."""

    def __init__(self, positions: Any = None) -> None:
        super().__init__()
        self.register_buffer("positions", positions)
        self.inner = nn.Linear(64, 64)

    def forward(self, x: Any) -> Any:
        b, n, width = x.shape
        counted = torch.arange(n, device=x.device)[None].expand(b, -1)
        positions = counted if self.positions is None else self.positions
        number, batch = documents(positions), torch.arange(b, device=x.device)[:, None, None, None]
        rows, columns = counted[0][None, None, :, None], counted[0][None, None, None]
        mask = (number[batch, rows] == number[batch, columns]) & (columns <= rows)
        x = self.inner(x).view(b, n, 2, width // 2).transpose(1, 2)
        y = functional.scaled_dot_product_attention(x, x * 2, x, attn_mask=mask)
        return y.transpose(1, 2).reshape(b, n, width)


def attention_of(model: nn.Module, x: Any) -> list[Any]:
    """The regions with attention of both passes."""
    seen: list[Any] = []
    partition = backend.partition

    def watched(graph: fx.Graph, **options: Any) -> Any:
        found = partition(graph, **options)
        seen.extend(r for r in found.regions if any(n.operator == "exp" for n in r.graph.nodes))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "partition", watched)
        given = partial(
            backend.compile_graph, options=read_options({"take": "modelled", "target": "h200"}),
            finish=internals.run_eagerly,
        )  # fmt: skip
        patch.setattr(backend, "decide", lambda regions, options, meanwhile: [])
        torch.compile(model, backend=given, fullgraph=True)(x).sum().backward()
    return seen


@pytest.mark.parametrize("grad", [False, True])
def test_sequences_that_nobody_packed_are_causal(grad: bool) -> None:
    """Neither pass reads a mask, and nothing of it is kept for the backward pass."""
    found = attention_of(Packed(), torch.randn(2, 32, 64, requires_grad=grad))
    assert len(found) == 2
    for region in found:
        assert "causal_mask" in [n.operator for n in region.graph.nodes]
        assert not [o for o in region.inputs if not o.node.meta["val"].is_floating_point()]


def test_packed_sequences_keep_their_mask() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 7]])
    for region in attention_of(Packed(positions), torch.randn(2, 8, 64)):
        assert "hide" in [n.operator for n in region.graph.nodes]


def test_gradients_with_and_without_packed_sequences() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 7]])
    for model in (Packed(), Packed(positions)):
        x = torch.randn(2, 8, 64)
        call, reports = compiled(model)
        judge_gradients(model, gradients(model, call, x), x)
        assert len(reports) == 2


class Repeated(nn.Module):
    """Heads of keys and values that are repeated for the query heads of their group."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.value = nn.Linear(64, 32), nn.Linear(64, 32)

    def forward(self, x: Any) -> Any:
        b, n, width = x.shape
        q = (2 * x).view(b, n, 4, width // 4).transpose(1, 2)

        def repeated(t: Any) -> Any:
            t = t.reshape(b, n, 2, 1, width // 4).expand(-1, -1, -1, 2, -1)
            return t.reshape(b, n, 4, width // 4).transpose(1, 2)

        k, v = repeated(self.key(x)), repeated(self.value(x))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(1, 2).reshape(b, n, width)


def test_repeated_heads_are_read_where_they_are() -> None:
    """The backward pass repeats them again, so that nothing keeps the copies."""
    model, x = Repeated(), torch.randn(2, 16, 64)
    forward, backward = attention_of(model, x)
    for region in (forward, backward):
        sizes = [o.node.meta["val"].numel() for o in region.inputs]
        assert sizes.count(2 * 16 * 32) == 2 and max(sizes) == 2 * 16 * 64
    call, _ = compiled(model)
    judge_gradients(model, gradients(model, call, x), x)


# --------------------------------------------------------------------------------- the pass alone


def traced(function: Any, *given: Any) -> fx.GraphModule:
    with FakeTensorMode() as mode:
        return make_fx(function)(*map(mode.from_tensor, given))


FUNCTIONS: dict[str, Any] = {
    "positions": lambda x: x + torch.arange(4, 12)[None].expand(3, 8),
    "differences": lambda x: x + torch.arange(8).diff(prepend=torch.full((1,), -1)),
    "reversed": lambda x: x + torch.arange(8).flip(0),
    "columns": lambda x: x[torch.arange(3)[:, None].expand(3, 2), torch.ones(2).long()],
    "types": lambda x: x + (torch.arange(8, dtype=torch.int32) + 2**20) // 2**18,
    "shifted": lambda x: x * (torch.arange(8).roll(1) > 3),
    "large": lambda x: (x[0, 0] + (torch.ones(2048, 1024).long() * 3)[:, :9]) * 2,
    "a result": lambda x: (x + 1, torch.arange(8).view(2, 4).t().cumsum(1)),
    "nothing": lambda x: x[torch.arange(0)],
    "random": lambda x: x + torch.randint(0, 9, (8,)) * 0,
    "the input": lambda x: x * (x > 0).cumsum(-1),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_stay(name: str) -> None:
    x = torch.randn(3, 8)
    want = FUNCTIONS[name](x)
    module = traced(FUNCTIONS[name], x)
    settle_constants(module.graph)
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.recompile()
    found = module(x)
    torch.testing.assert_close(found, want, rtol=0, atol=0)
    pairs = zip(*(t if isinstance(t, tuple) else (t,) for t in (found, want)), strict=True)
    assert all(a.stride() == b.stride() for a, b in pairs)


def test_fake_values_say_what_nodes_make() -> None:
    module = traced(FUNCTIONS["positions"], torch.randn(3, 8))
    settle_constants(module.graph)
    module.graph.eliminate_dead_code()
    values = dict[fx.Node, Any]()

    class Run(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            values[n] = super().run_node(n)
            return values[n]

    Run(module).run(torch.randn(3, 8))
    for node, value in values.items():
        if node.op == "call_function":
            like = node.meta["val"]
            assert (like.shape, like.stride(), like.dtype) == (
                value.shape, value.stride(), value.dtype
            )  # fmt: skip


def test_counted_places_are_one_node() -> None:
    def positions(x: Any) -> Any:
        return x + torch.cat([torch.arange(4), torch.arange(4) + 4])

    module = traced(positions, torch.randn(3, 8))
    settle_constants(module.graph)
    module.graph.eliminate_dead_code()
    names = [str(n.target) for n in module.graph.nodes if n.op == "call_function"]
    assert not any("cat" in n for n in names)
    assert sum("iota" in n or "arange" in n for n in names) == 1


# ------------------------------------------------------------------------- inputs stored otherwise


def test_fake_tensors_follow_padded_inputs() -> None:
    """Inductor pads rows of what a forward pass keeps: views of it have other strides then."""
    module = traced(lambda x: x[:, 1:].t(), torch.randn(4, 9))
    [given] = module.graph.find_nodes(op="placeholder")
    last = module.graph.output_node().args[0]
    old = given.meta["val"]
    with old.fake_mode:
        padded = torch.empty(4, 16)[:, :9]
    internals.follow_inputs(module, [padded])
    assert given.meta["val"].stride() == (16, 1)
    assert isinstance(last, fx.Node) and last.meta["val"].stride() == (1, 16)


# ----------------------------------------------------------------------------- strides of results

RESULTS: dict[str, Any] = {
    "one in the end": lambda x: x.logsumexp(-1, keepdim=True),
    "one in the middle": lambda x: x.logsumexp(1, keepdim=True),
    "turned": lambda x: x.transpose(1, 2).softmax(-1),
    "turned, one in the end": lambda x: x.transpose(1, 2).softmax(-1).amax(-1, keepdim=True),
    "channels last": lambda x: x[:1].transpose(1, 3).softmax(-1) * 2,
    "turned, with ones around": lambda x: x.transpose(1, 2).softmax(-1)[None, :, :, None],
}  # fmt: skip


@pytest.mark.parametrize("name", RESULTS)
def test_strides_of_ones_are_pytorchs(name: str) -> None:
    """cuDNN refuses logarithms of sums whose last dimension, of extent 1, has another stride."""
    x = torch.randn(4, 6, 3, 16)
    call, _ = compiled(RESULTS[name])
    found, want = call(x), RESULTS[name](x)
    assert found.stride() == want.stride()
    torch.testing.assert_close(found, want)
