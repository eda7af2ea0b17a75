"""Runs compared in a real browser: overlay, toggles, tables, files, a prompt side by side; and a report from a file."""

from __future__ import annotations

import csv
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

import pytest

import ascent
from ascent.lab.report.run_report import report_of
from ascent.runs.confidence_intervals import mean_and_half_width
from ascent.runs.run_list import RunEntry
from ascent.runs.untrusted_files import read_lines
from tests.browser import PATIENCE, Lab, Screen, chromium, serious, until

pytestmark = [pytest.mark.slow, pytest.mark.browser]
EVIL = "<img src=x onerror=document.title=1><script>document.title=1</script>"
ALL = "id=cmp/grpo-s0&id=cmp/grpo-s1&id=cmp/rloo-s0&id=cmp/rloo-s1"
STEPS = 5
LONG = 3000


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two settings under two seeds; and one with evil in its names, its settings and its responses."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    chromium()
    root = tmp_path_factory.mktemp("compare") / "runs"
    for row in ("grpo", "rloo"):
        for seed in (0, 1):
            out = root / "cmp" / f"{row}-s{seed}"
            ascent.train("lecture", algorithm=row, steps=STEPS, seed=seed, record_every=1, show=False, out=out)
    evil = Path(shutil.copytree(root / "cmp/grpo-s0", root / f"evil {EVIL.replace('/', '')}"))
    for name, changes in (("run.json", {"label": EVIL}), ("config.json", {EVIL: EVIL, "seed": 9})):
        (evil / name).write_text(json.dumps(json.loads((evil / name).read_text()) | changes))
    for path in evil.glob("*/step_*.parquet"):
        rows = [row | {"response_text": EVIL} for row in pq.read_table(path).to_pylist()]
        pq.write_table(pa.Table.from_pylist(rows), path)
    short = Path(shutil.copytree(root / "cmp/grpo-s0", root / "short"))
    name = "a setting whose name goes on and on and on"
    for file, more in (("run.json", {"label": name, "status": "running"}), ("config.json", {"prompts": 7})):
        (short / file).write_text(json.dumps(json.loads((short / file).read_text()) | more))
    lines = (short / "metrics.jsonl").read_text().splitlines(keepends=True)
    (short / "metrics.jsonl").write_text("".join(lines[:2]))
    for seed in (0, 1):
        about = {"task": "sort", "label": "long", "seed": seed, "status": "finished", "result": None, "history": []}
        (root / f"long{seed}").mkdir()
        for file, told in (("run.json", about), ("config.json", {"seed": seed, "task": "sort", "loss": "long"})):
            (root / f"long{seed}" / file).write_text(json.dumps(told))
        lines = [json.dumps(long_line(step, seed)) + "\n" for step in range(LONG)]
        (root / f"long{seed}/metrics.jsonl").write_text("".join(lines))
    return root


def long_line(step: int, seed: int) -> dict[str, Any]:
    return {"step": step, "reward": (step % 7 + seed) / 10, "time/step": 0.001}


@pytest.fixture(scope="module")
def shared(browser: Any, lab: Lab) -> Iterator[Screen]:
    context = browser.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    context.set_default_timeout(1000 * PATIENCE)
    yield Screen(context.new_page(), lab).enter()
    context.close()


@pytest.fixture
def screen(shared: Screen) -> Iterator[Screen]:
    """No script fails, and all that is asked for is on this machine."""
    shared.requests.clear()
    shared.errors.clear()
    yield shared
    assert {urlsplit(url).netloc for url in shared.requests if "://" in url} <= {f"127.0.0.1:{shared.lab.port}"}
    assert not shared.errors


def opened(screen: Screen, query: str) -> Screen:
    screen.open(f"/compare?{query}")
    screen.page.wait_for_selector("body[data-ready]")
    return settled(screen)


def settled(screen: Screen) -> Screen:
    """All charts and tables are there."""
    until(
        lambda: screen.page.evaluate("Boolean(window.lab?.whole) && !!document.querySelector('.ends tbody tr, .error')")
    )
    screen.page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return screen


def lines(screen: Screen, metric: str) -> list[tuple[str, str]]:
    """The lines of a chart, each with the number beside it."""
    place = screen.page.locator(f'[data-chart="{metric}"]')
    place.scroll_into_view_if_needed()
    until(lambda: place.locator("canvas").count() == 1 and place.locator("output").first.inner_text())
    found = place.locator("figcaption li").evaluate_all(
        "all => all.map(e => [e.querySelector('span').textContent, e.querySelector('output').textContent])"
    )
    return [(label, value) for label, value in found]


