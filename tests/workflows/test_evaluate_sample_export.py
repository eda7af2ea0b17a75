"""`ascent eval`, `ascent sample` and `ascent export`, on a tiny language model with a real tokenizer and on sort."""

from __future__ import annotations

import io
import itertools
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import ascent as library
from ascent.build.trained_run import Run
from ascent.cli.dispatch import exit_status
from ascent.cli.main import main
from ascent.core.errors import ConfigError, RunError
from ascent.models import CausalLM, LanguageModel
from ascent.rewards.tokenized_task import TokenizedTask
from ascent.runs.confidence_intervals import mean_over_prompts, pass_at_k, powers_of_two, wilson
from ascent.runs.display.terminal import LineDisplay, printable
from ascent.runs.rollout_files import write_parquet
from ascent.runs.untrusted_files import read_lines
from ascent.tasks import Jsonl, ReasoningGym
from ascent.workflows.evaluate import Evaluation, majority, results

ANSI = re.compile(r"\x1b\[[0-9;]*m")
REWARD = """
def has_e(prompt, response, answer, **columns):
    return float("e" in response), "an e" if "e" in response else "no e"

def fails_on_e(prompt, response, answer, **columns):
    if "e" in response:
        raise ValueError("I cannot read an e")
    return 0.5

def fails(prompt, response, answer, **columns):
    raise ValueError("I never work")
"""
LIMIT = 10


class Said:
    """The exit status and the output of a command."""

    def __init__(self, status: int, out: str, err: str):
        self.status, self.out, self.err = status, out, err
        self.text = " ".join(ANSI.sub("", out + err).replace("│", " ").split())


@pytest.fixture
def ascent(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Run a command in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")

    def call(*args: Any) -> Said:
        capsys.readouterr()
        status = main([str(arg) for arg in args])
        return Said(status, *capsys.readouterr())

    return call


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """Five problems; greedy decoding solves the first three, whose answers are the model's outputs."""
    folder = tmp_path_factory.mktemp("world")
    (folder / "rewards.py").write_text(REWARD)
    asked = [f"Say {word}." for word in ("one", "two", "three", "four", "five")]
    said = library.sample(model=tiny_folder, prompts=asked, greedy=True, max_tokens=LIMIT)
    rows = [
        {"prompt": row["prompt"], "answer": row["response"] if i < 3 else "something else"}
        for i, row in enumerate(said)
    ]
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train = [{"prompt": f"Name {i}.", "answer": str(i)} for i in range(12)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in train))
    return folder


def settings_of(world: Path, model: Path) -> dict[str, Any]:
    return {
        "model": str(model),
        "test_file": str(world / "test.jsonl"),
        "max_tokens": LIMIT,
        "reward": (f"python:{world}/rewards.py:has_e",),
        "steps": 2,
        "prompts": 3,
        "samples": 4,
        "eval_every": 1,
        "checkpoint_every": 1,
        "lr": 0.02,
        "threads": 1,
        "reward_workers": 1,
        "show": False,
        "preflight": False,
    }


@pytest.fixture(scope="module")
def run(world: Path, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = tmp_path_factory.mktemp("runs") / "plain"
    return library.train(f"jsonl:{world}/train.jsonl", out=out, **settings_of(world, tiny_folder))


@pytest.fixture(scope="module")
def adapted(world: Path, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same with LoRA."""
    out = tmp_path_factory.mktemp("runs") / "adapted"
    lora = {"policy.lora": 4}
    return library.train(f"jsonl:{world}/train.jsonl", out=out, **settings_of(world, tiny_folder), **lora)


@pytest.fixture(scope="module")
def sorter(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two numbers out of eight, sorted well but not perfectly after a few steps."""
    out = tmp_path_factory.mktemp("runs") / "sort"
    small = {"length": 2, "numbers": 8, "prompts": 16, "policy.width": 16, "eval_prompts": 10, "lr": 0.01}
    return library.train("sort", out=out, steps=60, eval_every=10, keep_best=True, threads=1, show=False, **small)


def bare(world: Path, **more: Any) -> dict[str, Any]:
    return {"test_file": str(world / "test.jsonl"), "max_tokens": LIMIT, "show": False} | more


# ---- numbers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tried", "right"), [(n, c) for n in range(1, 7) for c in range(n + 1)])
def test_pass_at_k_is_the_fraction_of_subsets_with_a_right_response(tried: int, right: int) -> None:
    responses = [True] * right + [False] * (tried - right)
    for k in range(1, tried + 1):
        subsets = list(itertools.combinations(responses, k))
        assert pass_at_k(k, tried, right) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def test_pass_at_1_is_the_fraction_and_impossible_counts_are_errors() -> None:
    assert pass_at_k(1, 10, 3) == pytest.approx(0.3)
    assert pass_at_k(8, 10, 3) == 1.0
    for k, tried, right in ((0, 3, 1), (4, 3, 1), (1, 3, 4), (1, 3, -1)):
        with pytest.raises(ValueError, match="pass@"):
            pass_at_k(k, tried, right)
    assert [powers_of_two(n) for n in (1, 2, 3, 8, 10)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8], [1, 2, 4, 8, 10]]


def test_wilson_interval_matches_published_values() -> None:
    """Newcombe, 1998, table I: 81 of 263, 15 of 148, 0 of 20, 1 of 29."""
    for right, tried, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0, 0.1611)):
        found = wilson(right, tried)
        assert found.value == right / tried
        assert (found.low, found.high) == pytest.approx((low, high), abs=1e-4)
    assert wilson(1, 29)[1:] == pytest.approx((0.0061, 0.1718), abs=1e-4)
    assert wilson(20, 20).high == 1.0


