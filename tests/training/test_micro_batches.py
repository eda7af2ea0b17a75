"""Micro-batches by memory: every token once, nothing above the budget that can be cut, bytes as foreseen."""

from __future__ import annotations

from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from ascent.build.backend import PreflightReport
from ascent.build.preflight import report_update
from ascent.core.algorithms import ALGORITHMS
from ascent.core.types import Batch
from ascent.models.packed_attention import packed_attention_enabled
from ascent.training import language_learner as learning
from ascent.training import micro_batches as planning
from ascent.training.language_learner import LanguageCritic, LanguageLearner
from ascent.training.micro_batches import (
    CPU_TOKENS,
    MicroBatchPlan,
    activation_bytes_per_token,
    bytes_per_token,
    head_bytes,
    plan_micro_batches,
    repeat_bytes,
    update_operations,
)
from ascent.training.packing import computed_tokens, hidden_states, split_batch
from tests import language
from tests.language import VOCAB, batch_of, gradient_of

model_of = partial(language.model_of, num_hidden_layers=3)


def batch_with(prompts: list[int], responses: list[list[int]], sampled: bool = True) -> Batch:
    """A batch whose prompts and responses have these lengths."""
    width, count = max(max(own) for own in responses), len(responses[0])
    prompt = torch.where(torch.arange(max(prompts)) < torch.tensor(prompts)[:, None], 1, -1)
    mask = torch.arange(width) < torch.tensor(responses).unsqueeze(-1)
    valid = torch.ones(len(prompts), count, dtype=torch.bool)
    ids = torch.arange(mask.numel()).view(mask.shape) % VOCAB
    rest: dict[str, Any] = {"reward": torch.zeros(*valid.shape, 1), "valid": valid, "sampled": sampled}
    return Batch(prompt, ids, mask, torch.zeros(mask.shape), width, ~valid, **rest)


@st.composite
def lengths(draw: Any, longest: int = 8192) -> tuple[list[int], list[list[int]]]:
    """Prompts and responses of any mixture of lengths, short ones and those at the limit among them."""
    groups, samples = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    some = st.integers(1, 12) | st.integers(1, longest) | st.just(longest)
    prompts = draw(st.lists(st.integers(1, 12) | st.integers(1, longest), min_size=groups, max_size=groups))
    return prompts, [draw(st.lists(some, min_size=samples, max_size=samples)) for _ in range(groups)]


def cost(part: Batch, shared: bool, repeat: float, padded: bool) -> float:
    """What a part takes, in tokens, worked out from its lengths alone."""
    prompts, responses = (part.prompt >= 0).sum(-1).tolist(), part.present.sum(-1).tolist()
    if not shared:
        widest = max(p + n for p, own in zip(prompts, responses, strict=True) for n in own)
        return widest * sum(map(len, responses))
    own = [len(n) * max(n) if padded else sum(n) for n in responses]
    return sum(p + len(n) * repeat * p + m for p, n, m in zip(prompts, responses, own, strict=True))


@pytest.mark.long
@settings(max_examples=80, deadline=None)
@given(lengths(48), st.integers(1, 600), st.booleans(), st.sampled_from([0.0, 0.1, 2.0]), st.booleans())
def test_micro_batches_exceed_the_budget_only_with_one_response(
    shapes: tuple[list[int], list[list[int]]], budget: int, shared: bool, repeat: float, padded: bool
) -> None:
    """Whatever the mixture of lengths; and every response is in one part, in order."""
    batch = batch_with(*shapes)
    batch = batch.add(prompt_index=torch.arange(len(batch.prompt)))
    parts = list(split_batch(batch, budget, shared, repeat, padded))
    seen = [tuple(n) for part in parts for n in part.response[part.mask].split(part.length.flatten().tolist())]
    every = [tuple(n) for n in batch.response[batch.mask].split(batch.length.flatten().tolist())]
    assert [[int(i) for i in n] for n in seen] == [[int(i) for i in n] for n in every]
    for part in parts:
        assert part.mask.shape[1] == 1 == len(part.prompt) or cost(part, shared, repeat, padded) <= budget + 1e-6


