"""Everything that can be wrong with one operation of a muGraph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from cutesuper.ir.block import ENDING, LOAD, STORE, BlockOp, MuGraph
from cutesuper.ir.operators.base import lookup


def change(mu: MuGraph, step: int, i: int, **fields: Any) -> MuGraph:
    """The muGraph with one operation replaced; labels are worked out anew."""
    program = mu.steps[step].program
    ops = list(program.ops)
    ops[i] = replace(ops[i], **fields)
    for k, op in enumerate(ops):
        if op.kind == LOAD:
            dims = {d for d in op.attributes["map"] if d}
        else:
            dims = {d for j in op.inputs for d in ops[j].dims} - {op.attributes.get("over")}
        ops[k] = replace(op, dims=tuple(d for d in program.dims if d in dims))
    steps = list(mu.steps)
    steps[step] = replace(steps[step], program=replace(program, ops=tuple(ops)))
    return replace(mu, steps=tuple(steps))


def mutations(mu: MuGraph, s: int, i: int, op: BlockOp) -> Iterator[tuple[str, MuGraph]]:
    """What can go wrong with one operation."""
    ops = mu.steps[s].program.ops
    for k, j in enumerate(op.inputs):
        for other in range(i):
            if other != j and ops[other].dims == ops[j].dims and ops[other].kind != STORE:
                inputs = (*op.inputs[:k], other, *op.inputs[k + 1 :])
                yield f"operand {k} is {other}", change(mu, s, i, inputs=inputs)
    if op.kind in ("sub", "div"):
        yield "operands swapped", change(mu, s, i, inputs=op.inputs[::-1])
    kinds = {
        "add": ("sub", "mul"), "sub": ("add", "mul"), "mul": ("add", "div"), "div": ("mul",),
        "sum": ("mean", "max"), "mean": ("sum", "max"), "max": ("sum", "mean"),
        "square": ("relu", "exp"), "sqrt": ("rsqrt", "square"), "silu": ("relu", "sigmoid"),
        "exp": ("square", "silu"),
    }  # fmt: skip
    for kind in kinds.get(op.kind, ()):
        yield f"{kind} for {op.kind}", change(mu, s, i, kind=kind)
    if op.kind in ENDING:
        other = "max" if op.attributes["op"] == "sum" else "sum"
        yield f"{other} in {op.kind}", change(mu, s, i, attributes={**op.attributes, "op": other})
    if op.rescaled:
        yield "not rescaled", change(mu, s, i, inputs=op.inputs[:1])
    if op.kind == "constant":
        for value in (0.0, op.attributes["value"] * 3, -op.attributes["value"]):
            yield f"constant {value}", change(mu, s, i, attributes={"value": value})
    droppable = op.kind in ENDING or (
        op.kind not in (LOAD, STORE) and lookup(op.kind).elementwise and op.inputs
    )
    if droppable:  # whoever uses it gets its first operand
        result = mu
        for k in range(i + 1, len(ops)):
            if i in ops[k].inputs:
                inputs = tuple(op.inputs[0] if j == i else j for j in ops[k].inputs)
                result = change(result, s, k, inputs=inputs)
        yield f"{op.kind} dropped", result
    if op.kind in (LOAD, STORE) and len(op.attributes["map"]) == 2:
        turned = {**op.attributes, "map": op.attributes["map"][::-1]}
        yield "map transposed", change(mu, s, i, attributes=turned)
    if op.kind == LOAD:
        for name, spec in mu.tensors.items():
            here = mu.tensors[op.attributes["tensor"]]
            if name != here.name and spec.shape == here.shape:
                attributes = {**op.attributes, "tensor": name}
                yield f"loads {name}", change(mu, s, i, attributes=attributes)
