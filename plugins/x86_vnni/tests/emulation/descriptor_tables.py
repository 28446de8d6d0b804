"""What the processor needs in memory to deliver one exception, invalid opcode, to code of ours: IDT, GDT and TSS.

Bochs calls a hook before it delivers an exception, but goes back to the faulting instruction afterwards whatever the
hook does. So the exception is delivered, as on any machine: to ILLEGAL_CODE, on a stack of its own, since the program
may keep data below its stack pointer. There WBINVD calls the hook that SYSCALL uses, too, and IRETQ goes on wherever
the hook has set the saved instruction pointer to.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from guest_memory import PAGE_BYTES, READ, STUB, WRITE, GuestMemory

CODE_SELECTOR, DATA_SELECTOR, TASK_SELECTOR = 8, 16, 24
CODE_ATTRIBUTES, DATA_ATTRIBUTES = 0xAF9B, 0xCF93  # present, ring 0; 64-bit code, readable; data, writable
TASK_ATTRIBUTES = 0x008B  # present, busy 64-bit TSS

INVALID_OPCODE = 6
ILLEGAL = STUB + 64
ILLEGAL_CODE = bytes.fromhex("0f09 48cf")  # wbinvd; iretq

IDT, GDT, TSS = STUB + PAGE_BYTES, STUB + PAGE_BYTES + 512, STUB + PAGE_BYTES + 1024
_STACK_TOP = STUB + 3 * PAGE_BYTES
_INTERRUPT_GATE = 0x8E  # present, ring 0
_STACK_INDEX = 1  # of the seven in a TSS
_TSS = struct.Struct("<4x 3Q 8x 7Q 8x 2x H")

_FRAME = struct.Struct("<5Q")


class Frame(NamedTuple):
    """What the processor pushed: where the program was, and what IRETQ takes back."""

    instruction_pointer: int
    code_segment: int
    flags: int
    stack_pointer: int
    stack_segment: int


def _segment(attributes: int) -> int:
    """A flat segment's descriptor: base 0, limit all ones."""
    return 0xFFFF | (attributes & 0xFF) << 40 | (attributes & 0xFF00) << 40


def write_tables(memory: GuestMemory) -> tuple[int, int, int]:
    """Write the code and the tables; the limits of IDT, GDT and TSS are returned."""
    memory.write(ILLEGAL, ILLEGAL_CODE)
    gate = struct.pack(
        "<HHBBHII", ILLEGAL & 0xFFFF, CODE_SELECTOR, _STACK_INDEX, _INTERRUPT_GATE, ILLEGAL >> 16 & 0xFFFF,
        ILLEGAL >> 32, 0,
    )  # fmt: skip
    idt = gate.rjust((INVALID_OPCODE + 1) * len(gate), b"\0")
    gdt = struct.pack("<3Q", 0, _segment(CODE_ATTRIBUTES), _segment(DATA_ATTRIBUTES))
    tss = _TSS.pack(0, 0, 0, _STACK_TOP, *(0,) * 6, _TSS.size)
    for address, table in ((IDT, idt), (GDT, gdt), (TSS, tss)):
        memory.write(address, table)
    memory.protect(STUB + PAGE_BYTES, 2 * PAGE_BYTES, READ | WRITE)
    return len(idt) - 1, len(gdt) - 1, len(tss) - 1


def read_frame(memory: GuestMemory, stack_pointer: int) -> Frame:
    """The frame of the exception that is being handled."""
    return Frame(*_FRAME.unpack(memory.read(stack_pointer, _FRAME.size)))


def continue_at(memory: GuestMemory, stack_pointer: int, address: int) -> None:
    """Make IRETQ go to ``address``."""
    memory.write(stack_pointer, struct.pack("<Q", address))
