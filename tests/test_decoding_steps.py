"""A decoding step of a compiled model as the GPU gets it: caches that change where they lie,
integers computed once, kernels that follow each other."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import fx  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from cutesuper.torch.compile import backend  # noqa: E402
from cutesuper.torch.compile.counters import settle_counters  # noqa: E402
from cutesuper.torch.compile.options import read_options  # noqa: E402
from cutesuper.torch.compile.partition import unwritten  # noqa: E402
from cutesuper.torch.compile.region_operator import (  # noqa: E402
    program_of,
    region,
    region_in_place,
)
from cutesuper.torch.compile.report import GraphReport  # noqa: E402
from cutesuper.torch.internals import run_eagerly  # noqa: E402
from cutesuper.verify.numeric import acceptable  # noqa: E402

aten = torch.ops.aten
Graphs = list[fx.Graph]


def step_of(call: Any, given: dict[str, Any]) -> tuple[Any, fx.Graph, GraphReport]:
    """The result of a compiled function, its one graph with calls of regions, and the report."""
    graphs: Graphs = []
    reports: list[GraphReport] = []

    def finish(gm: Any, inputs: Any, **rest: Any) -> Any:
        graphs.append(gm.graph)
        return run_eagerly(gm, inputs, **rest)

    compiled = partial(
        backend.compile_graph, options=read_options({"take": "all"}), observe=reports.append,
        finish=finish,
    )  # fmt: skip
    torch.compiler.reset()
    with torch.no_grad():
        result = torch.compile(call, backend=compiled)(**given)
    [graph], [report] = graphs, reports
    return result, graph, report


def calls(graph: fx.Graph, *targets: Any) -> list[fx.Node]:
    return [n for n in graph.nodes if n.target in targets]


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_step_of_a_model(family: str, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from tests import families

    monkeypatch.setattr(families, "BATCH", batch)
    monkeypatch.setattr(families, "PADDING", 0)
    monkeypatch.setitem(families.SIZES, "num_hidden_layers", 3)
    model = families.model_of(family)
    expected = families.inputs_of(model, "step")
    with torch.no_grad():
        logits = model(**expected).logits
    given = families.inputs_of(model, "step")
    found, graph, report = step_of(model, given)
    torch.testing.assert_close(found.logits, logits)
    for mine, theirs in zip(given["past_key_values"].layers, expected["past_key_values"].layers,
                            strict=True):  # fmt: skip
        torch.testing.assert_close(mine.keys, theirs.keys)
        torch.testing.assert_close(mine.values, theirs.values)
        assert torch.equal(mine.cumulative_length, theirs.cumulative_length)
    # the frequencies; first products; positions, attention and products for each layer
    assert report.taken == 2 + 3 * 3
    assert len(calls(graph, region_in_place)) == 3
    written = {n.args[0] for n in calls(graph, aten.copy_.default)}
    assert all(not n.meta["val"].is_floating_point() for n in written)
    # positions of all layers go on together, and each length is computed once
    assert len(calls(graph, aten._foreach_add.Scalar)) == 1
    assert not calls(graph, *(t for t in (aten.arange.default, torch.ops.prims.iota.default)))
    assert len(calls(graph, aten.clamp_min.default)) == 1
    programs = [program_of(n.args[0]) for n in calls(graph, region, region_in_place)]
    follow = [p.dependent for p in programs]
    assert follow.count(False) <= 2 and follow == sorted(follow)
    # weights may be loaded early, caches and activations not
    for program in programs:
        own = [program.graph.nodes[i] for i in program.graph.inputs]
        assert not any(own[k].constant for k in program.graph.continued.values())
        multiplies = any(n.operator == "matmul" for n in program.graph.nodes)
        assert any(n.constant for n in own) or not multiplies


class Linears(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)

    def forward(self, x: Any) -> Any:
        return self.second(self.first(x).softmax(-1).cumprod(-1))


def test_the_first_kernels_follow_nothing_of_the_model() -> None:
    x = torch.randn(4, 16)
    model = Linears()
    found, graph, _ = step_of(model, {"x": x})
    torch.testing.assert_close(found, model(x))
    launches = [program_of(n.args[0]).dependent for n in calls(graph, region)]
    assert launches == [False, True]


def test_what_is_written_is_no_constant() -> None:
    graph = fx.Graph()
    a, b, c = (graph.placeholder(n) for n in "abc")
    made = graph.call_function(aten.add.Tensor, (a, b))
    graph.call_function(aten.copy_.default, (b, made))
    graph.output((graph.call_function(aten.exp.default, (c,)),))
    assert unwritten(graph) == {a, c}


# --------------------------------------------------------------------------------------- counters


def traced(function: Any, *given: Any) -> fx.GraphModule:
    """A functional graph of a function that changes its arguments, with fake tensors."""
    from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func

    found: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, _: Any) -> Any:
        found.append(gm)
        return make_boxed_func(gm.forward)

    def dynamo(gm: fx.GraphModule, inputs: Any) -> Any:
        return aot_module_simplified(
            gm, inputs, fw_compiler=keep, keep_inference_input_mutations=True
        )

    torch.compiler.reset()
    with torch.no_grad():
        torch.compile(function, backend=dynamo)(*(t.clone() for t in given))
    return found[0]


def integers(*values: int, dtype: Any = torch.int64) -> Any:
    return torch.tensor(values, dtype=dtype)


def places(n: Any, m: Any, x: Any) -> Any:
    at, beside = torch.arange(1) + n, torch.arange(1) + m
    n += 1
    m += 1
    return x[at], x[beside], torch.arange(1, 2) + n, x * 2


def returned(n: Any, m: Any, x: Any) -> Any:
    at = torch.arange(1) + n
    n += 1
    m += 1
    return at.view(1, 1), x * 2


def two_numbers(n: Any, m: Any, x: Any) -> Any:
    n += 1
    m += 2
    return x + n


def several_elements(n: Any, m: Any, x: Any) -> Any:
    y = torch.arange(2) + n
    n += 1
    y = y + m
    x += 1
    return y


@pytest.mark.parametrize(
    ("function", "together", "ranges"), [(places, 1, 1), (returned, 1, 1), (two_numbers, 0, 0),
                                         (several_elements, 0, 1)],
)  # fmt: skip
def test_counters(function: Any, together: int, ranges: int) -> None:
    given = integers(3), integers(5), torch.randn(8)
    gm = traced(function, *given)
    expected, theirs = [t.clone() for t in given], [t.clone() for t in given]
    want = function(*expected)
    settle_counters(gm.graph)
    gm.graph.lint()
    gm.recompile()
    found = gm(*theirs)
    for a, b in zip(found, want if isinstance(want, tuple) else (want,), strict=True):
        torch.testing.assert_close(a, b)
    for a, b in zip(theirs, expected, strict=True):
        torch.testing.assert_close(a, b)
    assert len(calls(gm.graph, aten._foreach_add.Scalar)) == together
    made = [n for n in gm.graph.nodes if "arange" in str(n.target)]
    assert len([n for n in made if n.users]) == ranges


def test_counters_of_different_types_are_counted_apart() -> None:
    def count(n: Any, m: Any) -> Any:
        n += 1
        m += 1
        return n * m

    gm = traced(count, integers(3), integers(5, dtype=torch.int32))
    settle_counters(gm.graph)
    assert not calls(gm.graph, aten._foreach_add.Scalar)


# ------------------------------------------------------------------------------------------ masks


def masked(number: float, target: Any) -> fx.Node:
    """Attention of one query with a mask of bool as a library converts it, without being run."""
    graph = fx.Graph()
    with FakeTensorMode():
        q, k = torch.empty(1, 4, 1, 64), torch.empty(1, 4, 32, 64)
        n = torch.empty(1, dtype=torch.int64)
        condition = torch.empty(1, 1, 1, 32, dtype=torch.bool)

        def node(value: Any, function: Any, *args: Any, **options: Any) -> fx.Node:
            made = graph.call_function(function, args, options)
            made.meta["val"] = value
            return made

        query, keys, length = (graph.placeholder(name) for name in "qkn")
        for p, t in zip((query, keys, length), (q, k, n), strict=True):
            p.meta["val"] = t
        zero = torch.empty(1, dtype=torch.int64)
        own = node(zero, torch.ops.prims.iota.default, 1, start=0, step=1, dtype=torch.int64,
                   device="cpu", requires_grad=False)  # fmt: skip
        last = node(n, aten.add.Tensor, own, length)
        last = node(
            torch.empty(1, 1, 1, 1, dtype=torch.int64), aten.view.default, last, [1, 1, 1, 1]
        )
        every = node(torch.empty(32, dtype=torch.int64), torch.ops.prims.iota.default, 32, start=0,
                     step=1, dtype=torch.int64, device="cpu", requires_grad=False)  # fmt: skip
        seen = node(condition, aten.le.Tensor, every, last)
        numbers = [node(torch.empty(()), aten.full.default, [], x) for x in (0.0, number)]
        mask = node(torch.empty(1, 1, 1, 32), aten.where.self, seen, *numbers)
        return node((q,), target, query, keys, keys, mask, False)


@pytest.mark.parametrize(
    ("number", "library", "length"),
    [(-65536.0, "cudnn", True), (-65536.0, "efficient", False), (-torch.inf, "efficient", True),
     (-10000.0, "cudnn", False)],
)  # fmt: skip
def test_masks_of_cudnn(number: float, library: str, length: bool) -> None:
    from cutesuper.torch.aten.length_masks import lengths_of

    target = getattr(aten, f"_scaled_dot_product_{library}_attention").default
    found = lengths_of(masked(number, target))
    assert found is not None
    assert (found.node is not None) == length and (found.added is None) == length
    if length:
        assert found.offset == 1


# ---------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_steps_on_a_gpu(family: str) -> None:
    """Greedy steps behind a prompt, launched and replayed; nothing copies a cache."""
    transformers = pytest.importorskip("transformers")
    from tests.patching import in_float64, new_model

    wide = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 3}
    model = new_model(family, **wide).to("cuda", torch.bfloat16)
    prompt = torch.randint(2, 128, (1, 33), device="cuda")
    cache = transformers.StaticCache(config=model.config, max_cache_len=128)
    compiled = torch.compile(model, backend="cutesuper", options={"take": "all"})
    place = torch.full((1, 1), 33, device="cuda")
    made = [prompt]
    with torch.no_grad():
        token = model(input_ids=prompt, past_key_values=cache).logits[:, -1:].argmax(-1)
        for _ in range(24):
            made.append(token.clone())
            logits = compiled(input_ids=token, past_key_values=cache, position_ids=place).logits
            token, place = logits.argmax(-1), place + 1
        every = torch.cat(made, 1)
        exact, eager = in_float64(model)(every).logits[:, -1], model(every).logits[:, -1]
    assert acceptable(logits[:, -1], exact, eager, torch.bfloat16)


@pytest.mark.gpu
def test_weights_may_be_written_in_front_of_a_model() -> None:
    """Kernels that load weights early wait for a writer that is launched right before them."""
    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048, bias=False) for _ in range(6)))
    model = model.to("cuda", torch.bfloat16).requires_grad_(False)
    x = torch.randn(4, 2048, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(model, backend="cutesuper", options={"take": "all"})
    compiled(x)
    found = []
    for n in range(20):
        for p in model.parameters():
            p.fill_((1 + n % 5) / 2048)  # all layers grow
        found.append(compiled(x))
    expected = []
    for n in range(20):
        for p in model.parameters():
            p.fill_((1 + n % 5) / 2048)
        expected.append(model(x))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05 * float(theirs.abs().max()))
