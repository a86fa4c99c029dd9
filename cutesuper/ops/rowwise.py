"""Operators on rows for PyTorch: `RowOperator` makes one of a `Definition`.

A call in eager mode looks up what it does in a dictionary, and runs it; only what autograd needs
stands between. Everything else (compilers, fake tensors, tensor subclasses, transforms) meets the
operators of `cutesuper.ops.library`, which do the same through PyTorch's dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from cutesuper.ops.definition import Definition, Maybe, Option, kind_of
from cutesuper.ops.library import Library, kept, refuse_transforms
from cutesuper.ops.steps import Plan, gradients_of, plan_of, usable

#: tensors without a behaviour of their own
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_DEVICES = ("cpu", "cuda")

_is_compiling = torch.compiler.is_compiling
_is_grad_enabled = torch.is_grad_enabled
_is_tracing = torch.jit.is_tracing
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_transforms = torch._C._are_functorch_transforms_active


def is_plain() -> bool:
    """Whether PyTorch does nothing with calls but run them, and differentiate backwards."""
    return not (
        _is_compiling()
        or _dispatch_modes()
        or _function_modes()
        or _transforms()
        or _is_tracing()
        or forward_ad._current_level >= 0
    )


class RowOperator:
    """An operator on rows, to be called with the operands and options of its definition.

    Attributes:
        definition: what it computes.
        library: its registered operators.
    """

    def __init__(self, definition: Definition) -> None:
        self.definition = definition
        self.library = Library(definition)
        self._plans: dict[Any, Plan] = {}
        self._run = _differentiable(definition, self.library)

    def __call__(self, tensors: tuple[Maybe, ...], options: tuple[Option, ...]) -> Any:
        """Run it.

        Args:
            tensors: operands.
            options: the other arguments.

        Returns:
            The result, or a tuple where there are several.

        Raises:
            ShapeError, DTypeError, DeviceError, OperatorError: an argument that does not fit.
            SearchError, LoweringError, ScheduleError, CompileError: no kernels for these arguments.
        """
        if not is_plain():
            return self._through_library(tensors, options)
        try:
            grad = _is_grad_enabled() and True in [
                t is not None and t.requires_grad for t in tensors
            ]
            key = (
                options,
                grad,
                *[t if t is None else (type(t), t.shape, t.dtype, t.device) for t in tensors],
            )
        except AttributeError:  # no tensor: have it refused
            kind_of(self.definition, tensors, options)
            raise
        plan = self._plans.get(key)
        if plan is None:
            if not all(_has_no_behaviour(t) for t in tensors):
                return self._through_library(tensors, options)
            plan = kept(
                self._plans, key, lambda: plan_of(self.definition, tensors, options, saving=grad)
            )
        if grad:
            return self._run(plan, *tensors)
        made = plan.step([usable(t) for t in tensors if t is not None])
        return made[0] if len(made) == 1 else tuple(made)

    def _through_library(self, tensors: tuple[Maybe, ...], options: tuple[Option, ...]) -> Any:
        if not _is_compiling():
            refuse_transforms(self.definition.name, tensors)
        made = self.library.forward(*tensors, *options)
        count = len(self.definition.outputs)
        return made[0] if count == 1 else tuple(made[:count])


def _has_no_behaviour(t: Any) -> bool:
    if t is None or not isinstance(t, torch.Tensor):
        return True  # what is no tensor is refused by the checks
    return type(t) in _PLAIN and t.device.type in _DEVICES and t.layout is torch.strided


def _differentiable(definition: Definition, library: Library) -> Callable[..., Any]:
    """``run(plan, *tensors)``: a call of which gradients are asked for."""

    class Call(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            plan: Plan = args[0]
            given = [usable(t) for t in args[1:] if t is not None]
            made = plan.step(given.copy())
            ctx.plan = plan
            ctx.set_materialize_grads(False)
            values = given + made
            ctx.save_for_backward(*[values[n] for n in plan.saved])
            return made[0] if plan.results == 1 else tuple(made[: plan.results])

        @staticmethod
        def backward(ctx: Any, *cotangents: Maybe) -> Any:
            plan: Plan = ctx.plan
            if _is_grad_enabled() or not is_plain():
                text, needs = plan.kind.to_text(), ctx.needs_input_grad[1:]
                made = iter(library.backward(ctx.saved_tensors, cotangents, text, needs))
                return (None, *(next(made) if n else None for n in needs))
            key = (ctx.needs_input_grad, *[t is None for t in cotangents])
            gradients = plan.backwards.get(key)
            if gradients is None:
                given = [t is not None for t in cotangents]
                gradients = plan.backwards[key] = gradients_of(
                    definition, plan.kind, plan.lead, plan.device, ctx.needs_input_grad[1:], given
                )
            return (None, *gradients(ctx.saved_tensors, cotangents))

    # what `torch.autograd.Function.apply` calls where no transform of functorch is active, which
    # has been found out before
    base: Any = super(torch.autograd.Function, Call)
    return base.apply


__all__ = ["RowOperator"]
