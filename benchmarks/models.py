"""``python -m benchmarks models``: decoding steps of models as the transformers library has them.

A step reads one token of each sequence behind others that fill half of a `StaticCache`, and gives
the logits of the next one. Layers of windows, which count on the host there, have the rings of
`cutesuper.generate`. Weights are random, extents are those of the published configurations.
Every implementation is one CUDA graph, which begins by setting the places of the caches back, so
that all steps are the same one and their logits can be checked.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from typing import Any

import torch

from benchmarks.check import Expected, measure_error
from benchmarks.cli import check_options, selected, settings_of
from benchmarks.harness import Case, Settings
from benchmarks.peers import STREAMS, Implementation, Launcher
from benchmarks.problem import Problem, SetPlan
from benchmarks.sweep import Item, Sweep, add_sweep_options, names_of, sweep_main
from benchmarks.workload import DTYPES, Computation, Outputs, Shape, TensorSpec, Workload

DTYPE = "bfloat16"
BATCHES = (1, 8)
TOKENS = (1024,)
#: positions that models are made for
POSITIONS = 32768
#: a call of a whole model takes the host tens of milliseconds
SETTINGS = Settings(rounds=30, warm_seconds=0.05, host_batches=5, host_batch_calls=2)
#: for one step: compilers get a whole model, and regions are searched for in this process
TIMEOUT_SECONDS = 400.0
READ = tuple(f for f in STREAMS if not f.dependent)


@dataclass(frozen=True)
class Family:
    """A model of the transformers library.

    Attributes:
        prefix: of the class of its configuration.
        extents: arguments of its configuration.
        model: the name of its class.
    """

    prefix: str
    extents: dict[str, Any]
    model: str

    def build(self, device: torch.device, dtype: torch.dtype) -> Any:
        """The model, with random weights."""
        import transformers

        torch.manual_seed(0)
        options = {"max_position_embeddings": POSITIONS, "dtype": dtype}
        if self.prefix == "GPT2":
            options = {"n_positions": POSITIONS, "dtype": dtype}
        made = getattr(transformers, f"{self.prefix}Config")(**self.extents, **options)
        with torch.device(device):
            before = torch.get_default_dtype()
            torch.set_default_dtype(dtype)
            try:
                return getattr(transformers, self.model)(made).eval()
            finally:
                torch.set_default_dtype(before)


def _extents(
    vocabulary: int, width: int, layers: int, hidden: int, heads: int, groups: int, head: int,
    tied: bool,
) -> dict[str, Any]:  # fmt: skip
    return {
        "vocab_size": vocabulary, "hidden_size": width, "num_hidden_layers": layers,
        "intermediate_size": hidden, "num_attention_heads": heads, "num_key_value_heads": groups,
        "head_dim": head, "tie_word_embeddings": tied,
    }  # fmt: skip


MODELS = {
    "llama-3.2-1b": Family(
        "Llama", _extents(128256, 2048, 16, 8192, 32, 8, 64, True), "LlamaForCausalLM"
    ),
    "qwen3-1.7b": Family(
        "Qwen3", _extents(151936, 2048, 28, 6144, 16, 8, 128, True), "Qwen3ForCausalLM"
    ),
    "gemma-3-1b": Family(
        "Gemma3Text",
        _extents(262144, 1152, 26, 6912, 4, 1, 256, True) | {"sliding_window": 512},
        "Gemma3ForCausalLM",
    ),
    "gpt2-medium": Family(
        "GPT2", {"vocab_size": 50257, "n_embd": 1024, "n_layer": 24, "n_head": 16},
        "GPT2LMHeadModel",
    ),
    "mistral-7b": Family(
        "Mistral",
        _extents(32768, 4096, 32, 14336, 32, 8, 128, False) | {"sliding_window": None},
        "MistralForCausalLM",
    ),
    "llama-3-8b": Family(
        "Llama", _extents(128256, 4096, 32, 14336, 32, 8, 128, False), "LlamaForCausalLM"
    ),
}  # fmt: skip


@dataclass(frozen=True)
class ModelWorkload(Workload):
    """A step of a model; a shape is (sequences, tokens in the cache)."""

    family: Family = field(kw_only=True)


def _nothing(*_: Any) -> Any:
    raise NotImplementedError("a model of a library is no kernel graph")


def workload_of(name: str, shapes: tuple[Shape, ...]) -> ModelWorkload:
    """Steps of the model with this name."""
    family = MODELS[name]
    model = family.build(torch.device("meta"), DTYPES[DTYPE])
    head = model.get_output_embeddings().weight
    tables = {m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)} - {head}
    # a table gives a few rows
    read = sum(p.numel() for p in model.parameters() if p not in tables)
    config = model.config
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    width = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)

    def inputs(shape: Shape) -> tuple[TensorSpec, ...]:
        batch, tokens = shape
        kinds = (
            getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        )
        windows = {"sliding_attention": getattr(config, "sliding_window", None)}
        seen = sum(min(tokens, windows.get(kind) or tokens) for kind in kinds)
        cache = TensorSpec("cache", (2, seen, batch, heads, width))
        return TensorSpec("weights", (read,)), cache

    return ModelWorkload(
        name="models",
        title=name,
        axes=("sequences", "tokens"),
        shapes=shapes,
        dtypes=(DTYPE,),
        inputs=inputs,
        outputs=lambda shape: (TensorSpec("logits", (shape[0], family.extents["vocab_size"])),),
        computations={"full": Computation(_nothing, _nothing)},
        flops=lambda _: 0,
        graph=_nothing,
        family=family,
    )


@dataclass
class Step:
    """A model, the arguments of a step, and the places in its caches.

    Attributes:
        model: of the library.
        given: its arguments by name.
        caches: keep keys and values, and make masks where there are windows.
        place: int64 [], the position of the step.
        counters: the integers of the caches that go on with every step.
        filled: their values in front of the step.
    """

    model: Any
    given: dict[str, Any]
    caches: Any
    place: torch.Tensor
    counters: list[torch.Tensor]
    filled: list[torch.Tensor]

    @staticmethod
    def of(model: Any, batch: int, tokens: int) -> Step:
        """The step behind a prompt of random tokens, in a cache with as many free places."""
        from cutesuper.torch.generate.caches import Caches

        device = model.device
        generator = torch.Generator(device).manual_seed(1)
        caches = Caches(model.config, 2 * tokens)
        prompt = torch.randint(
            3, model.config.vocab_size, (batch, tokens), device=device, generator=generator
        )
        model(input_ids=prompt, past_key_values=caches.for_prompt(), logits_to_keep=1)
        cache: Any = caches.for_steps(tokens)
        counters = [layer.cumulative_length for layer in cache.layers]
        given = {
            "input_ids": prompt[:, :1].clone(),
            "past_key_values": cache,
            "position_ids": torch.full((batch, 1), tokens, device=device),
        }
        place = torch.tensor(tokens, device=device)
        return Step(model, given, caches, place, counters, [c.clone() for c in counters])

    def logits(self, model: Any) -> torch.Tensor:
        """Logits ``[batch, words]`` of a model with these weights."""
        torch._foreach_copy_(self.counters, self.filled)
        like = self.model.get_input_embeddings().weight.new_empty(len(self.given["input_ids"]), 0)
        mask = self.caches.masks(self.place, None, like)
        return model(attention_mask=mask, **self.given).logits[:, -1]

    def in_float64(self) -> torch.Tensor:
        """The same logits, computed in float64."""
        with _exact(self.model, self.given["past_key_values"].layers):
            return self.logits(self.model)


@contextmanager
def _exact(model: torch.nn.Module, caches: Sequence[Any]) -> Iterator[None]:
    """A model that computes in float64.
    Each module has its weights, buffers and cache so while it runs: 8 billion would take 64 GB."""
    kept: dict[torch.nn.Module, list[Callable[[], None]]] = {}

    def widen(module: torch.nn.Module, *_: Any) -> None:
        own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        wanted: list[tuple[Any, str]] = [(t, "data") for t in own if t.is_floating_point()]
        place = getattr(module, "layer_idx", None)
        if place is not None and caches[place].keys.dtype != torch.float64:
            wanted += [(caches[place], "keys"), (caches[place], "values")]
        undo = kept.setdefault(module, [])
        for holder, name in wanted:  # one by one: memory may not suffice for all
            undo.append(_widened(holder, name))

    def narrow(module: torch.nn.Module, *_: Any) -> None:
        for undo in kept.pop(module, ()):
            undo()

    hooks = [h for m in model.modules() for h in (
        m.register_forward_pre_hook(widen), m.register_forward_hook(narrow, always_call=True),
    )]  # fmt: skip
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module in list(kept):
            narrow(module)


def _widened(holder: Any, name: str) -> Callable[[], None]:
    """Have an attribute's tensor in float64; returns what gives the old one back."""
    old = getattr(holder, name)
    setattr(holder, name, old.double())
    return lambda: setattr(holder, name, old)


