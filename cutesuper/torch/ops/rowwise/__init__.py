"""Operators on rows: normalizations, softmax, losses, activations, and how a new one is defined.

A `Definition` says what an operator computes; `RowOperator` makes it an operator of PyTorch with
searched kernels, forward and backward.
"""

from __future__ import annotations

from cutesuper.torch.ops.rowwise.definition import Built, Definition, Operand, Output, Role
from cutesuper.torch.ops.rowwise.operator import RowOperator

__all__ = ["Built", "Definition", "Operand", "Output", "Role", "RowOperator"]
