"""Ascent in Python: `run = ascent.train("sort", algorithm="grpo", seed=0)`."""

import os
import secrets
import shutil
import signal
import stat
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ascent.build.assemble import RunParts
from ascent.build.cpu_threads import choose_num_threads
from ascent.build.launch import assemble_ranks
from ascent.build.trained_run import Run
from ascent.core.config import Config
from ascent.core.errors import ConfigError, RunError
from ascent.core.loop import train as loop
from ascent.core.menu import nearest
from ascent.core.types import Batch, State
from ascent.distributed.ranks import torchrun_id, torchrun_rank, training_world_size
from ascent.explain.explain import formula, objective_in_words
from ascent.models.causal_lm import PYTHON_MODELS, SAVED_MODEL, register_model, restore_python_model
from ascent.processes.user_code import CODE
from ascent.runs import checkpoint
from ascent.runs.alerts.step_alerts import findings
from ascent.runs.batch_serialization import check_ahead, unpack_rollouts
from ascent.runs.display.notebook import Completions, default_display
from ascent.runs.display.terminal import Display, summary_text
from ascent.runs.journal import Journal
from ascent.runs.rollout_files import sampled_rows
from ascent.runs.run_folder import RunFolder, check_new_folder, unlinked, write_json
from ascent.runs.run_info import default_folder, describe_run, run_label
from ascent.runs.run_list import was_oom_killed
from ascent.runs.run_reader import init_folder, read_settings
from ascent.runs.run_reader import trust as trust_run
from ascent.runs.run_writer import RunWriter
from ascent.runs.trackers.tracker_threads import Trackers, check_trackers
from ascent.runs.trust import record_run
from ascent.runs.untrusted_files import naming_file
from ascent.settings import PLAIN, check_run_length, config_from, configure
from ascent.tasks.python_objects import compare_objects, describe_objects, object_label, replace_object_names

RESULT_METRICS = (
    "reward",
    "accuracy",
    "eval/accuracy",
    "eval/reward",
    "exact/reward",
    "entropy",
    "frac_reward_zero_std",
)
"""The metrics in run.json's `result`."""
MEMORY_RAN_OUT = (
    "since this run was last seen alive, the system killed a process because memory ran out, maybe this one. "
    "To need less: a lower --micro-batch, fewer --policy.rows, --policy.checkpointing, or --policy.lora in a new run"
)
CHANGEABLE_SETTINGS = ("eval_every", "checkpoint_every", "keep", "keep_best", "record_every", "record_rollouts")
"""The settings that `TrainingStep.change` may change: they do not affect results."""
REPLAYED = (
    "the batches of steps {steps} are in the journal: their updates are made again from there, to the same numbers"
)
STOPPED_AT_ONCE = "stopped at once. Resume it with: ascent resume {folder}"
STOPPING_AFTER_STEP = "Stopping after this step, to save it. Press again to stop at once."


def train(
    task: Any, *, out: str | Path | None = None, show: bool = True, preflight: bool = True, **settings: Any
) -> Run:
    """Train on a task with these settings (the command line's, dots included) and return the run.

    ascent.train("sort", algorithm="grpo", samples=16, **{"loss.high": 0.28})
    """
    check_run_length(settings)
    CODE.clear()
    return start(configure(task, settings), out, default_display() if show else Display(), preflight)


def load(folder: str | Path, *, trust: bool = False, **objects: Any) -> Run:
    """Load a run from its folder.

    `objects` are the Python objects that the run was made with, such as loss=MyLoss or rows=rows. `trust` allows a run
    that was made on another machine to execute the code that its settings name (docs/runs.md).
    """
    run = Run(folder)
    if trust:
        trust_run(folder)
    if objects:
        run.take_objects(objects)
    return run


class PreparedRun(NamedTuple):
    """A run that is ready for its next step, and its locked folder."""

    parts: RunParts
    folder: RunFolder
    display: Display
    first: int = 0
    state: State | None = None


def start(config: Config, out: str | Path | None, display: Display, preflight: bool = True) -> Run:
    """Train a new run of this config, in a new folder, after the pre-flight."""
    return run_to_end(prepare_run(config, out, display, preflight))


