"""Programs run on the CPU, instruction by instruction, for machines without a GPU.

    for launch in fake_device().launches(artifact, tensors):
        run_launch(executable(artifact.ptx), launch, memory)

Kernels are launched as everywhere, by the host code that CuTe DSL compiled, against a CUDA runtime
(`tests/fake_cuda.c`) that hands each launch to the machine in `machine.c`. Tensors are PyTorch's,
on the CPU. `tests.ptx.device` makes it the device of all kernels of a process.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cutesuper.runtime.cache import ROOT_VARIABLE
from tests.fake_runtime import build_fake_runtime, cuda_tensor
from tests.ptx.parse import Instruction, Module, PtxError, parse

_FOLDER = Path(__file__).parent
_FLAGS = ["-O2", "-march=native", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror"]


class TooLarge(Exception):
    """A launch of more instructions than `Conditions` allow; says where its warps were."""


# ------------------------------------------------------------------------------------- decoding

#: parts of names that do not change the value, or that the machine does not tell apart
_IGNORED = re.compile(r"\.(rn|rna|full|approx|uni|aligned|relaxed)(?=\.|$)")
_WIDTH = re.compile(r"\.[bsuf](\d+)$")
_BYTES = {"b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "b32": 4, "u32": 4, "s32": 4,
          "f32": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8, "b128": 16}  # fmt: skip
_TYPES = {"u32": 0, "b32": 0, "s32": 1, "u64": 2, "b64": 2, "s64": 3, "u16": 4, "b16": 4, "s16": 5,
          "f32": 6, "f16": 7, "bf16": 8}  # fmt: skip
_COMPARISONS = {"eq": 0, "ne": 1, "lt": 2, "le": 3, "gt": 4, "ge": 5, "lo": 2, "ls": 3, "hi": 4,
                "hs": 5, "nan": 6, "num": 7, "equ": 8, "neu": 9, "ltu": 10, "leu": 11, "gtu": 12,
                "geu": 13}  # fmt: skip
_ATOMICS = {"add": 0, "exch": 1, "cas": 2, "or": 3, "and": 4, "max": 5, "min": 6, "inc": 7}
#: sums that take a carry, give one, or do both
_CARRIED = re.compile(
    r"(?=addc|madc|.*\.cc\.)(?:add|mad)(c)?(?:\.(lo|hi(?=.*u\d\d$)))?(\.cc)?\.[us](32|64)"
)
_SPACES = {"param": 0, "shared": 1, "global": 2, "local": 3}
#: most blocks along the second and along the third side of a grid
_MAX_SIDE = 65535
_FLOATS = (".f64", ".f32", ".f32x2", ".f16", ".bf16", ".f16x2", ".bf16x2")
_SAME_BITS = ("add", "sub", "mul.lo", "mad.lo", "selp", "mov")
_SPECIALS = {"tid": 0, "ctaid": 1, "ntid": 2, "nctaid": 3, "laneid": 4, "cluster_ctarank": 5,
             "cluster_nctarank": 6, "cluster_ctaid": 7, "cluster_nctaid": 8, "clusterid": 9,
             "nclusterid": 10, "warpid": 11, "lanemask_lt": 12, "clock": 13, "clock64": 13,
             "globaltimer": 13, "smid": 13}  # fmt: skip
_NOTHING = ("prefetch", "prefetchu", "membar", "setmaxnreg", "griddepcontrol", "nanosleep",
            "wgmma.fence", "fence.acq_rel", "fence.sc", "fence.mbarrier_init", "applypriority",
            "discard", "mbarrier.inval", "cp.async.commit_group", "cp.async.wait_group",
            "cp.async.wait_all",
            "fence.proxy.tensormap", "cp.async.bulk.prefetch")  # fmt: skip


def decode(i: Instruction) -> tuple[str, tuple[int, ...]]:
    """The operation of the machine, and what the name says besides. Raises PtxError."""
    name = i.name
    head = name.split(".")[0]
    found = _decode_by_head(i, name, head)
    if found is not None:
        return found
    if name.startswith("fence.proxy.async"):
        return "fence.proxy", ()
    if name.startswith(_NOTHING):
        return "nothing", ()
    return _elementwise(name)


def _elementwise(name: str) -> tuple[str, tuple[int, ...]]:
    if sizes := re.fullmatch(r"cvt\.([su])(\d+)\.([su])(\d+)", name):
        to, bits, of, width = sizes.groups()
        return "convert", (int(bits), int(to == "s"), int(width), int(of == "s"))
    ftz = ".ftz" in name
    if carried := _CARRIED.fullmatch(name):
        takes, part, gives, bits = carried.groups()
        kind = {None: 0, "lo": 1, "hi": 2}[part]
        return "carried", (kind, int(bits), int(bool(takes)), int(bool(gives)))
    short = _IGNORED.sub("", name.replace(".ftz", ""))
    if short.endswith(_FLOATS) and not short.startswith(("mov", "selp")):
        return short, (int(ftz),)
    for start in _SAME_BITS:
        if short.startswith(start + ".") and "pred" not in short:
            return f"{start}.{_WIDTH.search(short)[1]}", ()  # type: ignore[index]
    return short, ()


def _decode_by_head(i: Instruction, name: str, head: str) -> tuple[str, tuple[int, ...]] | None:
    parts = name.split(".")
    match head:
        case "bra" | "ret" | "exit" | "trap":
            return ("ret" if head == "exit" else head), ()
        case "ld" | "st" if parts[1] != "async":
            space = _SPACES.get(parts[1].split("::")[0], 2)
            vector = int(parts[-2][1:]) if re.fullmatch(r"v\d", parts[-2]) else 1
            signed = head == "ld" and parts[-1][0] == "s"
            return head, (space, _BYTES[parts[-1]], vector, int(signed))
        case "mov" if "{" in i.text:
            return _pack(i, _BYTES[parts[-1]] * 8)
        case "setp":
            joins = {"and": 1, "or": 2, "xor": 3}
            join = next((joins[p] for p in parts if p in joins), 0)
            halves = parts[-1].endswith("x2")
            kind = _TYPES[parts[-1].removesuffix("x2")]
            two = int("|" in i.text)
            return "setp", (_COMPARISONS[parts[1]], kind, join, two, int(halves))
        case "shfl":
            kind = {"idx": 0, "bfly": 1, "down": 2, "up": 3}[parts[2]]
            return "shfl", (kind, int("|" in i.text))
        case "elect":
            return "elect", ()
        case "vote":
            return "vote", ({"any": 0, "all": 1, "ballot": 2, "uni": 3}[parts[2]],)
        case "match":
            return "match", ()
        case "redux":
            return "redux", (_ATOMICS[parts[2]], _TYPES[parts[-1]])
        case "stmatrix" | "ldmatrix":
            count = int(name[name.index(".x") + 2])
            return head, (count, int(".trans" in name))
        case "bar" | "barrier":
            return _barrier(name)
        case "mbarrier":
            return _mbarrier(i, name)
        case "mapa":
            return "mapa", ()
        case "atom" | "red":
            how = next(_ATOMICS[p] for p in parts[1:] if p in _ATOMICS)
            space = 1 if "shared" in name else 2
            return "atom", (how, _TYPES[parts[-1]], _BYTES[parts[-1]], space, int(head == "atom"))
        case "wgmma":
            return _product(i, name)
        case "tcgen05":
            return _tensor(i, name)
        case "st" | "cp":
            return _copy(i, name)
        case "clusterlaunchcontrol":
            return _handed(name)
        case _:
            return None


def _pack(i: Instruction, bits: int) -> tuple[str, tuple[int, ...]]:
    parts = len(i.operands) - 1
    unpack = i.text.split(None, 1)[1].lstrip().startswith("{") or i.text.split()[1].startswith("{")
    return ("unpack" if unpack else "pack"), (parts, bits // parts)


def _barrier(name: str) -> tuple[str, tuple[int, ...]]:
    if name.startswith("barrier.cluster"):
        return ("barrier.cluster.arrive" if ".arrive" in name else "barrier.cluster.wait"), ()
    if name.startswith("bar.warp"):
        return "bar.warp", ()
    return ("bar.arrive" if ".arrive" in name else "bar.sync"), ()


def _mbarrier(i: Instruction, name: str) -> tuple[str, tuple[int, ...]] | None:
    inside = i.text[: i.text.index("[")].split(None, 1) if "[" in i.text else [""]
    place = int(len(inside) > 1 and bool(inside[1].strip(" ,")))
    if i.text.startswith("@"):
        rest = i.text.split(None, 2)[2]
        place = int(not rest.startswith("["))
    if name.startswith("mbarrier.init"):
        return "mbarrier.init", ()
    if name.startswith("mbarrier.arrive.expect_tx"):
        return "mbarrier.arrive.expect", (place,)
    if name.startswith("mbarrier.expect_tx"):
        return "mbarrier.expect", (place,)
    if name.startswith("mbarrier.arrive"):
        return "mbarrier.arrive", (place, int(len(i.operands) > place + 2))
    if name.startswith(("mbarrier.try_wait.parity", "mbarrier.test_wait.parity")):
        return "mbarrier.try_wait", ()
    return None


def _copy(i: Instruction, name: str) -> tuple[str, tuple[int, ...]] | None:
    if name.startswith("cp.async.mbarrier.arrive.noinc"):
        return "mbarrier.arrive", (0, 0)  # the copies of a thread are there at once
    if name.startswith("st.async"):
        vector = re.search(r"\.v(\d)\.", name)
        if not name.endswith(("b32", "u32", "s32", "f32")):
            raise PtxError(f"unknown instruction {name}")
        return "st.async", (int(vector[1]) if vector else 1,)
    if tensor := re.match(r"cp\.async\.bulk\.tensor\.(\d)d\.shared::(cta|cluster)\.global", name):
        return "copy.tensor", (int(tensor[1]), int("multicast" in name))
    if re.match(r"cp\.async\.bulk\.shared::(cta|cluster)\.global", name):
        return "copy.linear", ()
    if name.startswith("cp.async.bulk.global.shared::cta"):
        return "copy.out", ()
    if tensor := re.match(r"cp\.async\.bulk\.tensor\.(\d)d\.global\.shared::cta", name):
        return "tensor.out", (int(tensor[1]),)
    if name.startswith("cp.async.bulk.commit_group"):
        return "out.commit", ()
    if name.startswith("cp.async.bulk.wait_group"):
        return "out.wait", ()
    if re.match(r"cp\.async\.c[ag]\.shared", name):
        return "copy.async", ()
    return None


def _product(i: Instruction, name: str) -> tuple[str, tuple[int, ...]] | None:
    if name.startswith("wgmma.commit"):
        return "wgmma.commit", ()
    if name.startswith("wgmma.wait"):
        return "wgmma.wait", ()
    shape = re.search(r"\.m64n(\d+)k(\d+)\.f32\.(f16|bf16|tf32)\.(f16|bf16|tf32)$", name)
    if shape is None:
        return None
    columns, kind = int(shape[1]), {"f16": 0, "bf16": 1, "tf32": 2}[shape[3]]
    text = i.text[i.text.index("}") + 1 :].strip(" ,")
    registers = text.startswith("{")
    numbers = [int(n) for n in re.findall(r"(?<![%\w])-?\d+", text.split("}")[-1])]
    signs, turns = numbers[:2], numbers[2:]
    turns = [0, *turns] if registers else turns
    across = (turns[0] | turns[1] << 1) if len(turns) == 2 else 0
    sign = int(signs[:1] != signs[1:2])
    return "wgmma", (columns, kind, int(registers), across, sign)


def _tensor(i: Instruction, name: str) -> tuple[str, tuple[int, ...]] | None:
    whole = {"alloc": "tensor.alloc", "dealloc": "tensor.free",
             "relinquish_alloc_permit": "nothing", "fence::before_thread_sync": "tensor.before",
             "fence::after_thread_sync": "tensor.after"}  # fmt: skip
    kind = name.split(".")[1]
    if kind.startswith("wait"):
        return "tensor.wait", (int(kind == "wait::st"),)
    two = int(".cta_group::2" in name)
    if kind in whole:
        return whole[kind], (two,)
    if move := re.fullmatch(r"tcgen05\.(ld|st)\.sync\.aligned\.16x(128|256)b\.x(\d+)\.b32", name):
        return "tensor.move", (int(move[2]), int(move[3]), int(move[1] == "st"))
    if kind == "commit":
        return "tensor.issue", (1, 0, 0, two)
    if kind == "mma" and (elements := re.search(r"\.kind::(f16|tf32)", name)):
        return "tensor.issue", (0, int(i.text.count("[") == 2), int(elements[1] == "tf32"), two)
    return None


def _handed(name: str) -> tuple[str, tuple[int, ...]] | None:
    if ".try_cancel." in name:
        return "hand.ask", (int("multicast::cluster::all" in name),)
    if name.endswith("is_canceled.pred.b128"):
        return "hand.found", ()
    if axis := re.search(r"get_first_ctaid::([xyz])\.b32\.b128$", name):
        return "hand.block", ("xyz".index(axis[1]),)
    return None


# -------------------------------------------------------------------------------------- machine


class _Instruction(ctypes.Structure):
    _fields_ = [(n, ctypes.c_int32) for n in ("op", "predicate", "first", "count", "target")] + [
        ("extra", ctypes.c_int32 * 5)
    ]


class _Program(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.POINTER(_Instruction)),
        ("length", ctypes.c_int32),
        ("operands", ctypes.POINTER(ctypes.c_int32)),
        ("registers", ctypes.c_int32),
        ("constant_registers", ctypes.POINTER(ctypes.c_int32)),
        ("constants", ctypes.POINTER(ctypes.c_int64)),
        ("constant_count", ctypes.c_int32),
        ("special_registers", ctypes.POINTER(ctypes.c_int32)),
        ("specials", ctypes.POINTER(ctypes.c_int32)),
        ("special_count", ctypes.c_int32),
        ("local", ctypes.c_int32),
    ]


class _Extent(ctypes.Structure):
    _fields_ = [("low", ctypes.c_uint64), ("high", ctypes.c_uint64), ("writable", ctypes.c_int32)]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("cluster", ctypes.c_uint32 * 3),
        ("shared_end", ctypes.c_uint64),
        ("parameters", ctypes.c_void_p),
        ("memory", ctypes.POINTER(_Extent)),
        ("extents", ctypes.c_int32),
        ("resident", ctypes.c_int32),
        ("seed", ctypes.c_uint32),
        ("late", ctypes.c_int32),
        ("limit", ctypes.c_int64),
    ]


@functools.cache
def _machine() -> ctypes.CDLL:
    """The machine. Compiling takes 2 s: processes with one cache folder, as those of a run of the
    tests, share it."""
    source = _FOLDER / "machine.c"
    with tempfile.TemporaryDirectory(prefix="cutesuper-ptx-") as folder:
        shared = Path(os.environ.get(ROOT_VARIABLE) or folder)
        path = shared / f"machine-{hashlib.sha256(source.read_bytes()).hexdigest()[:16]}.so"
        if not path.exists():
            shared.mkdir(parents=True, exist_ok=True)
            made = path.with_suffix(f".{os.getpid()}")
            command = ["gcc", *_FLAGS, str(source), "-o", str(made), "-lm"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            made.replace(path)
        return ctypes.CDLL(str(path))


@dataclass(frozen=True)
class Executable:
    """A parsed kernel as `machine.c` takes it, with the arrays that it points to."""

    module: Module
    program: _Program
    arrays: tuple[Any, ...]


def _array(kind: Any, values: Sequence[Any]) -> Any:
    return (kind * max(1, len(values)))(*values)


@functools.lru_cache(maxsize=64)
def executable(ptx: str) -> Executable:
    """Translate the PTX of one kernel. Raises PtxError."""
    if len(set(re.findall(r"tcgen05\.\S*(cta_group::\d)", ptx))) > 1:
        raise PtxError("instructions of tcgen05 of one block and of two in a kernel")
    module = parse(ptx)
    operation = _machine().operation
    code = (_Instruction * len(module.instructions))()
    operands: list[int] = []
    for to, i in zip(code, module.instructions, strict=True):
        try:
            name, extra = decode(i)
        except LookupError as error:
            raise PtxError(f"unknown instruction {i.name}: {i.text}") from error
        to.op = operation(name.encode())
        if to.op < 0:
            raise PtxError(f"unknown instruction {i.name} (as {name}): {i.text}")
        to.predicate, to.target, to.first = i.predicate, i.target, len(operands)
        to.count = len(i.operands)
        to.extra[: len(extra)] = extra
        operands += i.operands
    arrays = (
        code,
        _array(ctypes.c_int32, operands),
        _array(ctypes.c_int32, list(module.constants)),
        _array(ctypes.c_int64, list(module.constants.values())),
        _array(ctypes.c_int32, list(module.specials)),
        _array(ctypes.c_int32, [_special(s) for s in module.specials.values()]),
    )
    program = _Program(
        arrays[0], len(module.instructions), arrays[1], module.registers, arrays[2], arrays[3],
        len(module.constants), arrays[4], arrays[5], len(module.specials),
        module.local,
    )  # fmt: skip
    return Executable(module, program, arrays)


def _special(name: str) -> int:
    base, _, axis = name.partition(".")
    if base not in _SPECIALS:
        raise PtxError(f"unknown register %{name}")
    return 4 * _SPECIALS[base] + ("xyz".index(axis) if axis else 0)


@dataclass(frozen=True)
class Conditions:
    """Conditions of a run: the order that ``seed`` draws, products ``late`` or at once, clusters
    that are ``resident`` at a time, and the ``limit`` of instructions."""

    seed: int = 1
    late: bool = False
    resident: int = 4
    limit: int = 10**9


USUAL = Conditions()


@dataclass(frozen=True)
class Launched:
    """One launch that the host code asked for."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared: int
    cooperative: bool
    parameters: tuple[bytes, ...]


