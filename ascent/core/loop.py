"""The loop, top to bottom: prompts → rollouts → rewards → credit → loss → step → sync → metrics → checkpoint.

It is handed its task, sampler, learner and records, and knows none of their kinds.
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
from ascent.core.groups import without_signal
from ascent.core.metric_names import MISMATCH
from ascent.core.protocols import Learner, Records, RolloutJournal, RolloutRequest, Sampler, Task, UpdateResult
from ascent.core.types import Batch, Metrics, Prompts, Rollouts, State, Streams, at_actions, at_last, join, to_batch

DEADLINE = 3600.0
"""Seconds that a step waits for its groups, at most."""


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
            raise RunError(f"out of memory in the phase {phase}: lower {advice}. It said: {error}") from None
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
    journal: RolloutJournal | None = None,
) -> Iterator[int]:
    """Steps `start` … `config.steps` from this state, or the first; each is yielded, and a config sent back is used."""
    algorithm = config.algorithm
    reads_old = "logp_old" in algorithm.needs or algorithm.kl.where == "reward" or algorithm.update.whole
    fresh = config.old_logp == "learner" and config.epochs * config.minibatches == 1 and not reads_old  # so ρ is 1
    needs = algorithm.needs | ({"logp_old"} if config.old_logp == "learner" and not fresh else frozenset())
    check_needs(needs, sampler, learner)
    state = algorithm.start() if state is None else state
    sampler.load(learner.params(), version=start)
    for step in range(start, config.steps):
        clock, begin = Clock(), time.perf_counter()
        batch, metrics = next_batch(journal, task, sampler, config, streams.prompts, clock, step)
        with clock("score"):
            batch = batch.add(logp_old=None if fresh else batch.logp_sampler)
            batch = batch.add(**learner.score(batch, needs))
        batch, state = algorithm.credit(batch, state)
        batch = batch.add(**algorithm.scalars(state, step / config.steps))
        minis: list[Batch] = []
        updates: list[UpdateResult] = []
        with clock("update"):
            for part in batch.minibatches(config.epochs, config.minibatches, streams.order):
                if not part.tokens:  # no step: Adam's momentum alone would move the policy
                    continue
                again = part is batch and minis
                minis.append(minis[0] if again else part.add(weight=algorithm.weights(part)))
                updates.append(learner.step(minis[-1], algorithm.objective, algorithm.update))
                updates[-1].sums.update(algorithm.critic(learner, minis[-1]))
        if fresh:  # the update's own log-probs are those of a forward pass before it
            batch = batch.add(logp_old=updates[0].logp if updates else batch.logp_sampler)
        metrics |= summarize(step, batch, minis, updates, config)
        with clock("sync"):
            state = algorithm.after(state, metrics)
            sampler.load(learner.params(), version=step + 1)
            if updates or not algorithm.reference.averages:
                algorithm.reference(learner, step)
        if (step + 1) % config.eval_every == 0 or step + 1 == config.steps:
            with clock("eval"):
                metrics |= evaluate()
        working = time.perf_counter() - begin - clock.spent["time/eval"]
        metrics |= {**clock.spent, "time/tokens_per_second": metrics["num_tokens"] / working}
        metrics["time/step"] = time.perf_counter() - begin
        stop_on_trouble(step, metrics, batch, learner, records, config.max_mismatch)
        records.step(step, metrics, batch, minis, updates)
        config = (yield step) or config
        stopping = records.stopping()
        if stopping or records.best() or (step + 1) % config.checkpoint_every == 0 or step + 1 == config.steps:
            records.checkpoint(step + 1, learner, streams, state, sampler.held())
        if stopping:
            return


def next_batch(
    journal: RolloutJournal | None,
    task: Task,
    sampler: Sampler,
    config: Config,
    rng: Generator,
    clock: Clock,
    step: int,
) -> tuple[Batch, Metrics]:
    """A step's batch, as the journal has it; or as it is drawn, and then journalled before its update."""
    kept = None if journal is None else journal.read(step)
    if kept is None:
        batch, metrics = collect(task, sampler, config.algorithm, config, rng, clock, step)
        return batch if journal is None else journal.write(step, batch, metrics), metrics
    ask(task, sampler, config.algorithm, config, rng, step)  # later steps have the prompts and seeds that they had
    sampler.pending = tuple(one for one in sampler.pending if one.ticket.step != step)
    return kept


def ask(
    task: Task, sampler: Sampler, algorithm: Algorithm, config: Config, rng: Generator, step: int
) -> list[RolloutRequest]:
    """Submit the tickets of this step and of those that may be drawn ahead of it; this step's are returned."""
    greedy, begun = "reward_greedy" in algorithm.needs, {one.ticket.step for one in sampler.pending}
    for later in range(step, min(step + config.ahead, config.steps - 1) + 1):
        if later not in begun:
            prompts = task.step_prompts(later, config.prompts, config.seed, rng)
            sampler.submit(tickets(later, prompts, config.samples, greedy))
    return [one.ticket for one in sampler.pending if one.ticket.step == step]


