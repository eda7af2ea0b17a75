"""Seconds and bytes of one card's work: a roofline with a few fitted constants.

    decoding step   layer · layers + products · max(weights / bandwidth, 2 · weights · rows / rate)
                    + caches · live tokens / bandwidth
    update          update + Adam's bytes / bandwidth + Σ over micro-batches of max(launch · layers, work)
    work            operations · products / rate + attention · pairs / rate + passes · kept bytes / bandwidth
    score           a third of an update's work and launches: its forward pass
    4-bit matrices  for every product, read and written once more in bfloat16

Memory follows the learner's and the sampler's own rules (`engines.language`): 18 or 10 bytes per trained parameter,
micro-batches that fill 60 % of what is left, caches in at most a quarter of what is free.
"""

from __future__ import annotations

from dataclasses import dataclass

from ascent.core.config import Config
from ascent.inference.runners.cuda_graph import BUCKETS, TOGETHER
from ascent.inference.runners.cuda_graph import SHARE as CACHES
from ascent.models.lm_head import CHUNK_BYTES
from ascent.models.quantization import BYTES
from ascent.training.captured_updates import MAX_CAPTURE_FRACTION
from ascent.training.micro_batches import ACTIVATION_FRACTION, COMPACT_BYTES_PER_PARAM, STATE_BYTES_PER_PARAM
from ascent.workflows.planning.gpus import FIT, Card, Fit
from ascent.workflows.planning.model_shapes import ModelShape

MOMENTS = {STATE_BYTES_PER_PARAM: 28, COMPACT_BYTES_PER_PARAM: 20}
"""Bytes that Adam moves per trained parameter, by those that it takes."""
PADDED = 1.125
"""Times its tokens, the row of an update whose passes are captured, about."""


