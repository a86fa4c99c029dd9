"""A single region: run by PyTorch, in float64, and as a call of its kernels.

before: nodes in a graph of symbolic sizes; after: a module that can be called, tensors like the
region's inputs in the call that is compiled for, and the verdict on the kernels' results.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import floor, isfinite, log, log2
from typing import Any, NamedTuple

import torch
from torch import fx

from cutesuper.ir.dims import extent
from cutesuper.ir.operators.base import Counts, lookup
from cutesuper.ir.relations import ordered, reachable
from cutesuper.torch.aten.attention import AttentionBackward
from cutesuper.torch.aten.length_masks import makers
from cutesuper.torch.aten.table import arguments_of, entry_of, is_free
from cutesuper.torch.compile.attention_exact import attention
from cutesuper.torch.compile.region import Length, Region, Size
from cutesuper.torch.compile.region_operator import Extents, symbols_of
from cutesuper.torch.compile.region_operator import region as region_operator
from cutesuper.torch.compile.rewrite import Call, rewrite
from cutesuper.torch.internals import hint_of
from cutesuper.verify.numeric import Report, acceptable

_ATEN = torch.ops.aten
#: the products of matrices, and which operand is contracted along its last dimension but one
_PRODUCTS = {
    _ATEN.mm.default: 1, _ATEN.bmm.default: 1, _ATEN.addmm.default: 2, _ATEN.baddbmm.default: 2,
}  # fmt: skip
#: operators that pass on the elements of an operand unchanged
_VIEWS = {
    _ATEN.permute.default, _ATEN.t.default, _ATEN.transpose.int, _ATEN.view.default,
    _ATEN.reshape.default, _ATEN._unsafe_view.default, _ATEN.unsqueeze.default,
    _ATEN.squeeze.dim, _ATEN.expand.default, _ATEN.clone.default,
}  # fmt: skip
#: elements of a result of which one draw says little, and draws that are compared then
_FEW, _DRAWS = 64, 16
_NUMBERS = (torch.float16, torch.bfloat16, torch.float32)


class Compared(NamedTuple):
    """A result of the kernels, the same in float64, and the same by PyTorch's operators."""

    out: torch.Tensor
    exact: torch.Tensor
    eager: torch.Tensor

    def scaled(self) -> Compared:
        """The elements, times a power of two that brings the largest one to about 1."""
        top = float(self.exact.abs().max())
        scale = 2.0 ** -floor(log2(top)) if isfinite(top) and top > 0 else 1.0
        return Compared(*((t.double() * scale).to(t.dtype).flatten() for t in self))


