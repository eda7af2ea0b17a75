"""The lab in a real browser: every control, the numbers, trainings, keys, themes, and what must not happen."""

from __future__ import annotations

import http.server
import json
import os
import re
import shlex
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from ascent.cli import main as cli
from ascent.lab.figures import all_figures
from ascent.lab.figures.training.figure import SIDES, metrics_in_words
from ascent.lab.pages.lesson.page import BOUND, read_lessons, render
from ascent.runs.untrusted_files import read_lines
from tests.browser import PATIENCE, Lab, Screen, chromium, contrast, luminance, serious, until

pytestmark = [pytest.mark.slow, pytest.mark.browser]
FIGURES = all_figures()
PAGES = ["/", *(f"/figure/{name}" for name in FIGURES), "/lesson/which-method"]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, warm_python: Any) -> Iterator[Lab]:
    chromium()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ascent.lab.figures.training.trainings.sys", warm_python)
        found = Lab(tmp_path_factory.mktemp("lab") / "runs")
        yield found
    found.stop_trainings()
    found.kill()


@pytest.fixture(scope="module")
def known(lab: Lab) -> str:
    """The name of a short run in the lab's folder, made without the page."""
    import ascent

    return ascent.train("lecture", steps=6, epochs=2, record_every=1, show=False, out=lab.runs / "known").folder.name


def opened(browser: Any, lab: Lab, **options: Any) -> Screen:
    size = {"width": 1280, "height": 900}
    context = browser.new_context(**{"viewport": size, "permissions": ["clipboard-read", "clipboard-write"]} | options)
    context.set_default_timeout(1000 * PATIENCE)
    return Screen(context.new_page(), lab).enter()


@pytest.fixture(scope="module")
def shared(browser: Any, lab: Lab) -> Iterator[Screen]:
    screen = opened(browser, lab)
    yield screen
    screen.page.context.close()


@pytest.fixture
def screen(shared: Screen) -> Iterator[Screen]:
    """A page with a clean record; whatever it asked for stayed on this machine, and no script failed."""
    shared.requests.clear()
    shared.errors.clear()
    yield shared
    hosts = {urlsplit(url).netloc for url in shared.requests if not url.startswith(("data:", "blob:"))}
    assert hosts <= {f"127.0.0.1:{shared.lab.port}"}
    assert not [error for error in shared.errors if "net::ERR" not in error], "only a killed server may be missed"


# ---- figure 4 -------------------------------------------------------------------------------------------


def test_the_clip(screen: Screen) -> None:
    screen.open("/figure/clip")
    assert screen.numbers()["objective"] == "0.600"
    assert "min(0.675, 0.600)" in screen.text(".numbers")
    screen.set("A", -0.5).set("ratio", 0.65)
    assert screen.numbers()["objective"] == "−0.400"
    assert screen.numbers()["gradient by log π"] == "0.000"
    assert screen.text("#zone").startswith("Dead zone: below 0.8")
    assert screen.query() == "?A=-0.5&ratio=0.65"
    screen.set("low", 0.4)
    assert screen.text("#zone").startswith("Alive") and screen.numbers()["objective"] == "−0.325"
    screen.set("A", 0.5).set("ratio", 1.35).set("high", 0.3)
    assert screen.numbers()["objective"] == "0.650"
    before = screen.numbers()["clipped in that batch"]
    assert screen.set("high", 0.02).numbers()["clipped in that batch"] != before
    assert "high=0.02" in screen.query()
    screen.page.reload()
    screen.page.wait_for_selector("body[data-ready]")
    assert (screen.state("A"), screen.state("high"), screen.state("low")) == (0.5, 0.02, 0.4)


