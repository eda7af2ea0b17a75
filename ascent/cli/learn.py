"""`ascent demo`, `ascent list`, `ascent explain` and `ascent lab`: to learn what the library does."""

import importlib.util
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ascent.api import start
from ascent.build.trained_run import Run
from ascent.cli.flags import Command
from ascent.core.errors import ConfigError
from ascent.explain.explain import explanation, menu_text
from ascent.runs.display.notebook import for_stream
from ascent.runs.display.plots import draw_line, figure, finish_panel, line_style, save_figure, series
from ascent.runs.display.terminal import wrapped
from ascent.settings import configure
from ascent.workflows.loaded_policy import problems, run_policy


@dataclass
class ExplainCommand(Command):
    """Explain an algorithm or a choice: words, formula, bias, and what TRL and verl do.

    `ascent list` has all names. Try: ascent explain grpo
    """

    name: str
    """An algorithm or a choice, such as grpo."""

    def execute(self) -> None:
        print(explanation(self.name))


class ListCommand(Command):
    """The tasks, the algorithms and the menu.

    `ascent explain NAME` explains each of them.
    """

    def execute(self) -> None:
        print(menu_text())


@dataclass
class LabCommand(Command):
    """Lessons, live figures and your runs in the browser.

    The library computes everything on this machine. The page is served to this
    machine only, and only to a browser that has opened the printed address. That
    works once; then another address is printed. A training started there continues
    after the lab is closed.
    """

    port: int = 8321
    """The port to listen on; 0 takes any free one."""
    host: Annotated[str, "ADDRESS"] = "127.0.0.1"
    """The address to listen on. With another one, other machines can reach the lab, and traffic is not encrypted."""
    runs: Path = Path("runs")
    """The folder of runs: the lab shows them, and writes its trainings there."""
    open: bool = True
    """Open a browser."""

    def execute(self) -> int:
        needed = ("starlette", "uvicorn", "markdown_it", "latex2mathml")
        missing = [name for name in needed if importlib.util.find_spec(name) is None]
        if missing:
            raise ConfigError(
                f"the lab needs {' and '.join(missing)}, which is not installed: pip install 'ascent-rl[lab]'"
            )
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port {self.port}: ports go from 0 to 65535; 0 takes a free one")
        from ascent.lab.server import serve_lab

        return serve_lab(self.runs, self.host, self.port, self.open)


# ---- the demo: the lecture's policy stuck and solved, and a reward being hacked, in under a minute ---------------

RUNS: tuple[tuple[str, str, str, dict[str, object]], ...] = (
    ("course", "The course's settings", "lecture", {"preset": "course", "advantage": "normalized"}),
    ("ours", "Ours: ratio clipped, entropy bonus annealed", "lecture", {}),
    (
        "loophole",
        "Five numbers out of three: a hackable reward",
        "sort",
        {"length": 5, "numbers": 3, "reward": "inclusion-ordering", "steps": 60, "eval_every": 5, "record_every": 20},
    ),
)
NEXT = """
What to try next:
  ascent show {ours} --step 0
      what was sampled, and the credit it got
  ascent explain grpo
      what GRPO computes, and where it is biased
  ascent compare lecture --algorithms reinforce,rloo,grpo,dr-grpo
      over seeds, with intervals
  ascent train sort
      sort five numbers out of ten, in a minute"""


class DemoCommand(Command):
    """The lecture's policy, stuck and solved, and a reward being hacked.

    Trains the lecture's policy with the course's settings and with ours, then
    shows a reward being hacked: three runs and a picture in runs/, in under a
    minute.
    """

    def execute(self) -> int | None:
        began = time.monotonic()
        out = Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-demo"
        runs: dict[str, Run] = {}
        for name, title, task, settings in RUNS:
            flags = "".join(f" --{key.replace('_', '-')} {value}" for key, value in settings.items())
            print(f"\n{title}:\n{wrapped(f'  ascent train {task}{flags}', 4)}", flush=True)
            runs[name] = start(configure(task, settings), out / name, for_stream())
            if runs[name].status != "finished":
                print(f"Interrupted. What has run is in {out}")
                return 130
        print("", *(wrapped(line, 3) for line in _story(*runs.values())), sep="\n")
        print(f"\nCurves: {draw_demo(runs, out / 'demo.png')}")
        print("Runs:   " + "\n        ".join(str(run.folder) for run in runs.values()))
        print(NEXT.format(ours=runs["ours"].folder))
        print(f"\nThe demo took {time.monotonic() - began:.0f} s.")
        return None


def _story(course: Run, ours: Run, loophole: Run) -> list[str]:
    """What the three runs show, in paragraphs."""
    stuck, solved, hacked = (run.result or {} for run in (course, ours, loophole))
    return [
        f"1. With the course's settings E[R] ends at {stuck['exact/reward']:.2f} of 5, and it stays there.",
        *_answers(course),
        *(f"   {word}" for word in stuck["words"][1:]),
        "   More samples would not help: even ascent on the exact gradient stops short, because the reward has "
        "local optima. The one answer [1 2 3] earns 4, 4 and 5 of 5 on the three prompts.",
        "",
        "2. With an entropy bonus that fades, a higher learning rate and clipping, the same number of responses and "
        f"updates reaches {solved['exact/reward']:.2f} of 5.",
        *_answers(ours),
        "",
        "3. A reward for numbers included and pairs in order, where every prompt repeats a number: "
        f"{hacked['eval/reward']:.2f} of {hacked['max_reward']:g} is earned, and {hacked['eval/accuracy']:.0%} of "
        "the answers are sorted.",
        *_answers(loophole),
        *(f"   {word}" for word in hacked["words"][1:]),
    ]


def _answers(run: Run) -> list[str]:
    """The greedy answers of the trained policy to three held-out prompts, with their rewards."""
    return [
        f"    {row['prompt']} → [{row['response']}]  reward {row['reward']:g} of {run.config.task.max_reward:g}  "
        + ("sorted" if row["strict"] else "wrong")
        for row in problems(run_policy(run.folder), 3, greedy=True, seed=0)
    ]


def draw_demo(runs: dict[str, Run], path: Path) -> Path:
    """For each run the share of the reward that it earned and the share that it got right, on one axis."""
    fig, axes = figure(1, len(runs), (13.0, 3.6))
    for axis, (name, title, _, _) in zip(axes.flat, RUNS, strict=True):
        maximum = runs[name].config.task.max_reward or 1.0
        for i, (key, label, largest) in enumerate((("reward", "reward", maximum), ("accuracy", "exactly right", 1.0))):
            steps, values = series(runs[name].metrics, key)
            draw_line(axis, steps, values / largest, line_style(i) | {"label": label})
        finish_panel(axis, title, "share of the maximum" if axis is axes.flat[0] else "", True, "step")
    axes.flat[0].legend(frameon=False, loc="center right")
    return save_figure(fig, path)


COMMANDS = {"learn": (DemoCommand, ListCommand, ExplainCommand, LabCommand)}
