"""Programs that the command line is given, and ``cutesuper compile``, for this GPU or others.

    cutesuper compile graph.json --target b200 --out build
    cutesuper compile model.py:norm_linear --shapes 16x4096,4096x6144 --target h100,b200 --out build

It writes ``NAME.so``, which has a program for each target and is read by `cutesuper.load` or called
through the C interface of `cutesuper.runtime.export`; and for each target a folder ``NAME.TARGET``
with the report, and the PTX and cubin of each kernel. No GPU is needed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutesuper.errors import CutesuperError, DeviceError, OptionError
from cutesuper.ir.graph import KernelGraph
from cutesuper.runtime.kernel import Kernel
from cutesuper.targets import TARGETS, find_target

if TYPE_CHECKING:
    from cutesuper.torch.compile.traced_program import TracedProgram

#: reads the kernel graph in a file
Reader = Callable[[Path], KernelGraph]

_FUNCTION = "FILE.py:NAME or MODULE:NAME"

#: values of options, for completion; of those that have no choices
VALUES = {
    "--target": tuple(TARGETS),
    "--dtype": ("float16", "bfloat16", "float32", "int32", "int64"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    add_program(parser)
    parser.add_argument("--target", type=_targets, default=[None], metavar="GPUS",
                        help=f"of {','.join(TARGETS)}; default this machine's")  # fmt: skip
    add_search(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="made if missing")


def add_program(parser: argparse.ArgumentParser) -> None:
    """Declare the program of a command: a graph, or a function with the shapes of its arguments."""
    parser.add_argument("program", help=f"JSON written by cutesuper.dumps(graph), or {_FUNCTION} "
                        "of a function or module of PyTorch")  # fmt: skip
    parser.add_argument("--shapes", help="of a function's arguments, 16x4096,4096x6144; an element "
                        "type may follow each: 16x4096:float32")  # fmt: skip
    parser.add_argument("--dtype", help="of arguments without one, default float16")


def add_target(parser: argparse.ArgumentParser) -> None:
    """Declare ``--target`` of a command that compiles for one GPU."""
    parser.add_argument("--target", type=_target, metavar="GPU",
                        help=f"{', '.join(TARGETS)}; default this machine's")  # fmt: skip


def add_search(parser: argparse.ArgumentParser) -> None:
    """Declare the options of a search."""
    add_launch(parser)
    add_budget(parser)


def add_launch(parser: argparse.ArgumentParser) -> None:
    """Declare ``--dependent-launch``."""
    parser.add_argument("--dependent-launch", action="store_true", help="start kernels before the "
                        "one in front of them on the stream has ended")  # fmt: skip


def add_budget(parser: argparse.ArgumentParser) -> None:
    """Declare ``--budget-s`` of a command that searches."""
    parser.add_argument("--budget-s", type=_seconds, metavar="SECONDS",
                        help="for the search, which otherwise has no limit")  # fmt: skip


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError("must be positive, a number of seconds")
    return value


def _target(name: str) -> str:
    if "," in name:
        raise argparse.ArgumentTypeError("give one GPU; `cutesuper compile` compiles for several")
    try:
        return find_target(name).name
    except DeviceError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _targets(names: str) -> list[str | None]:
    return [_target(name) for name in names.split(",")]


def compile_program(args: argparse.Namespace, read: Reader) -> int:
    """Compile for all targets, write the files, and print the names of the libraries. Returns 0.

    Args:
        args: of `add_arguments`.
        read: reads the kernel graph in a file.

    Raises:
        OptionError: arguments that make no sense, or no such function.
        CutesuperError, OSError: as `cutesuper.superoptimize` and `Kernel.export`.
    """
    made = [_programs(args, read, target) for target in args.target]
    args.out.mkdir(parents=True, exist_ok=True)
    for name in made[0]:
        kernels = [programs[name] for programs in made]
        for kernel in kernels:
            _write(args.out / f"{name}.{kernel.target.name}", kernel)
        kernels[0].export(args.out / f"{name}.so", *kernels[1:])
        print(args.out / f"{name}.so")
    return 0


def _write(folder: Path, kernel: Kernel) -> None:
    """Write the report, the PTX and the cubins of a program into a folder."""
    folder.mkdir(exist_ok=True)
    (folder / "report.txt").write_text(f"{kernel.explain()}\n", encoding="utf-8")
    for n, step in enumerate(kernel.kernels):
        (folder / f"{n}_{step.name}.ptx").write_text(step.artifact.ptx)
        (folder / f"{n}_{step.name}.cubin").write_bytes(step.artifact.cubin)


def _programs(args: argparse.Namespace, read: Reader, target: str | None) -> dict[str, Kernel]:
    """The programs for a target by the names of their files."""
    made = optimized(args, read, target)
    if isinstance(made, Kernel):
        return {Path(args.program).stem: made}
    name = args.program.rpartition(":")[2]
    names = [name] if len(made.regions) == 1 else [f"{name}.{n}" for n in range(len(made.regions))]
    if not names:
        raise OptionError(f"compile {args.program}: no kernel computes any of its operators")
    return {n: region.kernel for n, region in zip(names, made.regions, strict=True)}


def optimized(args: argparse.Namespace, read: Reader, target: str | None) -> Kernel | TracedProgram:
    """The program of `add_program`, searched with the options of `add_search`.

    Raises:
        OptionError: arguments that make no sense, or no such function.
        CutesuperError: as `cutesuper.superoptimize`.
    """
    from cutesuper.api import superoptimize

    options: dict[str, Any] = {
        "target": target, "dependent_launch": args.dependent_launch, "budget_s": args.budget_s,
    }  # fmt: skip
    where, _, name = args.program.rpartition(":")
    if where:
        function = _function(args.command, where, name)
        return superoptimize(function, _examples(args), **options)
    if args.shapes or args.dtype:
        raise OptionError(
            f"{args.command} {args.program}: a graph has its shapes and types; --shapes and "
            f"--dtype are for {_FUNCTION}"
        )
    return superoptimize(read(Path(args.program)), **options)


def _function(command: str, where: str, name: str) -> Callable[..., Any]:
    """A function or module by its place. Raises OptionError."""
    try:
        found = _module(where)
        for part in name.split("."):
            found = getattr(found, part)
    except CutesuperError:
        raise
    except Exception as error:
        raise OptionError(
            f"{command} {where}:{name}: {type(error).__name__}: {error}; give {_FUNCTION}"
        ) from error
    if not callable(found):
        raise OptionError(
            f"{command} {where}:{name}: it is {type(found).__name__}, and no function"
        )
    return found


def _module(where: str) -> Any:
    """A Python file, or a module that can be imported here."""
    if not where.endswith(".py"):
        sys.path.insert(0, "")
        return importlib.import_module(where)
    spec = importlib.util.spec_from_file_location(Path(where).stem, where)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _examples(args: argparse.Namespace) -> tuple[Any, ...]:
    """Tensors of the shapes, to trace with. Raises OptionError."""
    import torch

    if not args.shapes:
        raise OptionError(f"{args.command} {args.program}: give the shapes of its arguments, as "
                          "--shapes 16x4096,4096x6144")  # fmt: skip
    found: list[torch.Tensor] = []
    for text in args.shapes.split(","):
        shape, _, dtype = text.partition(":")
        kind = getattr(torch, dtype or args.dtype or "float16", None)
        extents = shape.split("x") if shape else []
        if not isinstance(kind, torch.dtype) or not all(e.isdecimal() for e in extents):
            raise OptionError(f"--shapes {text}: give extents and a type, as 16x4096:bfloat16")
        found.append(torch.zeros([int(e) for e in extents], dtype=kind))
    return tuple(found)
