"""Steps of a patched language model: compiled whole, once for each kind of call.

There is no GPU: the CPU counts as one.
"""

from __future__ import annotations

import copy
import inspect
import io
from types import SimpleNamespace
from typing import Any

import pytest

import cutesuper as cs

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import transformers  # noqa: E402

from cutesuper.errors import CutesuperError  # noqa: E402
from cutesuper.torch.patch import report, steps  # noqa: E402
from tests.compiling import leave_inductor_out, taken  # noqa: E402
from tests.patching import TOKENS, new_model  # noqa: E402


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Reports of what was compiled, and whether a CUDA graph is captured."""
    monkeypatch.setattr(steps, "KERNEL_DEVICES", {"cpu"})
    report.refused.clear()
    made = {"captures": False, "reports": leave_inductor_out(monkeypatch)}
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made["captures"])
    torch._dynamo.reset()
    return made


def compiled(model: Any) -> list[Any]:
    """Kinds of calls that are compiled."""
    return [k for k, works in model.__dict__["_cutesuper_how"].kinds.items() if works]


@torch.no_grad()
def stepped(model: Any, room: int = 32, rows: int = 2) -> Any:
    """Logits of three steps behind a prompt."""
    cache = transformers.StaticCache(model.config, max_cache_len=room)
    tokens = TOKENS[:rows]
    parts = (tokens[:, :9], *tokens[:, 9:].split(1, 1))
    return torch.stack(
        [model(input_ids=part, past_key_values=cache).logits[:, -1] for part in parts]
    )


def test_steps_are_compiled_as_the_model_is_written(state: Any) -> None:
    model = new_model("Qwen3")
    expected, arguments = stepped(model), inspect.signature(model.forward)
    stepped(torch.compile(model, backend="cutesuper", dynamic=False))
    [_, plain] = state["reports"]  # of the prompt, and of steps
    state["reports"].clear()
    patch = cs.patch(model)
    assert inspect.signature(model.forward) == arguments
    torch.testing.assert_close(stepped(model), expected)
    [whole] = state["reports"]
    assert len(compiled(model)) == 1 and taken([whole])
    assert taken([whole]) == taken([plain]) and whole.outside == plain.outside
    torch.testing.assert_close(stepped(model, room=16, rows=1), expected[:, :1])
    assert len(compiled(model)) == 2 == len(state["reports"])
    patch.undo()
    torch.testing.assert_close(stepped(model), expected)
    assert len(state["reports"]) == 2


def test_copies_compile_by_themselves(state: Any) -> None:
    model = new_model("Llama")
    expected = stepped(model)
    cs.patch(model)
    stepped(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert not compiled(other)
        torch.testing.assert_close(stepped(other), expected)
        assert len(compiled(other)) == 1
    assert len(state["reports"]) == 3


@torch.no_grad()
def test_other_calls_run_part_by_part(state: Any) -> None:
    model = new_model("Llama")
    cs.patch(model)
    model(TOKENS)
    model(TOKENS[:, :1], past_key_values=transformers.DynamicCache())
    model(TOKENS[:, :1], past_key_values=transformers.StaticCache(model.config, max_cache_len=8))
    with torch.enable_grad():
        cache = transformers.StaticCache(model.config, max_cache_len=16)
        for n in range(2):
            model(TOKENS[:, n : n + 1], past_key_values=cache)
    assert not compiled(model) and not state["reports"]


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"sliding_window": 8}])
def test_a_loop_over_growing_tokens(state: Any, options: Any) -> None:
    """Windows count on the host, and views of a list of tokens have its strides."""
    model = new_model("Mistral", **options)

    def loop() -> Any:
        cache = transformers.StaticCache(model.config, max_cache_len=64)
        tokens, given, made = TOKENS[:, :9], TOKENS[:, :9], []
        for n in range(12):
            made.append(model(input_ids=given, past_key_values=cache).logits[:, -1])
            tokens = torch.cat((tokens, tokens[:, n : n + 1]), 1)
            given = tokens[:, -1:]
        return torch.stack(made)

    expected = loop()
    cs.patch(model)
    torch.testing.assert_close(loop(), expected)
    assert len(state["reports"]) == len(compiled(model)) == (not options)


@torch.no_grad()
def test_a_mask_that_grows_is_no_step(state: Any) -> None:
    model = new_model("Llama")
    cs.patch(model)
    cache = transformers.StaticCache(model.config, max_cache_len=32)
    model(TOKENS[:, :8], past_key_values=cache, attention_mask=torch.ones(2, 8))
    for n in (9, 10):
        mask = torch.ones(2, n, dtype=torch.long)
        model(TOKENS[:, n - 1 : n], past_key_values=cache, attention_mask=mask)
    assert not state["reports"]
    model(TOKENS[:, 10:11], past_key_values=cache, attention_mask=torch.ones(2, 32))
    assert len(state["reports"]) == 1


def test_hooks_that_come_later_are_called(state: Any) -> None:
    model = new_model("Llama")
    cs.patch(model)
    stepped(model)
    seen: list[Any] = []
    for part in (model.model.layers[1], model.model.layers[0].mlp, model.lm_head):
        hook = part.register_forward_hook(lambda _, args, out: seen.append(1))
        stepped(model)
        assert len(seen) == 4
        hook.remove()
        seen.clear()
        stepped(model)
        assert not seen
    hook = torch.nn.modules.module.register_module_forward_hook(lambda *_: seen.append(1))
    stepped(model)
    count = len(seen)
    hook.remove()
    assert count > 4 * len(list(model.modules())) / 2


@torch.no_grad()
def test_more_compilations_than_pytorch_allows(state: Any) -> None:
    model = new_model("Llama")
    patch = cs.patch(model)
    expected = stepped(model)
    for n in range(10):
        model.model.norm.variance_epsilon = 1e-6 * (1 + n)
        found = stepped(model)
    model.model.norm.variance_epsilon = 1e-6
    torch.testing.assert_close(stepped(model), expected)
    assert found.shape == expected.shape and not compiled(model)
    assert "steps:" in str(patch.report())


def test_the_compiler_may_be_off(state: Any) -> None:
    model = new_model("Llama")
    expected = stepped(model)
    cs.patch(model)
    with torch.compiler.set_stance("fail_on_recompile"):
        torch.testing.assert_close(stepped(model), expected)
    with torch._dynamo.config.patch(disable=True):
        torch.testing.assert_close(stepped(model), expected)
    assert not state["reports"] and not model.__dict__["_cutesuper_how"].kinds


def test_another_model_of_the_class_of_a_patched_one(state: Any) -> None:
    model = new_model("Llama")
    expected = stepped(model)
    cs.patch(model)
    other = type(model)(model.config).eval()
    assert type(other) is transformers.LlamaForCausalLM
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(stepped(other), expected)
    cs.patch(other).undo()


def test_nothing_is_compiled_while_a_graph_is_captured(state: Any) -> None:
    model = new_model("Llama")
    cs.patch(model)
    expected = stepped(model)
    state["captures"] = True
    torch.testing.assert_close(stepped(model), expected)  # of a kind that is known
    torch.testing.assert_close(stepped(model, room=16), expected)
    assert len(compiled(model)) == 1 == len(state["reports"])


def test_kinds_are_limited_and_failures_are_said(
    state: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "MOST_KINDS", 1)
    model = new_model("Llama")
    patch = cs.patch(model)
    expected = stepped(model)
    torch.testing.assert_close(stepped(model, room=16), expected)
    assert len(compiled(model)) == 1
    assert "more than 1 kinds of calls" in str(patch.report())

    def fails(*_: Any) -> Any:
        raise CutesuperError("no such thing\nat all")

    monkeypatch.undo()
    monkeypatch.setattr(steps, "KERNEL_DEVICES", {"cpu"})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **_: real(f, backend=fails))
    other = new_model("Llama")
    patch = cs.patch(other)
    torch.testing.assert_close(stepped(other), expected)
    assert not compiled(other) and "raised: CutesuperError: no such thing" in str(patch.report())


@pytest.mark.parametrize(
    ("where", "value"),
    [("hf_device_map", {"a": 0, "b": "cpu"}), ("_can_compile_fullgraph", False),
     ("hf_quantizer", SimpleNamespace(is_compileable=False))],
)  # fmt: skip
def test_models_that_cannot_be_compiled_are_left(where: str, value: Any) -> None:
    model = new_model("Llama")
    setattr(model, where, value)
    [entry] = [e for e in cs.patch(model).report().left if e.was == "LlamaForCausalLM"]
    assert any(word in entry.why for word in ("devices", "quantization", "whole"))
    assert cs.patch(new_model("Llama"), step=False).report().left == ()


def test_generate_compiles_with_the_backend(state: Any) -> None:
    model = new_model("Llama")
    options: dict[str, Any] = {
        "attention_mask": torch.ones_like(TOKENS), "do_sample": False, "max_new_tokens": 6,
        "cache_implementation": "static",
    }  # fmt: skip
    expected = model.generate(TOKENS, disable_compile=True, **options)
    cs.patch(model)
    config: Any = transformers.CompileConfig(mode="default")
    config._compile_all_devices = True
    found = model.generate(TOKENS, compile_config=config, **options)
    assert torch.equal(found, expected) and taken(state["reports"])
    assert config.backend == "inductor"  # the user's own is not written to
    chosen = transformers.CompileConfig(backend="eager")
    assert steps._with_backend(model, chosen) == chosen  # nor is another choice changed
