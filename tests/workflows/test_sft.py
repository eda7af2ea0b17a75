"""`ascent sft`: demonstrations through the same loop, learner and records; and the pre-flight of a run."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ascent
from ascent.build.assemble import assemble
from ascent.build.preflight import describe_batch_sizes, memory_bytes
from ascent.cli import main as cli
from ascent.core.errors import ConfigError
from ascent.runs.held_out_evaluation import offline_batch
from ascent.settings import configure


@pytest.fixture
def demonstrations(tmp_path: Path) -> Path:
    """Sums with their answers; one prompt occurs twice, with two responses."""
    file = tmp_path / "shown.jsonl"
    rows = [{"prompt": f"{a} + {b} =", "response": str(a + b)} for a in range(5) for b in range(5)]
    rows.append({"prompt": "1 + 1 =", "response": "two"})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def settings(folder: Path, **more: object) -> dict[str, object]:
    return {"policy.model": str(folder), "max_prompt": 64, "max_tokens": 8, "threads": 1, **more}


@pytest.mark.slow
def test_sft_learns_its_demonstrations(demonstrations: Path, tiny_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    more = {"steps": 60, "eval_every": 10, "lr": 5e-3}
    run = ascent.train(f"demonstrations:{demonstrations}", out=out, show=False, **settings(tiny_folder, **more))
    assert run.metrics[-1]["loss"] < 0.7 * run.metrics[0]["loss"]
    assert run.metrics[9]["eval/logp"] > -4, "what is held out gets likelier too, before it is learned by heart"
    assert run.metrics[-1]["accuracy"] is None, "nobody has judged a response"
    assert run.metrics[-1]["sampling/sampling_logp_difference/mean"] is None
    assert run.info["label"] == "sft"


def test_the_objective_is_the_mean_log_prob_of_the_demonstrated_tokens(demonstrations: Path, tiny_folder: Path) -> None:
    """Compare with the model's cross-entropy of responses and end tokens over all tokens of the step."""
    config = configure(f"demonstrations:{demonstrations}", settings(tiny_folder, prompts=5))
    parts = assemble(config)
    prompt = parts.task.draw(5, torch.Generator().manual_seed(0))
    rollouts = parts.engine.generate(prompt, 1)
    lm = parts.policy
    total, count = 0.0, 0
    for row, response, mask in zip(prompt.prompt, rollouts.response[:, 0], rollouts.mask[:, 0], strict=True):
        ids, tokens = row[row >= 0], response[mask]
        assert int(tokens[-1]) == lm.eos_token_id
        words = next(p.answer for p in config.task.table.train if lm.encode(config.task.messages(p)) == ids.tolist())
        assert lm.decode(tokens.tolist()).strip() in (words, "two")
        logits = lm.model(torch.cat([ids, tokens])[None]).logits[0, len(ids) - 1 : -1]
        total += float(torch.nn.functional.cross_entropy(logits, tokens, reduction="sum"))
        count += len(tokens)
    batch, _ = config.algorithm.compute_advantages(_scored(parts, rollouts), {})
    mini = batch.add(weight=config.algorithm.weights(batch))
    stepped = parts.learner.step(mini, config.algorithm.objective, config.algorithm.update)
    assert float(stepped.metrics["loss"]) == pytest.approx(total / count, rel=1e-5)


def _scored(parts: object, rollouts: object) -> object:
    from ascent.core.loop import score_rollouts

    batch, errors = score_rollouts(parts.task, rollouts)  # type: ignore[attr-defined]
    assert not errors
    return batch.add(logp_old=batch.logp_sampler)