def test_the_clip_is_dragged_and_the_text_follows(screen: Screen) -> None:
    screen.open("/figure/clip")
    width = screen.page.locator("svg.chart").first.bounding_box()["width"]
    screen.drag("ratio", width * 0.1, 0)
    assert screen.state("ratio") > 1.45
    screen.drag("A", 0, 60)
    assert screen.state("A") < 0.2
    screen.drag("high", width * 0.1, 0)
    assert screen.state("high") > 0.3
    screen.drag("low", -width * 0.1, 0)
    assert screen.state("low") > 0.3
    bound = screen.page.locator("[data-bind]")
    assert bound.count() > 0
    for i in range(bound.count()):
        key = bound.nth(i).get_attribute("data-bind")
        assert bound.nth(i).inner_text() == screen.page.evaluate("(k) => lab.look.texts[k]", key)
    link = screen.page.locator(".predict a.set").first
    link.click()
    screen.settled()
    for pair in link.get_attribute("data-set").split("&"):
        name, value = pair.split("=")
        assert screen.state(name) == float(value)


# ---- figure 3 -------------------------------------------------------------------------------------------


def test_baselines(screen: Screen) -> None:
    screen.open("/figure/baselines")
    std, push, variance = "std of the weights R − b", "expected pushes", "variance of the push"
    assert (screen.numbers()[std], screen.numbers()[push]) == ("5.323", "0.50, −0.50")
    screen.page.click("[data-preset=value]")
    screen.settled()
    assert (screen.numbers()[std], screen.numbers()[push]) == ("1.155", "0.50, −0.50")
    assert (screen.state("b1"), screen.state("b2")) == (10, 1)
    screen.page.click("[data-preset=far]")
    screen.settled()
    assert (screen.numbers()[std], screen.numbers()[variance]) == ("11.605", "50.00")
    assert screen.numbers()[push] == "0.50, −0.50"
    arrows = screen.page.locator(".arrow.a line").evaluate_all("all => all.map(e => e.outerHTML)")
    screen.drag("b1", -150, 0).drag("b2", 100, 0)
    assert screen.state("b1") < 15 and screen.state("b2") > -6
    assert screen.page.locator(".arrow.a line").evaluate_all("all => all.map(e => e.outerHTML)") != arrows
    assert screen.numbers()[push] == "0.50, −0.50"
    screen.set("p", 0.8)
    assert screen.numbers()[push] == "0.32, −0.32"
    screen.page.click("[data-preset=optimal]")
    screen.settled()
    assert float(screen.numbers()[variance]) < 0.1
    screen.page.click("[data-preset=none]")
    screen.settled()
    assert screen.numbers()[std] == "5.323"
    screen.set("b1", 5).set("b2", 5)
    assert (screen.state("b1"), screen.state("b2")) == (5, 5) and screen.query() == "?b1=5&b2=5&p=0.8"


# ---- figure 2 -------------------------------------------------------------------------------------------


def test_variance(screen: Screen) -> None:
    screen.open("/figure/variance")

    def dots() -> list[str]:
        return screen.page.locator("svg.chart .estimate").evaluate_all("all => all.map(e => e.outerHTML)")

    def axis() -> list[str]:
        return screen.page.locator("svg.chart .tick").all_inner_texts()

    first, ticks = dots(), axis()
    assert len(first) == 200
    exact = screen.numbers()["variance, exact"]
    screen.page.click("#again")
    screen.settled()
    again = dots()
    assert again != first and screen.numbers()["variance, exact"] == exact
    assert screen.press("Space").state("seed") == 2
    screen.set("seed", 0)
    assert dots() == first
    screen.set("samples", 16)
    assert float(screen.numbers()["variance, exact"]) < float(exact) and axis() == ticks
    screen.set("samples", 2).set("rewarded", 1)
    assert (screen.numbers()["variance, exact"], screen.numbers()["variance without a baseline"]) == ("28.16", "15.38")
    for name, _ in FIGURES["variance"].controls[2].options:
        screen.set("baseline", name)
        assert (
            screen.numbers()["variance, exact"]
            == FIGURES["variance"].look(f"samples=2&rewarded=1&baseline={name}")["texts"]["variance"]
        )
    screen.set("baseline", "optimal-baseline").set("samples", 8)
    assert screen.numbers()["variance, exact"] == "not enumerated"
    assert "too many groups" in screen.text(".words")


# ---- figure 1 -------------------------------------------------------------------------------------------


