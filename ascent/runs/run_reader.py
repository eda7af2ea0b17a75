"""Read a run from its folder: settings, metrics, events, recorded responses and checkpoints."""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from ascent.core.config import Config
from ascent.core.errors import ConfigError
from ascent.models.causal_lm import SAVED_MODEL
from ascent.runs import checkpoint, rollout_files
from ascent.runs.display.notebook import Completions, Picture, run_html
from ascent.runs.display.plots import draw_runs
from ascent.runs.metrics import best_evaluation
from ascent.runs.run_folder import check_links_stay_inside, is_locked
from ascent.runs.run_info import RUN_FORMAT
from ascent.runs.trust import DESCRIPTION, check_trust
from ascent.runs.untrusted_files import finite_number, naming_file, read_json, read_lines, read_metrics
from ascent.settings import config_from, names_of_objects
from ascent.tasks.python_objects import match_objects, replace_object_names
from ascent.training.sharded_checkpoint import SHARD_FILES


class RunRecord:
    """A finished, running or failed run: `run.folder`, `run.metrics`, `run.policy`."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.changed: dict[str, str] = {}
        """Names of the Python objects of the run, and of the objects that replace them."""
        if not self.folder.is_dir():
            raise ConfigError(f"{self.folder}: there is no such folder")
        if (self.folder / "config.json").exists() and not (self.folder / "run.json").exists():
            raise ConfigError(
                f"{self.folder}: this run was killed before its first step. Start it again: ascent train --config "
                f"{self.folder / 'config.json'} --out {self.folder}"
            )
        info = self.info
        kinds = {"status": str, "result": dict | None, "history": list}
        if not isinstance(info, dict) or not all(isinstance(info.get(k, 0), kind) for k, kind in kinds.items()):
            raise ConfigError(
                f"{self.folder / 'run.json'} is not a run.json of Ascent: it has no status, result and history"
            )

    def __repr__(self) -> str:
        return f"RunRecord({str(self.folder)!r}, {self.status})"

    def _repr_html_(self) -> str:
        return run_html(self.folder, self.info | {"status": self.status}, self.metrics)

    def __fspath__(self) -> str:
        """Return the folder, so that functions that take a folder take a run: ascent.sample(run, …)."""
        return str(self.folder)

    @property
    def info(self) -> dict[str, Any]:
        return read_json(self.folder / "run.json")

    @property
    def status(self) -> str:
        """One of finished, interrupted, failed, running and died (its process is gone without an end)."""
        status = self.info["status"]
        return "died" if status == "running" and not is_locked(self.folder) else status

    @property
    def result(self) -> dict[str, Any] | None:
        return self.info["result"]

    @cached_property
    def config(self) -> Config:
        """The settings, to load or to resume the run. This runs the code that they name; `info` runs none."""
        if self.info.get("format") != RUN_FORMAT:
            raise ConfigError(
                f"{self.folder} was written by another version of Ascent (format {self.info.get('format', 'unknown')}; "
                f"this version reads {RUN_FORMAT}): it can be shown, but not loaded or resumed. Train it again"
            )
        settings = self._trusted_settings()
        with naming_file(self.folder / "config.json"):
            here = {SAVED_MODEL: str(self.folder.resolve() / "model")}
            return config_from(replace_object_names(settings, self.changed | here))

    def _trusted_settings(self, trusted: bool = False) -> dict[str, Any]:
        """Return the settings; raise ConfigError unless they are plain data, made on this machine or trusted."""
        settings = read_settings(self.folder / "config.json", with_description=True)
        with naming_file(self.folder / "config.json"):
            check_trust(self.folder, settings, self.info.get("code"), trusted)
        return {key: value for key, value in settings.items() if key not in DESCRIPTION}

    def take_objects(self, objects: Mapping[str, Any], anyway: bool = False, needed: bool = True) -> None:
        """Match the Python objects of the run with `objects` and those of this process, or raise ConfigError.

        With `needed=False` (for a run that is not continued), compare only the objects that were passed.
        """
        recorded, passed = self.info.get("objects"), names_of_objects(objects)
        recorded = recorded if isinstance(recorded, dict) else {}
        if not needed:
            recorded = {
                n: about for n, about in recorded.items() if isinstance(about, dict) and about.get("setting") in objects
            }
        self.changed = match_objects(recorded, passed, anyway)

    @property
    def max_reward(self) -> float | None:
        """The largest reward of the task; None if it is not recorded."""
        return finite_number(self.info.get("max_reward", (self.result or {}).get("max_reward")))

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One dictionary per step."""
        return read_metrics(self.folder / "metrics.jsonl")

    @property
    def last(self) -> dict[str, Any]:
        """The last known value of every metric."""
        return {name: value for line in self.metrics for name, value in line.items() if value is not None}

    def frame(self) -> Any:
        """Return the metrics as a pandas DataFrame, one row per step."""
        try:
            from pandas import DataFrame
        except ImportError:
            raise ConfigError("run.frame() needs pandas: pip install pandas. Without it: run.metrics") from None
        return DataFrame(self.metrics).set_index("step")

    def plot(self) -> Picture:
        """Return the curves as a picture that a notebook shows; `run.plot().save(path)` writes it."""
        title = f"{self.info['task']}, {self.info['label']}, seed {self.info['seed']}"
        return Picture(draw_runs([(self.folder.name, self.metrics, self.max_reward)], title))

    def completions(self, step: int | None = None) -> Completions:
        """Return the recorded responses of a step (default: the last recorded one), one dictionary each."""
        recorded = rollout_files.recorded_steps(self.folder)
        if step is None and not recorded:
            raise ConfigError(f"{self.folder}: no responses were recorded (--record-rollouts)")
        return Completions(self.rollouts(recorded[-1] if step is None else step))

    @property
    def updates(self) -> list[dict[str, Any]]:
        """One dictionary per optimizer update."""
        return read_metrics(self.folder / "updates.jsonl")

    @property
    def events(self) -> list[dict[str, Any]]:
        return read_lines(self.folder / "events.jsonl")

    def rollouts(self, step: int) -> list[dict[str, Any]]:
        """Return the recorded responses of a step, one dictionary each."""
        return rollout_files.read_rollouts(self.folder, step)

    def held_out(self, step: int) -> list[dict[str, Any]]:
        """Return the recorded greedy answers of the evaluation after a step, one dictionary each."""
        return rollout_files.read_rollouts(self.folder, step, rollout_files.HELD_OUT)

    @property
    def checkpoints(self) -> list[Path]:
        check_links_stay_inside(self.folder, "checkpoints")
        return checkpoint.complete_checkpoints(self.folder / "checkpoints")

    def checkpoint(self, step: int | None = None, best: bool = False, flag: str = "--step") -> Path:
        """Return the newest checkpoint, or that of a step, or of the best evaluation."""
        if step is not None and best:
            raise ConfigError(f"{flag} {step} and --best exclude each other: set one of them")
        by_step = {checkpoint.step_of(path): path for path in self.checkpoints}
        if not by_step:
            raise ConfigError(f"{self.folder}: no checkpoint yet, so there is no policy to load")
        option, reason = f"{flag} {step}", ""
        if best:
            evaluation = best_evaluation(self.metrics)
            if evaluation is None:
                raise ConfigError(f"--best: {self.folder} was never evaluated, so it has no best checkpoint")
            step, option = evaluation[0], "--best"
            reason = f": its best evaluation is that of step {step}, whose checkpoint was not kept (set --keep-best)"
        if step is None:
            return by_step[max(by_step)]
        if step not in by_step:
            steps = ", ".join(map(str, by_step))
            raise ConfigError(f"{option}: {self.folder} has no such checkpoint{reason}. It has those of steps {steps}")
        return by_step[step]