def run_launch(
    kernel: Executable, launch: Launched, memory: Sequence[tuple[int, int, bool]],
    conditions: Conditions = USUAL,
) -> int:  # fmt: skip
    """Run one launch; returns the number of instructions that warps ran.

    Args:
        kernel: what is launched.
        launch: as asked for.
        memory: address, bytes, and if it may be written, of every tensor.
        conditions: of the machine.

    Raises:
        PtxError: the kernel did something that no kernel may do; says what and where.
        TooLarge: it was not done after ``conditions.limit`` instructions.
    """
    module = kernel.module
    end = max((offset + size for offset, size in module.parameters), default=0)
    buffer = (ctypes.c_uint8 * (4096 + 128))()
    base = -(-ctypes.addressof(buffer) // 128) * 128
    assert end <= 4096
    for (offset, size), content in zip(module.parameters, launch.parameters, strict=True):
        ctypes.memmove(base + offset, content, size)
    extents = (_Extent * len(memory))(*[_Extent(a, a + n, int(w)) for a, n, w in memory])
    blocks = launch.grid[0] * launch.grid[1] * launch.grid[2]
    if max(launch.grid[1:]) > _MAX_SIDE:
        raise PtxError(f"a grid of {launch.grid} blocks: two of its sides end at {_MAX_SIDE}")
    described = _Launch(
        launch.grid, launch.block, launch.cluster, 1024 + launch.shared, base, extents,
        len(memory), blocks if launch.cooperative else conditions.resident, conditions.seed,
        int(conditions.late), conditions.limit,
    )  # fmt: skip
    message, steps = ctypes.create_string_buffer(1024), ctypes.c_int64()
    failed = _machine().run(
        ctypes.byref(kernel.program), ctypes.byref(described), message, ctypes.byref(steps)
    )
    if failed:
        error = TooLarge if failed == 2 else PtxError
        raise error(_explained(kernel, message.value.decode()))
    return steps.value


def _explained(kernel: Executable, message: str) -> str:
    """The message with the text of the instructions it names."""
    code = kernel.module.instructions

    def named(match: re.Match[str]) -> str:
        number = int(match[2])
        text = code[number].text[:120] if number < len(code) else "the end"
        return f"{match[1]}{number} `{text}`"

    return re.sub(r"(instruction | at )(\d+)", named, message)


# ------------------------------------------------------------------------------------- launching

_HANDLER = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_uint32), ctypes.c_uint64, ctypes.c_int,
    ctypes.POINTER(ctypes.c_void_p),
)  # fmt: skip


