"""A change since a function was traced is seen at the call."""

from __future__ import annotations

import collections
import copy
import functools
import gc
import logging
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cutesuper as cs
from cutesuper.errors import CutesuperError, GraphError, TraceError
from cutesuper.torch.compile import trace, traced_program
from tests.tracing import GatedMLP, Reference, randn, traced

X, Y, Z = randn(3, 5, 32), randn(3, 5, 32) * 0.5, randn(3, 5, 32).flip(0) + 1


@pytest.fixture
def optimized(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`cs.superoptimize` without compiling, and compared with the original at once."""
    monkeypatch.setattr(trace, "optimize_graph", lambda graph, **_: Reference(graph))

    def superoptimized(fn: Any, *inputs: Any, lazily: bool = False) -> Any:
        program = cs.superoptimize(fn) if lazily else cs.superoptimize(fn, inputs)
        same(program, fn, *inputs)
        return program

    return superoptimized


def same(program: Any, fn: Any, *inputs: Any) -> None:
    """A program gives what the original gives now."""
    with torch.no_grad():
        wanted, found = fn(*inputs), program(*inputs)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


# -------------------------------------------------------------------------- arguments that are one


def attention() -> nn.MultiheadAttention:
    torch.manual_seed(0)
    return nn.MultiheadAttention(32, 4, batch_first=True).eval()


@pytest.mark.parametrize(("first", "lazily"), [
    ((X, X, X), False), ((X, X, X), True), ((X, X[:], X.view(3, 5, 32)), False),
], ids=["one", "one, lazily", "views"])  # fmt: skip
def test_arguments_that_are_one_tensor(optimized: Any, first: Any, lazily: bool) -> None:
    fn = attention()
    program = optimized(fn, *first, lazily=lazily)
    for inputs in ((X, Y, Z), (X, Y, Y), (Y, Y, Y), (X, X[:], Z)):
        same(program, fn, *inputs)


def test_what_asks_for_identity(optimized: Any) -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        return x * 2 if x is y else x * y

    program = optimized(fn, X, Y)
    for inputs in ((X, X), (X, Y), (X, X[:]), (Y, Y)):
        same(program, fn, *inputs)


@pytest.mark.parametrize("other", [lambda x: x[:], lambda x: x.mT, lambda x: x.data],
                         ids=["slice", "transposed", "data"])  # fmt: skip
def test_parts_of_one_memory(optimized: Any, other: Any) -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        return torch.exp(x) - 3 * y

    x = randn(4, 4)
    program = optimized(fn, x, other(x))
    for inputs in ((x, randn(4, 4) + 1), (x + 1, x.mT), (x, x)):
        same(program, fn, *inputs)


def test_an_argument_that_is_a_parameter(optimized: Any) -> None:
    layer = nn.Linear(32, 32)

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return layer(x) @ w.t()

    program = optimized(fn, X, layer.weight)
    for w in (randn(32, 32), layer.weight, layer.bias.expand(32, 32), layer.weight[:]):
        same(program, fn, X, w)
    layer.weight = nn.Parameter(randn(32, 32))
    same(program, fn, X, layer.weight)
    same(program, fn, X, randn(32, 32))


def test_a_module_that_takes_its_own_parameter(optimized: Any) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(randn(32, 32))

        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            return (x @ self.weight).relu() @ w

    fn = Tied()
    program = optimized(fn, X, fn.weight)
    same(program, fn, X, randn(32, 32) + 1)
    fn.weight = nn.Parameter(randn(32, 32) - 1)
    same(program, fn, X, fn.weight)


# ------------------------------------------------------------------------------ modules that change


def _assigned(m: GatedMLP) -> None:
    m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()}, assign=True)


def _set_parameter(m: GatedMLP) -> None:
    m.down.weight = nn.Parameter(torch.ones(32, 48))


def _set_entry(m: GatedMLP) -> None:
    m.down._parameters["weight"] = nn.Parameter(torch.ones(32, 48))


def _set_data(m: GatedMLP) -> None:
    m.down.weight.data = torch.ones(32, 48)


def _set_transposed(m: GatedMLP) -> None:
    m.down.weight.data = randn(48, 32).t()


def _in_place(m: GatedMLP) -> None:
    with torch.no_grad():
        m.down.weight.mul_(2)


def _bias(m: GatedMLP) -> None:
    m.down.bias = nn.Parameter(torch.ones(32))


def _tied(m: GatedMLP) -> None:
    m.up.weight = m.gate.weight


def _untied_and_tied(m: GatedMLP) -> None:
    m.up = m.gate


def _submodule(m: GatedMLP) -> None:
    m.down = nn.Sequential(nn.Linear(48, 32), nn.ReLU())  # type: ignore[assignment]


def _wider(m: GatedMLP) -> None:
    m.gate, m.up, m.down = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)


def _activation(m: GatedMLP) -> None:
    m.act = torch.tanh


def _forward(m: GatedMLP) -> None:
    m.forward = types.MethodType(lambda self, x: self.down(self.up(x)), m)  # type: ignore[method-assign]


def _forward_of_a_part(m: GatedMLP) -> None:
    m.down.forward = lambda x: F.linear(x, m.down.weight) * 2  # type: ignore[method-assign]


def _hook(m: GatedMLP) -> None:
    m.up.register_forward_hook(lambda module, args, y: y * 2)


def _hook_before(m: GatedMLP) -> None:
    m.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def _class(m: GatedMLP) -> None:
    class Other(GatedMLP):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    m.__class__ = Other


def _parametrized(m: GatedMLP) -> None:
    class Doubled(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return w * 2

    nn.utils.parametrize.register_parametrization(m.down, "weight", Doubled())


CHANGES = (
    _assigned, _set_parameter, _set_entry, _set_data, _set_transposed, _in_place, _bias, _tied,
    _untied_and_tied, _submodule, _wider, _activation, _forward, _forward_of_a_part, _hook,
    _hook_before, _class, _parametrized,
)  # fmt: skip


@pytest.fixture(scope="module")
def gated_mlp() -> Any:
    """A module and its program."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        module = GatedMLP()
        return module, traced(monkeypatch, module, (X,))


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__)
def test_a_module_that_changes(
    monkeypatch: pytest.MonkeyPatch, gated_mlp: Any, change: Any
) -> None:
    monkeypatch.setattr(trace, "optimize_graph", lambda graph, **_: Reference(graph))
    module, program = copy.deepcopy(gated_mlp)
    change(module)
    same(program, module, X)
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(2)
    same(program, module, X)
    same(gated_mlp[1], gated_mlp[0], X)


