"""One GRPO step of Ascent against one of TRL's, for the step benchmarks."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from ascent.build.assemble import assemble
from ascent.core.loop import train
from ascent.core.types import Metrics
from ascent.distributed.ranks import SINGLE_PROCESS, Ranks
from ascent.rollout.rank_leader import wrap_for_ranks
from ascent.settings import configure
from benchmarks.common import NoRecords, close
from benchmarks.peers import THREADS, Answer, Peer, in_turns, middle, raw
from benchmarks.peers.fixed_prompts import FixedPrompts

LR, MAX_NORM = 1e-6, 1.0
NEVER = frozenset({-1})
"""End tokens, so that no response ends before the limit."""


@dataclass(frozen=True)
class Work:
    """What both sides do."""

    model: str
    prompts: list[str]
    samples: int
    tokens: int
    device: str = "cpu"
    """On a GPU the parameters are bfloat16, on a CPU float32."""
    rows: int = 0
    """Responses in the peer's micro-batches; 0: all of them. Ours are cut by our learner."""

    @property
    def loss_tokens(self) -> int:
        return len(self.prompts) * self.samples * self.tokens


class Ours(NoRecords):
    """Ascent's own loop on its own parts, one step per turn. It records nothing, and TRL is set to record nothing."""

    def __init__(self, work: Work, more: dict[str, Any] | None = None, ranks: Ranks = SINGLE_PROCESS):
        """`more`: other settings; `ranks`: of a group that it trains in."""
        settings: dict[str, Any] = {
            "model": work.model,
            "policy.device": work.device,
            "policy.dtype": "float32" if work.device == "cpu" else "bfloat16",
            "algorithm": "dr-grpo",
            "prompts": len(work.prompts),
            "samples": work.samples,
            "max_tokens": work.tokens,
            "lr": LR,
            "update.max_norm": MAX_NORM,
            "threads": THREADS if work.device == "cpu" else 0,
            **(more or {}),
        }
        self.parts = assemble(configure(FixedPrompts(words=tuple(work.prompts)), settings), ranks=ranks)
        if ranks is not SINGLE_PROCESS:
            wrap_for_ranks(self.parts, ranks)
        self.parts.policy.stop_token_ids = NEVER  # type: ignore[union-attr]
        self.done = 0

    def __call__(self) -> Answer:
        parts, begin = self.parts, time.perf_counter()
        config = replace(parts.config, steps=self.done + 1)
        list(train(config, parts.task, parts.engine, parts.learner, self, parts.streams, dict, start=self.done))
        seconds = time.perf_counter() - begin
        self.done += 1
        spent = {part: self.metrics[f"time/{part}"] for part in ("generate", "reward", "update")}
        return {"seconds": seconds, **spent, "tokens": int(self.metrics["num_tokens"]), "prompts": self.prompts}

    def close(self) -> None:
        self.parts.close()

    def step(self, step: int, metrics: Metrics, batch: Any, *_: Any) -> None:
        self.metrics = metrics
        self.prompts = sorted([i for i in row if i >= 0] for row in batch.prompt.tolist())


def compare(name: str, work: Work, repeats: int, target: float, smoke: bool) -> int:
    """Both sides in turns; checks that they did the same work. A trial runs without the peer."""
    torch.set_num_threads(THREADS)
    ours = Ours(work)
    sides: dict[str, Any] = {"ascent": ours}
    try:
        if not smoke:
            sides["trl"] = Peer("trl-1.16.0", "trl_step", {**vars(work), "lr": LR, "max_norm": MAX_NORM})
        answers = in_turns(sides, repeats)
    finally:
        for side in sides.values():
            side.close()
    for found in (answer for side in answers.values() for answer in side):
        assert found["tokens"] == work.loss_tokens, f"{found['tokens']} loss tokens, not {work.loss_tokens}"
    lengths = sorted(map(len, ours.prompts))
    more = {"seconds": raw(answers), "loss_tokens": work.loss_tokens, "prompt_tokens": lengths, "repeats": repeats}
    if smoke:
        return close(name, None, None, target, True, smoke=True, **more)[1]
    theirs = [list(ids) for ids in answers["trl"][0]["prompts"]]
    assert theirs == ours.prompts, "the two sides were given different prompts"
    speedup = middle(answers["trl"]) / middle(answers["ascent"])
    print(f"Ascent {middle(answers['ascent']):.2f} s, TRL {middle(answers['trl']):.2f} s per step: {speedup:.2f} times")
    return close(name, speedup, 1.0, target, speedup >= target, peers=sides["trl"].about, **more)[1]
