"""Worker processes that compile kernels, one kernel at a time each.

They are started as ``python -c`` rather than through ``multiprocessing``, which imports the
caller's main script again in every worker: a script without a main guard would then compile
recursively. Requests go in as pickles over a pipe, one JSON line per request comes back; the
kernels themselves travel through the cache.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import queue
import signal
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, Any

from cutesuper.errors import CompileError

if TYPE_CHECKING:
    from cutesuper.runtime.compile import CompileRequest

_LENGTH = struct.Struct("<Q")
_COMMAND = "from cutesuper.runtime.workers import serve; serve()"


def run_in_workers(
    requests: Sequence[CompileRequest], cache_root: str, workers: int
) -> list[str | None]:
    """Compile requests into the cache at ``cache_root``; one error text or ``None`` for each.

    Raises:
        CompileError: when a request cannot be pickled.
    """
    jobs: queue.SimpleQueue[tuple[int, str, bytes]] = queue.SimpleQueue()
    for index, request in enumerate(requests):
        jobs.put((index, f"kernel {request.name} for {request.arch}", _pickle(request)))
    problems: list[str | None] = [None] * len(requests)
    threads = [
        threading.Thread(target=_drain, args=(jobs, cache_root, problems), daemon=True)
        for _ in range(max(1, min(workers, len(requests))))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return problems


def serve() -> None:
    """The main loop of a worker: compiles requests from standard input until it closes."""
    from cutesuper.runtime.cache import KernelCache
    from cutesuper.runtime.compile import compile_kernel
    from cutesuper.runtime.dsl import import_without_torch

    import_without_torch()
    # Text that kernels print while they are traced must not mix with the replies.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    root = sys.stdin.buffer.read(_LENGTH.unpack(sys.stdin.buffer.read(_LENGTH.size))[0]).decode()
    cache = KernelCache(root)
    while len(header := sys.stdin.buffer.read(_LENGTH.size)) == _LENGTH.size:
        content = sys.stdin.buffer.read(_LENGTH.unpack(header)[0])
        problem: str | None = None
        try:
            # The pipe comes from the process that started this one; no other process can write to
            # it.
            compile_kernel(pickle.loads(content), cache)
        except CompileError as error:
            problem = str(error)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        replies.write(json.dumps({"problem": problem}) + "\n")
        replies.flush()


class _Worker:
    """One worker process and the pipes to it."""

    def __init__(self, cache_root: str) -> None:
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        # The worker must find the modules that the pickles name.
        path = os.pathsep.join(
            os.path.abspath(entry) if entry else os.getcwd() for entry in sys.path
        )
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _COMMAND],  # -P: nothing from the current folder
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "PYTHONPATH": path},
        )
        self._send(cache_root.encode())

    def compile(self, content: bytes) -> str | None:
        """Compile one pickled request; return the error text or ``None``.

        Raises:
            ChildProcessError: when the worker died of it.
        """
        self._send(content)
        stdout = self._process.stdout
        line = stdout.readline() if stdout else b""
        if not line.endswith(b"\n"):
            raise ChildProcessError(self._death())
        reply: dict[str, Any] = json.loads(line)
        return reply["problem"]

    def close(self) -> None:
        """End the worker and close its pipes."""
        if self._process.stdin:
            with contextlib.suppress(OSError):  # it may be dead already
                self._process.stdin.close()
        self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()
        self._errors.close()

    def _send(self, content: bytes) -> None:
        stdin = self._process.stdin
        if stdin is None:
            return
        with contextlib.suppress(BrokenPipeError):  # the missing reply will show it
            stdin.write(_LENGTH.pack(len(content)) + content)
            stdin.flush()

    def _death(self) -> str:
        code = self._process.wait()
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        self._errors.seek(0)
        tail = self._errors.read().decode(errors="replace").strip().splitlines()[-4:]
        return "\n  ".join([f"the compiler process died ({how})", *tail])


def _drain(
    jobs: queue.SimpleQueue[tuple[int, str, bytes]], root: str, problems: list[str | None]
) -> None:
    """Feed one worker until no job is left, with a new worker after a death; runs in a thread of
    its own."""
    worker: _Worker | None = None
    try:
        while True:
            try:
                index, what, content = jobs.get_nowait()
            except queue.Empty:
                return
            try:
                worker = worker or _Worker(root)
                problems[index] = worker.compile(content)
            except (OSError, ValueError) as error:
                problems[index] = f"{what}: {error}"
                if worker is not None:
                    worker.close()
                    worker = None
    finally:
        if worker is not None:
            worker.close()


def _pickle(request: CompileRequest) -> bytes:
    try:
        return pickle.dumps(request)
    except Exception as error:
        raise CompileError(
            f"kernel {request.name} for {request.arch}: its builder cannot be sent to a worker "
            f"process: {error}; make it a module-level function or a functools.partial of one"
        ) from error
