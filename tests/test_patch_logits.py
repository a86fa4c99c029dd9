"""Logits of patched models in training that only a loss sees; no GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

import cutesuper as cs
from cutesuper.errors import PatchError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from cutesuper.torch.patch import logits  # noqa: E402

F = torch.nn.functional
WORDS = 40


@pytest.fixture(autouse=True)
def small_logits_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logits, "LEAST_BYTES", 0)
    monkeypatch.setattr(logits, "KERNEL_DEVICES", {"cpu"})


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Shapes of the rows of the losses without logits."""
    found: list[Any] = []

    def counted(x: Any, *args: Any, **options: Any) -> Any:
        found.append(tuple(x.shape))
        return cs.ops.linear_cross_entropy(x, *args, **options)

    monkeypatch.setattr(logits, "linear_cross_entropy", counted)
    return found


def llama(**options: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, vocab_size=WORDS,
        num_attention_heads=2, num_key_value_heads=2, **options,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16)


def gemma() -> Any:
    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, vocab_size=WORDS, head_dim=8,
        num_attention_heads=2, num_key_value_heads=2, final_logit_softcapping=2.0,
    )  # fmt: skip
    return transformers.Gemma2ForCausalLM(config).to(torch.bfloat16)


def tokens() -> Any:
    torch.manual_seed(1)
    return torch.randint(3, WORDS, (2, 9))


def trained(model: Any, loss: Callable[..., Any]) -> list[Any]:
    model.zero_grad()
    value = loss(model, tokens())
    value.backward()
    return [value.detach(), *(p.grad.clone() for p in model.parameters())]


def close(found: list[Any], want: list[Any]) -> None:
    """Compare by norms: each element has the rounding of bfloat16."""
    for ours, theirs in zip(found, want, strict=True):
        assert ours.dtype == theirs.dtype
        assert (ours.double() - theirs.double()).norm() <= 0.02 * theirs.double().norm()


def of_model(model: Any, words: Any) -> Any:
    return model(input_ids=words, labels=words, use_cache=False).loss


def by_hand(model: Any, words: Any) -> Any:
    out = model(input_ids=words, use_cache=False).logits[:, :-1, :].float()
    return F.cross_entropy(out.reshape(-1, WORDS), words[:, 1:].flatten(), reduction="sum") / 9


@pytest.mark.parametrize("loss", [of_model, by_hand])
@pytest.mark.parametrize("make", [llama, gemma])
def test_losses(make: Callable[[], Any], loss: Any, losses: list[Any]) -> None:
    model = make().train()
    want = trained(model, loss)
    with cs.patch(copy.deepcopy(model)) as patch:
        assert "lm_head" in {e.path for e in patch.report().replaced}
        close(trained(patch._model, loss), want)
    assert losses == [(18 if loss is of_model else 16, 16)]


def test_tied_weights(losses: list[Any]) -> None:
    model = llama(tie_word_embeddings=True).train()
    want = trained(model, of_model)
    with cs.patch(model, norms=False, mlp=False):
        close(trained(model, of_model), want)
    assert len(losses) == 1


def test_autocast(losses: list[Any]) -> None:
    model = llama().float().train()

    def loss(model: Any, words: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            out = model(input_ids=words, use_cache=False).logits
        return F.cross_entropy(out.view(-1, WORDS).float(), words.flatten())

    want = trained(model, loss)
    with cs.patch(model, norms=False, mlp=False):
        close(trained(model, loss), want)
    assert len(losses) == 1


def test_other_uses_compute_the_logits(losses: list[Any]) -> None:
    model, words = llama().train(), tokens()
    plain = model(words).logits
    with cs.patch(model, norms=False, mlp=False, attention=False):
        out = model(words).logits
        assert type(out) is logits.PendingLogits and out.shape == plain.shape
        assert out.dtype == torch.bfloat16 and out.requires_grad and out.dim() == 3
        assert torch.equal(out, plain) and torch.equal(out.argmax(-1), plain.argmax(-1))
        assert repr(out) == repr(plain) and torch.equal(copy.copy(out).detach(), plain)
        rows, labels = out.float().view(-1, WORDS), words.flatten()
        weighted = F.cross_entropy(rows, labels, torch.ones(WORDS))
        want = F.cross_entropy(plain.float().view(-1, WORDS), labels)
        torch.testing.assert_close(weighted, want)
        columns = out[:, :, :20].reshape(-1, 20)
        assert torch.equal(columns, plain[:, :, :20].reshape(-1, 20))
        [grad] = torch.autograd.grad(out.logsumexp(-1).sum(), model.lm_head.weight)
    [want] = torch.autograd.grad(plain.logsumexp(-1).sum(), model.lm_head.weight)
    assert torch.equal(grad, want) and not losses


def test_what_was_written_to_is_refused() -> None:
    model, words = llama().train(), tokens()
    with cs.patch(model, norms=False, mlp=False):
        out = model(words).logits
        with torch.no_grad():
            model.lm_head.weight.mul_(2)
        with pytest.raises(PatchError, match="written to"):
            out.sum()
        with pytest.raises(PatchError, match="loss=False"), torch._C.DisableTorchFunctionSubclass():
            model(words).logits.sum()


def test_when_it_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, words = llama().train(), tokens()
    with cs.patch(model):
        with torch.no_grad():
            assert type(model(words).logits) is torch.Tensor
        hook = model.lm_head.register_forward_hook(lambda *args: None)
        assert type(model(words).logits) is torch.Tensor
        hook.remove()
        monkeypatch.setattr(logits, "LEAST_BYTES", 2 * 18 * WORDS + 1)
        assert type(model(words).logits) is torch.Tensor
    with cs.patch(model, loss=False) as patch:
        assert "lm_head" not in {e.path for e in patch.report().entries}


def test_compiled(losses: list[Any]) -> None:
    model = llama().train()
    want = trained(model, of_model)
    with cs.patch(model, norms=False, mlp=False, attention=False):
        close(trained(torch.compile(model, backend="aot_eager"), of_model), want)
    assert not losses
    torch._dynamo.reset()


@pytest.mark.gpu
def test_on_a_gpu(monkeypatch: pytest.MonkeyPatch, losses: list[Any]) -> None:
    """Patched, and compiled by the backend, a step computes what the model computes."""
    monkeypatch.setattr(logits, "KERNEL_DEVICES", {"cuda"})
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=1, vocab_size=32768,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to("cuda", torch.bfloat16).train()
    words = torch.randint(3, 32768, (2, 517), device="cuda")

    def step(run: Callable[..., Any]) -> list[Any]:
        model.zero_grad()
        loss = run(model, words)
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters())]

    want = step(of_model)
    with cs.patch(model, norms=False, mlp=False):
        close(step(of_model), want)
    assert losses == [(2 * 517, 256)]
    close(step(torch.compile(of_model, backend="cutesuper")), want)
