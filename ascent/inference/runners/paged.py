"""Decode with blocks and without CUDA graphs, on a CPU or a GPU."""

import torch
from torch import Tensor

from ascent.inference.block_manager import BlockManager
from ascent.inference.generation_state import GenerationState
from ascent.inference.kv_cache import Decoding, Encodes, Segment, extend
from ascent.inference.runners.packed_cpu_model import PackedCpuModel
from ascent.inference.scheduler import Scheduler
from ascent.inference.sequence import Sequence
from ascent.models.causal_lm import LanguageModel
from ascent.models.packed_attention import ours
from ascent.ops.paged_kv_cache import PagedKVCache

BLOCK_SIZE, WIDE = 32, 64
"""Tokens on a page of the cache; wide ones, which are fewer, where there is room for all that rows can need."""


class PagedRunner:
    """Decodes all samples of all prompts, at most `rows` of them at once, on at most `room` tokens of cache.

    Prompts are encoded as their first sample enters, packed together. A finished response leaves at once, and the next
    one that waits takes its place.
    """

    def __init__(
        self,
        lm: LanguageModel,
        prompts: list[list[int]],
        samples: int,
        rows: int,
        drawn: GenerationState,
        room: int = 0,
        net: Encodes | None = None,
    ):
        """`net`: what computes hidden states in place of the model."""
        self.lm, self.prompts, self.drawn, self.net = lm, dict(enumerate(prompts)), drawn, net or lm
        rows, lengths = min(rows, len(drawn.length)), [len(p) for p in prompts]
        slots = min(len(prompts) or rows, -(-rows // samples) + 1)
        size = BLOCK_SIZE if room else WIDE
        own = rows * -(-drawn.limit // size)
        most = own + slots * -(-max(lengths, default=drawn.longest) // size)
        pages = BlockManager(min(most, -(-room // size)), size) if room else BlockManager(most, size, own)
        begun = {response: length - 1 for response, length in drawn.begun.items()}
        self.schedule = Scheduler(lengths, samples, rows, drawn.limit, pages, begun=begun, over=drawn.before)
        drawn.timeline.capacity = rows
        self.decoding = (
            net.decoding(pages.count, size)
            if isinstance(net, PackedCpuModel)
            else Decoding(PagedKVCache(pages.count, size), lm.device)
        )
        self.cache = self.decoding.cache
        self.hidden: dict[int, Tensor] = {}
        """The last hidden state of each encoded prompt, from which its samples draw their first token."""
        self.last = {response: int(drawn.token[response, before]) for response, before in begun.items()}
        """The token that each response feeds next: the one drawn last, or the last of an observation."""
        self.given: dict[int, list[int]] = {}
        """By response, the tokens before that one which are not in its pages yet, though it has pages."""

    def __call__(self) -> None:
        schedule, before, device = self.schedule, None, self.lm.device
        with ours(self.lm.model):
            while self.drawn.missing:
                self._hear(wait=False)
                self._admit()
                schedule.grow(1)
                rows = schedule.running
                self.drawn.timeline.record(len(rows))
                if not rows:
                    if self.drawn.asked:
                        self._hear(wait=True)
                    continue
                now = [(row, len(row.pages)) for row in rows]  # a slot may hold another row than before
                if now != before:
                    self.decoding.arrange(rows, schedule)
                before = now
                last = torch.tensor([self.last[row.response] for row in rows], device=device)
                positions = self.decoding.begin(rows)
                hidden = self.net.hidden(last[:, None], positions[:, None], self.decoding)
                for row in rows:
                    row.length += 1
                self._draw(hidden[:, 0], [row.response for row in rows])
        self.drawn.timeline.stop()

    def _end(self, response: int) -> None:
        prompt = self.schedule.prompt(response)
        self.schedule.end(response)
        self.drawn.missing.discard(response)
        self.last.pop(response, None), self.given.pop(response, None)
        if prompt not in self.schedule.keys:
            del self.prompts[prompt]
            self.hidden.pop(prompt, None)

    def _draw(self, hidden: Tensor, responses: list[int]) -> None:
        """The next token of these responses; those that are over leave, and those that ask for an answer are parked."""
        tokens = self.drawn.next(hidden, responses).tolist()
        self.last |= dict(zip(responses, tokens, strict=True))
        for response in self.drawn.ask(responses):
            self._end(response)
        if self.drawn.turns is not None:
            for response in responses:
                if response in self.drawn.turns.pending:
                    self.schedule.park(response)

    def _hear(self, wait: bool) -> None:
        """Responses that were answered want a lane again, but for those that are over.

        An observation joins its row's cache, all but its last token, which is fed next.
        """
        for response, tokens in self.drawn.answers(wait):
            if not tokens:
                self._end(response)
                continue
            self.given[response] = [self.last[response], *tokens[:-1]]
            self.last[response] = tokens[-1]
            self.schedule.unpark(response, int(self.drawn.length[response]) - 1)
        for response, prompt, ids in self.drawn.entering():
            self.prompts[prompt], begun = ids, int(self.drawn.length[response])
            if begun:
                self.last[response] = int(self.drawn.token[response, begun - 1])
            self.schedule.add(response, prompt, len(ids), max(begun - 1, 0))

    def _extend(self, rows: list[Sequence], tokens: list[list[int]]) -> None:
        """These tokens are the last of what their rows hold: into their pages."""
        prompts, keys = self.schedule.prompts, self.schedule.keys
        segments = [
            Segment(row.pages, len(own), row.length - len(own), prompts[row.prompt], keys[row.prompt])
            for row, own in zip(rows, tokens, strict=True)
        ]
        if segments:
            extend(self.net, self.cache, tokens, segments)

    def _admit(self) -> None:
        """Let waiting responses in while there is room; their first tokens come from their prompts."""
        schedule = self.schedule
        while True:
            there = set(schedule.rows.values())
            if not (entering := schedule.admit()):
                return
            self._encode()
            back = [row for row in entering if row.length]  # they were parked, or evicted
            given = [self.given.pop(row.response, []) for row in back]
            for i, row in enumerate(back):
                if row not in there:  # its pages are new, though it may have had others just before
                    given[i] = self.drawn.token[row.response, : row.length].tolist()
            self._extend(back, given)
            new = [row.response for row in entering if row.response not in self.last]
            if new:
                self._draw(torch.stack([self.hidden[schedule.prompt(i)] for i in new]), new)

    def _encode(self) -> None:
        schedule, fresh = self.schedule, self.schedule.fresh
        if not fresh:
            return
        segments = [Segment(schedule.prompts[p], schedule.keys[p]) for p in fresh]
        hidden = extend(self.net, self.cache, [self.prompts[p] for p in fresh], segments)
        self.hidden |= dict(zip(fresh, hidden, strict=True))
        schedule.fresh = []
