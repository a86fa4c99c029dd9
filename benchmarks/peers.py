"""Implementations that take part in a measurement, as data.

An implementation is a name and a factory. The factory prepares (compiles) for one problem and
returns a launcher for input set ``i``; the harness does everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch

from benchmarks.problem import Problem
from benchmarks.workload import Outputs

if TYPE_CHECKING:
    from cutesuper.runtime.kernel import Kernel

Kind = Literal["ours", "peer", "part", "floor"]


@dataclass(frozen=True)
class Launcher:
    """A prepared implementation.

    ``launch(i)`` is timed on the device: it may write into ``problem.outputs[i]`` and returns the
    outputs. ``call(i)`` is the call as a user writes it, for the host time; default the same.
    ``close()`` frees resources that garbage collection would not.
    """

    launch: Callable[[int], Outputs]
    call: Callable[[int], Any] | None = None
    close: Callable[[], None] | None = None


@dataclass(frozen=True)
class Implementation:
    """A competitor.

    ``kind``: "ours"; "peer" (computes the same); "part" (computes only a part, named by
    ``computation``); "floor" (only moves the bytes; no outputs). ``dependent``: launched with
    programmatic dependent launch; its neighbours in the recording are then its own launches.
    """

    name: str
    kind: Kind
    make: Callable[[Problem], Launcher]
    computation: str = "full"
    dependent: bool = False


def _eager(computation: str) -> Callable[[Problem], Launcher]:
    def make(problem: Problem) -> Launcher:
        spec = problem.workload.computations[computation]
        inputs, outputs, into = problem.inputs, problem.outputs, spec.into
        if into is None:
            return Launcher(lambda i: spec.eager(*inputs[i]))
        return Launcher(
            launch=lambda i: into(*inputs[i], out=outputs[i]),
            call=lambda i: spec.eager(*inputs[i]),
        )

    return make


def _compiled(mode: str | None) -> Callable[[Problem], Launcher]:
    def make(problem: Problem) -> Launcher:
        eager = problem.workload.computations["full"].eager
        function = torch.compile(eager, mode=mode, dynamic=False, fullgraph=True)
        inputs = problem.inputs
        return Launcher(lambda i: function(*inputs[i]))

    return make


def superoptimized(problem: Problem, dependent: bool, budget_s: float | None = None) -> Kernel:
    """The problem's program, searched and compiled in this process."""
    import cutesuper as cs

    graph = problem.workload.graph(cs, problem.shape, problem.dtype_name)
    return cs.superoptimize(graph, dependent_launch=dependent, budget_s=budget_s)


def _cutesuper(
    dependent: bool, kernel_of: Callable[[Problem, bool], Kernel]
) -> Callable[[Problem], Launcher]:
    def make(problem: Problem) -> Launcher:
        kernel = kernel_of(problem, dependent)
        inputs, outputs = problem.inputs, problem.outputs

        def launch(i: int) -> Outputs:
            out = outputs[i]
            kernel(*inputs[i], out=out[0] if len(out) == 1 else out)
            return out

        return Launcher(launch, call=lambda i: kernel(*inputs[i]))

    return make


def _floor(balanced: bool, dependent: bool) -> Callable[[Problem], Launcher]:
    def make(problem: Problem) -> Launcher:
        from benchmarks.floor import floor_launcher

        launch = floor_launcher(
            problem.slabs,
            problem.bytes_moved,
            problem.multiprocessors,
            balanced=balanced,
            dependent=dependent,
        )
        return Launcher(launch)

    return make


FLOORS: tuple[Implementation, ...] = tuple(
    Implementation(
        f"floor-{'pdl' if dependent else 'plain'}-{'balanced' if balanced else '16k'}",
        "floor",
        _floor(balanced, dependent),
        dependent=dependent,
    )
    for dependent in (False, True)
    for balanced in (False, True)
)


#: for each launch mode the floor that is within 2 % of the better one at all sizes
STREAMS = tuple(f for f in FLOORS if f.name.endswith("balanced"))


def ours(
    kernel_of: Callable[[Problem, bool], Kernel] = superoptimized,
) -> tuple[Implementation, ...]:
    """cutesuper with plain and with dependent launch.
    ``kernel_of(problem, dependent)`` makes the program."""
    return (
        Implementation("cutesuper", "ours", _cutesuper(False, kernel_of)),
        Implementation("cutesuper-pdl", "ours", _cutesuper(True, kernel_of), dependent=True),
    )


#: all but ours
OTHERS: tuple[Implementation, ...] = (
    Implementation("eager", "peer", _eager("full")),
    Implementation("compile", "peer", _compiled(None)),
    # no CUDA graphs of its own: the harness records one around everything
    Implementation("compile-max", "peer", _compiled("max-autotune-no-cudagraphs")),
    Implementation("matmul-alone", "part", _eager("matmul"), computation="matmul"),
)


def peers_within(budget_s: float | None) -> tuple[Implementation, ...]:
    """All implementations; ours search for so many seconds at most."""
    return (*ours(partial(superoptimized, budget_s=budget_s)), *OTHERS)


PEERS = peers_within(None)

QUICK = ("cutesuper", "cutesuper-pdl", "eager", "compile", "matmul-alone")


def choose(
    wanted: Iterable[str | Implementation] | None,
    *,
    quick: bool = False,
    among: Sequence[Implementation] = PEERS,
) -> list[Implementation]:
    """Turn names into implementations; None means all (or the quick ones, which compile fast).

    Raises:
        ValueError: an unknown name; the message lists the known ones.
    """
    known = {peer.name: peer for peer in among}
    if wanted is None:
        wanted = [name for name in known if name in QUICK or not quick]
    chosen = []
    for item in wanted:
        if isinstance(item, Implementation):
            chosen.append(item)
        elif item in known:
            chosen.append(known[item])
        else:
            raise ValueError(f"unknown implementation {item!r}; known: {', '.join(known)}")
    return chosen
