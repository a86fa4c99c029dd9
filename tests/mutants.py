"""Everything that can be wrong with one operation of a muGraph, and a long run of it.

``python -m tests.mutants --count 100000 --seed 0`` mutates random programs and holds the verifier
against float64; it prints what it counted and ends with 1 if the verifier accepted a wrong one.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from random import Random
from typing import Any
from unittest.mock import patch

import torch

from cutesuper.errors import CutesuperError
from cutesuper.ir.block import ENDING, LOAD, STORE, BlockOp, MuGraph
from cutesuper.ir.dims import extent
from cutesuper.ir.evaluate import evaluate
from cutesuper.ir.field import LARGEST
from cutesuper.ir.graph import KernelGraph
from cutesuper.ir.operators.base import lookup
from cutesuper.verify.equivalence import Verifier
from cutesuper.verify.integers import draw_integers
from cutesuper.verify.numeric import execute
from cutesuper.verify.torchdomain import TorchDomain, TorchValue, align
from tests.random_programs import random_program


def change(mu: MuGraph, step: int, i: int, **fields: Any) -> MuGraph:
    """The muGraph with one operation replaced; labels are worked out anew."""
    program = mu.steps[step].program
    ops = list(program.ops)
    ops[i] = replace(ops[i], **fields)
    for k, op in enumerate(ops):
        if op.kind == LOAD:
            dims = {d for d in op.attributes["map"] if d}
        else:
            dims = {d for j in op.inputs for d in ops[j].dims} - {op.attributes.get("over")}
        ops[k] = replace(op, dims=tuple(d for d in program.dims if d in dims))
    steps = list(mu.steps)
    steps[step] = replace(steps[step], program=replace(program, ops=tuple(ops)))
    return replace(mu, steps=tuple(steps))


def mutations(mu: MuGraph, s: int, i: int, op: BlockOp) -> Iterator[tuple[str, MuGraph]]:
    """The mistakes that can be made with one operation."""
    ops = mu.steps[s].program.ops
    for k, j in enumerate(op.inputs):
        for other in range(i):
            if other != j and ops[other].dims == ops[j].dims and ops[other].kind != STORE:
                inputs = (*op.inputs[:k], other, *op.inputs[k + 1 :])
                yield f"operand {k} is {other}", change(mu, s, i, inputs=inputs)
    if op.kind in ("sub", "div", "maximum", "at_least", "keep", "hide", "lift"):
        yield "operands swapped", change(mu, s, i, inputs=op.inputs[::-1])
    kinds = {
        "add": ("sub", "mul"), "sub": ("add", "mul"), "mul": ("add", "div"), "div": ("mul",),
        "sum": ("mean", "max"), "mean": ("sum", "max"), "max": ("sum", "mean"),
        "square": ("relu", "exp"), "sqrt": ("rsqrt", "square"), "silu": ("relu", "sigmoid"),
        "exp": ("square", "silu"), "maximum": ("at_least", "add", "keep"),
        "at_least": ("maximum", "sub"), "keep": ("hide", "mul"), "hide": ("keep", "mul"),
        "relu": ("silu", "step"), "step": ("relu",), "sigmoid": ("tanh",), "tanh": ("sigmoid",),
        "erf": ("tanh",), "gelu": ("silu",), "floor": ("relu",),
    }  # fmt: skip
    for kind in kinds.get(op.kind, ()):
        yield f"{kind} for {op.kind}", change(mu, s, i, kind=kind)
    if op.kind in ENDING:
        other = "max" if op.attributes["op"] == "sum" else "sum"
        yield f"{other} in {op.kind}", change(mu, s, i, attributes={**op.attributes, "op": other})
    if op.rescaled:
        yield "not rescaled", change(mu, s, i, inputs=op.inputs[:1])
    if op.kind == "constant":
        value = op.attributes["value"]
        for other in (0.0, value * 3, -value, value + LARGEST.p, value + LARGEST.q):
            yield f"constant {other}", change(mu, s, i, attributes={"value": other})
    if op.kind == "causal_mask":
        turned = "top_left" if op.attributes["alignment"] == "bottom_right" else "bottom_right"
        yield turned, change(mu, s, i, attributes={**op.attributes, "alignment": turned})
    if op.kind == "length_mask" and op.attributes.get("rows"):
        causal = not op.attributes["causal"]
        yield f"causal {causal}", change(mu, s, i, attributes={**op.attributes, "causal": causal})
    droppable = op.kind in ENDING or (
        op.kind not in (LOAD, STORE)
        and (lookup(op.kind).elementwise or lookup(op.kind).masks)
        and op.inputs
    )
    if droppable:  # whoever uses it gets its first operand
        result = mu
        for k in range(i + 1, len(ops)):
            if i in ops[k].inputs:
                inputs = tuple(op.inputs[0] if j == i else j for j in ops[k].inputs)
                result = change(result, s, k, inputs=inputs)
        yield f"{op.kind} dropped", result
    if op.kind in (LOAD, STORE) and len(op.attributes["map"]) == 2:
        turned = {**op.attributes, "map": op.attributes["map"][::-1]}
        yield "map transposed", change(mu, s, i, attributes=turned)
    if op.kind == LOAD:
        for name, spec in mu.tensors.items():
            here = mu.tensors[op.attributes["tensor"]]
            if name != here.name and spec.shape == here.shape:
                attributes = {**op.attributes, "tensor": name}
                yield f"loads {name}", change(mu, s, i, attributes=attributes)


# ----------------------------------------------------------------------------------- a long run

#: mutants of one random program
OF_ONE = 20
#: magnitudes of inputs at which numbers are compared; the first time they are tame
SCALES = (1.0, 0.1, 1.0, 3.0)
#: operators whose results jump, and how far their operands are from where they do
JUMPS: dict[str, Callable[..., torch.Tensor]] = {
    "at_least": lambda x, y: x - y,
    "floor": lambda x: x - x.round(),
    "step": lambda x: x,
    "round": lambda x: x - x.floor() - 0.5,
    "hide": lambda c, x: c - 0.5,
    "keep": lambda c, x: c - 0.5,
    "lift": lambda c, x: c - 0.5,
}
#: a distance below this, relative to 1 and to the operand, is one of roundings; 0 is none: there
#: both programs are on the same side, or differ in real numbers too
NEAR = 1e-12
#: exponentials of more are +inf in float64, those of less than its negative are 0
EXPONENT = 700.0
#: of float64
EPSILON = torch.finfo(torch.float64).eps


@dataclass
class Tally:
    """Counts of what happened to mutants.

    Attributes:
        counts: of programs, and of mutants by verdict.
        wrong: mutants that the verifier accepted although numbers differ.
    """

    counts: Counter[str] = field(default_factory=Counter[str])
    wrong: list[str] = field(default_factory=list)

    def show(self) -> str:
        counts = ", ".join(f"{n} {k}" for k, n in sorted(self.counts.items()))
        return "\n".join([counts, f"{len(self.wrong)} false accepts", *self.wrong])


def run(count: int, seed: int, judged: float = 1.0) -> Tally:
    """Mutate random programs and ask the verifier; hold what it says against float64.

    Args:
        count: of mutants.
        seed: equal seeds give equal mutants.
        judged: share of the refused mutants that are held against float64 as well.
    """
    rng, tally, made = Random(seed), Tally(), 0
    while made < count:
        program = rng.getrandbits(40)
        graph, mu = random_program(program)
        verifier = Verifier(graph, seed=rng.getrandbits(32))
        if not verifier.check(mu, bound=False, full=True):
            tally.counts["programs without a meaning"] += 1
            continue
        tally.counts["programs"] += 1
        judge = Judge(verifier.graph, mu)
        for what, mutant in _chosen(mu, rng, min(OF_ONE, count - made)):
            made += 1
            _judge(tally, f"program {program}, {what}", verifier, judge, mutant, judged, rng)
    return tally


def _judge(
    tally: Tally,
    what: str,
    verifier: Verifier,
    judge: Judge,
    mutant: MuGraph,
    judged: float,
    rng: Random,
) -> None:
    result = verifier.check(mutant, bound=False, full=True)  # as for what is returned to a user
    if result:
        odd = judge.distinguished(mutant, accepted=True)
        tally.counts["accepted"] += 1
        if odd is not None:
            tally.wrong.append(f"{what}, verifier's seed {result.seed}: {odd}")
    elif rng.random() >= judged:
        tally.counts["refused"] += 1
    else:
        same = judge.distinguished(mutant) is None
        tally.counts["refused though numbers agree" if same else "refused and different"] += 1


def _chosen(mu: MuGraph, rng: Random, count: int) -> list[tuple[str, MuGraph]]:
    every = [
        (f"step {s}, operation {i} ({op.kind}): {what}", mutant)
        for s, step in enumerate(mu.steps)
        for i, op in enumerate(step.program.ops)
        for what, mutant in mutations(mu, s, i, op)
    ]
    return rng.sample(every, min(count, len(every)))


@dataclass(frozen=True)
class Draw:
    """Inputs of one draw that a muGraph has finite values for, and the facts of these that all of
    its mutants are held against.

    Attributes:
        scale: the magnitude of the inputs.
        tame: true if nothing overflows.
        inputs: of the graph, in float64.
        wanted: outputs of the muGraph.
    """

    graph: KernelGraph
    mu: MuGraph
    scale: float
    tame: bool
    inputs: list[torch.Tensor]
    wanted: list[torch.Tensor]

    @cached_property
    def nan(self) -> list[torch.Tensor]:
        """Elements of the outputs that are NaN in PyTorch."""
        return [x.isnan() for x in evaluate(self.graph, self.inputs)]

    @cached_property
    def unsteady(self) -> list[torch.Tensor]:
        """`_unsteady` of the muGraph."""
        return _unsteady(self.mu, self.inputs)

    def left_out(self, mutant: MuGraph) -> list[torch.Tensor]:
        """Elements of the outputs that do not count."""
        ops = (op for m in (self.mu, mutant) for s in m.steps for op in s.program.ops)
        if all(op.kind not in JUMPS for op in ops):
            return self.nan
        both = zip(self.nan, self.unsteady, _unsteady(mutant, self.inputs), strict=True)
        return [x | y | z for x, y, z in both]


class Judge:
    """Holds mutants of a muGraph against it, at several draws and magnitudes in float64.

    What is infinite or NaN counts with tame numbers only, where nothing overflows; exponentials of
    what has become large do, whatever the verifier says of them: ``exp(1e6 x - y)`` over its sum is
    a softmax with any y (docs/verification.md, "Maxima"). What has no value by the rules of
    docs/verification.md does not count: elements that are NaN in PyTorch, draws in which something
    is +inf on the way, quotients by what is 0 for many inputs. Nor do elements that a rounding
    makes jump: ``floor`` of the sum of a softmax, ``at_least(x, x y/y)``, ``at_least(x, (x + c) -
    c)``. Differences of what the verifier accepts count if they are larger than roundings of the
    largest number on the way: ``x / 1e-13 - (x / 1e-13 + y)``.
    """

    def __init__(self, graph: KernelGraph, mu: MuGraph) -> None:
        self.graph, self.mu = graph, mu

    @cached_property
    def draws(self) -> list[Draw]:
        """The draws that count."""
        if _divides_by_jumps(self.mu):
            return []
        drawn = [(n, scale, _inputs(self.graph, n, scale)) for n, scale in enumerate(SCALES)]
        return [
            Draw(self.graph, self.mu, scale, n == 0, inputs, execute(self.mu, inputs))
            for n, scale, inputs in drawn
            if not _has_infinite(self.mu, inputs)
        ]

    def distinguished(self, mutant: MuGraph, accepted: bool = False) -> str | None:
        """The first place where a mutant differs; None if there is none."""
        for draw in self.draws:
            odd = _differs(draw, mutant, 64 * EPSILON * _largest_constant(mutant))
            if odd and accepted:
                odd = _differs(draw, mutant, 64 * EPSILON * _largest(mutant, draw.inputs))
            if odd:
                return odd
        return None


def _differs(draw: Draw, mutant: MuGraph, rounding: float) -> str | None:
    try:
        found = execute(mutant, draw.inputs)
    except (CutesuperError, RuntimeError) as error:
        return str(error)
    pairs = list(zip(draw.wanted, found, strict=True))
    if not any(_odd(want, have, draw.tame, rounding) for want, have in pairs):
        return None  # nor without some of the elements
    tame = draw.tame and not _exponentials_overflow(mutant, draw.inputs)
    for k, ((want, have), out) in enumerate(zip(pairs, draw.left_out(mutant), strict=True)):
        if odd := _odd(want, torch.where(out, want, have), tame, rounding):
            return f"output {k}, inputs of magnitude {draw.scale:g}: {odd}"
    return None


def _divides_by_jumps(mu: MuGraph) -> bool:
    for ops in (step.program.ops for step in mu.steps):
        if any(op.kind == "div" and ops[op.inputs[1]].kind in JUMPS for op in ops):
            return True
    return False


def _has_infinite(mu: MuGraph, inputs: list[torch.Tensor]) -> bool:
    """True if a muGraph computes +inf of finite numbers."""
    return any(bool((x == torch.inf).any()) for _, _, x in _on_the_way(mu, inputs))


def _largest(mu: MuGraph, inputs: list[torch.Tensor]) -> float:
    """The largest finite number that is written in a muGraph or computed on the way."""
    return max(_largest_constant(mu), *(_top(x) for _, _, x in _on_the_way(mu, inputs)))


def _exponentials_overflow(mu: MuGraph, inputs: list[torch.Tensor]) -> bool:
    """True if a muGraph takes exponentials that are 0 or +inf of finite numbers in float64."""
    return any(
        lookup(kind).exponential and _top(args[0].data) > EXPONENT
        for kind, args, _ in _on_the_way(mu, inputs)
    )


def _top(x: torch.Tensor) -> float:
    """The largest magnitude of the finite elements; 0 if there are none."""
    return float(torch.where(x.isfinite(), x.abs(), 0.0).max()) if x.numel() else 0.0


def _on_the_way(
    mu: MuGraph, inputs: list[torch.Tensor]
) -> list[tuple[str, list[TorchValue], torch.Tensor]]:
    """All element-wise operations with their operands and results."""
    found: list[tuple[str, list[TorchValue], torch.Tensor]] = []
    plain = TorchDomain.elementwise

    def watched(self: TorchDomain, kind: str, args: list[TorchValue], attributes: Any) -> Any:
        result = plain(self, kind, args, attributes)
        found.append((kind, args, result.data))
        return result

    with patch.object(TorchDomain, "elementwise", watched):
        execute(mu, inputs)
    return found


def _unsteady(mu: MuGraph, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Elements that change by more than 1e-6 where inputs change by 1e-12, or where operands of
    jumps cross to the other side of what only roundings keep them from."""
    first, sides = execute(mu, inputs), (1.0, -1.0, None, None)
    others = [execute(mu, _moved(inputs, n)) for n in range(8)]
    others += [_crossed(mu, inputs, side, n) for n, side in enumerate(sides)]
    return [
        torch.stack([~torch.isclose(x, y, rtol=1e-6, atol=1e-6, equal_nan=True) for y in ys]).any(0)
        for x, *ys in zip(first, *others, strict=True)
    ]


