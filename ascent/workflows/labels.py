"""Files of labelled responses to train on: preference pairs, and responses in steps.

ascent pairs         two responses of a policy per prompt; the true reward, or your function, says which is better
ascent label         responses of a policy, or of a file, compared by a judge (RLAIF)
ascent label-steps   responses of a policy; each step has the mean reward of k continuations of the response up to there

A step's label is an unbiased estimate of V, the value of that prefix under the policy (Wang et al. 2024,
Math-Shepherd); the last step has the response's own reward. Answers of a judge and labels of steps are on disk as soon
as they are known, so the same command continues after an interruption. FILE appears at once, when all is labelled.
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
"""From a prompt and two responses: is the first one better? None: nobody can say."""
PAIRS_AT_ONCE = 256
"""Prompts that are answered at once for pairs."""
STEPS_AT_ONCE = 8
"""Prompts whose responses are continued together, and written down together."""
ROUNDS = 20
"""How many times the wanted number of prompts is tried, at most, before too few pairs are an error."""


def refuse_turns(prompts: Prompts) -> None:
    """Refuse conversations: a file of responses has no place for what was said in between."""
    if prompts.start_episodes is not None:
        raise ConfigError(
            "this task's responses have several turns; pairs and labelled steps are of responses with one"
        )


def refuse_existing(out: Path) -> None:
    """Refuse a file that is already there, or whose folder is not."""
    if out.exists() or not out.parent.is_dir():
        why = "already there, and nothing is overwritten" if out.exists() else f"there is no folder {out.parent}"
        raise ConfigError(f"{out}: {why}. Choose another file")


def side_file(out: Path, kind: str, *job: Any) -> Path:
    """pairs.jsonl -> pairs.ties.jsonl. With a job, its hash is in the name, so that no other job takes the file up."""
    mark = f"-{hashlib.sha256(json.dumps(job).encode()).hexdigest()[:8]}" if job else ""
    return out.with_name(f"{out.stem}.{kind}{mark}{out.suffix}")


# ---- pairs, labelled by a reward or a function -------------------------------------------------------


def make_pairs(
    run: str | Path,
    out: str | Path,
    count: int,
    seed: int = 0,
    label: PairLabel | None = None,
    reward: Any = None,
    step: int | None = None,
) -> Path:
    """`count` pairs of a run's policy on its training prompts, into a file.

    Without `label` the higher reward is chosen: the run's own, or `reward` in its place, for a policy that was
    trained on a learned one. Equal responses, equal rewards and rewards that failed make no pair.
    """
    out = Path(out)
    check_counts(count=count)
    refuse_existing(out)
    loaded = run_policy(run, step)
    if reward is not None:
        rewards = loaded.backend.reward_setting((reward,) if isinstance(reward, str) else reward)
        loaded = replace(loaded, config=replace(loaded.config, task=replace(loaded.config.task, reward=rewards)))
    pairs = draw_pairs(loaded, count, seed, label)
    if len(pairs) < count:
        raise RunError(
            f"only {len(pairs)} of {count} pairs: the policy's two responses to a prompt are mostly equal, or earn the "
            "same. Ask for fewer, or take an earlier checkpoint (--step), which tries more"
        )
    write_jsonl(out, pairs)
    return out


def draw_pairs(loaded: LoadedPolicy, count: int, seed: int, label: PairLabel | None = None) -> list[Row]:
    """`count` pairs, or fewer where ROUNDS × count prompts have no more."""
    with closing(loaded.task()) as task:
        return list(itertools.islice(_pairs(loaded, task, count, seed, label), count))


def _pairs(loaded: LoadedPolicy, task: BoundTask, count: int, seed: int, label: PairLabel | None) -> Iterator[Row]:
    generator = torch.Generator().manual_seed(seed + 5_000_011)
    sampler, once = None, min(PAIRS_AT_ONCE, 2 * count)
    for _ in range(-(-ROUNDS * count // once)):
        prompts = task.draw(once, generator)
        refuse_turns(prompts)
        if sampler is None or loaded.backend.words:  # longer prompts may not fit
            sampler = loaded.sampler(prompts, int(torch.randint(2**31, (1,), generator=generator)))
        rollouts = sampler.generate(prompts, 2)
        prefers = _by_reward(task, rollouts) if label is None else None
        for i in range(len(prompts)):
            chat = task.question(rollouts, i).chat
            tokens = zip(rollouts.response[i], rollouts.mask[i], strict=True)
            first, second = (task.record(ids[mask].tolist()) for ids, mask in tokens)
            if first == second:
                continue
            better = prefers[i] if prefers is not None else label(chat, first, second)  # type: ignore[misc]
            if better is not None:
                chosen, rejected = (first, second) if better else (second, first)
                yield {"prompt": chat, "chosen": chosen, "rejected": rejected}


def _by_reward(task: BoundTask, rollouts: Rollouts) -> list[bool | None]:
    """Does the first response earn more? None where they earn the same, or one has no reward."""
    scores = task.score(rollouts)
    first, second = scores.reward.sum(-1).unbind(1)
    known = scores.valid.all(-1) & (first != second)
    return [better if k else None for better, k in zip((first > second).tolist(), known.tolist(), strict=True)]


# ---- pairs, labelled by a judge ------------------------------------------------------------------------


@dataclass(frozen=True)
class LabelledPairs:
    """How many pairs were labelled, and where they are."""

    pairs: int
    ties: int
    failed: int
    equal: int
    """Pairs of the same response twice: not asked."""
    file: Path
    words: str

    def text(self) -> str:
        more = [f"{self.ties} ties"] + [f"{self.failed} failed"] * bool(self.failed)
        more += [f"{self.equal} with the same response twice, not asked"] * bool(self.equal)
        return f"{self.pairs} pairs in {self.file} ({', '.join(more)}); {self.words}"


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
) -> LabelledPairs:
    """Label the candidates of a file, or of a run's policy, into `out`. What was asked before is not asked again."""
    source, out = Path(source), Path(out)
    refuse_existing(out)
    judge = replace(judge.insist(), cache=judge.cache or str(side_file(out, "answers")))
    if (source / "run.json").exists():
        check_counts(prompts=prompts)
        check_counts(2, samples=samples)
        loaded = run_policy(source)
        source = side_file(out, "candidates", str(source.resolve()), loaded.step, prompts, samples, seed)
        if not source.exists():
            write_jsonl(source, draw_candidates(loaded, prompts, samples, seed))
    candidates = read_candidates(source)
    different = [pair for pair in candidates if pair[1].strip() != pair[2].strip()]
    client = JudgeClient(judge)
    try:  # the first Ctrl-C waits for the answers under way, because they are paid for
        with interruptible(client), progress(len(different), "pairs", show) as advance:
            verdicts = compare_responses(client, different, lambda _: advance(1))
    except KeyboardInterrupt:
        kept = f"the answers received so far are kept in {judge.cache}"
        raise KeyboardInterrupt(f"{kept}; run the same command again to continue ({out} is not written yet)") from None
    won, tied, failed = _sorted(different, verdicts, judge.model)
    for kind, rows in (("ties", tied if ties == "keep" else []), ("failed", failed)):
        side_file(out, kind).unlink(missing_ok=True)
        if rows:
            write_jsonl(side_file(out, kind), rows)
    if len(failed) > max_failed * len(different):
        raise RunError(
            f"the judge failed on {len(failed)} of {len(different)} pairs, more than --max-failed {max_failed:g} "
            f"allows ({side_file(out, 'failed')}). The answers received so far are kept; run the same command again "
            f"to continue. The first failure: {failed[0]['why']}"
        )
    if not won:
        raise RunError(f"of {len(candidates)} pairs, none has a winner: {len(tied)} ties. Nothing is written to {out}")
    write_jsonl(out, won)
    return LabelledPairs(len(won), len(tied), len(failed), len(candidates) - len(different), out, client.counts.words())


