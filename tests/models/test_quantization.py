"""A base in 4 bits below LoRA's adapters: its numbers, both engines, the learner, runs, and what is refused."""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import ascent
from ascent.build.backends import backend_of
from ascent.core.algorithms import ALGORITHMS
from ascent.core.errors import ConfigError
from ascent.inference.runners.paged import PagedRunner
from ascent.models import LanguageModel
from ascent.models.causal_lm import CausalLM
from ascent.models.decoder_model import DecoderModel
from ascent.models.lora import AdapterCopies, fuse_lora, merge_linears
from ascent.models.quantization import (
    NF4_LEVELS,
    Linear4bit,
    dequantize,
    dequantize_linears,
    parameter_count,
    quantize,
    quantize_linears,
    quantized_parameter_count,
)
from ascent.ops import decode_ops
from ascent.settings import configure
from ascent.training.language_learner import LanguageCritic, LanguageLearner
from ascent.training.micro_batches import update_operations
from ascent.workflows.planning.cost_model import GpuCostModel
from ascent.workflows.planning.gpus import GPUS
from ascent.workflows.planning.model_shapes import shape_of
from tests.inference.test_cuda_graph_runner import DEVICE, decoder_of, drawn_by, needs_triton, same
from tests.language import batch_of, model_of, write_tiny
from tests.models.test_lora import SOME, adapter_beside, move

WIDE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
"""Rows of 64 and 128 numbers: blocks of 64 fit."""


def packed_model(kind: str = "Llama", targets: Any = "all-linear", dtype: torch.dtype = torch.float64) -> LanguageModel:
    """A random model in 4 bits, with adapters that do something."""
    from peft import LoraConfig, get_peft_model

    lm = model_of(kind, dtype=dtype, **WIDE)
    lm.model.requires_grad_(False)
    quantize_linears(lm.model, lm.backbone, torch.device("cpu"), dtype)
    torch.manual_seed(0)
    get_peft_model(lm.model, LoraConfig(r=3, lora_alpha=7, target_modules=targets))
    move(lm)
    return lm


def widened(lm: LanguageModel) -> LanguageModel:
    """The same model with ordinary matrices."""
    model = copy.deepcopy(lm.model)
    dequantize_linears(model)
    return LanguageModel(model, lm.tokenizer)


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("wide") / "model", **WIDE)


# ---- the numbers -------------------------------------------------------------------------------------


def weights(dtype: torch.dtype) -> Tensor:
    """Numbers that every machine computes alike."""
    weight = ((torch.arange(9 * 192) * 7919 % 1009 - 504).float() ** 3 / 504**3).view(9, 192)
    weight[2, 64:128], weight[3, 5] = 0.0, 40.0  # a block of nothing, and one number that is alone in its size
    return weight.to(dtype)


def digest(*tensors: Tensor) -> str:
    return hashlib.sha256(b"".join(t.contiguous().view(torch.uint8).numpy().tobytes() for t in tensors)).hexdigest()[
        :16
    ]


@pytest.mark.parametrize(
    ("dtype", "packed_and_scale", "made_again"),
    [
        (torch.float32, "ea6c66b4309a5fca", "6d36ee2b74411fb0"),
        (torch.bfloat16, "792cd58df7eb46a0", "ebb84f623f32c0ee"),
        (torch.float16, "9db2ca8f41c659a2", "855f65e618c92aed"),
    ],
)
def test_the_numbers_are_those_of_bitsandbytes(dtype: torch.dtype, packed_and_scale: str, made_again: str) -> None:
    """Of bitsandbytes 0.50.2, `functional.quantize_4bit(weights(dtype), blocksize=64, quant_type="nf4")` and back."""
    packed, scale = quantize(weights(dtype))
    assert digest(packed, scale) == packed_and_scale
    assert digest(dequantize(packed, scale, dtype)) == made_again


