"""Measuring in a separate process (`cutesuper.tune.isolate`), with the harness inside."""

from __future__ import annotations

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
from cutesuper.tune import isolate
from cutesuper.tune.isolate import Lost


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
        """A job with fewer implementations."""
        kept = tuple(i for i in self.implementations if i.name not in names)
        return replace(self, implementations=kept)


class Worker(isolate.Worker):
    """A process that measures jobs.

    Args:
        make_backend: makes the device there; a module-level callable.
        timeout: seconds of silence after which it counts as hung.
    """

    def __init__(self, make_backend: Callable[[], Backend], timeout: float) -> None:
        super().__init__(serve, (make_backend,), timeout)

    def environment(self) -> dict[str, Any]:
        """The result of `benchmarks.device.environment` in the process. Raises Lost."""
        return self.greeting()

    def measure(self, job: Job) -> dict[str, Any]:
        """The results that `benchmarks.harness.Case` publishes for a job. Raises Lost."""
        return self.ask(job)


class Telling(Monitor):
    """A monitor that reports every step.
    As a backend it times the recordings of a round one by one.

    The harness replays all recordings of a round in one call, so that the one that hangs would
    remain unknown.
    """

    def __init__(self, backend: Backend, connection: Connection) -> None:
        self._backend, self._connection = backend, connection
        self._now = ""
        self._owners: dict[int, str] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def step(self, name: str) -> AbstractContextManager[None]:
        """Report the step before it begins."""
        self._now = name
        self._connection.send(("step", name))
        return nullcontext()

    def record(
        self, launch: Callable[[int], Outputs], count: int, keep: Sequence[int]
    ) -> Recording:
        """Record, and remember the owner: steps are called "SHAPE NAME: what"."""
        recording = self._backend.record(launch, count, keep)
        self._owners[id(recording)] = self._now.partition(":")[0]
        return recording

    def time_round(self, recordings: Sequence[Recording], flush: bool) -> list[float]:
        """The times of a round, reported and taken one by one."""
        times: list[float] = []
        for recording in recordings:
            self.step(f"{self._owners[id(recording)]}: timing")
            times += self._backend.time_round([recording], flush)
        return times


def serve(connection: Connection, make_backend: Callable[[], Backend]) -> None:
    """The main function of the process: measures jobs until device or other end is gone."""
    backend = make_backend()
    torch.compiler.reset()  # the harness does so too; its first import takes seconds
    connection.send(("ready", environment(backend)))
    while True:
        job: Job = connection.recv()  # EOFError at the end
        try:
            connection.send(("done", measure(job, Telling(backend, connection))))
        except DeviceLostError as error:
            connection.send(("lost", f"the device stopped working: {error}"))
            return


def measure(job: Job, telling: Telling) -> dict[str, Any]:
    """The harness's results for a job. Raises DeviceLostError."""
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


__all__ = ["Job", "Lost", "Telling", "Worker", "measure"]
