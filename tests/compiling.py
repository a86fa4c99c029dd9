"""torch.compile without Inductor, which takes seconds to compile its code for a CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch

from cutesuper.torch.compile.backend import compile_graph
from cutesuper.torch.compile.options import read_options
from cutesuper.torch.compile.report import GraphReport
from cutesuper.torch.internals import run_eagerly


def leave_inductor_out(patch: pytest.MonkeyPatch, eager: str = "eager") -> list[GraphReport]:
    """Replace torch.compile until the test ends; returns what "cutesuper" will have decided.

    Args:
        patch: of the test.
        eager: the backend that stands in for Inductor. What "cutesuper" takes runs by the reference
            executor, all regions that there are; what it leaves runs eagerly.
    """
    reports: list[GraphReport] = []
    given = partial(
        compile_graph, options=read_options({"take": "all"}), observe=reports.append,
        finish=run_eagerly,
    )  # fmt: skip
    backends = {"inductor": eager, "cutesuper": given}

    def compiled(
        function: Callable[..., Any], backend: str = "inductor",
        options: Mapping[str, Any] | None = None, mode: str | None = None, **more: Any,
    ) -> Callable[..., Any]:  # fmt: skip
        assert options is None or backend == "cutesuper"
        return real(function, backend=backends[backend], **more)

    real = torch.compile
    patch.setattr(torch, "compile", compiled)
    return reports


def taken(reports: list[GraphReport]) -> int:
    """The number of regions that were taken."""
    return sum(region.verdict.taken for report in reports for region in report.regions)
