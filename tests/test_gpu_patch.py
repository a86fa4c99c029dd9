"""`cs.patch` on a GPU: models of the transformers library, against float64, by the rule of
`acceptable`.

Models have two layers, and heads that kernels of attention have building blocks for.
"""

from __future__ import annotations

from typing import Any

import pytest

import cutesuper as cs

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from cutesuper.runtime.programs import Kept  # noqa: E402
from cutesuper.torch.patch import fused, report  # noqa: E402 (they import torch)
from cutesuper.torch.patch.replacement import HOW  # noqa: E402
from cutesuper.verify.numeric import acceptable  # noqa: E402
from tests.patching import FAMILIES, TOKENS, counted, in_float64, new_model  # noqa: E402

pytestmark = pytest.mark.gpu

WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}


def on_gpu(family: str, dtype: Any = torch.bfloat16) -> Any:
    return new_model(family, **WIDE).to("cuda", dtype)


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    """All programs, taken whether or not they are faster: models are small."""
    made: dict[Any, Any] = Kept()
    monkeypatch.setattr(fused, "_programs", made)
    monkeypatch.setattr(fused, "refused", {})
    slow = lambda call, _: 1.0 - isinstance(call.func, cs.TracedProgram)  # noqa: E731
    monkeypatch.setattr(fused, "called_us", slow)
    monkeypatch.setattr(fused, "device_us", lambda calls, draw, device: [0.0, 1.0])
    return made


