"""A real browser and a real lab for the tests: one of each, shared."""

from __future__ import annotations

import asyncio
import io
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ascent.lab.server import lab_server
from ascent.runs.run_folder import is_locked
from ascent.server.guard import lab_prefix
from ascent.server.lab_secret import load_secret
from benchmarks.labs import BROWSERS
from tests.processes import ascent_process

ADDRESS = re.compile(r"(http://127\.0\.0\.1:\d+/\?token=\S+)\n")
PATIENCE = 180
"""Seconds to wait for something that has to come: a busy machine may take long for what takes a tenth of a second."""
MISSING = "no Chromium is installed: `make browser` installs it, or says how"


def chromium() -> str:
    """The installed Chromium. Without one the test is left out, or, where CI=true, fails."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(MISSING)
    return found


@pytest.fixture(scope="session")
def chromium_of_session() -> Iterator[Any]:
    """One Chromium without a window for all modules. Names that end in .test lead to this machine."""
    path = chromium()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        flags = ["--no-sandbox", "--host-resolver-rules=MAP *.test 127.0.0.1"]
        found = playwright.chromium.launch(executable_path=path, args=flags)
        asyncio._set_running_loop(None)
        yield found
        found.close()


@pytest.fixture(scope="module")
def browser(chromium_of_session: Any) -> Iterator[Any]:
    """The session's Chromium. Outside of these modules nobody notices Playwright's event loop."""
    asyncio._set_running_loop(chromium_of_session._loop)
    yield chromium_of_session
    asyncio._set_running_loop(None)


@pytest.fixture(scope="module")
def lab(runs: Path) -> Iterator[Lab]:
    """A lab over the runs of the module, in a thread: a process would first have to load the library."""
    chromium()
    found = ThreadLab(runs)
    yield found
    found.kill()


def until(what: Callable[[], Any], seconds: float = PATIENCE) -> None:
    """Wait for a condition. The page's security policy forbids the browser's own waiting, which evaluates strings."""
    begin, pause = time.monotonic(), 0.03
    while not what():
        assert time.monotonic() < begin + seconds, "it took too long"
        time.sleep(pause)
        pause = min(1.2 * pause, 0.4)  # asking takes a core too, which what is waited for may need


class Lab:
    """`ascent lab` as a process, a fork of this one, which can be killed and started again on the same port."""

    def __init__(self, runs: Path, opening: str = "--no-open"):
        self.runs, self.port, self.opening = runs, 0, opening
        self.start()

    def start(self) -> None:
        call = ["lab", self.opening, "--port", self.port, "--runs", self.runs]
        self.process = ascent_process(self.runs.parent / "lab", *call)
        self.port = int(self.address.split(":")[2].partition("/")[0])

    @property
    def address(self) -> str:
        """The newest address: each opens one browser, and the lab prints another one before it answers."""
        until(lambda: ADDRESS.search(self.process.stdout) or self.process.poll() is not None)
        printed = ADDRESS.findall(self.process.stdout)
        assert printed, self.process.stdout + self.process.stderr
        return printed[-1]

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.port}{lab_prefix(load_secret(self.runs)[0], self.port)}"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop_trainings(self) -> None:
        """End what trainings are left, each by its own pid."""
        for lock in self.runs.glob("*/.lock"):
            if is_locked(lock.parent):
                os.kill(int(lock.read_text()), signal.SIGKILL)


class ThreadLab(Lab):
    """The server of `ascent lab` in a thread of this process."""

    def start(self) -> None:
        secret, _ = load_secret(self.runs)
        self.server, listening, self.guard = lab_server(self.runs, "127.0.0.1", self.port, secret)
        self.port = listening.getsockname()[1]
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [listening]}, daemon=True)
        self.thread.start()

    @property
    def address(self) -> str:
        return self.guard.address

    def kill(self) -> None:
        self.server.should_exit = True
        self.thread.join(20)


class Screen:
    """A page of the lab, with what the tests do to it again and again."""

    def __init__(self, page: Any, lab: Lab):
        self.page, self.lab = page, lab
        self.requests: list[str] = []
        self.errors: list[str] = []
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda said: self.errors.append(said.text) if said.type == "error" else None)

    def enter(self) -> Screen:
        """Exchange the token for the cookie, as a user does by the printed address."""
        self.page.goto(self.lab.address)
        self.page.wait_for_url(f"{self.lab.base}/")
        return self

    def open(self, path: str) -> Screen:
        self.page.goto(self.lab.base + path)
        if "/figure/" in path:
            self.page.wait_for_selector("body[data-ready]")
        return self

    def settled(self) -> Screen:
        """Wait until the page shows the answer to the last state that it asked for."""
        until(lambda: self.page.evaluate("lab.asked === lab.answered && !lab.busy"))
        self.page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        return self

    def set(self, name: str, value: Any) -> Screen:
        """Move a control as its user would: a choice by its name, a slider by its place."""
        place = self.page.locator(f'[id="control-{name}"]')
        if place.evaluate("e => e.tagName") == "SELECT":
            place.select_option(str(value))
        else:
            control = self.page.evaluate("(n) => lab.about.controls.find((c) => c.name === n)", name)
            place.fill(str(control["values"].index(value) if control["values"] else value))
        return self.settled()

    def drag(self, handle: str, dx: float, dy: float) -> Screen:
        box = self.page.locator(f'[data-handle="{handle}"]').bounding_box()
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        self.page.mouse.move(x, y)
        self.page.mouse.down()
        for part in (0.3, 0.7, 1.0):
            self.page.mouse.move(x + dx * part, y + dy * part)
        self.page.mouse.up()
        return self.settled()

    def press(self, key: str) -> Screen:
        self.page.keyboard.press(key)
        return self.settled()

    def state(self, name: str) -> Any:
        return self.page.evaluate("(n) => lab.state[n]", name)

    def numbers(self) -> dict[str, str]:
        """The large numbers, by their labels."""
        found = self.page.locator(".number").evaluate_all(
            "all => all.map(e => [e.querySelector('.label').textContent, e.querySelector('.value').textContent])"
        )
        return dict(found)

    def text(self, selector: str) -> str:
        return self.page.locator(selector).first.inner_text()

    def picture(self, clip: Any = None) -> Any:
        from PIL import Image

        return Image.open(io.BytesIO(self.page.screenshot(clip=clip))).convert("RGB")

    def query(self) -> str:
        """What the address says. A figure writes its state there a little later."""
        written = "!window.lab?.address || lab.address() === location.pathname + location.search"
        until(lambda: self.page.evaluate(written))
        return self.page.evaluate("location.search")


@cache
def luminance(colour: tuple[int, ...]) -> float:
    parts = [c / 255 for c in colour[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: tuple[int, ...], second: tuple[int, ...]) -> float:
    """WCAG's ratio of two colours."""
    light, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def serious(page: Any, part: str | None = None, rules: dict[str, Any] | None = None) -> list[tuple[str, str]]:
    """What axe calls serious or critical: each rule, and the first place where it is broken."""
    from axe_playwright_python.base import AXE_SCRIPT

    if page.evaluate("!window.axe"):  # it takes long to compile: once a page
        page.evaluate(AXE_SCRIPT)
    found = page.evaluate(VIOLATIONS, [part, {"resultTypes": ["violations"]} | (rules or {})])
    return [(name, html[:200]) for name, impact, html in found if impact in ("serious", "critical")]


VIOLATIONS = """async ([part, rules]) => {
  const found = await axe.run(part || document, rules);
  return found.violations.map((v) => [v.id, v.impact, v.nodes[0].html]);
}"""
