"""Decode with a model of the shape of Llama-3-8B: tokens per second, and time of every part.

    python examples/llama_decode.py --batch 1 8 32 --out decode.png
    python examples/llama_decode.py --layers 4 --ways eager,ours --json decode.json

The weights are random, the cache is as if a text had been read. A step computes one token of every
sequence, greedily; on a GPU it is one CUDA graph, which serves all steps, since positions are
tensors. The ways: PyTorch (scaled_dot_product_attention), torch.compile, and ours, where each
product is one kernel with the norm before it and the gate or the residual behind.

Every way generates some tokens first; its logits are compared with float64 on these tokens. Then
steps are timed, and the parts of a step one by one (over all layers, so that weights come from
memory as they do in a step). Without a GPU the model is tiny and ours the reference executor.

The exit status is 1 if a way is wrong.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from common import compare, options, report
from common.compare import FIRST, Result, Task
from common.options import Size
from common.passes import in_float64
from common.timing import WARM_UP, Call, Outputs, record
from common.ways import DEFAULT_WAYS, backend_of
from llama import decode, decode_ways
from llama.decode import LLAMA_3_8B, TORCH, Cache, Llama, Shape
from llama.decode_ways import Way
from torch import Tensor

SIZES = {
    "layers": Size("decoder layers", 2, LLAMA_3_8B.layers),
    "context": Size("tokens that the cache has room for; the last ones are generated", 48, 4096),
    "steps": Size("steps that are timed", 8, 32),
}
BATCH = {"cpu": [1, 3], "cuda": [1, 8, 32]}
SHAPE = {"cpu": Shape(128, 64, 2, 4, 2, 16, 64), "cuda": LLAMA_3_8B}
WAYS: dict[str, Callable[[torch.device], Way]] = {
    "eager": lambda device: decode_ways.eager(),
    "compile": lambda device: decode_ways.compiled(**backend_of("compile", device)),
    "backend": lambda device: decode_ways.compiled(**backend_of("backend", device)),
    "ours": decode_ways.ours,
}
#: tokens that are compared
CHECKED = 4


@dataclass(frozen=True)
class Run:
    """One batch size.

    Attributes:
        model: with its weights.
        caches: of all layers; what lies from `start` on is written anew by everybody.
        first: the tokens that all begin with.
        start: their position.
        steps: how many are timed.
    """

    model: Llama
    caches: list[Cache]
    first: Tensor
    start: int
    steps: int

    @property
    def device(self) -> torch.device:
        """The device that everything is on."""
        return self.first.device

    @property
    def name(self) -> str:
        """The name in tables."""
        return f"batch {len(self.first)}"


def main(argv: Sequence[str] | None = None) -> int:
    """Check and time all batch sizes."""
    args, sizes = arguments(argv)
    device, dtype = torch.device(args.device), torch.bfloat16
    shape = replace(SHAPE[args.device], layers=sizes["layers"])
    title = (
        f"Llama {shape.layers} x {shape.width}, context {sizes['context']}, "
        f"{str(dtype).removeprefix('torch.')} on {report.device_name(device)}"
    )
    print(title)
    steps: list[Result] = []
    parts: list[Result] = []
    with torch.no_grad(), decode_ways.fastest_attention():
        model = decode.new_model(shape, sizes["context"], device, dtype, args.seed)
        for batch in args.batch or BATCH[args.device]:
            run = new_run(model, batch, sizes["steps"], args.seed)
            steps += time_steps(run, options.ways_of(args))
            parts += time_parts(run, options.ways_of(args))
    fine, sentence = report.verdict([*steps, *parts])
    print(sentence)
    if fine:
        print(report.table(parts), report.table(steps), rates(steps), sep="\n")
    if args.json:
        plan = asdict(shape) | sizes | {"seed": args.seed, "dtype": str(dtype)}
        per_second = {r.task: {} for r in steps}
        for r in steps:
            per_second[r.task][r.way] = tokens_per_s(r)
        report.write_json(args.json, title, device, plan, [*steps, *parts], tokens_per_s=per_second)
    if args.out and fine:
        draw(args.out, title, steps, parts)
    return 0 if fine else 1


def arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, dict[str, int]]:
    """The arguments of the command line."""
    parser = options.parser(__doc__ or "", SIZES)
    told = "; ".join(f"{' '.join(map(str, v))} on {k}" for k, v in BATCH.items())
    parser.add_argument("--batch", type=int, nargs="+", metavar="N", help=f"sequences ({told})")
    options.add_ways(parser, list(WAYS), DEFAULT_WAYS)
    options.add_plot(parser)
    args = parser.parse_args(argv)
    sizes = options.sizes_of(parser, args, SIZES)
    if small := [n for n in args.batch or () if n < 1]:
        parser.error(f"--batch {small[0]}: must be positive")
    if sizes["context"] <= sizes["steps"] + WARM_UP:
        parser.error(
            f"--context {sizes['context']} --steps {sizes['steps']}: no room for so many steps and "
            f"the {WARM_UP} before them, behind one token at least"
        )
    return args, sizes


def new_run(model: Llama, batch: int, steps: int, seed: int) -> Run:
    """A cache, and tokens to begin with; generation ends where the cache does."""
    device = model.embedding.device
    draw = torch.Generator(device).manual_seed(seed)
    first = torch.randint(model.shape.vocabulary, (batch,), device=device, generator=draw)
    start = model.capacity - steps - WARM_UP
    return Run(model, model.new_cache(batch, draw), first, start, steps)


# ------------------------------------------------------------------------------------------- steps


class Generation:
    """A step that feeds itself: tokens and positions stay in the same memory."""

    def __init__(self, run: Run, way: Way) -> None:
        self.run, self.way = run, way
        self.tokens = run.first.clone()
        self.positions = torch.full_like(run.first, run.start)

    def restart(self) -> None:
        """Begin again with the first tokens."""
        self.tokens.copy_(self.run.first)
        self.positions.fill_(self.run.start)

    def __call__(self) -> Outputs:
        """A step; returns what the tokens were chosen by."""
        logits = self.way.step(self.run.model, self.tokens, self.positions, self.run.caches)
        self.tokens.copy_(logits.argmax(-1))
        self.positions.add_(1)
        return {"logits": logits}


def time_steps(run: Run, ways: Sequence[str]) -> list[Result]:
    """Generate some tokens in every way, compare logits with float64, time steps."""
    allowed: dict[str, float] = {}
    results = []
    for name in dict.fromkeys((FIRST, *ways)):  # by which the others are measured
        torch.compiler.reset()
        generation = Generation(run, WAYS[name](run.device))
        begin = time.perf_counter()
        recording = record(generation, run.device)
        first_s = time.perf_counter() - begin
        values, exact = generate(run, generation, recording.replay)
        if not allowed:
            allowed = compare.limits(values, exact, values["logits"].dtype)
        _, error = compare.worst(values, exact, allowed)
        generation.restart()
        ms = recording.ms(run.device, run.steps)
        result = Result(run.name, name, first_s, ms, "logits", error, allowed["logits"])
        results += [result] if name in ways else []
    return results


def generate(run: Run, generation: Generation, replay: Call) -> tuple[Outputs, Outputs]:
    """Logits of the first steps, and what they are in float64 on the same tokens."""
    generation.restart()
    tokens, logits = [], []
    for _ in range(CHECKED):
        tokens.append(generation.tokens.clone())
        logits.append(replay()["logits"].clone())
    exact = decode.exact_logits(run.model, run.caches, torch.stack(tokens, 1), run.start)
    return {"logits": torch.stack(logits, 1)}, {"logits": exact}


def tokens_per_s(result: Result) -> float:
    """The rate of all sequences together."""
    return int(result.task.removeprefix("batch ")) / result.ms * 1e3


def rates(results: Sequence[Result]) -> str:
    """Tokens per second, a line for each batch size."""
    lines = []
    for task in dict.fromkeys(r.task for r in results):
        told = (f"{r.way} {tokens_per_s(r):.0f}" for r in results if r.task == task)
        lines.append(f"{task}, tokens/s: {', '.join(told)}")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------- parts


def time_parts(run: Run, ways: Sequence[str]) -> list[Result]:
    """Every part by itself, in all layers."""
    made = {name: WAYS[name](run.device).parts for name in dict.fromkeys((FIRST, *ways))}
    layers = list(zip(run.model.layers, run.caches, strict=True))
    results = []
    for name, inputs in part_inputs(run).items():
        each = [inputs(*both) for both in (layers[-1:] if name == "score" else layers)]
        task = Task(
            f"{run.name}: {name}",
            {way: partial(prepare, getattr(parts, name), each) for way, parts in made.items()},
            partial(last_of, getattr(TORCH, name), [in_float64(each[-1])]),
            run.model.head.dtype,
        )
        results += compare.run(task, ways, run.device, run.steps)
    return results


def prepare(part: Callable[..., Tensor], inputs: Sequence[Sequence[Any]]) -> Call:
    """Do nothing: kernels are made at the first call."""
    return partial(last_of, part, inputs)


def last_of(part: Callable[..., Tensor], inputs: Sequence[Sequence[Any]]) -> Outputs:
    """Run a part in some layers; what the last one gives."""
    return {"result": [part(*given) for given in inputs][-1]}


def part_inputs(run: Run) -> dict[str, Callable[[Any, Cache], tuple[Any, ...]]]:
    """The inputs of each part of a layer: its own weights, and the same values in all of them."""
    model, layer, cache = run.model, run.model.layers[-1], run.caches[-1]
    x, place = model.begin(run.first, torch.full_like(run.first, run.start))
    qkv = TORCH.project(x, layer.attention_norm, layer.qkv)
    q = TORCH.turn(qkv, place, cache)
    y = TORCH.attend(q, place, cache)
    h = TORCH.gate(x, layer.mlp_norm, layer.gate_up)
    return {
        "project": lambda layer, _: (x, layer.attention_norm, layer.qkv),
        "turn": lambda _, cache: (qkv, place, cache),
        "attend": lambda _, cache: (q, place, cache),
        "output": lambda layer, _: (y, layer.out, x),
        "gate": lambda layer, _: (x, layer.mlp_norm, layer.gate_up),
        "shrink": lambda layer, _: (h, layer.down, x),
        "score": lambda *_: (x, model.norm, model.head),
    }


def draw(path: str, title: str, steps: list[Result], parts: list[Result]) -> None:
    """Times of parts for each batch size, and tokens per second."""
    panels: dict[str, dict[str, dict[str, float]]] = {}
    for r in parts:
        batch, name = r.task.split(": ")
        panels.setdefault(batch, {}).setdefault(name, {})[r.way] = r.ms
    units = dict.fromkeys(panels, "ms, all layers")
    panels["a step"] = {}
    for r in steps:
        panels["a step"].setdefault(r.task, {})[r.way] = tokens_per_s(r)
    report.plot(path, title, panels, units | {"a step": "tokens/s"})


if __name__ == "__main__":
    sys.exit(main())
