"""A failing program made small: as long as something can be left out and it fails alike, it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from cutesuper.ir.dims import Symbol
from cutesuper.ir.operators.base import TABLE
from tests.fuzz.programs import ROWS, Case, Source, Step, renamed

#: programs that are tried
TRIES = 400


def minimised(case: Case, fails: Callable[[Case], bool], seconds: float = 120.0) -> Case:
    """The smallest program found that fails alike.

    Args:
        case: fails.
        fails: whether a program fails alike; programs that cannot be built do not.
        seconds: after which the best so far is taken.
    """
    end, tries, changed = time.monotonic() + seconds, 0, True
    while changed:
        changed = False
        for smaller in simpler(case):
            tries += 1
            if tries > TRIES or time.monotonic() > end:
                return case
            if fails(smaller):
                case, changed = smaller, True
                break
    return case


def simpler(case: Case) -> Iterator[Case]:
    """Programs with one thing less, the boldest first."""
    seen: set[str] = set()
    for candidate in _all(case):
        candidate = candidate.pruned()
        text = candidate.dumps()
        if candidate.outputs and text != case.dumps() and text not in seen:
            seen.add(text)
            yield candidate


def _all(case: Case) -> Iterator[Case]:
    yield from _fewer_outputs(case)
    yield from _fewer_steps(case)
    yield from _steps_as_sources(case)
    yield from _fewer_operands(case)
    yield from _plainer(case)
    yield from _smaller_extents(case)


def _fewer_outputs(case: Case) -> Iterator[Case]:
    n = len(case.sources)
    for k in range(len(case.outputs)):
        if len(case.outputs) > 1:
            yield replace(case, outputs=(*case.outputs[:k], *case.outputs[k + 1 :]))
    if case.wrt is not None:
        yield replace(case, wrt=None)
        for k in range(len(case.wrt)):
            if len(case.wrt) > 1:
                yield replace(case, wrt=(*case.wrt[:k], *case.wrt[k + 1 :]))
    for k, (i, dtype) in enumerate(case.outputs):
        operands = [o for o in case.steps[i - n].operands if isinstance(o, int) and o >= n]
        for o in operands:
            if all(o != j for j, _ in case.outputs):
                outputs = (*case.outputs[:k], (o, dtype), *case.outputs[k + 1 :])
                yield replace(case, outputs=outputs)


def _fewer_steps(case: Case) -> Iterator[Case]:
    """A value replaced by one of its operands."""
    n = len(case.sources)
    for k, step in enumerate(case.steps):
        for o in step.operands:
            if isinstance(o, int):
                yield _without(case, n + k, o)


def _without(case: Case, value: int, other: int) -> Case:
    """Users of a value use another one, which comes before it."""
    new: dict[int, int | float] = {i: i for i in range(len(case.sources) + len(case.steps))}
    new[value] = other
    outputs = tuple((int(new[i]), d) for i, d in case.outputs)
    kept = tuple({i: (i, d) for i, d in outputs if i >= len(case.sources)}.values())
    return replace(case, steps=tuple(renamed(s, new) for s in case.steps), outputs=kept)


def _steps_as_sources(case: Case) -> Iterator[Case]:
    """A computed value replaced by an input of its shape."""
    try:
        graph = case.graph()
    except Exception:
        return
    n = len(case.sources)
    values = [i for i, node in enumerate(graph.nodes) if node.operator != "constant"]
    for k in range(len(case.steps)):
        node = graph.nodes[values[n + k]]
        if any(n + k == i for i, _ in case.outputs):
            continue
        shape = tuple(ROWS if isinstance(d, Symbol) else d for d in node.shape)
        if shape:
            source = Source(shape, node.dtype.name)
            yield _with_source(case, source, n + k)


def _with_source(case: Case, source: Source, value: int) -> Case:
    """An input more, which users of a value use instead."""
    n = len(case.sources)
    count = n + len(case.steps)
    new: dict[int, int | float] = {i: i if i < n else i + 1 for i in range(count)}
    steps = tuple(
        renamed(s, {**new, value: n} if n + k > value else new) for k, s in enumerate(case.steps)
    )
    outputs = tuple((int(new[i]), d) for i, d in case.outputs)
    return replace(case, sources=(*case.sources, source), steps=steps, outputs=outputs)


def _fewer_operands(case: Case) -> Iterator[Case]:
    """Optional operands left out; constants in the place of operands."""
    for k, step in enumerate(case.steps):
        if TABLE[step.operator].arity < 0 and len(step.operands) > 1:
            yield _changed(case, k, replace(step, operands=step.operands[:-1]))
        if TABLE[step.operator].elementwise and len(step.operands) == 2:
            for j in (0, 1):
                if isinstance(step.operands[j], int):
                    operands = (*step.operands[:j], 1.0, *step.operands[j + 1 :])
                    yield _changed(case, k, replace(step, operands=operands))


def _changed(case: Case, k: int, step: Step) -> Case:
    return replace(case, steps=(*case.steps[:k], step, *case.steps[k + 1 :]))


def _plainer(case: Case) -> Iterator[Case]:
    """No symbol, one element type, ordinary numbers."""
    if case.symbolic:
        hint = case.rows[0]
        fixed = tuple(replace(s, shape=tuple(hint if d == ROWS else d for d in s.shape))
                      for s in case.sources)  # fmt: skip
        yield replace(case, sources=fixed)
    for k, (i, dtype) in enumerate(case.outputs):
        if dtype is not None:
            yield replace(case, outputs=(*case.outputs[:k], (i, None), *case.outputs[k + 1 :]))
    numbers = [s for s in case.sources if s.limit == 0]
    for dtype in ("float32", "float16"):
        if len({s.dtype for s in numbers} | {dtype}) > 1 and numbers[0].dtype != "float32":
            yield replace(
                case,
                sources=tuple(replace(s, dtype=dtype) if s.limit == 0 else s for s in case.sources),
            )
    for k, s in enumerate(case.sources):
        for plain in (
            replace(s, exponent=0),
            replace(s, layout="dense"),
            replace(s, kind="normal") if s.limit == 0 else s,
        ):
            yield replace(case, sources=(*case.sources[:k], plain, *case.sources[k + 1 :]))


def _smaller_extents(case: Case) -> Iterator[Case]:
    """An extent replaced wherever it occurs, and one at a time."""
    extents = sorted({d for s in case.sources for d in s.shape if isinstance(d, int)}, reverse=True)
    for d in extents:
        for smaller in dict.fromkeys((1, 2, 8, 16, d // 2, d - 1)):
            if 0 < smaller < d:
                yield replace(case, sources=tuple(_shrunk(s, d, smaller) for s in case.sources))
    for hint in (1, 8, 16):
        if case.symbolic and hint < case.rows[1]:
            yield replace(case, rows=(case.rows[0], hint))


def _shrunk(s: Source, d: int, smaller: int) -> Source:
    shape = tuple(smaller if n == d else n for n in s.shape)
    return replace(s, shape=shape, limit=smaller if s.limit == d else s.limit)
