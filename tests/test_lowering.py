"""Code that the compiler makes of plans: resources, instructions, launches. No GPU is needed."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

pytest.importorskip("cutlass")

from cutesuper.ir.dims import Symbol
from cutesuper.ir.graph import KernelGraph
from cutesuper.report import plan_text
from cutesuper.runtime.compile import Artifact, compile_kernel
from cutesuper.runtime.resources import Resources
from cutesuper.runtime.toolchain import find_nvdisasm
from cutesuper.search.search import search
from cutesuper.skeletons.planner import make_plan
from cutesuper.targets import B200, H200
from tests import zoo
from tests.fake_runtime import Launch, record_launches
from tests.mugraphs import Block
from tests.plans import Linear, compiled, request_of, rows_plan, specs

needs_sass = pytest.mark.skipif(find_nvdisasm() is None, reason="needs nvdisasm")


def check_resources(plan: Any, artifact: Artifact) -> Resources:
    """Check what holds for every kernel."""
    r = artifact.resources
    assert r.stack_bytes == 0 and not r.spills
    assert r.threads == plan.threads <= 1024
    assert r.registers * r.threads <= H200.registers
    assert r.shared_bytes <= H200.shared_bytes
    assert r.shared_bytes <= plan.shared_bytes  # the planner's figure is an upper bound
    dependent = plan.schedule.dependent_launch
    waits = r.ptx.get("griddepcontrol.wait", 0), r.ptx.get("griddepcontrol.launch_dependents", 0)
    assert all(waits) if dependent else not any(waits)
    assert artifact.launches[0].pdl == dependent
    return r


# --------------------------------------------------------------------------------- matmul loops


def covering() -> list[tuple[Linear, bool]]:
    """Every pair of (rows, launch, gain, layout, type) occurs; all combinations would be 96."""
    cases = []
    for i, m in enumerate((8, 16, 32, 64, 128, 256)):
        n = 128 if m == 256 else 64
        size = {"m": m, "n": 4 * n, "tile_m": m, "tile_n": n, "tile_k": 128 if m <= 64 else 64}
        for j in range(2):
            gain, transposed = bool(j), bool((i + j) % 2)
            dtype = ("float16", "bfloat16")[(i // 2 + j) % 2]
            cluster = 2 if m <= 32 else 1
            linear = Linear(gain=gain, transposed=transposed, dtype=dtype, cluster=cluster, **size)
            cases.append((linear, bool((i // 3 + j) % 2)))
    return cases


def case_name(case: tuple[Linear, bool]) -> str:
    linear, dependent = case
    parts = [f"M{linear.tile_m}", linear.dtype, "NK" if linear.transposed else "KN"]
    return "-".join([*parts, *["G"] * linear.gain, *["dependent"] * dependent])


def test_the_cases_cover_all_pairs() -> None:
    seen = [(c.tile_m, dependent, c.gain, c.transposed, c.dtype) for c, dependent in covering()]
    for a, b in [(1, 2), (1, 3), (2, 3), (2, 4), (3, 4), (1, 4)]:
        assert len({(s[a], s[b]) for s in seen}) == 4


@pytest.mark.parametrize("case", covering(), ids=case_name)
def test_norm_and_linear_compile(case: tuple[Linear, bool]) -> None:
    linear, dependent = case
    plan = linear.plan(dependent_launch=dependent)
    r = check_resources(plan, compiled(plan))
    if r.source == "sass":
        assert r.instructions["HGMMA"] > 0 and r.instructions["UTMALDG"] > 0
        assert r.instructions["HGMMA"] % (linear.tile_k // 16) == 0


@pytest.mark.parametrize(
    "linear",
    [
        Linear(bias=True, residual=True),
        Linear(norm=False, m=64, tile_m=64),
        Linear(k=520, n=200),  # the last tiles of K and of N are not full
        Linear(k=520, gain=True, cluster=2, m=8, tile_m=8),
        Linear(m=Symbol("M", 64), tile_m=64, tile_n=128),
    ],
    ids=["bias and residual", "no norm", "ragged", "ragged gain", "symbolic"],
)
def test_other_linears_compile(linear: Linear) -> None:
    plan = linear.plan()
    check_resources(plan, compiled(plan))


def test_what_the_loop_does_not_read_is_asked_for_before_it() -> None:
    linears = (Linear(), Linear(bias=True), Linear(bias=True, residual=True))
    plain, biased, both = (compiled(x.plan()).resources.instructions for x in linears)
    assert "CCTL" not in plain and biased["CCTL"] > 0  # lines of the bias
    assert plain["UTMACCTL"] == 2  # tensor maps of X and W
    assert both["CCTL"] > biased["CCTL"]


def test_batched_and_gated_products_compile() -> None:
    axes: dict[str, int | None] = {"H.grid": 4, "K.loop": 2}
    b = Block({"H": 4, "M": 16, "K": 128, "N": 64}, axes, {"H": 1, "M": 16, "K": 64, "N": 64})
    x = b.load("X", "H", "M", "K")
    gate = b.close(b.op("matmul", x, b.load("A", "H", "K", "N"), over="K"), "K")
    up = b.close(b.op("matmul", x, b.load("B", "K", "N"), over="K"), "K")
    b.store("Z", b.op("mul", b.op("silu", gate), up), "H", "M", "N")
    shapes = {"X": (4, 16, 128), "A": (4, 128, 64), "B": (128, 64), "Z": (4, 16, 64)}
    plan = make_plan(b.step(), specs(shapes), H200)
    r = check_resources(plan, compiled(plan))
    if r.source == "sass":
        assert r.instructions["HGMMA"] == 2 * 64 // 16


# ------------------------------------------------------------------------------------------ rows

ROW_CASES = [
    ("norm", 64, 4096, "float16", 128),
    ("norm", 64, 1000, "bfloat16", 128),
    ("norm", 300, 8192, "float16", 128),
    ("exp", 64, 4096, "float32", 128),
    ("silu", 64, 12, "float16", 64),
    ("norm", 64, 333, "float32", 32),
]


@pytest.mark.parametrize("target", [H200, B200], ids=lambda t: t.arch)
@pytest.mark.parametrize("case", ROW_CASES, ids=lambda c: "-".join(map(str, c[:4])))
def test_row_kernels_compile_everywhere(case: tuple[Any, ...], target: Any) -> None:
    kind, m, n, dtype, bits = case
    kinds = () if kind == "norm" else (kind,)
    plan = rows_plan(m, n, *kinds, norm=kind == "norm", dtype=dtype, target=target)
    r = check_resources(plan, compiled(plan, target.arch))
    if r.source != "sass":
        return
    for access in ("LDG", "STG"):  # every element is read and written once
        assert r.instructions[access] == plan.schedule.chunks
        if bits > 32:
            assert r.instructions[f"{access}.E.{bits}"] == plan.schedule.chunks


def test_dependent_row_kernels_wait() -> None:
    for dependent in (False, True):
        plan = rows_plan(64, 512, norm=True, dependent_launch=dependent)
        check_resources(plan, compiled(plan))


def test_strided_rows_compile() -> None:
    b = Block({"M": 2000, "N": 256}, {"N.grid": 256}, {"M": 2000, "N": 1})
    b.store("Z", b.op("sum", b.load("X", "M", "N"), over="M"), "N")
    plan = make_plan(b.step("columns"), specs({"X": (2000, 256), "Z": (256,)}), H200)
    check_resources(plan, compiled(plan))


# ------------------------------------------------------------------------------------------ golden

WORKLOADS: dict[str, tuple[KernelGraph, bool]] = {
    "norm_linear_16x4096x4096": (zoo.rms_norm_linear(16, 4096, 4096), False),
    "norm_linear_16x4096x4096_dependent": (zoo.rms_norm_linear(16, 4096, 4096), True),
    "norm_linear_16x4096x6144": (zoo.rms_norm_linear(16, 4096, 6144), False),
    "norm_linear_gain_16x4096x6144": (zoo.rms_norm_linear(16, 4096, 6144, gain=True), False),
    "norm_linear_4096x4096x4096": (zoo.rms_norm_linear(4096, 4096, 4096), False),
    "layer_norm_linear_16x4096x4096": (zoo.layer_norm_linear(16, 4096, 4096), False),
    "projections_1x4096_dependent": (zoo.projections(1, 4096, (4096, 1024, 1024)), True),
    "projections_2048x4096": (zoo.projections(2048, 4096, (4096, 1024, 1024), norm=False), False),
    "gated_mlp_16x4096x4096": (zoo.gated_mlp(16, 4096, 4096), False),
    "rms_norm_1024x4096": (zoo.rows("rms_norm", (1024, 4096)), False),
    "softmax_1024x4096": (zoo.rows("softmax", (1024, 4096)), False),
}
#: opcodes that a plan decides; the others move with every version of the compiler
KEPT = (
    "HGMMA", "UTMALDG", "LDG.E.128", "STG.E.128", "STAS", "MUFU", "BAR", "LDS.128", "STS.128",
    "USETMAXREG", "LDL", "STL",
)  # fmt: skip


@needs_sass
@pytest.mark.parametrize("name", WORKLOADS)
def test_plans_and_instructions_of_workloads(name: str, golden: Any) -> None:
    graph, dependent = WORKLOADS[name]
    mu = search(graph, H200).candidates[0].mugraph  # verified in test_optimize.py
    [step] = mu.steps
    plan = make_plan(step, mu.tensors, H200, dependent_launch=dependent)
    golden(f"plans/{name}.txt", plan_text("k0", plan))
    r = check_resources(plan, compiled(plan))
    lines = [f"{r.threads} threads, {r.shared_bytes} bytes of shared memory, no stack"]
    lines += [f"{k:<12}{r.instructions[k]:>4}" for k in KEPT if r.instructions.get(k)]
    lines += [f"{k}" for k in sorted(r.ptx) if k.startswith("griddep")]
    golden(f"instructions/{name}.txt", "\n".join(lines))


#: opcodes of Blackwell that a plan decides: products, accesses to tensor memory, commits, loads
TENSOR_KEPT = ("UTCHMMA", "LDTM", "STTM", "UTCBAR", "UTMALDG", "LDG.E.128", "STG.E.128", "STAS")


def tensor_instructions(plan: Any) -> str:
    """The golden text of the code for B200."""
    r = check_resources(plan, compiled(plan, B200.arch))
    lines = [f"{r.threads} threads, {r.shared_bytes} bytes of shared memory, no stack"]
    return "\n".join(lines + [f"{k:<12}{r.instructions[k]:>4}" for k in TENSOR_KEPT
                              if r.instructions.get(k)])  # fmt: skip


@needs_sass
@pytest.mark.parametrize(
    "name", ["norm_linear_16x4096x4096", "norm_linear_4096x4096x4096", "gated_mlp_16x4096x4096"]
)
def test_instructions_for_blackwell(name: str, golden: Any) -> None:
    mu = search(WORKLOADS[name][0], B200).candidates[0].mugraph
    [step] = mu.steps
    golden(
        f"instructions/sm_100a/{name}.txt", tensor_instructions(make_plan(step, mu.tensors, B200))
    )


# ---------------------------------------------------------------------------------------- launches

LAUNCHES = """
from cutesuper.runtime.compile import compile_kernel
from tests.fake_runtime import cuda_tensor
from tests.plans import {maker}, request_of
from cutesuper.ir.dims import Symbol
artifact = compile_kernel(request_of({made}))
assert artifact.from_cache
kernel = artifact.load()
for m in {rows}:
    shapes = {shapes}
    kernel(*[cuda_tensor(s, "float16", pointer=0x7F0000000000 + i * 2**30)
             for i, s in enumerate(shapes)])
