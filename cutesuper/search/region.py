"""The search in one region: finds the ways in which kernels can compute it.

It is a pure function of region, target and options, so that regions can be searched in other
processes (`search.search(executor=...)`), and equal regions only once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from math import prod
from typing import Any

import numpy as np

from cutesuper.egraph.clock import OUT_OF_TIME, OutOfTime, late, limited
from cutesuper.egraph.extract import Partial, Structure, extract, structure
from cutesuper.egraph.labelled import LabelledProgram, Region, label
from cutesuper.egraph.saturate import TooLarge, saturate
from cutesuper.egraph.space import Sealing, Space
from cutesuper.egraph.splits import Split
from cutesuper.errors import LoweringError, SearchError, frameless
from cutesuper.ir.block import (
    ENDING,
    LOAD,
    STORE,
    AxisKind,
    BlockOp,
    BlockProgram,
    Part,
    TensorSpec,
)
from cutesuper.ir.check import MAX_PASSES, check_block_program
from cutesuper.ir.dims import extent
from cutesuper.ir.dtypes import LEAST_BYTES
from cutesuper.ir.operators.base import CONSTANT
from cutesuper.ir.precision import EXACT
from cutesuper.search.forms import BlockForm, Recognized, find_form, recognized
from cutesuper.search.general_cost import Model
from cutesuper.search.general_sizes import CLUSTERS, STRIPS, Shape, candidates
from cutesuper.search.rounding import Rounding
from cutesuper.search.written import Written, core, tail
from cutesuper.skeletons.base import Skeleton
from cutesuper.skeletons.cost import Cost, Setting, Sized, additive_price, cheapest
from cutesuper.skeletons.form import Form
from cutesuper.targets import Target


@dataclass(frozen=True)
class SearchOptions:
    """Options of the search.

    Attributes:
        programs_per_split: structures extracted from one split of one region.
        slack: highest cost of a structure, relative to the cheapest of its split, before sizing.
        max_classes: classes of one split (466 is the most that any tried program of one kernel
            needed); past that a region is searched with more values sealed. A skeleton may get a
            part of them: `skeletons.base.Skeleton.class_share`.
        sizes_per_structure: sized programs kept of one structure.
        keep: candidates returned.
        seed: seed of the random field point that tells classes apart.
        lowered: search only for kernels that a skeleton of the lowering runs.
        dependent_launch: kernels are launched before their predecessor has ended.
    """

    programs_per_split: int = 8
    slack: float = 1.5
    max_classes: int = 500
    sizes_per_structure: int = 8
    keep: int = 16
    seed: int = 0
    lowered: bool = False
    dependent_launch: bool = False


@dataclass
class Counts:
    """Counters of a search.

    Attributes:
        regions: different regions.
        splits, feasible: splits tried, and those under which every output can be computed.
        classes, tried: classes kept, and results formed to find them.
        largest: classes of the largest split.
        programs: structures extracted.
        pruned: number of regions, structures and sizes that were left out, by reason.
    """

    regions: int = 0
    splits: int = 0
    feasible: int = 0
    classes: int = 0
    tried: int = 0
    largest: int = 0
    programs: int = 0
    pruned: Counter[str] = field(default_factory=Counter)

    def add(self, other: Counts) -> None:
        """Add another search's counters to these."""
        self.regions += other.regions
        self.splits += other.splits
        self.feasible += other.feasible
        self.classes += other.classes
        self.tried += other.tried
        self.largest = max(self.largest, other.largest)
        self.programs += other.programs
        self.pruned.update(other.pruned)


@dataclass(frozen=True)
class Way:
    """One way to run a region.

    Attributes:
        programs: sized block programs over ``in0``, ..., ``part0``, ..., ``out0``, ...; two where
            the blocks of the first leave partial results for the second.
        partials: the tensors between them.
        costs: cost of each program.
        structure: numbers the programs of a region without their sizes.
        lowered: True if a skeleton of the lowering runs it.
    """

    programs: tuple[BlockProgram, ...]
    partials: tuple[Partial, ...]
    costs: tuple[Cost, ...]
    structure: int
    lowered: bool

    @property
    def total(self) -> float:
        """Total cost in microseconds."""
        return sum(c.total for c in self.costs)


