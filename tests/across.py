"""Programs by targets: what the compiler makes of them, and what a verifier says of those for B200.

    python -m tests.across                 # brings docs/blackwell.json up to date, and the page
    python -m tests.across --seconds 0     # the same without the verifier: minutes
    python -m tests.across --page          # only writes the tables of docs/blackwell.md again

Every workload of the benchmarks, and the layers of Llama-3-8B and 70B at 1 to 8192 rows, is
searched and compiled for H100, H200 and B200. Their kernels for B200 are given to a verifier
(`tests.ward`) with the tiles, clusters and schedules that they have, over fewer blocks and
iterations (`tests.shrunk`); and so are the small plans of `tests.blackwell_plans`. A verdict
belongs to the text of a kernel and its launch (`tests.ward.digest`): equal ones are given once, and
those that have changed again. No GPU is needed; all verdicts anew take hours.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tests.ptx.device import emulated_gpu
from tests.shrunk import shrunk

PAGE, FILE = Path("docs/blackwell.md"), Path("docs/blackwell.json")
TARGETS = ("h100", "h200", "b200")
ROWS = (1, 16, 128, 1024, 8192)
#: attention that stands in the tables, one token of a model, and lengths without and with pages
ATTENTION = "few,decode,models/llama3-70b/4,lengths/serving/4,lengths/serving_pages_16/4"
KEPT = ("HGMMA", "UTCHMMA", "LDTM", "STTM", "UTMALDG")
#: most threads of two clusters
MOST_THREADS = 1024
#: parts of the time for the verifier that each kernel gets in turn
ROUNDS = (16, 4, 1)
#: verdicts in words
WORDS = {"race_free": "right", "verified": "right", "potential_race": "right but for pairs below",
         "timeout": "not finished", "unsupported": "not followed",
         "barriers right": "barriers right, memory not followed"}  # fmt: skip


def cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Name of every program, and the function that makes its graph."""
    import cutesuper as cs
    from benchmarks import attention, inference, layers, prefill, training

    items = [
        *inference.make_sweep(inference.WORKLOADS, ()).items,
        *attention.chosen(ATTENTION),
        *prefill.cases().values(),
        *(i for i in training.chosen(None) if not i.key.startswith("host/")),
        *layers.cases(("llama3-8b", "llama3-70b"), ROWS),
    ]
    for item in items:
        yield item.key, partial(item.workload.graph, cs, item.shape, item.dtype)


def choice(graph: Any, name: str) -> tuple[Any, Any]:
    """The choice of `superoptimize` for a target, and the target."""
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


def small_plans(found: Any, target: Any) -> Iterator[Any]:
    """The plans of a choice over few blocks and iterations."""
    from cutesuper.ir.unseen import followed

    mu = found.candidate.mugraph
    for step, plan in zip(mu.steps, found.plans, strict=True):
        yield small_plan(step, followed(mu), plan, target)


def small_plan(step: Any, tensors: Any, plan: Any, target: Any) -> Any:
    """A plan over two blocks or clusters, or over one cluster if two have too many threads. Blocks
    that walk are one cluster, over two tiles."""
    from cutesuper.skeletons.planner import make_plan

    schedule, beside = plan.schedule, {}
    if (share := getattr(schedule, "share_rows", 1)) > 1:
        beside = {plan.column: share}
    walks = getattr(schedule, "persistent", 0) > 0
    if walks:
        schedule = replace(schedule, persistent=share)
    small = make_plan(*shrunk(step, tensors, 2, beside), target, schedule)
    if walks or small.program.blocks() * small.threads <= MOST_THREADS:
        return small
    return make_plan(*shrunk(step, tensors, 1, beside), target, schedule)


def judged(kernel: Any, reference: str, seconds: int) -> dict[str, Any]:
    """The verdict on a kernel, how both sides of a race access memory, and the time it took, or
    that it had; "barriers right" if so much is known of one that was not followed."""
    from tests.ward import verdict

    start = time.time()
    found = verdict(kernel, reference, seconds=seconds)
    races = [[r[side]["mode"] for side in ("first", "second")] for r in found.get("races", ())]
    result = found["result"]
    if result == "unsupported" and found["checks"]["synchronization"] == "passed":
        result = "barriers right"
    took = seconds if result == "timeout" else round(time.time() - start)
    return {"result": result, "races": races, "seconds": took}


