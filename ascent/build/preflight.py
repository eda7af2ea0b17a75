"""Pre-flight report of a run: batch sizes, memory, a test of the reward, a first sample, the duration of a step."""

from pathlib import Path
from typing import Any

import torch

from ascent.build import trial_timings
from ascent.build.backend import PreflightReport
from ascent.core.config import Config
from ascent.core.groups import groups_without_signal
from ascent.core.loop import score_rollouts
from ascent.core.types import Batch
from ascent.inference.engine import LocalEngine
from ascent.models.causal_lm import is_mixed_precision
from ascent.models.lm_head import MAX_KEPT_BYTES, chunk_bytes
from ascent.models.quantization import parameter_count, quantized_parameter_count
from ascent.training.language_learner import LanguageLearner
from ascent.training.micro_batches import bytes_per_token, critic_bytes, update_operations


def describe_batch_sizes(config: Config) -> list[str]:
    responses, updates = config.prompts * config.samples, config.epochs * config.minibatches
    micro = f"{config.micro_batch} tokens at once" if config.micro_batch else "everything at once"
    passes = (
        f"the run    {config.steps} steps: --data-epochs {config.data_epochs:g}, over the rows"
        if config.data_epochs
        else ""
    )
    return [
        f"a step     {config.prompts} prompts per step × {config.samples} samples per prompt = {responses} responses, "
        f"{updates} {'update' if updates == 1 else 'updates'} per step",
        f"           micro-batch: {micro} (memory only: no number depends on it)",
        *([f"           sampling runs up to {config.ahead} steps ahead of training"] if config.ahead else []),
        *([passes] if passes else []),
    ]


EXACT_PARTS = ("parameters", "gradients", "Adam", "reference", "critic")
"""Parts of the memory that do not depend on batches and are known exactly; the others are estimates."""


def memory_bytes(config: Config, learner: LanguageLearner, rows: int) -> dict[str, int]:
    """Estimate the memory of a run in bytes, by part.

    `rows`: number of sequences that the engine decodes at once; 0 if nothing is sampled.
    """
    lm = learner.unsharded_lm
    model, kept = lm.config, config.algorithm.reference.enabled
    every, count = list(lm.model.parameters()), sum(p.numel() for p in lm.trained().values())
    size = every[0].element_size()
    names, spread = ("num_hidden_layers", "hidden_size", "num_attention_heads"), learner.num_shards
    layers, width, heads = (getattr(model, name, 1) for name in names)
    channel = getattr(model, "head_dim", None) or width // heads
    shared = getattr(model, "num_key_value_heads", None) or heads
    rows = min(rows, (1 + config.ahead) * config.prompts * config.samples)
    tokens = config.task.max_response_tokens + config.task.max_prompt // max(config.samples, 1)
    repeated = 1 if lm.can_share_prompts else config.samples
    longest = repeated * config.task.max_prompt + config.samples * config.task.max_response_tokens
    micro = min(learner.plan.tokens, config.prompts * longest)
    weights = sum(p.numel() * p.element_size() for p in every)
    alone = learner.computes_alone
    shards = 0 if alone else sum(p.numel() * p.element_size() for p in learner.lm.model.parameters()) // spread
    copies = weights if rows and lm.device.type == "cpu" else 0
    gradient, adam = (2, 6) if learner.compact is not None else (max(size, 4), 8 + 4 * (size < 4 and alone))
    return {
        "parameters": weights + shards,
        "gradients": gradient * count // spread,
        "Adam": adam * count // spread,
        "reference": count * (size if learner.computes_alone else max(size, 4)) // spread if kept else 0,
        "critic": critic_bytes(learner.critic) // spread,
        "decoding": 2 * layers * shared * channel * size * rows * tokens + copies,
        "activations": micro * bytes_per_token(lm, config.policy.checkpointing),
        "head": 3 * chunk_bytes(lm.device) + min(MAX_KEPT_BYTES, micro * lm.vocab_size * 4),
    }


