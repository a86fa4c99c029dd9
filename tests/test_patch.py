"""`cs.patch`: models of the transformers library that compute with cutesuper, without a GPU."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest

import cutesuper as cs
from cutesuper.errors import PatchError

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import transformers  # noqa: E402
from torch import nn  # noqa: E402
from transformers.masking_utils import create_causal_mask  # noqa: E402

from cutesuper.torch.patch import attention as decoding  # noqa: E402 (it imports transformers)
from cutesuper.verify.numeric import acceptable  # noqa: E402
from tests.patching import FAMILIES, TOKENS, counted, facts, in_float64, new_model, paths  # noqa: E402

F = torch.nn.functional
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    """A model of each family, to be left as it is."""
    return {family: new_model(family) for family in FAMILIES}


@pytest.fixture
def llama(models: dict[str, Any]) -> Any:
    return copy.deepcopy(models["Llama"])


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    return counted(monkeypatch)


# --- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits(family: str, dtype: Any, models: dict[str, Any], calls: Any) -> None:
    model = copy.deepcopy(models[family]).to(dtype)

    def logits(of: Any) -> tuple[Any, Any]:
        """Logits of a prompt, and of two more tokens that are decoded with a cache of fixed
        length."""
        cache = transformers.StaticCache(of.config, max_cache_len=20)
        prompt = of(TOKENS[:, :10], past_key_values=cache).logits
        decoded = [of(TOKENS[:, n : n + 1], past_key_values=cache).logits for n in (10, 11)]
        return prompt, torch.cat(decoded, 1)

    with torch.no_grad():
        exact, theirs = logits(in_float64(model)), logits(model)
        with cs.patch(model) as patch:
            report = patch.report()
            calls.clear()  # one is the check before it is installed
            ours = logits(model)
    was = [e.now.partition(",")[0] for e in report.replaced]
    assert was.count("cs.ops.rms_norm") == FAMILIES[family]
    assert was.count("cs.ops.geglu" if family == "Gemma" else "cs.ops.swiglu") == 2
    assert "config" in paths(report.replaced) and not report.left
    assert [n for _, _, n, _ in calls] == [10, 10, 1, 1, 1, 1]  # two layers: a prompt, two tokens
    for a, b, c in zip(ours, exact, theirs, strict=True):
        assert acceptable(a, b, c, dtype), acceptable(a, b, c, dtype).message


@pytest.mark.parametrize("family", FAMILIES)
def test_generate(family: str, models: dict[str, Any], calls: Any) -> None:
    model = copy.deepcopy(models[family])
    left_padded = TOKENS.clone()
    left_padded[1, :5] = 0
    cases = [(x, kind) for x in (TOKENS, left_padded) for kind in (None, "static")]

    def generated() -> tuple[list[Any], list[int]]:
        found, counts = [], []
        for x, kind in cases:
            options = {} if kind is None else {"cache_implementation": kind}
            calls.clear()
            made = model.generate(
                x, attention_mask=(x != 0).long(), max_new_tokens=6, do_sample=False, **options
            )
            found.append(made)
            counts.append(len(calls))
        return found, counts

    before, _ = generated()
    with cs.patch(model):
        after, counts = generated()
    # two layers: a prompt, and five tokens of the static cache; padding is a mask of its own
    assert counts == [2, 12, 0, 0]
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a, b) and a.shape[1] == 18


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma"])
def test_training(family: str, models: dict[str, Any], calls: Any) -> None:
    def gradients(of: Any) -> dict[str, Any]:
        of.zero_grad()
        of.train()(TOKENS, labels=TOKENS).loss.backward()
        return {n: p.grad.clone() for n, p in of.named_parameters()}

    model = copy.deepcopy(models[family])
    exact, theirs = gradients(in_float64(model)), gradients(model)
    with cs.patch(model):
        calls.clear()
        ours = gradients(model)
    assert len(calls) == 2
    for name, g in ours.items():
        # in the norm: single elements are what large terms of both signs leave
        report = acceptable(g, exact[name], theirs[name], torch.float32)
        assert report.relative <= report.allowed_relative, f"{name}: {report.message}"


def test_the_same_model_trains(llama: Any) -> None:
    """Parameters are those that an optimizer got before."""
    optimizer = torch.optim.AdamW(llama.parameters(), lr=1e-2)
    cs.patch(llama)
    llama.train()
    losses = []
    for _ in range(8):
        loss = llama(TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


# --- what stays ----------------------------------------------------------------------------------


def test_undo(llama: Any) -> None:
    before, names = facts(llama), list(llama.state_dict())
    parameters = {n: id(p) for n, p in llama.named_parameters()}
    expected = llama(TOKENS).logits
    patch = cs.patch(llama)
    assert {n: id(p) for n, p in llama.named_parameters()} == parameters
    assert list(llama.state_dict()) == names and cs.Patch.of(llama) is patch
    assert repr(patch) == "Patch(15 modules of LlamaForCausalLM)"
    assert facts(llama) != before and not torch.equal(llama(TOKENS).logits, expected)
    patch.undo()
    assert facts(llama) == before and llama.config._attn_implementation == "sdpa"
    assert torch.equal(llama(TOKENS).logits, expected) and cs.Patch.of(llama) is None
    patch.undo()
    assert facts(llama) == before
    with pytest.raises(KeyError, match="inside"), cs.patch(llama):
        raise KeyError("inside")
    assert facts(llama) == before


def test_random_numbers_and_modes_stay(llama: Any) -> None:
    llama.model.layers[0].train()
    modes = [m.training for m in llama.modules()]
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    cs.patch(llama)
    assert torch.equal(torch.rand(3), expected)
    assert [m.training for m in llama.modules()] == modes


def test_twice(llama: Any) -> None:
    patch = cs.patch(llama)
    with pytest.raises(PatchError, match=r"patched already; undo that first, cs.Patch.of\(model\)"):
        cs.patch(llama)
    with pytest.raises(PatchError, match=r"patch: layers.0.self_attn.q_proj is patched already"):
        cs.patch(llama.model)
    patch.undo()
    part = cs.patch(llama.model.layers[1])
    with pytest.raises(PatchError, match=r"patch: model.layers.1 is patched already"):
        cs.patch(llama)
    part.undo()
    cs.patch(llama)
    with pytest.raises(PatchError, match=r"patch\(str\): give it a model"):
        cs.patch("llama")


def test_copies(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    patch = cs.patch(llama)
    expected = llama(TOKENS).logits
    file = io.BytesIO()
    torch.save(llama, file)
    file.seek(0)
    patch.undo()
    monkeypatch.delitem(decoding.AttentionInterface._global_mapping, "cutesuper")
    monkeypatch.delitem(decoding.AttentionMaskInterface._global_mapping, "cutesuper")
    loaded = torch.load(file, weights_only=False)  # as if nothing had been patched before
    cs.patch(llama)
    for made in (copy.deepcopy(llama), loaded):
        own = cs.Patch.of(made)
        assert own is not None and own is not cs.Patch.of(llama)
        assert torch.equal(made(TOKENS).logits, expected)
        # it computes with its own weights
        nn.init.zeros_(made.model.norm.weight)
        assert not made(TOKENS).logits.any() and llama(TOKENS).logits.all()
        own.undo()
        assert type(made.model.norm) is transformers.models.llama.modeling_llama.LlamaRMSNorm
        assert made.config._attn_implementation == "sdpa"
    assert cs.Patch.of(llama) is not None and llama.config._attn_implementation == "cutesuper"
    replica = llama.model.norm._replicate_for_data_parallel()  # as DataParallel makes them
    replica.weight = torch.zeros(64)
    assert not replica(torch.ones(2, 64)).any()


def test_saved_model(llama: Any, tmp_path: Any) -> None:
    expected = llama(TOKENS).logits
    with cs.patch(llama):
        llama.save_pretrained(tmp_path)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert loaded.config._attn_implementation == "sdpa"
    assert torch.equal(loaded(TOKENS).logits, expected)
    other = new_model("Llama", rms_norm_eps=1e-5)
    with cs.patch(other):
        other.load_state_dict(llama.state_dict())
    both = zip(other.parameters(), llama.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in both)


def test_hooks(llama: Any) -> None:
    layer = llama.model.layers[0]
    parts = {
        "norm": layer.input_layernorm, "mlp": layer.mlp, "activation": layer.mlp.act_fn,
        "down": layer.mlp.down_proj, "k": layer.self_attn.k_proj,
    }  # fmt: skip
    seen: list[str] = []
    parts["norm"].register_forward_hook(lambda *_: seen.append("norm"))
    parts["k"].register_forward_pre_hook(lambda *_: seen.append("before k"))
    cs.patch(llama)
    assert not seen  # nothing is called while the model is searched
    for name in ("mlp", "activation", "down", "k"):
        parts[name].register_forward_hook(lambda *_, name=name: seen.append(name))
    with torch.no_grad():
        llama(TOKENS[:, :3])
    assert sorted(seen) == ["activation", "before k", "down", "k", "mlp", "norm"]
    layer.self_attn.k_proj.register_forward_hook(lambda _, args, y: torch.zeros_like(y))
    with torch.no_grad():
        ours = llama(TOKENS[:, :3]).logits
        cs.Patch.of(llama).undo()
        exact, theirs = in_float64(llama)(TOKENS[:, :3]).logits, llama(TOKENS[:, :3]).logits
    assert acceptable(ours, exact, theirs, torch.float32)


def test_torch_compile() -> None:
    """The first graph is of the model as it comes: patching it, and undoing that, is noticed."""
    llama = new_model("Llama", num_hidden_layers=1)
    compiled = torch.compile(llama, backend="aot_eager", fullgraph=True)

    def decoded(of: Any, model: Any) -> Any:
        """The third token, with a mask that is made before, as `generate` does."""
        cache = transformers.StaticCache(model.config, max_cache_len=8)
        model(TOKENS[:, :2], past_key_values=cache)
        mask = create_causal_mask(
            model.config, torch.empty(2, 1, 0), torch.ones(2, 3), cache, torch.full((2, 1), 2)
        )
        return of(TOKENS[:, 2:3], past_key_values=cache, attention_mask=mask).logits

    def names() -> set[str]:
        with torch.profiler.profile() as profile:
            ours = decoded(compiled, llama)
        assert acceptable(ours, exact, theirs, torch.float32)
        return {e.name for e in profile.events() or () if e.name.startswith("cutesuper::")}

    with torch.no_grad():
        exact, theirs = (decoded(m, m) for m in (in_float64(llama), llama))
        assert not names()
        with cs.patch(llama):
            decoded(llama, llama)
            assert names() == {f"cutesuper::{n}" for n in ("rms_norm", "swiglu", "attention")}
        assert not names()


# --- the report ----------------------------------------------------------------------------------


def test_report(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    llama.model.layers[1].mlp.act_fn = nn.ReLU()
    monkeypatch.setattr("cutesuper.torch.patch.model.refused", {1: "some call", 2: "some call"})
    expected = """\
replaced
     2 x model.layers.*.self_attn                 LlamaAttention -> q_proj, k_proj, v_proj in one program
     1 x model.layers.*.mlp                       LlamaMLP -> cs.ops.swiglu
     2 x model.layers.*.input_layernorm           LlamaRMSNorm -> cs.ops.rms_norm
     2 x model.layers.*.post_attention_layernorm  LlamaRMSNorm -> cs.ops.rms_norm
     1 x model.norm                               LlamaRMSNorm -> cs.ops.rms_norm
     1 x lm_head                                  Linear -> cs.ops.linear_cross_entropy, if a loss alone sees the logits
     1 x                                          LlamaForCausalLM -> steps: torch.compile(backend='cutesuper')
     1 x config                                   sdpa attention -> cs.ops.attention: training, prompts, decoding
left as they are
     1 x model.layers.*.mlp  LlamaMLP -- it does not compute down(activation(gate(x)) * up(x)) with one of silu, gelu,
         gelu_tanh
calls that run the original
  some call"""  # noqa: E501
    assert str(cs.patch(llama).report()) == expected
    monkeypatch.setattr("cutesuper.torch.patch.model.refused", {})
    assert str(cs.patch(nn.Linear(2, 2)).report()) == "nothing looks like what can be replaced"
