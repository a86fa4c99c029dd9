"""The measuring process: draws inputs, checks candidates, times them, checks them again.

Inputs are drawn once, in enough sets to exceed L2. A candidate is launched over all sets in one
recording (with dependent launch each kernel overlaps the end of the one before it, as in use); a
time is a replay divided by its launches. Candidates of a job alternate, round by round.
"""

from __future__ import annotations

import math
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import torch

from cutesuper.ir.dims import extent
from cutesuper.ir.evaluate import evaluate
from cutesuper.ir.graph import KernelGraph, Node
from cutesuper.ir.operators.base import INPUT
from cutesuper.runtime.calling import Launches
from cutesuper.tune.candidates import Program
from cutesuper.tune.device import Device, Recording
from cutesuper.verify.integers import typical_integers
from cutesuper.verify.numeric import acceptable

#: total bytes of all input sets, unless 3 x L2 is more
COLD_BYTES = 512 * 10**6
#: launches in a recording: many dilute the cost of starting it, more than 128 add nothing
LEAST_SETS, MOST_SETS = 16, 128
#: part of the free memory that input sets may take; references in float64 need some too
MEMORY_SHARE = 0.4
#: rounds that are timed even when the time is up
LEAST_ROUNDS = 3

Tell = Callable[[str], None]
Sets = list[list[torch.Tensor]]


class DeviceLostError(RuntimeError):
    """The device no longer works (an illegal access is sticky)."""


@dataclass(frozen=True)
class Job:
    """Candidates to time against each other.

    Attributes:
        programs: compiled ones.
        rounds: how often each is timed.
        seconds: no round begins later than this, once there are `LEAST_ROUNDS`.
        warm_s: seconds of replays before the first round, to raise the clocks.
    """

    programs: tuple[Program, ...]
    rounds: int
    seconds: float
    warm_s: float = 0.0


@dataclass(frozen=True)
class Prepared:
    """A candidate that is ready to be timed; ``launch`` owns memory that the recording uses."""

    launch: Callable[[int], None]
    recording: Recording


@dataclass
class Outcome:
    """The result of a candidate.

    Attributes:
        status: "ok", "wrong" or "failed".
        reason: why it is not "ok".
        samples: microseconds of a launch, one for each round.
    """

    status: str = "ok"
    reason: str = ""
    samples: list[float] = field(default_factory=list)


def serve(
    connection: Connection, make_device: Callable[[], Device], graph: KernelGraph, seed: int
) -> None:
    """The main function of the process: does arriving jobs until the device or the other end is
    gone."""

    def tell(step: str) -> None:
        connection.send(("step", step))

    device = make_device()
    connection.send(("ready", {**device.describe(), "torch": torch.__version__}))
    bench: Bench | None = None
    while True:
        job: Job = connection.recv()  # EOFError at the end
        try:
            if bench is None:
                tell("inputs and references")
                bench = Bench(graph, device, seed, tell)
            connection.send(("done", bench.measure(job)))
        except (DeviceLostError, MemoryError, torch.cuda.OutOfMemoryError) as error:
            connection.send(("lost", _describe(error)))
            return