@dataclass
class ModelProblem(Problem):
    """A step of a model with weights, and a cache, in device memory."""

    step: Step = field(kw_only=True)


@lru_cache(maxsize=1)  # weights of gigabytes: the batches of a run share them
def _model(name: str, device: torch.device, dtype: torch.dtype) -> Any:
    return MODELS[name].build(device, dtype)


class ModelCase(Case):
    """The case of one model and one number of sequences."""

    @torch.no_grad()
    def _make_problem(self) -> ModelProblem:
        batch, tokens = self.shape
        dtype, device = DTYPES[self.dtype], self.backend.device
        model = _model(self.workload.title, device, dtype)
        step = Step.of(model, batch, tokens)
        size = self.workload.bytes_moved(self.shape, dtype)
        problem = ModelProblem(
            self.workload, self.shape, dtype, self.dtype, self.backend.multiprocessors,
            SetPlan(1, size, flush=False),
            slabs=[torch.zeros(size, dtype=torch.uint8, device=device)],
            inputs=[()], outputs=[()], checked=(0,), step=step,
        )  # fmt: skip
        exact, eager = step.in_float64(), step.logits(model)
        error = measure_error(eager, exact)
        problem.expect("full", 0, [Expected(exact, error, tuple(exact.shape), eager.dtype)])
        return problem