def _sorted(
    candidates: Sequence[Pair], verdicts: Sequence[Preference | JudgeError], model: str
) -> tuple[list[Row], list[Row], list[Row]]:
    """Pairs with a winner, ties, and failures with what the judge had said."""
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
    """Rows with a prompt and `responses`, of which every two are compared; or pairs, which are labelled anew."""
    every: list[Pair] = []
    for where, row in read_jsonl(path):
        responses = row.get("responses", [row[name] for name in ("chosen", "rejected") if name in row])
        if "prompt" not in row or not isinstance(responses, list) or len(responses) < 2:
            raise ConfigError(
                f"{where}: a line has a prompt and at least two responses, or chosen and rejected; this one has "
                f"{', '.join(row) or 'nothing'}"
            )
        for response in responses:
            if not isinstance(response, str):
                raise ConfigError(f"{where}: a response is words, and one is {response!r:.80}")
        answer = row.get("answer")
        answer = answer if answer is None or isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
        prompt = read_prompt(row["prompt"], f"{where}, column prompt")
        every += [(prompt, one, other, answer) for one, other in itertools.combinations(responses, 2)]
    return every


def draw_candidates(loaded: LoadedPolicy, prompts: int, samples: int, seed: int) -> list[Row]:
    """`samples` responses of a policy to each of `prompts` training prompts, which the seed decides."""
    if not loaded.backend.words:
        raise ConfigError(f"{loaded.run}: its responses are not words, and a judge reads words")
    rows = []
    with closing(loaded.task()) as task:
        drawn = task.draw(prompts, torch.Generator().manual_seed(seed + 5_000_011))
        refuse_turns(drawn)
        rollouts = loaded.sampler(drawn, seed).generate(drawn, samples)
        for i, (group, masks) in enumerate(zip(rollouts.response, rollouts.mask, strict=True)):
            question = task.question(rollouts, i)
            words = [task.words(tokens[mask].tolist()) for tokens, mask in zip(group, masks, strict=True)]
            answer = {} if question.answer is None else {"answer": question.answer}
            rows.append({"prompt": question.prompt, "responses": words, **answer})
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
    """Responses of a run's policy to training prompts, cut into steps, each step with its label."""
    run, out = Path(run), Path(out)
    refuse_existing(out)
    check_counts(prompts=prompts, samples=samples, rollouts=rollouts)
    loaded = run_policy(run)
    kept = side_file(out, "partial", str(run.resolve()), loaded.step, prompts, samples, rollouts, seed, separator)
    with closing(loaded.task()) as task, progress(prompts, "prompts", show) as advance, open(kept, "ab") as file:
        drawn = task.draw(prompts, torch.Generator().manual_seed(seed + 6_000_011))
        done = len(read_lines(kept))  # one line for every chunk of prompts
        file.truncate(kept.read_bytes().rfind(b"\n") + 1)  # an incomplete line is written anew
        advance(min(done * STEPS_AT_ONCE, prompts))
        for chunk in range(done, -(-prompts // STEPS_AT_ONCE)):
            part = drawn[chunk * STEPS_AT_ONCE : (chunk + 1) * STEPS_AT_ONCE]
            labeller = Labeller(loaded, task, part, rollouts, separator, seed + 7_000_003 * (chunk + 1))
            file.write(json.dumps({"rows": labeller.rows(samples)}).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
            advance(len(part))
    rows = [row for chunk in read_lines(kept) for row in chunk["rows"]]
    if not rows:
        raise RunError(f"of {prompts * samples} responses none could be labelled: all were empty, or the reward failed")
    write_jsonl(out, rows)
    kept.unlink()
    return out


class Labeller:
    """Labels the steps of responses to a few prompts. The seed decides all that is drawn."""

    def __init__(
        self, loaded: LoadedPolicy, task: BoundTask, prompts: Prompts, rollouts: int, separator: str, seed: int
    ):
        self.loaded, self.task, self.prompts, self.count, self.separator = loaded, task, prompts, rollouts, separator
        refuse_turns(prompts)
        self.sampler = loaded.sampler(prompts, seed)

    def rows(self, samples: int) -> list[Row]:
        drawn = self.sampler.generate(self.prompts, samples)
        batch, errors = score_rollouts(self.task, drawn)
        if errors and not bool(batch.valid.any()):
            raise RunError(f"the reward failed on every response. The first: {errors[0]}")
        rows: list[Row] = []
        places: list[int] = []
        prefixes: list[list[int]] = []
        for i, s in batch.valid.nonzero().tolist():
            ids = drawn.response[i, s][drawn.mask[i, s]].tolist()
            steps, ends = self.task.cut_steps(ids, self.separator)
            if steps and "" not in steps:
                row = {"prompt": self.task.question(drawn, i).prompt, "steps": steps}
                cut = bool(self.task.ends) and ids[-1] not in self.task.ends  # a stop string leaves no end token either
                row |= {"cut": cut, "labels": [float(batch.reward[i, s].sum())]}
                rows.append(row | {"rollouts": self.count})
                prefixes += [ids[: end + 1] for end in ends[:-1]]
                places += [i] * (len(ends) - 1)
        values = iter(self.values(places, prefixes))
        for row in rows:
            row["labels"] = [*itertools.islice(values, len(row["steps"]) - 1), *row["labels"]]
        return [row for row in rows if None not in row["labels"]]

    def values(self, places: list[int], prefixes: list[list[int]]) -> list[float | None]:
        """The mean reward of continuations of each prefix of the prompt at its place; None where all rewards failed."""
        if not prefixes:
            return []
        batch, _ = score_rollouts(self.task, self.continued(self.prompts[torch.tensor(places)], prefixes))
        count = batch.valid.sum(1)
        mean = torch.where(batch.valid, batch.reward.sum(-1), 0.0).sum(1) / count.clamp(min=1)
        return [value if some else None for value, some in zip(mean.tolist(), (count > 0).tolist(), strict=True)]

    def continued(self, prompts: Prompts, prefixes: list[list[int]]) -> Rollouts:
        """Whole responses: `count` continuations of every prefix, each up to its end token."""
        loaded, ends = self.loaded, self.task.ends
        groups = loaded.backend.continue_responses(
            loaded.config, loaded.policy, prompts, prefixes, self.count, self.sampler
        )
        for prefix, group in zip(prefixes, groups, strict=True):  # no end token stands inside a prefix
            for ids in group:
                del ids[next((t + 1 for t in range(len(prefix), len(ids)) if ids[t] in ends), len(ids)) :]
        truncated = torch.tensor([[bool(ends) and ids[-1] not in ends for ids in group] for group in groups])
        response, mask = pad_responses(groups)
        more: dict[str, Any] = {"truncated": truncated, "can_end": bool(ends), "problem": prompts.problem}
        return Rollouts(prompts.prompt, response, mask, torch.zeros(mask.shape), self.task.space.limit, **more)
