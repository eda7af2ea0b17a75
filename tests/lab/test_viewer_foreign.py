"""Runs of TRL and verl: what TRL really writes, what verl's files look like, and files that are broken."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from ascent.core.errors import ConfigError
from ascent.lab.pages.completions.completions import all_prompts, completions_page, key_of, prompt_history, tokens
from ascent.runs import foreign_runs
from ascent.runs import rollout_files as recorded

# ---- TRL ------------------------------------------------------------------------------------------------

PROMPTS = ["ab", "ab", "cd"]
"""One is drawn twice in a row: two groups, which the files do not tell apart."""
STEPS, SAMPLES = 3, 4


def vowels(completions: list[Any], log_extra: Any = None, **_: Any) -> list[float]:
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    if log_extra is not None:
        log_extra("first", [text[:1] for text in texts])
    return [sum(text.count(v) for v in "aeiou") / 4 for text in texts]


def short(completions: list[Any], **_: Any) -> list[float | None]:
    """None, where it has nothing to say."""
    lengths = [len(c if isinstance(c, str) else c[0]["content"]) for c in completions]
    return [None if n % 5 == 0 else n / 100 for n in lengths]


@pytest.fixture(scope="module")
def trained(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of TRL's own GRPO with `log_completions`."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    out = tmp_path_factory.mktemp("trl") / "out"
    args = GRPOConfig(
        output_dir=str(out),
        **{"use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True},
        **{"log_completions": True, "logging_steps": 1, "max_steps": STEPS, "save_steps": STEPS},
        **{"per_device_train_batch_size": len(PROMPTS) * SAMPLES, "num_generations": SAMPLES},
        **{"max_completion_length": 8, "learning_rate": 1e-2, "seed": 1, "shuffle_dataset": False},
    )
    rows = [{"prompt": prompt} for prompt in PROMPTS * STEPS]
    trainer = GRPOTrainer(
        model=str(tiny_folder), reward_funcs=[vowels, short], args=args, train_dataset=Dataset.from_list(rows)
    )
    trainer.train()
    return out


@pytest.mark.slow
def test_what_trl_wrote(trained: Path) -> None:
    """Its own log and its own files are the two sides."""
    assert foreign_runs.foreign_kind(trained) == "trl"
    assert list(foreign_runs.find_reader(trained)[1]) == recorded.recorded_steps(trained, "trl") == [1, 2, 3]
    lines, problems = foreign_runs.foreign_lines(trained)
    assert problems == [] and [line["step"] for line in lines] == [1, 2, 3]
    history = json.loads((trained / "checkpoint-3" / "trainer_state.json").read_text())["log_history"]
    for line, logged in zip(lines, history, strict=False):
        rows = foreign_runs.foreign_rows(trained, line["step"])
        assert len(rows) == len(PROMPTS) * SAMPLES == line["num_responses"]
        assert [(r["group"], r["sample"]) for r in rows] == [(g, s) for g in range(3) for s in range(SAMPLES)]
        assert [r["prompt_text"] for r in rows] == [prompt for prompt in PROMPTS for _ in range(SAMPLES)]
        rewards = [r["reward"] for r in rows]
        assert statistics.fmean(rewards) == pytest.approx(logged["reward"], abs=1e-6)
        assert statistics.stdev(rewards) == pytest.approx(logged["reward_std"], abs=1e-6)
        for r in rows:
            vowel, brief = vowels([r["response_text"]])[0], short([r["response_text"]])[0]
            assert r["parts"]["vowels"] == vowel and set(r["parts"]) == {"vowels", "short"}
            assert math.isnan(r["parts"]["short"]) if brief is None else r["parts"]["short"] == pytest.approx(brief)
            assert r["extra"] == {"first": r["response_text"][:1]}, "what a reward function logged is no reward"
        ours = ("reward", "frac_reward_zero_std", "completions/mean_length", "entropy", "clip_ratio/low_mean", "loss")
        assert {k: line[k] for k in ours} == {k: logged[k] for k in ours}
        assert line["time/step"] == logged["step_time"] and "num_tokens" not in line
        assert line["rewards/vowels/mean"] == logged["rewards/vowels/mean"]
    for path in (trained / "checkpoint-3").glob("trainer_state.json"):
        path.rename(path.with_name("hidden.json"))
    try:
        alone, _ = foreign_runs.foreign_lines(trained)
        for line, logged in zip(alone, history, strict=False):
            for key in ("reward", "reward_std", "frac_reward_zero_std", "rewards/vowels/mean", "rewards/short/mean"):
                assert line[key] == pytest.approx(logged[key], abs=1e-6), "the rows alone say the same"
            assert "completions/mean_length" not in line and line["completions/mean_characters"] > 1
    finally:
        (trained / "checkpoint-3" / "hidden.json").rename(trained / "checkpoint-3" / "trainer_state.json")


@pytest.mark.slow
def test_completions_of_trl_are_shown_as_ours(trained: Path) -> None:
    page = completions_page(trained, "trl", 2)
    assert len(page["groups"]) == 3 and page["shares"]["right"] is None
    assert list(page["groups"][0]["responses"][0]["parts"]) == ["vowels", "short"]
    first = page["groups"][0]["responses"]
    assert first[0]["reward"] == max(r["reward"] for r in first) and first[0]["length"] is None
    assert all(isinstance(r["advantage"], float) for r in first)
    assert tokens(trained, "trl", 2, [0])["missing"]["tokens"]
    found = prompt_history(trained, "trl", key_of("ab"))
    assert [s["step"] for s in found["steps"]] == [1, 2, 3] and found["prompt"] == "ab"
    assert len(all_prompts(trained, "trl")["prompts"]) == 2


# ---- TRL's format by hand -------------------------------------------------------------------------------


def write_trl(folder: Path, step: int, columns: dict[str, list[Any]]) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = folder / "completions" / f"completions_{step:05d}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"step": [step] * len(columns["prompt"]), **columns}), path)
    return path


def said(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in pairs]


def test_messages_unscored_completions_and_weights(tmp_path: Path) -> None:
    asked = [said(("system", "Be brief."), ("user", "2 + 2?"))] * 2 + [said(("user", "3 + 3?"))] * 2
    answers = [said(("assistant", text)) for text in ("4", "", "6", "<b>6</b>")]
    rewards = {"right": [1.0, math.nan, 1.0, 0.5], "format": [0.5, math.nan, 0.0, None]}
    write_trl(tmp_path, 5, {"prompt": asked, "completion": answers, **rewards, "advantage": [0.7, 0.0, 0.7, -0.7]})
    first, second, third, fourth = foreign_runs.foreign_rows(tmp_path, 5)
    assert first["prompt_text"] == "system: Be brief.\nuser: 2 + 2?" and first["response_text"] == "4"
    assert third["prompt_text"] == "3 + 3?" and (third["group"], third["sample"]) == (1, 0)
    assert (second["valid"], second["reward"]) == (False, None) and "no reward function" in second["reason"]
    assert fourth["reward"] == 0.5 and fourth["response_text"] == "<b>6</b>"
    page = completions_page(tmp_path, "trl")
    assert page["groups"][0]["responses"][1]["status"] == "failed" and page["groups"][0]["mean"] == 1.5
    (line,), problems = foreign_runs.foreign_lines(tmp_path)
    assert problems == [] and (line["reward"], line["reward_errors"]) == (1.0, 1)
    state = {
        "log_history": [{"step": 5, "reward": 2.0, "kl": math.nan, "rewards/right/mean": 0.8, "rewards/format/mean": 0}]
    }
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    (line,), problems = foreign_runs.foreign_lines(tmp_path)
    assert line["reward"] == 2.0 and "weighted" in problems[0]
    assert line["kl"] is None and line["nonfinite"] == {"kl": "nan"}


def test_a_log_without_completions_and_steps_without_a_log(tmp_path: Path) -> None:
    write_trl(tmp_path, 10, {"prompt": ["a"], "completion": ["b"], "f": [1.0], "advantage": [0.0]})
    kept = tmp_path / "checkpoint-20" / "trainer_state.json"
    kept.parent.mkdir()
    kept.write_text(json.dumps({"log_history": [{"step": 20, "loss": 0.5}, {"step": 20, "train_runtime": 3.0}]}))
    (tmp_path / "checkpoint-9").mkdir()
    (tmp_path / "checkpoint-9" / "trainer_state.json").write_text("older, and broken")
    lines, problems = foreign_runs.foreign_lines(tmp_path)
    assert [line["step"] for line in lines] == [10, 20] and problems == []
    assert lines[1] == {"step": 20, "loss": 0.5, "train_runtime": 3.0}
    before = foreign_runs.fingerprint(tmp_path)
    kept.write_text("{")
    lines, problems = foreign_runs.foreign_lines(tmp_path)
    assert [line["step"] for line in lines] == [10] and len(problems) == 2 and "checkpoint-20" in problems[0]
    assert foreign_runs.fingerprint(tmp_path) != before and kept in foreign_runs.foreign_files(tmp_path)


def test_broken_parquet_is_one_line(tmp_path: Path) -> None:
    path = write_trl(tmp_path, 1, {"prompt": ["a"], "completion": ["b"], "f": [1.0], "advantage": [0.0]})
    other = write_trl(tmp_path, 2, {"prompt": ["a"], "completion": ["b"], "f": [1.0], "advantage": [0.0]})
    path.write_bytes(path.read_bytes()[:-40])
    assert foreign_runs.foreign_kind(tmp_path) == "trl", "its newest file can be read"
    lines, problems = foreign_runs.foreign_lines(tmp_path)
    assert [line["step"] for line in lines] == [2] and problems == [problems[0]]
    assert problems[0].startswith("completions_00001.parquet is not a whole Parquet file") and "\n" not in problems[0]
    assert "not a whole Parquet" in completions_page(tmp_path, "trl", 1)["problems"][0]
    other.write_bytes(b"")
    assert foreign_runs.foreign_kind(tmp_path) == "trl" and len(foreign_runs.foreign_lines(tmp_path)[1]) == 2


def test_trl_without_a_reward_column_and_with_odd_ones(tmp_path: Path) -> None:
    write_trl(tmp_path, 1, {"prompt": ["a", "a"], "completion": ["b", "c"]})
    write_trl(
        tmp_path, 2, {"prompt": [1, None], "completion": [b"\xff", b"x"], "f": ["x", "y"], "advantage": ["u", "v"]}
    )
    write_trl(tmp_path, 3, {"prompt": [], "completion": []})
    lines, problems = foreign_runs.foreign_lines(tmp_path)
    assert problems == [] and [line["reward_errors"] for line in lines] == [0, 0, 0] and "reward" not in lines[0]
    for step in (1, 2, 3):
        page = completions_page(tmp_path, "trl", step)
        assert page["problems"] == [] and all(r["reward"] is None for g in page["groups"] for r in g["responses"])
    foreign_runs.foreign_events(tmp_path)


def test_no_completions_are_read_through_a_link(tmp_path: Path) -> None:
    path = write_trl(tmp_path / "other", 1, {"prompt": ["a"], "completion": ["SECRET"], "f": [1.0], "advantage": [0.0]})
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "completions").symlink_to(path.parent)
    assert foreign_runs.foreign_kind(tmp_path / "folder") is None
    (tmp_path / "file").mkdir()
    (tmp_path / "file" / path.name).symlink_to(path)
    assert foreign_runs.foreign_lines(tmp_path / "file") == (
        [],
        ["completions_00001.parquet cannot be read: completions_00001.parquet is a link, and links are not followed"],
    )


# ---- verl -----------------------------------------------------------------------------------------------


def write_verl(folder: Path, step: int, lines: list[dict[str, Any]]) -> Path:
    """As verl's `_dump_generations` does: one JSON object a line, text not escaped."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{step}.jsonl"
    path.write_text("\n".join(json.dumps(line | {"step": step}, ensure_ascii=False) for line in lines) + "\n")
    return path


