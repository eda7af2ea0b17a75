"""The notebooks run, and in a real kernel a run is one display that an interrupt ends and saves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tasks.test_python_objects import cell

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


def code_of(notebook: Path) -> list[str]:
    cells = json.loads(notebook.read_text())["cells"]
    return ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]


def test_there_are_three_without_outputs() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["1-the-lecture", "2-your-own-reward", "3-grpo-on-one-gpu"]
    for path in NOTEBOOKS:
        assert not any(c.get("outputs") or c.get("execution_count") for c in json.loads(path.read_text())["cells"])


@pytest.mark.smoke
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_runs(notebook: Path, tiny_folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """On a CPU, with a tiny model, cell after cell in one namespace whose functions are in no file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ASCENT_MODEL", str(tiny_folder))
    space: dict[str, Any] = {}
    for code in code_of(notebook):
        space |= cell(code, **space)
    assert space["run"].status == "finished"


KERNEL = """
import ascent
run = ascent.train("sort", length=3, numbers=4, steps=100_000, checkpoint_every=100_000, out="run", threads=1)
"""


@pytest.mark.smoke
def test_interrupting_the_kernel_saves_and_the_next_cell_resumes(tmp_path: Path) -> None:
    manager = pytest.importorskip("jupyter_client").KernelManager()
    manager.start_kernel(cwd=str(tmp_path))
    client = manager.blocking_client()
    client.start_channels()

    def run(code: str, until: str | None = None) -> list[dict[str, Any]]:
        """The messages of a cell; `until` some output has these words, then the kernel is interrupted."""
        sent, messages = client.execute(code), list[dict[str, Any]]()
        while True:
            message = client.get_iopub_msg(timeout=120)
            if message["parent_header"].get("msg_id") != sent:
                continue
            messages.append(message)
            if until is not None and until in json.dumps(message["content"]):
                manager.interrupt_kernel()
                until = None
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                return messages

    try:
        client.wait_for_ready(timeout=120)
        messages = run(KERNEL, until="<polyline")
        kinds = [m["msg_type"] for m in messages]
        assert kinds.count("display_data") == 1 and "error" not in kinds and "stream" not in kinds, "one live display"
        assert "Stopping after this step" in json.dumps(messages[-2]["content"])
        (status,) = (m for m in run("print(run.status, len(run.checkpoints))") if m["msg_type"] == "stream")
        assert status["content"]["text"].split() == ["interrupted", "1"]
        again = run("run = ascent.resume(run)\nprint(run.status)", until="<polyline")
        assert any("interrupted" in m["content"].get("text", "") for m in again if m["msg_type"] == "stream")
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
