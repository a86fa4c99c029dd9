"""``python -m benchmarks chain``: many RMSNorm + Linear in a row, each reading the previous.

One CUDA graph holds all layers, so that launches overlap where an implementation lets them; their
weights differ and are 1 GB together, so that L2 is cold. Times are of one layer. ``torch.compile``
is captured in the same kind of graph, which is what its mode "reduce-overhead" does.

The result of the last layer is checked against the whole chain in float64, by the rule of `check`
with PyTorch's own error through the same chain. Norms keep every layer's output near 1, and a
random square weight passes an error on at its size, so that the rounding errors of the layers add
as independent ones: the error grows with the square root of the number of layers, for PyTorch as
for all others, and the rule needs no factor for the depth.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.check import Expected, Verdict, check_outputs, measure_error, poison
from benchmarks.cli import add_options, check_options, selected, settings_of, supervise
from benchmarks.device import Backend, CudaBackend, environment
from benchmarks.entry import Entry
from benchmarks.harness import SCHEMA, Case, Monitor, Settings, measure_case
from benchmarks.peers import FLOORS, PEERS, Implementation, Launcher
from benchmarks.problem import TARGET_BYTES, Problem, SetPlan, make_problem, slab_bytes
from benchmarks.workload import DTYPES, Outputs, Shape
from benchmarks.workloads import WORKLOADS

WORKLOAD = WORKLOADS["rmsnorm_linear"]
SHAPE: Shape = (16, 4096, 4096)
LAYERS = 32
DTYPE = "float16"


def chained(problem: Problem) -> Problem:
    """Let every set read the output of the previous set, and judge the last one by the whole chain.

    x0, w0 -> y0; x1, w1 -> y1; ...   becomes   x0, w0 -> y0; y0, w1 -> y1; ...
    """
    for i in range(1, problem.plan.count):
        problem.inputs[i] = (problem.outputs[i - 1][0], problem.inputs[i][1])
    full = WORKLOAD.computations["full"]
    [exact] = _through(problem, full.reference, torch.float64)
    [eager] = _through(problem, full.eager, problem.dtype)
    last = problem.plan.count - 1
    error = measure_error(eager, exact)
    problem.expect("full", last, [Expected(exact, error, tuple(exact.shape), problem.dtype)])
    problem.checked = (last,)
    return problem


def _through(problem: Problem, layer: Callable[..., Outputs], dtype: torch.dtype) -> Outputs:
    value = (problem.inputs[0][0].to(dtype),)
    for _, w in problem.inputs:
        value = layer(value[0], w.to(dtype))
    return value


def _compiled(problem: Problem) -> Launcher:
    """The compiled peer of one layer, fed with its own results, as it has no output argument."""
    function = torch.compile(WORKLOAD.computations["full"].eager, dynamic=False, fullgraph=True)
    inputs = problem.inputs
    value = inputs[0][:1]

    def launch(i: int) -> Outputs:
        nonlocal value
        value = function(value[0] if i else inputs[0][0], inputs[i][1])
        return value

    return Launcher(launch, call=lambda i: function(*inputs[i]))


IMPLEMENTATIONS: tuple[Implementation, ...] = tuple(
    Implementation("compile", "peer", _compiled) if peer.name == "compile" else peer
    for peer in PEERS
    if peer.name in ("cutesuper", "cutesuper-pdl", "eager", "compile")
)


class ChainCase(Case):
    """A case whose sets are the layers of a chain."""

    def _make_problem(self) -> Problem:
        dtype = DTYPES[self.dtype]
        specs = (*self.workload.inputs(self.shape), *self.workload.outputs(self.shape))
        size = slab_bytes(specs, dtype)
        cold = LAYERS * size >= max(3 * self.backend.l2_bytes, TARGET_BYTES)
        return chained(
            make_problem(
                self.workload,
                self.shape,
                self.dtype,
                dtype,
                device=self.backend.device,
                multiprocessors=self.backend.multiprocessors,
                plan=SetPlan(LAYERS, size, flush=not cold),
                seed=self.settings.seed,
            )
        )

    def _check(self, entry: Entry, problem: Problem, launch: Callable[[int], Outputs]) -> Verdict:
        """Run the chain once from poisoned memory and check its end."""
        for outputs in problem.outputs:
            poison(outputs)
        values: Outputs = ()
        for i in range(problem.plan.count):
            values = launch(i)
        expected = problem.expected(entry.implementation.computation, problem.plan.count - 1)
        return check_outputs(values, expected)


def run(
    peers: Sequence[Implementation],
    settings: Settings,
    *,
    shape: Shape = SHAPE,
    floors: Sequence[Implementation] = FLOORS,
    backend: Backend | None = None,
    monitor: Monitor | None = None,
) -> dict[str, Any]:
    """Measure the chain and return plain data, ready for JSON; times are of one layer.

    Raises:
        ValueError: the layers are not square.
        DeviceLostError: an implementation broke the device; the monitor has what was finished.
    """
    if shape[1] != shape[2]:
        raise ValueError(f"chain of {shape}: a layer reads what the one before writes")
    backend, monitor = backend or CudaBackend(), monitor or Monitor()
    results: dict[str, Any] = {
        "schema": SCHEMA,
        "kind": "chain",
        "name": "chain",
        "title": f"{LAYERS} x ({WORKLOAD.title}) in one CUDA graph",
        "dtype": DTYPE,
        "layers": LAYERS,
        "settings": asdict(settings),
        "environment": environment(backend),
        "cases": [],
    }
    monitor.started(results)
    everybody = [*floors, *peers]
    case = ChainCase(WORKLOAD, shape, DTYPE, everybody, settings, backend, monitor)
    measure_case(results, case)
    return results


def main(argv: Sequence[str], prog: str) -> int:
    """Measure; returns and raises as `cli.supervise`."""
    parser = argparse.ArgumentParser(
        prog=prog, description=f"Measure {LAYERS} layers in a row, in one CUDA graph."
    )
    add_options(parser, IMPLEMENTATIONS)
    arguments = parser.parse_args(argv)
    try:
        peers = selected(arguments, among=IMPLEMENTATIONS)
        check_options(arguments)
    except ValueError as error:
        parser.error(str(error))
    settings = settings_of(arguments, Settings())

    def measure(monitor: Monitor) -> None:
        run(peers, settings, monitor=monitor)

    return supervise(arguments, measure)
