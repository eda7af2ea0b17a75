"""Attacks with text: half a character for a file, control characters for a terminal, scripts for a browser."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from ascent.cli import dispatch
from ascent.cli import main as cli
from ascent.cli import runs as commands
from ascent.core.errors import RunError
from ascent.lab import page_base
from ascent.lab.report import run_report as report
from ascent.processes.reward_calls import RewardJob
from ascent.runs.display import terminal as display
from ascent.runs.rollout_files import write_parquet
from ascent.tasks.reward_worker import RewardSpec
from ascent.tasks.reward_worker_pool import Limits, RewardOutcome, RewardWorkerPool
from ascent.workflows import loaded_policy
from benchmarks.attacks.attempt import Attack

TEXT, SCRIPTS = "text for files and terminals", "scripts in content"
ESCAPES = ("\x1b[2J", "\x1b]0;title\x07", "\x9b2J", "\r\x1b[1A", "\u202egnp.exe")
OBEYED = {"\x1b", "\x9b", "\x07", "\r", "\u202e", "\x08"}
EVIL = '</pre></script><script>alert(1)</script><img src=http://x.test/a onerror=alert(1)>"\' onload="x'


def broken_character(folder: Path) -> str | None:
    """A reward whose reason is half of a character: can its response still be recorded?"""
    (folder / "r.py").write_text("def f(prompt, response, answer):\n    return 1.0, 'why ' + chr(0xD83D)\n")
    pool = RewardWorkerPool([RewardSpec(f"python:{folder / 'r.py'}:f")], 1, Limits(5.0))
    (found,) = pool.run([RewardJob(0, "p", "r", None, {})])
    pool.close()
    try:
        write_parquet(folder / "step.parquet", [{"group": 0, "sample": 0, "reason": found.reason}], 1)
    except UnicodeError as error:
        return f"the run stops: {error}"
    return None


def any_words() -> None:
    RewardOutcome.__post_init__ = lambda _: None  # type: ignore[method-assign]


def poisoned(stage: Path, folder: Path, words: str) -> Path:
    """A run with these words wherever a folder has words."""
    run = folder / "runs" / "r"
    shutil.copytree(stage / "good", run)
    import pyarrow.parquet as pq

    for path in run.glob("*/*.parquet"):
        rows = pq.read_table(path).to_pylist()
        named = {"prompt_text": words, "response_text": words, "reason": words}
        write_parquet(path, [row | named | {"pieces": [words] * len(row["pieces"])} for row in rows], len(rows))
    alert = {
        "step": 0,
        "event": "alert",
        "name": f"odd{words}",
        "text": words,
        "evidence": {"metrics": {words: [0, 1]}},
    }
    (run / "events.jsonl").write_text(json.dumps(alert) + "\n" + json.dumps(alert | {"name": "reward-errors"}) + "\n")
    about = json.loads((run / "run.json").read_text())
    told = {"task": words, "label": words, "seed": words, "status": "failed", "reason": words}
    about |= told | {
        "result": (about["result"] or {}) | {"words": [words]},
        "machine": {"host": words, "system": words},
    }
    (run / "run.json").write_text(json.dumps(about))
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"objective": words, "label": words, words: words}))
    (run / "notes.json").write_text(json.dumps({"text": words, "tags": [words], "revision": words}))
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 6, "reward": 1.0, f"rewards/{words}": 1.0}) + "\n")
    return run


def printed(work: Callable[[], Any]) -> str | None:
    """The control characters that reach a terminal."""
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        work()
    obeyed = OBEYED & set(said.getvalue())
    return f"the terminal obeys {sorted(map(ascii, obeyed))}" if obeyed else None


def shown(stage: Path, *args: str) -> Callable[[Path], str | None]:
    def attempt(folder: Path) -> str | None:
        run = poisoned(stage, folder, "".join(ESCAPES))
        return printed(lambda: cli.main([args[0], str(run), *args[1:]]))

    return attempt


def told(how: str) -> Callable[[Path], str | None]:
    def attempt(_: Path) -> str | None:
        words = "the response " + "".join(ESCAPES)

        def fail() -> int:
            raise RunError(words)

        if how == "error":
            return printed(lambda: dispatch.exit_status(fail))
        if how == "sample":
            row = {
                "prompt": words,
                "response": words,
                "gold": words,
                "sample": 0,
                "length": 1,
                "logp": [0.0],
                "truncated": 0,
            }
            return printed(lambda: print(loaded_policy.responses_text([row], None)))
        line = display.LineDisplay()
        return printed(lambda: (line.start(0, 10, words), line.show_message(words)))

    return attempt


def print_anything() -> None:
    for module in (display, commands, dispatch, loaded_policy):
        module.printable = lambda words: words  # type: ignore[attr-defined]


# ---- browsers -----------------------------------------------------------------------------------------------


class Scripts(HTMLParser):
    """What a browser would run or load of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name.startswith("on") or "x.test" in (value or "") or (value or "").strip().startswith("javascript:"):
                self.found.append(f"<{tag} {name}={value}>")
        if tag == "script" and not dict(attrs).get("src", "").startswith("/static/"):  # type: ignore[union-attr]
            self.found.append("<script>")


def scripts_in(text: str) -> str | None:
    parser = Scripts()
    parser.feed(text)
    return f"it would run {parser.found[0]}" if parser.found else None


def in_a_report(stage: Path) -> Callable[[Path], str | None]:
    def attempt(folder: Path) -> str | None:
        run = poisoned(stage, folder, EVIL)
        out, _ = report.write_report(run, folder / "r.html", False)
        assert "alert(1)" in out.read_text(), "the words are not in the report at all"
        return scripts_in(out.read_text())

    return attempt


def escape_nothing() -> None:
    page_base.TEMPLATES.autoescape = False
    page_base.TEMPLATES.cache.clear()  # type: ignore[union-attr]


def attacks(stage: Path) -> list[Attack]:
    shows = (("show",), ("show", "--step", "0"), ("resume",))
    terminal = [Attack(TEXT, f"ascent {' '.join(args)}", shown(stage, *args), print_anything) for args in shows]
    terminal += [
        Attack(TEXT, f"in a line of {how}", told(how), print_anything) for how in ("error", "sample", "progress")
    ]
    scripts = [Attack(SCRIPTS, "a report", in_a_report(stage), escape_nothing)]
    return [Attack(TEXT, "half a character in a reason", broken_character, any_words), *terminal, *scripts]
