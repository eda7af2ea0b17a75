"""Completions without a browser: groups, filters, tokens and their clips, one prompt over the steps, broken files."""

from __future__ import annotations

import json
import math
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient
from viewed import row, write_run, write_step

import ascent
from ascent.core.errors import ConfigError
from ascent.lab import server
from ascent.lab.pages.completions import completions
from ascent.lab.pages.completions.completions import (
    all_prompts,
    completions_page,
    key_of,
    loss_of,
    of_row,
    prompt_history,
    tokens,
)
from ascent.runs import rollout_files as recorded
from ascent.runs.untrusted_files import FileCache

SOME = [
    row(0, 0, 0.0, "no idea", truncated=True),
    row(0, 1, 1.0, "the answer is 4"),
    row(0, 2, 0.5, "Perhaps FOUR ?", correct=False),
    row(1, 0, 0.0, "nothing"),
    row(1, 1, 0.0, "nothing", status="failed", valid=False, reason="the checker timed out"),
    row(2, 0, 1.0, "four", prompt_text="What is 2 + 2?"),
    row(2, 1, 1.0, "4", prompt_text="What is 2 + 2?"),
]


@pytest.fixture
def some(tmp_path: Path) -> Path:
    return write_run(tmp_path / "some", {3: SOME, 10: SOME[:3]})


# ---- groups ---------------------------------------------------------------------------------------------


def samples(page: dict[str, Any]) -> list[list[int]]:
    return [[r["sample"] for r in group["responses"]] for group in page["groups"]]


def test_groups_have_their_numbers_and_are_sorted(some: Path) -> None:
    page = completions_page(some, step=3)
    assert (page["step"], page["previous"], page["next"], page["recorded"]) == (3, None, 10, [3, 10])
    first, second, third = page["groups"]
    assert samples(page) == [[1, 2, 0], [0, 1], [0, 1]]
    assert (first["mean"], first["std"], first["low"], first["high"]) == (0.5, 0.5, 0.0, 1.0)
    assert [g["kind"] for g in page["groups"]] == ["mixed", "all wrong", "all right"]
    assert (first["right"], first["of"], second["failed"]) == (1, 3, 1)
    failed = second["responses"][1]
    assert (failed["status"], failed["reward"], failed["reason"]) == ("failed", None, "the checker timed out")
    assert first["responses"][0]["length"] == 4 and first["responses"][0]["advantage"] == 0.5
    assert third["key"] == key_of("What is 2 + 2?") != first["key"]
    assert page["shares"] == {"all": 7, "right": 3, "wrong": 3, "truncated": 1, "failed": 1, "mixed": 1, "groups": 3}
    assert completions_page(some)["step"] == 10, "the newest, if not told"
    assert completions_page(some, step=4)["step"] == 3 and completions_page(some, step=4)["asked"] == 4


@pytest.mark.parametrize(
    ("sort", "expected"),
    [("reward", [1, 2, 0]), ("advantage", [1, 2, 0]), ("length", [1, 2, 0]), ("sample", [0, 1, 2])],
)
def test_orders(some: Path, sort: str, expected: list[int]) -> None:
    assert samples(completions_page(some, step=10, sort=sort)) == [expected]


@pytest.mark.parametrize(
    ("show", "q", "expected"),
    [
        ("right", "", {0: [1], 2: [0, 1]}),
        ("wrong", "", {0: [2, 0], 1: [0]}),
        ("truncated", "", {0: [0]}),
        ("failed", "", {1: [1]}),
        ("mixed", "", {0: [1, 2, 0]}),
        ("all", "four", {0: [2], 2: [0]}),
        ("all", "WHAT IS 2 +", {2: [0, 1]}),
        ("right", "four", {2: [0]}),
        ("all", "nowhere", {}),
    ],
)
def test_filters_and_search(some: Path, show: str, q: str, expected: dict[int, list[int]]) -> None:
    page = completions_page(some, step=3, show=show, q=q)
    assert {g["group"]: [r["sample"] for r in g["responses"]] for g in page["groups"]} == expected
    assert page["responses"] == sum(map(len, expected.values())) and page["total"] == len(expected)
    assert all(g["size"] >= g["shown"] for g in page["groups"])


