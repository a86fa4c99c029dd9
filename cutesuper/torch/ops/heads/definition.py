"""Definitions of heads, and the kernel graphs of their chunks.

A chunk is a number of rows. Its graph has the losses of these rows, and the gradients that are
asked for: rows of those of operands with rows, and the part of the sum over all rows for operands
without, as weights. From the second chunk on it adds this part to the sum so far.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from cutesuper.autodiff.gradient import joint
from cutesuper.errors import ShapeError
from cutesuper.ir.arguments import shown
from cutesuper.ir.dims import Dim, Symbol, extent
from cutesuper.ir.dtypes import as_dtype
from cutesuper.ir.graph import KernelGraph, Tensor
from cutesuper.ir.operators.base import INPUT
from cutesuper.torch.ops.rowwise.definition import (
    Input,
    Kind,
    Maybe,
    Option,
    TensorArgument,
    check_tensor,
    describe,
)

#: bytes of the widest value of a chunk, which bound the memory of a call and are large enough for
#: products at full speed: 4096 rows of 128256 words in 16 bits
CHUNK_BYTES = 1 << 30
#: chunks have a multiple of this many rows, so that few numbers of rows need kernels of their own
ROWS = 128
#: the input with a factor for the loss of each row
FACTORS = "factors"


@dataclass(frozen=True)
class Part(TensorArgument):
    """A tensor argument of a head.

    Attributes:
        rank: dimensions besides those of the rows: 1 for ``x[..., K]`` with rows, 2 for a weight
            ``[V, K]`` without, 0 for one label of each row ``[...]``.
        rows: true if it has the rows of the call in front.
    """

    rank: int
    rows: bool = False


@dataclass(frozen=True)
class Head:
    """A loss of each row.

    Attributes:
        name: of the operators in ``torch.ops.cutesuper``.
        parts: tensors that a call takes, in order; the first has rows.
        options: name and type of the other arguments.
        build: ``build(graph, *inputs, *options)`` adds the losses ``[M, 1]`` to a graph and returns
            them. Inputs with rows are ``[M, ...]``, at least of two dimensions; None where a part
            is None. Rows of zeros have a finite loss.
    """

    name: str
    parts: tuple[Part, ...]
    options: tuple[tuple[str, type], ...]
    build: Callable[..., Tensor]


# ------------------------------------------------------------------------------------------- kinds


def kind_of(head: Head, tensors: Sequence[Maybe], options: tuple[Option, ...]) -> Kind:
    """The kind of a call, whose arguments are checked.

    Raises:
        ShapeError, DTypeError, DeviceError, LayoutError: naming the argument.
    """
    lead = lead_of(head, tensors)
    call = describe(head.name, head.parts, tensors)
    first = (head.parts[0].name, tensors[0])
    inputs = tuple(
        _input(call, part, t, first, lead) for part, t in zip(head.parts, tensors, strict=True)
    )
    return Kind(head.name, inputs, options)


def lead_of(head: Head, tensors: Sequence[Maybe]) -> tuple[int, ...]:
    """Extents of the rows of a call."""
    first = tensors[0]
    if not isinstance(first, torch.Tensor) or first.dim() < head.parts[0].rank:
        rows = ", ".join(["...", *"MNKLH"[: head.parts[0].rank]])
        have = list(first.shape) if isinstance(first, torch.Tensor) else shown(first)
        raise ShapeError(f"{head.name}({head.parts[0].name}={have}): must be a tensor [{rows}]")
    return tuple(first.shape[: first.dim() - head.parts[0].rank])


def _input(
    call: str, part: Part, t: Any, first: tuple[str, Any], lead: tuple[int, ...]
) -> Input | None:
    check_tensor(call, part, t, first)
    if t is None:
        return None
    front = lead if part.rows else ()
    inner = tuple(int(n) for n in t.shape[len(front) :])
    if tuple(t.shape[: len(front)]) != front or len(inner) != part.rank or 0 in inner:
        rows = f"{list(lead)} in front of " if part.rows else ""
        raise ShapeError(
            f"{call}: {part.name} has shape {list(t.shape)}, must have {rows}{part.rank} "
            "dimensions, none of them 0"
        )
    return Input(part.rows, inner or (1,), as_dtype(t.dtype).name)


# ------------------------------------------------------------------------------------------ graphs


@dataclass(frozen=True)
class Form:
    """Everything that determines the program of a chunk, besides the head and the GPU.

    Attributes:
        kind: of the call.
        rows: of the chunk.
        needs: for each part, whether its gradient is computed; without any the program computes
            losses, of any number of rows up to ``rows``.
        wide: true if gradients of weights are stored as float32.
        adds: true if they are added to those of the chunks before.
    """

    kind: Kind
    rows: int
    needs: tuple[bool, ...] = ()
    wide: bool = False
    adds: bool = False

    def graph(self, head: Head) -> KernelGraph:
        """The kernel graph: losses, then gradients.
        Its further inputs are the factors of the losses whose sum is differentiated (`FACTORS`),
        and the sums so far (`so_far`)."""
        if not any(self.needs):
            return _losses(head, self.kind, Symbol("M", self.rows))
        asked = [p for p, n in zip(head.parts, self.needs, strict=True) if n]
        made = joint(_losses(head, self.kind, self.rows), [p.name for p in asked])
        names = {p.name for p in head.parts}
        g = KernelGraph(
            [
                replace(n, name=FACTORS) if n.operator == INPUT and n.name not in names else n
                for n in made.nodes
            ]
        )
        g.mark_output(g.tensor(made.outputs[0]), "float32")
        for part, i in zip(asked, made.outputs[1:], strict=True):
            g.mark_output(g.tensor(i) if part.rows else self._summed(g, part, i))
        return g

    def _summed(self, g: KernelGraph, part: Part, i: int) -> Tensor:
        """The gradient of a part without rows: node ``i``, with the sum so far, in its type."""
        t = g.tensor(i)
        dtype = "float32" if self.wide else t.dtype.name
        if self.adds:
            return g.convert(g.add(g.new_input(t.shape, dtype, so_far(part)), t), dtype)
        return t if dtype == t.dtype.name else g.convert(t, dtype)


def so_far(part: Part) -> str:
    """The name of the input with the sum of a gradient so far."""
    return f"{part.name}_so_far"


def _losses(head: Head, kind: Kind, rows: Dim) -> KernelGraph:
    g = KernelGraph()
    tensors = kind.new_inputs(g, head.parts, rows)
    g.mark_output(head.build(g, *tensors, *kind.options), "float32")
    return g


def stored_bytes(kind: Kind) -> int:
    """Bytes of an element between kernels; what float16 cannot hold is stored as float32."""
    first = kind.inputs[0]
    return 2 if first is not None and first.dtype == "bfloat16" else 4


def chunk_rows(head: Head, kind: Kind, rows: int) -> int:
    """Rows of a chunk of a call: equal chunks, whose widest value has at most `CHUNK_BYTES`."""
    graph = _losses(head, kind, Symbol("M", ROWS)).expanded()
    values = [n.shape for n in graph.nodes if n.shape and isinstance(n.shape[0], Symbol)]
    widest = max(prod(extent(d) for d in shape[1:]) for shape in values) * stored_bytes(kind)
    most = max(1, CHUNK_BYTES // widest // ROWS) * ROWS
    own = -(-rows // -(-rows // most))
    if own > ROWS:
        return -(-own // ROWS) * ROWS
    return max(8, 1 << (own - 1).bit_length())
