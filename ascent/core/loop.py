"""The training loop: prompts → rollouts → rewards → advantages → loss → update → weight sync → metrics → checkpoint.

Task, engine, learner and records are protocols: the loop knows none of their implementations.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Generator, Tensor

from ascent.core.algorithms import Algorithm
from ascent.core.config import Config
from ascent.core.correction import mismatch
from ascent.core.errors import ConfigError, RunError
from ascent.core.groups import groups_without_signal
from ascent.core.metric_names import MISMATCH
from ascent.core.protocols import Learner, Records, RolloutEngine, RolloutJournal, RolloutRequest, Task, UpdateResult
from ascent.core.types import (
    Batch,
    Metrics,
    Prompts,
    Rollouts,
    State,
    Streams,
    join,
    per_token_reward,
    rewards_on_actions,
    to_batch,
)

GROUP_DEADLINE = 3600.0
"""Seconds that a step waits for all of its groups."""
ScoredGroups = tuple[Tensor, Batch, list[str]]
"""Prompt indices of a request, their scored groups, and the reasons why rewards failed."""


class PhaseTimer:
    """Seconds spent in each phase of a step, under `time/`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        except (torch.OutOfMemoryError, MemoryError) as error:
            advice = "--policy.rows or --max-tokens" if phase in ("generate", "eval") else "--micro-batch"
            raise RunError(f"out of memory in the phase {phase}: lower {advice}. The error was: {error}") from None
        self.seconds[f"time/{phase}"] += time.perf_counter() - begin


def train(
    config: Config,
    task: Task,
    engine: RolloutEngine,
    learner: Learner,
    records: Records,
    streams: Streams,
    evaluate: Callable[[], Metrics],
    start: int = 0,
    state: State | None = None,
    journal: RolloutJournal | None = None,
) -> Iterator[int]:
    """Train from step `start` to `config.steps`.

    Yields the number of each finished step. A config that the caller sends back replaces the current one.
    """
    algorithm, (needs, ratio_is_one) = config.algorithm, required_fields(config)
    check_needs(needs, engine, learner)
    state = algorithm.initial_state() if state is None else state
    engine.load(learner.params(), version=start)
    for step in range(start, config.steps):
        timer, begin = PhaseTimer(), time.perf_counter()
        batch, metrics = read_or_collect(journal, task, engine, config, streams.prompts, timer, step)
        with timer("score"):
            batch = batch.add(logp_old=None if ratio_is_one else batch.logp_sampler)
            batch = batch.add(**learner.score(batch, needs))
        batch, state = algorithm.compute_advantages(batch, state)
        batch = batch.add(**algorithm.scalars(state, step / config.steps))
        minis: list[Batch] = []
        updates: list[UpdateResult] = []
        with timer("update"):
            for mini in batch.minibatches(config.epochs, config.minibatches, streams.order):
                if not mini.tokens:  # skip the update: Adam's momentum alone would move the policy
                    continue
                repeated = mini is batch and minis  # a later epoch over an undivided batch: its weights are known
                minis.append(minis[0] if repeated else mini.add(weight=algorithm.weights(mini)))
                updates.append(learner.step(minis[-1], algorithm.objective, algorithm.update))
                updates[-1].sums.update(algorithm.critic(learner, minis[-1]))
        if ratio_is_one:
            batch = batch.add(logp_old=updates[0].logp if updates else batch.logp_sampler)
        metrics |= update_metrics(step, batch, minis, updates, config)
        with timer("sync"):
            state = algorithm.update_state(state, metrics)
            engine.load(learner.params(), version=step + 1)
            if updates or not algorithm.reference.averages:
                algorithm.reference(learner, step)
        if (step + 1) % config.eval_every == 0 or step + 1 == config.steps:
            with timer("eval"):
                metrics |= evaluate()
        training_seconds = time.perf_counter() - begin - timer.seconds["time/eval"]
        timer.seconds["time/step"] = time.perf_counter() - begin
        metrics |= {**timer.seconds, "time/tokens_per_second": metrics["num_tokens"] / training_seconds}
        raise_if_diverged(step, metrics, batch, learner, records, config.max_mismatch)
        records.step(step, metrics, batch, minis, updates)
        config = (yield step) or config
        stopping = records.should_stop()
        if stopping or records.is_best() or (step + 1) % config.checkpoint_every == 0 or step + 1 == config.steps:
            records.checkpoint(step + 1, learner, streams, state, engine.snapshot_pending())
        if stopping:
            return


def required_fields(config: Config) -> tuple[frozenset[str], bool]:
    """Return the batch fields that the algorithm needs, and whether every ratio is 1.

    With one update per batch the ratio is 1, so logp_old is the logp of that update: no extra forward pass.
    """
    algorithm = config.algorithm
    reads_old = "logp_old" in algorithm.needs or algorithm.kl.where == "reward" or algorithm.update.full_batch
    ratio_is_one = config.old_logp == "learner" and config.epochs * config.minibatches == 1 and not reads_old
    scores_old = config.old_logp == "learner" and not ratio_is_one
    return algorithm.needs | ({"logp_old"} if scores_old else frozenset()), ratio_is_one


