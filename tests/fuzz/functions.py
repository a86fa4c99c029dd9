"""The second front: random functions of PyTorch, traced, searched and run.

A function is a list of expressions over earlier values, as text, so that a finding can be printed
as code. PyTorch itself says whether an expression is valid, and what it should give: in float64
exactly, and in float64 with noise after each operator, which shows what errors are usual. Functions
do not compare or round what is computed, only what is given: there PyTorch and a right kernel may
be on different sides of a threshold.
"""

from __future__ import annotations

import json
import linecache
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._decomp import get_decompositions
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import cutesuper as cs
from cutesuper import pipeline
from cutesuper.autodiff.gradient import reached, split
from cutesuper.ir.graph import KernelGraph
from cutesuper.runtime.checks import Signature
from cutesuper.runtime.gradient import Gradient, recorded
from cutesuper.runtime.kernel import bucketed
from cutesuper.torch.compile import trace
from tests.fuzz import judge
from tests.fuzz.arithmetic import Ball, reach, unit
from tests.fuzz.blocks import at_rows, execute_rounded
from tests.fuzz.check import MAKING, Refused, Settings, Stage, Wrong, examined, held
from tests.fuzz.data import elements
from tests.fuzz.judge import Expected
from tests.fuzz.outcome import Outcome
from tests.fuzz.programs import ROWS, Source

ELEMENTS = 1 << 15
NOISY = 5


@dataclass(frozen=True)
class Line:
    """``text`` with the names of its operands in the places {0}, {1}, .."""

    text: str
    operands: tuple[int, ...]


@dataclass(frozen=True)
class Function:
    """A function of PyTorch and its arguments.

    Attributes:
        sources: the arguments; the first extent may be dynamic.
        lines: values computed, in order.
        outputs: numbers of values that it returns.
        seed: of the arguments' elements.
        rows: the dynamic extent when it is traced, and when it is called again.
    """

    sources: tuple[Source, ...]
    lines: tuple[Line, ...]
    outputs: tuple[int, ...]
    seed: int = 0
    rows: tuple[int, int] = (16, 16)

    @property
    def dynamic(self) -> bool:
        """An extent may differ from call to call."""
        return any(ROWS in s.shape for s in self.sources)

    @property
    def operators(self) -> set[str]:
        """Nothing: these are operators of PyTorch."""
        return set()

    @property
    def parts(self) -> list[str]:
        """The operators that it is made of."""
        return sorted({x.text for x in self.lines})

    def pruned(self) -> Function:
        """Without what no output needs."""
        needed, n = set(self.outputs), len(self.sources)
        for k in reversed(range(len(self.lines))):
            if n + k in needed:
                needed |= set(self.lines[k].operands)
        new = {old: i for i, old in enumerate(sorted(needed))}
        return replace(
            self,
            sources=tuple(s for i, s in enumerate(self.sources) if i in needed),
            lines=tuple(replace(x, operands=tuple(new[o] for o in x.operands))
                        for k, x in enumerate(self.lines) if n + k in needed),
            outputs=tuple(new[i] for i in self.outputs),
        )  # fmt: skip

    def source_text(self) -> str:
        """The function as Python."""
        return self._text("{}")

    def _text(self, value: str) -> str:
        n = len(self.sources)
        lines = [f"def f({', '.join(f'v{i}' for i in range(n))}):"]
        for k, line in enumerate(self.lines, n):
            lines.append(f"    v{k} = {value.format(written(line, self.names()))}")
        return "\n".join([*lines, f"    return ({''.join(f'v{i}, ' for i in self.outputs)})"])

    def names(self) -> list[str]:
        """The names of all values."""
        return [f"v{i}" for i in range(len(self.sources) + len(self.lines))]

    def callable(
        self, exact: bool = False, each: Callable[[Tensor], Tensor] | None = None
    ) -> Callable[..., tuple[Tensor, ...]]:
        """The function; ``exact``: casts keep float64; ``each``: what becomes of every value."""
        text = self._text("each({})" if each else "{}") + "\n"
        name = "<fuzzed>"
        linecache.cache[name] = (len(text), None, text.splitlines(True), name)
        space = {"torch": torch, "F": F, "each": each, **types(exact)}
        exec(compile(text, name, "exec"), space)
        return space["f"]

    def arguments(self, rows: int) -> list[Tensor]:
        """Tensors to call it with, with strides as the sources have them."""
        return [laid_out(elements(s, rows, self.seed + k), s.layout)
                for k, s in enumerate(self.sources)]  # fmt: skip

    def dumps(self) -> str:
        """One line of JSON; `loads` reads it."""
        return json.dumps({"front": "torch", **asdict(self)})

    @staticmethod
    def loads(data: dict[str, Any]) -> Function:
        """Parse the text that `dumps` wrote."""
        return Function(
            tuple(Source(**{**s, "shape": tuple(s["shape"])}) for s in data["sources"]),
            tuple(Line(x["text"], tuple(x["operands"])) for x in data["lines"]),
            tuple(data["outputs"]), data["seed"], tuple(data["rows"]),
        )  # fmt: skip

    def code(self) -> str:
        """A script."""
        rows, more = self.rows[0], ""
        if self.dynamic:
            dims = [f'{{0: torch.export.Dim("{ROWS}")}}' if ROWS in s.shape else "None"
                    for s in self.sources]  # fmt: skip
            more = f", dynamic_shapes=({', '.join(dims)},)"
        shapes = [[rows if d == ROWS else d for d in s.shape] for s in self.sources]
        made = [f"    torch.randn({shape}).to(torch.{s.dtype}),"
                f"  # {s.kind}, times 2**{s.exponent}, {s.layout}"
                for s, shape in zip(self.sources, shapes, strict=True)]  # fmt: skip
        return "\n".join([
            "import torch", "import torch.nn.functional as F", "import cutesuper as cs", "",
            "F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16", "",
            self.source_text(), "", "inputs = [", *made, "]",
            f'program = cs.superoptimize(f, inputs, target="h200"{more})',
        ])  # fmt: skip