class Bench:
    """Inputs, their expected outputs, and candidates that run on them.

    Raises:
        MemoryError: not even one set of inputs fits.
    """

    def __init__(self, graph: KernelGraph, device: Device, seed: int, tell: Tell) -> None:
        self.device, self.tell, self.seed = device, tell, seed
        self.inputs, self.outputs = make_sets(graph, device, seed)
        self.dtypes = [graph.nodes[i].dtype for i in graph.outputs]
        self.checked = sorted({0, len(self.inputs) - 1})
        # before any candidate has had a chance to damage the inputs
        self.expected = {
            i: (evaluate(graph, self.inputs[i], torch.float64), evaluate(graph, self.inputs[i]))
            for i in self.checked
        }
        device.synchronize()

    def measure(self, job: Job) -> dict[str, Outcome]:
        """Outcomes by name. Raises DeviceLostError."""
        outcomes = {p.name: Outcome() for p in job.programs}
        ready: dict[str, Prepared] = {}
        for program in job.programs:
            outcome = outcomes[program.name]
            try:
                prepared = self._prepare(program, outcome)
            except Exception as error:  # a candidate may raise anything, and the others must go on
                outcome.status, outcome.reason = "failed", _describe(error)
                self._require_device()
                continue
            if prepared is not None:
                ready[program.name] = prepared
        self._time(ready, outcomes, job)
        for name, prepared in ready.items():
            self._check_recording(name, prepared.recording, outcomes[name])
        return outcomes

    def _prepare(self, program: Program, outcome: Outcome) -> Prepared | None:
        """Load, check and record a candidate; None if it is wrong."""
        self.tell(f"{program.name}: load")
        launch = self._launcher(self.device.load(program))
        self.tell(f"{program.name}: check")
        self._poison()
        for i in self.checked:
            launch(i)
        self._judge(outcome, "before timing")
        if outcome.status != "ok":
            return None
        self.tell(f"{program.name}: record")
        return Prepared(launch, self.device.record(launch, len(self.inputs)))

    def _launcher(self, launches: Launches) -> Callable[[int], None]:
        """A function that launches on input set i; all sets share the tensors between kernels, as
        in a stream."""
        between = [
            torch.empty([extent(d) for d in shape], dtype=dtype, device=self.device.device)
            for shape, dtype in launches.intermediates
        ]

        def launch(i: int) -> None:
            launches.launch([*self.inputs[i], *self.outputs[i], *between])

        return launch

    def _poison(self) -> None:
        for i in self.checked:
            for t in self.outputs[i]:
                t.fill_(math.nan)

    def _judge(self, outcome: Outcome, when: str) -> None:
        """Mark candidates that `verify.numeric.acceptable` refuses as wrong. Raises
        DeviceLostError."""
        self._require_device()
        for i in self.checked:
            for out, exact, eager, dtype in zip(
                self.outputs[i], *self.expected[i], self.dtypes, strict=True
            ):
                report = acceptable(out, exact, eager, dtype)
                if not report:
                    outcome.status, outcome.reason = "wrong", f"{when}: {report.message}"
                    return

    def _check_recording(self, name: str, recording: Recording, outcome: Outcome) -> None:
        """Check the results of the timed recording itself."""
        self.tell(f"{name}: check after timing")
        self._poison()
        recording.replay()
        self._judge(outcome, "after timing")

    def _time(self, ready: dict[str, Prepared], outcomes: dict[str, Outcome], job: Job) -> None:
        """Time one replay of each in every round, in a changing order."""
        begin = time.monotonic()
        names, order = list(ready), random.Random(self.seed)
        while names and time.monotonic() - begin < job.warm_s:
            for name in names:
                self._replay(name, ready[name].recording)
        for n in range(job.rounds if names else 0):
            if n >= LEAST_ROUNDS and time.monotonic() - begin > job.seconds:
                break
            order.shuffle(names)
            for name in names:
                elapsed = self._replay(name, ready[name].recording)
                outcomes[name].samples.append(elapsed / len(self.inputs))

    def _replay(self, name: str, recording: Recording) -> float:
        self.tell(f"{name}: timing")
        try:
            return self.device.time(recording)
        except RuntimeError as error:
            raise DeviceLostError(_describe(error)) from error

    def _require_device(self) -> None:
        try:
            self.device.synchronize()
        except RuntimeError as error:
            message = f"the device stopped working: {_describe(error)}"
            raise DeviceLostError(message) from error


# ----------------------------------------------------------------------------------------- inputs


def make_sets(graph: KernelGraph, device: Device, seed: int) -> tuple[Sets, Sets]:
    """Inputs and outputs, in enough sets to exceed L2, if memory has room for them.

    Inputs are normal; second operands of products are divided by the root of the contracted extent,
    so that products stay of order 1. Lengths and tables: `typical_integers`.

    Raises:
        MemoryError: not even one set fits.
    """
    ins, outs = ([graph.nodes[i] for i in indices] for indices in (graph.inputs, graph.outputs))
    size = sum(_bytes(n) for n in (*ins, *outs))
    room = int(device.free_bytes() * MEMORY_SHARE)
    if size > room:
        raise MemoryError(
            f"inputs and outputs need {size / 1e6:.0f} MB and {room / 1e6:.0f} MB may be used"
        )
    target = max(COLD_BYTES, 3 * device.l2_bytes)
    count = min(max(-(-target // size), LEAST_SETS), MOST_SETS, room // size)
    scales = _scales(graph)
    generator = torch.Generator(device.device).manual_seed(seed)

    def draw(index: int, number: int) -> torch.Tensor:
        node = graph.nodes[index]
        shape = tuple(extent(d) for d in node.shape)
        if node.dtype.integer:
            numbers = typical_integers(graph, index, shape, seed + number)
            return torch.from_numpy(numbers).to(device.device, node.dtype.torch)
        t = torch.randn(shape, generator=generator, device=device.device)
        return (t * scales.get(index, 1.0)).to(node.dtype.torch)

    def empty(node: Node) -> torch.Tensor:
        shape = [extent(d) for d in node.shape]
        return torch.empty(shape, dtype=node.dtype.torch, device=device.device)

    inputs = [[draw(i, number) for i in graph.inputs] for number in range(count)]
    outputs = [[empty(n) for n in outs] for _ in range(count)]
    return inputs, outputs


def _bytes(node: Node) -> int:
    return math.prod(extent(d) for d in node.shape) * node.dtype.itemsize


def _scales(graph: KernelGraph) -> dict[int, float]:
    """Scales of inputs that are the second operand of a product, by node."""
    found: dict[int, float] = {}
    for node in graph.nodes:
        if not node.facets.contracts:
            continue
        length = extent(graph.nodes[node.inputs[1]].shape[-2])
        waiting = [node.inputs[1]]
        while waiting:
            source = graph.nodes[i := waiting.pop()]
            if source.operator == INPUT:
                found[i] = length**-0.5
            elif source.facets.permutes or source.facets.cuts:
                waiting += source.inputs
    return found


def _describe(error: BaseException) -> str:
    """Type and first line of the message, at most 300 characters."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
