"""Train a small Llama-style model in several ways: the same losses, and how long a step takes.

    python examples/train_llama.py --out losses.png
    python examples/train_llama.py --ways eager,compile,ours,ours+compile --steps 200

All ways start from the same weights and see the same text, which the example makes itself. They
differ in RMSNorm (with the residual added), SwiGLU and cross entropy only. On a GPU hidden states
are bf16 and weights fp32; without one a tiny model is trained in fp32, where ours is the reference
executor: that shows the same losses, not a speed. There torch.compile, which takes a minute or two
to build its C++, is tried only if --ways names it.

The exit status is 1 if the losses differ by more than the tolerance.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
from common.options import names_among
from common.report import can_plot
from llama import options, report
from llama.training import WAYS, Plan, Result, train

DEFAULT_WAYS = {"cpu": ["eager", "ours"], "cuda": ["eager", "compile", "ours"]}


def main(argv: Sequence[str] | None = None) -> int:
    """Train, print the table, compare."""
    parser, args = arguments(argv)
    plan = options.plan(parser, args, torch.device(args.device))
    names = args.ways or DEFAULT_WAYS[args.device]
    if args.out and not can_plot():
        parser.error(f"--out {args.out}: needs matplotlib; pip install matplotlib")
    print(report.describe(plan))
    results = [r for way in names if (r := attempt(plan, way))]
    if not results:
        print("none of the ways can run here")
        return 1
    print(report.table(plan, results))
    same, sentence = report.agreement(plan, results)
    print(sentence)
    if args.json:
        report.write_json(args.json, plan, results, same)
    if args.out:
        report.plot(args.out, plan, results)
    return 0 if same else 1


def arguments(
    argv: Sequence[str] | None,
) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """The arguments of the command line."""
    parser = options.parser(__doc__ or "")
    parser.add_argument(
        "--ways", type=names_among(list(WAYS)), metavar="A,B",
        help=f"some of {', '.join(WAYS)}; all are compared with the first ("
        + "; ".join(f"{','.join(v)} on {k}" for k, v in DEFAULT_WAYS.items()) + ")",
    )  # fmt: skip
    parser.add_argument("--out", metavar="PNG", help="plot losses and step times (matplotlib)")
    return parser, parser.parse_args(argv)


def attempt(plan: Plan, way: str) -> Result | None:
    """Train; nothing, and a line that says so, where torch.compile lacks a compiler for the CPU."""
    try:
        return train(plan, way)
    except torch._dynamo.exc.BackendCompilerFailed as error:
        cause = error.inner_exception
        if type(cause).__name__ != "InvalidCxxCompiler":
            raise
        print(f"{way}: left out, torch.compile cannot run here: {cause}")
        return None


if __name__ == "__main__":
    sys.exit(main())
