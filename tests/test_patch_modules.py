"""`cs.patch`: which modules are replaced, and which calls run the original."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest

import cutesuper as cs
from cutesuper.errors import PatchError

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch import nn  # noqa: E402

from cutesuper.verify.numeric import acceptable  # noqa: E402
from tests.patching import TOKENS, facts, in_float64, new_model, paths  # noqa: E402

F = torch.nn.functional


@pytest.fixture
def llama() -> Any:
    return new_model("Llama")


# --- what is left alone --------------------------------------------------------------------------


class Norm(nn.Module):
    """RMSNorm, with what makes it something else."""

    def __init__(self, kind: str = "", width: int = 32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = 1e-6
        self.kind = kind

    def forward(self, x: Any, gate: Any = None) -> Any:
        rows = x.float()
        if self.kind == "sums":
            return self.weight * (rows * (rows.square().sum(-1, keepdim=True) + 1e-6).rsqrt())
        if self.kind == "another epsilon":
            rows = rows * (rows.square().mean(-1, keepdim=True) + 2e-6).rsqrt()
        elif self.kind == "epsilon outside":
            rows = rows / (rows.square().mean(-1, keepdim=True).sqrt() + self.variance_epsilon)
        else:
            eps = self.variance_epsilon
            rows = rows * (rows.square().mean(-1, keepdim=True) + eps).rsqrt()
        if self.kind == "squared weight":
            rows = rows * self.weight
        if self.kind == "dropout":
            rows = F.dropout(rows, 0.1, self.training)
        y = self.weight * rows.to(x.dtype)
        if self.kind == "float32":
            return y.float()
        if self.kind == "tuple":
            return y, rows
        return y if gate is None else y * gate


class GatedMLP(nn.Module):
    """A gated MLP, with what makes it something else; other names than in the library."""

    def __init__(self, kind: str = "", width: int = 32, hidden: int = 48) -> None:
        super().__init__()
        both = kind in ("fused", "up first")
        self.w1 = nn.Linear(width, 2 * hidden if both else hidden, bias="bias" in kind)
        if not both:
            self.w3 = nn.Linear(width, hidden, bias="bias" in kind)
        self.w2 = nn.Linear(hidden, width, bias="bias" in kind)
        self.dropout = nn.Dropout(0.1 if kind == "dropout" else 0.0)
        self.kind = kind

    def forward(self, x: Any) -> Any:
        if self.kind in ("fused", "up first"):
            a, b = self.w1(x).chunk(2, -1)
            gate, up = (b, a) if self.kind == "up first" else (a, b)
        else:
            gate, up = self.w1(x), self.w3(x)
        gate = {"relu": F.relu, "gelu": F.gelu}.get(self.kind, F.silu)(gate)
        y = self.w2(self.dropout(gate + up if self.kind == "sum" else gate * up))
        return y + x if self.kind == "residual" else y


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("sums", "neither RMSNorm nor"), ("another epsilon", "neither RMSNorm nor"),
        ("epsilon outside", "neither RMSNorm nor"), ("squared weight", "neither RMSNorm nor"),
        ("dropout", "something else in training"), ("tuple", "returns a tuple"),
    ],
)  # fmt: skip
def test_norms_that_are_something_else(kind: str, why: str) -> None:
    model = nn.ModuleDict({"a": Norm(), "b": Norm(kind)})
    before = facts(model["b"])
    with cs.patch(model) as patch:
        [entry] = patch.report().left
        assert entry.path == "b" and entry.was == "Norm" and why in entry.why
        assert paths(patch.report().replaced) == {"a"} and facts(model["b"]) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_norms_of_pytorch(dtype: Any) -> None:
    norms = (nn.LayerNorm(48), nn.LayerNorm(48, bias=False), nn.RMSNorm(48), nn.RMSNorm(48, 1e-5))
    model = nn.Sequential(*norms).to(dtype)
    for p in model.parameters():
        nn.init.normal_(p)
    x = 3 * torch.randn(5, 48).to(dtype) + 1
    exact = [n(x.double()) for n in copy.deepcopy(model).double()]
    theirs = [n(x) for n in model]
    # an epsilon that is not given depends on the type
    exact[2] = F.rms_norm(x.double(), (48,), norms[2].weight.double(), torch.finfo(dtype).eps)
    with cs.patch(model) as patch:
        assert len(patch.report().replaced) == 4
        for n, a, b in zip(norms, exact, theirs, strict=True):
            assert acceptable(n(x), a, b, dtype)


@pytest.mark.parametrize(
    ("kind", "now"),
    [
        ("", "cs.ops.swiglu"), ("bias", "cs.ops.swiglu"), ("fused", "cs.ops.swiglu"),
        ("up first", "cs.ops.swiglu"), ("gelu", "cs.ops.geglu, gelu"), ("relu", None),
        ("sum", None), ("residual", None), ("dropout", None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("hidden", [48, 32])  # of 32 layers cannot be told apart by their extents
def test_gated_mlps(kind: str, now: str | None, hidden: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(GatedMLP(kind, hidden=hidden))
    x = torch.randn(2, 5, 32)
    expected = model.eval()(x)
    with cs.patch(model) as patch:
        [entry] = patch.report().entries
        assert entry.now == now and bool(entry.why) == (now is None)
        assert acceptable(model(x), expected.double(), expected, torch.float32).relative < 1e-6


def test_modules_that_cannot_be_looked_into() -> None:
    hooked, bare = Norm(), Norm()
    hooked.forward = partial(Norm.forward, hooked)
    wide = Norm().double()
    meta = Norm().to("meta")
    quantized = GatedMLP()
    quantized.w3.__class__ = type("Linear4bit", (nn.Linear,), {})
    nested = GatedMLP()
    nested.act = nn.Sequential(nn.SiLU())
    parts = {"hooked": hooked, "wide": wide, "meta": meta, "quantized": quantized,
             "nested": nested, "bare": bare, "conv": nn.Conv1d(3, 3, 1), "own": cs.nn.RMSNorm(8),
             "batch": nn.BatchNorm1d(4), "group": nn.GroupNorm(2, 4),
             "lazy": nn.LazyLinear(4), "lazy batch": nn.LazyBatchNorm1d()}  # fmt: skip
    with cs.patch(nn.ModuleDict(parts)) as patch:
        why = {e.path: e.why for e in patch.report().left}
        assert paths(patch.report().replaced) == {"bare"}
    expected = {
        "hooked": "its forward was replaced", "wide": "torch.float64", "meta": "device meta",
        "quantized": "w3 is more than", "nested": "act has parts", "group": "neither RMSNorm",
    }  # fmt: skip
    assert why.keys() == expected.keys()
    assert all(text in why[path] for path, text in expected.items())


def test_only_what_is_asked_for(llama: Any) -> None:
    def now(**options: bool) -> set[str]:
        with cs.patch(llama, **options) as patch:
            return {(e.now or "").partition(",")[0] for e in patch.report().entries}

    everything = now()
    names = ("norms", "mlp", "qkv", "attention", "loss", "step")
    parts = [now(**{k: k == name for k in names}) for name in names]
    assert set.union(*parts) == everything and sum(map(len, parts)) == len(everything)
    assert now(**dict.fromkeys(names, False)) == set()


# --- calls that run the original -----------------------------------------------------------------


def test_other_calls_run_the_original() -> None:
    torch.manual_seed(0)
    norm, mlp, plain = Norm(), GatedMLP(), nn.LayerNorm(32)
    model = nn.ModuleList((norm, mlp, plain))
    x = torch.randn(4, 3, 32)

    def results() -> list[Any]:
        found = [
            norm(x, gate=x),
            norm(x, x),
            norm(gate=None, x=x),
            norm(x.bfloat16()),
            mlp(x=x),
            norm(x.double()),
            torch.func.vmap(mlp)(x),
            torch.func.vmap(norm)(x),
            torch.func.functional_call(norm, {"weight": torch.full((32,), 3.0)}, (x,)),
        ]
        with torch.autocast("cpu", torch.bfloat16):
            found += [plain(x), mlp(x), norm(x), plain(x.bfloat16())]
        mlp.double()
        found.append(mlp(x.double()))
        mlp.float()
        return found

    before = results()
    with cs.patch(model):
        after = results()
    for n, (a, b) in enumerate(zip(after, before, strict=True)):
        assert a.dtype == b.dtype, n
        bound = 1e-2 if a.dtype == torch.bfloat16 else 1e-6
        assert (a - b).abs().max() <= bound * b.abs().max(), n


def test_what_changes_after_patching(llama: Any) -> None:
    """Epsilons, layers, activations and weights are looked at when a module is called."""

    def change(model: Any) -> Any:
        layer = model.model.layers[0]
        layer.input_layernorm.variance_epsilon = 0.1
        layer.mlp.gate_proj = nn.Sequential(layer.mlp.gate_proj, nn.Tanh())
        model.model.layers[1].mlp.act_fn = nn.Sigmoid()
        with torch.no_grad():
            model.model.norm.weight.mul_(2.0)
            return model(TOKENS[:, :2]).logits

    exact, theirs = (change(m) for m in (in_float64(llama), copy.deepcopy(llama)))
    cs.patch(llama)
    assert acceptable(change(llama), exact, theirs, torch.float32)


def test_wrapped_after_patching(llama: Any) -> None:
    patch, norm = cs.patch(llama), llama.model.norm
    norm.forward = partial(type(norm).forward, norm)
    patched = facts(llama)
    with pytest.raises(PatchError, match=r"undo: model.norm was wrapped by something else"):
        patch.undo()
    assert facts(llama) == patched and cs.Patch.of(llama) is patch
    del norm.forward
    llama.set_attn_implementation("eager")
    patch.undo()
    assert llama.config._attn_implementation == "eager"  # chosen since
