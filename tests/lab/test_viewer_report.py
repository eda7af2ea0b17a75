"""`ascent report`: one file with no script, its numbers those of the run's files, of runs in any state."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import ascent
from ascent.cli.main import main
from ascent.core.errors import ConfigError
from ascent.lab.page_base import TEMPLATES
from ascent.lab.report import run_report as report
from ascent.lab.report.svg_chart import Series, chart, exact, number, percent, shown
from ascent.runs.run_list import RunEntry

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
EVIL = '</pre><script>alert(1)</script><img src=http://x.test/a onerror=alert(1)>"\' onload="x'


class Parsed(HTMLParser):
    """A page as its elements: (name, attributes), the text of each, and whether all that was opened is closed."""

    VOID = frozenset({"meta", "input", "br"})

    def __init__(self, text: str):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == [], "something was left open"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self.open[-1] if self.open else "", []).append(data)

    @property
    def text(self) -> str:
        return "".join(part for name, parts in self.texts.items() if name not in ("style", "title") for part in parts)

    def all(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.elements if tag == name]


def inert(page: Parsed) -> None:
    """Nothing that runs, and nothing that is fetched."""
    names = {name for name, _ in page.elements}
    assert not names & {
        "script",
        "img",
        "iframe",
        "object",
        "embed",
        "link",
        "base",
        "form",
        "foreignobject",
        "use",
        "a:",
    }
    for name, attributes in page.elements:
        assert not [
            key for key in attributes if key.startswith("on") or key in ("src", "srcdoc", "xlink:href", "style")
        ]
        if "href" in attributes:
            assert name == "a" and (attributes["href"] or "").startswith("#")
    assert {"http-equiv": "Content-Security-Policy", "content": POLICY} in page.all("meta")
    style = "".join(page.texts["style"])
    assert "url(" not in style and "@import" not in style and "://" not in style


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short real run."""
    out = tmp_path_factory.mktemp("report") / "known"
    made = ascent.train(
        "lecture", algorithm="grpo", steps=6, epochs=2, record_every=2, eval_every=3, show=False, out=out
    )
    return made.folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture
