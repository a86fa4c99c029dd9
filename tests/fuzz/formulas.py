"""Formulas of all operators of the table, written once more.

Nothing here calls the references of the package: a formula is a function ``f(m, args, attributes,
dtype)`` over the operations of `tests.fuzz.arithmetic`. Operators made of others round in between
(``m.store(.., limited=False)``), since a program may be cut there, but with the range of float32:
what PyTorch computes in float32 inside of one operator must not overflow.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.arithmetic import Arithmetic

Formula = Callable[[Arithmetic, list[Any], dict[str, Any], torch.dtype], Any]

FORMULAS: dict[str, Formula] = {}

#: element-wise functions of one number
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,
    "log": torch.log,
    "sqrt": torch.sqrt,
    "root": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "square": lambda x: x * x,
    "relu": lambda x: x.relu(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "erf": torch.erf,
    "log1p": torch.log1p,
    "log1p_exp": lambda x: torch.logaddexp(x, torch.zeros_like(x)),
    "expm1": torch.expm1,
    "sin": torch.sin,
    "cos": torch.cos,
    "asin": torch.asin,
    "acos": torch.acos,
    "atan": torch.atan,
    "sinh": torch.sinh,
    "cosh": torch.cosh,
    "asinh": torch.asinh,
    "acosh": torch.acosh,
    "atanh": torch.atanh,
    "erfc": torch.erfc,
    "abs": torch.abs,
    "floor": torch.floor,
    "round": torch.round,
    "step": lambda x: (x > 0).double(),
    "finite": lambda x: (x.abs() < 2.0**64).double(),
}

#: of two numbers
PAIRS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "at_least": lambda x, y: (x >= y).double(),
    "maximum": torch.maximum,
    "raised": lambda x, y: x.clamp(min=y),
    "hypot": torch.hypot,
    "atan2": torch.atan2,
    "copysign": torch.copysign,
    "floor_divide": partial(torch.div, rounding_mode="floor"),
    "keep": lambda c, x: torch.where(c > 0.5, x, 0.0),
    "hide": lambda c, x: torch.where(c > 0.5, x, -torch.inf),
    "lift": lambda c, x: torch.where(c > 0.5, x, torch.inf),
}

#: a sum or difference may be part of a longer one that is taken in another order
TERMS = {"add", "sub"}
#: these have no rounding of their own
EXACT = {"abs", "relu", "maximum", "copysign"}
#: these jump: next to a threshold a right program may be on either side
JUMPS = {"floor", "round", "step", "finite", "at_least", "floor_divide"}
#: these choose by their first operand
CHOICES = {"keep", "hide", "lift"}


def formula(name: str) -> Callable[[Formula], Formula]:
    """Enter a formula under the name of an operator."""

    def enter(f: Formula) -> Formula:
        FORMULAS[name] = f
        return f

    return enter


def _elementwise(name: str, f: Callable[..., Tensor]) -> Formula:
    if name in TERMS:
        return lambda m, args, a, dtype: m.plus(f, *args)
    if name in JUMPS | CHOICES:
        return lambda m, args, a, dtype: m.jump(f, *args, choice=name in CHOICES)
    return lambda m, args, a, dtype: m.function(f, *args, exact=name in EXACT)


FORMULAS |= {name: _elementwise(name, f) for name, f in (FUNCTIONS | PAIRS).items()}


def _of_exponentials(f: Callable[[Tensor], Tensor]) -> Formula:
    """A function that PyTorch makes of e^x and e^-x: vectors on a CPU overflow where one of these
    does, a factor of 2 before the result."""

    def formula(m: Arithmetic, args: list[Any], a: dict[str, Any], dtype: torch.dtype) -> Any:
        parts = m.store(m.function(lambda x: x.abs().exp(), args[0]), dtype, limited=False)
        return m.function(lambda x, _: f(x), args[0], parts)

    return formula


FORMULAS.update({name: _of_exponentials(FUNCTIONS[name]) for name in ("sinh", "cosh")})


def _rest(rounding: str) -> Formula:
    """x less the whole multiple of y that fits; of an infinite y none fits into a number."""

    def formula(m: Arithmetic, args: list[Any], a: dict[str, Any], dtype: torch.dtype) -> Any:
        count = m.jump(partial(torch.div, rounding_mode=rounding), *args)
        whole = m.function(lambda n, y: torch.where(n == 0, 0.0, n * y), count, args[1])
        return m.plus(torch.sub, args[0], whole)

    return formula


FORMULAS |= {"fmod": _rest("trunc"), "remainder": _rest("floor")}


@formula("silu")
def _silu(m: Arithmetic, args: list[Any], a: dict[str, Any], dtype: torch.dtype) -> Any:
    """x times a sigmoid, which underflows in float32 before the product does; of -inf NaN, as in
    PyTorch."""
    return m.function(torch.mul, args[0], m.function(torch.sigmoid, args[0]))


@formula("hardtanh")
def _hardtanh(m: Arithmetic, args: list[Any], a: dict[str, Any], dtype: torch.dtype) -> Any:
    """A clamp whose slope at the ends is 0, not 1."""
    ends = a["min"], a["max"]
    return m.function(lambda x: torch.nn.functional.hardtanh(x, *ends), args[0], exact=True)


@formula("clamp")
def _clamp(m: Arithmetic, args: list[Any], a: dict[str, Any], dtype: torch.dtype) -> Any:
    return m.function(lambda x: x.clamp(a["min"], a["max"]), args[0], exact=True)


@formula("leaky_relu")
def _leaky_relu(m: Arithmetic, args: list[Any], a: dict[str, Any], dtype: torch.dtype) -> Any:
    leaky = torch.nn.functional.leaky_relu
    return m.function(lambda x: leaky(x, a["negative_slope"]), args[0])


@formula("elu")
def _elu(m: Arithmetic, args: list[Any], a: dict[str, Any], dtype: torch.dtype) -> Any:
    scales = a["alpha"], a["scale"], a["input_scale"]
    return m.function(lambda x: torch.ops.aten.elu(x, *scales), args[0])


@formula("softshrink")
def _softshrink(m: Arithmetic, args: list[Any], a: dict[str, Any], dtype: torch.dtype) -> Any:
    return m.function(lambda x: torch.nn.functional.softshrink(x, a["lambd"]), args[0])


@formula("power")
def _power(m: Arithmetic, args: list[Any], a: dict[str, Any], dtype: torch.dtype) -> Any:
    """A product of powers and roots of roots, which is NaN at -inf, where PyTorch's has a limit."""
    n = a["exponent"]
    limit = torch.nan if n % 1 else (-torch.inf) ** n
    return m.function(lambda x: torch.where(x == -torch.inf, limit, x**n), args[0])


