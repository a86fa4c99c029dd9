"""The command ``cutesuper compile``: programs in files, for this machine's GPU or others.

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

from cutesuper.errors import CutesuperError, OptionError

if TYPE_CHECKING:
    from cutesuper.ir.graph import KernelGraph
    from cutesuper.runtime.kernel import Kernel

_FUNCTION = "FILE.py:NAME or MODULE:NAME"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("program", help=f"JSON written by cutesuper.dumps(graph), or {_FUNCTION} "
                        "of a function or module of PyTorch")  # fmt: skip
    parser.add_argument("--shapes", help="of a function's arguments, 16x4096,4096x6144; an element "
                        "type may follow each: 16x4096:float32")  # fmt: skip
    parser.add_argument("--dtype", help="of arguments without one, default float16")
    parser.add_argument("--target", help="GPUs: h100,b200; default this machine's")
    parser.add_argument("--dependent-launch", action="store_true")
    add_budget(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="made if missing")


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


def compile_program(args: argparse.Namespace, read: Callable[[Path], KernelGraph]) -> int:
    """Compile for all targets, write the files, and print the names of the libraries. Returns 0.

    Args:
        args: of `add_arguments`.
        read: reads the kernel graph in a file.

    Raises:
        OptionError: arguments that make no sense, or no such function.
        CutesuperError, OSError: as `cutesuper.superoptimize` and `Kernel.export`.
    """
    made = [_programs(args, read, t) for t in (args.target.split(",") if args.target else [None])]
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


def _programs(
    args: argparse.Namespace, read: Callable[[Path], KernelGraph], target: str | None
) -> dict[str, Kernel]:
    """The programs for a target by the names of their files."""
    from cutesuper.api import superoptimize

    options: dict[str, Any] = {
        "target": target, "dependent_launch": args.dependent_launch, "budget_s": args.budget_s,
    }  # fmt: skip
    where, _, name = args.program.rpartition(":")
    if not where:
        if args.shapes or args.dtype:
            raise OptionError(
                f"compile {args.program}: a graph has its shapes and types; --shapes and --dtype "
                f"are for {_FUNCTION}"
            )
        path = Path(args.program)
        return {path.stem: superoptimize(read(path), **options)}
    regions = superoptimize(_function(where, name), _examples(args), **options).regions
    names = [name] if len(regions) == 1 else [f"{name}.{n}" for n in range(len(regions))]
    if not names:
        raise OptionError(f"compile {args.program}: no kernel computes any of its operators")
    return {n: region.kernel for n, region in zip(names, regions, strict=True)}


def _function(where: str, name: str) -> Callable[..., Any]:
    """A function or module by its place. Raises OptionError."""
    try:
        found = _module(where)
        for part in name.split("."):
            found = getattr(found, part)
    except CutesuperError:
        raise
    except Exception as error:
        raise OptionError(
            f"compile {where}:{name}: {type(error).__name__}: {error}; give {_FUNCTION}"
        ) from error
    if not callable(found):
        raise OptionError(f"compile {where}:{name}: it is {type(found).__name__}, and no function")
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
        raise OptionError(f"compile {args.program}: give the shapes of its arguments, as "
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
