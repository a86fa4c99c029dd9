"""Tables of `rank`: every candidate of a case, and one line for each case."""

from __future__ import annotations

import sys
from statistics import median
from string import ascii_uppercase
from typing import Any

from benchmarks.tables import Row, describe_environment, markdown_table, number, print_table

HEADER = ["place", "predicted us", "us", "p10..p90", "off", "program, sizes"]
SUMMARY = ["workload", "timed", "Spearman", "as many kernels", "Kendall", "best is", "regret",
           "error"]  # fmt: skip


def print_results(results: dict[str, Any]) -> None:
    """Print device and versions, every case, and the summary."""
    print(describe_environment(results))
    for case in results["cases"]:
        print_case(case)
    print_summary(results)


def print_case(case: dict[str, Any]) -> None:
    """Print every candidate of a case, fastest first, failures last, and its structures."""
    letters = structure_letters(case)
    print_table(case_title(case), HEADER, case_rows(case, letters), bold=_first(case))
    for structure, letter in letters.items():
        print(f"  {letter}  {structure}")
    if case["error"]:
        print(f"  error: {case['error']}")
    sys.stdout.flush()


def print_summary(results: dict[str, Any]) -> None:
    """Print one line for each case, and a summary of all."""
    print_table("predicted against measured", SUMMARY, summary_rows(results))
    print(overall(results), flush=True)


def case_title(case: dict[str, Any]) -> str:
    """The line above the table of a case."""
    search = case["search"]
    timed = case["summary"]["timed"]
    return (
        f"{case['title']} {case['label']}: {timed} of {len(case['candidates'])} candidates timed, "
        f"chosen from {search['found']} of {search['structures']} structures"
    )


def structure_letters(case: dict[str, Any]) -> dict[str, str]:
    """A short name for every structure of a case: A, B, ..., Z, A1, B1, ..."""
    names = dict.fromkeys(c["structure"] for c in case["candidates"])
    many = len(ascii_uppercase)
    return {s: f"{ascii_uppercase[i % many]}{i // many or ''}" for i, s in enumerate(names)}


def case_rows(case: dict[str, Any], letters: dict[str, str]) -> list[Row]:
    """One row of HEADER for each candidate."""

    def key(candidate: dict[str, Any]) -> tuple[float, int]:
        time = candidate["time_us"]
        return (time["median"] if time else float("inf"), candidate["position"])

    return [_candidate_row(c, letters) for c in sorted(case["candidates"], key=key)]


def _candidate_row(candidate: dict[str, Any], letters: dict[str, str]) -> Row:
    time, predicted = candidate["time_us"], candidate["predicted_us"]
    program = f"{letters[candidate['structure']]}  {candidate['sizes']}"
    if candidate["status"] != "ok":
        program = f"{candidate['status']}: {candidate['error']} ({program})"
    return [
        str(candidate["position"]),
        number(predicted),
        number(time["median"]) if time else "",
        f"{time['p10']:.2f}..{time['p90']:.2f}" if time else "",
        f"{100 * (predicted / time['median'] - 1):+.0f}%" if time else "",
        program,
    ]


def _first(case: dict[str, Any]) -> list[str]:
    """The model's choice: the first candidate that could be timed."""
    timed = [c["position"] for c in case["candidates"] if c["time_us"]]
    return [str(min(timed))] if timed else []


def summary_rows(results: dict[str, Any]) -> list[Row]:
    """One row of SUMMARY for each case."""
    return [_summary_row(case) for case in results["cases"]]


def _summary_row(case: dict[str, Any]) -> Row:
    s, name = case["summary"], f"{case['title']} {case['label']}"
    return [
        name,
        f"{s['timed']} of {len(case['candidates'])}",
        number(s["spearman"]),
        number(s["spearman_alike"]),
        number(s["kendall"]),
        f"no. {s['best_place']}" if s["best_place"] else case["error"] or "nothing timed",
        _percent(s["regret"]),
        _percent(s["error"]),
    ]


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}%"


def overall(results: dict[str, Any]) -> str:
    """All cases in one sentence."""
    summaries = [case["summary"] for case in results["cases"] if case["summary"]["best_place"]]
    if not summaries:
        return "Nothing was timed."
    near = sum(s["best_in_top5"] for s in summaries)
    regrets = [s["regret"] for s in summaries]
    rho = [s["spearman"] for s in summaries if s["spearman"] is not None]
    text = (
        f"The measured best is among the model's first five in {near} of {len(summaries)} cases; "
        f"regret {_percent(median(regrets))} in the median and at most {_percent(max(regrets))}"
    )
    return text + (f"; Spearman {median(rho):.2f} in the median." if rho else ".")


def markdown(results: dict[str, Any]) -> str:
    """The summary in Markdown, with the meaning of the columns."""
    note = (
        f"{overall(results)} Candidates: the model's best {results['top']} and half as many of the "
        "rest (other sizes, other structures). As many kernels: Spearman's correlation of the "
        "candidates with as many kernels as the model's first choice. Best is: place of the "
        "fastest one in the model's order. Regret: time of the model's first choice over the "
        "fastest, less 1. Error: mean of |predicted - measured| / measured. Medians of plain "
        "launches in CUDA graphs, cold L2, candidates interleaved, outputs checked before and "
        f"after. {describe_environment(results)}."
    )
    return f"{markdown_table(SUMMARY, summary_rows(results))}\n\n{note}"
