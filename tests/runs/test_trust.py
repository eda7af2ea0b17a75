"""Showing a run executes nothing. Loading a run uses only plain data, unless it was made here or the user trusts it."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import sys
from pathlib import Path
from types import NoneType
from typing import Any

import pytest
from starlette.testclient import TestClient

import ascent as library
from ascent.build.trained_run import Run
from ascent.cli.main import main
from ascent.core.config import Config, RankSettings
from ascent.core.errors import ConfigError
from ascent.lab.server import application
from ascent.runs import run_reader as runs
from ascent.runs import trust
from ascent.settings import CHOICES, configure, settings_of
from ascent.tasks import TASKS
from ascent.workflows.rounds import RoundsPlan
from tests.processes import Here

SMALL = {"length": 2, "numbers": 3, "prompts": 2, "samples": 2, "eval_prompts": 2, "steps": 2, "record_every": 1}
SMALL |= {"policy.width": 8, "policy.layers": 1, "policy.heads": 2, "checkpoint_every": 1}
REWARD = "def own(prompt, response):\n    return float(response[0])\n"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a reward and a run that was trained with it."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "mine.py").write_text(REWARD)
    library.train("sort", reward=f"python:{folder / 'mine.py'}:own", out=folder / "run", show=False, **SMALL)
    return folder


@pytest.fixture
def reward(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n{REWARD}")
    return file


@pytest.fixture
def foreign(reward: Path, tmp_path: Path, trained: Path) -> Path:
    """An untrusted run folder: its reward creates a marker file, and its run.json has the hash of the reward's code."""
    folder = tmp_path / "runs" / "r"
    shutil.copytree(trained / "run", folder)
    rewrite(folder / "config.json", id="0" * 32, task={"reward": [f"python:{reward}:own"]})
    rewrite(folder / "run.json", code={str(reward): trust.hashlib.sha256(reward.read_bytes()).hexdigest()})
    return folder


def rewrite(file: Path, **changes: Any) -> None:
    """Change entries of a JSON file, including entries of nested objects."""
    told = json.loads(file.read_text())
    for key, value in changes.items():
        told[key] = told[key] | value if isinstance(value, dict) and isinstance(told.get(key), dict) else value
    file.write_text(json.dumps(told))


def digest_in(words: str) -> str:
    return re.findall(r"--trust=(\w+)", words)[0]