def made(capsys: pytest.CaptureFixture[str]) -> Callable[[Path], Parsed]:
    """The report of a run by the command line, parsed, once it was seen to be inert."""

    def call(folder: Path) -> Parsed:
        assert main(["report", str(folder)]) == 0, capsys.readouterr().err
        page = Parsed((folder / "report.html").read_text())
        inert(page)
        return page

    return call


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def rewrite(run: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    (run / "metrics.jsonl").write_text("".join(json.dumps(change(line)) + "\n" for line in metrics(run)))


def tables(path: Path) -> dict[str, list[list[str]]]:
    """Of each chart the rows of the table behind it: the step, and what stands in `value`."""
    found = {}
    for figure in re.findall(r"<figure>.*?</figure>", path.read_text(), re.DOTALL):
        title = re.search(r"<figcaption>(.*?) <|<figcaption>(.*?)</fig", figure)
        rows = re.findall(r'<tr><th scope="row">(.*?)</th>(.*?)</tr>', figure)
        assert title is not None
        name = re.sub(r"<.*", "", title[1] or title[2]).strip()
        found[name] = [
            [step, *re.findall(r'<td>(?:<data value="(.*?)">.*?</data>|·)</td>', cells)] for step, cells in rows
        ]
    return found


# ---- what it says -----------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_finished_run(run: Path, made: Any, capsys: pytest.CaptureFixture[str]) -> None:
    page, lines = made(run), metrics(run)
    assert "Report: " in capsys.readouterr().out
    config, about = (json.loads((run / name).read_text()) for name in ("config.json", "run.json"))
    assert "".join(page.texts["title"]).startswith("lecture, grpo")
    for words in (config["objective"], *config["formula"].splitlines(), *about["result"]["words"], "finished"):
        assert words in page.text
    assert about["versions"]["torch"] in page.text and about["history"][0]["time"] in page.text
    assert "loss.high" in page.text and "update.lr" in page.text
    captions = [text.strip() for text in page.texts["figcaption"] if text.strip()]
    assert captions[0] == "Exactly right" and captions[-1].startswith("Loss")
    assert captions.index("Reward") < captions.index("Entropy") < captions.index("Gradient norm")
    charts = [a for a in page.all("svg") if a.get("class") == "chart"]
    assert len(charts) == len(page.all("figure")) == len(captions) >= 10
    found = tables(run / "report.html")
    names = {"Entropy": "entropy", "Gradient norm": "grad_norm", "Spread of the reward": "reward_std"}
    for title, metric in names.items():
        assert [[int(step), float(value)] for step, value in found[title]] == [[x["step"], x[metric]] for x in lines]
    assert [row[1] for row in found["Exactly right"]] == [
        "" if x["eval/accuracy"] is None else exact(x["eval/accuracy"]) for x in lines
    ]


@pytest.mark.long
def test_completions_have_their_numbers_and_a_choice_without_a_script(run: Path, made: Any) -> None:
    import pyarrow.parquet as pq

    page = made(run)
    radios = {a["id"] for a in page.all("input")}
    assert {"by-advantage", "by-logp", "by-ratio", "by-clipped", "by-plain"} <= radios
    assert sum("checked" in a for a in page.all("input")) == 1
    style = "".join(page.texts["style"])
    for name in radios:
        assert f":has(#{name}:checked)" in style
    heads = [text for text in page.texts["h3"] if text.startswith("Step ")]
    assert heads == ["Step 0", "Step 4", "Step 5"]
    rows = pq.read_table(run / "rollouts/step_000000.parquet").to_pylist()
    row = max((r for r in rows if r["group"] == 0), key=lambda r: r["reward"])
    said = f"A {shown(row['advantage'][0], 4)}, log-prob {shown(row['logp_old'][0], 4)}, "
    assert [a for a in page.all("span") if (a.get("title") or "").startswith(said)]
    assert page.text.count("Best:") + page.text.count("one response:") >= 3
    assert row["prompt_text"] in page.text


@pytest.mark.long
def test_alerts_show_their_evidence(run: Path, made: Any) -> None:
    evidence = {
        "metrics": {"reward": [1.25, 2.5]},
        "steps": [0, 4],
        "rollouts": {"step": 4, "show": "wrong", "q": "a<b"},
    }
    alert = {"step": 4, "event": "alert", "name": "length-drift", "text": "longer & longer", "evidence": evidence}
    old = {"step": 2, "event": "alert", "name": "old-one", "text": "without evidence"}
    odd = {"step": 3, "event": "alert", "evidence": {"metrics": {"kl": 3}, "steps": 7, "rollouts": []}}
    (run / "events.jsonl").write_text(
        "".join(json.dumps(e) + "\n" for e in (alert, old, odd, {"step": 1, "event": "note", "text": "hm"}))
    )
    page = made(run)
    assert "length drift, step 4" in page.text and "longer & longer" in page.text and "without evidence" in page.text
    assert "over steps 0 to 4" in page.text and "step 4: wrong responses that contain “a<b”" in page.text
    assert {"1.25", "2.5"} <= {a["value"] for a in page.all("data")} and "hm" in page.text


def alerted(run: Path, *named: dict[str, Any]) -> None:
    events = [
        {"step": 5, "event": "alert", "name": f"f{i}", "text": "t", "evidence": {"rollouts": one}}
        for i, one in enumerate(named)
    ]
    (run / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))


def part(run: Path, anchor: str) -> str:
    """The section of a report under an anchor."""
    text = (run / "report.html").read_text()
    at = text.index(f'id="{anchor}"')
    return text[at : text.index("</section>", at)]


@pytest.mark.long
def test_what_a_alert_points_at_is_in_the_file(run: Path, made: Any) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = run / "rollouts/step_000002.parquet"
    rows = pq.read_table(path).to_pylist()
    for i, row in enumerate(rows):
        row |= {"correct": i != 3, "response_text": f"the needle {i}" if i == 3 else f"hay {i}"}
    pq.write_table(pa.Table.from_pylist(rows), path)
    wrong = {"step": 2, "show": "wrong", "q": ""}
    needle = {"step": 2, "show": "all", "q": "NEEDLE"}
    alerted(run, wrong, needle, wrong, {"step": 3, "show": "all", "q": ""}, {"step": 2, "show": "right", "q": "none"})
    page = made(run)
    links = [a["href"] for a in page.all("a") if (a["href"] or "").startswith("#seen-")]
    ids = {a.get("id") for name, a in page.elements if name in ("section", "article")}
    assert len(links) == 4 and links[0] == links[2] == "#seen-2-wrong" and {h[1:] for h in links if h} <= ids
    assert "step 3: all responses, which are not in this file" in page.text, "step 3 was not recorded"
    for anchor in ("seen-2-wrong", (links[1] or "")[1:]):
        section = part(run, anchor)
        assert section.count("Matches:") == 1 and f"reward {shown(rows[3]['reward'])}" in section
    assert 'href="#alert-0"' in part(run, "seen-2-wrong") and 'href="#alert-2"' in part(run, "seen-2-wrong")
    assert {f"alert-{i}" for i in range(5)} <= ids
    assert "None of the recorded responses is so." in part(run, (links[3] or "")[1:])
    sampled = metrics(run)[2]["num_responses"]
    how = f"Recorded: {len(rows)} of the {shown(sampled)} responses of the step" if sampled > len(rows) else "All "
    assert how in part(run, "seen-2-wrong") and f"{len({r['group'] for r in rows})} groups" in part(run, "seen-2-wrong")


