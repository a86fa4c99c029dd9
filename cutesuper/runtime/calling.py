"""Calls of programs, just compiled (`Kernel`) or loaded (`ExportedProgram`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from cutesuper.errors import DeviceError, DTypeError, GraphError
from cutesuper.ir.dims import Shape, Symbol, extent, open_size
from cutesuper.ir.evaluate import run_reference
from cutesuper.ir.graph import KernelGraph
from cutesuper.ir.operators.base import TABLE
from cutesuper.runtime.checks import ALIGNMENT, Signature, check_size, refuse_tangents
from cutesuper.runtime.programs import KERNEL_DEVICES

if TYPE_CHECKING:
    import torch

#: picks some elements of a sequence, in an order of its own
Picker = Callable[[Sequence[Any]], tuple[Any, ...]]


def picker(places: Sequence[int]) -> Picker:
    """A function that picks the elements at these places, always as a tuple."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda values: tuple(values[n] for n in places)


@dataclass(frozen=True)
class Launches:
    """The kernels of one program, ready to run.

    Attributes:
        intermediates: shape and torch dtype of every tensor between kernels.
        launch: launches all kernels on torch's current device and stream; takes inputs, outputs
            and intermediates in one list, checked, all on that device. Allocates scratch memory
            itself.
        homes: for intermediates that lie in the memory of an earlier one, that one, by index.
        in_place: index of an input and of an output that may be one tensor.
    """

    intermediates: Sequence[tuple[Shape, Any]]
    launch: Callable[[list[Any]], None]
    homes: Mapping[int, int] = field(default_factory=dict[int, int])
    in_place: frozenset[tuple[int, int]] = frozenset()

    def between(self, extent: Callable[[Symbol], int], device: Any) -> list[Any]:
        """New tensors between kernels, for these extents of the symbols.
        Raises ShapeError if one is too large."""
        import torch

        made: list[Any] = []
        for n, (shape, dtype) in enumerate(self.intermediates):
            known = [extent(d) if isinstance(d, Symbol) else d for d in shape]
            if open_size(shape):
                check_size("a tensor between kernels", known)
            if n in self.homes:
                made.append(made[self.homes[n]].view(-1).view(dtype).view(known))
            else:
                made.append(torch.empty(known, dtype=dtype, device=device))
        return made


#: the symbolic extent of a graph that has one, or all of them by name
Rows = int | Mapping[str, int]
#: takes inputs and outputs of a graph and its symbolic extents, and computes the outputs
Runner = Callable[["list[torch.Tensor]", "list[torch.Tensor]", Rows], None]


def reference_of(graph: KernelGraph) -> Runner:
    """The reference executor for a graph, in the operators that kernels compute."""
    graph = graph.expanded()

    def run(inputs: list[torch.Tensor], outputs: list[torch.Tensor], rows: Rows) -> None:
        del rows
        for out, result in zip(outputs, run_reference(graph, inputs), strict=True):
            out.copy_(result)

    return run


def launcher(launches: Launches, device: torch.device) -> Runner:
    """Kernels with memory for the tensors between them, on a device."""
    import torch

    launch, index = launches.launch, device.index
    # torch.cuda.current_device() without the check that CUDA is initialized: there are tensors
    current = torch._C._cuda_getDevice

    def run(inputs: list[torch.Tensor], outputs: list[torch.Tensor], rows: Rows) -> None:
        if index != current():
            with torch.cuda.device(device):
                return run(inputs, outputs, rows)
        values = inputs + outputs
        if launches.intermediates:
            values += launches.between(
                lambda d: rows if isinstance(rows, int) else rows[d.name], device
            )
        return launch(values)

    return run


#: runs a program on the inputs of its graph and returns new tensors; None if they are others than
#: it was prepared for
Prepared = Callable[["Sequence[torch.Tensor]"], "list[torch.Tensor] | None"]


