"""Pairs and demonstrations: valid and invalid files, the data of `sort`, and runs of sft, dpo and pairs."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ascent
from ascent.build.assemble import assemble
from ascent.cli import main as cli
from ascent.cli import train as training
from ascent.cli.run_flags import parse_train
from ascent.core.errors import ConfigError, RunError
from ascent.rewards.small_task import SmallOfflineTask
from ascent.settings import configure
from ascent.tasks.small.sorting import Sort
from ascent.tasks.text.table_tasks import Preferences
from ascent.tasks.user_files import read_jsonl, write_jsonl
from ascent.workflows import seed_comparison as comparison
from ascent.workflows.labels import make_pairs
from tests.cases import mostly_smokes


def written(path: Path, *rows: Any) -> Path:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


# ---- files ----------------------------------------------------------------------------------------

USER, GOOD, BAD = (
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "2"},
    {"role": "assistant", "content": "3"},
)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "1 + 1?", "chosen": "2", "rejected": "3"},
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD], "source": "somewhere"},
        {"prompt": [USER], "chosen": "2", "rejected": "3"},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
    ],
)
def test_trls_forms_are_read(row: dict[str, Any]) -> None:
    pair = Preferences().problem(row, "line 1")
    assert pair.prompt in ("1 + 1?", [USER])
    assert (pair.answer, pair.columns["rejected"]) == ("2", "3")


def test_written_pairs_are_read_back(tmp_path: Path) -> None:
    pairs = [
        {"prompt": "a – b", "chosen": "ja", "rejected": "nein"},
        {"prompt": [USER], "chosen": "2", "rejected": ""},
    ]
    write_jsonl(tmp_path / "p.jsonl", pairs)
    read = [Preferences().problem(row, where) for where, row in read_jsonl(tmp_path / "p.jsonl")]
    assert [{"prompt": p.prompt, "chosen": p.answer, **p.columns} for p in read] == pairs


BAD_LINES = [
    ({"prompt": "a", "chosen": "b"}, "line 2 has no column rejected"),
    ({"prompt": 3, "chosen": "b", "rejected": "c"}, "line 2, column prompt"),
    ({"prompt": "a", "chosen": 3, "rejected": "c"}, "line 2, column chosen: a response must be text"),
    ({"prompt": "a", "chosen": [USER], "rejected": "c"}, "line 2, column chosen"),
    ({"prompt": "a", "chosen": "b", "rejected": "b"}, "line 2: chosen and rejected are equal"),
    ({"chosen": "b", "rejected": "c"}, "line 2 has no column prompt"),
    ("nonsense\n", "line 2 is not JSON"),
]


@pytest.mark.parametrize(("line", "words"), BAD_LINES)
@pytest.mark.parametrize("command", ["dpo", "reward-model"])
def test_invalid_line_is_rejected_before_any_work(
    command: str, line: Any, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path / "bad.jsonl", {"prompt": "x", "chosen": "y", "rejected": "z"}, line)
    assert cli.main([command, str(file), "--model", "nowhere"]) == 2
    assert words in capsys.readouterr().err


def test_pairs_need_a_file_and_two_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["dpo", str(tmp_path / "none.jsonl"), "--model", "nowhere"]) == 2
    assert "there is no file" in capsys.readouterr().err
    one = written(tmp_path / "one.jsonl", {"prompt": "x", "chosen": "y", "rejected": "z"})
    assert cli.main(["dpo", str(one), "--model", "nowhere"]) == 2
    assert "at least two different prompts" in capsys.readouterr().err
    assert cli.main(["dpo"]) == 2
    assert "FILE|TASK is missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": [1, 2], "chosen": [1, 2, 3], "rejected": [3, 2, 1]}, "a prompt of this task has 3 numbers"),
        ({"prompt": [1, 2, 7], "chosen": [1, 2, 3], "rejected": [3, 2, 1]}, "numbers up to 4"),
        ({"prompt": [1, 2, 3], "chosen": [1, 2, 9], "rejected": [3, 2, 1]}, "column chosen"),
        ({"prompt": [1, 2, 3], "chosen": [1, 2], "rejected": [3, 2, 1]}, "column chosen"),
        ({"prompt": "1 2 3", "chosen": True, "rejected": [3, 2, 1]}, "numbers are needed"),
        ({"prompt": "1 2 3", "chosen": "1 2 3", "rejected": [1, 2, 3]}, "are equal"),
        ({"prompt": "1 2 3", "chosen": "1 2 3"}, "line 2 has no column rejected"),
    ],
)
def test_sorts_file_is_refused_with_its_line(row: dict[str, Any], words: str, tmp_path: Path) -> None:
    file = written(tmp_path / "p.jsonl", {"prompt": [3, 1, 2], "chosen": [1, 2, 3], "rejected": [3, 1, 2]}, row)
    with pytest.raises(ConfigError, match=words):
        SmallOfflineTask(Sort(length=3, numbers=5, pairs=str(file)), "pairs", torch.Generator())


def test_sorts_file_is_shown_as_it_is_and_some_prompts_are_held_out(tmp_path: Path) -> None:
    rows = [{"prompt": [a, b, 1], "chosen": sorted([a, b, 1]), "rejected": "4 4 4"} for a in range(5) for b in range(4)]
    task = Sort(length=3, numbers=5, pairs=str(written(tmp_path / "p.jsonl", *rows)), end=True)
    shown = SmallOfflineTask(task, "pairs", torch.Generator())
    held = {tuple(p) for p in shown.held_out(100).prompt.tolist()}
    assert shown.offline_rollouts(shown.held_out(100)).response.shape[0] == len(held) > 0
    prompts = shown.draw(30, torch.Generator().manual_seed(0))
    assert not held & {tuple(p) for p in prompts.prompt.tolist()}
    pair = shown.offline_rollouts(prompts)
    assert torch.equal(pair.response[:, 0, :3], prompts.prompt.sort(-1).values)
    assert bool((pair.response[:, 1, :3] == 4).all()) and bool((pair.response[..., 3] == 5).all())


# ---- what sort shows ------------------------------------------------------------------------------


@pytest.mark.parametrize("reward", ["positions", "exact", "process", "inclusion-ordering"])
@pytest.mark.parametrize("end", [False, True])
def test_the_better_of_a_pair_is_chosen(reward: str, end: bool) -> None:
    task, generator = Sort(reward=reward, end=end), torch.Generator().manual_seed(0)
    prompt = task.draw(300, generator).prompt
    total = task._total(prompt, task.compare(prompt, generator))
    assert float((total[:, 0] > total[:, 1]).float().mean()) > 0.99
    assert bool((total[:, 0] >= total[:, 1]).all())


def test_label_noise_flips_a_fraction_of_pairs() -> None:
    task, generator = Sort(wrong=0.3), torch.Generator().manual_seed(0)
    prompt = task.draw(2_000, generator).prompt
    total = task._total(prompt, task.compare(prompt, generator))
    assert float((total[:, 0] < total[:, 1]).float().mean()) == pytest.approx(0.3, abs=0.03)


def test_demonstrator_makes_systematic_errors() -> None:
    """For prompts that begin with 0, 1 or 2 of ten, the last two different numbers are always swapped."""
    task = Sort(wrong=0.3)
    prompt = torch.tensor([[2, 9, 1, 9, 5], [3, 9, 1, 9, 5], [0, 0, 0, 0, 0], [1, 7, 7, 7, 7]])
    shown = task.demonstrate(prompt, torch.Generator())[:, 0].tolist()
    assert shown == [[1, 2, 9, 5, 9], [1, 3, 5, 9, 9], [0, 0, 0, 0, 0], [7, 1, 7, 7, 7]]
    many = task.draw(5_000, torch.Generator().manual_seed(0)).prompt
    wrong = (task.demonstrate(many, torch.Generator())[:, 0] != many.sort(-1).values).any(-1)
    assert float(wrong.float().mean()) == pytest.approx(0.3, abs=0.02)
    assert not bool((Sort().demonstrate(many, torch.Generator())[:, 0] != many.sort(-1).values).any())


def test_demonstrations_have_no_reward_and_exclude_held_out_prompts() -> None:
    shown = SmallOfflineTask(Sort(), "pairs", torch.Generator().manual_seed(0))
    held = {tuple(p) for p in shown.held_out(10**9).prompt.tolist()}
    assert not held & {tuple(p) for p in shown.draw(2_000, torch.Generator().manual_seed(0)).prompt.tolist()}
    with pytest.raises(ConfigError, match="lecture offers no pairs"):
        assemble(configure("lecture", {"algorithm": "dpo"}))


# ---- runs -----------------------------------------------------------------------------------------

SMALL = {"length": 3, "numbers": 4, "policy.width": 16, "prompts": 32, "threads": 1, "show": False, "eval_prompts": 50}


@pytest.mark.slow
@pytest.mark.smoke
def test_sft_then_dpo_on_sort(tmp_path: Path) -> None:
    sft = ascent.train("sort", algorithm="sft", steps=60, out=tmp_path / "sft", lr=1e-2, **SMALL)
    assert sft.info["label"] == "sft" and sft.config.samples == 1
    assert sft.metrics[-1]["eval/accuracy"] > 0.3, "it learns to sort from demonstrations alone"
    given = {**SMALL, "init": str(tmp_path / "sft"), "eval_every": 10}
    dpo = ascent.train("sort", algorithm="dpo", steps=30, out=tmp_path / "dpo", lr=4e-3, **given)
    first, last = dpo.metrics[0], dpo.metrics[-1]
    assert first["loss"] == pytest.approx(0.6931, abs=1e-3), "the reference is where it starts from"
    assert last["loss"] < 0.63 and last["rewards/margins"] > 0.1 and last["eval/pairs/accuracy"] > 0.7
    assert last["eval/reward"] > sft.metrics[-1]["eval/reward"] - 0.3
    assert (last["accuracy"], last["sampling/sampling_logp_difference/mean"]) == (None, None)


@pytest.mark.long
@pytest.mark.parametrize(
    ("row", "file"),
    mostly_smokes(
        itertools.product(["sft", "dpo", "reward-model"], [False, True]),
        ("sft", True), ("dpo", False), ("reward-model", True),
    ),
)  # fmt: skip
def test_killed_run_is_resumed(row: str, file: bool, tmp_path: Path) -> None:
    rows = [{"prompt": [a, b, c], "response": sorted([a, b, c])} for a in range(4) for b in range(4) for c in range(2)]
    rows = [{**r, "chosen": r["response"], "rejected": [3, 0, 0]} for r in rows]
    source = {} if not file else {("demonstrations" if row == "sft" else "pairs"): str(written(tmp_path / "f", *rows))}
    more = {"steps": 6, "checkpoint_every": 3, "eval_every": 2, "keep": 9, "record_rollouts": "all"}
    settings = {**SMALL, **more, **source, "prompts": 8}
    whole = ascent.train("sort", algorithm=row, out=tmp_path / "a", **settings)
    ascent.train("sort", algorithm=row, out=tmp_path / "b", **settings)
    again = ascent.api.resume(tmp_path / "b", from_step=3)
    for a, b in zip(whole.metrics, again.metrics, strict=True):
        assert {k: v for k, v in a.items() if "time" not in k} == {k: v for k, v in b.items() if "time" not in k}
    assert whole.rollouts(5) == again.rollouts(5)
    for name in ("params", "optimizer"):
        one, two = (tmp_path / run / "checkpoints/step_000006" / f"{name}.safetensors" for run in "ab")
        assert one.read_bytes() == two.read_bytes()


@pytest.mark.long
def test_compare_takes_what_is_shown_beside_what_is_sampled(tmp_path: Path) -> None:
    """As `ascent compare sort --algorithms sft,dpo,grpo --samples 3` does, in this process."""
    few = ["--length", "3", "--numbers", "4", "--policy.width", "8", "--prompts", "4", "--steps", "2", "--threads", "1"]
    runs = {}
    for row in ("sft", "dpo", "grpo"):
        config, _ = parse_train(["sort", *few, "--algorithm", row], "ascent compare", {"samples": 3})
        comparison.run_one(config.to_dict(), str(tmp_path / row))
        runs[row] = [ascent.load(tmp_path / row)]
    found = comparison.summarize_runs(runs)
    costs = {name: (row["responses"], row["labels"]) for name, row in found.items()}
    assert costs == {"sft": (0, 8), "dpo": (0, 8), "grpo": (24, 24)}
    assert "frac_reward_zero_std" not in found["sft"]
    table = "\n".join(training.comparison_table(found, 1))
    assert "labels" in table and "exactly right" in table
    assert comparison.draw_comparison(runs, tmp_path / "compare.png", 1).stat().st_size > 10_000


@pytest.mark.parametrize(("row", "shown"), [("sft", 1), ("dpo", 2)])
def test_samples_are_rejected_for_offline_data(row: str, shown: int, tmp_path: Path) -> None:
    asked = ["sort", "--algorithm", row]
    for more in (["--samples", "3"], ["--samples=3"]):
        with pytest.raises(ConfigError, match=f"{row} samples nothing.* have {shown} per prompt.*Leave --samples out"):
            parse_train([*asked, *more], "ascent train")
    with pytest.raises(ConfigError, match="--samples 3"):
        ascent.train("sort", out=tmp_path / "run", show=False, algorithm=row, samples=3)
    assert not (tmp_path / "run").exists()
    file = tmp_path / "config.json"
    for settings in (configure("sort", {"algorithm": row}).to_dict() | {"samples": 3}, configure("sort", {}).to_dict()):
        file.write_text(json.dumps(settings))
        with pytest.raises(ConfigError, match=f"{row} samples nothing.* set it to {shown}"):
            parse_train(["--config", str(file), "--algorithm", row], "ascent train")
        given = ["--config", str(file), "--algorithm", row, "--samples", str(shown)]
        assert parse_train(given, "ascent train")[0].samples == shown
    for fine in ([], ["--samples", str(shown)]):
        assert parse_train([*asked, *fine], "ascent train")[0].samples == shown
    assert parse_train(["sort", "--samples", "3"], "ascent train")[0].samples == 3


def test_pairs_from_a_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ascent.train("sort", algorithm="sft", steps=2, out=tmp_path / "run", **SMALL)
    file = tmp_path / "pairs.jsonl"
    assert cli.main(["pairs", str(tmp_path / "run"), str(file), "--count", "40"]) == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == 40
    for row in rows:
        right = sorted(row["prompt"])
        points = [sum(a == b for a, b in zip(row[side], right, strict=True)) for side in ("chosen", "rejected")]
        assert points[0] > points[1]
    assert cli.main(["pairs", str(tmp_path / "run"), str(file)]) == 2
    assert "already there" in capsys.readouterr().err
    longest = make_pairs(tmp_path / "run", tmp_path / "b.jsonl", 10, label=lambda _, a, b: sum(a) > sum(b))
    assert all(sum(r["chosen"]) >= sum(r["rejected"]) for r in map(json.loads, longest.read_text().splitlines()))
    with pytest.raises(RunError, match="only 0 of 10 pairs"):
        make_pairs(tmp_path / "run", tmp_path / "c.jsonl", 10, label=lambda *_: None)


def test_pairs_are_labelled_by_another_reward_than_the_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of 20 × 20 pairs of guesses about ten have an exactly right one; most differ in the number of right positions."""
    ascent.train("sort", steps=1, reward="exact", out=tmp_path / "run", **SMALL)
    own, other = tmp_path / "own.jsonl", tmp_path / "other.jsonl"
    assert cli.main(["pairs", str(tmp_path / "run"), str(own), "--count", "40"]) == 1
    assert "of 40 pairs" in capsys.readouterr().err
    assert cli.main(["pairs", str(tmp_path / "run"), str(other), "--count", "40", "--reward", "positions"]) == 0
    assert any(json.loads(line)["chosen"] != sorted(json.loads(line)["prompt"]) for line in other.open())


