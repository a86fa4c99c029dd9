"""Definitions of operators on rows: operands, results and kernel graph; and kinds of calls.

A *kind* is everything that determines the kernels of a call, except the number of rows and the GPU.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from cutesuper.errors import (
    DeviceError,
    DTypeError,
    FormatError,
    LayoutError,
    OperatorError,
    ShapeError,
)
from cutesuper.ir.arguments import shown
from cutesuper.ir.dims import Dim, Symbol
from cutesuper.ir.dtypes import ALL, as_dtype
from cutesuper.ir.graph import KernelGraph, Tensor
from cutesuper.runtime.checks import ORDINARY, oddity

Maybe = torch.Tensor | None
Option = float | int | bool | str

#: element types of labels
INTEGERS = (torch.int64, torch.int32)
FLOATS = tuple(d.torch for d in ALL.values())
_SCHEMA = {float: "float", int: "int", bool: "bool", str: "str"}


class Role(Enum):
    """The relation of a tensor of a call to the rows ``[..., N]`` of its first operand."""

    #: ``[..., N]``, one element for each; all rows of a call have one shape
    ROWS = "rows"
    #: ``[N]``, or ``[H, N]`` for rows ``[..., H, N]``: the same for all rows
    ROW = "row"
    #: ``[...]``, one for each row
    VALUE = "value"
    #: ``[]``, one for all rows
    WHOLE = "whole"

    @property
    def has_rows(self) -> bool:
        """True if the shape contains the number of rows."""
        return self in (Role.ROWS, Role.VALUE)


@dataclass(frozen=True)
class TensorArgument:
    """A tensor argument of an operator.

    Attributes:
        name: of the argument, and of the graph's input.
        optional: may be None.
        labels: int64 or int32, without a gradient; otherwise a floating-point type.
    """

    name: str
    optional: bool = field(default=False, kw_only=True)
    labels: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class Operand(TensorArgument):
    """A tensor argument of an operator on rows.

    Attributes:
        role: ROWS, ROW or VALUE; the first operand is ROWS.
    """

    role: Role


@dataclass(frozen=True)
class Output:
    """A result.

    Attributes:
        name: for the documentation of the registered operator.
        role: ROWS, VALUE or WHOLE.
        like: name of the operand with the same element type, or of an element type.
        often_unused: there is a backward pass without its cotangent; otherwise a result that the
            loss does not depend on costs a tensor of zeros.
    """

    name: str
    role: Role = Role.ROWS
    like: str = "x"
    often_unused: bool = False


@dataclass(frozen=True)
class Built:
    """The relevant values of a kernel graph.

    Attributes:
        outputs: the results, in order.
        saved: values that the backward pass gets besides operands; results may be among them.
            Values inside operators by name, as for `cutesuper.split`.
    """

    outputs: tuple[Tensor, ...]
    saved: tuple[Tensor | str, ...] = ()


def _any_options(*options: Option) -> tuple[Option, ...]:
    return options


@dataclass(frozen=True)
class Definition:
    """An operator on rows.

    Attributes:
        name: of the operator in ``torch.ops.cutesuper``.
        operands: tensors that a call takes, in order.
        options: name and type of the other arguments, numbers and strings.
        outputs: the results.
        build: ``build(graph, *inputs, *options)`` adds the operator to a graph; inputs are
            ``[M, N]`` (``[M, H, N]`` with a ROW operand of that rank), ``[N]`` (``[H, N]``) and
            ``[M, 1]``, None where an operand is None.
        check: ``check(*options)`` returns the options to store, equal to those that are given;
            raises OperatorError. It is not called again for known options.
    """

    name: str
    operands: tuple[Operand, ...]
    options: tuple[tuple[str, type], ...]
    outputs: tuple[Output, ...]
    build: Callable[..., Built]
    check: Callable[..., tuple[Option, ...]] = _any_options

    @property
    def schema(self) -> str:
        """Arguments of the registered operator."""
        tensors = [f"Tensor{'?' * o.optional} {o.name}" for o in self.operands]
        return ", ".join((*tensors, *(f"{_SCHEMA[kind]} {name}" for name, kind in self.options)))


# ------------------------------------------------------------------------------------------- kinds


@dataclass(frozen=True)
class Input:
    """An operand of a kind.

    Attributes:
        rows: whether its first extent is the number of rows.
        inner: the other extents.
        dtype: name of its element type.
    """

    rows: bool
    inner: tuple[int, ...]
    dtype: str

    def shape(self, rows: Dim) -> tuple[Dim, ...]:
        """The shape for this number of rows."""
        return (rows, *self.inner) if self.rows else self.inner


@dataclass(frozen=True)
class Kind:
    """Everything that determines the kernels of a call, except the number of rows and the GPU.

    Attributes:
        operator: name of the `Definition`.
        inputs: one for each operand, None where that is None.
        options: values, in order.
    """

    operator: str
    inputs: tuple[Input | None, ...]
    options: tuple[Option, ...]

    def new_inputs(
        self, g: KernelGraph, arguments: Sequence[TensorArgument], rows: Dim
    ) -> list[Tensor | None]:
        """The operands as inputs of a graph for this number of rows."""
        return [
            i and g.new_input(i.shape(rows), i.dtype, name=a.name)
            for a, i in zip(arguments, self.inputs, strict=True)
        ]

    def to_text(self) -> str:
        """The kind as JSON, which `of_text` reads."""
        inputs = [i and [i.rows, list(i.inner), i.dtype] for i in self.inputs]
        return json.dumps([self.operator, inputs, list(self.options)])

    @staticmethod
    def of_text(text: str) -> Kind:
        """Read a text of `to_text`. Raises FormatError."""
        try:
            operator, inputs, options = json.loads(text)
            made = tuple(i and Input(i[0], tuple(i[1]), i[2]) for i in inputs)
            return Kind(operator, made, tuple(options))
        except (ValueError, TypeError, IndexError) as error:
            raise FormatError(
                f"kind {text!r}: is not what an operator of cutesuper writes ({error}); leave it "
                "as the forward operator has it"
            ) from None

    @property
    def inner(self) -> tuple[int, ...]:
        """Extents of a row of the first operand: ``(N,)`` or ``(H, N)``."""
        first = self.inputs[0]
        return first.inner if first else ()

    def graph(self, definition: Definition, rows: Symbol) -> tuple[KernelGraph, Built]:
        """The kernel graph for this number of rows."""
        g = KernelGraph()
        tensors = self.new_inputs(g, definition.operands, rows)
        built = definition.build(g, *tensors, *self.options)
        types = {t.name: t.dtype for t in tensors if t is not None}
        for t, o in zip(built.outputs, definition.outputs, strict=True):
            g.mark_output(t, types.get(o.like, o.like))
        return g, built


def kind_of(definition: Definition, tensors: Sequence[Maybe], options: tuple[Option, ...]) -> Kind:
    """The kind of a call, whose arguments are checked.

    Raises:
        ShapeError, DTypeError, DeviceError, LayoutError: naming the argument.
    """
    call = describe(definition.name, definition.operands, tensors)
    for o, t in zip(definition.operands, tensors, strict=True):
        check_tensor(call, o, t, (definition.operands[0].name, tensors[0]))
    x = first_of(tensors)
    ranks = [t.dim() for o, t in zip(definition.operands, tensors, strict=True)
             if o.role is Role.ROW and t is not None]  # fmt: skip
    width = max(ranks, default=1)
    inputs = tuple(
        t if t is None else _input(o, t, x, width, call)
        for o, t in zip(definition.operands, tensors, strict=True)
    )
    return Kind(definition.name, inputs, options)


def first_of(tensors: Sequence[Maybe]) -> torch.Tensor:
    """The first operand, which is never optional."""
    x = tensors[0]
    if x is None:
        raise AssertionError("a definition whose first operand is optional")
    return x


def describe(name: str, arguments: Sequence[TensorArgument], tensors: Sequence[Any]) -> str:
    """A call for messages: ``rms_norm(x[8, 4096], weight[4096])``."""
    parts = [
        f"{o.name}{'[nested]' if t.is_nested else list(t.shape)}"
        if isinstance(t, torch.Tensor)
        else f"{o.name}={shown(t)}"
        for o, t in zip(arguments, tensors, strict=True)
        if t is not None
    ]
    return f"{name}({', '.join(parts)})"


def number(call: str, name: str, value: Any) -> float:
    """An option as a float. Raises OperatorError if it is not a number."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise OperatorError(f"{call}({name}={value!r}): must be a number") from None