def _moved(inputs: list[torch.Tensor], n: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(n)
    sign = 1 - 2 * (n % 2)
    return [
        x * (1 + sign * 1e-12 * torch.rand(x.shape, generator=generator, dtype=x.dtype))
        if x.is_floating_point()
        else x
        for x in inputs
    ]


def _crossed(
    mu: MuGraph, inputs: list[torch.Tensor], side: float | None, seed: int
) -> list[torch.Tensor]:
    """The outputs with operands of jumps that are near one on one side of it (None: on a random
    one for each element)."""
    generator, plain = torch.Generator().manual_seed(seed), TorchDomain.elementwise
    near = NEAR * _largest_constant(mu)

    def crossing(self: TorchDomain, kind: str, args: list[TorchValue], attributes: Any) -> Any:
        if kind in JUMPS:
            dims = tuple(dict.fromkeys(d for x in args for d in x.dims))
            data = [align(x, dims) for x in args]
            distance, size = JUMPS[kind](*data), near * (1 + data[0].abs())
            drawn = torch.rand(distance.shape, generator=generator, dtype=distance.dtype) < 0.5
            sign = torch.where(drawn, 1.0, -1.0) if side is None else side
            crosses = (distance != 0) & (distance.abs() <= size)
            moved = data[0] + torch.where(crosses, 2 * sign * size, 0.0)
            args = [TorchValue(dims, moved), *args[1:]]
        return plain(self, kind, args, attributes)

    with patch.object(TorchDomain, "elementwise", crossing):
        return execute(mu, inputs)


def _largest_constant(mu: MuGraph) -> float:
    """The largest number that is written in a muGraph, at least 1. Programs that subtract it again
    (softmax of ``x + 2^31``) are as exact in float64 as it leaves the rest."""
    ops = (op for step in mu.steps for op in step.program.ops)
    return max((abs(op.attributes["value"]) for op in ops if op.kind == "constant"), default=1.0)


def _odd(want: torch.Tensor, have: torch.Tensor, infinite: bool, rounding: float) -> str | None:
    finite = want.isfinite() & have.isfinite()
    same = (want == have) | (want.isnan() & have.isnan())
    if infinite and not (finite | same).all():
        at = (~(finite | same)).nonzero()[0].tolist()
        return f"{float(have[tuple(at)])} for {float(want[tuple(at)])} at {at}"
    zero = torch.zeros((), dtype=want.dtype)
    error = float(torch.where(finite, have - want, zero).abs().max())
    top = float(torch.where(finite, want, zero).abs().max())
    return (
        None
        if error <= max(1e-9, rounding) * max(top, 1e-3)
        else f"differs by {error:g} of {top:g}"
    )


def _inputs(graph: KernelGraph, number: int, scale: float) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    shapes = {i: tuple(map(extent, graph.nodes[i].shape)) for i in graph.inputs}
    return [
        torch.from_numpy(draw_integers(graph, i, shape, [number, number, i]).data)
        if graph.nodes[i].dtype.integer
        else scale * _numbers(shape, generator, tame=number == 0)
        for i, shape in shapes.items()
    ]


def _numbers(shape: tuple[int, ...], generator: torch.Generator, tame: bool) -> torch.Tensor:
    """Normal numbers; tame ones have magnitudes from 0.5 to 1.5, so that nothing overflows where
    something is divided by them."""
    numbers = torch.randn(shape, generator=generator, dtype=torch.float64)
    if not tame:
        return numbers
    size = 0.5 + torch.rand(shape, generator=generator, dtype=torch.float64)
    return torch.copysign(size, numbers)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.mutants")
    parser.add_argument("--count", type=int, default=1000, help="mutants")
    parser.add_argument("--seed", type=int, default=0, help="equal seeds give equal mutants")
    parser.add_argument("--judged", type=float, default=0.1, help="share of the refused ones that "
                        "are held against float64 too")  # fmt: skip
    asked = parser.parse_args()
    begin = time.monotonic()
    tally = run(asked.count, asked.seed, asked.judged)
    print(f"seed {asked.seed}, {time.monotonic() - begin:.0f} s: {tally.show()}")
    return 1 if tally.wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
