"""Options that the training examples share; what they leave out depends on the device."""

from __future__ import annotations

import argparse

import torch

from llama.model import Shape
from llama.training import WARM_UP, Plan

#: what a device trains unless told otherwise; the tiny model is there to run, not to be fast
DEFAULTS = {
    "cpu": {
        "steps": 20, "batch": 4, "layers": 2, "width": 64, "head": 32, "vocabulary": 256,
        "context": 32,
    },
    "cuda": {
        "steps": 60, "batch": 4, "layers": 8, "width": 2048, "head": 128, "vocabulary": 32768,
        "context": 2048,
    },
}  # fmt: skip
HELP = {
    "steps": "steps of the optimizer",
    "batch": "sequences in a step, on all devices together",
    "layers": "decoder layers",
    "width": "width of the hidden states, a multiple of --head",
    "head": "width of a head of the attention, even",
    "vocabulary": "words of the language",
    "context": "tokens in a sequence",
}


def parser(description: str) -> argparse.ArgumentParser:
    """A parser with the options for `plan`."""
    p = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found = "cuda" if torch.cuda.is_available() else "cpu"
    p.add_argument("--device", choices=list(DEFAULTS), default=found, help=f"here: {found}")
    for name, text in HELP.items():
        values = ", ".join(f"{v[name]} on {device}" for device, v in DEFAULTS.items())
        p.add_argument(f"--{name}", type=int, metavar="N", help=f"{text} ({values})")
    p.add_argument("--seed", type=int, default=0, help="of the first weights and of the text")
    p.add_argument("--json", metavar="FILE", help="write everything that was measured")
    return p


def plan(p: argparse.ArgumentParser, args: argparse.Namespace, device: torch.device) -> Plan:
    """What was asked for, or the error of the parser."""
    n = {k: v if (v := getattr(args, k)) is not None else DEFAULTS[device.type][k] for k in HELP}
    if small := [k for k, v in n.items() if v < 1]:
        p.error(f"--{small[0]} {n[small[0]]}: must be positive")
    if n["head"] % 2 or n["width"] % n["head"]:
        p.error(f"--width {n['width']} --head {n['head']}: the width must be a multiple of that "
                "of a head, which must be even")  # fmt: skip
    if n["steps"] <= WARM_UP:
        p.error(f"--steps {n['steps']}: the first {WARM_UP} are not timed; ask for more")
    shape = Shape(n["vocabulary"], n["width"], n["layers"], n["head"], n["context"])
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return Plan(shape, n["batch"], n["steps"], device, dtype, args.seed)
