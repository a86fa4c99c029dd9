"""Output of the command line about a tuning run."""

from __future__ import annotations

from rich.table import Table

from cutesuper.tune.candidates import Trial
from cutesuper.tune.tuner import Tuned, median, spread


def table(tuned: Tuned) -> Table:
    """All candidates: those of the last stage by their time, then the others.
    The others by the short stage, then those that dropped out."""
    result = Table(title="muGraphs (in the model's order) x schedules, microseconds")
    result.add_column("no.", no_wrap=True)
    for name in ("muGraph", "predicted", "measured", "spread"):
        result.add_column(name, justify="right", no_wrap=True)
    result.add_column("schedule", overflow="fold")
    result.add_column("verdict", overflow="fold")
    for trial in sorted(tuned.trials, key=_place):
        result.add_row(*_cells(trial, tuned))
    return result


def _place(trial: Trial) -> tuple[bool, bool, float]:
    timed = bool(trial.samples)
    return not timed, not trial.final, median(trial) if timed else float(trial.rank)


def _cells(trial: Trial, tuned: Tuned) -> list[str]:
    timed = bool(trial.samples)
    return [
        trial.name,
        str(trial.rank),
        f"{trial.predicted_us:.2f}",
        f"{median(trial):.2f}" if timed else "",
        f"{spread(trial):.2f}" if timed else "",
        trial.change or "default",
        _verdict(trial, tuned),
    ]


def _verdict(trial: Trial, tuned: Tuned) -> str:
    if trial is tuned.winner:
        return "winner, the model's choice" if trial is tuned.model else "winner"
    if trial.status != "ok":
        return trial.status
    if trial is tuned.model:
        return "the model's choice"
    return "" if trial.final else "short look only"


def summary(tuned: Tuned) -> str:
    """Candidates that dropped out with reasons, the winner, and its file."""
    dropped = [f"{t.name}: {t.reason}\n" for t in tuned.trials if t.reason]
    m, trial = tuned.measured, tuned.winner
    if m.model_us is None:
        gain = "the cost model's choice did not run"
    elif trial is tuned.model:
        gain = "the cost model's choice, not beaten by more than the spread"
    else:
        gain = f"{m.model_us / m.median_us:.3f}x the cost model's choice ({m.model_us:.2f} us)"
    return "".join(dropped) + (
        f"{m.median_us:.2f} us: {gain}; {m.timed} candidate(s) timed in {tuned.seconds:.0f} s\n"
        f"{trial.structure}\nschedule: {trial.change or 'default'}\nstored in {tuned.path}"
    )
