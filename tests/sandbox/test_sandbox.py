"""The sandbox: what is in it cannot get out, and all of it ends."""

from __future__ import annotations

import contextlib
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ascent.sandbox import isolation, kernel_isolation
from ascent.sandbox.escape_tests import CALLS, ESCAPE_TESTS, decoys, run_escape_test, run_escape_tests
from ascent.sandbox.sandbox import JobEndedError, Sandbox, SandboxError, SandboxLimits
from ascent.sandbox.seccomp_filter import (
    ALLOW,
    ALLOWED_CALLS,
    CLONE,
    CLONE3,
    IOCTL,
    KILL,
    KILL_PROCESS,
    MACHINES,
    NOTIFY,
    REFUSE,
    SOCKETPAIR,
    UNKNOWN,
    WRITE_CALLS,
    call_numbers,
    filter_program,
    for_process,
)
from tests.sandboxes import KINDS, need_isolation

LONG = 60.0
"""Seconds that a busy machine may take for what takes milliseconds."""
SHORT = SandboxLimits(seconds=0.3, memory=0.5, disk=2 << 20, output=1 << 16)


@pytest.fixture(scope="module", params=KINDS)
def session(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """A sandbox whose jobs run code."""
    with Sandbox("ascent.sandbox.python_session:serve_session", SHORT, kind=need_isolation(request.param)) as sandbox:
        yield sandbox


def run(sandbox: Sandbox, code: str, seconds: float = LONG) -> str:
    with sandbox.job() as job:
        return job.ask({"code": code}, seconds)["text"]


# ---- isolation ----------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_every_attempt_to_get_out_is_held(kind: str) -> None:
    quick = tuple(each for each in ESCAPE_TESTS if each.kind != "limits")
    _, results = run_escape_tests(need_isolation(kind), quick)
    assert [(result.test.name, result.how) for result in results if not result.is_contained] == []
    assert len(results) >= 100


@pytest.mark.long
def test_the_same_tests_escape_without_isolation() -> None:
    names = {"read a secret file", "list its folder", "make a folder beside it", "TCP to this machine", "fork"}
    names |= {"an abstract socket", "a datagram from a pair", "signal the parent", "a nameless file in memory"}
    _, results = run_escape_tests("none", tuple(each for each in ESCAPE_TESTS if each.name in names))
    assert [result.test.name for result in results if result.is_contained] == []


def test_nothing_of_the_host_is_there_but_python(session: Sandbox) -> None:
    text = run(session, "import os; print(dict(os.environ)); print([p for p in ('/etc', '/home') if os.access(p, 4)])")
    assert "'LANG': 'C.UTF-8'" in text and str(os.getpid()) not in text
    assert not {name for name in os.environ if f"'{name}'" in text} - {*isolation.ENVIRONMENT, "TMPDIR", "PWD"}


def test_libraries_can_be_used(session: Sandbox) -> None:
    assert run(session, "import numpy; print(numpy.arange(4).sum())") == "6\n"


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_named_can_be_read_and_nothing_beside_it(kind: str, tmp_path: Path) -> None:
    (tmp_path / "named.txt").write_text("seen")
    (tmp_path / "other.txt").write_text("hidden")
    named, other, entry_point = (
        str(tmp_path / "named.txt"),
        str(tmp_path / "other.txt"),
        "ascent.sandbox.python_session:serve_session",
    )
    with Sandbox(entry_point, kind=need_isolation(kind), readable=[named]) as sandbox:
        assert "seen" in run(sandbox, f"open({named!r}).read()")
        assert "Error" in run(sandbox, f"open({other!r}).read()")
        assert "Error" in run(sandbox, f"open({named!r}, 'a')")


def test_a_job_writes_in_a_folder_of_its_own_in_memory_or_not_at_all(session: Sandbox) -> None:
    written = run(session, "import tempfile; f = tempfile.NamedTemporaryFile(); f.write(b'x'); print(f.name)")
    if session.isolation and session.isolation.folder:
        assert written.startswith(f"{isolation.JOBS_FOLDER}/ascent-")
        assert run(session, "import os; print(os.listdir('.'))") == "[]\n"
    else:
        assert "Error" in written


def test_isolation_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "bubblewrap_error", lambda: "bwrap is not installed")
    need_isolation("landlock")
    assert (
        isolation.choose_isolation("auto").kind == "landlock"
        and "not installed" in isolation.choose_isolation("auto").why
    )
    monkeypatch.setattr(kernel_isolation, "landlock_version", lambda: 0)
    for kind in ("auto", "bubblewrap", "landlock"):
        with pytest.raises(isolation.IsolationError):
            isolation.choose_isolation(kind)
    assert isolation.choose_isolation("none").kind == "none"
    monkeypatch.setattr(isolation.platform, "machine", lambda: "riscv64")
    with pytest.raises(isolation.IsolationError, match="this is riscv64"):
        isolation.choose_isolation("auto")
    monkeypatch.setattr(isolation.sys, "platform", "darwin")
    with pytest.raises(isolation.IsolationError, match="on Linux only, and this is darwin"):
        isolation.choose_isolation("none")