@dataclass(frozen=True)
class Found:
    """The ways to run a region, cheapest first, or the reason for having none.
    That is a LoweringError where a skeleton would run it, but for the structure of the program."""

    ways: tuple[Way, ...]
    error: SearchError | LoweringError | None
    counts: Counts


#: most operators of a program that is saturated; longer ones are run as they are written. With 180
#: in two chains around a softmax, saturation took 4 s and found nothing else
MAX_SATURATED = 32
#: levels of sealing at which a region with too many classes is searched again: see `Space`
SEALING: tuple[Sealing, ...] = (0, 1, 2)
#: least elements of an operand that blocks should not all read again (2 MB), and least columns of a
#: product that many blocks divide
LARGE_OPERAND, MANY_COLUMNS = 1 << 20, 1024
#: most products that depend on each other in one kernel; a three-layer MLP has three, attention
#: two. With MAX_TRIED it keeps layers that are too small for `LARGE_OPERAND` from taking minutes
MAX_DEPTH = 3
#: results formed in one region after which no further splits are tried (2 s; attention's backward
#: pass in one kernel takes 20,000)
MAX_TRIED = 30_000
#: most ways to run a region that differ only in sizes and the order of operators
ALIKE = 3
#: most structures of a region of any form that are sized (2 to 5 ms each)
MAX_STRUCTURES = 96


def search_region(
    region: Region, target: Target, options: SearchOptions, seconds: float = float("inf")
) -> Found:
    """All ways worth keeping to compute a region by one kernel, or by a pair of kernels.

    Args:
        region: the region to compute.
        target: the device.
        options: see `SearchOptions`.
        seconds: time after which the search of the region stops.
    """
    search = _RegionSearch(region, target, options)
    try:
        with limited(seconds):
            return Found(tuple(search.run()), None, search.counts)
    except (SearchError, LoweringError) as error:
        search.counts.pruned[str(error)] += 1
        return Found((), frameless(error), search.counts)


def tensors_of(region: Region) -> dict[str, TensorSpec]:
    """The tensors of a region's programs: ``in0``, ``in1``, ..., then ``out0``, ``out1``, ....
    The index through which ``in1`` is read is ``index1``, and ``in1`` is the table. Where ``out0``
    is put into a tensor, ``place0`` is its index, and ``place0_1`` the second one."""
    shapes = region.inputs + region.output_shapes
    names = [f"in{i}" for i in range(len(region.inputs))]
    names += [f"out{i}" for i in range(len(region.outputs))]
    dtypes = region.input_dtypes + region.output_dtypes
    specs = {n: TensorSpec(n, s, t) for n, s, t in zip(names, shapes, dtypes, strict=True)}
    for t in region.taken:
        name, index = f"in{t.input}", f"index{t.input}"
        specs[name] = replace(specs[name], shape=t.table)
        specs[index] = TensorSpec(index, t.index, t.index_dtype)
    for p in region.put:
        name = f"out{p.output}"
        specs[name] = replace(specs[name], shape=p.base)
        for index, dtype in zip(p.places(), p.index_dtypes, strict=True):
            specs[index] = TensorSpec(index, p.index, dtype)
    for name, place in region.parts:
        whole = f"whole of {name}"
        specs[whole] = TensorSpec(whole, place.whole, specs[name].dtype)
        specs[name] = replace(specs[name], part=Part(whole, place.starts))
    return specs


def _precise(program: BlockProgram, region: Region) -> BlockProgram:
    """The program with the precision of the region's products."""
    precision = next(iter(region.precisions), EXACT)
    if precision == EXACT:
        return program
    ops = (
        replace(op, attributes=op.attributes | {"precision": precision})
        if op.facets.contracts
        else op
        for op in program.ops
    )
    return replace(program, ops=tuple(ops))


