"""Load the policy of a run or a bare model to sample from it, score it or export it."""

import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ascent.build.backend import SAMPLING_SETTINGS, Backend, BoundTask
from ascent.build.backends import backend_of
from ascent.build.reward_loading import bind_task, check_rewards
from ascent.build.trained_run import Run, load_policy
from ascent.core.algorithms import Algorithm
from ascent.core.config import Config
from ascent.core.errors import ConfigError
from ascent.core.loop import score_rollouts
from ascent.core.menu import name_of
from ascent.core.protocols import RolloutEngine
from ascent.core.types import Batch, Prompts, Rollouts, check_counts, to_batch
from ascent.runs import checkpoint
from ascent.runs.display.terminal import printable
from ascent.runs.recorded_conversation import ConversationMessage, conversation, conversation_lines, ending
from ascent.runs.rollout_files import TokenTexts, sampled_rows
from ascent.runs.run_info import task_name
from ascent.runs.run_reader import check_trains_policy
from ascent.settings import configure
from ascent.tasks.text import TextTask
from ascent.workflows.model_card import Hub, model_card

Row = dict[str, Any]
Source = str | Path | None


@dataclass(frozen=True)
class LoadedPolicy:
    """A policy with its task and sampling parameters (both in `config`)."""

    config: Config
    policy: Any
    run: Path | None = None
    step: int | None = None
    """The step of the checkpoint, if the policy comes from a run."""

    @property
    def backend(self) -> Backend:
        return backend_of(self.config)

    def about(self) -> dict[str, Any]:
        """Return the source of the policy and its sampling parameters, for records."""
        model = getattr(self.config.policy, "model", None)
        origin = {"run": None if self.run is None else str(self.run), "step": self.step, "model": model}
        settings = {name: getattr(self.config, name) for name in SAMPLING_SETTINGS}
        return origin | {"task": task_name(self.config)} | settings

    def task(self) -> BoundTask:
        """Return the task, bound to the policy's tokenizer and its rewards. The caller closes it."""
        check_rewards(self.backend, self.config.task)
        return bind_task(self.backend, self.config.task, self.policy)

    def unscored_task(self) -> BoundTask:
        """Return the task without learned rewards and judges, to encode prompts and decode responses."""
        return self.backend.bind(self.config.task, self.policy, {})

    def sampler(self, prompts: Prompts, seed: int) -> RolloutEngine:
        """Return a rollout engine for these prompts, seeded with `seed`."""
        return self.backend.engine_for_prompts(self.config, self.policy, prompts, seed, self.step or 0)


def resolve_policy(
    run: Source, model: Source, task: Any, settings: dict[str, Any], step: int | None, best: bool, **changes: Any
) -> LoadedPolicy:
    """Load the policy of a run or a bare model, with a task; `own` or None is the run's task."""
    if (run is None) == (model is None):
        raise ConfigError("set either a run or a model")
    if task is None and settings:
        raise ConfigError(f"{', '.join(settings)}: these are settings of a task, but no task is set")
    if model is not None:
        return model_policy(str(model), task, settings, **changes)
    assert run is not None
    other = None if task is None or task == "own" else configure(task, settings).task
    return run_policy(run, step, best, other, **changes)


def run_policy(
    run: str | Path, step: int | None = None, best: bool = False, task: Any = None, **changes: Any
) -> LoadedPolicy:
    """Load the newest checkpoint of a run (or that of a step, or the best), with its task or another one."""
    trained = Run(run)
    path, config = trained.checkpoint(step, best), trained.config
    check_trains_policy(config, trained.folder)
    if task is not None:
        flag = f"--task {name_of(task)}"
        if task.kind != config.task.kind:
            raise ConfigError(
                f"{flag}: this is a {task.kind} task, but the run {run} was trained on {task_name(config)}"
            )
        backend_of(config).check_task(config, task, flag)
        config = replace(config, algorithm=Algorithm(), task=task)
    config = sampling_config(config, **changes)
    return LoadedPolicy(config, load_policy(config, path), trained.folder, checkpoint.step_of(path))


def model_policy(model: str, task: Any = None, settings: dict[str, Any] | None = None, **changes: Any) -> LoadedPolicy:
    """Load a bare model from a folder or the Hugging Face hub. Without a task nothing is scored."""
    if (Path(model) / "run.json").exists():
        raise ConfigError(f"--model {model}: this is a run: pass it as the first argument, without --model")
    settings = {"policy": "causal-lm"} | (settings or {}) | {"model": model}
    return untrained_policy(configure(TextTask() if task is None else task, settings), **changes)


def untrained_policy(config: Config, **changes: Any) -> LoadedPolicy:
    """Return the policy of a config before training."""
    config = sampling_config(config, **changes)
    return LoadedPolicy(config, backend_of(config).policy(config, None))


