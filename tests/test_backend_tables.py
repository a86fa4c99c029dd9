"""Gradients of embeddings and losses, as compiled models compute them."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import fx, nn  # noqa: E402

from cutesuper.torch.compile import backend, tables  # noqa: E402
from cutesuper.torch.compile.forms import settle_forms  # noqa: E402
from cutesuper.torch.compile.maker import Maker  # noqa: E402
from cutesuper.verify.numeric import acceptable  # noqa: E402
from tests.backends import compiled  # noqa: E402

aten, prims = torch.ops.aten, torch.ops.prims
pytestmark = pytest.mark.filterwarnings("error:.*please report")


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    torch.compiler.reset()


class Words(nn.Module):
    """The loss of the next words, from an embedding and a head that may share a weight."""

    def __init__(self, words: int, tied: bool, padding: int | None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, 16, padding_idx=padding)
        self.head = nn.Linear(16, words, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Any) -> Any:
        x = torch.tanh(self.embedding(tokens))
        targets = tokens.roll(-1, -1).flatten()
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), targets, ignore_index=7)


@pytest.fixture
def put(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For each graph the number of elements of what rows are added to."""
    found: list[int] = []
    adds = (tables._put, aten._unsafe_masked_index_put_accumulate.default, aten.index_put.default)

    def settle(graph: fx.Graph) -> None:
        own(graph)
        graph.eliminate_dead_code()
        added = (n.meta["val"] for n in graph.nodes if n.target in adds)
        found.extend(t.numel() for t in added if t.dtype is torch.float32)

    own = tables.settle_tables
    monkeypatch.setattr(backend, "settle_tables", settle)
    return found


@pytest.mark.parametrize("padding", [None, 7])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("words", [400, 40])
def test_few_rows_are_added_to_a_table(
    put: list[int], words: int, tied: bool, padding: int | None
) -> None:
    """Words that occur several times, and one that does not count; with 40 words all are added."""
    torch.manual_seed(0)
    model = Words(words, tied, padding).bfloat16()
    tokens = torch.randint(0, 20, (4, 16))
    tokens[0] = 7
    call, _ = compiled(model, take="modelled")
    exact, eager = copy.deepcopy(model).double(), copy.deepcopy(model)
    for loss in (call(tokens), exact(tokens), eager(tokens)):
        loss.backward()
    ours, want, plain = (m.embedding.weight.grad for m in (model, exact, eager))
    report = acceptable(ours, want, plain, torch.bfloat16)
    assert report, report.message
    assert put == [(64 if words == 400 else words) * 16]


def test_all_rows_are_added_where_the_order_must_be_the_same(put: list[int]) -> None:
    model = Words(400, True, None).bfloat16()
    torch.use_deterministic_algorithms(True)
    try:
        compiled(model, take="modelled")[0](torch.randint(0, 20, (4, 16))).backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert put == [400 * 16]


ROWS, COLUMNS = 6, 10


def named(
    value: float, other: float, *, dim: int = 1, step: int = 1, keeps: bool = True
) -> fx.GraphModule:
    """Sums of rows of numbers that one label each names, times a number of each row."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    graph = fx.Graph()
    label, factor = graph.placeholder("label"), graph.placeholder("factor")
    with FakeTensorMode():
        label.meta["val"] = torch.empty(ROWS, 1, dtype=torch.int64)
        factor.meta["val"] = torch.empty(ROWS, 1)
    make = Maker(graph, factor)
    new = make.call
    options = {"start": 0, "step": step, "dtype": torch.int64, "requires_grad": False}
    places = new(prims.iota.default, COLUMNS, **options, device=torch.device("cpu"))
    places = new(aten.view.default, places, [1, COLUMNS])
    wide = new(aten.expand.default, label, [ROWS, COLUMNS])
    numbers = (make.full([], torch.float32, n) for n in (value, other))
    one = new(aten.where.self, new(aten.eq.Tensor, wide, places), *numbers)
    graph.output(new(aten.sum.dim_IntList, new(aten.mul.Tensor, one, factor), [dim], keeps))
    return fx.GraphModule({}, graph)


@pytest.mark.parametrize(("how", "changed"), [
    ({}, True), ({"dim": 0}, False), ({"step": 2}, False), ({"other": 1.0}, False),
    ({"keeps": False}, False),
])  # fmt: skip
def test_the_sum_of_one_named_element(how: dict[str, Any], changed: bool) -> None:
    """A label that names no element gives 0."""
    gm = named(**{"value": -2.0, "other": 0.0} | how)
    label = torch.tensor([[0], [9], [3], [-100], [10], [-1]])
    factor = torch.randn(ROWS, 1)
    want = gm(label, factor)
    settle_forms(gm.graph)
    gm.graph.eliminate_dead_code()
    gm.graph.lint()
    gm.recompile()
    assert torch.equal(gm(label, factor), want)
    assert any(n.target is aten.sum.dim_IntList for n in gm.graph.nodes) != changed


@pytest.mark.gpu
@pytest.mark.parametrize("tied", [True, False])
def test_words_that_occur_often_on_a_gpu(tied: bool) -> None:
    """Ten places of each word are added by as many threads at a time."""
    torch.manual_seed(0)
    model = Words(4000, tied, None).bfloat16().cuda()
    tokens = torch.randint(0, 50, (8, 64), device="cuda")
    exact, eager = copy.deepcopy(model).double(), copy.deepcopy(model)
    call = torch.compile(model, backend="cutesuper")
    for loss in (call(tokens), exact(tokens), eager(tokens)):
        loss.backward()
    ours, want, plain = (m.embedding.weight.grad for m in (model, exact, eager))
    report = acceptable(ours, want, plain, torch.bfloat16)
    assert report, report.message
