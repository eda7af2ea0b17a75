"""`ascent rounds`: iterative GRPO (Shao et al. 2024) as ordinary runs in one folder.

    FOLDER/rounds.json            every setting, so that `ascent rounds FOLDER` continues
    FOLDER/round_1/pairs.jsonl    two responses of the current policy per prompt, labeled by the true reward or a judge
    FOLDER/round_1/learned.jsonl  those, and some pairs of earlier rounds
    FOLDER/round_1/reward-model/  a run on learned.jsonl, initialized from the previous reward model
    FOLDER/round_1/policy/        a run on that reward, initialized from the previous policy, which is its reference
    FOLDER/round_1/true.json      the true reward of the policy's greedy answers to held-out prompts
    FOLDER/round_2/…

Files are written atomically and runs can be resumed. Finished parts are not repeated.
"""

import json
import secrets
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ascent.api import resolve_machine_settings, resume, start
from ascent.build.backends import backend_of
from ascent.build.trained_run import Run, load_policy
from ascent.core.config import Config
from ascent.core.errors import ConfigError, RunError
from ascent.core.menu import to_dict
from ascent.core.types import check_counts
from ascent.rewards.judge.judge_settings import read_judge
from ascent.runs.display.notebook import default_display
from ascent.runs.display.terminal import Display
from ascent.runs.run_folder import RunFolder, write_json
from ascent.runs.run_reader import init_folder
from ascent.runs.trust import check_trust, record_run
from ascent.runs.untrusted_files import naming_file, read_json
from ascent.settings import config_from, configure, flatten
from ascent.tasks.user_files import absolute_path, read_jsonl, write_jsonl
from ascent.workflows.labels import label_pairs, sample_candidates, sample_pairs
from ascent.workflows.loaded_policy import LoadedPolicy, Row, sampling_config, untrained_policy

ROUNDS_FILE = "rounds.json"


@dataclass(frozen=True)
class RoundsPlan:
    """The number of rounds and their settings."""

    rounds: int = 3
    """Rounds, each of which trains a reward model and a policy."""
    pairs: int = 256
    """New pairs per round."""
    replay: float = 0.1
    """Fraction of a reward model's pairs that comes from earlier rounds."""
    judge: str | None = None
    """A judge's TOML file. None: the task's reward labels the pairs and is hidden from the policy."""

    def __post_init__(self) -> None:
        check_counts(rounds=self.rounds, pairs=self.pairs)
        if not 0 <= self.replay < 1:
            raise ConfigError(f"--replay is {self.replay:g}: a fraction of old pairs, at least 0 and below 1")