def read_or_collect(
    journal: RolloutJournal | None,
    task: Task,
    engine: RolloutEngine,
    config: Config,
    rng: Generator,
    timer: PhaseTimer,
    step: int,
) -> tuple[Batch, Metrics]:
    """Return the step's batch: read from the journal if it is there; otherwise collected, and then journalled."""
    journalled = None if journal is None else journal.read(step)
    if journalled is None:
        batch, metrics = collect(task, engine, config.algorithm, config, rng, timer, step)
        return batch if journal is None else journal.write(step, batch, metrics), metrics
    submit_requests(task, engine, config.algorithm, config, rng, step)  # so that later steps keep prompts and seeds
    engine.pending = tuple(pending for pending in engine.pending if pending.request.step != step)
    return journalled


def collect(
    task: Task,
    engine: RolloutEngine,
    algorithm: Algorithm,
    config: Config,
    rng: Generator,
    timer: PhaseTimer,
    step: int = 0,
) -> tuple[Batch, Metrics]:
    """Collect prompts, rollouts and rewards; with dynamic sampling, replace the groups without signal.

    The metrics cover everything that was sampled, before groups are dropped. Later rounds of dynamic sampling take
    prompts and seeds from separate random streams, so that they change neither other steps nor the epochs.
    """
    sampled: list[Batch] = []
    selected: list[Batch] = []
    missing, errors, greedy = config.prompts, [], "reward_greedy" in algorithm.needs
    requests = submit_requests(task, engine, algorithm, config, rng, step)
    epoch = requests[0].prompts.epoch
    for sampling_round in range(algorithm.groups.rounds):
        if sampling_round > 0:
            seeds = np.random.SeedSequence((config.seed, step, sampling_round)).generate_state(2, np.uint64) >> 1
            prompts = task.draw(missing, Generator().manual_seed(int(seeds[0])))
            requests = make_requests(step, prompts, config.samples, greedy, int(seeds[1]))
            engine.submit(requests)
        batch, reasons = collect_groups(requests, task, engine, timer)
        errors += reasons
        sampled.append(batch)
        with_signal = algorithm.groups(batch).nonzero().flatten()[:missing]
        selected.append(batch if len(with_signal) == len(batch.prompt) else batch.select(with_signal))
        missing -= len(with_signal)
        if missing <= 0:
            break
    everything = join(sampled)
    metrics = rollout_metrics(everything)
    metrics["reward_errors"] = len(errors)
    metrics |= {} if epoch is None else {"epoch": epoch}
    num_failed = min(max(len(errors), int((~everything.valid).sum())), everything.valid.numel())
    if num_failed > config.max_reward_errors * metrics["num_responses"]:
        raise RunError(
            f"the reward failed on {num_failed} of {metrics['num_responses']:.0f} responses, more than "
            f"--max-reward-errors {config.max_reward_errors:g} allows. The first: {[*errors, 'a rollout failed'][0]}"
        )
    batch = join(selected)
    if missing == config.prompts:  # no group has signal: no token counts, and so there is no update
        batch = sampled[-1].add(valid=torch.zeros_like(sampled[-1].valid))
    return batch.add(errors=tuple(errors), prompt_index=torch.arange(batch.prompt.shape[0])), metrics


def submit_requests(
    task: Task, engine: RolloutEngine, algorithm: Algorithm, config: Config, rng: Generator, step: int
) -> list[RolloutRequest]:
    """Submit the requests of this step and of up to `--ahead` later ones; return those of this step."""
    greedy = "reward_greedy" in algorithm.needs
    submitted = {pending.request.step for pending in engine.pending}
    for future_step in range(step, min(step + config.ahead, config.steps - 1) + 1):
        if future_step not in submitted:
            prompts = task.step_prompts(future_step, config.prompts, config.seed, rng)
            engine.submit(make_requests(future_step, prompts, config.samples, greedy))
    return [pending.request for pending in engine.pending if pending.request.step == step]


def make_requests(
    step: int, prompts: Prompts, samples: int, greedy: bool, seed: int | None = None
) -> list[RolloutRequest]:
    """Return the requests of a step: `samples` responses per prompt and, if `greedy`, one greedy response each."""
    request = RolloutRequest(step, prompts, samples, seed=seed)
    return [request, replace(request, samples=1, greedy=True)] if greedy else [request]


