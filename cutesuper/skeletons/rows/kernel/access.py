"""Accesses of a row loop to device memory: offsets, and pieces of rows in registers."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cutesuper.device.fragments import fragment, stored
from cutesuper.device.memory import element, neighbours, put
from cutesuper.skeletons.base import View
from cutesuper.skeletons.kernel.arguments import dtype_of
from cutesuper.skeletons.rows.kernel.context import Known, Place, SlicePlace


class Access:
    """Reads and writes of a thread's part of a row."""

    def __init__(self, known: Known) -> None:
        self.k, self.plan = known, known.plan

    def offset(self, view: View, tensors: list[cute.Tensor], row: Any, place: Place) -> Any:
        """Offset in elements of a row's first element in this block's part."""
        at = Int32(0)
        if any(d in view.labels for d in self.plan.rows):
            at = self.k.extents.place(view, self.plan.rows, row, tensors)
        for d, index in place.outer.items():
            at = at + index * self.k.extents.stride(view, d, tensors)
        if self.plan.column in view.labels:
            width = self.plan.width * self.k.extents.stride(view, self.plan.column, tensors)
            at = at + place.part * width
        return at

    def number(self, view: View, tensors: list[cute.Tensor], place: Place) -> Any:
        """A load with neither rows nor columns; floats as fp32."""
        at = self.offset(view, tensors, Int32(0), place)
        x = element(tensors[view.argument].iterator, at)
        return x.to(Float32) if x.dtype.is_float else x

    def read(
        self, view: View, tensors: list[cute.Tensor], row: Any, p: int, place: Place
    ) -> cute.Tensor:
        """Read a piece of a row straight from device memory, in its own type.

        Past the end of the row it has elements of the row, which are not used: with a branch around
        each load, the compiler would wait for one load before it issues the next.
        """
        plan, piece = self.plan, place.piece
        registers = fragment((self.k.vector, piece), dtype_of(plan, view))
        base = tensors[view.argument].iterator
        start = self.offset(view, tensors, row, place)
        last = plan.length - self.k.vector - place.part * plan.width
        for c in range(piece):
            at = place.first + self.k.chunk_at(p, c)
            if plan.ragged or isinstance(place, SlicePlace):
                at = cutlass.min(at, last)
            self.access(view, base, start, at, registers[None, c], False, place.left)
        return registers

    def access(
        self,
        view: View,
        base: cute.Pointer,
        start: Any,
        at: Any,
        registers: cute.Tensor,
        writes: bool,
        left: Any,
    ) -> None:
        """Read or write ``vector`` elements of a row.
        Accesses are as wide as the tensor's alignment allows."""
        plan = self.plan
        wide = view.run(plan.column, self.k.vector, plan.length, plan.width)
        stride = view.stride(self.plan.column)
        for e in range(0, self.k.vector, wide):
            offset = cute.assume(start + (at + e) * stride, divby=wide)
            memory = neighbours(base + offset, wide)
            own = neighbours(registers.iterator + e, wide)
            if self.k.vector > wide and self.plan.ragged:
                self.guarded(memory, own, at + e, left, writes)
            else:
                self.move(memory, own, writes)

    @cute.jit
    def guarded(self, memory, own, at, left, writes: cutlass.Constexpr):
        """Read or write in an access that may lie past the end of the row."""
        if at < left:
            self.move(memory, own, writes)

    def move(self, memory: cute.Tensor, own: cute.Tensor, writes: bool) -> None:
        """Copy between registers and memory."""
        if writes:
            cute.autovec_copy(own, memory)
        else:
            cute.autovec_copy(memory, own)

    @cute.jit
    def store(self, i: cutlass.Constexpr, value, p: cutlass.Constexpr, row, tensors, place):
        """Write a piece of a row, or a value of the row by its first thread."""
        view = self.plan.stores[i]
        dtype = dtype_of(self.plan, view)
        base = tensors[view.argument].iterator
        start = self.offset(view, tensors, row.row, place)
        if cutlass.const_expr(self.plan.column not in view.labels):
            if cutlass.const_expr(p == 0):
                if row.valid and place.lane == 0 and place.part == 0:
                    put(base + start, Float32(value).to(dtype))
        else:
            registers = stored(value, (self.k.vector, self.k.piece), dtype)
            if row.valid:
                left = place.left
                for c in cutlass.range_constexpr(self.k.piece):
                    at = place.first + self.k.chunk_at(p, c)
                    if cutlass.const_expr(self.plan.ragged):
                        if at < left:
                            self.access(view, base, start, at, registers[None, c], True, left)
                    else:
                        self.access(view, base, start, at, registers[None, c], True, left)
