"""The Linux system calls of an emulated program: most are forwarded to the host with their pointers translated.

Enough for one thread that reads and writes files, allocates memory and prints. Limits: no threads, fork, exec or
sockets; signal handlers are accepted and never run; files cannot be mapped; addresses of unmapped memory are not used
again; a pointer to a page without permissions is refused only when it lies outside the guest's memory altogether.
"""

from __future__ import annotations

import ctypes
import errno
import struct
import sys
from collections.abc import Callable

from bochs_cpu import R8, R9, R10, RAX, RDI, RDX, RSI, BochsCpu
from guest_memory import HEAP_LIMIT, MAPPINGS, MAPPINGS_END, PAGE_BYTES, READ, WRITE, GuestMemory, Program, round_up

_ARGUMENTS = (RDI, RSI, RDX, R10, R8, R9)

# Numbers of Linux x86-64: which of the arguments are pointers.
_FORWARDED: dict[int, tuple[int, ...]] = {
    0: (1,),  # read
    1: (1,),  # write
    2: (0,),  # open
    3: (),  # close
    4: (0, 1),  # stat
    5: (1,),  # fstat
    6: (0, 1),  # lstat
    8: (),  # lseek
    16: (2,),  # ioctl
    17: (1,),  # pread64
    18: (1,),  # pwrite64
    21: (0,),  # access
    24: (),  # sched_yield
    35: (0, 1),  # nanosleep
    39: (),  # getpid
    63: (0,),  # uname
    72: (),  # fcntl
    79: (0,),  # getcwd
    87: (0,),  # unlink
    89: (0, 1),  # readlink
    96: (0, 1),  # gettimeofday
    186: (),  # gettid
    202: (0, 3),  # futex: nobody else is there, so waits end with the time limit
    204: (2,),  # sched_getaffinity
    228: (1,),  # clock_gettime
    229: (1,),  # clock_getres
    230: (2, 3),  # clock_nanosleep
    257: (1,),  # openat
    262: (1, 2),  # newfstatat
    263: (1,),  # unlinkat
    267: (1, 2),  # readlinkat
    302: (2, 3),  # prlimit64
    318: (0,),  # getrandom
    332: (1, 4),  # statx
}
_SUCCEED = {
    13: "rt_sigaction",
    14: "rt_sigprocmask",
    28: "madvise",
    131: "sigaltstack",
    273: "set_robust_list",
}
_REFUSE_QUIETLY = {
    25: "mremap",  # C libraries then copy
    334: "rseq",
    435: "clone3",
}
_READV, _WRITEV, _READ, _WRITE = 19, 20, 0, 1
_MMAP, _MPROTECT, _MUNMAP, _BRK = 9, 10, 11, 12
_EXIT, _EXIT_GROUP, _KILL, _TKILL, _TGKILL = 60, 231, 62, 200, 234
_ARCH_PRCTL, _SET_TID_ADDRESS, _GETTID = 158, 218, 186

_MAP_ANONYMOUS, _MAP_FIXED, _MAP_FIXED_NOREPLACE = 0x20, 0x10, 0x100000
_ARCH_SET_FS, _ARCH_GET_FS = 0x1002, 0x1003
_STATUS_OF_SIGNAL = 128  # a shell's exit status for signal 0
_IOVEC = struct.Struct("<QQ")


