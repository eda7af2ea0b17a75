"""The sorting worlds: rewards as SPEC section 3 has them, their traps, held-out prompts, rewards of one's own."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ENDED, F64, TINY, policy_of, rollouts_of
from torch import Tensor

import ascent
from ascent.build.reward_loading import load_reward_model
from ascent.core.errors import ConfigError
from ascent.core.types import Rollouts, Scores, Space
from ascent.rewards.small_task import SmallOfflineTask, read_examples
from ascent.tasks import TASKS
from ascent.tasks.base import TaskWrapper
from ascent.tasks.reward_sources import parse_rewards
from ascent.tasks.small import sorting
from ascent.tasks.small.lecture import LECTURE_PROMPTS, Lecture
from ascent.tasks.small.sorting import REWARDS, Sort, inclusion_ordering, position_points, response_numbers

END = 10


def rollouts(prompts: Any, responses: Any, lengths: Any = None, limit: int | None = None) -> Rollouts:
    """Responses `[prompt][sample][token]` as a sampler would hand them over."""
    response = torch.tensor(responses)
    shape = response.shape
    lengths = torch.full(shape[:2], shape[2]) if lengths is None else torch.tensor(lengths)
    mask = torch.arange(shape[2]) < lengths.unsqueeze(-1)
    last = response.gather(-1, (lengths.unsqueeze(-1) - 1).clamp(min=0)).squeeze(-1)
    return Rollouts(
        prompt=torch.tensor(prompts),
        response=response,
        mask=mask,
        logp_sampler=torch.zeros(shape, dtype=F64),
        limit=limit or shape[2],
        truncated=torch.zeros(shape[:2], dtype=torch.bool) if limit is None else last != END,
    )


def rewards(name: str, prompt: list[int], responses: list[list[int]]) -> list[float]:
    task = Sort(reward=name, length=len(prompt), numbers=10)
    return task.score(rollouts([prompt], [responses])).reward.flatten().tolist()


SPEC_RESPONSES = [[0, 1, 2, 3], [7, 2, 2, 5], [0, 3, 1, 2]]


def test_the_examples_of_the_spec() -> None:
    """For [3 1 0 2]: 4 positions and 7 points, 1 and 3, 1 and 6."""
    assert rewards("positions", [3, 1, 0, 2], SPEC_RESPONSES) == [4, 1, 1]
    assert rewards("inclusion-ordering", [3, 1, 0, 2], SPEC_RESPONSES) == [7, 3, 6]
    assert rewards("exact", [3, 1, 0, 2], SPEC_RESPONSES) == [1, 0, 0]


def brute(prompt: tuple[int, ...], response: tuple[int, ...]) -> tuple[float, float]:
    """The two rewards from Python lists, written out from the spec's words."""
    right = sum(a == b for a, b in zip(sorted(prompt), response, strict=True))
    points = sum(x in response for x in prompt) + sum(x <= y for x, y in itertools.pairwise(response))
    return right, points


def test_every_response_to_every_prompt_of_three_numbers() -> None:
    every = list(itertools.product(range(3), repeat=3))
    prompt = torch.tensor(every)
    response = prompt.unsqueeze(0).expand(27, -1, -1)
    expected = torch.tensor([[brute(p, r) for r in every] for p in every])
    assert torch.equal(position_points(prompt, response).sum(-1), expected[..., 0].float())
    assert torch.equal(inclusion_ordering(prompt, response), expected[..., 1].float())


@pytest.mark.parametrize("name", REWARDS)
def test_only_the_maximum_is_the_maximum(name: str) -> None:
    """The sorted response has `max_reward`, and nothing has more."""
    task = Sort(reward=name, length=3, numbers=4)
    every = list(itertools.product(range(4), repeat=3))
    scores = task.score(rollouts(every, [every] * len(every)))
    assert scores.reward.sum(-1).max().item() == task.max_reward
    assert scores.reward.sum(-1)[scores.correct].eq(task.max_reward).all()
    assert scores.correct.sum().item() == len(every)


