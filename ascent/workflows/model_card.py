"""Write the model card of an exported policy, and push the model to the Hugging Face hub."""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from ascent.build.trained_run import Run
from ascent.core.config import Config
from ascent.core.errors import ConfigError
from ascent.explain.explain import latex, meanings, objective_in_words
from ascent.explain.latex import unicode_in
from ascent.runs.confidence_intervals import PromptMean, mean_over_prompts
from ascent.runs.run_info import run_label, task_name

# ── model card ────────────────────────────────────────────────────────────────────────────────────


def model_card(run: Run, step: int) -> str:
    """Return the README of an exported model. It contains no paths of this machine."""
    config, versions = run.config, run.info["versions"]
    lora = f", LoRA of rank {config.policy.lora}, merged" if config.policy.lora else ""
    lora = f" in 4 bits (NF4){lora}" if getattr(config.policy, "bits", 0) else lora
    rewards = [str(reward) for reward in getattr(config.task, "reward", None) or ("own",)]
    about = {
        "run": f"{run.folder.resolve().name}, step {step} of {config.steps}",
        "base model": _name(config.policy.model) + lora,
        "task": task_name(config),
        "data": _data(config),
        "reward": " + ".join(map(_name, rewards)),
        "algorithm": run_label(config),
        "batch": f"{config.prompts} prompts × {config.samples} responses per step",
        "seed": str(config.seed),
        "versions": ", ".join(f"{name} {number}" for name, number in versions.items() if number),
    }
    formulas = "\n\n".join(f"$$\n{line}\n$$" for line in latex(config.algorithm))
    parts = [
        _head(config),
        f"# {Path(config.policy.model).name}, trained on {task_name(config)}",
        f"Written by Ascent {versions.get('ascent-rl') or ''} (`ascent export`) from the records of the run.",
        "\n".join(f"- {name}: {text}" for name, text in about.items() if text),
        *_results(run, step),
        f"## Objective\n\n{objective_in_words(config.algorithm)}",
        formulas,
        "\n".join(f"- {unicode_in(line)}" for line in meanings(config.algorithm)),
    ]
    return "\n\n".join(parts) + "\n"


def _head(config: Config) -> str:
    """Return the YAML header for the hub; the base model is named unless it is a local folder."""
    base = [] if Path(config.policy.model).exists() else [f"base_model: {json.dumps(config.policy.model)}"]
    tags = ["tags:", "- ascent", "- reinforcement-learning", f"- {run_label(config).split('+')[0] or 'ascent'}"]
    return "\n".join(["---", "library_name: transformers", "pipeline_tag: text-generation", *base, *tags, "---"])


def _name(path: str) -> str:
    """Return the last part of a path, or the text itself if it is no path."""
    prefix, colon, rest = path.rpartition(":") if path.startswith(("python:", "sandbox:")) else ("", "", path)
    return _name(prefix) + colon + rest if prefix else Path(path).name if path.startswith((".", "/", "~")) else path


def _data(config: Config) -> str:
    """Return the source of the prompts, the answer check, and the task's fields that differ from their defaults."""
    settings: list[str] = []
    for field in fields(config.task):
        value = getattr(config.task, field.name)
        is_shown = field.name in ("source", "check") or value != field.default
        if is_shown and field.name != "reward" and value != "" and isinstance(value, str | int | float | bool):
            settings.append(f"{field.name} {_name(str(value))}")
    return ", ".join(settings)


