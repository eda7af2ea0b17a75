"""Find the commands in this folder, run one, and turn its errors into an exit status."""

import inspect
import os
import pkgutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from importlib import import_module
from types import SimpleNamespace

import ascent.cli
from ascent.api import interruptible
from ascent.cli.flags import Command
from ascent.cli.help_text import help_width
from ascent.core.errors import ConfigError, RunError
from ascent.core.menu import nearest
from ascent.distributed.ranks import torchrun_rank, torchrun_world_size
from ascent.runs import trust
from ascent.runs.display.terminal import printable

SECTIONS = ("train", "train on offline data", "make data", "look at a run", "learn")
NAME_WIDTH = 24
"""Columns for usage lines in `ascent --help`; a longer usage has its own line."""


@cache
def commands_by_section() -> dict[str, list[type[Command]]]:
    """Return the commands listed in COMMANDS by the modules of this folder; `train` comes first in its section."""
    names = sorted(module.name for module in pkgutil.iter_modules(ascent.cli.__path__))
    modules = [import_module(f"ascent.cli.{name}") for name in reversed(names) if name not in ("main", "dispatch")]
    tables = [getattr(module, "COMMANDS", {}) for module in modules]
    return {section: [command for table in tables for command in table.get(section, ())] for section in SECTIONS}


def commands() -> dict[str, type[Command]]:
    """Return every command by its name."""
    sections = commands_by_section().values()
    return {command.prog().removeprefix("ascent "): command for section in sections for command in section}


def overview() -> str:
    """Return the text of `ascent --help`."""
    lines = ["usage: ascent COMMAND [OPTIONS]"]
    for section, listed in commands_by_section().items():
        lines += ["", f"{section}:"]
        for command in listed:
            summary = " ".join((inspect.getdoc(command) or "").split("\n\n")[0].split())
            head = f"  {command.usage()}"
            if len(head) >= NAME_WIDTH:
                lines.append(head)
                head = ""
            first, others = head.ljust(NAME_WIDTH), " " * NAME_WIDTH
            lines += textwrap.wrap(summary, help_width(), initial_indent=first, subsequent_indent=others)
    notes = (
        "Commands that load a run take --trust: it lists what a run from another machine would execute or read, and "
        "asks for confirmation.",
        "`ascent COMMAND --help` describes a command. To begin: ascent train lecture",
    )
    return "\n".join([*lines, "", *(textwrap.fill(note, help_width()) for note in notes)])


def run_command(argv: Sequence[str]) -> int:
    """Run the command that `argv` names and return its exit status."""
    args = list(argv)
    trust.ask_at_terminal = "--trust" in args
    trust.TRUSTED.update(arg.removeprefix("--trust=") for arg in args if arg.startswith("--trust="))
    args = [arg for arg in args if arg.partition("=")[0] != "--trust"]  # a flag of every command that loads a run
    return exit_status(lambda: _execute(args))


def _execute(args: list[str]) -> int:
    if args[:1] in (["--version"], ["-V"]):
        print(f"ascent {ascent.__version__}")
        return 0
    if not args or args[0] in ("-h", "--help", "help"):
        print(overview())
        return 0 if args else 2
    return find_command(args[0]).read(args[1:]).execute() or 0


def find_command(name: str) -> type[Command]:
    """Return the command with this name. Under torchrun only some commands are allowed."""
    if name not in commands():
        raise ConfigError(f"{name}: no such command.{nearest(name, commands())} `ascent --help` lists them")
    if torchrun_world_size() > 1 and not commands()[name].under_torchrun:
        allowed = " and ".join(command for command, cls in commands().items() if cls.under_torchrun)
        raise ConfigError(
            f"ascent {name} does not run under torchrun: start it in one process. These commands do: {allowed}"
        )
    return commands()[name]


def print_error(message: str) -> None:
    """Print an error to stderr with control characters escaped, because it may quote a response.

    Of several ranks, rank 0 prints it. torchrun may have ended rank 0 already, so the rank named in the message
    prints it too.
    """
    if torchrun_rank() and not any(f"rank {rank} of " in message for rank in (0, torchrun_rank())):
        return
    print(printable(message), file=sys.stderr)


def exit_status(command: Callable[[], int]) -> int:
    """Run a command, print the error if it fails, and return its exit status.

    SIGTERM and a closed terminal interrupt the command as Ctrl-C does. Under torchrun they end the process at once,
    even while it waits in C code.
    """
    try:
        with nullcontext() if torchrun_world_size() > 1 else interruptible(SimpleNamespace(stop=True)):
            status = command()
        sys.stdout.flush()
        return status
    except SystemExit as ended:  # help was printed
        return int(ended.code or 0)
    except ConfigError as error:
        print_error(f"ascent: {error}")
        return 2
    except BrokenPipeError:  # the reader of the output is gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (RunError, OSError) as error:
        print_error(f"ascent: stopped: {error}")
        return 1
    except KeyboardInterrupt as error:
        print_error(f"ascent: interrupted{f': {error}' if str(error) else ''}")
        return 130
