"""Attempts to escape from a sandbox, for `ascent sandbox check` and its benchmark. None may succeed.

An escape test is a few lines of Python that run as a job. If they reach `got(…)`, the isolation failed. They know all
that an attacker could know: the path of a secret file, the id of the process that started the sandbox, an open port.
No test writes to a file of the host: it only opens the file for writing.
"""

import os
import platform
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from ascent.processes.channel import Channel, ChannelClosedError
from ascent.sandbox.sandbox import JobEndedError, Sandbox, SandboxLimits

LIMITS = SandboxLimits(seconds=1.0, memory=0.5, disk=4 << 20, inodes=500)
UNTIMED_SECONDS = 60.0
"""Time limit of a test that is not about limits: if it has not ended by then, it counts as an escape."""
SECRET = "ascent-secret-7c1d"
REFUSED = (1, 13, 38)
"""EPERM, EACCES, ENOSYS: the errors of a refused system call. Any other error shows that the call was executed."""
CALLS = {
    "unshare": (97, 272), "setns": (268, 308), "mount": (40, 165), "umount2": (39, 166), "pivot_root": (41, 155),
    "chroot": (51, 161), "ptrace": (117, 101), "process_vm_readv": (270, 310), "process_vm_writev": (271, 311),
    "bpf": (280, 321), "perf_event_open": (241, 298), "io_uring_setup": (425, 425), "keyctl": (219, 250),
    "userfaultfd": (282, 323), "memfd_create": (279, 319), "pidfd_open": (434, 434), "pidfd_getfd": (438, 438),
    "open_by_handle_at": (265, 304), "kcmp": (272, 312), "personality": (92, 135), "fsopen": (430, 430),
    "move_mount": (429, 429), "syslog": (116, 103), "init_module": (105, 175), "shmget": (194, 29), "semget": (190, 64),
    "msgget": (186, 68), "mq_open": (180, 240), "prlimit64": (261, 302), "sched_setaffinity": (122, 203),
    "setpriority": (140, 141), "capset": (91, 126), "setresuid": (147, 117), "setgroups": (159, 116),
    "fanotify_init": (262, 300), "inotify_init1": (26, 294), "execve": (221, 59),
    "clone": (220, 56), "clone3": (435, 435),
    "mknodat": (33, 259), "name_to_handle_at": (264, 303), "process_madvise": (440, 440), "quotactl": (60, 179),
}  # fmt: skip
"""Numbers of system calls on aarch64 and x86-64."""

PRELUDE = """
import ctypes, os, signal, socket, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *args):
    ctypes.set_errno(0)
    done = libc.syscall(ctypes.c_long(CALLS[name]), *[ctypes.c_long(a) if isinstance(a, int) else a for a in args])
    if done >= 0 or ctypes.get_errno() not in REFUSED:
        got(f"{name}: {done}, {os.strerror(ctypes.get_errno())}")
def opened(path, flags=os.O_RDONLY):
    got(f"opened {path}: {os.open(path, flags)}")
"""


class EscapeTest(NamedTuple):
    kind: str
    name: str
    code: str


def _escape_tests() -> Iterator[EscapeTest]:
    """Yield every escape test, by kind."""
    for kind, tests in ESCAPE_CODE.items():
        for name, code in tests.items():
            yield EscapeTest(kind, name, code)


