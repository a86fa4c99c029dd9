"""The command line of cutesuper: kernels from graphs, without a line of Python.

Exit codes: 0 done; 1 it failed, for the reason that is printed; 2 wrong arguments, or no GPU where
one is needed; 130 Ctrl-C before a search has found anything.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from cutesuper import crosscompile
from cutesuper.console import Words, add_cache, cache, completion, doctor, words_of
from cutesuper.errors import CutesuperError, FormatError, OptionError
from cutesuper.version import __version__

if TYPE_CHECKING:
    from cutesuper.ir.graph import KernelGraph


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code, see the module."""
    return _exit_code(lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    parser, commands = _parser()
    args, rest = parser.parse_known_args(argv)
    if rest and args.command != "bench":
        parser.error(f"unknown arguments: {' '.join(rest)}")
    _print_anything()
    run: dict[str, Callable[[argparse.Namespace], int]] = {
        "demo": _demo, "explain": _explain, "compile": _compile,
        "export": _export, "tune": _tune,
        "bench": lambda _: _bench(rest),
        "cache": lambda args: cache(args.action),
        "doctor": lambda _: doctor(),
        "completion": lambda args: completion(args.shell, _words(commands)),
    }  # fmt: skip
    return run[args.command](args)


def _exit_code(command: Callable[[], int]) -> int:
    """Run a command; print its error, if it has one, in a line."""
    try:
        code = command()
        sys.stdout.flush()  # fails on a full disk, or for a reader that has left
        return code
    except (_UsageError, OptionError) as error:
        print(f"cutesuper: {error}", file=sys.stderr)
        return 2
    except CutesuperError as error:
        print(f"cutesuper: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # the remaining buffer would fail again when the interpreter ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print(f"cutesuper: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("cutesuper: interrupted", file=sys.stderr)
        return 130


def _parser() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """The parser of all commands, and that of each command by its name."""
    parser = argparse.ArgumentParser(
        prog="cutesuper", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"cutesuper {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_demo(commands.add_parser("demo", help="optimize RMSNorm + Linear and run it"))
    _add_explain(
        commands.add_parser("explain", help="optimize a graph or a function and explain it")
    )
    _add_export(
        commands.add_parser("export", help="write a graph or a function as a shared library")
    )
    crosscompile.add_arguments(
        commands.add_parser("compile", help="compile for any GPU, into files")
    )
    _add_tune(commands.add_parser("tune", help="time candidates on the GPU, store the winner"))
    commands.add_parser("bench", help="measure a workload against its peers", add_help=False)
    add_cache(commands.add_parser("cache", help="look after the compiled kernels on disk"))
    commands.add_parser("doctor", help="what is installed, what is missing, what to do")
    shells = commands.add_parser("completion", help="print the completion of a shell, to be read "
                                 'by it: eval "$(cutesuper completion bash)"')  # fmt: skip
    shells.add_argument("shell", choices=("bash", "zsh", "fish"))
    return parser, commands.choices


def _add_demo(demo: argparse.ArgumentParser) -> None:
    demo.add_argument("--shape", default="16x4096x6144", help="M x K x N (default %(default)s)")
    demo.add_argument("--dtype", default="float16", choices=("float16", "bfloat16"))
    demo.add_argument("--weight", action="store_true", help="RMSNorm with a weight")
    crosscompile.add_budget(demo)


def _add_explain(explain: argparse.ArgumentParser) -> None:
    crosscompile.add_program(explain)
    crosscompile.add_target(explain)
    crosscompile.add_search(explain)
    explain.add_argument("--svg", type=Path, help="also write a picture of the muGraph")
    explain.add_argument("--html", type=Path, help="also write a page to look into the muGraph")


def _add_export(export: argparse.ArgumentParser) -> None:
    crosscompile.add_program(export)
    export.add_argument("--out", type=Path, required=True, metavar="X.so", help="the library")
    export.add_argument("--header", type=Path, metavar="X.h", help="also functions for C and C++")
    crosscompile.add_target(export)
    crosscompile.add_search(export)


def _words(commands: Mapping[str, argparse.ArgumentParser]) -> dict[str, Words]:
    """The words of each command, for completion; in a checkout those of the benchmarks too."""
    words = {name: words_of(parser, crosscompile.VALUES) for name, parser in commands.items()}
    with suppress(ImportError):
        from benchmarks.cli import COMMANDS, build_parser

        bench = words_of(build_parser(), crosscompile.VALUES)
        words["bench"] = Words([*bench.first, *COMMANDS], bench.options)
    return words


def _print_anything() -> None:
    """Escape letters that the terminal's encoding lacks, e.g. in names of a user's tensors."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _add_tune(tune: argparse.ArgumentParser) -> None:
    tune.add_argument("workload", help="JSON written by cutesuper.dumps(graph), or, in a checkout, "
                      "a workload of the benchmarks")  # fmt: skip
    tune.add_argument("--shape", help="of a workload, e.g. 16x4096x4096; default its first")
    tune.add_argument("--dtype", help="of a workload, default float16")
    crosscompile.add_launch(tune)
    tune.add_argument("--budget-s", type=float, default=60.0, metavar="SECONDS",
                      help="default %(default)s")  # fmt: skip
    tune.add_argument("--candidates", type=int, default=24, metavar="N",
                      help="muGraphs x schedules to time at most, default %(default)s")  # fmt: skip
    tune.add_argument("--store", type=Path, metavar="DIR",
                      help="where to put the winner; default the user's folder")  # fmt: skip


def _demo(args: argparse.Namespace) -> int:
    from cutesuper.demo import run_demo

    try:
        m, k, n = (int(x) for x in args.shape.split("x"))
    except ValueError:
        message = f"--shape {args.shape}: give M x K x N, e.g. 16x4096x6144"
        raise _UsageError(message) from None
    if min(m, k, n) < 1:
        raise _UsageError(
            f"--shape {args.shape}: a demonstration needs elements; give extents from 1 on"
        )
    return run_demo((m, k, n), args.dtype, args.weight, args.budget_s)


class _UsageError(Exception):
    """Wrong arguments; the exit code is 2."""


def _read_graph(path: Path) -> KernelGraph:
    """The kernel graph in a file. Raises FormatError, _UsageError."""
    from cutesuper import KernelGraph, loads

    try:
        graph = loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _UsageError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise _UsageError(f"{path}: not a text in UTF-8, as cutesuper.dumps writes it") from error
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from error
    if not isinstance(graph, KernelGraph):
        raise _UsageError(f"{path}: is a muGraph; give a kernel graph")
    return graph


def _explain(args: argparse.Namespace) -> int:
    if args.html and args.html.suffix.lower() not in (".html", ".htm"):
        raise _UsageError(f"--html {args.html}: give a name that ends in .html")
    _check_places(args.svg, args.html)
    if args.svg and args.svg.suffix.lower() != ".svg":
        raise _UsageError(f"--svg {args.svg}: give a name that ends in .svg")
    kernel = crosscompile.optimized(args, _read_graph, args.target)
    print(kernel.explain())
    if args.svg is not None:
        kernel.draw(args.svg)
    if args.html is not None:
        kernel.draw(args.html)
    return 0


def _check_places(*paths: Path | None) -> None:
    """Raise _UsageError for a file that cannot be written, before a search that takes long."""
    for path in paths:
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise _UsageError(f"{path}: there cannot be a file of this name; is its folder there?")


def _export(args: argparse.Namespace) -> int:
    from cutesuper.runtime.c_interface import name_of

    _check_places(args.out, args.header)
    if args.header is not None:
        name_of(args.header)
    kernel = crosscompile.optimized(args, _read_graph, args.target)
    kernel.export(args.out, header=args.header)
    print(f"{kernel}: {args.out}" + (f", {args.header}" if args.header else ""))
    return 0


def _compile(args: argparse.Namespace) -> int:
    return crosscompile.compile_program(args, _read_graph)


def _tune(args: argparse.Namespace) -> int:
    import torch
    from rich.console import Console

    from cutesuper import tune
    from cutesuper.tune.report import summary, table

    graph = _tuned_graph(args)
    if not args.budget_s > 0 or args.candidates < 1:
        raise _UsageError("--budget-s and --candidates must be positive")
    if not torch.cuda.is_available():
        raise _UsageError("tune: timing needs a CUDA GPU and PyTorch sees none here")
    with Console(stderr=True).status("tuning") as status:
        tuned = tune(
            graph,
            dependent_launch=args.dependent_launch,
            budget_s=args.budget_s,
            candidates=args.candidates,
            folder=args.store,
            on_step=status.update,
        )
    console = Console()
    console.print(table(tuned))
    console.print(summary(tuned), markup=False, highlight=False, soft_wrap=True)
    return 0


def _tuned_graph(args: argparse.Namespace) -> KernelGraph:
    """The graph of a file, or of a benchmark workload. Raises FormatError, _UsageError."""
    path = Path(args.workload)
    if path.suffix == ".json" or path.is_file():
        if args.shape or args.dtype:
            raise _UsageError(f"{path}: holds its shapes and types; --shape and --dtype are for "
                              "workloads of the benchmarks")  # fmt: skip
        return _read_graph(path)
    try:
        from benchmarks.workloads import MEASURED, RANKED, find_workload
    except ImportError:
        raise _UsageError(
            f"tune {args.workload}: not a file, and the benchmarks, which have workloads by name, "
            "are not installed with the package; run it from a checkout of the repository"
        ) from None
    import cutesuper

    try:
        workload = find_workload(args.workload, {**MEASURED, **RANKED})
        shape = workload.parse_shape(args.shape) if args.shape else workload.shapes[0]
        dtype = args.dtype or "float16"
        if dtype not in workload.dtypes:
            raise ValueError(f"{workload.name}: --dtype {dtype} is none of {workload.dtypes}")
    except ValueError as error:
        raise _UsageError(f"tune: {error}") from None
    return workload.graph(cutesuper, shape, dtype)


def _bench(rest: list[str]) -> int:
    try:
        from benchmarks import main as bench_main
    except ImportError:
        print(
            "cutesuper bench: the benchmarks are not installed with the package; run it from a "
            "checkout of the repository",
            file=sys.stderr,
        )
        return 2
    return bench_main(rest, prog="cutesuper bench")


if __name__ == "__main__":
    sys.exit(main())
