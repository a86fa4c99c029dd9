"""Measurements of cutesuper against its peers; the method is described in `harness`.

``run`` returns plain data, ``main`` is the command line. Neither is imported until it is called,
so that `benchmarks.report` works where PyTorch is not installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["main", "run"]


def run(workload: Any, **options: Any) -> dict[str, Any]:
    """Measure a workload on the current CUDA device; see `benchmarks.harness.run`."""
    from benchmarks import harness

    return harness.run(workload, **options)


def main(argv: Sequence[str] | None = None, prog: str = "python -m benchmarks") -> int:
    """Run the command line; see `benchmarks.cli.main`."""
    from benchmarks import cli

    return cli.main(argv, prog)