_READ = ("/etc/passwd", "/etc/shadow", "/proc/1/environ", "/proc/self/environ", "/proc/kallsyms", "/proc/mounts")
_WRITE = ("/etc/passwd", "/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/sys/kernel/mm/ksm/run")
_DEVICES = ("/dev/mem", "/dev/kmsg", "/dev/sda", "/dev/vda", "/dev/fuse", "/dev/kvm", "/dev/nvidia0")
ESCAPE_CODE: dict[str, dict[str, str]] = {
    "files": {
        "read a secret file": "opened(HOST['secret'])",
        "list its folder": "got(os.listdir(HOST['folder']))",
        "open it for writing": "opened(HOST['secret'], os.O_WRONLY)",
        "open it to append": "opened(HOST['secret'], os.O_WRONLY | os.O_APPEND)",
        "make a file beside it": "opened(HOST['folder'] + '/new', os.O_WRONLY | os.O_CREAT)",
        "make a folder beside it": "os.mkdir(HOST['folder'] + '/made'); got('made')",
        "through a symbolic link": "os.symlink(HOST['secret'], 'link'); opened('link')",
        "through a hard link": "os.link(HOST['secret'], 'hard'); opened('hard')",
        "by climbing out": "opened('../' * 20 + HOST['secret'].lstrip('/'))",
        "change its mode": "os.chmod(HOST['secret'], 0o600); got('changed')",
        "change its times": "os.utime(HOST['secret']); got('changed')",
        "cut it": "os.truncate(HOST['secret'], HOST['size']); got('cut')",
        "rename it": "os.rename(HOST['secret'], HOST['secret']); got('renamed')",
        "empty it by opening it": "opened(HOST['empty'], os.O_RDONLY | os.O_TRUNC)",
        "list the root": "names = {*os.listdir('/')} & {'var', 'boot', 'srv', 'mnt'}; names and got(names)",
        "list home folders": "got(os.listdir('/root') + os.listdir('/home'))",
        "change Python": "opened(os.__file__, os.O_WRONLY)",
        "change Ascent": "opened(sys.modules['ascent.sandbox.escape_tests'].__file__, os.O_RDWR)",
        "read Ascent": "opened(sys.modules['ascent.sandbox.escape_tests'].__file__)",
        "read an installed package": "opened(HOST['package'])",
        "list installed packages": "got(os.listdir(os.path.dirname(HOST['package'])))",
        "read attributes of a file": "import fcntl; fcntl.ioctl(open(os.__file__), 0x80086601, bytes(8)); got('read')",
        "a lease on a file": "import fcntl; fcntl.fcntl(open(os.__file__), 1024, fcntl.F_UNLCK); got('set')",
        "leave a file for others": "opened('../left', os.O_WRONLY | os.O_CREAT)",
        **{f"read {path}": f"opened({path!r})" for path in _READ},
        **{f"open {path} for writing": f"opened({path!r}, os.O_WRONLY)" for path in _WRITE},
        **{f"open {path}": f"opened({path!r}, os.O_RDWR)" for path in _DEVICES},
        "make a device": "call('mknodat', -100, b'device', 0o20666, 0x103)",
        "a file by its handle": "call('open_by_handle_at', -100, 0, 0)",
        "watch files": "call('inotify_init1', 0); call('fanotify_init', 0, 0)",
    },
    "environment": {
        "a variable of the parent": "got(os.environ) if HOST['secret_word'] in str(os.environ) else 0",
        "variables of the parent by /proc": "opened(f\"/proc/{HOST['pid']}/environ\")",
        "its memory by /proc": "opened(f\"/proc/{HOST['pid']}/mem\")",
        "its files by /proc": "got(os.listdir(f\"/proc/{HOST['pid']}/fd\"))",
        "files that were left open": "files = [n for n in range(3, 1024) if is_open(n)]; len(files) < 2 or got(files)",
    },
    "network": {
        "TCP to this machine": "socket.create_connection(('127.0.0.1', HOST['port']), 1); got('connected')",
        "UDP": "s = socket.socket(type=socket.SOCK_DGRAM); s.sendto(b'x', ('127.0.0.1', HOST['port'])); got('sent')",
        "raw packets": "got(socket.socket(socket.AF_PACKET, socket.SOCK_RAW))",
        "netlink": "got(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW))",
        "virtual machines": "got(socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM))",
        "a name": "got(socket.getaddrinfo('localhost', 80, type=socket.SOCK_STREAM)); socket.socket()",
        "a socket of the file system": "socket.socket(socket.AF_UNIX).connect(HOST['socket']); got('connected')",
        "an abstract socket": "socket.socket(socket.AF_UNIX).connect(HOST['abstract']); got('connected')",
        "a datagram from a pair": "a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); "
        "a.sendto(b'x', HOST['datagrams']); got('sent')",
        "listen": "s = socket.socket(); s.bind(('127.0.0.1', 0)); got('bound')",
    },
    "processes": {
        "fork": "got(os.fork() or os._exit(0))",
        "start a program": "got(os.posix_spawn('/bin/sh', ['sh', '-c', 'true'], {}))",
        "become a program": "call('execve', b'/bin/true', 0, 0)",
        "a program with set-user-id": "import subprocess; got(subprocess.run(['su', '--version']))",
        "a fork bomb": "pids = [os.fork() or os._exit(0) for _ in range(100)]; got(len(pids))",
        "a daemon": "os.fork() or os.setsid() and os._exit(0); got('a new session')",
        "a process by clone": "call('clone', 17, 0, 0, 0, 0)",
        "a process by clone3": "call('clone3', struct.pack('8Q', 0, 0, 0, 0, 17, 0, 0, 0), 64)",
        "ptrace the parent": "call('ptrace', 0x4206, HOST['pid'], 0, 0)",
        "ptrace the fork server": "call('ptrace', 0x4206, os.getppid(), 0, 0)",
        "read the parent's memory": "call('process_vm_readv', HOST['pid'], 0, 0, 0, 0, 0)",
        "write the fork server's memory": "call('process_vm_writev', os.getppid(), 0, 0, 0, 0, 0)",
        "signal the parent": "os.kill(HOST['pid'], 0); got('signalled')",
        "signal the fork server": "os.kill(os.getppid(), 0); got('signalled')",
        "signal everybody": "os.kill(-1, 0); got('signalled')",
        "signal the fork server's group": "os.killpg(os.getpgid(os.getppid()), 0); got('signalled')",
        "a file of the parent": "call('pidfd_open', HOST['pid'], 0); call('pidfd_getfd', 3, 0, 0)",
        "limits of the parent": "call('prlimit64', HOST['pid'], 7, 0, 0)",
        "limits of the fork server": "call('prlimit64', os.getppid(), 7, 0, 0)",
        "processors of the parent": "call('sched_setaffinity', HOST['pid'], 8, struct.pack('Q', 1))",
        "priority of others": "call('setpriority', 2, 0, 0)",
        "signals by a file's owner": "import fcntl; a, b = socket.socketpair(); "
        "fcntl.fcntl(a, fcntl.F_SETOWN, HOST['pid']); got('owned')",
        "outlive the fork server": "libc.prctl(1, 0, 0, 0, 0) or got('no signal at its end')",
        "become readable to others": "libc.prctl(4, 1, 0, 0, 0) or got('dumpable')",
        "compare processes": "call('kcmp', os.getpid(), HOST['pid'], 0, 0, 0)",
        "memory hints for others": "call('process_madvise', 3, 0, 0, 0, 0)",
    },
    "memory": {
        "more than the limit": "held = [bytearray(64 << 20) for _ in range(64)]; got(len(held))",
        "a nameless file in memory": "call('memfd_create', b'x', 0)",
        "shared memory": "from multiprocessing.shared_memory import SharedMemory as S; got(S(create=True, size=64))",
        "shared memory of the host": "got(os.listdir('/dev/shm'))",
        "shared memory of System V": "call('shmget', 0, 4096, 0o1600)",
        "semaphores and queues": "call('semget', 0, 1, 384); call('msgget', 0, 384); call('mq_open', b'x', 66, 384, 0)",
    },
    "kernel": {
        "a user namespace": "call('unshare', 0x10000000)",
        "a user namespace by clone": "call('clone', 0x10000011, 0, 0, 0, 0)",
        "a mount namespace": "call('unshare', 0x00020000)",
        "another's namespace": "call('setns', 0, 0)",
        "mount": "call('mount', 0, 0, 0, 0, 0); call('umount2', 0, 0)",
        "mount the new way": "call('fsopen', 0, 0); call('move_mount', 0, 0, 0, 0, 0)",
        "change the root": "call('chroot', 0); call('pivot_root', 0, 0)",
        "bpf": "call('bpf', 0, 0, 0)",
        "io_uring": "call('io_uring_setup', 1, 0)",
        "keys": "call('keyctl', 0, -3, 0)",
        "page faults": "call('userfaultfd', 0)",
        "performance counters": "call('perf_event_open', 0, 0, -1, -1, 0)",
        "modules": "call('init_module', 0, 0, 0)",
        "the log": "call('syslog', 3, 0, 0)",
        "another personality": "call('personality', 0x0040000)",
        "capabilities": "call('capset', 0, 0)",
        "another user": "call('setresuid', 0, 0, 0); call('setgroups', 0, 0)",
        "quotas": "call('quotactl', 0, 0, 0, 0)",
    },
    "terminals": {
        "the terminal": "opened('/dev/tty', os.O_RDWR)",
        "a new terminal": "got(os.openpty())",
        "terminals of others": "got(os.listdir('/dev/pts'))",
        "type for another process": "import fcntl; fcntl.ioctl(0, 0x5412, b'x'); got('typed')",
    },
    "limits": {
        "raise them": "import resource; resource.setrlimit(resource.RLIMIT_CPU, (600, 600)); got('raised')",
        "compute for ever": "while True: pass",
        "sleep for ever": "time.sleep(600); got('slept')",
        "ignore signals": "for n in {*range(1, 31)} - {9, 19}: signal.signal(n, signal.SIG_IGN)\nwhile True: pass",
        "a file without end": "with open('big', 'wb') as f: [f.write(bytes(1 << 20)) for _ in range(64)]\ngot('all')",
        "files without end": "for n in range(1000):\n    open(f'f{n}', 'wb').write(bytes(1 << 20))\ngot('written')",
        "empty files without end": "for n in range(1000): open(f'f{n}', 'wb').close()\ngot('made')",
        "locks without end": "import fcntl; fcntl.lockf(open(os.__file__, 'rb'), fcntl.LOCK_SH, 1, 9); got('locked')",
        "small threads without end": "libc.mallopt(-8, 1); threading.stack_size(1 << 15)\n"
        "for _ in range(500): threading.Thread(target=time.sleep, args=[99]).start()\ngot('begun')",
        "open files without end": "held = [open('/dev/null') for _ in range(500)]; got(len(held))",
        "words without end": "SAY(b'x' * (64 << 20) + b'\\n'); got('said')",
        "threads without end": "for _ in range(5000): threading.Thread(target=time.sleep, args=[99]).start()\ngot(1)",
    },
    "neighbours": {
        "list other jobs' folders": "names = {*os.listdir('..')} - {os.getcwd()[9:]}; os.getcwd() == '/' or got(names)",
        "read another job's file": "opened(HOST['neighbour'] + '/note')",
        "write in another job's folder": "opened(HOST['neighbour'] + '/new', os.O_WRONLY | os.O_CREAT)",
        "find what the last job left": "got(os.listdir('.')) if os.getcwd() != '/' and os.listdir('.') else 0",
    },
}
ESCAPE_TESTS = tuple(_escape_tests())


