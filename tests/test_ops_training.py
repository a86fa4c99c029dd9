"""Operators with gradients, without a GPU: numbers, messages, and what PyTorch does with them."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cutesuper as cs
from cutesuper.errors import (
    DeviceError,
    DTypeError,
    FormatError,
    GraphError,
    LayoutError,
    OperatorError,
    ShapeError,
)
from cutesuper.ir.dims import Symbol
from cutesuper.runtime.calling import Launches, launcher

torch = pytest.importorskip("torch")

from functorch.compile import make_boxed_func  # noqa: E402
from torch._dynamo.backends.common import aot_autograd  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.testing._internal.two_tensor import TwoTensor  # noqa: E402
from torch.utils.checkpoint import (  # noqa: E402
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from cutesuper.runtime.programs import Kept  # noqa: E402
from cutesuper.torch.ops.classes import class_of  # noqa: E402
from cutesuper.torch.ops.rowwise import calls, graphs, norms  # noqa: E402 (they import torch)
from cutesuper.torch.ops.rowwise.definition import Kind, kind_of  # noqa: E402
from tests.host_time import LeastGradient, host_time, least_rows  # noqa: E402
from tests.training import (  # noqa: E402
    CASES,
    doubled,
    gradients_of,
    judge,
    leaves_of,
    outcome,
    tensors_of,
    total,
)

TYPES = (torch.float32, torch.bfloat16, torch.float16)


# --- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str, dtype: Any) -> None:
    torch.manual_seed(0)
    for lead, n in (((4, 7), 64), ((), 33), ((5,), 1), ((600,), 24), ((2, 1, 3), 257)):
        judge(name, tensors_of(name, lead, n, dtype))


@pytest.mark.parametrize("types", list(itertools.permutations(TYPES, 2)))
@pytest.mark.parametrize("name", [n for n in CASES if "without weight" not in n])
def test_weights_of_another_type(name: str, types: Any) -> None:
    torch.manual_seed(1)
    tensors = tensors_of(name, (9, 3), 48, *types)
    found = judge(name, tensors)
    for g, t in zip(found.gradients, tensors, strict=True):
        assert g is None or g.dtype == t.dtype


@pytest.mark.parametrize("name", CASES)
def test_only_the_gradients_that_are_asked_for(name: str) -> None:
    torch.manual_seed(2)
    tensors = tensors_of(name, (6,), 40, torch.float32)
    choices = [(False, True) if t.is_floating_point() else (False,) for t in tensors]
    for needs in itertools.product(*choices):
        judge(name, tensors, needs)


@pytest.mark.parametrize("unused", [[0], [1]])
def test_a_result_that_is_not_used(unused: list[int]) -> None:
    torch.manual_seed(3)
    name = "rms_norm with residual"
    tensors = tensors_of(name, (6, 2), 40, torch.float32)
    # the norm of the sum does not depend on the weight if only the sum is used
    needs = [True, True, unused != [0]]
    judge(name, tensors, needs, unused)


@pytest.mark.parametrize("name", CASES)
def test_the_definition_it_is_compared_with(name: str) -> None:
    torch.manual_seed(4)
    tensors = leaves_of(name, (3,), 5, torch.float64)
    assert torch.autograd.gradcheck(CASES[name].theirs, tensors)


@pytest.mark.parametrize("name", CASES)
def test_any_strides(name: str) -> None:
    torch.manual_seed(5)
    tensors = tensors_of(name, (6, 3), 16, torch.float32)
    made = CASES[name].ours(*tensors)
    expected = made if isinstance(made, tuple) else (made,)
    turned = [t.mT.contiguous().mT if t.dim() > 1 else torch.stack((t, t), 1)[:, 0]
              for t in tensors]  # fmt: skip
    shifted = [torch.cat((t.flatten()[:1], t.flatten()))[1:].view(t.shape) for t in tensors]
    assert not any(t.is_contiguous() for t in turned)
    assert any(t.data_ptr() % 16 for t in shifted)
    for given in (turned, shifted):
        made = CASES[name].ours(*given)
        for y, want in zip(made if isinstance(made, tuple) else (made,), expected, strict=True):
            assert torch.equal(y, want) and y.is_contiguous()
    judge(name, turned)


def test_cotangents_of_any_strides() -> None:
    x = torch.randn(6, 16, requires_grad=True)
    w = torch.randn(16, requires_grad=True)
    for d in (torch.ones(()).expand(6, 16), torch.randn(16, 6).mT, torch.randn(97)[1:].view(6, 16)):
        found = torch.autograd.grad(cs.ops.rms_norm(x, w), (x, w), d)
        expected = torch.autograd.grad(cs.ops.rms_norm(x, w), (x, w), d.clone().contiguous())
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_no_rows(name: str) -> None:
    tensors = tensors_of(name, (0, 3), 16, torch.bfloat16)
    found = judge(name, tensors)
    pairs = zip(tensors, found.gradients, strict=True)
    for t, g in [(t, g) for t, g in pairs if t.is_floating_point()]:
        assert g.shape == t.shape and g.dtype == t.dtype and not g.any()


# --- autograd ------------------------------------------------------------------------------------


def leaves(name: str, lead: tuple[int, ...] = (4, 2), n: int = 24) -> list[Any]:
    return leaves_of(name, lead, n, torch.float32)


@pytest.mark.parametrize("name", CASES)
def test_second_derivatives_are_refused(name: str) -> None:
    tensors = leaves(name)
    made = CASES[name].ours(*tensors)
    grads = gradients_of(total(made), tensors, create_graph=True)  # may be made, not used
    plain = gradients_of(total(CASES[name].ours(*tensors)), tensors)
    assert all(torch.equal(a, b) for a, b in zip(grads, plain, strict=True))
    with pytest.raises(GraphError, match=r"cannot be differentiated again; leave out create_graph"):
        sum(g.sum() for g in grads).backward()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_activation_checkpointing(name: str, reentrant: bool) -> None:
    tensors = leaves(name)

    def layer(*given: Any) -> Any:
        return total(CASES[name].ours(*doubled(given)))

    expected = gradients_of(layer(*tensors), tensors)
    checkpoint(layer, *tensors, use_reentrant=reentrant).backward()
    for t, want in zip([t for t in tensors if t.requires_grad], expected, strict=True):
        assert torch.equal(t.grad, want)


def test_selective_checkpointing() -> None:
    tensors = leaves("rms_norm with residual")
    seen: list[str] = []

    def policy(ctx: Any, op: Any, *args: Any, **options: Any) -> Any:
        seen.append(str(op))
        return CheckpointPolicy.MUST_SAVE

    def layer(*given: Any) -> Any:
        return total(CASES["rms_norm with residual"].ours(*given))

    expected = gradients_of(layer(*tensors), tensors)
    loss = checkpoint(
        layer, *tensors, use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(policy),
    )  # fmt: skip
    found = gradients_of(loss, tensors)
    assert "cutesuper.add_rms_norm.default" in seen
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_saved_tensors_can_be_moved() -> None:
    tensors = leaves("layer_norm")
    expected = gradients_of(total(cs.ops.layer_norm(*tensors)), tensors)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.numpy(), torch.from_numpy):
        loss = total(cs.ops.layer_norm(*(t.clone() for t in tensors)))
    found = gradients_of(loss, tensors)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_what_is_changed_after_the_call_is_noticed() -> None:
    x = torch.randn(4, 8)
    y = cs.ops.rms_norm(x, torch.ones(8, requires_grad=True))
    x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_only_what_is_needed_is_kept() -> None:
    x, w, b = leaves("layer_norm")
    kept: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        cs.ops.layer_norm(x, w, b)
    assert [tuple(t.shape) for t in kept] == [(4, 2, 24), (24,), (8, 1), (8, 1)]
    assert {t.dtype for t in kept} == {torch.float32}
    kept.clear()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        cs.ops.rms_norm(x, w, residual=x)
    assert sorted(tuple(t.shape) for t in kept) == [(4, 2, 24), (8, 1), (24,)]


@pytest.mark.parametrize("name", CASES)
def test_autocast_changes_nothing(name: str) -> None:
    """Arithmetic is in float32 anyway; results have the type of their operand."""
    for dtype in (torch.float32, torch.bfloat16):
        tensors = leaves_of(name, (4,), 24, dtype)
        expected = CASES[name].ours(*tensors)
        grads = gradients_of(total(expected), tensors)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = CASES[name].ours(*tensors)
            loss = total(found)
        pairs = zip(*(y if isinstance(y, tuple) else (y,) for y in (found, expected)), strict=True)
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in pairs)
        again = gradients_of(loss, tensors)
        assert all(torch.equal(a, b) for a, b in zip(again, grads, strict=True))


# --- compilers -----------------------------------------------------------------------------------


def operator_examples() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Registered operators and arguments."""
    made = {}
    ops = torch.ops.cutesuper
    for grad in (False, True):
        x, r, h = (torch.randn(*s, requires_grad=grad) for s in ((4, 3, 16), (4, 3, 16), (3, 16)))
        w, b = (torch.randn(16, requires_grad=grad) for _ in range(2))
        made |= {
            f"rms_norm {grad}": (ops.rms_norm, (x, w, 1e-6, 0.0)),
            f"rms_norm without weight {grad}": (ops.rms_norm, (x, None, 1e-6, 0.0)),
            f"rms_norm of heads {grad}": (ops.rms_norm, (x, h, 1e-6, 0.5)),
            f"add_rms_norm {grad}": (ops.add_rms_norm, (x, r, w, 1e-6, 0.0)),
            f"layer_norm {grad}": (ops.layer_norm, (x, w, b, 1e-6)),
        }
    kind = kind_of(norms._rms_norm_operator.definition, (x, w), (1e-6, 0.0)).to_text()
    saved = [x.detach(), w.detach(), torch.rand(12, 1)]
    for needs in ([True, True], [True, False], [False, True]):
        made[f"rms_norm_backward {needs}"] = (
            ops.rms_norm_backward, (saved, [torch.randn(4, 3, 16)], kind, needs)
        )  # fmt: skip
    return made


