"""The emulated program's memory: one block of the host's, its page tables, and the program loaded into it.

A guest address is an offset into the block, both as a virtual and as a physical address, so the page tables only hold
permissions. They are one flat array of entries for all pages; every table above it is present throughout.

Limits: 16 GiB of addresses. Statically linked x86-64 ELF programs only.
"""

from __future__ import annotations

import array
import ctypes
import mmap
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy

MIB, GIB = 1 << 20, 1 << 30
PAGE_BYTES = 4096

# Where things are, upwards from the program itself, which says where it wants to be (near 4 MiB).
MEMORY_BYTES = 16 * GIB
LOAD_ADDRESS = 256 * MIB  # of a program that does not say
HEAP_LIMIT = 2 * GIB
STACK_TOP, STACK_BYTES = 3 * GIB, 64 * MIB
MAPPINGS, MAPPINGS_END = 4 * GIB, 14 * GIB
STUB = MEMORY_BYTES - GIB  # code that SYSCALL jumps to
_LEVEL4 = STUB + MIB
_LEVEL3 = STUB + 2 * MIB
_LEVEL2 = STUB + 3 * MIB
_LEVEL1 = STUB + 512 * MIB

READ, WRITE, EXECUTE = 1, 2, 4  # as in mprotect(2)
_ENTRY_BYTES = 8
_PAGES_PER_TABLE = 512
_PRESENT, _WRITABLE, _USED, _NO_EXECUTE = 1, 2, 0x60, 1 << 63  # of a page table entry; used = accessed and dirty
_MAP_NORESERVE = 0x4000  # mmap.MAP_NORESERVE is new in Python 3.13


class NotLoadable(Exception):
    """Why a program cannot be loaded; the text is one line, shown to people."""


