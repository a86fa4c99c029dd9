"""Reader for the lowered host module, the text of ``compiled.ir_module``.

Two kinds of facts are found only there: the memory layout of each argument of the plain entry
point, and the constant grid, block, cluster and dynamic shared memory of every launch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from cutesuper.errors import CompileError

Extent3 = tuple[int | None, int | None, int | None]

# cudaLaunchAttributeID values (driver_types.h).
_COOPERATIVE, _CLUSTER, _PDL = 2, 4, 6

_SCALARS = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "f16": 2, "bf16": 2, "f32": 4, "f64": 8}


@dataclass(frozen=True)
class Field:
    """One scalar inside an argument: its byte offset and its MLIR type (``ptr``, ``i32``, ...)."""

    offset: int
    type: str


@dataclass(frozen=True)
class ArgumentLayout:
    """Memory layout of one argument of the plain entry point."""

    size: int
    fields: tuple[Field, ...]


@dataclass(frozen=True)
class LaunchFacts:
    """One kernel launch; ``None`` stands for a value that is computed at run time."""

    kernel: str
    grid: Extent3
    block: Extent3
    cluster: Extent3
    shared_bytes: int | None
    pdl: bool
    cooperative: bool


# --- argument layouts ----------------------------------------------------------------------------


def entry_layouts(module: str, function: str) -> list[ArgumentLayout]:
    """Layouts of all arguments of ``function``, the stream included.

    Raises:
        CompileError: when the module does not have that entry point or uses an unknown type.
    """
    match = re.search(rf"llvm\.func @_mlir_ciface_{re.escape(function)}\((.*)\) -> i32", module)
    if match is None:
        raise CompileError(
            f"the host module has no entry point _mlir_ciface_{function}; "
            "this version of CuTe DSL names it differently"
        )
    text = match.group(1)
    layouts: list[ArgumentLayout] = []
    position = 0
    while start := re.compile(r"%arg\d+: ").search(text, position):
        parsed, position = _parse_type(text, start.end())
        layouts.append(ArgumentLayout(parsed.size, tuple(parsed.fields)))
    return layouts


@dataclass
class _Type:
    size: int
    align: int
    fields: list[Field]


def _parse_type(text: str, position: int) -> tuple[_Type, int]:
    """Parse one LLVM dialect type and lay it out as C would.

    The nesting decides the padding: ``{ptr, {{i32}, {i32, i64}}}`` puts the inner strides on an
    8-byte boundary, where a flat list of the same scalars would not.
    """
    match = re.compile(r"(?:!llvm\.)?(struct<\(|ptr(?:<\d+>)?|[a-z]+\d+)").match(text, position)
    if match is None:
        raise CompileError(f"unknown argument type in the host module: {text[position:][:40]!r}")
    name, position = match.group(1), match.end()
    if name.startswith("ptr"):
        return _Type(8, 8, [Field(0, "ptr")]), position
    if name in _SCALARS:
        size = _SCALARS[name]
        return _Type(size, size, [Field(0, name)]), position
    if name != "struct<(":
        raise CompileError(f"unknown argument type {name} in the host module")
    return _parse_struct(text, position)


def _parse_struct(text: str, position: int) -> tuple[_Type, int]:
    result = _Type(0, 1, [])
    while not text.startswith(")>", position):
        member, position = _parse_type(text, position)
        start = _round_up(result.size, member.align)
        result.fields += [Field(start + field.offset, field.type) for field in member.fields]
        result.size = start + member.size
        result.align = max(result.align, member.align)
        if text.startswith(", ", position):
            position += 2
    result.size = _round_up(result.size, result.align)
    return result, position + 2


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


# --- launches ------------------------------------------------------------------------------------

_CONSTANT = re.compile(r"(%\w+) = llvm\.mlir\.constant\((-?\d+) : i(?:32|64)\)")
_CONFIG = re.compile(
    r"(%\w+) = llvm\.alloca .*x !llvm\.struct<\(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32"
)
_PLACE = re.compile(
    r"(%\w+) = llvm\.getelementptr (%\w+)\[0, ([\d, ]+)\] : .*, "
    r"!llvm\.struct<\((array<3 x i32>|i32, array<4 x i8>|i32, i32, i32)"
)
_STORE = re.compile(r"llvm\.store (%\w+), (%\w+) : (?:i32|i64), !llvm\.ptr")
_KERNEL = re.compile(r"llvm\.mlir\.addressof @(\w+) : !llvm\.ptr")

_Path = tuple[str, str]


class _LaunchReader:
    """Reader that follows one host function line by line.
    Values are in SSA form, so a dict is enough.

    ``places`` maps a pointer to (the struct it points into, the path inside it); ``stored`` maps
    such a pair to the constant written there, or ``None`` for a run-time value.
    """

    def __init__(self) -> None:
        self.constants: dict[str, int] = {}
        self.places: dict[str, _Path] = {}
        self.stored: dict[_Path, int | None] = {}
        self.configs: list[str] = []
        self.attributes: list[str] = []
        self.last_address = ""
        self.launches: list[tuple[str, list[str]]] = []

    def read(self, line: str) -> None:
        """Process one line of the module."""
        if match := _CONSTANT.search(line):
            self.constants[match.group(1)] = int(match.group(2))
        elif match := _CONFIG.search(line):
            self.configs.append(match.group(1))
        elif match := _PLACE.search(line):
            self._place(*match.groups())
        elif match := _STORE.search(line):
            place = self.places.get(match.group(2))
            if place is not None:
                self.stored[place] = self.constants.get(match.group(1))
        elif match := _KERNEL.search(line):
            self.last_address = match.group(1)
        elif "llvm.call @_cudaLaunchKernelEx(" in line:
            self.launches.append((self.last_address, self.attributes))
            self.attributes = []

    def _place(self, name: str, base: str, path: str, struct: str) -> None:
        if struct == "i32, i32, i32":  # the three extents of a cluster, inside an attribute value
            outer, outer_path = self.places.get(base, (base, "?"))
            self.places[name] = (outer, f"{outer_path}, {path}")
            return
        self.places[name] = (base, path)
        if struct == "i32, array<4 x i8>" and base not in self.attributes:
            self.attributes.append(base)

    def facts(self) -> list[LaunchFacts]:
        """The launches in program order; empty when configurations and calls do not pair up."""
        if len(self.configs) != len(self.launches):
            return []
        return [
            self._fact(config, address, attributes)
            for config, (address, attributes) in zip(self.configs, self.launches, strict=True)
        ]

    def _fact(self, config: str, address: str, attributes: list[str]) -> LaunchFacts:
        values = {self.stored.get((base, "0")): base for base in attributes}
        cluster = values.get(_CLUSTER)
        return LaunchFacts(
            # The global that holds a kernel's handle is called <module>_<kernel>.
            kernel=address.removeprefix("kernels_"),
            grid=self._triple(config, "0"),
            block=self._triple(config, "1"),
            cluster=(1, 1, 1) if cluster is None else self._triple(cluster, "2"),
            shared_bytes=self.stored.get((config, "2")),
            pdl=self._flag(values.get(_PDL)),
            cooperative=self._flag(values.get(_COOPERATIVE)),
        )

    def _triple(self, base: str, row: str) -> Extent3:
        return (
            self.stored.get((base, f"{row}, 0")),
            self.stored.get((base, f"{row}, 1")),
            self.stored.get((base, f"{row}, 2")),
        )

    def _flag(self, base: str | None) -> bool:
        """True if an attribute is present and no constant zero is stored in it."""
        return base is not None and self.stored.get((base, "2")) != 0


def read_launches(module: str, function: str) -> list[LaunchFacts]:
    """The launches of the host function ``function``, in program order."""
    start = module.find(f"llvm.func @{function}(")
    if start < 0:
        return []
    reader = _LaunchReader()
    for line in module[start : module.find("\n  }\n", start)].splitlines():
        reader.read(line)
    return reader.facts()
