"""Mirage's operators: their names, numbers of operands and result shapes.

Names are those of the files without level (``kn_``, ``tb_``) and suffix (``_op``); a dimension
inside the name is removed: ``tb_reduction_1_to_dimx_op`` is ``reduction_to_dimx`` over dimension 1.
The facts come from the Mirage project (arXiv:2405.05751, and its published files).
"""

from __future__ import annotations

import difflib
import re

from cutesuper.errors import FormatError
from cutesuper.ir.dims import show_shape

#: a shape; every extent is a number here
Extents = tuple[int, ...]

#: element-wise operators that have the same name and meaning in our table
UNARY = ("exp", "square", "sqrt", "silu", "sigmoid", "gelu", "relu")
BINARY = ("add", "sub", "mul", "div")

#: operators of each level, and the number of their operands
KERNEL = {
    **dict.fromkeys(UNARY, 1),
    **dict.fromkeys(BINARY, 2),
    "clamp": 1,
    "mul_scalar": 1,
    "matmul": 2,
    "reduction": 1,
    "rms_norm": 1,
}
BLOCK = {
    **KERNEL,
    "reduction_to_dimx": 1,
    "reduction_max": 1,
    "concat": 2,
    "concat_then_matmul": 4,
    "forloop_accum_nored": 1,
    "forloop_accum_red_ld_sum": 1,
    "forloop_accum_red_ld_mean": 1,
    "forloop_accum_red_ld_rms": 1,
    "forloop_accum_redtox_ld_sum": 1,
    "forloop_accum_max": 1,
}

#: numbers that an operator needs; Mirage leaves them out of its files
SCALARS = {"mul_scalar": ("scalar",), "clamp": ("min_val", "max_val")}

#: known operators that no block program expresses, with the reason
REFUSED = {
    "log": "there is no logarithm among the operators of a block program",
    "pow": "there is no power among the operators of a block program",
    "split": "a block program cannot cut a part out of a dimension",
    "chunk": "a block program cannot cut a part out of a dimension",
    "kn_concat": "a kernel cannot store into a part of a tensor",
    "allreduce": "a muGraph is a program for one GPU",
    "tb_customized": "a block graph cannot hold another one",
    "forloop_accum_nored_rescale": "the maximum that its factors come from is not in the file",
    "forloop_accum_red_ld_sum_rescale": "the maximum that its factors come from is not in the file",
}

_NAME = re.compile(r"(reduction|concat|split|chunk)_([0-9])(_to_dimx|_max)?")


def operator_of(text: str, level: str, where: str) -> tuple[str, int]:
    """The operator behind an ``op_type``, and the dimension in its name (else 0).

    before: ``tb_accum_nored_op``, ``kn_reduction_1_op``; after: (``forloop_accum_nored``, 0),
    (``reduction``, 1). The first releases called the accumulators ``tb_accum_*``.

    Raises:
        FormatError: an operator that does not exist, or that no block program expresses.
    """
    name = text.removeprefix(f"{level}_").removesuffix("_op")
    if text != f"{level}_{name}_op":
        raise FormatError(f"{where}: operators of this level are called {level}_..._op")
    if level == "tb" and name.startswith("accum_"):
        name = f"forloop_{name}"
    parts, dim = _NAME.fullmatch(name), 0
    if parts:
        name, dim = parts[1] + (parts[3] or ""), int(parts[2])
    why = REFUSED.get(name) or REFUSED.get(f"{level}_{name}")
    if why:
        raise FormatError(f"{where}: {why}, so this muGraph cannot be read")
    known = ["input", "output", *(BLOCK if level == "tb" else [*KERNEL, "customized"])]
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {level}_{near[0]}_op?" if near else f"known: {', '.join(known)}"
        raise FormatError(f"{where}: no such operator; {hint}")
    return name, dim


def result_shape(name: str, dim: int, shapes: list[Extents], dimx: int, where: str) -> Extents:
    """The shape of an operator's result.

    Args:
        name: an operator of `BLOCK`.
        dim: the dimension of its name.
        shapes: of the operands.
        dimx: width to which ``reduction_to_dimx`` and ``redtox`` reduce.
        where: for messages.

    Raises:
        FormatError: shapes that do not fit.
    """
    first, last = shapes[0], len(shapes[0]) - 1
    if dim > last:
        raise FormatError(f"{where}: there is no dimension {dim} in {show_shape(first)}")
    if name in BINARY:
        return _fits(_broadcast(first, shapes[1]), shapes, where)
    if name == "matmul":
        return _fits(_product(first, shapes[1]), shapes, where)
    if name == "concat":
        return _fits(_joined(first, shapes[1], dim), shapes, where)
    if name == "concat_then_matmul":
        a, b, c, d = shapes
        left, right = _joined(a, b, last), _joined(c, d, last - 1)
        return _fits(left and right and _product(left, right), shapes, where)
    if name in ("reduction", "reduction_max"):
        return _with(first, dim, 1)
    if name == "reduction_to_dimx":
        return _grouped(first, dim, dimx, where)
    if name == "forloop_accum_redtox_ld_sum":
        return _grouped(first, last, dimx, where)
    return _with(first, last, 1) if "_red_ld_" in name else first


def _with(shape: Extents, dim: int, extent: int) -> Extents:
    return (*shape[:dim], extent, *shape[dim + 1 :])


def _fits(result: Extents | None, shapes: list[Extents], where: str) -> Extents:
    if result is None:
        shown = ", ".join(map(show_shape, shapes))
        raise FormatError(f"{where}: operands of the shapes {shown} do not fit together")
    return result


def _broadcast(a: Extents, b: Extents) -> Extents | None:
    if len(a) != len(b) or any(x != y and 1 not in (x, y) for x, y in zip(a, b, strict=True)):
        return None
    return tuple(map(max, a, b))


def _product(a: Extents, b: Extents) -> Extents | None:
    if len(a) != len(b) or len(a) < 2 or a[-1] != b[-2] or a[:-2] != b[:-2]:
        return None
    return (*a[:-1], b[-1])


def _joined(a: Extents, b: Extents, dim: int) -> Extents | None:
    if len(a) != len(b) or dim < 0 or _with(a, dim, 1) != _with(b, dim, 1):
        return None
    return _with(a, dim, a[dim] + b[dim])


def _grouped(shape: Extents, dim: int, dimx: int, where: str) -> Extents:
    if shape[dim] % dimx:
        raise FormatError(
            f"{where}: {shape[dim]} elements cannot be reduced to reduction_dimx {dimx}"
        )
    return _with(shape, dim, dimx)
