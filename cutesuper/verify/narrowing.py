"""Places where the kernels of a muGraph round to 16 bits; knowing them takes no PyTorch."""

from __future__ import annotations

from cutesuper.ir.block import LOAD, BlockProgram, KernelStep, MuGraph
from cutesuper.ir.dtypes import DType, float16, float32


def product_type(step: KernelStep, mu: MuGraph) -> DType:
    """The operand type of a kernel's products: that of the operands it loads.
    If it computes all of them, the shortest type of its loads: statistics may be float32."""
    ops = step.program.ops
    operands = [ops[i] for op in ops if op.facets.contracts for i in op.inputs]
    loads = [op for op in operands if op.kind == LOAD] or step.program.loads()
    types = (mu.tensors[op.attributes["tensor"]].dtype for op in loads)
    return min(types, key=lambda t: t.itemsize, default=float32)


def computed_operands(program: BlockProgram) -> list[int]:
    """The operations whose results are operands of a product."""
    operands = (i for op in program.ops if op.facets.contracts for i in op.inputs)
    return [i for i in dict.fromkeys(operands) if program.ops[i].kind != LOAD]


def narrows(mu: MuGraph) -> bool:
    """True if a kernel may round anything other than an output to float16."""
    return any(_narrows(step, mu) for step in mu.steps)


def _narrows(step: KernelStep, mu: MuGraph) -> bool:
    if any(mu.tensors[n].dtype == float16 for n in step.writes if n not in mu.outputs):
        return True
    return product_type(step, mu) == float16 and bool(computed_operands(step.program))
