"""``python -m benchmarks attention``: attention of few queries, and decoding, in one run.

Peers get their own layouts outside the measured time (`attention_peers`); programs are searched
and compiled side by side before the first case (`ahead`).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.ahead import Ahead
from benchmarks.attention_peers import DEFINITION, FUSED, SDPA
from benchmarks.cli import check_options, selected, settings_of
from benchmarks.harness import Settings
from benchmarks.sweep import Item, add_sweep_options, sweep_main
from benchmarks.workload import shape_label
from benchmarks.workloads_attention import (
    decode,
    grouped_attention,
    normed_attention,
    serving,
)

#: 20 rounds move the median by under 1 %; the time goes into compiling
SETTINGS = Settings(rounds=20, warm_seconds=0.1, host_batches=8, memory_bytes=4 * 10**9)
#: for decoding: the fused calls are made for its products, and each mode of torch.compile takes 10
#: to 30 s per case
NOT_COMPILED = frozenset({"compile", "compile-max"})
#: for caches in pages
NO_PAGES = frozenset(i.name for i in SDPA)
BATCHES = (1, 4, 16)
KEYS = 4096


@dataclass(frozen=True)
class HeadsOf:
    """The attention of a model, from its published ``config.json``."""

    title: str
    heads: int
    kv_heads: int
    width: int = 128


MODELS = {
    "llama3-70b": HeadsOf("Llama-3-70B", 64, 8),
    "qwen3-8b": HeadsOf("Qwen3-8B", 32, 8),
    "qwen3-14b": HeadsOf("Qwen3-14B", 40, 8),
}


def few_queries() -> list[Item]:
    """Queries of 2 and 16 groups of heads over 4096 keys stored (d, S), with and without norms."""
    items = []
    targeted = ((grouped_attention(), (6.0, 13.0)), (normed_attention(), (7.0, 15.0)))
    for workload, targets in targeted:
        for shape, target in zip(workload.shapes, targets, strict=True):
            labels = {"group": "few", "target_us": target}
            items.append(Item(f"few/{workload.name}/{shape_label(shape)}", workload, shape, labels))
    return items


def decoding() -> list[Item]:
    """Cases of one token of 1 to 32 sequences, 32 query heads, 8 of keys and values."""
    workload, targets = decode(), (7.8, 19.5, 62.5, 33.0, 120.0)
    return [
        Item(f"decode/{shape_label(shape[:2])}", workload, shape,
             {"group": "decode", "target_us": target}, "bfloat16", NOT_COMPILED)
        for shape, target in zip(workload.shapes, targets, strict=True)
    ]  # fmt: skip


def models() -> list[Item]:
    """Cases of one token of models with other numbers of heads."""
    workload = decode()
    return [
        Item(f"models/{name}/{batch}", workload,
             (batch, KEYS, model.heads, model.kv_heads, model.width),
             {"group": "models", "title": f"{workload.title}, {model.title}"},
             "bfloat16", NOT_COMPILED)
        for name, model in MODELS.items()
        for batch in BATCHES
    ]  # fmt: skip


def served() -> list[Item]:
    """Cases of one token of 1 to 32 sequences of mixed lengths, without and with pages."""
    return [
        Item(f"lengths/{workload.name}/{shape[0]}", workload, shape, {"group": "lengths"},
             "bfloat16", NOT_COMPILED | (NO_PAGES if workload.pages else frozenset()))
        for workload in (serving(), serving(16), serving(128))
        for shape in workload.shapes
    ]  # fmt: skip


GROUPS = {"few": few_queries, "decode": decoding, "models": models, "lengths": served}
#: the groups that a run measures by default
MAIN = ("few", "decode")


def chosen(only: str | None) -> list[Item]:
    """``"decode/1x4096,few"`` -> those cases, in the order of the tables.

    Raises:
        ValueError: a name that is neither a case nor the beginning of one up to a slash.
    """
    items = [item for make in GROUPS.values() for item in make()]
    names = MAIN if only is None else tuple(only.split(","))
    for name in names:
        if not any(_under(item, name) for item in items):
            known = ", ".join((*GROUPS, *(item.key for item in items)))
            raise ValueError(f"--only {name!r}: one of {known}")
    return [item for item in items if any(_under(item, name) for name in names)]


def _under(item: Item, name: str) -> bool:
    return f"{item.key}/".startswith(f"{name}/")


def main(argv: Sequence[str], prog: str) -> int:
    """Measure; returns and raises as `cli.supervise`."""
    programs = Ahead()
    known = (*programs.implementations(), *DEFINITION, *FUSED)
    parser = argparse.ArgumentParser(
        prog=prog, description="Measure attention of few queries and decoding with their peers."
    )
    parser.add_argument(
        "--only",
        metavar="NAMES",
        help=f"comma-separated groups ({', '.join(GROUPS)}) or cases (decode/1x4096); "
        f"default {','.join(MAIN)}",
    )
    add_sweep_options(parser, known)
    arguments = parser.parse_args(argv)
    try:
        items = chosen(arguments.only)
        peers = selected(arguments, among=known)
        check_options(arguments)
    except ValueError as error:
        parser.error(str(error))
    sweep = programs.sweep("attention", "Attention", items, peers)
    return sweep_main(parser, arguments, sweep, settings_of(arguments, SETTINGS))