def test_each_number_is_its_nearest_level() -> None:
    weight = weights(torch.float32)
    packed, scale = quantize(weight)
    found = dequantize(packed, scale, torch.float64)
    levels = torch.tensor(NF4_LEVELS).double() * scale.double().repeat_interleave(64, -1)[..., None]
    best = (levels - weight.double()[..., None]).abs().amin(-1)
    assert ((found - weight.double()).abs() - best).abs().max() < 1e-6
    assert packed.dtype == torch.uint8 and packed.shape == (9, 96) and scale.shape == (9, 3)


def test_on_the_way_back_the_matrix_is_the_same() -> None:
    torch.manual_seed(0)
    matrix = Linear4bit(nn.Linear(64, 5), torch.device("cpu"), torch.float64)
    x = torch.randn(3, 64, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(matrix, x) and torch.autograd.gradgradcheck(matrix, x)
    assert matrix(x).grad_fn.saved_tensors == (), "nothing is kept"  # type: ignore[union-attr]


# ---- sampler and learner -----------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "targets"),
    [("Llama", "all-linear"), ("Qwen2", SOME), ("Qwen3", ["o_proj"]), ("Phi3", "all-linear"), ("Gemma", "all-linear")],
)
def test_a_packed_model_draws_what_the_slow_path_draws(kind: str, targets: Any) -> None:
    """And its log-probs are those of the model whose matrices are ordinary, by transformers and peft."""
    lm = packed_model(kind, targets)
    decoder = decoder_of(lm)
    found = drawn_by(decoder, lm, 2, rows=3)
    same(found, drawn_by(PagedRunner, lm, 2, rows=3))
    same(found, drawn_by(PagedRunner, widened(lm), 2, rows=3))
    addresses = DecoderModel.of(lm.model).addresses()
    move(lm)
    assert DecoderModel.of(lm.model).addresses() == addresses
    same(drawn_by(decoder, lm, 1, greedy=True), drawn_by(PagedRunner, widened(lm), 1, greedy=True))


@pytest.mark.parametrize("targets", ["all-linear", SOME])
def test_gradients_are_those_of_the_same_model_with_ordinary_matrices(targets: Any) -> None:
    """So are the reference, which is the base alone, and the values of a critic with a backbone of its own."""
    lm, row = packed_model("Qwen2", targets), ALGORITHMS["grpo"]
    found = []
    for model in (lm, widened(lm)):
        learner = LanguageLearner(model, row.update, True, row.outputs, critic=LanguageCritic(model, shared=False))
        learner.critic.head.weight.data.fill_(0.3)
        batch = batch_of(lm)
        scored = learner.score(batch, frozenset({"logp_old", "logp_ref", "value"}))
        logp = learner.forward(batch).logp
        grads = torch.autograd.grad((logp * batch.mask).sum(), list(model.trained().values()))
        found.append([*scored.values(), logp.detach(), *grads])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")
def test_in_half_precision_sampler_and_learner_round_in_the_same_places() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(64, 24).bfloat16().requires_grad_(False)
    a, b = torch.randn(3, 64), torch.randn(24, 3)
    packed = adapter_beside(Linear4bit(plain, torch.device("cpu"), torch.bfloat16), a, b, 1 / 3)
    ordinary = nn.Linear(64, 24).bfloat16().requires_grad_(False)
    ordinary.weight.data, ordinary.bias = packed.base_layer.weight, plain.bias
    wide = adapter_beside(ordinary, a.clone(), b.clone(), 1 / 3)
    x = torch.randn(9, 64).bfloat16()
    copies = AdapterCopies()
    product = merge_linears([packed], copies)
    copies.refresh()
    assert fuse_lora(packed) and fuse_lora(wide)
    assert torch.equal(product(x, decode_ops), packed(x)) and torch.equal(packed(x), wide(x))
    grads = []
    for module in (packed, wide):
        given = x.clone().requires_grad_()
        module(given).float().square().sum().backward()
        grads.append([given.grad, module.lora_A["default"].weight.grad, module.lora_B["default"].weight.grad])
    assert all(torch.equal(one, two) for one, two in zip(*grads, strict=True))


