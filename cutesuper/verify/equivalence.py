"""Equivalence test of a muGraph and a kernel graph over a finite field.

Both programs are evaluated on the same uniformly random residues (`cutesuper.ir.field`), at small
extents that exercise every axis (`cutesuper.verify.extents`), several times, and once more with
tails; on request once at the real extents. Equal programs always pass; the chance that unequal ones
pass is given by `Verification.bound_log2`. The argument, its conditions and its limits are in
``docs/verification.md``.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from math import ceil, inf
from secrets import randbits
from typing import Any, Literal

import numpy as np

from cutesuper.errors import CutesuperError, GraphError
from cutesuper.ir.arguments import check_options
from cutesuper.ir.block import MuGraph
from cutesuper.ir.border import inside, inside_mugraph
from cutesuper.ir.check import check_graph, check_is_mugraph, check_mugraph
from cutesuper.ir.dims import show_shape
from cutesuper.ir.field import (
    SMALLEST,
    DivisionByZero,
    FieldValue,
    NoNumber,
    Primes,
    Unbounded,
    align,
    draw_primes,
)
from cutesuper.ir.graph import KernelGraph
from cutesuper.ir.operators.base import CONSTANT, TABLE, Counts
from cutesuper.ir.unseen import empty_quotients
from cutesuper.verify.bound import (
    Bound,
    Degrees,
    Source,
    affine_inputs,
    degrees,
    error_bound,
    source_degrees,
)
from cutesuper.verify.domain import NOWHERE, FieldDomain, Undefined, draw
from cutesuper.verify.exponents import RecordingDomain, arguments_match, jointly_uniform
from cutesuper.verify.extents import SizeChooser, Sizes, real_sizes, resized_graph
from cutesuper.verify.integers import NEAR_TRIALS, Integers, draw_integers, integers_read
from cutesuper.verify.source import evaluate_graph, names_of
from cutesuper.verify.tiles import CHUNK_ELEMENTS, BlockRun, exponents_loaded

#: draws of one trial before a division by zero counts as the program's fault
DRAWS = 6
#: further trials of programs whose conditions hid nothing in the others: with one row of three
#: elements that was so for 9% of all seeds
MORE_TRIALS = 24
#: a maximum reveals a left-out element only if that element is the largest
MAX_TRIALS = 16
#: trials of programs that read integers: labels are tried with this many integers that are no
#: label, two rows have one of them in each trial; a single sequence is whole in one trial, empty in
#: another; conditions hide other elements in each
INTEGER_TRIALS = 6
#: trials of programs that read labels beside other integers: with six, a label was at what only a
#: length hides in 17 of 20 seeds
LABEL_TRIALS = NEAR_TRIALS + 24
#: shares of conditions that do not hold, in the trials in turn
FAILING = (1 / 4, 31 / 32, 0.0, 1 / 2, 3 / 4, 7 / 8)
#: pairs of primes used by the trials in turn
FIELDS = 3
#: number of results of the kernel graph to keep, by extents and trial
KEPT = 256

#: meaning of ``max``: fresh values, or the largest in a random order
Mode = Literal["shift", "order"]


@dataclass(frozen=True)
class Counterexample:
    """One element on which the two programs differ.

    Attributes:
        output: its name.
        index: place in the output.
        expected: residue mod p of the kernel graph; 2^31 - 1 is -inf.
        found: residue mod p of the muGraph.
        inputs: shapes of the inputs in that trial.
    """

    output: str
    index: tuple[int, ...]
    expected: int
    found: int
    inputs: dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Verification:
    """The result of a check; true if the programs are equal.

    Attributes:
        equal: no trial found a difference.
        trials: evaluations of both programs that were compared.
        bound_log2: log2 of the chance that programs which differ at ``extents`` (and at the lengths
            and tables of a trial, if there are any) pass all trials there; None if no bound
            can be stated.
        conditions: the assumptions of the bound, or the reason why there is none.
        reason: why the programs are not equal.
        of_graph: the kernel graph has no value that a program could be compared with.
        counterexample: an element that differs.
        extents: shapes of the inputs at which the trials of the bound ran.
        real_extents: true if the programs were also compared at their real extents, once.
        real_bound_log2: the same chance for that one comparison; None if none is stated.
        seed: with which `Verifier` comes to this result again.
    """

    equal: bool
    trials: int
    bound_log2: float | None
    conditions: str
    reason: str | None = None
    of_graph: bool = False
    counterexample: Counterexample | None = None
    extents: dict[str, tuple[int, ...]] = field(default_factory=dict)
    real_extents: bool = False
    real_bound_log2: float | None = None
    seed: int = 0

    def __bool__(self) -> bool:
        return self.equal

    def summary(self) -> str:
        """The result as one sentence."""
        if not self.equal:
            return f"not equal: {self.reason} (seed {self.seed})"
        at = ", ".join(f"{n}{show_shape(s)}" for n, s in self.extents.items())
        bound = (
            f"false accept below 2^{ceil(self.bound_log2)}"
            if self.bound_log2 is not None
            else "no error bound"
        )
        real = "; also at real extents" if self.real_extents else ""
        if self.real_bound_log2 is not None:
            real += f" (once, 2^{ceil(self.real_bound_log2)})"
        return (
            f"equal in {self.trials} trials at {at}{real}; {bound} ({self.conditions}); "
            f"seed {self.seed}"
        )


@dataclass(frozen=True)
class _Trial:
    """One draw: inputs, the kernel graph's results, and arguments that may have no value.
    ``whole``: rows that a condition hides as a whole have values."""

    seed: int
    primes: Primes
    failing: float
    inputs: tuple[FieldValue | Integers, ...]
    whole: bool = True
    outputs: tuple[FieldValue, ...] = ()
    undefined: Undefined = NOWHERE

    def domain(self, mode: Mode, other: int) -> FieldDomain:
        """The field of this trial; fresh values for maxima differ with ``other``."""
        shifts = np.random.default_rng([7, self.seed + other]) if mode == "shift" else None
        return FieldDomain(self.seed, shifts, self.primes, self.failing, self.whole)

    def recording(self) -> RecordingDomain:
        """The field of this trial with maxima of zero, recording the arguments of exponentials."""
        return RecordingDomain(self.seed, self.primes, self.failing, self.whole)


@dataclass(frozen=True)
class _Kinds:
    """Kinds of operators in two programs.

    Attributes:
        maxima, exponentials, hides: true if there are any.
        drawn: kinds of values that a trial draws besides elements of the field.
    """

    maxima: bool
    exponentials: bool
    hides: bool
    drawn: tuple[str, ...]


@dataclass(frozen=True)
class _Task:
    """A muGraph with its small extents, without and with tails; ``full``: and at the real ones."""

    mu: MuGraph
    exact: Sizes
    ragged: Sizes
    has: _Kinds
    full: bool


class Verifier:
    """Checks many muGraphs against one kernel graph and shares its evaluation.

    Args:
        graph: the kernel graph.
        seed: chooses the primes and all inputs; equal seeds give equal results. None: an
            unpredictable one, `Verification.seed`.
        trials: at exact small extents, besides one with tails.
    """

    def __init__(self, graph: KernelGraph, seed: int | None = None, trials: int = 3) -> None:
        check_graph("verify", graph)
        seed = randbits(32) if seed is None else seed
        check_options(seed=seed, trials=trials)
        self.graph, self.border = inside(graph.expanded())
        self.seed, self.trials = seed, trials
        self._choose = SizeChooser(self.graph)
        self._kinds = {n.operator for n in self.graph.nodes}
        if read := integers_read(self.graph):
            beside = Counts.LABELS in read and read & {Counts.LENGTHS, Counts.LIMITS}
            self.trials = max(self.trials, LABEL_TRIALS if beside else INTEGER_TRIALS)
        self._primes: list[Primes] = []
        self._apart: dict[Any, bool] = {}
        self._known: OrderedDict[Any, _Trial | DivisionByZero] = OrderedDict()
        self._degrees: dict[Any, Source] = {}
        #: by extents: for each `hide` of the graph, true if it hid anything in a draw without
        #: undefined values
        self._hid: dict[Any, list[bool]] = {}
        self._graphs: dict[Any, KernelGraph] = {}
        self._uniform_at: dict[Any, bool] = {}

    def check(self, mu: MuGraph, bound: bool = True, full: bool = False) -> Verification:
        """Compare a muGraph with the kernel graph.

        Args:
            mu: of any kind; an illegal one is not equal.
            bound: work out `Verification.bound_log2`.
            full: also one trial at the real extents.
        """
        try:
            result = self._check(mu, bound, full)
        except DivisionByZero as error:
            result = _without_value(self.graph, error)
        except CutesuperError as error:
            result = _refused(str(error))
        return replace(result, seed=self.seed)

    def _check(self, mu: MuGraph, bound: bool, full: bool) -> Verification:
        check_mugraph(mu)
        mu, border = inside_mugraph(mu)
        if (border.inputs, border.outputs) != (self.border.inputs, self.border.outputs):
            raise GraphError("muGraph: it reads or writes other parts of tensors than the graph")
        check_interface(self.graph, mu)
        exact, ragged = self._choose.small(mu, False), self._choose.small(mu, True)
        has = self._has(mu)
        maxima = has.maxima
        task = _Task(mu, exact, ragged, has, full)
        mode: Mode = "shift" if maxima else "order"
        passed, found = self._passed(task, mode)
        if found is not None and maxima:  # it may be a condition that fresh values decide
            mode = "order"
            passed, found = self._passed(task, mode)
        if found is not None:
            return _differs(found, passed)
        if not all(self._hid.get(exact.inputs, ())):
            why = "what the graph hides by a condition (hide) has no value in any draw"
            return replace(_refused(why), of_graph=True)
        both = degrees(self._source_degrees(exact, mode), mu, exact)
        if both.highest >= SMALLEST.q:
            return _refused(
                f"its degree {both.highest} is above the order of the field, where programs that "
                "differ can agree everywhere; cut the graph"
            )
        trials = self._trials(has, mode)
        limit = real_limit = Bound(None, "bound not asked for")
        if bound:
            limit, real_limit = self._bounds(task, mode, both, real_limit)
        return Verification(
            equal=True,
            trials=passed,
            # with lengths, for instance, which differ from trial to trial, a difference may show in
            # one only
            bound_log2=None if limit.log2 is None else limit.log2 * (1 if has.drawn else trials),
            conditions=limit.conditions,
            extents=dict(zip(mu.inputs, exact.inputs, strict=True)),
            real_extents=full,
            real_bound_log2=real_limit.log2,
        )

    def _bounds(
        self, task: _Task, mode: Mode, both: Degrees, unknown: Bound
    ) -> tuple[Bound, Bound]:
        """The bounds at small extents, from these degrees, and at the program's own."""
        has = task.has
        failed = None
        if has.exponentials:
            failed = self._failed_condition(task.mu, task.exact, mode, self._trials(has, mode))
        limit = error_bound(both, failed, has.drawn)
        if not task.full or has.maxima or has.exponentials:
            return limit, unknown
        sizes = real_sizes(task.mu)
        both = degrees(self._source_degrees(sizes, mode), task.mu, sizes)
        return limit, error_bound(both, None, has.drawn)

    def _passed(self, task: _Task, mode: Mode) -> tuple[int, Counterexample | None]:
        """Count the comparisons that pass, one after the other, up to the first difference."""
        mu, exact, with_q = task.mu, task.exact, task.has.exponentials
        trials = self._trials(task.has, mode)
        plan: list[tuple[Sizes, int, Mode, bool]] = [(exact, t, mode, False) for t in range(trials)]
        plan.append((task.ragged, 0, mode, False))
        if mode == "shift":  # true maxima may make a denominator 0 that fresh values do not
            plan.append((exact, 0, "order", False))
        if task.full:
            plan.append((real_sizes(mu), 0, "order", True))
        for k, (sizes, trial, how, real) in enumerate(plan):
            found = self._compare(mu, sizes, trial, how, with_q, real)
            if found is not None:
                return k, found
        for trial in range(trials, trials + MORE_TRIALS):
            if all(self._hid.get(exact.inputs, ())):  # each condition has hidden something
                break
            found = self._compare(mu, exact, trial, mode, with_q)
            if found is not None:
                return len(plan), found
        return len(plan), None

    def _trials(self, has: _Kinds, mode: Mode) -> int:
        """The number of trials at exact small extents."""
        if has.maxima and mode == "order":
            return max(self.trials, MAX_TRIALS)
        return max(self.trials, INTEGER_TRIALS) if has.hides else self.trials

    def _source_degrees(self, sizes: Sizes, mode: Mode) -> Source:
        key = sizes.inputs, mode
        if key not in self._degrees:
            graph = self._graphs[sizes.inputs]
            self._degrees[key] = source_degrees(graph, sizes, mode == "shift")
        return self._degrees[key]

    def _has(self, mu: MuGraph) -> _Kinds:
        kinds = self._kinds | {op.kind for s in mu.steps for op in s.program.ops}
        table = [TABLE[k] for k in kinds if k in TABLE]
        hidden = any(o.hides or (o.masks and o.fill == -inf) for o in table)
        drawn = {
            "lengths, tables and labels": any(
                self.graph.nodes[i].dtype.integer for i in self.graph.inputs
            ),
            "conditions": hidden and any(o.chooses for o in table),
        }
        maxima, exps = any(o.selects for o in table), any(o.exponential for o in table)
        hides, names = any(o.hides for o in table), tuple(k for k, v in drawn.items() if v)
        return _Kinds(maxima, exps, hides, names)

    def _field(self, trial: int, attempt: int) -> Primes:
        """The primes of a trial; the next ones each time that it is drawn again."""
        number = trial % FIELDS + FIELDS * attempt
        while len(self._primes) <= number:
            seed = (self.seed & 0xFFFFFFFF, len(self._primes))
            self._primes.append(draw_primes(seed, numbers(self.graph)))
        return self._primes[number]

    def _tells_apart(self, primes: Primes, mu: MuGraph) -> bool:
        """True if different numbers in the two programs are different in a field."""
        found = _numbers(mu)
        key = primes, frozenset(found)
        if key not in self._apart:
            self._apart[key] = primes.tells_apart(found | numbers(self.graph))
        return self._apart[key]

    def _compare(
        self, mu: MuGraph, sizes: Sizes, trial: int, mode: Mode, with_q: bool, real: bool = False
    ) -> Counterexample | None:
        """Run one trial. Raises DivisionByZero when no draw avoids it."""
        alone = 0  # draws whose failure is not that of the kernel graph
        for attempt in range(DRAWS):
            last = attempt == DRAWS - 1
            try:
                known = self._source(sizes, (trial, attempt), mode, with_q, keep=not real)
                if not self._tells_apart(known.primes, mu):
                    raise DivisionByZero("numbers that differ are equal in the field")
            except Unbounded:  # less hidden elements would only conceal it
                raise
            except DivisionByZero:
                if last:
                    raise
                continue
            try:
                return self._compare_draw(mu, sizes, known, mode, real)
            except DivisionByZero as error:
                alone += 1
                decided = isinstance(error, Unbounded) or alone > 1  # twice is no accident
                if last or (decided and not _padded(sizes)):
                    raise
        return None

    def _compare_draw(
        self, mu: MuGraph, sizes: Sizes, known: _Trial, mode: Mode, real: bool
    ) -> Counterexample | None:
        a = known.domain(mode, 1)
        a.records = not real
        tensors: dict[str, Any] = dict(zip(mu.inputs, known.inputs, strict=True))
        found = evaluate_mugraph(a, mu, sizes, tensors, CHUNK_ELEMENTS if real else None)
        shapes = dict(zip(mu.inputs, sizes.inputs, strict=True))
        for name, want in zip(mu.outputs, known.outputs, strict=True):
            bad = _first_difference(name, want, found[name], sizes.tensors[name], shapes)
            if bad is not None:
                return bad
        if real or _padded(sizes):
            return None
        scales = numbers(self.graph) | _numbers(mu)
        if known.undefined.same(a.undefined(), scales, known.primes.p):
            return None
        return Counterexample("", (), 0, 0, shapes)

    def _source(
        self, sizes: Sizes, number: tuple[int, int], mode: Mode, with_q: bool, keep: bool
    ) -> _Trial:
        key = (sizes.inputs, number, mode, with_q)
        if key in self._known:
            self._known.move_to_end(key)
            known = self._known[key]
            if isinstance(known, DivisionByZero):
                raise known
            return known
        seeds = [self.seed & 0xFFFFFFFF, *number]
        if sizes.inputs not in self._graphs:
            self._graphs[sizes.inputs] = resized_graph(self.graph, sizes.inputs)
        graph, primes = self._graphs[sizes.inputs], self._field(*number)
        inputs = tuple(
            draw_integers(graph, i, s, [*seeds, k])
            if graph.nodes[i].dtype.integer
            else draw(s, [*seeds, k], with_q, primes)
            for k, (i, s) in enumerate(zip(graph.inputs, sizes.inputs, strict=True))
        )
        seed = hash((*seeds, 1)) & 0x7FFFFFFF
        trial = _Trial(seed, primes, _failing(*number), inputs)
        try:
            trial, hid = self._evaluated(graph, trial, mode, keep)
        except DivisionByZero as error:
            self._keep(key, error.with_traceback(None))
            raise
        before = self._hid.get(sizes.inputs, [False] * len(hid))
        self._hid[sizes.inputs] = [x or y for x, y in zip(before, hid, strict=True)]
        if keep:
            self._keep(key, trial)
        return trial

    def _evaluated(
        self, graph: KernelGraph, trial: _Trial, mode: Mode, keep: bool
    ) -> tuple[_Trial, list[bool]]:
        """A trial with the graph's results, and the hidden values of each condition.

        Where a row that is hidden as a whole would be +inf on the way (the square of its maximum),
        such rows have no value: see `FieldDomain`.
        """
        a = trial.domain(mode, 0)
        a.strict, a.records = True, keep
        try:
            outputs = tuple(evaluate_graph(graph, a, list(trial.inputs)))
        except Unbounded:
            if not (trial.whole and a.hid):
                raise
            return self._evaluated(graph, replace(trial, whole=False), mode, keep)
        return replace(trial, outputs=outputs, undefined=a.undefined()), a.hid

    def _keep(self, key: Any, known: _Trial | DivisionByZero) -> None:
        self._known[key] = known
        if len(self._known) > KEPT:
            self._known.popitem(last=False)

    def _failed_condition(self, mu: MuGraph, sizes: Sizes, mode: Mode, trials: int) -> str | None:
        """The condition of `cutesuper.verify.exponents` that does not hold, if any."""
        try:
            if not self._uniform(self._graphs[sizes.inputs], sizes, mode):
                return "the arguments of the exponentials are not shown to be jointly uniform"
            if not all(self._arguments_match(mu, sizes, t, mode) for t in range(trials)):
                return "an exponential has an argument that the kernel graph does not have"
        except DivisionByZero:
            return "the first draw of a trial divides by zero"
        return None

    def _uniform(self, graph: KernelGraph, sizes: Sizes, mode: Mode) -> bool:
        if sizes.inputs not in self._uniform_at:
            known = self._source(sizes, (0, 0), mode, True, keep=True)
            affine = affine_inputs(graph, sizes)
            self._uniform_at[sizes.inputs] = jointly_uniform(
                graph, known.inputs, affine, known.recording
            )
        return self._uniform_at[sizes.inputs]

    def _arguments_match(self, mu: MuGraph, sizes: Sizes, trial: int, mode: Mode) -> bool:
        """True if the exponentials of both programs have the same arguments, in one trial."""
        known = self._source(sizes, (trial, 0), mode, True, keep=True)
        tensors: dict[str, Any] = dict(zip(mu.inputs, known.inputs, strict=True))
        return arguments_match(
            lambda a: evaluate_graph(self._graphs[sizes.inputs], a, list(known.inputs)),
            lambda a: evaluate_mugraph(a, mu, sizes, tensors),
            known.recording,
        )