@dataclass(frozen=True)
class Sample:
    """A region and the sizes for its trial.

    Attributes:
        region: in its graph.
        key: of its kernels.
    """

    region: Region
    key: str

    @cached_property
    def module(self) -> fx.GraphModule:
        """The region's nodes as a module.
        It takes their operands and returns a tuple of the results used outside."""
        return fx.GraphModule({}, self._alone[0])

    @cached_property
    def _alone(self) -> tuple[fx.Graph, Region]:
        return alone(self.region)

    @cached_property
    def kernels(self) -> fx.GraphModule:
        """The module with its region replaced by the kernels."""
        graph, region = alone(self.region)
        rewrite(graph, [Call(region, region_operator, (self.key,))])
        graph.lint()
        return fx.GraphModule({}, graph)

    @cached_property
    def bare(self) -> bool:
        """True if `kernels` has nothing but the kernels, and views: nothing for Inductor to do."""
        made = (n.target for n in self.kernels.graph.nodes if n.op == "call_function")
        return all(
            target in (operator.getitem, region_operator, _ATEN._unsafe_view.default)
            or (isinstance(target, torch._ops.OpOverload) and target.is_view)
            for target in made
        )

    @property
    def sources(self) -> list[fx.Node]:
        """Placeholders of ``module``, which have the metadata of the region's operands."""
        return [n for n in self.module.graph.nodes if n.op == "placeholder"]

    @cached_property
    def device(self) -> torch.device | None:
        """The device of all tensors; None if there are several."""
        values = [n.meta["val"] for n in self.module.graph.nodes if "val" in n.meta]
        devices = {v.device for v in values if isinstance(v, torch.Tensor)}
        return devices.pop() if len(devices) == 1 else None

    @cached_property
    def known(self) -> bool:
        """True if all sizes are known in the call that is compiled for."""
        return all(d is not None for n in self.sources for d in _sizes(n.meta["val"]))

    @cached_property
    def extents(self) -> Extents:
        """The symbolic extents of the kernels in that call."""
        return tuple(d.hint for d in symbols_of(self.region.graph))

    @cached_property
    def text(self) -> str:
        """A text that is equal for regions with the same computation on tensors stored alike."""
        return "\n".join([self.module.code, *(described(n.meta["val"]) for n in self.sources)])

    # -------------------------------------------------------------------------------- tensors

    def draw(self, seed: int, positive: bool = False) -> list[Any]:
        """Inputs of ``module``: normal numbers, scaled so that products stay of order 1.
        Lengths of at least 1; logarithms of the sums of as many weights of attention as there are
        keys.

        Args:
            seed: of the generator.
            positive: absolute values, for functions that are not defined for others.
        """
        scales = _scales(self.module.graph)
        device = self.device or torch.device("cpu")
        generator = torch.Generator(device).manual_seed(seed)
        ranges = lengths_in(self._alone[1]) | self._rows()
        drawn = [
            _drawn(n.meta["val"], scales.get(n, 1.0), generator, positive, ranges.get(n, (0, 1)))
            for n in self.sources
        ]
        sums = _sums(self.module.graph)
        return [t + sums[n] if n in sums else t for n, t in zip(self.sources, drawn, strict=True)]

    def _rows(self) -> dict[fx.Node, tuple[int, int]]:
        """The first and the last row that each index may name."""
        region, found = self._alone[1], dict[fx.Node, tuple[int, int]]()
        for n in region.graph.nodes:
            if n.facets.counts == Counts.ROWS:
                shapes = [region.graph.nodes[i].shape for i in n.inputs]
                for k in n.facets.integers_among(len(n.inputs)):
                    last = n.facets.largest(shapes, n.attributes, k)
                    node = region.inputs[region.graph.inputs.index(n.inputs[k])].node
                    found[node] = (0, min(last, found.get(node, (0, last))[1]))
        return found

    def difference(self, seed: int = 0) -> str | None:
        """The error in the kernels' results as text, or None.

        They are compared with float64; the error may be twice that of PyTorch's own operators,
        plus 2 ulp (`cutesuper.verify.numeric.acceptable`).
        """
        compared = self._compared(seed)
        if isinstance(compared, str):
            return compared
        for n, (out, want, theirs) in enumerate(compared):
            if _strides(out) != _strides(theirs):
                return (
                    f"result {n} has the strides {list(out.stride())} in place of "
                    f"{list(theirs.stride())}"
                )
            report = acceptable(out, want, theirs, theirs.dtype)
            if not report and 0 < out.numel() < _FEW:
                report = self._drawn_again(n, seed, compared)
            if not report:
                return f"result {n}: {report.message}"
        return None

    def _compared(self, seed: int) -> list[Compared] | str:
        """Each result for inputs of a seed, or why there is none to compare with."""
        inputs = self.draw(seed)
        try:
            exact = _exact(self.module, inputs)
            if not all(bool(t.isfinite().all()) for t in exact):
                inputs = self.draw(seed, positive=True)
                exact = _exact(self.module, inputs)
        except (NotImplementedError, RuntimeError) as error:
            return f"it cannot be computed in float64, to compare with ({_first_line(error)})"
        found = self.kernels(*inputs), exact, self.module(*inputs)
        return [Compared(*each) for each in zip(*found, strict=True)]

    def _drawn_again(self, n: int, seed: int, first: list[Compared]) -> Report:
        """The report on a result of few elements for many seeds, each brought to one scale.
        Twice the error of one number is exceeded by chance: that of a loss in 3 of 10 draws."""
        draws = [first, *(self._compared(seed + draw) for draw in range(1, _DRAWS))]
        parts = [d[n].scaled() for d in draws if not isinstance(d, str)]
        out, want, theirs = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        return acceptable(out, want, theirs, theirs.dtype)


def lengths_in(region: Region) -> dict[fx.Node, tuple[int, int]]:
    """The least and the largest value of each tensor of lengths with which masks are valid.
    Every query sees a key, and none sees more keys than there are. What is seen begins with the
    first key, unless nothing else is hidden, or the integers are lengths as well."""
    g, found = region.graph, dict[fx.Node, tuple[int, int]]()
    starts = dict[fx.Node, tuple[int, int]]()
    for place, o in enumerate(region.inputs):
        if o.lengths is None:
            continue
        readers = [n for n in g.nodes if g.inputs[place] in n.inputs]
        causal = any(n.attributes.get("causal", n.attributes.get("is_causal")) for n in readers)
        rows = extent(g.nodes[readers[0].inputs[0]].shape[-2]) if causal else 1
        offset, most = o.lengths
        if readers[0].attributes.get("lower"):
            others = lookup(g.nodes[readers[0].inputs[0]].operator).masks
            starts[o.node] = (-offset, (0 if others else most - 1) - offset)
            continue
        found[o.node] = (rows - offset, most - (rows - 1) - offset)
    return starts | found


# ------------------------------------------------------------------------------------ the subgraph


def alone(region: Region) -> tuple[fx.Graph, Region]:
    """A region as a graph, with names that depend on nothing else, and the region in that graph.

    It includes views and casts between the region's nodes, and between these and the region's
    operands. It also includes masks that kernels replace by lengths.
    """
    ends = [r.node for r in region.outputs]
    stops, inside = {o.node for o in region.inputs}, {*region.nodes, *makers(region.nodes)}
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}

    def belongs(n: fx.Node) -> bool:
        return n not in stops and (n in inside or is_free(n))

    found = ordered(ends, lambda n: n.all_input_nodes if belongs(n) else ())
    # limits that are read behind another input are not reached from the results
    for node in dict.fromkeys((*found, *(o.node for o in region.inputs))):
        if not belongs(node):
            new[node] = graph.create_node("placeholder", f"x{len(new)}", name=f"x{len(new)}")
        else:
            args, kwargs = fx.map_arg((node.args, node.kwargs), new.__getitem__)
            new[node] = graph.create_node(node.op, node.target, args, kwargs, f"n{len(new)}")
        new[node].meta = dict(node.meta)
    graph.output(tuple(new[n] for n in ends))
    return graph, moved(region, new)


