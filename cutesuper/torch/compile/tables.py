"""Gradients of tables, of which a step reads few rows.

Inductor adds the gradients of rows to a table of zeros in float32, rounds all of it, and adds it to
the table's other gradient, if there is one (the head of many models has the same weight). Of
Llama-3.2-1B's table that is 3.7 GB, 0.83 ms of a step of 8192 tokens; the rows that tokens name
take 0.1 of it.

before::

    sums = zeros(words, width).index_put(index, rows, accumulate=True)
    gradient = other + sums.to(bfloat16)

after: the tokens that name one word agree on one of them, whose row of ``sums`` has the gradients
of all of them::

    one = empty(words).index_put(index, arange(tokens))[index]
    sums = zeros(tokens, width).index_put(one, rows, accumulate=True)
    gradient = other.index_put(index, (other[index] + sums[one]).to(bfloat16))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from cutesuper.torch.aten.gathers import INDICES
from cutesuper.torch.aten.table import arguments_of
from cutesuper.torch.compile.maker import Maker

_aten, _prims = torch.ops.aten, torch.ops.prims
#: add rows by an index
_ADDS = (_aten.index_put.default, _aten._unsafe_masked_index_put_accumulate.default)
#: the indices are those of the rows that were read, which are checked there
_take, _put = _aten._unsafe_index.Tensor, _aten._unsafe_index_put.default
#: rows of a table for each that is named, from which on this moves fewer bytes
FEW = 4


def settle_tables(graph: fx.Graph) -> None:
    """Add few rows to the gradient of a table, in place of all of them. What did so stays, unused.

    Args:
        graph: with fake tensors in ``meta["val"]``.
    """
    if torch.are_deterministic_algorithms_enabled():
        return  # rows are added in any order
    for node in list(graph.nodes):
        if (found := _added_rows(node)) is not None:
            _replace(graph, found)


@dataclass(frozen=True)
class _Added:
    """Rows that are added to zeros.

    Attributes:
        index: integers, of any shape.
        rows: float32, with the dimensions of the index in front.
        mask: of the index, with a last dimension of 1; rows where it is false do not count.
        result: the sums in the type of the gradient, with the other gradient if there is one.
        other: that one.
    """

    index: fx.Node
    rows: fx.Node
    mask: fx.Node | None
    result: fx.Node
    other: fx.Node | None


def _added_rows(node: fx.Node) -> _Added | None:
    """The rows that a node adds to a table of zeros, if they are few."""
    if node.target not in _ADDS:
        return None
    a = arguments_of(node)
    [index, *others], rows, [reader, *more] = a["indices"], a["values"], node.users or [None]
    if others or more or not a.get("accumulate", True) or not _are_few(node, a["self"], index):
        return None
    if rows.meta["val"].shape != (*index.meta["val"].shape, node.meta["val"].shape[1]):
        return None
    if reader is None or reader.target is not _prims.convert_element_type.default:
        return None
    other = _other(reader)
    result = reader if other is None else next(iter(reader.users))
    return _Added(index, rows, a.get("mask"), result, other)


def _are_few(table: fx.Node, zeros: fx.Node, index: Any) -> bool:
    """True for a table of zeros in float32 with some rows added, few of all, by an index."""
    if zeros.target is not _aten.full.default or zeros.args[1] or index is None:
        return False
    t, named = table.meta["val"], index.meta["val"]
    if t.dim() != 2 or t.dtype is not torch.float32 or named.dtype not in INDICES:
        return False
    sizes = (*t.shape, *named.shape)
    return all(isinstance(n, int) for n in sizes) and FEW * named.numel() <= t.shape[0]


def _other(term: fx.Node) -> fx.Node | None:
    """The other term of a sum of the same type and shape; None if a term is only stored."""
    [reader, *more] = term.users or [None]
    if reader is None or more or reader.target is not _aten.add.Tensor or reader.kwargs:
        return None
    others = [n for n in reader.args if n is not term]
    if len(others) != 1 or not isinstance(others[0], fx.Node):
        return None
    own, given = term.meta["val"], others[0].meta["val"]
    return others[0] if (own.shape, own.dtype) == (given.shape, given.dtype) else None


def _replace(graph: fx.Graph, a: _Added) -> None:
    into = a.result.meta["val"]
    words, width = into.shape
    tokens = a.index.meta["val"].numel()
    with graph.inserting_before(a.result):
        make = Maker(graph, a.result)
        new = make.call
        index = new(_aten.reshape.default, a.index, [tokens])
        rows = a.rows
        if a.mask is not None:
            rows = new(_aten.where.self, a.mask, rows, make.full([], torch.float32))
        rows = new(_aten.reshape.default, rows, [tokens, width])
        of_token = {"start": 0, "step": 1, "dtype": torch.int64, "requires_grad": False}
        token = new(_prims.iota.default, tokens, **of_token, device=into.device)
        # of equal places either token is stored, and all read the same one
        chosen = new(_put, make.full([words], torch.int64), [index], token)
        one = new(_take, chosen, [index])
        sums = new(_put, make.full([tokens, width], torch.float32), [one], rows, True)
        mine = new(_take, sums, [one])
        table = a.other
        if table is None:
            table = make.full([words, width], into.dtype)
        else:
            # all rows are read before one is stored: Inductor (PyTorch 2.11 and 2.13) fuses no load
            # with a store at places that an index names
            before = new(_take, table, [index])
            before = new(_prims.convert_element_type.default, before, torch.float32)
            mine = new(_aten.add.Tensor, before, mine)
        mine = new(_prims.convert_element_type.default, mine, into.dtype)
        made = new(_put, table, [index], mine)
    a.result.replace_all_uses_with(made)
