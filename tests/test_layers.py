"""The direction of imports: one way between packages, no large circle of files, CuTe below only."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "cutesuper"
#: packages and modules of the top level, lowest first; those of one line may not import each other,
#: but for the road itself and what stands on its top
LAYERS = (
    ("errors", "version", "device"),
    ("ir",),
    ("targets", "autodiff", "egraph", "verify", "show"),
    ("skeletons",),
    ("search",),
    ("runtime", "measure"),
    ("differentiate", "pipeline", "progress", "report", "store"),
    ("given", "mirage", "tune"),
    ("api", "frontend", "nn", "ops", "patching"),
    ("", "cli", "demo"),
)
#: lines whose members know each other
TOGETHER = (6, 8, 9)
#: what CuTe DSL may be imported by: kernels, their building blocks, and what compiles them
CUTE = re.compile(r"(skeletons/(\w+/)?kernel|device|runtime)/")
#: files that import each other, at most
CIRCLE = 3


def modules() -> dict[str, Path]:
    """Every module of the package by its name without ``cutesuper.``."""
    found: dict[str, Path] = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(p for p in parts if p != "__init__")] = path
    return found


MODULES = modules()


def imports(path: Path, *, types: bool) -> Iterator[str]:
    """Modules of the package that a file imports, also inside of functions; ``types``: those under
    ``if TYPE_CHECKING`` as well."""

    def visit(node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and not types:
            return
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "cutesuper":
            base = (node.module or "")[len("cutesuper.") :]
            for alias in node.names:
                name = f"{base}.{alias.name}".lstrip(".")
                yield name if name in MODULES else base
        for child in ast.iter_child_nodes(node):
            yield from visit(child)

    yield from visit(ast.parse(path.read_text()))


def layer(package: str) -> int:
    return next(i for i, line in enumerate(LAYERS) if package in line)


def test_every_package_has_a_layer() -> None:
    assert {name.split(".")[0] for name in MODULES} == {p for line in LAYERS for p in line}


@pytest.mark.parametrize("package", [p for line in LAYERS for p in line])
def test_imports_go_one_way(package: str) -> None:
    own = layer(package)
    wrong: list[str] = []
    for name, path in MODULES.items():
        if name.split(".")[0] != package:
            continue
        for other in imports(path, types=True):
            top = other.split(".")[0]
            level = layer(top)
            if top != package and (level > own or (level == own and own not in TOGETHER)):
                wrong.append(f"{name} imports {other}")
    assert not wrong


def circles(edges: dict[str, set[str]]) -> list[set[str]]:
    """Strongly connected sets of more than one module (Tarjan)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(v: str) -> None:
        order[v] = low[v] = len(order)
        stack.append(v)
        for w in edges[v]:
            if w not in order:
                visit(w)
            if w in stack:
                low[v] = min(low[v], low[w])
        if low[v] == order[v]:
            i = stack.index(v)
            if len(stack) - i > 1:
                found.append(set(stack[i:]))
            del stack[i:]

    for v in edges:
        if v not in order:
            visit(v)
    return found


def test_circles_are_found() -> None:
    edges = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}
    assert circles(edges) == [{"b", "c"}]


def test_few_files_import_each_other() -> None:
    edges = {name: set(imports(path, types=False)) for name, path in MODULES.items()}
    edges = {n: {m for m in e if m in MODULES and m != n} for n, e in edges.items()}
    assert [c for c in circles(edges) if len(c) > CIRCLE] == []


def test_only_kernels_import_cute() -> None:
    wrong: list[str] = []
    for path in MODULES.values():
        place = path.relative_to(PACKAGE).as_posix()
        used = re.search(r"^\s*(import|from) cutlass", path.read_text(), re.M)
        if used and not CUTE.match(place):
            wrong.append(place)
    assert not wrong


def test_search_knows_skeletons_by_the_registry() -> None:
    allowed = {"registry", "base", "form", "cost"}
    wrong = [
        f"{name} imports {other}"
        for name, path in MODULES.items()
        if name.split(".")[0] == "search"
        for other in imports(path, types=True)
        if other.startswith("skeletons.") and other.split(".")[1] not in allowed
    ]
    assert not wrong
