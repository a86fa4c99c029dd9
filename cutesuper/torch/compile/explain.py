"""`cutesuper.explain`: the backend's decisions about a model, and the reasons."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from cutesuper.errors import OptionError
from cutesuper.garbage import seldom_collected
from cutesuper.ir.relations import reachable
from cutesuper.torch.compile.backend import compile_graph
from cutesuper.torch.compile.options import read_options
from cutesuper.torch.compile.report import GraphReport, Report
from cutesuper.torch.internals import random_as_in_eager, run_eagerly


@seldom_collected()
def explain(
    model: Callable[..., Any],
    example_inputs: Sequence[Any] = (),
    options: Mapping[str, Any] | None = None,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
) -> Report:
    """Report what ``torch.compile(model, backend="cutesuper", options=options)`` does.

    The model is run once, forward and (if something requires a gradient) backward; operators
    outside of regions run uncompiled. Gradients are not accumulated, and random numbers are drawn
    as if this had not happened. Like ``torch._dynamo.explain``, it first drops all compiled code:
    compiled models are compiled again at their next call.

    Args:
        model: a module or a function.
        example_inputs: its arguments.
        options: of the backend: `cutesuper.torch.compile.options.BackendOptions`.
        example_kwargs: its arguments by name.

    Returns:
        A report to ``print``: regions that are taken, times where they are known, and why others
        are not taken, with the lines that they come from.

    Raises:
        OptionError: ``model`` is not a module or function, an option does not exist, or the example
            inputs are not a list or tuple, or those by name not a dict.
    """
    if not callable(model):
        raise OptionError(
            f"explain({type(model).__name__}, ...): give it a module or a function of PyTorch"
        )
    if not isinstance(example_inputs, list | tuple):
        raise OptionError(
            f"explain(model, {type(example_inputs).__name__}): give it the arguments of the model "
            "as a tuple"
        )
    if not isinstance(example_kwargs, Mapping | None):
        raise OptionError(
            f"explain(model, example_kwargs={type(example_kwargs).__name__}): give it the "
            "arguments by name as a dict"
        )
    named = dict(example_kwargs or {})
    chosen = read_options(options)
    graphs: list[GraphReport] = []
    backend = partial(compile_graph, options=chosen, observe=graphs.append, finish=run_eagerly)
    torch.compiler.reset()
    compiled: Any = torch.compile(getattr(model, "_orig_mod", model), backend=backend)
    devices = {t.device for t in pytree.tree_leaves((example_inputs, named))
               if isinstance(t, torch.Tensor) and t.is_cuda}  # fmt: skip
    with torch.random.fork_rng(devices), random_as_in_eager():
        _differentiate(compiled(*example_inputs, **named))
    return Report(chosen, tuple(graphs))


def _differentiate(results: Any) -> None:
    """Have the backward graphs compiled."""
    tensors = [t for t in pytree.tree_leaves(results) if isinstance(t, torch.Tensor)]
    ends = [t for t in tensors if t.requires_grad and t.grad_fn is not None]
    leaves = _leaves(t.grad_fn for t in ends)
    if leaves:
        ones = [torch.ones_like(t) for t in ends]
        torch.autograd.grad(ends, leaves, ones, allow_unused=True)


def _leaves(ends: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors that gradients would be accumulated in."""
    found = reachable(ends, lambda f: (n for n, _ in f.next_functions if n is not None))
    return [f.variable for f in found if hasattr(f, "variable")]
