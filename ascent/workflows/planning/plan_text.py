"""A plan in words: for a terminal of any width."""

from __future__ import annotations

from ascent.runs.display.terminal import table, wrapped
from ascent.workflows.planning.gpus import GIB
from ascent.workflows.planning.planner import Forecast, Way

INDENT = 11


def plan_text(plan: Forecast) -> str:
    config, shape, cluster, answers = plan.config, plan.shape, plan.cluster, plan.answers
    card, asked = cluster.card, plan.asked
    nodes = "" if cluster.nodes == 1 else f" on {cluster.nodes:,} nodes, {cluster.network / 1e9:.3g} GB/s between them"
    spread = f"σ {answers.spread:g} of their logarithm, " if answers.spread else ""
    lines = [
        f"model      {shape.kind}: {billions(shape.every)} parameters, {shape.layers} layers",
        f"cards      {cluster.size:,} × {card.name}{nodes}, {card.memory / GIB:.0f} GiB each"
        + ("" if card.measured else " (assumed, not measured)"),
        f"a step     {config.prompts:,} prompts × {config.samples} samples = {config.prompts * config.samples:,} "
        f"responses; prompts of {answers.prompt:,} tokens, answers of {answers.mean:,.0f} on average ({spread}at most "
        f"{answers.limit:,})",
        f"placement  {placement(plan)}",
        f"memory     {memory_line(plan)}",
    ]
    blocks = ["\n".join(wrapped(line, INDENT) for line in lines)]
    if plan.fits:
        blocks += [phases(asked), "\n".join(wrapped(line, INDENT) for line in speed(plan)), choices(plan)]
    blocks.append("\n".join(wrapped(f"assumed    {note}", INDENT) for note in plan.notes))
    return "\n\n".join(block for block in blocks if block)


def billions(count: int) -> str:
    return f"{count / 1e9:.3g} billion" if count >= 1e8 else f"{count / 1e6:.3g} million"


def placement(plan: Forecast) -> str:
    if plan.cluster.size == 1:
        return "one card has everything"
    if plan.shard:
        return "shard: each card trains a part of the parameters and samples from a whole copy"
    return "replicate: every card has every parameter"


def memory_line(plan: Forecast) -> str:
    total, there = sum(plan.memory.values()) / GIB, plan.cluster.card.memory / GIB
    parts = ", ".join(f"{name} {value / GIB:.1f}" for name, value in plan.memory.items())
    words = f"{total:.1f} of {there:.1f} GiB per card: {parts}; micro-batches of up to {plan.micro_tokens:,} tokens"
    if plan.fits:
        return words
    policy = plan.config.policy
    smaller = "--policy.bits 4" if policy.lora and not policy.bits else "--policy.lora 16"
    if plan.needed > plan.cluster.size:
        return f"{words}. It does not fit: take {plan.needed} cards or more (in shards), or {smaller}"
    if plan.needed and not plan.shard and plan.cluster.size > 1:
        return f"{words}. It does not fit: set --ranks.shard shard"
    more = "" if policy.bits else f", or {smaller}"
    return f"{words}. It does not fit: take a smaller model, a card with more memory{more}"


def phases(way: Way) -> str:
    total = max(way.seconds, 1e-9)
    rows = [[name, f"{value:.3f} s", f"{value / total:.0%}"] for name, value in way.phases.items() if value > 0]
    return "\n".join(table(["phase", "seconds", "share"], [*rows, ["a step", f"{way.seconds:.3f} s", "100%"]]))


def speed(plan: Forecast) -> list[str]:
    asked, config = plan.asked, plan.config
    hours = config.steps * asked.seconds / 3600
    return [
        f"speed      {asked.tokens_per_second:,.0f} new tokens per second; the cards idle {asked.idle:.0%} of the time",
        f"the run    {config.steps:,} steps in {hours:.2g} h: {hours * plan.cluster.size:.2g} GPU-hours, without "
        "evaluations and checkpoints",
    ]


def choices(plan: Forecast) -> str:
    """The ways to share the work, and which is best."""
    head = ["samplers", "ahead", "s/step", "tokens/s", "idle", "today"]
    rows = [
        [
            f"{way.samplers:,}" if way.samplers else "all",
            f"{way.ahead}",
            f"{way.seconds:.3g}",
            f"{way.tokens_per_second:,.0f}",
            f"{way.idle:.0%}",
            "yes" if way.untried is None else "no",
        ]
        for way in plan.ways
    ]
    best, today = plan.best, plan.best_today
    words = f"best       {shared_how(best)}, {best.tokens_per_second:,.0f} tokens per second"
    if best is not today:
        words += f" (today's best: {shared_how(today)}, {today.tokens_per_second:,.0f})"
    return "\n".join([*table(head, rows), wrapped(words, INDENT)])


def shared_how(way: Way) -> str:
    who = "every card samples and trains" if not way.samplers else f"{way.samplers:,} cards only sample"
    return f"{who}, --ahead {way.ahead}"
