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
"""Called with the ids of finished responses and their tokens."""


class GenerationState:
    """Tokens and log-probs of all responses of a call, one row per response, in the order of the call.

    A response consists of sampled tokens and, in a multi-turn conversation, of observations between its turns.
    """

    def __init__(
        self,
        count: int,
        max_tokens: int,
        stop_tokens: frozenset[int],
        head: LMHead,
        seeds: Tensor | None,
        temperature: float,
        sampling_params: SamplingParams,
        turns: EnvironmentTurns | None = None,
        stop_strings: StopStrings | None = None,
        limits: Tensor | None = None,
    ):
        self.max_tokens, self.stop_tokens = max_tokens, torch.tensor(sorted(stop_tokens))
        self.turns, self.stop_strings = turns, stop_strings
        self.length_limits = torch.full((count,), max_tokens) if limits is None else limits
        """Maximum length of each response, at most `max_tokens`; with turns: maximum length at the end of its turn."""
        if turns is not None:
            self.length_limits = torch.tensor([turns.turn_limit(response) for response in range(count)])
        self.head, self.temperature, self.sampling_params = head, temperature, sampling_params
        self.seeds = seeds
        """One seed per response; None: greedy."""
        self.tokens = torch.zeros(count, max_tokens, dtype=torch.long)
        self.logp = torch.zeros(count, max_tokens)
        self.kept_mass = None if sampling_params.unrestricted else torch.ones(count, max_tokens)
        self.lengths = torch.zeros(count, dtype=torch.long)
        self.stopped = torch.zeros(count, dtype=torch.bool)
        """Responses that ended with an end token, a stop string or their environment; others are cut at a limit."""
        self.stop_string_matches: set[int] = set()
        """Responses whose last token completed a stop string, for runners that check only every few steps."""
        self.max_prompt_tokens = 0
        """Maximum prompt length of requests that arrive during decoding."""
        self.accepts_requests = False
        """Whether requests arrive during decoding."""
        self.unfinished = set(range(count))
        """Unfinished responses that the call has to finish. It returns when the set is empty."""
        self.already_finished: Collection[int] = ()
        """Responses that an earlier call finished."""
        self.timeline = OccupancyTimeline()
        """Number of running sequences over time, recorded by the runner."""
        self.on_finished: FinishedCallback | None = None
        """Callback for finished responses while others are still being decoded."""

    def resume(self, progress: Mapping[str, Tensor], unfinished: Tensor, required: Tensor) -> None:
        """Continue from the `token`, `logp`, `kept_mass`, `length` and `ended` of an earlier call.

        `unfinished`: responses that have not ended. `required`: responses that this call has to finish; the others
        advance while it runs.
        """
        width = progress["token"].shape[1]
        for target, name in ((self.tokens, "token"), (self.logp, "logp"), (self.kept_mass, "kept_mass")):
            if target is not None:
                target[:, :width] = progress[name]
        self.lengths, self.stopped = progress["length"].clone(), progress["ended"].clone()
        self.already_finished = frozenset((~unfinished).nonzero().flatten().tolist())
        self.unfinished = set((unfinished & required).nonzero().flatten().tolist())

    @property
    def started_lengths(self) -> dict[int, int]:
        """Lengths of the unfinished responses that have tokens."""
        return {i: n for i, n in enumerate(self.lengths.tolist()) if n and i not in self.already_finished}

    def group_by_sampling(self, responses: list[int]) -> dict[tuple[float, SamplingParams, bool], list[int]]:
        """Return indices into `responses` by (temperature, sampling parameters, greedy)."""
        return {(self.temperature, self.sampling_params, self.seeds is None): list(range(len(responses)))}

    @property
    def needs_tokens(self) -> bool:
        """Whether a runner that checks only every few steps has to copy the tokens of those steps to the host."""
        return self.stop_strings is not None

    @property
    def needs_logprobs(self) -> bool:
        """Whether it also has to copy their log-probs."""
        return False

    def new_requests(self) -> list[tuple[int, int, list[int]]]:
        """Return the new responses since the last call: (response, prompt id, prompt tokens)."""
        return []

    def seed_of(self, response: int) -> int:
        return 0 if self.seeds is None else int(self.seeds[response])

    def sample(self, hidden: Tensor, responses: list[int]) -> Tensor:
        """Sample a token for each of these responses from its last hidden state, and append it."""
        index = torch.tensor(responses, dtype=torch.long)
        logits, groups, t = self.head.logits(hidden), self.group_by_sampling(responses), self.lengths[index]
        if len(groups) == 1:
            self._sample_group(logits, index, t, *next(iter(groups)))
        else:
            for settings, members in groups.items():
                self._sample_group(logits[members], index[members], t[members], *settings)
        token = self.tokens[index, t]
        self.lengths[index] = t + 1
        self.stopped[index] = torch.isin(token, self.stop_tokens)
        if self.needs_tokens:
            matches = [
                bool(self._stop_string_length(r, last, last + 1)) for r, last in zip(responses, t.tolist(), strict=True)
            ]
            self.stopped[index] |= torch.tensor(matches)
        return token

    def _sample_group(
        self, logits: Tensor, index: Tensor, t: Tensor, temperature: float, params: SamplingParams, greedy: bool
    ) -> None:
        """Sample token `t` of responses that share their sampling parameters."""
        u = None if greedy or self.seeds is None else uniform_from_seed(self.seeds[index], t).to(logits.device)
        early = t < params.min_tokens
        barred = (early.to(logits.device), self.stop_tokens.to(logits.device)) if bool(early.any()) else None
        token, logp, mass = sample_tokens(logits, temperature, params, u, barred)
        self.tokens[index, t], self.logp[index, t] = token.cpu(), logp.float().cpu()
        if self.kept_mass is not None and mass is not None:
            self.kept_mass[index, t] = mass.float().cpu()

    def _stop_string_length(self, response: int, start: int, end: int) -> int:
        """Return the length up to the first token in [start, end) that completes a stop string; 0: none does."""
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

    def finished_length(self, response: int, before: int, after: int, finished: int, fresh: Tensor | None) -> int:
        """Return the final length of a response, or 0 if it continues. For runners that check every few steps.

        It had `before` tokens at the last check and has been decoded to `after`. `finished`: its length if an end token
        or the common limit ended it. A stop string among the `fresh` tokens or its length limit may have ended it
        earlier; tokens after that are discarded.
        """
        limit = int(self.length_limits.numpy()[response])
        end = min(finished or after, limit)
        if fresh is not None and end > before:
            self.tokens[response, before:end] = fresh[: end - before]
            if length := self._stop_string_length(response, before, end):
                self.stop_string_matches.add(response)
                return length
        return end if finished or end == limit else 0

    def update_stopped(self, responses: list[int]) -> None:
        """Set `stopped` from the last token of each response."""
        index = torch.tensor(responses, dtype=torch.long)
        matches = torch.tensor([response in self.stop_string_matches for response in responses], dtype=torch.bool)
        last_tokens = self.tokens[index, self.lengths[index] - 1]
        self.stopped[index] = torch.isin(last_tokens, self.stop_tokens) | matches

    def tokens_of(self, response: int, start: int, end: int) -> list[int]:
        return self.tokens.numpy()[response, start:end].tolist() if start < end else []

    def turn_start(self, response: int) -> int:
        """Return the index of the first token of the latest turn."""
        return 0 if self.turns is None else self.turns.turn_start[response]

    def finish_turns(self, responses: list[int]) -> list[int]:
        """Return the responses that are finished. Submit the finished turns of the others to their environments.

        A turn ends with an end token or a stop string, or at its limit. At any other limit the response ends.
        """
        finished, index = [], torch.tensor(responses, dtype=torch.long)
        columns = (self.lengths[index], self.stopped[index], self.length_limits[index])
        for response, length, stopped, limit in zip(responses, *(part.tolist() for part in columns), strict=True):
            if not stopped and length < limit:
                continue
            if self.turns is None or not (stopped or length < self.turns.max_length(response)):
                finished.append(response)
            else:
                self.turns.submit_turn(response, self.tokens_of(response, self.turn_start(response), length))
        if finished and self.on_finished is not None:
            lengths = self.lengths[finished].tolist()
            tokens = [self.tokens_of(i, 0, length) for i, length in zip(finished, lengths, strict=True)]
            self.on_finished(finished, tokens)
        return finished

    @property
    def waits_for_input(self) -> bool:
        """Whether any response waits for an observation."""
        return self.turns is not None and bool(self.turns.pending)

    def poll_observations(self, wait: bool) -> list[tuple[int, list[int]]]:
        """Append new observations to their responses and return them. No tokens: the response is finished."""
        if self.turns is None:
            return []
        observed = self.turns.poll_observations(wait)
        if not observed:
            return observed
        responses, observations = zip(*observed, strict=True)
        index, counts = list(responses), torch.tensor([len(tokens) for tokens in observations])
        rows = torch.tensor(index).repeat_interleave(counts)
        offsets = (self.lengths[index] - counts.cumsum(0) + counts).repeat_interleave(counts)
        flat = torch.tensor([token for tokens in observations for token in tokens], dtype=torch.long)
        self.tokens[rows, torch.arange(len(rows)) + offsets] = flat
        self.lengths[index] += counts
        self.stopped[index] = torch.tensor([response in self.turns.terminated for response in index])
        self.length_limits[index] = torch.tensor([self.turns.turn_limit(response) for response in index])
        self.stop_string_matches.difference_update(index)
        return observed
