"""Garbage is collected less often inside, and as before outside."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

from cutesuper.garbage import SELDOM, seldom_collected


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


def test_blocks_in_blocks_and_errors() -> None:
    with seldom_collected():
        assert gc.get_threshold() == SELDOM
        with pytest.raises(ValueError, match="inside"), seldom_collected():
            raise ValueError("inside")
        assert gc.get_threshold() == SELDOM
    assert gc.get_threshold() == (700, 10, 10)


def test_the_last_block_of_any_thread_ends_it() -> None:
    entered, leave = threading.Event(), threading.Event()

    @seldom_collected()
    def other() -> None:
        entered.set()
        leave.wait()

    thread = threading.Thread(target=other)
    with seldom_collected():
        thread.start()
        entered.wait()
    assert gc.get_threshold() == SELDOM
    leave.set()
    thread.join()
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("own", [(0, 10, 10), (0, 0, 0)])
def test_a_collector_that_is_off_stays_off(own: tuple[int, int, int]) -> None:
    gc.set_threshold(*own)
    with seldom_collected():
        assert gc.get_threshold() == own
    assert gc.get_threshold() == own


def test_a_caller_who_collects_less_often() -> None:
    gc.set_threshold(100_000, 5, 1000)
    with seldom_collected():
        assert gc.get_threshold() == (100_000, 20, 1000)
    assert gc.get_threshold() == (100_000, 5, 1000)
