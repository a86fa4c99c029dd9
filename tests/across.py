"""Programs by targets: what the compiler makes of them, and what a verifier says of those for B200.

    python -m tests.across                 # adds what docs/blackwell.json lacks, writes the page
    python -m tests.across --seconds 0     # the same without the verifier
    python -m tests.across --page          # only writes the tables of docs/blackwell.md again

Every workload of the benchmarks, and the layers of Llama-3-8B and 70B at 1 to 8192 rows, is
searched and compiled for H100, H200 and B200. Their kernels for B200 are given to a verifier
(`tests.ward`) with the tiles, clusters and schedules that they have, over fewer blocks and
iterations (`tests.shrunk`), equal ones once; and so are the small plans of
`tests.blackwell_plans`. No GPU is needed; it takes hours.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tests.ptx.device import emulated_gpu

PAGE, FILE = Path("docs/blackwell.md"), Path("docs/blackwell.json")
TARGETS = ("h100", "h200", "b200")
ROWS = (1, 16, 128, 1024, 8192)
#: attention that stands in the tables, one token of a model, and lengths without and with pages
ATTENTION = "few,decode,models/llama3-70b/4,lengths/serving/4,lengths/serving_pages_16/4"
KEPT = ("HGMMA", "UTCHMMA", "LDTM", "STTM", "UTMALDG")
#: verdicts in words
WORDS = {"race_free": "right", "verified": "right", "potential_race": "right but for pairs below",
         "timeout": "not finished"}  # fmt: skip


def cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Name of every program, and the function that makes its graph."""
    import cutesuper as cs
    from benchmarks import attention, inference, layers, prefill, training

    items = [
        *inference.make_sweep(inference.WORKLOADS, ()).items,
        *attention.chosen(ATTENTION),
        *prefill.cases().values(),
        *(i for i in training.chosen(None) if not i.key.startswith("host/")),
        *layers.make_sweep(("llama3-8b", "llama3-70b"), ROWS, ()).items,
    ]
    for item in items:
        yield item.key, partial(item.workload.graph, cs, item.shape, item.dtype)


def choice(graph: Any, name: str) -> tuple[Any, Any]:
    """What `superoptimize` would run on a target, and the target."""
    from cutesuper import pipeline
    from cutesuper.targets import find_target

    target = find_target(name)
    return pipeline.find(graph, pipeline.Options(target))[1], target


def figures(found: Any, target: Any) -> dict[str, Any]:
    """Compile a choice: the largest of each figure of its kernels, instructions added up."""
    from cutesuper.runtime.resources import combine
    from tests.plans import compiled

    made = combine([compiled(plan, target.arch).resources for plan in found.plans])
    return {
        "kernels": len(found.plans),
        "registers": made.registers,
        "stack": made.stack_bytes,
        "spills": made.spills,
        "instructions": {k: made.instructions[k] for k in KEPT if made.instructions.get(k)},
    }


def small_plans(found: Any, target: Any) -> dict[str, Any]:
    """The plans of a choice over few blocks and iterations, by a hash of what they are."""
    from cutesuper.ir.unseen import followed
    from cutesuper.skeletons.planner import make_plan
    from tests.shrunk import shrunk

    mu, plans = found.candidate.mugraph, dict[str, Any]()
    for step, plan in zip(mu.steps, found.plans, strict=True):
        pairs = getattr(plan.schedule, "share_rows", 1) > 1  # of tiles beside each other
        small = make_plan(*shrunk(step, followed(mu), 2 if pairs else 1), target, plan.schedule)
        plans[hashlib.sha256(small.key.encode()).hexdigest()[:12]] = small
    return plans


def judged(plan: Any, seconds: int, reference: str = "") -> dict[str, Any]:
    """The verdict on a plan, how both sides of a race access memory, and the time that it took."""
    from tests.ward import given, verdict

    start = time.time()
    found = verdict(given(plan), reference, seconds=seconds)
    races = [[r[side]["mode"] for side in ("first", "second")] for r in found.get("races", ())]
    return {"result": found["result"], "races": races, "seconds": round(time.time() - start)}


