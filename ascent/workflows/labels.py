"""Create labeled training data from a policy: preference pairs, and responses with step labels.

ascent pairs         two responses per prompt, compared by the true reward or by a function
ascent label         responses of a policy or of a file, compared by a judge (RLAIF)
ascent label-steps   responses in steps; a step's label is the mean reward of k continuations after it

A step's label is an unbiased estimate of V, the value of that prefix under the policy (Wang et al. 2024,
Math-Shepherd); the label of the last step is the reward of the response. A judge's answers and the labels of steps are
written to disk immediately, so the same command continues after an interruption. The output file appears at the end.
"""

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from ascent.api import interruptible
from ascent.build.backend import BoundTask
from ascent.core.errors import ConfigError, RunError
from ascent.core.loop import score_rollouts
from ascent.core.types import Prompts, Rollouts, check_counts
from ascent.rewards.judge.judge_client import JudgeClient, JudgeError, JudgeParseError
from ascent.rewards.judge.judge_rewards import Pair, Preference, compare_responses
from ascent.rewards.judge.judge_settings import Judge
from ascent.runs.display.terminal import progress
from ascent.runs.untrusted_files import read_lines
from ascent.tasks.scoring import pad_responses
from ascent.tasks.text.table_tasks import SEPARATOR, read_prompt
from ascent.tasks.user_files import read_jsonl, write_jsonl
from ascent.workflows.loaded_policy import LoadedPolicy, Row, run_policy

PairLabel = Callable[[Any, Any, Any], bool | None]
"""Returns whether the first of two responses to a prompt is better; None: undecided."""
PAIR_BATCH_PROMPTS = 256
"""Number of prompts that are sampled at a time for pairs."""
PROMPTS_PER_CHUNK = 8
"""Number of prompts whose responses are continued and written together."""
MAX_PROMPTS_PER_PAIR = 20
"""Maximum number of prompts per requested pair before too few pairs are an error."""


def check_single_turn(prompts: Prompts) -> None:
    """Raise ConfigError for multi-turn tasks: the files have no place for observations."""
    if prompts.start_episodes is not None:
        raise ConfigError("pairs and step labels need single-turn responses, but this task has several turns")


def check_new_file(out: Path) -> None:
    """Raise ConfigError for a file that exists or whose folder does not exist."""
    if out.exists() or not out.parent.is_dir():
        why = "already there, and nothing is overwritten" if out.exists() else f"there is no folder {out.parent}"
        raise ConfigError(f"{out}: {why}. Choose another file")


def sibling_file(out: Path, kind: str, *job: Any) -> Path:
    """Return pairs.ties.jsonl for pairs.jsonl. With a job, its hash is part of the name."""
    suffix = f"-{hashlib.sha256(json.dumps(job).encode()).hexdigest()[:8]}" if job else ""
    return out.with_name(f"{out.stem}.{kind}{suffix}{out.suffix}")


# ---- pairs, labeled by a reward or a function -------------------------------------------------------


def make_pairs(
    run: str | Path,
    out: str | Path,
    count: int,
    seed: int = 0,
    label: PairLabel | None = None,
    reward: Any = None,
    step: int | None = None,
) -> Path:
    """Write `count` pairs of a run's policy on its training prompts to a file.

    Without `label` the response with the higher reward is chosen. `reward` replaces the run's reward, for a policy that
    was trained on a learned one. Equal responses, equal rewards and failed rewards make no pair.
    """
    out = Path(out)
    check_counts(count=count)
    check_new_file(out)
    loaded = run_policy(run, step)
    if reward is not None:
        rewards = loaded.backend.reward_setting((reward,) if isinstance(reward, str) else reward)
        loaded = replace(loaded, config=replace(loaded.config, task=replace(loaded.config.task, reward=rewards)))
    pairs = sample_pairs(loaded, count, seed, label)
    if len(pairs) < count:
        raise RunError(
            f"only {len(pairs)} of {count} pairs: the policy's two responses to a prompt are mostly equal, or have "
            "equal rewards. Set a smaller count, or an earlier checkpoint (--step), which explores more"
        )
    write_jsonl(out, pairs)
    return out


def sample_pairs(loaded: LoadedPolicy, count: int, seed: int, label: PairLabel | None = None) -> list[Row]:
    """Return `count` pairs, or fewer if MAX_PROMPTS_PER_PAIR × count prompts do not yield more."""
    with closing(loaded.task()) as task:
        return list(itertools.islice(_pairs(loaded, task, count, seed, label), count))


