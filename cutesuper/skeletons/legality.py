"""Checks of block programs shared by several skeletons, and structures that they refuse."""

from __future__ import annotations

from dataclasses import replace

from cutesuper.errors import LoweringError
from cutesuper.ir.block import LOAD, KernelStep, TensorSpec
from cutesuper.ir.check import check_block_program, passes
from cutesuper.ir.dims import MAX_ELEMENTS
from cutesuper.ir.unseen import guarded
from cutesuper.targets import Target


def is_chained(step: KernelStep) -> bool:
    """True if a program multiplies a value computed from another product, over a loop axis."""
    ops = step.program.ops
    after: list[bool] = []
    for op in ops:
        over = op.attributes.get("over")
        looped = any(str(a.kind) == "loop" and a.dim == over for a in step.program.axes)
        before = any(after[j] for j in op.inputs)
        if op.facets.contracts and before and looped:
            return True
        after.append(before or op.facets.contracts)
    return False


def refuse_further_walks(step: KernelStep) -> None:
    """Refuse loops that are walked again. Raises LoweringError."""
    where = f"kernel {step.name}"
    for name, count in passes(step.program, check_block_program(step.program)).items():
        if count > 1:
            raise LoweringError(
                f"{where}: it walks {name} {count} times, and kernels walk a loop once; split the "
                "program where a walk ends, or let a block hold the whole label"
            )


def refuse_products(step: KernelStep, target: Target) -> None:
    """Refuse products of matrices for a GPU that has no kernels with any. Raises LoweringError."""
    products = any(op.facets.contracts for op in step.program.ops)
    if products and (why := target.refuses_products()):
        raise LoweringError(f"kernel {step.name}: {why}")


def refuse_many_blocks(step: KernelStep) -> None:
    """Refuse blocks whose number needs 64 bits. Raises LoweringError."""
    if (count := step.program.blocks()) > MAX_ELEMENTS:
        raise LoweringError(
            f"kernel {step.name}: {count} blocks, more than {MAX_ELEMENTS}; split the batch"
        )


def refuse_many_rows(rows: int, where: str) -> None:
    """Refuse rows whose number needs 64 bits. Raises LoweringError."""
    if rows > MAX_ELEMENTS:
        raise LoweringError(f"{where}: {rows} rows, more than {MAX_ELEMENTS}; split the batch")


def refuse_shared_dims(step: KernelStep) -> None:
    """Refuse dimensions of tensors that several labels share. Raises LoweringError."""
    for op in (*step.program.loads(), *step.program.stores()):
        shared = next((e for e in op.attributes["map"] if isinstance(e, tuple)), None)
        if shared is not None:
            raise LoweringError(
                f"kernel {step.name}, {op.kind} of {op.attributes['tensor']}: the labels "
                f"{', '.join(shared)} share a dimension; skeletons take one label for each"
            )


def refuse_index(step: KernelStep, stores: bool = True) -> None:
    """Refuse loads of rows that an index names, and with ``stores`` stores.
    Raises LoweringError."""
    for op in (*step.program.loads(), *(step.program.stores() if stores else ())):
        if "index" in op.attributes:
            does = "stores rows through an index, or a product; put them there after"
            if op.kind == LOAD:
                does = "reads rows through an index; take the rows before"
            raise LoweringError(
                f"kernel {step.name}, {op.kind} of {op.attributes['tensor']} through the index "
                f"{' and '.join(op.tensors[1:])}: only a row kernel {does}"
            )


def without_running_state(step: KernelStep, tensors: dict[str, TensorSpec]) -> KernelStep:
    """The kernel with guards that keep NaN out of rows that are hidden as a whole.
    For skeletons without running maxima and tables of pages; see `ir.unseen`. The attention loop
    has these rules built in.

    Raises:
        LoweringError: the kernel needs either.
    """
    _refuse_running_maxima(step)
    _refuse_tables(step)
    return replace(step, program=guarded(step.program, tensors))


def _refuse_running_maxima(step: KernelStep) -> None:
    """Refuse sums rescaled by a running maximum. Raises LoweringError."""
    for i, op in enumerate(step.program.ops):
        if op.rescaled:
            raise LoweringError(
                f"kernel {step.name}: operation {i} is a sum rescaled by a running maximum over "
                f"{op.attributes['axis']}, which only a loop between two products keeps; let a "
                "block hold the whole label"
            )


def _refuse_tables(step: KernelStep) -> None:
    """Refuse loads of pages through a table. Raises LoweringError."""
    for op in step.program.loads():
        if "table" in op.attributes:
            raise LoweringError(
                f"kernel {step.name}, load of {op.attributes['tensor']} through the table "
                f"{op.attributes['table']}: only the keys and values of attention are read through "
                "a table; gather the pages before"
            )
