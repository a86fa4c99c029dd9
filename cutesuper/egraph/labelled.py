"""Labels: every dimension of every tensor of a region gets a name by unification.

Element-wise operators unify the dimensions that they align, a matrix product contracts one label.
An axis of a block program then splits a *label*, one choice for all tensors, so operands that do
not belong together never meet, even if their extents agree.

before: ``X[16, 4096] @ W[4096, 4096]``; after: ``X[M, K] @ W[K, N]``, K and N different labels.

A `Region` is the part of a kernel graph that one kernel computes. An operand is a `View`, a value
whose dimensions are read in another order. A transpose remains only where its result may have to be
stored; it gives labels in its own order and no operation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

from cutesuper.egraph.clock import look
from cutesuper.errors import SearchError
from cutesuper.ir.block import LOAD
from cutesuper.ir.border import PartOf
from cutesuper.ir.dependence import Dependence
from cutesuper.ir.dims import Dim, Shape
from cutesuper.ir.dtypes import DType, float32
from cutesuper.ir.operators.base import Attributes, Items, Operator, facets, one_or_all
from cutesuper.ir.precision import precision_of
from cutesuper.ir.relations import Classes


class View(NamedTuple):
    """A value of a region; dimension ``i`` of the view is dimension ``order[i]`` of the value."""

    value: int
    order: tuple[int, ...]


class RegionOp(NamedTuple):
    """One operator of a region; its attributes are stored so that regions can be compared."""

    kind: str
    operands: tuple[View, ...]
    attributes: Items
    shape: Shape

    @property
    def facets(self) -> Operator:
        """The operator's entry in the table."""
        return facets(self.kind)

    @property
    def hides_nothing(self) -> bool:
        """True for a mask by positions alone of one column, or of one row that sees all."""
        if not self.facets.masks or self.facets.integers:
            return False
        one_row = self.shape[-2] == 1 and dict(self.attributes)["alignment"] == "bottom_right"
        return one_row or self.shape[-1] == 1


@dataclass(frozen=True)
class Region:
    """The computation of one kernel. Value ``i`` is input ``i``, or operation ``i - len(inputs)``.

    Equal regions have the same kernels, whatever their tensors are called.

    Attributes:
        inputs: shape of every input tensor.
        input_dtypes: element type of every input.
        ops: operators; a ``transpose`` copies its operand, which is the view that it makes.
        outputs: the stored values, with dimensions in the stored order.
        output_dtypes: element type of every output.
        pages: the inputs that are gathered from pages, with the number of positions in a page.
        taken: the inputs that are rows of tables.
        put: the outputs that are rows put into another tensor.
        parts: the inputs (``in0``) and outputs (``out0``) that lie in larger tensors.
    """

    inputs: tuple[Shape, ...]
    input_dtypes: tuple[DType, ...]
    ops: tuple[RegionOp, ...]
    outputs: tuple[View, ...]
    output_dtypes: tuple[DType, ...]
    pages: tuple[tuple[int, int], ...] = ()
    taken: tuple[TakenRows, ...] = ()
    put: tuple[PutRows, ...] = ()
    parts: tuple[tuple[str, PartOf], ...] = ()

    def __hash__(self) -> int:
        """Hash of all fields, made once: searches look for a region many times."""
        known = self.__dict__.get("_hash")
        if known is None:
            known = hash(tuple(self.__dict__[f.name] for f in fields(self)))
            object.__setattr__(self, "_hash", known)
        return known

    def __getstate__(self) -> dict[str, Any]:
        """The fields; hashes of texts are others in another process."""
        return {k: v for k, v in self.__dict__.items() if k != "_hash"}

    @property
    def precisions(self) -> tuple[str, ...]:
        """Precisions of its products; see `ir.precision`."""
        found = (precision_of(dict(op.attributes)) for op in self.ops if op.facets.contracts)
        return tuple(dict.fromkeys(found))

    @property
    def exact(self) -> bool:
        """True if all numbers are float32: no input or output is off by more than kernels are."""
        return all(t == float32 or t.integer for t in (*self.input_dtypes, *self.output_dtypes))

    @property
    def output_shapes(self) -> tuple[Shape, ...]:
        """Shape of every output, as it is stored."""
        shapes = (*self.inputs, *(op.shape for op in self.ops))
        return tuple(tuple(shapes[v.value][d] for d in v.order) for v in self.outputs)


