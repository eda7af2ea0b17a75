"""Precisions between bfloat16 and float32: what each of them rounds, and that sampler and learner round alike."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ascent.build.model_verification import verify_model
from ascent.core.types import Prompts
from ascent.inference.runners.cuda_graph import CudaGraphRunner, cuda_graph_runner
from ascent.models import CausalLM, LanguageModel
from ascent.models.causal_lm import is_mixed_precision, set_mixed_precision
from ascent.models.fused_layers import ElementwiseReference, fuse_layers
from ascent.models.lm_head import LMHead
from ascent.models.packed_attention import (
    EfficientVarlen,
    PackedGroup,
    VarlenAttention,
    VarlenSegments,
    packed_attention_enabled,
)
from ascent.training.language_learner import LanguageCritic
from ascent.training.packing import hidden_states
from benchmarks import rounding_gpu
from tests.flash_formulas import FlashFormulas
from tests.language import batch_of, model_of, prompts_of, sampler_of
from tests.training.test_captured_updates import capturing, gradients, learner_of
from tests.training.test_language_learner import credited

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul")
HALF = {"bfloat16": torch.bfloat16, "mixed": torch.bfloat16, "float16": torch.float16}


def rounded(name: str, kind: str = "Llama", **more: Any) -> LanguageModel:
    """The same model in each precision; its parameters are bfloat16's, so that they are not what is rounded."""
    lm = model_of(kind, dtype=torch.float32, **more)
    for p in lm.model.parameters():
        p.data = p.data.bfloat16().to(HALF.get(name, torch.float32))
    set_mixed_precision(lm.model, name == "mixed")
    return lm


@torch.no_grad()
def log_probs(lm: LanguageModel, batch: Any) -> Tensor:
    with packed_attention_enabled(lm.model, lm.can_share_prompts):
        return torch.log_softmax(LMHead.of(lm.model).logits(hidden_states(lm, batch)), -1)


@pytest.mark.parametrize("kind", ["Llama", "GPT2", "Olmo2"])
def test_what_is_mixed_is_nearer_to_float32_than_bfloat16(kind: str) -> None:
    """On the road of the learner, against transformers' own forward pass in float32."""
    exact = rounded("float32", kind, num_hidden_layers=6)
    batch = batch_of(exact)
    verify_model(exact, share=False)
    want = log_probs(exact, batch)
    gaps = {}
    for name in HALF:
        lm = rounded(name, kind, num_hidden_layers=6)
        assert verify_model(lm) is None
        gaps[name] = float((log_probs(lm, batch) - want).abs().mean())
    assert 4 * gaps["float16"] < gaps["mixed"] < 0.95 * gaps["bfloat16"]


@pytest.mark.parametrize("kind", ["Qwen3", "Gemma", "Phi3"])
def test_a_mixed_sampler_rounds_as_its_learner_does(kind: str) -> None:
    """Log-probs as they were drawn, by the graph decoder's arithmetic, and as the learner finds them."""
    lm = rounded("mixed", kind)
    decoder, why = cuda_graph_runner(lm)
    assert decoder is not None, why
    assert decoder.model.float32_residual
    sampler = sampler_of(lm)
    sampler.runner = decoder
    drawn = sampler.generate(Prompts.of(prompts_of()), 4)
    gaps = []
    for learner in (lm, rounded("bfloat16", kind)):
        found = log_probs(learner, drawn).gather(-1, drawn.response[drawn.mask][:, None])[:, 0]
        gaps.append(float((found - drawn.logp_sampler[drawn.mask]).abs().mean()))
    assert gaps[0] < 5e-3 and 2 * gaps[0] < gaps[1], "three to ten times as much if one of them rounds its stream"


