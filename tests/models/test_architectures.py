"""Every architecture that is tried: the engines compute its own log-probs, or it is refused in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from ascent.build.language_reward_model import LanguageRewardModel, add_head
from ascent.build.model_verification import verify_model
from ascent.core.algorithms import ALGORITHMS
from ascent.core.errors import ConfigError
from ascent.core.types import Batch, Prompts, Rollouts
from ascent.core.update import Adam
from ascent.models import CausalLM, LanguageModel
from ascent.settings import configure
from ascent.training.language_learner import LanguageCritic, LanguageLearner
from ascent.training.micro_batches import bytes_per_token
from tests.language import ARCHITECTURES, VOCAB, model_of, rewarded, sampler_of, tiny_tokenizer, write_tiny


def batch_of(lengths: tuple[tuple[int, ...], ...] = ((3, 5), (4, 2)), prompt: int = 4) -> Batch:
    """Groups of random tokens, the prompt of the second one shorter, ready for REINFORCE."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCAB, (len(lengths), prompt), generator=generator)
    ids[1:, -2:] = -1
    mask = torch.arange(max(max(row) for row in lengths)) < torch.tensor(lengths).unsqueeze(-1)
    response = torch.randint(VOCAB, mask.shape, generator=generator)
    empty = torch.zeros(mask.shape)
    batch = rewarded(Rollouts(ids, response, mask, empty, mask.shape[2], torch.zeros(mask.shape[:2], dtype=torch.bool)))
    batch = batch.add(reward=batch.reward.float())
    row = ALGORITHMS["reinforce"]
    batch, _ = row.compute_advantages(batch, row.initial_state())
    return batch.add(weight=row.weights(batch))


def own_log_probs(lm: LanguageModel, batch: Batch) -> Tensor:
    """The model's own, one sequence at a time, where the mask is True."""
    found = []
    for prompt, responses, masks in zip(batch.prompt, batch.response, batch.mask, strict=True):
        prompt = prompt[prompt >= 0]
        for response, mask in zip(responses, masks, strict=True):
            ids = torch.cat([prompt, response[mask]])
            logp = torch.log_softmax(lm.model(ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1], -1)
            found.append(logp.gather(-1, response[mask][:, None])[:, 0])
    return torch.cat(found)


def learner_of(lm: LanguageModel, checkpointing: bool = False, critic: LanguageCritic | None = None) -> LanguageLearner:
    return LanguageLearner(lm, Adam(), False, frozenset(), 0, checkpointing, critic, Adam(lr=1e-9))


# ---- dropout ---------------------------------------------------------------------------------------


FAST = ("Llama", "GPT2", "OPT")
OTHERS = ("Qwen3_5", "Llama4Text", "Gemma3Text", "GptOss", "Mixtral", "Mistral", "Phi3", "Cohere2", "Falcon", "Bloom")
"""One of each kind: linear attention, chunks, windows, sinks, experts, fused matrices, parallel layers, biases."""
EVERY = [
    pytest.param(kind, marks=[] if kind in FAST else pytest.mark.long if kind in OTHERS else pytest.mark.smoke)
    for kind in ARCHITECTURES
]


@pytest.mark.parametrize("kind", EVERY)
def test_dropout_is_off_in_policy_and_critic_with_and_without_checkpointing(kind: str) -> None:
    """With every rate of dropout in the config at a half."""
    lm, batch, row = model_of(kind, dtype=torch.float32, dropout=0.5), batch_of(), ALGORITHMS["reinforce"]
    with torch.no_grad():
        own = own_log_probs(lm, batch)
    verify_model(lm, 12, sampled=False)
    critic = LanguageCritic(lm, shared=False)
    torch.nn.init.ones_(critic.head.weight)
    values: list[Tensor] = []
    for checkpointing in (False, True):
        learner = learner_of(lm, checkpointing, critic)
        learner.gradient(batch, row.objective)
        assert (learner._logp[0][batch.mask] - own).abs().max() < 1e-4
        learner.fit_critic(batch, lambda _, value: values.append(value.detach()) or value.sum() * 0)  # type: ignore[func-returns-value]
    assert (values[0] - values[1]).abs().max() < 1e-4
    assert (values[0] - learner.score(batch, frozenset({"value"}))["value"]).abs().max() < 1e-4


def test_checkpointing_computes_the_layers_again() -> None:
    lm, batch, calls = model_of(), batch_of(), []
    for layer in lm.backbone.layers:
        layer.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    learner_of(lm).gradient(batch, ALGORITHMS["reinforce"].objective)
    once = len(calls)
    learner_of(lm, checkpointing=True).gradient(batch, ALGORITHMS["reinforce"].objective)
    assert (once, len(calls)) == (2, 2 + 4)


