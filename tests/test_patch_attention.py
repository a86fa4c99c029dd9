"""`cs.patch`: attention of models while they decode, and what it leaves to PyTorch."""

from __future__ import annotations

import copy
from typing import Any

import pytest

import cutesuper as cs

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import transformers  # noqa: E402

from cutesuper.torch.patch import attention as decoding  # noqa: E402 (it imports transformers)
from cutesuper.torch.patch import report  # noqa: E402
from cutesuper.verify.numeric import acceptable  # noqa: E402
from tests.patching import TOKENS, counted, in_float64, new_model  # noqa: E402

F = torch.nn.functional


@pytest.fixture
def llama() -> Any:
    return new_model("Llama")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    return counted(monkeypatch)


# --- attention -----------------------------------------------------------------------------------


def decode(model: Any, cache: Any, **options: Any) -> Any:
    """Logits of the last two tokens, after a prompt of the others."""
    model(TOKENS[:, :-2], past_key_values=cache)
    return model(TOKENS[:, -2:], past_key_values=cache, **options).logits


def decoded(calls: Any) -> list[Any]:
    """The calls that are no prompts."""
    return [shape for shape in calls if shape[2] <= 8]


def static_cache(model: Any) -> Any:
    return transformers.StaticCache(model.config, max_cache_len=32)


@pytest.mark.parametrize("window", [64, 16, 5])
def test_sliding_windows(window: int, calls: Any) -> None:
    """Masks that hide nothing yet are none."""
    model = new_model("Mistral", sliding_window=window, num_hidden_layers=1)
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False,
                               "cache_implementation": "static"}  # fmt: skip
    expected = model.generate(TOKENS, attention_mask=TOKENS > 0, **options)
    cs.patch(model)
    calls.clear()
    assert torch.equal(model.generate(TOKENS, attention_mask=TOKENS > 0, **options), expected)
    assert (
        len(decoded(calls)) == {64: 6, 16: 3, 5: 0}[window]
    )  # of seven tokens; the cache ends at 19


@torch.inference_mode()
def test_what_attention_takes(llama: Any, calls: Any) -> None:
    """Several queries; caches that grow or are longer than they look; masks of the user."""
    exact = in_float64(llama)
    caches = {
        "static": static_cache, "dynamic": lambda _: transformers.DynamicCache(),
        "sliced": lambda _: SlicedCache(),
    }  # fmt: skip
    hidden = torch.ones(2, 1, 2, 32, dtype=torch.bool).tril(10)
    cases = [
        ("static", {}, 2), ("dynamic", {}, 0), ("sliced", {}, 0),
        ("static", {"attention_mask": hidden}, 0),
        ("static", {"attention_mask": torch.where(hidden, 0.0, -torch.inf)}, 0),
        ("static", {"attention_mask": torch.ones(2, 12)}, 2),
        ("static", {"attention_mask": torch.ones(2, 32)}, 2),
    ]  # fmt: skip

    def results(model: Any, n: int) -> Any:
        kind, options, _ = cases[n]
        if "attention_mask" in options and options["attention_mask"].is_floating_point():
            options = {"attention_mask": options["attention_mask"].to(model.dtype)}
        return decode(model, caches[kind](model), **options)

    theirs = [results(llama, n) for n in range(len(cases))]
    cs.patch(llama)
    for n, (_, _, count) in enumerate(cases):
        calls.clear()
        ours = results(llama, n)
        assert len(decoded(calls)) == count, n
        assert acceptable(ours, results(exact, n), theirs[n], torch.float32), n
    calls.clear()
    cache = SlicedCache()
    llama(TOKENS[:, :5], past_key_values=cache)
    llama(TOKENS[:, 5:6], past_key_values=cache)
    assert calls == [(2, 4, 1, 16)] * 2


class SlicedCache(transformers.DynamicCache):
    """Keys and values are the beginning of longer tensors."""

    def update(self, key: Any, value: Any, layer: int, *args: Any, **options: Any) -> Any:
        made = super().update(key, value, layer, *args, **options)
        return tuple(F.pad(t, (0, 0, 0, 7), value=torch.nan)[:, :, : t.shape[2]] for t in made)


def test_masks_that_were_changed() -> None:
    """A mask says how many keys are seen as long as nobody writes to it."""

    def mask(padding: Any = None, **options: Any) -> Any:
        given = {"batch_size": 2, "q_length": 1, "kv_length": 8, "q_offset": torch.tensor(4)}
        return decoding.mask_of(**(given | options), attention_mask=padding,
                                allow_is_causal_skip=False)  # fmt: skip

    made = mask()
    assert decoding._keys_of(made).tolist() == [5, 5] and made.sum() == 10
    made[1, 0, 0, 0] = False
    assert decoding._keys_of(made) is None
    padding = torch.ones(2, 5, dtype=torch.bool)
    assert decoding._keys_of(mask(padding)).tolist() == [5, 5]
    assert decoding._keys_of(mask(padding[:, :4])) is None  # the fifth is not there
    padding[0, 0] = False
    assert decoding._keys_of(mask(padding)) is None
    assert decoding._keys_of(mask(q_length=2, q_offset=torch.tensor(3))).tolist() == [5, 5]
    assert decoding._keys_of(mask(q_length=9, q_offset=0, kv_length=20)) is None
    assert decoding._keys_of(mask(q_offset=7, kv_length=8)) is None  # a cache that grows
    assert decoding._keys_of(mask().clone()) is None
    assert decoding._keys_of(mask(mask_function=lambda *i: i[3] < i[2])) is None


