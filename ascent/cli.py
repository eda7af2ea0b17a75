"""The command `ascent`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from ascent.types import Refused, Trouble

if TYPE_CHECKING:
    from ascent.records.display import Display

USAGE = """\
usage: ascent COMMAND …

  ascent train TASK      train a policy; any axis of the menu is an option
  ascent sft FILE        learn from demonstrations: a warm start
  ascent dpo FILE        learn from pairs of responses, of which one was preferred
  ascent reward-model FILE  a reward model from such pairs, with its accuracy and calibration
  ascent pairs RUN FILE  such pairs, from a run's policy and the true reward
  ascent label FILE OUT  pairs of responses, labelled by a language model behind an OpenAI-compatible address
  ascent label-steps RUN FILE  what responses are worth after each step, from roll-outs of a run's policy
  ascent process-reward FILE  a process reward from labelled steps: a reward per token
  ascent rounds TASK     iterative GRPO: rounds of pairs, a reward model and a policy, each an ordinary run
  ascent preflight TASK  what `train` would do, its memory, its reward and a first sample, without training
  ascent compare TASK    several algorithms or settings over several seeds, in one table and one picture
  ascent explain NAME    what a row or a choice computes, in words and in a formula, and where it is biased
  ascent resume RUN      go on with a run, to the same numbers
  ascent show RUN        what a run did; --step N for its responses, --json for scripts
  ascent report RUN      a run as one HTML file, to send to a colleague
  ascent eval RUN        scores on held-out prompts: greedy, pass@k, majority, best of k; also of a bare model
  ascent sample RUN "…"  what the policy says to a prompt; also what a bare model says
  ascent export RUN DIR  the run's language model as an ordinary Hugging Face folder
  ascent list            the tasks, the algorithms and the menu
  ascent demo            the lecture's policy, stuck and solved, and a reward being hacked
  ascent lab             lessons and five live figures in the browser