def last(runs: Path, name: str, metric: str) -> float:
    return next(x[metric] for x in reversed(read_lines(runs / name / "metrics.jsonl")) if x[metric] is not None)


def ink(screen: Screen, metric: str) -> int:
    """How many pixels of a chart are painted: more with a band than without."""
    place = screen.page.locator(f'[data-chart="{metric}"] canvas')
    return place.evaluate(
        "e => e.getContext('2d').getImageData(0, 0, e.width, e.height).data.filter((v, i) => i % 4 === 3 && v).length"
    )


def test_curves_one_upon_another_with_seeds_as_a_band_and_one_by_one(screen: Screen, runs: Path) -> None:
    opened(screen, ALL)
    titles = screen.page.locator(".chosen b").all_inner_texts()
    assert titles == ["grpo × 2 seeds", "rloo × 2 seeds"]
    for label, row in zip(("grpo, 2 seeds", "rloo, 2 seeds"), ("grpo", "rloo"), strict=True):
        mean = sum(last(runs, f"cmp/{row}-s{seed}", "entropy") for seed in (0, 1)) / 2
        assert dict(lines(screen, "entropy"))[label] == f"{float(f'{mean:.4g}'):g}"
    assert "95 % interval" in screen.text('[data-chart="entropy"]')
    banded = ink(screen, "entropy")
    screen.page.get_by_role("button", name="one by one").click()
    until(lambda: len(lines(screen, "entropy")) == 4)
    assert [label for label, _ in lines(screen, "entropy")][::3] == ["grpo: grpo-s0", "rloo: rloo-s1"]
    until(lambda: ink(screen, "entropy") < banded)
    assert "seeds=lines" in screen.query()
    screen.page.reload()
    settled(screen)
    assert len(lines(screen, "entropy")) == 4
    colours = screen.page.locator('[data-chart="entropy"] .swatch').evaluate_all("all => all.map(e => e.classList[1])")
    assert colours == ["s0", "s0", "s1", "s1"]


def test_a_zoom_shows_single_steps_and_files_hold_what_is_seen(screen: Screen) -> None:
    """Over steps and, in parts of a second, over time; kept in the address; zoomed out it is as it was."""
    opened(screen, "id=long0&id=long1&metric=reward")
    chart, note = screen.page.locator('[data-chart="reward"]'), '[data-chart="reward"] .behind-chart p'
    assert "a point is the mean of 5 steps: zoom in to see each" in screen.text(note)
    dragged(screen, 0.4, 0.44)
    assert "mean of" not in screen.text(note) and "from=" in screen.query()
    begin, end = (int(screen.query().split(f"{name}=")[1].split("&")[0]) for name in ("from", "to"))
    assert 1150 < begin < 1250 < end < 1400
    href = screen.page.get_by_role("link", name="curves as CSV").get_attribute("href")
    saved = list(csv.DictReader(io.StringIO(screen.page.request.get(urljoin(screen.lab.base, href)).text())))
    assert [float(row["step"]) for row in saved] == list(range(begin, end + 1))
    assert [float(row["mean"]) for row in saved] == pytest.approx([(t % 7 + 0.5) / 10 for t in range(begin, end + 1)])
    screen.page.reload()
    assert "mean of" not in settled(screen).text(note) and f"from={begin}&to={end}" in screen.query()
    screen.page.get_by_role("button", name="Zoom out").click()
    assert "mean of 5 steps" in settled(screen).text(note) and "from=" not in screen.query()
    screen.page.select_option("#x", "seconds")
    until(lambda: "over seconds" in chart.inner_text() and "mean of 5" in settled(screen).text(note))
    dragged(screen, 0.5, 0.53)
    query = screen.query()
    assert "mean of" not in screen.text(note) and ("from=1.4" in query or "from=1.5" in query), query


def dragged(screen: Screen, begin: float, end: float) -> None:
    """Over a part of the first chart."""
    screen.page.locator(".u-over").first.scroll_into_view_if_needed()
    box = screen.page.locator(".u-over").first.bounding_box()
    screen.page.mouse.move(box["x"] + begin * box["width"], box["y"] + 50)
    screen.page.mouse.down()
    screen.page.mouse.move(box["x"] + end * box["width"], box["y"] + 55, steps=3)
    screen.page.mouse.up()
    settled(screen)


