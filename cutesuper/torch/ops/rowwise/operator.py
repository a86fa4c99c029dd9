"""Operators on rows for PyTorch: `RowOperator` makes one from a `Definition`.

A call in eager mode looks up its plan in a dictionary, and runs it; only autograd's bookkeeping
comes between. Everything else (compilers, fake tensors, tensor subclasses, transforms) uses the
operators of `cutesuper.torch.ops.rowwise.library`, which do the same through PyTorch's dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch.autograd import forward_ad

from cutesuper.ir.operators.base import TABLE
from cutesuper.runtime.checks import oddity
from cutesuper.runtime.programs import Kept
from cutesuper.torch.ops.rowwise.calls import KEPT_PLANS, Plan, all_usable, gradients_of, plan_of
from cutesuper.torch.ops.rowwise.definition import Definition, Maybe, Option, kind_of
from cutesuper.torch.ops.rowwise.library import Library, refuse_transforms

#: tensors without a behaviour of their own
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_DEVICES = ("cpu", "cuda")

_is_compiling = torch.compiler.is_compiling
_is_grad_enabled = torch.is_grad_enabled
_is_tracing = torch._C._is_tracing
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_transforms = torch._C._are_functorch_transforms_active

#: the facts of a tensor that determine the plan of a call
_facts = attrgetter("__class__", "shape", "dtype", "device", "layout", "requires_grad")


def is_plain() -> bool:
    """True if PyTorch only runs calls, and differentiates them in reverse mode."""
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
        definition: of the operator.
        library: its registered operators.
    """

    def __init__(self, definition: Definition) -> None:
        self.definition = definition
        self.library = Library(definition)
        self._plans: Kept[Any, Plan] = Kept(KEPT_PLANS)
        self._run = _differentiable(definition, self.library)

    def __call__(self, tensors: tuple[Maybe, ...], options: tuple[Option, ...]) -> Any:
        """Run the operator.

        Args:
            tensors: operands.
            options: the other arguments.

        Returns:
            The result, or a tuple if there are several.

        Raises:
            ShapeError, DTypeError, DeviceError, OperatorError: an argument that does not fit.
            SearchError, LoweringError, ScheduleError, CompileError: no kernels for these arguments.
        """
        if not is_plain():
            return self._through_library(tensors, options)
        try:
            plan = self._plans[_key(tensors, options)]
        except (KeyError, AttributeError, TypeError, RuntimeError):  # unknown, or of a wrong type
            plan = self._plan(tensors, options)
            if plan is None:
                return self._through_library(tensors, options)
        if plan.needs is not None:
            return self._run(plan, *tensors)
        made = plan.step(all_usable(tensors))
        return made[0] if len(made) == 1 else tuple(made)

    def _plan(self, tensors: tuple[Maybe, ...], options: tuple[Option, ...]) -> Plan | None:
        """The plan of a call; None if a tensor has a behaviour of its own."""
        definition = self.definition
        options = definition.check(*options)
        if any(t is not None and (not isinstance(t, torch.Tensor) or oddity(t)) for t in tensors):
            kind_of(definition, tensors, options)  # refuses it
        if not all(t is None or _has_no_behaviour(t) for t in tensors):
            return None
        asked = tuple(t is not None and t.requires_grad for t in tensors)
        needs = asked if _is_grad_enabled() and any(asked) else None
        # keyed by the checked options: those that were given may change, like a tensor
        return self._plans.made(
            _key(tensors, options),
            lambda: plan_of(definition, tensors, options, needs is not None, needs),
        )

    def _through_library(self, tensors: tuple[Maybe, ...], options: tuple[Option, ...]) -> Any:
        if not _is_compiling():
            refuse_transforms(self.definition.name, tensors)
        options = self.definition.check(*options)
        made = self.library.forward(*tensors, *options)
        count = len(self.definition.outputs)
        return made[0] if count == 1 else tuple(made[:count])


def _key(tensors: tuple[Maybe, ...], options: tuple[Option, ...]) -> tuple[Any, ...]:
    facts = [t if t is None else _facts(t) for t in tensors]
    return options, TABLE.changes, _is_grad_enabled(), *facts


def _has_no_behaviour(t: torch.Tensor) -> bool:
    return type(t) in _PLAIN and t.device.type in _DEVICES and t.layout is torch.strided


def _differentiable(definition: Definition, library: Library) -> Callable[..., Any]:
    """``run(plan, *tensors)``: a call that records gradients."""

    class Call(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            plan: Plan = args[0]
            given = all_usable(args[1:])
            made = plan.step(given)
            ctx.plan = plan
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(*plan.saved(given + made))
            return made[0] if plan.results == 1 else tuple(made[: plan.results])

        @staticmethod
        def backward(ctx: Any, *cotangents: Maybe) -> Any:
            plan: Plan = ctx.plan
            needs = plan.needs or ()
            if _is_grad_enabled() or not is_plain():
                text = plan.kind.to_text()
                made = iter(library.backward(ctx.saved_tensors, cotangents, text, needs))
                return (None, *(next(made) if n else None for n in needs))
            types = tuple(map(type, cotangents))
            gradients = plan.backwards.get(types)
            if gradients is None:
                given = [t is not None for t in cotangents]
                gradients = plan.backwards.made(
                    types,
                    lambda: gradients_of(
                        definition, plan.kind, plan.lead, plan.device, needs, given
                    ),
                )
            return (None, *gradients(ctx.saved_tensors, cotangents))

    # the function that `torch.autograd.Function.apply` calls if no transform of functorch is
    # active, which has been checked before
    base: Any = super(torch.autograd.Function, Call)
    return base.apply
