"""What people expect of any tool: --version, a report of the environment, a config with comments, types, platforms."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import tomllib
from pathlib import Path

import pytest

import ascent
from ascent.cli.main import main
from ascent.cli.run_flags import parse_train
from ascent.core.errors import ConfigError

ROOT = Path(__file__).parents[2]


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0 and capsys.readouterr().out == f"ascent {ascent.__version__}\n"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["version"] == ascent.__version__


def test_the_environment_names_versions_and_no_values(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert main(["env", "--json"]) == 0
    said = capsys.readouterr().out
    found = json.loads(said)
    assert found["ascent"] == ascent.__version__ and found["torch"][0].isdigit() and found["vllm"] == "not installed"
    assert "HF_TOKEN" in found["variables"] and "hf_secret" not in said and str(Path.home()) not in said
    assert main(["env"]) == 0 and re.search(r"^gpus +none$", capsys.readouterr().out, re.M)


TOML = """
# a run of mine
algorithm = "grpo"   # with DAPO's upper bound
steps = 3
lr = 2e-3
task = "sort"

[loss]
high = 0.28

[policy]
name = "per-position"
"""


def test_a_config_that_a_person_wrote(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(TOML)
    config, _ = parse_train(["--config", str(file), "--seed", "7", "--loss.low", "0.1"], "ascent train")
    assert (config.steps, config.seed, config.algorithm.update.lr) == (3, 7, 2e-3)
    assert config.algorithm.loss == ascent.Clipped(0.1, 0.28) and config.policy == ascent.PerPosition()
    file.write_text('[task]\nname = "sort"\nlength = 3\n')
    assert parse_train(["--config", str(file)], "ascent train")[0].task.length == 3
    file.write_text("steps = 2\n")
    assert parse_train(["lecture", "--config", str(file)], "ascent train")[0].steps == 2


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("steps = ", "mine.toml is not TOML: Invalid value (at end of document)"),
        ('task = "sort"\nstps = 3', "--stps: there is no such setting for sort. Did you mean --steps?"),
        ('task = "sort"\nsteps = "many"', "--steps is 'many': it has to be a whole number"),
        ('task = "sort"\n[loss]\nhihg = 1', "Did you mean --loss.high?"),
        ('task = "sort"\nsteps = 1\ndata_epochs = 1', "give one of them"),
        ("steps = 3", "TASK is missing"),
        ("a = " + "[" * 5000, "is not TOML"),
    ],
)
def test_a_wrong_config_says_what_is_wrong(text: str, why: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        parse_train(["--config", str(file)], "ascent train")
    assert why in str(error.value)
    with pytest.raises(ConfigError, match="No such file"):
        parse_train(["--config", str(tmp_path / "none.toml")], "ascent train")


def test_the_config_that_the_page_on_runs_shows_works(tmp_path: Path) -> None:
    block = re.search(r"```toml\n(.*?)```", (ROOT / "docs" / "runs.md").read_text(), re.DOTALL)
    assert block is not None
    (tmp_path / "mine.toml").write_text(block[1])
    config, _ = parse_train(["--config", str(tmp_path / "mine.toml"), "--seed", "1"], "ascent train")
    assert (config.steps, config.seed, config.algorithm.loss) == (200, 1, ascent.Clipped(0.2, 0.28))


def test_type_checkers_are_told_that_the_package_has_types() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert (ROOT / "ascent" / "py.typed").exists()
    assert project["tool"]["setuptools"]["package-data"]["ascent"] == ["py.typed"]


def test_windows_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("ascent_on_windows", ascent.__file__)
    assert spec is not None and spec.loader is not None
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ImportError, match=r"Ascent runs on Linux and macOS.*WSL"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_a_device_that_is_not_there_is_refused() -> None:
    from ascent.models.causal_lm import pick_device

    for name in ("mps", "cuda"):
        with pytest.raises(ConfigError, match=f"--policy.device {name}: torch sees no GPU here"):
            pick_device(name)
