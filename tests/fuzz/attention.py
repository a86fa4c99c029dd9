"""python -m tests.fuzz.attention: random calls of attention, in one process, against float64.

    python -m tests.fuzz.attention --cases 100 --seed 3            # the reference executor
    python -m tests.fuzz.attention --cases 100 --seed 3 --ptx      # kernels, on the machine
    python -m tests.fuzz.attention --cases 100 --seed 3 --gpu      # kernels, on a GPU
    python -m tests.fuzz.attention --only 3:17 --ptx               # one of them

A call is right if each result has at most twice the error of PyTorch in the same element type, and
2 ulp (`cutesuper.verify.numeric.acceptable`). Tiny extents are drawn unless there is a GPU.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F

import cutesuper as cs
from cutesuper.errors import CutesuperError
from cutesuper.verify.numeric import acceptable
from tests.fuzz.needs import NOTHING, NOTHING_LAUNCHED, missing
from tests.fuzz.outcome import Outcome, of_exception, of_machine, of_refusal
from tests.ptx.device import emulated_gpu
from tests.ptx.parse import PtxError

#: what is exactly 0 as terms of about 1 cancel may be this, as their sums are float32: the gradient
#: of a query that sees one key
FLOOR = 2.0**-14
#: extents that a bias or a mask has along batch, heads and rows: whole, or 1
BROADCAST = ((1, 1, 1), (0, 1, 1), (0, 0, 1), (1, 0, 0), (0, 1, 0), (1, 0, 1))


@dataclass(frozen=True)
class Call:
    """A call of ``cs.ops.attention``.

    Attributes:
        batch, heads, group, rows, keys, width, value_width: extents; query heads for each head.
        dtype: of query, key and value.
        causal: with ``lengths`` to the last key.
        lengths: keys of each sequence, none for all of them.
        page: positions of a page, 0 without pages.
        norms: whether query and key are normalized.
        mask: "" for none, "hides" for conditions, else the element type of a bias.
        along: which of batch, heads and rows the mask has.
        window, starts, ends: limits; starts are of "sequences" or "rows".
        packed: lengths of sequences in a row, for a call with one sequence.
        cached: whether keys are the beginning of a longer cache.
        tokens: whether heads come behind positions in memory.
        gradients: whether to differentiate.
        scale: of the products.
        size: of the queries.
        seed: of the data.
    """

    batch: int = 1
    heads: int = 1
    group: int = 1
    rows: int = 16
    keys: int = 16
    width: int = 16
    value_width: int = 16
    dtype: torch.dtype = torch.bfloat16
    causal: bool = False
    lengths: tuple[int, ...] = ()
    page: int = 0
    norms: bool = False
    mask: str = ""
    along: tuple[int, int, int] = (1, 1, 1)
    window: int = 0
    starts: str = ""
    ends: bool = False
    packed: tuple[int, ...] = ()
    cached: bool = False
    tokens: bool = False
    gradients: bool = False
    scale: float | None = None
    size: float = 1.0
    seed: int = 0

    def __str__(self) -> str:
        default = Call()
        given = {n: v for n, v in vars(self).items() if v != getattr(default, n)}
        return f"Call({', '.join(f'{n}={v!r}' for n, v in given.items())})"


def drawn(seed: int, index: int, large: bool) -> Call:
    """The call of an index."""
    rng = random.Random(f"attention:{seed}:{index}")
    most = 700 if large else 90
    extents = [rng.choice((1, rng.randint(1, most), rng.choice((16, 64, 65)))) for _ in range(2)]
    widths = rng.choice(((16, 16), (64, 64), (32, 32), (24, 40), (64, 32), (128, 128), (8, 8)))
    if large:
        widths = rng.choice((widths, (192, 128), (256, 256), (96, 96)))
    sizes = rng.choice((1, 2, 3)), rng.choice((1, 2)), rng.choice((1, 1, 2, 3))
    call = Call(
        sizes[0], sizes[1], sizes[2], extents[0], extents[1], widths[0], widths[1],
        rng.choice((torch.bfloat16, torch.float16)), rng.random() < 0.4,
        tokens=rng.random() < 0.3, gradients=rng.random() < 0.5,
        scale=rng.choice((None, None, 0.3)), size=rng.choice((1.0, 1.0, 6.0, 0.01)),
        seed=rng.randrange(1 << 30),
    )  # fmt: skip
    for change in rng.sample(CHANGES, rng.choice((0, 1, 1, 2, 2, 3))):
        call = change(call, rng)
    return call


def _lengths(c: Call, rng: random.Random) -> Call:
    return replace(c, lengths=tuple(rng.randint(0, c.keys) for _ in range(c.batch)))


def _pages(c: Call, rng: random.Random) -> Call:
    page = rng.choice((16, 32))
    keys = -(-c.keys // page) * page
    lengths = tuple(rng.randint(0, keys) for _ in range(c.batch))
    return replace(c, page=page, keys=keys, lengths=lengths, packed=(), cached=False)


def _norms(c: Call, rng: random.Random) -> Call:
    return replace(c, norms=True)


def _mask(c: Call, rng: random.Random) -> Call:
    kind = rng.choice(("hides", "float32", str(c.dtype).removeprefix("torch.")))
    return replace(c, mask=kind, along=rng.choice(BROADCAST))


def _window(c: Call, rng: random.Random) -> Call:
    return replace(c, causal=True, window=rng.randint(1, 40))


def _starts(c: Call, rng: random.Random) -> Call:
    if c.packed:
        return c
    return replace(c, starts=rng.choice(("sequences", "rows")))


def _ends(c: Call, rng: random.Random) -> Call:
    return replace(c, ends=not c.packed)


def _packed(c: Call, rng: random.Random) -> Call:
    cuts = sorted(rng.randint(0, c.rows) for _ in range(3))
    sizes = tuple(b - a for a, b in zip((0, *cuts), (*cuts, c.rows), strict=True))
    return replace(c, batch=1, keys=c.rows, packed=sizes, lengths=(), page=0, cached=False,
                   window=0, starts="", ends=False)  # fmt: skip


def _cached(c: Call, rng: random.Random) -> Call:
    return replace(c, cached=not c.page)


CHANGES = (_lengths, _pages, _norms, _mask, _window, _starts, _ends, _packed, _cached, _mask)


# -------------------------------------------------------------------------------------------- data


@dataclass(frozen=True)
class Data:
    """The tensors of a call.

    Attributes:
        sides: query, key and value ``[B, H, S, D]``, keys that nobody may see NaN.
        options: of the call.
        bias: added to scores, or conditions; None without a mask.
        sees: ``[B, 1, L, S]``, the keys of each row.
        weights: of norms.
        cotangent: of the result.
        pages: the caches with their pages in another order, in place of keys and values.
    """

    sides: list[torch.Tensor]
    options: dict[str, Any]
    bias: torch.Tensor | None
    sees: torch.Tensor
    weights: list[torch.Tensor]
    cotangent: torch.Tensor
    pages: list[torch.Tensor] = field(default_factory=list)


def data_of(c: Call, device: str) -> Data:
    """Draw the tensors of a call."""
    g = torch.Generator().manual_seed(c.seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g).to(c.dtype)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high + 1, shape, generator=g, dtype=torch.int32)

    def side(heads: int, rows: int, width: int) -> torch.Tensor:
        t = normal(c.batch, rows, heads, width).transpose(1, 2)
        return t if c.tokens else t.contiguous()

    query = side(c.heads * c.group, c.rows, c.width) * c.size
    key, value = (side(c.heads, c.keys, w) for w in (c.width, c.value_width))
    cotangent = normal(*query.shape[:3], c.value_width)
    i, j = torch.arange(c.rows)[:, None], torch.arange(c.keys)
    sees = torch.ones(c.batch, 1, c.rows, c.keys, dtype=torch.bool)
    options: dict[str, Any] = {"enable_gqa": True, "scale": c.scale, "is_causal": c.causal}
    ends = torch.full((c.batch, 1, 1, 1), c.keys)
    if c.lengths:
        options["key_lengths"] = torch.tensor(c.lengths, dtype=torch.int32)
        ends = options["key_lengths"].view(-1, 1, 1, 1)
        sees = sees & (j < ends)
    if c.packed:
        own = torch.arange(len(c.packed)).repeat_interleave(torch.tensor(c.packed))
        sees = sees & (own[:, None] == own) & ((j <= i) if c.causal else True)
        marks = torch.tensor([0, *c.packed]).cumsum(0).int()
        options |= cs.ops.packed_limits(marks, rows=c.rows, is_causal=c.causal)
        options["is_causal"] = False
    elif c.causal:
        last = ends - c.rows + i if c.lengths else i
        sees = sees & (j <= last)
        if c.window:
            options["window"] = c.window
            # without lengths the last row is the last of its keys
            sees = sees & (j > last - c.window)
    if c.starts:
        shape = (c.batch,) if c.starts == "sequences" else (c.batch, c.rows)
        starts = integers(0, c.keys, *shape).sort(-1).values if len(shape) > 1 else integers(
            0, c.keys // 2, *shape)  # fmt: skip
        options["key_starts"] = starts
        sees = sees & (j >= starts.view(c.batch, 1, -1, 1))
    if c.ends:
        options["key_ends"] = integers(0, c.keys, c.batch, c.rows).sort(-1).values.contiguous()
        sees = sees & (j < options["key_ends"].view(c.batch, 1, -1, 1))
    bias = None
    if c.mask:
        whole = c.batch, c.heads * c.group, c.rows
        shape = [n if own else 1 for n, own in zip(whole, c.along, strict=True)]
        bias = torch.randn(*shape, c.keys, generator=g)
        bias = bias > 0 if c.mask == "hides" else bias.to(getattr(torch, c.mask))
    weights = [1 + normal(c.width) / 4 for _ in range(2)] if c.norms else []
    made = Data([query, key, value], options, bias, sees, weights, cotangent)
    return _moved(_stored(made, c, g), device)


def _stored(d: Data, c: Call, g: torch.Generator) -> Data:
    """Keys and values in caches, with NaN where nothing may be read."""
    caches = d.sides[1:]
    if c.lengths:
        behind = torch.arange(c.keys) >= d.options["key_lengths"][:, None]
        caches = [t.masked_fill(behind[:, None, :, None], torch.nan) for t in caches]
    if c.cached:
        caches = [_begun(t, c.tokens) for t in caches]
    sides = [d.sides[0], *caches]
    if not c.page:
        return replace(d, sides=sides)
    count = c.keys // c.page
    order = torch.randperm(c.batch * count, generator=g) + 1
    pages = []
    for t in caches:
        cache = torch.full((c.batch * count + 1, c.page, *t.shape[1::2]), torch.nan, dtype=c.dtype)
        cache[order] = t.transpose(1, 2).reshape(-1, c.page, *t.shape[1::2])
        pages.append(cache)
    table = order.view(c.batch, count).int()
    return replace(d, sides=sides, options=d.options | {"page_table": table}, pages=pages)


def _begun(t: torch.Tensor, tokens: bool) -> torch.Tensor:
    """A tensor as the beginning of a longer cache that holds NaN."""
    b, h, s, w = t.shape
    if tokens:
        cache = torch.full((b, s + 7, h, w), torch.nan, dtype=t.dtype).transpose(1, 2)
    else:
        cache = torch.full((b, h, s + 7, w), torch.nan, dtype=t.dtype)
    cache[:, :, :s] = t
    return cache[:, :, :s]


def _moved(d: Data, device: str) -> Data:
    def to(x: Any) -> Any:
        return x.to(device) if isinstance(x, torch.Tensor) else x

    options = {n: to(v) for n, v in d.options.items()}
    cut = [t if t.is_cuda == (device == "cuda") else _like(t, device) for t in d.sides]
    return Data(cut, options, to(d.bias), to(d.sees), [to(w) for w in d.weights], to(d.cotangent),
                [to(p) for p in d.pages])  # fmt: skip


def _like(t: torch.Tensor, device: str) -> torch.Tensor:
    """A tensor on a device with its strides."""
    base = t._base if t._base is not None else t
    return base.to(device).as_strided(t.shape, t.stride(), t.storage_offset())


# ------------------------------------------------------------------------------------------- judge


#: how a result is computed: written out, by PyTorch's operator, or as its fused operators do, which
#: take the sums of a softmax's derivative from the result that they stored in 16 bits
#: (arXiv:2205.14135, B.4); that rounding is drawn several times
WRITTEN, OPERATOR, FUSED = "written", "operator", ("fused",) * 3


def results(c: Call, d: Data, dtype: torch.dtype, how: str = WRITTEN) -> list[torch.Tensor]:
    """The result and the gradients of query, key, value and a bias in ``dtype``; PyTorch's ways do
    not compute the same roundings."""
    fused = how == FUSED[0]
    kept, dtype = dtype, torch.float32 if fused else dtype
    own = [torch.nan_to_num(t.detach()).to(dtype) for t in d.sides]
    bias = None if d.bias is None or c.mask == "hides" else d.bias.detach().to(dtype)
    leaves = [t.requires_grad_() for t in (*own, *([bias] if bias is not None else []))]
    q, k, v = own
    if c.norms:
        eps, weights = 1e-6, [w.to(dtype) for w in d.weights]
        q, k = (t * (t.square().mean(-1, keepdim=True) + eps).rsqrt() * w
                for t, w in zip((q, k), weights, strict=True))  # fmt: skip
    k, v = (t.repeat_interleave(c.group, 1) for t in (k, v))
    sees = d.sees if c.mask != "hides" or d.bias is None else d.sees & d.bias
    y, lse = _attended((q, k, v), bias, sees.expand(*q.shape[:3], c.keys), c.scale, how)
    if not c.gradients:
        return [y.detach().to(kept)]
    made, cotangents = [y], [d.cotangent.to(dtype)]
    if fused:
        made, cotangents = [y, lse], [*cotangents, -_rounding(y.detach(), cotangents[0], kept)]
    found = torch.autograd.grad(made, leaves, cotangents)
    return [t.detach().to(kept) for t in (y, *found)]


def _rounding(y: torch.Tensor, cotangent: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The error of the sums of products of a result and its cotangent, rounded up or down at
    random. As a cotangent of the logarithms of the rows' sums it is taken from all scores."""
    near = 1 + (torch.rand_like(y) - 0.5) * torch.finfo(dtype).eps
    return (((y * near).to(dtype) - y) * cotangent).sum(-1)


