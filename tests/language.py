"""Tiny language models for the tests: in float64 with rollouts of them, and as a folder with a real tokenizer."""

from __future__ import annotations

import json
import random
import re
import shutil
import string
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ascent.core.sampling_params import SamplingParams
from ascent.core.types import Batch, Prompts, Rollouts, to_batch
from ascent.inference.engine import LocalEngine
from ascent.models import LanguageModel
from ascent.rollout.conversations import TurnReply
from ascent.training.language_learner import LanguageLearner

VOCAB, END = 37, 3
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": END,
    "eos_token_id": END,
}


class ExactNorm(torch.nn.Module):
    """transformers' own norms go through float32 whatever they are given; this one stays in float64."""

    def __init__(self, norm: Any):
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon
        self.centers = type(norm).__name__.endswith("LayerNorm")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x - x.mean(-1, keepdim=True) if self.centers else x
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class Tokens:
    """A tokenizer that engines never ask for words."""

    eos_token_id = END
    chat_template = None


WINDOW = {"sliding_window": 16}
THREE = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "num_hidden_layers": 3}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2} | {
    "image_size": 28,
    "patch_size": 14,
}
CHUNKED = {"attention_chunk_size": 16, "num_local_experts": 2, "intermediate_size_mlp": 48, "num_hidden_layers": 4}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    **{kind: {} for kind in ("Llama", "Qwen2", "Phi3", "Phi", "Olmo", "Olmo2", "Granite", "Cohere", "Gemma")},
    **{kind: {} for kind in ("GPT2", "Bloom", "Falcon", "GPTNeoX", "StableLm", "Nemotron", "Mpt", "Glm4", "SmolLM3")},
    **{kind: dict(WINDOW) for kind in ("Mistral", "Mixtral", "Starcoder2", "Olmo3", "Cohere2")},
    "OPT": {"word_embed_proj_dim": 32, "ffn_dim": 48},
    "GPTJ": {"rotary_dim": 8},
    "GPTNeo": {"attention_types": [[["global", "local"], 1]], "num_hidden_layers": 2, "window_size": 16},
    "Qwen3": WINDOW | {"use_sliding_window": True, "max_window_layers": 1},
    "Gemma2": WINDOW | {"attn_logit_softcapping": 5.0},
    "Gemma3Text": WINDOW | THREE,
    "Gemma3": {
        "text_config": WINDOW | THREE,
        "vision_config": VISION,
        "mm_tokens_per_image": 4,
    },
    "GptOss": WINDOW | {"num_local_experts": 4},
    "Llama4Text": CHUNKED,
    "Qwen3_5": {
        "text_config": {"num_hidden_layers": 4, "linear_num_value_heads": 2, "linear_num_key_heads": 2}
        | {"linear_key_head_dim": 8, "linear_value_head_dim": 8},
        "vision_config": {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16},
    },
}
"""The architectures that are tried, by the names of their configs, and what they need beside SHAPE.

Windows and chunks are of 16 tokens. Where there is a `text_config`, the rest is not about text.
"""


def config_of(kind: str, **more: Any) -> Any:
    """The config of a tiny model; `dropout` is the value of everything in it that is a rate of dropout."""
    import transformers

    dropout = more.pop("dropout", None)
    own = ARCHITECTURES.get(kind, {})
    shape = {name: value for name, value in SHAPE.items() if kind != "Falcon" or name != "head_dim"}
    text = shape | own.get("text_config", own) | more
    config = getattr(transformers, f"{kind}Config")(**(own | {"text_config": text} if "text_config" in own else text))
    for name, value in vars(config.get_text_config()).items():
        if dropout is not None and "drop" in name and isinstance(value, float | int):
            setattr(config.get_text_config(), name, dropout)
    return config


