"""`ascent export`: a run's language model as an ordinary Hugging Face folder."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from ascent.core.types import Refused
from ascent.engines.backends import backend_of
from ascent.explain.explain import formula, objective_in_words
from ascent.records import Run, checkpoint
from ascent.records.naming import run_label, task_name
from ascent.records.run import check_trains_policy


def export(run: str | Path, folder: str | Path, *, step: int | None = None, best: bool = False) -> Path:
    """The newest checkpoint of a run (or that of a step, or the best) as a folder that `from_pretrained` loads.

    LoRA adapters are merged in. The folder is written aside and renamed, so it is there whole or not at all.
    """
    existing, folder = Run(run), Path(folder)
    path = existing.checkpoint(step, best)
    check_trains_policy(existing.config, existing.folder)
    _refuse_existing(folder)
    aside = folder.with_name(f".writing-{folder.name}-{os.getpid()}")
    config, params = existing.config, checkpoint.params(path)
    try:
        aside.mkdir(parents=True)
        backend_of(config).export(config, existing.folder, params, aside)
        (aside / "README.md").write_text(readme(existing, checkpoint.step_of(path)))
        for file in [*aside.iterdir(), aside]:
            checkpoint.flush(file)
        os.replace(aside, folder)
        checkpoint.flush(folder.parent)
    except OSError as error:
        raise Refused(f"{folder}: cannot write there ({error.strerror or error})") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def _refuse_existing(folder: Path) -> None:
    """Refuse what is there already, unless it is an empty folder."""
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise Refused(f"{folder}: already there, and nothing is overwritten. Choose another folder")


def readme(run: Run, step: int) -> str:
    """Where the model came from, in the form of a model card."""
    config, info = run.config, run.info
    model = config.policy.model
    lora = f", LoRA of rank {config.policy.lora}, merged" if config.policy.lora else ""
    indented = "\n".join(f"    {line}" for line in formula(config.algorithm).splitlines())
    evaluated = [line for line in run.metrics[:step] if line.get("eval/accuracy") is not None]
    accuracy = ""
    if evaluated:
        last = evaluated[-1]
        accuracy = f"- held out, greedy: {last['eval/accuracy']:.3f} right after step {last['step'] + 1}\n"
    return (
        f"---\nlibrary_name: transformers\n---\n\n# {Path(model).name}, trained on {task_name(config)}\n\n"
        f"Written by Ascent {info['versions'].get('ascent-rl', '')} (`ascent export`).\n\n"
        f"- run: {run.folder.resolve().name}, step {step} of {config.steps}, seed {config.seed}\n"
        f"- model: {model}{lora}\n"
        f"- task: {task_name(config)}\n"
        f"- algorithm: {run_label(config)}\n{accuracy}"
        f"\n{objective_in_words(config.algorithm)}\n\n{indented}\n"
    )