@dataclass(frozen=True)
class TakenRows:
    """An input of a region that is rows of a table, which an index names.

    Attributes:
        input: the input; its shape is that of the rows.
        table: shape of the table.
        index: shape of the index.
        index_dtype: its element type.
    """

    input: int
    table: Shape
    index: Shape
    index_dtype: DType


@dataclass(frozen=True)
class PutRows:
    """An output of a region that is put into a tensor, at the places that indices name.

    Attributes:
        output: the output; its shape is that of the rows.
        base: shape of the tensor.
        index: shape of each index.
        index_dtypes: their element types.
        dims: the dimension whose places each of them names.
    """

    output: int
    base: Shape
    index: Shape
    index_dtypes: tuple[DType, ...]
    dims: tuple[int, ...]

    def places(self) -> tuple[str, ...]:
        """Names of the indices in programs of the region."""
        return place_names(self.output, len(self.dims))


def place_names(output: int, count: int) -> tuple[str, ...]:
    """Names of the indices by which an output of a region is put into a tensor."""
    return tuple(f"place{output}" + (f"_{k}" if k else "") for k in range(count))


LabelMap = tuple[str | None, ...]


@dataclass(frozen=True, eq=False)
class LabelledOp:
    """An operator on labelled values.

    Attributes:
        kind: ``load``, or an operator of the table.
        inputs: indices of earlier operations.
        labels: labels of the value.
        attributes: element-wise: the operator's; ``load``: ``tensor`` (its number) and ``map``, and
            for rows of a table the name of the ``index``;
            ``causal_mask`` and other masks: the operator's, and the labels of its ``rows`` and
            ``columns`` (see `ir.block`).
        over: the label that ``matmul``, ``sum``, ``mean`` and ``max`` reduce.
    """

    kind: str
    inputs: tuple[int, ...]
    labels: frozenset[str]
    attributes: Attributes
    over: str | None = None

    @property
    def facets(self) -> Operator:
        """The operator's entry in the table; an empty one for a load."""
        return facets(self.kind)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LabelledOp):
            return NotImplemented
        same = self.kind == other.kind and self.inputs == other.inputs
        same = same and self.labels == other.labels and self.over == other.over
        return same and Items(self.attributes) == Items(other.attributes)

    __hash__ = None  # type: ignore[assignment]  # attributes are a dictionary


@dataclass(frozen=True)
class LabelledProgram:
    """A region with labels in place of dimensions.

    Attributes:
        dims: extent of every label, those of the first output first and in its order.
        ops: loads and operators.
        outputs: for each output the operation and the label of each stored dimension.
        put: the outputs that are put into a tensor, with the dimensions whose places indices name.
    """

    dims: dict[str, Dim]
    ops: tuple[LabelledOp, ...]
    outputs: tuple[tuple[int, LabelMap], ...]
    put: tuple[tuple[int, tuple[int, ...]], ...] = ()

    def store(self, n: int) -> Attributes:
        """Attributes of the store of an output."""
        attributes: Attributes = {"tensor": f"out{n}", "map": self.outputs[n][1]}
        for output, dims in self.put:
            if output == n:
                index = one_or_all(place_names(n, len(dims)))
                attributes |= {"index": index, "base": f"base{n}", "dim": one_or_all(dims)}
        return attributes

    @cached_property
    def dependence(self) -> Dependence:
        """Dependences between the operations."""
        return Dependence([op.inputs for op in self.ops])

    @property
    def reduced(self) -> tuple[str, ...]:
        """Labels over which anything is reduced or contracted."""
        return tuple(dict.fromkeys(op.over for op in self.ops if op.over is not None))

    def of_kind(self, *kinds: str) -> tuple[LabelledOp, ...]:
        """All operations of these kinds."""
        return tuple(op for op in self.ops if op.kind in kinds)

    def needed(self) -> LabelledProgram:
        """The same program without operations that no output needs."""
        needed = {i for i, _ in self.outputs}
        for i in reversed(range(len(self.ops))):
            if i in needed:
                needed.update(self.ops[i].inputs)
        index = {i: n for n, i in enumerate(sorted(needed))}
        ops = tuple(
            replace(self.ops[i], inputs=tuple(index[j] for j in self.ops[i].inputs)) for i in index
        )
        return replace(self, ops=ops, outputs=tuple((index[i], m) for i, m in self.outputs))