def types(exact: bool) -> dict[str, torch.dtype]:
    """The element types that names in the text of a function stand for."""
    names = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    return dict.fromkeys(names, torch.float64) if exact else names


def written(line: Line, names: list[str]) -> str:
    """The expression with the names of its operands."""
    return line.text.format(*(names[o] for o in line.operands))


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same numbers with other strides, and NaN where nothing may be read."""
    if layout == "transposed" and x.dim() > 1:
        return x.mT.contiguous().mT
    if layout == "strided":
        between = torch.nan if x.is_floating_point() else torch.iinfo(x.dtype).max
        wide = x.new_full((*x.shape[:-1], x.shape[-1] + 8), between)
        wide[..., : x.shape[-1]] = x
        return wide[..., : x.shape[-1]]
    return x


# ---------------------------------------------------------------------------------------- drawing

SMOOTH = ("F.silu({0})", "F.gelu({0})", 'F.gelu({0}, approximate="tanh")', "torch.relu({0})",
          "torch.sigmoid({0})", "torch.tanh({0})", "F.softplus({0})", "F.elu({0})",
          "F.leaky_relu({0}, 0.1)", "F.hardtanh({0})", "F.relu6({0})", "F.mish({0})",
          "{0}.abs()", "-{0}", "{0} * {0}", "{0}.square()", "torch.exp({0}.clamp(max=3))",
          "torch.log1p({0}.abs())", "torch.log({0} * {0} + 0.5)", "torch.sqrt({0}.abs() + 1e-2)",
          "torch.rsqrt({0} * {0} + 0.5)", "torch.reciprocal({0}.abs() + 0.5)", "{0}.pow(3)",
          "{0}.abs().pow(0.5)", "torch.sin({0})", "torch.cos({0})", "torch.erf({0})",
          "torch.atan({0})", "{0} + 1", "2.5 - {0}", "{0} / 3", "1 / ({0} * {0} + 1)",
          "{0}.clamp(-1, 0.5)", "{0}.clamp(min=0)", "F.hardswish({0})", "F.hardsigmoid({0})",
          "F.logsigmoid({0})", "F.softsign({0})", "F.selu({0})", "torch.special.expm1({0})",
          "torch.nan_to_num({0})", "{0}.to(F32)", "{0}.to(F16)", "{0}.to(BF16)")  # fmt: skip
PAIRS = ("{0} + {1}", "{0} - {1}", "{0} * {1}", "{0} / ({1} * {1} + 0.5)",
         "torch.maximum({0}, {1})", "torch.minimum({0}, {1})", "torch.addcmul({0}, {0}, {1})",
         "torch.lerp({0}, {1}, 0.25)", "F.silu({0}) * {1}",
         "torch.where({1} > 0, {0}, 0.5)",
         "F.mse_loss({0}, {1})", "F.huber_loss({0}, {1})", "F.smooth_l1_loss({0}, {1}, beta=0.5)",
         "torch.hypot({0}, {1})", "{0} % ({1}.abs() + 0.5)", "{0}.abs() ** {1}",
         "torch.atan2({0}, {1})", "{0}.masked_fill({1} > 1, -1e4)")  # fmt: skip
#: their second operand decides, so it is an argument
DECIDED = ("torch.where({1} > 0, {0}, 0.5)", "{0}.masked_fill({1} > 1, -1e4)")
SHAPES = ("{0}.mT", "{0}.transpose(0, 1)", "{0}.flatten(0, 1)", "{0}.unsqueeze(0)",
          "{0}.unsqueeze(-1)", "{0}.squeeze(0)", "{0}.movedim(0, -1)", "{0}.contiguous()",
          "{0}.unflatten(-1, (2, -1))", "{0}.unflatten(-1, (-1, 8))", "{0}.chunk(2, -1)[0]",
          "{0}.chunk(2, -1)[1]", "{0}[..., :8]", "{0}[..., 1:]", "{0}[0]", "{0}[:, -1]",
          "{0}.reshape(-1)", "{0}.reshape(-1, {0}.shape[-1])", "{0}.expand(2, *{0}.shape)",
          "{0}.roll(1, -1)", "{0}.flip(-1)", "{0}.repeat(2, 1)", "{0}.tril()", "{0}.triu(1)",
          "torch.stack([{0}, {0} * 2])", "{0}.permute(*reversed(range({0}.dim())))")  # fmt: skip
ALONG = ("{0}.sum(DIM)", "{0}.sum(DIM, keepdim=True)", "{0}.mean(DIM, keepdim=True)",
         "{0}.mean(DIM)", "{0}.amax(DIM, keepdim=True)", "{0}.amin(DIM)", "{0}.softmax(DIM)",
         "{0}.log_softmax(DIM)", "{0}.logsumexp(DIM)", "{0}.var(DIM, keepdim=True)",
         "{0}.std(DIM, correction=0)", "{0}.norm(dim=DIM, keepdim=True)",
         "F.normalize({0}, dim=DIM)", "{0}.sum()", "{0}.mean()", "{0}.amax()",
         "{0}.max(DIM).values", "F.glu({0}, DIM)", "F.softmin({0}, DIM)",
         "{0}.cumsum(DIM)")  # fmt: skip
#: with an eps: the default depends on the element type, and so is another one in float64
NORMS = (
    "F.rms_norm({0}, {0}.shape[-1:], eps=1e-5)",
    "F.rms_norm({0}, {0}.shape[-1:], eps=1e-3)",
    "F.layer_norm({0}, {0}.shape[-1:])",
    "F.layer_norm({0}, {0}.shape[-1:], eps=1e-3)",
)
#: with a new argument {1} of the shape [last extent of {0}]
WEIGHTED = (
    "F.rms_norm({0}, {0}.shape[-1:], {1}, 1e-5)",
    "F.layer_norm({0}, {0}.shape[-1:], {1})",
    "F.layer_norm({0}, {0}.shape[-1:], {1}, {1})",
    "{0} * {1}",
    "{0} + {1}",
)
#: with new arguments: {1} is [n, last extent], {2} is [n]
LINEAR = ("F.linear({0}, {1})", "F.linear({0}, {1}, {2})", "{0} @ {1}.t()",
          "F.silu(F.linear({0}, {1}))", "{0} @ {1}.t() + {2}", "torch.matmul({0}, {1}.mT)",
          "F.linear(F.rms_norm({0}, {0}.shape[-1:], eps=1e-5), {1})", "({0} @ {1}.t()).softmax(-1)",
          "torch.einsum('...k,nk->...n', {0}, {1})")  # fmt: skip
#: with new arguments {1} and {2} of the shape of {0}
ATTENTION = ("F.scaled_dot_product_attention({0}, {1}, {2})",
             "F.scaled_dot_product_attention({0}, {1}, {2}, is_causal=True)",
             "F.scaled_dot_product_attention({0}, {1}, {2}, scale=0.2)",
             "({0} @ {1}.mT / 4).softmax(-1) @ {2}",
             ("({0} @ {1}.mT * 0.3).masked_fill(torch.ones({0}.shape[-2], {1}.shape[-2], "
              "dtype=torch.bool, device={0}.device).triu(1), float('-inf'))"
              ".softmax(-1) @ {2}"))  # fmt: skip


def draw_function(seed: int, index: int) -> Function:
    """The function ``index`` of a seed."""
    return DrawFunction(random.Random(f"{seed}:{index}:torch")).function()


class DrawFunction:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.dtype = rng.choice(("float32", "float16", "bfloat16"))
        self.dynamic = rng.random() < 0.15
        self.hint = rng.choice((4, 7, 16, 33))
        self.sources: list[Source] = []
        self.lines: list[tuple[str, tuple[Any, ...]]] = []
        #: all values in order of making, as ("s" or "l", place), and what they are
        self.order: list[tuple[str, int]] = []
        self.values: list[Tensor] = []
        rank = rng.choices((1, 2, 3), (1, 6, 4))[0]
        shape: tuple[Any, ...] = tuple(
            rng.choice((1, 2, 3, 8, 16, 24, 32, 33, 64, 100, 128, 8, 16, 64)) for _ in range(rank)
        )
        while torch.Size(shape).numel() > ELEMENTS // 4:
            shape = tuple(max(1, n // 2) for n in shape)
        self.shape = (ROWS, *shape[1:]) if self.dynamic else shape
        for _ in range(rng.randint(1, 2)):
            self.source(self.shape)

    def source(self, shape: Any) -> int:
        rng = self.rng
        layout = rng.choices(("dense", "strided", "transposed"), (8, 1, 1))[0]
        exponent = rng.randint(-8, 6) if rng.random() < 0.1 else 0
        kind = "normal" if rng.random() < 0.9 else rng.choice(("positive", "coarse", "peaks"))
        dtype = rng.choice(("float32", "bfloat16")) if rng.random() < 0.05 else self.dtype
        s = Source(tuple(shape), dtype, kind, exponent, 0, layout)
        self.sources.append(s)
        self.order.append(("s", len(self.sources) - 1))
        self.values.append(elements(s, self.hint, len(self.sources)))
        return len(self.values) - 1

    def function(self) -> Function:
        length, tries = self.rng.randint(1, 9), 0
        while len(self.lines) < length and tries < 40:
            self.grow()
            tries += 1
        if not self.lines:
            self.line("{0} * 2", (0,))
        n = len(self.sources)
        new = {v: k if what == "s" else n + k for v, (what, k) in enumerate(self.order)}
        lines = tuple(Line(t, tuple(new[o] for o in ops)) for t, ops in self.lines)
        used = {o for x in lines for o in x.operands}
        ends = [n + k for k in range(len(lines)) if n + k not in used][-3:]
        f = Function(tuple(self.sources), lines, tuple(ends), self.rng.randrange(1 << 30),
                     (self.hint, self.rng.choice((2, 5, 16, 40))))  # fmt: skip
        return f.pruned()

    def grow(self) -> None:
        rng = self.rng
        x = self.value()
        shape = self.shape_of(x)
        kind = rng.choices(("smooth", "pair", "shape", "along", "norm", "weighted", "linear",
                            "attention", "cat"), (7, 5, 3, 4, 1, 2, 4, 1, 1))[0]  # fmt: skip
        if kind == "pair":
            text = rng.choice(PAIRS)
            given = [v for v, (what, _) in enumerate(self.order) if what == "s"]
            y = rng.choice(given) if text in DECIDED else rng.choice(range(len(self.values)))
            self.line(text, (x, y))
        elif kind == "along":
            dim = rng.choice((-1, -1, 0, 1, (0, 1)))
            self.line(rng.choice(ALONG).replace("DIM", str(dim)), (x,))
        elif kind in ("weighted", "linear", "attention"):
            self.with_arguments(kind, x, shape)
        elif kind == "cat":
            self.line("torch.cat([{0}, {1}], -1)", (x, rng.choice(range(len(self.values)))))
        else:
            self.line(rng.choice({"smooth": SMOOTH, "shape": SHAPES, "norm": NORMS}[kind]), (x,))

    def with_arguments(self, kind: str, x: int, shape: Any) -> None:
        if not shape or shape[-1] == ROWS:
            return
        n = self.rng.choice((8, 16, 24, 40, 64, 33))
        shapes = {"weighted": (shape[-1:],), "linear": ((n, shape[-1]), (n,)),
                  "attention": (shape, shape)}[kind]  # fmt: skip
        text = self.rng.choice(
            {"weighted": WEIGHTED, "linear": LINEAR, "attention": ATTENTION}[kind]
        )
        before = len(self.sources), len(self.order)
        more = [self.source(s) for s in shapes if f"{{{shapes.index(s) + 1}}}" in text or s]
        if not self.line(text, (x, *more)):
            del self.sources[before[0] :], self.order[before[1] :], self.values[before[1] :]

    def value(self) -> int:
        late = min(int(self.rng.expovariate(0.8)), len(self.values) - 1)
        return len(self.values) - 1 - late

    def shape_of(self, v: int) -> tuple[Any, ...]:
        """The shape, with the dynamic extent in front if it is there."""
        shape = tuple(self.values[v].shape)
        if self.dynamic and shape and shape[0] == self.hint:
            return (ROWS, *shape[1:])
        return shape

    def line(self, text: str, operands: tuple[int, ...]) -> bool:
        """One more value; False where PyTorch refuses it, or it is no tensor of numbers."""
        names = [f"v[{i}]" for i in range(len(self.values))]
        space = {"torch": torch, "F": F, "v": self.values, **types(False)}
        try:
            y = eval(written(Line(text, operands), names), space)
        except (RuntimeError, IndexError, TypeError, ValueError):
            return False
        fits = isinstance(y, Tensor) and y.is_floating_point() and 0 < y.numel() <= ELEMENTS
        if not fits or y.dim() > 4 or not y.isfinite().all():
            return False
        self.lines.append((text, operands))
        self.order.append(("l", len(self.lines) - 1))
        self.values.append(y)
        return True


# ---------------------------------------------------------------------------------------- judging


aten = torch.ops.aten
#: norms in steps: how the mean is rounded decides where elements are close to it; and softmax: the
#: share of an element that is all is 1 by a rounding, and gradients are what is left of that
STEPS = get_decompositions([
    aten.native_layer_norm, aten.native_layer_norm_backward, aten.native_group_norm,
    aten.native_group_norm_backward, aten._softmax, aten._softmax_backward_data,
    aten._log_softmax, aten._log_softmax_backward_data,
])  # fmt: skip


PRODUCTS = (aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default)
#: sums of products may be products: that of a gradient of softmax, times the rows it weighs
SUMS = (aten.sum.default, aten.sum.dim_IntList)


class Noise(TorchDispatchMode):
    """Random roundings after each operator that computes float64."""

    def __init__(self, u: float, seed: int) -> None:
        super().__init__()
        self.u, self.generator = u, torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in STEPS:
            with self:
                return STEPS[func](*args, **(kwargs or {}))
        y = func(*args, **(kwargs or {}))
        if func in PRODUCTS + SUMS and y.dtype is torch.float64 and self.u == unit(torch.float32):
            # of float32 factors 2^-22 is lost (docs/lowering/matmul.md), as in sums of four or more
            size = func(*tree_map_only(Tensor, torch.abs, args), **(kwargs or {}))
            return y + 4 * self.u * self._random(y) * size
        return y if func.is_view else tree_map_only(Tensor, self._rounded, y)

    def _rounded(self, y: Tensor) -> Tensor:
        if y.dtype is not torch.float64:
            return y
        return torch.where(y.isfinite(), y * (1 + self.u * self._random(y)), y)

    def _random(self, y: Tensor) -> Tensor:
        return 2 * torch.rand(y.shape, generator=self.generator, dtype=torch.float64) - 1


class _Limited(torch.autograd.Function):
    """A value, and its gradient, that are infinite beyond the largest number of a type."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, largest: float) -> Tensor:
        ctx.largest = largest
        return _limited(x, largest)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _limited(grad, ctx.largest), None


