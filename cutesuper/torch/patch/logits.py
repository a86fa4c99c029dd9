"""Logits of the last layer of a language model in training, made when they are asked for.

before::

    logits = lm_head(x)                                 [2, 2048, 128256], stored
    loss = cross_entropy(logits.float().view(-1, 128256), target)

after: ``lm_head`` returns logits that only remember ``x``. Views, ``float()``, rows and a soft cap
of them are remembered too, and `torch.nn.functional.cross_entropy` computes the loss from ``x``.
Another use computes the logits, as often as it comes, and is differentiated as before. What they
depend on may not have been written to since: that is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from cutesuper.errors import PatchError
from cutesuper.runtime.programs import KERNEL_DEVICES
from cutesuper.torch.ops.heads.cross_entropy import LEAST_BYTES, linear_cross_entropy
from cutesuper.torch.ops.rowwise.operator import is_plain
from cutesuper.torch.patch.replacement import Replacement, is_observed
from cutesuper.torch.patch.replacement import replace as replace_module
from cutesuper.torch.patch.usual_calls import version

_TYPES = (torch.float16, torch.bfloat16)
_PLAIN = (Tensor, nn.Parameter)
_VIEWS = (Tensor.view, Tensor.reshape, Tensor.flatten, torch.reshape, torch.flatten)
_SAME = (Tensor.contiguous,)
_WIDER = (Tensor.float, Tensor.to)
_DIVISIONS = (Tensor.__truediv__, Tensor.div, torch.div)
_TANH = (Tensor.tanh, torch.tanh)
_PRODUCTS = (Tensor.__mul__, Tensor.__rmul__, Tensor.mul, torch.mul)
#: what a tensor says without its elements
_FACTS: set[Any] = {
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.is_floating_point,
    Tensor.is_contiguous, Tensor.stride, Tensor.__len__,
    *(getattr(Tensor, name).__get__
      for name in ("shape", "dtype", "device", "ndim", "layout", "is_cuda")),
}  # fmt: skip
_REQUIRES_GRAD = Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_SIGNATURE = inspect.signature(F.cross_entropy)


@dataclass(frozen=True)
class Source:
    """The tensors and functions that pending logits are computed from.

    Attributes:
        x, weight, bias: of the layer, in its type.
        written: versions of what they depend on, by tensor.
        steps: functions of the logits that have been called since, with their further arguments.
        places: indices of rows among them.
        viewed: true if the rows have become those of a matrix.
        cap: the soft cap; None without.
        begun: the operators of the cap that have been called.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    written: tuple[tuple[Tensor, int], ...]
    steps: tuple[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]], ...] = ()
    places: tuple[Any, ...] = ()
    viewed: bool = False
    cap: float | None = None
    begun: int = 0

    def check(self) -> None:
        """Raise PatchError if a tensor has been written to."""
        if any(version(t) != was for t, was in self.written):
            raise PatchError(
                "the logits of a patched model are computed when something reads them, and their "
                "weight or operand has been written to since the model ran (optimizer.step()?); "
                "read them before, or use cs.patch(model, loss=False)"
            )

    def logits(self) -> Tensor:
        """The logits, computed now."""
        self.check()
        made = F.linear(self.x, self.weight, self.bias)
        for function, args, options in self.steps:
            made = function(made, *args, **options)
        return made

    def loss(self, target: Tensor, options: dict[str, Any]) -> Tensor:
        """The cross entropy of the logits."""
        self.check()
        x = self.x
        for place in self.places:
            x = x[place]
        return linear_cross_entropy(
            x.reshape(-1, x.shape[-1]), self.weight, target, self.bias, softcap=self.cap, **options
        )

    def after(
        self,
        function: Any,
        args: tuple[Any, ...],
        options: dict[str, Any],
        was: Tensor,
        now: Tensor,
    ) -> Source | None:
        """The source behind another function; None if the loss cannot be computed from it.

        ``was`` and ``now`` have the shapes and types before and after it.
        """
        there = replace(self, steps=(*self.steps, (function, args, options)))
        if function in _SAME:
            return there
        if function in _WIDER and now.dtype == torch.float32 and now.device == was.device:
            return there
        if function in _VIEWS and now.shape[-1:] == was.shape[-1:]:
            return replace(there, viewed=True)
        if function is Tensor.__getitem__ and not self.viewed:
            return there._rows(args[0], was.dim())
        return there._capped(function, args)

    def _rows(self, place: Any, rank: int) -> Source | None:
        own = place if isinstance(place, tuple) else (place,)
        fits = len(own) < rank or (len(own) == rank and own[-1] == slice(None))
        if not fits or not all(isinstance(p, int | slice) for p in own):
            return None
        return replace(self, places=(*self.places, own[: rank - 1]))

    def _capped(self, function: Any, args: tuple[Any, ...]) -> Source | None:
        number = args[0] if len(args) == 1 and isinstance(args[0], float | int) else None
        if self.begun == 0 and function in _DIVISIONS and number and number > 0:
            return replace(self, begun=1, cap=float(number))
        if self.begun == 1 and function in _TANH and not args:
            return replace(self, begun=2)
        if self.begun == 2 and function in _PRODUCTS and number == self.cap:
            return replace(self, begun=3)
        return None