def report_memory(config: Config, learner: LanguageLearner, rows: int, report: PreflightReport) -> None:
    """Report required and available memory; both include the loaded model."""
    device, parts = learner.lm.device, memory_bytes(config, learner, rows)
    total, sure = sum(parts.values()), sum(parts[name] for name in EXACT_PARTS)
    try:
        if device.type == "cuda":
            free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_allocated(device)
            there = int(min(free, learner.lm.gpu_memory))
        else:
            lines = Path("/proc/meminfo").read_text().splitlines()
            line = next(line for line in lines if line.startswith("MemAvailable"))
            there = int(line.split()[1]) * 1024 + parts["parameters"]
    except (OSError, StopIteration):
        report.lines.append(f"memory     about {_format_bytes(total)}; how much is there is not known")
        report.lines.append(precision_line(learner))
        return
    shares = ", ".join(f"{name} {_format_bytes(value)}" for name, value in parts.items() if value)
    report.lines.append(f"memory     about {_format_bytes(total)} of {_format_bytes(there)} on {device}: {shares}")
    report.lines.append(precision_line(learner))
    if packed := quantized_parameter_count(learner.lm.model):
        whole = parameter_count(learner.lm.model)
        report.lines.append(f"           {packed:,} of {whole:,} parameters are in 4 bits (--policy.bits)")
    if learner.compact is not None:
        report.lines.append(
            "           gradients and moments are in bfloat16, rounded at random (--policy.optimizer-state)"
        )
    if sure > there:
        smaller = f"take a smaller model{_smaller(config)}."
        if config.policy.optimizer_state == "float32" and learner.lm.model.dtype == torch.bfloat16:
            smaller = f"leave out --policy.optimizer-state, {smaller}"
        report.errors.append(
            f"Parameters, gradients and optimizer state alone take {_format_bytes(sure)}, and there are "
            f"{_format_bytes(there)}: {smaller}"
        )
    elif total > there:
        report.warnings.append(
            f"this may not fit: lower --micro-batch or --policy.rows, or set --policy.checkpointing{_smaller(config)}"
        )


def precision_line(learner: LanguageLearner) -> str:
    """Describe the precision of the model."""
    model = learner.lm.model
    precision = "mixed precision" if is_mixed_precision(model) else str(model.dtype).removeprefix("torch.")
    return f"           computed in {precision} (--policy.dtype)"


def _smaller(config: Config) -> str:
    """Return advice on settings that need less memory, if there are any."""
    if config.policy.bits:
        return ""
    return ", or --policy.bits 4" if config.policy.lora else ", or --policy.lora 16"


