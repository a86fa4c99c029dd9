"""Requirements of every loop with matrix products on its operands."""

from __future__ import annotations

from cutesuper.errors import LoweringError
from cutesuper.skeletons.base import Argument

#: element types that the tensor cores multiply
MULTIPLIED = ("float16", "bfloat16")


def check_element_type(where: str, dtype: str) -> None:
    """Refuse element types that the tensor cores do not multiply. Raises LoweringError."""
    if dtype not in MULTIPLIED:
        raise LoweringError(
            f"{where}: matrix products of {dtype} have no tensor-core path that keeps their "
            "precision; use float16 or bfloat16 operands"
        )


def check_same_type(where: str, dtype: str, argument: Argument) -> None:
    """Refuse an operand whose element type differs from the others'. Raises LoweringError."""
    if argument.dtype != dtype:
        raise LoweringError(
            f"{where}: operands of {dtype} and of {argument.dtype} ({argument.name}) in one "
            "kernel; give all operands of its products one element type"
        )


def unaligned(where: str, argument: Argument) -> LoweringError:
    """Error for an operand whose rows TMA (bulk tensor loads) cannot address."""
    return LoweringError(
        f"{where}: rows of {argument.name}{list(map(str, argument.shape))} are not multiples of "
        "16 bytes, which bulk tensor copies need; pad the last dimension to a multiple of 8"
    )