def prepare_run(config: Config, out: str | Path | None, display: Display, preflight: bool = True) -> PreparedRun:
    config, note = resolve_machine_settings(config)
    _check_serializable(config)
    check_trackers(config.track)
    path = Path(out) if out is not None else default_folder(config)
    check_new_folder(path)
    given = None if torchrun_rank() else save_given_model(config, path)
    if note:
        display.show_message(note)
    try:
        parts = assemble_ranks(config)
    except BaseException:
        shutil.rmtree(given or "", ignore_errors=True)
        raise
    try:
        report = parts.preflight() if preflight else None
        if report is not None:
            display.show_message(report.text())
            report.raise_on_errors()
        parts.resolve_old_logp()
        if given is not None:
            parts.config = replace(parts.config, policy=with_saved_model(config.policy))
        config = parts.config
        words = {
            "label": run_label(config),
            "objective": objective_in_words(config.algorithm),
            "formula": formula(config.algorithm),
        }
        launch = {"launch": torchrun_id()} if torchrun_id() else {}
        settings = config.to_dict() | {"id": secrets.token_hex(16)}
        parts.notes += tuple(filter(None, [record_run(path, settings)]))  # first: a killed run can then be resumed
        folder = RunFolder.create(path, settings | words, describe_run(config, parts.backend.packages) | launch)
        if given is not None:
            given.rename(path / "model")
    except BaseException:
        parts.close()
        shutil.rmtree(given or "", ignore_errors=True)
        raise
    return PreparedRun(parts, folder, display)


def save_given_model(config: Config, path: Path) -> Path | None:
    """Save a model that was given as a Python object beside the run's folder, before training changes it."""
    model, tokenizer = PYTHON_MODELS.get(getattr(config.policy, "model", ""), (None, None))
    if model is None:
        return None
    aside = path.with_name(f".{path.name}-model")
    for part in (model, tokenizer):
        part.save_pretrained(aside)
    return aside


def with_saved_model(policy: Any) -> Any:
    """Return the policy for config.json: its model is loaded from the run's folder, in its present type and device."""
    model = PYTHON_MODELS[policy.model][0]
    dtype = str(model.dtype).removeprefix("torch.") if policy.dtype == "auto" else policy.dtype
    device = model.device.type if policy.device == "auto" else policy.device
    return replace(policy, model=SAVED_MODEL, dtype=dtype, device=device)


def resolve_machine_settings(config: Config) -> tuple[Config, str]:
    """Return the config with its number of threads and the absolute path of --init.

    And a note on the threads, if other processes use this machine.
    """
    init = None if config.init is None else str(init_folder(config.init))
    threads, note = (config.threads, "") if config.threads else choose_num_threads()
    return replace(config, threads=threads, init=init), note


def trust_settings(folder: Path, config: Config) -> None:
    """Trust the code and files of a run that this config, which the user has given here, names too."""
    with suppress(ConfigError):  # it starts from a run that is gone
        written = read_settings(folder / "config.json", with_description=True)
        record_run(
            folder, resolve_machine_settings(replace(config, threads=1))[0].to_dict() | {"id": written.get("id")}
        )


def _check_serializable(config: Config) -> None:
    """Raise a ConfigError for a choice that config.json cannot describe: the run could not be resumed or loaded."""
    with suppress(ConfigError):
        if config_from(config.to_dict()) == config:
            return
    raise ConfigError(
        "a choice or task of your own was given as an object whose fields config.json cannot hold: they have to be "
        "numbers, strings, or lists of them"
    )


def resume(
    run: str | Path,
    display: Display | None = None,
    from_step: int | None = None,
    *,
    anyway: bool = False,
    trust: bool = False,
    **objects: Any,
) -> Run:
    """Resume a run from its newest checkpoint (or that of `from_step`), to the same numbers.

    ascent.resume(folder, rows=rows, reward=[f, g])

    A finished run is left as it is. The records are not touched before the checkpoint is known to be whole. `objects`:
    those of Python that the run was made with. One that differs is refused with the difference, or taken `anyway`: the
    run says so, and its numbers are others from there on. A model that was given may be given again (with `tokenizer`),
    to be trained in place as before. `trust` is as in `load`.
    """
    if trust:
        trust_run(run)
    try:
        prepared = reopen_run(Run(run), display or default_display(), from_step, anyway=anyway, **objects)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(STOPPED_AT_ONCE.format(folder=Path(run))) from None
    return Run(run) if prepared is None else run_to_end(prepared)


