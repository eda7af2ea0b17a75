"""A sampler made for groups: prompts are encoded once, and finished responses make room for waiting ones."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ascent.core.protocols import Finished, Open, Sampler
from ascent.core.types import Prompts, Rollouts
from ascent.engines.language.attention import ours
from ascent.engines.language.learning.head import Head
from ascent.engines.language.sampling.cache import Cache, Decoding, Encodes, Segment, extend
from ascent.engines.language.sampling.draw import Drawn, HandOver, Support, response_seeds
from ascent.engines.language.sampling.pages import Pages, Row, Schedule
from ascent.engines.language.sampling.prepacked import Prepacked, prepacked
from ascent.engines.language.sampling.stops import Stops
from ascent.engines.timeline import Timeline
from ascent.engines.turns import Turns
from ascent.policies.causal_lm import LanguageModel
from ascent.policies.four_bit import is_packed

ROWS = {"cpu": 64, "cuda": 1024}
"""Responses decoded at once where nobody says otherwise."""
PAGE, WIDE = 32, 64
"""Tokens on a page of the cache; wide ones, which are fewer, where there is room for all that rows can need."""


class LanguageSampler(Sampler):
    """Draws from a language model in this process, with the learner's own parameters: loading copies nothing."""

    fills = frozenset({"reward_greedy"})

    def __init__(
        self,
        lm: LanguageModel,
        limit: int,
        temperature: float,
        generator: torch.Generator,
        support: Support | None = None,
        rows: int = 0,
        stops: Stops | None = None,
        room: int = 0,
        most: int = 0,
    ):
        """`room`: tokens that the cache may hold; 0: as many as these rows can need, or as fit on the device.

        `most`: tokens that are drawn of a response with turns; 0: as many as the limit, which counts observations.
        """
        self.lm, self.limit, self.temperature, self.generator = lm, limit, temperature, generator
        self.support, self.stops = support or Support(), stops
        self.rows, self.room, self.most = rows or ROWS.get(lm.device.type, 64), room, most
        self.version = -1
        self.decoder: Callable[..., Any] = GroupDecoder if lm.shares else PlainDecoder
        if lm.shares and lm.device.type == "cuda":
            from ascent.engines.language.sampling.cuda import SLOW, graph_decoder

            graphs, why = graph_decoder(lm)
            self.note = None if graphs else SLOW.format(why=why)
            self.decoder = graphs or GroupDecoder
        self.packed: Prepacked | None = None
        """What computes hidden states on a CPU, in place of the model."""
        if lm.shares and lm.device.type == "cpu":
            self.packed = prepacked(lm)
            if self.packed is not None:
                self.decoder = partial(GroupDecoder, net=self.packed)
        self.timeline = Timeline()
        """How many responses ran when, of the tickets since it was last taken."""
        self.latest = Timeline()
        """That of the latest call."""
        self.score_early: Callable[[list[int], list[list[int]]], None] | None = None
        """Who wants to score responses while others are being drawn: it is told the problems and the tokens."""
        self.train_early: Callable[[Rollouts], None] | None = None
        """Who can begin to train on a step's rollouts before they are scored."""
        self._laid_out: tuple[tuple[int, ...], list[Tensor]] | None = None
        """Which state of the parameters was laid out for decoding, and its matrices."""

    def load(self, params: dict[str, Tensor], version: int) -> None:
        self.lm.take(params)
        self.version = version

    def generate(
        self, prompts: Prompts, samples: int, greedy: bool = False, *, limit: int | None = None, seed: int | None = None
    ) -> Rollouts:
        seeds = None if greedy else response_seeds(len(prompts), samples, self.generator, seed)
        return self.draw(prompts, samples, seeds, limit)

    @torch.no_grad()
    def draw(self, prompts: Prompts, samples: int, seeds: Tensor | None, limit: int | None = None) -> Rollouts:
        """Responses to these prompts from a seed for each `[prompt sample]`; None: greedy ones."""
        count, limit = len(prompts) * samples, limit or self.limit
        seeds = None if seeds is None else seeds.flatten()
        own = self.limits(prompts, samples, limit)
        with self.prepared() as head, self._turns(prompts, samples, seeds, own, limit) as turns:
            how = (self.temperature, self.support, turns, self.stops, own)
            drawn = Drawn(count, limit, self.lm.ends, head, seeds, *how)
            drawn.hand_over = self._hand_over([prompts], samples)
            self.decoder(self.lm, _ids(prompts), samples, self.rows, drawn, self.room)()
        self.latest = drawn.timeline
        return self._rollouts(prompts, samples, drawn)

    def _hand_over(self, prompts: list[Prompts], samples: int) -> HandOver | None:
        """What a decoder does with responses to these prompts that are over, while it draws the others.

        Of a conversation more than its tokens counts: it is scored at the end.
        """
        tell, problems = self.score_early, [part.problem for part in prompts]
        if tell is None or any(part.play is not None or part.problem is None for part in prompts):
            return None
        identities = torch.cat([part for part in problems if part is not None]).tolist()
        return lambda responses, tokens: tell([identities[response // samples] for response in responses], tokens)

    def limits(self, prompts: Prompts, samples: int, limit: int) -> Tensor:
        """The most tokens of each response that are drawn."""
        most = min(limit, self.most or limit)
        if prompts.limits is None:
            return torch.full((len(prompts) * samples,), most)
        return prompts.limits.clamp(max=most).repeat_interleave(samples)

    # ---- ahead of a step: responses of later steps fill the lanes that its own leave free

    def finished(self, step: int, deadline: float) -> Iterator[Finished]:
        for done in self._finished(step, deadline):
            if self.train_early is not None and not done.ticket.greedy:
                self.train_early(done.rollouts)
            yield done

    def _finished(self, step: int, deadline: float) -> Iterator[Finished]:
        later = any(one.ticket.step != step or one.going is not None for one in self.pending)
        if later and self.lm.shares and all(one.ticket.prompts.play is None for one in self.pending):
            self._go_on(step)
            mine = [one for one in self.pending if one.ticket.step == step]
            self.pending = tuple(one for one in self.pending if one.ticket.step != step)
            for one in mine:
                yield Finished(one.ticket, torch.arange(len(one.ticket.prompts)), self._whole(one))
        else:
            yield from super().finished(step, deadline)

    def _whole(self, one: Open) -> Rollouts:
        rollouts = super()._whole(one)
        if rollouts is not one.drawn:  # an evaluation is no part of a step's rollouts
            self.timeline.add(self.latest)
        return rollouts

    @torch.no_grad()
    def _go_on(self, step: int) -> None:
        """Decode until every response of this step is over; those of later steps come as far as they come.

        Keys and values are computed anew from what was drawn so far: the parameters are others than in the last step.
        """
        greedy = tuple(one for one in self.pending if one.ticket.greedy)
        tickets = [one for one in self.pending if not one.ticket.greedy]
        if not any(one.ticket.step == step and (one.drawn is None or one.going is not None) for one in tickets):
            return
        opened = [self._opened(one) for one in sorted(tickets, key=lambda one: one.ticket.step)]
        samples, each = opened[0].ticket.samples, [_so_far(one) for one in opened]
        width, rows = max(part["token"].shape[1] for part in each), [len(part["token"]) for part in each]
        before = {name: torch.cat([_widened(name, part[name], width) for part in each]) for name in each[0]}
        limits = torch.cat([self.limits(one.ticket.prompts, samples, self.limit) for one in opened])
        wanted = torch.cat([torch.full((n,), one.ticket.step == step) for n, one in zip(rows, opened, strict=True)])
        with self.prepared() as head:
            how = (self.temperature, self.support, None, self.stops, limits)
            drawn = Drawn(len(limits), self.limit, self.lm.ends, head, before["seed"], *how)
            drawn.go_on(before, before["going"], wanted)
            drawn.hand_over = self._hand_over([one.ticket.prompts for one in opened], samples)
            ids = [prompt for one in opened for prompt in _ids(one.ticket.prompts)]
            self.decoder(self.lm, ids, samples, self.rows, drawn, self.room)()
        self.timeline.add(drawn.timeline)
        place = torch.arange(self.limit)
        new = (place >= before["length"][:, None]) & (place < drawn.length[:, None])
        version = torch.full(new.shape, -1)
        version[:, : before["version"].shape[1]] = before["version"]
        version[new] = self.version
        going = before["going"] & ~drawn.ended & (drawn.length < limits)
        done, at = [], 0
        for one, count in zip(opened, rows, strict=True):
            part = slice(at, at + count)
            rollouts = self._rollouts(one.ticket.prompts, samples, drawn, part, version[part])
            left = going[part].view(-1, samples)
            done.append(replace(one, drawn=rollouts, going=left if bool(left.any()) else None))
            at += count
        self.pending = (*done, *greedy)

    def _opened(self, one: Open) -> Open:
        """The ticket with a seed for each response, all going if they are new."""
        if one.seeds is not None:
            return one
        ticket = one.ticket
        seeds = response_seeds(len(ticket.prompts), ticket.samples, self.generator, ticket.seed)
        return replace(one, seeds=seeds, going=torch.ones(seeds.shape, dtype=torch.bool))

    @contextmanager
    def _turns(
        self, prompts: Prompts, samples: int, seeds: Tensor | None, limits: Tensor, limit: int
    ) -> Iterator[Turns | None]:
        """What answers the turns of these responses, if anything does. A greedy answer has the same luck every time."""
        if prompts.play is None:
            yield None
            return
        count = len(prompts) * samples
        luck = list(range(count)) if seeds is None else seeds.tolist()
        with closing(prompts.play(prompts, samples, luck)) as episodes:
            yield Turns(episodes, limits, limit)

    @contextmanager
    def prepared(self) -> Iterator[Head]:
        """Inside, the model and its head are ready to decode: on a CPU, laid out for products with few rows.

        prepacked.py does it for models like Llama. For others x·Wᵀ with Wᵀ contiguous takes 10 % less time at 64 rows,
        and a quarter less at 16; the copies are made anew when the parameters have changed.
        """
        head = Head.of(self.lm.model.eval() if self.lm.model.training else self.lm.model)
        if self.lm.device.type != "cpu":
            yield head
            return
        if self.packed is not None:
            yield self.packed.renewed(self.version)
            return
        layers = [m for m in self.lm.backbone.modules() if isinstance(m, torch.nn.Linear) and not is_packed(m)]
        every = [m.weight for m in layers] + [head.weight]
        now = (self.version, *(w._version for w in every))  # torch counts the changes of a tensor in place
        if self._laid_out is None or self._laid_out[0] != now:
            old = [w.new_empty(w.shape[::-1]) for w in every] if self._laid_out is None else self._laid_out[1]
            self._laid_out = (now, [into.copy_(w.detach().t()) for w, into in zip(every, old, strict=True)])
        own = [m.weight.data for m in layers]
        *copies, last = self._laid_out[1]
        try:
            for layer, copy in zip(layers, copies, strict=True):
                layer.weight.data = copy.t()
            yield replace(head, weight=last.t())
        finally:
            for layer, data in zip(layers, own, strict=True):
                layer.weight.data = data

    def _rollouts(
        self, prompts: Prompts, samples: int, drawn: Drawn, rows: slice = slice(None), version: Tensor | None = None
    ) -> Rollouts:
        """These rows of what was drawn; `version`: of each token, where more than one drew them."""
        length = drawn.length[rows]
        width, shape = int(length.max()), (len(prompts), samples)
        present = torch.arange(width) < length.view(shape).unsqueeze(-1)
        said = {"mask": present, "present": present} if drawn.turns is None else drawn.turns.fields(shape, present)

        def part(values: Tensor) -> Tensor:
            return values[rows, :width].reshape(*shape, width)

        return Rollouts(
            prompt=prompts.prompt,
            problem=prompts.problem,
            response=part(drawn.token),
            logp_sampler=part(drawn.logp),
            limit=min(drawn.limit, self.most or drawn.limit),
            limits=prompts.limits,
            truncated=~drawn.ended[rows].view(shape),
            temperature=self.temperature,
            version=torch.full((*shape, 1), self.version) if version is None else version[:, :width].view(*shape, -1),
            mass=None if drawn.mass is None else part(drawn.mass),
            **said,
        )


def _ids(prompts: Prompts) -> list[list[int]]:
    return [[token for token in row if token >= 0] for row in prompts.prompt.tolist()]


def _so_far(one: Open) -> dict[str, Tensor]:
    """What was drawn for a ticket, one row per response."""
    assert one.seeds is not None
    count, drawn = one.seeds.numel(), one.drawn
    going = torch.zeros(count, dtype=torch.bool) if one.going is None else one.going.flatten()
    if drawn is None:
        nothing = torch.zeros(count, 0)
        tokens, length, ended = (nothing.long(), nothing, nothing, nothing.long()), torch.zeros(count).long(), ~going
    else:
        mass = torch.ones(drawn.mask.shape) if drawn.mass is None else drawn.mass
        parts = (drawn.response, drawn.logp_sampler, mass, drawn.version.expand(drawn.mask.shape))
        tokens = tuple(part.flatten(0, 1) for part in parts)  # type: ignore[assignment]
        length, ended = drawn.length.flatten(), ~drawn.truncated.flatten()
    by_token = dict(zip(("token", "logp", "mass", "version"), tokens, strict=True))
    return by_token | {"length": length, "ended": ended, "going": going, "seed": one.seeds.flatten()}


def _widened(name: str, part: Tensor, width: int) -> Tensor:
    nothing = {"mass": 1.0, "version": -1}.get(name, 0)
    return part if part.dim() == 1 else F.pad(part, (0, width - part.shape[1]), value=nothing)


class GroupDecoder:
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
        drawn: Drawn,
        room: int = 0,
        net: Encodes | None = None,
    ):
        """`net`: what computes hidden states in place of the model."""
        self.lm, self.prompts, self.drawn, self.net = lm, dict(enumerate(prompts)), drawn, net or lm
        rows, lengths = min(rows, len(drawn.length)), [len(p) for p in prompts]
        slots = min(len(prompts) or rows, -(-rows // samples) + 1)
        size = PAGE if room else WIDE
        own = rows * -(-drawn.limit // size)
        most = own + slots * -(-max(lengths, default=drawn.longest) // size)
        pages = Pages(min(most, -(-room // size)), size) if room else Pages(most, size, own)
        begun = {response: length - 1 for response, length in drawn.begun.items()}
        self.schedule = Schedule(lengths, samples, rows, drawn.limit, pages, begun=begun, over=drawn.before)
        drawn.timeline.lanes = rows
        self.decoding = (
            net.decoding(pages.count, size)
            if isinstance(net, Prepacked)
            else Decoding(Cache(pages.count, size), lm.device)
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
                self.drawn.timeline.see(len(rows))
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
                if response in self.drawn.turns.asked:
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

    def _extend(self, rows: list[Row], tokens: list[list[int]]) -> None:
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


class PlainDecoder:
    """The fallback for architectures whose attention is not ours to call: transformers' own cache.

    Prompts are repeated for their samples and padded on the left; finished responses leave the batch,
    and the next `rows` enter when it is empty.
    """

    def __init__(
        self, lm: LanguageModel, prompts: list[list[int]], samples: int, rows: int, drawn: Drawn, room: int = 0
    ):
        self.lm, self.prompts, self.samples, self.drawn = lm, prompts, samples, drawn
        self.rows = max(1, min(rows, room // (max(map(len, prompts)) + drawn.limit))) if room else rows

    def __call__(self) -> None:
        everything = list(range(len(self.prompts) * self.samples))
        self.drawn.timeline.lanes = min(self.rows, len(everything))
        for start in range(0, len(everything), self.rows):
            self._wave(everything[start : start + self.rows])
        self.drawn.timeline.stop()

    def _wave(self, row: list[int]) -> None:
        from transformers import DynamicCache

        device = self.lm.device
        ids = [self.prompts[i // self.samples] for i in row]
        width = max(map(len, ids))
        tokens = torch.tensor([[0] * (width - len(p)) + p for p in ids], device=device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in ids], device=device)
        cache = DynamicCache(config=self.lm.model.config)
        observed: dict[int, list[int]] = {}
        while row:
            self.drawn.timeline.see(len(row))
            positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
            out = self.lm.backbone(
                input_ids=tokens, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
            )
            token, going = self._next(out.last_hidden_state[:, -1], row, observed)
            if not all(going):
                keep = torch.tensor([i for i, on in enumerate(going) if on], dtype=torch.long, device=device)
                row, token, mask = [row[i] for i in keep], token[keep], mask[keep]
                if row:
                    cache.reorder_cache(keep)  # type: ignore[arg-type]
            tokens = token[:, None]
            mask = torch.cat([mask, mask.new_ones(len(row), 1)], -1)

    def _next(self, hidden: Tensor, row: list[int], observed: dict[int, list[int]]) -> tuple[Tensor, list[bool]]:
        """The next token of these responses, drawn or of an observation, and which of them continue."""
        token = torch.tensor([observed[response].pop(0) if observed.get(response) else -1 for response in row])
        drawing = (token < 0).nonzero().flatten().tolist()
        over: set[int] = set()
        if drawing:
            responses = [row[i] for i in drawing]
            token[drawing] = self.drawn.next(hidden[drawing], responses).cpu()
            over.update(self.drawn.ask(responses))
        while self.drawn.asked:  # without a cache of our own nobody can be parked
            for response, tokens in self.drawn.answers(wait=True):
                observed[response] = list(tokens)
                over.update([] if tokens else [response])
        return token.to(hidden.device), [response not in over for response in row]