def test_a_process_reward_has_each_point_on_the_token_that_decided_it() -> None:
    """[2 0 1] sorted is [0 1 2]. With an end token, also where all responses ended early and where one went on."""
    task = Sort(reward="process", length=3, numbers=10)
    scores = task.score(rollouts([[2, 0, 1]], [[[0, 2, 2], [1, 1, 0], [0, 1, 2]]]))
    assert scores.reward.tolist() == [[[1, 0, 1], [0, 1, 0], [1, 1, 1]]]
    assert scores.correct.tolist() == [[False, False, True]]
    task = Sort(reward="process", length=3, numbers=10, end=True)
    narrow = task.score(rollouts([[2, 0, 1]], [[[0, END], [0, 1]]], [[2, 2]], limit=4))
    assert narrow.reward.tolist() == [[[1, 0], [1, 1]]]
    wide = task.score(rollouts([[2, 0, 1]], [[[0, 1, 2, END], [0, END, 2, 7]]], [[4, 2]], limit=4))
    assert wide.reward.tolist() == [[[1, 1, 1, 0], [1, 0, 0, 0]]]


# ---- the two traps --------------------------------------------------------------------------------


def test_trap_one_a_repeated_number_lets_wrong_responses_reach_the_maximum() -> None:
    task = Sort(reward="inclusion-ordering", length=3, numbers=3)
    scores = task.score(rollouts([[1, 1, 2]], [[[1, 1, 2], [1, 2, 2]]]))
    assert scores.reward.flatten().tolist() == [5, 5]
    assert scores.correct.flatten().tolist() == [True, False]
    assert task.loophole is not None and "repeats a number" in task.loophole


def test_with_distinct_numbers_only_the_sorted_response_has_the_maximum() -> None:
    task = Sort(reward="inclusion-ordering", length=3, numbers=5, distinct=True)
    every = list(itertools.product(range(5), repeat=3))
    prompts = list(itertools.permutations(range(5), 3))
    scores = task.score(rollouts(prompts, [every] * len(prompts)))
    assert torch.equal(scores.reward.squeeze(-1) == 5, scores.correct)
    assert task.loophole is None


def test_trap_two_one_answer_for_all_three_lecture_prompts() -> None:
    task = Lecture(reward="inclusion-ordering")
    scores = task.score(rollouts(LECTURE_PROMPTS, [[[1, 2, 3]]] * 3))
    assert scores.reward.flatten().tolist() == [4, 4, 5]
    assert task.loophole is not None and "[1 2 3]" in task.loophole
    every = [list(r) for r in itertools.product(range(5), repeat=3)]
    total = task.score(rollouts(LECTURE_PROMPTS, [every] * 3)).reward.sum(0).squeeze(-1)
    assert total.max().item() == 13, "no single answer earns more on all three together"


# ---- the end token --------------------------------------------------------------------------------

WITH_END = Space(3, END + 1, 4, end=END)


def ended(responses: list[list[int]], lengths: list[int]) -> Rollouts:
    return rollouts([[2, 0, 1]], [responses], [lengths], limit=4)


def test_a_response_that_ends_in_time_is_right() -> None:
    """Right and closed; closed too early; never closed (truncated); right but with one number too many."""
    drawn = ended([[0, 1, 2, END], [0, 1, END, 5], [0, 1, 2, 2], [0, 1, 2, 7]], [4, 3, 4, 4])
    scores = Sort(reward="exact", length=3, numbers=10, end=True).score(drawn)
    assert scores.correct.tolist() == [[True, False, False, False]]
    assert scores.reward.flatten().tolist() == [1, 0, 0, 0]


def test_padding_after_the_end_is_no_number() -> None:
    """[0 1 END] with a 2 in its padding has two numbers: two positions right, two included, one pair in order."""
    drawn = ended([[0, 1, END, 2]], [3])
    assert response_numbers(drawn, WITH_END).tolist() == [[[0, 1, -1]]]
    for name, expected in (("positions", 2), ("inclusion-ordering", 3), ("exact", 0)):
        assert Sort(reward=name, length=3, numbers=10, end=True).score(drawn).reward.item() == expected


def test_an_empty_response_earns_nothing() -> None:
    drawn = ended([[END, 0, 1, 2]], [1])
    for name in REWARDS:
        assert not Sort(reward=name, length=3, numbers=10, end=True).score(drawn).reward.any()