def test_axis_charts_and_runs_are_chosen_and_kept_in_the_address(screen: Screen) -> None:
    opened(screen, ALL)
    screen.page.select_option("#x", "samples")
    settled(screen)
    assert "over samples" in screen.text('[data-chart="entropy"]') and "x=samples" in screen.query()
    screen.page.locator(".chips summary").click()
    screen.page.locator('.chips [aria-label="Exactly right"] button', has_text="sampled").click()
    screen.page.locator(".chips button", has_text="Entropy").click()
    until(lambda: screen.page.locator('[data-chart="accuracy"] canvas').count() == 1)
    assert screen.page.locator('[data-chart="entropy"]').count() == 0 and "metric=accuracy" in screen.query()
    screen.page.get_by_label("Take cmp/rloo-s1 away").click()
    until(lambda: screen.page.locator(".chosen b").all_inner_texts() == ["grpo × 2 seeds", "rloo"])
    settled(screen)
    assert "one seed: no band" in screen.text('[data-chart="reward"]') and "rloo-s1" not in screen.query()
    assert "One seed has no interval: rloo." in screen.text(".ends")
    screen.page.get_by_role("button", name="Add a run").click()
    until(lambda: screen.page.locator("#other-runs option").count() == 5)
    screen.page.locator("#add-run").fill("cmp/rloo-s1")
    screen.page.keyboard.press("Enter")
    until(lambda: screen.page.locator(".chosen b").all_inner_texts() == ["grpo × 2 seeds", "rloo × 2 seeds"])
    screen.page.go_back()
    until(lambda: screen.page.locator(".chosen b").all_inner_texts() == ["grpo × 2 seeds", "rloo"])


def test_the_tables_say_what_the_files_hold(screen: Screen, runs: Path) -> None:
    opened(screen, ALL)
    heads = screen.page.locator(".ends thead th").all_inner_texts()
    cells = screen.page.locator(".ends tbody tr").nth(1).locator("td").all_inner_texts()
    said = dict(zip(heads[1:], cells, strict=True))["entropy"].split("\n")
    ends = {row: [last(runs, f"cmp/{row}-s{seed}", "entropy") for seed in (0, 1)] for row in ("grpo", "rloo")}
    gap, _ = mean_and_half_width([b - a for a, b in zip(ends["grpo"], ends["rloo"], strict=True)])
    number = float(said[1].replace("−", "-").split(" ")[0])
    digits = len(said[1].split(" ")[0].partition(".")[2])
    assert number == pytest.approx(gap, abs=0.51 * 10**-digits) and "±" in said[0] and "±" in said[1]
    rows = screen.page.locator(".differences tbody tr").evaluate_all(
        "all => all.map(e => [...e.children].map(c => c.textContent.trim()))"
    )
    assert ["seed", "0", "1", "0", "1"] in rows and ["advantage", "normalized", "leave-one-out"] in rows
    assert ["advantage.ddof", "1", "–"] in rows and not [row for row in rows if row[0] == "steps"]


def test_differences_are_to_the_setting_that_is_chosen_and_what_spoils_them_is_said(screen: Screen) -> None:
    opened(screen, f"{ALL}&id=short")
    gaps = ".ends tbody tr >> nth={} >> .gap"
    assert screen.page.locator(gaps.format(0)).count() == 0 < screen.page.locator(gaps.format(1)).count()
    said = screen.text(".cautions")
    assert "short: died before its end." in said and f"Steps done differ: grpo {STEPS}" in said
    assert screen.page.locator(".member .badge").all_inner_texts() == ["✓\nfinished"] * 4 + ["✕\ndied"]
    screen.page.select_option("#base", "cmp/rloo-s0")
    until(lambda: screen.page.locator(gaps.format(1)).count() == 0 < screen.page.locator(gaps.format(0)).count())
    assert "base=cmp" in screen.query() and "difference to rloo" in screen.text(".ends > .note")
    screen.page.reload()
    settled(screen)
    assert screen.page.locator("#base").input_value() == "cmp/rloo-s0"
    assert screen.page.locator(gaps.format(1)).count() == 0
    assert "base=cmp%2Frloo-s0" in str(screen.page.locator(".ends a.file").get_attribute("href"))


def test_long_names_are_short_and_no_number_stands_for_what_is_out_of_sight(screen: Screen) -> None:
    opened(screen, f"{ALL}&id=short")
    names = [label for label, _ in lines(screen, "entropy")]
    assert names == ["grpo, 2 seeds", "rloo, 2 seeds", "3: a setting whose name goes …, 1 seed"]
    assert screen.page.locator(".chosen b").all_inner_texts()[2] == "3: a setting whose name goes on and on and on"
    item = screen.page.locator('[data-chart="entropy"] figcaption li').nth(2)
    until(lambda: item.get_attribute("title") == "a setting whose name goes on and on and on")
    assert item.locator("output").inner_text() != "–"
    opened(screen, f"{ALL}&id=short&from=3&to={STEPS - 1}")
    values = [value for _, value in lines(screen, "entropy")]
    assert values[2] == "–" and "–" not in values[:2]


