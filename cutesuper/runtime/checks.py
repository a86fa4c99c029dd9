"""Checks of call arguments: fast for valid calls, precise for invalid ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

from cutesuper.errors import (
    CutesuperError,
    DeviceError,
    DTypeError,
    GraphError,
    LayoutError,
    OperatorError,
    ShapeError,
)
from cutesuper.ir.dims import MAX_ELEMENTS, Shape, Symbol, open_size, show_shape
from cutesuper.ir.graph import KernelGraph

#: alignment of the first element in bytes, for bulk copies and 16-byte accesses
ALIGNMENT = 16

#: message about tensors wrapped by transforms of PyTorch
TRANSFORMED = (
    "it cannot be called under vmap (or with batched gradients) and other transforms of "
    "torch.func; give it a tensor with one more leading dimension, and use torch.autograd for "
    "gradients"
)


def refuse_tangents(what: str, tensors: Iterable[Any]) -> None:
    """Refuse tensors with tangents, which kernels would drop. Raises OperatorError."""
    from torch.autograd import forward_ad

    for t in tensors:
        if forward_ad.unpack_dual(t).tangent is not None:
            raise OperatorError(
                f"{what}: it has no forward-mode derivative; use reverse mode, torch.autograd.grad"
            )


def check_size(what: str, shape: Sequence[int]) -> None:
    """Refuse a tensor whose offsets do not fit into 32 bits. Raises ShapeError."""
    if prod(shape) > MAX_ELEMENTS:
        raise ShapeError(
            f"{what} of shape {list(shape)} has {prod(shape)} elements, more than {MAX_ELEMENTS}; "
            "split the batch"
        )


#: remedy for a tensor that has an `oddity`
ORDINARY = "use .to_dense(), .to_padded_tensor() or .dequantize()"


def oddity(t: Any) -> str:
    """Name of the property that keeps a tensor from being an array of numbers in memory.
    Nested, a sparse layout, a quantized type; empty for an ordinary one."""
    import torch

    if t.is_nested:
        return "nested"
    if t.layout is not torch.strided:
        return str(t.layout)
    return str(t.dtype) if t.is_quantized else ""


class Signature:
    """The required names, shapes and dtypes of a kernel's inputs and outputs."""

    def __init__(self, graph: KernelGraph) -> None:
        nodes = [graph.nodes[i] for i in graph.inputs]
        self.names = [n.name for n in nodes]
        self.shapes = [n.shape for n in nodes]
        self.dtypes = [n.dtype.torch for n in nodes]
        self.outputs = [(graph.nodes[i].shape, graph.nodes[i].dtype.torch) for i in graph.outputs]
        #: by output that rows are put into: the input that it is elsewhere
        self.continued = graph.continued
        read = [graph.inputs.index(j) for n in graph.nodes for j in n.inputs if j in graph.inputs]
        #: of these, those whose input may be the output: nothing else reads it
        self._in_place = {n for n, k in self.continued.items() if read.count(k) == 1}
        self._vacant = graph.vacant
        found = {d.name: d for s in self.shapes for d in s if isinstance(d, Symbol)}
        self.symbols = tuple(found.values())
        #: for each input: the number of its first dimensions behind which all are known
        self._open = [
            max((i + 1 for i, d in enumerate(s) if isinstance(d, Symbol)), default=0)
            for s in self.shapes
        ]
        import torch

        self._grad_enabled = torch.is_grad_enabled

    def bind(self, inputs: Sequence[Any]) -> dict[str, int] | None:
        """Check the inputs.
        Return the extents of the symbols, or None if a gradient is to be recorded.

        Raises:
            ShapeError, DTypeError, LayoutError, DeviceError: naming the input.
            OperatorError: under a transform of ``torch.func``.
        """
        if len(inputs) != len(self.names):
            raise ShapeError(
                f"kernel: takes {len(self.names)} input(s) {self._call()}, got {len(inputs)}"
            )
        extents: dict[str, int] = {}
        recorded = False
        try:
            device = inputs[0].device
            for i, t in enumerate(inputs):
                want, open_ = self.shapes[i], self._open[i]
                if open_:
                    same = tuple(t.shape[open_:]) == want[open_:] and t.dim() == len(want)
                    for n, d in zip(t.shape[:open_], want, strict=False):
                        same = same and n == (
                            extents.setdefault(d.name, n) if isinstance(d, Symbol) else d
                        )
                    same = same and t.numel() <= MAX_ELEMENTS
                else:
                    same = t.shape == want
                good = t.dtype is self.dtypes[i] and t.is_contiguous() and t.device == device
                good = good and not (t.requires_grad and self._grad_enabled())
                if not (same and good) or (t.data_ptr() or 1) % ALIGNMENT:
                    self._explain(i, t, device, extents)
                    recorded = recorded or (t.requires_grad and self._grad_enabled())
        except (AttributeError, RuntimeError, TypeError) as error:
            self._refuse_others(inputs, error)
            raise
        return None if recorded else extents

    def vacant(self, extents: dict[str, int]) -> bool:
        """True if a tensor has no elements for these extents: kernels are for those that have."""
        return self._vacant or 0 in extents.values()

    def refusal(self, inputs: Sequence[Any], remedy: str) -> GraphError:
        """The error for an input whose gradient cannot be recorded.

        Args:
            inputs: at least one requires a gradient.
            remedy: the reason, and what to do.
        """
        name = next(n for n, t in zip(self.names, inputs, strict=True) if t.requires_grad)
        return GraphError(f"kernel{self._call()}: input {name} requires a gradient, and {remedy}")

    def output_shapes(self, extents: dict[str, int]) -> list[tuple[Any, Any]]:
        """Shape and torch dtype of every output for these extents."""
        if not self.symbols:
            return self.outputs
        known = [(self._known(shape, extents), dtype) for shape, dtype in self.outputs]
        for i, (shape, _) in enumerate(known):
            if open_size(self.outputs[i][0]):
                check_size(f"kernel{self._call()}: output {i}", shape)
        return known

    def new_outputs(self, inputs: Sequence[Any], extents: dict[str, int]) -> list[Any]:
        """Tensors for the outputs; copies of the tensors that rows are put into."""
        import torch

        device, continued = inputs[0].device, self.continued
        return [
            inputs[continued[n]].clone()
            if n in continued
            else torch.empty(shape, dtype=dtype, device=device)
            for n, (shape, dtype) in enumerate(self.output_shapes(extents))
        ]

    def fill(self, outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
        """Copy tensors that rows are put into, to outputs that are not the same memory."""
        for n, k in self.continued.items():
            if outputs[n].data_ptr() != inputs[k].data_ptr():
                outputs[n].copy_(inputs[k])

    def check_out(self, out: Any, inputs: Sequence[Any], extents: dict[str, int]) -> list[Any]:
        """Check tensors given to receive the outputs. Raises like `bind`."""
        outputs = list(out) if isinstance(out, list | tuple) else [out]
        wanted = self.output_shapes(extents)
        if len(outputs) != len(wanted):
            raise ShapeError(f"kernel(out=...): {len(wanted)} output(s), got {len(outputs)}")
        for i, (t, (shape, dtype)) in enumerate(zip(outputs, wanted, strict=True)):
            name = f"kernel(out=...): output {i}"
            try:
                self._check_output(name, t, shape, dtype, self._others(i, t, inputs, outputs))
            except (AttributeError, RuntimeError, TypeError) as error:
                if not isinstance(error, CutesuperError):
                    self._refuse_other(name, t, error)
                raise
        return outputs

    def _others(self, i: int, t: Any, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
        """The tensors that output i, given as t, must not overlap.
        What rows are put into may be the output itself, if nothing else reads it."""
        own = self.continued[i] if i in self._in_place else -1
        if own >= 0 and inputs[own].data_ptr() != t.data_ptr():
            own = -1
        return [*(x for k, x in enumerate(inputs) if k != own), *outputs[:i]]

    def _check_output(
        self, name: str, t: Any, shape: Sequence[int], dtype: Any, others: Sequence[Any]
    ) -> None:
        """Check a tensor to write to; ``others`` are the inputs and the outputs before it."""
        if tuple(t.shape) != tuple(shape):
            raise ShapeError(f"{name} has shape {list(t.shape)}, must be {list(shape)}")
        if t.dtype is not dtype:
            raise DTypeError(f"{name} is {t.dtype}, must be {dtype}")
        if t.device != others[0].device:
            raise DeviceError(f"{name} is on {t.device}, the inputs are on {others[0].device}")
        if not t.is_contiguous() or t.data_ptr() % ALIGNMENT:
            raise LayoutError(f"{name} must be contiguous and aligned to {ALIGNMENT} bytes")
        if t.requires_grad and self._grad_enabled():
            raise GraphError(
                f"{name} requires a gradient, and what is written into it has none; "
                "call it under torch.no_grad(), or detach it"
            )
        if any(_overlap(t, other) for other in others):
            raise LayoutError(
                f"{name} overlaps an input or another output; kernels read while they write"
            )

    # --------------------------------------------------------------------------------- messages

    def _explain(self, i: int, t: Any, device: Any, extents: dict[str, int]) -> None:
        """Raise for the first thing that is wrong with input ``i``."""
        what = f"kernel{self._call()}: input {self.names[i]}"
        self._explain_type(i, what, t, device)
        self._explain_shape(i, what, t, extents)
        self._explain_memory(what, t)

    def _explain_type(self, i: int, what: str, t: Any, device: Any) -> None:
        if not hasattr(t, "data_ptr"):  # a NumPy array, which has a dtype and a device too
            raise DTypeError(f"{what} is a {type(t).__name__}, not a torch tensor")
        if t.dtype is not self.dtypes[i]:
            raise DTypeError(
                f"{what} is {t.dtype}, must be {self.dtypes[i]}; convert it with .to()"
            )
        if t.device != device:
            raise DeviceError(
                f"{what} is on {t.device}, input {self.names[0]} on {device}; "
                "move all inputs to one device"
            )

    def _explain_shape(self, i: int, what: str, t: Any, extents: dict[str, int]) -> None:
        want = self.shapes[i]
        shape = self._known(want, extents)
        if t.dim() != len(want):
            raise ShapeError(
                f"{what} has rank {t.dim()} {list(t.shape)}, must have rank "
                f"{len(want)} {show_shape(want)}"
            )
        if tuple(t.shape) != shape:
            more = "".join(f"; {k} is {v} in an earlier input" for k, v in extents.items())
            if i == 0 and tuple(t.shape[1:]) == shape[1:]:
                more = "; with cutesuper.symbol('M') in its place the graph takes any number"
            raise ShapeError(f"{what} has shape {list(t.shape)}, must be {show_shape(want)}{more}")
        if self._open[i]:
            check_size(what, t.shape)

    @staticmethod
    def _explain_memory(what: str, t: Any) -> None:
        if not t.is_contiguous():
            raise LayoutError(
                f"{what} is not contiguous (strides {list(t.stride())}); call "
                ".contiguous(), or put the transposition into the graph"
            )
        if t.numel() and not t.data_ptr() and (t.is_cuda or not t.untyped_storage().nbytes()):
            raise LayoutError(
                f"{what} has no memory: it was freed (a sharded parameter?), or it "
                "is a fake tensor; call it with a tensor that has its elements"
            )
        if t.data_ptr() % ALIGNMENT and t.device.type != "cpu":
            raise LayoutError(
                f"{what} starts at an address that is no multiple of {ALIGNMENT} "
                "bytes (a view into another tensor?); clone it"
            )

    def _refuse_others(self, inputs: Sequence[Any], error: Exception) -> None:
        """Raise for the first input that is no ordinary tensor.
        ``error`` is the exception it caused."""
        import torch

        if isinstance(error, CutesuperError):
            return
        if torch._C._are_functorch_transforms_active():
            raise OperatorError(f"kernel{self._call()}: {TRANSFORMED}") from error
        for name, t in zip(self.names, inputs, strict=True):
            self._refuse_other(f"kernel{self._call()}: input {name}", t, error)

    @staticmethod
    def _refuse_other(what: str, t: Any, error: Exception | None) -> None:
        import torch

        if not isinstance(t, torch.Tensor):
            raise DTypeError(f"{what} is a {type(t).__name__}, not a torch tensor") from error
        if kind := oddity(t):
            raise LayoutError(f"{what} is not an ordinary tensor ({kind}); {ORDINARY}") from error
        try:
            t.data_ptr()
        except RuntimeError:
            raise GraphError(
                f"{what} has no memory: it belongs to a transform of torch.func or to a program "
                "that is being traced; a kernel is called with tensors that have their elements"
            ) from error

    def _call(self) -> str:
        parts = [n + show_shape(s) for n, s in zip(self.names, self.shapes, strict=True)]
        return f"({', '.join(parts)})"

    @staticmethod
    def _known(shape: Shape, extents: dict[str, int]) -> tuple[int, ...]:
        return tuple(extents.get(d.name, d.hint) if isinstance(d, Symbol) else d for d in shape)


def _overlap(a: Any, b: Any) -> bool:
    start, other = a.data_ptr(), b.data_ptr()
    end = start + a.numel() * a.element_size()
    return start < other + b.numel() * b.element_size() and other < end
