"""Attention over symbolic numbers of queries and keys: one program and one kernel for all."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import cutesuper as cs
from cutesuper.errors import LoweringError, SearchError, ShapeError
from cutesuper.ir.block import KernelStep, MuGraph
from cutesuper.ir.dims import Symbol, Tiles
from cutesuper.ir.graph import KernelGraph, new_kernel_graph, symbol
from cutesuper.report import plan_text
from cutesuper.search.region import SearchOptions
from cutesuper.search.search import search
from cutesuper.skeletons.attention.plan import AttentionPlan
from cutesuper.skeletons.base import view_of
from cutesuper.skeletons.planner import make_plan
from cutesuper.targets import H200

torch = pytest.importorskip("torch")

from cutesuper.ir.evaluate import run_reference  # noqa: E402
from cutesuper.runtime.checks import Signature  # noqa: E402 (they import torch)
from cutesuper.runtime.programs import Kept  # noqa: E402
from cutesuper.runtime.scratch import Need, ScratchMemory, places_of  # noqa: E402
from cutesuper.torch.ops.attention import calls  # noqa: E402
from cutesuper.verify.equivalence import verify  # noqa: E402

L, S = symbol("L", 8), symbol("S", 4096)


def attention(rows: Any = L, keys: Any = S, alignment: str = "") -> KernelGraph:
    g = new_kernel_graph()
    q = g.new_input((1, 2, 2, rows, 64), name="Q")
    k, v = (g.new_input((1, 2, 1, keys, 64), name=n) for n in "KV")
    scores = g.mul(g.matmul(q, g.transpose(k)), 0.125)
    scores = g.causal_mask(scores, alignment) if alignment else scores
    g.mark_output(g.matmul(g.softmax(scores), v))
    return g


def found(graph: KernelGraph) -> MuGraph:
    return search(graph, H200, options=SearchOptions(lowered=True)).candidates[0].mugraph


def planned(mu: MuGraph) -> AttentionPlan:
    (step,) = mu.steps
    plan = make_plan(step, mu.tensors, H200)
    assert isinstance(plan, AttentionPlan)
    return plan


# --------------------------------------------------------------------------------- program and plan


@pytest.mark.parametrize("alignment", ["", "top_left", "bottom_right"])
def test_one_program_for_all_lengths(alignment: str) -> None:
    graph = attention(alignment=alignment)
    mu = found(graph)
    assert verify(graph, mu)
    plan = planned(mu)
    opened = {a.name for a in plan.program.axes if a.extent is None}
    assert opened == {f"{plan.rows[0]}.grid", f"{plan.keys}.loop"}
    assert plan.varying and plan.ragged
    key = plan.view(plan.key_load)
    (heads,) = (d for d in key.labels if d not in (plan.keys, plan.inner))
    assert (key.stride(plan.keys), key.growth(plan.keys)) == (64, ())
    assert (key.stride(heads), key.growth(heads)) == (64, (S,))


def test_the_hint_of_a_length_is_not_in_the_code() -> None:
    mu = found(attention(alignment="bottom_right"))
    plan, (step,) = planned(mu), mu.steps
    other = {"L": Symbol("L", 77), "S": Symbol("S", 99)}

    def renewed(d: Any) -> Any:
        return other[d.name] if isinstance(d, Symbol) else d

    dims = {n: renewed(d) for n, d in step.program.dims.items()}
    tensors = {n: replace(t, shape=tuple(map(renewed, t.shape))) for n, t in mu.tensors.items()}
    again = KernelStep(step.name, replace(step.program, dims=dims))
    assert make_plan(again, tensors, H200, plan.schedule).key == plan.key


def test_the_offset_of_a_mask_to_the_last_key() -> None:
    plan = planned(found(attention(alignment="bottom_right")))
    (mask,) = plan.masks
    assert (mask.offset, mask.added, mask.taken) == (1, plan.keys, mask.rows)
    assert plan.offset(mask) == 1 + 4096 - 8
    assert f"keys {plan.keys} < {mask.rows} + S - L + 1" in plan_text("k0", plan)


def test_scratch_memory_for_tiles_of_rows() -> None:
    plan = planned(found(attention()))
    if plan.grid_parts == 1:
        plan = planned(found(attention(keys=symbol("S", 65536))))
    parts, counters = plan.scratch
    tiles = Tiles(L, plan.tile(plan.rows[0]))
    assert plan.grid_parts > 1 and tiles.tile > 1
    assert parts.shape[:-1] == counters.shape[:-1] == (tiles,)
    q, k = (1, 2, 2, L, 64), (1, 2, 1, S, 64)
    needs = [Need(s.shape, torch.float32, False) for s in plan.scratch]
    memory = ScratchMemory(needs, places_of([q, k]))
    tensors = [torch.empty(1, 2, 2, 3 * tiles.tile + 1, 64), torch.empty(1, 2, 1, 5, 64)]
    each = [n for s in plan.scratch if isinstance(n := s.shape[-1], int)]
    assert [len(t) for t in memory.allot(tensors)] == [4 * n for n in each]


def test_what_may_not_be_symbolic() -> None:
    g = new_kernel_graph()
    x, w = g.new_input((16, 4, S, 64), name="X"), g.new_input((64, 64), name="W")
    g.mark_output(g.matmul(x, w))
    with pytest.raises(SearchError, match="S not as its first dimension"):
        found(g)


@pytest.mark.parametrize("reduced", ["sums over the rows of a tile", "a row of positions"])
def test_row_loops_with_symbols_inside_are_refused(reduced: str) -> None:
    g = new_kernel_graph()
    x = g.new_input((4, S, 64), "float16")
    rows = reduced == "sums over the rows of a tile"
    g.mark_output(g.sum(x, 1) if rows else g.sum(g.transpose(x), -1))
    with pytest.raises(SearchError, match="S not as its first dimension"):
        found(g)


def test_keys_stored_along_a_symbol_are_refused() -> None:
    mu = found(attention())
    (step,) = mu.steps
    load = next(op for op in step.program.loads() if op.attributes["tensor"] == mu.inputs[1])
    last = replace(load, attributes={**load.attributes, "map": (*load.attributes["map"][:3],
                   *load.attributes["map"][:2:-1])})  # fmt: skip
    ops = tuple(last if op is load else op for op in step.program.ops)
    name = mu.inputs[1]
    tensors = {**mu.tensors, name: replace(mu.tensors[name], shape=(1, 2, 1, 64, S))}
    moved = KernelStep(step.name, replace(step.program, ops=ops))
    with pytest.raises(LoweringError, match="is stored along S, which is symbolic"):
        make_plan(moved, tensors, H200)
    assert view_of(last, planned(mu).arguments).labels


# ------------------------------------------------------------------------------------------ calls


def test_inputs_are_bound_by_every_dimension() -> None:
    signature = Signature(attention())
    q, k = torch.empty(1, 2, 2, 5, 64).half(), torch.empty(1, 2, 1, 7, 64).half()
    assert signature.bind([q, k, k]) == {"L": 5, "S": 7}
    assert signature.output_shapes({"L": 5, "S": 7})[0][0] == (1, 2, 2, 5, 64)
    with pytest.raises(ShapeError, match=r"\[1, 2, 1, 8, 64\], must be .*; L is 5.*S is 7 in an"):
        signature.bind([q, k, torch.empty(1, 2, 1, 8, 64).half()])
    with pytest.raises(ShapeError, match=r"input K has shape \[1, 3, 1, 7, 64\]"):
        signature.bind([q, torch.empty(1, 3, 1, 7, 64).half(), k])


def test_a_serving_loop_needs_a_handful_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of 1 to 3000 positions, then tokens one by one, keys in tensors that grow."""
    kinds = set[Any]()

    def runner(kind: Any, extents: Any, device: Any) -> Any:
        kinds.add(kind)
        return lambda inputs: [inputs[0].new_empty(1, 1, 2, extents.rows, 8)]

    monkeypatch.setattr(calls, "runner_of", runner)
    monkeypatch.setattr(calls, "_plans", Kept())
    for n in range(1, 3001):
        q, k = torch.empty(1, 2, n, 8), torch.empty(1, 1, n, 8)
        cs.ops.attention(q, k, k, is_causal=True, enable_gqa=True)
        cs.ops.attention(q[:, :, :1].contiguous(), k, k, enable_gqa=True)
    prefill = {k for k in kinds if k.causal and isinstance(k.rows, Symbol)}
    assert (len(prefill), len(kinds)) == (4, 7)