@pytest.mark.long
def test_number_of_prompts_and_labels_for_few_pairs_is_bounded(tmp_path: Path) -> None:
    """Ten pairs take at most 200 prompts, twenty at a time. No label is requested after ten pairs."""
    ascent.train("sort", algorithm="sft", steps=2, out=tmp_path / "run", **SMALL)
    asked = 0

    def late(*_: Any) -> bool | None:
        nonlocal asked
        asked += 1
        return True if asked > 100 else None

    make_pairs(tmp_path / "run", tmp_path / "late.jsonl", 10, label=late)
    assert asked == 110
    asked = -(10**6)
    with pytest.raises(RunError, match="only 0 of 10"):
        make_pairs(tmp_path / "run", tmp_path / "never.jsonl", 10, label=late)
    assert 180 < asked + 10**6 <= 200


# ---- language -------------------------------------------------------------------------------------


def words(folder: Path, **more: Any) -> dict[str, Any]:
    given = {"max_prompt": 64, "max_tokens": 8, "threads": 1, "show": False, "prompts": 4, "eval_prompts": 8}
    return {"policy.model": str(folder), **given, **more}


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [
        {"prompt": f"{a} + {b} =", "chosen": str(a + b), "rejected": "?" * (1 + b)} for a in range(5) for b in range(5)
    ]
    rows.append({"prompt": "1 + 1 =", "chosen": "two", "rejected": "three"})
    return written(tmp_path_factory.mktemp("pairs") / "sums.jsonl", *rows)


