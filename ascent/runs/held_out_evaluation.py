"""Evaluation on held-out data: sampled answers, demonstrations, pairs and step labels."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ascent.core.config import Config
from ascent.core.loop import score_rollouts
from ascent.core.preferences import RESPONSES_PER_PROMPT, PairLoss, margin_of
from ascent.core.protocols import Learner, RolloutEngine, Task
from ascent.core.types import Batch, Metrics, Outputs, Rollouts, Terms, to_batch
from ascent.oracle.exact import expected_reward, reward_table
from ascent.runs.display.terminal import table

Evaluate = Callable[[], Metrics]
KeepAnswers = Callable[[Task, Batch], None]
"""Receives the scored answers of an evaluation, with the task that scored them."""
MAX_ENUMERATED_RESPONSES = 5_000
"""Maximum number of prompts × responses for which every evaluation enumerates E[R]."""


def sample_evaluator(
    config: Config, task: Task, sampler: RolloutEngine, policy: Any = None, keep: KeepAnswers | None = None
) -> Evaluate:
    """Return an evaluation of greedy answers to held-out prompts, with the exact E[R] of small policies."""
    prompts = task.held_out(config.eval_prompts)
    is_enumerable = (
        policy is not None
        and prompts.start_episodes is None
        and len(prompts) * task.space.vocab**task.space.limit <= MAX_ENUMERATED_RESPONSES
    )
    table = reward_table(task, prompts.prompt) if is_enumerable else None

    def evaluate() -> Metrics:
        answers, errors = score_rollouts(task, sampler.generate(prompts, 1, greedy=True))
        if keep is not None:
            keep(task, answers.add(errors=tuple(errors)))
        metrics: Metrics = {"eval/reward_errors": len(errors)} if errors else {}
        if bool(answers.valid.any()):
            if answers.correct is not None:
                metrics["eval/accuracy"] = answers.correct[answers.valid].double().mean().item()
            metrics["eval/reward"] = answers.reward.sum(-1)[answers.valid].double().mean().item()
            if answers.measures is not None:
                means = answers.measures[answers.valid].double().nanmean(0).tolist()
                measured = zip(answers.measure_names, means, strict=True)
                metrics |= {f"eval/{k}": mean for k, mean in measured if mean == mean and not k.startswith("time/")}
        if table is not None:
            metrics["exact/reward"] = expected_reward(policy, prompts.prompt, table, config.temperature)
        return metrics

    return evaluate


def offline_batch(rollouts: Rollouts, label: Tensor | None = None) -> Batch:
    """Return offline data as a batch. Responses without labels have reward 1."""
    shape = rollouts.mask.shape[:2]
    reward = torch.ones(*shape, 1) if label is None else label
    return to_batch(rollouts, reward=reward, valid=torch.ones(shape, dtype=torch.bool))


def offline_evaluator(config: Config, learner: Learner, task: Task, sampler: RolloutEngine) -> Evaluate:
    """Return the evaluation of an offline run on the data that its task holds out."""
    rollouts = sampler.generate(task.held_out(config.eval_prompts), RESPONSES_PER_PROMPT[config.data])
    batch = offline_batch(rollouts, task.score(rollouts).reward if config.data == "steps" else None)

    def demonstrations() -> Metrics:
        """Return the mean log-prob per token of held-out demonstrations."""
        logp = learner.score(batch, frozenset({"logp_old"}))["logp_old"]
        return {"eval/logp": logp[batch.mask].double().mean().item()}

    def pairs() -> Metrics:
        """Return the calibration of the margins of a reward model, or of a policy's log-ratios."""
        loss: PairLoss = config.algorithm.loss  # type: ignore[assignment]
        compared = batch.add(**learner.score(batch, frozenset({"logp_ref"})))
        margins = map_micro_batches(learner, compared, lambda micro, out: margin_of(loss.rating(micro, out)).flatten())
        return calibration(torch.cat(margins).double().cpu()).metrics()

    def steps() -> Metrics:
        """Return the mean squared error and the explained fraction of the labels' variance."""

        def error_of(micro: Batch, out: Outputs) -> Tensor:
            assert out.rating is not None
            return (out.rating - micro.reward).cpu()[micro.mask.cpu()]

        error = torch.cat(map_micro_batches(learner, batch, error_of)).double().square().mean()
        spread = batch.reward[batch.mask].double().var(correction=0)
        explained = {"eval/steps/explained": float(1 - error / spread)} if spread > 0 else {}
        return {"eval/steps/error": float(error)} | explained

    return {"demonstrations": demonstrations, "pairs": pairs, "steps": steps}[config.data]


