"""The CUDA graph runner generates the same responses as the other runners, from static buffers and merged weights.

On a CPU it runs without graphs, and with the reference operators instead of Triton kernels. The kernels are compared
with the reference operators on a GPU, or by Triton's interpreter: TRITON_INTERPRET=1 (numpy below 2.4).
"""

from __future__ import annotations

import importlib.util
import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ascent.core.algorithms import ALGORITHMS
from ascent.core.sampling_params import SamplingParams
from ascent.core.types import Prompts, Rollouts
from ascent.inference.runners import cuda_graph, decode_loop
from ascent.inference.runners.cuda_graph import CudaGraphRunner, cuda_graph_runner
from ascent.inference.runners.eager import EagerRunner
from ascent.inference.runners.paged import PagedRunner
from ascent.models import LanguageModel, decoder_model
from ascent.models.decoder_model import DecoderModel, UnsupportedArchitectureError
from ascent.ops import decode_ops, decode_state
from ascent.ops.decode_ops import AttentionParams, NormParams
from ascent.ops.decode_state import BLOCK_SIZE, FINISHED_LENGTH, FORCED_LENGTH, LAST_TOKEN, RESPONSE_LENGTH, DecodeState
from ascent.ops.token_sampling import sample_tokens, uniform_from_seed
from ascent.training.language_learner import LanguageLearner
from tests.cases import mostly_smokes
from tests.language import batch_of, model_of, prompts_of, sampler_of

LLAMA_LIKE = ("Llama", "Qwen2", "Qwen3", "Mistral")


def decoder_of(lm: LanguageModel) -> CudaGraphRunner:
    decoder, why = cuda_graph_runner(lm)
    assert decoder is not None, why
    return decoder


def drawn_by(decoder: Any, lm: LanguageModel, samples: int = 4, greedy: bool = False, **more: Any) -> Rollouts:
    sampler = sampler_of(lm, **more)
    sampler.runner = decoder
    return sampler.generate(Prompts.of(prompts_of()), samples, greedy)


def same(got: Rollouts, want: Rollouts, bound: float = 5e-6) -> None:
    assert torch.equal(got.mask, want.mask)
    assert torch.equal(got.response, want.response)
    assert torch.equal(got.truncated, want.truncated)
    assert (got.logp_sampler - want.logp_sampler).abs().max() < bound
    assert (got.kept_mass is None) == (want.kept_mass is None)
    if got.kept_mass is not None and want.kept_mass is not None:
        assert (got.kept_mass - want.kept_mass)[got.mask].abs().max() < bound


# ---- the whole runner ----------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("kind", LLAMA_LIKE)
@pytest.mark.parametrize("other", [PagedRunner, EagerRunner])
def test_it_samples_the_same_tokens_as_the_other_runners(kind: str, other: Any) -> None:
    lm = model_of(kind)
    same(drawn_by(decoder_of(lm), lm, rows=5), drawn_by(other, lm, rows=5))


def test_biases_and_an_untied_head() -> None:
    lm = model_of("Llama", attention_bias=True, mlp_bias=True, tie_word_embeddings=False)
    with torch.no_grad():
        for name, p in lm.model.named_parameters():
            if name.endswith("bias"):
                p.copy_(torch.linspace(-0.3, 0.3, len(p)))
    same(drawn_by(decoder_of(lm), lm), drawn_by(PagedRunner, lm))