@pytest.mark.long
def test_dpo_on_a_language_model(sums: Path, tiny_folder: Path, tmp_path: Path) -> None:
    more = {"steps": 8, "eval_every": 4, "lr": 1e-3, "checkpoint_every": 4, "keep": 9}
    run = ascent.train(f"preferences:{sums}", out=tmp_path / "a", **words(tiny_folder, **more))
    assert run.info["label"] == "dpo" and run.config.samples == 2
    assert run.metrics[0]["loss"] == pytest.approx(0.6931, abs=1e-3)
    assert run.metrics[-1]["loss"] < 0.5 and run.metrics[-1]["eval/pairs/accuracy"] == 1.0
    ascent.train(f"preferences:{sums}", out=tmp_path / "b", **words(tiny_folder, **more))
    again = ascent.api.resume(tmp_path / "b", from_step=4)
    for a, b in zip(run.metrics, again.metrics, strict=True):
        assert {k: v for k, v in a.items() if "time" not in k} == {k: v for k, v in b.items() if "time" not in k}


def test_the_ids_are_those_of_chosen_and_rejected(sums: Path, tiny_folder: Path) -> None:
    parts = assemble(configure(f"preferences:{sums}", {k: v for k, v in words(tiny_folder).items() if k != "show"}))
    prompt = parts.task.draw(26, torch.Generator().manual_seed(0))
    rollouts = parts.engine.generate(prompt, 2)
    said = {
        tuple(parts.policy.decode(r[m].tolist()) for r, m in zip(*pair, strict=True))
        for pair in zip(rollouts.response, rollouts.mask, strict=True)
    }
    assert ("2", "??") in said or ("two", "three") in said
    assert all(
        int(r[m][-1]) == parts.policy.eos_token_id
        for p in (0, 1)
        for r, m in zip(rollouts.response[:, p], rollouts.mask[:, p], strict=True)
    )
    assert torch.equal(parts.task.score(rollouts).reward[..., 0], torch.tensor([[1.0, 0.0]]).expand(26, 2))