`ascent COMMAND --help` says more. Try `ascent train lecture` first: it takes a few seconds.
"""


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 finished, 1 stopped by trouble, 2 bad input, 130 interrupted."""
    args = sys.argv[1:] if argv is None else argv
    if not args or args[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0 if args else 2
    return guarded(lambda: _command(args[0])(args[1:]))


def _command(name: str) -> Callable[[list[str]], int]:
    if name not in COMMANDS:
        from ascent.menu import nearest

        raise Refused(f"{name}: no such command.{nearest(name, COMMANDS)} `ascent --help` lists them")
    return COMMANDS[name]


def guarded(work: Callable[[], int]) -> int:
    """The exit status of a command, whatever becomes of it, with its reason in words."""
    try:
        status = work()
        sys.stdout.flush()
        return status
    except SystemExit as ended:  # tyro's, after it has printed its help or its message
        return int(ended.code or 0)
    except Refused as error:
        print(f"ascent: {error}", file=sys.stderr)
        return 2
    except Trouble as error:
        print(f"ascent: stopped: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as error:
        print(f"ascent: interrupted{f': {error}' if str(error) else ''}", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read our words has had enough of them
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        print(f"ascent: stopped: {error}", file=sys.stderr)
        return 1


def train(
    args: list[str], prog: str = "ascent train", after: Callable | None = None, display: Display | None = None
) -> int:
    from ascent.api import start
    from ascent.commands.flags import parse_train
    from ascent.records.display import for_stream

    config, options = parse_train(args, prog)
    if options.dry_run:
        from ascent.api import assemble, default_folder
        from ascent.commands.terminal import plan
        from ascent.records.folder import refuse_taken

        folder = options.out or default_folder(config)
        refuse_taken(folder)
        assemble(config).close()
        print(plan(config, folder))
        return 0
    return _ended(lambda: start(config, options.out, display or for_stream(), options.preflight), after)


def preflight(args: list[str]) -> int:
    from ascent.assemble import assemble
    from ascent.commands.flags import parse_train
    from ascent.commands.terminal import plan
    from ascent.policies import LanguageModel

    config, options = parse_train(args, "ascent preflight")
    parts = assemble(config)
    try:
        if not isinstance(parts.policy, LanguageModel):
            print(plan(config, options.out or Path("runs")))
            return 0
        from ascent.preflight import preflight

        report = preflight(parts)
    finally:
        parts.close()
    print(report.text())
    report.insist()
    return 0


def resume(args: list[str]) -> int:
    from ascent.api import resume
    from ascent.commands.flags import parse_resume
    from ascent.records import Run

    options = parse_resume(args)
    if options.from_step is None and Run(options.run).status == "finished":
        print(f"{options.run} is finished: there is nothing to go on with. Look closer: ascent show {options.run}")
        return 0
    return _ended(lambda: resume(options.run, from_step=options.from_step))


def _ended(work: Callable, after: Callable | None = None) -> int:
    """Carry out a run; say how it ended, in words and with what to type next, and what comes `after` it."""
    from ascent.commands.terminal import ending
    from ascent.records import Run

    run: Run = work()
    if run.status == "finished":
        plot(run)
    print(ending(run))
    if after is not None and run.status == "finished":
        after(run)
    return 0 if run.status == "finished" else 130


def plot(run: object) -> Path:
    from ascent.records import Run
    from ascent.records.plot import plot_runs

    assert isinstance(run, Run)
    title = f"{run.info['task']}, {run.info['label']}, seed {run.info['seed']}"
    return plot_runs([(run.folder.name, run.metrics, run.config.task.max_reward)], run.folder / "plot.png", title)


def show(args: list[str]) -> int:
    from ascent.commands.flags import parse_show
    from ascent.commands.terminal import responses, summary
    from ascent.records import Run

    options = parse_show(args)
    run = Run(options.run)
    if options.step is not None:
        rows = run.rollouts(options.step)
        print(json.dumps(rows) if options.json else responses(rows))
    elif options.json:
        config = json.loads((run.folder / "config.json").read_text())
        about = run.info | {"status": run.status, "folder": str(run.folder)}
        print(json.dumps({"run": about, "config": config, "metrics": run.metrics, "events": run.events}))
    else:
        print(summary(run))
    return 0


def explain(args: list[str]) -> int:
    from ascent.diagnose.explain import explain

    if _asks_for_help(args):
        print(
            "usage: ascent explain NAME\n\nWhat a row or a choice computes, in words and in a formula, and where "
            "it is biased.\n`ascent list` has all names. Try: ascent explain grpo"
        )
        return 0
    if len(args) != 1:
        raise Refused(
            "ascent explain takes one NAME, a row or a choice: ascent explain grpo. `ascent list` has them all"
        )
    print(explain(args[0]))
    return 0


def list_menu(args: list[str]) -> int:
    from ascent.diagnose.explain import menu_text

    if _asks_for_help(args):
        print("usage: ascent list\n\nThe tasks, the algorithms and the menu. `ascent explain NAME` says more of each.")
        return 0
    if args:
        raise Refused(f"ascent list takes nothing more, but was given {' '.join(args)}")
    print(menu_text())
    return 0


def _asks_for_help(args: list[str]) -> bool:
    return "-h" in args or "--help" in args


def demo(args: list[str]) -> int:
    if _asks_for_help(args):
        print(
            "usage: ascent demo\n\nTrains the lecture's policy with the course's settings and with ours, then shows a "
            "reward being\nhacked: three runs and a picture in runs/, in under a minute."
        )
        return 0
    if args:
        raise Refused(f"ascent demo takes nothing more, but was given {' '.join(args)}")
    from ascent.commands.demo import main

    return main()


def _of(module: str, name: str = "command") -> Callable[[list[str]], int]:
    """A command that lives in a module of its own, which is imported on use."""
    return lambda args: getattr(import_module(f"ascent.{module}"), name)(args)


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": train,
    "sft": _of("commands.learn", "sft"),
    "dpo": _of("commands.learn", "dpo"),
    "reward-model": _of("commands.learn", "reward_model"),
    "process-reward": _of("commands.learn", "process_reward"),
    "pairs": _of("commands.data", "pairs"),
    "label": _of("commands.data", "label"),
    "label-steps": _of("commands.data", "label_steps"),
    "rounds": _of("commands.rounds"),
    "preflight": preflight,
    "compare": _of("commands.compare"),
    "explain": explain,
    "resume": resume,
    "show": show,
    "report": _of("viewer.report.command"),
    "eval": _of("commands.ask", "evaluate"),
    "sample": _of("commands.ask", "sample"),
    "export": _of("commands.ask", "export"),
    "list": list_menu,
    "demo": demo,
    "lab": _of("lab.command", "main"),
}

if __name__ == "__main__":
    sys.exit(main())