@pytest.mark.parametrize("shared", [True, False])
def test_preference_pairs_are_never_split(shared: bool) -> None:
    pairs = batch_with([3, 4], [[50, 60], [5, 6]], sampled=False)
    assert [part.mask.shape[:2] for part in split_batch(pairs, 20, shared)] == [(1, 2), (1, 2)]


# ---- the bytes that are foreseen ------------------------------------------------------------------------------


@cache
def one_model(kind: str) -> Any:
    return model_of(kind, dtype=torch.float32, max_position_embeddings=512)


def kept_by(lm: Any, batch: Batch) -> int:
    """What autograd keeps of a forward pass over a batch, counted here."""
    mine = {p.untyped_storage().data_ptr() for p in lm.model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with (
        packed_attention_enabled(lm.model, lm.can_share_prompts),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x),
    ):
        hidden_states(lm, batch)
    return sum(t.untyped_storage().nbytes() for where, t in kept.items() if where not in mine)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["Llama", "GPT2", "Gemma3Text", "Bloom"])
def test_saved_activations_do_not_exceed_the_estimate(kind: str) -> None:
    """By the measured bytes of a token, with repeated prompts and padded groups; masks of attention are n² beside."""
    lm = one_model(kind)
    measured = max(activation_bytes_per_token(lm), 3 * planning._layer_bytes(lm))
    repeat = repeat_bytes(lm, flash=False) / measured
    for prompts, responses in (([9, 30], [[5, 60, 9], [44, 2, 1]]), ([100], [[3] * 6]), ([4], [[200, 10]])):
        batch = batch_with(prompts, responses)
        masks = 8 * sum(max(own) * (max(own) + p) for p, own in zip(prompts, responses, strict=True))
        assert kept_by(lm, batch) <= 1.02 * measured * cost(batch, True, repeat, True) + masks


def test_measuring_frees_its_memory() -> None:
    """Passes that hold what they have made are never freed, and with them parameters that a sampler has moved since."""
    lm = one_model("Llama")
    places = [p.untyped_storage()._cdata for p in lm.model.parameters()]
    before = [torch._C._storage_Use_Count(index) for index in places]  # type: ignore[attr-defined]
    planning._saved_bytes(lm, 8)
    assert [torch._C._storage_Use_Count(index) for index in places] == before  # type: ignore[attr-defined]


def test_layers_share_the_attention_mask() -> None:
    """Its size is the square of a length: one for each layer would soon be more than all else."""
    lm, masks = one_model("Llama"), set()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[-2:] == (43, 54):
            masks.add(tensor.untyped_storage().data_ptr())
        return tensor

    with packed_attention_enabled(lm.model), torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        hidden = hidden_states(lm, batch_with([11], [[44, 20]]))
    assert len(masks) == 1 and len(hidden) == 64


def test_cpu_has_a_fixed_token_budget() -> None:
    assert plan_micro_batches(one_model("Llama"), False) == MicroBatchPlan(CPU_TOKENS)