@pytest.mark.parametrize("name", operator_examples())
def test_opcheck(name: str) -> None:
    op, args = operator_examples()[name]
    torch.library.opcheck(op.default, args)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_compiles_as_a_whole(name: str, dynamic: bool) -> None:
    torch._dynamo.reset()

    def layer(*given: Any) -> Any:
        return total(CASES[name].ours(*doubled(given)))

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for rows in (4, 6, 9) if dynamic else (4,):  # another known extent is compiled like the first
        tensors = leaves(name, (rows, 2))
        expected = gradients_of(layer(*tensors), tensors)
        found = gradients_of(compiled(*tensors), tensors)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b)
        with torch.no_grad():
            torch.testing.assert_close(compiled(*tensors), layer(*tensors))


def test_compiled_gradients_are_those_that_are_needed() -> None:
    seen: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append(graph)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    x, w = leaves("rms_norm")
    compiled = torch.compile(
        cs.ops.rms_norm, fullgraph=True, backend=aot_autograd(fw_compiler=backend)
    )
    compiled(x.detach(), w).sum().backward()
    [call] = [n for g in seen for n in g.graph.nodes if "rms_norm_backward" in str(n.target)]
    assert call.args[3] == [False, True]


def test_exports() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = cs.nn.RMSNorm(16)

        def forward(self, x: Any) -> Any:
            return self.norm(x, residual=x + 1)[0]

    x = torch.randn(5, 16)
    rows = torch.export.Dim("rows", min=2, max=1000)
    program = torch.export.export(Model(), (x,), dynamic_shapes={"x": {0: rows}})
    assert "cutesuper.add_rms_norm.default" in str(program.graph)
    for n in (2, 700):
        x = torch.randn(n, 16)
        torch.testing.assert_close(program.module()(x), Model()(x))


