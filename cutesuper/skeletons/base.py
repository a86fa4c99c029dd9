"""Plans: everything the lowering needs to know of one kernel, decided, and printable.

`make_plan` recognises which loop skeleton a block program fits, gives every operation its place in
it, picks a schedule if none is given, and refuses with a reason what no skeleton can run.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod

from cutesuper.ir.block import LOAD, BlockOp, BlockProgram, KernelStep, TensorSpec
from cutesuper.ir.definitions import definitions
from cutesuper.ir.dims import Dim, Symbol, extent
from cutesuper.ir.serial import program_dict
from cutesuper.ir.thread import ThreadExpression
from cutesuper.skeletons.schedule import Schedule, schedule_dict


@dataclass(frozen=True)
class Argument:
    """A tensor argument of a kernel, compact and row-major.

    Attributes:
        constant: may be read before the dependency wait.
        written: an output.
    """

    name: str
    shape: tuple[Dim, ...]
    dtype: str
    constant: bool
    written: bool


@dataclass(frozen=True)
class View:
    """A tensor as the block program sees it: labels instead of positions.

    Attributes:
        argument: index of the kernel argument.
        labels: its labels, extents of 1 left out.
        strides: distance in elements between neighbours of each label.
    """

    argument: int
    labels: tuple[str, ...]
    strides: tuple[int, ...]

    def stride(self, label: str) -> int:
        """Stride of ``label``; 0 where the tensor does not have it (it is replicated)."""
        return dict(zip(self.labels, self.strides, strict=True)).get(label, 0)


@dataclass(frozen=True)
class Pages(View):
    """A cache of pages as the block program sees what a table makes of it.

    before: a cache ``[pages, P, H, D]`` through ``table[B, n]``, mapped to ``(B, N, H, D)``;
    after: the labels N, H, D of one page, N with P positions, and the strides of that page. The
    label of the sequences has no stride: the table says where their pages are.

    Attributes:
        table: index of the argument ``[sequences, pages of a sequence]``.
        sequences: their label, None where there is one sequence.
        positions: the label whose runs of ``size`` elements are pages.
        size: positions of a page.
        page_stride: distance in elements between neighbouring pages.
    """

    table: int
    sequences: str | None
    positions: str | None
    size: int
    page_stride: int


@dataclass(frozen=True)
class Output:
    """A stored tensor: an expression over what a loop accumulated, values of rows, and loads."""

    view: View
    expression: ThreadExpression


@dataclass(frozen=True)
class Scratch:
    """Device memory that a kernel needs besides its tensors, given to it after them.

    Attributes:
        shape: the first extent may be symbolic.
        dtype: of the elements.
        zeroed: whether every launch has to find zeros; it leaves zeros behind. No two launches
            that may run at the same time share it.
    """

    shape: tuple[Dim, ...]
    dtype: str
    zeroed: bool


def arguments_of(step: KernelStep, tensors: dict[str, TensorSpec]) -> tuple[Argument, ...]:
    """The kernel's arguments: tensors read, then tensors written, in program order."""

    def argument(name: str, written: bool) -> Argument:
        t = tensors[name]
        return Argument(name, t.shape, t.dtype.name, t.constant, written)

    return (
        *(argument(n, False) for n in step.reads),
        *(argument(n, True) for n in step.writes),
    )


def view_of(op: BlockOp, arguments: tuple[Argument, ...]) -> View:
    """How a load or a store sees its tensor; `Pages` for a load through a table."""
    written = op.kind != LOAD
    index = next(
        i
        for i, a in enumerate(arguments)
        if a.name == op.attributes["tensor"] and a.written == written
    )
    shape = arguments[index].shape
    strides = [prod(extent(d) for d in shape[i + 1 :]) for i in range(len(shape))]
    mapping = op.attributes["map"]
    paged = "table" in op.attributes
    first = 1 if paged else 0  # the table places sequences
    kept = [(d, s) for d, s in zip(mapping[first:], strides[first:], strict=True) if d is not None]
    labels, steps = tuple(d for d, _ in kept), tuple(s for _, s in kept)
    if not paged:
        return View(index, labels, steps)
    table = next(i for i, a in enumerate(arguments) if a.name == op.attributes["table"])
    sequences, positions = mapping[:2]
    size = extent(shape[1])
    return Pages(index, labels, steps, table, sequences, positions, size, strides[0])


def content_key(program: BlockProgram, arguments: tuple[Argument, ...], schedule: Schedule) -> str:
    """Canonical text of everything that decides the generated code.

    Symbolic extents enter by name only: the hint does not change the code. Operators do too, but
    for those that were added to the package's own: what they compute is part of the text.
    """
    shapes = [
        [a.dtype, a.constant, a.written, [d.name if isinstance(d, Symbol) else d for d in a.shape]]
        for a in arguments
    ]
    names = {a.name: i for i, a in enumerate(arguments)}
    data = program_dict(program)
    data["dims"] = [[k, v["symbol"] if isinstance(v, dict) else v] for k, v in data["dims"]]
    for op in data["ops"]:
        for tensor in {"tensor", "table"} & op[3].keys():
            op[3][tensor] = names[op[3][tensor]]
    key = [data, shapes, schedule_dict(schedule)]
    if outside := definitions(op.kind for op in program.ops):
        key.append(outside)
    return json.dumps(key, sort_keys=True, separators=(",", ":"))
