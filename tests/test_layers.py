"""The direction of imports: one way between packages, no large circle of files, CuTe below only."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from cutesuper.ir.operators import TABLE

PACKAGE = Path(__file__).resolve().parent.parent / "cutesuper"
#: packages and modules of the top level and of `torch`, lowest first; those of one line may not
#: import each other, but for the road itself and what stands on its top
LAYERS = (
    ("errors", "garbage", "version"),
    ("ir",),
    ("device", "targets", "autodiff", "egraph", "verify", "show"),
    ("skeletons",),
    ("search",),
    ("runtime", "measure"),
    ("differentiate", "pipeline", "progress", "report", "searches", "store"),
    ("contrib", "given", "tune"),
    ("torch", "torch.internals"),
    ("torch.aten",),
    ("torch.ops",),
    ("torch.compile", "torch.generate", "torch.nn", "torch.optim"),
    ("torch.patch",),
    ("api",),
    (
        "",
        "__main__",
        "cli",
        "console",
        "crosscompile",
        "demo",
        "interrupted",
        "nn",
        "ops",
        "optim",
        "source_tree",
    ),
)
#: lines whose members know each other
TOGETHER = (6, 14)
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


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path, *, types: bool) -> tuple[str, ...]:
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

    return tuple(visit(parsed(path)))


def package_of(name: str) -> str:
    """What `LAYERS` has for a module."""
    parts = name.split(".")
    return ".".join(parts[: 2 if parts[0] == "torch" else 1])


def layer(package: str) -> int:
    return next(i for i, line in enumerate(LAYERS) if package in line)


def test_every_package_has_a_layer() -> None:
    assert {package_of(name) for name in MODULES} == {p for line in LAYERS for p in line}


@pytest.mark.parametrize("package", [p for line in LAYERS for p in line])
def test_imports_go_one_way(package: str) -> None:
    own = layer(package)
    wrong: list[str] = []
    for name, path in MODULES.items():
        if package_of(name) != package:
            continue
        for other in imports(path, types=True):
            top = package_of(other)
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


def test_packages_do_not_import_each_other_in_circles() -> None:
    """Folders side by side, and files beside them: at most files know each other."""
    for package in (n for n, p in MODULES.items() if p.name == "__init__.py"):
        prefix = f"{package}." if package else ""
        edges: dict[str, set[str]] = {}
        for name in (n for n in MODULES if n.startswith(prefix) and n != package):
            part = name.removeprefix(prefix).split(".")[0]
            others = (o for o in imports(MODULES[name], types=False) if o.startswith(prefix))
            parts = {o.removeprefix(prefix).split(".")[0] for o in others if o in MODULES}
            edges.setdefault(part, set()).update(parts - {part, ""})
        edges = {part: {o for o in others if o in edges} for part, others in edges.items()}
        folders = {p for p in edges if MODULES[prefix + p].name == "__init__.py"}
        assert [c for c in circles(edges) if c & folders] == []


def test_parts_of_a_kernel_do_not_know_each_other_in_circles() -> None:
    """Not even by the types of their arguments: no part is given the kernel that it is part of."""
    inside = {n: p for n, p in MODULES.items() if re.match(r"(skeletons\.\w+\.kernel|device)\b", n)}
    edges = {n: {m for m in imports(p, types=True) if m in inside} for n, p in inside.items()}
    assert circles(edges) == []


#: lines that know Blackwell outside of `device` and `targets`: public names, help texts, examples
#: of names of architectures in docstrings and messages; and one that counts its instructions
KNOWING = {
    "": 3, "crosscompile": 2, "runtime.compile": 1, "runtime.dsl": 1,
    "runtime.resources": 3,
}  # fmt: skip


def test_what_decides_does_not_know_architectures_by_name() -> None:
    """It reads the numbers of a target, and calls what `device` has."""
    names = re.compile(
        r"\b(sm_1\d\d\w*|tcgen05|tensor memory|clusterlaunch\w*|b[23]00|utc\w+)\b|blackwell", re.I
    )
    texts = {n: p.read_text() for n, p in MODULES.items()
             if n.split(".")[0] not in ("device", "targets")}  # fmt: skip
    lines = {n: sum(bool(names.search(x)) for x in t.splitlines()) for n, t in texts.items()}
    assert {n: count for n, count in lines.items() if count} == KNOWING
    page = (PACKAGE.parent / "docs" / "blackwell.md").read_text(encoding="utf-8")
    assert f"{sum(KNOWING.values())} lines know it" in page


def test_only_kernels_import_cute() -> None:
    wrong: list[str] = []
    for path in MODULES.values():
        place = path.relative_to(PACKAGE).as_posix()
        used = re.search(r"^\s*(import|from) cutlass", path.read_text(), re.M)
        if used and not CUTE.match(place):
            wrong.append(place)
    assert not wrong


#: what kernels may use of `cute.arch`: places of threads, whole blocks and warps, shuffles
ORDINARY = {
    "block_idx", "fmax", "fmin", "lane_idx", "make_warp_uniform", "prefetch", "shuffle_sync",
    "shuffle_sync_bfly", "sync_threads", "sync_warp", "thread_idx", "vote_any_sync", "warp_idx",
}  # fmt: skip
#: modules of the DSL that name instructions of one architecture or another
INSTRUCTIONS = re.compile(r"cutlass\.(cute\.(arch|nvgpu)|utils|pipeline|_mlir)\b")


def instructions_of(code: ast.AST) -> Iterator[str]:
    """Yield what a file uses of the hardware by name: barriers, bulk copies, tensor cores."""
    for node in ast.walk(code):
        used: list[str] = []
        if isinstance(node, ast.Attribute):
            base = ast.unparse(node.value)
            if base == "cute.arch" and node.attr not in ORDINARY:
                yield node.attr
            used = [f"cutlass.{base}.{node.attr}"] if base.startswith("cute.nvgpu") else []
        elif isinstance(node, ast.Import):
            used = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            used = [f"{node.module}.{alias.name}" for alias in node.names]
        yield from (name for name in used if INSTRUCTIONS.match(name))


def test_instructions_are_found() -> None:
    text = """
