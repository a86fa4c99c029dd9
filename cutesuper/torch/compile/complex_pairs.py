"""Complex numbers as pairs of real ones, the only numbers that kernels compute.

before: ``view_as_real(view_as_complex(x) * f)``; after: ``x * re + x.flip(-1) * im * signs`` with
``re = view_as_real(f)[..., [0, 0]]``, ``im = view_as_real(f)[..., [1, 1]]``, ``signs = [-1, 1]``.

A complex tensor ``[...]`` becomes its real view ``[..., 2]``, so views as real or complex numbers
cost nothing. A product takes one factor twice, as stored and with the parts of each number
exchanged, and each part of the other factor repeated: PyTorch makes these copies, and the kernels
work element-wise along whole rows. (A rotary embedding in bfloat16 then moves 10 bytes per element,
20 in PyTorch; with real and imaginary parts as two tensors, each copied on the way in and combined
on the way out, it would be 36.)

Operators without a formula here are left as they are; `cutesuper.torch.compile.trace` refuses them
by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from cutesuper.torch.aten.table import Arguments, arguments_of
from cutesuper.torch.internals import fake_result

_aten = torch.ops.aten

#: a formula: the pairs of a node from its arguments; None if it does not apply to them
_Formula = Callable[["_Pairs", fx.Node, Arguments], fx.Node | None]

#: operators that work on pairs as on complex numbers, dimensions counted from the first
_SAME = ("add.Tensor", "sub.Tensor", "neg.default", "unsqueeze.default", "squeeze.dim",
         "squeeze.dims", "select.int", "slice.Tensor", "transpose.int", "flip.default",
         "index_select.default", "index.Tensor", "sum.dim_IntList", "mean.dim", "cat.default",
         "clone.default", "alias.default", "detach.default")  # fmt: skip
#: such operators with extents as arguments, and the extent that is appended
_SIZED = {"view.default": 2, "_unsafe_view.default": 2, "reshape.default": 2, "expand.default": 2,
          "repeat.default": 1}  # fmt: skip
_VIEWS = (_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default)
_CASTS = (_aten._to_copy.default, _aten.to.dtype, torch.ops.prims.convert_element_type.default)


def pair_complex(module: fx.GraphModule) -> None:
    """Replace complex64 arithmetic of a traced program by real arithmetic, in place.

    Args:
        module: exported; all its nodes have ``meta["val"]``.
    """
    if not any(map(is_complex, module.graph.nodes)):
        return
    pairs = _Pairs(module)
    for node in list(module.graph.nodes):
        pairs.visit(node)
    module.graph.eliminate_dead_code()


def is_complex(node: Any) -> bool:
    """True for a node whose value is a tensor of complex numbers."""
    val = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(val, torch.Tensor) and val.is_complex()


@dataclass
class _Pairs:
    """The pairs of complex nodes, made in front of their readers."""

    module: fx.GraphModule
    found: dict[fx.Node, fx.Node] = field(default_factory=dict)
    _made: dict[str, fx.Node] = field(default_factory=dict)

    def visit(self, node: fx.Node) -> None:
        """Find the pairs of a node, or replace a real one that reads pairs."""
        if node.op in ("placeholder", "get_attr") and is_complex(node):
            if node.meta["val"].dtype is torch.complex64:
                with self.module.graph.inserting_after(self._last_input()):
                    self.found[node] = self.call(node, _aten.view_as_real.default, node)
        elif node.op == "call_function":
            with self.module.graph.inserting_before(node):
                self._computed(node)

    def _last_input(self) -> fx.Node:
        """The last input, behind which nodes may be inserted."""
        return [n for n in self.module.graph.nodes if n.op in ("placeholder", "get_attr")][-1]

    def _computed(self, node: fx.Node) -> None:
        if node.target is _aten.view_as_real.default:
            if node.args[0] in self.found:
                node.replace_all_uses_with(self.found[node.args[0]])  # type: ignore[index]
            return
        formula = _FORMULAS.get(str(node.target).removeprefix("aten."))
        made = None
        if formula and is_complex(node) and node.meta["val"].dtype is torch.complex64:
            made = formula(self, node, arguments_of(node))
        if made is not None:
            self.found[node] = made
            kept = [u for u in node.users if u.op == "output"]
            if kept:
                whole = self.call(node, _aten.view_as_complex.default, made)
                node.replace_all_uses_with(whole, lambda user: user.op == "output")

    def call(self, origin: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A new node at the place of ``origin`` in the user's program, or an equal old one."""
        key = f"{target} {args} {kwargs}"
        if key in self._made:
            return self._made[key]
        node = self._made[key] = self.module.graph.call_function(target, args, kwargs)
        node.meta["val"] = fake_result(node)
        node.meta["stack_trace"] = origin.meta.get("stack_trace")
        return node

    def pair(self, origin: fx.Node, x: Any) -> fx.Node | None:
        """The pairs of a complex tensor, or of a real one; None if there are none."""
        if not isinstance(x, fx.Node) or is_complex(x):
            return self.found.get(x)
        x = self.float32(origin, x)
        return self.joined(origin, x, self.call(origin, _aten.zeros_like.default, x))

    def float32(self, origin: fx.Node, x: fx.Node) -> fx.Node:
        """A real tensor in the type of the parts of complex64."""
        same = x.meta["val"].dtype is torch.float32
        return x if same else self.call(origin, _aten._to_copy.default, x, dtype=torch.float32)

    def joined(self, origin: fx.Node, real: fx.Node, imaginary: fx.Node) -> fx.Node:
        """Pairs of two real tensors."""
        columns = [self.column(origin, t) for t in (real, imaginary)]
        return self.call(origin, _aten.cat.default, columns, -1)

    def column(self, origin: fx.Node, x: Any) -> Any:
        """A real operand for use with pairs."""
        return self.call(origin, _aten.unsqueeze.default, x, -1) if isinstance(x, fx.Node) else x

    def part(self, origin: fx.Node, x: fx.Node, which: int) -> fx.Node:
        """Pairs of the real parts (0) or the imaginary ones (1)."""
        both = self._constant(f"_both_{which}", torch.tensor([which] * 2), x)
        return self.call(origin, _aten.index_select.default, x, -1, both)

    def exchanged(self, origin: fx.Node, x: fx.Node) -> fx.Node:
        """Pairs with their parts exchanged.
        An operand of a conversion is exchanged before it, as it is smaller then."""
        if x.target in _CASTS:
            inner = self.exchanged(origin, x.args[0])  # type: ignore[arg-type]
            return self.call(origin, x.target, inner, *x.args[1:], **x.kwargs)
        cast = x.args[0] if x.target in _VIEWS else None
        if isinstance(cast, fx.Node) and cast.target in _CASTS:
            view = self.call(origin, _aten.reshape.default, cast.args[0], x.args[1])
            inner = self.exchanged(origin, view)
            return self.call(origin, cast.target, inner, *cast.args[1:], **cast.kwargs)
        return self.call(origin, _aten.flip.default, x, [-1])

    def signed(self, origin: fx.Node, x: fx.Node) -> fx.Node:
        """Pairs with the sign of the first part changed.
        The signs are whole rows: kernels then have rows of numbers, not of pairs."""
        rows = x.meta["val"].shape[-2:-1]
        n = rows[0] if len(rows) and isinstance(rows[0], int) else None
        signs = torch.tensor([-1.0, 1.0], dtype=x.meta["val"].dtype)
        name = "_signs" if n is None else f"_signs_{n}"
        row = self._constant(name, signs if n is None else signs.repeat(n, 1), x)
        return self.call(origin, _aten.mul.Tensor, x, row)

    def _constant(self, name: str, value: torch.Tensor, near: fx.Node) -> fx.Node:
        """A buffer of the program, on the device of a node."""
        device = near.meta["val"].device
        name = f"{name}_{device.type}{'' if device.index is None else device.index}"
        if name not in self._made:
            self.module.register_buffer(name, value.to(device), persistent=False)
            node = self._made[name] = self.module.graph.get_attr(name)
            node.meta["val"] = getattr(self.module, name)
        return self._made[name]


