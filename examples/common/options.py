"""Options that examples share; their defaults depend on the device."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class Size:
    """A positive number that can be given on the command line.

    Attributes:
        help: what it counts.
        cpu, cuda: its value on a device unless told otherwise; the tiny ones of the CPU are there
            to run, not to be fast.
    """

    help: str
    cpu: int
    cuda: int


def parser(description: str, sizes: Mapping[str, Size]) -> argparse.ArgumentParser:
    """A parser with the device, the sizes, a seed and a file for JSON."""
    p = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found = "cuda" if torch.cuda.is_available() else "cpu"
    p.add_argument("--device", choices=DEVICES, default=found, help=f"here: {found}")
    for name, size in sizes.items():
        text = f"{size.help} ({size.cpu} on cpu, {size.cuda} on cuda)"
        p.add_argument(f"--{name}", type=int, metavar="N", help=text)
    p.add_argument("--seed", type=int, default=0, help="of everything that is drawn")
    p.add_argument("--json", metavar="FILE", help="write everything that was measured")
    return p


def sizes_of(
    p: argparse.ArgumentParser, args: argparse.Namespace, sizes: Mapping[str, Size]
) -> dict[str, int]:
    """The sizes that were asked for, or the error of the parser."""
    n = {
        name: v if (v := getattr(args, name)) is not None else getattr(size, args.device)
        for name, size in sizes.items()
    }
    if small := [k for k, v in n.items() if v < 1]:
        p.error(f"--{small[0]} {n[small[0]]}: must be positive")
    return n


def add_ways(
    p: argparse.ArgumentParser, known: Sequence[str], defaults: Mapping[str, Sequence[str]]
) -> None:
    """``--ways``, of which `ways_of` takes those of the device where it is left out."""
    told = "; ".join(f"{','.join(v)} on {k}" for k, v in defaults.items())
    text = f"some of {', '.join(known)} ({told})"
    p.add_argument("--ways", type=names_among(known), metavar="A,B", help=text)
    p.set_defaults(default_ways=defaults)


def add_plot(p: argparse.ArgumentParser) -> None:
    """``--out``."""
    p.add_argument("--out", metavar="FILE", help="plot times, PNG or SVG (needs matplotlib)")


def ways_of(args: argparse.Namespace) -> list[str]:
    """The ways that were asked for."""
    return args.ways or list(args.default_ways[args.device])


def names_among(known: Sequence[str]) -> Callable[[str], list[str]]:
    """A type of argparse: ``"a,b"`` -> ``["a", "b"]``, all of them known."""

    def names(text: str) -> list[str]:
        given = text.split(",")
        if unknown := [n for n in given if n not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
        return given

    return names
