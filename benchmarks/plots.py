"""Plots of the results, as SVG and PNG; needs matplotlib.

    python -m benchmarks.plots benchmarks/results docs/plots

Every figure is read from the JSON of runs; the title of each plot names GPU and commit.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import load_results
from benchmarks.sweep_report import PRODUCTS

Case = dict[str, Any]

#: implementation -> colour and marker; the floor is a line without markers
LOOKS = {
    "cutesuper": ("#0969da", "o"), "compile": ("#bc4c00", "s"), "fa4": ("#bc4c00", "s"),
    "quack": ("#6e7781", "^"), "sdpa-cudnn": ("#6e7781", "^"), "floor": ("#1f2328", ""),
    "eager-graph": ("#6e7781", "^"), "matmul-alone": ("#bc4c00", "s"),
}  # fmt: skip


def time_us(case: Case, name: str) -> float | None:
    """Microseconds of an implementation, or of the floor; None if it was not measured."""
    if name == "floor":
        return case["floor_us"]["plain"]
    found = next((i for i in case["implementations"] if i["name"] == name), None)
    return found["time_us"]["median"] if found and found["time_us"] else None


def _memory(plot: Any, results: Case) -> None:
    """Gigabytes a second of RMSNorm over the bytes that it moves."""
    cases = [c for c in results["cases"] if c["key"].startswith("rmsnorm/rms_norm/forward/")]
    cases.sort(key=lambda c: c["bytes"])
    _lines(plot, cases, ("floor", "cutesuper", "quack", "compile"),
           lambda c: c["bytes"] / 1e6, lambda c, us: c["bytes"] / us / 1e3)  # fmt: skip
    plot.set(title="RMSNorm", xlabel="MB read and written", ylabel="GB/s",
             xscale="log", ylim=(0, None))  # fmt: skip


def _prefill(plot: Any, results: Case) -> None:
    """Teraflops of causal attention over the tokens."""
    _lines(plot, results["cases"], ("cutesuper", "fa4", "sdpa-cudnn"),
           lambda c: int(c["key"].split("/")[1]), lambda c, us: c["flops"] / us / 1e6)  # fmt: skip
    plot.set(title="Causal prefill, 32 heads of 128", xlabel="tokens", ylabel="TFLOP/s",
             ylim=(0, None))  # fmt: skip
    plot.set_xscale("log", base=2)
    tokens = [int(c["key"].split("/")[1]) for c in results["cases"]]
    plot.set_xticks(tokens, [f"{t:,}" for t in tokens])


def _decode(plot: Any, results: Case) -> None:
    """Tokens a second of Llama-3-8B over the sequences that are decoded together."""
    cases = [c for c in results["cases"] if c["key"].startswith("llama/")]
    _lines(plot, cases, ("floor", "cutesuper", "compile", "eager-graph"),
           lambda c: c["shape"][0], lambda c, us: c["shape"][0] / us * 1e6)  # fmt: skip
    plot.set(title="Llama-3-8B, decoding, 4096 keys", xlabel="sequences", ylabel="tokens/s",
             ylim=(0, None))  # fmt: skip


def _layers(plot: Any, results: Case) -> None:
    """Teraflops of the products of a decoder layer over the rows, those of all four together."""
    cases = [c for c in results["cases"] if c["model"].startswith("Llama-3-8B")]
    batches = sorted({c["batch"] for c in cases})
    for name in ("cutesuper", "matmul-alone"):
        points = []
        for batch in batches:
            own = [c for c in cases if c["batch"] == batch]
            times = [us for c in own if (us := time_us(c, name)) is not None]
            if len(times) == len(own):  # else the layer was not timed as a whole
                points.append((batch, sum(c["flops"] for c in own) / sum(times) / 1e6))
        _line(plot, name, points)
    plot.set(title="Layers of Llama-3-8B, norms and all", xlabel="rows", ylabel="TFLOP/s",
             xscale="log", ylim=(0, None))  # fmt: skip
    plot.set_xticks(batches, [f"{b:,}" for b in batches], rotation=45)
    plot.minorticks_off()


#: name of the plot -> file of results, what draws it
PLOTS = {
    "memory": ("training", _memory),
    "prefill": ("prefill", _prefill),
    "decode": ("decode", _decode),
    "layers": ("layers", _layers),
}


def _lines(
    plot: Any, cases: Sequence[Case], names: Sequence[str],
    x: Callable[[Case], float], y: Callable[[Case, float], float],
) -> None:  # fmt: skip
    for name in names:
        points = [(x(c), y(c, us)) for c in cases if (us := time_us(c, name)) is not None]
        _line(plot, name, points)


def _line(plot: Any, name: str, points: Sequence[tuple[float, float]]) -> None:
    """The line of an implementation."""
    colour, marker = LOOKS[name]
    dashes = "--" if name == "floor" else "-"
    plot.plot(*zip(*points, strict=True), dashes, color=colour, marker=marker, markersize=4,
              label=PRODUCTS.get(name, name).strip("*"))  # fmt: skip


def write_plots(results: Path, folder: Path) -> list[Path]:
    """Write all plots, and return their files. Raises OSError, ValueError as `load_results`."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams.update(
        {"svg.hashsalt": "cutesuper", "svg.fonttype": "none", "font.size": 9}
    )
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for name, (file, draw) in PLOTS.items():
        found = load_results(results / f"{file}.json")
        figure = Figure(figsize=(4.6, 3.2), layout="constrained")
        plot = figure.subplots()
        draw(plot, found)
        plot.grid(alpha=0.3)
        plot.legend(fontsize=8)
        e = found["environment"]
        figure.supxlabel(f"{e['gpu']}, commit {e['commit'][:10]}", fontsize=7, color="#57606a")
        for end, options in (("svg", {"metadata": {"Date": None}}), ("png", {"dpi": 120})):
            written.append(folder / f"{name}.{end}")
            figure.savefig(written[-1], **options)
    return written


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``python -m benchmarks.plots``; 0 when all were written, else 1."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plots")
    parser.add_argument("results", type=Path, help="folder with the JSON of benchmark runs")
    parser.add_argument("folder", type=Path, help="where the plots are written")
    arguments = parser.parse_args(argv)
    try:
        for path in write_plots(arguments.results, arguments.folder):
            print(path)
    except (OSError, ValueError) as error:
        print(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
