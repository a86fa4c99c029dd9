"""Verdicts about regions on disk (`cutesuper.runtime.records`): timed once, not in each process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from cutesuper import store
from cutesuper.ir.graph import KernelGraph
from cutesuper.pipeline import Options
from cutesuper.runtime import records


def read(question: Sequence[object]) -> dict[str, Any] | None:
    """The record for a question; None if there is none, or none that can be read."""
    return records.read(_with_versions(question))


def write(question: Sequence[object], record: Mapping[str, Any]) -> None:
    """Keep a record; without a folder that can be written, nothing is kept."""
    records.write(_with_versions(question), record)


def tuned(graph: KernelGraph, options: Options) -> tuple[str, ...]:
    """The programs that the tuner has stored for a graph: file and time."""
    entries = store.find(graph, options.target.arch, options.dependent_launch)
    return tuple(f"{e.path} {e.measured.median_us}" for e in entries)


def _with_versions(question: Sequence[object]) -> tuple[object, ...]:
    precision = torch.get_float32_matmul_precision()  # Inductor's products have it too
    return torch.__version__, torch.version.cuda, precision, *question
