"""DPO's and the reward model's losses, computed by TRL 1.16's own trainers on the same tensors as ours.

The trainers are TRL's: `DPOTrainer._compute_loss` and `RewardTrainer.compute_loss` run as they are. What they are
handed is made up: in place of a model a function that returns the log-probs (or the rewards) which our side has too, so
that the gradient can be taken with respect to each of them. Everything is float64. Where TRL means something else, a
test names it.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import F64, batch_of, close
from torch import Tensor

from ascent.core.algorithms import ALGORITHMS
from ascent.core.errors import ConfigError
from ascent.core.preferences import BradleyTerry, Dpo
from ascent.core.types import Batch, Outputs
from ascent.core.weights import SequenceMean

pytestmark = pytest.mark.slow
"""TRL takes 11 s to import, so it is imported by the first test that runs and not by the file."""

EXACT = 1e-9
"""The issue asks for 1e-6; in float64 the two agree far better, so a small slip shows."""
PROMPT, LIMIT = 3, 5
LENGTHS = [[3, 1], [5, 5], [2, 4], [1, 1]]


@dataclass
class Case:
    """Ragged pairs; the policy's and the reference's log-probs of every token; a rating of every response."""

    batch: Batch
    logp: Tensor
    logp_ref: Tensor
    rating: Tensor


@pytest.fixture
def case() -> Case:
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=F64)

    logp, logp_ref = -noise(4, 2, LIMIT).abs(), -noise(4, 2, LIMIT).abs()
    batch = batch_of([[1.0, 0.0]] * 4, LENGTHS, limit=LIMIT, logp_ref=logp_ref).add(sampled=False)
    batch = batch.add(advantage=batch.reward, weight=SequenceMean()(batch))
    return Case(batch, logp.requires_grad_(), logp_ref, noise(4, 2, 1).requires_grad_())


def stacked(values: Tensor) -> Tensor:
    """[chosen, rejected] one after the other, as TRL lays out a batch."""
    return torch.cat([values[:, 0], values[:, 1]])


def trainer_of(cls: Any, **more: Any) -> Any:
    """A trainer without its data and its model: only what the loss reads."""
    made = object.__new__(cls)
    same = SimpleNamespace(device="cpu", gather_for_metrics=lambda x: x, gather=lambda x: x)
    fields = {"accelerator": same, "model": SimpleNamespace(training=True), "aux_loss_enabled": False}
    fields |= {"_metrics": {"train": defaultdict(list)}, "_total_train_tokens": 0, "_tp_size": 1}
    made.__dict__.update(fields | more)
    return made


def dpo_loss(case: Case, monkeypatch: pytest.MonkeyPatch, **config: Any) -> tuple[Tensor, Any]:
    """DPOTrainer's loss; its models return our log-probs, 0 at the prompt, as its fused head does."""
    from trl.trainer import dpo_trainer

    monkeypatch.setattr(dpo_trainer, "disable_gradient_checkpointing", lambda *_: nullcontext())
    monkeypatch.setattr(dpo_trainer, "is_peft_model", lambda _: False)
    rows, width = 2 * len(case.logp), PROMPT + LIMIT
    mask = torch.zeros(rows, width, dtype=torch.long)
    mask[:, PROMPT:] = stacked(case.batch.mask).long()

    def model(logp: Tensor) -> Any:
        """Log-probs of tokens 1 … width−1, which are 0 where the completion mask is: labels are −100 there."""
        shifted = torch.cat([torch.zeros(rows, PROMPT - 1, dtype=F64), stacked(logp)], 1)
        shifted = torch.where(mask[:, 1:].bool(), shifted, 0.0)
        idle = torch.zeros_like(shifted)
        fields = {"entropy": idle, "mean_logits": idle, "is_top1": idle.bool(), "log_sum_sq_probs": idle}
        return lambda **_: SimpleNamespace(log_probs=shifted, **fields)

    settings = {"beta": 0.1, "ld_alpha": None, "precompute_ref_logps": False, "f_divergence_type": "reverse_kl"}
    settings |= {"loss_types": ["sigmoid"], "loss_weights": [1.0], "use_weighting": False, "label_smoothing": 0.0}
    args = SimpleNamespace(gradient_checkpointing_kwargs=None)
    trainer = trainer_of(dpo_trainer.DPOTrainer, ref_model=model(case.logp_ref), args=args, **settings | config)
    inputs = {"input_ids": torch.zeros(rows, width, dtype=torch.long), "completion_mask": mask}
    loss = trainer._compute_loss(model(case.logp), inputs | {"attention_mask": torch.ones_like(mask)}, False)
    return loss, {name: values[-1] for name, values in trainer._metrics["train"].items()}


def ours(case: Case, loss: Any) -> Any:
    row = replace(ALGORITHMS["dpo" if isinstance(loss, Dpo) else "reward-model"], loss=loss)
    return row.objective(case.batch, Outputs(case.logp, torch.zeros_like(case.logp), rating=case.rating))