# ---- inside -----------------------------------------------------------------------------------------------------


class EscapedError(BaseException):
    """A test escaped."""


def serve_escape_tests(_: dict[str, Any]) -> Callable[[Channel], None]:
    """The entry point: jobs run the escape tests that they are sent, and answer what each reached."""

    def make(channel: Channel) -> None:
        with suppress(ChannelClosedError):
            while True:
                channel.write(answer_escape_test(channel, channel.read()))

    return make


def answer_escape_test(channel: Channel, question: dict[str, Any]) -> dict[str, Any]:
    """Run one test: {"escaped": …}, or {"contained": …} with the error. {"leave": True}: leave a file."""
    if "leave" in question:
        if os.getcwd() != "/":
            Path("note").write_text(SECRET)
        return {"folder": os.getcwd()}
    column = {"aarch64": 0, "x86_64": 1}[platform.machine()]

    def got(evidence: object) -> None:
        raise EscapedError(str(evidence)[:200])

    numbers = {name: pair[column] for name, pair in CALLS.items()}
    scope = {"HOST": question["host"], "CALLS": numbers, "REFUSED": REFUSED, "got": got, "is_open": _is_open}
    scope["SAY"] = channel.socket.sendall
    try:
        exec(PRELUDE + question["code"], scope)
    except EscapedError as out:
        return {"escaped": str(out)}
    except BaseException as error:
        return {"contained": f"{type(error).__name__}: {error}"[:200]}
    return {"contained": "refused"}


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


