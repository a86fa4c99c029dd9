"""Selection of the regions that get kernels: searched for, checked against PyTorch, and faster."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from math import inf
from typing import Any

import torch
from torch import fx

from cutesuper import measure
from cutesuper.errors import CacheError, CutesuperError, DeviceError
from cutesuper.pipeline import Choice
from cutesuper.progress import counting
from cutesuper.runtime.cache import warn_once
from cutesuper.runtime.programs import Kept
from cutesuper.search.bounds import TooDear
from cutesuper.search.search import show
from cutesuper.torch.compile import records
from cutesuper.torch.compile.ahead import Ahead
from cutesuper.torch.compile.case import Case, Patience, Place, Seconds
from cutesuper.torch.compile.options import BackendOptions
from cutesuper.torch.compile.region import Region
from cutesuper.torch.compile.region_operator import program_of
from cutesuper.torch.internals import apart, compile_inner, compile_with

#: part of the time of Inductor's code that a measured region must save
GAIN = 0.02
#: kernels take at least their modelled time divided by this: of 864 kernels of 24 programs, 99 of
#: 100 took more than 1 / 1.19 of it, and those that the search chose more than 1 / 1.10
REACH = 1.1 * (1 - GAIN)
#: seconds in which everything within reach is tried; a trial takes 0.5 to 3 s, and there were 85
#: for a training step of four layers with 4 x 2048 tokens (H200, 16 cores)
PATIENCE_S = 10.0
#: part of a graph's time, by the roofline, that a region and those like it must be expected to
#: save, to be tried later. Attention of 4 layers of Gemma 3 1B, 8 sequences, was expected to save
#: 11 us of 1.1 ms, and saves 66; of 40 later trials of that training step none saved a hundredth
STAKE = 0.0025
#: seconds in which other processes are waited for behind that, and the part of a graph's time that
#: a region must be able to save, whose search goes on then. On a machine just started, something
#: was not ready in 20 s: a step of an 8B model took 6.6 ms, and 3.7 are expected
LAST_S = 40.0
MUCH = 0.02


@dataclass(frozen=True)
class Verdict:
    """The decision about a region.

    Attributes:
        taken: whether it gets kernels.
        reason: why, or why not.
        kernels: those that were found, as text.
        predicted_us: microseconds that the cost model expects of them.
        baseline_us: the same of Inductor's kernels, by a roofline.
        measured_us: microseconds that they took on this GPU.
        inductor_us: the same of Inductor's code.
        broken: whether this is a mistake of this package: the kernels compute other values than
            PyTorch, or something failed that must not.
        final: whether no part of the region can do any better.
        passing: whether the next try may end otherwise, as for want of memory or time; else it is
            recorded.
    """

    taken: bool
    reason: str
    kernels: tuple[str, ...] = ()
    predicted_us: float | None = None
    baseline_us: float | None = None
    measured_us: float | None = None
    inductor_us: float | None = None
    broken: bool = False
    final: bool = False
    passing: bool = False

    @property
    def lasts(self) -> bool:
        """True if another process would come to the same one."""
        return not (self.passing or self.broken)


@dataclass(frozen=True)
class Decision:
    """A region, or a part of one, and the decision about it.

    Attributes:
        region: in its graph.
        key: of its program, for the operator.
        verdict: the decision.
        seconds: that deciding took.
    """

    region: Region
    key: str
    verdict: Verdict
    seconds: Seconds = field(default_factory=Seconds)


#: takes regions, and the microseconds that each is expected to save
Meanwhile = Callable[[Sequence[tuple[Region, float]]], None]

#: earlier verdicts
_verdicts: Kept[Place, Verdict] = Kept()
#: one trial at a time: Inductor compiles in it, and the GPU is timed
_lock = threading.RLock()


def decide(
    regions: Sequence[Region],
    options: BackendOptions,
    meanwhile: Meanwhile = lambda expected: None,
) -> list[Decision]:
    """Decide which regions of a graph get kernels; of one that does not, whether parts of it do.

    Args:
        regions: nodes with fake tensors in ``meta["val"]``.
        options: of the backend.
        meanwhile: is called once if products are expected to stay Inductor's, while other processes
            search and compile; for what this one would do afterwards. It is given the regions that
            the model expects to be faster, with what each saves.

    Returns:
        For each one decision, or those about its parts if one of them is taken.
    """
    patience = Patience()
    cases = [Case(region, options, patience) for region in regions]
    _decide_in_order(cases, patience, meanwhile)
    return [decision for case in cases for decision in _decided(case)]


def _decide_in_order(cases: Sequence[Case], patience: Patience, meanwhile: Meanwhile) -> None:
    """Decide about regions, and about parts of those that are not taken; what saves most first."""
    waiting = _different(cases, seen := set[Place]())
    wholes = {id(case) for case in waiting}
    total_us = sum(map(_at_stake, waiting))
    patience.least_us, patience.large_us = STAKE * total_us, MUCH * total_us
    with Ahead(_verdicts) as ahead, counting(len(waiting)) as show:
        for case in waiting:
            ahead.begin(case)
        ahead.follow()
        if any(ahead.gain(case) <= 0 and case.region.products for case in waiting):
            meanwhile(_expected_savings(cases, waiting, ahead))
        if waiting and waiting[0].options.take == "faster":
            patience.until = time.monotonic() + PATIENCE_S
            patience.most = patience.until + PATIENCE_S
            patience.last = patience.most + LAST_S
        while waiting:
            case = waiting.pop(ahead.next(waiting))
            if id(case) in wholes:
                show(f"deciding about {case.region.place or 'a region'}")
            verdict = _decision(case).verdict
            if not (verdict.taken or verdict.final):
                parts = _different(case.parts, seen)
                for part in parts:
                    ahead.begin(part)
                waiting += parts


def _expected_savings(
    cases: Sequence[Case], waiting: Sequence[Case], ahead: Ahead
) -> list[tuple[Region, float]]:
    """The regions that the model expects to be faster, and the microseconds that each saves.
    Those of ``waiting`` stand for all that are decided like them."""
    gains = {case.place: ahead.gain(case) / case.count for case in waiting}
    found: list[tuple[Region, float]] = []
    for case in cases:
        with suppress(CutesuperError):
            found.append((case.region, gains.get(case.place, 0.0)))
    return [(region, us) for region, us in found if 0 < us < inf]


def _different(cases: Sequence[Case], seen: set[Place]) -> list[Case]:
    """The first one of cases that are decided alike, of those that have not been seen."""
    found = dict[Place, Case]()
    counts = Counter[Place]()
    for case in cases:
        with suppress(CutesuperError):  # it has no program, as its decision will say
            counts[case.place] += case.count
            if case.place not in seen:
                seen.add(case.place)
                found[case.place] = case
    return [replace(c, count=counts[at]) if counts[at] > c.count else c for at, c in found.items()]


def _at_stake(case: Case) -> float:
    """Microseconds of Inductor's kernels for the regions like this one, by the roofline."""
    with suppress(CutesuperError):
        return 0.0 if case.refusal else case.inductor_us * case.count
    return 0.0


