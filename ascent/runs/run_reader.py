"""A run: written into its folder step by step, and read back from there."""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from ascent.core.config import Config
from ascent.core.errors import ConfigError
from ascent.models.causal_lm import KEPT_MODEL
from ascent.runs import checkpoint, rollout_files
from ascent.runs.display.notebook import Completions, Picture, run_html
from ascent.runs.display.plots import draw_runs
from ascent.runs.metrics import best_evaluation
from ascent.runs.run_folder import check_links_stay_inside, is_locked
from ascent.runs.run_info import RUN_FORMAT
from ascent.runs.trust import DESCRIPTION, check_trust
from ascent.runs.untrusted_files import finite_number, naming_file, read_json, read_lines, read_metrics
from ascent.settings import config_from, name_given
from ascent.tasks.python_objects import match_objects, renamed
from ascent.training.sharded_checkpoint import SHARD_FILES


class RunRecord:
    """A finished, running or dead run: `run.folder`, `run.metrics`, `run.policy`."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.changed: dict[str, str] = {}
        """Objects of Python that it was made with, and those that were given in their place, by their names."""
        if not self.folder.is_dir():
            raise ConfigError(f"{self.folder}: there is no such folder")
        if (self.folder / "config.json").exists() and not (self.folder / "run.json").exists():
            raise ConfigError(
                f"{self.folder}: this run was killed before it began. Start it again: ascent train --config "
                f"{self.folder / 'config.json'} --out {self.folder}"
            )
        info = self.info
        kinds = {"status": str, "result": dict | None, "history": list}
        if not isinstance(info, dict) or not all(isinstance(info.get(k, 0), kind) for k, kind in kinds.items()):
            raise ConfigError(f"{self.folder / 'run.json'} is not a run's: it has no status, result and history")

    def __repr__(self) -> str:
        return f"RunRecord({str(self.folder)!r}, {self.status})"

    def _repr_html_(self) -> str:
        return run_html(self.folder, self.info | {"status": self.status}, self.metrics)

    def __fspath__(self) -> str:
        """A run stands for its folder: ascent.sample(run, …), ascent.resume(run)."""
        return str(self.folder)

    @property
    def info(self) -> dict[str, Any]:
        return read_json(self.folder / "run.json")

    @property
    def status(self) -> str:
        """finished, interrupted, failed, running, or died: left running by a process that is gone."""
        status = self.info["status"]
        return "died" if status == "running" and not is_locked(self.folder) else status

    @property
    def result(self) -> dict[str, Any] | None:
        return self.info["result"]

    @cached_property
    def config(self) -> Config:
        """Its settings, ready to load or to continue it; the code that they name is run. To look at it, use `info`."""
        if self.info.get("format") != RUN_FORMAT:
            raise ConfigError(
                f"{self.folder} was written by another version of Ascent (format {self.info.get('format', 'unknown')}; "
                f"this version reads {RUN_FORMAT}): it can be shown, and not loaded or resumed. Train it again"
            )
        settings = self._trusted_settings()
        with naming_file(self.folder / "config.json"):
            here = {KEPT_MODEL: str(self.folder.resolve() / "model")}
            return config_from(renamed(settings, self.changed | here))

    def _trusted_settings(self, trusted: bool = False) -> dict[str, Any]:
        """Its settings, refused unless they are plain data, known on this machine or trusted."""
        settings = read_settings(self.folder / "config.json", people=True)
        with naming_file(self.folder / "config.json"):
            check_trust(self.folder, settings, self.info.get("code"), trusted)
        return {key: value for key, value in settings.items() if key not in DESCRIPTION}

    def take_objects(self, objects: Mapping[str, Any], anyway: bool = False, needed: bool = True) -> None:
        """Find the objects of Python that it was made with among those given, or those of this process; or refuse.

        `needed=False`: of a run that does not go on, only those that are given are compared.
        """
        recorded, given = self.info.get("objects"), name_given(objects)
        recorded = recorded if isinstance(recorded, dict) else {}
        if not needed:
            recorded = {
                n: was for n, was in recorded.items() if isinstance(was, dict) and was.get("setting") in objects
            }
        self.changed = match_objects(recorded, given, anyway)

    @property
    def max_reward(self) -> float | None:
        """The largest reward of its task, as far as its records say."""
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
        """The metrics as a DataFrame of pandas, one row per step."""
        try:
            from pandas import DataFrame
        except ImportError:
            raise ConfigError("run.frame() needs pandas: pip install pandas. Without it: run.metrics") from None
        return DataFrame(self.metrics).set_index("step")

    def plot(self) -> Picture:
        """The curves, as a picture that a notebook shows; `run.plot().save(path)` writes it."""
        title = f"{self.info['task']}, {self.info['label']}, seed {self.info['seed']}"
        return Picture(draw_runs([(self.folder.name, self.metrics, self.max_reward)], title))

    def completions(self, step: int | None = None) -> Completions:
        """The recorded responses of a step, one dictionary each; by default those of the last recorded step."""
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
        """The recorded responses of a step, one dictionary each."""
        return rollout_files.read_rollouts(self.folder, step)

    def held_out(self, step: int) -> list[dict[str, Any]]:
        """The recorded greedy answers of the evaluation in a step, one dictionary each."""
        return rollout_files.read_rollouts(self.folder, step, rollout_files.HELD_OUT)

    @property
    def checkpoints(self) -> list[Path]:
        check_links_stay_inside(self.folder, "checkpoints")
        return checkpoint.complete(self.folder / "checkpoints")

    def checkpoint(self, step: int | None = None, best: bool = False, flag: str = "--step") -> Path:
        """The newest checkpoint, that of a step, or that of the best evaluation; refused with what there is."""
        if step is not None and best:
            raise ConfigError(f"{flag} {step} and --best name two checkpoints: give one of them")
        there = {checkpoint.step_of(path): path for path in self.checkpoints}
        if not there:
            raise ConfigError(f"{self.folder}: no checkpoint yet, so there is no policy to load")
        wanted, why = f"{flag} {step}", ""
        if best:
            found = best_evaluation(self.metrics)
            if found is None:
                raise ConfigError(f"--best: {self.folder} was never evaluated, so no checkpoint is its best")
            step, wanted = found[0], "--best"
            why = f": its best evaluation is that of step {step}, which was not kept (--keep-best does)"
        if step is None:
            return there[max(there)]
        if step not in there:
            listed = ", ".join(map(str, there))
            raise ConfigError(f"{wanted}: {self.folder} has no such checkpoint{why}. There are: {listed}")
        return there[step]


def trust(run: str | Path) -> None:
    """Let this process use all that the settings of a run name: code, programs, addresses, files. On the command line:
    --trust."""
    RunRecord(run)._trusted_settings(trusted=True)


def init_folder(init: str | Path) -> Path:
    """The folder with the params.safetensors that --init names: a run's newest checkpoint, or this very folder."""
    folder = Path(init)
    if (folder / "run.json").exists():
        if not RunRecord(folder).checkpoints:
            raise ConfigError(f"--init {init}: that run has no checkpoint yet")
        folder = RunRecord(folder).checkpoints[-1]
    if not (folder / "params.safetensors").exists() and not any(folder.glob(SHARD_FILES)):
        raise ConfigError(f"--init {init}: neither a run nor a folder with params.safetensors")
    return folder.resolve()


def check_trains_policy(config: Config, folder: Path) -> None:
    """Refuse a run that trained a reward model or a process reward."""
    trains = config.algorithm.loss.trains
    if trains != "policy":
        what, kind = ("process reward", "process") if trains == "steps" else ("reward model", "model")
        raise ConfigError(
            f"{folder} trained a {what} and not a policy: it rates responses and writes none. Its figures: ascent show "
            f"{folder}; as a reward: --reward {kind}:{folder}; in Python: ascent.build.reward_loading.load_"
            f"{what.replace(' ', '_')}"
        )


def read_settings(path: Path, people: bool = False) -> dict[str, Any]:
    """A config.json as it stands, without what is there only for people, unless told."""
    settings = read_json(path)
    if not isinstance(settings, dict) or "task" not in settings:
        raise ConfigError(f"{path} is not a config: it has to be an object with a `task`, as a run's config.json is")
    return {key: value for key, value in settings.items() if people or key not in DESCRIPTION}