def _limited(x: Tensor, largest: float) -> Tensor:
    x = x + 0.0  # of -0: values know no sign of 0, by which the angle of two zeros is 0 or pi
    return torch.where(x.abs() > largest, x.sign() * torch.inf, x)


def stored(f: Function, inputs: list[Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    """The function in float64, whose values, and their gradients, have the range of the element
    types that PyTorch has for them: any of them may be stored."""
    largest = cycle([reach(kind) for kind in kinds_of(f, inputs)])
    return f.callable(exact=True, each=lambda y: _Limited.apply(y, next(largest)))


def kinds_of(f: Function, inputs: list[Tensor]) -> list[torch.dtype]:
    """The element types that PyTorch has for the values of a function, in order."""
    kinds: list[torch.dtype] = []

    def seen(y: Tensor) -> Tensor:
        kinds.append(y.dtype)
        return y

    f.callable(each=seen)(*inputs)
    return kinds


def wanted_of(f: Function, inputs: list[Tensor]) -> list[Expected]:
    """The right results of a function."""
    double = [x.double() for x in inputs]
    exact = f.callable(exact=True)
    values = exact(*double)
    eager = f.callable()(*inputs)
    u = max(unit(x.dtype) for x in (*inputs, *eager))
    runs = []
    for seed in range(NOISY):
        with Noise(u, seed):
            runs.append(exact(*double))
    runs.append(stored(f, inputs)(*double))
    return [_expected(v, e, [r[k] for r in runs]) for k, (v, e) in
            enumerate(zip(values, eager, strict=True))]  # fmt: skip


def gradients_wanted(f: Function, inputs: list[Tensor]) -> list[Expected]:
    """The right gradients of the `weighted` sum of all outputs.

    Where PyTorch's is NaN in float64 there is no derivative (of the root of an absolute value at 0,
    for instance, infinity times 0), and nothing is known of it.
    """
    double = [x.double() for x in inputs]
    exact, u = _gradients(f.callable(exact=True), double), max(unit(x.dtype) for x in inputs)
    try:
        eager = _gradients(f.callable(), inputs)
    except RuntimeError:  # PyTorch has none for some operators of two element types
        eager = [v.to(x.dtype) for v, x in zip(exact, inputs, strict=True)]
        # its roundings of values and of their gradients are not among the samples then; a product
        # by 1 draws some also for casts, which are no operators in float64
        u = max(u, *(unit(kind) for kind in kinds_of(f, inputs) if kind.is_floating_point))
        noisy = f.callable(exact=True, each=lambda y: y * 1.0 if y.is_floating_point() else y)
    else:
        noisy = f.callable(exact=True)
    runs = []
    for seed in range(NOISY):
        with Noise(u, seed):
            runs.append(_gradients(noisy, double))
    with torch.no_grad():
        limited = stored(f, inputs)
    runs.append(_gradients(limited, double))
    return [_expected(v, e, [r[k] for r in runs], torch.inf) for k, (v, e) in
            enumerate(zip(exact, eager, strict=True))]  # fmt: skip


def _gradients(f: Callable[..., Any], inputs: list[Tensor]) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    total = weighted(f(*leaves))
    if not isinstance(total, Tensor) or not total.requires_grad:
        return [torch.zeros_like(x) for x in leaves]
    found = torch.autograd.grad(total, leaves, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves, strict=True)]


def weighted(outputs: Sequence[Tensor]) -> Tensor | int:
    """The sum of all outputs, in float32 at least, with weights that every element type holds and
    that differ from element to element: gradients of the plain sum of a softmax or of a norm are
    0, and what is found for them nothing but roundings."""
    total: Tensor | int = 0
    for y in outputs:
        places = torch.arange(y.numel(), device=y.device).reshape(y.shape)
        weights = (places * 7 % 11 - 5) / 4  # -1.25 to 1.25
        total = total + (y.to(torch.promote_types(y.dtype, torch.float32)) * weights).sum()
    return total


def _expected(v: Tensor, eager: Tensor, noisy: list[Tensor], of_nan: float = 0.0) -> Expected:
    v = v.double()
    samples = (eager.double(), *(n.double() for n in noisy))
    e = judge.spread(v, samples, eager.dtype)
    e = torch.where(v.isnan() & eager.isnan(), of_nan, e)
    return Expected(Ball(v, e), samples, eager.dtype)


def check_function(f: Function, settings: Settings) -> Outcome:
    """The outcome of a function."""
    return examined(lambda stage: _run(f, settings, stage), settings)


def _run(f: Function, settings: Settings, stage: Stage) -> Outcome:
    stage("eager")
    inputs = f.arguments(f.rows[0])
    with torch.no_grad():
        wanted = wanted_of(f, inputs)
    if settings.gpu:
        from tests.fuzz.device import check_traced

        return check_traced(f, settings, stage)
    stage("trace")
    with torch.no_grad():
        program = traced(f, inputs, settings, stage)
        stage("call")
        kind = _called(program, inputs, wanted, f)
    check_backward(f, program, inputs, stage)
    if f.dynamic:
        stage("call with other extents")
        inputs = f.arguments(f.rows[1])
        with torch.no_grad():
            _called(program, inputs, wanted_of(f, inputs), f)
    return Outcome(kind)


def check_backward(
    f: Function, program: Any, inputs: list[Tensor], stage: Stage, device: str = "cpu"
) -> None:
    """Gradients of the weighted sum of all outputs, against those of PyTorch in float64."""
    stage("backward")
    wanted = gradients_wanted(f, inputs)
    leaves = [x.to(device, copy=True).requires_grad_() for x in inputs]
    try:
        total = weighted(program(*leaves))
        if not isinstance(total, Tensor) or not total.requires_grad:
            return
        found: Any = torch.autograd.grad(total, leaves, allow_unused=True)
    except MAKING as error:
        raise Refused(error, "backward") from error
    made = [torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves, strict=True)]
    verdict = judge.judged(made, wanted)
    if verdict.wrong:
        raise Wrong("wrong", "backward", verdict.reason)


