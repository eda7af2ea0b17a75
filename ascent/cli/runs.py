"""`ascent show`, `report`, `eval`, `sample` and `export`: inspect runs and use their policies."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from ascent.build.trained_run import Run
from ascent.cli.flags import Command, check_positionals, split_leading_word
from ascent.cli.run_flags import is_task, parse_train
from ascent.core.config import Config
from ascent.core.errors import ConfigError
from ascent.core.menu import name_of, nearest
from ascent.runs.display.terminal import cell_text, printable, table, width, wrapped
from ascent.runs.metrics import short_name
from ascent.runs.recorded_conversation import conversation, conversation_lines, ending, use_color
from ascent.runs.rollout_files import rollout_path
from ascent.runs.run_list import was_oom_killed
from ascent.runs.run_reader import read_settings
from ascent.runs.untrusted_files import naming_file, read_json
from ascent.settings import find_task, settings_of
from ascent.workflows.evaluate import evaluate_policy
from ascent.workflows.loaded_policy import (
    LoadedPolicy,
    answer_held_out,
    answer_prompts,
    export,
    model_policy,
    responses_text,
    run_policy,
    untrained_policy,
)

LENGTH_FLAGS = ("max_tokens", "min_tokens", "stop")
"""Flags that decide where a response ends."""


@dataclass
class ShowCommand(Command):
    """Show the metrics of a run, or with --step N its responses."""

    run: Path
    """The run's folder."""
    step: Annotated[int | None, "N"] = None
    """Print the responses of this step: prompts, responses, log-probs, rewards and advantages."""
    json: bool = False
    """Print one JSON object."""

    def execute(self) -> None:
        run = Run(self.run)
        if self.step is not None:
            rows = run.rollouts(self.step)
            with naming_file(rollout_path(run.folder, self.step)):
                text = json.dumps(rows) if self.json else responses(rows, use_color())
            print(text)
        elif self.json:
            config = read_json(run.folder / "config.json")
            about = run.info | {"status": run.status, "folder": str(run.folder)}
            print(json.dumps({"run": about, "config": config, "metrics": run.metrics, "events": run.events}))
        else:
            print(printable(summary(run)))


@dataclass
class ReportCommand(Command):
    """Write a run as one HTML file to share: result, alerts, curves, completions, settings.

      ascent report RUN
      ascent report RUN --out findings.html

    The file is self-contained: it has no scripts and loads nothing. RUN may be
    unfinished or damaged, or a folder of TRL's completions or of verl's rollouts.
    An older report is replaced; any other file is not.
    """

    run: Path
    """The run's folder."""
    out: Annotated[Path | None, "FILE"] = None
    """The file to write. Default: RUN/report.html."""
    force: bool = False
    """Overwrite a file that is not a report."""

    def execute(self) -> None:
        try:
            from ascent.lab.report.run_report import write_report
        except ModuleNotFoundError as missing:
            raise ConfigError(f"a report needs {missing.name}: pip install 'ascent-rl[lab]'") from None

        out, size = write_report(self.run, self.out, self.force)
        print(f"Report: {out} ({size / 1000:,.0f} kB, opens in any browser)")


METRIC_COLUMNS = (
    *("step", "reward", "reward_std", "accuracy", "eval/accuracy", "rewards/accuracies", "eval/pairs/accuracy"),
    *("eval/pairs/log_loss", "eval/pairs/ece", "steps/error", "eval/steps/error", "eval/steps/explained"),
    *("exact/reward", "entropy", "kl", "trust_region/kl", "value/explained_variance", "clip_ratio/high_mean"),
    *(
        "clip_ratio/low_mean",
        "frac_reward_zero_std",
        "turns",
        "completions/mean_length",
        "grad_norm",
        "reward_errors",
        "loss",
    ),
)
OPTIONAL_COLUMNS = ("length", "clip−", "clip+", "±", "loss", "‖∇‖", "KL", "critic", "moved", "pairs right", "ECE")
"""Columns that are left out on a narrow terminal, in this order."""


