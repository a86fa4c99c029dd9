"""The command line of the benchmarks, and the watchdog that ends a hanging run."""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import DeviceLostError, Monitor, Settings, run
from benchmarks.peers import PEERS, Implementation, choose, peers_within
from benchmarks.report import print_case, save_results
from benchmarks.tables import describe_environment
from benchmarks.workloads import MEASURED
from cutesuper.crosscompile import add_budget

EXIT_OURS_FAILED = 1
EXIT_NO_DEVICE = 2
EXIT_HUNG = 3
TIMEOUT_SECONDS = 180.0
#: other measurements, ``python -m benchmarks NAME ...``: the module's ``main(argv, prog)``
COMMANDS = {
    "inference": "benchmarks.inference",
    "layers": "benchmarks.layers",
    "chain": "benchmarks.chain",
    "attention": "benchmarks.attention",
    "prefill": "benchmarks.prefill",
    "training": "benchmarks.training",
    "decode": "benchmarks.decode",
    "models": "benchmarks.models",
    "modules": "benchmarks.modules",
    "steps": "benchmarks.steps",
    "heads": "benchmarks.heads",
    "calibrate": "benchmarks.calibrate",
    "rank": "benchmarks.rank",
    "search": "benchmarks.search.table",
    "ablation": "benchmarks.search.ablation",
}
GRACE_SECONDS = 20.0


class Watchdog:
    """A thread that calls ``on_expire(step)`` when a guarded step exceeds ``timeout`` seconds.

    A kernel that never ends cannot be interrupted from inside its process, so the callback should
    save partial results and end the process. Steps nest; the innermost one counts.
    """

    def __init__(self, timeout: float, on_expire: Callable[[str], None]) -> None:
        self.timeout, self._on_expire = timeout, on_expire
        self._steps: list[tuple[str, float]] = []
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    @contextmanager
    def guard(self, step: str) -> Iterator[None]:
        """Watch the enclosed statements."""
        self._steps.append((step, time.monotonic() + self.timeout))
        # native code that hangs holding the interpreter lock would stop our thread as well
        faulthandler.dump_traceback_later(
            self.timeout + GRACE_SECONDS, exit=True, file=sys.__stderr__ or sys.stderr
        )
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            self._steps.pop()

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(min(1.0, self.timeout / 4)):
            try:
                step, deadline = self._steps[-1]
            except IndexError:
                continue
            if time.monotonic() > deadline:
                self._on_expire(step)
                return


class CliMonitor(Monitor):
    """A monitor that prints finished cases, keeps the JSON file up to date, and detects hangs."""

    def __init__(self, timeout: float, path: Path | None) -> None:
        self.results: dict[str, Any] = {}
        self._path = path
        self._watchdog = Watchdog(timeout, self._hung)

    def started(self, results: dict[str, Any]) -> None:
        """Remember the results that are being filled."""
        self.results = results
        print(describe_environment(results), flush=True)

    def step(self, name: str) -> AbstractContextManager[None]:
        """Watch one step."""
        return self._watchdog.guard(name)

    def case_done(self, results: dict[str, Any], case: dict[str, Any]) -> None:
        """Print the case, failures and losses included, and save."""
        print_case(case, results)
        self._save()

    def abort(self, reason: str) -> None:
        """Report the partial results of a run that cannot continue."""
        self.results["aborted"] = reason
        print(f"error: {reason}", file=sys.stderr)
        if self.results.get("cases"):
            case = self.results["cases"][-1]
            case["error"] = case["error"] or reason
            print_case(case, self.results)
            self._save()
        sys.stdout.flush()

    def close(self) -> None:
        """End the watchdog."""
        self._watchdog.close()

    def _save(self) -> None:
        if self._path is not None:
            save_results(self.results, self._path)

    def _hung(self, step: str) -> None:
        """Report a hang on the watchdog's thread while the main thread is stuck.
        Ends the process."""
        try:
            self.abort(f"no progress in {step}; leave it out with --skip")
        finally:
            os._exit(EXIT_HUNG)