def prepared(
    signature: Signature, launches: Launches, device: torch.device, places: Sequence[int] = ()
) -> Prepared | None:
    """The call of a program with the least work on the host.
    A third of the time of calls whose checks can say what is wrong, and which allocate as PyTorch's
    users do: 3.3 us for 11.0, with two inputs and an output, the kernel left out.

    Args:
        signature: of the graph.
        launches: its kernels.
        device: of all tensors.
        places: outputs for which the input that rows are put into is changed in place; they are not
            returned.

    Returns:
        None if an extent is known only at the call, or an output is a copy of an input.
    """
    import torch
    from torch._C._dynamo import guards

    continued = signature.continued
    if signature.symbols or set(continued) - set(places):
        return None
    gpu = device.type == "cuda"
    index, current = (device.index, torch._C._cuda_getDevice) if gpu else (-1, lambda: -1)
    recording, launch = torch.is_grad_enabled, launches.launch
    # as Inductor's code allocates: on the current device, in a third of torch.empty's time
    new = getattr(guards, f"_empty_strided_{device.type}")
    expected = list(zip(signature.shapes, signature.dtypes, strict=True))
    made = [
        continued[n] if n in places else _layout(*output)
        for n, output in enumerate(signature.outputs)
    ]
    returned = [n for n in range(len(made)) if n not in places]

    def call(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        if len(inputs) != len(expected) or index != current():
            return None
        records = recording()
        for t, (shape, dtype) in zip(inputs, expected, strict=True):
            good = t.shape == shape and t.dtype is dtype and t.is_contiguous()
            good = good and t.get_device() == index and not t.data_ptr() % ALIGNMENT
            if not good or (records and t.requires_grad):
                return None
        outputs = [inputs[m] if isinstance(m, int) else new(*m) for m in made]
        values = [*inputs, *outputs]
        if launches.intermediates:
            values += launches.between(extent, device)
        launch(values)
        return [outputs[n] for n in returned]

    return call


def _layout(shape: Shape, dtype: Any) -> tuple[tuple[int, ...], tuple[int, ...], Any]:
    """Extents, strides and type of a new tensor."""
    import torch

    sizes = tuple(map(extent, shape))
    return sizes, torch.empty(sizes, device="meta").stride(), dtype


class Program(ABC):
    """A program to call with torch tensors.

    ``program(x, w)`` takes torch tensors and returns a tensor (a tuple for several outputs);
    ``program([x, w])`` and ``program(inputs=[x, w])`` return a list. On CUDA tensors the compiled
    kernels run on the current stream; calls can be captured into CUDA graphs. On CPU tensors, and
    where a tensor has an extent of 0, the reference executor runs. ``out=`` receives the results in
    place of new tensors.

    Attributes:
        graph: the definition.
        arch: the architecture of the kernels, e.g. ``sm_90a``.
    """

    #: remedy for tensors on a GPU other than that of the kernels
    _remedy = "superoptimize on that GPU, or pass its name as target="

    def __init__(self, graph: KernelGraph, arch: str) -> None:
        self.graph = graph
        self.arch = arch
        self._devices: set[int] = set()
        self._changes = TABLE.changes

    @cached_property
    def _signature(self) -> Signature:
        """The signature, made at the first call.
        It needs PyTorch, and `ExportedProgram.launch` does not."""
        return Signature(self.graph)

    @abstractmethod
    def _check_operators(self) -> None:
        """Check that the reference executor computes the same as the kernels.

        Raises:
            OperatorError: an operator has been redefined.
        """

    def _notice_changes(self) -> None:
        """Record the changes of the operator table.
        Called if operators were redefined since the last call."""
        self._changes = TABLE.changes

    @abstractmethod
    def _launches(self, extents: dict[str, int]) -> Launches:
        """The kernels for these extents of the symbols."""

    def __call__(
        self,
        *args: Any,
        inputs: Sequence[torch.Tensor] | None = None,
        out: torch.Tensor | Sequence[torch.Tensor] | None = None,
    ) -> Any:
        """Run the program.

        Args:
            args: one tensor per input, or a single list of them.
            inputs: the same as a keyword.
            out: tensors that receive the outputs; contiguous, not overlapping an input. But what
                rows are put into (`put_rows`) may be given as the output as well, if the program
                reads it nowhere else: then it is changed in place, and nothing is copied.

        Raises:
            ShapeError, DTypeError, LayoutError, DeviceError: an argument that does not fit; the
                message names it. Nothing has run then.
            GraphError: a gradient that cannot be recorded.
            OperatorError: under a transform of ``torch.func``, or with tangents on a GPU; or an
                operator was redefined since the program was made.
            SearchError, LoweringError, CompileError: the call needs a new program, of another
                bucket of sizes or with gradients, and there is none, or none within the budget.
        """
        if inputs is None:
            as_list = len(args) == 1 and isinstance(args[0], list | tuple)
            values: Sequence[Any] = args[0] if as_list else args
        elif args:
            raise GraphError("kernel(...): give the inputs either by position or as inputs=, once")
        else:
            as_list, values = True, _listed(inputs)
        results = self._run(values, out)
        if as_list:
            return results
        return results[0] if len(results) == 1 else tuple(results)

    def __copy__(self) -> Program:
        """Return the program itself: it is immutable, and its loaded code cannot be copied."""
        return self

    def __deepcopy__(self, memo: Any) -> Program:
        """Return the program itself, like `__copy__`."""
        return self

    def __reduce__(self) -> Any:
        raise GraphError(
            f"{self!r}: programs cannot be pickled, since they hold loaded code; send "
            "cutesuper.dumps(program.graph) and superoptimize it there (the cache of kernels is "
            "shared), or export() and load()"
        )

    def _run(self, inputs: Sequence[Any], out: Any) -> list[Any]:
        if self._changes != TABLE.changes:
            self._notice_changes()
        signature = self._signature
        extents = signature.bind(inputs)
        if extents is None:
            return self._record(inputs, out)
        device = inputs[0].device
        if device.type not in KERNEL_DEVICES or signature.vacant(extents):
            return self._run_reference(inputs, out, extents)
        if device.index not in self._devices:
            self._admit(device)
        launches = self._launches(extents)
        import torch

        if torch.autograd.forward_ad._current_level >= 0:
            refuse_tangents(repr(self), inputs)
        if out is None:
            outputs = signature.new_outputs(inputs, extents)
        else:
            outputs = signature.check_out(out, inputs, extents)
            signature.fill(outputs, inputs)
        values = [*inputs, *outputs, *launches.between(lambda d: extents[d.name], device)]
        if device.index == torch.cuda.current_device():
            launches.launch(values)
        else:
            with torch.cuda.device(device):
                launches.launch(values)
        return outputs

    def _record(self, inputs: Sequence[Any], out: Any) -> list[Any]:
        """Run a call whose gradients are recorded. Raises GraphError if there are none."""
        del out
        raise self._signature.refusal(
            inputs,
            "a loaded program has no backward; call it under torch.no_grad() or detach the input, "
            "or differentiate cutesuper.superoptimize(program.graph)",
        )

    def _run_reference(self, inputs: Sequence[Any], out: Any, extents: dict[str, int]) -> list[Any]:
        self._check_operators()
        results = run_reference(self.graph, list(inputs))
        if out is None:
            return results
        outputs = self._signature.check_out(out, inputs, extents)
        for o, r in zip(outputs, results, strict=True):
            o.copy_(r)
        return outputs

    def _admit(self, device: Any) -> None:
        """Check once per device that the compiled code can run there."""
        import torch

        major, minor = torch.cuda.get_device_capability(device)
        have, need = f"sm_{major}{minor}", self.arch.rstrip("af")
        if have != need:
            raise DeviceError(
                f"{self!r}: compiled for {need}, called with tensors on {device} ({have}); "
                f"{self._remedy}"
            )
        self._devices.add(device.index)


def _listed(inputs: Any) -> list[Any]:
    try:
        return list(inputs)
    except (TypeError, RuntimeError):  # a number; a tensor without dimensions
        raise DTypeError(
            f"kernel(inputs={type(inputs).__name__}): give it a list of tensors"
        ) from None