def verify(
    graph: KernelGraph, mu: MuGraph, *, trials: int = 3, seed: int | None = None, full: bool = False
) -> Verification:
    """Check one muGraph against a kernel graph; see `Verifier.check`.

    Args:
        graph: the definition.
        mu: the program; an illegal muGraph is not equal to anything.
        trials: at small extents, besides one with tails.
        seed: chooses the primes and the inputs; None: see `Verifier`.
        full: also one trial at the real extents (1 s for a 50 MB weight).

    Raises:
        GraphError: not a kernel graph and a muGraph.
        OptionError: a seed that is no int of at least 0, trials below 1.
    """
    check_is_mugraph("verify", mu)
    check_options(full=full)
    return Verifier(graph, seed, trials).check(mu, full=full)


def evaluate_mugraph(
    a: Any, mu: MuGraph, sizes: Sizes, tensors: dict[str, Any], chunk_elements: int | None = None
) -> dict[str, Any]:
    """All tensors of a muGraph by name, from its inputs, over any algebra (see `BlockRun`)."""
    wanted: set[str] = set()
    wants: list[set[str]] = []
    for program in reversed(sizes.programs):
        wants.append(set(wanted))
        wanted |= exponents_loaded(program, wanted)
    tensors = dict(tensors)
    for program, kept, empty in zip(
        sizes.programs, reversed(wants), empty_quotients(mu), strict=True
    ):
        tensors |= BlockRun(a, program, tensors, kept, chunk_elements, empty).run()
    return tensors


