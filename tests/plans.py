"""Block programs written by hand for the planner and the lowering, and kernels compiled of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from cutesuper.ir.block import AxisKind, KernelStep, MuGraph, TensorSpec
from cutesuper.ir.dims import Dim, Symbol, ceil_div
from cutesuper.ir.dtypes import as_dtype
from cutesuper.ir.graph import KernelGraph
from cutesuper.runtime.compile import Artifact, CompileRequest, compile_kernel
from cutesuper.search.cuts import Flat
from cutesuper.search.region import SearchOptions, search_region, tensors_of
from cutesuper.skeletons.build import build
from cutesuper.skeletons.matmul.plan import MatmulPlan
from cutesuper.skeletons.planner import KernelPlan, make_plan
from cutesuper.targets import H200, Target
from tests.mugraphs import Block


def specs(
    shapes: Mapping[str, tuple[Dim, ...]],
    dtype: str = "float16",
    constants: tuple[str, ...] = (),
    **dtypes: str,
) -> dict[str, TensorSpec]:
    """Tensors by name, all of one element type but for ``dtypes``."""
    return {
        n: TensorSpec(n, s, as_dtype(dtypes.get(n, dtype)), n in constants)
        for n, s in shapes.items()
    }


def whole_plan(graph: KernelGraph, target: Target = H200) -> MatmulPlan:
    """The plan of a whole graph as one matmul kernel, whatever several kernels would cost; inputs
    are named in0, in1 and so on."""
    mu = whole_mugraph(graph, target)
    plan = make_plan(mu.steps[0], mu.tensors, target)
    assert isinstance(plan, MatmulPlan)
    return plan


def whole_mugraph(graph: KernelGraph, target: Target = H200, clusters: bool = True) -> MuGraph:
    """A whole graph as one kernel, with clusters or without; inputs are named in0, in1 and so on,
    in the kernel's order."""
    flat = Flat(graph.expanded())
    segment = flat.segment(flat.order)
    ways = search_region(segment.region, target, SearchOptions(lowered=True)).ways
    way = next(w for w in ways if clusters or not w.programs[0].of_kind(AxisKind.CLUSTER))
    names = [f"in{segment.reads.index(graph.nodes[i].name)}" for i in graph.inputs]
    outputs = [f"out{n}" for n in range(len(graph.outputs))]
    step = KernelStep("k0", way.programs[0])
    return MuGraph(tensors_of(segment.region), tuple(names), tuple(outputs), (step,))


