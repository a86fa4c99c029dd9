"""Measuring in a separate process, so that a hanging kernel costs nothing but itself.

A kernel that never ends, or that breaks the device, takes its process with it. `Worker` holds a
process that does one job after another and tells each step before it begins; when it falls silent
or dies, it is replaced, and `Lost` names the step.

Messages of the process: ``("ready", greeting)`` once, then for every job any number of ``("step",
name)`` and in the end ``("done", result)``, or ``("lost", reason)`` if it cannot continue.
"""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

#: seconds for importing PyTorch and making a CUDA context
STARTUP_SECONDS = 180.0
#: seconds to wait for a process that was killed
KILL_SECONDS = 30.0
# Not multiprocessing's own processes: those import the caller's main script again, and a script
# without a main guard would then tune in every process. CUDA does not survive a fork.
_COMMAND = "from cutesuper.tune.isolate import serve; serve()"


class Lost(RuntimeError):
    """The process hung or died.

    Attributes:
        step: the last step that it reported, as in "16x4096x4096 c007: prepare".
        reason: what happened.
    """

    def __init__(self, step: str, reason: str) -> None:
        super().__init__(f"{reason} in {step}")
        self.step, self.reason = step, reason

    def culprit(self, names: Sequence[str]) -> str | None:
        """The one of ``names`` that the step belongs to, or None."""
        return next((n for n in names if f" {n}: " in f" {self.step} "), None)


class Worker:
    """A process that does jobs; started at once, replaced when lost.

    Args:
        work: runs there, with its end of the connection and then ``arguments``; a module-level
            function of a module other than ``__main__``.
        arguments: of any type that can be pickled.
        timeout: seconds of silence after which the process counts as hung.
    """

    def __init__(
        self, work: Callable[..., None], arguments: tuple[Any, ...], timeout: float
    ) -> None:
        self._work, self._arguments, self._timeout = work, arguments, timeout
        self._greeting: Any = None
        self._start()

    def greeting(self) -> Any:
        """The message of the process when it is ready.

        Raises:
            Lost: the process does not start.
        """
        if self._greeting is None:
            self._greeting = self._receive("ready", "start-up", STARTUP_SECONDS)
        return self._greeting

    def ask(self, job: Any) -> Any:
        """The result of a job.

        Raises:
            Lost: the process hung, died, or cannot continue; the next call uses a new one.
        """
        self.greeting()
        try:
            self._connection.send(job)
        except OSError:
            raise self._lose("the beginning", "the process died") from None
        return self._receive("done", "the beginning", self._timeout)

    def close(self) -> None:
        """End the process."""
        self._end()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_SECONDS)
        self._connection.close()

    def _start(self) -> None:
        self._connection, theirs = Pipe()
        self._process = subprocess.Popen(
            # -P: import nothing from the current folder unless this process does
            [sys.executable, "-P", "-c", _COMMAND, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            # it must find the modules that the pickles name
            env={**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(p) for p in sys.path)},
        )
        self._end = weakref.finalize(self, self._process.kill)  # even without a call of close
        theirs.close()  # or its end would not be seen
        with suppress(OSError):  # the missing greeting will tell
            self._connection.send((self._work, self._arguments))

    def _receive(self, wanted: str, step: str, timeout: float) -> Any:
        """Follow the steps until the wanted message comes."""
        while True:
            try:
                if not self._connection.poll(timeout):
                    raise self._lose(step, f"no progress for {timeout:.0f} s")
                kind, content = self._connection.recv()
            except (EOFError, OSError):
                raise self._lose(step, "the process died") from None
            if kind == wanted:
                return content
            if kind == "lost":
                raise self._lose(step, content)
            step = content

    def _lose(self, step: str, reason: str) -> Lost:
        self.close()
        self._greeting = None
        self._start()
        return Lost(step, reason)


def serve() -> None:
    """The main function of the process; its argument is the descriptor of its connection."""
    connection = Connection(int(sys.argv[1]))
    work, arguments = connection.recv()
    with suppress(EOFError, BrokenPipeError):  # the other end is gone
        work(connection, *arguments)
