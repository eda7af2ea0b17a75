"""Attacks by a run folder: hand-made ones, and any number of damaged ones, each toured as a whole."""

from __future__ import annotations

import os
import random
import resource
import shutil
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import ascent
from ascent.cli import main as cli
from ascent.core.errors import ConfigError, RunError
from ascent.runs import checkpoint, metric_columns, parquet_reader, rollout_files, untrusted_files
from ascent.runs import run_folder as folders
from ascent.runs import run_reader as runs
from ascent.runs.display.terminal import Display
from benchmarks.attacks.attempt import Attack, Fork, scratch
from benchmarks.attacks.damage import Damage
from benchmarks.attacks.tour import contents, tour

KIND, DAMAGED = "hostile folders", "damaged folders"
MANY = 150 << 20
"""Bytes of memory that no small file may take."""
SECONDS = 60.0


def laid_out(stage: Path, folder: Path, kind: str = "good") -> tuple[Path, Path]:
    """A folder of runs, `good` and `bad` in it, and a folder outside."""
    for name in ("good", "bad"):
        shutil.copytree(stage / (kind if name == "bad" else "good"), folder / "runs" / name)
    (folder / "outside").mkdir()
    return folder / "runs" / "bad", folder / "outside"


def toured(stage: Path, damage: Callable[[Path, Path], None]) -> Callable[[Path], str | None]:
    """A folder that was damaged so: does its tour end without complaints, and without a byte outside?"""

    def attempt(folder: Path) -> str | None:
        run, outside = laid_out(stage, folder)
        damage(run, outside)
        complaints = complaints_of(folder, ours=True)
        return complaints[0] if complaints else None

    return attempt


def complaints_of(folder: Path, ours: bool, thorough: bool = True) -> list[str]:
    found: list[str] = []
    before = contents(folder / "outside") | contents(folder / "runs" / "good")
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tour(folder / "runs", ours, folder / "report.html", found.append, thorough)
    if contents(folder / "outside") | contents(folder / "runs" / "good") != before:
        found.append("a byte was written outside")
    if (took := (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) << 10) > 2 * MANY:
        found.append(f"it took {took >> 20} MiB of memory")
    return found


# ---- hand-made -----------------------------------------------------------------------------------------------


def deep_line(run: Path, _: Path) -> None:
    with open(run / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 1}\n' * 1000 + b'{"step": 9, "x": ' + b"[" * 190_000 + b"]" * 190_000 + b"}\n")


def pipe(name: str) -> Callable[[Path, Path], None]:
    def damage(run: Path, _: Path) -> None:
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)

    return damage


def odd_bytes(run: Path, _: Path) -> None:
    for path in run.glob("rollouts/*.parquet"):
        path.write_bytes(path.read_bytes()[:-30])


def plain_open() -> None:
    """Open any path, including pipes and links that lead out of the folder."""
    from ascent.lab.figures.training import routes, trainings
    from ascent.lab.report import run_report

    for module in (untrusted_files, folders, checkpoint, metric_columns, parquet_reader, run_report, routes, trainings):
        module.open_regular = lambda path, _=None: open(path, "rb")  # type: ignore[attr-defined]  # noqa: SIM115
    folders.check_links_stay_inside = runs.check_links_stay_inside = lambda *_: None


def nested_lines() -> None:
    metric_columns.MAX_NESTED_VALUES = 1 << 40


def unnamed_errors() -> None:
    """Let errors of files through as they are, without the name of the file."""
    from ascent.lab.pages.completions import completions

    for module in (parquet_reader, rollout_files, completions):
        module.naming_file = nullcontext  # type: ignore[attr-defined]
    parquet_reader.READ_ERRORS = ()