@pytest.mark.long
def test_showing_a_run_executes_no_code(
    foreign: Path, reward: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for there in (True, False):
        if not there:
            reward.unlink()
        for args in ((), ("--step", "0"), ("--json",)):
            assert main(["show", str(foreign), *args]) == 0
        assert "Maximize" in capsys.readouterr().out
        assert main(["report", str(foreign)]) == 0
        with TestClient(application(foreign.parent)) as client:
            for path in ("/", "/runs", "/run?id=r", "/compare?id=r", "/completions?id=r", "/figure/training?a.run=r"):
                assert client.get(path).status_code == 200, path
            events = client.get("/api/runs/r/events").text
            assert events.count("event: metrics") == 2 and "event: status" in events
            assert client.get("/api/runs/r/responses").json()["prompts"]
    assert not (tmp_path / "ran").exists()


LOADS: dict[str, list[str]] = {
    "resume": ["resume", "RUN", "--from", "1"],
    "eval": ["eval", "RUN"],
    "sample": ["sample", "RUN", "1 2"],
    "sample its task": ["sample", "RUN", "--task", "own", "--count", "1"],
    "play": ["play", "RUN"],
    "pairs": ["pairs", "RUN", "OUT", "--count", "2"],
    "label-steps": ["label-steps", "RUN", "OUT", "--prompts", "2"],
    "export": ["export", "RUN", "OUT"],
    "serve": ["serve", "RUN"],
    "reward": ["train", "sort", "--reward", "model:RUN", "--out", "OUT"],
    "config": ["train", "--config", "RUN/config.json", "--out", "OUT"],
}


def load(how: str, run: Path, *more: str) -> int:
    words = [word.replace("RUN", str(run)).replace("OUT", str(run.parent / "out")) for word in LOADS[how]]
    return main([*words, *more])


def test_untrusted_run_is_rejected_by_every_command(
    foreign: Path, reward: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run contains the correct hash of its code. Without a terminal there is no question, even with --trust."""
    monkeypatch.setattr(sys, "stdin", Unread())
    for how in LOADS:
        if how == "reward":
            rewrite(foreign / "config.json", loss={"name": "bradley-terry", "center": 0.0})
        for flags in ([], ["--trust"], ["--trust=" + "0" * 32]):
            assert load(how, foreign, *flags) == 2, how
            said = capsys.readouterr().err
            assert "is not known here" in said and f'--reward "python:{reward}:own"' in said, (how, said)
    for loaded in (lambda: library.load(foreign).config, lambda: library.load(foreign).policy):
        with pytest.raises(ConfigError, match="is not known here"):
            loaded()
    with pytest.raises(ConfigError, match="is not known here"):
        library.resume(foreign, from_step=1)
    assert not (tmp_path / "ran").exists(), "nothing of it was run"


class Unread(io.StringIO):
    """Standard input that must not be read."""

    def readline(self, *_: Any) -> str:
        raise AssertionError("it was read")


@pytest.mark.long
def test_trusted_hash_covers_only_what_was_listed(
    foreign: Path, reward: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load("eval", foreign) == 2
    digest = digest_in(capsys.readouterr().err)
    monkeypatch.setattr(trust, "TRUSTED", set())  # as in a new process
    monkeypatch.setenv("ASCENT_TRUST", f"{'0' * 32},{digest}")
    assert load("eval", foreign) == 0 and (tmp_path / "ran").exists()
    monkeypatch.setattr(trust, "TRUSTED", set())
    monkeypatch.delenv("ASCENT_TRUST")
    assert load("eval", foreign) == 2, "it is not remembered"
    assert load("resume", foreign, f"--trust={digest}") == 0
    monkeypatch.setattr(trust, "TRUSTED", set())
    reward.write_text(f"{reward.read_text()}\n")
    capsys.readouterr()
    assert load("eval", foreign, f"--trust={digest}") == 2
    assert f"{reward} has changed since the run was made" in capsys.readouterr().err
    assert library.load(foreign, trust=True).config and library.evaluate(foreign, prompts=1)
    monkeypatch.setattr(trust, "TRUSTED", set())
    with pytest.raises(ConfigError, match="has changed since the run was made"):
        library.resume(foreign, from_step=1)
    assert library.resume(foreign, from_step=1, trust=True).status == "finished"


@pytest.mark.long
def test_user_at_a_terminal_is_asked_once(foreign: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    def answer(words: str, *flags: str) -> tuple[int, str]:
        monkeypatch.setattr(trust, "TRUSTED", set())
        monkeypatch.setattr(sys, "stdin", Terminal(words))
        monkeypatch.setattr(sys, "stderr", Terminal())
        return load("sample", foreign, *flags), sys.stderr.getvalue()  # type: ignore[attr-defined]

    assert answer("y\n")[0] == 2, "nobody is asked without --trust"
    for words in ("n\n", "", "\n"):
        status, said = answer(words, "--trust")
        assert status == 2 and "[y/N]" in said and "--reward" in said
    with monkeypatch.context() as patch:
        patch.setattr(trust, "torchrun_world_size", lambda: 2)
        assert "[y/N]" not in answer("y\n", "--trust")[1], "nor where there are several ranks"
    assert not (tmp_path / "ran").exists()
    assert answer("y\n", "--trust")[0] == 0 and (tmp_path / "ran").exists()
    status, said = answer("")
    assert status == 0 and "[y/N]" not in said, "it is known from then on"


def test_local_run_stays_trusted_when_moved_but_not_when_changed(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trust, "TRUSTED", set())
    moved = Path(shutil.copytree(trained / "run", tmp_path / "elsewhere" / "renamed"))
    assert library.load(moved).config
    rewrite(moved / "config.json", steps=7, eval_every=3)
    assert library.load(moved).config.steps == 7, "plain data may change"
    shutil.copy(trained / "mine.py", other := tmp_path / "other.py")
    for changes in ({"task": {"reward": [f"python:{other}:own"]}}, {"init": "/tmp"}, {"id": "1" * 32}, {"id": {}}):
        changed = Path(shutil.copytree(trained / "run", tmp_path / "changed"))
        rewrite(changed / "config.json", **changes)
        with pytest.raises(ConfigError, match="is not known here"):
            _ = library.load(changed).config
        shutil.rmtree(changed)


@pytest.mark.long
def test_run_that_cannot_be_recorded_reports_its_hash(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    own, flags = f"python:{trained / 'mine.py'}:own", [f"--{k.replace('_', '-')}={v}" for k, v in SMALL.items()]
    assert main(["train", "sort", "--reward", own, *flags, "--out", str(tmp_path / "run")]) == 0
    said = capsys.readouterr()
    note = f"{said.out}{said.err}"
    assert "cannot be recorded" in note
    assert library.load(tmp_path / "run").config, "the process that made it may load it"
    monkeypatch.setattr(trust, "TRUSTED", set())
    assert load("eval", tmp_path / "run") == 2 and digest_in(capsys.readouterr().err) == digest_in(note)
    assert load("eval", tmp_path / "run", f"--trust={digest_in(note)}") == 0
    monkeypatch.setattr(trust, "TRUSTED", set())
    again = ["compare", "sort", "--reward", own, "--algorithms", "rloo", "--seeds", "1", *flags]
    monkeypatch.setattr("ascent.workflows.seed_comparison.ProcessPoolExecutor", Here)
    for _ in range(2):
        assert main([*again, "--out", str(tmp_path / "all")]) == 0
        monkeypatch.setattr(trust, "TRUSTED", set())


@pytest.mark.parametrize("form", ["{}", " {}", "0.5*{}", "0.5 * {}", "positions+{}", "positions+0.5* {}"])
def test_code_files_are_found_in_every_form_of_a_reward(form: str, foreign: Path, tmp_path: Path) -> None:
    other = Path(shutil.copy(tmp_path / "mine.py", tmp_path / "other.py"))
    rewrite(foreign / "config.json", task={"reward": form.format(f"python:{other}:own")})
    with pytest.raises(ConfigError, match=r"other\.py.*SHA-256 \w{64}"):
        _ = Run(foreign).config
    other.unlink()
    with pytest.raises(ConfigError, match=r"other\.py, which does not exist"):
        _ = Run(foreign).config
    assert not (tmp_path / "ran").exists()


def test_code_beside_a_folder_is_not_trusted_by_relative_path(
    foreign: Path, reward: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An archive may contain a folder, a file beside it, and the hash of that file."""
    monkeypatch.chdir(tmp_path)
    brought = Path(shutil.copy(reward, foreign / "brought.py"))
    for path in (reward.name, f"/proc/self/cwd/{reward.name}", f"{foreign}/../../{reward.name}", str(brought)):
        rewrite(foreign / "config.json", task={"reward": [f"python:{path}:own"]})
        rewrite(foreign / "run.json", code={path: trust.hashlib.sha256(reward.read_bytes()).hexdigest()})
        with pytest.raises(ConfigError, match=f"{Path(path).resolve()}"):
            _ = Run(foreign).config
    assert not (tmp_path / "ran").exists()


# ---- every setting -------------------------------------------------------------------------------------------

NEEDS: list[dict[str, Any]] = [
    {"reward": ["judge:/x/judge.toml"]},
    {"reward": ["own", "0.5*model:/x/run"]},
    {"reward": ["process:/x/run"]},
    {"reward": ["sandbox:/x/f.py:f"]},
    {"tools": ["python:/x/f.py:f"]},
    {"tools": ["calculator,python:/x/f.py:f"]},
    {"environment": "python:/x/f.py:World"},
    {"agent": "command:sh -c 'touch x'"},
    {"agent": "openenv:http://127.0.0.1:1"},
    {"agent": "verifiers:owner/name:/x/env"},
    {"sandbox": "none"},
    {"sandbox_read": ["/"]},
    {"sandbox-read": ["/"]},
    {"sandbox_packages": ["requests"]},
    {"reward_env": ["SECRET"]},
    {"source": "/x/rows.jsonl"},
    {"source": "rows.jsonl"},
    {"source": "FOLDER/link.jsonl"},
    {"test_file": "/x/rows.jsonl"},
    {"name": "dataset", "source": "/"},
    {"name": "reasoning-gym", "source": "spiral_matrix"},
    {"name": "reasoning-gym", "options": '{"operators": ["__import__"]}'},
    {"name": "gsm8k", "path": "/x"},
    {"name": "python:/x/f.py:Task"},
    {"policy.model": "/x/model"},
    {"policy.model": "../model"},
    {"policy.model": "~/model"},
    {"model": "/x/model"},
    {"policy.engine_url": ["http://127.0.0.1:1"]},
    {"engine.url": ["http://127.0.0.1:1"]},
    {"policy.engine_python": "/x/venv"},
    {"policy.engine_args": "--plugin evil.py"},
    {"policy.engine_key_env": "SECRET"},
    {"policy.engine-key-file": "/x/key"},
    {"loss": "python:/x/f.py:Loss"},
    {"init": "/x/run"},
    {"track": ["wandb"]},
    {"something": "new"},
]
HARMLESS: list[dict[str, Any]] = [
    {"reward": ["own", "0.5*own"], "tools": ["calculator", "python"], "sandbox": "landlock"},
    {"system": "python:/x/f.py:f", "instruction": "judge:/x", "stop": ["command:ls"], "prompt_column": "/x"},
    {"source": "FOLDER/rows.jsonl", "test_file": "FOLDER/rows.jsonl", "policy.device": "cuda:1"},
    {"policy.model": "owner/name", "track": ["tensorboard"], "init": None, "max_tokens": 3},
    {"policy.model": "run:model", "environment": "textarena:Nim-v0"},
    {"name": "code", "source": "humaneval"},
    {"name": "dataset", "source": "openai/gsm8k", "subset": "main", "split": "train"},
]


@pytest.fixture
def text_run(tmp_path: Path) -> Path:
    """A folder with the settings of a language model's run, all plain data."""
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "rows.jsonl").write_text("".join(f'{{"prompt": "p{i}", "answer": "1"}}\n' for i in range(20)))
    (folder / "link.jsonl").symlink_to("/etc/passwd")
    config = configure(f"jsonl:{folder / 'rows.jsonl'}", {"model": "owner/name"})
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    (folder / "run.json").write_text(json.dumps({"format": 2, "status": "died", "result": None, "history": []}))
    return folder


def test_each_setting_beyond_plain_data_needs_trust(text_run: Path, tmp_path: Path) -> None:
    plain = json.loads((text_run / "config.json").read_text())
    assert Run(text_run).config.task.source == str(text_run / "rows.jsonl")

    def checked(changes: dict[str, Any]) -> None:
        settings = json.loads(json.dumps(plain))
        for key, value in changes.items():
            value = json.loads(json.dumps(value).replace("FOLDER", str(text_run)))
            in_task = key in settings["task"] or key in ("name", "test_file", "sandbox-read", "path", "options")
            (settings["task"] if in_task else settings)[key] = value
        (text_run / "config.json").write_text(json.dumps(settings))
        trust.check_trust(text_run, settings)

    for harmless in HARMLESS:
        checked(harmless)
    (tmp_path / "f.py").write_text("raise SystemExit")
    for needs in NEEDS:
        needs = json.loads(
            json.dumps(needs)
            .replace("/x/f.py", str(tmp_path / "f.py"))
            .replace("/x/judge.toml", str(tmp_path / "f.py"))
        )
        flag = list(needs)[-1].replace("_", "-").replace("name", "task")
        with pytest.raises(ConfigError, match=rf"use more than plain data(?s:.*)--[\w.-]*{flag.rpartition('.')[2]} "):
            checked(needs)
        with pytest.raises(ConfigError):
            _ = Run(text_run).config


def test_every_text_setting_has_a_pattern_of_plain_values() -> None:
    """A new field of a config, a task or a choice fails here until `PLAIN_VALUES` has a pattern for it."""
    classes = (Config, RankSettings, RoundsPlan, *TASKS, *(choice for menu in CHOICES.values() for choice in menu))
    for cls in classes:
        for name, setting in settings_of(cls).items():
            numbers = set(setting.kinds) <= {int, float, bool, NoneType}
            assert name in trust.PLAIN_VALUES or name in ("task", "policy", "algorithm", "ranks") or numbers, (
                cls,
                name,
            )


# ---- a file that changes -------------------------------------------------------------------------------------


def test_hashed_code_is_executed_here_and_in_reward_workers(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is replaced right after it was hashed."""
    file = tmp_path / "mine.py"
    file.write_text(REWARD)
    run = library.train("sort", reward=f"python:{file}:own", out=tmp_path / "run", show=False, **SMALL)
    check = trust.check_trust

    def then_replaced(*args: Any) -> None:
        file.write_text(REWARD)
        check(*args)
        file.write_text(f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n{REWARD}")

    monkeypatch.setattr(runs, "check_trust", then_replaced)
    assert library.evaluate(run, prompts=2)
    assert library.sample(run, task="own", count=2)[0]["reward"] is not None
    assert not (tmp_path / "ran").exists()


@pytest.mark.long
def test_code_file_that_is_named_again_is_reread(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    for value in ("1.0", "2.0"):
        file.write_text(f"def own(prompt, response):\n    return {value}\n")
        os.utime(file, (1, 1))
        out = tmp_path / f"run{value}"
        run = library.train("sort", reward=f"python:{file}:own", out=out, show=False, **SMALL)
        assert run.metrics[-1]["reward"] == float(value)
        assert run.info["code"] == {str(file): trust.hashlib.sha256(file.read_bytes()).hexdigest()}


@pytest.mark.long
def test_untrusted_rounds_are_rejected(tmp_path: Path, reward: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """This applies to code, a judge's file, and an engine in the settings of the reward models."""
    folder = tmp_path / "rounds"
    flags = [
        "--length",
        "2",
        "--numbers",
        "3",
        "--prompts",
        "2",
        "--samples",
        "2",
        "--steps",
        "1",
        "--eval-prompts",
        "2",
    ]
    assert (
        main(["rounds", "sort", "--rounds", "1", "--pairs", "8", "--rm.steps", "1", *flags, "--out", str(folder)]) == 0
    )
    assert main(["rounds", str(folder)]) == 0
    kept = json.loads((folder / "rounds.json").read_text())
    for changes in (
        {"config": kept["config"] | {"task": kept["config"]["task"] | {"reward": [f"python:{reward}:own"]}}},
        {"plan": kept["plan"] | {"judge": str(reward)}},
        {"reward_model": kept["reward_model"] | {"policy.engine_url": ["http://127.0.0.1:1"]}},
    ):
        (folder / "rounds.json").write_text(json.dumps(kept | changes))
        capsys.readouterr()
        assert main(["rounds", str(folder)]) == 2 and "is not known here" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()
