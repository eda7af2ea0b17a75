"""Compute a task's rewards for many responses, in reward workers and with judges and reward models.

`self_test` checks the rewards: gold responses must pass, and corrupted ones must not.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, fields
from itertools import groupby
from typing import Any

from ascent.processes.reward_calls import RewardCall, RewardJob, compute_rewards, describe_error, new_event_loop
from ascent.tasks.python_objects import pickle_object
from ascent.tasks.reward_sources import FUNCTION_KINDS, OWN, load_reward_function, resolve_reward_call
from ascent.tasks.reward_worker import RewardSpec
from ascent.tasks.reward_worker_pool import Limits, PendingCall, RewardOutcome, RewardWorkerPool
from ascent.tasks.text.answer_checking import on_one_line
from ascent.tasks.text.text_task import Message, Problem, TextTask

ResponseScorer = Callable[[Sequence[tuple[Problem, str]]], list[RewardOutcome]]
"""A judge or a reward model: returns one outcome per response, in order."""
MAX_DEFAULT_WORKERS = 16
"""Maximum number of reward workers if --reward-workers is 0 (one per core)."""
MAX_ASYNC_BATCH = 64
"""Maximum number of concurrent responses per async function and process."""
_MAX_EXAMPLES = 3
"""Maximum number of failures of each kind that a self-test describes."""
Outcomes = dict[tuple[int, str], RewardOutcome]
"""Outcomes by index of the response and source of the reward."""
StartedRewards = dict[str, PendingCall]
"""Calls that were started for one response before the whole batch was complete, by source of the reward."""


class RewardManager:
    """Computes the rewards of a task. `close` stops its reward workers.

    `scorers` are the judges and reward models by source. A self-test is `partial`: it skips rewards without a scorer,
    such as reward models, which have no reference answers.
    """

    def __init__(self, task: TextTask, scorers: Mapping[str, ResponseScorer] | None = None, partial: bool = False):
        self.task, self.scorers = task, dict(scorers or {})
        cls = type(task)
        source = getattr(cls, "__ascent_source__", None) or f"{cls.__module__}:{cls.__qualname__}"
        settings = {f.name: getattr(task, f.name) for f in fields(task)}
        functions = dict.fromkeys(reward.source for reward in task.rewards if reward.kind in FUNCTION_KINDS)
        self._calls = {name: resolve_reward_call(name, sandbox=task.sandbox_settings) for name in functions}
        loaded = {name: load_reward_function(name) for name in functions if not name.startswith("sandbox:")}
        here = [name for name, function in loaded.items() if getattr(function, "in_process", False)]
        self._in_process = {name: InProcess(self._calls[name], task.reward_seconds) for name in here}
        self._worker_specs = {OWN: _reward_spec(source, settings)}
        self._worker_specs |= {name: _reward_spec(name) for name in loaded if name not in here}
        sandboxed = [name for name in functions if name not in loaded]
        self._worker_specs |= {name: RewardSpec(name, sandbox=tuple(task.sandbox_settings)) for name in sandboxed}
        limits = Limits(task.reward_seconds, task.reward_memory, task.reward_env)
        self.workers = task.reward_workers or min(MAX_DEFAULT_WORKERS, count_cores())
        self.pool = RewardWorkerPool(list(self._worker_specs.values()), self.workers, limits)
        scored = dict.fromkeys(reward.source for reward in task.rewards if reward.kind in ("judge", "model"))
        self._scored_sources = [source for source in scored if not partial or source in self.scorers]
        self._rewards = task.rewards
        self._uses_own_check = any(reward.kind == OWN for reward in self._rewards)
        together = {name for name, call in self._calls.items() if call.takes_group or call.is_async}
        self._single_response_rewards = [(i, name) for i, name in enumerate(self._worker_specs) if name not in together]
        """Rewards of single responses in reward workers: index and source."""

    def start(self, responses: Sequence[tuple[Problem, str]]) -> list[StartedRewards]:
        """Start the rewards of these responses that do not depend on other responses."""
        which = [
            (i, grader, source)
            for i, (problem, _) in enumerate(responses)
            for grader, source in self._single_response_rewards
            if source != OWN or self._checks(problem)
        ]
        begun = self.pool.submit([[_job(grader, *responses[i])] for i, grader, _ in which])
        early: list[StartedRewards] = [{} for _ in responses]
        for (i, _, source), call in zip(which, begun, strict=True):
            early[i][source] = call
        return early

    def _checks(self, problem: Problem) -> bool:
        """Return whether the task's own check runs: as a reward, or for the accuracy if there is an answer."""
        return self._uses_own_check or problem.answer is not None

    def __call__(
        self, responses: Sequence[tuple[Problem, str]], early: Sequence[StartedRewards | None] | None = None
    ) -> list[RewardOutcome]:
        """Return one outcome per problem and response, in order. `early`: calls that `start` started."""
        early = early or [None] * len(responses)
        begun = {(i, source): call for i, one in enumerate(early) for source, call in (one or {}).items()}
        places = [(0, OWN, [i]) for i, (problem, _) in enumerate(responses) if self._checks(problem)]
        for grader, source in list(enumerate(self._worker_specs))[1:]:
            places += [(grader, source, part) for part in self._parts(self._calls[source], responses)]
        places = [place for place in places if (place[2][0], place[1]) not in begun]
        here = [
            (0, source, part) for source in self._in_process for part in self._parts(self._calls[source], responses)
        ]

        def jobs(grader: int, part: list[int]) -> list[RewardJob]:
            return [_job(grader, *responses[i]) for i in part]

        made = self.pool.run_calls([jobs(grader, part) for grader, _, part in places])
        made += [self._in_process[source](jobs(0, part)) for _, source, part in here]
        waited = self.pool.wait_for_results(list(begun.values()))
        outcomes: Outcomes = {place: answer for place, (answer,) in zip(begun, waited, strict=True)}
        for (_, source, part), answers in zip([*places, *here], made, strict=True):
            outcomes |= {(i, source): answer for i, answer in zip(part, answers, strict=True)}
        for source in self._scored_sources:
            outcomes |= {(i, source): outcome for i, outcome in enumerate(self.scorers[source](responses))}
        return [self._mark(problem, response, i, outcomes) for i, (problem, response) in enumerate(responses)]

    def _parts(self, call: RewardCall, responses: Sequence[tuple[Problem, str]]) -> list[list[int]]:
        """Split responses into calls: one response each, whole groups, or batches for async functions."""
        if call.takes_group:
            return [list(part) for _, part in groupby(range(len(responses)), key=lambda i: id(responses[i][0]))]
        size = min(MAX_ASYNC_BATCH, -(-len(responses) // self.workers)) if call.is_async else 1
        return [
            list(range(first, min(first + size, len(responses)))) for first in range(0, len(responses), max(size, 1))
        ]

    def _mark(self, problem: Problem, response: str, i: int, outcomes: Outcomes) -> RewardOutcome:
        own = outcomes.get((i, OWN))
        parts, reasons = {}, [own.reason] if own else []
        failed = f"the task's check: {own.error}" if own is not None and own.error else None
        value, skipped = 0.0, False
        for reward in self._rewards:
            outcome = outcomes.get((i, reward.source))
            if outcome is None:  # a process reward, which comes token by token; or what a self-test leaves out
                continue
            if outcome.skipped:
                skipped = True
                continue
            parts[reward.name] = outcome.value
            value += reward.weight * outcome.value
            if reward.kind != OWN:
                reasons.append(f"{reward.name}: {outcome.reason}" if outcome.reason else "")
                failed = failed or (f"reward {reward.name}: {outcome.error}" if outcome.error else None)
        reason = "; ".join(filter(None, reasons))
        if skipped and not parts:
            failed = failed or "every reward returned None, so none is for this row"
        if failed is not None:
            failed = f"{failed}. Prompt {excerpt(problem.prompt)}, response {excerpt(response)}"
            return RewardOutcome(reason=reason, error=failed)
        if own is None:  # nothing to compare with: what earns the full point counts as right
            return RewardOutcome(value, value >= 1, value >= 1, reason, parts=parts)
        return RewardOutcome(value, own.strict, own.lenient, reason, parts=parts)

    def close(self) -> None:
        self.pool.close()
        for reward in self._in_process.values():
            reward.close()


def count_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _job(grader: int, problem: Problem, response: str) -> RewardJob:
    return RewardJob(grader, problem.prompt, response, problem.answer, problem.columns)


def _reward_spec(source: str, settings: Mapping[str, Any] | None = None) -> RewardSpec:
    """Return what a reward worker needs to load a reward: the location of its code, or the pickled function."""
    is_object = source.startswith("object:")
    return RewardSpec(
        source, settings, sent=pickle_object(source, "reward" if settings is None else "task") if is_object else None
    )


class InProcess:
    """A reward function that runs in this process. Async functions run in a separate thread with an event loop."""

    def __init__(self, call: RewardCall, seconds: float):
        self.call, self.seconds = call, seconds
        self.loop = new_event_loop(call)
        self.thread = ThreadPoolExecutor(1, "ascent-reward") if call.is_async else None

    def __call__(self, jobs: Sequence[RewardJob]) -> list[RewardOutcome]:
        try:
            if self.thread is None:
                answers = compute_rewards(self.call, jobs, None, self.seconds)
            else:
                answers = self.thread.submit(compute_rewards, self.call, jobs, self.loop, self.seconds).result()
        except Exception as error:
            return [RewardOutcome(error=describe_error(error))] * len(jobs)
        return [RewardOutcome(**answer) for answer in answers]

    def close(self) -> None:
        if self.thread is not None and self.loop is not None:
            self.thread.submit(self.loop.close).result()
            self.thread.shutdown()


def rate_responses(
    task: TextTask,
    rate: Callable[[list[tuple[list[Message], str]]], list[float]],
    responses: Sequence[tuple[Problem, str]],
) -> list[RewardOutcome]:
    """Rate responses with a reward model, which reads the same chat as the policy."""
    values = rate([(task.messages(problem), response) for problem, response in responses])
    return [
        RewardOutcome(v, reason=f"{v:.3f}") if math.isfinite(v) else RewardOutcome(error=f"it returned {v}")
        for v in values
    ]


@dataclass(frozen=True)
class SelfTest:
    """Result of a self-test."""

    gold: int
    """Number of gold responses; 0 if the task has none."""
    gold_passed: int
    corrupted: int
    corrupted_passed: int
    """Number of corrupted responses that passed; it should be 0."""
    gold_reward: float
    """Mean reward of gold responses."""
    corrupted_reward: float
    errors: int
    failures: tuple[str, ...]
    """Descriptions of a few failures of each kind."""
    compares: bool = True
    """Whether any reward uses the reference answer; otherwise gold responses need not earn more."""

    @property
    def ok(self) -> bool:
        return not self.failures

    def lines(self) -> list[str]:
        """Return the report as lines of text."""
        if not self.gold + self.corrupted:
            head = "the reward was not tested: the task has no gold responses, or only a reward model rates them"
        else:
            head = (
                f"{self.gold_passed} of {self.gold} gold responses pass (mean reward {self.gold_reward:.3g}), "
                f"{self.corrupted_passed} of {self.corrupted} corrupted ones pass (mean reward "
                f"{self.corrupted_reward:.3g}), {self.errors} errors"
            )
        return [head, *self.failures]


def self_test(task: TextTask, count: int = 16, judges: Mapping[str, ResponseScorer] | None = None) -> SelfTest:
    """Compute the rewards of gold, corrupted and empty responses, in reward workers as in training."""
    size = 0 if all(reward.kind == "model" for reward in task.rewards) else task.size
    indices = range(count if size is None else min(count, size))
    stride = 1 if task.is_stream else 7919
    problems = [task.train(i * stride % size if size else i * stride) for i in indices]
    golds = [task.gold(problem) for problem in problems]
    others = golds[1:] + golds[:1]
    right = [(p, gold) for p, gold in zip(problems, golds, strict=True) if gold is not None]
    wrong = [
        (p, response)
        for p, gold, other in zip(problems, golds, others, strict=True)
        for response in dict.fromkeys(task.wrong_responses(p, other if other != gold else None))
    ]
    with closing(RewardManager(task, judges, partial=True)) as grading:
        marks = grading([*right, *wrong])
    good, bad = marks[: len(right)], marks[len(right) :]
    errors = [mark.error for mark in marks if mark.error is not None]
    refused = [_case(*case, mark) for case, mark in zip(right, good, strict=True) if not (mark.error or mark.strict)]
    passed = [_case(*case, mark) for case, mark in zip(wrong, bad, strict=True) if mark.strict]
    failures = [f"a reward failed: {error}" for error in errors[:_MAX_EXAMPLES]]
    failures += [f"a gold response does not pass: {case}" for case in refused[:_MAX_EXAMPLES]]
    failures += [f"a corrupted response passes: {case}" for case in passed[:_MAX_EXAMPLES]]
    high, low = _mean(good), _mean(bad)
    boxed = task.sandbox_settings
    functions = [
        resolve_reward_call(reward.source, sandbox=boxed) for reward in task.rewards if reward.kind in FUNCTION_KINDS
    ]
    compares = len(functions) < len(task.rewards) or any(call.takes_answer for call in functions)
    if compares and right and wrong and not errors and not high > low:
        failures.append(
            f"the reward does not separate correct from wrong: the mean is {high:.3g} for gold responses and {low:.3g} "
            "for corrupted ones"
        )
    passing = sum(mark.strict for mark in good)
    return SelfTest(len(right), passing, len(wrong), len(passed), high, low, len(errors), tuple(failures), compares)


def _mean(marks: list[RewardOutcome]) -> float:
    values = [mark.value for mark in marks if mark.error is None]
    return sum(values) / len(values) if values else 0.0


def _case(problem: Problem, response: str, mark: RewardOutcome) -> str:
    why = f" ({mark.reason})" if mark.reason else ""
    return f"prompt {excerpt(problem.prompt)}, response {excerpt(response)}{why}"


def excerpt(text: object) -> str:
    """Return the beginning of a prompt or response, on one line."""
    if isinstance(text, list):
        text = text[-1].get("content", "") if text else ""
    return repr(on_one_line(str(text), 160))
