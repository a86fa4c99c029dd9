"""cutesuper.ops.attention on a GPU, against float64, by the rule of `acceptable`.

All memory that torch.empty returns is full of NaN, so that what is not written shows. Every shape
is a search and a compile of seconds: lists of cases cover pairs, not products.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

import cutesuper as cs

torch = pytest.importorskip("torch")

from cutesuper.runtime.programs import Kept  # noqa: E402
from cutesuper.torch.ops.attention import calls, kind  # noqa: E402 (they import torch)
from cutesuper.verify.numeric import acceptable  # noqa: E402
from tests.attention_reference import exact, gathered, visible  # noqa: E402

pytestmark = pytest.mark.gpu

DIMS = [64, 96, 128, 256]
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
#: scores of all heads, which PyTorch may hold in memory, are 100 times as many at most
LARGEST_SCORES = 2 * 10**7


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """New memory is NaN, so that what kernels do not write is seen, in outputs and in scratch."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels are for sm_90a")
    empty = torch.empty

    def filled(*args: Any, **options: Any) -> Any:
        made = empty(*args, **options)
        return made.fill_(float("nan")) if made.is_floating_point() else made.fill_(-1)

    monkeypatch.setattr(torch, "empty", filled)
    yield
    torch.cuda.empty_cache()


def tensor(*shape: int, dtype: Any, tokens: bool = False, scale: float = 1.0) -> Any:
    b, h, s, d = shape
    made = torch.randn((b, s, h, d) if tokens else shape, device="cuda") * scale
    return made.to(dtype).transpose(1, 2) if tokens else made.to(dtype)


def integers(values: Any) -> Any:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def by_torch(
    query: Any, key: Any, value: Any, causal: bool, lengths: Any, table: Any,
    scale: float | None = None,
) -> Any:  # fmt: skip
    """PyTorch's attention in the type of its arguments; rows that see nothing are 0."""
    if table is not None:
        key, value = gathered(key, table), gathered(value, table)
    group = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(group, 1) for t in (key, value))
    sees = visible(query.shape[2], key.shape[2], query.shape[0], causal, lengths, "cuda")
    mask = None if lengths is None and not causal else sees[:, None]
    y = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=scale)
    return y.masked_fill(~sees.any(-1)[:, None, :, None], 0.0)


def judge(found: Any, query: Any, key: Any, value: Any, *, causal: bool = False,
          lengths: Any = None, table: Any = None, scale: float | None = None) -> None:  # fmt: skip
    """Every sequence by itself: the longer one is, the smaller are its numbers."""
    wanted = exact(query, key, value, causal, lengths, table, scale=scale)
    eager = by_torch(query, key, value, causal, lengths, table, scale)
    assert_acceptable(found, wanted, eager)


def assert_acceptable(found: Any, wanted: Any, eager: Any) -> None:
    assert found.shape == wanted.shape
    for n, (y, exact_y, eager_y) in enumerate(zip(found, wanted, eager, strict=True)):
        report = acceptable(y, exact_y, eager_y, found.dtype)
        assert report, f"sequence {n}: {report.message}"


def log_uniform(r: random.Random, least: int, most: int) -> int:
    return round(least * (most / least) ** r.random())