Made = Callable[[Any], Any]


def _implementation(make: Made) -> Callable[[Problem], Launcher]:
    def launcher(problem: Problem) -> Launcher:
        if not isinstance(problem, ModelProblem):
            raise ValueError(f"{problem.workload.name}: no step of a model")
        step = problem.step
        model = make(step.model)

        @torch.no_grad()
        def launch(_: int) -> Outputs:
            return (step.logits(model),)

        for _ in range(2):  # a compiled model, or a patched one, decides at its first calls
            launch(0)
        return Launcher(launch)

    return launcher


def _compiled(model: Any) -> Any:
    return torch.compile(model, backend="cutesuper")


def _by_inductor(model: Any) -> Any:
    return torch.compile(model)


def _patched(model: Any) -> Any:
    """A copy that shares the parameters, patched."""
    import cutesuper as cs

    kept = {id(t): t for t in (*model.parameters(), *model.buffers())}
    shared = copy.deepcopy(model, kept)
    cs.patch(shared)
    return shared


IMPLEMENTATIONS: tuple[Implementation, ...] = (
    Implementation("cutesuper-backend", "ours", _implementation(_compiled)),
    Implementation("cutesuper-patch", "ours", _implementation(_patched)),
    Implementation("eager-graph", "peer", _implementation(lambda m: m)),
    Implementation("compile", "peer", _implementation(_by_inductor)),
)  # fmt: skip


def make_sweep(
    names: Sequence[str], shapes: tuple[Shape, ...], peers: Sequence[Implementation]
) -> Sweep:
    """The sweep of some models; a shape is (sequences, tokens in the cache)."""
    items: list[Item] = []
    for name in names:
        workload = workload_of(name, shapes)
        items += [
            Item(
                f"{name}/{batch}/{tokens}", workload, (batch, tokens), {"group": name}, DTYPE,
                case=ModelCase,
            )
            for batch, tokens in shapes
        ]  # fmt: skip
    return Sweep("models", "Decoding steps of transformers models", tuple(items), (*READ, *peers))


def _numbers(arguments: argparse.Namespace, option: str) -> list[int]:
    given: str = getattr(arguments, option)
    if not all(n.isdigit() and int(n) for n in given.split(",")):
        raise ValueError(f"--{option} {given}: positive numbers, with commas between them")
    return [int(n) for n in given.split(",")]


def main(argv: Sequence[str], prog: str) -> int:
    """Measure; returns and raises as `cli.supervise`."""
    parser = argparse.ArgumentParser(prog=prog, description="Measure steps of models of a library.")
    parser.add_argument("--only", help=f"comma-separated subset of: {', '.join(MODELS)}")
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)), help="sequences")
    parser.add_argument(
        "--tokens", default=",".join(map(str, TOKENS)), help="of a sequence, in the cache"
    )
    add_sweep_options(parser, IMPLEMENTATIONS)
    parser.set_defaults(timeout=TIMEOUT_SECONDS)
    arguments = parser.parse_args(argv)
    try:
        names = names_of(arguments.only, tuple(MODELS), "--only")
        batches, tokens = _numbers(arguments, "batches"), _numbers(arguments, "tokens")
        peers = selected(arguments, among=IMPLEMENTATIONS)
        check_options(arguments)
    except ValueError as error:
        parser.error(str(error))
    sweep = make_sweep(names, tuple(product(batches, tokens)), peers)
    return sweep_main(parser, arguments, sweep, settings_of(arguments, SETTINGS))
