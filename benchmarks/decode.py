"""``python -m benchmarks decode``: whole steps of a model, tokens per second.

A step of a model with the shape of Llama-3-8B (examples/llama/decode.py) and random weights in
bfloat16, for sequences of 4096 tokens; one of Llama-3.2-1B, for 2048; and a function of PyTorch,
traced, against torch.compile of the same function: the top MLP of DLRM.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks.cli import check_options, selected, settings_of
from benchmarks.decode_peers import ABSENT, IMPLEMENTATIONS
from benchmarks.decode_problem import DecodeCase, DecodeWorkload, decode_workload
from benchmarks.harness import Case, Settings
from benchmarks.peers import STREAMS, Implementation
from benchmarks.sweep import Item, Sweep, add_sweep_options, names_of, sweep_main
from benchmarks.workload import Workload, shape_label
from benchmarks.workloads import MEASURED
from examples.llama.decode import LLAMA_3_2_1B, LLAMA_3_8B

DTYPE = "bfloat16"
SECTIONS = ("llama", "llama-1b", "dlrm")
#: a step takes milliseconds, most of the time goes into compiling
SETTINGS = Settings(rounds=30, warm_seconds=0.05, host_batches=10)
#: for one step: compilers get a whole layer, and searches run in this process
TIMEOUT_SECONDS = 400.0
READ = tuple(f for f in STREAMS if not f.dependent)


def llama(layers: int) -> DecodeWorkload:
    """A step of Llama-3-8B with this number of layers."""
    return decode_workload(LLAMA_3_8B, "Llama-3-8B", tuple((b, 4096, layers) for b in (1, 8, 32)))


def small_llama(layers: int) -> DecodeWorkload:
    """A step of Llama-3.2-1B with at most this number of layers."""
    layers = min(layers, LLAMA_3_2_1B.layers)
    return decode_workload(LLAMA_3_2_1B, "Llama-3.2-1B", tuple((b, 2048, layers) for b in (1, 8)))


def items_of(workload: Workload, section: str, case: type[Case]) -> list[Item]:
    """A case for each shape."""
    labels, absent = {"group": section}, ABSENT[section]
    return [
        Item(f"{section}/{shape_label(shape)}", workload, shape, labels, DTYPE, absent, case)
        for shape in workload.shapes
    ]


def make_sweep(sections: Sequence[str], layers: int, peers: Sequence[Implementation]) -> Sweep:
    """The sweep of the cases of these sections."""
    made = {
        "llama": lambda: items_of(llama(layers), "llama", DecodeCase),
        "llama-1b": lambda: items_of(small_llama(layers), "llama-1b", DecodeCase),
        "dlrm": lambda: items_of(MEASURED["dlrm_mlp"], "dlrm", Case),
    }
    items = [item for section in sections for item in made[section]()]
    return Sweep("decode", "Steps of models", tuple(items), (*READ, *peers))


def main(argv: Sequence[str], prog: str) -> int:
    """Measure; returns and raises as `cli.supervise`."""
    parser = argparse.ArgumentParser(prog=prog, description="Measure whole steps of models.")
    parser.add_argument("--only", help=f"comma-separated subset of: {', '.join(SECTIONS)}")
    parser.add_argument(
        "--layers",
        type=int,
        default=LLAMA_3_8B.layers,
        help="of a model, at most (default %(default)s)",
    )
    add_sweep_options(parser, IMPLEMENTATIONS)
    parser.set_defaults(timeout=TIMEOUT_SECONDS)
    arguments = parser.parse_args(argv)
    try:
        sections = names_of(arguments.only, SECTIONS, "--only")
        peers = selected(arguments, among=IMPLEMENTATIONS)
        check_options(arguments)
        if arguments.layers < 1:
            raise ValueError(f"--layers {arguments.layers}: at least 1")
    except ValueError as error:
        parser.error(str(error))
    sweep = make_sweep(sections, arguments.layers, peers)
    return sweep_main(parser, arguments, sweep, settings_of(arguments, SETTINGS))
