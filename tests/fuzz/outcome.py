"""Outcomes of programs, and their counts."""

from __future__ import annotations

import json
import re
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.ptx.parse import PtxError

#: outcomes that somebody has to look at
FINDINGS = ("wrong", "illegal", "exception", "hang", "crash", "odd")
PACKAGE = "cutesuper"
#: findings of one kind and place that are made small: they may have several causes
LIKE_IT = 12


@dataclass(frozen=True)
class Outcome:
    """The outcome of one program.

    Attributes:
        kind: "right"; "unjudged" (most elements have no bound that says anything); "refused" (a
            documented error); "slow"; "too large" (for the machine of `tests.ptx`); or one of
            `FINDINGS`: "wrong" (a result), "illegal" (what no kernel may do), "exception" (an
            undocumented one), "hang", "crash" (of the process), "odd" (anything else that should
            not be).
        where: the stage, and of exceptions the class and the innermost line of the package: what
            makes two findings the same one.
        detail: for people.
        launched: a kernel of it was launched.
    """

    kind: str
    where: str = ""
    detail: str = ""
    launched: bool = False

    @property
    def key(self) -> str:
        """Equal where two outcomes are probably the same one."""
        return f"{self.kind}: {self.where}"

    @property
    def finding(self) -> bool:
        """True if it has to be looked at."""
        return self.kind in FINDINGS


def of_exception(error: BaseException, stage: str) -> Outcome:
    """An exception that nothing documents."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f"/{PACKAGE}/" in f.filename] or list(frames)
    last = own[-1] if own else None
    place = f"{Path(last.filename).name}:{last.name}" if last else "nowhere"
    text = "".join(traceback.format_exception(error)[-4:])
    return Outcome("exception", f"{stage}, {type(error).__name__} in {place}", text)


def of_machine(error: PtxError, stage: str) -> Outcome:
    """The reason for which the machine of `tests.ptx` stopped a kernel; numbers and registers are
    left out."""
    what = re.sub(r"^instruction \d+ `[^`]*`, block [\d ]+, warp \d+: ", "", str(error))
    reason = re.sub(r"`[^`]*`|%\w+|(?<!\w)-?\d+", "..", what)
    return Outcome("illegal", f"{stage}, {reason[:100]}", str(error))


#: what errors of programs that a search made begin with, which nobody can do anything about
INTERNAL = ("block program, ", "muGraph: ")


def of_refusal(error: Exception, stage: str) -> Outcome:
    """A documented error; what it names is left out of its reason."""
    if str(error).startswith(INTERNAL):
        return of_exception(error, stage)
    text = re.sub(
        r"superoptimize\(f[^)]*\)(: \S+)?,?( at <fuzzed>:[-\d]+)?: ", "", str(error).split("\n")[0]
    )
    reason = re.sub(r"\([^()]*\)|\[[^\[\]]*\]|'[^']*'|\d+(\.\d+)?", "..", text)
    return Outcome("refused", f"{stage}, {type(error).__name__}: {reason[:100]}", str(error))


@dataclass
class Tally:
    """Outcomes of many programs.

    Attributes:
        counts: by kind.
        refused: by reason.
        operators: how often each was in a program.
        findings: made small, one for each kind, place and set of operators.
        repeated: findings by kind and place, made small or not.
        seconds: of the whole run.
        launched: programs of which a kernel was launched.
    """

    counts: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    operators: Counter[str] = field(default_factory=Counter)
    findings: list[dict[str, Any]] = field(default_factory=list)
    repeated: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    launched: int = 0

    def add(self, outcome: Outcome, operators: set[str]) -> bool:
        """Count one; whether it is a finding worth making small."""
        self.counts[outcome.kind] += 1
        self.launched += outcome.launched
        self.operators.update(operators)
        if outcome.kind == "refused":
            self.refused[outcome.where] += 1
        if not outcome.finding:
            return False
        self.repeated[outcome.key] += 1
        return self.repeated[outcome.key] <= LIKE_IT

    def note(self, finding: dict[str, Any]) -> bool:
        """Keep a finding that was made small; False where one like it is known."""
        if any(f["key"] == finding["key"] for f in self.findings):
            return False
        self.findings.append(finding)
        return True

    def merge(self, other: Tally) -> None:
        """Add what another process has counted."""
        for mine, theirs in (
            (self.counts, other.counts),
            (self.refused, other.refused),
            (self.operators, other.operators),
            (self.repeated, other.repeated),
        ):
            mine.update(theirs)
        known = {f["key"] for f in self.findings}
        self.findings += [f for f in other.findings if f["key"] not in known]
        self.seconds = max(self.seconds, other.seconds)
        self.launched += other.launched

    def data(self) -> dict[str, Any]:
        """The outcome as JSON has it."""
        return {
            "counts": dict(self.counts), "refused": dict(self.refused.most_common()),
            "operators": dict(self.operators.most_common()), "findings": self.findings,
            "repeated": dict(self.repeated), "seconds": self.seconds, "launched": self.launched,
        }  # fmt: skip

    def save(self, file: Path) -> None:
        """Write `data`; a reader finds either this or what stood there before."""
        new = file.with_suffix(".new")
        new.write_text(json.dumps(self.data(), indent=1), encoding="utf-8")
        new.replace(file)

    @staticmethod
    def read(file: Path) -> Tally:
        """Read the file that `save` wrote."""
        return Tally.of(json.loads(file.read_text(encoding="utf-8")))

    @staticmethod
    def of(data: dict[str, Any]) -> Tally:
        """The outcome that `data` wrote."""
        return Tally(
            Counter(data["counts"]), Counter(data["refused"]), Counter(data["operators"]),
            data["findings"], Counter(data["repeated"]), data["seconds"], data["launched"],
        )  # fmt: skip

    def text(self) -> str:
        """A table for people."""
        total, counts = sum(self.counts.values()), self.counts
        lines = [f"{total} programs in {self.seconds:.0f} s, {len(self.operators)} operators"]
        if self.launched:
            lines.append(f"kernels of {self.launched} were launched")
        known = counts["right"] + counts["slow"] + counts["wrong"]
        if counts["unjudged"]:
            share = counts["unjudged"] / (counts["unjudged"] + known)
            lines.append(f"unjudged: {share:.1%} of those with results")
        lines += [f"  {n:6} {kind}" for kind, n in self.counts.most_common()]
        if self.refused:
            lines += ["refused:", *(f"  {n:6} {why}" for why, n in self.refused.most_common(25))]
        if self.repeated:
            lines += ["findings:", *(f"  {n:6} {key}" for key, n in self.repeated.most_common())]
        return "\n".join(lines)