def answer(prompt: str, output: str, score: float, **more: Any) -> dict[str, Any]:
    return {"input": prompt, "output": output, "gts": "4", "score": score} | more


def test_verl(tmp_path: Path) -> None:
    """Lines are in any order: batches are balanced over the workers."""
    write_verl(
        tmp_path,
        7,
        [
            answer("2 + 2?", "4 é\u2028", 1.0, acc=True, pred="4", request_id="x", format=0.5),
            answer("1 + 3?", "5", 0.0, acc=False, pred=None, request_id="y", format=0.0),
            answer("2 + 2?", "5", 0.0, acc=0.0, pred="5", request_id="z", format=1.0),
            answer("1 + 3?", "6", math.nan, acc=False, pred="6", request_id="w", format=0.0),
        ],
    )
    write_verl(tmp_path, 10, [answer("2 + 2?", "4", 1.0)])
    assert foreign_runs.foreign_kind(tmp_path) == "verl" and list(foreign_runs.find_reader(tmp_path)[1]) == [7, 10]
    rows = foreign_runs.foreign_rows(tmp_path, 7)
    assert [(r["group"], r["sample"], r["response_text"]) for r in rows] == [
        (0, 0, "4 é\u2028"),
        *((0, 1, "5"), (1, 0, "5"), (1, 1, "6")),
    ]
    assert rows[0]["correct"] is True and rows[1]["correct"] is False and rows[0]["answer"] == "4"
    assert rows[0]["parts"] == {"format": 0.5} and rows[0]["extra"] == {"pred": "4"}
    assert rows[3]["valid"] is False and rows[3]["reward"] is None
    first, last = foreign_runs.foreign_lines(tmp_path)[0]
    assert (first["reward"], first["accuracy"], first["reward_errors"]) == (
        pytest.approx(1 / 3),
        pytest.approx(1 / 3),
        1,
    )
    assert (first["frac_reward_zero_std"], first["frac_all_wrong"], first["frac_all_right"]) == (0.5, 0.5, 0.0)
    assert "completions/mean_length" not in first and first["completions/mean_characters"] == 1.75
    assert "accuracy" not in last and last["reward_std"] == 0.0
    page = completions_page(tmp_path, "verl", 7)
    assert page["groups"][0]["answer"] == "4" and page["groups"][0]["kind"] == "mixed"
    assert list(page["groups"][0]["responses"][0]["parts"]) == ["format"]
    assert [s["step"] for s in prompt_history(tmp_path, "verl", key_of("2 + 2?"))["steps"]] == [7, 10]