@pytest.mark.parametrize("beta", [0.1, 0.7])
def test_dpo_is_trls(case: Case, beta: float, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, figures = dpo_loss(case, monkeypatch, beta=beta)
    terms = ours(case, Dpo(beta))
    close(-terms.objective, theirs, EXACT)
    slopes = [torch.autograd.grad(value, case.logp, retain_graph=True)[0] for value in (-terms.objective, theirs)]
    close(slopes[0], slopes[1], EXACT)
    assert float(slopes[0].abs().max()) > 1e-3
    for name in ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"):
        assert float(terms.means[name]) == pytest.approx(figures[name], abs=1e-6), name


def test_smoothing_is_not_trls_robust_and_how_they_differ(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's "robust" is ((1−ε)·loss(m) − ε·loss(−m)) / (1 − 2ε), which undoes the noise; ours, cDPO, adds the two."""
    ε, flipped = 0.2, replace_order(case)
    robust, _ = dpo_loss(case, monkeypatch, loss_types=["robust"], label_smoothing=ε)
    straight, turned = -ours(case, Dpo(0.1)).objective, -ours(flipped, Dpo(0.1)).objective
    close(robust, ((1 - ε) * straight - ε * turned) / (1 - 2 * ε), EXACT)
    close(-ours(case, Dpo(0.1, smoothing=ε)).objective, (1 - ε) * straight + ε * turned, EXACT)


def replace_order(case: Case) -> Case:
    """The pairs the other way round."""
    mask, logp, ref = (value.flip(1) for value in (case.batch.mask, case.logp, case.logp_ref))
    batch = case.batch.add(mask=mask, logp_ref=ref)
    return replace(case, batch=batch.add(weight=SequenceMean()(batch)), logp=logp, logp_ref=ref)


@pytest.mark.parametrize("center", [None, 0.01, 0.5])
def test_the_reward_models_loss_is_trls(case: Case, center: float | None) -> None:
    from trl.trainer.reward_trainer import RewardTrainer

    trainer = trainer_of(RewardTrainer, args=SimpleNamespace(center_rewards_coefficient=center))
    outputs = SimpleNamespace(logits=stacked(case.rating))
    theirs = trainer.compute_loss(lambda **_: outputs, {"attention_mask": torch.ones(8, 4)})
    terms = ours(case, BradleyTerry(center or 0.0))
    close(-terms.objective, theirs, EXACT)
    slopes = [torch.autograd.grad(value, case.rating, retain_graph=True)[0] for value in (-terms.objective, theirs)]
    close(slopes[0], slopes[1], EXACT)
    figures = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    assert float(terms.means["rewards/accuracies"]) == pytest.approx(figures["accuracy"], abs=1e-6)
    assert float(terms.means["rewards/margins"]) == pytest.approx(figures["margin"], abs=1e-6)


def test_a_margin_of_a_pair_is_trls_alone(case: Case) -> None:
    """TRL takes a column `margin` off r_w − r_l; here no such column is read, so the same pairs give another loss."""
    from trl.trainer.reward_trainer import RewardTrainer

    trainer = trainer_of(RewardTrainer, args=SimpleNamespace(center_rewards_coefficient=None))
    inputs = {"attention_mask": torch.ones(8, 4), "margin": torch.full((4,), 0.5, dtype=F64)}
    theirs = trainer.compute_loss(lambda **_: SimpleNamespace(logits=stacked(case.rating)), inputs)
    shifted = replace(case, rating=case.rating - torch.tensor([0.5, 0.0], dtype=F64).view(1, 2, 1))
    close(-ours(shifted, BradleyTerry()).objective, theirs, EXACT)
    assert theirs.item() > -ours(case, BradleyTerry()).objective.item()


def test_a_micro_batch_means_another_loss_for_trl_and_not_for_us(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's loss is the mean over the pairs of a micro-batch, so unequal parts weigh unequally; ours is a plain sum."""
    parts = [
        Case(case.batch.select(cut), case.logp[cut], case.logp_ref[cut], case.rating[cut])
        for cut in (slice(0, 3), slice(3, 4))
    ]
    whole = -ours(case, Dpo(0.1)).objective
    close(sum(-ours(part, Dpo(0.1)).objective for part in parts), whole, 1e-12)
    theirs = [dpo_loss(part, monkeypatch)[0].item() for part in parts]
    assert sum(theirs) / 2 != pytest.approx(whole.item(), abs=1e-4)
    assert (3 * theirs[0] + theirs[1]) / 4 == pytest.approx(whole.item(), abs=1e-9)


def test_the_parity_can_fail(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, _ = dpo_loss(case, monkeypatch)
    with pytest.raises(AssertionError):
        close(-ours(case, Dpo(0.11)).objective, theirs, EXACT)
    with pytest.raises(ConfigError):
        Dpo(-1.0)