@dataclass(frozen=True)
class OneCard:
    """A model on a card."""

    shape: ModelShape
    card: Card
    fit: Fit = FIT
    bits: int = 0
    """4: what can be is kept in 4 bits."""
    mixed: bool = False
    """Is the residual stream in float32?"""

    @property
    def stream(self) -> int:
        """Bytes of a token's residual stream."""
        return (4 if self.mixed else 2) * self.shape.width

    @property
    def kept(self) -> int:
        """Bytes that autograd keeps of a token. Two norms per layer keep the residual stream."""
        return self.shape.kept + 2 * self.shape.layers * (self.stream - 2 * self.shape.width)

    @property
    def packed(self) -> int:
        """Parameters in 4 bits."""
        return self.shape.packable if self.bits else 0

    @property
    def parameters(self) -> int:
        """Bytes of the model."""
        return 2 * (self.shape.every - self.packed) + int(BYTES * self.packed)

    @property
    def unpacking(self) -> float:
        """Seconds in which matrices in 4 bits are made again, once each."""
        return (BYTES + 2) * self.packed / self.card.bandwidth

    # ---- seconds

    def decoding(self, rows: int, live: float) -> float:
        """One step of this many rows, whose caches hold `live` tokens."""
        shape, card, weights = self.shape, self.card, self.shape.blocks + self.shape.head
        filled = next((bucket for bucket in BUCKETS if bucket >= rows), rows)
        products = max(2 * weights / card.bandwidth, 2 * weights * filled / card.rate)
        caches = live * shape.cache / card.bandwidth
        return self.fit.layer * shape.layers + self.fit.products * products + self.fit.caches * caches + self.unpacking

    def encoding(self, prompts: int, tokens: float) -> float:
        """Prompts into caches, a few at a time; or caches anew, after an update."""
        launches = self.fit.layer * self.shape.layers * -(-prompts // TOGETHER)
        return launches + self.fit.operations * 2 * self.shape.blocks * tokens / self.card.rate

    def update(
        self,
        batch: Tokens,
        room: float,
        trained: int,
        again: bool = False,
        per: int = STATE_BYTES_PER_PARAM,
        alone: bool = True,
    ) -> float:
        """Gradients of a batch in micro-batches of at most `room` tokens, and a step of Adam. `alone`: in one rank."""
        micro = max(1, -(-batch.tokens // max(1, room)))
        work = self._work(batch, again)
        launched = 0.0
        if again or not alone or per != STATE_BYTES_PER_PARAM or not self._captured(batch, micro, trained):
            launched = self.fit.launch * self.shape.layers * micro * (4 / 3 if again else 1)
        passes = max(launched, work)
        passes += 2 * micro * self.unpacking  # forward and back
        return self.fit.update + MOMENTS[per] * trained / self.card.bandwidth + passes

    def _captured(self, batch: Tokens, micro: float, trained: int) -> bool:
        """Are the passes of such an update captured as graphs, so that the host has little to launch?"""
        held = PADDED * batch.tokens * self.kept + 4 * trained
        return micro == 1 and held < MAX_CAPTURE_FRACTION * self.card.memory

    def score(self, batch: Tokens, room: float) -> float:
        """Log-probs of a batch: forward passes."""
        micro = max(1, -(-batch.tokens // max(1, room)))
        return max(self.fit.launch / 3 * self.shape.layers * micro, self._work(batch, False, third=True))

    def _work(self, batch: Tokens, again: bool, third: bool = False) -> float:
        """Seconds of the card for a forward and a backward pass; `again`: layers are computed twice."""
        shape, fit = self.shape, self.fit
        blocks, head = 6.0 * shape.blocks * batch.tokens, 8.0 * shape.head * batch.loss
        pairs = 12 * shape.layers * shape.heads * shape.channel * batch.pairs
        kept = fit.passes * self.kept * batch.tokens / self.card.bandwidth
        if third:
            blocks, head, pairs, kept = blocks / 3, head / 4, pairs / 3, kept / 3
        layers = (fit.operations * blocks + fit.attention * pairs) / self.card.rate + kept
        return layers * (4 / 3 if again else 1) + fit.operations * head / self.card.rate

    # ---- bytes

    def state(
        self, trained: int, reference: bool, critic: int, ranks: int = 1, per: int = STATE_BYTES_PER_PARAM
    ) -> dict[str, int]:
        """What is there whatever the batch is, `critic` bytes of a critic among it.

        `ranks`: over how many it is in shards; `per`: bytes of a trained parameter.
        """
        name = "float32 copy, gradients, Adam" if per == STATE_BYTES_PER_PARAM else "gradients and Adam in bfloat16"
        parts = {"parameters": self.parameters, name: (per - 2) * trained // ranks}
        if reference:
            parts["reference"] = (4 if ranks > 1 else 2) * trained // ranks
        if critic:
            parts["critic"] = critic // ranks
        frozen = trained < self.shape.head
        parts["head"] = 3 * CHUNK_BYTES["cuda"] + (0 if frozen else 6 * self.shape.head)
        return parts

    def per_token(self, checkpointing: bool) -> int:
        """What a token of a micro-batch takes."""
        layer = self.kept // self.shape.layers
        return 2 * layer + self.stream * self.shape.layers if checkpointing else self.kept + layer

    def micro(self, state: int, checkpointing: bool) -> float:
        """Tokens of the largest micro-batch that the learner would take."""
        return max(1.0, ACTIVATION_FRACTION * max(0, self.card.memory - state) / self.per_token(checkpointing))

    def cached(self, state: int) -> float:
        """Tokens of caches that the sampler would hold at most."""
        return CACHES * max(0, self.card.memory - state) / self.shape.cache


@dataclass(frozen=True)
class Tokens:
    """What a learner is given: numbers of its tokens."""

    tokens: int
    """Of prompts, once per group, and of responses."""
    loss: int
    """Of responses."""
    pairs: float
    """Pairs of tokens of which one sees the other."""

    @classmethod
    def of(cls, prompt: int, groups: list[list[int]]) -> Tokens:
        """Groups of responses of these lengths to prompts of one length."""
        loss = sum(map(sum, groups))
        pairs = sum(prompt * (prompt + 1) / 2 + sum(n * prompt + n * (n + 1) / 2 for n in own) for own in groups)
        return cls(len(groups) * prompt + loss, loss, pairs)


def forward_passes(config: Config) -> int:
    """Forward passes over a batch before its updates: of the old policy, the reference, the critic.

    In bfloat16 old log-probs are taken to come from the learner, unless the config says otherwise.
    """
    algorithm = config.algorithm
    return int(config.old_logp != "sampler") + int(algorithm.reference.kept) + int(algorithm.critic.on)
