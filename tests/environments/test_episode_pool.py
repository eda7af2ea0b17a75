"""Episodes in processes of their own: whatever an environment does is its episode's error, and nobody else's."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import cloudpickle
import pytest

from ascent.environments import episode_pool
from ascent.environments.episode_pool import EPISODE_OVER, EpisodePool, InProcessEpisodePool, Reply
from ascent.environments.episode_process import MAX_OBSERVATION_CHARS, Source, load_environment
from ascent.processes import channel as channel_module
from ascent.processes.channel import MAX_MESSAGE_BYTES, PolledChannel
from ascent.processes.fork_server import ForkServer
from ascent.processes.supervisor import START_SECONDS, Limits
from ascent.tasks.environment import Environment, Step
from ascent.tasks.text.text_task import Problem

pytestmark = pytest.mark.long
MARK = f"EPISODES_OF_{os.getpid()}"
"""An environment variable of the processes of this test process: tests beside it have another."""
ENVIRONMENT = '''
import os, random, re, signal, subprocess, sys, threading, time

from ascent.tasks.environment import Environment, Step

FORGED = b'{"number": "0", "seconds": 0.0, "step": ["x", 9.0, false, ""]}\\n'


class Broken(Exception):
    def __str__(self):
        raise RuntimeError


def deep():
    return deep()


def loop(work):
    while True:
        work()


def everywhere(act):
    for file in filter((2).__lt__, map(int, os.listdir("/proc/self/fd"))):
        try:
            act(file)
        except OSError:
            pass


def bomb(depth, awake):
    """Twice as many processes with each call, every other one in a session of its own."""
    for i in range(depth):
        if os.fork() == 0:
            if i % 2:
                os.setsid()
    if not awake:
        time.sleep(60)


def shut(file):
    import socket
    socket.socket(fileno=os.dup(file)).shutdown(socket.SHUT_RDWR)


class Odd(Environment):
    """It does what its problem says when it begins, and what it is told at each turn."""

    def __init__(self, word="hello"):
        self.word, self.turns = word, 0

    def begin(self, problem, rng):
        self.rng = rng
        if problem.prompt in self.begins:
            return self.begins[problem.prompt](self)
        return f"{self.word} {problem.prompt} {rng.random()} {random.random()} {set('abcdefgh')}"

    begins = {
        "begin: crash": lambda self: 1 / 0,
        "begin: exit": lambda self: os._exit(3),
        "begin: hang": lambda self: time.sleep(60),
        "begin: a number": lambda self: 3,
        "begin: nothing": lambda self: None,
        "begin: long": lambda self: "x" * 200_000,
    }

    def step(self, action):
        self.turns += 1
        words = f"{self.turns} {action} {self.rng.random()} {random.random()}"
        return self.acts[action](self) if action in self.acts else Step(words, 0.5, self.turns == 3)

    def speak(self, words):
        everywhere(lambda file: os.write(file, words))

    def daemons(self):
        subprocess.Popen(["sleep", "60"], start_new_session=True)
        subprocess.Popen(["sh", "-c", "setsid sleep 60 & setsid sleep 60 &"])
        return Step("three")

    def kill_fork_server(self):
        supervisor = open(f"/proc/{os.getppid()}/stat").read().rpartition(")")[2].split()
        os.kill(int(supervisor[1]), 9)
        return Step("killed")

    def close(self):
        if self.word != "hello":
            open(self.word, "w").close()

    acts = {
        "crash": lambda self: 1 / 0,
        "hang": lambda self: time.sleep(60),
        "hold the lock": lambda self: re.match("(a+)+$", "a" * 64 + "b"),
        "print for ever": lambda self: loop(lambda: print("x" * 100_000)),
        "children": lambda self: subprocess.run(["sleep", "60"]),
        "exit": lambda self: os._exit(3),
        "sys.exit": lambda self: sys.exit(2),
        "segfault": lambda self: os.kill(os.getpid(), 11),
        "recursion": lambda self: deep(),
        "memory": lambda self: Step(str(len(bytearray(1 << 30)))),
        "broken words": lambda self: (_ for _ in ()).throw(Broken()),
        "interrupt": lambda self: (_ for _ in ()).throw(KeyboardInterrupt()),
        "close every file": lambda self: os.closerange(0, 4096) or Step("closed"),
        "kill its supervisor": lambda self: os.kill(os.getppid(), 9) or time.sleep(60),
        "shut its socket": lambda self: everywhere(shut) or time.sleep(60),
        "a fork bomb": lambda self: bomb(6, False),
        "speak out of turn": lambda self: self.speak(FORGED) or Step("honest"),
        "half an answer": lambda self: self.speak(b'{"number": ') or time.sleep(60),
        "speak for ever": lambda self: loop(lambda: self.speak(b"x" * 60_000)),
        "deep words": lambda self: self.speak(b"[" * 100_000 + b"\\n") or time.sleep(60),
        "nothing": lambda self: None,
        "words": lambda self: "words",
        "a gym's five": lambda self: ("x", 0.0, False, False, {}),
        "a gym's four": lambda self: ("x", 0.0, False, {}),
        "a number seen": lambda self: Step(3),
        "a message of numbers": lambda self: Step([{"role": "user", "content": 3}]),
        "a message without role": lambda self: Step([{"content": "x"}]),
        "nan": lambda self: Step("x", float("nan")),
        "infinite": lambda self: Step("x", -float("inf")),
        "too large": lambda self: Step("x", 1e300),
        "a reward in words": lambda self: Step("x", "1.0"),
        "no reward": lambda self: ("x", None, True),
        "done in words": lambda self: Step("x", 0.0, "False"),
        "a tuple": lambda self: ("x", 1, True),
        "true": lambda self: Step("x", True, 1, "why"),
        "messages": lambda self: Step([{"role": "tool", "content": "4"}, {"role": "user", "content": "go on"}], 1),
        "long": lambda self: Step("é" * 200_000),
        "surrogate": lambda self: Step(chr(0xD800), 0.0, True, chr(0xDFFF)),
        "print": lambda self: print("x" * 1_000_000) or print("y", file=sys.stderr) or Step("printed"),
        "forks": lambda self: os.fork() and Step("parent") or Step("child", 9.0),
        "a bomb that comes back": lambda self: bomb(5, True) or Step("bombed"),
        "a thread": lambda self: threading.Thread(target=time.sleep, args=(60,)).start() or Step("threaded"),
        "secret": lambda self: Step(str("ASCENT_SECRET" in os.environ), float("PATH" in os.environ)),
        "modules": lambda self: Step(str("torch" in sys.modules)),
        "process": lambda self: Step(str(os.getpid())),
        "daemons": daemons,
        "kill the fork server": kill_fork_server,
    }


def made():
    return Odd("made")


class Slow(Odd):
    """Answers whenever it likes."""

    def step(self, action):
        time.sleep(os.urandom(1)[0] / 255 * 0.02)
        return super().step(action)


number = 3
'''
LATE = "^its environment took longer than 4 s$"
BAD = {
    "crash": r"^ZeroDivisionError: division by zero \(odd.py, line \d+\)$",
    "hang": LATE,
    "hold the lock": LATE,
    "print for ever": LATE,
    "children": LATE,
    "exit": "^its environment ended its process: exit status 3$",
    "sys.exit": "^SystemExit: 2",
    "segfault": "^its environment ended its process: SIGSEGV$",
    "recursion": "^RecursionError",
    "memory": "^MemoryError",
    "broken words": "^Broken, and RuntimeError",
    "interrupt": "^KeyboardInterrupt",
    "close every file": "^its environment ended its process: exit status 1$",
    "kill its supervisor": "^its environment ended its process",
    "shut its socket": "^its environment ended its process",
    "a fork bomb": LATE,
    "speak out of turn": "an answer that is not the one to this turn",
    "half an answer": LATE,
    "speak for ever": f"an answer of more than {MAX_MESSAGE_BYTES:,} bytes",
    "deep words": "an answer that is not the one to this turn",
    "nothing": r"^step returned a NoneType: a step is Step\(observation, reward, done, reason\)$",
    "words": "^step returned a str: a step is",
    "a gym's five": "^step returned a tuple of 5: a step is",
    "a gym's four": "^step returned a dict for the reason",
    "a number seen": "^step returned a int as its observation: it is text or a list of messages",
    "a message of numbers": "^step returned a message with 3 in it",
    "a message without role": "^step returned the message .*: a message has a role and a content",
    "nan": "^returned nan: a reward is a finite number$",
    "infinite": "^returned -inf",
    "too large": r"^returned 1e\+300",
    "a reward in words": "^returned str: the reward of a step is one finite number$",
    "no reward": "^returned NoneType: the reward of a step is one finite number$",
    "done in words": "^step returned 'False' for done: it is True or False",
}
BEGINS = {
    "begin: crash": r"^ZeroDivisionError: division by zero \(odd.py",
    "begin: exit": "ended its process: exit status 3$",
    "begin: hang": LATE,
    "begin: a number": "^begin returned a int: it returns text, or None$",
}
GOOD = {
    "a tuple": Step("x", 1.0, True),
    "true": Step("x", 1.0, True, "why"),
    "messages": Step([{"role": "tool", "content": "4"}, {"role": "user", "content": "go on"}], 1.0),
    "long": Step("é" * MAX_OBSERVATION_CHARS + " … (100,000 more characters are left out)"),
    "surrogate": Step("\ufffd", 0.0, True, "\ufffd"),
    "print": Step("printed"),
    "forks": Step("parent"),
    "a bomb that comes back": Step("bombed"),
    "a thread": Step("threaded"),
    "secret": Step("False", 1.0),
    "modules": Step("False"),
}


def marked() -> list[int]:
    """The processes that this test process has started and that are not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError, IndexError):
            if f"{MARK}=1".encode() in path.read_bytes().split(b"\0") and not gone(int(path.parent.name)):
                found.append(int(path.parent.name))
    return found


