"""The search as a line in the terminal."""

from __future__ import annotations

import io
import re
import time

import pytest
from rich.console import Console

from cutesuper import progress
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


def test_a_narrow_terminal_cuts_the_text_and_not_the_time() -> None:
    text = io.StringIO()
    with counting(3, Console(file=text, force_terminal=True, width=60)) as show:
        show("deciding about " + "modeling_of_something.py:100-200, " * 3)
        time.sleep(0.15)  # a refresh
    shown = text.getvalue()
    assert "0:00:00" in shown and "deciding" in shown
    assert not re.search(r"0:[0:]*(\u2026|\.\.\.)", shown)


def test_a_file_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while nothing reports, with all that is in work; none for what is over soon."""
    monkeypatch.setattr(progress, "PERIOD_S", 0.05)
    text = io.StringIO()
    with counting(3, Console(file=text, width=120)) as show:
        show("deciding about model.py:3")
        with progress_bar() as inner:
            inner(Progress("kernels", 1204, 31, 0, None, 3, 9))
            time.sleep(0.3)
    first = text.getvalue().splitlines()[0]
    assert re.fullmatch(
        r"cutesuper: 0:00:0\d 1 of 3: deciding about model.py:3; searching kernels: .*", first
    )
    monkeypatch.undo()
    quiet = io.StringIO()
    with progress_bar(Console(file=quiet)) as inner:
        inner(Progress("kernels", 1204, 31, 0, None, 3, 9))
    assert quiet.getvalue() == ""
