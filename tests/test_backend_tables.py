"""Gradients of embeddings, as compiled models compute them."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import fx, nn  # noqa: E402

from cutesuper.torch.compile import backend, tables  # noqa: E402
from cutesuper.verify.numeric import acceptable  # noqa: E402
from tests.backends import compiled  # noqa: E402

aten = torch.ops.aten
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
