"""Code that the compiler makes of row loops: resources, instructions, launches. No GPU is
needed."""

from __future__ import annotations

import shutil
from functools import cache
from typing import Any

import pytest

pytest.importorskip("cutlass")

import cutesuper as cs
from cutesuper.ir.dims import Symbol
from cutesuper.report import plan_text
from cutesuper.runtime.compile import Artifact
from cutesuper.runtime.kernel import CompiledStep
from cutesuper.runtime.toolchain import find_nvdisasm
from cutesuper.skeletons.planner import make_plan
from cutesuper.skeletons.rows.plan import RowLoopPlan, RowPlan
from cutesuper.skeletons.rows.schedule import RowLoopSchedule
from cutesuper.targets import H200
from tests.fake_runtime import Launch, record_launches
from tests.plans import compiled
from tests.row_programs import (
    Case,
    layer_norm_backward,
    losses,
    per_head_backward,
    rms_backward,
    rms_forward,
    softmax_forward,
    squared_error,
)

needs_sass = pytest.mark.skipif(find_nvdisasm() is None, reason="needs nvdisasm")

M = Symbol("M", 4096)
FEW = Symbol("M", 128)
#: every way to load, to reduce, to finish sums and to launch occurs; each takes seconds to compile
CASES: dict[str, tuple[Any, bool]] = {
    "backward": (lambda: rms_backward(4096, 4096, 128, 2), False),
    "backward_symbolic": (lambda: layer_norm_backward(M, 1024, 132, 8), True),
    "backward_few_rows": (lambda: rms_backward(FEW, 4096, 64, 2), True),
    "backward_long_rows": (lambda: rms_backward(M, 32768, 30, 1, cluster=4), True),
    "backward_odd": (lambda: rms_backward(1001, 1001, 132, 4), False),
    "backward_read_again": (lambda: rms_backward(4096, 28672, 132, 1), False),
    "heads": (lambda: per_head_backward(M, 8, 128, 16, 32), False),
    "loss": (lambda: squared_error(1000, 1024, 125, 4, dtype=cs.float32), False),
    "losses": (lambda: losses(4096, 4096), False),
    "losses_odd": (lambda: losses(1000, 1001, dtype=cs.float32), False),
    "losses_long_rows": (lambda: losses(M, 65536, 4), True),
    "softmax_long_rows": (lambda: softmax_forward(M, 65536, 4), False),
    "rms_norm_long_rows": (lambda: rms_forward(64, 100000, 8), True),
}
#: opcodes that a plan decides; the others move with every version of the compiler
KEPT = (
    "UBLKCP", "LDGSTS", "LDG.E.128", "STG.E.128", "STAS", "MUFU", "BAR", "LDS.128", "REDG",
    "LDL", "STL",
)  # fmt: skip


def case(name: str) -> Case:
    return CASES[name][0]()


@cache
def plan_of(name: str) -> RowLoopPlan:
    _, mu = case(name)
    plan = make_plan(mu.steps[0], mu.tensors, H200, dependent_launch=CASES[name][1])
    assert isinstance(plan, RowLoopPlan)
    return plan


def check(plan: RowLoopPlan) -> Artifact:
    """Check what holds for every row loop."""
    artifact = compiled(plan)
    r, [launch] = artifact.resources, artifact.launches
    assert r.stack_bytes == 0 and not r.spills
    assert r.threads == plan.threads
    assert r.registers * r.threads * plan.schedule.resident <= H200.registers
    assert 0 <= plan.shared_bytes - r.shared_bytes < 256
    dependent = plan.schedule.dependent_launch
    waits = r.ptx.get("griddepcontrol.wait", 0), r.ptx.get("griddepcontrol.launch_dependents", 0)
    assert waits == (dependent, dependent) and launch.pdl == dependent
    assert launch.cooperative == plan.meets
    assert launch.cluster == (plan.cluster, 1, 1) and launch.block == (plan.threads, 1, 1)
    if r.source == "sass":
        check_instructions(plan, r.instructions)
    return artifact


