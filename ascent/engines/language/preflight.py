"""Before a language model is trained: the arithmetic, the memory, the reward and a first sample, in words.

What cannot work is refused here, before any time is spent on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ascent.core.config import Config
from ascent.core.groups import without_signal
from ascent.core.loop import scored
from ascent.core.protocols import Sampler, Task
from ascent.engines.backend import Report
from ascent.engines.language.learning.head import KEEP_BYTES, chunk_bytes
from ascent.engines.language.learning.learner import LanguageLearner
from ascent.engines.language.learning.parameters import bytes_per_token
from ascent.policies.causal_lm import LanguageModel

GROUPS = 4
"""Groups of the sample."""


def preflight(
    config: Config,
    task: Any,
    learner: LanguageLearner,
    rows: int,
    probe: Sampler | None,
    reward: Any,
    notes: Sequence[str],
) -> Report:
    """Look at a run that is about to begin. Its random streams are left as they are.

    `rows`: the responses that its sampler decodes at once; 0 where nothing is sampled. `probe` draws from the same
    policy with a generator of its own. `reward`: the self-test of the task's reward; None where nothing is rewarded.
    """
    report = Report()
    report.lines += arithmetic(config)
    _context(config, learner.lm, report)
    _memory(config, learner, rows, report)
    report.lines += [f"note       {note}" for note in notes]
    if reward is not None and probe is not None:
        _reward(reward, report)
        if not report.refusals:
            _sample(config, task, probe, report)
    report.lines += [f"data       {line}" for line in task.report()]
    return report


def arithmetic(config: Config) -> list[str]:
    """The batch in four words."""
    responses, updates = config.prompts * config.samples, config.epochs * config.minibatches
    micro = f"{config.micro_batch} tokens at once" if config.micro_batch else "everything at once"
    return [
        f"a step     {config.prompts} prompts per step × {config.samples} samples per prompt = {responses} responses, "
        f"{updates} {'update' if updates == 1 else 'updates'} per step",
        f"           micro-batch: {micro} (memory only: no number depends on it)",
    ]


def _context(config: Config, lm: LanguageModel, report: Report) -> None:
    room = getattr(lm.model.config, "max_position_embeddings", None)
    need = config.task.max_prompt + config.task.max_tokens
    if room is not None and need > room:
        report.refusals.append(
            f"--max-prompt {config.task.max_prompt} and --max-tokens {config.task.max_tokens} make {need} positions, "
            f"and the model has {room}: lower one of them."
        )


# ---- memory -----------------------------------------------------------------------------------------


def memory(config: Config, learner: LanguageLearner, rows: int) -> dict[str, int]:
    """Bytes that a run takes, by what takes them. Parameters and states are exact; the rest is an estimate.

    `rows`: the responses that the sampler decodes at once; 0 where nothing is sampled.
    """
    lm = learner.lm
    model: Any = lm.model.config
    every, trained = list(lm.model.parameters()), list(lm.trained().values())
    size = every[0].element_size()
    count = sum(p.numel() for p in trained)
    layers = getattr(model, "num_hidden_layers", 1)
    width = getattr(model, "hidden_size", 1)
    heads = getattr(model, "num_attention_heads", 1)
    channel = getattr(model, "head_dim", None) or width // heads
    shared = getattr(model, "num_key_value_heads", None) or heads
    rows = min(rows, config.prompts * config.samples)
    tokens = config.task.max_tokens + config.task.max_prompt // max(config.samples, 1)
    longest = config.task.max_prompt + config.samples * config.task.max_tokens
    micro = min(learner.micro_tokens, config.prompts * longest)
    weights = sum(p.numel() * p.element_size() for p in every)
    copies = weights if rows and lm.device.type == "cpu" else 0
    return {
        "parameters": weights,
        "gradients": count * max(size, 4),
        "Adam": 8 * count + (4 * count if size < 4 else 0),
        "reference": count * size if config.algorithm.reference.kept else 0,
        "decoding": 2 * layers * shared * channel * size * rows * tokens + copies,
        "activations": micro * bytes_per_token(lm, config.policy.checkpointing),
        "head": 3 * chunk_bytes(lm.device) + min(KEEP_BYTES, micro * lm.vocab * 4),
    }


def available(device: torch.device) -> int:
    """Bytes that are free for a run on this device, the model that is loaded already among them."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_allocated(device)
    with open("/proc/meminfo") as file:
        free = next(line for line in file if line.startswith("MemAvailable"))
    return int(free.split()[1]) * 1024


def _memory(config: Config, learner: LanguageLearner, rows: int, report: Report) -> None:
    lm, parts = learner.lm, memory(config, learner, rows)
    try:
        there = available(lm.device)
    except (OSError, StopIteration):
        report.lines.append(f"memory     about {_size(sum(parts.values()))}; how much is there is not known")
        return
    there += parts["parameters"] if lm.device.type == "cpu" else 0  # loaded already, and so not free
    shares = ", ".join(f"{name} {_size(value)}" for name, value in parts.items() if value)
    total, sure = sum(parts.values()), sum(parts[name] for name in ("parameters", "gradients", "Adam", "reference"))
    report.lines.append(f"memory     about {_size(total)} of {_size(there)} on {lm.device}: {shares}")
    if sure > there:
        report.refusals.append(
            f"Parameters, gradients and optimizer state alone take {_size(sure)}, and there are {_size(there)}: take a "
            "smaller model, or --policy.lora 16."
        )
    elif total > there:
        report.warnings.append(
            "this may not fit: lower --micro-batch or --policy.rows, or set --policy.checkpointing, or --policy.lora 16"
        )


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**27 else f"{count / 2**20:.0f} MiB"


# ---- the reward, and what the policy does with it -----------------------------------------------------


def _reward(test: Any, report: Report) -> None:
    first, *more = test.lines()
    report.lines += [f"reward     {first}", *(f"           {line}" for line in more)]
    useless = test.gold and test.corrupted and not test.gold_reward > test.corrupted_reward
    if useless or (test.errors and test.errors >= test.gold + test.corrupted):
        report.refusals.append("The reward failed its self-test, so training would learn from noise. " + more[0])
    elif more:
        report.warnings.append("the reward failed part of its self-test, above")


def _sample(config: Config, task: Task, probe: Sampler, report: Report) -> None:
    """A few groups as a step would draw them, from random streams of their own."""
    prompts = task.draw(min(GROUPS, config.prompts), torch.Generator().manual_seed(config.seed + 3_000_017))
    batch, errors = scored(task, probe.generate(prompts, config.samples))
    groups = len(prompts)
    silent = int(without_signal(batch).sum())
    cut = int(batch.truncated.sum())
    responses = batch.mask.shape[0] * batch.mask.shape[1]
    right = int((batch.correct & batch.valid).sum()) if batch.correct is not None else 0
    report.lines.append(
        f"sample     {groups} groups of {config.samples}: {right} of {responses} right, {silent} of {groups} groups "
        f"without signal, {cut} of {responses} responses cut off at {config.task.max_tokens} tokens, mean reward "
        f"{float(batch.reward.sum(-1).mean()):.3g}"
    )
    if errors:
        report.warnings.append(f"{len(errors)} rewards failed. The first: {errors[0]}")
    if silent == groups and groups > 1:
        advice = "an easier task, more --samples, or `ascent sft` first"
        advice = "the task is solved already" if right == responses else f"try {advice}"
        report.warnings.append(f"no group of the sample has signal, and nothing is learned from such groups: {advice}")
    if cut > responses / 2:
        report.warnings.append("most responses are cut off before they end: raise --max-tokens")