def _decided(case: Case) -> list[Decision]:
    whole = _decision(case)
    if whole.verdict.taken or whole.verdict.final:
        return [whole]
    decisions = [d for part in case.parts for d in _decided(part)]
    return decisions if any(d.verdict.taken for d in decisions) else [whole]


def _decision(case: Case) -> Decision:
    region = case.region
    try:
        key, why = case.key, case.refusal
    except CutesuperError as error:
        return Decision(region, "", Verdict(False, str(error)))
    if why is not None:
        return Decision(region, key, Verdict(False, why, final=True))
    with _lock:
        verdict = _verdicts.made(case.place, lambda: apart(partial(_known_or_judged, case)))
        return _bounded(Decision(region, key, verdict, case.seconds))


def _bounded(decision: Decision) -> Decision:
    """Refuse a region with more rows than kernels can address.
    If their number is symbolic, the comparison becomes a guard of the compiled model: with more it
    is compiled anew, and refused."""
    program = program_of(decision.key)
    if not decision.verdict.taken or program.fits(decision.region.extents):
        return decision
    most = min(program.most.values())
    reason = f"more than {most} rows, of which offsets do not fit into 32 bits"
    return replace(decision, verdict=replace(decision.verdict, taken=False, reason=reason))


def _known_or_judged(case: Case) -> Verdict:
    """The recorded verdict on a region, or a new one, which is recorded if it will stay."""
    if not case.searches:
        return _judge(case)  # nothing is searched, compiled or timed
    try:
        if case.record is not None:
            return _recorded(case.record, case)
        question = case.question
    except (CutesuperError, TypeError, KeyError):
        return _judge(case)
    verdict = _judge(case)
    if verdict.lasts and case.options.budget_s is None:
        records.write(question, asdict(verdict))
    return verdict


