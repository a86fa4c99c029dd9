"""Search progress as a line in the terminal: states, verified programs, and the best so far.

Where there is no terminal (a log, a notebook) the same is said in a line every half a minute.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import count
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Column

from cutesuper.search.search import Progress

#: seconds between lines where there is no terminal
PERIOD_S = 30.0


class _Lines:
    """A bar for a file: a line with all that is in work, every `PERIOD_S`."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._begun = time.monotonic()
        self._tasks: dict[TaskID, str] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._tell, name="progress", daemon=True)

    def add_task(self, description: str, total: float | None = None) -> TaskID:
        """The number of a new piece of work."""
        del total
        task = TaskID(len(self._tasks))
        self._tasks[task] = description
        return task

    def update(
        self, task: TaskID, *, description: str | None = None, visible: bool = True, **_: Any
    ) -> None:
        """Say something else of a piece of work, or nothing any more."""
        if description is not None or not visible:
            self._tasks[task] = description or ""

    def _tell(self) -> None:
        while not self._ended.wait(PERIOD_S):
            what = "; ".join(filter(None, list(self._tasks.values())))
            passed = timedelta(seconds=round(time.monotonic() - self._begun))
            with suppress(OSError, ValueError):  # nobody reads it any more
                print(f"cutesuper: {passed} {what}", file=self._file, flush=True)

    def __enter__(self) -> _Lines:
        """The lines, which begin."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End them."""
        self._ended.set()
        self._thread.join()


#: the bar on the terminal, to which work inside of other work adds a line
_shown: list[Bar | _Lines] = []

_STAGES = {"kernels": "searching kernels", "verify": "verifying", "done": "searched"}


@contextmanager
def progress_bar(console: Console | None = None) -> Iterator[Callable[[Progress], None]]:
    """Yield a function that shows a `Progress`, in lines if the console is not a terminal.

    Args:
        console: default: standard error.
    """
    with _bar(console) as bar:
        task = bar.add_task("searching", total=None)

        begun = count()

        def show(p: Progress) -> None:
            first = (
                next(begun) == 0
            )  # shown at once: a short search is over before the next refresh
            done, total = p.done, p.total or None
            bar.update(task, description=describe(p), completed=done, total=total, refresh=first)

        try:
            yield show
        finally:
            bar.update(task, visible=False)  # a caller may keep what shows it


@contextmanager
def counting(total: int, console: Console | None = None) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows the name of the next of some pieces of work; as `progress_bar`.

    Args:
        total: number of pieces.
        console: default: standard error.
    """
    with _bar(console) as bar:
        task = bar.add_task("", total=total)
        begun = count()

        def show(name: str) -> None:
            n = next(begun)
            bar.update(task, description=f"{n + 1} of {total}: {name}", completed=n)

        try:
            yield show
        finally:
            bar.update(task, visible=False)  # a caller may keep what shows it


@contextmanager
def _bar(console: Console | None) -> Iterator[Bar | _Lines]:
    if _shown:
        yield _shown[-1]
        return
    console = console or Console(stderr=True)
    with _terminal(console) if console.is_terminal else _Lines(console.file) as bar:
        _shown.append(bar)
        try:
            yield bar
        finally:
            _shown.remove(bar)


def _terminal(console: Console) -> Bar:
    """A bar of which a narrow terminal cuts the text, and not the time."""
    passed = TimeElapsedColumn(table_column=Column(no_wrap=True, min_width=len("0:00:00")))
    text = TextColumn("{task.description}", table_column=Column(no_wrap=True))
    return Bar(SpinnerColumn(), BarColumn(20), passed, text, console=console, transient=True)


def describe(p: Progress) -> str:
    """The text ``verifying: 1,204 states, 310 pruned, 5 verified, best 10.2 us``."""
    best = "" if p.best_cost_us is None else f", best {p.best_cost_us:.1f} us"
    counts = f"{p.states:,} states, {p.pruned:,} pruned, {p.verified} verified"
    return f"{_STAGES[p.stage]}: {counts}{best}"
