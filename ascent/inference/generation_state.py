"""The responses of one generation call: tokens, log-probs, and which of them are finished."""

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from ascent.core.sampling_params import SamplingParams
from ascent.inference.environment_turns import EnvironmentTurns
from ascent.inference.occupancy import OccupancyTimeline
from ascent.inference.stop_strings import StopStrings
from ascent.models.lm_head import LMHead
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
        head: LMHead,
        seeds: Tensor | None,
        temperature: float,
        support: SamplingParams,
        turns: EnvironmentTurns | None = None,
        stops: StopStrings | None = None,
        limits: Tensor | None = None,
    ):
        self.max_tokens, self.stop_tokens, self.turns, self.stop_strings = (
            limit,
            torch.tensor(sorted(ends)),
            turns,
            stops,
        )
        self.length_limits = torch.full((count,), limit) if limits is None else limits
        """The most tokens of each response, none above `limit`; of one with turns, up to the end of its latest."""
        if turns is not None:
            self.length_limits = torch.tensor([turns.turn_limit(response) for response in range(count)])
        self.head, self.temperature, self.sampling_params = head, temperature, support
        self.seeds = seeds
        """One per response; None: the likeliest token is taken."""
        self.tokens = torch.zeros(count, limit, dtype=torch.long)
        self.logp = torch.zeros(count, limit)
        self.kept_mass = None if support.unrestricted else torch.ones(count, limit)
        self.lengths = torch.zeros(count, dtype=torch.long)
        self.stopped = torch.zeros(count, dtype=torch.bool)
        self.stop_string_matches: set[int] = set()
        """Responses whose last token completed a stop string, where the decoder looked only later."""
        self.max_prompt_tokens = 0
        """The most tokens of a prompt that comes while others are decoded."""
        self.accepts_requests = False
        """Do responses come from outside, at any time?"""
        self.unfinished = set(range(count))
        """Responses that are not over and that the call is there for: it ends when none is left."""
        self.already_finished: Collection[int] = ()
        """Responses that were over before the call."""
        self.timeline = OccupancyTimeline()
        """How many responses ran when; a decoder writes it."""
        self.on_finished: FinishedCallback | None = None
        """Who wants to know of responses that are over while others are being drawn."""

    def resume(self, drawn: Mapping[str, Tensor], going: Tensor, wanted: Tensor) -> None:
        """Go on from what earlier calls have drawn: `token`, `logp`, `mass`, `length` and `ended`, by response.

        `going`: which are not over; `wanted`: those that the call is there for. The others go as far as they come.
        """
        width = drawn["token"].shape[1]
        for into, name in ((self.tokens, "token"), (self.logp, "logp"), (self.kept_mass, "mass")):
            if into is not None:
                into[:, :width] = drawn[name]
        self.lengths, self.stopped = drawn["length"].clone(), drawn["ended"].clone()
        self.already_finished = frozenset((~going).nonzero().flatten().tolist())
        self.unfinished = set((going & wanted).nonzero().flatten().tolist())

    @property
    def started_lengths(self) -> dict[int, int]:
        """Of responses that have come some way and are not over, how far."""
        return {i: n for i, n in enumerate(self.lengths.tolist()) if n and i not in self.already_finished}

    def group_by_sampling(self, responses: list[int]) -> dict[tuple[float, SamplingParams, bool], list[int]]:
        """Places of these responses, by temperature, support and whether the likeliest token is taken."""
        return {(self.temperature, self.sampling_params, self.seeds is None): list(range(len(responses)))}

    @property
    def needs_tokens(self) -> bool:
        """Has a decoder that looks only every few steps to bring the tokens of those steps?"""
        return self.stop_strings is not None

    @property
    def needs_logprobs(self) -> bool:
        """And their log-probs?"""
        return False

    def new_requests(self) -> list[tuple[int, int, list[int]]]:
        """Responses that have come since the last look: with a number of their prompt, and its tokens."""
        return []

    def seed_of(self, response: int) -> int:
        return 0 if self.seeds is None else int(self.seeds[response])

    def sample(self, hidden: Tensor, row: list[int]) -> Tensor:
        """The next token of these responses, drawn from their last hidden states."""
        at, logits, alike = torch.tensor(row, dtype=torch.long), self.head.logits(hidden), self.group_by_sampling(row)
        t = self.lengths[at]
        if len(alike) == 1:
            self._sample_group(logits, at, t, *next(iter(alike)))
        else:
            for settings, some in alike.items():
                self._sample_group(logits[some], at[some], t[some], *settings)
        token = self.tokens[at, t]
        self.lengths[at] = t + 1
        self.stopped[at] = torch.isin(token, self.stop_tokens)
        if self.needs_tokens:
            stopped = [
                bool(self._stop_string_length(r, last, last + 1)) for r, last in zip(row, t.tolist(), strict=True)
            ]
            self.stopped[at] |= torch.tensor(stopped)
        return token

    def _sample_group(
        self, logits: Tensor, row: Tensor, t: Tensor, temperature: float, support: SamplingParams, greedy: bool
    ) -> None:
        """Token `t` of each of these responses, which share their settings."""
        u = None if greedy or self.seeds is None else uniform_from_seed(self.seeds[row], t).to(logits.device)
        early = t < support.min_tokens
        barred = (early.to(logits.device), self.stop_tokens.to(logits.device)) if bool(early.any()) else None
        token, logp, mass = sample_tokens(logits, temperature, support, u, barred)
        self.tokens[row, t], self.logp[row, t] = token.cpu(), logp.float().cpu()
        if self.kept_mass is not None and mass is not None:
            self.kept_mass[row, t] = mass.float().cpu()

    def _stop_string_length(self, response: int, start: int, end: int) -> int:
        """How many tokens there are up to the one from `start` to `end` that completes a stop string; 0: none does."""
        turn, stops = self.turn_start(response), self.stop_strings_of(response)
        start = max(start, self.sampling_params_of(response).min_tokens - 1)
        fresh = self.tokens[response, start:end].tolist()
        if stops is None or not any(stops.may_complete[token] for token in fresh):
            return 0
        length = stops.end(self.tokens[response, turn:end].tolist(), start - turn)
        return length and turn + length

    def stop_strings_of(self, response: int) -> StopStrings | None:
        return self.stop_strings

    def sampling_params_of(self, response: int) -> SamplingParams:
        return self.sampling_params

    def finished_length(self, response: int, before: int, after: int, done: int, fresh: Tensor | None) -> int:
        """How many tokens a response has if it is over, else 0: for a decoder that looks only every few steps.

        It had `before` tokens, and has drawn up to `after` since; `done`: its tokens, if an end token or the common
        limit has ended it. A stop string among the `fresh` ones, or its own limit, may have ended it sooner: then what
        was drawn behind does not exist.
        """
        limit = int(self.length_limits.numpy()[response])
        end = min(done or after, limit)
        if fresh is not None and end > before:
            self.tokens[response, before:end] = fresh[: end - before]
            if length := self._stop_string_length(response, before, end):
                self.stop_string_matches.add(response)
                return length
        return end if done or end == limit else 0

    def update_stopped(self, responses: list[int]) -> None:
        """See of these whether their latest token ended them."""
        at = torch.tensor(responses, dtype=torch.long)
        stopped = torch.tensor([response in self.stop_string_matches for response in responses], dtype=torch.bool)
        self.stopped[at] = torch.isin(self.tokens[at, self.lengths[at] - 1], self.stop_tokens) | stopped

    def tokens_of(self, response: int, start: int, end: int) -> list[int]:
        return self.tokens.numpy()[response, start:end].tolist() if start < end else []

    def turn_start(self, response: int) -> int:
        """Where its latest turn begins."""
        return 0 if self.turns is None else self.turns.turn_start[response]

    def finish_turns(self, responses: list[int]) -> list[int]:
        """Who of these, whose latest token is drawn, is over; of the others, those whose turn is over are asked about.

        A turn ends with an end token or a stop string, or at its own limit. At any other limit the response ends.
        """
        over, at = [], torch.tensor(responses, dtype=torch.long)
        found = (self.lengths[at], self.stopped[at], self.length_limits[at])
        for response, length, ended, limit in zip(responses, *(part.tolist() for part in found), strict=True):
            if not ended and length < limit:
                continue
            if self.turns is None or not (ended or length < self.turns.max_length(response)):
                over.append(response)
            else:
                self.turns.submit_turn(response, self.tokens_of(response, self.turn_start(response), length))
        if over and self.on_finished is not None:
            lengths = self.lengths[over].tolist()
            self.on_finished(over, [self.tokens_of(i, 0, length) for i, length in zip(over, lengths, strict=True)])
        return over

    @property
    def waits_for_input(self) -> bool:
        """Does any response wait for its environment?"""
        return self.turns is not None and bool(self.turns.pending)

    def poll_observations(self, wait: bool) -> list[tuple[int, list[int]]]:
        """Observations that have arrived, now part of their responses; without tokens, the response is over."""
        if self.turns is None:
            return []
        arrived = self.turns.poll_observations(wait)
        if not arrived:
            return arrived
        responses, observations = zip(*arrived, strict=True)
        at, count = list(responses), torch.tensor([len(tokens) for tokens in observations])
        row = torch.tensor(at).repeat_interleave(count)
        place = torch.arange(len(row)) + (self.lengths[at] - count.cumsum(0) + count).repeat_interleave(count)
        self.tokens[row, place] = torch.tensor([token for tokens in observations for token in tokens], dtype=torch.long)
        self.lengths[at] += count
        self.stopped[at] = torch.tensor([response in self.turns.terminated for response in at])
        self.length_limits[at] = torch.tensor([self.turns.turn_limit(response) for response in at])
        self.stop_string_matches.difference_update(at)
        return arrived