@pytest.mark.parametrize("change", [_assigned, _set_data, _forward_of_a_part, _tied],
                         ids=lambda c: c.__name__)  # fmt: skip
def test_a_module_in_a_closure_that_changes(optimized: Any, change: Any) -> None:
    module = GatedMLP()

    def fn(x: Tensor) -> Tensor:
        return module(x) * 2

    program = optimized(fn, X, lazily=True)
    change(module)
    same(program, fn, X)


class Settings:
    """Numbers in attributes."""

    scale = 2.0

    def __init__(self) -> None:
        self.shift = 1.0
        self.deep = types.SimpleNamespace(power=2, weights=[randn(32), randn(32) + 1])

    def weight(self) -> Tensor:
        return self.deep.weights[0]


class Slotted:
    """An attribute without a dictionary."""

    __slots__ = ("factor",)

    def __init__(self, factor: float) -> None:
        self.factor = factor


@dataclass
class Pair:
    """Tensors in a dataclass."""

    first: Tensor
    second: float


class Reading(nn.Module):
    """Reads all kinds of things."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", randn(32))
        self.number = 3.0
        self.sizes = [32, 1]
        self.by_name: dict[str, Any] = {"a": 2.0, "t": randn(32) * 3}
        self.settings = Settings()
        self.slotted = Slotted(0.5)
        self.pair = Pair(randn(32) - 1, 2.0)
        self.plain = randn(32) / 2
        self.queue = collections.deque([2.0, 3.0])
        self.more = nn.ParameterList([randn(32), randn(32) * 2])

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.table * self.number + self.settings.shift - self.slotted.factor
        y = y * self.settings.scale + self.settings.weight() * self.settings.deep.power
        y = y + self.by_name["a"] * self.by_name["t"] + self.pair.first * self.pair.second
        for name in ("first", "second"):
            y = y + getattr(self.pair, name)
        for p in self.more:
            y = y * p
        return (y + self.plain * self.queue[-1]).view(*y.shape[:-1], *self.sizes).squeeze(-1)


CHANGED = (
    "m.table = randn(32) * 2", "m.table.add_(1)", "m.table = randn(1)", "m.table = randn(32)",
    "m._buffers['table'] = randn(32) * 3", "m.number = 4.0", "m.number = -3", "m.sizes = [1, 32]",
    "m.sizes.reverse()", "m.by_name['a'] = 5.0", "m.by_name['t'] = randn(32)",
    "m.by_name = {'a': 1.0, 't': randn(32)}", "m.settings.shift = 2.0", "Settings.scale = 9.0",
    "m.settings = Settings(); m.settings.shift = 7.0", "m.settings.scale = 4.0",
    "m.settings.deep.power = 3", "m.settings.deep.weights[0] = randn(32) * 7",
    "m.settings.deep.weights.insert(0, randn(32) * 5)", "m.slotted.factor = 1.5",
    "m.settings.weight = lambda: torch.ones(32)", "m.pair.second = 7.0",
    "m.pair.first = randn(32) * 9", "m.pair = Pair(randn(32), 1.0)", "m.plain = randn(32) * 6",
    "m.plain.zero_()", "m.plain.data = randn(32) * 8", "m.queue.append(5.0)",
    "m.more[1] = nn.Parameter(randn(32))", "m.more.append(nn.Parameter(randn(32)))",
    "m.more = m.more[:1]", "m.plain = m.table", "m.plain = m.table[:]",
)  # fmt: skip


def test_what_a_module_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Settings, "scale", 2.0)  # so that it is what it was, in the end
    module = Reading()
    program = traced(monkeypatch, module, (X,))
    for change in CHANGED:
        exec(change, globals(), {"m": module})
        try:
            same(program, module, X)
        except AssertionError as error:
            raise AssertionError(change) from error


def test_training_is_seen(optimized: Any) -> None:
    module = nn.Sequential(nn.Linear(32, 8), nn.Dropout(0.5)).eval()
    program = optimized(module, X)
    module.train()
    with pytest.raises(TraceError, match="drops elements at random"):
        program(X)
    module[1].p = 0.0
    same(program, module, X)
    module.eval()
    same(program, module, X)


# -------------------------------------------------------------------------- closures and globals


SCALE, TABLE = 2.0, randn(32)


def test_globals(optimized: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(x: Tensor) -> Tensor:
        return x * SCALE + _shifted(TABLE)

    program = optimized(fn, X)
    for name, value in (("SCALE", 3.0), ("TABLE", randn(32) * 2), ("SHIFT", 4), ("SCALE", -0.0),
                        ("TABLE", randn(1)), ("_shifted", torch.neg)):  # fmt: skip
        monkeypatch.setitem(globals(), name, value)
        same(program, fn, X)


SHIFT = 1


def _shifted(t: Tensor) -> Tensor:
    return t + SHIFT


def test_closures(optimized: Any) -> None:
    weight, scale, parts = randn(32, 32), 2.0, [randn(32), 3.0]

    def inner(x: Tensor) -> Tensor:
        return x @ weight * scale

    def fn(x: Tensor) -> Tensor:
        return inner(x) + parts[0] * parts[1]

    program = optimized(fn, X)
    weight = randn(32, 32) * 2
    same(program, fn, X)
    weight = randn(1, 32).expand(32, 32)
    same(program, fn, X)
    scale = 5.0
    same(program, fn, X)
    parts[1] = 1.0
    same(program, fn, X)
    parts[0] = randn(32) + 5
    same(program, fn, X)
    inner = torch.sin  # noqa: F811 (that is the point)
    same(program, fn, X)


def test_partial_functions_methods_and_defaults(optimized: Any) -> None:
    table = randn(32)

    def fn(x: Tensor, by: Any = table, *, shift: float = 1.0) -> Tensor:
        return x * by + shift

    settings = {"shift": 2.0}
    part = functools.partial(fn, **settings)
    program = optimized(part, X)
    part.keywords["shift"] = 3.0
    same(program, part, X)
    other = optimized(fn, X)
    fn.__kwdefaults__ = {"shift": 4.0}
    same(other, fn, X)
    fn.__defaults__ = (randn(32) * 2,)
    same(other, fn, X)

    class Scale:
        by = 2.0

        def run(self, x: Tensor) -> Tensor:
            return x * self.by + 1

    scale = Scale()
    method = optimized(scale.run, X)
    scale.by = 3.0
    same(method, scale.run, X)


def test_arrays_of_numpy(optimized: Any) -> None:
    numpy = pytest.importorskip("numpy")
    table = numpy.arange(32, dtype=numpy.float32)

    def fn(x: Tensor) -> Tensor:
        return x * torch.tensor(table.tolist())

    program = optimized(fn, X)
    table[3] = 100
    same(program, fn, X)


# ------------------------------------------------------------------------------------- gradients


def test_gradients_reach_what_is_read(optimized: Any) -> None:
    """Tensors of closures are as good as parameters."""
    layer, scale = nn.Linear(32, 8), randn(8).requires_grad_()

    def fn(x: Tensor) -> Tensor:
        return layer(x) * scale

    program = optimized(fn, X)
    layer.weight = nn.Parameter(randn(8, 32))
    program(X).sum().backward()
    found = [p.grad for p in (layer.weight, layer.bias, scale)]
    for p in (layer.weight, layer.bias, scale):
        p.grad = None
    fn(X).sum().backward()
    for mine, p in zip(found, (layer.weight, layer.bias, scale), strict=True):
        torch.testing.assert_close(mine, p.grad)


def test_a_detached_tensor_of_a_closure_has_no_gradient(optimized: Any) -> None:
    scale = randn(32).requires_grad_()
    program = optimized(lambda x: x * scale.detach() + scale, X)
    y = program(X)
    with pytest.raises(GraphError, match="stops gradients"):
        y.sum().backward()


# ------------------------------------------------------------------------- what the program changes


class Counting(nn.Module):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


class Carrying(nn.Module):
    """Carries a tensor from call to call, or makes it anew."""

    def __init__(self, anew: bool) -> None:
        super().__init__()
        self.state, self.anew = randn(32), anew

    def forward(self, x: Tensor) -> Tensor:
        self.state = x[0, 0] * 2 if self.anew else self.state * 2
        return x * self.state


class Remembering(nn.Module):
    """Makes a table at its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(32.0)
        return x * self.table


