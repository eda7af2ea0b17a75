"""Text of a plan for the terminal."""

from __future__ import annotations

from ascent.runs.display.terminal import table, wrapped
from ascent.workflows.planning.gpus import GIB
from ascent.workflows.planning.planner import Forecast, Placement

INDENT = 11


def plan_text(plan: Forecast) -> str:
    config, shape, cluster, lengths = plan.config, plan.shape, plan.cluster, plan.lengths
    gpu, requested = cluster.gpu, plan.requested
    nodes = "" if cluster.nodes == 1 else f" on {cluster.nodes:,} nodes, {cluster.network / 1e9:.3g} GB/s between them"
    spread = f"σ {lengths.spread:g} of their logarithm, " if lengths.spread else ""
    lines = [
        f"model      {shape.kind}: {billions(shape.num_parameters)} parameters, {shape.num_layers} layers",
        f"GPUs       {cluster.size:,} × {gpu.name}{nodes}, {gpu.memory / GIB:.0f} GiB each"
        + ("" if gpu.measured else " (assumed, not measured)"),
        f"a step     {config.prompts:,} prompts × {config.samples} samples = {config.prompts * config.samples:,} "
        f"responses; prompts of {lengths.prompt:,} tokens, responses of {lengths.mean:,.0f} on average ({spread}at "
        f"most {lengths.limit:,})",
        f"sharding   {sharding_text(plan)}",
        f"memory     {memory_line(plan)}",
    ]
    blocks = ["\n".join(wrapped(line, INDENT) for line in lines)]
    if plan.fits:
        blocks += [phases(requested), "\n".join(wrapped(line, INDENT) for line in speed(plan)), choices(plan)]
    blocks.append("\n".join(wrapped(f"assumed    {note}", INDENT) for note in plan.notes))
    return "\n\n".join(block for block in blocks if block)


def billions(count: int) -> str:
    return f"{count / 1e9:.3g} billion" if count >= 1e8 else f"{count / 1e6:.3g} million"


def sharding_text(plan: Forecast) -> str:
    if plan.cluster.size == 1:
        return "none (one GPU)"
    if plan.shard:
        return "shard: each GPU trains a part of the parameters and samples with a full copy"
    return "replicate: every GPU has all parameters"


def memory_line(plan: Forecast) -> str:
    total, available = sum(plan.memory.values()) / GIB, plan.cluster.gpu.memory / GIB
    parts = ", ".join(f"{name} {value / GIB:.1f}" for name, value in plan.memory.items())
    text = f"{total:.1f} of {available:.1f} GiB per GPU: {parts}; micro-batches of up to {plan.micro_tokens:,} tokens"
    if plan.fits:
        return text
    policy = plan.config.policy
    smaller = "--policy.bits 4" if policy.lora and not policy.bits else "--policy.lora 16"
    if plan.needed > plan.cluster.size:
        return f"{text}. It does not fit: take {plan.needed} GPUs or more (sharded), or {smaller}"
    if plan.needed and not plan.shard and plan.cluster.size > 1:
        return f"{text}. It does not fit: set --ranks.shard shard"
    alternative = "" if policy.bits else f", or {smaller}"
    return f"{text}. It does not fit: take a smaller model, a GPU with more memory{alternative}"


def phases(placement: Placement) -> str:
    total = max(placement.seconds, 1e-9)
    rows = [[name, f"{value:.3f} s", f"{value / total:.0%}"] for name, value in placement.phases.items() if value > 0]
    return "\n".join(table(["phase", "seconds", "share"], [*rows, ["a step", f"{placement.seconds:.3f} s", "100%"]]))


def speed(plan: Forecast) -> list[str]:
    requested, config = plan.requested, plan.config
    hours = config.steps * requested.seconds / 3600
    return [
        f"speed      {requested.tokens_per_second:,.0f} new tokens per second; GPUs are idle for "
        f"{requested.idle:.0%} of the time",
        f"the run    {config.steps:,} steps in {hours:.2g} h: {hours * plan.cluster.size:.2g} GPU-hours, without "
        "evaluations and checkpoints",
    ]


def choices(plan: Forecast) -> str:
    """Return a table of the placements of sampling and training, and the best of them."""
    head = ["samplers", "ahead", "s/step", "tokens/s", "idle", "supported"]
    rows = [
        [
            f"{placement.samplers:,}" if placement.samplers else "all",
            f"{placement.ahead}",
            f"{placement.seconds:.3g}",
            f"{placement.tokens_per_second:,.0f}",
            f"{placement.idle:.0%}",
            "yes" if placement.unsupported is None else "no",
        ]
        for placement in plan.placements
    ]
    best, supported = plan.best, plan.best_supported
    text = f"best       {placement_text(best)}, {best.tokens_per_second:,.0f} tokens per second"
    if best is not supported:
        text += f" (best supported: {placement_text(supported)}, {supported.tokens_per_second:,.0f})"
    return "\n".join([*table(head, rows), wrapped(text, INDENT)])


def placement_text(placement: Placement) -> str:
    gpus = "all GPUs sample and train" if not placement.samplers else f"{placement.samplers:,} GPUs only sample"
    return f"{gpus}, --ahead {placement.ahead}"
