"""Requirements on the operands of loops: extents, and with matrix products element types."""

from __future__ import annotations

from collections.abc import Sequence

from cutesuper.errors import LoweringError
from cutesuper.ir.dims import Symbol, show_shape
from cutesuper.ir.dtypes import as_dtype
from cutesuper.skeletons.base import Argument

#: element types that the tensor cores multiply
MULTIPLIED = ("float16", "bfloat16")


def check_symbols(arguments: tuple[Argument, ...], where: str) -> None:
    """Check that strides are numbers: only the outermost dimension may have an open extent.
    Raises LoweringError."""
    for a in arguments:
        if any(isinstance(d, Symbol) for d in [d for d in a.shape if d != 1][1:]):
            raise LoweringError(
                f"{where}: {a.name} has a symbolic extent that is not its first dimension"
            )


def check_element_type(where: str, dtype: str, known: Sequence[str] = MULTIPLIED) -> None:
    """Refuse element types that a loop does not multiply. Raises LoweringError."""
    if dtype not in known:
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


def check_parts(arguments: tuple[Argument, ...], where: str) -> None:
    """Check that bulk copies may address the arguments that are parts of larger tensors.
    Raises LoweringError."""
    for a in arguments:
        if a.part is not None and not a.part.aligned(a.shape, as_dtype(a.dtype).itemsize):
            raise LoweringError(
                f"{where}: {a.name}{show_shape(a.shape)} lies in {a.part}, and its rows do not all "
                "begin and end at multiples of 16 bytes there, which bulk copies need; copy it in "
                "a kernel before"
            )


def unaligned(where: str, argument: Argument) -> LoweringError:
    """Error for an operand whose rows TMA (bulk tensor loads) cannot address."""
    return LoweringError(
        f"{where}: rows of {argument.name}{list(map(str, argument.shape))} are not multiples of "
        "16 bytes, which bulk tensor copies need; pad the last dimension to a multiple of 8"
    )
