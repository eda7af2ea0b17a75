"""Settings become a config: layers, rows, choices and fields; and every refusal says what to set."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import batch_of

import ascent
from ascent.cli.run_flags import parse_train
from ascent.cli.train import CompareCommand
from ascent.core.advantages import Advantage, Centered, LeaveOneOut, Normalized, Raw, RunningMean
from ascent.core.algorithms import ALGORITHMS, GRPO, MENU, Algorithm
from ascent.core.config import Config
from ascent.core.critics import OwnCritic, SharedCritic
from ascent.core.errors import ConfigError
from ascent.core.exploration import Annealed, NoBonus
from ascent.core.kl import InLoss, InReward, NoKL
from ascent.core.losses import Clipped, LogProb, SequenceRatio
from ascent.core.menu import name_of, to_dict
from ascent.core.reference import Every, Frozen, NoReference
from ascent.core.update import Adam
from ascent.core.weights import FixedLength, TokenMean
from ascent.models import PerPosition, Transformer
from ascent.settings import PLAIN, config_from, configure, find_choice, flatten, row_label, spell
from ascent.tasks import TASKS
from ascent.tasks.small.lecture import Lecture
from ascent.tasks.small.sorting import Sort

# ---- layers ---------------------------------------------------------------------------------------


def test_the_tasks_default_preset() -> None:
    config = configure("sort")
    assert isinstance(config.task, Sort)
    assert isinstance(config.policy, Transformer)
    assert config.algorithm.advantage == Centered()
    assert config.algorithm.weights == FixedLength()
    assert config.algorithm.update == Adam(lr=2e-3, schedule="linear", max_norm=1.0)
    assert config.steps == Sort.presets["default"]["steps"]


def test_the_course_preset_and_what_its_choices_start_from() -> None:
    """--preset course --advantage normalized: ε = 1e-5, clip 0.01 and a reference every 10, as in the lecture."""
    config = configure("lecture", {"preset": "course"})
    assert config.algorithm.advantage == Raw()
    assert config.algorithm.loss == LogProb()
    assert config.algorithm.weights == TokenMean()
    assert (config.prompts, config.samples, config.steps, config.epochs, config.seed) == (3, 10, 100, 10, 5)
    assert isinstance(config.policy, PerPosition)
    chosen = {"advantage": "normalized", "loss": "clipped", "reference": "every"}
    config = configure("lecture", {"preset": "course", **chosen})
    assert config.algorithm.advantage == Normalized(eps=1e-5)
    assert config.algorithm.loss == Clipped(0.01, 0.01)
    assert config.algorithm.reference == Every(10)


def test_later_layers_win() -> None:
    config = configure("sort", {"steps": 7, "lr": 0.5, "samples": 4}, {"steps": 9}, {"update.lr": 0.25})
    assert (config.steps, config.samples, config.algorithm.update.lr) == (9, 4, 0.25)
    assert config.algorithm.update.schedule == "linear", "what no layer sets is the preset's"


def test_a_row_replaces_every_axis_but_the_update() -> None:
    config = configure("lecture", {"algorithm": "grpo"})
    assert config.algorithm == Algorithm(
        GRPO.advantage, GRPO.loss, GRPO.weights, GRPO.kl, GRPO.reference, update=Adam(1e-2)
    )
    assert config.algorithm.exploration == NoBonus(), "the preset's annealed bonus is no part of the row"
    assert configure("lecture").algorithm.exploration == Annealed(0.5, 0.0, 0.9)


def test_a_choice_named_in_the_rows_layer_is_laid_over_the_row() -> None:
    for layers in (
        ({"algorithm": "grpo", "advantage": "leave-one-out"},),
        ({"algorithm": "grpo"}, {"advantage": "leave-one-out"}),
    ):
        algorithm = configure("sort", *layers).algorithm
        assert algorithm.advantage == LeaveOneOut()
        assert algorithm.kl == InLoss("k3", 0.04)


def test_a_row_named_later_drops_earlier_choices() -> None:
    assert configure("sort", {"advantage": "raw"}, {"algorithm": "grpo"}).algorithm.advantage == Normalized(1e-4)


def test_the_critic_of_a_language_model_learns_slowly_and_clipped_unless_told_otherwise() -> None:
    def critic(task: str = "countdown", **settings: Any) -> Any:
        made = configure(task, settings | ({"model": "m"} if task == "countdown" else {}))
        assert row_label(made.algorithm) in ("ppo", "ppo+shared-critic") and config_from(made.to_dict()) == made
        return made.algorithm.critic

    own, shared = critic(algorithm="ppo"), critic(algorithm="ppo", critic="shared-critic")
    assert own == OwnCritic(1e-5, max_norm=1.0, warmup=0.05)
    assert shared == SharedCritic(0.5, None), "it has no rate of its own"
    axes = {"advantage": "gae", "advantage.whitened": True, "weights": "token-mean", "critic": "own-critic"}
    assert critic(**axes) == own
    given = {"critic.lr": 1e-3, "critic.max_norm": None}
    assert critic(algorithm="ppo", **given) == replace(own, lr=1e-3, max_norm=None)
    assert critic(algorithm=ALGORITHMS["ppo"]) == critic(algorithm="ppo", critic=OwnCritic) == own
    fast = replace(ALGORITHMS["ppo"], critic=OwnCritic(lr=3e-3))
    assert critic(algorithm=fast) == critic(algorithm="ppo", critic=OwnCritic(lr=3e-3)) == OwnCritic(lr=3e-3)
    assert critic(algorithm="ppo", critic=OwnCritic()) == OwnCritic(), "an object stays as it was given"
    assert critic("sort", algorithm="ppo") == OwnCritic() == OwnCritic(1e-3, None, 1, None, "constant", 0.0)


def test_fields_are_laid_over_the_choice() -> None:
    algorithm = configure(
        "sort", {"algorithm": "grpo", "loss.high": 0.28, "kl.coef": 0.1, "update.max-norm": 3.0}
    ).algorithm
    assert algorithm.loss == Clipped(0.2, 0.28)
    assert algorithm.kl == InLoss("k3", 0.1)
    assert algorithm.update.max_norm == 3.0


def test_a_choice_named_later_drops_the_fields_of_the_one_before() -> None:
    algorithm = configure("sort", {"loss": "clipped", "loss.high": 0.28}, {"loss": "cispo"}).algorithm
    assert spell(algorithm.loss) == "cispo"


def test_a_field_may_be_set_to_nothing() -> None:
    config = configure("sort", {"loss": "sequence-ratio", "loss.low": None, "loss.high": None, "update.max_norm": None})
    assert config.algorithm.loss == SequenceRatio("mean", None, None)
    assert config.algorithm.update.max_norm is None


def test_an_int_serves_as_a_float_and_dashes_as_underscores() -> None:
    config = configure("sort", {"lr": 1, "temperature": 2, "eval-every": 3, "record-rollouts": 7})
    assert (config.algorithm.update.lr, config.temperature, config.eval_every, config.record_rollouts) == (
        1.0,
        2.0,
        3,
        "7",
    )
    assert type(config.algorithm.update.lr) is float


def test_objects_are_as_good_as_names() -> None:
    config = configure(
        Sort(length=3, numbers=4), {"advantage": Normalized(eps=0.5), "loss": Clipped, "algorithm": GRPO}
    )
    assert config.task == Sort(length=3, numbers=4)
    assert config.algorithm.advantage == Normalized(eps=0.5)
    assert config.algorithm.loss == Clipped()
    assert configure(Sort, {"length": 4}).task == Sort(length=4)
    assert configure(Sort(length=3, numbers=4), {"length": 6}).task == Sort(length=6, numbers=4)


def test_an_earlier_layer_may_be_impossible_if_a_later_one_completes_it() -> None:
    algorithm = configure("sort", {"kl": "in-loss"}, {"reference": "frozen"}).algorithm
    assert (algorithm.kl, algorithm.reference) == (InLoss(), Frozen())


# ---- a choice of one's own ------------------------------------------------------------------------

OWN = """
from dataclasses import dataclass

