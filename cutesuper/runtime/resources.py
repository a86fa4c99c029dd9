"""Device resources of a compiled kernel: read from its cubin, SASS and PTX.

Nothing here needs a GPU or CuTe DSL. The cubin is an ELF file; registers, stack frame, threads and
barriers stand in its ``.nv.info`` sections (attribute numbers found by comparing with cuobjdump).
Instructions are counted in SASS if nvdisasm is available, else estimated from PTX.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cutesuper.errors import CompileError, FormatError
from cutesuper.runtime.elf import Elf, parse_elf, read_string
from cutesuper.runtime.host_module import LaunchFacts
from cutesuper.runtime.private import temporary_folder
from cutesuper.runtime.toolchain import require_nvdisasm, run_tool

# Bytes of shared memory one block may use, static and dynamic together. The compiler does not
# check this (240000 bytes compile silently for sm_90a); the launch would fail instead.
SHARED_LIMITS = {80: 166912, 86: 101376, 87: 166912, 89: 101376, 120: 101376, 121: 101376}
DEFAULT_SHARED_LIMIT = 232448

# From sm_90 on, .nv.shared.<kernel> includes 1 KB that the driver reserves per block; it does not
# count against the limit above (checked with ptxas -v on sm_80, sm_90a and sm_100a).
_RESERVED_SHARED = 1024

_REGCOUNT, _FRAME_SIZE, _MIN_STACK = 0x2F, 0x11, 0x12
_THREADS, _PARAMETER, _BARRIERS = 0x10, 0x17, 0x4C


@dataclass(frozen=True)
class CubinKernel:
    """One kernel of a cubin. Sizes in bytes; ``threads`` is the required block size."""

    name: str
    registers: int
    stack_bytes: int
    static_shared_bytes: int
    threads: int
    barriers: int
    code_bytes: int
    parameter_bytes: tuple[int, ...]


@dataclass(frozen=True)
class Resources:
    """Resources of one launch function; with several kernels the largest of each.

    Attributes:
        registers: per thread.
        stack_bytes: per thread, in local memory: spills and arrays indexed at run time.
        shared_bytes: per block as launched, static and dynamic; only the static part when the
            dynamic size is computed at run time (``shared_is_exact`` is then false).
        threads: per block.
        barriers: named barriers in use (``mbarrier`` objects live in shared memory instead).
        code_bytes: of all kernels together.
        instructions: static count of each instruction in the code (not executions), by
            opcode (``HGMMA``, ``LDL``) and, for global and shared memory, by opcode with width
            (``LDG.E.128``).
        ptx: counts of PTX facts that SASS hides or renames (``griddepcontrol.wait``, ...).
        source: where ``instructions`` comes from, ``"sass"`` or ``"ptx"``.
        kernels: names of the kernels.
        shared_is_exact: true if ``shared_bytes`` includes all shared memory of a launch.
        stages: slots of the shared-memory ring that operands are loaded through; 1 without one.
    """

    registers: int
    stack_bytes: int
    shared_bytes: int
    threads: int
    barriers: int
    code_bytes: int
    instructions: Mapping[str, int] = field(default_factory=dict[str, int])
    ptx: Mapping[str, int] = field(default_factory=dict[str, int])
    source: str = "sass"
    kernels: tuple[str, ...] = ()
    shared_is_exact: bool = True
    stages: int = 1

    @property
    def spills(self) -> bool:
        """True if any thread keeps values in local memory."""
        return self.stack_bytes > 0 or bool(
            self.instructions.get("LDL", 0) + self.instructions.get("STL", 0)
        )


def combine(parts: Sequence[Resources]) -> Resources:
    """Several kernels as one: the largest of each figure, instructions and code added up."""
    instructions, ptx = Counter[str](), Counter[str]()
    for part in parts:
        instructions.update(part.instructions)
        ptx.update(part.ptx)
    return Resources(
        registers=max((p.registers for p in parts), default=0),
        stack_bytes=max((p.stack_bytes for p in parts), default=0),
        shared_bytes=max((p.shared_bytes for p in parts), default=0),
        threads=max((p.threads for p in parts), default=0),
        barriers=max((p.barriers for p in parts), default=0),
        code_bytes=sum(p.code_bytes for p in parts),
        instructions=dict(instructions),
        ptx=dict(ptx),
        source=parts[0].source if parts else "",
        kernels=tuple(name for p in parts for name in p.kernels),
        shared_is_exact=all(p.shared_is_exact for p in parts),
        stages=max((p.stages for p in parts), default=0),
    )


def shared_limit(arch: str) -> int:
    """Bytes of shared memory a block may use on ``arch`` (``"sm_90a"``)."""
    return SHARED_LIMITS.get(arch_number(arch), DEFAULT_SHARED_LIMIT)


def arch_number(arch: str) -> int:
    """``90`` for ``"sm_90a"``; raises :class:`CompileError` for anything else."""
    match = re.fullmatch(r"sm_(\d{2,3})[af]?", arch)
    if match is None:
        raise CompileError(f"architecture {arch!r}: expected a name like sm_90a or sm_100a")
    return int(match.group(1))


# --- the cubin -----------------------------------------------------------------------------------


def parse_cubin(cubin: bytes) -> dict[str, CubinKernel]:
    """All kernels of a cubin by name.

    Raises:
        FormatError: when the bytes are not a complete cubin with at least one kernel.
    """
    elf = parse_elf(cubin, "cubin")
    totals = _global_info(elf)
    try:
        kernels = {
            name: _kernel(elf, name, info.data, totals)
            for name, info in elf.with_prefix(".nv.info.")
        }
    except struct.error as error:
        raise FormatError(f"cubin: an .nv.info record is too short: {error}") from error
    if not kernels:
        raise FormatError("cubin: it holds no kernel (no .nv.info.<kernel> section)")
    return kernels


def _kernel(
    elf: Elf, name: str, info: bytes, totals: Mapping[int, Mapping[str, int]]
) -> CubinKernel:
    attributes = _attributes(info)
    text = elf.find(f".text.{name}")
    if text is None:
        raise FormatError(f"cubin: kernel {name} has no code")
    shared = elf.find(f".nv.shared.{name}")
    static = shared.size if shared else 0
    if elf.find(".nv.shared.reserved.0") is not None:
        static = max(0, static - _RESERVED_SHARED)
    threads = next(iter(attributes.get(_THREADS, [])), struct.pack("<III", 0, 0, 0))
    x, y, z = struct.unpack("<III", threads[:12])
    return CubinKernel(
        name=name,
        registers=totals.get(_REGCOUNT, {}).get(name, 0),
        stack_bytes=max(totals.get(code, {}).get(name, 0) for code in (_FRAME_SIZE, _MIN_STACK)),
        static_shared_bytes=static,
        threads=x * y * z,
        barriers=_barriers(attributes, text.flags),
        code_bytes=text.size,
        parameter_bytes=_parameters(attributes),
    )


def _barriers(attributes: Mapping[int, list[bytes]], text_flags: int) -> int:
    """Number of barriers.
    Newer cubins have an attribute, older ones a count in the flags of the code."""
    if _BARRIERS in attributes:
        return attributes[_BARRIERS][0][0]
    return (text_flags >> 20) & 0x7F


def _parameters(attributes: Mapping[int, list[bytes]]) -> tuple[int, ...]:
    """Sizes by ordinal: ``{u32 index; u16 ordinal; u16 offset; u32 flags}``, size above bit 18."""
    entries = (struct.unpack("<IHHI", data[:12]) for data in attributes.get(_PARAMETER, []))
    sizes = {ordinal: flags >> 18 for _, ordinal, _, flags in entries}
    return tuple(sizes[ordinal] for ordinal in sorted(sizes))


def _global_info(elf: Elf) -> dict[int, dict[str, int]]:
    """``.nv.info``: attribute -> kernel name -> value, for (symbol index, value) pairs."""
    info, symbols, strings = elf.find(".nv.info"), elf.find(".symtab"), elf.find(".strtab")
    if info is None or symbols is None or strings is None:
        raise FormatError("cubin: it lacks .nv.info, .symtab or .strtab")
    result: dict[int, dict[str, int]] = {}
    for code, values in _attributes(info.data).items():
        for value in values:
            if len(value) != 8:
                continue
            index, number = struct.unpack("<II", value)
            if (index + 1) * 24 <= len(symbols.data):
                (name,) = struct.unpack_from("<I", symbols.data, index * 24)
                result.setdefault(code, {})[read_string(strings.data, name)] = number
    return result


def _attributes(data: bytes) -> dict[int, list[bytes]]:
    """Records ``{u8 format; u8 attribute; u16 value}``; format 4 is followed by value bytes."""
    result: dict[int, list[bytes]] = {}
    position = 0
    while position + 4 <= len(data):
        kind, code, value = struct.unpack_from("<BBH", data, position)
        position += 4
        payload = struct.pack("<H", value)
        if kind == 4:
            payload = data[position : position + value]
            position += value
            if len(payload) < value:
                raise FormatError("cubin: an .nv.info record ends outside its section")
        result.setdefault(code, []).append(payload)
    return result


# --- instructions --------------------------------------------------------------------------------

_SASS_LINE = re.compile(
    r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[\dT]+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE
)
_MEMORY = ("LDG", "STG", "LDS", "STS", "LDL", "STL", "LD", "ST")
_WIDTHS = {"64", "128", "256"}

_PTX_MIX = {
    "HGMMA": r"wgmma\.mma_async(?!\S*e[45]m)",
    "QGMMA": r"wgmma\.mma_async\S*e[45]m",
    "UTCHMMA": r"tcgen05\.mma\b",
    "HMMA": r"\bmma\.sync",
    "UTMALDG": r"cp\.async\.bulk\.tensor\S*\.shared::(?:cluster|cta)\.global",
    "UTMASTG": r"cp\.async\.bulk\.tensor\S*\.global\.shared",
    "UBLKCP": r"cp\.async\.bulk\.(?!tensor|commit|wait|prefetch)",
    "LDGSTS": r"cp\.async\.c[ag]\.",
    "LDG.E.128": r"ld\.global\S*\.(?:v4\.[bfsu]32|v2\.[bfsu]64|b128)",
    "STG.E.128": r"st\.global\S*\.(?:v4\.[bfsu]32|v2\.[bfsu]64|b128)",
    "LDG": r"\bld\.global",
    "STG": r"\bst\.global",
    "LDS": r"\bld\.shared",
    "STS": r"\bst\.shared",
    "LDL": r"\bld\.local",
    "STL": r"\bst\.local",
    "STAS": r"st\.async",
    "SHFL": r"shfl\.sync",
    "BAR": r"\bbar(?:rier)?\.(?:cta\.)?(?:sync|arrive)\b",
    "USETMAXREG": r"setmaxnreg",
    "MUFU": r"\b(?:ex2|lg2|rcp|rsqrt|sqrt|sin|cos|tanh)\.approx",
    "ACQBULK": r"griddepcontrol\.wait",
    "PREEXIT": r"griddepcontrol\.launch_dependents",
}
_PTX_FACTS = {
    "griddepcontrol.wait": r"griddepcontrol\.wait",
    "griddepcontrol.launch_dependents": r"griddepcontrol\.launch_dependents",
    "barrier.cluster": r"barrier\.cluster\.",
    "mbarrier": r"\bmbarrier\.",
    "wgmma.mma_async": r"wgmma\.mma_async",
    "cp.async.bulk.tensor": r"cp\.async\.bulk\.tensor",
    "setmaxnreg": r"setmaxnreg",
    "red.global": r"\b(?:red|atom)\.global",
}


def count_sass(sass: str) -> dict[str, int]:
    """Count instructions in nvdisasm output, predicated ones included, padding NOPs not."""
    counts: Counter[str] = Counter()
    for opcode in _SASS_LINE.findall(sass):
        base, *modifiers = opcode.split(".")
        counts[base] += 1
        width = next((m for m in modifiers if m in _WIDTHS), "")
        if base in _MEMORY and width:
            extended = ".E" if "E" in modifiers else ""
            counts[f"{base}{extended}.{width}"] += 1
    del counts["NOP"]
    return dict(counts)


def count_ptx(ptx: str) -> dict[str, int]:
    """Estimate :func:`count_sass` from PTX, under the same names; spills are not visible there."""
    return _count(ptx, _PTX_MIX)


def count_ptx_facts(ptx: str) -> dict[str, int]:
    """Counts of the PTX instructions that stand for synchronisation and bulk copies."""
    return _count(ptx, _PTX_FACTS)


def disassemble(cubin: bytes) -> str:
    """SASS of a cubin.

    Raises:
        CompileError: when nvdisasm is missing (it says what to install) or fails.
    """
    tool = require_nvdisasm()
    with temporary_folder() as folder:
        path = folder / "kernel.cubin"
        path.write_bytes(cubin)
        return run_tool([str(tool), "-c", str(path)], "disassembling a kernel")


def _count(text: str, patterns: Mapping[str, str]) -> dict[str, int]:
    counts = {name: len(re.findall(pattern, text)) for name, pattern in patterns.items()}
    return {name: count for name, count in counts.items() if count}


# --- together ------------------------------------------------------------------------------------


def measure(
    cubin: bytes, ptx: str, launches: Sequence[LaunchFacts] = (), sass: str | None = None
) -> Resources:
    """Combine all sources; without ``sass`` instructions are estimated from ``ptx``.

    Raises:
        FormatError: when the cubin is damaged.
    """
    kernels = parse_cubin(cubin)
    dynamic = {
        name: [launch.shared_bytes for launch in launches if launch.kernel == name]
        for name in kernels
    }
    shared = [
        kernel.static_shared_bytes + max((size or 0 for size in dynamic[name]), default=0)
        for name, kernel in kernels.items()
    ]
    return Resources(
        registers=max(k.registers for k in kernels.values()),
        stack_bytes=max(k.stack_bytes for k in kernels.values()),
        shared_bytes=max(shared),
        threads=max(k.threads for k in kernels.values()),
        barriers=max(k.barriers for k in kernels.values()),
        code_bytes=sum(k.code_bytes for k in kernels.values()),
        instructions=count_ptx(ptx) if sass is None else count_sass(sass),
        ptx=count_ptx_facts(ptx),
        source="ptx" if sass is None else "sass",
        kernels=tuple(kernels),
        shared_is_exact=all(sizes and None not in sizes for sizes in dynamic.values()),
    )
