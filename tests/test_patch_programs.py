"""`cs.patch`: programs of several operators, for MLPs and projections."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import cutesuper as cs

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch import nn  # noqa: E402

from cutesuper.runtime.programs import Kept  # noqa: E402
from cutesuper.torch.patch import fused  # noqa: E402 (it imports torch)
from cutesuper.verify.numeric import acceptable  # noqa: E402
from tests.patching import TOKENS, in_float64, new_model  # noqa: E402


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    """All programs, which are made on the CPU too."""
    made: dict[Any, Any] = Kept()
    monkeypatch.setattr(fused, "KERNEL_DEVICES", {"cpu"})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(fused, "_programs", made)
    monkeypatch.setattr(fused, "refused", {})
    return made


def test_programs_that_are_found(programs: Any) -> None:
    pytest.importorskip("cutlass")
    model = new_model("Qwen2", num_hidden_layers=1).bfloat16()
    x = TOKENS[:, :2]
    with torch.no_grad():
        exact, theirs = in_float64(model)(x).logits, model(x).logits
        cs.patch(model)
        assert acceptable(model(x).logits, exact, theirs, torch.bfloat16)
        assert None not in programs.values() and not fused.refused
        assert {str(kind[0]) for kind in programs} == {
            "3 products of one tensor", "gated MLP with silu"
        }  # fmt: skip
        model(TOKENS[:, :3])  # six rows share kernels with four
    assert len(programs) == 2
    model(TOKENS[:, :3]).logits.sum().backward()
    assert model.model.layers[0].self_attn.k_proj.weight.grad.any()


class Attention(nn.Module):
    """Layers like those of attention; what k and v are of can be chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(32, 64), nn.Linear(32, 32), nn.Linear(32, 32)
        self.o = nn.Linear(64, 32)

    def forward(self, x: Any, change: Any = None) -> Any:
        q = self.q(x)
        y = x if change is None else change(x)
        return torch.cat((q, self.k(y), self.v(y)), -1)


