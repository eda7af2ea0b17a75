"""`ascent label` and judge:FILE as a reward, on the command line, with a judge server that fails in various ways."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from fake_judge import FakeJudge, Reply, serving

import ascent
from ascent.build.language_backend import LanguageBackend
from ascent.build.reward_loading import check_rewards
from ascent.build.trained_run import Run
from ascent.cli import main as cli
from ascent.core.errors import ConfigError
from ascent.rewards.judge.judge_rewards import JudgeScorer
from ascent.rewards.tokenized_task import TokenizedTask
from ascent.tasks import Jsonl
from ascent.tasks.text import Problem, TextTask
from ascent.tasks.text.table_tasks import Preferences
from ascent.tasks.user_files import read_jsonl
from tests.rewards.test_judge import SECRET, longer
from tests.tasks.test_text_tasks import Bytes, rollouts, sums, write


def read_pairs(file: Path) -> list[Problem]:
    return [Preferences().problem(row, where) for where, row in read_jsonl(file)]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def candidates(folder: Path, count: int = 12) -> Path:
    """Row i has responses of 1 and of i + 2 characters; one row has three responses, one the same twice."""
    rows: list[Any] = [{"prompt": f"question {i}", "responses": ["x", "y" * (i + 2)]} for i in range(count - 3)]
    rows.append({"prompt": "three", "responses": ["aaa", "bb", "c"]})
    rows.append({"prompt": "same", "responses": ["yes", "yes "]})
    rows.append({"prompt": [{"role": "user", "content": "again"}], "chosen": "short", "rejected": "rather long"})
    return write(folder / "candidates.jsonl", rows)


def judge_file(folder: Path, server: FakeJudge, **more: Any) -> Path:
    given = {"url": server.url, "model": "tester", "backoff": 0.01, "timeout": 2.0, "deadline": 5.0, **more}
    file = folder / "judge.toml"
    file.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in given.items()))
    return file


def label(*args: Any) -> int:
    return cli.main(["label", *map(str, args)])


def test_candidates_become_pairs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(longer) as server:
        assert label(candidates(here), "pairs.jsonl", "--judge", judge_file(here, server)) == 0
    pairs = read_pairs(here / "pairs.jsonl")
    assert len(pairs) == 9 + 3 + 1
    assert all(len(pair.answer or "") > len(pair.columns["rejected"]) for pair in pairs)
    assert pairs[-1].prompt == [{"role": "user", "content": "again"}]
    assert server.count == 2 * 13, "both orders, and the same response twice not at all"
    out = capsys.readouterr()
    assert "13 pairs in pairs.jsonl (0 ties, 1 with two equal responses, not judged); 26 answers" in out.out
    assert "13/13 pairs" in out.err


@pytest.mark.parametrize("ties", ["keep", "drop"])
def test_ties_are_counted_and_kept_apart_or_dropped(ties: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def sometimes(prompt: str, number: int) -> Reply:
        return Reply("Verdict: A") if "question" in prompt else longer(prompt, number)

    with serving(sometimes) as server:
        flags = ["--url", server.url, "--model", "m", "--ties", ties]
        assert label(candidates(here), "pairs.jsonl", *flags) == 0
    assert len(read_pairs(here / "pairs.jsonl")) == 4
    assert "9 ties" in capsys.readouterr().out
    kept = here / "pairs.ties.jsonl"
    assert kept.exists() == (ties == "keep")
    if ties == "keep":
        rows = [json.loads(line) for line in kept.read_text().splitlines()]
        assert len(rows) == 9 and rows[0]["verdicts"] == ["A", "A"] and rows[0]["responses"] == ["x", "yy"]


def test_a_file_without_a_winner_is_not_written(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(here / "two.jsonl", [{"prompt": f"question {i}", "responses": ["x", "y"]} for i in range(2)])
    with serving(lambda *_: Reply("Verdict: A")) as server:
        assert label(file, "pairs.jsonl", "--judge", judge_file(here, server)) == 1
    assert "of 2 pairs, none has a winner: 2 ties" in capsys.readouterr().err
    assert not (here / "pairs.jsonl").exists()
    assert len(read_jsonl(here / "pairs.ties.jsonl")) == 2


def test_unparsed_verdicts_are_kept_with_the_raw_answer(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def mumbles(prompt: str, number: int) -> Reply:
        return Reply("Well, well.") if "question 3" in prompt else longer(prompt, number)

    with serving(mumbles) as server:
        assert label(candidates(here), "pairs.jsonl", "--judge", judge_file(here, server)) == 0
        rows = [json.loads(line) for line in (here / "pairs.failed.jsonl").read_text().splitlines()]
        assert [(row["prompt"], row["error"], row["raw"]) for row in rows] == [
            ("question 3", "JudgeParseError", "Well, well.")
        ]
        assert len(read_pairs(here / "pairs.jsonl")) == 12
        assert label(candidates(here), "strict.jsonl", "--judge", "judge.toml", "--max-failed", 0) == 1
    assert "failed on 1 of 13 pairs, more than --max-failed 0" in capsys.readouterr().err
    assert not (here / "strict.jsonl").exists() and (here / "strict.failed.jsonl").exists()


def test_interrupted_labeling_continues(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C at the seventh request waits for pending answers, keeps them, and does not request them again."""

    def interrupted(prompt: str, number: int) -> Reply:
        if number == 6:
            os.kill(os.getpid(), signal.SIGINT)
        reply = longer(prompt, number)
        reply.delay = 0.05
        return reply

    file = candidates(here)
    with serving(interrupted) as server:
        judge = judge_file(here, server, concurrency=3)
        assert label(file, "pairs.jsonl", "--judge", judge) == 130
        first = server.count
        assert 7 <= first <= 12
        assert "run the same command again" in capsys.readouterr().err
        assert not (here / "pairs.jsonl").exists()
        assert len((here / "judge.answers.jsonl").read_text().splitlines()) == first
        server.behave = longer
        assert label(file, "pairs.jsonl", "--judge", judge) == 0
        assert server.count == 26
    assert len(read_pairs(here / "pairs.jsonl")) == 13
    assert f"{26 - first} answers requested, {first} from the cache" in capsys.readouterr().out


