"""`cs.generate` on a GPU: steps in CUDA graphs, of models as they are, patched and compiled.

Each token is what the model finds likeliest in float64, or nearly so.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest

import cutesuper as cs

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import transformers  # noqa: E402

from cutesuper.errors import GenerationError  # noqa: E402
from tests.patching import EXTENTS, in_float64, new_model  # noqa: E402

pytestmark = pytest.mark.gpu

WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
NEW = 40
#: four prompts of 12, 7, 11 and 1 tokens
SHOWN = (torch.arange(12) >= torch.tensor([0, 5, 1, 11])[:, None]).long()
PROMPTS = torch.randint(2, 128, (4, 12), generator=torch.Generator().manual_seed(2)) * SHOWN


def on_gpu(family: str, **options: Any) -> Any:
    return new_model(family, **WIDE, **options).to("cuda", torch.bfloat16)


def assert_likeliest(model: Any, made: Any, shown: Any) -> None:
    """``made``: prompts and new tokens; ``shown``: false at padding."""
    assert made.shape == (4, 12 + NEW)
    shown = torch.cat((shown.cuda(), torch.ones_like(made[:, 12:])), 1)
    with torch.no_grad():
        rows = in_float64(model)(
            made, attention_mask=shown, position_ids=(shown.cumsum(1) - 1).clamp_min(0),
        ).logits[:, 11:-1]  # fmt: skip
    chosen = rows.gather(-1, made[:, 12:, None])[..., 0]
    assert (rows.amax(-1) - chosen).max() < 0.1 * rows.std()


def replays(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """All replays of graphs from now on."""
    seen: list[Any] = []
    replay = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda g: (seen.append(g), replay(g)))
    return seen


@pytest.mark.parametrize("how", ["plain", "patched", "compiled"])
@pytest.mark.parametrize("family", ["Llama", "Mistral"])
def test_greedy_tokens(family: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mistral has a window that is crossed while decoding."""
    if how == "compiled" and family == "Mistral":
        pytest.skip("one compilation is enough")
    model = on_gpu(family, **({"sliding_window": 24} if family == "Mistral" else {}))
    of, seen = copy.deepcopy(model), replays(monkeypatch)
    if how == "patched":
        cs.patch(of)
    if how == "compiled":
        torch._dynamo.reset()
        of = torch.compile(of, backend="cutesuper")
    for shown in (torch.ones_like(SHOWN), SHOWN):
        seen.clear()
        made = cs.generate(of, PROMPTS, shown, max_new_tokens=NEW)
        assert_likeliest(model, made, shown)
        # programs of patched models are timed in graphs too, before the steps' graph is replayed
        assert seen.count(seen[-1]) == NEW - 3 and set(seen[-(NEW - 3) :]) == {seen[-1]}


def small(family: str) -> Any:
    """A float32 model on the GPU; windows, where it has them, are crossed while decoding."""
    windows: dict[str, Any] = {"sliding_window": 24}
    if family in {"Llama", "Qwen3"}:
        return new_model(family, **WIDE).to("cuda")
    if family == "Mistral":
        return new_model(family, **WIDE, **windows).to("cuda")
    torch.manual_seed(0)
    if family == "GPT2":
        config: Any = transformers.GPT2Config(
            vocab_size=128, n_embd=256, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=None
        )
        return transformers.GPT2LMHeadModel(config).eval().to("cuda")
    layers = {"layer_types": ["sliding_attention", "full_attention"]}
    config = transformers.Gemma3TextConfig(**(EXTENTS | WIDE | windows | layers))
    return transformers.Gemma3ForCausalLM(config).eval().to("cuda")


@pytest.mark.parametrize("how", ["plain", "patched", "compiled"])
@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Mistral", "Gemma3", "GPT2"])
def test_the_tokens_of_transformers(family: str, how: str) -> None:
    """64 greedy steps in float32; prompts are padded on the left, and end at different steps."""
    model = small(family)
    prompts, shown = PROMPTS.cuda(), SHOWN.cuda()
    options: dict[str, Any] = {"max_new_tokens": 64, "pad_token_id": 1}

    def theirs(**ends: Any) -> Any:
        return model.generate(prompts, attention_mask=shown, do_sample=False, **options, **ends)

    whole = theirs()
    ends = [int(whole[0, 12 + 9]), int(whole[2, 12 + 40])]
    of = copy.deepcopy(model)
    if how == "patched":
        cs.patch(of)
    if how == "compiled":
        torch._dynamo.reset()
        of = torch.compile(of, backend="cutesuper")
    assert torch.equal(cs.generate(of, prompts, shown, **options), whole)
    cut = cs.generate(of, prompts, shown, eos_token_id=ends, **options)
    assert torch.equal(cut, theirs(eos_token_id=ends))


def test_a_decoder_takes_one_batch_after_the_other() -> None:
    model = on_gpu("Qwen3")
    decoder = cs.Decoder(model, 4, 128)
    for prompts in (PROMPTS, PROMPTS.flip(0)):
        shown, seen = (prompts > 0).long(), []
        made = decoder(prompts, shown, max_new_tokens=NEW, on_tokens=seen.append)
        assert_likeliest(model, made, shown)
        assert [t.shape[1] for t in seen] == [1, 16, 16, 7]
        assert torch.equal(torch.cat(seen, 1), made[:, 12:].cpu())
    decoder.close()


def test_sequences_that_end() -> None:
    model = on_gpu("Llama")
    made = cs.generate(model, PROMPTS, SHOWN, max_new_tokens=NEW)
    ends = made[:, 20].unique().tolist()
    cut = cs.generate(model, PROMPTS, SHOWN, max_new_tokens=NEW, eos_token_id=ends, pad_token_id=1)
    assert cut.shape[1] <= 21
    for row, whole in zip(cut.tolist(), made.tolist(), strict=True):
        end = next(n for n, t in enumerate(row) if n >= 12 and t in ends) + 1
        assert row[:end] == whole[:end] and set(row[end:]) <= {1}


def test_draws() -> None:
    """The same ones for a seed, whether steps run or are replayed; not the same in every step."""
    model = on_gpu("Llama")
    options: dict[str, Any] = {"temperature": 5.0, "top_k": 100, "top_p": 0.99}
    made = cs.generate(model, PROMPTS, SHOWN, max_new_tokens=NEW, seed=3, **options)
    decoder = cs.Decoder(model, 4, 128, **options)
    for seed, same in ((4, False), (3, True), (3, True)):
        found = decoder(PROMPTS, SHOWN, max_new_tokens=NEW, seed=seed)
        assert torch.equal(found, made) == same
    assert made[:, 12:].unique().numel() > 30
    likeliest = cs.generate(model, PROMPTS, SHOWN, max_new_tokens=NEW, temperature=2.0, top_k=1)
    assert_likeliest(model, likeliest, SHOWN)


def test_a_model_that_cannot_be_captured() -> None:
    model = on_gpu("Llama")
    norm = model.model.norm
    forward = norm.forward
    norm.forward = lambda x: forward(x) * float(x.abs().max() >= 0)
    with pytest.raises(GenerationError, match="cannot be captured into a CUDA graph"):
        cs.generate(model, PROMPTS, SHOWN, max_new_tokens=NEW)
    torch.cuda.synchronize()
    del norm.forward
    assert_likeliest(model, cs.generate(model, PROMPTS, SHOWN, max_new_tokens=NEW), SHOWN)
