"""``python -m benchmarks layers``: the linear layers of published models.

Weights are stored (N, K) as ``nn.Linear`` has them, norms have a gain, and gate and up are two
tensors. Operators around a product in the model are part of its layer: the norm before qkv and
before gate and up, the residual after o and down. Programs are searched and compiled side by side
before the first case (`ahead`).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.ahead import Ahead
from benchmarks.cli import check_options, selected, settings_of
from benchmarks.harness import Settings
from benchmarks.peers import OTHERS
from benchmarks.sweep import DTYPE, Item, add_sweep_options, names_of, sweep_main
from benchmarks.workload import HALVES, Shape, Workload
from benchmarks.workloads_linear import gated_mlp, linear_residual, norm_linear
from cutesuper.skeletons.matmul.plan import FEW_ROWS

BATCHES = (1, 8, 16, 64)
#: 15 rounds move the median by under 1 %; the time goes into compiling
SETTINGS = Settings(rounds=15, warm_seconds=0.1, host_batches=8)
#: hundreds of programs may be compiled in the step before the first case
TIMEOUT_SECONDS = 400.0
LAYERS = ("qkv", "o", "gate_up", "down")


@dataclass(frozen=True)
class Model:
    """Extents of a decoder layer, from the model's published ``config.json``.

    Attributes:
        title: of the model.
        hidden: width of the residual stream.
        heads, kv_heads, head: numbers of query and of key/value heads, and their width.
        mlp: width inside the MLP.
    """

    title: str
    hidden: int
    heads: int
    kv_heads: int
    head: int
    mlp: int

    def layer(self, name: str, batch: int) -> tuple[Workload, Shape]:
        """The workload of the layer of this name (one of LAYERS), and its extents."""
        qkv = (self.heads + 2 * self.kv_heads) * self.head
        if name == "qkv":
            return norm_linear(True, transposed=True), (batch, self.hidden, qkv)
        if name == "gate_up":
            return gated_mlp(norm=True, transposed=True), (batch, self.hidden, self.mlp)
        inner = self.heads * self.head if name == "o" else self.mlp
        return linear_residual(transposed=True), (batch, inner, self.hidden)


MODELS = {
    "llama3-8b": Model("Llama-3-8B", 4096, 32, 8, 128, 14336),
    "llama3-70b": Model("Llama-3-70B", 8192, 64, 8, 128, 28672),
    # its bias of qkv is left out
    "qwen2.5-7b": Model("Qwen2.5-7B", 3584, 28, 4, 128, 18944),
    "qwen3-8b": Model("Qwen3-8B", 4096, 32, 8, 128, 12288),
}


def cases(models: Sequence[str], batches: Sequence[int], dtype: str = DTYPE) -> list[Item]:
    """All layers of the models at the batch sizes, in the order of the tables."""
    return [
        _case(model, name, batch, dtype) for model in models for name in LAYERS for batch in batches
    ]


def _case(model: str, name: str, batch: int, dtype: str) -> Item:
    workload, shape = MODELS[model].layer(name, batch)
    key, title = model, MODELS[model].title
    if dtype != DTYPE:  # tables and files can have a layer in both types
        key, title = f"{key}-{dtype}", f"{title} {dtype}"
    labels = {"model": title, "layer": name, "batch": batch}
    return Item(f"{key}/{name}/{batch}", workload, shape, labels, dtype)


def parse_batches(text: str | None) -> list[int]:
    """``"1,16"`` -> ``[1, 16]``; BATCHES for None. Raises ValueError."""
    if text is None:
        return list(BATCHES)
    parts = text.split(",")
    if not all(p.isdecimal() and int(p) > 0 for p in parts):
        raise ValueError(f"--batches {text!r}: positive numbers, for example 1,16")
    return [int(p) for p in parts]


def main(argv: Sequence[str], prog: str) -> int:
    """Measure; returns and raises as `cli.supervise`."""
    programs = Ahead()
    known = (*programs.implementations(), *OTHERS)
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Measure the linear layers of models. Peers that compile for long "
        "(compile-max) take part only when named.",
    )
    parser.add_argument("--models", help=f"comma-separated subset of: {', '.join(MODELS)}")
    parser.add_argument("--batches", help=f"default {','.join(map(str, BATCHES))}")
    parser.add_argument(
        "--dtype", choices=HALVES, default=DTYPE, help="element type (default %(default)s)"
    )
    add_sweep_options(parser, known)
    parser.set_defaults(timeout=TIMEOUT_SECONDS)
    arguments = parser.parse_args(argv)
    try:
        models = names_of(arguments.models, tuple(MODELS), "--models")
        batches = parse_batches(arguments.batches)
        peers = selected(arguments, quick=True, among=known)
        check_options(arguments)
    except ValueError as error:
        parser.error(str(error))
    items = cases(models, batches, arguments.dtype)
    sweep = programs.sweep("layers", "Linear layers of models", items, peers)
    # a few calls of many rows take long enough to be timed together
    settings = SETTINGS if min(batches) <= FEW_ROWS else replace(SETTINGS, least_sets=8)
    return sweep_main(parser, arguments, sweep, settings_of(arguments, settings))