# ---------------------------------------------------------------------------------------- formulas


def _same(p: _Pairs, node: fx.Node, a: Arguments) -> fx.Node | None:
    rank = node.meta["val"].dim() if "unsqueeze" in str(node.target) else _rank(a)
    if "dtype" in a:  # sums and means: without dimensions they are over all but the parts
        if not rank:
            return p.pair(node, a["self"])
        a = {**a, "dim": a["dim"] or list(range(rank))}
    given: list[Any] = []
    for name, value in a.items():
        if name in ("self", "other"):
            value = p.pair(node, value)
            if value is None:
                return None
        elif name == "tensors":
            value = [p.pair(node, t) for t in value]
            if None in value:
                return None
        elif name == "dtype" and value is not None:
            return None  # a type of complex numbers
        elif name in ("dim", "dims", "dim0", "dim1"):
            value = _counted(value, rank)
        given.append(value)
    positional = [s.name for s in node.target._schema.arguments if not s.kwarg_only]  # type: ignore[union-attr]
    k = len(positional)
    named = {n: v for n, v in zip(list(a)[k:], given[k:], strict=True) if v is not None}
    return p.call(node, node.target, *given[:k], **named)


def _total(p: _Pairs, node: fx.Node, a: Arguments) -> fx.Node | None:
    x, dims = p.pair(node, a["self"]), list(range(_rank(a)))
    if x is None or a["dtype"] is not None or not dims:
        return None
    mean = "mean" in str(node.target)
    return p.call(node, _aten.mean.dim if mean else _aten.sum.dim_IntList, x, dims)


