"""Tuned schedules on disk: one JSON file for each program, architecture and launch mode.

    <folder>/sm90/<operators>_<shapes>_<type>[_pdl]-<16 hex>.json

A file holds the program it is for (`canonical`), the muGraph, a schedule for each kernel, and the
measurements. It is data from outside: `read_entry` checks every field, and callers verify the
muGraph and plan its schedules again. Files of the user's folder come before the shipped ones.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from math import isfinite
from pathlib import Path
from typing import Any

from cutesuper.errors import CutesuperError, FormatError
from cutesuper.ir.block import MuGraph
from cutesuper.ir.definitions import definitions, names_of
from cutesuper.ir.dims import Dim, Symbol
from cutesuper.ir.graph import KernelGraph
from cutesuper.ir.operators.base import INPUT
from cutesuper.ir.relations import ordered
from cutesuper.ir.serial import from_dict, to_dict
from cutesuper.runtime.cache import default_root, warn_once
from cutesuper.runtime.private import exposure, make_private, replace_file
from cutesuper.skeletons.registry import read_schedule
from cutesuper.skeletons.schedule import Schedule, schedule_dict
from cutesuper.targets.settings import shipped_folder

FORMAT, VERSION = "tuned_schedule", 1
MAX_BYTES = 16 << 20
_FIELDS = ("format", "version", "program", "arch", "dependent_launch", "mugraph", "schedules",
           "measured")  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """Measurements of the tuner.

    Attributes:
        median_us: microseconds of the program, cold L2, median of the rounds.
        spread_us: between the 10th and the 90th percentile of the rounds.
        model_us: the median for the cost model's choice; None if that did not run.
        predicted_us: by the cost model, for the stored program.
        timed: number of candidates that were timed.
        gpu, driver, cuda, torch, cutlass_dsl, cutesuper, commit: the setup; None if unknown.
    """

    median_us: float
    spread_us: float
    model_us: float | None
    predicted_us: float
    timed: int
    gpu: str | None = None
    driver: str | None = None
    cuda: str | None = None
    torch: str | None = None
    cutlass_dsl: str | None = None
    cutesuper: str | None = None
    commit: str | None = None


@dataclass(frozen=True)
class Entry:
    """A stored program, with the tensor names of the graph of the look-up.

    Attributes:
        path: the file.
        mugraph: legal, and with the graph's inputs and outputs; not verified.
        schedules: one for each kernel.
        measured: by the tuner.
    """

    path: Path
    mugraph: MuGraph
    schedules: tuple[Schedule, ...]
    measured: Measured


# ---------------------------------------------------------------------------------------- folders


def user_folder() -> Path:
    """Folder in which `cutesuper.tune` stores.
    ``schedules`` in the cache folder (``$CUTESUPER_CACHE``)."""
    return default_root() / "schedules"


def state() -> str:
    """Text that is another one after the user stored or removed a program: names and times."""
    found = user_folder().rglob("*.json")
    return str(sorted((str(path), path.lstat().st_mtime_ns) for path in found))


def file_name(graph: KernelGraph, arch: str, dependent_launch: bool) -> Path:
    """Path of a program's file below a folder: readable, and unique by its hash."""
    key = [canonical(graph), arch, dependent_launch]
    text = json.dumps(key, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    launch = "_pdl" if dependent_launch else ""
    generation = arch.rstrip("af").replace("_", "")
    return Path(generation) / f"{_readable(graph)}{launch}-{digest}.json"


def _readable(graph: KernelGraph) -> str:
    nodes = [graph.nodes[i] for i in sorted(graph.needed(graph.outputs))]
    plain = ("input", "constant", "transpose")
    operators = dict.fromkeys(n.operator for n in nodes if n.operator not in plain)
    inputs = [graph.nodes[i] for i in graph.inputs]
    shapes = ["x".join(_extent_text(d) for d in n.shape) for n in inputs]
    dtypes = dict.fromkeys(n.dtype.name for n in inputs)
    return f"{'-'.join(operators)[:48]}_{'_'.join(shapes)[:48]}_{'-'.join(dtypes)}"


def _extent_text(dim: Dim) -> str:
    return f"m{dim.hint}" if isinstance(dim, Symbol) else str(dim)


# ------------------------------------------------------------------------------------- the program


def canonical(graph: KernelGraph) -> dict[str, Any]:
    """A graph as plain data that its meaning alone decides.
    It does not depend on names, on the order in which it was built, or on values that no output
    needs.

    before: ``y = rms_norm(hidden[tokens, 64])``; after: node 0 an input of extents [symbol 0, 64],
    node 1 ``rms_norm`` of node 0, output 1. Symbols are numbered, their hints kept: an entry is for
    one bucket of a symbolic extent. Operators that were added to the package's own are named
    together with their definitions.
    """
    found = ordered(graph.outputs, lambda i: graph.nodes[i].inputs)
    order = {i: n for n, i in enumerate(dict.fromkeys((*graph.inputs, *found)))}
    names = {name: n for n, name in enumerate(_symbols(graph))}
    nodes: list[dict[str, Any]] = []
    for i in order:
        node = graph.nodes[i]
        entry: dict[str, Any] = {"operator": node.operator}
        if node.operator == INPUT:
            entry["dims"] = [
                {"symbol": names[d.name], "hint": d.hint} if isinstance(d, Symbol) else d
                for d in node.shape
            ]
            entry |= {"dtype": node.dtype.name, "constant": node.constant}
        else:
            entry |= {"inputs": [order[j] for j in node.inputs]}
            entry |= {"attributes": dict(node.attributes)}
        nodes.append(entry)
    data: dict[str, Any] = {"nodes": nodes, "outputs": [order[i] for i in graph.outputs]}
    if outside := definitions(names_of(graph)):
        data["operators"] = outside
    return json.loads(json.dumps(data))


def _symbols(graph: KernelGraph) -> list[str]:
    """Names of the symbolic extents, in the order of the inputs."""
    dims = [d for i in graph.inputs for d in graph.nodes[i].shape]
    return list(dict.fromkeys(d.name for d in dims if isinstance(d, Symbol)))


def _named_for(graph: KernelGraph, mu: MuGraph) -> MuGraph:
    """A muGraph with the graph's names for inputs and symbols; other tensors get free ones."""
    new = {name: graph.nodes[i].name for name, i in zip(mu.inputs, graph.inputs, strict=False)}
    taken = set(new.values())
    for name in (n for n in mu.tensors if n not in new):
        free = name
        while free in taken:
            free += "_"
        new[name] = free
        taken.add(free)
    return mu.renamed(new, dict(zip(mu.symbols(), _symbols(graph), strict=False)))


def _anonymous(graph: KernelGraph, mu: MuGraph) -> MuGraph:
    """A muGraph without the user's names: inputs are x0, x1, ..., symbols S0, S1, ..."""
    names = {n: f"x{i}" for i, n in enumerate(mu.inputs)}
    names |= {n: f"y{i}" for i, n in enumerate(mu.outputs) if n not in names}
    between = [n for n in mu.tensors if n not in names]
    names |= {n: f"t{i}" for i, n in enumerate(between)}
    symbols = {s: f"S{i}" for i, s in enumerate(_symbols(graph))}
    return mu.renamed(names, symbols)


# ---------------------------------------------------------------------------------------- writing


def save(
    graph: KernelGraph,
    arch: str,
    dependent_launch: bool,
    mugraph: MuGraph,
    schedules: Sequence[Schedule],
    measured: Measured,
    folder: Path | None = None,
) -> Path:
    """Write an entry, in place of an earlier one; a reader sees the whole file or none.

    Args:
        graph: the program, with the hints of one bucket.
        arch: such as ``sm_90a``.
        dependent_launch: true for programmatic dependent launch.
        mugraph: the winner.
        schedules: one for each kernel.
        measured: by the tuner.
        folder: default `user_folder`.

    Returns:
        The path of the file.

    Raises:
        OSError: it cannot be written.
    """
    path = (user_folder() if folder is None else folder) / file_name(graph, arch, dependent_launch)
    data = {
        "format": FORMAT,
        "version": VERSION,
        "program": canonical(graph),
        "arch": arch,
        "dependent_launch": dependent_launch,
        "mugraph": to_dict(_anonymous(graph, mugraph)),
        "schedules": [schedule_dict(s) for s in schedules],
        "measured": asdict(measured),
    }
    make_private(path.parent)
    replace_file(path, f"{json.dumps(data, indent=1, sort_keys=True)}\n".encode())
    return path


# ---------------------------------------------------------------------------------------- reading


def find(
    graph: KernelGraph,
    arch: str,
    dependent_launch: bool,
    folders: Sequence[Path] | None = None,
) -> Iterator[Entry]:
    """Entries for a program, the user's before the shipped ones.

    Unreadable files are skipped with a warning, and so are files that others can write. Shipped
    files are not checked for that: they lie with the code of the package, and are as safe as that.
    """
    name = file_name(graph, arch, dependent_launch)
    for folder in (user_folder(), shipped_folder()) if folders is None else folders:
        path = folder / name
        if not path.is_file():
            continue
        try:
            if folder != shipped_folder():
                _refuse_exposed(path)
            yield read_entry(path, graph, arch, dependent_launch)
        except FormatError as error:
            ignore(path, error)


def _refuse_exposed(path: Path) -> None:
    """Raise FormatError if others can write a file."""
    try:
        problem = exposure(path)
    except OSError as error:
        raise FormatError(f"{path}: cannot look at it: {error}") from error
    if problem:
        raise FormatError(f"{problem}; if nobody else has, {problem.mend}")


def ignore(path: Path, why: CutesuperError) -> None:
    """Warn once that a file is not used."""
    warn_once(f"tuned schedule {path} is not used: {why}")


def read_entry(path: Path, graph: KernelGraph, arch: str, dependent_launch: bool) -> Entry:
    """Read an entry written by `save`.

    Raises:
        FormatError: it is not a legal entry for this program; names the file and the field.
    """
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise FormatError(f"longer than {MAX_BYTES} bytes")
        data = json.loads(content)
        return _entry(path, data, graph, arch, dependent_launch)
    except CutesuperError as error:
        raise FormatError(f"{path}: {error}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise FormatError(f"{path}: not a readable JSON file: {error}") from error


def _entry(path: Path, data: Any, graph: KernelGraph, arch: str, dependent_launch: bool) -> Entry:
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise FormatError(f"'format' is not {FORMAT!r}")
    if data.get("version") != VERSION:
        raise FormatError(f"'version' is {data.get('version')!r}, not {VERSION}; tune again")
    if odd := set(data) ^ set(_FIELDS):
        raise FormatError(f"missing or unknown fields: {', '.join(sorted(odd))}")
    wanted = {"program": canonical(graph), "arch": arch, "dependent_launch": dependent_launch}
    for name, value in wanted.items():
        if data[name] != value or type(data[name]) is not type(value):
            raise FormatError(f"{name!r} is not what was asked for; the file was renamed or edited")
    mugraph = _read_mugraph(data["mugraph"], graph)
    schedules = data["schedules"]
    if not isinstance(schedules, list) or len(schedules) != len(mugraph.steps):
        raise FormatError(f"'schedules' is not a list of {len(mugraph.steps)}, one for each kernel")
    read = tuple(read_schedule(s) for s in schedules)
    if any(s.dependent_launch != dependent_launch for s in read):
        raise FormatError("'schedules': dependent_launch is not that of the file")
    return Entry(path, mugraph, read, _read_measured(data["measured"]))


def _read_mugraph(data: Any, graph: KernelGraph) -> MuGraph:
    mu = from_dict(data)
    if not isinstance(mu, MuGraph):
        raise FormatError("'mugraph' is a kernel graph")
    mu = _named_for(graph, mu)
    check_border(mu, graph)
    return mu


def check_border(mu: MuGraph, graph: KernelGraph) -> None:
    """Refuse a muGraph that was read if its inputs or outputs are not those of the program.
    Raises FormatError."""
    border = ((mu.inputs, graph.inputs), (mu.outputs, graph.outputs))
    for names, indices in border:
        specs = [(mu.tensors[n].shape, mu.tensors[n].dtype) for n in names]
        if specs != [(graph.nodes[i].shape, graph.nodes[i].dtype) for i in indices]:
            raise FormatError("'mugraph' has other inputs or outputs than the program")
    # constant inputs are loaded before the predecessor has ended, so only the graph decides on them
    constant = {graph.nodes[i].name for i in graph.inputs if graph.nodes[i].constant}
    if constant != {n for n in mu.inputs if mu.tensors[n].constant}:
        raise FormatError("'mugraph' has other constant tensors than the program")


def _read_measured(data: Any) -> Measured:
    names = [f.name for f in fields(Measured)]
    if not isinstance(data, dict) or set(data) != set(names):
        raise FormatError(f"'measured' does not hold {', '.join(names)}")
    for name, value in data.items():
        if name == "timed":
            good = type(value) is int and value > 0
        elif name.endswith("_us"):
            good = type(value) in (int, float) and isfinite(value) and value >= 0
            good = good or (value is None and name == "model_us")
        else:
            good = value is None or isinstance(value, str)
        if not good:
            raise FormatError(f"'measured.{name}' is {value!r}")
    return Measured(**data)
