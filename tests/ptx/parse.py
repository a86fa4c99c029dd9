"""A parser of PTX as the compiler of CuTe DSL writes it, into a flat program for `machine.c`.

Every operand becomes the number of a register: immediates and special registers are registers that
are filled before the kernel starts. An address is two registers: a base and an offset in bytes.

Source: NVIDIA, Parallel Thread Execution ISA 8.8.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

#: first byte of dynamic shared memory: the system keeps 1 KiB in front of it on Hopper
DYNAMIC_SHARED = 1024

_COMMENT = re.compile(r"//[^\n]*")
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)([^{]*)\{")
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(?:\[(\d+)\])?")
_SHARED = re.compile(r"(\.extern\s+)?\.shared\s+\.align\s+(\d+)\s+\.b8\s+([\w$]+)\[(\d*)\]")
_LOCAL = re.compile(r"\.local \.align (\d+) \.b8 ([\w$]+)\[(\d+)\]")
_LABEL = re.compile(r"\s*([$\w]+)\s*:")
_TOKEN = re.compile(r"\s*(-?0[fd][0-9A-Fa-f]+|-?0x[0-9A-Fa-f]+U?|-?\d+U?|[%$\w.]+|[{}\[\],+|!])")
_SIZES = {"b8": 1, "b16": 2, "b32": 4, "b64": 8, "u8": 1, "u16": 2, "u32": 4, "u64": 8,
          "s32": 4, "s64": 8, "f32": 4, "f64": 8}  # fmt: skip


class PtxError(Exception):
    """PTX that the machine does not know, or that does what no kernel may do."""


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        name: opcode with all modifiers.
        predicate: twice its register, plus one if negated; -1 without.
        operands: registers in the order of the text, those of vectors included; an address is a
            base and an offset.
        target: of a branch.
        text: the statement.
    """

    name: str
    predicate: int
    operands: tuple[int, ...]
    target: int
    text: str


@dataclass
class Module:
    """One kernel.

    Attributes:
        name: of the entry.
        parameters: (offset, bytes) of each, as the launch passes them.
        instructions: in order.
        registers: how many there are; ``constants`` are filled with a value, ``specials`` with
            ``tid.x``, ``ctaid.y``, ... before the kernel starts.
        static_shared: bytes below dynamic shared memory that its variables take.
        local: bytes of each thread's own memory.
    """

    name: str
    parameters: list[tuple[int, int]]
    instructions: list[Instruction] = field(default_factory=list)
    registers: int = 1  # register 0 takes what nobody reads
    constants: dict[int, int] = field(default_factory=dict)
    specials: dict[int, str] = field(default_factory=dict)
    static_shared: int = 0
    local: int = 0


