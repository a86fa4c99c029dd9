"""The compiler's output for attention loops: resources, instructions, launches, exports. No GPU is
needed."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cutlass")

import cutesuper as cs
from cutesuper.ir.graph import KernelGraph, new_kernel_graph
from cutesuper.report import kernel_notes, plan_text
from cutesuper.runtime.compile import Artifact
from cutesuper.runtime.kernel import CompiledStep, Kernel, Variant
from cutesuper.runtime.toolchain import find_nvdisasm
from cutesuper.skeletons.attention.plan import AttentionPlan
from cutesuper.skeletons.planner import make_plan
from cutesuper.targets import B200, H200, Target
from tests.attention import Attention
from tests.fake_runtime import record_launches
from tests.mugraphs import attention, attention_kernel
from tests.plans import compiled
from tests.test_lowering import KEPT, check_resources, tensor_instructions

needs_sass = pytest.mark.skipif(find_nvdisasm() is None, reason="needs nvdisasm")

#: every width, split, mask, norm, type and launch occurs
CASES: dict[str, tuple[Attention, bool]] = {
    "decode_grid_cluster": (
        Attention(group=4, rows=0, keys=4096, width=128, dtype="bfloat16", grid=8, cluster=2), True,
    ),
    "decode_two_blocks_an_sm": (Attention(heads=140, group=4, rows=0, keys=512), False),
    "gqa_cluster_8": (
        Attention(rows=64, keys=4096, keys_last=True, scale=None, cluster=8, key_tile=128), False,
    ),
    "gqa_cluster_2": (
        Attention(rows=256, keys=4096, keys_last=True, scale=None, cluster=2, key_tile=128), True,
    ),
    "prefill_causal": (
        Attention(
            group=4, rows=512, row_tile=16, keys=512, width=128, dtype="bfloat16",
            causal="top_left",
        ),
        False,
    ),
    "seven_heads_to_the_last_key": (
        Attention(group=7, rows=100, row_tile=9, keys=1000, causal="bottom_right"), True,
    ),
    "rows_128": (Attention(rows=300, row_tile=128, keys=1000, width=128), False),
    "width_96_grid": (Attention(rows=60, keys=700, width=96, grid=3), False),
    "width_256": (Attention(rows=60, keys=700, width=256, cluster=2, dtype="bfloat16"), False),
    "width_40": (Attention(rows=60, keys=704, width=40, keys_last=True), False),
    "width_72": (Attention(rows=300, keys=777, width=72), False),
    "norms_of_queries_and_values": (
        Attention(rows=100, keys=1000, norm="QV", keys_last=True, scale=None, cluster=4), False,
    ),
    "norms_of_queries_and_keys": (Attention(rows=64, width=256, norm="QK", keys=500), True),
    "norm_of_keys_stored_across": (Attention(rows=50, keys=600, norm="QK", keys_last=True), False),
}  # fmt: skip


def plan_of(attention: Attention, dependent: bool = False, target: Target = H200) -> AttentionPlan:
    mu = attention.mugraph()
    plan = make_plan(mu.steps[0], mu.tensors, target, dependent_launch=dependent)
    assert isinstance(plan, AttentionPlan)
    return plan


def check(plan: AttentionPlan) -> Artifact:
    """Check what holds for every attention loop."""
    artifact = compiled(plan)
    r = check_resources(plan, artifact)
    assert plan.shared_bytes - r.shared_bytes < 1280
    limit = 65536 // (plan.threads * plan.schedule.resident) // 8 * 8
    assert r.registers <= min(255, limit)
    assert (r.instructions.get("USETMAXREG", 0) > 0) == (plan.registers is not None)
    assert artifact.launches[0].cluster[0] == plan.cluster
    return artifact


@needs_sass
@pytest.mark.parametrize("name", CASES)
def test_attention_compiles(name: str, golden: Any) -> None:
    plan = plan_of(*CASES[name])
    artifact = check(plan)
    r = artifact.resources
    # a product waits for those before it once; where the compiler serialises, for every instruction
    assert artifact.sass.count("WARPGROUP.DEPBAR") == (4 if plan.schedule.overlapped else 2)
    first, second = plan.depth // 16, plan.key_tile // 16
    assert r.instructions["HGMMA"] == (first + second) * (2 if plan.schedule.overlapped else 1)
    lines = [f"{r.threads} threads, {r.shared_bytes} bytes of shared memory, no stack"]
    lines += [f"{k:<12}{r.instructions[k]:>4}" for k in KEPT if r.instructions.get(k)]
    golden(f"instructions/attention_{name}.txt", "\n".join(lines))
    golden(f"plans/attention_{name}.txt", plan_text("k0", plan))


@needs_sass
def test_maxima_are_found_during_the_product_of_values() -> None:
    """What the compiler does with the order of the loop decides its speed: docs/notebook."""
    plan = plan_of(*CASES["rows_128"])
    waits = r"WARPGROUP\.DEPBAR\.LE gsb0, (0x[01])"
    _, *found = re.split(waits, compiled(plan).sass)
    parts = dict(zip(found[::2], found[1::2], strict=True))
    own = 2 * plan.key_tile // 4  # numbers of a thread: of two rows, which four threads share
    assert parts["0x1"].count("FMNMX") >= own - 2
    assert parts["0x1"].count("MUFU.EX2") <= 2
    assert "STG" in parts["0x0"], "the last wait is that behind the loop"


@needs_sass
@pytest.mark.parametrize("name", ["decode_grid_cluster", "prefill_causal", "rows_128"])
def test_instructions_for_blackwell(name: str, golden: Any) -> None:
    plan = plan_of(*CASES[name], B200)
    golden(f"instructions/sm_100a/attention_{name}.txt", tensor_instructions(plan))


LAUNCH = """
from cutesuper.runtime.compile import compile_kernel
from tests.fake_runtime import cuda_tensor
from tests.plans import request_of
from tests.test_lowering_attention import CROWDED, plan_of
plan = plan_of(CROWDED)
artifact = compile_kernel(request_of(plan))
assert artifact.from_cache
artifact.load()(*[cuda_tensor(a.shape, a.dtype, pointer=0x7F0000000000 + i * 2**32)
                  for i, a in enumerate(plan.arguments)])