import cutlass.utils.hopper_helpers as sm90
from cutlass.cute import arch
from cutlass.cute.nvgpu import warpgroup
cute.arch.mbarrier_wait(full, 0)
cute.nvgpu.warpgroup.fence()
cute.arch.sync_threads()
"""
    assert set(instructions_of(ast.parse(text))) == {
        "cutlass.utils.hopper_helpers", "cutlass.cute.arch", "cutlass.cute.nvgpu.warpgroup",
        "mbarrier_wait", "cutlass.cute.nvgpu.warpgroup.fence",
    }  # fmt: skip


def test_only_device_knows_instructions() -> None:
    """Pipelines, bulk copies, clusters and tensor cores are building blocks of ``device/``."""
    wrong = {
        path.relative_to(PACKAGE).as_posix(): found
        for name, path in MODULES.items()
        if name.split(".")[0] != "device" and (found := list(instructions_of(parsed(path))))
    }
    assert wrong == {}


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


SKELETONS = "|".join(p.parent.name for p in (PACKAGE / "skeletons").glob("*/skeleton.py"))
ARCHITECTURES = "|".join(p.parent.name for p in (PACKAGE / "device").glob("*/products.py"))
#: what stands for one skeleton, or for one architecture
ONE = re.compile(rf"(skeletons\.({SKELETONS})|(device|targets)\.({ARCHITECTURES}))\b")


def test_one_line_names_a_skeleton_or_an_architecture() -> None:
    """A skeleton is a folder and a line of the registry; an architecture a folder of ``device/``, a
    file of ``targets/`` and a line in each. `reducing` divides rows too long for kernels."""

    def one(name: str) -> str:
        found = ONE.match(name)
        return found.group() if found else ""

    naming = {
        name
        for name, path in MODULES.items()
        for other in imports(path, types=True)
        if one(other) not in ("", one(name))
        and not name.startswith("targets.")  # Blackwell's numbers are Hopper's until measured
    }
    lines = {"skeletons.registry", "device.architecture", "targets"}
    assert naming == lines | {"torch.aten.reducing"}


#: folders that compare operations with names of operators: the table itself, and that of another
#: project; what a stage has to know is a facet of the operator (`cutesuper.ir.operators.base`)
NAMING = ("ir.operators", "contrib")
#: expressions that say which operator something is
WHICH = re.compile(r"\b(kinds?|operator|op|name)\b(['\"]\])?(\(\))?$")


def operators_named(code: ast.AST) -> list[str]:
    """Comparisons of an operation with the name of an operator."""
    found: list[str] = []
    for node in ast.walk(code):
        if not isinstance(node, ast.Compare):
            continue
        sides = [node.left, *node.comparators]
        texts = {c.value for s in sides for c in ast.walk(s) if isinstance(c, ast.Constant)}
        if texts & set(TABLE) and any(WHICH.search(ast.unparse(s)) for s in sides):
            found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("op.kind == 'matmul'", True),
        ("node.operator not in (GIVEN, 'sum')", True),
        ("op.attributes['op'] != 'max'", True),
        ("'exp' in kinds", True),
        ("op.kind == LOAD", False),
        ("activation == 'relu'", False),
    ],
)
def test_names_of_operators_are_found(code: str, names: bool) -> None:
    assert bool(operators_named(ast.parse(code))) == names


def test_stages_ask_for_no_operator_by_name() -> None:
    found = [
        f"{name}:{text}"
        for name, path in MODULES.items()
        if not name.startswith(NAMING)
        for text in operators_named(parsed(path))
    ]
    assert not found
