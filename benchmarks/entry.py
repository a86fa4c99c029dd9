"""The result of one implementation in one case, and its conversion to plain data."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.check import Verdict
from benchmarks.device import Recording
from benchmarks.peers import Implementation, Launcher
from benchmarks.spread import Spread, summarize


@dataclass
class Entry:
    """Known facts about one implementation in one case, filled in as the run proceeds."""

    implementation: Implementation
    status: str = "pending"  # then "ok", "wrong" or "failed"
    running: str | None = None  # the step it is in
    error: str | None = None
    prepare_seconds: float | None = None
    launcher: Launcher | None = None
    recording: Recording | None = None
    samples: list[float] = field(default_factory=list)
    before: Verdict | None = None
    after: Verdict | None = None
    host: Spread | None = None

    def fail(self, status: str, error: str) -> None:
        """Mark as failed or wrong; earlier measurements are no longer shown."""
        self.status, self.error, self.running = status, error, None
        self.drop()

    def drop(self) -> None:
        """Free the memory of the prepared implementation."""
        launcher, self.launcher, self.recording = self.launcher, None, None
        if launcher is not None and launcher.close is not None:
            with suppress(RuntimeError):  # a lost device refuses this too
                launcher.close()

    def spread(self) -> Spread | None:
        """Device time per launch, if it counts."""
        return summarize(self.samples) if self.samples and self.status == "ok" else None


def best_floor(entries: Sequence[Entry]) -> float | None:
    """Median microseconds of the fastest floor kernel among ``entries``."""
    spreads = [e.spread() for e in entries if e.implementation.kind == "floor"]
    return min((s.median for s in spreads if s is not None), default=None)


def describe_entry(
    entry: Entry, bytes_moved: int, flops: int, floors: dict[str, float | None]
) -> dict[str, Any]:
    """One implementation as plain data; ``bandwidth_gbs`` counts required bytes only."""
    spread = entry.spread()
    floor = floors["pdl" if entry.implementation.dependent else "plain"]
    time_us = spread.median if spread else None
    return {
        "name": entry.implementation.name,
        "kind": entry.implementation.kind,
        "dependent": entry.implementation.dependent,
        "status": "unfinished" if entry.running else entry.status,
        "error": f"did not finish: {entry.running}" if entry.running else entry.error,
        "prepare_seconds": entry.prepare_seconds,
        "time_us": asdict(spread) if spread else None,
        "host_us": asdict(entry.host) if entry.host else None,
        "bandwidth_gbs": bytes_moved / time_us / 1e3 if time_us else None,
        "tflops": flops / time_us / 1e6 if time_us else None,
        "floor_percent": 100 * floor / time_us if floor and time_us else None,
        "check_before": _verdict(entry.before),
        "check_after": _verdict(entry.after),
    }


def _verdict(verdict: Verdict | None) -> dict[str, Any] | None:
    if verdict is None:
        return None
    data = asdict(verdict)
    return {k: _finite(v) for k, v in data.items()} | {"errors": [*map(_finite, verdict.errors)]}


def _finite(value: Any) -> Any:
    """A value for JSON, which has neither NaN nor infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def describe_error(error: BaseException) -> str:
    """Type and first line of the message without terminal colours, at most 300 characters."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