class Rounds:
    """The rounds of a folder; `run_all` continues them."""

    def __init__(self, folder: Path, config: Config, plan: RoundsPlan, reward_model: dict[str, Any], show: bool = True):
        self.folder, self.config, self.plan, self.show = folder, config, plan, show
        self.reward_model = reward_model
        """Settings of the reward models' runs."""
        self.backend = backend_of(config)
        self.backend.check(config)
        self.reward_model_config(Path("pairs.jsonl"), 1)  # raise errors of later parts now
        if plan.judge is not None:
            if not self.backend.uses_text:
                raise ConfigError("--judge needs a text task: leave it out, and the true reward labels the pairs")
            read_judge(plan.judge).validated()
        if any(not source.startswith("judge:") for source in self.backend.reward_sources(config.task)):
            raise ConfigError(
                f"--reward {config.task.reward}: in rounds this is the true reward that labels the pairs, so it "
                "cannot be a learned reward"
            )
        if config.data != "samples":
            raise ConfigError("--algorithm: rounds need an algorithm that samples from the policy, such as grpo")

    def run_all(self) -> None:
        """Run every unfinished part of every round, in order."""
        for number in range(1, self.plan.rounds + 1):
            folder = self.path_of(number)
            folder.mkdir(parents=True, exist_ok=True)
            self.make_once(folder / "pairs.jsonl", partial(self.make_pairs, number))
            self.make_once(folder / "learned.jsonl", partial(self.mix_pairs, number))
            self.run(folder / "reward-model", partial(self.reward_model_config, folder / "learned.jsonl", number))
            self.run(folder / "policy", partial(self.policy_config, number))
            self.make_once(folder / "true.json", partial(self.evaluate_true_reward, number))

    def path_of(self, number: int, name: str = "") -> Path:
        return self.folder / f"round_{number}" / name

    def make_once(self, path: Path, make: Callable[[Path], Any]) -> None:
        """Make a file unless it exists; files are written atomically."""
        if not path.exists():
            make(path)

    def run(self, path: Path, config: Callable[[], Config]) -> None:
        """Start or resume a run; do nothing if it is finished."""
        display = default_display() if self.show else Display()
        new = not (path / "run.json").exists()
        run = start(config(), path, display, preflight=False) if new else resume(path, display)
        if run.status != "finished":
            raise KeyboardInterrupt(f"{path} is saved")

    def make_pairs(self, number: int, path: Path) -> None:
        """Write new pairs of the current policy, labeled by the judge or by the true reward."""
        loaded, seed = self.policy_before(number), self.config.seed + number
        if self.plan.judge is None:
            rows = sample_pairs(loaded, self.plan.pairs, seed)
            self.check_pairs(rows, number)
            write_jsonl(path, rows)
            return
        candidates = path.with_name("candidates.jsonl")
        if not candidates.exists():
            write_jsonl(candidates, sample_candidates(loaded, self.plan.pairs, 2, seed))
        label_pairs(candidates, path, read_judge(self.plan.judge), show=self.show)
        try:
            self.check_pairs([row for _, row in read_jsonl(path)], number)
        except RunError:
            path.unlink()
            raise

    def check_pairs(self, rows: list[Row], number: int) -> None:
        """Raise RunError for too few pairs to train and test a reward model; print if there are fewer than planned."""
        if len({json.dumps(row["prompt"]) for row in rows}) < 2:
            raise RunError(
                f"round {number}: {len(rows)} pairs have a winner, but a reward model needs pairs of at least two "
                "prompts: responses are equal or could not be compared. Set more --pairs in a new folder"
            )
        if self.show and len(rows) < self.plan.pairs:
            winners = f"only {len(rows)} of {self.plan.pairs} planned pairs have a winner"
            print(f"round {number}: {winners}. The reward model is trained on these", file=sys.stderr, flush=True)

    def mix_pairs(self, number: int, path: Path) -> None:
        """Write the new pairs and a random sample of old ones, whose number follows from `replay`."""
        new = [row for _, row in read_jsonl(self.path_of(number, "pairs.jsonl"))]
        old = [row for n in range(1, number) for _, row in read_jsonl(self.path_of(n, "pairs.jsonl"))]
        count = min(len(old), round(len(new) * self.plan.replay / (1 - self.plan.replay)))
        order = torch.randperm(len(old), generator=torch.Generator().manual_seed(self.config.seed + number))
        write_jsonl(path, new + [old[i] for i in order[:count].tolist()])

    def policy_before(self, number: int) -> LoadedPolicy:
        """Return the initial policy of a round with the true reward: of the previous round, of --init, or untrained."""
        source = self.path_of(number - 1, "policy") if number > 1 else self.config.init
        if source is None:
            return untrained_policy(self.config)
        return LoadedPolicy(sampling_config(self.config), load_policy(self.config, init_folder(source)))

    def policy_config(self, number: int) -> Config:
        """Return the config of a round's policy: the learned reward, initialized from the previous policy."""
        learned = self.backend.reward_setting([f"model:{self.path_of(number, 'reward-model').resolve()}"])
        init = str(self.path_of(number - 1, "policy")) if number > 1 else self.config.init
        task = replace(self.config.task, reward=learned)
        return replace(self.config, task=task, init=init, seed=self.config.seed + number - 1)

    def reward_model_config(self, file: Path, number: int) -> Config:
        """Return the config of a round's reward model, initialized from the previous one."""
        task, settings = self.backend.reward_model_task(self.config, file)
        base: dict[str, Any] = {"seed": self.config.seed, "threads": self.config.threads}
        base |= flatten({"policy": to_dict(self.config.policy)})
        if number > 1:
            base["init"] = str(self.path_of(number - 1, "reward-model"))
        return configure(task, settings, base, self.reward_model)

    def evaluate_true_reward(self, number: int, path: Path) -> None:
        """Write the true reward of the round's policy on held-out prompts (greedy)."""
        loaded = self.policy_before(number + 1)
        with closing(loaded.task()) as task:
            prompts = task.held_out(self.config.eval_prompts)
            scores = task.score(loaded.sampler(prompts, 0).generate(prompts, 1, greedy=True))
        total = scores.reward.sum(-1)[scores.valid]
        write_json(path, {"reward": float(total.mean()) if len(total) else None, "prompts": len(total)})

    def summary(self) -> list[dict[str, Any]]:
        """Return a row per finished round with the learned and the true reward."""
        rows = []
        for number in range(1, self.plan.rounds + 1):
            if not self.path_of(number, "true.json").exists():
                break
            model, policy = (Run(self.path_of(number, name)).last for name in ("reward-model", "policy"))
            pairs, learned = (len(read_jsonl(self.path_of(number, f"{name}.jsonl"))) for name in ("pairs", "learned"))
            rows.append(
                {
                    "round": number,
                    "planned": self.plan.pairs,
                    "pairs": pairs,
                    "replayed": learned - pairs,
                    "reward model right": model.get("eval/pairs/accuracy"),
                    "learned reward": policy.get("eval/reward"),
                    "true reward": read_json(self.path_of(number, "true.json"))["reward"],
                    "exactly right": policy.get("eval/accuracy"),
                    "kl": policy.get("kl"),
                }
            )
        return rows