def reopen_run(
    existing: Run, display: Display, from_step: int | None = None, *, anyway: bool = False, **objects: Any
) -> PreparedRun | None:
    """Prepare a run to continue from its checkpoint; None: it is finished."""
    if (left := ACTIVE_RUNS.get(existing.folder.resolve())) is not None:
        left.close()
    model = _model_given(existing, objects)
    if existing.status == "finished" and from_step is None:
        existing.take_objects(objects, anyway, needed=False)
        return None
    existing.take_objects(objects, anyway)
    check_trackers(existing.config.track)
    config = existing.config
    if not training_world_size(config.ranks.shard):  # what ranks have begun in shards, one process may continue
        config = replace(config, ranks=replace(config.ranks, shard="auto"))
    if model is not None:
        config = replace(config, policy=restore_python_model(config.policy, *model))
    if torchrun_rank():
        assemble_ranks(config)
    killed = was_oom_killed(existing.folder)
    folder = RunFolder.reopen(existing.folder)
    if folder.run["status"] == "finished" and from_step is None:  # it ended while it was looked at
        folder.close()
        return None
    try:
        checkpoint.remove_unfinished(folder.path / "checkpoints")
        chosen, groups, saved = _chosen_checkpoint(existing, from_step)
        first, state, sizes = saved["step"], saved["state"], saved["records"]
        folder.check_sizes(sizes)
        parts = assemble_ranks(config, groups.keys(), checkpoint.initial_params_folder(folder.path / "checkpoints"))
        if chosen is not None:
            with naming_file(chosen):
                parts.streams.restore(groups.pop("rng"))
                parts.engine.pending = unpack_rollouts(
                    groups.pop("ahead", {}), saved.get("ahead", []), parts.task.conversations
                )
                parts.learner.restore(groups)
            check_ahead(parts.engine.pending, first, config.ahead)
        journal = Journal(folder.path)
        drawn = first if existing.changed else _replay(journal, parts, first)
        parts.notes += (MEMORY_RAN_OUT,) if killed else ()
        folder.run |= {"status": "running", "result": None}
        folder.run.pop("reason", None)
        folder.note("resumed", step=first)
        if existing.changed:
            parts.notes += tuple(_record_changed_objects(existing, folder, first))
        if from_step is not None:
            folder.back_up_records(first)
        if chosen is not None:
            _set_aside_later_checkpoints(existing, chosen)
        journal.keep(first, drawn)
        folder.cut(sizes, first)
    except BaseException:
        folder.close()
        raise
    return PreparedRun(parts, folder, display, first, state)


def _chosen_checkpoint(existing: Run, from_step: int | None) -> tuple[Path | None, checkpoint.Groups, dict[str, Any]]:
    """Return the checkpoint to continue from and its contents; of a run without checkpoints, its start."""
    if not existing.checkpoints and from_step is None:
        return None, {}, {"step": 0, "state": None, "records": {}}
    chosen = existing.checkpoint(from_step, flag="--from")
    return chosen, *checkpoint.load_checkpoint(chosen)


def _set_aside_later_checkpoints(existing: Run, chosen: Path) -> None:
    """Rename the checkpoints after the chosen one, so that none of them is taken for the newest."""
    for later in existing.checkpoints:
        if checkpoint.step_of(later) > checkpoint.step_of(chosen):
            later.rename(later.with_name(f"replaced-{later.name}-{time.time_ns()}"))


def _replay(journal: Journal, parts: RunParts, first: int) -> int:
    """Replay the steps from `first` on that are in the journal; return the first step that is sampled anew."""
    if parts.engine.deterministic or (drawn := journal.first_new_step(first)) == first:
        return first
    parts.engine.first_version = drawn
    parts.notes += (REPLAYED.format(steps=first if drawn == first + 1 else f"{first} to {drawn - 1}"),)
    return drawn


def _model_given(run: Run, objects: dict[str, Any]) -> tuple[Any, Any] | None:
    """Take the model and tokenizer out of the objects; a run whose model is given by name accepts none."""
    given = model, tokenizer = objects.pop("model", None), objects.pop("tokenizer", None)
    if model is None and tokenizer is None:
        return None
    policy = read_settings(run.folder / "config.json")["policy"]
    if policy.get("model") != SAVED_MODEL:
        name = policy.get("model", policy["name"])
        raise ConfigError(f"model: this run was made with {name} by its name, and loads it from there. Give no model")
    register_model(model, tokenizer)
    return given