@formula("pow")
def _pow(m: Arithmetic, args: list[Any], a: dict[str, Any], dtype: torch.dtype) -> Any:
    """Of a negative number it is NaN, or a number where the exponent is rounded to a whole one."""
    whole = m.unsure(m.function(torch.floor, args[1], exact=True))
    return m.unknown(m.function(torch.pow, *args), whole & (m.value(args[0]) < 0))


@formula("hardswish")
def _hardswish(m: Arithmetic, args: list[Any], a: dict[str, Any], dtype: torch.dtype) -> Any:
    """With the slopes of the outer pieces where pieces meet, 0 at -3 and 1 at 3: all loops of
    PyTorch have them, on a CPU and on a GPU, where releases up to 2.6 had those of the middle one.
    The slope of a clamp is 1 at its ends, that of relu6 is 0."""
    above = m.function(lambda x: x + 3, args[0])
    return m.function(lambda x, t: x * torch.nn.functional.relu6(t) / 6, args[0], above)


@formula("sinc")
def _sinc(m: Arithmetic, args: list[Any], a: dict[str, Any], dtype: torch.dtype) -> Any:
    """The angle is rounded, which counts where its sine is small."""
    angle = m.function(lambda x: x * math.pi, args[0])
    sine = m.function(torch.sin, angle)
    return m.function(lambda s, x: torch.where(x == 0, 1.0, s / x), sine, angle)


@formula("special_entr")
def _entr(m: Arithmetic, args: list[Any], a: dict[str, Any], dtype: torch.dtype) -> Any:
    """With a logarithm of its own, which rounds to 0 next to 1."""
    logarithm = m.function(torch.log, args[0])
    return m.function(
        lambda x, y: torch.where(x > 0, -x * y, torch.special.entr(x)), args[0], logarithm
    )


@formula("logit")
def _logit(m: Arithmetic, args: list[Any], a: dict[str, Any], dtype: torch.dtype) -> Any:
    """The logarithm of a quotient, which is rounded."""
    return m.function(torch.log, m.function(lambda x: x / (1 - x), args[0]))


