"""Projections of attention: linear layers of one tensor, computed together.

The model still calls the layers one after the other. The first call computes all products, by one
program, and the others return theirs if they are called with the same tensor, unchanged. Otherwise
each layer computes its own product.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cutesuper.torch.patch import fused
from cutesuper.torch.patch.probing import Failed
from cutesuper.torch.patch.reading import operands
from cutesuper.torch.patch.replacement import HOW, Replacement, replace
from cutesuper.torch.patch.usual_calls import version


@dataclass(frozen=True)
class Products:
    """Products of one tensor with several matrices, each followed by its bias.

    Attributes:
        biases: whether each layer has one.
    """

    biases: tuple[bool, ...]

    def __call__(self, x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        """One tensor for each layer."""
        given = iter(parameters)
        return tuple(F.linear(x, next(given), next(given) if b else None) for b in self.biases)

    def __str__(self) -> str:
        return f"{len(self.biases)} products of one tensor"


@dataclass
class _Waiting:
    """Products that were computed before they are requested.

    Attributes:
        thread: that computed them.
        x: the operand, and its version then.
        parameters: of the layers, and their versions then.
        made: by the place of the layer.
    """

    thread: int
    x: Tensor
    version: int
    parameters: list[tuple[Tensor, int]]
    made: dict[int, Tensor]

    def hold(self, x: Any, parameters: list[Tensor]) -> bool:
        """True if they are the products of x with these parameters."""
        return (
            self.x is x
            and self.version == version(x)
            and all(
                p is own and made == version(p)
                for p, (own, made) in zip(parameters, self.parameters, strict=True)
            )
        )


class Group:
    """Layers that may be called with one tensor, one after the other."""

    def __init__(self, layers: tuple[nn.Linear, ...]) -> None:
        self._layers = layers
        self._waiting: _Waiting | None = None
        self._apart = False

    def __getstate__(self) -> dict[str, Any]:
        """The state of a copy, which begins without products."""
        return {"_layers": self._layers, "_waiting": None, "_apart": self._apart}

    def product(self, layer: nn.Module, x: Any) -> Tensor | None:
        """The product of a layer with x; None if the layer should compute it itself."""
        place = next((n for n, own in enumerate(self._layers) if own is layer), None)
        if place == 0:
            return self._lead(x)
        waiting = self._waiting
        if waiting is None or place is None or waiting.thread != threading.get_ident():
            return None
        parameters, _ = fused.parameters_of(self._layers)
        if len(parameters) != len(waiting.parameters) or not waiting.hold(x, parameters):
            return None
        made = waiting.made.pop(place, None)
        if not waiting.made:
            self._waiting = None
        return made

    def _lead(self, x: Any) -> Tensor | None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None and waiting.thread == threading.get_ident():
            self._apart = True  # the products of the previous call were not requested
        # writes to an inference tensor, which has no version, go unnoticed
        if self._apart or (isinstance(x, Tensor) and x.is_inference()):
            return None
        parameters, biases = fused.parameters_of(self._layers)
        made = fused.run(Products(biases), parameters, x)
        if made is None:
            return None
        rest = dict(enumerate(made[1:], 1))
        versions = [(p, version(p)) for p in parameters]
        self._waiting = _Waiting(threading.get_ident(), x, version(x), versions, rest)
        return made[0]


class ReplacedProjection(Replacement):
    """One of several linear layers of the same tensor."""

    def replaced(self, *args: Any, **options: Any) -> Any:
        """The layer's product, computed before if possible."""
        made = None
        alone = torch.is_grad_enabled() or torch.compiler.is_compiling()
        if not (alone or options or len(args) != 1):
            made = self.__dict__[HOW].product(self, args[0])
        return self.original(*args, **options) if made is None else made


@dataclass(frozen=True)
class Projections:
    """Names of the linear layers of a module that are called with the same tensor."""

    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"{', '.join(self.names)} in one program"


def is_candidate(module: nn.Module) -> bool:
    """True if a module may be attention, by the sizes of its layers.
    The first three of its four or more layers have one number of inputs; the second and third have
    one number of outputs, which divides the first's."""
    layers = [m for m in module.children() if isinstance(m, nn.Linear)]
    if len(layers) < 4 or len({m.in_features for m in layers[:3]}) != 1:
        return False
    q, k, v, o = (m.out_features for m in layers[:4])
    return k == v and q % k == 0 and o == layers[0].in_features and layers[3].in_features == q


def apart(model: nn.Module, path: str) -> str:
    """The reason why the projections of a candidate are not computed together; empty if they are.
    The code of the candidate and its owner says that they take different tensors, as in attention
    to the states of an encoder, or with positions that are added to queries and keys alone."""
    where, _, name = path.rpartition(".")
    names = _names(model.get_submodule(path)) if name else ()
    taken = operands(model.get_submodule(where), name, names) if names else []
    if len(set(taken)) < 2:
        return ""
    told = [
        f"{', '.join(n for n, t in zip(names, taken, strict=True) if t == kind)} of "
        f"{' and '.join(sorted(kind)) or 'another'}"
        for kind in dict.fromkeys(taken)
    ]
    return (
        f"its layers take different tensors ({'; '.join(told)}), and no program makes them together"
    )


def _names(module: nn.Module) -> tuple[str, ...]:
    """The names of the projections of a candidate."""
    return tuple(n for n, m in module.named_children() if isinstance(m, nn.Linear))[:3]


def find(module: nn.Module) -> Projections:
    """The projections of a candidate.

    Raises:
        Failed: one of them is more than a product.
    """
    names = _names(module)
    for name in names:
        layer = getattr(module, name)
        if type(layer) is not nn.Linear or "forward" in layer.__dict__:
            raise Failed(f"{name} is more than a linear layer of PyTorch")
    return Projections(names)


def install(module: nn.Module, how: Projections) -> list[nn.Module]:
    """Let projections compute together where they can.

    Nothing is checked here; each program is checked before it is used.

    Returns:
        The modules that were replaced.
    """
    layers = [getattr(module, name) for name in how.names]
    group = Group(tuple(layers))
    for layer in layers:
        replace(layer, ReplacedProjection, group)
    return layers