"""


def launches_of(plan: Any, **script: Any) -> list[Launch]:
    """Compile once, here; call it in a process whose CUDA runtime only writes down launches."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    compile_kernel(request_of(plan))
    return record_launches(LAUNCHES.format(**script))


@pytest.mark.parametrize("dependent", [False, True])
def test_one_compile_launches_any_number_of_rows(dependent: bool) -> None:
    plan = Linear(m=Symbol("M", 16), cluster=2).plan(dependent_launch=dependent)
    found = launches_of(
        plan,
        maker="Linear",
        made=f"Linear(m=Symbol('M', 16), cluster=2).plan(dependent_launch={dependent})",
        rows=(1, 16, 17, 100),
        shapes="[(m, 512), (512, 256), (m, 256)]",
    )
    assert [x.grid for x in found] == [(8, 1, 1), (8, 1, 1), (8, 2, 1), (8, 7, 1)]
    assert {x.cluster for x in found} == {(2, 1, 1)}
    assert {x.block for x in found} == {(plan.threads, 1, 1)}
    assert {x.smem for x in found} == {compiled(plan).launches[0].shared_bytes}
    assert {x.pdl for x in found} == {dependent}


def test_row_kernels_launch_any_number_of_rows() -> None:
    plan = rows_plan(Symbol("M", 16), 512, "exp")
    found = launches_of(
        plan,
        maker="rows_plan",
        made="rows_plan(Symbol('M', 16), 512, 'exp')",
        rows=(1, 16, 17, 100),
        shapes="[(m, 512), (m, 512)]",
    )
    per_block = plan.schedule.rows
    assert [x.grid for x in found] == [(-(-m // per_block), 1, 1) for m in (1, 16, 17, 100)]
    assert {(x.block, x.cluster, x.pdl) for x in found} == {
        ((plan.threads, 1, 1), found[0].cluster, False)
    }


def test_all_buckets_and_knobs_are_different_kernels() -> None:
    """Nothing in the cache can be taken for something else."""
    plans = [c.plan(dependent_launch=d) for c, d in covering()]
    digests = [compiled(p).digest for p in plans]
    assert len(set(digests)) == len(plans)
    assert digests[:2] == [compiled(p).digest for p in plans[:2]]
