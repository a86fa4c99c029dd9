"""Measuring in a process of its own, so that a kernel that hangs costs nothing but itself.

A kernel that never ends, or that breaks the device, takes its process with it. `Worker` holds a
process that measures one case after another and tells each step before it begins; when it falls
silent or dies, it is replaced, and `Lost` says during which step.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, cast

import torch

from benchmarks.device import Backend, Outputs, Recording, environment
from benchmarks.harness import Case, DeviceLostError, Monitor, Settings
from benchmarks.peers import Implementation
from benchmarks.workloads import RANKED, Shape

#: seconds for importing PyTorch and making a CUDA context
STARTUP_SECONDS = 180.0
#: seconds to wait for a process that was killed
KILL_SECONDS = 30.0


class Lost(RuntimeError):
    """The process hung or died.

    Attributes:
        step: what it was doing, as in "16x4096x4096 c007: prepare".
        reason: what happened.
    """

    def __init__(self, step: str, reason: str) -> None:
        super().__init__(f"{reason} in {step}")
        self.step, self.reason = step, reason

    def culprit(self, names: Sequence[str]) -> str | None:
        """The one of ``names`` whose step it was, or None."""
        return next((n for n in names if f" {n}: " in f" {self.step} "), None)


@dataclass(frozen=True)
class Job:
    """One case to measure; everything in it can be pickled."""

    workload: str
    shape: Shape
    dtype: str
    implementations: tuple[Implementation, ...]
    settings: Settings

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the implementations."""
        return tuple(i.name for i in self.implementations)

    def without(self, names: Sequence[str]) -> Job:
        """The same with fewer implementations."""
        kept = tuple(i for i in self.implementations if i.name not in names)
        return replace(self, implementations=kept)


class Worker:
    """A process that measures; started at once, replaced after it was lost.

    Args:
        make_backend: makes the device there; a module-level callable.
        timeout: seconds of silence after which it counts as hung.
    """

    def __init__(self, make_backend: Callable[[], Backend], timeout: float) -> None:
        self._make_backend, self._timeout = make_backend, timeout
        self._environment: dict[str, Any] | None = None
        self._start()

    def environment(self) -> dict[str, Any]:
        """What `benchmarks.device.environment` says there.

        Raises:
            Lost: the process does not come up.
        """
        if self._environment is None:
            self._environment = self._receive("ready", "start-up", STARTUP_SECONDS)
        return self._environment

    def measure(self, job: Job) -> dict[str, Any]:
        """What `benchmarks.harness.Case` publishes for a job.

        Raises:
            Lost: the process hung, died, or lost its device; the next call has a new one.
        """
        self.environment()
        try:
            self._connection.send(job)
        except OSError:
            raise self._lose("the beginning", "the process died") from None
        return self._receive("done", "the beginning", self._timeout)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join(KILL_SECONDS)
        self._connection.close()

    def _start(self) -> None:
        # spawned: CUDA does not survive a fork
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=serve, args=(theirs, self._make_backend), name="measure", daemon=True
        )
        self._process.start()
        theirs.close()  # or its end would not be seen

    def _receive(self, wanted: str, step: str, timeout: float) -> dict[str, Any]:
        """Follow the steps until the wanted message comes."""
        while True:
            try:
                if not self._connection.poll(timeout):
                    raise self._lose(step, f"no progress for {timeout:.0f} s")
                kind, content = self._connection.recv()
            except (EOFError, OSError):
                raise self._lose(step, "the process died") from None
            if kind == wanted:
                return content
            if kind == "lost":
                raise self._lose(step, content)
            step = content

    def _lose(self, step: str, reason: str) -> Lost:
        self.close()
        self._environment = None
        self._start()
        return Lost(step, reason)


class Telling(Monitor):
    """Tells every step; around a backend, so that rounds are timed one recording at a time.

    The harness replays all recordings of a round in one call, and who hangs in there would remain
    unknown.
    """

    def __init__(self, backend: Backend, connection: Connection) -> None:
        self._backend, self._connection = backend, connection
        self._now = ""
        self._owners: dict[int, str] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def step(self, name: str) -> AbstractContextManager[None]:
        """Tell the step before it begins."""
        self._now = name
        self._connection.send(("step", name))
        return nullcontext()

    def record(
        self, launch: Callable[[int], Outputs], count: int, keep: Sequence[int]
    ) -> Recording:
        """Record, and remember for whom: steps are called "SHAPE NAME: what"."""
        recording = self._backend.record(launch, count, keep)
        self._owners[id(recording)] = self._now.partition(":")[0]
        return recording

    def time_round(self, recordings: Sequence[Recording], flush: bool) -> list[float]:
        """The times of a round, told and taken one by one."""
        times: list[float] = []
        for recording in recordings:
            self.step(f"{self._owners[id(recording)]}: timing")
            times += self._backend.time_round([recording], flush)
        return times


def serve(connection: Connection, make_backend: Callable[[], Backend]) -> None:
    """The process: measures the jobs that arrive, until the device or the other end is gone."""
    backend = make_backend()
    torch.compiler.reset()  # the harness does so too; its first import takes seconds
    connection.send(("ready", environment(backend)))
    while True:
        try:
            job: Job = connection.recv()
        except EOFError:
            return
        try:
            connection.send(("done", measure(job, Telling(backend, connection))))
        except DeviceLostError as error:
            connection.send(("lost", f"the device stopped working: {error}"))
            return


def measure(job: Job, telling: Telling) -> dict[str, Any]:
    """What the harness publishes for a job. Raises DeviceLostError."""
    case = Case(
        RANKED[job.workload],
        job.shape,
        job.dtype,
        job.implementations,
        job.settings,
        cast("Backend", telling),
        telling,
    )
    try:
        case.measure()
        case.publish()
        return case.data
    finally:
        case.release()