def _record_changed_objects(run: Run, folder: RunFolder, step: int) -> list[str]:
    """Record objects that replace others in config.json and run.json, and return notes on the differences."""
    settings = replace_object_names(read_settings(folder.path / "config.json", with_description=True), run.changed)
    was = dict(folder.run["objects"])
    notes = [
        f"{object_label(old)}: another one from here on\n{compare_objects(old, new, was[old])}"
        for old, new in run.changed.items()
    ]
    folder.run["objects"] = {run.changed.get(name, name): about for name, about in was.items()} | describe_objects(
        settings
    )
    folder.note("objects changed", step=step, objects=run.changed)
    write_json(folder.path / "config.json", settings)
    return notes


class TrainingStep:
    """A finished step of `for step in ascent.steps(…)`, whose records are written."""

    def __init__(self, number: int, writer: RunWriter, parts: RunParts):
        self.number, self._writer, self._parts = number, writer, parts
        self.changed: Config | None = None
        """The config of the following steps, if `change` was called."""

    def __repr__(self) -> str:
        return f"Step({self.number}, {summary_text(self.metrics)})"

    @property
    def metrics(self) -> dict[str, Any]:
        assert self._writer.newest is not None
        return {name: value for name, value in self._writer.newest[0].items() if value is not None}

    @property
    def batch(self) -> Batch:
        """Prompts, responses, log-probs, rewards and advantages, as tensors [prompt sample token]."""
        assert self._writer.newest is not None
        return self._writer.newest[1]

    def completions(self, groups: int = 4) -> Completions:
        """The responses of the first groups, one dictionary each."""
        groups = min(groups, len(self.batch.prompt))
        return Completions(sampled_rows(self.number, self.batch, groups, self._writer.token_texts))

    def evaluate(self) -> dict[str, Any]:
        """Evaluate on held-out prompts now. This does not change the run."""
        return dict(self._parts.evaluator()())

    def stop(self) -> None:
        """End the run after this step. It is saved and can be resumed."""
        self._writer.stop = True

    def change(self, **settings: Any) -> None:
        """Change settings that do not affect results: how often to evaluate, save and record. The run records it."""
        odd = [name for name in settings if name not in CHANGEABLE_SETTINGS]
        if odd:
            raise ConfigError(
                f"{odd[0]}: it affects results, so it cannot change during a run. These can: "
                f"{', '.join(CHANGEABLE_SETTINGS)}.{nearest(odd[0], CHANGEABLE_SETTINGS)}"
            )
        values = {name: PLAIN[name].check(value) for name, value in settings.items()}
        self.changed = self._writer.config = replace(self._writer.config, **values)
        folder = self._writer.folder
        folder.note("changed", step=self.number + 1, settings=values)
        write_json(
            folder.path / "config.json", read_settings(folder.path / "config.json", with_description=True) | values
        )


class TrainingSteps:
    """An iterator over the steps of a run. Leaving the loop early ends the run after that step and saves it."""

    def __init__(self, prepared: PreparedRun):
        self.folder = prepared.folder.path
        self._steps = run_steps(prepared, step_by_step=True)
        ACTIVE_RUNS[self.folder.resolve()] = self

    def __iter__(self) -> Iterator[TrainingStep]:
        return self

    def __next__(self) -> TrainingStep:
        return next(self._steps)

    def close(self) -> None:
        """End the run and save it."""
        self._steps.close()

    @property
    def run(self) -> Run:
        return Run(self.folder)


ACTIVE_RUNS: weakref.WeakValueDictionary[Path, TrainingSteps] = weakref.WeakValueDictionary()
"""The runs that this process iterates over."""


def steps(
    task: Any, *, out: str | Path | None = None, show: bool = False, preflight: bool = True, **settings: Any
) -> TrainingSteps:
    """Train a new run, or resume a given Run, step by step.

    for step in ascent.steps(rows, model="FOLDER", reward=f):
        if step.metrics["reward"] > 0.9:
            step.stop()
    """
    display = default_display() if show else Display()
    if isinstance(task, Run):
        prepared = reopen_run(task, display, **settings)
        if prepared is None:
            raise ConfigError(
                f"{task.folder} is finished: there is no step left. To go back: ascent.resume(run, from_step=N)"
            )
        return TrainingSteps(prepared)
    check_run_length(settings)
    CODE.clear()
    return TrainingSteps(prepare_run(configure(task, settings), out, display, preflight))


def run_to_end(prepared: PreparedRun) -> Run:
    """Run all remaining steps."""
    for _ in run_steps(prepared):
        pass
    return Run(prepared.folder.path)


