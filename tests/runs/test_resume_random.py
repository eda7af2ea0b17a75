"""Runs with random settings from all choices: a killed and resumed run is bitwise equal to an uninterrupted one."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

import ascent
from ascent.core.algorithms import ALGORITHMS, MENU
from ascent.core.errors import ConfigError
from ascent.core.menu import name_of
from ascent.settings import configure
from tests.cases import mostly_smokes
from tests.runs.test_resume import bits, differing, in_a_fork

SMALL = {"policy.width": 8, "policy.layers": 1, "policy.heads": 2}
TASKS: dict[str, dict[str, Any]] = {
    "lecture": {},
    "sort": {"length": 3, "numbers": 4, "end": True, **SMALL},
    "swaps": SMALL,
}


def drawn_settings(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Return valid settings: a named algorithm with up to three other choices, and the sizes of the run."""
    while True:
        task = rng.choice(list(TASKS))
        settings: dict[str, Any] = {
            "algorithm": rng.choice(list(ALGORITHMS)),
            "prompts": 3,
            "samples": rng.choice([2, 3]),
            "steps": 5,
            "epochs": rng.choice([1, 2]),
            "minibatches": rng.choice([1, 3]),
            "ahead": rng.choice([0, 0, 1, 2]),
            "checkpoint_every": rng.choice([1, 2, 3]),
            "eval_every": 2,
            "eval_prompts": 3,
            "record_every": rng.choice([1, 2]),
            "keep_best": rng.random() < 0.3,
            "seed": rng.randrange(1000),
            "threads": 1,
        }
        for axis in rng.sample(list(MENU), rng.randrange(4)):
            settings[axis] = name_of(rng.choice(MENU[axis]))
        if "kl" in settings or rng.random() < 0.3:
            settings["kl.target"] = 0.02
        settings |= TASKS[task]
        try:
            configure(task, settings)
            return task, settings
        except (ConfigError, TypeError):
            settings.pop("kl.target", None)
        try:
            configure(task, settings)
            return task, settings
        except (ConfigError, TypeError):
            continue


@pytest.mark.slow
@pytest.mark.parametrize("case", mostly_smokes(range(40), *range(4)))
def test_run_with_random_settings_resumes_bitwise(case: int, tmp_path: Path) -> None:
    rng = random.Random(case)
    task, settings = drawn_settings(rng)
    killed_at = rng.randrange(1, 4)
    ascent.train(task, **settings, show=False, out=tmp_path / "whole")

    def die() -> None:
        for step in ascent.steps(task, **settings, out=tmp_path / "run"):
            if step.number == killed_at:
                os.kill(os.getpid(), signal.SIGKILL)

    assert not in_a_fork(die)
    run = ascent.resume(tmp_path / "run")
    assert run.status == "finished" and not differing(run.folder, bits(tmp_path / "whole")), (task, settings)