@pytest.fixture
def found(programs: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calls of programs, in place of which the functions themselves run."""
    called: list[str] = []

    def superoptimize(call: Any, inputs: Any, **_: Any) -> Any:
        def program(*args: Any) -> Any:
            called.append(str(call.__self__))
            return call(*args)

        return program

    monkeypatch.setattr(fused, "superoptimize_callable", superoptimize)
    return called


def test_when_programs_run(found: list[str], programs: Any) -> None:
    model = new_model("Llama")
    qkv, mlp = ["3 products of one tensor"], ["gated MLP with silu"]
    cs.patch(model)
    with torch.no_grad():
        model(TOKENS[:, :2])  # the first call of a kind checks it too
        found.clear()
        model(TOKENS[:, :2])
        assert found == (qkv + mlp) * 2 and len(programs) == 2
        for x in (TOKENS, TOKENS[:, :3].repeat(11, 1)):  # long, many
            found.clear()
            model(x)
            assert not found
        model.double()(TOKENS[:, :2])
        model.float()
        with torch.autocast("cpu", torch.bfloat16):
            model(TOKENS[:, :2])
        layer = model.model.layers[0]
        layer.mlp.down_proj.register_forward_hook(lambda *_: None)
        layer.self_attn.k_proj = nn.Linear(64, 32)
        model(TOKENS[:, :2])
        assert found == qkv * 2 + mlp
    found.clear()
    model(TOKENS[:, :2]).logits.sum().backward()
    assert not found


def test_layers_of_other_tensors(found: list[str]) -> None:
    torch.manual_seed(0)
    original = Attention()
    x = torch.randn(2, 3, 32)
    changes = [
        None, lambda x: x, lambda x: x.clone(), lambda x: x.mul_(2.0), lambda x: x.detach(),
        lambda x: 2 * x,
    ]  # fmt: skip
    with torch.no_grad():
        for change in changes:
            model = copy.deepcopy(original)
            with cs.patch(model):
                for _ in range(3):
                    y = model(x.clone(), change)
                    torch.testing.assert_close(y, original(x.clone(), change))
                found.clear()
                model(x.clone(), change)
                shared = change is None or change is changes[1]
                assert len(found) == shared  # it is noticed where products are for nothing
            cs.patch(model)
            model(x)
            twin = copy.deepcopy(model)
            nn.init.zeros_(twin.k.weight)
            assert (twin(x)[..., 64:96] == twin.k.bias).all() and model(x).ne(0).all()


def test_what_is_written_between_layers(found: list[str]) -> None:
    torch.manual_seed(0)
    original, x = Attention(), torch.randn(2, 3, 32)
    model = copy.deepcopy(original)
    cs.patch(model)

    def halved(x: Any) -> Any:
        for m in (model, original):
            m.k.weight.mul_(0.5)
        return x

    with torch.no_grad():
        for _ in range(2):
            q, kv = original.q(x), model(x, halved)[..., 64:]
            torch.testing.assert_close(kv, torch.cat((original.k(x), original.v(x)), -1))
            torch.testing.assert_close(original(x)[..., :64], q)
    model = copy.deepcopy(original)
    cs.patch(model)
    with torch.inference_mode():  # where tensors do not count writes
        for _ in range(2):
            y = model(x.clone(), lambda x: x.mul_(2.0))
            torch.testing.assert_close(y, original(x.clone(), lambda x: x.mul_(2.0)))


def test_threads_do_not_take_products_of_others(found: list[str]) -> None:
    torch.manual_seed(0)
    model = Attention()
    x = torch.randn(1, 1, 32)
    expected = model(x)
    cs.patch(model)

    def work(n: int) -> bool:
        with torch.no_grad():
            return all(
                torch.allclose(model(x * s), expected, atol=1e9 if s > 1 else 1e-6)
                for s in [1, 1 + n] * 20
            )

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(8)))


def test_programs_that_are_refused(found: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(1, 2, 32)
    superoptimize = fused.superoptimize_callable

    def wrong(call: Any, inputs: Any, **options: Any) -> Any:
        program = superoptimize(call, inputs, **options)
        return lambda *args: tuple(1.001 * y for y in program(*args))

    def none(*_: Any, **options: Any) -> Any:
        raise cs.errors.SearchError("nothing was found\nin detail")

    with torch.no_grad():
        expected = model(x)
        cases = ((wrong, "cutesuper computes something else"), (none, "nothing was found"))
        for make, why in cases:
            monkeypatch.setattr(fused, "superoptimize_callable", make)
            monkeypatch.setattr(fused, "_programs", Kept())
            with cs.patch(model):
                for _ in range(2):
                    assert torch.equal(model(x), expected)
            [text] = fused.refused.values()
            assert text.startswith("3 products of one tensor of [2, 32] [64, 32] [64]")
            assert why in text and "\n" not in text
            fused.refused.clear()


@pytest.mark.parametrize(
    ("called", "recorded", "where"),
    [
        ((5.0, 4.0), [3.0, 4.0], (False, True)), ((3.0, 4.0), [5.0, 4.0], (True, False)),
        ((3.0, 4.0), None, (True, True)), ((5.0, 4.0), [5.0, 4.0], None), ((5.0, 4.0), None, None),
    ],
)  # fmt: skip
def test_two_clocks(
    called: Any, recorded: Any, where: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without memory for the second one, the first decides."""
    times = iter(called)
    monkeypatch.setattr(fused, "called_us", lambda call, device: next(times))
    monkeypatch.setattr(fused, "_recorded_us", lambda functions, inputs: recorded)
    program, function, inputs = lambda x: (x,), lambda x: (x,), [torch.ones(1)]
    if where is not None:
        assert fused._timed(program, function, inputs) == fused.Found(program, *where)
        return
    with pytest.raises(fused.Failed, match="calls: 5 us, the original 4 us; in CUDA graphs: 5 us"):
        fused._timed(program, function, inputs)