def label(region: Region) -> LabelledProgram:
    """Label the dimensions of a region.

    An input in two roles (``X @ X^T``) is loaded once for each, as ``X[M, K]`` and ``X[N, K]``. The
    same holds for values computed from it: in ``S @ S^T`` with ``S = relu(X)``, S is computed as
    ``S[M, K]`` and as ``S[N, K]``.

    Raises:
        SearchError: too much would have to be computed again.
    """
    found = _Unification(region, _shared(region))
    if not found.consistent:
        found = _separate(region) or _separate(_unshared(region))
    if found is None:
        raise SearchError("a value is used in two roles (one of its labels would occur twice)")
    return _beside_rows(_side_by_side(found)).program()


def classes(region: Region) -> list[tuple[int, ...]]:
    """The class of each dimension of each value, as `label` makes them, or coarser.
    Dimensions that get one label in a part of the region are in one class here: also where such a
    part has a value in one role only, and the region in two."""
    found, alike = _Unification(region, _shared(region)), dict[Any, Slot]()
    joined = found.classes.copy()
    for shared, own in found.operands():
        joined.join(own, alike.setdefault((shared, found.extents[own]), own))
    owners: list[Any] = [(v, 0) for v in range(len(region.inputs))]
    owners += range(len(region.inputs), len(region.inputs) + len(region.ops))
    return [tuple(map(joined.find, found.dims(o))) for o in owners]


Use = tuple[int, int]  # operation, position of the operand
Group = tuple[int, int]  # input, number of the load


#: most operators of a region in which every use has its own computation
MAX_UNSHARED = 96


def label_apart(region: Region, program: LabelledProgram) -> LabelledProgram | None:
    """Label a region with a load for every use of an input; None if that helps no product.

    before: keys that are values, too, are ``X[N, K]`` where scores contract K and the result has it
    as its columns: one loop over K for both; after: ``X[N, K]`` and ``X[N, N2]``.

    Args:
        region: the region.
        program: what `label` gives for it.
    """
    products = [op for op in program.ops if op.facets.contracts]
    contracted = {(i, op.over) for op in products for i in op.inputs}
    result = {(i, d) for op in products for i in op.inputs for d in op.labels}
    both = contracted & result
    if not any(program.ops[i].kind == LOAD for i, _ in both):
        return None
    value = {u: region.ops[u[0]].operands[u[1]].value for u in _uses(region)}
    found = _Unification(region, {u: (v, n) for n, (u, v) in enumerate(value.items())})
    return found.program() if found.consistent else None


def _uses(region: Region) -> list[Use]:
    """All uses of inputs."""
    return [
        (i, j)
        for i, op in enumerate(region.ops)
        for j, view in enumerate(op.operands)
        if view.value < len(region.inputs)
    ]


def _shared(region: Region) -> dict[Use, Group]:
    """One load of each input for all its uses."""
    return {u: (region.ops[u[0]].operands[u[1]].value, 0) for u in _uses(region)}


def _separate(region: Region) -> _Unification | None:
    """Give every use of an input its own load, then join the loads that can be joined."""
    uses = _uses(region)
    value = {u: region.ops[u[0]].operands[u[1]].value for u in uses}
    groups: dict[Use, Group] = {u: (value[u], n) for n, u in enumerate(uses)}
    alone = _Unification(region, dict(groups))
    if not alone.consistent:
        return None
    apart = alone.apart()
    # only all operators together say which rows of products are single ones
    asks_all = alone.repeats_beside_rows
    for n, u in enumerate(uses):
        for other in dict.fromkeys(groups[v] for v in uses[:n] if value[v] == value[u]):
            dims = range(len(region.inputs[value[u]]))
            a, b = alone.first[groups[u]], alone.first[other]
            joined = apart.joined([(a + d, b + d) for d in dims])
            if joined is None:
                continue
            if asks_all and not _Unification(region, {**groups, u: other}).consistent:
                continue
            apart, groups[u] = joined, other
            break
    return _Unification(region, groups)


