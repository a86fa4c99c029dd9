"""``python -m benchmarks steps``: training steps of models as the transformers library has them.

A step is a forward and a backward pass with the model's own loss, and AdamW on bfloat16 parameters:
PyTorch's (fused), or with ``cutesuper-optim`` that of this library; tokens are random. What is
compiled gives the loss alone: of logits that it gave too, a backward pass would read a gradient of
zeros. Weights are random, extents are those of the published configurations, with fewer layers.
Every implementation runs in a process of its own, so that its memory is its own; a first one whose
caches are empty, and a second one that finds what the first has left. Times are of the second; both
say how long their first step took.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.cli import ours_failed, require_device
from benchmarks.device import CudaBackend, environment
from benchmarks.models import DTYPE, MODELS, Family
from benchmarks.models_report import steps_markdown
from benchmarks.report import SCHEMA, save_results
from benchmarks.spread import summarize
from benchmarks.sweep import names_of
from benchmarks.workload import DTYPES

#: steps behind the first one that are not timed
WARM = 3
TIMED = 20
TIMEOUT_SECONDS = 300.0
#: of learning
RATE = 1e-4
#: relative difference of losses between implementations that have the same weights and tokens:
#: two that round otherwise drift apart in 20 steps by less
CLOSE = 0.01
#: the last line of a process begins with it
RESULT = "result: "


@dataclass(frozen=True)
class Recipe:
    """A model in training.

    Attributes:
        family: without dropout, which every implementation would draw otherwise.
        batch, tokens: of each step.
    """

    family: Family
    batch: int
    tokens: int


def _recipe(name: str, batch: int, tokens: int, **changes: Any) -> Recipe:
    family = MODELS[name]
    return Recipe(replace(family, extents=family.extents | changes), batch, tokens)


_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
RECIPES = {
    "llama-3.2-1b": _recipe("llama-3.2-1b", 4, 2048, num_hidden_layers=4),
    "qwen3-1.7b": _recipe("qwen3-1.7b", 4, 2048, num_hidden_layers=4),
    "gpt2-medium": _recipe("gpt2-medium", 8, 1024, n_layer=8, **_NO_DROPOUT),
}


#: of the next tokens, by the tokens ``[batch, tokens]``
Loss = Callable[[torch.Tensor], torch.Tensor]


def _loss(model: Any) -> Loss:
    return lambda tokens: model(input_ids=tokens, labels=tokens, use_cache=False).loss


def _patched(model: Any) -> Loss:
    import cutesuper as cs

    cs.patch(model)
    return torch.compile(_loss(model))


def _backend(model: Any) -> Loss:
    return torch.compile(_loss(model), backend="cutesuper")


def _fused(model: Any) -> torch.optim.Optimizer:
    cuda = next(model.parameters()).is_cuda
    return torch.optim.AdamW(model.parameters(), lr=RATE, fused=cuda)


def _own(model: Any) -> torch.optim.Optimizer:
    import cutesuper as cs

    return cs.optim.AdamW(model.parameters(), lr=RATE)


@dataclass(frozen=True)
class Way:
    """A way to train.

    Attributes:
        loss: makes the loss of a model of the library.
        optimizer: makes the optimizer of its parameters.
    """

    loss: Callable[[Any], Loss]
    optimizer: Callable[[Any], torch.optim.Optimizer] = _fused


IMPLEMENTATIONS: dict[str, Way] = {
    "compile": Way(lambda model: torch.compile(_loss(model))),
    "cutesuper-backend": Way(_backend),
    "cutesuper-optim": Way(_backend, _own),
    "cutesuper-patch": Way(_patched),
    "eager": Way(_loss),
}
#: kinds of kernels by their names, for where the time goes
KERNELS = {
    "attention": r"attention|sdpa|flash|fmha",
    "products of cutesuper": r"matmulkernel",
    "rows of cutesuper": r"rowskernel|columnskernel",
    "products of cuBLAS": r"nvjet|gemm|cutlass",
    "optimizer": r"multi_tensor",
    "Triton": r"triton_",
}


class Training:
    """A model in training on one device.

    Args:
        recipe: of the model.
        way: how it is trained.
        device: where.
    """

    def __init__(self, recipe: Recipe, way: Way, device: torch.device) -> None:
        self.recipe, self.device = recipe, device
        model = recipe.family.build(device, DTYPES[DTYPE]).train()
        self.loss, self.optimizer = way.loss(model), way.optimizer(model)
        generator = torch.Generator().manual_seed(1)
        shape = (8, recipe.batch, recipe.tokens)
        words = model.config.vocab_size
        self.tokens = torch.randint(words, shape, generator=generator).to(device)

    def step(self, n: int) -> torch.Tensor:
        """One step; its loss."""
        given = self.tokens[n % len(self.tokens)]
        loss = self.loss(given)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def measure(self, timed: int) -> dict[str, Any]:
        """Seconds of the first step, milliseconds of others, memory and losses."""
        begin = time.perf_counter()
        losses = [float(self.step(0))]
        first = time.perf_counter() - begin
        losses += [float(self.step(1 + n)) for n in range(WARM)]
        self._reset_peak()
        times: list[float] = []
        for n in range(timed):
            begin = time.perf_counter()
            losses.append(float(self.step(1 + WARM + n)))  # waits for the device
            times.append((time.perf_counter() - begin) * 1e3)
        return {"first_s": first, "ms": times, "peak_gib": self._peak(), "losses": losses}

    def kernels(self) -> dict[str, float]:
        """Milliseconds of a step by kind of kernel; empty without a GPU."""
        from torch.profiler import ProfilerActivity, profile

        if self.device.type != "cuda":
            return {}
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            float(self.step(0))
        found = Counter[str]()
        for event in profiled.events() or ():
            if event.device_type.name == "CUDA":
                found[kind_of(event.name)] += event.device_time_total / 1e3
        return dict(found.most_common())

    def _reset_peak(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def _peak(self) -> float:
        return torch.cuda.max_memory_allocated() / 2**30 if self.device.type == "cuda" else 0.0


def kind_of(kernel: str) -> str:
    """The kind of a kernel with this name."""
    found = (kind for kind, names in KERNELS.items() if re.search(names, kernel.lower()))
    return next(found, "others")


# ---------------------------------------------------------------------------------------- processes


def _in_process(
    name: str, implementation: str, steps: int, folder: str, timeout: float
) -> dict[str, Any]:
    """The measurements of a process of its own, whose caches are in a folder.
    Raises RuntimeError with what it wrote last, TimeoutExpired."""
    caches = {
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        "TRITON_CACHE_DIR": f"{folder}/triton",
    }
    caches["CUTESUPER_CACHE"] = f"{folder}/cutesuper"
    command = [sys.executable, "-m", "benchmarks.steps", "--one", name, implementation, str(steps)]
    done = subprocess.run(
        command, env={**os.environ, **caches}, capture_output=True, text=True, timeout=timeout,
        check=False,
    )  # fmt: skip
    last = done.stdout.rstrip().rpartition("\n")[2]
    if done.returncode or not last.startswith(RESULT):
        raise RuntimeError(" | ".join(done.stderr.strip().splitlines()[-3:]))
    return json.loads(last.removeprefix(RESULT))


def _one(name: str, implementation: str, steps: int) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    training = Training(RECIPES[name], IMPLEMENTATIONS[implementation], device)
    found = training.measure(steps)
    if steps > 1:
        found["kernels_ms"] = training.kernels()
    print(RESULT + json.dumps(found))


# ------------------------------------------------------------------------------------------ results


def measured(name: str, implementation: str, steps: int, timeout: float) -> dict[str, Any]:
    """An implementation of a recipe as plain data: cold, then warm."""
    entry: dict[str, Any] = {
        "name": implementation, "status": "ok", "error": None, "time_us": None,
        "kind": "ours" if implementation.startswith("cutesuper") else "peer",
    }  # fmt: skip
    try:
        with tempfile.TemporaryDirectory() as folder:
            cold = _in_process(name, implementation, 1, folder, timeout)
            warm = _in_process(name, implementation, steps, folder, timeout)
    except subprocess.TimeoutExpired:
        return entry | {"status": "failed", "error": f"not done after {timeout:.0f} s"}
    except RuntimeError as error:
        return entry | {"status": "failed", "error": str(error)}
    spread = asdict(summarize([ms * 1e3 for ms in warm.pop("ms")]))
    return entry | warm | {"time_us": spread, "cold_s": cold["first_s"]}


def judged(entries: Sequence[dict[str, Any]]) -> None:
    """Mark entries whose losses are not those that most others have."""
    right = [e for e in entries if e["status"] == "ok"]
    if not right:
        return
    middle = [median(each) for each in zip(*(e["losses"] for e in right), strict=True)]
    for e in right:
        pairs = zip(e["losses"], middle, strict=True)
        e["loss_difference"] = max(abs(a - b) / abs(b) for a, b in pairs)
        if not e["loss_difference"] <= CLOSE:
            e["status"], e["error"] = "wrong", f"losses differ by {e['loss_difference']:.1%}"
            e["time_us"] = None


def _case(name: str, entries: list[dict[str, Any]]) -> dict[str, Any]:
    recipe = RECIPES[name]
    extents = recipe.family.extents
    judged(entries)
    return {
        "key": name, "title": name, "shape": [recipe.batch, recipe.tokens], "error": None,
        "label": f"{recipe.batch}x{recipe.tokens}",
        "layers": extents.get("num_hidden_layers") or extents["n_layer"],
        "implementations": entries,
    }  # fmt: skip


def main(argv: Sequence[str], prog: str) -> int:
    """Measure; returns 0 when ours ran and were right, else 1. Raises as `cli.supervise`."""
    parser = argparse.ArgumentParser(prog=prog, description="Measure training steps of models.")
    parser.add_argument("--only", help=f"comma-separated subset of: {', '.join(RECIPES)}")
    parser.add_argument("--peers", help=f"comma-separated subset of: {', '.join(IMPLEMENTATIONS)}")
    parser.add_argument(
        "--steps", type=int, default=TIMED, help="that are timed (default %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument(
        "--timeout", type=float, default=TIMEOUT_SECONDS, help="seconds for a process"
    )
    arguments = parser.parse_args(argv)
    try:
        names = names_of(arguments.only, tuple(RECIPES), "--only")
        peers = names_of(arguments.peers, tuple(IMPLEMENTATIONS), "--peers")
        if arguments.steps < 2 or arguments.timeout <= 0:
            raise ValueError("--steps: at least 2; --timeout: a positive number of seconds")
    except ValueError as error:
        parser.error(str(error))
    require_device()
    results: dict[str, Any] = {
        "schema": SCHEMA, "kind": "steps", "name": "steps", "title": "Training steps of models",
        "dtype": DTYPE, "environment": environment(CudaBackend()), "cases": [],
    }  # fmt: skip
    for name in names:
        entries: list[dict[str, Any]] = []
        for peer in peers:
            print(f"{name}, {peer}: cold, then warm", file=sys.stderr, flush=True)
            entries.append(measured(name, peer, arguments.steps, arguments.timeout))
            if arguments.json:
                done = [*results["cases"], _case(name, [dict(e) for e in entries])]
                save_results({**results, "cases": done}, arguments.json)
        results["cases"].append(_case(name, entries))
    print(steps_markdown(results))
    return int(ours_failed(results))


if __name__ == "__main__":
    _one(sys.argv[2], sys.argv[3], int(sys.argv[4]))
