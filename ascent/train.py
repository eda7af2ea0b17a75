"""The loop, top to bottom: prompts → rollouts → rewards → credit → loss → step → sync → metrics → checkpoint.

It is handed its task, sampler, learner and records, and knows none of their kinds.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from ascent.algorithms import Algorithm
from ascent.config import Config
from ascent.correction import MISMATCH, mismatch
from ascent.engines.base import Learner, Sampler, Stepped
from ascent.groups import without_signal
from ascent.tasks.base import Task
from ascent.types import Batch, Metrics, Refused, Rollouts, State, Trouble, join, to_batch


class Streams:
    """Every source of randomness in a run, each with its own generator, all from one seed.

    `sampling` draws the first parameters and then every response: nothing else may draw from it.
    """

    def __init__(self, seed: int):
        self.sampling = torch.Generator().manual_seed(seed)
        self.prompts = torch.Generator().manual_seed(seed + 1_000_003)
        self.order = torch.Generator().manual_seed(seed + 2_000_003)
        self.critic = torch.Generator().manual_seed(seed + 3_000_003)

    def state(self) -> dict[str, torch.Tensor]:
        return {name: generator.get_state() for name, generator in vars(self).items()}

    def restore(self, state: dict[str, torch.Tensor]) -> None:
        for name, generator in vars(self).items():
            generator.set_state(state[name])


class Records(Protocol):
    """Where a run is written down, and who may ask it to stop."""

    def step(self, step: int, metrics: Metrics, batch: Batch, minis: list[Batch], updates: list[Stepped]) -> None: ...

    def checkpoint(self, step: int, learner: Learner, streams: Streams, state: State) -> None:
        """Save all that a resume needs to go on with `step`."""

    def dump(self, step: int, batch: Batch) -> str:
        """Keep the batch that made trouble; say where."""

    def stopping(self) -> bool: ...

    def best(self) -> bool:
        """Was the last evaluation the best one, and is it to be kept?"""


class Clock:
    """Seconds spent in each phase of a step, under `time/`."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        except (torch.OutOfMemoryError, MemoryError) as error:
            advice = "--policy.rows or --max-tokens" if phase in ("generate", "eval") else "--micro-batch"
            raise Trouble(f"out of memory in the phase {phase}: lower {advice}. It said: {error}") from None
        self.spent[f"time/{phase}"] += time.perf_counter() - begin


def train(
    config: Config,
    task: Task,
    sampler: Sampler,
    learner: Learner,
    records: Records,
    streams: Streams,
    evaluate: Callable[[], Metrics],
    start: int = 0,
    state: State | None = None,
) -> None:
    """Steps `start` … `config.steps`, from this state (or the algorithm's first)."""
    algorithm = config.algorithm
    needs = algorithm.needs | ({"logp_old"} if config.old_logp == "learner" else frozenset())
    check_needs(needs, sampler, learner)
    state = algorithm.start() if state is None else state
    sampler.load(learner.params(), version=start)
    for step in range(start, config.steps):
        clock, begin = Clock(), time.perf_counter()
        batch, metrics = collect(task, sampler, algorithm, config, streams.prompts, clock)
        with clock("score"):
            batch = batch.add(logp_old=batch.logp_sampler)
            batch = batch.add(**learner.score(batch, needs))
        batch, state = algorithm.credit(batch, state)
        batch = batch.add(**algorithm.scalars(state, step / config.steps))
        minis: list[Batch] = []
        updates: list[Stepped] = []
        with clock("update"):
            for part in batch.minibatches(config.epochs, config.minibatches, streams.order):
                again = part is batch and minis
                minis.append(minis[0] if again else part.add(weight=algorithm.weights(part)))
                updates.append(learner.step(minis[-1], algorithm.objective, algorithm.update))
                updates[-1].sums.update(algorithm.critic(learner, minis[-1]))
        metrics |= summarize(batch, minis, updates, config)
        with clock("sync"):
            state = algorithm.after(state, metrics)
            sampler.load(learner.params(), version=step + 1)
            algorithm.reference(learner, step)
        if (step + 1) % config.eval_every == 0 or step + 1 == config.steps:
            with clock("eval"):
                metrics |= evaluate()
        working = time.perf_counter() - begin - clock.spent["time/eval"]
        metrics |= {**clock.spent, "time/tokens_per_second": metrics["num_tokens"] / working}
        metrics["time/step"] = time.perf_counter() - begin
        stop_on_trouble(step, metrics, batch, learner, records, config.max_mismatch)
        records.step(step, metrics, batch, minis, updates)
        stopping = records.stopping()
        if stopping or records.best() or (step + 1) % config.checkpoint_every == 0 or step + 1 == config.steps:
            records.checkpoint(step + 1, learner, streams, state)
        if stopping:
            return


