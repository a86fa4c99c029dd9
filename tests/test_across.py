"""The tables of programs by targets, and kernels made smaller for a verifier."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

pytest.importorskip("cutlass")

from cutesuper.ir.block import AxisKind
from cutesuper.search.search import SearchOptions, search
from cutesuper.skeletons.matmul.plan import grid_shape
from cutesuper.skeletons.planner import make_plan
from cutesuper.targets import B200
from tests import zoo
from tests.across import FILE, PAGE, small_plan, written
from tests.blackwell_plans import CASES, embedded
from tests.plans import Linear, specs, whole_mugraph
from tests.shrunk import shrunk


def test_the_tables_of_the_page_are_those_of_the_file() -> None:
    data, page = json.loads(FILE.read_text()), PAGE.read_text(encoding="utf-8")
    assert written(page, data) == page
    assert list(data["plans"]) == list(CASES)
    for name, key in data["plans"].items():
        assert data["verdicts"][key]["result"] == CASES[name].result, name


def test_a_smaller_kernel_keeps_tiles_cluster_and_schedule() -> None:
    mu = whole_mugraph(zoo.rms_norm_linear(13, 4096, 4096), B200)
    [step] = mu.steps
    whole = make_plan(step, mu.tensors, B200)
    less, tensors = shrunk(step, mu.tensors)
    small = make_plan(less, tensors, B200, whole.schedule)
    assert less.program.tile == step.program.tile and less.program.ops == step.program.ops
    assert small.shared_bytes == whole.shared_bytes and small.threads == whole.threads
    [cluster] = less.program.of_kind(AxisKind.CLUSTER)
    assert cluster in step.program.axes and less.program.blocks() == 2 * less.program.parts(cluster)
    assert tensors["in0"].shape[0] == 13  # a tile that is not full stays so


def test_blocks_that_walk_are_one_cluster_over_two_tiles() -> None:
    linear = Linear(m=4096, n=4096, tile_m=128, tile_n=256, tile_k=64, norm=False)
    pairs = replace(linear.plan(B200).schedule, share_rows=2)
    whole, tensors = linear.plan(B200, schedule=pairs), specs(linear.shapes(), linear.dtype)
    assert whole.schedule.persistent == 148 and whole.schedule.share_rows == 2
    small = small_plan(linear.block().step("linear"), tensors, whole, B200)
    assert grid_shape(small) == (2, 1, 1) and small.tiles == 4
    assert small.tile == whole.tile and small.schedule == replace(whole.schedule, persistent=2)


def test_tensors_that_an_index_reads_keep_their_extents() -> None:
    mu = search(embedded(), B200, options=SearchOptions(lowered=True)).candidates[0].mugraph
    assert shrunk(mu.steps[0], mu.tensors)[1] == mu.tensors
