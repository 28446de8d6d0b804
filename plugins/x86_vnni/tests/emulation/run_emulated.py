"""Run a statically linked x86-64 Linux program on an emulated processor, in user mode, without privileges.

    python run_emulated.py [-m MODEL] [-t SECONDS] PROGRAM [ARG...]
    python run_emulated.py --check

Why: to run and check the VNNI and AMX code on machines whose processor has none. The program's input, output and exit
status pass through; a fault gives 128 + its signal, as in a shell. Exit statuses of the emulator itself, as those of
timeout(1): 124 time limit, 125 the emulator cannot be had here or failed, 126 not such a program, 127 no program.

Limits: one thread, no fork, exec, sockets or signal handlers (syscalls.py). What instructions do is Bochs' model of
them, not silicon's; how long they take means nothing. 10 to 60 million scalar instructions a second.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from bochs_cpu import INSTALL, MODELS, RSP, STUB_CODE, BochsCpu, EmulatorUnavailable, load_library
from descriptor_tables import INVALID_OPCODE, continue_at, read_frame
from guest_memory import EXECUTE, READ, STUB, GuestMemory, NotLoadable, build_stack, load_program
from syscalls import SystemCalls

if TYPE_CHECKING:
    from amx import TileUnit

TIME_LIMIT, EMULATOR_FAILED, NOT_LOADABLE, NOT_FOUND = 124, 125, 126, 127

_STATUS_OF_SIGNAL = 128
_INSTRUCTION_BYTES = 16  # shown after a fault
_PAGE_FAULT = 14
# Exceptions of the processor: what Linux makes of them.
_FAULTS = {
    0: ("division error", signal.SIGFPE),
    1: ("debug exception", signal.SIGTRAP),
    3: ("breakpoint", signal.SIGTRAP),
    INVALID_OPCODE: ("illegal instruction", signal.SIGILL),
    13: ("general protection fault", signal.SIGSEGV),
    _PAGE_FAULT: ("page fault", signal.SIGSEGV),
    16: ("x87 error", signal.SIGFPE),
    17: ("misaligned access", signal.SIGBUS),
    19: ("SIMD floating-point error", signal.SIGFPE),
}


def end(status: int, message: str | None = None) -> NoReturn:
    """End the process from within a callback of Bochs, which no exception can cross."""
    if message is not None:
        print(f"run_emulated: {message}", file=sys.stderr)
    sys.stderr.flush()
    os._exit(status)


def prepare(shim_folder: Path | None) -> tuple[ctypes.CDLL, GuestMemory]:
    """All that can be missing on this machine, or EmulatorUnavailable."""
    library = load_library(shim_folder)
    try:
        return library, GuestMemory()
    except OSError as error:
        raise EmulatorUnavailable(f"no address space for the guest's memory: {error.strerror}") from None


def tile_unit(memory: GuestMemory) -> TileUnit:
    """AMX, or EmulatorUnavailable."""
    try:
        from amx import TileUnit
    except ImportError as error:
        raise EmulatorUnavailable(f"emulating AMX needs numpy ({error}): pip install numpy") from None
    return TileUnit(memory)


class Run:
    """One program on one processor."""

    def __init__(
        self, library: ctypes.CDLL, memory: GuestMemory, model: str, program: Path, arguments: list[str]
    ) -> None:
        self._memory = memory
        memory.write(STUB, STUB_CODE)
        memory.protect(STUB, len(STUB_CODE), READ | EXECUTE)
        self._program = load_program(memory, program)
        self._stack = build_stack(memory, self._program, [str(program), *arguments])
        self._cpu = BochsCpu(library, MODELS[model], memory)
        self._calls = SystemCalls(self._cpu, memory, self._program, end)
        self._tiles = tile_unit(memory) if MODELS[model].amx else None

    def go(self) -> NoReturn:
        """Run until the program or its time ends."""
        self._cpu.run(self._program.entry, self._stack, self._system_call, self._fault, self._invalid_opcode)
        end(EMULATOR_FAILED, f"the processor stopped at {self._cpu.instruction_pointer:#x}")

    def _system_call(self) -> None:
        try:
            self._calls.answer()
        except BaseException:
            traceback.print_exc()
            end(EMULATOR_FAILED, "internal error in a system call")

    def _invalid_opcode(self) -> None:
        try:
            self._do_for_the_processor()
        except BaseException:
            traceback.print_exc()
            end(EMULATOR_FAILED, "internal error in an emulated instruction")

    def _do_for_the_processor(self) -> None:
        """Execute the AMX instruction that raised invalid opcode, and go on behind it."""
        from amx import CpuException, decode

        assert self._tiles is not None
        handler_stack = self._cpu.read(RSP)
        frame = read_frame(self._memory, handler_stack)
        address = frame.instruction_pointer
        instruction = decode(self._memory.read(address, _INSTRUCTION_BYTES))
        if instruction is None:
            self._report(INVALID_OPCODE, f"at {address:#x}", address)
        following = address + instruction.length

        def register(number: int) -> int:
            return frame.stack_pointer if number == RSP else self._cpu.read(number)

        try:
            self._tiles.execute(instruction, register, following)
        except CpuException as exception:
            touched = f"for address {exception.address:#x} " if exception.address is not None else ""
            self._report(exception.vector, f"{touched}({exception.why}) at {address:#x}", address)
        continue_at(self._memory, handler_stack, following)

    def _fault(self, vector: int, code: int) -> None:
        address = self._cpu.instruction_pointer  # already past the instruction, when its length was known
        touched = f"for address {self._cpu.fault_address:#x} " if vector == _PAGE_FAULT else ""
        self._report(vector, f"{touched}(code {code:#x}) at or just before {address:#x}", address)

    def _report(self, vector: int, where: str, address: int) -> NoReturn:
        what, number = _FAULTS.get(vector, (f"exception {vector}", signal.SIGSEGV))
        bytes_there = self._memory.read(address, _INSTRUCTION_BYTES).hex()
        end(_STATUS_OF_SIGNAL + number, f"{what} {where}, where the bytes are {bytes_there}")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Run a static x86-64 Linux program on an emulated processor.",
        epilog=f"Needs: {INSTALL}",
    )
    parser.add_argument("-m", "--model", choices=MODELS, default="icelake", help="default: %(default)s")
    parser.add_argument("-t", "--time-limit", type=float, metavar="SECONDS", help="default: none")
    parser.add_argument(
        "--shim-folder", type=Path, metavar="DIR", help="where the shim for glibc < 2.38 is kept; default: nowhere"
    )
    parser.add_argument("--check", action="store_true", help="only say whether the emulator can be had here")
    parser.add_argument("program", type=Path, nargs="?", metavar="PROGRAM")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARG")
    options = parser.parse_args(arguments)
    if options.program is None and not options.check:
        parser.error("no program is named")
    return options


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run what the command line names; the exit status is the program's."""
    options = parse(arguments)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own handler would wait for a system call
    try:
        library, memory = prepare(options.shim_folder)
        if options.check:
            end(0)
        run = Run(library, memory, options.model, options.program, options.arguments)
    except EmulatorUnavailable as error:
        end(EMULATOR_FAILED, str(error))
    except NotLoadable as error:
        end(NOT_LOADABLE if options.program.exists() else NOT_FOUND, str(error))
    if options.time_limit is not None:
        # A thread, since Python handles no signal while the processor runs.
        message = f"stopped after {options.time_limit:g} s"
        watch = threading.Timer(options.time_limit, end, (TIME_LIMIT, message))
        watch.daemon = True
        watch.start()
    run.go()


if __name__ == "__main__":
    main()