# ---- outside ----------------------------------------------------------------------------------------------------


class EscapeTestResult(NamedTuple):
    test: EscapeTest
    is_contained: bool
    how: str


def run_escape_tests(
    kind: str = "auto", tests: tuple[EscapeTest, ...] = ESCAPE_TESTS
) -> tuple[str, list[EscapeTestResult]]:
    """Run every test in a separate job beside a neighbor. Return a description of the isolation, and the results."""
    with Sandbox("ascent.sandbox.escape_tests:serve_escape_tests", LIMITS, kind=kind) as sandbox, decoys() as host:
        with sandbox.job() as neighbour:
            host["neighbour"] = neighbour.ask({"leave": True}, 30.0)["folder"]
            results = [run_escape_test(sandbox, host, each) for each in tests]
        assert sandbox.isolation is not None
        return sandbox.isolation.describe(), results


def run_escape_test(sandbox: Sandbox, host: dict[str, Any], each: EscapeTest) -> EscapeTestResult:
    limited = each.kind == "limits"
    with sandbox.job() as job:
        try:
            answer = job.ask({"code": each.code, "host": host}, LIMITS.seconds if limited else UNTIMED_SECONDS)
        except JobEndedError as ended:  # by the sandbox or by itself
            return EscapeTestResult(each, limited or "longer" not in str(ended), str(ended))
    if not isinstance(answer, dict) or "contained" not in answer:
        return EscapeTestResult(each, False, str(answer.get("escaped", answer) if isinstance(answer, dict) else answer))
    return EscapeTestResult(each, True, str(answer["contained"]))


