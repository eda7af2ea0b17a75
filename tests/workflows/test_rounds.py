"""Rounds: every part is an ordinary run; killed rounds continue bitwise equal and repeat nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_judge import serving
from safetensors.torch import load_file

from ascent.build.trained_run import Run
from ascent.cli import main as cli
from ascent.cli.train import reward_model_settings
from ascent.core.errors import ConfigError, RunError
from ascent.runs.trust import record_run
from ascent.settings import configure
from ascent.workflows import labels, rounds
from ascent.workflows.rounds import Rounds, RoundsPlan, reopen_rounds, run_rounds, start_rounds
from tests.processes import Forked, wait_after
from tests.rewards.test_judge import longer
from tests.tasks.test_text_tasks import sums
from tests.workflows.test_label import judge_file

SMALL: dict[str, Any] = {"length": 2, "numbers": 4, "policy.width": 16, "policy.layers": 1, "threads": 1}
STEPS: dict[str, Any] = {"steps": 4, "prompts": 4, "samples": 4, "eval_every": 4, "checkpoint_every": 2, "seed": 3}
RATER: dict[str, Any] = {"steps": 6, "prompts": 8, "eval_every": 6, "checkpoint_every": 2}
PARTS = ["pairs.jsonl", "learned.jsonl", "reward-model", "policy"]


def config_of(**more: Any) -> Any:
    return configure("sort", {"algorithm": "grpo", **SMALL, **STEPS, **more})


def rounds_in(folder: Path, plan: RoundsPlan | None = None, **more: Any) -> Rounds:
    return start_rounds(folder, config_of(**more), plan or RoundsPlan(rounds=2, pairs=30), RATER, show=False)


def params(folder: Path, part: str) -> dict[str, torch.Tensor]:
    return load_file(Run(folder / part).checkpoints[-1] / "params.safetensors")


def same(one: Path, other: Path) -> None:
    """Assert that all files of pairs and the parameters of all runs are bitwise equal."""
    for number in (1, 2):
        for name in PARTS:
            a, b = one / f"round_{number}" / name, other / f"round_{number}" / name
            if name.endswith(".jsonl"):
                assert a.read_text() == b.read_text()
            else:
                left, right = params(one, f"round_{number}/{name}"), params(other, f"round_{number}/{name}")
                assert left.keys() == right.keys()
                assert all(torch.equal(left[key], right[key]) for key in left), f"{number} {name}"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two uninterrupted rounds."""
    folder = tmp_path_factory.mktemp("rounds") / "whole"
    run_rounds(rounds_in(folder))
    return folder


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.long
def test_a_round_is_pairs_a_reward_model_and_a_policy(whole: Path) -> None:
    for number in (1, 2):
        model, policy = (Run(whole / f"round_{number}" / name) for name in ("reward-model", "policy"))
        assert model.status == policy.status == "finished"
        assert policy.config.task.reward == f"model:{model.folder.resolve()}", "the true reward is hidden from it"
        assert model.config.algorithm.loss.trains == "rewards"
        assert policy.config.algorithm.reference.enabled
        for row in rows(whole / f"round_{number}" / "pairs.jsonl"):
            right = sorted(row["prompt"])
            true = [sum(a == b for a, b in zip(row[name], right, strict=True)) for name in ("chosen", "rejected")]
            assert true[0] > true[1], "labelled by the true reward"
    first, second = Run(whole / "round_1/policy"), Run(whole / "round_2/policy")
    assert first.config.init is None
    assert Path(second.config.init).parents[1] == first.folder.resolve(), "the new reference is the last policy"
    assert Path(Run(whole / "round_2/reward-model").config.init).parents[1].name == "reward-model"
    assert first.config.seed != second.config.seed, "other prompts"


@pytest.mark.long
def test_true_reward_is_measured_but_not_trained_on(whole: Path) -> None:
    """Compare with the fraction of right positions (of two) of the last policy's greedy answers."""
    found = rounds.reopen_rounds(whole, show=False).summary()
    for number, row in enumerate(found, 1):
        last = Run(whole / f"round_{number}/policy").metrics[-1]
        assert row["true reward"] == pytest.approx(last["eval/positions"], abs=1e-6)
        assert row["learned reward"] == pytest.approx(last["eval/reward"], abs=1e-6) != row["true reward"]


