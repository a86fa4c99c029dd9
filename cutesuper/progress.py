"""Search progress as a line in the terminal: states, verified programs, and the best so far."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from cutesuper.search.search import Progress

#: the bar on the terminal, to which work inside of other work adds a line
_shown: list[Bar] = []

_STAGES = {"kernels": "searching kernels", "verify": "verifying", "done": "searched"}


@contextmanager
def progress_bar(console: Console | None = None) -> Iterator[Callable[[Progress], None]]:
    """Yield a function that shows a `Progress`; shows nothing if the console is not a terminal.

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
def _bar(console: Console | None) -> Iterator[Bar]:
    if _shown:
        yield _shown[-1]
        return
    console = console or Console(stderr=True)
    text = TextColumn("{task.description}")
    columns = (SpinnerColumn(), BarColumn(20), text, TimeElapsedColumn())
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        _shown.append(bar)
        try:
            yield bar
        finally:
            _shown.remove(bar)


def describe(p: Progress) -> str:
    """The text ``verifying: 1,204 states, 310 pruned, 5 verified, best 10.2 us``."""
    best = "" if p.best_cost_us is None else f", best {p.best_cost_us:.1f} us"
    counts = f"{p.states:,} states, {p.pruned:,} pruned, {p.verified} verified"
    return f"{_STAGES[p.stage]}: {counts}{best}"
