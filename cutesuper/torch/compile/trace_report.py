"""The readable report of a traced program: totals, then PyTorch's part, then the regions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from cutesuper.report import narrow
from cutesuper.runtime.kernel import Kernel
from cutesuper.targets.roofline import baseline, eager
from cutesuper.torch.compile.rest import Left, left_text

#: regions that the first screen lists, the most expensive ones
LISTED = 4


@dataclass(frozen=True)
class TracedRegion:
    """A part of a traced program, and its kernel.

    Attributes:
        place: the user's lines: ``model.py:12-18``.
        kernel: the superoptimized program; ``kernel.graph`` is the definition.
        reads: the user's names of the tensors that are its inputs, in the order of the graph.
    """

    place: str
    kernel: Kernel
    reads: tuple[str, ...] = ()


def trace_text(
    name: str, regions: Sequence[TracedRegion], outside: Sequence[Left], once: Sequence[Left]
) -> str:
    """The report of a traced program.

    Args:
        name: of the function.
        regions: what kernels compute.
        outside: what PyTorch computes.
        once: what it has computed once.
    """
    rest = sum(n.us for n in outside)
    ours = sum(r.kernel.predicted_us for r in regions)
    head = f"{name}: {len(regions)} region(s), {ours + rest:.2f} us predicted"
    if rest:
        head += f", of which {rest:.2f} us at least are PyTorch's operators"
    totals = _totals(regions, rest) if len(regions) > 1 or (regions and rest) else ()
    parts = ["\n".join([head, *totals])]
    if outside:
        parts.append("\n".join(left_text(outside)))
    if once:
        lines = ", ".join(dict.fromkeys(n.place for n in once if n.place))
        parts.append(
            f"{len(once)} operator(s) depend on no input; what they make was computed when it was "
            f"traced, and is kept ({lines or 'no source'})"
        )
    parts += [f"{_region_head(i, r)}\n{r.kernel.explain()}" for i, r in enumerate(regions)]
    return narrow("\n\n".join(parts))


def _region_head(number: int, region: TracedRegion) -> str:
    """``region 0 (model.py:12-18): X is x, W is linear.weight``."""
    graph = region.kernel.graph
    names = [graph.nodes[i].name for i in graph.inputs]
    pairs = ", ".join(f"{n} is {r}" for n, r in zip(names, region.reads, strict=False))
    return f"region {number} ({region.place or 'no source'})" + (f": {pairs}" if pairs else "")


def _totals(regions: Sequence[TracedRegion], rest: float) -> Iterator[str]:
    """Sums over the regions; the others' times include those of PyTorch's operators."""
    kernels = [r.kernel for r in regions]
    inductor, eagerly = (
        rest + sum(price(k.graph, k.target).us for k in kernels) for price in (baseline, eager)
    )
    yield f"  kernels   {sum(len(k.kernels) for k in kernels)}"
    with_rest = "with the same operators of PyTorch" if rest else "in all"
    yield (
        f"  others    {with_rest}, by a roofline: Inductor {inductor:.2f} us, "
        f"eager {eagerly:.2f} us"
    )
    yield f"  equal     {_certainty(kernels)}"
    yield from (f"  search    region {i}: {k.variant.cut}" for i, k in enumerate(kernels)
                if k.variant.cut)  # fmt: skip
    order = sorted(range(len(kernels)), key=lambda i: -kernels[i].predicted_us)
    for i in order[:LISTED]:
        us, place = kernels[i].predicted_us, regions[i].place or "no source"
        yield f"  region {i:<3}{us:.2f} us, {len(kernels[i].kernels)} kernel(s), {place}"


def _certainty(kernels: Sequence[Kernel]) -> str:
    """The certainty that all regions are right."""
    bounds = [v.bound_log2 for k in kernels if (v := k.variant.verification) is not None]
    known = [b for b in bounds if b is not None]
    text = f"{len(bounds)} of {len(kernels)} region(s) verified over finite fields"
    if known:
        text += f", {len(known)} of them wrong with less than 2^{ceil(max(known))}"
    unknown = len(bounds) - len(known)
    return f"{text}, {unknown} without a bound" if unknown else text
