"""Helpers of the loop skeletons: element types, labelled views of arguments, fake arguments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.runtime import make_fake_compact_tensor
from cutlass.cutlass_dsl import select_

from cutesuper.ir.block import BlockProgram
from cutesuper.ir.dims import MAX_ELEMENTS, Symbol, open_size, size
from cutesuper.skeletons.base import Argument, Indexed, Named, Scratch, View

ELEMENT = {
    "float16": cutlass.Float16,
    "bfloat16": cutlass.BFloat16,
    "float32": cutlass.Float32,
    "int32": cutlass.Int32,
    "int64": cutlass.Int64,
}


def dtype_of(plan: Any, view: View) -> Any:
    """The element type of the argument behind a view."""
    return ELEMENT[plan.arguments[view.argument].dtype]


def named_row(view: Indexed, indices: Sequence[Any]) -> tuple[Any, Any]:
    """Offset in elements of the row that indices name, and true if the table has it.
    A place is counted from the end if it is below 0, and the first one where there is no such."""
    (place, known), *others = map(_named_place, view.named, indices)
    for further, exists in others:
        place, known = place + further, known & exists
    return place, known


def _named_place(named: Named, index: Any) -> tuple[Any, Any]:
    """`named_row` for one dimension."""
    known = (index >= -named.count) & (index < named.count)
    inside = Int32(select_(known, Int32(index), Int32(0)))
    inside = Int32(select_(inside < 0, inside + named.count, inside))
    return Int64(inside) * named.stride, known


class Extents:
    """Extents of labels while tracing: Python ints, or run-time values of symbolic dimensions."""

    def __init__(self, program: BlockProgram, arguments: tuple[Argument, ...]) -> None:
        self.program = program
        self.arguments = arguments

    def of(self, label: str, tensors: list[cute.Tensor]) -> Any:
        """The extent of a label, read off an argument where it is symbolic."""
        dim = self.program.dims[label]
        return self._read(dim, tensors) if isinstance(dim, Symbol) else dim

    def count(self, labels: Iterable[str], tensors: list[cute.Tensor]) -> Any:
        """Number of elements along some labels: the product of their extents."""
        count: Any = 1
        for label in labels:
            count = count * self.of(label, tensors)
        return count

    def _read(self, symbol: Symbol, tensors: list[cute.Tensor]) -> Any:
        for argument, tensor in zip(self.arguments, tensors, strict=True):
            if symbol in argument.shape:
                return tensor.shape[argument.shape.index(symbol)]
        raise AssertionError(f"no argument carries {symbol}")  # the planner made the views

    def stride(self, view: View, label: str, tensors: list[cute.Tensor]) -> Any:
        """The stride of a label: an int, or a number of 64 bits.
        The latter where offsets need them, and where an extent behind it is symbolic. That one is
        computed, since that of a dimension of extent 1 may be any number."""
        known, symbols = view.stride(label), view.growth(label)
        if not symbols:
            return Int64(known) if known > 1 and self.wide(view) else known
        factor = prod(Int64(self._read(s, tensors)) for s in symbols)
        return cute.assume(factor * known, divby=known)

    def place(
        self, view: View, labels: tuple[str, ...], index: Any, tensors: list[cute.Tensor]
    ) -> Any:
        """Offset in elements of the index-th element along some labels, the last one fastest."""
        counts = {d: self.of(d, tensors) for d in labels}
        if view.growing or self.wide(view):  # layouts with strides of 64 bits do not compile
            at = unravel(index, counts)
            return sum((at[d] * self.stride(view, d, tensors) for d in labels), Int64(0))
        counts = dict(reversed(counts.items()))  # in a layout, the first one varies fastest
        stride = tuple(view.stride(d) for d in counts)
        return cute.make_layout(tuple(counts.values()), stride=stride)(index)

    def wide(self, view: View, parts: int = 1) -> bool:
        """True if offsets in the tensor behind a view need 64 bits.
        They count ``parts`` of each element. A call refuses more elements than 32 bits reach where
        their number is not known before, but knows nothing of parts."""
        shape = self.arguments[view.argument].memory
        return parts > 1 if open_size(shape) else parts * size(shape) > MAX_ELEMENTS


def labelled(
    extents: Extents, view: View, labels: tuple[str, ...], tensors: list[cute.Tensor]
) -> cute.Tensor:
    """The argument behind ``view`` with one mode for each of ``labels``, for bulk copies.
    These have coordinates, not offsets. Strides that are known stay so, whatever the tensor's size:
    a descriptor has five dimensions, and only modes whose strides are known become one."""
    shape = tuple(described(extents.of(d, tensors)) for d in labels)
    stride = tuple(
        extents.stride(view, d, tensors) if view.growth(d) else view.stride(d) for d in labels
    )
    return cute.make_tensor(tensors[view.argument].iterator, cute.make_layout(shape, stride=stride))


def batch_labels(batch: tuple[str, ...], view: View) -> tuple[str, ...]:
    """The batch labels of an operand."""
    return tuple(d for d in batch if d in view.labels)


def unravel(index: Any, counts: dict[str, Any]) -> dict[str, Any]:
    """Coordinates of the index-th element, the last label varying fastest."""
    found: dict[str, Any] = {}
    for label, count in reversed(counts.items()):
        found[label] = index % count
        index = index // count
    return found


def described(extent: Any) -> Any:
    """An extent for a TMA descriptor.
    A static 1 is replaced, because it would vanish: the descriptor would then not fit its box, or
    its instruction have fewer dimensions than it, which a GPU calls an illegal instruction."""
    return Int32(1) if isinstance(extent, int) and extent == 1 else extent


def handed_over(
    arguments: tuple[Argument, ...], given: Sequence[Any]
) -> tuple[list[cute.Tensor], list[cute.Tensor], Any]:
    """Tensors, scratch and stream of a launch, which gets them in this order.
    The tensors are parts of those that are given, where the arguments say so."""

    def part(argument: Argument, whole: cute.Tensor) -> cute.Tensor:
        if argument.part is None:
            return whole
        own = [n if isinstance(d, Symbol) else d
               for n, d in zip(whole.shape, argument.shape, strict=True)]  # fmt: skip
        first = sum(n * s for n, s in zip(argument.part.starts, whole.stride, strict=True) if n)
        layout = cute.make_layout(tuple(own), stride=whole.stride)
        return cute.make_tensor(whole.iterator + first, layout)

    *whole, stream = given
    tensors = [part(*pair) for pair in zip(arguments, whole, strict=False)]
    return tensors, whole[len(arguments) :], stream


def fake_arguments(arguments: tuple[Argument, ...]) -> tuple[cute.Tensor, ...]:
    """Fake tensors to compile with, of addresses for scattered rows.
    Equal symbols share one run-time extent."""
    symbols: dict[str, Any] = {}

    def dim(d: Any) -> Any:
        if isinstance(d, Symbol):
            return symbols.setdefault(d.name, cute.sym_int())
        return d

    given = [("int64", a.shape[:1]) if a.scattered else (a.dtype, a.memory) for a in arguments]
    return tuple(
        make_fake_compact_tensor(
            ELEMENT[dtype],
            tuple(dim(d) for d in shape) or (1,),
            stride_order=tuple(reversed(range(max(1, len(shape))))),
            assumed_align=16,
        )
        for dtype, shape in given
    )


def fake_scratch(scratch: tuple[Scratch, ...]) -> tuple[cute.Tensor, ...]:
    """Fake tensors to compile with for scratch memory, each with one dimension.

    before: ``Scratch((M, 4), "int32", True)``; after: an int32 vector whose length is known at the
    call, where it has 4 elements for each of at least M rows.
    """

    def length(s: Scratch) -> Any:
        known = [d for d in s.shape if isinstance(d, int)]
        return prod(known) if len(known) == len(s.shape) else cute.sym_int()

    return tuple(
        make_fake_compact_tensor(ELEMENT[s.dtype], (length(s),), assumed_align=16) for s in scratch
    )
