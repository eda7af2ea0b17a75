"""Attacks by a reward: on other responses, on the trainer's secrets and memory, on its end, and on a small run."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ascent
from ascent.processes import supervisor
from ascent.processes.reward_calls import RewardJob
from ascent.tasks import reward_worker_pool as worker_pool
from ascent.tasks.reward_worker import RewardSpec
from ascent.tasks.reward_worker_pool import Limits, RewardOutcome, RewardWorkerPool
from ascent.tasks.small import sorting
from ascent.tasks.user_files import load_python
from benchmarks.attacks.attempt import Attack, soon

SHIFTED, SECRETS, OUTLIVING, SMALL_TASKS = (
    "rewards of other responses",
    "secrets and memory of a reward",
    "processes that outlive a reward",
    "rewards of small tasks",
)
SECRET = "sk-attacks-2f6d1b0c"
REWARDS = """
import os, subprocess, sys, threading, time


def forks(prompt, response, answer):
    os.fork()
    return float(response)


def speaks(prompt, response, answer):
    def forge():
        for file in filter((2).__lt__, map(int, os.listdir("/proc/self/fd"))):
            try:
                os.write(file, b'{"number": "0", "answers": [{"value": 9.0}]}\\n')
            except OSError:
                pass
    if response == "0":
        forge()
    if response == "1":
        threading.Thread(target=lambda: (time.sleep(0.05), forge()), daemon=True).start()
    time.sleep(0.1)
    return float(response)


def lingers(prompt, response, answer):
    if response == "0":
        file = [f for f in filter((2).__lt__, map(int, os.listdir("/proc/self/fd"))) if _is_socket(f)][0]
        if os.fork() == 0:
            for _ in range(40):
                os.write(file, b'{"number": "0", "answers": [{"value": 9.0}]}\\n')
                time.sleep(0.02)
            os._exit(0)
    time.sleep(0.1)
    return float(response)


def _is_socket(file):
    try:
        return os.readlink(f"/proc/self/fd/{file}").startswith("socket")
    except OSError:
        return False


def hangs(prompt, response, answer):
    time.sleep(3600 if response == "0" else 0)
    return float(response)


def speaks_half(prompt, response, answer):
    if response == "0":
        for file in filter((2).__lt__, map(int, os.listdir("/proc/self/fd"))):
            try:
                os.write(file, b'{"number": ')
            except OSError:
                pass
        time.sleep(3600)
    return float(response)


def secret(prompt, response, answer):
    words = list(os.environ.values())
    for pid in (os.getpid(), os.getppid()):
        words.append(open(f"/proc/{pid}/environ", "rb").read().decode(errors="replace"))
        words.append(open(f"/proc/{pid}/cmdline", "rb").read().decode(errors="replace"))
    return float(any("sk-attacks" in word for word in words))


def memory(prompt, response, answer):
    return float(len(bytearray(1 << 30)) > 0)


def daemons(prompt, response, answer):
    sleep = ["sleep", response]
    subprocess.Popen(sleep)
    subprocess.Popen(sleep, start_new_session=True)
    subprocess.Popen(["sh", "-c", f"setsid sleep {response} & setsid sleep {response} &"], start_new_session=True)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execvp("sleep", sleep)
        os._exit(0)
    time.sleep(0.2)
    return 1.0
