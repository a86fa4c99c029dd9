"""muGraphs in Mirage's JSON, written by hand for tests.

`Graph` and `Block` write the format; the functions below write muGraphs of the structures that
Mirage publishes (arXiv:2405.05751), at the extents the caller wants.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import cutesuper as cs
from cutesuper.ir.block import MuGraph

Json = dict[str, Any]
FLOAT16 = 941


def read(data: Any, **options: Any) -> list[Any]:
    """The result of `load_mirage` for a file with this JSON (or with these bytes)."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "graphs.json")
        path.write_bytes(data if isinstance(data, bytes) else json.dumps(data).encode())
        return list(cs.load_mirage(path, **options))


def one(graph: list[Json], **options: Any) -> MuGraph:
    """The only muGraph of a file."""
    (mu,) = read(graph, **options)
    assert isinstance(mu, MuGraph)
    return mu


def axes(x: int, y: int = -1, z: int = -1) -> Json:
    """``input_map``, ``output_map`` and ``grid_dim``."""
    return {"x": x, "y": y, "z": z}


class Graph:
    """A muGraph: a list of kernel-level operators."""

    def __init__(self) -> None:
        self.operators: list[Json] = []
        self.guid = 1000

    def tensor(self, dims: tuple[int, ...], **more: Any) -> Json:
        self.guid += 1
        padded = [*dims, *[0] * (4 - len(dims))]
        described = {"data_type": FLOAT16, "dim": padded, "guid": self.guid, "num_dims": len(dims)}
        return {**described, "layout": "RowMajor", **more}

    def add(self, op_type: str, inputs: list[Json], outputs: list[Json], **more: Any) -> Json:
        op = {"op_type": op_type, "input_tensors": inputs, "output_tensors": outputs, **more}
        self.operators.append(op)
        return op

    def input(self, *dims: int) -> Json:
        t = self.tensor(dims)
        strides = [1] * len(dims)
        self.add("kn_input_op", [], [t], input_strides=strides, input_map=axes(-1))
        return t

    def op(self, name: str, *args: Json, dims: tuple[int, ...] | None = None, **more: Any) -> Json:
        """An operator that is left to a library."""
        t = self.tensor(dims or shape_of(name, [shape(a) for a in args]))
        self.add(f"kn_{name}_op", list(args), [t], **more)
        return t

    def output(self, t: Json) -> list[Json]:
        strides = [1] * len(shape(t))
        self.add("kn_output_op", [t], [], output_strides=strides, output_map=axes(-1))
        return self.operators

    def block(self, x: int = 1, y: int = 1, z: int = 1, loop: int = 1, dimx: int = 64) -> Block:
        return Block(self, (x, y, z), loop, dimx)


class Block:
    """A block graph; `done` makes a customized operator of it."""

    def __init__(self, graph: Graph, grid: tuple[int, int, int], loop: int, dimx: int) -> None:
        self.graph, self.grid, self.loop, self.dimx = graph, grid, loop, dimx
        self.operators: list[Json] = []
        self.inputs: list[Json] = []
        self.outputs: list[Json] = []

    def add(self, name: str, inputs: list[Json], outputs: list[Json], **more: Any) -> None:
        op = {"op_type": f"tb_{name}_op", "input_tensors": inputs, "output_tensors": outputs}
        self.operators.append({**op, **more})

    def tile(self, dims: tuple[int, ...], after: bool = False) -> Json:
        return self.graph.tensor(dims, after_accum=after, smem_offset=0)

    def load(self, t: Json, x: int = -1, y: int = -1, z: int = -1, loop: int = -1) -> Json:
        dims = list(shape(t))
        for d, n in (*zip((x, y, z), self.grid, strict=True), (loop, self.loop)):
            if d >= 0 and n > 1:
                dims[d] //= n
        tile = self.tile(tuple(dims))
        self.inputs.append(t)
        self.add("input", [], [tile], dtensor=t, input_map=axes(x, y, z), forloop_dim=loop)
        return tile

    def op(self, name: str, *args: Json, **more: Any) -> Json:
        dims = shape_of(name, [shape(a) for a in args], self.dimx)
        tile = self.tile(dims, "accum" in name or args[0]["after_accum"])
        outputs = [tile, self.tile(dims)] if name.endswith("_max") and "red" in name else [tile]
        self.add(name, list(args), outputs, **more)
        return tile

    def acc(self, tile: Json, kind: str = "nored") -> Json:
        return self.op(f"forloop_accum_{kind}", tile)

    def store(self, tile: Json, x: int = -1, y: int = -1, z: int = -1) -> Json:
        dims = list(shape(tile))
        for d, n in zip((x, y, z), self.grid, strict=True):
            if d >= 0:
                dims[d] *= n
        t = self.graph.tensor(tuple(dims))
        self.outputs.append(t)
        self.add("output", [tile], [], dtensor=t, output_map=axes(x, y, z))
        return t

    def done(self) -> list[Json]:
        bgraph = {
            "graph_level": "thread_block_graph",
            "grid_dim": axes(*self.grid),
            "block_dim": axes(128, 1, 1),
            "forloop_range": self.loop,
            "reduction_dimx": self.dimx,
            "operators": self.operators,
            "smem_offset": 0,
        }
        self.graph.add("kn_customized_op", self.inputs, self.outputs, bgraph=bgraph)
        return self.outputs