def test_repeated_prompts_are_allowed(tmp_path: Path, tiny_folder: Path) -> None:
    file = tmp_path / "twice.jsonl"
    rows = [("a", "1"), ("a", "2"), ("b", "3")]
    file.write_text("".join(json.dumps({"prompt": p, "response": r}) + "\n" for p, r in rows))
    parts = assemble(configure(f"demonstrations:{file}", settings(tiny_folder, prompts=2)))
    rollouts = parts.engine.generate(parts.task.draw(2, torch.Generator().manual_seed(0)), 1)
    said = {
        parts.policy.decode(r[m].tolist()).strip()
        for r, m in zip(rollouts.response[:, 0], rollouts.mask[:, 0], strict=True)
    }
    assert said == {"1", "2"}


@pytest.mark.long
def test_killed_sft_run_is_resumed(demonstrations: Path, tiny_folder: Path, tmp_path: Path) -> None:
    more = {"steps": 6, "checkpoint_every": 3, "eval_every": 2, "keep": 9}
    whole = ascent.train(
        f"demonstrations:{demonstrations}", out=tmp_path / "a", show=False, **settings(tiny_folder, **more)
    )
    ascent.train(f"demonstrations:{demonstrations}", out=tmp_path / "b", show=False, **settings(tiny_folder, **more))
    again = ascent.api.resume(tmp_path / "b", from_step=3)
    for a, b in zip(whole.metrics, again.metrics, strict=True):
        assert {k: v for k, v in a.items() if "time" not in k} == {k: v for k, v in b.items() if "time" not in k}


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ('{"prompt": "a", "answer": "b"}', "no column response"),
        ('{"prompt": "a", "response": 3}', "a response must be text"),
        ("nonsense", "is not JSON"),
        ('{"prompt": "a", "response": "b"}', "at least two different prompts"),
    ],
)
def test_invalid_file_is_rejected(lines: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(lines + "\n")
    assert cli.main(["sft", str(file), "--model", "nowhere"]) == 2
    assert words in capsys.readouterr().err


def test_ratio_losses_are_rejected_for_sft(demonstrations: Path, tiny_folder: Path) -> None:
    config = configure(f"demonstrations:{demonstrations}", settings(tiny_folder, loss="clipped"))
    with pytest.raises(ConfigError, match="not sampled by the policy"):
        assemble(config)


# ---- the pre-flight -------------------------------------------------------------------------------


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    file = tmp_path / "problems.jsonl"
    rows = [{"prompt": f"{a} + {b} =", "answer": str(a + b)} for a in range(5) for b in range(5)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.long
def test_preflight_reports_without_changing_the_run(problems: Path, tiny_folder: Path) -> None:
    parts = assemble(configure(f"jsonl:{problems}", settings(tiny_folder, prompts=3, samples=4, check="number")))
    before = {name: state.clone() for name, state in parts.streams.state().items()}
    weights = [p.clone() for p in parts.learner.trainable()]
    report = parts.preflight()
    parts.close()
    text = report.text()
    assert re.search(r"time +per step about: sampling [\d.]+ s, update [\d.]+ s, for responses of \d+ tokens", text)
    assert all(p.grad is None and torch.equal(p, w) for p, w in zip(parts.learner.trainable(), weights, strict=True))
    for words in (
        "3 prompts per step × 4 samples per prompt = 12 responses", "memory only", "gold responses pass",
        "computed in float32 (--policy.dtype)",
    ):  # fmt: skip
        assert words in text
    assert "groups without signal" in text
    assert "cut off at 8 tokens" in text
    assert not report.errors
    assert all(torch.equal(before[name], state) for name, state in parts.streams.state().items())


@pytest.mark.long
def test_preflight_command_reports_and_rejects(
    problems: Path, tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text("def always(prompt, response, answer, **columns):\n    return 1.0\n")
    flags = {"model": tiny_folder, "max-prompt": 64, "max-tokens": 8, "threads": 1, "prompts": 2, "samples": 2}
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    command = ["preflight", f"jsonl:{problems}", *words, "--algorithm", "gspo", "--policy.dtype", "bfloat16"]
    assert cli.main([*command, "--check", "number"]) == 0
    said = capsys.readouterr().out
    assert "2 prompts per step × 2 samples per prompt = 4 responses" in said and "gold responses pass" in said
    assert re.search(r"^note       .*log-probs", said, re.MULTILINE), said
    assert cli.main([*command, "--reward", f"python:{tmp_path / 'mine.py'}:always"]) == 2
    out, err = capsys.readouterr()
    assert "self-test" in err and "2 prompts per step" in out and "\nnote       " not in out


@pytest.mark.long
def test_impossible_settings_are_rejected(problems: Path, tiny_folder: Path, tmp_path: Path) -> None:
    rewards = tmp_path / "mine.py"
    rewards.write_text("def always(prompt, response, answer, **columns):\n    return 1.0\n")
    out = tmp_path / "run"
    for more, words in (
        ({"max_tokens": 100_000}, "positions"),
        ({"reward": (f"python:{rewards}:always",)}, "self-test"),
    ):
        with pytest.raises(ConfigError, match=words):
            ascent.train(f"jsonl:{problems}", out=out, show=False, **settings(tiny_folder) | more)
    assert not out.exists(), "nothing was begun"


def test_precision_in_four_words(problems: Path, tiny_folder: Path) -> None:
    config = configure(f"jsonl:{problems}", settings(tiny_folder, prompts=6, samples=2, epochs=2, minibatches=3))
    text = " ".join(describe_batch_sizes(config))
    for words in ("6 prompts per step", "2 samples per prompt", "6 updates per step", "micro-batch"):
        assert words in text


def test_memory_estimate_counts_parameters_exactly(problems: Path, tiny_folder: Path) -> None:
    config = configure(f"jsonl:{problems}", settings(tiny_folder, algorithm="grpo"))
    parts = assemble(config)
    count = sum(p.numel() for p in parts.policy.model.parameters())
    found = memory_bytes(config, parts.learner, parts.engine.rows)
    assert found["parameters"] == found["gradients"] == found["reference"] == 4 * count
    assert found["Adam"] == 8 * count
    lora = replace(config, policy=replace(config.policy, lora=2))
    adapted = assemble(lora)
    assert memory_bytes(lora, adapted.learner, adapted.engine.rows)["Adam"] == 8 * sum(
        p.numel() for p in adapted.policy.trained().values()
    )


@pytest.mark.long
@pytest.mark.parametrize("lora", [0, 2])
def test_the_memory_of_a_critic_counts(problems: Path, tiny_folder: Path, lora: int) -> None:
    """The critic adds its parameters, copies and gradients, and two moments per trained parameter."""
    found = {}
    for critic, dtype in (("own-critic", "float32"), ("shared-critic", "float32"), ("own-critic", "bfloat16")):
        more = {"algorithm": "ppo", "critic": critic, "policy.lora": lora, "policy.dtype": dtype}
        config = configure(f"jsonl:{problems}", settings(tiny_folder, **more))
        parts = assemble(config)
        learner: Any = parts.learner
        batch = parts.engine.generate(parts.task.draw(2, torch.Generator()), 2)
        value = learner.score(offline_batch(batch), frozenset({"value"}))["value"]
        mini = offline_batch(batch).add(value=value, returns=torch.ones(batch.mask.shape))
        mini = mini.add(logp_old=mini.logp_sampler, advantage=mini.reward, weight=torch.ones(mini.mask.shape))
        learner.step(mini, config.algorithm.objective, config.algorithm.update)
        config.algorithm.critic(learner, mini)
        kept = (learner.critic_optimizer or learner.optimizer).state
        moments = [v for p in learner.critic.trained() for v in kept[p].values() if v.dim()]
        every = {id(t): t for t in [*learner.critic.parameters(), *learner.critic.trained()]}
        held = [*every.values(), *(p.grad for p in learner.critic.trained()), *moments]
        found[critic, dtype] = memory_bytes(config, learner, parts.engine.rows)["critic"]
        assert found[critic, dtype] == sum(t.numel() * t.element_size() for t in held)
        parts.close()
    assert found["own-critic", "float32"] > found["shared-critic", "float32"] > 0
