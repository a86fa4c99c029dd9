"""Keys and values in pages: views, plans, refusals, and what the compiler makes of them. No GPU."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import pytest

import cutesuper as cs
from cutesuper.errors import LoweringError
from cutesuper.ir.block import LOAD, KernelStep, TensorSpec
from cutesuper.ir.dims import Dim, ceil_div
from cutesuper.search.search import SearchOptions, search
from cutesuper.skeletons.attention.plan import AttentionPlan
from cutesuper.skeletons.base import Pages, View, arguments_of, view_of
from cutesuper.skeletons.planner import make_plan
from cutesuper.targets import H200
from tests.mugraphs import Block
from tests.plans import compiled, specs

SIZES = (16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Paged:
    """``softmax(Q K^T) U``, Q ``[B, heads..., L, D]``, caches ``[pages, size, heads..., D]``.

    Attributes:
        tables: through which K and U are read; None: they are ``[B, keys, heads..., D]``.
        size: positions of a page.
        keys: positions of a sequence.
        heads: extents of the labels of the heads.
        tile: of the keys.
        lengths: whether a tensor limits the keys of each sequence.
    """

    tables: tuple[str | None, str | None] = ("T", "T")
    size: int = 32
    keys: int = 2048
    heads: dict[str, int] = field(default_factory=lambda: {"H": 2})
    rows: int = 4
    width: int = 64
    dtype: str = "bfloat16"
    tile: int = 64
    lengths: bool = True

    def step(self) -> KernelStep:
        """One walk over the keys."""
        batch = {"B": 3, **self.heads}
        inner = {"L": self.rows, "N": self.keys, "D": self.width, "E": self.width}
        axes: dict[str, int | None] = {f"{d}.grid": e for d, e in batch.items()}
        axes["N.loop"] = ceil_div(self.keys, self.tile)
        tile = {**dict.fromkeys(batch, 1), **inner, "N": self.tile}
        b = Block({**batch, **inner}, axes, tile)
        q = b.load("Q", "B", *self.heads, "L", "D")
        k = self._load(b, "K", self.tables[0], "D")
        s = b.op("matmul", q, k, over="D")
        if self.lengths:
            n = b.load("S", "B")
            s = b.op("length_mask", s, n, rows=None, columns="N", causal=False)
        part = b.op("max", s, over="N")
        e = b.op("exp", b.op("sub", s, part))
        u = self._load(b, "U", self.tables[1], "E")
        sums = b.op("matmul", e, u, over="N"), b.op("sum", e, over="N")
        _, y, total = b.online("N", part, *sums)
        b.store("Z", b.op("div", y, total), "B", *self.heads, "L", "E")
        return b.step("attention")

    def _load(self, b: Block, name: str, table: str | None, inner: str) -> int:
        labels = ("B", "N", *self.heads, inner)
        pages = {} if table is None else {"table": table}
        return b._add(LOAD, (), set(labels), tensor=name, map=labels, **pages)

    def tensors(self) -> dict[str, TensorSpec]:
        """The tensors of the kernel."""
        heads, pages = tuple(self.heads.values()), self.keys // self.size
        cache = (3 * pages + 5, self.size, *heads, self.width)
        plain = (3, self.keys, *heads, self.width)
        rows = (3, *heads, self.rows, self.width)
        k, u = (plain if t is None else cache for t in self.tables)
        shapes: dict[str, tuple[Dim, ...]] = {
            "Q": rows, "K": k, "U": u, "Z": rows, "S": (3,), "T": (3, pages), "T2": (3, pages),
        }  # fmt: skip
        return specs(shapes, self.dtype, S="int32", T="int32", T2="int32")

    def plan(self, **options: Any) -> AttentionPlan:
        """The kernel, planned."""
        plan = make_plan(self.step(), self.tensors(), H200, **options)
        assert isinstance(plan, AttentionPlan)
        return plan


# --- plans ---------------------------------------------------------------------------------------


def test_a_view_of_pages() -> None:
    """Strides of one page; sequences have none, the table places them."""
    plan = Paged().plan()
    names = [a.name for a in plan.arguments]
    assert names == ["Q", "K", "T", "S", "U", "Z"]
    assert [a.dtype for a in plan.arguments if a.name in "TS"] == ["int32", "int32"]
    view = plan.view(plan.key_load)
    assert view == Pages(1, ("N", "H", "D"), (128, 64, 1), 2, "B", "N", 32, 32 * 128)
    value = plan.view(plan.value_load)
    assert isinstance(value, Pages) and (value.argument, value.table) == (4, 2)
    assert plan.batch == ("B", "H") and plan.rows == ("L",)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("tables", [("T", "T"), ("T", "T2"), ("T", None), (None, "T")])
def test_operands_in_pages_or_not(tables: tuple[str | None, str | None], size: int) -> None:
    plan = Paged(tables, size).plan()
    kinds = [type(plan.view(i)) for i in (plan.key_load, plan.value_load)]
    assert kinds == [View if t is None else Pages for t in tables]
    assert plan.paged


def test_one_sequence() -> None:
    """The label of the sequences may be missing, where there is one."""
    step = Paged().step()
    ops = [replace(op, attributes={**op.attributes, "map": (None, *op.attributes["map"][1:])})
           if "table" in op.attributes else op for op in step.program.ops]  # fmt: skip
    view = view_of(ops[1], arguments_of(step, Paged().tensors()))
    assert isinstance(view, Pages) and view.sequences is None and view.labels == ("N", "H", "D")


def test_keys_tell_pages_from_tensors() -> None:
    """Names do not count in the key of a plan, what they stand for does."""
    other = Paged(("T2", "T2")).plan()
    assert Paged().plan().key == other.key
    assert len({Paged(t).plan().key for t in (("T", "T"), ("T", "T2"), ("T", None))}) == 3
    assert len({Paged(size=s).plan().key for s in SIZES}) == len(SIZES)


def test_the_producer_keeps_registers_for_pages() -> None:
    paged = Paged(width=128, tile=128, rows=128)
    assert paged.plan().registers == (232, 40)
    assert replace(paged, tables=(None, None)).plan().registers == (240, 24)


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [8, 24, 512])
def test_pages_of_other_sizes_are_refused(size: int) -> None:
    with pytest.raises(LoweringError, match=rf"pages of {size} positions; use 16, 32.* or 256"):
        Paged(size=size, keys=1536).plan()


def test_too_many_dimensions_are_refused() -> None:
    Paged(heads={"H": 2, "I": 2}).plan()
    with pytest.raises(LoweringError, match="at most 5 dimensions longer than 1, this one 6"):
        Paged(heads={"H": 2, "I": 2, "J": 2}).plan()


def test_pages_along_another_label_are_refused() -> None:
    """Q in pages along its rows."""
    paged = Paged((None, None), rows=32, heads={})
    step = paged.step()
    query = step.program.ops[0]
    query = replace(query, attributes={**query.attributes, "table": "T"})
    step = KernelStep("k", replace(step.program, ops=(query, *step.program.ops[1:])))
    with pytest.raises(LoweringError, match="only keys and values are read through a table, along"):
        make_plan(step, paged.tensors(), H200)


def test_other_skeletons_refuse_tables() -> None:
    b = Block({"B": 3, "N": 64, "D": 64}, {"B.grid": 3}, {"B": 1, "N": 64, "D": 64})
    labels = ("B", "N", "D")
    x = b._add(LOAD, (), set(labels), tensor="K", map=labels, table="T")
    b.store("Z", b.op("exp", x), *labels)
    tensors = specs({"K": (9, 16, 64), "T": (3, 4), "Z": (3, 64, 64)}, T="int32")
    with pytest.raises(LoweringError, match="load of K through the table T: only the keys and"):
        make_plan(b.step(), tensors, H200)


# --- kernels -------------------------------------------------------------------------------------


def boxes(plan: AttentionPlan, load: int, width: int) -> int:
    """Bulk loads for a tile: of 64 elements of a row at most, of a page at most."""
    view = plan.view(load)
    rows = min(view.size, plan.key_tile) if isinstance(view, Pages) else plan.key_tile
    return plan.key_tile // rows * ceil_div(width, 64)


def assert_loads(plan: AttentionPlan) -> None:
    """A tile is loaded in the first round of the ring and in the others, rows once."""
    pytest.importorskip("cutlass")
    r = compiled(plan).resources
    assert r.stack_bytes == 0 and not r.spills
    tile = boxes(plan, plan.key_load, plan.depth) + boxes(plan, plan.value_load, plan.width)
    own = plan.schedule.row_groups * ceil_div(plan.depth, 64)
    assert r.instructions["UTMALDG"] == own + 2 * tile
    assert r.instructions["HGMMA"] > 0


@pytest.mark.parametrize(
    ("size", "dtype", "width", "tile"),
    [(16, "bfloat16", 128, 64), (16, "float16", 64, 128), (32, "float16", 64, 64),
     (32, "bfloat16", 128, 128), (64, "bfloat16", 64, 128), (64, "float16", 128, 64),
     (128, "float16", 128, 128), (128, "bfloat16", 64, 64), (256, "bfloat16", 128, 64),
     (256, "float16", 64, 128)],
)  # fmt: skip
def test_kernels(size: int, dtype: str, width: int, tile: int) -> None:
    assert_loads(Paged(size=size, dtype=dtype, width=width, tile=tile).plan())


@pytest.mark.parametrize("tables", [("T", "T2"), ("T", None), (None, "T")])
def test_kernels_with_other_tables(tables: tuple[str | None, str | None]) -> None:
    assert_loads(Paged(tables, 16).plan(dependent_launch=True))


def test_a_kernel_without_lengths() -> None:
    """The last tile ends behind the table."""
    paged = Paged(size=16, keys=2000, lengths=False)
    assert paged.keys % paged.tile and not paged.plan().masks
    assert_loads(paged.plan(dependent_launch=True))


def test_a_kernel_for_many_rows() -> None:
    """8 boxes for a tile of keys, while registers are handed over."""
    plan = Paged(size=16, rows=128, width=128, tile=128).plan()
    assert plan.registers is not None
    assert_loads(plan)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [16, 256])
def test_found_programs_can_be_planned(size: int, causal: bool) -> None:
    """Tokens of 4 query heads for each head of keys, as they are in a cache."""
    g = cs.new_kernel_graph()
    q = g.new_input((2, 5, 2, 4, 64), name="Q")
    caches = [g.new_input((50, size, 2, 1, 64), name=n) for n in "KU"]
    table = g.new_input((2, 4096 // size), dtype="int32", name="T")
    lengths = g.new_input((2,), dtype="int32", name="S")
    k, v = (g.transpose(g.gather_pages(c, table), (0, 2, 3, 1, 4)) for c in caches)
    q = g.transpose(q, (0, 2, 3, 1, 4))
    y = g.scaled_dot_product_attention(q, k, v, causal, None, lengths)
    g.mark_output(g.transpose(y, (0, 3, 1, 2, 4)))
    best = search(g, H200, options=SearchOptions(lowered=True)).candidates[0]
    assert len(best.mugraph.steps) == 1
    plan = make_plan(best.mugraph.steps[0], best.mugraph.tensors, H200)
    assert isinstance(plan, AttentionPlan) and plan.paged
    assert prod(plan.tile(d) for d in plan.rows) == 20
    assert_loads(plan)