def test_bubblewrap_that_may_make_no_namespace_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    need_isolation("landlock")
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create a new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    isolation.bubblewrap_error.cache_clear()
    try:
        assert "No permissions" in isolation.bubblewrap_error()
        assert isolation.choose_isolation("auto").kind == "landlock"
    finally:
        isolation.bubblewrap_error.cache_clear()


def test_bubblewrap_holds_without_landlock(monkeypatch: pytest.MonkeyPatch) -> None:
    need_isolation("bubblewrap")
    monkeypatch.setattr(kernel_isolation, "landlock_version", lambda: 0)
    closed = {"read Ascent"}  # only Landlock closes what the fork server itself has read
    kept = tuple(each for each in ESCAPE_TESTS if each.kind in ("files", "neighbours") and each.name not in closed)
    words, results = run_escape_tests("bubblewrap", kept)
    assert "Landlock" not in words and all(result.is_contained for result in results)


def decide(code: bytes, machine: str, number: int, *args: int) -> int:
    """What a filter does with a system call: classic BPF, as the kernel runs it."""
    data = struct.pack("IIQ6Q", number, MACHINES[machine][1], 0, *args, *[0] * (6 - len(args)))
    program = [struct.unpack("HBBI", code[i : i + 8]) for i in range(0, len(code), 8)]
    place = held = 0
    while True:
        operation, yes, no, value = program[place]
        place += 1
        match operation:
            case 0x20:
                (held,) = struct.unpack_from("I", data, value)
            case 0x54:
                held &= value
            case 0x15:
                place += yes if held == value else no
            case 0x25:
                place += yes if held > value else no
            case 0x35:
                place += yes if held >= value else no
            case 0x45:
                place += yes if held & value else no
            case 0x06:
                return value
            case _:
                raise AssertionError(operation)


@pytest.mark.parametrize("machine", MACHINES)
def test_the_filter_allows_what_python_needs_and_refuses_the_rest(machine: str) -> None:
    column, job = MACHINES[machine][0], for_process(filter_program(False, False, machine=machine), 77)
    server = filter_program(True, False, machine=machine)
    assert len(job) // 8 < 4096
    for number in call_numbers(ALLOWED_CALLS, column):
        assert decide(job, machine, number) == decide(server, machine, number) == ALLOW
    for name, pair in CALLS.items():
        assert decide(job, machine, pair[column], 1) in (REFUSE, UNKNOWN), name
    clone, kill, socketpair, ioctl = (pair[column] for pair in (CLONE, KILL, SOCKETPAIR, IOCTL))
    assert decide(job, machine, clone, 0x3D0F00) == NOTIFY and decide(job, machine, clone, 0x01200011) == REFUSE
    assert decide(server, machine, clone, 0x01200011) == ALLOW and decide(server, machine, clone, 0x10000011) == REFUSE
    assert decide(job, machine, kill, 77) == ALLOW and decide(job, machine, kill, 78) == REFUSE
    assert decide(job, machine, socketpair, 1, 0x80001) == ALLOW and decide(job, machine, socketpair, 1, 2) == REFUSE
    allowed = {request for request in range(0x10000) if decide(job, machine, ioctl, 0, request) != REFUSE}
    assert allowed == {0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451}  # neither attributes nor terminals
    assert decide(job, machine, CLONE3[column]) == UNKNOWN and decide(job, machine, 463) == UNKNOWN
    writing = call_numbers(WRITE_CALLS, column)
    assert {decide(job, machine, number) for number in writing} == {REFUSE}
    assert {decide(filter_program(False, True, machine=machine), machine, number) for number in writing} == {ALLOW}


