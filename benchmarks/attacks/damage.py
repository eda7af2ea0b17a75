"""Damage to a run folder, drawn from a seed: bytes flipped, files cut, replaced, linked, nested, odd values."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

DEEP = b"[" * 100_000 + b"]" * 100_000
ODD = (
    None,
    5,
    "x",
    [],
    {},
    [1],
    {"a": 1},
    float("nan"),
    10**400,
    "\ud800",
    True,
    -1,
    1e308,
    [[[]]],
    {"name": 5},
    "../../x",
)
ODD_COLUMNS: tuple[list[Any], ...] = (
    [None, 1, 2],
    ["a", None, "b"],
    [b"\xff", b"a", None],
    [[1], [], None],
    [{"a": 1}, None, {"a": 2}],
    [1.5, float("nan"), float("inf")],
    [True, None, False],
    [10**18, -1, 0],
    [["\0"], ["b", "c"], []],
    [[[1.0]], [[]], None],
)


class Damage:
    """One way or two in which a run is damaged. `outside`: an empty folder that links may lead to."""

    def __init__(self, run: Path, outside: Path, rng: random.Random):
        self.run, self.outside, self.rng = run, outside, rng

    def do(self) -> str:
        """Damage it, and say how."""
        kind = self.rng.choice(list(KINDS))
        paths = [path for path in sorted(self.run.rglob("*")) if not path.is_symlink()]
        files = [path for path in paths if path.is_file()]
        if kind.startswith("odd"):
            files = [path for path in files if path.suffix in (".json", ".jsonl", ".parquet")] or files
        path = self.rng.choice(files if kind in ON_FILES else paths)
        KINDS[kind](self, path)
        return f"{kind} {path.relative_to(self.run)}"

    # ---- bytes ------------------------------------------------------------------------------------------

    def flip(self, path: Path) -> None:
        data = bytearray(path.read_bytes())
        for _ in range(self.rng.choice((1, 3, 20)) if data else 0):
            data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
        path.write_bytes(data)

    def cut(self, path: Path) -> None:
        data = path.read_bytes()
        path.write_bytes(data[: self.rng.randrange(len(data) + 1)])

    def deepen(self, path: Path) -> None:
        line = b'{"step":9,"x":' + DEEP + b"}\n"
        path.write_bytes(self.rng.choice((DEEP, path.read_bytes() + line, b"[" * 900 + b"]" * 900, b'{"a":' * 500)))

    def add_byte(self, path: Path) -> None:
        data = path.read_bytes()
        at = self.rng.randrange(len(data) + 1)
        path.write_bytes(data[:at] + self.rng.choice((b"\xff", b"\0", b"\n", b"\xed\xa0\x80")) + data[at:])

    def replace(self, path: Path) -> None:
        path.write_bytes(self.rng.choice((b"", self.rng.randbytes(2000), b"PAR1PAR1", b"null\n", b"\n" * 1000)))

    def swap(self, path: Path) -> None:
        others = [one for one in sorted(self.run.rglob("*")) if one.is_file() and not one.is_symlink()]
        path.write_bytes(self.rng.choice(others).read_bytes())

    # ---- what a path is ---------------------------------------------------------------------------------

    def remove(self, path: Path) -> None:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()

    def link(self, path: Path) -> None:
        """Its content lies outside, behind a link."""
        there = self.outside / "there"
        if there.exists():
            return
        path.rename(there)
        path.symlink_to(there)

    def link_to(self, path: Path) -> None:
        """A device, a file that is not there, a folder above, itself."""
        self.remove(path)
        path.symlink_to(self.rng.choice(("/dev/zero", "/dev/stdin", self.outside / "new", self.run, "..", path.name)))
        for name in (".lock", ".alive.new", ".run.json.new", "report.html", ".metrics.jsonl.new"):
            if self.rng.random() < 0.2 and not os.path.lexists(self.run / name):
                (self.run / name).symlink_to(self.outside / "new")

    def hard_link(self, path: Path) -> None:
        """A second name outside, also for names that a resume writes."""
        for name in (path.relative_to(self.run), ".lock", ".alive.new", "error.txt"):
            target = self.outside / Path(name).name
            if not (self.run / name).exists():
                (self.run / name).write_text("precious\n" * 9)
            if (self.run / name).is_file() and not target.exists():
                os.link(self.run / name, target)

    def pipe(self, path: Path) -> None:
        self.remove(path)
        os.mkfifo(path)

    def folder(self, path: Path) -> None:
        self.remove(path)
        path.mkdir()

    def nest(self, path: Path) -> None:
        """The run within itself, or many folders deep."""
        inner = path if path.is_dir() else path.parent
        if self.rng.random() < 0.5:
            with suppress(shutil.Error):  # a pipe is not copied
                shutil.copytree(self.run, self.outside / "copy", symlinks=True)
            shutil.move(
                self.outside / "copy", inner / self.rng.choice(("run", "step_000009", "rollouts", "checkpoint-9"))
            )
        else:
            with suppress(OSError):
                inner.joinpath(*["deep"] * 200).mkdir(parents=True)

    def lock_up(self, path: Path) -> None:
        path.chmod(0)

    # ---- odd values -------------------------------------------------------------------------------------

    def odd_values(self, path: Path) -> None:
        self.odd_table(path) if path.suffix == ".parquet" else self.odd_json(path)

    def odd_json(self, path: Path) -> None:
        lines = (
            path.read_text(errors="replace").splitlines()
            if path.suffix == ".jsonl"
            else [path.read_text(errors="replace")]
        )
        try:
            value = json.loads(lines[0])
        except (ValueError, IndexError):
            value = {}
        lines[:1] = [json.dumps(self.hit(value))]
        path.write_text("\n".join([*lines, ""]))

    def hit(self, value: Any) -> Any:
        """The value, with something in it replaced or left out."""
        if isinstance(value, dict) and value:
            key, chance = self.rng.choice(list(value)), self.rng.random()
            if chance < 0.2:
                value.pop(key)
            else:
                value[key] = self.hit(value[key]) if chance < 0.6 else self.rng.choice(ODD)
            return value
        if isinstance(value, list) and value and self.rng.random() < 0.5:
            at = self.rng.randrange(len(value))
            value[at] = self.hit(value[at])
            return value
        return self.rng.choice(ODD)

    def odd_table(self, path: Path) -> None:
        try:
            table = pq.read_table(path)
        except (OSError, ValueError, pa.ArrowException):
            return
        names, rows = table.column_names, table.num_rows
        if not names:
            return
        at = self.rng.randrange(len(names))
        column = pa.array((self.rng.choice(ODD_COLUMNS) * max(1, rows))[:rows])
        change: Callable[[], pa.Table] = self.rng.choice(
            (
                lambda: table.drop_columns([names[at]]),
                lambda: table.set_column(at, names[at], column),
                lambda: table.slice(0, 0),
                lambda: table.append_column(names[at], column),
                lambda: table.set_column(at, names[at], pa.nulls(rows)),
                lambda: pa.concat_tables([table] * 200),
                lambda: table.rename_columns([f"{name}\ud800".encode("utf-8", "replace").decode() for name in names]),
            )
        )
        pq.write_table(change(), path)


KINDS: dict[str, Callable[[Damage, Path], None]] = {
    "flipped": Damage.flip,
    "cut": Damage.cut,
    "deep": Damage.deepen,
    "a byte more": Damage.add_byte,
    "replaced": Damage.replace,
    "another file's content": Damage.swap,
    "removed": Damage.remove,
    "linked": Damage.link,
    "a link": Damage.link_to,
    "hard-linked": Damage.hard_link,
    "a pipe": Damage.pipe,
    "a folder": Damage.folder,
    "nested": Damage.nest,
    "not readable": Damage.lock_up,
    "odd values": Damage.odd_values,
    "odd values, again": Damage.odd_values,
    "odd values, and again": Damage.odd_values,
}
ON_FILES = frozenset({"flipped", "cut", "deep", "a byte more", "replaced", "another file's content", "hard-linked"})
ON_FILES |= {name for name in KINDS if name.startswith("odd")}
