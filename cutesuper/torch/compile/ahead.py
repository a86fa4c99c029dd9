"""Searches for the programs of a graph's regions in worker processes.
They begin before the regions are decided one after the other; kernels that the model expects to be
of use are compiled there too.

A search is a pure function, so where it ran changes nothing but the time that all of them take. One
that is lost with its process, or that cannot be sent, runs in this process when it is its turn.
"""

from __future__ import annotations

import time
from collections.abc import Container, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from math import inf
from pickle import PicklingError
from types import TracebackType
from typing import Any

from cutesuper import pipeline
from cutesuper.errors import CompileError, CutesuperError
from cutesuper.runtime.cache import KernelCache, warn_once
from cutesuper.runtime.workers import WorkerLost, Workers, compile_into, shared
from cutesuper.search.bounds import TooDear
from cutesuper.torch.compile.case import Case, Place


class Ahead:
    """Work on the regions of a graph in other processes; none if this one has one processor.

    Used as a context manager: what has not begun at its end is dropped.

    Args:
        decided: the places of cases that need no work.
    """

    def __init__(self, decided: Container[Place]) -> None:
        self._decided = decided
        self._pool: Workers | None = shared()
        #: searches whose results were not looked at, and their cases
        self._searches: dict[Future[pipeline.Outcome], Case] = {}
        self._jobs: dict[Place, list[Future[Any]]] = {}
        #: undecided cases whose halves are not searched yet
        self._whole: dict[Place, Case] = {}
        #: halves that are searched and may not be needed, with the result of those that ended
        self._guessed: dict[Place, pipeline.Outcome | None] = {}
        #: microseconds that the model expects programs to take
        self._expected: dict[Place, float] = {}

    def __enter__(self) -> Ahead:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for futures in self._jobs.values():
            for future in futures:
                future.cancel()

    def begin(self, case: Case) -> None:
        """Have a program for a region searched for, unless that is known or must be done here."""
        # what is raised here, or cannot be pickled, is raised or searched again where it is decided
        with suppress(CutesuperError, PicklingError, TypeError, AttributeError):
            if case.place in self._guessed:
                self._whole[case.place] = case
                if outcome := self._guessed.pop(case.place):
                    self._go_on(case, outcome)
            elif self._send(case):
                self._whole[case.place] = case

    def _send(self, case: Case) -> bool:
        """Have a program searched for; False if there is no need.
        Raises CutesuperError, and what pickling raises."""
        if self._pool is None or case.refusal or not case.searches:
            return False
        if case.place in self._jobs or case.place in self._decided or case.record is not None:
            return False
        wanted = case.program.wanted(case.sample.extents, case.target)
        if wanted is None:
            return False
        future = self._pool.submit(pipeline.outcome, *wanted, case.most_us)
        self._jobs[case.place], self._searches[future] = [future], case
        return True

    def follow(self) -> None:
        """Wait for half of the searches that have begun, and send what follows from them."""
        begun = set(self._searches)
        while 2 * len(missing := begun & {*self._searches}) > len(begun):
            self._guess()
            self._await(missing)

    def gain(self, case: Case) -> float:
        """Microseconds that the model expects a case to save; infinity if nothing is known."""
        expected = self._expected.get(case.place)
        return inf if expected is None else case.saved_us(expected)

    def next(self, cases: Sequence[Case]) -> int:
        """The place of the case that is to be decided next: the one that is expected to save most.
        Of those of which nothing that was sent away is missing or needed, and it is waited for one.
        What follows from results meanwhile is sent."""
        patience = cases[0].patience
        while True:
            self._follow_ended()
            self._guess()
            ready = [n for n, case in enumerate(cases) if self._is_ready(case)]
            if ready:
                chosen = max(ready, key=lambda n: self.gain(cases[n]))
                self._end(cases[chosen])
                return chosen
            if left := [c for c in cases if not self._is_awaited(c)]:
                patience.left.update(case.place for case in left)
                continue
            awaited = {f for case in cases for f in self._missing(case.place)}
            until = patience.most if time.monotonic() < patience.most else patience.last
            self._await(awaited | {*self._searches}, until)

    def _is_awaited(self, case: Case) -> bool:
        """True if there is time to wait for what is missing of a case."""
        now, patience = time.monotonic(), case.patience
        if now < patience.most:
            return True
        return now < patience.last and case.is_awaited(self._expected.get(case.place))

    def _is_ready(self, case: Case) -> bool:
        """True for a case that can be decided."""
        if not self._missing(case.place) or case.place in case.patience.left:
            return True
        return case.saves_little(self._expected.get(case.place, 0.0))

    def _await(self, awaited: set[Future[Any]], until: float = inf) -> None:
        """Wait for one of these, and follow the searches that have ended."""
        seconds = None if until == inf else max(0.0, until - time.monotonic())
        wait(awaited, seconds, return_when=FIRST_COMPLETED)
        self._follow_ended()

    def _follow_ended(self) -> None:
        for future in [f for f in self._searches if f.done()]:
            with suppress(CutesuperError):  # it is raised again where the case is decided
                self._follow(future, self._searches.pop(future))

    def _guess(self) -> None:
        """Search halves of regions that are not decided, while most processors have no work.
        They are needed if a region is not taken. With two processors it gains nothing."""
        while self._whole and self._pool is not None and self._pool.are_idle:
            case = self._whole.pop(next(iter(self._whole)))
            with suppress(CutesuperError, PicklingError, TypeError, AttributeError):  # see `begin`
                self._guessed |= {part.place: None for part in case.parts if self._send(part)}

    def _missing(self, place: Place) -> list[Future[Any]]:
        jobs = self._jobs.get(place, ())
        return [f for f in jobs if f in self._searches or not f.done()]

    def _follow(self, future: Future[pipeline.Outcome], case: Case) -> None:
        """Take the result of a search, and go on if it is needed."""
        try:
            outcome = future.result()
        except Exception as error:  # the same search in this process says what is wrong
            if isinstance(error, WorkerLost):
                warn_once(f"a search {error}; it is done in this process")
            return
        case.program.bring(case.sample.extents, case.target, case.most_us, outcome)
        self._expected[case.place] = _expected_us(outcome)
        if case.place in self._guessed:
            self._guessed[case.place] = outcome
        else:
            self._go_on(case, outcome)

    def _go_on(self, case: Case, outcome: pipeline.Outcome) -> None:
        """Compile the kernels that were found, or search the region's halves."""
        hopeless = self.gain(case) <= 0 and case.options.take != "all"
        if isinstance(outcome.found, CutesuperError) or hopeless:
            for part in case.parts:
                self.begin(part)
        elif case.runs:
            self._compile(case, outcome.found[1])

    def _compile(self, case: Case, choice: pipeline.Choice) -> None:
        root = str(KernelCache().root)
        for plan, step in zip(choice.plans, choice.candidate.mugraph.steps, strict=True):
            request = pipeline.compile_request(plan, step.name, case.target)
            if self._pool is not None:
                self._jobs[case.place].append(self._pool.submit(compile_into, request, root))

    def _end(self, case: Case) -> None:
        """Refuse kernels of which the compiler died: in this process it would take that along.
        What nobody waits for is dropped."""
        self._whole.pop(case.place, None)
        if missing := self._missing(case.place):
            for future in missing:
                future.cancel()
            return
        for future in self._jobs.get(case.place, ())[1:]:  # the first one is the search
            if isinstance(error := future.exception(), WorkerLost):
                died = pipeline.Outcome(CompileError(f"a kernel: the compiler {error}"), 0.0)
                case.program.bring(case.sample.extents, case.target, case.most_us, died)


def _expected_us(outcome: pipeline.Outcome) -> float:
    """Microseconds that the model expects of what was found; at least, if it is too dear."""
    if isinstance(outcome.found, TooDear):
        return outcome.found.least_us
    return inf if isinstance(outcome.found, CutesuperError) else outcome.found[1].candidate.cost_us