def in_a_chain(region: Region, target: Target) -> bool:
    """True if a region is run as chained products.
    Such regions are searched only if both ends are waists: with norms of Q, K and V there are 20
    more of them, 0.3 to 1 s each."""
    if sum(op.facets.contracts for op in region.ops) < 2:
        return False
    try:
        return recognized(region, target)[1].skeleton.between_waists
    except SearchError:
        return False


class _RegionSearch:
    def __init__(self, region: Region, target: Target, options: SearchOptions) -> None:
        self.region, self.target, self.options = region, target, options
        self.counts = Counts(regions=1)
        self.setting = Setting(target, tensors_of(region), options.dependent_launch)
        self._known: dict[object, int] = {}
        self._skeletons = 0  # number of these structures that a skeleton runs
        self._refused: list[LoweringError] = []  # by a skeleton, where it planned them

    def run(self) -> list[Way]:
        """Ways that a skeleton of the lowering runs, and programs of any form, cheapest first."""
        reasons: list[SearchError] = []
        found = self._attempt(self._by_skeleton, reasons)
        self._skeletons = len(self._known)
        if not self.options.lowered:
            found += self._attempt(self._general, reasons)
        if not found:
            raise (*self._refused, *reasons, SearchError("no structure fits the device"))[0]
        found.sort(key=lambda w: w.total)
        if not self.options.lowered:
            found = _diverse(found)
        return found[: 2 * self.options.keep]

    def _attempt(self, search: Callable[[], list[Way]], reasons: list[SearchError]) -> list[Way]:
        try:
            return search()
        except SearchError as error:
            self.counts.pruned[OUT_OF_TIME] += isinstance(error, OutOfTime)
            reasons.append(frameless(error))
            return []

    def _by_skeleton(self) -> list[Way]:
        program, by = recognized(self.region, self.target)
        self._rounding = Rounding(self.region, program)
        if not by.skeleton.searches(by.form):
            return self._as_written(program, by)
        space = by.skeleton.prepared(program, by.form)
        if space is not None:
            return list(self._skeleton(by, space))
        reasons: list[SearchError] = []
        found = self._attempt(lambda: self._sealed(program, by), reasons)
        other = None if found else by.skeleton.otherwise(program, by.form)
        if other is not None:
            return self._sealed(other, find_form(self.region, other, self.target))
        if reasons:
            raise reasons[0]
        return found or self._written(program, by)  # normal forms refuse a - (a + b)

    def _general(self) -> list[Way]:
        program = label(self.region)
        if not program.dims:
            raise SearchError("all tensors have one element; no kernel is made for that")
        again = _too_long(program) or _computed_again(program)
        if again is not None:
            self.counts.pruned[again] += 1
            raise SearchError(again)
        return self._levels(program, lambda space: self._blocks(BlockForm(), space))

    def _sealed(self, program: LabelledProgram, by: Recognized) -> list[Way]:
        """The ways with as few values sealed as the limits allow, else the program as written."""
        try:
            return self._levels(program, lambda space: list(self._skeleton(by, space)))
        except (TooLarge, OutOfTime) as error:
            self.counts.pruned[str(error) if late() else "too long: as it is written"] += 1
            found = self._written(program, by)
            if found:
                return found
            raise

    def _levels(self, program: LabelledProgram, search: Callable[[Space], list[Way]]) -> list[Way]:
        """Seal more and more. Raises TooLarge if even sealed values give too many classes."""
        if sum(op.kind not in (LOAD, CONSTANT) for op in program.ops) > MAX_SATURATED:
            raise TooLarge(f"more than {MAX_SATURATED} operators; compute the program in pieces")
        error, tried = TooLarge(""), set[object]()
        for level in SEALING:
            space = Space(program, level, exact=self.region.exact)
            if space.forms in tried:
                continue  # what this level seals was an atom before
            if tried:
                self.counts.pruned["too many classes: more values sealed"] += 1
            tried.add(space.forms)
            try:
                return search(space)
            except TooLarge as e:
                error = frameless(e)
        raise error

    # ----------------------------------------------------------------------- what skeletons run

    def _skeleton(
        self,
        by: Recognized,
        space: Space,
        finish: Callable[[BlockProgram, Split], BlockProgram | None] | None = None,
    ) -> Iterator[Way]:
        """Sized programs of all splits of a form that the lowering supports.

        ``finish``: adds the operations that were not searched, to a program of one kernel.
        """
        keep = self.options.programs_per_split
        for split in by.form.splits(space.program):
            structures = self._structures(by.skeleton, by.form, space, split, keep)
            if not structures:
                return  # a split with one axis more is not feasible either
            for _, found in structures:
                if len(found.programs) == 2:
                    yield from [] if finish else self._in_parts(by, found)
                    continue
                program = finish(found.programs[0], split) if finish else found.programs[0]
                if program is not None:
                    yield from self._sized(by, program)

    def _sized(self, by: Recognized, program: BlockProgram) -> Iterator[Way]:
        form, program = by.form, _precise(program, self.region)
        reason = (
            _vanished(form, program) or form.refuses(program) or self._rounding.refuses(program)
        )
        if reason is not None:
            self.counts.pruned[reason] += 1
            return
        try:
            sizes = by.skeleton.sizes(program, form, self.setting, self.counts.pruned)
            best = cheapest(sizes, self.options.sizes_per_structure)
        except LoweringError as error:
            self._refused.append(frameless(error))
            return
        if best:  # else a program of any form may still run it
            number = self._number(program)
            yield from (Way((s.program,), (), (s.cost,), number, True) for s in best)

    def _in_parts(self, by: Recognized, found: Structure) -> Iterator[Way]:
        """Ways in two kernels, of which the second combines what blocks of the first leave."""
        number = self._number(*found.programs)
        for first in self._sized(by, found.programs[0]):
            program = _with_parts(found, first.programs[0])
            setting = self.setting.beside(first.programs[0].partials())
            sized = by.skeleton.restructured(program, setting)
            if sized is None:
                continue
            sizes = by.skeleton.sizes(*sized, setting, self.counts.pruned)
            for second in cheapest(sizes, 1):
                programs = (*first.programs, second.program)
                costs = (*first.costs, second.cost)
                yield Way(programs, found.partials, costs, number, True)

    def _written(self, program: LabelledProgram, by: Recognized) -> list[Way]:
        """The program as written; the part up to the last reduction is searched if it is short."""
        form, begun = by.form, core(program, tail(program))
        if begun is not None:
            before, wanted = begun

            def finish(found: BlockProgram, split: Split) -> BlockProgram | None:
                return Written(program, split, found, wanted).program(form)

            with suppress(TooLarge, OutOfTime):
                found = self._levels(before, lambda s: list(self._skeleton(by, s, finish)))
                if found:
                    return found
        return self._as_written(program, by)

    def _as_written(self, program: LabelledProgram, by: Recognized) -> list[Way]:
        """The whole program as written, under every split of its form."""
        whole = (Written(program, split).program(by.form) for split in by.form.splits(program))
        return [way for p in whole if p is not None for way in self._sized(by, p)]

    def _structures(
        self, skeleton: Skeleton | None, form: Form, space: Space, split: Split, count: int
    ) -> list[tuple[float, Structure]]:
        share = skeleton.class_share(space.program) if skeleton else 1.0
        limit = int(share * self.options.max_classes)
        table = saturate(space, split, form, limit, self.options.seed)
        self.counts.splits += 1
        self.counts.classes += len(table.classes)
        self.counts.tried += table.tried
        self.counts.largest = max(self.counts.largest, len(table.classes))
        itemsize = self.region.output_dtypes[0].itemsize
        if skeleton is None:
            cost = additive_price(table, None, self.target, itemsize)
        else:
            cost = skeleton.price(table, form, self.target, itemsize)
        extracted = extract(table, cost, count, self.options.slack)
        self.counts.feasible += bool(extracted)
        self.counts.programs += len(extracted)
        return [(e.cost, structure(table, e)) for e in extracted]

    def _number(self, *programs: BlockProgram) -> int:
        for program in programs:
            check_block_program(program)
        return self._known.setdefault(_key(programs), len(self._known))

    # ------------------------------------------------------------------------------ any form

    def _blocks(self, form: BlockForm, space: Space) -> list[Way]:
        """Sized programs of all splits that block programs can express."""
        found: list[tuple[float, Structure]] = []
        infeasible: set[tuple[object, ...]] = set()
        for split in form.splits(space.program):
            if late():
                self.counts.pruned[OUT_OF_TIME] += 1
                break
            if self.counts.tried > MAX_TRIED:
                self.counts.pruned["enough results formed: no further splits"] += 1
                break
            if any(s.kinds in infeasible for s in _smaller(split)):
                infeasible.add(split.kinds)
                continue
            if self._hopeless(space.program, split):
                self.counts.pruned["whole dimensions exceed the shared memory"] += 1
                continue
            try:
                structures = self._least_passes(form, space, split)
            except OutOfTime:
                continue  # which ends the loop
            if not structures:
                infeasible.add(split.kinds)
            found += structures
        found.sort(key=lambda f: f[0])
        ways: list[Way] = []
        for _, s in found[:MAX_STRUCTURES]:
            if ways and late():
                self.counts.pruned[OUT_OF_TIME] += 1
                break
            ways += self._sizes(form, s)
        return ways

    def _least_passes(
        self, form: BlockForm, space: Space, split: Split
    ) -> list[tuple[float, Structure]]:
        looped = any(a.kind == AxisKind.LOOP for a in split.axes)
        for passes in range(split.passes, (MAX_PASSES if looped else 1) + 1):
            found = self._structures(None, form, space, replace(split, passes=passes), 3)
            if found:
                return found
        return []

    def _hopeless(self, program: LabelledProgram, split: Split) -> bool:
        """True if even the smallest tiles leave a tensor too large for a block."""
        kinds = dict(split.kinds)
        strip = 1 if program.of_kind("matmul") else STRIPS[0]

        def least(d: str) -> float:
            whole = extent(program.dims[d])
            if AxisKind.LOOP in kinds[d]:
                return min(strip, whole)
            if kinds[d] == (AxisKind.CLUSTER,):
                return whole / CLUSTERS[-1]
            return 1 if kinds[d] else whole

        most = self.target.shared_bytes // LEAST_BYTES
        return any(prod(map(least, op.labels)) > most for op in program.of_kind("load"))

    def _sizes(self, form: BlockForm, found: Structure) -> list[Way]:
        reason = form.refuses(found.programs[0])
        if reason is None and len(found.programs) == 2 and _iterates(found.programs[1]):
            reason = "a second kernel with a loop of its own"
        if reason is not None:
            self.counts.pruned[reason] += 1
            return []
        number = self._number(*found.programs)
        if number < self._skeletons:
            return []  # a skeleton runs it, and has priced it
        itemsizes = self.setting.itemsizes | {p.name: 4 for p in found.partials}
        ways: list[Way] = []
        for first in self._best(found.programs[0], itemsizes):
            if len(found.programs) == 1:
                ways.append(Way((first.program,), (), (first.cost,), number, False))
                continue
            second = self._best(_with_parts(found, first.program), itemsizes)
            if second:
                ways.append(
                    Way(
                        (first.program, second[0].program),
                        found.partials,
                        (first.cost, second[0].cost),
                        number,
                        False,
                    )
                )
        return ways

    def _best(self, program: BlockProgram, itemsizes: dict[str, int]) -> list[Sized]:
        shape = Shape(program)
        sizes = candidates(shape, self.target)
        if not sizes.count:
            return []
        model = Model(shape, sizes, self.target, itemsizes)
        memory, registers = model.fits()
        self.counts.pruned["tiles exceed the shared memory"] += int((~memory).sum())
        self.counts.pruned["tiles exceed the registers"] += int((memory & ~registers).sum())
        total, parts = model.price()
        total = np.where(memory & registers, total, np.inf)
        order = np.argsort(total, kind="stable")[: self.options.sizes_per_structure]
        return [
            Sized(sizes.program(program, int(i)), model.cost(total, parts, int(i)))
            for i in order
            if np.isfinite(total[i])
        ]


