"""`ascent eval`, `ascent sample` and `ascent export`: their flags, and what they print."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from ascent.commands.flags import parse_train
from ascent.menu import hyperparameters, name_of, nearest
from ascent.settings import find_task
from ascent.tasks.text import Text
from ascent.trained.loaded import Loaded, of_config, of_model, of_run
from ascent.types import Refused

Switch = Annotated[bool, tyro.conf.FlagCreatePairsOff]


def _optional(metavar: str) -> Any:
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="")


@dataclass(kw_only=True)
class Checkpoint:
    """Which policy is asked."""

    step: Annotated[int | None, _optional("N")] = None
    """A run's checkpoint of this step. Default: the newest."""
    best: Switch = False
    """A run's checkpoint of the best evaluation."""


@dataclass
class Asked(Checkpoint):
    model: Annotated[str | None, _optional("FOLDER")] = None
    """A bare model in place of a run: a folder, or a name on the hub."""
    task: Annotated[str | None, _optional("TASK")] = None
    """Another task than the run's own; its settings are flags beside it."""
    temperature: Annotated[float | None, _optional("FLOAT")] = None
    """Sampling temperature. Default: the run's; 1 for a bare model."""
    max_tokens: Annotated[int | None, _optional("N")] = None
    """The most tokens of a response. Default: the task's."""
    device: Annotated[str | None, _optional("NAME")] = None
    """cpu, cuda, …. Default: the run's; auto for a bare model."""
    seed: int = 0
    """Decides what is sampled."""
    json: Switch = False
    """JSON, for scripts."""


@dataclass
class EvalOptions(Asked):
    prompts: Annotated[int | None, _optional("N")] = None
    """Held-out prompts, at most. Default: the run's --eval-prompts."""
    samples: int = 1
    """Responses to each prompt beside the greedy one, from 2 on: mean score, pass@k, majority and best of k."""
    rows: Annotated[int | None, _optional("N")] = None
    """Responses that are decoded at once. Memory only."""
    out: Annotated[Path | None, _optional("FILE")] = None
    """Parquet file for all responses, with scores and reasons."""


EVAL = """Greedy and sampled scores on held-out prompts, of a run or of a bare model.

  ascent eval RUN --best --samples 16
  ascent eval gsm8k --model FOLDER --prompts 200
  ascent eval RUN --task reasoning-gym:chain_sum --options '{"max_terms": 2}'

  A task's own settings (--options, --check, --reward, …) are flags as in
  `ascent train TASK`. pass@k is the unbiased estimate. A majority counts
  answers: what stands behind Answer:, ####, \\boxed or "the answer is", else
  the last number, word or line; of equal counts the first seen wins. Best of k
  takes the response with the highest reward. Intervals are over prompts."""


def evaluate(args: list[str]) -> int:
    from ascent.trained.held_out import measure

    source, args = _leading(args)
    options, rest = _parse(EvalOptions, "eval RUN|TASK", EVAL, args)
    if source is None:
        raise Refused("which RUN? Its folder comes first: ascent eval RUN; or ascent eval TASK --model FOLDER")
    if options.out is not None and (options.out.exists() or not options.out.parent.is_dir()):
        why = "already there" if options.out.exists() else f"there is no folder {options.out.parent}"
        raise Refused(f"--out {options.out}: {why}. Choose another file")
    changes = {"temperature": options.temperature, "max_tokens": options.max_tokens}
    changes |= {"device": options.device, "rows": options.rows}
    loaded = _loaded(options, source, rest, "eval", changes)
    found = measure(loaded, options.prompts, options.samples, options.seed, show=True)
    if options.out is not None:
        found.write(options.out)
    print(json.dumps(found.to_dict()) if options.json else found.text())
    if options.out is not None and not options.json:
        print(f"Responses: {options.out}")
    return 0


@dataclass
class SampleOptions(Asked):
    count: Annotated[int | None, _optional("N")] = None
    """Responses to each prompt (default 1); with --task, problems (default 4)."""
    greedy: Switch = False
    """The likeliest token every time."""
    top_p: Annotated[float | None, _optional("FLOAT")] = None
    """Draw from the likeliest tokens that make up this mass."""
    top_k: Annotated[int | None, _optional("N")] = None
    """Draw from the likeliest k tokens."""
    min_p: Annotated[float | None, _optional("FLOAT")] = None
    """Draw from tokens at least this share as likely as the likeliest."""
    system: Annotated[str | None, _optional("TEXT")] = None
    """A system message. Default: the run's."""
    plain: Switch = False
    """Ask a run without the instruction that its training put below every prompt."""
    logp: Switch = False
    """The log-prob of every token."""


SAMPLE = """What a run or a bare model says to a prompt.

  ascent sample RUN "What is 3 + 4?" --count 4
  ascent sample --model FOLDER "What is 3 + 4?" --greedy --logp
  ascent sample RUN --task own --count 8
  ascent sample RUN < prompts.txt

  --task shows held-out problems of a task with answer, response, score and
  reason; `own` is the run's. Without a prompt and --task, standard input has
  one prompt a line. A run of the small worlds takes numbers: "3 1 0 2 4"."""


@dataclass
class Words:
    words: Annotated[tuple[str, ...], tyro.conf.Positional, _optional("[RUN] [PROMPT …]")] = ()
    """The run's folder, unless there is --model, and prompts."""