def sampling_config(config: Config, **changes: Any) -> Config:
    """Return the config without its training settings, with the sampling parameters in `changes` that are not None."""
    changes = {name: value for name, value in changes.items() if value is not None}
    config = replace(config, algorithm=Algorithm(), init=None)
    return backend_of(config).with_settings(config, changes)


# ---- responses, one dictionary each -----------------------------------------------------------------


def unscored(rollouts: Rollouts) -> Batch:
    """Return rollouts as a batch with the rewards of their environments only."""
    valid = torch.ones_like(rollouts.truncated) if rollouts.valid is None else rollouts.valid
    zeros = torch.zeros(*rollouts.truncated.shape, 1)
    return to_batch(rollouts, valid=valid, reward=zeros if rollouts.reward is None else rollouts.reward)


def conversations(task: BoundTask, batch: Batch) -> list[Row]:
    """Return the `turns` of each multi-turn response, one dictionary per message, and why it `ended`."""
    if batch.turn is None:
        return [{} for _ in range(batch.valid.numel())]
    rows = [(row, conversation(row)) for row in sampled_rows(0, batch, len(batch.prompt), TokenTexts(task))]
    return [
        {"turns": [message._asdict() for message in messages], "ended": ending(row, messages)} for row, messages in rows
    ]


def unscored_response_rows(task: BoundTask, prompt: str, rollouts: Rollouts, group: int) -> list[Row]:
    """Return the responses to one prompt as text and as tokens with their log-probs."""
    rows = []
    for sample, mask in enumerate(rollouts.mask[group]):
        ids = rollouts.response[group, sample][mask].tolist()
        rows.append(
            {
                "prompt": prompt,
                "sample": sample,
                "response": task.response_text(ids),
                "truncated": bool(rollouts.truncated[group, sample]),
                "length": len(ids),
                "ids": ids,
                "logp": rollouts.logp_sampler[group, sample][mask].tolist(),
            }
        )
    return rows


def scored_rows(task: BoundTask, rollouts: Rollouts) -> tuple[list[Row], list[str]]:
    """Return every response with its score and reason, and the errors of failed rewards.

    strict      right and in the requested form (None if the task does not check answers)
    lenient     right in any form (None for small tasks)
    reward      None if it failed; then `valid` is False
    answer      the answer that counts in a majority vote
    """
    batch, errors = score_rollouts(task, rollouts)
    lenient = batch.measure_names.index("lenient") if "lenient" in batch.measure_names else None
    every: list[Row] = []
    for group in range(len(rollouts.prompt)):
        question = task.readable_prompt(rollouts, group)
        rows = unscored_response_rows(task, question.text, rollouts, group)
        for sample, row in enumerate(rows):
            valid = bool(batch.valid[group, sample])
            row |= {
                "gold": question.answer,
                "answer": task.normalize_answer(row["response"], question.answer),
                "strict": bool(batch.correct[group, sample]) if valid and batch.correct is not None else None,
                "lenient": None,
                "reward": float(batch.reward[group, sample].sum()) if valid else None,
                "valid": valid,
                "reason": "" if batch.notes is None else str(batch.notes[group, sample] or ""),
            }
            if lenient is not None and valid and batch.measures is not None:
                row["lenient"] = bool(batch.measures[group, sample, lenient])
        every += rows
    return [row | turns for row, turns in zip(every, conversations(task, batch), strict=True)], errors


# ---- `ascent sample`: what a policy answers to a prompt ----------------------------------------------


def sample(
    run: str | Path | None = None,
    prompts: str | Sequence[str] = (),
    *,
    model: str | Path | None = None,
    task: Any = None,
    step: int | None = None,
    best: bool = False,
    count: int | None = None,
    greedy: bool = False,
    plain: bool = False,
    seed: int = 0,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    stop: Sequence[str] | None = None,
    system: str | None = None,
    device: str | None = None,
    **settings: Any,
) -> list[Row]:
    """Sample responses of a run or a bare model to prompts, or scored responses to held-out problems of a task.

    ascent.sample("runs/mine", "What is 3 + 4?", count=4)
    ascent.sample(model="folder", prompts=["What is 3 + 4?"], greedy=True)
    ascent.sample("runs/mine", task="own", count=8)

    Prompts get the system message and instruction of training, unless `plain`.
    """
    changes: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
    changes |= {"max_tokens": max_tokens, "min_tokens": min_tokens, "stop": stop, "system": system, "device": device}
    loaded = resolve_policy(run, model, task, settings, step, best, **changes)
    if task is not None:
        return answer_held_out(loaded, count or 4, greedy, seed)
    return answer_prompts(loaded, [prompts] if isinstance(prompts, str) else prompts, count or 1, greedy, plain, seed)


