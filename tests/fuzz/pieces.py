"""The third front: programs around one concatenation, of few small tensors.

`tests.fuzz.draw` draws any operators; here every program puts 2 to 4 pieces together, and chance
goes over what there is about that: extents of 1, odd ones, any dimension, also next to an extent of
1, what the pieces are (inputs, computed values, the same tensor twice, slices of another
concatenation), what reads the whole, and which of all these values are outputs or have gradients.
Of three programs one is a function of PyTorch, with views, mixed element types and empty pieces.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import cutesuper as cs
from cutesuper.errors import CutesuperError
from cutesuper.ir.operators.base import TABLE
from tests.fuzz.draw import FLOATS, RECIPES, Draw
from tests.fuzz.functions import ALONG, NORMS, PAIRS, SMOOTH, DrawFunction, Function
from tests.fuzz.programs import Case

#: extents of pieces, and of the other dimensions
EXTENTS = (1, 1, 2, 3, 4, 5, 8, 16)
UNARY = ("silu", "tanh", "atan", "square", "relu", "exp", "sigmoid", "round", "sin")
BINARY = ("add", "sub", "mul", "maximum", "at_least", "keep")
REDUCTIONS = ("sum", "mean", "max", "argmax", "prod", "softmax", "logsumexp", "log_softmax")
OF_ROWS = ("rms_norm", "layer_norm", "cumsum", "rotate_half")
#: every so manieth program is a function
FUNCTIONS = 3


def draw_pieces(seed: int, index: int) -> Case | Function:
    """The program ``index`` of a seed."""
    rng = random.Random(f"{seed}:{index}:pieces")
    if index % FUNCTIONS == FUNCTIONS - 1:
        return _DrawFunction(rng).function()
    return _Draw(rng, rng.randint(1, 3)).case()


class _Draw(Draw):
    """A concatenation, and up to three operators with it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        rng = self.rng
        self.graph, self.made, self.kinds = cs.new_kernel_graph(), [], []
        self.mixed = self.scaled = self.symbolic = False
        self.pool = rng.sample(EXTENTS, 3)
        self.shape = tuple(
            rng.choice(EXTENTS) for _ in range(rng.choices((1, 2, 3, 4), (1, 5, 5, 1))[0])
        )

    def case(self) -> Case:
        """The program, with more outputs than its last values."""
        self.joined()
        for _ in range(self.length):
            self.grow()
        case = self._finished()
        own = len(case.sources)
        more = [i for i in range(own, own + len(case.steps)) if self.rng.random() < 0.25]
        known = {i for i, _ in case.outputs}
        taken = [(i, self.rng.choice((None, *FLOATS))) for i in more if i not in known]
        integers = {own + k for k, s in enumerate(case.steps) if s.operator == "argmax"}
        outputs = (*case.outputs, *((i, None if i in integers else d) for i, d in taken))
        return Case(case.sources, case.steps, outputs, case.seed, case.rows, case.wrt).pruned()

    def joined(self, shape: Any = None, dim: int | None = None) -> int:
        """Pieces put together; of the others extents as they are given."""
        rng = self.rng
        shape = self.shape if shape is None else shape
        dim = rng.randrange(len(shape)) if dim is None else dim
        pieces = [self.piece(shape, dim) for _ in range(rng.randint(2, 4))]
        if rng.random() < 0.25:
            pieces[-1] = pieces[0]
        return self.step("concat", *pieces, dim=dim - len(shape) * (rng.random() < 0.5))

    def piece(self, shape: Any, dim: int) -> int:
        """One piece."""
        rng, n = self.rng, self.rng.choice(EXTENTS)
        own = (*shape[:dim], n, *shape[dim + 1 :])
        way = rng.random()
        if way < 0.5:
            return self.source(own)
        if way < 0.75:
            return self.step(rng.choice(UNARY), self.source(own))
        if way < 0.8:
            return self.step("mul", self.source(own), 0.0)
        if way < 0.9 and len(own) > 1:
            k = rng.choice(EXTENTS)
            a, b = self.source((*own[:-1], k)), self.source((*own[:-2], k, own[-1]))
            return self.step("matmul", a, b)
        first = rng.randint(1, n)
        parts = [self.source((*own[:dim], k, *own[dim + 1 :])) for k in (first, n)]
        start = rng.randint(0, first)
        return self.step(
            "slice", self.step("concat", *parts, dim=dim), dim=dim, start=start, stop=start + n
        )

    def grow(self) -> None:
        """One more operator on the latest values."""
        try:
            self.rng.choice(CONSUMERS)(self)
        except CutesuperError:
            return


def _unary(d: _Draw) -> None:
    d.step(d.rng.choice(UNARY), d.value())


def _binary(d: _Draw) -> None:
    i, rng = d.value(), d.rng
    shape = d.dims(i)
    kept = tuple(n if rng.random() < 0.6 else 1 for n in shape)[
        rng.randint(0, 1) * (len(shape) > 1) :
    ]
    other: int | float = rng.choice((2.0, 0.0, d.source(kept)))
    if rng.random() < 0.3:
        other = d.joined(shape, rng.randrange(len(shape)))
    pair = [i, other] if rng.random() < 0.5 else [other, i]
    d.step(rng.choice(BINARY), *pair)


def _of_rows(d: _Draw) -> None:
    d.step(d.rng.choice(OF_ROWS), d.value())


