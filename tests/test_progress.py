"""The search as a line in the terminal."""

from __future__ import annotations

import io

from rich.console import Console

from cutesuper.progress import counting, describe, progress_bar
from cutesuper.search.search import Progress, search
from cutesuper.targets import H200
from tests import zoo


def test_what_the_line_says() -> None:
    early = Progress("kernels", 1204, 31, 0, None, 3, 9)
    assert describe(early) == "searching kernels: 1,204 states, 31 pruned, 0 verified"
    late = Progress("verify", 1204, 31, 5, 10.16, 9, 9)
    assert describe(late).endswith("5 verified, best 10.2 us")


def test_a_terminal_shows_it_and_a_file_does_not() -> None:
    for terminal in (True, False):
        text = io.StringIO()
        with progress_bar(Console(file=text, force_terminal=terminal, width=120)) as show:
            search(zoo.rms_norm_linear(16, 512, 256), H200, on_progress=show)
        assert ("states" in text.getvalue()) == terminal


def test_pieces_of_work_are_counted_and_a_search_inside_adds_a_line() -> None:
    text = io.StringIO()
    with counting(3, Console(file=text, force_terminal=True, width=120)) as show:
        show("deciding about model.py:3")
        with progress_bar() as inner:
            inner(Progress("kernels", 1204, 31, 0, None, 3, 9))
    assert "1 of 3: deciding about model.py:3" in text.getvalue()
    assert "searching" in text.getvalue()