def test_the_filter_knows_the_other_system_calls_of_x86() -> None:
    job = filter_program(False, False, machine="x86_64")
    assert decide(job, "x86_64", 0x40000000 + 39) == KILL_PROCESS  # x32
    assert decide(job, "aarch64", 172) == KILL_PROCESS  # another architecture
    old = filter_program(False, False, truncates=False, machine="x86_64")  # Landlock before its third version
    for call, at in ((257, 2), (2, 1)):
        assert decide(old, "x86_64", call, *[0] * at, 0o1000) == REFUSE
        assert decide(old, "x86_64", call, *[0] * at, 0) == ALLOW


# ---- limits, and the end of jobs ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("while True: pass", "took longer than 0.3 s"),
        ("import time; time.sleep(600)", "took longer than 0.3 s"),
        ("import os; os._exit(0)", "ended its process: exit status 0"),
        ("import os; os.kill(os.getpid(), 9)", "ended its process: SIGKILL"),
        ("import os; os.closerange(0, 64)", "ended its process: exit status 1"),
        ("import ctypes; ctypes.string_at(0)", "ended its process: SIGSEGV"),
    ],
)
def test_a_job_that_does_not_answer_is_ended(session: Sandbox, code: str, why: str) -> None:
    seconds = 0.3 if "longer" in why else LONG
    with pytest.raises(JobEndedError, match=why), session.job() as job:
        job.ask({"code": code}, seconds)


def test_a_job_that_says_too_much_is_ended(session: Sandbox) -> None:
    code = "import os\nfor n in range(3, 64):\n    try: os.write(n, b'x' * (1 << 20))\n    except OSError: pass"
    with pytest.raises(JobEndedError, match="sent more than 65,536 bytes"), session.job() as job:
        job.ask({"code": code}, LONG)


def test_memory_is_limited_and_the_job_goes_on(session: Sandbox) -> None:
    with session.job() as job:
        assert "MemoryError" in job.ask({"code": "x = bytearray(2 << 30)"}, LONG)["text"]
        assert job.ask({"code": "1 + 1"}, LONG)["text"] == "2\n"


def test_names_are_kept_in_a_session_and_not_beyond_it(session: Sandbox) -> None:
    with session.job() as job:
        job.ask({"code": "x = 20\ndef f(): return x + 1"}, LONG)
        assert job.ask({"code": "f()"}, LONG)["text"] == "21\n"
    assert "NameError" in run(session, "x")


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("class A:\n    def __repr__(self): raise ValueError('no')\nA()", "ValueError: no"),
        ("class E(Exception):\n    def __str__(self): raise SystemExit\nraise E()", "str() failed"),
        ("print('\\ud800')", "\ud800"),
        ("def f(): f()\nf()", "RecursionError"),
        ("(1", "SyntaxError"),
        ("import sys; sys.exit(3)", ""),
        ("print('x' * 10**6)", "… (980,001 more characters)"),
        ("x = 'a' * 3\nx", "'aaa'\n"),
        ("", ""),
        ("\0", "SyntaxError|ValueError"),
    ],
)
def test_a_session_answers_whatever_the_code_does(session: Sandbox, code: str, text: str) -> None:
    answer = run(session, code)
    assert any(part in answer for part in text.split("|")) and (text or answer == "")


def test_jobs_side_by_side_do_not_see_one_another(session: Sandbox) -> None:
    with contextlib.ExitStack() as stack:
        jobs = [stack.enter_context(session.job()) for _ in range(8)]
        for number, job in enumerate(jobs):
            job.ask({"code": f"x = {number}"}, LONG)
        assert [job.ask({"code": "x"}, LONG)["text"] for job in jobs] == [f"{n}\n" for n in range(8)]