def test_the_bootstrap_covers_the_mean_of_nineteen_in_twenty() -> None:
    rng = np.random.default_rng(3)
    found = [mean_over_prompts(rng.beta(2, 5, 40).tolist()) for _ in range(200)]
    covered = sum(e is not None and e.low is not None and e.low <= 2 / 7 <= e.high for e in found)
    assert 180 <= covered <= 198
    values = rng.random(30).tolist()
    assert mean_over_prompts(values) == mean_over_prompts(values)
    assert mean_over_prompts([0.0, 1.0, 1.0, 0.0]) == wilson(2, 4)
    assert mean_over_prompts([]) is None
    assert mean_over_prompts([0.4])[1:] == mean_over_prompts([0.4, 0.4])[1:] == (None, None)  # type: ignore[index]


def test_a_majority_is_the_first_seen_of_equals_and_an_empty_answer_has_no_vote() -> None:
    assert majority(["a", "b", "b"]) == 1
    assert majority(["b", "a", "a", "b"]) == 0
    assert majority(["", "", "", "c", "d"]) == 3
    assert majority(["", ""]) == 0


def row(problem: int, sample: int, answer: str, strict: bool, lenient: bool, reward: float) -> dict[str, Any]:
    given = {"problem": problem, "sample": sample, "answer": answer, "valid": True}
    return given | {"strict": strict, "lenient": lenient, "reward": reward}


def test_results_by_hand() -> None:
    """Two prompts with four samples; in the second one reward failed, so it has three.

    First: votes 7 7 8 9, right is 7 (once in form): mean ¼ and ½, best is the third by reward and wrong.
    Second: votes 1 2 and an empty one, the first of the tie is wrong; best by reward is right.
    """
    failed = {"valid": False, "strict": None, "lenient": None, "reward": None}
    rows = [
        row(0, -1, "7", True, True, 1.0),
        row(1, -1, "1", False, False, 0.0),
        row(0, 0, "7", False, True, 0.5),
        row(0, 1, "7", True, True, 1.0),
        row(0, 2, "8", False, False, 2.0),
        row(0, 3, "9", False, False, 0.0),
        row(1, 0, "1", False, False, 0.0),
        row(1, 1, "", False, False, 0.0),
        row(1, 2, "1", False, False, 0.0) | failed,
        row(1, 3, "2", True, True, 1.0),
    ]
    found = {name: {m: e.value for m, e in measures.items()} for name, measures in results(rows).items()}
    assert found["greedy"] == {"strict": 0.5, "lenient": 0.5, "reward": 0.5}
    assert found["mean"] == pytest.approx({"strict": 7 / 24, "lenient": 5 / 12, "reward": (3.5 / 4 + 1 / 3) / 2})
    assert found["pass@1"] == pytest.approx({"strict": 7 / 24, "lenient": 5 / 12})
    assert found["pass@2"] == pytest.approx({"strict": (1 / 2 + 2 / 3) / 2, "lenient": (5 / 6 + 2 / 3) / 2})
    assert found["pass@4"] == {"strict": 1.0, "lenient": 1.0}, "the second prompt has not four scored responses"
    assert found["majority"] == {"strict": 0.0, "lenient": 0.5, "reward": 0.25}
    assert found["best"] == {"strict": 0.5, "lenient": 0.5, "reward": 1.5}


def test_equal_answers_are_one_vote_however_they_are_spelled() -> None:
    class Silent:
        vocab_size, eos_token_id, stop_token_ids = 1, 0, frozenset({0})

        def encode(self, messages: list[dict[str, str]]) -> list[int]:
            return []

        def tokenize(self, words: str) -> list[int]:
            return []

        def tokenize_steps(self, steps: list[str], separator: str, ended: bool) -> list[list[int]]:
            return []

        def decode(self, ids: list[int]) -> str:
            return ""

        def token_text(self, token: int) -> str:
            return ""

    task = TokenizedTask(Jsonl(source="x.jsonl", check="number"), Silent())
    votes = [
        task.normalize_answer(text, "7") for text in ("Answer: 7", "so it is 7.0!", "3 + 4 = 7", "#### 7", "\\boxed{7}")
    ]
    assert set(votes) == {"7"}
    assert task.normalize_answer("no idea", "7") == ""
    assert task.normalize_answer("Answer: 8", "7") != "7"
    assert (
        task.normalize_answer("Answer: Paris.", "Paris")
        == task.normalize_answer("I say it is **paris**", "Paris")
        == "paris"
    )

    class First(Jsonl):
        def answer(self, response: str) -> str:
            return response[:1]

    assert TokenizedTask(First(source="x.jsonl"), Silent()).normalize_answer("xyz", "7") == "x"


