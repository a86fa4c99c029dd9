"""Element types. Accumulation is fp32 for every element type (docs/architecture.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cutesuper.errors import DTypeError
from cutesuper.ir.arguments import shown

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class DType:
    """An element type.

    Attributes:
        name: as in PyTorch, e.g. ``float16``.
        itemsize: bytes per element.
        mantissa: explicit mantissa bits; one unit in the last place of 1.0 is ``2**-mantissa``.
    """

    name: str
    itemsize: int
    mantissa: int

    @property
    def integer(self) -> bool:
        """True if elements are labels, lengths or table entries, not numbers to compute with."""
        return self.name in INTEGERS

    @property
    def torch(self) -> torch.dtype:
        """The PyTorch element type of the same name."""
        import torch

        return getattr(torch, self.name)

    @property
    def eps(self) -> float:
        """Distance from 1.0 to the next representable number."""
        return 2.0**-self.mantissa

    def __str__(self) -> str:
        return self.name


float16 = DType("float16", 2, 10)
bfloat16 = DType("bfloat16", 2, 7)
float32 = DType("float32", 4, 23)
int32 = DType("int32", 4, 31)
int64 = DType("int64", 8, 63)

#: element types of tensors between kernels and of all computed values
ALL: dict[str, DType] = {d.name: d for d in (float16, bfloat16, float32)}
#: bytes of an element at least
LEAST_BYTES = min(d.itemsize for d in ALL.values())
#: operands of the operators that take lengths, tables, indices or labels; nothing is computed in
#: these
INTEGERS: dict[str, DType] = {d.name: d for d in (int32, int64)}
_SHORT = {"fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp32": "float32"}


def as_dtype(value: Any) -> DType:
    """Read an element type from a `DType`, a name (``"bf16"``, ``"float16"``) or a torch dtype.

    Raises:
        DTypeError: for anything that is not fp16, bf16, fp32, int32 or int64.
    """
    if isinstance(value, DType):
        return value
    name = str(value).removeprefix("torch.")
    name = _SHORT.get(name, name)
    if name in ALL or name in INTEGERS:
        return {**ALL, **INTEGERS}[name]
    raise DTypeError(
        f"dtype {shown(value)}: not supported; use one of {', '.join(ALL)}, or "
        f"{' or '.join(INTEGERS)} for lengths, tables, indices and labels"
    )
