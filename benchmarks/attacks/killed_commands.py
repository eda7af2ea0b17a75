"""Kills of whole commands: `ascent train` of small tasks, agents and environments, `ascent rounds`, `ascent compare`.

A seed decides the command, the moments and the signals. A killed command is continued as a user would, and
the result is compared with an uninterrupted run of the same command. SIGTERM and SIGHUP have to end it in order,
with a line that says how to resume.

A command runs in a fork of this process, with its own temporary folder. This process adopts orphans, so it sees
every process that a command leaves behind. A complaint names its seed and its index, and

    python -c "from benchmarks.attacks import killed_commands as k; print(k.kill_commands(SEED, 1, INDEX))"

kills that command again. A kill at a moment comes at the same moment; one after some seconds may not.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from ascent.cli.dispatch import commands_by_section
from ascent.cli.main import main as ascent_main
from ascent.runs import run_writer
from ascent.workflows import seed_comparison as comparison
from benchmarks.attacks import lives
from benchmarks.attacks.attempt import BROKEN, Fork, scratch

DEADLINE = 120.0
"""Seconds that one command may take."""
GRACE = 10.0
"""Seconds within which the processes of a command that ended have to be gone."""
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGHUP)
PR_SET_CHILD_SUBREAPER = 36
CLOCKS = ("seconds", "seconds_half", "id")
"""Keys that two runs of one command do not have in common."""
ROUNDING = 1e-4
"""Largest difference of a metric where the documentation promises equal numbers up to rounding."""

AGENTS = """
import json, urllib.request

