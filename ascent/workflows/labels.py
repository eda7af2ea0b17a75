"""`ascent label`: preference pairs, labelled by a judge (RLAIF).

Every answer is on disk before it is used, so the same command continues after an interruption. The pairs are written
at once, when all are labelled.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from ascent.api import interruptible
from ascent.core.types import Refused, Trouble
from ascent.rewards.judge.client import JudgeClient, JudgeError, Unparsed
from ascent.rewards.judge.settings import Judge, Prompt
from ascent.rewards.judge.verdicts import Preference, compare_responses
from ascent.tasks.files import read_jsonl
from ascent.tasks.text.offline.files import write_pairs
from ascent.tasks.text.rows import read_prompt
from ascent.workflows.policy import LoadedPolicy, Row, run_policy


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
    out = Path(out)
    check_out(out)
    judge = replace(judge.insist(), cache=judge.cache or str(side_file(out, "answers")))
    candidates = find_candidates(source, out, prompts, samples, seed)
    different = [c for c in candidates if c.one.strip() != c.other.strip()]
    client = JudgeClient(judge)
    try:  # the first Ctrl-C waits for the answers under way, because they are paid for
        with interruptible(client), progress(len(different), "pairs", show) as advance:
            verdicts = compare_responses(client, different, lambda _: advance(1))
    except KeyboardInterrupt:
        kept = f"the answers received so far are kept in {judge.cache}"
        raise KeyboardInterrupt(f"{kept}; run the same command again to continue ({out} is not written yet)") from None
    judged = list(zip(different, verdicts, strict=True))
    won, tied, failed = _sorted(judged, judge.model)
    for kind, rows in (("ties", tied if ties == "keep" else []), ("failed", failed)):
        side_file(out, kind).unlink(missing_ok=True)
        if rows:
            write_pairs(side_file(out, kind), rows)
    if len(failed) > max_failed * len(judged):
        raise Trouble(
            f"the judge failed on {len(failed)} of {len(judged)} pairs, more than --max-failed {max_failed:g} allows "
            f"({side_file(out, 'failed')}). The answers received so far are kept; run the same command again to "
            f"continue. The first failure: {failed[0]['why']}"
        )
    if not won:
        raise Trouble(f"of {len(candidates)} pairs, none has a winner: {len(tied)} ties. Nothing is written to {out}")
    write_pairs(out, won)
    return LabelledPairs(len(won), len(tied), len(failed), len(candidates) - len(different), out, client.counts.words())


def check_out(out: Path) -> None:
    if out.exists():
        raise Refused(f"--out {out}: already there, and nothing is overwritten. Choose another file")
    if not out.parent.is_dir():
        raise Refused(f"--out {out}: there is no folder {out.parent}")


def _sorted(
    judged: Sequence[tuple[Candidate, Preference | JudgeError]], model: str
) -> tuple[list[Row], list[Row], list[Row]]:
    """Pairs with a winner, ties, and failures with what the judge had said."""
    won: list[Row] = []
    tied: list[Row] = []
    failed: list[Row] = []
    for candidate, verdict in judged:
        row = {"prompt": candidate.prompt, "responses": [candidate.one, candidate.other]}
        if isinstance(verdict, JudgeError):
            raw = verdict.raw if isinstance(verdict, Unparsed) else None
            failed.append(row | {"error": type(verdict).__name__, "why": str(verdict), "raw": raw})
        elif verdict.winner is None:
            tied.append(row | {"verdicts": list(verdict.verdicts), "judge": model})
        else:
            both = row["responses"]
            chosen = {"chosen": both[verdict.winner], "rejected": both[1 - verdict.winner]}
            won.append({"prompt": candidate.prompt, **chosen, "judge": model})
    return won, tied, failed


# ---- candidates: responses that are to be compared ---------------------------------------------------


class Candidate(NamedTuple):
    """Two responses to a prompt that are to be compared."""

    prompt: Prompt
    one: str
    other: str
    answer: str | None = None


def side_file(out: Path, kind: str) -> Path:
    """pairs.jsonl -> pairs.ties.jsonl."""
    return out.with_name(f"{out.stem}.{kind}{out.suffix}")


def find_candidates(source: str | Path, out: Path, prompts: int, samples: int, seed: int) -> list[Candidate]:
    """Those of a JSONL file; or a run's policy draws them, and they are kept beside `out` for a resumed command."""
    path = Path(source)
    if not (path / "run.json").exists():
        return read_candidates(path)
    for name, value, least in (("prompts", prompts, 1), ("samples", samples, 2)):
        if value < least:
            raise Refused(f"--{name} is {value}: it has to be at least {least}")
    loaded = run_policy(path)
    job = json.dumps([str(path.resolve()), loaded.step, prompts, samples, seed])
    kept = side_file(out, f"candidates-{hashlib.sha256(job.encode()).hexdigest()[:8]}")
    if not kept.exists():
        write_pairs(kept, draw_candidates(loaded, prompts, samples, seed))
    return read_candidates(kept)


def read_candidates(path: Path) -> list[Candidate]:
    """Rows with a prompt and `responses`, of which every two are compared; or pairs, which are labelled anew."""
    every: list[Candidate] = []
    for line, row in read_jsonl(path):
        where = f"{path}, line {line}"
        responses = row.get("responses", [row[name] for name in ("chosen", "rejected") if name in row])
        if "prompt" not in row or not isinstance(responses, list) or len(responses) < 2:
            raise Refused(
                f"{where}: a line has a prompt and at least two responses, or chosen and rejected; this one has "
                f"{', '.join(row) or 'nothing'}"
            )
        for response in responses:
            if not isinstance(response, str):
                raise Refused(f"{where}: a response is words, and one is {response!r:.80}")
        answer = row.get("answer")
        answer = answer if answer is None or isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
        prompt = read_prompt(row["prompt"], f"{where}, column prompt")
        every += [Candidate(prompt, one, other, answer) for one, other in itertools.combinations(responses, 2)]
    return every


def draw_candidates(loaded: LoadedPolicy, prompts: int, samples: int, seed: int) -> list[Row]:
    """`samples` responses of a policy to each of `prompts` training prompts, which the seed decides."""
    if not loaded.backend.words:
        raise Refused(f"{loaded.run}: its responses are not words, and a judge reads words")
    task = loaded.task()
    try:
        drawn = task.draw(prompts, torch.Generator().manual_seed(seed + 5_000_011))
        rollouts = loaded.sampler(drawn, seed).generate(drawn, samples)
        rows = []
        for i, (group, masks) in enumerate(zip(rollouts.response, rollouts.mask, strict=True)):
            question = task.question(rollouts, i)
            words = [task.words(tokens[mask].tolist()) for tokens, mask in zip(group, masks, strict=True)]
            answer = {} if question.answer is None else {"answer": question.answer}
            rows.append({"prompt": question.prompt, "responses": words, **answer})
        return rows
    finally:
        task.close()


# ---- what a person sees and does meanwhile ----------------------------------------------------------


@contextmanager
def progress(total: int, what: str, show: bool) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, ten lines elsewhere; call it with how many more are done."""
    if show and not sys.stderr.isatty():
        done = 0

        def line(more: int) -> None:
            nonlocal done
            done += more
            if done == total or done * 10 // total > (done - more) * 10 // total:
                print(f"{done}/{total} {what}", file=sys.stderr, flush=True)

        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

    columns = (SpinnerColumn(), TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not show) as bar:
        task = bar.add_task("", total=total)
        yield lambda more: bar.advance(task, more)
