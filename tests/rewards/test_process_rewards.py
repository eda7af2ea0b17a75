"""A learned process reward: labelled steps, labels from roll-outs held to the exact V, and rewards per token."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY, batch_of, close, f64, policy_of
from hypothesis import given
from hypothesis import strategies as st

import ascent
from ascent.build.assemble import assemble
from ascent.build.backend import LearnedReward
from ascent.build.language_reward_model import LanguageProcessReward
from ascent.build.reward_loading import load_process_reward
from ascent.build.small_backend import SmallBackend
from ascent.build.trained_run import Run
from ascent.cli import main as cli
from ascent.core.algorithms import ALGORITHMS
from ascent.core.errors import ConfigError, RunError
from ascent.core.types import Outputs, Prompts
from ascent.oracle.exact import ResponseTable
from ascent.rewards.small_task import BoundSmallTask, SmallOfflineTask, read_examples
from ascent.rewards.tokenized_task import split_steps
from ascent.rollout.small_policy_engine import SmallPolicyEngine
from ascent.runs.alerts.step_alerts import reward_weights
from ascent.settings import configure
from ascent.tasks.scoring import offline_rollouts, pad_responses, score_increases
from ascent.tasks.small.sorting import Sort
from ascent.workflows.labels import StepLabeler, label_steps
from ascent.workflows.loaded_policy import LoadedPolicy, untrained_policy
from tests.cases import mostly_smokes
from tests.tasks.test_text_tasks import sums, write

ROW = ALGORITHMS["process-reward"]
WORLD: dict[str, Any] = {"length": 2, "numbers": 4, "threads": 1, "policy.width": 16, "policy.layers": 1}


# ---- steps, score increases, and the loss -------------------------------------------------------------------------

CUTS = {
    "one step": (["a", "b", ""], [("ab", 2)]),
    "two": (["a\n", "b"], [("a", 0), ("b", 1)]),
    "a separator of its own": (["a", "\n", "b", ""], [("a", 1), ("b", 3)]),
    "inside a token": (["a\nb", "c"], [("a", 0), ("bc", 1)]),
    "two newlines": (["a", "\n", "\n", "b"], [("a", 2), ("b", 3)]),
    "at the end": (["a", "\n", ""], [("a", 2)]),
    "at the beginning": (["\n", "a"], [("a", 1)]),
    "only an end": ([""], [("", 0)]),
    "nothing": ([], []),
}


@pytest.mark.parametrize("name", CUTS)
def test_a_response_is_cut_after_its_separators(name: str) -> None:
    pieces, steps = CUTS[name]
    assert list(zip(*split_steps(pieces, "\n"), strict=True)) == steps


@given(st.lists(st.text("ab\n", max_size=3), min_size=1, max_size=8))
def test_steps_lose_no_word_and_end_where_the_response_does(pieces: list[str]) -> None:
    steps, last = split_steps(pieces, "\n")
    assert "".join(steps) == "".join(pieces).replace("\n", "")
    assert last == sorted(last)
    assert last[-1] == len(pieces) - 1


def test_what_steps_add_sums_to_the_last_score() -> None:
    score = torch.tensor([[[9.0, 0.5, 9.0, 0.2, 0.9]]])
    where = torch.tensor([[[False, True, False, True, True]]])
    torch.testing.assert_close(score_increases(score, where), torch.tensor([[[0.0, 0.5, 0.0, -0.3, 0.7]]]))


def test_the_loss_is_half_a_squared_error_with_the_tokens_weights() -> None:
    """Two responses of 2 and 1 tokens; errors 1, 2 and 3: token mean ½·(1 + 4 + 9)/3."""
    batch = batch_of([[[0.0, 1.0]], [[2.0, 0.0]]], [[2], [1]])
    batch = batch.add(advantage=batch.reward, weight=ROW.weights(batch))
    rating = f64([[[1.0, 3.0]], [[-1.0, 99.0]]]).requires_grad_()
    nothing = torch.zeros_like(batch.logp_sampler)
    terms = ROW.objective(batch, Outputs(nothing, nothing, rating=rating))
    close(terms.objective, -0.5 * 14 / 3)
    close(terms.sums["steps/error"], 14.0)
    close(torch.autograd.grad(terms.objective, rating)[0], f64([[[-1.0, -2.0]], [[3.0, 0.0]]]) / 3)
    sequence = replace(ROW, weights=ALGORITHMS["grpo"].weights)
    mini = batch.add(weight=sequence.weights(batch))
    out = Outputs(nothing, nothing, rating=rating)
    close(sequence.objective(mini, out).objective, -0.5 * ((1 + 4) / 2 + 9) / 2)
    with pytest.raises(ConfigError, match="this learner has a policy"):
        ROW.objective(batch, Outputs(nothing, nothing))


@pytest.mark.parametrize("axis", ["advantage", "kl", "reference", "update", "critic"])
def test_what_means_nothing_for_steps_is_refused(axis: str) -> None:
    with pytest.raises(ConfigError, match=r"step-value|--kl in-loss|--critic"):
        replace(
            ROW,
            **{
                axis: getattr(
                    ALGORITHMS["ppo" if axis in ("advantage", "critic") else "trpo" if axis == "update" else "grpo"],
                    axis,
                )
            },
        )


# ---- roll-outs against the exact value ---------------------------------------------------------------------


@pytest.mark.parametrize("end", [False, True])
def test_the_mean_of_continuations_is_the_exact_value(end: bool) -> None:
    """Every prefix of every response to a prompt, continued 400 times: within five standard errors of V."""
    task = Sort(length=2, numbers=3, end=end)
    policy = policy_of(TINY, task.space)
    prompt = torch.tensor([2, 0])
    table = ResponseTable(policy, prompt, task)
    V, batch = table.exact_value, table.batch
    checked = 0
    for length in (0, 1):
        rows = batch.mask[0].sum(-1) > length
        heads, first = torch.zeros(1, 0, dtype=torch.long), torch.zeros(int(rows.sum()), dtype=torch.long)
        if length:
            heads, first = batch.response[0, rows][:, :length].unique(dim=0, return_inverse=True)
        loaded = LoadedPolicy(configure("sort", {"length": 2, "numbers": 3, "end": end}), policy)
        labeller = StepLabeler(loaded, BoundSmallTask(task), Prompts.of(prompt[None]), 400, "", length)  # type: ignore[arg-type]
        prefixes = [head.tolist() for head in heads]
        values = labeller.prefix_values([0] * len(heads), prefixes)
        drawn = labeller.continue_prefixes(labeller.prompts[torch.zeros(len(heads), dtype=torch.long)], prefixes)
        assert torch.equal(drawn.response[:, :, :length], heads[:, None].expand(-1, 400, -1)), "they begin as they did"
        for i, value in enumerate(values):
            exact = float(V[rows][first == i][0, length])
            assert value == pytest.approx(exact, abs=5 * 0.9 / 400**0.5)
            checked += 1
    assert checked == 1 + 3


def test_continuations_draw_only_what_is_missing() -> None:
    policy = policy_of(TINY, Sort(length=3, numbers=3).space)
    config, prompts = configure("sort", {"length": 3, "numbers": 3}), Prompts.of(torch.tensor([[2, 0, 1]] * 2))
    sampler = SmallPolicyEngine(policy, 1.0, torch.Generator().manual_seed(0))
    groups = SmallBackend().continue_responses(config, policy, prompts, [[1], [0, 2]], 50, sampler)
    drawn = torch.tensor(groups)
    assert drawn[0, :, 0].unique().tolist() == [1] and len(drawn[0, :, 1].unique()) == 3
    assert drawn[1, :, :2].unique(dim=0).tolist() == [[0, 2]] and len(drawn[1, :, 2].unique()) == 3


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return learn(tmp_path_factory.mktemp("process"), 64, 24, 16, 100)


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same after a few steps, for what no skill is needed for."""
    return learn(tmp_path_factory.mktemp("hasty"), 16, 4, 2, 5)


