"""Decoding on a CPU with packed copies of the weights: the same responses as from the model, after any change."""

from __future__ import annotations

import platform
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from ascent.core.types import Prompts, Rollouts
from ascent.inference.runners import packed_cpu_model as packed_cpu_model
from ascent.inference.runners.packed_cpu_model import (
    PackedCpuModel,
    PackedMatmul,
    RowwiseDecodeLayout,
    build_packed_cpu_model,
    hidden_error,
)
from ascent.inference.runners.paged import PagedRunner
from ascent.models import LanguageModel
from ascent.models.causal_lm import set_mixed_precision
from ascent.models.decoder_model import DecoderModel
from ascent.ops import cpu_kernels
from tests.inference.test_cuda_graph_runner import drawn_by, same
from tests.language import model_of, prompts_of, sampler_of
from tests.models.test_lora import adapted_model, move
from tests.models.test_quantization import packed_model

NEEDS_ONEDNN = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
NEEDS_KERNELS = pytest.mark.skipif(
    not cpu_kernels.can_compile(), reason="needs GCC, and Linux on 64-bit Arm or x86 with AVX2"
)
FORMS = [
    "transposed",
    pytest.param("packed", marks=NEEDS_ONEDNN),
    pytest.param("panels", marks=NEEDS_KERNELS),
]


def drawn(lm: LanguageModel, samples: int = 4, greedy: bool = False, **more: Any) -> Rollouts:
    sampler = sampler_of(lm, **more)
    assert sampler.packed_model is not None
    return sampler.generate(Prompts.of(prompts_of()), samples, greedy)