def logits(model: Any) -> tuple[Any, Any]:
    """Logits of a prompt, and of three more tokens that are decoded with a cache of fixed length,
    the last two at once."""
    tokens = TOKENS.cuda()
    cache = transformers.StaticCache(model.config, max_cache_len=128)
    prompt = model(tokens[:, :9], past_key_values=cache).logits
    decoded = [model(tokens[:, a:b], past_key_values=cache).logits for a, b in ((9, 10), (10, 12))]
    return prompt, torch.cat(decoded, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits(
    family: str, dtype: Any, programs: dict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, calls = on_gpu(family, dtype), counted(monkeypatch)
    with torch.no_grad():
        exact, theirs = logits(in_float64(model)), logits(model)
        with cs.patch(model, step=False) as patch:
            assert not patch.report().left
            calls.clear()
            ours = logits(model)
    assert [q[2] for q in calls] == [9, 9, 1, 1, 2, 2]  # the prompt, then two steps
    assert len(programs) == 2 and None not in programs.values(), fused.refused
    for a, b, c in zip(ours, exact, theirs, strict=True):
        assert acceptable(a, b, c, dtype), acceptable(a, b, c, dtype).message


def test_programs_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever comes of it: the original runs where it is faster, and the report says so."""
    monkeypatch.setattr(fused, "_programs", Kept())
    monkeypatch.setattr(fused, "refused", {})
    model, tokens = on_gpu("Llama"), TOKENS.cuda()[:, :4]
    with torch.no_grad():
        exact, theirs = in_float64(model)(tokens).logits, model(tokens).logits
        with cs.patch(model):
            ours = model(tokens).logits
    assert acceptable(ours, exact, theirs, torch.bfloat16)
    assert len(fused._programs) == 2
    for kind, program in fused._programs.items():
        assert (program is None) == (" us, the original " in fused.refused.get(kind, ""))


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma"])
def test_training(family: str) -> None:
    tokens = TOKENS.cuda()

    def gradients(of: Any) -> dict[str, Any]:
        of.zero_grad()
        of.train()(tokens, labels=tokens).loss.backward()
        return {n: p.grad.clone() for n, p in of.named_parameters()}

    model = on_gpu(family)
    exact, theirs = gradients(in_float64(model)), gradients(model)
    with cs.patch(model):
        ours = gradients(model)
    for name, g in ours.items():
        found = acceptable(g, exact[name], theirs[name], torch.bfloat16)
        assert found.relative <= found.allowed_relative, f"{name}: {found.message}"


def test_generate_with_compiled_steps() -> None:
    """A cache of fixed length has `generate` compile the model, with CUDA graphs. Each token is
    what the model as it comes finds likeliest, or nearly so."""
    model, tokens = on_gpu("Llama"), TOKENS.cuda()
    with cs.patch(model), torch.profiler.profile() as profile:
        made = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=20, do_sample=False,
            cache_implementation="static",
        )  # fmt: skip
    # of the first steps, which run before their graph is captured
    assert "cutesuper::attention" in {e.name for e in profile.events() or ()}
    with torch.no_grad():
        rows = in_float64(model)(made).logits[:, 11:-1]
    chosen = rows.gather(-1, made[:, 12:, None])[..., 0]
    assert made.shape == (2, 32) and (rows.amax(-1) - chosen).max() < 0.1 * rows.std()


def test_decoding_in_a_cuda_graph(programs: dict[Any, Any]) -> None:
    """A step is captured once; lengths are read when it is replayed."""
    model, tokens = on_gpu("Qwen3"), TOKENS.cuda()
    with torch.no_grad():
        exact, theirs = logits(in_float64(model)), logits(model)
        cs.patch(model, step=False)
        cache = transformers.StaticCache(model.config, max_cache_len=128)
        model(tokens[:, :9], past_key_values=cache)
        keys = [(layer.keys.clone(), layer.values.clone(), layer.cumulative_length.clone())
                for layer in cache.layers]  # fmt: skip
        token = tokens[:, 9:10].clone()
        mask = model_mask(cache)
        position = torch.full((2, 1), 9, device="cuda")

        def step() -> Any:
            return model(
                token, past_key_values=cache, attention_mask=mask, position_ids=position
            ).logits

        step()  # kernels are made before the capture
        for layer, (k, v, length) in zip(cache.layers, keys, strict=True):
            layer.keys.copy_(k)
            layer.values.copy_(v)
            layer.cumulative_length.copy_(length)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = step()
        graph.replay()
    assert len(programs) == 2 and None not in programs.values(), fused.refused
    ours = result[:, 0]
    assert acceptable(ours, exact[1][:, 0], theirs[1][:, 0], torch.bfloat16)


@pytest.mark.parametrize("whole", [False, True])
def test_steps_captured_by_the_user(whole: bool, programs: dict[Any, Any]) -> None:
    """Without masks of his own; replayed, the graph decodes one token after the other. A step that
    is compiled whole has no programs of parts."""
    model, tokens = on_gpu("Llama"), TOKENS.cuda()
    token, position = tokens[:, :1].clone(), torch.zeros(2, 1, dtype=torch.long, device="cuda")

    def prompted() -> Any:
        cache = transformers.StaticCache(model.config, max_cache_len=128)
        model(tokens[:, :9], past_key_values=cache)
        return cache

    def step(cache: Any) -> Any:
        return model(token, past_key_values=cache, position_ids=position).logits

    with torch.no_grad():
        exact, theirs = logits(in_float64(model))[1], logits(model)[1]
        cs.patch(model, step=whole)
        cache = prompted()
        with (
            pytest.raises(cs.errors.DeviceError, match="call it once before the capture"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            step(cache)
        torch.cuda.synchronize()
        step(prompted())
        cache, graph = prompted(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = step(cache)
        for n in (9, 10, 11):
            token.copy_(tokens[:, n : n + 1])
            position.fill_(n)
            graph.replay()
            assert acceptable(result[:, 0], exact[:, n - 9], theirs[:, n - 9], torch.bfloat16)
    assert len(programs) == (0 if whole else 2) and None not in programs.values(), fused.refused
    steps = list(model.__dict__[HOW].kinds.values()) if whole else []
    assert steps == [True] * whole, report.refused


def model_mask(cache: Any) -> Any:
    """The mask of the tenth token, made before as `generate` does it."""
    from cutesuper.torch.patch.attention import mask_of

    return mask_of(2, 1, 128, cache.layers[0].cumulative_length.clone(),
                   allow_is_causal_skip=False, device="cuda")  # fmt: skip


def test_float32_stays_with_pytorch() -> None:
    """There are no products of float32: attention and programs are left, norms are not."""
    model = on_gpu("Llama", torch.float32)
    tokens = TOKENS.cuda()[:, :4]
    with torch.no_grad():
        exact, theirs = in_float64(model)(tokens).logits, model(tokens).logits
        with cs.patch(model) as patch:
            assert [e.path for e in patch.report().left] == ["config"]
            ours = model(tokens).logits
    assert acceptable(ours, exact, theirs, torch.float32)