def test_a_tenth_of_the_pairs_is_replayed(whole: Path) -> None:
    new = [rows(whole / f"round_{n}/pairs.jsonl") for n in (1, 2)]
    assert [len(pairs) for pairs in new] == [30, 30]
    assert rows(whole / "round_1/learned.jsonl") == new[0]
    learned = rows(whole / "round_2/learned.jsonl")
    assert learned[:30] == new[1] and len(learned) == 33
    assert all(row in new[0] for row in learned[30:])


@pytest.mark.long
def test_missing_pairs_are_reported_and_fewer_than_two_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def some(count: int) -> Any:
        return lambda *_: [{"prompt": [i % 4, i // 4], "chosen": [0, 1], "rejected": [1, 1]} for i in range(count)]

    made = start_rounds(tmp_path / "out", config_of(), RoundsPlan(rounds=1, pairs=12), RATER, show=True)
    made.folder.joinpath("round_1").mkdir()
    for count, words in ((8, "round 1: only 8 of 12 planned pairs"), (12, "")):
        monkeypatch.setattr(rounds, "sample_pairs", some(count))
        made.make_pairs(1, tmp_path / f"{count}.jsonl")
        said = capsys.readouterr().err
        assert words in said and bool(words) == bool(said)
    monkeypatch.setattr(rounds, "sample_pairs", some(1))
    with pytest.raises(RunError, match="at least two prompts"):
        made.make_pairs(1, tmp_path / "one.jsonl")
    (tmp_path / "8.jsonl").rename(made.path_of(1, "pairs.jsonl"))
    made.show = False
    (row,) = run_rounds(made)
    assert (row["pairs"], row["planned"]) == (8, 12)


def test_every_sampled_pair_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = iter([{"prompt": [i], "chosen": [0], "rejected": [1]} for i in range(5)])
    monkeypatch.setattr(labels, "_pairs", lambda *_: pairs)
    made = Rounds(tmp_path, config_of(), RoundsPlan(pairs=3), {}, show=False)
    made.make_pairs(1, tmp_path / "pairs.jsonl")
    assert len(rows(tmp_path / "pairs.jsonl")) == 3 and len(list(pairs)) == 2


@pytest.mark.parametrize(("share", "replayed"), [(0.0, 0), (0.25, 10), (0.9, 30)])
def test_replay_fraction_is_limited_by_old_pairs(share: float, replayed: int, tmp_path: Path) -> None:
    made = Rounds(tmp_path, config_of(), RoundsPlan(replay=share), {}, show=False)
    for number in (1, 2):
        folder = tmp_path / f"round_{number}"
        folder.mkdir()
        (folder / "pairs.jsonl").write_text("".join(f'{{"n": {number}, "i": {i}}}\n' for i in range(30)))
    made.mix_pairs(2, tmp_path / "out.jsonl")
    found = rows(tmp_path / "out.jsonl")
    assert sum(row["n"] == 1 for row in found) == replayed == len({row["i"] for row in found if row["n"] == 1})


@pytest.mark.long
def test_a_stop_between_any_two_parts_repeats_nothing(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped after every part, each part is made once and equals that of the uninterrupted rounds."""
    made: list[str] = []
    start, write = rounds.start, rounds.write_jsonl

    def one_run(config: Any, path: Path, *more: Any, **options: Any) -> Run:
        made.append(f"{path.parent.name}/{path.name}")
        start(config, path, *more, **options)
        raise KeyboardInterrupt

    def one_file(path: Path, found: Any) -> None:
        made.append(f"{path.parent.name}/{path.name}")
        write(path, found)
        raise KeyboardInterrupt

    monkeypatch.setattr(rounds, "start", one_run)
    monkeypatch.setattr(rounds, "write_jsonl", one_file)
    folder = tmp_path / "stopped"
    for _ in range(8):
        with pytest.raises(KeyboardInterrupt, match="ascent rounds"):
            run_rounds(
                rounds_in(folder) if not (folder / "rounds.json").exists() else reopen_rounds(folder, show=False)
            )
    run_rounds(reopen_rounds(folder, show=False))
    assert made == [f"round_{n}/{part}" for n in (1, 2) for part in PARTS]
    same(whole, folder)


@pytest.mark.slow
@pytest.mark.smoke
def test_rounds_killed_during_a_run_continue_bitwise(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL in the run of a reward model and in the run of a policy."""
    folder = tmp_path / "killed"
    rounds_in(folder)
    for run, lines in (("round_1/reward-model", 3), ("round_2/policy", 3)):
        with monkeypatch.context() as patch:
            wait_after(patch, lines - 1, folder / run)
            child = Forked(lambda: run_rounds(reopen_rounds(folder, show=False)), tmp_path / "output")
        deadline = time.monotonic() + 180
        metrics = folder / run / "metrics.jsonl"
        while not (metrics.exists() and len(metrics.read_bytes().splitlines()) >= lines):
            assert time.monotonic() < deadline and child.poll() is None, "it ended too early"
            time.sleep(0.005)
        child.kill()
        child.wait()
        assert Run(folder / run).status == "died"
    assert run_rounds(reopen_rounds(folder, show=False))[-1]["round"] == 2
    same(whole, folder)


# ---- the command ------------------------------------------------------------------------------------------------


def flags(**settings: Any) -> list[str]:
    return [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]


@pytest.mark.long
def test_interrupted_rounds_command_continues(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C in the first policy's run; then continue by the folder from another directory, twice."""
    monkeypatch.chdir(tmp_path)
    args = ["rounds", "sort", *flags(**SMALL, **STEPS), *flags(rounds=2, pairs=30, out="out")]
    args += [word for name, value in RATER.items() for word in (f"--rm.{name.replace('_', '-')}", str(value))]
    from ascent.runs.run_writer import RunWriter

    step = RunWriter.step

    def interrupted(self: Any, number: int, *more: Any) -> None:
        step(self, number, *more)
        if number == 2 and self.folder.path.name == "policy":
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(RunWriter, "step", interrupted)
        assert cli.main(args) == 130
    assert "out/round_1/policy is saved. To continue: ascent rounds out" in capsys.readouterr().err
    assert len(Run("out/round_1/policy").metrics) == 3
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert cli.main(["rounds", "../out"]) == 0
    printed = capsys.readouterr().out
    assert "reward model right" in printed and "replayed" in printed
    same(whole, tmp_path / "out")
    monkeypatch.chdir(tmp_path)
    assert cli.main([*args, "--json"]) == 0, "the same command finds all of it done"
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["round"] for row in found] == [1, 2] and found[1]["replayed"] == 3
    assert all(0 <= row["true reward"] <= 2 for row in found)
    assert cli.main([*args, "--samples", "8"]) == 2
    assert "rounds with other settings" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.smoke
def test_rounds_of_words_labelled_by_a_judge(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a stop during judging, answers that were received are not requested again."""
    monkeypatch.chdir(tmp_path)
    data = sums(tmp_path / "sums.jsonl")
    more = {"model": tiny_folder, "steps": 1, "prompts": 2, "samples": 2, "max_tokens": 16, "max_prompt": 64}
    args = ["rounds", f"jsonl:{data}", *flags(**more, eval_prompts=2, threads=1, rounds=1, pairs=12, out="out")]
    args += ["--judge", "judge.toml", "--rm.steps", "2", "--rm.prompts", "2"]

    def behave(prompt: str, number: int) -> Any:
        if number == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return longer(prompt, number)

    with serving(behave) as server:
        judge_file(tmp_path, server, concurrency=2)
        assert cli.main(args) == 130
        assert not (tmp_path / "out/round_1/pairs.jsonl").exists()
        assert cli.main(args) == 0
        assert server.count <= 24
    pairs = rows(tmp_path / "out/round_1/pairs.jsonl")
    assert pairs and all(len(row["chosen"]) > len(row["rejected"]) for row in pairs)
    assert Run(tmp_path / "out/round_1/policy").metrics[-1]["reward"] is not None


@pytest.mark.long
def test_a_start_from_a_run(tmp_path: Path) -> None:
    import ascent

    ascent.train("sort", out=tmp_path / "start", show=False, **SMALL, **STEPS)
    made = rounds_in(tmp_path / "out", RoundsPlan(rounds=1, pairs=10), init=str(tmp_path / "start"))
    before = made.policy_before(1).policy.state_dict()
    assert all(torch.equal(before[key], value) for key, value in params(tmp_path, "start").items())
    run_rounds(made)
    assert Path(Run(tmp_path / "out/round_1/policy").config.init).parents[1] == (tmp_path / "start").resolve()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--rounds", "0"], "--rounds is 0"),
        (["--replay", "1"], "--replay is 1"),
        (["--judge", "none.toml"], "needs a text task"),
        (["--algorithm", "sft"], "samples from the policy"),
        (["--rm.nonsense", "1"], "no such setting"),
        (["--rm.steps"], "needs a value"),
        (["--out", "taken"], "not empty"),
    ],
)
def test_impossible_rounds_are_rejected_before_any_work(
    change: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/file").touch()
    assert cli.main(["rounds", "sort", "--out", "out", *change]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_existing_rounds_reject_other_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rounds_in(tmp_path / "out")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["rounds", "out", "--steps", "5"]) == 2
    assert "--steps 5: the rounds in out already have their settings" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "read"), [("200", 200), ("1e-3", 1e-3), ("true", True), ("transformer", "transformer"), ("[1]", [1])]
)
def test_settings_of_reward_models_are_json_or_text(value: str, read: Any) -> None:
    args = ["--steps", "3", "--rm.some-name", value, "--lr=0.1"]
    assert reward_model_settings(args) == ({"some_name": read}, ["--steps", "3", "--lr=0.1"])


def test_unfinished_rounds_are_not_in_the_summary(whole: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(whole, tmp_path / "copy")
    assert [row["round"] for row in reopen_rounds(whole, show=False).summary()] == [1, 2]
    record_run(folder, rounds.all_settings(json.loads((folder / "rounds.json").read_text())))
    (folder / "round_1/true.json").unlink()
    assert reopen_rounds(folder, show=False).summary() == [], "nor those after one that is unfinished"


@pytest.mark.long
def test_a_judge_labels_the_candidates_of_a_round(tmp_path: Path, tiny_folder: Path) -> None:
    config = configure(
        f"jsonl:{sums(tmp_path / 'sums.jsonl')}",
        {"model": str(tiny_folder), "algorithm": "grpo", "max_tokens": 8, "max_prompt": 64, "threads": 1},
    )
    with serving(longer) as server:
        judge = str(judge_file(tmp_path, server))
        made = start_rounds(tmp_path / "out", config, RoundsPlan(rounds=1, pairs=6, judge=judge), {}, show=False)
        made.path_of(1).mkdir()
        made.make_pairs(1, made.path_of(1, "pairs.jsonl"))
        pairs, asked = rows(made.path_of(1, "pairs.jsonl")), server.count
        assert len(rows(made.path_of(1, "candidates.jsonl"))) == 6 and asked > 0
        assert len(pairs) > 1 and all(len(row["chosen"]) > len(row["rejected"]) for row in pairs)
        drawn = made.path_of(1, "candidates.jsonl").read_text()
        made.make_pairs(1, made.path_of(1, "again.jsonl"))
        assert made.path_of(1, "candidates.jsonl").read_text() == drawn and server.count == asked, (
            "nothing is paid twice"
        )
        same_prompt = [{"prompt": "p", "responses": ["x", "y" * n]} for n in (2, 3)]
        made.path_of(1, "candidates.jsonl").write_text("".join(json.dumps(row) + "\n" for row in same_prompt))
        with pytest.raises(RunError, match="at least two prompts"):
            made.make_pairs(1, made.path_of(1, "one.jsonl"))
        assert not made.path_of(1, "one.jsonl").exists(), "so that the next attempt labels again"
    empty = tmp_path / "empty.toml"
    empty.write_text("")
    with pytest.raises(ConfigError, match="has no url"):
        start_rounds(tmp_path / "other", config, RoundsPlan(judge=str(empty)), {}, show=False)


def test_true_reward_must_not_be_learned(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be a learned reward"):
        rounds_in(tmp_path / "out", reward=f"model:{whole / 'round_1/reward-model'}")