@pytest.mark.long
@pytest.mark.parametrize(
    ("rows", "steps"),
    mostly_smokes(
        itertools.product([1, 2, 3, 5, 12, 64], [1, 3, 8]),
        *((1, 8), (2, 1), (3, 3), (3, 8), (5, 1), (5, 8), (12, 3), (64, 8)),
    ),
)
def test_batch_size_and_steps_per_launch_do_not_change_a_response(
    rows: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batch indices are reused at different steps; every response is the same as if it were generated alone."""
    lm = model_of()
    want = drawn_by(PagedRunner, lm, rows=64)
    assert len(want.mask.sum(-1).unique()) > 3, "lengths have to differ for batch indices to be reused"
    monkeypatch.setattr(decode_loop, "STEPS_PER_LAUNCH", steps)
    same(drawn_by(decoder_of(lm), lm, rows=rows), want)


@pytest.mark.long
@pytest.mark.parametrize("cut", [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2}, {"temperature": 0.6}, {"greedy": True}])
def test_every_sampling_parameter(cut: dict[str, Any]) -> None:
    lm = model_of()
    same(drawn_by(decoder_of(lm), lm, **cut), drawn_by(PagedRunner, lm, **cut))


@pytest.mark.long
def test_one_runner_serves_calls_of_any_size() -> None:
    """Longer, shorter, with other stop tokens and temperatures: buffers grow, and no state of a call is left."""
    lm = model_of()
    decoder = decoder_of(lm)
    ends = lm.stop_token_ids
    for more in ({"limit": 3}, {"limit": 20, "rows": 3}, {"limit": 9, "temperature": 0.5}, {"limit": 4, "top_k": 2}):
        same(drawn_by(decoder, lm, **more), drawn_by(PagedRunner, lm, **more))
        lm.stop_token_ids = frozenset({7, 8}) if lm.stop_token_ids == ends else ends
    assert cuda_graph_runner(lm)[0] is decoder


def test_prompts_of_one_token() -> None:
    lm = model_of()
    found = []
    for decoder in (decoder_of(lm), PagedRunner):
        sampler = sampler_of(lm)
        sampler.runner = decoder
        found.append(sampler.generate(Prompts.of(torch.tensor([[4, -1, -1], [1, 2, 3], [9, -1, -1]])), 3))
    same(*found)


def test_log_probs_agree_with_a_training_forward() -> None:
    lm = model_of("Qwen3")
    rollouts = drawn_by(decoder_of(lm), lm)
    algorithm, batch = ALGORITHMS["reinforce"], batch_of(lm)
    learner = LanguageLearner(lm, algorithm.update, False, algorithm.outputs)
    scored = learner.score(batch, frozenset({"logp_old"}))["logp_old"]
    assert torch.equal(batch.response, rollouts.response)
    assert (scored - rollouts.logp_sampler).abs().max() < 5e-6


# ---- which architectures --------------------------------------------------------------------------


def model_with_random_norms(kind: str, **more: Any) -> Any:
    """A model in float32 whose norms have weights that differ."""
    lm = model_of(kind, dtype=torch.float32, **more)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, p in lm.model.named_parameters():
            if "norm" in name:
                p.add_(torch.randn(p.shape, generator=generator) * 0.3)
    return lm


SLIDING_WINDOW = {"sliding_window": 64}
"""A window that is longer than these texts."""
ONE_KV_HEAD = {"num_key_value_heads": 1, "head_dim": 16, "num_attention_heads": 2}


KINDS = [
    ("Phi3", {}),
    ("Olmo2", {}),
    ("Gemma", {}),
    ("Gemma", ONE_KV_HEAD),
    ("Gemma3Text", SLIDING_WINDOW),
    ("Gemma3", {}),
    ("Qwen3", SLIDING_WINDOW),
]


@pytest.mark.parametrize(("kind", "more"), KINDS, ids=str)
def test_more_architectures_sample_the_same_tokens_as_the_model_itself(kind: str, more: dict[str, Any]) -> None:
    """And the log-probs equal those of its forward pass on one unpadded sequence at a time."""
    lm = model_with_random_norms(kind, **more)
    rollouts = drawn_by(decoder_of(lm), lm, rows=5)
    same(rollouts, drawn_by(EagerRunner, lm, rows=5), 1e-4)
    for prompt, responses, masks, logps in zip(
        rollouts.prompt, rollouts.response, rollouts.mask, rollouts.logp_sampler, strict=True
    ):
        known = prompt[prompt >= 0]
        ids = torch.cat([known, responses[0][masks[0]]])
        with torch.no_grad():
            logp = torch.log_softmax(lm.model(ids[None], use_cache=False).logits[0, len(known) - 1 : -1], -1)
        assert (logp.gather(-1, responses[0][masks[0]][:, None])[:, 0] - logps[0][masks[0]]).abs().max() < 1e-4


def test_the_rounding_of_a_norm_is_that_of_its_kind() -> None:
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

    x, weight = torch.randn(2, 64, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    for kind, add in ((LlamaRMSNorm, None), (Olmo2RMSNorm, 0.0), (GemmaRMSNorm, 1.0)):
        module: Any = kind(32, 1e-5).bfloat16()
        with torch.no_grad():
            module.weight.copy_(weight[0])
            norm = decoder_model._norm_params(module)
            assert norm.weight_offset == add and norm.eps == 1e-5
            assert torch.equal(decode_ops.add_rms_norm(x, None, *norm)[1], module(x))


@pytest.mark.parametrize(
    ("kind", "more", "why"),
    [
        ("Phi3", {"partial_rotary_factor": 0.5}, "partial rotary embedding"),
        ("Olmo", {}, "norms have a bias, or no weight"),
        ("Cohere", {}, "scaled or capped"),
        ("Llama", {"hidden_act": "gelu"}, "neither SiLU nor GELU"),
        ("Gemma2", {}, "scaled or capped"),
        ("Granite", {"residual_multiplier": 0.3}, "relative error"),
        ("SmolLM3", {"num_hidden_layers": 4}, "relative error"),
        ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic"),
    ],
)
def test_unsupported_architectures_are_detected(kind: str, more: dict[str, Any], why: str) -> None:
    decoder, found = cuda_graph_runner(model_of(kind, **more))
    assert decoder is None
    assert why in str(found)


def test_unsupported_quantization_is_detected() -> None:
    lm = model_of()
    layer = lm.model.get_decoder().layers[1].mlp
    layer.up_proj = type("Quantized", (torch.nn.Linear,), {})(32, 48, bias=False).double()
    assert "its matrices are quantized in another way than by --policy.bits" in str(cuda_graph_runner(lm)[1])


# ---- merged weights share memory with the model -----------------------------------------------------------


def test_an_optimizer_step_changes_the_merged_weights() -> None:
    """The parameters are the same objects at other addresses; nothing is copied when they change."""
    lm = model_of("Qwen2")
    before = {name: p.detach().clone() for name, p in lm.model.named_parameters()}
    objects = {name: id(p) for name, p in lm.model.named_parameters()}
    optimizer = torch.optim.SGD(lm.model.parameters(), lr=0.1)
    net = DecoderModel.of(lm.model)
    assert {name: id(p) for name, p in lm.model.named_parameters()} == objects
    for name, p in lm.model.state_dict().items():
        assert torch.equal(p, before.get(name, p))
    attention = lm.model.get_decoder().layers[0].self_attn
    assert net.layers[0].qkv[0].data_ptr() == attention.q_proj.weight.data_ptr()
    lm.model(torch.tensor([[1, 2, 3]])).logits.sin().sum().backward()
    optimizer.step()
    assert not torch.equal(attention.v_proj.weight, before["model.layers.0.self_attn.v_proj.weight"])
    parts = [attention.q_proj, attention.k_proj, attention.v_proj]
    assert torch.equal(net.layers[0].qkv[0], torch.cat([m.weight for m in parts]))
    assert torch.equal(net.layers[0].qkv[1], torch.cat([m.bias for m in parts]))  # type: ignore[arg-type]
    again = DecoderModel.of(lm.model)
    assert again.addresses() == net.addresses()
    attention.k_proj.weight.data = attention.k_proj.weight.data.clone()
    assert DecoderModel.of(lm.model).addresses() != net.addresses()


def test_a_model_with_merged_weights_is_saved_and_loaded(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    lm = model_of("Qwen2")
    want = {name: p.detach().clone() for name, p in lm.model.named_parameters()}
    DecoderModel.of(lm.model)
    lm.model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert all(torch.equal(p, want[name]) for name, p in loaded.named_parameters())
    save_file({name: p.detach().contiguous() for name, p in lm.trained().items()}, tmp_path / "params.safetensors")
    assert all(torch.equal(p, want[name]) for name, p in load_file(tmp_path / "params.safetensors").items())


def test_linear_layers_with_and_without_bias_are_not_merged() -> None:
    lm = model_of()
    attention = lm.model.get_decoder().layers[0].self_attn
    attention.q_proj.bias = torch.nn.Parameter(torch.zeros(32, dtype=torch.float64))
    with pytest.raises(UnsupportedArchitectureError, match="bias"):
        DecoderModel.of(lm.model)


# ---- the reference operators ---------------------------------------------------------------------------------


def filled_state(dtype: torch.dtype = torch.float64, device: str = "cpu", head_dim: int = 16) -> DecodeState:
    """Return the state of six sequences of various lengths, with prompts of 0, 70 and 33 keys on scattered blocks.

    The last sequence has finished.
    """
    state = DecodeState.allocate(1, 2, head_dim, 6, 40, 4, 100, torch.zeros((), dtype=dtype, device=device))
    generator = torch.Generator().manual_seed(1)
    for cache in state.cache.layers[0]:
        cache.copy_(torch.randn(cache.shape, generator=generator, dtype=torch.float64))
    known, length = [0, 70, 33, 0, 70, 33], [0, 0, 5, 64, 99, 70]
    state.state[:, :6] = torch.tensor([known, length, [1] * 6, [11, 22, 33, 44, 55, 2**61], [0] * 5 + [71], [0] * 6])
    pages = torch.randperm(40, generator=generator).tolist()
    prompts = {keys: [pages.pop() for _ in range(-(-keys // BLOCK_SIZE))] for keys in (0, 70, 33)}
    for batch_index in range(6):
        own = [pages.pop() for _ in range(length[batch_index] // BLOCK_SIZE + 1)]
        table = [*prompts[known[batch_index]], *own]
        state.block_tables[batch_index, : len(table)] = torch.tensor(table, dtype=torch.int32)
    state.batch_indices.copy_(torch.tensor([3, 1, 2, 0, 4, 5]))
    return state


def cached_keys_values(state: DecodeState, batch_index: int) -> list[tuple[Tensor, Tensor]]:
    """Return the cached keys and values of a sequence, by head."""
    known, length = state.state[:2, batch_index].tolist()
    before = -(-known // BLOCK_SIZE)
    table = state.block_tables[batch_index].tolist()
    places = [(table[n // BLOCK_SIZE], n % BLOCK_SIZE) for n in range(known)]
    places += [(table[before + n // BLOCK_SIZE], n % BLOCK_SIZE) for n in range(length)]
    pages, offsets = [p for p, _ in places], [o for _, o in places]
    return [tuple(x[pages, head, offsets] for x in state.cache.layers[0]) for head in range(2)]  # type: ignore[misc]


def random_attention_params(
    dtype: torch.dtype, device: str, normed: bool, head_dim: int = 16, add: float | None = None
) -> AttentionParams:
    angle = torch.rand(200, head_dim // 2, dtype=torch.float64).repeat(1, 2) * 6
    weights = [(torch.rand(head_dim, dtype=torch.float64) + 0.5).to(device, dtype) for _ in range(2)]
    norms = (NormParams(weights[0], 1e-6, add), NormParams(weights[1], 1e-6, add)) if normed else None
    return AttentionParams(angle.cos().to(device, dtype), angle.sin().to(device, dtype), norms, 0.3)


@pytest.mark.parametrize("normed", [False, True])
def test_attention_is_the_softmax_over_prompt_and_own_keys(normed: bool) -> None:
    torch.manual_seed(0)
    state, attention, qkv = (
        filled_state(),
        random_attention_params(torch.float64, "cpu", normed),
        torch.randn(6, 8 * 16, dtype=torch.float64),
    )
    out = decode_ops.paged_attention(qkv, attention, state, 0)
    for row, batch_index in enumerate(state.batch_indices.tolist()):
        known, length = state.state[:2, batch_index].tolist()
        for head in range(4):
            q, k, v = (qkv[row].view(8, 16)[i] for i in (head, 4 + head // 2, 6 + head // 2))
            if attention.qk_norms is not None:
                pairs = zip((q, k), attention.qk_norms, strict=True)
                q, k = (norm.weight * x / (x.pow(2).mean() + 1e-6).sqrt() for x, norm in pairs)
            angle_cos, angle_sin = attention.cos[known + length, :8], attention.sin[known + length, :8]
            q, k = (
                torch.cat([x[:8] * angle_cos - x[8:] * angle_sin, x[8:] * angle_cos + x[:8] * angle_sin])
                for x in (q, k)
            )
            keys, values = (
                torch.cat([x, new[None]])
                for x, new in zip(cached_keys_values(state, batch_index)[head // 2], (k, v), strict=True)
            )
            want = torch.softmax(0.3 * keys @ q, 0) @ values
            assert (out[row].view(4, 16)[head] - want).abs().max() < 1e-12
            page = state.block_tables[batch_index, -(-known // BLOCK_SIZE) + length // BLOCK_SIZE]
            assert torch.allclose(state.cache.layers[0][0][page, head // 2, length % BLOCK_SIZE], k)


def test_sampling_equals_sample_tokens_and_advances_the_state() -> None:
    state = filled_state()
    torch.manual_seed(0)
    logits = torch.randn(6, 700, dtype=torch.float64) * 3
    state.temperature.fill_(0.7)
    before = state.state.clone()
    u = uniform_from_seed(before[3, state.batch_indices], before[1, state.batch_indices])
    token, logp, _ = sample_tokens(logits / 0.7, 1.0, SamplingParams(), u)
    state.stop_tokens[0] = token[
        1
    ]  # the response in batch_index 1 ends here, that in batch_index 4 is at the limit, that in 5 was over
    decode_ops.sample_next_tokens(logits, state, SamplingParams(), False)
    for row, batch_index in enumerate([3, 1, 2, 0, 4]):
        t = int(before[RESPONSE_LENGTH, batch_index])
        assert state.tokens[batch_index, t] == token[row]
        assert abs(float(state.logp[batch_index, t] - logp[row])) < 1e-6
    assert state.state[RESPONSE_LENGTH].tolist() == [1, 0, 6, 65, 99, 70, 0]
    assert state.state[FINISHED_LENGTH].tolist() == [0, 1, 0, 0, 100, 71, 1]
    assert torch.equal(state.tokens[5], torch.zeros_like(state.tokens[5]))
    assert torch.equal(state.state[:, 5], before[:, 5])


def test_observation_tokens_are_fed_and_not_sampled() -> None:
    """They get no log-prob, and even an end token among them does not end the response; then sampling continues."""
    state = filled_state()
    torch.manual_seed(0)
    state.state[FORCED_LENGTH, 2], state.tokens[2, 5:7], state.stop_tokens[0] = 7, torch.tensor([9, 8]), 9
    for t, given in ((5, 9), (6, 8)):
        assert state.state[RESPONSE_LENGTH, 2] == t
        decode_ops.sample_next_tokens(torch.randn(6, 30, dtype=torch.float64), state, SamplingParams(), False)
        assert (state.state[LAST_TOKEN, 2], state.state[FINISHED_LENGTH, 2], state.logp[2, t]) == (given, 0, 0)
    decode_ops.sample_next_tokens(torch.randn(6, 30, dtype=torch.float64), state, SamplingParams(), False)
    assert state.logp[2, 7] < 0


# ---- the Triton kernels ----------------------------------------------------------------------------------

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or (DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1"),
    reason="needs Triton and a GPU, or TRITON_INTERPRET=1",
)
TYPES = [torch.float32, torch.bfloat16] if DEVICE == "cuda" else [torch.float32]


def near(got: Tensor, want: Tensor) -> None:
    bound = 1e-5 if got.dtype == torch.float32 else 1e-2
    assert float((got.double() - want.double()).norm() / want.double().norm()) < bound


@needs_triton
@pytest.mark.parametrize("dtype", TYPES)
def test_the_kernels_of_a_layer_equal_the_reference(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from ascent.ops import triton_decoding as kernels
    from ascent.ops import triton_paged_attention

    torch.manual_seed(0)
    x, y, w = (torch.randn(*s).to(DEVICE, dtype) for s in ((5, 48), (5, 48), (48,)))
    for other in (y, None):
        for got, want in zip(
            kernels.add_rms_norm(x, other, w, 1e-5), decode_ops.add_rms_norm(x, other, w, 1e-5), strict=True
        ):
            near(got, want)
        for add in (0.0, 1.0):
            near(kernels.add_rms_norm(x, other, w, 1e-5, add)[1], decode_ops.add_rms_norm(x, other, w, 1e-5, add)[1])
        mixed = [f(x.float(), other, w, 1e-5) for f in (kernels.add_rms_norm, decode_ops.add_rms_norm)]
        assert mixed[0][0].dtype == torch.float32 and mixed[0][1].dtype == dtype
        near(mixed[0][0], mixed[1][0]), near(mixed[0][1], mixed[1][1])
    wide = torch.randn(5, 64).to(DEVICE, dtype)
    near(kernels.add_rms_norm(x, wide[:, :48], w, 1e-5)[1], decode_ops.add_rms_norm(x, wide[:, :48], w, 1e-5)[1])
    both = torch.randn(5, 3000).to(DEVICE, dtype)
    near(kernels.gated_activation(both), decode_ops.gated_activation(both))
    near(kernels.gated_activation(both, gelu=True), decode_ops.gated_activation(both, gelu=True))
    for rows, out, rank in ((5, 300, 8), (70, 96, 16), (33, 200, 48), (16, 130, 136)):
        whole, b = (torch.randn(*s).to(DEVICE, dtype) for s in ((rows, out + rank + 8), (out, rank)))
        near(kernels.add_lora(whole.clone(), b), decode_ops.add_lora(whole.clone(), b))
        for ranks in ((rank // 2, rank // 2), (0, rank), (rank - 3, 0)):
            own = b.clone()
            own[: out // 2, ranks[0] :], own[out // 2 :, : ranks[0]], own[:, sum(ranks) :] = 0, 0, 0
            for gelu in (False, True):
                near(
                    kernels.gated_activation(whole.clone(), own, ranks, gelu),
                    decode_ops.gated_activation(whole.clone(), own, ranks, gelu),
                )
    for normed, repeat, add, head_dim in (
        (False, 3, None, 32), (True, 1, None, 32), (True, 6, 0.0, 32), (True, 2, 1.0, 32), (False, 3, None, 96),
        (True, 2, 0.0, 24), (False, 1, None, 8),
    ):  # fmt: skip
        monkeypatch.setattr(triton_paged_attention, "MANY_PROGRAMS", 1 if repeat > 2 else 1000)
        for cut in (None, (BLOCK_SIZE, 99), (2 * BLOCK_SIZE, 99), (BLOCK_SIZE, 2)):
            mine, plain = filled_state(dtype, DEVICE, head_dim), filled_state(dtype, DEVICE, head_dim)
            parts = None if cut is None else triton_paged_attention.split_long_rows(mine, 6, *cut)
            attention = random_attention_params(dtype, DEVICE, normed, head_dim, add)
            qkv = torch.randn(6, (2 * repeat + 4) * head_dim + 16).to(DEVICE, dtype)[:, :-16]
            near(
                kernels.paged_attention(qkv, attention, mine, 0, parts),
                decode_ops.paged_attention(qkv, attention, plain, 0),
            )
            assert not mine.finished_splits.any()
            for got, want in zip(mine.cache.layers[0], plain.cache.layers[0], strict=True):
                near(got, want)


@needs_triton
@pytest.mark.parametrize(
    ("least", "spread"), [(BLOCK_SIZE, 1000), (2 * BLOCK_SIZE, 24), (4 * BLOCK_SIZE, 3), (BLOCK_SIZE, 1)]
)
@pytest.mark.parametrize("rows", [1, 5, 24])
def test_splits_cover_each_row_once_and_the_longest_come_first(rows: int, least: int, spread: int) -> None:
    from ascent.ops.triton_paged_attention import split_long_rows

    state, generator = (
        DecodeState.allocate(1, 2, 16, 30, 1, 40, 2500, torch.zeros((), device=DEVICE)),
        torch.Generator(),
    )
    known, length = torch.randint(300, (31,), generator=generator), torch.randint(2000, (31,), generator=generator)
    known[3], length[3], known[4], length[5] = 0, 0, 128, 0
    state.state[0], state.state[RESPONSE_LENGTH] = known.to(DEVICE), length.to(DEVICE)
    batch_indices = torch.randperm(30, generator=generator)
    state.batch_indices.copy_(batch_indices)
    parts = split_long_rows(state, rows, least, spread).tolist()
    there = [part for part in parts if part[0] >= 0]
    assert len(parts) <= rows + spread and parts[: len(there)] == there
    sizes = {part[7] for part in there}
    assert len(sizes) == 1 and min(sizes) >= least and min(sizes) % BLOCK_SIZE == 0
    ends = [
        -(-int(known[batch_index]) // BLOCK_SIZE) * BLOCK_SIZE + int(length[batch_index])
        for batch_index in batch_indices[:rows]
    ]
    before, found = 0, sorted(there, key=lambda part: (part[0], part[4]))
    for row, end in enumerate(ends):
        count = max(1, -(-end // min(sizes)))
        about = [row, int(batch_indices[row]), int(known[batch_indices[row]]), int(length[batch_indices[row]])]
        assert [p for p in found if p[0] == row] == [[*about, i, count, before, min(sizes)] for i in range(count)]
        before += count
    assert [part[4] + 1 == part[5] for part in there] == [False] * (before - rows) + [True] * rows
    rests = [ends[part[0]] - part[4] * part[7] for part in there[before - rows :]]
    assert rests == sorted(rests, reverse=True)


@needs_triton
def test_split_kv_does_not_change_the_sampled_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole runner: rows are split again in every step, and again for sequences that start later."""
    from ascent.ops import triton_decoding as kernels
    from ascent.ops.triton_paged_attention import split_long_rows

    lm = model_of("Llama", dtype=torch.float32, num_hidden_layers=1)
    lm.model.to(DEVICE)
    sampler, generator = sampler_of(lm, 5, rows=2), torch.Generator().manual_seed(0)
    prompts = Prompts.of(torch.randint(3, 12, (3, 250), generator=generator))
    sampler.runner = PagedRunner
    want, cuts = sampler.generate(prompts, 1), []

    def split_more_rows(state: DecodeState, rows: int) -> Tensor:
        cuts.append(rows)
        return split_long_rows(state, rows, BLOCK_SIZE, 99)

    sampler = sampler_of(lm, 5, rows=2)
    sampler.runner = decoder = decoder_of(lm)
    monkeypatch.setattr(decoder, "ops", kernels)
    monkeypatch.setattr(kernels, "split_long_rows", split_more_rows)
    monkeypatch.setattr(cuda_graph, "MIN_SPLIT_KV_LENGTH", BLOCK_SIZE)
    same(sampler.generate(prompts, 1), want, 1e-4)
    assert cuts and not decoder.decode_state.finished_splits.any()


MATMULS = [(5, 48, 64, (16, 32, 32)), (70, 104, 96, (64, 64, 32, 2)), (3, 36, 72, (16, 16, 16, 3))]
MATMULS += [(33, 40, 160, (32, 64, 64, 2)), (1, 16, 520, (16, 64, 64, 8))]
"""M, N, K; and the tile: block_m, block_n, block_k, split-K parts."""


@needs_triton
@pytest.mark.parametrize("dtype", [*TYPES, torch.float16] if DEVICE == "cuda" else TYPES)
@pytest.mark.parametrize(("rows", "width", "depth", "tile"), MATMULS, ids=str)
def test_matmuls_with_few_rows_equal_the_reference(
    rows: int, width: int, depth: int, tile: Any, dtype: torch.dtype
) -> None:
    """No tile divides M, N or K; and a norm adds the split-K parts."""
    from ascent.ops import triton_decoding as kernels
    from ascent.ops.triton_matmul import Tile, tiled_matmul

    tile = Tile(*tile)
    torch.manual_seed(0)
    x, y = (torch.randn(rows, n + 8).to(DEVICE, dtype)[:, :n] for n in (depth, width))
    weight, b, w = (torch.randn(*s).to(DEVICE, dtype) for s in ((width, depth), (width,), (width,)))
    for bias in (None, b):
        got, want = tiled_matmul(x, weight, bias, tile), decode_ops.linear(x, weight, bias)
        assert (got.ndim == 3) == (tile.splits > 1)
        near(got.sum(0).to(dtype) if tile.splits > 1 else got, want)
        assert torch.equal(tiled_matmul(x[:1], weight, bias, tile), got[..., :1, :])  # whatever the other rows are
        residual = y.contiguous()
        for one, other in zip(
            kernels.add_rms_norm(residual, got, w, 1e-5), decode_ops.add_rms_norm(residual, want, w, 1e-5), strict=True
        ):
            near(one, other)
        if tile.splits == 1:
            for gelu in (False, True):
                want = decode_ops.gated_linear(x, weight, bias, gelu)
                near(tiled_matmul(x, weight, bias, tile, "gelu" if gelu else "silu"), want)


@needs_triton
def test_every_tile_fits_into_shared_memory() -> None:
    from ascent.ops.triton_matmul import MIN_SHARED_MEMORY, choose_tile_for_shape

    sizes, tiles = (64, 576, 1536, 2048, 8960, 17_920), []
    for rows in (1, 16, 17, 64, 65, 512, 1024):
        for width, depth in itertools.product(sizes, sizes):
            tiles += [
                (choose_tile_for_shape(rows, width, depth, gate, not gate), gate, depth) for gate in (False, True)
            ]
    assert sum(tile is None for tile, *_ in tiles) > 100 < sum(tile is not None for tile, *_ in tiles)
    for tile, gate, depth in tiles:
        if tile is not None:
            assert (tile.block_m + tile.block_n * (1 + gate)) * tile.block_k * 2 * tile.stages < MIN_SHARED_MEMORY
            assert tile.splits == 1 or depth // tile.splits >= 512


@needs_triton
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("rows", [1, 8, 17, 64, 100, 512])
@pytest.mark.parametrize(
    ("width", "depth"), [(960, 576), (3072, 576), (576, 1536), (17_920, 1536), (1536, 8960), (100, 72)]
)
def test_matmuls_of_a_model_equal_the_reference(rows: int, width: int, depth: int) -> None:
    """With the tiles that are chosen, or with cuBLAS."""
    from ascent.ops import triton_decoding as kernels

    torch.manual_seed(0)
    x, weight = (torch.randn(n, depth).to(DEVICE, torch.bfloat16) for n in (rows, width))
    got, want = kernels.linear(x, weight, None, split_k=True), decode_ops.linear(x, weight, None)
    near(got.sum(0).to(x.dtype) if got.ndim == 3 else got, want)
    near(kernels.gated_linear(x, weight, weight[:, 0].contiguous()), decode_ops.gated_linear(x, weight, weight[:, 0]))


@needs_triton
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("heads", "shared", "head_dim"), [(9, 3, 64), (4, 2, 16), (20, 8, 32), (3, 1, 96)])
def test_prefill_writes_keys_and_values_like_the_reference(
    dtype: torch.dtype, heads: int, shared: int, head_dim: int
) -> None:
    from ascent.ops import triton_decoding as kernels

    torch.manual_seed(0)
    tokens, pages = 37, 6
    qkv = torch.randn(tokens, (heads + 2 * shared) * head_dim + 8).to(DEVICE, dtype)[:, :-8]
    angle = torch.randn(tokens, head_dim // 2).repeat(1, 2).to(DEVICE)
    where = torch.randperm(pages * BLOCK_SIZE)[:tokens].to(DEVICE)
    caches = [
        tuple(torch.zeros(pages, shared, BLOCK_SIZE, head_dim).to(DEVICE, dtype) for _ in range(2)) for _ in range(2)
    ]
    about = (angle.cos().to(dtype), angle.sin().to(dtype), where // BLOCK_SIZE, where % BLOCK_SIZE)
    near(kernels.rotate_and_write_kv(qkv, *about, caches[0]), decode_ops.rotate_and_write_kv(qkv, *about, caches[1]))
    seen = torch.randint(pages * BLOCK_SIZE, (71,)).to(DEVICE)
    mine, plain = (
        ops.gather_kv(cache, seen // BLOCK_SIZE, seen % BLOCK_SIZE)
        for ops, cache in ((kernels, caches[0]), (decode_ops, caches[1]))
    )
    for got, want in [*zip(*caches, strict=True), *zip(mine, plain, strict=True)]:
        near(got, want)
    assert torch.equal(caches[0][1], caches[1][1])  # values are not rotated


@needs_triton
@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("vocab", [37, 9000] if DEVICE == "cpu" else [37, 300, 9000, 151_936])
def test_the_sampling_kernel_equals_the_reference(vocab: int, greedy: bool) -> None:
    from ascent.ops import triton_decoding as kernels

    torch.manual_seed(0)
    mine, plain = filled_state(torch.float32, DEVICE), filled_state(torch.float32, DEVICE)
    for state in (mine, plain):
        state.temperature.fill_(0.7)
        state.stop_tokens[0] = 5
        state.state[FORCED_LENGTH, 2], state.tokens[2, 5:7] = 7, 5
    for _ in range(3 if DEVICE == "cpu" else 20):
        logits = (torch.randn(6, vocab) * 3).to(DEVICE)
        kernels.sample_next_tokens(logits, mine, SamplingParams(), greedy)
        decode_ops.sample_next_tokens(logits, plain, SamplingParams(), greedy)
    assert torch.equal(mine.state, plain.state)
    assert torch.equal(mine.tokens, plain.tokens)
    assert (mine.logp - plain.logp).abs().max() < 1e-5


@needs_triton
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("kind", LLAMA_LIKE)
@pytest.mark.parametrize("cut", [{}, {"top_p": 0.7}, {"greedy": True}])
def test_graphs_sample_the_same_tokens_as_the_paged_runner(kind: str, cut: dict[str, Any]) -> None:
    """In float32 on a GPU, with few batch indices, so that they are reused."""
    lm = model_of(kind, dtype=torch.float32, head_dim=24)  # not a power of 2, as Phi-3's 96
    lm.model.to("cuda")
    decoder = decoder_of(lm)
    assert decoder.ops is not decode_ops
    for rows in (5, 64):
        same(drawn_by(decoder, lm, rows=rows, **cut), drawn_by(PagedRunner, lm, rows=rows, **cut), 1e-4)


@needs_triton
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize(("kind", "more"), KINDS, ids=str)
def test_graphs_of_more_architectures_sample_the_same_tokens_as_the_model_itself(
    kind: str, more: dict[str, Any]
) -> None:
    lm = model_with_random_norms(kind, **more)
    lm.model.to("cuda")
    decoder = decoder_of(lm)
    assert decoder.ops is not decode_ops
    same(drawn_by(decoder, lm, rows=64), drawn_by(EagerRunner, lm, rows=64), 1e-4)


class Doubled(torch.nn.Embedding):
    """An embedding that scales its rows."""

    def forward(self, ids: Tensor) -> Tensor:
        return 2 * super().forward(ids)


def spoil_embedding(lm: LanguageModel) -> None:
    lm.model.set_input_embeddings(Doubled(*lm.model.get_input_embeddings().weight.shape))


def spoil_type(lm: LanguageModel) -> None:
    lm.model.model.layers[1].mlp.down_proj.to(torch.float64)


def spoil_layer(lm: LanguageModel) -> None:
    lm.model.model.layers[1].extra = torch.nn.Linear(2, 2)


def spoil_norm(lm: LanguageModel) -> None:
    lm.model.model.layers[1].self_attn.q_norm = torch.nn.RMSNorm(5)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (spoil_embedding, "its embedding of words does more than look them up"),
        (spoil_type, "its parameters are of several types or on several devices"),
        (spoil_layer, "it has a part that Llama has not, extra"),
        (spoil_norm, "its norms of queries and keys are neither a head's nor of all heads"),
    ],
)
def test_a_model_that_differs_from_llama_has_no_cuda_graph_runner(spoil: Any, why: str) -> None:
    lm = model_of(dtype=torch.float32)
    decoder_model.check_supported(lm.model)
    spoil(lm)
    assert cuda_graph_runner(lm) == (None, why)


def test_a_module_without_parameters_is_ignored() -> None:
    lm = model_of(dtype=torch.float32)
    lm.model.model.layers[1].extra = torch.nn.Identity()
    decoder_model.check_supported(lm.model)


def test_a_model_with_too_many_stop_tokens_decodes_without_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lm = model_of(dtype=torch.float32)
    lm.stop_token_ids = frozenset(range(decode_state.MAX_STOP_TOKENS))
    decoder_of(lm)
    del lm.cuda_graph_runner
    monkeypatch.setattr(type(lm), "device", torch.device("cuda"))
    lm.stop_token_ids = frozenset(range(decode_state.MAX_STOP_TOKENS + 1))
    why = f"it has {decode_state.MAX_STOP_TOKENS + 1} end tokens, and there is room for {decode_state.MAX_STOP_TOKENS}"
    assert cuda_graph_runner(lm) == (None, why)
    sampler = sampler_of(lm)
    assert sampler.runner is PagedRunner
    assert sampler.note == cuda_graph.SLOW_RUNNER_NOTE.format(why=why)
    monkeypatch.setattr(lm, "cuda_graph_runner", decoder := object(), raising=False)
    sampler = sampler_of(lm)
    assert sampler.runner is decoder and sampler.note is None, "one runner for all engines of a model"