def test_a_batch_narrower_than_the_prompt_is_scored() -> None:
    """All responses ended early, so the sampler's tensor has two columns."""
    drawn = rollouts([[2, 0, 1]], [[[0, END], [2, END]]], [[2, 2]], limit=4)
    scores = Sort(reward="positions", length=3, numbers=10, end=True).score(drawn)
    assert scores.reward.flatten().tolist() == [1, 0]


def test_a_response_that_never_ends_does_not_earn_the_whole_reward() -> None:
    """[0 1 2 7] for [2 0 1] is one number too long and was cut off: only the right, closed response has the maximum.

    If it earned it, the reward would have a loophole that `loophole` does not name.
    """
    drawn = ended([[0, 1, 2, END], [0, 1, 2, 7]], [4, 4])
    for name in REWARDS:
        task = Sort(reward=name, length=3, numbers=10, end=True, distinct=True)
        reward = task.score(drawn).reward.sum(-1).flatten()
        assert reward[0] == task.max_reward
        assert reward[1] < task.max_reward or task.loophole is not None, name


def test_text() -> None:
    task = Sort(length=3, numbers=4, end=True)
    assert task.text([0, 3, 4]) == "[0 3 end]"
    assert Lecture().text([1, 0, 2]) == "[1 0 2]"


# ---- prompts --------------------------------------------------------------------------------------


def as_set(prompts: Tensor) -> set[tuple[int, ...]]:
    return set(map(tuple, prompts.tolist()))


@pytest.mark.parametrize("distinct", [False, True])
@pytest.mark.parametrize(("length", "count"), [(3, 10), (5, 10), (8, 10), (2, 3)])
def test_held_out_prompts_are_never_drawn(length: int, count: int, distinct: bool) -> None:
    task = Sort(length=length, numbers=count, distinct=distinct)
    held = task.held_out(1000).prompt
    drawn = task.draw(5000, torch.Generator().manual_seed(0)).prompt
    assert len(drawn) == 5000
    assert len(held) > 0
    assert as_set(held).isdisjoint(as_set(drawn))
    assert len(as_set(held)) == len(held), "a held-out prompt comes once"
    assert torch.equal(held, task.held_out(1000).prompt), "they are the same every time"
    if distinct:
        assert all(len(set(p)) == length for p in as_set(held) | as_set(drawn))


def test_held_out_is_about_one_in_five_and_looks_like_the_rest() -> None:
    task = Sort(length=4, numbers=10)
    held = task.held_out(10**6).prompt
    assert 0.15 < len(held) / 10**4 < 0.25
    for position in range(4):
        counts = held[:, position].bincount(minlength=10) / len(held)
        assert counts.min() > 0.05, "every number is held out at every position"


def test_a_thousand_held_out_prompts_of_the_default_task() -> None:
    assert Sort().held_out(1000).prompt.shape == (1000, 5)


def test_drawing_is_seeded_and_moves_on() -> None:
    task = Sort()
    generator = torch.Generator().manual_seed(3)
    first, second = task.draw(10, generator).prompt, task.draw(10, generator).prompt
    assert torch.equal(first, task.draw(10, torch.Generator().manual_seed(3)).prompt)
    assert not torch.equal(first, second)


def test_the_lecture_draws_its_three_prompts_in_order() -> None:
    task = Lecture()
    generator = torch.Generator().manual_seed(0)
    state = generator.get_state()
    assert task.draw(3, generator).prompt.tolist() == [[1, 0, 2], [3, 2, 4], [1, 2, 3]]
    assert torch.equal(generator.get_state(), state), "and uses up no random number"
    assert task.space == Space(3, 5, 3)


@pytest.mark.parametrize("cls", [task for task in TASKS if issubclass(task, sorting.SortingTask)])
def test_every_task_scores_what_a_policy_samples(cls: Any) -> None:
    for name in REWARDS:
        task = cls(reward=name)
        drawn = rollouts_of(policy_of(TINY, task.space), count=3, samples=2)
        scores = task.score(drawn)
        assert isinstance(scores, Scores)
        assert scores.reward.shape == (3, 2, task.space.limit if name == "process" else 1)
        assert scores.valid.all()
        assert scores.errors == ()
    assert "default" in cls.presets


