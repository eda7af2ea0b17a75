"""Rewards in processes of their own: whatever one does, it is a number or an error that is shown, never a silent 0."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from ascent.core.errors import ConfigError
from ascent.processes.reward_calls import RewardJob
from ascent.rewards.reward_manager import RewardManager, self_test
from ascent.rewards.tokenized_task import TokenizedTask
from ascent.settings import configure, flatten
from ascent.tasks import Countdown, Jsonl, ReasoningGym
from ascent.tasks.reward_sources import parse_rewards
from ascent.tasks.reward_worker import RewardSpec
from ascent.tasks.reward_worker_pool import Limits, RewardOutcome, RewardWorker, RewardWorkerPool
from tests.tasks.test_text_tasks import Bytes, rollouts, sums


def sleep() -> str:
    """A command that only the rewards of this process start."""
    return f"sleep {10**6 + os.getpid()}"


"""What rewards of this process leave behind: tests in other processes have other seconds."""
REWARDS = """
import os, subprocess, sys, time


class Broken(Exception):
    def __str__(self):
        raise RuntimeError


def deep():
    return deep()


def f(prompt, response, answer, **columns):
    if response == "hang":
        while True:
            pass
    if response == "hold the lock":
        import re
        return re.match("(a+)+$", "a" * 64 + "b")
    if response == "children":
        subprocess.Popen(SLEEP.split())
        time.sleep(60)
    if response == "child and exit":
        subprocess.Popen(["sleep", "3.25"], close_fds=False)
        os._exit(4)
    if response.startswith("fork"):
        os.fork()
        return float(response.removeprefix("fork"))
    if response == "speak out of turn":
        for file in filter((2).__lt__, map(int, os.listdir("/proc/self/fd"))):
            try:
                os.write(file, b'{"number": "0", "value": 9.0}\\n')
            except OSError:
                pass
        return 1.0
    if response == "half an answer":
        for file in filter((2).__lt__, map(int, os.listdir("/proc/self/fd"))):
            try:
                os.write(file, b'{"number": ')
            except OSError:
                pass
        time.sleep(60)
    if response == "more fields":
        from ascent.processes.channel import Channel
        write = Channel.write
        Channel.write = lambda channel, answer: write(channel, {**answer, "surprise": 1})
        return 1.0
    if response == "daemons":
        subprocess.Popen(SLEEP.split(), start_new_session=True)
        subprocess.Popen(["sh", "-c", f"setsid {SLEEP} & setsid {SLEEP} &"])
        return 1.0
    if response == "print":
        print("x" * 1_000_000)
        print("y" * 1_000_000, file=sys.stderr)
        return 2
    if response == "columns":
        return sum(columns.values()), f"{prompt} {answer}"
    return {
        "crash": lambda: 1 / 0,
        "exit": lambda: os._exit(3),
        "sys.exit": lambda: sys.exit(2),
        "segfault": lambda: os.kill(os.getpid(), 11),
        "recursion": deep,
        "stdin": lambda: len(input()),
        "nan": lambda: float("nan"),
        "infinite": lambda: -float("inf"),
        "too large": lambda: 1e300,
        "nothing": lambda: None,
        "a word": lambda: "1.0",
        "a list": lambda: [1.0],
        "three": lambda: (1, 2, 3),
        "no value": lambda: (None, "why"),
        "memory": lambda: bytearray(1 << 60),
        "broken words": lambda: (_ for _ in ()).throw(Broken()),
        "interrupt": lambda: (_ for _ in ()).throw(KeyboardInterrupt()),
        "close every file": lambda: os.closerange(3, 4096),
        "kill its supervisor": lambda: os.kill(os.getppid(), 9) or time.sleep(60),
        "a GiB": lambda: float(len(bytearray(1 << 30)) > 0),
        "a secret": lambda: float("ASCENT_SECRET" in os.environ),
        "a path": lambda: float("PATH" in os.environ),
        "bool": lambda: True,
        "reason": lambda: (0.5, "half"),
        "huge reason": lambda: (1, "x" * 50_000_000),
        "surrogate": lambda: (1, chr(0xD800)),
        "torch": lambda: float("torch" in sys.modules),
        "asyncio": lambda: float("asyncio" in sys.modules),
    }.get(response, lambda: 1.0)()