def _rank(a: Arguments) -> int:
    first = a["tensors"][0] if "tensors" in a else a["self"]
    return int(first.meta["val"].dim())


def _counted(dims: Any, rank: int) -> Any:
    return dims % rank if isinstance(dims, int) else [d % rank for d in dims]


def _sized(p: _Pairs, node: fx.Node, a: Arguments) -> fx.Node | None:
    x, sizes = list(a.values())[:2]
    last = _SIZED[str(node.target).removeprefix("aten.")]
    made = p.pair(node, x)
    return None if made is None else p.call(node, node.target, made, [*sizes, last])


def _permuted(p: _Pairs, node: fx.Node, a: Arguments) -> fx.Node | None:
    x, rank = p.pair(node, a["self"]), _rank(a)
    dims = [*_counted(a["dims"], rank), rank]
    return None if x is None else p.call(node, node.target, x, dims)


def _product(p: _Pairs, node: fx.Node, a: Arguments) -> fx.Node | None:
    """(x + iy)(u + iv) = xu - yv + i (yu + xv)."""
    x, y = a["self"], a["other"]
    if not is_complex(x) or (is_complex(y) and y.meta["val"].dim() > x.meta["val"].dim()):
        x, y = y, x  # the parts of the smaller one are copied
    if not is_complex(x):  # a real tensor and a complex number
        x, y = (x, y) if isinstance(x, fx.Node) else (y, x)
        return _scaled(p, node, x, y) if isinstance(y, complex) else None
    left = p.pair(node, x)
    if left is None:
        return None
    if not is_complex(y) and not isinstance(y, complex):
        return p.call(node, _aten.mul.Tensor, left, p.column(node, y))
    if isinstance(y, complex):
        parts: list[Any] = [y.real, y.imag]
    elif (right := p.pair(node, y)) is None:
        return None
    else:
        parts = [p.part(node, right, which) for which in (0, 1)]
    straight = p.call(node, _aten.mul.Tensor, left, parts[0])
    turned = p.call(node, _aten.mul.Tensor, p.exchanged(node, left), parts[1])
    return p.call(node, _aten.add.Tensor, straight, p.signed(node, turned))


def _scaled(p: _Pairs, node: fx.Node, x: fx.Node, y: complex) -> fx.Node:
    x = p.float32(node, x)
    parts = [p.call(node, _aten.mul.Tensor, x, part) for part in (y.real, y.imag)]
    return p.joined(node, *parts)


def _quotient(p: _Pairs, node: fx.Node, a: Arguments) -> fx.Node | None:
    x, y = a["self"], a["other"]
    if is_complex(y) or isinstance(y, complex) or (pair := p.pair(node, x)) is None:
        return None
    return p.call(node, node.target, pair, p.column(node, y))


def _conjugate(p: _Pairs, node: fx.Node, a: Arguments) -> fx.Node | None:
    x = p.pair(node, a["self"])
    return None if x is None else p.call(node, _aten.neg.default, p.signed(node, x))


def _polar(p: _Pairs, node: fx.Node, a: Arguments) -> fx.Node | None:
    """r (cos t + i sin t)."""
    functions = (_aten.cos.default, _aten.sin.default)
    parts = [
        p.call(node, _aten.mul.Tensor, a["abs"], p.call(node, f, a["angle"])) for f in functions
    ]
    return p.joined(node, *parts)


def _exponential(p: _Pairs, node: fx.Node, a: Arguments) -> fx.Node | None:
    """e^x (cos y + i sin y)."""
    x = p.pair(node, a["self"])
    if x is None:
        return None
    real, imaginary = (p.call(node, _aten.select.int, x, -1, i) for i in (0, 1))
    size = p.call(node, _aten.exp.default, real)
    return _polar(p, node, {"abs": size, "angle": imaginary})


def _converted(p: _Pairs, node: fx.Node, a: Arguments) -> fx.Node | None:
    same = a["self"].meta["val"].device == node.meta["val"].device
    return p.pair(node, a["self"]) if same else None


def _of_real(p: _Pairs, node: fx.Node, a: Arguments) -> fx.Node | None:
    return a["self"] if a["self"].meta["val"].dtype is torch.float32 else None


_FORMULAS: dict[str, _Formula] = {
    **dict.fromkeys(_SAME, _same), **dict.fromkeys(_SIZED, _sized),
    "sum.default": _total, "mean.default": _total, "permute.default": _permuted,
    "mul.Tensor": _product, "div.Tensor": _quotient,
    "_conj.default": _conjugate, "conj_physical.default": _conjugate,
    "_conj_physical.default": _conjugate, "resolve_conj.default": _converted,
    "polar.default": _polar, "exp.default": _exponential,
    "complex.default": lambda p, node, a: p.joined(node, a["real"], a["imag"]),
    "_to_copy.default": _converted, "view_as_complex.default": _of_real,
}  # fmt: skip