def _reduced(d: _Draw) -> None:
    i = d.value()
    operator = d.rng.choice(REDUCTIONS)
    d.step(operator, i, dim=d.rng.randrange(-len(d.dims(i)), len(d.dims(i))))


def _product(d: _Draw) -> None:
    i, rng = d.value(2), d.rng
    shape, n = d.dims(i), d.rng.choice(EXTENTS)
    lead = shape[:-2] if rng.random() < 0.5 else ()
    way = rng.random()
    if way < 0.4:
        d.step("matmul", i, d.source((*lead, shape[-1], n)))
    elif way < 0.7:
        d.step("matmul", d.source((*shape[:-2], n, shape[-2])), i)
    elif way < 0.85:
        d.step("matmul", i, d.joined((shape[-1], n), 1))
    else:
        d.step("matmul", i, d.step("transpose", i, dims=None))


def _attention(d: _Draw) -> None:
    i, rng = d.value(3), d.rng
    shape = d.dims(i)
    other = (*shape[:-2], rng.choice(EXTENTS), shape[-1])
    q, k, v = rng.choice(((i, i, i), (i, d.source(other), None), (d.source(other), i, i)))
    v = d.source(other) if v is None else v
    d.step("scaled_dot_product_attention", q, k, v, is_causal=rng.random() < 0.3, scale=0.5)


def _again(d: _Draw) -> None:
    i = d.value()
    shape, dim = d.dims(i), d.rng.randrange(len(d.dims(i)))
    parts = [i, d.piece(shape, dim)]
    d.rng.shuffle(parts)
    d.step("concat", *parts, dim=dim)


def _by_recipe(*names: str) -> Callable[[_Draw], None]:
    def grow(d: _Draw) -> None:
        name = d.rng.choice(names)
        RECIPES[name](d, TABLE[name])

    return grow


def _any(d: _Draw) -> None:
    Draw.grow(d)


CONSUMERS: tuple[Callable[[_Draw], None], ...] = (
    _unary, _unary, _binary, _binary, _reduced, _reduced, _reduced, _of_rows, _product, _product,
    _attention, _again, _by_recipe("slice"), _by_recipe("transpose"), _by_recipe("keep", "convert"),
    _any,
)  # fmt: skip


# ------------------------------------------------------------------------------------ functions

#: how pieces meet; {0} and {1} are of one shape but for DIM
TOGETHER = ("torch.cat([{0}, {1}], DIM)", "torch.cat([{0}, {1}, {0}], DIM)",
            "torch.cat([{1} * 2, {0}], DIM)", "torch.cat([{0}, {0} + 1, {1}], DIM)",
            "torch.cat([{0}, {1}[:0], {0}], 0)", "torch.cat([{0}, torch.zeros_like({1})], DIM)",
            "torch.stack([{0}, {0}.relu()], DIM)", "torch.hstack([{0}, {1}])",
            "torch.cat([{0}.mean(-1, keepdim=True), {1}], -1)",
            "torch.cat([{0}.to(F32), {1}], DIM)", "torch.cat([{0}, {1}.to(F16)], DIM)",
            "torch.cat([torch.cat([{0}, {1}], DIM), {0}], 0)")  # fmt: skip
VIEWS = ("{0}.flatten(0, 1)", "{0}.flatten()", "{0}.flatten(-2, -1)", "{0}.mT",
         "{0}.chunk(2, -1)[1]",
         "{0}.unflatten(-1, (2, -1))", "{0}.unflatten(0, (-1, 2))", "{0}.unsqueeze(1)",
         "{0}.split(3, -1)[0]", "{0}[..., 1:]", "{0}[1:]", "{0}.movedim(0, -1)",
         "{0}.reshape(-1, 4)", "{0}.reshape(2, -1)", "{0}.argmax(DIM)",
         "{0}.max(DIM).values", "{0}.amax((0, 1))", "{0} @ {0}.mT",
         "F.scaled_dot_product_attention({0}, {0}, {0})")  # fmt: skip


class _DrawFunction(DrawFunction):
    """A function around one concatenation."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        rank = rng.choices((1, 2, 3), (1, 4, 4))[0]
        self.sources, self.order, self.lines, self.values = [], [], [], []
        self.dynamic = False
        self.shape = tuple(rng.choice(EXTENTS) for _ in range(rank))
        dim = rng.randrange(-rank, rank)
        other = list(self.shape)
        other[dim] = rng.choice(EXTENTS)
        pair = self.source(self.shape), self.source(tuple(other))
        for _ in range(20):
            if self.line(rng.choice(TOGETHER).replace("DIM", str(dim)), pair):
                break

    def grow(self) -> None:
        """One more line on the latest values."""
        rng = self.rng
        x = len(self.values) - 1
        shape = self.shape_of(x)
        dim = rng.choice((-1, 0, 1, -2))
        kind = rng.choice(("smooth", "pair", "view", "view", "along", "along", "norm", "linear"))
        if kind == "pair":
            kept = tuple(n if rng.random() < 0.6 else 1 for n in shape)
            self.line(rng.choice(PAIRS), (x, self.source(kept or (1,))))
        elif kind == "linear":
            self.with_arguments(kind, x, shape)
        else:
            text = rng.choice(
                {"smooth": SMOOTH, "view": VIEWS, "along": ALONG, "norm": NORMS}[kind]
            )
            self.line(text.replace("DIM", str(dim)), (x,))
