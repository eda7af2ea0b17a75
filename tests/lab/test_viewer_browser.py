"""The list of runs and a run's page in a real browser, on real runs and on what is left of broken ones."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

import ascent
from ascent.runs.untrusted_files import read_lines
from tests.browser import PATIENCE, Lab, Screen, chromium, serious, until

pytestmark = [pytest.mark.slow, pytest.mark.browser]
EVIL = "<img src=x onerror=document.title=1><script>document.title=1<"
STEPS = 1500
ALERT = {
    "step": 9,
    "event": "alert",
    "name": "entropy_collapse",
    "text": f"Entropy fell from 1.1 to 0.2. {EVIL}",
    "evidence": {
        "metrics": {"entropy": [1.1, 0.2]},
        "steps": [4, 9],
        "rollouts": {"step": 8, "show": "wrong", "q": "1 2"},
    },
}


def changed(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def write_lines(folder: Path, lines: list[dict[str, Any]]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two real runs, and what can become of one: died with a torn line, no metrics, NaN, long, hostile, live."""
    chromium()
    root = tmp_path_factory.mktemp("viewer") / "runs"
    ascent.train("lecture", steps=12, epochs=2, record_every=4, show=False, out=root / "known")
    small = {"policy.width": 16, "policy.layers": 1, "policy.heads": 2, "prompts": 8, "eval_prompts": 4}
    ascent.train("sort", steps=2, show=False, out=root / "sorts" / "first", **small)
    lines = read_lines(root / "known" / "metrics.jsonl")
    for name in ("died", "bare", "nan", "long", f"evil {EVIL}", "live"):
        shutil.copytree(root / "known", root / name)
    changed(root / "died" / "run.json", status="running")
    write_lines(root / "died", lines[:7])
    with open(root / "died" / "metrics.jsonl", "a") as file:
        file.write('no JSON\n{"step": 8, "rewa')
    (root / "bare" / "metrics.jsonl").unlink()
    broken = {"grad_norm": None, "nonfinite": {"grad_norm": "nan"}}
    write_lines(root / "nan", [line | (broken if line["step"] in (5, 6) else {}) for line in lines])
    changed(root / "long" / "run.json", steps=STEPS)
    write_lines(
        root / "long", [lines[i % 12] | {"step": i, "entropy": i / 7, "eval/accuracy": None} for i in range(STEPS)]
    )
    evil = root / f"evil {EVIL}"
    (evil / "notes.json").write_text(json.dumps({"text": f"note {EVIL}", "tags": [f"tag {EVIL}"[:40]]}))
    (evil / "events.jsonl").write_text(json.dumps(ALERT) + "\n")
    changed(evil / "config.json", objective=f"objective {EVIL}", policy={"name": EVIL, EVIL: 1})
    changed(evil / "run.json", task={"a": EVIL}, label=EVIL)
    changed(root / "live" / "run.json", status="running", steps=40)
    shutil.copytree(root / "known", root / "occupancy")
    write_lines(root / "occupancy", [line | {"time/tail": 0.5 * line["step"]} for line in lines])
    rows = [512 if i < 20 else round(512 * 0.7 ** (i - 19), 2) for i in range(32)]
    times = [{"time/seconds": 40.0 + i, "time/tail": 0.5 * i, "time/running": rows} for i in range(12)]
    steps = [{"step": i, "max_num_seqs": 512, **time} for i, time in enumerate(times)]
    (root / "occupancy" / "occupancy.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps))
    return root


@pytest.fixture(scope="module")
def shared(browser: Any, lab: Lab) -> Iterator[Screen]:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(1000 * PATIENCE)
    screen = Screen(context.new_page(), lab)
    screen.enter()
    yield screen
    context.close()


@pytest.fixture
def screen(shared: Screen) -> Iterator[Screen]:
    """A page with a clean record; whatever it asked for stayed on this machine, and no script failed."""
    shared.requests.clear()
    shared.errors.clear()
    yield shared
    assert {urlsplit(url).netloc for url in shared.requests} <= {f"127.0.0.1:{shared.lab.port}"}
    assert not shared.errors
    shared.page.unroute_all()


def opened(screen: Screen, path: str) -> Screen:
    screen.open(path).page.wait_for_selector("body[data-ready]")
    return screen


def ids(screen: Screen) -> list[str]:
    return screen.page.locator(".runs tbody tr[data-id]").evaluate_all("all => all.map(e => e.dataset.id)")


def query(screen: Screen) -> dict[str, list[str]]:
    """What is in the address; nothing for what is not there, or not yet."""
    return defaultdict(list, parse_qs(screen.page.evaluate("location.search.slice(1)")))


def says(screen: Screen, chart: str) -> dict[str, str]:
    """A chart's lines with the numbers in its caption."""
    found = screen.page.locator(f"[data-chart={chart}] li").evaluate_all(
        "all => all.map(e => [e.querySelector('span').textContent, e.querySelector('output').textContent])"
    )
    return dict(found)


def row(screen: Screen, id: str) -> Any:
    return screen.page.locator(f'.runs tr[data-id="{id}"]')


# ---- the list -------------------------------------------------------------------------------------------


def test_the_list_sorts_filters_and_keeps_it_in_the_address(screen: Screen) -> None:
    opened(screen, "/runs")
    assert len(ids(screen)) == 9 and "9 runs in runs/" in screen.text(".chosen")
    assert "died" in row(screen, "died").inner_text() and "no process here" in row(screen, "died").inner_text()
    for column in (
        "Run",
        "Status",
        "Steps",
        "Curve",
        "Right",
        "Reward",
        "Alerts",
        "Task",
        "Method",
        "Seed",
        "Tags and note",
    ):
        screen.page.click(f'.runs thead button[title="Sort by {column}"]')
        assert screen.page.locator("th[aria-sort$=ending]").inner_text().startswith(column)
    screen.page.click('.runs thead button[title="Sort by Run"]')
    assert ids(screen) == sorted(ids(screen)) and query(screen)["sort"] == ["id"]
    screen.page.click('.runs thead button[title="Sort by Run"]')
    assert ids(screen) == sorted(ids(screen), reverse=True) and query(screen)["order"] == ["down"]
    screen.page.click('.quick button:has-text("finished")')
    assert "died" not in ids(screen) and "live" not in ids(screen)
    screen.page.fill("#filter", "lecture kno")
    assert ids(screen) == ["known"] and query(screen)["q"] == ["lecture kno"]
    screen.page.reload()
    screen.page.wait_for_selector("body[data-ready]")
    assert ids(screen) == ["known"] and query(screen)["status"] == ["finished"]
    screen.page.fill("#filter", "seed:0")
    assert ids(screen) == ["sorts/first"]
    assert row(screen, "sorts/first").locator(".c-id small").inner_text() == "sorts/"
    assert "held out" in row(screen, "sorts/first").locator(".c-accuracy").inner_text()
    screen.page.fill("#filter", "known")
    assert " of 5" in row(screen, "known").locator(".c-reward").inner_text()
    assert row(screen, "known").locator(".c-accuracy small").inner_text() == "greedy", "the lecture holds nothing out"
    screen.page.fill("#filter", "nothing like it")
    assert "None of the 9 runs fits" in screen.text(".empty")
    screen.page.click(".empty button")
    assert len(ids(screen)) == 9
    until(lambda: screen.page.locator('[id="spark-known"] path').count() == 1)
    assert screen.page.locator("#compare").is_disabled()
    for id in ("known", "sorts/first"):
        row(screen, id).locator("input").check()
    link = screen.page.locator("#compare")
    assert link.inner_text() == "Compare 2"
    assert parse_qs(urlsplit(link.get_attribute("href")).query)["id"] == ["known", "sorts/first"]


def test_notes_and_tags_are_kept_beside_the_run_and_a_conflict_loses_nothing(screen: Screen, runs: Path) -> None:
    opened(screen, "/runs?sort=id")
    row(screen, "known").locator(".edit").click()
    screen.page.fill(".noting .tag-field", "first, warm up")
    screen.page.fill(".noting textarea", "the one to beat")
    screen.page.click(".noting .main")
    until(lambda: row(screen, "known").locator(".tag").all_inner_texts() == ["first", "warm up"])
    kept = runs / "known" / "notes.json"
    assert json.loads(kept.read_text()) == {"text": "the one to beat", "tags": ["first", "warm up"]}
    row(screen, "known").locator("button.tag").first.click()
    assert ids(screen) == ["known"] and query(screen)["tag"] == ["first"]
    opened(screen, "/run?id=known")
    screen.page.click(".notes .edit")
    screen.page.fill(".noting textarea", "mine")
    kept.write_text(json.dumps({"text": "theirs", "tags": ["other"]}))
    screen.page.click(".noting .main")
    screen.page.wait_for_selector(".noting .error")
    assert "theirs" in screen.text(".noting .error")
    assert screen.page.input_value(".noting textarea") == "mine" and json.loads(kept.read_text())["text"] == "theirs"
    screen.page.click(".noting .error button >> nth=0")
    screen.page.click(".noting .main")
    until(lambda: screen.page.locator(".noting").count() == 0)
    assert json.loads(kept.read_text()) == {"text": "theirs\nmine", "tags": ["other", "first", "warm up"]}
    assert "theirs\nmine" in screen.text(".notes .text")
    assert all("status of 400" in error for error in screen.errors)
    screen.errors.clear()


def test_a_refresh_keeps_what_is_typed_the_focus_and_the_ticks(screen: Screen, runs: Path) -> None:
    screen.page.add_init_script(
        "delete Element.prototype.moveBefore"
    )  # as in browsers that move nodes without their focus
    opened(screen, "/runs?sort=updated&order=down")
    row(screen, "nan").locator("input").check()
    row(screen, "nan").locator(".edit").click()
    screen.page.fill(".noting textarea", "half a sen")
    before = ids(screen)
    shutil.copytree(runs / "sorts" / "first", runs / "sorts" / "second")
    time.sleep(0.02)
    (runs / "nan" / "metrics.jsonl").touch()
    until(lambda: len(ids(screen)) == 10 and ids(screen)[0] == "nan")
    assert ids(screen) != before and screen.page.input_value(".noting textarea") == "half a sen"
    assert screen.page.evaluate("document.activeElement.tagName") == "TEXTAREA"
    for name in ("known", "long", "died", "live"):
        (runs / name / "metrics.jsonl").touch()
    until(lambda: ids(screen).index("nan") >= 4)
    shutil.rmtree(runs / "sorts" / "second")
    assert screen.page.evaluate("document.activeElement.tagName") == "TEXTAREA", "though its row has moved"
    screen.page.keyboard.type("tence")
    screen.page.fill("#filter", "known")
    assert screen.page.input_value(".noting textarea") == "half a sentence", "what is edited is not filtered away"
    assert row(screen, "nan").locator("input").is_checked()
    screen.page.locator(".noting textarea").press("Escape")
    assert ids(screen) == ["known"] and not (runs / "nan" / "notes.json").exists()
    until(lambda: "of 9" in screen.text(".chosen"))
    screen.errors[:] = [error for error in screen.errors if "status of 400" not in error]  # a curve of what is gone


def answer(text: str, route: Any) -> None:
    route.fulfill(body=text, content_type="application/json")


def test_no_runs_and_a_thousand(screen: Screen) -> None:
    def told(rows: list[dict[str, Any]]) -> None:
        body = json.dumps({"root": "runs", "runs": rows})
        screen.page.unroute_all()
        for path, text in (("runs", body), ("spark*", "{}")):
            screen.page.route(f"**/api/view/{path}", partial(answer, text))
        opened(screen, "/runs?sort=id")

    told([])
    assert "ascent train lecture" in screen.text(".empty pre")
    one = screen.page.request.get(f"{screen.lab.base}/api/view/runs").json()["runs"][0]
    told([one | {"id": f"run-{i:04}", "seed": i} for i in range(1000)])
    assert 100 <= len(ids(screen)) <= 400 and "1\u2009000 runs" in screen.text(".chosen")
    screen.page.click('.runs thead button[title="Sort by Seed"]')
    screen.page.click('.runs thead button[title="Sort by Seed"]')
    assert ids(screen)[0] == "run-0999" and len(ids(screen)) <= 400, "no more are drawn than are seen"
    shown = len(ids(screen))
    screen.page.locator(".foot").scroll_into_view_if_needed()
    until(lambda: len(ids(screen)) > shown)
    screen.open("/")


# ---- a run ----------------------------------------------------------------------------------------------


def unfolded(screen: Screen) -> bool:
    """Open the first fold; while a page is still being built, a click may come too early."""
    return screen.page.locator(".fold").first.evaluate(
        "e => { if (!e.open) e.querySelector('summary').click(); return e.open; }"
    )


def test_a_run_says_what_became_of_it_and_draws_its_charts_in_order(screen: Screen, runs: Path) -> None:
    opened(screen, "/run?id=known")
    assert screen.text("h1") == "known" and "finished, 12 of 12 steps" in screen.text(".run-top")
    asked = screen.page.request.get(f"{screen.lab.base}/api/view/run?id=known").json()
    names = screen.page.locator("[data-chart]").evaluate_all("all => all.map(e => e.dataset.chart)")
    assert names == [chart["key"] for chart in asked["charts"]] and names[0] == "accuracy" and names[-1] == "loss"
    assert asked["words"][0] in screen.text(".result") and asked["objective"] in screen.text(".objective")
    until(lambda: screen.page.locator("[data-chart=accuracy] canvas").count() == 1)
    lines = read_lines(runs / "known" / "metrics.jsonl")
    screen.page.locator("[data-chart=entropy]").scroll_into_view_if_needed()
    until(lambda: says(screen, "entropy")["entropy"] == f"{lines[-1]['entropy']:.4g}")
    screen.page.click("[data-chart=entropy] summary")
    until(lambda: screen.page.locator("[data-chart=entropy] tbody td").count() == len(lines))
    cells = screen.page.locator("[data-chart=entropy] tbody td").all_inner_texts()
    assert [float(cell) for cell in cells] == [pytest.approx(line["entropy"], rel=1e-3) for line in lines]
    until(lambda: unfolded(screen) and "lecture" in screen.text(".fold .pairs"))


def test_one_cursor_for_all_charts_and_a_click_opens_the_completions(screen: Screen, runs: Path) -> None:
    lines = read_lines(runs / "known" / "metrics.jsonl")
    opened(screen, "/run?id=known&step=3")
    until(lambda: "step 3" in screen.text(".at"))
    until(lambda: says(screen, "reward")["sampled"] == f"{lines[3]['reward']:.4g}")
    plot = screen.page.locator("[data-chart=accuracy] .plot")
    plot.focus()
    plot.press("ArrowRight")
    until(lambda: says(screen, "reward")["sampled"] == f"{lines[4]['reward']:.4g}")
    box = screen.page.locator("[data-chart=reward] .u-over").bounding_box()
    screen.page.mouse.move(box["x"] + box["width"] * 7 / 11, box["y"] + 30)
    until(lambda: says(screen, "spread")["sampled"] == f"{lines[7]['reward_std']:.4g}")
    hairs = screen.page.locator(".hair:not([hidden])")
    at = "all => all.map(e => new DOMMatrix(e.style.transform).e / e.parentElement.clientWidth)"
    shares = hairs.evaluate_all(at)  # a plot is narrower where its numbers are long, as a fast machine's speed is
    assert len(shares) >= 3 and all(share == pytest.approx(7 / 11, abs=0.005) for share in shares)
    until(lambda: query(screen)["step"] == ["7"])
    screen.page.route("**/completions?*", lambda route: route.fulfill(body="<p>there", content_type="text/html"))
    screen.page.mouse.click(box["x"] + box["width"] * 7 / 11, box["y"] + 30)
    screen.page.wait_for_url("**/completions?*")
    assert query(screen) == {"id": ["known"], "step": ["8"]}, "the nearest step that was recorded"
    screen.page.go_back()
    screen.page.wait_for_selector("body[data-ready]")
    plot.focus()
    plot.press("Home")
    plot.press("Enter")
    screen.page.wait_for_url("**/completions?*")
    held = sorted(int(path.stem.split("_")[1]) for path in (runs / "known" / "held_out").iterdir())
    assert query(screen) == {"id": ["known"], "step": [str(held[0])], "set": ["held-out"]}, "what accuracy is of"


def test_responses_decoded_at_once_are_drawn_over_the_time_of_a_step(screen: Screen) -> None:
    opened(screen, "/run?id=occupancy")
    chart = screen.page.locator("[data-chart=running]")
    until(lambda: chart.count() == 1)
    chart.scroll_into_view_if_needed()
    until(lambda: "over the seconds of step 11" in chart.inner_text() and "tail: 5.5 of 51 s" in chart.inner_text())
    until(lambda: says(screen, "running") == {"running": "7.09", "half of the maximum": "256"})
    assert says(screen, "time")["tail of generate"] == "5.5"
    plot = screen.page.locator("[data-chart=accuracy] .plot")
    plot.focus()
    plot.press("Home")
    until(lambda: "over the seconds of step 0" in chart.inner_text() and "tail: 0 of 40 s" in chart.inner_text())
    chart.locator("summary").click()
    until(lambda: chart.locator("tbody tr").count() == 34)
    assert chart.locator("thead th").first.inner_text() == "second"
    found = serious(screen.page, "[data-chart=running]", None)
    assert not found, found


def test_a_long_run_is_drawn_in_means_and_exactly_when_zoomed(screen: Screen) -> None:
    opened(screen, "/run?id=long")
    chart = screen.page.locator("[data-chart=entropy]")
    chart.scroll_into_view_if_needed()
    assert "mean of 3 steps, band: smallest to largest" in chart.inner_text()
    box = chart.locator(".u-over").bounding_box()
    screen.page.mouse.move(box["x"] + box["width"] * 0.2, box["y"] + 40)
    screen.page.mouse.down()
    screen.page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + 50, steps=4)
    screen.page.mouse.up()
    until(lambda: "mean of" not in chart.inner_text() and query(screen)["from"])
    begin, end = int(query(screen)["from"][0]), int(query(screen)["to"][0])
    assert (begin, end) == (pytest.approx(300, abs=6), pytest.approx(450, abs=6))
    assert screen.page.input_value("#from") == str(begin)
    chart.locator("summary").click()
    until(lambda: chart.locator("tbody td").count() == end + 1 - begin)
    steps = [int(text) for text in chart.locator("tbody th").all_inner_texts()]
    cells = [float(text) for text in chart.locator("tbody td").all_inner_texts()]
    assert steps == list(range(begin, end + 1))
    assert cells == [pytest.approx(step / 7, rel=1e-3) for step in steps], "exact, every step"
    screen.page.reload()
    screen.page.wait_for_selector("body[data-ready]")
    assert screen.page.input_value("#to") == str(end) and "mean of" not in chart.inner_text()
    plot = chart.locator(".plot")
    plot.focus()
    plot.press("+")
    until(lambda: int(query(screen)["to"][0]) - int(query(screen)["from"][0]) < 0.6 * (end - begin))
    plot.press("-")
    chart.locator(".u-over").dblclick()
    until(lambda: "from" not in query(screen) and "mean of 3 steps" in chart.inner_text())
    screen.page.fill("#to", "100")
    screen.page.press("#to", "Enter")
    until(lambda: query(screen).get("to") == ["100"])
    screen.page.click("#out")
    until(lambda: "to" not in query(screen))
    assert screen.page.locator("#out").is_disabled()