def round_up(value: int, unit: int = PAGE_BYTES) -> int:
    """The next multiple of ``unit``."""
    return -(-value // unit) * unit


class GuestMemory:
    """All that the emulated program can address; pages have no permissions until ``protect`` gives them some."""

    def __init__(self) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._block = mmap.mmap(-1, MEMORY_BYTES, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        self._block.madvise(mmap.MADV_NOHUGEPAGE)  # or a touched byte costs 2 MiB
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._block))
        self.page_table_root = _LEVEL4
        below = _LEVEL1
        tables = MEMORY_BYTES // PAGE_BYTES // _PAGES_PER_TABLE
        for level in (_LEVEL2, _LEVEL3, _LEVEL4):
            self._fill_table(level, below, tables, _PRESENT | _WRITABLE)
            below, tables = level, -(-tables // _PAGES_PER_TABLE)

    def _fill_table(self, table: int, first_page: int, count: int, flags: int) -> None:
        first = first_page | flags
        self.write(table, array.array("Q", range(first, first + count * PAGE_BYTES, PAGE_BYTES)).tobytes())

    def holds(self, address: int, size: int = 1) -> bool:
        """Whether these bytes exist at all."""
        return address >= 0 and address + size <= MEMORY_BYTES

    def host_address(self, address: int) -> int:
        """Where the host has this byte; 0, the null pointer, for null."""
        return self._address + address if address else 0

    def read(self, address: int, size: int) -> bytes:
        """Copy bytes out, whatever the permissions."""
        return self._block[address : address + size]

    def write(self, address: int, data: bytes) -> None:
        """Copy bytes in, whatever the permissions."""
        self._block[address : address + len(data)] = data

    def protect(self, address: int, size: int, permissions: int) -> None:
        """Set the permissions of whole pages: any of READ, WRITE and EXECUTE, or 0 for no access."""
        first, end = address // PAGE_BYTES, round_up(address + size) // PAGE_BYTES
        entry = _LEVEL1 + first * _ENTRY_BYTES
        if permissions == 0:
            self.write(entry, bytes((end - first) * _ENTRY_BYTES))
            return
        flags = _PRESENT | _USED
        flags |= _WRITABLE if permissions & WRITE else 0
        flags |= 0 if permissions & EXECUTE else _NO_EXECUTE
        self._fill_table(entry, first * PAGE_BYTES, end - first, flags)

    def permits(self, address: int, permissions: int) -> bool:
        """Whether a byte can be read, and written where WRITE is asked for."""
        if not self.holds(address):
            return False
        entry = self._block[
            _LEVEL1 + address // PAGE_BYTES * _ENTRY_BYTES
        ]  # present and writable are in its first byte
        wanted = _PRESENT | (_WRITABLE if permissions & WRITE else 0)
        return entry & wanted == wanted

    def as_array(self) -> numpy.ndarray:
        """All bytes as a numpy array that shares them."""
        import numpy  # not needed where no AMX is emulated

        return numpy.frombuffer(self._block, numpy.uint8)

    def clear(self, address: int, size: int) -> None:
        """Make whole pages zero and give their memory back to the host."""
        self._block.madvise(mmap.MADV_DONTNEED, address, round_up(size))


# ---------------------------------------------------------------------------------------------- programs

_ELF_HEADER = struct.Struct("<4sBBBB8x HHIQQQIHHHHHH")
_PROGRAM_HEADER = struct.Struct("<IIQQQQQQ")
_ELF_64_BIT, _ELF_POSITION_INDEPENDENT, _ELF_X86_64 = 2, 3, 62
_SEGMENT_LOAD, _SEGMENT_INTERPRETER = 1, 3
_ELF_EXECUTE, _ELF_WRITE, _ELF_READ = 1, 2, 4


class Program(NamedTuple):
    """A loaded program: its entry, where its program headers are and how many, and the first free page after it."""

    entry: int
    headers: int
    header_count: int
    end: int


def load_program(memory: GuestMemory, path: Path) -> Program:
    """Load a statically linked program, or raise NotLoadable."""
    try:
        image = path.read_bytes()
    except OSError as error:
        raise NotLoadable(f"{path}: {error.strerror}") from None
    if len(image) < _ELF_HEADER.size:
        raise NotLoadable(f"{path} is not a program")
    magic, bits, _, _, _, kind, machine, _, entry, headers_at, _, _, _, _, count, *_ = _ELF_HEADER.unpack_from(image)
    if magic != b"\x7fELF" or bits != _ELF_64_BIT or machine != _ELF_X86_64:
        raise NotLoadable(f"{path} is not an x86-64 program")
    moved_by = LOAD_ADDRESS if kind == _ELF_POSITION_INDEPENDENT else 0
    end = headers = 0
    for index in range(count):
        header = _PROGRAM_HEADER.unpack_from(image, headers_at + index * _PROGRAM_HEADER.size)
        segment, flags, offset, address, _, file_bytes, memory_bytes, _ = header
        if segment == _SEGMENT_INTERPRETER:
            raise NotLoadable(f"{path} is linked dynamically: link it with -static")
        if segment != _SEGMENT_LOAD:
            continue
        address += moved_by
        if address + memory_bytes > HEAP_LIMIT:
            raise NotLoadable(f"{path} wants to be at {address:#x}: programs have to end below {HEAP_LIMIT:#x}")
        memory.write(address, image[offset : offset + file_bytes])
        permissions = READ if flags & _ELF_READ else 0
        permissions |= WRITE if flags & _ELF_WRITE else 0
        permissions |= EXECUTE if flags & _ELF_EXECUTE else 0
        page = address // PAGE_BYTES * PAGE_BYTES
        memory.protect(page, address + memory_bytes - page, permissions)
        end = max(end, address + memory_bytes)
        if offset <= headers_at < offset + file_bytes:
            headers = address + headers_at - offset
    return Program(entry + moved_by, headers, count, round_up(end))


# The auxiliary vector, see getauxval(3).
_AT_NULL, _AT_PHDR, _AT_PHENT, _AT_PHNUM, _AT_PAGESZ, _AT_ENTRY = 0, 3, 4, 5, 6, 9
_AT_SECURE, _AT_RANDOM = 23, 25
_RANDOM_BYTES = 16
_STACK_ALIGNMENT = 16


def build_stack(memory: GuestMemory, program: Program, arguments: Sequence[str]) -> int:
    """Make the stack that a program finds at its start, with this process' environment; returns the stack pointer."""
    memory.protect(STACK_TOP - STACK_BYTES, STACK_BYTES, READ | WRITE)
    top = STACK_TOP

    def push(data: bytes) -> int:
        nonlocal top
        top -= len(data)
        memory.write(top, data)
        return top

    argument_pointers = [push(os.fsencode(argument) + b"\0") for argument in arguments]
    environment_pointers = [push(name + b"=" + value + b"\0") for name, value in os.environb.items()]
    auxiliary = {
        _AT_PHDR: program.headers,
        _AT_PHENT: _PROGRAM_HEADER.size,
        _AT_PHNUM: program.header_count,
        _AT_PAGESZ: PAGE_BYTES,
        _AT_ENTRY: program.entry,
        _AT_SECURE: 0,
        _AT_RANDOM: push(os.urandom(_RANDOM_BYTES)),
        _AT_NULL: 0,  # ends the list
    }
    words = [len(argument_pointers), *argument_pointers, 0, *environment_pointers, 0]
    words += [word for pair in auxiliary.items() for word in pair]
    table = struct.pack(f"<{len(words)}Q", *words)
    top = (top - len(table)) // _STACK_ALIGNMENT * _STACK_ALIGNMENT
    memory.write(top, table)
    return top