class PendingLogits(Tensor):
    """Logits that are computed when something needs their elements."""

    source: Source

    @staticmethod
    def of(source: Source, like: Tensor) -> PendingLogits:
        """Pending logits with shape and type of ``like``, on the device of their source."""
        made: PendingLogits = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            PendingLogits, like.shape, dtype=like.dtype, device=source.x.device
        )
        made.source = source
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Facts without the logits, the loss from their operands, all else from them."""
        kwargs = kwargs or {}
        if func == _REQUIRES_GRAD:
            return True
        if func in _FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        made = _loss(*args, **kwargs) if func is F.cross_entropy else _next(func, args, kwargs)
        if made is not None:
            return made
        whole = tree_map(_computed, (args, kwargs))
        return func(*whole[0], **whole[1])

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Refuse calls that go round `__torch_function__`, whose gradients would be lost."""
        raise PatchError(
            f"{func}: called with the logits of a patched model, which are not computed yet; use "
            "cs.patch(model, loss=False)"
        )


def _computed(t: Any) -> Any:
    return t.source.logits() if isinstance(t, PendingLogits) else t


def _next(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PendingLogits | None:
    """The pending result of a function that a loss may follow."""
    [first, *others] = args or (None,)
    known = (*_VIEWS, *_SAME, *_WIDER, *_DIVISIONS, *_TANH, *_PRODUCTS, Tensor.__getitem__)
    if func not in known or type(first) is not PendingLogits:
        return None
    if any(isinstance(t, Tensor) for t in (*others, *kwargs.values())):
        return None
    with torch._C.DisableTorchFunctionSubclass():
        was = torch.empty(first.shape, dtype=first.dtype, device="meta")
    now = func(was, *others, **kwargs)
    source = first.source.after(func, tuple(others), kwargs, was, now)
    return None if source is None else PendingLogits.of(source, now)


def _loss(*args: Any, **kwargs: Any) -> Tensor | None:
    """The cross entropy of pending logits; None if it is another one."""
    given = _SIGNATURE.bind(*args, **kwargs)
    given.apply_defaults()
    options = given.arguments
    logits, target = options["input"], options["target"]
    if type(logits) is not PendingLogits or logits.source.begun not in (0, 3):
        return None
    plain = type(target) in _PLAIN and target.dim() == 1 and not target.is_floating_point()
    if not plain or any(options[n] is not None for n in ("weight", "size_average", "reduce")):
        return None
    if logits.dim() != 2 or target.device != logits.device:
        return None
    kept = {n: options[n] for n in ("ignore_index", "label_smoothing", "reduction")}
    made = logits.source.loss(target, kept)
    # autocast computes losses in float32
    return made if torch.is_autocast_enabled(logits.device.type) else made.to(logits.dtype)


class ReplacedHead(Replacement):
    """The last layer of a language model."""

    def replaced(self, *args: Any, **options: Any) -> Any:
        """Pending logits in training, where they are large; the original for anything else."""
        if options or len(args) != 1 or not _is_worth(self, args[0]):  # type: ignore[arg-type]
            return self.original(*args, **options)
        own = self.__dict__["_parameters"]
        x, weight, bias = args[0], own["weight"], own["bias"]
        written = tuple((t, version(t)) for t in (x, weight, bias) if t is not None)
        dtype = _type_of(x)
        bias = None if bias is None else bias.to(dtype)
        source = Source(x.to(dtype), weight.to(dtype), bias, written)
        shape = (*x.shape[:-1], weight.shape[0])
        return PendingLogits.of(source, torch.empty(shape, dtype=dtype, device="meta"))


def _type_of(x: Tensor) -> torch.dtype:
    """The type of a product of x, which autocast decides."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _is_worth(layer: nn.Module, x: Any) -> bool:
    """True if the logits of a call are better computed where they are needed."""
    tensors = [t for t in layer.__dict__["_parameters"].values() if t is not None]
    if not (is_plain() and torch.is_grad_enabled()) or is_observed(layer):
        return False
    if type(x) not in _PLAIN or any(type(t) not in _PLAIN for t in tensors):
        return False
    if x.device.type not in KERNEL_DEVICES or _type_of(x) not in _TYPES:
        return False
    if any(t.dtype != x.dtype or t.device != x.device for t in tensors):
        return False
    recorded = any(t.requires_grad for t in (x, *tensors))
    rows = x.numel() // x.shape[-1] if x.dim() and x.shape[-1] else 0
    return recorded and 2 * rows * tensors[0].shape[0] >= LEAST_BYTES


@dataclass(frozen=True)
class Found:
    """The last layer of a language model."""

    def __str__(self) -> str:
        return "cs.ops.linear_cross_entropy, if a loss alone sees the logits"


def find(layer: nn.Module) -> Found:
    """The description of the layer."""
    del layer
    return Found()


def head_of(model: nn.Module) -> tuple[str, nn.Module] | None:
    """Path and module of the layer that makes logits, as models of transformers name it."""
    find = getattr(model, "get_output_embeddings", None)
    layer = find() if callable(find) else None
    if type(layer) is not nn.Linear:
        return None
    paths = (path for path, m in model.named_modules() if m is layer)
    path = next(paths, None)
    return None if path is None else (path, layer)


def install(layer: nn.Module, how: Found) -> list[nn.Module]:
    """Replace the layer; returns the original."""
    replace_module(layer, ReplacedHead, how)
    return [layer]