def build(lm: LanguageModel) -> PackedCpuModel:
    packed = build_packed_cpu_model(lm)
    assert packed is not None
    return packed


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3", "Mistral", "Phi3", "Olmo2", "Gemma", "Gemma3Text"])
def test_it_samples_the_same_tokens_as_the_model(kind: str, dtype: torch.dtype) -> None:
    lm = model_of(kind, dtype=dtype)
    same(drawn(lm, rows=5), drawn_by(PagedRunner, lm, rows=5), 2e-5 if dtype == torch.float32 else 5e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_many_rows_are_multiplied_with_the_original_weights(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a prefill; also with a bias, and where gate and up would be one matmul with their activation."""
    monkeypatch.setattr(packed_cpu_model, "MIN_UNPACKED_ROWS", 3)
    lm = model_of("Qwen2", dtype=dtype)
    same(drawn(lm, rows=5), drawn_by(PagedRunner, lm, rows=5), 2e-5 if dtype == torch.float32 else 5e-6)


def test_a_copy_that_failed_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = model_of(dtype=torch.float32)
    matmul = build(lm).matmuls[0]
    with monkeypatch.context() as context:
        context.setattr(packed_cpu_model, "_pack_or_transpose", fail)
        context.setattr(cpu_kernels.PackedWeight, "pack", fail)
        with pytest.raises(MemoryError):
            matmul.refresh(5)
    with torch.no_grad():
        matmul.weights[0].mul_(2)
    x = torch.randn(2, matmul.weights[0].shape[1], generator=torch.Generator().manual_seed(0))
    matmul.refresh(5)
    want = torch.cat([torch.nn.functional.linear(x, weight) for weight in matmul.weights], 1)
    assert torch.allclose(matmul(x, packed_cpu_model.InPlaceOps), want, atol=1e-5)


def fail(*given: Any) -> Any:
    raise MemoryError


def form_of(matmul: PackedMatmul) -> str:
    if isinstance(matmul.copy, cpu_kernels.PackedWeight):
        return "panels"
    return "packed" if matmul.copy.is_mkldnn else "transposed"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("biased", "rows"), [(False, 5), (True, 5), (True, 1)])
def test_every_form_of_copies(form: str, biased: bool, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_cpu_model, "uses_onednn", lambda _: form == "packed")
    if form != "panels":
        monkeypatch.setattr(cpu_kernels, "load_library", lambda: None)
    lm = model_of(dtype=torch.float32, attention_bias=biased, mlp_bias=biased, tie_word_embeddings=not biased)
    with torch.no_grad():
        for name, p in lm.model.named_parameters():
            if name.endswith("bias"):
                p.copy_(torch.linspace(-0.3, 0.3, len(p)))
    assert {form_of(matmul) for matmul in build(lm).matmuls} == {form}
    same(drawn(lm, rows=rows), drawn_by(PagedRunner, lm, rows=rows), 2e-5)


@NEEDS_ONEDNN
@NEEDS_KERNELS
@pytest.mark.parametrize(("machine", "forms"), [("aarch64", {"panels", "packed"}), ("x86_64", {"panels"})])
def test_on_arm_onednn_packs_large_matrices_and_the_c_kernels_the_others(
    machine: str, forms: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cpu_kernels.load_library() is not None  # compiled for the machine that this is
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(packed_cpu_model, "MIN_ONEDNN_ELEMENTS", {machine: 2000})
    lm = model_of(dtype=torch.float32, head_dim=16)
    packed = build(lm)
    assert {form_of(matmul) for matmul in packed.matmuls} == forms
    assert isinstance(packed.decode_layout(4, 8), RowwiseDecodeLayout)  # attention is by kernels
    same(drawn(lm), drawn_by(PagedRunner, lm), 2e-5)


@pytest.mark.parametrize("name", ["bfloat16", "float16", "mixed"])
def test_half_precision_rounds_where_the_model_does(name: str) -> None:
    lm = model_of(dtype=torch.float16 if name == "float16" else torch.bfloat16)
    set_mixed_precision(lm.model, name == "mixed")
    assert hidden_error(build(lm)) < 1e-3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("kind", "targets"), [("Llama", "all-linear"), ("Qwen2", ["q_proj", "v_proj", "up_proj"]), ("Phi3", ["qkv_proj"])]
)
def test_adapters_are_copied_again_and_frozen_matrices_are_not(kind: str, targets: Any, dtype: torch.dtype) -> None:
    lm = adapted_model(kind, targets, dtype=dtype)
    sampler = sampler_of(lm)
    assert sampler.packed_model is not None
    before = [matmul.copy for matmul in sampler.packed_model.matmuls]
    for version in range(2):
        sampler.version = version
        got = sampler.generate(Prompts.of(prompts_of()), 2, greedy=True)
        same(got, drawn_by(PagedRunner, lm, 2, greedy=True), 2e-5 if dtype == torch.float32 else 5e-6)
        move(lm)
    assert all(a is b.copy for a, b in zip(before, sampler.packed_model.matmuls, strict=True))


def add(p: torch.Tensor) -> None:
    p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)).to(p))


def add_without_version(p: torch.Tensor) -> None:
    """Change a parameter without increasing its version counter."""
    add(p.data)


def move_and_add(p: torch.Tensor) -> None:
    p.data = p.data.clone()
    add_without_version(p)


@pytest.mark.parametrize("change", [add, add_without_version, move_and_add])
def test_changes_of_the_parameters_are_detected(change: Any) -> None:
    lm = model_of("Qwen2")
    sampler = sampler_of(lm)
    sampler.version = 0
    first = sampler.generate(Prompts.of(prompts_of()), 2, greedy=True)
    with torch.no_grad():
        for p in lm.model.parameters():
            change(p)
    sampler.version = 1  # as after `load`
    second = sampler.generate(Prompts.of(prompts_of()), 2, greedy=True)
    same(second, drawn_by(PagedRunner, lm, 2, greedy=True))
    assert not torch.equal(first.logp_sampler, second.logp_sampler)


def test_changed_rope_frequencies_are_detected_and_a_failed_table_is_retried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lm = model_of("Qwen2")
    sampler = sampler_of(lm)
    first = sampler.generate(Prompts.of(prompts_of()), 2, greedy=True)
    lm.model.get_decoder().rotary_emb.inv_freq.mul_(3.0)
    with monkeypatch.context() as patch:
        patch.setattr(DecoderModel, "rotary_cache", Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            sampler.generate(Prompts.of(prompts_of()), 2, greedy=True)
    second = sampler.generate(Prompts.of(prompts_of()), 2, greedy=True)
    same(second, drawn_by(PagedRunner, lm, 2, greedy=True))
    assert not torch.equal(first.logp_sampler, second.logp_sampler)


def test_parameters_keep_their_addresses_during_decoding() -> None:
    """Other threads may read the model at the same time."""
    lm = model_of()
    sampler, places = sampler_of(lm), [(p.data_ptr(), p.stride()) for p in lm.model.parameters()]
    with sampler.prepared():
        assert places == [(p.data_ptr(), p.stride()) for p in lm.model.parameters()]


def test_unsupported_models_are_decoded_by_their_own_layers() -> None:
    lms = [model_of("GPT2"), model_of("Cohere"), packed_model()]
    lms.append(model_of("Phi3", partial_rotary_factor=0.5, dtype=torch.float32))  # detected at the first forward pass
    lms.append(model_of("SmolLM3", num_hidden_layers=4))  # one of its layers has no RoPE
    lms.append(adapted_model(targets=["q_proj", "embed_tokens"], tie_word_embeddings=False))
    for lm in lms:
        sampler = sampler_of(lm)
        assert sampler.packed_model is None and sampler.runner is PagedRunner
        assert bool(sampler.generate(Prompts.of(prompts_of()), 2).mask.any())


def test_a_layer_with_other_arithmetic_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = model_of()
    assert build_packed_cpu_model(lm) is not None
    layer: Any = lm.backbone.layers[1]  # type: ignore[index]
    plain = layer.mlp.forward
    monkeypatch.setattr(layer.mlp, "forward", lambda x: plain(x) * 1.5)
    assert build_packed_cpu_model(lm) is None