def collect_groups(
    requests: list[RolloutRequest], task: Task, engine: RolloutEngine, timer: PhaseTimer
) -> tuple[Batch, list[str]]:
    """Wait for the groups of a step, score them as they arrive, and return them in the order of their prompts.

    A second request is for greedy responses, whose rewards are baselines. A group whose baseline failed has no
    advantage: it is marked invalid, as if its rewards had failed.
    """
    request, *greedy_requests = requests
    arrived: dict[RolloutRequest, list[ScoredGroups]] = {each: [] for each in requests}
    finished_groups = engine.iter_finished(request.step, GROUP_DEADLINE)
    while True:
        with timer("generate"):
            finished = next(finished_groups, None)
        if finished is None:
            break
        with timer("reward"):
            scored = score_rollouts(task, finished.rollouts)
            arrived[finished.request].append((finished.prompt_indices, *scored))
    batch, errors = _in_prompt_order(request, arrived[request])
    for greedy_request in greedy_requests:
        baseline, reasons = _in_prompt_order(greedy_request, arrived[greedy_request])
        batch = batch.add(reward_greedy=baseline.reward.sum(-1, keepdim=True), valid=batch.valid & baseline.valid)
        errors += [f"the greedy response, the baseline of its group: {reason}" for reason in reasons]
    return batch, errors


def _in_prompt_order(request: RolloutRequest, parts: list[ScoredGroups]) -> tuple[Batch, list[str]]:
    """Join all groups of a request in the order of its prompts; a missing or repeated group is an error."""
    expected = torch.arange(len(request.prompts))
    arrived = torch.cat([indices for indices, _, _ in parts]) if parts else expected[:0]
    if len(parts) == 1 and torch.equal(arrived, expected):
        return parts[0][1:]
    if not torch.equal(arrived.sort().values, expected):
        missing = sorted(set(expected.tolist()) - set(arrived.tolist()))
        late = f"groups {missing[:8]} of {len(expected)} did not finish within {GROUP_DEADLINE:g} seconds"
        raise RunError(f"step {request.step}: {late if missing else 'a group was returned twice'}; check the engine")
    parts = sorted(parts, key=lambda part: int(part[0][0]))
    batch, arrived = join([batch for _, batch, _ in parts]), torch.cat([indices for indices, _, _ in parts])
    errors = [reason for _, _, reasons in parts for reason in reasons]
    return batch if torch.equal(arrived, expected) else batch.select(arrived.argsort()), errors


def score_rollouts(task: Task, rollouts: Rollouts) -> tuple[Batch, list[str]]:
    """Return the rollouts with their rewards, and the reasons why rewards failed; such responses are invalid.

    The task's score is added to the reward that the rollouts bring from an environment.
    """
    scores = task.score(rollouts)
    reward, valid, errors = total_reward(rollouts, scores.reward), scores.valid, list(scores.errors)
    notes = join_notes(rollouts.notes, scores.notes)
    if rollouts.valid is not None:
        errors += [] if notes is None else notes[(valid & ~rollouts.valid).numpy()].tolist()
        valid = valid & rollouts.valid
    finite = scores.reward.isfinite().all(-1) & reward.isfinite().all(-1)
    errors += ["the reward is not finite"] * int((valid & ~finite).sum())
    reward = torch.where(finite.unsqueeze(-1), reward, 0.0)
    logp_sampler = torch.where(rollouts.mask, rollouts.logp_sampler, 0.0)  # observations and padding have none
    rewards = {"reward": reward, "valid": valid & finite, "correct": scores.correct}
    batch = to_batch(rollouts, logp_sampler=logp_sampler, notes=notes, **rewards)
    if scores.measures:
        batch = batch.add(
            measures=torch.stack(list(scores.measures.values()), -1), measure_names=tuple(scores.measures)
        )
    return batch, errors


def total_reward(rollouts: Rollouts, score: Tensor) -> Float[Tensor, "prompt sample #token"]:
    """Return the task's score plus the environment's reward; per-token rewards are moved to actions."""
    rewards = [reward for reward in (score, rollouts.reward) if reward is not None]
    if any(reward.shape[-1] > 1 for reward in rewards):
        rewards = [rewards_on_actions(rollouts, per_token_reward(rollouts, reward)) for reward in rewards]
    return sum(rewards[1:], rewards[0])


def join_notes(first: np.ndarray | None, second: np.ndarray | None) -> np.ndarray | None:
    """Join the two notes of each response; either may be missing."""
    if first is None or second is None:
        return second if first is None else first
    both = ["; ".join(note for note in pair if note) for pair in zip(first.flat, second.flat, strict=True)]
    return np.array(both, dtype=object).reshape(first.shape)