class SystemCalls:
    """Answers the system calls of one program.

    Args:
        cpu: whose registers hold the calls.
        memory: what the pointers point into.
        program: after which the heap begins.
        end: ends the process with an exit status and, for what the user should know, a line of text.
    """

    def __init__(
        self, cpu: BochsCpu, memory: GuestMemory, program: Program, end: Callable[[int, str | None], None]
    ) -> None:
        self._cpu, self._memory, self._end = cpu, memory, end
        self._heap_start = self._heap_end = program.end
        self._next_mapping = MAPPINGS
        self._fs_base = 0
        self._reported: set[int] = set()
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.syscall.restype = ctypes.c_long
        self._own: dict[int, Callable[..., int]] = {
            _READV: lambda file, vector, count, *_: self._vector(_READ, file, vector, count),
            _WRITEV: lambda file, vector, count, *_: self._vector(_WRITE, file, vector, count),
            _MMAP: self._map,
            _MPROTECT: self._protect,
            _MUNMAP: self._unmap,
            _BRK: self._break,
            _ARCH_PRCTL: self._arch_prctl,
            _SET_TID_ADDRESS: lambda *_: self._host(_GETTID),
            _EXIT: self._exit,
            _EXIT_GROUP: self._exit,
            _KILL: lambda pid, signal, *_: self._signal(signal),
            _TKILL: lambda thread, signal, *_: self._signal(signal),
            _TGKILL: lambda pid, thread, signal, *_: self._signal(signal),
        }

    def answer(self) -> None:
        """Do the call that the registers hold, and leave its result there."""
        number = self._cpu.read(RAX)
        self._cpu.write(RAX, self._do(number, [self._cpu.read(register) for register in _ARGUMENTS]))

    def _do(self, number: int, arguments: list[int]) -> int:
        if number in self._own:
            return self._own[number](*arguments)
        if number in _FORWARDED:
            for position in _FORWARDED[number]:
                if not self._memory.holds(arguments[position]):
                    return -errno.EFAULT
                arguments[position] = self._memory.host_address(arguments[position])
            return self._host(number, *arguments)
        if number in _SUCCEED:
            return 0
        if number not in _REFUSE_QUIETLY and number not in self._reported:
            self._reported.add(number)
            print(f"run_emulated: system call {number} is not emulated, the program gets ENOSYS", file=sys.stderr)
        return -errno.ENOSYS

    def _host(self, number: int, *arguments: int) -> int:
        result = self._libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments))
        return int(result) if result != -1 else -ctypes.get_errno()

    def _vector(self, number: int, file: int, vector: int, count: int) -> int:
        """Readv and writev as several reads or writes."""
        if not self._memory.holds(vector, count * _IOVEC.size):
            return -errno.EFAULT
        total = 0
        for index in range(count):
            address, size = _IOVEC.unpack(self._memory.read(vector + index * _IOVEC.size, _IOVEC.size))
            if size == 0:
                continue
            if not self._memory.holds(address, size):
                return total or -errno.EFAULT
            done = self._host(number, file, self._memory.host_address(address), size)
            if done < 0:
                return total or done
            total += done
            if done < size:
                break
        return total

    def _map(self, wanted: int, size: int, permissions: int, flags: int, file: int, offset: int) -> int:
        if not flags & _MAP_ANONYMOUS or flags & (_MAP_FIXED | _MAP_FIXED_NOREPLACE):
            return -errno.ENODEV
        size = round_up(size)
        if size == 0:
            return -errno.EINVAL
        address = self._next_mapping
        if address + size > MAPPINGS_END:
            return -errno.ENOMEM
        self._next_mapping = address + size + PAGE_BYTES  # a page without permissions after each mapping
        self._memory.protect(address, size, permissions)
        return address

    def _protect(self, address: int, size: int, permissions: int, *_: int) -> int:
        if not self._memory.holds(address, size):
            return -errno.ENOMEM
        self._memory.protect(address, size, permissions)
        self._cpu.forget_translations()
        return 0

    def _unmap(self, address: int, size: int, *_: int) -> int:
        if address % PAGE_BYTES or size == 0 or not MAPPINGS <= address <= address + size <= MAPPINGS_END:
            return -errno.EINVAL
        self._memory.clear(address, size)
        return self._protect(address, size, 0)

    def _break(self, wanted: int, *_: int) -> int:
        if self._heap_start <= wanted <= HEAP_LIMIT:
            first_new_page = round_up(self._heap_end)
            if wanted > first_new_page:
                self._memory.protect(first_new_page, wanted - first_new_page, READ | WRITE)
            self._heap_end = wanted
        return self._heap_end

    def _arch_prctl(self, operation: int, address: int, *_: int) -> int:
        if operation == _ARCH_SET_FS:
            self._fs_base = address
            self._cpu.set_fs_base(address)
            return 0
        if operation == _ARCH_GET_FS and self._memory.holds(address, 8):
            self._memory.write(address, struct.pack("<Q", self._fs_base))
            return 0
        return -errno.EINVAL

    def _exit(self, status: int, *_: int) -> int:
        self._end(status & 0xFF, None)
        return 0

    def _signal(self, signal: int) -> int:
        if signal:
            self._end(_STATUS_OF_SIGNAL + signal, f"the program raised signal {signal}")
        return 0
