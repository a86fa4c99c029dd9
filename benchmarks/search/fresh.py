"""Measurements in separate processes: a predecessor affects neither time nor memory."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

#: the search is one thread; the matrix products of the verifier should be too
_ONE_THREAD = {f"{library}_NUM_THREADS": "1" for library in ("OPENBLAS", "MKL", "OMP")}


def in_fresh_process(function: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """The result of a module-level function in a new interpreter, with one thread for BLAS.

    An exception becomes ``{"error": "SearchError: ..."}``, so that the others are still measured.
    """
    with _environment(_ONE_THREAD), ProcessPoolExecutor(1, get_context("spawn")) as executor:
        try:
            return executor.submit(function, *arguments).result()
        except BrokenProcessPool:
            return {"error": "the process ended without an answer (out of memory?)"}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def environment() -> dict[str, Any]:
    """Everything a reader needs to repeat or to doubt a measurement."""
    from benchmarks.device import commit  # imports PyTorch, which measuring processes do not

    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "cutesuper": metadata.version("cutesuper"),
        **commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
