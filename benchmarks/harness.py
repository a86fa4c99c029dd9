"""The measurement: every implementation on the same cold inputs, interleaved, checked twice.

For each shape: draw enough input sets to outgrow L2; prepare and check every implementation;
record one sequence of launches over all sets per implementation; warm the clocks; then, round by
round and in random order, replay each recording once. A time is a replay divided by its launches.
Afterwards the recordings' own outputs are poisoned, replayed and checked again, and the host time
of plain calls is taken. Failures are reported and do not stop the rest.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from benchmarks.check import Verdict, check_outputs, poison, worst_of
from benchmarks.device import Backend, CudaBackend, environment
from benchmarks.entry import Entry, best_floor, describe_entry, describe_error
from benchmarks.peers import FLOORS, Implementation, Launcher, choose
from benchmarks.problem import Problem, make_problem, plan_sets, slab_bytes
from benchmarks.spread import summarize
from benchmarks.workload import DTYPES, Outputs, Shape, Workload, shape_label
from benchmarks.workloads import find_workload

SCHEMA = 1


class DeviceLostError(RuntimeError):
    """The device no longer works (an illegal access is sticky); nothing more can be measured."""


class Monitor:
    """An observer of a run's progress; this one ignores everything."""

    def started(self, results: dict[str, Any]) -> None:
        """A run begins; ``results`` will be filled in place."""

    def step(self, name: str) -> AbstractContextManager[None]:
        """A step that might hang is about to run inside the returned context."""
        return nullcontext()

    def case_done(self, results: dict[str, Any], case: dict[str, Any]) -> None:
        """The last case of ``results`` is complete."""


@dataclass(frozen=True)
class Settings:
    """Knobs of a run. Times in seconds, memory in bytes."""

    rounds: int = 40
    warm_seconds: float = 0.2
    host_batches: int = 30
    host_batch_calls: int = 32
    memory_bytes: int = 8 * 10**9
    least_sets: int = 64
    most_sets: int = 256
    reference_rows: int = 512
    seed: int = 0

    def quick(self) -> Settings:
        """Settings for a tenth of the time; for a first look, not for publishing."""
        return replace(self, rounds=10, host_batches=10, least_sets=16, memory_bytes=3 * 10**9)


def run(
    workload: str | Workload,
    *,
    shapes: Sequence[Shape | str] | None = None,
    dtype: str = "float16",
    peers: Iterable[str | Implementation] | None = None,
    floors: Sequence[Implementation] = FLOORS,
    quick: bool = False,
    settings: Settings | None = None,
    backend: Backend | None = None,
    monitor: Monitor | None = None,
) -> dict[str, Any]:
    """Measure a workload and return everything as plain data, ready for JSON (see `report`).

    Args:
        workload: name or definition.
        shapes: extents, or text such as ``"16x4096x4096"``; default all of the workload's (with
            ``quick`` the first).
        dtype: element type of all tensors, one of the workload's.
        peers: implementations or their names; default all.
        floors: streaming kernels to compare with.
        quick: fewer rounds, sets and peers.
        settings: knobs; default ``Settings()`` or, with ``quick``, ``Settings().quick()``.
        backend: device; default the current CUDA device.
        monitor: sees steps and partial results.

    Raises:
        ValueError: unknown workload, dtype or implementation, or a malformed shape.
        DeviceLostError: an implementation broke the device; the monitor has what was finished.
    """
    definition = find_workload(workload) if isinstance(workload, str) else workload
    if dtype not in definition.dtypes:
        known = ", ".join(definition.dtypes)
        raise ValueError(f"{definition.name} is not defined for dtype {dtype!r}; known: {known}")
    chosen = [*floors, *choose(peers, quick=quick)]
    if shapes is None:
        shapes = definition.shapes[:1] if quick else definition.shapes
    wanted = [definition.parse_shape(s) if isinstance(s, str) else s for s in shapes]
    knobs = settings or (Settings().quick() if quick else Settings())
    backend = backend or CudaBackend()
    monitor = monitor or Monitor()
    results: dict[str, Any] = {
        "schema": SCHEMA,
        "name": definition.name if dtype == "float16" else f"{definition.name}-{dtype}",
        "workload": definition.name,
        "title": definition.title,
        "axes": list(definition.axes),
        "dtype": dtype,
        "quick": quick,
        "settings": asdict(knobs),
        "environment": environment(backend),
        "cases": [],
    }
    monitor.started(results)
    for shape in wanted:
        case = Case(definition, shape, dtype, chosen, knobs, backend, monitor)
        measure_case(results, case)
    return results


