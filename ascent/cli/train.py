"""`ascent train`, `resume`, `preflight`, `rounds` and `compare`: start, continue or check runs."""

import json
import os
import shlex
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Self

from ascent.api import resume, start, trust_settings
from ascent.build.assemble import assemble
from ascent.build.backends import backend_of
from ascent.build.trained_run import Run
from ascent.cli.flags import Command, parse_flags
from ascent.cli.run_flags import TrainOptions, parse_train
from ascent.core.config import Config
from ascent.core.errors import ConfigError
from ascent.distributed.ranks import torchrun_id, torchrun_rank, was_restarted
from ascent.explain.explain import formula, objective_in_words
from ascent.runs.display.notebook import default_display
from ascent.runs.display.plots import plot_runs
from ascent.runs.display.terminal import cell_text, table, width, wrapped
from ascent.runs.run_folder import check_new_folder, write_json
from ascent.runs.run_info import default_folder
from ascent.runs.run_reader import init_folder
from ascent.settings import PLAIN, ROW_SETTINGS, Setting, row_label, row_needs, spell
from ascent.workflows.rounds import ROUNDS_FILE, RoundsPlan, reopen_rounds, run_rounds, start_rounds
from ascent.workflows.seed_comparison import COSTS, draw_comparison, run_all, summarize_runs


@dataclass
class TrainCommand(Command):
    """Train a policy with a named algorithm, or with one choice per axis."""

    positionals = "TASK"
    under_torchrun = True
    config: Config
    options: TrainOptions

    @classmethod
    def read(cls, args: list[str]) -> Self:
        return cls(*parse_train(args, cls.prog()))

    def execute(self) -> int | None:
        return run_training(self.config, self.options)


class PreflightCommand(TrainCommand):
    """Check a training before it starts: batch sizes, memory, the reward, a first sample, seconds per step."""

    under_torchrun = False

    def execute(self) -> None:
        with closing(assemble(self.config)) as parts:
            report = parts.preflight()
            if report is not None and not report.errors:
                num_notes = len(parts.notes)
                parts.resolve_old_logp()
                report.lines += [f"note       {note}" for note in parts.notes[num_notes:]]
        if report is None:
            print(run_summary(parts.config, self.options.out or Path("runs")))
        else:
            print(report.text())
            report.raise_on_errors()


@dataclass
class ResumeCommand(Command):
    """Resume a run. The result is bit-identical to an uninterrupted run."""

    under_torchrun = True
    run: Path
    """The run's folder."""
    from_: Annotated[int | None, "STEP"] = None
    """Go back to the checkpoint of this step. Default: the newest."""

    def execute(self) -> int | None:
        if self.from_ is None and Run(self.run).status == "finished":
            if not (self.run / "plot.png").exists():  # the process was killed before it drew the curves
                plot(Run(self.run))
            print(f"{self.run} is finished: there is nothing to resume. Look closer: ascent show {self.run}")
            return None
        return report_end(resume(self.run, from_step=self.from_))


def run_training(config: Config, options: TrainOptions, then: Callable[[Run], None] | None = None) -> int | None:
    """Train and call `then` with the finished run; return an exit status other than 0 if there is one."""
    if options.out is not None and was_restarted() and (options.out / "run.json").exists():
        previous = Run(options.out)
        if previous.info.get("launch") == torchrun_id():
            trust_settings(options.out, config)
            return report_end(resume(options.out), then)
    if options.dry_run:
        print_dry_run(config, options)
        return None
    return report_end(start(config, options.out, default_display(), options.preflight), then)


def print_dry_run(config: Config, options: TrainOptions) -> None:
    """Print the plan of a run. A language model and its data, which may need the network, are not loaded."""
    folder = options.out or default_folder(config)
    check_new_folder(folder)
    if torchrun_rank():
        return
    if backend_of(config).uses_text:
        if config.init is not None:
            init_folder(config.init)
    else:
        with closing(assemble(config)) as parts:
            config = parts.config
    print(run_summary(config, folder))


def report_end(run: Run, then: Callable[[Run], None] | None = None) -> int | None:
    """Print how a run ended and what to type next; return an exit status other than 0 if there is one."""
    for paragraph in (run.result or {}).get("words", []):
        print(wrapped(paragraph))
    if run.status != "finished":
        print(f"Interrupted after {run.info['step']} of {run.info['steps']} steps, and saved.")
        print(f"Resume it: ascent resume {run.folder}")
        return 130
    if plot(run):
        print(f"Curves: {run.folder / 'plot.png'}")
    print(f"Look closer: ascent show {run.folder}")
    if then is not None:
        then(run)
    return None


