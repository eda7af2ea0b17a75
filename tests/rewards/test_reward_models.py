"""Reward models: calibration by hand, ratings against the plain model, and the model as a reward like any other."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import ascent
from ascent.build.assemble import assemble
from ascent.build.reward_loading import bind_task, load_reward_model
from ascent.build.small_backend import SmallBackend
from ascent.cli import main as cli
from ascent.cli.run_flags import parse_train
from ascent.core.errors import ConfigError
from ascent.runs.alerts.step_alerts import reward_weights
from ascent.runs.held_out_evaluation import calibration, calibration_text
from ascent.settings import config_from, configure
from ascent.tasks.small.sorting import Sort

# ---- calibration ----------------------------------------------------------------------------------


def test_calibration_by_hand() -> None:
    """Margins ±log 3: confidence 0.75, three of four right, so no error; log-loss −(3·log ¾ + log ¼)/4."""
    found = calibration(torch.tensor([1.0, 1.0, 1.0, -1.0]).double() * math.log(3))
    assert found.accuracy == 0.75 and found.ece == pytest.approx(0.0, abs=1e-12)
    assert found.log_loss == pytest.approx(-(3 * math.log(0.75) + math.log(0.25)) / 4)
    (only,) = found.bins
    assert (only.low, only.high, only.pairs) == (0.75, 0.8, 4) and only.confidence == pytest.approx(0.75)


def test_calibration_of_two_bins_by_hand() -> None:
    """Half of the pairs at 0.9, all right (0.1 off); half at 0.6, all wrong (0.6 off): ECE 0.35."""
    sure, unsure = math.log(9), math.log(1.5)
    found = calibration(torch.tensor([sure, sure, -unsure, -unsure]).double() * (1 - 1e-9))
    assert found.ece == pytest.approx((0.1 + 0.6) / 2) and found.accuracy == 0.5
    assert [b.pairs for b in found.bins] == [2, 2]
    assert found.metrics()["eval/pairs/ece"] == found.ece
    assert "50.0% right" in calibration_text(found)


def test_a_tie_is_half_right() -> None:
    found = calibration(torch.zeros(3))
    assert (found.accuracy, found.ece) == (0.5, 0.0) and found.log_loss == pytest.approx(math.log(2))
    assert calibration(torch.tensor([1e6, -1e6])).log_loss == pytest.approx(5e5), "no number is infinite"


# ---- sort -----------------------------------------------------------------------------------------

SMALL = {"length": 3, "numbers": 4, "policy.width": 16, "prompts": 32, "threads": 1, "show": False, "eval_prompts": 60}


@pytest.fixture(scope="module")
def rated_sort(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("rm") / "rewards"
    run = ascent.train("sort", algorithm="reward-model", steps=60, out=out, lr=5e-3, eval_every=20, **SMALL)
    assert run.metrics[0]["loss"] == pytest.approx(math.log(2), abs=1e-6), "the head is 0 at first"
    assert run.metrics[-1]["eval/pairs/accuracy"] > 0.7 and run.metrics[-1]["entropy"] is None
    return out


@pytest.mark.long
def test_it_rates_sorted_answers_higher(rated_sort: Path) -> None:
    rater = load_reward_model(rated_sort)
    parts = assemble(configure("sort", {k: v for k, v in SMALL.items() if k != "show"}))
    prompt = parts.task.held_out(12)
    rollouts, prompt = parts.engine.generate(prompt, 2), prompt.prompt
    response = torch.stack([prompt.sort(-1).values, prompt.sort(-1, descending=True).values], 1)
    rating = rater(replace(rollouts, response=response))
    differs = (response[:, 0] != response[:, 1]).any(-1)
    assert float((rating[differs, 0] > rating[differs, 1]).float().mean()) > 0.8


@pytest.mark.long
def test_it_is_a_reward_and_the_true_one_is_measured_beside_it(rated_sort: Path, tmp_path: Path) -> None:
    kl = {"kl": "in-reward", "kl.estimator": "k1", "kl.coef": 0.1, "kl.per": "token", "reference": "frozen"}
    more = {"algorithm": "ppo", "steps": 12, "reward": f"model:{rated_sort}", "lr": 3e-3, "eval_every": 6, **kl}
    run = ascent.train("sort", out=tmp_path / "ppo", **SMALL, **more)
    first, last = run.metrics[0], run.metrics[-1]
    assert last["reward"] > first["reward"], "what it maximises goes up"
    assert 0 <= last["positions"] <= 3 and last["eval/positions"] is not None and last["kl"] > 0
    assert run.config.task.max_reward is None
    rows = run.rollouts(0)
    batch = torch.tensor([[row["prompt"] for row in rows[:1]]])
    assert batch.shape[-1] == 3 and all("positions" in row for row in rows)
    again = load_reward_model(rated_sort)
    parts = assemble(run.config)
    rollouts = parts.engine.generate(parts.task.draw(4, torch.Generator().manual_seed(0)), 2)
    assert torch.equal(parts.task.score(rollouts).reward, again(rollouts))


@pytest.mark.long
def test_reward_models_mix_by_weights_in_sort_as_they_do_in_words(rated_sort: Path, tmp_path: Path) -> None:
    """A list with weights, on the command line, in Python and in config.json; every part is measured by its name."""
    (tmp_path / "mine.py").write_text("def first(prompt, response):\n    return response[0] / response[1]\n")
    rewards = (
        "positions",
        f"0.5*model:{rated_sort}",
        f"-2.0*model:{rated_sort}",
        f"0.1*python:{tmp_path}/mine.py:first",
    )
    small = {k: v for k, v in SMALL.items() if k != "show"}
    config = configure("sort", {**small, "reward": rewards})
    flags = [word for name, value in small.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    assert parse_train(["sort", *flags, "--reward", *rewards], "ascent train")[0] == config
    assert config_from(json.loads(json.dumps(config.to_dict()))) == config
    parts = assemble(config)
    rollouts = parts.engine.generate(parts.task.draw(8, torch.Generator().manual_seed(0)), 4)
    scores, rating = parts.task.score(rollouts), load_reward_model(rated_sort)(rollouts).squeeze(-1)
    right = (rollouts.response == rollouts.prompt.sort(-1).values.unsqueeze(1)).float().sum(-1)
    first = rollouts.response[..., 0] / rollouts.response[..., 1]
    assert torch.equal(scores.valid, first.isfinite()) and len(scores.errors) == int((~scores.valid).sum()) > 0
    expected = right - 1.5 * rating + 0.1 * torch.nan_to_num(first, posinf=0.0)
    torch.testing.assert_close(scores.reward.squeeze(-1)[scores.valid], expected[scores.valid])
    torch.testing.assert_close(scores.measures["rewards/model-2"], rating)
    weights = {"rewards/positions": 1.0, "rewards/model": 0.5, "rewards/model-2": -2.0, "rewards/first": 0.1}
    assert reward_weights(parts.task) == weights and weights.keys() | {"positions"} == scores.measures.keys()
    assert config.task.max_reward is None


def test_a_reward_per_token_and_a_reward_model_share_the_last_token(rated_sort: Path) -> None:
    more = {**{k: v for k, v in SMALL.items() if k != "show"}, "reward": ("process", f"0.5*model:{rated_sort}")}
    parts = assemble(configure("sort", more))
    rollouts = parts.engine.generate(parts.task.draw(4, torch.Generator().manual_seed(0)), 2)
    rating = load_reward_model(rated_sort)(rollouts)
    points = (rollouts.response == rollouts.prompt.sort(-1).values.unsqueeze(1)).float()
    points[..., -1:] += 0.5 * rating
    torch.testing.assert_close(parts.task.score(rollouts).reward, points)


def test_a_weight_alone_scales_a_reward_model(rated_sort: Path) -> None:
    more = {k: v for k, v in SMALL.items() if k != "show"}
    parts = assemble(configure("sort", {**more, "reward": f"0.25*model:{rated_sort}"}))
    rollouts = parts.engine.generate(parts.task.draw(4, torch.Generator().manual_seed(0)), 2)
    torch.testing.assert_close(parts.task.score(rollouts).reward, 0.25 * load_reward_model(rated_sort)(rollouts))


def test_the_kl_is_taken_off_the_learned_reward(rated_sort: Path) -> None:
    """R ← rating − β·Σ_t (logp_old − logp_ref), on the last token and token by token."""
    kl = {"kl": "in-reward", "kl.estimator": "k1", "kl.coef": 0.5, "kl.per": "token", "reference": "frozen"}
    given = {k: v for k, v in SMALL.items() if k != "show"} | {"algorithm": "ppo", "reward": f"model:{rated_sort}"} | kl
    parts = assemble(configure("sort", given))
    from ascent.core.loop import score_rollouts

    batch, _ = score_rollouts(
        parts.task, parts.engine.generate(parts.task.draw(3, torch.Generator().manual_seed(0)), 2)
    )
    old = batch.logp_sampler
    batch = batch.add(logp_old=old, logp_ref=old - 0.25)
    credited = parts.config.algorithm.shape_rewards(batch, parts.config.algorithm.initial_state())
    expected = batch.reward.squeeze(-1) - 0.5 * 0.25 * 3
    torch.testing.assert_close(credited.reward.sum(-1), expected)
    torch.testing.assert_close(credited.reward[..., 0], torch.full((3, 2), -0.125))


@pytest.mark.long
def test_a_reward_model_starts_from_a_policy_or_from_another(rated_sort: Path, tmp_path: Path) -> None:
    ascent.train("sort", algorithm="sft", steps=2, out=tmp_path / "sft", **SMALL)
    more = {"algorithm": "reward-model", "steps": 1, "lr": 1e-9}
    one = ascent.train("sort", out=tmp_path / "one", init=str(tmp_path / "sft"), **SMALL, **more)
    policy, model = ascent.load(tmp_path / "sft").policy, load_reward_model(one.folder).model
    torch.testing.assert_close(model.own.token.weight, policy.token.weight, rtol=0, atol=1e-6)
    two = ascent.train("sort", out=tmp_path / "two", init=str(rated_sort), **SMALL, **more)
    assert two.metrics[-1]["eval/pairs/accuracy"] > 0.7, "it begins where the other ended"
    with pytest.raises(ConfigError, match="do not fit"):
        assemble(configure("sort", {"algorithm": "reward-model", "length": 4, "init": str(tmp_path / "sft")}))


def test_what_is_no_reward_model_is_refused(
    rated_sort: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ascent.train("sort", algorithm="sft", steps=1, out=tmp_path / "sft", **SMALL)
    for source, words in (
        (tmp_path / "nowhere", "is not a run"),
        (tmp_path / "sft", "was trained with the loss likelihood"),
    ):
        assert cli.main(["train", "sort", "--reward", f"model:{source}"]) == 2
        assert words in capsys.readouterr().err
    with pytest.raises(ConfigError, match="other prompts and responses"):
        bind_task(SmallBackend(), Sort(reward=f"model:{rated_sort}", length=4, numbers=4), None)
    bound = bind_task(SmallBackend(), Sort(reward=f"model:{rated_sort}", length=3, numbers=4), None)
    assert list(bound.rewards) == [f"model:{rated_sort}"]  # type: ignore[attr-defined]
    for command in ("eval", "sample"):
        assert cli.main([command, str(rated_sort), *(["1 2 3"] if command == "sample" else [])]) == 2
        assert "trained a reward model" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="not a policy"):
        _ = ascent.load(rated_sort).policy


@pytest.mark.long
def test_the_command_says_how_good_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--length", "3", "--numbers", "4", "--policy.width", "8", "--prompts", "8", "--steps", "3", "--threads", "1"]
    out = tmp_path / "run"
    assert cli.main(["reward-model", "sort", *few, "--eval-prompts", "40", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "held-out pairs" in said and "expected calibration error" in said and "confidence" in said
    found = json.loads((out / "calibration.json").read_text())
    shown = ascent.load(out).metrics[-1]
    assert found["accuracy"] == pytest.approx(shown["eval/pairs/accuracy"])
    assert found["log_loss"] == pytest.approx(shown["eval/pairs/log_loss"], abs=1e-6)
    assert sum(b["pairs"] for b in found["bins"]) == found["pairs"] and (out / "calibration.png").exists()


# ---- language -------------------------------------------------------------------------------------


def words(folder: Path, **more: Any) -> dict[str, Any]:
    given = {"max_prompt": 64, "max_tokens": 8, "threads": 1, "show": False, "prompts": 4, "eval_prompts": 8}
    return {"policy.model": str(folder), **given, **more}


@pytest.fixture(scope="module")
def rated_words(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """Digits are better than question marks."""
    folder = tmp_path_factory.mktemp("words")
    rows = [
        {"prompt": f"{a} + {b} =", "chosen": str(a + b), "rejected": "?" * (1 + b)} for a in range(5) for b in range(5)
    ]
    file = folder / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = {"algorithm": "reward-model", "steps": 12, "eval_every": 6, "lr": 3e-3, "checkpoint_every": 6, "keep": 9}
    run = ascent.train(f"preferences:{file}", out=folder / "rewards", **words(tiny_folder, **more))
    assert run.metrics[-1]["eval/pairs/accuracy"] > 0.9
    return folder / "rewards"


@pytest.mark.long
def test_a_rating_is_the_head_on_the_last_hidden_state_of_the_plain_model(rated_words: Path) -> None:
    rater = load_reward_model(rated_words)
    chat = [{"role": "user", "content": "2 + 3 ="}]
    lm = rater.model
    ids = [*lm.encode(chat), *lm.tokenizer("5", add_special_tokens=False)["input_ids"], lm.eos_token_id]
    with torch.no_grad():
        hidden = lm.model.model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1]
        plain = float(lm.model.rating(hidden))
    assert rater.rate([(chat, "5")])[0] == pytest.approx(plain, abs=1e-4)
    asked = [(chat, "5"), ("2 + 3 =", "5"), (chat, "????"), ([{"role": "user", "content": "a longer prompt"}], "7")]
    together = rater.rate(asked)
    assert together[0] == pytest.approx(together[1], abs=1e-5) and together[0] > together[2]
    for batch in (1, 3):
        assert load_reward_model(rated_words, "cpu", batch).rate(asked) == pytest.approx(together, abs=1e-4)


@pytest.mark.long
def test_a_reward_model_is_mixed_with_a_check_by_weights(rated_words: Path, tiny_folder: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{a} + {b} =", "answer": str(a + b)} for a in range(4) for b in range(4)]
    file = tmp_path / "problems.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    mixed = {"reward": ("own", f"0.5*model:{rated_words}"), "reward_batch": 3, "reward_device": "cpu"}
    more = {
        "steps": 2,
        "samples": 3,
        "algorithm": "grpo",
        "eval_every": 2,
        "reward_workers": 1,
        "record_rollouts": "all",
    }
    run = ascent.train(f"jsonl:{file}", out=tmp_path / "run", **words(tiny_folder, **more, **mixed))
    rater, responses = load_reward_model(rated_words), run.rollouts(0)
    assert run.metrics[-1]["rewards/model"] is not None and run.metrics[-1]["eval/rewards/model"] is not None
    for row in responses[:6]:
        assert row["reward"] == pytest.approx(row["rewards/own"] + 0.5 * row["rewards/model"], abs=1e-4)
        assert f"model: {row['rewards/model']:.3f}" in row["reason"]
    spoken = responses[0]
    ids = spoken["response"]
    end = rater.model.decode(ids[:-1] if ids[-1] in rater.model.stop_token_ids else ids)
    prompt = next(r["prompt"] for r in rows if r["prompt"] in spoken["prompt_text"])
    assert spoken["rewards/model"] == pytest.approx(rater.rate([(prompt, end)])[0], abs=1e-3)


def test_a_rating_that_is_no_number_is_an_error_and_never_a_zero(tiny_folder: Path, rated_words: Path) -> None:
    from ascent.rewards.reward_manager import RewardManager, rate_responses, self_test
    from ascent.tasks import Jsonl
    from ascent.tasks.text import Problem

    task = Jsonl(source="unused", reward=(f"model:{rated_words}",))
    source = task.rewards[0].source
    rater = partial(rate_responses, task, lambda asked: [math.nan, 2.5][: len(asked)])
    grading = RewardManager(task, {source: rater})
    try:
        bad, good = grading([(Problem("a"), "x"), (Problem("b"), "y")])
    finally:
        grading.close()
    assert bad.error is not None and "nan" in bad.error
    assert (good.value, good.error) == (2.5, None)
    assert self_test(task).lines()[0].startswith("the reward was not tested"), "there is nothing to test it on"


def test_a_reward_model_is_not_exported_as_a_policy(rated_words: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trained a reward model and not a policy"):
        ascent.export(rated_words, tmp_path / "folder")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_a_reward_model_of_language_resumes_to_the_same_bits(rated_words: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(rated_words, tmp_path / "again")
    again = ascent.api.resume(tmp_path / "again", from_step=6)
    for a, b in zip(ascent.load(rated_words).metrics, again.metrics, strict=True):
        assert {k: v for k, v in a.items() if "time" not in k} == {k: v for k, v in b.items() if "time" not in k}
    one, two = (run / "checkpoints/step_000012/params.safetensors" for run in (rated_words, tmp_path / "again"))
    assert one.read_bytes() == two.read_bytes()
