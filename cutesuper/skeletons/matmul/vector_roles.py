"""Products of vectors in the matmul loop: ``G[K] @ W[K, N]`` beside ``X[M, K] @ W[K, N]``.

The vectors are the rows of one more tile, of 8 rows, in every stage of the ring; the helper warps
write it, and the tensor cores multiply it by the column operands that are already staged. A
thread's accumulators for it belong to the same columns as those for the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cutesuper.ir.block import BlockProgram
from cutesuper.ir.thread import ThreadExpression
from cutesuper.skeletons.matmul.vectors import MAX_VECTORS


@dataclass(frozen=True)
class VectorProduct:
    """A row vector ``[column]``.

    Attributes:
        column: the load of the column operand.
        vector: index of the vector in `MatmulPlan.vector_rows`.
        value: the operation that completes it.
    """

    column: int
    vector: int
    value: int


#: contents of a tile of vectors: expressions over staged vectors, or None for ones
VectorRows = tuple[ThreadExpression | None, ...]


def products_of_vectors(
    program: BlockProgram,
    found: list[int],
    column: str,
    complete: Callable[[int], int],
    fused: Callable[[int], ThreadExpression],
) -> tuple[VectorRows, tuple[VectorProduct, ...]]:
    """The vectors of a kernel, each once, and their products.

    Args:
        program: the block program.
        found: the operations, i.e. products with vectors and sums of column operands.
        column: the column label.
        complete: gives the operation that completes the partial results of an operation.
        fused: gives the expression of a vector.
    """
    rows: dict[int | None, int] = {}
    products: list[VectorProduct] = []
    for i in found:
        inputs = program.ops[i].inputs
        operand = next(j for j in inputs if column in program.ops[j].dims)
        vector = next((j for j in inputs if j != operand), None)
        index = rows.setdefault(vector, len(rows))
        products.append(VectorProduct(operand, index, complete(i)))
    return tuple(None if v is None else fused(v) for v in rows), tuple(products)


def refusal(rows: VectorRows, products: tuple[VectorProduct, ...], columns: set[int]) -> str | None:
    """Reason why vectors cannot be multiplied in the loop; None if they can."""
    if len(rows) > MAX_VECTORS:
        return f"{len(rows)} vectors are multiplied by column operands; at most {MAX_VECTORS} are"
    alone = next((p.column for p in products if p.column not in columns), None)
    if alone is not None:
        return (
            f"operation {alone} is multiplied by a vector only; its tiles are staged for a product "
            "of rows"
        )
    return None