def _called(program: Any, inputs: list[Tensor], wanted: list[Expected], f: Function) -> str:
    kept = [x.clone() for x in inputs]
    outputs = program(*inputs)
    for x, y in zip(inputs, kept, strict=True):
        if not torch.equal(x, y):
            raise Wrong("wrong", "call", "an argument was written to")
    return held(outputs, wanted, "function")


def dynamic_shapes(f: Function) -> Any:
    """The argument of ``torch.export.export``; None where all extents are known."""
    if not f.dynamic:
        return None
    dim = torch.export.Dim(ROWS)
    return tuple({0: dim} if ROWS in s.shape else None for s in f.sources)


def traced(f: Function, inputs: list[Tensor], settings: Settings, stage: Stage) -> Any:
    """The traced program, whose kernels run as block programs on the CPU.

    Raises:
        Refused: a documented error.
    """
    real = trace.optimize_graph
    trace.optimize_graph = lambda graph, **_: BlockKernel(graph, settings)
    try:
        return cs.superoptimize(f.callable(), inputs, dynamic_shapes=dynamic_shapes(f))
    except MAKING as error:
        raise Refused(error, stage.name) from error
    finally:
        trace.optimize_graph = real


class BlockKernel:
    """Stands in the place of a kernel: the same search, and its block programs run by PyTorch."""

    def __init__(self, graph: KernelGraph, settings: Settings) -> None:
        self.graph, self._settings = graph, settings
        hinted = graph.with_hints(bucketed(graph))
        options = pipeline.Options(cs.H200, budget_s=settings.budget_s, tuned=False)
        _, choice = pipeline.choose(hinted, options, keep=settings.keep)
        self.mugraph = choice.candidate.mugraph
        self._signature = Signature(graph)

    def __call__(self, tensors: list[Tensor]) -> list[Tensor]:
        names = [n for n, t in zip(self._signature.names, tensors, strict=True) if t.requires_grad]
        if torch.is_grad_enabled() and (wrt := reached(self.graph, names)):
            return recorded(self._gradient(wrt), tensors)
        with torch.no_grad():
            return self._run(tensors)

    def _gradient(self, wrt: tuple[str, ...]) -> Gradient:
        parts = split(self.graph, wrt)
        forward, backward = (
            BlockKernel(g, self._settings) if g.outputs else None
            for g in (parts.forward, parts.backward)
        )
        return Gradient(self.graph, wrt, parts, forward, backward)  # type: ignore[arg-type]

    def _run(self, tensors: list[Tensor]) -> list[Tensor]:
        extents = self._signature.bind(tensors) or {}
        mu, graph = self.mugraph, self.graph
        for rows in extents.values():
            mu, graph = at_rows(mu, rows), graph.with_hints(extents)
        outputs = execute_rounded(mu, tensors)
        held(outputs, judge.expected(graph, tensors), "region")
        return outputs