@pytest.mark.long
def test_a_micro_batch_of_language_never_cuts_a_pair_nor_changes_a_gradient(sums: Path, tiny_folder: Path) -> None:
    found = []
    for budget in (0, 1, 60):
        given = {k: v for k, v in words(tiny_folder, micro_batch=budget).items() if k != "show"}
        parts = assemble(configure(f"preferences:{sums}", given))
        parts.policy.double()
        from ascent.core.loop import score_rollouts

        batch, _ = score_rollouts(
            parts.task, parts.engine.generate(parts.task.draw(5, torch.Generator().manual_seed(1)), 2)
        )
        algorithm = parts.config.algorithm
        batch = batch.add(logp_ref=torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(2)).double())
        batch, _ = algorithm.compute_advantages(batch.add(logp_old=batch.logp_sampler), {})
        mini = batch.add(weight=algorithm.weights(batch).double())
        assert all(part.mask.shape[1] == 2 for part in parts.learner.split(mini))
        parts.learner._loss_grad = parts.learner._loss_grad.double()
        terms = parts.learner.gradient(mini, algorithm.objective)
        found.append(
            (terms.objective, torch.cat([p.grad.flatten() for p in parts.learner.trainable() if p.grad is not None]))
        )
    for objective, gradient in found[1:]:
        torch.testing.assert_close(objective, found[0][0], rtol=0, atol=1e-6)
        torch.testing.assert_close(gradient, found[0][1], rtol=0, atol=1e-6)


def test_losses_and_tasks_that_do_not_go_together(sums: Path, tiny_folder: Path) -> None:
    for settings, match in (
        ({"algorithm": "grpo", "samples": 4}, "learns from samples"),
        ({"algorithm": "sft"}, "learns from demonstrations"),
    ):
        given = {k: v for k, v in words(tiny_folder).items() if k != "show"}
        with pytest.raises(ConfigError, match=match):
            assemble(configure(f"preferences:{sums}", given | settings))


@pytest.mark.long
def test_sft_on_a_task_that_knows_right_responses(tiny_folder: Path, tmp_path: Path) -> None:
    problems = [{"prompt": f"{a} + {b} =", "answer": str(a + b)} for a in range(4) for b in range(4)]
    file = written(tmp_path / "problems.jsonl", *problems)
    more = {"algorithm": "sft", "steps": 3, "eval_every": 3, "reward_workers": 1}
    run = ascent.train(f"jsonl:{file}", out=tmp_path / "run", preflight=False, **words(tiny_folder, **more))
    assert run.status == "finished" and run.metrics[-1]["eval/accuracy"] is not None
    assert {row["response_text"] for row in run.rollouts(0)} <= {str(n) for n in range(7)}