def trust(run: str | Path) -> None:
    """Let this process use everything that a run's settings name: code, programs, addresses and files (--trust)."""
    RunRecord(run)._trusted_settings(trusted=True)


def init_folder(init: str | Path) -> Path:
    """Return the folder of params.safetensors that --init names: a run's newest checkpoint, or the folder itself."""
    folder = Path(init)
    if (folder / "run.json").exists():
        if not RunRecord(folder).checkpoints:
            raise ConfigError(f"--init {init}: that run has no checkpoint yet")
        folder = RunRecord(folder).checkpoints[-1]
    if not (folder / "params.safetensors").exists() and not any(folder.glob(SHARD_FILES)):
        raise ConfigError(f"--init {init}: this is neither a run nor a folder with params.safetensors")
    return folder.resolve()


def check_trains_policy(config: Config, folder: Path) -> None:
    """Raise ConfigError for a run that trained a reward model or a process reward model."""
    trains = config.algorithm.loss.trains
    if trains != "policy":
        product, kind = ("process reward", "process") if trains == "steps" else ("reward model", "model")
        raise ConfigError(
            f"{folder} trained a {product} and not a policy: it scores responses and cannot generate. Its metrics: "
            f"ascent show {folder}; as a reward: --reward {kind}:{folder}; in Python: ascent.build.reward_loading.load_"
            f"{product.replace(' ', '_')}"
        )


def read_settings(path: Path, with_description: bool = False) -> dict[str, Any]:
    """Read a config.json, by default without the description for people (objective, formula, label)."""
    settings = read_json(path)
    if not isinstance(settings, dict) or "task" not in settings:
        raise ConfigError(f"{path} is not a config: it must be a JSON object with a `task`, like a run's config.json")
    return {key: value for key, value in settings.items() if with_description or key not in DESCRIPTION}
