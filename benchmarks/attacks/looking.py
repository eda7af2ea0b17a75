"""Attacks with code that a run folder or a model contains or names, in the hope that it is executed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from starlette.testclient import TestClient

from ascent.cli.main import main as command
from ascent.core.errors import ConfigError
from ascent.lab.server import application
from ascent.models import CausalLM
from ascent.runs import run_reader as runs
from ascent.runs import trust, untrusted_files
from ascent.settings import config_from
from benchmarks.attacks.attempt import Attack

LOOKING, LOADING, MODELS = "code run by looking", "code run by loading", "code of a model"
REWARD = "def own(prompt, response):\n    return float(response[0])\n"
HIDDEN = {
    "code that changed": ("python:{folder}/mine.py:own", False),
    "code in the folder": ("python:{folder}/runs/r/brought.py:own", True),
    "code beside the folder": ("python:beside.py:own", True),
    "code behind a weight": ("0.5 * python:{folder}/mine.py:own", False),
    "code behind another reward": ("positions+python:{folder}/mine.py:own", False),
    "code behind a link to where a command is run": ("python:/proc/self/cwd/mine.py:own", True),
}
"""How a folder names code: as the reward in its settings, and whether its record has the hash of that code."""
PAGES = (
    "/run?id=r",
    "/compare?id=r",
    "/completions?id=r",
    "/figure/training?a.run=r",
    "/api/figure/training?a.run=r",
    "/api/runs/r/events",
    "/api/runs/r/responses",
    "/api/view/runs",
    "/api/view/run?id=r",
    "/api/view/completions?id=r",
    "/api/view/compare?id=r",
)


def hostile_run(stage: Path, folder: Path, form: str = "python:{folder}/mine.py:own", forged: bool = False) -> Path:
    """A run whose reward is code that leaves a mark, named as in `form`; `forged`: with a record of that code."""
    run = folder / "runs" / "r"
    shutil.copytree(stage / "own", run)
    reward = form.format(folder=folder)
    if forged:
        os.chdir(folder)
    file = folder / reward.split("python:")[1].split(":")[0]
    file.write_text(f"from pathlib import Path\nPath({str(folder / 'ran')!r}).touch()\n{REWARD}")
    config = (run / "config.json").read_text().replace(f"python:{stage / 'mine.py'}:own", reward)
    (run / "config.json").write_text(config)
    about = (run / "run.json").read_text().replace(str(stage / "mine.py"), str(file))
    (run / "run.json").write_text(about)
    if forged:
        (run / "run.json").write_text(json.dumps(json.loads(about) | {"code": trust.code_hashes(json.loads(config))}))
    return run


def ran(folder: Path) -> str | None:
    return "its code ran" if (folder / "ran").exists() else None


# ---- looking --------------------------------------------------------------------------------------------


def by_command(stage: Path, *args: str) -> Callable[[Path], str | None]:
    def attempt(folder: Path) -> str | None:
        run = hostile_run(stage, folder)
        command([args[0], str(run), *args[1:]])
        return ran(folder)

    return attempt


def by_page(stage: Path, path: str) -> Callable[[Path], str | None]:
    def attempt(folder: Path) -> str | None:
        run = hostile_run(stage, folder)
        with TestClient(application(run.parent), raise_server_exceptions=False) as client:
            client.get(path)
        return ran(folder)

    return attempt


def build_to_look() -> None:
    """Build the task of a run whenever its settings or its largest reward are read."""
    parse = untrusted_files.parse_json

    def parse_and_build(data: bytes, **hooks: Any) -> Any:
        value = parse(data, **hooks)
        if isinstance(value, dict) and "task" in value and "objective" in value:
            with suppress(ConfigError):
                config_from({k: v for k, v in value.items() if k not in trust.DESCRIPTION})
        return value

    untrusted_files.parse_json = parse_and_build
    runs.check_trust = lambda *_: None
    runs.RunRecord.max_reward = property(lambda run: run.config.task.max_reward)  # type: ignore[assignment,method-assign]
    whole = runs.RunRecord.__init__

    def build(run: runs.RunRecord, folder: Path) -> None:
        whole(run, folder)
        _ = run.config

    runs.RunRecord.__init__ = build  # type: ignore[assignment,method-assign]


def list_by_building() -> None:
    build_to_look()
    from ascent.runs import run_list

    kind = run_list.run_kind

    def built_kind(folder: Path) -> str | None:
        found = kind(folder)
        if found == "ascent":
            _ = runs.RunRecord(folder).config
        return found

    run_list.run_kind = built_kind


# ---- loading --------------------------------------------------------------------------------------------


def by_loading(stage: Path, how: str, form: str, forged: bool) -> Callable[[Path], str | None]:
    def attempt(folder: Path) -> str | None:
        run = hostile_run(stage, folder, form, forged)
        args = {
            "resume": ["resume", str(run), "--from", "1"],
            "eval": ["eval", str(run)],
            "sample": ["sample", str(run), "1 2"],
            "train": ["train", "--config", str(run / "config.json"), "--out", str(folder / "new")],
        }[how]
        command(args)
        return ran(folder)

    return attempt


def trust_all() -> None:
    from ascent.cli import run_flags

    runs.check_trust = run_flags.check_trust = lambda *_: None


# ---- models ---------------------------------------------------------------------------------------------


class Touch:
    """An object whose pickle creates a file when it is loaded."""

    def __init__(self, path: str):
        self.path = path

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


def model_with_code(folder: Path) -> str | None:
    model = folder / "model"
    model.mkdir()
    classes = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil", "AutoTokenizer": ["evil.Evil", None]}
    (model / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": classes}))
    (model / "tokenizer_config.json").write_text(json.dumps({"auto_map": classes}))
    (model / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\n\n\nclass Evil:\n    pass\n")
    with suppress(ConfigError, AttributeError):  # what ran was not a model, of course
        CausalLM(model=str(model)).load()
    return ran(folder)


def trust_remote_code() -> None:
    import transformers

    for owner in (transformers.AutoTokenizer, transformers.AutoModelForCausalLM):
        load = owner.from_pretrained
        owner.from_pretrained = lambda *a, load=load, **k: load(*a, **k | {"trust_remote_code": True})


def model_with_a_pickle(stage: Path) -> Callable[[Path], str | None]:
    def attempt(folder: Path) -> str | None:
        model = Path(shutil.copytree(stage / "model", folder / "model"))
        for weights in model.glob("*.safetensors*"):
            weights.unlink()
        torch.save({"model.embed_tokens.weight": Touch(str(folder / "ran"))}, model / "pytorch_model.bin")
        with suppress(ConfigError):
            CausalLM(model=str(model)).load()
        return ran(folder)

    return attempt


def load_any_pickle() -> None:
    load = torch.load
    torch.load = lambda *a, **k: load(*a, **k | {"weights_only": False})


def attacks(stage: Path) -> list[Attack]:
    shows = (("show",), ("show", "--step", "0"), ("show", "--json"), ("report",))
    looks = [Attack(LOOKING, f"ascent {' '.join(args)}", by_command(stage, *args), list_by_building) for args in shows]
    looks += [Attack(LOOKING, f"the lab's {path}", by_page(stage, path), list_by_building) for path in PAGES]
    loads = [
        Attack(LOADING, f"ascent {how}, {where}", by_loading(stage, how, form, forged), trust_all)
        for how in ("resume", "eval", "sample", "train")
        for where, (form, forged) in HIDDEN.items()
    ]
    models = [
        Attack(MODELS, "auto_map", model_with_code, trust_remote_code),
        Attack(MODELS, "a pickle for weights", model_with_a_pickle(stage), load_any_pickle),
    ]
    return [*looks, *loads, *models]