def brief(prompt, response, answer):
    return -len(response)


def level(prompt, response, answer, *, level):
    return level


not_a_function = 3
"""

BAD = {
    "crash": r"ZeroDivisionError: division by zero \(r.py, line",
    "hang": "took longer than 1.5 s",
    "hold the lock": "took longer than 1.5 s",
    "children": "took longer than 1.5 s",
    "child and exit": "ended its process: exit status 4",
    "exit": "ended its process: exit status 3",
    "sys.exit": "SystemExit: 2",
    "segfault": "ended its process: SIGSEGV",
    "recursion": "RecursionError",
    "stdin": "EOFError",
    "nan": "returned nan",
    "infinite": "returned -inf",
    "too large": r"returned 1e\+300",
    "a word": "returned str",
    "a list": "returned a list of 1",
    "three": "returned a tuple of 3",
    "no value": "returned NoneType",
    "memory": "MemoryError",
    "broken words": "Broken, and RuntimeError",
    "interrupt": "KeyboardInterrupt",
    "close every file": "ended its process",
    "half an answer": "took longer than 1.5 s",
    "speak out of turn": "an answer that is not the one to this response",
    "more fields": r"what is not a reward: \['answers', 'surprise'\]",
    "kill its supervisor": "ended its process",
}

GOOD: dict[str, tuple[float, str]] = {
    "plain": (1.0, ""),
    "bool": (1.0, ""),
    "reason": (0.5, "half"),
    "print": (2.0, ""),
    "huge reason": (1.0, "x" * 300),
    "surrogate": (1.0, "\ufffd"),
    "columns": (5.0, "prompt answer"),
    "torch": (0.0, ""),
    "asyncio": (0.0, ""),
}


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    file = tmp_path_factory.mktemp("own") / "r.py"
    file.write_text(f"SLEEP = {sleep()!r}\n{REWARDS}")
    return lambda name: f"python:{file}:{name}"


@pytest.fixture(scope="module")
def outcomes(own: Callable[[str], str]) -> dict[str, RewardOutcome]:
    """All of them in one go, good ones before, between and after."""
    asked = [x for bad in BAD for x in (bad, "plain")] + list(GOOD)
    with closing(RewardWorkerPool([RewardSpec(own("f"))], 2, Limits(1.5))) as pool:
        pool.seconds_per_call = 1e-4  # as if they had been quick before: several are sent at once
        found = pool.run([job(response) for response in asked])
    plain = [o for response, o in zip(asked, found, strict=True) if response == "plain"]
    assert all(o == RewardOutcome(1.0) for o in plain), "what failed beside them did them no harm"
    return dict(zip(asked, found, strict=True))


def job(response: str, grader: int = 0, **columns: Any) -> RewardJob:
    return RewardJob(grader, "prompt", response, "answer", columns or {"a": 2, "b": 3})


@pytest.mark.long
@pytest.mark.parametrize("kind", BAD)
def test_a_failed_reward_is_an_error_with_its_reason(kind: str, outcomes: dict[str, RewardOutcome]) -> None:
    error = outcomes[kind].error
    assert error is not None and re.search(BAD[kind], error), error


@pytest.mark.parametrize("kind", GOOD)
def test_a_reward_that_does_odd_things_and_yet_returns_a_number(kind: str, outcomes: dict[str, RewardOutcome]) -> None:
    value, reason = GOOD[kind]
    assert outcomes[kind] == RewardOutcome(value, reason=reason)


def test_what_a_killed_reward_had_started_is_killed_too(outcomes: dict[str, RewardOutcome]) -> None:
    assert sleeping() == 0


def sleeping() -> int:
    """The processes that rewards have left behind."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found.append(path.read_bytes().rstrip(b"\0").replace(b"\0", b" "))
    return found.count(sleep().encode())


