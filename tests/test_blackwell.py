"""Kernels for Blackwell, proved without one.

A static verifier (`tests.ward`) says that in every schedule barriers, bytes and lifetimes are right
and nothing races, and of some kernels that they are equal to a function of PyTorch. The machine of
`tests.ptx` runs them, and knows the fences that the verifier does not know. Both find planted
faults. The machine runs all tests of kernels as well: ``pytest --ptx=b200 -m gpu``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

from cutesuper.skeletons.matmul.schedule import MatmulSchedule
from cutesuper.skeletons.planner import make_plan
from cutesuper.targets import B200
from tests import zoo
from tests.attention import Attention
from tests.plans import Linear, rows_plan, whole_plan
from tests.ptx.run import Conditions, PtxError, executable, run_launch
from tests.ward import Given, given, verdict

pytestmark = pytest.mark.gpu
needs_verifier = pytest.mark.skipif(
    find_spec("sentryward") is None, reason="needs sentryward, of the dev extra"
)


@pytest.fixture(autouse=True)
def machine(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--ptx"):
        pytest.skip("launches are read from the machine of tests/ptx: run with --ptx")


def few(**fields: Any) -> Any:
    """A small `Linear` in bf16: two iterations, 8 rows, 64 columns."""
    small = {"dtype": "bfloat16", "m": 8, "tile_m": 8, "n": 64, "k": 128, "tile_k": 64}
    return Linear(**(small | fields)).plan(B200)


def attention(**fields: Any) -> Any:
    """A small `Attention` in bf16: one head, two tiles of keys."""
    small = {"dtype": "bfloat16", "heads": 1, "keys": 128}
    mu = Attention(**(small | fields)).mugraph()
    return make_plan(mu.steps[0], mu.tensors, B200)


def found(graph: Any) -> Any:
    return whole_plan(graph, B200)


NORM = "(X @ W) / torch.sqrt((X * X).mean(dim=1, keepdim=True) + 1e-6)"
BF16 = "bfloat16"


@dataclass(frozen=True)
class Case:
    """A kernel to verify.

    Attributes:
        plan: makes it.
        reference: that it is proved equal to; "" if only its protocol is checked: the verifier does
            not follow values through `st.async`, `stmatrix`, run-time predicates and fp16.
        result: of the verifier.
    """

    plan: Callable[[], Any]
    reference: str = ""
    result: str = "race_free"


#: those of CI, which take a few seconds each
QUICK = {
    "product": Case(lambda: few(norm=False), "X @ W", "verified"),
    "norm, weights (N, K)": Case(lambda: few(transposed=True)),
    "prologue": Case(lambda: few(gain=True)),
    "cluster along K": Case(lambda: few(cluster=2, k=256)),
    # an instruction of 64 columns reads behind boxes of 16; those results are not used
    "narrow boxes": Case(lambda: found(zoo.lora(8, 128, 64, dtype=BF16)), "", "potential_race"),
    "attention": Case(attention),
    "rows": Case(lambda: rows_plan(4, 256, norm=True, target=B200, dtype=BF16)),
}
#: the others: minutes
MORE = {
    "ragged": Case(lambda: few(norm=False, m=12, n=72, k=136, bias=True, residual=True)),
    "two results": Case(lambda: found(zoo.gated_mlp(8, 128, 64, dtype=BF16))),
    "reduced columns": Case(lambda: found(zoo.dlrm(8, 128, 64, dtype=BF16))),
    "norm": Case(few, NORM, "verified"),
    "fp16": Case(lambda: few(norm=False, dtype="float16")),
    "prologue, cluster along K": Case(lambda: few(gain=True, cluster=2, k=256)),
    "bulk stores": Case(lambda: few(m=64, tile_m=64)),
    "bulk loads of a residual": Case(
        lambda: few(m=96, tile_m=96, n=128, tile_n=128, residual=True, norm=False)
    ),
    "pairs": Case(lambda: few(m=128, tile_m=128, n=512, tile_n=256)),
    "copied operands": Case(lambda: few(norm=False, k=133, n=67)),
    "product after the loop": Case(
        lambda: found(zoo.lora(8, 128, 64, 40, BF16, transposed=True, scale=0.5))
    ),
    "product of a tensor after the loop": Case(
        lambda: found(zoo.two_operands(8, 128, 64, dtype=BF16))
    ),
    "layer norm": Case(lambda: found(zoo.layer_norm_linear(8, 128, 64, dtype=BF16))),
    "norm of a product": Case(lambda: found(zoo.rms_norm_of_product(8, 128, 128, dtype=BF16))),
    "activation": Case(lambda: found(zoo.linear(8, 128, 64, BF16, "silu"))),
    "two layers": Case(lambda: found(zoo.relu_mlp(8, 128, 64, 64, BF16))),
    "attention, two warpgroups of rows": Case(lambda: attention(rows=128, row_tile=128)),
    "attention, causal": Case(lambda: attention(rows=128, causal="top_left")),
    "attention, ragged": Case(lambda: attention(rows=37, keys=100)),
    "attention, wide": Case(lambda: attention(width=128)),
    "attention, keys in the last dimension": Case(lambda: attention(keys_last=True)),
    "attention, norms": Case(lambda: attention(norm="QV")),
    "decoding in a cluster": Case(lambda: attention(rows=0, group=4, keys=256, cluster=2)),
    "rows, an activation": Case(lambda: rows_plan(4, 256, "silu", target=B200, dtype=BF16)),
}
CASES = QUICK | MORE


@cache
def kernel_of(name: str) -> Given:
    return given(CASES[name].plan())


def marked(names: dict[str, Any]) -> list[Any]:
    """Those of CI are marked."""
    quick = {*QUICK, *CAUGHT_STATICALLY[:5]} if names is not CASES else QUICK
    return [pytest.param(n, marks=[pytest.mark.ptx] if n in quick else []) for n in names]


# ----------------------------------------------------------------------------------------- faults


def without(pattern: str, which: int = 0) -> Callable[[str], str]:
    """Leave out an instruction: the ``which``-th that matches."""
    return changed(pattern, lambda match: "", which)


def changed(
    pattern: str, to: Callable[[re.Match[str]], str], which: int = 0
) -> Callable[[str], str]:
    def change(ptx: str) -> str:
        match = list(re.finditer(pattern, ptx))[which]
        return ptx[: match.start()] + to(match) + ptx[match.end() :]

    return change


def unwaited(which: int) -> Callable[[str], str]:
    """Pass the ``which``-th wait for a barrier in shared memory at once."""
    return changed(r"@P1 bra\.uni\s+DONE;", lambda match: "bra.uni DONE;", which)


def more(pattern: str, by: int, which: int = 0) -> Callable[[str], str]:
    """Change the number that the only group of a pattern matches."""

    def to(match: re.Match[str]) -> str:
        text, start = match[0], match.start()
        return f"{text[: match.start(1) - start]}{int(match[1]) + by}{text[match.end(1) - start :]}"

    return changed(pattern, to, which)


@cache
def ring() -> Given:
    """A product with a norm whose ring goes round: 4 iterations, 2 stages."""
    linear = Linear(dtype=BF16, m=8, tile_m=8, n=64, k=256, tile_k=64)
    return given(linear.plan(B200, schedule=MatmulSchedule(stages=2, head=2)))


FULL_BYTES = 2 * 64 * (64 + 8)
#: by name: the kernel, and what is wrong with it
STATIC: dict[str, tuple[Callable[[], Given], Callable[[str], str]]] = {
    "products before the stage is full": (ring, unwaited(0)),
    "stages released before they are multiplied": (ring, unwaited(1)),
    "accumulators fetched before they are done": (ring, unwaited(2)),
    "64 bytes too few expected": (ring, more(rf"mov\.b32\s+%r\d+, ({FULL_BYTES});", -64)),
    "products that nobody commits": (ring, without(r"tcgen05\.commit[^;]*;")),
    "64 bytes too many expected": (ring, more(rf"mov\.b32\s+%r\d+, ({FULL_BYTES});", 64)),
    "loads before the stage is empty": (ring, unwaited(-1)),
    "a stage that a warp does not release": (ring, without(r"mbarrier\.arrive\.shared[^;]*;")),
    "tensor memory given back too early": (
        lambda: kernel_of("product"), without(r"bar\.sync\s+7, 128;", 1),
    ),
    "an arrival too many expected": (
        ring, more(r"mov\.b32\s+%r\d+, (8);(?=\s*mbarrier\.init)", 1),
    ),
    "an address read before it is written": (ring, without(r"bar\.sync\s+7, 128;", 0)),
    "tensor memory that is not given back": (ring, without(r"tcgen05\.dealloc[^;]*;")),
    "weights multiplied before all warps have written them": (
        lambda: kernel_of("attention"), without(r"bar\.sync\s+%r\d+, 128;", 1),
    ),
}  # fmt: skip
CAUGHT_STATICALLY = list(STATIC)


@needs_verifier
@pytest.mark.parametrize("name", marked(CASES))
def test_kernels_are_verified(name: str) -> None:
    case = CASES[name]
    found = verdict(kernel_of(name), case.reference)
    assert found["result"] == case.result, found["diagnostics"]
    if case.result == "potential_race":
        assert {(r["first"]["mode"], r["second"]["mode"]) for r in found["races"]} == {
            ("write", "read")
        }


@needs_verifier
@pytest.mark.parametrize("fault", marked(STATIC))
def test_the_verifier_finds_faults(fault: str) -> None:
    kernel, planted = STATIC[fault]
    assert verdict(kernel(), planted=planted)["result"] not in ("race_free", "verified")


@needs_verifier
def test_the_verifier_proves_no_wrong_products() -> None:
    planted = more(r"add\.s32\s+%r\d+, %r\d+, (2);", 4)
    assert verdict(kernel_of("product"), "X @ W", planted)["result"] == "equivalence_not_proven"


# ------------------------------------------------------------------------------------- the machine


def numbers(kernel: Given, ptx: str, late: bool) -> torch.Tensor:
    """The output of a kernel on the machine. Raises PtxError."""
    torch.manual_seed(0)
    *inputs, output = kernel.tensors[: len(kernel.plan.arguments)]
    for x in inputs:
        x.copy_(torch.randn(x.shape))
    output.fill_(torch.nan)
    memory = [(t.data_ptr(), t.nbytes, t is output) for t in kernel.tensors]
    run_launch(executable(ptx), kernel.launch, memory, Conditions(late=late))
    return output.clone()


GAIN, ATTENTION = "prologue", "attention"
#: by name: the kernel, what is wrong with it, and what the machine says ("" for other numbers)
DYNAMIC: dict[str, tuple[str, Callable[[str], str], str]] = {
    "registers read before the wait for loads": (
        GAIN, without(r"tcgen05\.wait::ld[^;]*;"), "nobody has waited for",
    ),
    "no wait for stores": (ATTENTION, without(r"tcgen05\.wait::st[^;]*;"), "nobody has waited for"),
    "no fence behind the wait for products": (
        GAIN, without(r"tcgen05\.fence::after[^;]*;", 2), "without a tcgen05.fence::after",
    ),
    "no fence in front of the meeting": (
        ATTENTION, without(r"tcgen05\.fence::before[^;]*;", 1), "tcgen05.fence on both sides",
    ),
    "no fence behind the meeting": (
        ATTENTION, without(r"tcgen05\.fence::after[^;]*;", 2), "tcgen05.fence",
    ),
    "no fence of the asynchronous proxy": (
        GAIN, lambda ptx: re.sub(r"fence\.proxy\.async[^;]*;", "", ptx), "a fence.proxy.async",
    ),
    "tensor memory that is kept": (
        GAIN, without(r"tcgen05\.dealloc[^;]*;"), "a block ends and has column",
    ),
    "too few columns": (
        ATTENTION, more(r"mov\.b32\s+%r\d+, (\d+);(?=\s*tcgen05\.alloc)", 32 - 512),
        "not allocated",
    ),
    "a wrong step along K": (GAIN, more(r"add\.s32\s+%r\d+, %r\d+, (2);", 2), ""),
    "products that replace": (
        GAIN,
        changed(r"mov\.pred\s+(%p\d+), -1;(?=(?:[^;]*;){1,2}\s*tcgen05\.mma)",
                lambda m: f"setp.ne.b32 {m[1]}, 0, 0;"), "",
    ),
    "a wrong instruction descriptor": (GAIN, more(r"mov\.b32\s+%r\d+, (\d{8});", 1 << 15), ""),
    "an accumulator of other columns": (
        GAIN, changed(r"(\[%r\d+) \+ 0\];(?=\s*tcgen05\.wait)", lambda m: f"{m[1]} + 8];"), "",
    ),
}  # fmt: skip


@pytest.mark.ptx
@pytest.mark.parametrize("fault", DYNAMIC)
def test_the_machine_finds_faults(fault: str) -> None:
    name, planted, message = DYNAMIC[fault]
    kernel = kernel_of(name)
    right = numbers(kernel, kernel.ptx, late=False)
    assert right.isfinite().all() and torch.equal(right, numbers(kernel, kernel.ptx, late=True))
    wrong = planted(kernel.ptx)
    if message:
        with pytest.raises(PtxError, match=message):
            numbers(kernel, wrong, late=True)
    else:
        assert not torch.equal(right, numbers(kernel, wrong, late=True))