def gone(pid: int) -> bool:
    """No such process, or one that waits only for its parent to notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def soon(true: Callable[[], bool], seconds: float = 120.0) -> bool:
    until = time.monotonic() + seconds
    while not true():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    file = tmp_path_factory.mktemp("odd") / "odd.py"
    file.write_text(ENVIRONMENT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK, "1")
        patch.setenv("ASCENT_SECRET", "key")
        yield f"python:{file}:Odd"


LIMITS = Limits(4.0, memory=0.5, env=(MARK,))


@pytest.fixture(scope="module")
def pool(odd: str) -> Iterator[EpisodePool]:
    with closing(EpisodePool(Source(odd), LIMITS)) as pool:
        yield pool


def heard(pool: Any, count: int) -> dict[int, Reply]:
    """The next answers, by their episode."""
    answers: list[Reply] = []
    while len(answers) < count:
        some = pool.wait_for_replies(60.0)
        assert some, f"{count - len(answers)} are missing"
        answers += some
    assert len({answer.episode for answer in answers}) == len(answers) == count
    return {answer.episode: answer for answer in answers}


def begun(pool: Any, count: int, prompt: str = "p", first: int = 0) -> dict[int, Reply]:
    for episode in range(first, first + count):
        pool.begin(episode, Problem(prompt), 7, episode)
    return heard(pool, count)


@pytest.fixture(scope="module")
def attacks(pool: EpisodePool) -> Iterator[dict[str, Reply]]:
    """All of them at once, with an episode that does nothing odd beside each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(episode_pool, "READ_SECONDS", 0.5)
        yield attack(pool)