@dataclass
class SampleWithWords(SampleOptions, Words):
    pass


def sample(args: list[str]) -> int:
    from ascent.trained.sampling import ask, problems, text

    names = [arg.partition("=")[0] for arg in args]
    if "--task" in names:  # a task's flags stand beside ours, so that nothing else may stand alone
        run, args = _leading(args)
        options, rest = _parse(SampleOptions, "sample", SAMPLE, args)
        words: list[str] = [] if run is None else [run]
    else:
        options = tyro.cli(SampleWithWords, prog="ascent sample", description=SAMPLE, args=args)
        words, rest = list(options.words), []
    if options.model is None and not words:
        raise Refused('which RUN? Its folder comes first: ascent sample RUN "…"; or ascent sample --model FOLDER "…"')
    source = words.pop(0) if options.model is None else None
    names = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "system", "device"]
    changes = {name: getattr(options, name) for name in names}
    prompts = words if options.task or words else _from_stdin()
    loaded = _loaded(options, source, rest, "sample", changes)
    if options.task:
        rows = problems(loaded, options.count or 4, options.greedy, options.seed)
    else:
        rows = ask(loaded, prompts, options.count or 1, options.greedy, options.plain, options.seed)
    print(json.dumps(rows) if options.json else text(rows, loaded.policy, options.logp))
    return 0


def _from_stdin() -> list[str]:
    given = [] if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read().splitlines()
    prompts = [line for line in given if line.strip()]
    if not prompts:
        raise Refused('nothing to ask: give a prompt, "What is 3 + 4?", or --task, or one prompt a line on stdin')
    return prompts


@dataclass
class ExportOptions(Checkpoint):
    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The run's folder."""
    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """The folder to make."""


EXPORT = """A run's language model as an ordinary Hugging Face folder, adapters merged in.

  ascent export RUN FOLDER --best

  Then, in Python: AutoModelForCausalLM.from_pretrained("FOLDER")."""


def export(args: list[str]) -> int:
    from ascent.trained.exporting import export

    options = tyro.cli(ExportOptions, prog="ascent export", description=EXPORT, args=args)
    folder = export(options.run, options.folder, step=options.step, best=options.best)
    print(f'Written: {folder}\nTry it: ascent sample --model {folder} "…"')
    return 0


# ---- what they share --------------------------------------------------------------------------------


def _leading(args: list[str]) -> tuple[str | None, list[str]]:
    return (args[0], args[1:]) if args and not args[0].startswith("-") else (None, args)


def _parse(kind: type, prog: str, about: str, args: list[str]) -> tuple[Any, list[str]]:
    """Our flags, and what is left: flags of a task."""
    return tyro.cli(kind, prog=f"ascent {prog}", description=about, args=args, return_unknown_args=True)


def _loaded(options: Asked, source: str | None, rest: list[str], command: str, changes: dict[str, Any]) -> Loaded:
    """The policy that was asked for: of a run, on its own task or another, or a bare model."""
    if options.model is not None:
        if options.step is not None or options.best:
            raise Refused("--step and --best choose among a run's checkpoints, and --model is no run: leave them out")
        if command == "eval" and options.task is not None:
            raise Refused(f"--task {options.task} with --model: the task stands alone, ascent eval TASK --model FOLDER")
        task = source if command == "eval" else options.task
        if task is None:
            return of_model(options.model, **changes)
        _refuse_wordless(task, options.model)
        return of_config(_config(task, ["--model", options.model, *rest], rest, command), **changes)
    assert source is not None
    other = None
    if options.task not in (None, "own"):
        other = _config(options.task, rest, rest, command).task
    elif rest:
        raise Refused(
            f"{' '.join(rest)}: ascent {command} has no such flag; a run brings its settings along, or --task"
        )
    _refuse_task(source, command)
    return of_run(source, options.step, options.best, other, **changes)


def _config(task: str, args: list[str], rest: list[str], command: str) -> Any:
    """The config of a task with its flags, of which none may be about training."""
    config, _ = parse_train([task, *args], f"ascent {command}")
    known = {name.replace("_", "-") for name in hyperparameters(type(config.task))}
    for flag in (arg.partition("=")[0].removeprefix("--") for arg in rest if arg.startswith("--")):
        if flag.removeprefix("no-") not in known and flag not in known and not flag.startswith("policy."):
            raise Refused(
                f"--{flag}: ascent {command} has no such flag, and {name_of(config.task)} no such setting."
                + nearest(flag, known)
            )
    return config


def _refuse_wordless(task: str, model: str) -> None:
    """A model reads words: no run stands in for the task, and no small world."""
    if Path(task).is_dir() and ":" not in task:
        raise Refused(
            f"{task} is a folder, and with --model {model} there has to be a TASK; a run brings its own model"
        )
    found = find_task(task)[0]
    if not issubclass(found if isinstance(found, type) else type(found), Text):
        raise Refused(f"--model with the task {task}: it has no words to read. Train on it: ascent train {task}")


def _refuse_task(run: str, command: str) -> None:
    if Path(run).exists():
        return
    try:
        find_task(run)
    except Refused:
        return
    raise Refused(f"{run} is a task: name a model for it, ascent {command} {run} --model FOLDER")
