"""Attention in its variations: the kernel graph, and the program by hand with any split of keys."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from cutesuper.ir.block import BlockOp, MuGraph, TensorSpec
from cutesuper.ir.dims import Dim, ceil_div, extent
from cutesuper.ir.dtypes import as_dtype
from cutesuper.ir.graph import KernelGraph, Tensor, new_kernel_graph
from cutesuper.pipeline import current_target
from cutesuper.runtime.compile import compile_kernel
from cutesuper.runtime.kernel import CompiledStep, Kernel, Variant
from cutesuper.skeletons.planner import make_plan
from tests.mugraphs import Block
from tests.plans import request_of


@dataclass(frozen=True)
class Attention:
    """``softmax(f(Q K^T scale)) V`` over heads of keys and values.

    Attributes:
        heads: of keys and values, a grid axis.
        group: query heads of each, 0 for a graph without that dimension.
        rows: positions of a query, 0 for a graph without that dimension.
        keys, width: extents of the products.
        dtype: of all tensors.
        keys_last: K is stored (width, keys), else (keys, width).
        causal: alignment of a causal mask, "" for none.
        norm: of what a norm without weight is taken: "", "Q", "QK" or "QV".
        scale: of the scores, None for none.
        grid, cluster: parts of the keys.
        key_tile, row_tile: positions of a tile; all query heads of a group are in it.
    """

    heads: int = 2
    group: int = 0
    rows: int = 64
    keys: int = 512
    width: int = 64
    dtype: str = "float16"
    keys_last: bool = False
    causal: str = ""
    norm: str = ""
    scale: float | None = 0.125
    grid: int = 1
    cluster: int = 1
    key_tile: int = 64
    row_tile: int = 64

    # ------------------------------------------------------------------------------------- graph

    def graph(self) -> KernelGraph:
        """The kernel graph of the definition."""
        g = new_kernel_graph()
        shapes = self._shapes()
        q, k, v = (g.new_input(shapes[n], self.dtype, name=n) for n in ("Q", "K", "U"))
        q = g.rms_norm(q, eps=0.0) if "Q" in self.norm else q
        v = g.rms_norm(v, eps=0.0) if "V" in self.norm else v
        if "K" in self.norm:
            k = (
                g.div(k, g.sqrt(g.mean(g.square(k), -2)))
                if self.keys_last
                else (g.rms_norm(k, eps=0.0))
            )
        g.mark_output(g.matmul(g.softmax(self._scores(g, q, k)), v))
        return g

    def _scores(self, g: KernelGraph, q: Tensor, k: Tensor) -> Tensor:
        scores = g.matmul(q, k if self.keys_last else g.transpose(k))
        scores = scores if self.scale is None else g.mul(scores, self.scale)
        return g.causal_mask(scores, alignment=self.causal) if self.causal else scores

    def _shapes(self) -> dict[str, tuple[Dim, ...]]:
        one = (1,) if self.group and self.rows else ()
        key = (self.width, self.keys) if self.keys_last else (self.keys, self.width)
        query = tuple(d for d in (self.group, self.rows) if d)
        return {
            "Q": (self.heads, *query, self.width),
            "K": (self.heads, *one, *key),
            "U": (self.heads, *one, self.keys, self.width),
            "Z": (self.heads, *query, self.width),
        }

    # ----------------------------------------------------------------------------------- by hand

    def block(self) -> Block:
        """The program with a running maximum: loop, then cluster, then grid over the keys."""
        b = self._empty()
        row = [d for d, e in (("G", self.group), ("L", self.rows)) if e]
        one = [None] if self.group and self.rows else []
        q = b.load("Q", "H", *row, "D")
        k = b.load("K", "H", *one, *(("D", "N") if self.keys_last else ("N", "D")))
        v = b.load("U", "H", *one, "N", "E")
        q = self._normed(b, q, "D") if "Q" in self.norm else q
        s = b.op("matmul", q, k, over="D")
        # keys and values go to the products as they are stored
        s = b.op("div", s, self._root(b, k, "D")) if "K" in self.norm else s
        s = s if self.scale is None else b.op("mul", s, b.const(self.scale))
        if self.causal:
            s = b.op("causal_mask", s, rows="L", columns="N", alignment=self.causal)
        part = b.op("max", s, over="N")
        e = b.op("exp", b.op("sub", s, part))
        weight = b.op("div", e, self._root(b, v, "E")) if "V" in self.norm else e
        sums = (b.op("matmul", weight, v, over="N"), b.op("sum", e, over="N"))
        part, *sums = b.online("N", part, *sums)
        y, total = self._joined(b, part, *sums) if self.grid > 1 else sums
        b.store("Z", b.op("div", y, total), "H", *row, "E")
        return b

    def _empty(self) -> Block:
        axes: dict[str, int | None] = {"H.grid": self.heads}
        row_tile = min(self.row_tile, self.rows)
        axes |= {"L.grid": ceil_div(self.rows, row_tile)} if self.rows else {}
        parts = {"grid": self.grid, "cluster": self.cluster}
        axes |= {f"N.{kind}": n for kind, n in parts.items() if n > 1}
        axes |= {"N.loop": ceil_div(self.keys, self.key_tile * prod(parts.values()))}
        dims: dict[str, Dim] = {"H": self.heads, "N": self.keys, "D": self.width, "E": self.width}
        tile = {"H": 1, "N": self.key_tile, "D": self.width, "E": self.width}
        if self.group:
            dims["G"] = tile["G"] = self.group
        if self.rows:
            dims["L"], tile["L"] = self.rows, row_tile
        return Block(dims, axes, tile)

    def _normed(self, b: Block, x: int, label: str) -> int:
        return b.op("div", x, self._root(b, x, label))

    def _root(self, b: Block, x: int, label: str) -> int:
        return b.op("sqrt", b.op("mean", b.op("square", x), over=label))

    def _joined(self, b: Block, part: int, *values: int) -> tuple[int, ...]:
        """Over the grid axis of the keys: what every block has, relative to the largest maximum."""

        def reduced(inputs: tuple[int, ...], op: str) -> int:
            attributes = {"axis": "N.grid", "op": op}
            dims = b.ops[inputs[0]].dims
            b.ops.append(BlockOp("grid_reduce", inputs, dims, attributes))
            return len(b.ops) - 1

        whole = reduced((part,), "max")
        return tuple(reduced((x, part, whole), "sum") for x in values)

    def mugraph(self) -> MuGraph:
        """The program as one kernel."""
        kind = as_dtype(self.dtype)
        tensors = {n: TensorSpec(n, s, kind) for n, s in self._shapes().items()}
        return MuGraph(tensors, ("Q", "K", "U"), ("Z",), (self.block().step("attention"),))

    def kernel(self, dependent: bool = False) -> Kernel:
        """The program, planned and compiled."""
        mu, target = self.mugraph(), current_target()
        plan = make_plan(mu.steps[0], mu.tensors, target, dependent_launch=dependent)
        artifact = compile_kernel(request_of(plan, target.arch))
        variant = Variant(mu, (CompiledStep(plan, artifact),))
        return Kernel(self.graph(), target, lambda hints: variant)


def with_logits(attention: Attention, inputs: list[torch.Tensor], largest: float) -> None:
    """Scale the queries so that the largest score is ``largest``."""
    q, k = inputs[0].float(), inputs[1].float()
    scores = q @ (k if attention.keys_last else k.mT) * (attention.scale or 1.0)
    inputs[0].copy_(q * (largest / scores.abs().max()))


def serving_inputs(
    graph: KernelGraph, seed: int, device: str, lengths: list[int]
) -> list[torch.Tensor]:
    """Inputs for a graph of `benchmarks.workloads_attention.serving`: normal tensors, these
    lengths, and a table of pages in any order."""
    generator = torch.Generator(device).manual_seed(seed)
    made = []
    for node in (graph.nodes[i] for i in graph.inputs):
        shape = [extent(d) for d in node.shape]
        if node.name == "lengths":
            made.append(torch.tensor(lengths, dtype=torch.int32, device=device))
        elif node.name == "table":
            places = torch.randperm(prod(shape), generator=generator, device=device)
            made.append(places.view(shape).to(torch.int32))
        else:
            t = torch.randn(shape, generator=generator, device=device)
            made.append(t.to(node.dtype.torch))
    return made