def shape(t: Json) -> tuple[int, ...]:
    return tuple(t["dim"][: t["num_dims"]])


def shape_of(name: str, shapes: list[tuple[int, ...]], dimx: int = 1) -> tuple[int, ...]:
    first = shapes[0]
    digit = next((int(c) for c in name if c.isdigit()), 0)
    if "matmul" in name:
        return (*first[:-1], shapes[-1][-1])
    if name.startswith("concat"):
        return tuple(n + (k == digit) * shapes[1][k] for k, n in enumerate(first))
    if "redtox" in name:
        return (*first[:-1], dimx)
    if "_red_ld" in name:
        return (*first[:-1], 1)
    if name.startswith("reduction"):
        width = dimx if "dimx" in name else 1
        return tuple(width if k == digit else n for k, n in enumerate(first))
    return tuple(map(max, *shapes)) if len(shapes) > 1 else first


# ------------------------------------------------------------------------------- known structures


def rms_linear(m: int = 2, k: int = 16, n: int = 12, grid: int = 3, loop: int = 4) -> list[Json]:
    """``acc(X W) / acc_rms(X)``; with a loop of 1 and the division before, if it is 0."""
    g = Graph()
    x, w = g.input(m, k), g.input(k, n)
    b = g.block(grid, loop=max(1, loop))
    xs, ws = b.load(x, loop=1), b.load(w, 1, loop=0)
    norm = b.acc(xs, "red_ld_rms")
    if loop:
        b.store(b.op("div", b.acc(b.op("matmul", xs, ws)), norm), 1)
    else:
        b.store(b.op("matmul", b.op("div", b.acc(xs), norm), b.acc(ws)), 1)
    return g.output(b.done()[0])


def attention(
    scores: str = "nored", combine_loop: int = 1, q: int = 8, s: int = 48, d: int = 4
) -> list[Json]:
    """``exp(Q K) V / sum exp(Q K)``: partial sums over 2 blocks along y and 3 iterations.

    Args:
        scores: how each block accumulates the sums of exponentials.
        combine_loop: iterations in which the second kernel reads the partial sums.
        q: queries.
        s: keys.
        d: width of a head.
    """
    g = Graph()
    x, k, v = g.input(2, q, d), g.input(2, d, s), g.input(2, s, d)
    b = g.block(2, 2, 4, loop=3, dimx=d)
    e = b.op("exp", b.op("matmul", b.load(x, 0, -1, 1), b.load(k, 0, 2, loop=2)))
    total = b.acc(e, scores)
    out = b.acc(b.op("matmul", e, b.load(v, 0, 1, loop=1)))
    b.store(total, 0, 2, 1)
    b.store(out, 0, 2, 1)
    sums, parts = b.done()
    c = g.block(2, 4, loop=combine_loop, dimx=d)
    loop = 2 if combine_loop > 1 else -1
    below = c.acc(c.load(sums, 0, 1, loop=loop), "red_ld_sum")
    above = c.acc(c.load(parts, 0, 1, loop=loop), "redtox_ld_sum")
    c.store(c.op("div", above, below), 0, 1)
    return g.output(c.done()[0])