@pytest.mark.long
def test_lost_judge_server_loses_no_answers(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = candidates(here)
    with serving(lambda prompt, number: longer(prompt, number) if number < 10 else Reply(drop=True)) as server:
        judge = judge_file(here, server, retries=0, concurrency=1)
        assert label(file, "pairs.jsonl", "--judge", judge) == 1
        assert "run the same command again" in capsys.readouterr().err
        server.behave, before = longer, server.count
        assert label(file, "pairs.jsonl", "--judge", judge) == 0
        assert server.count - before == 26 - 10


def test_invalid_labeling_is_rejected(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = candidates(here)
    flags = ["--url", "http://localhost:1/v1", "--model", "m"]
    (here / "there.jsonl").write_text("x")
    bad = write(here / "bad.jsonl", [{"prompt": "p", "responses": ["one"]}])
    numbers = write(here / "numbers.jsonl", [{"prompt": "p", "responses": ["one", 2]}])
    ascent.train("sort", steps=1, prompts=2, eval_prompts=2, out=here / "small", show=False)
    for args, words in [
        ([file, "out.jsonl"], "has no url"),
        ([file, "there.jsonl", *flags], "already there"),
        ([file, "no/out.jsonl", *flags], "there is no folder"),
        ([here / "none.jsonl", "out.jsonl", *flags], "there is no file"),
        ([bad, "out.jsonl", *flags], "at least two responses"),
        ([numbers, "out.jsonl", *flags], "a response must be text, not 2"),
        (["small", "out.jsonl", *flags], "a judge needs text"),
        ([file, "out.jsonl", "--judge", "none.toml"], "there is no such file"),
    ]:
        assert label(*args) == 2
        assert words in capsys.readouterr().err
    assert not (here / "out.jsonl").exists()


# ---- as a reward ----------------------------------------------------------------------------------------


def test_judge_is_combined_with_other_rewards(here: Path) -> None:
    """A judge is combined by weights with the task's check and gives a reason. Without a verdict the reward fails."""

    def behave(prompt: str, _: int) -> Reply:
        return (
            Reply("no idea") if "strange" in prompt else Reply("Fine.\nScore: 10" if "kind" in prompt else "Score: 1")
        )

    with serving(behave) as server:
        entry = f"0.5*judge:{judge_file(here, server).name}"
        words = Jsonl(source=str(sums(here / "sums.jsonl")), reward=("own", entry))
        task = TokenizedTask(
            words,
            Bytes(),
            {source: JudgeScorer(source.removeprefix("judge:")) for source in LanguageBackend().reward_sources(words)},
        )
        prompt = task.held_out(1)
        right = task.problem(-1).answer
        scores = task.score(rollouts(prompt, [[str(right), "kind words", "strange", "rude"]]))
        asked = server.count
        task.score(rollouts(prompt, [[str(right), "kind words"]]))
        task.close()
        assert server.count == asked, "what was judged once is known"
    assert scores.reward[0, :, 0].tolist() == [1.0, 0.5, 0.0, 0.0]
    assert scores.valid.tolist() == [[True, True, False, True]]
    assert len(scores.errors) == 1 and "reward judge: the answer has no score" in scores.errors[0]
    assert scores.measures["rewards/judge"][0, 1] == 1.0
    assert scores.notes is not None and "Fine." in scores.notes[0, 1]


def test_entries_of_judges(here: Path) -> None:
    (here / "judge.toml").write_text('url = "http://localhost:1/v1"\nmodel = "m"\n')
    task = Jsonl(reward=("own", "2*judge:judge.toml", "judge:judge.toml"))
    assert task.reward[1] == f"2.0*judge:{here / 'judge.toml'}"
    assert [reward.name for reward in task.rewards] == ["own", "judge", "judge-2"]
    assert JudgeScorer(str(here / "judge.toml")).judge.model == "m"
    with pytest.raises(ConfigError, match="there is no such file"):
        check_rewards(LanguageBackend(), TextTask(reward=("judge:none.toml",)))


@pytest.mark.slow
def test_a_run_with_a_judge_and_pairs_from_its_policy(
    here: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Train a language model on a judge's scores, then label its responses. The API key is written nowhere."""
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)

    def behave(prompt: str, number: int) -> Reply:
        if "[Response A]" in prompt:
            return longer(prompt, number)
        response = prompt.split("[The response]\n")[1].split("\n\n[End")[0]
        return Reply(f"Score: {min(10, 1 + len(response))}")

    with serving(behave) as server:
        judge_file(here, server, max_tokens=33)
        data = sums(here / "sums.jsonl")
        args = [f"jsonl:{data}", "--model", tiny_folder, "--reward", "judge:judge.toml", "--steps", 2, "--prompts", 2]
        more = ["--samples", 3, "--max-tokens", 8, "--max-prompt", 64, "--eval-prompts", 4, "--threads", 1]
        assert cli.main([*map(str, ["train", *args, *more]), "--no-preflight", "--out", "run"]) == 0
        assert server.count > 0 and server.bodies[0]["max_tokens"] == 33
        assert label("run", "pairs.jsonl", "--judge", "judge.toml", "--prompts", 5, "--samples", 2) == 0
    run = Run(here / "run")
    assert 0 < run.metrics[-1]["reward"] <= 1 and run.metrics[-1]["reward_errors"] == 0
    assert all(pair.prompt.strip() in data.read_text() for pair in read_pairs(here / "pairs.jsonl"))  # type: ignore[union-attr]
    for path in here.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path
