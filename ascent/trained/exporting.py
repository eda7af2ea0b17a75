"""`ascent export`: a run's language model as an ordinary Hugging Face folder."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open

from ascent.config import Config
from ascent.diagnose.explain import formula, objective_in_words
from ascent.naming import label_of, task_name
from ascent.policies import CausalLM
from ascent.policies.causal_lm import pick_device
from ascent.records import Run, checkpoint
from ascent.records.run import policy_of
from ascent.types import Refused


def export(run: str | Path, folder: str | Path, *, step: int | None = None, best: bool = False) -> Path:
    """The newest checkpoint of a run (or that of a step, or the best) as a folder that `from_pretrained` loads.

    LoRA adapters are merged in. The folder is written aside and renamed, so it is there whole or not at all.
    """
    existing, folder = Run(run), Path(folder)
    config = existing.config
    if not isinstance(config.policy, CausalLM):
        raise Refused(
            f"{run} trained a small policy of Ascent's own, which no other library loads. In Python: "
            f'ascent.load("{run}").policy; its parameters are in {existing.folder}/checkpoints/*/params.safetensors'
        )
    path = existing.checkpoint(step, best)
    refuse_taken(folder)
    lm = policy_of(_on_cpu(config, path), path)
    aside = folder.with_name(f".writing-{folder.name}-{os.getpid()}")
    try:
        aside.mkdir(parents=True)
        lm.save(aside)
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


def refuse_taken(folder: Path) -> None:
    """Refuse what is there already, unless it is an empty folder."""
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise Refused(f"{folder}: already there, and nothing is overwritten. Choose another folder")


def _on_cpu(config: Config, path: Path) -> Config:
    """The config with its model on the CPU, in the precision in which it was trained."""
    policy = config.policy
    if policy.dtype == "auto":
        narrow = policy._dtype(pick_device("auto")) == torch.bfloat16
        if not policy.lora:  # every parameter is in the checkpoint, as it was
            with safe_open(path / "params.safetensors", "pt") as file:
                narrow = file.get_slice(next(iter(file.keys()))).get_dtype() == "BF16"
        policy = replace(policy, dtype="bfloat16" if narrow else "float32")
    return replace(config, policy=replace(policy, device="cpu"))


def readme(run: Run, step: int) -> str:
    """Where the model came from, in the form of a model card."""
    config, info = run.config, run.info
    model = config.policy.model
    lora = f", LoRA of rank {config.policy.lora}, merged" if config.policy.lora else ""
    indented = "\n".join(f"    {line}" for line in formula(config.algorithm).splitlines())
    evaluated = [line for line in run.metrics[:step] if line.get("eval/accuracy") is not None]
    found = ""
    if evaluated:
        last = evaluated[-1]
        found = f"- held out, greedy: {last['eval/accuracy']:.3f} right after step {last['step'] + 1}\n"
    return (
        f"---\nlibrary_name: transformers\n---\n\n# {Path(model).name}, trained on {task_name(config)}\n\n"
        f"Written by Ascent {info['versions'].get('ascent-rl', '')} (`ascent export`).\n\n"
        f"- run: {run.folder.resolve().name}, step {step} of {config.steps}, seed {config.seed}\n"
        f"- model: {model}{lora}\n"
        f"- task: {task_name(config)}\n"
        f"- algorithm: {label_of(config)}\n{found}"
        f"\n{objective_in_words(config.algorithm)}\n\n{indented}\n"
    )