def test_functions_that_change_what_they_read(optimized: Any) -> None:
    seen: list[Tensor] = []
    layer = nn.Linear(32, 8)
    layer.register_forward_hook(lambda module, args, y: seen.append(y))
    numbers = iter([1.0, 2.0, 3.0])
    for fn, text in ((Carrying(anew=False), r"another tensor is put in the place of .*\.state"),
                     (Counting(), r"it changes what it reads: Counting\.calls was 1 and is 2"),
                     (layer, "it changes what it reads: seen"),
                     (lambda x: x * next(numbers), "numbers is an iterator")):  # fmt: skip
        with pytest.raises(TraceError, match=text):
            cs.superoptimize(fn, (X,))
    carrying = Carrying(anew=True)
    same(optimized(carrying, X), carrying, Y)
    module = Remembering()
    program = optimized(module, X)
    module.table = torch.ones(32)
    same(program, module, X)


def test_recurrent_layers(optimized: Any) -> None:
    """They keep lists of their weights, which they make anew under `torch.export`."""
    layer = nn.LSTM(32, 4, batch_first=True)
    program = optimized(lambda x: layer(x)[0], X)
    layer.load_state_dict(nn.LSTM(32, 4, batch_first=True).state_dict(), assign=True)
    same(program, lambda x: layer(x)[0], X)
    assert len(program._traces) == 1


