"""transformers' generate, one batch of rollouts per turn: sdpa attention, key-value cache, prompts padded on the left.

It computes no log-probs, which would make it slower.
"""

from __future__ import annotations

import time

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers import __version__ as version
from turns import WORK, answer, wait


@torch.inference_mode()
def main() -> None:
    torch.set_num_threads(WORK["threads"])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(WORK["model"], dtype=torch.float32, attn_implementation="sdpa").eval()
    model.generation_config.eos_token_id = None  # every response has the same number of tokens
    prompts, width = WORK["prompts"], max(map(len, WORK["prompts"]))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    config = GenerationConfig(
        max_new_tokens=WORK["tokens"],
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        num_return_sequences=WORK["samples"],
        use_cache=True,
        pad_token_id=0,
        eos_token_id=None,
    )
    answer(transformers=version, torch=torch.__version__)
    while True:
        wait()
        begin = time.perf_counter()
        out = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
        answer(seconds=time.perf_counter() - begin, tokens=out[:, width:].numel())


if __name__ == "__main__":
    main()
