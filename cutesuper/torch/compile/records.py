"""Findings about regions, on disk: searched and timed once, not in each process.

A record is a JSON file in the folder of compiled kernels. Its name is a hash of everything that
decides what it says: the question, this package's sources and settings, the versions of PyTorch and
the GPU. Programs that are read are verified and planned again, like those of the tuner.

    <cache>/regions/<64 hex>.json

The folder is bounded: the first record that a process writes removes those that were not read for
longest. `KernelCache.clear` removes all.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from cutesuper import pipeline, store
from cutesuper.errors import CutesuperError, FormatError
from cutesuper.ir import serial
from cutesuper.ir.block import MuGraph
from cutesuper.ir.definitions import definitions, names_of
from cutesuper.ir.graph import KernelGraph
from cutesuper.runtime.cache import RECORDS, KernelCache
from cutesuper.runtime.private import make_private, read_private, replace_file
from cutesuper.search.search import Candidate, SearchResult
from cutesuper.skeletons.cost import Cost
from cutesuper.targets.settings import shipped_folder

Found = tuple[SearchResult, pipeline.Choice]

#: most records, 6 KB each; a training step of a model makes up to 200
MOST = 8192


def read(question: Sequence[object]) -> dict[str, Any] | None:
    """The record for a question; None if there is none, or none that can be read."""
    with suppress(OSError, ValueError, CutesuperError):
        path = _path(question)
        data = json.loads(read_private(path))
        with suppress(OSError):
            os.utime(path)
        return data if isinstance(data, dict) else None
    return None


def write(question: Sequence[object], record: Mapping[str, Any]) -> None:
    """Keep a record; without a folder that can be written, nothing is kept."""
    with suppress(OSError, CutesuperError):
        path = _path(question)
        make_private(path.parent)
        _bound(path.parent)
        replace_file(path, json.dumps(record).encode())


@functools.cache
def _bound(folder: Path) -> None:
    """Remove the records that were not used for longest, down to nine tenths of `MOST`."""
    times = {path: path.stat().st_mtime for path in folder.glob("*.json")}
    if len(times) >= MOST:
        for path in sorted(times, key=times.__getitem__)[: len(times) - MOST * 9 // 10]:
            path.unlink(missing_ok=True)


def found(graph: KernelGraph, options: pipeline.Options) -> Found | None:
    """The choice that was recorded for a graph, verified and planned again.
    None if there is none, if it is not valid any more, or if a program was tuned since."""
    record = read(_about(graph, options)) if not tuned(graph, options) else None
    with suppress(CutesuperError, KeyError, TypeError, ValueError):
        return None if record is None else pipeline.chosen(graph, options, _candidate(record))
    return None


def has(graph: KernelGraph, options: pipeline.Options) -> bool:
    """True if a choice was recorded for a graph; it may not be valid any more."""
    return _path(_about(graph, options)).exists()


def keep(graph: KernelGraph, options: pipeline.Options, choice: pipeline.Choice) -> None:
    """Record a choice, unless the tuner has, or a time limit made it."""
    if choice.stored is not None or options.budget_s is not None:
        return
    candidate = choice.candidate
    write(_about(graph, options), {
        "mugraph": serial.to_dict(candidate.mugraph),
        "cost_us": candidate.cost_us,
        "kernels": [asdict(k) for k in candidate.kernels],
        "structure": candidate.structure,
    })  # fmt: skip


def tuned(graph: KernelGraph, options: pipeline.Options) -> tuple[str, ...]:
    """The programs that the tuner has stored for a graph: file and time."""
    entries = store.find(graph, options.target.arch, options.dependent_launch)
    return tuple(f"{e.path} {e.measured.median_us}" for e in entries)


def _candidate(record: Mapping[str, Any]) -> Candidate:
    mugraph = serial.from_dict(record["mugraph"])
    if not isinstance(mugraph, MuGraph):
        raise FormatError("a record of a choice holds no muGraph")
    kernels = tuple(Cost(k["total"], k["parts"]) for k in record["kernels"])
    return Candidate(mugraph, record["cost_us"], kernels, record["structure"], True)


def _about(graph: KernelGraph, options: pipeline.Options) -> tuple[object, ...]:
    outside = sorted(definitions(names_of(graph)).items())
    return "choice", serial.dumps(graph), outside, options.target.name, options.seed


def _path(question: Sequence[object]) -> Path:
    precision = torch.get_float32_matmul_precision()  # Inductor's products have it too
    text = repr((_sources(), torch.__version__, torch.version.cuda, precision, tuple(question)))
    digest = hashlib.sha256(text.encode()).hexdigest()
    return KernelCache().root / RECORDS / f"{digest}.json"


@functools.cache
def _sources() -> str:
    """A hash of all of the package's sources, and of the settings that come with it."""
    package = Path(__file__).resolve().parents[2]
    digest = hashlib.sha256()
    for path in (*sorted(package.rglob("*.py")), *sorted(shipped_folder().rglob("*.json"))):
        digest.update(f"{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()
