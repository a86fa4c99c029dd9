"""`cs.patch` in CUDA graphs: nothing is read from the device, timed or made while one is captured.

There is no GPU: the CPU counts as one, and a mode of PyTorch fails on what would wait for it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import cutesuper as cs

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import transformers  # noqa: E402

from cutesuper.runtime.programs import Kept  # noqa: E402
from cutesuper.torch.patch import attention as decoding  # noqa: E402
from cutesuper.torch.patch import fused  # noqa: E402
from tests.patching import FAMILIES, TOKENS, counted, new_model  # noqa: E402
from tests.recorded import Recorder  # noqa: E402


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A context in which a CUDA graph is captured, on a GPU that is the CPU; programs of few rows
    are the functions themselves."""
    state = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state[0])
    monkeypatch.setattr(decoding, "KERNEL_DEVICES", {"cpu"})
    monkeypatch.setattr(fused, "KERNEL_DEVICES", {"cpu"})
    monkeypatch.setattr(fused, "_programs", Kept())
    monkeypatch.setattr(fused, "superoptimize_callable", lambda call, *_, **__: call)

    @contextmanager
    def captured() -> Iterator[None]:
        state[0] = True
        try:
            with Recorder():
                yield
        finally:
            state[0] = False

    return captured


def decoder(model: Any) -> Any:
    """A function that decodes the tokens from ``begin`` to ``end`` with a cache that holds those
    before, and one that gives the same again."""
    cache: Any = transformers.StaticCache(model.config, max_cache_len=32)
    model(TOKENS[:, :8], past_key_values=cache)

    def step(begin: int, end: int, **options: Any) -> Any:
        own = copy.deepcopy(cache)
        for layer in own.layers:
            layer.cumulative_length.fill_(begin)
        return lambda: model(TOKENS[:, begin:end], past_key_values=own, **options).logits

    return step


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_steps_are_captured(family: str, capture: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = new_model(family), counted(monkeypatch)
    cs.patch(model)
    step = decoder(model)
    shown = {"attention_mask": torch.ones(2, 32, dtype=torch.long)}
    for begin, end, options, attended in ((8, 9, {}, 2), (8, 10, {}, 2), (8, 9, shown, 0)):
        expected = step(begin, end, **options)()
        again = step(begin, end, **options)
        calls.clear()
        with capture():
            found = again()
        # which keys padding hides is not known where the graph is replayed
        assert len(calls) == attended
        torch.testing.assert_close(found, expected)
    assert fused._programs


@torch.no_grad()
@pytest.mark.parametrize(("called", "recorded"), [(True, False), (False, True)])
def test_programs_run_where_they_are_faster(
    called: bool, recorded: bool, capture: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In calls, where the host counts, or in graphs, where it does not."""
    seen: list[Any] = []

    def found(function: Any, inputs: Any) -> Any:
        del inputs
        program = lambda *given: (seen.append(function), function(*given))[1]  # noqa: E731
        return fused.Found(program, called, recorded)

    monkeypatch.setattr(fused, "_found", found)
    model = new_model("Llama")
    cs.patch(model)
    step = decoder(model)
    seen.clear()
    step(8, 9)()
    assert len(seen) == 4 * called  # projections and MLPs of two layers
    seen.clear()
    with capture():
        step(8, 9)()
    assert len(seen) == 4 * recorded


@torch.no_grad()
def test_first_calls_are_refused(capture: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = new_model("Llama")
    cs.patch(model)
    step = decoder(model)
    with pytest.raises(cs.errors.DeviceError, match=r"3 products.* call it once before"), capture():
        step(8, 9)()
    step(8, 9)()

    def first(*_: Any, **__: Any) -> Any:
        raise cs.errors.DeviceError("attention: its first call falls into the capture")

    monkeypatch.setattr(decoding, "attention", first)
    refused = dict(decoding.refused)
    with pytest.raises(cs.errors.DeviceError, match="first call"), capture():
        step(8, 9)()
    assert decoding.refused == refused  # the next call outside of a capture makes them
