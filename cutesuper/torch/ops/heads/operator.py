"""Heads as operators of ``torch.library``, differentiable and seen by compilers.

A head called ``f`` has three::

    cutesuper::f(parts, options) -> Tensor                                    losses [M]
    cutesuper::f_total(parts, options, Tensor factors, bool[] needs) -> Tensor[]
    cutesuper::f_backward(parts, options, Tensor factors, bool[] needs) -> Tensor[]

The second returns the sum of losses times factors and, in the same pass, its gradients for the
parts that need one: its own gradient is a factor of these. The third returns gradients alone; it is
the derivative of the first, whose factors are not known before, and computes everything again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cutesuper.errors import GraphError
from cutesuper.ir.dims import Symbol
from cutesuper.ir.dtypes import as_dtype
from cutesuper.ir.graph import KernelGraph
from cutesuper.runtime.programs import KERNEL_DEVICES
from cutesuper.runtime.tensors import usable
from cutesuper.torch.ops.heads.chunks import Call
from cutesuper.torch.ops.heads.definition import Head, kind_of
from cutesuper.torch.ops.lists import ROWS, row_length
from cutesuper.torch.ops.programs import program_of
from cutesuper.torch.ops.rowwise.definition import Maybe, Option
from cutesuper.torch.ops.rowwise.library import refuse_transforms

_SCHEMA = {float: "float", int: "int", bool: "bool", str: "str"}
_fragment = torch.library.Library("cutesuper", "FRAGMENT")


class HeadOperator:
    """The operators of a head.

    Attributes:
        head: what they compute.
    """

    def __init__(self, head: Head) -> None:
        self.head = head
        parts = ", ".join(f"Tensor{'?' * p.optional} {p.name}" for p in head.parts)
        own = ", ".join((parts, *(f"{_SCHEMA[kind]} {name}" for name, kind in head.options)))
        passes = f"{own}, Tensor factors, bool[] needs"
        self._define(head.name, own, "Tensor", self._losses, self._fake_losses)
        self._define(f"{head.name}_total", passes, "Tensor[]", self._total, self._fake_total)
        self._define(f"{head.name}_backward", passes, "Tensor[]", self._back, self._fake_back)
        for name, differentiate, keep in (
            ("", self._differentiate_losses, self._keep_parts),
            ("_total", self._differentiate_total, self._keep_gradients),
            ("_backward", self._differentiate_twice, _keep_nothing),
        ):
            torch.library.register_autograd(
                f"cutesuper::{head.name}{name}", differentiate, setup_context=keep, lib=_fragment
            )

    def _define(self, name: str, arguments: str, result: str, run: Any, fake: Any) -> None:
        tags = (torch.Tag.pt2_compliant_tag,)
        _fragment.define(f"{name}({arguments}) -> {result}", tags=tags)
        for device in ("CPU", "CUDA"):
            _fragment.impl(name, run, device)
        torch.library.register_fake(f"cutesuper::{name}", fake, lib=_fragment)

    def losses(self, tensors: Sequence[Maybe], options: Sequence[Option]) -> torch.Tensor:
        """The losses of all rows, ``[M]``, float32; their gradients compute them again.

        Raises:
            ShapeError, DTypeError, DeviceError, LayoutError: naming the argument.
            OperatorError: under a transform of ``torch.func``.
            SearchError, LoweringError, ScheduleError, CompileError: no kernels for these arguments.
        """
        self._refuse(tensors)
        found: torch.Tensor = self._operator("")(*tensors, *options)
        return found

    def total(
        self, tensors: Sequence[Maybe], options: Sequence[Option], factors: torch.Tensor
    ) -> torch.Tensor:
        """The sum of losses times factors, ``[]``, float32, with its gradients in the same pass.

        Args:
            tensors: parts.
            options: the other arguments.
            factors: float32 ``[M]``; their gradient is not computed.

        Raises:
            As for `losses`.
        """
        self._refuse(tensors)
        recording = torch.is_grad_enabled()
        needs = [recording and t is not None and t.requires_grad for t in tensors]
        found: list[torch.Tensor] = self._operator("_total")(*tensors, *options, factors, needs)
        return found[0]

    def _refuse(self, tensors: Sequence[Maybe]) -> None:
        if not torch.compiler.is_compiling():
            refuse_transforms(self.head.name, tensors)

    def _operator(self, name: str) -> Any:
        return getattr(torch.ops.cutesuper, f"{self.head.name}{name}").default

    def _call(self, args: Sequence[Any]) -> Call:
        tensors, options = self._split(args)
        return Call(self.head, tensors, options)

    def _split(self, args: Sequence[Any]) -> tuple[Sequence[Maybe], tuple[Option, ...]]:
        count = len(self.head.parts)
        return args[:count], tuple(args[count : count + len(self.head.options)])

    # ------------------------------------------------------------------------------------ passes

    def _losses(self, *args: Any) -> torch.Tensor:
        return self._call(args).losses()

    def _total(self, *args: Any) -> list[torch.Tensor]:
        *given, factors, needs = args
        call = self._call(given)
        if any(needs):
            losses, gradients = call.gradients(factors, needs)
        else:
            losses, gradients = call.losses(), []
        return [torch.dot(losses, factors), *gradients]

    def _back(self, *args: Any) -> list[torch.Tensor]:
        *given, factors, needs = args
        return self._call(given).gradients(factors, needs)[1]

    def _fake_losses(self, *args: Any) -> torch.Tensor:
        first, rank = args[0], self.head.parts[0].rank
        kind_of(self.head, *self._split(args))
        rows = first.shape[: first.dim() - rank].numel()
        return first.new_empty((rows,), dtype=torch.float32)

    def _fake_total(self, *args: Any) -> list[torch.Tensor]:
        return [args[0].new_empty((), dtype=torch.float32), *self._fake_back(*args)]

    def _fake_back(self, *args: Any) -> list[torch.Tensor]:
        kind_of(self.head, *self._split(args))
        given = zip(args, args[-1], strict=False)
        return [t.new_empty(t.shape) for t, needed in given if needed]

    # ---------------------------------------------------------------------------------- autograd

    def _keep_parts(self, ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        tensors, ctx.options = self._split(inputs)
        ctx.save_for_backward(*tensors)

    def _differentiate_losses(self, ctx: Any, cotangent: torch.Tensor) -> tuple[Any, ...]:
        needs = list(ctx.needs_input_grad[: len(self.head.parts)])
        made = iter(
            self._operator("_backward")(
                *ctx.saved_tensors, *ctx.options, cotangent.contiguous(), needs
            )
        )
        return (*(next(made) if n else None for n in needs), *(None for _ in ctx.options))

    def _keep_gradients(
        self, ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]
    ) -> None:
        ctx.needs = inputs[-1]
        ctx.count = len(inputs)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*output[1:])

    def _differentiate_total(self, ctx: Any, cotangents: Sequence[Maybe]) -> tuple[Maybe, ...]:
        found: list[Maybe] = [None] * ctx.count
        if cotangents[0] is not None:
            made = iter(ctx.saved_tensors)
            for n, needed in enumerate(ctx.needs):
                found[n] = scaled(next(made), cotangents[0]) if needed else None
        return tuple(found)

    def _differentiate_twice(self, ctx: Any, cotangents: Any) -> Any:
        del ctx, cotangents
        raise GraphError(
            f"{self.head.name}: its gradient cannot be differentiated again; leave out "
            "create_graph=True, or compute this part with operators of torch"
        )


def _keep_nothing(ctx: Any, inputs: Any, output: Any) -> None:
    del ctx, inputs, output


# ------------------------------------------------------------------------------------------ scaling

_fragment.define(
    "head_scaled(Tensor x, Tensor factor) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)


def _scale(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """One pass that multiplies in float32: PyTorch would round a number beside 16-bit tensors."""
    found, row = torch.empty_like(x), row_length(x.numel())
    if x.device.type not in KERNEL_DEVICES or x.numel() < row:
        return torch.mul(x, factor.reshape(1), out=found)
    kind = row, as_dtype(x.dtype).name
    program = program_of("head_scaled", kind, lambda: _scaling(*kind), x.device)
    given = [usable(x).view(-1, row), usable(factor).view(1, 1)]
    program.run(given, [found.view(-1, row)], x.numel() // row)
    return found


def _scaling(row: int, dtype: str) -> KernelGraph:
    g = KernelGraph()
    x, factor = g.new_input((Symbol("M", ROWS), row), dtype), g.new_input((1, 1), "float32")
    g.mark_output(g.mul(x, factor), dtype)
    return g


for _device in ("CPU", "CUDA"):
    _fragment.impl("head_scaled", _scale, _device)
torch.library.register_fake(
    "cutesuper::head_scaled", lambda x, factor: torch.empty_like(x), lib=_fragment
)


def _no_second(ctx: Any, cotangent: Any) -> Any:
    del ctx, cotangent
    raise GraphError(
        "the gradient of a head cannot be differentiated again; leave out create_graph=True, or "
        "compute this part with operators of torch"
    )


torch.library.register_autograd(
    "cutesuper::head_scaled", _no_second, setup_context=_keep_nothing, lib=_fragment
)


def scaled(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """``x * factor`` in the type of x, multiplied in float32; ``factor`` is one number."""
    found: torch.Tensor = torch.ops.cutesuper.head_scaled.default(x, factor)
    return found
