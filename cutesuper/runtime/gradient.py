"""Calls whose gradients are recorded: two kernels, and the tensors kept between them.

`Kernel.gradient` makes a `Gradient`; a call with inputs that require gradients runs it as one
operator of PyTorch's autograd. Until there is one, calls run the program as it is (`Deferred`), and
the first backward pass makes the `Gradient`: most calls that record gradients never need them, as
those of a model in ``eval()`` outside of ``torch.no_grad``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch._C._functorch as functorch

from cutesuper.autodiff.gradient import Split
from cutesuper.errors import GraphError, OperatorError
from cutesuper.ir.graph import KernelGraph
from cutesuper.runtime.checks import TRANSFORMED
from cutesuper.runtime.tensors import usable

if TYPE_CHECKING:
    from cutesuper.runtime.kernel import Kernel

Maybe = torch.Tensor | None


@dataclass(frozen=True)
class Gradient:
    """A program that keeps the values its derivative needs, and the derivative, both compiled.

    Attributes:
        graph: the definition of the program.
        wrt: names of the inputs whose gradients are computed.
        split: both graphs and their connections, see `cutesuper.split`.
        forward: the kernels of the program; kept values are further outputs.
        backward: the kernels of the derivative. They take inputs of the program, kept values, and
            cotangents: ``backward.graph`` names them. None if every gradient is a cotangent.
    """

    graph: KernelGraph
    wrt: tuple[str, ...]
    split: Split
    forward: Kernel
    backward: Kernel | None

    def run(
        self, inputs: Sequence[torch.Tensor]
    ) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """The outputs of the program, and what `ready` takes. Raises like a `Kernel`."""
        made = self.forward(list(inputs))
        return made[: len(self.graph.outputs)], self.kept(inputs, made)

    def ready(self, kept: Sequence[torch.Tensor]) -> tuple[Gradient, Sequence[torch.Tensor]]:
        """The derivative, and the tensors kept for it."""
        return self, kept

    # ------------------------------------------------------------------------------------- wiring

    @cached_property
    def _inputs(self) -> list[str]:
        return [self.graph.nodes[i].name for i in self.graph.inputs]

    @cached_property
    def _kept(self) -> list[str]:
        """Names of the backward pass's inputs other than cotangents."""
        nodes, given = self.split.backward.nodes, self.split.backward.inputs
        return [nodes[i].name for i in given if nodes[i].name not in self.split.cotangents]

    @cached_property
    def _operands(self) -> list[str]:
        """Names of the inputs of the derivative's kernels."""
        graph = self.backward.graph if self.backward else None
        return [graph.nodes[i].name for i in graph.inputs] if graph else []

    @cached_property
    def constant(self) -> tuple[int, ...]:
        """Indices of the program's outputs that depend on no input of ``wrt``."""
        return _constant(self.graph, self.wrt)

    def kept(
        self, inputs: Sequence[torch.Tensor], made: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """The kept tensors for the backward pass, from inputs and outputs of the forward pass."""
        saved = self.split.saved
        return [made[saved[n]] if n in saved else inputs[self._inputs.index(n)] for n in self._kept]

    def pulled_back(
        self, kept: Sequence[torch.Tensor], cotangents: Sequence[Maybe], shapes: Sequence[Any]
    ) -> list[Maybe]:
        """One gradient for each input of the program, None if there is none.

        Args:
            kept: see `kept`.
            cotangents: of the outputs of the program; None is zero.
            shapes: of inputs and outputs of the program.
        """
        device = next(t.device for t in cotangents if t is not None)
        values = dict(zip(self._kept, kept, strict=True))
        for name, n in self.split.cotangents.items():
            dtype = self.graph.nodes[self.graph.outputs[n]].dtype.torch
            t = cotangents[n]
            if t is None:
                t = torch.zeros(shapes[len(self._inputs) + n], dtype=dtype, device=device)
            values[name] = t.to(dtype)
        made: list[torch.Tensor] = []
        if self.backward is not None:
            made = self.backward([usable(values[n]) for n in self._operands])
        found: list[Maybe] = []
        for name, shape in zip(self._inputs, shapes, strict=False):
            place = self.split.gradients.get(name)
            t = values[place] if isinstance(place, str) else None if place is None else made[place]
            # the gradient of a broadcast input has extents of 1 in front
            found.append(t if t is None else t.reshape(shape))
        return found


@dataclass(frozen=True)
class Deferred:
    """A call of a program without its derivative, which is made if the call is differentiated.

    Attributes:
        kernel: the program.
        wrt: as for `Gradient`.
    """

    kernel: Kernel
    wrt: tuple[str, ...]

    @property
    def graph(self) -> KernelGraph:
        """The definition of the program."""
        return self.kernel.graph

    @property
    def constant(self) -> tuple[int, ...]:
        """See `Gradient`."""
        return _constant(self.graph, self.wrt)

    def run(
        self, inputs: Sequence[torch.Tensor]
    ) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """The outputs of the program, and what `ready` takes. Raises like a `Kernel`."""
        return self.kernel(list(inputs)), inputs

    def ready(self, kept: Sequence[torch.Tensor]) -> tuple[Gradient, Sequence[torch.Tensor]]:
        """The derivative, made now, and the tensors kept for it.
        The program is run once more if that are more than its inputs.

        Raises:
            GraphError: there is none; says why.
            DeviceError: it would have to be made while a CUDA graph is captured.
        """
        if kept[0].is_cuda:
            self.kernel.refuse_new_gradient(self.wrt)
        gradient = self.kernel.gradient(*self.wrt)
        made = gradient.forward(list(kept)) if gradient.split.saved else []
        return gradient, gradient.kept(kept, made)


def _constant(graph: KernelGraph, wrt: Sequence[str]) -> tuple[int, ...]:
    nodes = graph.nodes
    found = {i for i in graph.inputs if nodes[i].name in wrt}
    for i, n in enumerate(nodes):
        if found.intersection(n.inputs) and not n.dtype.integer:
            found.add(i)
    return tuple(n for n, i in enumerate(graph.outputs) if i not in found)


def recorded(gradient: Gradient | Deferred, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run a program and return its outputs, recorded by autograd.

    Args:
        gradient: of the program.
        inputs: of the program.

    Raises:
        ShapeError, DTypeError, LayoutError, DeviceError: as for a `Kernel`.
        OperatorError: under a transform of ``torch.func``.
    """
    if torch._C._are_functorch_transforms_active():
        raise OperatorError(f"kernel(...): {TRANSFORMED}")
    return list(_Recorded.apply(gradient, *inputs))


class _Recorded(torch.autograd.Function):
    """A call of a program as one operator of autograd."""

    @staticmethod
    def forward(
        ctx: Any, gradient: Gradient | Deferred, *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        made, kept = gradient.run(inputs)
        results = tuple(made)
        ctx.gradient = gradient
        ctx.shapes = [t.shape for t in (*inputs, *results)]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(results[n] for n in gradient.constant))
        ctx.save_for_backward(*kept)
        return results

    @staticmethod
    def backward(ctx: Any, *cotangents: Maybe) -> tuple[Maybe, ...]:
        if torch._C._are_functorch_transforms_active() or any(map(_is_batched, cotangents)):
            raise OperatorError(f"kernel(...): {TRANSFORMED}")
        made_or_not: Gradient | Deferred = ctx.gradient
        if all(t is None for t in cotangents):
            return (None,) * (1 + len(made_or_not.graph.inputs))
        with torch.no_grad():
            gradient, kept = made_or_not.ready(ctx.saved_tensors)
            found = gradient.pulled_back(kept, cotangents, ctx.shapes)
        if torch.is_grad_enabled():  # create_graph=True
            places = [n for n, t in enumerate(found) if t is not None]
            made = _Once.apply(len(places), *(found[n] for n in places), *kept, *cotangents)
            for n, t in zip(places, made, strict=True):
                found[n] = t
        return (None, *found)


def _is_batched(t: Maybe) -> bool:
    """True if a tensor comes from ``torch.autograd.grad(is_grads_batched=True)``.
    That is no transform of functorch."""
    return t is not None and functorch.is_legacy_batchedtensor(t)


class _Once(torch.autograd.Function):
    """Identity on gradients that refuses to be differentiated again."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Maybe) -> tuple[Maybe, ...]:
        """Return the first ``count`` tensors; the others are those that they depend on."""
        del ctx
        return tuple(None if t is None else t.view_as(t) for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *cotangents: Maybe) -> Any:
        del ctx, cotangents
        raise GraphError(
            "kernel(...): its gradient cannot be differentiated again; leave out "
            "create_graph=True, or compute this part with operators of torch"
        )