# --- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", DIMS)
def test_random_shapes(dim: int, dtype: str, causal: bool) -> None:
    r = random.Random(f"{dim} {dtype} {causal}")
    torch.manual_seed(r.randrange(10**6))
    for _ in range(2):
        b, h, g = r.randint(1, 3), r.randint(1, 4), r.choice([1, 2, 4, 7, 8])
        keys = log_uniform(r, 1, 20000)
        rows = min(log_uniform(r, 1, 3000), LARGEST_SCORES // keys)
        q = tensor(b, h * g, rows, dim, dtype=DTYPES[dtype], tokens=r.random() < 0.5)
        k, v = (tensor(b, h, keys, dim, dtype=DTYPES[dtype], tokens=r.random() < 0.5)
                for _ in range(2))  # fmt: skip
        judge(cs.ops.attention(q, k, v, is_causal=causal, enable_gqa=True), q, k, v, causal=causal)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("dim", "rows", "group"),
    [(64, 1, 1), (64, 5, 4), (96, 1, 7), (96, 33, 1), (128, 1, 8), (128, 130, 2), (256, 1, 4),
     (256, 3, 2)],
)  # fmt: skip
def test_ragged_lengths(dim: int, dtype: str, rows: int, group: int) -> None:
    """One capacity, any lengths: the kernels are the same, and read no more than a length."""
    r = random.Random(f"{dim} {dtype} {rows} {group}")
    torch.manual_seed(1)
    b, h, capacity = 5, 2, 20000
    q = tensor(b, h * group, rows, dim, dtype=DTYPES[dtype])
    k, v = (tensor(b, h, capacity, dim, dtype=DTYPES[dtype], tokens=True) for _ in range(2))
    for n in range(3):
        some = [log_uniform(r, 1, capacity) for _ in range(b)]
        lengths = integers([some, [0, 1, 63, 64, 65], [capacity] * b][n])
        for causal in (False, True):
            y = cs.ops.attention(q, k, v, is_causal=causal, enable_gqa=True, key_lengths=lengths)
            judge(y, q, k, v, causal=causal, lengths=lengths)


def test_every_short_length() -> None:
    q = tensor(1, 8, 1, 128, dtype=torch.bfloat16)
    k, v = (tensor(1, 2, 700, 128, dtype=torch.bfloat16) for _ in range(2))
    for n in range(701):
        lengths = integers([n])
        y = cs.ops.attention(q, k, v, enable_gqa=True, key_lengths=lengths)
        if n == 0:
            assert not y.any()
        else:
            judge(y, q, k, v, lengths=lengths)


@pytest.mark.parametrize(
    ("size", "dtype", "dim", "rows", "group"),
    [(16, "bf16", 128, 1, 4), (32, "bf16", 128, 1, 4), (64, "bf16", 128, 1, 4),
     (128, "bf16", 128, 1, 4), (256, "bf16", 128, 1, 4), (16, "fp16", 64, 1, 8),
     (32, "fp16", 256, 1, 2), (64, "fp16", 96, 3, 1), (128, "fp16", 64, 40, 1),
     (256, "fp16", 128, 33, 4)],
)  # fmt: skip
def test_pages(size: int, dtype: str, dim: int, rows: int, group: int) -> None:
    torch.manual_seed(size)
    b, h, n = 4, 2, -(-5000 // size)
    pages = b * n + 3
    q = tensor(b, h * group, rows, dim, dtype=DTYPES[dtype], tokens=True)
    k, v = (torch.randn(pages, size, h, dim, device="cuda").to(DTYPES[dtype]) for _ in range(2))
    table = torch.randperm(pages, device="cuda")[: b * n].view(b, n).int()
    for causal in (False, True):
        lengths = integers([n * size, 0, size, random.Random(size).randint(1, n * size)])
        y = cs.ops.attention(q, k, v, is_causal=causal, enable_gqa=True, key_lengths=lengths,
                             page_table=table)  # fmt: skip
        judge(y, q, k, v, causal=causal, lengths=lengths, table=table)


@pytest.mark.parametrize("size", [16, 64])
def test_pages_that_do_not_exist(size: int) -> None:
    """Enough sequences that a block walks over all of one, through many windows of its table.
    Entries behind its end name no pages, and pages that nobody has are NaN."""
    torch.manual_seed(size)
    b, h, n = 80, 2, 6000 // size
    lengths = torch.randint(0, n * size + 1, (b,), device="cuda", dtype=torch.int32)
    own = torch.arange(n, device="cuda") < -(-lengths // size)[:, None]
    table = torch.randperm(b * n, device="cuda").view(b, n).int()
    used = table[own].long()
    k, v = (torch.full((b * n, size, h, 128), float("nan"), device="cuda", dtype=torch.bfloat16)
            for _ in range(2))  # fmt: skip
    for cache in (k, v):
        cache[used] = torch.randn(len(used), size, h, 128, device="cuda").bfloat16()
    q = tensor(b, h * 4, 1, 128, dtype=torch.bfloat16)
    given = table.masked_fill(~own, -(2**31))
    y = cs.ops.attention(q, k, v, enable_gqa=True, key_lengths=lengths, page_table=given)
    judge(y, q, k.nan_to_num(), v.nan_to_num(), lengths=lengths, table=table)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 200])
