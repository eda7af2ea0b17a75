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

DEFAULT_MAX_NUM_SEQS = {"cpu": 64, "cuda": 1024}
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
        sampling_params: SamplingParams | None = None,
        max_num_seqs: int = 0,
        stop_strings: StopStrings | None = None,
        cache_tokens: int = 0,
        max_sampled_tokens: int = 0,
    ):
        """`limit`: maximum length of a response, including observations.

        `cache_tokens`: capacity of the KV cache; 0: all that the sequences can need, or what fits on the device.
        `max_sampled_tokens`: maximum number of sampled tokens of a multi-turn response; 0: `limit`.
        """
        self.lm, self.limit, self.temperature, self.generator = lm, limit, temperature, generator
        self.sampling_params, self.stop_strings = sampling_params or SamplingParams(), stop_strings
        self.rows = max_num_seqs or DEFAULT_MAX_NUM_SEQS.get(lm.device.type, 64)
        self.cache_tokens, self.max_sampled_tokens = cache_tokens, max_sampled_tokens
        self.version = -1
        self.runner: Callable[..., Any] = PagedRunner if lm.can_share_prompts else EagerRunner
        if lm.can_share_prompts and lm.device.type == "cuda":
            from ascent.inference.runners.cuda_graph import SLOW_RUNNER_NOTE, cuda_graph_runner

            runner, why = cuda_graph_runner(lm)
            self.note = None if runner else SLOW_RUNNER_NOTE.format(why=why)
            self.runner = runner or PagedRunner
        self.packed_model: PackedCpuModel | None = None
        """A faster implementation of the model on a CPU."""
        if lm.can_share_prompts and lm.device.type == "cpu":
            self.packed_model = build_packed_cpu_model(lm)
            if self.packed_model is not None:
                self.runner = partial(PagedRunner, hidden_model=self.packed_model)
        self.timeline = OccupancyTimeline()
        """Occupancy during the generation of training rollouts, until it is drained."""
        self.latest_timeline = OccupancyTimeline()
        """Occupancy during the latest call."""
        self.on_responses: Callable[[list[int], list[list[int]]], None] | None = None
        """Callback for finished responses while others are decoded: problem ids and tokens, to be scored early."""
        self.on_rollouts: Callable[[Rollouts], None] | None = None
        """Callback for the rollouts of a step before they are scored: the learner can start its forward pass."""
        self._transposed: tuple[tuple[int, ...], list[Tensor]] | None = None
        """Versions of the weights that were transposed for decoding on a CPU, and the copies."""

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
        limits = self.length_limits(prompts, samples, limit)
        with self.prepared() as head, self._environment_turns(prompts, samples, seeds, limits, limit) as turns:
            generation = self._generation_state(count, limit, head, seeds, limits, turns)
            generation.on_finished = self._finished_callback([prompts], samples)
            self.runner(self.lm, _token_ids(prompts), samples, self.rows, generation, self.cache_tokens)()
        self.latest_timeline = generation.timeline
        return self._rollouts(prompts, samples, generation)

    def _generation_state(
        self, count: int, limit: int, head: LMHead, seeds: Tensor | None, limits: Tensor, turns: Any = None
    ) -> GenerationState:
        settings = (self.temperature, self.sampling_params, turns, self.stop_strings, limits)
        return GenerationState(count, limit, self.lm.stop_token_ids, head, seeds, *settings)

    def _finished_callback(self, prompts: list[Prompts], samples: int) -> FinishedCallback | None:
        """Return the callback that passes finished responses to `on_responses`, by problem id.

        A multi-turn response is scored at its end, because its reward depends on more than its tokens.
        """
        callback, problems = self.on_responses, [part.problem for part in prompts]
        if callback is None or any(part.start_episodes is not None or part.problem is None for part in prompts):
            return None
        ids = torch.cat([part for part in problems if part is not None]).tolist()
        return lambda responses, tokens: callback([ids[response // samples] for response in responses], tokens)

    def length_limits(self, prompts: Prompts, samples: int, limit: int) -> Tensor:
        """Return the maximum number of sampled tokens of each response."""
        max_tokens = min(limit, self.max_sampled_tokens or limit)
        if prompts.limits is None:
            return torch.full((len(prompts) * samples,), max_tokens)
        return prompts.limits.clamp(max=max_tokens).repeat_interleave(samples)

    # ---- sampling ahead: responses of later steps fill the batch while those of the current step finish

    def iter_finished(self, step: int, deadline: float) -> Iterator[FinishedRollouts]:
        for finished in self._iter_finished(step, deadline):
            if self.on_rollouts is not None and not finished.request.greedy:
                self.on_rollouts(finished.rollouts)
            yield finished

    def _iter_finished(self, step: int, deadline: float) -> Iterator[FinishedRollouts]:
        ahead = any(item.request.step != step or item.unfinished is not None for item in self.pending)
        single_turn = all(item.request.prompts.start_episodes is None for item in self.pending)
        if not (ahead and single_turn and self.lm.can_share_prompts):
            yield from super().iter_finished(step, deadline)
            return
        self._generate_ahead(step)
        current = [item for item in self.pending if item.request.step == step]
        self.pending = tuple(item for item in self.pending if item.request.step != step)
        for item in current:
            indices = torch.arange(len(item.request.prompts))
            yield FinishedRollouts(item.request, indices, self._generate_all(item))

    def _generate_all(self, pending: PendingRollout) -> Rollouts:
        rollouts = super()._generate_all(pending)
        if rollouts is not pending.rollouts:  # generated just now
            self.timeline.merge(self.latest_timeline)
        return rollouts

    @torch.no_grad()
    def _generate_ahead(self, step: int) -> None:
        """Decode until every response of this step is finished; responses of later steps advance meanwhile.

        Their keys and values are recomputed, because the parameters have changed since the last step.
        """
        greedy = tuple(item for item in self.pending if item.request.greedy)
        sampled = [item for item in self.pending if not item.request.greedy]
        if not any(
            item.request.step == step and (item.rollouts is None or item.unfinished is not None) for item in sampled
        ):
            return
        started = [self._with_seeds(item) for item in sorted(sampled, key=lambda item: item.request.step)]
        samples, parts = started[0].request.samples, [_progress(item) for item in started]
        width, counts = max(part["token"].shape[1] for part in parts), [len(part["token"]) for part in parts]
        progress = {name: torch.cat([_pad_progress(name, part[name], width) for part in parts]) for name in parts[0]}
        limits = torch.cat([self.length_limits(item.request.prompts, samples, self.limit) for item in started])
        is_current = torch.tensor([item.request.step == step for item in started])
        required = is_current.repeat_interleave(torch.tensor(counts))
        with self.prepared() as head:
            generation = self._generation_state(len(limits), self.limit, head, progress["seed"], limits)
            generation.resume(progress, progress["unfinished"], required)
            generation.on_finished = self._finished_callback([item.request.prompts for item in started], samples)
            ids = [prompt for item in started for prompt in _token_ids(item.request.prompts)]
            self.runner(self.lm, ids, samples, self.rows, generation, self.cache_tokens)()
        self.timeline.merge(generation.timeline)
        position = torch.arange(self.limit)
        is_new = (position >= progress["length"][:, None]) & (position < generation.lengths[:, None])
        version = F.pad(progress["version"], (0, self.limit - width), value=-1).masked_fill(is_new, self.version)
        unfinished = progress["unfinished"] & ~generation.stopped & (generation.lengths < limits)
        updated, start = [], 0
        for item, count in zip(started, counts, strict=True):
            rows = slice(start, start + count)
            rollouts = self._rollouts(item.request.prompts, samples, generation, rows, version[rows])
            rest = unfinished[rows].view(-1, samples)
            updated.append(replace(item, rollouts=rollouts, unfinished=rest if bool(rest.any()) else None))
            start += count
        self.pending = (*updated, *greedy)

    def _with_seeds(self, pending: PendingRollout) -> PendingRollout:
        """Return the pending rollout with a seed for each response. A new one is all unfinished."""
        if pending.seeds is not None:
            return pending
        request = pending.request
        seeds = response_seeds(len(request.prompts), request.samples, self.generator, request.seed)
        return replace(pending, seeds=seeds, unfinished=torch.ones(seeds.shape, dtype=torch.bool))

    @contextmanager
    def _environment_turns(
        self, prompts: Prompts, samples: int, seeds: Tensor | None, limits: Tensor, limit: int
    ) -> Iterator[EnvironmentTurns | None]:
        """Start the episodes of multi-turn prompts. Greedy responses get the same environment seeds every time."""
        if prompts.start_episodes is None:
            yield None
            return
        episode_seeds = list(range(len(prompts) * samples)) if seeds is None else seeds.tolist()
        with closing(prompts.start_episodes(prompts, samples, episode_seeds)) as episodes:
            yield EnvironmentTurns(episodes, limits, limit)

    @contextmanager
    def prepared(self) -> Iterator[LMHead]:
        """Prepare the model for decoding, and yield its head. On a CPU, weights are laid out for matmuls with few rows.

        `PackedCpuModel` does this for Llama-like models. For others x·Wᵀ with Wᵀ contiguous takes 10 % less time at 64
        rows, and a quarter less at 16; the copies are refreshed when the parameters have changed.
        """
        head = LMHead.of(self.lm.model.eval() if self.lm.model.training else self.lm.model)
        if self.lm.device.type != "cpu":
            yield head
            return
        if self.packed_model is not None:
            yield self.packed_model.refresh(self.version)
            return
        layers = [m for m in self.lm.backbone.modules() if isinstance(m, torch.nn.Linear) and not is_quantized(m)]
        weights = [m.weight for m in layers] + [head.weight]
        versions = (self.version, *(w._version for w in weights))  # torch counts the changes of a tensor in place
        if self._transposed is None or self._transposed[0] != versions:
            buffers = [w.new_empty(w.shape[::-1]) for w in weights] if self._transposed is None else self._transposed[1]
            copies = [buffer.copy_(w.detach().t()) for w, buffer in zip(weights, buffers, strict=True)]
            self._transposed = (versions, copies)
        originals = [m.weight.data for m in layers]
        *copies, head_copy = self._transposed[1]
        try:
            for layer, copy in zip(layers, copies, strict=True):
                layer.weight.data = copy.t()
            yield replace(head, weight=head_copy.t())
        finally:
            for layer, data in zip(layers, originals, strict=True):
                layer.weight.data = data

    def _rollouts(
        self,
        prompts: Prompts,
        samples: int,
        generation: GenerationState,
        rows: slice = slice(None),
        version: Tensor | None = None,
    ) -> Rollouts:
        """Return these rows as rollouts. `version`: policy version of each token; None: `self.version`."""
        length = generation.lengths[rows]
        width, shape = int(length.max()), (len(prompts), samples)
        present, turns = torch.arange(width) < length.view(shape).unsqueeze(-1), generation.turns
        turn_fields = {"mask": present, "present": present} if turns is None else turns.fields(shape, present)

        def by_token(values: Tensor) -> Tensor:
            return values[rows, :width].reshape(*shape, width)

        return Rollouts(
            prompt=prompts.prompt,
            problem=prompts.problem,
            response=by_token(generation.tokens),
            logp_sampler=by_token(generation.logp),
            limit=min(generation.max_tokens, self.max_sampled_tokens or generation.max_tokens),
            limits=prompts.limits,
            truncated=~generation.stopped[rows].view(shape),
            temperature=self.temperature,
            version=torch.full((*shape, 1), self.version) if version is None else version[:, :width].view(*shape, -1),
            kept_mass=None if generation.kept_mass is None else by_token(generation.kept_mass),
            **turn_fields,
        )


def _token_ids(prompts: Prompts) -> list[list[int]]:
    """Return the token ids of each prompt, without padding."""
    return [[token for token in row if token >= 0] for row in prompts.prompt.tolist()]


def _progress(pending: PendingRollout) -> dict[str, Tensor]:
    """Return the tokens and the state of each response so far, one row per response (`GenerationState.resume`)."""
    assert pending.seeds is not None
    count, rollouts = pending.seeds.numel(), pending.rollouts
    unfinished = torch.zeros(count, dtype=torch.bool) if pending.unfinished is None else pending.unfinished.flatten()
    if rollouts is None:
        empty, length, ended = torch.zeros(count, 0), torch.zeros(count).long(), ~unfinished
        by_token = [empty.long(), empty, empty, empty.long()]
    else:
        kept_mass = torch.ones(rollouts.mask.shape) if rollouts.kept_mass is None else rollouts.kept_mass
        fields = (rollouts.response, rollouts.logp_sampler, kept_mass, rollouts.version.expand(rollouts.mask.shape))
        by_token = [field.flatten(0, 1) for field in fields]
        length, ended = rollouts.length.flatten(), ~rollouts.truncated.flatten()
    progress = dict(zip(("token", "logp", "kept_mass", "version"), by_token, strict=True))
    return progress | {"length": length, "ended": ended, "unfinished": unfinished, "seed": pending.seeds.flatten()}


def _pad_progress(name: str, values: Tensor, width: int) -> Tensor:
    padding = {"kept_mass": 1.0, "version": -1}.get(name, 0)
    return values if values.dim() == 1 else F.pad(values, (0, width - values.shape[1]), value=padding)
