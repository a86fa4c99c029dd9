"""`cs.generate`: the tokens of transformers, from steps that could be CUDA graphs."""

from __future__ import annotations

import copy
from typing import Any

import pytest

import cutesuper as cs

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import transformers  # noqa: E402
from torch._dynamo.testing import CompileCounter  # noqa: E402

from cutesuper.errors import (  # noqa: E402
    DeviceError,
    DTypeError,
    GenerationError,
    OptionError,
    ShapeError,
)
from cutesuper.torch.generate import decoder as decoding  # noqa: E402
from cutesuper.torch.generate.sampling import Sampling  # noqa: E402
from tests.patching import EXTENTS, FAMILIES, counted, new_model  # noqa: E402
from tests.recorded import Recording  # noqa: E402

NEW = 9
#: four prompts of 6, 3, 5 and 1 tokens
SHOWN = (torch.arange(6) >= torch.tensor([0, 3, 1, 5])[:, None]).long()
PROMPTS = torch.randint(2, 128, (4, 6), generator=torch.Generator().manual_seed(2)) * SHOWN
WHOLE = torch.randint(2, 128, (4, 6), generator=torch.Generator().manual_seed(3))


LLAMA = new_model("Llama", num_hidden_layers=1)


def windowed(family: str, window: int) -> Any:
    """A model with sliding windows, in all layers or in every second one."""
    if family == "Mistral":
        return new_model(family, sliding_window=window)
    kinds = ["sliding_attention", "full_attention"]
    options: dict[str, Any] = EXTENTS | {"sliding_window": window, "layer_types": kinds}
    torch.manual_seed(0)
    config = {"Gemma2": transformers.Gemma2Config, "Gemma3": transformers.Gemma3TextConfig}[family]
    return getattr(transformers, f"{family}ForCausalLM")(config(**options)).eval()


def theirs(model: Any, prompts: Any, shown: Any, **options: Any) -> Any:
    options = {"max_new_tokens": NEW, "do_sample": False} | options
    return model.generate(prompts, attention_mask=shown, **options)


def ours(model: Any, prompts: Any, shown: Any, **options: Any) -> Any:
    options = {"max_new_tokens": NEW} | options
    return cs.generate(model, prompts, shown, **options)


def assert_same(model: Any, of: Any = None, **options: Any) -> None:
    """Check tokens with and without padding; ``of``: computes in the place of the model."""
    for prompts, shown in ((PROMPTS, SHOWN), (WHOLE, torch.ones_like(SHOWN))):
        expected = theirs(model, prompts, shown, **options)
        assert torch.equal(ours(model if of is None else of, prompts, shown, **options), expected)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Recording]:
    """Recordings of all steps that are captured from now on, on a GPU that is the CPU."""
    made: list[Recording] = []

    def capture(call: Any, stream: Any, generators: Any) -> Recording:
        assert stream == "a stream" and len(generators) == 1
        capturing[0] = True
        made.append(Recording(call))
        capturing[0] = False
        return made[-1]

    capturing = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: "a stream")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(decoding, "KERNEL_DEVICES", {"cpu"})
    monkeypatch.setattr("cutesuper.torch.patch.attention.KERNEL_DEVICES", {"cpu"})
    monkeypatch.setattr(decoding, "capture", capture)
    return made


# ------------------------------------------------------------------------------------------- greedy


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens(family: str, graphs: list[Recording]) -> None:
    assert_same(new_model(family))
    assert [g.replays for g in graphs] == [NEW - 3] * 2  # after the prompt and two steps


@pytest.mark.parametrize(
    ("family", "window"),
    [("Mistral", 3), ("Mistral", 6), ("Mistral", 9), ("Gemma2", 4), ("Gemma3", 8)],
)
def test_windows(family: str, window: int, graphs: list[Recording]) -> None:
    """Shorter than the prompt, as long, and crossed while decoding."""
    assert_same(windowed(family, window))
    assert len(graphs) == 2


def test_without_a_graph() -> None:
    assert_same(new_model("Llama"))
    with torch.inference_mode():
        assert_same(new_model("Llama"))
    assert torch.equal(  # the mask can be left out
        cs.generate(new_model("Llama"), WHOLE, max_new_tokens=3),
        theirs(new_model("Llama"), WHOLE, torch.ones_like(WHOLE), max_new_tokens=3),
    )