def moved(region: Region, new: Mapping[fx.Node, fx.Node]) -> Region:
    """A region in a copy of its graph, whose nodes are given by those of the graph."""

    def lengths(shape: tuple[Length, ...]) -> tuple[Length, ...]:
        return tuple(Size(new[n.node], n.dim) if isinstance(n, Size) else n for n in shape)

    outputs = tuple(
        replace(
            r, node=new[r.node], shape=lengths(r.shape),
            expanded=None if r.expanded is None else lengths(r.expanded),
        )
        for r in region.outputs
    )  # fmt: skip
    inputs = tuple(replace(o, node=new[o.node], shape=lengths(o.shape)) for o in region.inputs)
    nodes = tuple(new[n] for n in region.nodes if n in new)
    return Region(nodes, region.graph, inputs, outputs, extents=region.extents)


# ---------------------------------------------------------------------------------------- numbers


class _Exact(fx.Interpreter):
    """An interpreter that runs a module in float64, also where nodes request other types."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = (_promoted(v) for v in (args, kwargs))
        if str(target).startswith("aten._scaled_dot_product_"):
            return attention(target, args, kwargs)
        result = super().call_function(target, args, kwargs)
        return _promoted(result)


def _promoted(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return torch.float64 if value in _NUMBERS else value
    if isinstance(value, torch.Tensor):
        return value.double() if value.dtype in _NUMBERS else value
    if isinstance(value, tuple | list):
        return type(value)(map(_promoted, value))
    if isinstance(value, dict):
        return {k: _promoted(v) for k, v in value.items()}
    return value


def _exact(module: fx.GraphModule, inputs: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    return _Exact(module).run(*map(_promoted, inputs))


def _drawn(
    like: Any,
    scale: float,
    generator: torch.Generator,
    positive: bool,
    integers: tuple[int, int],
) -> Any:
    if not isinstance(like, torch.Tensor):
        return hint_of(like)
    sizes, strides = ([hint_of(d) or 0 for d in s] for s in (like.shape, like.stride()))
    room = 1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True)) if all(sizes) else 0
    if like.is_floating_point():
        flat = torch.randn(room, generator=generator, device=like.device) * scale
        flat = (flat.abs() if positive else flat).to(like.dtype)
    else:
        low, high = integers
        if room <= high + 1 - low:  # each once: of equal places any row may be stored
            flat = torch.randperm(high + 1 - low, generator=generator, device=like.device)[:room]
            flat = (low + flat).to(like.dtype)
        else:
            flat = torch.randint(low, high + 1, (room,), generator=generator, device=like.device)
            flat = flat.to(like.dtype)
    return flat.as_strided(sizes, strides)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _scales(graph: fx.Graph) -> dict[fx.Node, float]:
    """Scales of the second operands of products: the root of the number of summed products."""
    found: dict[fx.Node, float] = {}
    for node in graph.nodes:
        if node.target not in _PRODUCTS:
            continue
        operand = node.args[_PRODUCTS[node.target]]
        length = hint_of(operand.meta["val"].shape[-2]) or 1
        while operand.op == "call_function" and operand.target in _VIEWS:
            operand = operand.args[0]
        found[operand] = length**-0.5
    return found


def _sums(graph: fx.Graph) -> dict[fx.Node, float]:
    """The logarithm of the number of keys for each logsumexp that backward passes read.
    Weights are then at most of order 1, as behind a forward pass."""
    found: dict[fx.Node, float] = {}
    for node in graph.nodes:
        if isinstance(entry_of(node), AttentionBackward):
            a = arguments_of(node)
            made = reachable([a["logsumexp"]], lambda n: n.all_input_nodes)
            keys = hint_of(a["key"].meta["val"].shape[-2]) or 1
            found |= {n: log(keys) for n in made if n.op == "placeholder"}
    return found


def _strides(t: torch.Tensor) -> list[int]:
    """The strides of dimensions with several elements."""
    return [s for n, s in zip(t.shape, t.stride(), strict=True) if n > 1 and t.numel()]


def _sizes(value: Any) -> list[int | None]:
    if isinstance(value, torch.Tensor):
        return [hint_of(d) for d in (*value.shape, *value.stride())]
    return [hint_of(value)]


def described(value: Any) -> str:
    """A text that is equal for values of one type, with the same sizes and strides."""
    if not isinstance(value, torch.Tensor):
        return f"{hint_of(value)}"
    sizes = [f"{'~' * isinstance(d, torch.SymInt)}{hint_of(d)}" for d in value.shape]
    strides = [hint_of(d) for d in value.stride()]
    return f"{value.dtype} {value.device} [{', '.join(sizes)}] {strides}"