def run_summary(config: Config, folder: Path) -> str:
    """Return what `ascent train` would do. `auto` is decided when the model or the data are loaded."""
    responses, updates = config.prompts * config.samples, config.epochs * config.minibatches
    rounds = config.algorithm.groups.rounds
    limit = f", up to {rounds} times where groups have no signal" if rounds > 1 else ""
    if config.data_epochs is not None and backend_of(config).uses_text:
        length = f"auto steps: {config.data_epochs:g} epochs over the task's rows"
    else:
        counts = f"{config.steps * responses:,} responses and {config.steps * updates:,} updates"
        length = f"{config.steps} steps = {counts}"
    precision = [f"precision  {config.policy.dtype}"] if hasattr(config.policy, "dtype") else []
    return "\n".join(
        [
            f"task       {spell(config.task)}",
            f"policy     {spell(config.policy)}",
            *precision,
            f"algorithm  {row_label(config.algorithm)}",
            f"update     {spell(config.algorithm.update)}",
            wrapped(f"objective  {objective_in_words(config.algorithm)}", 11),
            *(f"           {line}" for line in formula(config.algorithm).splitlines()),
            f"logp_old   {config.old_logp}",
            f"a step     {config.prompts} prompts × {config.samples} samples = {responses} responses{limit};",
            f"           epochs {config.epochs} × mini-batches {config.minibatches} = updates {updates}",
            f"the run    {length}, seed {config.seed}",
            f"folder     {folder}",
        ]
    )


def plot(run: Run) -> Path:
    title = f"{run.info['task']}, {run.info['label']}, seed {run.info['seed']}"
    return plot_runs([(run.folder.name, run.metrics, run.max_reward)], run.folder / "plot.png", title)


# ---- rounds ---------------------------------------------------------------------------------------------------


@dataclass
class RoundsCommand(Command):
    """Run iterative GRPO: each round makes pairs, trains a reward model, then a policy.

      ascent rounds sort --rounds 3 --pairs 256 --steps 100 --rm.steps 200
      ascent rounds gsm8k --model MODEL --init SFT_RUN --judge judge.toml
      ascent rounds FOLDER

    The task's own reward labels the pairs and is hidden from the policy; with
    --judge, a judge labels them. The other flags are those of `ascent train TASK`:
    they apply to the policies (default: --algorithm grpo) and, with the prefix
    --rm., to the reward models. `ascent rounds FOLDER` resumes unfinished rounds.
    """

    accepts_other_flags = True
    extra_settings = RoundsPlan
    source: Annotated[str, "TASK|FOLDER"]
    """A task, or the folder of rounds to resume. It comes first."""
    out: Annotated[Path | None, "FOLDER"] = None
    """The folder. Default: runs/<date>-rounds."""
    json: bool = False
    """Print the table as JSON lines."""

    def execute(self) -> None:
        reward_model, rest = reward_model_settings(self.other_args)
        if (Path(self.source) / ROUNDS_FILE).exists():
            if self.other_args:
                raise ConfigError(
                    f"{' '.join(self.other_args)}: the rounds in {self.source} already have their settings. "
                    f"Leave this out: ascent rounds {self.source}"
                )
            rounds = reopen_rounds(Path(self.source))
        else:
            algorithm = [] if any(arg.partition("=")[0] == "--algorithm" for arg in rest) else ["--algorithm", "grpo"]
            config, _ = parse_train([self.source, *algorithm, *rest], self.prog())
            folder = self.out or Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-rounds"
            rounds = start_rounds(folder, config, RoundsPlan(**self.extra_values), reward_model)
        rows = run_rounds(rounds)
        if self.json:
            print("\n".join(json.dumps(row) for row in rows))
            return
        print("\n".join(table(list(rows[0]), [[cell_text(value) for value in row.values()] for row in rows])))
        print(f"Look closer: ascent show {rounds.path_of(len(rows), 'policy')}")


