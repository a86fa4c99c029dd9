"""The demo: RMSNorm + Linear, from its definition to a kernel that runs."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.rule import Rule
from rich.table import Table

from cutesuper.ir.dtypes import as_dtype
from cutesuper.ir.graph import KernelGraph
from cutesuper.pipeline import superoptimize
from cutesuper.progress import progress_bar
from cutesuper.runtime.kernel import Kernel
from cutesuper.verify.numeric import acceptable

EPS = 1e-6


def demo_graph(shape: tuple[int, int, int], dtype: str, weight: bool) -> KernelGraph:
    """The graph of rms_norm(X) @ W, with a norm weight G if ``weight``."""
    m, k, n = shape
    g = KernelGraph()
    x = g.new_input((m, k), dtype, name="X")
    w = g.new_input((k, n), dtype, name="W", constant=True)
    gain = g.new_input((k,), dtype, name="G", constant=True) if weight else None
    g.mark_output(g.matmul(g.rms_norm(x, gain, eps=EPS), w))
    return g


def run_demo(
    shape: tuple[int, int, int], dtype: str, weight: bool, budget_s: float | None = None
) -> int:
    """Search, show, run and compare. Returns the exit code: 1 if the result is wrong."""
    import torch

    console = Console()
    graph = demo_graph(shape, dtype, weight)
    start = time.perf_counter()
    kernel = _optimize(console, graph, budget_s)
    seconds = time.perf_counter() - start
    for section in f"summary ==\n{kernel.explain()}".split("\n\n== "):
        title, _, text = section.partition(" ==\n")
        console.print(Rule(title, align="left"))
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    console.print(Rule("run", align="left"))
    console.print(f"from the definition to a compiled kernel: {seconds:.2f} s")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        console.print("no CUDA GPU here: running through the reference executor on the CPU")
    inputs = _inputs(graph, device)
    good = _check(console, kernel, inputs)
    if device == "cuda":
        _time(console, kernel, graph, inputs)
    return 0 if good else 1


def _optimize(console: Console, graph: KernelGraph, budget_s: float | None) -> Kernel:
    with progress_bar(console) as show:
        return superoptimize(graph, budget_s=budget_s, on_progress=show)


def _inputs(graph: KernelGraph, device: str) -> list[Any]:
    import torch

    made: list[Any] = []
    for i in graph.inputs:
        node = graph.nodes[i]
        t = torch.randn([int(d) for d in node.shape if isinstance(d, int)], device=device)
        scale = 0.02 if node.name == "W" else 1.0
        made.append((t * scale).to(as_dtype(node.dtype).torch))
    return made


def _eager(graph: KernelGraph) -> Any:
    """The definition as idiomatic PyTorch."""
    import torch

    def program(x: Any, w: Any, g: Any = None) -> Any:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], g, EPS) @ w

    return program


def _check(console: Console, kernel: Kernel, inputs: list[Any]) -> bool:
    import torch

    from cutesuper.ir.evaluate import evaluate

    reference = evaluate(kernel.graph, inputs, torch.float64)[0]
    eager = _eager(kernel.graph)(*inputs)
    report = acceptable(kernel(*inputs), reference, eager, kernel.graph.nodes[-1].dtype)
    console.print(f"against float64: {report.message}", highlight=False)
    return bool(report)


def _time(console: Console, kernel: Kernel, graph: KernelGraph, inputs: list[Any]) -> None:
    """Time the kernel, eager PyTorch and torch.compile.
    `cutesuper bench` measures more carefully."""
    import torch

    from cutesuper.measure import device_of, device_us

    device = device_of(inputs[0].device)
    if device is None:
        raise AssertionError("nothing to time without a GPU")

    def drawn(n: int) -> list[Any]:
        return [torch.randn_like(t) for t in inputs] if n else inputs

    program = _eager(graph)
    table = Table("implementation", "us per call")
    rows = {"cutesuper": kernel, "PyTorch eager": program, "torch.compile": torch.compile(program)}
    for name, function in rows.items():
        try:
            with torch.no_grad():
                [us] = device_us([lambda given, f=function: f(*given)], drawn, device)
            table.add_row(name, f"{us:.2f}")
        except Exception as error:  # a peer that fails must not end the demo
            table.add_row(name, f"failed: {type(error).__name__}")
    console.print(table)