def test_trajectory(screen: Screen) -> None:
    screen.open("/figure/trajectory")
    reward, total = "reward", "running sum = log π(response)"
    assert screen.numbers()[reward] == "not yet" and screen.page.locator(".bar").count() == 5
    screen.page.click("#step")
    screen.settled()
    assert screen.page.locator(".token.there").count() == 1 and screen.numbers()[reward] == "not yet"
    one = screen.numbers()[total]
    screen.press("ArrowRight")
    assert screen.page.locator(".token.there").count() == 2 and screen.numbers()[total] != one
    screen.page.click("#back")
    screen.settled()
    assert screen.numbers()[total] == one
    screen.page.click("#play")
    until(lambda: screen.page.evaluate("lab.state.step === 2"))
    screen.press("Space")
    held = screen.state("step")
    time.sleep(1.1)
    assert screen.state("step") == held and screen.text("#play") == "Play"
    screen.press("Space")
    until(lambda: screen.page.evaluate("lab.state.step === 4"))
    screen.settled()
    assert screen.numbers()[reward] == "2 of 4" and screen.page.locator(".group li").count() == 6
    advantages = screen.page.locator(".advantage b").all_inner_texts()
    assert advantages == ["−1.33"] * 4
    screen.set("advantage", "gae")
    assert len(set(screen.page.locator(".advantage b").all_inner_texts())) == 4
    gae = screen.page.locator(".advantage b").all_inner_texts()
    assert screen.set("lam", 0.2).page.locator(".advantage b").all_inner_texts() != gae
    tokens = screen.page.locator(".token.there").all_inner_texts()
    screen.set("seed", 7).set("temperature", 3)
    assert screen.page.locator(".token.there").all_inner_texts() != tokens
    screen.set("prompt", "2")
    assert screen.page.locator(".token.prompt").all_inner_texts() == ["4", "0", "2", "2"]
    screen.set("step", 1)
    assert screen.page.locator(".token.there").count() == 1
    assert "step=1" in screen.query() and "advantage=gae" in screen.query()
    screen.press("r")
    assert screen.state("step") == 0 and screen.query() == ""


def test_a_trajectory_of_two_turns(screen: Screen) -> None:
    """The environment's answer is drawn apart, is paid with, and has no advantage; each turn has its own."""
    screen.open("/figure/trajectory?prompt=4&advantage=by-turn&seed=3")

    def inside(selector: str) -> list[str]:
        return list(screen.page.locator(selector).all_inner_texts())

    def captions() -> list[str]:
        return inside(".block > .caption:first-child")

    assert captions() == ["prompt", "turn 1: swap at", "the environment answers", "turn 2: swap at"]
    assert screen.numbers()["reward"] == "0 so far" and len(inside(".bar")) == 3
    screen.press("ArrowRight")
    assert inside(".token.there") == ["0"] and inside(".token.seen") == []
    assert screen.text(".bars").startswith("P(list | state, swap)") and len(inside(".bar")) == 2
    assert screen.numbers()["reward"] == "0 so far", "it comes with the answer"
    screen.press("ArrowRight")
    assert inside(".block.observed .token.seen") == ["0", "2", "1"] and inside(".paid") == ["r +1", ""]
    assert screen.numbers()["reward"] == "1 so far" and screen.page.locator(".advantage b").count() == 0
    screen.press("ArrowRight")
    assert inside(".token.there") == ["0", "1"] and inside(".advantage b") == ["1.20", "0.20"]
    assert screen.page.locator(".block.observed .advantage").count() == 0 and screen.text("#play") == "Play"
    assert screen.set("prompt", "5").page.locator(".advantage b").all_inner_texts() == ["0.80", "0.80"], (
        "paid at the end"
    )
    assert screen.page.locator("#step").is_disabled()
    screen.set("prompt", "6").set("seed", 1)
    assert inside(".group li span") == ["0 [1 0 2] 2", "0", "2 [1 0 2] 0", "0", "0", "2 [1 0 2] 0"]
    screen.set("prompt", "0")
    assert captions() == ["prompt", "response"] and len(inside(".token.there")) == 3
    screen.press("r")