def summary(run: Run) -> str:
    """Return the overview of a run: settings, metrics, result and alerts."""
    info, metrics = run.info, run.metrics
    head = [
        f"{run.folder}: {run.status}, {len(metrics)} of {info.get('steps', '?')} steps",
        "{}, {}, seed {}".format(*(info.get(name, "?") for name in ("task", "label", "seed"))),
        wrapped(str(read_settings(run.folder / "config.json", with_description=True).get("objective", ""))),
    ]
    if run.status == "failed":
        head.append(wrapped(f"Stopped: {info.get('reason')}"))
    if run.status == "died" and was_oom_killed(run.folder):
        head.append("Since it was last seen alive, the system killed a process because memory ran out.")
    if run.status in ("died", "interrupted", "failed"):
        head.append(f"Resume it: ascent resume {run.folder}")
    stride = max(1, len(metrics) // 10)
    rows = [line for i, line in enumerate(metrics) if (i + 1) % stride == 0 or i in (0, len(metrics) - 1)]
    columns = {short_name(key): key for key in METRIC_COLUMNS if any(line.get(key) is not None for line in metrics)}
    if info.get("data", "samples") != "samples":  # offline data have no rewards
        columns = {name: key for name, key in columns.items() if name not in ("reward", "±", "silent")}
    if not any(line.get("reward_errors") for line in metrics):
        columns.pop(short_name("reward_errors"), None)
    table_lines = _fit_table({name: [cell_text(line.get(key)) for line in rows] for name, key in columns.items()})
    result = [wrapped(str(paragraph)) for paragraph in (run.result or {}).get("words") or []]
    alerts = [
        wrapped(f"Alert at step {e.get('step')}: {e.get('text')}") for e in run.events if e.get("event") == "alert"
    ]
    return "\n".join([*head, "", *table_lines, "", *result, *alerts]).rstrip()


def _fit_table(columns: dict[str, list[str]]) -> list[str]:
    """Return the table of these columns, without optional ones that do not fit the terminal."""
    lines = table(list(columns), [list(row) for row in zip(*columns.values(), strict=True)]) if columns else []
    optional = next((name for name in OPTIONAL_COLUMNS if name in columns), None)
    if optional is None or not lines or len(lines[0]) <= width():
        return lines
    return _fit_table({name: cells for name, cells in columns.items() if name != optional})


def responses(rows: list[dict[str, Any]], color: bool = False) -> str:
    """Return the responses of a step by group with log-probs, rewards and advantages; conversations turn by turn."""
    lines: list[str] = []
    for row in rows:
        if row["sample"] == 0:
            lines += ["", printable(f"group {row['group']}: prompt {row['prompt_text']}")]
        failed = row.get("status", "ok" if row["valid"] else "failed") == "failed"
        mark = "failed" if failed else "right" if row.get("correct") else ""
        if messages := conversation(row):
            count = max(speech.turn for speech in messages)
            turns = f"{count} turn" if count == 1 else f"{count} turns"
            head = [f"response {row['sample']}: reward {row['reward']:g}", turns, *([mark] if mark else [])]
            lines += ["", ", ".join(head), *conversation_lines(messages, ending(row, messages), color)]
            continue
        logp = " ".join(f"{x:7.3f}" for x in row["logp_old"])
        values = row["advantage"]
        advantage = f"{values[0]:+.3f}" if len(set(values)) <= 1 else " ".join(f"{x:+.3f}" for x in values)
        text = f"  {row['response_text']}  reward {row['reward']:g}  A {advantage}  logp {logp}  {mark}"
        lines.append(printable(text.rstrip()))
    return "\n".join(lines).strip()


# ---- the policy of a run --------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class CheckpointCommand(Command):
    """A command that reads a checkpoint of a run."""

    step: Annotated[int | None, "N"] = None
    """A run's checkpoint of this step. Default: the newest."""
    best: bool = False
    """A run's checkpoint of the best evaluation."""


@dataclass(kw_only=True)
class PolicyCommand(CheckpointCommand):
    """A command that samples from the policy of a run, or from a model, on a task."""

    accepts_other_flags = True
    model: Annotated[str | None, "FOLDER"] = None
    """A model instead of a run: a folder, or a name on the hub."""
    task: Annotated[str | None, "TASK"] = None
    """Another task than the run's. The settings of the task are flags too."""
    temperature: Annotated[float | None, "FLOAT"] = None
    """Sampling temperature. Default: the run's, or 1 for a model."""
    max_tokens: Annotated[int | None, "N"] = None
    """Maximum number of tokens in a response. Default: the task's."""
    min_tokens: Annotated[int | None, "N"] = None
    """Minimum number of tokens in a response. Default: the task's."""
    stop: Annotated[tuple[str, ...] | None, "TEXT …"] = None
    """Strings that end a response. All words that follow are strings, so set it last. Default: the task's."""
    device: Annotated[str | None, "NAME"] = None
    """cpu, cuda, …. Default: the run's, or auto for a model."""
    seed: int = 0
    """Seed of the samples."""
    json: bool = False
    """Print JSON."""

    def load(self, run: str | None, task: str | None, flags: list[str], changes: tuple[str, ...]) -> LoadedPolicy:
        """Load the policy of a run, or a model, for a task with these flags; the fields in `changes` override them."""
        overrides = {name: getattr(self, name) for name in changes}
        if run is not None:
            if task in (None, "own") and flags:
                raise ConfigError(
                    f"{' '.join(flags)}: {self.prog()} has no such flag; a run already has its task's settings. "
                    "Add --task TASK to set others"
                )
            if is_task(run):
                raise ConfigError(f"{run} is a task: name a model for it, {self.prog()} {run} --model FOLDER")
            other = None if task is None or task == "own" else self._config(task, flags).task
            return run_policy(run, self.step, self.best, other, **overrides)
        assert self.model is not None
        if self.step is not None or self.best:
            raise ConfigError(
                "--model with --step or --best: a model has no checkpoints to choose from. Leave them out"
            )
        if task is None:
            return model_policy(self.model, **overrides)
        if Path(task).is_dir() and ":" not in task:
            raise ConfigError(
                f"{task} is a folder. With --model the first argument must be a TASK; a run has its own model, "
                "so leave out --model"
            )
        if find_task(task)[0].kind != "text":
            raise ConfigError(
                f"--model with the task {task}: this is not a text task, so a language model cannot read its prompts. "
                f"Train on it: ascent train {task}"
            )
        return untrained_policy(self._config(task, flags, "--model", self.model), **overrides)

    def _config(self, task: str, flags: list[str], *model_flags: str) -> Config:
        """Return the config of a task with its flags. Flags of training are refused."""
        config, _ = parse_train([task, *model_flags, *flags], self.prog())
        known = [setting.flag for setting in settings_of(type(config.task)).values()]
        for flag in (arg.partition("=")[0].replace("_", "-") for arg in flags if arg.startswith("--")):
            if not {flag, flag.replace("--no-", "--", 1)} & set(known) and not flag.startswith("--policy."):
                raise ConfigError(
                    f"{flag}: {self.prog()} has no such flag, and {name_of(config.task)} has no such setting."
                    + nearest(flag, known)
                )
        return config


@dataclass(kw_only=True)
class EvalCommand(PolicyCommand):
    r"""Evaluate a run or a model on held-out prompts: greedy, pass@k, majority vote, best of k.

      ascent eval RUN --best --samples 16
      ascent eval gsm8k --model FOLDER --prompts 200
      ascent eval RUN --task reasoning-gym:chain_sum --options '{"max_terms": 2}'

    The settings of a task (--options, --check, --reward, …) are flags, as in
    `ascent train TASK`. pass@k is the unbiased estimate. The majority vote
    compares extracted answers: the text after "Answer:", "####", "\boxed" or "the
    answer is"; otherwise the last number, word or line. On a tie, the answer that
    was sampled first wins. Best of k takes the response with the highest reward.
    Intervals are over prompts.
    """

    source: Annotated[str, "RUN|TASK"]
    """A run's folder; with --model, a task. It comes first."""
    prompts: Annotated[int | None, "N"] = None
    """Maximum number of held-out prompts. Default: the run's --eval-prompts."""
    samples: int = 1
    """Sampled responses per prompt, besides the greedy one. With 2 or more, mean score, pass@k, majority vote and best
    of k are reported."""
    rows: Annotated[int | None, "N"] = None
    """Maximum batch size of decoding. Changes only memory and time."""
    out: Annotated[Path | None, "FILE"] = None
    """Parquet file to write all responses to, with scores and reasons."""

    def execute(self) -> None:
        if self.out is not None and (self.out.exists() or not self.out.parent.is_dir()):
            why = "already there" if self.out.exists() else f"there is no folder {self.out.parent}"
            raise ConfigError(f"--out {self.out}: {why}. Choose another file")
        if self.model is not None and self.task is not None:
            raise ConfigError(f"--task {self.task} with --model: the task comes first, ascent eval TASK --model FOLDER")
        run, task = (self.source, self.task) if self.model is None else (None, self.source)
        loaded = self.load(run, task, self.other_args, ("temperature", *LENGTH_FLAGS, "device", "rows"))
        evaluation = evaluate_policy(loaded, self.prompts, self.samples, self.seed, show=True)
        if self.out is not None:
            evaluation.write(self.out)
        print(json.dumps(evaluation.to_dict()) if self.json else evaluation.text(use_color()))
        if self.out is not None and not self.json:
            print(f"Responses: {self.out}")


@dataclass(kw_only=True)
class SampleCommand(PolicyCommand):
    """Sample responses to a prompt from a run or from a model.

      ascent sample RUN "What is 3 + 4?" --count 4
      ascent sample --model FOLDER "What is 3 + 4?" --greedy --logp
      ascent sample RUN --task own --count 8
      ascent sample RUN < prompts.txt

    --task samples responses to held-out problems of a task and shows their score
    and reason; `own` is the run's task. Without a prompt and without --task,
    prompts are read from standard input, one per line. A run on a small task takes
    numbers: "3 1 0 2 4".
    """

    positionals = '[RUN] ["…"]'
    count: Annotated[int | None, "N"] = None
    """Responses per prompt (default 1); with --task, problems (default 4)."""
    greedy: bool = False
    """Always take the most likely token."""
    top_p: Annotated[float | None, "FLOAT"] = None
    """Sample from the most likely tokens that make up this probability mass."""
    top_k: Annotated[int | None, "N"] = None
    """Sample from the k most likely tokens."""
    min_p: Annotated[float | None, "FLOAT"] = None
    """Sample from tokens at least this share as likely as the most likely one."""
    system: Annotated[str | None, "TEXT"] = None
    """A system message. Default: the run's."""
    plain: bool = False
    """Leave out the instruction that training appended to each prompt."""
    logp: bool = False
    """Print the log-prob of every token."""

    def execute(self) -> None:
        if self.task:  # the flags of the task are here too, so only the run may be positional
            first, flags = split_leading_word(self.other_args)
            words = [] if first is None else [first]
        else:
            words, flags = check_positionals(self.prog(), self.other_args, settings_of(type(self)).values()), []
        if self.model is None and not words:
            raise ConfigError(
                'RUN is missing: ascent sample RUN "…", or without a run, ascent sample --model FOLDER "…"'
            )
        run = words.pop(0) if self.model is None else None
        prompts = words if self.task or words else _from_stdin()
        changes = ("temperature", "top_p", "top_k", "min_p", *LENGTH_FLAGS, "system", "device")
        loaded = self.load(run, self.task, flags, changes)
        if self.task:
            rows = answer_held_out(loaded, self.count or 4, self.greedy, self.seed)
        else:
            rows = answer_prompts(loaded, prompts, self.count or 1, self.greedy, self.plain, self.seed)
        piece = loaded.unscored_task().token_text if self.logp else None
        print(json.dumps(rows) if self.json else responses_text(rows, piece, use_color()))


def _from_stdin() -> list[str]:
    lines = [] if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read().splitlines()
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise ConfigError('no prompt: give one, "What is 3 + 4?", or --task, or one prompt per line on standard input')
    return prompts


@dataclass(kw_only=True)
class ExportCommand(CheckpointCommand):
    """Write the language model of a run as a Hugging Face folder, with adapters merged.

      ascent export RUN FOLDER --best
      ascent export RUN FOLDER --push USER/NAME

    Load it with AutoModelForCausalLM.from_pretrained("FOLDER"). --push uploads the
    same files as one commit to a repository on the Hugging Face hub, with a README
    that describes the run.
    """

    run: Path
    """The run's folder."""
    folder: Path
    """The folder to write."""
    push: Annotated[str | None, "NAME"] = None
    """Repository on the hub to push to: USER/NAME, or NAME for your own. A new one is private."""
    public: bool = False
    """With --push: make a new repository public."""

    def execute(self) -> None:
        folder = export(self.run, self.folder, step=self.step, best=self.best, push=self.push, public=self.public)
        pushed = f"\nPushed: {self.push}" if self.push else ""
        print(f'Written: {folder}{pushed}\nTry it: ascent sample --model {folder} "…"')


COMMANDS = {"look at a run": (ShowCommand, ReportCommand, EvalCommand, SampleCommand, ExportCommand)}
