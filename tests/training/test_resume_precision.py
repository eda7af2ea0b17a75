"""A resumed run trains the parameters of its checkpoint, whatever device, precision or form of state it resumes in."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ascent
from ascent.build.language_reward_model import add_head, response_scores
from ascent.core.algorithms import ALGORITHMS
from ascent.core.critics import OwnCritic, SharedCritic
from ascent.core.errors import ConfigError
from ascent.core.types import Batch
from ascent.core.update import Adam
from ascent.models.causal_lm import CausalLM
from ascent.models.quantization import quantize_linears, unquantized_parameters
from ascent.training.language_learner import LanguageCritic, LanguageLearner
from benchmarks.ranks import adapt
from tests.cases import mostly_smokes
from tests.language import batch_of, model_of

ROWS = [{"prompt": f"{i}", "answer": "5"} for i in range(8)]
KINDS = ["policy", "adapters", "adapters on 4 bits", "reward model with adapters", "critic", "shared critic"]
SMALL = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "num_hidden_layers": 1}
FORMS = ["float32", "bfloat16", "bfloat16 state", "float16"]
"""Precisions of the parameters; in the third one the optimizer's state is in bfloat16 too."""


def reward(response: str) -> float:
    return len(response) / 8 + response.count("a")


@pytest.mark.long
@pytest.mark.parametrize("more", mostly_smokes([{}, {"policy.lora": 4}, {"algorithm": "ppo"}], {}), ids=str)
def test_run_started_on_cpu_resumes_bitwise_equal_where_auto_is_bfloat16(
    more: dict[str, Any], tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {"prompts": 2, "samples": 4, "max_tokens": 8, "eval_every": 100, "eval_prompts": 1, "reward_workers": 1}
    settings = few | {"algorithm": "dr-grpo", "lr": 1e-2, "checkpoint_every": 1, "keep": 9, "threads": 1} | more
    run = ascent.train(
        ROWS, model=str(tiny_folder), reward=reward, steps=4, out=tmp_path, show=False, preflight=False, **settings
    )
    assert json.loads((tmp_path / "config.json").read_text())["policy"]["dtype"] == "float32"

    def saved(step: int) -> dict[str, torch.Tensor]:
        return load_file(tmp_path / "checkpoints" / f"step_{step:06d}" / "params.safetensors")

    want, there = saved(4), CausalLM.dtype_on
    monkeypatch.setattr(CausalLM, "dtype_on", lambda own, on: torch.bfloat16 if own.dtype == "auto" else there(own, on))
    again = ascent.resume(run, from_step=3, rows=ROWS, reward=reward)
    assert again.status == "finished"
    assert all(torch.equal(value, want[name]) for name, value in saved(4).items())


def learner_of(kind: str, form: str) -> tuple[LanguageLearner, Any]:
    """A learner of this kind and form, always from the same first parameters, and its algorithm."""
    base = ALGORITHMS["reward-model" if kind.startswith("reward") else "ppo" if "critic" in kind else "reinforce"]
    critics = {"critic": OwnCritic(lr=1e-2), "shared critic": SharedCritic()}
    row = replace(base, critic=critics[kind], update=Adam(lr=1e-2)) if kind in critics else base
    dtype = getattr(torch, form.split()[0])
    lm = model_of(dtype=torch.float32, **SMALL)
    if "4 bits" in kind:
        quantize_linears(lm.model.requires_grad_(False), lm.backbone, torch.device("cpu"), dtype)
    for p in unquantized_parameters(lm.model):
        p.data = p.data.to(dtype)
    if "adapters" in kind:
        adapt(lm.model, 4)
        for name, p in lm.model.named_parameters():
            p.data = p.data.float() if "lora" in name else p.data
    lm = add_head(lm) if kind.startswith("reward") else lm
    critic = LanguageCritic(lm, row.critic.shared) if row.critic.enabled else None
    rounding = 3 if form == "bfloat16 state" else None
    learner = LanguageLearner(lm, Adam(lr=1e-2), False, row.outputs, 0, False, critic, row.critic.update, rounding)
    if kind.startswith("reward"):
        learner.train_reward(partial(response_scores, learner.lm))
    return learner, row


def ready(row: Any, batch: Batch, learner: LanguageLearner) -> Batch:
    batch = batch.add(**{key: getattr(batch, key).float() for key in ("logp_sampler", "reward")}, logp_old=None)
    batch = batch.add(**learner.score(batch, row.needs | ({"logp_old"} if row.critic.enabled else frozenset())))
    batch, state = row.compute_advantages(batch, row.initial_state())
    return batch.add(weight=row.weights(batch), **row.scalars(state, 0.0))


def exact_parameters(learner: LanguageLearner) -> dict[str, torch.Tensor]:
    """In float32: what the optimizer steps, of the policy and of its critic."""
    masters = learner.trainable() if learner.compact is None else learner.compact.masters()
    every = {str(index): p.detach().float().clone() for index, p in enumerate(masters)}
    critic = {} if learner.critic is None else learner.critic.state_dict()
    return every | {f"critic {name}": p.float().clone() for name, p in critic.items()}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # of processors without bfloat16
@pytest.mark.parametrize("kind", mostly_smokes(KINDS, "policy", "reward model with adapters", "critic"))
def test_every_state_format_resumes_from_every_other(kind: str) -> None:
    """Nothing of the trained parameters is lost: they are those of the checkpoint in float32, before and after a step.

    Half precision has nothing to save that float32 lacks, so the parameters in float32 are an independent measure.
    """
    forms = [form for form in FORMS if form != "bfloat16 state" or kind in ("policy", "shared critic")]
    forms = [form for form in forms if form != "float16" or kind != "critic"]
    batch = batch_of(model_of(dtype=torch.float32, **SMALL), samples=2, limit=4)
    for begun in forms:
        first, row = learner_of(kind, begun)
        start = exact_parameters(first)
        mini = ready(row, batch, first)
        for _ in range(3):
            first.step(mini, row.objective, Adam(lr=1e-2))
            row.critic(first, mini)
        saved = {group: {name: t.clone() for name, t in own.items()} for group, own in first.state().items()}
        want = exact_parameters(first)
        for form in forms:
            case = f"{kind}: begun in {begun}, resumed in {form}"
            resumed, _ = learner_of(kind, form)
            resumed.restore({group: dict(own) for group, own in saved.items()})
            found = exact_parameters(resumed)
            assert want.keys() == found.keys(), case
            assert all(torch.equal(found[name], want[name]) for name in want), case
            resumed.step(ready(row, batch, resumed), row.objective, Adam(lr=1e-6))
            moved, lost = distance(exact_parameters(resumed), want), distance(start, want)
            assert moved < 1e-3 < lost, f"{case}: {moved:.3g} from the checkpoint, which is {lost:.3g} from the start"
            working = torch.cat([p.detach().flatten().float() for p in resumed.params().values()])
            masters = torch.cat([found[str(index)].flatten() for index in range(len(resumed.params()))])
            rounding = torch.finfo(resumed.lm.model.dtype).eps
            assert torch.allclose(working, masters, rtol=2 * rounding, atol=1e-4), f"{case}: the sampler's copy"


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return sum(float((a[name] - b[name]).square().sum()) for name in a) ** 0.5


@pytest.mark.parametrize("form", ["bfloat16", "float32"])
def test_parameters_that_differ_from_the_checkpoint_after_loading_are_rejected(form: str) -> None:
    """The copies that are stepped are of another time than the parameters beside them."""
    learner, _ = learner_of("critic", form)
    state = {group: {name: t.clone() for name, t in own.items()} for group, own in learner.state().items()}
    name = next(iter(state["params"]))
    state["wide"] = {key: value.float() for key, value in state["params"].items()}
    learner.restore(state)
    state["wide"][name] = state["wide"][name] * 1.1
    with pytest.raises(ConfigError, match=f"{name} differs from the checkpoint after it was loaded"):
        learner.restore(state)
    state["wide"][name] = state["params"][name].float()
    missing = next(iter(state["critic"]))
    del state["critic"][missing]
    with pytest.raises(ConfigError, match="not this model's"):
        learner.restore(state)