def model_of(kind: str = "Llama", seed: int = 2, dtype: torch.dtype = torch.float64, **more: Any) -> LanguageModel:
    """A random model of this architecture whose next token is far from uniform."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_config(config_of(kind, **more)).to(dtype).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.copy_(torch.randn(p.shape, generator=generator) * 0.25)
    for name, module in list(model.named_modules()):
        if hasattr(module, "variance_epsilon") and dtype == torch.float64:
            model.set_submodule(name, ExactNorm(module))
    return LanguageModel(model, Tokens())


def prompts_of(lengths: tuple[int, ...] = (5, 2, 7), seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(VOCAB, (len(lengths), max(lengths)), generator=generator)
    return torch.where(torch.arange(max(lengths)) < torch.tensor(lengths)[:, None], prompt, -1)


def sampler_of(lm: LanguageModel, limit: int = 9, seed: int = 0, rows: int = 0, **more: Any) -> LocalEngine:
    temperature, stops = more.pop("temperature", 1.0), more.pop("stops", None)
    generator, support = torch.Generator().manual_seed(seed), SamplingParams(**more)
    return LocalEngine(lm, limit, temperature, generator, support, rows, stops)


class AtOnce:
    """Episodes that a function answers: from a response and its tokens so far to what follows, or nothing."""

    turn_tokens, has_step_rewards = 0, True

    def __init__(self, answer: Callable[[int, list[int]], list[int]]):
        self.answer = answer
        self.so_far: dict[int, list[int]] = {}
        self.ready: list[tuple[int, TurnReply]] = []

    def __call__(self, prompts: Prompts, samples: int, seeds: list[int]) -> AtOnce:
        made = AtOnce(self.answer)
        made.turn_tokens = self.turn_tokens
        return made

    def submit_turn(self, response: int, turn: list[int]) -> None:
        tokens = self.so_far.setdefault(response, [])
        tokens += turn
        following = list(self.answer(response, list(tokens)))
        tokens += following
        self.ready.append((response, TurnReply(following)))

    def poll(self, wait: bool) -> list[tuple[int, TurnReply]]:
        ready, self.ready = self.ready, []
        return ready

    def close(self) -> None:
        self.ready = []


class InAnyOrder(AtOnce):
    """The same answers, in an order and after a number of looks that a seed decides."""

    def __init__(self, answer: Callable[[int, list[int]], list[int]], seed: int):
        super().__init__(answer)
        self.seed, self.rng = seed, random.Random(seed)

    def __call__(self, prompts: Prompts, samples: int, seeds: list[int]) -> InAnyOrder:
        made = InAnyOrder(self.answer, self.seed)
        made.turn_tokens = self.turn_tokens
        return made

    def poll(self, wait: bool) -> list[tuple[int, TurnReply]]:
        self.rng.shuffle(self.ready)
        count = max(int(wait), self.rng.randint(0, 2) if self.rng.random() < 0.3 else 0)
        arrived, self.ready = self.ready[:count], self.ready[count:]
        return arrived


def batch_of(lm: LanguageModel, samples: int = 4, **more: Any) -> Batch:
    """Sampled groups with random rewards, ready for credit."""
    return rewarded(sampler_of(lm, **more).generate(Prompts.of(prompts_of()), samples))


def rewarded(rollouts: Rollouts) -> Batch:
    generator = torch.Generator().manual_seed(9)
    reward = torch.randn(*rollouts.mask.shape[:2], 1, generator=generator, dtype=torch.float64)
    valid = torch.ones(rollouts.mask.shape[:2], dtype=torch.bool)
    return to_batch(
        rollouts, reward=reward, valid=valid, correct=reward.squeeze(-1) > 0, logp_old=rollouts.logp_sampler
    )


def gradient_of(learner: LanguageLearner) -> torch.Tensor:
    return torch.cat(
        [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in learner.trainable()]
    )


# ---- a model as a folder, with words ---------------------------------------------------------------

START, STOP, CHARACTERS = (
    "<|im_start|>",
    "<|im_end|>",
    string.digits + string.ascii_letters + string.punctuation + " \n",
)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer() -> Any:
    """One token a printable character, an end token, and a chat template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<unk>", START, STOP]
    vocab = {token: i for i, token in enumerate([*special, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token=START,
        eos_token=STOP,
        pad_token=STOP,
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = TEMPLATE
    return made


def write_tiny(folder: Path, seed: int = 0, kind: str = "Llama", **more: Any) -> Path:
    """A random Llama (or another kind) of 30,000 parameters with this tokenizer, as a folder that `--model` takes.

    Its tokens are far from equally likely, and one in about thirty ends the response.
    """
    import transformers

    tokenizer = tiny_tokenizer()
    ends = tokenizer.eos_token_id
    shape = {"vocab_size": len(tokenizer), "eos_token_id": ends, "pad_token_id": ends, "bos_token_id": None}
    longest = {"max_position_embeddings": 4096}
    model = transformers.AutoModelForCausalLM.from_config(config_of(kind, **shape | longest | more)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.copy_(torch.randn(p.shape, generator=generator) * 0.25)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def smollm2_folder() -> str:
    """What tools/smollm2.py prints: it makes the folder where it is not there yet."""
    tool = Path(__file__).parent.parent / "tools" / "smollm2.py"
    return subprocess.run([sys.executable, tool], capture_output=True, text=True, check=True).stdout.strip()


def shorten(model: Path, folder: Path, layers: int = 4) -> None:
    """A folder with the first layers of a model, and all that is around them."""
    later = re.compile(rf"model\.layers\.(?!(?:{'|'.join(map(str, range(layers)))})\.)")
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    with safe_open(model / "model.safetensors", "pt") as whole:
        kept = {name: whole.get_tensor(name) for name in whole.keys() if not later.match(name)}  # noqa: SIM118
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))


def train_smollm2(model: str, folder: Path) -> None:
    """A run of one step in `folder/run`, with a reward that differs within a group, so that something is learned."""
    from ascent.cli.main import main

    folder.mkdir()
    problems, rewards = folder / "problems.jsonl", folder / "mine.py"
    rows = [{"prompt": f"What is {a} + {b}?", "answer": str(a + b)} for a in range(4) for b in range(4)]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    noise = "return zlib.crc32(response.encode()) % 97 / 97"
    rewards.write_text(f"import zlib\n\n\ndef noise(prompt, response, answer, **columns):\n    {noise}\n")
    arguments = ["train", f"jsonl:{problems}", "--model", model, "--check", "number", "--record-every", "1"]
    arguments += ["--reward", f"python:{rewards}:noise", "--lr", "1e-4", "--temperature", "1.3", "--no-preflight"]
    few = ["--steps", "1", "--prompts", "1", "--samples", "2", "--max-tokens", "3", "--eval-prompts", "1"]
    assert main([*arguments, *few, "--out", str(folder / "run")]) == 0
