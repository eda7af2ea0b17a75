"""`ascent export --push`: the model card of a run, and a fake of the hub's HTTP API."""

from __future__ import annotations

import base64
import json
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import ascent
from ascent.build.trained_run import Run
from ascent.cli.main import main
from ascent.core.errors import ConfigError
from ascent.runs.rollout_files import HELD_OUT, rollout_path
from ascent.workflows.model_card import model_card

pytestmark = pytest.mark.long
TOKEN, READER = "hf_alice", "hf_reads"


class StandIn(ThreadingHTTPServer):
    """Repositories by name, each a list of commits (what files it has); large files go through the LFS routes."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.repositories: dict[str, list[dict[str, bytes]]] = {}
        self.private: dict[str, bool] = {}
        self.large: dict[str, bytes] = {}
        self.failing = ""
        """A part of an address that answers with 500."""
        self.forgets = False
        """Takes a commit and loses a file of it."""

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Answers(BaseHTTPRequestHandler):
    server: StandIn

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, status: int, body: Any = None) -> None:
        data = json.dumps(body if body is not None else {}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def handle_one(self) -> None:
        hub, path = self.server, self.path.partition("?")[0]
        sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if hub.failing and hub.failing in path:
            return self.answer(500, {"error": "the stand-in fails"})
        if path.startswith("/store/"):  # where LFS files are put; its address is secret enough
            hub.large[path.split("/")[-1]] = sent
            return self.answer(200)
        if token not in (TOKEN, READER):
            return self.answer(401, {"error": "Invalid user token."})
        if path == "/api/whoami-v2":
            return self.answer(200, {"type": "user", "name": "alice", "auth": {}})
        if self.command == "POST" and token == READER:
            return self.answer(403, {"error": "the token only reads"})
        return self.answer(*self.routed(path, sent))

    def routed(self, path: str, sent: bytes) -> tuple[int, Any]:
        hub = self.server
        if path == "/api/repos/create":
            asked = json.loads(sent)
            name = f"{asked.get('organization') or 'alice'}/{asked['name']}"
            taken = name in hub.repositories
            if not taken:
                hub.repositories[name] = [{".gitattributes": b""}]
                hub.private[name] = asked.get("private", False) or asked.get("visibility") == "private"
            return (409 if taken else 200), {"url": f"{hub.address}/{name}", "id": name}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if lfs := re.fullmatch(r"/(.+)\.git/info/lfs/objects/batch", path):
            ids = [wanted["oid"] for wanted in json.loads(sent)["objects"]]
            actions = {id: {"upload": {"href": f"{hub.address}/store/{id}"}} for id in ids}
            objects = [
                {"oid": o["oid"], "size": o["size"], "actions": actions[o["oid"]]} for o in json.loads(sent)["objects"]
            ]
            return 200, {"transfer": "basic", "objects": objects, "repo": lfs[1]}
        found = re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)(?:/(\w+)/(\w+)(?:/.*)?)?", path)
        if found is None or found[1] not in hub.repositories:
            return 404, {"error": f"no route {path}"}
        return self.of_repository(found[1], found[2] or "", found[3] or "main", sent)

    def of_repository(self, name: str, what: str, revision: str, sent: bytes) -> tuple[int, Any]:
        commits = self.server.repositories[name]
        files = commits[int(revision, 16) - 1 if re.fullmatch("[0-9a-f]{40}", revision) else -1]
        if what == "preupload":
            asked = [file["path"] for file in json.loads(sent)["files"]]
            modes = {path: "lfs" if path.endswith(".safetensors") else "regular" for path in asked}
            return 200, {"files": [{"path": p, "uploadMode": m, "shouldIgnore": False} for p, m in modes.items()]}
        if what == "tree":
            return 200, [{"type": "file", "path": p, "size": len(b), "oid": "0" * 40} for p, b in files.items()]
        if what == "commit":
            files = self.committed(dict(files), sent)
            if self.server.forgets:
                files.pop("config.json")
            commits.append(files)
            oid = f"{len(commits):040x}"
            return 200, {"commitUrl": f"{self.server.address}/{name}/commit/{oid}", "commitOid": oid, "success": True}
        return 200, {"id": name, "sha": f"{len(commits):040x}", "siblings": [{"rfilename": p} for p in files]}

    def committed(self, files: dict[str, bytes], sent: bytes) -> dict[str, bytes]:
        for line in map(json.loads, sent.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.large[value["oid"]]
            elif line["key"] == "deletedFile":
                files.pop(value["path"])
        return files

    do_GET = do_POST = do_PUT = handle_one


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    server = StandIn()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", server.address)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def trained(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("secret-place")
    (folder / "sums.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{i}+1?", "answer": str(i + 1)}) + "\n" for i in range(9))
    )
    small = {"model": str(tiny_folder), "max_tokens": 4, "prompts": 2, "samples": 2, "eval_prompts": 3, "threads": 1}
    flags = {"steps": 1, "algorithm": "grpo", "check": "exact", "seed": 7, "show": False, "preflight": False}
    return ascent.train(f"jsonl:{folder}/sums.jsonl", out=folder / "my-run", **small, **flags)


def test_a_model_is_pushed_as_one_commit_with_its_card(hub: StandIn, trained: Run, tmp_path: Path, capsys: Any) -> None:
    assert main(["export", str(trained.folder), str(tmp_path / "out"), "--push", "sums"]) == 0
    assert "Pushed: sums" in capsys.readouterr().out
    first, pushed = hub.repositories["alice/sums"]
    local = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert pushed == local | first and hub.private["alice/sums"] and "model.safetensors" in pushed
    card = pushed["README.md"].decode()
    for words in (
        "seed: 7",
        "task: jsonl:sums",
        "check exact",
        "algorithm: grpo",
        "torch 2.",
        "transformers",
        r"\frac{R_i - \text{mean}}{\text{std} + 0.0001}",
        "Maximize the mean over responses",
        "- reinforcement-learning",
        "step 1 of 1",
    ):
        assert words in card, words
    assert re.search(
        r"\| … of the 2 recorded prompts: right \| \d\.\d{3} \[\d\.\d{3}, \d\.\d{3}\] \| after step 1 \|", card
    )
    assert "secret-place" not in card and str(tmp_path) not in card and "base_model" not in card


def test_second_push_replaces_the_files(hub: StandIn, trained: Run, tmp_path: Path) -> None:
    hub.repositories["lab/sums"] = [{"old-shard.safetensors": b"x", ".gitattributes": b""}]
    ascent.export(trained.folder, tmp_path / "out", push="lab/sums", public=True)
    assert len(hub.repositories["lab/sums"]) == 2
    assert {*hub.repositories["lab/sums"][1]} == {p.name for p in (tmp_path / "out").iterdir()} | {".gitattributes"}


def test_public_repository_needs_a_flag(hub: StandIn, trained: Run, tmp_path: Path) -> None:
    ascent.export(trained.folder, tmp_path / "out", push="alice/open", public=True)
    assert not hub.private["alice/open"]
    with pytest.raises(ConfigError, match="public needs push"):
        ascent.export(trained.folder, tmp_path / "other", public=True)


@pytest.mark.parametrize(
    ("token", "why"),
    [
        ("", r"--push sums: there is no token for the hub.*hf auth login.*HF_TOKEN"),
        ("hf_wrong", r"--push sums: the hub refused the token.*nothing was exported or pushed"),
    ],
)
def test_invalid_token_is_rejected_before_any_work(
    hub: StandIn, trained: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: str, why: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=why):
        ascent.export(trained.folder, tmp_path / "out", push="sums")
    assert not hub.repositories and not (tmp_path / "out").exists()


def test_read_only_token_is_reported(
    hub: StandIn, trained: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", READER)
    with pytest.raises(ConfigError, match=r"has no write access.*alice/sums is unchanged.*hf upload alice/sums"):
        ascent.export(trained.folder, tmp_path / "out", push="sums")
    assert not hub.repositories and (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize("failing", ["/store/", "/commit/", "/preupload/"])
def test_failed_push_is_an_error(
    hub: StandIn, trained: Run, tmp_path: Path, failing: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)  # the library tries again, ever later
    hub.failing = failing
    assert main(["export", str(trained.folder), str(tmp_path / "out"), "--push", "alice/sums"]) == 2
    said = capsys.readouterr()
    assert "Pushed" not in said.out and "alice/sums is unchanged" in " ".join(said.err.split())
    assert len(hub.repositories["alice/sums"]) == 1


def test_missing_file_on_the_hub_is_detected(hub: StandIn, trained: Run, tmp_path: Path) -> None:
    hub.forgets = True
    with pytest.raises(ConfigError, match=r"the hub has no config\.json after the push"):
        ascent.export(trained.folder, tmp_path / "out", push="sums")


@pytest.mark.parametrize("name", ["a/b/c", "-x", "a b", "x" * 120])
def test_invalid_repository_name_is_rejected(trained: Run, tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="invalid repository name"):
        ascent.export(trained.folder, tmp_path / "out", push=name)


def test_without_its_package_a_push_names_the_extra(
    trained: Run, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert main(["export", str(trained.folder), str(tmp_path / "out"), "--push", "sums"]) == 2
    assert "--push needs huggingface-hub: pip install 'ascent-rl[lm]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_card_without_recorded_prompts_has_the_figures_of_training(trained: Run, tmp_path: Path) -> None:
    run = Run(shutil.copytree(trained.folder, tmp_path / "copy"))
    figures = model_card(run, 1)
    assert "of the 2 recorded prompts: right" in figures
    rollout_path(run.folder, 0, HELD_OUT).unlink()
    without = model_card(run, 1)
    assert without.splitlines() == [line for line in figures.splitlines() if "recorded prompts" not in line]


def test_unreachable_hub_is_named(trained: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: StandIn) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("time.sleep", lambda _: None)
    with pytest.raises(ConfigError, match=r"the hub at http://127\.0\.0\.1:9 cannot be reached"):
        ascent.export(trained.folder, tmp_path / "out", push="sums")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set"):
        ascent.export(trained.folder, tmp_path / "out", push="sums")