def start_rounds(
    folder: Path, config: Config, plan: RoundsPlan, reward_model: dict[str, Any], show: bool = True
) -> Rounds:
    """Create rounds in a new folder, or reopen those of the folder if their settings are the same."""
    existing = read_json(folder / ROUNDS_FILE) if (folder / ROUNDS_FILE).exists() else {}
    if not config.threads:  # keep the number of threads
        config = replace(config, threads=existing.get("config", {}).get("threads", 0))
    config, _ = resolve_machine_settings(config)
    if plan.judge is not None:
        plan = replace(plan, judge=absolute_path(plan.judge))
    settings: dict[str, Any] = {"plan": asdict(plan), "config": config.to_dict(), "reward_model": reward_model}
    rounds = Rounds(folder, config, plan, reward_model, show)
    if existing:
        if {name: existing.get(name) for name in settings} != json.loads(json.dumps(settings)):
            raise ConfigError(f"--out {folder}: rounds with other settings. To continue them: ascent rounds {folder}")
        return rounds
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"--out {folder}: the folder exists and is not empty. Choose another one")
    folder.mkdir(parents=True, exist_ok=True)
    settings["id"] = secrets.token_hex(16)
    record_run(folder, all_settings(settings))  # before rounds.json, so that rounds that are killed here can continue
    write_json(folder / ROUNDS_FILE, settings)
    return rounds


def all_settings(saved: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of rounds in the form of one run's, for the trust check."""
    judge, models = saved["plan"]["judge"], {f"rm.{name}": value for name, value in saved["reward_model"].items()}
    return saved["config"] | models | {"id": saved.get("id"), "judge": judge and f"judge:{judge}"}


def reopen_rounds(folder: Path, show: bool = True) -> Rounds:
    """Reopen the rounds of a folder."""
    saved = read_json(folder / ROUNDS_FILE)
    with naming_file(folder / ROUNDS_FILE):
        check_trust(folder, all_settings(saved))
    return Rounds(folder, config_from(saved["config"]), RoundsPlan(**saved["plan"]), saved["reward_model"], show)


def run_rounds(rounds: Rounds) -> list[dict[str, Any]]:
    """Run the unfinished parts with the folder locked, and return the summary."""
    lock = RunFolder(rounds.folder)
    lock.lock()
    try:
        rounds.run_all()
    except KeyboardInterrupt as stopped:
        raise KeyboardInterrupt(f"{stopped or 'stopped'}. To continue: ascent rounds {rounds.folder}") from None
    finally:
        lock.close()
    return rounds.summary()
