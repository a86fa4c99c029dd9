"""Operators inside models that are built as those of the transformers library are.

The models here have classes with the names, attributes and rounding of that library's; where it is
installed, `examples/transformers_llama.py` runs on its own models too.
"""

from __future__ import annotations

import copy
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class LlamaRMSNorm(nn.Module):
    """Rounds what it has normalized before it multiplies with the weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width).uniform_(0.5, 1.5))
        self.variance_epsilon = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        rows = x.float()
        scale = (rows.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()
        return self.weight * (rows * scale).to(x.dtype)


class GemmaRMSNorm(nn.Module):
    """Keeps the difference of its weight from 1, and rounds once, at the end."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width).uniform_(-0.5, 0.5))
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        rows = x.float()
        scale = (rows.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return (rows * scale * (1.0 + self.weight.float())).to(x.dtype)


class GatedMLP(nn.Module):
    """The activation that the configuration names, of one product, times another product."""

    ACTIVATIONS = {  # noqa: RUF012
        "silu": F.silu,
        "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    }

    def __init__(self, width: int, activation: str) -> None:
        super().__init__()
        self.config = SimpleNamespace(hidden_act=activation)
        self.gate_proj, self.up_proj = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.ACTIVATIONS[self.config.hidden_act](self.gate_proj(x))
        return self.down_proj(gate * self.up_proj(x))


class Decoder(nn.Module):
    """Layers of causal attention, whose heads may be normalized, and gated MLPs."""

    def __init__(
        self, norm: type[nn.Module], activation: str, width: int, head_norms: bool
    ) -> None:
        super().__init__()
        self.head = 32
        self.config = SimpleNamespace(vocab_size=500)
        self.embedding = nn.Embedding(500, width)
        self.layers = nn.ModuleList(
            nn.ModuleDict({
                "before": norm(width), "between": norm(width), "mlp": GatedMLP(width, activation),
                "qkv": nn.Linear(width, 3 * width, bias=False),
                **({"q_norm": norm(self.head), "k_norm": norm(self.head)} if head_norms else {}),
            })
            for _ in range(2)
        )  # fmt: skip
        self.norm = norm(width)

    def forward(self, input_ids: Tensor) -> SimpleNamespace:
        x = self.embedding(input_ids)
        for layer in self.layers:
            q, k, v = (
                t.unflatten(-1, (-1, self.head))
                for t in layer["qkv"](layer["before"](x)).chunk(3, -1)
            )
            if "q_norm" in layer:  # of the strided parts of one product, as they come
                q, k = layer["q_norm"](q), layer["k_norm"](k)
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + y.transpose(1, 2).flatten(2)
            x = x + layer["mlp"](layer["between"](x))
        return SimpleNamespace(logits=F.linear(self.norm(x), self.embedding.weight))


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example as a module."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("transformers_llama")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("norm", "activation", "head_norms"),
    [
        (LlamaRMSNorm, "silu", False),
        (LlamaRMSNorm, "silu", True),
        (GemmaRMSNorm, "gelu_pytorch_tanh", False),
    ],
    ids=["llama", "norms of heads", "gemma"],
)
def test_parts_of_a_model_replaced(
    example: Any, norm: type[nn.Module], activation: str, head_norms: bool, device: str
) -> None:
    torch.manual_seed(1)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    theirs = Decoder(norm, activation, 128, head_norms).to(device, dtype)
    for p in theirs.parameters():
        if p.ndim == 2:
            nn.init.normal_(p, std=p.shape[1] ** -0.5)
    ours = copy.deepcopy(theirs)
    assert example.replace_parts(ours) == f"{9 if head_norms else 5} norms, 2 MLPs, the loss"
    tokens = torch.randint(500, (3, 40), device=device)
    assert example.compare(theirs, ours, tokens)


def test_a_wrong_part_is_noticed(example: Any) -> None:
    torch.manual_seed(2)
    theirs = Decoder(LlamaRMSNorm, "silu", 64, False)
    ours = copy.deepcopy(theirs)
    example.replace_parts(ours)
    ours.norm.eps = 1e-4
    assert not example.compare(theirs, ours, torch.randint(500, (2, 16)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model", ["llama", "qwen3", "gemma"])
def test_models_of_the_library(
    model: str,
    device: str,
    example: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In this process: importing the library takes most of the time."""
    pytest.importorskip("transformers")
    monkeypatch.setattr(sys, "argv", [example.__file__, "--device", device, "--model", model])
    assert example.main() == 0
    printed = capsys.readouterr().out
    assert ": within the rule" in printed and " 0 norms" not in printed
