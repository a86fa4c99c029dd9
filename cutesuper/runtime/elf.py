"""A reader for the 64-bit little-endian ELF files in use here: cubins and exported libraries.

Files come from outside, so every offset is checked; a file that does not fit raises
:class:`FormatError` and never an ``IndexError``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from cutesuper.errors import FormatError

_SECTION_HEADER = struct.Struct("<IIQQQQIIQQ")
_NOBITS = 8


@dataclass(frozen=True)
class Section:
    """One section: its header fields that matter here, and its bytes (empty for NOBITS)."""

    name: str
    flags: int
    size: int
    info: int
    data: bytes


@dataclass(frozen=True)
class Elf:
    """The sections of one ELF file, in file order."""

    sections: tuple[Section, ...]

    def find(self, name: str) -> Section | None:
        """The first section with this name."""
        return next((section for section in self.sections if section.name == name), None)

    def with_prefix(self, prefix: str) -> Iterator[tuple[str, Section]]:
        """Sections called ``prefix + rest``, as ``(rest, section)``."""
        for section in self.sections:
            if section.name.startswith(prefix):
                yield section.name[len(prefix) :], section


def parse_elf(data: bytes, what: str) -> Elf:
    """Parse the section table.

    Args:
        data: the whole file.
        what: name of the file in messages, e.g. a path.

    Raises:
        FormatError: when this is not a complete 64-bit little-endian ELF file.
    """
    if len(data) < 64 or data[:6] != b"\x7fELF\x02\x01":
        raise FormatError(f"{what}: not a 64-bit little-endian ELF file ({len(data)} bytes)")
    (offset,) = struct.unpack_from("<Q", data, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", data, 0x3A)
    if entry_size != _SECTION_HEADER.size or offset + count * entry_size > len(data):
        raise FormatError(f"{what}: the ELF section table lies outside the file; it is truncated")
    headers = [_SECTION_HEADER.unpack_from(data, offset + i * entry_size) for i in range(count)]
    if not 0 <= names_index < count:
        raise FormatError(f"{what}: the ELF file has no section names")
    names = _contents(data, headers[names_index], what)
    return Elf(tuple(_section(data, header, names, what) for header in headers))


def read_string(table: bytes, offset: int) -> str:
    """The zero-terminated string at ``offset`` of a string table ('' when outside)."""
    end = table.find(b"\0", offset)
    return table[offset:end].decode("utf-8", "replace") if 0 <= offset < end else ""


def _section(data: bytes, header: tuple[int, ...], names: bytes, what: str) -> Section:
    return Section(
        name=read_string(names, header[0]),
        flags=header[2],
        size=header[5],
        info=header[7],
        data=_contents(data, header, what),
    )


def _contents(data: bytes, header: tuple[int, ...], what: str) -> bytes:
    kind, offset, size = header[1], header[4], header[5]
    if kind == _NOBITS:
        return b""
    if offset + size > len(data):
        raise FormatError(f"{what}: an ELF section ends outside the file; it is truncated")
    return data[offset : offset + size]