def answer_prompts(
    loaded: LoadedPolicy, prompts: Sequence[str], count: int, greedy: bool, plain: bool, seed: int
) -> list[Row]:
    """Return `count` responses to each prompt, scored if the prompt alone determines the answer."""
    if not prompts:
        raise ConfigError("no prompts: pass at least one")
    check_counts(count=count)
    if greedy and count > 1:
        raise ConfigError(f"--count {count} with --greedy: greedy responses are all equal")
    task = loaded.unscored_task()
    typed, words = task.encode_prompts(prompts, plain)
    rollouts = loaded.sampler(typed, seed).generate(typed, count, greedy)
    if loaded.backend.uses_text:  # a typed prompt has no answer to score by
        rows = [row for i, prompt in enumerate(words) for row in unscored_response_rows(task, prompt, rollouts, i)]
        conversation_rows = conversations(task, unscored(rollouts))
        return [row | turns for row, turns in zip(rows, conversation_rows, strict=True)]
    return scored_rows(task, rollouts)[0]


def answer_held_out(loaded: LoadedPolicy, count: int, greedy: bool, seed: int) -> list[Row]:
    """Return one scored response to each of `count` held-out problems."""
    check_counts(count=count)
    with closing(loaded.task()) as task:
        prompts = task.held_out(count)
        return scored_rows(task, loaded.sampler(prompts, seed).generate(prompts, 1, greedy))[0]


def responses_text(rows: list[Row], piece: Callable[[int], str] | None = None, color: bool = False) -> str:
    """Format responses below their prompts for a terminal; with `piece`, a token decoder, also token log-probs."""
    lines: list[str] = []
    for row in rows:
        if row["sample"] == 0:
            lines += ["", *_titled("prompt", row["prompt"])]
            if row.get("gold") is not None:
                lines += _titled("answer", row["gold"])
        ended = "truncated" if row["truncated"] else "ended"
        head = f"{row['length']} tokens, {ended}, log-prob {sum(row['logp']):.3f}"
        lines += ["", f"response {row['sample'] + 1}: {head}", *response_lines(row, color)]
        if "valid" in row:
            lines += ["", *_titled("score", _score(row))]
        if piece is not None:
            tokens = zip(row["logp"], row["ids"], strict=True)
            lines += ["", *(f"{logp:9.3f}  {i:>6}  {piece(i)!r}" for logp, i in tokens)]
    return "\n".join(lines).strip()


def response_lines(row: Row, color: bool) -> list[str]:
    """Return the text of a response, or its conversation."""
    if not row.get("turns"):
        return [printable(row["response"])]
    return conversation_lines([ConversationMessage(**message) for message in row["turns"]], row["ended"], color)


def _titled(title: str, words: str) -> list[str]:
    first, *more = printable(words).split("\n")
    return [f"{title:<8} {first}", *(f"{'':<8} {line}".rstrip() for line in more)]


def _score(row: Row) -> str:
    why = f" ({row['reason']})" if row["reason"] and not row.get("turns") else ""  # a conversation states why it ended
    if not row["valid"]:
        return f"the reward failed{why}"
    form = "right, but not in the requested form" if row["lenient"] else "wrong"
    form = "" if row["strict"] is None else "right, " if row["strict"] else f"{form}, "
    return f"{form}reward {row['reward']:g}{why}"


# ---- as a Hugging Face folder -----------------------------------------------------------------------


def export(
    run: str | Path,
    folder: str | Path,
    *,
    step: int | None = None,
    best: bool = False,
    push: str | None = None,
    public: bool = False,
) -> Path:
    """Export the newest checkpoint of a run (or that of a step, or the best) as a folder for `from_pretrained`.

    LoRA adapters are merged. The folder is written aside and renamed, so it is never incomplete. `push` is the name of
    a repository on the Hugging Face hub that gets the same files; a new one is private unless `public`.
    """
    if public and push is None:
        raise ConfigError("public needs push: set it to the name of the repository")
    existing, folder = Run(run), Path(folder)
    path, config = existing.checkpoint(step, best), existing.config
    check_trains_policy(config, existing.folder)
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise ConfigError(f"{folder}: already there, and nothing is overwritten. Choose another folder")
    hub = None if push is None else Hub(push)
    aside, params = folder.with_name(f".writing-{folder.name}-{os.getpid()}"), checkpoint.params(path)
    try:
        aside.mkdir(parents=True)
        backend_of(config).export(config, existing.folder, params, aside)
        (aside / "README.md").write_text(model_card(existing, checkpoint.step_of(path)))
        for file in [*aside.iterdir(), aside]:
            checkpoint.flush(file)
        os.replace(aside, folder)
        checkpoint.flush(folder.parent)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot write there ({error.strerror or error})") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    if hub is not None:
        hub.push(folder, public)
    return folder