# ---- eval -------------------------------------------------------------------------------------------


@pytest.mark.long
def test_evaluation_of_a_bare_model(world: Path, tiny_folder: Path) -> None:
    found = library.evaluate(f"jsonl:{world}/train.jsonl", model=tiny_folder, **bare(world))
    assert found.results["greedy"]["strict"] == wilson(3, 5)
    assert found.results["greedy"]["lenient"].value == 0.6
    assert [r["strict"] for r in found.rows] == [True, True, True, False, False]
    assert [r["gold"] for r in found.rows[3:]] == ["something else"] * 2
    assert list(found.results) == ["greedy"] and found.errors == []
    assert (found.about["prompts"], found.about["model"], found.about["run"]) == (5, str(tiny_folder), None)


@pytest.mark.long
@pytest.mark.smoke
def test_occupancy_of_a_run_is_recorded(run: Run, sorter: Run) -> None:
    """Occupancy covers 12 responses without evaluations. Small policies sample all at once and record none."""
    lines = read_lines(run.folder / "occupancy.jsonl")
    assert [line["step"] for line in lines] == [0, 1] and {line["max_num_seqs"] for line in lines} == {12}
    for line, metrics in zip(lines, run.metrics, strict=True):
        assert metrics["time/tail"] == line["time/tail"] <= line["time/seconds"] < metrics["time/generate"]
        assert len(line["time/running"]) == 32 and 0 < max(line["time/running"]) <= 12
        assert list(metrics)[-1] == "loss"
    assert "time/tail" not in sorter.metrics[0] and read_lines(sorter.folder / "occupancy.jsonl") == []


@pytest.mark.long
def test_eval_agrees_with_what_training_evaluated(run: Run, ascent: Any) -> None:
    for step in (1, 2):
        said = ascent("eval", run.folder, "--step", step, "--json")
        assert said.status == 0, said.text
        found = json.loads(said.out)
        line, greedy = run.metrics[step - 1], found["results"]["greedy"]
        assert found["step"] == step and found["prompts"] == 5
        assert greedy["strict"]["value"] == pytest.approx(line["eval/accuracy"])
        assert greedy["lenient"]["value"] == pytest.approx(line["eval/lenient"])
        assert greedy["reward"]["value"] == pytest.approx(line["eval/reward"])
    newest = json.loads(ascent("eval", run.folder, "--json").out)
    assert newest["step"] == 2


@pytest.mark.long
def test_sampled_numbers_follow_from_the_parquet_alone(run: Run, ascent: Any) -> None:
    said = ascent("eval", run.folder, "--samples", 6, "--out", "all.parquet", "--seed", 3)
    assert said.status == 0 and "Responses: all.parquet" in said.out
    assert "5 held-out prompts, 6 samples each at temperature 1" in said.out
    rows = pq.read_table("all.parquet").to_pylist()
    assert len(rows) == 5 * 7
    groups = [[r for r in rows if r["problem"] == p and r["sample"] >= 0] for p in range(5)]
    assert [[r["sample"] for r in group] for group in groups] == [list(range(6))] * 5
    rewards = [[r["reward"] for r in group] for group in groups]
    assert rewards == [[float("e" in r["response"]) for r in group] for group in groups]
    assert all(r["reason"].endswith("has_e: an e" if "e" in r["response"] else "has_e: no e") for r in rows)
    assert all(len(r["ids"]) == len(r["logp"]) == r["length"] <= LIMIT for r in rows)

    def cell(name: str) -> list[float]:
        line = next(line for line in said.out.splitlines() if line.startswith(name))
        return [float(x) for x in re.findall(r"(?:^|\s)(\d\.\d{3})(?=\s|$)", line)]

    best = np.mean([max(group) for group in rewards])
    assert cell("mean score")[-1] == pytest.approx(np.mean(rewards), abs=6e-4)
    assert cell("best of 6 by reward")[-1] == pytest.approx(best, abs=6e-4)
    assert 0 < np.mean(rewards) < best, "a test of nothing otherwise"
    assert [name for name in ("pass@1", "pass@2", "pass@4", "pass@6", "majority of 6") if name not in said.out] == []
    assert "responses" in said.err and "35/35" in said.err, "progress goes to stderr"


@pytest.mark.long
def test_samples_depend_on_the_seed_and_not_on_the_batch_size(run: Run) -> None:
    def drawn(**more: Any) -> list[Any]:
        found = library.evaluate(run.folder, samples=3, show=False, **more)
        return [(r["problem"], r["sample"], r["ids"]) for r in found.rows]

    first = drawn(seed=1)
    assert drawn(seed=1) == first
    assert drawn(seed=1, rows=2) == first, "chunks of one prompt, two rows at once"
    assert drawn(seed=2) != first and drawn(seed=2)[:5] == first[:5], "greedy responses have no seed"


@pytest.mark.long
def test_temperature_and_max_tokens_are_applied(run: Run) -> None:
    cold = library.evaluate(run.folder, samples=4, temperature=0.01, max_tokens=4, prompts=3, show=False)
    assert {r["length"] for r in cold.rows} <= {1, 2, 3, 4}
    assert cold.about["temperature"] == 0.01 and cold.about["prompts"] == 3
    for problem in range(3):
        assert len({r["response"] for r in cold.rows if r["problem"] == problem}) == 1, "near 0 all are greedy"
    wide = library.evaluate(run.folder, samples=4, prompts=3, show=False)
    assert len({r["response"] for r in wide.rows}) > 9


