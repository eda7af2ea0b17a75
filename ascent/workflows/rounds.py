"""`ascent rounds`: iterative GRPO (Shao et al. 2024) as rounds of ordinary runs in one folder. The loop does not know.

    FOLDER/rounds.json            every setting, so that `ascent rounds FOLDER` continues
    FOLDER/round_1/pairs.jsonl    two responses of the policy so far per prompt, labelled by the true reward or a judge
    FOLDER/round_1/learned.jsonl  those, and a share of the pairs of earlier rounds
    FOLDER/round_1/reward-model/  a run on them, from the reward model of the round before
    FOLDER/round_1/policy/        a run on that reward, from the policy of the round before, which is its reference
    FOLDER/round_1/true.json      the true reward of that policy's greedy answers to held-out prompts
    FOLDER/round_2/…

Each part is there whole or not at all, or is a run that can be resumed. What is finished is not done again.
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

from ascent.api import resume, settled, start
from ascent.build.backends import backend_of
from ascent.build.trained_run import Run, load_policy
from ascent.core.config import Config
from ascent.core.errors import ConfigError, RunError
from ascent.core.menu import to_dict
from ascent.core.types import check_counts
from ascent.rewards.judge.judge_settings import read_judge
from ascent.runs.display.notebook import for_stream
from ascent.runs.display.terminal import Display
from ascent.runs.run_folder import RunFolder, write_json
from ascent.runs.run_reader import init_folder
from ascent.runs.trust import check_trust, record_run
from ascent.runs.untrusted_files import naming_file, read_json
from ascent.settings import config_from, configure, flatten
from ascent.tasks.user_files import absolute_path, read_jsonl, write_jsonl
from ascent.workflows.labels import draw_candidates, draw_pairs, label_pairs
from ascent.workflows.loaded_policy import LoadedPolicy, Row, for_asking, untrained_policy

ROUNDS_FILE = "rounds.json"


@dataclass(frozen=True)
class RoundsPlan:
    """How many rounds, and what happens in each."""

    rounds: int = 3
    """Rounds of pairs, a reward model and a policy."""
    pairs: int = 256
    """New pairs in each."""
    replay: float = 0.1
    """Share of a reward model's pairs that are of earlier rounds."""
    judge: str | None = None
    """A judge's TOML file. None: the task's own reward labels the pairs, and is hidden from the policy."""

    def __post_init__(self) -> None:
        check_counts(rounds=self.rounds, pairs=self.pairs)
        if not 0 <= self.replay < 1:
            raise ConfigError(f"--replay is {self.replay:g}: a share of old pairs, from 0 to below 1")