# ----------------------------------------------------------------------------------------- export


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")
def test_an_exported_program_reads_strides_off_its_tensors(tmp_path: Path) -> None:
    kernel = cs.superoptimize(attention(), target="h200")
    kernel.export(tmp_path / "attention.so")
    program = cs.load(tmp_path / "attention.so")
    q, k, v = (torch.randn(1, 2, *s, 64).half() for s in ((2, 5), (1, 7), (1, 7)))
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(program(q, k, v), wanted, rtol=2e-3, atol=2e-3)
    ((launch, _),) = program._compact
    axes = [[[axis for *_, axis in side] for side in sides] for _, *sides in launch._fields]
    assert axes[0] == [[3], [0, 1, 2]] and axes[1] == [[3], [0, 1, 2]]


# --------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("alignment", ["", "top_left", "bottom_right"])
def test_one_kernel_for_all_lengths(alignment: str) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels are for sm_90a")
    from cutesuper.pipeline import best_kernel

    torch.manual_seed(0)
    kernel = best_kernel(attention(alignment=alignment))
    for rows, keys in ((1, 1), (1, 65), (7, 63), (8, 64), (9, 127), (31, 331), (67, 67), (40, 7)):
        q, k, v = (
            torch.randn(1, 2, *s, 64, device="cuda").half()
            for s in ((2, rows), (1, keys), (1, keys))
        )
        offset = max(0, keys - rows) if alignment == "bottom_right" else 0
        sees = torch.ones(rows, keys, dtype=torch.bool, device="cuda")
        sees = sees.tril(offset) if alignment else sees
        scores = (q.double() @ k.double().transpose(-1, -2)) / 8
        wanted = scores.masked_fill(~sees, -torch.inf).softmax(-1) @ v.double()
        assert (kernel(q, k, v).double() - wanted).abs().max() < 2e-3