def test_back_undoes_a_zoom_and_comes_back_to_where_one_was(screen: Screen) -> None:
    opened(screen, "/run?id=long&from=-5&to=9999")
    until(lambda: "from" not in query(screen))  # more than the run has is all of it
    opened(screen, "/run?id=long&from=5000&to=100")
    until(lambda: query(screen)["from"] == ["100"] and query(screen)["to"] == ["1499"])
    opened(screen, "/run?id=long")
    screen.page.fill("#to", "100")
    screen.page.press("#to", "Enter")
    until(lambda: query(screen).get("to") == ["100"])
    screen.page.fill("#from", "200")
    screen.page.press("#from", "Enter")
    until(lambda: (query(screen)["from"], query(screen)["to"]) == (["100"], ["200"]))  # in either order
    screen.page.go_back()
    until(lambda: (screen.page.input_value("#from"), screen.page.input_value("#to")) == ("0", "100"))
    screen.page.go_back()
    until(lambda: screen.page.input_value("#to") == str(STEPS - 1))
    until(lambda: screen.page.evaluate("(scrollTo(0, 700), scrollY)") == 700)
    screen.page.evaluate("location.assign('completions?id=long&step=4')")
    screen.page.wait_for_selector(".c-group")
    screen.page.go_back()
    screen.page.wait_for_selector("body[data-ready] [data-chart]")
    until(lambda: abs(screen.page.evaluate("scrollY") - 700) < 3)


