"""A tour of a run folder: show, report, sample, resume, and every route of the lab. All have to answer."""

from __future__ import annotations

import io
import itertools
import stat
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path

from starlette.routing import Route
from starlette.testclient import TestClient

from ascent.cli import main as cli
from ascent.cli import train as training
from ascent.lab.report import run_report
from ascent.lab.server import application

ROUTES: dict[str, tuple[str, ...]] = {
    "/": ("",),
    "/runs": ("",),
    "/run": ("?id=bad",),
    "/compare": ("?id=bad&id=good",),
    "/completions": ("?id=bad",),
    "/lesson/{slug}": ("",),
    "/figure/{name}": ("?a.run=bad",),
    "/api/figure/{name}": ("", "?a.run=bad"),
    "/api/runs/{run}/events": ("",),
    "/api/runs/{run}/responses": ("", "?step=1"),
    "/api/view/runs": ("",),
    "/api/view/spark": ("?id=bad&id=good",),
    "/api/view/run": ("?id=bad",),
    "/api/view/curves": ("?id=bad", "?id=bad&points=2&from=0&to=1"),
    "/api/view/occupancy": ("?id=bad", "?id=bad&step=1"),
    "/api/view/completions": ("?id=bad", "?id=bad&step=2", "?id=bad&set=held-out"),
    "/api/view/tokens": ("?id=bad&step=1&group=0", "?id=bad&step=3&group=1&set=held-out"),
    "/api/view/prompts": ("?id=bad",),
    "/api/view/prompt": ("?id=bad&key={key}", "?id=bad&key={key}&set=held-out"),
    "/api/view/compare": ("?id=bad&id=good",),
    "/api/view/compare.csv": ("?id=bad&id=good", "?id=bad&table=settings"),
    "/api/view/compare.svg": ("?id=bad&id=good",),
    "/api/view/compare.png": (),
    "/api/view/compare.pdf": (),
    "/api/view/notes": ("",),
    "/api/trainings": ("",),
    "/api/trainings/{run}/{command}": ("",),
}
"""Every route of the lab, and what it is asked. One picture stands for those that only differ in their format."""
NAMES = {"slug": ("policy-gradient",), "name": ("clip", "training"), "run": ("bad",), "command": ("stop",)}
POSTED = {
    "/api/view/notes": {"id": "bad", "text": "seen", "tags": ["x"], "revision": ""},
    "/api/trainings": {"sides": [], "steps": 1},
}
SMALL_POLICY = ("--length", "2", "--numbers", "3", "--policy.width", "8", "--policy.layers", "1", "--policy.heads", "2")
COMMANDS = (
    ("show", "{run}"),
    ("show", "{run}", "--json"),
    ("show", "{run}", "--step", "1"),
    ("report", "{run}", "--out", "{out}"),
    ("report", "{run}"),
    ("sample", "{run}", "1 0"),
    ("eval", "{run}", "--prompts", "2"),
    ("pairs", "{run}", "{out}.pairs.jsonl", "--count", "2"),
    ("label-steps", "{run}", "{out}.steps.jsonl", "--prompts", "1"),
    ("export", "{run}", "{out}.model"),
    ("serve", "{run}"),
    ("play", "{run}"),
    ("train", "--config", "{run}/config.json", "--steps", "1", "--out", "{out}.again"),
    ("train", "sort", "--init", "{run}", "--steps", "1", "--out", "{out}.next", *SMALL_POLICY),
    ("resume", "{run}"),
    ("resume", "{run}", "--from", "4"),
)
"""Every command that loads a run. The first report, and pictures of a comparison, are part of a thorough tour only."""
THOROUGH = ("report {run} --out {out}", "/api/view/compare.svg")
FEW = 2
"""Charts that the report of a tour has that is not thorough: each takes a tenth of a second to draw."""


def tour(root: Path, ours: bool, out: Path, complain: Callable[[str], None], thorough: bool = True) -> None:
    """Visit the run `bad` in a folder of runs where `good` is too; `ours`: it is a run of Ascent's."""
    if not thorough:
        draw_few_charts()
    with TestClient(application(root), raise_server_exceptions=True) as client:
        for method, path in addresses(client):
            if not thorough and path.startswith(THOROUGH):
                continue
            try:
                answer = client.request(method, path, json=POSTED.get(path))
            except Exception as error:
                complain(f"{path}: {where(error)}")
                continue
            if answer.status_code >= 500:
                complain(f"{path}: status {answer.status_code}")
            if path == "/api/view/runs" and "good" not in {row["id"] for row in answer.json()["runs"]}:
                complain("the run beside it has lost its row")
    training.plot = lambda _: None  # a second each, and it reads what the curves have read
    for command in COMMANDS:
        if (ours or command[0] == "report") and (thorough or " ".join(command) not in THOROUGH):
            run_command([word.format(run=root / "bad", out=out) for word in command], complain)


def draw_few_charts() -> None:
    drawn, count = run_report.chart, itertools.count()
    run_report.chart = lambda *a, **k: drawn(*a, **k) if next(count) < FEW else ""


def run_command(args: list[str], complain: Callable[[str], None]) -> None:
    said = io.StringIO()
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(said):
            status = cli.main(args)
    except BaseException as error:
        return complain(f"ascent {args[0]}: {where(error)}")
    words = said.getvalue()
    if status not in (0, 1, 2) or "unexpected error" in words or "Traceback" in words:
        complain(f"ascent {args[0]}: status {status}: {words[-300:]}")


def addresses(client: TestClient) -> Iterator[tuple[str, str]]:
    """Yield requests to every route. A route that is missing in ROUTES is an error."""
    for route in client.app.routes:  # type: ignore[attr-defined]
        if not isinstance(route, Route):
            continue
        method = "POST" if "POST" in (route.methods or ()) else "GET"
        names = list(route.param_convertors)
        for values in itertools.product(*(NAMES[name] for name in names)):
            path = route.path.format(**dict(zip(names, values, strict=True)))
            for query in ROUTES[route.path]:
                yield method, path + query.format(key=_key(client) if "{key}" in query else "")


def _key(client: TestClient) -> str:
    """The key of a prompt, if there is one."""
    with suppress(Exception):  # whose complaint is another address's
        return client.get("/api/view/prompts?id=bad").json()["prompts"][0]["key"]
    return "x"


def where(error: BaseException) -> str:
    """An error, and the last line of ours that it came from."""
    trace, last = error.__traceback__, ""
    while trace is not None:
        if "/ascent/" in trace.tb_frame.f_code.co_filename:
            last = f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return f"{type(error).__name__}: {str(error)[:200]} ({last})"


def contents(folder: Path) -> dict[str, object]:
    """All that a folder holds, and when it was written."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        about = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(about.st_mode) else path.readlink() if path.is_symlink() else None
        found[str(path)] = (stat.S_IFMT(about.st_mode), content, about.st_mtime_ns if path.is_file() else 0)
    return found
