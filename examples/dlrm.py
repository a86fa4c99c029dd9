"""A recommendation model, DLRM (arXiv:1906.00091): where its time goes, before and after.

    python examples/dlrm.py --out dlrm.png
    python examples/dlrm.py --rows 1000000 --bag 4 --ways eager,ours

The model is trained for some steps on clicks that the example makes. Then its parts are timed as
they serve: embeddings, bottom MLP, interactions, top MLP. In our way each MLP is what
`cs.superoptimize` finds for the PyTorch module: two kernels for the top MLP, of which one is all
of 512-256-1. At last the top MLP gets LoRA adapters, and relu(x W + p / 2 + bias) of a training
step is `cs.ops.add_activation`, forward and backward one kernel each.

All ways are compared with float64 before they are timed. The exit status is 1 if a way is wrong, or
if nothing was learned.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property, partial

import torch
import torch.nn.functional as F
from common import compare, options, report
from common.compare import Result, Task
from common.options import Size
from common.passes import forward, in_float64, training
from common.timing import Call
from common.ways import DEFAULT_WAYS, WAYS, compiled
from criteo.data import make_clicks
from criteo.model import DLRM, SCALE, AdaptedTop, Shape
from torch import Tensor

import cutesuper as cs

SIZES = {
    "batch": Size("clicks at a time", 64, 2048),
    "rows": Size("of the table of each category", 50, 100_000),
    "bag": Size("values of a category in a click", 1, 1),
    "steps": Size("of training, before anything is timed", 20, 50),
    "rank": Size("of the adapters", 8, 16),
}
LAYERS = {
    "cpu": {"bottom": (8,), "top": (16, 1)},
    "cuda": {"bottom": (512, 256, 64, 16), "top": (512, 256, 1)},  # as published for Criteo Kaggle
}
PARTS = ("embedding", "bottom MLP", "interactions", "top MLP")

# ---------------------------------------------------------------------------------------- training


def train(model: DLRM, n: dict[str, int], device: torch.device, seed: int) -> list[float]:
    """Some steps in fp32, all on one set of clicks; the losses."""
    numbers, ids, clicked = (
        t.to(device) for t in make_clicks(n["rows"], 4 * n["batch"], n["bag"], seed)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for step in range(n["steps"]):
        some = slice(step % 4 * n["batch"], (step % 4 + 1) * n["batch"])
        loss = F.binary_cross_entropy(model(numbers[some], ids[some]), clicked[some])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


# ------------------------------------------------------------------------------------------- tasks


class Serving:
    """The parts of a frozen model, and all of it, in several ways."""

    def __init__(self, model: DLRM, numbers: Tensor, ids: Tensor) -> None:
        self.model, self.exact = model, copy.deepcopy(model).double()
        dense, bags = model.bottom(numbers), model.embed(ids)
        self.inputs: dict[str, tuple[Tensor, ...]] = {
            "embed": (ids,), "bottom": (numbers,), "interact": (dense, bags),
            "top": (model.interact(dense, bags),), "forward": (numbers, ids),
        }  # fmt: skip

    @cached_property
    def mlps(self) -> dict[str, cs.TracedProgram]:
        """Both MLPs, searched and compiled."""
        return {
            name: cs.superoptimize(getattr(self.model, name), self.inputs[name])
            for name in ("bottom", "top")
        }

    def part(self, name: str, way: str) -> Call:
        """A method of the model as a way computes it; ours is PyTorch where no layer is."""
        made = getattr(self.model, name)
        if way == "ours" and name in ("bottom", "top"):
            made = self.mlps[name]
        if way == "ours" and name == "forward":
            made = partial(made, **self.mlps)
        inputs = self.inputs[name]
        return partial(forward, compiled(way, made, inputs[0].device), *inputs)

    def tasks(self) -> list[Task]:
        """The parts in order, and the whole."""
        return [
            Task(
                title,
                {way: partial(self.part, name, way) for way in WAYS},
                partial(forward, getattr(self.exact, name), *in_float64(self.inputs[name])),
                self.inputs["bottom"][0].dtype,
                calls=10,
            )
            for name, title in zip(self.inputs, (*PARTS, "all of it"), strict=True)
        ]


def adapters(top: AdaptedTop, x: Tensor, clicked: Tensor) -> Task:
    """Loss and gradients of a training step of the adapters."""
    exact = copy.deepcopy(top).double()

    def trained(of: AdaptedTop) -> dict[str, Tensor]:
        return {name: p for name, p in of.named_parameters() if p.requires_grad}

    def prepare(way: str) -> Call:
        loss = partial(top.loss, add=our_add) if way == "ours" else top.loss
        loss = compiled(way, loss, x.device)
        return partial(training, loss, trained(top), torch.ones_like(clicked[0]), x, clicked)

    target = clicked.double()
    return Task(
        "adapters, training step",
        {way: partial(prepare, way) for way in WAYS},
        partial(training, exact.loss, trained(exact), torch.ones_like(target[0]), x.double(),
                target),
        x.dtype,
    )  # fmt: skip


def our_add(x: Tensor, p: Tensor, bias: Tensor) -> Tensor:
    """The addition of LoRA to a layer, in one kernel."""
    return cs.ops.add_activation(x, p, bias, scale=SCALE, activation="relu")


# ----------------------------------------------------------------------------------------- profile


def profile(results: Sequence[Result]) -> str:
    """The share of the time that each part takes, a line for each way."""
    lines = []
    for way in dict.fromkeys(r.way for r in results):
        ms = {r.task: r.ms for r in results if r.way == way and r.task in PARTS}
        told = (f"{name} {100 * t / sum(ms.values()):.0f} %" for name, t in ms.items())
        lines.append(f"{way}: {', '.join(told)} of {1e3 * sum(ms.values()):.0f} us")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Train, compare, then time."""
    args, n = arguments(argv)
    device, dtype = torch.device(args.device), torch.bfloat16
    torch.manual_seed(args.seed)
    shape = Shape(**LAYERS[args.device], rows=n["rows"], bag=n["bag"])
    model = DLRM(shape).to(device)
    title = f"DLRM, {n['batch']} clicks, bfloat16 on {report.device_name(device)}"
    print(title)
    losses = train(model, n, device, args.seed)
    begin, end = (sum(part) / len(part) for part in (losses[:4], losses[-4:]))
    print(f"trained for {n['steps']} steps: loss {begin:.3f} at first, {end:.3f} at last")
    if not end < begin:
        print("nothing was learned")
        return 1
    serve = model.to(dtype).requires_grad_(False)
    numbers, ids, clicked = (
        t.to(device) for t in make_clicks(n["rows"], n["batch"], n["bag"], args.seed + 1)
    )
    with torch.no_grad():
        serving = Serving(serve, numbers.to(dtype), ids)
    adapted = AdaptedTop(copy.deepcopy(serve.top), n["rank"])
    tasks = [*serving.tasks(), adapters(adapted, serving.inputs["top"][0], clicked)]
    ways = options.ways_of(args)
    results = [r for task in tasks for r in compare.run(task, ways, device)]
    status = report.finish(args, title, device, asdict(shape) | n, results, PARTS, losses=losses)
    if status == 0:
        print(profile(results))
        if "ours" in ways:
            print(f"top MLP: {kernels(serving.mlps['top'])}")
    return status


def kernels(program: cs.TracedProgram) -> str:
    """The number of kernels."""
    counts = [len(region.kernel.kernels) for region in program.regions]
    return f"{sum(counts)} kernel(s) in {len(counts)} region(s)"


def arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, dict[str, int]]:
    """The arguments of the command line."""
    parser = options.parser(__doc__ or "", SIZES)
    options.add_ways(parser, WAYS, DEFAULT_WAYS)
    options.add_plot(parser)
    args = parser.parse_args(argv)
    n = options.sizes_of(parser, args, SIZES)
    if n["steps"] < 8:
        parser.error(f"--steps {n['steps']}: at least 8, or nothing is learned")
    return args, n


if __name__ == "__main__":
    sys.exit(main())
