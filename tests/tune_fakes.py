"""A device for the tuner that computes on the CPU and whose clock and accidents are scripted."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch

from cutesuper.runtime.calling import Launches
from cutesuper.tune import isolate
from cutesuper.verify.numeric import execute


class Waiting:
    """The connection to a process of which one step hangs. That step is waited for a moment, the
    others as long as they take: a busy machine is no hang.

    Attributes:
        hangs: text of the step.
    """

    def __init__(self, connection: Any, hangs: str) -> None:
        self._connection, self._step, self.hangs = connection, "", hangs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def recv(self) -> Any:
        kind, content = message = self._connection.recv()
        if kind == "step":
            self._step = content
        return message

    def poll(self, timeout: float) -> bool:
        del timeout
        return self._connection.poll(0.5 if self.hangs in self._step else 600.0)


def waits_only_for(patch: pytest.MonkeyPatch, step: str) -> None:
    """Have workers (`cutesuper.tune.isolate`) count as hung in this step only."""
    start = isolate.Worker._start

    def started(worker: isolate.Worker) -> None:
        start(worker)
        worker._connection = cast("Any", Waiting(worker._connection, step))

    patch.setattr(isolate.Worker, "_start", started)


@dataclass
class FakeRecording:
    name: str
    launch: Any
    count: int

    def replay(self) -> None:
        for i in (0, self.count - 1):  # what is checked
            self.launch(i)


@dataclass
class FakeDevice:
    """Candidate ``c007`` does what ``script["c007"]`` says: it takes so many microseconds, or it
    hangs, crashes, raises, is wrong, is wrong once recorded, or breaks the device."""

    script: dict[str, Any] = field(default_factory=dict)
    free: int = 10**9
    device = torch.device("cpu")
    l2_bytes = 1000
    broken = False
    replays = 0

    def load(self, program: Any) -> Launches:
        how = self.script.get(program.name, 10.0)
        mu = program.mugraph
        calls: list[int] = []
        if how == "crashes":
            os._exit(3)
        if how == "raises":
            raise OSError("no such kernel")

        def launch(values: list[torch.Tensor]) -> None:
            calls.append(1)
            self.broken = how == "breaks"
            factor = 1.5 if how == "wrong" or (how == "wrong later" and len(calls) > 2) else 1.0
            inputs, outputs = values[: len(mu.inputs)], values[len(mu.inputs) :]
            for out, value in zip(outputs, execute(mu, inputs, torch.float32), strict=True):
                out.copy_(factor * value)

        self.current = program.name
        return Launches((), launch)

    def free_bytes(self) -> int:
        return self.free

    def synchronize(self) -> None:
        if self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def record(self, launch: Any, count: int) -> FakeRecording:
        return FakeRecording(self.current, launch, count)

    def time(self, recording: FakeRecording) -> float:
        how = self.script.get(recording.name, 10.0)
        if how == "hangs":
            time.sleep(100)
        if how == "slow":  # to look at
            time.sleep(0.3)
        recording.replay()
        self.replays += 1
        us = how if isinstance(how, float) else 10.0
        return (us + 0.01 * (self.replays % 3)) * recording.count

    def describe(self) -> dict[str, str | None]:
        return {"gpu": "scripted", "driver": "1.2", "cuda": None}
