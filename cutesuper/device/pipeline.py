"""Pipelines: a ring of stages in shared memory that a producer fills and consumers read.

A stage is full once all bytes that its producer expects have arrived, and empty once all of its
readers have arrived. Producer and readers each walk with a `Slot` of their own, a stage and the
phase of its barriers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from cutesuper.device.barriers import Barrier, Barriers


@dataclass(frozen=True)
class Slot:
    """A place on the way through a ring.

    Attributes:
        stage: Int32.
        phase: of the stage's barriers (Int32), which alternates from round to round.
    """

    stage: Any
    phase: Any


@dataclass(frozen=True)
class Ring:
    """The stages of one operand, or of several that are loaded together.

    Attributes:
        stages: number of them.
        full: one barrier for each stage, for the bytes that come.
        empty: one for each stage, for its readers; None where something else tells the producer.
    """

    stages: int
    full: Barriers
    empty: Barriers | None = None

    def first(self, phase: int = 0) -> Slot:
        """The first slot.
        A producer that waits for the first round as for any other has phase 1, for which waits on a
        fresh barrier pass."""
        return Slot(Int32(0), Int32(phase))

    @cute.jit
    def next(self, slot):
        """The slot behind another one."""
        stage, phase = slot.stage + 1, slot.phase
        if stage == self.stages:
            stage = Int32(0)
            phase = phase ^ 1
        return Slot(stage, phase)

    @cute.jit
    def skip(self, slot, count):
        """The slot ``count`` stages on, at most a round."""
        stage, phase = slot.stage + count, slot.phase
        if stage >= self.stages:
            stage -= self.stages
            phase = phase ^ 1
        return Slot(stage, phase)

    def wait(self, slot: Slot) -> None:
        """Wait until a stage is full."""
        self.full[slot.stage].wait(slot.phase)

    def wait_empty(self, slot: Slot) -> None:
        """Wait until all readers have given a stage back."""
        self._empty()[slot.stage].wait(slot.phase)

    def release(self, stage: Any, lane: Any, blocks: int = 1) -> None:
        """Give a stage back, for one warp, to all blocks that load into it."""
        self._empty()[stage].arrive_warp(lane, blocks)

    def expect(self, stage: Any, count: Any) -> Barrier:
        """Expect ``count`` bytes in a stage (by one lane of the warp); return their barrier."""
        barrier = self.full[stage]
        barrier.expect_once(count)
        return barrier

    def _empty(self) -> Barriers:
        assert self.empty is not None, "this ring has no barriers for its readers"
        return self.empty
