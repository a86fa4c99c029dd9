"""Findings on disk: what was searched for or timed once is not again, in any process.

A record is a JSON file in the folder of compiled kernels. Its name is a hash of everything that
decides what it says: the question, this package's sources and settings, and the versions of what
computes the answer. Programs that are read are verified and planned again, like those of the tuner.

    <cache>/regions/<64 hex>.json

The folder is bounded: the first record that a process writes removes those that were not read for
longest. `KernelCache.clear` removes all.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from cutesuper.errors import CutesuperError
from cutesuper.runtime.cache import RECORDS, KernelCache
from cutesuper.runtime.private import make_private, read_private, replace_file
from cutesuper.targets.settings import shipped_folder

#: most records, 6 to 40 KB each; a training step of a model makes up to 200
MOST = 8192


def read(question: Sequence[object], cache: KernelCache | None = None) -> dict[str, Any] | None:
    """The record for a question; None if there is none, or none that can be read."""
    with suppress(OSError, ValueError, RecursionError, CutesuperError):
        path = path_of(question, cache)
        data = json.loads(read_private(path))
        with suppress(OSError):
            os.utime(path)
        return data if isinstance(data, dict) else None
    return None


def write(
    question: Sequence[object], record: Mapping[str, Any], cache: KernelCache | None = None
) -> None:
    """Keep a record; without a folder that can be written, nothing is kept."""
    with suppress(OSError, CutesuperError):
        path = path_of(question, cache)
        make_private(path.parent)
        _bound(path.parent)
        replace_file(path, json.dumps(record).encode())


def path_of(question: Sequence[object], cache: KernelCache | None = None) -> Path:
    """The file of a record, in a cache or the default one. Raises CacheError."""
    return (cache or KernelCache()).root / RECORDS / f"{digest(question)}.json"


def digest(question: Sequence[object]) -> str:
    """A hash of a question, this package's sources and settings, and the versions."""
    versions = platform.python_version(), np.__version__
    text = repr((_sources(), versions, tuple(question)))
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def _bound(folder: Path) -> None:
    """Remove the records that were not used for longest, down to nine tenths of `MOST`."""
    times = {path: path.stat().st_mtime for path in folder.glob("*.json")}
    if len(times) >= MOST:
        for path in sorted(times, key=times.__getitem__)[: len(times) - MOST * 9 // 10]:
            path.unlink(missing_ok=True)


@functools.cache
def _sources() -> str:
    """A hash of all of the package's sources, and of the settings that come with it."""
    package = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for path in (*sorted(package.rglob("*.py")), *sorted(shipped_folder().rglob("*.json"))):
        digest.update(f"{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()
