"""Mirage's muGraphs run as their JSON says: block by block, iteration by iteration, with NumPy.

It shares nothing with the reader: dimensions are positions, tiles are slices, and tensors are known
by their guid. Tests hold what the reader makes of a file against it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from math import erf
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Json = dict[str, Any]


def replay(graph: list[Json], inputs: list[Array]) -> list[Array]:
    """The outputs of a muGraph, in float64."""
    tensors: dict[int, Array] = {}
    feed = iter(inputs)
    outputs: list[int] = []
    for op in graph:
        made = [t["guid"] for t in op["output_tensors"]]
        args = [tensors[t["guid"]] for t in op["input_tensors"] if op["op_type"] != "kn_output_op"]
        if op["op_type"] == "kn_input_op":
            tensors[made[0]] = next(feed)
        elif op["op_type"] == "kn_output_op":
            outputs.append(op["input_tensors"][0]["guid"])
        elif op["op_type"] == "kn_customized_op":
            _run_block_graph(op["bgraph"], tensors)
        else:
            name = op["op_type"].removeprefix("kn_").removesuffix("_op")
            tensors[made[0]] = _compute(name, args, op, 1)
    return [tensors[g] for g in outputs]


def _run_block_graph(bgraph: Json, tensors: dict[int, Array]) -> None:
    grid = [bgraph["grid_dim"][a] for a in "xyz"]
    for op in bgraph["operators"]:
        if op["op_type"] == "tb_output_op":
            d = op["dtensor"]
            tensors[d["guid"]] = np.full(d["dim"][: d["num_dims"]], np.nan)
    for block in product(*map(range, grid)):
        for guid, (where, tile) in _run_block(bgraph, grid, block, tensors).items():
            tensors[guid][where] = tile


def _run_block(
    bgraph: Json, grid: list[int], block: tuple[int, ...], tensors: dict[int, Array]
) -> dict[int, tuple[tuple[slice, ...], Array]]:
    """The stores of one block: by guid the place and the tile."""
    iterations = bgraph["forloop_range"]
    totals: dict[int, Array] = {}
    tiles: dict[int, Array] = {}
    stored: dict[int, tuple[tuple[slice, ...], Array]] = {}
    for i in range(iterations):
        last = i == iterations - 1
        for op in bgraph["operators"]:
            name = op["op_type"].removeprefix("tb_").removesuffix("_op").removeprefix("forloop_")
            made = [t["guid"] for t in op["output_tensors"]]
            if name == "input":
                shape = tensors[op["dtensor"]["guid"]].shape
                parts, offsets = _parts(op["input_map"], grid, block, len(shape))
                if op["forloop_dim"] >= 0:
                    d = op["forloop_dim"]
                    parts[d] *= iterations
                    offsets[d] = offsets[d] * iterations + i
                tiles[made[0]] = tensors[op["dtensor"]["guid"]][_slices(shape, parts, offsets)]
                continue
            if any(t["guid"] not in tiles for t in op["input_tensors"]):
                continue  # what follows an accumulator waits for the last iteration
            args = [tiles[t["guid"]] for t in op["input_tensors"]]
            if name == "output":
                d = op["dtensor"]
                shape = tuple(d["dim"][: d["num_dims"]])
                parts, offsets = _parts(op["output_map"], grid, block, len(shape))
                stored[d["guid"]] = (_slices(shape, parts, offsets), args[0])
            elif name.startswith("accum"):
                part = _each_iteration(name, args[0], bgraph["reduction_dimx"])
                combine = np.maximum if name == "accum_max" else np.add
                totals[made[0]] = combine(totals[made[0]], part) if i else part
                if last:
                    width = args[0].shape[-1] * iterations
                    tiles[made[0]] = _after(name, totals[made[0]], width)
            else:
                tiles[made[0]] = _compute(name, args, op, bgraph["reduction_dimx"])
    return stored


def _parts(
    mapping: Json, grid: list[int], block: tuple[int, ...], rank: int
) -> tuple[list[int], list[int]]:
    """The number of parts of each dimension, and the one that is this block's."""
    parts, offsets = [1] * rank, [0] * rank
    for axis, n, index in zip("xyz", grid, block, strict=True):
        if n > 1 and mapping[axis] >= 0:
            parts[mapping[axis]] *= n
            offsets[mapping[axis]] = index
    return parts, offsets


def _slices(shape: tuple[int, ...], parts: list[int], offsets: list[int]) -> tuple[slice, ...]:
    sizes = [n // k for n, k in zip(shape, parts, strict=True)]
    return tuple(slice(o * s, (o + 1) * s) for o, s in zip(offsets, sizes, strict=True))


def _grouped(x: Array, dim: int, width: int) -> Array:
    """Sum every width-th element: 8 elements to 2 are the sums of the even and the odd ones."""
    shape = (*x.shape[:dim], -1, width, *x.shape[dim + 1 :])
    return x.reshape(shape).sum(dim)


def _each_iteration(name: str, x: Array, dimx: int) -> Array:
    if name in ("accum_nored", "accum_max"):
        return x
    if name == "accum_redtox_ld_sum":
        return _grouped(x, x.ndim - 1, dimx)
    return (x * x if name == "accum_red_ld_rms" else x).sum(-1, keepdims=True)


def _after(name: str, total: Array, width: int) -> Array:
    if name == "accum_red_ld_mean":
        return total / width
    return np.sqrt(total / width) if name == "accum_red_ld_rms" else total


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


ONE: dict[str, Callable[[Array], Array]] = {
    "exp": np.exp,
    "square": np.square,
    "sqrt": np.sqrt,
    "sigmoid": _sigmoid,
    "silu": lambda x: x * _sigmoid(x),
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: 0.5 * x * (1 + np.vectorize(erf)(x / np.sqrt(2))),
    "rms_norm": lambda x: x / np.sqrt(np.mean(x * x, -1, keepdims=True)),
}
TWO: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "matmul": np.matmul,
}


def _compute(name: str, args: list[Array], op: Json, dimx: int) -> Array:
    if name in ONE:
        return ONE[name](*args)
    if name in TWO:
        return TWO[name](*args)
    if name == "mul_scalar":
        return args[0] * op["scalar"]
    if name == "clamp":
        return np.clip(args[0], op["min_val"], op["max_val"])
    if name == "concat_then_matmul":
        a, b, c, d = args
        return np.concatenate([a, b], -1) @ np.concatenate([c, d], -2)
    kind, _, rest = name.partition("_")
    dim = int(rest[0])
    if kind == "concat":
        return np.concatenate(args, dim)
    if rest.endswith("max"):
        return args[0].max(dim, keepdims=True)
    return _grouped(args[0], dim, dimx if rest.endswith("to_dimx") else 1)