def test_attention_that_runs_the_original(llama: Any, calls: Any) -> None:
    cs.patch(llama)
    module = llama.model.layers[0].self_attn
    query = torch.randn(2, 4, 1, 16)
    key, value = torch.randn(2, 2, 2, 8, 16).unbind()
    mask = decoding.mask_of(2, 1, 8, torch.tensor(4), allow_is_causal_skip=False)

    def attend(*tensors: Any, **options: Any) -> tuple[Any, Any]:
        calls.clear()
        found, weights = decoding.attention_forward(module, *tensors, mask, **options)
        assert weights is None
        given = decoding.sdpa_attention_forward(module, *tensors, mask, **options)
        assert found.dtype == given[0].dtype and found.stride() == given[0].stride()
        torch.testing.assert_close(found, given[0])
        return len(calls), found

    with torch.no_grad():
        assert attend(query, key, value, scaling=0.3, position_ids=1, sliding_window=3)[0] == 1
        # neither contiguous nor a transpose of something contiguous
        assert attend(query.mT.contiguous().mT, key, value)[0] == 1
        assert attend(query, key.mT.contiguous().mT, value)[0] == 1  # refused, and then known
        assert any("key of shape" in why for why in report.refused.values())
        assert attend(query, key.mT.contiguous().mT, value)[0] == 0
        assert attend(*(t.double() for t in (query, key, value)))[0] == 0
        assert attend(query, key, value, position_bias=torch.zeros(2, 4, 1, 8))[0] == 0
        with pytest.raises(ValueError, match="softcap"):
            attend(query, key, value, softcap=30.0)
        with torch.autocast("cpu", torch.bfloat16):
            assert attend(query, key, value)[0] == 0
        torch.manual_seed(0)
        dropped, _ = decoding.attention_forward(module, query, key, value, mask, dropout=1.0)
        assert not dropped.any()
    query.requires_grad_()
    assert attend(query, key, value)[1].requires_grad


@pytest.mark.parametrize("how", ["patch", "attn_implementation", "autocast", "compiled"])
def test_training(how: str, calls: Any) -> None:
    """The gradients of all parameters, with the attention of every layer."""
    model = new_model("Llama", num_hidden_layers=2)
    exact, plain = in_float64(model), copy.deepcopy(model)
    call: Any = model
    if how == "attn_implementation":
        cs.register_attention()
        model.set_attn_implementation("cutesuper")
    else:
        cs.patch(model, norms=False, mlp=False, qkv=False)
    if how == "compiled":
        torch._dynamo.reset()
        call = torch.compile(model, backend="aot_eager", fullgraph=True)

    def gradients(model: Any, call: Any) -> list[Any]:
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            loss = call(TOKENS, labels=TOKENS, use_cache=False).loss
        return list(torch.autograd.grad(loss, list(model.parameters())))

    calls.clear()
    ours = gradients(model.train(), call)
    assert len(calls) == 2
    judged = zip(ours, gradients(exact, exact), gradients(plain, plain), strict=True)
    for mine, want, theirs in judged:
        kind = torch.bfloat16 if how == "autocast" else torch.float32
        assert acceptable(mine.to(kind), want, theirs.to(kind), kind)


def test_training_with_padding(llama: Any, calls: Any) -> None:
    padded = torch.ones_like(TOKENS)
    padded[0, :3] = 0

    def gradients(model: Any) -> list[Any]:
        loss = model(TOKENS, attention_mask=padded, labels=TOKENS * padded).loss
        return list(torch.autograd.grad(loss, list(model.parameters())))

    exact, theirs = gradients(in_float64(llama)), gradients(llama)
    cs.patch(llama, norms=False, mlp=False, qkv=False)
    calls.clear()
    for mine, want, other in zip(gradients(llama), exact, theirs, strict=True):
        assert acceptable(mine, want, other, torch.float32)
    assert len(calls) == 2


def test_models_whose_attention_is_left(llama: Any) -> None:
    eager = copy.deepcopy(llama)
    eager.set_attn_implementation("eager")
    wide = copy.deepcopy(llama).double()
    for model, why in ((eager, "only sdpa attention"), (wide, "torch.float64 on cpu")):
        with cs.patch(model) as patch:
            [entry] = [e for e in patch.report().entries if e.path == "config"]
            assert entry.now is None and why in entry.why
