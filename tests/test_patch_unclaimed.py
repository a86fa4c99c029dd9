"""Modules that `cs.patch` leaves, and the reasons in its report."""

from __future__ import annotations

from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

import cutesuper as cs  # noqa: E402

SMALL: dict[str, Any] = {
    "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96, "num_hidden_layers": 2,
    "vocab_size": 50,
}  # fmt: skip
IDS = {f"{n}_token_id": 0 for n in ("pad", "bos", "eos", "decoder_start")}
HALVES: dict[str, Any] = {
    f"{side}_{name}": n
    for side in ("encoder", "decoder")
    for name, n in (("layers", 1), ("attention_heads", 4), ("ffn_dim", 96))
}
LEFT: dict[str, tuple[Any, dict[str, tuple[str, ...]]]] = {
    "gelu": (
        lambda: transformers.BertModel(transformers.BertConfig(**SMALL)),
        {"has no gate": ("encoder.layer.0", "encoder.layer.1"),
         "projections of attention": tuple(f"encoder.layer.{n}.attention.self" for n in (0, 1))},
    ),
    "conv1d": (
        lambda: transformers.GPT2Model(transformers.GPT2Config(
            n_layer=1, n_embd=64, n_head=4, vocab_size=50, bos_token_id=0, eos_token_id=0)),
        {"has no gate": ("h.0.mlp",)},
    ),
    "experts": (
        lambda: transformers.MixtralModel(transformers.MixtralConfig(
            **SMALL, num_key_value_heads=2, num_local_experts=4)),
        {"rows of each expert": tuple(f"layers.{n}.mlp.experts" for n in (0, 1))},
    ),
    "crossed": (
        lambda: transformers.WhisperModel(transformers.WhisperConfig(
            **HALVES, **IDS, d_model=64, vocab_size=50)),
        {"k_proj, v_proj of hidden_states and key": ("decoder.layers.0.encoder_attn",),
         "has no gate": ("encoder.layers.0", "decoder.layers.0")},
    ),
    "crossed, by another name": (
        lambda: transformers.T5Model(transformers.T5Config(
            d_model=64, d_kv=16, d_ff=96, num_layers=1, num_heads=4, vocab_size=50, **IDS)),
        {"k, v of hidden_states and key": ("decoder.block.0.layer.1.EncDecAttention",),
         "has no gate": ("encoder.block.0.layer.1.DenseReluDense",
                         "decoder.block.0.layer.2.DenseReluDense")},
    ),
    "positions of queries and keys": (
        lambda: transformers.models.detr.modeling_detr.DetrEncoderLayer(transformers.DetrConfig(
            **HALVES, d_model=64, use_timm_backbone=False, use_pretrained_backbone=False)),
        {"v_proj of hidden_states)": ("self_attn",), "has no gate": ("mlp",)},
    ),
    "gated": (
        lambda: transformers.LlamaModel(transformers.LlamaConfig(**SMALL)), {},
    ),
    "no attention": (
        lambda: transformers.MambaModel(transformers.MambaConfig(
            hidden_size=64, num_hidden_layers=1, vocab_size=50)),
        {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_is_named_with_its_reason(name: str) -> None:
    make, expected = LEFT[name]
    report = cs.patch(make().eval()).report()
    left = report.left
    assert max(map(len, str(report).splitlines())) <= 120
    for reason, paths in expected.items():
        assert tuple(e.path for e in left if reason in e.why) == paths
    assert len(left) == sum(map(len, expected.values())), left
    assert not any("Error" in e.why for e in left)