@pytest.mark.long
def test_failed_rewards_are_counted_and_excluded(world: Path, tiny_folder: Path, ascent: Any) -> None:
    task = ("eval", f"jsonl:{world}/train.jsonl", "--model", tiny_folder, "--test-file", world / "test.jsonl")
    flags = ("--max-tokens", LIMIT, "--samples", 8, "--reward", f"python:{world}/rewards.py:fails_on_e")
    said = ascent(*task, *flags, "--json", "--out", "all.parquet")
    assert said.status == 0, said.text
    found, rows = json.loads(said.out), pq.read_table("all.parquet").to_pylist()
    with_e = sum("e" in r["response"] for r in rows)
    assert found["errors"]["count"] == with_e > 0
    assert "I cannot read an e" in found["errors"]["examples"][0]
    assert [r["valid"] for r in rows] == ["e" not in r["response"] for r in rows]
    assert found["results"]["mean"]["reward"]["value"] == 0.5, "a failed reward is no 0"
    shown = ascent(*task, *flags)
    assert f"The reward failed on {with_e} responses" in shown.text and "I cannot read an e" in shown.text
    every = ascent(*task, *flags[:-1], f"python:{world}/rewards.py:fails")
    assert every.status == 1 and "failed on all 45 responses" in every.err and "I never work" in every.err


