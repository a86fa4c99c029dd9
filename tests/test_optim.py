"""AdamW beside that of PyTorch; no GPU, but for the last tests."""

from __future__ import annotations

import copy
from typing import Any

import pytest

import cutesuper as cs
from cutesuper.errors import LayoutError, LoweringError, OperatorError
from cutesuper.verify.numeric import acceptable

torch = pytest.importorskip("torch")

from cutesuper.pipeline import Options, find  # noqa: E402
from cutesuper.targets import H200  # noqa: E402
from cutesuper.torch.ops.lists import Lists  # noqa: E402

SHAPES = ((4, 8), (24,), (3, 5), ())


def parameters(dtype: Any = None, device: str = "cpu", shapes: Any = SHAPES) -> list[Any]:
    torch.manual_seed(0)
    return [
        torch.randn(s, dtype=dtype or torch.float32, device=device).requires_grad_() for s in shapes
    ]


def train(optimizer: Any, params: list[Any], steps: int, clip: float | None = None) -> list[Any]:
    """Steps with random gradients of changing size, of which one leaves a parameter out."""
    torch.manual_seed(1)
    for n in range(steps):
        for k, p in enumerate(params):
            noise = torch.randn(p.shape, dtype=torch.float64) * 10.0 ** (n % 3 - 1)
            p.grad = None if n == 1 and k == 2 else noise.to(p)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(params, clip)
        optimizer.step()
    return [p.detach().clone() for p in params]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.3},
        {"maximize": True, "weight_decay": 0.0},
    ],
)
def test_steps(options: dict[str, Any]) -> None:
    found = train(cs.optim.AdamW(p := parameters(), **options), p, 5)
    want = train(torch.optim.AdamW(p := parameters(), **options), p, 5)
    torch.testing.assert_close(found, want, rtol=2e-6, atol=1e-6)


def test_groups() -> None:
    def made(kind: Any) -> list[Any]:
        p = parameters()
        groups = [{"params": p[:2], "lr": 1e-2}, {"params": p[2:], "weight_decay": 0.5}]
        return train(kind(groups), p, 3)

    torch.testing.assert_close(made(cs.optim.AdamW), made(torch.optim.AdamW), rtol=2e-6, atol=1e-6)


def test_clipping() -> None:
    ours = cs.optim.AdamW(p := parameters(), lr=0.1, max_norm=1.5)
    found = train(ours, p, 4)
    norm = torch.nn.utils.get_total_norm([q.grad for q in p])
    assert ours.grad_norm is not None
    torch.testing.assert_close(ours.grad_norm, norm)
    want = train(torch.optim.AdamW(p := parameters(), lr=0.1), p, 4, clip=1.5)
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)


def test_state_of_pytorch() -> None:
    """Half of the steps by one class, half by the other, in both orders."""
    want = train(torch.optim.AdamW(p := parameters()), p, 3)
    for kinds in ((cs.optim.AdamW, torch.optim.AdamW), (torch.optim.AdamW, cs.optim.AdamW)):
        first = kinds[0](p := parameters())
        train(first, p, 3)
        second = kinds[1](p)
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        found = train(second, p, 3)
    whole = torch.optim.AdamW(p := parameters())
    train(whole, p, 3)
    torch.testing.assert_close(found, train(whole, p, 3), rtol=2e-6, atol=1e-6)
    assert first.state_dict().keys() == second.state_dict().keys()
    assert not torch.equal(want[0], found[0])


def test_master_weights() -> None:
    """Steps that bfloat16 would lose are not lost, and survive saving."""

    def steps(optimizer: Any, params: list[Any], count: int) -> None:
        for _ in range(count):
            for p in params:
                p.grad = torch.ones_like(p)
            optimizer.step()

    params = [torch.ones(16, dtype=torch.bfloat16).requires_grad_()]
    first = cs.optim.AdamW(params, lr=1e-4, weight_decay=0.0, master_weights=True)
    steps(first, params, 20)
    assert first.state[params[0]]["exp_avg"].dtype == torch.float32
    again = cs.optim.AdamW(params, lr=1e-4, weight_decay=0.0, master_weights=True)
    again.load_state_dict(first.state_dict())
    assert again.state[params[0]]["master"].dtype == torch.float32
    steps(again, params, 80)
    torch.testing.assert_close(params[0].float(), torch.full((16,), 0.99), rtol=4e-3, atol=0)
    plain = [torch.ones(16, dtype=torch.bfloat16).requires_grad_()]
    steps(torch.optim.AdamW(plain, lr=1e-4, weight_decay=0.0), plain, 100)
    assert plain[0].eq(1).all()


