"""Heads of models: a loss of each row whose widest value, as the logits, is never stored whole.

A `Head` says what is computed of some rows; `HeadOperator` makes an operator of PyTorch of it,
which runs searched programs on chunks of rows and adds up the gradients of weights.
"""

from __future__ import annotations

from cutesuper.torch.ops.heads.definition import Head, Part
from cutesuper.torch.ops.heads.operator import HeadOperator

__all__ = ["Head", "HeadOperator", "Part"]
