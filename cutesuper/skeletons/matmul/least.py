"""Lower bounds of costs of matmul loops: the best tiles, for the least work of a block.

Waves of blocks take at least as long as the same work spread evenly, and as one wave, whatever
overlaps. Terms and constants are those of `skeletons.matmul.cost`; what is not known before a
search (further products, epilogues, exchanges) counts as nothing.

before: ``silu(X) W`` for 256x768x3072 in bf16 on an H200, 3.0 us for a launch and memory;
after, as helper warps rewrite the rows: 6.5; what a search finds takes 10.7.
"""

from __future__ import annotations

from functools import lru_cache
from math import inf, prod
from typing import NamedTuple

from cutesuper.egraph.labelled import LabelledOp, LabelledProgram
from cutesuper.ir.block import AxisKind, BlockProgram
from cutesuper.ir.dims import Dim, ceil_div, extent
from cutesuper.skeletons.cost import MIN_STAGES, overlapped
from cutesuper.skeletons.matmul.copies import HALF_BYTES
from cutesuper.skeletons.matmul.cost import at_rows, multiplied_us
from cutesuper.skeletons.matmul.form import MatmulForm
from cutesuper.skeletons.matmul.plan import COLUMN_BLOCK, FEW_ROWS
from cutesuper.skeletons.matmul.sizes import programs
from cutesuper.targets import Target


class Work(NamedTuple):
    """The work of every program of a region beside products.

    ``reads``: helper warps compute statistics of the rows from the stages; ``rewrites``: they write
    what the tensor cores read, for which they compute the functions ``kinds`` of every element;
    ``ending``: functions of every result.
    """

    reads: bool
    rewrites: bool
    kinds: frozenset[str]
    ending: frozenset[str]

    def per_element_us(self, target: Target) -> float:
        """Time of an element of a tile in helper warps."""
        r = target.rates
        rate = r.prologue_per_us if self.rewrites else r.statistic_per_us if self.reads else inf
        return 1 / rate + _functions_us(self.kinds, target)


def _functions_us(kinds: frozenset[str], target: Target) -> float:
    """Time of these functions of one element."""
    r = target.rates
    return sum(r.instructions.get(k, 1) for k in kinds) / r.lanes_per_us


class _Size(NamedTuple):
    """The least times of kernels with these tiles, in microseconds.

    ``again``: bytes that memory reads once more; ``loop``: causes that overlap with the memory,
    ``tensor`` with all of them; ``ends``: what overlaps with nothing.
    """

    again: float
    loop: tuple[float, ...]
    tensor: float
    ends: float


def least_us(program: LabelledProgram, form: MatmulForm, target: Target, memory_us: float) -> float:
    """Microseconds below which `matmul.cost.price` is for no program of a form.

    ``memory_us``: time in which memory moves each tensor once.
    """
    if form.beside:  # blocks work for columns of several widths
        return target.launch_us + memory_us
    dims = tuple(program.dims.items())
    target = at_rows(extent(program.dims[form.row]), target)
    r = target.rates
    found = (
        size.ends
        + overlapped(
            r.tensor_overlap,
            overlapped(r.overlap, memory_us + size.again / target.bandwidth * 1e6, *size.loop),
            size.tensor,
        )
        for size in _sizes(form, dims, work_of(program, form), target)
    )
    return target.launch_us + min(found, default=memory_us)


def work_of(program: LabelledProgram, form: MatmulForm) -> Work:
    """The least work of a program with its rows: they are rewritten, read, or neither.
    Rows are rewritten where a product takes functions or products of them, or columns that are
    scaled; they are read where they have statistics. All else may be moved behind the product.
    Of many 16-bit rows neither is needed: vectors multiply columns in registers, and blocks share
    out the statistics (`MatmulPlan.can_scale_columns`, `can_reduce_once`)."""
    rows = {form.row, form.contracted}
    many = extent(program.dims[form.row]) > FEW_ROWS and form.element_bytes == HALF_BYTES
    chain = set[int]()
    for i in reversed(range(len(program.ops))):
        op = program.ops[i]
        multiplies = op.facets.contracts and op.over == form.contracted
        if multiplies or (i in chain and op.over is None):
            chain |= {j for j in op.inputs if rows <= program.ops[j].labels}
    stays = [op for i in chain if _stays(program, op := program.ops[i], form, many)]
    reads = not many and any(
        op.over == form.contracted and not op.facets.contracts
        and form.row in program.ops[op.inputs[0]].labels for op in program.ops
    )  # fmt: skip
    kinds = frozenset(op.kind for op in stays if _is_function(op))
    done, ended = {form.column, form.contracted}, frozenset((form.column,))
    ending = frozenset(
        op.kind for op in program.ops if op.labels & done == ended and _is_function(op)
    )
    return Work(reads, bool(stays), kinds, ending)