def collect(
    task: Task, sampler: Sampler, algorithm: Algorithm, config: Config, rng: torch.Generator, clock: Clock
) -> tuple[Batch, Metrics]:
    """Prompts, rollouts and rewards; with dynamic sampling, again in place of groups without signal.

    The metrics are over everything that was sampled, before any group is dropped.
    """
    sampled: list[Batch] = []
    kept: list[Batch] = []
    missing, errors = config.prompts, []
    for _ in range(algorithm.groups.rounds):
        prompt = task.draw(missing, rng)
        with clock("generate"):
            rollouts = sampler.generate(prompt, config.samples)
            greedy = sampler.generate(prompt, 1, greedy=True) if "reward_greedy" in algorithm.needs else None
        with clock("reward"):
            batch, reasons = scored(task, rollouts, greedy)
        errors += reasons
        sampled.append(batch)
        keep = algorithm.groups(batch).nonzero().flatten()[:missing]
        kept.append(batch if len(keep) == len(prompt) else batch.select(keep))
        missing -= len(keep)
        if missing <= 0:
            break
    everything = join(sampled)
    metrics = describe(everything)
    metrics["reward_errors"] = len(errors)
    failed = max(len(errors), int((~everything.valid).sum()))
    if errors and failed > config.max_reward_errors * metrics["num_responses"]:
        raise Trouble(
            f"the reward failed on {failed} of {metrics['num_responses']:.0f} responses, more than "
            f"--max-reward-errors {config.max_reward_errors:g} allows. The first: {errors[0]}"
        )
    batch = join(kept)
    if missing == config.prompts:  # no group has signal: nothing is learned from this step
        batch = sampled[-1].add(valid=torch.zeros_like(sampled[-1].valid))
    return batch.add(errors=tuple(errors), index=torch.arange(batch.prompt.shape[0])), metrics


def scored(task: Task, rollouts: Rollouts, greedy: Rollouts | None) -> tuple[Batch, list[str]]:
    """Rollouts with their rewards; where one failed, the response is marked and the reason returned."""
    scores = task.score(rollouts)
    finite = scores.reward.isfinite().all(-1)
    errors = [*scores.errors, *["the reward is not finite"] * int((scores.valid & ~finite).sum())]
    known = torch.where(rollouts.mask, rollouts.logp_sampler, 0.0)  # whatever stood in the padding
    reward = torch.where(finite.unsqueeze(-1), scores.reward, 0.0)
    reward = reward if reward.shape[-1] == 1 else torch.where(rollouts.mask, reward, 0.0)
    rewards = {"reward": reward, "valid": scores.valid & finite, "correct": scores.correct}
    batch = to_batch(rollouts, logp_sampler=known, notes=scores.notes, **rewards)
    if scores.measures:
        batch = batch.add(measures=torch.stack(list(scores.measures.values()), -1), measured=tuple(scores.measures))
    if greedy is not None:
        baseline = task.score(greedy)
        errors += baseline.errors
        # Without its baseline a group has no credit: it is left out as if its own rewards had failed.
        batch = batch.add(reward_greedy=baseline.reward.sum(-1, keepdim=True), valid=batch.valid & baseline.valid)
    return batch, errors