def extend(data: dict[str, Any], name: str, graph: Callable[[], Any], seconds: int) -> None:
    """Add what a case lacks."""
    case = data["cases"].setdefault(name, {})
    for target in TARGETS:
        if target not in case:
            case[target] = figures(*choice(graph(), target))
            print(name, target, case[target], flush=True)
    if not seconds or all(key in data["verdicts"] for key in case.get("plans", [""])):
        return
    plans = small_plans(*choice(graph(), TARGETS[-1]))
    case["plans"] = list(plans)
    for key, plan in plans.items():
        if key not in data["verdicts"]:
            data["verdicts"][key] = judged(plan, seconds)
            print(name, key, data["verdicts"][key], flush=True)


def collect(data: dict[str, Any], seconds: int, save: Callable[[], None]) -> None:
    """Add what is missing: small plans first, then programs."""
    from tests.blackwell_plans import CASES

    for name, plan in CASES.items():
        if seconds and name not in data["plans"]:
            data["plans"][name] = judged(plan.make(), seconds, plan.reference)
            print(name, data["plans"][name], flush=True)
            save()
    for name, graph in cases():
        extend(data, name, graph, seconds)
        save()


# ------------------------------------------------------------------------------------------ page


def spread(values: list[int]) -> str:
    """``[24, 40, 24]`` -> ``"24 to 40"``."""
    low, high = min(values), max(values)
    return f"{low}" if low == high else f"{low} to {high}"


def programs(data: dict[str, Any]) -> list[str]:
    """The table of programs, one line for all sizes of one."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for name, case in data["cases"].items():
        groups.setdefault(name.rpartition("/")[0], []).append(case)
    head = ["program", "sizes", "kernels", *(f"registers {t.upper()}" for t in TARGETS),
            "stack, bytes", *KEPT[1:], "protocol"]  # fmt: skip
    lines = [_line(head), _line(["---", *["---:"] * (len(head) - 1)])]
    for name, group in groups.items():
        last = [case[TARGETS[-1]] for case in group]
        counts = [[c["instructions"].get(k, 0) for c in last] for k in KEPT[1:]]
        lines.append(_line([
            name, str(len(group)), spread([c["kernels"] for c in last]),
            *(spread([case[t]["registers"] for case in group]) for t in TARGETS),
            spread([case[t]["stack"] for case in group for t in TARGETS]),
            *map(spread, counts), _protocol(data, group),
        ]))  # fmt: skip
    return lines


def _protocol(data: dict[str, Any], group: list[dict[str, Any]]) -> str:
    """How many different kernels got which verdict."""
    keys = {key for case in group for key in case.get("plans", ())}
    found = [data["verdicts"][k]["result"] for k in sorted(keys) if k in data["verdicts"]]
    said = [WORDS.get(r, r) for r in found]
    parts = [f"{said.count(w)} {w}" for w in sorted(set(said), reverse=True)]
    return ", ".join(parts)


def plans(data: dict[str, Any]) -> list[str]:
    """The table of small plans."""
    lines = [_line(["plan", "protocol", "equal to PyTorch"]), _line(["---"] * 3)]
    for name, found in data["plans"].items():
        equal = "proved" if found["result"] == "verified" else ""
        lines.append(_line([name, WORDS.get(found["result"], found["result"]), equal]))
    return lines


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def written(page: str, data: dict[str, Any]) -> str:
    """The page with its tables made again."""
    for name, table in (("programs", programs(data)), ("plans", plans(data))):
        mark = rf"(<!-- across:{name} -->\n).*?(<!-- /across:{name} -->)"
        text = "\n".join(table).replace("\\", r"\\")
        page = re.sub(mark, rf"\g<1>{text}\n\g<2>", page, flags=re.DOTALL)
    return page


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.across", description=__doc__)
    parser.add_argument("--seconds", type=int, default=600, help="for the verifier, each kernel")
    parser.add_argument("--page", action="store_true", help="only write the page again")
    args = parser.parse_args()
    data = {"plans": {}, "cases": {}, "verdicts": {}}
    if FILE.exists():
        data = json.loads(FILE.read_text())

    def save() -> None:
        FILE.write_text(json.dumps(data, indent=1) + "\n")

    if not args.page:
        with emulated_gpu():
            collect(data, args.seconds, save)
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), data), encoding="utf-8")


if __name__ == "__main__":
    main()
