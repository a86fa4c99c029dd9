"""Attention of models in training, through the backend: both passes are regions, whichever of
PyTorch's operators they come from."""

from __future__ import annotations

import re
from operator import getitem
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from cutesuper.search.region import SearchOptions
from cutesuper.search.search import search
from cutesuper.skeletons.planner import make_plan
from cutesuper.targets import H200
from cutesuper.torch.aten.attention import without_seeds
from cutesuper.torch.compile.partition import Partition, partition
from cutesuper.torch.compile.region import Region
from tests.backends import MODELS, compiled, gradients, judge_gradients

_ATEN = torch.ops.aten


class Repeated(nn.Module):
    """Keys and values repeated for the query heads of a group, as in ``repeat_kv``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 2 * width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, width = x.shape
        inner = width // 4
        q, k, v = self.qkv(x).split((width, width // 2, width // 2), -1)

        def heads(t: torch.Tensor, each: int) -> torch.Tensor:
            t = t.view(b, n, -1, inner).transpose(1, 2)[:, :, None]
            return t.expand(b, -1, each, n, inner).reshape(b, 4, n, inner)

        y = functional.scaled_dot_product_attention(
            heads(q, 1), heads(k, 2), heads(v, 2), is_causal=True, scale=0.3
        )
        return y.transpose(1, 2).reshape(b, n, width)


class Full(nn.Module):
    """One head, everything visible, queries that are keys as well."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = x[:, None]
        return functional.scaled_dot_product_attention(q, q * 2, q * 0.5).squeeze(1)


class Masked(nn.Module):
    """A mask made of positions, and padding in front of the second sequence."""

    def __init__(self, width: int, window: int | None) -> None:
        super().__init__()
        self.qkv, self.window = nn.Linear(width, 3 * width, bias=False), window

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, _ = x.shape
        places, first = torch.arange(n), torch.tensor([0, 2])
        seen = places <= places[:, None]
        if self.window:
            seen = seen & (places > places[:, None] - self.window)
        mask = seen & (places >= first[:, None])[:, None, None]
        mask = mask | torch.eye(n, dtype=torch.bool)  # no row is hidden as a whole
        q, k, v = self.qkv(x).view(b, n, 3, 4, -1).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return y.transpose(1, 2).reshape(b, n, -1)