def test_dropout_of_adapters_is_off() -> None:
    from peft import LoraConfig, get_peft_model

    lm, batch = model_of(dtype=torch.float32), batch_of()
    own = own_log_probs(lm, batch)
    get_peft_model(lm.model, LoraConfig(r=4, lora_dropout=0.5, target_modules="all-linear", init_lora_weights=False))
    lm = LanguageModel(lm.model, lm.tokenizer)
    learner, found = learner_of(lm, checkpointing=True), []
    for _ in range(2):
        learner.gradient(batch, ALGORITHMS["reinforce"].objective)
        found.append(learner._logp[0])
    assert torch.equal(*found)
    assert (found[0][batch.mask] - own).abs().max() > 0.1


# ---- windows, chunks, and configs of several parts ---------------------------------------------------


@pytest.mark.parametrize("kind", sorted(ARCHITECTURES.keys() - {"Mixtral", "GptOss", "Qwen3_5"}))
def test_a_model_in_float64_is_the_one_in_float32(kind: str) -> None:
    """Tests compare the two: norms that take the place of transformers' own are these. Three kinds have no float64."""
    ids = torch.arange(12)[None] % VOCAB
    single, double = (model_of(kind, dtype=dtype).model(ids).logits for dtype in (torch.float32, torch.float64))
    assert (single - double).abs().max() < 1e-4 * double.abs().max()


@pytest.mark.parametrize("kind", EVERY)
def test_log_probs_are_the_models_own_past_every_window(kind: str) -> None:
    """Of the learner and of the sampler, for prompts of 14 and 12 tokens; windows and chunks have 16."""
    lm, batch = model_of(kind, dtype=torch.float32), batch_of(((9, 2), (1, 8)), prompt=14)
    verify_model(lm, 14 + 9)
    scored = learner_of(lm).score(batch, frozenset({"logp_old"}))["logp_old"]
    drawn = rewarded(sampler_of(lm, limit=9, rows=3).generate(Prompts.of(batch.prompt), 2))
    with torch.no_grad():
        assert (scored[batch.mask] - own_log_probs(lm, batch)).abs().max() < 1e-3
        assert (drawn.logp_sampler[drawn.mask] - own_log_probs(lm, drawn)).abs().max() < 1e-3
    assert int(drawn.mask.sum(-1).max()) > 2


@pytest.mark.parametrize("kind", ["Gemma3", "Gemma3Text", "Llama4Text"])
def test_the_window_of_a_text_config_and_a_chunk_are_seen(kind: str) -> None:
    lm = model_of(kind, dtype=torch.float32)
    assert verify_model(lm, 16) is None
    assert "sees 16 tokens, and there may be 17" in str(verify_model(lm, 17))