def test_closures_and_schedules() -> None:
    def made(kind: Any) -> list[Any]:
        params = parameters()
        optimizer = kind(params, lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

        def loss() -> Any:
            optimizer.zero_grad()
            value = torch.stack([p.square().sum() for p in params]).sum()
            value.backward()
            return value

        losses = []
        for _ in range(3):
            losses.append(optimizer.step(loss))
            schedule.step()
        return losses

    torch.testing.assert_close(made(cs.optim.AdamW), made(torch.optim.AdamW))


def test_parameters_of_a_kind_share_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 8, of 16 and of 3 elements, whatever the number of parameters."""
    launched: list[int] = []
    run = Lists.run

    def noted(self: Lists, *args: Any) -> None:
        launched.append(self.count)
        run(self, *args)

    monkeypatch.setattr(Lists, "run", noted)
    shapes = ((24,), (16,), (3,), (2, 8), (8, 3), (3,))
    train(cs.optim.AdamW(p := parameters(shapes=shapes)), p, 1)
    assert sorted(launched) == [2, 2, 6]


def test_copies() -> None:
    """A copy goes on like the original."""
    params = parameters()
    train(optimizer := cs.optim.AdamW(params, max_norm=2.0), params, 1)
    other, copies = copy.deepcopy((optimizer, params))
    assert all(map(torch.equal, train(optimizer, params, 1), train(other, copies, 1)))


def test_refusals() -> None:
    with pytest.raises(OperatorError, match="max_norm"):
        cs.optim.AdamW(parameters(), max_norm=0.0)
    p = torch.randn(4, 6).t().requires_grad_()
    p.grad = torch.ones_like(p)
    with pytest.raises(LayoutError, match="contiguous"):
        cs.optim.AdamW([p]).step()
    theirs = torch.optim.AdamW(params := parameters(), amsgrad=True)
    train(theirs, params, 1)
    ours = cs.optim.AdamW(params)
    ours.load_state_dict(theirs.state_dict())
    with pytest.raises(OperatorError, match="amsgrad"):
        ours.step()


def test_only_whole_rows_lie_anywhere() -> None:
    g = cs.KernelGraph()
    x, w = g.new_input((64, 128), name="X"), g.new_input((128,), name="W")
    g.mark_output(g.mul(x, w))
    [plan] = find(g, Options(H200))[1].plans
    given = {a.name: a.scattered for a in plan.scattered(["X", "out0"]).arguments}
    assert given == {"X": True, "W": False, "out0": True}
    assert plan.scattered(["X"]).key != plan.key
    with pytest.raises(LoweringError, match=r"W\[128\]"):
        plan.scattered(["W"])
    g = cs.KernelGraph()
    g.mark_output(g.matmul(g.new_input((64, 64), name="X"), g.new_input((64, 64))))
    [plan] = find(g, Options(H200))[1].plans
    with pytest.raises(LoweringError, match="only kernels of rows"):
        plan.scattered(["X"])


# --- kernels -------------------------------------------------------------------------------------


def judge(dtype: Any, shapes: Any, **options: Any) -> None:
    """Steps of kernels, against float64; PyTorch's parameters have the same type."""
    found = train(cs.optim.AdamW(p := parameters(dtype, "cuda", shapes), **options), p, 3)
    eager = train(torch.optim.AdamW(p := parameters(dtype, "cuda", shapes)), p, 3)
    exact = [p.detach().double().requires_grad_() for p in parameters(dtype, "cuda", shapes)]
    want = train(torch.optim.AdamW(exact), exact, 3)
    for ours, reference, theirs in zip(found, want, eager, strict=True):
        assert (report := acceptable(ours, reference, theirs, ours.dtype)), report


@pytest.mark.gpu
@pytest.mark.ptx
def test_kernels() -> None:
    """Three parameters whose gradients move, of which one takes a step less."""
    judge(torch.bfloat16, ((4, 1024), (3, 1024), (2, 512)), master_weights=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernels_of_shapes(dtype: Any) -> None:
    judge(dtype, ((1000, 1024), (24,), (3, 5), (50257,), ()))


@pytest.mark.gpu
def test_capture() -> None:
    params = parameters(torch.bfloat16, "cuda", ((64, 1024),))
    optimizer = cs.optim.AdamW(params, capturable=True, max_norm=1.0, master_weights=True)
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    before = params[0].detach().clone()
    for _ in range(3):
        graph.replay()
    assert optimizer.state[params[0]]["step"] == 4 and not torch.equal(before, params[0])