def learn(folder: Path, prompts: int, samples: int, rollouts: int, updates: int) -> Path:
    """A policy, labels from its roll-outs and a process reward of them, all through the command line."""
    world = [f for name, value in WORLD.items() for f in (f"--{name}", str(value))]
    steps = ["--eval-every", "1000", "--record-rollouts", "none"]

    def run(*args: Any) -> None:
        assert cli.main([str(arg) for arg in args]) == 0

    run("train", "sort", *world, *steps, "--steps", 8, "--prompts", 16, "--out", folder / "policy")
    run(
        "label-steps",
        folder / "policy",
        folder / "steps.jsonl",
        "--prompts",
        prompts,
        "--samples",
        samples,
        "--rollouts",
        rollouts,
    )
    wide = [*world, "--policy.width", 32, "--lr", 1e-2, *steps, "--steps", updates, "--prompts", 2 * prompts]
    run("process-reward", "sort", "--labels", folder / "steps.jsonl", *wide, "--out", folder / "process")
    return folder


@pytest.mark.smoke
def test_the_head_learns_the_exact_value_of_the_policy(trained: Path) -> None:
    """Over the responses to the prompts that it learned, by their probability: V at every prefix, R at the end."""
    policy, task = Run(trained / "policy").policy, Run(trained / "policy").config.task
    model = load_process_reward(trained / "process")
    assert isinstance(model, LearnedReward)
    data = read_examples(trained / "steps.jsonl", task.space, "steps")
    values, scores, shares = [], [], []
    for prompt in data.prompt[data.train].unique(dim=0):
        table = ResponseTable(policy, prompt, task)
        exact = table.exact_value[:, 1:].clone()
        exact[:, -1] = table.batch.reward[0].sum(-1)
        values.append(exact)
        scores.append(model(table.batch)[0].double())
        shares.append(table.probability[:, None].expand_as(exact))
    V, S, p = torch.cat(values), torch.cat(scores), torch.cat(shares)
    mean = (p * V).sum() / p.sum()
    explained = 1 - (p * (S - V) ** 2).sum() / (p * (V - mean) ** 2).sum()
    assert explained > 0.85
    last = Run(trained / "process").metrics[-1]
    assert last["steps/error"] < 0.3 * Run(trained / "process").metrics[0]["steps/error"]
    assert last["eval/steps/error"] > 0 and last["accuracy"] is None