def test_traces() -> None:
    x, w = torch.randn(5, 16), torch.randn(16)
    traced = torch.jit.trace(cs.ops.rms_norm, (x, w))
    x = torch.randn(5, 16)
    torch.testing.assert_close(traced(x, w), cs.ops.rms_norm(x, w))


def test_fake_tensors() -> None:
    with FakeTensorMode():
        x, w = torch.empty(4, 3, 16, dtype=torch.bfloat16), torch.empty(16, requires_grad=True)
        y = cs.ops.rms_norm(x, w)
        assert y.shape == (4, 3, 16) and y.dtype is torch.bfloat16 and y.requires_grad
        y.sum().backward()
        assert w.grad.shape == (16,) and w.grad.dtype is torch.float32
    meta = cs.ops.layer_norm(torch.empty(0, 16, device="meta"))
    assert meta.shape == (0, 16) and meta.device.type == "meta"


def test_subclasses_keep_their_behaviour() -> None:
    x = TwoTensor(torch.randn(4, 16), torch.randn(4, 16))
    y = cs.ops.rms_norm(x)
    assert torch.equal(y.a, cs.ops.rms_norm(x.a)) and torch.equal(y.b, cs.ops.rms_norm(x.b))


@pytest.mark.parametrize(
    "call",
    [
        torch.vmap(cs.ops.rms_norm),
        torch.func.grad(lambda x: cs.ops.rms_norm(x).sum()),
        lambda x: torch.func.jvp(cs.ops.rms_norm, (x,), (x,)),
    ],
)
def test_transforms_are_refused(call: Any) -> None:
    with pytest.raises(OperatorError, match="rms_norm: it cannot be called under vmap"):
        call(torch.randn(2, 4, 8))


