"""Values of a traced program that depend on none of its inputs.

They are computed once, when the program is traced, and kept as buffers of its module. Parameters,
buffers and other tensors that the function reads are inputs in this sense, since they may change.
A value that the caller could write to, because it is returned or changed in place, is made anew at
every call.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from cutesuper.ir.relations import reachable
from cutesuper.runtime.programs import KERNEL_DEVICES

#: where the ``meta`` of a traced module has the names of its `literals_of`
LITERALS = "literals"
#: the libraries whose operators give equal results for equal arguments, unless they draw numbers
_LIBRARIES = ("aten", "prims", "cutesuper")


def literals_of(program: torch.export.ExportedProgram) -> set[str]:
    """The names of the tensors that a function was written with (``torch.tensor([1, 2])``).
    The program is as ``torch.export`` leaves it, before decompositions."""
    names = program.graph_signature.inputs_to_lifted_tensor_constants
    fresh = torch.ops.aten.lift_fresh_copy.default
    given: list[Any] = [n.args[0] for n in program.graph.nodes if n.target is fresh]
    return {names[n.name] for n in given if n.name in names}


def unchanging(module: fx.GraphModule) -> set[fx.Node]:
    """The nodes whose values are the same at every call, and that may be kept."""
    literals = module.meta.get(LITERALS, ())
    found: set[fx.Node] = set()
    for n in module.graph.nodes:
        literal = n.op == "get_attr" and n.target in literals
        if literal or (_repeats(n) and found.issuperset(n.all_input_nodes)):
            found.add(n)
    return {n for n in found if not _escapes(n)}


def _repeats(node: fx.Node) -> bool:
    """True for an operator that gives equal tensors for equal arguments."""
    if node.op != "call_function":
        return False
    if node.target is getitem:
        return True
    target: Any = node.target
    if getattr(target, "namespace", "") not in _LIBRARIES or target._schema.is_mutable:
        return False
    return torch.Tag.nondeterministic_seeded not in target.tags


def _escapes(node: fx.Node) -> bool:
    """True if a value, or a view of it, is a result or is changed."""
    behind = reachable(node.users, lambda n: n.users if _shares(n) else ())
    return any(n.op == "output" or _changes(n) for n in behind)


def _shares(node: fx.Node) -> bool:
    """True for a node whose result may lie in the memory of an argument."""
    if node.op != "call_function":
        return False
    schema = getattr(node.target, "_schema", None)
    return schema is None or any(a.alias_info is not None for a in schema.arguments)


def _changes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def keep_unchanging(module: fx.GraphModule) -> None:
    """Compute what is unchanging, and put it in the place of what computes it.

    before: ``d = iota(8); m = ge(d, 4); y = region_0([x, m])``; after: ``y = region_0([x, m'])``.
    """
    graph, kept = module.graph, unchanging(module)
    ends = [n for n in graph.nodes if n in kept and n.op != "get_attr" and _crosses(n, kept)]
    values = _computed(module, set(reachable(ends, lambda n: n.all_input_nodes)))
    for n in ends:
        name = f"kept_{n.name}"
        module.register_buffer(name, values[n], persistent=False)
        with graph.inserting_before(n):
            new = graph.get_attr(name)
        new.meta = dict(n.meta)
        n.replace_all_uses_with(new, delete_user_cb=lambda user: user not in kept)
    for n in reversed(list(graph.nodes)):
        if n in kept and not n.users:
            graph.erase_node(n)


def _crosses(node: fx.Node, kept: Collection[fx.Node]) -> bool:
    """True for a tensor that something else reads; the parts of several are read one by one."""
    several = any(u.target is getitem for u in node.users)
    return not several and any(u not in kept for u in node.users)


def _computed(module: fx.GraphModule, nodes: Collection[fx.Node]) -> dict[fx.Node, Any]:
    """The values of nodes that depend on nothing else, ready for readers on any stream."""
    values: dict[fx.Node, Any] = {}
    with torch.inference_mode(False), torch.no_grad():
        for n in (n for n in module.graph.nodes if n in nodes):
            if n.op == "get_attr":
                path: Any = n.target
                literal: Any = functools.reduce(getattr, path.split("."), module)
                values[n] = literal.clone()  # one that was made in inference mode has no gradient
                continue
            args, kwargs = map_arg((n.args, n.kwargs), values.__getitem__)
            target: Any = n.target
            values[n] = target(*args, **kwargs)
    tensors = (t for t in values.values() if isinstance(t, torch.Tensor))
    for device in {t.device for t in tensors if t.device.type in KERNEL_DEVICES}:
        torch.cuda.synchronize(device)
    return values
