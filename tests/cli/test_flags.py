"""The grammar of the command line: flags, switches, lists, None, negative numbers; and a command is one file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

import ascent.cli
from ascent.cli.dispatch import commands_by_section
from ascent.cli.flags import Command, parse_flags
from ascent.cli.main import main
from ascent.cli.run_flags import parse_train
from ascent.core.errors import ConfigError
from ascent.settings import configure, settings_of


@dataclass
class XCommand(Command):
    """About x."""

    run: Path
    """The run's folder."""
    steps: int = 3
    """How many."""
    rate: float = 0.5
    """How fast."""
    keep_best: bool = False
    """Keep the best."""
    open: bool = True
    """Open a browser."""
    level: Literal["token", "sequence"] = "token"
    """Of what."""
    bound: Annotated[float | None, "X"] = 1.0
    """How far."""
    names: tuple[str, ...] = ()
    """Which."""
    setting: Annotated[list[str], '"FLAGS"'] = field(default_factory=list)
    """Flags."""
    from_: int | None = None
    """Where."""


READ: dict[str, dict[str, Any]] = {
    "r": {},
    "r --steps 4": {"steps": 4},
    "r --steps=4": {"steps": 4},
    "--steps 4 r": {"steps": 4},
    "r --steps 4 --steps 5": {"steps": 5},
    "r --steps 1_000": {"steps": 1000},
    "r --steps -3 --rate -1e-3": {"steps": -3, "rate": -0.001},
    "r --rate 2": {"rate": 2.0},
    "r --keep-best": {"keep_best": True},
    "--keep-best r": {"keep_best": True},
    "r --keep_best": {"keep_best": True},
    "r --keep-best True --open False": {"keep_best": True, "open": False},
    "r --keep-best=False": {"keep_best": False},
    "r --no-open --no-keep-best": {"open": False, "keep_best": False},
    "r --level sequence": {"level": "sequence"},
    "r --bound None": {"bound": None},
    "r --bound=2": {"bound": 2.0},
    "r --names a b c": {"names": ("a", "b", "c")},
    "r --names a -0.5*b --steps 4": {"names": ("a", "-0.5*b"), "steps": 4},
    "r --names": {"names": ()},
    "r --setting --lr --setting=--loss": {"setting": ["--lr", "--loss"]},
    "r --from 7": {"from_": 7},
    "--steps 4 -- -r": {"steps": 4, "run": Path("-r")},
}


@pytest.mark.parametrize("line", READ)
def test_a_line_is_read(line: str) -> None:
    expected = {"run": Path("r"), "steps": 3, "rate": 0.5, "keep_best": False, "open": True, "level": "token"}
    expected |= {"bound": 1.0, "names": (), "setting": [], "from_": None}
    command = XCommand.read(line.split())
    assert {name: getattr(command, name) for name in expected} == expected | READ[line]


REFUSED = {
    "": "RUN is missing: The run's folder. Usage: ascent x RUN",
    "r s": "s: unexpected argument of ascent x",
    "r --stpes 3": "--stpes: ascent x has no such flag. Did you mean --steps?",
    "r --steps": "--steps needs a value: --steps INT",
    "r --steps --rate 3": "--steps needs a value",
    "r --steps many": "--steps is 'many': it has to be a whole number",
    "r --steps 2.5": "--steps is '2.5': it has to be a whole number",
    "r --rate fast": "--rate is 'fast': it has to be a number",
    "r --keep-best=yes": "--keep-best is 'yes': it has to be True or False",
    "r --level sequenc": "--level is 'sequenc': it has to be one of token, sequence. Did you mean sequence?",
    "r --bound none": "--bound is 'none': it has to be a number or None",
    "r --setting": '--setting needs a value: --setting "FLAGS"',
    "r -- --steps": "--steps: unexpected argument",
}


@pytest.mark.parametrize("line", REFUSED)
def test_a_line_is_refused(line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        XCommand.read(line.split())
    assert REFUSED[line] in str(caught.value)


def test_words_that_belong_to_others_stay_in_their_order() -> None:
    settings = [settings_of(XCommand)["steps"]]
    assert parse_flags(["a", "--x", "1", "--steps", "4", "b", "--", "--steps", "5"], settings) == (
        {"steps": 4},
        ["a", "--x", "1", "b", "--", "--steps", "5"],
    )


def test_help_shows_flags_types_defaults_and_words(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as caught:
        XCommand.read(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for line in (
        "usage: ascent x RUN [OPTIONS]",
        "About x.",
        "RUN  The run's folder.",
        "--steps INT           How many. (default: 3)",
        "--keep-best           Keep the best.",
        "--open, --no-open     Open a browser. (default: True)",
        "--bound X             How far. (default: 1.0)",
        '--setting "FLAGS"     Flags.',
        "--from INT            Where.",
    ):
        assert " ".join(line.split()) in " ".join(text.split()), line
    assert "--level {token,sequence}\n" in text, "what is too wide has a line of its own"


GAE = {"advantage": "gae", "critic": "own-critic", "advantage.whitened": True}


@pytest.mark.parametrize(
    ("line", "settings"),
    [
        ("--loss cispo --loss.high 3", {"loss": "cispo", "loss.high": 3.0}),
        ("--loss.high 3 --loss cispo", {"loss": "cispo", "loss.high": 3.0}),
        ("--lr 0.1", {"update.lr": 0.1}),
        ("--lr 0.1 --update.lr 0.2", {"update.lr": 0.2}),
        ("--lr None", {}),
        ("--advantage gae --critic own-critic --advantage.no-bootstrap --advantage.whitened", GAE),
        ("--update.max_norm None --track wandb mlflow", {"update.max_norm": None, "track": ("wandb", "mlflow")}),
        ("--algorithm trpo --update.delta 0.2", {"algorithm": "trpo", "update.delta": 0.2}),
    ],
)
def test_flags_are_the_settings_of_python(line: str, settings: dict[str, Any]) -> None:
    """The choices are read before the fields that they add, wherever they stand."""
    assert parse_train(["sort", *line.split()], "ascent train")[0] == configure("sort", settings)


# ---- a command is one file ------------------------------------------------------------------------------------

GREET = '''"""`ascent greet`: says hello."""

from dataclasses import dataclass

from ascent.cli.flags import Command


@dataclass
class GreetCommand(Command):
    """Says hello."""

    name: str
    """Who is greeted."""
    times: int = 1
    """How often."""

    def execute(self):
        print(f"hello {self.name} " * self.times)


COMMANDS = {"learn": (GreetCommand,)}
'''


@pytest.fixture
def greeting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A file more in the folder of the commands."""
    (tmp_path / "greet.py").write_text(GREET)
    monkeypatch.setattr(ascent.cli, "__path__", [*ascent.cli.__path__, str(tmp_path)])
    commands_by_section.cache_clear()
    yield
    commands_by_section.cache_clear()


@pytest.mark.usefixtures("greeting")
def test_a_command_is_added_by_one_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0 and "  ascent greet NAME     Says hello." in capsys.readouterr().out
    assert main(["greet", "--help"]) == 0 and "usage: ascent greet NAME [OPTIONS]" in capsys.readouterr().out
    assert main(["greet", "you", "--times", "2"]) == 0 and capsys.readouterr().out == "hello you hello you \n"
    assert main(["greet"]) == 2 and "NAME is missing" in capsys.readouterr().err
    assert main(["gret"]) == 2 and "Did you mean greet?" in capsys.readouterr().err
