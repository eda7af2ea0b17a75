"""Responses that are to be compared: read from a file, or drawn from a run's policy."""

from __future__ import annotations

import hashlib
import itertools
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ascent.judge.verdicts import Prompt
from ascent.tasks.text.jsonl import read_lines
from ascent.tasks.text.preferences import write_pairs
from ascent.tasks.text.rows import prompt_of
from ascent.trained.loaded import Loaded, of_run
from ascent.types import Refused

Row = dict[str, Any]


class Candidate(NamedTuple):
    """Two responses to a prompt, of which nobody has said yet which is better."""

    prompt: Prompt
    one: str
    other: str
    answer: str | None = None


def side_file(out: Path, kind: str) -> Path:
    """pairs.jsonl -> pairs.ties.jsonl."""
    return out.with_name(f"{out.stem}.{kind}{out.suffix}")


def candidates(source: str | Path, out: Path, prompts: int, samples: int, seed: int) -> list[Candidate]:
    """Of a JSONL file, or drawn from a run's policy and kept beside `out`, so that going on asks about the same."""
    path = Path(source)
    if not (path / "run.json").exists():
        return read_candidates(path)
    for name, value, least in (("prompts", prompts, 1), ("samples", samples, 2)):
        if value < least:
            raise Refused(f"--{name} is {value}: it has to be at least {least}")
    loaded = of_run(path)
    job = json.dumps([str(path.resolve()), loaded.step, prompts, samples, seed])
    kept = side_file(out, f"candidates-{hashlib.sha256(job.encode()).hexdigest()[:8]}")
    if not kept.exists():
        write_pairs(kept, drawn(loaded, prompts, samples, seed))
    return read_candidates(kept)


def read_candidates(path: Path) -> list[Candidate]:
    """Rows with a prompt and `responses`, of which every two are compared; or pairs, to be labelled anew."""
    found: list[Candidate] = []
    for line, row in read_lines(path):
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
        prompt = prompt_of(row["prompt"], f"{where}, column prompt")
        found += [Candidate(prompt, one, other, answer) for one, other in itertools.combinations(responses, 2)]
    return found


def drawn(loaded: Loaded, prompts: int, samples: int, seed: int) -> list[Row]:
    """So many responses of a policy to each of so many training prompts, which the seed decides."""
    from ascent.tasks.text.tokenized import Tokenized

    task = loaded.task()
    try:
        if not isinstance(task, Tokenized):
            raise Refused(f"{loaded.run}: its responses are no words, and a judge reads words")
        prompt = task.draw(prompts, torch.Generator().manual_seed(seed + 5_000_011))
        rollouts = loaded.sampler(prompt, seed).generate(prompt, samples)
        rows = []
        for ids, group, masks in zip(prompt.tolist(), rollouts.response, rollouts.mask, strict=True):
            problem = task.problem(ids)
            assert problem is not None
            words = [task.words(tokens[mask].tolist()) for tokens, mask in zip(group, masks, strict=True)]
            answer = {} if problem.answer is None else {"answer": problem.answer}
            rows.append({"prompt": shown_prompt(task.task, problem), "responses": words, **answer})
        return rows
    finally:
        getattr(task, "close", lambda: None)()


def shown_prompt(task: Any, problem: Any) -> Prompt:
    """The prompt as the policy was shown it: words alone where no more was said."""
    messages = task.messages(problem)
    return messages if len(messages) > 1 else messages[0]["content"]