"""


@contextmanager
def pool_of(folder: Path, name: str, workers: int = 1, **limits: Any) -> Iterator[RewardWorkerPool]:
    (folder / "r.py").write_text(REWARDS)
    pool = RewardWorkerPool(
        [RewardSpec(f"python:{folder / 'r.py'}:{name}")], workers, Limits(**{"seconds": 2.0, **limits})
    )
    try:
        yield pool
    finally:
        pool.close()


def jobs(*responses: object) -> list[RewardJob]:
    return [RewardJob(0, "prompt", str(response), "answer", {}) for response in responses]


# ---- rewards of other responses ---------------------------------------------------------------------------


def shifts(name: str) -> Callable[[Path], str | None]:
    def attempt(folder: Path) -> str | None:
        with pool_of(folder, name, workers=2) as pool:
            for first in (0, 8, 16):
                outcomes = pool.run(jobs(*range(first, first + 8)))
                for wanted, outcome in enumerate(outcomes, first):
                    if outcome.error is None and outcome.value != wanted:
                        return f"response {wanted} got {outcome.value:g}"
                    if outcome.error is not None and wanted > 1:
                        return f"response {wanted}, which did nothing, failed: {outcome.error}"
        return None

    return attempt


def any_number() -> None:
    """Any answer counts for the response that is waiting, and a forked child answers too."""
    read_replies = worker_pool.RewardWorker.replies

    def numbered(worker: worker_pool.RewardWorker) -> list[dict[str, Any]]:
        waiting = [number for _, number, _ in worker.calls]
        replies = read_replies(worker)
        return [
            reply | {"number": waiting[min(i, len(waiting) - 1)]} if waiting and "answers" in reply else reply
            for i, reply in enumerate(replies)
        ]

    worker_pool.RewardWorker.replies = numbered  # type: ignore[method-assign]
    patch_reward_workers(
        "import ascent.processes.call_loop as loop; loop.os = type(sys)('os'); vars(loop.os).update(vars(os)); "
        "loop.os._exit = lambda code: None"
    )


def patch_reward_workers(code: str) -> None:
    """Make the supervisor of every reward worker run this code first."""
    start = supervisor.subprocess.Popen

    def patched(command: list[str], **more: Any) -> Any:
        imported = "from ascent.processes.supervisor"
        return start([*command[:-1], command[-1].replace(imported, f"import os, sys; {code}; {imported}")], **more)

    supervisor.subprocess = type(sys)("subprocess")
    vars(supervisor.subprocess).update(vars(__import__("subprocess")) | {"Popen": patched})


def no_deadline() -> None:
    add = worker_pool.RewardWorker.add_call
    worker_pool.RewardWorker.add_call = lambda worker, call, _: add(worker, call, 1e6)  # type: ignore[method-assign]


# ---- secrets, memory, processes ----------------------------------------------------------------------------


def learns_a_secret(folder: Path) -> str | None:
    os.environ["ATTACKS_API_KEY"] = SECRET
    with pool_of(folder, "secret") as pool:
        (found,) = pool.run(jobs(0))
    return "it saw the key" if found.value or found.error else None


def whole_environment() -> None:
    Limits.environment = lambda _: dict(os.environ)  # type: ignore[method-assign]


def takes_memory(folder: Path) -> str | None:
    with pool_of(folder, "memory", seconds=20.0, memory=0.5) as pool:
        (found,) = pool.run(jobs(0))
    return "a GiB of memory, with half of one allowed" if found.error is None else None


def no_memory_limit() -> None:
    make = worker_pool.RewardWorker.__init__

    def unlimited(worker: worker_pool.RewardWorker, specs: bytes, limits: Limits) -> None:
        make(worker, specs, limits._replace(memory=0.0))

    worker_pool.RewardWorker.__init__ = unlimited  # type: ignore[method-assign]


def running(words: str) -> list[int]:
    """The processes with this command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if path.read_bytes().replace(b"\0", b" ").decode(errors="replace").strip() == words:
                found.append(int(path.parent.name))
    return found


def outlives(ending: str) -> Callable[[Path], str | None]:
    """A reward starts children in new sessions: do any outlive its pool or its trainer?"""

    def attempt(folder: Path) -> str | None:
        seconds = f"{os.getpid()}.25"  # a command line of its own
        child = os.fork() if ending == "killed" else 0
        if child == 0:
            with pool_of(folder, "daemons", seconds=5.0) as pool:
                pool.run(jobs(seconds))
                soon(lambda: len(running(f"sleep {seconds}")) >= 4)
                if ending == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
        else:
            os.waitpid(child, 0)
        left = not soon(lambda: not running(f"sleep {seconds}"), 4.0)
        pids = running(f"sleep {seconds}")
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        return f"{len(pids)} processes are left" if left else None

    return attempt


