"""AMX-TILE and AMX-INT8 in numpy, for a Bochs that lacks them: decoding, and what the instructions do.

| encoding: VEX.128, map 0F38, W0 | pp NP        | pp 66          | pp F3         | pp F2        |
|---------------------------------|--------------|----------------|---------------|--------------|
| 49, memory operand              | LDTILECFG    | STTILECFG      |               |              |
| 49, register operand            | TILERELEASE  |                |               | TILEZERO     |
| 4B, memory operand with SIB     |              | TILELOADDT1    | TILESTORED    | TILELOADD    |
| 5E, register operand            | TDPBUUD      | TDPBUSD        | TDPBSUD       | TDPBSSD      |

After Intel's manual (volume 1, chapter 18, and the pages of the instructions in volume 2), palette 1: 8 tiles of at most
16 rows of 64 bytes. An exception ends the run, so no instruction is ever restarted and a nonzero start_row
comes from a program only.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from descriptor_tables import INVALID_OPCODE
from guest_memory import PAGE_BYTES, WRITE, GuestMemory

GENERAL_PROTECTION, PAGE_FAULT = 13, 14  # exceptions, with INVALID_OPCODE

TILES, ROWS, ROW_BYTES = 8, 16, 64
_CONFIG_BYTES = 64
_CONFIG = struct.Struct("<BB14x 8H 16x 8B 8x")
_RESERVED = (*range(2, 16), *range(32, 48), *range(56, 64))
_ALL_ONES = (1 << 64) - 1

LDTILECFG, STTILECFG, TILERELEASE, TILEZERO = "ldtilecfg", "sttilecfg", "tilerelease", "tilezero"
TILELOADD, TILESTORED = "tileloadd", "tilestored"
_UNSIGNED, _SIGNED = np.uint8, np.int8
# TDPB: types of the first and the second source.
_PRODUCTS = {
    "tdpbuud": (_UNSIGNED, _UNSIGNED),
    "tdpbusd": (_UNSIGNED, _SIGNED),
    "tdpbsud": (_SIGNED, _UNSIGNED),
    "tdpbssd": (_SIGNED, _SIGNED),
}
_NP, _66, _F3, _F2 = range(4)
# (opcode, prefix, whether the operand is a register): what it is
_OPERATIONS = {
    (0x49, _NP, False): LDTILECFG,
    (0x49, _66, False): STTILECFG,
    (0x49, _NP, True): TILERELEASE,
    (0x49, _F2, True): TILEZERO,
    (0x4B, _F2, False): TILELOADD,
    (0x4B, _66, False): TILELOADD,  # TILELOADDT1 differs in a hint
    (0x4B, _F3, False): TILESTORED,
    (0x5E, _NP, True): "tdpbuud",
    (0x5E, _66, True): "tdpbusd",
    (0x5E, _F3, True): "tdpbsud",
    (0x5E, _F2, True): "tdpbssd",
}


class CpuException(Exception):
    """What the processor would raise: a vector, what was wrong, and the address that a page fault is about."""

    def __init__(self, vector: int, why: str, address: int | None = None) -> None:
        super().__init__(why)
        self.vector, self.why, self.address = vector, why, address


# ---------------------------------------------------------------------------------------------- decoding


class Address(NamedTuple):
    """A memory operand: general registers by number, None where there is none.

    Attributes:
        relative: whether it counts from the next instruction.
        scale: the power of two that the index is multiplied by.
    """

    base: int | None
    index: int | None
    scale: int
    displacement: int
    relative: bool


class Instruction(NamedTuple):
    """One AMX instruction: ``reg``, ``rm`` and ``vvvv`` are tiles where the operation has such operands."""

    operation: str
    length: int
    reg: int
    rm: int
    vvvv: int
    address: Address | None


def decode(code: bytes) -> Instruction | None:
    """The AMX instruction that ``code`` begins with, or None; 15 bytes are always enough."""
    if len(code) < 5 or code[0] != 0xC4 or code[1] & 0x1F != 2 or code[2] & 0x84 != 0:  # VEX, map 0F38, W0, 128 bits
        return None
    extend_reg, extend_index, extend_base = (~code[1] >> bit & 1 for bit in (7, 6, 5))
    prefix, vvvv, modrm = code[2] & 3, ~code[2] >> 3 & 15, code[4]
    mod, reg, rm = modrm >> 6, modrm >> 3 & 7 | extend_reg << 3, modrm & 7
    operation = _OPERATIONS.get((code[3], prefix, mod == 3))
    if operation is None or (vvvv != 0 and operation not in _PRODUCTS):
        return None
    address, length = None, 5
    if mod != 3:
        address, length = _decode_address(code, mod, rm, extend_index, extend_base)
        if operation in (TILELOADD, TILESTORED) and rm != 4:  # a SIB byte is required
            return None
    rm |= extend_base << 3
    if operation in (LDTILECFG, STTILECFG, TILERELEASE) and reg != 0:
        return None
    if operation in (TILERELEASE, TILEZERO) and rm != 0:
        return None
    if max(reg, rm if operation in _PRODUCTS else 0, vvvv) >= TILES:
        return None
    return Instruction(operation, length, reg, rm, vvvv, address)


def _decode_address(code: bytes, mod: int, rm: int, extend_index: int, extend_base: int) -> tuple[Address, int]:
    """The memory operand, and the length of the instruction."""
    at = 5
    index, scale, relative = None, 0, False
    base: int | None = rm | extend_base << 3
    if rm == 4:
        sib = code[at]
        at += 1
        scale = sib >> 6
        index = sib >> 3 & 7 | extend_index << 3
        if index == 4:  # the place of RSP means none; R12 is an index
            index = None
        base = sib & 7 | extend_base << 3
        rm = sib & 7
    elif mod == 0 and rm == 5:
        relative = True
    wide = mod == 2 or (mod == 0 and rm == 5)
    if mod == 0 and rm == 5:
        base = None
    size = 4 if wide else mod  # mod 1: one byte
    displacement = int.from_bytes(code[at : at + size], "little", signed=True)
    return Address(base, index, scale, displacement, relative), at + size


# ---------------------------------------------------------------------------------------------- execution


class TileUnit:
    """Tile configuration and tile data, and what instructions do to them.

    Args:
        memory: the guest's memory; its permissions are respected.
    """

    def __init__(self, memory: GuestMemory) -> None:
        self._memory = memory
        self._bytes = memory.as_array()
        self._release()

    def _release(self) -> None:
        self._palette = self._start_row = 0
        self._rows = self._colsb = (0,) * TILES
        self._data = np.zeros((TILES, ROWS, ROW_BYTES), np.uint8)

    def execute(self, instruction: Instruction, register: Callable[[int], int], following: int) -> None:
        """Do what the instruction does, or raise CpuException.

        Args:
            instruction: what decode returned.
            register: reads a general register by number.
            following: the address of the next instruction.
        """
        operation = instruction.operation
        if operation in _PRODUCTS:
            self._multiply(operation, instruction.reg, instruction.rm, instruction.vvvv)
        elif operation == TILERELEASE:
            self._release()
        elif operation == TILEZERO:
            self._valid(instruction.reg)
            self._data[instruction.reg] = 0
            self._start_row = 0
        else:
            assert instruction.address is not None
            self._access(operation, instruction.reg, instruction.address, register, following)

    def _access(
        self, operation: str, tile: int, place: Address, register: Callable[[int], int], following: int
    ) -> None:
        base = 0 if place.base is None else register(place.base)
        index = 0 if place.index is None else register(place.index) << place.scale
        start = base + place.displacement + (following if place.relative else 0)
        if operation in (TILELOADD, TILESTORED):
            self._move(operation, tile, start & _ALL_ONES, index & _ALL_ONES)
            return
        address = start + index & _ALL_ONES
        if operation == LDTILECFG:
            self._require(address, _CONFIG_BYTES, 0)
            self._configure(self._memory.read(address, _CONFIG_BYTES))
        else:
            self._require(address, _CONFIG_BYTES, WRITE)
            stored = _CONFIG.pack(self._palette, self._start_row, *self._colsb, *self._rows)
            self._memory.write(address, stored if self._palette else bytes(_CONFIG_BYTES))

    def _configure(self, raw: bytes) -> None:
        palette, start_row, *sizes = _CONFIG.unpack(raw)
        if palette == 0:
            self._release()
            return
        colsb, rows = tuple(sizes[:TILES]), tuple(sizes[TILES:])
        wrong = (
            "the palette is not 0 or 1" if palette > 1
            else "a reserved byte is not 0" if any(raw[i] for i in _RESERVED)
            else f"a row has more than {ROW_BYTES} bytes" if max(colsb) > ROW_BYTES
            else f"a tile has more than {ROWS} rows" if max(rows) > ROWS
            else "a tile has rows without bytes, or bytes without rows"
            if any((r == 0) != (c == 0) for r, c in zip(rows, colsb, strict=True))
            else None
        )  # fmt: skip
        if wrong is not None:
            raise CpuException(GENERAL_PROTECTION, f"ldtilecfg: {wrong}")
        self._release()
        self._palette, self._start_row, self._colsb, self._rows = palette, start_row, colsb, rows

    def _valid(self, tile: int) -> tuple[int, int]:
        """Rows and bytes of a tile that is configured."""
        if self._rows[tile] == 0:
            raise CpuException(INVALID_OPCODE, f"tile {tile} is not configured")
        return self._rows[tile], self._colsb[tile]

    def _move(self, operation: str, tile: int, start: int, stride: int) -> None:
        rows, colsb = self._valid(tile)
        if colsb % 4 != 0 or self._start_row >= rows:
            raise CpuException(INVALID_OPCODE, f"tile {tile}: {colsb} bytes a row, start row {self._start_row}")
        storing = operation == TILESTORED
        if not storing:
            self._data[tile, self._start_row :] = 0
        for row in range(self._start_row, rows):
            address = start + row * stride & _ALL_ONES
            self._require(address, colsb, WRITE if storing else 0)
            if storing:
                self._bytes[address : address + colsb] = self._data[tile, row, :colsb]
            else:
                self._data[tile, row, :colsb] = self._bytes[address : address + colsb]
        self._start_row = 0

    def _multiply(self, operation: str, target: int, first: int, second: int) -> None:
        (rows, target_bytes), (first_rows, first_bytes), (second_rows, second_bytes) = map(
            self._valid, (target, first, second)
        )
        fits = (
            len({target, first, second}) == 3
            and target_bytes % 4 == first_bytes % 4 == second_bytes % 4 == 0
            and rows == first_rows
            and first_bytes == 4 * second_rows
            and target_bytes == second_bytes
        )
        if not fits:
            raise CpuException(INVALID_OPCODE, f"{operation}: tiles {target}, {first} and {second} do not fit together")
        left_type, right_type = _PRODUCTS[operation]
        left = self._data[first, :rows, :first_bytes].view(left_type).astype(np.int32)
        # [depth / 4][column][4] -> [depth][column]
        right = self._data[second, :second_rows, :second_bytes].view(right_type).astype(np.int32)
        right = right.reshape(second_rows, -1, 4).swapaxes(1, 2).reshape(first_bytes, -1)
        self._data[target].view(np.int32)[:rows, : target_bytes // 4] += left @ right  # modulo 2^32
        self._data[target, rows:] = 0
        self._data[target, :, target_bytes:] = 0
        self._start_row = 0

    def _require(self, address: int, size: int, permission: int) -> None:
        first = address
        while first < address + size:
            if not self._memory.permits(first, permission):
                raise CpuException(PAGE_FAULT, "an operand of AMX", first)
            first = (first // PAGE_BYTES + 1) * PAGE_BYTES