@pytest.mark.long
def test_a_process_reward_is_a_reward_per_token(hasty: Path) -> None:
    """process: what each token adds, with the last score as the sum; beside an outcome, by weight."""
    model = load_process_reward(hasty / "process")
    made = {}
    for reward in ("process:", "process-score:", "exact+0.5*process:"):
        kind, _ = reward.split(":")
        config = configure("sort", {**WORLD, "reward": f"{kind}:{hasty / 'process'}", "prompts": 6})
        parts = assemble(config)
        prompt = parts.task.draw(6, torch.Generator().manual_seed(0))
        rollouts = parts.engine.generate(prompt, 4)
        made[kind] = parts.task.score(rollouts)
    assert reward_weights(parts.task) == {"rewards/exact": 1.0, "rewards/process": 0.5}
    listed = configure("sort", {**WORLD, "reward": ("exact", f"0.5*process:{hasty / 'process'}"), "prompts": 6})
    assert listed == config, "the form that versions before wrote is the same list"
    score = model(rollouts)
    torch.testing.assert_close(made["process-score"].reward, score)
    torch.testing.assert_close(made["process"].reward.cumsum(-1), score)
    exact = made["process"].correct.float()
    torch.testing.assert_close(made["exact+0.5*process"].reward.sum(-1), exact + 0.5 * score[..., -1])
    assert made["process"].measures["positions"].max() <= 2
    torch.testing.assert_close(made["process"].measures["rewards/process"], score[..., -1])