def test_gpu_token_budget_follows_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: 0.6 of what is left beside state and head, over the bytes of a token, of which one layer works."""
    lm = model_of(dtype=torch.float32)
    layer, repeated = 4 * (11 * 32 + 4 * 48), 3 * 2 * 4 * 8 * 4
    assert repeat_bytes(lm, flash=False) == repeated
    assert repeat_bytes(lm, flash=True) == 2 * 8 * (5 * 4 + 4) + 4 * 4 * 8 * 4 + 24
    monkeypatch.setattr(planning, "activation_bytes_per_token", lambda _: 3 * layer)
    monkeypatch.setattr(type(lm), "device", torch.device("cuda"))
    monkeypatch.setattr(planning, "varlen_kernel", lambda _: None)
    assert bytes_per_token(lm, False) == 4 * layer and bytes_per_token(lm, True) == 2 * layer + 3 * 4 * 32
    state = 18 * sum(p.numel() for p in lm.model.parameters()) + head_bytes(lm)
    card = type("Card", (), {"total_memory": state + 100 * 4 * layer})()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    again = int(60 * 4 * layer / bytes_per_token(lm, True))
    assert plan_micro_batches(lm, False) == MicroBatchPlan(60, repeated / (4 * layer), True, again)
    assert plan_micro_batches(lm, True) == MicroBatchPlan(again, repeated / bytes_per_token(lm, True), True, 0)
    assert plan_micro_batches(lm, False, reference=True).tokens < 60
    assert plan_micro_batches(lm, False, critic=LanguageCritic(lm, shared=False)).tokens < 60
    monkeypatch.setattr(planning, "activation_bytes_per_token", lambda _: 6 * layer)
    assert plan_micro_batches(lm, False).tokens == 60 * 4 // 8, "what was measured counts"


@pytest.mark.long
def test_response_over_budget_uses_activation_checkpointing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient is the same; parts that fit keep what they computed."""
    lm, algorithm = model_of(), ALGORITHMS["dr-grpo"]
    batch = batch_of(lm, limit=24)
    batch = batch.add(advantage=batch.reward, weight=torch.where(batch.mask, 1.0, 0.0).double())
    learner = LanguageLearner(lm, algorithm.update, False, algorithm.outputs)
    learner.gradient(batch, algorithm.objective)
    want, calls = gradient_of(learner), []
    monkeypatch.setattr(learning, "checkpoint", lambda f, *a, **more: calls.append(1) or f(*a, **_plain(more)))
    learner._memory_plan = MicroBatchPlan(20, checkpointed_tokens=1000)
    tight = [computed_tokens(part, True) > 20 for part in learner.split(batch)]
    assert any(tight) and not all(tight)
    learner.gradient(batch, algorithm.objective)
    assert len(calls) == 3 * sum(tight)
    assert (gradient_of(learner) - want).abs().max() < 1e-10


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (MicroBatchPlan(1000), ["in about 1 micro-batch of up to 1,000 tokens"]),
        (MicroBatchPlan(500), ["in about 2 micro-batches of up to 500 tokens"]),
        (
            MicroBatchPlan(100, checkpointed_tokens=400),
            ["in about 10 micro-batches", "more than 100 tokens, its prompt counted"],
        ),
        (
            MicroBatchPlan(100, checkpointed_tokens=150),
            ["takes 160 tokens in training, and about 150 fit: lower --max-tokens"],
        ),
    ],
)
def test_preflight_reports_micro_batches(plan: MicroBatchPlan, words: list[str]) -> None:
    """At the limits: 2 prompts of 60 tokens with 4 responses of 100, which are 460 tokens each."""
    task, lm, report = SimpleNamespace(max_prompt=60, max_response_tokens=100), one_model("Llama"), PreflightReport()
    config: Any = SimpleNamespace(task=task, prompts=2, samples=4, minibatches=1)
    report_update(config, SimpleNamespace(plan=plan, unsharded_lm=lm), report)  # type: ignore[arg-type]
    for each in words:
        assert each in report.text()


def _plain(more: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in more.items() if k not in ("use_reentrant", "preserve_rng_state")}


# ---- the operations -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Llama", "Qwen2"])
def test_operation_count_matches_torch(kind: str) -> None:
    """Of the products, in a plain forward pass: a third of blocks and a quarter of the head; attention by hand."""
    lm = one_model(kind)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        lm.model(torch.arange(20)[None] % VOCAB)
    products = sum(n for op, n in counter.get_flop_counts()["Global"].items() if "mm" in str(op))
    every, attention = update_operations(lm, [8], [[12]])
    pairs = 8 * 9 // 2 + 12 * 8 + 12 * 13 // 2
    assert attention == 12 * 3 * 4 * 8 * pairs
    head = lm.model.get_output_embeddings().weight.numel()
    small = sum(p.numel() for name, p in lm.backbone.named_parameters() if p.dim() < 2)  # norms and biases
    assert (every - attention - 8 * head * 12 - 6 * small * 20) // 3 + 2 * head * 20 == products


def test_shared_prompt_is_computed_once() -> None:
    lm = one_model("Llama")
    every, attention = update_operations(lm, [10], [[5, 5]])
    lm.can_share_prompts = False
    try:
        plain = update_operations(lm, [10], [[5, 5]])
    finally:
        lm.can_share_prompts = True
    assert plain[1] - attention == 12 * 3 * 4 * 8 * 55 and plain[0] > every