def check_instructions(plan: RowLoopPlan, found: Any) -> None:
    """Bulk loads for a ring, pushes for a cluster, one addition in memory where blocks meet, none
    otherwise. Blocks without any tile may leave their sums in code of their own."""
    assert (found.get("UBLKCP", 0) > 0) == (plan.schedule.stages > 0)
    assert (found.get("STAS", 0) > 0) == (plan.cluster > 1)
    least = int(plan.meets)
    assert least <= found.get("REDG", 0) <= least + plan.leaves_early
    for name in ("LDL", "STL", "ATOM", "ATOMG", "RED", "REDUX", "UTMALDG"):
        assert name not in found


@needs_sass
@pytest.mark.parametrize("name", CASES)
def test_row_loops_compile(name: str, golden: Any) -> None:
    plan = plan_of(name)
    r = check(plan).resources
    lines = [f"{r.threads} threads, {r.shared_bytes} bytes of shared memory, no stack"]
    lines += [f"{k:<12}{r.instructions[k]:>4}" for k in KEPT if r.instructions.get(k)]
    golden(f"instructions/row_loop_{name}.txt", "\n".join(lines))
    golden(f"plans/row_loop_{name}.txt", plan_text("k0", plan))


@needs_sass
@pytest.mark.parametrize("name", ["backward", "backward_symbolic", "heads"])
def test_vectors_are_asked_for_before_the_ring(name: str) -> None:
    """And no barrier of memory between them, which would wait for the vectors."""
    sass = compiled(plan_of(name)).sass
    before = sass[: sass.index("UBLKCP")]
    assert "MEMBAR" not in before[before.index("LDG.E.128") :]


@needs_sass
def test_few_rows_ask_for_everything_first() -> None:
    """Slices, the block's own rows and vectors: nothing is made wide before all are asked for."""
    plan = plan_of("backward_few_rows")
    s = plan.schedule
    sass = compiled(plan).sass
    before = sass[: sass.index("0xffff0000")]
    assert before.count("LDG.E.128") == 2 * plan.slice_rows + (2 * s.depth + 1) * s.chunks


def instructions(found: Any) -> int:
    """All of a kernel's, once each."""
    return sum(count for name, count in found.items() if "." not in name)


@needs_sass
@pytest.mark.parametrize("dtype", [cs.bfloat16, cs.float16])
def test_instructions_of_losses(dtype: Any) -> None:
    """For 32 elements of a thread: 1 to make each wide, 4 for the exponential and its sum, a third
    of one for the maximum. Comparing each with the label took 15 of them, and 115 registers."""
    _, mu = losses(4096, 4096, dtype=dtype)
    plan = make_plan(mu.steps[0], mu.tensors, H200)
    assert isinstance(plan, RowLoopPlan) and plan.schedule.vector * plan.schedule.chunks == 32
    r = check(plan).resources
    found = r.instructions
    assert instructions(found) <= 10 * 32 and r.registers <= 64
    assert found["ISETP"] < 32 and found["FMNMX"] < 16
    assert sum(found.get(kind, 0) for kind in ("SHF", "LOP3", "PRMT", "HADD2")) <= 1.5 * 32


@needs_sass
@pytest.mark.parametrize("dtype", [cs.bfloat16, cs.float16])
def test_instructions_of_rows(dtype: Any) -> None:
    """In the kernel that holds rows. LayerNorm: 1 to make wide each of x, weight and bias, 2 sums,
    6 in all for them and the result; it had 16 with 117 registers."""
    norm, soft = cs.new_kernel_graph(), cs.new_kernel_graph()
    x, w, b = (norm.new_input(s, dtype=dtype) for s in ((M, 4096), (4096,), (4096,)))
    norm.mark_output(norm.layer_norm(x, w, b))
    soft.mark_output(soft.softmax(soft.new_input((M, 4096), dtype=dtype)))
    for g, held, most in ((norm, 16, 15), (soft, 32, 12)):
        kernel = cs.superoptimize(g, target="h200")
        [step] = kernel.kernels
        assert isinstance(step.plan, RowPlan)
        assert step.plan.schedule.vector * step.plan.schedule.chunks == held
        r = kernel.resources
        assert instructions(r.instructions) <= most * held and r.registers <= 96 and not r.spills


def test_every_way_occurs() -> None:
    """The cases still have all of the planner's choices, which move with measurements."""
    plans = [plan_of(name) for name in CASES]
    for ways in (
        {p.schedule.stages > 0 for p in plans}, {p.schedule.kept for p in plans},
        {p.schedule.sliced for p in plans}, {p.cluster > 1 for p in plans},
        {p.meets for p in plans}, {p.ragged for p in plans}, {bool(p.outer) for p in plans},
    ):  # fmt: skip
        assert ways == {False, True}


