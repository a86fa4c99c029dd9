"""Worker processes that compile kernels and search for programs, one job at a time each.

They are started as ``python -c`` rather than through ``multiprocessing``, which imports the
caller's main script again in every worker: a script without a main guard would then train its model
in each of them. Jobs go in as pickles over a pipe, and so do their results and errors; compiled
kernels travel through the cache. A worker never touches a GPU.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ParamSpec, TypeVar

from cutesuper.errors import CompileError
from cutesuper.garbage import SELDOM
from cutesuper.runtime.toolchain import available_processors

if TYPE_CHECKING:
    from cutesuper.runtime.compile import CompileRequest

P = ParamSpec("P")
T = TypeVar("T")

#: seconds without an answer and without any computing after which a worker hangs
STILL_S = 60.0
#: seconds without a job after which a worker ends
IDLE_S = 300.0

_LENGTH = struct.Struct("<Q")
_COMMAND = "from cutesuper.runtime.workers import serve; serve()"
#: there is a worker for each processor
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class WorkerLost(RuntimeError):
    """A worker that cannot be started, has died, or hung; the text begins with "process"."""


class Workers(Executor):
    """An executor of worker processes.
    They start when there are jobs for them, end when there were none for `IDLE_S`, and are replaced
    when they die.

    Args:
        most: processes at a time.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._jobs: deque[tuple[Future[Any], bytes]] = deque()
        self._changed = threading.Condition()
        self._threads: set[threading.Thread] = set()
        self._workers: set[_Worker] = set()
        self._idle = 0
        self._ended = self._at_once = False
        atexit.register(self._exit)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue a call; its future raises the errors of the call, or `WorkerLost`.

        Raises:
            Exception: from ``pickle``; functions are those of modules other than ``__main__``.
        """
        content, future = pickle.dumps((fn, args, kwargs)), Future[T]()
        with self._changed:
            if self._ended:
                raise RuntimeError("workers: they have been shut down")
            self._jobs.append((future, content))
            if len(self._jobs) > self._idle and len(self._threads) < self.most:
                thread = threading.Thread(target=self._drain, daemon=True)
                self._threads.add(thread)
                thread.start()
            self._changed.notify()
        return future

    @property
    def are_idle(self) -> bool:
        """True if more of them have no job, started or not, than have one."""
        with self._changed:
            return 2 * (len(self._threads) - self._idle + len(self._jobs)) < self.most

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End all workers after the jobs that they have, or, with ``cancel_futures``, at once."""
        atexit.unregister(self._exit)
        with self._changed:
            self._ended = True
            threads = list(self._threads)
            if cancel_futures:
                self._at_once = True
                for future, _ in self._jobs:
                    future.cancel()
                for worker in self._workers:
                    worker.kill()
            self._changed.notify_all()
        for thread in threads if wait else ():
            thread.join()

    def _exit(self) -> None:
        self.shutdown(cancel_futures=True)

    def _drain(self) -> None:
        """Feed one worker, with a new one after a death; runs in a thread of its own."""
        worker: _Worker | None = None
        while (job := self._next()) is not None:
            future, content = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                worker = worker or self._started()
                done, value = worker.run(content)
            except Exception as error:
                future.set_exception(error)
                worker = self._gone(worker)
            else:
                _answer(future, done, value)
        self._gone(worker)

    def _next(self) -> tuple[Future[Any], bytes] | None:
        """The next job; None if there is none for long, or if workers are to end."""
        with self._changed:
            self._idle += 1
            self._changed.wait_for(lambda: self._jobs or self._ended, IDLE_S)
            self._idle -= 1
            if self._jobs:
                return self._jobs.popleft()
            self._threads.discard(threading.current_thread())
            return None

    def _started(self) -> _Worker:
        worker = _Worker()
        with self._changed:
            self._workers.add(worker)
            if self._at_once:
                worker.kill()
        return worker

    def _gone(self, worker: _Worker | None) -> None:
        if worker is not None:
            worker.close()
            with self._changed:
                self._workers.discard(worker)


def _answer(future: Future[Any], done: bool, value: Any) -> None:
    if done:
        future.set_result(value)
    else:
        future.set_exception(value)


@functools.cache
def shared() -> Workers | None:
    """The workers of this process, one for each processor that it may use; None if that is one."""
    if available_processors() < 2:
        return None
    return Workers(available_processors())


if hasattr(os, "register_at_fork"):  # a forked process has no threads that feed workers
    os.register_at_fork(after_in_child=shared.cache_clear)


def run_in_workers(
    requests: Sequence[CompileRequest], cache_root: str, workers: int | None
) -> list[str | None]:
    """Compile requests into the cache at ``cache_root``; one error text or ``None`` for each.

    Args:
        requests: the kernels.
        cache_root: folder of the cache.
        workers: processes of this call alone; None takes the `shared` ones.

    Raises:
        CompileError: when a request cannot be pickled.
    """
    pool = shared() if workers is None else None
    with contextlib.ExitStack() as stack:
        pool = pool or stack.enter_context(Workers(workers or 1))
        futures = [_submitted(pool, request, cache_root) for request in requests]
        return [_problem(r, f) for r, f in zip(requests, futures, strict=True)]


