"""Comparing runs: groups and differences, seeds as a band against a hand computation, files, and what is refused."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from ascent.core.errors import ConfigError
from ascent.lab.curves import ColumnCache
from ascent.lab.pages.compare.page import MOST_PANELS, Selection, csv_table, picture
from ascent.lab.pages.compare.run_comparison import DIGITS, Comparison, dotted
from ascent.runs.metric_columns import numbers_or_none
from ascent.runs.metrics import CHART_METRICS, CHARTS, metric_title

CONFIG = {
    "task": {"name": "sort", "length": 5},
    "loss": {"name": "clipped", "high": 0.2},
    "update": {"name": "adam", "lr": 0.01},
}
Values = Callable[[int], dict[str, Any]]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def run(root: Path) -> Callable[..., str]:
    """A run folder whose metrics are a function of the step."""

    def make(id: str, values: Values, steps: int = 4, seed: int = 0, label: str = "grpo", **config: Any) -> str:
        folder = root / id
        folder.mkdir(parents=True)
        about = {"task": "sort", "label": label, "seed": seed, "step": steps, "steps": steps, "status": "finished"}
        (folder / "run.json").write_text(json.dumps(about | {"result": None, "history": []}))
        (folder / "config.json").write_text(
            json.dumps(CONFIG | config | {"seed": seed, "label": label, "objective": "o"})
        )
        lines = [
            {"step": s, "num_responses": 8, "num_tokens": 40.0, "time/step": 0.5} | values(s) for s in range(steps)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return id

    return make


@pytest.fixture
def compared(root: Path) -> Callable[..., Comparison]:
    return lambda *ids: Comparison(root, ids, ColumnCache())


def by_hand(values: list[float]) -> tuple[float, float]:
    mean = sum(values) / len(values)
    spread = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))
    return mean, float(stats.t.ppf(0.975, len(values) - 1)) * spread / math.sqrt(len(values))


# ---- settings ---------------------------------------------------------------------------------------------


def test_settings_have_dotted_names() -> None:
    assert dotted({"loss": {"name": "clipped", "high": 0.2}, "seed": 3, "track": ["a"], "x": {"y": {"z": 1}}}) == {
        "loss": "clipped",
        "loss.high": 0.2,
        "seed": 3,
        "track": ["a"],
        "x.y.z": 1,
    }


def test_only_what_differs_is_listed_and_seeds_are_grouped(run: Any, compared: Any) -> None:
    ids = [run(f"g{s}", lambda _: {}, seed=s) for s in range(3)]
    ids += [run("other", lambda _: {}, seed=0, label="cispo", loss={"name": "cispo", "cap": None})]
    with compared(*ids) as found:
        told = found.summary()
    assert [(g["title"], g["ids"], g["seeds"]) for g in told["groups"]] == [
        ("grpo × 3 seeds", ["g0", "g1", "g2"], [0, 1, 2]),
        ("cispo", ["other"], [0]),
    ]
    assert told["difference"] == [
        {"name": "loss", "values": ["clipped", "clipped", "clipped", "cispo"]},
        {"name": "loss.high", "values": ["0.2", "0.2", "0.2", None]},
        {"name": "loss.cap", "values": [None, None, None, "null"]},
        {"name": "seed", "values": ["0", "1", "2", "0"]},
    ]


def test_groups_of_one_label_are_told_apart_by_their_settings(run: Any, compared: Any) -> None:
    ids = [
        run(f"r{i}", lambda _: {}, update={"name": "adam", "lr": lr})
        for i, lr in enumerate((0.01, 0.009000000000000001))
    ]
    assert list(compared(*ids).groups) == ["update.lr 0.01", "update.lr 0.009"]
    twice = run("again", lambda _: {}, update={"name": "adam", "lr": 0.01})
    assert list(compared(*ids, twice).groups) == ["update.lr 0.01", "update.lr 0.009", "update.lr 0.01, again 2"]
    assert list(compared("r0").groups) == ["grpo"] and compared("r0", "r0").groups.keys() == {"grpo"}


def test_a_run_without_settings_is_a_group_of_its_own(run: Any, compared: Any, root: Path) -> None:
    ids = [run("a", lambda _: {}), run("b", lambda _: {}, seed=1)]
    (root / "a/config.json").unlink()
    (root / "b/config.json").write_text("torn{")
    with compared(*ids) as found:
        assert [g["ids"] for g in found.summary()["groups"]] == [["a"], ["b"]]


# ---- curves -----------------------------------------------------------------------------------------------


def test_the_band_is_what_a_hand_computes(run: Any, compared: Any) -> None:
    ids = [run(f"s{s}", lambda t, s=s: {"reward": float(t + s * s)}, seed=s) for s in range(4)]
    with compared(*ids) as found:
        line = found.curves(["reward"])["reward"]["groups"]["grpo"]
    assert line["x"] == [0, 1, 2, 3] and line["seeds"] == 4 and line["bucket"] == 1
    for t in range(4):
        mean, half = by_hand([t + s * s for s in range(4)])
        assert line["mean"][t] == pytest.approx(mean)
        assert line["high"][t] - mean == pytest.approx(half, rel=3e-4)
        assert mean - line["low"][t] == pytest.approx(half, rel=3e-4)


def test_seeds_are_aligned_by_step_and_only_common_steps_count(run: Any, compared: Any) -> None:
    every = {0: (1, 3, 5), 1: (1, 4, 5), 2: (1, 2, 5, 7)}
    for s, steps in every.items():
        run(
            f"s{s}",
            lambda t, s=s, steps=steps: {"eval/accuracy": (t + s) / 20 if t in steps else None},
            6 + 2 * s,
            seed=s,
        )
    with compared("s0", "s1", "s2") as found:
        made = found.curves(["eval/accuracy"])["eval/accuracy"]
    line = made["groups"]["grpo"]
    assert line["x"] == [1, 5] and line["mean"] == pytest.approx([2 / 20, 6 / 20])
    assert made["runs"]["s2"]["x"] == [1, 2, 5, 7]


def test_one_seed_has_no_band(run: Any, compared: Any) -> None:
    run("a", lambda t: {"reward": float(t)})
    with compared("a") as found:
        made, ends = found.curves(["reward"])["reward"], found.ends()
    assert made["runs"] == {} and "low" not in made["groups"]["grpo"]
    assert ends["rows"]["grpo"]["reward"]["half"] is None and ends["notes"] == ["One seed has no interval."]


def test_the_band_of_a_share_stays_a_share(run: Any, compared: Any) -> None:
    ids = [run(f"s{s}", lambda _, s=s: {"eval/accuracy": float(s), "kl": float(s)}, seed=s) for s in (0, 1)]
    with compared(*ids) as found:
        made = found.curves(["eval/accuracy", "kl"])
    share, plain = (made[name]["groups"]["grpo"] for name in ("eval/accuracy", "kl"))
    assert (share["low"][0], share["high"][0]) == (0, 1) and plain["low"][0] < -5


@pytest.mark.parametrize(
    ("metric", "ends"),
    [
        ("clip_ratio/low_mean", (0, 1)),
        ("entropy", (0, None)),
        ("reward_std", (0, None)),
        ("completions/mean_length", (0, None)),
        ("time/tokens_per_second", (0, None)),
        ("time/step", (0, None)),
        ("kl", (None, None)),
        ("reward", (None, None)),
        ("loss", (None, None)),
    ],
)
def test_a_drawn_band_ends_where_the_values_do_and_the_table_has_the_interval(
    run: Any, compared: Any, metric: str, ends: tuple[float | None, float | None]
) -> None:
    third = 1 / 3
    ids = [run(f"s{s}", lambda _, s=s: {metric: s * third}, seed=s) for s in (0, 1)]
    mean, half = by_hand([0.0, third])
    with compared(*ids) as found:
        made = found.curves([metric])[metric]
        table = rows(csv_table(found, "curves", Selection([metric])))
    low, high = ends
    drawn = made["groups"]["grpo"]
    assert made["bounds"] == [low, high]
    assert drawn["low"][0] == pytest.approx(mean - half if low is None else low, rel=3e-4)
    assert drawn["high"][0] == pytest.approx(mean + half if high is None else high, rel=3e-4)
    assert [float(v) for v in table[1][5:]] == pytest.approx([mean - half, mean + half], rel=3e-4)
    assert table[1][4] == repr(float(np.mean([0.0, third]))), "all digits"


def test_long_runs_of_different_lengths_share_buckets(run: Any, compared: Any) -> None:
    sizes = (3000, 9000)
    ids = [run(f"s{s}", lambda t, s=s: {"reward": math.sin(t / 50) + s}, size, seed=s) for s, size in enumerate(sizes)]
    with compared(*ids) as found:
        line = found.curves(["reward"], points=600)["reward"]["groups"]["grpo"]
    assert line["bucket"] == 5 and len(line["x"]) == 600
    for x, mean in list(zip(line["x"], line["mean"], strict=True))[::50]:
        steps = np.arange(x - 2, x + 3)
        assert mean == pytest.approx(float(np.sin(steps / 50).mean()) + 0.5, abs=1e-5)


def test_a_step_that_a_seed_lacks_is_left_out_of_its_bucket(run: Any, compared: Any) -> None:
    def values(t: int, s: int) -> dict[str, Any]:
        bad = s == 1 and t == 1000
        return {"reward": None, "nonfinite": {"reward": "inf"}} if bad else {"reward": 1.0 * t}

    ids = [run(f"s{s}", lambda t, s=s: values(t, s), 4096, seed=s) for s in range(2)]
    with compared(*ids) as found:
        line = found.curves(["reward"], points=4096)["reward"]["groups"]["grpo"]
        half = found.curves(["reward"], points=2048)["reward"]["groups"]["grpo"]
    assert line["bucket"] == 1 and len(line["x"]) == 4095 and 1000 not in line["x"]
    assert half["bucket"] == 2 and half["x"][499:502] == [998.5, 1001, 1002.5] == half["mean"][499:502]
    assert line["nonfinite"] == [(1000.0, "inf")]


@pytest.mark.parametrize(("axis", "each"), [("samples", 8), ("tokens", 40), ("seconds", 0.5)])
def test_curves_over_what_they_cost(run: Any, compared: Any, axis: str, each: float) -> None:
    run("a", lambda t: {"reward": float(t)}, 6)
    with compared("a") as found:
        assert found.curves(["reward"], axis)["reward"]["groups"]["grpo"]["x"] == [each * (t + 1) for t in range(6)]
        few = found.curves(["reward"], axis, points=3)["reward"]["groups"]["grpo"]
    assert few["x"] == pytest.approx([each * (t + 1.5) for t in (0, 2, 4)])


def test_numbers_too_large_for_a_mean_are_none() -> None:
    found = numbers_or_none(np.array([1.23456789, np.inf, 0.0, -1e300, 5e-324]), DIGITS)
    assert found[:3] == [1.23457, None, 0.0] and found[3:] == pytest.approx([-1e300, 5e-324], rel=1e-6)


# ---- a part of it, exactly ---------------------------------------------------------------------------------

LONG, SEEDS = 1000, 3
COSTS = {"step": None, "samples": "num_responses", "tokens": "num_tokens", "seconds": "time/step"}


@pytest.fixture
def long(run: Any, root: Path) -> list[list[dict[str, Any]]]:
    """Seeds whose steps take different times; their lines."""

    def line(t: int, s: int) -> dict[str, Any]:
        measured = {"reward": math.sin(t * (s + 1)) + s, "eval/accuracy": (t + s) / 2000 if t % 50 == 0 else None}
        return measured | {"num_responses": 8, "num_tokens": 30.0 + 7 * math.cos(t + s), "time/step": 0.1 * (s + 1)}

    for s in range(SEEDS):
        run(f"s{s}", lambda t, s=s: line(t, s), LONG, seed=s)
    return [[{"step": t} | line(t, s) for t in range(LONG)] for s in range(SEEDS)]


def lies_at(lines: list[dict[str, Any]], axis: str) -> np.ndarray:
    """Where each line of a run lies: at its step, or at what had been spent after it."""
    cost = COSTS[axis]
    return np.arange(len(lines), dtype=float) if cost is None else np.cumsum([line[cost] for line in lines])


@pytest.mark.parametrize("axis", COSTS)
def test_a_view_has_the_exact_points(long: Any, compared: Any, axis: str) -> None:
    """Of a band over seeds, of each seed, of what is measured rarely; and in the table no point that is not seen."""
    at = np.mean([lies_at(lines, axis) for lines in long], axis=0)
    view = (float(at[480]) - 0.01, float(at[520]) + 0.01)
    with compared("s0", "s1", "s2") as found:
        made = found.curves(["reward", "eval/accuracy"], axis, view=view)
        table = rows(csv_table(found, "curves", Selection(["reward", "eval/accuracy"], axis, view)))
        assert made["reward"]["whole"] == found.curves(["reward"], axis)["reward"]["whole"]
    line = made["reward"]["groups"]["grpo"]
    assert line["bucket"] == 1 and line["x"] == pytest.approx(at[479:522].tolist(), rel=1e-5)
    for i, t in enumerate(range(479, 522)):
        mean, half = by_hand([lines[t]["reward"] for lines in long])
        assert line["mean"][i] == pytest.approx(mean, rel=1e-4, abs=1e-5)
        assert line["high"][i] - line["low"][i] == pytest.approx(2 * half, rel=1e-3)
    for s, lines in enumerate(long):
        own, x = made["reward"]["runs"][f"s{s}"], lies_at(lines, axis)
        first = int(np.searchsorted(x, view[0])) - 1
        assert own["x"][0] == pytest.approx(x[max(first, 0)], rel=1e-5) and own["bucket"] == 1
        assert own["mean"][:5] == pytest.approx(
            [one["reward"] for one in lines[max(first, 0) :][:5]], rel=1e-4, abs=1e-5
        )
    rare = made["eval/accuracy"]["groups"]["grpo"]
    assert rare["x"] == pytest.approx(at[[450, 500, 550]].tolist(), rel=1e-5), "and the next ones beside the view"
    assert [float(row[3]) for row in table[1:] if row[0] == "reward"] == pytest.approx(at[480:521].tolist(), rel=1e-12)
    (seldom,) = [[float(cell) for cell in row[3:5]] for row in table[1:] if row[0] != "reward"]
    assert seldom == pytest.approx([at[500], 0.2505], rel=1e-12)


def test_a_view_of_more_than_can_be_drawn_says_how_many_steps_a_point_is(long: Any, compared: Any) -> None:
    with compared("s0", "s1") as found:
        line = found.curves(["reward"], points=10, view=(100, 400))["reward"]["groups"]["grpo"]
        assert line["bucket"] == 31
        line = found.curves(["reward"], points=40, view=(100, 299))["reward"]["groups"]["grpo"]
    assert 1 < line["bucket"] < 16 and 30 < sum(100 <= x <= 299 for x in line["x"]) <= 41
    assert max(np.diff(line["x"])) <= line["bucket"]


def test_where_nothing_lies_nothing_is_seen(long: Any, compared: Any, run: Any, root: Path) -> None:
    run("short", lambda _: {"reward": 1.0}, 4, label="short", loss={"name": "b"})
    (root / "s2/metrics.jsonl").write_text((root / "s2/metrics.jsonl").read_text().replace('"num_tokens"', '"no"', 1))
    with compared("short", "s0", "s2") as found:
        made = found.curves(["reward"], view=(900, 950))["reward"]
        assert made["groups"]["short"]["x"] == [3.0], "the point beside it"
        assert len(made["groups"]["grpo"]["x"]) == 53 and made["whole"] == [0.0, 999.0]
        over = found.curves(["reward"], "tokens", view=(1e9, 2e9))["reward"]
        assert set(over["groups"]) == {"short", "grpo"} and over["groups"]["grpo"]["seeds"] == 1
        table = rows(csv_table(found, "curves", Selection(["reward"], view=(5000, 6000))))
        assert len(table) == 1 and picture(found, Selection(["reward"], view=(5000, 6000))).startswith(b"\x89PNG")


def test_hostile_costs_and_a_file_that_goes_away_break_no_view(run: Any, root: Path, compared: Any, long: Any) -> None:
    run(
        "huge",
        lambda t: {"reward": 1.0, "time/step": 1e308 if t % 2 else -3.0, "num_tokens": -1.0},
        9,
        loss={"name": "b"},
    )
    with compared("huge", "s0") as found:
        (root / "s0/metrics.jsonl").unlink()
        for axis in COSTS:
            for view in ((0.5, 2.5), (-9.0, 1e300)):
                json.dumps(found.curves(["reward"], axis, view=view), allow_nan=False)
        *_, line = found.curves(["reward"], view=(500, 510))["reward"]["groups"].values()
        assert line["x"] == list(range(499, 512))
        assert picture(found, Selection(["reward"], view=(500, 510))).startswith(b"\x89PNG")


def test_a_picture_of_a_view_ends_where_it_does(long: Any, compared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib import pyplot

    kept: list[Any] = []
    monkeypatch.setattr(pyplot, "close", kept.append)
    with compared("s0", "s1") as found:
        picture(found, Selection(["reward", "eval/accuracy"], view=(480, 520)))
    monkeypatch.undo()
    panel = kept[0].axes[0]
    assert panel.get_xlim() == pytest.approx((479.2, 520.8))
    assert list(panel.lines[0].get_xdata()) == list(range(479, 522))
    pyplot.close(kept[0])


# ---- how they ended ---------------------------------------------------------------------------------------


def test_differences_are_paired_by_seed(run: Any, compared: Any) -> None:
    first, second = {0: 0.1, 1: 0.4, 2: 0.9}, {1: 0.5, 2: 0.8, 7: 0.3}
    for s, value in first.items():
        run(f"a{s}", lambda t, v=value: {"eval/accuracy": v if t == 2 else None, "reward": 1.0}, seed=s)
    for s, value in second.items():
        run(
            f"b{s}",
            lambda t, v=value: {"eval/accuracy": v if t == 3 else None},
            seed=s,
            label="rloo",
            loss={"name": "log-prob"},
        )
    with compared(*(f"a{s}" for s in first), *(f"b{s}" for s in second)) as found:
        ends = found.ends()
    row = ends["rows"]["rloo"]["eval/accuracy"]
    assert (row["mean"], row["half"]) == pytest.approx(by_hand(list(second.values())), rel=3e-4)
    assert row["pairs"] == 2
    assert (row["difference"], row["difference_half"]) == pytest.approx(by_hand([0.1, -0.1]), rel=3e-4, abs=1e-12)
    assert "difference" not in ends["rows"]["grpo"]["eval/accuracy"] and "reward" not in ends["rows"]["rloo"]
    assert ends["rows"]["grpo"]["responses"]["values"] == [32.0] * 3 and ends["rows"]["grpo"]["seconds"]["mean"] == 2.0


def test_seeds_that_end_at_different_steps_are_said(run: Any, compared: Any) -> None:
    run("a", lambda _: {"reward": 1.0}, 4)
    run("b", lambda _: {"reward": 1.0}, 9, seed=1)
    with compared("a", "b") as found:
        assert found.ends()["cautions"] == ["grpo: its runs have 4 to 9 steps, and each is taken at its own end."]


def test_differences_are_to_the_setting_that_is_chosen(run: Any, compared: Any) -> None:
    for i, name in enumerate("abc"):
        run(name, lambda _, i=i: {"reward": float(i)}, label=name, loss={"name": name})
    gaps = {
        base: {name: row["reward"].get("difference") for name, row in ends["rows"].items()}
        for base, ends in ended(compared("c", "a", "b"), None, "b", "nope").items()
    }
    assert gaps[None] == gaps["nope"] == {"c": None, "a": -2, "b": -1} and gaps["b"] == {"c": 1, "a": -1, "b": None}
    with compared("c", "a", "b") as found:
        assert [g["name"] for g in found.summary()["groups"]] == found.summary()["order"] == ["c", "a", "b"]
        table = rows(csv_table(found, "finals", Selection([]), base="b"))
    assert {row[-1] for row in table[1:] if row[0] != "b"} == {"b"} and {r[-1] for r in table if r[0] == "b"} == {""}


def ended(found: Comparison, *bases: str | None) -> dict[str | None, dict[str, Any]]:
    with found as held:
        return {base: held.ends(base) for base in bases}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"task": {"name": "sort", "length": 7}},
            "No difference is taken between grpo and b: another task or reward (task.leng",
        ),
        ({"told": {"task": "walk"}}, "No difference is taken between grpo and b: another task (walk, not sort)."),
        ({"told": {"result": {"max_reward": 9.5}}}, "another reward (its largest is 9.5, not 5.0)."),
        ({"told": {"status": "running"}}, "b: died before its end."),
        ({"told": {"status": "failed"}}, "b: failed before its end."),
        ({"steps": 7}, "Steps done differ: grpo 4, b 7."),
        ({}, ""),
    ],
)
def test_what_cannot_be_subtracted_is_said(
    run: Any, compared: Any, root: Path, changes: dict[str, Any], words: str
) -> None:
    run("a", lambda _: {"reward": 1.0})
    told = {"b": changes.pop("told", {}), "a": {"result": {"max_reward": 5.0}}}
    run("b", lambda _: {"reward": 2.0}, label="b", **{"loss": {"name": "b"}} | changes)
    for id, more in told.items():
        about = json.loads((root / id / "run.json").read_text())
        (root / id / "run.json").write_text(json.dumps(about | more))
    with compared("a", "b") as found:
        ends, name = found.ends(), list(found.groups)[1]
    said = " ".join(ends["cautions"]).replace("sort grpo", "grpo").replace("walk b", "b")
    assert words in said if words else not said
    assert ("difference" in ends["rows"][name]["reward"]) == ("No difference" not in said)
    assert (name in ends["apart"]) == ("No difference" in said)


def test_long_names_are_short_in_legends(run: Any, compared: Any) -> None:
    run("a", lambda _: {}, label="grpo")
    run("b", lambda _: {}, label="a setting whose name goes on and on and on", loss={"name": "b"})
    with compared("a", "b") as found:
        shorts = [group["short"] for group in found.summary()["groups"]]
    assert shorts == ["grpo", "2: a setting whose name goes …"]


def test_a_run_without_metrics_or_with_a_torn_line_does_not_spoil_the_rest(run: Any, compared: Any, root: Path) -> None:
    ids = [run(f"s{s}", lambda t: {"reward": float(t)}, seed=s) for s in range(3)]
    (root / "s0/metrics.jsonl").unlink()
    with open(root / "s1/metrics.jsonl", "a") as file:
        file.write('{"step": 4, "rew')
    with compared(*ids) as found:
        line = found.curves(["reward"])["reward"]["groups"]["grpo"]
        assert line["seeds"] == 2 and line["x"] == [0, 1, 2, 3]
        assert "reward" not in found.ends()["rows"]["grpo"]


def test_a_damaged_run_json_does_no_harm_and_the_answer_is_json(run: Any, root: Path, compared: Any) -> None:
    run("a", lambda _: {"reward": 1e308})
    run("b", lambda _: {"reward": 1e308}, seed=1)
    (root / "a/run.json").write_text(
        '{"status": [], "seed": {"x": NaN}, "task": NaN, "label": ["l"], "steps": Infinity}'
    )
    (root / "b/metrics.jsonl").write_text('{"step": 0, "reward": NaN, "kl": Infinity}\n')
    with compared("a", "b") as found:
        told = found.summary() | found.ends() | found.curves(["reward", "kl"])
    assert json.dumps(told, allow_nan=False) and told["groups"][0]["ids"] == ["a", "b"]


# ---- refusals ---------------------------------------------------------------------------------------------


def test_what_cannot_be_compared_is_refused(run: Any, compared: Any) -> None:
    run("a", lambda _: {"reward": 1.0})
    for ids, words in (
        ((), "nothing to compare"),
        (("nope",), "there is no run nope"),
        (("../a",), "not the name of a run"),
    ):
        with pytest.raises(ConfigError, match=words):
            compared(*ids)
    with pytest.raises(ConfigError, match="51 runs: at most 50"):
        compared(*(f"r{i}" for i in range(51)))
    with compared("a") as found:
        with pytest.raises(ConfigError, match=r"none of these runs has it\. Did you mean reward"):
            found.curves(["rewart"])
        with pytest.raises(ConfigError, match="there are step, samples"):
            found.curves(["reward"], "hours")
        with pytest.raises(ConfigError, match="there are finals"):
            csv_table(found, "all", Selection(["reward"]))
        with pytest.raises(ConfigError, match="a picture has 1 to 60"):
            picture(found, Selection([]))


# ---- files ------------------------------------------------------------------------------------------------


@pytest.fixture
def two(run: Any, compared: Any) -> Comparison:
    for s in range(2):
        run(f"a{s}", lambda t, s=s: {"reward": float(t + s)}, seed=s)
    run("b", lambda t: {"reward": t / 3}, label="=cmd()", loss={"name": "$\\alpha"})
    return compared("a0", "a1", "b")


def rows(text: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text)))


def test_the_tables_as_csv(two: Comparison) -> None:
    with two as found:
        curves, finals, settings = (
            rows(csv_table(found, what, Selection(["reward"]))) for what in ("curves", "finals", "settings")
        )
    assert curves[0] == ["metric", "setting", "seeds", "step", "mean", "low", "high"]
    mean, half = by_hand([0.0, 1.0])
    assert curves[1][:5] == ["reward", "grpo", "2", "0.0", str(mean)]
    assert float(curves[1][6]) == pytest.approx(mean + half, rel=3e-4)
    assert curves[5][:4] == ["reward", "'=cmd()", "1", "0.0"] and curves[5][5:] == ["", ""]
    assert len(curves) == 9
    row = next(r for r in finals if r[:2] == ["'=cmd()", "reward"])
    assert row[2:] == ["1", "1.0", "", "-2.0", "", "1", "grpo"]
    assert settings[0] == ["setting", "a0", "a1", "b"] and ["loss", "clipped", "clipped", "$\\alpha"] in settings


@pytest.mark.parametrize("count", [1, 4, 5])
def test_a_picture_has_no_empty_panel(count: int, run: Any, compared: Any) -> None:
    """Five metrics are in two rows of three, of which the last is not drawn; a run may lack a metric."""
    names = ["reward", "accuracy", "entropy", "kl", "loss"][:count]
    run("a", lambda step: dict.fromkeys(names, 0.1 * step))
    run("b", lambda step: {"reward": 0.2 * step}, label="ppo", loss={"name": "log-prob"})
    with compared("a", "b") as found:
        drawn = picture(found, Selection(names), "svg").decode()
    assert [f'id="axes_{i}"' in drawn for i in range(1, 8)] == [i <= count for i in range(1, 8)]


@pytest.mark.long
@pytest.mark.smoke
def test_a_picture_holds_every_chart(two: Comparison) -> None:
    assert len(CHART_METRICS) <= MOST_PANELS
    with two as found:
        svg = picture(found, Selection([chart.series[0].name for chart in CHARTS]), "svg").decode()
    for chart in CHARTS:
        assert metric_title(chart.series[0].name)[0] in svg
    assert "bands end at 0 and 1 for shares" in svg


@pytest.mark.long
@pytest.mark.parametrize("seeds", ["band", "lines"])
def test_the_picture(two: Comparison, seeds: str) -> None:
    with two as found:
        png = picture(found, Selection(["reward", "num_tokens"], "samples"), "png", seeds)
        svg = picture(found, Selection(["reward"]), "svg", seeds).decode()
    assert png.startswith(b"\x89PNG") and len(png) > 10_000
    assert "<svg" in svg and "Reward, sampled" in svg and "grpo, 2 seeds" in svg and "=cmd()" in svg


# ---- routes -----------------------------------------------------------------------------------------------


@pytest.fixture
def client(two: Comparison, root: Path) -> Any:
    from starlette.testclient import TestClient

    from ascent.lab.server import application

    return TestClient(application(root))


IDS = "id=a0&id=a1&id=b"


@pytest.mark.long
def test_the_routes(client: Any) -> None:
    found = client.get(f"/api/view/compare?{IDS}").json()
    assert list(found["curves"]) == ["reward"] and found["axes"] == ["step", "samples", "tokens", "seconds"]
    assert list(found["runs"]) == ["a0", "a1", "b"] and found["runs"]["a0"]["status"] == "finished"
    part = client.get(f"/api/view/compare?{IDS}&metric=num_tokens&x=tokens&part=curves").json()
    assert part.keys() == {"curves"} and part["curves"]["num_tokens"]["groups"]["grpo"]["x"] == [40, 80, 120, 160]
    assert client.get(f"/api/view/compare?{IDS}&part=ends").json()["rows"]["grpo"]["reward"]["mean"] == 3.5
    for path, kind, name in (
        (f"compare.png?{IDS}&metric=reward", "image/png", "compare-reward.png"),
        (f"compare.svg?{IDS}&metric=reward&metric=time/step", "image/svg+xml", "compare-3-runs.svg"),
        (f"compare.csv?{IDS}", "text/csv; charset=utf-8", "compare-finals.csv"),
        (f"compare.csv?{IDS}&table=settings", "text/csv; charset=utf-8", "compare-settings.csv"),
    ):
        answer = client.get(f"/api/view/{path}")
        assert answer.status_code == 200 and answer.headers["content-type"] == kind
        assert answer.headers["content-disposition"] == f'attachment; filename="{name}"' and answer.content


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("", "nothing to compare"),
        ("id=a0&id=nope", "there is no run nope"),
        ("id=../secret", "not the name of a run"),
        ("&".join(f"id=r{i}" for i in range(51)), "at most 50"),
        ("id=a0&x=y", "x=y"),
        ("id=a0&from=y", "from=y: set a number"),
        ("id=a0&from=3&to=2", "from=3 is behind to=2"),
        ("id=a0&metric=y", "metric=y"),
        ("id=a0&" + "&".join(f"metric=m{i}" for i in range(61)), "61 metrics"),
    ],
)
def test_requests_that_cannot_be_are_refused(client: Any, query: str, words: str) -> None:
    answer = client.get(f"/api/view/compare?{query}")
    assert answer.status_code == 400 and words in answer.json()["error"]
    for kind in ("png", "csv"):
        more = "&table=curves" if kind == "csv" else ""
        assert client.get(f"/api/view/compare.{kind}?{query}{more}").status_code == 400


def test_files_refuse_what_they_do_not_know(client: Any) -> None:
    assert "seeds=x" in client.get("/api/view/compare.png?id=a0&seeds=x").json()["error"]
    assert "table=x" in client.get("/api/view/compare.csv?id=a0&table=x").json()["error"]
