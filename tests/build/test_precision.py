"""The precision of a new run on a GPU, where nobody says it. Here a CPU stands for the GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ascent
from ascent.build import precision
from ascent.build.assemble import assemble
from ascent.build.backends import backend_of
from ascent.build.precision import float16_obstacle, max_activation
from ascent.build.preflight import precision_line
from ascent.settings import configure
from ascent.workflows.loaded_policy import export
from ascent.workflows.seed_comparison import _is_run_of
from tests.language import model_of, write_tiny

ROWS = [{"prompt": f"{a} plus {b}", "answer": str(a + b)} for a in range(4) for b in range(4)]
FEW = {"prompts": 2, "samples": 3, "max_tokens": 6, "steps": 2, "eval_prompts": 2, "threads": 1, "reward_workers": 1}


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "_device_obstacle", lambda _: None)


def config(model: Path, **more: Any) -> Any:
    return configure("countdown", {"model": str(model), **FEW, **more})


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({}, None),
        ({"algorithm": "dapo", "shaping": "no-shaping"}, None),
        ({"policy.optimizer_state": "float32", "algorithm": "rloo"}, None),
        ({"policy.dtype": "bfloat16"}, "says it"),
        ({"policy.lora": 4}, "adapters"),
        ({"policy.last_layers": 1}, "every parameter"),
        ({"algorithm": "ppo"}, "critic"),
        ({"algorithm": "ppo", "critic": "shared-critic"}, "critic"),
        ({"policy.optimizer_state": "bfloat16"}, "state"),
        ({"update": "trust-region", "policy.dtype": "auto"}, "Adam"),
        ({"policy.engine": "vllm", "policy.engine_url": "http://127.0.0.1:8000"}, "engine"),
    ],
    ids=str,
)
def test_where_float16_is_taken(more: dict[str, Any], why: str | None, tiny_folder: Path) -> None:
    told = float16_obstacle(config(tiny_folder, **more))
    assert told is None if why is None else why in str(told)


@pytest.mark.usefixtures("card")
def test_neither_several_ranks_nor_a_cpu_take_it(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "is_torchrun_process", lambda: True)
    assert "ranks" in str(float16_obstacle(config(tiny_folder)))
    monkeypatch.undo()
    assert "GPU" in str(float16_obstacle(config(tiny_folder)))


def test_the_largest_activation_is_at_least_that_of_any_layer() -> None:
    lm = model_of(dtype=torch.float32)
    ids = torch.randint(lm.vocab_size, precision.PROBE_SHAPE, generator=torch.Generator().manual_seed(0))
    ids[0, 0] = lm.eos_token_id
    with torch.no_grad():
        states = lm.model(input_ids=ids, output_hidden_states=True).hidden_states
    found = max_activation(lm)
    assert max(float(state.abs().max()) for state in states) * (1 - 1e-6) <= found < float("inf")
    assert not lm.backbone._forward_hooks, "nothing is left behind"
    lm.model.get_input_embeddings().weight.data[:] = torch.nan
    assert max_activation(lm) == float("inf")


@pytest.mark.usefixtures("card")
def test_a_model_whose_activations_are_too_large_is_mixed(tmp_path: Path) -> None:
    write_tiny(tmp_path / "large")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "large")
    model.get_input_embeddings().weight.data *= 60_000
    model.save_pretrained(tmp_path / "large")
    parts = assemble(config(tmp_path / "large"))
    try:
        assert parts.policy.model.dtype == torch.bfloat16 and parts.config.policy.dtype == "mixed"
        assert any("activations of a few random tokens are as large as" in note for note in parts.notes)
        assert "computed in mixed precision (--policy.dtype)" in precision_line(parts.learner)  # type: ignore[arg-type]
    finally:
        parts.close()


@pytest.mark.long
def test_a_run_says_what_it_chose_and_an_earlier_one_continues_as_it_began(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(name: str) -> Any:
        more = {"show": False, "preflight": False, "checkpoint_every": 1, "keep": 9, "check": "number", "lr": 1e-3}
        return ascent.train(ROWS, model=str(tiny_folder), out=tmp_path / name, **FEW | more)

    earlier = train("earlier")
    with monkeypatch.context() as patched:
        patched.setattr(precision, "_device_obstacle", lambda _: None)
        run = train("new")
        assert ascent.resume(earlier, from_step=1).config.policy.dtype == "float32"
    assert run.config.policy.dtype == "float16"
    kept = (run.checkpoints[-1] / "params.safetensors").read_bytes()
    again = ascent.resume(run, from_step=1)
    assert (again.checkpoints[-1] / "params.safetensors").read_bytes() == kept
    asked = ascent.load(run).policy.model
    assert asked.dtype == torch.float32, "on a CPU it is asked in float32"
    trained = torch.cat([p.flatten() for p in asked.parameters()])
    assert torch.equal(trained, trained.half().float()), "with the parameters that were trained"
    export(run.folder, tmp_path / "exported")
    config = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert config.get("dtype", config.get("torch_dtype")) == "float16", "and exported as they are"


@pytest.mark.usefixtures("card")
def test_what_is_compared_is_in_one_precision(tiny_folder: Path) -> None:
    both = {name: config(tiny_folder, algorithm=name) for name in ("grpo", "rloo", "ppo")}
    backend = backend_of(both["ppo"])
    dtypes = {name: one.policy.dtype for name, one in backend.align_precision(both).items()}
    assert dtypes == {"grpo": "bfloat16", "rloo": "bfloat16", "ppo": "auto"}, "which is bfloat16 with a critic"
    del both["ppo"]
    assert backend.align_precision(both) is both
    began = replace(both["grpo"], policy=replace(both["grpo"].policy, dtype="float16"))
    assert _is_run_of(both["grpo"], began) and not _is_run_of(began, both["grpo"]), "and it is found again"


def test_what_is_asked_for_stays(tiny_folder: Path) -> None:
    policy = replace(config(tiny_folder).policy, dtype="float16")
    assert policy.load().model.dtype == torch.float16