class Rounds:
    """The rounds of a folder: `go` does what is still to be done."""

    def __init__(self, folder: Path, config: Config, plan: RoundsPlan, reward_model: dict[str, Any], show: bool = True):
        self.folder, self.config, self.plan, self.show = folder, config, plan, show
        self.reward_model = reward_model
        """Settings of the reward models' runs."""
        self.backend = backend_of(config)
        self.backend.check(config)
        self.reward_model_config(Path("pairs.jsonl"), 1)  # what would fail in a later part is refused now
        if plan.judge is not None:
            if not self.backend.words:
                raise ConfigError(
                    "--judge with a small task: a judge reads words. Leave it out: the true reward labels"
                )
            read_judge(plan.judge).insist()
        if any(not source.startswith("judge:") for source in self.backend.reward_sources(config.task)):
            raise ConfigError(
                f"--reward {config.task.reward}: in rounds this is the true reward, which labels pairs, so it "
                "cannot be a learned one"
            )
        if config.data != "samples":
            raise ConfigError("--algorithm: the policy of a round learns from its own samples, as in grpo")

    def go(self) -> None:
        """Every part of every round that is not finished yet, in order."""
        for number in range(1, self.plan.rounds + 1):
            here = self.part(number)
            here.mkdir(parents=True, exist_ok=True)
            self.once(here / "pairs.jsonl", partial(self.make_pairs, number))
            self.once(here / "learned.jsonl", partial(self.mix, number))
            self.run(here / "reward-model", partial(self.reward_model_config, here / "learned.jsonl", number))
            self.run(here / "policy", partial(self.policy_config, number))
            self.once(here / "true.json", partial(self.measure, number))

    def part(self, number: int, name: str = "") -> Path:
        return self.folder / f"round_{number}" / name

    def once(self, path: Path, make: Callable[[Path], Any]) -> None:
        """A file that appears whole: if it is there, it is finished."""
        if not path.exists():
            make(path)

    def run(self, path: Path, config: Callable[[], Config]) -> None:
        """A run: started, resumed, or left as it is where it is finished."""
        display = for_stream() if self.show else Display()
        new = not (path / "run.json").exists()
        run = start(config(), path, display, preflight=False) if new else resume(path, display)
        if run.status != "finished":
            raise KeyboardInterrupt(f"{path} is saved")

    def make_pairs(self, number: int, path: Path) -> None:
        """New pairs of the policy so far, labelled by the judge, or by the true reward, whatever it was trained on."""
        loaded, seed = self.policy_before(number), self.config.seed + number
        if self.plan.judge is None:
            rows = draw_pairs(loaded, self.plan.pairs, seed)
            self.insist(rows, number)
            write_jsonl(path, rows)
            return
        candidates = path.with_name("candidates.jsonl")
        if not candidates.exists():
            write_jsonl(candidates, draw_candidates(loaded, self.plan.pairs, 2, seed))
        label_pairs(candidates, path, read_judge(self.plan.judge), show=self.show)
        try:
            self.insist([row for _, row in read_jsonl(path)], number)
        except RunError:
            path.unlink()
            raise

    def insist(self, rows: list[Row], number: int) -> None:
        """Enough pairs to train a reward model on some prompts and test it on others; fewer than planned are told."""
        if len({json.dumps(row["prompt"]) for row in rows}) < 2:
            raise RunError(
                f"round {number}: {len(rows)} pairs with a winner, and a reward model needs at least two prompts: "
                "a prompt's responses are equal, or nobody can say which is better. Ask for more --pairs in a new "
                "folder"
            )
        if self.show and len(rows) < self.plan.pairs:
            winners = f"only {len(rows)} of {self.plan.pairs} planned pairs have a winner"
            print(f"round {number}: {winners}. The reward model learns from those", file=sys.stderr, flush=True)

    def mix(self, number: int, path: Path) -> None:
        """The new pairs and a random draw of old ones: as many as the wanted share of all pairs needs."""
        new = [row for _, row in read_jsonl(self.part(number, "pairs.jsonl"))]
        old = [row for n in range(1, number) for _, row in read_jsonl(self.part(n, "pairs.jsonl"))]
        count = min(len(old), round(len(new) * self.plan.replay / (1 - self.plan.replay)))
        order = torch.randperm(len(old), generator=torch.Generator().manual_seed(self.config.seed + number))
        write_jsonl(path, new + [old[i] for i in order[:count].tolist()])

    def policy_before(self, number: int) -> LoadedPolicy:
        """The policy that a round starts from, on the true reward: of the round before, of --init, or untrained."""
        source = self.part(number - 1, "policy") if number > 1 else self.config.init
        if source is None:
            return untrained_policy(self.config)
        return LoadedPolicy(for_asking(self.config), load_policy(self.config, init_folder(source)))

    def policy_config(self, number: int) -> Config:
        """The training of a round: on the learned reward, from the last policy, which is then its reference."""
        learned = self.backend.reward_setting([f"model:{self.part(number, 'reward-model').resolve()}"])
        init = str(self.part(number - 1, "policy")) if number > 1 else self.config.init
        task = replace(self.config.task, reward=learned)
        return replace(self.config, task=task, init=init, seed=self.config.seed + number - 1)

    def reward_model_config(self, file: Path, number: int) -> Config:
        """The training of a round's reward model, from that of the round before."""
        task, settings = self.backend.reward_model_task(self.config, file)
        base: dict[str, Any] = {"seed": self.config.seed, "threads": self.config.threads}
        base |= flatten({"policy": to_dict(self.config.policy)})
        if number > 1:
            base["init"] = str(self.part(number - 1, "reward-model"))
        return configure(task, settings, base, self.reward_model)

    def measure(self, number: int, path: Path) -> None:
        """The true reward of the round's policy: of its greedy answers to held-out prompts."""
        loaded = self.policy_before(number + 1)
        with closing(loaded.task()) as task:
            prompts = task.held_out(self.config.eval_prompts)
            scores = task.score(loaded.sampler(prompts, 0).generate(prompts, 1, greedy=True))
        total = scores.reward.sum(-1)[scores.valid]
        write_json(path, {"reward": float(total.mean()) if len(total) else None, "prompts": len(total)})

    def summary(self) -> list[dict[str, Any]]:
        """A row for each finished round: the learned reward beside the true one."""
        rows = []
        for number in range(1, self.plan.rounds + 1):
            if not self.part(number, "true.json").exists():
                break
            model, policy = (Run(self.part(number, name)).last for name in ("reward-model", "policy"))
            pairs, learned = (len(read_jsonl(self.part(number, f"{name}.jsonl"))) for name in ("pairs", "learned"))
            rows.append(
                {
                    "round": number,
                    "planned": self.plan.pairs,
                    "pairs": pairs,
                    "replayed": learned - pairs,
                    "reward model right": model.get("eval/pairs/accuracy"),
                    "learned reward": policy.get("eval/reward"),
                    "true reward": read_json(self.part(number, "true.json"))["reward"],
                    "exactly right": policy.get("eval/accuracy"),
                    "kl": policy.get("kl"),
                }
            )
        return rows


