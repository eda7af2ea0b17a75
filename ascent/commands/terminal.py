"""Runs and plans as text for a terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ascent.config import Config
from ascent.diagnose.explain import formula, objective_in_words
from ascent.layout import table, width, wrapped
from ascent.menu import spell
from ascent.records import Run
from ascent.settings import label


def plan(config: Config, folder: Path) -> str:
    """What `ascent train` would do."""
    sampled, updates = config.prompts * config.samples, config.epochs * config.minibatches
    rounds = config.algorithm.groups.rounds
    more = f", up to {rounds} times where groups have no signal" if rounds > 1 else ""
    return "\n".join(
        [
            f"task       {spell(config.task)}",
            f"policy     {spell(config.policy)}",
            f"algorithm  {label(config.algorithm)}",
            f"update     {spell(config.algorithm.update)}",
            wrapped(f"objective  {objective_in_words(config.algorithm)}", 11),
            *(f"           {line}" for line in formula(config.algorithm).splitlines()),
            f"a step     {config.prompts} prompts × {config.samples} samples = {sampled} responses{more};",
            f"           epochs {config.epochs} × mini-batches {config.minibatches} = updates {updates}",
            f"the run    {config.steps} steps = {config.steps * sampled:,} responses and "
            f"{config.steps * updates:,} updates, seed {config.seed}",
            f"folder     {folder}",
        ]
    )


def ending(run: Run) -> str:
    """How a run ended, and what to type next."""
    words = (run.result or {}).get("words", [])
    if run.status == "finished":
        picture = run.folder / "plot.png"
        after = [f"Curves: {picture}"] if picture.exists() else []
        after += [f"Look closer: ascent show {run.folder}"]
    else:
        after = [f"Interrupted after {run.info['step']} of {run.info['steps']} steps, and saved."]
        after += [f"Go on with: ascent resume {run.folder}"]
    return "\n".join([*map(wrapped, words), *after])


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
    info, metrics = run.info, run.metrics
    head = [
        f"{run.folder}: {run.status}, {len(metrics)} of {info['steps']} steps",
        f"{info['task']}, {info['label']}, seed {info['seed']}",
        wrapped(objective_in_words(run.config.algorithm)),
    ]
    if run.status == "failed":
        head.append(wrapped(f"Stopped: {info.get('reason')}"))
    if run.status in ("died", "interrupted", "failed"):
        head.append(f"Go on with: ascent resume {run.folder}")
    every = max(1, len(metrics) // 10)
    picked = [line for i, line in enumerate(metrics) if (i + 1) % every == 0 or i in (0, len(metrics) - 1)]
    columns = {name: key for key, name in COLUMNS if any(line.get(key) is not None for line in metrics)}
    if run.config.algorithm.loss.data != "samples":  # what is shown earns what it is there for
        columns = {name: key for name, key in columns.items() if name not in ("reward", "±", "silent")}
    if not any(line.get("reward_errors") for line in metrics):
        columns.pop("errors", None)
    shown = _fitting({name: [_number(line.get(key)) for line in picked] for name, key in columns.items()})
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


def _number(value: Any) -> str:
    if value is None:
        return "·"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
