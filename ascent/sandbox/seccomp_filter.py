"""A seccomp filter of the system calls that code in a sandbox may make, for aarch64 and x86-64.

Calls that are not listed are refused, also those of future kernels. The listed ones cannot make a process, run a
program, open a socket, or name another process.
"""

import platform
import struct

Instruction = tuple[int, int, int, int]
"""Of a classic BPF program: operation, jumps if true and if false, value."""
MACHINES = {"aarch64": (0, 0xC00000B7), "x86_64": (1, 0xC000003E)}
"""The column of the tables below, and the number of the architecture."""

ALLOWED_CALLS = """
read 63 0, write 64 1, close 57 3, newfstatat 79 262, fstat 80 5, lseek 62 8, mmap 222 9, munmap 215 11,
mprotect 226 10, brk 214 12, madvise 233 28, mremap 216 25, futex 98 202, openat 56 257, readv 65 19, writev 66 20,
pread64 67 17, pwrite64 68 18, preadv 69 295, pwritev 70 296, sendto 206 44, recvfrom 207 45, sendmsg 211 46,
recvmsg 212 47, shutdown 210 48, getsockopt 209 55, setsockopt 208 54, getsockname 204 51, getpeername 205 52,
poll - 7, ppoll 73 271, select - 23, pselect6 72 270, epoll_create - 213, epoll_create1 20 291, epoll_ctl 21 233,
epoll_wait - 232, epoll_pwait 22 281, epoll_pwait2 441 441, eventfd - 284, eventfd2 19 290, timerfd_create 85 283,
timerfd_settime 86 286, timerfd_gettime 87 287, pipe - 22, pipe2 59 293, dup 23 32, dup2 - 33, dup3 24 292,
close_range 436 436, open - 2, stat - 4, lstat - 6, statx 291 332, statfs 43 137, fstatfs 44 138,
access - 21, faccessat 48 269, faccessat2 439 439, readlink - 89, readlinkat 78 267, getdents - 78,
getdents64 61 217, getcwd 17 79, chdir 49 80, fchdir 50 81, flock 32 73, fsync 82 74, fdatasync 83 75,
ftruncate 46 77, fallocate 47 285, fadvise64 223 221, sendfile 71 40, copy_file_range 285 326, msync 227 26,
mincore 232 27, membarrier 283 324, getpid 172 39, getppid 173 110, gettid 178 186, getuid 174 102,
geteuid 175 107, getgid 176 104, getegid 177 108, getresuid 148 118, getresgid 150 120, getgroups 158 115,
getpgid 155 121, getpgrp - 111, getsid 156 124, set_tid_address 96 218, set_robust_list 99 273,
get_robust_list 100 274, rseq 293 334, sched_yield 124 24, sched_getaffinity 123 204, sched_getparam 121 143,
sched_getscheduler 120 145, sched_get_priority_max 125 146, sched_get_priority_min 126 147, getrusage 165 98,
times 153 100, sysinfo 179 99, uname 160 63, umask 166 95, getcpu 168 309, getrandom 278 318,
clock_gettime 113 228, clock_getres 114 229, clock_nanosleep 115 230, nanosleep 101 35, gettimeofday 169 96,
time - 201, getitimer 102 36, setitimer 103 38, alarm - 37, pause - 34, arch_prctl - 158, getrlimit 163 97,
setrlimit 164 160, rt_sigaction 134 13, rt_sigprocmask 135 14, rt_sigreturn 139 15, sigaltstack 132 131,
rt_sigpending 136 127, rt_sigtimedwait 137 128, rt_sigsuspend 133 130, restart_syscall 128 219, wait4 260 61,
waitid 95 247, exit_group 94 231
"""
"""Name, number on aarch64, number on x86-64; - where there is none."""
WRITE_CALLS = """
mkdir - 83, mkdirat 34 258, rmdir - 84, unlink - 87, unlinkat 35 263, rename - 82, renameat 38 264,
renameat2 276 316, symlink - 88, symlinkat 36 266, link - 86, linkat 37 265, creat - 85, truncate 45 76,
chmod - 90, fchmod 52 91, fchmodat 53 268, utime - 132, utimes - 235, utimensat 88 280, listxattr 11 194,
llistxattr 12 195, flistxattr 13 196, getxattr 8 191, lgetxattr 9 192, fgetxattr 10 193
"""
"""Allowed if there is a folder to write in. Landlock alone would not forbid changing the mode of a file."""
SERVER_CALLS = """
fork - 57, vfork - 58, kill 129 62, pidfd_open 434 434, prctl 167 157,
prlimit64 261 302, seccomp 277 317, landlock_create_ruleset 444 444, landlock_add_rule 445 445,
landlock_restrict_self 446 446, setsid 157 112, exit 93 60, mount 40 165, umount2 39 166, capset 91 126
"""
"""Allowed in the fork server, which forks and isolates the jobs."""
EXIT, CLONE, CLONE3, PRCTL, PRLIMIT = (93, 60), (220, 56), (435, 435), (167, 157), (261, 302)
KILL, TGKILL, SOCKETPAIR, IOCTL, FCNTL, OPENAT = (129, 62), (131, 234), (199, 53), (29, 16), (25, 72), (56, 257)
NEW_NAMESPACE, THREAD, STREAM, TRUNCATE = 0x7E020080, 0x00010000, 1, 0o1000
IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX: they change only a file descriptor."""
NOTICES = (0xC0502100, 0xC0182101)
"""Only in the fork server: receive and answer seccomp notifications."""
FCNTLS = (0, 1, 2, 3, 4, 1030, 1032)
"""Copies and flags of a descriptor, the size of a pipe. Not: signals to others, leases, and locks on parts of a file,
which use kernel memory without limit."""
OWN_PID = 0x7FEDCBA9
"""Placeholder for the id of the process, which `for_process` fills in."""
ALLOW, REFUSE, UNKNOWN, KILL_PROCESS, NOTIFY = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000, 0x7FC00000
"""Actions: allow, EPERM, ENOSYS (so that libraries try an older call), kill the process, ask the fork server."""
LOAD, EQUAL, LARGER, BITS, RETURN = 0x20, 0x15, 0x25, 0x45, 0x06


def call_numbers(table: str, column: int) -> list[int]:
    entries = [entry.split() for entry in table.replace("\n", " ").split(",")]
    return [int(entry[1 + column]) for entry in entries if entry[1 + column] != "-"]


def _argument(place: int) -> Instruction:
    """Load an argument. Of those that are checked here, the kernel reads only the lower half."""
    return (LOAD, 0, 0, 16 + 8 * place)


def _call(number: int, body: list[Instruction]) -> list[Instruction]:
    """Instructions for one system call. Every path ends in an action."""
    return [(EQUAL, 0, len(body), number), *body]


def _one_of(place: int, values: tuple[int, ...], then: int, otherwise: int) -> list[Instruction]:
    jumps = [(EQUAL, len(values) - i, 0, value) for i, value in enumerate(values)]
    return [_argument(place), *jumps, (RETURN, 0, 0, otherwise), (RETURN, 0, 0, then)]


def _masked(place: int, mask: int, value: int) -> list[Instruction]:
    """Allow the call if these bits of the argument have this value."""
    return [_argument(place), (0x54, 0, 0, mask), (EQUAL, 0, 1, value), (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, REFUSE)]


def filter_program(is_server: bool, writes: bool, truncates: bool = True, machine: str = "") -> bytes:
    """Return the filter of a job or of the fork server. `writes`: there is a folder to write in.

    `truncates`: something else forbids truncating a file. Landlock does so since its third version.
    """
    column, architecture = MACHINES[machine or platform.machine()]
    code: list[Instruction] = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, architecture), (RETURN, 0, 0, KILL_PROCESS)]
    code.append((LOAD, 0, 0, 0))
    if column:  # x32 has the same architecture and other numbers
        code += [(0x35, 0, 1, 0x40000000), (RETURN, 0, 0, KILL_PROCESS)]
    if not truncates:
        code += _call(OPENAT[column], [_argument(2), (BITS, 0, 1, TRUNCATE), *_both(REFUSE, ALLOW)])
        code += _call(2, [_argument(1), (BITS, 0, 1, TRUNCATE), *_both(REFUSE, ALLOW)]) if column else []
    tables = ALLOWED_CALLS + ("," + WRITE_CALLS if writes else "") + ("," + SERVER_CALLS if is_server else "")
    for number in call_numbers(tables, column):
        code += _call(number, [(RETURN, 0, 0, ALLOW)])
    threads = [(BITS, 0, 1, THREAD), (RETURN, 0, 0, NOTIFY), (RETURN, 0, 0, REFUSE)]
    new = [_argument(0), (BITS, 0, 1, NEW_NAMESPACE), (RETURN, 0, 0, REFUSE)]
    code += _call(CLONE[column], [*new, *([(RETURN, 0, 0, ALLOW)] if is_server else threads)])
    code += _call(EXIT[column], [(RETURN, 0, 0, NOTIFY)])  # the end of a thread
    code += _call(CLONE3[column], [(RETURN, 0, 0, UNKNOWN)])  # its flags cannot be seen: libraries go back to clone
    code += _call(SOCKETPAIR[column], _masked(1, 0xF, STREAM))  # a datagram could be sent to any address
    code += _call(IOCTL[column], _one_of(1, (*IOCTLS, *(NOTICES if is_server else ())), ALLOW, REFUSE))
    code += _call(FCNTL[column], _one_of(1, FCNTLS, ALLOW, REFUSE))
    code += _call(PRLIMIT[column], _one_of(0, (0,), ALLOW, REFUSE))
    code += _call(PRCTL[column], _one_of(0, (15, 16, 0x53564D41), ALLOW, REFUSE))  # names of threads and of memory
    for kill in (KILL, TGKILL):
        code += _call(kill[column], _one_of(0, (OWN_PID,), ALLOW, REFUSE))
    code += [(LARGER, 0, 1, 439), (RETURN, 0, 0, UNKNOWN), (RETURN, 0, 0, REFUSE)]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


def _both(yes: int, no: int) -> list[Instruction]:
    return [(RETURN, 0, 0, yes), (RETURN, 0, 0, no)]


def for_process(code: bytes, pid: int) -> bytes:
    """Return the filter with the id of its process filled in."""
    return code.replace(struct.pack("I", OWN_PID), struct.pack("I", pid))