def ask(base_url, key, messages):
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    headers = {"authorization": "Bearer " + key, "content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(base_url + "/chat/completions", body, headers)) as answer:
        return json.loads(answer.read())["choices"][0]["message"]["content"]

def talks(base_url, key, messages, seed):
    said = ask(base_url, key, messages)
    messages = [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": "go on"}]
    said = ask(base_url, key, messages) if seed % 3 else said
    return {"reward": sum(map(str.isalpha, said)) / 20, "metrics": {"seed": seed % 1_000_003}}
"""
ENVIRONMENTS = """
from ascent import Environment, Step

class Turns(Environment):
    def begin(self, problem, rng):
        self.turns, self.last = 0, rng.randrange(2, 4)

    def step(self, action):
        self.turns += 1
        return Step("more", 0.25 * (len(action) % 2), self.turns == self.last)
"""
CONVERSATION: dict[str, Any] = {
    **{"threads": 1, "steps": 3, "prompts": 2, "samples": 3, "lr": 1e-3, "check": "number", "reward_workers": 1},
    **{"max_prompt": 96, "max_tokens": 8, "turn_tokens": 4, "max_context": 300, "max_reward_errors": 1.0},
    **{"eval_prompts": 2, "eval_every": 2, "record_every": 1, "record_rollouts": "all", "preflight": False},
}
SMALL_POLICY = {"policy.width": 8, "policy.layers": 1, "policy.heads": 2}
SMALL_TASKS: dict[str, dict[str, Any]] = {
    "lecture": {},
    "sort": {"length": 3, "numbers": 4, "end": True, **SMALL_POLICY},
    "swaps": SMALL_POLICY,
}
AHEAD, ON_POLICY, OFFLINE = ("grpo", "dr-grpo", "gspo", "ppo"), ("reinforce", "rloo", "actor-critic"), ("dpo", "sft")
"""Algorithms that can sample ahead, that cannot, and that sample nothing."""


def flags(settings: dict[str, Any]) -> list[str]:
    """{"lr": 0.1, "end": True, "preflight": False} -> --lr 0.1 --end --no-preflight."""
    words: list[str] = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        words += [f"--no-{flag}"] if value is False else [f"--{flag}"] if value is True else [f"--{flag}", str(value)]
    return words


@dataclass(frozen=True)
class Command:
    """A command of the kind that is killed."""

    kind: str
    args: tuple[str, ...]
    """Without --out."""
    exact: bool = True
    """Whether the documentation promises the same bits; otherwise the same numbers up to rounding."""

    def begin(self, out: Path) -> list[str]:
        return [*self.args, "--out", str(out)]

    def proceed(self, out: Path) -> list[str]:
        """What a user types after a kill: resume what has begun, or start again what had not."""
        if self.kind == ROUNDS and (out / "rounds.json").exists():
            return ["rounds", str(out)]
        if self.kind not in (ROUNDS, COMPARE) and (out / "run.json").exists():
            return ["resume", str(out)]
        return self.begin(out)

    def says_how_to_resume(self, text: str, out: Path) -> bool:
        words = {ROUNDS: f"ascent rounds {out}", COMPARE: f"--out {out}"}.get(self.kind, f"ascent resume {out}")
        return words in text


# ---- kinds of commands -----------------------------------------------------------------------------------------------

SMALL, AGENT, ENVIRONMENT, ROUNDS, COMPARE = "small tasks", "agents", "environments", "rounds", "compare"


def small_task(_: Path, rng: random.Random) -> Command:
    task, algorithm = rng.choice(list(SMALL_TASKS)), rng.choice((*AHEAD, *ON_POLICY, *OFFLINE, "trpo"))
    settings: dict[str, Any] = {
        **{"algorithm": algorithm, "prompts": 3, "steps": 6, "threads": 1, "seed": rng.randrange(1000)},
        **{"checkpoint_every": rng.choice((1, 2, 3)), "eval_every": 2, "eval_prompts": 3},
        **{"record_every": rng.choice((1, 2)), "keep_best": rng.random() < 0.3},
    }
    samples, ahead = rng.choice((2, 3)), rng.choice((0, 1, 2))
    epochs, minibatches = (1, 1) if algorithm == "trpo" else (rng.choice((1, 2)), rng.choice((1, 3)))
    settings |= {"epochs": epochs, "minibatches": minibatches}
    settings |= {"samples": samples} if algorithm not in OFFLINE else {}
    settings |= {"ahead": ahead} if algorithm in AHEAD else {}
    task = "sort" if algorithm in OFFLINE else task
    return Command(SMALL, ("train", task, *flags(settings | SMALL_TASKS[task])))


def conversation(stage: Path, kind: str, settings: dict[str, Any], exact: bool = True) -> Command:
    shared = CONVERSATION | {"model": str(stage / "model")}
    return Command(kind, ("train", f"jsonl:{stage / 'rows.jsonl'}", *flags(shared | settings)), exact)


def agent(stage: Path, rng: random.Random) -> Command:
    settings = {"agent": f"python:{stage / 'agents.py'}:talks", "checkpoint_every": rng.choice((1, 2))}
    return conversation(stage, AGENT, settings | {"algorithm": rng.choice(("grpo", "ppo"))})


def environment(stage: Path, rng: random.Random) -> Command:
    settings: dict[str, Any] = {"environment": f"python:{stage / 'environments.py'}:Turns", "max_tokens": 12}
    more, exact = rng.choice((({}, True), ({"algorithm": "ppo"}, True), ({"ahead": 1}, False)))
    return conversation(stage, ENVIRONMENT, settings | {"checkpoint_every": rng.choice((1, 2))} | more, exact)


def rounds(_: Path, rng: random.Random) -> Command:
    policy = {"length": 2, "numbers": 4, "policy.width": 16, "policy.layers": 1, "threads": 1, "steps": 4}
    policy |= {"prompts": 4, "samples": 4, "eval_every": 4, "eval_prompts": 5, "checkpoint_every": 2, "seed": 3}
    rater = {"rm.steps": 4, "rm.prompts": 8, "rm.eval_every": 4, "rm.checkpoint_every": rng.choice((1, 2))}
    return Command(ROUNDS, ("rounds", "sort", "--rounds", "2", "--pairs", "20", *flags(policy | rater)))


def compare(_: Path, rng: random.Random) -> Command:
    settings = {"seeds": 2, "steps": 8, "samples": 4, "checkpoint_every": 3, "jobs": rng.choice((1, 2))}
    rows = rng.choice(("reinforce,grpo", "rloo,ppo"))
    return Command(COMPARE, ("compare", "lecture", "--algorithms", rows, *flags(settings)))


KINDS: dict[str, Callable[[Path, random.Random], Command]] = {
    **{SMALL: small_task, AGENT: agent, ENVIRONMENT: environment, ROUNDS: rounds, COMPARE: compare}
}


PRELOADED = (
    *("torch._dynamo", "matplotlib.pyplot", "transformers.models.llama.modeling_llama"),
    *("ascent.rollout.agents", "ascent.environments.agents.function_agent"),
)


def preload() -> None:
    """Import here what every command would import in its fork."""
    for name in PRELOADED:
        import_module(name)
    commands_by_section()


def prepare_fork() -> None:
    """In the process of a command: no writes that a clock decides, and workers that are forks, which import nothing."""
    run_writer.HEARTBEAT = float("inf")
    comparison.get_context = lambda _: multiprocessing.get_context("fork")  # type: ignore[assignment]


def write_stage(stage: Path) -> None:
    """The files that agents and environments need: a tiny language model, rows, and their code."""
    from tests.language import write_tiny

    write_tiny(stage / "model", max_position_embeddings=512)
    (stage / "agents.py").write_text(AGENTS)
    (stage / "environments.py").write_text(ENVIRONMENTS)
    rows = [{"prompt": f"{i}+{i}", "answer": str(2 * i)} for i in range(8)]
    (stage / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


# ---- processes -------------------------------------------------------------------------------------------------------


class Process:
    """`ascent ARGS` in a fork of this process, in its own session; what it prints goes to a file."""

    def __init__(self, args: list[str], folder: Path, before: Callable[[], object]):
        self.output, self.end = folder / "output", time.monotonic() + DEADLINE
        (folder / "tmp").mkdir(exist_ok=True)
        self.pid = os.fork()
        if self.pid == 0:
            status = 70
            try:
                self._enter(folder)
                before()
                status = ascent_main(args)
                threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as Python does at its end
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)

    def _enter(self, folder: Path) -> None:
        os.setsid()
        os.chdir(folder)
        os.environ["TMPDIR"], tempfile.tempdir = str(folder / "tmp"), None
        written = os.open(self.output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), written, written)):
            os.dup2(file, number)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", 1, closefd=False) for number in (1, 2))

    def send(self, number: int, group: bool) -> None:
        with suppress(ProcessLookupError):
            (os.killpg if group else os.kill)(self.pid, number)

    def wait(self, seconds: float | None = None) -> int | None:
        """The exit status, negative for a signal; None: it has not ended."""
        end = self.end if seconds is None else min(self.end, time.monotonic() + seconds)
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() > end:
                return None
            time.sleep(0.003)

    def text(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else ""


def adopt_orphans() -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def leftover_processes() -> list[str]:
    """What a command that ended has left: every child of this process that does not end within the grace time."""
    end = time.monotonic() + GRACE
    while True:
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        if not children:
            return []
        if time.monotonic() > end:
            break
        time.sleep(0.02)
    names = []
    for pid in map(int, children):
        with suppress(OSError):
            names.append(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:200])
            os.kill(pid, signal.SIGKILL)
    return names


@contextmanager
def no_new_shared_memory(complaints: list[str]) -> Iterator[None]:
    """Complain of segments in /dev/shm that are new and that no process uses: others work on this machine, too."""
    shared = Path("/dev/shm")
    before = set(os.listdir(shared))
    yield
    new = set(os.listdir(shared)) - before
    for process in Path("/proc").glob("[0-9]*") if new else ():
        with suppress(OSError):
            used = (process / "maps").read_text() + " ".join(os.readlink(file) for file in (process / "fd").iterdir())
            new -= {name for name in new if f"/dev/shm/{name}" in used}
    if new := {name for name in new if (shared / name).exists()}:
        complaints.append(f"left in /dev/shm: {sorted(new)}")


# ---- kills -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Whole:
    """A command that nobody killed: what it made, how long it took, and how many moments it had."""

    result: dict[str, Any]
    seconds: float
    moments: int


@dataclass
class Place:
    """A folder for one command and its continuations."""

    folder: Path

    @property
    def out(self) -> Path:
        return self.folder / "out"


def results(out: Path) -> dict[str, Any]:
    """All that has to be the same: the bits of every run, and the files beside them."""
    found: dict[str, Any] = {}
    for info in sorted(out.rglob("run.json")):
        name = str(info.parent.relative_to(out))
        found |= {f"{name}: {key}": without_clocks(value) for key, value in lives.bits(info.parent).items()}
        found[f"{name}: status"] = json.loads(info.read_text())["status"]
    files = [path for path in out.rglob("*.json*") if not any((up / "run.json").exists() for up in path.parents)]
    for path in files:
        text = path.read_text().replace(str(out), "OUT")
        made = [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else json.loads(text)
        found[str(path.relative_to(out))] = without_clocks(made)
    return found


def without_clocks(value: Any) -> Any:
    """JSON without the numbers of clocks, and without the random id."""
    if isinstance(value, dict):
        kept = {k: one for k, one in value.items() if k not in CLOCKS and not k.startswith("time/")}
        return {k: without_clocks(one) for k, one in kept.items()}
    return [without_clocks(one) for one in value] if isinstance(value, list) else value


def differences(command: Command, out: Path, whole: Whole) -> list[str]:
    """The names of what differs from the command that nobody killed.

    In a conversation the sampler's log-probs are promised up to rounding. So is all else if a correction reads them.
    """
    mine, rounded = results(out), command.kind in (AGENT, ENVIRONMENT)
    names = mine.keys() | whole.result.keys()
    if not command.exact:
        names = {name for name in names if name.endswith(("metrics.jsonl", ": status"))}
    return sorted(name for name in names if not equal(mine.get(name), whole.result.get(name), rounded, command.exact))


def equal(one: Any, other: Any, rounded: bool, exact: bool, name: str = "") -> bool:
    """Whether two results are equal; `rounded`: the sampler's log-probs up to rounding, and if not `exact`, all."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(equal(one[k], other[k], rounded, exact, k) for k in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(
            equal(a, b, rounded, exact, name) for a, b in zip(one, other, strict=True)
        )
    near = rounded and (not exact or name == "logp_sampler" or name.startswith("sampling/"))
    if near and isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= ROUNDING * max(1.0, abs(one), abs(other))
    return bool(one == other)


def run_whole(command: Command) -> Whole:
    with scratch() as folder:
        place = Place(folder)

        def before() -> None:
            prepare_fork()
            count = lives.count_moments(None)

            def write() -> None:  # of several processes, that of the most moments
                if count() > most_moments(folder):
                    (folder / "moments").write_text(str(count()))

            threading._register_atexit(write)  # type: ignore[attr-defined]

        began = time.monotonic()
        process = Process(command.begin(place.out), folder, before)
        status = process.wait()
        if status != 0:
            process.send(signal.SIGKILL, group=True)
            raise AssertionError(f"{' '.join(command.args)}: exit status {status}: {process.text()[-2000:]}")
        seconds = time.monotonic() - began
        if left := leftover_processes():
            raise AssertionError(f"{' '.join(command.args)}: not killed, and it leaves {left}")
        return Whole(results(place.out), seconds, most_moments(folder))


def most_moments(folder: Path) -> int:
    file = folder / "moments"
    return int(file.read_text()) if file.exists() else 0


@dataclass(frozen=True)
class Kill:
    """A signal, and when it is sent: at a moment of the process (a touch of a file), or after some seconds."""

    number: int
    moment: int | None
    seconds: float
    group: bool
    """Whether the whole process group gets it, as from a terminal that is closed."""
    again: float | None
    """Seconds after which SIGTERM or SIGHUP is repeated."""

    @classmethod
    def draw(cls, whole: Whole, rng: random.Random) -> Kill:
        number, by_clock = rng.choice(SIGNALS), rng.random() < 0.5
        moment, share = rng.randrange(whole.moments), rng.random()
        group, again = rng.random() < 0.3, rng.uniform(0, 0.3) if rng.random() < 0.2 else None
        again = None if number == signal.SIGKILL else again
        return cls(number, None if by_clock else moment, share * whole.seconds, group, again)

    def __str__(self) -> str:
        when = f"after {self.seconds:.2f} s" if self.moment is None else f"at moment {self.moment}"
        twice = "" if self.again is None else f", again after {self.again:.2f} s"
        return f"{signal.Signals(self.number).name} {when}{twice}{' to the group' if self.group else ''}"


def strike(command: Command, place: Place, kill: Kill) -> tuple[bool, str | None]:
    """Begin or continue the command and kill it: whether the signal ended it, and what is wrong."""

    def before() -> None:
        prepare_fork()
        if kill.moment is not None:
            lives.count_moments(kill.moment, kill.number)

    process = Process(command.proceed(place.out), place.folder, before)
    status = None
    if kill.moment is None:
        status = process.wait(kill.seconds)
        if status is None:
            process.send(kill.number, kill.group)
            if kill.again is not None and (status := process.wait(kill.again)) is None:
                process.send(kill.number, kill.group)
    status = process.wait() if status is None else status
    text = process.text()
    if status is None:
        process.send(signal.SIGKILL, group=True)
        process.wait(5)
        leftover_processes()
        return True, f"it hung: {text[-1500:]}"
    if processes := leftover_processes():
        return True, f"exit status {status}, and it leaves processes: {processes}"
    if status == 0:
        return False, None
    if "Traceback" in text:
        return True, f"exit status {status}: {text[-1500:]}"
    if kill.number == signal.SIGKILL:
        return True, None if status == -signal.SIGKILL or command.kind == COMPARE else f"exit status {status}: {text}"
    if status != 130:
        return True, f"exit status {status} and not 130: {text[-1500:]}"
    states = [json.loads(info.read_text())["status"] for info in place.out.rglob("run.json")]
    left = set(states) != {"finished"} or len(states) < {ROUNDS: 4, COMPARE: 4}.get(command.kind, 1)
    at_once = text.strip() == f"ascent: interrupted: {signal.Signals(kill.number).name}"  # before it loaded a run
    if states and left and not at_once and not command.says_how_to_resume(text, place.out):
        return True, f"it does not say how to resume: {text[-1500:]}"
    return True, None


def kill_command(command: Command, whole: Whole, rng: random.Random) -> tuple[Counter[str], str | None]:
    """Kill a command once or twice and continue it: the signals that ended it, and what is wrong."""
    struck: Counter[str] = Counter()
    complaints: list[str] = []
    history: list[Kill] = []
    with scratch() as folder, no_new_shared_memory(complaints):
        place = Place(folder)
        for _ in range(rng.choice((1, 1, 2))):
            history.append(Kill.draw(whole, rng))
            ended, wrong = strike(command, place, history[-1])
            struck[signal.Signals(history[-1].number).name] += ended
            complaints += [wrong] if wrong else []
        process = Process(command.proceed(place.out), folder, prepare_fork)
        status, left = process.wait(), leftover_processes()
        if status != 0:
            process.send(signal.SIGKILL, group=True)
            complaints.append(f"it cannot be continued: exit status {status}: {process.text()[-1500:]}")
        elif differing := differences(command, place.out, whole):
            complaints.append(f"differing: {differing}")
        litter = [str(path) for path in folder.rglob(".*") if path.name != ".lock"]
        litter += [str(path) for path in (folder / "tmp").iterdir() if not path.name.startswith("torchinductor")]
        complaints += [f"litter: {litter}"] if litter else []
        complaints += [f"it leaves processes: {left}"] if left else []
    told = f"{' '.join(command.args)}; {'; '.join(map(str, history))}: {' | '.join(complaints)}"
    return +struck, told if complaints else None


def kill_commands(seed: int, count: int, index: int = 0) -> tuple[dict[str, dict[str, int]], list[str]]:
    """Kill commands of all kinds in turn, at least this often: signals by kind, and what was wrong."""
    adopt_orphans()
    preload()
    tally: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    complaints: list[str] = []
    wholes: dict[Command, Whole] = {}
    with scratch() as stage:
        ended = Fork(lambda: write_stage(stage), DEADLINE).result()
        assert ended is None, ended
        while sum(signals.total() for signals in tally.values()) < count:
            rng, make = random.Random(f"{seed} {index}"), list(KINDS.values())[index % len(KINDS)]
            command = make(stage, rng)
            try:
                if command not in wholes:
                    wholes[command] = run_whole(command)
                struck, wrong = kill_command(command, wholes[command], rng)
            except Exception:
                struck, wrong = Counter({"no signal": 1}), BROKEN + traceback.format_exc()
            tally[command.kind].update(struck)
            complaints += [f"{command.kind}, seed {seed}, index {index}: {wrong}"] if wrong else []
            print(f"{index} {command.kind} {dict(struck)} {wrong or ''}", file=sys.stderr, flush=True)
            index += 1
    return {kind: dict(signals) for kind, signals in tally.items() if signals}, complaints


def kill_many(seed: int, count: int) -> tuple[dict[str, dict[str, int]], list[str]]:
    """Kill the run of lives.py and commands of every kind, each about as often. A single kill is of the former."""
    kills, complaints = lives.kill_many(seed, -(-count // (len(KINDS) + 1)))
    tally = {"one small task": {signal.SIGKILL.name: kills}}
    if kills < count:
        signals, wrong = kill_commands(seed, count - kills)
        tally, complaints = tally | signals, complaints + wrong
    return tally, complaints
