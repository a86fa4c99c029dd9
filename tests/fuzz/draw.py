"""Random programs, well typed as far as shapes say, from a seed and an index.

Operators come from the table. Those whose operands have to fit together have a recipe in `RECIPES`;
any other one, so also one that is new, is tried by its signature: element-wise operators on what
broadcasts, reductions along any dimension, the rest on operands that its shape rule accepts.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import cutesuper as cs
from cutesuper.errors import CutesuperError
from cutesuper.ir.dims import Symbol, extent
from cutesuper.ir.graph import Tensor
from cutesuper.ir.operators.base import TABLE, Operator
from tests.fuzz.data import KINDS
from tests.fuzz.programs import ROWS, Case, Source, Step, apply, new_input

FLOATS = ("float16", "bfloat16", "float32")
#: odd, at an edge, aligned
EXTENTS = (1, 2, 3, 4, 7, 8, 12, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 96, 100, 128, 130, 200,
           256, 264, 512)  # fmt: skip
ALIGNED = tuple(n for n in EXTENTS if n % 8 == 0)
HEADS = (8, 16, 32, 40, 64, 72, 128)
#: elements of one value, and multiplications of one product
ELEMENTS, PRODUCTS = 1 << 16, 1 << 24

#: what brings an argument into the domain of a function
DOMAINS: dict[str, tuple[tuple[str, float | None], ...]] = {
    "log": (("square", None), ("add", 0.5)),
    "sqrt": (("square", None), ("add", 0.5)),
    "root": (("square", None),),
    "rsqrt": (("square", None), ("add", 0.5)),
    "power": (("square", None), ("add", 0.5)),
    "acosh": (("square", None), ("add", 1.5)),
    "log1p": (("square", None),),
    "asin": (("sin", None), ("mul", 0.75)),
    "acos": (("cos", None), ("mul", 0.75)),
    "atanh": (("tanh", None), ("mul", 0.75)),
    "exp": (("tanh", None), ("mul", 3.0)),
    "sinh": (("tanh", None),),
    "cosh": (("tanh", None),),
    "expm1": (("tanh", None),),
    "special_entr": (("square", None),),
    "logit": (("sigmoid", None),),
}

#: operators that programs are made of more often than a draw from the table gives them
USUAL = ("add", "mul", "sub", "div", "maximum", "matmul", "matmul", "matmul", "sum", "mean", "max",
         "softmax", "rms_norm", "layer_norm", "silu", "gelu", "exp", "square", "transpose",
         "scaled_dot_product_attention", "concat", "hide", "keep", "lift", "argmax",
         "cumsum")  # fmt: skip


def draw_case(seed: int, index: int) -> Case:
    """The program ``index`` of a seed."""
    rng = random.Random(f"{seed}:{index}")
    long = rng.random() < 0.05
    return Draw(rng, rng.randint(13, 24) if long else rng.randint(1, 9)).case()


@dataclass
class Draw:
    """A program that grows.

    Attributes:
        rng: where chance comes from.
        length: how many operators it should have.
        made: values, as tensors of a graph that grows with the program.
        sources, steps: what they are, in the order in which they were made.
        order: for each value ("source" or "step", place there).
    """

    rng: random.Random
    length: int
    made: list[Tensor] = field(default_factory=list)
    kinds: list[Source | Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = self.rng
        self.graph = cs.new_kernel_graph()
        self.dtype = rng.choices(FLOATS, (4, 3, 3))[0]
        self.mixed = rng.random() < 0.15
        self.scaled = rng.random() < 0.3
        self.symbolic = rng.random() < 0.2
        self.hint = rng.choice((1, 7, 8, 16, 33, 64))
        aligned = rng.random() < 0.7  # bulk loads take multiples of 8
        self.pool = rng.sample(ALIGNED if aligned else EXTENTS, 3)
        rank = rng.choices((1, 2, 3), (1, 6, 3))[0]
        self.shape: tuple[Any, ...] = tuple(rng.choice(self.pool) for _ in range(rank))
        if self.symbolic:
            self.shape = (ROWS, *self.shape[1:])
        if self.size(self.shape) > ELEMENTS:
            self.shape = (*self.shape[:1], *(min(n, 16) for n in self.shape[1:]))
        if rng.random() < 0.9:
            self.source(self.shape)

    # ---------------------------------------------------------------------------------- values

    def size(self, shape: Any) -> int:
        """Elements of a shape."""
        return prod(self.hint if isinstance(d, str) else extent(d) for d in shape)

    def source(self, shape: Any, kind: str | None = None, dtype: str | None = None,
               limit: int = 0) -> int:  # fmt: skip
        """A new input."""
        rng = self.rng
        shape = tuple(ROWS if isinstance(d, Symbol) else d for d in shape)
        mixed = self.mixed and rng.random() < 0.3
        dtype = dtype or (rng.choice(FLOATS) if mixed else self.dtype)
        drawn = "normal" if rng.random() < 0.8 else rng.choice(KINDS)
        exponent = rng.randint(-12, 12) if self.scaled and rng.random() < 0.4 else 0
        layout = rng.choices(("dense", "strided", "transposed"), (8, 1, 1))[0]
        s = Source(shape, dtype, kind or drawn, 0 if kind else exponent, limit, layout)
        return self._keep(s, new_input(self.graph, s, self.hint, f"x{len(self.made)}"))

    def step(self, operator: str, *operands: int | float, **attributes: Any) -> int:
        """A new value. Raises CutesuperError where the graph refuses it."""
        s = Step(operator, operands, attributes)
        return self._keep(s, apply(self.graph, s, self.made))

    def value(self, rank: int = 1) -> int:
        """A value of numbers with so many dimensions at least, rather a late one."""
        fits = [i for i, t in enumerate(self.made) if len(t.shape) >= rank and not t.dtype.integer]
        if not fits or self.rng.random() < 0.05:
            shape = (
                self.shape
                if len(self.shape) >= rank
                else (
                    *(self.rng.choice((1, 2, 3)) for _ in range(rank - len(self.shape))),
                    *self.shape,
                )
            )
            if ROWS in shape[1:]:
                shape = tuple(8 if d == ROWS else d for d in shape)
            return self.source(shape)
        late = fits[-1 - min(int(self.rng.expovariate(0.9)), len(fits) - 1)]
        return late

    def dims(self, i: int) -> tuple[Any, ...]:
        """The shape of a value."""
        return self.made[i].shape

    def type(self, i: int) -> str:
        """The element type of a value."""
        return self.made[i].dtype.name

    def _keep(self, what: Source | Step, t: Tensor) -> int:
        self.made.append(t)
        self.kinds.append(what)
        return len(self.made) - 1

    # --------------------------------------------------------------------------------- growing

    def grow(self) -> None:
        """One more operator, with what it needs; nothing where the graph refuses it."""
        usual = self.rng.random() < 0.65
        names = USUAL if usual else sorted(set(TABLE) - {"input", "constant"})
        before = len(self.made)
        try:
            if self.rng.random() < 0.06:
                self.rng.choice(PATTERNS)(self)
            else:
                op = TABLE[self.rng.choice(names)]
                RECIPES.get(op.name, by_signature)(self, op)
        except CutesuperError:
            return
        if any(self.size(t.shape) > 4 * ELEMENTS for t in self.made[before:]):
            self._forget(before)

    def _forget(self, before: int) -> None:
        del self.made[before:], self.kinds[before:]
        self.graph = cs.new_kernel_graph()
        self.made = self._again()

    def _again(self) -> list[Tensor]:
        made: list[Tensor] = []
        for k, what in enumerate(self.kinds):
            made.append(
                new_input(self.graph, what, self.hint, f"x{k}")
                if isinstance(what, Source)
                else apply(self.graph, what, made)
            )
        return made

    def case(self) -> Case:
        """The program, when it is long enough."""
        tries = 0
        while sum(isinstance(k, Step) for k in self.kinds) < self.length and tries < 60:
            self.grow()
            tries += 1
        if not any(isinstance(k, Step) for k in self.kinds):
            self.step("square", self.value())
        return self._finished().pruned()

    def _finished(self) -> Case:
        rng = self.rng
        order = sorted(range(len(self.kinds)), key=lambda i: isinstance(self.kinds[i], Step))
        new = {old: i for i, old in enumerate(order)}
        sources = tuple(k for k in self.kinds if isinstance(k, Source))
        steps = tuple(_renumbered(k, new) for k in self.kinds if isinstance(k, Step))
        n = len(sources)
        used = {o for s in steps for o in s.operands if isinstance(o, int)}
        ends = [n + i for i in range(len(steps)) if n + i not in used]
        ends = ends[-3:]
        ends += [i for i in range(n, n + len(steps)) if i in used and rng.random() < 0.05]
        put = [n + i for i, s in enumerate(steps) if s.operator == "put_rows"]
        ends += [i for i in put if i in used and i not in ends]
        places = [n + i for i, s in enumerate(steps) if s.operator == "argmax"]
        outputs = tuple(
            (i, rng.choice(FLOATS) if rng.random() < 0.15 and i not in (*put, *places) else None)
            for i in ends
        )
        wrt = None
        if rng.random() < 0.15:
            case = Case(sources, steps, outputs).pruned()
            numbers = [i for i, s in enumerate(case.sources) if s.limit == 0]
            wrt = tuple(sorted(rng.sample(numbers, rng.randint(1, min(2, len(numbers))))))
            return Case(
                case.sources, case.steps, case.outputs, rng.randrange(1 << 30), self._rows(), wrt
            )
        return Case(sources, steps, outputs, rng.randrange(1 << 30), self._rows(), wrt)

    def _rows(self) -> tuple[int, int]:
        return self.hint, self.rng.choice((1, 2, 5, 8, 13, 16, 33, 70))


def _renumbered(step: Step, new: dict[int, int]) -> Step:
    operands = tuple(new[o] if isinstance(o, int) else o for o in step.operands)
    return Step(step.operator, operands, step.attributes)


# -------------------------------------------------------------------------------------- recipes

Recipe = Callable[[Draw, Operator], Any]
RECIPES: dict[str, Recipe] = {}


def recipe(*names: str) -> Callable[[Recipe], Recipe]:
    """Enter a recipe for some operators."""

    def enter(f: Recipe) -> Recipe:
        RECIPES.update(dict.fromkeys(names, f))
        return f

    return enter


def by_signature(d: Draw, op: Operator) -> None:
    """An operator of which nothing but its signature is known."""
    if op.elementwise and not op.integers and op.arity > 0:
        return _elementwise(d, op)
    if "dim" in op.attributes and op.arity == 1 and not op.integers:
        return _along(d, op)
    return _tried(d, op)


def _elementwise(d: Draw, op: Operator) -> None:
    first = prepared(d, op.name, d.value())
    others = [_partner(d, first) for _ in range(op.arity - 1)]
    operands = [first, *others]
    if d.rng.random() < 0.5:
        operands.reverse()
    d.step(op.name, *operands, **_guessed(d, op, d.dims(first)))


def prepared(d: Draw, name: str, i: int) -> int:
    """A value in the domain of a function, but for one time in ten."""
    if d.rng.random() < 0.1:
        return i
    for operator, number in DOMAINS.get(name, ()):
        i = d.step(operator, i) if number is None else d.step(operator, i, number)
    return i


def _partner(d: Draw, i: int) -> int | float:
    """A value that broadcasts with this one: another one, a constant, or a new input."""
    rng, shape = d.rng, d.dims(i)
    fits = [
        j
        for j, t in enumerate(d.made)
        if j != i and not t.dtype.integer and cs_broadcast(shape, t.shape)
    ]
    if fits and rng.random() < 0.6:
        return rng.choice(fits)
    if rng.random() < 0.3:
        return rng.choice((0.0, 1.0, -1.0, 0.5, 2.0, 0.1, -3.0, 1e-3, 100.0))
    narrow = tuple(1 if k > 0 and rng.random() < 0.3 else n for k, n in enumerate(shape))
    return d.source(rng.choice((shape, narrow, shape[-1:] if len(shape) > 1 else shape)))


def cs_broadcast(a: Any, b: Any) -> bool:
    """True if shapes broadcast."""
    pairs = zip(reversed(a), reversed(b), strict=False)
    return all(m == n or 1 in (m, n) for m, n in pairs)


def _along(d: Draw, op: Operator) -> None:
    i = d.value()
    dim = -1 if d.rng.random() < 0.6 else d.rng.randrange(len(d.dims(i)))
    d.step(op.name, i, **{**_guessed(d, op, d.dims(i)), "dim": dim})


def _guessed(d: Draw, op: Operator, shape: Any) -> dict[str, Any]:
    """Attributes that an operator has to be given."""
    needed = [k for k, v in op.attributes.items() if v is ...]
    guesses = {"dim": d.rng.randrange(max(1, len(shape)))}
    return {k: guesses.get(k, round(d.rng.uniform(-2, 2), 2)) for k in needed}


def _tried(d: Draw, op: Operator) -> None:
    """Operands that the shape rule accepts, found by trying."""
    for _ in range(20):
        arity = op.arity if op.arity >= 0 else d.rng.randint(1, 4)
        shape = d.dims(d.value())
        labels = d.rng.choice((shape[: d.rng.randint(1, len(shape))], (*shape[:-1], 1)))
        operands = [
            d.source(labels, "labels", op.integer_types[0].name, 2)
            if k in op.integers
            else d.source(shape)
            if k in op.of_inputs
            else d.value()
            for k in range(arity)
        ]
        try:
            d.step(op.name, *operands, **_guessed(d, op, shape))
            return
        except CutesuperError:
            continue


@recipe("div")
def _div(d: Draw, op: Operator) -> None:
    i = d.value()
    j = _partner(d, i)
    if isinstance(j, float):
        d.step("div", i, j or 2.0)
        return
    if d.rng.random() < 0.9:
        j = d.step("add", d.step("square", j), 0.5)
    d.step("div", i, j)


@recipe("clamp", "hardtanh")
def _clamp(d: Draw, op: Operator) -> None:
    low, high = sorted(d.rng.choice((-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 3.0)) for _ in range(2))
    d.step(op.name, d.value(), min=low, max=high)


@recipe("convert")
def _convert(d: Draw, op: Operator) -> None:
    d.step("convert", d.value(), dtype=d.rng.choice(("float16", "bfloat16", "float32")))


@recipe("keep", "hide", "lift")
def _choice(d: Draw, op: Operator) -> None:
    i = d.value()
    shape = d.dims(i)
    narrow = tuple(1 if k > 0 and d.rng.random() < 0.2 else n for k, n in enumerate(shape))
    way = d.rng.random()
    if way < 0.5:
        c = d.source(narrow, "binary", d.type(i))
    else:
        c = d.step("at_least", d.value() if way < 0.6 else d.source(narrow), 0.0)
    y = d.step(op.name, c, i)
    if op.name == "hide" and d.rng.random() < 0.8:
        d.step(d.rng.choice(("softmax", "logsumexp", "max")), y, dim=-1)


@recipe("matmul")
def _matmul(d: Draw, op: Operator) -> None:
    rng = d.rng
    a = d.value(2)
    shape = d.dims(a)
    fits = [
        j
        for j, t in enumerate(d.made)
        if len(t.shape) >= 2
        and t.dtype.name == d.type(a)
        and t.shape[-2] == shape[-1]
        and cs_broadcast(shape[:-2], t.shape[:-2])
    ]
    if fits and rng.random() < 0.3:
        d.step("matmul", a, rng.choice(fits))
        return
    same = [
        j
        for j, t in enumerate(d.made)
        if len(t.shape) >= 2
        and t.dtype.name == d.type(a)
        and t.shape[-1] == shape[-1]
        and cs_broadcast(shape[:-2], t.shape[:-2])
        and not isinstance(t.shape[-2], Symbol)
    ]
    if same and rng.random() < 0.2:
        d.step("matmul", a, d.step("transpose", rng.choice(same), dims=None))
        return
    n = rng.choice((*d.pool, rng.choice(ALIGNED)))
    lead = shape[:-2] if rng.random() < 0.4 else ()
    if d.size(shape) * n > PRODUCTS:
        return
    turned = rng.random() < 0.2 and not any(isinstance(x, Symbol) for x in shape[-1:])
    inner = (n, shape[-1]) if turned else (shape[-1], n)
    w = d.source((*lead, *inner), dtype=d.type(a))
    d.step("matmul", a, d.step("transpose", w, dims=None) if turned else w)


@recipe("transpose")
def _transpose(d: Draw, op: Operator) -> None:
    i = d.value(2)
    order = list(range(len(d.dims(i))))
    d.rng.shuffle(order)
    d.step("transpose", i, dims=None if d.rng.random() < 0.5 else tuple(order))


@recipe("amax")
def _amax(d: Draw, op: Operator) -> None:
    i = d.value()
    dims = list(range(len(d.dims(i))))
    d.rng.shuffle(dims)
    d.step("amax", i, dims=tuple(dims[: d.rng.randint(1, len(dims))]))


@recipe("concat")
def _concat(d: Draw, op: Operator) -> None:
    rng = d.rng
    i = d.value()
    shape = d.dims(i)
    dim = len(shape) - 1 if rng.random() < 0.7 else rng.randrange(len(shape))
    parts = [i]
    for _ in range(rng.randint(1, 2)):
        other = (*shape[:dim], rng.choice((*d.pool, shape[dim])), *shape[dim + 1 :])
        fits = [j for j, t in enumerate(d.made) if t.shape == other and t.dtype.name == d.type(i)]
        parts.append(rng.choice(fits) if fits else d.source(other, dtype=d.type(i)))
    rng.shuffle(parts)
    y = d.step("concat", *parts, dim=dim)
    if rng.random() < 0.3:  # as it is, an output or for any operator
        return
    if len(shape) > 1 and d.type(i) != "float32" and rng.random() < 0.6:
        d.step("matmul", y, d.source((d.dims(y)[-1], rng.choice(d.pool)), dtype=d.type(i)))
    else:
        d.step(rng.choice(("sum", "mean", "max")), y, dim=dim)


@recipe("slice")
def _slice(d: Draw, op: Operator) -> None:
    i = d.value()
    dim = d.rng.randrange(len(d.dims(i)))
    n = d.dims(i)[dim]
    if isinstance(n, Symbol):
        return
    start = d.rng.randrange(n) if d.rng.random() < 0.7 else 0
    d.step("slice", i, dim=dim, start=start, stop=d.rng.randint(start + 1, n))


@recipe("rotate_half", "rotate_pairs")
def _rotate(d: Draw, op: Operator) -> None:
    i = d.value(1)
    last = d.dims(i)[-1]
    if not isinstance(last, Symbol) and last % 2 == 0:
        d.step(op.name, i)


@recipe("cumsum")
def _cumsum(d: Draw, op: Operator) -> None:
    i = d.value(1)
    if not isinstance(d.dims(i)[-1], Symbol):
        d.step("cumsum", i, reverse=d.rng.random() < 0.4)


@recipe("causal_mask")
def _causal_mask(d: Draw, op: Operator) -> None:
    i = d.value(2)
    y = d.step("causal_mask", i, alignment=d.rng.choice(("top_left", "bottom_right")))
    if d.rng.random() < 0.8:
        d.step(d.rng.choice(("softmax", "logsumexp", "max")), y, dim=-1)


@recipe("length_mask")
def _length_mask(d: Draw, op: Operator) -> None:
    i = d.value(3)
    shape = d.dims(i)
    k = d.rng.randint(1, len(shape) - 2)
    lengths = d.source(shape[:k], "lengths", "int32", extent(shape[-1]))
    y = d.step("length_mask", i, lengths, causal=d.rng.random() < 0.4)
    if d.rng.random() < 0.8:
        d.step("softmax", y, dim=-1)


@recipe("limit_mask")
def _limit_mask(d: Draw, op: Operator) -> None:
    y = _limited(d, d.value(2))
    if d.rng.random() < 0.8:
        d.step("softmax", y, dim=-1)


def _limited(d: Draw, i: int) -> int:
    """Scores with a limit of sequences, or of rows."""
    rng, shape = d.rng, d.dims(i)
    columns, lower, leading = extent(shape[-1]), rng.random() < 0.5, len(shape) - 2
    if leading and rng.random() < 0.5:
        limits = d.source(shape[: rng.randint(1, leading)], "limits", "int32", columns)
        return d.step("limit_mask", i, limits, lower=lower, causal=rng.random() < 0.4)
    lead = (rng.choice((1, n)) for n in shape[:-2])
    limits = d.source((*lead, shape[-2], 1), "rising", "int32", columns)
    return d.step("limit_mask", i, limits, lower=lower, causal=False)


@recipe("take_rows")
def _take_rows(d: Draw, op: Operator) -> None:
    rng = d.rng
    rows, rest = rng.randint(2, 40), [rng.choice(d.pool) for _ in range(rng.choice((1, 1, 2)))]
    shape = tuple(rng.choice((1, 3, 8)) for _ in range(rng.choice((1, 1, 2))))
    table, index = (
        d.source((rows, *rest)),
        d.source(shape, "rows", rng.choice(("int64", "int32")), rows),
    )
    d.step("take_rows", table, index)


@recipe("put_rows")
def _put_rows(d: Draw, op: Operator) -> None:
    """Rows for places along a dimension of theirs, and at times of one behind it that they lack."""
    rng, i = d.rng, d.value()
    rows, dtype = d.dims(i), d.made[i].dtype.name
    dim = rng.randrange(len(rows))
    shape = list(rows)
    shape[dim] = (d.hint if isinstance(rows[dim], Symbol) else rows[dim]) + rng.randint(0, 9)
    dims = (dim,)
    if rng.random() < 0.4:
        dims = dim, rng.randint(dim + 1, len(rows))
        shape.insert(dims[1], rng.randint(1, 20))
    base = d.source(tuple(shape), dtype=dtype)
    indices = [
        d.source((rows[dim],), "places", rng.choice(("int64", "int32")), shape[n]) for n in dims
    ]
    d.step("put_rows", base, *indices, i, dim=dims if len(dims) > 1 else dim)


@recipe("gather_pages")
def _gather_pages(d: Draw, op: Operator) -> None:
    rng = d.rng
    page, pages, n, b = (
        rng.choice((4, 8, 16)),
        rng.randint(3, 9),
        rng.randint(1, 3),
        rng.choice((1, 2, 3)),
    )
    cache = d.source((pages, page, rng.choice(d.pool)))
    table = d.source((b, n), "table", "int32", pages)
    y = d.step("gather_pages", cache, table)
    if rng.random() < 0.6 and d.type(cache) != "float32":
        q = d.source((b, rng.choice((1, 3, 16)), d.dims(y)[-1]), dtype=d.type(cache))
        lengths = d.source((b,), "lengths", "int32", page * n)
        d.step(
            "scaled_dot_product_attention",
            q,
            y,
            y,
            lengths,
            is_causal=rng.random() < 0.4,
            scale=None,
        )
    else:
        d.step(rng.choice(("square", "silu")), y)


@recipe("pick", "cross_entropy")
def _labelled(d: Draw, op: Operator) -> None:
    i = d.value(2)
    shape = d.dims(i)
    dtype = d.rng.choice(("int64", "int32"))
    labels = d.source((*shape[:-1], 1), "labels", dtype, extent(shape[-1]))
    y = d.step(op.name, i, labels)
    if op.name == "pick" and d.rng.random() < 0.6:
        d.step("sum", y, dim=-1)


@recipe("label_weight")
def _label_weight(d: Draw, op: Operator) -> None:
    i = d.value(2)
    shape = d.dims(i)
    classes = d.rng.choice((1, 3, 10))
    labels = d.source((*shape[:-1], 1), "labels", "int64", classes)
    d.step("mul", i, d.step("label_weight", labels, classes=classes))


@recipe("rms_norm", "layer_norm")
def _norm(d: Draw, op: Operator) -> None:
    i = d.value()
    n = d.dims(i)[-1]
    if isinstance(n, Symbol):
        return
    most = 1 if op.name == "rms_norm" else 2
    more = [d.source((n,), "positive") for _ in range(d.rng.randint(0, most))]
    d.step(op.name, i, *more, eps=d.rng.choice((1e-6, 1e-5, 1e-3, 0.0)))


@recipe("leaky_relu")
def _leaky_relu(d: Draw, op: Operator) -> None:
    d.step("leaky_relu", d.value(), negative_slope=d.rng.choice((0.0, 0.01, 0.25, 2.0, -1.0)))


@recipe("power")
def _power(d: Draw, op: Operator) -> None:
    exponent = d.rng.choice((-3.0, -2.0, -1.5, -0.75, 0.25, 0.75, 1.5, 2.5))
    d.step("power", prepared(d, "power", d.value()), exponent=exponent)


@recipe("root", "special_entr", "logit")
def _prepared(d: Draw, op: Operator) -> None:
    d.step(op.name, prepared(d, op.name, d.value()))


@recipe("softmax", "log_softmax", "logsumexp")
def _softmax(d: Draw, op: Operator) -> None:
    _along(d, op)


@recipe("scaled_dot_product_attention")
def _attention(d: Draw, op: Operator) -> None:
    rng = d.rng
    lead = rng.choice(((), (1,), (2,), (3, 2), (2, 2, 3)))
    shared = (*lead[:-1], 1) if len(lead) > 1 and rng.random() < 0.4 else lead
    m, s, k = (rng.choice(p) for p in ((1, 3, 16, 33, 64, 100), EXTENTS, HEADS))
    e = k if rng.random() < 0.7 else rng.choice(HEADS)
    q = d.source((*lead, m, k), "normal")
    dtype = d.type(q)
    if dtype == "float32" and rng.random() < 0.8:
        return
    key, value = (d.source((*shared, s, n), "normal", dtype) for n in (k, e))
    operands = [q, key, value]
    if lead and rng.random() < 0.4:
        operands.append(d.source(lead[:1], "lengths", "int32", s))
    scale = rng.choice((None, None, 0.1, 1.0))
    d.step("scaled_dot_product_attention", *operands, is_causal=rng.random() < 0.4, scale=scale)


# ------------------------------------------------------------------------------------- patterns


def attention_by_hand(d: Draw) -> None:
    """Products, a scale, a mask of any kind, softmax in one or several operators."""
    rng = d.rng
    lead = rng.choice(((), (2,), (2, 3)))
    m, s, k = (rng.choice(x) for x in ((1, 8, 16, 33, 64), ALIGNED, HEADS))
    dtype = d.dtype if d.dtype != "float32" else "bfloat16"
    q = d.source((*lead, m, k), "normal", dtype)
    key, value = (d.source((*lead, s, k), "normal", dtype) for _ in range(2))
    scores = d.step("matmul", q, d.step("transpose", key, dims=None))
    scores = d.step("mul", scores, round(k**-0.5, 3))
    way = rng.choice(("none", "causal", "lengths", "limits", "hide", "bias", "keep"))
    if way == "causal":
        alignment = rng.choice(("top_left", "bottom_right") if m <= s else ("top_left",))
        scores = d.step("causal_mask", scores, alignment=alignment)
    elif way == "lengths" and lead:
        lengths = d.source(lead[:1], "lengths", "int32", s)
        scores = d.step("length_mask", scores, lengths, causal=rng.random() < 0.4)
    elif way == "limits":
        scores = _limited(d, scores)
        scores = _limited(d, scores) if rng.random() < 0.3 else scores
    elif way in ("hide", "keep"):
        scores = d.step(way, d.source((m, s), "binary", dtype), scores)
    elif way == "bias":
        scores = d.step("add", scores, d.source(rng.choice(((m, s), (s,))), "normal", dtype))
    d.step(
        "matmul",
        softmax_by_hand(d, scores) if rng.random() < 0.5 else d.step("softmax", scores, dim=-1),
        value,
    )


def softmax_by_hand(d: Draw, x: int) -> int:
    """A softmax with the maximum or, of small scores, without."""
    e = d.step("exp", d.step("sub", x, d.step("max", x, dim=-1)) if d.rng.random() < 0.8 else x)
    return d.step("div", e, d.step("sum", e, dim=-1))


def norm_by_hand(d: Draw) -> None:
    """Mean of squares, root, quotient; a product behind it now and then."""
    x = d.value(2)
    mean = d.step("mean", d.step("square", x), dim=-1)
    scale = d.step("rsqrt", d.step("add", mean, 1e-3))
    y = d.step("mul", x, scale)
    if d.type(y) != "float32" and d.rng.random() < 0.6:
        n = d.rng.choice(ALIGNED)
        d.step("matmul", y, d.source((d.dims(y)[-1], n), dtype=d.type(y)))


def gated(d: Draw) -> None:
    """Two products of one value, a gate, a third product."""
    x = d.value(2)
    if d.type(x) == "float32":
        return
    n = d.rng.choice(ALIGNED)
    a, b = (d.step("matmul", x, d.source((d.dims(x)[-1], n), dtype=d.type(x))) for _ in range(2))
    y = d.step("mul", d.step(d.rng.choice(("silu", "gelu", "relu")), a), b)
    if d.rng.random() < 0.6:
        y = d.step("matmul", y, d.source((n, d.dims(x)[-1]), dtype=d.type(x)))
        if d.rng.random() < 0.5:
            d.step("add", y, x)


PATTERNS = (attention_by_hand, norm_by_hand, gated)