LOGGER = logging.getLogger("tests.logged")


def test_a_logger_is_no_state(optimized: Any) -> None:
    """Its handlers have streams, which are iterators, and it remembers levels that were asked."""

    def logged(x: Tensor) -> Tensor:
        LOGGER.debug("called")
        return x * 2

    handler = logging.StreamHandler()
    LOGGER.addHandler(handler)
    program = optimized(logged, X)
    LOGGER.removeHandler(handler)
    same(program, logged, X)
    assert len(program._traces) == 1


def _seeded(x: Tensor) -> Tensor:
    torch.manual_seed(1)
    return x + torch.rand(32)


def _forked(x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return F.dropout(x, 0.5)


def test_functions_that_seed_their_random_numbers_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A traced program would draw others at every call."""
    own: Any = lambda x: x + torch.randn(32, generator=torch.Generator().manual_seed(1))  # noqa: E731
    for fn in (_seeded, _forked, own):
        with pytest.raises(TraceError, match=r"draws random numbers, .*outside of the function"):
            cs.superoptimize(fn, (X,), rest="torch")
    traced(monkeypatch, lambda x: F.dropout(x, 0.5, torch.manual_seed is None) * 2, (X,))
    outside = torch.Generator()
    fn: Any = lambda x: x + torch.rand(32, generator=outside)  # noqa: E731
    program = traced(monkeypatch, fn, (X,), rest="torch")
    outside.manual_seed(3)
    found = program(X)
    outside.manual_seed(3)
    torch.testing.assert_close(found, fn(X))


def test_dropout_drops_what_pytorch_drops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random operators stay whole where others are decomposed."""
    model = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(32, track_running_stats=False))
    program = traced(monkeypatch, model, (X[0],), rest="torch")
    torch.manual_seed(1)
    found = program(X[0])
    torch.manual_seed(1)
    torch.testing.assert_close(found, model(X[0]), rtol=1e-4, atol=1e-5)