def _vanished(form: Any, program: BlockProgram) -> str | None:
    """Reason why a form no longer runs its program: a label that the form names is gone.

    before: ``sum(x) - sum(x) + y``, a form along the label that is summed; after: ``y``.
    """
    named = [getattr(form, f.name) for f in fields(form)]
    gone = [d for d in named if isinstance(d, str) and d not in program.dims]
    return f"nothing is left along {', '.join(gone)}" if gone else None


def _diverse(ways: list[Way]) -> list[Way]:
    """At most `ALIKE` ways with the same axes: moving a scale does not make another program."""
    alike: Counter[object] = Counter()
    kept: list[Way] = []
    for way in ways:
        key = way.lowered, tuple(tuple(a.name for a in p.axes) for p in way.programs)
        alike[key] += 1
        if alike[key] <= ALIKE:
            kept.append(way)
    return kept


def _too_long(program: LabelledProgram) -> str | None:
    """Reason to skip a chain of products: no block can hold all values in between; else None."""
    depth: list[int] = []
    for op in program.ops:
        before = max((depth[i] for i in op.inputs), default=0)
        depth.append(before + (op.facets.contracts))
    if max(depth) > MAX_DEPTH:
        return f"more than {MAX_DEPTH} products, each of what the one before gives"
    return None