@formula("tan")
def _tan(m: Arithmetic, args: list[Any], a: dict[str, Any], dtype: torch.dtype) -> Any:
    """A quotient, whose divisor may be on either side of zero."""
    return m.function(torch.div, m.function(torch.sin, args[0]), m.function(torch.cos, args[0]))


@formula("mish")
def _mish(m: Arithmetic, args: list[Any], a: dict[str, Any], dtype: torch.dtype) -> Any:
    """x times a number that underflows in float32 before the product does."""
    return m.function(torch.mul, args[0], m.function(lambda x: x.exp().log1p().tanh(), args[0]))


@formula("gelu_tanh")
def _gelu_tanh(m: Arithmetic, args: list[Any], a: dict[str, Any], dtype: torch.dtype) -> Any:
    """In the usual form, as `gelu`."""
    inner = m.function(lambda x: math.sqrt(2 / math.pi) * (x + 0.044715 * x**3), args[0])
    return m.function(lambda x, s: 0.5 * x * (1 + s), args[0], m.function(torch.tanh, inner))


@formula("convert")
def _convert(m: Arithmetic, args: list[Any], a: dict[str, Any], dtype: torch.dtype) -> Any:
    """Nothing by itself: the result is rounded to its type where it is stored, like any other."""
    return m.move(lambda x: x, args[0])


@formula("gelu")
def _gelu(m: Arithmetic, args: list[Any], a: dict[str, Any], dtype: torch.dtype) -> Any:
    """GELU in the usual form, whose error is one of x where the result is small; vectors on a CPU
    are twice as large on the way in PyTorch, and overflow a factor of 2 before the result."""
    share = m.function(lambda x: torch.erf(x / math.sqrt(2)), args[0])
    twice = m.store(m.function(lambda x, s: x * (1 + s), args[0], share), dtype, limited=False)
    return m.function(lambda x, s, _: 0.5 * x * (1 + s), args[0], share, twice)


@formula("sum")
def _sum(m: Arithmetic, args: list[Any], a: dict[str, Any], dtype: torch.dtype) -> Any:
    return m.sum(args[0], a["dim"])


@formula("mean")
def _mean(m: Arithmetic, args: list[Any], a: dict[str, Any], dtype: torch.dtype) -> Any:
    return _scaled(m, m.sum(args[0], a["dim"]), 1.0 / m.value(args[0]).shape[a["dim"]])


@formula("cumsum")
def _cumsum(m: Arithmetic, args: list[Any], a: dict[str, Any], dtype: torch.dtype) -> Any:
    return m.scan(args[0], a["reverse"])


@formula("prod")
def _prod(m: Arithmetic, args: list[Any], a: dict[str, Any], dtype: torch.dtype) -> Any:
    count = m.value(args[0]).shape[a["dim"]]
    parts = [m.move(lambda x, i=i: x.narrow(a["dim"], i, 1), args[0]) for i in range(count)]
    while len(parts) > 1:
        pairs = zip(parts[::2], parts[1::2], strict=False)
        rest = parts[-1:] if len(parts) % 2 else []
        parts = [m.function(torch.mul, x, y) for x, y in pairs] + rest
    return m.any_order(parts[0], args[0], a["dim"])


@formula("max")
def _max(m: Arithmetic, args: list[Any], a: dict[str, Any], dtype: torch.dtype) -> Any:
    return m.max(args[0], a["dim"])


@formula("amax")
def _amax(m: Arithmetic, args: list[Any], a: dict[str, Any], dtype: torch.dtype) -> Any:
    return reduce(m.max, a["dims"], args[0])


@formula("argmax")
def _argmax(m: Arithmetic, args: list[Any], a: dict[str, Any], dtype: torch.dtype) -> Any:
    return m.place(args[0], a["dim"])


@formula("only_place")
def _only_place(m: Arithmetic, args: list[Any], a: dict[str, Any], dtype: torch.dtype) -> Any:
    return m.first(args[0])


@formula("xlogy")
def _xlogy(m: Arithmetic, args: list[Any], a: dict[str, Any], dtype: torch.dtype) -> Any:
    """0 where x is 0, which it may be in float32 where it is not in float64."""
    x, y = (m.value(v) for v in args)
    vanishing = (x.abs() < torch.finfo(torch.float32).tiny) & ~(y > 0)
    return m.unknown(m.function(torch.xlogy, *args), vanishing & (x != 0))