def outer_product_attention(q: int = 8, s: int = 12, d: int = 4) -> list[Json]:
    """Not QKNorm: rows of Q, summed up, times one row of K for each block, instead of Q K."""
    g = Graph()
    x, k, v = g.input(2, q, d), g.input(2, d, s), g.input(2, s, d)
    b = g.block(2, 4)
    row = b.acc(b.op("rms_norm", b.load(x, 0, 1)), "red_ld_sum")
    key = b.acc(b.load(k, 0, 1))
    values = b.acc(b.op("rms_norm", b.load(v, 0, 1)))
    b.store(b.op("mul", key, row), 0, 2)
    b.store(values, 0, 2)
    scores, stored = b.done()
    e = g.op("exp", scores)
    c = g.block(2, 4)
    es = c.load(e, 0, 2)
    kept = c.acc(c.load(stored, 0, 2))
    c.store(kept, 0, 1)
    c.store(c.op("div", c.acc(es), c.acc(es, "red_ld_sum")), 0, 1)
    norm, weights = c.done()
    return g.output(g.op("matmul", weights, norm))


def norm_transformer(m: int = 4, k: int = 12, split: bool = False) -> list[Json]:
    """``rms(X + A * (rms(H) + X))`` of inputs H, X, A; ``split``: divided in a second kernel."""
    g = Graph()
    h, x, a = g.input(m, k), g.input(m, k), g.input(m, k)
    b = g.block(m)
    hs, xs, alpha = b.load(h, 0), b.load(x, 0), b.load(a, 0)
    y = b.op("add", b.op("mul", b.op("add", xs, b.op("rms_norm", hs)), alpha), xs)
    if not split:
        b.store(b.acc(b.op("rms_norm", y)), 0)
        return g.output(b.done()[0])
    b.store(b.acc(y), 0)
    b.store(b.acc(y, "red_ld_rms"), 0)
    return g.output(g.op("div", *b.done()))


def gated_mlp(m: int = 8, k: int = 12, n: int = 8, split: bool = False) -> list[Json]:
    """``silu(X W) * (X V)``; ``split``: multiplied in a second kernel."""
    g = Graph()
    x, w, v = g.input(m, k), g.input(k, n), g.input(k, n)
    b = g.block(2, loop=3)
    xs = b.load(x, loop=1)
    gate = b.op("silu", b.acc(b.op("matmul", xs, b.load(w, 1, loop=0))))
    up = b.acc(b.op("matmul", xs, b.load(v, 1, loop=0)))
    if not split:
        b.store(b.op("mul", gate, up), 1)
        return g.output(b.done()[0])
    b.store(gate, 1)
    b.store(up, 1)
    return g.output(g.op("mul", *b.done()))


def lora(how: str = "products", m: int = 4, k: int = 6, n: int = 8, r: int = 2) -> list[Json]:
    """``X W + (X A) B``; also with X A made before, as ``[X XA] @ [W; B]``."""
    g = Graph()
    x, w, a, b = g.input(m, k), g.input(k, n), g.input(k, r), g.input(r, n)
    if how == "products":
        t = g.block(4)
        xs = t.load(x)
        xw = t.op("matmul", xs, t.load(w, 1))
        low = t.op("matmul", t.op("matmul", xs, t.load(a)), t.load(b, 1))
        t.store(t.acc(t.op("add", low, xw)), 1)
        return g.output(t.done()[0])
    low = g.op("matmul", x, a)
    t = g.block(4, loop=2)
    parts = t.load(x, loop=1), t.load(low, loop=1), t.load(w, 1, loop=0), t.load(b, 1, loop=0)
    if how == "concat_then_matmul":
        joined = t.op("concat_then_matmul", *parts)
    else:
        left = t.op("concat_1", *parts[:2])
        joined = t.op("matmul", left, t.op("concat_0", *parts[2:]))
    t.store(t.acc(joined), 1)
    return g.output(t.done()[0])


def split_k_mlp(m: int = 4, k: int = 24, n: int = 4) -> list[Json]:
    """``exp(X A) B``: partial sums of X A side by side, summed up by every block of the next."""
    g = Graph()
    x, a, b = g.input(m, k), g.input(k, n), g.input(n, 6)
    t = g.block(4, loop=3, dimx=n)
    t.store(t.acc(t.op("matmul", t.load(x, 1, loop=1), t.load(a, 0, loop=0))), 1)
    (parts,) = t.done()
    u = g.block(3, dimx=n)
    total = u.op("reduction_1_to_dimx", u.load(parts))
    u.store(u.acc(u.op("matmul", u.op("exp", total), u.load(b, 1))), 1)
    return g.output(u.done()[0])