def reads_outside(stage: Path) -> Callable[[Path], str | None]:
    """Files of a run link to a secret: does any page show it?"""

    def attempt(folder: Path) -> str | None:
        from starlette.testclient import TestClient

        from ascent.lab.server import application
        from benchmarks.attacks.text import poisoned

        run = poisoned(stage, folder / "one", "SECRET")
        shutil.copytree(stage / "good", folder / "runs" / "bad")
        bad = folder / "runs" / "bad"
        for name in ("metrics.jsonl", "events.jsonl", "config.json", "notes.json", "rollouts", "held_out"):
            shutil.rmtree(bad / name) if (bad / name).is_dir() else (bad / name).unlink(missing_ok=True)
            (bad / name).symlink_to(run / name)
        paths = ("view/run", "view/curves", "view/completions", "view/prompts", "view/compare", "view/spark")
        with TestClient(application(bad.parent), raise_server_exceptions=False) as client:
            for path in (*(f"/api/{path}?id=bad" for path in paths), "/api/runs/bad/events", "/api/runs/bad/responses"):
                if "SECRET" in client.get(path).text:
                    return f"{path} told it"
        return None

    return attempt


def writes_outside(stage: Path, name: str, hard: bool = False) -> Callable[[Path], str | None]:
    """A file or folder of the run is a symbolic or hard link: does a resume write to its target?"""

    def attempt(folder: Path) -> str | None:
        run, outside = laid_out(stage, folder)
        there = outside / "there"
        if not (run / name).exists():
            (run / name).write_text("precious\n" * 1000)
        if hard:
            os.link(run / name, there)
        else:
            (run / name).rename(there)
            (run / name).symlink_to(there)
        before = contents(outside)
        with suppress(ConfigError, RunError):
            ascent.resume(run, Display(), from_step=4)
        return "a byte was written outside" if contents(outside) != before else None

    return attempt


def no_ways_out() -> None:
    folders.check_links_stay_inside = runs.check_links_stay_inside = lambda *_: None


def write_over() -> None:
    """Write records and the lock in place, without copying hard-linked files first."""
    folders.os = type(os)("os")
    vars(folders.os).update(vars(os) | {"fstat": lambda file: _alone(os.fstat(file))})

    def create_files(folder: folders.RunFolder) -> None:
        for name in folders.JSONL_FILES:
            (folder.path / name).touch()

    folders.RunFolder.create_files = create_files  # type: ignore[method-assign]
    folders.unlinked = lambda path: path
    folders.open = lambda path, mode="r", **more: open(path, mode.replace("x", "w"), **more)  # type: ignore  # noqa: SIM115


def _alone(about: os.stat_result) -> Any:
    """Return a stat result with a link count of 1."""
    fields = list(about)
    fields[3] = 1
    return os.stat_result(fields)


def loads_outside(stage: Path, *args: str) -> Callable[[Path], str | None]:
    def attempt(folder: Path) -> str | None:
        run, outside = laid_out(stage, folder)
        (run / "checkpoints").rename(outside / "there")
        (run / "checkpoints").symlink_to(outside / "there")
        status = cli.main([arg.format(run=run, folder=folder) for arg in args])
        return "a policy was loaded from elsewhere" if status == 0 else None

    return attempt


def takes_memory(stage: Path, file: str) -> Callable[[Path], str | None]:
    """A small file: how much memory does `ascent show` need to read it?"""

    def attempt(folder: Path) -> str | None:
        run, _ = laid_out(stage, folder)
        shutil.copy(stage / file, run / "rollouts" / "step_000001.parquet")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        cli.main(["show", str(run), "--step", "1", "--json"])
        took = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
        return f"{took >> 20} MiB for {(stage / file).stat().st_size >> 10} KiB" if took > MANY else None

    return attempt


def any_size() -> None:
    parquet_reader.ParquetReader.check_expanded_size = lambda *_: None  # type: ignore[method-assign]


def believe_the_footer() -> None:
    def pages(_: Any, chunk: Any) -> Any:
        yield parquet_reader.PageHeader(chunk.total_uncompressed_size, chunk.num_values, 0)

    parquet_reader.ParquetReader._page_headers = pages  # type: ignore[method-assign]