def test_a_flag_of_one_step_is_seen_with_what_is_around_it(screen: Screen, runs: Path) -> None:
    alert = ALERT | {"step": 400, "evidence": {"metrics": {}, "steps": [400, 400]}}
    (runs / "long" / "events.jsonl").write_text(json.dumps(alert) + "\n")
    opened(screen, "/run?id=long")
    assert screen.text(".alert button") == "see step 400"
    screen.page.click(".alert button")
    until(lambda: (query(screen).get("from"), query(screen).get("to")) == (["355"], ["445"]))
    until(lambda: "step 400" in screen.text(".at"))
    until(lambda: screen.page.evaluate("scrollY") > 0)
    history = len(json.loads((runs / "long" / "run.json").read_text())["history"])
    assert screen.text(".fold:last-of-type summary").startswith(f"History {history} event"), "it counts what it lists"
    assert screen.page.locator(".history li").count() == history


def test_a_log_scale_for_what_is_not_below_zero(screen: Screen) -> None:
    opened(screen, "/run?id=long")
    canvas, picture = screen.page.locator("[data-chart=reward] canvas"), "e => e.toDataURL()"
    until(lambda: canvas.count() == 1)
    before = canvas.evaluate(picture)
    screen.page.check("#log")
    until(lambda: canvas.evaluate(picture) != before)
    assert query(screen)["log"] == ["1"] and "log scale" in screen.text("[data-chart=reward]")
    assert "log scale" not in screen.text("[data-chart=accuracy]"), "shares keep theirs"
    assert "not on a log scale" in screen.text("[data-chart=loss]")
    screen.page.locator("[data-chart=reward] .plot").press("l")
    until(lambda: "log" not in query(screen) and canvas.evaluate(picture) == before)
    powers = """async () => {
      const { powersOf, powerTicks } = await import("./static/curves.js");
      const line = (y) => [{ x: [0, 1, 2], y: Float64Array.from(y) }];
      const of = (y) => powersOf(line(y), [0, 2]);
      return [of([1, 0, 100]), of([1, -1, 2]), of([0, 0, 0]),
        powerTicks(-0.1, 2.1), powerTicks(-3, 16), powerTicks(0.01, 0.02).length];
    }"""
    found = screen.page.evaluate(powers)
    assert found[0] == [pytest.approx(-0.14), pytest.approx(2.14)] and found[1] is None and found[2] is None
    assert found[3] == [0, 1, 2] and found[4] == [0, 4, 8, 12, 16] and found[5] >= 2