def attack(pool: EpisodePool) -> dict[str, Reply]:
    acts = [*BAD, *GOOD]
    begun(pool, 2 * len(acts))
    for episode, act in enumerate(acts):
        pool.step(episode, act)
        pool.step(episode + len(acts), "plain")
    for episode, prompt in enumerate(BEGINS, first := 2 * len(acts)):
        pool.begin(episode, Problem(prompt), 7, episode)
    answers = heard(pool, first + len(BEGINS))
    for episode in range(first):
        if answers[episode].error is None:
            pool.step(episode, "again")
    again = heard(pool, len(GOOD) + len(acts))
    assert not any(answer.error for answer in again.values()), "nobody has spoken in between"
    for episode in range(len(acts), first):
        step = answers[episode].step
        assert step is not None and str(step.observation).startswith("1 plain"), "they did it no harm"
        assert str(again[episode].step).startswith("Step(observation='2 again"), "nor later"
    for episode in range(first + len(BEGINS)):
        pool.end(episode)
    return dict(
        zip([*acts, *BEGINS], (answers[e] for e in [*range(len(acts)), *range(first, len(answers))]), strict=True)
    )


@pytest.mark.long
@pytest.mark.parametrize("act", [*BAD, *BEGINS])
def test_a_failed_call_is_the_error_of_its_episode(act: str, attacks: dict[str, Reply]) -> None:
    step, error = attacks[act].step, attacks[act].error
    assert step is None and error is not None and re.search((BAD | BEGINS)[act], error), attacks[act]


