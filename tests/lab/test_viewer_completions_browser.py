"""Completions in a real browser: steps, filters, tokens by colour and by key, hostile texts, large pages, verl."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from viewed import row, write_run, write_step

import ascent
from ascent.runs import rollout_files
from tests.browser import PATIENCE, Lab, Screen, chromium, serious, until

pytestmark = [pytest.mark.slow, pytest.mark.browser]
EVIL = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
LOGP = [-1.0, -0.7, -1.3, -1.1]
"""At the last update; logp_old is −1: ρ = 1, 1.35, 0.741, 0.905."""


def rows() -> list[dict[str, Any]]:
    """Clipped on both sides, cut off, failed, empty, not finite, hostile; the first prompt has lines and a tab."""
    asked = {"prompt_text": "Sum up:\n\t2 + 2 & <b>3</b>"}
    more = {"format": 0.5, "rewards/brevity": 0.25}
    return [
        row(0, 0, 0.0, pieces=["a", "  b", "\n", " c"], logp=[LOGP], correct=False, truncated=True, **asked, **more)
        | {"response_text": "a  b\n c"},
        row(0, 1, 1.0, "the answer is 4", logp=[LOGP], reason="4 was wanted", **asked, **more),
        row(1, 0, 0.0, f"{EVIL} ok", prompt_text=f"prompt {EVIL}", reason=EVIL, **more),
        row(1, 1, 0.0, "", prompt_text=f"prompt {EVIL}", **more),
        row(2, 0, 0.0, "lost", status="failed", valid=False, reason="the checker timed out", **more),
        row(2, 1, 0.5, "odd", correct=False, logp_old=[math.nan], entropy=[math.inf], **more),
    ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    chromium()
    root = tmp_path_factory.mktemp("completions") / "runs"
    same = {"steps": 3, "prompts": 4, "samples": 4, "epochs": 3, "lr": 0.02, "eval_prompts": 4, "eval_every": 1}
    same |= {"policy.width": 16, "policy.layers": 1, "policy.heads": 2}
    ascent.train("sort", record_every=1, record_rollouts="all", show=False, out=root / "sorted", **same)
    ascent.train("sort", algorithm="rloo", seed=1, show=False, out=root / "twin", **same)
    made = write_run(root / "made", {step: rows() for step in (0, 10, 40)})
    torn = write_step(made, 50, rows())
    torn.write_bytes(torn.read_bytes()[:-300])
    write_run(root / "none", {})
    texts = ["no", *["the same answer"] * 7]
    write_run(root / "alike", {0: [row(0, s, float(s > 0), text, advantage=[s / 8]) for s, text in enumerate(texts)]})
    write_run(root / "once", {0: [row(0, s, float(s), "a b", logp_update=[0], logp=[[-1.0, -1.0]]) for s in (0, 1)]})
    (root / "once" / "metrics.jsonl").write_text(json.dumps({"step": 0, "num_responses": 512}) + "\n")
    config = json.loads((root / "once" / "config.json").read_text())
    (root / "once" / "config.json").write_text(json.dumps(config | {"samples": 2}))
    old = [{k: v for k, v in r.items() if k not in ("pieces", "entropy", "status")} for r in rows()[:2]]
    write_run(root / "old", {0: old})
    many = [row(g, s, float(s % 2), pieces=[" word"] * 512) for g in range(8) for s in range(16)]
    write_run(root / "large", {0: many})
    talk = ["7", "</s>", "user: ", "higher", "8", "</s>"]
    drawn = {"pieces": talk, "mask": [True, True, False, False, True, True], "turn": [0, 0, 0, 0, 1, 1]}
    drawn |= {"turn_reward": [0.25, 0.75], "time/turns": [0.5, 0.0]}
    said = "turn 1: calls=1 unparsed=0 failed=0 repeated=0; turn 2: found"
    write_run(root / "talk", {0: [row(0, s, float(s), reason=said, **drawn) for s in (0, 1)]})
    verl = root / "verl"
    verl.mkdir()
    lines = [{"input": "2 + 2?", "output": f"{EVIL} {s}", "gts": "4", "score": s / 4, "acc": s == 4} for s in range(5)]
    (verl / "3.jsonl").write_text("".join(json.dumps(line | {"step": 3}) + "\n" for line in lines))
    return root


class StepRange(Screen):
    """A page of completions."""

    def open(self, path: str) -> StepRange:
        self.page.goto(f"{self.lab.base}/completions?{path}")
        self.page.wait_for_selector("body[data-ready]")
        return self

    def tokens(self) -> StepRange:
        """Wait until the first response is there token by token."""
        self.page.wait_for_selector(".c-response >> nth=0 >> .t")
        return self

    def asked(self, name: str) -> str:
        return parse_qs(urlsplit(self.page.url).query).get(name, [""])[0]

    def texts(self, selector: str) -> list[str]:
        return self.page.locator(selector).all_inner_texts()

    def numbers(self) -> dict[str, str]:
        """What the readout says."""
        pairs = "all => all.map(e => [e.querySelector('dt').textContent, e.querySelector('dd').textContent])"
        return dict(self.page.locator(".c-readout dl div").evaluate_all(pairs))

    def samples(self) -> list[list[int]]:
        return self.page.locator(".c-group").evaluate_all(
            "all => all.map(g => [...g.querySelectorAll('.c-response')].map(r => +r.dataset.sample))"
        )


@pytest.fixture(scope="module")
def shared(browser: Any, lab: Lab) -> Iterator[StepRange]:
    size = {"width": 1280, "height": 900}
    context = browser.new_context(viewport=size, permissions=["clipboard-read", "clipboard-write"])
    context.set_default_timeout(1000 * PATIENCE)
    yield StepRange(context.new_page(), lab).enter()
    context.close()


@pytest.fixture
def view(shared: StepRange) -> Iterator[StepRange]:
    """A page; it asked nobody else, no script of it failed, and nothing of a run was run."""
    shared.requests.clear()
    shared.errors.clear()
    yield shared
    assert {urlsplit(url).netloc for url in shared.requests} == {f"127.0.0.1:{shared.lab.port}"}
    assert not [error for error in shared.errors if "400" not in error], shared.errors
    assert shared.page.evaluate("window.hacked") is None


def test_held_out_answers(view: StepRange, runs: Path) -> None:
    """From what was sampled to the answers of a step, one prompt over the steps, and the same side by side."""
    view.open("id=sorted&step=1&show=mixed&colour=entropy")
    view.page.click("[data-set=held-out]")
    until(lambda: view.asked("set") == "held-out" and view.page.locator(".c-group").count() == 4)
    view.tokens()
    answers = rollout_files.read_rollouts(runs / "sorted", 1, rollout_files.HELD_OUT)
    assert view.asked("step") == "1" and view.asked("show") == "" and view.samples() == [[0]] * 4
    right = sum(one["correct"] for one in answers)
    assert view.text(".found") == f"4 answers recorded (held out, greedy), {right} right"
    assert view.texts(".c-group h2") == [f"Prompt {i}" for i in range(4)]
    assert view.texts("#colour option") == ["log-prob"] and view.page.locator("#sort").count() == 0
    assert "spread" not in view.text("#main") and "advantage" not in view.text("#main")
    view.page.hover(".c-tokens .t >> nth=0")
    until(lambda: list(view.numbers()) == ["log-prob"])
    assert float(view.numbers()["log-prob"].split(" ")[0].replace("−", "-")) == pytest.approx(
        answers[0]["logp_sampler"][0], rel=1e-3
    )
    view.page.click("text=This prompt over the steps >> nth=2")
    view.page.wait_for_selector(".c-answers")
    assert view.asked("set") == "held-out" and view.texts(".c-answers th a") == ["0", "1", "2"]
    assert view.page.locator(".c-strip span").count() == 3 and answers[2]["prompt_text"] in view.text(".c-prompt")
    view.page.click(".c-answers th a >> nth=1")
    until(lambda: view.asked("step") == "1" and view.asked("set") == "held-out")
    view.page.wait_for_selector(".c-group")
    view.page.click("[data-set=sampled]")
    until(lambda: view.asked("set") == "" and view.page.locator("#sort").count() == 1)
    view.page.go_back()
    until(lambda: view.asked("set") == "held-out" and view.page.locator("#sort").count() == 0)
    view.page.goto(f"{view.lab.base}/compare?id=sorted&id=twin")
    view.page.wait_for_selector("body[data-ready]")
    view.page.locator(".beside").scroll_into_view_if_needed()
    view.page.wait_for_selector("#prompt optgroup[label='held out, greedy'] >> nth=0", state="attached")
    view.page.select_option("#prompt", index=1)
    until(lambda: view.asked("set") == "held-out" and view.asked("key") != "")
    last = {
        name: rollout_files.read_rollouts(runs / name, 2, rollout_files.HELD_OUT)[1]["response_text"]
        for name in ("sorted", "twin")
    }
    until(lambda: view.texts(".beside article pre") == list(last.values()))
    view.page.reload()
    view.page.wait_for_selector("body[data-ready]")
    view.page.locator(".beside").scroll_into_view_if_needed()
    until(lambda: view.texts(".beside article pre") == list(last.values()))


def test_a_real_run_step_by_step(view: StepRange, runs: Path) -> None:
    view.open("id=sorted").tokens()
    assert view.asked("step") == "2" and view.page.locator("#next").is_disabled()
    assert len(view.samples()) == 4 and view.text(".c-steps label").startswith("Step 2")
    view.page.click("#previous")
    until(lambda: view.asked("step") == "1" and view.text(".c-steps b") == "1")
    view.page.locator("#step").focus()
    view.page.keyboard.press("ArrowLeft")
    until(lambda: view.asked("step") == "0")
    view.page.keyboard.press("End")
    until(lambda: view.asked("step") == "2")
    view.page.go_back()
    until(lambda: view.asked("step") == "0" and view.text(".c-steps b") == "0")
    view.page.locator("h1").click()
    view.page.keyboard.press("n")
    until(lambda: view.asked("step") == "1" and view.text(".c-steps b") == "1")
    view.tokens()
    sample = view.samples()[0][0]
    recorded = next(
        r for r in rollout_files.read_rollouts(runs / "sorted", 1) if (r["group"], r["sample"]) == (0, sample)
    )
    texts = [text.strip() for text in view.texts(".c-response >> nth=0 >> .t")]
    assert texts == [piece.strip() for piece in recorded["pieces"]]
    view.page.hover(".c-tokens .t >> nth=2")
    until(lambda: "ratio" in view.numbers())
    ratio = math.exp(recorded["logp"][-1][2] - recorded["logp_old"][2])
    said = {
        k: float(v.split(" ")[0].replace("−", "-").replace("+", ""))
        for k, v in view.numbers().items()
        if k != "clipped"
    }
    expected = {"log-prob": recorded["logp_old"][2], "entropy": recorded["entropy"][2], "ratio": ratio}
    expected |= {"advantage": recorded["advantage"][0], "sampler's": recorded["logp_sampler"][2]}
    for name, value in expected.items():
        assert said[name] == pytest.approx(value, rel=2e-3, abs=1e-4), name


TYPED = """(field, text) => {
  for (let i = 1; i <= text.length; i++) {
    field.value = text.slice(0, i);
    field.dispatchEvent(new InputEvent("input", { bubbles: true }));
  }
}"""
"""Keys in quick succession, however busy the machine is."""


def test_filter_sort_and_search_are_in_the_address(view: StepRange) -> None:
    view.open("id=made&step=10").tokens()
    assert view.samples() == [[1, 0], [0, 1], [1, 0]] and "3 groups, 6 responses" in view.text(".found")
    view.page.select_option("#show", "right")
    until(lambda: view.samples() == [[1]])
    assert view.asked("show") == "right" and "1 more response" in view.text(".c-group > .note")
    for show, expected in (
        ("truncated", [[0]]),
        ("failed", [[0]]),
        ("mixed", [[1, 0]]),
        ("all", [[1, 0], [0, 1], [1, 0]]),
    ):
        view.page.select_option("#show", show)
        until(lambda expected=expected: view.samples() == expected)
    view.page.select_option("#sort", "sample")
    until(lambda: view.samples()[0] == [0, 1])
    asked = len([url for url in view.requests if "/api/view/completions" in url])
    view.page.locator("#search").evaluate(TYPED, "ANSWER IS")
    until(lambda: view.samples() == [[1]])
    assert len([url for url in view.requests if "/api/view/completions" in url]) <= asked + 3, "not one a key"
    assert (view.asked("q"), view.asked("sort"), view.asked("step")) == ("ANSWER IS", "sample", "10")
    assert view.texts(".c-tokens .hit") == [" answer", " is"] or view.texts(".c-tokens .hit") == ["answer", "is"]
    view.page.fill("#search", "2 + 2 &")
    until(lambda: view.samples() == [[0, 1]])
    assert view.text("mark") == "2 + 2 &"
    view.page.fill("#search", "nothing like this")
    until(lambda: "No response is like that" in view.text(".found"))
    view.page.reload()
    view.page.wait_for_selector("body[data-ready]")
    assert view.page.input_value("#search") == "nothing like this" and view.page.input_value("#sort") == "sample"


def test_what_a_response_says_of_itself(view: StepRange) -> None:
    view.open("id=made&step=10&sort=sample").tokens()
    first, second = (view.page.locator(".c-response").nth(i).inner_text() for i in (0, 1))
    assert "✗ wrong" in first and "✂ cut off" in first and "format\n0.5" in first and "brevity\n0.25" in first
    assert "✓ right" in second and "4 was wanted" in second and "advantage +0.5" in second
    failed = view.page.locator("[data-group='2'] .c-response").first.inner_text()
    assert "! no reward" in failed and "the checker timed out" in failed
    assert "An empty response." in view.page.locator("[data-group='1'] .c-response").nth(1).inner_text()
    assert view.text("[data-group='0'] .c-kind") == "◐ mixed"
    first_tokens = view.page.locator(".c-response").first
    assert first_tokens.locator(".c-tokens").text_content() == "a  b\n c", "what is copied is the text itself"
    assert first_tokens.locator(".sp").count() == 3 and first_tokens.locator(".nl").count() == 1
    first_tokens.get_by_role("button", name="Copy").click()
    assert view.page.evaluate("navigator.clipboard.readText()") == "a  b\n c"
    first_tokens.locator("summary").click()
    until(lambda: first_tokens.locator("pre").text_content() == "a  b\n c")


def test_colours_with_their_marks(view: StepRange) -> None:
    view.open("id=made&step=10&sort=sample").tokens()

    def classes(response: int) -> list[str]:
        found = (
            view.page.locator(".c-response")
            .nth(response)
            .locator(".t")
            .evaluate_all("all => all.map(e => e.className)")
        )
        return [" ".join(name.split()[1:]) for name in found]

    until(lambda: classes(0) == ["n4", "n4", "n4 clip low", "n4"] and classes(1) == ["p4", "p4 clip high", "p4", "p4"])
    view.page.select_option("#colour", "ratio")
    until(lambda: classes(1) == ["z", "p4 clip high", "n4", "n3"])
    view.page.select_option("#colour", "logp")
    until(lambda: classes(1) == ["q3", "q3 clip high", "q3", "q3"])  # p = 37%
    view.page.select_option("#colour", "entropy")
    until(lambda: classes(1)[0] == "q2")
    odd = view.page.locator("[data-group='2'] .c-response").nth(1).locator(".t")
    assert "odd" in odd.get_attribute("class"), "an entropy that is not finite"
    view.page.select_option("#colour", "clipped")
    until(lambda: classes(1) == ["z", "p4 clip high", "z", "z"])
    assert view.asked("colour") == "clipped" and "ρ < 0.8" in view.text(".c-legend")
    mark = "e => [getComputedStyle(e, '::after').content, getComputedStyle(e).outlineStyle]"
    shown = view.page.locator(".t.clip.high").first.evaluate(mark)
    assert "▲" in shown[0] and shown[1] == "solid", "not by colour alone"
    dashed = view.page.locator(".t.clip.low").first.evaluate("e => getComputedStyle(e).borderBottomStyle")
    assert dashed == "dashed"
    view.open("id=old&colour=entropy").tokens()
    until(lambda: "No entropy" in view.text(".c-legend"))
    assert "numbers in the vocabulary" in view.text("main") and view.texts(".t")[0] == "⟨100⟩"


def test_tokens_by_key(view: StepRange) -> None:
    """One tab stop a response; arrows move within it; the readout speaks."""
    view.open("id=made&step=10&sort=sample").tokens()
    assert view.page.locator(".c-tokens").first.locator("[tabindex='0']").count() == 1
    view.page.locator(".t").first.focus()
    here = "document.activeElement.dataset.i"
    spoken = ".c-readout [role=status]"
    assert "token 1 of 4" in view.text(".c-readout")
    view.page.keyboard.press("ArrowRight")
    assert view.page.evaluate(here) == "1"
    until(lambda: "token 2 of 4" in view.page.locator(spoken).text_content())
    said = view.page.locator(spoken).text_content()
    assert "“␣␣b”" in said and "ratio 1.35" in said and "clipped no" in said
    view.page.keyboard.press("End")
    assert view.page.evaluate(here) == "3"
    view.page.keyboard.press("ArrowUp")  # the line above, before the line end
    assert view.page.evaluate(here) in ("0", "1", "2")
    view.page.keyboard.press("Home")
    assert view.page.evaluate(here) == "0"
    view.page.keyboard.press("ArrowLeft")
    assert view.page.evaluate(here) == "0"
    view.page.keyboard.press("ArrowRight")
    view.page.keyboard.press("Tab")
    assert not view.page.evaluate("document.activeElement.classList.contains('t')"), "out of the response"
    view.page.keyboard.press("Shift+Tab")
    assert view.page.evaluate(here) == "1", "back to where one was"
    view.page.hover(".c-response >> nth=1 >> .t >> nth=1")
    until(lambda: view.numbers()["clipped"] == "high ▲")
    assert view.page.locator(spoken).text_content() == "", "the mouse does not speak"
    view.page.keyboard.press("?")
    assert "the token before, after" in view.text("dialog")
    view.page.keyboard.press("Escape")
    view.page.keyboard.press("/")
    assert view.page.evaluate("document.activeElement.id") == "search"


def test_a_hostile_text_is_text(view: StepRange) -> None:
    view.open("id=made&step=10&q=script").tokens()
    assert view.texts(".c-prompt .c-text")[0].startswith("prompt <script>") and view.text(".c-reason") == EVIL
    assert view.page.locator("main script, main img, .c-prompt b").count() == 0
    assert "window.hacked" in view.page.locator(".c-tokens").first.text_content()
    view.page.click(".c-group a")
    view.page.wait_for_selector(".c-over li")
    assert view.page.locator("main script, main img").count() == 0 and view.text(".c-over .c-text").endswith("ok")
    view.open("id=verl")
    assert view.texts(".c-response .c-text")[0].startswith("<script>")


def test_identical_responses_are_folded_and_opened_by_key(view: StepRange) -> None:
    """The same text and reward stand once; what is counted and said of the group stays; each has its own tokens."""
    view.open("id=alike").tokens()
    assert view.samples() == [[1, 0]] and view.texts(".c-times") == ["× 7"]
    assert "7 of 8 right" in view.text(".c-group header") and "8 responses" in view.text(".found")
    view.page.focus(".c-times")
    assert view.page.get_by_role("button", name="7 identical responses, show each").count() == 1
    view.page.keyboard.press("Enter")
    until(lambda: view.samples() == [[1, 2, 3, 4, 5, 6, 7, 0]])
    until(lambda: view.page.locator("[data-sample='5'] .t").count() == 3)
    assert "advantage +0.625" in view.text("[data-sample='5']")
    view.page.keyboard.press("Enter")
    until(lambda: view.samples() == [[1, 0]])
    view.page.select_option("#fold", "no")
    until(lambda: len(view.samples()[0]) == 8 and view.asked("fold") == "no")
    assert view.open("id=alike&fold=no&sort=sample").samples() == [list(range(8))] and not view.texts(".c-times")
    assert view.open("id=alike&sort=sample").samples() == [[0, 1]] and view.open("id=alike&q=no").samples() == [[0]]


def test_a_conversation_shows_who_said_what(view: StepRange) -> None:
    view.open("id=talk&step=0").tokens()
    page = view.page
    page.wait_for_selector(".c-tokens .observed")
    first = page.locator(".c-tokens").first
    assert first.locator(".observed").all_text_contents() == ["user: ", "higher"]
    heads = first.locator(".c-message")
    assert [heads.nth(i).get_attribute("data-words") for i in range(heads.count())] == [
        "policy, turn 1, reward 0.25, A +0.500, answered in 0.5 s, 1 call",
        "tool, to turn 1",
        "policy, turn 2, reward 0.75, A +0.500",
    ]
    assert first.inner_text().count("turn") == 0, "what is copied is what was said"
    first.locator(".observed").nth(1).hover()
    assert "not drawn by the policy" in page.locator(".c-readout").inner_text()
    first.locator(".t").nth(4).hover()
    assert "turn 2" in page.locator(".c-readout").inner_text()
    assert "calls=1" in page.locator(".c-reason").first.inner_text()


def test_many_tokens_come_as_they_are_needed(view: StepRange) -> None:
    """8 × 16 responses of 512 tokens: 65,536."""
    view.open("id=large&fold=no").tokens()
    assert len(view.samples()) == 8 and view.page.locator(".c-response").count() == 128
    assert 0 < view.page.locator(".t").count() < 20_000
    first = view.page.locator(".c-response").first
    assert first.locator(".t").count() == 160
    first.get_by_role("button", name="All 512 tokens").click()
    until(lambda: first.locator(".t").count() == 512)
    last = view.page.locator(".c-response").last
    until(lambda: last.scroll_into_view_if_needed() or last.locator(".t").count())
    view.page.select_option("#colour", "entropy")
    until(lambda: "q2" in last.locator(".t").first.get_attribute("class"))
    assert view.page.locator(".t").count() < 40_000, "what nobody has looked at is not drawn"


def test_a_prompt_over_the_steps(view: StepRange) -> None:
    view.open("id=made&step=10").tokens()
    view.page.locator(".c-group").first.get_by_role("link", name="This prompt over the steps").click()
    view.page.wait_for_selector(".c-over li")
    steps = view.page.locator(".c-over li").evaluate_all("all => all.map(e => +e.dataset.step)")
    assert steps == [0, 10, 40] and "In 3 of 3 recorded steps" in view.text(".found")
    assert "step_000050.parquet" in view.text(".error"), "what could not be read is said"
    assert "the answer is 4" in view.text(".c-answer") and "1 of 2 right" in view.text(".c-over li")
    assert view.page.locator("[data-chart=prompt] canvas").count() == 1
    view.page.click(".c-over li:nth-child(3) a")
    view.tokens()
    assert view.asked("step") == "40" and view.samples() == [[1, 0]]


def test_what_is_not_there_is_said(view: StepRange) -> None:
    view.open("id=made&step=50")
    assert "step_000050.parquet is not a whole Parquet file" in view.text(".error")
    view.page.click("#previous")
    view.tokens()
    assert view.asked("step") == "40"
    view.open("id=made&step=17").tokens()
    assert "Nothing was recorded at step 17; this is the nearest one." in view.text("main")
    assert "No responses were recorded" in view.open("id=none").text(".error")
    assert "there is no run gone" in view.open("id=gone").text(".error")
    assert "none of the recorded steps" in view.open("id=made&key=0000").text(".error")


def test_steps_that_are_recorded_meanwhile(view: StepRange, runs: Path) -> None:
    """They can be gone to; what is being read stays."""
    live = write_run(runs / "live", {0: rows()})
    view.open("id=live").tokens()
    assert view.page.locator("#next").is_disabled()
    write_step(live, 5, rows())
    until(lambda: view.page.locator("#next").is_enabled())
    assert view.text(".c-steps b") == "0" and "1 of 2 recorded steps" in view.text(".c-steps label")
    view.page.click("#next")
    until(lambda: view.asked("step") == "5")


def test_files_of_verl(view: StepRange) -> None:
    view.open("id=verl")
    assert view.asked("step") == "3" and view.samples() == [[4, 3, 2, 1, 0]]
    assert "Wanted\n4" in view.text(".c-group") and view.page.locator(".c-dock, #colour").count() == 0
    until(lambda: "nothing about single tokens" in view.text("main"))
    view.page.select_option("#show", "right")
    until(lambda: view.samples() == [[4]])


@pytest.mark.smoke
def test_nothing_serious_for_axe_and_nothing_wider_than_a_phone(browser: Any, lab: Lab) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 844}, reduced_motion="reduce")
    context.set_default_timeout(1000 * PATIENCE)
    view = StepRange(context.new_page(), lab).enter()
    only: dict[str, Any] = {"runOnly": ["color-contrast"]}

    def nothing_serious(theme: str, rules: Any) -> None:
        view.page.emulate_media(color_scheme=theme, reduced_motion="reduce")
        found = serious(view.page, "main", rules)
        assert not found, (view.page.url, theme, found)

    over = [("id=made&step=10", ".c-over li"), ("id=sorted&set=held-out", ".c-answers")]
    for path, then in [("id=made&step=10", ""), ("id=verl", ""), ("id=old", ""), *over]:
        view.open(path)
        if then:
            view.page.click(".c-group a")
            view.page.wait_for_selector(then)
        else:
            until(lambda: view.page.locator(".t").count() or "single tokens" in view.text("main"))
        assert view.page.evaluate("document.documentElement.scrollWidth") <= 390, path
        if view.page.locator(".t").count():
            view.page.locator(".t").first.focus()
        if path in ("id=verl", "id=old"):
            continue
        nothing_serious("light", None)
        nothing_serious("dark", only)  # only colours change
        if not then:
            for theme, colour in (("dark", "entropy"), ("light", "ratio")):
                view.page.select_option("#colour", colour)
                until(lambda colour=colour: view.asked("colour") == colour)
                nothing_serious(theme, only)
    assert not view.errors
    context.close()


@pytest.mark.smoke
def test_a_real_model(view: StepRange, runs: Path, smollm2_run: Path) -> None:
    """SmolLM2, a step of a few tokens: its words are there, with spaces where it has them."""
    shutil.copytree(smollm2_run, runs / "smollm2", ignore=shutil.ignore_patterns("checkpoints"))
    view.open("id=smollm2&step=0").tokens()
    recorded = {r["sample"]: r for r in rollout_files.read_rollouts(runs / "smollm2", 0)}
    for i, sample in enumerate(view.samples()[0]):
        shown = view.page.locator(".c-response").nth(i).locator(".c-tokens")
        assert shown.text_content().replace("∅", "") == recorded[sample]["response_text"]
        assert shown.locator(".t").count() == len(recorded[sample]["response"])
    assert "What is" in view.text(".c-prompt") and "tokens" in view.text(".c-response")


def test_a_sample_is_called_one_and_ratios_of_one_are_explained(view: StepRange) -> None:
    view.open("id=once&step=0&colour=ratio&show=right").tokens()
    assert "1 of 256 groups of this step were recorded (2 of 512 responses)" in view.text(".found")
    assert "Shown: 1 response in 1 group" in view.text(".found")
    until(lambda: "seen by one update" in view.text(".c-legend"))
    view.open("id=sorted&step=1")
    assert "All 4 groups of this step were recorded (16 responses)" in view.text(".found")
    view.open("id=made&step=10&colour=ratio").tokens()
    assert "how many the step had is not known" in view.text(".found")
    assert view.page.locator(".c-legend .why").count() == 0