@pytest.mark.parametrize("window", [None, 8])
def test_patched_models(
    window: int | None, graphs: list[Recording], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, calls = new_model("Mistral", sliding_window=window), counted(monkeypatch)
    patched = copy.deepcopy(model)
    cs.patch(patched)
    calls.clear()
    assert_same(model, patched)
    # two layers; two steps and a recorded one, without padding
    assert [q[2] for q in calls].count(1) == 6 and len(graphs) == 2


def test_compiled_models() -> None:
    """A step is compiled, with and without padding, and no prompt."""
    for model, times in ((LLAMA, 2), (windowed("Gemma3", 8), 1)):
        torch._dynamo.reset()
        counter = CompileCounter()
        compiled = torch.compile(model, backend=counter)
        for _ in range(times):
            assert_same(model, compiled)
        assert counter.frame_count == 2


# --------------------------------------------------------------------------------------------- ends


def test_sequences_that_end(graphs: list[Recording]) -> None:
    """At different steps, some never; behind the end there is padding."""
    model = new_model("Llama")
    made = theirs(model, PROMPTS, SHOWN)
    first, second, third = int(made[0, 7]), int(made[1, 12]), int(made[2, 10])
    all_ = [first, second, third, int(made[3, 9])]
    for eos, every in ((first, 16), ([first, second], 1), (all_, 2), (all_, 16)):
        expected = theirs(model, PROMPTS, SHOWN, eos_token_id=eos, pad_token_id=1)
        found = ours(model, PROMPTS, SHOWN, eos_token_id=eos, pad_token_id=1, look_every=every)
        assert torch.equal(found, expected)
    assert expected.shape[1] < 6 + NEW
    model.generation_config.eos_token_id = [first, second]
    assert_same(model)
    model.generation_config.pad_token_id = None
    expected = theirs(model, PROMPTS, SHOWN)
    assert torch.equal(ours(model, PROMPTS, SHOWN), expected) and (expected[0, -1] == first)
    model.generation_config.eos_token_id = None
    assert torch.equal(ours(new_model("Llama"), PROMPTS, SHOWN, eos_token_id=()), made)


def test_a_callback() -> None:
    """The first token at once, then every few; nothing behind the end of all."""
    model, seen = new_model("Llama"), []
    made = ours(model, PROMPTS, SHOWN, on_tokens=seen.append, look_every=3)
    assert [t.shape[1] for t in seen] == [1, 3, 3, 2]
    assert torch.equal(torch.cat(seen, 1), made[:, 6:])
    seen.clear()
    eos = made[:, 8].unique().tolist()
    made = ours(model, PROMPTS, SHOWN, eos_token_id=eos, on_tokens=seen.append, look_every=3)
    assert torch.equal(torch.cat(seen, 1), made[:, 6:]) and made.shape[1] <= 9


def test_a_decoder_takes_one_batch_after_the_other(graphs: list[Recording]) -> None:
    for model in (new_model("Llama"), windowed("Gemma3", 8)):
        graphs.clear()
        decoder = cs.Decoder(model, 4, 64)
        for length in (6, 4, 6):
            prompts, shown = PROMPTS[:, -length:], SHOWN[:, -length:]
            expected = theirs(model, prompts, shown)
            assert torch.equal(decoder(prompts, shown, max_new_tokens=NEW), expected)
        assert len(graphs) == 1
        decoder.close()
        assert torch.equal(decoder(prompts, shown, max_new_tokens=NEW), expected)
        assert len(graphs) == 2


# ----------------------------------------------------------------------------------------- sampling


def test_draws_are_those_of_the_seed(graphs: list[Recording]) -> None:
    model = new_model("Llama")
    options: dict[str, Any] = {"temperature": 1.5, "top_k": 50, "top_p": 0.9}
    made = ours(model, PROMPTS, SHOWN, seed=7, **options)
    assert torch.equal(ours(model, PROMPTS, SHOWN, seed=7, **options), made)
    assert not torch.equal(ours(model, PROMPTS, SHOWN, seed=8, **options), made)
    assert not torch.equal(ours(model, PROMPTS, SHOWN, **options), made)
    decoder = cs.Decoder(model, 4, 64, **options)
    for seed, same in ((8, False), (7, True), (7, True)):
        found = decoder(PROMPTS, SHOWN, max_new_tokens=NEW, seed=seed)
        assert torch.equal(found, made) == same
    assert torch.equal(
        ours(model, PROMPTS, SHOWN, temperature=3.0, top_k=1), theirs(model, PROMPTS, SHOWN)
    )


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0}, {"temperature": 0.5}, {"temperature": 2.0, "top_k": 3},
        {"temperature": 1.0, "top_p": 0.7}, {"temperature": 1.5, "top_k": 5, "top_p": 0.8},
        {"temperature": 1.0, "top_p": 1e-6}, {"temperature": 1.0, "top_k": 99},
    ],
    ids=str,
)  # fmt: skip
def test_distributions(options: dict[str, Any]) -> None:
    """As transformers samples, by a chi-squared statistic; nothing else is drawn."""
    logits = torch.randn(1, 16, generator=torch.Generator().manual_seed(4)) * 2
    warpers: list[Any] = [transformers.TemperatureLogitsWarper(options["temperature"])]
    if "top_k" in options:
        warpers.append(transformers.TopKLogitsWarper(options["top_k"]))
    if "top_p" in options:
        warpers.append(transformers.TopPLogitsWarper(options["top_p"]))
    scores = logits.clone()
    for warp in warpers:
        scores = warp(None, scores)
    likely = scores.softmax(-1)[0]
    count = 20000
    drawn = Sampling(**options).choose(
        logits.expand(count, -1), torch.Generator().manual_seed(5)
    ).bincount(minlength=16)  # fmt: skip
    expected = likely * count
    assert not drawn[likely == 0].any()
    statistic = ((drawn - expected).square() / expected)[likely > 0].sum()
    assert statistic < 45  # exceeded with a probability of 1e-4 at 15 degrees of freedom


