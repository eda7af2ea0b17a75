"""The responses of one generation call: tokens, log-probs, and which of them are finished."""

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from ascent.core.sampling_params import SamplingParams
from ascent.inference.environment_turns import EnvironmentTurns
from ascent.inference.occupancy import OccupancyTimeline
from ascent.inference.stop_strings import Stops
from ascent.models.lm_head import Head
from ascent.ops.token_sampling import sample_tokens, uniform_from_seed

FinishedCallback = Callable[[list[int], list[list[int]]], None]
"""Takes responses that are over, by their numbers, and their tokens."""


class GenerationState:
    """Everything that was drawn so far, one row per response, in the order in which they were asked for.

    A response begins, may be extended by tokens that nobody drew (an observation, behind a turn of its own), and ends.
    """

    def __init__(
        self,
        count: int,
        limit: int,
        ends: frozenset[int],
        head: Head,
        seeds: Tensor | None,
        temperature: float,
        support: SamplingParams,
        turns: EnvironmentTurns | None = None,
        stops: Stops | None = None,
        limits: Tensor | None = None,
    ):
        self.limit, self.ends, self.turns, self.stops = limit, torch.tensor(sorted(ends)), turns, stops
        self.limits = torch.full((count,), limit) if limits is None else limits
        """The most tokens of each response, none above `limit`; of one with turns, up to the end of its latest."""
        if turns is not None:
            self.limits = torch.tensor([turns.turn_limit(response) for response in range(count)])
        self.head, self.temperature, self.support = head, temperature, support
        self.seeds = seeds
        """One per response; None: the likeliest token is taken."""
        self.token = torch.zeros(count, limit, dtype=torch.long)
        self.logp = torch.zeros(count, limit)
        self.mass = None if support.unrestricted else torch.ones(count, limit)
        self.length = torch.zeros(count, dtype=torch.long)
        self.ended = torch.zeros(count, dtype=torch.bool)
        self.stopped: set[int] = set()
        """Responses whose last token completed a stop string, where the decoder looked only later."""
        self.longest = 0
        """The most tokens of a prompt that comes while others are decoded."""
        self.open = False
        """Do responses come from outside, at any time?"""
        self.missing = set(range(count))
        """Responses that are not over and that the call is there for: it ends when none is left."""
        self.before: Collection[int] = ()
        """Responses that were over before the call."""
        self.timeline = OccupancyTimeline()
        """How many responses ran when; a decoder writes it."""
        self.hand_over: FinishedCallback | None = None
        """Who wants to know of responses that are over while others are being drawn."""

    def go_on(self, drawn: Mapping[str, Tensor], going: Tensor, wanted: Tensor) -> None:
        """Go on from what earlier calls have drawn: `token`, `logp`, `mass`, `length` and `ended`, by response.

        `going`: which are not over; `wanted`: those that the call is there for. The others go as far as they come.
        """
        width = drawn["token"].shape[1]
        for into, name in ((self.token, "token"), (self.logp, "logp"), (self.mass, "mass")):
            if into is not None:
                into[:, :width] = drawn[name]
        self.length, self.ended = drawn["length"].clone(), drawn["ended"].clone()
        self.before = frozenset((~going).nonzero().flatten().tolist())
        self.missing = set((going & wanted).nonzero().flatten().tolist())

    @property
    def begun(self) -> dict[int, int]:
        """Of responses that have come some way and are not over, how far."""
        return {i: n for i, n in enumerate(self.length.tolist()) if n and i not in self.before}

    def by_settings(self, responses: list[int]) -> dict[tuple[float, SamplingParams, bool], list[int]]:
        """Places of these responses, by temperature, support and whether the likeliest token is taken."""
        return {(self.temperature, self.support, self.seeds is None): list(range(len(responses)))}

    @property
    def reads(self) -> bool:
        """Has a decoder that looks only every few steps to bring the tokens of those steps?"""
        return self.stops is not None

    @property
    def watched(self) -> bool:
        """And their log-probs?"""
        return False

    def entering(self) -> list[tuple[int, int, list[int]]]:
        """Responses that have come since the last look: with a number of their prompt, and its tokens."""
        return []

    def seed(self, response: int) -> int:
        return 0 if self.seeds is None else int(self.seeds[response])

    def next(self, hidden: Tensor, row: list[int]) -> Tensor:
        """The next token of these responses, drawn from their last hidden states."""
        at, logits, alike = torch.tensor(row, dtype=torch.long), self.head.logits(hidden), self.by_settings(row)
        t = self.length[at]
        if len(alike) == 1:
            self._draw(logits, at, t, *next(iter(alike)))
        else:
            for settings, some in alike.items():
                self._draw(logits[some], at[some], t[some], *settings)
        token = self.token[at, t]
        self.length[at] = t + 1
        self.ended[at] = torch.isin(token, self.ends)
        if self.reads:
            stopped = [bool(self._stop(r, last, last + 1)) for r, last in zip(row, t.tolist(), strict=True)]
            self.ended[at] |= torch.tensor(stopped)
        return token

    def _draw(
        self, logits: Tensor, row: Tensor, t: Tensor, temperature: float, support: SamplingParams, greedy: bool
    ) -> None:
        """Token `t` of each of these responses, which share their settings."""
        u = None if greedy or self.seeds is None else uniform_from_seed(self.seeds[row], t).to(logits.device)
        early = t < support.min_tokens
        barred = (early.to(logits.device), self.ends.to(logits.device)) if bool(early.any()) else None
        token, logp, mass = sample_tokens(logits, temperature, support, u, barred)
        self.token[row, t], self.logp[row, t] = token.cpu(), logp.float().cpu()
        if self.mass is not None and mass is not None:
            self.mass[row, t] = mass.float().cpu()

    def _stop(self, response: int, start: int, end: int) -> int:
        """How many tokens there are up to the one from `start` to `end` that completes a stop string; 0: none does."""
        turn, stops = self.begin(response), self.stops_of(response)
        start = max(start, self.support_of(response).min_tokens - 1)
        fresh = self.token[response, start:end].tolist()
        if stops is None or not any(stops.may_complete[token] for token in fresh):
            return 0
        length = stops.end(self.token[response, turn:end].tolist(), start - turn)
        return length and turn + length

    def stops_of(self, response: int) -> Stops | None:
        return self.stops

    def support_of(self, response: int) -> SamplingParams:
        return self.support

    def over(self, response: int, before: int, after: int, done: int, fresh: Tensor | None) -> int:
        """How many tokens a response has if it is over, else 0: for a decoder that looks only every few steps.

        It had `before` tokens, and has drawn up to `after` since; `done`: its tokens, if an end token or the common
        limit has ended it. A stop string among the `fresh` ones, or its own limit, may have ended it sooner: then what
        was drawn behind does not exist.
        """
        limit = int(self.limits.numpy()[response])
        end = min(done or after, limit)
        if fresh is not None and end > before:
            self.token[response, before:end] = fresh[: end - before]
            if length := self._stop(response, before, end):
                self.stopped.add(response)
                return length
        return end if done or end == limit else 0

    def end(self, responses: list[int]) -> None:
        """See of these whether their latest token ended them."""
        at = torch.tensor(responses, dtype=torch.long)
        stopped = torch.tensor([response in self.stopped for response in responses], dtype=torch.bool)
        self.ended[at] = torch.isin(self.token[at, self.length[at] - 1], self.ends) | stopped

    def tokens_of(self, response: int, start: int, end: int) -> list[int]:
        return self.token.numpy()[response, start:end].tolist() if start < end else []

    def begin(self, response: int) -> int:
        """Where its latest turn begins."""
        return 0 if self.turns is None else self.turns.turn_start[response]

    def ask(self, responses: list[int]) -> list[int]:
        """Who of these, whose latest token is drawn, is over; of the others, those whose turn is over are asked about.

        A turn ends with an end token or a stop string, or at its own limit. At any other limit the response ends.
        """
        over, at = [], torch.tensor(responses, dtype=torch.long)
        found = (self.length[at], self.ended[at], self.limits[at])
        for response, length, ended, limit in zip(responses, *(part.tolist() for part in found), strict=True):
            if not ended and length < limit:
                continue
            if self.turns is None or not (ended or length < self.turns.max_length(response)):
                over.append(response)
            else:
                self.turns.submit_turn(response, self.tokens_of(response, self.begin(response), length))
        if over and self.hand_over is not None:
            lengths = self.length[over].tolist()
            self.hand_over(over, [self.tokens_of(i, 0, length) for i, length in zip(over, lengths, strict=True)])
        return over

    @property
    def asked(self) -> bool:
        """Does any response wait for its environment?"""
        return self.turns is not None and bool(self.turns.pending)

    def answers(self, wait: bool) -> list[tuple[int, list[int]]]:
        """Observations that have arrived, now part of their responses; without tokens, the response is over."""
        if self.turns is None:
            return []
        arrived = self.turns.poll_observations(wait)
        if not arrived:
            return arrived
        responses, observations = zip(*arrived, strict=True)
        at, count = list(responses), torch.tensor([len(tokens) for tokens in observations])
        row = torch.tensor(at).repeat_interleave(count)
        place = torch.arange(len(row)) + (self.length[at] - count.cumsum(0) + count).repeat_interleave(count)
        self.token[row, place] = torch.tensor([token for tokens in observations for token in tokens], dtype=torch.long)
        self.length[at] += count
        self.ended[at] = torch.tensor([response in self.turns.terminated for response in at])
        self.limits[at] = torch.tensor([self.turns.turn_limit(response) for response in at])
        self.stopped.difference_update(at)
        return arrived
