"""Rounding of computed operands of products to float16: a test that it is allowed.

A skeleton multiplies operands that it loads, or computes an operand and rounds it to the type of
its loads. The second is refused if float16 cannot hold the value (`ir.rounding.fits`), unless the
region itself multiplies that value: then every program that computes it rounds it.

before: ``rms_norm(x z) @ W`` as ``((x z) @ W) / rms(x z)``, refused; after: two kernels,
``t = rms_norm(x z)`` and ``t @ W``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from cutesuper.egraph.labelled import LabelledProgram, Region
from cutesuper.ir.arraymath import Array
from cutesuper.ir.block import ENDING, LOAD, STORE, BlockProgram
from cutesuper.ir.dtypes import float16, float32
from cutesuper.ir.operators.base import facets, lookup
from cutesuper.ir.rounding import (
    Trials,
    computed,
    fits,
    product,
    proportional,
    reduced,
    small,
)


class _Step(NamedTuple):
    """An operation of a labelled program or of a block program, on all its tiles at once."""

    kind: str
    inputs: tuple[int, ...]
    labels: frozenset[str]
    attributes: Mapping[str, Any]
    over: str | None
    tensor: int | None

    @property
    def contracts(self) -> bool:
        """True for products."""
        return facets(self.kind).contracts


class Rounding:
    """Values that the kernels of a region may round.

    Args:
        region: shapes and types of the inputs.
        program: the region, labelled, as it is written.
    """

    def __init__(self, region: Region, program: LabelledProgram) -> None:
        self.region, self.program = region, program
        self._axes = {d: 1 + n for n, d in enumerate(program.dims)}
        self._trials = Trials()

    def refuses(self, program: BlockProgram) -> str | None:
        """Reason why a kernel must not compute an operand of a product, or None.

        Args:
            program: a block program of this region, whose tensors are ``in0``, ``in1`` and so on.
        """
        steps = [
            _Step(op.kind, op.inputs, frozenset(op.dims), op.attributes, op.attributes.get("over"),
                  int(op.attributes["tensor"][2:]) if op.kind == LOAD else None)
            for op in program.ops
        ]  # fmt: skip
        wanted = self._rounded(steps)
        values = self._values(steps, wanted)
        for i in wanted:
            x = values[i]
            if not fits(x) and not any(proportional(x, y) for y in self._multiplied):
                return f"{steps[i].kind} would be rounded to float16 before a product"
        return None

    @cached_property
    def _multiplied(self) -> list[Array]:
        """The operands of products in the region."""
        steps = [
            _Step(op.kind, op.inputs, op.labels, op.attributes, op.over,
                  op.attributes["tensor"] if op.kind == LOAD else None)
            for op in self.program.ops
        ]  # fmt: skip
        wanted = {i for s in steps if s.contracts for i in s.inputs}
        values = self._values(steps, wanted)
        return [values[i] for i in sorted(wanted)]

    def _rounded(self, steps: Sequence[_Step]) -> list[int]:
        """Operands of products that are computed, if products take float16."""
        if float16 not in self.region.input_dtypes:
            return []
        operands = (i for s in steps if s.contracts for i in s.inputs)
        return [i for i in dict.fromkeys(operands) if steps[i].tensor is None]

    # ------------------------------------------------------------------------------------- values

    def _values(self, steps: Sequence[_Step], wanted: Sequence[int] | set[int]) -> dict[int, Array]:
        """The values of some operations, and of all operations that they need."""
        needed = set(wanted)
        for i in reversed(range(len(steps))):
            if i in needed:
                needed.update(steps[i].inputs)
        values: dict[int, Array] = {}
        for i in sorted(needed):
            values[i] = self._value(steps[i], [values[j] for j in steps[i].inputs])
        return values

    def _value(self, step: _Step, args: list[Array]) -> Array:
        if step.tensor is not None:
            return self._loaded(step)
        if step.kind in (STORE, *ENDING):
            return args[0]
        if step.over is None:
            return computed(step.kind, args, dict(step.attributes))
        operator = lookup(step.kind)
        if operator.contracts:
            args = [product(np.multiply, *args)]
        return reduced(operator, args[0], self._axes[step.over])

    def _loaded(self, step: _Step) -> Array:
        assert step.tensor is not None
        dtype = self.region.input_dtypes[step.tensor]
        shape = [small(n) if d in step.labels else 1 for d, n in self.program.dims.items()]
        rank = len(self.region.inputs[step.tensor])
        return self._trials.draw(step.tensor, shape, float32 if dtype.integer else dtype, rank)