# ------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("options", "error", "why"),
    [
        ({"max_new_tokens": 0}, OptionError, "max_new_tokens=0: must be an int of at least 1"),
        ({"temperature": -1.0}, OptionError, "temperature=-1.0: must be"),
        ({"temperature": float("nan")}, OptionError, "temperature=nan: must be"),
        ({"temperature": 1.0, "top_p": 0.0}, OptionError, "top_p=0.0: must be"),
        ({"temperature": 1.0, "top_k": 0}, OptionError, "top_k=0: must be"),
        ({"top_p": 0.5}, OptionError, "nothing is drawn at temperature 0"),
        ({"seed": -1}, OptionError, "seed=-1: must be"),
        ({"eos_token_id": "</s>"}, OptionError, "must be tokens"),
        ({"pad_token_id": 0.5}, OptionError, "must be tokens"),
        ({"on_tokens": 1}, OptionError, "on_tokens=1: must be a function"),
        ({"look_every": 0}, OptionError, "look_every=0: must be"),
        ({"input_ids": [[1, 2]]}, DTypeError, "input_ids.: list; give it an int64 tensor"),
        ({"input_ids": torch.rand(4, 12)}, DTypeError, "torch.float32; give it an int64"),
        ({"input_ids": torch.ones(6, dtype=torch.long)}, ShapeError, "must be .1, tokens"),
        ({"input_ids": PROMPTS[:, :0]}, ShapeError, "must be .4, tokens"),
        ({"attention_mask": SHOWN[:, 1:]}, ShapeError, "attention_mask must be a tensor of that"),
        ({"attention_mask": SHOWN.flip(1)}, ShapeError, "must be on the left"),
    ],
    ids=str,
)  # fmt: skip
def test_arguments_that_are_refused(
    options: dict[str, Any], error: type[Exception], why: str
) -> None:
    options = {"input_ids": PROMPTS, "attention_mask": SHOWN, "max_new_tokens": 3} | options
    with pytest.raises(error, match=why):
        cs.generate(LLAMA, **options)


def test_models_that_are_refused(graphs: list[Recording]) -> None:
    def refused(model: Any, why: str, error: Any = GenerationError) -> None:
        with pytest.raises(error, match=why):
            ours(model, PROMPTS, SHOWN)

    refused(torch.nn.Linear(2, 2), "give it a causal language model")
    refused(new_model("Llama").model, "give it a causal language model")
    refused(new_model("Llama").to("meta"), "on meta; move it", DeviceError)
    model = new_model("Llama")
    model.config._attn_implementation_internal = "flash_attention_2"
    refused(model, "its attention is flash_attention_2.*set_attn_implementation")
    chunks = new_model("Llama")
    chunks.config.attention_chunk_size = 4
    refused(chunks, "attention in chunks")
    few: dict[str, Any] = EXTENTS | {"num_experts": 2, "num_experts_per_tok": 1}
    linear = transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**few))
    refused(linear, "LinearAttention.*use model.generate")
    with pytest.raises(ShapeError, match="room for 14 positions; make a"):
        cs.Decoder(new_model("Llama"), 4, 14)(PROMPTS, SHOWN, max_new_tokens=9)


def test_models_that_a_cache_of_fixed_length_makes_wrong() -> None:
    """GPT-Neo's windows count from the end of the cache; Bloom wants masks as long as that."""
    torch.manual_seed(0)
    extents: dict[str, Any] = {"hidden_size": 32, "vocab_size": 128}
    neo = transformers.GPTNeoConfig(
        **extents, num_layers=2, attention_types=[[["global", "local"], 1]], num_heads=4,
        window_size=4, max_position_embeddings=512,
    )  # fmt: skip
    with pytest.raises(GenerationError, match="its logits are others with a cache of fixed length"):
        ours(transformers.GPTNeoForCausalLM(neo).eval(), WHOLE, None)
    mpt = transformers.MptConfig(d_model=32, n_heads=4, n_layers=2, vocab_size=128, max_seq_len=512)
    model = transformers.MptForCausalLM(mpt).eval()
    assert torch.equal(ours(model, WHOLE, None), theirs(model, WHOLE, torch.ones_like(WHOLE)))
    bloom = transformers.BloomConfig(**extents, n_layer=2, n_head=4)
    model = transformers.BloomForCausalLM(bloom).eval()
    assert torch.equal(ours(model, WHOLE, None), theirs(model, WHOLE, torch.ones_like(WHOLE)))
    with pytest.raises(GenerationError, match=r"it fails with a cache of fixed length: .*size"):
        ours(model, PROMPTS, SHOWN)
    with pytest.raises(IndexError):
        ours(model, PROMPTS + 1000, None)


def test_steps_that_cannot_be_captured(graphs: list[Recording]) -> None:
    model = new_model("Llama")
    forward = model.model.norm.forward
    model.model.norm.forward = lambda x: forward(x) * float(x.abs().max() >= 0)
    with pytest.raises(GenerationError, match="captured into a CUDA graph: _local_scalar_dense"):
        ours(model, PROMPTS, SHOWN)
