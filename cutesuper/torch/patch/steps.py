"""Decoding steps of language models, compiled whole.

Few positions behind a cache of fixed length are a step that is repeated: the model as it is written
is compiled by ``torch.compile(backend="cutesuper")``, once for each kind of call, instead of being
computed part by part. ``generate`` of transformers, which compiles such steps by itself, gets the
same backend.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils._pytree import tree_flatten, tree_map_only

from cutesuper.runtime.programs import KERNEL_DEVICES, is_capturing
from cutesuper.torch.internals import compile_errors, is_compiler_on
from cutesuper.torch.ops.rowwise.operator import is_plain
from cutesuper.torch.patch.probing import Failed
from cutesuper.torch.patch.replacement import HOW, Replacement, as_written, replace
from cutesuper.torch.patch.report import refused
from cutesuper.torch.patch.usual_calls import MOST_POSITIONS

#: values that tell kinds of calls apart
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)

#: kinds of calls of one model that are compiled, as many as PyTorch compiles of one function
MOST_KINDS = 8


def _original(model: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return model.original(*args, **options)


@dataclass(eq=False)
class Step:
    """The compiled steps of one model.

    Attributes:
        kinds: of calls: whether they are compiled, or cannot be.
        compiled: the function; None until there is one.
        parts: of the model, when its latest kind of call came.
    """

    kinds: dict[Any, bool] = field(default_factory=dict)
    compiled: Callable[..., Any] | None = None
    parts: tuple[nn.Module, ...] = ()

    def __str__(self) -> str:
        return "steps: torch.compile(backend='cutesuper')"

    def __getstate__(self) -> dict[str, Any]:
        """The state of a copy, which compiles by itself."""
        return {"kinds": {}, "compiled": None, "parts": ()}

    def takes(self, model: nn.Module, kind: Any) -> bool:
        """True if a kind of calls is compiled, or may be now."""
        known = self.kinds.get(kind)
        if known is None:
            self.parts = tuple(model.modules())[1:]
        # compiled code does not look for hooks: its guards on them take 70 us a layer
        if any(m._forward_hooks or m._forward_pre_hooks for m in self.parts):
            return False
        if known is not None:
            return known
        if is_capturing():
            return False
        if sum(self.kinds.values()) < MOST_KINDS:
            return True
        refused["steps"] = f"steps: more than {MOST_KINDS} kinds of calls; part by part"
        return False

    def run(self, model: nn.Module, args: Any, options: Any) -> Any:
        """The result of a call, compiled at the first one of its kind."""
        if self.compiled is None:
            # PyTorch counts what it compiled by the code of a function: each model has its own
            own = FunctionType(_original.__code__.replace(), _original.__globals__)
            # in pieces it could fail behind the first ones, which have written to the cache
            self.compiled = torch.compile(own, fullgraph=True, dynamic=False, backend="cutesuper")
        # otherwise views of a growing list of tokens are compiled anew at every step
        args, options = tree_map_only(Tensor, _dense, (args, options))
        with as_written():
            return self.compiled(model, args, options)


def _dense(t: Tensor) -> Tensor:
    """A tensor with the strides of its shape, dimensions of one element included."""
    strides = torch.empty(t.shape, device="meta").stride()
    return t if t.stride() == strides else t.clone(memory_format=torch.contiguous_format)


class ReplacedModel(Replacement):
    """A language model of transformers."""

    def replaced(self, *args: Any, **options: Any) -> Any:
        """The result of a call, compiled if it is a step."""
        step: Step = self.__dict__[HOW]
        model: Any = self
        kind = _kind(model, args, options)
        if kind is None or not step.takes(model, kind):
            return self.original(*args, **options)
        try:
            made = step.run(model, args, options)
        except compile_errors() as error:  # nothing has run
            step.kinds[kind] = False
            refused[kind] = f"steps: {' '.join(str(error).splitlines()[:2])}"
            return self.original(*args, **options)
        step.kinds[kind] = True
        return made

    def get_compiled_call(self, compile_config: Any) -> Callable[..., Any]:
        """The function that ``generate`` runs its steps with, by this package's backend.
        Another backend, or options of Inductor, are the user's choice, and stay."""
        made = super().get_compiled_call(_with_backend(self, compile_config))  # type: ignore[misc]
        if made == self.__call__:  # type: ignore[attr-defined]
            return made  # there are models that transformers does not compile

        def call(*args: Any, **options: Any) -> Any:
            with as_written():
                return made(*args, **options)

        return call


def _with_backend(model: Any, config: Any) -> Any:
    from transformers import CompileConfig

    config = copy.copy(config or getattr(model, "_default_compile_config", CompileConfig)())
    if config.backend == "inductor" and not config.options:
        config.backend = "cutesuper"
    return config


def _kind(model: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The kind of a call that is a step: few positions, a cache of fixed length, no gradients.
    None for any other call."""
    cache: Any = options.get("past_key_values")
    ids = args[0] if args else options.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.shape[1] > MOST_POSITIONS:
        return None
    if ids.device.type not in KERNEL_DEVICES or torch.is_grad_enabled() or not is_plain():
        return None
    if not getattr(cache, "is_compileable", False) or not _is_filled(cache):
        return None
    shapes = tuple(layer.keys.shape for layer in cache.layers)
    mask, room = options.get("attention_mask"), max(s[2] for s in shapes)
    grows = isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[1] < room
    if grows or not is_compiler_on() or torch_module._has_any_global_hook():
        return None
    given, form = tree_flatten((args, {k: v for k, v in options.items() if v is not cache}))
    facts = tuple(
        (t.shape, t.dtype, t.device) if isinstance(t, Tensor)
        else t if isinstance(t, _PLAIN) else type(t)
        for t in given
    )  # fmt: skip
    state = model.training, ids.dtype, model.dtype, torch.is_inference_mode_enabled()
    return facts, str(form), shapes, state


def _is_filled(cache: Any) -> bool:
    """True if a cache has its memory, and counts on the device, so that steps are alike."""
    layers = getattr(cache, "layers", ())
    return bool(layers) and all(
        isinstance(getattr(m, "keys", None), Tensor) and isinstance(m.get_seq_length(), Tensor)
        for m in layers
    )


def head_of(model: nn.Module) -> tuple[str, nn.Module] | None:
    """Path and module of the first language model of transformers that is a part of a model."""
    for path, part in model.named_modules():
        generates = getattr(part, "can_generate", None)
        if hasattr(part, "get_compiled_call") and callable(generates) and generates():
            return path, part
    return None


def find(model: nn.Module) -> Step:
    """The steps of a model. Raises Failed if they cannot be compiled."""
    if not getattr(model, "_can_compile_fullgraph", True):
        raise Failed("transformers says that it cannot be compiled whole")
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        raise Failed("it is on several devices")
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None and not quantizer.is_compileable:
        raise Failed("its quantization cannot be compiled")
    return Step()


def install(model: nn.Module, how: Step) -> list[nn.Module]:
    """Let a model compile its steps. Returns the model."""
    replace(model, ReplacedModel, how)
    return [model]