@pytest.mark.long
@pytest.mark.parametrize("act", GOOD)
def test_a_step_that_does_odd_things_and_yet_is_one(act: str, attacks: dict[str, Reply]) -> None:
    assert (attacks[act].step, attacks[act].error) == (GOOD[act], None)


@pytest.mark.long
def test_what_failed_or_ended_leaves_no_process(attacks: dict[str, Reply], pool: EpisodePool) -> None:
    """Only the fork server and its supervisor are left."""
    assert soon(lambda: len(marked()) == 2), marked()
    assert not pool.episodes and not pool.active


def test_a_group_shares_its_beginning_and_nothing_later(pool: EpisodePool) -> None:
    first = begun(pool, 3)
    observations = {str(answer.step and answer.step.observation) for answer in first.values()}
    assert len(observations) == 1 and observations.pop().startswith("hello p 0.")
    pool.begin(3, Problem("p"), 8, 2)
    assert heard(pool, 1)[3] != first[2], "another group"
    for episode in range(4):
        pool.step(episode, "go")
    steps = [answer.step for _, answer in sorted(heard(pool, 4).items())]
    assert len(set(steps[:3])) == 3 and steps[3] == steps[2], "later numbers come from the seed of the episode alone"
    assert steps[0] is not None
    own, world = str(steps[0].observation).split()[2:]
    assert own != world, "the global generator has numbers of its own"
    for episode in range(4):
        pool.end(episode)