# ------------------------------------------------------------------------------------- minimising


def minimised(f: Function, fails: Callable[[Function], bool], seconds: float = 120.0) -> Function:
    """The smallest function found that fails alike."""
    end, changed = time.monotonic() + seconds, True
    while changed and time.monotonic() < end:
        changed = False
        for smaller in simpler(f):
            if time.monotonic() > end:
                break
            if valid(smaller) and fails(smaller):
                f, changed = smaller, True
                break
    return f


def valid(f: Function) -> bool:
    """PyTorch runs it."""
    try:
        with torch.no_grad():
            found = f.callable()(*f.arguments(f.rows[0]))
    except Exception:
        return False
    return all(isinstance(y, Tensor) and y.is_floating_point() for y in found)


def simpler(f: Function) -> Iterator[Function]:
    """Functions with one thing less."""
    for candidate in _simpler(f):
        candidate = candidate.pruned()
        if candidate.lines and candidate != f:
            yield candidate


def _simpler(f: Function) -> Iterator[Function]:
    n = len(f.sources)
    for k in range(len(f.outputs)):
        if len(f.outputs) > 1:
            yield replace(f, outputs=(*f.outputs[:k], *f.outputs[k + 1 :]))
    for k, i in enumerate(f.outputs):
        for o in f.lines[i - n].operands:
            if o >= n and o not in f.outputs:
                yield replace(f, outputs=(*f.outputs[:k], o, *f.outputs[k + 1 :]))
    for k, line in enumerate(f.lines):
        for o in line.operands:
            lines = tuple(replace(x, operands=tuple(o if v == n + k else v for v in x.operands))
                          for x in f.lines)  # fmt: skip
            yield replace(f, lines=lines)
    if f.dynamic:
        shapes = [tuple(f.rows[0] if d == ROWS else d for d in s.shape) for s in f.sources]
        yield replace(f, sources=tuple(replace(s, shape=x) for s, x in
                                       zip(f.sources, shapes, strict=True)))  # fmt: skip
    for dtype in ("float32", "float16"):
        if f.sources[0].dtype != "float32":
            yield replace(f, sources=tuple(replace(s, dtype=dtype) for s in f.sources))
    for k, s in enumerate(f.sources):
        plainer = ({"exponent": 0}, {"layout": "dense"}, {"kind": "normal"})
        for plain in (replace(s, **what) for what in plainer):
            yield replace(f, sources=(*f.sources[:k], plain, *f.sources[k + 1 :]))
    extents = sorted({d for s in f.sources for d in s.shape if isinstance(d, int)}, reverse=True)
    for d in extents:
        for less in dict.fromkeys((1, 2, 8, 16, d // 2)):
            if 0 < less < d:
                yield replace(f, sources=tuple(
                    replace(s, shape=tuple(less if x == d else x for x in s.shape))
                    for s in f.sources))  # fmt: skip
