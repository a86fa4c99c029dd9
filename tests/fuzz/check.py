"""One program through everything: built, written and read, searched, verified, run, judged."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import cutesuper as cs
from cutesuper import pipeline
from cutesuper.errors import (
    CompileError,
    CutesuperError,
    DeviceError,
    GraphError,
    LayoutError,
    LoweringError,
    OperatorError,
    OptionError,
    ScheduleError,
    SearchError,
    ShapeError,
    TraceError,
)
from cutesuper.ir.dims import extent
from cutesuper.ir.evaluate import run_reference
from cutesuper.ir.graph import KernelGraph
from cutesuper.ir.text import mugraph_text
from cutesuper.runtime.kernel import bucketed
from cutesuper.show.page import mugraph_page
from cutesuper.show.svg import mugraph_svg
from cutesuper.targets import H200
from cutesuper.verify.numeric import execute
from tests.fuzz import judge
from tests.fuzz.arithmetic import Balls, Numbers
from tests.fuzz.blocks import at_rows, execute_rounded
from tests.fuzz.data import elements
from tests.fuzz.judge import Expected
from tests.fuzz.limits import TimedOut, limited
from tests.fuzz.outcome import Outcome, of_exception, of_machine, of_refusal
from tests.fuzz.programs import Case
from tests.ptx.run import PtxError, TooLarge

#: what searching for kernels, and compiling them, may raise
MAKING = (GraphError, OptionError, DeviceError, ShapeError, OperatorError, SearchError,
          LoweringError, ScheduleError, CompileError, TraceError)  # fmt: skip
#: what calling a kernel may raise: strides that it cannot read
CALLING = (LayoutError,)
#: what a call may raise that needs new kernels, for extents of another bucket
NEEDING = (SearchError, LoweringError, CompileError)
#: of one program of so many the verifier is asked about another program, too
MUTANTS = 3


@dataclass(frozen=True)
class Settings:
    """The settings with which programs are looked at.

    Attributes:
        budget_s: of a search.
        keep: candidates that are run; with 0 nothing is searched.
        limit_s: processor seconds after which a program counts as a hang.
        slow_s: processor seconds after which it counts as slow.
        compile: kernels are compiled, too, which takes seconds.
        gpu: and launched.
    """

    budget_s: float | None = 1.0
    keep: int = 3
    limit_s: float = 120.0
    slow_s: float = 30.0
    compile: bool = False
    gpu: bool = False


class Wrong(Exception):
    """A finding on the way.

    Attributes:
        outcome: what it is.
    """

    def __init__(self, kind: str, where: str, detail: str) -> None:
        super().__init__(detail)
        self.outcome = Outcome(kind, where, detail)


class Stage:
    """The name of what is being done, for whoever has to say where something happened.

    Attributes:
        name: of it.
        launched: a kernel was launched.
    """

    name = "start"
    launched = False

    def __call__(self, name: str) -> None:
        self.name = name


def examined(examine: Any, settings: Settings) -> Outcome:
    """The outcome of ``examine(stage)``, whatever happens in it."""
    stage = Stage()
    outcome = _examined(examine, settings, stage)
    return replace(outcome, launched=stage.launched)


def _examined(examine: Any, settings: Settings, stage: Stage) -> Outcome:
    start = time.process_time()
    try:
        with limited(settings.limit_s):
            outcome = examine(stage)
    except TimedOut as error:
        return Outcome(
            "hang",
            of_exception(error, stage.name).where.split(",")[0],
            of_exception(error, stage.name).detail,
        )
    except Wrong as found:
        return found.outcome
    except Refused as error:
        return error.outcome
    except PtxError as error:
        return of_machine(error, stage.name)
    except TooLarge as error:
        return Outcome("too large", stage.name, str(error))
    except Exception as error:
        return of_exception(error, stage.name)
    slow = time.process_time() - start > settings.slow_s
    return Outcome("slow", f"{stage.name}") if slow and not outcome.finding else outcome


class Refused(Exception):
    """A documented error of a stage."""

    def __init__(self, error: Exception, stage: str) -> None:
        super().__init__(str(error))
        self.outcome = of_refusal(error, stage)


def check_case(case: Case, settings: Settings) -> Outcome:
    """The outcome of a program."""
    return examined(lambda stage: _Examination(case, settings, stage).run(), settings)


class _Examination:
    def __init__(self, case: Case, settings: Settings, stage: Stage) -> None:
        self.case, self.settings, self.stage = case, settings, stage

    def run(self) -> Outcome:
        graph = self._built()
        here = at_rows(graph, self.case.rows[1]) if self.case.symbolic else graph
        inputs = self._inputs(here)
        self.stage("texts")
        check_texts(graph)
        self.stage("judge")
        wanted = judge.expected(here, inputs)
        if self.case.wrt is not None:
            self._check_gradients(here, inputs)
        self.stage("reference")
        verdict = held(run_reference(here, inputs), wanted, "reference")
        self.stage("expansion")
        held(run_reference(self._expanded(here), inputs), wanted, "expansion")
        if not self.settings.keep:
            return Outcome(verdict)
        check_candidates(graph, inputs, wanted, self.settings, self.stage)
        if self.case.wrt is None and self.case.seed % MUTANTS == 0:
            from tests.fuzz.mutants import check_mutant

            check_mutant(self.case, graph, inputs, self.settings, self.stage)
        if self.settings.compile or self.settings.gpu:
            from tests.fuzz.device import check_kernel

            check_kernel(graph, inputs, wanted, self.case, self.settings, self.stage)
        return Outcome(verdict)

    def _built(self) -> KernelGraph:
        self.stage("build")
        try:
            graph = self.case.graph()
            if self.case.wrt is None:
                return graph
            self.stage("grad")
            self.original = graph
            return cs.grad(graph, [f"x{i}" for i in self.case.wrt])
        except self._documented() as error:
            raise Refused(error, self.stage.name) from error

    def _documented(self) -> type[CutesuperError]:
        return GraphError if self.stage.name == "grad" else CutesuperError

    def _expanded(self, graph: KernelGraph) -> KernelGraph:
        try:
            return graph.expanded()
        except (OperatorError, GraphError) as error:
            raise Refused(error, "expansion") from error

    def _inputs(self, graph: KernelGraph) -> list[Tensor]:
        """A tensor for each input of the graph; of gradients, cotangents are normal numbers."""
        case, made = self.case, []
        for k, i in enumerate(graph.inputs):
            node = graph.nodes[i]
            if node.name.startswith("x"):
                n = int(node.name[1:])
                made.append(elements(case.sources[n], case.rows[1], case.seed + n))
            else:
                shape = tuple(map(extent, node.shape))
                generator = torch.Generator().manual_seed(case.seed - 1 - k)
                made.append(torch.randn(shape, generator=generator).to(node.dtype.torch))
        return made

    def _check_gradients(self, backward: KernelGraph, inputs: list[Tensor]) -> None:
        """The graph of the gradients against autograd through the formulas, in float64."""
        self.stage("gradients")
        forward = at_rows(self.original, self.case.rows[1])
        given = {backward.nodes[i].name: x for i, x in zip(backward.inputs, inputs, strict=True)}
        theirs = autograd(forward, self.case, given)
        if theirs is None:
            return
        mine = judge.run(backward, inputs, Numbers())
        balls = judge.run(backward, inputs, Balls())
        for n, x, y, ball in zip(self.case.wrt or (), theirs, mine, balls, strict=True):
            x = x.broadcast_to(x.shape).reshape(y.shape)
            top = float(torch.nan_to_num(x, 0, 0, 0).abs().max())
            allowed = 1e-3 * torch.nan_to_num(ball.e, torch.inf) + 1e-9 * top
            bad = ~((x - y).abs() <= allowed) & ~x.isnan() & x.isfinite() & ball.e.isfinite()
            if bad.any():
                at = tuple(int(i) for i in bad.nonzero()[0])
                raise Wrong(
                    "wrong",
                    "gradients",
                    f"d x{n} at {list(at)}: {float(y[at]):.9g}, "
                    f"PyTorch has {float(x[at]):.9g}; {int(bad.sum())} of {bad.numel()}",
                )


def autograd(graph: KernelGraph, case: Case, given: dict[str, Tensor]) -> list[Tensor] | None:
    """Gradients by PyTorch through the formulas.
    None where a result is NaN, and they may be any. In a program with masks also where one is +inf,
    the square of a hidden element, which no program is found for (docs/verification.md, "Masks"),
    and where any gradient is NaN: of a row of which nothing is seen a softmax has 0 of it, and
    PyTorch's scaled_dot_product_attention NaN.

    Args:
        graph: the program.
        case: which gradients.
        given: inputs and cotangents of its derivative, by name.
    """
    inputs = []
    for n, source in enumerate(case.sources):
        x = elements(source, case.rows[1], case.seed + n)
        inputs.append(x.double() if x.is_floating_point() else x)
    floating = [x.requires_grad_() for x in inputs if x.is_floating_point()]
    outputs = judge.run(graph, inputs, Numbers())
    masks = any(n.operator in judge.MASKS for n in graph.nodes)
    if any(y.isnan().any() or (masks and (y == torch.inf).any()) for y in outputs):
        return None
    total = torch.zeros((), dtype=torch.float64)
    for y, i in zip(outputs, graph.outputs, strict=True):
        dy = given.get(f"d{graph.nodes[i].name}")
        if dy is not None:
            total = total + (torch.where(dy == 0, 0.0, y) * dy.double()).sum()
    if total.requires_grad:  # else nothing that they reach has a slope
        total.backward(inputs=floating)
    if masks and any(x.grad is not None and x.grad.isnan().any() for x in floating):
        return None
    leaves = [inputs[i] for i in case.wrt or ()]
    return [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]


# --------------------------------------------------------------------------- parts of other checks


def held(outputs: Sequence[Tensor], wanted: Sequence[Expected], where: str) -> str:
    """ "right" or "unjudged". Raises `Wrong`."""
    verdict = judge.judged(outputs, wanted)
    if verdict.wrong:
        raise Wrong("wrong", where, verdict.reason)
    return verdict.kind


def check_texts(graph: Any) -> None:
    """Written and read again it is the same, and it can be shown. Raises `Wrong`."""
    text = cs.dumps(graph)
    if cs.dumps(cs.loads(text)) != text:
        raise Wrong("odd", "texts", "dumps(loads(text)) is another text")
    if isinstance(graph, KernelGraph):
        repr(graph)


def check_candidates(
    graph: KernelGraph,
    inputs: list[Tensor],
    wanted: list[Expected],
    settings: Settings,
    stage: Stage,
) -> None:
    """Search, and run what was found. Raises `Wrong` and `Refused`."""
    stage("search")
    hinted = graph.with_hints(bucketed(graph))
    options = pipeline.Options(H200, budget_s=settings.budget_s, tuned=False)
    try:
        result, choice = pipeline.choose(hinted, options, keep=settings.keep)
    except MAKING as error:
        raise Refused(error, "search") from error
    chosen = choice.candidate.mugraph
    stage("verify")
    if not cs.verify(hinted, chosen):
        raise Wrong("odd", "verify", "the verifier refuses what was chosen")
    others = [c.mugraph for c in result.candidates if c.mugraph is not chosen]
    for k, mu in enumerate([chosen, *others][: settings.keep]):
        _check_mugraph(mu, inputs, wanted, stage, "chosen" if not k else "other")
    stage("pages")
    mugraph_text(chosen)
    mugraph_svg(chosen)
    mugraph_page(chosen)


def _check_mugraph(
    mu: Any, inputs: list[Tensor], wanted: list[Expected], stage: Stage, which: str
) -> None:
    stage(f"texts of the {which} muGraph")
    check_texts(mu)
    rows = next((n for w, m in zip(inputs, mu.inputs, strict=True)
                 for n, d in zip(w.shape, mu.tensors[m].shape, strict=True)
                 if not isinstance(d, int)), None)  # fmt: skip
    here = mu if rows is None else at_rows(mu, rows)
    stage(f"{which} muGraph in float64")
    exact = execute(here, inputs)
    held([y.to(w.dtype) for y, w in zip(exact, wanted, strict=True)], wanted, stage.name)
    stage(f"{which} muGraph, rounded")
    held(execute_rounded(here, inputs), wanted, stage.name)
