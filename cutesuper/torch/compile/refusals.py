"""Errors in terms of the user's program: the operator, its line, and a remedy."""

from __future__ import annotations

from typing import TypeVar

from torch import fx

from cutesuper.errors import (
    NO_KERNEL,
    CutesuperError,
    LoweringError,
    ScheduleError,
    SearchError,
)
from cutesuper.ir.graph import KernelGraph
from cutesuper.pipeline import Options, as_target, bucketed, find
from cutesuper.targets import Target
from cutesuper.torch.aten.graph_builder import Unsupported
from cutesuper.torch.compile.region import Region, convert, source_lines
from cutesuper.torch.internals import written

E = TypeVar("E", bound=CutesuperError)

#: the ends of messages about a part of a function that cannot be traced, or has no kernel
REMEDY = (
    "Leave it outside of the function, or use "
    'torch.compile(fn, backend="cutesuper"), which leaves it to Inductor'
)
REST = (
    'Give it rest="torch", which leaves it to PyTorch, or use '
    'torch.compile(fn, backend="cutesuper"), which leaves it to Inductor'
)


def refusal(kind: type[E], name: str, node: fx.Node, reason: str, remedy: str = REST) -> E:
    """The error for a function that cannot be superoptimized.

    Args:
        kind: of error.
        name: of the function.
        node: the operator that is in the way.
        reason: why.
        remedy: what helps.
    """
    lines = source_lines(node) or next(filter(None, map(source_lines, node.all_input_nodes)), [])
    where = f", at {lines[-1][0]}:{lines[-1][1]}" if lines else ""
    return kind(f"superoptimize({name}): {written(node)}{where}: {reason}. {remedy}")


def without_kernel(
    name: str,
    region: Region,
    error: SearchError | LoweringError | ScheduleError,
    target: Target | str | None,
) -> CutesuperError:
    """The error for a region that no kernel can run.
    It names the first operator that none can run by itself or, if only their combination fails, the
    lines of all.

    Args:
        name: of the function.
        region: one of its regions, the nodes still in their graph.
        error: of `cutesuper.superoptimize` for its graph.
        target: the one it was optimized for.
    """
    for node in region.nodes:
        try:
            alone = convert([node], parts=region.parts)
        except Unsupported:
            continue
        reason = _reason(alone.graph, target) if alone.reduces else None
        if reason is not None:
            return refusal(type(error), name, node, reason)
    where = f", at {region.place}" if region.place else ""
    return type(error)(f"superoptimize({name}){where}: {error}. {REST}")


def _reason(graph: KernelGraph, target: Target | str | None) -> str | None:
    try:
        find(graph.with_hints(bucketed(graph)), Options(as_target(target)))
    except NO_KERNEL as error:
        return str(error)
    return None