def compile_into(request: CompileRequest, cache_root: str) -> None:
    """Compile a kernel into a cache, in a worker. Raises CompileError."""
    from cutesuper.runtime.cache import KernelCache
    from cutesuper.runtime.compile import compile_kernel
    from cutesuper.runtime.dsl import import_without_torch

    import_without_torch()
    compile_kernel(request, KernelCache(cache_root))


def _submitted(pool: Workers, request: CompileRequest, cache_root: str) -> Future[None]:
    try:
        return pool.submit(compile_into, request, cache_root)
    except Exception as error:
        raise CompileError(
            f"kernel {request.name} for {request.arch}: its builder cannot be sent to a worker "
            f"process: {error}; make it a module-level function or a functools.partial of one"
        ) from error


def _problem(request: CompileRequest, future: Future[None]) -> str | None:
    error = future.exception()
    if isinstance(error, WorkerLost):
        return f"kernel {request.name} for {request.arch}: the compiler {error}"
    if error is None or isinstance(error, CompileError):
        return str(error) if error else None
    return f"{type(error).__name__}: {error}"


# --------------------------------------------------------------------------------------- the worker


def serve() -> None:
    """The main loop of a worker: runs jobs from standard input until it closes."""
    # Text that kernels print while they are traced must not mix with the replies.
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    gc.set_threshold(*SELDOM)
    while len(header := sys.stdin.buffer.read(_LENGTH.size)) == _LENGTH.size:
        content = sys.stdin.buffer.read(_LENGTH.unpack(header)[0])
        reply = _reply(content)
        replies.write(_LENGTH.pack(len(reply)) + reply)
        replies.flush()


def _reply(content: bytes) -> bytes:
    """The pickled result or error of a job."""
    try:
        # The pipe comes from the process that started this one; no other process can write to it.
        fn, args, kwargs = pickle.loads(content)
        return pickle.dumps((True, fn(*args, **kwargs)))
    except Exception as error:
        try:
            pickle.loads(reply := pickle.dumps((False, error)))
            return reply
        except Exception:
            return pickle.dumps((False, RuntimeError(f"{type(error).__name__}: {error}")))


class _Worker:
    """One worker process and the pipes to it. Raises WorkerLost if it cannot be started."""

    def __init__(self) -> None:
        # The worker must find the modules that the pickles name.
        path = os.pathsep.join(
            os.path.abspath(entry) if entry else os.getcwd() for entry in sys.path
        )
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _COMMAND],  # -P: nothing from the current folder
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                bufsize=0,
                env={**os.environ, **_ONE_THREAD, "PYTHONPATH": path},
                start_new_session=True,  # Ctrl-C is for the process that waits
            )
        except OSError as error:
            self._errors.close()
            raise WorkerLost(f"process cannot be started: {error}") from error

    def run(self, content: bytes) -> tuple[bool, Any]:
        """Run one pickled job; return true and its result, or false and its error.

        Raises:
            WorkerLost: when the worker died of it, or hangs.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the missing reply will show it
            _write(self._process.stdin.fileno(), _LENGTH.pack(len(content)) + content)
        size = _LENGTH.unpack(self._read(_LENGTH.size))[0]
        return pickle.loads(self._read(size))

    def kill(self) -> None:
        """End the worker at once; a job that it has is lost."""
        self._process.kill()

    def close(self) -> None:
        """End the worker and close its pipes."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def _read(self, count: int) -> bytes:
        assert self._process.stdout is not None
        place, parts = self._process.stdout.fileno(), list[bytes]()
        while count:
            self._wait(place)
            parts.append(part := os.read(place, min(count, 1 << 20)))
            if not part:
                raise WorkerLost(self._death())
            count -= len(part)
        return b"".join(parts)

    def _wait(self, place: int) -> None:
        """Wait for an answer as long as the worker computes."""
        poll, before = select.poll(), self._ticks()
        poll.register(place, select.POLLIN)
        while not poll.poll(STILL_S * 1000):
            now = self._ticks()
            if now is not None and now == before:
                self.kill()
                raise WorkerLost(f"process hung: it did nothing for {STILL_S:g} s")
            before = now

    def _ticks(self) -> int | None:
        """Processor time of the worker so far; None if the system does not say."""
        try:
            text = Path(f"/proc/{self._process.pid}/stat").read_text()
        except OSError:
            return None
        return sum(map(int, text.rpartition(")")[2].split()[11:13]))

    def _death(self) -> str:
        code = self._process.wait()
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        self._errors.seek(0)
        tail = self._errors.read().decode(errors="replace").strip().splitlines()[-4:]
        return "\n  ".join([f"process died ({how})", *tail])


def _write(place: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(place, view) :]