def _computed_again(program: LabelledProgram) -> str | None:
    """Reason to skip a chain of products: every block would compute the first one again; else None.

    before: ``(X A) B`` with A of 33 MB and 4096 columns of B, which blocks divide; cut after
    ``X A``, A is read once.
    """
    large: list[bool] = []
    for op in program.ops:
        after = any(large[i] for i in op.inputs)
        if op.facets.contracts:
            a, b = (program.ops[i].labels for i in op.inputs)
            columns = _extent(program, b - a)
            if after and columns >= MANY_COLUMNS:
                return "a chain of large products: every block would compute the first one again"
            after = after or max(_extent(program, a), _extent(program, b)) >= LARGE_OPERAND
        large.append(after)
    return None


def _extent(program: LabelledProgram, labels: frozenset[str]) -> int:
    return prod(extent(program.dims[d]) for d in labels)


def _smaller(split: Split) -> Iterator[Split]:
    """The splits with one axis less."""
    for label_, kinds in split.kinds:
        for k in kinds:
            less = tuple(x for x in kinds if x != k)
            yield replace(
                split,
                kinds=tuple((d, less if d == label_ else ks) for d, ks in split.kinds),
            )


def _iterates(program: BlockProgram) -> bool:
    return any(op.kind in ENDING for op in program.ops)


def _with_parts(found: Structure, first: BlockProgram) -> BlockProgram:
    """The second kernel, for the number of partial results that the first one leaves."""
    second = found.programs[1]
    (axis,) = {
        d
        for op in first.ops
        if op.kind == STORE and op.attributes["tensor"].startswith("part")
        for d in op.attributes["map"]
        if d not in first.dims
    }
    n = first.parts(first.axis(axis))
    assert found.parts is not None
    return replace(
        second,
        dims={**second.dims, found.parts: n},
        tile={**second.tile, found.parts: n},
    )


def _key(programs: tuple[BlockProgram, ...]) -> object:
    """A key of programs that is equal for equal operations and axes (dictionaries have no hash)."""

    def own(op: BlockOp) -> object:
        attributes = sorted((k, repr(v)) for k, v in op.attributes.items())
        return op.kind, op.inputs, op.dims, tuple(attributes)

    return tuple((p.axes, tuple(map(own, p.ops))) for p in programs)
