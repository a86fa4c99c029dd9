"""Training steps as users set them up: checkpointing, autocast, several backward passes before a
step, float32 gradients of 16-bit parameters, batches and lengths that differ from call to call.

One table for the tests without a GPU and with one. Losses and gradients are held against the same
model in float64: the error may be `TIMES` that of PyTorch alone under the same settings.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import cutesuper as cs
from tests.backends import Block, GatedMLP

TOKENS = 96
#: errors of a few hundred roundings differ by chance
TIMES = 2.0


class LanguageModel(nn.Module):
    """Tokens to the loss of the next ones, through layers that may be checkpointed."""

    def __init__(self, layer: Callable[[], nn.Module], width: int, ours: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, width)
        self.layers = nn.ModuleList([layer()])
        self.norm = (cs.nn.RMSNorm if ours else nn.RMSNorm)(width, eps=1e-5)
        self.head = nn.Linear(width, TOKENS, bias=False)
        self.ours, self.checkpointed = ours, False

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        logits, target = self.head(self.norm(x))[:, :-1], ids[:, 1:]
        if self.ours:
            return cs.ops.cross_entropy(logits, target)
        return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


class OurMLP(GatedMLP):
    """The gated MLP with operators of this package."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(width, hidden)
        self.norm = cs.nn.RMSNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.down(cs.ops.swiglu(self.gate(h), self.up(h)))


@dataclass(frozen=True)
class Setting:
    """How a model is trained.

    Attributes:
        checkpointed: layers are computed again in the backward pass.
        autocast: products are bfloat16, parameters float32; else all is bfloat16.
        wide: gradients are float32, whatever the parameters are.
        shapes: of the batches whose gradients are added up.
        dynamic: whether one compilation serves all of them.
    """

    checkpointed: bool = False
    autocast: bool = False
    wide: bool = False
    shapes: tuple[tuple[int, int], ...] = ((2, 16),)
    dynamic: bool | None = None

    def prepared(self, model: nn.Module) -> nn.Module:
        """A model with parameters and gradients of the setting's types."""
        model = model if self.autocast else model.bfloat16()
        model.checkpointed = self.checkpointed  # type: ignore[assignment]
        for p in model.parameters() if self.wide else ():
            p.grad_dtype = torch.float32  # type: ignore[attr-defined]
        return model

    def around(self, device: str) -> contextlib.AbstractContextManager[Any]:
        """The context of forward passes."""
        enabled = torch.autocast(device, torch.bfloat16)
        return enabled if self.autocast else contextlib.nullcontext()


SETTINGS: dict[str, Setting] = {
    "checkpointing": Setting(checkpointed=True),
    "autocast": Setting(autocast=True),
    "autocast, checkpointing": Setting(autocast=True, checkpointed=True),
    "accumulation": Setting(shapes=((2, 16),) * 3),
    "accumulation in float32": Setting(shapes=((2, 16),) * 3, wide=True),
    "dynamic": Setting(shapes=((2, 16), (3, 24), (4, 9)), dynamic=True),
    "all of it": Setting(True, True, False, ((2, 16), (3, 24)), True),
}

#: name -> makes a model of a width
MODELS: dict[str, Callable[[int], nn.Module]] = {
    "block": lambda n: LanguageModel(lambda: Block(n, 4), n),
    "gated MLP": lambda n: LanguageModel(lambda: GatedMLP(n, 2 * n), n),
    "ours": lambda n: LanguageModel(lambda: OurMLP(n, 2 * n), n, ours=True),
}
#: the same models without operators of this package
PLAIN = {"ours": "gated MLP"}


def supported(setting: Setting) -> bool:
    """False where this PyTorch has no gradients of another type than their parameters."""
    return not setting.wide or hasattr(torch.Tensor, "grad_dtype")


def judge_setting(
    name: str,
    width: int,
    setting: Setting,
    compiled: Callable[[nn.Module], Any],
    device: str = "cpu",
) -> None:
    """Train a compiled model, PyTorch's and one in float64 on the same tokens, and compare losses
    and gradients."""
    model, plain = (MODELS[n](width).to(device) for n in (name, PLAIN.get(name, name)))
    plain.load_state_dict(model.state_dict())
    exact = copy.deepcopy(plain).double()
    models = [setting.prepared(model), setting.prepared(plain)]
    calls = [compiled(models[0]), models[1]]
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(TOKENS, s, generator=generator).to(device) for s in setting.shapes]
    for ids in batches:
        losses = [_backward(call, ids, setting.around(device)) for call in calls]
        want = _backward(exact, ids, contextlib.nullcontext())
        assert _error(losses[0], want) <= TIMES * _error(losses[1], want) + 2e-3
    found = zip(models[0].parameters(), models[1].parameters(), exact.parameters(), strict=True)
    for ours, theirs, want in found:
        assert ours.grad.dtype == theirs.grad.dtype
        assert _error(ours.grad, want.grad) <= TIMES * _error(theirs.grad, want.grad) + 1e-3


def _backward(call: Any, ids: torch.Tensor, around: Any) -> torch.Tensor:
    with around:
        loss = call(ids)
    loss.backward()
    return loss.detach()


def _error(found: torch.Tensor, want: torch.Tensor) -> float:
    return float((found.double() - want).norm() / want.norm())


def judge_into(add: Callable[..., Any], tensors: Sequence[torch.Tensor], call: Any) -> None:
    """Compare a function that adds to its last tensor in place, compiled and not."""
    *rest, into = tensors
    ours, theirs, exact = into.clone(), into.clone(), into.double()
    call(*rest, ours)
    add(*rest, theirs)
    add(*(t.double() for t in rest), exact)
    assert _error(ours, exact) <= TIMES * _error(theirs, exact) + 1e-6