def report_update(config: Config, learner: LanguageLearner, report: PreflightReport) -> None:
    """Report the cost and the micro-batches of an update with prompts and responses of maximum length."""
    plan, task, lm = learner.plan, config.task, learner.unsharded_lm
    prompts, samples = -(-config.prompts // config.minibatches), config.samples
    every, attention = update_operations(
        lm, [task.max_prompt] * prompts, [[task.max_response_tokens] * samples] * prompts
    )
    one = task.max_response_tokens + round((plan.repeat if lm.can_share_prompts else 1) * task.max_prompt)
    whole = task.max_prompt * lm.can_share_prompts + samples * one
    parts = -(-prompts * whole // plan.tokens) if whole <= plan.tokens else prompts * -(-whole // plan.tokens)
    report.lines.append(
        f"update     at most {every / 1e12:,.3g} TFLOP, {attention / every:.0%} of them attention, in about {parts} "
        f"{'micro-batch' if parts == 1 else 'micro-batches'} of up to {plan.tokens:,} tokens"
    )
    longest = task.max_prompt * lm.can_share_prompts + one
    if plan.needs_recompute(longest):
        report.lines.append(
            f"           a response of more than {plan.tokens:,} tokens, its prompt counted, computes its layers twice"
        )
        if longest > plan.checkpointed_tokens:
            report.warnings.append(
                f"a response at the limits takes {longest:,} tokens in training, and about "
                f"{plan.checkpointed_tokens:,} fit: lower --max-tokens or --max-prompt, or set --policy.lora 16"
            )


def _format_bytes(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**27 else f"{count / 2**20:.0f} MiB"


def report_reward(test: Any, report: PreflightReport) -> None:
    first, *more = test.lines()
    report.lines += [f"reward     {first}", *(f"           {line}" for line in more)]
    useless = test.compares and test.gold and test.corrupted and not test.gold_reward > test.corrupted_reward
    if useless or (test.errors and test.errors >= test.gold + test.corrupted):
        report.errors.append("The reward failed its self-test, so training would learn from noise. " + more[0])
    elif more:
        report.warnings.append("the reward failed part of its self-test, above")


def report_sample(config: Config, task: Any, probe: LocalEngine, report: PreflightReport) -> trial_timings.TimedCall:
    """Sample a few groups with separate random streams, report on them, and return the timing."""
    prompts = task.draw(min(4, config.prompts), torch.Generator().manual_seed(config.seed + 3_000_017))
    rollouts, call = trial_timings.time_generation(probe, prompts, config.samples)
    batch, errors = score_rollouts(task, rollouts)
    groups, responses = len(prompts), batch.truncated.numel()
    silent, cut = int(groups_without_signal(batch).sum()), int(batch.truncated.sum())
    right = int((batch.correct & batch.valid).sum()) if batch.correct is not None else None
    short = batch.limits is not None and bool((batch.limits < batch.limit).any())
    limit = "their limits" if short else f"{batch.limit} tokens"
    known = "" if right is None else f"{right} of {responses} right, "
    report.lines.append(
        f"sample     {groups} groups of {config.samples}: {known}{silent} of {groups} groups "
        f"without signal, {cut} of {responses} responses cut off at {limit}, mean reward "
        f"{float(batch.reward.sum(-1).mean()):.3g}"
    )
    if batch.turn is not None:
        report_episodes(batch, config.task, report)
    if errors:
        what = "rewards or environments" if batch.turn is not None else "rewards"
        report.warnings.append(f"{len(errors)} {what} failed. The first: {errors[0]}")
    if silent == groups and groups > 1:
        solved, advice = right == responses, "try an easier task, more --samples, or `ascent sft` first"
        advice = "the task is solved already" if solved else advice
        report.warnings.append(f"no group of the sample has signal, and nothing is learned from such groups: {advice}")
    if cut > responses / 2:
        report.warnings.append("most responses are cut off before they end: raise --max-tokens")
    return call


def report_episodes(batch: Batch, task: Any, report: PreflightReport) -> None:
    """Report turns, tool calls and environment times of the sampled conversations."""
    assert batch.turn is not None and batch.measures is not None and batch.environment_seconds is not None
    sums = dict(zip(batch.measure_names, batch.measures.sum((0, 1)).tolist(), strict=True))
    turns = torch.where(batch.mask, batch.turn + 1, 0).amax(-1)
    total, responses, slowest = int(turns.sum()), turns.numel(), float(batch.environment_seconds.max())
    report.lines.append(
        f"episodes   {responses} played: {total / responses:.1f} turns on average, {int(turns.min())} to "
        f"{int(turns.max())}; {sums['turns/cut']:.0f} of {total} turns cut off; an answer took "
        f"{trial_timings.format_duration(float(batch.environment_seconds.sum()) / max(total, 1))}, "
        f"the slowest {trial_timings.format_duration(slowest)}"
    )
    if sums["turns/cut"] > total / 2:
        report.warnings.append("most turns are cut off before they end: raise --turn-tokens or --max-tokens")
    if not task.tools:
        return
    calls, unparsed = sums.get("tools/calls", 0.0), sums.get("tools/unparsed", 0.0)
    wrong = ", ".join(f"{sums.get(f'tools/{name}', 0.0):.0f} {name}" for name in ("unparsed", "failed", "repeated"))
    report.lines.append(f"           {calls:.0f} calls of tools: {wrong}" if calls else "           no call of a tool")
    if not calls:
        report.warnings.append(f"in {responses} responses nothing was called: `ascent sft` on calls first may help")
    elif unparsed > calls / 2:
        report.warnings.append(
            "most calls do not parse: look at them with `ascent sample`, or show calls by `ascent sft`"
        )


def report_step_time(
    config: Config,
    learner: LanguageLearner,
    task: Any,
    probe: LocalEngine,
    sample: trial_timings.TimedCall,
    report: PreflightReport,
) -> None:
    """Estimate the duration of a step from short trials, for responses as in the sample and of maximum length."""
    prompts, samples, limits = config.prompts, config.samples, config.task
    rows = min(probe.rows, prompts * samples)
    drawn = task.draw(-(-rows // samples), torch.Generator().manual_seed(config.seed + 3_000_017))
    short, twice = (
        min(trial_timings.SHORT_RESPONSE_TOKENS, limits.max_response_tokens),
        learner.lm.device.type == "cuda",
    )
    calls = [] if twice else [sample]
    for groups, limit in ((1, short), (len(drawn), short), *[(sample.prompts, limits.max_response_tokens)] * twice):
        for _ in range(1 + twice):  # on a GPU the first call captures its graphs
            _, call = trial_timings.time_generation(probe, drawn[torch.arange(min(groups, len(drawn)))], samples, limit)
        calls.append(call)
    costs, mean = trial_timings.sampling_costs(calls), sample.tokens / (sample.prompts * samples)
    lengths = ((mean, sample.steps), (limits.max_response_tokens, limits.max_response_tokens))
    sampling = [trial_timings.sampling_seconds(costs, prompts, samples, rows, *length) for length in lengths]
    parts = [f"sampling {trial_timings.format_duration(sampling[0])}"]
    most = [trial_timings.format_duration(sampling[1])]
    if not config.algorithm.update.full_batch:
        prompt = round(float((drawn.prompt >= 0).sum(-1).double().mean()))
        rate = trial_timings.update_rate(learner, prompt, limits.max_response_tokens)
        both = ((prompt, round(mean)), (limits.max_prompt, limits.max_response_tokens))
        update = [trial_timings.update_seconds(config, learner, rate, *lengths) for lengths in both]
        parts, most = (
            [*parts, f"update {trial_timings.format_duration(update[0])}"],
            [*most, trial_timings.format_duration(update[1])],
        )
    report.lines.append(
        f"time       per step about: {', '.join(parts)}, for responses of {mean:.0f} tokens as in the sample; at the "
        f"limits {' and '.join(most)}. By short trials, ± half; rewards and evaluations come on top"
    )
