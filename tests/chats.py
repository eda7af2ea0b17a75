"""Chat templates and tiny tokenizers that know their control tokens: for the tests of conversations.

The templates are those that TRL's package carries, and one in the style of Mistral, which it does not.
"""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import Any

STOPS = {
    "cohere": ("<|END_OF_TURN_TOKEN|>",),
    "deepseek": ("<｜end▁of▁sentence｜>",),
    "gemma4": ("<eos>", "<turn|>", "<|tool_response>"),
    "gemma": ("<eos>", "<end_of_turn>"),
    "glm": ("<|endoftext|>", "<|user|>", "<|observation|>"),
    "gptoss": ("<|return|>", "<|call|>"),
    "lfm2": ("<|im_end|>",),
    "llama3": ("<|eot_id|>", "<|eom_id|>"),
    "mistral": ("</s>",),
    "muse": ("<|eot|>",),
    "nemotron": ("<|im_end|>",),
    "phi3": ("<|endoftext|>", "<|end|>"),
    "qwen": ("<|im_end|>", "<|endoftext|>"),
}
"""The stop tokens of a family of templates, the tokenizer's own end token first."""
MISTRAL = """{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}
{%- if tools and loop.first %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif -%}
[INST] {{ m.content }}[/INST]
{%- elif m.role == 'assistant' and m.tool_calls %}[TOOL_CALLS] [
{%- for call in m.tool_calls -%}
{%- if call.id | length != 9 %}{{ raise_exception('an id has nine letters') }}{% endif -%}
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}
{{- ", " if not loop.last else "]" }}{% endfor %}{{ eos_token }}
{%- elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}
{%- elif m.role == 'tool' -%}
[TOOL_RESULTS] {"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]
{%- endif %}{% endfor %}"""
_MARK = re.compile(
    r"<\|[^|<>\s]+\|>|<[^<>\s|]+\|>|<\|[^<>\s|]+>|<｜[^｜]+｜>|\[/?[A-Z_]{3,}\]"
    r"|</?(?:think|tool_call|tool_response|start_of_turn|end_of_turn|arg_key|arg_value)>"
)
_UNMARKED = re.compile(r"</?(?:think|tool_call|tool_response)>")
"""Tokens of their own that tokenizers do not call special (Qwen)."""


def template_folder() -> Path:
    spec = importlib.util.find_spec("trl")
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / "chat_templates"


NAMES = (
    *("cohere", "cohere2", "deepseek_r1_distill", "deepseekv3", "gemma", "gemma3", "gemma4_v2", "gemma4_v5", "glm4moe"),
    *("gptoss", "lfm2", "lfm2_2_5", "lfm2_v2", "llama3", "llama3_1", "llama3_2", "mistral", "muse_glimmer"),
    *("nemotron_3_nano", "phi3", "qwen2_5", "qwen2_5_vl", "qwen3", "qwen3_5_think", "qwen3_8", "qwen3_instruct_2507"),
)
"""The templates that are tried. TRL has more of each family."""


def stops_of(name: str) -> tuple[str, ...]:
    return next(stops for family, stops in STOPS.items() if name.startswith(family))


@cache
def chat_tokenizer(name: str, kind: str = "bytes") -> Any:
    """A tokenizer of a few hundred tokens with this chat template, whose control tokens are tokens of its own.

    `kind` is bytes (most models), or spaces: as SentencePiece, with a space before a document, and with control tokens
    that swallow the space behind them (Phi-3).
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    template = MISTRAL if name == "mistral" else (template_folder() / f"{name}.jinja").read_text()
    stops = stops_of(name)
    marks = sorted({*_MARK.findall(template), *stops, "<bos>"})
    plain = [mark for mark in marks if _UNMARKED.fullmatch(mark)]
    tokenizer = Tokenizer(models.BPE(byte_fallback=kind == "spaces"))
    alphabet: list[str] = []
    if kind == "bytes":
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    else:
        alphabet = [chr(i) for i in range(32, 127)] + ["\n", "\t", "▁"]
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    tokens = [f"<0x{i:02X}>" for i in range(256)] if kind == "spaces" else []
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=alphabet, special_tokens=tokens, show_progress=False, max_token_length=12
    )
    tokenizer.train_from_iterator([template[:3000], "\n\n\n 12 34\n", "higher lower tall towers"], trainer)
    swallows = kind == "spaces"
    tokenizer.add_special_tokens(
        [AddedToken(m, normalized=False, special=True, rstrip=swallows) for m in marks if m not in plain]
    )
    tokenizer.add_tokens([AddedToken(m, normalized=False, special=False) for m in plain])
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token=stops[0], clean_up_tokenization_spaces=False
    )
    made.chat_template = template
    return made


def stop_ids(name: str, tokenizer: Any) -> list[int]:
    return [tokenizer.convert_tokens_to_ids(stop) for stop in stops_of(name)]