@pytest.mark.slow
@pytest.mark.smoke
def test_training_on_a_process_reward_raises_the_true_one(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    args = [f for name, value in WORLD.items() for f in (f"--{name}", str(value))]
    args += ["--reward", f"process:{trained / 'process'}", "--steps", "25", "--prompts", "32", "--lr", "2e-2"]
    assert cli.main(["train", "sort", *args, "--algorithm", "reinforce++", "--out", str(out)]) == 0
    metrics = Run(out).metrics
    assert metrics[-1]["positions"] > metrics[0]["positions"] + 0.5


@pytest.mark.long
def test_labelling_goes_on_where_it_was_stopped(hasty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"prompts": 40, "samples": 2, "rollouts": 3, "show": False}
    whole = label_steps(hasty / "policy", tmp_path / "whole.jsonl", **settings)
    rows, seen = StepLabeler.rows, []

    def dies(self: StepLabeler, samples: int) -> Any:
        seen.append(self)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return rows(self, samples)

    monkeypatch.setattr(StepLabeler, "rows", dies)
    with pytest.raises(KeyboardInterrupt):
        label_steps(hasty / "policy", tmp_path / "parts.jsonl", **settings)
    assert not (tmp_path / "parts.jsonl").exists()
    (kept,) = tmp_path.glob("parts.partial-*")
    with open(kept, "ab") as file:
        file.write(b'{"rows": [{"torn')
    parts = label_steps(hasty / "policy", tmp_path / "parts.jsonl", **settings)
    assert len(seen) == 3 + 3, "five chunks, two of them before it was stopped"
    assert parts.read_text() == whole.read_text()
    assert not list(tmp_path.glob("*partial*"))


@pytest.mark.long
def test_no_file_is_written_where_no_response_has_labels(
    hasty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BoundSmallTask, "split_steps", lambda *_: ([], []))
    with pytest.raises(RunError, match="of 6 responses none could be labeled"):
        label_steps(hasty / "policy", tmp_path / "out.jsonl", prompts=3, samples=2, rollouts=2, show=False)
    assert not (tmp_path / "out.jsonl").exists()


def test_a_reward_that_always_fails_stops_labelling() -> None:
    class Failing(BoundSmallTask):
        def score(self, rollouts: Any) -> Any:
            scores = super().score(rollouts)
            return replace(scores, valid=torch.zeros_like(scores.valid), errors=("no number", "again"))

    settings = {"length": 2, "numbers": 3}
    loaded = untrained_policy(configure("sort", settings))
    task = Failing(Sort(**settings))
    labeller = StepLabeler(loaded, task, Prompts.of(torch.tensor([[2, 0]])), 2, "", 0)  # type: ignore[arg-type]
    with pytest.raises(RunError, match=r"the reward failed on every response\. The first error: no number"):
        labeller.rows(2)


# ---- words ---------------------------------------------------------------------------------------------------


def labelled(path: Path) -> Path:
    """Steps that say yes are right, those that say no are wrong; a prompt is there twice."""
    rows: list[Any] = []
    for i in range(24):
        words = ["yes" if (i >> bit) & 1 else "no" for bit in range(2 + i % 2)]
        rows.append({"prompt": f"q{i // 2}", "steps": words, "labels": [word == "yes" for word in words]})
    return write(path, rows)


SMALL: dict[str, Any] = {"max_prompt": 64, "max_tokens": 24, "threads": 1}


@pytest.fixture(scope="module")
def scorer(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A process reward of words, through the command line."""
    folder = tmp_path_factory.mktemp("words")
    args = ["process-reward", labelled(folder / "steps.jsonl"), "--model", tiny_folder, "--steps", 30, "--lr", 1e-2]
    args += ["--max-prompt", 64, "--max-tokens", 24, "--threads", 1, "--eval-every", 20, "--out", folder / "run"]
    assert cli.main([str(arg) for arg in args]) == 0
    return folder / "run"


@pytest.mark.slow
@pytest.mark.smoke
def test_a_language_model_learns_labelled_steps(scorer: Path) -> None:
    metrics = Run(scorer).metrics
    assert metrics[-1]["steps/error"] < 0.2 * metrics[0]["steps/error"]
    assert metrics[-1]["eval/steps/explained"] > 0.5
    model = load_process_reward(scorer)
    assert isinstance(model, LanguageProcessReward)
    chat = [{"role": "user", "content": "q3"}]
    (scores, empty) = model.rate([(chat, ["yes", "no", "yes"], True), (chat, [""], True)])
    assert scores[0] > 0.7 and scores[1] < 0.3 and scores[2] > 0.7 and len(empty) == 1


@pytest.mark.long
def test_scores_are_those_of_the_plain_form_and_of_any_batch(scorer: Path) -> None:
    """Head · hidden after each token, one response at a time, by transformers' own forward."""
    model = load_process_reward(scorer)
    assert isinstance(model, LanguageProcessReward)
    chat = [{"role": "user", "content": "q3"}]
    asked = [(chat, ["yes", "no"], True), (chat, ["no", "yes", "maybe"], False), (chat, ["no"], True)]
    together = model.rate(asked)
    lm, head = model.model, model.model.model.rating
    for (_, steps, ended), scores in zip(asked, together, strict=True):
        ids = lm.encode(chat)
        for i, step in enumerate(steps):
            last = i + 1 == len(steps)
            ids = ids + lm.tokenizer(step + ("" if last else "\n"), add_special_tokens=False)["input_ids"]
            ids = ids + [lm.eos_token_id] * (last and ended)
            with torch.no_grad():
                hidden = lm.backbone(torch.tensor([ids])).last_hidden_state[0, -1]
                assert float(head(hidden)) == pytest.approx(scores[i], abs=1e-4)


@pytest.mark.long
def test_a_process_reward_of_words_lies_on_the_last_tokens_of_steps(
    scorer: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    reward = ("own", f"0.5*process:{scorer}")
    settings = {**SMALL, "policy.model": str(tiny_folder), "reward": reward, "prompts": 2, "samples": 2}
    parts = assemble(configure(f"jsonl:{sums(tmp_path / 'sums.jsonl')}", settings))
    prompts = parts.task.draw(2, torch.Generator().manual_seed(0))
    lm: Any = parts.policy
    problem = parts.task.problem(int(prompts.problem[0]))  # type: ignore[attr-defined]
    words = [["yes\nno", str(problem.answer)], ["no", "\n\nyes\n\nyes"]]
    groups = [[[*lm.tokenize(w), lm.eos_token_id] for w in g] for g in words]
    scores = parts.task.score(offline_rollouts(prompts, *pad_responses(groups), parts.task.space))
    parts.close()
    reward_of = scores.reward
    assert reward_of.shape[-1] == max(len(ids) for group in groups for ids in group)
    assert reward_of[0, 0].nonzero().flatten().tolist() == [3, 6], "after the newline, and at the end"
    assert reward_of[1, 1].nonzero().flatten().tolist() == [6, 10]
    model: Any = load_process_reward(scorer)
    chat = [{"role": "user", "content": problem.prompt}]
    first, last = model.rate([(chat, ["yes", "no"], True)])[0]
    assert reward_of[0, 0, 3].item() == pytest.approx(0.5 * first, abs=1e-4)
    assert reward_of[0, 0].sum().item() == pytest.approx(0.5 * last, abs=1e-4)
    assert bool(scores.correct[0, 1]) and reward_of[0, 1].sum() == pytest.approx(
        1 + 0.5 * float(scores.measures["rewards/process"][0, 1])
    )


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", mostly_smokes(["grpo", "ppo"], "grpo"))
def test_a_run_with_a_process_reward_of_words(algorithm: str, scorer: Path, tiny_folder: Path, tmp_path: Path) -> None:
    """And then labels from its own roll-outs, which start as its responses do."""
    more = {**SMALL, "policy.model": str(tiny_folder), "reward": (f"process:{scorer}",), "prompts": 2, "samples": 2}
    data = sums(tmp_path / "sums.jsonl")
    task = f"jsonl:{data}"
    run = ascent.train(
        task, out=tmp_path / "run", show=False, preflight=False, algorithm=algorithm, steps=2, eval_prompts=2, **more
    )
    assert run.metrics[-1]["reward"] is not None and run.metrics[-1]["reward_errors"] == 0
    if algorithm == "ppo":
        return
    out = label_steps(
        tmp_path / "run", tmp_path / "mine.jsonl", prompts=3, samples=1, rollouts=2, separator="0", show=False
    )
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert rows and all(len(row["steps"]) == len(row["labels"]) for row in rows)
    assert all(row["prompt"] in data.read_text() for row in rows)


@pytest.mark.long
def test_prefixes_of_words_are_continued_within_the_limit(tiny_folder: Path, tmp_path: Path) -> None:
    config = configure(f"jsonl:{sums(tmp_path / 'sums.jsonl')}", {**SMALL, "policy.model": str(tiny_folder)})
    loaded = untrained_policy(config)
    task: Any = loaded.task()
    prompts = task.draw(2, torch.Generator().manual_seed(0))
    labeller = StepLabeler(loaded, task, prompts, 5, "\n", 0)
    heads = [[5, 6, 7], [9] * 20]
    drawn = labeller.continue_prefixes(prompts, heads)
    lengths = drawn.mask.sum(-1)
    assert int(lengths.max()) <= 24
    for i, head in enumerate(heads):
        assert (drawn.response[i, :, : len(head)] == torch.tensor(head)).all()
        assert (lengths[i] > len(head)).all()
    ended = drawn.response.gather(-1, lengths.unsqueeze(-1) - 1).squeeze(-1) == loaded.policy.eos_token_id  # type: ignore[union-attr]
    assert torch.equal(drawn.truncated, ~ended)
    task.close()


# ---- what is refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "p", "steps": ["a"]}, "has no column labels"),
        ({"prompt": "p", "steps": ["a"], "labels": [1, 0]}, "of the same length"),
        ({"prompt": "p", "steps": ["a"], "labels": ["good"]}, "a finite number"),
        ({"prompt": "p", "steps": ["a\nb"], "labels": [1]}, "contains the separator"),
        ({"prompt": "p", "steps": [""], "labels": [1]}, "a step must be text"),
    ],
)
def test_steps_that_are_none_are_refused(row: dict[str, Any], words: str, tmp_path: Path, tiny_folder: Path) -> None:
    file = write(tmp_path / "steps.jsonl", [row, {"prompt": "q", "steps": ["b"], "labels": [0]}])
    with pytest.raises(ConfigError, match=words):
        assemble(configure(f"steps:{file}", {**SMALL, "policy.model": str(tiny_folder)}))


@pytest.mark.long
def test_what_is_no_process_reward_is_refused(hasty: Path, scorer: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="was trained with the loss"):
        Sort(reward=f"process:{hasty / 'policy'}")
    with pytest.raises(ConfigError, match="is not a run"):
        Sort(reward="process:nowhere")
    with pytest.raises(ConfigError, match="unknown reward"):
        Sort(reward=f"nonsense+process:{hasty / 'process'}")
    with pytest.raises(ConfigError, match="trained for a text task"):
        assemble(configure("sort", {"reward": f"process:{scorer}"}))
    with pytest.raises(ConfigError, match="other prompts and responses"):
        assemble(configure("sort", {"reward": f"process:{hasty / 'process'}"}))
    with pytest.raises(ConfigError, match="--labels FILE"):
        assemble(configure("sort", {"algorithm": "process-reward"}))
    with pytest.raises(ConfigError, match="a prompt of this task has 5 numbers"):
        SmallOfflineTask(Sort(labels=str(hasty / "steps.jsonl")), "steps", torch.Generator())
    with pytest.raises(ConfigError, match="scores responses"):
        label_steps(hasty / "process", tmp_path / "out.jsonl")
    task = Sort(length=2, numbers=4, reward=f"process:{hasty / 'process'}")
    rollouts = SmallPolicyEngine(policy_of(TINY, task.space), 1.0, torch.Generator()).generate(task.held_out(2), 2)
    with pytest.raises(ConfigError, match="learned reward rates"):
        task.score(rollouts)
