"""docs/from-trl.md: every field of TRL's config is in it, every flag of ours that it names exists, its example runs."""

from __future__ import annotations

import ast
import dataclasses
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from ascent.cli.dispatch import commands
from ascent.cli.run_flags import TrainOptions, parse_train
from ascent.core.algorithms import ALGORITHMS
from ascent.core.config import Config
from ascent.core.menu import hyperparameters, name_of
from ascent.settings import CHOICES, PLAIN, SHORT
from ascent.tasks import TASKS

PAGE = (Path(__file__).parent.parent / "docs" / "from-trl.md").read_text()
NAMED = set(re.findall(r"`([a-z]\w*)`", PAGE))
"""Every single word in code marks."""
FLAG = re.compile(r"(?<![\w-])--([a-z][\w.-]*\w)")
CALLS = {*hyperparameters(TrainOptions), "preset", "algorithm"}
"""Flags of `ascent train` that are no setting of a run's numbers."""


def exists(flag: str) -> bool:
    """Is --flag a setting of some task, choice or run?"""
    axis, dot, field = flag.replace("-", "_").partition(".")
    if dot:
        return any(field in hyperparameters(cls) for cls in CHOICES.get(axis, ()))
    return axis in {*PLAIN, *CHOICES, *SHORT, *CALLS} or any(axis in hyperparameters(task) for task in TASKS)


def test_every_flag_of_ours_exists() -> None:
    flags = set(FLAG.findall(PAGE)) - {"step"}  # `ascent show RUN --step N`
    assert len(flags) > 60
    assert {flag for flag in flags if not exists(flag)} == set()
    assert not exists("no-such-flag") and not exists("loss.no-such-field")


def test_every_choice_of_ours_exists() -> None:
    """`--weights token-mean`, and the same for `--algorithm`."""
    found = re.findall(r"--([a-z]+)\s+([a-z][a-z+-]*)", PAGE)
    menus = {axis: {name_of(cls) for cls in menu} for axis, menu in CHOICES.items()} | {"algorithm": set(ALGORITHMS)}
    chosen = [(axis, name) for axis, name in found if axis in menus]
    assert len(chosen) > 25
    assert [(axis, name) for axis, name in chosen if name not in menus[axis]] == []


def test_every_command_of_ours_exists() -> None:
    named = set(re.findall(r"(?m)(?:^|`)ascent ([a-z]+)", PAGE))
    assert named >= {"train", "resume", "show", "explain"}
    assert named <= set(commands())


def example(monkeypatch: pytest.MonkeyPatch) -> Config:
    """The config of the command line on the page; the data set is not looked for."""
    command = re.search(r"```sh\n(ascent train .*?)```", PAGE, re.DOTALL)
    assert command is not None
    args = shlex.split(command[1].replace("\\\n", " "))
    for task in TASKS:
        if hasattr(task, "verify"):
            monkeypatch.setattr(task, "verify", lambda _: None)
    return parse_train(args[2:], "ascent train")[0]


def arguments() -> dict[str, Any]:
    """What the page's TRL script hands to GRPOConfig."""
    script = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert script is not None
    calls = [node for node in ast.walk(ast.parse(script[1])) if isinstance(node, ast.Call)]
    (call,) = [c for c in calls if isinstance(c.func, ast.Name) and c.func.id == "GRPOConfig"]
    return {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}


def test_the_example_is_one_run_in_both_languages(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = example(monkeypatch), arguments()
    batch = theirs["per_device_train_batch_size"] * theirs["gradient_accumulation_steps"]
    assert (ours.prompts * ours.samples, ours.samples) == (batch, theirs["num_generations"])
    assert ours.steps * ours.epochs * ours.minibatches == theirs["max_steps"]
    assert (ours.epochs, ours.minibatches) == (theirs["num_iterations"], 1)
    assert ours.task.max_tokens == theirs["max_completion_length"]
    assert ours.algorithm.kl.coef == theirs["beta"]
    update: Any = ours.algorithm.update
    assert (update.lr, update.schedule, update.max_norm) == (theirs["learning_rate"], "linear", 1.0)
    assert (ours.checkpoint_every * ours.epochs, ours.keep) == (theirs["save_steps"], theirs["save_total_limit"])
    assert ours.track == (theirs["report_to"],)
    assert dataclasses.replace(ours.algorithm, update=ALGORITHMS["grpo"].update) == ALGORITHMS["grpo"]


# ---- against TRL itself ---------------------------------------------------------------------------


@pytest.mark.slow
def test_every_field_of_trls_config_is_named_and_no_other() -> None:
    trl = pytest.importorskip("trl", reason="TRL is a test-only dependency")
    fields = {field.name for field in dataclasses.fields(trl.GRPOConfig)}
    assert fields - NAMED == set()
    rows = [line.split("|")[1] for line in PAGE.split("## The fields of GRPOConfig")[1].splitlines() if line[:1] == "|"]
    left = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(left) == sorted(fields), "a field stands on the left once, and nothing else does"
    assert set(arguments()) <= fields


@pytest.mark.slow
def test_what_the_page_says_of_trls_defaults() -> None:
    trl = pytest.importorskip("trl")
    default = {field.name: field.default for field in dataclasses.fields(trl.GRPOConfig)}
    said = {"loss_type": "dapo", "beta": 0.0, "scale_rewards": "group", "epsilon": 0.2, "num_iterations": 1}
    said |= {"use_bias_correction_kl": True, "learning_rate": 1e-6, "lr_scheduler_type": "linear", "max_grad_norm": 1.0}
    said |= {"disable_dropout": False, "gradient_checkpointing": True, "warmup_steps": 0}
    assert {name: default[name] for name in said} == said
