"""Numbers of a matmul-loop plan, computed on the CPU, rounding where its kernel rounds.

Row operands are rounded to the element type after the prologue, everything else is fp32; sums are
PyTorch's, so errors of the order of summation are those of a kernel only in size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from cutesuper.device.fragments import PIECE
from cutesuper.ir.dtypes import as_dtype
from cutesuper.ir.thread import ThreadExpression
from cutesuper.skeletons.base import View
from cutesuper.skeletons.matmul.kernel.shift import sample_places
from cutesuper.skeletons.matmul.plan import MatmulPlan


class TorchMath:
    """The namespace of `Operator.scalar` over fp32 tensors."""

    exp, sqrt, rsqrt = torch.exp, torch.sqrt, torch.rsqrt
    tanh, erf, sigmoid = torch.tanh, torch.erf, torch.sigmoid
    maximum, minimum, div = torch.maximum, torch.minimum, torch.div


class PlanNumbers:
    """One run of a plan without batch labels and without products after the loop; tensors by the
    names of its arguments."""

    def __init__(self, plan: MatmulPlan, tensors: Mapping[str, torch.Tensor]) -> None:
        self.plan, self.tensors = plan, tensors
        self.values: dict[int, torch.Tensor] = {
            i: self.view(v, (plan.row, plan.contracted))
            for i, v in (plan.rows | plan.vectors).items()
        }
        self.plain = dict(self.values)
        if plan.shift is not None:
            moved = self.evaluate(plan.shift.source, self.plain)
            self.values[plan.shift.value] = moved - self.sample(moved)

    def view(self, view: View, labels: tuple[str, str]) -> torch.Tensor:
        """A tensor with two labels, fp32; one that it lacks has an extent of 1."""
        t = self.tensors[self.plan.arguments[view.argument].name].float()
        shape = [n for n in t.shape if n != 1] or [1]
        present = [d for d in labels if d in view.labels]
        t = t.reshape(t.shape if len(present) == t.ndim else shape)
        t = t.permute([view.labels.index(d) for d in present])
        return t[tuple(slice(None) if d in view.labels else None for d in labels)]

    @staticmethod
    def sample(x: torch.Tensor) -> torch.Tensor:
        """The mean of the sampled pieces of each row."""
        pieces = [x[:, p : p + PIECE] for p in sample_places(x.shape[1])]
        return torch.cat(pieces, 1).mean(1, keepdim=True)

    @staticmethod
    def evaluate(e: ThreadExpression, values: Mapping[int, torch.Tensor]) -> torch.Tensor:
        result: Any = e.evaluate([values[i] for i in e.leaves], TorchMath)
        return result

    def run(self) -> dict[str, torch.Tensor]:
        """The outputs by name."""
        plan, found = self.plan, dict[int, torch.Tensor]()
        dtype = as_dtype(plan.dtype).torch
        columns = {i: self.view(v, (plan.contracted, plan.column)) for i, v in plan.columns.items()}
        seen = self.values if plan.shift is None or plan.shift.products else self.plain
        rows = seen[next(iter(plan.rows))]
        if plan.prologue is not None:
            rows = self.evaluate(plan.prologue, seen)
        rows = rows.to(dtype).float()
        for load, final in plan.products:
            found[final] = rows @ columns[load]
        for p in plan.vector_products:
            e, w = plan.vector_rows[p.vector], columns[p.column]
            vector = torch.ones(1, w.shape[0]) if e is None else self.evaluate(e, self.plain)
            found[p.value] = vector.to(dtype).float() @ w
        reduced = {}
        for s in plan.statistics:
            v = self.evaluate(s.source, self.values)
            total = v.sum(1, keepdim=True) if s.op == "sum" else v.amax(1, keepdim=True)
            reduced[s.value] = total * s.scale
        found |= {i: self.evaluate(e, reduced) for i, e in plan.row_values.items()}
        found |= {i: self.view(v, (plan.row, plan.column)) for i, v in plan.loads.items()}
        for r in plan.reductions:
            v = self.evaluate(r.source, found)
            total = v.sum(1, keepdim=True) if r.op == "sum" else v.amax(1, keepdim=True)
            found[r.value] = total * r.scale
        outputs = {}
        for o in plan.outputs:
            a = plan.arguments[o.view.argument]
            outputs[a.name] = self.evaluate(o.expression, found).to(as_dtype(a.dtype).torch)
        return outputs
