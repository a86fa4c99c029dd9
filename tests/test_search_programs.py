"""The programs that the search is measured on: what is found is right, complete and in time."""

from __future__ import annotations

import time
from functools import cache

import pytest

from benchmarks.search.programs import PROGRAMS
from cutesuper.ir.block import (
    ACCUMULATE,
    CLUSTER_REDUCE,
    GRID_REDUCE,
    AxisKind,
    BlockProgram,
    MuGraph,
)
from cutesuper.ir.check import check_block_program, check_mugraph, passes
from cutesuper.ir.graph import KernelGraph, Tensor, new_kernel_graph
from cutesuper.search.cuts import Flat
from cutesuper.search.region import SearchOptions, Way, search_region
from cutesuper.search.search import SearchResult, search
from cutesuper.targets import H200
from cutesuper.verify.equivalence import Verifier
from cutesuper.verify.numeric import compare
from tests.host_time import within
from tests.one_block import one_block
from tests.shifted import unshifted

#: besides the speed of the machine: verifying, and other work in the caches of the processor
SLOWER = 2.0


def run(graph: KernelGraph, keep: int = 16) -> SearchResult:
    """Search with the verifier: nothing is rejected, everything is legal, cheapest first."""
    verifier = Verifier(graph)
    result = search(
        graph,
        H200,
        options=SearchOptions(keep=keep),
        verify=lambda mu: bool(verifier.check(mu, bound=False)),
    )
    assert result.statistics.rejected == 0 and result.statistics.complete
    for c in result.candidates:
        check_mugraph(c.mugraph)
    costs = [c.cost_us for c in result.candidates]
    assert costs == sorted(costs)
    return result


@cache
def found(name: str) -> tuple[SearchResult, float]:
    """The result of the search for a program, and the CPU seconds that it took."""
    graph = PROGRAMS[name].build()
    start = time.process_time()
    result = run(graph)
    return result, time.process_time() - start


def best(name: str) -> MuGraph:
    return found(name)[0].candidates[0].mugraph


def kinds(program: BlockProgram) -> list[str]:
    return [op.kind for op in program.ops]


def has_maximum(graph: KernelGraph) -> bool:
    return any(n.operator == "max" for n in graph.expanded().nodes)


@pytest.mark.parametrize("name", list(PROGRAMS))
def test_program(name: str) -> None:
    """Legal, verified, in time; the most fused program is there, whichever is the cheapest."""
    result, seconds = found(name)
    program = PROGRAMS[name]
    if program.kernels is not None:
        assert min(len(c.mugraph.steps) for c in result.candidates) <= program.kernels
    assert within(seconds, SLOWER * program.seconds)
    if has_maximum(program.build()):
        for c in result.candidates:
            assert not unshifted(c.mugraph), c.structure


@pytest.mark.parametrize("name", list(PROGRAMS))
def test_numbers(name: str) -> None:
    """Everything that is found at small extents computes its definition in float64."""
    program = PROGRAMS[name]
    graph = program.build(**program.small)
    keep = 4 if name == "Llama decoder layer" else 16  # a second each
    for c in run(graph, keep).candidates:
        report = compare(graph, c.mugraph)
        assert report, f"{c.structure}: {report.message}"
        assert not has_maximum(graph) or not unshifted(c.mugraph), c.structure


# --------------------------------------------------------------------------------- what is found


def ways(name: str) -> tuple[Way, ...]:
    """All ways to run the whole of a program."""
    flat = Flat(PROGRAMS[name].build().expanded())
    region = flat.segment(flat.order).region
    return search_region(region, H200, SearchOptions(keep=64)).ways


@pytest.mark.parametrize("name", ["GQA", "attention, scale"])
def test_both_forms_of_attention_with_divided_keys(name: str) -> None:
    """Partial results that a second kernel combines, and a cluster that combines them itself."""
    safe, all_ways = has_maximum(PROGRAMS[name].build()), ways(name)
    in_two = [w for w in all_ways if len(w.programs) == 2 and len(w.partials) == 2 + safe]
    in_one = [
        w
        for w in all_ways
        if not w.partials and {ACCUMULATE, CLUSTER_REDUCE} <= set(kinds(w.programs[0]))
    ]
    assert in_two and in_one
    for w in (in_two[0], in_one[0]):
        first = w.programs[0]
        keys = first.of_kind(AxisKind.LOOP)[0].dim  # one pass over keys and values
        assert kinds(first).count("matmul") == 2
        assert set(passes(first, check_block_program(first)).values()) <= {1}
        divided = AxisKind.GRID if w.partials else AxisKind.CLUSTER
        assert divided in {a.kind for a in first.axes_of(keys)}


@pytest.mark.parametrize("name", ["attention, scale", "attention, causal"])
def test_the_softmax_of_attention_is_rescaled(name: str) -> None:
    first = best(name).steps[0].program
    rescaled = [op for op in first.ops if op.rescaled]
    assert {op.kind for op in rescaled} >= {ACCUMULATE} and len(rescaled) >= 2


def test_layer_norm_and_linear_walk_the_loop_several_times() -> None:
    """The mean, the variance, the product: one kernel, whichever program is the cheapest."""
    walks = [
        passes(p, check_block_program(p)).get("K.loop", 1)
        for w in ways("LayerNorm + Linear")
        for p in w.programs
        if "matmul" in kinds(p)
    ]
    assert max(walks) > 1


@pytest.mark.parametrize("name", ["RMSNorm backward", "RMSNorm backward, long rows"])
def test_backward_of_a_norm_reads_its_inputs_once(name: str) -> None:
    """dx and dw leave one kernel, which a skeleton runs; nothing lies between kernels."""
    mu = best(name)
    (step,) = mu.steps
    assert set(mu.tensors) == {*mu.inputs, *mu.outputs}
    assert kinds(step.program).count("load") == len(mu.inputs)
    assert GRID_REDUCE in kinds(step.program)


@pytest.mark.parametrize("name", ["RMSNorm backward", "RMSNorm backward, long rows"])
def test_partial_sums_may_be_left_to_a_second_kernel(name: str) -> None:
    """Programs of any form: dx and the partial sums of dw leave one kernel."""
    first, second = next(w for w in ways(name) if w.partials).programs
    assert {op.attributes["tensor"] for op in first.stores()} == {"out0", "part0"}
    assert {op.attributes["tensor"] for op in second.stores()} == {"out1"}


def test_a_decoder_layer_takes_few_kernels() -> None:
    assert len(best("Llama decoder layer").steps) <= 10


# --------------------------------------------------------------------- the rule for exponentials


def _scores(rule: str) -> KernelGraph:
    g = new_kernel_graph()
    x, y = g.new_input((4, 8), name="X"), g.new_input((4, 8), name="Y")

    def shifted() -> Tensor:
        if rule == "none":
            return g.mul(g.sub(x, 0.0), g.max(y, -1))
        if rule == "other value":
            return g.sub(x, g.max(y, -1))
        if rule == "masked maximum only":
            return g.sub(x, g.max(g.causal_mask(g.mul(x, y)), -1))
        return g.sub(x, g.max(x, -1))

    g.mark_output(g.add(g.exp(shifted()), y))
    return g


@pytest.mark.parametrize("rule", ["none", "other value", "masked maximum only"])
def test_exponentials_that_may_overflow_are_seen(rule: str) -> None:
    assert unshifted(one_block(_scores(rule)))


def test_exponentials_that_cannot_overflow_are_accepted() -> None:
    assert not unshifted(one_block(_scores("own maximum")))