def begin_rounds(
    folder: Path, config: Config, plan: RoundsPlan, reward_model: dict[str, Any], show: bool = True
) -> Rounds:
    """New rounds in a new folder; or those of the folder, if they were begun with the same settings."""
    kept = read_json(folder / ROUNDS_FILE) if (folder / ROUNDS_FILE).exists() else {}
    if not config.threads:  # those of the rounds, whoever computes here now
        config = replace(config, threads=kept.get("config", {}).get("threads", 0))
    config, _ = settled(config)
    if plan.judge is not None:
        plan = replace(plan, judge=absolute_path(plan.judge))
    settings: dict[str, Any] = {"plan": asdict(plan), "config": config.to_dict(), "reward_model": reward_model}
    rounds = Rounds(folder, config, plan, reward_model, show)
    if kept:
        if {name: kept.get(name) for name in settings} != json.loads(json.dumps(settings)):
            raise ConfigError(f"--out {folder}: rounds with other settings. Continue those: ascent rounds {folder}")
        return rounds
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"--out {folder}: already there and not empty. Choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    settings["id"] = secrets.token_hex(16)
    record_run(folder, all_settings(settings))  # first: rounds that are killed here can then be continued
    write_json(folder / ROUNDS_FILE, settings)
    return rounds


def all_settings(kept: dict[str, Any]) -> dict[str, Any]:
    """The settings of rounds as those of one run, to see what they use."""
    judge, models = kept["plan"]["judge"], {f"rm.{name}": value for name, value in kept["reward_model"].items()}
    return kept["config"] | models | {"id": kept.get("id"), "judge": judge and f"judge:{judge}"}


def reopen_rounds(folder: Path, show: bool = True) -> Rounds:
    """The rounds of a folder, from any place."""
    kept = read_json(folder / ROUNDS_FILE)
    with naming_file(folder / ROUNDS_FILE):
        check_trust(folder, all_settings(kept))
    return Rounds(folder, config_from(kept["config"]), RoundsPlan(**kept["plan"]), kept["reward_model"], show)


def run_rounds(rounds: Rounds) -> list[dict[str, Any]]:
    """Do what is still to be done, with the folder locked."""
    lock = RunFolder(rounds.folder)
    lock.lock()
    try:
        rounds.go()
    except KeyboardInterrupt as stopped:
        raise KeyboardInterrupt(f"{stopped or 'stopped'}. Continue with: ascent rounds {rounds.folder}") from None
    finally:
        lock.close()
    return rounds.summary()
