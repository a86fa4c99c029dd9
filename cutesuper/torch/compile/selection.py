"""Selection of the regions that get kernels: searched for, checked against PyTorch, and faster."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import inf, prod
from typing import Any

import torch
from torch import fx

from cutesuper import measure
from cutesuper.errors import CacheError, CutesuperError, DeviceError
from cutesuper.pipeline import Choice
from cutesuper.runtime.cache import warn_once
from cutesuper.runtime.programs import Kept
from cutesuper.search.bounds import TooDear
from cutesuper.search.search import show
from cutesuper.torch.compile import records
from cutesuper.torch.compile.graph_builder import fake
from cutesuper.torch.compile.inductor_model import baseline
from cutesuper.torch.compile.internals import apart, compile_inner, compile_with
from cutesuper.torch.compile.options import BackendOptions, Take
from cutesuper.torch.compile.partition import halves
from cutesuper.torch.compile.region import Region
from cutesuper.torch.compile.region_operator import Program, key_of, program_of
from cutesuper.torch.compile.trial import Sample

#: part of the time of Inductor's code that a measured region must save
GAIN = 0.02


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
        passing: whether the next try may end otherwise, as for want of memory; else it is recorded.
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


@dataclass(frozen=True)
class Decision:
    """A region, or a part of one, and the decision about it.

    Attributes:
        region: in its graph.
        key: of its program, for the operator.
        verdict: the decision.
        seconds: that deciding took: search, compilation, trial.
    """

    region: Region
    key: str
    verdict: Verdict
    seconds: float = 0.0


#: a region's program, the options, and its tensors
Place = tuple[object, ...]
#: earlier verdicts
_verdicts: Kept[Place, Verdict] = Kept()
#: one trial at a time: Inductor compiles in it, and the GPU is timed
_lock = threading.RLock()


def decide(region: Region, options: BackendOptions) -> list[Decision]:
    """Decide whether a region gets kernels; if it does not, whether parts of it do.

    Args:
        region: nodes with fake tensors in ``meta["val"]``.
        options: of the backend.

    Returns:
        One decision, or those about the parts if one of them is taken.
    """
    start = time.perf_counter()
    whole = _decision(region, options)
    whole = replace(whole, seconds=time.perf_counter() - start)
    if whole.verdict.taken or whole.verdict.final or _anchors(region) < 2:
        return [whole]
    parts = halves(region)
    decisions = [d for part in parts or () for d in decide(part, options)]
    return decisions if any(d.verdict.taken for d in decisions) else [whole]


def _anchors(region: Region) -> int:
    """The number of reductions and products, without which there is nothing to gain."""
    operators = [n.facets for n in region.graph.nodes]
    return sum(bool(o.reduces) or o.composite or o.contracts for o in operators)


def _decision(region: Region, options: BackendOptions) -> Decision:
    try:
        key = key_of(region.graph, options.target)
    except CutesuperError as error:
        return Decision(region, "", Verdict(False, str(error)))
    if options.take != "all" and not _anchors(region):
        reason = "nothing but element-wise work, of which Inductor makes one kernel as well"
        return Decision(region, key, Verdict(False, reason, final=True))
    sample = Sample(region, key)
    if not sample.known:
        reason = "sizes depend on data, so nothing can be tried before the call"
        return Decision(region, key, Verdict(False, reason, final=True))
    patches = str(sorted(options.inductor.items()))
    place = (key, options.take, options.budget_s, patches, sample.text)
    with _lock:
        verdict = _verdicts.made(
            place, lambda: apart(partial(_known_or_judged, place, sample, options))
        )
        return _bounded(Decision(region, key, verdict))


def _bounded(decision: Decision) -> Decision:
    """Refuse a region with more rows than kernels can address. If their number is symbolic, the
    comparison becomes a guard of the compiled model: with more it is compiled anew, and refused."""
    region, most = decision.region, program_of(decision.key).most_rows
    for o in region.inputs if decision.verdict.taken else ():
        if -1 in o.shape and o.part is None and o.lengths is None:
            rest = prod(n for n in o.shape if n != -1)
            if fake(o.node).numel() > most * rest:
                reason = f"more than {most} rows, of which offsets do not fit into 32 bits"
                return replace(
                    decision, verdict=replace(decision.verdict, taken=False, reason=reason)
                )
    return decision


def _known_or_judged(place: Place, sample: Sample, options: BackendOptions) -> Verdict:
    """The recorded verdict on a region, or a new one, which is recorded if it will stay."""
    if sample.device is None or (sample.device.type != "cuda" and options.take != "modelled"):
        return _judge(sample, options)  # nothing is searched, compiled or timed
    try:
        question = ("verdict", *place, *_surroundings(sample, sample.device))
        record = records.read(question)
        if record is not None:
            return _recorded(record, sample)
    except (CutesuperError, TypeError, KeyError):
        return _judge(sample, options)
    verdict = _judge(sample, options)
    if not verdict.passing and not verdict.broken and options.budget_s is None:
        records.write(question, asdict(verdict))
    return verdict


def _surroundings(sample: Sample, device: torch.device) -> tuple[object, ...]:
    """What else a verdict depends on: the GPU, and the programs that were tuned for it. Raises
    CutesuperError."""
    program = program_of(sample.key)
    target = program.target_on(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return name, target.name, program.tuned(sample.rows, target)


def _recorded(record: Mapping[str, Any], sample: Sample) -> Verdict:
    """A verdict of another process, with its kernels compiled or found on disk. Raises
    CutesuperError, TypeError, KeyError."""
    values: dict[str, Any] = {**record, "kernels": tuple(record["kernels"])}
    verdict = Verdict(**values)
    if verdict.taken and sample.device is not None and sample.device.type == "cuda":
        program_of(sample.key).variant(sample.rows, sample.device)
    return verdict


def _judge(sample: Sample, options: BackendOptions) -> Verdict:
    """The verdict on a region that has not been decided before."""
    try:
        return _judged(sample, options)
    except Exception as error:  # whatever the error, Inductor can compile the region
        reason = f"{type(error).__name__} while it was tried: {error}"
        return Verdict(False, reason, broken=True)
    finally:
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # the trials had other sizes than the model


def _judged(sample: Sample, options: BackendOptions) -> Verdict:
    device = sample.device
    if device is None or device.type not in ("cpu", "cuda"):
        return Verdict(False, "its tensors are not on one GPU, or on the CPU", final=True)
    clock = measure.device_of(device) if options.take == "faster" else None
    if options.take == "faster" and clock is None:
        reason = "nothing was timed: the tensors are on the CPU, and kernels run on a GPU"
        return Verdict(False, reason, final=True)
    program = program_of(sample.key)
    program.budget_s = options.budget_s
    verdict = Verdict(True, "")
    try:
        if device.type == "cuda" or options.take != "all":
            verdict = _found(program, sample, device, options.take)
        if options.take == "modelled" and verdict.taken:
            verdict = _modelled(verdict)
        if verdict.taken and device.type == "cuda":
            program.variant(sample.rows, device)
        if verdict.taken:
            verdict = _checked(verdict, sample)
        if verdict.taken and clock is not None:
            verdict = _timed(verdict, sample, options, clock)
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


def _found(program: Program, sample: Sample, device: torch.device, take: Take) -> Verdict:
    """The verdict of the search. Raises CutesuperError."""
    target = program.target_on(device)
    graph = program.graph.with_hints(dict.fromkeys(program.symbols, sample.rows))
    theirs = baseline(graph, target).us
    try:
        most = theirs if take == "modelled" else inf
        _, choice = program.found(sample.rows, target, most)
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
    ours, theirs = verdict.predicted_us, verdict.baseline_us
    if ours is None or theirs is None:
        raise AssertionError("nothing was searched for")
    times = f"{ours:.1f} us expected, {theirs:.1f} us of Inductor's kernels"
    return replace(verdict, taken=ours < theirs, reason=times)


def _checked(verdict: Verdict, sample: Sample) -> Verdict:
    """Refuse kernels with wrong results."""
    wrong = sample.difference()
    if wrong is None:
        return verdict
    return replace(verdict, taken=False, broken=True, reason=f"not what PyTorch computes: {wrong}")


def _timed(
    verdict: Verdict, sample: Sample, options: BackendOptions, clock: measure.Device
) -> Verdict:
    """Refuse kernels that are not measured to be faster. Raises MemoryError."""
    inputs = sample.draw(0)
    calls = [_compiled(m, inputs, options) for m in (sample.kernels, sample.module)]
    try:
        ours, theirs = measure.device_us(calls, sample.draw, clock)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # something in it cannot be recorded
        reason = f"it cannot be timed: {error}"
        return replace(verdict, taken=False, reason=reason, passing=True)
    faster = ours <= theirs * (1 - GAIN)
    reason = f"{ours:.1f} us, Inductor's code {theirs:.1f} us"
    return replace(verdict, taken=faster, reason=reason, measured_us=ours, inductor_us=theirs)


def _compiled(
    module: fx.GraphModule, inputs: Sequence[Any], options: BackendOptions
) -> measure.Call:
    """Inductor's code for a module. Both sides of a comparison are compiled, so that moving tensors
    to and from kernels is compiled too."""
    patches = {**options.inductor, "triton.cudagraphs": False}
    compiled = compile_with(module, inputs, compile_inner, patches)
    return lambda given: compiled(*given)
