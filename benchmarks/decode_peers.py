"""Implementations of models: eager PyTorch, captured and compiled, and cutesuper.

Attention is `scaled_dot_product_attention` for PyTorch, by the kernel that is the fastest for one
query (cuDNN). torch.compile is captured in the same kind of CUDA graph as all others, which is what
its mode "reduce-overhead" does; it gets a layer, whose code all layers share. The same holds for
torch.compile(backend="cutesuper").
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.decode_problem import DecodeProblem
from benchmarks.peers import PEERS, Implementation, Launcher
from benchmarks.problem import Problem
from benchmarks.workload import Outputs
from examples.llama import decode_ways
from examples.llama.decode_ways import Way, fastest_attention

BACKEND = "cutesuper"
Make = Callable[[Problem], Launcher]


def step(way: Callable[[torch.device], Way]) -> Make:
    """A step in one of the ways of the example."""

    def make(problem: Problem) -> Launcher:
        if not isinstance(problem, DecodeProblem):
            raise ValueError(f"{problem.workload.name}: no step of decoding")
        model, caches = problem.model, problem.caches
        run, chosen = way(problem.tokens.device).step, torch.empty_like(problem.tokens)

        @torch.no_grad()
        def launch(_: int) -> Outputs:
            with fastest_attention():
                logits = run(model, problem.tokens, problem.positions, caches)
            torch.argmax(logits, -1, out=chosen)
            return (logits,)

        return Launcher(launch)

    return make


def traced(problem: Problem) -> Launcher:
    """The function of a workload through `cutesuper.superoptimize`."""
    import cutesuper as cs

    inputs = problem.inputs
    program = cs.superoptimize(problem.workload.computations["full"].eager, inputs[0])
    return Launcher(lambda i: program(*inputs[i]))


def backend(problem: Problem) -> Launcher:
    """The function of a workload through torch.compile with our backend."""
    function, inputs = problem.workload.computations["full"].eager, problem.inputs
    compiled = torch.compile(function, backend=BACKEND, dynamic=False, fullgraph=True)
    return Launcher(lambda i: compiled(*inputs[i]))


def either(of_step: Make, of_region: Make) -> Make:
    """A factory for both kinds of problem, steps and regions."""

    def make(problem: Problem) -> Launcher:
        return (of_step if isinstance(problem, DecodeProblem) else of_region)(problem)

    return make


_eager, _compiled, _max = (
    next(peer.make for peer in PEERS if peer.name == name)
    for name in ("eager", "compile", "compile-max")
)

IMPLEMENTATIONS: tuple[Implementation, ...] = (
    Implementation("cutesuper", "ours", either(step(decode_ways.ours), traced)),
    Implementation(
        "cutesuper-backend",
        "ours",
        either(step(lambda _: decode_ways.compiled(backend=BACKEND)), backend),
    ),
    Implementation("eager", "peer", either(step(lambda _: decode_ways.eager()), _eager)),
    Implementation("eager-graph", "peer", step(lambda _: decode_ways.eager())),
    Implementation("compile", "peer", either(step(lambda _: decode_ways.compiled()), _compiled)),
    Implementation("compile-max", "peer", _max),
)
#: implementations left out of a section: a region is captured anyway; max-autotune takes minutes
#: for a model
ABSENT = {
    **dict.fromkeys(("llama", "llama-1b"), frozenset({"compile-max"})),
    "dlrm": frozenset({"eager-graph"}),
}