def parse(text: str) -> Module:
    """Parse the one kernel of a PTX file. Raises PtxError."""
    text = _COMMENT.sub("", text)
    entries = list(_ENTRY.finditer(text))
    if len(entries) != 1 or ".func" in text:
        raise PtxError(f"expected one kernel without functions, got {len(entries)}")
    [entry] = entries
    symbols: dict[str, int] = {}
    parameters, offset = [], 0
    for align, kind, name, count in _PARAMETER.findall(entry[2]):
        size = _SIZES[kind] * int(count or 1)
        offset = -(-offset // (unit := int(align or size))) * unit
        symbols[name] = offset
        parameters.append((offset, size))
        offset += size
    module = Module(entry[1], parameters)
    for extern, align, name, count in _SHARED.findall(text):
        if extern:
            symbols[name] = DYNAMIC_SHARED
            continue
        start = -(-module.static_shared // int(align)) * int(align)
        symbols[name], module.static_shared = start, start + int(count)
    if module.static_shared > DYNAMIC_SHARED:
        raise PtxError(f"{module.static_shared} bytes of static shared memory")
    _Body(module, symbols).read(text[entry.end() :])
    return module


class _Body:
    """The reader of a kernel's statements."""

    def __init__(self, module: Module, symbols: dict[str, int]) -> None:
        self.module = module
        self.symbols = symbols
        self.known: dict[str, int] = {}
        self.scopes: list[int] = [0]
        self.scope_names: dict[tuple[int, str], str] = {}
        self.labels: dict[str, int] = {}
        self.jumps: list[tuple[int, list[str]]] = []

    def read(self, text: str) -> None:
        """Read up to the end of the kernel."""
        for statement in self._statements(text):
            self._read_statement(statement)
        done = self.module.instructions
        for index, names in self.jumps:
            target = next((self.labels[n] for n in names if n in self.labels), None)
            if target is None:
                raise PtxError(f"no label {names[0]}")
            done[index] = replace(done[index], target=target)

    def _statements(self, text: str) -> Iterator[str]:
        """Statements without their semicolon; scopes and labels are noted on the way."""
        at, scopes = 0, 0
        while True:
            while text[at].isspace() or text[at] == ";":
                at += 1
            if text[at] == "{":
                scopes += 1
                self.scopes.append(scopes)
                at += 1
            elif text[at] == "}":
                if len(self.scopes) == 1:
                    return
                self.scopes.pop()
                at += 1
            elif label := _LABEL.match(text, at):
                self.labels[self._scoped(label[1])] = len(self.module.instructions)
                at = label.end()
            else:
                end = text.index(";", at)
                yield " ".join(text[at:end].split())
                at = end + 1

    def _scoped(self, name: str) -> str:
        return f"{self.scopes[-1]}:{name}"

    def _read_statement(self, statement: str) -> None:
        if statement.startswith("."):
            if statement.startswith(".reg") and "%" not in statement:  # names of inline assembly
                for name in statement.split(maxsplit=2)[2].split(","):
                    self.known[self._scoped(name.strip())] = self._new()
            elif local := _LOCAL.fullmatch(statement):
                start = -(-self.module.local // int(local[1])) * int(local[1])
                self.symbols[local[2]], self.module.local = start, start + int(local[3])
            elif not statement.startswith((".reg", ".pragma")):
                raise PtxError(f"unknown directive: {statement}")
            return
        predicate = -1
        text = statement
        if text.startswith("@"):
            guard, text = text[1:].split(maxsplit=1)
            predicate = 2 * self._register(guard.lstrip("!")) + guard.startswith("!")
        name, _, rest = text.partition(" ")
        if name == "bra" or name.startswith("bra."):
            target = rest.strip()
            self.jumps.append(
                (len(self.module.instructions), [f"{s}:{target}" for s in reversed(self.scopes)])
            )
            self._emit(Instruction("bra", predicate, (), 0, statement))
            return
        self._emit(Instruction(name, predicate, self._operands(rest), 0, statement))

    def _emit(self, instruction: Instruction) -> None:
        self.module.instructions.append(instruction)

    def _operands(self, text: str) -> tuple[int, ...]:
        """Registers of the operands; an address is two of them, a base and a constant offset."""
        found: list[int] = []
        words = [match[1] for match in _TOKEN.finditer(text)]
        if "".join(words) != "".join(text.split()):
            raise PtxError(f"cannot read {text!r}")
        for at, word in enumerate(words):
            before = words[at - 1] if at else ""
            if word in "{}[],+|!" or before == "+":
                continue
            found.append(self._register(word))
            if before == "[":
                offset = words[at + 2] if words[at + 1] == "+" else "0"
                found.append(self._constant(offset))
        return tuple(found)

    def _register(self, word: str) -> int:
        if word == "_":
            return 0
        if word[0] == "%":
            known = word.startswith(("%p", "%r", "%f", "%SP")) and not word.startswith("%reserved")
            if word in self.known:
                return self.known[word]
            self.known[word] = new = self._new()
            if not known:
                self.module.specials[new] = word[1:]
            return new
        for scope in reversed(self.scopes):
            if f"{scope}:{word}" in self.known:
                return self.known[f"{scope}:{word}"]
        return self._constant(word)

    def _constant(self, word: str) -> int:
        if word in self.symbols:
            value = self.symbols[word]
        elif word[:2] in ("0f", "0d"):
            value = int(word[2:], 16)
        else:
            try:
                value = int(word.removesuffix("U"), 0)  # unsigned
            except ValueError:
                raise PtxError(f"unknown name {word}") from None
        [value] = struct.unpack("<q", struct.pack("<q" if value < 0 else "<Q", value))
        name = f"={value}"
        if name not in self.known:
            self.known[name] = new = self._new()
            self.module.constants[new] = value
        return self.known[name]

    def _new(self) -> int:
        self.module.registers += 1
        return self.module.registers - 1


__all__ = ["DYNAMIC_SHARED", "Instruction", "Module", "PtxError", "parse"]
