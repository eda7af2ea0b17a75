"""The command `ascent`: finds the commands in this folder, and runs one."""

import inspect
import os
import pkgutil
import sys
import textwrap
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from importlib import import_module
from types import SimpleNamespace

import ascent.cli
from ascent.api import interruptible
from ascent.cli.flags import Command
from ascent.core.errors import ConfigError, RunError
from ascent.core.menu import nearest
from ascent.distributed.ranks import torchrun_rank, torchrun_world_size
from ascent.runs import trust
from ascent.runs.display.terminal import printable

SECTIONS = ("train", "train on offline data", "make data", "look at a run", "learn")


@cache
def sections() -> dict[str, list[type[Command]]]:
    """The commands that the modules of this folder list in COMMANDS. The last module comes first, so `train` does."""
    names = sorted(module.name for module in pkgutil.iter_modules(ascent.cli.__path__) if module.name != "main")
    modules = [import_module(f"ascent.cli.{name}") for name in reversed(names)]
    tables = [getattr(module, "COMMANDS", {}) for module in modules]
    return {section: [command for table in tables for command in table.get(section, ())] for section in SECTIONS}


def commands() -> dict[str, type[Command]]:
    """Every command by its name."""
    return {command.prog().removeprefix("ascent "): command for listed in sections().values() for command in listed}


def usage() -> str:
    lines = ["usage: ascent COMMAND …"]
    for section, listed in sections().items():
        lines += ["", f"{section}:"]
        for command in listed:
            summary = " ".join((inspect.getdoc(command) or "").split("\n\n")[0].split())
            head = f"  {command.usage()}"
            if len(head) > 23:
                lines.append(head)
                head = ""
            lines += textwrap.wrap(summary, 78, initial_indent=f"{head:<24}", subsequent_indent=" " * 24)
    trusted = "Commands that load a run take --trust: it lists what a run from elsewhere uses beyond data, and asks."
    return "\n".join(
        [*lines, "", trusted, "Run `ascent COMMAND --help` for details. Try `ascent train lecture` first."]
    )


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 finished, 1 stopped by trouble, 2 bad input, 130 interrupted."""
    args = list(sys.argv[1:] if argv is None else argv)
    trust.asking = "--trust" in args
    trust.TRUSTED.update(arg.removeprefix("--trust=") for arg in args if arg.startswith("--trust="))
    args = [arg for arg in args if arg.partition("=")[0] != "--trust"]  # of every command that loads a run
    return guarded(lambda: _execute(args))


def _execute(args: list[str]) -> int:
    if args[:1] in (["--version"], ["-V"]):
        print(f"ascent {ascent.__version__}")
        return 0
    if not args or args[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if args else 2
    return _command(args[0]).read(args[1:]).execute() or 0


def _command(name: str) -> type[Command]:
    if name not in commands():
        raise ConfigError(f"{name}: no such command.{nearest(name, commands())} `ascent --help` lists them")
    if torchrun_world_size() > 1 and not commands()[name].ranks:
        several = " and ".join(command for command, cls in commands().items() if cls.ranks)
        raise ConfigError(
            f"ascent {name} is work for one process: start it without torchrun. With it there are {several}"
        )
    return commands()[name]


def tell(words: str) -> None:
    """What went wrong, which may quote a response: as text, whatever is in it.

    Of several ranks rank 0 says it, which torchrun may have ended by then: so does the one that it is about.
    """
    if torchrun_rank() and not any(f"rank {rank} of " in words for rank in (0, torchrun_rank())):
        return
    print(printable(words), file=sys.stderr)


def guarded(work: Callable[[], int]) -> int:
    """The exit status of a command, however it ends, with the reason in words.

    SIGTERM and a closed terminal interrupt it as Ctrl-C does. torchrun's ranks die of them, also while they wait in C.
    """
    try:
        with nullcontext() if torchrun_world_size() > 1 else interruptible(SimpleNamespace(stop=True)):
            status = work()
        sys.stdout.flush()
        return status
    except SystemExit as ended:  # after help was printed
        return int(ended.code or 0)
    except ConfigError as error:
        tell(f"ascent: {error}")
        return 2
    except BrokenPipeError:  # the reader of our output has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (RunError, OSError) as error:
        tell(f"ascent: stopped: {error}")
        return 1
    except KeyboardInterrupt as error:
        tell(f"ascent: interrupted{f': {error}' if str(error) else ''}")
        return 130


if __name__ == "__main__":
    sys.exit(main())
