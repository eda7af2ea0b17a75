"""vLLM on a CPU, one batch of rollouts per turn, with the log-prob of each sampled token.

Prefix caching is on, so that a prompt's samples share it; it is emptied before each turn, as new weights would.
"""

from __future__ import annotations

import time

import torch
from turns import WORK, answer, wait
from vllm import LLM, SamplingParams
from vllm import __version__ as version


def main() -> None:
    samples, tokens = WORK["samples"], WORK["tokens"]
    llm = LLM(
        WORK["model"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=max(64, len(WORK["prompts"]) * samples),
        enable_prefix_caching=True,
    )
    params = SamplingParams(
        n=samples, temperature=1.0, max_tokens=tokens, ignore_eos=True, logprobs=0, detokenize=False
    )
    prompts = [{"prompt_token_ids": ids} for ids in WORK["prompts"]]
    answer(vllm=version, torch=torch.__version__)
    while True:
        wait()
        llm.reset_prefix_cache()
        begin = time.perf_counter()
        out = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        each = [sample for request in out for sample in request.outputs]
        assert all(len(sample.logprobs) == len(sample.token_ids) for sample in each)
        answer(seconds=seconds, tokens=sum(len(sample.token_ids) for sample in each))


if __name__ == "__main__":
    main()