@pytest.mark.parametrize("size", [1e2, 1e4])
def test_large_logits(dtype: str, rows: int, size: float) -> None:
    """Scores of up to 1e4, of both signs, rising along the keys: every tile has a new maximum."""
    torch.manual_seed(0)
    q = tensor(2, 8, rows, 128, dtype=DTYPES[dtype])
    k, v = (tensor(2, 2, 3000, 128, dtype=DTYPES[dtype]) for _ in range(2))
    k = (k * torch.linspace(0.01, 1, 3000, device="cuda")[:, None]).to(DTYPES[dtype])
    scale = size / float((q[:, :2].float() @ k.float().mT).abs().max())
    y = cs.ops.attention(q, k, v, scale=scale, enable_gqa=True)
    judge(y, q, k, v, scale=scale)


@pytest.mark.parametrize("rows", [1, 6, 64])
def test_rows_that_see_nothing(rows: int) -> None:
    q = tensor(4, 8, rows, 64, dtype=torch.float16)
    k, v = (tensor(4, 2, 512, 64, dtype=torch.float16, scale=100.0) for _ in range(2))
    lengths = integers([0, 1, max(1, rows - 2), 512])
    for causal in (False, True):
        y = cs.ops.attention(q, k, v, is_causal=causal, enable_gqa=True, key_lengths=lengths)
        seen = visible(rows, 512, 4, causal, lengths, "cuda").any(-1)
        assert not y.transpose(1, 2)[~seen].any()
        judge(y, q, k, v, causal=causal, lengths=lengths)


@pytest.mark.parametrize("rows", [1, 100])
def test_normalized_heads(rows: int) -> None:
    w = torch.rand(2, 128)
    q = tensor(2, 16, rows, 128, dtype=torch.bfloat16, tokens=True, scale=5.0)
    k, v = (tensor(2, 2, 1000, 128, dtype=torch.bfloat16, scale=3.0) for _ in range(2))
    weights = tuple((1 + x).bfloat16().cuda() for x in w)
    y = cs.ops.attention(q, k, v, enable_gqa=True, query_norm_weight=weights[0],
                         key_norm_weight=weights[1])  # fmt: skip
    wanted = exact(q, k, v, weights=weights)
    normed = (torch.nn.functional.rms_norm(t, (128,), x, 1e-6)
              for t, x in zip((q, k), weights, strict=True))  # fmt: skip
    assert_acceptable(y, wanted, by_torch(*normed, v, False, None, None))


# --- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [False, True])
def test_the_beginning_of_a_cache(tokens: bool) -> None:
    caches = [tensor(2, 2, 4096, 128, dtype=torch.float16, tokens=tokens) for _ in range(2)]
    q = tensor(2, 8, 3, 128, dtype=torch.float16)
    kept = None
    for t in (4095, 1000, 64, 3):
        k, v = (c[:, :, :t] for c in caches)
        for c in caches:
            c[:, :, t:] = torch.nan  # as if nobody had ever written there
        for causal in (False, True):
            y = cs.ops.attention(q, k, v, is_causal=causal, enable_gqa=True)
            judge(y, q, k, v, causal=causal)
        kept = kept or len(kind._kernels)
    assert len(kind._kernels) == kept  # one for each kind of mask, whatever t is