@formula("matmul")
def _matmul(m: Arithmetic, args: list[Any], a: dict[str, Any], dtype: torch.dtype) -> Any:
    """In float32 an infinite operand gives NaN (docs/lowering/matmul.md), or its product where no
    tensor core multiplies."""
    found = m.matmul(*args)
    if dtype != torch.float32:
        return found
    rows, columns = (
        m.value(x).isinf().any(d, keepdim=True) for x, d in zip(args, (-1, -2), strict=True)
    )
    lost = rows | columns
    return m.unknown(m.where(~lost, found, torch.nan), lost)


@formula("transpose")
def _transpose(m: Arithmetic, args: list[Any], a: dict[str, Any], dtype: torch.dtype) -> Any:
    rank = m.value(args[0]).dim()
    dims = (*range(rank - 2), rank - 1, rank - 2) if a["dims"] is None else a["dims"]
    return m.move(lambda x: x.permute(dims), args[0])


@formula("concat")
def _concat(m: Arithmetic, args: list[Any], a: dict[str, Any], dtype: torch.dtype) -> Any:
    return m.move(lambda *xs: torch.cat(xs, a["dim"]), *args)


@formula("slice")
def _slice(m: Arithmetic, args: list[Any], a: dict[str, Any], dtype: torch.dtype) -> Any:
    places = torch.arange(m.value(args[0]).shape[a["dim"]])[a["start"] : a["stop"]]
    return m.move(lambda x: x.index_select(a["dim"], places), args[0])


@formula("rotate_half")
def _rotate_half(m: Arithmetic, args: list[Any], a: dict[str, Any], dtype: torch.dtype) -> Any:
    half = m.value(args[0]).shape[-1] // 2
    moved = m.move(lambda x: x.roll(half, -1), args[0])
    signs = torch.ones(2 * half, dtype=torch.float64)
    signs[:half] = -1
    return m.function(lambda x: x * signs, moved, exact=True)


@formula("rotate_pairs")
def _rotate_pairs(m: Arithmetic, args: list[Any], a: dict[str, Any], dtype: torch.dtype) -> Any:
    pairs = m.value(args[0]).shape[-1] // 2
    moved = m.move(lambda x: x.unflatten(-1, (pairs, 2)).flip(-1).flatten(-2), args[0])
    signs = torch.tensor([-1.0, 1.0], dtype=torch.float64).repeat(pairs)
    return m.function(lambda x: x * signs, moved, exact=True)


# ---------------------------------------------------------------------------- masks and integers


@formula("causal_mask")
def _causal_mask(m: Arithmetic, args: list[Any], a: dict[str, Any], dtype: torch.dtype) -> Any:
    rows, columns = m.value(args[0]).shape[-2:]
    offset = max(0, columns - rows) if a["alignment"] == "bottom_right" else 0
    keep = torch.ones(rows, columns, dtype=torch.bool).tril(offset)
    return m.where(keep, args[0], -torch.inf)


@formula("length_mask")
def _length_mask(m: Arithmetic, args: list[Any], a: dict[str, Any], dtype: torch.dtype) -> Any:
    return m.where(seen(m.value(args[0]).shape, args[1], a["causal"]), args[0], -torch.inf)


def seen(shape: Any, lengths: Tensor, causal: bool) -> Tensor:
    """A mask of the scores that lie in their sequence; a longer one ends with the columns."""
    rows, columns = shape[-2:]
    more = [1] * (len(shape) - lengths.dim())
    ends = lengths.long().clamp(max=columns).reshape(*lengths.shape, *more)
    if causal:
        ends = ends - torch.arange(rows - 1, -1, -1).reshape(rows, 1)
    return (torch.arange(columns) < ends).broadcast_to(shape)


@formula("limit_mask")
def _limit_mask(m: Arithmetic, args: list[Any], a: dict[str, Any], dtype: torch.dtype) -> Any:
    shape = m.value(args[0]).shape
    rows, columns = shape[-2:]
    limits = args[1].long().reshape(*args[1].shape, *[1] * (len(shape) - args[1].dim()))
    if a["causal"]:
        limits = limits - torch.arange(rows - 1, -1, -1).reshape(rows, 1)
    in_front = torch.arange(columns) < limits
    keep = ~in_front if a["lower"] else in_front
    return m.where(keep.broadcast_to(shape), args[0], -torch.inf)


