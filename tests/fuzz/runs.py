"""Programs one after the other, findings made small and printed; and one program again."""

from __future__ import annotations

import json
import random
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.fuzz import functions
from tests.fuzz.check import Settings, check_case
from tests.fuzz.draw import draw_case
from tests.fuzz.functions import Function, check_function, draw_function
from tests.fuzz.minimise import minimised
from tests.fuzz.outcome import Outcome, Tally
from tests.fuzz.pieces import draw_pieces
from tests.fuzz.programs import Case

Program = Case | Function

DRAWS: dict[str, Callable[[int, int], Program]] = {
    "graph": draw_case, "torch": draw_function, "pieces": draw_pieces,
}  # fmt: skip

#: of three programs one is a function of PyTorch, where both fronts run
EVERY = 3


@dataclass(frozen=True)
class Plan:
    """A plan of programs to run: see ``python -m tests.fuzz --help``."""

    seed: int = 0
    first: int = 0
    step: int = 1
    seconds: float = 60.0
    cases: int | None = None
    front: str = "both"
    budget_s: float | None = 1.0
    limit_s: float = 120.0
    compile: float = 0.0
    gpu: bool = False
    ptx: bool = False
    minimise: bool = True
    json: Path | None = None
    journal: Path | None = None

    def settings(self, index: int) -> Settings:
        """The settings of one program."""
        chance = random.Random(f"{self.seed}:{index}:compile").random()
        return Settings(self.budget_s, limit_s=self.limit_s, compile=chance < self.compile,
                        gpu=self.gpu or self.ptx)  # fmt: skip

    @property
    def options(self) -> str:
        """The options of the command line that runs a finding again."""
        return "--ptx " * self.ptx + "--gpu " * self.gpu

    def front_of(self, index: int) -> str:
        """The front that a program is of."""
        if self.front == "both":
            return "torch" if index % EVERY == EVERY - 1 else "graph"
        return self.front


def drawn(seed: int, index: int, front: str) -> Program:
    """The program of an index."""
    return DRAWS[front](seed, index)


def check(program: Program, settings: Settings) -> Outcome:
    """The outcome of a program of either front."""
    if isinstance(program, Function):
        return check_function(program, settings)
    return check_case(program, settings)


def run(plan: Plan) -> Tally:
    """Until the time is over, or all programs are done."""
    tally, index = Tally(), plan.first
    end = time.monotonic() + plan.seconds
    count = plan.cases if plan.cases is not None else 1 << 60
    while time.monotonic() < end and count > 0:
        _one(plan, index, tally)
        if plan.json is not None:
            tally.save(plan.json)
        index, count = index + plan.step, count - 1
    return tally


def _one(plan: Plan, index: int, tally: Tally) -> None:
    front = plan.front_of(index)
    name = f"{plan.seed}:{index}:{front}"
    _note(plan, name)
    try:
        program = drawn(plan.seed, index, front)
    except Exception as error:
        from tests.fuzz.outcome import of_exception

        outcome = of_exception(error, "drawing")
        if tally.add(outcome, set()):
            tally.note(_finding(name, outcome, name, "", ""))
        return
    settings = plan.settings(index)
    outcome = check(program, settings)
    if tally.add(outcome, program.operators):
        found = _reduced(name, program, outcome, settings, plan.minimise)
        if tally.note(found):
            print(text_of(found, plan.options), flush=True)


def _reduced(
    name: str, program: Program, outcome: Outcome, settings: Settings, minimise: bool
) -> dict[str, Any]:
    """A finding, made small; what is left of the program is part of what makes it this one."""
    if minimise:
        program = smaller(program, outcome, settings)
        again = check(program, settings)
        outcome = again if again.key == outcome.key else outcome
    what = ""
    if minimise and outcome.kind != "exception":
        what = f" of {' '.join(program.parts)}"
    return _finding(name, outcome, program.dumps(), program.code(), what)


def _finding(name: str, outcome: Outcome, replay: str, code: str, what: str = "") -> dict[str, Any]:
    return {"key": f"{outcome.key}{what}", "drawn": name, "detail": outcome.detail,
            "replay": replay, "code": code}  # fmt: skip


def text_of(found: dict[str, Any], options: str = "") -> str:
    """A finding for people, with the command that runs it again."""
    again = f"python -m tests.fuzz {options}--replay {shlex.quote(found['replay'])}"
    return "\n".join([
        f"-- {found['key']}  (drawn as {found['drawn']})", found["detail"].rstrip(), "",
        found["code"], "", again, "",
    ])  # fmt: skip


def smaller(program: Program, outcome: Outcome, settings: Settings) -> Program:
    """A program with the same outcome."""
    fast = replace(settings, limit_s=min(settings.limit_s, 40.0))

    def alike(other: Any) -> bool:
        return check(other, fast).key == outcome.key

    if outcome.kind in ("hang", "crash"):
        return program
    return (
        functions.minimised(program, alike)
        if isinstance(program, Function)
        else (minimised(program, alike))
    )


def _note(plan: Plan, name: str) -> None:
    """Note where a process was, if it should not come back."""
    if plan.journal is not None:
        plan.journal.write_text(name, encoding="utf-8")


# ---------------------------------------------------------------------------------------- again


@dataclass(frozen=True)
class Replay:
    """A program that is run again."""

    program: Program

    @staticmethod
    def all_of(text: str) -> list[Replay]:
        """Read one as `of` does, or one from each line of a file, which is named."""
        lines = [text]
        if not text.lstrip().startswith("{") and Path(text).is_file():
            lines = Path(text).read_text(encoding="utf-8").splitlines()
        return [Replay.of(line) for line in lines]

    @staticmethod
    def of(text: str) -> Replay:
        """Read it from ``SEED:INDEX``, ``SEED:INDEX:FRONT``, or JSON.

        Raises:
            ValueError: none of these.
        """
        parts = text.split(":")
        if len(parts) in (2, 3) and all(p.isdigit() for p in parts[:2]):
            seed, index = int(parts[0]), int(parts[1])
            front = parts[2] if len(parts) == 3 else Plan(seed).front_of(index)
            return Replay(drawn(seed, index, front))
        data = json.loads(text)
        read = Function.loads if data["front"] == "torch" else Case.loads
        return Replay(read(data))


def replayed(replay: Replay, plan: Plan) -> int:
    """Run one program again and print what comes of it; 1 where that is a finding."""
    settings = replace(plan.settings(plan.first), compile=plan.compile > 0)
    outcome = check(replay.program, settings)
    found = _finding("replay", outcome, replay.program.dumps(), replay.program.code())
    print(text_of(found, plan.options))
    return 1 if outcome.finding else 0
