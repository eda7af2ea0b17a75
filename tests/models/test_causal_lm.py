"""Settings of a language model that cannot work are refused with a reason, and a model is loaded as they say."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ascent.core.errors import ConfigError
from ascent.models.causal_lm import (
    PYTHON_MODELS,
    CausalLM,
    LanguageModel,
    lora_settings,
    register_model,
    restore_python_model,
)
from tests.language import model_of, tiny_tokenizer, write_tiny

NEGATIVE = "--policy.lora, .rows, .last-layers and .gpu-memory must be 0 or more"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *(({name: -1}, NEGATIVE) for name in ("lora", "rows", "last_layers", "gpu_memory")),
        (
            {"lora": 1, "last_layers": 1},
            "--policy.lora with --policy.last-layers: both say which parameters are trained; set one of them",
        ),
        (
            {"lora": 1, "lora_alpha": 0.0},
            "--policy.lora-alpha is 0: it scales the adapters, so it must be above 0",
        ),
        (
            {"lora": 1, "lora_alpha": -2.5},
            "--policy.lora-alpha is -2.5: it scales the adapters, so it must be above 0",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        CausalLM("m", **settings)
    assert str(refusal.value) == message


def test_settings_at_their_bounds_are_accepted() -> None:
    assert CausalLM("m", lora=0, rows=0, last_layers=0, gpu_memory=0.0) == CausalLM("m")
    assert CausalLM("m", lora=0, lora_alpha=0.0).lora_alpha == 0, "it scales nothing"
    assert CausalLM("m", lora=1, last_layers=0).lora == CausalLM("m", last_layers=1).last_layers == 1


def test_a_missing_model_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"^--model is missing: set the folder or the hub name of a causal language model$"
    ):
        CausalLM().load()


@pytest.mark.parametrize(
    ("package", "settings", "message"),
    [
        ("transformers", {}, "language models need transformers: pip install 'ascent-rl[lm]'"),
        ("peft", {"lora": 2}, "--policy.lora needs peft: pip install 'ascent-rl[lm]'"),
    ],
)
def test_a_missing_package_is_named(
    package: str, settings: dict[str, int], message: str, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError) as refusal:
        CausalLM(str(tiny_folder), device="cpu", **settings).load()  # type: ignore[arg-type]
    assert str(refusal.value) == message


def test_the_model_of_another_run_is_to_be_named_by_its_folder() -> None:
    with pytest.raises(ConfigError, match=r"^--model run:model: this run was made .* Set --model RUN/model$"):
        CausalLM("run:model", device="cpu").load()


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    """Load a model of which one matrix is in float8."""
    import transformers

    folder = write_tiny(tmp_path / "tiny")
    load = transformers.AutoModelForCausalLM.from_pretrained

    def in_float8(*args: Any, **more: Any) -> Any:
        model = load(*args, **more)
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.to(torch.float8_e4m3fn), requires_grad=False)
        return model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", in_float8)
        with pytest.raises(
            ConfigError, match=r"is stored with quantized weights: give the plain model, .*--policy\.bits 4$"
        ):
            CausalLM(str(folder), device="cpu").load()


@pytest.mark.parametrize("last", [1, 2])
def test_only_the_last_layers_and_the_final_norm_are_trained(last: int, tiny_folder: Path) -> None:
    lm = CausalLM(str(tiny_folder), device="cpu", last_layers=last).load()
    layers = len(lm.model.model.layers)
    every = dict(lm.model.named_parameters())
    kept = (*(f"model.layers.{i}." for i in range(layers - last, layers)), "model.norm.")
    expected = {name for name in every if name.startswith(kept)}
    assert {name for name, p in every.items() if p.requires_grad} == expected
    assert 0 < len(expected) < len(every)


def test_more_last_layers_than_there_are_are_refused(tiny_folder: Path) -> None:
    layers = json.loads((tiny_folder / "config.json").read_text())["num_hidden_layers"]
    CausalLM(str(tiny_folder), device="cpu", last_layers=layers).load()
    with pytest.raises(ConfigError) as refusal:
        CausalLM(str(tiny_folder), device="cpu", last_layers=layers + 1).load()
    assert str(refusal.value) == f"--policy.last-layers {layers + 1}: the model has only {layers}"


def test_last_layers_of_a_model_without_a_list_of_layers_are_refused(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "gpt2", kind="GPT2")  # which calls them h
    with pytest.raises(ConfigError, match=r"^--policy\.last-layers 1: the model has no list of layers$"):
        CausalLM(str(folder), device="cpu", last_layers=1).load()


@pytest.mark.parametrize(
    ("of_model", "of_tokenizer", "ends", "end"),
    [(5, None, {5}, 5), ([9, 4], None, {4, 9}, 4), ([9, 4], 7, {4, 7, 9}, 7), (None, 7, {7}, 7)],
)
def test_end_tokens_are_those_of_the_model_and_of_the_tokenizer(
    of_model: Any, of_tokenizer: int | None, ends: set[int], end: int
) -> None:
    model = model_of().model
    model.generation_config.eos_token_id = of_model
    lm = LanguageModel(model, SimpleNamespace(eos_token_id=of_tokenizer))
    assert (lm.stop_token_ids, lm.eos_token_id) == (ends, end)


def test_a_model_without_an_end_token_is_refused() -> None:
    model = model_of().model
    model.generation_config.eos_token_id = None
    with pytest.raises(ConfigError, match=r"^the model has no end-of-sequence token, so no response could end$"):
        LanguageModel(model, SimpleNamespace(eos_token_id=None))


# ---- models and adapters that are given in Python


@pytest.mark.parametrize("model", [torch.nn.Linear(1, 1), "nobody/nothing", None])
def test_what_is_not_a_language_model_is_refused(model: Any) -> None:
    message = f"model is {type(model).__name__}: give a name on the hub, a folder, or a causal language model of "
    with pytest.raises(ConfigError) as refusal:
        register_model(model, tiny_tokenizer())
    assert str(refusal.value) == message + "transformers, with tokenizer="


def test_a_run_is_resumed_in_its_own_precision(tiny_folder: Path) -> None:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    policy = CausalLM(str(tiny_folder), device="cpu", dtype="bfloat16")
    with pytest.raises(ConfigError) as refusal:
        restore_python_model(policy, model, tiny_tokenizer())
    message = "model is in torch.float32, and this run in bfloat16: model.to(torch.bfloat16)"
    assert str(refusal.value) == message
    name = next(name for name, (given, _) in PYTHON_MODELS.items() if given is model)
    for dtype in ("auto", "float32"):
        assert restore_python_model(replace(policy, dtype=dtype), model, tiny_tokenizer()).model == name  # type: ignore[arg-type]
    del PYTHON_MODELS[name]


def test_adapters_of_another_kind_are_refused() -> None:
    from peft import IA3Config, LoraConfig

    with pytest.raises(ConfigError, match=r"^peft_config is IA3Config: only LoraConfig is supported$"):
        lora_settings(IA3Config())
    settings = {"policy.lora": 4, "policy.lora_alpha": 6.0, "policy.lora_targets": "k_proj,q_proj"}
    assert lora_settings(LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "k_proj"])) == settings
