"""``python -m benchmarks prefill``: causal attention of whole sequences, in TFLOP/s."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks.ahead import Ahead
from benchmarks.attention_peers import FUSED
from benchmarks.cli import check_options, selected, settings_of
from benchmarks.harness import Settings
from benchmarks.sweep import Item, add_sweep_options, names_of, sweep_main
from benchmarks.workloads_attention import prefill

#: a set of 16384 tokens has 336 MB and takes 3 ms: a few sets keep L2 cold and suffice for a median
SETTINGS = Settings(
    rounds=15, warm_seconds=0.2, host_batches=2, host_batch_calls=4, least_sets=4,
    memory_bytes=4 * 10**9,
)  # fmt: skip
#: it would need heads packed into positions, which is impossible with a causal mask
NO_SHARED_KEYS = "sdpa-efficient"


def cases() -> dict[str, Item]:
    """The cases by number of tokens."""
    workload = prefill()
    return {
        str(shape[1]): Item(f"prefill/{shape[1]}", workload, shape, dtype="bfloat16")
        for shape in workload.shapes
    }


def main(argv: Sequence[str], prog: str) -> int:
    """Measure; returns and raises as `cli.supervise`."""
    programs, known = Ahead(), cases()
    implementations = (
        *programs.implementations(),
        *(i for i in FUSED if i.name != NO_SHARED_KEYS),
    )
    parser = argparse.ArgumentParser(prog=prog, description="Measure causal prefill with peers.")
    parser.add_argument("--tokens", help=f"comma-separated subset of: {', '.join(known)}")
    add_sweep_options(parser, implementations)
    arguments = parser.parse_args(argv)
    try:
        items = [known[name] for name in names_of(arguments.tokens, tuple(known), "--tokens")]
        peers = selected(arguments, among=implementations)
        check_options(arguments)
    except ValueError as error:
        parser.error(str(error))
    sweep = programs.sweep("prefill", "Causal prefill", items, peers)
    return sweep_main(parser, arguments, sweep, settings_of(arguments, SETTINGS))