def test_parameters_are_counted_as_if_none_were_packed() -> None:
    plain, lm = model_of("Qwen2", **WIDE), packed_model("Qwen2")
    adapters = sum(p.numel() for p in lm.trained().values())
    assert parameter_count(lm.model) - adapters == parameter_count(plain.model)
    assert (
        quantized_parameter_count(lm.model)
        == shape_of(plain.model).quantizable
        > 0
        == quantized_parameter_count(plain.model)
    )
    work = ([4], [[3, 2]])
    less = update_operations(plain, *work)[0]
    assert update_operations(lm, *work)[0] == less + 6 * adapters * 9
    bits, sixteen = (GpuCostModel(shape_of(plain.model), GPUS["h200"], bits=bits) for bits in (4, 0))
    held = [p.numel() * (p.element_size() if p.dtype == torch.uint8 else 2) for p in lm.model.parameters()]
    scales = sum(m.scale.numel() for m in lm.model.modules() if isinstance(m, Linear4bit))
    assert bits.parameter_bytes == sum(held) + 2 * scales - 2 * adapters < sixteen.parameter_bytes
    assert bits.decode_seconds(8, 0) > sixteen.decode_seconds(8, 0)


# ---- runs --------------------------------------------------------------------------------------------


def test_the_base_is_the_same_in_every_precision_and_what_is_saved_is_what_was_trained(
    wide_folder: Path, tmp_path: Path
) -> None:
    lms = [CausalLM(str(wide_folder), dtype=d, device="cpu", lora=2, bits=4).load() for d in ("float32", "bfloat16")]
    one, two = ([m for m in lm.model.modules() if isinstance(m, Linear4bit)] for lm in lms)
    assert len(one) == 14 and all(torch.equal(a.packed, b.packed) for a, b in zip(one, two, strict=True))
    lm, ids = lms[0], torch.tensor([[1, 2, 3, 4]])
    move(lm)
    lm.save(tmp_path / "merged")
    saved = CausalLM(str(tmp_path / "merged"), device="cpu").load()
    assert (saved.model(ids).logits - lm.model(ids).logits).abs().max() < 1e-4
    assert all(isinstance(m, Linear4bit) for m in one), "the model itself stays as it is"
    plain = CausalLM(str(wide_folder), device="cpu", lora=2).load()
    assert (plain.model(ids).logits - lm.model(ids).logits).abs().max() > 1e-2


@pytest.mark.long
@pytest.mark.parametrize("row", ["grpo", pytest.param("ppo", marks=pytest.mark.smoke)])
def test_a_run_resumes_to_the_same_bits_and_is_exported(row: str, wide_folder: Path, tmp_path: Path) -> None:
    problems, rewards = tmp_path / "sums.jsonl", tmp_path / "mine.py"
    problems.write_text("".join(json.dumps({"prompt": f"{i} + {i}", "answer": str(2 * i)}) + "\n" for i in range(6)))
    rewards.write_text("def long(prompt, response, answer, **columns):\n    return len(response) / 10\n")
    given: dict[str, Any] = {"steps": 3, "prompts": 2, "samples": 2, "max_tokens": 5, "max_prompt": 32, "threads": 1}
    given |= {"reward_workers": 1, "reward": (f"python:{rewards}:long",), "show": False, "checkpoint_every": 2}
    given |= {"policy.model": str(wide_folder), "policy.lora": 2, "policy.bits": 4, "algorithm": row, "keep": 9}
    whole = ascent.train(f"jsonl:{problems}", out=tmp_path / "a", **given)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    ascent.api.resume(tmp_path / "b", from_step=2)
    for name in ("params", "optimizer"):
        one, two = (p / "checkpoints" / "step_000003" / f"{name}.safetensors" for p in (tmp_path / "a", tmp_path / "b"))
        assert one.read_bytes() == two.read_bytes()
        assert not any("packed" in key or "scale" in key for key in load_file(one)), "the base is not in a checkpoint"
    assert all(0 < line["sampling/sampling_logp_difference/mean"] < 1e-4 for line in whole.metrics)
    ascent.export(tmp_path / "a", tmp_path / "out")
    assert "in 4 bits (NF4), LoRA of rank 2, merged" in (tmp_path / "out" / "README.md").read_text()
    assert not any("packed" in key for key in load_file(tmp_path / "out" / "model.safetensors"))


