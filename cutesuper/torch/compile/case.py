"""A region that is to be decided, with everything that the decision depends on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import Any, Literal

import torch

from cutesuper import measure
from cutesuper.ir.graph import KernelGraph
from cutesuper.targets import Target
from cutesuper.targets.roofline import baseline, least_us
from cutesuper.torch.aten.length_masks import lowered
from cutesuper.torch.compile import records
from cutesuper.torch.compile.options import BackendOptions
from cutesuper.torch.compile.partition import halves
from cutesuper.torch.compile.region import Region
from cutesuper.torch.compile.region_operator import Program, key_of, program_of
from cutesuper.torch.compile.trial import Sample

#: a region's program, the options, and its tensors
Place = tuple[object, ...]


@dataclass
class Seconds:
    """Seconds that deciding about a region took.

    Attributes:
        search: for a program, in whichever process.
        compile: until its kernels were compiled.
        trial: comparing it with PyTorch, compiling Inductor's code for the region, timing both.
    """

    search: float = 0.0
    compile: float = 0.0
    trial: float = 0.0

    @contextmanager
    def on(self, part: Literal["compile", "trial"]) -> Iterator[None]:
        """Add the time of the enclosed code."""
        start = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, part, getattr(self, part) + time.perf_counter() - start)


@dataclass
class Patience:
    """The end of the time in which everything is tried.

    Attributes:
        until: of ``time.monotonic()``.
        least_us: microseconds that a region and those like it must be expected to save, to be
            tried later.
        most: of ``time.monotonic()``, when other processes are no longer waited for, but to compile
            what is expected to save as much, and to search for what can save more.
        large_us: microseconds that are more.
        last: of ``time.monotonic()``, when they are not waited for at all.
        left: the places of cases that were waited for when that ended.
    """

    until: float = inf
    least_us: float = 0.0
    most: float = inf
    large_us: float = inf
    last: float = inf
    left: set[Place] = field(default_factory=set["Place"])

    @property
    def over(self) -> bool:
        """True if only what matters is tried."""
        return time.monotonic() > self.until


@dataclass(frozen=True)
class Case:
    """A region that is to be decided.

    Attributes:
        region: nodes with fake tensors in ``meta["val"]``.
        options: of the backend.
        patience: with its graph.
        count: of the regions of the graph that are decided like it.
        seconds: spent on it so far.
    """

    region: Region
    options: BackendOptions
    patience: Patience = field(default_factory=Patience, compare=False)
    count: int = 1
    seconds: Seconds = field(default_factory=Seconds, compare=False)

    @cached_property
    def key(self) -> str:
        """The key of its program. Raises CutesuperError."""
        return key_of(self.region.graph, self.options.target, self.region.follows)

    @cached_property
    def program(self) -> Program:
        """Its program. Raises CutesuperError."""
        program = program_of(self.key)
        program.budget_s = self.options.budget_s
        return program

    @cached_property
    def sample(self) -> Sample:
        """The region with the sizes for its trial. Raises CutesuperError."""
        return Sample(self.region, self.key)

    @cached_property
    def place(self) -> Place:
        """Text that is equal for cases that are decided alike. Raises CutesuperError."""
        patches = str(sorted(self.options.inductor.items()))
        options = self.options.take, self.options.budget_s, patches
        return (self.key, *options, self.sample.text)

    @cached_property
    def refusal(self) -> str | None:
        """The reason why neither the region nor a part of it is tried, or None.
        Raises CutesuperError."""
        device, take = self.sample.device, self.options.take
        if take != "all" and not self.anchors:
            return "nothing but element-wise work, of which Inductor makes one kernel as well"
        ends = {r.node for r in self.region.outputs}
        if any(lowered(n) & ends for n in self.region.nodes):
            return "scores that the lowest number hides leave it, and kernels have -inf there"
        if not self.sample.known:
            return "sizes depend on data, so nothing can be tried before the call"
        if device is None or device.type not in ("cpu", "cuda"):
            return "its tensors are not on one GPU, or on the CPU"
        if take == "faster" and self.clock is None:
            return (
                "nothing was timed: the tensors are on the CPU, and kernels run on a GPU; "
                "options={'take': 'modelled', 'target': 'h200'} asks the cost model"
            )
        return None

    @cached_property
    def anchors(self) -> int:
        """The number of reductions, products, and operators that move elements.
        Without any there is nothing to gain."""
        operators = [n.facets for n in self.region.graph.nodes]
        moves = (o.turns or o.puts for o in operators)
        return sum(moves) + sum(bool(o.reduces) or o.composite or o.contracts for o in operators)

    @cached_property
    def parts(self) -> tuple[Case, ...]:
        """The halves of the region, if each can have something to gain."""
        found = halves(self.region) if self.anchors > 1 else None
        return tuple(Case(part, self.options, self.patience, self.count) for part in found or ())

    # ------------------------------------------------------------------------- without a refusal

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        device = self.sample.device
        assert device is not None
        return device

    @cached_property
    def clock(self) -> measure.Device | None:
        """The device's clock, if regions are timed and it has one."""
        return measure.device_of(self.device) if self.options.take == "faster" else None

    @property
    def runs(self) -> bool:
        """True if kernels run on the device: otherwise nothing is compiled."""
        return self.device.type == "cuda"

    @property
    def searches(self) -> bool:
        """True if a program is searched for; what is taken unasked runs the reference on a CPU."""
        return self.runs or self.options.take != "all"

    @cached_property
    def target(self) -> Target:
        """The GPU that kernels are optimized for. Raises DeviceError."""
        return self.program.target_on(self.device)

    @cached_property
    def inductor_us(self) -> float:
        """Microseconds of Inductor's kernels, by a roofline. Raises CutesuperError."""
        return baseline(self._hinted, self.target).us

    @cached_property
    def _hinted(self) -> KernelGraph:
        extents = dict(zip(self.program.symbols, self.sample.extents, strict=True))
        return self.program.graph.with_hints(extents)

    def saves_little(self, ours: float = 0.0) -> bool:
        """True if kernels of so many microseconds, by the model, are no longer worth a trial."""
        return self.patience.over and self.saved_us(ours) < self.patience.least_us

    def saved_us(self, ours: float) -> float:
        """Microseconds that kernels of so many save, by the model, in all regions like this one."""
        return (self.inductor_us - ours) * self.count

    @cached_property
    def least_us(self) -> float:
        """Microseconds that any kernels take, at least, by the roofline. Raises CutesuperError."""
        return least_us(self._hinted, self.target)

    def is_awaited(self, expected: float | None) -> bool:
        """True if its kernels, of which as many microseconds are expected, are worth waiting for.
        Before a search has ended, nothing is expected."""
        if expected is None:
            return self.saved_us(self.least_us) >= self.patience.large_us
        return self.saved_us(expected) >= self.patience.least_us

    @property
    def most_us(self) -> float:
        """Microseconds beyond which no program is of use, by the model."""
        return self.inductor_us if self.options.take == "modelled" else inf

    @cached_property
    def question(self) -> tuple[object, ...]:
        """The case and its surroundings, for the records on disk.
        The surroundings are the GPU, and the programs that were tuned for it. Raises
        CutesuperError."""
        name = torch.cuda.get_device_name(self.device) if self.runs else ""
        tuned = self.program.tuned(self.sample.extents, self.target)
        return ("verdict", *self.place, name, self.target.name, tuned)

    @cached_property
    def record(self) -> dict[str, Any] | None:
        """The recorded verdict; None if there is none. Raises CutesuperError."""
        return records.read(self.question) if self.searches else None
