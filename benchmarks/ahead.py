"""Programs of many cases, searched and compiled in parallel before anything is timed.

A process takes 5 s to start the compiler, a search up to some seconds; case by case, all of this
would run on one core while the GPU waits. If a program cannot be found or compiled, its case has
the error; if a process died, the case tries again.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import suppress
from functools import partial

import cutesuper as cs
from benchmarks.peers import STREAMS, Implementation, ours, superoptimized
from benchmarks.problem import Problem
from benchmarks.sweep import Item, Sweep
from benchmarks.workload import Shape
from cutesuper.errors import CutesuperError
from cutesuper.ir.graph import KernelGraph
from cutesuper.pipeline import Choice, Options, compile_plans, compiled, current_target, find
from cutesuper.runtime.cache import KernelCache
from cutesuper.runtime.kernel import Kernel
from cutesuper.runtime.toolchain import available_processors
from cutesuper.search.search import SearchResult

#: workload, shape, element type, dependent launch
Key = tuple[str, Shape, str, bool]
Found = tuple[SearchResult, Choice]
#: processors left to this process and its watchdog
RESERVED_PROCESSORS = 2


def _processes(count: int) -> Executor:
    # a forked process would inherit a CUDA context that it cannot use
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(max(1, min(count, available_processors() - RESERVED_PROCESSORS)),
                               mp_context=spawn)  # fmt: skip


def find_and_compile(graph: KernelGraph, options: Options) -> Found:
    """The choice of `cutesuper.superoptimize`, found in another process.
    That compiles its kernels into the cache."""
    found = find(graph, options)
    compile_plans(found[1], options, KernelCache())
    return found


class Ahead:
    """Programs that are found before they are needed.

    Args:
        executor: makes an executor for this number of concurrent searches; processes by default.
    """

    def __init__(self, executor: Callable[[int], Executor] = _processes) -> None:
        self._executor = executor
        self._found: dict[Key, tuple[KernelGraph, Options, Found]] = {}
        self._errors: dict[Key, CutesuperError] = {}

    def kernel(self, problem: Problem, dependent: bool) -> Kernel:
        """The program of a problem; found now if it was not prepared.

        Raises:
            CutesuperError: from `cutesuper.superoptimize`.
        """
        key = (problem.workload.name, problem.shape, problem.dtype_name, dependent)
        if key in self._errors:
            raise self._errors[key]
        if key not in self._found:
            return superoptimized(problem, dependent)
        graph, options, found = self._found[key]
        make = partial(compiled, graph, options, KernelCache(), *found)
        return Kernel(graph, options.target, lambda hints: make())

    def implementations(self) -> tuple[Implementation, ...]:
        """cutesuper with both ways of launching, on these programs."""
        return ours(self.kernel)

    def sweep(
        self, kind: str, title: str, items: Sequence[Item], peers: Sequence[Implementation]
    ) -> Sweep:
        """The sweep of the cases, with programs found before the first of them."""
        names = [i.name for i in peers]
        return Sweep(
            kind, title, tuple(items), (*STREAMS, *peers),
            prepare=lambda missing: self.prepare(missing, names),
        )  # fmt: skip

    def prepare(self, items: Sequence[Item], names: Sequence[str]) -> None:
        """Find and compile the programs of the cases for those of ``names`` that are ours."""
        target = current_target()
        mine = [i for i in self.implementations() if i.name in names]
        wanted: dict[Key, tuple[KernelGraph, Options]] = {}
        for item in items:
            launches = [i.dependent for i in mine if i.name not in item.absent]
            if not launches:
                continue
            with suppress(CutesuperError, ValueError):
                graph = item.workload.graph(cs, item.shape, item.dtype)
                for dependent in launches:
                    key = (item.workload.name, item.shape, item.dtype, dependent)
                    wanted[key] = graph, Options(target, dependent_launch=dependent)
        if not wanted:
            return
        with self._executor(len(wanted)) as executor:
            futures = {key: executor.submit(find_and_compile, *w) for key, w in wanted.items()}
            for key, future in futures.items():
                error = future.exception()
                if error is None:
                    self._found[key] = (*wanted[key], future.result())
                elif isinstance(error, CutesuperError):
                    self._errors[key] = error
