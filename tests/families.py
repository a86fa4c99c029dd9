"""Small models of the transformers library: a step of decoding, a prompt, a step of training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from cutesuper.ir.graph import Node
from cutesuper.ir.operators.base import CONSTANT, INPUT
from cutesuper.torch.compile import backend
from cutesuper.torch.compile.options import read_options
from cutesuper.torch.compile.region import Region
from cutesuper.torch.compile.report import GraphReport
from cutesuper.torch.internals import run_eagerly

#: extents of all models
SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_hidden_layers": 1, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 16}
#: name -> its configuration and model in transformers, and extents other than those of all
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 16}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {**GEMMA, "num_hidden_layers": 2}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {
        **GEMMA, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 16}),
    "phi": ("PhiConfig", "PhiForCausalLM", {}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {
        "n_embd": 64, "n_layer": 1, "n_head": 4, "n_positions": 128, "embd_pdrop": 0.0,
        "attn_pdrop": 0.0, "resid_pdrop": 0.0}),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {"num_local_experts": 4}),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {
        "head_dim": 16, "num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2}),
}  # fmt: skip
#: sequences, tokens of their prompts, how many of the second are padding, and places in the cache
BATCH, PROMPT, PADDING, LENGTH = 2, 8, 3, 32


def model_of(name: str) -> Any:
    """A small model of a family, with random weights."""
    import transformers

    config, kind, own = FAMILIES[name]
    torch.manual_seed(0)
    sizes = {k: v for k, v in SIZES.items() if name != "gpt2" or k.endswith(("_id", "vocab_size"))}
    return getattr(transformers, kind)(getattr(transformers, config)(**{**sizes, **own})).eval()


def inputs_of(model: Any, what: str) -> dict[str, Any]:
    """Arguments of a "step" behind a prompt, or of a "prompt" with a cache that is empty; "padded
    step" and "padded prompt" of sequences with padding on the left."""
    from transformers import StaticCache

    torch.manual_seed(1)
    cache = StaticCache(config=model.config, max_cache_len=LENGTH)
    tokens, shown = torch.randint(3, 90, (BATCH, PROMPT)), torch.ones(BATCH, PROMPT + 1).long()
    shown[1:, :PADDING] = 0
    padded = {"attention_mask": shown[:, :PROMPT]} if what.startswith("padded") else {}
    model(input_ids=tokens, past_key_values=cache, **padded)  # a first call allocates the cache
    if what.endswith("step"):
        padded = {"attention_mask": shown} if padded else {}
        places = shown.sum(1, keepdim=True) - 1 if padded else torch.full((BATCH, 1), PROMPT)
        return {"input_ids": tokens[:, :1].clone(), "past_key_values": cache,
                "position_ids": places, **padded}  # fmt: skip
    cache.reset()
    return {"input_ids": tokens, "past_key_values": cache, "logits_to_keep": 1, **padded}


def batch_of(model: Any) -> dict[str, Any]:
    """Arguments of a step of training, with padding behind the second sequence."""
    torch.manual_seed(1)
    tokens, shown = torch.randint(3, 90, (BATCH, LENGTH)), torch.ones(BATCH, LENGTH).long()
    shown[1, -PADDING:] = 0
    return {"input_ids": tokens, "attention_mask": shown, "labels": tokens.where(shown > 0, -100)}


def gradients(model: Any, call: Any, given: dict[str, Any]) -> list[torch.Tensor]:
    """The gradients of the parameters that have one."""
    loss = call(**given).loss
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return [t for t in found if t is not None]


#: PyTorch folds memory that nothing is stored in, if it happens to hold equal elements
NOT_SET = "empty_like (aten.empty.memory_format) is not an operator of kernel graphs"
FOLDED = "makes a tensor of torch.int64"


def taken(call: Callable[[Any], Any], model: Any, monkeypatch: Any) -> tuple[Any, str]:
    """What a function of the compiled model gives, if all its regions run the reference, and what
    was taken as text."""
    found: list[Region] = []
    decide = backend.decide
    monkeypatch.setattr(
        backend, "decide", lambda r, *a, **options: found.extend(r) or decide(r, *a, **options)
    )
    reports: list[GraphReport] = []
    compiled = partial(
        backend.compile_graph, options=read_options({"take": "all"}), observe=reports.append,
        finish=run_eagerly,
    )  # fmt: skip
    torch.compiler.reset()
    result = call(torch.compile(model, backend=compiled))
    assert all(r.verdict.taken for g in reports for r in g.regions)
    lines = [_operators(region) for region in found]
    for report in reports:
        counts = Counter[str]()
        for o in report.outside:
            counts[FOLDED if o.reason == NOT_SET else o.reason] += o.operators
        lines += [f"outside: {count} x {reason}" for reason, count in counts.items()]
    return result, "".join(f"{line}\n" for line in lines)


def _operators(region: Region) -> str:
    left_out = (INPUT, CONSTANT, "transpose", "convert")
    return " ".join(_name(n) for n in region.graph.nodes if n.operator not in left_out)


def _name(node: Node) -> str:
    """An operator, and how its mask is given."""
    causal = node.attributes.get("is_causal") or node.attributes.get("causal")
    masks = ["causal"] if causal else []
    if node.operator == "scaled_dot_product_attention":
        masks += ["lengths"] * (len(node.inputs) > 3)
    return f"{node.operator}({', '.join(masks)})" if masks else node.operator