def test_what_changes_at_every_call_is_refused(
    optimized: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traced_program, "MOST_TRACES", 3)
    number = 0

    def fn(x: Tensor) -> Tensor:
        return x * number

    program = optimized(fn, X)
    for number in (1, 2, 1, 0):  # noqa: B007 (the function reads it)
        same(program, fn, X)
    number = 3
    with pytest.raises(TraceError, match=r"traced 3 times, .*number was 2 and is 3"):
        program(X)


# -------------------------------------------------------------------------------- how it is called


def test_what_is_switched_on(optimized: Any) -> None:
    layer = nn.Linear(32, 8)

    def fn(x: Tensor) -> Tensor:
        return layer(x) * (2 if torch.is_grad_enabled() else 3)

    program = optimized(fn, X)
    torch.testing.assert_close(program(X), fn(X))
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert program(X).dtype is fn(X).dtype is torch.bfloat16
    same(program, fn, X)


def test_extents_stay_symbolic(monkeypatch: pytest.MonkeyPatch) -> None:
    module, batch = GatedMLP(), torch.export.Dim("batch")
    program = traced(monkeypatch, module, (X,), dynamic_shapes={"x": {0: batch}})
    module.act = torch.tanh
    for x in (X[:1], randn(5, 4, 32).transpose(0, 1), randn(1, 5, 64)[..., ::2]):
        same(program, module, x)
    assert len(program._traces) == 2


def test_replaced_weights_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    module = GatedMLP()
    program = traced(monkeypatch, module, (X,))
    old = weakref.ref(module.down.weight)
    module.down.weight = nn.Parameter(randn(32, 48))
    same(program, module, X)
    gc.collect()
    assert old() is None


def test_what_asks_for_strides(optimized: Any) -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.exp(x.as_strided((4,), (x.stride(0),)))

    program = optimized(fn, randn(4, 4))
    for x in (randn(4, 4).t(), randn(4, 8)[:, ::2], randn(4, 12)[:, ::3]):
        same(program, fn, x)


def test_contiguous_arguments_and_others(optimized: Any) -> None:
    def fn(x: Tensor) -> Tensor:
        return x * 2 if x.is_contiguous() else x * 3

    program = optimized(fn, X)
    for x in (randn(32, 5, 3).permute(2, 1, 0), X):
        same(program, fn, x)


@pytest.mark.parametrize(("inputs", "text"), [
    ((X.half(), [Y, 2.0]), r"x is torch\.float16, must be torch\.float32"),
    ((X, [Y[:2], 2.0]), r"rest\[0\] has shape \[2, 5, 32\], must be \[3, 5, 32\]"),
    ((X.view(5, 3, 32), [Y, 2.0]), r"x has shape \[5, 3, 32\]"),
    ((X, [Y, 3.0]), r"rest\[1\] is 3\.0, and was"), ((X, [Y, 2]), r"rest\[1\] is 2, and was"),
    ((X, (Y, 2.0)), "structure"), ((X, [Y, 2.0, 3.0]), "structure"),
    ((X, [2.0, Y]), r"rest\[0\] is a float, and was a tensor"),
])  # fmt: skip
def test_other_arguments_than_traced(optimized: Any, inputs: Any, text: str) -> None:
    def fn(x: Tensor, rest: Any) -> Tensor:
        return (F.pad(x, (0, 1)) * rest[1])[..., :-1] + rest[0]

    program = optimized(fn, X, [Y, 2.0])
    with pytest.raises(CutesuperError, match=text):
        program(*inputs)