def test_flags_are_looked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(1, 4):
        write_verl(tmp_path, step, [answer(f"prompt {p} of {step}", "the same", 1.0, acc=0) for p in range(16)])
    found = foreign_runs.foreign_events(tmp_path)
    assert [event["event"] for event in found] == ["alert"] * len(found) != []
    assert found[0]["evidence"]["rollouts"]["step"] in (1, 2, 3)
    monkeypatch.setattr(foreign_runs, "foreign_lines", lambda _: pytest.fail("read again, though nothing has changed"))
    assert foreign_runs.foreign_events(tmp_path) == found


def test_verl_torn_and_broken(tmp_path: Path) -> None:
    path = write_verl(tmp_path, 1, [answer("a", "b", 1.0), answer("a", "c", 0.0)])
    path.write_text(path.read_text() + '{"input": "a", "outp')
    assert len(foreign_runs.foreign_rows(tmp_path, 1)) == 2, "a last line without its end is still being written"
    write_verl(tmp_path, 2, [answer("a", "b", 1.0)]).write_text("no JSON\n")
    write_verl(tmp_path, 3, [{"other": 1}])
    lines, problems = foreign_runs.foreign_lines(tmp_path)
    assert [line["step"] for line in lines] == [1]
    assert problems == [
        "2.jsonl, line 1, is not JSON",
        "3.jsonl, line 1, has no input, output, score: these are not verl's rollouts",
    ]


def test_folders_that_are_nobodys(tmp_path: Path) -> None:
    for name in ("empty", "text", "other", "wrong", "list"):
        (tmp_path / name).mkdir()
    (tmp_path / "text" / "1.jsonl").write_text("hello\n")
    (tmp_path / "list" / "1.jsonl").write_text("[1]\n")
    (tmp_path / "other" / "1.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    write_trl(tmp_path / "wrong", 1, {"prompt": ["a"], "text": ["b"]})
    for folder in tmp_path.iterdir():
        assert foreign_runs.foreign_kind(folder) is None, folder.name
        with pytest.raises(ConfigError, match="there are no completions"):
            foreign_runs.foreign_rows(folder, 1)
    assert foreign_runs.foreign_kind(tmp_path / "missing") is None