def test_words_are_drawn_from_float32_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not from what bfloat16 leaves of them, which is 0.125 apart between 16 and 32."""
    lm, seen = rounded("mixed"), []
    decoder, _ = cuda_graph_runner(lm)
    assert isinstance(decoder, CudaGraphRunner)
    monkeypatch.setattr(decoder, "ops", SimpleNamespace(**vars(decoder.ops)))
    draw = decoder.ops.sample_next_tokens
    decoder.ops.sample_next_tokens = lambda logits, *more: (seen.append(logits), draw(logits, *more))
    sampler = sampler_of(lm)
    sampler.runner = decoder
    sampler.generate(Prompts.of(prompts_of()), 2)
    assert all(z.dtype == torch.float32 for z in seen)
    assert any(not torch.equal(z, z.bfloat16().float()) for z in seen)


def test_fused_parts_of_a_mixed_model_compute_the_same() -> None:
    plain, fused = rounded("mixed"), rounded("mixed")
    batch = batch_of(rounded("float32"))
    assert fuse_layers(fused.model, ElementwiseReference) == 5 + 2
    assert (log_probs(plain, batch) - log_probs(fused, batch)).abs().mean() < 0.01
    x = torch.randn(3, 32)
    assert fused.backbone.norm(x).dtype == torch.bfloat16


def test_a_mixed_model_can_be_copied_and_be_plain_again() -> None:
    lm = rounded("mixed")
    own = LanguageCritic(lm, shared=False).separate_backbone
    assert own.forward.args[0] is own, "a copy computes with its own parameters"
    words, again = own.get_input_embeddings(), copy.deepcopy(lm.model)
    assert words(torch.zeros(1, dtype=torch.long)).dtype == torch.float32
    set_mixed_precision(again), set_mixed_precision(again)
    set_mixed_precision(again, False)
    assert is_mixed_precision(lm.model) and not is_mixed_precision(again)
    assert again.get_input_embeddings()(torch.zeros(1, dtype=torch.long)).dtype == torch.bfloat16


def test_mixed_is_chosen_by_a_setting(tiny_folder: Path) -> None:
    lm = CausalLM(model=str(tiny_folder), dtype="mixed", device="cpu", lora=2).load(keep_full_precision=True)
    assert is_mixed_precision(lm.model) and lm.model.dtype == torch.bfloat16
    assert verify_model(lm) is None
    assert cuda_graph_runner(lm)[0] is not None
    assert not is_mixed_precision(CausalLM(model=str(tiny_folder), dtype="bfloat16", device="cpu").load().model)


def test_a_mixed_model_is_captured_too() -> None:
    """Padded rows whose passes are computed again have the gradient of the plain ones."""
    found = []
    for captured in (False, True):
        learner, algorithm = learner_of(rounded("mixed"), "dr-grpo")
        batch = credited(batch_of(rounded("float32")), algorithm, learner)
        learner = capturing(learner) if captured else learner
        for _ in range(2):  # the second use of a size captures it
            grads = gradients(learner, batch, algorithm)
        found.append(torch.cat([g.flatten().double() for g in grads]))
        assert not captured or (learner._captured_backbone is not None and learner._captured_backbone.rows)
    assert float(found[0] @ found[1] / found[0].norm() / found[1].norm()) > 0.999


# ---- float32 on a GPU ----------------------------------------------------------------------------------


class Whole:
    """torch's two operators of memory-efficient attention, by formulas: all heads have keys of their own."""

    @staticmethod
    def _efficient_attention_forward(
        q: Tensor, k: Tensor, v: Tensor, _b: None, queries: Tensor, keys: Tensor, *_: Any, scale: float
    ) -> Any:
        assert q.shape[2] == k.shape[2] == v.shape[2]
        spans = VarlenSegments(queries, keys, 0, 0, *[queries[:0]] * 3)
        return FlashFormulas.forward(q[0], k[0], v[0], spans, scale)[0][None], q, q, q, 0, 0

    @staticmethod
    def _efficient_attention_backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, _b: None, _o: Tensor, queries: Tensor, keys: Tensor, *_: Any,
        scale: float, **_more: Any,
    ) -> Any:  # fmt: skip
        spans = VarlenSegments(queries, keys, 0, 0, *[queries[:0]] * 3)
        found = FlashFormulas.backward(grad[0], q[0], k[0], v[0], None, None, spans, scale)
        return *(x[None] for x in found), None


def test_keys_that_heads_share_get_the_gradients_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EfficientVarlen, "aten", Whole)
    torch.manual_seed(0)
    spans = VarlenSegments.of([PackedGroup(0, 3, (2, 1)), PackedGroup(6, 2, ())], torch.device("cpu"))
    q, k, v = (torch.randn(8, heads, 4, dtype=torch.float64, requires_grad=True) for heads in (6, 2, 2))
    found = []
    for ops in (FlashFormulas, EfficientVarlen):
        out = VarlenAttention.apply(q, k, v, spans, 0.3, ops)
        found.append([out, *torch.autograd.grad(torch.sin(out).sum(), (q, k, v))])
    for a, b in zip(*found, strict=True):
        assert (a - b).abs().max() < 1e-12


# ---- the benchmark -------------------------------------------------------------------------------------


def test_runs_are_read_off_what_processes_say_and_paired_by_seed() -> None:
    """By hand: gaps of 2 and 4 points at one evaluation; a run that was cut short counts where it came to."""
    said = "noise\nRUN {} 7\n  6.1 s    5120 samples: strict {}, in training 0.2031  generate 1 s\n"
    text = said.format("float32", "0.300") + said.format("mixed", "0.280")
    other = said.replace(" 7", " 8").format("float32", "0.340") + said.replace(" 7", " 8").format("mixed", "0.300")
    runs = [*rounding_gpu.heard(text), *rounding_gpu.heard(other)]
    found = {"right": {"5120": 28.0}, "training": {"5120": 20.31}, "seconds": 6.1}
    assert runs[1] == {"precision": "mixed", "seed": 7, "problems": rounding_gpu.PROBLEMS, **found}
    count, mean, gap, half = rounding_gpu.paired(runs, "mixed", ["5120"])
    assert (count, round(mean, 6), round(gap, 6)) == (2, 29.0, -3.0)
    assert half == pytest.approx(12.7062, abs=1e-3), "Student's t with one degree of freedom, times 1"
    assert rounding_gpu.paired(runs, "mixed", ["5120", "10240"])[0] == 0
    earlier = [{key: value for key, value in run.items() if key != "problems"} for run in runs[:1]]
    assert rounding_gpu.paired([*earlier, *runs[1:]], "mixed", ["5120"])[0] == 1, "on other problems it is no pair"
    assert rounding_gpu.paired(runs, "mixed", ["5120"], what="training")[2] == 0


def test_a_run_is_taken_once(tmp_path: Path) -> None:
    assert rounding_gpu.claim(tmp_path, "mixed:7") and not rounding_gpu.claim(tmp_path, "mixed:7")
    assert rounding_gpu.claim(tmp_path, "mixed:8") and rounding_gpu.claim(None, "mixed:7")