def _is_function(op: LabelledOp) -> bool:
    """True for a function of one number that has no algebra."""
    f = op.facets
    plain = f.elementwise and op.over is None and len(op.inputs) == 1
    return plain and f.powers is None and f.signs is None and not f.converts


def _stays(program: LabelledProgram, op: LabelledOp, form: MatmulForm, many: bool) -> bool:
    """True for a function of one number, a product of rows, and one with a vector of the loop.
    Not for the last if there are many rows."""
    if _is_function(op):
        return True
    operands = [program.ops[j].labels for j in op.inputs]
    along = [form.row in x for x in operands if form.contracted in x]
    multiplies = op.facets.elementwise and op.facets.powers is not None and len(op.inputs) > 1
    return multiplies and (along.count(True) > 1 or (False in along and not many))


@lru_cache(4096)
def _sizes(
    form: MatmulForm, dims: tuple[tuple[str, Dim], ...], work: Work, target: Target
) -> tuple[_Size, ...]:
    """The least at all tiles and axes that a search would price."""
    splits = form.splits(LabelledProgram(dict(dims), (), ()))
    bare = (BlockProgram(dict(dims), s.axes, dict.fromkeys(dict(dims), 1), ()) for s in splits)
    return tuple(
        _size(sized, form, work, target) for p in bare for sized in programs(p, form, target)
    )


def _size(sized: BlockProgram, form: MatmulForm, work: Work, target: Target) -> _Size:
    r, (m, n, k) = target.rates, _tile(sized, form)
    blocks = prod(sized.parts(a) for a in sized.axes if a.kind != AxisKind.LOOP)
    loop = sized.parts_along(form.contracted, AxisKind.LOOP)
    stage, on_one = form.element_bytes * k * (m + n), loop * max(1.0, blocks / target.sms)
    stages = max(MIN_STAGES, target.shared_bytes // stage)
    rows, columns = (extent(sized.dims[d]) for d in (form.row, form.column))
    weights = form.element_bytes * extent(sized.dims[form.contracted]) * columns * (n > 0)
    return _Size(
        r.reread * weights * (1 - 1 / ceil_div(rows, m)),
        (
            on_one * stage / r.sm_bytes_per_us,
            blocks * loop * form.element_bytes * k * n / target.l2_bandwidth * 1e6,
            loop * r.iteration_us + on_one * m * k * work.per_element_us(target),
            on_one * r.latency_us / (stages - 1),
            on_one
            * (stage + form.element_bytes * k * n * (1 + m / COLUMN_BLOCK))
            / r.shared_bytes_per_us,
        ),
        on_one * multiplied_us(2.0 * m * n * k, m * n, target) / target.doubled if n else 0.0,
        r.first_stage * stage / r.sm_bytes_per_us + _end_us(sized, form, work, target),
    )


def _tile(sized: BlockProgram, form: MatmulForm) -> tuple[int, int, int]:
    """Rows, columns and depth of a tile.
    No columns where the loop may compute nothing but what lies between two products."""
    m, n, k = (sized.tile[d] for d in (form.row, form.column, form.contracted))
    return m, 0 if form.hidden else n, k


def _end_us(sized: BlockProgram, form: MatmulForm, work: Work, target: Target) -> float:
    """Time after the loop of the blocks of an SM, one after the other."""
    r, (m, n, _) = target.rates, _tile(sized, form)
    blocks = prod(sized.parts(a) for a in sized.axes if a.kind != AxisKind.LOOP)
    shared, spread = (
        sized.parts_along(d, AxisKind.CLUSTER) for d in (form.contracted, form.column)
    )
    rounds = ceil_div(blocks, shared * spread * target.clusters[shared * spread])
    finished = m * n / (shared * sized.parts_along(form.contracted, AxisKind.GRID))
    store = finished * min(r.store_us, r.cluster_store_us) / 1024
    reduction = r.column_reduction_us + (spread > 1) * r.cluster_reduction_us
    ending = finished * _functions_us(work.ending, target)
    return rounds * (store + ending + form.reduced * reduction)
