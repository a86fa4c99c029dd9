"""The whole road on small graphs: what comes out, how it is called, what is refused and how."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

import cutesuper as cs
from cutesuper.errors import (
    CutesuperError,
    DeviceError,
    DTypeError,
    GraphError,
    LayoutError,
    LoweringError,
    OptionError,
    ShapeError,
)
from cutesuper.ir.block import LOAD, MuGraph
from cutesuper.pipeline import Options, check_definition, choose, current_target
from cutesuper.runtime.cache import ROOT_VARIABLE
from cutesuper.runtime.checks import Signature
from cutesuper.runtime.kernel import BUCKETS, Kernel, bucket_of
from tests import zoo
from tests.host_time import within

M, K, N = 16, 128, 64
SMALL: dict[str, Any] = {
    "norm_linear": lambda: zoo.rms_norm_linear(M, K, N),
    "norm_linear_gain": lambda: zoo.rms_norm_linear(M, K, N, "bfloat16", gain=True),
    "norm_linear_nk": lambda: zoo.rms_norm_linear(5, K, N, transposed=True),
    "gated": lambda: zoo.gated_mlp(M, K, N),
    "residual": lambda: zoo.linear(M, K, N, tail="residual"),
    "gelu": lambda: zoo.linear(M, K, N, tail="gelu"),
    "softmax": lambda: zoo.rows("softmax", (6, 40)),
    "layer_norm": lambda: zoo.rows("layer_norm", (3, 2, 100), "float32"),
    "two outputs": lambda: zoo.rows("mean and max", (9, 64)),
    "symbolic": lambda: zoo.rms_norm_linear(cs.symbol("M", 20), K, N),
    "relu_mlp": lambda: zoo.relu_mlp(M, 512, 320, 64),
}


@cache
def kernel_of(name: str) -> Kernel:
    """Compiled once for all tests; programs are chosen for the H200 even where there is a GPU."""
    return cs.superoptimize(SMALL[name](), target="h200")


# ------------------------------------------------------------------------------------ end to end


@pytest.mark.parametrize("name", SMALL)
def test_results_on_the_cpu_are_acceptable(name: str) -> None:
    kernel = kernel_of(name)
    inputs = zoo.draw(kernel.graph, 1)
    results = kernel(inputs)
    reports = zoo.judge(kernel.graph, inputs, results)
    assert all(reports), reports
    assert all(s.resources.stack_bytes == 0 for s in kernel.kernels)
    assert kernel.arch == "sm_90a" and kernel.target is cs.H200


def test_ways_to_call() -> None:
    kernel = kernel_of("norm_linear")
    x, w = zoo.draw(kernel.graph, 2)
    want = kernel(x, w)
    assert isinstance(want, torch.Tensor) and want.dtype is torch.float16
    for results in (kernel([x, w]), kernel((x, w)), kernel(inputs=[x, w])):
        assert isinstance(results, list) and len(results) == 1
        assert torch.equal(results[0], want)
    out = torch.full((M, N), torch.nan, dtype=torch.float16)
    assert kernel(x, w, out=out) is out
    assert torch.equal(out, want)
    out.fill_(torch.nan)
    assert kernel(inputs=[x, w], out=[out])[0] is out
    assert torch.equal(out, want)


def test_several_outputs() -> None:
    kernel = kernel_of("two outputs")
    [x] = zoo.draw(kernel.graph, 3)
    mean, top = kernel(x)
    assert mean.shape == top.shape == (9, 1)
    assert torch.equal(top, x.amax(-1, keepdim=True))
    outs = [torch.empty_like(mean), torch.empty_like(top)]
    assert kernel(x, out=outs) == tuple(outs)
    assert torch.equal(outs[0], mean)


def test_symbols_take_any_extent() -> None:
    kernel = kernel_of("symbolic")
    for m in (1, 16, 33, 100):
        x, w = zoo.draw(kernel.graph, m, extents={"M": m})
        assert kernel(x, w).shape == (m, N)
        assert zoo.judge(kernel.graph.with_hints({"M": m}), [x, w], [kernel(x, w)])[0]


def test_buckets() -> None:
    assert [bucket_of(m) for m in (1, 8, 9, 16, 17, 4096, 4097)] == [8, 8, 16, 16, 32, 4096, 4096]
    assert list(BUCKETS) == sorted(BUCKETS)
    kernel = kernel_of("symbolic")
    first = kernel._variant((32,))  # the hint's own bucket is there already
    assert first.mugraph is kernel.mugraph
    large = kernel._variant((4096,))
    assert large is kernel._variant((4096,)) is not first
    assert large.steps[0].plan.tile[0] > first.steps[0].plan.tile[0]


def test_multi_kernel_programs_are_wired() -> None:
    kernel = kernel_of("relu_mlp")
    variant = kernel._main
    assert len(variant.steps) == 2
    inputs, outputs = kernel.mugraph.inputs, kernel.mugraph.outputs
    assert variant.names[:4] == (*inputs, *outputs)
    [(shape, dtype)] = variant.intermediates
    assert shape == (M, 320) and dtype is torch.float16
    first, second = variant.wiring
    assert first[-1] == 4 and 4 in second[:-1] and second[-1] == 3


# ------------------------------------------------------------------------------------ looking at it


def test_explain_tells_the_whole_story() -> None:
    text = kernel_of("norm_linear").explain()
    for title in ("program", "search", "muGraph", "verification", "cost", "alternatives", "plan"):
        assert f"== {title} ==\n" in text
    assert text.startswith("optimized for h200 (sm_90a)\n")
    assert kernel_of("symbolic").explain().startswith("optimized for h200 (sm_90a), for M = ")
    assert "false accept below 2^-" in text
    assert "statistic0 per row, in the same loop" in text
    assert "0 bytes of stack" in text and "predicted" in text


def test_draw_and_sources(tmp_path: Path) -> None:
    kernel = kernel_of("norm_linear")
    kernel.draw(tmp_path / "program.svg")
    assert (tmp_path / "program.svg").read_text().startswith("<svg")
    assert "wgmma.mma_async" in kernel.ptx
    resources = kernel.resources
    assert resources.threads == kernel.kernels[0].plan.threads
    assert resources.stages == kernel.kernels[0].plan.schedule.stages > 1
    assert resources.instructions["HGMMA"] > 0 and not resources.spills
    assert repr(kernel) == "Kernel(1 kernel(s): k0; h200)"


def test_export_and_load(tmp_path: Path) -> None:
    kernel = kernel_of("norm_linear")
    try:
        kernel.export(tmp_path / "norm_linear.so")
    except cs.errors.CompileError as error:
        pytest.skip(f"cannot link here: {error}")
    program = cs.load(tmp_path / "norm_linear.so")
    x, w = zoo.draw(kernel.graph, 4)
    assert torch.equal(program(x, w), kernel(x, w))
    assert torch.equal(program([x, w])[0], kernel(x, w))
    with pytest.raises(ShapeError, match="input W has shape"):
        program(x, w[:-8].contiguous())
    with pytest.raises(GraphError, match="they compute different graphs"):
        kernel.export(tmp_path / "both.so", kernel_of("softmax"))


# ---------------------------------------------------------------------------- wrong call arguments


def half(*shape: int, **options: Any) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float16, **options)


WRONG: dict[str, tuple[Any, type[CutesuperError], str]] = {
    "rank": (lambda: [half(M * K), half(K, N)], ShapeError, "input X has rank 1 [2048], must have"),
    "shape": (lambda: [half(M, K), half(K, 2 * N)], ShapeError, "W has shape [128, 128], must be"),
    "swapped": (lambda: [half(K, N), half(M, K)], ShapeError, "input X has shape [128, 64]"),
    "dtype": (
        lambda: [half(M, K), torch.zeros(K, N)],
        DTypeError,
        "input W is torch.float32, must be torch.float16; convert it",
    ),
    "device": (
        lambda: [half(M, K), half(K, N, device="meta")],
        DeviceError,
        "input W is on meta, input X on cpu; move all inputs to one device",
    ),
    "not contiguous": (
        lambda: [half(K, M).T, half(K, N)],
        LayoutError,
        "input X is not contiguous (strides [1, 16]); call .contiguous()",
    ),
    "too few": (
        lambda: [half(M, K)],
        ShapeError,
        "takes 2 input(s) (X[16, 128], W[128, 64]), got 1",
    ),
    "none": (list, ShapeError, "takes 2 input(s)"),
    "too many": (lambda: [half(M, K)] * 3, ShapeError, "got 3"),
    "a list": (lambda: [[1.0], half(K, N)], DTypeError, "input X is a list, not a torch tensor"),
    "nothing": (lambda: [None, half(K, N)], DTypeError, "input X is a NoneType, not a torch"),
    "a number": (lambda: [half(M, K), 2.0], DTypeError, "input W is a float, not a torch tensor"),
    "numpy": (lambda: [half(M, K).numpy(), half(K, N)], DTypeError, "input X is a ndarray, not a"),
    "storage": (
        lambda: [half(M, K).untyped_storage(), half(K, N)],
        DTypeError,
        "input X is a UntypedStorage, not a torch tensor",
    ),
    "sparse": (
        lambda: [half(M, K).to_sparse_csr(), half(K, N)],
        LayoutError,
        "input X is not an ordinary tensor (torch.sparse_csr); use .to_dense()",
    ),
    "nested": (
        lambda: [half(M, K), torch.nested.nested_tensor([half(K, N)])],
        LayoutError,
        "input W is not an ordinary tensor (nested)",
    ),
    "freed": (lambda: [freed(half(M, K)), half(K, N)], LayoutError, "input X has no memory"),
}


def freed(t: torch.Tensor) -> torch.Tensor:
    t.untyped_storage().resize_(0)
    return t


@pytest.mark.parametrize("name", WRONG)
def test_wrong_inputs_are_named(name: str) -> None:
    make, error, message = WRONG[name]
    with pytest.raises(error) as caught:
        kernel_of("norm_linear")(*make())
    assert str(caught.value).startswith("kernel") and message in str(caught.value)


def test_gradients_are_allowed_where_none_are_recorded() -> None:
    with torch.no_grad():
        kernel_of("norm_linear")(half(M, K, requires_grad=True), half(K, N))


def test_inputs_are_given_once() -> None:
    x, w = half(M, K), half(K, N)
    with pytest.raises(GraphError, match="either by position or as inputs=, once"):
        kernel_of("norm_linear")(x, inputs=[x, w])


def test_symbols_and_empty_inputs() -> None:
    kernel = kernel_of("symbolic")
    assert kernel(half(0, K), half(K, N)).shape == (0, N)
    with pytest.raises(ShapeError, match=r"input X has shape \[3, 129\], must be \[M, 128\]"):
        kernel(half(3, K + 1), half(K, N))
    g = cs.new_kernel_graph()
    rows = cs.symbol("M", 16)
    x, y = g.new_input((rows, 64), name="X"), g.new_input((rows, 64), name="Y")
    g.mark_output(g.add(x, y))
    both = cs.superoptimize(g, target="h200")
    assert both(half(3, 64), half(3, 64)).shape == (3, 64)
    with pytest.raises(ShapeError, match=r"input Y has shape \[4, 64\].*M is 3 in an earlier"):
        both(half(3, 64), half(4, 64))


def test_meta_tensors_give_shapes() -> None:
    x, w = half(M, K, device="meta"), half(K, N, device="meta")
    found = kernel_of("norm_linear")(x, w)
    assert found.device.type == "meta" and found.shape == (M, N) and found.dtype == x.dtype


OUT: dict[str, tuple[Any, type[CutesuperError], str]] = {
    "shape": (lambda x, w: half(M, N + 1), ShapeError, "output 0 has shape [16, 65], must be"),
    "dtype": (lambda x, w: torch.zeros(M, N), DTypeError, "output 0 is torch.float32, must be"),
    "device": (lambda x, w: half(M, N, device="meta"), DeviceError, "output 0 is on meta"),
    "strides": (lambda x, w: half(N, M).T, LayoutError, "output 0 must be contiguous"),
    "count": (lambda x, w: [half(M, N)] * 2, ShapeError, "1 output(s), got 2"),
    "not a tensor": (lambda x, w: "out", DTypeError, "output 0 is a str, not a torch tensor"),
    "sparse": (lambda x, w: half(M, N).to_sparse_csr(), LayoutError, "output 0 is not an ordinary"),
    "gradient": (lambda x, w: half(M, N, requires_grad=True), GraphError, "0 requires a gradient"),
    "overlap": (lambda x, w: x.view(-1)[: M * N].view(M, N), LayoutError, "overlaps an input"),
    "overlap of the end": (
        lambda x, w: w.view(-1)[-M * N :].view(M, N),
        LayoutError,
        "overlaps an input or another output",
    ),
}


@pytest.mark.parametrize("name", OUT)
def test_wrong_outputs_are_named(name: str) -> None:
    make, error, message = OUT[name]
    x, w = half(M, K), half(K, N)
    with pytest.raises(error) as caught:
        kernel_of("norm_linear")(x, w, out=make(x, w))
    assert str(caught.value).startswith("kernel(out=...)") and message in str(caught.value)


def test_outputs_must_not_overlap_each_other() -> None:
    kernel = kernel_of("two outputs")
    out = half(9, 1)
    with pytest.raises(LayoutError, match="output 1 overlaps an input or another output"):
        kernel(half(9, 64), out=[out, out])


# ------------------------------------------------------------------------------ wrong graphs


def no_output() -> Any:
    g = cs.new_kernel_graph()
    g.exp(g.new_input((4, 8)))
    return g


def unused_input() -> Any:
    g = no_output()
    g.mark_output(g.exp(g.new_input((4, 8), name="Used")))
    return g


def linear_of(k: int, n: int, dtype: Any) -> Any:
    g = cs.new_kernel_graph()
    g.mark_output(g.matmul(g.new_input((16, k), dtype), g.new_input((k, n), dtype)))
    return g


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (cs.new_kernel_graph, GraphError, "it has no inputs"),
        (no_output, GraphError, "no output is marked"),
        (unused_input, GraphError, "no output depends on input"),
        (lambda: "graph", GraphError, "superoptimize(str): give it a kernel graph"),
        (lambda: None, GraphError, "superoptimize(NoneType)"),
    ],
)
def test_graphs_that_are_refused(make: Any, error: type[CutesuperError], message: str) -> None:
    with pytest.raises(error) as caught:
        cs.superoptimize(make(), target="b200")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("seed", -1, "seed=-1: must be an int of at least 0"),
        ("seed", None, "seed=None: must be an int"),
        ("budget_s", "5", "budget_s='5': must be a number of seconds, or None"),
        ("budget_s", float("nan"), "budget_s=nan: must be a number of seconds"),
        ("budget_s", -1.0, "None for no limit, and not below 0"),
        ("budget_s", 10**400, "budget_s=1000"),
        ("executor", 4, "executor=4: must be a concurrent.futures.Executor"),
        ("dependent_launch", "yes", "dependent_launch='yes': must be True or False"),
        ("tuned", 0, "tuned=0: must be True or False"),
        ("on_progress", "bar", "on_progress='bar': must be a function"),
        ("cache", "/tmp/x", "cache='/tmp/x': must be a cutesuper.runtime.cache.KernelCache"),
    ],
)
def test_options_of_another_kind_are_refused(option: str, value: Any, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        cs.superoptimize(SMALL["norm_linear"](), target="h200", **{option: value})
    assert message in str(caught.value) and len(str(caught.value)) < 200


def test_what_is_no_graph_is_refused_everywhere() -> None:
    graph = SMALL["norm_linear"]()
    calls: list[Callable[[], Any]] = [
        lambda: cs.mugraphs(None),  # type: ignore[arg-type]
        lambda: cs.verify(None, None),  # type: ignore[arg-type]
        lambda: cs.verify(graph, graph),  # type: ignore[arg-type]
        lambda: cs.compile_mugraph(3, None),  # type: ignore[arg-type]
        lambda: cs.compile_mugraph(graph, "x"),  # type: ignore[arg-type]
        lambda: cs.dumps("x"),  # type: ignore[arg-type]
        lambda: cs.split("x"),  # type: ignore[arg-type]
        lambda: cs.split(graph, save=3),  # type: ignore[arg-type]
        lambda: cs.grad(graph, wrt=3),  # type: ignore[arg-type]
    ]
    for call in calls:
        with pytest.raises(GraphError):
            call()


def test_targets() -> None:
    for target in (3, ["h200"]):
        with pytest.raises(DeviceError, match=r"target .*: unknown; use one of h200"):
            cs.superoptimize(zoo.rows("exp", (4, 8)), target=target)  # type: ignore[arg-type]
    with pytest.raises(DeviceError, match="target 'h300': unknown; use one of h200, h100, b200"):
        cs.superoptimize(zoo.rows("exp", (4, 8)), target="h300")
    consumer = replace(cs.B200, name="rtx5090", arch="sm_120a")
    with pytest.raises(LoweringError, match=r"lowered for sm_90a, .* not for rtx5090"):
        cs.superoptimize(zoo.linear(16, 64, 64), target=consumer)
    if not torch.cuda.is_available():
        assert current_target() is cs.H200


@pytest.mark.parametrize(
    ("name", "capability", "target"),
    [
        ("NVIDIA GB200", (10, 0), cs.B200),
        ("NVIDIA GH200 480GB", (9, 0), cs.H200),
        ("NVIDIA H800", (9, 0), cs.H100),
        ("NVIDIA B100", (10, 0), cs.B200),
        ("NVIDIA GeForce RTX 5090", (12, 0), None),
    ],
)
def test_the_target_of_a_device(
    name: str, capability: tuple[int, int], target: cs.Target | None, monkeypatch: Any
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    found = SimpleNamespace(multi_processor_count=target.sms if target else 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: found)
    if target is not None:
        assert current_target() is target
        found.multi_processor_count = 78  # an H20, or a part of a GPU
        fewer = current_target()
        assert (fewer.name, fewer.sms) == (f"{target.name}-78", 78)
        assert (fewer.clusters[1], fewer.clusters[2]) == (78, 39)
        assert fewer.tensor_flops / fewer.sms == pytest.approx(target.tensor_flops / target.sms)
        assert cs.targets.find_target(fewer.name) == fewer and fewer.bandwidth == target.bandwidth
        return
    with pytest.raises(DeviceError, match=r"5090' \(sm_120\): kernels are written for h200 \("):
        current_target()


# ---------------------------------------------------------------- what is found at the real size


def kinds_after(mu: MuGraph, kind: str) -> set[str]:
    """Operations that depend on an operation of this kind."""
    [step] = mu.steps
    ops, later = step.program.ops, set[int]()
    for i, op in enumerate(ops):
        if any(j in later or ops[j].kind == kind for j in op.inputs):
            later.add(i)
    return {ops[i].kind for i in later}


def test_norm_and_linear_at_the_size_that_matters() -> None:
    """One kernel, X read once, the norm applied after the product, and a proof with a bound."""
    graph = zoo.rms_norm_linear(16, 4096, 6144)
    result, choice = choose(graph, Options(cs.H200))
    assert result.statistics.seconds <= 5
    mu = choice.candidate.mugraph
    [step] = mu.steps
    loads = [op.attributes["tensor"] for op in step.program.loads()]
    assert sorted(loads) == ["W", "X"]
    assert "div" in kinds_after(mu, "matmul")
    product = next(op for op in step.program.ops if op.kind == "matmul")
    assert all(step.program.ops[i].kind == LOAD for i in product.inputs)
    v = choice.verification
    assert v.equal and v.bound_log2 is not None and v.bound_log2 <= -40
    assert v.real_extents
    assert choice.refused == ()


def test_equal_seeds_give_equal_results() -> None:
    graph = zoo.gated_mlp(M, K, N)
    found = [choose(graph, Options(cs.H200, seed=5))[1].candidate for _ in range(2)]
    assert cs.dumps(found[0].mugraph) == cs.dumps(found[1].mugraph)
    assert found[0].cost_us == found[1].cost_us


def test_the_second_time_comes_from_the_cache() -> None:
    kernel_of("norm_linear")
    start = time.process_time()
    again = cs.superoptimize(SMALL["norm_linear"](), target="h200")
    assert within(time.process_time() - start, 10.0)
    assert all(s.artifact.from_cache for s in again.kernels)


def test_progress_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ROOT_VARIABLE, str(tmp_path))  # no search is kept there
    seen: list[Any] = []
    cs.superoptimize(SMALL["norm_linear"](), target="h200", on_progress=seen.append)
    assert seen and seen[-1].verified > 0 and seen[-1].best_cost_us is not None


# -------------------------------------------------------------------------------- wrong muGraphs


def changed(mu: MuGraph, index: int, **fields: Any) -> MuGraph:
    """The muGraph with one operation of its only kernel changed."""
    [step] = mu.steps
    ops = list(step.program.ops)
    ops[index] = replace(ops[index], **fields)
    program = replace(step.program, ops=tuple(ops))
    return replace(mu, steps=(replace(step, program=program),))


def place(mu: MuGraph, kind: str) -> int:
    return next(i for i, op in enumerate(mu.steps[0].program.ops) if op.kind == kind)


def test_wrong_programs_are_rejected() -> None:
    graph = zoo.rms_norm_linear(M, K, N)
    mu = choose(graph, Options(cs.H200))[1].candidate.mugraph
    assert cs.verify(graph, mu)
    add, div = place(mu, "add"), place(mu, "div")
    ops = mu.steps[0].program.ops
    mean = next(i for i in ops[add].inputs if ops[i].kind != "constant")
    wrong = {
        "no eps": changed(mu, place(mu, "sqrt"), inputs=(mean,)),
        "other eps": changed(mu, place(mu, "constant"), attributes={"value": 1e-5}),
        "sum for mean": changed(mu, place(mu, "mean"), kind="sum"),
        "product for quotient": changed(mu, div, kind="mul"),
        "no square": changed(mu, place(mu, "square"), kind="exp"),
    }
    for name, program in wrong.items():
        verdict = cs.verify(graph, program)
        assert not verdict and verdict.counterexample is not None, name


def test_the_norm_of_another_row_is_rejected() -> None:
    """Transposed norms: every row is divided by the norm of the row that a square X would have."""
    g = cs.new_kernel_graph()
    x = g.new_input((64, 64), name="X")
    w = g.new_input((64, 64), name="W", constant=True)
    g.mark_output(g.div(g.matmul(x, w), g.sum(x, -1)))
    mu = choose(g, Options(cs.H200))[1].candidate.mugraph
    assert cs.verify(g, mu)
    loads = [i for i, op in enumerate(mu.steps[0].program.ops) if op.kind == LOAD]
    for i in loads:
        op = mu.steps[0].program.ops[i]
        other = "W" if op.attributes["tensor"] == "X" else "X"
        verdict = cs.verify(g, changed(mu, i, attributes={**op.attributes, "tensor": other}))
        assert not verdict
        swapped = tuple(reversed(op.attributes["map"]))
        assert not cs.verify(g, changed(mu, i, attributes={**op.attributes, "map": swapped}))


def test_scores_may_be_larger_than_any_tensor() -> None:
    """32 heads of 8192 x 8192 scores are 2^31 elements, which no kernel stores."""
    g = cs.new_kernel_graph()
    q, k, v = (g.new_input((32, 8192, 64), "bfloat16", n) for n in "qkv")
    g.mark_output(g.softmax(q @ g.transpose(k)) @ v)
    check_definition("superoptimize", g)


def test_extents_beyond_32_bit_coordinates_are_refused() -> None:
    g = cs.new_kernel_graph()
    x, w = g.new_input((2**31, 64)), g.new_input((64, 8))
    g.mark_output(g.matmul(x, w))
    with pytest.raises(ShapeError, match="2147483648 elements, more than 2147483647"):
        cs.superoptimize(g)


def test_outputs_beyond_32_bit_offsets_are_refused_at_the_call() -> None:
    g = cs.new_kernel_graph()
    g.mark_output(g.relu(g.new_input((cs.symbol("M"), 4096))))
    signature = Signature(g)
    assert signature.output_shapes({"M": 5})[0][0] == (5, 4096)
    with pytest.raises(ShapeError, match=r"output 0 of shape .* split the batch"):
        signature.output_shapes({"M": 2**20})