@pytest.mark.long
def test_evidence_is_bounded_and_it_is_said(run: Path, made: Any) -> None:
    alerted(run, *({"step": 2, "show": "all", "q": f"{i}"} for i in range(30)), {"step": "2"}, {"step": 2, "show": "x"})
    page = made(run)
    assert "Alerts point at 30 selections of completions, of which 24 are here" in page.text
    assert len([a for a in page.all("section") if (a.get("id") or "").startswith("seen-")]) == 24
    assert page.text.count("which are not in this file") == 6


@pytest.mark.parametrize(
    ("value", "said", "share"),
    [
        (15123.4, "15,123", "1,510,000%"),
        (0.123456, "0.1235", "12.3%"),
        (999.96, "1,000", "100,000%"),
        (-2.0, "−2", "−200%"),
        (0.00001234, "1.23e−5", "0.00123%"),
        (12_345_678.0, "1.23e7", "1.23e9%"),
        (0.0, "0", "0%"),
        (1, "1", "100%"),
        (None, "·", "·"),
        ("nan", "nan", "nan"),
    ],
)
def test_numbers_are_said_as_on_the_pages(value: Any, said: str, share: str) -> None:
    assert (shown(value), percent(value)) == (said, share)


@pytest.mark.long
def test_shares_are_said_in_percent(run: Path, made: Any) -> None:
    rewrite(run, lambda x: x | {"accuracy": 0.125, "reward": 15123.4})
    made(run)
    text = (run / "report.html").read_text()
    assert '<data value="0.125">12.5%</data>' in text and '<data value="15123.4">15,123</data>' in text


@pytest.mark.long
def test_what_a_run_holds_is_text(run: Path, made: Any) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    for path in run.glob("*/step_*.parquet"):
        rows = pq.read_table(path).to_pylist()
        rows = [
            r | {"response_text": EVIL, "prompt_text": EVIL, "reason": EVIL, "pieces": [EVIL] * len(r["response"])}
            for r in rows
        ]
        pq.write_table(pa.Table.from_pylist(rows), path)
    about = json.loads((run / "run.json").read_text())
    about |= {"task": EVIL, "label": EVIL, "seed": EVIL, "versions": {EVIL: EVIL}, "machine": {EVIL: EVIL}}
    about["result"] = {"words": [EVIL]}
    about["history"] = [{"event": EVIL, "time": EVIL, EVIL: EVIL}]
    (run / "run.json").write_text(json.dumps(about))
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {EVIL: {EVIL: EVIL}, "objective": EVIL, "formula": EVIL}))
    (run / "notes.json").write_text(json.dumps({"text": EVIL + "\x00\x1b\ud800", "tags": [EVIL]}))
    (run / "events.jsonl").write_text(json.dumps({"step": 1, "event": "alert", "name": EVIL, "text": EVIL}) + "\n")
    page = made(run)
    assert page.text.count(EVIL) > 20 and "␀␛?" in page.text


# ---- runs in any state ------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_run_that_died_and_one_that_runs(run: Path, made: Any) -> None:
    from ascent.runs.run_folder import RunFolder

    about = json.loads((run / "run.json").read_text()) | {"status": "running", "result": None}
    (run / "run.json").write_text(json.dumps(about))
    page = made(run)
    assert "no process here writes it" in page.text and "died" in page.texts["span"]
    folder = RunFolder(run)
    folder.lock()
    assert "last heartbeat" in made(run).text
    folder.close()


@pytest.mark.long
def test_a_torn_last_line_a_bad_one_and_numbers_that_are_not_finite(run: Path, made: Any) -> None:
    rewrite(run, lambda x: x if x["step"] != 3 else x | {"grad_norm": None, "nonfinite": {"grad_norm": "nan"}})
    with open(run / "metrics.jsonl", "a") as file:
        file.write('no json\n{"step": 6, "reward": 17')
    page = made(run)
    assert "line 7" in page.text and "grad_norm was not finite in 1 step" in page.text
    assert "✕ marks 1 step whose number was not finite" in page.text
    assert [row[0] for row in tables(run / "report.html")["Entropy"]] == ["0", "1", "2", "3", "4", "5"]
    assert "17" not in [a["value"] for a in page.all("data")]