# ---- figure 5 -------------------------------------------------------------------------------------------

RUNS = """async (side) => {
  const r = (await import('../static/figures/training/figure.js')).runs[side];
  return r && {%s};
}"""


def run_of(screen: Screen, side: str) -> dict[str, Any]:
    return screen.page.evaluate(RUNS % "name: r.name, steps: r.points.map(p => p.step), line: r.line", side)


def status(screen: Screen, side: str) -> str:
    return screen.page.locator(f".status.{side}").get_attribute("data-status")


def without_times(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines]


@pytest.mark.smoke
def test_training_to_the_end_as_on_the_command_line_though_the_server_is_killed(
    screen: Screen, lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen.open("/figure/training?a.samples=4&a.epochs=2")
    command = screen.page.locator("#command code").text_content().splitlines()[0]
    screen.page.click("#step")
    until(lambda: all("paused after step 1 of 100" in screen.text(f".status.{side}") for side in SIDES))
    assert run_of(screen, "a")["steps"] == run_of(screen, "b")["steps"] == [1] and screen.text("#play") == "Continue"
    assert screen.page.locator(".sides").get_attribute("disabled") is not None
    screen.press("ArrowRight")
    until(lambda: all("paused after step 2 of 100" in screen.text(f".status.{side}") for side in SIDES))
    screen.page.click("#play")
    until(lambda: len(run_of(screen, "a")["steps"]) >= 8)
    lab.kill()
    time.sleep(1.0)
    lab.start()  # the trainings have gone on meanwhile; the page comes back by itself
    until(lambda: status(screen, "a") == status(screen, "b") == "finished")
    for side in SIDES:
        run = run_of(screen, side)
        assert run["steps"] == list(range(1, 101)), "a gap, or a point twice"
        assert run["line"] == read_lines(lab.runs / run["name"] / "metrics.jsonl")[-1]
    monkeypatch.setattr("ascent.cli.train.plot", lambda _: None)
    assert cli.main([*shlex.split(command)[1:], "--out", str(tmp_path / "cli")]) == 0
    here = read_lines(lab.runs / run_of(screen, "a")["name"] / "metrics.jsonl")
    there = read_lines(tmp_path / "cli" / "metrics.jsonl")
    assert without_times(here) == without_times(there)
    said = metrics_in_words(there[-1], 5.0)
    assert screen.numbers()["A: reward"] == said["earned"] and screen.numbers()["A: exactly right"] == said["right"]
    for name in ("reward", "entropy", "silent", "clip", "loss"):
        assert screen.page.locator(f"[data-chart={name}] canvas").count() == 1
    marks = Counter(screen.page.locator(".responses.b .cell").evaluate_all("all => all.map(e => e.classList[1])"))
    assert sum(marks.values()) == 30 and marks["right"] > 25
    screen.page.reload()  # the address holds the runs
    screen.page.wait_for_selector("body[data-ready]")
    until(lambda: run_of(screen, "a") and len(run_of(screen, "a")["steps"]) == 100)
    screen.page.locator(".data summary").click()
    until(lambda: screen.page.locator(".data tbody tr").count() > 20)


def test_a_trainer_that_is_killed_is_shown_with_its_curve_and_reset_puts_it_away(screen: Screen, lab: Lab) -> None:
    screen.open("/figure/training")
    screen.press("Space")
    until(lambda: run_of(screen, "a") and len(run_of(screen, "a")["steps"]) >= 3)
    screen.press("Space")
    until(lambda: "paused after step" in screen.text(".status.a") and "paused after step" in screen.text(".status.b"))
    held = run_of(screen, "a")["steps"]
    time.sleep(0.5)
    assert run_of(screen, "a")["steps"] == held
    os.kill(int((lab.runs / run_of(screen, "a")["name"] / ".lock").read_text()), signal.SIGKILL)
    until(lambda: status(screen, "a") == "died")
    until(lambda: "exit code 137, killed by signal 9" in screen.text(".status.a"))
    assert "100 steps" in screen.text(".status.a .last") and "Killed" in screen.text(".status.a .last")
    assert run_of(screen, "a")["steps"] == held, "the curve is kept"
    name = run_of(screen, "b")["name"]
    screen.press("r")
    assert run_of(screen, "a") is None and status(screen, "a") == "none"
    until(lambda: json.loads((lab.runs / name / "run.json").read_text())["status"] == "interrupted")
    assert screen.query() == ""


def test_every_setting_of_a_training_changes_its_command_and_its_address(screen: Screen) -> None:
    screen.open("/figure/training")
    changes = {"advantage": "normalized", "loss": "ratio", "reward": "exact", "samples": 4, "epochs": 3}
    changes |= {"lr": 0.003, "eps": 0.1, "kl": 0.04, "entropy": 0.7, "seed": 8}
    assert {f"a.{name}" for name in changes} | {"a.run"} == {
        c.name for c in FIGURES["training"].controls if c.name[1] == "." and c.name[0] == "a"
    }
    for side in SIDES:
        for name, value in changes.items():
            if name == "eps":
                screen.set(f"{side}.loss", "clipped")
            before = screen.page.locator("#command").text_content()
            screen.set(f"{side}.{name}", value)
            assert screen.page.locator("#command").text_content() != before, name
            assert f"{side}.{name}={value}" in screen.query()
    screen.set("world", "repeats")
    assert "--numbers 3" in screen.page.locator("#command").text_content()
    assert screen.text("#difference").startswith("Both have the same settings")
    screen.set("a.advantage", "gae").set("a.loss", "sequence-ratio")
    assert "--loss sequence-ratio" in screen.page.locator("#command").text_content()


def test_responses_are_text_and_never_html(screen: Screen, lab: Lab, known: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    evil, text = lab.runs / "evil", "<img src=x onerror=document.title=1><script>document.title=1</script>"
    shutil.copytree(lab.runs / known, evil)
    for path in evil.glob("rollouts/*.parquet"):
        rows = [row | {"response_text": text, "prompt_text": f"<b>{text}"} for row in pq.read_table(path).to_pylist()]
        pq.write_table(pa.Table.from_pylist(rows), path)
    screen.open("/figure/training?a.run=evil")
    screen.page.wait_for_selector(".responses.a .cell")
    assert text in screen.text(".responses.a .prompt span") and screen.page.title() != "1"
    assert screen.page.locator(".responses img, .responses script, .responses b b").count() == 0
    assert text in screen.page.locator(".responses.a .cell").first.get_attribute("title")


# ---- the page -------------------------------------------------------------------------------------------


def test_keys_focus_and_the_snippet(screen: Screen) -> None:
    screen.open("/figure/clip?A=-0.5")
    screen.page.keyboard.press("?")
    assert screen.page.locator("dialog").evaluate("e => e.open") and "move the ratio" in screen.text("dialog")
    screen.page.keyboard.press("Escape")
    until(lambda: not screen.page.locator("dialog").evaluate("e => e.open"))
    assert screen.press("ArrowRight").state("ratio") == 1.4
    assert screen.press("ArrowLeft").press("ArrowLeft").state("ratio") == 1.3
    screen.page.locator("#figure").focus()
    assert screen.press("ArrowUp").state("A") == -0.45
    assert screen.press("ArrowDown").press("ArrowDown").state("A") == -0.55
    screen.page.locator("#control-ratio").focus()  # in a control the arrows are its own, once
    assert screen.press("ArrowRight").state("ratio") == 1.35
    for _ in range(3):
        screen.page.keyboard.press("Tab")
        outline = screen.page.evaluate(
            "getComputedStyle(document.activeElement).outlineStyle + document.activeElement.tagName"
        )
        assert outline.startswith(("solid", "auto")), outline
    screen.page.click("#copy")
    until(lambda: screen.page.evaluate("document.getElementById('copy').textContent === 'Copied'"))
    copied = screen.page.evaluate("navigator.clipboard.readText()")
    assert copied == screen.page.locator("#snippet").text_content() and "1.35" in copied
    assert screen.press("r").state("A") == FIGURES["clip"].read("")["A"]


def test_a_state_that_cannot_be_is_said(screen: Screen) -> None:
    screen.open("/figure/clip?A=7")
    assert "between −1" in screen.text(".error").replace("-", "−")
    assert screen.numbers()["objective"] == "0.600"


@pytest.mark.smoke
def test_every_page_fits_a_phone_is_still_and_has_nothing_serious_for_axe_in_both_themes(
    browser: Any, lab: Lab
) -> None:
    phone, desk = {"width": 360, "height": 740}, {"width": 1280, "height": 900}
    screen = opened(browser, lab, color_scheme="light", viewport=phone)
    whole = [path.replace("trajectory", "trajectory?step=4") for path in PAGES]  # with all that is in it
    for path in [*whole, "/figure/trajectory?prompt=4&step=3"]:
        screen.page.set_viewport_size(phone)
        screen.open(path)
        assert screen.page.evaluate("document.documentElement.scrollWidth") <= 360, path
        screen.page.emulate_media(color_scheme="light", reduced_motion="no-preference")
        screen.page.set_viewport_size(desk)
        screen.page.wait_for_timeout(150)
        first = screen.page.screenshot()
        screen.page.wait_for_timeout(250)
        assert screen.page.screenshot() == first, path
        part = "#figure" if "/figure/" in path else None  # the text has the same parts on every page
        for theme, options in (("light", None), ("dark", {"runOnly": ["color-contrast"]})):  # only colours change
            screen.page.emulate_media(color_scheme=theme, reduced_motion="reduce")
            assert screen.page.evaluate("document.getAnimations().length") == 0
            found = serious(screen.page, part, options)
            assert not found, (path, theme, found)
    assert not screen.errors
    screen.page.context.close()


@pytest.mark.smoke
def test_the_labels_of_charts_stand_out_in_both_themes(browser: Any, lab: Lab, known: str) -> None:
    screen = opened(browser, lab, device_scale_factor=2, viewport={"width": 1280, "height": 1500})
    for name in ("clip", "baselines", "variance"):
        screen.open(f"/figure/{name}")
        for theme in ("light", "dark"):
            screen.page.emulate_media(color_scheme=theme)
            picture, labels = pictured(screen, "svg.chart", "svg.chart text")
            assert (luminance(picture.getpixel((4, 4))) < 0.2) == (theme == "dark")
            assert len(labels) >= 10
            for text, box in labels:
                assert ink(picture.crop(box)) >= 4.5, (name, text, theme)
    screen.open(f"/figure/training?a.run={known}&b.run={known}")
    until(lambda: run_of(screen, "a") and run_of(screen, "b") and len(run_of(screen, "b")["steps"]) > 2)
    for theme in ("dark", "light"):
        screen.page.emulate_media(color_scheme=theme)
        screen.page.wait_for_timeout(300)
        picture, found = pictured(screen, ".curves", ".curves canvas, .curves figcaption li")
        charts, captions = [one for one in found if not one[0]], [one for one in found if one[0]]
        assert len(charts) == 5 and len(captions) == 12
        for _, (left, top, _, bottom) in charts:
            assert ink(picture.crop((left, top, left + 100, bottom))) >= 4.5, theme
        for text, box in captions:
            assert ink(picture.crop(box)) >= 4.5, (text, theme)
    assert not screen.errors
    screen.page.context.close()


def test_the_theme_can_be_chosen(browser: Any, lab: Lab) -> None:
    screen = opened(browser, lab, color_scheme="light", viewport={"width": 360, "height": 740})
    for theme, other in (("light", "dark"), ("dark", "light")):
        screen.page.emulate_media(color_scheme=theme)
        screen.page.evaluate("localStorage.clear()")
        screen.open(PAGES[-1]).page.click("#theme")
        assert screen.page.evaluate("document.documentElement.dataset.theme") == other
    assert not screen.errors
    screen.page.context.close()


RUN_OUT = """html => {
  const article = document.querySelector(".lesson");
  if (html) article.innerHTML = html;
  for (const details of article.querySelectorAll("details")) details.open = true;
  const style = getComputedStyle(article);
  const right = article.getBoundingClientRect().right - parseFloat(style.paddingRight) + 0.5;
  const wide = [...article.querySelectorAll("pre, .scroll, .scroll > *, p, summary, p math, output")].filter((e) =>
    e.closest(".scroll") && !e.matches(".scroll") ? false : e.getBoundingClientRect().right > right);
  const cut = [...article.querySelectorAll("pre, .scroll")].filter((e) =>
    e.scrollWidth > e.clientWidth && getComputedStyle(e).overflowX !== "auto");
  return [document.documentElement.scrollWidth, article.querySelectorAll("pre, math").length,
    [...wide, ...cut].map((e) => e.outerHTML.slice(0, 200))];
}"""


@pytest.mark.smoke
def test_code_and_formulas_of_every_lesson_stay_in_their_box(browser: Any, lab: Lab) -> None:
    """On a phone, in the narrow column beside a figure, and on a desk, with long code open; one page shows them all."""
    lessons = read_lessons()
    slugs = [lesson.slug for lesson in lessons]
    screen = opened(browser, lab).open("/lesson/trust-region")
    for width in (320, 800, 1280):
        screen.page.set_viewport_size({"width": width, "height": 800})
        shown = 0
        for lesson in lessons:
            said = dict.fromkeys(BOUND.findall(lesson.text), "[3 1 4 0]")
            page, count, wide = screen.page.evaluate(RUN_OUT, render(lesson, said, slugs))
            assert page <= width and not wide, (lesson.slug, wide)
            shown += count
        assert shown > 250
    screen.page.context.close()


BOXES = """(all, [x, y]) => all.map(e => {
  const b = e.getBoundingClientRect();
  return [e.textContent, [b.left - x, b.top - y, b.right - x, b.bottom - y].map((v) => 2 * v)];
})"""


def pictured(screen: Screen, part: str, labels: str) -> tuple[Any, list[tuple[str, list[float]]]]:
    """A part of the page as it is drawn, of which more would take long; and where in it these elements are."""
    boxes = [found.bounding_box() for found in screen.page.locator(part).all()]
    left, top = (min(box[side] for box in boxes) for side in ("x", "y"))
    right = max(box["x"] + box["width"] for box in boxes)
    bottom = max(box["y"] + box["height"] for box in boxes)
    picture = screen.picture({"x": left, "y": top, "width": right - left, "height": bottom - top})
    return picture, screen.page.locator(labels).evaluate_all(BOXES, [left, top])


def ink(picture: Any) -> float:
    """The contrast of a label: its most common pixel against the one that differs most from it."""
    colours = picture.getcolors(picture.width * picture.height)
    ground = max(colours)[1]
    return max(contrast(colour, ground) for _, colour in colours)


TRIED = """async (base) => {
  const found = [];
  for (const options of [{}, {mode: "no-cors", method: "POST", body: "{}"}, {credentials: "include"}]) {
    try {
      const answer = await fetch(base + "/api/figure/clip", options);
      found.push([answer.status, answer.type, await answer.text()]);
    } catch (error) { found.push("refused"); }
  }
  return found;
}"""


def test_another_site_in_the_same_browser_gets_nothing(browser: Any, lab: Lab) -> None:
    """A page of another origin, with the lab's cookie in the same jar; and one whose name was bound to this machine."""
    screen = opened(browser, lab)
    page = screen.page.context.new_page()
    page.route("http://elsewhere.test/**", lambda route: route.fulfill(body="<p>hello", content_type="text/html"))
    page.goto("http://elsewhere.test/")
    assert page.evaluate(TRIED, lab.base) == ["refused"] * 3
    rebound = page.goto(lab.address.replace("127.0.0.1", "rebound.test"))
    assert rebound.status == 403 and "does not accept this host name" in page.inner_text("body")
    assert page.goto(f"{lab.base}/").status == 200  # the same browser, by the right name
    fresh = browser.new_context().new_page()
    assert fresh.goto(f"{lab.base}/").status == 403 and "with its token" in fresh.inner_text("body")
    screen.page.context.close()


class Elsewhere(http.server.BaseHTTPRequestHandler):
    """Another server on this machine. It notes what browsers send, and lets them try the lab from its page."""

    def do_GET(self) -> None:
        self.server.heard.append((self.path, self.headers.get("cookie", "")))  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.send_header("set-cookie", "mine=1; Path=/")
        self.end_headers()
        self.wfile.write(b"<p>hello")

    def log_message(self, *_: Any) -> None:
        pass


def test_another_server_on_this_machine_is_not_sent_the_cookie(browser: Any, lab: Lab) -> None:
    """Cookies ignore ports, so only their path keeps them apart: what is opened on the other port is without it."""
    screen = opened(browser, lab)
    page = screen.page
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere) as other:
        other.heard = heard = list[tuple[str, str]]()  # type: ignore[attr-defined]
        threading.Thread(target=other.serve_forever, daemon=True).start()
        base = f"http://127.0.0.1:{other.server_port}"
        for path in ("/", "/runs", "/api/view/runs", "/static/app.js", "/?token=1"):
            page.goto(base + path)
        fetching = "(lab) => fetch(lab + '/api/view/runs', {credentials: 'include', mode: 'no-cors'}).catch(() => 0)"
        page.evaluate(fetching, f"http://127.0.0.1:{lab.port}")
        page.evaluate("() => fetch('/again', {credentials: 'include'}).then((answer) => answer.text())")
        other.shutdown()
    assert len(heard) >= 6 and "mine=1" in heard[-1][1], "its own cookie came back"
    kept = {one["name"]: one["value"] for one in page.context.cookies(f"{lab.base}/")}
    (name,) = set(kept) - {"mine"}
    assert not [path for path, cookies in heard if name in cookies or kept[name] in cookies]
    stolen = {"cookie": "; ".join(cookies for _, cookies in heard)}
    assert page.request.get(f"{lab.base}/api/view/runs", headers=stolen).status == 403
    assert screen.open("/figure/clip").state("A") == 0.5, "the lab works beside it"
    page.context.close()


def test_the_token_is_on_no_command_line_and_its_file_leads_in(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everyone on a machine sees the arguments of its processes: those of the browser have no token."""
    told = tmp_path / "told"
    waits = f"for i in $(seq 600); do [ -e {tmp_path}/seen ] && exit; sleep 0.1; done"
    (tmp_path / "browser").write_text(f'#!/bin/sh\necho "$*" > {told}.new; mv {told}.new {told}; {waits}\n')
    (tmp_path / "browser").chmod(0o700)
    monkeypatch.setenv("BROWSER", f"{tmp_path / 'browser'} %s &")
    monkeypatch.setattr("webbrowser._tryorder", None)  # as in a new process: BROWSER is read on the first use
    lab = Lab(tmp_path / "runs", "--open")
    try:
        until(told.exists)
        url, (token,) = told.read_text().strip(), re.findall(r"token=(\S+)", lab.address)
        running = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if os.access(path, os.R_OK)]
        (tmp_path / "seen").touch()
        assert any(url.encode() in line for line in running) and not any(token.encode() in line for line in running)
        page, file = browser.new_context().new_page(), Path(url.removeprefix("file://"))
        assert file.stat().st_mode & 0o777 == 0o600 and token in file.read_text()
        page.goto(url)
        page.wait_for_url(f"{lab.base}/")
        assert "See policy gradients work" in page.inner_text("h1") and token not in page.url
        assert not file.exists() and token not in lab.address
        page.context.close()
        again = browser.new_context().new_page()
        assert again.goto(f"http://127.0.0.1:{lab.port}/?token={token}").status == 403
        assert "prints another one" in again.inner_text("body")
        Screen(again, lab).enter()
        again.context.close()
    finally:
        lab.kill()
