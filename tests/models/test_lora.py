"""LoRA on the fast paths: in the steps that graphs are captured of, and in the learner's half precision."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ascent.core.algorithms import ALGORITHMS
from ascent.inference.runners.cuda_graph import SLOW_RUNNER_NOTE, cuda_graph_runner
from ascent.inference.runners.paged import PagedRunner
from ascent.models import LanguageModel
from ascent.models.causal_lm import CausalLM
from ascent.models.decoder_model import DecoderModel
from ascent.models.fused_layers import fuse_layers
from ascent.models.lora import (
    AdapterCopies,
    LoraAdapter,
    _LoraFunction,
    fuse_lora,
    merge_linears,
    randomized_adapters,
    unwrap_lora,
)
from ascent.ops import decode_ops
from ascent.training.language_learner import LanguageLearner
from ascent.training.master_weights import load_params
from tests.inference.test_cuda_graph_runner import DEVICE, decoder_of, drawn_by, needs_triton, same
from tests.language import batch_of, model_of

SOME = ["q_proj", "v_proj", "up_proj"]


def adapted_model(kind: str = "Llama", targets: Any = "all-linear", rank: int = 3, **more: Any) -> LanguageModel:
    """A random model with adapters that do something."""
    from peft import LoraConfig, get_peft_model

    lm = model_of(kind, **more)
    lm.model.requires_grad_(False)
    torch.manual_seed(0)
    get_peft_model(lm.model, LoraConfig(r=rank, lora_alpha=2 * rank + 1, target_modules=targets))
    move(lm)
    return lm


@torch.no_grad()
def move(lm: LanguageModel, by: float = 0.2) -> None:
    for p in lm.trained().values():
        p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)).to(p) * by)


def own_log_probs(lm: LanguageModel, prompt: Tensor, response: Tensor) -> Tensor:
    """By transformers' and peft's own forward pass."""
    with torch.no_grad():
        logits = lm.model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(-1, response[:, None])[:, 0]


# ---- the sampler -----------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "targets", "more"),
    [
        ("Llama", "all-linear", {}),
        ("Llama", [*SOME, "embed_tokens"], {"tie_word_embeddings": False}),
        ("Qwen2", SOME, {"tie_word_embeddings": True}),
        ("Qwen2", ["k_proj", "down_proj"], {}),
        ("Qwen3", "all-linear", {"rank": 24}),
        ("Mistral", ["o_proj"], {"rank": 1}),
        ("Phi3", "all-linear", {}),
        ("Olmo2", "all-linear", {}),
        ("Gemma", "all-linear", {}),
    ],
)
def test_adapters_draw_what_the_slow_path_draws(kind: str, targets: Any, more: dict[str, Any]) -> None:
    """Before and after an update of the adapters alone, which finds the same buffers."""
    lm = adapted_model(kind, targets, **more)
    decoder = decoder_of(lm)
    same(drawn_by(decoder, lm, 2, rows=3), drawn_by(PagedRunner, lm, 2, rows=3))
    addresses = DecoderModel.of(lm.model).addresses()
    move(lm)
    assert DecoderModel.of(lm.model).addresses() == addresses
    same(drawn_by(decoder, lm, 1, greedy=True), drawn_by(PagedRunner, lm, 1, greedy=True))


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3"])
def test_log_probs_are_those_of_peft(kind: str) -> None:
    lm = adapted_model(kind, SOME, dtype=torch.float32)
    rollouts = drawn_by(decoder_of(lm), lm, 1)
    for prompt, responses, masks, drawn in zip(
        rollouts.prompt, rollouts.response, rollouts.mask, rollouts.logp_sampler, strict=True
    ):
        for response, mask, logp in zip(responses, masks, drawn, strict=True):
            want = own_log_probs(lm, prompt[prompt >= 0], response[mask])
            assert (logp[mask] - want).abs().max() < 1e-4


def test_a_model_that_decodes_the_slow_way_samples_adapters_too() -> None:
    lm = adapted_model("Llama", SOME, hidden_act="gelu")
    assert cuda_graph_runner(lm) == (None, "the activation of its MLPs is neither SiLU nor GELU by its tanh")
    rollouts = drawn_by(PagedRunner, lm)
    prompt, mask = rollouts.prompt[0], rollouts.mask[0, 0]
    want = own_log_probs(lm, prompt[prompt >= 0], rollouts.response[0, 0][mask])
    assert (rollouts.logp_sampler[0, 0][mask] - want).abs().max() < 1e-5


def test_adapters_that_have_not_moved_are_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """B is 0 at the start, so a wrong product would go unseen; it is shaken while the decoder is tried."""
    lm = adapted_model()
    with torch.no_grad():
        for name, p in lm.trained().items():
            p.mul_(0.0 if "lora_B" in name else 1.0)
    before = {name: p.clone() for name, p in lm.trained().items()}
    monkeypatch.setattr(AdapterCopies, "refresh", lambda _: None)
    assert "compute something" in str(cuda_graph_runner(lm)[1])
    assert all(torch.equal(p, before[name]) for name, p in lm.trained().items())


def test_parameters_stay_and_what_is_saved_is_what_was_there(tiny_folder: Path, tmp_path: Path) -> None:
    lm = CausalLM(str(tiny_folder), device="cpu", lora=2).load()
    move(lm)
    state = {name: p.detach().clone() for name, p in lm.model.state_dict().items()}
    objects = {name: id(p) for name, p in lm.model.named_parameters()}
    DecoderModel.of(lm.model)
    assert objects == {name: id(p) for name, p in lm.model.named_parameters()}
    assert all(torch.equal(p, state[name]) for name, p in lm.model.state_dict().items())
    lm.save(tmp_path / "merged")
    saved = CausalLM(str(tmp_path / "merged"), device="cpu").load()
    ids = torch.tensor([[1, 2, 3, 4]])
    assert (saved.model(ids).logits - lm.model(ids).logits).abs().max() < 1e-4


def test_a_checkpoint_of_adapters_reaches_a_decoder_that_is_there() -> None:
    lm, other = adapted_model("Qwen2"), adapted_model("Qwen2")
    move(other)
    decoder = decoder_of(lm)
    drawn_by(decoder, lm, 1, limit=3)
    load_params(lm.trained(), other.trained())
    same(drawn_by(decoder, lm, 1), drawn_by(decoder_of(other), other, 1))


def test_an_adapter_is_rounded_after_it_is_scaled_and_nobody_elses_rows_are_touched() -> None:
    modules = [nn.Linear(4, 3, bias=False), nn.Linear(4, 5, bias=False)]
    block = torch.randn(60)
    for module, part in zip(modules, block[:32].split([12, 20]), strict=True):  # 28 numbers behind are another's
        module.weight.data = part.view(-1, 4)
    before, behind = torch.cat([m.weight.detach() for m in modules]), block.clone()
    modules[1] = adapter_beside(modules[1], torch.randn(2, 4), torch.randn(5, 2), 1 / 3)
    copies = AdapterCopies()
    found = merge_linears(modules, copies)
    copies.refresh()
    assert torch.equal(block, behind) and torch.equal(found.weight[:8], before)
    _, adapter = unwrap_lora(modules[1])
    assert adapter is not None and found.b is not None
    assert torch.equal(found.b[3:, :2], adapter.b * (1 / 3)) and not found.b[:3].any() and not found.b[:, 2:].any()
    assert found.weight.shape[0] % 64 == 0 and not found.weight[10:].any()


def adapter_beside(linear: nn.Linear, a: Tensor, b: Tensor, scale: float) -> Any:
    from peft import LoraConfig
    from peft.tuners.lora.layer import Linear

    module = Linear(linear, "default", LoraConfig(r=len(a), lora_alpha=1), r=len(a), lora_alpha=1)
    module.scaling["default"] = scale
    module.lora_A["default"].weight.data, module.lora_B["default"].weight.data = a, b
    return module


def test_what_is_no_plain_adapter_is_left_to_peft() -> None:
    module = adapter_beside(nn.Linear(4, 3), torch.randn(2, 4), torch.randn(3, 2), 0.5)
    assert isinstance(unwrap_lora(module)[1], LoraAdapter)
    module.merge()
    assert unwrap_lora(module) == (module, None)
    module.unmerge()
    module.enable_adapters(False)
    assert unwrap_lora(module) == (module, None) and not fuse_lora(module)


def test_the_slow_path_is_named_with_what_it_costs() -> None:
    words = SLOW_RUNNER_NOTE.format(why=cuda_graph_runner(model_of("GPT2"))[1])
    assert words == (
        "rollouts take 20 to 40 times as long as with CUDA graphs, which do not support this model: its layers are "
        "built differently from Llama's: rotary_emb is missing"
    )


# ---- the learner -----------------------------------------------------------------------------------


def test_the_learners_product_and_its_gradients_are_the_formulas() -> None:
    torch.manual_seed(0)
    x, w, bias, a, b = (torch.randn(*s, dtype=torch.float64) for s in ((2, 5, 7), (6, 7), (6,), (3, 7), (6, 3)))
    mine = [t.clone().requires_grad_() for t in (x, a, b)]
    theirs = [t.clone().requires_grad_() for t in (x, a, b)]
    got = _LoraFunction.apply(mine[0], w, bias, mine[1], mine[2], 0.7)
    want = theirs[0] @ w.t() + bias + 0.7 * (theirs[0] @ theirs[1].t()) @ theirs[2].t()
    torch.testing.assert_close(got, want)
    pairs = zip(*(torch.autograd.grad(y.sin().sum(), ts) for y, ts in ((got, mine), (want, theirs))), strict=True)
    for got, want in pairs:
        torch.testing.assert_close(got, want)


def test_half_precision_adapters_are_pefts_to_rounding_and_keep_float32_gradients() -> None:
    lm = adapted_model("Qwen2", SOME, dtype=torch.bfloat16)
    ids = torch.tensor([[5, 6, 7, 8]])
    want = lm.model(ids).logits.detach().float()
    assert {p.dtype for p in lm.trained().values()} == {torch.float32}
    assert fuse_layers(lm.model) >= 2 * len(SOME)
    got = lm.model(ids).logits.float()
    assert 0 < float((got.detach() - want).abs().max()) < 0.05 * float(want.abs().max())
    got.square().mean().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in lm.trained().values())
    wide = copy.deepcopy(lm.model).float()
    assert float((wide(ids).logits.detach() - want).abs().max()) < 0.05 * float(want.abs().max())


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")
def test_sampler_and_learner_round_adapters_in_the_same_places() -> None:
    torch.manual_seed(0)
    x = torch.randn(9, 16).bfloat16()
    module = adapter_beside(
        nn.Linear(16, 24).bfloat16().requires_grad_(False), torch.randn(3, 16), torch.randn(24, 3), 1 / 3
    )
    copies = AdapterCopies()
    product = merge_linears([module], copies)
    copies.refresh()
    assert fuse_lora(module)
    assert torch.equal(product(x, decode_ops), module(x))


def test_the_reference_is_the_base_with_its_adapters_off() -> None:
    """It keeps the adapters' first values and no second model; after an update it is still the base."""
    lm, base = still_model("Qwen2"), model_of("Qwen2")
    row = ALGORITHMS["reinforce"]
    learner = LanguageLearner(lm, row.update, True, row.outputs)
    batch = batch_of(lm)
    move(lm)
    kept = sum(p.numel() for p in learner.reference_params or ())
    assert kept == sum(p.numel() for p in lm.trained().values())
    scored = learner.score(batch, frozenset({"logp_ref"}))["logp_ref"]
    plain = LanguageLearner(base, row.update, False, row.outputs).score(batch, frozenset({"logp_old"}))["logp_old"]
    assert (scored - plain).abs().max() < 1e-6


