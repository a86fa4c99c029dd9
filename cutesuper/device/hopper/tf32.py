"""Products of fp32 operands on Hopper: WGMMA of TF32 numbers, 8 along the contracted label a step.

The instruction ignores the 13 last bits of fp32, and takes from shared memory what is contiguous
along the contracted label. The first operand may be in registers, to which threads bring it; see
`device.tf32`.

The sums of a step are cut off, not rounded. Where that counts, sums of a few steps are added up by
ordinary instructions.

Source: NVIDIA, Parallel Thread Execution ISA 8.8, wgmma.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from cutesuper.device.tf32 import STEP

#: a matrix descriptor beside its address: 128-byte swizzle, 8 rows every 1024 bytes
SWIZZLED = 1 << 62 | (1024 >> 4) << 32 | 1 << 16


@dataclass(frozen=True)
class Steps:
    """An operand in shared memory that is contiguous along the contracted label, swizzled.

    Attributes:
        memory: ``[rows, depth, slot]``.
    """

    memory: cute.Tensor

    def __getitem__(self, at: tuple[Any, Any, int, Any]) -> Int64:
        """The descriptor of a step in a slot."""
        _, _, step, slot = at
        offset = cute.crd2idx((0, STEP * step, slot), self.memory.layout)
        address = self.memory.iterator.toint() + 4 * offset
        return Int64(address >> 4 & 0x3FFF) | Int64(SWIZZLED)


def issue(accumulator: cute.Tensor, first: Any, second: Int64, adds: bool) -> None:
    """Issue one step.

    Args:
        accumulator: fragment of this thread.
        first: a descriptor, or this thread's four numbers.
        second: a descriptor.
        adds: true if the products are added to the accumulators.
    """
    count = cute.size(accumulator)
    words = first if isinstance(first, list) else [first]
    names = ", ".join(f"${2 * count + n}" for n in range(len(words)))
    left, kind = (f"{{{names}}}", "f") if len(words) > 1 else (names, "l")
    sums = ", ".join(f"${v}" for v in range(count))
    text = (
        f"{{\n.reg .pred p;\nsetp.ne.b32 p, {int(adds)}, 0;\n"
        f"wgmma.mma_async.sync.aligned.m64n{2 * count}k8.f32.tf32.tf32 "
        f"{{{sums}}}, {left}, ${2 * count + len(words)}, p, 1, 1;\n}}"
    )
    updated(accumulator, text, [*words, second], [kind] * len(words) + ["l"])


@dsl_user_op
def updated(
    registers: cute.Tensor,
    text: str,
    operands: list[Any],
    kinds: list[str],
    *,
    loc: Any = None,
    ip: Any = None,
) -> None:
    """Run a statement that changes n fp32 registers in place.
    They are its operands 0 to n - 1 and n to 2 n - 1; it reads operands of these kinds from number
    2 n on."""
    count = cute.size(registers)
    given = [registers[v] for v in range(count)] + operands
    constraints = ",".join([*["=f"] * count, *map(str, range(count)), *kinds])
    found = llvm.inline_asm(
        llvm.StructType.get_literal([T.f32()] * count),
        [x.ir_value(loc=loc, ip=ip) for x in given], text, constraints,
        has_side_effects=True, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc, ip=ip,
    )  # fmt: skip
    for v in range(count):
        registers[v] = Float32(llvm.extractvalue(T.f32(), found, [v], loc=loc, ip=ip))