SMOOTHED = """async () => {
  const { lineOf, smoothed } = await import("./static/curves.js");
  const run = { bucket: 1, x: [0, 1, 2, 3], metrics: { m: { mean: [0, 1, null, 1] } } };
  return [...smoothed(lineOf(run, "m", "", 0), 1)].map((v) => (Number.isNaN(v) ? null : v));
}"""


def test_smoothing_is_exponential_in_steps_and_leaves_the_raw_curve(screen: Screen) -> None:
    opened(screen, "/run?id=known")
    # weights e^-distance: (0·e^-1 + 1) / (e^-1 + 1), and over the gap (0·e^-3 + 1·e^-2 + 1) / (e^-3 + e^-2 + 1)
    second, last = 1 / (math.exp(-1) + 1), (math.exp(-2) + 1) / (math.exp(-3) + math.exp(-2) + 1)
    assert screen.page.evaluate(SMOOTHED) == [0, pytest.approx(second), None, pytest.approx(last)]
    canvas, picture = screen.page.locator("[data-chart=reward] canvas"), "e => e.toDataURL()"
    before, numbers = canvas.evaluate(picture), says(screen, "reward")
    screen.page.fill("#smooth", "2")
    until(lambda: canvas.evaluate(picture) != before)
    assert query(screen)["smooth"] == ["2"] and "2 steps" in screen.text(".smooth")
    assert says(screen, "reward") == numbers, "what is read out is what was measured"
    screen.page.reload()
    screen.page.wait_for_selector("body[data-ready]")
    assert "2 steps" in screen.text(".smooth")