def measure_case(results: dict[str, Any], case: Case) -> None:
    """Measure a case and add it to ``results``; known facts about it are there from the beginning.

    Raises:
        DeviceLostError: as `run`.
    """
    results["cases"].append(case.data)
    try:
        case.measure()
    finally:
        case.publish()
        case.release()
    case.monitor.case_done(results, case.data)


class Case:
    """One workload at one shape, from allocation to result."""

    def __init__(
        self,
        workload: Workload,
        shape: Shape,
        dtype: str,
        implementations: Sequence[Implementation],
        settings: Settings,
        backend: Backend,
        monitor: Monitor,
    ) -> None:
        self.workload, self.shape, self.dtype = workload, shape, dtype
        self.settings, self.backend, self.monitor = settings, backend, monitor
        self.entries = [Entry(implementation) for implementation in implementations]
        self.problem: Problem | None = None
        self.error: str | None = None
        self.clocks: dict[str, Any] = {}
        self.data: dict[str, Any] = {}  # the published data, updated in place
        self.publish()

    def refuse(self, reasons: Mapping[str, str]) -> None:
        """Do not try the implementations of these names again: they failed for these reasons."""
        for entry in self.entries:
            if entry.implementation.name in reasons:
                entry.fail("failed", reasons[entry.implementation.name])
        self.publish()

    def measure(self) -> None:
        """Run all steps; errors of one implementation do not affect the others."""
        try:
            self.problem = self._make_problem()
            self._make_references(self.problem)
        except (MemoryError, torch.cuda.OutOfMemoryError) as error:
            self.error = describe_error(error)
            for entry in self.entries:
                entry.fail("failed", f"no memory for the case: {self.error}")
            return
        torch.compiler.reset()  # or the shapes of all cases count towards its recompile limit
        for entry in [e for e in self.entries if e.status == "pending"]:
            self._attempt(entry, "prepare", self._prepare)
        self._time()
        for entry in self._alive():
            self._attempt(entry, "check after timing", self._check_after)
        for entry in self._alive():
            if entry.implementation.kind != "floor":
                self._attempt(entry, "host time", self._measure_host)

    def _make_problem(self) -> Problem:
        dtype = DTYPES[self.dtype]
        specs = (*self.workload.inputs(self.shape), *self.workload.outputs(self.shape))
        limits = self.settings
        plan = plan_sets(
            slab_bytes(specs, dtype),
            self.backend.l2_bytes,
            min(limits.memory_bytes, int(self.backend.free_bytes() * 0.4)),
            least=limits.least_sets,
            most=limits.most_sets,
        )
        return make_problem(
            self.workload,
            self.shape,
            self.dtype,
            dtype,
            device=self.backend.device,
            multiprocessors=self.backend.multiprocessors,
            plan=plan,
            seed=limits.seed,
            reference_rows=limits.reference_rows,
        )

    def _make_references(self, problem: Problem) -> None:
        """Compute all references first, before any implementation could damage the inputs."""
        kinds = [e.implementation for e in self.entries if e.implementation.kind != "floor"]
        for computation in dict.fromkeys(i.computation for i in kinds):
            with self.monitor.step(
                f"{shape_label(self.shape)}: float64 reference of {computation}"
            ):
                for index in problem.checked:
                    problem.expected(computation, index)
                self.backend.synchronize()

    def _attempt(self, entry: Entry, step: str, action: Callable[[Entry, Problem], None]) -> None:
        assert self.problem is not None
        name = f"{shape_label(self.shape)} {entry.implementation.name}: {step}"
        entry.running = step
        self.publish()
        try:
            with self.monitor.step(name):
                action(entry, self.problem)
                self.backend.synchronize()
            entry.running = None
        except Exception as error:  # a peer may raise anything, and the others must go on
            entry.fail("failed", f"{step}: {describe_error(error)}")
            self._require_device()

    def _require_device(self) -> None:
        try:
            self.backend.synchronize()
        except RuntimeError as error:
            raise DeviceLostError(describe_error(error)) from error

    def _alive(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.status == "ok"]

    def _prepare(self, entry: Entry, problem: Problem) -> None:
        begin = time.perf_counter()
        launcher = entry.implementation.make(problem)
        launcher.launch(0)
        self.backend.synchronize()
        entry.prepare_seconds = time.perf_counter() - begin
        entry.launcher = launcher
        if entry.implementation.kind != "floor":
            entry.before = self._check(entry, problem, launcher.launch)
            if not entry.before.passed:
                return entry.fail("wrong", f"before timing: {entry.before.reason}")
        self._record(entry, problem, launcher)
        entry.status = "ok"
        return None

    def _record(self, entry: Entry, problem: Problem, launcher: Launcher) -> None:
        count = problem.plan.count
        entry.recording = self.backend.record(launcher.launch, count, problem.checked)

    def _check(self, entry: Entry, problem: Problem, launch: Callable[[int], Outputs]) -> Verdict:
        """Check fresh launches on the chosen sets; the memory they may get is poisoned first."""
        verdicts = []
        for i in problem.checked:
            expected = problem.expected(entry.implementation.computation, i)
            poison(problem.outputs[i])
            # for outputs that the implementation allocates: the allocator hands these out again
            stale = [torch.empty_like(t) for t in problem.outputs[i] for _ in range(2)]
            poison(stale)
            del stale
            verdicts.append(check_outputs(launch(i), expected))
        return worst_of(verdicts)

    def _check_after(self, entry: Entry, problem: Problem) -> None:
        """Check the results of the timed recording itself."""
        recording = entry.recording
        if entry.implementation.kind == "floor" or recording is None:
            return
        for i in problem.checked:
            poison(recording.kept[i])
        recording.replay()
        self.backend.synchronize()
        name = entry.implementation.computation
        entry.after = worst_of(
            [check_outputs(recording.kept[i], problem.expected(name, i)) for i in problem.checked]
        )
        if not entry.after.passed:
            entry.fail("wrong", f"after timing: {entry.after.reason}")

    def _time(self) -> None:
        """Interleave replays of all recordings in an order that changes every round."""
        assert self.problem is not None
        entries = [entry for entry in self._alive() if entry.recording is not None]
        if not entries:
            return
        plan, order = self.problem.plan, random.Random(self.settings.seed)
        label = shape_label(self.shape)
        self.clocks["before"] = self.backend.clocks()
        self._warm(entries)
        for _ in range(self.settings.rounds):
            order.shuffle(entries)
            recordings = [entry.recording for entry in entries if entry.recording is not None]
            names = " ".join(entry.implementation.name for entry in entries)
            with self.monitor.step(f"{label}: timing one of {names}"):
                try:
                    times = self.backend.time_round(recordings, plan.flush)
                except RuntimeError as error:
                    for entry in entries:  # any of them may have done it; none was checked after
                        entry.fail("failed", f"timing: {describe_error(error)}")
                    raise DeviceLostError(describe_error(error)) from error
            for entry, microseconds in zip(entries, times, strict=True):
                entry.samples.append(microseconds / plan.count)
        self.clocks["after"] = self.backend.clocks()

    def _warm(self, entries: Sequence[Entry]) -> None:
        """Replay for a while, so that clocks are high and no first-launch cost remains."""
        begin = time.perf_counter()
        while True:
            for entry in entries:
                with self.monitor.step(
                    f"{shape_label(self.shape)} {entry.implementation.name}: warm-up"
                ):
                    if entry.recording is not None:
                        entry.recording.replay()
                        self.backend.synchronize()
            if time.perf_counter() - begin >= self.settings.warm_seconds:
                return

    def _measure_host(self, entry: Entry, problem: Problem) -> None:
        """Time the host's part of calls; batches are short so that no call waits for the device."""
        assert entry.launcher is not None
        call = entry.launcher.call or entry.launcher.launch
        count, calls = problem.plan.count, self.settings.host_batch_calls
        samples = []
        gc_was_on = gc.isenabled()
        gc.disable()
        try:
            for batch in range(self.settings.host_batches + 1):
                sets = [(batch * calls + j) % count for j in range(calls)]
                self.backend.synchronize()
                begin = time.perf_counter()
                for i in sets:
                    call(i)
                samples.append((time.perf_counter() - begin) / calls * 1e6)
        finally:
            if gc_was_on:
                gc.enable()
        entry.host = summarize(samples[1:])  # the first batch warms

    def publish(self) -> None:
        """Bring ``data`` up to date with everything measured so far."""
        bytes_moved = self.workload.bytes_moved(self.shape, DTYPES[self.dtype])
        flops = self.workload.flops(self.shape)
        plan = self.problem.plan if self.problem else None
        floors = {
            launch: best_floor([e for e in self.entries if e.implementation.dependent == dependent])
            for launch, dependent in (("plain", False), ("pdl", True))
        }
        self.data |= {
            "shape": list(self.shape),
            "label": shape_label(self.shape),
            "error": self.error,
            "bytes": bytes_moved,
            "flops": flops,
            "sets": asdict(plan) if plan else None,
            "clocks": self.clocks,
            "floor_us": floors,
            "implementations": [
                describe_entry(entry, bytes_moved, flops, floors) for entry in self.entries
            ],
        }

    def release(self) -> None:
        """Drop recordings and tensors before the next case allocates its own."""
        for entry in self.entries:
            entry.drop()
        self.problem = None
        gc.collect()
        # a lost device refuses this too, and that error must not replace the first one
        with suppress(RuntimeError):
            self.backend.release()
