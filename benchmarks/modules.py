"""``python -m benchmarks modules``: modules as people write them, compiled by both backends.

Each function of `module_list` is compiled by torch.compile with Inductor and with
``backend="cutesuper"``, which takes what it measures to be faster and leaves the rest to Inductor:
a ratio below 1 is a mistake of what it measures, or the noise of two measurements.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.cli import check_options, selected, settings_of
from benchmarks.decode_peers import backend
from benchmarks.harness import Settings
from benchmarks.module_list import MODULES, Module
from benchmarks.peers import PEERS, STREAMS, Implementation
from benchmarks.sweep import Item, Sweep, add_sweep_options, names_of, sweep_main
from benchmarks.workload import DTYPES, Computation, Outputs, Shape, TensorSpec, Workload

DTYPE = "bfloat16"
SETTINGS = Settings(
    rounds=20, warm_seconds=0.02, host_batches=1, memory_bytes=4 * 10**9, least_sets=8
)
IMPLEMENTATIONS: tuple[Implementation, ...] = (
    Implementation("cutesuper-backend", "ours", backend),
    *(peer for peer in PEERS if peer.name in ("eager", "compile")),
)
READ = tuple(f for f in STREAMS if not f.dependent)


def workload_of(name: str) -> Workload:
    """A module as a workload of one shape, whose parameters are inputs like all others."""
    module = MODULES[name]
    function = _with_tuple(module.function)
    inputs = tuple(_inputs(module))

    def outputs(_: Shape) -> tuple[TensorSpec, ...]:
        given = [torch.empty(s.dims, dtype=s.element(DTYPES[DTYPE]), device="meta") for s in inputs]
        return tuple(
            TensorSpec(f"y{n}", tuple(t.shape), dtype=t.dtype)
            for n, t in enumerate(function(*given))
        )

    def nothing(*_: Any) -> Any:
        raise NotImplementedError(f"{name}: a function of PyTorch")

    return Workload(
        name="modules",
        title=name.replace("_", " "),
        axes=("case",),
        shapes=((1,),),
        dtypes=(DTYPE,),
        inputs=lambda _: inputs,
        outputs=outputs,
        computations={"full": Computation(function, function)},
        flops=lambda _: 0,
        graph=nothing,
    )


def _with_tuple(function: Callable[..., Any]) -> Callable[..., Outputs]:
    def call(*given: torch.Tensor) -> Outputs:
        made = function(*given)
        return made if isinstance(made, tuple) else (made,)

    return call


def _inputs(module: Module) -> list[TensorSpec]:
    """Activations of order 1; parameters such that what they make is too; labels."""
    made = [TensorSpec(f"x{n}", shape) for n, shape in enumerate(module.inputs)]
    for n, shape in enumerate(module.parameters):
        length = torch.Size(shape[1:]).numel()
        scale = {"std": length**-0.5} if len(shape) > 1 else {"mean": 1.0, "std": 0.25}
        made.append(TensorSpec(f"w{n}", shape, **scale, constant=True))
    if module.labels is not None:
        rows, values = module.labels

        def labels(generator: torch.Generator, dims: Shape) -> torch.Tensor:
            return torch.randint(values, dims, generator=generator, device=generator.device)

        made.append(TensorSpec("labels", (rows,), dtype=torch.int64, fill=labels))
    return made


def make_sweep(names: Sequence[str], peers: Sequence[Implementation]) -> Sweep:
    """The sweep of some modules."""
    items = tuple(Item(name, workload_of(name), (1,), {"group": name}, DTYPE) for name in names)
    return Sweep("modules", "Modules, compiled", items, (*READ, *peers))


def main(argv: Sequence[str], prog: str) -> int:
    """Measure; returns and raises as `cli.supervise`."""
    parser = argparse.ArgumentParser(prog=prog, description="Measure modules of plain PyTorch.")
    parser.add_argument("--only", help=f"comma-separated subset of: {', '.join(MODULES)}")
    add_sweep_options(parser, IMPLEMENTATIONS)
    arguments = parser.parse_args(argv)
    try:
        names = names_of(arguments.only, tuple(MODULES), "--only")
        peers = selected(arguments, among=IMPLEMENTATIONS)
        check_options(arguments)
    except ValueError as error:
        parser.error(str(error))
    return sweep_main(parser, arguments, make_sweep(names, peers), settings_of(arguments, SETTINGS))