def test_what_is_broken_is_said_and_the_rest_is_shown(screen: Screen) -> None:
    opened(screen, "/run?id=died")
    assert "died after 7 of 12 steps" in screen.text(".run-top") and "no JSON" in screen.text(".problems")
    assert screen.page.input_value("#to") == "6"
    opened(screen, "/run?id=bare")
    assert "metrics.jsonl is missing" in screen.text(".problems") and screen.page.locator("[data-chart]").count() == 0
    assert "No curves" in screen.text(".view")
    opened(screen, "/run?id=nan&step=5")
    assert "grad_norm was not finite in 2 steps" in screen.text(".problems")
    chart = screen.page.locator("[data-chart=grad]")
    chart.scroll_into_view_if_needed()
    until(lambda: says(screen, "grad")["norm"] == "nan")
    assert "2 not finite, marked at the edge" in chart.inner_text()
    opened(screen, "/run?id=nowhere")
    assert "there is no run nowhere" in screen.text(".error")
    assert all("status of 400" in error for error in screen.errors)
    screen.errors.clear()


def test_text_of_a_run_is_never_html(screen: Screen) -> None:
    opened(screen, "/runs")
    assert EVIL in row(screen, f"evil {EVIL}".replace('"', '\\"')).inner_text()
    until(lambda: screen.page.locator(".runs .spark path").count() >= 5)
    row(screen, f"evil {EVIL}").locator("a").first.click()
    screen.page.wait_for_selector("h1")
    screen.page.wait_for_selector("body[data-ready]")
    assert (
        screen.text("h1") == f"evil {EVIL}"
        and EVIL in screen.text(".notes .text")
        and EVIL in screen.text(".objective")
    )
    until(lambda: unfolded(screen) and EVIL in screen.text(".fold .pairs") and EVIL in screen.text(".facts"))
    alert = screen.page.locator(".alert")
    assert "entropy collapse" in alert.inner_text() and EVIL in alert.inner_text() and "1.1 → 0.2" in alert.inner_text()
    link = parse_qs(urlsplit(alert.locator("a").get_attribute("href")).query)
    assert link == {"id": [f"evil {EVIL}"], "step": ["8"], "show": ["wrong"], "q": ["1 2"]}
    alert.locator("button").click()
    until(lambda: query(screen).get("from") == ["4"] and query(screen)["to"] == ["9"])
    assert screen.page.locator("main img, main script").count() == 0 and screen.page.title() != "1"