def describe(batch: Batch) -> Metrics:
    """What was sampled, in numbers: reward and its spread, strict score, signal, lengths."""
    scored, some = batch.reward.sum(-1)[batch.valid], batch.valid.any(1)
    right = batch.valid if batch.correct is None else batch.correct & batch.valid
    length = batch.length.to(scored.dtype)
    values = {
        "reward": scored.mean(),
        "reward_std": scored.std() if len(scored) > 1 else torch.zeros(()),
        "accuracy": right.sum() / max(len(scored), 1),
        "frac_reward_zero_std": without_signal(batch).to(scored.dtype).mean(),
        "frac_all_right": ((right | ~batch.valid).all(1) & some).to(scored.dtype).mean(),
        "frac_all_wrong": (~right.any(1) & some).to(scored.dtype).mean(),
        "completions/mean_length": length.mean(),
        "completions/clipped_ratio": batch.truncated.to(scored.dtype).mean(),
        "num_tokens": length.sum(),
    }
    metrics = dict(zip(values, torch.stack(list(values.values())).tolist(), strict=True))
    if batch.correct is None:
        metrics = {k: v for k, v in metrics.items() if k not in ("accuracy", "frac_all_right", "frac_all_wrong")}
    if batch.measures is not None:
        metrics |= dict(zip(batch.measured, batch.measures[batch.valid].mean(0).tolist(), strict=True))
    return {**metrics, "num_responses": batch.valid.numel()}


def summarize(batch: Batch, minis: list[Batch], updates: list[Stepped], config: Config) -> Metrics:
    """The means over a step's updates; the sampler's mismatch and the critic's worth before the first of them."""
    if not updates:
        return {}
    whole, names = len(updates[0].metrics), [*updates[0].metrics, *updates[0].sums]
    values = [value for u in updates for value in (*u.metrics.values(), *u.sums.values())]
    rows = torch.stack(values).view(-1, len(names)).tolist()
    for mini, update, row in zip(minis, updates, rows, strict=True):
        tokens = max(mini.tokens, 1)
        row[whole:] = [total / tokens for total in row[whole:]]
        update.report.update(zip(names, row, strict=True))
    metrics = {name: sum(u.report[name] for u in updates) / len(updates) for name in updates[0].report}
    if not batch.sampled:
        return metrics
    if config.old_logp == "learner":
        assert batch.logp_old is not None
        gap = mismatch(batch.logp_old, batch)
    else:
        gap = mismatch(updates[0].logp, minis[0])
    gap |= config.algorithm.critic.measure(batch)
    return metrics | dict(zip(gap, torch.stack(list(gap.values())).tolist(), strict=True))


def check_needs(needs: frozenset[str], sampler: Sampler, learner: Learner) -> None:
    """Refuse, before any work, what neither the sampler nor the learner can bring."""
    missing = needs - sampler.fills - learner.fills
    if missing:
        raise Refused(
            f"these choices need {', '.join(sorted(missing))}, which neither {type(sampler).__name__} nor "
            f"{type(learner).__name__} can compute; choose others, or another engine"
        )


def stop_on_trouble(
    step: int, metrics: Metrics, batch: Batch, learner: Learner, records: Records, max_mismatch: float
) -> None:
    """The first non-finite loss, gradient, log-prob or parameter ends the run, with the batch that made it.

    So does a sampler whose log-probs are far from the trainer's: it samples from another policy.
    """
    bad = [name for name in ("loss", "grad_norm", "value/loss") if not abs(metrics.get(name, 0.0)) < float("inf")]
    if not bool(batch.logp_sampler.isfinite().all()):
        bad.append("the sampler's log-probs")
    if not bool(torch.stack([p.isfinite().all() for p in learner.params().values()]).all()):
        bad.append("the parameters")
    if bad:
        where = records.dump(step, batch)
        raise Trouble(
            f"step {step}: {' and '.join(bad)} became infinite or no number. The batch is kept in {where}; what was "
            "saved is from before. Lower --lr, or set --update.max-norm"
        )
    gap = metrics.get(MISMATCH, 0.0)
    if gap > max_mismatch:
        raise Trouble(
            f"step {step}: the log-probs of sampler and trainer are {gap:.3g} apart on average, more than "
            f"--max-mismatch {max_mismatch:g}: they are not the same policy. The batch is kept in "
            f"{records.dump(step, batch)}"
        )
