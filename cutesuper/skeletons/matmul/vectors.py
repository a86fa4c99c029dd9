"""Products of a vector and a matrix beside products of rows: ``G[K] @ W[K, N]``,
``sum_K(W[K, N])``.

LayerNorm and Linear need them: ``LN(X) W = (X G W - mean(X) (G W)) / s + B W``. Search and schedule
share one limit: all vectors of a kernel are rows of one more tile of 8.
"""

from __future__ import annotations

from cutesuper.ir.block import BlockOp, BlockProgram

#: rows of the smallest WGMMA instruction
MAX_VECTORS = 8


def vector_products(program: BlockProgram, row: str, column: str, contracted: str) -> list[BlockOp]:
    """The operations that reduce a column operand with a vector, or by itself (with ones).

    The last input of each is the column operand; a product has the vector before it.
    """
    return [
        op
        for op in program.ops
        if op.attributes.get("over") == contracted
        and column in op.dims
        and row not in op.dims
        and contracted in program.ops[op.inputs[-1]].dims
    ]