# ---- what is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"bits": 8, "lora": 4}, "--policy.bits is 8: set 4"),
        ({"bits": 4}, "for what is not trained: set --policy.lora 16"),
        ({"bits": 4, "last_layers": 1}, "for what is not trained"),
        ({"bits": 4, "lora": 4, "engine": "vllm", "engine_python": "."}, "a server holds the whole model in 16 bits"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        CausalLM("model", **settings)


def test_shards_are_refused(wide_folder: Path) -> None:
    more = {"model": str(wide_folder), "policy.lora": 2, "policy.bits": 4, "ranks.shard": "shard"}
    with pytest.raises(ConfigError, match=r"shard with --policy\.bits 4: FSDP2"):
        backend_of(config := configure("gsm8k", more)).check(config)


def test_models_that_cannot_be_packed_are_refused(tiny_folder: Path, wide_folder: Path, tmp_path: Path) -> None:
    def load(folder: Path) -> LanguageModel:
        return CausalLM(str(folder), device="cpu", lora=2, bits=4).load()

    with pytest.raises(ConfigError, match="no linear layer whose in_features is a multiple of 64"):
        load(tiny_folder)
    broken = shutil.copytree(wide_folder, tmp_path / "broken")
    state = load_file(broken / "model.safetensors")
    next(value for name, value in state.items() if "down_proj" in name)[0, 0] = float("nan")
    save_file(state, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match="parameters that are not finite"):
        load(broken)
    packed = shutil.copytree(wide_folder, tmp_path / "packed")
    config = json.loads((packed / "config.json").read_text())
    method = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": method}))
    with pytest.raises(ConfigError, match=r"cannot be loaded|stored with quantized weights"):
        CausalLM(str(packed), device="cpu").load()


# ---- on a GPU ----------------------------------------------------------------------------------------


@needs_triton
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bitsandbytes_makes_the_same_numbers_on_a_gpu(dtype: torch.dtype) -> None:
    import bitsandbytes  # noqa: F401

    weight = weights(dtype)
    here, there = quantize(weight), quantize(weight.cuda())
    assert all(torch.equal(one, two.cpu()) for one, two in zip(here, there, strict=True))
    assert torch.equal(dequantize(*here, dtype), dequantize(*there, dtype).cpu())
    matrix = Linear4bit(nn.Linear(192, 9, dtype=dtype), torch.device("cuda"), dtype)
    for rows in (1, 5, 300):
        x = torch.randn(rows, 192, device="cuda", dtype=dtype)
        want = x.double() @ matrix.weight.double().t() + matrix.bias.double()  # type: ignore[union-attr]
        assert (matrix(x) - want).abs().max() < {4: 1e-4, 2: 3e-2}[dtype.itemsize] * want.abs().max()


@needs_triton
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Phi3"])
def test_graphs_of_a_packed_model_draw_what_the_slow_path_draws(kind: str) -> None:
    import bitsandbytes  # noqa: F401

    lm = packed_model(kind, dtype=torch.float32)
    lm.model.to("cuda")
    decoder = decoder_of(lm)
    for rows in (5, 64):
        same(drawn_by(decoder, lm, rows=rows), drawn_by(PagedRunner, widened(lm), rows=rows), 1e-4)
    move(lm)
    same(drawn_by(decoder, lm), drawn_by(PagedRunner, widened(lm)), 1e-4)