def processes_below(pid: int) -> list[int]:
    """The processes that this one has started, and those below them."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    below = children.get(pid, [])
    for each in below:
        below += children.get(each, [])
    return below


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pids: list[int]) -> None:
    until = time.monotonic() + LONG
    while any(map(alive, pids)) and time.monotonic() < until:
        time.sleep(0.01)
    assert not any(map(alive, pids))


def test_jobs_leave_no_process_and_no_file_descriptor(session: Sandbox) -> None:
    session.start()
    server = session._ends[0][1].pid
    before, files = processes_below(server), len(os.listdir("/proc/self/fd"))
    folder = "import os; os.mkdir('d'); os.chmod('d', 0)"
    deep = "import os\nfor _ in range(3000): os.mkdir('d'); open('f', 'w'); os.chdir('d')"
    for code in [deep, "1", "import os; os._exit(1)", "open('f', 'w').write('x')", folder]:
        with contextlib.suppress(JobEndedError), session.job() as job:
            job.ask({"code": code}, LONG)
    wait_until_gone([pid for pid in processes_below(server) if pid not in before])
    assert len(os.listdir("/proc/self/fd")) == files


def test_the_folder_of_a_job_is_wiped_whatever_is_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without isolation, because only then the folder is visible from outside."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code = (
        "import os\nos.symlink('/etc', 'link'); open('file', 'w')\nfor _ in range(300): os.mkdir('d'); os.chdir('d')\n"
    )
    code += "os.makedirs('a/b'); os.chmod('a', 0); print('made')"
    with Sandbox("ascent.sandbox.python_session:serve_session", SHORT, kind="none") as sandbox:
        with sandbox.job() as job:
            assert job.ask({"code": code}, LONG)["text"] == "made\n" and len(os.listdir(tmp_path)) == 1
        assert os.listdir(tmp_path) == []


def test_a_sandbox_that_was_killed_is_restarted(session: Sandbox) -> None:
    with session.job() as job:
        job.ask({"code": "1"}, LONG)
        process = session._ends[0][1]
        below = processes_below(process.pid)
        process.kill()
        process.wait()
        wait_until_gone(below)
        with pytest.raises(SandboxError, match="ended while a job was in it"):
            job.ask({"code": "1"}, LONG)
    assert run(session, "2 + 2") == "4\n"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_everything_ends_with_a_parent_that_is_killed(kind: str) -> None:
    need_isolation(kind)
    code = (
        "from ascent.sandbox.sandbox import Sandbox\n"
        f"box = Sandbox('ascent.sandbox.python_session:serve_session', kind={kind!r})\n"
        "job = box.job(); job.ask({'code': '1'}, 60); print('there', flush=True); job.ask({'code': 'while 1: 0'}, 600)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(isolation.PACKAGE_FOLDER).parent)}
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment)
    assert parent.stdout is not None and parent.stdout.readline() == b"there\n"
    below = processes_below(parent.pid)
    assert len(below) >= 2
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until_gone(below)


def test_a_guest_that_cannot_be_loaded_says_why() -> None:
    with (
        pytest.raises(SandboxError, match="ModuleNotFoundError: No module named 'nowhere'"),
        Sandbox("nowhere:nothing") as sandbox,
    ):
        sandbox.start()


def test_a_full_temporary_folder_and_no_shared_memory_are_no_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the host is written to: a folder that takes no file is as good as any."""
    monkeypatch.setenv("TMPDIR", "/proc")
    with Sandbox("ascent.sandbox.python_session:serve_session") as sandbox:
        assert run(sandbox, "1 + 1") == "2\n"


def test_an_attempt_that_gets_out_is_not_taken_for_one_that_is_held() -> None:
    """The check itself can fail."""
    attempt = ESCAPE_TESTS[0]._replace(code="got('through')")
    with Sandbox("ascent.sandbox.escape_tests:serve_escape_tests") as sandbox, decoys() as host:
        result = run_escape_test(sandbox, host, attempt)
    assert not result.is_contained and result.how == "through"