"""
#: more heads of keys than the second and third dimension of a grid can count
CROWDED = Attention(heads=70000, group=4, rows=65, row_tile=16, keys=64)


def test_any_number_of_blocks() -> None:
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    compiled(plan_of(CROWDED))
    [launch] = record_launches(LAUNCH)
    assert launch.grid == (70000 * 5, 1, 1)


def graph(*shapes: tuple[int, ...], across: bool = False, **options: Any) -> KernelGraph:
    """Attention of a query, keys, values; ``across``: values are stored with keys last."""
    g = new_kernel_graph()
    q, k, v = (g.new_input(s, name=n) for s, n in zip(shapes, "QKV", strict=True))
    v = g.transpose(v) if across else v
    g.mark_output(g.scaled_dot_product_attention(q, k, v, scale=0.125, **options))
    return g


GRAPHS: dict[str, KernelGraph] = {
    "grouped": graph((2, 4, 4, 128), (2, 4, 1000, 128), (2, 4, 1000, 128)),
    "one query": graph((8, 1, 64), (8, 1000, 64), (8, 1000, 64), is_causal=True),
    "values across": graph((2, 64, 64), (2, 1000, 64), (2, 64, 1000), across=True),
    "prefill": graph((2, 4, 100, 64), (2, 1, 300, 64), (2, 1, 300, 64), is_causal=True),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_attention_becomes_one_kernel(name: str) -> None:
    dependent = name == "grouped"
    kernel = cs.superoptimize(GRAPHS[name], target=H200, dependent_launch=dependent)
    [step] = kernel.kernels
    assert isinstance(step.plan, AttentionPlan)
    assert step.plan.schedule.dependent_launch == dependent
    check(step.plan)
    text = kernel.explain()
    assert "attention loop: rows" in text and "weight: exp(score - running maximum)" in text
    assert f"{step.plan.schedule.stages} stage(s)" in text


def test_without_a_maximum_over_a_cluster() -> None:
    """A muGraph by hand: exponentials and their sums are plain sums over the keys."""
    graph = attention(heads=2, m=4, n=512, d=64)
    kernel = cs.compile_mugraph(graph, attention_kernel(graph), target=H200)
    [step] = kernel.kernels
    assert isinstance(step.plan, AttentionPlan) and step.plan.maximum is None
    assert step.plan.cluster == 2 and check(step.plan).launches[0].cluster[0] == 2


def test_an_export_brings_its_own_scratch(tmp_path: Path) -> None:
    """Partial results and counters are described in the file, as the caller needs not know them."""
    attention = Attention(group=4, rows=0, keys=4096, width=128, grid=8, cluster=2)
    mu = attention.mugraph()
    plan = plan_of(attention)
    step = CompiledStep(plan, compiled(plan))
    variant = Variant(mu, (step,), notes=lambda: [kernel_notes(step)])
    kernel = Kernel(attention.graph(), H200, lambda hints: variant)
    kernel.draw(tmp_path / "page.html")
    assert "the last one to arrive adds" in (tmp_path / "page.html").read_text()
    path = tmp_path / "attention.so"
    kernel.export(path)
    described = cs.load(path).tensors
    partials, counters = described[len(mu.tensors) :]
    assert (partials["shape"], partials["zeroed"]) == (list(plan.scratch[0].shape), False)
    assert (counters["shape"], counters["zeroed"]) == (list(plan.scratch[1].shape), True)