def run_steps(prepared: PreparedRun, step_by_step: bool = False) -> Generator[TrainingStep, None, None]:
    """Run the training loop, yield its steps, and write status and result into run.json.

    `step_by_step`: the caller's code runs between two steps, and handles Ctrl-C there.
    """
    parts, folder, display, first, state = prepared
    config = parts.config
    writer = RunWriter(folder, config, parts.task, display)
    trackers = Trackers(config.track, folder.path, config.to_dict(), folder.path.name, first, writer.note)
    writer.trackers = trackers
    writer.journal = None if parts.engine.deterministic else Journal(folder.path)
    writer.timeline = parts.backend.timeline(parts.engine) if config.data == "samples" else None
    parts.backend.set_log_folder(parts.evaluation.engine if parts.evaluation else parts.engine, folder.path)

    def waiting(here: bool) -> AbstractContextManager[None]:
        return interruptible(writer, lambda: display.show_message(STOPPING_AFTER_STEP)) if here else nullcontext()

    with waiting(not step_by_step):
        try:
            display.start(first, config.steps, f"{folder.run['task']} {folder.run['label']}")
            for note in parts.notes:
                display.show_message(note)
            if config.init is not None:
                writer.keep_initial_params(Path(config.init))
            evaluate = writer.with_journal(parts.evaluator(writer.keep_answers))
            given = (parts.task, parts.engine, parts.learner, writer, parts.streams, evaluate, first, state)
            made: Any = loop(config, *given, writer.journal)
            step: TrainingStep | None = None
            with suppress(StopIteration):
                while True:
                    with waiting(step_by_step):
                        step = TrainingStep(made.send(None if step is None else step.changed), writer, parts)
                    try:
                        yield step
                    except GeneratorExit:
                        writer.stop = True
            writer.wait_for_checkpoint()
            done = max(first, writer.last.get("step", -1) + 1) >= config.steps
            folder.run["status"] = "finished" if done else "interrupted"
        except KeyboardInterrupt:
            folder.run["status"] = "interrupted"
            raise KeyboardInterrupt(STOPPED_AT_ONCE.format(folder=folder.path)) from None
        except Exception as error:
            run_error = _run_error(error, folder.path)
            folder.run |= {"status": "failed", "reason": str(run_error)}
            writer.record_error(str(run_error))
            raise run_error from (None if run_error is error else error)
        finally:
            close_run(parts, folder, display, writer)
            trackers.close(folder.run["status"])


def close_run(parts: RunParts, folder: RunFolder, display: Display, writer: RunWriter) -> None:
    """Close the parts of a run and write its result."""
    display.close()
    writer.close()
    parts.close()
    last = Run(folder.path).last
    folder.run["step"] = last.get("step", -1) + 1
    if last:  # the last value of what matters, and words
        task, group = parts.config.task, parts.config.algorithm.advantage.group_relative
        folder.run["result"] = {
            "steps": folder.run["step"],
            **{name: last.get(name) for name in RESULT_METRICS},
            "max_reward": task.max_reward,
            "words": findings(last, task, group),
        }
    folder.close(folder.run["status"])


def _run_error(error: Exception, folder: Path) -> Exception:
    """Return the error to raise: RunError and ConfigError unchanged; others with the path of their traceback."""
    if isinstance(error, RunError | ConfigError):
        return error
    if isinstance(error, OSError):
        return RunError(f"{folder} cannot be written: {error.strerror}. Make room, then: ascent resume {folder}")
    unlinked(folder / "error.txt").write_text("".join(traceback.format_exception(error)))
    return RunError(f"unexpected error: {type(error).__name__}: {error}. The details are in {folder / 'error.txt'}")


@contextmanager
def interruptible(work: Any, announce: Callable[[], None] = lambda: None) -> Iterator[None]:
    """The first Ctrl-C, SIGTERM or SIGHUP sets `work.stop`, so that it can end in order; a second one interrupts it.

    A SIGHUP that is ignored (nohup) stays ignored.
    """

    def handle(number: int, _: Any) -> None:
        if number == signal.SIGHUP:  # the terminal is gone, and writing to it would be an error
            for file in (1, 2):
                if stat.S_ISCHR(os.fstat(file).st_mode):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), file)
        if work.stop:
            raise KeyboardInterrupt(*([] if number == signal.SIGINT else [signal.Signals(number).name]))
        work.stop = True
        announce()

    main = threading.current_thread() is threading.main_thread()
    ends = [signal.SIGINT, signal.SIGTERM]
    ends += [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else []
    before = {s: signal.signal(s, handle) for s in ends if main}
    try:
        yield
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