@formula("take_rows")
def _take_rows(m: Arithmetic, args: list[Any], a: dict[str, Any], dtype: torch.dtype) -> Any:
    def taken(table: Tensor) -> Tensor:
        rows = torch.stack([table[i] for i in args[1].flatten().tolist()])
        return rows.reshape(*args[1].shape, *table.shape[1:])

    return m.move(taken, args[0])


@formula("put_rows")
def _put_rows(m: Arithmetic, args: list[Any], a: dict[str, Any], dtype: torch.dtype) -> Any:
    """Of equal places any row may be stored, and elements of several where these are stored at the
    same time: nothing is known there."""
    dims = a["dim"] if isinstance(a["dim"], tuple) else (a["dim"],)
    shape, front = m.value(args[0]).shape, tuple(range(len(dims)))
    counts = [shape[d] for d in dims]
    named = {
        i: tuple(p % n for p, n in zip(at, counts, strict=True))
        for i, at in enumerate(zip(*(index.tolist() for index in args[1:-1]), strict=True))
        if all(-n <= p < n for p, n in zip(at, counts, strict=True))
    }

    def put(base: Tensor, rows: Tensor) -> Tensor:
        made = base.clone()
        for i, place in named.items():
            made.movedim(dims, front)[place] = rows.select(dims[0], i)
        return made

    found, several = m.move(put, args[0], args[-1]), torch.zeros(shape, dtype=torch.bool)
    for place, times in Counter(named.values()).items():
        several.movedim(dims, front)[place] = times > 1
    return m.unknown(found, several)


@formula("gather_pages")
def _gather_pages(m: Arithmetic, args: list[Any], a: dict[str, Any], dtype: torch.dtype) -> Any:
    table = args[1].long()

    def gathered(cache: Tensor) -> Tensor:
        rows = [torch.cat([cache[p] for p in row.tolist()]) for row in table]
        return torch.stack(rows)

    return m.move(gathered, args[0])


@formula("pick")
def _pick(m: Arithmetic, args: list[Any], a: dict[str, Any], dtype: torch.dtype) -> Any:
    return m.where(torch.arange(m.value(args[0]).shape[-1]) == args[1], args[0], 0.0)


@formula("label_weight")
def _label_weight(m: Arithmetic, args: list[Any], a: dict[str, Any], dtype: torch.dtype) -> Any:
    return m.given(weights(args[0], a["classes"], a["ignore_index"]))


def weights(labels: Tensor, classes: int, ignored: int) -> Tensor:
    """1 for a class, 0 for what is ignored, NaN for anything else."""
    w = torch.full(labels.shape, torch.nan, dtype=torch.float64)
    w[(labels >= 0) & (labels < classes)] = 1.0
    w[labels == ignored] = 0.0
    return w


def _hidden_sub(x: Tensor, y: Tensor) -> Tensor:
    return torch.where((x == -torch.inf) & (y == -torch.inf), -torch.inf, x - y)


def _empty_div(x: Tensor, y: Tensor) -> Tensor:
    return x / torch.where(y == 0, 1.0, y)


# ----------------------------------------------------------------------------------- composites


@formula("rms_norm")
def _rms_norm(m: Arithmetic, args: list[Any], a: dict[str, Any], dtype: torch.dtype) -> Any:
    x = args[0]
    squares = m.store(m.function(FUNCTIONS["square"], x), dtype, limited=False)
    y = m.function(torch.div, x, _root(m, squares, a["eps"], m.value(x).shape[-1]))
    return m.function(torch.mul, m.store(y, dtype, False), args[1]) if len(args) > 1 else y


@formula("layer_norm")
def _layer_norm(m: Arithmetic, args: list[Any], a: dict[str, Any], dtype: torch.dtype) -> Any:
    n = m.value(args[0]).shape[-1]
    middle = _scaled(m, m.sum(args[0], -1), 1.0 / n)
    centred = m.store(m.plus(torch.sub, args[0], middle), dtype, limited=False)
    squares = m.function(FUNCTIONS["square"], centred)
    y = m.function(torch.div, centred, _root(m, squares, a["eps"], n))
    y = m.function(torch.mul, m.store(y, dtype, False), args[1]) if len(args) > 1 else y
    return m.plus(torch.add, m.store(y, dtype, False), args[2]) if len(args) > 2 else y


