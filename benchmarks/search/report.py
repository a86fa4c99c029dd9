"""Tables of the measurements of the search, from plain data alone."""

from __future__ import annotations

from statistics import geometric_mean
from typing import Any

from benchmarks.tables import Row, markdown_table, number, print_table

SEARCH = ["program", "regions", "splits", "classes", "structures", "verified", "CPU s", "wall s",
          "peak MB", "kernels", "MB moved", "us", "speed-up"]  # fmt: skip
#: names of the variants of the enumeration, in JSON too
VARIANTS = ("forward enumeration", "no order", "no expression test")
ABLATION = ["operators", *VARIANTS, "saturation"]
PAPER = ["Mirage", "Mirage, one thread", "Mirage, no abstract expressions"]
#: seconds for RMSNorm, by operators of a block: arXiv:2405.05751, Table 5
PAPER_SECONDS: dict[int, tuple[str, str, str]] = {
    5: ("11", "58", "768"),
    6: ("16", "93", "19,934"),
    7: ("22", "150", "> 10 h"),
    8: ("24", "152", "> 10 h"),
    9: ("26", "166", "> 10 h"),
    10: ("26", "166", "> 10 h"),
    11: ("28", "183", "> 10 h"),
}
PAPER_PROGRAM = "RMSNorm + Linear"


def machine(results: dict[str, Any]) -> str:
    """One line with processor, versions and commit."""
    e = results["environment"]
    commit = e.get("commit")
    parts = [
        e["cpu"], f"Python {e['python']}", f"NumPy {e['numpy']}", f"cutesuper {e['cutesuper']}",
        f"commit {commit[:10]}{' (modified)' if e.get('dirty') else ''}" if commit else None,
        e["date"],
    ]  # fmt: skip
    return ", ".join(part for part in parts if part)


# --------------------------------------------------------------------------------- all programs


def print_search(results: dict[str, Any]) -> None:
    """Print the table of all programs, and a summary."""
    print_table(results["title"], SEARCH, search_rows(results))
    print(overall(results))
    print(machine(results), flush=True)


def case_line(case: dict[str, Any]) -> str:
    """One program in a line, while others are still measured."""
    if case["error"]:
        return f"{case['program']}: {case['error']}"
    best = case["best"]
    return (
        f"{case['program']}: {case['classes']:,} classes, {case['cpu_s']:.2f} s, "
        f"{case['verified']} structures verified, best {best['kernels']} kernels, "
        f"{best['predicted_us']:.1f} us{_times(speed_up(case))}"
    )


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f" ({ratio:.1f}x)"


def speed_up(case: dict[str, Any]) -> float | None:
    """Predicted time of one kernel for each operator over that of the best muGraph."""
    unfused = case["unfused"]["predicted_us"]
    return None if unfused is None else unfused / case["best"]["predicted_us"]


def search_rows(results: dict[str, Any]) -> list[Row]:
    """One row of SEARCH for each program."""
    return [_search_row(case) for case in results["cases"]]


def _search_row(case: dict[str, Any]) -> Row:
    if case["error"]:
        return [case["program"], *[""] * (len(SEARCH) - 2), case["error"]]
    best, unfused, ratio = case["best"], case["unfused"], speed_up(case)
    asked = case["verified"] + case["rejected"]
    return [
        case["program"],
        str(case["regions"]),
        f"{case['feasible']} of {case['splits']}",
        f"{case['classes']:,}",
        str(case["structures"]),
        f"{case['verified']} of {asked}",
        f"{case['cpu_s']:.2f} ({case['limit_s']:g}{'' if case['in_time'] else ': over'})",
        number(case["wall_s"]),
        number(case["peak_mb"], 0),
        f"{best['kernels']} / {unfused['kernels']}",
        f"{_megabytes(best['bytes'])} / {_megabytes(unfused['bytes'])}",
        f"{number(best['predicted_us'], 1)} / {number(unfused['predicted_us'], 1) or '?'}",
        "" if ratio is None else f"{ratio:.1f}x",
    ]


def _megabytes(n: int) -> str:
    """Megabytes with three digits."""
    value = n / 1e6
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def overall(results: dict[str, Any]) -> str:
    """All programs in a few sentences."""
    cases = [case for case in results["cases"] if not case["error"]]
    if not cases:
        return "Nothing was found."
    rejected = sum(case["rejected"] for case in cases)
    asked = rejected + sum(case["verified"] for case in cases)
    late = [case["program"] for case in cases if not case["in_time"]]
    ratios = [r for r in map(speed_up, cases) if r is not None]
    text = (
        f"{len(cases)} of {len(results['cases'])} programs: {asked - rejected} of {asked} "
        f"structures verified; {len(cases) - len(late)} within their limit of CPU time"
    )
    text += f" (not: {', '.join(late)})" if late else ""
    text += f"; predicted speed-up {geometric_mean(ratios):.1f}x (geometric mean)" if ratios else ""
    lowered = sum(case["best"]["lowered"] for case in cases)
    return f"{text}; skeletons of the lowering run {lowered} of the {len(cases)} best muGraphs."


