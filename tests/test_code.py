"""Looking at a run never runs the code that it names; loading it runs only code that is as it was, or is trusted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import ascent as library
from ascent.cli.main import main
from ascent.core.types import Refused
from ascent.lab.server import application
from ascent.records import code
from ascent.records.run import Run

SMALL = {"length": 2, "numbers": 3, "prompts": 2, "samples": 2, "eval_prompts": 2, "steps": 2, "record_every": 1}
SMALL |= {"policy.width": 8, "policy.layers": 1, "policy.heads": 2, "checkpoint_every": 1}
REWARD = "def own(prompt, response):\n    return float(response[0])\n"


@pytest.fixture
def reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(code, "TRUSTED", set())
    file = tmp_path / "mine.py"
    file.write_text(REWARD)
    return file


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a reward and a run that was trained with it."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "mine.py").write_text(REWARD)
    library.train("sort", reward=f"python:{folder / 'mine.py'}:own", out=folder / "run", show=False, **SMALL)
    return folder


@pytest.fixture
def run(reward: Path, tmp_path: Path, trained: Path) -> Run:
    """A run in a folder of runs, with a reward of its own that would leave a mark now."""
    shutil.copytree(trained / "run", tmp_path / "runs" / "r")
    for name in ("config.json", "run.json"):
        file = tmp_path / "runs" / "r" / name
        file.write_text(file.read_text().replace(str(trained / "mine.py"), str(reward)))
    reward.write_text(f"from pathlib import Path\n{REWARD}\nPath({str(tmp_path / 'ran')!r}).touch()\n")
    return Run(tmp_path / "runs" / "r")


@pytest.mark.long
def test_looking_never_runs_code(run: Run, reward: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for there in (True, False):
        if not there:
            reward.unlink()
        for args in ((), ("--step", "0"), ("--json",)):
            assert main(["show", str(run.folder), *args]) == 0
        assert "Maximise" in capsys.readouterr().out
        assert main(["report", str(run.folder)]) == 0
        with TestClient(application(run.folder.parent)) as client:
            for path in ("/", "/runs", "/run?id=r", "/compare?id=r", "/completions?id=r", "/figure/training?a.run=r"):
                assert client.get(path).status_code == 200, path
            events = client.get("/api/runs/r/events").text
            assert events.count("event: metrics") == 2 and "event: status" in events
            assert client.get("/api/runs/r/responses").json()["prompts"]
    assert not (tmp_path / "ran").exists()


LOADS: dict[str, Any] = {
    "resume": lambda run: main(["resume", str(run), "--from", "1"]),
    "eval": lambda run: main(["eval", str(run)]),
    "config": lambda run: main(["train", "--config", str(run / "config.json"), "--out", str(run.parent / "again")]),
}


@pytest.mark.long
@pytest.mark.parametrize("how", LOADS)
def test_changed_code_is_refused_until_it_is_trusted(
    how: str, run: Run, reward: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert LOADS[how](run.folder) == 2
    said = capsys.readouterr().err
    assert "has changed since the run was made" in said and f"--trust {reward}" in said
    assert not (tmp_path / "ran").exists(), "nothing of it was run"
    library.trust(reward)
    assert LOADS[how](run.folder) == 0
    assert (tmp_path / "ran").exists()


def test_trust_is_a_flag_of_every_command(run: Run, reward: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(run.folder), "--trust", str(reward)]) == 0
    assert main(["--trust", str(reward), "sample", str(run.folder), "1 2"]) == 0


@pytest.mark.long
@pytest.mark.parametrize("how", LOADS)
def test_unchanged_code_needs_no_trust(how: str, run: Run, reward: Path) -> None:
    reward.write_text(REWARD)
    assert LOADS[how](run.folder) == 0


def test_code_without_a_record_or_from_the_folder_itself_is_refused(run: Run, reward: Path) -> None:
    """A folder that came from elsewhere may name any file, and may bring one along."""
    reward.write_text(REWARD)
    info = json.loads((run.folder / "run.json").read_text())
    (run.folder / "run.json").write_text(json.dumps({name: v for name, v in info.items() if name != "code"}))
    with pytest.raises(Refused, match="no record that the run was made with it"):
        _ = Run(run.folder).config
    brought = Path(shutil.copy(reward, run.folder / "brought.py"))
    config = (run.folder / "config.json").read_text().replace(str(reward), str(brought))
    (run.folder / "config.json").write_text(config)
    (run.folder / "run.json").write_text(json.dumps(info | {"code": code.code_hashes(json.loads(config))}))
    with pytest.raises(Refused, match="came with the folder"):
        _ = Run(run.folder).config
    brought.unlink()
    with pytest.raises(Refused, match="is not there any more"):
        _ = Run(run.folder).config


@pytest.mark.parametrize("form", ["{}", " {}", "0.5*{}", "0.5 * {}", "positions+{}", "positions+0.5* {}"])
def test_code_is_found_in_every_form_that_a_reward_may_have(form: str, run: Run, reward: Path, tmp_path: Path) -> None:
    """In each of them another file would have been run: the record was made for none of them."""
    other = Path(shutil.copy(reward, tmp_path / "other.py"))
    config = json.loads((run.folder / "config.json").read_text())
    config["task"]["reward"] = form.format(f"python:{other}:own")
    (run.folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(Refused, match="no record that the run was made with it"):
        _ = Run(run.folder).config
    assert not (tmp_path / "ran").exists()


def test_code_beside_a_folder_is_not_taken_for_that_of_the_run(
    run: Run, reward: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An archive may bring a folder, a file beside it, and a record of that file's hash."""
    monkeypatch.chdir(tmp_path)
    config = json.loads((run.folder / "config.json").read_text())
    config["task"]["reward"] = f"python:{reward.name}:own"
    (run.folder / "config.json").write_text(json.dumps(config))
    info = json.loads((run.folder / "run.json").read_text())
    (run.folder / "run.json").write_text(json.dumps(info | {"code": code.code_hashes(config)}))
    with pytest.raises(Refused, match="which is not a whole path"):
        _ = Run(run.folder).config
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("form", ["judge:{}", " 0.5 * judge:{} "])
def test_a_judge_that_came_with_the_folder_is_not_sent_a_key(form: str, run: Run, tmp_path: Path) -> None:
    for file, why in ((run.folder / "evil.toml", "came with the folder"), (Path("evil.toml"), "not a whole path")):
        with pytest.raises(Refused, match=f"judge file .*{why}"):
            code.check_code(run.folder, {"task": {"reward": [form.format(file)]}}, {})
    code.check_code(run.folder, {"task": {"reward": [form.format(tmp_path / "mine.toml")]}}, {})


