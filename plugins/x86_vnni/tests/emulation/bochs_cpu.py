"""One emulated x86-64 processor: the CPU core of Bochs, from the PyPI wheel ``bochscpu-python``.

What: BochsCpu sets a chosen processor up in 64-bit mode on a GuestMemory, runs it, and calls back when the program
makes a system call or faults.

Why ctypes: the wheel's Python classes cannot choose the processor's model; the library in it exports that, in C.
The symbols are no promised interface, so exactly one version of the wheel is accepted.

How a system call arrives: the program runs in ring 0, and SYSCALL jumps to STUB_CODE, ``wbinvd; jmp *rcx``. Of all
hooks that Bochs offers, the one for cache control is the cheapest, and programs never use WBINVD themselves. Invalid
opcodes arrive likewise on a model with AMX, see descriptor_tables.py.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from descriptor_tables import (
    CODE_ATTRIBUTES,
    CODE_SELECTOR,
    DATA_ATTRIBUTES,
    DATA_SELECTOR,
    GDT,
    IDT,
    ILLEGAL,
    INVALID_OPCODE,
    TASK_ATTRIBUTES,
    TASK_SELECTOR,
    TSS,
    write_tables,
)
from guest_memory import PAGE_BYTES, STUB, GuestMemory

WHEEL, WHEEL_VERSION = "bochscpu-python", "0.4.0"
INSTALL = f"pip install {WHEEL}=={WHEEL_VERSION}"


class EmulatorUnavailable(Exception):
    """Why the emulator cannot be had here; the text is one line, shown to people."""


class CpuModel(NamedTuple):
    """A processor that Bochs knows.

    Attributes:
        bochs_number: its place in the list there.
        avx512: whether the system enables AVX-512 state on it.
        amx: whether invalid opcodes go to a handler that does AMX in Bochs' place; CPUID still denies it.
    """

    bochs_number: int
    avx512: bool
    amx: bool = False


MODELS = {
    "haswell": CpuModel(24, avx512=False),  # AVX2, FMA
    "skylake-x": CpuModel(26, avx512=True),  # AVX-512 F CD BW DQ VL
    "icelake": CpuModel(28, avx512=True),  # and IFMA, VBMI, VBMI2, VNNI, BITALG, VPOPCNTDQ
    "sapphirerapids": CpuModel(30, avx512=True),  # and AVX-VNNI, BF16, FP16; this build has no AMX
    "sapphirerapids-amx": CpuModel(30, avx512=True, amx=True),  # and AMX-TILE, AMX-INT8 by amx.py
    "arrowlake": CpuModel(31, avx512=False),  # AVX2, AVX-VNNI, AVX-VNNI-INT8 and -INT16
}

# ---------------------------------------------------------------------------------------------- the library

# The wheel's library wants five symbols of glibc 2.38. They differ from the older ones in accepting "0b" numbers only.
_SHIM_SOURCE = r"""
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#define FORWARD(type, name) type __isoc23_##name(const char *s, char **end, int base) { return name(s, end, base); }
FORWARD(long, strtol)
FORWARD(unsigned long, strtoul)
FORWARD(long long, strtoll)
FORWARD(unsigned long long, strtoull)
int __isoc23_sscanf(const char *s, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  int result = vsscanf(s, format, arguments);
  va_end(arguments);
  return result;
}
"""
_SHIM_NAME = "isoc23_shim.so"
_FIRST_GLIBC_WITHOUT_SHIM = (2, 38)


def _find_wheel_library() -> Path:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise EmulatorUnavailable(f"{WHEEL} is used on Linux x86-64, this is {sys.platform} {platform.machine()}")
    package = importlib.util.find_spec("bochscpu")
    try:
        version = importlib.metadata.version(WHEEL)
    except importlib.metadata.PackageNotFoundError:
        version = None
    if package is None or package.origin is None or version is None:
        raise EmulatorUnavailable(f"{WHEEL} is not installed: {INSTALL}")
    if version != WHEEL_VERSION:
        raise EmulatorUnavailable(f"{WHEEL} is {version}, only {WHEEL_VERSION} is known to work: {INSTALL}")
    libraries = sorted(Path(package.origin).parent.glob("_bochscpu*.so"))
    if not libraries:
        raise EmulatorUnavailable(f"{WHEEL} holds no _bochscpu*.so: reinstall it with {INSTALL}")
    return libraries[0]


def _needs_shim() -> bool:
    name, version = platform.libc_ver()
    return name == "glibc" and tuple(map(int, version.split(".")[:2])) < _FIRST_GLIBC_WITHOUT_SHIM


def _load_shim(folder: Path) -> None:
    shim = folder / _SHIM_NAME
    if not shim.exists():
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if compiler is None:
            raise EmulatorUnavailable(
                f"{WHEEL} needs glibc 2.38, this is {platform.libc_ver()[1]}, and no C compiler to bridge that was "
                "found: install gcc or clang"
            )
        partial = folder / f"{_SHIM_NAME}.{os.getpid()}"  # renamed when complete: others may share the folder
        command = [compiler, "-shared", "-fPIC", "-std=c99", "-x", "c", "-", "-o", str(partial)]
        built = subprocess.run(command, input=_SHIM_SOURCE, capture_output=True, text=True, check=False)
        if built.returncode:
            raise EmulatorUnavailable(f"{compiler} cannot build a shared library: {' '.join(built.stderr.split())}")
        partial.rename(shim)
    ctypes.CDLL(str(shim.resolve()), mode=ctypes.RTLD_GLOBAL)


def load_library(shim_folder: Path | None = None) -> ctypes.CDLL:
    """Load the wheel's library, or raise EmulatorUnavailable.

    Args:
        shim_folder: where the shim for an older glibc is kept from run to run; None = a temporary folder each time.
    """
    path = _find_wheel_library()
    with ExitStack() as temporary:
        if _needs_shim():
            if shim_folder is None:
                shim_folder = Path(temporary.enter_context(tempfile.TemporaryDirectory()))
            _load_shim(shim_folder)  # a loaded library outlives its file
        try:
            library = ctypes.CDLL(str(path), mode=os.RTLD_LAZY)
        except OSError as error:
            raise EmulatorUnavailable(f"{path.name} of {WHEEL} does not load: {error}") from None
    _declare(library)
    return library


_U16, _U32, _U64, _POINTER = ctypes.c_uint16, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p
_PageMissing = ctypes.CFUNCTYPE(None, _U64)
_SET_ENUM = "_ZN15bx_param_enum_c3setEl"  # void bx_param_enum_c::set(long); by name it finds nothing in this build


def _declare(library: ctypes.CDLL) -> None:
    signatures = {
        "sim_get_param_enum": (_POINTER, [ctypes.c_char_p]),
        _SET_ENUM: (None, [_POINTER, ctypes.c_long]),
        "bochscpu_mem_missing_page": (None, [_PageMissing]),
        "bochscpu_mem_page_insert": (None, [_U64, _POINTER]),
        "bochscpu_cpu_new": (_POINTER, [_U32]),
        "bochscpu_cpu_run": (None, [_POINTER, _POINTER]),
        "cpu_set_mode": (None, [_U32]),
        "cpu_get_reg64": (_U64, [_U32, _U32]),
        "cpu_set_reg64": (None, [_U32, _U32, _U64]),
        "cpu_get_pc": (_U64, [_U32]),
        "cpu_get_cr2": (_U64, [_U32]),
        "cpu_set_seg": (None, [_U32, _U32, _U32, _U16, _U64, _U32, _U16]),
        "cpu_set_tr": (None, [_U32, _U32, _U16, _U64, _U32, _U16]),
    }
    for name in ("cr0", "eflags", "mxcsr"):
        signatures[f"cpu_set_{name}"] = (None, [_U32, _U32])
    for name in ("pc", "cr3", "cr4", "efer", "xcr0", "star", "lstar", "fmask"):
        signatures[f"cpu_set_{name}"] = (None, [_U32, _U64])
    for name in ("gdtr", "idtr"):
        signatures[f"cpu_set_{name}"] = (None, [_U32, _U64, _U16])
    for name in ("fp_cw", "fp_tw"):
        signatures[f"cpu_set_{name}"] = (None, [_U32, _U16])
    for name, (result, arguments) in signatures.items():
        try:
            function = getattr(library, name)
        except AttributeError:
            raise EmulatorUnavailable(f"{WHEEL} does not export {name}: reinstall it with {INSTALL}") from None
        function.restype, function.argtypes = result, arguments


# ---------------------------------------------------------------------------------------------- the processor

RAX, RCX, RDX, RBX, RSP, RBP, RSI, RDI, R8, R9, R10, R11 = range(12)  # Bochs' numbers
_GENERAL_REGISTERS = 16

_ES, _CS, _SS, _DS, _FS, _GS = range(6)  # Bochs' numbers
_WHOLE_SEGMENT = 0xFFFFFFFF

_CR0 = 1 << 31 | 1 << 16 | 1 << 5 | 1 << 4 | 1 << 1 | 1 << 0  # PG WP NE ET MP PE
_CR4 = 1 << 18 | 1 << 10 | 1 << 9 | 1 << 5  # OSXSAVE OSXMMEXCPT OSFXSR PAE
_EFER = 1 << 11 | 1 << 10 | 1 << 8 | 1 << 0  # NXE LMA LME SCE
_XCR0_AVX, _XCR0_AVX512 = 0x07, 0xE7  # x87, XMM, YMM; and opmask, upper halves, ZMM16-31
_STAR = CODE_SELECTOR << 32  # SYSCALL loads CS from here, and SS from the next descriptor
_EFLAGS, _MXCSR, _FP_CONTROL, _FP_TAGS = 0x2, 0x1F80, 0x37F, 0xFFFF  # as Linux starts a program

STUB_CODE = bytes.fromhex("0f09 ffe1")  # wbinvd; jmp *%rcx, which is where SYSCALL left the return address
_PAGES_AT_ONCE = 16  # that Bochs is told of when it misses one

# Fields of bochscpu's table of hooks, in order; all are pointers to functions.
_HOOKS = (
    "reset", "hlt", "mwait", "cnear_branch_taken", "cnear_branch_not_taken", "ucnear_branch", "far_branch", "opcode",
    "interrupt", "exception", "hw_interrupt", "tlb_cntrl", "cache_cntrl", "prefetch_hint", "clflush",
    "before_execution", "after_execution", "repeat_iteration", "inp", "inp2", "outp", "lin_access", "phy_access",
    "wrmsr", "vmexit",
)  # fmt: skip
_CacheControlHook = ctypes.CFUNCTYPE(None, _POINTER, _U32, _U32)
_ExceptionHook = ctypes.CFUNCTYPE(None, _POINTER, _U32, _U32, _U32)


class _Hooks(ctypes.Structure):
    _fields_ = (("context", _POINTER), *((name, _POINTER) for name in _HOOKS))


class BochsCpu:
    """The processor, number 0 of Bochs; there can be one in a process.

    Args:
        library: what load_library returned.
        model: which processor CPUID describes and whose instructions exist; others raise invalid opcode.
        memory: the guest's memory and page tables.
    """

    def __init__(self, library: ctypes.CDLL, model: CpuModel, memory: GuestMemory) -> None:
        self._library = library
        self._memory = memory
        getattr(library, _SET_ENUM)(library.sim_get_param_enum(b"cpu.model"), model.bochs_number)
        self._page_missing = _PageMissing(self._insert_pages)  # kept: Bochs holds the pointer only
        library.bochscpu_mem_missing_page(self._page_missing)
        self._handle = library.bochscpu_cpu_new(0)
        self._amx = model.amx
        self._set_up(model)
        if model.amx:
            self._deliver_invalid_opcodes()

    def _deliver_invalid_opcodes(self) -> None:
        library = self._library
        idt, gdt, tss = write_tables(self._memory)
        library.cpu_set_idtr(0, IDT, idt)
        library.cpu_set_gdtr(0, GDT, gdt)
        library.cpu_set_tr(0, 1, TASK_SELECTOR, TSS, tss, TASK_ATTRIBUTES)

    def _set_up(self, model: CpuModel) -> None:
        library = self._library
        for segment in (_ES, _CS, _SS, _DS, _FS, _GS):
            selector, attributes = (
                (CODE_SELECTOR, CODE_ATTRIBUTES) if segment == _CS else (DATA_SELECTOR, DATA_ATTRIBUTES)
            )
            library.cpu_set_seg(0, segment, 1, selector, 0, _WHOLE_SEGMENT, attributes)
        library.cpu_set_efer(0, _EFER)
        library.cpu_set_cr3(0, self._memory.page_table_root)
        library.cpu_set_cr4(0, _CR4)
        library.cpu_set_cr0(0, _CR0)
        library.cpu_set_xcr0(0, _XCR0_AVX512 if model.avx512 else _XCR0_AVX)
        library.cpu_set_star(0, _STAR)
        library.cpu_set_lstar(0, STUB)
        library.cpu_set_fmask(0, 0)
        library.cpu_set_eflags(0, _EFLAGS)
        library.cpu_set_mxcsr(0, _MXCSR)
        library.cpu_set_fp_cw(0, _FP_CONTROL)
        library.cpu_set_fp_tw(0, _FP_TAGS)
        for register in range(_GENERAL_REGISTERS):
            self.write(register, 0)

    def _insert_pages(self, address: int) -> None:
        first = address & ~(_PAGES_AT_ONCE * PAGE_BYTES - 1)
        for page in range(first, first + _PAGES_AT_ONCE * PAGE_BYTES, PAGE_BYTES):
            self._library.bochscpu_mem_page_insert(page, self._memory.host_address(page))

    def read(self, register: int) -> int:
        """A general register."""
        return int(self._library.cpu_get_reg64(0, register))

    def write(self, register: int, value: int) -> None:
        """Set a general register; negative values become their two's complement."""
        self._library.cpu_set_reg64(0, register, value)

    def set_fs_base(self, address: int) -> None:
        """Set where FS points: the thread's own data."""
        self._library.cpu_set_seg(0, _FS, 1, 0, address, _WHOLE_SEGMENT, DATA_ATTRIBUTES)

    @property
    def instruction_pointer(self) -> int:
        """RIP."""
        return int(self._library.cpu_get_pc(0))

    @property
    def fault_address(self) -> int:
        """CR2: what the last page fault was about."""
        return int(self._library.cpu_get_cr2(0))

    def forget_translations(self) -> None:
        """Read the page tables anew; needed whenever a permission is taken away or changed."""
        self._library.cpu_set_mode(0)

    def run(
        self,
        entry: int,
        stack: int,
        on_system_call: Callable[[], None],
        on_fault: Callable[[int, int], None],
        on_invalid_opcode: Callable[[], None],
    ) -> None:
        """Run a program from its entry; the callbacks must not raise, and end the process to end the program.

        Args:
            entry: address of the first instruction.
            stack: address of what the stack holds at the start.
            on_system_call: called at each SYSCALL, which sees and sets the registers.
            on_fault: called with the vector of an exception and its error code.
            on_invalid_opcode: called instead on a model with AMX, with RSP at the frame of descriptor_tables.
        """
        self.write(RSP, stack)
        self._library.cpu_set_pc(0, entry)
        self.forget_translations()

        def on_wbinvd(*_: object) -> None:
            if self.instruction_pointer >= ILLEGAL:  # which lies above the other stub
                on_invalid_opcode()
            else:
                on_system_call()

        def on_exception(context: int, cpu: int, vector: int, code: int) -> None:
            if not (self._amx and vector == INVALID_OPCODE):
                on_fault(vector, code)

        wbinvd, exception = _CacheControlHook(on_wbinvd), _ExceptionHook(on_exception)
        hooks = _Hooks(cache_cntrl=ctypes.cast(wbinvd, _POINTER), exception=ctypes.cast(exception, _POINTER))
        self._library.bochscpu_cpu_run(self._handle, (_POINTER * 2)(ctypes.addressof(hooks), None))
