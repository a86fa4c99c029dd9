"""``python -m benchmarks inference``: all workloads with peers, in one run and one table."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks.cli import check_options, selected, settings_of
from benchmarks.harness import Settings
from benchmarks.peers import FLOORS, Implementation
from benchmarks.sweep import Item, Sweep, add_sweep_options, names_of, sweep_main
from benchmarks.workload import shape_label
from benchmarks.workloads import MEASURED

#: with a gain, RMSNorm + Linear has a line in the table of the layers
WORKLOADS = tuple(name for name in MEASURED if name != "rmsnorm_gain_linear")


def make_sweep(workloads: Sequence[str], peers: Sequence[Implementation]) -> Sweep:
    """The sweep of all shapes of these workloads."""
    items = [
        Item(f"{name}/{shape_label(shape)}", MEASURED[name], shape)
        for name in workloads
        for shape in MEASURED[name].shapes
    ]
    return Sweep("inference", "Inference workloads", tuple(items), (*FLOORS, *peers))


def main(argv: Sequence[str], prog: str) -> int:
    """Measure; returns and raises as `cli.supervise`."""
    parser = argparse.ArgumentParser(prog=prog, description="Measure all workloads with peers.")
    parser.add_argument("--workloads", help=f"comma-separated subset of: {', '.join(WORKLOADS)}")
    add_sweep_options(parser)
    arguments = parser.parse_args(argv)
    try:
        workloads = names_of(arguments.workloads, WORKLOADS, "--workloads")
        peers = selected(arguments)
        check_options(arguments)
    except ValueError as error:
        parser.error(str(error))
    sweep = make_sweep(workloads, peers)
    return sweep_main(parser, arguments, sweep, settings_of(arguments, Settings()))
