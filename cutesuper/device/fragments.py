"""Register fragments: conversion of 16-bit elements to fp32, and reductions within a thread.

Two 16-bit elements lie in a register. Taken apart one by one, the upper bf16 costs two instructions
(bring it down, shift it up again); as a word it costs one, as the lower one does. A maximum is
exact in any type, so it is taken of both halves at once, before the conversion.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass.cute as cute
import numpy as np
from cutlass import BFloat16, Float16, Float32, Int16, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op, select_

from cutesuper.device.math import DeviceMath
from cutesuper.ir.operators.monoid import monoid

#: 16-bit elements of a 16-byte access
PIECE = 8


class _Neutral(dict[str, float]):
    def __missing__(self, kind: str) -> float:
        return monoid(kind).identity


#: neutral element of each monoid
NEUTRAL = _Neutral()
#: running sums of a thread: enough to hide the latency of an addition; every product but the first
#: of each sum is added with one instruction
CHAINS = 4
#: types of which a register holds two elements, and how instructions name them
_PACKED = {BFloat16: "bf16x2", Float16: "f16x2"}
#: running results are scalars, and one instruction combines two
_SCALARS = DeviceMath(fast=False)


def fragment(shape: int | tuple[int, ...], dtype: Any = Float32) -> cute.Tensor:
    """Registers for elements of this shape."""
    return cute.make_rmem_tensor(cute.make_layout(shape), dtype)


def filled(shape: int | tuple[int, ...], value: Any, dtype: Any = Float32) -> cute.Tensor:
    """Registers that all hold one value."""
    registers = fragment(shape, dtype)
    registers.fill(value)
    return registers


def stored(value: cute.TensorSSA, shape: int | tuple[int, ...], dtype: Any) -> cute.Tensor:
    """Registers that hold a value, converted to their type."""
    registers = fragment(shape, dtype)
    registers.store(value.to(dtype))
    return registers


def fetched(source: cute.Tensor) -> cute.Tensor:
    """Registers that hold neighbouring elements of memory, read at once."""
    registers = fragment(source.shape, source.element_type)
    cute.autovec_copy(source, registers)
    return registers


def packed(registers: cute.Tensor) -> bool:
    """True if a fragment ``(vector, accesses)`` holds two elements per register."""
    return registers.element_type in _PACKED and registers.shape[0] % 2 == 0


def widen(registers: cute.Tensor) -> cute.TensorSSA:
    """Convert a fragment ``(vector, accesses)`` of floats to fp32.

    before: words ``ba dc``; after: ``a b c d``, one instruction each. Works on 32-bit words: when
    elements are converted one by one inside a branch, the compiler converts them at the load, and
    weights then occupy twice the registers while they wait.
    """
    if not packed(registers):
        return registers.load().to(Float32)
    wide = fragment(registers.shape)
    for n, word in enumerate(words_of(registers)):
        if registers.element_type is BFloat16:
            pair = [x.bitcast(Float32) for x in (word << 16, word & Int32(-0x10000))]
        else:
            pair = [Int16(x).bitcast(Float16).to(Float32) for x in (word, word >> 16)]
        wide[2 * n], wide[2 * n + 1] = pair
    return wide.load()


def words(x: Any) -> tuple[Any, ...]:
    """The numbers of an element of a monoid: of a pair both."""
    return x if isinstance(x, tuple) else (x,)


def element_of(given: Sequence[Any]) -> Any:
    """The inverse of `words`."""
    return given[0] if len(given) == 1 else tuple(given)


def neutral(kind: str) -> Any:
    """The element that changes nothing; as a pair it lies behind all others."""
    number = Float32(NEUTRAL[kind])
    return (number, Float32(float("inf"))) if monoid(kind).places else number


def shuffled(x: Any, distance: int) -> Any:
    """The element of the lane at this distance."""
    return element_of([cute.arch.shuffle_sync_bfly(w, distance) for w in words(x)])


def transposed(words: cute.Tensor, lane: Any) -> cute.Tensor:
    """Exchange four words of each of four neighbouring lanes: the n-th lane gets the n-th of all.
    All lanes of a warp call it. Two steps, each with the lane of the other half: 4 shuffles.

    Results of products lie so that four lanes have 4 bytes of each 16: stored that way, they fill
    half a sector of 32 bytes with each access.
    """
    for step in (1, 2):
        upper = (lane & step) != 0
        for i in (i for i in range(4) if not i & step):
            sent = select_(upper, words[i], words[i + step])
            got = cute.arch.shuffle_sync_bfly(sent, step)
            words[i] = select_(upper, got, words[i])
            words[i + step] = select_(upper, words[i + step], got)
    return words


def joined(pair: Any) -> Int64:
    """A pair of a number and its place as a word; see `cutesuper.ir.block.PAIR`."""
    number, place = (Float32(x) for x in pair)
    high, low = Int64(number.bitcast(Int32)), Int64(place.to(Int32))
    return high << 32 | low


def apart(word: Int64) -> tuple[Float32, Float32]:
    """The inverse of `joined`."""
    return Int32(word >> 32).bitcast(Float32), Int32(word).to(Float32)


def result(kind: str, x: Any) -> Any:
    """The result of a reduction: of a pair the place."""
    return x[1] if monoid(kind).places else x


def reduced(
    kind: str,
    fragment: cute.Tensor | cute.TensorSSA,
    inside: Sequence[Any],
    first: Any = None,
    starts: Sequence[int] = (),
) -> Any:
    """Combine a thread's elements of a row.

    Args:
        kind: name of the monoid.
        fragment: ``(vector, accesses)`` in fp32, packed elements, or words of `joined`.
        inside: for each access a predicate that is true inside the row, or None if it always is.
            Rows are whole accesses, so that there is no comparison for each element.
        first: column of the thread in the row, for monoids of pairs.
        starts: for each access the columns before it, from ``first``; they ascend.
    """
    if not isinstance(fragment, cute.TensorSSA) and fragment.element_type is Int64:
        return _of_pairs(kind, fragment, inside)
    if not isinstance(fragment, cute.TensorSSA) and monoid(kind).packed is None:
        fragment = widen(fragment)
    if isinstance(fragment, cute.TensorSSA):
        values = [fragment[n] for n in range(cute.size(fragment.shape))]
        nothing: Any = Float32(NEUTRAL[kind])
    else:
        values, nothing = words_of(fragment), twice(NEUTRAL[kind], fragment.element_type)
    each = len(values) // len(inside)
    for n, x in enumerate(values):
        if inside[n // each] is not None:
            values[n] = type(nothing)(select_(inside[n // each], x, nothing))
    if monoid(kind).places:  # numbered in the thread, so that places are constants
        places = [Float32(starts[n // each] + n % each) for n in range(len(values))]
        number, place = total(kind, list(zip(values, places, strict=True)))
        return number, place + Float32(first)
    if isinstance(fragment, cute.TensorSSA):
        return total(kind, values)
    return _packed_total(kind, values, fragment.element_type)


def _of_pairs(kind: str, fragment: cute.Tensor, inside: Sequence[Any]) -> Any:
    """A thread's pairs combined; see `reduced`."""
    each, found = cute.size(fragment.shape) // len(inside), []
    for n in range(cute.size(fragment.shape)):
        own, nothing, valid = apart(fragment[n]), neutral(kind), inside[n // each]
        if valid is not None:
            own = tuple(Float32(select_(valid, *x)) for x in zip(own, nothing, strict=True))
        found.append(own)
    return tree(kind, found)


def words_of(registers: cute.Tensor) -> list[Int32]:
    """The registers of a packed fragment."""
    words = cute.recast_tensor(registers, Int32)
    return [words[n] for n in range(cute.size(words.shape))]


def twice(value: float, dtype: Any) -> Int32:
    """A register with an element twice."""
    half = np.float16(value).view(np.uint16)
    bits = int(np.float32(value).view(np.uint32) >> 16 if dtype is BFloat16 else half)
    word = bits << 16 | bits
    return Int32(word - (1 << 32) if word >> 31 else word)


def _packed_total(kind: str, words: Sequence[Int32], dtype: Any) -> Float32:
    """Packed elements combined, two at a time; NaN if one is."""
    name = f"{monoid(kind).packed}.{_PACKED[dtype]}"
    left = list(words)
    while len(left) > 1:
        pairs = zip(left[::2], left[1::2], strict=False)
        left = [_packed(a, b, name) for a, b in pairs] + left[len(left) // 2 * 2 :]
    both = fragment((2, 1), dtype)
    cute.recast_tensor(both, Int32)[0] = left[0]
    wide = widen(both)
    return combine(kind, wide[0], wide[1])


def _packed(a: Int32, b: Int32, name: str) -> Int32:
    return _of_two(Int32(a), Int32(b), name, "r")


@dsl_user_op
def _of_two(
    a: Any, b: Any, name: str, kind: str, stays: bool = False, *, loc: Any = None, ip: Any = None
) -> Int32:
    """A word that an instruction makes of two registers of a kind.
    The compiler may move the instruction unless it ``stays``."""
    operands = [x.ir_value(loc=loc, ip=ip) for x in (a, b)]
    return Int32(
        llvm.inline_asm(
            T.i32(), operands, f"{name} $0, $1, $2;", f"=r,{kind},{kind}", has_side_effects=stays,
            is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
        )
    )  # fmt: skip


def rounded(values: cute.Tensor, words: cute.Tensor, dtype: Any) -> None:
    """Round fp32 registers to 16 bits, two to a word, here and nowhere else.
    A conversion that the compiler knows it moves: from the end of a loop to its next pass, where
    both the old and the new values then took registers (280 bytes of stack). One that it may move
    was slower, too: 669 us in place of 571 for 8192 causal tokens with heads of 64."""
    name = f"cvt.rn.{_PACKED[dtype]}.f32"
    for n in range(cute.size(words.shape)):
        low, high = (Float32(values[2 * n + k]) for k in range(2))
        words[n] = _of_two(high, low, name, "f", stays=True)


def folded(total: Any, v: cute.TensorSSA, kind: str) -> Any:
    """Fold the elements of a vector into a running sum or maximum."""
    how = cute.ReductionOp.MAX if monoid(kind).selects else cute.ReductionOp.ADD
    return combine(kind, total, v.reduce(how, Float32(NEUTRAL[kind]), 0))


def combine(kind: str, a: Any, b: Any) -> Any:
    """Combine two numbers by the monoid called ``kind``."""
    return monoid(kind).combine(_SCALARS, a, b)


def tree(kind: str, values: list[Any]) -> Any:
    """Combine values pairwise."""
    while len(values) > 1:
        pairs = [combine(kind, a, b) for a, b in zip(values[::2], values[1::2], strict=False)]
        values = pairs + ([values[-1]] if len(values) % 2 else [])
    return values[0]


def total(kind: str, values: Sequence[Any]) -> Any:
    """Combine a thread's values of a row: `CHAINS` running results, then these."""
    running = list(values[:CHAINS])
    for n, x in enumerate(values[CHAINS:]):
        running[n % CHAINS] = monoid(kind).append(_SCALARS, running[n % CHAINS], x)
    return tree(kind, running)