def _recorded(record: Mapping[str, Any], case: Case) -> Verdict:
    """A verdict of another process, with its kernels compiled or found on disk.
    Raises CutesuperError, TypeError, KeyError."""
    values: dict[str, Any] = {**record, "kernels": tuple(record["kernels"])}
    verdict = Verdict(**values)
    if verdict.taken:
        _compile(case)
    return verdict


def _judge(case: Case) -> Verdict:
    """The verdict on a region that has not been decided before."""
    before = case.program.searched_s
    try:
        return _judged(case)
    except Exception as error:  # whatever the error, Inductor can compile the region
        reason = f"{type(error).__name__} while it was tried: {error}"
        return Verdict(False, reason, broken=True)
    finally:
        case.seconds.search += case.program.searched_s - before
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # the trials had other sizes than the model


def _judged(case: Case) -> Verdict:
    verdict = Verdict(True, "")
    try:
        if case.saves_little():
            return replace(verdict, taken=False, reason=_saves_little(case), final=True)
        if case.patience.left and case.place in case.patience.left:
            reason = (
                "not ready when it was no longer waited for; a later process tries again, and "
                "finds on disk what was done meanwhile"
            )
            return replace(verdict, taken=False, reason=reason, final=True, passing=True)
        if case.searches:
            verdict = _found(case)
        if verdict.taken and case.options.take == "modelled":
            verdict = _modelled(verdict)
        theirs = cache(lambda: _compiled(case.sample.module, case.sample.draw(0), case.options))
        if verdict.taken and case.clock is not None:
            verdict = _within_reach(verdict, case, case.clock, theirs)
        if verdict.taken:
            _compile(case)
        if verdict.taken and case.clock is not None:
            verdict = _timed(verdict, case, case.clock, theirs)
        if verdict.taken:
            verdict = _checked(verdict, case)
    except DeviceError as error:
        return replace(verdict, taken=False, reason=str(error), final=True, passing=True)
    except CacheError as error:
        warn_once(f"compiled models get no kernels: {error}")
        return replace(verdict, taken=False, reason=str(error), final=True, passing=True)
    except CutesuperError as error:
        return replace(verdict, taken=False, reason=f"no kernels: {error}")
    except (torch.OutOfMemoryError, MemoryError) as error:
        reason = f"not tried, for want of memory: {str(error).splitlines()[0]}"
        return replace(verdict, taken=False, reason=reason, passing=True)
    return verdict if verdict.reason else replace(verdict, reason="all regions are taken")


def _found(case: Case) -> Verdict:
    """The verdict of the search. Raises CutesuperError."""
    theirs = case.inductor_us
    try:
        _, choice = case.program.found(case.sample.extents, case.target, case.most_us)
    except TooDear as error:
        times = f"at least {error.least_us:.1f} us expected, {theirs:.1f} us of Inductor's kernels"
        return Verdict(False, times, predicted_us=error.least_us, baseline_us=theirs)
    ours = choice.candidate.cost_us
    return Verdict(True, "", _kernels(choice), predicted_us=ours, baseline_us=theirs)


def _kernels(choice: Choice) -> tuple[str, ...]:
    steps = choice.candidate.mugraph.steps
    return tuple(f"{step.name}: {show(step.program)}" for step in steps)