def reward_model_settings(args: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Parse --rm.steps 200 into {"steps": 200} (values may be JSON); return it and the other arguments."""
    flags = {arg.partition("=")[0].removeprefix("--").replace("-", "_") for arg in args if arg.startswith("--rm.")}
    values, rest = parse_flags(args, [Setting(flag, str, metavar="VALUE") for flag in flags])
    return {flag.removeprefix("rm."): _json_or_text(value) for flag, value in values.items()}, rest


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value


# ---- a comparison ---------------------------------------------------------------------------------------------


@dataclass
class CompareCommand(Command):
    """Compare algorithms or settings over several seeds, in a table and a plot.

      ascent compare lecture --algorithms reinforce,rloo,grpo
      ascent compare sort --setting "--algorithm grpo --loss.high 0.28" --setting
          "--algorithm dapo" --seeds 8 --steps 200

    The other flags of `ascent train TASK` apply to all of them.
    """

    accepts_other_flags = True
    task: str
    """The task. It comes first."""
    algorithms: Annotated[str, "NAME,NAME,…"] = ""
    """Named algorithms, separated by commas."""
    setting: Annotated[list[str], '"FLAGS"'] = field(default_factory=list)
    """Flags of `ascent train`, quoted as one argument; may be repeated: --setting "--algorithm grpo --lr 0.01"."""
    seeds: Annotated[str, "N|N,N,…"] = "5"
    """Number of seeds (0, 1, …), or the seeds, separated by commas: 3,5,8."""
    out: Path | None = None
    """Folder of the comparison. Default: runs/<date>-compare-<task>."""
    jobs: int = 0
    """Runs in parallel; 0: one per core."""

    def execute(self) -> None:
        seeds, configs = parse_seeds(self.seeds), self._configs()
        out = self.out or Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-compare-{self.task}"
        runs = run_all(configs, seeds, out, self.jobs or os.cpu_count() or 1)
        result = summarize_runs(runs)
        print("\n".join([*comparison_table(result, len(seeds)), *map(wrapped, row_notes(configs))]))
        write_json(out / "compare.json", result)
        print(f"\nCurves: {draw_comparison(runs, out / 'compare.png', len(seeds))}\nNumbers: {out / 'compare.json'}")

    def _configs(self) -> dict[str, Config]:
        """Return the config of each setting by its name in the table."""
        settings = [["--algorithm", name.strip()] for name in self.algorithms.split(",") if name.strip()]
        for text in self.setting:
            try:
                settings.append(shlex.split(text))
            except ValueError as error:
                raise ConfigError(f"--setting {text}: {error}") from None
        if self.jobs < 0:
            raise ConfigError(f"--jobs {self.jobs}: set the number of parallel runs, 1 or more, or 0 for one per core")
        if not settings:
            raise ConfigError('nothing to compare: set --algorithms reinforce,rloo,grpo, or --setting "…" twice')
        configs: dict[str, Config] = {}
        shared, rest = parse_flags(self.other_args, [PLAIN[name] for name in ROW_SETTINGS])
        for flags in settings:
            name = " ".join(flags).removeprefix("--algorithm ").replace("--", "")
            if name in configs:
                raise ConfigError(f"{name!r} is given twice: each setting is compared once")
            configs[name], _ = parse_train([self.task, *rest, *flags], self.prog(), shared)
        return configs


def parse_seeds(text: str) -> list[int]:
    try:
        seeds = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--seeds {text}: give a number of seeds, or a list such as 3,5,8") from None
    if len(seeds) == 1 and "," not in text:
        seeds = list(range(seeds[0]))
    if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise ConfigError(f"--seeds {text}: seeds must be distinct and not negative, and there must be at least one")
    return seeds


def row_notes(configs: Mapping[str, Config]) -> list[str]:
    """Return notes on plain settings that a row sets because its loss or update requires them."""
    notes = []
    for name, config in configs.items():
        needs = row_needs(config.algorithm.loss, config.algorithm.update)
        others = {key: {getattr(other, key) for other in configs.values()} - {value} for key, value in needs.items()}
        flags = [f"{PLAIN[key].flag} {needs[key]} (others: {min(rest)})" for key, rest in others.items() if rest]
        notes += [f"{name} requires {' and '.join(flags)}."] if flags else []
    return notes


def comparison_table(result: Mapping[str, Any], seeds: int) -> list[str]:
    """Return the lines of the table."""
    titles = {"exact/reward": "E[R]", "eval/reward": "held-out reward", "eval/accuracy": "exactly right"}
    metrics = [m for m in titles if all(m in row for row in result.values())]
    metrics = [m for m in metrics if not (m == "eval/reward" and "exact/reward" in metrics)]
    head = ["setting", *(title for m in metrics for title in (titles[m], "to the first")), "silent groups", *COSTS]
    rows = []
    for name, row in result.items():
        cells = [name]
        for cell in (row[metric] for metric in metrics):
            gap = _pair(cell["difference"], cell["difference_half"], sign=True) if "difference" in cell else "—"
            cells += [_pair(cell["mean"], cell["half"]), gap]
        cells.append(f"{row['frac_reward_zero_std']['mean']:.0%}" if "frac_reward_zero_std" in row else "—")
        rows.append([*cells, *(_cost(row[cost], row[f"{cost}_half"]) for cost in COSTS)])
    text = table(head, rows)
    if len(text[0]) > width():  # two tables: metrics, then costs
        cut = 1 + 2 * len(metrics)
        text = [*table(head[:cut], [row[:cut] for row in rows]), ""]
        text += table([head[0], *head[cut:]], [[row[0], *row[cut:]] for row in rows])
    note = f"Means over {seeds} seeds ± half of the 95 % interval (Student's t); differences are paired by seed."
    return [*text, "", wrapped(note if seeds > 1 else "One seed: no interval. Use --seeds 5 or more.")]


def _cost(mean: float, half: float | None) -> str:
    """Return 1,536, or 12.3 ± 0.4 with an interval if the seeds differ."""
    number = f"{mean:,.0f}" if mean == int(mean) else f"{mean:,.1f}"
    return f"{number} ± {half:,.1f}" if half else number


def _pair(mean: float, half: float | None, sign: bool = False) -> str:
    number = f"{mean:+.3f}" if sign else f"{mean:.3f}"
    return number if half is None else f"{number} ± {half:.3f}"


COMMANDS = {"train": (TrainCommand, ResumeCommand, PreflightCommand, RoundsCommand, CompareCommand)}
