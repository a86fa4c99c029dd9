"""The benchmarks' parts: statistics, number of sets, the error rule, workloads, inputs."""

from __future__ import annotations

import math

import pytest
import torch

import cutesuper as cs
from benchmarks.check import Error, Expected, check_outputs, measure_error, ulp
from benchmarks.layers import LAYERS, MODELS
from benchmarks.problem import ALIGNMENT, SetPlan, make_problem, plan_sets, slab_bytes
from benchmarks.spread import quantile, summarize
from benchmarks.workloads import MEASURED, find_workload
from cutesuper.ir.evaluate import evaluate
from tests.benchmark_fakes import (
    GAIN,
    PLAIN,
    TINY,
)

# --------------------------------------------------------------------------------------- statistics


def test_quantile_interpolates():
    assert quantile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.5
    assert quantile([1.0, 2.0, 3.0], 1.0) == 3.0
    assert quantile([7.0], 0.1) == 7.0


def test_summary_ignores_order_and_outliers():
    spread = summarize([10.0] * 20 + [500.0, 9.0])
    assert (spread.median, spread.min, spread.samples) == (10.0, 9.0, 22)
    assert spread.p10 == spread.p90 == 10.0
    with pytest.raises(ValueError, match="no samples"):
        summarize([])


@pytest.mark.parametrize(
    ("set_bytes", "memory", "expected"),
    [
        (33_700_000, 8 * 10**9, SetPlan(64, 33_700_000, False)),  # 16x4096x4096
        (235_000_000, 8 * 10**9, SetPlan(34, 235_000_000, False)),  # as many as memory allows
        (4_000_000, 8 * 10**9, SetPlan(128, 4_000_000, False)),  # what reaches 512 MB
        (300_000, 8 * 10**9, SetPlan(256, 300_000, True)),  # capped below 512 MB
        (33_700_000, 400_000_000, SetPlan(11, 33_700_000, True)),
        (6_000_000_000, 8 * 10**9, SetPlan(1, 6_000_000_000, False)),
    ],
)
def test_enough_sets_to_leave_l2(set_bytes, memory, expected):
    assert plan_sets(set_bytes, 50 * 2**20, memory) == expected


def test_large_l2_needs_more_sets():
    assert plan_sets(10**7, 200 * 10**6, 8 * 10**9).count == 64
    assert plan_sets(5 * 10**6, 200 * 10**6, 8 * 10**9).count == 120
    with pytest.raises(MemoryError, match="smaller shape"):
        plan_sets(10**9, 50 * 2**20, 10**8)


# --------------------------------------------------------------------------------------- error rule


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale", [1.0, 1.5, 100.0, 3e-3])
def test_ulp_is_the_spacing(dtype, scale):
    value = torch.tensor(scale, dtype=dtype)
    spacing = torch.nextafter(value, torch.tensor(math.inf, dtype=dtype)) - value
    assert ulp(value.item(), dtype) == pytest.approx(spacing.item(), rel=1e-6)
    assert ulp(0.0, dtype) > 0
    assert math.isnan(ulp(math.nan, dtype))


def expected_of(reference: torch.Tensor, error: float = 0.0) -> list[Expected]:
    dims = tuple(reference.shape)
    return [Expected(reference, Error(error, error / 3, error), dims, torch.float16)]


def test_rule_allows_twice_pytorch_and_two_ulp():
    reference = torch.ones(64, 64, dtype=torch.float64)
    good = torch.ones(64, 64, dtype=torch.float16)
    assert check_outputs([good], expected_of(reference)).passed
    off = good.clone()
    off[3, 5] += 2 * ulp(1.0, torch.float16)
    assert check_outputs([off], expected_of(reference)).passed
    off[3, 5] += ulp(1.0, torch.float16)
    verdict = check_outputs([off], expected_of(reference))
    assert not verdict.passed
    assert "largest error" in verdict.reason
    assert check_outputs([off], expected_of(reference, error=1e-3)).passed


def test_rule_sees_a_small_error_everywhere():
    reference = torch.linspace(-1, 1, 4096, dtype=torch.float64)
    reference[0] = 1000.0  # one large element makes the limit of the largest error loose
    value = (reference + 0.5).half()
    verdict = check_outputs([value], expected_of(reference))
    assert not verdict.passed
    verdict = check_outputs([reference.half()], expected_of(reference))
    assert verdict.passed, verdict.reason


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_not_finite_never_passes(bad):
    reference = torch.ones(8, dtype=torch.float64)
    value = torch.ones(8, dtype=torch.float16)
    value[7] = bad
    verdict = check_outputs([value], expected_of(reference, error=1e9))
    assert not verdict.passed
    assert "1 of 8" in verdict.reason
    broken = reference.clone()
    broken[7] = bad
    assert not check_outputs([value], expected_of(broken, error=1e9)).passed
    assert not check_outputs([torch.ones_like(value)], expected_of(broken, error=math.nan)).passed