def collect(
    task: Task, sampler: Sampler, algorithm: Algorithm, config: Config, rng: Generator, clock: Clock, step: int = 0
) -> tuple[Batch, Metrics]:
    """Prompts, rollouts and rewards; with dynamic sampling, again in place of groups without signal.

    The metrics are over everything that was sampled, before any group is dropped. Prompts and responses of a
    round after the first come from streams of their own, so that they move no other step, and no pass over the rows.
    """
    sampled: list[Batch] = []
    kept: list[Batch] = []
    missing, errors = config.prompts, []
    asked, greedy = ask(task, sampler, algorithm, config, rng, step), "reward_greedy" in algorithm.needs
    epoch = asked[0].prompts.epoch
    for again in range(algorithm.groups.rounds):
        if again:
            seeds = np.random.SeedSequence((config.seed, step, again)).generate_state(2, np.uint64) >> 1
            prompts = task.draw(missing, Generator().manual_seed(int(seeds[0])))
            asked = tickets(step, prompts, config.samples, greedy, int(seeds[1]))
            sampler.submit(asked)
        batch, reasons = answered(asked, task, sampler, clock)
        errors += reasons
        sampled.append(batch)
        keep = algorithm.groups(batch).nonzero().flatten()[:missing]
        kept.append(batch if len(keep) == len(batch.prompt) else batch.select(keep))
        missing -= len(keep)
        if missing <= 0:
            break
    everything = join(sampled)
    metrics = describe(everything)
    metrics["reward_errors"] = len(errors)
    metrics |= {} if epoch is None else {"epoch": epoch}
    failed = min(max(len(errors), int((~everything.valid).sum())), everything.valid.numel())
    if failed > config.max_reward_errors * metrics["num_responses"]:
        raise RunError(
            f"the reward failed on {failed} of {metrics['num_responses']:.0f} responses, more than "
            f"--max-reward-errors {config.max_reward_errors:g} allows. The first: {[*errors, 'a rollout failed'][0]}"
        )
    batch = join(kept)
    if missing == config.prompts:  # no group has signal: no token counts, and so there is no update
        batch = sampled[-1].add(valid=torch.zeros_like(sampled[-1].valid))
    return batch.add(errors=tuple(errors), index=torch.arange(batch.prompt.shape[0])), metrics


def tickets(step: int, prompts: Prompts, samples: int, greedy: bool, seed: int | None = None) -> list[RolloutRequest]:
    """What a step asks of its sampler: responses to these prompts and, with `greedy`, one greedy response to each."""
    asked = RolloutRequest(step, prompts, samples, seed=seed)
    return [asked, replace(asked, samples=1, greedy=True)] if greedy else [asked]


def answered(asked: list[RolloutRequest], task: Task, sampler: Sampler, clock: Clock) -> tuple[Batch, list[str]]:
    """The groups of the first ticket with their rewards: scored as they arrive, and then put in the ticket's order.

    The second, if there is one, asks for the greedy response to each prompt. Without that baseline a group has no
    credit: it is left out as if its own rewards had failed.
    """
    ticket, *baseline = asked
    scores: dict[RolloutRequest, list[tuple[Tensor, Batch, list[str]]]] = {each: [] for each in asked}
    arrivals = sampler.finished(ticket.step, DEADLINE)
    while True:
        with clock("generate"):
            done = next(arrivals, None)
        if done is None:
            break
        with clock("reward"):
            scores[done.ticket].append((done.place, *scored(task, done.rollouts)))
    batch, errors = _in_order(ticket, scores[ticket])
    if baseline:
        one, reasons = _in_order(baseline[0], scores[baseline[0]])
        batch = batch.add(reward_greedy=one.reward.sum(-1, keepdim=True), valid=batch.valid & one.valid)
        errors += [f"the greedy response, the baseline of its group: {reason}" for reason in reasons]
    return batch, errors


def _in_order(ticket: RolloutRequest, parts: list[tuple[Tensor, Batch, list[str]]]) -> tuple[Batch, list[str]]:
    """All groups of a ticket in its order; trouble where one is missing, or came twice."""
    wanted = torch.arange(len(ticket.prompts))
    place = torch.cat([place for place, _, _ in parts]) if parts else wanted[:0]
    if len(parts) == 1 and torch.equal(place, wanted):
        return parts[0][1:]
    if not torch.equal(place.sort().values, wanted):
        late = sorted(set(wanted.tolist()) - set(place.tolist()))
        which = f"groups {late[:8]} of {len(wanted)} did not finish within {DEADLINE:g} seconds"
        raise RunError(f"step {ticket.step}: {which if late else 'a group came back twice'}; look at the sampler")
    parts = sorted(parts, key=lambda part: int(part[0][0]))
    batch, place = join([batch for _, batch, _ in parts]), torch.cat([place for place, _, _ in parts])
    errors = [reason for _, _, reasons in parts for reason in reasons]
    return batch if torch.equal(place, wanted) else batch.select(place.argsort()), errors