@pytest.mark.gpu
def test_strides_of_extents_of_one_do_not_matter() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels are for sm_90a")
    from cutesuper.pipeline import best_kernel

    torch.manual_seed(0)
    kernel = best_kernel(attention(rows=1))
    q, k = torch.randn(1, 2, 2, 1, 64, device="cuda").half(), torch.randn(1, 2, 1, 70, 64).half()
    k = k.to(q.device)
    odd = k.as_strided(k.shape, (7, 70 * 64, 3, 64, 1))
    assert torch.equal(kernel(q, odd, odd), kernel(q, k, k))


def transposed(g: KernelGraph) -> None:
    g.mark_output(g.exp(g.transpose(g.new_input((3, L, S, 8), name="x"), (0, 1, 3, 2))))


def of_heads(g: KernelGraph) -> None:
    x, y = (g.new_input((3, *s, 40), name=n) for n, s in (("x", (L, 2)), ("y", (2, L))))
    g.mark_output(g.sum(g.mul(g.transpose(x, (0, 2, 1, 3)), y), -1))


def over_sequences(g: KernelGraph) -> None:
    x = g.new_input((5, 2, L, S), "bfloat16", name="x")
    g.mark_output(g.sum(x, 0), "float32")


@pytest.mark.gpu
@pytest.mark.ptx
@pytest.mark.parametrize("program", [transposed, of_heads, over_sequences])
def test_rows_with_symbols_inside(program: Callable[[KernelGraph], None]) -> None:
    """One kernel of rows for all extents; a row itself may be strided by a symbol."""
    from cutesuper.pipeline import best_kernel

    graph = new_kernel_graph()
    program(graph)
    kernel = best_kernel(graph)
    assert [type(s.plan).__name__ for s in kernel.variant.steps] == ["RowPlan"]
    for rows, keys in ((1, 1), (7, 33), (64, 5)):
        torch.manual_seed(rows)
        bound = {"L": rows, "S": keys}
        shapes = [graph.nodes[i].shape for i in graph.inputs]
        inputs = [
            torch.randn([bound[d.name] if isinstance(d, Symbol) else d for d in s], device="cuda")
            .to(graph.nodes[i].dtype.torch)
            for i, s in zip(graph.inputs, shapes, strict=True)
        ]  # fmt: skip
        [want] = run_reference(graph, [t.cpu() for t in inputs])
        torch.testing.assert_close(kernel(*inputs).cpu(), want, rtol=2e-3, atol=2e-3)