@pytest.mark.long
def test_small_tasks_are_evaluated_by_the_same_code(sorter: Run, ascent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    found = json.loads(ascent("eval", sorter.folder, "--samples", 8, "--json").out)
    last = sorter.metrics[-1]
    assert found["prompts"] == 10 and found["step"] == 60 and found["model"] is None
    assert found["results"]["greedy"]["strict"]["value"] == pytest.approx(last["eval/accuracy"])
    assert found["results"]["greedy"]["reward"]["value"] == pytest.approx(last["eval/reward"])
    scores = {name: r["strict"]["value"] for name, r in found["results"].items()}
    assert scores["pass@1"] == pytest.approx(scores["mean"])
    assert 0 < scores["pass@1"] < scores["pass@2"] < scores["pass@4"] < scores["pass@8"] <= 1
    assert scores["best"] == scores["pass@8"], "the reward of a sorted response is the largest"
    assert all("lenient" not in r for r in found["results"].values())
    table = ascent("eval", sorter.folder, "--samples", 8).out
    assert "lenient" not in table
    assert max(len(line) for line in table.splitlines()[1:]) <= 80


@pytest.mark.long
def test_best_is_the_checkpoint_of_the_best_evaluation(sorter: Run, ascent: Any) -> None:
    evaluated = {
        line["step"] + 1: line["eval/accuracy"] for line in sorter.metrics if line["eval/accuracy"] is not None
    }
    found = json.loads(ascent("eval", sorter.folder, "--best", "--json").out)
    assert found["results"]["greedy"]["strict"]["value"] == max(evaluated.values())
    assert evaluated[found["step"]] == max(evaluated.values())


@pytest.mark.long
@pytest.mark.smoke
def test_a_run_is_evaluated_on_another_task(run: Run, ascent: Any) -> None:
    options = ("--options", '{"min_terms": 2, "max_terms": 2, "max_digits": 1}', "--prompts", 4)
    said = ascent("eval", run.folder, "--task", "reasoning-gym:chain_sum", *options, "--max-tokens", 5, "--json")
    assert said.status == 0, said.text
    found = json.loads(said.out)
    assert found["task"] == "reasoning-gym:chain_sum" and found["step"] == 2 and found["prompts"] == 4
    assert ReasoningGym(source="chain_sum").presets  # and not a task that was renamed since


# ---- sample -----------------------------------------------------------------------------------------


@pytest.mark.long
def test_sample_prints_responses_below_their_prompts(run: Run, ascent: Any) -> None:
    said = ascent("sample", run.folder, "Say one.", "Say two.", "--count", 2)
    assert said.status == 0 and said.err == ""
    assert said.out.count("prompt   ") == 2 and said.out.count("response 1: ") == said.out.count("response 2: ") == 2
    rows = library.sample(run.folder, ["Say one.", "Say two."], count=2)
    assert [r["prompt"] for r in rows] == ["Say one."] * 2 + ["Say two."] * 2
    assert all(printable(r["response"]) in said.out for r in rows)
    assert len({tuple(r["ids"]) for r in rows}) == 4, "each prompt and sample has its own"
    assert json.loads(ascent("sample", run.folder, "Say one.", "Say two.", "--count", 2, "--json").out) == rows
    assert library.sample(run.folder, "Say one.", count=2, seed=5) != rows[:2]


@pytest.mark.long
def test_log_probs_are_those_of_the_model_over_the_whole_vocabulary(tiny_folder: Path, ascent: Any) -> None:
    """Log-probs are at the sampling temperature, regardless of top-p, top-k and min-p."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = (c.from_pretrained(tiny_folder) for c in (AutoModelForCausalLM, AutoTokenizer))
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say one."}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    cut = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.01}
    rows = library.sample(model=tiny_folder, prompts="Say one.", system="Be brief.", count=3, max_tokens=8, **cut)
    for r in rows:
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *r["ids"]]])).logits[0, len(prompt) - 1 : -1] / 0.7
        logp = torch.log_softmax(logits, -1)
        chosen = logp[torch.arange(len(r["ids"])), torch.tensor(r["ids"])]
        torch.testing.assert_close(torch.tensor(r["logp"]), chosen, rtol=0, atol=2e-5)
        assert all(i in row.topk(20).indices for i, row in zip(r["ids"], logp, strict=True)), "top-k"
    said = ascent("sample", "--model", tiny_folder, "Say one.", "--greedy", "--max-tokens", 5, "--logp")
    (greedy,) = library.sample(model=tiny_folder, prompts="Say one.", greedy=True, max_tokens=5)
    listed = [line.split(maxsplit=2) for line in said.out.splitlines() if re.match(r"\s+-\d+\.\d{3}\s+\d+\s", line)]
    assert [int(i) for _, i, _ in listed] == greedy["ids"]
    assert [float(x) for x, _, _ in listed] == pytest.approx(greedy["logp"], abs=6e-4)
    assert [piece for *_, piece in listed] == [repr(tokenizer.decode([i])) for i in greedy["ids"]]


@pytest.mark.long
def test_one_allowed_token_is_the_greedy_one(tiny_folder: Path) -> None:
    ask = {"model": tiny_folder, "prompts": "Say one.", "max_tokens": 8}
    (greedy,) = library.sample(**ask, greedy=True)
    for cut in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 0.999}):
        assert library.sample(**ask, **cut)[0]["ids"] == greedy["ids"]
    assert library.sample(**ask, count=4)[-1]["ids"] != greedy["ids"]


@pytest.mark.long
def test_prompts_are_formatted_as_in_training_unless_plain(world: Path, tiny_folder: Path, tmp_path: Path) -> None:
    more = {"instruction": "Be quick.", "system": "You count.", "steps": 1}
    out = {"out": tmp_path / "run"}
    run = library.train(f"jsonl:{world}/train.jsonl", **settings_of(world, tiny_folder) | more | out)
    (asked,) = library.sample(run.folder, "Say one.", greedy=True)
    assert asked["prompt"] == "You count.\n\nSay one.\nBe quick."
    (plain,) = library.sample(run.folder, "Say one.", greedy=True, plain=True)
    assert plain["prompt"] == "You count.\n\nSay one."
    (other,) = library.sample(run.folder, "Say one.", greedy=True, system="You sing.")
    assert other["prompt"] == "You sing.\n\nSay one.\nBe quick."
    assert len({tuple(r["logp"]) for r in (asked, plain, other)}) == 3
    (trained,) = library.sample(run.folder, task="own", count=1, greedy=True)
    assert trained["ids"] == asked["ids"] and trained["prompt"] == asked["prompt"]


@pytest.mark.long
def test_problems_of_a_task_with_answer_score_and_reason(run: Run, world: Path, tiny_folder: Path, ascent: Any) -> None:
    said = ascent("sample", run.folder, "--task", "own", "--count", 5, "--greedy")
    assert said.status == 0 and said.out.count("prompt   Say") == 5 and said.out.count("answer   ") == 5
    assert said.out.count("score    wrong") + said.out.count("score    right") == 5
    flags = ("--task", f"jsonl:{world}/train.jsonl", "--test-file", world / "test.jsonl", "--max-tokens", LIMIT)
    said = ascent("sample", "--model", tiny_folder, *flags, "--count", 5, "--greedy")
    assert said.out.count("score    right, reward 1") == 3 and said.out.count("score    wrong, reward 0") == 2
    failing = ascent("sample", "--model", tiny_folder, *flags, "--reward", f"python:{world}/rewards.py:fails")
    assert failing.status == 0 and failing.out.count("score    the reward failed") == 4
    assert "I never work" in failing.out


def test_prompts_come_from_standard_input(tiny_folder: Path, ascent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Say one.\n\nSay two.\n"))
    rows = json.loads(ascent("sample", "--model", tiny_folder, "--max-tokens", 3, "--json").out)
    assert [r["prompt"] for r in rows] == ["Say one.", "Say two."]
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert ascent("sample", "--model", tiny_folder).status == 2


def test_small_task_takes_numbers_as_prompts(sorter: Run, ascent: Any) -> None:
    said = ascent("sample", sorter.folder, "7 3", "--greedy", "--logp")
    assert said.status == 0 and "prompt   [7 3]" in said.out
    (r,) = library.sample(sorter.folder, "[7, 3]", greedy=True)
    assert r["response"] == " ".join(map(str, r["ids"])) and len(r["logp"]) == 2
    assert r["reward"] == sum(a == b for a, b in zip(r["ids"], [3, 7], strict=True))
    assert f"reward {r['reward']:g}" in said.out
    for wrong in ("7", "7 3 1", "7 8", "7 -1", "seven three", ""):
        refused = ascent("sample", sorter.folder, wrong)
        assert refused.status == 2 and "2 numbers from 0 to 7" in refused.err


def test_control_characters_of_responses_are_escaped() -> None:
    assert printable("a\x1b[2Jb\x07\r\x9bc\n\td é") == "a\\x1b[2Jb\\x07\\r\\x9bc\n\td é"
    assert printable("a\u202eb\ud800c") == "a\\u202eb\\ud800c"


def test_control_characters_of_records_are_escaped(run: Run, ascent: Any, tmp_path: Path, capsys: Any) -> None:
    """This applies to `ascent show`, the display of a run, and errors that quote a response."""
    folder = Path(shutil.copytree(run.folder, tmp_path / "run"))
    rows = [row | {"response_text": "\x1b[2Jwiped", "prompt_text": "\x9b2J"} for row in run.rollouts(0)]
    write_parquet(folder / "rollouts" / "step_000000.parquet", rows, len(rows))
    event = {"step": 0, "event": "alert", "name": "odd", "text": "it said \x1b]0;title\x07"}
    (folder / "events.jsonl").write_text(json.dumps(event) + "\n")
    for args in (("--step", "0"), ()):
        said = ascent("show", folder, *args)
        assert said.status == 0 and "\\x1b" in said.out and not {"\x1b", "\x9b", "\x07"} & set(said.out)
    LineDisplay().show_message("the reward failed on \x1b[31m")
    assert exit_status(lambda: (_ for _ in ()).throw(RunError("the response \x1b[2J"))) == 1
    said = capsys.readouterr()
    assert "\x1b" not in said.err and said.err.count("\\x1b") == 2


# ---- export -----------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("which", ["run", "adapted"])
def test_an_exported_model_has_the_same_log_probs(
    which: str, request: pytest.FixtureRequest, tiny_folder: Path, ascent: Any
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run: Run = request.getfixturevalue(which)
    said = ascent("export", run.folder, "out")
    assert said.status == 0 and "Written: out" in said.out
    model, tokenizer = AutoModelForCausalLM.from_pretrained("out"), AutoTokenizer.from_pretrained("out")
    assert not any("lora" in name for name in model.state_dict())
    lm = run.policy
    assert isinstance(lm, LanguageModel)
    chat = [{"role": "user", "content": "Say one, two and three."}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert ids == lm.encode(chat) and tokenizer.eos_token_id == lm.eos_token_id
    with torch.no_grad():
        now, then = (torch.log_softmax(m(torch.tensor([ids])).logits, -1) for m in (model, lm.model))
        base = AutoModelForCausalLM.from_pretrained(tiny_folder)
        before = torch.log_softmax(base(torch.tensor([ids])).logits, -1)
    torch.testing.assert_close(now, then, rtol=0, atol=1e-6 if which == "run" else 2e-5)
    assert (now - before).abs().max() > 0.05, "training has moved it"
    asked = {"prompts": "Say one.", "greedy": True, "max_tokens": LIMIT}
    assert library.sample(model="out", **asked)[0]["ids"] == library.sample(run.folder, **asked)[0]["ids"]


def test_readme_names_the_origin_of_the_model(run: Run, adapted: Run, tiny_folder: Path, ascent: Any) -> None:
    assert ascent("export", run.folder, "out", "--step", 1).status == 0
    text = Path("out/README.md").read_text()
    for words in ("run: plain, step 1 of 2", "base model: tiny", "jsonl:train", "dr-grpo", "Maximize", r"{clip}(\rho"):
        assert words in text
    assert str(tiny_folder) not in text, "others do not see the folders of this machine"
    library.export(adapted.folder, "deep/er/lora")
    assert "LoRA of rank 4, merged" in Path("deep/er/lora/README.md").read_text()
    assert sorted(p.name for p in Path("deep/er").iterdir()) == ["lora"], "nothing is left aside"


def test_checkpoint_of_a_step_is_exported(run: Run, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    for step in (1, 2):
        folder = library.export(run.folder, tmp_path / f"step-{step}", step=step)
        saved = load_file(run.checkpoint(step) / "params.safetensors")
        now = load_file(folder / "model.safetensors")
        assert saved.keys() == now.keys() and all(torch.equal(saved[k], now[k]) for k in saved)


def test_export_is_atomic_and_never_overwrites(
    run: Run, ascent: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("full").mkdir()
    Path("full/mine").write_text("mine")
    said = ascent("export", run.folder, "full")
    assert said.status == 2 and "already there" in said.err
    assert [p.name for p in Path("full").iterdir()] == ["mine"]
    Path("empty").mkdir()
    assert ascent("export", run.folder, "empty").status == 0 and Path("empty/config.json").exists()

    def breaks(self: LanguageModel, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LanguageModel, "save", breaks)
    said = ascent("export", run.folder, "broken")
    assert said.status == 2 and "No space left" in said.err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "full"]


# ---- bad input --------------------------------------------------------------------------------------

BAD: dict[str, tuple[tuple[Any, ...], tuple[str, ...]]] = {
    "eval nothing": (("eval",), ("RUN|TASK is missing", "--model")),
    "eval nowhere": (("eval", "nowhere"), ("nowhere: there is no such folder",)),
    "eval what is no run": (("eval", "full"), ("full", "not a run")),
    "eval a task alone": (("eval", "gsm8k"), ("gsm8k is a task", "ascent eval gsm8k --model FOLDER")),
    "a model on a small world": (("eval", "sort", "--model", "MODEL"), ("sort", "not a text task")),
    "a model on a run": (("eval", "RUN", "--model", "MODEL"), ("RUN is a folder", "a run has its own model")),
    "a run as a model": (("sample", "--model", "RUN", "hello"), ("this is a run",)),
    "no such model": (("sample", "--model", "./nowhere", "hello"), ("--model ./nowhere", "cannot be loaded")),
    "a step that is not there": (("eval", "RUN", "--step", 7), ("--step 7", "steps 1, 2")),
    "a step and the best": (("eval", "RUN", "--step", 1, "--best"), ("--step 1 and --best",)),
    "a step of a bare model": (("sample", "--model", "MODEL", "x", "--best"), ("--best", "no checkpoints")),
    "no samples": (("eval", "RUN", "--samples", 0), ("--samples is 0", "at least 1")),
    "no prompts": (("eval", "RUN", "--prompts", 0), ("--prompts is 0", "at least 1")),
    "a temperature of 0": (("eval", "RUN", "--temperature", 0), ("--temperature is 0",)),
    "too many tokens": (("eval", "RUN", "--max-tokens", 5000), ("--max-tokens 5000", "4096 positions")),
    "no tokens": (("eval", "RUN", "--max-tokens", 0), ("--max-tokens is 0",)),
    "a flag of training": (("eval", "jsonl:x", "--model", "MODEL", "--steps", 3), ("--steps", "no such flag")),
    "no such flag": (("eval", "RUN", "--smaples", 3), ("--smaples",)),
    "a file that is there": (("eval", "RUN", "--out", "file"), ("--out file", "already there")),
    "a file in no folder": (("eval", "RUN", "--out", "no/file"), ("--out no/file", "no folder no")),
    "a limit for sort": (("eval", "SORT", "--max-tokens", 3), ("--max-tokens", "sort")),
    "another world": (("eval", "SORT", "--task", "countdown"), ("--task countdown", "is a text task")),
    "a task and a model": (("eval", "jsonl:x", "--model", "MODEL", "--task", "sort"), ("--task sort with --model",)),
    "sample nothing": (("sample",), ("is missing: ascent sample RUN",)),
    "greedy many times": (("sample", "RUN", "x", "--greedy", "--count", 2), ("--greedy", "all equal")),
    "a mass above 1": (("sample", "RUN", "x", "--top-p", 1.5), ("--top-p 1.5",)),
    "top-k for sort": (("sample", "SORT", "1 2", "--top-k", 3), ("--top-k", "sort")),
    "export nothing": (("export",), ("RUN",)),
    "export a small world": (("export", "SORT", "out"), ("small policy", "ascent.load", "params.safetensors")),
    "export onto a file": (("export", "RUN", "file"), ("file", "already there")),
    "export under a file": (("export", "RUN", "file/out"), ("file/out", "cannot write")),
    "export no step": (("export", "RUN", "out", "--step", 9), ("--step 9", "steps 1, 2")),
}


@pytest.mark.parametrize("what", BAD)
def test_invalid_input_is_one_clear_error(
    what: str, ascent: Any, run: Run, sorter: Run, world: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    args, words = BAD[what]
    places = {"RUN": run.folder, "SORT": sorter.folder, "MODEL": tiny_folder, "jsonl:x": f"jsonl:{world}/train.jsonl"}
    Path("file").write_text("")
    Path("full").mkdir()
    said = ascent(*(places.get(arg, arg) for arg in args))
    assert said.status == 2, said.text
    assert said.out == "" and "Traceback" not in said.err
    missing = [w for w in (str(w).replace("RUN is", f"{run.folder} is") for w in words) if w not in said.text]
    assert missing == [], said.text
    assert sorted(p.name for p in Path().rglob("*")) == ["file", "full"]


@pytest.mark.long
def test_corrupt_checkpoint_is_rejected(run: Run, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(run.folder, copy)
    path = Run(copy).checkpoint(2) / "params.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    for use in (lambda: library.evaluate(copy, show=False), lambda: library.export(copy, tmp_path / "out")):
        with pytest.raises(ConfigError, match="checksum"):
            use()
    assert library.evaluate(copy, step=1, show=False).about["step"] == 1


@pytest.mark.long
def test_best_checkpoint_needs_keep_best(tmp_path: Path) -> None:
    few = {"steps": 4, "eval_every": 1, "checkpoint_every": 4, "keep": 1, "lr": 1e-9, "show": False}
    kept = library.train("lecture", out=tmp_path / "kept", keep_best=True, **few)
    assert [p.name for p in kept.checkpoints] == ["step_000001", "step_000004"]
    assert library.evaluate(kept.folder, best=True, show=False).about["step"] == 1
    assert library.evaluate(kept.folder, show=False).about["step"] == 4
    run = library.train("lecture", out=tmp_path / "run", **few)
    assert run.metrics[0]["eval/accuracy"] == run.metrics[-1]["eval/accuracy"], "so that the first is the best"
    with pytest.raises(ConfigError, match=r"--best.*step 1.*--keep-best.*steps 4"):
        run.checkpoint(best=True)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({}, "set either a run or a model"),
        ({"run": "RUN", "model": "MODEL"}, "set either a run or a model"),
        (
            {"run": "RUN", "options": "{}", "check": "exact"},
            "options, check: these are settings of a task",
        ),
        ({"run": "SORT", "prompts": []}, "no prompts: pass at least one"),
        ({"run": "SORT", "prompts": "1 2", "count": -1}, "--count is -1"),
    ],
)
def test_impossible_sampling_is_rejected(arguments: dict[str, Any], why: str, sorter: Run) -> None:
    found = {name: sorter.folder if value == "SORT" else value for name, value in arguments.items()}
    with pytest.raises(ConfigError, match=why):
        library.sample(**found)


@pytest.mark.long
def test_a_small_run_is_evaluated_on_another_reward(sorter: Run, ascent: Any) -> None:
    own = json.loads(ascent("eval", sorter.folder, "--json").out)["results"]["greedy"]
    task = ("--task", "sort", "--length", 2, "--numbers", 8)
    exact = json.loads(ascent("eval", sorter.folder, *task, "--reward", "exact", "--json").out)["results"]["greedy"]
    assert exact["reward"]["value"] == exact["strict"]["value"] == own["strict"]["value"] < own["reward"]["value"]
    said = ascent("eval", sorter.folder, "--task", "sort", "--length", 3, "--numbers", 8)
    assert said.status == 2 and "--task sort: its prompts or responses have other shapes" in said.err


@pytest.mark.parametrize("error", [MemoryError("no room"), torch.OutOfMemoryError("no room")])
def test_out_of_memory_error_says_what_to_lower(error: Exception, sorter: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def generate(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("ascent.rollout.small_policy_engine.SmallPolicyEngine.generate", generate)
    with pytest.raises(RunError, match=r"out of memory: lower --rows or --max-tokens \(no room\)"):
        library.evaluate(sorter.folder, show=False)


def conversation_row(*turns: tuple[str, float | None]) -> dict[str, Any]:
    """A response with these turns of the policy (note and seconds of waiting), and an answer to each."""
    blank = {"turn": 1, "text": "x", "tokens": 1}
    said = [blank | {"role": "policy", "note": note, "seconds": seconds} for note, seconds in turns]
    heard = [blank | {"role": "tool", "note": "calls=1", "seconds": 9.0}] * len(turns)
    return {"truncated": False, "length": 3, "turns": [one for pair in zip(said, heard, strict=True) for one in pair]}


def test_turns_calls_and_waiting_are_counted_by_hand() -> None:
    """Three turns of two responses; 0.5 s and 1.5 s of waiting; two calls and one more that does not parse."""
    rows = [conversation_row(("calls=2", 0.5), ("", None)), conversation_row(("calls=1 unparsed=1", 1.5))]
    found = Evaluation({}, rows, [], {}, 0.0).length_statistics()
    assert found == {
        "responses": 2, "truncated": 0.0, "mean_length": 3.0, "mean_turns": 1.5, "mean_waited": 1.0,
        "calls": {"calls": 3, "unparsed": 1},
    }  # fmt: skip
    silent = Evaluation({}, [conversation_row(("", 0.0))], [], {}, 0.0).length_statistics()
    assert silent["mean_turns"] == 1 and silent["mean_waited"] == 0 and "calls" not in silent


@pytest.mark.parametrize(
    ("turns", "words"),
    [
        ((("calls=2", 0.5),), "1.00 turns per response, 0.5 s of waiting. 2 calls of tools in all."),
        ((("", 0.001), ("", 0.001)), "2.00 turns per response."),
    ],
)
def test_text_of_an_evaluation_of_conversations(turns: tuple[Any, ...], words: str) -> None:
    about = {"model": "m", "run": None, "task": "t", "prompts": 1, "samples": 1, "ends": True}
    row = conversation_row(*turns) | {"prompt": "p", "response": "r", "valid": True, "reward": 1.0, "ended": "done"}
    text = Evaluation(about, [row], [], {}, 0.0).text()
    assert words in text.splitlines() and "The first response:" in text


def test_text_of_an_evaluation(run: Run) -> None:
    found = library.evaluate(run.folder, show=False)
    assert isinstance(found, Evaluation)
    head, _, columns, greedy, *_ = found.text().splitlines()
    assert head == f"{run.folder}, step 2: jsonl:train, 5 held-out prompts"
    assert columns.split() == ["strict", "lenient", "reward"] and greedy.startswith("greedy")
    assert "mean score" not in found.text(), "one sample is the greedy one"


def test_remote_code_of_models_is_never_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no question whether it may be executed, either."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question that `yes |` could answer"))
    folder, ran = tmp_path / "model", tmp_path / "ran"
    folder.mkdir()
    classes = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil", "AutoTokenizer": ["evil.Evil", None]}
    (folder / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": classes}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": classes}))
    (folder / "evil.py").write_text(f"open({str(ran)!r}, 'w')\n\n\nclass Evil:\n    pass\n")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        CausalLM(model=str(folder)).load()
    assert not ran.exists()
