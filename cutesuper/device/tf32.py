"""fp32 numbers as the tensor cores take them: TF32, which has 10 bits of fraction.

Source: Ootomo and Yokota, Recovering single precision accuracy from Tensor Cores
(arXiv:2203.03341).
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from cutesuper.device.memory import one

#: numbers of a step along the contracted label, and in 16 bytes
STEP, PIECE = 8, 4


def split(x: Float32) -> tuple[Float32, Float32]:
    """A finite number as the sum of two of TF32, but for 2^-22 of it."""
    high = rounded(x)
    return high, rounded(x - high)


def split_all(values: cute.TensorSSA) -> tuple[cute.Tensor, cute.Tensor]:
    """Registers with the first and with the second numbers of `split`, for a vector of fp32."""
    high, low = (cute.make_rmem_tensor(values.shape, Float32) for _ in range(2))
    for n in range(cute.size(values.shape)):
        high[n], low[n] = split(values[n])
    return high, low


def rounded_all(values: cute.TensorSSA) -> cute.Tensor:
    """Registers with a vector of fp32, rounded to TF32."""
    found = cute.make_rmem_tensor(values.shape, Float32)
    for n in range(cute.size(values.shape)):
        found[n] = rounded(values[n])
    return found


def gathered(memory: cute.Tensor, step: int, slot: Any, thread: Any) -> list[Float32]:
    """A thread's four numbers of a step of the first operand in shared memory.
    The operand is ``[64, depth, slot]``, whichever label is contiguous: rows ``16 w + l / 4 + {0,
    8}`` at place ``l % 4`` of the step, then the same at ``l % 4 + 4``."""
    lane, layout, found = thread % 32, memory.layout, list[Float32]()
    row = thread // 32 % 4 * 16 + lane // 4
    first = cute.recast_ptr(memory.iterator, dtype=Float32)  # without its swizzle
    base = cute.crd2idx((0, 0, slot), layout)
    for place in (0, 4):
        for half in (0, 8):
            depth = STEP * step + lane % 4 + place
            at = cute.crd2idx((row + half, depth, 0), layout)
            piece = at // PIECE
            at = (piece ^ (piece // 8 % 8)) * PIECE + at % PIECE
            found.append(one(first + (base + at))[0])
    return found


@dsl_user_op
def rounded(x: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """A number rounded to TF32, ties away from zero."""
    found = llvm.inline_asm(
        T.f32(), [Float32(x).ir_value(loc=loc, ip=ip)], "cvt.rna.tf32.f32 $0, $1;", "=f,f",
        has_side_effects=False, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc, ip=ip,
    )  # fmt: skip
    return Float32(found)
