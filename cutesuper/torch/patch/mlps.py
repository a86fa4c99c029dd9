"""Gated MLPs of a model, ``down(activation(gate(x)) * up(x))``, recognized by their results.

A candidate has three linear layers, or two of which the first makes gate and up. The roles of the
layers and the activation are determined by calling a small copy.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from cutesuper.torch.ops.rowwise.activations import geglu, swiglu
from cutesuper.torch.patch import fused
from cutesuper.torch.patch.probing import Failed, close_to, drawn, replace_checked, run
from cutesuper.torch.patch.replacement import HOW, Replacement, copied, is_observed
from cutesuper.torch.patch.usual_calls import are_alike, is_usual

Activation = Literal["silu", "gelu", "gelu_tanh"]

ACTIVATIONS: dict[Activation, Any] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}

#: why three layers of equal extents are left that are not called one after the other
_NO_MLP = (
    "it is no gated MLP; if these are the projections of attention, they are computed together "
    "only beside the layer that follows attention"
)

#: extents of the small copy
WIDTH, HIDDEN, ROWS = 16, 24, 6


@dataclass(frozen=True)
class WholeMLP:
    """A gated MLP as a function of a tensor and its layers' matrices, each before its bias.

    Attributes:
        activation: of the gate.
        gate_first: whether the first half of a layer that makes both is the gate.
        biases: whether each layer has one.
    """

    activation: Activation
    gate_first: bool
    biases: tuple[bool, ...]

    def __call__(self, x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        """The result alone."""
        given = iter(parameters)

        def layer(t: Tensor, bias: bool) -> Tensor:
            return F.linear(t, next(given), next(given) if bias else None)

        *first, last = self.biases
        gate, up = split([layer(x, b) for b in first], self.gate_first)
        return (layer(ACTIVATIONS[self.activation](gate) * up, last),)

    def __str__(self) -> str:
        return f"gated MLP with {self.activation}"


def split(made: list[Tensor], gate_first: bool) -> tuple[Tensor, Tensor]:
    """Gate and up, from the results of the layers before the last."""
    if len(made) == 2:
        return made[0], made[1]
    first, second = made[0].chunk(2, -1)
    return (first, second) if gate_first else (second, first)


@dataclass(frozen=True)
class GatedMLP:
    """The computation of a gated MLP.

    Attributes:
        activation: of the gate.
        layers: names of the layers: gate, up, down, or the one that makes both and down.
        gate_first: whether the first half of a layer that makes both is the gate.
        others: children that are not layers, like the activation; they are not called.
    """

    activation: Activation
    layers: tuple[str, ...]
    gate_first: bool = True
    others: tuple[nn.Module | None, ...] = ()

    def __str__(self) -> str:
        operator = "swiglu" if self.activation == "silu" else f"geglu, {self.activation}"
        return f"cs.ops.{operator}"

    def rest(self, modules: dict[str, Any]) -> tuple[nn.Module | None, ...]:
        """Children that are not layers."""
        return tuple(m for n, m in modules.items() if n not in self.layers)

    def may_skip(self, modules: dict[str, Any]) -> bool:
        """True if the children that are not layers are unchanged, and have no hooks."""
        rest = self.rest(modules)
        return len(rest) == len(self.others) and all(
            m is own and (m is None or not is_observed(m))
            for m, own in zip(rest, self.others, strict=True)
        )

    def whole(self, layers: list[Any]) -> tuple[WholeMLP, list[Tensor]]:
        """The MLP as a function, and its parameters."""
        parameters, biases = fused.parameters_of(layers)
        return WholeMLP(self.activation, self.gate_first, biases), parameters

    def exact(self, module: nn.Module, x: Tensor) -> Tensor:
        """The definition, in float64."""
        function, parameters = self.whole([getattr(module, n) for n in self.layers])
        return function(x.double(), *[p.double() for p in parameters])[0]


class ReplacedMLP(Replacement):
    """A gated MLP."""

    def replaced(self, *args: Any, **options: Any) -> Any:
        """The MLP of one tensor; the original for anything else."""
        how: GatedMLP = self.__dict__[HOW]
        modules: dict[str, nn.Module] = self.__dict__["_modules"]
        unusual = options or len(args) != 1 or not is_usual(args[0])
        if unusual or not how.may_skip(modules):
            return self.original(*args, **options)
        layers = [modules[n] for n in how.layers]
        if all(type(m) is nn.Linear and not is_observed(m) for m in layers):
            made = fused.run(*how.whole(layers), args[0])
            if made is not None:
                return made[0]
        gate, up = split([layer(args[0]) for layer in layers[:-1]], how.gate_first)
        return layers[-1](_gated(how.activation, gate, up))


def _gated(activation: Activation, gate: Tensor, up: Tensor) -> Tensor:
    if not are_alike(gate, up):  # a layer that was replaced may return anything
        return ACTIVATIONS[activation](gate) * up
    if activation == "silu":
        return swiglu(gate, up)
    return geglu(gate, up, approximate="none" if activation == "gelu" else "tanh")


# --------------------------------------------------------------------------------------- finding it


def is_candidate(module: nn.Module) -> bool:
    """True if a module may be a gated MLP, by its layers."""
    layers = _layers(module)
    if len(layers) not in (2, 3) or not _takes_one(module):
        return False
    return any(True for _ in _roles(layers))


def _takes_one(module: nn.Module) -> bool:
    try:
        inspect.signature(module.forward).bind(None)
    except (TypeError, ValueError):
        return False
    return True


def _layers(module: nn.Module) -> dict[str, nn.Linear]:
    return {n: m for n, m in module.named_children() if isinstance(m, nn.Linear)}


def _roles(layers: dict[str, nn.Linear]) -> Iterator[tuple[str, ...]]:
    """Names of gate, up and down, or of the combined layer and down, as their extents allow."""
    for names in permutations(layers):
        *first, down = (layers[n] for n in names)
        outputs = (down.in_features,) * 2 if len(first) == 2 else (2 * down.in_features,)
        if tuple(m.out_features for m in first) == outputs and all(
            m.in_features == down.out_features for m in first
        ):
            yield names


def find(module: nn.Module) -> GatedMLP:
    """The computation of a candidate.

    Raises:
        Failed: no known computation, with the reason.
    """
    layers = _layers(module)
    for name, child in module.named_children():
        if name not in layers and (any(True for _ in child.children()) or is_observed(child)):
            raise Failed(f"{name} has parts of its own, or its calls are observed")
        if name in layers and (type(child) is not nn.Linear or is_observed(child)):
            raise Failed(f"{name} is more than a linear layer of PyTorch")
    x = drawn(ROWS, WIDTH, seed=0)
    for names in _roles(layers):
        twin = _small(module, names)
        try:
            found = run(twin, x)
        except Failed as error:
            if len({m.weight.shape for m in layers.values()}) == 1:
                raise Failed(_NO_MLP) from error
            raise
        for activation in ACTIVATIONS:
            for gate_first in (True,) if len(names) == 3 else (True, False):
                how = GatedMLP(activation, names, gate_first)
                if close_to(found, how.exact(twin, x)):
                    return how
    known = ", ".join(ACTIVATIONS)
    raise Failed(f"it does not compute down(activation(gate(x)) * up(x)) with one of {known}")


def _small(module: nn.Module, names: tuple[str, ...], like: Tensor | None = None) -> nn.Module:
    """A copy with layers of other extents and weights, on the CPU or like a tensor."""
    hidden = HIDDEN if len(names) == 3 else 2 * HIDDEN
    extents = [(hidden, WIDTH)] * (len(names) - 1) + [(WIDTH, HIDDEN)]
    parts: dict[str, nn.Module] = {}
    for seed, (name, (outputs, inputs)) in enumerate(zip(names, extents, strict=True)):
        own: Any = getattr(module, name)
        layer = nn.Linear(inputs, outputs, bias=own.bias is not None, device="meta")
        # outputs with a standard deviation of 2: activations are almost linear near 0
        weight = drawn(outputs, inputs, seed=2 * seed) * 2 * inputs**-0.5
        for k, values in (("weight", weight), ("bias", drawn(outputs, seed=2 * seed + 1))):
            if getattr(layer, k) is not None:
                values = values if like is None else values.to(like.device, like.dtype)
                layer._parameters[k] = nn.Parameter(values, requires_grad=False)
        parts[name] = layer
    return copied(module, **parts)


def install(module: nn.Module, how: GatedMLP) -> list[nn.Module]:
    """Let a gated MLP compute with `cutesuper.ops`, if the result is the same.

    Returns:
        The modules that were replaced.

    Raises:
        Failed: the result differs, or there are no kernels for it.
    """
    like: Any = getattr(module, how.layers[-1]).weight
    twin = _small(module, how.layers, like)
    x = drawn(ROWS, WIDTH, seed=1, like=like)

    def described(m: nn.Module) -> GatedMLP:
        return replace(how, others=how.rest(m._modules))

    return replace_checked(module, twin, ReplacedMLP, described, x, how.exact(twin, x))