def _pairs(loaded: LoadedPolicy, task: BoundTask, count: int, seed: int, label: PairLabel | None) -> Iterator[Row]:
    generator = torch.Generator().manual_seed(seed + 5_000_011)
    engine, batch_prompts = None, min(PAIR_BATCH_PROMPTS, 2 * count)
    for _ in range(-(-MAX_PROMPTS_PER_PAIR * count // batch_prompts)):
        prompts = task.draw(batch_prompts, generator)
        check_single_turn(prompts)
        if engine is None or loaded.backend.uses_text:  # an engine is sized for its prompts
            engine = loaded.sampler(prompts, int(torch.randint(2**31, (1,), generator=generator)))
        rollouts = engine.generate(prompts, 2)
        prefers = _by_reward(task, rollouts) if label is None else None
        for i in range(len(prompts)):
            chat = task.readable_prompt(rollouts, i).messages
            tokens = zip(rollouts.response[i], rollouts.mask[i], strict=True)
            first, second = (task.response_record(ids[mask].tolist()) for ids, mask in tokens)
            if first == second:
                continue
            better = prefers[i] if prefers is not None else label(chat, first, second)  # type: ignore[misc]
            if better is not None:
                chosen, rejected = (first, second) if better else (second, first)
                yield {"prompt": chat, "chosen": chosen, "rejected": rejected}


def _by_reward(task: BoundTask, rollouts: Rollouts) -> list[bool | None]:
    """Return whether the first response of each pair has the higher reward; None if equal or failed."""
    scores = task.score(rollouts)
    first, second = scores.reward.sum(-1).unbind(1)
    comparable = scores.valid.all(-1) & (first != second)
    return [
        is_better if ok else None for is_better, ok in zip((first > second).tolist(), comparable.tolist(), strict=True)
    ]


# ---- pairs, labeled by a judge ------------------------------------------------------------------------


@dataclass(frozen=True)
class LabeledPairs:
    """The result of labeling: counts, the file and the judge's usage."""

    pairs: int
    ties: int
    failed: int
    equal: int
    """Pairs of two equal responses, which the judge does not see."""
    file: Path
    words: str

    def text(self) -> str:
        others = [f"{self.ties} ties"] + [f"{self.failed} failed"] * bool(self.failed)
        others += [f"{self.equal} with two equal responses, not judged"] * bool(self.equal)
        return f"{self.pairs} pairs in {self.file} ({', '.join(others)}); {self.words}"


def label_pairs(
    source: str | Path,
    out: str | Path,
    judge: Judge,
    *,
    prompts: int = 64,
    samples: int = 2,
    seed: int = 0,
    ties: Literal["keep", "drop"] = "keep",
    max_failed: float = 0.1,
    show: bool = True,
) -> LabeledPairs:
    """Label the candidates of a file or of a run's policy and write them to `out`; reuse the judge's cached answers."""
    source, out = Path(source), Path(out)
    check_new_file(out)
    judge = replace(judge.validated(), cache=judge.cache or str(sibling_file(out, "answers")))
    if (source / "run.json").exists():
        check_counts(prompts=prompts)
        check_counts(2, samples=samples)
        loaded = run_policy(source)
        source = sibling_file(out, "candidates", str(source.resolve()), loaded.step, prompts, samples, seed)
        if not source.exists():
            write_jsonl(source, sample_candidates(loaded, prompts, samples, seed))
    candidates = read_candidates(source)
    different = [pair for pair in candidates if pair[1].strip() != pair[2].strip()]
    client = JudgeClient(judge)
    try:  # the first Ctrl-C waits for pending answers, because they are paid for
        with interruptible(client), progress(len(different), "pairs", show) as advance:
            verdicts = compare_responses(client, different, lambda _: advance(1))
    except KeyboardInterrupt:
        cached = f"the answers received so far are kept in {judge.cache}"
        raise KeyboardInterrupt(
            f"{cached}; run the same command again to continue ({out} is not written yet)"
        ) from None
    won, tied, failed = _split_by_verdict(different, verdicts, judge.model)
    for kind, rows in (("ties", tied if ties == "keep" else []), ("failed", failed)):
        sibling_file(out, kind).unlink(missing_ok=True)
        if rows:
            write_jsonl(sibling_file(out, kind), rows)
    if len(failed) > max_failed * len(different):
        raise RunError(
            f"the judge failed on {len(failed)} of {len(different)} pairs, more than --max-failed {max_failed:g} "
            f"allows ({sibling_file(out, 'failed')}). The answers received so far are kept; run the same command again "
            f"to continue. The first failure: {failed[0]['why']}"
        )
    if not won:
        raise RunError(f"of {len(candidates)} pairs, none has a winner: {len(tied)} ties. Nothing is written to {out}")
    write_jsonl(out, won)
    return LabeledPairs(len(won), len(tied), len(failed), len(candidates) - len(different), out, client.usage.summary())


def _split_by_verdict(
    candidates: Sequence[Pair], verdicts: Sequence[Preference | JudgeError], model: str
) -> tuple[list[Row], list[Row], list[Row]]:
    """Split pairs into those with a winner, ties, and failures with the judge's raw answer."""
    won, tied, failed = [], [], []
    for (prompt, *both, _), verdict in zip(candidates, verdicts, strict=True):
        row = {"prompt": prompt, "responses": both}
        if isinstance(verdict, JudgeError):
            raw = verdict.raw if isinstance(verdict, JudgeParseError) else None
            failed.append(row | {"error": type(verdict).__name__, "why": str(verdict), "raw": raw})
        elif verdict.winner is None:
            tied.append(row | {"verdicts": list(verdict.verdicts), "judge": model})
        else:
            chosen = {"chosen": both[verdict.winner], "rejected": both[1 - verdict.winner]}
            won.append({"prompt": prompt, **chosen, "judge": model})
    return won, tied, failed


def read_candidates(path: Path) -> list[Pair]:
    """Read rows with a prompt and `responses`, all pairs of which are compared, or pairs, which are labeled again."""
    pairs: list[Pair] = []
    for where, row in read_jsonl(path):
        responses = row.get("responses", [row[name] for name in ("chosen", "rejected") if name in row])
        if "prompt" not in row or not isinstance(responses, list) or len(responses) < 2:
            raise ConfigError(
                f"{where}: a line has a prompt and at least two responses, or chosen and rejected; this one has "
                f"{', '.join(row) or 'nothing'}"
            )
        for response in responses:
            if not isinstance(response, str):
                raise ConfigError(f"{where}: a response must be text, not {response!r:.80}")
        answer = row.get("answer")
        answer = answer if answer is None or isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
        prompt = read_prompt(row["prompt"], f"{where}, column prompt")
        pairs += [(prompt, first, second, answer) for first, second in itertools.combinations(responses, 2)]
    return pairs


def sample_candidates(loaded: LoadedPolicy, prompts: int, samples: int, seed: int) -> list[Row]:
    """Sample `samples` responses to each of `prompts` training prompts, reproducibly by the seed."""
    if not loaded.backend.uses_text:
        raise ConfigError(f"{loaded.run}: a judge needs text, and this policy does not generate text")
    rows = []
    with closing(loaded.task()) as task:
        drawn = task.draw(prompts, torch.Generator().manual_seed(seed + 5_000_011))
        check_single_turn(drawn)
        rollouts = loaded.sampler(drawn, seed).generate(drawn, samples)
        for i, (group, masks) in enumerate(zip(rollouts.response, rollouts.mask, strict=True)):
            question = task.readable_prompt(rollouts, i)
            words = [task.response_text(tokens[mask].tolist()) for tokens, mask in zip(group, masks, strict=True)]
            answer = {} if question.answer is None else {"answer": question.answer}
            rows.append({"prompt": question.content, "responses": words, **answer})
    return rows


# ---- steps ----------------------------------------------------------------------------------------------


def label_steps(
    run: str | Path,
    out: str | Path,
    *,
    prompts: int = 64,
    samples: int = 1,
    rollouts: int = 8,
    seed: int = 0,
    separator: str = SEPARATOR,
    show: bool = True,
) -> Path:
    """Write responses of a run's policy to training prompts, split into labeled steps."""
    run, out = Path(run), Path(out)
    check_new_file(out)
    check_counts(prompts=prompts, samples=samples, rollouts=rollouts)
    loaded = run_policy(run)
    partial = sibling_file(out, "partial", str(run.resolve()), loaded.step, prompts, samples, rollouts, seed, separator)
    with closing(loaded.task()) as task, progress(prompts, "prompts", show) as advance, open(partial, "ab") as file:
        drawn = task.draw(prompts, torch.Generator().manual_seed(seed + 6_000_011))
        done = len(read_lines(partial))  # one line for every chunk of prompts
        file.truncate(partial.read_bytes().rfind(b"\n") + 1)  # drop an incomplete line
        advance(min(done * PROMPTS_PER_CHUNK, prompts))
        for chunk in range(done, -(-prompts // PROMPTS_PER_CHUNK)):
            part = drawn[chunk * PROMPTS_PER_CHUNK : (chunk + 1) * PROMPTS_PER_CHUNK]
            labeler = StepLabeler(loaded, task, part, rollouts, separator, seed + 7_000_003 * (chunk + 1))
            file.write(json.dumps({"rows": labeler.rows(samples)}).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
            advance(len(part))
    rows = [row for chunk in read_lines(partial) for row in chunk["rows"]]
    if not rows:
        raise RunError(f"of {prompts * samples} responses none could be labeled: they were empty, or the reward failed")
    write_jsonl(out, rows)
    partial.unlink()
    return out


class StepLabeler:
    """Labels the steps of responses to a few prompts, reproducibly by the seed."""

    def __init__(
        self, loaded: LoadedPolicy, task: BoundTask, prompts: Prompts, rollouts: int, separator: str, seed: int
    ):
        self.loaded, self.task, self.prompts, self.count, self.separator = loaded, task, prompts, rollouts, separator
        check_single_turn(prompts)
        self.sampler = loaded.sampler(prompts, seed)

    def rows(self, samples: int) -> list[Row]:
        """Sample responses to every prompt and return those whose steps could all be labeled."""
        drawn = self.sampler.generate(self.prompts, samples)
        batch, errors = score_rollouts(self.task, drawn)
        if errors and not bool(batch.valid.any()):
            raise RunError(f"the reward failed on every response. The first error: {errors[0]}")
        rows: list[Row] = []
        places: list[int] = []
        prefixes: list[list[int]] = []
        for i, s in batch.valid.nonzero().tolist():
            ids = drawn.response[i, s][drawn.mask[i, s]].tolist()
            steps, ends = self.task.split_steps(ids, self.separator)
            if steps and "" not in steps:
                row = {"prompt": self.task.readable_prompt(drawn, i).content, "steps": steps}
                cut = (
                    bool(self.task.stop_token_ids) and ids[-1] not in self.task.stop_token_ids
                )  # a stop string leaves no end token either
                row |= {"cut": cut, "labels": [float(batch.reward[i, s].sum())]}
                rows.append(row | {"rollouts": self.count})
                prefixes += [ids[: end + 1] for end in ends[:-1]]
                places += [i] * (len(ends) - 1)
        values = iter(self.prefix_values(places, prefixes))
        for row in rows:
            row["labels"] = [*itertools.islice(values, len(row["steps"]) - 1), *row["labels"]]
        return [row for row in rows if None not in row["labels"]]

    def prefix_values(self, places: list[int], prefixes: list[list[int]]) -> list[float | None]:
        """Return the mean reward of continuations of each prefix; None if all rewards failed."""
        if not prefixes:
            return []
        batch, _ = score_rollouts(self.task, self.continue_prefixes(self.prompts[torch.tensor(places)], prefixes))
        count = batch.valid.sum(1)
        mean = torch.where(batch.valid, batch.reward.sum(-1), 0.0).sum(1) / count.clamp(min=1)
        return [value if some else None for value, some in zip(mean.tolist(), (count > 0).tolist(), strict=True)]

    def continue_prefixes(self, prompts: Prompts, prefixes: list[list[int]]) -> Rollouts:
        """Return `count` continuations of every prefix as complete responses, up to the end token."""
        loaded, ends = self.loaded, self.task.stop_token_ids
        groups = loaded.backend.continue_responses(
            loaded.config, loaded.policy, prompts, prefixes, self.count, self.sampler
        )
        for prefix, group in zip(prefixes, groups, strict=True):  # prefixes contain no end token
            for ids in group:
                del ids[next((t + 1 for t in range(len(prefix), len(ids)) if ids[t] in ends), len(ids)) :]
        truncated = torch.tensor([[bool(ends) and ids[-1] not in ends for ids in group] for group in groups])
        response, mask = pad_responses(groups)
        extra: dict[str, Any] = {"truncated": truncated, "can_end": bool(ends), "problem": prompts.problem}
        return Rollouts(prompts.prompt, response, mask, torch.zeros(mask.shape), self.task.space.limit, **extra)