@dataclass(frozen=True)
class Linear:
    """RMSNorm and Linear (or only one of them), in the variations that a plan can tell apart.

    Attributes:
        m, k, n: extents; ``tile_m`` x ``tile_n`` x ``tile_k`` per tile.
        cluster: blocks that share K.
        norm: divide by the root mean square of the rows.
        gain: multiply X by G before the product.
        bias, residual: add them after it.
        swapped: the operands of the product stand in the other order.
        transposed: W is stored (N, K).
        turned: X is stored (K, M).
        parts: blocks of the grid that share K.
        precision: of products of float32 operands.
    """

    m: Dim = 16
    k: Dim = 512
    n: int = 256
    tile_m: int = 16
    tile_n: int = 64
    tile_k: int = 128
    cluster: int = 1
    norm: bool = True
    gain: bool = False
    bias: bool = False
    residual: bool = False
    swapped: bool = False
    transposed: bool = False
    dtype: str = "float16"
    turned: bool = False
    parts: int = 1
    precision: str = "highest"

    def block(self, names: Mapping[str, str] | None = None) -> Block:
        """The program; ``names`` renames tensors."""
        name = {t: t for t in "XWGZBR"} | dict(names or {})
        b = Block({"M": self.m, "K": self.k, "N": self.n}, self._axes(), self._tile())
        x = b.load(name["X"], *(("K", "M") if self.turned else ("M", "K")))
        row = b.op("mul", x, b.load(name["G"], "K")) if self.gain else x
        w = b.load(name["W"], *(("N", "K") if self.transposed else ("K", "N")))
        args = (w, row) if self.swapped else (row, w)
        how = {} if self.precision == "highest" else {"precision": self.precision}
        result = self._closed(b, b.op("matmul", *args, over="K", **how))
        if self.norm:
            mean = self._closed(b, b.op("mean", b.op("square", x), over="K"))
            result = b.op("div", result, b.op("sqrt", b.op("add", mean, b.const(1e-6))))
        if self.bias:
            result = b.op("add", result, b.load(name["B"], "N"))
        if self.residual:
            result = b.op("add", result, b.load(name["R"], "M", "N"))
        b.store(name["Z"], result, "M", "N")
        return b

    def shapes(self) -> dict[str, tuple[Dim, ...]]:
        w = (self.n, self.k) if self.transposed else (self.k, self.n)
        x = (self.k, self.m) if self.turned else (self.m, self.k)
        shapes: dict[str, tuple[Dim, ...]] = {"X": x, "W": w, "Z": (self.m, self.n)}
        shapes |= {"G": (self.k,)} if self.gain else {}
        shapes |= {"B": (self.n,)} if self.bias else {}
        return shapes | ({"R": (self.m, self.n)} if self.residual else {})

    def plan(self, target: Target = H200, **options: Any) -> Any:
        """Its plan (a `MatmulPlan`)."""
        tensors = specs(self.shapes(), self.dtype, ("W", "G", "B"))
        return make_plan(self.block().step("linear"), tensors, target, **options)

    def _closed(self, b: Block, x: int) -> int:
        complete = b.close(x, "K")
        return b.acc(complete, "K.grid") if self.parts > 1 else complete

    def _axes(self) -> dict[str, int | None]:
        rows = None if isinstance(self.m, Symbol) else ceil_div(self.m, self.tile_m)
        each = self.cluster * self.parts * self.tile_k
        loop = None if isinstance(self.k, Symbol) else ceil_div(self.k, each)
        axes: dict[str, int | None] = {"M.grid": rows, "N.grid": ceil_div(self.n, self.tile_n)}
        axes |= {"K.cluster": self.cluster} if self.cluster > 1 else {}
        axes |= {"K.grid": self.parts} if self.parts > 1 else {}
        return axes | {"K.loop": loop}

    def _tile(self) -> dict[str, int]:
        return {"M": self.tile_m, "K": self.tile_k, "N": self.tile_n}


def rows_block(m: Dim, n: int, *kinds: str, norm: bool = False) -> Block:
    """Unary operators along rows, and with ``norm`` a division by the root of the mean square."""
    b = Block({"M": m, "N": n}, {"M.grid": None if isinstance(m, Symbol) else m}, {"M": 1, "N": n})
    x = b.load("X", "M", "N")
    value = x
    for kind in kinds:
        value = b.op(kind, value)
    if norm:
        mean = b.op("mean", b.op("square", x), over="N")
        value = b.op("div", value, b.op("sqrt", b.op("add", mean, b.const(1e-6))))
    b.store("Z", value, "M", "N")
    return b


def rows_plan(
    m: Dim, n: int, *kinds: str, norm: bool = False, dtype: str = "float16", **options: Any
) -> Any:
    """The plan of `rows_block` (a `RowPlan`)."""
    shapes = {"X": (m, n), "Z": (m, n)}
    target = options.pop("target", H200)
    step = rows_block(m, n, *kinds, norm=norm).step("rows")
    return make_plan(step, specs(shapes, dtype), target, **options)


def request_of(plan: KernelPlan, arch: str = "sm_90a") -> CompileRequest:
    """The request to the compiler."""
    written = tuple(i for i, a in enumerate(plan.arguments) if a.written)
    return CompileRequest(plan.key, arch, "kernel", partial(build, plan), written)


def compiled(plan: KernelPlan, arch: str = "sm_90a") -> Artifact:
    """A plan's kernel, from the cache of this test session where it is there."""
    return compile_kernel(request_of(plan, arch))
