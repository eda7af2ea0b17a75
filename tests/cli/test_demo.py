"""`ascent demo`, for real: what its three runs must show, in under a minute."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ascent.build.trained_run import Run
from ascent.cli.main import main
from tests.runs.test_alerts import alerts_in


@pytest.mark.smoke
def test_the_demo_is_stuck_then_solved_then_hacked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["demo"]) == 0
    out = capsys.readouterr().out
    (folder,) = Path("runs").iterdir()
    assert re.fullmatch(r"\d{8}-\d{6}-demo", folder.name)
    course, ours, loophole = (Run(folder / name) for name in ("course", "ours", "loophole"))
    assert all(run.status == "finished" for run in (course, ours, loophole))

    stuck, solved, hacked = (run.result or {} for run in (course, ours, loophole))
    assert stuck["exact/reward"] < 4 and stuck["eval/accuracy"] < 0.5
    assert any(word.startswith("Stuck: ") for word in stuck["words"])
    assert solved["exact/reward"] >= 4.9 and solved["eval/accuracy"] == 1 and "Solved." in solved["words"]
    assert hacked["eval/reward"] >= 0.95 * hacked["max_reward"] and hacked["eval/accuracy"] < 0.5
    assert any(word.startswith("Reward without accuracy") for word in hacked["words"])

    assert alerts_in(ours) == {}, "a run that learns raises no alert"
    assert "so group advantages are zero" in " ".join(stuck["words"])
    check_collapse(course, alerts_in(course)["entropy-collapse"])

    assert len(course.metrics) == len(ours.metrics), "the same budget"
    assert sum(m["num_responses"] for m in course.metrics) == sum(m["num_responses"] for m in ours.metrics) == 3000
    assert len(course.updates) == len(ours.updates) == 1000

    assert [line for line in out.splitlines() if len(line) > 80] == []
    picture = str(folder / "demo.png")
    for words in ("Stuck: ", "Reward without accuracy", "What to try next", "wrong", "sorted", picture):
        assert words in out
    for run in (course, ours, loophole):
        assert str(run.folder) in out
    assert f"{stuck['exact/reward']:.2f} of 5" in out and f"{solved['exact/reward']:.2f}" in out
    assert (folder / "demo.png").read_bytes().startswith(b"\x89PNG")

    for line in out.splitlines():
        if line.strip().startswith("ascent show "):
            assert main(line.split()[1:]) == 0
            break
    else:
        pytest.fail("the demo suggests no `ascent show`")


def check_collapse(run: Run, event: dict[str, Any]) -> None:
    """The evidence of the alert is the metrics' own means, over the steps that it names."""
    evidence = event["evidence"]
    start, now = evidence["metrics"]["entropy"]
    assert now < 0.1 * start and evidence["rollouts"]["step"] % 20 == 0
    span = re.search(r"from steps (\d+)–(\d+) to (\d+)–(\d+) ", event["text"])
    assert span is not None
    begin, until, since, end = map(int, span.groups())
    assert evidence["steps"] == [begin, end] == [0, event["step"]]
    for name, pair in evidence["metrics"].items():
        windows = [[line[name] for line in run.metrics[a : b + 1]] for a, b in ((begin, until), (since, end))]
        assert pair == pytest.approx([sum(window) / len(window) for window in windows], rel=1e-9), name
    assert set(evidence["metrics"]) == {"entropy", "accuracy"}


def test_the_demo_takes_no_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--help"]) == 0
    assert "usage: ascent demo" in capsys.readouterr().out
