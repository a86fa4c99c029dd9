"""The measuring process: draws inputs, checks candidates, times them, checks them again.

Candidates are timed as `cutesuper.measure` says, all on the same sets of inputs. In a recording of
several launches each kernel overlaps the end of the one before it (dependent launch), as in use.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection

import torch

from cutesuper.ir.dims import extent
from cutesuper.ir.evaluate import evaluate
from cutesuper.ir.graph import KernelGraph, Node
from cutesuper.ir.operators.base import INPUT
from cutesuper.measure import Recording, Rounds, Sets, alternate
from cutesuper.runtime.calling import Launches
from cutesuper.tune.candidates import Program
from cutesuper.tune.device import Device
from cutesuper.verify.integers import typical_integers
from cutesuper.verify.numeric import acceptable

#: many launches dilute the cost of starting a recording, more than 128 add nothing; references in
#: float64 need memory too
SETS = Sets(cold_bytes=512 * 10**6, least=16, most=128, enough=1, memory_share=0.4)

Tell = Callable[[str], None]
Tensors = list[list[torch.Tensor]]


class DeviceLostError(RuntimeError):
    """The device no longer works (an illegal access is sticky)."""


@dataclass(frozen=True)
class Job:
    """Candidates to time against each other.

    Attributes:
        programs: compiled ones.
        rounds: how often each is timed.
        seconds: no round begins later than this, once there are `Rounds.least`.
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
    """The main function of the process: does jobs until the device or the other end is gone."""

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
        self.continued = graph.continued
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
        """A function that launches on input set i.
        All sets share the tensors between kernels, as in a stream."""
        between = [
            torch.empty([extent(d) for d in shape], dtype=dtype, device=self.device.device)
            for shape, dtype in launches.intermediates
        ]

        def launch(i: int) -> None:
            launches.launch([*self.inputs[i], *self.outputs[i], *between])

        return launch

    def _poison(self) -> None:
        for i in self.checked:
            for n, t in enumerate(self.outputs[i]):
                if n in self.continued:
                    t.copy_(self.inputs[i][self.continued[n]])
                else:
                    t.fill_(math.nan)

    def _judge(self, outcome: Outcome, when: str) -> None:
        """Mark candidates that `verify.numeric.acceptable` refuses as wrong.
        Raises DeviceLostError."""
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
        replays = {n: partial(self._replay, n, p.recording) for n, p in ready.items()}
        rounds = Rounds(job.rounds, warm_s=job.warm_s, seconds=job.seconds, seed=self.seed)
        for name, samples in alternate(replays, rounds).items():
            outcomes[name].samples += [us / len(self.inputs) for us in samples]

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


def make_sets(graph: KernelGraph, device: Device, seed: int) -> tuple[Tensors, Tensors]:
    """Inputs and outputs, in enough sets to exceed L2, if memory has room for them.

    Inputs are normal; second operands of products are divided by the root of the contracted extent,
    so that products stay of order 1. Lengths and tables: `typical_integers`.

    Raises:
        MemoryError: not even one set fits.
    """
    ins, outs = ([graph.nodes[i] for i in indices] for indices in (graph.inputs, graph.outputs))
    size = sum(_bytes(n) for n in (*ins, *outs))
    count = SETS.count(size, device)
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