def check_tensor(call: str, argument: TensorArgument, t: Any, first: tuple[str, Any]) -> None:
    """Check an argument of a call, but for its shape.

    Args:
        call: for messages.
        argument: its definition.
        t: its value.
        first: name and value of the first argument, whose device all share.

    Raises:
        DTypeError: no tensor, or another element type.
        LayoutError: a sparse, nested or quantized tensor.
        DeviceError: on another device.
    """
    if t is None and argument.optional:
        return
    what = f"{call}: {argument.name}"
    allowed = INTEGERS if argument.labels else FLOATS
    if not isinstance(t, torch.Tensor):
        raise DTypeError(f"{what} is a {type(t).__name__}, must be a torch tensor")
    if kind := oddity(t):
        raise LayoutError(f"{what} is not an ordinary tensor ({kind}); {ORDINARY}")
    if t.dtype not in allowed:
        raise DTypeError(
            f"{what} is {t.dtype}; convert it to one of {', '.join(map(str, allowed))}"
        )
    if t.device != first[1].device:
        raise DeviceError(
            f"{what} is on {t.device}, {first[0]} on {first[1].device}; move all to one device"
        )


def _input(o: Operand, t: torch.Tensor, x: torch.Tensor, width: int, call: str) -> Input:
    dtype = as_dtype(t.dtype).name
    shape = tuple(x.shape)
    first = call[call.index("(") + 1 : call.index("[")]
    if len(shape) < width or 0 in shape[len(shape) - width :]:
        rows = "[..., N]" if width == 1 else "[..., H, N]"
        raise ShapeError(
            f"{call}: {first} must be {rows}, with at least one element in a row; "
            "use .unsqueeze() or .unflatten()"
        )
    # kernels are made for a number, even where torch.compile has a symbol for it
    inner = tuple(int(n) for n in shape[len(shape) - width :])
    if o.role is Role.ROW:
        wanted = inner[width - t.dim() :]
        if t.dim() not in (1, 2) or tuple(t.shape) != wanted:
            raise ShapeError(
                f"{call}: {o.name} has shape {list(t.shape)}, must be {list(shape[-1:])}, one "
                f"element for each of a row of {first}, or {list(shape[-2:])} for rows of heads"
            )
        return Input(False, wanted, dtype)
    wanted = shape if o.role is Role.ROWS else shape[:-1]
    if tuple(t.shape) != wanted:
        raise ShapeError(
            f"{call}: {o.name} has shape {list(t.shape)}, must be {list(wanted)}, as "
            f"{first}{list(shape)} has; nothing is broadcast, use .expand()"
        )
    return Input(True, inner if o.role is Role.ROWS else (*inner[:-1], 1), dtype)
