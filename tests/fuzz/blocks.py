"""Block programs run as their kernels would be: in float32, with every tensor in its element type.

`cutesuper.verify.numeric.execute` computes everything in one element type. Here what is stored
between kernels is rounded, and so are operands of products that tensor cores take in 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cutesuper.ir.block import MuGraph
from cutesuper.ir.border import inside_mugraph
from cutesuper.ir.graph import KernelGraph
from cutesuper.ir.serial import dumps, loads
from cutesuper.ir.unseen import guarded_mugraph
from cutesuper.verify.extents import real_sizes
from cutesuper.verify.integers import Integers
from cutesuper.verify.narrowing import product_type
from cutesuper.verify.numeric import TorchDomain, TorchValue, put_together
from cutesuper.verify.tiles import CHUNK_ELEMENTS, BlockRun
from tests.fuzz.programs import ROWS


class KernelDomain(TorchDomain):
    """PyTorch in float32, whose products take operands of a type, maybe of 16 bits."""

    def __init__(self, operand: torch.dtype) -> None:
        super().__init__(torch.float32)
        self.operand = operand

    def matmul(self, x: TorchValue, y: TorchValue, over: Iterable[str]) -> TorchValue:
        """Contraction by name."""
        return super().matmul(self._operand(x), self._operand(y), over)

    def _operand(self, x: TorchValue) -> TorchValue:
        return replace(x, data=x.data.to(self.operand).float())


def execute_rounded(mu: MuGraph, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The outputs of a muGraph, in their element types, with the guards that its kernels have."""
    whole, (mu, border) = mu, inside_mugraph(guarded_mugraph(mu))
    given = [inputs[p.tensor][p.box] if p.starts else inputs[p.tensor] for p in border.inputs]
    tensors: dict[str, Any] = {name: _given(x) for name, x in zip(mu.inputs, given, strict=True)}
    for step, program in zip(mu.steps, real_sizes(mu).programs, strict=True):
        domain = KernelDomain(product_type(step, mu).torch)
        made = BlockRun(domain, program, tensors, set(), CHUNK_ELEMENTS).run()
        tensors |= {name: _stored(x, mu.tensors[name].dtype.torch) for name, x in made.items()}
    found = [tensors[n].data.to(mu.tensors[n].dtype.torch) for n in mu.outputs]
    return put_together(whole, [x.contiguous() for x in found], border.outputs)


def at_rows(thing: Any, rows: int) -> Any:
    """The same kernel graph or muGraph, run with another symbolic extent."""
    if isinstance(thing, KernelGraph):
        return thing.with_hints({ROWS: rows})
    hints = {d.hint for d in thing.symbols().values()}
    text = dumps(thing)
    for hint in hints:
        text = text.replace(f'"hint": {hint},', f'"hint": {rows},')
    return loads(text)


def _given(x: Tensor) -> TorchValue | Integers:
    if not x.is_floating_point():
        return Integers((), x.numpy().astype("int64"))
    return TorchValue(tuple(map(str, range(x.dim()))), x.float())


def _stored(x: TorchValue, dtype: torch.dtype) -> TorchValue:
    return replace(x, data=x.data.to(dtype).float())