def test_bands_and_smoothing_say_what_they_are(screen: Screen) -> None:
    opened(screen, ALL)
    assert "drawn down to 0" in screen.text('[data-chart="entropy"]')
    assert "drawn within 0 and 1" in screen.text('[data-chart="eval/accuracy"]')
    assert "drawn" not in screen.text('[data-chart="reward"]')
    plain = ink(screen, "entropy") if lines(screen, "entropy") else 0
    screen.page.locator("#smooth").fill("1")
    until(lambda: "smooth=1" in screen.query() and ink(screen, "entropy") != plain)
    screen.page.reload()
    settled(screen)
    assert screen.page.locator("#smooth").input_value() == "1"
    screen.page.select_option("#x", "samples")
    settled(screen)
    assert screen.page.locator("#smooth").is_disabled() and "over steps only" in screen.text(".smooth")


def sampled(screen: Screen, place: int) -> str:
    """Choose one of the prompts whose sampled responses were recorded; its key."""
    options = screen.page.locator("#prompt optgroup[label=sampled] option")
    until(lambda: options.count() > place)
    value = options.nth(place).get_attribute("value")
    screen.page.select_option("#prompt", value)
    return str(value).split(" ")[1]


def test_another_seed_is_chosen_side_by_side(screen: Screen) -> None:
    opened(screen, ALL)
    screen.page.locator(".beside").scroll_into_view_if_needed()
    columns = screen.page.locator(".columns article")
    sampled(screen, 0)
    until(lambda: columns.count() == 2 and "(standard deviation)" in columns.nth(0).inner_text())
    assert "±" not in columns.nth(0).inner_text()
    assert columns.nth(0).locator("select").input_value() == "cmp/grpo-s0"
    columns.nth(0).locator("select").select_option("cmp/grpo-s1")
    until(lambda: "of=cmp%2Fgrpo-s1" in screen.query())
    screen.page.reload()
    settled(screen)
    screen.page.locator(".beside").scroll_into_view_if_needed()
    until(lambda: columns.count() == 2 and columns.nth(0).locator("select").input_value() == "cmp/grpo-s1")


def test_the_picture_and_the_tables_are_saved(screen: Screen, runs: Path) -> None:
    opened(screen, f"{ALL}&metric=reward&metric=entropy")
    wanted = [
        (".files a >> text=PNG", "compare-4-runs.png", b"\x89PNG"),
        (".files a >> text=SVG", "compare-4-runs.svg", b"<?xml"),
        (".files a >> text=curves", "compare-curves.csv", b"metric,setting"),
        (".ends a.file", "compare-finals.csv", b"setting,measure"),
        (".differences a.file", "compare-settings.csv", b"setting,cmp/grpo-s0"),
    ]
    for selector, name, begins in wanted:
        with screen.page.expect_download() as coming:
            screen.page.locator(selector).click()
        assert coming.value.suggested_filename == name
        data = Path(coming.value.path()).read_bytes()
        assert data.startswith(begins) and len(data) > 100, name
        if name == "compare-curves.csv":
            rows = list(csv.DictReader(io.StringIO(data.decode())))
            own = [r for r in rows if r["metric"] == "reward" and r["setting"] == "rloo"]
            assert [float(r["step"]) for r in own] == list(range(STEPS))
            values = [read_lines(runs / f"cmp/rloo-s{s}/metrics.jsonl")[-1]["reward"] for s in (0, 1)]
            assert float(own[-1]["mean"]) == pytest.approx(sum(values) / 2, rel=1e-5)


def test_one_prompt_side_by_side_and_evil_is_text(screen: Screen, runs: Path) -> None:
    name = f"evil {EVIL.replace('/', '')}"
    query = f"id=cmp/grpo-s0&id={name.replace(' ', '%20').replace('<', '%3C').replace('=', '%3D')}"
    opened(screen, query)
    screen.page.locator(".beside").scroll_into_view_if_needed()
    until(lambda: screen.page.locator(".columns article pre").count() >= 2)
    columns = screen.page.locator(".columns article")
    assert columns.count() == 2 and EVIL in columns.nth(1).inner_text() and EVIL not in columns.nth(0).inner_text()
    assert f"step {STEPS - 1}" in columns.nth(0).inner_text()
    sampled(screen, 0)
    until(lambda: "Best" in columns.nth(0).inner_text() and EVIL in columns.nth(1).inner_text())
    screen.page.locator("#at").fill("0")
    until(lambda: "step 0" in columns.nth(0).inner_text() and "at=0" in screen.query())
    second = sampled(screen, 1)
    until(lambda: f"key={second}" in screen.query())
    assert (
        screen.page.title() == "Compare runs · Ascent lab" and screen.page.locator("main img, main script").count() == 0
    )
    assert EVIL in screen.text(".differences")