def _attended(
    sides: tuple[torch.Tensor, ...], bias: Any, sees: torch.Tensor, scale: Any, how: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, and the logarithms of the sums of rows, which PyTorch's operator leaves out."""
    q, k, v = sides
    some = sees.any(-1, keepdim=True)
    if how == OPERATOR:
        mask = torch.zeros(sees.shape, dtype=q.dtype, device=q.device)
        mask = (mask if bias is None else mask + bias).masked_fill(~sees & some, -torch.inf)
        y = F.scaled_dot_product_attention(q, k, v, mask, scale=scale)
        return y.masked_fill(~some, 0.0), y
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if bias is None else scores + bias
    scores = scores.masked_fill(~sees, -torch.inf).masked_fill(~some, 0.0)
    return (scores.softmax(-1) * sees) @ v, scores.logsumexp(-1)


def found(c: Call, d: Data) -> list[torch.Tensor]:
    """The same by the operator."""
    sides = [d.sides[0], *d.pages] if d.pages else d.sides
    leaves = [t.detach() for t in sides]
    bias = None if d.bias is None else d.bias.detach()
    if c.gradients:
        leaves = [t.requires_grad_() for t in leaves]
        if bias is not None and c.mask != "hides":
            bias.requires_grad_()
    norms = dict(zip(("query_norm_weight", "key_norm_weight"), d.weights, strict=False))
    query, key, value = leaves
    y = cs.ops.attention(query, key, value, bias, **d.options, **norms)
    if not c.gradients:
        return [y]
    own = leaves if bias is None or not bias.requires_grad else [*leaves, bias]
    return [y.detach(), *torch.autograd.grad(y, own, d.cotangent)]


def outcome(c: Call, device: str) -> Outcome:
    """The outcome of a call."""
    d = data_of(c, device)
    try:
        made = found(c, d)
    except CutesuperError as error:
        return of_refusal(error, "call")
    except PtxError as error:
        return of_machine(error, "call")
    except Exception as error:
        return of_exception(error, "call")
    names = ("result", "query", "key", "value", "bias")
    exact = results(c, d, torch.float64)
    ways = WRITTEN, OPERATOR, *(FUSED if c.gradients else ())
    torch.manual_seed(c.seed)
    eager = [results(c, d, c.dtype, how) for how in ways]
    for name, mine, want, *others in zip(names, made, exact, *eager, strict=False):
        reports = [acceptable(mine, want, other, mine.dtype) for other in others]
        cancelled = not want.any() and mine.abs().max() < FLOOR / min(1.0, c.size)
        if not any(reports) and not cancelled:
            return Outcome("wrong", name, reports[-1].message)
    return Outcome("right")


# --------------------------------------------------------------------------------------------- run


def main(given: list[str] | None = None) -> int:
    """Returns 1 where something was found, 2 where kernels should have been launched and none
    was."""
    p = argparse.ArgumentParser(prog="python -m tests.fuzz.attention", description=__doc__)
    p.add_argument("--cases", type=int, default=100)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--seconds", type=float, default=1e9, help="when to stop")
    p.add_argument("--only", metavar="SEED:INDEX", help="one call")
    p.add_argument("--ptx", action="store_true", help="kernels on the machine of tests/ptx")
    p.add_argument("--gpu", action="store_true", help="kernels on a GPU")
    p.add_argument("--verbose", action="store_true", help="print the reasons of refusals, too")
    a = p.parse_args(given)
    warnings.simplefilter("ignore")
    if why := missing(a.gpu, a.ptx):
        print(why, file=sys.stderr)
        return NOTHING
    with emulated_gpu() if a.ptx else nullcontext():
        return _run(a, "cuda" if a.gpu or a.ptx else "cpu")


def _indices(a: argparse.Namespace) -> Iterator[tuple[int, int]]:
    if a.only:
        seed, index = map(int, a.only.split(":"))
        yield seed, index
        return
    end = time.monotonic() + a.seconds
    for index in range(a.cases):
        if time.monotonic() < end:
            yield a.seed, index


def _run(a: argparse.Namespace, device: str) -> int:
    counts, reasons, bad, start = Counter[str](), Counter[str](), 0, time.monotonic()
    for seed, index in _indices(a):
        call = drawn(seed, index, a.gpu)
        made = outcome(call, device)
        counts[made.kind] += 1
        reasons[made.where] += made.kind == "refused"
        bad += made.finding
        if made.finding or (a.verbose and made.kind == "refused"):
            print(f"{seed}:{index} {call}\n  {made.key}\n  {made.detail}", flush=True)
    print(f"{time.monotonic() - start:.0f} s:", dict(counts))
    for reason, count in reasons.most_common():
        if count:
            print(f"{count:6} refused: {reason}")
    if (a.gpu or a.ptx) and not (bad or counts["right"]):
        print(NOTHING_LAUNCHED, file=sys.stderr)
        return NOTHING
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
