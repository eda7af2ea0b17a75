"""`ascent plan` and `ascent explain` are pinned as a whole: plans of models and machines, and every algorithm."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from ascent.cli import main as cli
from ascent.core.algorithms import ALGORITHMS
from tests.pinned import difference, pinned_values, shortened, write_pinned

NAME = "plans.json"
SMALL = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
LARGE = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
MODELS = {
    "small": SMALL | {"num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True},
    "large": LARGE | {"num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False},
}
COMMON = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 8192}
PLANS = (
    "gsm8k --model small",
    "gsm8k --model small --gpus 8 --ahead 1 --max-tokens 2000 --answer-spread 1",
    "gsm8k --model small --gpu rtx4090 --policy.lora 16 --algorithm grpo",
    "gsm8k --model small --algorithm ppo --gpus 2 --network 400Gb/s --nodes 2",
    "gsm8k --model large --gpus 8 --nodes 4 --algorithm grpo",
    "gsm8k --model large --gpus 1 --policy.dtype bfloat16",
    "gsm8k --model large --gpu mi300x --gpus 8 --policy.lora 32 --prompt-tokens 1000 --answer-tokens 200",
)


def printed(words: list[str], as_json: bool) -> Any:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = cli.main(words)
    said = json.loads(out.getvalue()) if as_json and status == 0 else out.getvalue().splitlines()
    return shortened([status, said, err.getvalue().splitlines()])


def value_of(case: str, folder: Path) -> Any:
    command, *words = case.split()
    if command == "explain":
        return printed([command, *words], False)
    where = words.index("--model") + 1
    model = folder / words[where]
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(COMMON | MODELS[words[where]]))
    words[where] = str(model)
    text = json.dumps([printed(["plan", *words], False), printed(["plan", *words, "--json"], True)])
    return json.loads(text.replace(str(folder), "ROOT"))


CASES = (*(f"plan {plan}" for plan in PLANS), *(f"explain {name}" for name in ALGORITHMS))


@pytest.mark.parametrize("case", CASES)
def test_output_equals_the_pinned_output(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    value = json.loads(json.dumps(value_of(case, tmp_path)))
    assert not difference(value, pinned_values(NAME)[case], case)


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as temporary:
        write_pinned(NAME, {case: value_of(case, Path(temporary)) for case in CASES})
