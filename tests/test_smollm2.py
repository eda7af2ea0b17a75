"""A real model: SmolLM2-135M-Instruct is loaded, asked, scored, trained, exported and loaded again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ascent import cli
from ascent.algorithms import ALGORITHMS
from ascent.engines.language import LanguageLearner, LanguageSampler, prove
from ascent.policies import CausalLM, LanguageModel
from ascent.types import to_batch

pytestmark = pytest.mark.slow
TOOL = Path(__file__).parent.parent / "tools" / "smollm2.py"
QUESTIONS = ("What is the capital of France?", "Write the number 1234 in words, slowly and with care.")


@pytest.fixture(scope="module")
def folder() -> str:
    """What `make -s smollm2` prints; made here where it is not there yet."""
    done = subprocess.run([sys.executable, TOOL], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture(scope="module")
def lm(folder: str) -> LanguageModel:
    found = CausalLM(model=folder).load()
    assert prove(found, 1000) is None
    return found


def prompts(lm: LanguageModel) -> torch.Tensor:
    ids = [lm.encode([{"role": "user", "content": text}]) for text in QUESTIONS]
    width = max(map(len, ids))
    return torch.tensor([row + [-1] * (width - len(row)) for row in ids])


def test_numbers_are_split_into_digits(lm: LanguageModel) -> None:
    """GGUF does not carry the pre-tokenizer over: this is what the conversion has to put right."""
    ids = lm.tokenizer("1234", add_special_tokens=False)["input_ids"]
    assert [lm.piece(i) for i in ids] == ["1", "2", "3", "4"]
    assert lm.tokenizer.pad_token_id == lm.end == 2


def test_it_answers(lm: LanguageModel) -> None:
    sampler = LanguageSampler(lm, 24, 1.0, torch.Generator())
    rollouts = sampler.generate(prompts(lm), 1, greedy=True)
    assert "Paris" in lm.decode(rollouts.response[0, 0][rollouts.mask[0, 0]].tolist())


def test_sampler_and_learner_agree_and_a_split_changes_nothing(lm: LanguageModel) -> None:
    """Log-probs with the tokens, at no second pass; and one gradient whatever the micro-batch."""
    algorithm = ALGORITHMS["dr-grpo"]
    rollouts = LanguageSampler(lm, 6, 0.8, torch.Generator().manual_seed(0), rows=3).generate(prompts(lm), 3)
    reward = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 1.0]]).unsqueeze(-1)
    valid = torch.ones(2, 3, dtype=torch.bool)
    batch = to_batch(rollouts, reward=reward, valid=valid, correct=valid, logp_old=rollouts.logp_sampler)
    batch, _ = algorithm.credit(batch, algorithm.start())
    mini = batch.add(weight=algorithm.weights(batch))
    found = []
    for budget in (0, 30):
        learner = LanguageLearner(lm, algorithm.update, False, algorithm.outputs, budget)
        learner.gradient(mini, algorithm.objective)
        found.append(torch.cat([p.grad.flatten() for p in learner.trainable() if p.grad is not None]))
    logp = torch.cat([part.flatten(0, 1) for part in learner._logp]).view(rollouts.logp_sampler.shape)
    assert (logp - rollouts.logp_sampler).abs().max() < 1e-3
    assert float((found[0] - found[1]).norm() / found[0].norm()) < 1e-4
    lm.model.zero_grad(set_to_none=True)


def test_two_steps_an_export_and_a_reload(folder: str, tmp_path: Path) -> None:
    """Through the command line, as a person would; the exported folder is an ordinary one."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    problems = tmp_path / "problems.jsonl"
    rows = [{"prompt": f"What is {a} + {b}?", "answer": str(a + b)} for a in range(4) for b in range(4)]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    rewards = tmp_path / "mine.py"  # one that differs within a group, so that there is something to learn
    noise = "return zlib.crc32(response.encode()) % 97 / 97"
    rewards.write_text(f"import zlib\n\n\ndef noise(prompt, response, answer, **columns):\n    {noise}\n")
    run, out = tmp_path / "run", tmp_path / "model"
    flags = ["--steps", "2", "--prompts", "2", "--samples", "2", "--max-tokens", "8", "--eval-prompts", "2"]
    own = ["--reward", f"python:{rewards}:noise", "--lr", "1e-4"]
    arguments = ["train", f"jsonl:{problems}", "--model", folder, "--check", "number", *flags, *own]
    assert cli.main([*arguments, "--temperature", "1.3", "--no-preflight", "--out", str(run)]) == 0
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2
    assert 0 < lines[0]["sampling/sampling_logp_difference/mean"] < 1e-3, "measured, and so never exactly 0"
    assert cli.main(["export", str(run), str(out)]) == 0
    model, before = (AutoModelForCausalLM.from_pretrained(path) for path in (out, folder))
    tokenizer = AutoTokenizer.from_pretrained(out)
    ids = tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert torch.isfinite(model(ids).logits).all()
    moved = [not torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True)]
    assert lines[0]["grad_norm"] > 0
    assert all(moved)
