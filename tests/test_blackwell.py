"""Kernels for Blackwell, proved without one.

A static verifier (`tests.ward`) says that in every schedule barriers, bytes and lifetimes are right
and nothing races, and of some kernels that they are equal to a function of PyTorch. The machine of
`tests.ptx` runs them, and knows the fences that the verifier does not know. Both find planted
faults. The machine runs all tests of kernels as well: ``pytest --ptx=b200 -m gpu``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

from cutesuper.skeletons.matmul.schedule import MatmulSchedule
from cutesuper.targets import B200
from tests.blackwell_plans import BF16, CASES, FREE, PROVED, QUICK, joint
from tests.plans import Linear
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


@cache
def kernel_of(name: str) -> Given:
    return given(CASES[name].make())


def marked(names: dict[str, Any]) -> list[Any]:
    """Cases of CI are marked."""
    return of_ci(names, {*QUICK, *CAUGHT_STATICALLY[:5]} if names is not CASES else QUICK)


def of_ci(names: Iterable[str], quick: Iterable[str]) -> list[Any]:
    """Cases, of which the quick ones are marked."""
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


JOINT, ATTENTION = "joint products", "attention"
RING, WALK = f"{JOINT}, a ring that goes round", f"{JOINT}, walk"
ISSUER, AT_ONCE = "an issuer", "attention, 128 rows at once"
ISSUER_WALK, ISSUER_PAIRS = f"{ISSUER}, walk", f"{ISSUER}, pairs that walk"
FULL_BYTES = 2 * 64 * (64 + 8)
JOINT_BYTES = 2 * 64 * (256 + 32 // 2)
#: a commit that the leader of two blocks hears alone
UNHEARD = changed(r"mov\.b16\s+(%rs\d+), 3;", lambda match: f"mov.b16 {match[1]}, 1;")
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
    "joint products before the stage is full": (lambda: kernel_of(JOINT), unwaited(0)),
    "joint products before the peer is ready": (lambda: kernel_of(JOINT), unwaited(1)),
    "joint products of which the peer never says that it is ready": (
        lambda: kernel_of(JOINT), without(r"mbarrier\.arrive\.shared::cluster[^;]*;", 0),
    ),
    "joint products whose end the peer does not hear": (lambda: kernel_of(JOINT), UNHEARD),
    "64 bytes too few expected of joint products": (
        lambda: kernel_of(JOINT), more(rf"mov\.b32\s+%r\d+, ({JOINT_BYTES});", -64),
    ),
    "tensor memory of two blocks given back before both have read it": (
        lambda: kernel_of(JOINT), unwaited(4),
    ),
    "weights multiplied before both warpgroups have written them": (
        lambda: kernel_of(AT_ONCE), without(r"bar\.sync\s+8, 256;", 1),
    ),
    "an issuer's products before the stage is full": (lambda: kernel_of(ISSUER), unwaited(-1)),
    "an issuer's products fetched before they are done": (lambda: kernel_of(ISSUER), unwaited(0)),
    "stages that an issuer gives back while they are multiplied": (
        lambda: kernel_of(ISSUER),
        changed(r"tcgen05\.commit[^;]*(\[%r\d+\]);",
                lambda m: f"{{ .reg .b64 t; mbarrier.arrive.shared.b64 t, {m[1]}; }}"),
    ),
    "stages that an issuer keeps": (lambda: kernel_of(ISSUER), without(r"tcgen05\.commit[^;]*;")),
    "an issuer that does not wait for the tile before to be fetched": (
        lambda: kernel_of(ISSUER_WALK), without(r"bar\.sync\s+8, 160;"),
    ),
}  # fmt: skip
CAUGHT_STATICALLY = list(STATIC)


@needs_verifier
@pytest.mark.parametrize("name", marked(CASES))
def test_kernels_are_verified(name: str) -> None:
    case = CASES[name]
    found = verdict(kernel_of(name), case.reference)
    assert found["result"] == case.result, found["diagnostics"]
    races = {(r["first"]["mode"], r["second"]["mode"]) for r in found.get("races", ())}
    assert races == ({case.races} if case.races else set())


@needs_verifier
@pytest.mark.parametrize("fault", marked(STATIC))
def test_the_verifier_finds_faults(fault: str) -> None:
    kernel, planted = STATIC[fault]
    assert verdict(kernel(), planted=planted)["result"] not in (FREE, PROVED)


@needs_verifier
def test_the_verifier_proves_no_wrong_products() -> None:
    planted = more(r"add\.s32\s+%r\d+, %r\d+, (2);", 4)
    assert verdict(kernel_of("product"), "X @ W", planted)["result"] == "equivalence_not_proven"


# ------------------------------------------------------------------------------------- the machine


def numbers(kernel: Given, ptx: str, late: bool, seed: int = 1) -> torch.Tensor:
    """The output of a kernel on the machine, one cluster at a time. Raises PtxError."""
    torch.manual_seed(0)
    *inputs, output = kernel.tensors[: len(kernel.plan.arguments)]
    for x in inputs:
        x.copy_(torch.randn(x.shape))
    output.fill_(torch.nan)
    memory = [(t.data_ptr(), t.nbytes, t is output) for t in kernel.tensors]
    run_launch(executable(ptx), kernel.launch, memory, Conditions(seed, late, resident=1))
    return output.clone()


DOUBLE, FP32, HANDED = "two blocks of columns at once", "fp32", "tiles handed out"


@pytest.mark.ptx
def test_two_blocks_of_columns_at_once() -> None:
    """With half of the instructions."""
    kernel = kernel_of(DOUBLE)
    assert len(re.findall(r"tcgen05\.mma", kernel.ptx)) == 4  # 64 deep, 16 each
    found = numbers(kernel, kernel.ptx, late=True)
    x, w, _ = (t.double() for t in kernel.tensors)
    torch.testing.assert_close(found.double(), x @ w.T, rtol=2**-8, atol=1e-5)


@pytest.mark.ptx
@pytest.mark.parametrize("name", [n for n in CASES if n.startswith(HANDED)])
def test_tiles_are_handed_out(name: str) -> None:
    """Whoever gets them: the machine says at times that none is left while some are."""
    kernel = kernel_of(name)
    for seed in (1, 2, 3):
        found = numbers(kernel, kernel.ptx, seed == 2, seed)
        x, w, _ = (t.double() for t in kernel.tensors)
        norm = (x.square().mean(1, keepdim=True) + 1e-6).sqrt() if "statistics" in name else 1.0
        torch.testing.assert_close(found.double(), x @ w / norm, rtol=2**-8, atol=1e-5)


JOINT_PLANS = {n: case.make for n, case in CASES.items() if n.startswith(JOINT)} | {
    # too long for the verifier
    f"{JOINT}, walk, prologue": lambda: joint(
        {"persistent": 2, "head": 3}, m=64, gain=True, norm=True
    )
}
OF_CI = (RING, f"{JOINT}, two warpgroups, norm", f"{JOINT}, walk, prologue")


@pytest.mark.parametrize("name", of_ci(JOINT_PLANS, OF_CI))
def test_joint_products(name: str) -> None:
    """One instruction for two blocks, with the numbers of two."""
    kernel = kernel_of(name) if name in CASES else given(JOINT_PLANS[name]())
    assert kernel.launch.cluster == (2, 1, 1) and "multicast::cluster.global" not in kernel.ptx
    assert set(re.findall(r"tcgen05\.mma\.(cta_group::\d)", kernel.ptx)) == {"cta_group::2"}
    for seed in (1, 2):
        found = numbers(kernel, kernel.ptx, seed == 2, seed)
        data = {
            a.name: t.double() for a, t in zip(kernel.plan.arguments, kernel.tensors, strict=True)
        }
        x, w = data["X"], data["W"]
        rows = (x * data["G"]).to(torch.bfloat16).double() if "G" in data else x
        norm = (x.square().mean(1, keepdim=True) + 1e-6).sqrt() if kernel.plan.statistics else 1.0
        exact = rows @ w.T / norm
        bound = 2**-8 * exact.abs() + 1e-5
        if kernel.plan.rounds:  # both operands, to 11 bits
            bound = 2**-10 * (x.abs() @ w.T.abs())
        assert ((found.double() - exact).abs() <= bound).all()


ISSUED = [n for n in CASES if n.startswith(ISSUER)]
AT_ONCE_CASES = [n for n in CASES if n.startswith(ATTENTION) and "at once" in n]


@pytest.mark.parametrize("name", of_ci(ISSUED, (ISSUER, ISSUER_WALK, ISSUER_PAIRS)))
def test_an_issuer_changes_no_number(name: str) -> None:
    kernel = kernel_of(name)
    schedule = replace(kernel.plan.schedule, issuer=False)
    plain = given(replace(kernel.plan, schedule=schedule))
    assert kernel.plan.threads == plain.plan.threads + 32
    expected = numbers(plain, plain.ptx, late=False)
    assert expected.isfinite().all()
    for seed in (1, 2):
        assert torch.equal(expected, numbers(kernel, kernel.ptx, seed == 2, seed))


@pytest.mark.parametrize("name", of_ci(AT_ONCE_CASES, (AT_ONCE,)))
def test_two_warpgroups_multiply_together(name: str) -> None:
    """With half of the instructions, and the same numbers."""
    kernel = kernel_of(name)
    schedule = replace(kernel.plan.schedule, together=False)
    even = kernel.plan.tile(kernel.plan.rows[0]) % 2 == 0
    found = [numbers(kernel, kernel.ptx, seed == 2, seed) for seed in (1, 2)]
    assert found[0].isfinite().all() and torch.equal(*found)
    if even:
        apart = given(replace(kernel.plan, schedule=schedule))
        assert torch.equal(found[0], numbers(apart, apart.ptx, late=False))


GAIN = "prologue"
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
    "both blocks from the lower lanes": (
        DOUBLE, changed(r"add\.s32\s+(%r\d+), (%r\d+), 1048576;",
                        lambda m: f"mov.b32 {m[1]}, {m[2]};"), "",
    ),
    "gathered numbers multiplied before they are there": (
        FP32, without(r"tcgen05\.wait::st[^;]*;"), "nobody has waited for",
    ),
    "an answer read before it is there": (HANDED, unwaited(-1), "no answer about another block"),
    "the index of a block that was not handed out": (
        HANDED, without(r"@handed (?=clusterlaunchcontrol)"), "a block that was not handed out",
    ),
    "a question after the last answer": (
        HANDED, lambda ptx: re.sub(r"selp\.b32 (%r\d+), 1, 0, handed;", r"mov.b32 \1, 1;", ptx),
        "and none was left",
    ),
    "an answer that a warp does not give back": (
        HANDED, without(r"mbarrier\.arrive\.shared[^;]*;", -1), "no warp goes on",
    ),
    "8 bytes too many of an answer": (
        HANDED, more(r"mov\.b32\s+%r\d+, (16);(?=\s*mbarrier\.arrive\.expect)", 8),
        "no warp goes on",
    ),
    "a commit of one block's products": (
        RING, lambda ptx: re.sub(r"(tcgen05\.commit\.cta_group::)2", r"\g<1>1", ptx),
        "of one block and of two",
    ),
    "products whose end the peer does not hear": (RING, UNHEARD, "no warp goes on"),
    "the same half of the rows in both blocks": (
        RING,
        lambda ptx: re.sub(r"(mov\.u32\s+%r\d+), %cluster_ctarank;(?!(.|\n)*%cluster_ctarank)",
                           r"\1, 0;", ptx), "",
    ),
    "tensor memory that two blocks keep": (
        RING, without(r"tcgen05\.dealloc[^;]*;"), "a block ends and has column",
    ),
    "accumulators that a block still reads when joint products replace them": (
        WALK, without(r"tcgen05\.fence::before[^;]*;", 0), "tcgen05.fence on both sides",
    ),
    "lanes of the first warpgroup that the second one reads": (
        AT_ONCE, changed(r"shl\.b32\s+(%r\d+), %r\d+, 20;", lambda m: f"mov.b32 {m[1]}, 0;"), "",
    ),
    "no fence in front of the meeting of two warpgroups": (
        AT_ONCE, without(r"tcgen05\.fence::before[^;]*;", 1), "tcgen05.fence on both sides",
    ),
    "no fence in front of the meeting with an issuer": (
        ISSUER_WALK, without(r"tcgen05\.fence::before[^;]*;"), "tcgen05.fence on both sides",
    ),
    "no fence of an issuer": (
        ISSUER_WALK, without(r"tcgen05\.fence::after[^;]*;", -1), "tcgen05.fence on both sides",
    ),
    "stages of which an issuer does not tell the other block": (
        ISSUER_PAIRS,
        changed(r"mov\.b16\s+(%rs\d+), 3;(?=\s*tcgen05\.commit)",
                lambda match: f"mov.b16 {match[1]}, 1;"), "no warp goes on",
    ),
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