@dataclass(frozen=True)
class _Apart:
    """Classes of dimensions of which some must stay apart: those of one value.

    To ask if two may be joined takes 10 us; to unify all operators of a region of 40, 1 ms.

    Attributes:
        classes: of dimensions.
        others: for each class, by its representative, those that it must not join.
    """

    classes: Classes[Slot]
    others: dict[Slot, set[Slot]]

    def joined(self, pairs: Iterable[tuple[Slot, Slot]]) -> _Apart | None:
        """The same with pairs of dimensions joined; None if two must stay apart."""
        classes, others = self.classes.copy(), dict(self.others)
        for a, b in pairs:
            a, b = classes.find(a), classes.find(b)
            if a == b:
                continue
            classes.join(a, b)
            others[b] = {classes.find(c) for c in others.pop(a, set()) | others.get(b, set())}
            if b in others[b]:
                return None
        return _Apart(classes, others)


def _unshared(region: Region) -> Region:
    """The region with a separate computation for each use of a value.
    Equal ones are merged again when their labels are known. Raises SearchError past `MAX_UNSHARED`
    operators."""
    inputs, ops = len(region.inputs), list[RegionOp]()
    made: list[View] = []  # operands whose operators are still to be made
    todo: list[tuple[View, bool]] = [(v, False) for v in reversed(region.outputs)]
    while todo:
        view, ready = todo.pop()
        if view.value < inputs:
            made.append(view)
            continue
        op = region.ops[view.value - inputs]
        if not ready:
            todo.append((view, True))
            todo += ((v, False) for v in reversed(op.operands))
            continue
        if len(ops) == MAX_UNSHARED:
            raise SearchError(
                "a value is used in two roles, and too much depends on it to compute it twice"
            )
        first = len(made) - len(op.operands)
        ops.append(op._replace(operands=tuple(made[first:])))
        made[first:] = [View(inputs + len(ops) - 1, view.order)]
    return replace(region, ops=tuple(ops), outputs=tuple(made))


def _side_by_side(found: _Unification) -> _Unification:
    """Give products of one operand a common label for their own dimensions.

    Keys and values of an attention, ``X[M, K] @ W[K, N]`` and ``X[M, K] @ V[K, N2]`` with N2 = N:
    as ``V[K, N]`` both are computed by one kernel, which loads X once. Labels over which anything
    is reduced stay as they are: no kernel would loop over one of them and divide the other. Beside
    a product of another width all keep labels of their own: see `BlockProgram.alternatives`.
    """
    alike: dict[Any, list[Slot]] = {}
    reduced = {found.roots[s] for s in found.reduced()}
    for shared, own in found.operands():
        if found.roots[own] not in reduced:
            alike.setdefault(shared, []).append(own)
    for first, *others in alike.values():
        if any(found.extents[other] != found.extents[first] for other in others):
            continue
        for other in others:
            if found.roots[first] == found.roots[other]:
                continue
            joined = _Unification(found.region, found.groups, (*found.equal, (first, other)))
            found = joined if joined.consistent else found
    return found


def _beside_rows(found: _Unification) -> _Unification:
    """Give rows that are put somewhere the labels of an output with which they share none.
    Both have the same extents, the row's own among them.

    before: ``K[M, N]`` with positions and ``V[M2, N2]`` as it is, both into caches, two kernels;
    after: ``V[M, N]``, one kernel.
    """
    views = [found.view(v) for v in found.region.outputs] if found.region.put else []
    for p in found.region.put:
        own = views[p.output]
        for other in views:
            both = [*zip(reversed(own), reversed(other), strict=False)]
            pairs = [(a, b) for a, b in both if found.extents[a] == found.extents[b] != 1]
            met = {found.roots[a] for a in own} & {found.roots[b] for b in other}
            if met or both[0] not in pairs:
                continue
            joined = _Unification(found.region, found.groups, (*found.equal, *pairs))
            if joined.consistent:
                return _beside_rows(joined)
    return found


Slot = int  # a dimension of a value or a load, numbered one value after the other