def test_shape_dtype_and_number_of_outputs_are_checked():
    reference = torch.ones(8, dtype=torch.float64)
    expected = expected_of(reference)
    assert "shape" in check_outputs([torch.ones(9).half()], expected).reason
    assert "dtype" in check_outputs([torch.ones(8)], expected).reason
    assert "0 outputs" in check_outputs([], expected).reason


def test_a_bad_row_outside_the_checked_rows_still_fails_when_not_written():
    reference = torch.ones(2, 4, dtype=torch.float64)
    rows = torch.tensor([0, 2])
    expected = [Expected(reference, Error(0, 0, 0), (3, 4), torch.float16, rows)]
    value = torch.ones(3, 4).half()
    assert check_outputs([value], expected).passed
    value[1, 0] = math.nan
    assert not check_outputs([value], expected).passed


def test_measure_error_of_zero_reference():
    error = measure_error(torch.zeros(3), torch.zeros(3, dtype=torch.float64))
    assert error == Error(0.0, 0.0, 0.0)


# ---------------------------------------------------------------------------------------- workloads


def draw(workload, shape=TINY, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(s.dims, generator=generator, dtype=torch.float64)
        .mul(s.std)
        .add(s.mean)
        .to(dtype)
        for s in workload.inputs(shape)
    ]


OF_MODELS = [MODELS["llama3-8b"].layer(name, 1)[0] for name in LAYERS if name != "down"]
ALL = pytest.mark.parametrize("workload", [*MEASURED.values(), *OF_MODELS], ids=lambda w: w.name)


def small(workload):
    return {"rank": (*TINY, 8)}.get(workload.axes[-1], TINY)


@ALL
def test_references_agree_with_pytorch(workload):
    shape = small(workload)
    inputs = draw(workload, shape)
    for name, computation in workload.computations.items():
        references, eagers = computation.reference(*inputs), computation.eager(*inputs)
        specs = workload.outputs_of(name, shape)
        for reference, eager, spec in zip(references, eagers, specs, strict=True):
            assert reference.dtype == torch.float64
            torch.testing.assert_close(reference, eager, rtol=1e-12, atol=1e-12, msg=name)
            assert tuple(eager.shape) == spec.dims
            assert 0.1 < eager.square().mean().sqrt() < 3  # where a half is accurate
        if computation.into is not None:
            out = tuple(torch.full_like(eager, math.nan) for eager in eagers)
            computation.into(*inputs, out=out)
            for written, eager in zip(out, eagers, strict=True):
                torch.testing.assert_close(written, eager, rtol=1e-14, atol=1e-14, msg=name)


@ALL
def test_programs_compute_the_reference(workload):
    shape = small(workload)
    inputs = draw(workload, shape)
    graph = workload.graph(cs, shape, "float16")
    [ours] = evaluate(graph, inputs, torch.float64)
    [reference] = workload.computations["full"].reference(*inputs)
    torch.testing.assert_close(ours, reference, rtol=1e-12, atol=1e-12)


@ALL
def test_the_part_has_nothing_but_products(workload):
    """Workloads that are linear in X; norms, activations and biases are not."""
    part, full = workload.computations["matmul"].reference, workload.computations["full"].reference
    x, *rest = draw(workload, small(workload))
    for one, twice in zip(part(x, *rest), part(2 * x, *rest), strict=True):
        torch.testing.assert_close(twice, 2 * one)
    if workload.name != "lora":  # all of which is linear
        assert not torch.allclose(full(2 * x, *rest)[0], 2 * full(x, *rest)[0], rtol=1e-3)


def test_gain_matters():
    x, g, w = draw(GAIN)
    [with_gain] = GAIN.computations["full"].reference(x, g, w)
    [without] = PLAIN.computations["full"].reference(x, w)
    assert (with_gain - without).abs().max() > 0.1


def test_rows_are_independent():
    x, w = draw(PLAIN)
    [all_rows] = PLAIN.computations["full"].reference(x, w)
    [some] = PLAIN.computations["full"].reference(x[[0, 3]], w)
    torch.testing.assert_close(some, all_rows[[0, 3]])


