"""The local generation engine: prompts are prefilled once per group, and finished responses make room for others."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ascent.core.protocols import FinishedRollouts, PendingRollout, RolloutEngine
from ascent.core.sampling_params import SamplingParams
from ascent.core.types import Prompts, Rollouts
from ascent.inference.environment_turns import EnvironmentTurns
from ascent.inference.generation_state import FinishedCallback, GenerationState
from ascent.inference.occupancy import OccupancyTimeline
from ascent.inference.runners.eager import EagerRunner
from ascent.inference.runners.packed_cpu_model import PackedCpuModel, build_packed_cpu_model
from ascent.inference.runners.paged import PagedRunner
from ascent.inference.stop_strings import StopStrings
from ascent.models.causal_lm import LanguageModel
from ascent.models.lm_head import LMHead
from ascent.models.quantization import is_quantized
from ascent.ops.token_sampling import response_seeds

ROWS = {"cpu": 64, "cuda": 1024}
"""Default maximum number of sequences in the running batch, by device."""


class LocalEngine(RolloutEngine):
    """Generates with a language model in this process, which shares its parameters with the learner."""

    provides = frozenset({"reward_greedy"})

    def __init__(
        self,
        lm: LanguageModel,
        limit: int,
        temperature: float,
        generator: torch.Generator,
        support: SamplingParams | None = None,
        rows: int = 0,
        stops: StopStrings | None = None,
        room: int = 0,
        most: int = 0,
    ):
        """`room`: tokens that the cache may hold; 0: as many as these rows can need, or as fit on the device.

        `most`: tokens that are drawn of a response with turns; 0: as many as the limit, which counts observations.
        """
        self.lm, self.limit, self.temperature, self.generator = lm, limit, temperature, generator
        self.sampling_params, self.stop_strings = support or SamplingParams(), stops
        self.rows, self.cache_tokens, self.max_sampled_tokens = rows or ROWS.get(lm.device.type, 64), room, most
        self.version = -1
        self.runner: Callable[..., Any] = PagedRunner if lm.can_share_prompts else EagerRunner
        if lm.can_share_prompts and lm.device.type == "cuda":
            from ascent.inference.runners.cuda_graph import SLOW_RUNNER_NOTE, cuda_graph_runner

            graphs, why = cuda_graph_runner(lm)
            self.note = None if graphs else SLOW_RUNNER_NOTE.format(why=why)
            self.runner = graphs or PagedRunner
        self.packed_model: PackedCpuModel | None = None
        """A faster implementation of the model on a CPU."""
        if lm.can_share_prompts and lm.device.type == "cpu":
            self.packed_model = build_packed_cpu_model(lm)
            if self.packed_model is not None:
                self.runner = partial(PagedRunner, hidden_model=self.packed_model)
        self.timeline = OccupancyTimeline()
        """How many responses ran when, of the tickets since it was last taken."""
        self.latest_timeline = OccupancyTimeline()
        """Occupancy during the latest call."""
        self.score_early: Callable[[list[int], list[list[int]]], None] | None = None
        """Who wants to score responses while others are being drawn: it is told the problems and the tokens."""
        self.train_early: Callable[[Rollouts], None] | None = None
        """Who can begin to train on a step's rollouts before they are scored."""
        self._laid_out: tuple[tuple[int, ...], list[Tensor]] | None = None
        """Which state of the parameters was laid out for decoding, and its matrices."""

    def load(self, params: dict[str, Tensor], version: int) -> None:
        self.lm.load_params(params)
        self.version = version

    def generate(
        self, prompts: Prompts, samples: int, greedy: bool = False, *, limit: int | None = None, seed: int | None = None
    ) -> Rollouts:
        seeds = None if greedy else response_seeds(len(prompts), samples, self.generator, seed)
        return self.generate_from_seeds(prompts, samples, seeds, limit)

    @torch.no_grad()
    def generate_from_seeds(
        self, prompts: Prompts, samples: int, seeds: Tensor | None, limit: int | None = None
    ) -> Rollouts:
        """Generate responses from `[prompt sample]` seeds; None: greedy."""
        count, limit = len(prompts) * samples, limit or self.limit
        seeds = None if seeds is None else seeds.flatten()
        own = self.length_limits(prompts, samples, limit)
        with self.prepared() as head, self._turns(prompts, samples, seeds, own, limit) as turns:
            how = (self.temperature, self.sampling_params, turns, self.stop_strings, own)
            drawn = GenerationState(count, limit, self.lm.stop_token_ids, head, seeds, *how)
            drawn.on_finished = self._hand_over([prompts], samples)
            self.runner(self.lm, _ids(prompts), samples, self.rows, drawn, self.cache_tokens)()
        self.latest_timeline = drawn.timeline
        return self._rollouts(prompts, samples, drawn)

    def _hand_over(self, prompts: list[Prompts], samples: int) -> FinishedCallback | None:
        """What a decoder does with responses to these prompts that are over, while it draws the others.

        Of a conversation more than its tokens counts: it is scored at the end.
        """
        tell, problems = self.score_early, [part.problem for part in prompts]
        if tell is None or any(part.start_episodes is not None or part.problem is None for part in prompts):
            return None
        identities = torch.cat([part for part in problems if part is not None]).tolist()
        return lambda responses, tokens: tell([identities[response // samples] for response in responses], tokens)

    def length_limits(self, prompts: Prompts, samples: int, limit: int) -> Tensor:
        """Return the maximum number of sampled tokens of each response."""
        most = min(limit, self.max_sampled_tokens or limit)
        if prompts.limits is None:
            return torch.full((len(prompts) * samples,), most)
        return prompts.limits.clamp(max=most).repeat_interleave(samples)

    # ---- ahead of a step: responses of later steps fill the lanes that its own leave free

    def iter_finished(self, step: int, deadline: float) -> Iterator[FinishedRollouts]:
        for done in self._finished(step, deadline):
            if self.train_early is not None and not done.request.greedy:
                self.train_early(done.rollouts)
            yield done

    def _finished(self, step: int, deadline: float) -> Iterator[FinishedRollouts]:
        later = any(one.request.step != step or one.unfinished is not None for one in self.pending)
        if (
            later
            and self.lm.can_share_prompts
            and all(one.request.prompts.start_episodes is None for one in self.pending)
        ):
            self._go_on(step)
            mine = [one for one in self.pending if one.request.step == step]
            self.pending = tuple(one for one in self.pending if one.request.step != step)
            for one in mine:
                yield FinishedRollouts(one.request, torch.arange(len(one.request.prompts)), self._generate_all(one))
        else:
            yield from super().iter_finished(step, deadline)

    def _generate_all(self, one: PendingRollout) -> Rollouts:
        rollouts = super()._generate_all(one)
        if rollouts is not one.rollouts:  # an evaluation is no part of a step's rollouts
            self.timeline.merge(self.latest_timeline)
        return rollouts

    @torch.no_grad()
    def _go_on(self, step: int) -> None:
        """Decode until every response of this step is finished; responses of later steps advance meanwhile.

        Their keys and values are recomputed, because the parameters have changed since the last step.
        """
        greedy = tuple(one for one in self.pending if one.request.greedy)
        tickets = [one for one in self.pending if not one.request.greedy]
        if not any(
            one.request.step == step and (one.rollouts is None or one.unfinished is not None) for one in tickets
        ):
            return
        opened = [self._opened(one) for one in sorted(tickets, key=lambda one: one.request.step)]
        samples, each = opened[0].request.samples, [_so_far(one) for one in opened]
        width, rows = max(part["token"].shape[1] for part in each), [len(part["token"]) for part in each]
        before = {name: torch.cat([_widened(name, part[name], width) for part in each]) for name in each[0]}
        limits = torch.cat([self.length_limits(one.request.prompts, samples, self.limit) for one in opened])
        wanted = torch.cat([torch.full((n,), one.request.step == step) for n, one in zip(rows, opened, strict=True)])
        with self.prepared() as head:
            how = (self.temperature, self.sampling_params, None, self.stop_strings, limits)
            drawn = GenerationState(len(limits), self.limit, self.lm.stop_token_ids, head, before["seed"], *how)
            drawn.resume(before, before["going"], wanted)
            drawn.on_finished = self._hand_over([one.request.prompts for one in opened], samples)
            ids = [prompt for one in opened for prompt in _ids(one.request.prompts)]
            self.runner(self.lm, ids, samples, self.rows, drawn, self.cache_tokens)()
        self.timeline.merge(drawn.timeline)
        place = torch.arange(self.limit)
        new = (place >= before["length"][:, None]) & (place < drawn.lengths[:, None])
        version = torch.full(new.shape, -1)
        version[:, : before["version"].shape[1]] = before["version"]
        version[new] = self.version
        going = before["going"] & ~drawn.stopped & (drawn.lengths < limits)
        done, at = [], 0
        for one, count in zip(opened, rows, strict=True):
            part = slice(at, at + count)
            rollouts = self._rollouts(one.request.prompts, samples, drawn, part, version[part])
            left = going[part].view(-1, samples)
            done.append(replace(one, rollouts=rollouts, unfinished=left if bool(left.any()) else None))
            at += count
        self.pending = (*done, *greedy)

    def _opened(self, one: PendingRollout) -> PendingRollout:
        """The ticket with a seed for each response, all going if they are new."""
        if one.seeds is not None:
            return one
        ticket = one.request
        seeds = response_seeds(len(ticket.prompts), ticket.samples, self.generator, ticket.seed)
        return replace(one, seeds=seeds, unfinished=torch.ones(seeds.shape, dtype=torch.bool))

    @contextmanager
    def _turns(
        self, prompts: Prompts, samples: int, seeds: Tensor | None, limits: Tensor, limit: int
    ) -> Iterator[EnvironmentTurns | None]:
        """What answers the turns of these responses, if anything does. A greedy answer has the same luck every time."""
        if prompts.start_episodes is None:
            yield None
            return
        count = len(prompts) * samples
        luck = list(range(count)) if seeds is None else seeds.tolist()
        with closing(prompts.start_episodes(prompts, samples, luck)) as episodes:
            yield EnvironmentTurns(episodes, limits, limit)

    @contextmanager
    def prepared(self) -> Iterator[LMHead]:
        """Inside, the model and its head are ready to decode: on a CPU, laid out for products with few rows.

        prepacked.py does it for models like Llama. For others x·Wᵀ with Wᵀ contiguous takes 10 % less time at 64 rows,
        and a quarter less at 16; the copies are made anew when the parameters have changed.
        """
        head = LMHead.of(self.lm.model.eval() if self.lm.model.training else self.lm.model)
        if self.lm.device.type != "cpu":
            yield head
            return
        if self.packed_model is not None:
            yield self.packed_model.refresh(self.version)
            return
        layers = [m for m in self.lm.backbone.modules() if isinstance(m, torch.nn.Linear) and not is_quantized(m)]
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
        self,
        prompts: Prompts,
        samples: int,
        drawn: GenerationState,
        rows: slice = slice(None),
        version: Tensor | None = None,
    ) -> Rollouts:
        """These rows of what was drawn; `version`: of each token, where more than one drew them."""
        length = drawn.lengths[rows]
        width, shape = int(length.max()), (len(prompts), samples)
        present = torch.arange(width) < length.view(shape).unsqueeze(-1)
        said = {"mask": present, "present": present} if drawn.turns is None else drawn.turns.fields(shape, present)

        def part(values: Tensor) -> Tensor:
            return values[rows, :width].reshape(*shape, width)

        return Rollouts(
            prompt=prompts.prompt,
            problem=prompts.problem,
            response=part(drawn.tokens),
            logp_sampler=part(drawn.logp),
            limit=min(drawn.max_tokens, self.max_sampled_tokens or drawn.max_tokens),
            limits=prompts.limits,
            truncated=~drawn.stopped[rows].view(shape),
            temperature=self.temperature,
            version=torch.full((*shape, 1), self.version) if version is None else version[:, :width].view(*shape, -1),
            kept_mass=None if drawn.kept_mass is None else part(drawn.kept_mass),
            **said,
        )


def _ids(prompts: Prompts) -> list[list[int]]:
    return [[token for token in row if token >= 0] for row in prompts.prompt.tolist()]


def _so_far(one: PendingRollout) -> dict[str, Tensor]:
    """What was drawn for a ticket, one row per response."""
    assert one.seeds is not None
    count, drawn = one.seeds.numel(), one.rollouts
    going = torch.zeros(count, dtype=torch.bool) if one.unfinished is None else one.unfinished.flatten()
    if drawn is None:
        nothing = torch.zeros(count, 0)
        tokens, length, ended = (nothing.long(), nothing, nothing, nothing.long()), torch.zeros(count).long(), ~going
    else:
        mass = torch.ones(drawn.mask.shape) if drawn.kept_mass is None else drawn.kept_mass
        parts = (drawn.response, drawn.logp_sampler, mass, drawn.version.expand(drawn.mask.shape))
        tokens = tuple(part.flatten(0, 1) for part in parts)  # type: ignore[assignment]
        length, ended = drawn.length.flatten(), ~drawn.truncated.flatten()
    by_token = dict(zip(("token", "logp", "mass", "version"), tokens, strict=True))
    return by_token | {"length": length, "ended": ended, "going": going, "seed": one.seeds.flatten()}


def _widened(name: str, part: Tensor, width: int) -> Tensor:
    nothing = {"mass": 1.0, "version": -1}.get(name, 0)
    return part if part.dim() == 1 else F.pad(part, (0, width - part.shape[1]), value=nothing)