class _Unification:
    """Union-find over the dimensions of all values and loads of a region.

    Args:
        region: the region to label.
        groups: the load that every use of an input reads.
        equal: dimensions that get one label although no operator requires it.

    Attributes:
        first: for each load and each value of an operation its first dimension.
        extents: number of elements of every dimension.
        classes: of the dimensions that are unified.
        roots: the representative of the class of every dimension.
        consistent: no value has a label twice.
    """

    def __init__(
        self, region: Region, groups: dict[Use, Group], equal: Sequence[tuple[Slot, Slot]] = ()
    ) -> None:
        look()
        self.region, self.groups, self.equal = region, groups, equal
        self._inputs = len(region.inputs)
        self._facets = [op.facets for op in region.ops]
        self.dead: list[Slot] = []  # dimensions of extent 1 that a reduction left behind
        self.repeated: list[Slot] = []  # such that meet larger ones
        self.first: dict[Any, Slot] = {}
        self.extents: list[Dim] = []
        for g in groups.values():
            if g not in self.first:
                self._place(g, region.inputs[g[0]])
        for i, op in enumerate(region.ops):
            self._place(self._inputs + i, op.shape)
        self.classes = Classes[Slot]()
        self._join = self.classes.join
        for i, op in enumerate(region.ops):
            self._unify_op(i, op, self._facets[i])
        for a, b in equal:
            self._join(a, b)
        self.roots = [self.classes.find(s) for s in range(len(self.extents))]
        self.consistent = self._one_label_each()

    def _place(self, owner: Any, shape: Shape) -> None:
        self.first[owner] = len(self.extents)
        self.extents += shape

    # ------------------------------------------------------------------------------- unification

    def _owner(self, use: Use) -> Any:
        value = self.region.ops[use[0]].operands[use[1]].value
        return self.groups[use] if value < self._inputs else value

    def slots(self, use: Use) -> list[Slot]:
        """The dimensions of an operand, in the order of its view."""
        first = self.first[self._owner(use)]
        return [first + d for d in self.region.ops[use[0]].operands[use[1]].order]

    def result(self, i: int) -> range:
        """The dimensions of the result of an operation."""
        first = self.first[self._inputs + i]
        return range(first, first + len(self.region.ops[i].shape))

    def dims(self, owner: Any) -> range:
        """The dimensions of a load or of the result of an operation."""
        if isinstance(owner, tuple):
            first = self.first[owner]
            return range(first, first + len(self.region.inputs[owner[0]]))
        return self.result(owner - self._inputs)

    def _align(self, operand: Sequence[Slot], result: Sequence[Slot]) -> None:
        """Unify from the last dimension on, except where the operand is broadcast."""
        extents = self.extents
        for a, b in zip(reversed(operand), reversed(result), strict=False):
            if extents[a] == extents[b]:
                self._join(a, b)
            else:
                self.repeated.append(a)

    def _unify_op(self, i: int, op: RegionOp, how: Operator) -> None:
        result = self.result(i)
        operands = [self.slots((i, j)) for j in range(len(op.operands))]
        if how.contracts:
            a, b = operands
            self._join(a[-1], b[-2])
            self._join(a[-2], result[-2])
            self._join(b[-1], result[-1])
            self._align(a[:-2], result[:-2])
            self._align(b[:-2], result[:-2])
        elif how.permutes:
            for a, b in zip(operands[0], result, strict=True):
                self._join(a, b)
        elif how.reduces:
            dim = dict(op.attributes)["dim"]
            for d, (a, b) in enumerate(zip(operands[0], result, strict=True)):
                if d != dim or self.extents[a] == 1:
                    self._join(a, b)
                else:
                    self.dead.append(b)
        else:
            if how.masks and len(operands) > 1:  # integers have the first dimensions
                operands[1] += result[len(operands[1]) :]
            for slots in operands:
                self._align(slots, result)

    @property
    def repeats_beside_rows(self) -> bool:
        """True if there are both dimensions that are repeated and products of one row."""
        products = (i for i, how in enumerate(self._facets) if how.contracts)
        return bool(self.repeated) and any(
            self.extents[self.slots((i, 0))[-2]] == 1 for i in products
        )

    def apart(self) -> _Apart:
        """The classes of dimensions, of which those of one value must stay apart."""
        others: dict[Slot, set[Slot]] = {}
        for owner in self.first:
            own = set(self._larger_of(owner))
            for root in own:
                others.setdefault(root, set()).update(own - {root})
        return _Apart(self.classes, others)

    def _one_label_each(self) -> bool:
        """True if no value has a label twice, or the label of a single row beside one it meets."""
        rows = self._single_rows(self._larger()) if self.repeated else set[Slot]()
        return rows.isdisjoint(self.roots[s] for s in self.repeated) and all(
            len(set(own)) == len(own) for own in map(self._larger_of, self.first)
        )

    def _larger_of(self, owner: Any) -> list[Slot]:
        """The classes of the dimensions of a value that have other extents than 1."""
        roots, extents = self.roots, self.extents
        return [roots[s] for s in self.dims(owner) if extents[s] != 1]

    def operands(self) -> Iterator[tuple[tuple[Slot, ...], Slot]]:
        """The classes of each operand of a product, and the other operand's own dimension."""
        for i, how in enumerate(self._facets):
            if how.contracts:
                a, b = self.slots((i, 0)), self.slots((i, 1))
                for shared, own in ((a, b[-1]), (b, a[-2])):
                    yield tuple(self.roots[s] for s in shared), own

    def reduced(self) -> Iterator[Slot]:
        """Dimensions over which an operator contracts or reduces."""
        for i, op in enumerate(self.region.ops):
            if self._facets[i].contracts:
                yield self.slots((i, 0))[-1]
            elif self._facets[i].reduces and op.operands:
                yield self.slots((i, 0))[dict(op.attributes)["dim"]]

    # ------------------------------------------------------------------------------- the program

    def program(self) -> LabelledProgram:
        """The labelled program (only if consistent)."""
        self.names = self._names()
        ops: list[LabelledOp] = []
        index: dict[Any, int] = {}
        for i, op in enumerate(self.region.ops):
            args = [self._operand((i, j), ops, index) for j in range(len(op.operands))]
            index[self._inputs + i] = self._operation(i, op, args, ops, index)
        outputs = tuple((index[v.value], self._map(self.view(v))) for v in self.region.outputs)
        order = [n for _, m in outputs for n in m if n is not None]
        order += [n for op in ops if op.kind == LOAD for n in op.attributes["map"] if n]
        extents = {name: self.extents[r] for r, name in self.names.items()}
        dims = {n: extents[n] for n in dict.fromkeys(order)}
        put = tuple((p.output, p.dims) for p in self.region.put)
        return LabelledProgram(dims, tuple(ops), outputs, put)

    def view(self, view: View) -> list[Slot]:
        """The dimensions of a stored value, in the order of its view."""
        first = self.first[view.value]
        return [first + d for d in view.order]

    def _name(self, slot: Slot) -> str | None:
        return self.names.get(self.roots[slot])

    def _map(self, slots: Iterable[Slot]) -> LabelMap:
        """The label of each dimension; of several single rows with one label the last has it."""
        names = [self._name(s) for s in slots]
        return tuple(n if n not in names[i + 1 :] else None for i, n in enumerate(names))

    def _operand(self, use: Use, ops: list[LabelledOp], index: dict[Any, int]) -> int:
        owner = self._owner(use)
        if not isinstance(owner, tuple):
            return index[owner]
        mapping = self._map(self.dims(owner))
        key = (owner[0], mapping)  # loads with one map are one load
        if key not in index:
            labels = frozenset(n for n in mapping if n is not None)
            attributes: Attributes = {"tensor": owner[0], "map": mapping}
            if any(taken.input == owner[0] for taken in self.region.taken):
                attributes["index"] = f"index{owner[0]}"
            ops.append(LabelledOp("load", (), labels, attributes))
            index[key] = len(ops) - 1
        return index[key]

    def _operation(
        self, i: int, op: RegionOp, args: list[int], ops: list[LabelledOp], index: dict[Any, int]
    ) -> int:
        how = self._facets[i]
        if how.permutes or how.converts or how.puts:
            return args[0]  # the type, and the place, are those of the stored tensor
        labels = frozenset[str]().union(*(ops[a].labels for a in args))
        kind, over, attributes = op.kind, None, dict(op.attributes)
        if how.contracts:
            inner = self.roots[self.slots((i, 0))[-1]]
            # one of extent 1 has a label if it is a row elsewhere, maybe that of the result
            beside = any(self.roots[s] == inner for s in self.result(i))
            over = None if beside else self.names.get(inner)
            kind = kind if over else "mul"
            attributes = {}  # the precision is that of the region
        elif how.reduces:
            slot = self.slots((i, 0))[attributes["dim"]]
            if self.extents[slot] == 1:  # the operand itself; a single row may have a label
                return args[0]
            over, attributes = self.names[self.roots[slot]], {}
        elif how.turns:
            slot = self.result(i)[-1]
            if self.extents[slot] == 1:
                return args[0]
            attributes["along"] = self.names[self.roots[slot]]
        elif how.masks and how.integers:
            attributes |= self._counted(i, op)
        elif how.masks:
            if op.hides_nothing:
                return args[0]
            attributes |= self._causal(i, op)
        key = kind, tuple(args), over, tuple(sorted(attributes.items()))
        if key not in index:  # otherwise another use already computed it
            labels = labels if over is None else labels - {over}
            ops.append(LabelledOp(kind, key[1], labels, attributes, over))
            index[key] = len(ops) - 1
        return index[key]

    def _causal(self, i: int, op: RegionOp) -> Attributes:
        """The labels of a mask by positions alone. Raises SearchError."""
        rows, columns = self._rows_and_columns(i)
        if rows is None:
            raise SearchError(
                f"{op.kind} of one row, 'top_left': only its first column is seen; "
                "use 'bottom_right' for a row that sees all columns"
            )
        return {"rows": rows, "columns": columns}

    def _rows_and_columns(self, i: int) -> tuple[str | None, str | None]:
        """The labels of the last two dimensions of a mask."""
        *_, rows, columns = (None, *map(self._name, self.result(i)))
        return rows, columns

    def _counted(self, i: int, op: RegionOp) -> Attributes:
        """Attributes of a mask with lengths or labels. Raises SearchError."""
        rank = len(op.shape)
        rows, columns = self._rows_and_columns(i)
        if columns is None:
            raise SearchError(
                f"{op.kind} of one column: there is no label to count along; leave it out, or pad "
                "the columns to two"
            )
        own = dict(op.attributes)
        causal = bool(own.get("causal")) and op.shape[-2] != 1
        own |= {"causal": causal} if "causal" in own else {}
        limits = self.slots((i, 1))
        if "lower" in own and len(limits) == rank and self.extents[limits[-2]] != 1:
            own["rises"] = rows  # limits of rows do not fall along them
        return {**own, "columns": columns, "rows": rows if causal else None}

    # ------------------------------------------------------------------------------------- names

    def _names(self) -> dict[Slot, str]:
        """A readable name for every class of dimensions that needs a label."""
        wanted = self._larger()
        wanted |= self._single_rows(wanted)
        if not wanted:  # all tensors have one element, in a row
            outputs = [v for v in self.region.outputs if v.order]
            wanted = {self.roots[self.view(v)[-1]] for v in outputs}
        names: dict[Slot, str] = {}
        used: Counter[str] = Counter()
        for slot, name in self._roles():
            if len(names) == len(wanted):
                break
            root = self.roots[slot]
            if root in wanted and root not in names:
                used[name] += 1
                names[root] = name if used[name] == 1 else f"{name}{used[name]}"
        return names

    def _larger(self) -> set[Slot]:
        """Dimensions of other extents than 1."""
        return {root for root, e in zip(self.roots, self.extents, strict=True) if e != 1}

    def _single_rows(self, wanted: set[Slot]) -> set[Slot]:
        """Rows of extent 1: a matrix product without any other row label needs one.
        So does a mask with an integer for each row, where only its columns have a label."""
        dead = {self.roots[s] for s in self.dead}
        rows: set[Slot] = set()
        for i, how in enumerate(self._facets):
            if how.masks and how.integers and len(self.result(i)) > 1:
                row, column = (self.roots[s] for s in self.result(i)[-2:])
                if wanted <= {column} and row not in dead:
                    rows.add(row)
        for i, how in enumerate(self._facets):
            if not how.contracts:
                continue
            a, b = ({self.roots[s] for s in self.slots((i, j))} & wanted for j in (0, 1))
            row = self.roots[self.slots((i, 0))[-2]]
            if not a - b and b - a and row not in dead:
                rows.add(row)
        return rows

    def _roles(self) -> Iterator[tuple[Slot, str]]:
        """Dimensions with the name that their role suggests, strongest role first."""
        for i, how in enumerate(self._facets):
            if how.contracts:
                a, b = self.slots((i, 0)), self.slots((i, 1))
                yield from ((a[-1], "K"), (a[-2], "M"), (b[-1], "N"))
                yield from ((s, "B") for s in a[:-2] + b[:-2])
        for last in (True, False):  # reductions along rows first, whatever the order of the graph
            for i, op in enumerate(self.region.ops):
                if self._facets[i].reduces and op.operands:
                    slots = self.slots((i, 0))
                    dim = dict(op.attributes)["dim"]
                    if last == (dim == len(slots) - 1):
                        yield slots[dim], "K"
                        yield from zip(reversed(slots), ("N", "M", "B"), strict=False)
        for view in self.region.outputs:
            yield from zip(reversed(self.view(view)), ("N", "M", "B", "D"), strict=False)
        yield from ((s, "D") for s in range(len(self.extents)))