# ---------------------------------------------------------------------------------------- launches

LAUNCHES = """
from cutesuper.runtime.compile import compile_kernel
from tests.fake_runtime import cuda_tensor
from tests.plans import request_of
from tests.test_lowering_row_loop import plan_of
for name in {names}:
    plan = plan_of(name)
    artifact = compile_kernel(request_of(plan))
    assert artifact.from_cache
    kernel = artifact.load()
    for m in {rows}:
        tensors = [([d if isinstance(d, int) else m for d in a.shape], a.dtype)
                   for a in (*plan.arguments, *plan.scratch)]
        kernel(*[cuda_tensor(s, t, pointer=0x7F0000000000 + i * 2**32)
                 for i, (s, t) in enumerate(tensors)])
"""
ROWS = (1, 5, 4096)
SYMBOLIC = (
    "backward_symbolic", "backward_few_rows", "backward_long_rows", "heads", "softmax_long_rows",
)  # fmt: skip


@pytest.fixture(scope="module")
def launches() -> dict[str, list[Launch]]:
    """Launches of every symbolic case, for 1, 5 and 4096 rows: compiled once, here, and called in a
    process whose CUDA runtime only writes down launches."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    for name in SYMBOLIC:
        compiled(plan_of(name))
    found = iter(record_launches(LAUNCHES.format(names=SYMBOLIC, rows=ROWS)))
    return {name: [next(found) for _ in ROWS] for name in SYMBOLIC}


@pytest.mark.parametrize("name", SYMBOLIC)
def test_one_compile_launches_any_number_of_rows(
    name: str, launches: dict[str, list[Launch]]
) -> None:
    """Sums fix the grid, as many blocks as leave partial results; a forward has no more than there
    are tiles."""
    plan = plan_of(name)
    tiles = [-(-m // plan.tile_rows) for m in ROWS]
    most = plan.schedule.blocks or ROWS[-1]
    free = [plan.cluster * min(t, most) for t in tiles]
    fixed = [plan.grid_blocks] * len(ROWS)
    assert [x.grid for x in launches[name]] == [(g, 1, 1) for g in (fixed if plan.sums else free)]
    assert not plan.meets or plan.grid_blocks <= H200.sms
    for x in launches[name]:
        assert (x.block, x.cluster) == ((plan.threads, 1, 1), (plan.cluster, 1, 1))
        assert (x.cooperative, x.pdl) == (plan.meets, plan.schedule.dependent_launch)
        assert x.smem == compiled(plan).launches[0].shared_bytes


# ------------------------------------------------------------------------------------ whole kernels


def test_explain_tells_of_a_row_loop() -> None:
    graph, mu = case("backward")
    kernel = cs.compile_mugraph(graph, mu, target=H200)
    [step] = kernel.kernels
    assert isinstance(step.plan, RowLoopPlan) and step.plan.key == plan_of("backward").key
    text = kernel.explain()
    for line in (
        "row loop: 128 blocks walk over M", "summed over rows: dw; all blocks meet",
        "reads x, dy, w, rstd; writes dx, dw", f"{step.plan.stages} stage(s); ", "UBLKCP ",
    ):  # fmt: skip
        assert line in text
    assert kernel.resources.stages == step.plan.schedule.stages


def test_stages_of_a_compiled_kernel() -> None:
    """Straight to registers counts as one, as for other kernels of rows."""
    straight = plan_of("backward_few_rows")
    assert straight.schedule.stages == 0
    step = CompiledStep(straight, compiled(straight))
    assert step.plan.stages == step.resources.stages == 1


def test_schedules_are_different_kernels() -> None:
    """Nothing in the cache can be taken for something else."""
    _, mu = case("backward")
    default = plan_of("backward")
    keys = {default.key}
    for schedule in (
        RowLoopSchedule(512, 8, 1, 1, 2, blocks=128), RowLoopSchedule(128, 8, 4, 4, blocks=128),
        RowLoopSchedule(256, 8, 2, 2, stages=3, blocks=128),
        RowLoopSchedule(256, 8, 2, 2, kept=False, blocks=128),
    ):  # fmt: skip
        keys.add(make_plan(mu.steps[0], mu.tensors, H200, schedule).key)
    assert len(keys) == 5