@contextmanager
def decoys() -> Iterator[dict[str, Any]]:
    """Make files, sockets and variables on this machine that the tests try to reach."""
    os.environ["ASCENT_SECRET"] = SECRET
    installed = find_spec("pip")
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as tcp:
        secret, empty = Path(folder, "secret"), Path(folder, "empty")
        secret.write_text(SECRET)
        empty.touch()
        secret.chmod(0o644)
        os.chmod(folder, 0o755)
        names = {"socket": f"{folder}/socket", "abstract": f"\0ascent-{os.urandom(8).hex()}"}
        listeners = [socket.socket(socket.AF_UNIX) for _ in names]
        datagrams = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            for listener, name in zip(listeners, names.values(), strict=True):
                listener.bind(name)
                listener.listen()
            datagrams.bind(f"{folder}/datagrams")
            yield {
                "secret": str(secret),
                "size": len(SECRET),
                "secret_word": SECRET,
                "empty": str(empty),
                "package": installed.origin if installed else __file__,
                "folder": folder,
                "pid": os.getpid(),
                "port": tcp.getsockname()[1],
                "datagrams": f"{folder}/datagrams",
                **names,
            }
        finally:
            for each in (*listeners, datagrams):
                each.close()
            del os.environ["ASCENT_SECRET"]