def check_interface(graph: KernelGraph, mu: MuGraph) -> None:
    """Refuse a muGraph with other inputs or outputs than the graph. Raises GraphError."""
    for what, indices, names in (
        ("inputs", graph.inputs, mu.inputs),
        ("outputs", graph.outputs, mu.outputs),
    ):
        if len(indices) != len(names):
            raise GraphError(f"muGraph: {len(names)} {what}, the graph has {len(indices)}")
        for i, name in zip(indices, names, strict=True):
            node, spec = graph.nodes[i], mu.tensors[name]
            if node.shape != spec.shape or node.dtype != spec.dtype:
                raise GraphError(
                    f"muGraph: {name} is {spec.dtype}{show_shape(spec.shape)}, the graph's "
                    f"{node.name} is {node.dtype}{show_shape(node.shape)}"
                )


def numbers(graph: KernelGraph) -> set[float]:
    """The constants of a kernel graph."""
    return {n.attributes["value"] for n in graph.nodes if n.operator == CONSTANT}


def _numbers(mu: MuGraph) -> set[float]:
    """The constants of a muGraph."""
    return {op.attributes["value"] for s in mu.steps for op in s.program.ops if op.kind == CONSTANT}


def _failing(trial: int, attempt: int) -> float:
    """The share of conditions that do not hold in a draw.

    In turn some, nearly all and none, then three shares between: rows are hidden in part, as a
    whole, and not at all, and of rows of 2 to 16 elements about half are hidden as a whole in some
    trial, so that two conditions differ there. If a row that is hidden as a whole has no value, the
    next draws hide less and less.
    """
    return 0.25 ** (attempt + 1) if attempt else FAILING[trial % len(FAILING)]