def _results(run: Run, step: int) -> Iterator[str]:
    """Yield held-out and training results at the exported step, with 95 % intervals if answers were recorded."""
    lines: list[str] = []
    evaluated = [line for line in run.metrics[:step] if line.get("eval/reward", line.get("eval/logp")) is not None]
    if evaluated:
        last = evaluated[-1]
        when = f"after step {last['step'] + 1}"
        for name, metric in (
            ("right", "eval/accuracy"),
            ("reward", "eval/reward"),
            ("log-prob per token", "eval/logp"),
        ):
            if last.get(metric) is not None:
                lines.append(f"| held out, greedy: {name} | {last[metric]:.3f} | {when} |")
        rows = [row for row in _recorded(run, last["step"]) if row["valid"]]
        right = [float(row["correct"]) for row in rows if row.get("correct") is not None]
        for name, values in (("right", right), ("reward", [float(row["reward"]) for row in rows])):
            if (mean := mean_over_prompts(values)) is not None:
                lines.append(f"| … of the {len(values)} recorded prompts: {name} | {_interval_text(mean)} | {when} |")
    trained = [line for line in run.metrics[:step] if line.get("reward") is not None]
    if trained:
        lines.append(f"| sampled in training: reward | {trained[-1]['reward']:.3f} | step {trained[-1]['step'] + 1} |")
    if lines:
        yield "\n".join(["## Results", "", "| | with its 95 % interval | |", "|---|---|---|", *lines])


def _interval_text(mean: PromptMean) -> str:
    return f"{mean.value:.3f}" + ("" if mean.low is None else f" [{mean.low:.3f}, {mean.high:.3f}]")


def _recorded(run: Run, step: int) -> list[dict[str, Any]]:
    try:
        return run.held_out(step)
    except ConfigError:
        return []


# ── hub ─────────────────────────────────────────────────────────────────────────────────────


class Hub:
    """A repository on the Hugging Face hub; write access is checked before any work."""

    def __init__(self, name: str):
        try:
            from huggingface_hub import HfApi, get_token
            from huggingface_hub.utils import HFValidationError, validate_repo_id
        except ImportError:
            raise ConfigError("--push needs huggingface-hub: pip install 'ascent-rl[lm]'") from None
        try:
            validate_repo_id(name)
        except HFValidationError as error:
            raise ConfigError(f"--push {name}: invalid repository name ({error})") from None
        self.token, self.requested = get_token(), name
        if not self.token:
            raise ConfigError(
                f"--push {name}: there is no token for the hub. Create one with write access on the hub's page "
                "of access tokens, then run `hf auth login` or set HF_TOKEN"
            )
        self.api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=self.token, library_name="ascent")
        with self._refusing("nothing was exported or pushed"):
            user = self.api.whoami()["name"]
        self.name = name if "/" in name else f"{user}/{name}"

    def push(self, folder: Path, public: bool = False) -> str:
        """Push the folder as one commit and return the URL of the repository."""
        later = f"{folder} is written; to push it later: hf upload {self.name} {folder}"
        with self._refusing(f"{self.name} is unchanged. {later}"):
            self.api.create_repo(self.name, private=not public, exist_ok=True)
            message = f"ascent export: {folder.name}"
            commit = self.api.upload_folder(
                repo_id=self.name, folder_path=folder, commit_message=message, delete_patterns="*"
            )
            pushed = set(self.api.list_repo_files(self.name, revision=commit.oid))
        missing = {file.name for file in folder.iterdir()} - pushed
        if missing:
            raise ConfigError(
                f"--push {self.requested}: the hub has no {', '.join(sorted(missing))} after the push. {later}"
            )
        return f"{self.api.endpoint}/{self.name}"

    @contextmanager
    def _refusing(self, state: str) -> Iterator[None]:
        """Convert an error of the hub to a ConfigError that states what exists now."""
        from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

        begin = f"--push {self.requested}:"
        try:
            yield
        except HfHubHTTPError as error:
            code = error.response.status_code if error.response is not None else 0
            why = {
                401: "the hub refused the token. It may be wrong or expired: `hf auth login`, or set HF_TOKEN",
                403: "the token has no write access to this repository",
            }.get(code, f"the hub answered with an error ({' '.join(str(error).split())[:300]})")
            raise ConfigError(f"{begin} {why}. {state}") from None
        except OfflineModeIsEnabled:
            raise ConfigError(f"{begin} HF_HUB_OFFLINE is set, so nothing can be pushed. {state}") from None
        except Exception as error:  # the HTTP client and its errors depend on the version of the library
            kind = type(error).__name__
            lost = "cannot be reached" if re.search("Connect|Timeout|Network", kind) else f"failed with {kind}"
            raise ConfigError(f"{begin} the hub at {self.api.endpoint} {lost} ({error}). {state}") from error
