"""`ascent demo`, `ascent list`, `ascent explain` and `ascent lab`."""

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
from ascent.runs.display.notebook import default_display
from ascent.runs.display.plots import draw_line, figure, finish_panel, line_style, save_figure, series
from ascent.runs.display.terminal import wrapped
from ascent.settings import configure
from ascent.workflows.loaded_policy import answer_held_out, run_policy


@dataclass
class ExplainCommand(Command):
    """Explain an algorithm or a choice: formula, bias, and what TRL and verl do.

    `ascent list` shows all names. Example: ascent explain grpo
    """

    name: str
    """An algorithm or a choice, such as grpo."""

    def execute(self) -> None:
        print(explanation(self.name))


class ListCommand(Command):
    """List the tasks, the algorithms, and the choices of each axis.

    `ascent explain NAME` explains an algorithm or a choice.
    """

    def execute(self) -> None:
        print(menu_text())


@dataclass
class LabCommand(Command):
    """Open lessons, live figures and your runs in the browser.

    Everything is computed on this machine. The page is served to this machine
    only, and only to the browser that opened the printed address. An address works
    once; then a new one is printed. Trainings that you start in the lab continue
    after it is closed.
    """

    port: int = 8321
    """Port to listen on; 0: a free one."""
    host: Annotated[str, "ADDRESS"] = "127.0.0.1"
    """Address to listen on. With another one, other machines can reach the lab, unencrypted."""
    runs: Path = Path("runs")
    """Folder of runs: the lab shows its runs and writes new ones there."""
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
            raise ConfigError(f"--port {self.port}: set 0 to 65535; 0 takes a free one")
        from ascent.lab.server import serve_lab

        return serve_lab(self.runs, self.host, self.port, self.open)


# ---- the demo -------------------------------------------------------------------------------------------------

DEMO_RUNS: tuple[tuple[str, str, str, dict[str, object]], ...] = (
    ("course", "The course's settings", "lecture", {"preset": "course", "advantage": "normalized"}),
    ("ours", "Ours: ratio clipped, entropy bonus annealed", "lecture", {}),
    (
        "loophole",
        "Five numbers out of three: a hackable reward",
        "sort",
        {"length": 5, "numbers": 3, "reward": "inclusion-ordering", "steps": 60, "eval_every": 5, "record_every": 20},
    ),
)
NEXT_STEPS = """
What to try next:
  ascent show {ours} --step 0
      the responses with their rewards and advantages
  ascent explain grpo
      what GRPO computes, and where it is biased
  ascent compare lecture --algorithms reinforce,rloo,grpo,dr-grpo
      a comparison over seeds, with intervals
  ascent train sort
      train a policy to sort five numbers in a minute"""


class DemoCommand(Command):
    """Train three small policies in a minute: one gets stuck, one learns, one hacks its reward.

    Trains the lecture's policy with the course's settings and with better ones,
    then shows a reward being hacked: three runs and a picture in runs/.
    """

    def execute(self) -> int | None:
        started = time.monotonic()
        out = Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-demo"
        runs: dict[str, Run] = {}
        for name, title, task, settings in DEMO_RUNS:
            flags = "".join(f" --{key.replace('_', '-')} {value}" for key, value in settings.items())
            print(f"\n{title}:\n{wrapped(f'  ascent train {task}{flags}', 4)}", flush=True)
            runs[name] = start(configure(task, settings), out / name, default_display())
            if runs[name].status != "finished":
                print(f"Interrupted. The runs so far are in {out}")
                return 130
        print("", *(wrapped(line, 3) for line in _story(*runs.values())), sep="\n")
        print(f"\nCurves: {draw_demo(runs, out / 'demo.png')}")
        print("Runs:   " + "\n        ".join(str(run.folder) for run in runs.values()))
        print(NEXT_STEPS.format(ours=runs["ours"].folder))
        print(f"\nThe demo took {time.monotonic() - started:.0f} s.")
        return None


def _story(course: Run, ours: Run, loophole: Run) -> list[str]:
    """Return paragraphs on what the three runs show."""
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
    """Return the greedy responses of the trained policy to three held-out prompts, with their rewards."""
    return [
        f"    {row['prompt']} → [{row['response']}]  reward {row['reward']:g} of {run.config.task.max_reward:g}  "
        + ("sorted" if row["strict"] else "wrong")
        for row in answer_held_out(run_policy(run.folder), 3, greedy=True, seed=0)
    ]


def draw_demo(runs: dict[str, Run], path: Path) -> Path:
    """Plot reward and accuracy of each run as shares of their maxima."""
    fig, axes = figure(1, len(runs), (13.0, 3.6))
    for axis, (name, title, _, _) in zip(axes.flat, DEMO_RUNS, strict=True):
        maximum = runs[name].config.task.max_reward or 1.0
        for i, (key, label, largest) in enumerate((("reward", "reward", maximum), ("accuracy", "exactly right", 1.0))):
            steps, values = series(runs[name].metrics, key)
            draw_line(axis, steps, values / largest, line_style(i) | {"label": label})
        finish_panel(axis, title, "share of the maximum" if axis is axes.flat[0] else "", True, "step")
    axes.flat[0].legend(frameon=False, loc="center right")
    return save_figure(fig, path)


COMMANDS = {"learn": (DemoCommand, ListCommand, ExplainCommand, LabCommand)}
