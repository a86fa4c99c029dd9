"""Losses of linear layers in compiled training steps; no GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from cutesuper.torch.compile import heads  # noqa: E402
from cutesuper.torch.ops.heads.cross_entropy import linear_cross_entropy  # noqa: E402

F = torch.nn.functional
WIDTH, WORDS = 16, 40


@pytest.fixture(autouse=True)
def small_logits_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(heads, "LEAST_BYTES", 0)
    monkeypatch.setattr(heads, "KERNEL_DEVICES", {"cpu"})
    yield
    torch._dynamo.reset()


def tensors(dtype: Any = torch.bfloat16) -> tuple[Any, ...]:
    torch.manual_seed(0)
    x = torch.randn(2, 9, WIDTH, dtype=dtype, requires_grad=True)
    weight = torch.randn(WORDS, WIDTH, dtype=dtype, requires_grad=True)
    return x, weight, torch.randint(WORDS, (2, 9))


def judge(loss: Callable[..., Any], taken: int, given: tuple[Any, ...] | None = None) -> None:
    """Results and gradients of a function that is compiled, with as many losses replaced."""
    found: list[Any] = []

    def backend(gm: Any, inputs: Any) -> Any:
        found.append(heads.take_heads(gm))
        calls = [n for n in gm.graph.nodes if n.target is linear_cross_entropy]
        assert len(calls) == found[-1]
        from torch._dynamo.backends.debugging import aot_eager

        return aot_eager(gm, inputs)

    given = tensors() if given is None else given
    results = []
    for run in (torch.compile(loss, backend=backend), loss):
        made = run(*given)
        made = made if isinstance(made, tuple) else (made,)
        results.append([*made, *torch.autograd.grad(made[0].sum(), given[:2])])
    assert sum(found) == taken
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == theirs.dtype  # compared by norms: elements are rounded to 8 bits
        assert (ours.double() - theirs.double()).norm() <= 0.02 * theirs.double().norm()


def causal(x: Any, weight: Any, target: Any) -> Any:
    """As transformers compute it."""
    logits = F.linear(x, weight).float()
    labels = F.pad(target, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, WORDS), labels.view(-1), ignore_index=-100)


def shifted(x: Any, weight: Any, target: Any) -> Any:
    logits = F.linear(x, weight)[:, :-1]
    rows = logits.reshape(-1, WORDS)
    return F.cross_entropy(rows, target[:, 1:].reshape(-1), label_smoothing=0.1, reduction="sum")


def capped(x: Any, weight: Any, target: Any) -> Any:
    logits = torch.tanh(F.linear(x, weight) / 5.0) * 5.0
    return F.cross_entropy(logits.float().view(-1, WORDS), target.view(-1))


def single(x: Any, weight: Any, target: Any) -> Any:
    logits = F.linear(x.view(-1, WIDTH), weight, torch.ones(WORDS, dtype=x.dtype))
    return F.cross_entropy(logits.float(), target.view(-1), reduction="none")


@pytest.mark.parametrize("loss", [causal, shifted, capped, single])
def test_taken(loss: Callable[..., Any]) -> None:
    judge(loss, 1)


def test_autocast() -> None:
    def loss(x: Any, weight: Any, target: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return causal(x, weight, target)

    judge(loss, 1, tensors(torch.float32))


def test_logits_that_are_seen() -> None:
    def returned(x: Any, weight: Any, target: Any) -> Any:
        logits = F.linear(x, weight)
        return F.cross_entropy(logits.float().view(-1, WORDS), target.view(-1)), logits

    def used(x: Any, weight: Any, target: Any) -> Any:
        logits = F.linear(x, weight).float().view(-1, WORDS)
        return F.cross_entropy(logits, target.view(-1)) + logits.logsumexp(-1).mean()

    for loss in (returned, used):
        judge(loss, 0)


def test_other_losses_are_left_alone() -> None:
    def weighted(x: Any, weight: Any, target: Any) -> Any:
        logits = F.linear(x, weight).float().view(-1, WORDS)
        return F.cross_entropy(logits, target.view(-1), torch.ones(WORDS))

    def columns(x: Any, weight: Any, target: Any) -> Any:
        logits = F.linear(x, weight)[:, :, :20].float().reshape(-1, 20)
        return F.cross_entropy(logits, target.view(-1) % 20)

    def regrouped(x: Any, weight: Any, target: Any) -> Any:
        logits = F.linear(x, weight).float().view(-1, WORDS // 2)
        return F.cross_entropy(logits, target.view(-1).repeat(2) % 20)

    def written(x: Any, weight: Any, target: Any) -> Any:
        x = x * 1
        logits = F.linear(x, weight.detach())
        x.mul_(2)
        return F.cross_entropy(logits.float().view(-1, WORDS), target.view(-1)) + weight.sum() * 0

    for loss in (weighted, columns, regrouped, written):
        judge(loss, 0)
    judge(causal, 0, tensors(torch.float32))


def test_small_logits_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "LEAST_BYTES", 2 * 9 * 2 * WORDS + 1)
    judge(causal, 0)


def test_training_step_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=1, vocab_size=WORDS,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    words = torch.randint(3, WORDS, (2, 9))
    weights = (model.lm_head.weight, model.model.norm.weight)

    def loss(head: Any, norm: Any, words: Any) -> Any:
        return model(input_ids=words, labels=words, use_cache=False).loss

    judge(loss, 1, (*weights, words))