# ---- a reward of one's own ------------------------------------------------------------------------


def own(tmp_path: Path, body: str, name: str = "f") -> str:
    file = tmp_path / "own.py"
    file.write_text(body)
    return f"python:{file}:{name}"


def score_own(tmp_path: Path, body: str) -> Scores:
    task = Sort(reward=own(tmp_path, body), length=3, numbers=10)
    return task.score(rollouts([[2, 0, 1], [5, 4, 3]], [[[0, 1, 2], [2, 1, 0]], [[3, 4, 5], [9, 9, 9]]]))


def test_a_value(tmp_path: Path) -> None:
    scores = score_own(tmp_path, "def f(prompt, response):\n    return 10 * prompt[0] + response[0]\n")
    assert scores.reward.squeeze(-1).tolist() == [[20, 22], [53, 59]]
    assert scores.valid.all()
    assert scores.errors == ()
    assert scores.correct.tolist() == [[True, False], [True, False]], "the strict score is still the task's"


def test_a_value_and_a_reason(tmp_path: Path) -> None:
    scores = score_own(tmp_path, "def f(prompt, response):\n    return (response[0], 'first number')\n")
    assert scores.reward.squeeze(-1).tolist() == [[0, 2], [3, 9]]
    assert scores.errors == ()


BAD = {
    "crash": ("1 / 0", "ZeroDivisionError: division by zero"),
    "nan": ("float('nan')", "returned nan"),
    "infinite": ("float('-inf')", "returned -inf"),
    "nothing": ("None", "returned NoneType: a reward returns one number"),
    "a word": ("'5'", "returned str: a reward returns one number"),
    "an empty tuple": ("()", "returned a tuple of 0"),
    "an end": ("__import__('sys').exit(0)", "SystemExit: 0"),
    "a hard end": ("__import__('os')._exit(0)", "the reward ended its process: exit status 0"),
    "a hang": ("__import__('time').sleep(60)", "took longer than 3 s"),
    "too large for a float32": ("1e300", "1e+300"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_failed_reward_is_an_error_and_never_a_silent_zero(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of four responses, [9 9 9], fails: it is masked, named and counted; the other three are as they were."""
    monkeypatch.setattr(sorting, "USER_REWARD_SECONDS", 3.0)
    expression, reason = BAD[kind]
    body = f"def f(prompt, response):\n    return {expression} if response[0] == 9 else 1.5\n"
    scores = score_own(tmp_path, body)
    assert scores.valid.tolist() == [[True, True], [True, False]]
    assert len(scores.errors) == 1
    assert "prompt [5, 4, 3], response [9, 9, 9]" in scores.errors[0]
    assert reason in scores.errors[0]
    assert bool(scores.reward.isfinite().all())
    assert scores.reward.squeeze(-1)[scores.valid].tolist() == [1.5] * 3


@pytest.mark.long
def test_what_an_own_reward_does_to_its_process_does_not_reach_the_run(tmp_path: Path) -> None:
    """Another folder, a child that comes back too, and an end in one response in five: the run goes on to its end."""
    mine = "import os, sys\n\n\ndef f(prompt, response):\n    os.chdir('/')\n    os.fork()\n"
    mine += "    if response[0] == 4:\n        sys.exit(0)\n    return response[0]\n"
    settings = {"length": 2, "numbers": 5, "prompts": 4, "samples": 4, "steps": 3, "eval_prompts": 4, "record_every": 1}
    settings |= {"max_reward_errors": 1.0, "policy.width": 8, "policy.layers": 1, "policy.heads": 2}
    run = ascent.train("sort", reward=own(tmp_path, mine), out=tmp_path / "run", show=False, **settings)
    assert run.status == "finished" and [line["step"] for line in run.metrics] == [0, 1, 2]
    assert sum(line["reward_errors"] for line in run.metrics) > 0
    for step in range(3):
        rows = run.rollouts(step)
        assert len(rows) == 16
        for row in rows:
            first = row["response"][0]
            assert row["valid"] == (first != 4) and (not row["valid"] or row["reward"] == first)
    assert Path.cwd() != Path("/")


def test_an_own_reward_that_ends_where_it_is_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="raised SystemExit"):
        Sort(reward=own(tmp_path, "import sys\nsys.exit(0)\n"))


def test_an_own_reward_that_sorts_its_prompt_in_place_hurts_nobody(tmp_path: Path) -> None:
    """`prompt.sort()` is the obvious first line of such a reward; the next response must see the prompt as it was."""
    body = (
        "def f(prompt, response):\n    first = prompt[0]\n    prompt.sort()\n    response.clear()\n    return first\n"
    )
    assert score_own(tmp_path, body).reward.squeeze(-1).tolist() == [[2, 2], [5, 5]]


def test_an_own_reward_sees_the_numbers_without_end_token_and_padding(tmp_path: Path) -> None:
    reward = own(tmp_path, "def f(prompt, response):\n    return len(response)\n")
    drawn = ended([[0, 1, 2, END], [0, 1, END, 5], [END, 1, 2, 3]], [4, 3, 1])
    scores = Sort(reward=reward, length=3, numbers=10, end=True).score(drawn)
    assert scores.reward.flatten().tolist() == [3, 2, 0]


def test_an_own_reward_sees_what_the_policy_sampled_and_no_observation_between(tmp_path: Path) -> None:
    reward = own(tmp_path, "def f(prompt, response):\n    return 10 * response[0] + response[1]\n")
    drawn = ended([[4, 9, 6, END]], [4])
    drawn.mask[..., 1] = False  # [4, observation, 6, end]
    scores = Sort(reward=reward, length=3, numbers=10, end=True).score(drawn)
    assert scores.reward.flatten().tolist() == [46]


def test_an_own_reward_sees_the_whole_response(tmp_path: Path) -> None:
    """A response one number too long is not shown as if it had stopped in time."""
    reward = own(tmp_path, "def f(prompt, response):\n    return response == sorted(prompt)\n")
    drawn = ended([[0, 1, 2, END], [0, 1, 2, 7]], [4, 4])
    scores = Sort(reward=reward, length=3, numbers=10, end=True).score(drawn)
    assert scores.reward.flatten().tolist() == [1, 0]


@pytest.mark.parametrize(
    ("body", "name", "message"),
    [
        ("f = 3\n", "f", "a reward must be a function"),
        ("def g(p, r): return 1\n", "f", "has no f"),
        ("import nothing_like_this\n", "f", "raised ModuleNotFoundError"),
        ("def f(:\n", "f", "raised SyntaxError"),
        ("from math import sqrt as f\n", "f", None),
    ],
)
def test_a_broken_reward_file_is_refused_early(body: str, name: str, message: str | None, tmp_path: Path) -> None:
    reward = own(tmp_path, body, name)
    if message is None:  # a function all the same, though one that takes no attributes
        assert Sort(reward=reward).reward == reward
        return
    with pytest.raises(ConfigError, match=message):
        Sort(reward=reward)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"reward": ("exact", "positons")}, "--reward positons: unknown reward.*Did you mean positions"),
        ({"reward": ()}, "--reward is empty: name one or more"),
        ({"reward": "judge:judge.toml"}, "a judge reads words, and sorting has none"),
        ({"reward": "inf*exact"}, "unknown reward"),
        ({"reward": "positons"}, "--reward positons: unknown reward.*Did you mean positions"),
        ({"reward": "python:nowhere.py:f"}, "there is no file .*nowhere.py"),
        ({"reward": "python:f"}, "python:FILE:NAME"),
        ({"length": 1}, "--length 1"),
        ({"numbers": 1}, "--numbers 1"),
        ({"length": 5, "numbers": 4, "distinct": True}, "--distinct.*raise --numbers or lower --length"),
    ],
)
def test_refusals(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Sort(**given)


def test_the_end_token_space_of_the_tests_is_a_sort() -> None:
    assert Sort(length=3, numbers=4, end=True).space == ENDED


def test_rollouts_carry_the_identity_of_their_problems() -> None:
    """Through the sampler, a selection, mini-batches and a join of batches, whatever the order."""
    from ascent.core.types import Prompts, join, to_batch
    from ascent.models import PerPosition
    from ascent.rollout.small_policy_engine import SmallPolicyEngine

    task = Lecture()
    policy = PerPosition()(task.space, torch.Generator())
    prompts = Prompts(task.draw(3, torch.Generator()).prompt, torch.tensor([7, -2, 5]))
    sampled = SmallPolicyEngine(policy, 1.0, torch.Generator()).generate(prompts, 2)
    scores = task.score(sampled)
    batch = to_batch(sampled, reward=scores.reward, valid=scores.valid)
    assert batch.problem.tolist() == [7, -2, 5]
    assert batch.select(torch.tensor([2, 0])).problem.tolist() == [5, 7]
    assert join([batch, batch.select(slice(1, 2))]).problem.tolist() == [7, -2, 5, -2]
    for mini in batch.minibatches(2, 3, torch.Generator().manual_seed(1)):
        where = [LECTURE_PROMPTS.index(tuple(row)) for row in mini.prompt.tolist()]
        assert mini.problem.tolist() == prompts.problem[where].tolist()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"wrong": -0.1}, "--wrong is -0.1: a share lies from 0 to 1"),
        ({"wrong": 1.5}, "--wrong is 1.5: a share lies from 0 to 1"),
        ({"length": 3, "numbers": 2}, "--length 3 --numbers 2: so few prompts that none is held out; raise either"),
    ],
)
def test_sorting_that_cannot_be_learned_is_refused(given: dict[str, Any], message: str) -> None:
    assert Sort(wrong=0.0).wrong == 0 and Sort(wrong=1.0).wrong == 1
    with pytest.raises(ConfigError, match=message):
        Sort(**given)


def test_demonstrations_close_with_the_end_token() -> None:
    for end, more in ((True, [10]), (False, [])):
        task = SmallOfflineTask(Sort(length=3, end=end), "demonstrations", torch.Generator())
        prompts = task.held_out(4)
        drawn = task.offline_rollouts(prompts)
        assert drawn.response.squeeze(1).tolist() == [[*sorted(row), *more] for row in prompts.prompt.tolist()]
        assert drawn.mask.all()


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (["a", 1], r"line 1: steps are numbers, and these are \['a', 1\]"),
        ([None], "line 1: steps are numbers, and these are"),
        ([1, 2, 3, 1], r"line 1: a response has at most 3 steps below 4, and this is \[1, 2, 3, 1\]"),
        ([1, 4], r"line 1: a response has at most 3 steps below 4, and this is \[1, 4\]"),
        ([-1], r"line 1: a response has at most 3 steps below 4, and this is \[-1\]"),
    ],
)
def test_labelled_steps_that_do_not_fit_are_refused(steps: list[Any], message: str, tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    file.write_text(json.dumps({"prompt": [1, 2, 3], "steps": steps, "labels": [1] * len(steps)}) + "\n")
    with pytest.raises(ConfigError, match=message):
        read_examples(file, Sort(length=3, numbers=4).space, "steps")


def test_names_of_tasks_that_there_are_not() -> None:
    import ascent.tasks

    with pytest.raises(AttributeError, match=r"module 'ascent.tasks' has no attribute 'Srot'"):
        _ = ascent.tasks.Srot
    empty = TaskWrapper.__new__(TaskWrapper)
    with pytest.raises(AttributeError, match=r"^task$"):
        _ = empty.max_reward
    empty.task = Lecture()
    assert empty.space == Lecture().space
    with pytest.raises(AttributeError, match=r"^__wrapped__$"):
        _ = empty.__wrapped__


def test_a_learned_reward_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"loss": {"name": "bradley-terry"}}))
    (source,) = parse_rewards((f"model:{tmp_path}",))
    with pytest.raises(ConfigError, match=r"has no checkpoint, so there is no reward model to load"):
        source.verify()
    (tmp_path / "checkpoints" / "step_000001").mkdir(parents=True)
    source.verify()


def test_a_run_that_trained_something_else_is_no_reward_model(tmp_path: Path) -> None:
    run = ascent.train("lecture", steps=1, out=tmp_path / "run", show=False)
    for what, command in (("reward model", "reward-model"), ("process reward", "process-reward")):
        with pytest.raises(ConfigError, match=f"run did not train a {what}; `ascent {command}` does"):
            load_reward_model(run.folder, what=what)