def sleeping_soon(count: int) -> bool:
    """Whether there are so many of them within a minute."""
    until = time.monotonic() + 60
    while sleeping() != count:
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def gone(pid: int) -> bool:
    """No such process, or one that waits only for its parent to notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_processes_are_kept_and_end_with_close(own: Callable[[str], str]) -> None:
    pool = RewardWorkerPool([RewardSpec(own("f"))], 2, Limits(60.0))
    assert pool.workers == [], "started on first use"
    pool.run([job("plain")] * 6)
    first = [worker.process.pid for worker in pool.workers]
    pool.run([job("plain")] * 6)
    assert [worker.process.pid for worker in pool.workers] == first
    pool.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in first), "no process and no zombie is left"
    pool.close()
    assert pool.run([job("plain")]) == [RewardOutcome(1.0)], "and a closed pool starts again if it is asked"
    pool.close()


def test_a_forgotten_pool_leaves_no_process(own: Callable[[str], str]) -> None:
    pool = RewardWorkerPool([RewardSpec(own("f"))], 1, Limits(60.0))
    pool.run([job("plain")])
    pid = pool.workers[0].process.pid
    del pool
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.long
def test_quick_rewards_are_sent_several_at_once_and_one_that_fails_costs_no_other(
    own: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    send = RewardWorker.send_calls
    monkeypatch.setattr(RewardWorker, "send_calls", lambda self, lines: sent.append(len(lines)) or send(self, lines))
    with closing(RewardWorkerPool([RewardSpec(own("f"))], 1, Limits(1.0))) as pool:
        assert pool.run([job("plain")]) == [RewardOutcome(1.0)] and pool.seconds_per_call is not None
        pool.seconds_per_call = 1e-4
        asked = ["plain"] * 5 + ["child and exit"] + ["plain"] * 5 + ["hang"] + ["reason"] * 28
        found = pool.run([job(response) for response in asked])
        assert sent[:2] == [1, 20] and sum(sent) > 1 + len(asked), "what stood behind a failure is sent again"
        for response, outcome in zip(asked, found, strict=True):
            good = {"plain": RewardOutcome(1.0), "reason": RewardOutcome(0.5, reason="half")}.get(response)
            assert outcome == good if good else outcome.error, response
        sent.clear()
        pool.seconds_per_call = 1e-4
        assert len(pool.run([job("x" * 20_000) for _ in range(40)])) == 40
        assert max(sent) == 2, "few where they are large"


@pytest.mark.long
def test_an_interrupted_call_does_not_answer_the_next_one(own: Callable[[str], str]) -> None:
    pool = RewardWorkerPool([RewardSpec(own("f"))], 1, Limits(30.0))
    pool.run([job("plain")])

    def interrupt() -> None:
        while not pool.workers[0].calls:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        pool.run([job("hang")])
    assert pool.run([job("reason")]) == [RewardOutcome(0.5, reason="half")]
    pool.close()


@pytest.mark.long
def test_workers_die_with_a_parent_that_is_killed(own: Callable[[str], str]) -> None:
    """Whatever they are doing: waiting, computing, or holding Python's lock inside C."""
    code = f"""
import os, signal, threading
from ascent.processes.reward_calls import RewardJob
from ascent.tasks.reward_worker import RewardSpec
from ascent.tasks.reward_worker_pool import Limits, RewardWorkerPool
pool = RewardWorkerPool([RewardSpec({own("f")!r})], 4, Limits(100.0))
pool.run([RewardJob(0, "p", "plain", None, {{}})] * 4)
print(*[w.process.pid for w in pool.workers], flush=True)
threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
pool.run([RewardJob(0, "p", "daemons", None, {{}})])
pool.run([RewardJob(0, "p", response, None, {{}}) for response in ("hang", "hold the lock", "children")])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 4
    until = time.monotonic() + 60
    while not all(map(gone, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    assert all(map(gone, pids))
    assert sleeping_soon(0)


def test_a_reward_that_forks_gives_no_response_the_reward_of_another(own: Callable[[str], str]) -> None:
    with closing(RewardWorkerPool([RewardSpec(own("f"))], 2, Limits(60.0))) as pool:
        for first in (0, 100, 200):
            wanted = list(range(first, first + 8))
            outcomes = pool.run([job(f"fork{i}") for i in wanted])
            assert [outcome.value for outcome in outcomes] == wanted and not any(o.error for o in outcomes)


def test_what_leaves_its_session_ends_with_its_process_too(own: Callable[[str], str]) -> None:
    pool = RewardWorkerPool([RewardSpec(own("f"))], 1, Limits(60.0))
    assert pool.run([job("daemons")]) == [RewardOutcome(1.0)]
    assert sleeping_soon(3)
    pool.close()
    assert sleeping() == 0


def test_a_reward_sees_no_secret_of_the_environment(own: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCENT_SECRET", "key")
    for env, seen in (((), 0.0), (("ASCENT_SECRET",), 1.0)):
        with closing(RewardWorkerPool([RewardSpec(own("f"))], 1, Limits(60.0, env=env))) as pool:
            assert [o.value for o in pool.run([job("a secret"), job("a path")])] == [seen, 1.0]


def test_a_reward_that_takes_too_much_memory_fails_alone(own: Callable[[str], str]) -> None:
    with closing(RewardWorkerPool([RewardSpec(own("f"))], 1, Limits(60.0, memory=0.5))) as pool:
        outcomes = pool.run([job("a GiB"), job("plain")])
    assert "MemoryError" in str(outcomes[0].error) and outcomes[1] == RewardOutcome(1.0)


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [("reward_memory", -1.0, "0 .no limit. or more"), ("reward_env", ("KEY=1",), "without values")],
)
def test_limits_that_cannot_be_are_refused(name: str, value: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Countdown(**{name: value})


def test_processes_that_cannot_start_are_an_error_and_no_endless_loop(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("import nothing_of_this_name\n")
    with closing(RewardWorkerPool([RewardSpec(f"python:{tmp_path / 'r.py'}:f")], 2, Limits(60.0))) as pool:
        found = pool.run([job("plain")] * 3)
    assert all("no process can compute rewards: ModuleNotFoundError" in str(o.error) for o in found)


def test_a_problem_that_cannot_be_sent_is_an_error(own: Callable[[str], str]) -> None:
    with closing(RewardWorkerPool([RewardSpec(own("f"))], 1, Limits(60.0))) as pool:
        found = pool.run([job("plain", a=lambda: 1), job("plain")])
    assert "cannot be sent" in str(found[0].error)
    assert found[1] == RewardOutcome(1.0)


def test_no_jobs_start_nothing(own: Callable[[str], str]) -> None:
    pool = RewardWorkerPool([RewardSpec(own("f"))], 2, Limits(60.0))
    assert pool.run([]) == []
    assert pool.workers == []


# ---- several rewards, on rollouts -----------------------------------------------------------------


@pytest.fixture
def task(tmp_path: Path, own: Callable[[str], str]) -> Iterator[Callable[..., TokenizedTask]]:
    made: list[TokenizedTask] = []

    def make(*names: str, **more: Any) -> TokenizedTask:
        reward = tuple(n if "own" in n else f"{n.partition('*')[0]}*{own(n.partition('*')[2])}" for n in names)
        source = str(sums(tmp_path / "a.jsonl"))
        made.append(
            TokenizedTask(Jsonl(source=source, check="number", reward=reward, reward_seconds=1.5, **more), Bytes())
        )
        return made[-1]

    yield make
    for each in made:
        each.close()


def asked(task: TokenizedTask, response: Callable[[str], list[str]], count: int = 2) -> tuple[list[str], Any]:
    """The answers of some drawn prompts, and the scores of what `response` makes of each."""
    prompts = task.draw(count, torch.Generator().manual_seed(0))
    answers = [str(task.problem(identity).answer) for identity in prompts.problem.tolist()]
    return answers, task.score(rollouts(prompts, [response(answer) for answer in answers]))


def test_the_tasks_own_check(task: Callable[..., TokenizedTask]) -> None:
    _, scores = asked(task(), lambda answer: [f"Answer: {answer}", f"{answer} it is", "Answer: 999"])
    assert scores.reward.squeeze(-1).tolist() == [[1.0, 0.5, 0.0]] * 2
    assert scores.correct.tolist() == [[True, False, False]] * 2
    assert scores.measures["lenient"].tolist() == [[1.0, 1.0, 0.0]] * 2
    assert list(scores.measures) == ["lenient"]
    assert scores.valid.all() and scores.errors == ()
    assert scores.notes.shape == (2, 3) and scores.notes[0, 2] == "answered 999"


def test_several_rewards_with_weights(task: Callable[..., TokenizedTask]) -> None:
    """1·own − 0.1·(length) + 2·level: each is reported by its name, before its weight."""
    many = task("own", "0.1*brief", "2*level")
    answers, scores = asked(many, lambda answer: [answer, "no"])
    assert list(scores.measures) == ["lenient", "rewards/own", "rewards/brief", "rewards/level"]
    for i, answer in enumerate(answers):
        level = int(answer) // 2 % 3
        assert scores.measures["rewards/level"][i].tolist() == [level, level]
        expected = [1 - 0.1 * len(answer) + 2 * level, 0 - 0.2 + 2 * level]
        assert scores.reward[i, :, 0].tolist() == pytest.approx(expected)
    assert scores.correct.tolist() == [[True, False]] * 2, "the strict score is the task's"


def test_a_reward_without_own_still_reports_the_strict_score(task: Callable[..., TokenizedTask]) -> None:
    _, scores = asked(task("1*brief"), lambda answer: [answer])
    assert scores.correct.all()
    assert (scores.reward < 0).all()


@pytest.mark.long
def test_a_failing_reward_masks_its_response_and_shows_the_example(task: Callable[..., TokenizedTask]) -> None:
    _, scores = asked(task("own", "1*f", "0.1*brief"), lambda answer: ["crash", answer, "nan", "hang"], count=1)
    assert scores.valid.tolist() == [[False, True, False, False]]
    assert scores.reward.isfinite().all()
    assert len(scores.errors) == 3, "one for each response"
    assert scores.errors[0].startswith("reward f: ZeroDivisionError")
    assert "Prompt '" in scores.errors[0] and "response 'crash'" in scores.errors[0]
    assert scores.notes[0, 0] == scores.errors[0]


def test_the_end_token_and_padding_are_no_part_of_a_response(task: Callable[..., TokenizedTask]) -> None:
    lengths = task("-1*brief")
    prompt = lengths.draw(1, torch.Generator())
    assert lengths.score(rollouts(prompt, [["four", "sixsix", ""]])).reward.flatten().tolist() == [4, 6, 0]
    assert lengths.score(rollouts(prompt, [["four"]], ended=False)).reward.item() == 4
    masked = rollouts(prompt, [["abcd"]])
    masked.mask[0, 0, 1] = False
    assert lengths.score(masked).reward.item() == 3, "a masked token was not sampled"


def test_names_of_rewards() -> None:
    made = parse_rewards(("own", "0.5*python:/a.py:f", "python:/b.py:f", "-2*python:/c.py:g"))
    assert [(r.name, r.weight, r.kind) for r in made] == [
        ("own", 1.0, "own"),
        ("f", 0.5, "python"),
        ("f-2", 1.0, "python"),
        ("g", -2.0, "python"),
    ]
    assert [r.name for r in parse_rewards(())] == ["own"]


def test_the_largest_reward() -> None:
    assert Countdown().max_reward == 1
    assert Countdown(reward=("0.5*own", "2*own")).max_reward == 2.5
    assert Countdown(reward=("own", "python:/a.py:f")).max_reward is None


# ---- a task of one's own --------------------------------------------------------------------------

OWN_TASK = '''
from dataclasses import dataclass

from ascent.tasks.text import Graded, Problem, TextTask


@dataclass(frozen=True)
class Shout(TextTask):
    """Say it in capitals."""

    word: str = "hello"
    """What to say."""

    @property
    def size(self):
        return 3

    def train(self, index):
        return Problem(f"{self.word} {index}", f"{self.word} {index}".upper())

    def test(self, count):
        return [Problem("held out", "HELD OUT")]

    def grade(self, problem, response):
        right = response == problem.answer
        return Graded(float(right), right, right, self.word)


loud = Shout(word="loud")
number = 3
'''


@pytest.mark.long
def test_a_task_of_ones_own_is_graded_in_processes_and_comes_back(tmp_path: Path) -> None:
    file = tmp_path / "tasks.py"
    file.write_text(OWN_TASK)
    for name, word in (("Shout", "hello"), ("loud", "loud")):
        config = configure(f"python:{file}:{name}", {"model": "m"})
        assert config.task.word == word
        flat = flatten(config.to_dict())
        assert flat["task"] == f"python:{file}:Shout"
        assert configure(flat.pop("task"), flat) == config
        report = self_test(config.task, 3)
        assert report.ok and report.gold == 3, report.lines()
    with pytest.raises(ConfigError, match="a task of your own is a frozen dataclass"):
        configure(f"python:{file}:number")


# ---- self-test ------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    "task",
    [Countdown(), *(ReasoningGym(source=source, reward_workers=1) for source in ("chain_sum", "sudoku"))],
    ids=lambda t: type(t).__name__,
)
def test_right_responses_pass_the_self_test_and_corrupted_ones_do_not(task: Any) -> None:
    report = self_test(task, 6)
    assert report.ok, report.lines()
    assert (report.gold, report.gold_passed, report.corrupted_passed, report.errors) == (6, 6, 0, 0)
    assert report.corrupted >= 12
    assert report.gold_reward == 1 > report.corrupted_reward


def test_the_self_test_sees_a_task_that_cannot_be_won(tmp_path: Path) -> None:
    """Numbers under --check exact with answers of another spelling would do; here the answers are no numbers at all."""
    rows = tmp_path / "a.jsonl"
    rows.write_text("".join(f'{{"prompt": "p{i}", "answer": "word"}}\n' for i in range(8)))
    report = self_test(Jsonl(source=str(rows), check="number"), 4)
    assert not report.ok
    assert report.gold_passed == 0
    assert any("a gold response does not pass" in line for line in report.lines())


@pytest.mark.long
def test_the_self_test_sees_a_reward_that_cannot_tell_right_from_wrong(own: Callable[[str], str]) -> None:
    report = self_test(Countdown(reward=(own("brief"),)), 4)
    assert any("does not separate correct from wrong" in line for line in report.lines())
    broken = self_test(Countdown(reward=("own", own("level"))), 2)
    assert broken.errors > 0
    assert any("a reward failed: reward level: TypeError" in line for line in broken.lines())


@pytest.mark.long
def test_math_verify_runs_in_the_processes(tmp_path: Path) -> None:
    rows = tmp_path / "a.jsonl"
    rows.write_text("".join(f'{{"prompt": "p{i}", "answer": "\\\\frac{{{i + 1}}}{{97}}"}}\n' for i in range(8)))
    task = Jsonl(source=str(rows), check="math", reward_workers=1)
    report = self_test(task, 5)
    assert report.ok, report.lines()
    grading = RewardManager(task)
    (mark,) = grading([(task.train(0), r"9^{9^{9^{9}}}")])
    grading.close()
    assert mark.error is not None or not mark.strict
    assert math.isfinite(mark.value)
