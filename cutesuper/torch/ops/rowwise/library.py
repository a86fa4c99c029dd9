"""Operators on rows as operators of ``torch.library``: for compilers, fake tensors and transforms.

A definition called ``f`` has two::

    cutesuper::f(Tensor x, Tensor? weight, float eps) -> Tensor[]      results, and saved values
    cutesuper::f_backward(Tensor[] saved, Tensor?[] cotangents, str kind, bool[] needs) -> Tensor[]

The second returns the gradients that are needed, in order. ``kind`` is `Kind.to_text` of the call:
a gradient depends on operands that need not be saved, like a bias.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from cutesuper.errors import GraphError, OperatorError
from cutesuper.ir.evaluate import run_reference
from cutesuper.ir.operators.base import TABLE
from cutesuper.runtime.checks import refuse_tangents
from cutesuper.runtime.programs import Kept
from cutesuper.torch.ops.classes import class_of
from cutesuper.torch.ops.rowwise.calls import (
    KEPT_PLANS,
    Extents,
    Gradients,
    Plan,
    all_usable,
    gradients_of,
    known,
    operand_shape,
    output_shapes,
    plan_of,
    result_shape,
)
from cutesuper.torch.ops.rowwise.definition import (
    Definition,
    Kind,
    Maybe,
    Option,
    first_of,
    kind_of,
)
from cutesuper.torch.ops.rowwise.graphs import Programs, programs_of

_fragment = torch.library.Library("cutesuper", "FRAGMENT")

#: formulas of registered operators in operators of PyTorch; one with labels has none
FORMULAS: dict[Any, Callable[..., list[torch.Tensor]]] = {}


class Library:
    """The registered operators of a definition.

    Attributes:
        forward, backward: callables.
    """

    def __init__(self, definition: Definition) -> None:
        self._definition = definition
        self._plans: Kept[Any, Plan] = Kept(KEPT_PLANS)
        self._backwards: Kept[Any, Gradients] = Kept(KEPT_PLANS)
        name, tags = definition.name, (torch.Tag.pt2_compliant_tag,)
        _fragment.define(f"{name}({definition.schema}) -> Tensor[]", tags=tags)
        _fragment.define(
            f"{name}_backward(Tensor[] saved, Tensor?[] cotangents, str kind, bool[] needs) "
            "-> Tensor[]",
            tags=tags,
        )
        for device in ("CPU", "CUDA"):
            _fragment.impl(name, self._forward, device)
            _fragment.impl(f"{name}_backward", self._backward, device)
        both = (f"cutesuper::{name}", f"cutesuper::{name}_backward")
        torch.library.register_fake(both[0], self._fake, lib=_fragment)
        torch.library.register_fake(both[1], self._fake_backward, lib=_fragment)
        torch.library.register_autograd(
            both[0], self._differentiate, setup_context=self._keep, lib=_fragment
        )
        torch.library.register_autograd(
            both[1], self._differentiate_twice, setup_context=_keep_nothing, lib=_fragment
        )
        for op in both:
            torch.library.register_vmap(op, self._vmap, lib=_fragment)
        self.forward = getattr(torch.ops.cutesuper, name).default
        self.backward = getattr(torch.ops.cutesuper, f"{name}_backward").default
        if not any(o.labels for o in definition.operands):
            FORMULAS[self.forward] = self._formula

    def _split(self, args: Sequence[Any]) -> tuple[Sequence[Maybe], tuple[Option, ...]]:
        count = len(self._definition.operands)
        return args[:count], tuple(args[count:])

    # ----------------------------------------------------------------------------------- forward

    def _forward(self, *args: Any) -> list[torch.Tensor]:
        tensors, options = self._split(args)
        key = (TABLE.changes, options, *map(_facts, tensors))
        plan = self._plans.made(
            key, lambda: plan_of(self._definition, tensors, options, saving=True)
        )
        return plan.step(all_usable(tensors))

    def _fake(self, *args: Any) -> list[torch.Tensor]:
        programs, x, lead = self._programs(*self._split(args))
        graph = programs.saving
        shapes = output_shapes(self._definition, programs.kind, lead, graph)
        types = [graph.nodes[i].dtype.torch for i in graph.outputs]
        return [x.new_empty(s, dtype=d) for s, d in zip(shapes, types, strict=True)]

    def _formula(self, *args: Any) -> list[torch.Tensor]:
        """The results in operators of PyTorch, computed in float32 like the kernels do."""
        tensors, options = self._split(args)
        programs, _, lead = self._programs(tensors, options)
        graph, rows = programs.saving, prod(lead)
        shapes = [known(graph.nodes[i].shape, rows) for i in graph.inputs]
        given = (t for t in tensors if t is not None)
        made = run_reference(graph, [t.reshape(s) for t, s in zip(given, shapes, strict=True)])
        wanted = output_shapes(self._definition, programs.kind, lead, graph)
        return [t.reshape(s) for t, s in zip(made, wanted, strict=True)]

    def _programs(
        self, tensors: Sequence[Maybe], options: tuple[Option, ...]
    ) -> tuple[Programs, torch.Tensor, Extents]:
        """Graphs of a call for any number of rows, its first operand, and extents before a row."""
        kind = kind_of(self._definition, tensors, options)
        x = first_of(tensors)
        return self._any(kind), x, tuple(x.shape[: x.dim() - len(kind.inner)])

    def _any(self, kind: Kind) -> Programs:
        return programs_of(self._definition, kind, class_of("rows", 1))

    def _keep(self, ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
        tensors, options = self._split(inputs)
        programs, _, ctx.lead = self._programs(tensors, options)
        ctx.kind = programs.kind
        ctx.set_materialize_grads(False)
        sides = {"operand": tensors, "output": output}
        ctx.save_for_backward(*(sides[s.side][s.place] for s in programs.sources))

    def _differentiate(self, ctx: Any, cotangents: Sequence[Maybe]) -> tuple[Any, ...]:
        programs, results = self._any(ctx.kind), len(self._definition.outputs)
        needs = list(ctx.needs_input_grad[: len(self._definition.operands)])
        given = list(cotangents[:results])
        found: list[Maybe] = [None] * len(ctx.needs_input_grad)
        if any(t is not None for t in given):
            made = iter(self.backward(list(ctx.saved_tensors), given, ctx.kind.to_text(), needs))
            for n, wanted in enumerate(needs):
                found[n] = next(made) if wanted and programs.differentiable[n] else None
        return tuple(found)

    # ---------------------------------------------------------------------------------- backward

    def _backward(
        self, saved: list[torch.Tensor], cotangents: list[Maybe], text: str, needs: list[bool]
    ) -> list[torch.Tensor]:
        key = (TABLE.changes, text, *needs, *map(_facts, saved), *map(_facts, cotangents))
        step = self._backwards.made(key, lambda: self._step(saved, cotangents, text, needs))
        found = [t for t in step(saved, cotangents) if t is not None]
        own = {id(t) for t in (*saved, *cotangents)}
        # an operator must not return its operands, nor one tensor twice
        result: list[torch.Tensor] = []
        for t in found:
            result.append(t.clone() if id(t) in own else t)
            own.add(id(t))
        return result

    def _step(
        self, saved: list[torch.Tensor], cotangents: list[Maybe], text: str, needs: list[bool]
    ) -> Gradients:
        kind = Kind.of_text(text)
        given = [t is not None for t in cotangents]
        device = next(t.device for t in (*saved, *cotangents) if t is not None)
        return gradients_of(
            self._definition, kind, self._lead(kind, saved, cotangents), device, needs, given
        )

    def _fake_backward(
        self, saved: list[torch.Tensor], cotangents: list[Maybe], text: str, needs: list[bool]
    ) -> list[torch.Tensor]:
        kind = Kind.of_text(text)
        programs, lead = self._any(kind), self._lead(kind, saved, cotangents)
        like = next(t for t in (*saved, *cotangents) if t is not None)
        found: list[torch.Tensor] = []
        for n, (wanted, given) in enumerate(zip(needs, kind.inputs, strict=True)):
            if wanted and given is not None and programs.differentiable[n]:
                shape = operand_shape(programs, n, lead)
                found.append(like.new_empty(shape, dtype=getattr(torch, given.dtype)))
        return found

    def _lead(
        self, kind: Kind, saved: Sequence[torch.Tensor], cotangents: Sequence[Maybe]
    ) -> Extents:
        """Extents in front of a row, taken from the first tensor that has rows."""
        programs = self._any(kind)
        roles = [s.role(self._definition) for s in programs.sources]
        roles += [o.role for o in self._definition.outputs]
        for role, t in zip(roles, (*saved, *cotangents), strict=True):
            inner = len(result_shape(role, kind, ())) if role and role.has_rows else None
            if inner is not None and t is not None:
                return tuple(t.shape[: t.dim() - inner])
        raise OperatorError(
            f"{self._definition.name}_backward: none of the tensors has rows; give it what the "
            "forward operator saves"
        )

    def _differentiate_twice(self, ctx: Any, cotangents: Any) -> Any:
        del ctx, cotangents
        raise GraphError(double_backward(self._definition.name))

    def _vmap(self, *args: Any) -> Any:
        del args
        raise OperatorError(
            f"{self._definition.name}: it cannot be called under vmap (or with batched gradients); "
            "give it a tensor with one more leading dimension"
        )


def _facts(t: Maybe) -> Any:
    return t if t is None else (t.shape, t.dtype, t.device)


def _keep_nothing(ctx: Any, inputs: Any, output: Any) -> None:
    del ctx, inputs, output


def double_backward(name: str) -> str:
    """The message for a second derivative."""
    return (
        f"{name}: its gradient cannot be differentiated again; leave out create_graph=True, or "
        "compute this part with operators of torch"
    )


def refuse_transforms(name: str, tensors: Sequence[Any]) -> None:
    """Raise OperatorError for transforms other than reverse-mode gradients."""
    if torch._C._are_functorch_transforms_active():
        raise OperatorError(
            f"{name}: it cannot be called under vmap and other transforms of torch.func; give it "
            "a tensor with one more leading dimension, and use torch.autograd for gradients"
        )
    refuse_tangents(name, (t for t in tensors if isinstance(t, torch.Tensor)))