def test_files_that_are_missing_or_damaged_are_said(run: Path, made: Any) -> None:
    (run / "metrics.jsonl").unlink()
    page = made(run)
    assert "metrics.jsonl is missing" in page.text and "no numbers to draw" in page.text
    for path in run.glob("*/step_*.parquet"):
        path.write_bytes(b"torn")
    (run / "events.jsonl").write_text("no json\n")
    (run / "config.json").write_text("{")
    page = made(run)
    assert "config.json cannot be read" in page.text and not page.all("figure")
    (run / "run.json").write_text('{"status": [], "result": {"words": 5}, "history": 5, "versions": 5, "seed": {}}')
    made(run)
    (run / "run.json").write_text("[]")
    assert "run.json is not a JSON object" in made(run).text
    shutil.rmtree(run / "rollouts")
    assert "No completions were recorded" in made(run).text


def test_a_step_that_cannot_be_read_is_named_and_the_others_are_shown(
    run: Path, made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = report.completions_page

    def torn(folder: Path, kind: str, step: int, **more: Any) -> Any:
        if step == 0:
            raise ConfigError("the file is torn")
        return read(folder, kind, step, **more)

    monkeypatch.setattr(report, "completions_page", torn)
    page = made(run)
    assert "step 0: the file is torn" in page.text and "responses of the step were recorded" in page.text


def test_without_the_packages_of_the_lab_a_report_names_the_extra(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ascent.lab.report.run_report", None)
    assert main(["report", str(run)]) == 2
    assert "pip install 'ascent-rl[lab]'" in capsys.readouterr().err


def test_a_run_that_was_killed_before_it_began(tmp_path: Path, made: Any) -> None:
    (tmp_path / ".lock").touch()
    (tmp_path / "config.json").write_text(json.dumps({"task": {"name": "sort"}, "seed": 3}))
    assert "killed before its first step" in made(tmp_path).text


@pytest.mark.long
def test_a_run_of_20_000_steps_is_small_and_exact(trained: Path, tmp_path: Path, made: Any) -> None:
    run, steps = Path(shutil.copytree(trained, tmp_path / "long")), 20_000
    changing = ("step", "entropy", "eval/accuracy", "grad_norm")
    same = json.dumps({key: value for key, value in metrics(run)[0].items() if key not in changing})[:-1]
    with open(run / "metrics.jsonl", "w") as file:
        for step in range(steps):
            held = step / steps if step % 100 == 99 else None
            values = (step, math.sin(step) + 2, held, float(step == 15_555))
            file.write(f"{same}, {json.dumps(dict(zip(changing, values, strict=True)))[1:]}\n")
    page = made(run)
    assert (run / "report.html").stat().st_size < 1_000_000
    assert "A point is the mean of" in page.text
    found = tables(run / "report.html")
    assert [found["Entropy"][0][0], found["Entropy"][-1][0]] == ["0", "19,999"]
    for step, value in found["Entropy"]:
        assert float(value) == math.sin(int(step.replace(",", ""))) + 2
    drawn = re.findall(r'class="value c0">(.*?)</text>', (run / "report.html").read_text())
    assert f"{math.sin(steps - 1) + 2:.3g}" in drawn, "the last value, not the mean of the last steps"
    right = [row for row in found["Exactly right"] if row[1]]
    assert len(right) >= 10 and all(float(row[1]) == int(row[0].replace(",", "")) / steps for row in right)
    paths = re.findall(r'<path d="([^"]+)" class="band', (run / "report.html").read_text())
    assert len(paths) >= 10, "the band shows a spike that the mean hides"


@pytest.mark.long
def test_long_responses_are_cut_and_it_is_said(run: Path, made: Any) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    many = 1500
    for path in run.glob("rollouts/*.parquet"):
        rows = []
        for row in pq.read_table(path).to_pylist():
            lists = {
                k: (v * many)[:many]
                for k, v in row.items()
                if k in ("response", "logp_old", "logp_sampler", "advantage")
            }
            lists |= {"logp": [(one * many)[:many] for one in row["logp"]], "pieces": [f" w{i}" for i in range(many)]}
            rows.append(
                row | lists | {"response_text": " ".join(f"w{i}" for i in range(many)), "prompt_text": "p" * 9_000}
            )
        pq.write_table(pa.Table.from_pylist(rows), path)
    page = made(run)
    assert "5,000 more characters" in page.text and "more characters" in page.text
    assert (run / "report.html").stat().st_size < 2_000_000


def test_the_runs_of_other_trainers(tmp_path: Path, made: Any) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    trl = tmp_path / "trl"
    (trl / "completions").mkdir(parents=True)
    for step in (1, 2, 3):
        rows = [
            {
                "step": step,
                "prompt": "<b>2+2?",
                "completion": f"4{EVIL}",
                "accuracy_reward": float(i % 2),
                "advantage": i - 0.5,
            }
            for i in range(4)
        ]
        pq.write_table(pa.Table.from_pylist(rows), trl / f"completions/completions_{step:05d}.parquet")
    page = made(trl)
    assert "TRL" in page.text and "<b>2+2?" in page.text and EVIL in page.text and page.all("figure")
    verl = tmp_path / "verl"
    verl.mkdir()
    for step in (1, 2):
        lines = [{"input": "2+2?", "output": "4", "score": 1.0, "step": step, "gts": "4"} for _ in range(2)]
        (verl / f"{step}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = made(verl)
    assert "verl" in page.text and "2+2?" in page.text


# ---- the command line -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["nowhere"], "there is no such folder"),
        (["file"], "that is a file"),
        (["empty"], "not a run"),
        (["run", "--out", "empty"], "that is a folder"),
        (["run", "--out", "no/report.html"], "there is no folder no"),
        (["run", "--out", "file"], "--force"),
    ],
)
def test_what_cannot_be_is_refused(
    run: Path, args: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parent)
    Path("empty").mkdir()
    Path("file").write_text("mine")
    assert main(["report", *args]) == 2
    assert words in capsys.readouterr().err
    assert Path("file").read_text() == "mine"


@pytest.mark.long
def test_a_report_is_replaced_and_another_file_only_by_force(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = run.parent / "a.html"
    assert main(["report", str(run), "--out", str(out)]) == 0
    first = out.read_text()
    rewrite(run, lambda x: x | {"entropy": 7.25})
    assert main(["report", str(run), "--out", str(out)]) == 0
    assert out.read_text() != first and 'value="7.25"' in out.read_text()
    out.write_text("mine")
    assert main(["report", str(run), "--out", str(out)]) == 2
    assert main(["report", str(run), "--out", str(out), "--force"]) == 0
    assert out.read_text().startswith("<!doctype html>") and not (run / "report.html").exists()
    assert [path.name for path in run.parent.iterdir() if path.name.startswith(".")] == []


def test_a_folder_that_cannot_be_written_says_so(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(report.os, "replace", full)
    with pytest.raises(ascent.core.errors.ConfigError, match="No space left on device"):
        report.write_aside(run / "report.html", b"x")
    assert not (run / ".report.html.new").exists()


def test_help_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0 and "ascent report RUN" in capsys.readouterr().out
    assert main(["report", "--help"]) == 0 and "no script" in capsys.readouterr().out


# ---- its parts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [
        (0, 1, ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
        (0, 59, ["0", "20", "40", "60"]),
        (-1e-3, 1e-3, ["−0.001", "−0.0005", "0", "0.0005", "0.001"]),
        (3, 3, ["0", "1", "2", "3"]),
    ],
)
def test_ticks_are_round(low: float, high: float, wanted: list[str]) -> None:
    drawn = chart("t", [Series("s", [0, 1], [low, high])])
    ticks = re.findall(r'class="tick end">(.*?)</text>', drawn)
    assert ticks == wanted


@pytest.mark.parametrize("values", [[], [None], [0.0], [5.0] * 3, [1e308, -1e308], [1e-320, 2e-320], [None, 2.0, None]])
def test_any_curve_can_be_drawn(values: list[float | None]) -> None:
    drawn = chart("t", [Series("s", list(range(len(values))), values)])
    assert "nan" not in drawn and "inf" not in drawn


def test_text_is_escaped_wherever_it_stands() -> None:
    template = TEMPLATES.from_string('<p title="{{ texts[0] }}">{{ texts[1] }}{{ texts[3] }}{{ texts[2] }}</p>')
    made = template.render(texts=['"><x', "<b>&\x00", number(1.5), None])
    assert made == '<p title="&#34;&gt;&lt;x">&lt;b&gt;&amp;␀<data value="1.5">1.5</data></p>'


@pytest.mark.long
def test_it_is_made_from_a_place(trained: Path) -> None:
    assert report.report_of(RunEntry("known", trained, "ascent")).startswith("<!doctype html>")