def test_pages_of_groups(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", {0: [row(g, s, float(s)) for g in range(21) for s in range(2)]})
    assert [g["group"] for g in completions_page(run)["groups"]] == list(range(8))
    assert [g["group"] for g in completions_page(run, offset=16)["groups"]] == list(range(16, 21))
    assert completions_page(run, offset=999)["offset"] == 16, "the last page, not an empty one"
    assert len(completions_page(run, count=10_000)["groups"]) == 21


def test_without_a_strict_score_nobody_is_right_or_wrong(tmp_path: Path) -> None:
    rows = [{k: v for k, v in r.items() if k not in ("correct", "truncated", "status")} for r in SOME]
    page = completions_page(write_run(tmp_path / "r", {0: rows}))
    assert page["shares"]["right"] is page["shares"]["wrong"] is page["shares"]["truncated"] is None
    assert [g["kind"] for g in page["groups"]] == ["mixed", "equal", "equal"] and page["shares"]["mixed"] == 1
    assert page["shares"]["failed"] == 1, "older files say it by `valid`"


def test_components_are_columns_of_their_own(tmp_path: Path) -> None:
    rows = [r | {"format": 0.25 * i, "brevity": math.nan} for i, r in enumerate(SOME)]
    page = completions_page(write_run(tmp_path / "r", {0: rows}), sort="sample")
    assert list(page["groups"][0]["responses"][0]["parts"]) == ["format", "brevity"]
    assert page["groups"][0]["responses"][1]["parts"] == {"format": 0.25, "brevity": "nan"}


def test_numbers_that_are_not_finite_and_empty_responses(tmp_path: Path) -> None:
    rows = [row(0, 0, math.nan, "a b"), row(0, 1, math.inf, ""), row(0, 2, 1.0, "c", advantage=[math.nan])]
    rows[0]["logp_old"], rows[0]["entropy"] = [-1.0, math.nan], [None, math.inf]
    run = write_run(tmp_path / "r", {0: rows})
    page = completions_page(run)
    assert json.loads(json.dumps(page, allow_nan=False)) == page
    assert [(r["sample"], r["reward"]) for r in page["groups"][0]["responses"]] == [(2, 1.0), (0, "nan"), (1, "inf")]
    assert page["groups"][0]["mean"] == 1.0, "of those that are numbers"
    found = tokens(run, "ascent", 0, [0])
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    first, empty, third = found["rows"]
    assert first["logp"] == [-1.0, "nan"] and first["ratio"][1] == "nan" and first["entropy"] == ["nan", "inf"]
    assert empty["pieces"] == empty["ratio"] == [] and third["advantage"] == ["nan"] and third["clipped"] == [None]


# ---- files that are not as they should be ---------------------------------------------------------------


def test_a_torn_file_a_missing_one_and_one_of_somebody_else(some: Path, tmp_path: Path) -> None:
    path = recorded.rollout_path(some, 3)
    path.write_bytes(path.read_bytes()[:-500])
    page = completions_page(some, step=3)
    assert page["groups"] == [] and "step_000003.parquet is not a whole Parquet file" in page["problems"][0]
    assert (page["step"], page["next"], page["recorded"]) == (3, 10, [3, 10]), "one can go on to the next"
    with pytest.raises(ConfigError, match="not a whole Parquet file"):
        tokens(some, "ascent", 3, [0])
    with pytest.raises(ConfigError, match="step 4: nothing was recorded"):
        tokens(some, "ascent", 4, [0])
    found = prompt_history(some, "ascent", key_of("prompt 0"))
    assert [s["step"] for s in found["steps"]] == [10] and "step_000003" in found["problems"][0]
    write_step(some, 3, [{"group": 1, "text": "x"}])
    assert "has no column sample" in completions_page(some, step=3)["problems"][0]
    shutil.rmtree(some / "rollouts")
    assert "No responses were recorded" in completions_page(some)["problems"][0]
    with pytest.raises(ConfigError, match="in none of the recorded steps"):
        prompt_history(some, "ascent", "0" * 16)


def test_a_step_whose_file_is_torn_after_its_prompts_were_read_is_left_out_of_a_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def torn(folder: Path, kind: str, step: int, *more: Any) -> Any:
        if step == 1:
            raise ConfigError("step_000001 is torn")
        return summary(folder, kind, step, *more)

    summary = completions._summary
    monkeypatch.setattr(completions, "_summary", torn)
    folder = write_run(tmp_path / "run", {0: [row(0, 0, 1.0, "a")], 1: [row(0, 0, 0.0, "b")]})
    found = prompt_history(folder, "ascent", key_of("prompt 0"))
    assert [step["step"] for step in found["steps"]] == [0]
    assert (found["found"], found["left_out"], len(found["problems"])) == (2, 1, 1)
    assert "step_000001 is torn" in found["problems"][0]


def test_a_file_that_changes_is_read_again(some: Path) -> None:
    assert completions_page(some)["shares"]["all"] == 3
    write_step(some, 10, SOME)
    assert completions_page(some)["shares"]["all"] == 7


@pytest.mark.parametrize("wrong", [{"sort": "luck"}, {"show": "some"}, {"q": "x" * 1001}])
def test_what_cannot_be_asked(some: Path, wrong: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        completions_page(some, **wrong)  # type: ignore[arg-type]


# ---- tokens ---------------------------------------------------------------------------------------------

LOGP = [-1.0, -0.7, -1.3, -1.1]
"""At the last update; logp_old is −1: ρ = 1, 1.3499, 0.7408, 0.9048."""


@pytest.mark.parametrize(
    ("loss", "advantage", "expected"),
    [
        ({"name": "clipped", "low": 0.2, "high": 0.2, "dual": None}, [0.5], [None, "high", None, None]),
        ({"name": "clipped", "low": 0.2, "high": 0.2, "dual": None}, [-0.5], [None, None, "low", None]),
        ({"name": "clipped", "low": 0.2, "high": 0.4, "dual": None}, [0.5], [None, None, None, None]),
        ({"name": "clipped", "low": 0.2, "high": 0.2, "dual": 1.3}, [-0.5], [None, "dual", "low", None]),
        ({"name": "clipped", "low": 0.2, "high": 0.2, "dual": None}, [0.5, -0.5, -0.5, 0.5], [None, None, "low", None]),
        ({"name": "cispo", "low": 0.2, "high": 0.3}, [0.5], [None, "high", "low", None]),
        # the mean log-ratio is −0.025: 0.9753 < 1 − 0.02
        ({"name": "sequence-ratio", "form": "mean", "low": 0.02, "high": 0.02}, [-0.5], ["low"] * 4),
        ({"name": "sequence-ratio", "form": "mean", "low": 0.03, "high": 0.02}, [-0.5], [None] * 4),
        ({"name": "log-prob"}, [0.5], None),
    ],
)
def test_clipped_is_what_the_loss_of_the_run_says(
    tmp_path: Path, loss: Any, advantage: list[float], expected: Any
) -> None:
    given = row(0, 0, 1.0, "a b c d", logp=[[-1.0] * 4, LOGP], advantage=advantage)
    found = tokens(write_run(tmp_path / "r", {0: [given]}, loss), "ascent", 0, [0])
    (one,) = found["rows"]
    assert one["clipped"] == expected
    assert one["ratio"] == pytest.approx([1.0, 1.34986, 0.740818, 0.904837], rel=1e-5)
    assert one["advantage"] == (advantage * 4 if len(advantage) == 1 else advantage)
    assert (one["sequence_ratio"] is not None) == (loss["name"] == "sequence-ratio")
    assert one["pieces"] == ["a", " b", " c", " d"] and one["updates"] == 2 and found["missing"] == {}
    assert ("never clips" in found["clip"]["words"]) == (expected is None)


def test_a_response_whose_reward_failed_is_not_clipped(tmp_path: Path) -> None:
    given = row(0, 0, 1.0, "a b c d", logp=[[-1.0] * 4, LOGP], valid=False)
    (one,) = tokens(write_run(tmp_path / "r", {0: [given]}), "ascent", 0, [0])["rows"]
    assert one["clipped"] == [None] * 4


def test_what_older_files_lack_is_null_and_said(tmp_path: Path) -> None:
    old = {k: v for k, v in row(0, 0, 1.0, "a b").items() if k not in ("pieces", "entropy", "status", "logp_ref")}
    old["logp"] = []
    found = tokens(write_run(tmp_path / "r", {0: [old]}), "ascent", 0, [0])
    (one,) = found["rows"]
    assert one["pieces"] == ["⟨100⟩", "⟨101⟩"] and one["entropy"] is one["ratio"] is one["clipped"] is None
    assert set(found["missing"]) == {"pieces", "entropy", "ratio"}


def test_lists_of_another_length_are_not_shown_beside_the_wrong_tokens(tmp_path: Path) -> None:
    given = row(0, 0, 1.0, "a b c", logp_old=[-1.0, -1.0], entropy=[0.1] * 4, advantage=[0.1, 0.2])
    (one,) = tokens(write_run(tmp_path / "r", {0: [given]}), "ascent", 0, [0])["rows"]
    assert one["logp"] is one["entropy"] is one["advantage"] is one["ratio"] is one["clipped"] is None
    for mask in ([True, False], [True, None, False], "yes"):
        assert of_row(given | {"mask": mask}, None) == of_row(given, None)


def test_code_of_a_run_is_not_run_by_whoever_looks_at_it(tmp_path: Path) -> None:
    bomb = tmp_path / "bomb.py"
    bomb.write_text("raise SystemExit('it ran')\n")
    for loss in ({"name": f"python:{bomb}:Loss"}, {"name": "unheard-of"}, {"name": "clipped", "low": -1}, "x", None):
        run = write_run(tmp_path / "r", {0: [row(0, 0, 1.0, "a")]}, loss)
        found = tokens(run, "ascent", 0, [0])
        assert found["rows"][0]["clipped"] is None and found["clip"]["words"], loss
        assert found["rows"][0]["ratio"] is not None
        assert not isinstance(loss, dict) or "bomb" not in loss["name"] or "own" in found["clip"]["words"]


def test_only_the_part_of_a_file_that_holds_a_group_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    run = write_run(tmp_path / "r", {})
    write_step(run, 0, [row(g, s, 1.0, "a b") for g in range(20) for s in range(4)], row_group_size=8)
    seen = []
    whole = pq.ParquetFile.iter_batches

    def spy(self: Any, *given: Any, row_groups: list[int], **more: Any) -> Any:
        seen.append(row_groups)
        return whole(self, *given, row_groups=row_groups, **more)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", spy)
    rows = recorded.full_rows(run, "ascent", 0, [5, 13])
    assert sorted((r["group"], r["sample"]) for r in rows) == [(g, s) for g in (5, 13) for s in range(4)]
    assert seen == [[2, 6]]
    assert [r["sample"] for r in recorded.full_rows(run, "ascent", 0, [5], sample=2)] == [2]


def test_four_thousand_tokens(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", {0: [row(0, s, 1.0, pieces=["x"] * 4000) for s in range(4)]})
    start = time.thread_time()
    found = tokens(run, "ascent", 0, [0])
    assert [len(r["ratio"]) for r in found["rows"]] == [4000] * 4 and time.thread_time() - start < 3


def clip_ratios(rows: list[dict[str, Any]], loss: Any) -> dict[str, float]:
    """The shares of tokens that are shown as clipped after each update: means over the updates."""
    counts: dict[int, dict[str, int]] = {}
    for one in rows:
        for i, update in enumerate(one["logp_update"]):
            shown = of_row(one | {"logp": one["logp"][: i + 1]}, loss)
            count = counts.setdefault(update, {"low": 0, "high": 0, "all": 0})
            count["all"] += sum(one.get("mask") or [True] * len(shown["ids"]))
            for side in ("low", "high"):
                count[side] += (shown["clipped"] or []).count(side)
    return {side: statistics.fmean(count[side] / count["all"] for count in counts.values()) for side in ("low", "high")}


@pytest.mark.long
@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        ("grpo", {}),
        ("grpo", {"loss.low": 0.05, "loss.high": 0.1, "loss.dual": 1.05}),
        ("gspo", {}),
        ("cispo", {"loss.low": 0.1, "loss.high": 0.05}),
        ("ppo", {"loss.high": 0.05}),
    ],
)
def test_clips_are_those_that_the_learner_reported(tmp_path: Path, algorithm: str, settings: dict[str, Any]) -> None:
    """All groups of a step, with advantages per response and per token, over several updates and mini-batches."""
    same = {"steps": 3, "prompts": 8, "samples": 4, "epochs": 3, "minibatches": 2, "lr": 0.02, "eval_prompts": 4}
    same |= {"threads": 1, "policy.width": 16, "policy.layers": 1, "policy.heads": 2}
    run = ascent.train(
        "sort",
        algorithm=algorithm,
        record_rollouts="all",
        record_every=1,
        show=False,
        out=tmp_path / "r",
        **same,
        **settings,
    )
    loss, about = loss_of(run.folder)
    assert loss == run.config.algorithm.loss and about["name"]
    for line in run.metrics:
        found = clip_ratios(recorded.read_rollouts(run.folder, line["step"]), loss)
        assert found["low"] == pytest.approx(line["clip_ratio/low_mean"], abs=1e-9)
        assert found["high"] == pytest.approx(line["clip_ratio/high_mean"], abs=1e-9)
    assert any(line["clip_ratio/low_mean"] + line["clip_ratio/high_mean"] > 0.01 for line in run.metrics)
    shown = tokens(run.folder, "ascent", 2, [0])
    assert shown["missing"] == {} and all(len(r["pieces"]) == len(r["ids"]) == len(r["entropy"]) for r in shown["rows"])


# ---- one prompt over the steps --------------------------------------------------------------------------


def test_the_same_prompt_over_the_steps(some: Path) -> None:
    key = key_of("prompt 0")
    found = prompt_history(some, "ascent", key)
    assert (found["prompt"], found["found"], found["recorded"], found["left_out"]) == ("prompt 0", 2, 2, 0)
    first = found["steps"][0]
    assert (first["step"], first["mean"], first["right"], first["size"]) == (3, 0.5, 1, 3)
    assert (first["best"]["text"], first["best"]["reward"], first["common"]["count"]) == ("the answer is 4", 1.0, 1)
    nothing = prompt_history(some, "ascent", key_of("prompt 1"))["steps"][0]
    assert (nothing["common"]["text"], nothing["common"]["count"], nothing["failed"]) == ("nothing", 2, 1)
    listed = all_prompts(some, "ascent")
    assert [(p["prompt"], p["steps"], p["first"], p["last"]) for p in listed["prompts"]] == [
        ("prompt 0", 2, 3, 10),
        ("prompt 1", 1, 3, 3),
        ("What is 2 + 2?", 1, 3, 3),
    ]


@pytest.mark.long
def test_hundreds_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is opened at most twice, once for its prompts and once for what is shown; then nothing is read again."""
    opened: list[Any] = []

    class Opened(pq.ParquetFile):
        def __init__(self, *args: Any, **more: Any):
            opened.append(args)
            super().__init__(*args, **more)

    run = write_run(tmp_path / "r", {0: SOME})
    for step in range(1, 300):
        shutil.copyfile(
            recorded.rollout_path(run, 0), recorded.rollout_path(run, 0).with_name(f"step_{step:06d}.parquet")
        )
    monkeypatch.setattr(pq, "ParquetFile", Opened)
    key = key_of("prompt 0")
    found = prompt_history(run, "ascent", key)
    assert (found["found"], len(found["steps"]), found["left_out"]) == (300, 200, 100)
    assert [found["steps"][0]["step"], found["steps"][-1]["step"]] == [0, 299]
    assert 300 <= len(opened) <= 600
    opened.clear()
    assert prompt_history(run, "ascent", key) == found and not opened, "what was read is kept"


def test_what_is_kept_is_bounded_and_forgets_the_oldest(tmp_path: Path) -> None:
    kept, made = FileCache(3), []
    paths = [tmp_path / str(i) for i in range(5)]
    for path in paths:
        path.write_text("x")

    def look(i: int, weight: int = 1) -> None:
        kept(paths[i], lambda: made.append(i), weight=lambda _: weight)

    for i in (0, 1, 2, 0, 3, 0, 1):  # 1 goes when 3 comes, for 0 was used since
        look(i)
    assert made == [0, 1, 2, 3, 1] and kept.total_weight == 3
    look(4, weight=10)
    look(4, weight=10)
    assert made[-2:] == [4, 4] and kept.total_weight == 3, "too heavy to be kept"
    paths[0].write_text("longer")
    look(0)
    assert made[-1] == 0


# ---- routes ---------------------------------------------------------------------------------------------


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    write_run(tmp_path / "deep" / "r", {3: [*SOME, row(3, 0, 0.0, "<script>alert(1)</script>", reason="<b>bad</b>")]})
    app: Starlette = server.application(tmp_path)
    return TestClient(app)


def test_routes(client: TestClient) -> None:
    page = client.get("/api/view/completions?id=deep/r&sort=length&show=all&q=script").json()
    assert page["id"] == "deep/r" and page["groups"][0]["responses"][0]["text"] == "<script>alert(1)</script>"
    found = client.get("/api/view/tokens?id=deep/r&step=3&group=0&group=1").json()
    assert {(r["group"], r["sample"]) for r in found["rows"]} == {(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)}
    assert len(client.get("/api/view/tokens?id=deep/r&step=3&group=0&sample=1").json()["rows"]) == 1
    key = page["groups"][0]["key"]
    assert client.get(f"/api/view/prompt?id=deep/r&key={key}").json()["prompt"] == "prompt 3"
    assert client.get("/api/view/prompts?id=deep/r").json()["total"] == 4
    assert client.get("/completions?id=deep/r").status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        *("completions?id=../r", "completions?id=nowhere", "completions", "completions?id=deep/r&step=x"),
        *("completions?id=deep/r&step=-1", "completions?id=deep/r&offset=1.5", "completions?id=deep/r&sort=luck"),
        *("completions?id=deep/r&step=nan", "tokens?id=deep/r&group=0", "tokens?id=deep/r&step=3", "prompt?id=deep/r"),
        *("tokens?id=deep/r&step=3&group=x", "prompt?id=deep/r&key=ffff", "tokens?id=deep/r&step=9&group=0"),
    ],
)
def test_what_cannot_be_answered_is_said(client: TestClient, path: str) -> None:
    answer = client.get(f"/api/view/{path}")
    assert answer.status_code == 400 and answer.json()["error"]


def test_how_large_a_part_of_the_step_was_recorded(client: TestClient, tmp_path: Path) -> None:
    def told() -> Any:
        return client.get("/api/view/completions?id=deep/r&step=3&show=right").json()["of"]

    assert told() is None, "an older metrics.jsonl does not count them"
    folder = next(path.parent for path in tmp_path.rglob("run.json"))
    lines = [{"step": 2, "num_responses": 7}, {"step": 3, "num_responses": 512}, {"step": 4, "num_responses": 9}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert told() == {"responses": 512}, "config.json does not say how many make a group"
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"samples": 8}))
    assert told() == {"responses": 512, "groups": 64}


@pytest.mark.parametrize("name", ["group", "sample"])
def test_rows_without_their_place_are_refused(tmp_path: Path, name: str) -> None:
    folder = write_run(tmp_path / "runs" / "a", {0: [row(0, 0, 1.0, "x"), row(0, 1, 0.0, "y") | {name: None}]})
    with TestClient(server.application(folder.parent)) as client:
        answer = client.get("/api/view/completions?id=a&step=0")
    assert f"step_000000.parquet has rows without a {name}: Ascent did not write it" in answer.text