def test_what_cannot_be_compared_is_said(screen: Screen) -> None:
    screen.open("/compare")
    until(lambda: "No run is chosen" in screen.text("main"))
    screen.open("/compare?id=nope")
    until(lambda: "there is no run nope" in screen.text(".error"))
    screen.open("/compare?" + "&".join(f"id=r{i}" for i in range(51)))
    until(lambda: "at most 50" in screen.text(".error"))
    assert all("400" in error for error in screen.errors)
    screen.errors.clear()


ALIKE = "all => all.slice(2).forEach((e) => (e.style.display = 'none'))"
"""Axe looks at every element: of parts that are alike, two are enough."""


@pytest.mark.smoke
def test_nothing_serious_for_axe_and_nothing_wider_than_a_phone(screen: Screen) -> None:
    opened(screen, ALL)
    screen.page.locator(".chips summary").click()
    screen.page.locator(".beside").scroll_into_view_if_needed()
    until(lambda: screen.page.locator(".columns article pre").count() >= 2)
    screen.page.locator("[data-chart]").evaluate_all(ALIKE)
    for theme, options in (("light", None), ("dark", {"runOnly": ["color-contrast"]})):
        screen.page.emulate_media(color_scheme=theme, reduced_motion="reduce")
        found = serious(screen.page, "#main", options)
        assert not found, (theme, found)
    screen.page.set_viewport_size({"width": 390, "height": 844})
    assert screen.page.evaluate("document.documentElement.scrollWidth") <= 390
    screen.page.set_viewport_size({"width": 1280, "height": 900})


# ---- the report, from a file ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def report(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(report_of(RunEntry("grpo", runs / "cmp/grpo-s0", "ascent")))
    return path


@pytest.mark.smoke
def test_nothing_in_a_report_is_hard_to_read(browser: Any, report: Path) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(report.as_uri())
    page.locator("figure summary").first.click()
    page.get_by_label("advantage").check()
    page.locator("figure").evaluate_all(ALIKE)
    for theme, options in (("light", None), ("dark", {"runOnly": ["color-contrast"]})):
        page.emulate_media(color_scheme=theme)
        found = serious(page, None, options)
        assert not found, (theme, found)
    page.close()


def test_a_report_opens_from_a_file_without_javascript(browser: Any, report: Path, tmp_path: Path) -> None:
    asked: list[str] = []
    for scripts in (False, True):
        context = browser.new_context(java_script_enabled=scripts, viewport={"width": 1280, "height": 900})
        page, errors = context.new_page(), list[str]()
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda said, errors=errors: errors.append(said.text) if said.type == "error" else None)
        page.goto(report.as_uri())
        assert page.locator("h1").inner_text().startswith("lecture, grpo")
        charts = page.locator("svg.chart")
        assert charts.count() >= 10 and charts.first.bounding_box()["height"] > 100
        assert page.locator("figure table").first.is_visible() is False
        page.locator("figure summary").first.click()
        assert page.locator("figure table").first.is_visible()
        if scripts:
            shade = "e => getComputedStyle(e).backgroundColor + getComputedStyle(e).textDecorationLine"
            token = page.locator(".tokens span[class*=l]").first
            before = token.evaluate(shade)
            page.get_by_label("log-prob").check()
            assert token.evaluate(shade) != before and "underline" in token.evaluate(shade)
            page.get_by_label("nothing").check()
            assert token.evaluate(shade) == "rgba(0, 0, 0, 0)none"
            page.get_by_label("advantage").check()
            page.set_viewport_size({"width": 390, "height": 844})
            assert page.evaluate("document.documentElement.scrollWidth") <= 390
        else:
            page.get_by_label("log-prob").check()
            assert page.get_by_label("log-prob").is_checked()
            page.pdf(path=tmp_path / "report.pdf")
        assert not errors
        context.close()
    assert set(asked) == {report.as_uri()}, "it loads itself alone"
    assert (tmp_path / "report.pdf").stat().st_size > 20_000