def test_every_file_that_settings_name_is_found(tmp_path: Path) -> None:
    for name in ("a.py", "b.py", "c: d.py"):
        (tmp_path / name).write_text(name)
    settings = {
        "task": {"name": f"python:{tmp_path}/a.py:Task", "reward": ["own", f"0.5*python:{tmp_path}/b.py:f"]},
        "loss": {"name": "clipped"},
        "advantage": {"name": f"python:{tmp_path}/c: d.py:Mine"},
    }
    assert sorted(code.code_hashes(settings)) == [f"{tmp_path}/{name}" for name in ("a.py", "b.py", "c: d.py")]


def test_a_program_that_a_folder_names_is_not_started_until_it_is_trusted(run: Run, monkeypatch: Any) -> None:
    monkeypatch.setattr(code, "PROGRAMS", set())
    settings = {"task": {"agent": "command:sh -c 'touch x'"}}
    with pytest.raises(Refused, match=r"its settings start a program.*Nothing of it was started.*--trust 'command:sh"):
        code.check_code(run.folder, settings, {})
    library.trust("command:sh -c 'touch x'")
    code.check_code(run.folder, settings, {})
    code.code_hashes({"task": {"agent": "command:ls"}})  # a run is made with it
    code.check_code(run.folder, {"task": {"agent": "command:ls"}}, {})


def test_a_taskset_that_a_folder_names_is_the_one_that_it_was_made_with(run: Run, tmp_path: Path) -> None:
    file, own = tmp_path / "taskset.py", {"task": {"agent": f"verifiers:{tmp_path}/taskset.py:{tmp_path}/env"}}
    file.write_text("x = 1")
    made = code.code_hashes(own)
    assert list(made) == [str(file)]
    code.check_code(run.folder, own, made)
    file.write_text("x = 2")
    with pytest.raises(Refused, match=r"verifiers file .* has changed since the run was made"):
        code.check_code(run.folder, own, made)
    for folder, why in ((run.folder / "env", "came with the folder"), ("env", "not a whole path")):
        with pytest.raises(Refused, match=f"environment file .*{why}"):
            code.check_code(run.folder, {"task": {"agent": f"verifiers:name:{folder}"}}, {})
    code.check_code(run.folder, {"task": {"agent": f"verifiers:owner/name@1.0:{tmp_path}/env"}}, {})


def test_an_engine_that_a_folder_brings_or_gives_arguments_is_not_started(run: Run, tmp_path: Path) -> None:
    def settings(python: Path, args: str = "") -> dict[str, Any]:
        return {"policy": {"kind": "causal-lm", "engine": "vllm", "engine_python": str(python), "engine_args": args}}

    code.check_code(run.folder, settings(tmp_path / "venv"), {})
    with pytest.raises(Refused, match=r"names? the engine file .*which came with the folder"):
        code.check_code(run.folder, settings(run.folder / "venv"), {})
    with pytest.raises(Refused, match="which is not a whole path"):
        code.check_code(run.folder, settings(Path("venv")), {})
    risky = settings(tmp_path / "venv", "--tool-parser-plugin evil.py")
    with pytest.raises(Refused, match=r"start a program.*--trust 'engine:--tool-parser-plugin evil.py'"):
        code.check_code(run.folder, risky, {})
    library.trust("engine:--tool-parser-plugin evil.py")
    code.check_code(run.folder, risky, {})