def scored(task: Task, rollouts: Rollouts) -> tuple[Batch, list[str]]:
    """Rollouts with their rewards; where one failed, the response is marked and the reason returned.

    What rollouts bring of reward, validity and notes stands; the task's score is added to it.
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
    known = torch.where(rollouts.mask, rollouts.logp_sampler, 0.0)  # whatever stood beside the actions
    rewards = {"reward": reward, "valid": valid & finite, "correct": scores.correct}
    batch = to_batch(rollouts, logp_sampler=known, notes=notes, **rewards)
    if scores.measures:
        batch = batch.add(measures=torch.stack(list(scores.measures.values()), -1), measured=tuple(scores.measures))
    return batch, errors


def total_reward(rollouts: Rollouts, score: Tensor) -> Float[Tensor, "prompt sample #token"]:
    """The task's score plus what the rollouts bring; per token, it lies on actions."""
    parts = [part for part in (score, rollouts.reward) if part is not None]
    if all(part.shape[-1] == 1 for part in parts):
        return sum(parts[1:], parts[0])
    each = [at_actions(rollouts, at_last(rollouts, part)) for part in parts]
    return sum(each[1:], each[0])


def join_notes(first: np.ndarray | None, second: np.ndarray | None) -> np.ndarray | None:
    """Both notes of each response, where both say something."""
    if first is None or second is None:
        return second if first is None else first
    both = ["; ".join(note for note in pair if note) for pair in zip(first.flat, second.flat, strict=True)]
    return np.array(both, dtype=object).reshape(first.shape)


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
    unknown = ["reward", "reward_std", "accuracy"] if not len(scored) else []
    unknown += ["accuracy", "frac_all_right", "frac_all_wrong"] if batch.correct is None else []
    metrics = {name: value for name, value in metrics.items() if name not in unknown}
    if batch.measures is not None and len(scored):
        means = zip(batch.measured, batch.measures[batch.valid].nanmean(0).tolist(), strict=True)
        metrics |= {name: mean for name, mean in means if mean == mean}  # NaN: for no response of the step
    return {**metrics, "num_responses": batch.valid.numel()}


def summarize(step: int, batch: Batch, minis: list[Batch], updates: list[UpdateResult], config: Config) -> Metrics:
    """The means over a step's updates; the sampler's mismatch and the critic's worth before the first of them.

    A step without an update measures only what is masked: what it leaves out is null in its records.
    """
    masked = {} if batch.masked is None else {"frac_masked": batch.masked.double().mean().item()}
    if not updates:
        return masked
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
        gap = mismatch(batch.logp_old, batch, step)
    else:
        gap = mismatch(updates[0].logp, minis[0], step)
    gap |= config.algorithm.critic.measure(batch)
    return metrics | masked | dict(zip(gap, torch.stack(list(gap.values())).tolist(), strict=True))


def check_needs(needs: frozenset[str], sampler: Sampler, learner: Learner) -> None:
    """Refuse, before any work, what neither the sampler nor the learner can bring."""
    missing = needs - sampler.fills - learner.fills
    if missing:
        raise ConfigError(
            f"these choices need {', '.join(sorted(missing))}, which neither {type(sampler).__name__} nor "
            f"{type(learner).__name__} can compute; choose others, or another engine"
        )


def stop_on_trouble(
    step: int, metrics: Metrics, batch: Batch, learner: Learner, records: Records, max_mismatch: float
) -> None:
    """The first non-finite loss, gradient, log-prob or parameter ends the run, with the batch that made it.

    So does a sampler whose log-probs are far from the trainer's: it samples from another policy.
    """
    bad = [k for k, v in metrics.items() if k.removeprefix("value/") in ("loss", "grad_norm") and not abs(v) < np.inf]
    if not bool(batch.logp_sampler.isfinite().all()):
        bad.append("the sampler's log-probs")
    params = list(learner.params().values())  # ‖θ‖² is quick, and may overflow; max |θ| does not
    if not any(torch.stack(torch._foreach_norm(params, order)).isfinite().all() for order in (2, torch.inf)):
        bad.append("the parameters")
    if bad:
        where = records.dump(step, batch)
        raise RunError(
            f"step {step}: {' and '.join(bad)} became infinite or no number. The batch is kept in {where}; what was "
            "saved is from before. Lower --lr, or set --update.max-norm (--critic.lr and --critic.max-norm for value/…)"
        )
    if (gap := metrics.get(MISMATCH, 0.0)) > max_mismatch:
        raise RunError(
            f"step {step}: the log-probs of sampler and trainer are {gap:.3g} apart on average, more than "
            f"--max-mismatch {max_mismatch:g}: they are not the same policy. The batch is kept in "
            f"{records.dump(step, batch)}"
        )