@functools.lru_cache(maxsize=64)
def parameter_sizes(ptx: str) -> list[int]:
    """Bytes of each parameter of a kernel."""
    return [size for _, size in parse(ptx).parameters]


class FakeDevice:
    """The CUDA runtime of this process: it collects launches, and runs them on the machine."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._launched: list[Launched] = []
        self._parameters: list[int] = []
        self._handler = _HANDLER(self._on_launch)
        library.set_launch_handler(self._handler)

    def _on_launch(self, numbers: Any, shared: int, cooperative: int, arguments: Any) -> int:
        n = [numbers[k] for k in range(9)]
        contents = tuple(
            ctypes.string_at(arguments[k], size) for k, size in enumerate(self._parameters)
        )
        grid, block, cluster = (n[0], n[1], n[2]), (n[3], n[4], n[5]), (n[6], n[7], n[8])
        self._launched.append(Launched(grid, block, cluster, shared, bool(cooperative), contents))
        return 0

    def launches(self, artifact: Any, arguments: Sequence[Any]) -> list[Launched]:
        """The launches that a call of a compiled kernel asks for."""
        self._parameters = parameter_sizes(artifact.ptx)
        self._launched = []
        artifact.load()(*[_on_device(a) for a in arguments])
        return self._launched


def _on_device(tensor: Any) -> Any:
    """A TVM-FFI tensor on "CUDA device 0" with the memory of a tensor on the CPU."""
    name = str(tensor.dtype).removeprefix("torch.")
    return cuda_tensor(tuple(tensor.shape), name, tuple(tensor.stride()), tensor.data_ptr())


@functools.cache
def fake_device() -> FakeDevice:
    """The fake runtime of this process. CuTe DSL must not have been imported before."""
    library = str(build_fake_runtime().dsl_runtime)
    os.environ["CUTE_DSL_LIBS"] = library
    return FakeDevice(ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL))


__all__ = [
    "USUAL",
    "Conditions",
    "Executable",
    "Launched",
    "PtxError",
    "TooLarge",
    "decode",
    "executable",
    "fake_device",
    "run_launch",
]