def played(pool: Any, together: bool, count: int = 10) -> dict[tuple[int, int], Reply]:
    """Everything that episodes answer, asked one after the other or all at once."""
    found: dict[tuple[int, int], Reply] = {}
    parts = [range(count)] if together else [range(e, e + 1) for e in reversed(range(count))]
    for part in parts:
        for turn in range(4):
            for episode in part:
                if turn == 0:
                    pool.begin(episode, Problem(f"p{episode // 5}"), episode // 5, episode)
                else:
                    pool.step(episode, f"action {turn}")
            found |= {(e, turn): answer._replace(seconds=0.0) for e, answer in heard(pool, len(part)).items()}
        for episode in part:
            pool.end(episode)
    return found


@pytest.mark.long
def test_answers_in_any_order_and_at_any_speed_are_the_same(pool: EpisodePool, odd: str) -> None:
    """Also with another fork server: its sets have the same order."""
    one = played(pool, together=False)
    with closing(EpisodePool(Source(odd.replace("Odd", "Slow")), LIMITS, max_active=3)) as slow:
        assert played(slow, together=True) == one
    assert all(answer.error is None for answer in one.values())
    assert [one[0, turn].step.done for turn in range(4)] == [False, False, False, True]  # type: ignore[union-attr]


@pytest.mark.long
def test_three_hundred_episodes_at_once_have_a_process_and_one_file_each(pool: EpisodePool) -> None:
    before = len(os.listdir("/proc/self/fd"))
    begun(pool, 300)
    assert len(os.listdir("/proc/self/fd")) <= before + 300 + 4
    for episode in range(300):
        pool.step(episode, "process")
    pids = {str(answer.step and answer.step.observation) for answer in heard(pool, 300).values()}
    assert len(pids) == 300
    for episode in range(300):
        pool.end(episode)
    assert soon(lambda: all(gone(int(pid)) for pid in pids))


def test_calls_beyond_the_limit_wait_and_idle_episodes_block_none(pool: EpisodePool) -> None:
    pool.max_active = 2
    begun(pool, 5)  # all are alive and none is asked anything
    for episode in range(5):
        pool.step(episode, "go")
    assert len(pool.active) == 2
    pool.end(4)
    pool.end(0)
    assert heard(pool, 3).keys() == {1, 2, 3}
    for episode in range(5):
        pool.end(episode)
    pool.max_active = 64


def test_an_episode_that_is_ended_in_the_middle_of_a_step_answers_no_more(pool: EpisodePool) -> None:
    begun(pool, 2)
    pool.step(0, "process")
    (answer,) = pool.wait_for_replies(60.0)
    assert answer.step is not None
    pid = int(str(answer.step.observation))
    pool.step(0, "hang")
    assert pool.wait_for_replies(0.0) == []
    pool.end(0)
    pool.end(0)
    pool.begin(0, Problem("begin: nothing"), 7, 0)  # its name is free again
    pool.step(1, "go")
    answers = heard(pool, 2)
    assert answers[0].step == Step("") and answers[1].error is None
    assert soon(lambda: gone(pid))
    pool.end(0)
    pool.end(1)
    assert pool.wait_for_replies(60.0) == [], "and where nothing was asked, nobody waits"


def test_what_an_episode_started_ends_with_it_and_its_environment_may_close(
    pool: EpisodePool, odd: str, tmp_path: Path
) -> None:
    begun(pool, 1)
    assert soon(lambda: len(marked()) == 4), "the fork server, the episode, and a supervisor for each"
    pool.step(0, "daemons")
    assert heard(pool, 1)[0].step == Step("three")
    assert soon(lambda: len(marked()) == 7)
    pool.end(0)
    assert soon(lambda: len(marked()) == 2)
    with closing(EpisodePool(Source(odd, {"word": str(tmp_path / "closed")}), LIMITS)) as closes:
        begun(closes, 1)
        closes.end(0)
        assert soon((tmp_path / "closed").exists)


def test_calls_that_nobody_can_answer(pool: EpisodePool, odd: str) -> None:
    pool.step(77, "go")
    assert pool.wait_for_replies(1.0) == [Reply(77, None, EPISODE_OVER, 0.0)]
    pool.begin(0, Problem("p", columns={"f": lambda: 1}), 7, 0)
    assert "cannot be sent" in str(heard(pool, 1)[0].error)
    begun(pool, 1)
    with pytest.raises(ValueError, match="has begun already"):
        pool.begin(0, Problem("p"), 7, 0)
    pool.step(0, "go")
    with pytest.raises(ValueError, match="has not answered yet"):
        pool.step(0, "go")
    heard(pool, 1)
    pool.end(0)


def test_a_fork_server_that_dies_is_restarted_and_episodes_continue(pool: EpisodePool) -> None:
    begun(pool, 3)
    first = pool.server
    for episode, action in enumerate(("kill the fork server", "go", "go")):
        pool.step(episode, action)
    assert heard(pool, 3)[0].step == Step("killed")
    assert soon(lambda: pool.wait_for_replies(0.0) == [] and pool.server is None)
    begun(pool, 1, first=3)
    assert pool.server is not first
    for episode in range(4):
        pool.step(episode, "go")
    answers = heard(pool, 4)
    assert not any(answer.error for answer in answers.values())
    for episode in range(4):
        pool.end(episode)
    assert soon(lambda: len(marked()) == 2), "what is left of the first one is gone"


@pytest.mark.long
def test_a_fork_server_that_keeps_dying_is_an_error_for_all_that_wait(odd: str, tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n")
    (tmp_path / "broken.py").write_text("import nothing_of_this_name\n")
    (tmp_path / "threads.py").write_text("import threading\nthreading.Timer(60, print).start()\nE = object\n")
    file = odd.removesuffix("Odd")
    for source, words in (
        (f"python:{tmp_path}/dies.py:E", "^the process that makes its environment ended twice: SIGTERM$"),
        (f"python:{tmp_path}/broken.py:E", "^its environment cannot be loaded: ModuleNotFoundError.*broken.py, line 1"),
        (f"python:{tmp_path}/threads.py:E", r"^its environment cannot be loaded: its file starts a thread \(Thread-1"),
        (f"{file}number", "cannot be loaded: number is a int: it has to be an Environment"),
    ):
        with closing(EpisodePool(Source(source), LIMITS)) as pool:
            for answer in begun(pool, 3).values():
                assert answer.error is not None and re.search(words, answer.error), answer


def test_sources_a_function_settings_and_an_object_of_ours(
    odd: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where it counts its episodes

    class Notebook(Environment):
        def begin(self, problem: Problem, rng: Any) -> str:
            return "sent"

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    sent = cloudpickle.dumps(Notebook)
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    for source, words in (
        (Source(odd.replace("Odd", "made")), "made p"),
        (Source(odd, {"word": "given"}), "given p"),
        (Source(odd, {"what": 1}), "TypeError: .*unexpected keyword"),
        (Source(odd.replace("Odd", "Broken")), "Broken made a Broken: an environment has begin and step"),
        (Source("__main__:Notebook", {}, sent), "^sent$"),
    ):
        pools: list[Any] = [InProcessEpisodePool(load_environment(source))]
        pools += [EpisodePool(source, LIMITS)] if source.sent or source.settings.get("what") else []
        for each in pools:
            with closing(each) as pool:
                (answer,) = begun(pool, 1).values()
                assert re.search(words, str(answer.step.observation if answer.step else answer.error)), answer


def test_a_variable_that_the_user_names_is_seen(odd: str) -> None:
    with closing(EpisodePool(Source(odd), LIMITS._replace(env=(MARK, "ASCENT_SECRET")))) as pool:
        begun(pool, 1)
        pool.step(0, "secret")
        assert heard(pool, 1)[0].step == Step("True", 1.0)


def test_episodes_in_this_process_answer_the_same(pool: EpisodePool, odd: str) -> None:
    with closing(InProcessEpisodePool(load_environment(Source(odd)))) as local:
        begun(local, 3)
        for episode, action in enumerate(("go", "crash", "a tuple")):
            local.step(episode, action)
        answers = heard(local, 3)
        assert answers[0].error is None and answers[2].step == GOOD["a tuple"]
        assert answers[1].step is None and re.search(BAD["crash"], str(answers[1].error))
        local.step(1, "go")
        assert local.wait_for_replies(60.0) == [Reply(1, None, EPISODE_OVER, 0.0)]
        with pytest.raises(ValueError, match="has begun already"):
            local.begin(0, Problem("p"), 7, 0)


# ---- how everything ends ------------------------------------------------------------------------------


def test_a_closed_pool_leaves_nothing_though_everything_hangs_and_starts_again(odd: str) -> None:
    with closing(EpisodePool(Source(odd), Limits(100.0, env=(MARK,)))) as pool:
        before = marked()
        begun(pool, 6)
        for episode, action in enumerate(("hang", "hold the lock", "children", "daemons", "a fork bomb", "plain")):
            pool.step(episode, action)
        heard(pool, 2)
        pool.begin(6, Problem("p"), 7, 6)
        (kept,) = pool.servers
        pool.close()
        assert kept.process.returncode == 0, "its supervisor was done within its time, and nobody had to kill it"
        assert set(marked()) <= set(before)
        assert pool.wait_for_replies(0.0) == []
        assert begun(pool, 1)[0].error is None


def in_a_fork(work: Callable[[], Any]) -> int:
    """A fork of this process that does the work, says whether it succeeded, and lives on."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException):
            work()
            os.write(write, b"done")
            time.sleep(60)
        os._exit(1)
    os.close(write)
    assert os.read(read, 4) == b"done"
    os.close(read)
    return pid


def test_a_forgotten_pool_leaves_no_process_and_one_that_a_fork_forgets_all(odd: str) -> None:
    before = marked()
    pools = [EpisodePool(Source(odd), LIMITS)]
    begun(pools[0], 2)
    fork = in_a_fork(pools.clear)
    pools[0].step(0, "go")
    assert heard(pools[0], 1)[0].error is None
    pools[0].step(1, "hang")
    pools.clear()
    assert set(marked()) <= set(before)
    os.kill(fork, signal.SIGKILL)
    os.waitpid(fork, 0)


def test_a_fork_of_the_trainer_does_not_own_them(pool: EpisodePool) -> None:
    begun(pool, 2)
    forks = [in_a_fork(lambda: [pool.end(0), pool.close()]), in_a_fork(lambda: None)]
    for episode in range(2):
        pool.step(episode, "process")
    answers = heard(pool, 2).values()
    assert not any(answer.error for answer in answers)
    for episode in range(2):
        pool.end(episode)
    pids = [int(str(answer.step and answer.step.observation)) for answer in answers]
    assert soon(lambda: all(map(gone, pids))), "though a fork holds the other ends of their sockets"
    for fork in forks:
        os.kill(fork, signal.SIGKILL)
        os.waitpid(fork, 0)


@pytest.mark.long
def test_everything_ends_with_a_trainer_that_is_killed_though_a_fork_of_it_lives(odd: str) -> None:
    """Whatever the episodes do: waiting, computing, holding Python's lock inside C, or leaving their session."""
    code = f"""
import os, signal, time
from ascent.environments.episode_pool import EpisodePool, Limits, Source
from ascent.tasks.text.text_task import Problem
pool = EpisodePool(Source({odd!r}), Limits(100.0, env=({MARK!r},)))
acts = ("plain", "daemons", "hang", "hold the lock", "children", "a fork bomb")
for i in range(6):
    pool.begin(i, Problem("p"), 7, i)
count = 0
while count < 6:
    count += len(pool.wait_for_replies(60.0))
for i, act in enumerate(acts):
    pool.step(i, act)
while count < 8:
    count += len(pool.wait_for_replies(60.0))
if os.fork() == 0:
    os.environ.clear()
    time.sleep(60)
    os._exit(0)
time.sleep(0.2)
print("killed", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    before = set(marked())
    environment = {name: value for name, value in os.environ.items() if name != MARK}
    code = f"import os; os.environ[{MARK!r}] = '1'\n{code}"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment, start_new_session=True
    ) as trainer:
        try:
            assert trainer.stdout is not None
            assert trainer.stdout.readline() == b"killed\n"
            assert soon(lambda: set(marked()) <= before), marked()
        finally:
            os.killpg(trainer.pid, signal.SIGKILL)
    assert trainer.returncode == -signal.SIGKILL


# ---- processes that answer anything -----------------------------------------------------------------------------


class StandInServer:
    """Stands in for the fork server: the test itself holds the other ends."""

    made: ClassVar[list[StandInServer]] = []
    starts: ClassVar[bool] = True

    def __init__(self, *_: Any):
        ours, self.other = socket.socketpair()
        self.channel = PolledChannel(ours)
        self.is_ready, self.deadline, self.ended = self.starts, math.inf, False
        self.process = SimpleNamespace(poll=lambda: -9 if self.ended else None)
        self.made.append(self)

    def end(self) -> None:
        self.ended = True
        self.channel.socket.close(), self.other.close()

    fork, receive = ForkServer.fork, ForkServer.receive

    def take(self) -> socket.socket:
        """The line of the episode that is to be made next."""
        return socket.socket(fileno=socket.recv_fds(self.other, 1, 1)[1][0])


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[EpisodePool]:
    monkeypatch.setattr(episode_pool, "ForkServer", StandInServer)
    monkeypatch.setattr(StandInServer, "made", [])
    with closing(EpisodePool(Source("python:nowhere.py:E"), LIMITS)) as pool:
        yield pool


def answered(pool: EpisodePool, reply: Any, before: Any = None) -> Reply:
    """What becomes of an episode whose process says this, with the number of its call."""
    pool.begin(0, Problem("p"), 7, 0, seconds=5.0)
    with StandInServer.made[-1].take() as line:
        for said in (before, reply):
            if isinstance(said, dict):
                said = {k: pool.episodes[0].number if v == "NUMBER" else v for k, v in said.items()}
                line.sendall(json.dumps(said).encode() + b"\n")
        (found,) = pool.wait_for_replies(5.0)
    return found


BEGAN, STEP = {"began": 1e9}, ["seen", 0.5, False, "why"]


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        ({"number": "NUMBER", "step": STEP}, "its process sent what is not a step: ['step']"),
        ({"number": "NUMBER", "seconds": -1.0, "step": STEP}, "sent what is not a step: ['seconds', 'step']"),
        ({"number": "NUMBER", "seconds": 1, "step": STEP}, "sent what is not a step: ['seconds', 'step']"),
        ({"number": "NUMBER", "seconds": 1.0, "step": ["seen", 2, False, ""]}, "sent what is not a step"),
        ({"number": "NUMBER", "seconds": 5.5, "step": STEP}, "its environment took longer than 5 s"),
        ({"number": "NUMBER", "seconds": 1.0, "error": "it fell"}, "it fell"),
        ({"number": "another", "seconds": 1.0, "step": STEP}, "an answer that is not the one to this turn"),
        ({"ended": "SIGSEGV"}, "its environment ended its process: SIGSEGV"),
    ],
)
def test_what_is_no_step_is_the_error_of_its_episode(stand_in: EpisodePool, reply: Any, error: str) -> None:
    found = answered(stand_in, reply, BEGAN)
    assert found.step is None and error in str(found.error)
    assert not stand_in.episodes and not stand_in.active


def test_a_step_and_an_error_before_the_beginning(stand_in: EpisodePool) -> None:
    found = answered(stand_in, {"number": "NUMBER", "seconds": 1.5, "step": STEP}, BEGAN)
    assert found == Reply(0, Step("seen", 0.5, False, "why"), None, 1.5)
    stand_in.end(0)
    assert answered(stand_in, {"error": "x" * 999}).error == "x" * episode_pool.MAX_REASON_CHARS


def test_an_episode_that_was_never_made_is_asked_for_again_and_only_once(stand_in: EpisodePool) -> None:
    stand_in.begin(0, Problem("p"), 7, 0)
    StandInServer.made[0].take().close()
    assert stand_in.wait_for_replies(0.05) == [] and not stand_in.replies
    StandInServer.made[0].take().close()
    (found,) = stand_in.wait_for_replies(5.0)
    assert found.error == "its environment ended its process: it closed its pipe"


def test_a_fork_server_that_does_not_start_is_given_up(stand_in: EpisodePool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StandInServer, "starts", False)
    stand_in.begin(1, Problem("p"), 7, 0)
    (server,) = StandInServer.made
    assert stand_in.wait_for_replies(0.0) == [] and not server.ended
    server.deadline = 0.0
    (found,) = stand_in.wait_for_replies(5.0)
    words = f"the process that makes its environment did not start within {START_SECONDS:g} s"
    assert (found.episode, found.error) == (1, words)
    assert server.ended and stand_in.servers == [] and stand_in.server is None


def test_a_fork_server_that_died_is_replaced_and_two_are_an_error(
    stand_in: EpisodePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StandInServer, "starts", False)
    stand_in.begin(1, Problem("p"), 7, 0)
    (first,) = StandInServer.made
    first.other.close()
    first.process.poll = lambda: -9
    assert stand_in.wait_for_replies(0.05) == []
    first, second = StandInServer.made
    assert first.ended and stand_in.servers == [second], "what is left of the first one is gone"
    second.other.close()
    (found,) = stand_in.wait_for_replies(5.0)
    assert found.error == "the process that makes its environment ended twice: it closed its pipe"


def test_a_fork_server_that_takes_no_more_is_asked_again(
    stand_in: EpisodePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise BlockingIOError

    with monkeypatch.context() as patch:
        patch.setattr(channel_module.socket, "send_fds", refuse)
        stand_in.begin(0, Problem("p"), 7, 0)
    assert (
        StandInServer.made[0].channel.is_full and stand_in.episodes[0].channel is None and list(stand_in.queue) == [0]
    )
    assert stand_in.wait_for_replies(0.05) == []
    with StandInServer.made[0].take() as line:
        assert not StandInServer.made[0].channel.is_full
        line.sendall(b'{"error": "heard"}\n')
        assert stand_in.wait_for_replies(5.0)[0].error == "heard"


def test_no_process_can_be_made(stand_in: EpisodePool, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(channel_module.socket, "socketpair", refuse)
        stand_in.begin(0, Problem("p"), 7, 0)
    (found,) = stand_in.wait_for_replies(0.0)
    assert found.error == "no process can be made for it: [Errno 24] Too many open files"