def rollout_metrics(batch: Batch) -> Metrics:
    """Return the metrics of everything that was sampled: rewards, accuracy, groups without signal, lengths."""
    rewards, has_reward = batch.reward.sum(-1)[batch.valid], batch.valid.any(1)
    correct = batch.valid if batch.correct is None else batch.correct & batch.valid
    length = batch.length.to(rewards.dtype)
    values = {
        "reward": rewards.mean(),
        "reward_std": rewards.std() if len(rewards) > 1 else torch.zeros(()),
        "accuracy": correct.sum() / max(len(rewards), 1),
        "frac_reward_zero_std": groups_without_signal(batch).to(rewards.dtype).mean(),
        "frac_all_right": ((correct | ~batch.valid).all(1) & has_reward).to(rewards.dtype).mean(),
        "frac_all_wrong": (~correct.any(1) & has_reward).to(rewards.dtype).mean(),
        "completions/mean_length": length.mean(),
        "completions/clipped_ratio": batch.truncated.to(rewards.dtype).mean(),
        "num_tokens": length.sum(),
    }
    metrics = dict(zip(values, torch.stack(list(values.values())).tolist(), strict=True))
    unknown = ["reward", "reward_std", "accuracy"] if not len(rewards) else []
    unknown += ["accuracy", "frac_all_right", "frac_all_wrong"] if batch.correct is None else []
    metrics = {name: value for name, value in metrics.items() if name not in unknown}
    if batch.measures is not None and len(rewards):
        means = zip(batch.measure_names, batch.measures[batch.valid].nanmean(0).tolist(), strict=True)
        metrics |= {name: mean for name, mean in means if mean == mean}  # NaN: no response of the step has it
    return {**metrics, "num_responses": batch.valid.numel()}


def update_metrics(step: int, batch: Batch, minis: list[Batch], updates: list[UpdateResult], config: Config) -> Metrics:
    """Return the means over a step's updates, and the mismatch and explained variance before the first of them.

    A step without an update reports only `frac_masked`; its other metrics are null in the records.
    """
    masked = {} if batch.excluded is None else {"frac_masked": batch.excluded.double().mean().item()}
    if not updates:
        return masked
    num_means, names = len(updates[0].metrics), [*updates[0].metrics, *updates[0].sums]
    values = [value for u in updates for value in (*u.metrics.values(), *u.sums.values())]
    rows = torch.stack(values).view(-1, len(names)).tolist()
    for mini, update, row in zip(minis, updates, rows, strict=True):
        tokens = max(mini.tokens, 1)
        row[num_means:] = [total / tokens for total in row[num_means:]]
        update.report.update(zip(names, row, strict=True))
    metrics = {name: sum(u.report[name] for u in updates) / len(updates) for name in updates[0].report}
    if not batch.sampled:
        return metrics
    if config.old_logp == "learner":
        assert batch.logp_old is not None
        measured = mismatch(batch.logp_old, batch, step)
    else:
        measured = mismatch(updates[0].logp, minis[0], step)
    measured |= config.algorithm.critic.measure(batch)
    return metrics | masked | dict(zip(measured, torch.stack(list(measured.values())).tolist(), strict=True))


def check_needs(needs: frozenset[str], engine: RolloutEngine, learner: Learner) -> None:
    """Raise a ConfigError for batch fields that neither the engine nor the learner provides."""
    missing = needs - engine.provides - learner.provides
    if missing:
        raise ConfigError(
            f"these choices need {', '.join(sorted(missing))}, which neither {type(engine).__name__} nor "
            f"{type(learner).__name__} can compute; choose others, or another engine"
        )


def raise_if_diverged(
    step: int, metrics: Metrics, batch: Batch, learner: Learner, records: Records, max_mismatch: float
) -> None:
    """End the run at the first non-finite loss, gradient, log-prob or parameter, and save the batch.

    Log-probs of the engine that are far from the trainer's end it too: the engine samples from another policy.
    """
    bad = [k for k, v in metrics.items() if k.removeprefix("value/") in ("loss", "grad_norm") and not abs(v) < np.inf]
    if not bool(batch.logp_sampler.isfinite().all()):
        bad.append("the sampler's log-probs")
    params = list(learner.params().values())  # ‖θ‖² is quick, and may overflow; max |θ| does not
    if not any(torch.stack(torch._foreach_norm(params, order)).isfinite().all() for order in (2, torch.inf)):
        bad.append("the parameters")
    if bad:
        raise RunError(
            f"step {step}: infinite or NaN values in {' and '.join(bad)}. The batch is saved in "
            f"{records.dump(step, batch)}; checkpoints are from earlier steps. Lower --lr, or set --update.max-norm "
            "(for value/…: --critic.lr and --critic.max-norm)"
        )
    if (gap := metrics.get(MISMATCH, 0.0)) > max_mismatch:
        raise RunError(
            f"step {step}: the log-probs of sampler and trainer differ by {gap:.3g} on average, more than "
            f"--max-mismatch {max_mismatch:g}: they are not the same policy. The batch is saved in "
            f"{records.dump(step, batch)}"
        )