def _modelled(verdict: Verdict) -> Verdict:
    """Refuse kernels that the cost model does not expect to be faster."""
    ours, theirs = _expected(verdict)
    times = f"{ours:.1f} us expected, {theirs:.1f} us of Inductor's kernels"
    return replace(verdict, taken=ours < theirs, reason=times)


def _expected(verdict: Verdict) -> tuple[float, float]:
    """Microseconds of the kernels, and of Inductor's, by the model."""
    ours, theirs = verdict.predicted_us, verdict.baseline_us
    if ours is None or theirs is None:
        raise AssertionError("nothing was searched for")
    return ours, theirs


#: compiles Inductor's code for a region
Theirs = Callable[[], measure.Call]


def _within_reach(verdict: Verdict, case: Case, clock: measure.Device, compiled: Theirs) -> Verdict:
    """Refuse kernels, before they are compiled, whose modelled time is out of reach.
    That is of the measured time of Inductor's code. Those that the model expects to be faster need
    not be asked. Raises MemoryError."""
    ours, modelled = _expected(verdict)
    if case.saves_little(ours):
        return replace(verdict, taken=False, reason=_saves_little(case, ours))
    if ours < modelled:
        return verdict
    with case.seconds.on("trial"):
        try:
            [theirs] = measure.device_us([compiled()], case.sample.draw, clock)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            return _not_timed(verdict, error)
    if ours <= theirs * REACH:
        return verdict
    reason = f"{ours:.1f} us expected, Inductor's code {theirs:.1f} us"
    return replace(verdict, taken=False, reason=reason, inductor_us=theirs)


def _saves_little(case: Case, ours: float | None = None) -> str:
    """The reason why kernels of so many microseconds are not tried."""
    expected = "" if ours is None else f"{ours:.1f} us expected, "
    return (
        f"{expected}{case.inductor_us:.1f} us of Inductor's kernels: too little to try it when "
        f"choosing has taken {PATIENCE_S:.0f} s"
    )


def _compile(case: Case) -> None:
    """Compile the kernels of a region, if they run on its device. Raises CutesuperError."""
    if case.runs:
        with case.seconds.on("compile"):
            case.program.variant(case.sample.extents, case.device)


def _checked(verdict: Verdict, case: Case) -> Verdict:
    """Refuse kernels with wrong results."""
    with case.seconds.on("trial"):
        wrong = case.sample.difference()
    if wrong is None:
        return verdict
    return replace(verdict, taken=False, broken=True, reason=f"not what PyTorch computes: {wrong}")


def _timed(verdict: Verdict, case: Case, clock: measure.Device, compiled: Theirs) -> Verdict:
    """Refuse kernels that are not measured to be faster. Raises MemoryError."""
    sample = case.sample
    with case.seconds.on("trial"):
        kernels = sample.kernels
        if sample.bare:
            own: measure.Call = lambda given: kernels(*given)  # noqa: E731 (Inductor: 0.3 s each)
        else:
            own = _compiled(kernels, sample.draw(0), case.options)
        try:
            ours, theirs = measure.device_us([own, compiled()], sample.draw, clock)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            return _not_timed(verdict, error)
    faster = ours <= theirs * (1 - GAIN)
    reason = f"{ours:.1f} us, Inductor's code {theirs:.1f} us"
    return replace(verdict, taken=faster, reason=reason, measured_us=ours, inductor_us=theirs)


def _not_timed(verdict: Verdict, error: RuntimeError) -> Verdict:
    """The refusal of a region of which something cannot be recorded."""
    return replace(verdict, taken=False, reason=f"it cannot be timed: {error}", passing=True)


def _compiled(
    module: fx.GraphModule, inputs: Sequence[Any], options: BackendOptions
) -> measure.Call:
    """Inductor's code for a module.
    Kernels that need other work beside them are compiled with it, so that it is compiled too."""
    patches = {**options.inductor, "triton.cudagraphs": False}
    compiled = compile_with(module, inputs, compile_inner, patches)
    return lambda given: compiled(*given)
