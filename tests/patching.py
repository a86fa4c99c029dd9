"""Small models of the transformers library with random weights, for the tests of `cs.patch`."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from cutesuper.torch.patch import attention as decoding

F = torch.nn.functional

EXTENTS = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
#: norms in a model
FAMILIES = {"Llama": 5, "Mistral": 5, "Qwen2": 5, "Qwen3": 9, "Gemma": 5}
DTYPES = (torch.float32, torch.bfloat16)


def new_model(family: str, **options: Any) -> Any:
    """A model with random weights, none of which are all the same, for inference."""
    torch.manual_seed(0)
    if family == "Mistral":  # by default it has one, which newer models have not
        options = {"sliding_window": None} | options
    config = getattr(transformers, f"{family}Config")(**(EXTENTS | options))
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for name, p in model.named_parameters():
        if p.ndim == 1:  # norms and biases
            nn.init.uniform_(p, -0.5, 0.5)
            p.data += "norm" in name and family != "Gemma"
        elif "proj" in name:
            nn.init.normal_(p, std=p.shape[1] ** -0.5)
    return model


def in_float64(model: Any) -> Any:
    """A copy that computes in float64; norms of the library go through float32 in any type."""
    exact = copy.deepcopy(model).double()
    for module in exact.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(_exact_norm, module)
    return exact


def _exact_norm(module: Any, x: Any) -> Any:
    offset = float(type(module).__name__.startswith("Gemma"))
    eps = getattr(module, "eps", None) or module.variance_epsilon
    return F.rms_norm(x, x.shape[-1:], module.weight + offset, eps)


#: two prompts
TOKENS = torch.randint(2, 128, (2, 12), generator=torch.Generator().manual_seed(1))


def facts(model: Any) -> list[Any]:
    """All that undo must give back."""
    return [
        (path, id(m), type(m), {k: id(v) for k, v in vars(m).items()},
         {k: id(v) for k, v in {**m._parameters, **m._buffers, **m._modules}.items()})
        for path, m in model.named_modules()
    ]  # fmt: skip


def paths(entries: Any) -> set[str]:
    """The paths of entries of a report."""
    return {e.path for e in entries}


def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the queries of all calls of `cutesuper.ops.attention` by models from now on."""
    seen: list[tuple[int, ...]] = []
    attention = decoding.attention

    def call(query: Any, *args: Any, **options: Any) -> Any:
        seen.append(tuple(query.shape))
        return attention(query, *args, **options)

    monkeypatch.setattr(decoding, "attention", call)
    return seen
