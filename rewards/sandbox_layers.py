"""What a sandboxed process gives up before foreign code runs in it: limits, capabilities, files (Landlock), calls (seccomp).

Runs inside the new process and imports the standard library only. The order matters: limits, then no_new_privs, which lets an
ordinary user take the rest, then Landlock, then the filter of system calls, after which nothing can be changed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import signal
import struct
from collections.abc import Iterable, Sequence

__all__ = ["SYSCALLS", "close_descriptors", "confine_files", "drop_privileges", "filter_calls", "limit_resources"]

libc = ctypes.CDLL(None, use_errno=True)

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446  # the same numbers on every architecture
READ_FILE_AND_DIR = 1 << 2 | 1 << 3
CLONE_THREAD = 0x10000

# name -> number on (x86_64, aarch64); None where the architecture has no such call. What is not here is refused.
SYSCALLS: dict[str, tuple[int | None, int | None]] = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "stat": (4, None), "fstat": (5, 80), "lstat": (6, None),
    "poll": (7, None), "lseek": (8, 62), "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "pread64": (17, 67),
    "readv": (19, 65), "writev": (20, 66), "access": (21, None), "pipe": (22, None), "select": (23, None),
    "sched_yield": (24, 124), "mremap": (25, 216), "madvise": (28, 233), "dup": (32, 23), "dup2": (33, None),
    "nanosleep": (35, 101), "getpid": (39, 172), "sendto": (44, 206), "recvfrom": (45, 207),
    "exit": (60, 93), "uname": (63, 160), "getcwd": (79, 17), "readlink": (89, None),
    "gettimeofday": (96, 169), "getrusage": (98, 165), "sysinfo": (99, 179), "times": (100, 153), "getuid": (102, 174),
    "getgid": (104, 176), "geteuid": (107, 175), "getegid": (108, 177), "getppid": (110, 173), "sigaltstack": (131, 132),
    "arch_prctl": (158, None), "gettid": (186, 178), "time": (201, None), "futex": (202, 98),
    "sched_getaffinity": (204, 123), "getdents64": (217, 61), "set_tid_address": (218, 96), "restart_syscall": (219, 128),
    "fadvise64": (221, 223), "clock_gettime": (228, 113), "clock_getres": (229, 114), "clock_nanosleep": (230, 115),
    "exit_group": (231, 94), "epoll_wait": (232, None), "epoll_ctl": (233, 21), "newfstatat": (262, 79),
    "readlinkat": (267, 78), "faccessat": (269, 48), "pselect6": (270, 72), "ppoll": (271, 73),
    "set_robust_list": (273, 99), "epoll_pwait": (281, 22), "eventfd2": (290, 19), "epoll_create1": (291, 20),
    "dup3": (292, 24), "pipe2": (293, 59), "getrandom": (318, 278), "statx": (332, 291), "rseq": (334, 293),
    "faccessat2": (439, 439),
    # let through only with harmless arguments, or answered with an error that has a fallback (see `filter_calls`)
    "open": (2, None), "openat": (257, 56), "clone": (56, 220), "clone3": (435, 435), "ioctl": (16, 29),
    "prlimit64": (302, 261), "kill": (62, 129), "tgkill": (234, 131), "fcntl": (72, 25), "socketpair": (53, 199),
}  # fmt: skip
SPECIAL = ("open", "openat", "clone", "clone3", "ioctl", "prlimit64", "kill", "tgkill", "fcntl", "socketpair")
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
PLAIN_FCNTL = (0, 1, 2, 3, 4, 1030)  # duplicates and flags; F_SETOWN would send signals to another process
PLAIN_IOCTL = (0x5421, 0x5450, 0x5451)  # FIONBIO, FIONCLEX, FIOCLEX
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def close_descriptors(kept: Iterable[int]) -> None:
    """Close everything that was inherited by accident."""
    keep = sorted({0, 1, 2, *kept})
    for low, high in zip(keep, [*keep[1:], 4096], strict=True):
        os.closerange(low + 1, high)


def limit_resources(*, memory: int, cpu_s: int, processes: int | None) -> None:
    """Address space in bytes, processor seconds, no core file, no file growth; `processes` of this user, None: no limit here."""

    def limit(what: int, value: int) -> None:
        hard = resource.getrlimit(what)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(what, (value, value))

    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_FSIZE, 0)
    limit(resource.RLIMIT_NOFILE, 64)
    limit(resource.RLIMIT_CPU, cpu_s)
    limit(resource.RLIMIT_AS, memory)
    if processes is not None:
        limit(resource.RLIMIT_NPROC, processes)


def drop_privileges() -> None:
    """Die with the parent, gain no rights by exec, and hold no capability (of root there is only the name left)."""
    libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 4]
    _check(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "parent-death signal")
    _check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    header = struct.pack("=Ii", 0x20080522, 0)
    _check(libc.capset(header, bytes(24)), "capabilities")


def confine_files(readable: Iterable[str]) -> bool:
    """Let this process see nothing of the file system but the paths `readable`; False where the kernel has no Landlock."""
    abi = libc.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint(1))
    if abi < 1:
        return False
    bits = 13 + (abi >= 2) + (abi >= 3) + (abi >= 5)
    files, network, scopes = (1 << bits) - 1, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0
    size = 8 if abi < 4 else 16 if abi < 6 else 24
    rules = struct.pack("=QQQ", files, network, scopes)[:size]
    ruleset = libc.syscall(LANDLOCK_CREATE, rules, ctypes.c_size_t(size), ctypes.c_uint(0))
    _check(ruleset, "Landlock")
    for path in readable:
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        access = READ_FILE_AND_DIR if os.path.isdir(path) else 1 << 2
        rule = struct.pack("=Qi", access, place)
        _check(
            libc.syscall(LANDLOCK_ADD, ruleset, ctypes.c_int(1), rule, ctypes.c_uint(0)), f"Landlock rule for {path}"
        )
        os.close(place)
    _check(libc.syscall(LANDLOCK_RESTRICT, ruleset, ctypes.c_uint(0)), "Landlock")
    os.close(ruleset)
    return True


# Classic BPF: (code, jump if true, jump if false, operand)
LOAD, JUMP_EQUAL, JUMP_SET, JUMP_AT_LEAST, RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000, 0x80000000
Instruction = tuple[int, int, int, int]


def _argument(index: int) -> int:
    return 16 + 8 * index  # offset of the lower half in struct seccomp_data (little-endian)


def _answer(number: int | None, code: int) -> list[Instruction]:
    return [] if number is None else [(JUMP_EQUAL, 0, 1, number), (RETURN, 0, 0, code)]


def _if_among(number: int | None, index: int, values: Sequence[int], error: int = errno.EPERM) -> list[Instruction]:
    """Allow the call if its argument (all 64 bits) is one of `values`."""
    if number is None:
        return []
    tests = [(JUMP_EQUAL, len(values) - place, 0, value) for place, value in enumerate(values)]
    body = [
        (LOAD, 0, 0, _argument(index) + 4),
        (JUMP_EQUAL, 0, len(values) + 1, 0),
        (LOAD, 0, 0, _argument(index)),
        *tests,
        (RETURN, 0, 0, REFUSE | error),
        (RETURN, 0, 0, ALLOW),
    ]
    return [(JUMP_EQUAL, 0, len(body), number), *body]


def _if_bits(number: int | None, index: int, bits: int, *, wanted: bool) -> list[Instruction]:
    """Allow the call if any of `bits` of its argument is set (or, not `wanted`, if none is)."""
    if number is None:
        return []
    one, other = ((RETURN, 0, 0, ALLOW), (RETURN, 0, 0, REFUSE | errno.EPERM))
    body = [(LOAD, 0, 0, _argument(index)), (JUMP_SET, 0, 1, bits), *((one, other) if wanted else (other, one))]
    return [(JUMP_EQUAL, 0, len(body), number), *body]


def filter_calls() -> bool:
    """Install the filter for good; False on an architecture that it has no table for.

    No process, program, socket, name or write access to a file can be had after it, and no other process can be signalled.
    """
    if platform.machine() not in ARCHITECTURES:
        return False
    column, audit = ARCHITECTURES[platform.machine()]
    number = {name: numbers[column] for name, numbers in SYSCALLS.items()}
    program: list[Instruction] = [
        (LOAD, 0, 0, 4),  # another architecture's calls have other numbers
        (JUMP_EQUAL, 1, 0, audit),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, 0),
        (JUMP_AT_LEAST, 0, 1, 0x40000000),  # x32
        (RETURN, 0, 0, KILL),
    ]
    for name, value in number.items():
        if name not in SPECIAL:
            program += _answer(value, ALLOW)
    program += _if_bits(number["open"], 1, WRITING, wanted=False)
    program += _if_bits(number["openat"], 2, WRITING, wanted=False)
    program += _if_bits(number["clone"], 0, CLONE_THREAD, wanted=True)
    program += _answer(number["clone3"], REFUSE | errno.ENOSYS)  # its flags lie in memory; libc then takes clone
    program += _if_among(number["ioctl"], 1, PLAIN_IOCTL, errno.ENOTTY)
    program += _if_among(number["prlimit64"], 2, [0])  # reading, not setting
    program += _if_among(number["kill"], 0, [os.getpid()])
    program += _if_among(number["tgkill"], 0, [os.getpid()])
    program += _if_among(number["fcntl"], 1, PLAIN_FCNTL)
    program += _if_among(number["socketpair"], 0, [1])  # AF_UNIX: two ends in this very process
    program.append((RETURN, 0, 0, REFUSE | errno.EPERM))
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("@HP", len(program), ctypes.addressof(buffer))
    _check(libc.prctl(PR_SET_SECCOMP, 2, header, 0, 0), "seccomp")
    return True
