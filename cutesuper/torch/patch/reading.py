"""Arguments that the layers of a module depend on, read from the code of its ``forward``.

A module is not called for this: what it takes besides a tensor is unknown. Its owner's code says
which arguments it is given. Assignments are followed in any order, so arguments are only told apart
where no order of them would make two layers take the same tensor.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Sequence

from torch import nn

from cutesuper.ir.relations import reachable


def operands(owner: nn.Module, name: str, layers: Sequence[str]) -> list[frozenset[str]]:
    """For each layer the arguments of its module's ``forward`` that its operand is made of.
    Only arguments that the owner gives count. Empty if a layer is not called there.

    Args:
        owner: of the module, which it calls.
        name: of the module in its owner.
        layers: names of layers in the module.
    """
    module = owner.get_submodule(name)
    code = _code(module)
    calls = [next(_calls(code, layer), None) for layer in layers] if code else []
    if code is None or None in calls:
        return []
    given, made_of = _given(owner, name), _made_of(code)

    def before(variable: str) -> set[str]:
        return made_of.get(variable, set())

    return [given.intersection(reachable(_names(c.args), before)) for c in calls if c is not None]


def _code(module: nn.Module) -> ast.AST | None:
    """The parsed ``forward`` of a module; None if it has no source."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(type(module).forward)))
    except (OSError, TypeError, SyntaxError):
        return None


def _calls(code: ast.AST, name: str) -> Iterator[ast.Call]:
    """Calls of ``self.name``."""
    for node in ast.walk(code):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == f"self.{name}":
            yield node


def _given(owner: nn.Module, name: str) -> frozenset[str]:
    """Names of the arguments that a module is given; those without a default if no call is seen."""
    parameters = inspect.signature(owner.get_submodule(name).forward).parameters
    found = {n for n, p in parameters.items() if p.default is p.empty}
    code = _code(owner)
    for call in _calls(code, name) if code else ():
        pairs = [
            *zip(parameters, call.args, strict=False),
            *((k.arg, k.value) for k in call.keywords),
        ]
        found |= {n for n, value in pairs if n and ast.unparse(value) != "None"}
    return frozenset(found)


def _names(nodes: Sequence[ast.AST]) -> set[str]:
    return {n.id for node in nodes for n in ast.walk(node) if isinstance(n, ast.Name)}


def _made_of(code: ast.AST) -> dict[str, set[str]]:
    """The names on the right of the assignments to each name."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(code):
        if isinstance(node, ast.Assign):
            for target in _names(node.targets):
                found.setdefault(target, set()).update(_names([node.value]))
    return found