def test_a_reward_model_rates_texts_longer_than_its_own_training_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trained on texts that fit its window, it shares prompts, until a text is longer."""
    lm = add_head(model_of("Mistral", dtype=torch.float32))
    torch.nn.init.ones_(lm.model.rating.weight)
    verify_model(lm, 12, sampled=False)
    config = configure("countdown", {"model": "tiny", "max_prompt": 8, "max_tokens": 4})
    model, prompt = LanguageRewardModel(lm, config, 8), list(range(4, 30))
    monkeypatch.setattr(lm, "encode", lambda _: prompt)
    assert lm.can_share_prompts
    score = model(model._rollouts([[]], [[5, 6, 7]]))
    own = lm.backbone(input_ids=torch.tensor([[*prompt, 5, 6, 7]])).last_hidden_state[0, -1].sum().detach()
    assert abs(float(score) - float(own)) < 1e-3
    assert not lm.can_share_prompts


@pytest.mark.parametrize("more", [{}, {"use_sliding_window": True, "max_window_layers": 3}])
def test_a_window_that_no_layer_has_is_none(more: dict[str, Any]) -> None:
    assert verify_model(model_of("Qwen2", sliding_window=16, **more), 40) is None


def test_a_model_of_several_parts_is_measured_by_its_text_part() -> None:
    """Preflight reads its positions and its memory; parts that read no text are not trained."""
    lm = model_of("Gemma3", dtype=torch.float32)
    assert lm.max_positions == 128
    assert bytes_per_token(lm, checkpointing=False) == 4 * 4 * (11 * 32 + 4 * 48)


@pytest.mark.smoke
def test_a_model_of_several_parts_is_trained(tmp_path: Path) -> None:
    import ascent

    folder = write_tiny(tmp_path / "model", kind="Gemma3")
    settings = {"steps": 2, "prompts": 2, "samples": 3, "max_tokens": 8, "eval_prompts": 2, "reward_workers": 1}
    for number, more in enumerate(({}, {"policy.lora": 2}, {"policy.last_layers": 1, "policy.checkpointing": True})):
        run = ascent.train("countdown", out=tmp_path / str(number), model=str(folder), show=False, **settings, **more)
        assert run.status == "finished"
        assert max(line["sampling/sampling_logp_difference/mean"] for line in run.metrics) < 1e-4
        params = load_file(sorted((tmp_path / str(number) / "checkpoints").iterdir())[-1] / "params.safetensors")
        assert params and not any("vision" in name for name in params)


# ---- positions that depend on the length -------------------------------------------------------------

LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
CHANGING: dict[str, dict[str, Any]] = {
    "Phi3": {
        "original_max_position_embeddings": 16,
        "rope_parameters": LONG | {"original_max_position_embeddings": 16},
    },
    "Llama": {"max_position_embeddings": 16, "rope_parameters": {"rope_type": "dynamic", "factor": 4.0}},
}


@pytest.mark.parametrize("kind", CHANGING)
def test_positions_that_depend_on_the_length_are_refused_past_their_length(kind: str) -> None:
    lm = model_of(kind, **CHANGING[kind])
    assert verify_model(lm, 16) is None
    with pytest.raises(ConfigError, match=r"angles in texts of more than 16 tokens.*--max-tokens to 16 together"):
        verify_model(lm, 17)


def test_positions_that_do_not_depend_on_the_length_are_not_refused() -> None:
    scaled = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    assert verify_model(model_of(rope_parameters=scaled | {"original_max_position_embeddings": 16}), 40) is None


def test_a_model_that_looks_ahead_is_refused() -> None:
    with pytest.raises(ConfigError, match="depends on later tokens"):
        verify_model(model_of("Bert", dtype=torch.float32, is_decoder=False))


# ---- adapters ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("targets", "tied", "why"),
    [
        ("lm_head", False, "the LM head gets no adapter"),
        ("q_proj,lm_head", False, "lora-targets lm_head: the LM head gets no adapter"),
        ("lm_head", True, "the LM head gets no adapter"),
        ("embed_tokens", True, "this model ties it to the embedding"),
        ("q_proj,nonsense", False, "lora-targets nonsense: the model has no module of this name"),
        ("q_proj,", False, "no module of this name"),
        ("", False, "no module of this name"),
        ("self_attn", False, "not supported"),
    ],
)
def test_adapters_on_the_head_or_on_nothing_are_refused(targets: str, tied: bool, why: str, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, tie_word_embeddings=tied)
    with pytest.raises(ConfigError, match=why):
        CausalLM(str(folder), device="cpu", lora=4, lora_targets=targets).load()


@pytest.mark.parametrize(("targets", "count"), [("q_proj, v_proj", 4), ("embed_tokens", 1), ("all-linear", 14)])
def test_every_adapter_is_trained(targets: str, count: int, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, tie_word_embeddings=False)
    lm, row = CausalLM(str(folder), device="cpu", lora=4, lora_targets=targets).load(), ALGORITHMS["reinforce"]
    verify_model(lm, 12)
    learner_of(lm).step(batch_of(), row.objective, Adam(lr=1e-2))
    moved = [name for name, p in lm.trained().items() if "_B" in name and bool((p != 0).any())]
    assert len(moved) == len(lm.trained()) / 2 == count


# ---- prompts without a template ----------------------------------------------------------------------


def test_a_prompt_does_not_end_in_the_end_token_that_a_tokenizer_appends() -> None:
    from tokenizers.processors import TemplateProcessing

    lm = model_of()
    lm.tokenizer = tiny_tokenizer()
    lm.tokenizer.chat_template = None
    start, end = lm.tokenizer.bos_token_id, lm.tokenizer.eos_token_id
    lm.stop_token_ids = frozenset({end})
    plain = lm.tokenize("2+2=")
    special = [(lm.tokenizer.bos_token, start), (lm.tokenizer.eos_token, end)]
    single = f"{lm.tokenizer.bos_token} $A {lm.tokenizer.eos_token}"
    lm.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=special)
    assert lm.tokenizer("2+2=")["input_ids"] == [start, *plain, end]
    assert lm.encode([{"role": "user", "content": "2+2="}]) == [start, *plain]
    written = f"2+2={lm.tokenizer.eos_token}"  # one that the text itself ends in stays
    assert lm.encode([{"role": "user", "content": written}]) == [start, *plain, end]