def attacks(stage: Path) -> list[Attack]:
    piped = ("metrics.jsonl", "config.json", "run.json", "rollouts/step_000001.parquet", "notes.json", ".alive")
    linked = ("metrics.jsonl", "rollouts", "checkpoints", ".lock", "held_out")
    loads = {
        "sample": ("sample", "{run}", "1 2"),
        "eval": ("eval", "{run}"),
        "--init": ("train", "--config", "{run}/config.json", "--init", "{run}", "--out", "{folder}/new"),
    }
    return [
        Attack(KIND, "a deep line", toured(stage, deep_line), nested_lines),
        Attack(KIND, "torn Parquet files", toured(stage, odd_bytes), unnamed_errors),
        *(Attack(KIND, f"{name} is a pipe", toured(stage, pipe(name)), plain_open, hangs=True) for name in piped),
        Attack(KIND, "links to what others wrote", reads_outside(stage), plain_open),
        *(Attack(KIND, f"{name} is a link", writes_outside(stage, name), no_ways_out) for name in linked),
        *(
            Attack(KIND, f"{name} has a second name", writes_outside(stage, name, hard=True), write_over)
            for name in ("metrics.jsonl", "events.jsonl", ".lock", ".alive.new")
        ),
        *(
            Attack(KIND, f"{how} through a link", loads_outside(stage, *args), no_ways_out)
            for how, args in loads.items()
        ),
        Attack(KIND, "one text many thousand times", takes_memory(stage, "bomb.parquet"), any_size),
        Attack(KIND, "a page that its footer belittles", takes_memory(stage, "page.parquet"), believe_the_footer),
        Attack(KIND, "more values than its footer says", takes_memory(stage, "count.parquet"), believe_the_footer),
    ]


# ---- any number of damaged folders -----------------------------------------------------------------------------


def damaged_folder(stage: Path, folder: Path, seed: int, index: int) -> tuple[str, bool]:
    """The damaged folder of this number: how it was damaged, and whether it is a run of Ascent's."""
    rng = random.Random(f"{seed} {index}")
    kind = rng.choice(("good", "good", "good", "good", "trl", "verl"))
    run, outside = laid_out(stage, folder, kind)
    how = [Damage(run, outside, rng).do() for _ in range(1 if rng.random() < 0.8 else 2)]
    return f"{kind}: {' and '.join(how)}", kind == "good"


def visit(
    stage: Path, seed: int, index: int, disarm: Callable[[], None] | None = None, seconds: float = SECONDS
) -> list[str]:
    """Damage a folder and tour it in a separate process; return the complaints, with how the folder was damaged."""
    with scratch() as folder:

        def work() -> list[str]:
            how, ours = damaged_folder(stage, folder, seed, index)
            if disarm is not None:
                disarm()
            return [f"{index}, {how}: {complaint}" for complaint in complaints_of(folder, ours, index % 10 == 9)]

        found = Fork(work, seconds).result()
        for path in folder.rglob("*"):
            if not path.is_symlink():
                path.chmod(0o700)
    return found if isinstance(found, list) else [f"{index}: {found}"]


def visit_many(stage: Path, seed: int, count: int, hands: int = 2) -> list[str]:
    """The complaints about this many damaged folders."""

    def share(hand: int) -> list[str]:
        return [complaint for index in range(hand, count, hands) for complaint in visit(stage, seed, index)]

    working = [Fork(lambda hand=hand: share(hand), count * SECONDS) for hand in range(hands)]  # type: ignore[misc]
    complaints: list[str] = []
    for hand in working:
        found = hand.result()
        complaints += found if isinstance(found, list) else [str(found)]
    return complaints


def nothing_in_the_way() -> None:
    plain_open()
    unnamed_errors()
    nested_lines()