def _root(m: Arithmetic, squares: Any, eps: float, n: int) -> Any:
    """sqrt(mean + eps)"""
    return m.function(lambda s: torch.sqrt(s / n + eps), m.sum(squares, -1))


@formula("softmax")
def _softmax(m: Arithmetic, args: list[Any], a: dict[str, Any], dtype: torch.dtype) -> Any:
    return _softmax_of(m, args[0], a["dim"], dtype, 0.0)


def _softmax_of(m: Arithmetic, x: Any, dim: int, dtype: torch.dtype, of_empty: float) -> Any:
    _, e = _exponentials(m, x, dim, dtype)
    y = m.function(torch.div, e, m.sum(e, dim))
    return m.where(~_empty(m, x, dim), y, of_empty)


def softmax_by_data(m: Arithmetic, args: list[Any], a: dict[str, Any], dtype: torch.dtype) -> Any:
    """Softmax where no mask hides a row as a whole: if all its numbers are -inf, NaN, as in
    PyTorch."""
    return _softmax_of(m, args[0], a["dim"], dtype, torch.nan)


@formula("logsumexp")
def _logsumexp(m: Arithmetic, args: list[Any], a: dict[str, Any], dtype: torch.dtype) -> Any:
    _, e = _exponentials(m, args[0], a["dim"], dtype)
    return m.plus(
        lambda log, top: torch.where(top.isfinite(), log + top, top),
        m.function(torch.log, m.sum(e, a["dim"])), m.max(args[0], a["dim"]),
    )  # fmt: skip


@formula("log_softmax")
def _log_softmax(m: Arithmetic, args: list[Any], a: dict[str, Any], dtype: torch.dtype) -> Any:
    shifted, e = _exponentials(m, args[0], a["dim"], dtype)
    return m.plus(torch.sub, shifted, m.function(torch.log, m.sum(e, a["dim"])))


@formula("cross_entropy")
def _cross_entropy(m: Arithmetic, args: list[Any], a: dict[str, Any], dtype: torch.dtype) -> Any:
    x, labels = args
    n = m.value(x).shape[-1]
    shifted, e = _exponentials(m, x, -1, dtype)
    own = labels.long().clamp(0, n - 1)
    picked = m.move(lambda t: t.gather(-1, own), shifted)
    loss = m.plus(torch.sub, m.function(torch.log, m.sum(e, -1)), picked)
    return m.function(torch.mul, loss, m.given(weights(labels, n, a["ignore_index"])), exact=True)


@formula("scaled_dot_product_attention")
def _attention(m: Arithmetic, args: list[Any], a: dict[str, Any], dtype: torch.dtype) -> Any:
    query, key, value = args[:3]
    scale = a["scale"]
    scale = m.value(query).shape[-1] ** -0.5 if scale is None else scale
    scores = m.matmul(query, m.move(lambda t: t.transpose(-1, -2), key))
    scores = m.store(_scaled(m, scores, scale), dtype, limited=False)
    shape = m.value(scores).shape
    if len(args) == 4:
        scores = m.where(seen(shape, args[3], a["is_causal"]), scores, -torch.inf)
    elif a["is_causal"]:
        scores = m.where(torch.ones(shape[-2:], dtype=torch.bool).tril(), scores, -torch.inf)
    share = m.store(_softmax(m, [scores], {"dim": -1}, dtype), a["factors"], limited=False)
    return m.matmul(share, value)


def _exponentials(m: Arithmetic, x: Any, dim: int, dtype: torch.dtype) -> tuple[Any, Any]:
    """x - max, and its exponentials; -inf minus -inf is -inf."""
    top = m.max(x, dim)
    top = m.where(m.value(top) != -torch.inf, top, 0.0)
    shifted = m.store(m.plus(torch.sub, x, top), dtype, limited=False)
    return shifted, m.store(m.function(torch.exp, shifted), dtype, limited=False)


def _empty(m: Arithmetic, x: Any, dim: int) -> Tensor:
    return (m.value(x) == -torch.inf).all(dim, keepdim=True)


def _scaled(m: Arithmetic, x: Any, factor: float) -> Any:
    return m.function(lambda t: t * factor, x)


#: in programs that hide rows as a whole (docs/verification.md, "Masks"): -inf minus -inf is -inf
WITH_HIDDEN_ROWS = FORMULAS | {"sub": _elementwise("sub", _hidden_sub)}
#: and a divisor that is 0 in such rows counts as 1
OF_EMPTY = _elementwise("div", _empty_div)
