"""``python -m benchmarks training``: forward and backward passes of training operators.

A case is one pass of an operator at one shape. It times the kernels that a call launches, including
those that save values for the backward pass. The host's time is measured separately (section
``host``): calls in eager mode through autograd.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._inductor import config as inductor

from benchmarks import training_operators as operators
from benchmarks.ahead import Ahead
from benchmarks.cli import check_options, selected, settings_of
from benchmarks.entry import Entry
from benchmarks.harness import Case, Settings
from benchmarks.peers import STREAMS, Implementation, Launcher
from benchmarks.problem import Problem
from benchmarks.sweep import Item, Sweep, add_sweep_options, sweep_main
from benchmarks.training_libraries import LIBRARIES, absent_from
from benchmarks.training_operators import Operator
from benchmarks.training_programs import ours
from benchmarks.training_torch import COPY, TORCH
from benchmarks.workload import Shape, shape_label
from benchmarks.workloads_training import Step, workload_of

#: a set of the largest case has 6.4 GB; the time goes into compiling
SETTINGS = Settings(
    rounds=20, warm_seconds=0.05, host_batches=20, host_batch_calls=16, least_sets=16,
    memory_bytes=14 * 10**9, reference_rows=256,
)  # fmt: skip
#: hundreds of programs are compiled in the step before the first case
TIMEOUT_SECONDS = 400.0
DTYPE = "bfloat16"
READ = tuple(f for f in STREAMS if not f.dependent)

#: extents of RMSNorm with the microseconds to reach, forward and backward
RMS_NORM: dict[Shape, tuple[float, float]] = {
    (128, 4096): (2.6, 3.6),
    (1024, 4096): (6.3, 9.5),
    (4096, 1024): (6.0, 9.5),
    (4096, 2048): (11.0, 16.0),
    (4096, 4096): (18.5, 28.0),
    (4096, 8192): (34.0, 52.0),
    (4096, 16384): (66.0, 105.0),
    (32768, 4096): (130.0, 205.0),
}
#: shapes of quack's own benchmarks (benchmarks/benchmark_softmax.py and others of quack), the last
#: two with half of the rows: kernels here have 32-bit offsets
QUACK: tuple[Shape, ...] = (
    (32768, 256), (32768, 1024), (32768, 4096), (32768, 16384), (16384, 65536), (4096, 262144),
)  # fmt: skip
#: tokens and width of the MLP: a tensor as large as LoRA's below, Llama-3-8B
MLP: tuple[Shape, ...] = ((8192, 4096), (4096, 14336))
LORA: tuple[Shape, ...] = ((8192, 4096),)
UPDATE: tuple[Shape, ...] = ((8, 4096), (64, 4096))
HOST: tuple[Shape, ...] = ((128, 4096),)
TARGETS = {"add_activation/relu": (49.6,), "normalized_update": (2.3, 3.0)}


class PassCase(Case):
    """A case that times kernels only."""

    def _measure_host(self, entry: Entry, problem: Problem) -> None:
        """Measure nothing: the functions called here are not those that users call."""


class HostCase(Case):
    """A case of calls through autograd, which cannot be captured."""

    def _record(self, entry: Entry, problem: Problem, launcher: Launcher) -> None:
        """Record nothing: the device runs only the kernels that a call launches."""


def rms_norm() -> list[Item]:
    """Both passes at the shapes with targets.
    With a float32 weight, errors of its gradient are not those of a last rounding."""
    items = []
    for step in Step:
        for shape, targets in RMS_NORM.items():
            target = targets[0 if step is Step.FORWARD else 1]
            items.append(_pass("rmsnorm", operators.rms_norm(), step, shape, target_us=target))
    wide = operators.rms_norm(torch.float32)
    shapes = ((4096, 4096), (32768, 4096))
    return items + [_pass("rmsnorm", wide, Step.BACKWARD, shape) for shape in shapes]


def _both(section: str, operator: Operator, shapes: Sequence[Shape]) -> list[Item]:
    return [_pass(section, operator, step, shape) for step in Step for shape in shapes]


def activations() -> list[Item]:
    """SwiGLU in both passes.
    LoRA on an MLP and the update of nGPT without gradients, in float16: two of the inference
    workloads."""
    items = _both("activations", operators.swiglu(), MLP)
    called = (
        (operators.add_activation("relu"), LORA),
        (operators.add_activation("sigmoid"), LORA),
        (operators.normalized_update(), UPDATE),
    )
    for operator, shapes in called:
        for n, shape in enumerate(shapes):
            targets = TARGETS.get(operator.name)
            labels = {"target_us": targets[n]} if targets else {}
            alone = replace(operator, gradients=())
            items.append(_pass("activations", alone, Step.FORWARD, shape, "float16", **labels))
    return items


def host() -> list[Item]:
    """Eager calls on tensors so small that the device does not matter."""
    several = (operators.rms_norm(), operators.layer_norm(), operators.softmax(),
               operators.cross_entropy())  # fmt: skip
    items = []
    for operator in several:
        for step in Step:
            workload = workload_of(operator, step, host=True)
            absent = _floors_but() | absent_from(operator.call) | {"cutesuper-pdl"}
            items += [
                Item(f"host/{operator.name}/{step.value}/{shape_label(shape)}", workload, shape,
                     _labels("host", operator, step), DTYPE, absent, HostCase)
                for shape in HOST
            ]  # fmt: skip
    return items


SECTIONS: dict[str, Callable[[], list[Item]]] = {
    "rmsnorm": rms_norm,
    "layernorm": lambda: _both("layernorm", operators.layer_norm(), QUACK[1:5]),
    "softmax": lambda: _both("softmax", operators.softmax(), QUACK),
    "crossentropy": lambda: _both("crossentropy", operators.cross_entropy(), QUACK),
    "activations": activations,
    "host": host,
}


def _labels(section: str, operator: Operator, step: Step) -> dict[str, Any]:
    return {"group": section, "operator": operator.title, "step": step.value,
            "gradients": list(operator.gradients) if step is Step.BACKWARD else []}  # fmt: skip


def _floors_but(*names: str) -> frozenset[str]:
    return frozenset(f.name for f in (*READ, COPY) if f.name not in names)


def _pass(
    section: str, operator: Operator, step: Step, shape: Shape, dtype: str = DTYPE, **labels: Any
) -> Item:
    workload = workload_of(operator, step)
    floors = [f.name for f in READ] if workload.traffic == "read" else [COPY.name]
    key = f"{section}/{operator.name}/{step.value}/{shape_label(shape)}"
    absent = _floors_but(*floors) | absent_from(operator.call)
    labels |= _labels(section, operator, step) | {"traffic": workload.traffic}
    return Item(key, workload, shape, labels, dtype, absent, PassCase)


def chosen(only: str | None) -> list[Item]:
    """``"softmax,host"`` -> the cases of these sections.
    The beginning of a key up to a slash selects some of a section.

    Raises:
        ValueError: a name that is neither.
    """
    items = [item for make in SECTIONS.values() for item in make()]
    names = tuple(SECTIONS) if only is None else tuple(only.split(","))
    for name in names:
        if not any(_under(item, name) for item in items):
            raise ValueError(
                f"--only {name!r}: one of {', '.join(SECTIONS)}, or the beginning of a case such "
                f"as {items[0].key}"
            )
    return [item for item in items if any(_under(item, name) for name in names)]


def _under(item: Item, name: str) -> bool:
    return f"{item.key}/".startswith(f"{name}/")


def make_sweep(items: Sequence[Item], peers: Sequence[Implementation], programs: Ahead) -> Sweep:
    """The sweep of the cases, with programs found before the first of them."""
    names = [i.name for i in peers]
    return Sweep(
        "training",
        "Training operators",
        tuple(items),
        (*READ, COPY, *peers),
        prepare=lambda missing: programs.prepare(missing, names),
        notes={"mix_order_reduction": inductor.triton.mix_order_reduction},
    )


def main(argv: Sequence[str], prog: str) -> int:
    """Measure; returns and raises as `cli.supervise`."""
    programs = Ahead()
    known = (*ours(programs.kernel), *TORCH, *LIBRARIES)
    parser = argparse.ArgumentParser(
        prog=prog, description="Measure forward and backward passes with their peers."
    )
    parser.add_argument(
        "--only",
        metavar="NAMES",
        help=f"comma-separated sections ({', '.join(SECTIONS)}) or beginnings of cases "
        "(rmsnorm/rms_norm/backward); default all",
    )
    add_sweep_options(parser, known)
    parser.set_defaults(timeout=TIMEOUT_SECONDS)
    arguments = parser.parse_args(argv)
    try:
        items = chosen(arguments.only)
        peers = selected(arguments, among=known)
        check_options(arguments)
    except ValueError as error:
        parser.error(str(error))
    sweep = make_sweep(items, peers, programs)
    return sweep_main(parser, arguments, sweep, settings_of(arguments, SETTINGS))
