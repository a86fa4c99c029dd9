"""Block programs written by hand for the planner and the lowering, and kernels compiled of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from cutesuper.ir.block import KernelStep, TensorSpec
from cutesuper.ir.dims import Dim, Symbol, ceil_div
from cutesuper.ir.dtypes import as_dtype
from cutesuper.ir.graph import KernelGraph
from cutesuper.runtime.compile import Artifact, CompileRequest, compile_kernel
from cutesuper.search.cuts import Flat
from cutesuper.search.region import SearchOptions, search_region
from cutesuper.skeletons.kernel.build import build
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
    flat = Flat(graph.expanded())
    region = flat.segment(flat.order).region
    pairs = enumerate(zip(region.inputs, region.input_dtypes, strict=True))
    tensors = {f"in{i}": TensorSpec(f"in{i}", s, d) for i, (s, d) in pairs}
    output = graph.nodes[graph.outputs[0]]
    tensors["out0"] = TensorSpec("out0", output.shape, output.dtype)
    way = search_region(region, target, SearchOptions(lowered=True)).ways[0]
    plan = make_plan(KernelStep("k0", way.programs[0]), tensors, target)
    assert isinstance(plan, MatmulPlan)
    return plan


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
    """

    m: Dim = 16
    k: int = 512
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

    def block(self, names: Mapping[str, str] | None = None) -> Block:
        """The program; ``names`` renames tensors."""
        name = {t: t for t in "XWGZBR"} | dict(names or {})
        b = Block({"M": self.m, "K": self.k, "N": self.n}, self._axes(), self._tile())
        x = b.load(name["X"], "M", "K")
        row = b.op("mul", x, b.load(name["G"], "K")) if self.gain else x
        w = b.load(name["W"], *(("N", "K") if self.transposed else ("K", "N")))
        args = (w, row) if self.swapped else (row, w)
        result = b.close(b.op("matmul", *args, over="K"), "K")
        if self.norm:
            mean = b.close(b.op("mean", b.op("square", x), over="K"), "K")
            result = b.op("div", result, b.op("sqrt", b.op("add", mean, b.const(1e-6))))
        if self.bias:
            result = b.op("add", result, b.load(name["B"], "N"))
        if self.residual:
            result = b.op("add", result, b.load(name["R"], "M", "N"))
        b.store(name["Z"], result, "M", "N")
        return b

    def shapes(self) -> dict[str, tuple[Dim, ...]]:
        w = (self.n, self.k) if self.transposed else (self.k, self.n)
        shapes: dict[str, tuple[Dim, ...]] = {"X": (self.m, self.k), "W": w, "Z": (self.m, self.n)}
        shapes |= {"G": (self.k,)} if self.gain else {}
        shapes |= {"B": (self.n,)} if self.bias else {}
        return shapes | ({"R": (self.m, self.n)} if self.residual else {})

    def plan(self, target: Target = H200, **options: Any) -> Any:
        """Its plan (a `MatmulPlan`)."""
        tensors = specs(self.shapes(), self.dtype, ("W", "G", "B"))
        return make_plan(self.block().step("linear"), tensors, target, **options)

    def _axes(self) -> dict[str, int | None]:
        rows = None if isinstance(self.m, Symbol) else ceil_div(self.m, self.tile_m)
        loop = ceil_div(self.k, self.cluster * self.tile_k)
        axes: dict[str, int | None] = {"M.grid": rows, "N.grid": ceil_div(self.n, self.tile_n)}
        axes |= {"K.cluster": self.cluster} if self.cluster > 1 else {}
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
    """What to ask the compiler for."""
    written = tuple(i for i, a in enumerate(plan.arguments) if a.written)
    return CompileRequest(plan.key, arch, "kernel", partial(build, plan), written)


def compiled(plan: KernelPlan, arch: str = "sm_90a") -> Artifact:
    """A plan's kernel, from the cache of this test session where it is there."""
    return compile_kernel(request_of(plan, arch))