def map_micro_batches(learner: Learner, batch: Batch, read: Callable[[Batch, Outputs], Tensor]) -> list[Tensor]:
    """Apply `read` to each micro-batch and the learner's outputs, without training."""
    parts: list[Tensor] = []

    def collect(micro: Batch, out: Outputs) -> Terms:
        parts.append(read(micro, out))
        return Terms(torch.zeros(()), {})

    learner.evaluate_objective(batch, collect)
    return parts


# ---- calibration of reward models --------------------------------------------------------------------------------
#
# With the margin m = r_w − r_l of a held-out pair, σ(|m|) is the confidence that the higher rated response is the
# chosen one. Calibration compares that confidence with the fraction of pairs that are right.


@dataclass(frozen=True)
class CalibrationBin:
    """The pairs whose confidence σ(|m|) lies in a range: their mean confidence and accuracy."""

    low: float
    high: float
    pairs: int
    confidence: float
    accuracy: float


@dataclass(frozen=True)
class Calibration:
    """The quality of a reward model on held-out pairs."""

    pairs: int
    accuracy: float
    """Fraction of pairs whose chosen response is rated higher; a tie counts half."""
    log_loss: float
    """Mean −log σ(m); log 2 = 0.693 is chance."""
    margin: float
    """Mean m."""
    ece: float
    """Expected calibration error, Σ_bins (pairs in the bin / pairs)·|accuracy − confidence| (Guo et al. 2017)."""
    bins: tuple[CalibrationBin, ...]
    """The bins that contain pairs, of equal width from 0.5 to 1."""

    def metrics(self) -> Metrics:
        return {f"eval/pairs/{name}": getattr(self, name) for name in ("accuracy", "log_loss", "margin", "ece")}


def calibration(margin: Float[Tensor, "pair"], bins: int = 10) -> Calibration:
    """Compute the calibration from margins of held-out pairs. A margin of 0 is half right, with confidence 0.5."""
    margin = margin.double()
    right = (margin > 0).double() + 0.5 * (margin == 0).double()
    confidence = torch.sigmoid(margin.abs())
    place = ((confidence - 0.5) * 2 * bins).long().clamp(max=bins - 1)
    filled = []
    for i in place.unique().tolist():
        inside, edges = place == i, (0.5 + 0.5 * i / bins, 0.5 + 0.5 * (i + 1) / bins)
        filled.append(
            CalibrationBin(*edges, int(inside.sum()), float(confidence[inside].mean()), float(right[inside].mean()))
        )
    ece = sum(b.pairs * abs(b.accuracy - b.confidence) for b in filled) / len(margin)
    loss = float(-F.logsigmoid(margin).mean())
    return Calibration(len(margin), float(right.mean()), loss, float(margin.mean()), ece, tuple(filled))


def calibration_text(result: Calibration) -> str:
    """Format the metrics and the bins for a terminal."""
    head = (
        f"{result.pairs} held-out pairs: {result.accuracy:.1%} right, log-loss {result.log_loss:.3f} (knowing nothing: "
        f"0.693), expected calibration error {result.ece:.3f}."
    )
    rows = [
        [f"{b.low:.2f} to {b.high:.2f}", str(b.pairs), f"{b.confidence:.3f}", f"{b.accuracy:.3f}"] for b in result.bins
    ]
    return "\n".join([head, "", *table(["confidence", "pairs", "mean", "right"], rows)])


def draw_calibration(axis: Any, result: Calibration) -> None:
    """Draw a reliability diagram: accuracy against confidence."""
    confidence, accuracy = [b.confidence for b in result.bins], [b.accuracy for b in result.bins]
    axis.plot([0.5, 1], [0.5, 1], color="#999999", linewidth=1, linestyle="--", label="perfectly calibrated")
    axis.scatter(confidence, accuracy, s=[20 + 200 * b.pairs / result.pairs for b in result.bins], color="#1f5fa8")
    axis.plot(confidence, accuracy, color="#1f5fa8", linewidth=1.2)
    axis.set(xlabel="confidence, σ(|margin|)", ylabel="share of pairs that is right", ylim=(-0.03, 1.03))
    axis.legend(frameon=False, fontsize=7.5)