def search_markdown(results: dict[str, Any]) -> str:
    """The table in Markdown, with the meaning of the columns."""
    note = (
        f"{overall(results)} Regions: different parts of the graph that were searched as one "
        "kernel. Splits: feasible of those tried. Classes: states of all tables. Structures: "
        "programs extracted, before sizes. Verified: of the structures that were offered, each "
        "once. CPU s: search and verification in a fresh process with one thread (limit); peak "
        "MB: of that process, with Python and NumPy. The next three columns are best muGraph / one "
        "kernel for each operator of the expanded graph (transposes free): kernels; device memory, "
        "every operand read and every result written once for each kernel; microseconds on "
        f"{results['target'].upper()} "
        "by the same cost model, predicted, not measured. "
        f"{machine(results)}."
    )
    return f"{markdown_table(SEARCH, search_rows(results))}\n\n{note}"


# ------------------------------------------------------------------------------------- ablation


def print_ablation(results: dict[str, Any]) -> None:
    """Print a table for each program."""
    for case in results["cases"]:
        print_table(f"{case['program']}, {case['split']}", ABLATION, ablation_rows(case, results))
    print(machine(results), flush=True)


def ablation_rows(case: dict[str, Any], results: dict[str, Any]) -> list[Row]:
    """One row of ABLATION for each number of operators."""
    most = sorted({cell["most"] for cell in case["cells"]})
    return [[str(n), *cells_at(case, n, results)] for n in most]


def cells_at(case: dict[str, Any], most: int, results: dict[str, Any]) -> list[str]:
    """``"1,532 in 0.01 s"`` for each variant, and for saturation."""
    saturation = case["saturation"]
    ours = _cell(saturation["classes"], saturation["cpu_s"])
    return [*(_variant(case, v, most, results["limit_s"]) for v in VARIANTS), ours]


def _variant(case: dict[str, Any], variant: str, most: int, limit_s: float) -> str:
    """The cell of this number of operators, or the last one before if that ran out of time."""
    cells = [c for c in case["cells"] if c["variant"] == variant and c["most"] <= most]
    last = max(cells, key=lambda c: c["most"])
    if last["finished"]:
        return _cell(last["states"], last["cpu_s"])
    return f"> {last['states']:,} in {limit_s:g} s" if last["most"] == most else "-"


def _cell(states: int, seconds: float) -> str:
    return f"{states:,} in {seconds:.2g} s"


def least(case: dict[str, Any]) -> int:
    """Number of operators of the smallest program."""
    return min(int(n) for n in case["saturation"]["programs"])


def _summary_row(case: dict[str, Any], results: dict[str, Any]) -> Row:
    """The variants at the size of the smallest program, or where they ran out of time before."""
    n = least(case)
    cells = []
    for variant in VARIANTS:
        text = _variant(case, variant, n, results["limit_s"])
        if text == "-":
            m = max(c["most"] for c in case["cells"] if c["variant"] == variant)
            text = f"{_variant(case, variant, m, results['limit_s'])}, at {m} operators"
        cells.append(text)
    ours = cells_at(case, n, results)[-1]
    programs = sum(case["saturation"]["programs"].values())
    return [f"{case['program']} ({case['split']})", str(n), *cells, ours, str(programs)]


def ablation_markdown(results: dict[str, Any]) -> str:
    """The paper's Table 5 beside ours, all programs, and the meaning of the columns."""
    cases = {case["program"]: case for case in results["cases"]}
    parts: list[str] = []
    if PAPER_PROGRAM in cases:
        case = cases[PAPER_PROGRAM]
        rows = [
            [row[0], *(PAPER_SECONDS.get(int(row[0])) or ("", "", "")), *row[1:]]
            for row in ablation_rows(case, results)
        ]
        header = [ABLATION[0], *(f"{name}, s" for name in PAPER), *ABLATION[1:]]
        parts.append(f"{PAPER_PROGRAM}, {case['split']}:\n\n{markdown_table(header, rows)}")
    header = ["program (split)", "operators", *ABLATION[1:], "programs"]
    parts.append(markdown_table(header, [_summary_row(c, results) for c in cases.values()]))
    parts.append(_ablation_note(results))
    return "\n\n".join(parts)


def _ablation_note(results: dict[str, Any]) -> str:
    checked = [c for case in results["cases"] for c in case["cells"] if c["finished"]]
    same = sum(c["same"] for c in checked)
    return (
        "States and CPU seconds of one thread, one split. Operators: of a program at most (loads, "
        "constants and stores are not counted); in the second table those of the smallest "
        "program. Forward enumeration: programs operator by operator, each set of operators once, "
        "with the expression test. No order: the same, every order of them. No expression test: "
        "each set once, whatever it computes. All three share the normal forms and never compute "
        "a value twice in one program. Saturation: classes, and all programs of any length "
        f"extracted from them. > : not finished after {results['limit_s']:g} s; - : left out "
        f"after that. In {same} of the {len(checked)} runs that finished, the programs were the "
        "same as those of saturation with as many operators. Mirage: RMSNorm, all maps and loops, "
        "as its authors measured it (arXiv:2405.05751, Table 5). "
        f"{machine(results)}."
    )