def leave_children() -> None:
    patch_reward_workers("import ascent.processes.supervisor as s; s._end_children = s._prctl = lambda *_: None")


# ---- small tasks ---------------------------------------------------------------------------------------------

DOES = {
    "exit": "sys.exit(0)",
    "hard exit": "os._exit(0)",
    "another folder": "os.chdir('/')",
    "a fork": "os.fork()",
    "a hang": "time.sleep(3600)",
    "a word for a number": "return '5'",
    "a signal": "os.kill(os.getpid(), 11)",
}


def in_a_run(deed: str) -> Callable[[Path], str | None]:
    """A run whose reward does that to one response in three: it has to finish, with the other rewards as they are."""

    def attempt(folder: Path) -> str | None:
        os.chdir(folder)
        sorting.USER_REWARD_SECONDS = 0.5
        body = f"    if response[0] == 2:\n        {DOES[deed]}\n    return response[0]\n"
        (folder / "r.py").write_text(f"import os, sys, time\n\n\ndef f(prompt, response):\n{body}")
        small = {"length": 2, "numbers": 3, "prompts": 1, "samples": 6, "eval_prompts": 2, "steps": 2}
        small |= {"policy.width": 8, "policy.layers": 1, "policy.heads": 2, "record_every": 1, "max_reward_errors": 1.0}
        try:
            run = ascent.train("sort", reward=f"python:{folder / 'r.py'}:f", out="run", show=False, threads=1, **small)
            return _harm(run, deed)
        except SystemExit as ended:
            return f"the run ended with status {ended.code}"
        except (OSError, ascent.core.errors.ConfigError) as error:
            return f"the run lost its folder: {error}"

    return attempt


def _harm(run: ascent.Run, deed: str) -> str | None:
    lines = [line["step"] for line in run.metrics]
    if run.status != "finished" or lines != [0, 1]:
        return f"{run.status}, with the steps {lines}"
    bad = [row for step in (0, 1) for row in run.rollouts(step) if row["response"][0] == 2]
    if deed == "a word for a number" and any(row["valid"] for row in bad):
        return "a word counted as a number"
    good = [row for step in (0, 1) for row in run.rollouts(step) if row["response"][0] != 2]
    shifted = [row for row in good if row["reward"] != row["response"][0]]
    return f"{len(shifted)} other rewards are wrong" if shifted or not good or not bad else None


def grade_in_process() -> None:
    """Call the rewards of small tasks in the trainer's process."""

    class Here:
        def __init__(self, source: str):
            self.function = load_python("--reward", source)

        def run(self, jobs: list[RewardJob]) -> list[RewardOutcome]:
            return [RewardOutcome(float(self.function(list(job.prompt), list(job.response)))) for job in jobs]

        def close(self) -> None: ...

    sorting.user_reward_pool = lambda source, _: Here(source)  # type: ignore[assignment]


def attacks(_: Path) -> list[Attack]:
    shifting = [
        Attack(SHIFTED, "a fork that comes back too", shifts("forks"), any_number),
        Attack(SHIFTED, "an answer out of turn", shifts("speaks"), any_number),
        Attack(SHIFTED, "a child that goes on answering", shifts("lingers"), any_number),
        Attack(SHIFTED, "a hang", shifts("hangs"), no_deadline, hangs=True),
        Attack(SHIFTED, "half an answer", shifts("speaks_half"), no_deadline, hangs=True),
    ]
    private = [
        Attack(SECRETS, "a key in the environment", learns_a_secret, whole_environment),
        Attack(SECRETS, "more memory than allowed", takes_memory, no_memory_limit),
        Attack(OUTLIVING, "children, when the pool is closed", outlives("closed"), leave_children),
        Attack(OUTLIVING, "children, when the trainer is killed", outlives("killed"), leave_children),
    ]
    small = [Attack(SMALL_TASKS, deed, in_a_run(deed), grade_in_process, deed in ("a hang", "a fork")) for deed in DOES]
    return [*shifting, *private, *small]
