"""A step of decoding as a case of the harness; the model takes the place of the input sets.

A step reads weights of gigabytes, so that one set is enough for a cold L2. All steps are the last
one that fits into the cache: the same token at the same position, so that a recording can be
replayed and its logits checked again. Only logits are compared; the chosen token is computed too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from benchmarks.check import Expected, measure_error
from benchmarks.entry import Entry
from benchmarks.harness import Case
from benchmarks.peers import Launcher
from benchmarks.problem import Problem, SetPlan
from benchmarks.workload import DTYPES, Computation, Outputs, Shape, TensorSpec, Workload
from examples.llama.decode import Cache, Llama, exact_logits, new_model
from examples.llama.decode import Shape as Extents
from examples.llama.decode_ways import fastest_attention

#: the implementation launched step by step, as by a loop in Python; all others are in a CUDA graph
UNCAPTURED = "eager"


@dataclass(frozen=True)
class DecodeWorkload(Workload):
    """One step for a batch of sequences; `model` has all extents except the number of layers.

    A shape is (batch, tokens in the cache, layers).
    """

    model: Extents = field(kw_only=True)


def decode_workload(model: Extents, name: str, shapes: tuple[Shape, ...]) -> DecodeWorkload:
    """A step of a model called `name`."""

    def weights(shape: Shape) -> int:
        width, hidden = model.width, model.hidden
        layer = width * (2 + model.projected + model.heads * model.head + 3 * hidden)
        return shape[2] * layer + width * (1 + model.vocabulary)

    def inputs(shape: Shape) -> tuple[TensorSpec, ...]:
        batch, context, layers = shape
        cache = (2 * layers, batch, model.groups, context, model.head)
        return TensorSpec("weights", (weights(shape),)), TensorSpec("cache", cache)

    def flops(shape: Shape) -> int:
        batch, context, layers = shape
        return 2 * batch * (weights(shape) + 2 * layers * model.heads * model.head * context)

    def nothing(*_: Any) -> Any:
        raise NotImplementedError(f"{name}: a whole model is no kernel graph")

    return DecodeWorkload(
        name="decode",
        title=f"{name}, a step",
        axes=("batch", "context", "layers"),
        shapes=shapes,
        dtypes=("bfloat16",),
        inputs=inputs,
        outputs=lambda shape: (TensorSpec("logits", (shape[0], model.vocabulary)),),
        computations={"full": Computation(nothing, nothing)},
        flops=flops,
        graph=nothing,
        model=model,
    )


@dataclass
class DecodeProblem(Problem):
    """A model with a full cache, and the tokens that come last."""

    model: Llama = field(kw_only=True)
    caches: list[Cache] = field(kw_only=True)
    tokens: torch.Tensor = field(kw_only=True)
    positions: torch.Tensor = field(kw_only=True)


@lru_cache(maxsize=1)  # weights of gigabytes: the batches of a run share them
def model_of(extents: Extents, context: int, device: torch.device, dtype: torch.dtype) -> Llama:
    """A model with random weights."""
    return new_model(extents, context, device, dtype)


@dataclass
class Uncaptured:
    """A recording whose replay launches again, so that launches are timed."""

    launch: Any
    kept: dict[int, Outputs]

    def replay(self) -> None:
        """Run a step."""
        self.kept[0] = self.launch(0)


class DecodeCase(Case):
    """The case of one batch size."""

    def _make_problem(self) -> DecodeProblem:
        workload = self.workload
        if not isinstance(workload, DecodeWorkload):
            raise TypeError(f"{workload.name}: no step of decoding")
        batch, context, layers = self.shape
        dtype, device = DTYPES[self.dtype], self.backend.device
        extents = Extents(**{**vars(workload.model), "layers": layers})
        draw = torch.Generator(device).manual_seed(self.settings.seed)
        model = model_of(extents, context, device, dtype)
        size = workload.bytes_moved(self.shape, dtype)
        shape = (batch,)
        problem = DecodeProblem(
            workload, self.shape, dtype, self.dtype, self.backend.multiprocessors,
            SetPlan(1, size, flush=size < 3 * self.backend.l2_bytes),
            slabs=[torch.zeros(size, dtype=torch.uint8, device=device)],
            inputs=[()],
            outputs=[()],
            checked=(0,),
            model=model,
            caches=model.new_cache(batch, draw),
            tokens=torch.randint(extents.vocabulary, shape, device=device, generator=draw),
            positions=torch.full(shape, context - 1, device=device),
        )  # fmt: skip
        problem.expect("full", 0, [_expected(problem)])
        return problem

    def _record(self, entry: Entry, problem: Problem, launcher: Launcher) -> None:
        if entry.implementation.name != UNCAPTURED:
            super()._record(entry, problem, launcher)
            return
        entry.recording = Uncaptured(launcher.launch, {0: launcher.launch(0)})

    def _measure_host(self, entry: Entry, problem: Problem) -> None:
        """Measure nothing.
        Only the uncaptured implementation waits for the host, and its time includes that."""


@torch.no_grad()
def _expected(problem: DecodeProblem) -> Expected:
    """Logits in float64, and the error of PyTorch."""
    start = problem.model.capacity - 1
    exact = exact_logits(problem.model, problem.caches, problem.tokens[:, None], start)[:, 0]
    with fastest_attention():
        eager = problem.model(problem.tokens, problem.positions, problem.caches)
    return Expected(exact, measure_error(eager, exact), tuple(exact.shape), eager.dtype)