TRAINED = {
    "groups of heads": MODELS["attention"][0],
    "block": MODELS["block"][0],
    "repeated keys": Repeated,
    "full": lambda width: Full(),
    "padding": lambda width: Masked(width, window=None),
    "window": lambda width: Masked(width, window=3),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", TRAINED)
def test_both_passes_are_regions(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = TRAINED[name](64).to(dtype)
    x = torch.randn(2, 12, 64).to(dtype)
    call, reports = compiled(model)
    found = gradients(model, call, x)
    assert [r.phase for r in reports] == ["forward", "backward"]
    assert not [o.reason for r in reports for o in r.outside if "attention" in o.reason]
    assert all(r.verdict.taken for report in reports for r in report.regions)
    judge_gradients(model, found, x)


# --------------------------------------------------------------------------- PyTorch's operators


def both_passes(
    kind: str, rows: int = 64, dropout: float = 0.0, mask: str = "causal"
) -> fx.GraphModule:
    """One of PyTorch's operators for GPUs, and its backward pass with inputs of its own, as if it
    were another graph; query heads in pairs share keys. The mask is "causal", the same or a window
    of 16 as a tensor made of "positions" or of a "window", or a "tensor" from outside."""
    forward = getattr(_ATEN, f"_scaled_dot_product_{kind}_attention").default
    backward = getattr(_ATEN, f"_scaled_dot_product_{kind}_attention_backward").default
    graph = fx.Graph()
    with FakeTensorMode():
        shapes = {n: (2, 4 if n in ("query", "grad_out") else 2, rows, 64)
                  for n in ("query", "key", "value", "grad_out")}  # fmt: skip
        given: dict[str, Any] = {
            n: given_like(graph, torch.empty(shape, dtype=torch.bfloat16, device="cuda"))
            for n, shape in shapes.items()
        }
        bias = None if mask == "causal" else bias_of(graph, mask, rows)
        given |= {"attn_bias": bias, "compute_log_sumexp": True, "dropout_p": dropout}
        given |= {"is_causal": bias is None, "grad_input_mask": [True, True, True, False]}
        made = called(graph, forward, given)
        kept = [item(graph, made, i) for i in range(len(made.meta["val"]))]
        names = [a.name for a in forward._schema.returns]
        results = [given_like(graph, t.meta["val"]) if isinstance(t, fx.Node) else t for t in kept]
        given |= dict(zip(names, results, strict=True))
        given |= {"out": results[0], "logsumexp": results[1], "grad_out_": given["grad_out"]}
        if kind == "flash":
            given |= {"philox_seed": given["rng_state"], "philox_offset": given["unused"]}
        last = called(graph, backward, given)
        used = [n for n in kept if isinstance(n, fx.Node)]
        graph.output((*used, *(item(graph, last, i) for i in range(3))))
    return fx.GraphModule({}, graph)


def bias_of(graph: fx.Graph, mask: str, rows: int) -> fx.Node:
    """A mask that is added to the scores, as transformers builds it."""

    def call(operator: Any, *args: Any, **options: Any) -> fx.Node:
        node = graph.call_function(operator, args, options)
        own = fx.map_arg((args, options), lambda n: n.meta["val"])
        node.meta["val"] = operator(*own[0], **own[1])
        return node

    if mask == "tensor":
        like = torch.empty(2, 1, rows, rows, dtype=torch.bfloat16, device="cuda")
        return call(_ATEN.expand.default, given_like(graph, like), (2, 4, rows, rows))
    places = call(_ATEN.arange.default, rows, device="cuda")
    row, column = (call(_ATEN.view.default, places, shape) for shape in ((rows, 1), (1, rows)))
    seen = call(_ATEN.le.Tensor, column, row)
    if mask == "window":
        first = call(_ATEN.sub.Tensor, row, 16)
        seen = call(_ATEN.bitwise_and.Tensor, call(_ATEN.gt.Tensor, column, first), seen)
    zero, hidden = (
        call(_ATEN.full.default, (), x, dtype=torch.bfloat16, device="cuda")
        for x in (0.0, -torch.inf)
    )
    return call(
        _ATEN.expand.default, call(_ATEN.where.self, seen, zero, hidden), (2, 4, rows, rows)
    )


def given_like(graph: fx.Graph, val: torch.Tensor) -> fx.Node:
    """An input."""
    node = graph.placeholder(f"x{len(graph.nodes)}")
    node.meta["val"] = val
    return node


def called(graph: fx.Graph, operator: Any, given: dict[str, Any]) -> fx.Node:
    """A call with those arguments that it takes."""
    schema = [(a.name, a.kwarg_only) for a in operator._schema.arguments]
    args = tuple(given[n] for n, only in schema if not only and n in given)
    node = graph.call_function(operator, args)
    node.meta["val"] = operator(*fx.map_arg(args, lambda n: n.meta["val"]))
    return node


def item(graph: fx.Graph, node: fx.Node, i: int) -> Any:
    """A result: a node for a tensor, and what is no tensor as it is."""
    value = node.meta["val"][i]
    if not isinstance(value, torch.Tensor):
        return value
    found = graph.call_function(getitem, (node, i))
    found.meta["val"] = value
    return found


def parted(module: fx.GraphModule) -> Partition:
    without_seeds(module.graph)
    module.graph.lint()
    return partition(module.graph)


@pytest.mark.parametrize("kind", ["flash", "efficient", "cudnn"])
def test_operators_for_gpus(kind: str) -> None:
    """The same kernel graphs, whichever operator PyTorch has chosen."""
    found = parted(both_passes(kind))
    forward, backward = found.regions
    assert not [n for n in found.refused if "attention" in str(n.target)]
    assert (len(forward.outputs), len(backward.outputs)) == (2, 3)
    for ours, theirs in zip(found.regions, parted(both_passes("flash")).regions, strict=True):
        assert computed(ours) == computed(theirs)


@pytest.mark.parametrize("kind", ["efficient", "cudnn"])
def test_masks_of_positions_are_limits(kind: str) -> None:
    """Neither pass reads a mask that says "causal"; of a window the first key is an input."""
    for mask, fills in (("positions", 0), ("window", 1)):
        found = parted(both_passes(kind, mask=mask))
        forward, backward = found.regions
        assert not [n for n in found.refused if "attention" in str(n.target)]
        for region, tensors in ((forward, 3), (backward, 6)):
            names = [n.operator for n in region.graph.nodes]
            assert "causal_mask" in str(names) or any(
                n.attributes.get("is_causal") for n in region.graph.nodes
            )
            assert names.count("limit_mask") == fills
            assert [o.fill for o in region.inputs].count(None) == tensors


def test_any_mask_is_read_by_both_passes() -> None:
    forward, backward = parted(both_passes("efficient", mask="tensor")).regions
    for region, tensors in ((forward, 4), (backward, 7)):
        assert [n.operator for n in region.graph.nodes].count("hide") == 1
        assert len(region.inputs) == tensors


def computed(region: Region) -> list[str]:
    """The operators of a region, but for the order of dimensions in memory."""
    return [n.operator for n in region.graph.nodes if not n.facets.permutes]


def test_padded_logarithms_and_dropout_stay_pytorchs() -> None:
    for kind, rows, dropout, why in (
        ("efficient", 40, 0.0, "padded|do not compute"), ("flash", 64, 0.5, "drops weights")
    ):  # fmt: skip
        found = parted(both_passes(kind, rows, dropout))
        refused = [w for n, w in found.refused.items() if "attention" in str(n.target)]
        assert len(refused) == 2 and all(re.search(why, w) for w in refused), refused


@pytest.mark.parametrize("mask", ["causal", "window", "tensor"])
def test_the_search_finds_one_kernel_for_each_kind_of_sum(mask: str) -> None:
    kind = "flash" if mask == "causal" else "efficient"
    forward, backward = parted(both_passes(kind, rows=256, mask=mask)).regions
    for region, kernels in (
        (forward, ["AttentionPlan"]), (backward, ["RowPlan", "SumsPlan", "SumsPlan"])
    ):  # fmt: skip
        found = search(region.graph, H200, options=SearchOptions(lowered=True), near=1.02)
        made = found.candidates[0].mugraph
        assert [type(make_plan(s, made.tensors, H200)).__name__ for s in made.steps] == kernels


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["groups of heads", "block", "repeated keys"])
def test_training_on_a_gpu(name: str) -> None:
    torch._dynamo.reset()
    model = TRAINED[name](256).cuda().bfloat16()
    x = torch.randn(2, 96, 256, device="cuda").bfloat16()
    call, reports = compiled(model)
    judge_gradients(model, gradients(model, call, x), x)
    assert not [o.reason for r in reports for o in r.outside if "attention" in o.reason]
