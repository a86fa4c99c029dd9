"""The command line: ``cutesuper demo``, ``cutesuper explain``, ``cutesuper bench``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from cutesuper.errors import CutesuperError


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code: 0 done, 1 failed, 2 wrong arguments or no GPU."""
    parser = argparse.ArgumentParser(prog="cutesuper", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="optimize RMSNorm + Linear and run it")
    demo.add_argument("--shape", default="16x4096x6144", help="M x K x N (default %(default)s)")
    demo.add_argument("--dtype", default="float16", choices=("float16", "bfloat16"))
    demo.add_argument("--weight", action="store_true", help="RMSNorm with a weight")
    explain = commands.add_parser("explain", help="optimize a saved kernel graph and explain it")
    explain.add_argument("graph", type=Path, help="JSON written by cutesuper.dumps(graph)")
    explain.add_argument("--target", default=None, help="h200, h100 or b200")
    explain.add_argument("--dependent-launch", action="store_true")
    explain.add_argument("--svg", type=Path, help="also write a picture of the muGraph")
    explain.add_argument("--html", type=Path, help="also write a page to look into the muGraph")
    commands.add_parser("bench", help="measure a workload against its peers", add_help=False)
    args, rest = parser.parse_known_args(argv)
    if args.command == "bench":
        return _bench(rest)
    if rest:
        parser.error(f"unknown arguments: {' '.join(rest)}")
    try:
        return _demo(args) if args.command == "demo" else _explain(args)
    except CutesuperError as error:
        print(f"cutesuper: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


def _demo(args: argparse.Namespace) -> int:
    from cutesuper.demo import run_demo

    try:
        m, k, n = (int(x) for x in args.shape.split("x"))
    except ValueError:
        print(f"cutesuper: --shape {args.shape}: give M x K x N, e.g. 16x4096x6144",
              file=sys.stderr)
        return 2
    return run_demo((m, k, n), args.dtype, args.weight)


def _explain(args: argparse.Namespace) -> int:
    from cutesuper import KernelGraph, loads, superoptimize

    try:
        text = args.graph.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        print(f"cutesuper: {args.graph}: {error}", file=sys.stderr)
        return 2
    if args.html and args.html.suffix.lower() not in (".html", ".htm"):
        print(f"cutesuper: --html {args.html}: give a name that ends in .html", file=sys.stderr)
        return 2
    graph = loads(text)
    if not isinstance(graph, KernelGraph):
        print(f"cutesuper: {args.graph}: is a muGraph; give a kernel graph", file=sys.stderr)
        return 2
    kernel = superoptimize(graph, target=args.target, dependent_launch=args.dependent_launch)
    print(kernel.explain())
    if args.svg:
        kernel.draw(args.svg)
    if args.html:
        kernel.draw(args.html)
    return 0


def _bench(rest: list[str]) -> int:
    try:
        from benchmarks import main as bench_main
    except ImportError:
        print("cutesuper bench: the benchmarks are not installed with the package; run it from a "
              "checkout of the repository", file=sys.stderr)
        return 2
    bench_main(rest, prog="cutesuper bench")
    return 0


if __name__ == "__main__":
    sys.exit(main())
