"""The attention loop on a GPU: every split of the keys, every form, odd extents, many launches.

Programs by hand fix the split (`tests.attention`); those of the search are what users get. Kernels
are few (some 50) because each takes seconds to compile.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

import cutesuper as cs
from benchmarks.workloads_attention import serving
from cutesuper.runtime.kernel import Kernel
from tests import zoo
from tests.attention import Attention, serving_inputs, with_logits
from tests.test_gpu import check, poisoned, run

pytestmark = pytest.mark.gpu


@cache
def by_hand(attention: Attention, dependent: bool = False) -> Kernel:
    """One kernel object for all tests that use it."""
    return attention.kernel(dependent)


@cache
def searched(attention: Attention, dependent: bool = False) -> Kernel:
    return cs.superoptimize(attention.graph(), dependent_launch=dependent)


def same_bits(kernel: Kernel, inputs: list[torch.Tensor], times: int = 30) -> None:
    """Checked against float64 once, and the same in every later launch."""
    [first] = check(kernel, inputs)
    for _ in range(times):
        [again] = run(kernel, inputs)
        assert torch.equal(first.view(torch.int16), again.view(torch.int16))


# ------------------------------------------------------------------------------ splits of the keys

#: what joins the parts of the keys: nothing, a cluster, the grid, or both
SPLITS: dict[str, dict[str, int]] = {
    "loop": {},
    "cluster of 2": {"cluster": 2},
    "cluster of 8": {"cluster": 8},
    "grid of 3": {"grid": 3},
    "grid of 8, cluster of 2": {"grid": 8, "cluster": 2},
}
QUERIES: dict[str, dict[str, Any]] = {
    "many rows": {"rows": 100, "keys": 2000, "keys_last": True, "scale": None, "key_tile": 128},
    "decode": {"group": 4, "rows": 0, "keys": 3000, "width": 128, "dtype": "bfloat16"},
}


@pytest.mark.parametrize("queries", QUERIES)
@pytest.mark.parametrize("split", SPLITS)
def test_splits_by_hand(split: str, queries: str) -> None:
    """Partial results are added in one order, whoever comes last."""
    options: dict[str, Any] = QUERIES[queries] | SPLITS[split]
    kernel = by_hand(Attention(**options))
    for seed in range(2):
        same_bits(kernel, zoo.draw(kernel.graph, seed, "cuda"))


#: joined in every way, so that launches in flight at once would meet in scratch memory
JOINED = Attention(group=4, rows=0, keys=4096, width=128, grid=8, cluster=2)


@pytest.mark.parametrize("dependent", [False, True], ids=["plain", "dependent"])
def test_many_launches_in_flight(dependent: bool) -> None:
    kernel = by_hand(JOINED, dependent)
    sets = [zoo.draw(kernel.graph, seed, "cuda") for seed in range(4)]
    want = [check(kernel, inputs)[0] for inputs in sets]
    outputs = [poisoned(kernel, sets[i % 4]) for i in range(100)]
    for i, out in enumerate(outputs):
        kernel(sets[i % 4], out=out)
    torch.cuda.synchronize()
    for i, [out] in enumerate(outputs):
        assert torch.equal(out, want[i % 4])


@pytest.mark.parametrize("dependent", [False, True], ids=["plain", "dependent"])
def test_two_streams_at_once(dependent: bool) -> None:
    """Each stream has its own memory for its last block."""
    kernel = by_hand(JOINED, dependent)
    sets = [zoo.draw(kernel.graph, seed, "cuda") for seed in (5, 6)]
    want = [check(kernel, inputs)[0] for inputs in sets]
    streams = [torch.cuda.Stream() for _ in sets]
    outputs = [[poisoned(kernel, inputs) for _ in range(100)] for inputs in sets]
    torch.cuda.synchronize()
    for n in range(100):
        for stream, inputs, mine in zip(streams, sets, outputs, strict=True):
            with torch.cuda.stream(stream):
                kernel(inputs, out=mine[n])
    torch.cuda.synchronize()
    for right, mine in zip(want, outputs, strict=True):
        assert all(torch.equal(out, right) for [out] in mine)


@pytest.mark.parametrize("dependent", [False, True], ids=["plain", "dependent"])
def test_capture_and_replay(dependent: bool) -> None:
    """Twice in a graph, with ordinary calls between the replays."""
    kernel = by_hand(JOINED, dependent)
    inputs = zoo.draw(kernel.graph, 7, "cuda")
    outputs = [poisoned(kernel, inputs) for _ in range(2)]
    kernel(inputs, out=outputs[0])  # loads the kernel
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for out in outputs:
            kernel(inputs, out=out)
    for seed in (8, 9, 10):
        for mine, fresh in zip(inputs, zoo.draw(kernel.graph, seed, "cuda"), strict=True):
            mine.copy_(fresh)
        for [out] in outputs:
            out.fill_(torch.nan)
        graph.replay()
        [between] = run(kernel, inputs)
        assert all(zoo.judge(kernel.graph, inputs, [between]))
        assert all(torch.equal(out, between) for [out] in outputs)


def test_a_dependent_launch_waits_for_the_query() -> None:
    """The input comes from a slow kernel of PyTorch, launched just before."""
    kernel = by_hand(JOINED, True)
    inputs = zoo.draw(kernel.graph, 11, "cuda")
    [want] = run(kernel, inputs)
    late = [torch.empty_like(t) for t in inputs]
    for _ in range(5):
        for t in late:
            t.fill_(torch.nan)
        torch.cuda.synchronize()
        torch.cuda._sleep(5_000_000)
        for mine, given in zip(late, inputs, strict=True):
            torch.add(given, 0.0, out=mine)
        assert torch.equal(kernel(*late), want)


# ------------------------------------------------------------------------------------------- forms

FORMS: dict[str, Attention] = {
    "96 wide": Attention(rows=60, keys=700, width=96, cluster=2),
    "256 wide": Attention(rows=60, keys=700, width=256, cluster=2),
    "256 wide, bf16, grid": Attention(
        group=8, rows=0, keys=1111, width=256, dtype="bfloat16", grid=4
    ),
    "causal": Attention(rows=200, keys=200, causal="top_left", width=128, dtype="bfloat16"),
    "causal, more keys": Attention(rows=100, keys=1003, causal="bottom_right", cluster=2),
    "causal, fewer keys": Attention(rows=300, keys=72, causal="top_left", keys_last=True),
    "heads and positions": Attention(
        group=4, rows=37, row_tile=16, keys=37, causal="top_left", width=128, dtype="bfloat16"
    ),
    "seven heads": Attention(
        group=7, rows=20, row_tile=9, keys=500, causal="bottom_right", cluster=2
    ),
    "128 rows": Attention(rows=300, row_tile=128, keys=1000, width=128),
    "norms of Q and V": Attention(
        rows=100, keys=1000, norm="QV", keys_last=True, scale=None, cluster=4
    ),
    "norms of Q and K": Attention(
        group=4, rows=0, keys=999, norm="QK", width=128, dtype="bfloat16", grid=4, cluster=2
    ),
    "norm of K stored (d, S)": Attention(rows=50, keys=600, norm="QK", keys_last=True),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_by_hand(form: str) -> None:
    kernel = by_hand(FORMS[form])
    for seed in range(2):
        same_bits(kernel, zoo.draw(kernel.graph, seed, "cuda"), times=5)


LARGE = {
    "loop": Attention(rows=100, keys=2000, keys_last=True, scale=None, key_tile=128),
    "joined": JOINED,
    "causal": FORMS["causal"],
}


@pytest.mark.parametrize("largest", [1e4, -1e4])
@pytest.mark.parametrize("form", LARGE)
def test_large_logits(form: str, largest: float) -> None:
    """No weight overflows, whichever part of the keys has the largest."""
    kernel = by_hand(LARGE[form])
    inputs = zoo.draw(kernel.graph, 12, "cuda")
    with_logits(LARGE[form], inputs, largest)
    [y] = check(kernel, inputs)
    assert y.isfinite().all()


@pytest.mark.parametrize("form", ["causal, more keys", "norms of Q and K", "seven heads"])
def test_heads_keep_to_themselves(form: str) -> None:
    """Keys and values of the other head are NaN; a tile past the end of one must not see them."""
    kernel = by_hand(FORMS[form])
    inputs = zoo.draw(kernel.graph, 13, "cuda")
    [want] = check(kernel, inputs)
    for t in inputs[1:]:
        t[1] = torch.nan
    [y] = run(kernel, inputs)
    assert torch.equal(y[0], want[0])
    assert y[1].isnan().all()


# ---------------------------------------------------------------------------------- of the search

#: the measured workloads, small and odd
WORKLOADS: dict[str, Attention] = {
    "gqa": Attention(rows=256, keys=1000, keys_last=True, scale=None),
    "qk norm": Attention(rows=200, keys=1048, keys_last=True, scale=None, norm="QV"),
    "decode": Attention(heads=8, group=4, rows=0, keys=4001, width=128, dtype="bfloat16"),
    "decode, five heads": Attention(heads=8, group=5, rows=0, keys=777, width=128),
    "prefill": Attention(
        heads=2, group=4, rows=333, keys=333, width=128, dtype="bfloat16", causal="top_left"
    ),
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads(name: str) -> None:
    """One kernel, with the same bits in every run."""
    kernel = searched(WORKLOADS[name])
    assert len(kernel.kernels) == 1
    for seed in range(2):
        same_bits(kernel, zoo.draw(kernel.graph, seed, "cuda"), times=10)


@pytest.mark.parametrize("name", ["gqa", "decode"])
def test_workloads_launched_dependently(name: str) -> None:
    kernel = searched(WORKLOADS[name], dependent=True)
    inputs = zoo.draw(kernel.graph, 3, "cuda")
    [want] = check(kernel, inputs)
    results = [kernel(*inputs) for _ in range(50)]
    torch.cuda.synchronize()
    assert all(torch.equal(y, want) for y in results)


# ------------------------------------------------------------------------------ lengths and pages


@cache
def serving_kernel(page: int, longest: int) -> Kernel:
    """Four sequences, 8 query heads and 2 of keys and values."""
    return cs.superoptimize(serving(page).graph(cs, (4, longest, 8, 2, 128), "bfloat16"))


@pytest.mark.parametrize(("page", "longest"), [(0, 1111), (0, 20000), (16, 1024), (128, 1024)])
def test_lengths_on_the_device(page: int, longest: int) -> None:
    """None, one key, some and all; what lies beyond a length has no effect while it is finite."""
    kernel = serving_kernel(page, longest)
    for seed, lengths in enumerate(([0, 1, longest // 2 + 1, longest], [longest, 63, 64, 65])):
        inputs = serving_inputs(kernel.graph, seed, "cuda", lengths)
        [y] = check(kernel, inputs)
        assert all((y[b] == 0).all() for b, n in enumerate(lengths) if n == 0)
        if not page:
            for b, n in enumerate(lengths):
                inputs[1][b, :, n:] = 3e4
                inputs[2][b, :, n:] = -3e4
            [again] = run(kernel, inputs)
            assert torch.equal(again, y)


def test_lengths_grow_under_a_graph() -> None:
    """One capture for a whole generation: the lengths are read when the graph is replayed."""
    kernel = serving_kernel(0, 1111)
    inputs = serving_inputs(kernel.graph, 3, "cuda", [1, 2, 3, 4])
    out = poisoned(kernel, inputs)
    kernel(inputs, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel(inputs, out=out)
    for lengths in ([1, 2, 3, 4], [2, 64, 65, 500], [0, 1000, 1110, 1111]):
        inputs[3].copy_(torch.tensor(lengths, dtype=torch.int32))
        out[0].fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert all(zoo.judge(kernel.graph, inputs, out))


# ------------------------------------------------------------------------------------- any extents

#: one key, less than a tile, one more than a tile
TINY = [
    Attention(heads=1, rows=1, keys=1),
    Attention(heads=3, rows=5, keys=7, width=128, dtype="bfloat16"),
    Attention(heads=1, rows=65, keys=65, causal="top_left"),
    Attention(heads=2, group=3, rows=0, keys=129, width=96),
    # the first rows see 1, 2, 3 keys, two thirds of them all
    Attention(heads=6, rows=300, keys=100, width=80, causal="top_left", dtype="bfloat16"),
]


def random_attentions(count: int, most_rows: int, most_keys: int) -> list[Attention]:
    """Any extents up to these, everything else in turn."""
    rng = random.Random(5)

    def one(i: int) -> Attention:
        keys, rows = rng.randint(1, most_keys), rng.randint(1, most_rows)
        keys_last = i % 3 == 2
        causal = ("", "bottom_right", "", "top_left")[i % 4]
        return Attention(
            heads=rng.randint(1, 4),
            group=(0, 4, 0, 7)[i // 2 % 4],
            rows=min(rows, keys),
            keys=-(-keys // 8) * 8 if keys_last else keys,
            width=(64, 128, 96, 256)[i % 4],
            dtype=("float16", "bfloat16")[i // 2 % 2],
            keys_last=keys_last,
            causal=causal,
        )

    return [one(i) for i in range(count)]


@pytest.mark.ptx
@pytest.mark.parametrize("attention", [*TINY, *random_attentions(14, 150, 3000)], ids=str)
def test_any_small_extents(attention: Attention) -> None:
    """Few enough for the machine of tests/ptx, whose time grows with the keys."""
    test_any_extents(attention)


@pytest.mark.parametrize("attention", random_attentions(14, 300, 20000), ids=str)
def test_any_extents(attention: Attention) -> None:
    kernel = searched(attention)
    check(kernel, zoo.draw(kernel.graph, attention.keys, "cuda"))