@dataclass(frozen=True)
class Collection:
    """What the file has, while it is brought up to date.

    Attributes:
        data: "cases": figures by name and target, and the digests of a program's small kernels as
            "plans"; "plans": the digest of every small plan; "verdicts" by digest.
        seconds: for the verifier, each kernel; 0 leaves verdicts as they are.
        save: called after every change.
    """

    data: dict[str, Any]
    seconds: int
    save: Callable[[], None]

    def verdict_on(self, key: str, kernel: Any, reference: str, seconds: int) -> None:
        """See to it that there is a verdict on a kernel. Those that were not finished are tried
        again with more time."""
        verdicts = self.data["verdicts"]
        known = verdicts.get(key, {"result": "timeout", "seconds": 0})
        if known["result"] == "timeout" and known["seconds"] < seconds:
            verdicts[key] = judged(kernel, reference, seconds)
            print(key, verdicts[key], flush=True)
            self.save()

    def programs(self) -> None:
        """Compile all programs."""
        kept, self.data["cases"] = self.data["cases"], {}
        for name, graph in cases():
            case = {t: figures(*choice(graph(), t)) for t in TARGETS}
            self.data["cases"][name] = case | {"plans": kept.get(name, {}).get("plans", [])}
            print(name, case, flush=True)
        self.save()

    def kernels(self) -> Iterator[tuple[str, Any, str]]:
        """Digest, kernel and reference of all that there are verdicts on, written down on the way:
        small plans first, then programs."""
        from tests.blackwell_plans import CASES
        from tests.ward import digest, given

        self.data["plans"] = {n: k for n, k in self.data["plans"].items() if n in CASES}
        for name, case in CASES.items():
            kernel = given(case.make())
            self.data["plans"][name] = key = digest(kernel, case.reference)
            yield key, kernel, case.reference
        for name, graph in cases():
            kernels = [given(plan) for plan in small_plans(*choice(graph(), TARGETS[-1]))]
            self.data["cases"][name]["plans"] = keys = [digest(k) for k in kernels]
            print(name, keys, flush=True)
            yield from ((key, kernel, "") for key, kernel in zip(keys, kernels, strict=True))

    def verdicts(self) -> None:
        """See to all verdicts, in rounds that give more time to a kernel, so that nothing waits for
        what takes long; forget those of no kernel."""
        kept = list[tuple[str, Any, str]]()
        for one in self.kernels():
            self.verdict_on(*one, self.seconds // ROUNDS[0])
            kept.append(one)
        for part in ROUNDS[1:]:
            for one in kept:
                self.verdict_on(*one, self.seconds // part)
        used = {key for key, _, _ in kept}
        self.data["verdicts"] = {k: v for k, v in self.data["verdicts"].items() if k in used}
        self.save()


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
    said = Counter(_words(data["verdicts"][k]) for k in keys if k in data["verdicts"])
    return ", ".join(f"{said[w]} {w}" for w in sorted(said, reverse=True))


def _words(verdict: dict[str, Any]) -> str:
    """A verdict in words; how long the verifier had if it did not finish."""
    result = verdict["result"]
    time = f" in {verdict['seconds']} s" if result == "timeout" else ""
    return f"{WORDS.get(result, result)}{time}"


def plans(data: dict[str, Any]) -> list[str]:
    """The table of small plans."""
    head = ["plan", "protocol", "equal to PyTorch", "seconds"]
    lines = [_line(head), _line([*["---"] * 3, "---:"])]
    for name, key in data["plans"].items():
        verdict = data["verdicts"].get(key, {"result": "", "seconds": ""})
        result: str = verdict["result"]
        proved = "proved" * (result == "verified")
        lines.append(_line([name, WORDS.get(result, result), proved, str(verdict["seconds"])]))
    known = [data["verdicts"][k] for k in data["plans"].values() if k in data["verdicts"]]
    proved = sum(v["result"] == "verified" for v in known)
    taken = sum(v["seconds"] for v in known)
    lines.append(_line([f"all {len(data['plans'])}", "", f"{proved} proved", str(taken)]))
    return lines


def faults() -> list[str]:
    """The table of planted faults."""
    from tests.test_blackwell import DYNAMIC, STATIC

    found = [("verifier", fault) for fault in STATIC] + [("machine", fault) for fault in DYNAMIC]
    lines = [_line([fault, by]) for by, fault in found]
    return [_line([f"{len(found)} faults", "found by"]), _line(["---"] * 2), *lines]


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def written(page: str, data: dict[str, Any]) -> str:
    """The page with its tables made again."""
    tables = {"programs": programs(data), "plans": plans(data), "faults": faults()}
    for name, table in tables.items():
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
            collection = Collection(data, args.seconds, save)
            collection.programs()
            collection.verdicts()
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), data), encoding="utf-8")


if __name__ == "__main__":
    main()
