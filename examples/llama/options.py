"""Options that the training examples share; their defaults depend on the device."""

from __future__ import annotations

import argparse

import torch
from common import options
from common.options import Size
from common.timing import WARM_UP

from llama.model import Shape
from llama.training import Plan

SIZES = {
    "steps": Size("steps of the optimizer", 20, 60),
    "batch": Size("sequences in a step, on all devices together", 4, 4),
    "layers": Size("decoder layers", 2, 8),
    "width": Size("width of the hidden states, a multiple of --head", 64, 2048),
    "head": Size("width of a head of the attention, even", 32, 128),
    "vocabulary": Size("words of the language", 256, 32768),
    "context": Size("tokens in a sequence", 32, 2048),
}


def parser(description: str) -> argparse.ArgumentParser:
    """A parser with the options for `plan`."""
    return options.parser(description, SIZES)


def plan(p: argparse.ArgumentParser, args: argparse.Namespace, device: torch.device) -> Plan:
    """The plan that was asked for, or the error of the parser."""
    n = options.sizes_of(p, args, SIZES)
    if n["head"] % 2 or n["width"] % n["head"]:
        p.error(f"--width {n['width']} --head {n['head']}: the width must be a multiple of that "
                "of a head, which must be even")  # fmt: skip
    if n["steps"] <= WARM_UP:
        p.error(f"--steps {n['steps']}: the first {WARM_UP} are not timed; ask for more")
    shape = Shape(n["vocabulary"], n["width"], n["layers"], n["head"], n["context"])
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return Plan(shape, n["batch"], n["steps"], device, dtype, args.seed)