def test_forward_mode_is_refused() -> None:
    x = torch.randn(2, 8)
    with torch.autograd.forward_ad.dual_level():
        assert cs.ops.rms_norm(x).shape == (2, 8)
        with pytest.raises(OperatorError, match=r"no forward-mode derivative; use reverse mode"):
            cs.ops.rms_norm(torch.autograd.forward_ad.make_dual(x, x))


# --- messages ------------------------------------------------------------------------------------

X, W = torch.zeros(4, 3, 16), torch.zeros(16)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: cs.ops.rms_norm(X, W[:8]), ShapeError,
         r"rms_norm\(x\[4, 3, 16\], weight\[8\]\): weight has shape \[8\], must be \[16\].*heads"),
        (lambda: cs.ops.rms_norm(X, X), ShapeError, r"must be \[16\].*or \[3, 16\] for rows"),
        (lambda: cs.ops.rms_norm(W, X[0]), ShapeError, r"x must be \[..., H, N\]"),
        (lambda: cs.ops.rms_norm(X[..., :0]), ShapeError, "at least one element in a row"),
        (lambda: cs.ops.rms_norm(torch.zeros(())), ShapeError, r"x must be \[..., N\]"),
        (lambda: cs.ops.rms_norm(X, W, residual=X[:2]), ShapeError,
         r"residual has shape \[2, 3, 16\], must be \[4, 3, 16\].*nothing is broadcast"),
        (lambda: cs.ops.rms_norm(X.double()), DTypeError, r"x is torch.float64; convert it to"),
        (lambda: cs.ops.rms_norm(X, W.int()), DTypeError, "weight is torch.int32"),
        (lambda: cs.ops.rms_norm([1.0]), DTypeError, r"x is a list, must be a torch tensor"),
        (lambda: cs.ops.rms_norm(X, 1.0), DTypeError, r"weight is a float, must be a torch"),
        (lambda: cs.ops.rms_norm(None), DTypeError, r"x is a NoneType, must be a torch tensor"),
        (lambda: cs.ops.rms_norm(X, W.to("meta")), DeviceError, r"weight is on meta, x on cpu"),
        (lambda: cs.ops.rms_norm(X, eps=-1.0), OperatorError, r"eps must be a number in \[0"),
        (lambda: cs.ops.rms_norm(X, eps=float("nan")), OperatorError, "eps=nan"),
        (lambda: cs.ops.rms_norm(X, W, weight_offset=float("inf")), OperatorError, "offset=inf"),
        (lambda: cs.ops.rms_norm(X, (16,), W), OperatorError,
         r"rms_norm: it takes no normalized_shape: .* \(x, weight=None, \*, residual=None, eps="),
        (lambda: cs.ops.rms_norm(X, [16]), OperatorError, "rows are the last dimension"),
        (lambda: cs.ops.rms_norm(X, normalized_shape=(16,)), OperatorError, "no normalized_shape"),
        (lambda: cs.ops.layer_norm(X, (16,), W, W), OperatorError,
         r"layer_norm: it takes no .* arguments are \(x, weight=None, bias=None, \*, eps=1e-05\)"),
        (lambda: cs.ops.layer_norm(X, 16, W), OperatorError, "no normalized_shape"),
        (lambda: cs.ops.layer_norm(X, W, W[:4]), ShapeError, r"bias has shape \[4\]"),
        (lambda: cs.ops.layer_norm(X, eps=-1.0), OperatorError, r"layer_norm\(eps=-1.0\)"),
        (lambda: Kind.of_text("[]"), FormatError, "leave it as the forward operator has it"),
        (lambda: cs.nn.RMSNorm(8, elementwise_affine=False)(X), ShapeError,
         r"RMSNorm\(\(8,\)\): called with shape \[4, 3, 16\], whose last extents must be \[8\]"),
        (lambda: cs.nn.LayerNorm((2, 16))(X), ShapeError, r"LayerNorm\(\(2, 16\)\)"),
    ],
)  # fmt: skip
def test_what_is_refused(call: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        call()


def test_options_are_what_they_are_worth() -> None:
    """Calls with known options are not checked again: those that are equal are the same call."""
    x, eps = torch.randn(4, 16), torch.tensor(0.25)
    small, large = (cs.ops.rms_norm(x, eps=e) for e in (0.25, 0.5))
    assert not torch.equal(small, large)
    assert torch.equal(cs.ops.rms_norm(x, eps=eps), small)
    eps += 0.25
    assert torch.equal(cs.ops.rms_norm(x, eps=eps), large)
    assert torch.equal(cs.ops.rms_norm(x, eps=np.array(0.5)), large)
    assert torch.equal(cs.ops.rms_norm(x, eps="0.5"), large)
    for _ in range(2):
        with pytest.raises(OperatorError, match=r"rms_norm\(eps=\[0.5\]\): must be a number"):
            cs.ops.rms_norm(x, eps=[0.5])


def test_a_layout_of_another_kind_is_refused_after_a_call_with_the_same_shape() -> None:
    x = torch.randn(4, 16)
    for _ in range(2):
        cs.ops.rms_norm(x)
        with pytest.raises(LayoutError, match=r"x is not an ordinary tensor \(torch.sparse_coo\)"):
            cs.ops.rms_norm(x.to_sparse())


# --- kernels -------------------------------------------------------------------------------------


class Gpu:
    """Counts what is superoptimized; the launches do nothing."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0)
        self.made: list[Any] = []
        self.launched: list[Any] = []
        self.capturing = False

    def best_variant(self, graph: Any) -> Any:
        self.made.append(graph)
        time.sleep(0.01)
        return SimpleNamespace(launches=Launches((), self.launched.append))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    import cutesuper.pipeline

    fake = Gpu()
    monkeypatch.setattr(cutesuper.pipeline, "best_variant", fake.best_variant)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: fake.capturing)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(graphs, "_kernels", Kept())
    return fake


def prepare(gpu: Gpu, rows: int, n: int = 16, saving: bool = True, needs: Any = None) -> Any:
    """The programs of a call with so many rows."""
    definition = norms._rms_norm_operator.definition
    x, w = torch.empty(rows, n, device="meta"), torch.empty(n, device="meta")
    kind = kind_of(definition, (x, w), (1e-6, 0.0))
    if needs is not None:
        return calls.gradients_of(definition, kind, (rows,), gpu.device, needs, (True,))
    programs = graphs.programs_of(definition, kind, class_of("rows", rows))
    graph = programs.saving if saving else programs.plain
    key = (definition.name, kind, class_of("rows", rows), saving)
    return graphs.runner_of(key, graph, gpu.device)


def test_rows_share_kernels(gpu: Gpu) -> None:
    for rows in (1, 3, 512, 513, 1000, 4096, 4097, 70000):
        prepare(gpu, rows)
    assert [g.nodes[g.inputs[0]].shape[0] for g in gpu.made] == [
        Symbol("M", hint) for hint in (128, 2048, 16384)
    ]
    assert [len(g.outputs) for g in gpu.made] == [2, 2, 2]
    prepare(gpu, 5, saving=False)
    assert len(gpu.made) == 4 and len(gpu.made[-1].outputs) == 1


def test_gradients_have_kernels_of_their_own(gpu: Gpu) -> None:
    for needs in ((True, True), (True, False), (False, True), (True, True)):
        prepare(gpu, 100, needs=needs)
    shapes = [[g.nodes[i].shape for i in g.outputs] for g in gpu.made]
    m = Symbol("M", 128)
    assert shapes == [[(m, 16), (1, 16)], [(m, 16)], [(1, 16)]]
    assert [len(g.inputs) for g in gpu.made] == [4, 4, 3]  # dw needs no weight


def test_no_kernels_without_rows(gpu: Gpu) -> None:
    made = prepare(gpu, 0, needs=(True, True))
    assert not gpu.made and made.step.rows == 0


def test_no_kernels_are_made_in_a_capture(gpu: Gpu) -> None:
    gpu.capturing = True
    with pytest.raises(DeviceError, match=r"rms_norm: .*capture of a CUDA graph.*call it once"):
        prepare(gpu, 5)
    gpu.capturing = False
    prepare(gpu, 5)
    gpu.capturing = True
    prepare(gpu, 6)
    assert len(gpu.made) == 1


def test_few_kernels_are_kept(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_kernels", Kept(3))
    for n in (8, 16, 24, 32, 8):
        prepare(gpu, 5, n)
    assert len(graphs._kernels) == 3 and len(gpu.made) == 5


def test_few_plans_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(6)
    monkeypatch.setattr(norms._rms_norm_operator, "_plans", Kept(3))
    for n in range(1, 9):
        judge("rms_norm", tensors_of("rms_norm", (64,), n, torch.float32))
    assert len(norms._rms_norm_operator._plans) == 3


def test_threads_make_a_kernel_once(gpu: Gpu) -> None:
    barrier = threading.Barrier(8)

    def work(n: int) -> None:
        barrier.wait()
        for needs in (None, (True, True)):
            prepare(gpu, 5, needs=needs)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))
    assert len(gpu.made) == 2


def test_threads_run() -> None:
    tensors = tensors_of("layer_norm", (50,), 31, torch.float32)
    [x, w, b] = tensors
    expected = outcome(cs.ops.layer_norm, tensors, [x])

    def work(n: int) -> Any:
        return [outcome(cs.ops.layer_norm, (x[:m], w, b), [x[:m]]) for m in (50, 1 + n, 50)]

    with ThreadPoolExecutor(4) as threads:
        for found in threads.map(work, range(12)):
            for g, want in zip(found[0].gradients, expected.gradients, strict=True):
                assert torch.equal(g, want)


def test_tensors_between_kernels_have_as_many_rows(gpu: Gpu) -> None:
    launches = Launches((((Symbol("M", 128), 4), torch.float16),), gpu.launched.append)
    run = launcher(launches, torch.device("cpu", 0))
    run([torch.zeros(7, 16)], [torch.zeros(7, 16)], 7)
    assert [tuple(t.shape) for t in gpu.launched[0]] == [(7, 16), (7, 16), (7, 4)]


def test_host_time_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the launch 3.5 us, 7.1 us where gradients are asked for, and 2.3 us for these, on a
    machine that takes 1 us to add two tensors: 1.4, 0.95 and 0.93 times what is to be done, written
    down plainly. 1.4 times as much is too much."""
    monkeypatch.setattr(calls, "runner_of", lambda key, graph, device: lambda i, o, rows: None)
    monkeypatch.setattr(norms._rms_norm_operator, "_plans", Kept())
    x, w = torch.randn(4, 16), torch.randn(16)
    leaf, differentiable = x.clone().requires_grad_(), LeastGradient.apply
    assert host_time(lambda: cs.ops.rms_norm(x, w), lambda: least_rows(x, w)) < 1.95
    assert host_time(lambda: cs.ops.rms_norm(leaf, w), lambda: differentiable(leaf, w)) < 1.35
    y = cs.ops.rms_norm(leaf, w)
    torch.autograd.grad(y, leaf, x, retain_graph=True)
    *_, plan = norms._rms_norm_operator._plans.values()
    [gradients] = plan.backwards.values()
    saved = y.grad_fn.saved_tensors
    assert host_time(lambda: gradients(saved, (x,)), lambda: least_rows(x, w)) < 1.3


# --- modules -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda nn: nn.RMSNorm(16),
        lambda nn: nn.RMSNorm(16, eps=1e-3),
        lambda nn: nn.RMSNorm([16], elementwise_affine=False),
        lambda nn: nn.RMSNorm((3, 16), dtype=torch.float32),
        lambda nn: nn.LayerNorm(16),
        lambda nn: nn.LayerNorm(16, bias=False),
        lambda nn: nn.LayerNorm((3, 16), 1e-3, device="cpu"),
        lambda nn: nn.LayerNorm((3, 16), elementwise_affine=False),
    ],
)
def test_modules_are_like_those_of_torch(make: Any) -> None:
    mine, other = make(cs.nn), make(torch.nn)
    assert isinstance(mine, type(other)) and repr(mine) == repr(other)
    assert [(k, v.shape) for k, v in mine.state_dict().items()] == [
        (k, v.shape) for k, v in other.state_dict().items()
    ]
    for p in other.parameters():
        torch.nn.init.normal_(p)
    mine.load_state_dict(other.state_dict())
    x = torch.randn(4, 3, 16, requires_grad=True)
    for module in (mine, other):
        module(x).square().sum().backward()
    for (name, p), q in zip(mine.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=name, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(mine(x), other(x))


def test_norms_of_models() -> None:
    """As in Llama, with a residual, and with an offset as in Gemma."""
    norm = cs.nn.RMSNorm(16, 1e-5, weight_offset=1.0)
    assert norm.variance_epsilon == 1e-5 and list(norm.state_dict()) == ["weight"]
    assert not norm.weight.any() and "weight_offset=1.0" in repr(norm)
    x, r = torch.randn(2, 5, 16), torch.randn(2, 5, 16)
    torch.testing.assert_close(norm(x), torch.nn.functional.rms_norm(x, (16,), eps=1e-5))
    y, total_ = norm(x, residual=r)
    assert torch.equal(total_, x + r)
    torch.testing.assert_close(y, norm(x + r))
    wide = cs.nn.RMSNorm((5, 16))
    y, total_ = wide(x, r)
    assert y.shape == total_.shape == (2, 5, 16)
    torch.testing.assert_close(y, wide(x + r))


def test_gates() -> None:
    gate, up = torch.randn(2, 3, 4, 5).unbind()
    assert torch.equal(cs.nn.SwiGLU()(gate, up), cs.ops.swiglu(gate, up))