def build_parser(prog: str = "python -m benchmarks") -> argparse.ArgumentParser:
    """Options of a benchmark run."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Measure cutesuper and its peers on the current CUDA GPU.",
        epilog=f"Other measurements: {', '.join(f'{prog} {name}' for name in COMMANDS)} (--help).",
    )
    parser.add_argument("workload", choices=sorted(MEASURED), help="what to measure")
    parser.add_argument(
        "--shape", action="append", metavar="AxBxC", help="shape, repeatable; default all"
    )
    parser.add_argument("--dtype", default="float16", help="element type (default float16)")
    parser.add_argument("--quick", action="store_true", help="fewer shapes, rounds and peers")
    add_budget(parser)
    add_options(parser)
    return parser


def add_options(parser: argparse.ArgumentParser, known: Sequence[Implementation] = PEERS) -> None:
    """The options of every measurement with peers, which are among ``known``."""
    names = ", ".join(peer.name for peer in known)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--peers", help=f"comma-separated subset of: {names}")
    parser.add_argument("--skip", help="comma-separated implementations to leave out")
    parser.add_argument("--rounds", type=int, help="replays of each implementation")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs and of the order")
    parser.add_argument(
        "--timeout",
        type=float,
        default=TIMEOUT_SECONDS,
        help="seconds before a step counts as hung (default %(default).0f)",
    )


def check_options(arguments: argparse.Namespace) -> None:
    """Refuse numbers without a meaning. Raises ValueError."""
    if arguments.rounds is not None and arguments.rounds < 1:
        raise ValueError(f"--rounds {arguments.rounds}: at least 1")
    if arguments.timeout <= 0:
        raise ValueError(f"--timeout {arguments.timeout}: a positive number of seconds")


def selected(
    arguments: argparse.Namespace, *, quick: bool = False, among: Sequence[Implementation] = PEERS
) -> list[Implementation]:
    """The implementations that ``--peers`` and ``--skip`` leave. Raises ValueError."""
    names = arguments.peers.split(",") if arguments.peers else None
    skipped = set(arguments.skip.split(",")) if arguments.skip else set()
    choose(sorted(skipped), among=among)  # refuses unknown names
    return [p for p in choose(names, quick=quick, among=among) if p.name not in skipped]


def settings_of(arguments: argparse.Namespace, base: Settings) -> Settings:
    """``base`` with the seed and, if given, the number of rounds."""
    settings = replace(base, seed=arguments.seed)
    return settings if arguments.rounds is None else replace(settings, rounds=arguments.rounds)


def main(argv: Sequence[str] | None = None, prog: str = "python -m benchmarks") -> int:
    """Measure, print the table, write JSON; or run one of COMMANDS.

    Returns 0 when our implementations ran and were right. Otherwise raises SystemExit: see
    `supervise`.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    if given and given[0] in COMMANDS:
        return import_module(COMMANDS[given[0]]).main(given[1:], f"{prog} {given[0]}")
    parser = build_parser(prog)
    arguments = parser.parse_args(given)
    workload = MEASURED[arguments.workload]
    try:
        shapes = [workload.parse_shape(text) for text in arguments.shape or ()]
        within = peers_within(arguments.budget_s)
        peers = selected(arguments, quick=arguments.quick, among=within)
        if arguments.dtype not in workload.dtypes:
            raise ValueError(f"--dtype {arguments.dtype}: one of {', '.join(workload.dtypes)}")
        check_options(arguments)
    except ValueError as error:
        parser.error(str(error))  # exits with code 2
    base = Settings().quick() if arguments.quick else Settings()

    def measure(monitor: Monitor) -> None:
        run(
            workload,
            shapes=shapes or None,
            dtype=arguments.dtype,
            peers=peers,
            quick=arguments.quick,
            settings=settings_of(arguments, base),
            monitor=monitor,
        )

    return supervise(arguments, measure)


def supervise(arguments: argparse.Namespace, measure: Callable[[Monitor], None]) -> int:
    """Measure under a watchdog; results are printed and written case by case.

    Returns 0 when our implementations ran and were right. Otherwise raises SystemExit: 1 when one
    of ours failed or was wrong, 2 without a CUDA GPU or for wrong arguments, 3 when an
    implementation hung or broke the device (what was measured until then is printed and written).
    """
    require_device()
    monitor = CliMonitor(arguments.timeout, arguments.json)
    try:
        measure(monitor)
    except DeviceLostError as error:
        monitor.abort(f"the device stopped working: {error}")
    finally:
        monitor.close()
    results = monitor.results
    if "aborted" in results:
        raise SystemExit(EXIT_HUNG)
    if ours_failed(results):
        raise SystemExit(EXIT_OURS_FAILED)
    return 0


def require_device() -> None:
    """Raise SystemExit without a CUDA GPU."""
    if not torch.cuda.is_available():
        print("error: benchmarks need a CUDA GPU and PyTorch sees none here", file=sys.stderr)
        raise SystemExit(EXIT_NO_DEVICE)


def ours_failed(results: dict[str, Any]) -> bool:
    """True if one of our own implementations failed or was wrong in any case."""
    return any(
        entry["status"] != "ok"
        for case in results.get("cases", ())
        for entry in case["implementations"]
        if entry["kind"] == "ours"
    )