def test_batches_of_any_size() -> None:
    for b in (1, 3, 8, 13, 100):
        q = tensor(b, 8, 1, 64, dtype=torch.bfloat16)
        k, v = (tensor(b, 2, 300, 64, dtype=torch.bfloat16) for _ in range(2))
        lengths = torch.randint(0, 301, (b,), device="cuda", dtype=torch.int32)
        y = cs.ops.attention(q, k, v, enable_gqa=True, key_lengths=lengths)
        judge(y, q, k, v, lengths=lengths)


def test_the_same_bits_every_time() -> None:
    q = tensor(1, 8, 1, 128, dtype=torch.bfloat16)
    k, v = (tensor(1, 2, 8000, 128, dtype=torch.bfloat16) for _ in range(2))
    first = cs.ops.attention(q, k, v, enable_gqa=True)
    for _ in range(200):
        assert torch.equal(cs.ops.attention(q, k, v, enable_gqa=True), first)


# --- graphs and compilers ------------------------------------------------------------------------


def test_in_cuda_graphs() -> None:
    """Graphs that run at the same time, beside calls outside of them, with lengths that change."""
    q = tensor(4, 8, 1, 128, dtype=torch.bfloat16)
    k, v = (tensor(4, 2, 5000, 128, dtype=torch.bfloat16) for _ in range(2))
    lengths = integers([5000, 1, 77, 3000])

    def call() -> Any:
        return cs.ops.attention(q, k, v, enable_gqa=True, key_lengths=lengths)

    call()
    graphs, outputs = [], []
    for _ in range(3):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs.append([call() for _ in range(5)])
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in graphs]
    for values in ([5000, 1, 77, 3000], [0, 5000, 4999, 64]):
        lengths.copy_(integers(values))
        torch.cuda.synchronize()
        for _ in range(10):
            for graph, stream in zip(graphs, streams, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
            eager = call()
        torch.cuda.synchronize()
        for y in [eager, *(y for ys in outputs for y in ys)]:
            judge(y, q, k, v, lengths=lengths)


def test_a_first_call_in_a_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    q = tensor(1, 1, 1, 64, dtype=torch.float16)
    monkeypatch.setattr(kind, "_kernels", Kept())
    monkeypatch.setattr(calls, "_plans", Kept())
    with (
        pytest.raises(cs.errors.DeviceError, match="call it once before"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        cs.ops.attention(q, q, q)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_torch_compile(mode: str) -> None:
    def layer(x: Any, k: Any, v: Any, lengths: Any) -> Any:
        q = (x * 2).view(2, 4, 8, 64).transpose(1, 2)
        y = cs.ops.attention(q, k, v, is_causal=True, enable_gqa=True, key_lengths=lengths)
        return y.transpose(1, 2).reshape(2, 4, 512) + 1

    step = torch.compile(layer, fullgraph=True, mode=mode)
    x = torch.randn(2, 4, 512, device="cuda", dtype=torch.float16)
    k, v = (tensor(2, 2, 600, 64, dtype=torch.float16) for _ in range(2))
    lengths = integers([600, 9])
    with torch.no_grad():
        expected = layer(x, k, v, lengths)
        for _ in range(5):
            torch.compiler.cudagraph_mark_step_begin()
            torch.testing.assert_close(step(x, k, v, lengths).clone(), expected)


def test_on_streams_and_threads() -> None:
    from concurrent.futures import ThreadPoolExecutor

    q = tensor(2, 8, 1, 128, dtype=torch.bfloat16)
    k, v = (tensor(2, 2, 9000, 128, dtype=torch.bfloat16) for _ in range(2))
    expected = cs.ops.attention(q, k, v, enable_gqa=True)
    torch.cuda.synchronize()

    def work(_: int) -> Any:
        with torch.cuda.stream(torch.cuda.Stream()):
            found = [cs.ops.attention(q, k, v, enable_gqa=True) for _ in range(30)]
        torch.cuda.synchronize()
        return found

    with ThreadPoolExecutor(4) as threads:
        for found in threads.map(work, range(8)):
            assert all(torch.equal(y, expected) for y in found)