def test_a_run_grows_while_its_page_is_open_and_then_it_rests(screen: Screen, runs: Path) -> None:
    folder = runs / "live"
    lines = read_lines(folder / "metrics.jsonl")

    def alive() -> None:
        (folder / ".alive").write_text(json.dumps({"host": "elsewhere", "pid": 1, "time": time.time()}))

    alive()
    opened(screen, "/run?id=live")
    assert "running on elsewhere" in screen.text(".run-top")
    plots = screen.page.evaluate_handle("[...document.querySelectorAll('[data-chart] canvas')]")
    with open(folder / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps(lines[i % 12] | {"step": i, "reward": 100 + i}) + "\n" for i in range(12, 20))
    until(lambda: says(screen, "reward")["sampled"] == "119")
    assert screen.page.input_value("#to") == "19"
    assert screen.page.evaluate("all => all.every((e) => e.isConnected)", plots), "the same canvases"
    changed(folder / "run.json", status="finished")
    until(lambda: "finished" in screen.text(".title-row"))
    screen.page.wait_for_timeout(300)
    screen.requests.clear()
    screen.page.wait_for_timeout(2500)
    assert not screen.requests


@pytest.mark.smoke
def test_nothing_serious_for_axe_and_nothing_wider_than_a_phone(screen: Screen, runs: Path) -> None:
    for path in ("/runs", "/run?id=evil%20" + "".join(f"%{byte:02x}" for byte in EVIL.encode())):
        screen.page.set_viewport_size({"width": 1280, "height": 900})
        opened(screen, path)
        if path == "/runs":
            row(screen, "nan").locator(".edit").click()
            screen.page.wait_for_selector(".noting textarea")
        else:
            screen.page.click(".behind-chart summary >> nth=0")
            alike = "all => all.slice(2).forEach((e) => (e.style.display = 'none'))"
            screen.page.locator("[data-chart]").evaluate_all(alike)  # the others have the same parts
        for theme, options in (("light", None), ("dark", {"runOnly": ["color-contrast"]})):
            screen.page.emulate_media(color_scheme=theme)
            found = serious(screen.page, "main", options)
            assert not found, (path, theme, found)
        screen.page.emulate_media(color_scheme="light")
        screen.page.set_viewport_size({"width": 360, "height": 740})
        assert screen.page.evaluate("document.documentElement.scrollWidth") <= 360, path
    screen.page.set_viewport_size({"width": 1280, "height": 900})
    for path in ("/", "/figure/clip"):
        screen.open(path)
        assert screen.page.locator("a.to-runs").get_attribute("href") == urlsplit(screen.lab.base).path + "/runs"