def still_model(kind: str) -> LanguageModel:
    """With adapters that have not moved."""
    lm = adapted_model(kind)
    with torch.no_grad():
        for name, p in lm.trained().items():
            p.mul_(0.0 if "lora_B" in name else 1.0)
    return lm


def test_shaken_adapters_come_to_rest() -> None:
    lm = still_model("Llama")
    with randomized_adapters(lm.model):
        assert all(bool(p.any()) for p in lm.trained().values())
    assert not any(bool(p.any()) for name, p in lm.trained().items() if "lora_B" in name)


@needs_triton
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize(("kind", "rank"), [("Llama", 4), ("Qwen2", 16), ("Qwen3", 80), ("Phi3", 8), ("Gemma", 8)])
def test_graphs_draw_what_the_slow_path_draws(kind: str, rank: int) -> None:
    lm = adapted_model(kind, rank=rank, dtype=torch.float32, head_dim=16)
    lm.model.to("cuda")
    decoder = decoder_of(lm)
    for rows in (5, 64):
        same(drawn_by(decoder, lm, rows=rows), drawn_by(PagedRunner, lm, rows=rows), 1e-4)
    move(lm)
    same(drawn_by(decoder, lm), drawn_by(PagedRunner, lm), 1e-4)


@pytest.mark.parametrize("trained", [True, False])
def test_an_adapter_is_fused_only_beside_a_frozen_matrix(trained: bool) -> None:
    lm = adapted_model("Llama", ["q_proj"], dtype=torch.bfloat16)
    module = lm.model.model.layers[0].self_attn.q_proj
    module.base_layer.weight.requires_grad_(trained)
    assert fuse_lora(module) is not trained
    assert ("forward" in vars(module)) is not trained
