"""A run that an earlier version began: it is shown, and resumed to the numbers that version came to.

tests/data/format1/killed is a PPO run on `sort` whose process was killed in step 5 of 6, as version 0.1.0 left it
before the package had rooms; whole.jsonl holds the metrics of the same run without the kill.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import ascent
from ascent.cli.main import main
from tests.conftest import close

KEPT = Path(__file__).parent / "data" / "format1"
ROUNDING = ("sampling/",)
"""Differences between two ways to compute the same number: other processors round them otherwise."""


@pytest.mark.slow
def test_a_run_of_before_is_shown_and_resumed_to_its_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(KEPT / "killed", folder)
    assert main(["show", str(folder)]) == 0
    assert main(["show", str(folder), "--step", "4", "--json"]) == 0
    before = json.loads(capsys.readouterr().out.splitlines()[-1])
    run = ascent.resume(folder)
    assert run.status == "finished"
    whole = [json.loads(line) for line in (KEPT / "whole.jsonl").read_text().splitlines()]
    assert len(run.metrics) == len(whole) == 6
    for ours, theirs in zip(run.metrics, whole, strict=True):
        for name, value in theirs.items():
            if value is None or name.startswith(ROUNDING):
                continue
            close(ours[name], value, 1e-4)
    after = run.rollouts(4)
    assert [row["response"] for row in after] == [row["response"] for row in before]
    assert len(ascent.load(folder).policy.state_dict()) > 0
