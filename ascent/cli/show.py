"""`ascent show` and `ascent report`: what a run did, to read and to send."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ascent.cli.flags import Command
from ascent.records.text_tables import cell_text, table, width, wrapped

if TYPE_CHECKING:
    from ascent.records import Run


@dataclass
class ShowCommand(Command):
    """What a run did; --step N for its responses, --json for scripts."""

    run: Path
    """The run's folder."""
    step: Annotated[int | None, "N"] = None
    """Print the responses of this step: prompts, responses, log-probs, rewards and δ."""
    json: bool = False
    """One JSON object, for scripts."""

    def execute(self) -> None:
        from ascent.records import Run

        run = Run(self.run)
        if self.step is not None:
            rows = run.rollouts(self.step)
            print(json.dumps(rows) if self.json else responses(rows))
        elif self.json:
            config = json.loads((run.folder / "config.json").read_text())
            about = run.info | {"status": run.status, "folder": str(run.folder)}
            print(json.dumps({"run": about, "config": config, "metrics": run.metrics, "events": run.events}))
        else:
            print(summary(run))


@dataclass
class ReportCommand(Command):
    """A run as one HTML file to send to a colleague: result, flags, curves, completions, settings.

      ascent report RUN
      ascent report RUN --out findings.html

    The file is self-contained: it has no scripts and loads nothing. RUN may be
    running, dead or damaged. It may also be a folder of TRL's completions or of
    verl's rollouts. An older report is replaced; any other file is not.
    """

    run: Path
    """The run's folder."""
    out: Annotated[Path | None, "FILE"] = None
    """The file to write. Default: RUN/report.html."""
    force: bool = False
    """Overwrite a file that is not a report."""

    def execute(self) -> None:
        from ascent.lab.report.command import write_report

        out, size = write_report(self.run, self.out, self.force)
        print(f"Report: {out} ({size / 1000:,.0f} kB, opens in any browser)")


COLUMNS = (
    ("step", "step"),
    ("reward", "reward"),
    ("reward_std", "±"),
    ("accuracy", "right"),
    ("eval/accuracy", "greedy"),
    ("rewards/accuracies", "pairs right"),
    ("eval/pairs/accuracy", "held-out pairs"),
    ("eval/pairs/log_loss", "log-loss"),
    ("eval/pairs/ece", "ECE"),
    ("steps/error", "error"),
    ("eval/steps/error", "held-out error"),
    ("eval/steps/explained", "explained"),
    ("exact/reward", "E[R]"),
    ("entropy", "entropy"),
    ("kl", "KL"),
    ("trust_region/kl", "moved"),
    ("value/explained_variance", "critic"),
    ("clip_ratio/high_mean", "clip+"),
    ("clip_ratio/low_mean", "clip−"),
    ("frac_reward_zero_std", "silent"),
    ("completions/mean_length", "length"),
    ("grad_norm", "‖∇‖"),
    ("reward_errors", "errors"),
    ("loss", "loss"),
)
FIRST_TO_GO = ("length", "clip−", "clip+", "±", "loss", "‖∇‖", "KL", "critic", "moved", "pairs right", "ECE")
"""Columns that a narrow terminal can do without, in this order."""


def summary(run: Run) -> str:
    """A run at a glance: what it is, how it went, what it means."""
    from ascent.explain.explain import objective_in_words

    info, metrics = run.info, run.metrics
    head = [
        f"{run.folder}: {run.status}, {len(metrics)} of {info['steps']} steps",
        f"{info['task']}, {info['label']}, seed {info['seed']}",
        wrapped(objective_in_words(run.config.algorithm)),
    ]
    if run.status == "failed":
        head.append(wrapped(f"Stopped: {info.get('reason')}"))
    if run.status in ("died", "interrupted", "failed"):
        head.append(f"Resume it: ascent resume {run.folder}")
    every = max(1, len(metrics) // 10)
    picked = [line for i, line in enumerate(metrics) if (i + 1) % every == 0 or i in (0, len(metrics) - 1)]
    columns = {name: key for key, name in COLUMNS if any(line.get(key) is not None for line in metrics)}
    if run.config.algorithm.loss.data != "samples":  # offline data have no rewards of their own
        columns = {name: key for name, key in columns.items() if name not in ("reward", "±", "silent")}
    if not any(line.get("reward_errors") for line in metrics):
        columns.pop("errors", None)
    shown = _fitting({name: [cell_text(line.get(key)) for line in picked] for name, key in columns.items()})
    words = [wrapped(word) for word in (run.result or {}).get("words", [])]
    flags = [wrapped(f"Flag at step {e['step']}: {e['text']}") for e in run.events if e.get("event") == "flag"]
    return "\n".join([*head, "", *shown, "", *words, *flags]).rstrip()


def _fitting(columns: dict[str, list[str]]) -> list[str]:
    """The table of these columns, less those that a narrow terminal has no room for."""
    lines = table(list(columns), [list(row) for row in zip(*columns.values(), strict=True)]) if columns else []
    spare = next((name for name in FIRST_TO_GO if name in columns), None)
    if spare is None or not lines or len(lines[0]) <= width():
        return lines
    return _fitting({name: cells for name, cells in columns.items() if name != spare})


def responses(rows: list[dict[str, Any]]) -> str:
    """The recorded responses of a step, group by group: log-probs, rewards, δ."""
    lines: list[str] = []
    for row in rows:
        if row["sample"] == 0:
            lines += ["", f"group {row['group']}: prompt {row['prompt_text']}"]
        logp = " ".join(f"{x:7.3f}" for x in row["logp_old"])
        δ = row["advantage"]
        credit = f"{δ[0]:+.3f}" if len(set(δ)) <= 1 else " ".join(f"{x:+.3f}" for x in δ)
        mark = "right" if row["correct"] else ("failed" if not row["valid"] else "")
        lines.append(f"  {row['response_text']}  reward {row['reward']:g}  δ {credit}  logp {logp}  {mark}".rstrip())
    return "\n".join(lines).strip()


COMMANDS = {"look at a run": (ShowCommand, ReportCommand)}