from ascent.core.advantages import Advantage


@dataclass(frozen=True)
class Halved(Advantage):
    \"\"\"Half the reward.\"\"\"

    factor: float = 0.5
    group = False

    def __call__(self, batch, state):
        return batch.reward * self.factor
"""


@pytest.mark.parametrize("head", ["", "from __future__ import annotations\n"], ids=["plain", "future annotations"])
def test_a_users_own_choice(head: str, tmp_path: Path) -> None:
    """From a file, with fields of its own; and it comes back from config.json."""
    file = tmp_path / "mine.py"
    file.write_text(head + OWN)
    own = f"python:{file}:Halved"
    config = configure("sort", {"advantage": own, "advantage.factor": 0.25})
    assert config.algorithm.advantage.factor == 0.25
    assert config.algorithm.advantage(batch_of([[4.0, 8.0]]), {}).flatten().tolist() == [1.0, 2.0]
    assert name_of(config.algorithm.advantage) == own
    again = round_trip(config)
    assert again.to_dict() == config.to_dict()
    with pytest.raises(ConfigError, match=r"--advantage\.facto: .*it has factor.*Did you mean --advantage\.factor"):
        configure("sort", {"advantage": own, "advantage.facto": 0.25})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("python:mine.py", "python:FILE:NAME"),
        ("python:nowhere/mine.py:Halved", "there is no file nowhere/mine.py"),
        ("python:{file}:Halve", "has no Halve.*Did you mean Halved"),
        ("python:{broken}:Halved", "raised ZeroDivisionError"),
        ("python:{file}:NUMBER", "--advantage python:"),
    ],
)
def test_a_broken_own_choice_is_refused(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN + "\nNUMBER = 3\n")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(ConfigError, match=message):
        configure("sort", {"advantage": name.format(file=tmp_path / "mine.py", broken=tmp_path / "broken.py")})


def test_a_users_own_task(tmp_path: Path) -> None:
    (tmp_path / "world.py").write_text("from ascent.tasks import Sort\n\n\nclass Mine(Sort):\n    pass\n")
    config = configure(f"python:{tmp_path / 'world.py'}:Mine", {"length": 3, "numbers": 4})
    assert config.task.length == 3
    assert round_trip(config).to_dict() == config.to_dict()


# ---- refusals -------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "unknown task": ("srot", {}, "TASK srot: no such task.*lecture, sort.*Did you mean sort"),
    "unknown row": ("sort", {"algorithm": "grop"}, "--algorithm grop: no such algorithm.*Did you mean grpo"),
    "unknown choice": ("sort", {"advantage": "leave-one"}, "--advantage leave-one: no such choice.*leave-one-out"),
    "unknown field": ("sort", {"loss": "clipped", "loss.hihg": 0.1}, r"--loss\.hihg: clipped has no such field.*high"),
    "field of another choice": ("sort", {"loss": "log-prob", "loss.high": 0.1}, r"--loss\.high: log-prob has no such"),
    "unknown setting": ("sort", {"step": 3}, "--step: there is no such setting for sort.*Did you mean --steps"),
    "unknown axis": ("sort", {"los.high": 3}, r"--los\.high: there is no such setting"),
    "setting of another task": ("lecture", {"length": 3}, "--length: there is no such setting for lecture"),
    "unknown preset": ("sort", {"preset": "curse"}, "--preset curse: no such preset of sort. There are default"),
    "unknown reward": ("sort", {"reward": "exat"}, "--reward exat: unknown reward.*Did you mean exact"),
    "unknown policy": (
        "sort",
        {"policy": "transfomer"},
        "--policy transfomer: no such choice.*Did you mean transformer",
    ),
    "a word for an int": ("sort", {"steps": "many"}, "--steps is 'many': it has to be a whole number"),
    "a float for an int": ("sort", {"samples": 2.5}, "--samples is 2.5: it has to be a whole number"),
    "a bool for an int": ("sort", {"samples": True}, "--samples is True: it has to be a whole number"),
    "a word for a float": ("sort", {"lr": "fast"}, r"--update\.lr is 'fast': it has to be a number"),
    "a word for a bool": ("sort", {"distinct": "yes"}, "--distinct is 'yes': it has to be True or False"),
    "not on the list": (
        "sort",
        {"old_logp": "trainer"},
        "--old-logp is 'trainer': it has to be one of auto, sampler, learner",
    ),
    "not on a choice's list": (
        "sort",
        {"update.schedule": "step"},
        r"--update\.schedule is 'step'.*constant, linear, cosine",
    ),
    "a number for a choice": ("sort", {"loss": 3}, "--loss"),
    "no steps": ("sort", {"steps": 0}, "--steps is 0: it has to be at least 1"),
    "negative seed": ("sort", {"seed": -1}, "--seed is -1: it has to be at least 0"),
    "no evaluation": ("sort", {"eval_every": 0}, "--eval-every is 0"),
    "temperature 0": ("sort", {"temperature": 0.0}, "--temperature is 0: .*above 0"),
    "temperature nan": ("sort", {"temperature": math.nan}, "--temperature is nan: .*above 0"),
    "no learning rate": ("sort", {"lr": 0.0}, "--lr is 0: .*above 0"),
    "warmup of all": ("sort", {"update.warmup": 1.0}, r"--update\.warmup is 1"),
    "recording some": (
        "sort",
        {"record_rollouts": "some"},
        "--record-rollouts some: a number of groups, `all` or `none`",
    ),
    "minibatches": ("sort", {"prompts": 2, "minibatches": 3}, "--minibatches 3 with --prompts 2.*between prompts"),
    "lecture prompts": ("lecture", {"prompts": 4}, "--prompts 4: the lecture has three.*set --prompts 3"),
    "KL without reference": (
        "sort",
        {"kl": "in-loss"},
        "--kl in-loss with --reference no-reference.*--reference frozen",
    ),
    "correction of nothing": (
        "sort",
        {"correction": "truncated", "old_logp": "sampler"},
        "--correction truncated with --old-logp sampler.*Set --old-logp learner",
    ),
    "token correction of a sequence ratio": (
        "sort",
        {"algorithm": "gspo", "correction": "truncated", "old_logp": "learner"},
        r"--loss sequence-ratio has one term per response.*--correction\.level sequence",
    ),
    "v-trace of nothing": (
        "sort",
        {"advantage": "v-trace", "critic": "own-critic", "old_logp": "sampler"},
        "--advantage v-trace with --old-logp sampler.*Set --old-logp learner",
    ),
    "masked demonstrations": ("sort", {"algorithm": "sft", "groups.mask_truncated": True}, "--groups.mask-truncated"),
    "a ratio of demonstrations": (
        "sort",
        {"algorithm": "sft", "kl": "in-loss", "kl.importance": True, "reference": "frozen"},
        r"--loss likelihood with --kl\.importance",
    ),
    "geometric bound": (
        "sort",
        {"correction": "truncated", "correction.geometric": 0.9},
        r"--correction\.geometric is 0\.9: it has to be at least 1",
    ),
    "floor above the cap": (
        "sort",
        {"correction": "truncated", "correction.floor": 3.0},
        r"--correction\.cap is 2, the floor 3: set 0 ≤ floor ≤ cap",
    ),
    "v-trace bounds": ("sort", {"advantage": "v-trace", "advantage.rho": 0.0}, "rho and c above 0"),
    "lower bound": ("sort", {"loss": "clipped", "loss.low": 0.0}, r"--loss\.low is 0.*above 0"),
    "upper bound": ("sort", {"loss": "clipped", "loss.high": -1.0}, r"--loss\.high is -1.*above 0"),
    "half a bound": ("sort", {"loss": "sequence-ratio", "loss.low": None}, r"--loss\.low and --loss\.high: set both"),
    "dual clip": ("sort", {"loss": "clipped", "loss.dual": 0.5}, r"--loss\.dual is 0\.5.*above 1"),
    "overlong margin": ("sort", {"algorithm": "dapo", "end": True}, r"--shaping\.margin 16 with a limit of 6.*below 6"),
    "heads": ("sort", {"policy.width": 10}, r"--policy\.width 10 is not a multiple of --policy\.heads 4"),
    "distinct": ("sort", {"distinct": True, "numbers": 3}, "--distinct with --length 5 --numbers 3"),
    "negative eps": ("sort", {"advantage": "normalized", "advantage.eps": -1.0}, r"--advantage\.eps is -1"),
    "momentum": ("sort", {"advantage": "running-mean", "advantage.momentum": 1.5}, r"--advantage\.momentum is 1\.5"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_what_why_and_what_to_set(case: str) -> None:
    task, settings, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message) as caught:
        configure(task, settings)
    assert "\n" not in str(caught.value), "one message"


@pytest.mark.parametrize("advantage", [name_of(cls) for cls in MENU["advantage"]])
def test_a_group_credit_with_one_sample(advantage: str) -> None:
    choice = find_choice("advantage", MENU["advantage"], advantage)
    more = {"critic": "own-critic"} if "value" in choice().needs else {}
    if choice().group_relative:
        with pytest.raises(ConfigError, match=f"--samples 1 with --advantage {advantage}.*Set --samples 2 or more"):
            configure("sort", {"advantage": advantage, "samples": 1})
    else:
        assert configure("sort", {"advantage": advantage, "samples": 1, **more}).samples == 1


def by_every_road(task: str, flags: str, settings: dict[str, Any], folder: Path) -> Iterator[Callable[[], object]]:
    """The same settings in Python, as flags, from a config.json, and as a row of a comparison."""
    yield lambda: ascent.train(task, show=False, out=folder / "run", steps=1, **settings)
    yield lambda: parse_train([task, *flags.split()], "ascent train")
    (folder / "config.json").write_text(json.dumps({"task": task, **settings}))
    yield lambda: parse_train(["--config", str(folder / "config.json")], "ascent train")
    yield lambda: CompareCommand.read([task, "--setting", flags, "--out", str(folder / "compared")]).execute()


NEVER = {
    "with-signal with one sample": (
        "sort",
        "--algorithm reinforce --groups with-signal --samples 1",
        {"algorithm": "reinforce", "groups": "with-signal", "samples": 1},
        "--samples 1 with --groups with-signal: .*never do. Set --samples 2 or more, or --groups all",
    ),
    "an adaptive KL in the loss that starts at 0": (
        "sort",
        "--algorithm grpo --kl.coef 0 --kl.target 0.1",
        {"algorithm": "grpo", "kl.coef": 0.0, "kl.target": 0.1},
        r"--kl\.coef 0 with --kl\.target 0\.1: an adaptive coefficient is multiplied.*Set both above 0",
    ),
    "an adaptive KL in the reward that starts at 0": (
        "sort",
        "--algorithm rloo --kl.coef 0 --kl.target 0.1",
        {"algorithm": "rloo", "kl.coef": 0.0, "kl.target": 0.1},
        r"--kl\.coef 0 with --kl\.target 0\.1",
    ),
    "the exact norm of a language model's optimal baseline": (
        "countdown",
        "--model nowhere --advantage optimal-baseline",
        {"policy.model": "nowhere", "advantage": "optimal-baseline"},
        r"--advantage optimal-baseline with a language model: .*Set --advantage\.norm length",
    ),
}


@pytest.mark.parametrize("case", NEVER)
def test_what_could_never_train_or_adapt_is_refused_by_every_road(case: str, tmp_path: Path) -> None:
    """Before any work: no model is loaded and no folder made."""
    task, flags, settings, message = NEVER[case]
    for made in by_every_road(task, flags, settings, tmp_path):
        with pytest.raises(ConfigError, match=message):
            made()
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_what_adapts_and_trains_is_left_alone() -> None:
    """A coefficient of 0 without a target, a small one with it, two samples, and the length for the norm."""
    assert configure("sort", {"algorithm": "grpo", "kl.coef": 0.0}).algorithm.kl.coef == 0
    assert configure("sort", {"algorithm": "grpo", "kl.coef": 1e-9, "kl.target": 0.1}).algorithm.kl.target == 0.1
    configure("sort", {"algorithm": "reinforce", "groups": "with-signal", "samples": 2})
    flags = "countdown --model here --advantage optimal-baseline --advantage.norm length"
    assert parse_train(flags.split(), "ascent train")[0].algorithm.needs == frozenset()


@pytest.mark.parametrize("kl", ["in-loss", "in-reward"])
def test_refused_in_python_too(kl: str) -> None:
    """The object refuses itself, however it is made."""
    with pytest.raises(ConfigError, match="a KL needs a reference policy"):
        Algorithm(kl=InLoss() if kl == "in-loss" else InReward(), reference=NoReference())


# ---- there and back -------------------------------------------------------------------------------


def round_trip(config: Config) -> Config:
    """Through config.json, as --config reads it."""
    flat = flatten(json.loads(json.dumps(config.to_dict())))
    return configure(flat.pop("task"), flat)


@pytest.mark.parametrize("row", ALGORITHMS)
@pytest.mark.parametrize("task", [name_of(cls) for cls in TASKS])
def test_config_comes_back(row: str, task: str) -> None:
    config = configure(task, {"algorithm": row} | ({"samples": 4} if ALGORITHMS[row].loss.data == "samples" else {}))
    assert round_trip(config) == config


@pytest.mark.parametrize(
    ("task", "settings"),
    [
        ("lecture", {"preset": "course", "advantage": "normalized", "loss": "clipped", "reference": "every"}),
        ("lecture", {"loss": "clipped"}),
        ("sort", {"length": 4, "numbers": 6, "distinct": True, "reward": "exact", "end": True}),
        ("sort", {"loss": "sequence-ratio", "loss.low": None, "loss.high": None, "update.max_norm": None}),
        ("sort", {"seed": 7, "init": "runs/x", "record_rollouts": "all", "policy": "per-position", "policy.dim": 3}),
        ("sort", {"kl": "in-reward", "kl.target": 0.1, "reference": "moving-average", "exploration": "constant"}),
        ("sort", {"correction": "masked", "old_logp": "learner", "groups": "with-signal", "advantage": "greedy"}),
    ],
)
def test_settings_come_back(task: str, settings: dict[str, Any]) -> None:
    config = configure(task, settings)
    assert round_trip(config) == config


@pytest.mark.parametrize("axis", MENU)
def test_every_choice_has_a_name_and_comes_back(axis: str) -> None:
    for cls in MENU[axis]:
        choice = cls()
        assert find_choice(axis, MENU[axis], name_of(cls)) is cls
        assert to_dict(choice)["name"] == name_of(choice)
        extra = (
            {"reference": "frozen"}
            if axis == "kl"
            else {"advantage": "gae"}
            if getattr(choice, "enabled", False) and axis == "critic"
            else {}
        )
        extra |= {"critic": "own-critic"} if "value" in getattr(choice, "needs", ()) else {}
        extra = {} if axis == "correction" else extra
        if getattr(choice, "data", "samples") != "samples":  # such a loss allows few other choices beside it
            extra = {"algorithm": next(row for row, algorithm in ALGORITHMS.items() if type(algorithm.loss) is cls)}
        config = configure("sort", {"old_logp": "learner", **extra, axis: name_of(cls)})
        assert getattr(config.algorithm, axis) == (choice if axis != "update" else config.algorithm.update)
        assert round_trip(config) == config


def test_every_plain_setting_is_in_the_dictionary() -> None:
    written = configure("sort").to_dict()
    assert set(written) == {"task", "policy", "ranks", *MENU, *PLAIN}
    json.dumps(written, allow_nan=False)


# ---- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        (LeaveOneOut(), "leave-one-out"),
        (NoKL(), "no-kl"),
        (InLoss(), "in-loss"),
        (PerPosition(), "per-position"),
        (RunningMean, "running-mean"),
        (Lecture, "lecture"),
    ],
)
def test_names(choice: Any, name: str) -> None:
    assert name_of(choice) == name


@pytest.mark.parametrize("row", ALGORITHMS)
def test_a_row_is_labelled_with_its_name(row: str) -> None:
    assert row_label(ALGORITHMS[row]) == row
    changed = {"update.delta": 0.1} if row == "trpo" else {"lr": 0.1}
    assert row_label(configure("sort", {"algorithm": row, **changed}).algorithm) == row


def test_a_changed_row_says_what_was_changed() -> None:
    config = configure("sort", {"algorithm": "dr-grpo", "loss.high": 0.28, "exploration": "annealed"})
    assert row_label(config.algorithm) == "dr-grpo+clipped(high=0.28)+annealed"


@dataclass(frozen=True)
class Elsewhere(Advantage):
    """A credit that needs nothing."""

    group = False

    def __call__(self, batch: Any, state: Any) -> torch.Tensor:
        return batch.reward


def test_a_choice_object_of_ones_own() -> None:
    assert configure("sort", {"advantage": Elsewhere()}).algorithm.advantage == Elsewhere()


@pytest.mark.long
def test_a_wrong_value_anywhere_in_a_config_file_is_refused_in_words(tmp_path: Path) -> None:
    """Every field of a config.json, with values of JSON that no field takes: none is a traceback, none is taken."""
    file = tmp_path / "config.json"
    whole = json.loads(json.dumps(configure("sort", {"algorithm": "ppo"}).to_dict()))
    places = [[key] for key in whole] + [[k, f] for k, v in whole.items() if isinstance(v, dict) for f in v]
    for place in places:
        for value, refused in (({}, True), ({"name": {}}, True), ([[1]], True), ([{}], True), (10**400, False)):
            settings = json.loads(json.dumps(whole))
            (settings if len(place) == 1 else settings[place[0]])[place[-1]] = value
            with pytest.raises(ConfigError) if refused else suppress(ConfigError):
                config_from(settings)
    for words in ("{}", '{"name": {}}', "[]", '{"x": 1}', '"x"', "null"):
        file.write_text(json.dumps(whole).replace('"top_p": 1.0', f'"top_p": {words}'))
        with pytest.raises(ConfigError, match="--top-p is "):
            parse_train(["--config", str(file)], "ascent train")
