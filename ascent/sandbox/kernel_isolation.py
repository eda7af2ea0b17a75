"""System calls that restrict a process: no new privileges, no capabilities, Landlock, a seccomp filter, limits.

None of them can be undone, neither by this process nor by its children.
"""

import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Iterable
from contextlib import suppress

from ascent.sandbox.seccomp_filter import NOTICES

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
SECCOMP = {"aarch64": 277, "x86_64": 317}
LISTENING = (8 | 32, 8, 0)  # NEW_LISTENER, WAIT_KILLABLE_RECV
READ_FILE, WRITE_FILE, READ_DIR, TRUNCATE = 1 << 2, 1 << 1, 1 << 3, 1 << 14
READ = READ_FILE | READ_DIR
NOT_WRITABLE = (1 << 0) | (1 << 6) | (1 << 10) | (1 << 11) | (1 << 15)
"""Landlock rights that a folder to write in does not have: programs, devices and ioctl on devices."""
_LIBC = ctypes.CDLL(None, use_errno=True)


class KernelFeatureError(OSError):
    """The kernel does not support this, or forbids it here."""


def set_option(option: int, value: int, pointer: int = 0) -> None:
    arguments = [ctypes.c_ulong(number) for number in (value, pointer, 0, 0)]
    if _LIBC.prctl(option, *arguments):
        raise KernelFeatureError(ctypes.get_errno(), f"prctl {option}: {os.strerror(ctypes.get_errno())}")


def protect_memory() -> None:
    """Forbid new privileges, and reading the memory of this process."""
    set_option(PR_SET_NO_NEW_PRIVS, 1)
    set_option(PR_SET_DUMPABLE, 0)


def drop_capabilities() -> None:
    with suppress(OSError):  # not root, or the last one that there is
        for capability in range(64):
            set_option(PR_CAPBSET_DROP, capability)
    header, nothing = struct.pack("Ii", 0x20080522, 0), bytes(24)
    if _LIBC.capset(header, nothing):
        raise KernelFeatureError(ctypes.get_errno(), "capset")


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def install_filter(code: bytes, listens: bool = False) -> list[int]:
    """Install a filter. `listens`: return the listener of its notifications, if the kernel supports one.

    Without a listener the calls that need an answer fail.
    """
    buffer = ctypes.create_string_buffer(code, len(code))
    program = _Program(len(code) // 8, ctypes.addressof(buffer))
    for flags in LISTENING if listens else (0,):
        result = _syscall(SECCOMP[platform.machine()], 1, flags, ctypes.byref(program))
        if result >= 0:
            return [result] if flags else []
    raise KernelFeatureError(ctypes.get_errno(), f"seccomp: {os.strerror(ctypes.get_errno())}")


def answer_call(listener: int, refused: Iterable[int]) -> int:
    """Let a notified system call continue, or fail it with EAGAIN. Return its number if it continues, else -1."""
    import fcntl  # missing on Windows, where this module is imported but not used

    notice = bytearray(80)
    try:
        fcntl.ioctl(listener, NOTICES[0], notice)
        number, call = struct.unpack_from("=Q8xi", notice)
        error = errno.EAGAIN if call in refused else 0
        fcntl.ioctl(listener, NOTICES[1], struct.pack("=QqiI", number, 0, -error, 0 if error else 1))
    except OSError:  # its process has ended
        return -1
    return -1 if error else call


def mount_folder(path: str, size: int, inodes: int) -> None:
    """Mount a file system in memory with these limits, without programs and devices."""
    options = f"size={size},nr_inodes={inodes},mode=700".encode()
    if _LIBC.mount(b"tmpfs", path.encode(), b"tmpfs", ctypes.c_ulong(0b1110), options):
        raise KernelFeatureError(ctypes.get_errno(), f"mount: {os.strerror(ctypes.get_errno())}")


def unmount_folder(path: str) -> None:
    """Unmount a file system with all that is in it."""
    _LIBC.umount2(path.encode(), 2)


def landlock_version() -> int:
    """Return the ABI version of Landlock in this kernel; 0: not supported."""
    if sys.platform != "linux" or platform.machine() not in ("aarch64", "x86_64"):
        return 0
    return max(0, _syscall(CREATE_RULESET, None, 0, 1))


def _syscall(number: int, *arguments: object) -> int:
    _LIBC.syscall.restype = ctypes.c_long
    return int(_LIBC.syscall(ctypes.c_long(number), *arguments))


def make_ruleset(readable: Iterable[str], writable: Iterable[str] = (), devices: Iterable[str] = ()) -> int:
    """Return a Landlock ruleset for `restrict`: only these files and folders, no TCP, no signals to other processes."""
    version = landlock_version()
    if not version:
        raise KernelFeatureError("this kernel has no Landlock")
    files = (1 << 13) - 1 | sum(1 << bit for bit, since in ((13, 2), (14, 3), (15, 5)) if version >= since)
    handled = struct.pack("QQQ", files, 3, 3)[: 8 if version < 4 else 16 if version < 6 else 24]
    rules = _syscall(CREATE_RULESET, handled, ctypes.c_size_t(len(handled)), 0)
    if rules < 0:
        raise KernelFeatureError(ctypes.get_errno(), "landlock_create_ruleset")
    device = READ_FILE | WRITE_FILE | TRUNCATE
    for paths, access in ((readable, READ), (writable, ~NOT_WRITABLE), (devices, device)):
        for path in paths:
            file = os.open(path, os.O_PATH | os.O_CLOEXEC)
            mask = access & files & (~0 if os.path.isdir(path) else device)
            if _syscall(ADD_RULE, rules, 1, struct.pack("=Qi", mask, file), 0):
                raise KernelFeatureError(ctypes.get_errno(), f"landlock_add_rule {path}")
            os.close(file)
    return rules


def restrict(rules: int) -> None:
    if _syscall(RESTRICT_SELF, rules, 0):
        raise KernelFeatureError(ctypes.get_errno(), "landlock_restrict_self")
    os.close(rules)


def set_limits(memory: int, cpu: int, disk: int, files: int) -> None:
    """Set limits: address space in bytes (0: none), CPU seconds, bytes of a file, files that are open at once."""
    import resource  # missing on Windows too

    limits = [(resource.RLIMIT_CPU, cpu), (resource.RLIMIT_FSIZE, disk), (resource.RLIMIT_NOFILE, files)]
    limits += [(resource.RLIMIT_CORE, 0), (resource.RLIMIT_SIGPENDING, files)]
    for resource_id, maximum in [*limits, *([(resource.RLIMIT_AS, memory)] if memory else [])]:
        _, hard = resource.getrlimit(resource_id)
        maximum = maximum if hard == resource.RLIM_INFINITY else min(maximum, hard)
        resource.setrlimit(resource_id, (maximum, maximum))
