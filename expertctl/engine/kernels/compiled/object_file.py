"""Images of ELF object files for x86-64: their sections one after the other.

numba compiles for a process in the large code model, where code reaches everything by absolute
addresses of 64 bits. So when sections have their places, those addresses are all that is left to
fill in. An object file with anything else has no image; LLVM's linker takes it as it is.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from expertctl.engine.kernels.machine_code import ENTRY_POINT, CodeImage, find_library_function
from expertctl.errors import KernelsUnavailableError

_START = b"\x7fELF\x02\x01"
"""64 bits, little endian."""
_HEADER, _SECTION, _SYMBOL, _RELOCATION = (
    struct.Struct(form) for form in ("<16xHHIQQQIHHHHHH", "<IIQQQQIIQQ", "<IBBHQQ", "<QQq")
)
_RELOCATABLE, _X86_64 = 1, 62
_CONTENT, _SYMBOLS, _RELOCATIONS, _UNWINDING = 1, 2, 4, 0x70000001
"""Types of sections. Unwinding is left out: no exception passes through compiled code."""
_WRITABLE, _LOADED = 1, 2
_ADDRESS = 1
"""The type of a relocation that is an absolute address of 64 bits."""
_UNDEFINED = 0


class UnsupportedObjectError(Exception):
    """An object file has no image."""


@dataclass(frozen=True, slots=True)
class _Section:
    kind: int
    flags: int
    link: int
    """The section with the symbols or names that belong to this one."""
    target: int
    """The section that these relocations change."""
    alignment: int
    content: bytes

    @property
    def is_loaded(self) -> bool:
        return bool(self.flags & _LOADED) and self.kind != _UNWINDING


@dataclass(frozen=True, slots=True)
class _Symbol:
    name: str
    place: int | None
    """Its offset in the image; None for a function of the C library."""


def make_image(code: bytes) -> CodeImage:
    """Return the image of an object file.

    Raises:
        UnsupportedObjectError: when it has none.
    """
    sections = list(_read_sections(code))
    content, places = _lay_out(sections)
    [table] = [section for section in sections if section.kind == _SYMBOLS]
    symbols = list(_read_symbols(table, sections[table.link].content, places))
    addresses, functions = list[tuple[int, int]](), list[tuple[int, str]]()
    for place, number, addend in _read_relocations(sections, places):
        symbol = symbols[number]
        if symbol.place is None:
            functions.append((place, _check_function(symbol.name, addend)))
        else:
            addresses.append((place, symbol.place + addend))
    [entry] = [symbol.place for symbol in symbols if symbol.name == ENTRY_POINT]
    assert entry is not None
    return CodeImage(entry, addresses, functions, content)


def _read_sections(code: bytes) -> Iterator[_Section]:
    _require(code.startswith(_START), "it is no ELF file of 64 bits")
    kind, machine, _, _, _, table, _, _, _, _, size, count, _ = _HEADER.unpack_from(code)
    _require((kind, machine) == (_RELOCATABLE, _X86_64), "it is no object file for x86-64")
    for start in range(table, table + count * size, size):
        fields = _SECTION.unpack_from(code, start)
        _, kind, flags, _, offset, length, link, target, alignment, _ = fields
        yield _Section(kind, flags, link, target, alignment, code[offset : offset + length])


def _lay_out(sections: Sequence[_Section]) -> tuple[bytes, Mapping[int, int]]:
    """Return the loaded sections one after the other, and the offset of each by its number."""
    content, places = bytearray(), dict[int, int]()
    for number, section in enumerate(sections):
        if section.is_loaded:
            _require(section.kind == _CONTENT, "a section has no content")
            _require(not section.flags & _WRITABLE, "a section is writable")
            content += bytes(-len(content) % max(section.alignment, 1))
            places[number] = len(content)
            content += section.content
    return bytes(content), places


def _read_symbols(table: _Section, names: bytes, places: Mapping[int, int]) -> Iterator[_Symbol]:
    for start, _, _, section, value, _ in _SYMBOL.iter_unpack(table.content):
        name = names[start : names.index(b"\0", start)].decode()
        if section in places:
            yield _Symbol(name, places[section] + value)
        else:
            yield _Symbol(name if section == _UNDEFINED else "", None)


def _read_relocations(
    sections: Sequence[_Section], places: Mapping[int, int]
) -> Iterator[tuple[int, int, int]]:
    """Yield the offset in the image, the number of the symbol and the addend of each relocation."""
    for section in sections:
        if section.kind == _RELOCATIONS and section.target in places:
            for offset, info, addend in _RELOCATION.iter_unpack(section.content):
                _require(info & 0xFFFFFFFF == _ADDRESS, "a relocation is not an address")
                yield places[section.target] + offset, info >> 32, addend


def _check_function(name: str, addend: int) -> str:
    try:
        find_library_function(name)
    except KernelsUnavailableError:
        raise UnsupportedObjectError(f"the C library has no '{name}'") from None
    _require(addend == 0, f"'{name}' is not called")
    return name


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise UnsupportedObjectError(problem)