def test_bytes_and_operations():
    assert PLAIN.bytes_moved((16, 4096, 4096), torch.float16) == 2 * (4096**2 + 2 * 16 * 4096)
    assert GAIN.bytes_moved(TINY, torch.bfloat16) == 2 * (4 * 64 + 64 + 64 * 32 + 4 * 32)
    assert PLAIN.flops((16, 4096, 4096)) == 2 * 16 * 4096 * 4096
    lora, dlrm = MEASURED["lora"], MEASURED["dlrm_mlp"]
    assert lora.flops((2, 3, 5, 7)) == 2 * (2 * 3 * 5 + 2 * 3 * 7 + 2 * 7 * 5)
    assert lora.bytes_moved((2, 3, 5, 7), torch.float16) == 2 * (6 + 15 + 21 + 35 + 10)
    assert dlrm.flops((2, 3, 5)) == 2 * (2 * 3 * 5 + 2 * 5)
    assert dlrm.bytes_moved((2, 3, 5), torch.float16) == 2 * (6 + 15 + 5 + 5 + 1 + 2)
    assert MEASURED["gated_mlp"].flops((2, 3, 5)) == 2 * 2 * (2 * 3 * 5)


def test_shapes_are_parsed_or_refused():
    assert PLAIN.parse_shape("2x4096X6144") == (2, 4096, 6144)
    for text in ("2x4096", "2x-1x3", "axbxc", "0x1x1", ""):
        with pytest.raises(ValueError, match="batchxinnerxcolumns"):
            PLAIN.parse_shape(text)
    with pytest.raises(ValueError, match="rmsnorm_linear"):
        find_workload("nothing")


@ALL
def test_programs_build(workload):
    shape = small(workload)
    graph = workload.graph(cs, shape, "bfloat16")
    nodes = [graph.nodes[i] for i in graph.inputs]
    assert [node.shape for node in nodes] == [spec.dims for spec in workload.inputs(shape)]
    assert [node.constant for node in nodes] == [spec.constant for spec in workload.inputs(shape)]
    assert graph.nodes[graph.outputs[0]].shape == workload.outputs(shape)[0].dims
    assert {node.dtype for node in nodes} == {cs.bfloat16}


def test_every_weight_is_constant():
    for workload in (*MEASURED.values(), *OF_MODELS):
        shape = small(workload)
        for spec in workload.inputs(shape):
            assert spec.constant is not spec.rows, f"{workload.name} {spec.name}"


# ------------------------------------------------------------------------------------------- inputs


def problem_of(workload=PLAIN, shape=TINY, count=3, rows=512, seed=0):
    specs = (*workload.inputs(shape), *workload.outputs(shape))
    return make_problem(
        workload,
        shape,
        "float16",
        torch.float16,
        device=torch.device("cpu"),
        multiprocessors=132,
        plan=SetPlan(count, slab_bytes(specs, torch.float16), True),
        seed=seed,
        reference_rows=rows,
    )


def test_sets_are_distinct_aligned_and_do_not_overlap():
    problem = problem_of(GAIN, (3, 65, 33))
    for slab, inputs, outputs in zip(problem.slabs, problem.inputs, problem.outputs, strict=True):
        end = slab.data_ptr()
        for tensor in (*inputs, *outputs):
            assert tensor.data_ptr() >= end
            assert (tensor.data_ptr() - slab.data_ptr()) % ALIGNMENT == 0
            assert tensor.is_contiguous()
            assert not tensor._is_view()
            end = tensor.data_ptr() + tensor.nbytes
        assert end <= slab.data_ptr() + slab.nbytes
        assert slab.nbytes >= problem.bytes_moved
        assert outputs[0].isnan().all()
    assert not torch.equal(problem.inputs[0][0], problem.inputs[1][0])
    assert torch.equal(problem.inputs[2][2], problem_of(GAIN, (3, 65, 33)).inputs[2][2])
    assert not torch.equal(problem.inputs[2][2], problem_of(GAIN, (3, 65, 33), seed=1).inputs[2][2])


def test_references_of_many_rows_use_a_subset_with_both_ends():
    problem = problem_of(shape=(40, 64, 32), rows=8)
    [expected] = problem.expected("full", 1)
    rows = expected.rows.tolist()
    assert len(rows) == len(set(rows)) == 8
    assert rows[0] == 0
    assert rows[-1] == 39
    assert expected.reference.shape == (8, 32)
    assert expected.dims == (40, 32)
    full = problem_of(shape=(40, 64, 32)).expected("full", 1)[0].reference
    torch.testing.assert_close(expected.reference, full[rows])
    assert expected is problem.expected("full", 1)[0]  # computed once