def _padded(sizes: Sizes) -> bool:
    return any(p.ragged(d) for p in sizes.programs for d in p.dims)


def _first_difference(
    name: str,
    want: FieldValue,
    found: FieldValue,
    shape: tuple[int, ...],
    inputs: dict[str, tuple[int, ...]],
) -> Counterexample | None:
    names = names_of(shape)
    expected = np.broadcast_to(align(want.p, want.dims, names), tuple(n for n in shape if n != 1))
    differs = expected != found.p
    if not differs.any():
        return None
    first = tuple(int(k) for k in np.argwhere(differs)[0])
    rest = iter(first)
    index = tuple(0 if n == 1 else next(rest) for n in shape)
    return Counterexample(name, index, int(expected[first]), int(found.p[first]), inputs)


def _refused(reason: str) -> Verification:
    return Verification(False, 0, None, "", reason)


def _without_value(graph: KernelGraph, error: DivisionByZero) -> Verification:
    """Refuse a muGraph that has no value in any draw, or whose kernel graph has none."""
    masked = isinstance(error, Unbounded | NoNumber)
    if error.node is None:
        return _refused(str(error) if masked else "it divides by zero where the graph does not")
    node = graph.nodes[error.node]
    operands = ", ".join(graph.nodes[i].name for i in node.inputs)
    zero = "the graph divides by what is 0 whatever the inputs are, so no program can be compared"
    why = f"{error if masked else zero}: {node.name} = {node.operator}({operands})"
    return replace(_refused(why), of_graph=True)


def _differs(found: Counterexample, trials: int) -> Verification:
    at = ", ".join(f"{n}{show_shape(s)}" for n, s in found.inputs.items())
    reason = f"output {found.output} differs at {list(found.index)} for inputs {at}"
    if not found.output:
        reason = (
            "it divides by another number that is 0 for many inputs, or takes a function of "
            f"another that is NaN for many (sqrt, log), for inputs {at}"
        )
        return replace(_refused(reason), trials=trials + 1)
    return replace(_refused(reason), trials=trials + 1, counterexample=found)
